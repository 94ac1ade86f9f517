"""Mixers other than attention: DeltaNet's states along paths, mixtures of experts, and layers of one's own."""

import dataclasses
import functools
import pathlib

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from families import breadth
from flax.traverse_util import flatten_dict
from refusing import refused
from test_gguf import write
from tiny import TINY, Letters, chain_ids, chain_rows, hidden, logits, packed_trees, params, random_tree
from tiny_run import MODEL, experiment, make_data, one_device, training

import jprm
from jprm.checkpoints import base
from jprm.experiment import ObjectiveConfig, TargetConfig, override
from jprm.methods.formats.writing import decoder_tensors
from jprm.methods.layers import deltanet, experts
from jprm.model import parameters, transformer
from jprm.model.config import DeltaNetConfig, ExpertsConfig
from jprm.model.mesh import MeshConfig, check_mesh, make_mesh, put_rows, spec
from jprm.model.parameters import LoraConfig, held_decoder
from jprm.model.transformer import axes_of, check_model
from jprm.objectives import balance, cross_entropy
from jprm.testing import check_part
from jprm.train import state as training_state
from jprm.train.state import initial_state

HYBRID = dataclasses.replace(
    TINY, layers=4, qkv_bias=False, attention_gate=True, rotary_dim=2, design="qwen3_next", attention="reference",
    mixers=("deltanet", "deltanet", "attention"), deltanet=DeltaNetConfig(2, 4, 4, 6, chunk=8),
)  # fmt: skip
"""Two deltanet layers before every one of attention, and one left over."""

TREES = [random_tree(seed, nodes=10) for seed in range(3)]


@pytest.fixture(scope="module")
def rows():
    return packed_trees(TREES).rows


def by_tokens(q, k, v, g, b, start, previous):
    """The rule, a token at a time: every state is kept."""
    q, k = deltanet._unit(q) * q.shape[-1] ** -0.5, deltanet._unit(k)

    def row(q, k, v, g, b, start, previous):
        def step(states, inputs):
            t, q, k, v, g, b, before = inputs
            state = jnp.where(before >= 0, states[jnp.maximum(before, 0)], start) * jnp.exp(g)[..., None, None]
            new = (v - jnp.einsum("kh,kghv->kgv", k, state)) * b[..., None]
            state = state + jnp.einsum("kh,kgv->kghv", k, new)
            return states.at[t].set(state), jnp.einsum("kh,kghv->kgv", q, state)

        index = jnp.arange(len(q))
        return jax.lax.scan(step, jnp.zeros((len(q), *start.shape)), (index, q, k, v, g, b, previous))[1]

    return jax.vmap(row)(q, k, v, g, b, start, previous)


def test_previous_tokens_are_those_of_the_path(rows):
    previous_BT = np.asarray(deltanet.previous_of(jnp.asarray(rows.until)))
    for b, t in np.ndindex(*previous_BT.shape):
        seen = [j for j in range(t) if rows.until[b, j] > t]
        assert previous_BT[b, t] == (seen[-1] if seen else -1)


def test_chunks_are_a_scan_over_tokens_forward_and_backward(rows):
    (B, T), (K, G, H, V) = rows.tokens.shape, (2, 2, 4, 6)
    rng = np.random.default_rng(0)
    draw = lambda *shape: rng.normal(size=(B, *shape)).astype(np.float32)  # noqa: E731
    q, k, v, start, wanted = draw(T, K, H), draw(T, K, H), draw(T, K, G, V), draw(K, G, H, V), draw(T, K, G, V)
    g, b = -np.abs(draw(T, K, G)), rng.uniform(size=(B, T, K, G)).astype(np.float32)
    plan = deltanet.plan(rows.position, jnp.asarray(rows.until), HYBRID)
    assert bool(jnp.all(plan.fits)) and int(jnp.max(plan.reads)) > 1 and int(jnp.max(plan.writes)) > 1
    previous = deltanet.previous_of(jnp.asarray(rows.until))
    rules = {
        "chunks": lambda q, k, v, g, b, s: deltanet._rule(q, k, v, g, b, plan, s, HYBRID)[0],
        "tokens": functools.partial(by_tokens, previous=previous),
    }
    results = {}
    for name, rule in rules.items():

        def loss(*args, rule=rule):
            y = rule(*args)
            return jnp.sum(wanted * y), y

        results[name] = jax.jit(jax.value_and_grad(loss, range(6), has_aux=True))(q, k, v, g, b, start)
    # Sums of float32 in another order, on values of size up to 10.
    jax.tree.map(functools.partial(np.testing.assert_allclose, atol=1e-5, rtol=1e-4), *results.values())


