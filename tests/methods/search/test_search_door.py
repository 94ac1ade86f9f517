"""A new search method is one file and one line of the registry; its options and help come from its config."""

import importlib
import sys

import pytest
from toy_search import Script, Table

import jprm.apps
from jprm.methods.policy.protocol import Problem
from jprm.methods.search.growing_tree import METHODS, find
from jprm.methods.search.jobs import answers_of, choose
from jprm.methods.search.lockstep import SearchConfig, search

METHOD = '''
from __future__ import annotations

import dataclasses
from typing import ClassVar

from jprm.methods.search.growing_tree import ROOT, Ask, GrowingTree, Steps, at_least_one


@dataclasses.dataclass(frozen=True)
class Greedy:
    """Greedy search: continue from the best next step.

    For example:
      jprm search greedy --policy server.json --model runs/prm --input problems.jsonl --budget 20000 --output g.jsonl

    Attributes:
      expand: Next steps to choose from.
      explore: Fraction of the steps that are taken at random.
    """

    kind: ClassVar[str] = "tree"
    expand: int = 3
    explore: float = 0.25

    def __post_init__(self):
        at_least_one(self, "expand")

    def steps(self, tree: GrowingTree, rule: str) -> Steps:
        node = ROOT
        while True:
            (drawn,) = yield [Ask(node, self.expand, "step")]
            drawn = [draw for draw in drawn if draw.end != node]
            if not drawn:
                return None
            best = max(drawn, key=lambda draw: tree.score[draw.end])
            node = best.end
            if best.sample.finish_reason == "stop":
                return None
'''


@pytest.fixture
def greedy(tmp_path, monkeypatch):
    (tmp_path / "greedy_search.py").write_text(METHOD)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(METHODS, "greedy", "greedy_search:Greedy")
    monkeypatch.setattr(jprm.apps, "cli", importlib.import_module("jprm.apps.cli"))  # back to it with the modules
    for name in [name for name in sys.modules if name == "jprm.apps.cli" or name.startswith("jprm.apps.cli.")]:
        monkeypatch.delitem(sys.modules, name)
    yield importlib.import_module("jprm.apps.cli")
    sys.modules.pop("greedy_search", None)


def test_its_options_and_help_come_from_its_config(greedy, capsys):
    with pytest.raises(SystemExit) as stop:
        greedy.main(["search", "greedy", "--help"])
    text = " ".join(capsys.readouterr().out.replace("│", " ").split())
    assert stop.value.code == 0
    assert "usage: jprm search greedy" in text and "jprm search greedy --policy server.json" in text
    assert "--expand INT Next steps to choose from. (default: 3)" in text
    assert "--explore FLOAT Fraction of the steps that are taken at random. (default: 0.25)" in text
    assert "--budget TOKENS" in text and "--kind" not in text


def test_its_command_searches(greedy, tmp_path, capsys, monkeypatch):
    """The command fills the config and hands it to the search; its checks are one line."""
    configs = []
    line = ["search", "greedy", "--policy", "p", "--model", "m", "--input", "i", "--budget", "90", "--output", "o"]
    monkeypatch.setattr("jprm.methods.policy.load.load_policy", lambda path: path)
    monkeypatch.setattr("jprm.load", lambda path: Prm(), raising=False)
    monkeypatch.setattr("jprm.methods.search.lockstep.live_scorer", lambda prm: prm)
    monkeypatch.setattr("jprm.methods.jobs.score.identity", lambda prm: {"model": prm.name})
    searched = lambda *args, **_: configs.append(args[-1]) or {"problems": 1}  # noqa: E731
    monkeypatch.setattr("jprm.methods.search.jobs.search_file", searched)
    assert greedy.main([*line, "--expand", "5"]) == 0
    assert capsys.readouterr().out == "o: written. problems: 1\n"
    assert configs == [SearchConfig(find("greedy")(expand=5), "last", budget=90)]
    assert greedy.main([*line, "--expand", "0"]) == 2
    assert capsys.readouterr().err == "error: expand is 0: it must be at least 1\n"


def test_it_finds_a_chain(greedy):
    policy = Script({(): ["a", "b"], ("a",): ["x."], ("b",): ["y."]})
    scorer = Table({"a": 0.2, "b": 0.7, "y.": 0.6})
    config = SearchConfig(find("greedy")(expand=2), "last")
    ((_, tree),) = search([Problem("p")], policy, scorer, config)
    result = choose(tree, "last", "best", answers_of(tree))
    assert tree.steps(tree.draws[result.draw].end) == ("b", "y.")


class Prm:
    rule, name, step = "last", "toy", 3
