"""Heads with bounds: what their losses teach, in closed form."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.optimize import minimize

from jprm.model.heads import HEADS, LEVELS, MEMBERS, find
from jprm.objectives import log_odds

VALUES = np.concatenate([np.linspace(0.3, 0.7, 401), np.linspace(0.5, 0.9, 400)]).astype(np.float32)


def fitted(name):
    """The channels at which the values, of steps that look alike, are likeliest."""
    head = find(name)
    slope = jax.jit(jax.value_and_grad(lambda x_C: -jnp.mean(head.likelihood(jnp.tile(x_C, (len(VALUES), 1)), VALUES))))
    start_C = np.linspace(-0.5, 0.5, len(head.channels))
    return minimize(lambda x_C: [np.asarray(y, float) for y in slope(x_C)], start_C, jac=True, method="BFGS").x


def test_a_quantile_head_learns_the_mean_and_the_quantiles():
    named = find("quantile").readout(jnp.array(fitted("quantile")))
    assert named["score"] == pytest.approx(VALUES.mean(), abs=1e-3)
    wanted = np.quantile(VALUES, LEVELS)
    # The loss is flat to float32's 1e-7 within this.
    np.testing.assert_allclose([named["low"], named["high"]], wanted, atol=0.01)
    assert np.mean((named["low"] <= VALUES) & (VALUES <= named["high"])) == pytest.approx(0.9, abs=0.03)


def test_quantiles_teach_the_mean_nothing():
    """The score is that of a head of one log-odds, trained alone; and bounds are around it whatever the logits."""
    logit_BC = jax.random.normal(jax.random.key(0), (50, 3)) * 5
    target_B = jax.random.uniform(jax.random.key(1), (50,))
    slope_BC = jax.grad(lambda x: jnp.sum(find("quantile").likelihood(x, target_B)))(logit_BC)
    alone_B1 = jax.grad(lambda x: jnp.sum(find("scalar").likelihood(x, target_B)))(logit_BC[:, :1])
    np.testing.assert_allclose(slope_BC[:, :1], alone_B1, rtol=1e-6, atol=1e-7)
    assert (np.abs(slope_BC[:, 1:]).max(0) > 1e-3).all()
    named = find("quantile").readout(logit_BC)
    assert (named["low"] <= named["score"]).all() and (named["score"] <= named["high"]).all()


def test_members_learn_alone_and_their_spread_bounds_the_score():
    logit_BC = jax.random.normal(jax.random.key(0), (50, MEMBERS))
    target_B = jax.random.uniform(jax.random.key(1), (50,))
    slope_BC = jax.grad(lambda x: jnp.sum(find("ensemble").likelihood(x, target_B)))(logit_BC)
    for i in range(MEMBERS):
        alone_B1 = jax.grad(lambda x: jnp.sum(find("scalar").likelihood(x, target_B)))(logit_BC[:, i : i + 1])
        np.testing.assert_allclose(MEMBERS * slope_BC[:, i : i + 1], alone_B1, rtol=1e-5, atol=1e-7)
    named, p_BC = find("ensemble").readout(logit_BC), 1 / (1 + np.exp(-np.asarray(logit_BC, float)))
    np.testing.assert_allclose(named["score"], p_BC.mean(1), rtol=1e-5)
    np.testing.assert_allclose(named["low"], np.maximum(p_BC.mean(1) - 1.645 * p_BC.std(1, ddof=1), 0), atol=1e-5)
    np.testing.assert_allclose(named["high"], np.minimum(p_BC.mean(1) + 1.645 * p_BC.std(1, ddof=1), 1), atol=1e-5)


def test_log_odds_are_those_of_the_score():
    """Where the members of an ensemble agree."""
    for name in (name for name, head in HEADS.items() if head.log_odds):
        logit_BC = jnp.linspace(-3, 3, 7)[:, None] * jnp.array(find(name).log_odds)
        score_B = find(name).readout.score(logit_BC)
        np.testing.assert_allclose(log_odds(find(name), logit_BC), np.log(score_B / (1 - score_B)), rtol=1e-4)