@pytest.mark.parametrize("size", [1, 2, 5, 64])
def test_triangles_are_inverted_with_their_gradients(size):
    rng = np.random.default_rng(size)
    lower = np.tril(0.3 * rng.normal(size=(3, 2, size, size)), -1)
    lower[0] = np.tril(np.ones((size, size)), -1)  # a key that repeats: its powers are as large as binomials
    weight = rng.normal(size=lower.shape)
    inverse = np.linalg.inv(np.eye(size) + lower)
    turned = np.swapaxes(inverse, -1, -2)
    actual, gradient = jax.value_and_grad(lambda x: jnp.sum(weight * deltanet._inverse(x)))(jnp.float32(lower))
    np.testing.assert_allclose(actual, np.sum(weight * inverse), rtol=1e-4, atol=1e-3)
    scale = np.abs(inverse).max() ** 2 * np.abs(weight).max() * size
    np.testing.assert_allclose(gradient, -np.tril(turned @ weight @ turned, -1), atol=1e-6 * scale)


def test_nothing_waits_in_the_pool_that_it_runs_in(rows):
    """Two batched calls of LAPACK at once waited for each other without end, in rows of 2,048 tokens on two cores."""
    loss = lambda p: jnp.sum(hidden(p, HYBRID, rows))  # noqa: E731
    assert "lapack" not in jax.jit(jax.grad(loss)).lower(params(HYBRID)).as_text()


def test_a_row_with_too_many_states_is_not_a_number(rows):
    few = dataclasses.replace(HYBRID, deltanet=dataclasses.replace(HYBRID.deltanet, states=1))
    assert np.isnan(np.asarray(hidden(params(few), few, rows))).any()


