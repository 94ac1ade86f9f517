"""Attention: all ways, and kernels for TPUs and GPUs as a CPU interprets them, against the reference; their tables."""

import dataclasses
import functools
import itertools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from families import breadth
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from refusing import refused
from tiny import GEMMA, TINY, filled, init, packed_trees, params, random_tree, reasoning_trees, visible

from jprm.methods.data.step_labels import PRM800K
from jprm.methods.kernels import cpu, gpu
from jprm.methods.kernels.cpu import path_pairs
from jprm.methods.kernels.gpu import Launch, Launches, default_launches
from jprm.methods.kernels.tpu import FIRST, LAST, LIVE, MINOR, SMEM, VMEM, Sizes, block_sizes, find_blocks, vmem_bytes
from jprm.model.attention import ATTENTION, Implementation, attend, chain_rows, check, find, plan, suited
from jprm.model.mesh import MeshConfig, make_mesh, put_rows, spec
from jprm.model.transformer import check_model, step_logits
from jprm.pack import pack
from jprm.rows import empty_rows
from jprm.token_tree import token_tree
from jprm.tokenizer import load_tokenizer, native_layout
from jprm.tree import tree_of

B, T, K, G, H = 3, 48, 2, 2, 4


@pytest.fixture(scope="module", autouse=True)
def short_chunks():
    """So that a path of a few dozen tokens has several."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cpu, "CHUNK", 16)
        yield


def configured(kind, block, **changes):
    return dataclasses.replace(TINY, attention=kind, attention_block=block, **changes)


def arrays_of(seed, B=B, T=T, K=K, G=G, H=H):
    rng = np.random.default_rng(seed)
    return tuple(rng.normal(size=x).astype(np.float32) for x in ((B, T, K, G, H), (B, T, K, H), (B, T, K, H)))


def with_gradients(attend, *arrays):
    """The output, and the gradients of a sum of it that tells all elements apart."""

    def total(*arrays):
        y_BTKGH = attend(*arrays)
        return jnp.sum(y_BTKGH * jnp.cos(jnp.arange(y_BTKGH.size).reshape(y_BTKGH.shape))), y_BTKGH

    gradients, y_BTKGH = jax.grad(total, argnums=(0, 1, 2), has_aux=True)(*arrays)
    return y_BTKGH, *gradients


@functools.partial(jax.jit, static_argnums=5)
def by_rule(q, k, v, until_BT, position_BT, config, window=None):
    seen = plan(until_BT, position_BT, config)
    return with_gradients(lambda *qkv: attend(*qkv, seen, config, window), q, k, v)


def by_hand(q_BTKGH, k_BTKH, v_BTKH, until_BT, position_BT=None, window=None, scale=H**-0.5, cap=None):
    seen_BTT = np.asarray(visible(until_BT))
    if window is not None:
        seen_BTT = seen_BTT & (position_BT[:, :, None] - position_BT[:, None] < window)
    y_BTKGH = np.zeros(q_BTKGH.shape)
    for b, t, k, g in np.ndindex(q_BTKGH.shape[:4]):
        keys = np.flatnonzero(seen_BTT[b, t])
        logit = k_BTKH[b, keys, k].astype(np.float64) @ q_BTKGH[b, t, k, g] * scale
        weight = np.exp(cap * np.tanh(logit / cap) if cap else logit)
        y_BTKGH[b, t, k, g] = weight / weight.sum() @ v_BTKH[b, keys, k]
    return y_BTKGH


def close(actual, expected, atol=2e-5):
    """By default float32 sums of at most 48 numbers of size 1, in another order: a few times 48 x 6e-8."""
    for a, b in zip(actual, expected, strict=True):
        np.testing.assert_allclose(np.asarray(a, np.float32), np.asarray(b, np.float32), atol=atol, rtol=atol)


@settings(max_examples=30, deadline=None)
@given(st.lists(reasoning_trees(), min_size=1, max_size=5), st.integers(0, 9))
def test_all_ways_equal_the_reference_with_their_gradients(trees, seed):
    rows = packed_trees(trees, T, 24, too_long="truncate").rows
    assume(1 <= len(rows.until) <= B)
    until_BT = filled(rows, B).until
    expected = by_rule(*arrays_of(seed), until_BT, until_BT, configured("reference", 8))
    for kind, block in [("blocked", 8), ("blocked", 20), ("paths", 4), ("paths", 16)]:
        close(by_rule(*arrays_of(seed), until_BT, until_BT, configured(kind, block)), expected)


@pytest.mark.parametrize("kind", ["reference", "blocked", "paths"])
def test_the_formula(kind):
    rows = filled(packed_trees([], T, 24).rows, B)
    index_T = np.arange(T)
    rows.until[0] = T  # plain causal attention
    rows.until[1] = np.where(index_T < 5, T, np.minimum((index_T // 7 + 1) * 7, T))  # a short stem and branches of 7
    y_BTKGH, *gradients = by_rule(*arrays_of(0), rows.until, rows.until, configured(kind, 4))
    close([y_BTKGH], [by_hand(*arrays_of(0), rows.until)])
    np.testing.assert_array_equal(y_BTKGH[2], np.broadcast_to(arrays_of(0)[2][2, :, :, None], (T, K, G, H)))  # padding
    assert all(np.isfinite(g).all() for g in gradients)


WINDOW = dict(query_pre_attn_scalar=2, attention_softcap=1.5)


@settings(max_examples=15, deadline=None)
@given(st.lists(reasoning_trees(), min_size=1, max_size=5), st.integers(0, 9), st.integers(1, 12))
def test_windows_reach_up_the_path_in_all_ways_with_their_gradients(trees, seed, window):
    rows = packed_trees(trees, T, 24, too_long="truncate").rows
    assume(1 <= len(rows.until) <= B)
    rows = filled(rows, B)
    arrays, window = (*arrays_of(seed), rows.until, np.asarray(rows.position)), np.int32(window)
    expected = by_rule(*arrays, configured("reference", 8, **WINDOW), window)
    close(expected[:1], [by_hand(*arrays, window, 2**-0.5, 1.5)])
    for kind, block in [("blocked", 20), ("paths", 8)]:
        close(by_rule(*arrays, configured(kind, block, **WINDOW), window), expected)


def test_a_path_has_the_chunks_that_it_needs():
    """In blocks of 8 and chunks of 16: of a chain the keys before each block, rounded up; of padding none."""
    config = configured("paths", 8)
    padding = empty_rows(1, T, 1).until
    chain, stem = np.full((1, T), T), np.where(np.arange(T) < 17, T, padding)
    for until_BT, chunks in [(chain, [0, 1, 1, 2, 2, 3]), (padding, [0] * 6), (stem, [0, 1, 1, 2, 2, 2])]:
        planned = plan(until_BT, until_BT, config)
        np.testing.assert_array_equal(planned.chunks, chunks)
        assert path_pairs(planned, config) == 8 * (6 * 8 + 16 * sum(chunks))


def test_rows_that_blocks_do_not_divide_are_refused():
    until_BT = empty_rows(B, T, 1).until
    refused(ValueError, "attention_block", by_rule, *arrays_of(0), until_BT, until_BT, configured("paths", 7))


def flat_reference(until_BT, position_BT, config):
    return visible(until_BT)


def attend_visible(q_BTKGH, k_BSKH, v_BSKH, seen_BTS, config, window=None):
    logit_BKGTS = jnp.einsum("BTKGH,BSKH->BKGTS", q_BTKGH, k_BSKH) * config.query_scale
    weight_BKGTS = jax.nn.softmax(jnp.where(seen_BTS[:, None, None], logit_BKGTS, -1e30))
    return jnp.einsum("BKGTS,BSKH->BTKGH", weight_BKGTS, v_BSKH)


def refuse_windows(config, backend, context):
    return "attention='mine' takes no windows" if config.windows else None


MINE = Implementation(flat_reference, attend_visible, refuse_windows, backend="gpu", chain_rows=True, flat=True)


def test_an_implementation_is_one_record(monkeypatch):
    """Registered by one line, or named as an object of the user's own module."""
    monkeypatch.setitem(ATTENTION, "mine", MINE)
    until_BT = filled(packed_trees([random_tree(0, 8)], T, 24).rows, B).until
    for name in ("mine", "test_attention:MINE"):
        close(*(by_rule(*arrays_of(0), until_BT, until_BT, configured(x, 8)) for x in (name, "reference")))
        assert chain_rows(configured(name, 8)) and suited(name) == "paths"
    weights, rows = jax.tree.map(jnp.asarray, (params(TINY), filled(packed_trees([random_tree(0, 8)], 64, 24).rows, 2)))
    actual, expected = (step_logits(weights, configured(x, 8), rows) for x in ("mine", "reference"))
    close([actual], [expected])
    refused(ValueError, "windows", check_model, configured("mine", 8, windows=(8,)))
    refused(ValueError, "'yours'", check_model, configured("yours", 8))


