"""Kernels of interval attention for Hopper: TMA copies, wgmma products, warpgroups with roles of their own.

They walk the tables of `jprm.methods.kernels.gpu`, and each can stand in for its kernel there alone: the forward one
returns what any backward kernel takes. They are written in Pallas and lowered by Mosaic GPU, of jax 0.12 or later.

A program of the forward kernel has 128 queries of one head. Two warpgroups compute, each on 64 of them. A third one
copies: it walks the same line of the table, up to `stages` blocks of keys and values ahead, and waits where a block is
still read. Barriers carry this. `*_ready` completes when a block's bytes have arrived, `*_free` when both warpgroups
have read it.

No GPU has run them yet. jprm takes each only where `experiments/bench/gpu_check.py`, run on a Hopper GPU, found it
exact and fastest (docs/gpu.md).
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from jprm.methods.kernels import LOG2_E, logits, weights
from jprm.model.attention import HIDDEN, capped
from jprm.model.config import ModelConfig

ROWS = 64
"""Tokens of a warpgroup: the rows of a wgmma."""

COMPUTING = 2
"""Warpgroups that compute. One more copies."""

MAJOR = ROWS * COMPUTING
"""Tokens of a program, a major block: of queries, or of keys where it computes their gradients."""

REGISTERS = {"computing": 240, "copying": 24}
"""Registers of a thread by role. A program's 2 x 240 + 24 fit an SM's 512 for each of 128 threads."""


def refuse(H: int, dtype, tokens: int, blocks: int, minor: int, kinds: tuple[str, str] = ("queries", "keys")) -> None:
    """Raises ValueError for heads of size H and for blocks that the kernels do not take.

    tokens: of the kind that programs divide, in so many blocks. minor: tokens in a block of the kind that they walk.
    kinds: the names of both.
    """
    if H not in (64, 128) or dtype != jnp.bfloat16:
        fault = f"heads of 64 or 128 in bfloat16, not {H} in {jnp.dtype(dtype).name}"
    elif tokens != blocks * MAJOR or minor % ROWS:
        fault = f"{MAJOR} {kinds[0]} and a multiple of {ROWS} {kinds[1]} in a block, not {tokens // blocks} and {minor}"
    else:
        return
    raise ValueError(f"gpu_blocks.json: lowering 'mosaic' takes {fault}; set lowering to 'triton' for this case")


def matrices(*shape: int):
    """Returns shared memory for matrices in bfloat16 as wgmma reads them."""
    return plgpu.SMEM(shape, jnp.bfloat16, transforms=(plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128)))


def forward(
    numbers: Int[Array, 2], table_BML: Int[Array, "B M L"],
    until_BS: Int[Array, "B S"], position_BS: Int[Array, "B S"],
    q_BTKGH: Float[Array, "B T K G H"], k_BSKH: Float[Array, "B S K H"], v_BSKH: Float[Array, "B S K H"],
    config: ModelConfig, windowed: bool, key: int, stages: int, interpret: Any = None,
) -> tuple[Float[Array, "B T K G H"], Float[Array, "B K G T"]]:  # fmt: skip
    """Returns attention's output, and the logarithms to base 2 of the sums of its weights.

    numbers: the layer's window, the row's index of query 0. table: a line for each block of queries, made for blocks of
    MAJOR and of `key` tokens. windowed: whether the layer has a window. interpret: jax's `InterpretGPUParams`, for
    tests on a CPU. Raises ValueError for what it does not take.
    """
    B, T, K, G, H = q_BTKGH.shape
    M, dtype = table_BML.shape[1], q_BTKGH.dtype
    refuse(H, dtype, T, M, key)

    blocks_of_keys = dict(
        k=matrices(stages, key, H),
        v=matrices(stages, key, H),
        until=plgpu.SMEM((stages, key), jnp.int32),
        k_ready=plgpu.Barrier(num_arrivals=3 if windowed else 2, num_barriers=stages),  # k, until and position
        v_ready=plgpu.Barrier(num_barriers=stages),
        k_free=plgpu.Barrier(num_arrivals=COMPUTING, num_barriers=stages),
        v_free=plgpu.Barrier(num_arrivals=COMPUTING, num_barriers=stages),
    )
    of_queries = dict(
        q=matrices(COMPUTING, ROWS, H),  # and in the end the output
        log=plgpu.SMEM((COMPUTING, ROWS), jnp.float32),
        q_ready=plgpu.Barrier(num_arrivals=2 if windowed else 1, num_barriers=COMPUTING),
    )
    if windowed:
        blocks_of_keys["position"] = plgpu.SMEM((stages, key), jnp.int32)
        of_queries["own_position"] = plgpu.SMEM((COMPUTING, ROWS), jnp.int32)
    if interpret is not None:
        of_queries["weight"] = matrices(COMPUTING, ROWS, key)

    def program(numbers, table, until, position, q, k, v, y, log, shared):
        b, n, group = (jax.lax.axis_index(x) for x in ("rows", "heads", "group"))
        # The last queries of a row have most work: programs with much work start first.
        t = M - 1 - jax.lax.axis_index("blocks")
        whole, needed = table[b, t, 0], table[b, t, 1]

        def block(p):
            """Returns the stage and the first key of the p-th pair of the line."""
            return jax.lax.rem(p, jnp.int32(stages)), table[b, t, 2 + p] * key

        @pl.when(group == COMPUTING)
        def _copy():
            plgpu.set_max_registers(REGISTERS["copying"], action="decrease")
            head = jax.lax.div(n, jnp.int32(G))

            def copy(p, _):
                stage, first = block(p)
                keys = pl.ds(first, key)

                def take(source, name, ready):
                    plgpu.copy_gmem_to_smem(source, shared[name].at[stage], shared[ready].at[stage])

                def wait(free):
                    pl.when(p >= stages)(lambda: plgpu.barrier_wait(shared[free].at[stage]))

                wait("k_free")
                take(k.at[b, keys, head], "k", "k_ready")
                take(until.at[b, keys], "until", "k_ready")
                if windowed:
                    take(position.at[b, keys], "position", "k_ready")
                wait("v_free")
                take(v.at[b, keys, head], "v", "v_ready")

            jax.lax.fori_loop(0, needed, copy, None)

        @pl.when(group < COMPUTING)
        def _compute():
            plgpu.set_max_registers(REGISTERS["computing"], action="increase")
            start = t * MAJOR + group * ROWS
            q_TH, ready = shared["q"].at[group], shared["q_ready"].at[group]
            plgpu.copy_gmem_to_smem(q.at[b, pl.ds(start, ROWS), n], q_TH, ready)
            if windowed:
                own = position.at[b, pl.ds(numbers[1] + start, ROWS)]
                plgpu.copy_gmem_to_smem(own, shared["own_position"].at[group], ready)
            plgpu.barrier_wait(ready)

            def visit(masked: bool, p, state):
                top_T, total_T, acc_TH = state
                stage, first = block(p)
                plgpu.barrier_wait(shared["k_ready"].at[stage])
                logit_TS = product(q_TH, shared["k"].at[stage].transpose((1, 0)), (ROWS, key))
                logit_TS = capped(logit_TS * config.query_scale, config.attention_softcap) * LOG2_E
                if masked:
                    at = (shared["own_position"][group], shared["position"][stage]) if windowed else None
                    seen_TS = seen(numbers, start, first, shared["until"][stage], at, (ROWS, key))
                    logit_TS = jnp.where(seen_TS, logit_TS, HIDDEN)
                    plgpu.commit_smem()  # the next copy, which overwrites `until`, comes after these reads
                plgpu.barrier_arrive(shared["k_free"].at[stage])
                new_T = jnp.maximum(top_T, jnp.max(logit_TS, axis=1))
                weight_TS, fade_T = jnp.exp2(logit_TS - along(new_T, (ROWS, key), 0)), jnp.exp2(top_T - new_T)
                total_T = fade_T * total_T + jnp.sum(weight_TS, axis=1)
                weight_TS = weight_TS.astype(dtype)
                if interpret is not None:
                    weight_TS = in_shared_memory(weight_TS, shared["weight"].at[group])
                plgpu.barrier_wait(shared["v_ready"].at[stage])
                more_TH = product(weight_TS, shared["v"].at[stage], (ROWS, H))
                acc_TH = along(fade_T, (ROWS, H), 0) * acc_TH + more_TH
                plgpu.barrier_arrive(shared["v_free"].at[stage])
                return new_T, total_T, acc_TH

            start_T = jnp.zeros((ROWS,), jnp.float32)
            state = start_T + HIDDEN, start_T, jnp.zeros((ROWS, H), jnp.float32)
            state = jax.lax.fori_loop(0, whole, functools.partial(visit, False), state)
            top_T, total_T, acc_TH = jax.lax.fori_loop(whole, needed, functools.partial(visit, True), state)
            total_T = jnp.where(total_T > 0, total_T, 1.0)  # of a block of queries without a pair
            q_TH[...] = (acc_TH / along(total_T, (ROWS, H), 0)).astype(dtype)
            shared["log"][group] = top_T + jnp.log2(total_T)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(q_TH, y.at[b, pl.ds(start, ROWS), n])
            plgpu.copy_smem_to_gmem(shared["log"].at[group], log.at[b, n, pl.ds(start, ROWS)])
            plgpu.wait_smem_to_gmem(0)

    call = plgpu.kernel(
        lambda *refs, **shared: program(*refs, shared=shared),
        out_type=[jax.ShapeDtypeStruct((B, T, K * G, H), dtype), jax.ShapeDtypeStruct((B, K * G, T), jnp.float32)],
        scratch_types=blocks_of_keys | of_queries,
        grid=(B, M, K * G),
        grid_names=("rows", "blocks", "heads"),
        num_threads=COMPUTING + 1,
        thread_name="group",
        compiler_params=plgpu.CompilerParams(approx_math=True),
        kernel_name="forward_kernel",
        interpret=interpret,
    )
    y, log = call(numbers, table_BML, until_BS, position_BS, q_BTKGH.reshape(B, T, K * G, H), k_BSKH, v_BSKH)
    return y.reshape(q_BTKGH.shape), log.reshape(B, K, G, T)


def product(a, b, shape: tuple[int, int]):
    """Returns a b, summed in float32. b is in shared memory, a there or in registers."""

    def multiply(sums):
        plgpu.wgmma(sums, a, b)
        return sums[...]

    return pl.run_scoped(multiply, plgpu.WGMMAAccumulatorRef(shape, jnp.float32))


def in_shared_memory(x_MN, memory):
    """Returns the matrix in `memory`, for the interpreter: it has no product of a matrix in registers."""
    memory[...] = x_MN
    plgpu.commit_smem()
    return memory


def seen(numbers, query, key, until_S, at, shape: tuple[int, int]):
    """Whether queries from `query` on see keys from `key` on, of the shape (queries, keys).

    numbers: as `forward` takes them. until: of the keys. at: positions of the queries and of the keys, None without a
    window.
    """
    query_TS = numbers[1] + query + jax.lax.broadcasted_iota(jnp.int32, shape, 0)
    key_TS = along(in_loop(key + jax.lax.broadcasted_iota(jnp.int32, shape[1:], 0)), shape, 1)
    seen_TS = (key_TS <= query_TS) & (query_TS < along(until_S, shape, 1))
    if at is not None:
        seen_TS &= along(at[0], shape, 0) - along(at[1], shape, 1) < numbers[0]
    return seen_TS


def in_loop(x):
    """Returns x. What a loop does not change LLVM would compute before it, and keep in registers that are needed."""
    return jax.lax.optimization_barrier(x)


def along(x_N, shape: tuple[int, int], axis: int):
    """Returns the matrix of this shape whose elements along `axis` are x's."""
    return jax.lax.broadcast_in_dim(x_N, shape, [axis])


