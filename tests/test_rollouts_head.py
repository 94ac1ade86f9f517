"""The head of rollouts: counts' likelihoods against scipy's, a fit that finds the distribution, and when to stop."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from refusing import refused
from scipy import stats

from jprm.experiment import ObjectiveConfig, TargetConfig
from jprm.methods.layers import rollouts
from jprm.methods.layers.rollouts import BETA, counts, log_likelihood, settled
from jprm.model.config import ModelConfig
from jprm.objectives import cross_entropy
from jprm.rows import empty_rows

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