# ---- Interval attention, interpreted on a CPU, against the reference; and which pairs of blocks it visits.


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
KERNELS = [
    (by_sizes, Sizes(8, 8)),
    *breadth([(by_sizes, Sizes(24, 8)), (by_sizes, Sizes(8, 24))]),
    (by_launches, SMALL),
]
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


@pytest.mark.parametrize(("by_blocks", "sizes"), [(by_sizes, Sizes(16, 8)), *breadth([(by_launches, SMALL)])])
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


@pytest.mark.parametrize("kernel", ["kernel", *breadth(["gpu_kernel"])])
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


@pytest.mark.breadth
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


# ---- The GPU's kernels of interval attention, interpreted on a CPU, against the reference; and their tables.


GPU_KERNEL = dataclasses.replace(TINY, attention="gpu_kernel")
# float32 sums of numbers of size 1 in another order, and powers of two where the reference has powers of e.
EXACT = 1e-5


def test_heads_and_rows_of_any_size_are_padded():
    """Chains, subtrees and padding, in the default blocks: heads of 20, rows of 150 tokens."""
    H, G = 20, 3
    until_BT, position_BT = (x[[0, 2, 3, 4], :150].clip(max=150) for x in long_rows())
    arrays = (*arrays_of(0, 4, 150, K=2, G=G, H=H), until_BT, position_BT)
    model = dict(heads=2 * G, kv_heads=2, head_dim=H)
    actual, expected = (by_rule(*arrays, dataclasses.replace(x, **model)) for x in (GPU_KERNEL, REFERENCE))
    assert [x.shape for x in actual] == [x.shape for x in expected]
    close(actual, expected, EXACT)


