"""Promises about the package: cost of imports, declared requirements, sizes of files."""

import ast
import json
import runpy
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest
import test_storeys
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import jprm

REPOSITORY = Path(__file__).resolve().parent.parent

DISTRIBUTION = {"absl": "absl-py", "orbax": "orbax-checkpoint", "yaml": "pyyaml"}
"""Where a module has another name than the distribution that brings it."""


TRAINING = {"data", "objectives", "train", "rl", "plan", "trackers"}
"""The units that may need the extra `train`; commands that call them say so when it is absent."""

SERVING = {"web", "serve", "annotate"}
"""The units that may need the extra `serve`."""


@pytest.fixture(scope="module")
def declared():
    """The requirements in setup.py: `[""]` those of every installation, and those of each extra."""
    import setuptools  # takes a second

    with pytest.MonkeyPatch.context() as patch:
        found = {}
        patch.setattr(setuptools, "setup", found.update)
        runpy.run_path(str(REPOSITORY / "setup.py"))
    extras = {"": found["install_requires"], **found["extras_require"]}
    return {extra: [Requirement(text) for text in texts] for extra, texts in extras.items()}


def _imports(tree):
    """The top-level names that a syntax tree imports anywhere."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level:
            yield node.module.split(".")[0]


def _parsed(file):
    return ast.parse(file.read_text(encoding="utf-8"))


def _names(requirements):
    return {canonicalize_name(requirement.name) for requirement in requirements}


def test_every_import_is_declared(declared):
    """A package that is only there because another one brings it breaks on the day that the other one drops it.

    Only units that train may import what the extra `train` brings, and only servers what `serve` brings.
    """
    always = _names(declared[""]) | {"jprm", "jaxlib"}  # jaxlib comes with jax, at the release that jax requires
    training = always.union(*(_names(declared[extra]) for extra in ("train", "parquet", "tensorboard")))
    serving = always | _names(declared["serve"])
    for module, file in test_storeys.MODULES.items():
        unit = test_storeys.unit(module)
        allowed = training if unit in TRAINING else serving if unit in SERVING else always
        imported = set(_imports(_parsed(file))) - sys.stdlib_module_names
        missing = {name for name in imported if canonicalize_name(DISTRIBUTION.get(name, name)) not in allowed}
        assert not missing, f"{file.relative_to(REPOSITORY)} imports {sorted(missing)}: declare in setup.py"


def test_only_training_loads_what_training_needs(declared):
    """An installation without the extra `train` scores, evaluates, searches, labels and reports."""
    extra = _names(declared["train"])
    needs = {
        module: f"{module} imports {sorted(found)}"
        for module, file in test_storeys.MODULES.items()
        if (found := {name for name in _imports(_at_import(file)) if canonicalize_name(name) in extra})
    }
    assert {"jprm.train.state", "jprm.methods.data.prepare"} <= set(needs)
    edges = {module: set(test_storeys.imported(_at_import(file))) for module, file in test_storeys.MODULES.items()}
    edges["jprm"] = set()  # its imports are for type checkers
    for _ in edges:  # a path of imports is at most as long as there are modules
        for module, others in edges.items():
            if reached := sorted(others & set(needs)):
                needs.setdefault(module, f"{module} -> {needs[reached[0]]}")
    assert not [path for module, path in needs.items() if test_storeys.unit(module) not in TRAINING | {"cli"}]
    assert not {"jprm.apps.cli", "jprm.data", "jprm.methods.data.readers", "jprm.methods.data.reader"} & set(needs)


def _at_import(file):
    """The syntax tree of a module without the bodies of its functions."""
    tree = _parsed(file)
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            node.body = []
    return tree


def _pinned(python):
    """The releases that constraints.txt pins for a version of Python."""
    pinned = {}
    for line in (REPOSITORY / "constraints.txt").read_text(encoding="utf-8").splitlines():
        if line and not line.startswith("#"):
            requirement = Requirement(line)
            if requirement.marker is None or requirement.marker.evaluate({"python_version": python}):
                name = canonicalize_name(requirement.name)
                assert name not in pinned, f"constraints.txt pins {name} twice for Python {python}"
                pinned[name] = next(iter(requirement.specifier)).version
    return pinned


POD = ("", "train", "gcs", "tpu", "cuda")
"""The extras that tpu/setup.sh and tpu/Dockerfile install; none for every installation's requirements."""


@pytest.mark.parametrize("python", ["3.11", "3.12"])
def test_constraints_meet_the_lower_bounds(declared, python):
    pinned = _pinned(python)
    for extra, requirements in declared.items():
        for requirement in requirements if python == "3.11" or extra in POD else ():
            name = canonicalize_name(requirement.name)
            if name != "jax-prm":  # an extra that includes another
                assert name in pinned, f"constraints.txt does not pin {name} for Python {python}"
                assert requirement.specifier.contains(pinned[name]), f"{name}: {pinned[name]}, {requirement.specifier}"


@pytest.mark.parametrize("python", ["3.11", "3.12"])
def test_every_compiler_of_a_pod_is_pinned(python):
    pinned = _pinned(python)
    assert {pinned[name] for name in ("jax", "jaxlib", "jax-cuda12-plugin", "jax-cuda12-pjrt")} == {pinned["jax"]}
    assert {"libtpu", "nvidia-cuda-nvcc-cu12"} <= set(pinned)
    assert not {"jax", "libtpu"} & set(_pinned("3.13"))  # the newest releases that pip finds


@pytest.mark.slow  # pip reads the metadata of 130 packages
@pytest.mark.parametrize("extra", ["tpu", "cuda"])
def test_a_pod_gets_pinned_releases_alone(tmp_path, extra):
    if sys.version_info[:2] != (3, 12):
        pytest.skip("resolves for the Python that runs it, and pods have 3.12")
    report = tmp_path / "report.json"
    command = [sys.executable, "-m", "pip", "install", "--dry-run", "--ignore-installed", "--quiet", "--report", report]
    command += ["-c", REPOSITORY / "constraints.txt", f"{REPOSITORY}[train,gcs,{extra}]"]
    subprocess.run(list(map(str, command)), check=True, timeout=1200)
    pinned, found = _pinned("3.12"), [each["metadata"] for each in json.loads(report.read_text())["install"]]
    others = {each["name"] for each in found if pinned.get(canonicalize_name(each["name"])) != each["version"]}
    assert others == {"jax-prm"}


def test_version_is_the_one_installed():
    assert metadata.version("jax-prm") == jprm.__version__


def test_nothing_unpickles():
    """Loading a pickle runs code that is in the file."""
    for file in test_storeys.MODULES.values():
        assert not {"pickle", "cloudpickle", "dill", "joblib"} & set(_imports(_parsed(file))), file.name
