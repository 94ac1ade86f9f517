"""AdamW: the schedule's values, and what each parameter's path decides."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
from refusing import refused

from jprm.experiment import OptimizerConfig
from jprm.model.parameters import join, split
from jprm.train.state import make_optimizer, schedule

PARAMS = {
    "decoder": {"embed": jnp.ones((4, 2)), "layers_0": {"query": jnp.ones(3), "attention_norm": jnp.ones(3)}},
    "head": {"kernel": jnp.ones((2, 2)), "bias": jnp.ones(2)},
}
FLAT = split(PARAMS, "")[0]
CONSTANT = OptimizerConfig(learning_rate=0.1, decay="constant", clip_norm=0)


def update(config, gradients, params=FLAT):
    tx = make_optimizer(config)
    updates, _ = tx.update(gradients, tx.init(params), params, rate=config.learning_rate)
    return updates


def test_schedules():
    def rates(steps=8, **fields):
        rate = schedule(OptimizerConfig(learning_rate=1.0, **fields), steps)
        return [float(rate(i)) for i in range(steps)]

    # The first of four warm-up updates does something, and so does the last update of all.
    warm = [0.25, 0.5, 0.75, 1.0]
    close = lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6)  # noqa: E731  (float32)
    close(rates(warmup_steps=4, decay="constant"), [*warm, 1, 1, 1, 1])
    close(rates(warmup_steps=4, decay="linear"), [*warm, 0.8, 0.6, 0.4, 0.2])
    close(rates(warmup_steps=4, decay="cosine"), [*warm, *(0.5 + 0.5 * np.cos(np.pi * np.arange(1, 5) / 5))])
    close(rates(decay="linear"), 1 - np.arange(8) / 8)
    close(rates(warmup_steps=1), rates())
    close(rates(steps=2, warmup_steps=4), warm[:2])  # shorter than its warm-up
    close(rates(steps=4, warmup_steps=4), warm)


def test_the_first_update_is_the_rate_times_the_sign():
    gradients = jax.tree.map(lambda x: -3.0 * x, FLAT)
    for value in jax.tree.leaves(update(CONSTANT, gradients)):
        np.testing.assert_allclose(value, 0.1, rtol=1e-5)  # Adam's eps, and float32


def test_the_global_gradient_is_clipped():
    """Seen through a huge eps, which makes Adam linear."""
    config = dataclasses.replace(CONSTANT, clip_norm=1.0, eps=1e6)
    small, large = ({path: scale * x for path, x in FLAT.items()} for scale in (0.01, 100.0))
    norm = float(optax.tree.norm(large))
    cases = (1.0, large, 100 / norm / 1e6), (1.0, small, 0.01 / 1e6), (0, large, 100 / (1e6 + 100))
    for clip_norm, gradients, wanted in cases:
        actual = update(dataclasses.replace(config, clip_norm=clip_norm), gradients)
        np.testing.assert_allclose(actual["head/bias"], -0.1 * wanted, rtol=1e-5)


def test_weight_decay_spares_norms_biases_and_embeddings():
    zero = jax.tree.map(jnp.zeros_like, FLAT)
    decayed = update(dataclasses.replace(CONSTANT, weight_decay=0.5), zero)
    assert {path for path, value in decayed.items() if np.any(value)} == {"decoder/layers_0/query", "head/kernel"}
    np.testing.assert_allclose(decayed["head/kernel"], -0.1 * 0.5, rtol=1e-6)


def test_rate_factors_scale_the_whole_update_and_the_first_match_counts():
    factors = (("head/bias", 0.0), ("head", 10.0), ("embed", 0.5))
    config = dataclasses.replace(CONSTANT, weight_decay=0.5)
    plain, scaled = (update(dataclasses.replace(config, rate_factors=f), FLAT) for f in ((), factors))
    for path, value in plain.items():
        factor = {"head/bias": 0, "head/kernel": 10, "decoder/embed": 0.5}.get(path, 1)
        np.testing.assert_allclose(scaled[path], factor * value, rtol=1e-6)


def test_frozen_parameters_are_set_apart():
    trained, frozen = split(PARAMS, r"embed|layers_0/query")
    assert set(frozen) == {"decoder/embed", "decoder/layers_0/query"} and not set(trained) & set(frozen)
    jax.tree.map(np.testing.assert_array_equal, join(trained, frozen), PARAMS)
    state = make_optimizer(CONSTANT).init(trained)
    assert sum(x.size for x in jax.tree.leaves(state)) == 2 * sum(x.size for x in trained.values()) + 2  # two counts
    assert split(PARAMS, "")[1] == {}
    refused(ValueError, "freeze='hed'", split, PARAMS, "hed")
    refused(ValueError, "train", split, PARAMS, "/")
