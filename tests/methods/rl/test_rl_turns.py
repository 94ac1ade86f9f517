"""Reinforcement learning over turns: what the world wrote has no weight, and a run in an environment."""

import dataclasses
import itertools
import json
import types
from typing import Any

import numpy as np
import pytest
import test_turns
from refusing import refused
from tiny_rl import save
from tiny_run import lines, one_device

import jprm
from jprm.experiment import OptimizerConfig
from jprm.io.jsonl import write_records
from jprm.methods.rl import loop, rollout
from jprm.methods.rl.config import EnvironmentConfig, RLExperiment
from jprm.methods.rl.credit import CreditConfig, token_advantages
from jprm.methods.rl.samples import Rollout, group_tree
from jprm.tree import tree_of

WORLD = """
import copy
from jprm.methods.worlds.environment import Environment, Reply

def reset(record):
    return {"left": 2}, [{"role": "user", "content": record["problem"]}]

def step(state, message):
    text = message["content"]
    if "i" in text and "h" in text:
        raise ConnectionError("the world is down")
    state["left"] -= 1
    letters = [letter for letter in text if letter in "abc"]
    if not state["left"]:
        return Reply((), True, float("a" in text))
    return Reply(({"role": "tool", "content": "".join(letters[:2]) + "!"},))

WORLD = Environment(reset, step, copy.deepcopy)
"""


def episode_of(ids, observed, stops, reward=1.0):
    log = np.where(np.isin(np.arange(len(ids)), [i for a, b in observed for i in range(a, b)]), 0.0, -1.0)
    episode = {"messages": [], "turns": [], "reward": reward, "error": ""}
    return Rollout(tuple(ids), log.astype(np.float32), stops, ("x",) * len(stops), True, (1, 2), observed, episode)


@pytest.mark.parametrize("norm", ["sequence", "group", "constant"])
def test_credit_is_by_turn_and_what_the_world_wrote_has_none(norm):
    samples = [episode_of([5, 6, 7, 8, 9, 3], ((2, 4),), (2, 6)), episode_of([5, 6, 7, 8, 4], ((2, 4),), (2, 5))]
    config = CreditConfig("sum", "rloo", norm, length=4 if norm == "constant" else 0)
    advantage = token_advantages(samples, np.array([1.0, 0.0]), [np.array([0.9, 0.2]), np.array([0.5, 0.6])], config)
    # outcome 1 - 0; reward to go of turn 1 is 1.1 against 1.1, of turn 2 is 0.2 against 0.6
    divisor = {"sequence": (4, 3), "group": (3.5, 3.5), "constant": (4, 4)}[norm]
    wanted = [[1.0, 1.0, 0, 0, 0.6, 0.6], [-1.0, -1.0, 0, 0, -0.6]]
    for got, want, size in zip(advantage, wanted, divisor, strict=True):
        np.testing.assert_allclose(got, np.array(want) / size, atol=1e-12)
    tree = group_tree("p", (1, 2), samples, advantage)
    token_M = tree.label_M.astype(int)
    by_name = {name: dict(zip(token_M.tolist(), tree.extras[name].tolist(), strict=True)) for name in tree.extras}
    assert by_name["count"] == {5: 2, 6: 2, 7: 0, 8: 0, 9: 1, 3: 1, 4: 1}
    assert dict(zip(token_M.tolist(), tree.weight_M.tolist(), strict=True)) == by_name["count"]
    assert by_name["gain"][7] == by_name["penalty"][8] == 0 and by_name["old"][7] == 0
    assert Rollout.of_json(json.loads(json.dumps(samples[0].json()))).observed == samples[0].observed


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("world")
    heads = {"policy": test_turns.MODEL, "prm": dataclasses.replace(test_turns.MODEL, head="binary")}
    for name, model in heads.items():
        config = {"eos_token": "<end>", "chat_template": test_turns.TEMPLATE}
        save(folder / name, test_turns.words_tokenizer().inner, config, model, test_turns.weights(model=model))
    (folder / "world.py").write_text(WORLD)
    problems = [{"problem": "".join(letters)} for letters in itertools.product("abc", repeat=3)]
    write_records(folder / "problems.jsonl", problems[:20])
    write_records(folder / "held_out.jsonl", problems[20:])
    return folder


def experiment(folder, **changes):
    values: dict[str, Any] = dict(
        name="turns", policy=str(folder / "policy"), problems=(str(folder / "problems.jsonl"),),
        held_out=(str(folder / "held_out.jsonl"),), prm=str(folder / "prm"),
        credit=CreditConfig("sum", "rloo", "sequence"),
        environment=EnvironmentConfig(f"{folder}/world.py:WORLD", turns=4, at_once=4),
        optimizer=OptimizerConfig(learning_rate=0.02, decay="constant"), updates=2, problems_an_update=4, samples=4,
        max_tokens=24, tokens=128, micro_rows=4, evaluate_every=2, evaluate_samples=4, checkpoint_every=1,
        reference=False,
    )  # fmt: skip
    return RLExperiment(**(values | changes))


@pytest.fixture(scope="module")
def halves(folder):
    """The results of a run that ended after one update, and of its continuation."""
    with one_device():
        return [loop.train(experiment(folder, updates=updates), folder / "halves") for updates in (1, 2)]


