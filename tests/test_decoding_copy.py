"""The sampler's own layout: split by heads it draws the same ids, and a push holds one copy."""

import dataclasses
import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from pod import Pod
from refusing import refused
from test_sampler import MODEL, PREFIXES, Letters, N, assert_same, weights
from tiny import GEMMA, placed

from jprm.methods.decoding import decode
from jprm.methods.decoding.sampler import Sampler, SamplerConfig
from jprm.methods.policy.engine import log_probabilities
from jprm.model.mesh import MeshConfig, make_mesh, mesh_by_heads

DEVICES = jax.devices()


def sampler(config, learner, mesh, **options):
    options = SamplerConfig(**{"max_tokens": 40, "temperature": 1.0, **options})
    return Sampler(placed(weights(0.5, config), learner), config, Letters(), mesh, options, "letters")


@pytest.mark.parametrize(
    "heads, kv_heads, mlp, devices, expected",
    [
        (28, 4, 18944, 4, (1, 4)),  # Qwen2.5-7B on a host of v5p
        (28, 4, 18944, 8, (2, 4)),  # on eight GPUs: 28 heads have no eight equal parts
        (12, 2, 8960, 4, (1, 4)),  # Qwen2.5-1.5B: two key-value heads, each twice
        (32, 8, 14336, 8, (1, 8)),
        (9, 3, 1536, 4, (4, 1)),  # SmolLM2-135M
    ],
)
def test_as_many_devices_as_divide_the_heads_split_them(heads, kv_heads, mlp, devices, expected):
    config = dataclasses.replace(MODEL, heads=heads, kv_heads=kv_heads, mlp_width=mlp, vocab_size=152064)
    mesh = mesh_by_heads(config, DEVICES[:devices])
    assert (mesh.shape["data"], mesh.shape["tensor"]) == expected and mesh.size == devices
    copy = decode.decoding_config(config, mesh.shape["tensor"], "float32")
    assert copy.heads == heads and copy.kv_heads % mesh.shape["tensor"] == 0


