"""Interval attention, interpreted on a CPU, against the reference; and which pairs of blocks it visits."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from refusing import refused
from test_attention import WINDOW, B, T, arrays_of, by_hand, by_rule, close, with_gradients
from tiny import GEMMA, TINY, filled, init, packed_trees, random_tree, reasoning_trees

from jprm.methods.data.step_labels import PRM800K
from jprm.methods.kernels import gpu
from jprm.methods.kernels.tpu import FIRST, LAST, LIVE, MINOR, SMEM, VMEM, Sizes, block_sizes, find_blocks, vmem_bytes
from jprm.model.attention import find
from jprm.model.mesh import MeshConfig, make_mesh, put_rows, spec
from jprm.model.transformer import step_logits
from jprm.pack import empty_rows, pack, token_tree
from jprm.tokenizer import load_tokenizer, native_layout
from jprm.tree import tree_of

REFERENCE = dataclasses.replace(TINY, attention="reference")
KERNEL = dataclasses.replace(TINY, attention="kernel")


@functools.partial(jax.jit, static_argnums=(5, 6))
def by_sizes(q, k, v, until_BT, position_BT, sizes, config, window=None):
    """The kernel in blocks that only an interpreter takes: small ones, so that small rows have many."""
    blocks = find_blocks(until_BT, position_BT, sizes)
    return with_gradients(lambda *qkv: find("kernel").attend(*qkv, blocks, config, window), q, k, v)


@functools.partial(jax.jit, static_argnums=(5, 6))
def by_launches(q, k, v, until_BT, position_BT, launches, config, window=None):
    """The same of the kernel for GPUs."""
    blocks = gpu.find_blocks(until_BT, position_BT, launches, windows=gpu.bounded(config))
    return with_gradients(lambda *qkv: find("gpu_kernel").attend(*qkv, blocks, config, window), q, k, v)


SMALL = gpu.Launches(gpu.Launch(16, 8, 4, 2), gpu.Launch(8, 16, 4, 2), gpu.Launch(8, 16, 4, 2))
KERNELS = [(by_sizes, Sizes(8, 8)), (by_sizes, Sizes(24, 8)), (by_sizes, Sizes(8, 24)), (by_launches, SMALL)]
NEAR = {by_sizes: 2e-5, by_launches: 1e-5}
"""float32 sums of at most 48 numbers of size 1, in another order; powers of two where the reference has powers of e."""


@pytest.mark.parametrize(("by_blocks", "sizes"), KERNELS)
@settings(max_examples=15, deadline=None)
@given(trees=st.lists(reasoning_trees(), min_size=1, max_size=5), seed=st.integers(0, 9))
def test_equals_the_reference_with_its_gradients(by_blocks, sizes, trees, seed):
    rows = packed_trees(trees, T, 24, too_long="truncate").rows
    assume(1 <= len(rows.until) <= B)
    rows = filled(rows, B)
    arrays = (*arrays_of(seed), rows.until, rows.position)
    close(by_blocks(*arrays, sizes, REFERENCE), by_rule(*arrays, REFERENCE), NEAR[by_blocks])


@pytest.mark.parametrize(("by_blocks", "sizes"), [(by_sizes, Sizes(16, 8)), (by_launches, SMALL)])
@settings(max_examples=10, deadline=None)
@given(trees=st.lists(reasoning_trees(), min_size=1, max_size=5), seed=st.integers(0, 9), window=st.integers(1, 12))
def test_windows_and_soft_caps_are_those_of_the_reference(by_blocks, sizes, trees, seed, window):
    rows = packed_trees(trees, T, 24, too_long="truncate").rows
    assume(1 <= len(rows.until) <= B)
    rows, config = filled(rows, B), dataclasses.replace(REFERENCE, **WINDOW | dict(windows=(window, 0)))
    arrays = (*arrays_of(seed), rows.until, rows.position)
    actual = by_blocks(*arrays, sizes, config, np.int32(window))
    close(actual[:1], [by_hand(*arrays, window, 2**-0.5, 1.5)], NEAR[by_blocks])
    close(actual, by_rule(*arrays, config, np.int32(window)), NEAR[by_blocks])


LONG = 1152  # nine blocks of 128


def long_rows():
    """A whole row of one chain, 1,000 nested subtrees, bushes, many trees and padding, single tokens."""
    until_BT = np.tile(np.arange(1, LONG + 1, dtype=np.int32), (5, 1))
    index_T = np.arange(LONG)
    until_BT[0] = LONG
    opened_T = np.where(index_T < 500, 1000 - index_T, index_T + 1)  # opened in order, closed in reverse
    until_BT[1, :1000] = opened_T[:1000]
    until_BT[1, 1000:1100] = 1100
    until_BT[2] = np.where(index_T < 30, LONG, np.minimum((index_T // 9 + 1) * 9, LONG))  # a stem and branches of 9
    trees = packed_trees([random_tree(seed, 30) for seed in range(9)], LONG, 300).rows
    until_BT[3] = trees.until[0]
    position_BT = np.zeros_like(until_BT)
    return until_BT, position_BT  # row 4 is padding


def test_deep_bushy_whole_and_padded_rows_in_the_blocks_of_the_rule():
    rows, arrays = long_rows(), arrays_of(0, 5, LONG, K=1)
    assert block_sizes(LONG, 4, 2, 4) == Sizes(128, 128)
    assert np.max(np.asarray(rows[0]) - np.arange(LONG)) == LONG and np.any(rows[0][3] == np.arange(LONG) + 1)
    actual, expected = by_rule(*arrays, *rows, KERNEL), by_rule(*arrays, *rows, REFERENCE)
    # float32 sums of up to 1,152 numbers of size 1, in another order: some 1,152 x 6e-8 = 7e-5 at worst.
    close(actual, expected, 1e-4)
    assert np.array_equal(actual[0][4], np.broadcast_to(arrays[2][4, :, :, None], actual[0][4].shape))  # padding


@pytest.mark.parametrize("kernel", ["kernel", "gpu_kernel"])
def test_bfloat16_sums_in_float32(kernel):
    until_BT, position_BT = (x[:, :384].clip(max=384) for x in long_rows())
    arrays = [x.astype(jnp.bfloat16) for x in arrays_of(1, 5, 384)]
    config = dataclasses.replace(TINY, attention=kernel, dtype="bfloat16")
    actual = by_rule(*arrays, until_BT, position_BT, config)
    assert all(x.dtype == jnp.bfloat16 for x in actual)
    exact = by_rule(*(x.astype(np.float32) for x in arrays), until_BT, position_BT, REFERENCE)
    for a, b in zip(actual, exact, strict=True):
        # Weights, their gradients and results are each rounded to 8 bits, 2^-9 of their size; a sum of many such.
        error = np.asarray(a, np.float32) - np.asarray(b)
        assert np.sqrt(np.mean(error**2)) < 2**-8 * np.sqrt(np.mean(np.square(b)))


def needed(until_BT, sizes):
    """The pairs of blocks with a visible pair of tokens: key j is seen by the queries from j to until[j] - 1."""
    B, T = until_BT.shape
    index_T = np.arange(T)
    change_BNS = np.zeros((B, T // sizes.query + 1, T // sizes.key), int)
    for b in range(B):
        np.add.at(change_BNS[b], (index_T // sizes.query, index_T // sizes.key), 1)
        np.add.at(change_BNS[b], ((until_BT[b] - 1) // sizes.query + 1, index_T // sizes.key), -1)
    return np.cumsum(change_BNS, axis=1)[:, :-1] > 0


def visited(table_P, by_key=False):
    """The pairs of blocks of a row's table, as (queries, keys), in its order."""
    live_P = table_P[table_P & LIVE > 0]
    pairs = list(zip((live_P >> 17).tolist(), (live_P >> 3 & MINOR).tolist(), strict=True))
    assert pairs == sorted(set(pairs))  # majors together, so that a block's sums are written once
    major_P = live_P >> 17
    np.testing.assert_array_equal(live_P & FIRST > 0, np.diff(major_P, prepend=-1) > 0)
    np.testing.assert_array_equal(live_P & LAST > 0, np.diff(major_P, append=2**14) > 0)
    rest_P = table_P[len(live_P) :]
    assert np.all(table_P[: len(live_P)] & LIVE) and np.all(rest_P == live_P[-1] & ~(FIRST | LAST | LIVE))
    return {(t, s) for s, t in pairs} if by_key else set(pairs)