def test_a_run_in_an_environment_learns_counts_what_is_lost_and_continues(folder, halves):
    first, result = halves
    updates = [line for line in lines(folder / "halves") if "lost" in line]
    assert first["update"] == 1
    assert result["finished"] and [line["update"] for line in updates] == [1, 2]
    assert any(line["lost"] > 0 for line in updates) and all(line["observed"] > 0 for line in updates)
    assert all(line["packed_tokens"] < line["separate_tokens"] for line in updates)


@pytest.mark.breadth
def test_a_run_in_an_environment_that_continues_is_one_that_was_not_stopped(folder, halves):
    with one_device():
        whole = loop.train(experiment(folder), folder / "run")
    assert whole["evaluations"][-1]["gold_P"] == halves[1]["evaluations"][-1]["gold_P"]


def test_a_prm_scores_every_turn_of_episodes(folder, one_device):
    prm = jprm.load(folder / "prm")
    said = [{"role": "user", "content": "abc"}, {"role": "assistant", "content": "a"}]
    more = [*said, {"role": "tool", "content": "b!"}, {"role": "assistant", "content": "cd"}]
    samples = [
        Rollout((5, 0), np.zeros(2, np.float32), (2,), ("a",), True, (1,), (), _episode(said, [1])),
        Rollout((5, 0, 6, 7, 0), np.zeros(5, np.float32), (2, 5), ("a", "cd"), True, (1,), ((2, 3),),
                   _episode(more, [1, 3])),
        Rollout((5,), np.zeros(1, np.float32), (1,), ("x",), False, (1,), (), _episode(said[:1], [])),
    ]  # fmt: skip
    (scores,) = rollout.scored(prm, [{"problem": "abc"}], [samples])
    alone = prm.score_trees([tree_of({"messages": sample.messages(), "segment": "turn"}) for sample in samples])
    assert [len(score_P) for score_P in scores] == [1, 2, 1]
    for score_P, score_N in zip(scores, alone, strict=True):
        np.testing.assert_allclose(score_P, score_N[~np.isnan(score_N)], atol=1e-5)
    assert scores[0][0] == pytest.approx(scores[1][0], abs=1e-6)


def test_a_fused_verifier_rates_an_episode_by_its_last_turn(monkeypatch):
    """Its score of the last step is that of the chain; the lowest is no score of anything."""
    fused, low = types.SimpleNamespace(of_pool=True), np.array([0.1, 0.7])
    monkeypatch.setattr(rollout, "scored", lambda prm, records, drawn: [[low for _ in samples] for samples in drawn])
    samples = [episode_of([5, 6], (), (1, 2)) for _ in range(2)]
    (group,) = rollout.judged([{"problem": "abc"}], [samples], lambda: None, -1.0, fused)
    assert group.chain_scores.tolist() == [0.7, 0.7]


def _episode(messages, turns):
    return {"messages": messages, "turns": turns, "reward": 0.0, "error": ""}


def test_what_episodes_do_not_go_with_is_refused(folder):
    for reason, changes in {
        "takes whole texts": {"method": "dpo"},
        "ratios of sequences": {"credit": CreditConfig("verifier", "rloo", "last"),
                                "objective_options": {"ratio": "sequence"}},
    }.items():  # fmt: skip
        refused(ValueError, f"environment=.*{reason}", experiment, folder, **changes)


@pytest.mark.parametrize("method", ["policy_gradient", "dpo", "rejection"])
def test_episodes_that_begin_differently_are_trained_each_after_its_own_beginning(method):
    """A world that draws its start: the baseline is the task's, the tokens before a sample are its own."""
    none = ((0, 0),)
    begun = (
        episode_of([5, 6], none, (2,)),
        episode_of([5, 7], none, (2,), 0.0),
        episode_of([5, 8], none, (2,)),
        episode_of([9, 8], none, (2,), 0.0),
    )
    starts = (1, 2, 3), (1, 2, 9, 9)
    samples = [dataclasses.replace(x, prompt=starts[i]) for x, i in zip(begun, (0, 1, 1, 0), strict=True)]
    group = rollout.Group({"problem": "p"}, samples, np.array([1.0, 0.0, 1.0, 0.0]), None)
    config: Any = types.SimpleNamespace(method=method, credit=CreditConfig("verifier", "rloo", "sequence"), tokens=16)
    layout: Any = None  # samples have their own prompts
    trees = rollout.trees_of([group], layout, config)
    wanted = {(*starts[0], 5, 6), (*starts[0], 9, 8), (*starts[1], 5, 7), (*starts[1], 5, 8)}
    if method == "rejection":
        wanted = {(*starts[0], 5, 6), (*starts[1], 5, 8)}
    assert {chain for tree in trees for chain in chains_in(tree)} == wanted
    if method == "policy_gradient":
        alike = dataclasses.replace(group, samples=[dataclasses.replace(x, prompt=starts[0]) for x in samples])
        (whole,) = rollout.trees_of([alike], layout, config)
        for extra in ("gain", "penalty"):
            assert sum(t.extras[extra].sum() for t in trees) == pytest.approx(whole.extras[extra].sum()) != 0


def chains_in(tree):
    """Returns the ids of each chain of a tree of tokens, its problem's among them."""
    paths = []
    for start, length, parent in zip(tree.start_R, tree.length_R, tree.parent_R, strict=True):
        paths.append((*(paths[parent] if parent >= 0 else ()), *tree.tokens_N[start : start + length].tolist()))
    return [path for i, path in enumerate(paths) if i not in set(tree.parent_R.tolist())]
