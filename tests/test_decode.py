"""Decoding with a cache gives what computing the whole row gives, however the cache is divided."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny import TINY, hidden, params

from jprm.model import decode
from jprm.model.transformer import head_logits
from jprm.pack import empty_rows

CONFIG = dataclasses.replace(TINY, head="language", attention="reference")
ROWS, TOKENS, PAST = 4, 24, 10
POSITION = np.tile(np.arange(TOKENS, dtype=np.int32), (ROWS, 1))
forward = jax.jit(decode.forward, static_argnums=1)

# Two layers of float32 sums in another order, each off by a few 6e-8, on states of size 1.
close = functools.partial(np.testing.assert_allclose, atol=1e-4, rtol=1e-4)


@pytest.fixture(scope="module")
def tokens():
    """Rows in pairs that begin alike, as two samples of one prompt do."""
    tokens = np.random.default_rng(0).integers(0, CONFIG.vocab_size, (ROWS, TOKENS)).astype(np.int32)
    tokens[1::2, :PAST] = tokens[::2, :PAST]
    return tokens


@pytest.fixture(scope="module")
def expected(tokens):
    """Hidden states by the model that is trained."""
    rows = empty_rows(ROWS, TOKENS, 1)
    rows = dataclasses.replace(rows, tokens=tokens, position=POSITION, until=np.full_like(tokens, TOKENS))
    return np.asarray(hidden(params(CONFIG), CONFIG, rows))


def test_without_a_cache_it_is_the_decoder(tokens, expected, monkeypatch):
    monkeypatch.setattr(decode, "QUERIES", 7)  # blocks of queries, the last one smaller
    x_BTD, cache = forward(params(CONFIG), CONFIG, tokens, POSITION)
    close(x_BTD, expected)
    assert [x.shape for x in jax.tree.leaves(cache)] == [(2, ROWS, 2, TOKENS, 4)] * 2


@pytest.mark.parametrize("groups", [(2,), (1, 1)])
def test_a_shared_prompt_then_a_token_at_a_time(tokens, expected, groups):
    weights, config = params(CONFIG), CONFIG
    if groups == (1, 1):
        weights, config = decode.unstacked(weights, config)
    assert config.layer_groups == groups
    padded = np.pad(tokens[::2, :PAST], ((0, 0), (0, 3)))  # behind the prompt, and hidden
    _, cache = forward(weights, config, padded, np.arange(PAST + 3) + np.zeros_like(padded))
    past = decode.Past(cache, np.arange(PAST + 3) < np.full((ROWS // 2, 1), PAST))
    own = decode.empty_cache(config, ROWS, 16)
    assert own[0][0].shape == (2, ROWS, 2, 16, 4) if groups == (2,) else (ROWS, 2, 16, 4)
    step = jax.jit(lambda *args: decode.forward(*args), static_argnums=1, donate_argnums=5)
    for i in range(TOKENS - PAST):
        new, at = tokens[:, PAST + i, None], np.full((ROWS, 1), PAST + i)
        x_BTD, own = step(weights, config, new, at, past, own, jnp.int32(i))
        close(x_BTD[:, 0], expected[:, PAST + i])
    assert step._cache_size() == 1


def test_keys_are_found_in_whatever_slots_they_lie(tokens, expected):
    slots = 50
    place = np.random.default_rng(1).permutation(slots)[: ROWS * PAST].reshape(ROWS, PAST)
    _, cache = forward(params(CONFIG), CONFIG, tokens[:, :PAST], POSITION[:, :PAST])
    pool = jax.tree.map(
        lambda x: jnp.full((2, slots, 2, 4), np.nan).at[:, place].set(x.transpose(0, 1, 3, 2, 4)), cache
    )
    seen = np.ones((ROWS, PAST), bool)
    past = decode.Past(pool, seen, place)
    close(forward(params(CONFIG), CONFIG, tokens[:, PAST:], POSITION[:, PAST:], past)[0], expected[:, PAST:])


def test_nothing_before_is_nothing_seen(tokens, expected):
    """A past of which all is hidden, as that of a prompt of one token, adds nothing, whatever garbage it holds."""
    cache = jax.tree.map(lambda x: x + 1e6, decode.empty_cache(CONFIG, ROWS, 5))
    past = decode.Past(cache, np.zeros((ROWS, 5), bool))
    close(forward(params(CONFIG), CONFIG, tokens, POSITION, past)[0], expected)


def test_logits_of_both_kinds_of_head(expected):
    for tied in (True, False):
        config = dataclasses.replace(CONFIG, tied_embeddings=tied)
        weights = params(config)
        table_DV = weights["decoder"]["embed"].T if tied else weights["head"]["kernel"]
        close(head_logits(weights, config, expected[:, -1]), expected[:, -1] @ table_DV)


def test_a_model_with_what_is_not_known_here_is_refused_by_name():
    decode.check(CONFIG)

    @dataclasses.dataclass(frozen=True)
    class Other(type(CONFIG)):
        window: int = 0

    fields = {field.name: getattr(CONFIG, field.name) for field in dataclasses.fields(CONFIG)}
    decode.check(Other(**fields))
    with pytest.raises(NotImplementedError, match="window=4096: decoding with a key-value cache does not support it"):
        decode.check(Other(**fields, window=4096))