# ---- The backward kernels: dq, and dk with dv.
#
# A program has 128 tokens of its own, queries of one head for dq and keys for dk and dv. Two warpgroups compute, each
# for 64 of them, and keep their sums in registers. A third one copies the blocks of the other kind, up to `stages`
# ahead. `ready` completes when a block has arrived, `free` when both warpgroups have read it.


def dq(
    numbers: Int[Array, 2], table_BML: Int[Array, "B M L"],
    until_BS: Int[Array, "B S"], position_BS: Int[Array, "B S"],
    q_BTKGH: Float[Array, "B T K G H"], dy_BTKGH: Float[Array, "B T K G H"],
    k_BSKH: Float[Array, "B S K H"], v_BSKH: Float[Array, "B S K H"],
    log_BKGT: Float[Array, "B K G T"], inner_BKGT: Float[Array, "B K G T"],
    config: ModelConfig, windowed: bool, key: int, stages: int, interpret: Any = None,
) -> list[Float[Array, "B T K G H"]]:  # fmt: skip
    """Returns the gradient of the queries, a list of one.

    numbers, windowed, interpret: as the forward kernel takes them. table: a line for each block of queries, made for
    blocks of MAJOR queries and of `key` keys. log: the logarithms that the forward kernel returned. inner: the sums of
    dy y over a head. Raises ValueError for what it does not take.
    """
    B, T, K, G, H = q_BTKGH.shape
    M, dtype, shape = table_BML.shape[1], q_BTKGH.dtype, (ROWS, key)
    refuse(H, dtype, T, M, key)
    own = dict(q=matrices(COMPUTING, ROWS, H), dy=matrices(COMPUTING, ROWS, H))
    own |= dict(log=_vectors(COMPUTING, ROWS), inner=_vectors(COMPUTING, ROWS))
    passing = dict(k=matrices(stages, key, H), v=matrices(stages, key, H), until=_vectors(stages, key, jnp.int32))
    if windowed:
        own["at_query"], passing["at_key"] = _vectors(COMPUTING, ROWS, jnp.int32), _vectors(stages, key, jnp.int32)

    def program(numbers, table, until, position, q, dy, k, v, log, inner, dq, shared):
        b, n, group = (jax.lax.axis_index(x) for x in ("rows", "heads", "group"))
        # The last queries of a row have most work: programs with much work start first.
        t = M - 1 - jax.lax.axis_index("blocks")
        whole, needed = table[b, t, 0], table[b, t, 1]
        head, start = jax.lax.div(n, jnp.int32(G)), t * MAJOR + group * ROWS

        @pl.when(group == COMPUTING)
        def _copy():
            def sources(p):
                keys = pl.ds(table[b, t, 2 + p] * key, key)
                found = dict(k=k.at[b, keys, head], v=v.at[b, keys, head], until=until.at[b, keys])
                return found | (dict(at_key=position.at[b, keys]) if windowed else {})

            _copy_passing(shared, stages, needed, sources)

        @pl.when(group < COMPUTING)
        def _compute():
            queries = pl.ds(start, ROWS)
            sources = dict(q=q.at[b, queries, n], dy=dy.at[b, queries, n])
            sources |= dict(log=log.at[b, n, queries], inner=inner.at[b, n, queries])
            if windowed:
                sources["at_query"] = position.at[b, pl.ds(numbers[1] + start, ROWS)]
            mine = _copy_own(shared, group, sources)
            log_TS, inner_TS = (along(mine[x][...], shape, 0) for x in ("log", "inner"))

            def visit(masked: bool, sums, p, _):
                stage = jax.lax.rem(p, jnp.int32(stages))
                plgpu.barrier_wait(shared["ready"].at[stage])
                k_SH, v_SH = (shared[x].at[stage] for x in ("k", "v"))
                q_TH, dy_TH = (shared[x].at[in_loop(group)] for x in ("q", "dy"))
                logit_TS, dweight_TS = _products((q_TH, k_SH), (dy_TH, v_SH), shape)
                seen_TS = None
                if masked:
                    at = (mine["at_query"][...], shared["at_key"][stage]) if windowed else None
                    first = table[b, t, 2 + p] * key
                    seen_TS = seen(numbers, start, first, shared["until"][stage], at, shape)
                    plgpu.commit_smem()  # the next copy, which overwrites `until`, comes after these reads
                _, dlogit_TS = weights(*logits(logit_TS, config), dweight_TS, seen_TS, log_TS, inner_TS)
                a_TS = dlogit_TS.astype(dtype)
                if interpret is not None:
                    a_TS = in_shared_memory(a_TS, shared["dlogit"].at[group])
                plgpu.wgmma(sums, a_TS, k_SH)
                plgpu.wgmma_wait(0)
                plgpu.barrier_arrive(shared["free"].at[stage])

            def visit_all(sums):
                jax.lax.fori_loop(0, whole, functools.partial(visit, False, sums), None)
                jax.lax.fori_loop(whole, needed, functools.partial(visit, True, sums), None)
                return sums[...]

            dq_TH = pl.run_scoped(visit_all, plgpu.WGMMAAccumulatorRef((ROWS, H), jnp.float32))
            _write({"q": (dq_TH * config.query_scale, dq.at[b, queries, n])}, mine)

    results = [jax.ShapeDtypeStruct((B, T, K * G, H), dtype)]
    more = {} if interpret is None else dict(dlogit=matrices(COMPUTING, *shape))
    call = _kernel("dq_kernel", (B, M, K * G), program, results, own, passing, more, stages, interpret)
    q, dy = (x.reshape(B, T, K * G, H) for x in (q_BTKGH, dy_BTKGH))
    log, inner = (x.reshape(B, K * G, T) for x in (log_BKGT, inner_BKGT))
    (dq,) = call(numbers, table_BML, until_BS, position_BS, q, dy, k_BSKH, v_BSKH, log, inner)
    return [dq.reshape(q_BTKGH.shape)]


