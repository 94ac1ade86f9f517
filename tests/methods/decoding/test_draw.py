"""Sampled tokens follow the distribution of temperature and nucleus: chi-square against its closed form."""

import functools

import jax
import numpy as np
import pytest
import scipy.stats
from families import breadth

from jprm.methods.decoding.decode import draw

LOGITS = np.array([2.0, 1.5, 1.5, 0.0, -1.0, -30.0, 1.0], np.float32)
DRAWS = 20_000
drawn = jax.jit(draw, static_argnums=(2, 3))


def closed_form(temperature, top_p):
    """By sorting, as the nucleus is defined; the two equal tokens are in it or out of it together."""
    p = np.exp(LOGITS.astype(np.float64) / temperature)
    p /= p.sum()
    more_probable = np.array([p[p > x].sum() for x in p])
    p = np.where(more_probable < top_p, p, 0)
    return p / p.sum()


@pytest.mark.parametrize("temperature, top_p", [(1.0, 1.0), (0.5, 1.0), (1.0, 0.9), (1.5, 0.5), (1.0, 1e-6)])
@pytest.mark.parametrize("padding", [0, *breadth([400])])
def test_draws_follow_the_closed_form(temperature, top_p, padding):
    # Impossible tokens before, so that the vocabulary is more than one block of the inversion.
    logits = np.concatenate([np.full(padding, -np.inf, np.float32), LOGITS])
    keys = jax.random.split(jax.random.key(7), DRAWS)
    tokens = np.asarray(drawn(keys, np.tile(logits, (DRAWS, 1)), temperature, top_p)) - padding
    expected = closed_form(temperature, top_p)
    assert np.isin(tokens, np.flatnonzero(expected)).all()
    counts = np.bincount(tokens, minlength=len(LOGITS))
    kept = expected * DRAWS > 1
    if kept.sum() > 1:
        # A right sampler fails once in a thousand keys; the key is fixed, and this one does not.
        assert scipy.stats.chisquare(counts[kept], expected[kept] / expected[kept].sum() * counts[kept].sum())[1] > 1e-3


def test_temperature_zero_takes_the_most_probable():
    logits = np.random.default_rng(0).normal(size=(50, 300)).astype(np.float32)
    keys = jax.random.split(jax.random.key(0), 50)
    np.testing.assert_array_equal(drawn(keys, logits, 0, 0.5), logits.argmax(-1))


def test_a_row_is_drawn_alike_in_any_company():
    logits = np.random.default_rng(1).normal(size=(8, 300)).astype(np.float32)
    keys = jax.random.split(jax.random.key(1), 8)
    alone = functools.partial(drawn, keys[3:4], logits[3:4])
    for top_p in (1.0, 0.4):
        assert drawn(keys, logits, 1.0, top_p)[3] == alone(1.0, top_p)[0]
