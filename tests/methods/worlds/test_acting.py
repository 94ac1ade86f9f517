"""Policies that act in a world: episodes and their faults."""

import copy
import dataclasses
import json
import threading
import types

import numpy as np
import pytest
from families import breadth
from refusing import refused
from test_turns import echo, layout, policy  # noqa: F401

from jprm.io.jsonl import write_records
from jprm.methods.judge.judge import step_text
from jprm.methods.label.config import MonteCarloConfig, OmegaConfig
from jprm.methods.label.jobs import consensus, label_monte_carlo, label_omega
from jprm.methods.policy.protocol import Prefix
from jprm.methods.search.beam import Beam
from jprm.methods.search.best_of_n import BestOfN
from jprm.methods.search.jobs import search_file
from jprm.methods.search.lockstep import SearchConfig
from jprm.methods.search.mcts import MCTS
from jprm.methods.worlds.acting import (
    TurnScorer,
    WorldPolicy,
    judge_outcomes,
    label_replayed,
    messages_in,
    messages_of_steps,
    outcome_in,
    steps_of_messages,
)
from jprm.methods.worlds.environment import Environment, Reply, World, find
from jprm.methods.worlds.turns import EpisodeLimits
from jprm.tree import RecordError, read_records, record_of, tree_of

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


@pytest.mark.parametrize("method", [BestOfN(6), *breadth([Beam(2, 2, 4), MCTS(6, 2, max_steps=4)])])
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


def test_tasks_with_bad_lines_are_skipped_on_request(tmp_path):
    bare = types.SimpleNamespace(records={})
    (tmp_path / "tasks.jsonl").write_text('{"problem": "abc"}\n{"problem": 3}\n')
    with pytest.raises(RecordError, match="tasks.jsonl:2"):
        WorldPolicy.know(bare, tmp_path / "tasks.jsonl")
    bare.records.clear()
    WorldPolicy.know(bare, tmp_path / "tasks.jsonl", "skip")
    assert [*bare.records] == ["abc"] and [file.name for file in tmp_path.iterdir()] == ["tasks.jsonl"]


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
from jprm.methods.worlds.environment import Environment, Reply

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


# ---- Environments: positions, snapshots, turns played again, calls that fail or hang, threads and processes.


COUNTER = """
import copy, os, time
from jprm.methods.worlds.environment import Environment, Reply

def reset(record):
    return {"count": record["start"]}, [{"role": "user", "content": str(record["start"])}]

def step(state, message):
    text = message["content"]
    if text == "hang":
        time.sleep(60)
    if text == "die":
        os._exit(3)
    if text == "fail":
        raise KeyError("no such thing")
    state["count"] += int(text)
    return Reply(({"role": "tool", "content": str(state["count"])},), state["count"] >= 10, state["count"] / 100)

def close(state):
    with open(state["closed"], "a") as file:
        file.write("closed")

COUNTER = Environment(reset, step, copy.deepcopy)
CLOSING = Environment(lambda record: (record | {"count": 0}, []), step, copy.deepcopy, close=close)
"""


@pytest.fixture(scope="module")
def counter(tmp_path_factory):
    file = tmp_path_factory.mktemp("environment") / "counter.py"
    file.write_text(COUNTER)
    return f"{file}:COUNTER"


def told(episode):
    return [message["content"] for message in episode.messages]


WORLDS = {"threads": {}, "branches": {"branches": True}, "processes": {"processes": True, "at_once": 2}}


