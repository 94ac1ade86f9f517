"""Parts as a fork writes them: attention rules, a recurrent kind, a head, a pair objective, an optimizer.

Names that begin with WRONG have a fault which `jprm.testing` must find.
"""

import dataclasses

import jax
import jax.numpy as jnp
import optax
from optax.contrib import scale_by_muon

from jprm.methods.layers.attending import attention_by, logits
from jprm.methods.layers.deltanet import previous_of
from jprm.methods.optimizers.muon import dimensions
from jprm.methods.optimizers.muon import muon as gathered_muon
from jprm.model.attention import HIDDEN, Implementation, blocked_plan
from jprm.model.heads import PROBABILITY, Head, Readout, find
from jprm.model.layers import Attending, Kind, Recurrent, Weight, product
from jprm.model.mesh import stream
from jprm.model.transformer import step_logits
from jprm.objectives import Judged, Mean, log_odds, targets
from jprm.rows import at_slots

# ---- Attention rules: sinks (gpt-oss) and softmax1 (Miller 2023).


def with_sink(logit_BKGTS, sink_BKGTS, v_BSKH):
    weight = jax.nn.softmax(jnp.concatenate([logit_BKGTS, sink_BKGTS], axis=-1))[..., :-1]
    return jnp.einsum("BKGTS,BSKH->BTKGH", weight, v_BSKH)


def sinks(q, k, v, seen, behind, w, config):
    logit = logits(q, k, seen, config)
    return with_sink(logit, jnp.broadcast_to(w["sink"][None, :, :, None, None], (*logit.shape[:-1], 1)), v)


def softmax1(q, k, v, seen, behind, w, config):
    logit = logits(q, k, seen, config)
    return with_sink(logit, jnp.zeros((*logit.shape[:-1], 1)), v)


def softmax(q, k, v, seen, behind, w, config):
    return jnp.einsum("BKGTS,BSKH->BTKGH", jax.nn.softmax(logits(q, k, seen, config)), v)


SINKS = attention_by(sinks, {"sink": Weight("KG", value=0.7)})
SOFTMAX1 = attention_by(softmax1)
WRONG_SINKS = dataclasses.replace(SINKS, cached=Attending(softmax, {}))
"""Trains with sinks, and decodes without them."""


def attend(q_BTKGH, k_BSKH, v_BSKH, rows, config, window=None):
    T, S = jnp.arange(q_BTKGH.shape[1]), jnp.arange(k_BSKH.shape[1])
    seen_BTS = (S <= T[:, None]) & (T[:, None] < rows.until[:, None, :])
    logit = jnp.einsum("btkgh,bskh->bkgts", q_BTKGH * config.query_scale, k_BSKH)
    logit = jnp.where(seen_BTS[:, None, None], logit, HIDDEN)
    most = jnp.maximum(jnp.max(logit, axis=-1, keepdims=True), 0)
    weight = jnp.exp(logit - most)
    weight = weight / (jnp.sum(weight, axis=-1, keepdims=True) + jnp.exp(-most))
    return jnp.einsum("bkgts,bskh->btkgh", weight, v_BSKH)


WRONG_SOFTMAX = Implementation(blocked_plan, attend, softmax=True)
"""Declares the softmax and computes softmax1."""


# ---- A gated linear recurrent unit (De et al. 2024, arXiv 2402.19427): h_t = a_t h_previous + sqrt(1 - a_t^2) b_t.

LRU_WEIGHTS = {
    "lru_in": Weight("DF", "D"),
    "lru_gate": Weight("DF", "D"),
    "lru_rate": Weight("DF", "D"),
    "lru_decay": Weight(
        "F", value=lambda key, shape: jax.random.uniform(key, shape, minval=2.0, maxval=6.0), wide=True
    ),
    "lru_out": Weight("FD", "F"),
}


def terms(x_BTD, w, config):
    """Returns log a and the input of each token, in float32."""
    rate = jax.nn.sigmoid(product(x_BTD, w["lru_rate"], config).astype(jnp.float32))
    log_a = -rate * jax.nn.softplus(-w["lru_decay"]) * 8.0
    return log_a, jnp.sqrt(-jnp.expm1(2 * log_a)) * product(x_BTD, w["lru_in"], config).astype(jnp.float32)


def gated(h_BTF, x_BTD, w, config):
    gate = jax.nn.gelu(product(x_BTD, w["lru_gate"], config))
    return product(h_BTF.astype(x_BTD.dtype) * gate, w["lru_out"], config, 1, stream(x_BTD))


