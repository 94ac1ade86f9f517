"""Optimizers: the schedule's values, and what each parameter's path decides."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from refusing import refused
from tiny_run import lines, one_device

from jprm import train as training
from jprm.experiment import OptimizerConfig, override
from jprm.model.mesh import MeshConfig, make_mesh, sharding
from jprm.model.parameters import join, split
from jprm.model.transformer import axes_of
from jprm.train.state import initial_state, make_optimizer, schedule

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


# ---- Optimizers and schedules by name.

OWN = """
import optax


def signs(config):
    return optax.scale_by_sign()


def stable(rate, steps):
    last = max(steps // 4, 1)
    parts = [optax.constant_schedule(rate), optax.linear_schedule(rate, 0.0, last)]
    return optax.join_schedules(parts, [steps - last])
"""


def test_an_optimizer_and_a_schedule_of_ones_own(tmp_path):
    (tmp_path / "own.py").write_text(OWN)
    config = dataclasses.replace(CONSTANT, name=f"{tmp_path}/own.py:signs", weight_decay=0.5)
    updates = update(config, jax.tree.map(lambda x: -3.0 * x, FLAT))
    np.testing.assert_allclose(updates["decoder/layers_0/query"], 0.1 - 0.1 * 0.5, rtol=1e-6)  # decay is jprm's
    rate = schedule(OptimizerConfig(1.0, warmup_steps=2, decay=f"{tmp_path}/own.py:stable"), 10)
    np.testing.assert_allclose([float(rate(i)) for i in (0, 1, 6, 9)], [0.5, 1.0, 1.0, 0.5])
    refused(ValueError, "adamw, muon", OptimizerConfig, 1.0, name="adam")
    refused(ValueError, "optimizer.decay", OptimizerConfig, 1.0, decay="exp")


def test_muon_makes_matrices_orthogonal_on_any_mesh_and_leaves_the_rest_to_adam():
    rng = np.random.default_rng(0)
    shapes = {"decoder/layers_0/gate": (2, 16, 24), "decoder/layers_0/query": (2, 16, 2, 2, 4), "head/bias": (3,)}
    flat = {path: rng.normal(size=shape).astype(np.float32) for path, shape in shapes.items()}
    tx, results = make_optimizer(dataclasses.replace(CONSTANT, name="muon")), []
    for mesh, count in ((MeshConfig(), 1), (MeshConfig(fsdp=2, tensor=2), 4)):
        with jax.set_mesh(make_mesh(mesh, jax.devices()[:count])):
            params = {path: jax.device_put(x, sharding(*axes_of(path.rpartition("/")[2]))) for path, x in flat.items()}
            step = jax.jit(lambda g, s, p: tx.update(g, s, p, rate=0.1))
            state = jax.jit(tx.init)(params)
            for _ in range(2):
                updates, state = step(params, state, params)
            results.append(jax.tree.map(np.asarray, updates))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), *results)
    gate = results[0]["decoder/layers_0/gate"][0] / 0.1
    sizes = np.linalg.svd(gate, compute_uv=False)
    assert sizes.max() / sizes.min() < 2.5  # Newton-Schulz leaves singular values near one another
    np.testing.assert_allclose(np.abs(results[0]["head/bias"]), 0.1, rtol=1e-4)


@pytest.mark.slow
def test_muon_continues_bit_for_bit_on_eight_devices(tiny_run, tmp_path):
    experiment = dataclasses.replace(
        tiny_run.experiment, steps=6, checkpoint_every=3, log_every=1,
        optimizer=OptimizerConfig(learning_rate=0.01, name="muon", decay="constant"),
        mesh=MeshConfig(data=2, fsdp=2, tensor=2),
    )  # fmt: skip
    for folder, steps in (("whole", (6,)), ("parts", (3, 6))):
        for last in steps:
            training.train(dataclasses.replace(experiment, steps=last), tmp_path / folder)
    whole, parts = ([row["loss"] for row in lines(tmp_path / folder) if "loss" in row] for folder in ("whole", "parts"))
    assert whole[3:] == parts[-3:]


@pytest.mark.parametrize("lora", [[], ["lora.rank=2"]])
def test_a_pattern_that_matches_no_parameter_is_refused(tiny_run, lora):
    """Layers of another name or number, with the paths in the message. (`new_parameters`: test_deltanet.)"""
    factors = 'optimizer.rate_factors=[["head", 2], ["layers_3/", 0.5]]'
    for setting in (factors, "optimizer.no_decay=layer_norm", "optimizer.freeze=layers_3/", "lora.targets=/q_proj$"):
        if lora or "lora" not in setting:
            experiment = override(tiny_run.experiment, [*lora, setting])
            with one_device(), jax.set_mesh(make_mesh(experiment.mesh)):
                field = setting.partition("=")[0].removeprefix("optimizer.")
                refused(ValueError, f"{field}=.*(matches|names) no .*decoder/layers_0/query", initial_state, experiment)
