"""Attention implementations against the reference, on packed trees."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from refusing import refused
from tiny import TINY, filled, packed_trees, params, random_tree, reasoning_trees, visible

from jprm.methods.kernels import cpu
from jprm.methods.kernels.cpu import path_pairs
from jprm.model.attention import ATTENTION, Implementation, attend, chain_rows, plan, suited
from jprm.model.transformer import check_model, step_logits
from jprm.pack import empty_rows

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
