"""examples/tour.ipynb runs from top to bottom in a fresh kernel."""

import json
from pathlib import Path

import pytest

TOUR = Path(__file__).resolve().parent.parent / "examples/tour.ipynb"


def test_the_notebook_is_stored_without_outputs():
    cells = [cell for cell in json.loads(TOUR.read_text())["cells"] if cell["cell_type"] == "code"]
    assert cells and not any(cell["outputs"] or cell["execution_count"] for cell in cells)


@pytest.mark.slow  # trains a tiny model and compiles for three losses and a search
def test_the_notebook_runs(smollm2_gguf):
    nbformat, nbclient = (pytest.importorskip(name, reason=f"needs {name}: the extra `test-notebook`") for name in
                          ("nbformat", "nbclient"))  # fmt: skip
    pytest.importorskip("ipykernel", reason="needs ipykernel: the extra `test-notebook`")
    notebook = nbformat.read(TOUR, as_version=4)
    nbclient.NotebookClient(notebook, timeout=600, resources={"metadata": {"path": str(TOUR.parent)}}).execute()
    said = ["".join(out.get("text", "") for out in cell.get("outputs", ())) for cell in notebook.cells]
    images = [out for cell in notebook.cells for out in cell.get("outputs", ()) if "image/png" in out.get("data", {})]
    assert len(images) == 1
    assert "answer 31, correct: True" in said[-1] and "So the answer" not in said[-1]
    focal = json.loads(said[-3].strip().splitlines()[-1])
    assert len(focal) == 5 and focal[-1] < focal[0]
