"""Search and labels over turns: methods of search and Monte Carlo values in a world, and trees of messages as steps."""

import dataclasses
import json

import numpy as np
import pytest
import test_turns
from test_turns import echo, layout, policy  # noqa: F401

from jprm.io.jsonl import write_records
from jprm.methods.agents.acting import (
    TurnScorer,
    WorldPolicy,
    judge_outcomes,
    label_replayed,
    messages_in,
    messages_of_steps,
    outcome_in,
    steps_of_messages,
)
from jprm.methods.agents.environment import Reply, World
from jprm.methods.decoding.turns import EpisodeLimits
from jprm.methods.judge.judge import step_text
from jprm.methods.label.config import MonteCarloConfig, OmegaConfig
from jprm.methods.label.files import consensus, label_monte_carlo, label_omega
from jprm.methods.policy.protocol import Prefix
from jprm.methods.search.beam import Beam
from jprm.methods.search.best_of_n import BestOfN
from jprm.methods.search.files import search_file
from jprm.methods.search.lockstep import SearchConfig
from jprm.methods.search.mcts import MCTS
from jprm.tree import read_records, record_of, tree_of

PROBLEMS = ("abc", "hi?")


class Prm:
    """Scores a turn by its letters, whatever stands before it."""

    rule = "last"

    def score_trees(self, trees):
        return [np.array([len(n.text) % 7 / 7 if n.is_step else np.nan for n in tree.nodes]) for tree in trees]


def plain(sample):
    """Whether a policy of random parameters wrote no name of a control token, which no recorded turn may hold."""
    return "<" not in "".join(sample.steps)


@pytest.fixture
def acting(policy, layout):  # noqa: F811
    records = {problem: {"problem": problem} for problem in PROBLEMS}
    return WorldPolicy(policy, World(echo(3), branches=True), layout, EpisodeLimits(9, 400), records)


def test_a_policy_in_a_world_is_a_policy(acting, policy, layout):  # noqa: F811
    first, other = acting.sample([Prefix(p) for p in PROBLEMS], 12, until="step", seed=0)
    assert {sample.finish_reason for sample in first + other} <= {"step", "length"}
    prefix = next(Prefix(PROBLEMS[0], s.steps) for s in first if s.finish_reason == "step" and plain(s))
    assert [m["role"] for m in messages_in(prefix.steps)] == ["assistant", "tool"]
    (ends,) = acting.sample([prefix], 4, until="end", seed=5)
    for sample in (sample for sample in ends if sample.finish_reason == "stop"):
        assert len(sample.steps) == 2 and outcome_in(sample.steps) == pytest.approx(0.1 + 0.2 + 0.3)
        assert sample.tokens and sample.logprob < 0
    rewards = [0.6 if s.finish_reason == "stop" else 0.0 for s in ends]
    assert [o.reward for o in judge_outcomes([({}, s.steps) for s in ends])] == pytest.approx(rewards)
    # a prefix that comes from a file is played again, and continued alike
    again = WorldPolicy(policy, acting.world, layout, EpisodeLimits(9, 400), acting.records)
    assert [s.steps for s in again.sample([prefix], 4, until="end", seed=5)[0]] == [s.steps for s in ends]


@pytest.mark.parametrize("method", [BestOfN(6), Beam(2, 2, 4), MCTS(6, 2, max_steps=4)])
def test_methods_of_search_work_on_turns(acting, tmp_path, method):
    write_records(tmp_path / "tasks.jsonl", [{"problem": problem} for problem in PROBLEMS])
    acting.know(tmp_path / "tasks.jsonl")
    scorer = TurnScorer(Prm(), acting)
    config = SearchConfig(method, "last", budget=2000)
    search_file(acting, scorer, {"model": "letters"}, tmp_path / "tasks.jsonl", tmp_path / "found.jsonl", config)
    for record in read_records(tmp_path / "found.jsonl"):
        tree = tree_of(record)
        assert tree.of_messages and tree.nodes[0].text == tree.problem
        assert all(node.score == pytest.approx(len(node.text) % 7 / 7, abs=1e-6) for node in tree.nodes if node.is_step)
        chosen = record["search"]["chosen"]
        if chosen is not None:
            assert tree.nodes[chosen].is_step and record["search"]["correct"] is False  # 0.6 is no success
            assert tree.nodes[chosen].correct is False
        assert record_of(tree) == record


