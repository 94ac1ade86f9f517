"""Counts a compiled program's FLOPs, HBM bytes and collectives, including the trips of its loops.

XLA's own `cost_analysis` counts the body of a loop once, and a model's layers are the body of a loop.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Collection, Mapping

import numpy as np

from jprm.apps.plan.collectives import Collective, collectives
from jprm.apps.plan.hlo import Array, Computation, Instruction, Module


@dataclasses.dataclass(frozen=True)
class Program:
    """Counts of one device and one run. `uncounted` names kernels of unknown cost."""

    flops: float
    bytes: float
    collectives: tuple[Collective, ...]
    uncounted: tuple[str, ...] = ()

    def received(self, *, network: bool) -> float:
        """Returns bytes received between slices over the data centre's network, or between the chips of a slice."""
        return sum(c.received * c.times for c in self.collectives if c.network == network)


def count(
    module: Module, parameters: Collection[int] = (), kernels: Mapping[str, float] | None = None, node: int = 0
) -> Program:
    """Counts what the module's entry computes, moves and sends.

    parameters: sizes of a layer's parameters, as gathered on a device; see `Collective.moves`.
    kernels: FLOPs per call of Pallas kernels, by name. Others count by their `cost_estimate`.
    node: devices of a node where several nodes of GPUs are joined by a network; 0 elsewhere.
    """
    flops, moved, uncounted = 0.0, 0.0, set()
    for computation, times, _ in module.executed():
        for instruction in computation.instructions.values():
            moved += times * hbm_bytes(module, computation, instruction)
            for where, inner in [(computation, instruction), *module.fused(instruction)]:
                if inner.opcode in ("dot", "convolution"):
                    flops += times * product_flops(where, inner)
                elif inner.opcode == "custom-call" and "__cublas$" in inner.text:
                    flops += times * library_product_flops(where, inner)
                elif inner.opcode == "custom-call" and KERNELS.search(inner.text):
                    own = kernel_flops(inner, kernels or {})
                    flops += times * own
                    uncounted |= set() if own else {inner.op_name or inner.name}
    return Program(flops, moved, tuple(collectives(module, parameters, node)), tuple(sorted(uncounted)))


def product_flops(where: Computation, product: Instruction) -> float:
    """Returns 2 FLOPs per multiply-add of a dot or convolution, without padding and dilation."""
    left, right = (where.instructions[name].arrays[0].shape for name in product.operands[:2])
    result = product.arrays[0].shape
    if product.opcode == "dot":
        contracted = re.findall(r"\d+", product.attribute("lhs_contracting_dims"))
        return 2.0 * math.prod(result) * math.prod(left[int(axis)] for axis in contracted)
    lhs, rest = product.attribute("dim_labels").split("_")
    rhs, out = rest.split("->")
    window = dict(re.findall(r"(\w+)=([\dx_-]+)", product.attribute("window").strip("{}")))
    pairs = 1.0
    for axis in range(len(rhs) - 2):
        label = str(axis)

        def option(name: str, default: str, axis: int = axis) -> str:
            return window[name].split("x")[axis] if name in window else default

        low = int(option("pad", "0_0").split("_")[0])
        pairs *= _pairs_along(
            left[lhs.index(label)], right[rhs.index(label)], result[out.index(label)], int(option("stride", "1")), low,
            int(option("lhs_dilate", "1")), int(option("rhs_dilate", "1")),
        )  # fmt: skip
    features = right[rhs.index("i")] * right[rhs.index("o")]
    return 2.0 * result[out.index("b")] * features * pairs / int(product.attribute("batch_group_count") or 1)


def library_product_flops(where: Computation, call: Instruction) -> float:
    """Returns 2 FLOPs per multiply-add of a product that cuBLAS makes."""
    contracted = re.search(r'"lhs_contracting_dimensions":\[([^\]]*)\]', call.text)
    left = where.instructions[call.operands[0]].arrays[0].shape
    axes = re.findall(r"\d+", contracted[1]) if contracted else []
    return 2.0 * call.arrays[0].size * math.prod(left[int(axis)] for axis in axes)


def _pairs_along(size: int, window: int, outputs: int, stride: int, low: int, lhs_dilate: int, rhs_dilate: int) -> int:
    """Counts, along one axis of a convolution, the pairs of an output and a window position that meet an input element.

    The others fall on padding, or on the zeros that dilation puts between elements, and are not multiplied.
    """
    position = np.arange(outputs)[:, None] * stride + np.arange(window) * rhs_dilate - low
    return int(np.sum((position >= 0) & (position <= (size - 1) * lhs_dilate) & (position % lhs_dilate == 0)))


KERNELS = re.compile(r"tpu_custom_call|gpu\.triton")
"""Matches the text of a call of a Pallas kernel, on TPUs and on GPUs."""


