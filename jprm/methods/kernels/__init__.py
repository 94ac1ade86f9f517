"""Attention kernels for CPUs, TPUs and GPUs, a file each, and their shared code.

GPU kernels use powers of two, which are faster there than `exp`: logits are multiplied by log2(e).

Gradients (Dao et al. 2022), with p the weights: dv = p' dy, ds = p (dy v' - sum(dy y)), dq = ds k, dk = ds' q.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from jprm.model.attention import HIDDEN, SAVED, ampere_or_later, capability, capped
from jprm.model.config import ModelConfig
from jprm.model.mesh import spec

LOG2_E = math.log2(math.e)

PRODUCTS = {"forward_kernel": 2, "dq_kernel": 3, "dkv_kernel": 4}
"""Matrix products per block pair: logits and output; logits, weight and query gradients; logits, weight, key and
value gradients."""


def on_mesh(call, blocks, heads: dict, results: tuple[str, ...], kinds: dict[str, tuple], split: bool):
    """Returns the arrays of `call` on every device's own rows, heads and tokens, since JAX cannot shard a kernel.

    If tokens are split, `call` takes whole rows' keys, and each device returns its term in their gradients.

    Args:
      call: (blocks, heads) to a tuple of arrays.
      blocks: the plan for the rows, with `until`, `position` and `window`, e.g. a `BlockTable`.
      heads: lists of arrays by kind, e.g. `{"keys": [k, v]}`.
      results: each result's kind.
      kinds: each kind's logical axes: `queries`, `keys` and `rows`.
      split: whether rows' tokens are split.
    """
    axis = kinds["keys"].index("tokens")

    def on_device(blocks, heads):
        in_part = heads["keys"][0].shape[axis] < blocks.until.shape[1]
        if in_part:
            keys = [jax.lax.all_gather(x, "context", axis=axis, tiled=True) for x in heads["keys"]]
            heads = heads | dict(keys=keys)
        arrays = call(blocks, heads)
        if not in_part:
            return arrays
        return tuple(
            jax.lax.psum_scatter(x, "context", scatter_dimension=axis, tiled=True) if kind == "keys" else x
            for x, kind in zip(arrays, results, strict=True)
        )

    if jax.sharding.get_abstract_mesh().empty:
        return on_device(blocks, heads)
    tokens = "tokens" if split else None
    place = {kind: spec(*(tokens if name == "tokens" else name for name in axes)) for kind, axes in kinds.items()}
    of_blocks = dataclasses.replace(
        jax.tree.map(lambda _: spec("batch", tokens), blocks), until=spec("batch"), position=spec("batch"),
        window=None if blocks.window is None else spec(),
    )  # fmt: skip
    places = of_blocks, {kind: [place[kind]] * len(arrays) for kind, arrays in heads.items()}
    arguments = jax.tree.map(jax.sharding.reshard, (blocks, heads), places)
    out = tuple(place[kind] for kind in results)
    return jax.shard_map(on_device, in_specs=places, out_specs=out, check_vma=False)(*arguments)


def saved(*arrays) -> list[jax.Array]:
    """Returns the forward arrays that the backward pass needs, named so that remat="dots" keeps them."""
    return [checkpoint_name(x, SAVED) for x in arrays]


def numbers_of(blocks, T: int) -> jax.Array:
    """Returns int32 [the layer's window (0: whole path), the row index of this device's first query].

    `T` is the queries per row on this device.
    """
    first = jax.lax.axis_index("context") * T if T < blocks.until.shape[1] else 0
    return jnp.stack([jnp.int32(0 if blocks.window is None else blocks.window), jnp.int32(first)])


def too_old(name: str) -> str | None:
    """Returns the reason to refuse this machine's GPU, or `None` (also without a GPU); `name` is the attention's."""
    if ampere_or_later():
        return None
    return (
        f"attention={name!r} is for NVIDIA GPUs of compute capability 8.0 (Ampere) and later, and this one's is"
        f" {capability()}; choose attention='blocked'"
    )


def logits(logit, config: ModelConfig) -> tuple[jax.Array, jax.Array | None]:
    """Returns scaled, capped logits times log2(e), and the cap's derivative, 1 - tanh^2 (`None` without a cap).

    `logit` is the product of unscaled queries and keys, in any shape.
    """
    cap = config.attention_softcap
    if not cap:
        return logit * (config.query_scale * LOG2_E), None
    logit = capped(logit * config.query_scale, cap)
    return logit * LOG2_E, 1 - jnp.square(logit / cap)


def weights(logit, slope, dweight, seen, log, inner) -> tuple[jax.Array, jax.Array]:
    """Returns weights, recomputed from the log-sum-exp, and the uncapped logits' gradient, not yet times `query_scale`.

    All are shaped like a block pair; `log` (base 2) and `inner`, sum(dy y), belong to its queries. `logit` and `slope`
    are as from `logits`; `dweight` is dy v'; `seen` `None` means that all keys are visible.
    """
    weight = jnp.exp2((logit if seen is None else jnp.where(seen, logit, HIDDEN)) - log)
    dlogit = weight * (dweight - inner)
    return weight, dlogit if slope is None else dlogit * slope
