"""Attention by one's own rule: the same wherever it is computed. Rules that are not declared are refused."""

import dataclasses
import pathlib

import forks
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from families import breadth
from refusing import refused
from test_live import CLOSE, make
from tiny import TINY, params, random_tree
from tiny_run import MODEL, experiment

from jprm.checkpoints import base
from jprm.methods.decoding import decode
from jprm.methods.formats.writing import decoder_json
from jprm.methods.layers.attending import attention_by, logits
from jprm.model.attention import Implementation, attend_in_blocks, blocked_plan
from jprm.model.config import ExpertsConfig
from jprm.model.transformer import ATTENTION, hidden
from jprm.rows import empty_rows
from jprm.testing import check_part


def softmax(q, k, v, seen, behind, w, config):
    return jnp.einsum("BKGTS,BSKH->BTKGH", jax.nn.softmax(logits(q, k, seen, config)).astype(v.dtype), v)


def alibi(q, k, v, seen, behind, w, config):
    logit = logits(q, k, seen, config) - 0.1 * behind[:, None, None]
    return jnp.einsum("BKGTS,BSKH->BTKGH", jax.nn.softmax(logit), v)


def sigmoid(q, k, v, seen, behind, w, config):
    return jnp.einsum("BKGTS,BSKH->BTKGH", jax.nn.sigmoid(logits(q, k, seen, config) - 2), v)


def chunked(q, k, v, seen, behind, w, config):
    """Llama 4: a query sees the keys of its own chunk of eight positions; here the nearest eight."""
    return jnp.einsum("BKGTS,BSKH->BTKGH", jax.nn.softmax(logits(q, k, seen & (behind < 8), config)), v)


RULES = {
    "SAME": attention_by(softmax),
    "SINKS": forks.SINKS,
    "SOFTMAX1": forks.SOFTMAX1,
    "ALIBI": attention_by(alibi),
    "SIGMOID": attention_by(sigmoid),
    "CHUNKED": attention_by(chunked),
}
globals().update(RULES)
DISGUISED = dataclasses.replace(ATTENTION, apply=lambda *arguments: ATTENTION.apply(*arguments))
UNDECLARED = Implementation(blocked_plan, attend_in_blocks)
DECLARED = dataclasses.replace(UNDECLARED, softmax=True)


def named(name):
    return f"{__name__}:{name}"


GPT_OSS = dict(
    mlps=("experts",), experts=ExpertsConfig(4, 2, 16, clamp=0.5), qkv_bias=True, out_bias=True, windows=(16, 0)
)


@pytest.mark.parametrize(
    ("mixers", "more"),
    [
        *breadth([((name,), {}) for name in RULES], but=[(("SAME",), {}), (("SINKS",), {})]),
        *breadth([(("attention", "SINKS"), {})]),
        (("sinks",), GPT_OSS),
    ],
    ids=[*RULES, "both", "gpt-oss"],
)
def test_a_rule_is_the_same_packed_alone_live_cached_and_on_four_devices(mixers, more):
    mixers = tuple(named(name) if name in RULES else name for name in mixers)
    run = experiment(pathlib.Path("data"), model=dataclasses.replace(MODEL, mixers=mixers, **more))
    every = ("packed", "devices") if mixers == (named("SINKS"),) else ()
    check_part(run, only=("scored", "live", "cached", *every))


def test_a_rule_that_is_the_softmax_scores_as_attention():
    trees = [random_tree(seed, 6) for seed in range(2)]
    for ours, theirs in zip(make(mixers=(named("SAME"),)).score_trees(trees), make().score_trees(trees), strict=True):
        np.testing.assert_allclose(ours, theirs, **CLOSE)


def test_a_rule_decodes_token_by_token_and_in_windows():
    config = dataclasses.replace(TINY, mixers=(named("SINKS"),), windows=(5, 0), attention="reference")
    weights = jax.tree.map(jnp.asarray, params(config))
    tokens = np.random.default_rng(1).integers(3, config.vocab_size, (2, 16)).astype(np.int32)
    position = np.broadcast_to(np.arange(16, dtype=np.int32), tokens.shape)
    rows = dataclasses.replace(empty_rows(2, 16, 1), tokens=tokens, position=position, until=np.full_like(tokens, 16))
    expected, kept, out = np.asarray(hidden(weights, config, rows)), decode.empty_cache(config, 2, 16), []
    for t in range(16):
        x, kept = decode.forward(weights, config, tokens[:, t : t + 1], position[:, t : t + 1], None, kept, t)
        out.append(x)
    np.testing.assert_allclose(np.concatenate(out, axis=1), expected, atol=1e-5)


def test_a_rule_that_is_not_declared_is_refused_where_the_softmax_is_computed():
    disguised = dataclasses.replace(TINY, mixers=(named("DISGUISED"),))
    refused(NotImplementedError, "Attending", decode.empty_cache, disguised, 1, 8)
    undeclared = dataclasses.replace(TINY, attention=named("UNDECLARED"))
    refused(ValueError, "softmax=True", decode.empty_cache, undeclared, 1, 8)
    one_norm = dataclasses.replace(TINY, qk_norm=False)  # with qkv_bias besides it, no family has it
    undeclared = dataclasses.replace(one_norm, attention=named("UNDECLARED"))
    refused(ValueError, "softmax=True", decoder_json, "m", undeclared, None, 8, "float32")
    decode.empty_cache(dataclasses.replace(TINY, attention=named("DECLARED")), 1, 8)
    own = dataclasses.replace(one_norm, mixers=(named("SINKS"),))
    refused(ValueError, "SINKS", decoder_json, "m", own, None, 8, "float32")


def test_a_base_of_another_attention_is_refused(tiny_run):
    (config,) = [base.model_config(tiny_run.folder)]
    refused(ValueError, "the other model", base.load_decoder, tiny_run.folder,
            dataclasses.replace(config, attention=named("UNDECLARED")))  # fmt: skip