@pytest.mark.breadth
def test_trees_are_chains_alone_and_padding_and_siblings_are_inert(rows):
    packed, layout = packed_trees(TREES), Letters()
    score = np.asarray(logits(params(HYBRID), HYBRID, rows))
    slots = [(b, s) for b, s in np.argwhere(packed.node_BS >= 0)]
    chains = [chain_ids(TREES[packed.tree_BS[b, s]], packed.node_BS[b, s], layout) for b, s in slots]
    alone = np.asarray(logits(params(HYBRID), HYBRID, chain_rows(chains, 64)))[:, 0]
    np.testing.assert_allclose(np.array([score[b, s] for b, s in slots]), alone, atol=2e-5, rtol=2e-5)

    # One token of one branch changed: the scores that move are those of steps that see it.
    b, s = next((b, s) for b, s in slots if packed.node_BS[b, s] == len(TREES[packed.tree_BS[b, s]].nodes) // 2)
    at = rows.step_end[b, s]
    tokens = rows.tokens.copy()
    tokens[b, at] = 40
    changed = np.asarray(logits(params(HYBRID), HYBRID, dataclasses.replace(rows, tokens=tokens)))
    for other_b, other in slots:
        end = rows.step_end[other_b, other]
        sees = other_b == b and at <= end < rows.until[b, at]
        moved = np.abs(changed[other_b, other] - score[other_b, other]).max()
        assert (moved > 1e-4) == sees and (sees or moved == 0)


@pytest.mark.parametrize("kind", ["deltanet", *breadth(["experts"])])
def test_a_model_is_the_same_packed_alone_live_and_on_four_devices(kind):
    model = {"deltanet": dataclasses.replace(HYBRID, mixers=("deltanet", "attention")), "experts": MIXED}[kind]
    model = dataclasses.replace(model, vocab_size=256, layers=2, layer_groups=())
    check_part(experiment(pathlib.Path("data"), model=model), only=("packed", "chains", "devices", "scored", "live"))


def test_a_row_that_is_split_is_refused():
    refused(ValueError, "mesh.context=2 would split it", check_model,
            dataclasses.replace(HYBRID, attention="blocked"), context=2)  # fmt: skip


# ---- Mixtures of experts: against a loop over experts, on split meshes, and their sums.


MIXED = dataclasses.replace(
    TINY, qkv_bias=False, attention="blocked", mlps=("experts", "dense"), layers=3,
    experts=ExpertsConfig(count=4, used=2, width=8, shared_width=12),
)  # fmt: skip
BALANCED = dataclasses.replace(MIXED, experts=dataclasses.replace(MIXED.experts, balance=0.5))
TARGET = TargetConfig("rating", neutral="positive", after_error="keep")


@pytest.fixture(scope="module")
def tree_rows():
    rows = packed_trees([random_tree(seed) for seed in range(4)]).rows
    assert len(rows.tokens) == 4
    return rows


def loss(p, tree_rows, config=MIXED):
    total, count, metrics = cross_entropy(
        {"model": p}, tree_rows, ObjectiveConfig(config, TARGET, parameters.LoraConfig())
    )
    return total, (count, {name: x for name, x in metrics.items() if name != "scores"})


gradient = jax.jit(jax.value_and_grad(loss, has_aux=True), static_argnums=2)


def test_tokens_go_through_the_experts_that_their_router_chooses():
    rng, (N, P, E, D, F) = np.random.default_rng(0), (12, 2, 4, 16, 8)
    draw = lambda *shape: rng.normal(size=shape).astype(np.float32)  # noqa: E731
    x_ND, weight_NP, (gate, up, down) = draw(N, D), draw(N, P), (draw(E, D, F), draw(E, D, F), draw(E, F, D))
    expert_NP = np.array([rng.permutation(E + 2)[:P] - 1 for _ in range(N)])  # -1 and E are on other devices
    actual = experts._own_experts(x_ND, weight_NP, jnp.asarray(expert_NP), (gate, up, down), MIXED)
    wanted = np.zeros((N, D))
    for n, p in np.ndindex(N, P):
        if 0 <= (e := expert_NP[n, p]) < E:
            h = x_ND[n] @ gate[e]
            wanted[n] += weight_NP[n, p] * ((h / (1 + np.exp(-h)) * (x_ND[n] @ up[e])) @ down[e])
    np.testing.assert_allclose(actual, wanted, atol=1e-4, rtol=1e-4)  # sums of float32 of size 100


@pytest.mark.parametrize("sizes", [*breadth([((1, 2, 2, 1, 2),)]), (1, 1, 1, 2, 2)])
def test_experts_on_a_split_mesh_compute_what_one_device_does(tree_rows, sizes):
    one_of_each = dataclasses.replace(BALANCED, layers=2)
    wanted = gradient(params(one_of_each), tree_rows, one_of_each)
    mesh = make_mesh(MeshConfig(*sizes), jax.devices()[: int(np.prod(sizes))])
    check_mesh(one_of_each, mesh, 4, 64)
    place = lambda at, x: jax.device_put(x, jax.NamedSharding(mesh, spec(*axes_of(at[-1].key), mesh=mesh)))  # noqa: E731
    with jax.set_mesh(mesh):
        placed = jax.tree_util.tree_map_with_path(place, params(one_of_each))
        assert placed["decoder"]["layers_0"]["expert_up"].sharding.spec[1] == "expert"
        actual = gradient(placed, put_rows(tree_rows, mesh), one_of_each)
    jax.tree.map(functools.partial(np.testing.assert_allclose, atol=1e-4, rtol=1e-3), actual, wanted)


@pytest.mark.parametrize(
    "sizes, clamp", [((1, 1, 1, 1, 8), 0.0), *breadth([((1, 2, 2, 1, 2), 7.0)])]
)  # gpt-oss has biases
def test_blocks_of_choices_are_exact_however_tokens_choose(sizes, clamp, monkeypatch):
    """Values and gradients are one device's, which has no blocks, if choices fill few, many or no blocks of 8."""
    monkeypatch.setattr(experts, "BLOCK", 8)
    c = dataclasses.replace(TINY, mlps=("experts",), experts=ExpertsConfig(8, 2, width=8, clamp=clamp))
    rng, mesh, kind = np.random.default_rng(0), make_mesh(MeshConfig(*sizes), jax.devices()), experts.EXPERTS
    draw = lambda *shape: jnp.asarray(0.3 * rng.normal(size=shape), jnp.float32)  # noqa: E731
    of_letter = kind.sizes(c)
    roles = [role for role, weight in kind.weights.items() if weight.when(c)]
    w = {role: draw(*map(of_letter.get, kind.weights[role].axes)) for role in roles}
    x_BTD, dy_BTD = draw(8, 16, c.width).at[..., 0].set(1), draw(8, 16, c.width)
    chosen = {
        "equally": np.zeros(8),
        "two of one device": np.array([9.0, 9, 0, 0, 0, 0, 0, 0]),
        "ever less": np.arange(8),
    }

    def gradients(x_BTD, w, dy_BTD):
        apply = lambda x_BTD, w: experts.apply(x_BTD, w, None, None, c)[0]  # noqa: E731
        y_BTD, backward = jax.vjp(apply, x_BTD, w)
        return y_BTD, backward(dy_BTD)

    alone, split = jax.jit(gradients), jax.jit(lambda *arguments: gradients(*arguments))
    for bias_N in chosen.values():
        biased = w | {"router": w["router"].at[0].set(bias_N)}
        wanted = alone(x_BTD, biased, dy_BTD)
        with jax.set_mesh(mesh):
            placed = {role: jax.NamedSharding(mesh, spec(*kind.weights[role].places[1:], mesh=mesh)) for role in biased}
            rows = put_rows(np.asarray(x_BTD), mesh), put_rows(np.asarray(dy_BTD), mesh)
            actual = split(rows[0], jax.device_put(biased, placed), rows[1])
        jax.tree.map(functools.partial(np.testing.assert_allclose, atol=1e-6, rtol=1e-5), actual, wanted)


def test_sums_are_of_real_tokens_and_all_layers(tree_rows):
    (_, (count, metrics)), _ = gradient(params(MIXED), tree_rows, MIXED)
    real = int(np.sum((tree_rows.position > 0) | (tree_rows.until > np.arange(64) + 1)))
    of_experts = 2  # layers
    assert float(metrics["experts"].chosen_N.sum()) == real * of_experts * MIXED.experts.used
    assert float(metrics["expert_balance"].weight) == real * of_experts
    assert metrics["experts"].means()["expert_load"] >= 1 and metrics["experts"].means()["experts_idle"] < 1
    more = float(gradient(params(MIXED), tree_rows, BALANCED)[0][0] - gradient(params(MIXED), tree_rows, MIXED)[0][0])
    assert more == pytest.approx(0.5 * metrics["expert_balance"].value() * float(count), rel=1e-3)


def test_uniform_routing_has_the_least_balance():
    even = {"chosen": jnp.full(4, 5.0), "probability": jnp.full(4, 2.5), "tokens": jnp.float32(10)}
    uneven = even | {"chosen": jnp.array([10.0, 10, 0, 0]), "probability": jnp.array([5.0, 5, 0, 0])}
    assert float(balance(even)) == pytest.approx(2) and float(balance(uneven)) == pytest.approx(4)


def test_adapters_and_int8_are_of_each_expert(tree_rows):
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
    exact, rounded = (np.asarray(logits(p, MIXED, tree_rows)) for p in (params(MIXED), small))
    assert 0 < np.abs(exact - rounded).max() < 1.0  # weights are rounded by up to 0.4 % of the largest


def test_what_does_not_fit_is_refused():
    with pytest.raises(ValueError, match="mlps have experts"):
        check_model(dataclasses.replace(MIXED, experts=ExpertsConfig(count=4, used=5, width=8)))
    with pytest.raises(ValueError, match="mesh.expert=2 splits experts, but the model is dense; set mesh.expert=1"):
        check_mesh(TINY, make_mesh(MeshConfig(1, 1, 1, 1, 2), jax.devices()[:2]), 4, 64)


# ---- A decoder with a layer more than its base: a named error, or random weights where they are asked for.


class Forked(transformer.Layers):
    """Layers of a fork, which scale their output: the parameter is a new one."""

    @nn.compact
    def __call__(self, *inputs):
        experts_L = self.param("experts", nn.initializers.normal(1.0), (self.stop - self.first,))
        x_BTD, sums = super().__call__(*inputs)
        return x_BTD * (1 + 0.1 * experts_L.sum()).astype(self.config.dtype), sums


@pytest.fixture
def fork(monkeypatch):
    """The model of a fork, with a theta of its own: nothing compiled for the model before it fits."""
    params(MODEL)  # made once, and before the fork
    monkeypatch.setattr(transformer, "Layers", Forked)
    return dataclasses.replace(MODEL, rope_theta=123.0)


def started(run):
    with one_device(), jax.set_mesh(make_mesh(devices=jax.devices()[:1])):
        state = initial_state(run)
        return {path: np.asarray(x) for path, x in (state.trained | state.frozen).items()}


def test_a_layer_that_the_base_lacks_is_an_error_or_starts_at_random(fork, tmp_path):
    weights = params(MODEL)["decoder"]
    file = write(tmp_path / "m.gguf", fork, weights)
    run = experiment(tmp_path, model=fork, base=str(file))
    refused(ValueError, "m.gguf: .*decoder/layers_0/experts", started, run)
    refused(ValueError, "decoder/layers_0/experts", base.load_decoder, file, fork, new="router")
    actual, random = started(override(run, ["new_parameters=experts$"])), started(dataclasses.replace(run, base=""))
    assert actual.keys() == random.keys()
    for name, x in flatten_dict({"decoder": weights}, sep="/").items():
        np.testing.assert_allclose(actual[name], x, atol=1e-6)
    for name in ("decoder/layers_0/experts", "head/kernel", "head/bias"):
        np.testing.assert_array_equal(actual[name], random[name])
    assert actual["decoder/layers_0/experts"].any()
    with pytest.raises(ValueError, match="decoder/layers_0/experts"):
        started(dataclasses.replace(run, new_parameters="experts$", lora=LoraConfig(rank=2)))
    with pytest.raises(ValueError, match="layers_0/experts"):
        list(decoder_tensors({"layers_0": {"experts": np.ones(2)}}, fork))


def test_a_pattern_of_new_parameters_that_matches_none_is_an_error(tmp_path):
    file = write(tmp_path / "m.gguf", MODEL, params(MODEL)["decoder"])
    refused(ValueError, "new_parameters='query'", base.load_decoder, file, MODEL, new="query")


@pytest.mark.breadth
def test_a_run_of_before_the_layer(tmp_path, monkeypatch):
    data = make_data(tmp_path / "data")
    before = experiment(data, model=dataclasses.replace(MODEL, rope_theta=124.0), steps=1)
    with one_device():
        training.train(before, tmp_path / "run")
        old = started(dataclasses.replace(before, base=str(tmp_path / "run")))
        monkeypatch.setattr(transformer, "Layers", Forked)
        training_state._random.clear_cache()  # of the model as it was
        refused(ValueError, "run: .*decoder/layers_0/experts", jprm.load, tmp_path / "run")
    run = dataclasses.replace(before, base=str(tmp_path / "run"))
    refused(ValueError, "decoder/layers_0/experts", started, run)
    actual = started(dataclasses.replace(run, new_parameters="experts"))
    assert actual.keys() - old.keys() == {"decoder/layers_0/experts"}
    np.testing.assert_array_equal(actual["decoder/layers_0/query"], old["decoder/layers_0/query"])
