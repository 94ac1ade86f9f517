"""The distribution's name: on the package index, `jprm` is another project."""

import os
import re
import subprocess
import sys
from pathlib import Path

import jprm

REPOSITORY = Path(__file__).resolve().parent.parent
SHOWN = "*.md docs/**/*.md tpu/* jprm/**/*.py examples/**/* experiments/**/*.py Makefile setup.py".split()

OTHER = re.compile(r"pip install [^\n`]*?(?<![\w./-])jprm(?![\w-])|(?<![\w-])jprm\[[a-z]")


def _found(code):
    return bool(OTHER.search(code))


def test_what_would_install_the_other_project_is_recognised():
    assert _found("pip install jprm") and _found("pip install --no-deps jprm") and _found("pip install 'jprm[gcs]'")
    assert not any(map(_found, ("pip install 'jax-prm[gcs]'", "pip install -e '.[gcs]'", "git clone URL jprm")))


def test_nothing_that_is_shown_installs_the_other_project():
    files = [file for pattern in SHOWN for file in REPOSITORY.glob(pattern) if file.suffix not in (".png", ".pyc")]
    texts = {file: file.read_text(encoding="utf-8") for file in files if file.is_file()}
    said = "and `pip install jprm` there installs another project"  # README's warning
    assert not [file.name for file, text in texts.items() if _found(text.replace(said, ""))]


def test_the_other_project_is_named_in_one_line(tmp_path):
    """As after installing both: `import jprm` finds a package without jprm's command."""
    (tmp_path / "jprm").mkdir()
    (tmp_path / "jprm/__init__.py").write_text("def build_plugin(): ...\n")
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY)}
    run = [sys.executable, "-m", "jax_prm", "--version"]  # -m puts the working folder first on the path
    refused = subprocess.run(run, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60)
    assert (refused.returncode, refused.stdout) == (2, "")
    assert refused.stderr.count("\n") == 1 and str(tmp_path / "jprm") in refused.stderr

    right = subprocess.run(run, cwd=REPOSITORY, env=environment, capture_output=True, text=True, timeout=60)
    assert right.stdout == f"jprm {jprm.__version__}\n", right.stderr