def kernel_flops(call: Instruction, kernels: Mapping[str, float]) -> float:
    """Returns a kernel's FLOPs by its name, or by the `cost_estimate` of its `pallas_call`; 0 without either."""
    for name, flops in kernels.items():
        if name in call.name or name in call.op_name.rpartition("/")[2] or f'"{name}"' in call.text:
            return flops
    found = re.search(r'"cost_estimate":\{[^}]*"flops":"?(\d+)', call.text)
    return float(found.group(1)) if found else 0.0


FREE = {
    "parameter", "constant", "tuple", "get-tuple-element", "bitcast", "while", "call", "conditional", "after-all",
    "partition-id", "replica-id", "optimization-barrier", "async-start", "async-update", "async-done", "call-start",
}  # fmt: skip
"""Instructions that move nothing."""

SLICES = ("dynamic-slice", "slice", "gather")


def hbm_bytes(module: Module, where: Computation, instruction: Instruction) -> float:
    """Returns the HBM bytes that an instruction reads and writes: each operand once, and only the slice of a slice.

    This is a lower bound: a product that does not fit the chip's own memory reads its operands again.
    """
    opcode = instruction.opcode
    if opcode in FREE or opcode.endswith("-done") or "AllocateBuffer" in instruction.text:
        return 0.0
    given = [where.instructions[name].arrays for name in instruction.operands]
    if opcode == "fusion":
        return _fusion_bytes(module, module.computations[instruction.called["calls"][0]], given, instruction.arrays)
    if opcode in SLICES:
        return _hbm(given[0]) and 2 * sum(array.bytes for array in instruction.arrays)
    if opcode == "dynamic-update-slice":
        return 2 * _hbm(given[1])
    results = instruction.arrays
    if opcode == "send":  # the result includes the operand
        return _hbm(given[0])
    if opcode == "slice-start":  # the result is an array, its slice and a counter
        return (results[-2].bytes if _hbm(given[0]) else 0.0) + results[-2].hbm_bytes
    if opcode.endswith("-start"):  # the result includes operands and counters
        results = results[1:2] if opcode.startswith("collective") else results[:1]
    return sum(map(_hbm, given)) + _hbm(results)


def _hbm(arrays: tuple[Array, ...]) -> float:
    return sum(array.hbm_bytes for array in arrays)


def _fusion_bytes(
    module: Module, inner: Computation, given: list[tuple[Array, ...]], results: tuple[Array, ...]
) -> float:
    total, carries = 0.0, inner.name.startswith("async_collective_fusion") or "AsyncCollective" in inner.root.text

    def passed(user: Instruction) -> bool:
        """Whether the user reads nothing itself: the result's tuple, or a collective that is under way meanwhile."""
        return (user is inner.root and user.opcode == "tuple") or (carries and _under_way(user))

    for parameter, arrays in zip(inner.parameters, given, strict=True):
        if not all(map(passed, inner.users[parameter.name])):
            total += min(_read(module, inner, parameter), _hbm(arrays))
    outputs = (
        [inner.instructions[name] for name in inner.root.operands] if inner.root.opcode == "tuple" else [inner.root]
    )
    for output, array in zip(outputs, results, strict=False):
        where, output = _origin(module, inner, output)
        if output.opcode == "dynamic-update-slice":
            update = where.instructions[output.operands[1]].arrays[0]
            total += min(update.bytes, array.hbm_bytes)
        elif output.opcode != "parameter" and not (carries and _under_way(output) and "Done" not in output.text):
            total += array.hbm_bytes
    return total


def _under_way(inner: Instruction) -> bool:
    """Whether it is a collective that several fusions carry on, each beside its own work. The last one counts it."""
    return inner.opcode in CARRIED or "AsyncCollective" in inner.text


CARRIED = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute")


def _read(module: Module, where: Computation, value: Instruction) -> float:
    """Returns the bytes that a fusion reads of a value inside it: those of its slices, where nothing else uses it.

    Fusions are nested: a product's fusion calls the one that slices its operand.
    """
    total = 0.0
    for user in {u.name: u for u in where.users[value.name]}.values():
        places = [i for i, name in enumerate(user.operands) if name == value.name]
        if user.opcode == "bitcast":
            total += _read(module, where, user)
        elif user.opcode == "fusion":
            inner = module.computations[user.called["calls"][0]]
            total += sum(_read(module, inner, inner.parameters[i]) for i in places)
        elif user.opcode in SLICES and places == [0]:
            total += sum(array.bytes for array in user.arrays)
        elif user.opcode != "dynamic-update-slice" or places != [0]:
            return math.inf
    return math.inf if value is where.root else total


def _origin(module: Module, where: Computation, output: Instruction) -> tuple[Computation, Instruction]:
    """Returns what makes a fusion's output, behind bitcasts and nested fusions of one output, and its computation."""
    while output.opcode == "bitcast" or (output.opcode == "fusion" and len(output.arrays) == 1):
        if output.opcode == "bitcast":
            output = where.instructions[output.operands[0]]
        else:
            where = module.computations[output.called["calls"][0]]
            output = where.root
    return where, output