def dkv(
    numbers: Int[Array, 2], table_BNL: Int[Array, "B N L"],
    until_BS: Int[Array, "B S"], position_BS: Int[Array, "B S"],
    q_BTKGH: Float[Array, "B T K G H"], dy_BTKGH: Float[Array, "B T K G H"],
    k_BSKH: Float[Array, "B S K H"], v_BSKH: Float[Array, "B S K H"],
    log_BKGT: Float[Array, "B K G T"], inner_BKGT: Float[Array, "B K G T"],
    config: ModelConfig, windowed: bool, query: int, stages: int, interpret: Any = None,
) -> list[Float[Array, "B S K H"]]:  # fmt: skip
    """Returns the gradients of the keys and of the values.

    table: a line for each block of keys, made for blocks of `query` queries and of MAJOR keys. The others as `dq` takes
    them. Raises ValueError for what it does not take.
    """
    (B, T, K, G, H), S = q_BTKGH.shape, k_BSKH.shape[1]
    N, dtype, shape = table_BNL.shape[1], q_BTKGH.dtype, (query, ROWS)
    refuse(H, dtype, S, N, query, ("keys", "queries"))
    own = dict(k=matrices(COMPUTING, ROWS, H), v=matrices(COMPUTING, ROWS, H))
    own["until"] = _vectors(COMPUTING, ROWS, jnp.int32)
    passing = dict(q=matrices(stages, query, H), dy=matrices(stages, query, H))
    passing |= dict(log=_vectors(stages, query), inner=_vectors(stages, query))
    if windowed:
        own["at_key"], passing["at_query"] = _vectors(COMPUTING, ROWS, jnp.int32), _vectors(stages, query, jnp.int32)

    def program(numbers, table, until, position, q, dy, k, v, log, inner, dk, dv, shared):
        # The first keys of a row have most work, so their programs start first.
        b, s, head, group = (jax.lax.axis_index(x) for x in ("rows", "blocks", "heads", "group"))
        whole, needed, start = table[b, s, 0], table[b, s, 1], s * MAJOR + group * ROWS

        def first_query(p):
            """Returns the first query of the p-th block: all heads take a pair of the line before the next one."""
            return table[b, s, 2 + jax.lax.div(p, jnp.int32(G))] * query

        @pl.when(group == COMPUTING)
        def _copy():
            def sources(p):
                n, queries = head * G + jax.lax.rem(p, jnp.int32(G)), pl.ds(first_query(p), query)
                found = dict(q=q.at[b, queries, n], dy=dy.at[b, queries, n])
                found |= dict(log=log.at[b, n, queries], inner=inner.at[b, n, queries])
                if windowed:
                    found["at_query"] = position.at[b, pl.ds(numbers[1] + first_query(p), query)]
                return found

            _copy_passing(shared, stages, G * needed, sources)

        @pl.when(group < COMPUTING)
        def _compute():
            keys = pl.ds(start, ROWS)
            sources = dict(k=k.at[b, keys, head], v=v.at[b, keys, head], until=until.at[b, keys])
            mine = _copy_own(shared, group, sources | (dict(at_key=position.at[b, keys]) if windowed else {}))

            def visit(masked: bool, dk_sums, dv_sums, p, _):
                stage, own = jax.lax.rem(p, jnp.int32(stages)), in_loop(group)
                plgpu.barrier_wait(shared["ready"].at[stage])
                q_TH, dy_TH = (shared[x].at[stage] for x in ("q", "dy"))
                k_SH, v_SH, a_TS, b_TS = (shared[x].at[own] for x in ("k", "v", "weight", "dlogit"))
                logit_TS, dweight_TS = _products((q_TH, k_SH), (dy_TH, v_SH), shape)
                log_TS, inner_TS = (along(shared[x][stage], shape, 0) for x in ("log", "inner"))
                seen_TS = None
                if masked:
                    at = (shared["at_query"][stage], mine["at_key"][...]) if windowed else None
                    seen_TS = seen(numbers, first_query(p), start, mine["until"][...], at, shape)
                weight_TS, dlogit_TS = weights(*logits(logit_TS, config), dweight_TS, seen_TS, log_TS, inner_TS)
                # A store waits for the warpgroup's other warps, so for what they still multiply of the last pair.
                a_TS[...], b_TS[...] = weight_TS.astype(dtype), dlogit_TS.astype(dtype)
                plgpu.commit_smem()  # the products, and the next copy, which overwrites `log`, come after all this
                plgpu.wgmma(dv_sums, a_TS.transpose((1, 0)), dy_TH)
                plgpu.wgmma(dk_sums, b_TS.transpose((1, 0)), q_TH)
                plgpu.wgmma_wait(0)
                plgpu.barrier_arrive(shared["free"].at[stage])

            def visit_all(*sums):
                jax.lax.fori_loop(0, G * whole, functools.partial(visit, False, *sums), None)
                jax.lax.fori_loop(G * whole, G * needed, functools.partial(visit, True, *sums), None)
                return tuple(x[...] for x in sums)

            dk_SH, dv_SH = pl.run_scoped(visit_all, *[plgpu.WGMMAAccumulatorRef((ROWS, H), jnp.float32)] * 2)
            _write(dict(k=(dk_SH * config.query_scale, dk.at[b, keys, head]), v=(dv_SH, dv.at[b, keys, head])), mine)

    results = [jax.ShapeDtypeStruct(k_BSKH.shape, dtype)] * 2
    more = dict(weight=matrices(COMPUTING, *shape), dlogit=matrices(COMPUTING, *shape))
    call = _kernel("dkv_kernel", (B, N, K), program, results, own, passing, more, stages, interpret)
    q, dy = (x.reshape(B, T, K * G, H) for x in (q_BTKGH, dy_BTKGH))
    log, inner = (x.reshape(B, K * G, T) for x in (log_BKGT, inner_BKGT))
    return call(numbers, table_BNL, until_BS, position_BS, q, dy, k_BSKH, v_BSKH, log, inner)


