"""Attention of rows that hold one chain each, by cuDNN's flash attention: `attention="cudnn"`, for NVIDIA GPUs.

Such a row needs only the causal mask, which the kernel has built in and whose hidden half it skips: the chain begins
with the row, and padding follows. Padding then sees the chain, which changes nothing: no step ends there, and no token
of the chain sees it, so its gradients are zero.

A compiled program cannot refuse the contents of a row. A row that holds anything but one chain gives NaN everywhere,
and other rows are unaffected. The packer packs one chain a row where `ModelConfig.chain_rows` is true; in training all
rows have `data.tokens` tokens, and the rest is padding.

On a CPU, XLA computes the same call with a T x T array, for tests. The machine that traces the program decides which of
the two it is, since JAX queries its cuDNN then. This implementation has not run on a GPU yet: tests compare XLA's
numbers with the reference, and read the program that is lowered for CUDA.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jprm.methods.kernels import too_old
from jprm.model.attention import Implementation, unsplit_only
from jprm.model.config import ModelConfig
from jprm.model.mesh import spec

TILE = 128
"""Rows are a multiple of this many tokens: some releases of cuDNN give NaN gradients where the last tile of 128 keys is
not full."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Chains:
    """Which rows hold one chain and only padding after it."""

    alone: Bool[Array, " B"]


def refuses(config: ModelConfig, backend: str | None, context: int) -> str | None:
    """Returns why cuDNN's attention refuses. (Hopper and later also take heads of 256, other GPUs do not.)"""
    for takes, fits, field in [
        ("dtype='bfloat16' alone", config.dtype == "bfloat16", "dtype"),
        ("heads of a multiple of 8 up to 128", config.head_dim % 8 == 0 and config.head_dim <= 128, "head_dim"),
        ("no sliding windows", not config.windows, "windows"),
        ("no soft cap", not config.attention_softcap, "attention_softcap"),
    ]:
        if not fits:
            value = f"{field}={getattr(config, field)!r}"
            return f"attention='cudnn' takes {takes}, not {value}; choose attention='blocked' for that"
    if backend == "tpu":
        return "attention='cudnn' is for NVIDIA GPUs; a TPU takes attention='kernel'"
    return (too_old("cudnn") if backend == "gpu" else None) or unsplit_only("cudnn", context)


def plan(until_BT: Int[Array, "B T"], position_BT: Int[Array, "B T"], config: ModelConfig) -> Chains:
    """Finds the rows of one chain. Raises ValueError for rows of a length that is no multiple of TILE."""
    T = until_BT.shape[1]
    if T % TILE:
        raise ValueError(f"attention='cudnn' takes rows (data.tokens) of a multiple of {TILE} tokens, not {T}")
    end_B1, index_T = until_BT[:, :1], jnp.arange(T)
    until_ends_BT = until_BT == jnp.maximum(end_B1, index_T + 1)  # padding sees itself alone
    counted_BT = (position_BT == index_T) | (index_T >= end_B1)
    return Chains(jnp.all(until_ends_BT & counted_BT, axis=1))


def attend(
    q_BTKGH: Float[Array, "B T K G H"],
    k_BTKH: Float[Array, "B T K H"],
    v_BTKH: Float[Array, "B T K H"],
    chains: Chains,
    config: ModelConfig,
    window: None = None,
) -> Float[Array, "B T K G H"]:
    """Returns grouped-query attention with a softmax in float32; rows and key-value heads are split over the mesh."""
    # NaN goes into the values, since a maximum of logits could ignore it.
    v_BTKH = jnp.where(chains.alone[:, None, None, None], v_BTKH, jnp.nan)
    call = functools.partial(_causal, scale=config.query_scale)
    if jax.sharding.get_abstract_mesh().empty:
        return call(q_BTKGH, k_BTKH, v_BTKH)
    # Explicit shardings do not know JAX's rule for splitting this call, which is the compiler's.
    place = spec("batch", None, "kv_heads")
    arguments = (jax.sharding.reshard(x, place) for x in (q_BTKGH, k_BTKH, v_BTKH))
    return jax.shard_map(call, in_specs=(place,) * 3, out_specs=place)(*arguments)


def _causal(q_BTKGH, k_BTKH, v_BTKH, scale: float):
    B, T, K, G, H = q_BTKGH.shape
    y_BTNH = jax.nn.dot_product_attention(
        q_BTKGH.reshape(B, T, K * G, H),  # head n shares the keys and values of head n // G
        k_BTKH,
        v_BTKH,
        scale=scale,
        is_causal=True,
        implementation="cudnn" if jax.default_backend() == "gpu" else "xla",
    )
    return y_BTNH.reshape(q_BTKGH.shape)


CUDNN = Implementation(plan, attend, refuses, backend="gpu", chain_rows=True)
