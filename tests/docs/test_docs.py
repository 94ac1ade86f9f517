"""Documentation and package: links, commands, names and imports are there, and no other project is installed."""

import ast
import doctest
import json
import os
import pydoc
import re
import runpy
import subprocess
import sys
import types
from importlib import metadata
from pathlib import Path

import pytest
import test_storeys
import tiny_run as tiny
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import jprm
from jprm import devices
from jprm.apps import cli

REPOSITORY = Path(__file__).resolve().parents[2]
PAGES = [
    page
    for pattern in ("*.md", "docs/**/*.md", "tpu/*.md", "experiments/**/*.md", "examples/**/*.md", "tests/*/*.md")
    for page in sorted(REPOSITORY.glob(pattern))
]


def _text(page):
    return page.read_text(encoding="utf-8")


def _anchors(page):
    """The anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", _text(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(REPOSITORY)))
def test_links_lead_somewhere(page):
    links = re.findall(r"\]\(([^)\s]+)\)", _text(page)) + re.findall(r'src="([^"]+)"', _text(page))
    for link in links:
        if not link.startswith("https://"):
            path, _, anchor = link.partition("#")
            target = (page.parent / path).resolve() if path else page
            assert target.exists(), link
            assert not anchor or anchor in _anchors(target), link


def _commands(page):
    """The `jprm` command lines in a page's indented and fenced blocks, continuation lines joined."""
    lines = _text(page).replace("\\\n", " ").splitlines()
    return [line.strip().split("  #")[0] for line in lines if re.match(r"\s+jprm \w", line)]


SHOWN = [page for page in PAGES if _commands(page) and page.name != "extending.md"]  # test_extending.py runs that one


@pytest.mark.parametrize("page", SHOWN, ids=lambda page: page.name)
def test_commands_exist(page, capsys):
    """Every command that a page shows is one, with the options that it shows; the files that it runs are there."""
    for line in _commands(page):
        words = line.split()[1:]
        names = words[: 2 if words[0] in ("annotate", "eval", "fuse", "label", "search") else 1]
        with pytest.raises(SystemExit) as stop:
            cli.main([*names, "--help"])
        text = capsys.readouterr().out
        assert stop.value.code == 0, line
        for option in (word for word in words if word.startswith("--")):
            assert option in text, f"{line}: {option}"
        for file in re.findall(r"(?:experiments|examples)/[\w/]+\.\w+", line):  # `mine.py` is the user's own
            assert (REPOSITORY / file).exists() or file == "experiments/mine.py", line


def test_bodies_that_curl_sends_say_that_they_are_json():
    """Else curl says that they are a form's, and the server refuses them."""
    texts = [_text(file) for file in (*PAGES, REPOSITORY / "jprm/apps/cli/__init__.py")]
    commands = [line for text in texts for line in re.findall(r"curl .*(?:\\\n.*)*", text)]
    sent = [line for line in commands if re.search(r" (-d|--data\S*) ", line)]
    assert len(commands) >= 3 and not [line for line in sent if "application/json" not in line]


def test_make_targets_exist():
    makefile = _text(REPOSITORY / "Makefile")
    targets = set(re.findall(r"^([\w.-]+):", makefile, re.MULTILINE))
    targets |= set(re.findall(r"^STORMS := (.*)", makefile, re.MULTILINE)[0].split())
    for page in PAGES:
        for target in re.findall(r"(?:`|^    )make ([a-z][\w-]*)", _text(page), re.MULTILINE):
            assert target in targets, f"{page.name}: make {target}"


def _messages():
    """Every string in jprm, with `…` where it has a value."""
    for file in (REPOSITORY / "jprm").rglob("*.py"):
        for node in ast.walk(ast.parse(_text(file))):
            if isinstance(node, ast.JoinedStr):
                yield "".join(part.value if isinstance(part, ast.Constant) else "…" for part in node.values)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield node.value


def test_troubleshooting_explains_messages_that_exist():
    """Each heading in code is a message, whose fixed parts are in strings of the code."""
    headings = re.findall(r"^#### `(.+)`$", _text(REPOSITORY / "docs/troubleshooting.md"), re.MULTILINE)
    known = list(_messages())
    assert len(headings) >= 20
    for heading in headings:
        for part in filter(None, (part.strip(" .;()") for part in heading.split("…"))):
            assert any(part in text for text in known), (heading, part)


# ---- The names that users import: visible to completion and to type checkers, with examples that run.


@pytest.mark.parametrize("page", sorted((REPOSITORY / "docs/reference").glob("*.md")), ids=lambda page: page.stem)
def test_what_the_reference_shows_exists(page):
    for name in re.findall(r"^::: (\S+)", page.read_text(encoding="utf-8"), re.MULTILINE):
        assert pydoc.locate(name), name


def test_public_names_are_visible():
    assert set(jprm.__all__) <= set(dir(jprm)) and jprm.__all__ == sorted(jprm.__all__)
    for name in jprm.__all__:
        assert getattr(jprm, name).__doc__


@pytest.mark.parametrize("name", ["load", "PRM", "PRM.score", "PRM.score_many", "aggregate"])
def test_examples_in_docstrings_run(name, tiny_run):
    subject = jprm
    for part in name.split("."):
        subject = getattr(subject, part)
    with tiny.one_device():
        names = {"jprm": jprm, "folder": tiny_run.folder, "prm": jprm.load(tiny_run.folder)}
        example = doctest.DocTestParser().get_doctest(subject.__doc__, names, name, None, 0)
        assert example.examples and doctest.DocTestRunner().run(example).failed == 0