def _vectors(count: int, size: int, dtype=jnp.float32):
    return plgpu.SMEM((count, size), dtype)


def _kernel(
    name: str, grid: tuple[int, ...], program, results: list, own: dict, passing: dict, more: dict, stages: int,
    interpret: Any,
):  # fmt: skip
    """Returns the kernel of a program, which takes the kernel's arguments, its results, and what is shared by name.

    own, passing: shared memory that is copied to, of each warpgroup and of each stage. more: what is not copied to.
    """
    barriers = dict(
        own_ready=plgpu.Barrier(num_arrivals=len(own), num_barriers=COMPUTING),
        ready=plgpu.Barrier(num_arrivals=len(passing), num_barriers=stages),
        free=plgpu.Barrier(num_arrivals=COMPUTING, num_barriers=stages),
    )
    return plgpu.kernel(
        lambda *refs, **shared: program(*refs, shared=shared),
        out_type=results,
        scratch_types=own | passing | more | barriers,
        grid=grid,
        grid_names=("rows", "blocks", "heads"),
        num_threads=COMPUTING + 1,
        thread_name="group",
        compiler_params=plgpu.CompilerParams(approx_math=True),
        kernel_name=name,
        interpret=interpret,
    )


def _copy_passing(shared: dict, stages: int, count, sources) -> None:
    """Copies `count` blocks, each into a stage once both warpgroups have read what it had.

    sources: from a block's number to what is copied, by name.
    """
    plgpu.set_max_registers(REGISTERS["copying"], action="decrease")

    def copy(p, _):
        stage = jax.lax.rem(p, jnp.int32(stages))
        pl.when(p >= stages)(lambda: plgpu.barrier_wait(shared["free"].at[stage]))
        for name, source in sources(p).items():
            plgpu.copy_gmem_to_smem(source, shared[name].at[stage], shared["ready"].at[stage])

    jax.lax.fori_loop(0, count, copy, None)


