"""The names that users import: visible to completion and to type checkers, with examples that run."""

import doctest
import os
import subprocess
import sys

import pytest
import tiny_run as tiny

import jprm
from jprm import devices


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


def enabled(tmp_path, **environment):
    """The folder of compiled programs that jax has after a command line's start, in a process of its own."""
    code = "from jprm.devices import enable_compile_cache as f; f(); import jax; f(); "
    code += "print(jax.config.jax_compilation_cache_dir)"
    own = {key: value for key, value in os.environ.items() if key != devices.FOLDER}
    own |= {"XDG_CACHE_HOME": str(tmp_path / "cache")} | environment
    run = subprocess.run([sys.executable, "-c", code], env=own, capture_output=True, text=True, timeout=120, check=True)
    return run.stdout.strip()


def test_compiled_programs_are_kept_in_the_users_cache_unless_told_otherwise(tmp_path):
    assert enabled(tmp_path).startswith(str(tmp_path / "cache" / "jprm" / "xla"))
    assert enabled(tmp_path, JAX_COMPILATION_CACHE_DIR="/mine") == "/mine"
    assert enabled(tmp_path, JPRM_COMPILE_CACHE="0") == "None"
    (tmp_path / "file").touch()
    assert enabled(tmp_path, XDG_CACHE_HOME=str(tmp_path / "file")) == "None"
