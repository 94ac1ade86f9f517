"""Promises about the package as a whole: what importing costs, what installing declares, how big a file may be."""

import ast
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import jprm

REPOSITORY = Path(__file__).resolve().parent.parent
SOURCES = sorted(file for folder in ("jprm", "experiments", "tests") for file in (REPOSITORY / folder).rglob("*.py"))

DISTRIBUTION = {"orbax": "orbax-checkpoint"}  # where a module has another name than the distribution that brings it


def _imports(file):
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level:
            yield node.module.split(".")[0]


def test_every_import_is_declared():
    """A package that is only there because another one brings it breaks on the day that the other one drops it."""
    requirements = [Requirement(text) for text in metadata.requires("jprm")]
    always = {requirement.name for requirement in requirements if "extra" not in str(requirement.marker)}
    optional = {"tensorboardX"}  # the extra `tensorboard`
    # jaxlib comes with jax, at the release that jax asks for
    allowed = {canonicalize_name(name) for name in always | optional | {"jaxlib"}} | {"jprm"}
    for file in SOURCES:
        if file.is_relative_to(REPOSITORY / "jprm"):
            imported = {name for name in _imports(file) if name not in sys.stdlib_module_names}
            missing = {name for name in imported if canonicalize_name(DISTRIBUTION.get(name, name)) not in allowed}
            assert not missing, f"{file.relative_to(REPOSITORY)} imports {sorted(missing)}: declare in setup.py"


def test_constraints_meet_the_lower_bounds():
    pinned = {}
    for line in (REPOSITORY / "constraints.txt").read_text(encoding="utf-8").splitlines():
        if line and not line.startswith("#"):
            requirement = Requirement(line)
            pinned[canonicalize_name(requirement.name)] = next(iter(requirement.specifier)).version
    for requirement in map(Requirement, metadata.requires("jprm")):
        name = canonicalize_name(requirement.name)
        assert name in pinned, f"constraints.txt does not pin {name}"
        assert requirement.specifier.contains(pinned[name]), f"{name}: {pinned[name]} is not {requirement.specifier}"


def test_version_is_the_one_installed():
    assert metadata.version("jprm") == jprm.__version__


@pytest.mark.parametrize("module", ["jprm.model", "jprm.score"])
def test_scoring_needs_no_data_pipeline(module):
    """A machine that only scores has no use for TFDS and Grain, which take seconds to import."""
    code = f"import sys, {module}; print(sorted({{'tensorflow_datasets', 'grain', 'tensorflow'}} & set(sys.modules)))"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert run.stdout.strip() == "[]"


def test_files_stay_small():
    too_long = {file.name: n for file in SOURCES if (n := len(file.read_text(encoding="utf-8").splitlines())) > 400}
    assert not too_long


def test_nothing_unpickles():
    """Loading a pickle runs code that is in the file."""
    for file in SOURCES:
        if file.is_relative_to(REPOSITORY / "jprm"):
            assert not {"pickle", "cloudpickle", "dill", "joblib"} & set(_imports(file)), file.name