@pytest.mark.parametrize("imported", [False, True])
def test_compiled_programs_are_kept_in_the_users_cache_unless_told_otherwise(tmp_path, monkeypatch, imported):
    def enabled(**environment):
        """The folder that jax has, imported before or after."""
        config = types.SimpleNamespace(jax_compilation_cache_dir=None)
        config.update = lambda name, value: setattr(config, name, value)
        with monkeypatch.context() as patch:
            patch.delenv(devices.FOLDER)
            for name, value in environment.items():
                patch.setenv(name, str(value))
            patch.delitem(sys.modules, "jax")
            if imported:
                patch.setitem(sys.modules, "jax", types.SimpleNamespace(config=config))
            devices.enable_compile_cache()
            return config.jax_compilation_cache_dir or os.environ.get(devices.FOLDER)

    (tmp_path / "file").touch()
    assert enabled(XDG_CACHE_HOME=tmp_path).startswith(str(tmp_path / "jprm" / "xla"))
    assert enabled(XDG_CACHE_HOME=tmp_path, JAX_COMPILATION_CACHE_DIR="/mine") == "/mine"
    assert enabled(XDG_CACHE_HOME=tmp_path, JPRM_COMPILE_CACHE="0") is None
    assert enabled(XDG_CACHE_HOME=tmp_path / "file") is None


# ---- Promises about the package: cost of imports, declared requirements, sizes of files.


DISTRIBUTION = {"absl": "absl-py", "orbax": "orbax-checkpoint", "yaml": "pyyaml"}
"""Where a module has another name than the distribution that brings it."""


TRAINING = {"data", "jsonl", "optimizers", "objectives", "train", "rl", "plan", "testing", "trackers"}
"""The units that may need the extra `train`; commands that call them say so when it is absent."""

SERVING = {"web", "serve", "annotate"}
"""The units that may need the extra `serve`."""


@pytest.fixture(scope="module")
def declared():
    """The requirements in setup.py: `[""]` those of every installation, and those of each extra."""
    import setuptools  # takes a second

    with pytest.MonkeyPatch.context() as patch:
        settings = {}
        patch.setattr(setuptools, "setup", settings.update)
        runpy.run_path(str(REPOSITORY / "setup.py"))
    extras = {"": settings["install_requires"], **settings["extras_require"]}
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
        module: f"{module} imports {sorted(needed)}"
        for module, file in test_storeys.MODULES.items()
        if (needed := {name for name in _imports(_at_import(file)) if canonicalize_name(name) in extra})
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
    pinned, installed = _pinned("3.12"), [package["metadata"] for package in json.loads(report.read_text())["install"]]
    others = {
        package["name"] for package in installed if pinned.get(canonicalize_name(package["name"])) != package["version"]
    }
    assert others == {"jax-prm"}


def test_version_is_the_one_installed():
    assert metadata.version("jax-prm") == jprm.__version__


def test_nothing_unpickles():
    """Loading a pickle runs code that is in the file."""
    for file in test_storeys.MODULES.values():
        assert not {"pickle", "cloudpickle", "dill", "joblib"} & set(_imports(_parsed(file))), file.name


# ---- The distribution's name: on the package index, `jprm` is another project.


ADVICE = "*.md docs/**/*.md tpu/* jprm/**/*.py examples/**/* experiments/**/*.py Makefile setup.py".split()

OTHER = re.compile(r"pip install [^\n`]*?(?<![\w./-])jprm(?![\w-])|(?<![\w-])jprm\[[a-z]")


def _found(code):
    return bool(OTHER.search(code))


def test_what_would_install_the_other_project_is_recognised():
    assert _found("pip install jprm") and _found("pip install --no-deps jprm") and _found("pip install 'jprm[gcs]'")
    assert not any(map(_found, ("pip install 'jax-prm[gcs]'", "pip install -e '.[gcs]'", "git clone URL jprm")))


def test_nothing_that_is_shown_installs_the_other_project():
    files = [file for pattern in ADVICE for file in REPOSITORY.glob(pattern) if file.suffix not in (".png", ".pyc")]
    texts = {file: file.read_text(encoding="utf-8") for file in files if file.is_file()}
    said = "and `pip install jprm` there installs another project"  # README's warning
    assert not [file.name for file, text in texts.items() if _found(text.replace(said, ""))]


def test_the_other_project_is_named_in_one_line(tmp_path):
    """As after installing both: `import jprm` finds a package without jprm's command."""
    (tmp_path / "jprm").mkdir()
    (tmp_path / "jprm/__init__.py").write_text("def build_plugin(): ...\n")
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY)}
    run = [sys.executable, "-m", "jax_prm", "--version"]  # -m puts the working folder first on the path
    refused = subprocess.run(run, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
    assert (refused.returncode, refused.stdout) == (2, "")
    assert refused.stderr.count("\n") == 1 and str(tmp_path / "jprm") in refused.stderr

    right = subprocess.run(run, cwd=REPOSITORY, env=environment, capture_output=True, text=True, timeout=300)
    assert right.stdout == f"jprm {jprm.__version__}\n", right.stderr
