"""examples/tour.ipynb runs from top to bottom in a fresh kernel."""

import ast
import builtins
import importlib
import importlib.util
import json
import re
from pathlib import Path

import pytest

import jprm

TOUR = Path(__file__).resolve().parents[2] / "examples/tour.ipynb"


def test_the_notebook_is_stored_without_outputs():
    cells = [cell for cell in json.loads(TOUR.read_text())["cells"] if cell["cell_type"] == "code"]
    assert cells and not any(cell["outputs"] or cell["execution_count"] for cell in cells)


def _code():
    """The Python of the notebook and of every page, by where it is."""
    for i, cell in enumerate(json.loads(TOUR.read_text())["cells"]):
        if cell["cell_type"] == "code":
            yield f"tour.ipynb[{i}]", "".join(cell["source"])
    for page in (TOUR.parent.parent / "README.md", *TOUR.parent.parent.glob("docs/**/*.md")):
        for i, block in enumerate(re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)):
            yield f"{page.name}[{i}]", block


def test_what_the_notebook_and_the_pages_import_is_there():
    missing, imports = [], 0
    for where, code in _code():
        for node in ast.walk(ast.parse(code)):
            if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "jprm":
                module = importlib.import_module(node.module)
                for alias in node.names:
                    imports += 1
                    if not hasattr(module, alias.name) and not importlib.util.find_spec(f"{node.module}.{alias.name}"):
                        missing.append(f"{where}: {node.module}.{alias.name}")
    assert imports > 20 and not missing


def _names(code):
    """The names that code defines anywhere, those that it reads, and what it reads of `jprm` without an import."""
    bound, read, imported, parts = set(), set(), {"jprm"}, set()
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Import | ast.ImportFrom):
            bound |= {(alias.asname or alias.name).split(".")[0] for alias in node.names}
            imported |= {alias.name for alias in node.names if isinstance(node, ast.Import)}
        elif isinstance(node, ast.Name):
            (bound if isinstance(node.ctx, ast.Store) else read).add(node.id)
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            bound.add(node.name)
        elif isinstance(node, ast.arg):
            bound.add(node.arg)
        elif isinstance(node, ast.ExceptHandler) and node.name:
            bound.add(node.name)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "jprm":
            parts.add(node.attr)
    parts -= {"__version__", *jprm.__all__, *(name.removeprefix("jprm.") for name in imported)}
    return bound, read, parts


def test_code_of_the_notebook_and_the_pages_lacks_no_import():
    """As in a process of its own: a name is of the block or of an earlier one of its page, a module is imported."""
    lacking, bound, page = [], set(), None
    for where, code in _code():
        name = where.partition("[")[0]
        page, bound = name, bound if name == page else {"display"}
        here, read, parts = _names(code)
        bound |= here
        lacking += [f"{where}: {name}" for name in sorted((read - bound - set(dir(builtins))) | parts)]
    assert not lacking


@pytest.mark.slow  # trains a tiny model and compiles for three losses and a search
def test_the_notebook_runs(smollm2_gguf):
    nbformat, nbclient = (pytest.importorskip(name, reason=f"needs {name}: the extra `test-notebook`") for name in
                          ("nbformat", "nbclient"))  # fmt: skip
    pytest.importorskip("ipykernel", reason="needs ipykernel: the extra `test-notebook`")
    notebook = nbformat.read(TOUR, as_version=4)
    place = {"metadata": {"path": str(TOUR.parent)}}
    nbclient.NotebookClient(notebook, timeout=600, startup_timeout=600, resources=place).execute()
    said = ["".join(out.get("text", "") for out in cell.get("outputs", ())) for cell in notebook.cells]
    images = [out for cell in notebook.cells for out in cell.get("outputs", ()) if "image/png" in out.get("data", {})]
    assert len(images) == 1
    assert "answer 31, correct: True" in said[-1] and "So the answer" not in said[-1]
    focal = json.loads(said[-3].strip().splitlines()[-1])
    assert len(focal) == 5 and focal[-1] < focal[0]
