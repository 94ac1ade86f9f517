"""Block-quantised matrices, which are dequantised when their layer is computed.

There are two sources: a GGUF file's blocks, kept byte for byte, and NF4, made here from any weights (QLoRA, Dettmers et
    al. 2023, arXiv 2305.14314). A row of bytes belongs to one matrix output, and its blocks follow along the inputs, as
    in files: (out, in). So a matrix is transposed after dequantisation.

Letters: R rows, N blocks per row, X bytes per block.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int, UInt8

from jprm.model.layers import weight_of
from jprm.model.mesh import sharding
from jprm.model.parameters import Int8, quantized, summed_axes

# ------------------------------------------------------------------------------------------------------ dequantisation
#
# Each function maps the bytes of blocks (..., N, X) to float32 (..., N, numbers), with ggml's operations in the order
# of the package `gguf`.


def _half(byte_NX: Array, at: int) -> Array:
    """Returns the float16 at byte `at` of every block as float32, (..., N, 1)."""
    return jax.lax.bitcast_convert_type(byte_NX[..., at : at + 2], jnp.float16)[..., None].astype(jnp.float32)


def _bits(byte: Array, group: int, shifts: Sequence[int], mask: int) -> Array:
    """Unpacks small integers: from each `group` of bytes, first all at the first shift, then all at the next."""
    grouped = byte.reshape(*byte.shape[:-1], -1, 1, group)
    small = (grouped >> np.array(shifts, np.uint8)[:, None]) & np.uint8(mask)
    return small.reshape(*byte.shape[:-1], -1)


def _four(b: Array, group: int) -> Array:
    return _bits(b, group, (0, 4), 15)


def _signed(byte: Array) -> Array:
    return jax.lax.bitcast_convert_type(byte, jnp.int8).astype(jnp.float32)


def _scaled(scale: Array, q: Array) -> Array:
    """Multiplies q by its scales, one per run of equally many numbers."""
    return (scale[..., None] * q.reshape(*scale.shape, -1)).reshape(q.shape)


def _five(low: Array, high: Array) -> Array:
    """Returns five-bit integers: four bits from `low`, the fifth from `high`."""
    return (_four(low, 16) | (_bits(high, 1, range(8), 1) << np.uint8(4))).astype(jnp.float32)


def _q2_k(b: Array) -> Array:
    q = _bits(b[..., 16:80], 32, (0, 2, 4, 6), 3).astype(jnp.float32)
    scale, least = (b[..., :16] & np.uint8(15)).astype(jnp.float32), (b[..., :16] >> np.uint8(4)).astype(jnp.float32)
    return _scaled(_half(b, 80) * scale, q) - _scaled(_half(b, 82) * least, jnp.ones_like(q))


def _q3_k(b: Array) -> Array:
    low, high = _four(b[..., 96:104], 8), _bits(b[..., 104:108], 4, (0, 2, 4, 6), 3)
    scale = (low | (high << np.uint8(4))).astype(jnp.float32) - 32
    less = _bits(b[..., :32], 32, range(8), 1) ^ np.uint8(1)
    q = _bits(b[..., 32:96], 32, (0, 2, 4, 6), 3).astype(jnp.float32) - 4 * less.astype(jnp.float32)
    return _scaled(_half(b, 108) * scale, q)


def _of_k(b: Array, q: Array) -> Array:
    """Returns scale x q - minimum for the eight runs of a Q4_K or Q5_K block, with six-bit scales and minima."""
    d, m, both = b[..., 4:8], b[..., 8:12], b[..., 12:16]
    scale = jnp.concatenate([d & 63, (both & 15) | ((d >> 2) & 48)], axis=-1).astype(jnp.float32)
    least = jnp.concatenate([m & 63, (both >> 4) | ((m >> 2) & 48)], axis=-1).astype(jnp.float32)
    q = q.astype(jnp.float32)
    return _scaled(_half(b, 0) * scale, q) - _scaled(_half(b, 2) * least, jnp.ones_like(q))


def _q6_k(b: Array) -> Array:
    low, high = _four(b[..., :128], 64), _bits(b[..., 128:192], 32, (0, 2, 4, 6), 3)
    q = (low | (high << np.uint8(4))).astype(jnp.float32) - 32
    return _scaled(_half(b, 208) * _signed(b[..., 192:208]), q)


def _float(dtype) -> Callable[[Array], Array]:
    return lambda b: jax.lax.bitcast_convert_type(b, dtype)[..., None].astype(jnp.float32)


NF4 = np.array(
    [-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
     -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
     0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0], np.float32,
)  # fmt: skip
"""The sixteen values of NF4, as in bitsandbytes: quantiles of a normal distribution, scaled to [-1, 1]."""


def _nf4(b: Array) -> Array:
    scale = jax.lax.bitcast_convert_type(b[..., 32:36], jnp.float32)[..., None]
    code = jnp.stack([b[..., :32] >> np.uint8(4), b[..., :32] & np.uint8(15)], axis=-1)
    return scale * jnp.asarray(NF4)[code.reshape(*b.shape[:-1], 64)]


class Format(NamedTuple):
    numbers: int  # per block
    size: int  # bytes per block
    dequantised: Callable[[Array], Array]


FORMATS: Mapping[str, Format] = {
    "F32": Format(1, 4, _float(jnp.float32)),
    "F16": Format(1, 2, _float(jnp.float16)),
    "BF16": Format(1, 2, _float(jnp.bfloat16)),
    "Q4_0": Format(32, 18, lambda b: _half(b, 0) * (_four(b[..., 2:], 16).astype(jnp.float32) - 8)),
    "Q4_1": Format(32, 20, lambda b: _half(b, 0) * _four(b[..., 4:], 16).astype(jnp.float32) + _half(b, 2)),
    "Q5_0": Format(32, 22, lambda b: _half(b, 0) * (_five(b[..., 6:], b[..., 2:6]) - 16)),
    "Q5_1": Format(32, 24, lambda b: _half(b, 0) * _five(b[..., 8:], b[..., 4:8]) + _half(b, 2)),
    "Q8_0": Format(32, 34, lambda b: _half(b, 0) * _signed(b[..., 2:])),
    "Q2_K": Format(256, 84, _q2_k),
    "Q3_K": Format(256, 110, _q3_k),
    "Q4_K": Format(256, 144, lambda b: _of_k(b, _four(b[..., 16:], 32))),
    "Q5_K": Format(256, 176, lambda b: _of_k(b, _four(b[..., 48:], 32) | (_bits(b[..., 16:48], 32, range(8), 1) << 4))),
    "Q6_K": Format(256, 210, _q6_k),
    "nf4": Format(64, 36, _nf4),  # 64 numbers as bitsandbytes packs them, and their largest magnitude as a float32
}
"""Formats by name; GGUF's have their name in `gguf.GGMLQuantizationType`."""