@pytest.mark.parametrize("count", [4, 8])
def test_split_by_heads_it_draws_the_ids_that_it_drew_split_by_width(count):
    """On 4 devices the two key-value heads are repeated; on 8 there are two copies of the model beside."""
    learner = make_mesh(MeshConfig(), DEVICES[:count])
    mesh = mesh_by_heads(MODEL, DEVICES[:count])
    assert (mesh.shape["data"], mesh.shape["tensor"], mesh.size) == (count // 4, 4, count)
    before = sampler(MODEL, learner, learner).sample(PREFIXES, N, until="end", seed=5)
    now = sampler(MODEL, learner, mesh)
    assert now.config.kv_heads == 4
    assert_same(now.sample(PREFIXES, N, until="end", seed=5), before)


CHILD = """
import sys
from jprm import multihost
multihost.start(sys.argv[-1])
import jax, json
import test_decoding_copy as tests
print("drawn", json.dumps(tests.of_both(tests.make_mesh())))
"""


def of_both(learner):
    """Ids drawn by a copy that is split by width, as before, and by one that is split by heads."""
    meshes = make_mesh(devices=jax.local_devices()), mesh_by_heads(MODEL)
    assert [mesh.shape["tensor"] for mesh in meshes] == [1, len(jax.local_devices())]
    drawn = []
    for mesh in meshes:
        policy = sampler(MODEL, learner, mesh)
        policy.push(placed(weights(0.4, MODEL), learner), "another")
        drawn.append([[sample.ids for sample in samples] for samples in policy.draw(PREFIXES, N, until="end", seed=5)])
    return drawn


@pytest.mark.slow
@pytest.mark.parametrize("hosts", [2, 4])
def test_every_host_of_two_devices_draws_what_it_drew(tmp_path, hosts):
    with Pod(tmp_path, hosts, 2) as pod:
        logs = pod.complete(["-c", CHILD])
    drawn = [line for log in logs for line in log.splitlines() if line.startswith("drawn")]
    before, now = json.loads(drawn[0].removeprefix("drawn "))
    assert len(set(drawn)) == 1 and before == now


def test_the_head_alone_is_rounded_in_bfloat16():
    """Layers compute in bfloat16 anyway, so a copy of that type has their bits, and the embedding's."""
    config = dataclasses.replace(MODEL, dtype="bfloat16")
    learner, mesh = make_mesh(MeshConfig(), DEVICES[:4]), mesh_by_heads(config, DEVICES[:4])
    copies = [sampler(config, learner, mesh, dtype=dtype) for dtype in ("float32", "")]
    assert copies[1].config.dtype == "bfloat16" and copies[1].params["decoder"]["layers_0"]["up"].dtype == jnp.bfloat16
    assert copies[1].params["decoder"]["final_norm"].dtype == jnp.float32
    tokens = np.array([[5, 9, 11, 30]], np.int32)
    with jax.set_mesh(mesh):
        states = [
            jax.jit(decode.forward, static_argnums=1)(
                {"decoder": {**copy.params["decoder"]}}, copies[1].config, tokens, np.arange(4)[None]
            )[0]
            for copy in copies
        ]
    np.testing.assert_array_equal(*(np.asarray(x, np.float32) for x in states))


@pytest.mark.parametrize("config", [MODEL, dataclasses.replace(GEMMA, head="language")], ids=["tiny", "gemma"])
def test_a_copy_in_int8_is_near(config):
    learner, mesh = make_mesh(MeshConfig(), DEVICES[:4]), mesh_by_heads(config, DEVICES[:4])
    small = sampler(config, learner, mesh, dtype="int8")
    assert small.params["decoder"]["layers_1"]["up"].values.dtype == jnp.int8
    ((sample, *_), *_) = small.draw(PREFIXES, N, until="end", seed=5)
    ids = [(tuple(small.prompt(PREFIXES[0])), sample.ids)]
    exact = log_probabilities(placed(weights(0.5, config), learner), config, learner, ids)
    apart = np.abs(exact - sample.logprob_N)
    assert 0 < apart.mean() < 0.1  # of random weights, each off by up to 1/254 of the largest


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
@pytest.mark.parametrize("groups", [(1, 1), (2,)])
def test_parameters_that_are_taken_are_not_there_twice(dtype, groups):
    config = dataclasses.replace(MODEL, layer_groups=groups)
    mesh = make_mesh(MeshConfig(), DEVICES[:1])
    kept, placed_weights = placed(weights(0.5, config), mesh), placed(weights(0.5, config), mesh)
    embed, down = placed_weights["decoder"]["embed"], placed_weights["decoder"]["layers_0"]["down"]
    copy = decode.decoding_copy(placed_weights, config, mesh, dtype, take=True)
    assert placed_weights["decoder"] == {}
    jax.tree.map(np.testing.assert_array_equal, copy, decode.decoding_copy(kept, config, mesh, dtype))
    assert sorted(kept["decoder"]) == sorted(weights(0.5, config)["decoder"])
    if dtype == "float32":  # what is stored already as it is to be is not copied
        pointers = copy["decoder"]["embed"].unsafe_buffer_pointer(), embed.unsafe_buffer_pointer()
        assert pointers[0] == pointers[1]
        layer = copy["decoder"]["layers_0"]["down"]
        assert (layer.unsafe_buffer_pointer() == down.unsafe_buffer_pointer()) == (groups == (1, 1))


def test_an_unknown_type_is_refused():
    refused(ValueError, "dtype='int4'", SamplerConfig, dtype="int4")


def test_a_push_holds_one_copy_and_three_layers(monkeypatch):
    """Live arrays while parameters are sent: the old copy is gone, and the new one is never there twice."""
    config = dataclasses.replace(MODEL, layers=8, layer_groups=(8,), width=64, mlp_width=512)
    learner, mesh = make_mesh(MeshConfig(), DEVICES[:4]), mesh_by_heads(config, DEVICES[:4])
    policy = Sampler(
        placed(weights(0.5, config), learner), config, Letters(), mesh, SamplerConfig(dtype="bfloat16"), "letters"
    )
    new = placed(weights(0.5, config), learner)

    def size(x):
        return math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize * x.sharding.num_devices

    def held():
        return sum(map(size, jax.live_arrays()))

    copy, layer = (sum(map(size, jax.tree.leaves(x))) for x in (policy.params, policy.params["decoder"]["layers_0"]))
    before, most = held(), []  # learner's parameters twice, and the copy

    def counted(x, mesh, place, send=decode.copied):
        sent = send(x, mesh, place)
        most.append(held())
        return sent

    monkeypatch.setattr(decode, "copied", counted)
    policy.push(new, "another")
    assert max(most) <= before + 3 * layer
    assert before - copy < min(most) < before - copy / 2  # the old copy went first
