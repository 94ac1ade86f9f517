"""The wheel and the source distribution: an empty environment, and the README's minute from there."""

import json
import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.slow  # installs into an empty environment

CLEAN = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "VIRTUAL_ENV")}


def run(*command, cwd=None):
    command = [*map(str, command)]
    done = subprocess.run(command, capture_output=True, text=True, env=CLEAN, cwd=cwd, timeout=900)
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    return done.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """The wheel and the sdist of the files that git tracks or would track, built by this environment's setuptools."""
    folder = tmp_path_factory.mktemp("built")
    listed = run("git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", cwd=REPOSITORY)
    for name in filter(None, listed.split("\0")):
        target = folder / "source" / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(REPOSITORY / name, target)
    for kind in ("sdist", "wheel"):
        code = f"from setuptools import build_meta; build_meta.build_{kind}({str(folder)!r})"
        run(sys.executable, "-c", code, cwd=folder / "source")
    return folder


def test_the_wheel_has_the_package_and_the_sdist_the_rest(built):
    (wheel,), (sdist,) = built.glob("*.whl"), built.glob("*.tar.gz")
    package = {path.relative_to(built / "source").as_posix() for path in (built / "source/jprm").rglob("*.*")
               if path.is_file() and "__pycache__" not in path.parts and path.name != "README.md"}  # fmt: skip
    with zipfile.ZipFile(wheel) as file:
        assert {name for name in file.namelist() if not name.startswith("jax_prm-")} == package | {"jax_prm.py"}
    with tarfile.open(sdist) as file:
        names = {name.partition("/")[2] for name in file.getnames()}
    others = {"experiments/tiny.py", "examples/tiny_chain.jsonl", "examples/bytes/tokenizer.json", "docs/guide.md"}
    assert package | others | {"tests/tiny.py"} <= names


def test_a_plain_installation_scores_and_says_what_training_needs(built, tmp_path):
    """And with the extra `train`, the README's minute gives what the README says."""
    (wheel,), (sdist,) = built.glob("*.whl"), built.glob("*.tar.gz")
    with tarfile.open(sdist) as file:
        file.extractall(tmp_path, filter="data")
    (unpacked,) = tmp_path.glob("jax_prm-*")
    shutil.rmtree(unpacked / "jprm")  # so that nothing but the wheel is imported
    python, jprm = tmp_path / "environment/bin/python", tmp_path / "environment/bin/jprm"
    run(sys.executable, "-m", "venv", tmp_path / "environment")
    try:
        run(python, "-m", "pip", "install", "-q", "--retries", "1", wheel)
    except AssertionError as error:
        if "No matching distribution" in str(error) or "Connection" in str(error):
            pytest.skip("no package index can be reached")
        raise
    assert "site-packages/jprm/" in run(python, "-c", "import jprm; print(jprm.__file__)", cwd=tmp_path)

    train = [jprm, "train", "experiments/tiny.py", "--workdir", "runs/tiny"]
    refused = subprocess.run([*map(str, train)], cwd=unpacked, env=CLEAN, capture_output=True, text=True, timeout=300)
    assert refused.returncode == 2 and "pip install 'jax-prm[train]'" in refused.stderr, refused.stderr
    run(python, "-m", "pip", "install", "-q", f"{wheel}[train]")
    run(*train, cwd=unpacked)
    run(python, "-m", "pip", "uninstall", "-q", "-y", "optax", "grain", "tensorflow-datasets", "array-record")
    run(jprm, "score", "--model", "runs/tiny", "--input", "examples/tiny_chain.jsonl", "--output", "scored.jsonl",
        cwd=unpacked)  # fmt: skip
    right, wrong = (json.loads(line)["scores"] for line in (unpacked / "scored.jsonl").read_text().splitlines())
    assert min(right) > 0.9 and wrong[0] > 0.9 and max(wrong[1:]) < 0.1, (right, wrong)
