"""Heads: their channels, named outputs and losses."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from refusing import refused
from tiny_run import MODEL, experiment, make_data, one_device, training

import jprm
from jprm.experiment import from_json, to_json
from jprm.methods.decoding.cache import LiveTrees
from jprm.model.config import ModelConfig
from jprm.model.heads import HEADS, PROBABILITY, Head, Readout, find, of_channels

LEVELS = (0.1, 0.5, 0.9)


def level(channel):
    return lambda logit_BSC: jax.nn.sigmoid(logit_BSC[..., channel])


def pinball(logit_BSC, target_BS):
    """The log-likelihood of asymmetric Laplace distributions around the quantiles (Koenker and Machado 1999)."""
    q_C, above_BSC = jnp.array(LEVELS), target_BS[..., None] - jax.nn.sigmoid(logit_BSC)
    return -jnp.sum(jnp.maximum(q_C * above_BSC, (q_C - 1) * above_BSC), axis=-1)


QUANTILES = Head(
    ("low", "median", "high"), Readout(score=level(1), low=level(0), high=level(2)), PROBABILITY, pinball,
    bias=(-1.0, 0.0, 1.0),
)  # fmt: skip


@pytest.fixture(scope="module")
def quantile_run(tmp_path_factory):
    """A run of two steps with a head of this file, as an experiment outside the library names it."""
    folder = tmp_path_factory.mktemp("quantiles")
    model = dataclasses.replace(MODEL, head="test_heads:QUANTILES")
    run = experiment(make_data(folder / "data"), model=model, objective="likelihood", steps=2, valid=())
    with one_device():
        training.train(run, folder / "run")
    return folder / "run"


def test_a_head_of_the_users_own_trains_and_scores(quantile_run):
    prm = jprm.load(quantile_run)
    bias_C = np.asarray(prm.params["head"]["bias"])
    assert bias_C.shape == (3,) and (bias_C != np.array([-1.0, 0.0, 1.0])).all()  # each quantile had a gradient
    np.testing.assert_allclose(bias_C, [-1, 0, 1], atol=0.1)  # and started where the record says
    score_P = prm.score("add 1", ["bad 2", "cut 3"])
    assert score_P.shape == (2,) and (0 < score_P).all() and (score_P < 1).all()
    chain = {"problem": "add 1", "steps": ["bad 2", "cut 3"]}
    (record,) = prm.score_many([chain])
    assert record["scores"] == pytest.approx(score_P.tolist(), abs=1e-6)
    outputs = record["outputs"]
    assert sorted(outputs) == ["high", "low"] and {len(values) for values in outputs.values()} == {2}
    assert all(a < b < c for a, b, c in zip(outputs["low"], record["scores"], outputs["high"], strict=True))
    (tree,) = prm.score_many([{"problem": "add 1", "nodes": [{"parent": -1, "text": "bad 2"}]}])
    assert tree["nodes"][0]["outputs"]["low"] == pytest.approx(outputs["low"][0], abs=1e-5)  # rows of another length


def test_a_search_may_go_by_another_output(quantile_run):
    """Live and in batches: the lower bound in place of the score."""
    prm = jprm.load(quantile_run)
    careful, steps = prm.by("low"), ["bad 2", "cut 3"]
    (record,) = prm.score_many([{"problem": "add 1", "steps": steps}])
    np.testing.assert_allclose(careful.score("add 1", steps), record["outputs"]["low"], atol=1e-6)
    trees = LiveTrees(careful)
    (root,) = trees.open(["add 1"])
    _, (live,) = trees.extend([root], steps[:1])
    assert live == pytest.approx(record["outputs"]["low"][0], abs=1e-5)  # rows of another length
    assert prm.by("score") is prm
    refused(ValueError, "'lower'", prm.by, "lower")


def test_named_outputs_go_along_with_the_score():
    named = QUANTILES.readout(jnp.array([[-1.0, 0.0, 1.0]]))
    assert list(named) == ["score", "low", "high"]
    assert named["low"] < named["score"] == 0.5 < named["high"]
    score_B, correct_B = QUANTILES.judge(jnp.zeros((2, 3)), jnp.array([0.4, 0.5]))
    assert score_B.tolist() == [0.5, 0.5] and correct_B.tolist() == [False, True]


def test_an_experiment_names_heads():
    for name in ["test_heads:QUANTILES", *HEADS]:
        config = dataclasses.replace(MODEL, head=name)
        assert from_json(ModelConfig, to_json(config)) == config
        assert isinstance(find(config.head), Head)
    assert [of_channels(n) for n in (0, 1, 2, 3)] == ["language", "scalar", "binary", "ternary"]


def test_a_head_without_a_meaning_has_any_number_of_channels():
    assert (of_channels(4), of_channels(5)) == ("channels=4", "channels=5")  # five members are no plain channels
    head = find("channels=4")
    assert (head.size(100), head.log_odds, find("channels=4") == head) == (4, (), True)
    refused(ValueError, "head='channels=0'", find, "channels=0")