def test_values_and_first_errors_of_turns(acting, tmp_path):
    acting.world = World(echo_of_success(), branches=True)
    turns = [[{"role": "assistant", "content": text} for text in texts] for texts in (("ab", "abc"), ("abc", "a"))]
    episodes = acting.world.replay(list(acting.records.values()), turns)
    trajectories = [{"problem": e.record["problem"], "messages": list(e.messages)} for e in episodes]
    write_records(tmp_path / "in.jsonl", trajectories)
    files = (tmp_path / "in.jsonl", tmp_path / "out.jsonl", tmp_path / "rollouts.jsonl")
    counts = label_monte_carlo(acting, *files, MonteCarloConfig("soft", k=4))
    labelled = list(read_records(files[1]))
    assert counts["trees"] == len(trajectories) and counts["rollouts"] > 0
    for record, before in zip(labelled, trajectories, strict=True):
        tree = tree_of(record)
        turns = [node for node in tree.nodes if node.is_step]
        assert tree.semantics == "value" and all(node.label is not None for node in turns)
        said = [(m["role"], m["content"]) for m in before["messages"]]
        assert [(node.role, node.text) for node in tree.nodes] == said
        assert turns[-1].label in (0.0, 1.0) or turns[-1].extra["rollouts"] == 4
    write_records(tmp_path / "tasks.jsonl", [{"problem": problem} for problem in PROBLEMS])
    more = (tmp_path / "tasks.jsonl", tmp_path / "omega.jsonl", tmp_path / "more.jsonl")
    label_omega(acting, *more, OmegaConfig(k=4, searches=4, budget=40))
    for record in read_records(more[1]):
        tree = tree_of(record)
        assert tree.of_messages and any(node.label is not None for node in tree.nodes if node.is_step)


def echo_of_success():
    """As `echo(2)`, with success where the second turn is longer than the first."""
    environment = echo(99)

    def step(state, message):
        reply = environment.step(state, message)
        said = state["said"]
        return Reply(reply.messages, len(said) == 2, float(len(said) == 2 and len(said[1]) > len(said[0])))

    return dataclasses.replace(environment, step=step)


def test_outcomes_are_what_the_world_says_when_turns_are_played_again(tmp_path):
    (tmp_path / "world.py").write_text(WORLD)
    right = [{"role": "user", "content": "2"}, {"role": "assistant", "content": "1"}, {"role": "tool", "content": "1"}]
    end = {"role": "assistant", "content": "1"}
    records = [
        {"problem": "2", "messages": [*right, end]},
        {"problem": "2", "messages": right},
        {"problem": "2", "messages": [*right[:2], {"role": "tool", "content": "7"}, end]},
        {"problem": "2", "messages": [right[0], {"role": "assistant", "content": "x"}]},
    ]
    write_records(tmp_path / "in.jsonl", records)
    counts = label_replayed(f"{tmp_path}/world.py:WORLD", tmp_path / "in.jsonl", tmp_path / "out.jsonl")
    assert counts == {"trajectories": 4, "solved": 1, "answers differ": 1, "lost": 1}
    assert [json.loads(line)["outcome"] for line in (tmp_path / "out.jsonl").read_text().splitlines()] == [1.0, 0.0]


WORLD = """
from jprm.methods.agents.environment import Environment, Reply

def reset(record):
    return {"left": int(record["problem"])}, [{"role": "user", "content": record["problem"]}]

def step(state, message):
    state["left"] -= int(message["content"])
    return Reply(({"role": "tool", "content": str(state["left"])},), state["left"] == 0, float(state["left"] == 0))

WORLD = Environment(reset, step)
"""


def test_trees_of_messages_as_steps_and_back():
    call = {"type": "function", "function": {"name": "f", "arguments": {"x": "1"}}}
    record = {
        "problem": "p",
        "nodes": [
            {"parent": -1, "role": "user", "content": "p"},
            {"parent": 0, "role": "assistant", "content": None, "tool_calls": [call], "label": 0.5},
            {"parent": 1, "role": "tool", "content": "one"},
            {"parent": 2, "role": "tool", "content": "two"},
            {"parent": 3, "role": "assistant", "content": "end", "correct": True},
            {"parent": 0, "role": "assistant", "content": "other"},
        ],
        "semantics": "value",
    }
    tree = tree_of(record)
    tree_of_steps, turns = steps_of_messages(tree)
    assert turns == [1, 4, 5] and [node.parent for node in tree_of_steps.nodes] == [-1, 0, -1]
    assert [len(messages_in([node.text])) for node in tree_of_steps.nodes] == [3, 1, 1]
    back, places = messages_of_steps(tree_of_steps, [{"role": "user", "content": "p"}])
    assert places == turns and record_of(back)["nodes"] == record_of(tree)["nodes"]
    assert test_turns.PIECES[0] == "<end>"


def test_judges_read_turns_and_consensus_compares_their_first_errors():
    calls = [{"type": "function", "function": {"name": "add", "arguments": {"x": 1}}}]
    messages = [
        {"role": "user", "content": "p"},
        {"role": "assistant", "content": "first", "label": 1.0},
        {"role": "tool", "content": "one"},
        {"role": "assistant", "content": None, "tool_calls": calls, "label": 0.0},
    ]
    tree = tree_of({"messages": messages, "problem": "p"})
    told = ["[assistant] first", '[tool] one\n[assistant] call add({"x": 1})']
    assert [step_text(tree, i) for i in tree.steps] == told
    other = tree_of({"messages": [*messages[:3], {**messages[3], "label": 1.0}], "problem": "p"})
    (kept,) = consensus([tree], [tree])
    assert kept.extra["consensus"] == 1 and [node.role for node in kept.nodes] == [node.role for node in tree.nodes]
    assert not list(consensus([tree], [other]))
