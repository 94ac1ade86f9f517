"""Gated DeltaNet on trees (Yang et al. 2024, arXiv 2412.06464): a recurrent state along each token's own path.

The state S (H, V) of a head follows the path: with decay a_t = exp(g_t), rate b_t, unit key k_t and value v_t,

    S_t = a_t S + k_t b_t (v_t - k_t' a_t S)'        y_t = q_t' S_t        S: the state after the previous token

The previous token is the last earlier one on the same path, not the neighbour in the row. A row is cut into chunks of
`chunk` tokens. Within a chunk everything is a matrix product: sums over earlier tokens become sums over ancestors, and
I + A is still triangular (Yang et al. 2024, arXiv 2406.06484). Chunks run in sequence. A chunk reads the states with
which its paths enter: the state after the previous chunk, and one for each earlier token from which a branch of this
chunk starts. It stores a state if a later chunk continues from it.

So a row of T tokens stores at most

    T / chunk + (branchings with children in different chunks)

states, besides the initial one; `bound` is the number allowed. The backward pass reads the stored states and recomputes
everything else. A row with more states gets NaN, which stops training and scoring.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jprm.model.config import ModelConfig
from jprm.model.layers import Kind, Recurrent, Weight, gathered_weights, local, product
from jprm.model.mesh import sharding, stream


def _convolution(key, shape):
    return shape[-1] ** -0.5 * jax.random.normal(key, shape)


def _log_decay(key, shape):
    return jnp.log(jax.random.uniform(key, shape, minval=0.01, maxval=16))


WEIGHTS = {
    "delta_query": Weight("DKH", "D"),
    "delta_key": Weight("DKH", "D"),
    "delta_value": Weight("DKGV", "D"),
    "delta_gate": Weight("DKGV", "D"),
    "delta_rate": Weight("DKG", "D"),
    "delta_decay": Weight("DKG", "D"),
    "delta_query_conv": Weight("KHW", value=_convolution),
    "delta_key_conv": Weight("KHW", value=_convolution),
    "delta_value_conv": Weight("KGVW", value=_convolution),
    "delta_log_decay": Weight("KG", value=_log_decay, wide=True),
    "delta_decay_bias": Weight("KG", value=1.0, wide=True),
    "delta_scale": Weight("V", value=1.0, wide=True),
    "delta_out": Weight("KGVD", "KGV"),
}  # fmt: skip
"""Letters: D width, K key heads, G value heads per key head, H and V their sizes, W convolution taps."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ChunkPlan:
    """The chunks of rows: N chunks of C tokens. States are numbered; 0 is the initial state of a row."""

    back: Int[Array, "B T J"]  # the J tokens before each on its path, the nearest first; T where there is none
    sees: Bool[Array, "B N C C"]  # whether the second token is on the first one's path, or is itself
    enters: Int[Array, "B N C"]  # which of its chunk's states a token's path enters with
    states: Int[Array, "B N C"]  # numbers of the states that a chunk reads, in order; then 0
    exits: Int[Array, "B N C"]  # tokens after which the state is kept, in order; then C
    kept: Int[Array, "B N C"]  # the number of the state after each; beyond all numbers where there is none
    reads: Int[Array, "B N"]  # how many states each chunk reads
    writes: Int[Array, "B N"]
    fits: Bool[Array, " B"]  # whether the row's states are at most the bound


def chunk_of(config: ModelConfig, tokens: int) -> int:
    """Returns the tokens per chunk of a row with `tokens` tokens: `deltanet.chunk`, or fewer in a shorter row."""
    return min(config.deltanet.chunk, tokens)


