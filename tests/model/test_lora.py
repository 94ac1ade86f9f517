"""LoRA: what is trained, what is merged, and exact resume."""

import dataclasses
import json
import shutil

import jax
import numpy as np
import pytest
from flax.traverse_util import flatten_dict
from jax.sharding import AbstractMesh, AxisType
from refusing import refused
from tiny import GEMMA, TINY, params
from tiny_run import equal, experiment, lines, make_data, one_device, training, untimed
from tiny_run import params as loaded

import jprm
from jprm.checkpoints import store
from jprm.experiment import from_json, override, to_json
from jprm.model import parameters, transformer
from jprm.model.mesh import MESH_AXES, make_mesh
from jprm.model.parameters import LoraConfig, join
from jprm.objectives import find
from jprm.tokenizer import load_tokenizer
from jprm.train.batches import own_batches, unstacked
from jprm.train.state import initial_state

LORA = LoraConfig(rank=3, alpha=6.0)
GROUPS = dataclasses.replace(TINY, layers=3, layer_groups=(1, 2))


def adapted(model, config, freeze="", seed=0):
    """Parameters with adapters, none of them zero."""
    rng = np.random.default_rng(seed)
    adapters = jax.eval_shape(lambda: parameters.init_adapters(config, model, freeze, jax.random.key(0)))
    flat = {path: rng.normal(size=x.shape).astype(np.float32) for path, x in adapters.items()}
    return join(flatten_dict(params(model), sep="/"), flat), flat


@pytest.mark.parametrize("rslora", [False, True])
def test_merging_adds_the_product_to_each_layers_matrix(rslora):
    config = dataclasses.replace(LORA, rslora=rslora)
    whole, flat = adapted(GROUPS, config)
    merged, plain = parameters.merge(whole, config), params(GROUPS)
    assert jax.tree.structure(merged) == jax.tree.structure(plain)
    matrices = parameters.products().keys() & plain["decoder"]["layers_0"].keys()
    assert len(flat) == 2 * 2 * len(matrices)
    for i, layers in enumerate(GROUPS.layer_groups):
        for role, w in plain["decoder"][f"layers_{i}"].items():
            new = np.asarray(merged["decoder"][f"layers_{i}"][role])
            if role not in parameters.products():
                np.testing.assert_array_equal(new, w)
                continue
            a, b = (flat[f"decoder/layers_{i}/{role}{end}"] for end in (parameters.A, parameters.B))
            for n in range(layers):  # as matrices (in, out), whatever the heads
                product = a[n].reshape(-1, 3).astype(np.float64) @ b[n].reshape(3, -1)
                wanted = w[n] + 6.0 / (3**0.5 if rslora else 3) * product.reshape(w[n].shape)
                np.testing.assert_allclose(new[n], wanted, atol=1e-5)  # float32 sums of 3 terms of size 1 to 10


def test_targets_and_freezing_choose_the_matrices():
    def chosen(freeze="", **changes):
        paths = jax.eval_shape(
            lambda: parameters.init_adapters(dataclasses.replace(LORA, **changes), GROUPS, freeze, jax.random.key(0))
        )
        return {path.removesuffix(parameters.A) for path in paths if path.endswith(parameters.A)}

    assert chosen(targets="/(query|value)$", freeze="embed|layers_0") == {
        "decoder/layers_1/query", "decoder/layers_1/value",
    }  # fmt: skip
    assert len(chosen()) == 14
    refused(ValueError, "lora.targets='norm'", chosen, targets="norm")
    refused(ValueError, "matrix", chosen, freeze="layers")
    for bad in (dict(rank=-1), dict(alpha=0.0), dict(alpha=float("nan"))):
        refused(ValueError, "negative", LoraConfig, **bad)


def test_parameters_that_adapters_do_not_know_are_refused():
    """A new layer beside frozen matrices would be frozen too, at what it started with."""
    for model in (GROUPS, GEMMA):
        parameters.check_adapted(flatten_dict(params(model), sep="/"), "")
    new = ["decoder/layers_0/query", "decoder/layers_0/experts", "decoder/router/kernel"]
    refused(ValueError, "decoder/layers_0/experts", parameters.check_adapted, new, "")
    refused(ValueError, "decoder/layers_0/experts", parameters.check_adapted, new, "router")
    parameters.check_adapted(new, "router|experts")


