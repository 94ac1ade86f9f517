"""The names that users import: visible to completion and to type checkers, with examples that run."""

import doctest
import os
import sys
import types

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
