"""Attention: the `Implementation` record, the registered implementations, and their shared code.

Query i sees key j if and only if j <= i < until[j]. In a layer with a sliding window the key must also be less than
`window` positions before the query. Positions are depths in the tree, so a window follows the query's own path.

All implementations compute the same softmax; `ModelConfig.attention` chooses one. Attention by another rule (sinks,
ALiBi, ...) is a kind of layer: `jprm.methods.layers.attending`.

| name | for | rows | memory |
|---|---|---|---|
| `reference` | tests | any | O(T^2) |
| `blocked` | everything | any | O(block x T) |
| `paths` | CPUs | any, unsplit | O(block x T) |
| `kernel` | TPUs; interpreted on a CPU, slowly, for tests | any | O(T) |
| `gpu_kernel` | NVIDIA GPUs; interpreted on a CPU for tests | any | O(T) |

Decoding with a cache computes the softmax itself (`jprm.methods.decoding.decode`).
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jprm.model.config import ModelConfig
from jprm.model.mesh import parts, reshape, spec
from jprm.options import find_part

ATTENTION = {
    "reference": "jprm.model.attention:REFERENCE",
    "blocked": "jprm.model.attention:BLOCKED",
    "paths": "jprm.methods.kernels.cpu:PATHS",
    "kernel": "jprm.methods.kernels.tpu:KERNEL",
    "gpu_kernel": "jprm.methods.kernels.gpu:GPU_KERNEL",
}
"""Implementations by name, imported on first use. A config may also name the user's own, e.g. `mymodule:NAME`."""


@dataclasses.dataclass(frozen=True)
class Implementation:
    """One way to compute attention. To add one, write a file with such a record and a line in `ATTENTION`.

    plan: (until (B, T), position (B, T), config) to anything that `attend` needs to know about the rows. It is computed
        once for all layers. It should raise ValueError if the row length is not supported.
    attend: (q (B, T, K, G, H), k and v (B, S, K, H), plan, config, window) to (B, T, K, G, H), by a float32 softmax. It
        must scale q by `config.query_scale`, cap (`capped`) and mask. `window` is in positions; `None`: no window.
    refuses: (config, backend, context) to `None`, or the reason why the model, the backend (`None`: any) or rows in
        `context` parts are not supported; by default parts are not.
    backend: the platform on which it is fast, e.g. "tpu"; "" for all. Elsewhere `suited` replaces it.
    chain_rows: whether a row must hold one chain; the packer then packs single chains.
    flat: whether projections merge rows and tokens into one axis, and queries, keys and values into one product. That
        is faster on CPUs: XLA copies a weight gradient that sums over two axes.
    flops: (config, a device's rows, tokens per row, tensor, context) to FLOPs per kernel call there, for `jprm plan`.
    softmax: whether the user's own implementation computes the softmax. If not, caches, export and `base` refuse it.
    """

    plan: Callable[[Array, Array, ModelConfig], Any]
    attend: Callable[..., Array]
    refuses: Callable[[ModelConfig, str | None, int], str | None] = lambda config, backend, context: unsplit_only(
        config.attention, context
    )
    backend: str = ""
    chain_rows: bool = False
    flat: bool = False
    flops: Callable[[ModelConfig, int, int, int, int], dict[str, float]] = lambda *_: {}
    softmax: bool = False


def find(name: str) -> Implementation:
    return find_part(name, ATTENTION, "attention", Implementation)


def check_softmax(name: str, what: str) -> None:
    """Raises ValueError if a user's implementation `name` lacks `softmax`, which `what` needs, e.g. "transformers"."""
    if name not in ATTENTION and not find(name).softmax:
        raise ValueError(
            f"model.attention={name!r} does not declare the softmax that {what} computes. If it computes it,"
            " set softmax=True in its Implementation; if not, make it a kind (jprm.methods.layers.attending)"
        )


def check(name: str, config: ModelConfig, backend: str | None = None, context: int = 1) -> Implementation:
    """Returns the implementation. Raises ValueError if it is unknown or refuses (see `Implementation.refuses`)."""
    implementation = find(name)
    if reason := implementation.refuses(config, backend, context):
        raise ValueError(reason)
    return implementation


def chain_rows(config: ModelConfig) -> bool:
    """Returns whether the packer must put one chain in each row."""
    return find(config.attention).chain_rows


def plan(until_BT: Int[Array, "B T"], position_BT: Int[Array, "B T"], config: ModelConfig) -> Any:
    """Returns `config.attention`'s plan, for `attend`. Raises ValueError if it refuses the rows or this backend."""
    implementation = check(config.attention, config, jax.default_backend(), parts(until_BT))
    return implementation.plan(until_BT, position_BT, config)


