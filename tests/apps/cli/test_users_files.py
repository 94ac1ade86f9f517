"""A mistake in the user's own experiment file is one line with its place, and jprm's own bugs keep their traceback."""

import pytest

from jprm.apps import cli

HEAD = "from jprm.experiment import DataConfig, Experiment\n"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (HEAD + "\ndef experiment():\n    return Experiment(\n        name='x')\n",
         "mine.py:4: TypeError: Experiment.__init__() missing"),
        (HEAD + "\ndef experiment():\n    return Experiment(nme='x')\n", "mine.py:4: TypeError: "),
        (HEAD + "def experiment(:\n", "mine.py:2: SyntaxError: invalid syntax"),
        ("import nothere\n", "mine.py:1: ModuleNotFoundError: No module named 'nothere'"),
        ("from jprm.experiment import Experimen\n", "mine.py:1: ImportError: cannot import name 'Experimen'"),
        ("def experiment():\n    return foo\n", "mine.py:2: NameError: name 'foo' is not defined"),
        ("def experiment():\n    return {}['a']\n", "mine.py:2: KeyError: 'a'"),
    ],
)  # fmt: skip
def test_a_mistake_in_an_experiment_is_one_line(text, said, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("JPRM_TRACEBACK", raising=False)
    (tmp_path / "mine.py").write_text(text)
    assert cli.main(["train", "mine.py", "--workdir", "run"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"error: {said}") and line.endswith("Correct the file")


def test_an_error_of_jprm_itself_is_not_blamed_on_the_file(tmp_path, monkeypatch):
    monkeypatch.delenv("JPRM_TRACEBACK", raising=False)
    (tmp_path / "mine.py").write_text("import functools\n\n\ndef experiment():\n    return functools.reduce(1, 2)\n")
    import jprm.experiment

    def broken(*args):
        raise TypeError("a bug")

    monkeypatch.setattr(jprm.experiment, "load", broken)
    with pytest.raises(TypeError, match="a bug"):
        cli.main(["train", str(tmp_path / "mine.py"), "--workdir", str(tmp_path / "run")])
