"""Layers: which unit may import which, lengths of files and functions, and the cost of importing a scorer."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parent.parent / "jprm"

LAYERS = [
    [
        "jprm",
        "progress",
        "steps",
        "fields",
        "free_text",
        "storage",
        "local_copy",
        "tree",
        "jsonl",
        "outputs",
        "folders",
        "multihost",
        "statistics",
        "answers",
        "worker",
        "registry",
        "digests",
        "compile_cache",
        "libtpu",
    ],
    ["gguf_file", "tokenizer", "chat_template", "layout", "token_tree", "rows", "pack"],
    ["model"],
    ["experiment", "checkpoints"],
    ["score", "adapters", "loading"],
    ["data", "objectives", "train", "policy"],
    ["verify", "label", "judge", "search", "evaluate", "rl"],
    ["plan", "export", "report", "web", "serve", "annotate"],
    ["cli"],
    ["__main__"],
]
"""As in docs/architecture.md. A unit is a module or a package of jprm; it imports its own layer and lower ones."""

LAYER = {name: layer for layer, names in enumerate(LAYERS) for name in names}

TRAINING_ONLY = {"optax", "tensorflow_datasets", "grain", "sympy", "math_verify"}


def _modules():
    files = sorted(PACKAGE.rglob("*.py"))
    names = {".".join(["jprm", *file.relative_to(PACKAGE).with_suffix("").parts]): file for file in files}
    return {name.removesuffix(".__init__"): file for name, file in names.items()}


MODULES = _modules()


def imported(tree):
    """The modules of jprm that a syntax tree imports anywhere but for type checkers, inside functions too."""
    branches = [node for node in ast.walk(tree) if isinstance(node, ast.If)]
    types = {n for node in branches if ast.unparse(node.test) == "TYPE_CHECKING" for n in ast.walk(node)}
    for node in ast.walk(tree):
        if node in types:
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.split(".")[0] == "jprm")
        elif isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "jprm":
            for alias in node.names:
                submodule = f"{node.module}.{alias.name}"
                yield submodule if submodule in MODULES else node.module


def unit(module):
    return (module.split(".") + ["jprm"])[1] if "." in module else "jprm"


EDGES = {
    module: set(imported(ast.parse(file.read_text(encoding="utf-8")))) - {module} for module, file in MODULES.items()
}


def _circles(edges):
    """Sets of nodes that reach each other."""
    reach = {node: set(after) for node, after in edges.items()}
    for via in reach:
        for node in reach:
            if via in reach[node]:
                reach[node] |= reach[via]
    return {frozenset(b for b in reach if b in reach[a] and a in reach[b]) for a in reach if a in reach[a]}


def test_every_unit_has_a_layer():
    assert {unit(module) for module in MODULES} == set(LAYER)


def test_units_import_their_own_layer_and_lower_ones():
    upward = [
        f"{module} -> {other}" for module, others in EDGES.items() for other in others
        if LAYER[unit(other)] > LAYER[unit(module)]
    ]  # fmt: skip
    assert not upward


def test_no_circle_of_units():
    units = {}
    for module, others in EDGES.items():
        units.setdefault(unit(module), set()).update({unit(other) for other in others} - {unit(module)})
    assert not _circles(units)


def test_no_circle_of_files():
    assert not _circles(EDGES)


def test_circles_are_found():
    assert _circles({"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}}) == {frozenset("abc")}


@pytest.mark.parametrize(
    "statement", ["import jprm; jprm.load; assert callable(jprm.load)", "import jprm.score.scorer, jprm.score.files"]
)
def test_scoring_imports_no_trainer(statement):
    code = f"import sys; {statement}; print(sorted({TRAINING_ONLY!r} & {{name.split('.')[0] for name in sys.modules}}))"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert run.stdout.strip() == "[]"
