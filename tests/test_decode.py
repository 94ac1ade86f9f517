"""Decoding with a cache gives what computing the whole row gives, however the cache is divided."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny import GEMMA, TINY, hidden, params

from jprm.methods.decoding import decode
from jprm.model import layers
from jprm.model.mesh import MeshConfig, make_mesh
from jprm.model.transformer import ATTENTION, head_logits
from jprm.pack import empty_rows

CONFIG = dataclasses.replace(TINY, head="language", attention="reference")
WINDOWS = dataclasses.replace(GEMMA, head="language", attention="reference")  # of 5 positions, in two layers of three
ROWS, TOKENS, PAST = 4, 24, 10
POSITION = np.tile(np.arange(TOKENS, dtype=np.int32), (ROWS, 1))
forward = jax.jit(decode.forward, static_argnums=1)

# Two layers of float32 sums in another order, each off by a few 6e-8, on states of size 1.
close = functools.partial(np.testing.assert_allclose, atol=1e-4, rtol=1e-4)


def decoding(weights, config):
    """The copy that decodes, and its config, on one device."""
    mesh = make_mesh(MeshConfig(), jax.devices()[:1])
    placed = jax.device_put(weights, jax.NamedSharding(mesh, jax.P()))
    copy = decode.decoding_copy(placed, config, mesh, "float32")
    return jax.tree.map(np.asarray, copy), decode.decoding_config(config, 1, "float32")


@pytest.fixture(scope="module")
def tokens():
    """Rows in pairs that begin alike, as two samples of one prompt do."""
    tokens = np.random.default_rng(0).integers(0, CONFIG.vocab_size, (ROWS, TOKENS)).astype(np.int32)
    tokens[1::2, :PAST] = tokens[::2, :PAST]
    return tokens


@pytest.fixture(scope="module", params=[CONFIG, WINDOWS], ids=["plain", "windows"])
def config(request):
    return request.param


@pytest.fixture(scope="module")
def expected(config, tokens):
    """Hidden states by the model that is trained."""
    rows = empty_rows(ROWS, TOKENS, 1)
    rows = dataclasses.replace(rows, tokens=tokens, position=POSITION, until=np.full_like(tokens, TOKENS))
    return np.asarray(hidden(params(config), config, rows))


def test_without_a_cache_it_is_the_decoder(config, tokens, expected, monkeypatch):
    monkeypatch.setattr(decode, "QUERIES", 7)  # blocks of queries, the last one smaller
    x_BTD, cache = forward(params(config), config, tokens, POSITION)
    close(x_BTD, expected)
    assert [x.shape for x in cache[0]["attention"]] == [(2, ROWS, 2, TOKENS, 4)] * 2


@pytest.mark.parametrize("unstacked", [False, True])
def test_a_shared_prompt_then_a_token_at_a_time(config, tokens, expected, unstacked):
    weights = params(config)
    if unstacked:
        weights, config = decoding(weights, config)
    assert (config.layer_groups[0] == 1) is unstacked
    fresh = decode.empty_cache(config, ROWS, 16)
    assert fresh[0]["attention"][0].shape == ((ROWS, 2, 16, 4) if unstacked else (2, ROWS, 2, 16, 4))
    check_token_by_token(weights, config, tokens, expected)


def check_token_by_token(weights, config, tokens, expected):
    """After the prompts that two rows each share."""
    padded = np.pad(tokens[::2, :PAST], ((0, 0), (0, 3)))  # behind the prompt, and hidden
    length_B, position_BT = np.full(ROWS // 2, PAST), np.arange(PAST + 3) + np.zeros_like(padded)
    _, cache = forward(weights, config, padded, position_BT, length_B=length_B)
    past, fresh = decode.Past(cache, position_BT < length_B[:, None]), decode.empty_cache(config, ROWS, 16)
    step = jax.jit(lambda *args: decode.forward(*args), static_argnums=1, donate_argnums=5)
    for i in range(TOKENS - PAST):
        new, at = tokens[:, PAST + i, None], np.full((ROWS, 1), PAST + i)
        x_BTD, fresh = step(weights, config, new, at, past, fresh, jnp.int32(i))
        close(x_BTD[:, 0], expected[:, PAST + i])
    assert step._cache_size() == 1


def test_keys_are_found_in_whatever_slots_they_lie(config, tokens, expected):
    slots = 50
    place = np.random.default_rng(1).permutation(slots)[: ROWS * PAST].reshape(ROWS, PAST)
    _, cache = forward(params(config), config, tokens[:, :PAST], POSITION[:, :PAST])
    pool = jax.tree.map(
        lambda x: jnp.full((*x.shape[:-4], slots, 2, 4), np.nan).at[..., place, :, :].set(x.swapaxes(-3, -2)), cache
    )
    seen = np.ones((ROWS, PAST), bool)
    past = decode.Past(pool, seen, place)
    close(forward(params(config), config, tokens[:, PAST:], POSITION[:, PAST:], past)[0], expected[:, PAST:])


def test_nothing_before_is_nothing_seen(config, tokens, expected):
    """A past of which all is hidden, as that of a prompt of one token, adds nothing, whatever garbage it holds."""
    cache = jax.tree.map(lambda x: x + 1e6, decode.empty_cache(config, ROWS, 5))
    past = decode.Past(cache, np.zeros((ROWS, 5), bool))
    close(forward(params(config), config, tokens, POSITION, past)[0], expected)


def test_logits_of_both_kinds_of_head(config, expected):
    for tied in (True, False):
        config = dataclasses.replace(config, tied_embeddings=tied)
        weights = params(config)
        table_DV = weights["decoder"]["embed"].T if tied else weights["head"]["kernel"]
        cap = config.logit_softcap
        logit_BV = expected[:, -1] @ table_DV
        close(head_logits(weights, config, expected[:, -1]), cap * np.tanh(logit_BV / cap) if cap else logit_BV)


def shift_decode(x_BTD, w, state, length_B, config):
    before_BTD = jnp.concatenate([state[0][:, None], x_BTD], axis=1)
    last_BD = jnp.take_along_axis(before_BTD, length_B[:, None, None], axis=1)[:, 0]
    return layers.product(before_BTD[:, :-1], w["shift"], config), (last_BD,)


SHIFT = layers.Kind(
    {"shift": layers.Weight("DC", inputs="D")},
    lambda config: {"D": config.width, "C": config.width},
    lambda x_BTD, w, plan, settings, config: (
        layers.product(jnp.pad(x_BTD, ((0, 0), (1, 0), (0, 0)))[:, :-1], w["shift"], config), {}
    ),
    cached=layers.Recurrent(lambda config, rows: (((rows, config.width), config.dtype),), shift_decode),
)  # fmt: skip
"""Hands a token what the token before it in the row holds."""

SAME = dataclasses.replace(ATTENTION)
DEAF = dataclasses.replace(SHIFT, cached=None)


@pytest.mark.parametrize("mixers", [("SAME",), ("SHIFT", "SAME"), ("SHIFT",)], ids=str)
@pytest.mark.parametrize("unstacked", [False, True])
def test_mixers_of_ones_own_go_on_from_a_cache(mixers, unstacked, tokens):
    config = dataclasses.replace(CONFIG, mixers=tuple(f"{__name__}:{name}" for name in mixers))
    weights, rows = params(config), empty_rows(ROWS, TOKENS, 1)
    rows = dataclasses.replace(rows, tokens=tokens, position=POSITION, until=np.full_like(tokens, TOKENS))
    expected = np.asarray(hidden(weights, config, rows))
    if unstacked:
        weights, config = decoding(weights, config)
    check_token_by_token(weights, config, tokens, expected)


def test_a_kind_has_one_name_and_one_without_a_cache_is_refused():
    same = dataclasses.replace(CONFIG, mixers=("jprm.model.transformer:ATTENTION",))
    assert same == CONFIG and same.mixers == ()
    deaf = dataclasses.replace(CONFIG, mixers=(f"{__name__}:DEAF", "attention"))
    with pytest.raises(NotImplementedError, match="cached"):
        decode.empty_cache(deaf, 1, 8)