# ---------------------------------------------------------------------------------------------------------- a parameter


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Blocks:
    """A block-quantised parameter, replicated on every device.

    data: bytes (..., R, N X). R is preceded by layers of a stack, and experts; for an embedding, R counts tokens.
    which: if a stack's layers have different formats, each layer's index into `formats`, (layers,). Rows are then
        padded to the largest format.
    shape: of one layer's matrix as the model uses it, (in..., out...); for an embedding, of one token's vector.
    """

    data: UInt8[Array, "*L R X"]
    which: Int[Array, "*L"] | None
    formats: tuple[str, ...] = dataclasses.field(metadata=dict(static=True))
    role: str = dataclasses.field(metadata=dict(static=True))
    shape: tuple[int, ...] = dataclasses.field(metadata=dict(static=True))

    def astype(self, dtype) -> Array:
        """Returns the numbers, (*L, in..., out...), sharded over the mesh like a parameter without blocks.

        An embedding's are (R, width), replicated.
        """
        inputs = 1 if self.role == "embed" else len(weight_of(self.role).inputs)
        width = math.prod(self.shape[:inputs])
        rows_of = [_rows(self.data, FORMATS[name], width) for name in self.formats]
        x = rows_of[0]
        if self.which is not None:
            at = jnp.expand_dims(self.which, range(self.which.ndim, x.ndim))
            for i, other in enumerate(rows_of[1:], 1):
                x = jnp.where(at == i, other, x)
        x = x.astype(dtype)
        if self.role == "embed":
            return x
        x = jnp.swapaxes(x, -1, -2).reshape(*x.shape[:-2], *self.shape)
        place = sharding(*weight_of(self.role).places[-x.ndim :])
        return x if place is None else jax.sharding.reshard(x, place)