@settings(max_examples=50, deadline=None)
@given(st.data(), st.sampled_from([Sizes(8, 8), Sizes(4, 12), Sizes(12, 4), Sizes(24, 8)]))
def test_tables_hold_the_visible_pairs_and_no_other(data, sizes):
    """Of any `until`, nested or not: the test of a pair of blocks is exact."""
    size = 24
    until_T = [data.draw(st.integers(j + 1, size)) for j in range(size)]
    until_BT = np.array([until_T, range(1, size + 1), [size] * size], np.int32)
    blocks = jax.jit(find_blocks, static_argnums=2)(until_BT, until_BT, sizes)
    for b, needed_NS in enumerate(needed(until_BT, sizes)):
        seen_TT = (np.arange(size) <= np.arange(size)[:, None]) & (np.arange(size)[:, None] < until_BT[b])
        by_tokens = seen_TT.reshape(size // sizes.query, sizes.query, size // sizes.key, sizes.key).any((1, 3))
        np.testing.assert_array_equal(needed_NS, by_tokens)
        expected = set(zip(*map(np.ndarray.tolist, np.nonzero(needed_NS)), strict=True))
        assert visited(np.asarray(blocks.by_query)[b]) == visited(np.asarray(blocks.by_key)[b], by_key=True) == expected
        assert blocks.count[b, 0] == len(expected)


def real_rows(shared_data, smollm2_gguf, tokens, slots, count):
    """The first records of PRM800K, packed."""
    layout = native_layout(load_tokenizer(smollm2_gguf))
    options = dict(control_questions="keep", human_written="positive")
    records = itertools.islice(PRM800K.read(shared_data / "prm800k" / "phase1_train.jsonl", **options), count)
    return pack([token_tree(tree_of(record), layout) for _, record in records], tokens, slots, too_long="truncate").rows


def test_real_trees_visit_what_they_must(shared_data, smollm2_gguf):
    """PRM800K in rows for Qwen2.5-7B: the block pairs that the kernel computes are those that hold a visible pair."""
    tokens = 8192
    until_BT = real_rows(shared_data, smollm2_gguf, tokens, 512, 300).until
    sizes = block_sizes(tokens, H=128, G=7, itemsize=2)
    blocks = jax.jit(find_blocks, static_argnums=2)(until_BT, until_BT, sizes)
    assert len(until_BT) > 40
    np.testing.assert_array_equal(blocks.count[:, 0], needed(until_BT, sizes).sum((1, 2)))
    assert np.mean(blocks.count) < 0.7 * blocks.by_query.shape[1]  # of a row of one chain


def test_blocks_fit_the_memories_of_a_core():
    assert block_sizes(8192, 128, 7, 2) == Sizes(256, 512)
    for tokens, H, G, itemsize in itertools.product([1024, 8192, 131_072], [64, 128, 256], [1, 4, 7, 8, 16], [2, 4]):
        if (H, G, itemsize) == (256, 16, 4):
            refused(ValueError, "16.*256", block_sizes, tokens, H, G, itemsize)
            continue
        sizes = block_sizes(tokens, H, G, itemsize)
        assert tokens % sizes.query == tokens % sizes.key == 0 and vmem_bytes(sizes, H, G, itemsize) <= VMEM
        table_BP = jax.eval_shape(functools.partial(find_blocks, sizes=sizes), *two(1, tokens)).by_query
        assert 4 * table_BP.size <= SMEM


def two(rows, tokens):
    return (jax.ShapeDtypeStruct((rows, tokens), jnp.int32),) * 2


def test_what_does_not_fit_is_refused(monkeypatch):
    def traced(B, T):
        arrays = [jax.ShapeDtypeStruct(x, jnp.float32) for x in ((B, T, 2, 2, 4), (B, T, 2, 4), (B, T, 2, 4))]
        return jax.eval_shape(functools.partial(by_rule, config=KERNEL), *arrays, *two(B, T))

    refused(ValueError, "128", traced, 1, 48)
    refused(ValueError, "131,072", traced, 8, 131_072)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    refused(ValueError, "attention='gpu_kernel'", traced, 1, 128)


def test_a_mesh_changes_nothing():
    until_BT, position_BT = (x[:4, :384].clip(max=384) for x in long_rows())
    arrays = (*arrays_of(2, 4, 384), until_BT, position_BT)
    expected = by_rule(*arrays, KERNEL)
    mesh, place = make_mesh(MeshConfig(2, 2, 2)), spec("batch", None, "kv_heads")
    with jax.set_mesh(mesh):
        heads = (jax.device_put(x, jax.NamedSharding(mesh, place)) for x in arrays[:3])
        actual = by_rule(*heads, *put_rows(arrays[3:], mesh), KERNEL)
    close(actual, expected, 2e-5)  # another compilation fuses other operations, which moves the last bits
    assert all(x.sharding.spec[0] == ("data", "fsdp") and x.sharding.spec[2] == "tensor" for x in actual)


def test_gemma_type_checks_on_a_mesh():
    config = dataclasses.replace(GEMMA, attention="kernel")
    rows = empty_rows(4, 384, 8)

    def gradient(key, rows):
        return jax.grad(lambda weights: step_logits(weights, config, rows).sum())(init(config, key))

    with jax.set_mesh(make_mesh(MeshConfig(2, 2, 2))):
        actual = jax.eval_shape(gradient, jax.random.key(0), put_rows(rows, jax.sharding.get_mesh()))
    assert actual["decoder"]["layers_1"]["query"].sharding.spec == jax.P(None, "fsdp", "tensor", None, None)