def _copy_own(shared: dict, group, sources: dict) -> dict:
    """Copies a warpgroup's own arrays and returns them, by name, when they have arrived."""
    plgpu.set_max_registers(REGISTERS["computing"], action="increase")
    for name, source in sources.items():
        plgpu.copy_gmem_to_smem(source, shared[name].at[group], shared["own_ready"].at[group])
    plgpu.barrier_wait(shared["own_ready"].at[group])
    return {name: shared[name].at[group] for name in sources}


def _products(first, second, shape: tuple[int, int]):
    """Returns a b' for two pairs (a, b) in shared memory, summed in float32. Both are under way at once."""

    def multiply(*sums):
        for c, (a, b) in zip(sums, (first, second), strict=True):
            plgpu.wgmma(c, a, b.transpose((1, 0)))
        return tuple(c[...] for c in sums)

    return pl.run_scoped(multiply, *[plgpu.WGMMAAccumulatorRef(shape, jnp.float32)] * 2)


def _write(results: dict, mine: dict) -> None:
    """Writes each (matrix, place) through the memory of this name, which has been read."""
    for name, (x_NH, _) in results.items():
        mine[name][...] = x_NH.astype(jnp.bfloat16)
    plgpu.commit_smem()
    for name, (_, place) in results.items():
        plgpu.copy_smem_to_gmem(mine[name], place)
    plgpu.wait_smem_to_gmem(0)
