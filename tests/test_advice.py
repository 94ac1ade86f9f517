"""Advice to a running agent: which turn is told and when, what the critic reads, and a model as the critic."""

import copy
import math

import pytest
from refusing import refused
from test_environment import COUNTER, WORLDS, told
from tiny_rl import save_run
from tiny_run import MODEL, save_tokenizer

import jprm
from jprm.io.outputs import digest
from jprm.methods.agents.advice import Critic, advised
from jprm.methods.agents.environment import Environment, Reply, World

WORDS = "{turn} of {turns}, {percent}: {said}"


def reset(record):
    return {"said": []}, [{"role": "user", "content": "Begin."}, *record.get("opening", ())]


def step(state, message):
    state["said"].append(message["content"])
    last = message["content"] == "end"
    return Reply((), True, 1.0) if last else Reply(({"role": "tool", "content": f"heard {len(state['said'])}"},))


ECHO = Environment(reset, step, copy.deepcopy)


class Letters:
    """A critic whose score of a turn is its number in tenths, or NaN. It keeps what it read."""

    def __init__(self):
        self.read = []

    def __call__(self, record):
        self.read.append(record)
        said = [m["content"] for m in record["messages"] if m["role"] == "assistant"]
        return [float(text) / 10 for text in said]


def played(environment, turns, record=None):
    world = World(environment, branches=True)
    episodes = world.start([record or {"problem": "p"}])
    for turn in turns:
        episodes = world.step(episodes, [turn])
    assert not episodes[0].error
    return episodes[0]


def advice(episode):
    return [(i, m["content"]) for i, m in enumerate(episode.messages) if m["role"] == "user"][1:]


@pytest.mark.parametrize("every, turns, expected", [
    (2, ["4", "3", "6", "1"], [(5, "2 of 2, 30: 3"), (10, "4 of 4, 10: 1")]),
    (2, ["4", "9", "6", "end"], [(5, "1 of 2, 40: 4")]),  # an episode that ends is told nothing
    (3, ["5", "5", "5", "2"], [(7, "1 of 3, 50: 5")]),  # the first of equals
    (1, ["nan", "10"], [(5, "2 of 2, 99: 10")]),  # no score, no advice
    (5, ["1", "1"], []),
])  # fmt: skip
def test_every_few_turns_the_lowest_is_told(every, turns, expected):
    critic = Letters()
    episode = played(advised(ECHO, critic, every=every, words=WORDS), turns)
    assert advice(episode) == expected
    assert all(m["role"] != "user" or not i for r in critic.read for i, m in enumerate(r["messages"]))
    assert all(record["problem"] == "p" for record in critic.read)


def test_turns_that_the_world_wrote_are_read_and_not_told():
    episode = played(advised(ECHO, Letters(), every=2, words=WORDS), ["4", "6"],
                     {"opening": [{"role": "assistant", "content": "0"}]})  # fmt: skip
    assert [text for _, text in advice(episode)] == ["1 of 2, 40: 4"]


def test_a_turn_is_told_with_its_calls():
    call = {"type": "function", "function": {"name": "look", "arguments": {"at": "é"}}}
    episode = played(advised(ECHO, lambda record: [0.5], every=1, words="{said}"),
                     [{"role": "assistant", "content": "I look.", "tool_calls": [call]}])  # fmt: skip
    assert [text for _, text in advice(episode)] == ['I look.\nlook {"at": "é"}']


@pytest.mark.parametrize("how", WORLDS)
def test_positions_of_an_advised_world_are_positions(tmp_path, how):
    more = "\nfrom jprm.methods.agents.advice import advised\n"
    more += "ADVISED = advised(COUNTER, lambda record: [0.5 / (1 + i) for i in range(len(record['messages']) // 2)],"
    (tmp_path / "counter.py").write_text(f"{COUNTER}{more} every=2, words='{{turn}}?')\n")
    world = World(f"{tmp_path / 'counter.py'}:ADVISED", **WORLDS[how])
    first = world.step(world.start([{"start": 1, "problem": "p"}]), ["1"])
    ends = [world.step(first, [text])[0] for text in ("2", "3", "2")]
    assert [told(end)[-2:] for end in ends] == [["4", "2?"], ["5", "2?"], ["4", "2?"]]
    (after,) = world.step(world.step([ends[0]], ["1"]), ["1"])
    assert told(after)[-2:] == ["6", "4?"] and not world.failures
    (again,) = world.replay([after.record], [[after.messages[i] for i in after.turns]])
    assert again.messages == after.messages


def test_a_critic_that_fails_costs_its_own_episode():
    world = World(advised(ECHO, lambda record: [0.1, 0.2], every=1))
    (episode,) = world.step(world.start([{}]), ["1"])
    assert episode.done and "2 scores to 1 turns" in episode.error


def test_a_model_is_a_critic(one_device, tmp_path):
    for seed in (0, 1):
        save_run(tmp_path / str(seed), MODEL, seed, 1.0)
        save_tokenizer(tmp_path / str(seed) / "tokenizer.json")
        (tmp_path / str(seed) / "tokenizer_config.json").write_text("{}")
    critics = [Critic(tmp_path / "0"), Critic(tmp_path / "1")]
    episode = played(advised(ECHO, critics[0], every=2, words="{turn} {percent}"), ["abc", "de"])
    ((_, text),) = advice(episode)
    record = {"messages": [m for m in episode.messages if m["content"] != text], "problem": "p"}
    (scored,) = jprm.load(tmp_path / "0").score_many([record])
    scores = [m["score"] for m in scored["messages"] if m["role"] == "assistant"]
    lowest = min(range(2), key=scores.__getitem__)
    assert text == f"{lowest + 1} {math.floor(100 * scores[lowest])}"
    assert critics[0](record) == pytest.approx(scores, abs=1e-6)
    assert len({digest(advised(ECHO, critic, every=every)) for critic in critics for every in (1, 2)}) == 4


def test_what_cannot_be_advice_is_refused():
    refused(ValueError, "at least 1", advised, ECHO, Letters(), every=0)
    refused(ValueError, "{score}, which is none of percent, said, turn", advised, ECHO, Letters(), every=1,
            words="{score}")  # fmt: skip