def recur(x_BTD, w, previous_BT, settings, config):
    """Composes the recurrence along a tree's paths: each round doubles the distance."""

    def further(_, state):
        h, log_a, at_BT = state
        has, safe = at_BT >= 0, jnp.maximum(at_BT, 0)
        h = h + jnp.where(has[..., None], jnp.exp(log_a) * at_slots(h, safe), 0)
        log_a = jnp.where(has[..., None], log_a + at_slots(log_a, safe), log_a)
        return h, log_a, jnp.where(has, at_slots(at_BT, safe), -1)

    log_a, h = terms(x_BTD, w, config)
    rounds = max(x_BTD.shape[1] - 1, 1).bit_length()
    h, *_ = jax.lax.fori_loop(0, rounds, further, (h, log_a, previous_BT))  # written out, XLA fuses and repeats rounds
    return gated(h, x_BTD, w, config), {}


def go_on(x_BTD, w, state, length_B, config):
    log_a, b = terms(x_BTD, w, config)

    def turn(h, inputs):
        log_a, b = inputs
        h = jnp.exp(log_a) * h + b
        return h, h

    _, h_TBF = jax.lax.scan(turn, state[0], (log_a.swapaxes(0, 1), b.swapaxes(0, 1)))
    h_BTF = h_TBF.swapaxes(0, 1)
    all_BTF = jnp.concatenate([state[0][:, None], h_BTF], axis=1)
    last_BF = jnp.take_along_axis(all_BTF, length_B[:, None, None], axis=1)[:, 0]
    return gated(h_BTF, x_BTD, w, config), (last_BF,)


LRU = Kind(
    LRU_WEIGHTS, lambda config: {"D": config.width, "F": config.width}, recur,
    lambda position_BT, until_BT, config: previous_of(until_BT),
    cached=Recurrent(lambda config, rows: (((rows, config.width), jnp.float32),), go_on),
)  # fmt: skip
WRONG_LRU = dataclasses.replace(LRU, plan=lambda position_BT, until_BT, config: jnp.arange(-1, until_BT.shape[1] - 1)
                                + jnp.zeros_like(until_BT))  # fmt: skip
"""Each token follows the one before it in the row, whatever tree that is of."""


# ---- A head of two outputs: a value and its uncertainty, a logistic-normal by MacKay's approximation (1992).


def sigma(logit_BS2):
    return jnp.exp(jnp.clip(logit_BS2[..., 1].astype(jnp.float32), -6, 4))


def log_likelihood(logit_BS2, target_BS):
    z = jax.lax.rsqrt(1 + jnp.pi / 8 * sigma(logit_BS2) ** 2) * logit_BS2[..., 0]
    return target_BS * jax.nn.log_sigmoid(z) + (1 - target_BS) * jax.nn.log_sigmoid(-z) - 0.01 * logit_BS2[..., 1] ** 2


GAUSS = Head(
    ("mu", "log_sigma"), Readout(score=lambda logit_BS2: jax.nn.sigmoid(logit_BS2[..., 0]), sigma=sigma),
    PROBABILITY, log_likelihood,
)  # fmt: skip


# ---- A hinge between a step and the step before it.


@dataclasses.dataclass(frozen=True)
class Hinge:
    """A wrong step must lie `margin` log-odds below the step before it, and a right one must not fall.

    whole: the earlier step counts by its weight in the whole tree. In a later row of a split tree its `weight` is 0.
    """

    margin: float = 1.0
    whole: bool = True

    def __call__(self, params, rows, config):
        head = find(config.model.head)
        logit_BSC = step_logits(params["model"], config.model, rows)
        target_BS, weight_BS = targets(rows, config.target)
        earlier = dataclasses.replace(rows, weight=rows.tree_weight) if self.whole else rows
        s_BS, at_BS = log_odds(head, logit_BSC), jnp.maximum(rows.parent, 0)
        before = (at_slots(x, at_BS) for x in (s_BS, target_BS, targets(earlier, config.target)[1]))
        s_before_BS, target_before_BS, weight_before_BS = before
        pair_BS = (rows.parent >= 0) * weight_BS * weight_before_BS * (target_before_BS >= 0.5)
        drop_BS, wrong_BS = s_before_BS - s_BS, target_BS < 0.5
        loss_BS = jnp.where(wrong_BS, jax.nn.relu(self.margin - drop_BS), jax.nn.relu(drop_BS))
        fell = Mean(jnp.sum(pair_BS * wrong_BS * (drop_BS > 0)), jnp.sum(pair_BS * wrong_BS))
        judged = Judged(*head.judge(logit_BSC, target_BS), weight_BS)
        return jnp.sum(pair_BS * loss_BS), jnp.sum(pair_BS), {"fell": fell, "scores": judged}


hinge = Hinge()
wrong_hinge = Hinge(whole=False)


# ---- Muon: jprm's, which gathers matrices, and optax's own, which multiplies them as a mesh splits them.


def muon(config):
    return gathered_muon(config)


def wrong_muon(config):
    axes = lambda flat: {path: dimensions(path) or optax.MaskedNode() for path in flat}  # noqa: E731
    kind = lambda flat: {path: "muon" if dimensions(path) else "adam" for path in flat}  # noqa: E731
    return optax.partition({"muon": scale_by_muon(weight_dimension_numbers=axes), "adam": optax.scale_by_adam()}, kind)
