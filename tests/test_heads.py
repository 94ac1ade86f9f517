"""Heads: their channels and losses, of rollouts, and of classes."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from refusing import refused
from scipy import stats
from tiny_run import MODEL, experiment, make_data, one_device, training

import jprm
from jprm.experiment import ObjectiveConfig, TargetConfig, from_json, to_json
from jprm.methods.decoding.cache import LiveTrees
from jprm.methods.layers import rollouts
from jprm.methods.layers.rollouts import BETA, counts, log_likelihood, settled
from jprm.model.config import ModelConfig
from jprm.model.heads import HEADS, PROBABILITY, Head, Readout, find, of_channels
from jprm.objectives import cross_entropy
from jprm.rows import empty_rows

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


# ---- The head of rollouts: counts' likelihoods against scipy's, a fit that finds the distribution, and when to stop.


HEAD = "jprm.methods.layers.rollouts:BETA"


def test_the_likelihood_is_that_of_the_beta_binomial():
    for n, a, b in ((1, 0.7, 2.0), (8, 3.0, 0.4), (40, 1.0, 1.0)):
        k_N = np.arange(n + 1.0)
        ours = log_likelihood(jnp.float32(a), jnp.float32(b), jnp.asarray(k_N), jnp.full(n + 1, float(n)))
        np.testing.assert_allclose(ours, stats.betabinom.logpmf(k_N, n, a, b), rtol=2e-4, atol=2e-5)


def test_one_rollout_is_cross_entropy():
    logit_N2, target_N = jax.random.normal(jax.random.key(0), (6, 2)), jnp.arange(6) % 2.0
    ours = log_likelihood(*rollouts._parameters(logit_N2), target_N, jnp.ones(6))
    np.testing.assert_allclose(ours, BETA.likelihood(logit_N2, target_N), rtol=1e-4, atol=1e-6)


def rows_of(k_M, n_M):
    rows = empty_rows(1, len(k_M), len(k_M))
    rows.step_end[:] = np.arange(len(k_M))
    rows.label[:], rows.weight[:], rows.owned[:] = k_M / n_M, 1.0, True
    return dataclasses.replace(rows, extras={"rollouts": np.asarray(n_M, np.float32)[None]})


@pytest.fixture
def config():
    model = ModelConfig(
        vocab_size=8, layers=1, width=8, heads=2, kv_heads=1, head_dim=4, mlp_width=8, rope_theta=1e4, norm_eps=1e-6,
        head=HEAD,
    )  # fmt: skip
    return ObjectiveConfig(model, TargetConfig("value", "none", "keep"), extras=("rollouts",))


def test_a_fit_finds_the_distribution_that_fractions_hide(config):
    """Steps that read alike, with chances of Beta(2, 6), and two rollouts or twelve each."""
    rng = np.random.default_rng(0)
    n_M = rng.choice([2, 12], 4000)
    rows = rows_of(rng.binomial(n_M, rng.beta(2, 6, 4000)), n_M)

    @jax.jit
    def step(logit_C, state):
        def loss(logit_C):
            total, count, _ = counts.of_logits(jnp.tile(logit_C, (1, 4000, 1)), rows, config)
            return total / count

        update, state = optimizer.update(jax.grad(loss)(logit_C), state)
        return optax.apply_updates(logit_C, update), state

    optimizer, logit_C = optax.adam(0.05), jnp.zeros(2)
    state = optimizer.init(logit_C)
    for _ in range(300):
        logit_C, state = step(logit_C, state)
    right, wrong = map(float, rollouts._parameters(logit_C))
    assert right == pytest.approx(2, rel=0.1)
    assert wrong == pytest.approx(6, rel=0.1)
    outputs = BETA.readout(logit_C)
    assert float(outputs["score"]) == pytest.approx(0.25, abs=0.01)
    assert float(outputs["worth"]) == pytest.approx(right + wrong)
    inside = stats.beta.cdf(float(outputs["high"]), 2, 6) - stats.beta.cdf(float(outputs["low"]), 2, 6)
    assert 0.88 < inside < 0.97  # nine tenths, about: the spread is that of a normal distribution


def test_rollouts_that_stop_when_settled_err_as_seldom_as_they_say_and_are_fewer():
    """Chances as the guesses say; each step's rollouts one by one until it is settled on which side of 1/2 it is."""
    rng = np.random.default_rng(1)
    score_N, worth_N = rng.uniform(0.05, 0.95, 3000), rng.uniform(2, 30, 3000)
    chance_N = rng.beta(score_N * worth_N, (1 - score_N) * worth_N)

    def run(score_N, worth_N):
        k_N, n_N = np.zeros((2, 3000))
        done_N = settled(score_N, worth_N, k_N, n_N, 0.5)
        while not done_N.all() and n_N.max() < 64:
            drawn_N = np.random.default_rng(int(n_N.max())).random(3000) < chance_N
            k_N, n_N = k_N + (drawn_N & ~done_N), n_N + ~done_N
            done_N |= settled(score_N, worth_N, k_N, n_N, 0.5)
        mean_N = (score_N * worth_N + k_N) / (worth_N + n_N)
        return ((mean_N > 0.5) != (chance_N > 0.5))[done_N].mean(), n_N.mean()

    error, mean = run(score_N, worth_N)
    assert error <= 0.05
    uniform_error, uniform_mean = run(np.full(3000, 0.5), np.full(3000, 2.0))
    assert mean < 0.7 * uniform_mean
    assert error < uniform_error + 0.01


def test_what_does_not_fit_is_refused(config):
    counts.check(config)
    other = dataclasses.replace(config, model=dataclasses.replace(config.model, head="binary"))
    refused(ValueError, "rollouts:BETA", counts.check, other)
    refused(ValueError, "data.extras lacks 'rollouts'", counts.check, dataclasses.replace(config, extras=()))
    cross_entropy.check(config)  # which learns only the mean
