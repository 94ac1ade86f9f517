"""The kernels for Hopper, interpreted on a CPU; what they refuse; and when they are taken."""

import dataclasses
import functools
import json
import pathlib
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu
from refusing import refused
from test_attention import WINDOW
from test_kernel import by_rule, long_rows, made
from tiny import TINY

from jprm.methods.kernels import gpu as gpu_kernel
from jprm.methods.kernels import gpu_hopper
from jprm.methods.kernels.gpu import Launch, Launches, default_launches, find_blocks

REFERENCE = dataclasses.replace(TINY, attention="reference", kv_heads=2, heads=4)
SIZES = Launches(Launch(128, 64, 12, 2, "mosaic"), Launch(128, 64, 12, 2, "mosaic"), Launch(64, 128, 12, 2, "mosaic"))

interpreted = pytest.mark.skipif(not gpu_kernel.lowers_mosaic(), reason="needs the interpreter of jax 0.12")


@pytest.fixture
def interpreter(monkeypatch):
    """Runs a program's warpgroups as threads, and fails where no barrier orders two uses of the same memory."""
    mode = plgpu.InterpretGPUParams(detect_races=True, uninitialized_memory="nan")
    for name in ("forward", "dq", "dkv"):
        monkeypatch.setattr(gpu_hopper, name, functools.partial(getattr(gpu_hopper, name), interpret=mode))
    monkeypatch.setattr(gpu_kernel, "launches", lambda *_: SIZES)


def error(found, exact):
    found, exact = np.asarray(found, np.float64), np.asarray(exact, np.float64)
    return np.sqrt(np.mean((found - exact) ** 2) / np.mean(exact**2))


@interpreted
@pytest.mark.parametrize("H, fields", [(64, {}), (128, WINDOW | dict(windows=(40, 0)))], ids=["trees", "windows"])
def test_equals_the_reference_with_its_gradients(interpreter, H, fields):
    """Subtrees and a chain: whole and masked pairs, more of them than stages. The gradients take the log-sum-exp."""
    until_BT, position_BT = (x[[0, 2], :256].clip(max=256) for x in long_rows())
    arrays = [x.astype(jnp.bfloat16) for x in made(0, 2, 256, K=2, G=2, H=H)]
    exact = dataclasses.replace(REFERENCE, head_dim=H, **fields)
    own = dataclasses.replace(exact, attention="gpu_kernel", dtype="bfloat16")
    window = np.int32(40) if fields else None
    blocks = jax.jit(find_blocks, static_argnums=2)(until_BT, position_BT, SIZES)
    for table_BML in (blocks.forward, blocks.dq, blocks.dkv):
        whole_BM, needed_BM = table_BML[..., 0], table_BML[..., 1]
        assert whole_BM.max() >= 1 and needed_BM.max() > 2 and (needed_BM > whole_BM).any()
    found = by_rule(*arrays, until_BT, position_BT, own, window)
    expected = by_rule(*(x.astype(np.float32) for x in arrays), until_BT, position_BT, exact, window)
    assert [x.dtype for x in found] == [jnp.bfloat16] * 4
    # Weights, their gradients and results are each rounded to 8 bits, 2^-9 of their size; a sum of many such.
    assert all(error(a, b) < 2**-8 for a, b in zip(found, expected, strict=True))


@interpreted
def test_tokens_without_a_pair_are_zero(interpreter):
    q, k, v = (x.astype(jnp.bfloat16) for x in made(0, 1, 128, K=1, G=1, H=64))
    none, row = jnp.zeros((1, 1, 4), jnp.int32), jnp.full((1, 128), 128, jnp.int32)
    own = dataclasses.replace(REFERENCE, head_dim=64), False, 64, 2
    given = jnp.zeros(2, jnp.int32), none, row, row
    y, log = gpu_hopper.forward(*given, q, k, v, *own)
    gradients = [f(*given, q, q, k, v, log, log, *own) for f in (gpu_hopper.dq, gpu_hopper.dkv)]
    assert not any(np.any(np.asarray(x, np.float32)) for x in (y, *sum(gradients, []))) and np.all(np.isfinite(log))


