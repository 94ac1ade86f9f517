"""The forward kernel for Hopper, interpreted on a CPU: numbers, pipeline and gradients; and what it refuses."""

import dataclasses
import functools

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
from jprm.methods.kernels.gpu import Launch, Launches, find_blocks

REFERENCE = dataclasses.replace(TINY, attention="reference")
SIZES = Launches(Launch(128, 64, 12, 2, "mosaic"), Launch(64, 32, 4, 2), Launch(32, 64, 4, 2))

# Weights and results are rounded to 8 bits, 2^-9 of their size; a sum of many such.
BFLOAT16 = 2**-8

interpreted = pytest.mark.skipif(not hasattr(plgpu, "InterpretGPUParams"), reason="needs jax 0.12's interpreter")


@pytest.fixture
def interpreter(monkeypatch):
    """Runs the kernel's warpgroups as threads. Two that touch the same memory unordered by a barrier fail the test."""
    mode = plgpu.InterpretGPUParams(detect_races=True, uninitialized_memory="nan")
    monkeypatch.setattr(gpu_hopper, "forward", functools.partial(gpu_hopper.forward, interpret=mode))


def error(found, exact):
    found, exact = np.asarray(found, np.float64), np.asarray(exact, np.float64)
    return np.sqrt(np.mean((found - exact) ** 2) / np.mean(exact**2))


@interpreted
@pytest.mark.parametrize("H, fields", [(64, {}), (128, WINDOW)], ids=["trees", "windows-and-caps"])
def test_equals_the_reference_and_feeds_the_backward_kernels(interpreter, H, fields):
    """Chains, subtrees and padding in rows of 384 tokens: whole and masked pairs, and more of them than stages."""
    config = dataclasses.replace(REFERENCE, head_dim=H, kv_heads=1, heads=2, dtype="bfloat16", **fields)
    window = np.int32(40) if fields else None
    if fields:
        config = dataclasses.replace(config, windows=(40, 0))
    until_BT, position_BT = (x[[0, 2], :384].clip(max=384) for x in long_rows())
    arrays = [x.astype(jnp.bfloat16) for x in made(0, 2, 384, K=1, G=2, H=H)]
    tables = jax.jit(functools.partial(find_blocks, sizes=SIZES, windows=gpu_kernel.bounded(config)))
    blocks = dataclasses.replace(tables(until_BT, position_BT), window=window)
    y, saved = gpu_kernel._forward(*arrays, blocks, config)
    dy = jnp.cos(jnp.arange(y.size)).reshape(y.shape).astype(y.dtype)  # the gradient that `by_rule` takes
    found = y, *gpu_kernel._backward(config, saved, dy)[:3]
    exact = by_rule(*(x.astype(np.float32) for x in arrays), until_BT, position_BT,
                    dataclasses.replace(config, dtype="float32"), window)  # fmt: skip
    assert blocks.forward[..., 0].max() > 2 and (blocks.forward[..., 1] > blocks.forward[..., 0]).all()
    assert [x.dtype for x in found] == [jnp.bfloat16] * 4
    assert all(error(a, b) < BFLOAT16 for a, b in zip(found, exact, strict=True))