def test_a_switch_on_any_experiment(tmp_path):
    plain = experiment(tmp_path)
    assert plain.lora.rank == 0
    changed = override(plain, ["lora.rank=8", "lora.targets=query"])
    assert changed.lora == LoraConfig(rank=8, targets="query")
    assert from_json(type(plain), to_json(changed)) == changed
    old = {key: value for key, value in to_json(plain).items() if key != "lora"}  # of a run before there were adapters
    assert from_json(type(plain), old) == plain


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A finished run that trained adapters, and the experiment."""
    data = make_data(tmp_path_factory.mktemp("lora") / "data")
    model = dataclasses.replace(experiment(data).model, layer_groups=(1, 1))
    changes = dict(model=model, lora=dataclasses.replace(LORA, targets="query|out|down"))
    trained = experiment(data, **changes)
    with one_device():
        training.train(trained, data.with_name("run"))
    return data.with_name("run"), trained


def stored(folder, trained):
    mesh = make_mesh(devices=jax.devices()[:1])
    with jax.set_mesh(mesh):
        restored, step = store.load_params(folder, trained, mesh)
    return flatten_dict(jax.tree.map(np.asarray, restored), sep="/"), step


def test_only_adapters_and_the_head_are_trained_and_have_optimizer_state(run):
    folder, trained = run
    with one_device(), jax.set_mesh(make_mesh(devices=jax.devices()[:1])):
        start = initial_state(trained)
    assert len(start.trained) == 2 * 3 * 2 + 2
    assert all(path.startswith("head/") or parameters.A in path or parameters.B in path for path in start.trained)
    # Two moments a trained number, and two counts.
    assert sum(x.size for x in jax.tree.leaves(start.optimizer)) == 2 * sum(x.size for x in start.trained.values()) + 2
    after, step = stored(folder, trained)
    assert step == 6
    for path, value in start.frozen.items():
        np.testing.assert_array_equal(after[path], value)
    assert all(np.any(after[path] != np.asarray(value)) for path, value in start.trained.items())
    # It starts as the base is: B is zero, A is not.
    plain = flatten_dict(parameters.merge(start.params, trained.lora), sep="/")
    assert plain.keys() == start.frozen.keys() | {"head/kernel", "head/bias"}
    for path, value in start.frozen.items():
        np.testing.assert_array_equal(plain[path], value)
    first, *_, last = [line["loss"] for line in lines(folder) if "loss" in line]
    assert last < first


def test_scores_are_the_merged_models(run):
    folder, trained = run
    with one_device():
        prm = jprm.load(folder)
        fresh = jax.eval_shape(lambda: transformer.init(trained.model, jax.random.key(0)))
        assert jax.tree.structure(prm.params) == jax.tree.structure(fresh)
        after, _ = stored(folder, trained)
        a, b = (after[f"decoder/layers_1/down{end}"][0] for end in (parameters.A, parameters.B))
        wanted = after["decoder/layers_1/down"][0] + trained.lora.scale * (a @ b)
        np.testing.assert_allclose(prm.params["decoder"]["layers_1"]["down"][0], wanted, atol=1e-6)
        # The loop judged the merged model too, with rows of another length.
        result = json.loads((folder / "result.json").read_text())
        batches = own_batches(trained, trained.data.valid, prm.mesh, load_tokenizer(folder), once=True)
        micro = (rows for batch in batches for rows in unstacked(batch))
        with jax.set_mesh(prm.mesh):
            values = training.measured(find("cross_entropy"), {"model": prm.params}, micro, trained.task)
        assert values["auroc"] == result["valid_auroc"]


def test_a_stopped_run_continues_exactly(run, tmp_path):
    folder, trained = run
    copy = tmp_path / "run"
    shutil.copytree(folder, copy)
    shutil.rmtree(copy / "checkpoints" / "6")
    with one_device():
        training.train(trained, copy)
        assert equal(loaded(copy), loaded(folder))
        assert untimed(lines(copy)) == untimed(lines(folder))
        refused(ValueError, "lora.rank: 3.*4", training.train, override(trained, ["lora.rank=4"]), copy)


def test_adapters_lie_on_the_mesh_as_their_matrix_does():
    """By types only: under explicit axes a sharding is part of an array's type, and a wrong one is an error."""
    with jax.sharding.use_abstract_mesh(AbstractMesh((2, 2, 2, 1, 1), MESH_AXES, axis_types=(AxisType.Explicit,) * 5)):
        plain = jax.eval_shape(lambda: transformer.init(GROUPS, jax.random.key(0)))
        born = jax.eval_shape(lambda: parameters.init_adapters(LORA, GROUPS, "", jax.random.key(0)))
        whole = join(flatten_dict(plain, sep="/"), born)
        merged = jax.eval_shape(lambda params: parameters.merge(params, LORA), whole)
    assert jax.tree.map(lambda x: x.sharding.spec, merged) == jax.tree.map(lambda x: x.sharding.spec, plain)
    query_a, query_b, out_a, down_b = (
        tuple(born[f"decoder/layers_1/{name}"].sharding.spec)
        for name in ("query_lora_a", "query_lora_b", "out_lora_a", "down_lora_b")
    )
    assert query_a == (None, "fsdp", None) and query_b == (None, None, "tensor", None, None)
    assert out_a == (None, "tensor", None, None, None) and down_b == (None, None, "fsdp")
