"""Environments: positions, snapshots, turns played again, calls that fail or hang, threads and processes."""

import copy
import dataclasses
import threading
import time

import pytest
from refusing import refused

from jprm.methods.agents.environment import Environment, Reply, World, find

COUNTER = """
import copy, os, time
from jprm.methods.agents.environment import Environment, Reply

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
    world = World(counter, seconds=1.0 if how == "threads" else 15.0, **WORLDS[how])
    texts = ["1", "fail", "hang", "2", "x"] if how == "threads" else ["1", "fail", "die", "2", "x"]
    began = time.monotonic()
    after = world.step(world.start([{"start": 1}] * 5), texts)
    assert time.monotonic() - began < 30
    assert [bool(episode.error) for episode in after] == [False, True, True, False, True]
    assert [episode.done for episode in after] == [False, True, True, False, True]
    assert world.failures == {"KeyError": 1, "slow": 1, "ValueError": 1}
    assert told(after[0])[-1] == "2" and told(after[3])[-1] == "3"


def test_calls_run_at_once(counter):
    together = threading.Barrier(4, timeout=10)  # breaks unless four calls wait at the same time
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
