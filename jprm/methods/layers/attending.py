"""Custom attention rules, e.g. sinks, softmax1, ALiBi, sigmoids, chunks. One function trains, scores and decodes.

    def softmax1(q_BTKGH, k_BSKH, v_BSKH, seen_BTS, behind_BTS, w, config):
        logit_BKGTS = logits(q_BTKGH, k_BSKH, seen_BTS, config)
        zero_BKGTS = jnp.zeros((*logit_BKGTS.shape[:-1], 1))
        weight_BKGTS = jax.nn.softmax(jnp.concatenate([logit_BKGTS, zero_BKGTS], axis=-1))[..., :-1]
        return jnp.einsum("BKGTS,BSKH->BTKGH", weight_BKGTS, v_BSKH)

    SOFTMAX1 = attention_by(softmax1)

`attention_by` returns a kind with the projections, norms, positions and windows of attention. Trees, live search, the
prefix cache and the sampler all call the same function, so their scores agree. There is no fused kernel: the logits of
`attention_block` queries are in memory. `SINKS`, at the end, is registered as `sinks`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from jprm.model import transformer
from jprm.model.attention import HIDDEN, blocked_plan, capped, unsplit_only
from jprm.model.config import ModelConfig
from jprm.model.layers import Attending, Kind, Weight, gathered_weights

Attend = Callable[..., Array]
"""See `jprm.model.layers.Attending`."""


def logits(
    q_BTKGH: Float[Array, "B T K G H"], k_BSKH: Float[Array, "B S K H"], seen_BTS: Bool[Array, "B T S"],
    config: ModelConfig,
) -> Float[Array, "B K G T S"]:  # fmt: skip
    """Returns scaled and capped logits in float32; `HIDDEN` (-1e30) for keys that a query must not see."""
    q_BTKGH = q_BTKGH * config.query_scale
    logit_BKGTS = jnp.einsum("BTKGH,BSKH->BKGTS", q_BTKGH, k_BSKH, preferred_element_type=jnp.float32)
    return jnp.where(seen_BTS[:, None, None], capped(logit_BKGTS, config.attention_softcap), HIDDEN)


def attention_by(attend: Attend, weights: Mapping[str, Weight] | None = None) -> Kind:
    """Returns a mixer kind: attention with `attend` instead of the softmax.

    Args:
      attend: see `Attending.attend`. q comes unscaled: `logits` scales, caps and hides by `seen`, which `attend` must
        do itself otherwise. It must work per head.
      weights: additional parameters, e.g. `{"sink": Weight("KG")}`; axes use attention's letters, D, K, G and H.
    """
    rule = Attending(attend, weights or {})
    every = {**transformer.ATTENTION_WEIGHTS, **rule.weights}

    def apply(x_BTD, w, plan: transformer.Plan, settings, config: ModelConfig):
        w = gathered_weights({role: w[role] for role in every if role in w}, every, config)
        x_BTD, rows = jax.lax.optimization_barrier((x_BTD, plan.rows))  # masks belong to the layer: see `Kind.plan`
        rotation = transformer.rotation_of(settings, plan.rotations, config)
        q_BTKGH, k_BTKH, v_BTKH = transformer.project_heads(x_BTD, w, rotation, plan.growth, config)
        T, block = x_BTD.shape[1], max(config.attention_block, -(-x_BTD.shape[1] // 64))

        def of_block(q_BTKGH, k_BSKH, v_BSKH, rows, window, w, start: int):
            query_T, key_S = start + jnp.arange(q_BTKGH.shape[1]), jnp.arange(k_BSKH.shape[1])
            seen_BTS = (key_S <= query_T[:, None]) & (query_T[:, None] < rows.until[:, None, : len(key_S)])
            position_BT = jax.lax.dynamic_slice_in_dim(rows.position, start, len(query_T), axis=1)
            behind_BTS = position_BT[:, :, None] - rows.position[:, None, : len(key_S)]
            seen_BTS &= True if window is None else behind_BTS < window
            return rule(q_BTKGH, k_BSKH, v_BSKH, seen_BTS, behind_BTS, w, config)

        blocks = [(a, min(a + block, T)) for a in range(0, T, block)]
        again = jax.checkpoint(of_block, static_argnums=6)
        y = [again(q_BTKGH[:, a:b], k_BTKH[:, :b], v_BTKH[:, :b], rows, settings["window"], w, a) for a, b in blocks]
        return transformer.project_out(jnp.concatenate(y, axis=1), x_BTD, w, config), {}

    def plan(position_BT, until_BT, config: ModelConfig) -> transformer.Plan:
        return transformer.Plan(
            *transformer.positions(position_BT, config), blocked_plan(until_BT, position_BT, config)
        )

    return Kind(
        every, transformer.head_sizes, apply, plan, transformer.attention_settings,
        lambda config, context: unsplit_only("attention_by", context), transformer.attention_flops,
        cached=rule,
    )  # fmt: skip


def sinks(q_BTKGH, k_BSKH, v_BSKH, seen_BTS, behind_BTS, w, config: ModelConfig) -> Array:
    """Returns (B, T, K, G, H), attention with a learned sink per head: a logit that takes weight and has no value.

    `w` is {"sink": (K, G)} (gpt-oss); the other arguments are those of `Attending.attend`.
    """
    logit_BKGTS = logits(q_BTKGH, k_BSKH, seen_BTS, config)
    sink_BKGTS = jnp.broadcast_to(w["sink"][None, :, :, None, None], (*logit_BKGTS.shape[:-1], 1))
    weight_BKGTS = jax.nn.softmax(jnp.concatenate([logit_BKGTS, sink_BKGTS], axis=-1))[..., :-1]
    return jnp.einsum("BKGTS,BSKH->BTKGH", weight_BKGTS, v_BSKH)


SINKS = attention_by(sinks, {"sink": Weight("KG", wide=True)})