@pytest.mark.breadth
def test_rows_of_prm800k_and_chains(shared_data, smollm2_gguf):
    rows = real_rows(shared_data, smollm2_gguf, 512, 128, 8)
    chain = np.full((1, 512), 512)
    until_BT = np.concatenate([rows.until[:2], chain])
    position_BT = np.concatenate([rows.position[:2], np.arange(512)[None]])
    assert np.any(np.diff(until_BT[0]) < 0) and np.any(np.diff(until_BT[0]) > 0)  # subtrees
    arrays = (*arrays_of(1, 3, 512, K=1, H=16), until_BT, position_BT)
    shape = dict(kv_heads=1, heads=2, head_dim=16)
    actual, expected = (by_rule(*arrays, dataclasses.replace(x, **shape)) for x in (GPU_KERNEL, REFERENCE))
    close(actual[:1], expected[:1], EXACT)
    # A key's gradient is a sum over up to 512 queries: errors of float32 grow with the gradients, which reach 20.
    for a, b in zip(actual[1:], expected[1:], strict=True):
        assert np.max(np.abs(a - b)) < EXACT * np.max(np.abs(b))


tables = jax.jit(gpu.find_blocks, static_argnums=(2, 3))


@settings(max_examples=20, deadline=None)
@given(st.data(), st.sampled_from([(6, 8), (4, 12), (12, 4)]), st.sampled_from([1, 2]))
def test_tables_for_gpus_hold_the_visible_pairs_whole_ones_first(data, sizes, parts):
    """Of any `until`, nested or not, whole pairs first; in one part or two of the queries."""
    size, (query, key) = 24, sizes
    until_T = [data.draw(st.integers(j + 1, size)) for j in range(size)]
    until_BT = np.array([until_T, range(1, size + 1), [size] * size], np.int32)
    launch = Launch(query, key, 4, 1)
    blocks = jax.tree.map(np.asarray, tables(until_BT, until_BT, Launches(launch, launch, launch), parts))
    M, N, of_part = size // query, size // key, size // query // parts
    for b in range(3):
        seen_TT = (np.arange(size) <= np.arange(size)[:, None]) & (np.arange(size)[:, None] < until_BT[b])
        seen_MNQK = seen_TT.reshape(M, query, N, key).swapaxes(1, 2)
        any_visible, all_visible = (set(zip(*np.nonzero(x(seen_MNQK, (2, 3))), strict=True)) for x in (np.any, np.all))
        for whole, expected in ((True, all_visible), (False, any_visible - all_visible)):
            by_query = [(m, n) for m, line in enumerate(blocks.forward[b]) for n in listed(line, whole)]
            assert sorted(by_query) == sorted(expected)
            by_key = [
                (m + i // N * of_part, i % N) for i, line in enumerate(blocks.dkv[b]) for m in listed(line, whole)
            ]
            assert sorted(by_key) == sorted(expected)


@settings(max_examples=20, deadline=None)
@given(st.lists(reasoning_trees(), min_size=1, max_size=5), st.integers(1, 30), st.sampled_from([1, 2]))
def test_tables_of_windows_leave_out_what_no_query_sees(trees, window, parts):
    """Pairs of blocks with a visible pair are needed, whole ones are visible throughout, and chains need no more."""
    rows = packed_trees(trees, 24, 12, too_long="truncate").rows
    until_BT = np.concatenate([rows.until[:1], np.full((1, 24), 24)]).astype(np.int32)
    position_BT = np.concatenate([rows.position[:1], np.arange(24)[None]]).astype(np.int32)
    launch, index_T = Launch(4, 6, 4, 1), np.arange(24)
    blocks = windowed(until_BT, position_BT, Launches(launch, launch, launch), parts, (window,))
    forward, _, dkv = map(np.asarray, blocks.local)
    for b in range(2):
        seen_TT = (index_T <= index_T[:, None]) & (index_T[:, None] < until_BT[b])
        seen_TT &= position_BT[b][:, None] - position_BT[b] < window
        seen_MNQK = seen_TT.reshape(6, 4, 4, 6).swapaxes(1, 2)
        any_visible, every = (set(zip(*np.nonzero(x(seen_MNQK, (2, 3))), strict=True)) for x in (np.any, np.all))
        whole, rest = ({(m, n) for m, line in enumerate(forward[b]) for n in listed(line, x)} for x in (True, False))
        assert whole <= every and any_visible <= whole | rest
        assert b == 0 or (whole == every and rest == any_visible - every)
        walked = [(m + i // 4 * (6 // parts), i % 4) for i, line in enumerate(dkv[b]) for m in listed(line, True)]
        assert set(walked) == whole


windowed = jax.jit(gpu.find_blocks, static_argnums=(2, 3, 4))


def listed(line, whole):
    n, count = line[:2].tolist()
    return line[2 : 2 + n].tolist() if whole else line[2 + n : 2 + count].tolist()


def test_a_mesh_changes_nothing_on_gpus(monkeypatch):
    """Rows, heads and the tokens of a row split over devices."""
    monkeypatch.setattr(gpu, "launches", lambda *_: SMALL)
    until_BT, position_BT = (x[:4, :128].clip(max=128) for x in long_rows())
    arrays = (*arrays_of(2, 4, 128), until_BT, position_BT)
    expected = by_rule(*arrays, REFERENCE)
    grid, place = make_mesh(MeshConfig(1, 2, 2, 2)), ("batch", "tokens", "kv_heads")
    config = dataclasses.replace(GPU_KERNEL, norm_eps=2e-6)  # a program of its own, since the launches are another
    with jax.set_mesh(grid):
        heads = (jax.device_put(x, jax.NamedSharding(grid, spec(*place))) for x in arrays[:3])
        rows = (jax.device_put(x, jax.NamedSharding(grid, spec("batch", "tokens"))) for x in arrays[3:])
        actual = by_rule(*heads, *rows, config)
    close(actual, expected, EXACT)
    assert all(x.sharding.spec[:3] == actual[0].sharding.spec[:3] for x in actual)


def test_a_gpu_takes_it_for_what_is_not_its_own(monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    device = type("GPU", (), dict(compute_capability="8.0", device_kind="NVIDIA A100-SXM4-80GB"))
    monkeypatch.setattr(jax, "local_devices", lambda: [device])
    assert [suited(x) for x in ("blocked", "paths", "kernel", "gpu_kernel")] == ["gpu_kernel"] * 4
    assert suited("reference") == "reference"
    monkeypatch.setattr(gpu, "tuned", lambda: {device.device_kind: {"128x2": dataclasses.asdict(SMALL)}})
    assert gpu.launches(96, 2) == SMALL and gpu.launches(64, 2) == default_launches(64, 2)
    for device.compute_capability in ("7.5", "gfx90a"):
        assert suited("paths") == "blocked"
        refused(ValueError, "8.0", check, "gpu_kernel", GPU_KERNEL, "gpu")
    monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
    assert suited("gpu_kernel") == "blocked"
    refused(ValueError, "attention='kernel'", check, "gpu_kernel", GPU_KERNEL, "tpu")
    refused(ValueError, "head_dim=512", check_model, dataclasses.replace(GPU_KERNEL, head_dim=512))


def test_the_table_of_measured_blocks_is_well_formed():
    for device, cases in gpu.tuned().items():
        assert device.startswith("NVIDIA")
        for launches in cases.values():
            Launches(**{name: Launch(**launches[name]) for name in ("forward", "dq", "dkv")})


@pytest.mark.slow
def test_the_check_for_machines_with_a_gpu_runs_through(tmp_path, monkeypatch):
    """At a tiny size, interpreted: errors within their bounds, a sweep, speeds, and a table that the code can read."""
    from experiments.bench import gpu_check

    out, table = tmp_path / "check.json", tmp_path / "blocks.json"
    monkeypatch.setattr("sys.argv", ["gpu_check.py", "--tiny", "--json", str(out)])
    gpu_check.main()
    report = json.loads(out.read_text())
    assert {x["implementation"] for x in report["exactness"] if x.get("ok")} >= {"blocked", "gpu_kernel"}
    (speed,) = [x for x in report["speed"] if x["attention"] == "gpu_kernel"]
    assert speed["training"] > 0 and speed["scoring"] > 0
    table.write_text('{"NVIDIA A": {"64x2": 1}}')
    gpu_check.write_table(table, report["sweep"])
    launches = json.loads(table.read_text())[jax.local_devices()[0].device_kind]["16x2"]
    Launches(**{name: Launch(**launches[name]) for name in launches})
