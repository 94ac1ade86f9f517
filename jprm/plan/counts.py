"""What a compiled program does, counted with the turns of its loops: FLOPs, bytes of HBM, collectives.

XLA's own `cost_analysis` counts the body of a loop once, and a model's layers are such a body.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections import defaultdict
from collections.abc import Collection, Mapping

import numpy as np

from jprm.plan.hlo import Array, Computation, Instruction, Module

LAYERS = re.compile(r"layers_\d+\)*/while$")  # brackets: jvp(layers_0) and its transpose
"""The end of a layer loop's name, as `jprm.model.transformer` calls its groups of layers."""

KINDS = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute", "ragged-all-to-all")

SCATTER = "all-reduce-scatter"
"""How the name of a fused reduce-scatter begins; it is an all-reduce of a padded operand, and a slice, in a fusion."""

SHARES = "shard_map/psum"
"""How the name of a gradient's sum over `data` ends, in `jprm.model.sharding.whole`: of shares, scattered before."""

RINGS = {"_ag": "all-gather", "_rs": "reduce-scatter"}
"""A product whose operand travels around a ring while it is computed: XLA calls the loop windowed_dot_general_body_ag
where it gathers the operand, and _rs where it scatters the result."""


@dataclasses.dataclass(frozen=True)
class Collective:
    """One collective instruction. Bytes are of a device and of one time that it runs.

    moves: `weights` that are gathered, `gradients` that are summed and scattered, or `other`.
    """

    kind: str
    moves: str
    bytes: float  # of the whole array: what is gathered, summed or exchanged
    received: float  # at least, by any algorithm
    times: float
    in_layers: bool
    name: str


@dataclasses.dataclass(frozen=True)
class Program:
    """Of one device and one run. `uncounted` names kernels that do not say what they compute."""

    flops: float
    bytes: float
    collectives: tuple[Collective, ...]
    uncounted: tuple[str, ...] = ()

    @property
    def received(self) -> float:
        return sum(c.received * c.times for c in self.collectives)


def count(module: Module, parameters: Collection[int] = (), kernels: Mapping[str, float] | None = None) -> Program:
    """What the module's entry computes, moves and sends.

    parameters: elements of each parameter of a layer, as a device holds them gathered; see `Collective.moves`.
    kernels: FLOPs of a call of each Pallas kernel, by its name; of others, what they say themselves (`cost_estimate`).
    """
    flops, moved, collectives, uncounted = 0.0, 0.0, [], set()
    for computation, times, loops in module.executed():
        seen, loop_names = {True: set(), False: set()}, [loop.op_name for loop in loops]
        place = _Place(
            in_layers=any(map(LAYERS.search, loop_names)),
            backward=any("transpose(" in name for name in loop_names),
            ring=next(iter(re.findall(r"windowed_dot_general_body(_ag|_rs)", computation.name)), ""),
        )
        for instruction in computation.instructions.values():
            moved += times * hbm_bytes(module, computation, instruction)
            for where, inner in [(computation, instruction), *module.fused(instruction)]:
                if inner.opcode in ("dot", "convolution"):
                    flops += times * product_flops(where, inner)
                elif inner.opcode == "custom-call" and "tpu_custom_call" in inner.text:
                    own = kernel_flops(inner, kernels or {})
                    flops += times * own
                    uncounted |= set() if own else {inner.op_name or inner.name}
                kind = inner.opcode.removesuffix("-start")
                channel, fused = inner.attribute("channel_id") or inner.name, where is not computation
                # A fused one's start, what runs beside it and its end share a channel; so do all of a shard_map's.
                if kind in KINDS and channel not in seen[True] and not (fused and channel in seen[False]):
                    seen[fused].add(channel)
                    collectives.append(_collective(where, inner, kind, place, times, parameters))
    return Program(flops, moved, tuple(collectives), tuple(sorted(uncounted)))


@dataclasses.dataclass(frozen=True)
class _Place:
    """What the loops around a computation say of it."""

    in_layers: bool
    backward: bool
    ring: str  # a key of RINGS, or empty


