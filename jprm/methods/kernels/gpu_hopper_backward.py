"""The backward kernels of interval attention for Hopper: dq, and dk with dv, as `jprm.methods.kernels.gpu_hopper`.

They stand in for `_dq_kernel` and `_dkv_kernel` of `jprm.methods.kernels.gpu`, each by itself: they walk the same
tables and read the same log-sum-exp, whichever forward kernel wrote it.

A program has 128 tokens of its own, queries of one head for dq and keys for dk and dv. Two warpgroups compute, each for
64 of them, and keep their sums in registers. A third one copies the blocks of the other kind, up to `stages` ahead.
`ready` completes when a block has arrived, `free` when both warpgroups have read it.

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

from jprm.methods.kernels import logits, weights
from jprm.methods.kernels.gpu_hopper import (
    COMPUTING,
    MAJOR,
    REGISTERS,
    ROWS,
    along,
    in_loop,
    in_shared_memory,
    matrices,
    refuse,
    seen,
)
from jprm.model.config import ModelConfig


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