@pytest.mark.parametrize("how", WORLDS)
def test_rollouts_start_from_any_turn_any_number_of_times(counter, how):
    world = World(counter, **WORLDS[how])
    first = world.start([{"start": 1}, {"start": 5}])
    second = world.step(first, ["2", "1"])
    assert [told(episode) for episode in second] == [["1", "2", "3"], ["5", "1", "6"]]
    third = world.step(second, ["3", "4"])
    assert [(told(episode)[-1], episode.done, episode.turns) for episode in third] == [
        ("6", False, (1, 3)),
        ("10", True, (1, 3)),
    ]
    assert world.step(third, ["1", "1"])[1] == third[1]  # what is done stays as it is
    again = world.step(second, ["3", "1"])  # from the same positions, after they went on
    assert told(again[0]) == told(third[0]) and told(again[1])[-1] == "7"
    assert again[0].reward == pytest.approx(0.03 + 0.06)
    (replayed,) = world.replay([{"start": 1}], [[m for m in third[0].messages if m["role"] == "assistant"]])
    assert dataclasses.replace(replayed, place=None) == dataclasses.replace(third[0], place=None)


def test_a_world_that_answers_otherwise_when_played_again_is_an_error():
    calls = iter(range(100))
    step = lambda state, message: Reply(({"role": "tool", "content": str(next(calls))},))  # noqa: E731
    odd = Environment(lambda record: ({}, []), step)
    world = World(odd)
    (before,) = world.step(world.start([{}]), ["a"])
    world.step([before], ["b"])
    (after,) = world.step([before], ["b"])
    assert after.done and "give it a snapshot" in after.error


@pytest.mark.parametrize("how", ["threads", "processes"])
def test_a_call_that_fails_or_hangs_costs_its_own_episode(counter, how):
    texts = ["1", "fail", "hang", "2", "x"] if how == "threads" else ["1", "fail", "die", "2", "x"]
    for seconds in (1.0, 30.0) if how == "threads" else (120.0,):
        world = World(counter, seconds=seconds, **WORLDS[how])
        after = world.step(world.start([{"start": 1}] * 5), texts)
        if world.failures["slow"] == 1:
            break  # else a busy machine was too slow for the others too
    assert [bool(episode.error) for episode in after] == [False, True, True, False, True]
    assert [episode.done for episode in after] == [False, True, True, False, True]
    assert world.failures == {"KeyError": 1, "slow": 1, "ValueError": 1}
    assert told(after[0])[-1] == "2" and told(after[3])[-1] == "3"


def test_calls_run_at_once(counter):
    together = threading.Barrier(4, timeout=300)  # breaks unless four calls wait at the same time
    met = Environment(lambda record: (None, []), lambda state, message: Reply(done=together.wait() >= 0))
    world = World(met, at_once=4)
    assert not any(episode.error for episode in world.step(world.start([{}] * 8), ["x"] * 8))


def test_live_states_are_closed_once(counter):
    closed = []
    step = lambda state, message: Reply(done=message["content"] == "end")  # noqa: E731
    world = World(Environment(lambda record: (record["name"], []), step, close=closed.append))
    episodes = world.step(world.start([{"name": "a"}, {"name": "b"}]), ["end", "more"])
    assert closed == ["a"]
    world.close(episodes)
    world.close(episodes)
    assert closed == ["a", "b"]


def test_a_process_closes_the_state_of_an_episode_that_ends(counter, tmp_path):
    world = World(counter.replace(":COUNTER", ":CLOSING"), **WORLDS["processes"])
    places = [tmp_path / name for name in ("ends", "goes on")]
    world.step(world.start([{"closed": str(place)} for place in places]), ["10", "1"])
    assert places[0].read_text() == "closed" and not places[1].exists()


def test_what_does_not_fit_is_refused(counter):
    environment = find(counter)
    refused(ValueError, "give its name", World, environment, processes=True)
    refused(ValueError, "no file", World, "nowhere.py:WORLD")
    refused(ValueError, "above 0", World, environment, seconds=0)
    file, _, _ = counter.rpartition(":")
    with open(file, "a") as more:
        more.write("\nPLAIN = Environment(reset, step)\nCOPY = copy.deepcopy\n")
    refused(ValueError, "no snapshot", World, f"{file}:PLAIN", processes=True)
    refused(ValueError, r"not a .*Environment", find, f"{file}:COPY")
    assert copy.copy(environment) == environment
