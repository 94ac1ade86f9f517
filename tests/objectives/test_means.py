"""Means of metrics are plain numbers, which a notebook prints as they are."""

import jax.numpy as jnp

from jprm.objectives import BINS, ScoreSums


def test_means_are_python_floats():
    sums = ScoreSums(right=jnp.float32(1), histogram_CN=jnp.ones((2, BINS), jnp.float32))
    assert {name: type(value) for name, value in sums.means().items()} == {"step_accuracy": float, "auroc": float}