def _collective(
    where: Computation, inner: Instruction, kind: str, place: _Place, times: float, parameters: Collection[int]
) -> Collective:
    given = [where.instructions[name].arrays[0] for name in inner.operands]
    if where.name.startswith(SCATTER):  # its operand is padded
        kind, given = "reduce-scatter", [parameter.arrays[0] for parameter in where.parameters]
    whole = sum(array.bytes for array in given)
    n = group_size(inner)
    if kind == "all-gather":
        elements, whole = {array.size * n for array in given}, whole * n
    else:
        elements = {array.size for array in given}
    share = (n - 1) / n
    received = {"all-reduce": 2 * share, "collective-permute": 1.0}.get(kind, share) * whole
    backward = place.backward or "transpose(" in inner.op_name
    if place.ring:
        kind, moves = RINGS[place.ring] + " (ring)", "weights" if place.ring == "_ag" else "gradients"
    elif kind == "all-gather" and elements <= set(parameters):
        moves = "weights"
    elif kind in ("reduce-scatter", "all-reduce") and backward and elements <= set(parameters):
        moves = "gradients"
    elif kind == "collective-permute" and _scattered(where, inner):
        moves = "gradients"
    elif kind == "all-reduce" and backward and inner.op_name.endswith(SHARES):
        moves = "gradients"
    else:
        moves = "other"
    return Collective(kind, moves, whole, received, times, place.in_layers, inner.op_name or inner.name)


MOVED = ("collective-permute", "copy", "slice", "dynamic-slice", "async", "bitcast", "reshape")
"""Instructions, begun and done apart or not, that give what they were given, or a part of it."""


def _scattered(where: Computation, instruction: Instruction) -> bool:
    """Whether it moves a part of what a fused reduce-scatter gave, in padded shares, to the device that owns it."""
    while instruction.opcode.removesuffix("-start").removesuffix("-done") in MOVED:
        instruction = where.instructions[instruction.operands[0]]
    return any(name.startswith(SCATTER) for name in instruction.called.get("calls", ()))


def group_size(collective: Instruction) -> int:
    """Devices that take part in it together, from the three ways in which XLA writes them; of a permute, two.

    Raises ValueError where it is written in another.
    """
    if collective.opcode.startswith("collective-permute"):
        return 2
    # Where a mesh's devices are not in its order, theirs stands between it and its axes: ], device_ids=([2,8]T(1,0)) {.
    axes = r"\{'\w+'(?:, *'\w+')*\}"
    groups = re.search(rf"replica_groups=(mesh\[[^\]]*\][^{{]*{axes}|\[[\d,]*\]<=|\{{\{{[^}}]*\}})", collective.text)
    if not groups:
        raise ValueError(f"how many devices does {collective.name} take? It says no groups that are known")
    text = groups.group(1)
    if text.startswith("mesh"):
        sizes = dict(re.findall(r"'(\w+)'=(\d+)", text))
        return math.prod(int(sizes[axis]) for axis in re.findall(r"'(\w+)'", text.split("{")[1]))
    if text.startswith("["):
        return int(text[1:].split("]")[0].split(",")[-1])
    return text.count(",") + 1


def product_flops(where: Computation, product: Instruction) -> float:
    """2 a multiplication and addition of a dot or a convolution, none of padding or of the holes of dilation."""
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
        pairs *= _meetings(
            left[lhs.index(label)], right[rhs.index(label)], result[out.index(label)], int(option("stride", "1")), low,
            int(option("lhs_dilate", "1")), int(option("rhs_dilate", "1")),
        )  # fmt: skip
    features = right[rhs.index("i")] * right[rhs.index("o")]
    return 2.0 * result[out.index("b")] * features * pairs / int(product.attribute("batch_group_count") or 1)


def _meetings(size: int, window: int, outputs: int, stride: int, low: int, lhs_dilate: int, rhs_dilate: int) -> int:
    """Pairs of an output and a window position, along one axis, that meet an element of the input."""
    position = np.arange(outputs)[:, None] * stride + np.arange(window) * rhs_dilate - low
    return int(np.sum((position >= 0) & (position <= (size - 1) * lhs_dilate) & (position % lhs_dilate == 0)))