def attend(q_BTKGH, k_BSKH, v_BSKH, plan: Any, config: ModelConfig, window=None) -> Float[Array, "B T K G H"]:
    return find(config.attention).attend(q_BTKGH, k_BSKH, v_BSKH, plan, config, window)


FAST = {"cpu": "paths", "gpu": "gpu_kernel"}
"""The fastest implementation by backend; `blocked` on other backends."""


def suited(name: str) -> str:
    """Returns `name`, or the name of the fastest implementation here if it is for another backend.

    On a GPU, `gpu_kernel` also replaces `blocked`, which old runs name. Raises ValueError if `name` is unknown.
    """
    here = jax.default_backend()
    fast = FAST.get(here, "blocked") if here != "gpu" or ampere_or_later() else "blocked"
    return fast if find(name).backend not in ("", here) or (name == "blocked" and here == "gpu") else name


def capability() -> str:
    """Returns the compute capability of this machine's GPU, which must exist, e.g. "9.0"; a name on AMD."""
    return jax.local_devices()[0].compute_capability


def ampere_or_later() -> bool:
    """Returns whether this machine's GPU can run the kernels (not AMD's); True without a GPU, e.g. for `jprm plan`."""
    if jax.default_backend() != "gpu":
        return True
    major = capability().split(".")[0]
    return major.isdecimal() and int(major) >= 8


# What several implementations share.

HIDDEN = -1e30
"""A hidden key's logit. It is finite, so a fully hidden row has no NaN; exp(-1e30 - max) is 0 in float32."""

SAVED = "attention"
"""Checkpoint name for the attention output, which `remat="dots"` keeps beside products."""

PROJECTED = "projected"
"""Checkpoint name for queries, keys, values and the stream after attention, which `remat="attention"` keeps too."""


def with_backward(forward: Callable, backward: Callable) -> Callable[..., Array]:
    """Returns `Implementation.attend` by forward, (q, k, v, plan, config) to (output, saved), and backward, (config,
    saved, dy) to (dq, dk, dv, `None`). The plan must be a dataclass with a field `window`."""

    @functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
    def attention(q_BTKGH, k_BTKH, v_BTKH, plan, config):
        return forward(q_BTKGH, k_BTKH, v_BTKH, plan, config)[0]

    attention.defvjp(forward, backward)
    return lambda q, k, v, plan, config, window=None: attention(
        q, k, v, dataclasses.replace(plan, window=window), config
    )


def capped(logit, softcap: float):
    """Returns softcap x tanh(logit / softcap), or the logit if softcap is 0 (Gemma 2; Bello et al. 2016)."""
    return softcap * jnp.tanh(logit / softcap) if softcap else logit


def unsplit_only(name: str, context: int) -> str | None:
    """Returns the reason for `Implementation.refuses` if rows are split into `context` > 1 parts, else `None`."""
    if context == 1:
        return None
    return (
        f"attention={name!r} does not split rows over the mesh's context={context}; choose attention='kernel' for TPUs,"
        " 'blocked' elsewhere, or mesh.context=1"
    )


# ------------------------------------------------------------------------------------------------ in blocks of queries
#
# By XLA: blocks of queries, each against all keys up to its own end. Memory is O(block x T), and half of the square is
# skipped. Where the mesh splits the tokens of a row over `context`, every device keeps its queries and receives the
# keys and values of its rows and heads. Parts are equal in queries, not in work: of a row that one chain fills, the
# last device computes most.


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Unsplit:
    """A plan for rows with all tokens on every device."""

    until: Int[Array, "B S"]
    position: Int[Array, "B S"]
    window: Int[Array, ""] | None = None  # of the layer, in positions; None: queries see the whole path


def blocked_plan(until_BT: Int[Array, "B T"], position_BT: Int[Array, "B T"], config: ModelConfig) -> Unsplit:
    return Unsplit(*unsplit(until_BT, position_BT))


def unsplit(*arrays: Array) -> list[Array]:
    """Returns the arrays (B, T), gathered so that every device has all its rows' tokens."""
    return [jax.sharding.reshard(x, spec("batch", None)) if parts(x) > 1 else x for x in arrays]


