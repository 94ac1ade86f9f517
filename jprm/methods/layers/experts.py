"""A mixture of experts (Shazeer et al. 2017): a router selects gated MLPs for each token and weights their outputs.

The router is a softmax over all experts; the largest probabilities are the weights, which `normalised` rescales to sum
to 1 (Qwen3-MoE). With `clamp` router and experts have biases, and the SwiGLU is clamped (gpt-oss). No token is dropped:
tokens are sorted by expert, and `jax.lax.ragged_dot` multiplies each group with its expert's matrices.

If the mesh splits experts over `expert`, an axis that also splits rows, each device gathers the tokens of the axis's
devices, computes the choices of its own experts, and the partial outputs are summed and scattered. (A token with as
many choices as there are devices would travel as far if it were sent to each of its experts.) Choices are computed in
blocks a little larger than a device's equal share, so work and memory traffic follow the own choices.

The sums for metrics and the load-balancing loss run over real tokens and layers: choices and probabilities by expert,
and tokens.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jprm.model.config import ModelConfig
from jprm.model.layers import Kind, Weight, activated, gathered_weights, local, product
from jprm.model.mesh import parts, spec, stream

WEIGHTS = {
    "router": Weight("DN", "D", wide=True),
    "expert_gate": Weight("EDF", "D"),
    "expert_up": Weight("EDF", "D"),
    "expert_down": Weight("EFD", "F"),
    "router_bias": Weight("N", wide=True, when=lambda c: c.experts.clamp > 0),
    "expert_gate_bias": Weight("EF", when=lambda c: c.experts.clamp > 0),
    "expert_up_bias": Weight("EF", when=lambda c: c.experts.clamp > 0),
    "expert_down_bias": Weight("ED", when=lambda c: c.experts.clamp > 0),
    "shared_gate": Weight("DS", "D", when=lambda c: c.experts.shared_width > 0),
    "shared_up": Weight("DS", "D", when=lambda c: c.experts.shared_width > 0),
    "shared_down": Weight("SD", "S", when=lambda c: c.experts.shared_width > 0),
    "shared_mix": Weight("DU", "D", when=lambda c: c.experts.shared_width > 0),
}
"""Letters: D width, E and N experts (split over the mesh or not), F expert width, S shared-expert width, U one."""


def plan(position_BT: Int[Array, "B T"], until_BT: Int[Array, "B T"], config: ModelConfig) -> Bool[Array, "B T"]:
    """Marks the tokens that are not padding."""
    return (position_BT > 0) | (until_BT > jnp.arange(until_BT.shape[1]) + 1)


def apply(x_BTD: Float[Array, "B T D"], w: Mapping[str, Array], real_BT, settings, config: ModelConfig):
    """Returns the chosen experts' weighted outputs, plus the shared expert's, and sums for the balance loss.

    The sums over tokens of `real_BT` (not padding) are `chosen` and `probability` per expert, and `tokens`; {} without
    it. `settings` are not used.
    """
    probability_BTN, weight_BTP, expert_BTP = routed(x_BTD, w, config)
    tokens = ("batch", "tokens") if parts(x_BTD) > 1 else ("batch",)
    of_experts = [role for role in (*_MATRICES, *_BIASES) if role in w]
    places = [tokens] * 3 + [WEIGHTS[role].places[1:] for role in of_experts]
    mapped = local(functools.partial(_experts, config=config), places, tokens, check=False)
    y_BTD = mapped(x_BTD, weight_BTP, expert_BTP, *(w[role] for role in of_experts))
    if config.experts.shared_width:
        s = gathered_weights({role: w[role] for role in WEIGHTS if role.startswith("shared")}, WEIGHTS, config)
        gate, up, mix = (product(x_BTD, s[f"shared_{name}"], config) for name in ("gate", "up", "mix"))
        y_BTD += jax.nn.sigmoid(mix) * product(activated(gate, config) * up, s["shared_down"], config, 1, stream(x_BTD))
    if real_BT is None:
        return y_BTD, {}
    chosen_BTN = jnp.sum(jax.nn.one_hot(expert_BTP, probability_BTN.shape[-1]), axis=2)
    sums = {"chosen": chosen_BTN, "probability": probability_BTN}
    sums = {name: jnp.sum(x_BTN * real_BT[..., None], axis=(0, 1)) for name, x_BTN in sums.items()}
    return y_BTD, sums | {"tokens": jnp.sum(real_BT, dtype=jnp.float32)}


_MATRICES = ("expert_gate", "expert_up", "expert_down")
_BIASES = tuple(f"{role}_bias" for role in _MATRICES)


def routed(x_BTD, w: Mapping[str, Array], config: ModelConfig) -> tuple[Array, Array, Array]:
    """Returns float32 probabilities of all N experts (B, T, N), and weights and indices of the P chosen (B, T, P)."""
    logit_BTN = jnp.einsum("BTD,DN->BTN", x_BTD.astype(jnp.float32), w["router"], out_sharding=stream(x_BTD))
    logit_BTN += w.get("router_bias", 0.0)
    probability_BTN = jax.nn.softmax(logit_BTN, axis=-1)
    weight_BTP, expert_BTP = jax.lax.top_k(probability_BTN, config.experts.used)
    if config.experts.normalised:
        weight_BTP = weight_BTP / jnp.sum(weight_BTP, axis=-1, keepdims=True)
    return probability_BTN, weight_BTP.astype(x_BTD.dtype), expert_BTP


BLOCK = 512
"""Choices in a block are a multiple of this: whole tiles of the products."""


def _experts(x_BTD, weight_BTP, expert_BTP, gate_EDF, up_EDF, down_EFD, *bias, config: ModelConfig):
    """Returns one device's outputs, summed over `expert` and `tensor`."""
    (B, T, D), split = x_BTD.shape, dict(jax.sharding.get_abstract_mesh().shape)
    x_ND, weight_NP, expert_NP = (x.reshape(B * T, -1) for x in (x_BTD, weight_BTP, expert_BTP))
    if split:
        gather = functools.partial(jax.lax.all_gather, axis_name=spec("embed")[0], tiled=True)
        gate_EDF, up_EDF, down_EFD = gather(gate_EDF, axis=1), gather(up_EDF, axis=1), gather(down_EFD, axis=2)
        bias = (*bias[:2], gather(bias[2], axis=1)) if bias else ()
    if bias and "tensor" in split:  # outputs are summed over `tensor`, and the bias counts once
        bias = (*bias[:2], jnp.where(jax.lax.axis_index("tensor") == 0, bias[2], 0))

    def exchanged(x_ND, weight_NP, expert_NP, matrices):
        """Computes the device's experts for the tokens of all devices along `expert`."""
        x_MD, weight_MP, expert_MP = (jax.lax.all_gather(x, "expert", tiled=True) for x in (x_ND, weight_NP, expert_NP))
        expert_MP -= jax.lax.axis_index("expert") * len(gate_EDF)
        equal_share = expert_NP.size  # of the choices of all devices
        rows = -(-5 * equal_share // (4 * BLOCK)) * BLOCK
        y_MD = _own_experts(x_MD, weight_MP, expert_MP, matrices, config, rows)
        return jax.lax.psum_scatter(y_MD, "expert", tiled=True)

    arrays = x_ND, weight_NP, expert_NP, (gate_EDF, up_EDF, down_EFD, *bias)
    y_ND: Any = jax.checkpoint(exchanged)(*arrays) if split.get("expert", 1) > 1 else _own_experts(*arrays, config)
    return (jax.lax.psum(y_ND, "tensor") if "tensor" in split else y_ND).reshape(B, T, D)


def _own_experts(x_ND, weight_NP, expert_NP, matrices, config: ModelConfig, rows: int | None = None):
    """Returns the weighted outputs from experts 0 to E - 1; other choices add zero.

    Choices are sorted by expert, those of other experts last. `rows` of them are computed at a time (by default all),
    until no own one is left.
    """
    (N, P), E = expert_NP.shape, len(matrices[0])
    own_X = jnp.where((expert_NP >= 0) & (expert_NP < E), expert_NP, E).reshape(N * P)
    choice_X = jnp.argsort(own_X, stable=True)
    end_E = jnp.sum(own_X[:, None] <= jnp.arange(E), axis=0, dtype=jnp.int32)
    if rows is None or rows >= N * P:
        y_XD = _products(x_ND[choice_X // P], weight_NP.reshape(N * P)[choice_X], matrices, end_E, config)
        return jnp.zeros_like(x_ND).at[choice_X // P].add(y_XD)
    return _in_blocks(x_ND, weight_NP, matrices, jnp.pad(choice_X, (0, -N * P % rows)), end_E, rows, config)


def _products(x_XD, weight_X, matrices, end_E, config: ModelConfig):
    """Returns the weighted outputs of rows sorted by expert (expert e's end at end_E[e]), zero for rows without one."""
    gate_EDF, up_EDF, down_EFD, *bias = matrices
    count_E = jnp.diff(end_E, prepend=0)
    gate_XF, up_XF = (grouped(x_XD, w, count_E) for w in (gate_EDF, up_EDF))
    if bias:
        expert_X = jnp.sum(jnp.arange(len(x_XD))[:, None] >= end_E[:-1], axis=1)
        gate_bias_XF, up_bias_XF, down_bias_XD = (b_EX[expert_X] for b_EX in bias)
        h_XF = clamped(gate_XF + gate_bias_XF, up_XF + up_bias_XF, config.experts.clamp)
        y_XD = grouped(h_XF, down_EFD, count_E) + down_bias_XD
    else:
        y_XD = grouped(activated(gate_XF, config) * up_XF, down_EFD, count_E)
    used_X1 = (jnp.arange(len(x_XD)) < end_E[-1])[:, None]
    return (jnp.where(used_X1, y_XD, 0) * weight_X[:, None]).astype(x_XD.dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(5, 6))
def _in_blocks(x_ND, weight_NP, matrices, choice_X, end_E, rows: int, config: ModelConfig):
    """Sums `_products` over the blocks of `rows` choices that hold own ones.

    JAX cannot differentiate a loop whose end depends on the router, so the gradient is such a loop too. It computes
    each block again.
    """

    def add(token_C, chosen_C, end_E, y_ND):
        y_CD = _products(x_ND[token_C], weight_NP.reshape(-1)[chosen_C], matrices, end_E, config)
        return y_ND.at[token_C].add(y_CD)

    return _over_blocks(add, jnp.zeros_like(x_ND), choice_X, end_E, rows, weight_NP.shape[1])


def _in_blocks_backward(rows: int, config: ModelConfig, saved, dy_ND):
    x_ND, weight_NP, matrices, choice_X, end_E = saved

    def add(token_C, chosen_C, end_E, sums):
        dx_ND, dweight_X, dmatrices = sums
        products = functools.partial(_products, end_E=end_E, config=config)
        _, backward = jax.vjp(products, x_ND[token_C], weight_NP.reshape(-1)[chosen_C], matrices)
        dx_CD, dweight_C, more = backward(dy_ND[token_C])
        dmatrices = jax.tree.map(jnp.add, dmatrices, more)
        return dx_ND.at[token_C].add(dx_CD), dweight_X.at[chosen_C].add(dweight_C), dmatrices

    zeros = jax.tree.map(jnp.zeros_like, (x_ND, weight_NP.reshape(-1), matrices))
    dx_ND, dweight_X, dmatrices = _over_blocks(add, zeros, choice_X, end_E, rows, weight_NP.shape[1])
    return dx_ND, dweight_X.reshape(weight_NP.shape), dmatrices, None, None


_in_blocks.defvjp(lambda *arrays: (_in_blocks(*arrays), arrays[:5]), _in_blocks_backward)


def _over_blocks(add, sums, choice_X, end_E, rows: int, P: int):
    """Returns `sums` after `add(tokens, choices, ends in the block, sums)` for each block with an own choice."""

    def block(turn):
        start, sums = turn
        chosen_C = jax.lax.dynamic_slice_in_dim(choice_X, start, rows)
        return start + rows, add(chosen_C // P, chosen_C, jnp.clip(end_E - start, 0, rows), sums)

    with jax.named_scope("expected_turns_1"):  # if all devices' experts are used equally
        return jax.lax.while_loop(lambda turn: turn[0] < end_E[-1], block, (jnp.int32(0), sums))[1]


def clamped(gate_XF, up_XF, limit: float) -> Array:
    """Returns gpt-oss's SwiGLU: gate sigmoid(1.702 gate) (up + 1), both within the limit (gate only from above)."""
    gate_XF, up_XF = jnp.minimum(gate_XF, limit), jnp.clip(up_XF, -limit, limit)
    return gate_XF * jax.nn.sigmoid(1.702 * gate_XF) * (up_XF + 1)


@jax.custom_vjp
def grouped(x_XD, w_EDF, count_E) -> Array:
    """Returns (X, F): row group e (count_E[e] consecutive rows) times matrix e. Rows after the groups are unspecified.

    The TPU compiler has a kernel for this and for the gradient of the rows. It would compute the gradient of the
    matrices as E products over all rows, so a JAX kernel is used instead (MegaBlocks, Gale et al. 2022).
    """
    return jax.lax.ragged_dot(x_XD, w_EDF, count_E)


def _grouped_backward(saved, dy_XF):
    x_XD, w_EDF, count_E = saved
    (dx_XD,) = jax.vjp(lambda x_XD: jax.lax.ragged_dot(x_XD, w_EDF, count_E), x_XD)[1](dy_XF)

    def plain(x_XD, dy_XF, count_E):
        return jax.vjp(lambda w_EDF: jax.lax.ragged_dot(x_XD, w_EDF, count_E), w_EDF)[1](dy_XF)[0]

    def kernel(x_XD, dy_XF, count_E):
        from jax.experimental.pallas.ops.tpu.megablox.gmm import tgmm

        (X, D), F = x_XD.shape, dy_XF.shape[1]
        return tgmm(x_XD.T, dy_XF, count_E, w_EDF.dtype, (math.gcd(X, 512), min(D, 512), min(F, 512)))

    if len(x_XD) % 128:
        return dx_XD, plain(x_XD, dy_XF, count_E), None
    return dx_XD, jax.lax.platform_dependent(x_XD, dy_XF, count_E, tpu=kernel, default=plain), None


grouped.defvjp(lambda *arrays: (grouped(*arrays), arrays), _grouped_backward)


def sizes(config: ModelConfig) -> dict[str, int]:
    """Returns {letter: size}: D width, N and E all experts, F an expert's width, S the shared one's, U 1."""
    c = config.experts
    return {"D": config.width, "N": c.count, "E": c.count, "F": c.width, "S": c.shared_width, "U": 1}


def used(config: ModelConfig, role: str) -> float:
    """Returns the fraction of a weight that a token uses: chosen over all experts, 1 for other weights."""
    return config.experts.used / config.experts.count if role in _MATRICES else 1.0


def refuses(config: ModelConfig, context: int) -> str | None:
    """Returns the reason if the experts cannot run this model, else `None`; tokens may be in `context` parts."""
    c = config.experts
    if not 0 < c.used <= c.count or c.width < 1:
        return f"mlps have experts, and {c} has none of them, or uses more than it has"
    return None


def kernels(config: ModelConfig, rows: int, tokens: int, split: Mapping[str, int]) -> dict[str, float]:
    """Returns {"ragged-dot-none", "tgmm", "ragged-dot-metadata": FLOPs of one call on a device}.

    Assumes that all experts are used equally. `rows` are one device's; `split` is the mesh, {axis: size}.
    """
    c = config.experts
    pairs = rows * tokens // split["context"] * c.used
    product = 2.0 * pairs * config.width * c.width / split["tensor"]
    return {"ragged-dot-none": product, "tgmm": product, "ragged-dot-metadata": 1.0}  # the last: a table of tiles


EXPERTS = Kind(WEIGHTS, sizes, apply, plan, refuses=refuses, used=used, kernels=kernels)