@interpreted
def test_a_part_of_the_queries_is_that_part_of_the_whole(interpreter):
    """As on a mesh with `context`: the window and positions of the row's second half of queries."""
    until_BT, position_BT = (jnp.asarray(x[[0], :256].clip(max=256)) for x in long_rows())
    q, k, v = (x.astype(jnp.bfloat16) for x in made(0, 1, 256, K=1, G=1, H=64))
    config = dataclasses.replace(REFERENCE, head_dim=64)
    whole, split = (jax.jit(find_blocks, static_argnums=(2, 3))(until_BT, position_BT, SIZES, x) for x in (1, 2))

    def kernels(first, last, dkv_BNL):
        numbers, part = jnp.array([100, first]), slice(first // 128, last // 128)
        tables = [(numbers, table, until_BT, position_BT)
                  for table in (whole.forward[:, part], whole.dq[:, part], dkv_BNL)]  # fmt: skip
        q_part = q[:, first:last]
        y, log = gpu_hopper.forward(*tables[0], q_part, k, v, config, True, 64, 2)
        heads = q_part, y, k, v, log, log / 8, config, True, 64, 2
        return y, log, *gpu_hopper.dq(*tables[1], *heads), *gpu_hopper.dkv(*tables[2], *heads)

    y, log, dq, *dkv = kernels(0, 256, whole.dkv)
    halves = [kernels(first, first + 128, split.dkv[:, i : i + 2]) for first, i in ((0, 0), (128, 2))]
    part, part_log, part_dq = halves[1][:3]
    assert (part == y[:, 128:]).all() and (part_log == log[..., 128:]).all() and (part_dq == dq[:, 128:]).all()
    sums = [a.astype(jnp.float32) + b for a, b in zip(halves[0][3:], halves[1][3:], strict=True)]
    assert all(error(a, b) < 2**-8 for a, b in zip(sums, dkv, strict=True))


@interpreted
@pytest.mark.parametrize("name", ["dq", "dkv"])
@pytest.mark.parametrize("missing", ["commit_smem", "barrier_wait", "wait_smem_to_gmem"])
def test_the_interpreter_finds_what_is_missing(interpreter, monkeypatch, name, missing):
    """So that it passes the kernels says something."""
    row = jnp.full((1, 128), 128, jnp.int32)
    q, k, v = (x.astype(jnp.bfloat16) for x in made(0, 1, 128, K=1, G=1, H=64))
    log, table_BML = jnp.zeros((1, 1, 1, 128)), jnp.array([[[0, 2, 0, 1]]], jnp.int32)
    given = jnp.zeros(2, jnp.int32), table_BML, row, row, q, q, k, v, log, log, REFERENCE, False, 64, 2
    monkeypatch.setattr(plgpu, missing, lambda *_: None)
    with pytest.raises(jax.errors.JaxRuntimeError, match="RACE DETECTED|Computation failed|Not all copy"):
        jax.block_until_ready(getattr(gpu_hopper, name)(*given))


def test_refuses_what_it_does_not_take():
    for H, dtype, size in ((96, "bfloat16", 64), (64, "float32", 64), (64, "bfloat16", 32)):
        q, k, v = (jnp.zeros(x.shape, dtype) for x in made(0, 1, 128, K=1, G=1, H=H))
        row = jnp.full((1, 128), 128, jnp.int32)
        given, own = (jnp.zeros(2, jnp.int32), jnp.zeros((1, 1, 4), jnp.int32), row, row), (REFERENCE, False, size, 2)
        refused(ValueError, "triton", gpu_hopper.forward, *given, q, k, v, *own)
        for gradient in (gpu_hopper.dq, gpu_hopper.dkv):
            refused(ValueError, "triton", gradient, *given, q, q, k, v, row, row, *own)


def test_a_gpu_takes_them_where_the_table_says_so_and_jax_lowers_them(monkeypatch):
    gpu = type("GPU", (), dict(compute_capability="9.0", device_kind="NVIDIA H100 80GB HBM3"))
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(jax, "local_devices", lambda: [gpu])
    default = default_launches(64, 2)
    assert gpu_kernel.launches(64, 2) == default and default.forward.lowering == "triton"
    some = dataclasses.replace(SIZES, dq=Launch(64, 32, 4, 2))
    monkeypatch.setattr(gpu_kernel, "tuned", lambda: {gpu.device_kind: {"64x2": dataclasses.asdict(some)}})
    for version, launches in (((0, 12, 0, 1), some), ((0, 10, 2), dataclasses.replace(default, dq=some.dq))):
        monkeypatch.setattr(jax, "__version_info__", version)
        assert gpu_kernel.launches(64, 2) == launches


@interpreted
@pytest.mark.parametrize("name, fault", [("forward", "128 and 32"), ("dq", "128 and 32"), ("dkv", "32 and 64")])
def test_the_check_measures_each_launch(interpreter, monkeypatch, capsys, name, fault):
    """With and without a window; a launch that does not lower is not exact, and says why."""
    monkeypatch.syspath_prepend(pathlib.Path(__file__).parent.parent / "experiments/bench")
    import gpu_check

    first = gpu_check.MOSAIC[name][0]
    monkeypatch.setitem(gpu_check.MOSAIC, name, [first, dataclasses.replace(first, key=32)])
    gpu_check.mosaic_exactness(name, [dataclasses.replace(gpu_check.SMOLLM2, heads=1, kv_heads=1)], 256)
    found = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(x["window"], x["ok"]) for x in found] == [(None, True), (None, False), (64, True), (64, False)]
    assert gpu_check.exact_of_mosaic(found, 64) == [first] and f"not {fault}" in found[1]["error"]


def test_the_check_takes_exact_launches_and_outlives_a_process_that_hangs(monkeypatch):
    monkeypatch.syspath_prepend(pathlib.Path(__file__).parent.parent / "experiments/bench")
    import gpu_check

    first, second, third = gpu_check.MOSAIC["forward"]
    lines = [dict(head=64, window=w, ok=ok, launch=dataclasses.asdict(launch))
             for launch, ok in ((first, True), (second, False)) for w in (None, 256)]  # fmt: skip
    assert gpu_check.exact_of_mosaic(lines, 64) == [first] and gpu_check.exact_of_mosaic(lines, 128) == []
    code = f"print({json.dumps(json.dumps(lines[0]))}, flush=True); import time; time.sleep(60)"
    found = gpu_check.printed_within([sys.executable, "-I", "-c", code], 5.0)
    assert found[0] == lines[0] and not found[1]["ok"] and "5 s" in found[1]["error"]
    assert gpu_check.exact_of_mosaic(found, 64) == []
    result = dict(exactness=[], speed=[], mosaic=dict(forward=found, dq=[]))
    lines, passed = gpu_check.verdict(result)
    assert passed and "not taken" in lines[0]