def attend_in_blocks(
    q_BTKGH: Float[Array, "B T K G H"],
    k_BSKH: Float[Array, "B S K H"],
    v_BSKH: Float[Array, "B S K H"],
    rows: Unsplit,
    config: ModelConfig,
    window: Int[Array, ""] | None = None,
    at_once: bool = False,
) -> Float[Array, "B T K G H"]:
    """Attends as `Implementation.attend`, `config.attention_block` queries at a time, or all `at_once`."""
    rows = dataclasses.replace(rows, window=window)
    # Heads before tokens and one contiguous matrix a key-value head: the products are then plain matrix products.
    q_BKGTH = q_BTKGH.transpose(0, 2, 3, 1, 4) * config.query_scale
    k_BKSH, v_BKSH = k_BSKH.transpose(0, 2, 1, 3), v_BSKH.transpose(0, 2, 1, 3)
    blocks = functools.partial(_blocks, config=config, at_once=at_once)
    if parts(q_BTKGH) > 1:
        blocks = functools.partial(_split, blocks)
    return blocks(q_BKGTH, k_BKSH, v_BKSH, rows).transpose(0, 3, 1, 2, 4)


def _split(blocks, q_BKGTH, k_BKTH, v_BKTH, rows: Unsplit):
    """Attends if tokens are split: each device gathers its rows' keys and values for its own queries."""

    def on_device(q_BKGTH, k_BKTH, v_BKTH, rows: Unsplit):
        k_BKSH, v_BKSH = (jax.lax.all_gather(x, "context", axis=2, tiled=True) for x in (k_BKTH, v_BKTH))
        return blocks(q_BKGTH, k_BKSH, v_BKSH, rows, first=jax.lax.axis_index("context") * q_BKGTH.shape[3])

    queries, keys = spec("batch", "kv_heads", None, "tokens"), spec("batch", "kv_heads", "tokens")
    places = queries, keys, keys, jax.tree.map(lambda x: spec("batch") if x.ndim else spec(), rows)
    arguments = jax.tree.map(jax.sharding.reshard, (q_BKGTH, k_BKTH, v_BKTH, rows), places)
    return jax.shard_map(on_device, in_specs=places, out_specs=queries)(*arguments)


def _blocks(q_BKGTH, k_BKSH, v_BKSH, rows: Unsplit, config: ModelConfig, at_once: bool, first=0):
    """Attends one query block at a time, rematerialised. `first` is the first query's row index."""
    T, S = q_BKGTH.shape[3], k_BKSH.shape[2]
    # At most 64 blocks, which bounds the size of the compiled program.
    block = T if at_once else max(config.attention_block, -(-T // 64))

    @functools.partial(jax.checkpoint, static_argnums=4)
    def of_block(q_BKGTH, k_BKSH, v_BKSH, rows: Unsplit, start: int, first):
        T, S = q_BKGTH.shape[3], k_BKSH.shape[2]
        query_T, key_S = first + start + jnp.arange(T), jnp.arange(S)
        seen_BTS = (key_S <= query_T[:, None]) & (query_T[:, None] < rows.until[:, None, :S])
        if rows.window is not None:
            position_BT = jax.lax.dynamic_slice_in_dim(rows.position, first + start, T, axis=1)
            seen_BTS &= position_BT[:, :, None] - rows.position[:, None, :S] < rows.window
        return _softmax(q_BKGTH, k_BKSH, v_BKSH, seen_BTS, config.attention_softcap)

    outputs = []
    for a in range(0, T, block):
        b = min(a + block, T)
        end = b if S == T else S  # of keys: the device with the row's last queries needs them all
        outputs.append(of_block(q_BKGTH[:, :, :, a:b], k_BKSH[:, :, :end], v_BKSH[:, :, :end], rows, a, first))
    return jnp.concatenate(outputs, axis=3)


def _softmax(q_BKGTH, k_BKSH, v_BKSH, seen_BTS: Bool[Array, "B T S"], softcap: float):
    B, K, G, T, H = q_BKGTH.shape
    S, split = k_BKSH.shape[2], ("batch", "kv_heads")
    q_BKQH = reshape(q_BKGTH, (B, K, G * T, H), *split)
    logit_BKQS = capped(jnp.einsum("BKQH,BKSH->BKQS", q_BKQH, k_BKSH, preferred_element_type=jnp.float32), softcap)
    logit_BKGTS = jnp.where(seen_BTS[:, None, None], reshape(logit_BKQS, (B, K, G, T, S), *split), HIDDEN)
    weight_BKGTS = jax.nn.softmax(logit_BKGTS, axis=-1).astype(v_BKSH.dtype)
    y_BKQH = jnp.einsum("BKQS,BKSH->BKQH", reshape(weight_BKGTS, (B, K, G * T, S), *split), v_BKSH)
    return reshape(y_BKQH, (B, K, G, T, H), *split)


BLOCKED = Implementation(blocked_plan, attend_in_blocks, refuses=lambda config, backend, context: None)

REFERENCE = dataclasses.replace(BLOCKED, attend=functools.partial(attend_in_blocks, at_once=True))
"""The rule in one softmax with O(T^2) memory; tests compare the other implementations with it."""