def kernel_flops(call: Instruction, kernels: Mapping[str, float]) -> float:
    """By its name, or what it says itself: the `cost_estimate` of its `pallas_call`; 0 where neither is known."""
    for name, flops in kernels.items():
        if name in call.name or name in call.op_name.rpartition("/")[2]:
            return flops
    found = re.search(r'"cost_estimate":\{[^}]*"flops":"?(\d+)', call.text)
    return float(found.group(1)) if found else 0.0


FREE = {
    "parameter", "constant", "tuple", "get-tuple-element", "bitcast", "while", "call", "conditional", "after-all",
    "partition-id", "replica-id", "optimization-barrier", "async-start", "async-update", "async-done", "call-start",
}  # fmt: skip
"""Instructions that move nothing themselves."""

SLICES = ("dynamic-slice", "slice", "gather")


def hbm_bytes(module: Module, where: Computation, instruction: Instruction) -> float:
    """HBM bytes that an instruction reads and writes, each operand once; of a slice, the slice.

    A lower bound: a product that does not fit the chip's own memory reads its operands again.
    """
    opcode = instruction.opcode
    if opcode in FREE or opcode.endswith("-done") or "AllocateBuffer" in instruction.text:
        return 0.0
    given = [where.instructions[name].arrays for name in instruction.operands]
    if opcode == "fusion":
        return _fusion_bytes(module.computations[instruction.called["calls"][0]], given, instruction.arrays)
    if opcode in SLICES:
        return _hbm(given[0]) and 2 * sum(array.bytes for array in instruction.arrays)
    if opcode == "dynamic-update-slice":
        return 2 * _hbm(given[1])
    results = instruction.arrays
    if opcode == "slice-start":  # of an array, a slice and what it keeps count with
        return (results[-2].bytes if _hbm(given[0]) else 0.0) + results[-2].hbm_bytes
    if opcode.endswith("-start"):  # its result holds the operands too, and what it keeps count with
        results = results[1:2] if opcode.startswith("collective") else results[:1]
    return sum(map(_hbm, given)) + _hbm(results)


def _hbm(arrays: tuple[Array, ...]) -> float:
    return sum(array.hbm_bytes for array in arrays)


def _fusion_bytes(inner: Computation, given: list[tuple[Array, ...]], results: tuple[Array, ...]) -> float:
    total = 0.0
    for parameter, arrays in zip(inner.parameters, given, strict=True):
        users = inner.users[parameter.name]
        partial = {"dynamic-update-slice": 0.0}
        if users and all(
            (u.opcode in SLICES or u.opcode in partial) and u.operands[0] == parameter.name for u in users
        ):
            read = sum(partial.get(u.opcode, sum(array.bytes for array in u.arrays)) for u in users)
            total += min(read, _hbm(arrays)) if _hbm(arrays) else 0.0
        elif not all(u is inner.root and u.opcode == "tuple" for u in users):
            total += _hbm(arrays)
    outputs = (
        [inner.instructions[name] for name in inner.root.operands] if inner.root.opcode == "tuple" else [inner.root]
    )
    for output, array in zip(outputs, results, strict=False):
        while output.opcode == "bitcast":
            output = inner.instructions[output.operands[0]]
        if output.opcode == "dynamic-update-slice":
            update = inner.instructions[output.operands[1]].arrays[0]
            total += min(update.bytes, array.hbm_bytes)
        elif output.opcode != "parameter":
            total += array.hbm_bytes
    return total


def totals(collectives: Collection[Collective]) -> list[dict]:
    """Collectives that are alike, together: kind, what they move, where, how many, bytes."""
    groups: dict[tuple, list[Collective]] = defaultdict(list)
    for collective in collectives:
        groups[collective.kind, collective.moves, collective.in_layers].append(collective)
    return [
        {
            "kind": kind,
            "moves": moves,
            "in_layers": in_layers,
            "count": sum(c.times for c in members),
            "bytes": sum(c.bytes * c.times for c in members),
            "received": sum(c.received * c.times for c in members),
        }
        for (kind, moves, in_layers), members in sorted(groups.items(), key=lambda item: (not item[0][2], item[0]))
    ]
