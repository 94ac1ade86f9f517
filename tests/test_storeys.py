"""Storeys: what a reader of the core need not know. Circles of files, and the cost of importing a scorer."""

import ast
import functools
import graphlib
import subprocess
import sys
from pathlib import Path

import pytest
from families import breadth

PACKAGE = Path(__file__).resolve().parent.parent / "jprm"

STOREYS = ("io", "core", "methods", "apps")
"""From the ground up, as in docs/architecture.md. A file imports its own storey and lower ones. The core is what is in
`jprm` itself and in folders that are no storey."""

FLOORS = (
    ("decoding", "kernels", "implicit", "worker"),
    ("formats", "answers"),
    ("messages", "layers", "optimizers"),
    ("policy",),
    ("verify",),
    ("judge", "data"),
    ("jobs",),
    ("evaluate",),
    ("evidence", "export"),
    ("search",),
    ("worlds",),
    ("label", "rl"),
)
"""The floors of `jprm/methods`, from the ground up. A package imports only packages on lower floors."""

DOORS = ("__main__", "clients", "testing")
"""Files in `jprm` itself that belong to the apps: users start them or import them, and no other file does."""

TRAINING_ONLY = {"optax", "tensorflow_datasets", "grain", "sympy", "math_verify"}


def _modules():
    files = sorted(PACKAGE.rglob("*.py"))
    names = {".".join(["jprm", *file.relative_to(PACKAGE).with_suffix("").parts]): file for file in files}
    return {name.removesuffix(".__init__"): file for name, file in names.items()}


MODULES = _modules()


def imported(tree):
    """The modules of jprm that a syntax tree imports anywhere: inside functions and for type checkers too."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.split(".")[0] == "jprm")
        elif isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "jprm":
            for alias in node.names:
                submodule = f"{node.module}.{alias.name}"
                yield submodule if submodule in MODULES else node.module


def storey(module):
    folder = (module.split(".") + ["jprm"])[1]
    return "apps" if folder in DOORS else folder if folder in STOREYS else "core"


def unit(module):
    """The package or module that a module is part of, below its storey."""
    parts = module.split(".")[1:] or ["jprm"]
    return parts[1] if parts[0] in STOREYS and len(parts) > 1 else parts[0]


@functools.cache
def edges():
    """What every module imports, read when the first test asks for it."""
    imports = {
        module: set(imported(ast.parse(file.read_text(encoding="utf-8")))) - {module}
        for module, file in MODULES.items()
    }
    return imports | {"jprm": set()}  # the front door names for type checkers what it opens when it is asked for


def test_files_import_their_own_storey_and_lower_ones():
    upward = [
        f"{module} -> {other}" for module, others in edges().items() for other in others
        if STOREYS.index(storey(other)) > STOREYS.index(storey(module))
    ]  # fmt: skip
    assert not upward


def floor(module):
    name = module.split(".")[2]
    return next(i for i, packages in enumerate(FLOORS) if name in packages)


def test_packages_of_methods_import_only_lower_floors():
    wrong = [
        f"{module} -> {other}" for module, others in edges().items() if module.startswith("jprm.methods.")
        for other in others
        if other.startswith("jprm.methods.") and unit(other) != unit(module) and floor(other) >= floor(module)
    ]  # fmt: skip
    assert not wrong


def test_no_circle_of_files():
    graphlib.TopologicalSorter(edges()).prepare()  # raises CycleError, which names one


@pytest.mark.parametrize(
    "statement",
    [
        "import jprm; jprm.load; assert callable(jprm.load)",
        *breadth(["import jprm.score.scorer, jprm.methods.jobs.score, jprm.methods.implicit"]),
    ],
)
def test_scoring_imports_no_trainer(statement):
    code = f"import sys; {statement}; print(sorted({TRAINING_ONLY!r} & {{name.split('.')[0] for name in sys.modules}}))"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=True)
    assert run.stdout.strip() == "[]"