def _rows(data: Array, form: Format, width: int) -> Float[Array, "*L R D"]:
    count = width // form.numbers
    block = data[..., : count * form.size].reshape(*data.shape[:-1], count, form.size)
    return form.dequantised(block).reshape(*data.shape[:-1], width)


def nf4(role: str, x: Float[Array, "*L S"]) -> Blocks | Int8:
    """Quantises parameter `role`, a matrix (in..., out...) or a stack, to NF4.

    Each number becomes the nearest of 16 values times its block's largest magnitude. If the inputs do not divide into
    blocks of 64, returns int8 with one scale per channel.
    """
    weight, form = weight_of(role), FORMATS["nf4"]
    shape = x.shape[x.ndim - len(weight.axes.removeprefix("E")) :]  # experts are as many matrices
    width = math.prod(shape[: len(weight.inputs)])
    if width % form.numbers:
        return quantized(x, summed_axes()[role])
    if sharding() is not None:
        x = jax.sharding.reshard(x, PartitionSpec(*(None,) * x.ndim))
    x = jnp.swapaxes(x.astype(jnp.float32).reshape(*x.shape[: x.ndim - len(shape)], width, -1), -1, -2)
    x_RNX = x.reshape(*x.shape[:-1], -1, form.numbers)
    scale_RN1 = jnp.max(jnp.abs(x_RNX), axis=-1, keepdims=True)
    x_RNX = x_RNX / jnp.where(scale_RN1 > 0, scale_RN1, 1)
    code_RNX = jnp.zeros(x_RNX.shape, jnp.uint8)
    for middle in (NF4[1:] + NF4[:-1]) / 2:
        code_RNX += (x_RNX > middle).astype(jnp.uint8)
    packed = (code_RNX[..., ::2] << np.uint8(4)) | code_RNX[..., 1::2]
    largest = jax.lax.bitcast_convert_type(scale_RN1[..., 0], jnp.uint8)
    data = jnp.concatenate([packed, largest], axis=-1)
    return Blocks(data.reshape(*x.shape[:-1], -1), None, ("nf4",), role, shape)


def of_file(role: str, rows: Sequence[np.ndarray], formats: Sequence[str], shape: tuple[int, ...]) -> Blocks:
    """Stacks a role's tensors of a file, each kept in its own blocks.

    `rows` has each layer's uint8 (out, bytes per row) and `formats` its name in `FORMATS`, e.g. `Q4_K`; an embedding
    has a single entry. `shape` is one layer's, as in `Blocks`.

    Raises ValueError for an unknown format.
    """
    names = tuple(sorted(set(formats)))
    if unknown := ", ".join(name for name in names if name not in FORMATS):
        raise ValueError(f"dtype='gguf': tensors of type {unknown} are not kept in blocks; use dtype='nf4' or 'int8'")
    data: Any = np.zeros((len(rows), len(rows[0]), max(row.shape[-1] for row in rows)), np.uint8)
    for i, row in enumerate(rows):
        data[i, :, : row.shape[-1]] = row
    which: Any = None if len(names) == 1 else np.array([names.index(name) for name in formats], np.int32)
    return Blocks(data[0] if role == "embed" else data, which, names, role, shape)