def bound(config: ModelConfig, tokens: int) -> int:
    """Returns the number of states a row may store: `deltanet.states`, or two per chunk plus sqrt(2 T) for branchings.

    (If the deepest sibling comes last, as in `jprm.token_tree`, at most sqrt(2 T) branchings are open at a token, since
    the later siblings of m nested ones have at least 1 + 2 + ... + m tokens.)
    """
    return config.deltanet.states or 2 * -(-tokens // chunk_of(config, tokens)) + math.isqrt(2 * tokens)


def previous_of(until_BT: Int[Array, "B T"]) -> Int[Array, "B T"]:
    """Returns the index of the previous token on each token's path; -1 if it has none."""
    index_T = jnp.arange(until_BT.shape[1])
    before_BTS = (index_T < index_T[:, None]) & (until_BT[:, None, :] > index_T[:, None])
    return jnp.max(jnp.where(before_BTS, index_T, -1), axis=-1)


def plan(position_BT: Int[Array, "B T"], until_BT: Int[Array, "B T"], config: ModelConfig) -> ChunkPlan:
    """Returns the plan of chunks and states for rows; only `until_BT` decides it."""
    return local(functools.partial(_plan, config=config), [("batch",)], _PLAN)(until_BT)


_ROWS: Any = ("batch",)
_PLAN = ChunkPlan(_ROWS, _ROWS, _ROWS, _ROWS, _ROWS, _ROWS, _ROWS, _ROWS, _ROWS)


def _plan(until_BT, config: ModelConfig, last_B=None) -> ChunkPlan:
    """Builds the plan. The state after token `last_B` is stored too, as if a later chunk continued from it."""
    (B, T), C = until_BT.shape, chunk_of(config, until_BT.shape[1])
    N, most = -(-T // C), bound(config, T)
    until_BT = jnp.concatenate([until_BT, jnp.zeros_like(until_BT, shape=(B, N * C - T))], axis=1)
    previous_BT = previous_of(until_BT)
    back = [previous_BT]
    for _ in range(config.deltanet.conv - 2):
        back.append(jnp.where(back[-1] >= 0, jnp.take_along_axis(previous_BT, jnp.maximum(back[-1], 0), axis=1), -1))
    back_BTJ = jnp.stack(back, axis=-1)[:, :T]

    index_NC = jnp.arange(N * C).reshape(N, C)
    until_BNC, previous_BNC = until_BT.reshape(B, N, C), previous_BT.reshape(B, N, C)
    own_BNCC = (index_NC[:, None, :] <= index_NC[:, :, None]) & (until_BNC[:, :, None, :] > index_NC[:, :, None])
    own_BNCC |= jnp.eye(C, dtype=bool)
    outer_BNC = jnp.where(previous_BNC < index_NC[:, :1], previous_BNC, -1)  # of tokens with which a path enters
    enters_BNC = previous_BNC < index_NC[:, :1]
    exit_BT = jax.vmap(lambda at_T: jnp.zeros_like(at_T, shape=N * C + 1).at[at_T].max(1)[:-1])(
        jnp.where(enters_BNC & (outer_BNC >= 0), outer_BNC, N * C).reshape(B, N * C)
    )
    if last_B is not None:
        exit_BT = exit_BT | (jnp.arange(N * C) == last_B[:, None])
    number_BT = jnp.where(exit_BT > 0, jnp.cumsum(exit_BT, axis=1), most + 1)
    exit_BNC, number_BNC = exit_BT.reshape(B, N, C) > 0, number_BT.reshape(B, N, C)

    # The state with which each token's path enters: that after the token before the path's first token in the chunk.
    first_BNC = jnp.argmax(own_BNCC, axis=-1)
    of_entry_BNC = jax.vmap(lambda number_T, at_T: jnp.where(at_T >= 0, number_T[at_T], 0))(
        number_BT, outer_BNC.reshape(B, N * C)
    ).reshape(B, N, C)
    state_BNC = jnp.take_along_axis(of_entry_BNC, first_BNC, axis=-1)
    leader_BNC = jnp.argmax(state_BNC[..., None] == state_BNC[..., None, :], axis=-1)  # the first token with that state
    leads_BNC = leader_BNC == jnp.arange(C)
    enters_BNC = jnp.take_along_axis(jnp.cumsum(leads_BNC, axis=-1) - 1, leader_BNC, axis=-1)
    states_BNC = _ranked(leads_BNC, state_BNC, 0)
    return ChunkPlan(
        back=jnp.where(back_BTJ >= 0, back_BTJ, T),
        sees=own_BNCC,
        enters=enters_BNC,
        states=states_BNC,
        exits=_ranked(exit_BNC, jnp.arange(C) + jnp.zeros_like(state_BNC), C),
        kept=_ranked(exit_BNC, number_BNC, most + 1),
        reads=jnp.sum(leads_BNC, axis=-1),
        writes=jnp.sum(exit_BNC, axis=-1),
        fits=jnp.sum(exit_BT, axis=1) <= most,
    )


def _ranked(chosen_BNC, value_BNC, rest: int) -> Array:
    """Returns the values of the chosen tokens in each chunk, in order, padded with `rest`."""
    C = chosen_BNC.shape[-1]
    order_BNC = jnp.argsort(jnp.where(chosen_BNC, jnp.arange(C), C), axis=-1, stable=True)
    return jnp.take_along_axis(jnp.where(chosen_BNC, value_BNC, rest), order_BNC, axis=-1)


def apply(x_BTD: Float[Array, "B T D"], w: Mapping[str, Array], plan: ChunkPlan, settings, config: ModelConfig):
    """Returns the layer's output, and {} as sums. Each device computes only its rows and heads.

    A row with more states than `bound` is NaN. `settings` is not used.
    """
    x_BTD, plan = jax.lax.optimization_barrier((x_BTD, plan))  # as attention does
    w = gathered_weights({role: w[role] for role in WEIGHTS}, WEIGHTS, config)
    shape = (x_BTD.shape[0], *(sizes(config)[axis] for axis in "KGHV"))
    start = jnp.zeros(shape, jnp.float32, out_sharding=sharding("batch", "kv_heads", None, None, None))
    inputs, gate_BTKGV = _projected(x_BTD, w, config)

    def on_device(inputs, small, plan: ChunkPlan, start):
        q, k, v = (_convolved(x, small[name], plan.back) for name, x in zip(_CONVOLVED, inputs[:3], strict=True))
        return _rule(q, k, v, *_rates(inputs[3], inputs[4], small), plan, start, config)[0]

    small = {role: w[role] for role in _SMALL}
    y_BTKGV = local(on_device, [_INPUTS, _SMALL, _PLAN, _STATE], _HEADS)(inputs, small, plan, start)
    return _out(y_BTKGV, gate_BTKGV, w, x_BTD, config), {}


_CONVOLVED = ("delta_query_conv", "delta_key_conv", "delta_value_conv")
_SMALL = dict.fromkeys((*_CONVOLVED, "delta_log_decay", "delta_decay_bias"), ("kv_heads",))
_HEADS, _STATE = ("batch", None, "kv_heads"), ("batch", "kv_heads")
_INPUTS = (_HEADS,) * 5


def _projected(x_BTD, w: Mapping[str, Array], config: ModelConfig):
    """Returns (queries, keys, values, rates, decays) before convolution and activation, and the output gate."""
    roles = ("delta_query", "delta_key", "delta_value", "delta_rate", "delta_decay")
    return tuple(product(x_BTD, w[role], config) for role in roles), product(x_BTD, w["delta_gate"], config)


def _out(y_BTKGV, gate_BTKGV, w: Mapping[str, Array], x_BTD, config: ModelConfig):
    """Applies RMSNorm to the heads, multiplies by the activated gate, and projects to the width."""
    y = y_BTKGV * jax.lax.rsqrt(jnp.mean(y_BTKGV * y_BTKGV, axis=-1, keepdims=True) + config.norm_eps)
    y = y * w["delta_scale"] * jax.nn.silu(gate_BTKGV.astype(jnp.float32))
    return product(y.astype(x_BTD.dtype), w["delta_out"], config, 3, stream(x_BTD))


def _rates(rate_BTKG, decay_BTKG, small: Mapping[str, Array]):
    """Returns log decays and rates, in float32."""
    softplus = jax.nn.softplus(decay_BTKG.astype(jnp.float32) + small["delta_decay_bias"])
    return -jnp.exp(small["delta_log_decay"]) * softplus, jax.nn.sigmoid(rate_BTKG.astype(jnp.float32))


def _convolved(x_BTX, w_XW, back_BTJ):
    """Convolves over the last W tokens of each token's path, including itself, and applies SiLU."""
    W = w_XW.shape[-1]
    y_BTX = x_BTX * w_XW[..., W - 1]
    for j in range(W - 1):
        before_BTX = jax.vmap(lambda x_TX, at_T: x_TX.at[at_T].get(mode="fill", fill_value=0))(x_BTX, back_BTJ[..., j])
        y_BTX = y_BTX + before_BTX * w_XW[..., W - 2 - j]
    return jax.nn.silu(y_BTX)


# ------------------------------------------------------------------------------------------------------------- the rule


def _rule(q_BTKH, k_BTKH, v_BTKGV, g_BTKG, b_BTKG, plan: ChunkPlan, start_BKGHV, config: ModelConfig):
    """Returns outputs (B, T, K, G, V) in float32, and the stored states (B, S, K, G, H, V).

    Let G_i be the sum of g over i's path within its chunk, up to i, and G_ij the part after j. Tokens add (I + A)^-1 b
    (v - exp(G) k'S) to the state, where S is the state with which the path enters and A_ij = b_i exp(G_ij) k_i'k_j for
    j before i on its path. (G_ij is computed as a sum; the difference G_i - G_j would lose precision for fast decays.)
    """
    T, (B, N, C) = q_BTKH.shape[1], plan.enters.shape

    def cut(x_BTKGX) -> Float[Array, "N B K G C X"]:
        x = jnp.pad(x_BTKGX.astype(jnp.float32), [(0, 0), (0, N * C - T)] + [(0, 0)] * 3)
        return jnp.moveaxis(x.reshape(B, N, C, *x.shape[2:]), (1, 2), (0, 4))

    q, k = (cut(_unit(x)[:, :, :, None])[:, :, :, 0] for x in (q_BTKH, k_BTKH))  # (N, B, K, C, H)
    v, g, b = cut(v_BTKGV), cut(g_BTKG[..., None])[..., 0], cut(b_BTKG[..., None])
    sees = jnp.moveaxis(plan.sees, 1, 0)[:, :, None, None]
    of_path = jnp.where(sees, g[..., None, :], 0)
    total = jnp.sum(of_path, axis=-1)
    since = jax.lax.cumsum(of_path, of_path.ndim - 1, reverse=True)
    since = jnp.pad(since[..., 1:], [(0, 0)] * (since.ndim - 1) + [(0, 1)])
    decay = jnp.exp(jnp.where(sees, since, -jnp.inf))
    kk = jnp.einsum("NBKIH,NBKJH->NBKIJ", k, k)[:, :, :, None]
    lower = jnp.where(jnp.eye(C, dtype=bool), 0, kk * decay * b)
    solved = _inverse(lower) * jnp.moveaxis(b, -1, -2)
    empty = jnp.repeat(0 * start_BKGHV[:, None], bound(config, T), axis=1)
    log = jnp.concatenate([start_BKGHV[:, None], empty], axis=1)
    y, log = _chunks(q * config.deltanet.key_dim**-0.5, k, v, total, solved, decay, log, plan)
    y_BTKGV = jnp.moveaxis(y, (0, 4), (1, 2)).reshape(B, N * C, *y.shape[2:4], y.shape[-1])[:, :T]
    return jnp.where(plan.fits[:, None, None, None, None], y_BTKGV, jnp.nan), log


def _unit(x):
    """Returns x / |x| in float32."""
    x = x.astype(jnp.float32)
    return x * jax.lax.rsqrt(jnp.sum(x * x, axis=-1, keepdims=True) + 1e-6)


@jax.custom_vjp
def _inverse(lower):
    """Returns (I + A)^-1 for each A (..., C, C), which must be strictly lower triangular.

    If two neighbouring diagonal blocks have inverses X and Y, and A' is the part of A between them, their joint inverse
    is [[X, 0], [-Y A' X, Y]]. Blocks of size 1 are merged to 2, 4, ... until one block remains. (Two concurrent batched
    `solve_triangular` calls may deadlock on CPUs: each waits, on a thread of XLA's pool, for tasks in that pool.)
    """
    C = lower.shape[-1]
    whole = 1 << max(C - 1, 0).bit_length()
    lower = jnp.pad(lower, [(0, 0)] * (lower.ndim - 2) + [(0, whole - C)] * 2)
    of_blocks = jnp.ones((*lower.shape[:-2], whole, 1, 1), lower.dtype) + 0 * lower[..., :1, :1, None]
    while (size := of_blocks.shape[-1]) < whole:
        pairs = whole // size // 2
        first, second = of_blocks[..., 0::2, :, :], of_blocks[..., 1::2, :, :]
        grid = lower.reshape(*lower.shape[:-2], pairs, 2 * size, pairs, 2 * size)
        between = jnp.moveaxis(jnp.diagonal(grid, axis1=-4, axis2=-2), -1, -3)[..., size:, :size]
        corner = -_exactly(second, _exactly(between, first))
        top = jnp.concatenate([first, 0 * first], axis=-1)
        of_blocks = jnp.concatenate([top, jnp.concatenate([corner, second], axis=-1)], axis=-2)
    return of_blocks[..., 0, :C, :C]


def _exactly(a, b):
    """Returns a @ b in full float32 precision on all devices."""
    return jnp.matmul(a, b, precision="highest")


def _inverse_backward(inverse, gradient):
    turned = jnp.swapaxes(inverse, -1, -2)
    return (-jnp.tril(_exactly(turned, _exactly(gradient, turned)), -1),)


_inverse.defvjp(lambda lower: (_inverse(lower),) * 2, _inverse_backward)


@jax.custom_vjp
def _chunks(q, k, v, total, solved, decay, log, plan: ChunkPlan):
    """Returns outputs (N, B, K, G, C, V) and the updated state log (B, S, K, G, H, V).

    q, k: (N, B, K, C, H). v: (N, B, K, G, C, V). total: G_i, (N, B, K, G, C). solved: (I + A)^-1 b, and decay:
    exp(G_ij), 0 off the path, both (N, B, K, G, C, C). log: the initial state of rows, then zeros.
    """
    return _forward(q, k, v, total, solved, decay, log, plan)[0]


def _of_chunk(plan: ChunkPlan):
    """Returns the plan's tables with chunks as the first axis, to be scanned, and per chunk the most reads and writes
    of any row.
    """
    tables = plan.enters, plan.states, plan.exits, plan.kept
    return (*(jnp.moveaxis(x, 1, 0) for x in tables), jnp.max(plan.reads, axis=0), jnp.max(plan.writes, axis=0))


def _forward(q, k, v, total, solved, decay, log, plan: ChunkPlan):
    def chunk(log, inputs):
        q, k, v, total, solved, decay, (enters, states, exits, kept, reads, writes) = inputs
        of_k, of_q = _read_all(q, k, log, enters, states, reads, v)
        y, added = _local_part(q, k, v, total, solved, decay, of_k, of_q)

        def keep(x, log):
            at = exits[:, x]
            state = _after(k, total, decay, added, _state_of(log, enters, states, at), at)
            return jax.vmap(lambda log_S, number, state: log_S.at[number].set(state, mode="drop"))(
                log, kept[:, x], state
            )

        return _loop(writes, keep, log), y

    log, y = jax.lax.scan(chunk, log, (q, k, v, total, solved, decay, _of_chunk(plan)))
    return (y, log), (q, k, v, total, solved, decay, log, plan)


def _backward(saved, gradients):
    q, k, v, total, solved, decay, log, plan = saved
    dy, dlog = gradients

    def chunk(dlog, inputs):
        dy, q, k, v, total, solved, decay, (enters, states, exits, kept, reads, writes) = inputs
        of_k, of_q = _read_all(q, k, log, enters, states, reads, v)
        (_, added), back = jax.vjp(_local_part, q, k, v, total, solved, decay, of_k, of_q)

        def taken_by(dlog, x):
            return jax.vmap(lambda log_S, n: log_S.at[n].get(mode="fill", fill_value=0))(dlog, kept[:, x])

        def keep(x, carry):
            # The gradient that this turn takes was read in the one before: XLA copies all of a log that one turn reads
            # and then writes.
            dlog, taken, *sums = carry
            at = exits[:, x]
            state = _state_of(log, enters, states, at)
            _, after = jax.vjp(functools.partial(_after, at_B=at), k, total, decay, added, state)
            *more, dstate = after(taken)
            # Only later chunks read a token's state, and their gradients are all here: its own is complete.
            number = jnp.where(kept[:, x] < dlog.shape[1], _number_of(enters, states, at), dlog.shape[1])
            dlog = _add(dlog, number, dstate)
            return dlog, taken_by(dlog, x + 1), *jax.tree.map(jnp.add, sums, more)

        start = dlog, taken_by(dlog, 0), 0 * k, 0 * total, 0 * decay, 0 * added
        dlog, _, dk, dtotal, ddecay, dadded = _loop(writes, keep, start)
        more_q, more_k, dv, more_total, dsolved, more_decay, dof_k, dof_q = back((dy, dadded))

        def read(x, carry):
            dlog, dq, dk = carry
            number = states[:, x]
            state = _get(log, number)
            _, after = jax.vjp(functools.partial(_read, mine_BC=enters == x), q, k, state)
            more_q, more_k, dstate = after((dof_k, dof_q))
            return _add(dlog, number, dstate), dq + more_q, dk + more_k

        dlog, dq, dk = _loop(reads, read, (dlog, 0 * q, dk))
        return dlog, (dq + more_q, dk + more_k, dv, dtotal + more_total, dsolved, ddecay + more_decay)

    inputs = dy, q, k, v, total, solved, decay, _of_chunk(plan)
    dlog, of_chunks = jax.lax.scan(chunk, dlog, inputs, reverse=True)
    return *of_chunks, dlog, None


_chunks.defvjp(_forward, _backward)


def _loop(turns, body, carry):
    """Runs `body` for `turns` iterations, a traced number; 1 for a row with a single chain."""
    with jax.named_scope("expected_turns_1"):
        return jax.lax.fori_loop(0, turns, body, carry)


def _get(log, number_B):
    """Returns one state per row.

    The factor `number >= 0` is always 1, but XLA cannot know that. It prevents XLA on TPUs from rounding the whole log
    for each chunk.
    """
    return jax.vmap(lambda log_S, number: log_S[number] * (number >= 0))(log, number_B)


def _add(log, number_B, state):
    return jax.vmap(lambda log_S, number, state: log_S.at[number].add(state, mode="drop"))(log, number_B, state)


def _number_of(enters_BC, states_BC, at_B):
    """Returns the number of the state with which a token's path enters its chunk; 0 for the padding token C."""
    C = enters_BC.shape[1]
    own_B = jnp.take_along_axis(enters_BC, jnp.minimum(at_B, C - 1)[:, None], axis=1)
    return jnp.take_along_axis(states_BC, own_B, axis=1)[:, 0]


def _state_of(log, enters_BC, states_BC, at_B):
    return _get(log, _number_of(enters_BC, states_BC, at_B))


def _read(q_BKCH, k_BKCH, state_BKGHV, mine_BC):
    """Returns k'S and q'S (B, K, G, C, V) for tokens that enter with this state, else zeros."""
    kq = jnp.concatenate([k_BKCH, q_BKCH], axis=2)
    read = jnp.einsum("BKXH,BKGHV->BKGXV", kq, state_BKGHV) * jnp.tile(mine_BC, (1, 2))[:, None, None, :, None]
    C = k_BKCH.shape[2]
    return read[..., :C, :], read[..., C:, :]


def _read_all(q, k, log, enters, states, reads, v):
    """Returns k'S and q'S for all tokens, each with its path's entry state."""

    def add(x, carry):
        more = _read(q, k, _get(log, states[:, x]), enters == x)
        return carry[0] + more[0], carry[1] + more[1]

    return _loop(reads, add, (0 * v, 0 * v))


def _local_part(q, k, v, total, solved, decay, of_k, of_q):
    """Returns a chunk's outputs and its tokens' additions to the state, both (B, K, G, C, V)."""
    enter = jnp.exp(total)[..., None]
    added = solved @ (v - enter * of_k)
    seen = jnp.einsum("BKIH,BKJH->BKIJ", q, k)[:, :, None] * decay
    return enter * of_q + seen @ added, added


def _after(k_BKCH, total_BKGC, decay_BKGCC, added_BKGCV, state_BKGHV, at_B):
    """Returns the state after token `at` of the chunk; its path enters with `state`."""
    at_B = jnp.minimum(at_B, k_BKCH.shape[2] - 1)
    total_BKG1 = jnp.take_along_axis(total_BKGC, at_B[:, None, None, None], axis=3)
    left_BKGC = jnp.take_along_axis(decay_BKGCC, at_B[:, None, None, None, None], axis=3)[..., 0, :]
    new = jnp.einsum("BKCH,BKGCV->BKGHV", k_BKCH, left_BKGC[..., None] * added_BKGCV)
    return jnp.exp(total_BKG1)[..., None] * state_BKGHV + new


# ------------------------------------------------------------------------------------------------------------- decoding


def decode(x_BTD, w: Mapping[str, Array], state: tuple[Array, Array], length_B, config: ModelConfig):
    """Returns the addition to the stream, and the cached state after each row's first `length_B` new tokens.

    state: the recurrent state (B, K, G, H, V) and the last convolution inputs (B, K, W - 1, X), before these tokens. It
        is returned in the same form; a row of length 0 keeps it.
    """
    state_BKGHV, inputs_BKWX = state
    (q, k, v, rate, decay), gate_BTKGV = _projected(x_BTD, w, config)

    def on_device(inputs, small, state, before, length_B):
        (B, T), W = inputs[0].shape[:2], config.deltanet.conv
        until_BT = jnp.full((B, T), T) + 0 * length_B[:, None]
        plan = _plan(until_BT, config, length_B - 1)
        H, G, V = (sizes(config)[axis] for axis in "HGV")
        earlier = jnp.split(jnp.moveaxis(before, 1, 2), (H, 2 * H), axis=-1)  # (B, W - 1, K, ...)
        earlier[2] = earlier[2].reshape(*earlier[2].shape[:3], G, V)
        whole = [jnp.concatenate(parts, axis=1) for parts in zip(earlier, inputs[:3], strict=True)]
        back = jnp.arange(W - 1 + T)[:, None] - 1 - jnp.arange(W - 1) + jnp.zeros_like(length_B)[:, None, None]
        back = jnp.where(back >= 0, back, W - 1 + T)
        q, k, v = (_convolved(x, small[name], back)[:, W - 1 :] for name, x in zip(_CONVOLVED, whole, strict=True))
        y, log = _rule(q, k, v, *_rates(inputs[3], inputs[4], small), plan, state, config)
        number = _number_after(plan, jnp.maximum(length_B - 1, 0))
        state = jnp.where((length_B > 0)[:, None, None, None, None], _get(log, number), state)
        flat = jnp.concatenate([*whole[:2], whole[2].reshape(*whole[2].shape[:3], G * V)], axis=-1)
        after = jax.vmap(lambda x, n: jax.lax.dynamic_slice_in_dim(x, n, W - 1))(flat, length_B)
        return y, state, jnp.moveaxis(after, 1, 2)

    small = {role: w[role] for role in _SMALL}
    places = [_INPUTS, _SMALL, _STATE, _STATE, ("batch",)]
    y, state, after = local(on_device, places, (_HEADS, _STATE, _STATE))(
        (q, k, v, rate, decay), small, state_BKGHV, inputs_BKWX, length_B
    )
    return _out(y, gate_BTKGV, w, x_BTD, config), (state, after)


def _number_after(plan: ChunkPlan, at_B: Int[Array, " B"]) -> Int[Array, " B"]:
    """Returns the number of the state stored after a token in each row. (Padding may have later ones.)"""
    B, _, C = plan.exits.shape
    chunk = jnp.arange(B), at_B // C
    return jnp.sum(jnp.where(plan.exits[chunk] == at_B[:, None] % C, plan.kept[chunk], 0), axis=1)


def empty(config: ModelConfig, rows: int) -> tuple[tuple[tuple[int, ...], Any], ...]:
    """Returns (shape, dtype) of the recurrent state and of the last convolution inputs (`decode`) for `rows` rows."""
    K, G, H, V = (sizes(config)[axis] for axis in "KGHV")
    return ((rows, K, G, H, V), jnp.float32), ((rows, K, config.deltanet.conv - 1, 2 * H + G * V), config.dtype)


# ---------------------------------------------------------------------------------------------------------- the record


def sizes(config: ModelConfig) -> dict[str, int]:
    """Returns {letter: size}: D width, K key heads, G value heads per key head, H and V their sizes, W taps."""
    c = config.deltanet
    heads = c.value_heads // max(c.key_heads, 1)
    return {"D": config.width, "K": c.key_heads, "G": heads, "H": c.key_dim, "V": c.value_dim, "W": c.conv}


def flops(config: ModelConfig, tokens: int, layer: int) -> float:
    """Returns the rule's forward FLOPs on one chain: products within chunks and with states, and the triangular solve.

    All layers (`layer` is not used) take the same.
    """
    C, c = chunk_of(config, tokens), config.deltanet
    of_chunk = C * C * (c.key_heads * 4 * c.key_dim + c.value_heads * 4 * c.value_dim) + c.value_heads * C**3
    return tokens / C * (of_chunk + 6 * C * c.value_heads * c.key_dim * c.value_dim)


def refuses(config: ModelConfig, context: int) -> str | None:
    """Returns the reason if deltanet cannot run this model with tokens in `context` parts, else `None`."""
    c = config.deltanet
    if min(c.key_heads, c.value_heads, c.key_dim, c.value_dim) < 1 or c.value_heads % c.key_heads:
        return f"mixers have deltanet, and {c} has no heads, or value_heads that key_heads do not divide"
    if context > 1:
        remedy = "Set mesh.context=1, and mesh.tensor to split heads"
        path = f"whose state follows a path through the row: mesh.context={context} would split it"
        return f"mixers have deltanet, {path}. {remedy}"
    return None


DELTANET = Kind(WEIGHTS, sizes, apply, plan, refuses=refuses, flops=flops, cached=Recurrent(empty, decode))
