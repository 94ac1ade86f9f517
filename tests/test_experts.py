"""Mixtures of experts: against a loop over experts, on split meshes, and their sums."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny import TINY, logits, packed_trees, params, random_tree

from jprm.experiment import ObjectiveConfig, TargetConfig
from jprm.methods.layers import experts
from jprm.model import parameters
from jprm.model.config import ExpertsConfig
from jprm.model.mesh import MeshConfig, check_mesh, make_mesh, put_rows, spec
from jprm.model.parameters import held_decoder
from jprm.model.transformer import axes_of, check_model
from jprm.objectives import balance, cross_entropy

MIXED = dataclasses.replace(
    TINY, qkv_bias=False, attention="blocked", mlps=("experts", "dense"), layers=3,
    experts=ExpertsConfig(count=4, used=2, width=8, shared_width=12),
)  # fmt: skip
BALANCED = dataclasses.replace(MIXED, experts=dataclasses.replace(MIXED.experts, balance=0.5))
TARGET = TargetConfig("rating", neutral="positive", after_error="keep")


@pytest.fixture(scope="module")
def rows():
    rows = packed_trees([random_tree(seed) for seed in range(4)]).rows
    assert len(rows.tokens) == 4
    return rows


def loss(p, rows, config=MIXED):
    total, count, metrics = cross_entropy({"model": p}, rows, ObjectiveConfig(config, TARGET, parameters.LoraConfig()))
    return total, (count, {name: x for name, x in metrics.items() if name != "scores"})


gradient = jax.jit(jax.value_and_grad(loss, has_aux=True), static_argnums=2)


def test_tokens_go_through_the_experts_that_their_router_chooses():
    rng, (N, P, E, D, F) = np.random.default_rng(0), (12, 2, 4, 16, 8)
    draw = lambda *shape: rng.normal(size=shape).astype(np.float32)  # noqa: E731
    x_ND, weight_NP, (gate, up, down) = draw(N, D), draw(N, P), (draw(E, D, F), draw(E, D, F), draw(E, F, D))
    expert_NP = np.array([rng.permutation(E + 2)[:P] - 1 for _ in range(N)])  # -1 and E are on other devices
    actual = experts._own_experts(x_ND, weight_NP, jnp.asarray(expert_NP), gate, up, down, MIXED)
    wanted = np.zeros((N, D))
    for n, p in np.ndindex(N, P):
        if 0 <= (e := expert_NP[n, p]) < E:
            h = x_ND[n] @ gate[e]
            wanted[n] += weight_NP[n, p] * ((h / (1 + np.exp(-h)) * (x_ND[n] @ up[e])) @ down[e])
    np.testing.assert_allclose(actual, wanted, atol=1e-4, rtol=1e-4)  # sums of float32 of size 100


@pytest.mark.parametrize("sizes", [(1, 2, 1, 1, 2), (1, 1, 2, 1, 2), (1, 1, 1, 2, 2)])
def test_a_split_mesh_computes_what_one_device_does(rows, sizes):
    wanted = gradient(params(MIXED), rows, BALANCED)
    mesh = make_mesh(MeshConfig(*sizes), jax.devices()[: int(np.prod(sizes))])
    check_mesh(BALANCED, mesh, 4, 64)
    place = lambda at, x: jax.device_put(x, jax.NamedSharding(mesh, spec(*axes_of(at[-1].key), mesh=mesh)))  # noqa: E731
    with jax.set_mesh(mesh):
        placed = jax.tree_util.tree_map_with_path(place, params(MIXED))
        assert placed["decoder"]["layers_0"]["expert_up"].sharding.spec[1] == "expert"
        actual = gradient(placed, put_rows(rows, mesh), BALANCED)
    jax.tree.map(functools.partial(np.testing.assert_allclose, atol=1e-4, rtol=1e-3), actual, wanted)


def test_sums_are_of_real_tokens_and_all_layers(rows):
    (_, (count, metrics)), _ = gradient(params(MIXED), rows, MIXED)
    real = int(np.sum((rows.position > 0) | (rows.until > np.arange(64) + 1)))
    of_experts = 2  # layers
    assert float(metrics["experts"].chosen_N.sum()) == real * of_experts * MIXED.experts.used
    assert float(metrics["expert_balance"].weight) == real * of_experts
    assert metrics["experts"].means()["expert_load"] >= 1 and metrics["experts"].means()["experts_idle"] < 1
    more = float(gradient(params(MIXED), rows, BALANCED)[0][0] - gradient(params(MIXED), rows, MIXED)[0][0])
    assert more == pytest.approx(0.5 * metrics["expert_balance"].value() * float(count), rel=1e-3)


def test_uniform_routing_has_the_least_balance():
    even = {"chosen": jnp.full(4, 5.0), "probability": jnp.full(4, 2.5), "tokens": jnp.float32(10)}
    uneven = even | {"chosen": jnp.array([10.0, 10, 0, 0]), "probability": jnp.array([5.0, 5, 0, 0])}
    assert float(balance(even)) == pytest.approx(2) and float(balance(uneven)) == pytest.approx(4)


def test_adapters_and_int8_are_of_each_expert(rows):
    config = parameters.LoraConfig(rank=2, targets=r"/(query|expert_\w+)$")
    adapters = parameters.init_adapters(config, MIXED, "", jax.random.key(0))
    a, b = (adapters[f"decoder/layers_0/expert_up{end}"] for end in (parameters.A, parameters.B))
    assert a.shape == (2, 4, 16, 2) and b.shape == (2, 4, 2, 8)
    w = params(MIXED)["decoder"]["layers_0"]["expert_up"]
    b = jnp.ones_like(b)
    both = {"expert_up" + parameters.A: a, "expert_up" + parameters.B: b}
    merged = parameters.with_adapter("expert_up", w, both, config.scale)
    np.testing.assert_allclose(merged[1, 3], w[1, 3] + config.scale * a[1, 3] @ b[1, 3], atol=1e-5)
    small = {**params(MIXED), "decoder": held_decoder(params(MIXED)["decoder"], "int8")}
    assert small["decoder"]["layers_0"]["expert_down"].scale.shape == (2, 4, 1, 16)
    exact, rounded = (np.asarray(logits(p, MIXED, rows)) for p in (params(MIXED), small))
    assert 0 < np.abs(exact - rounded).max() < 1.0  # weights are rounded by up to 0.4 % of the largest


def test_what_does_not_fit_is_refused():
    with pytest.raises(ValueError, match="mlps have experts"):
        check_model(dataclasses.replace(MIXED, experts=ExpertsConfig(count=4, used=5, width=8)))
    with pytest.raises(ValueError, match="mesh.expert=2 splits experts, and the model has none"):
        check_mesh(TINY, make_mesh(MeshConfig(1, 1, 1, 1, 2), jax.devices()[:2]), 4, 64)
