"""Counts FLOPs, HBM bytes and collectives of a compiled program, with loop trips, and bounds its time.

XLA's own `cost_analysis` counts a loop body once, but a model's layers are a loop body.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import numpy as np

from jprm.apps.plan.hlo import Array, Computation, Instruction, Module
from jprm.apps.plan.topologies import Topology
from jprm.model.parameters import matrices, model_flops

__all__ = ["Bounds", "ProgramCounts", "bounds", "count", "matrices", "model_flops", "totals"]


@dataclasses.dataclass(frozen=True)
class ProgramCounts:
    """Counts per device and run. `uncounted` names kernels with unknown cost."""

    flops: float
    bytes: float
    collectives: tuple[Collective, ...]
    uncounted: tuple[str, ...] = ()

    def received(self, *, network: bool) -> float:
        """Returns bytes that a device receives in one run from other slices, or from chips of its slice.

        `network` selects the former, over the data centre's network.
        """
        return sum(c.received * c.times for c in self.collectives if c.network == network)


def count(
    module: Module, parameters: Collection[int] = (), kernels: Mapping[str, float] | None = None, node: int = 0
) -> ProgramCounts:
    """Counts the module entry's FLOPs, memory traffic and collectives, per device and run.

    Args:
      parameters: sizes of a layer's parameters, as gathered on a device; see `Collective.moves`.
      kernels: FLOPs per call of Pallas kernels, by name. Others count by their `cost_estimate`.
      node: devices per node if several GPU nodes are joined by a network, else 0.

    Raises UnknownTrips (a ValueError) if a loop's trips cannot be read, ValueError as `collectives`.
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
                    of_kernel = kernel_flops(inner, kernels or {})
                    flops += times * of_kernel
                    uncounted |= set() if of_kernel else {inner.op_name or inner.name}
    return ProgramCounts(flops, moved, tuple(collectives(module, parameters, node)), tuple(sorted(uncounted)))


def product_flops(where: Computation, product: Instruction) -> float:
    """Returns 2 FLOPs per multiply-add of a dot or convolution in `where`, excluding padding and dilation."""
    left, right = (where.instructions[name].arrays[0].shape for name in product.operands[:2])
    result = product.arrays[0].shape
    if product.opcode == "dot":
        contracted = re.findall(r"\d+", product.attribute("lhs_contracting_dims"))
        return 2.0 * math.prod(result) * math.prod(left[int(axis)] for axis in contracted)
    lhs, rest = product.attribute("dim_labels").split("_")
    rhs, out = rest.split("->")
    window, spatial = dict(re.findall(r"(\w+)=([\dx_-]+)", product.attribute("window").strip("{}"))), len(rhs) - 2
    defaults = {"stride": "1", "pad": "0_0", "lhs_dilate": "1", "rhs_dilate": "1"}
    options = [window[name].split("x") if name in window else [value] * spatial for name, value in defaults.items()]
    pairs = 1.0
    for axis, (stride, pad, lhs_dilate, rhs_dilate) in enumerate(zip(*options, strict=True)):
        size, reach, outputs = (
            shape[labels.index(str(axis))] for shape, labels in ((left, lhs), (right, rhs), (result, out))
        )
        low = int(pad.split("_")[0])
        pairs *= _pairs_along(size, reach, outputs, int(stride), low, int(lhs_dilate), int(rhs_dilate))
    features = right[rhs.index("i")] * right[rhs.index("o")]
    return 2.0 * result[out.index("b")] * features * pairs / int(product.attribute("batch_group_count") or 1)


def library_product_flops(where: Computation, call: Instruction) -> float:
    """Returns 2 FLOPs per multiply-add of a cuBLAS product, a custom call in `where`."""
    contracted = re.search(r'"lhs_contracting_dimensions":\[([^\]]*)\]', call.text)
    left = where.instructions[call.operands[0]].arrays[0].shape
    axes = re.findall(r"\d+", contracted[1]) if contracted else []
    return 2.0 * call.arrays[0].size * math.prod(left[int(axis)] for axis in axes)


def _pairs_along(size: int, window: int, outputs: int, stride: int, low: int, lhs_dilate: int, rhs_dilate: int) -> int:
    """Counts, along one convolution axis, the (output, window position) pairs with an input element.

    Other pairs fall on padding or on the zeros of dilation, and are not multiplied.
    """
    position = np.arange(outputs)[:, None] * stride + np.arange(window) * rhs_dilate - low
    return int(np.sum((position >= 0) & (position <= (size - 1) * lhs_dilate) & (position % lhs_dilate == 0)))


KERNELS = re.compile(r"tpu_custom_call|gpu\.triton")
"""Matches Pallas kernel calls, on TPUs and GPUs."""


def kernel_flops(call: Instruction, kernels: Mapping[str, float]) -> float:
    """Returns a kernel's FLOPs per call by its name in `kernels`, or by the `cost_estimate` of its `pallas_call`.

    0 if both are missing. The first name wins that is in the call's name or the last part of its `op_name`, or quoted
    in its text.
    """
    for name, flops in kernels.items():
        if name in call.name or name in call.op_name.rpartition("/")[2] or f'"{name}"' in call.text:
            return flops
    estimate = re.search(r'"cost_estimate":\{[^}]*"flops":"?(\d+)', call.text)
    return float(estimate.group(1)) if estimate else 0.0


FREE = {
    "parameter", "constant", "tuple", "get-tuple-element", "bitcast", "while", "call", "conditional", "after-all",
    "partition-id", "replica-id", "optimization-barrier", "async-start", "async-update", "async-done", "call-start",
}  # fmt: skip
"""Instructions without data movement."""

SLICES = ("dynamic-slice", "slice", "gather")


def hbm_bytes(module: Module, where: Computation, instruction: Instruction) -> float:
    """Returns the HBM bytes that an instruction in `where` reads and writes in one run: each operand once.

    If it reads a slice, only the slice counts. 0 for instructions without data movement (`FREE`). This is a lower
    bound: if a product exceeds the chip's own memory, its operands are read repeatedly.
    """
    opcode = instruction.opcode
    if opcode in FREE or opcode.endswith("-done") or "AllocateBuffer" in instruction.text:
        return 0.0
    operands = [where.instructions[name].arrays for name in instruction.operands]
    if opcode == "fusion":
        return _fusion_bytes(module, module.computations[instruction.called["calls"][0]], operands, instruction.arrays)
    if opcode in SLICES:
        return _hbm(operands[0]) and 2 * sum(array.bytes for array in instruction.arrays)
    if opcode == "dynamic-update-slice":
        return 2 * _hbm(operands[1])
    results = instruction.arrays
    if opcode == "send":  # the result includes the operand
        return _hbm(operands[0])
    if opcode == "slice-start":  # the result is an array, its slice and a counter
        return (results[-2].bytes if _hbm(operands[0]) else 0.0) + results[-2].hbm_bytes
    if opcode.endswith("-start"):  # the result includes operands and counters
        results = results[1:2] if opcode.startswith("collective") else results[:1]
    return sum(map(_hbm, operands)) + _hbm(results)


def _hbm(arrays: tuple[Array, ...]) -> float:
    return sum(array.hbm_bytes for array in arrays)


def _fusion_bytes(
    module: Module, inner: Computation, operands: list[tuple[Array, ...]], results: tuple[Array, ...]
) -> float:
    total, carries = 0.0, inner.name.startswith("async_collective_fusion") or "AsyncCollective" in inner.root.text

    def passed(user: Instruction) -> bool:
        """Whether the user reads no data itself: the result's tuple, or a collective in progress."""
        return (user is inner.root and user.opcode == "tuple") or (carries and _under_way(user))

    for parameter, arrays in zip(inner.parameters, operands, strict=True):
        if not all(map(passed, inner.users[parameter.name])):
            total += min(_read(module, inner, parameter), _hbm(arrays))
    outputs = (
        [inner.instructions[name] for name in inner.root.operands] if inner.root.opcode == "tuple" else [inner.root]
    )
    for output, array in zip(outputs, results, strict=False):
        where, output = _source(module, inner, output)
        if output.opcode == "dynamic-update-slice":
            update = where.instructions[output.operands[1]].arrays[0]
            total += min(update.bytes, array.hbm_bytes)
        elif output.opcode != "parameter" and not (carries and _under_way(output) and "Done" not in output.text):
            total += array.hbm_bytes
    return total


def _under_way(inner: Instruction) -> bool:
    """Whether it is a collective carried on by several fusions beside their own work. Only the last one counts it."""
    return inner.opcode in CARRIED or "AsyncCollective" in inner.text


CARRIED = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute")


def _read(module: Module, where: Computation, value: Instruction) -> float:
    """Returns the bytes a fusion reads from an inner value: only slices, if it has no other users.

    Fusions are nested: a product's fusion calls its operand's slicing fusion.
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


def _source(module: Module, where: Computation, output: Instruction) -> tuple[Computation, Instruction]:
    """Returns the instruction behind a fusion's output, past bitcasts and nested single-output fusions; and its
    computation.
    """
    while output.opcode == "bitcast" or (output.opcode == "fusion" and len(output.arrays) == 1):
        if output.opcode == "bitcast":
            output = where.instructions[output.operands[0]]
        else:
            where = module.computations[output.called["calls"][0]]
            output = where.root
    return where, output


# ---- Collectives: how often each runs, and which data it moves.
#
# Within a slice, these are collective instructions. Between slices, over the data centre's network, they are a `send`
# and a `recv`, whose attributes name the collective that the hosts perform.

LAYERS = re.compile(r"layers_\d+\)*/while/body/")  # brackets: jvp(layers_0) and its transpose
"""Matches operation names in the body of a layer loop (`jprm.model.transformer`)."""

KINDS = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute", "ragged-all-to-all")

TRANSFER = "_xla_megascale_transfer_type"

NETWORK = {
    "ALL_GATHER": "all-gather", "ALL_REDUCE": "all-reduce", "REDUCE_SCATTER": "reduce-scatter",
    "ALL_TO_ALL": "all-to-all", "ONE_TO_ONE": "collective-permute",
}  # fmt: skip
"""Values of the TRANSFER attribute on a `send` between slices."""

PSUM = '_xla_host_transfer_rendezvous="psum'
"""Marks gradient sums between slices. The compiler's own sums are all-reduces."""

TILE = 1024
"""XLA rounds packed arrays up to a multiple of this many elements."""

SCATTER = "all-reduce-scatter"
"""Name prefix of a fused reduce-scatter: a fused all-reduce (with a padded operand) and slice."""

SHARES = "shard_map/psum"
"""Name suffix of a gradient's sum over `data` (`jprm.model.mesh.gathered_weight`)."""

RINGS = {"_ag": "all-gather", "_rs": "reduce-scatter"}
"""Products whose operand travels around a ring at the same time. XLA names the loop windowed_dot_general_body_ag if it
gathers the operand, and _rs if it scatters the result."""


@dataclasses.dataclass(frozen=True)
class Collective:
    """One collective instruction. Bytes are per device and execution.

    moves: `weights` (gathered), `gradients` (summed and scattered), or `other`.
    network: between slices, else between chips of a slice.
    in_layers: in a layer loop, or in an iteration moved outside by the compiler.
    """

    kind: str
    moves: str
    network: bool
    bytes: float  # of the full array that is gathered, summed or exchanged
    received: float  # the least of any algorithm
    times: float
    in_layers: bool
    name: str


def collectives(module: Module, parameters: Collection[int], node: int = 0) -> Iterator[Collective]:
    """Yields the collectives in the module's entry and the loops and calls below it, one per instruction.

    Args:
      parameters: sizes of a layer's parameters, as gathered on a device; see `Collective.moves`.
      node: devices per node if several GPU nodes are joined by a network, else 0.

    Raises ValueError if a collective's devices, or its kind between slices, are not recognised, or a loop's trips
    (UnknownTrips) cannot be read.
    """
    for computation, times, by in module.executed():
        seen = {True: set(), False: set()}
        ring = next(iter(re.findall(r"windowed_dot_general_body(_ag|_rs)", computation.name)), "")
        loops = [_within(module, i) for _, i in by if i.opcode == "while"]
        for instruction in computation.instructions.values():
            for where, inner in [(computation, instruction), *module.fused(instruction)]:
                kind = inner.opcode.removesuffix("-start")
                if kind not in KINDS and not (kind == "send" and TRANSFER in inner.text):
                    continue
                # The parts of a fused collective share a channel; so do all collectives of a shard_map.
                key, fused = (kind, inner.attribute("channel_id") or inner.name), where is not computation
                if key in seen[True] or (fused and key in seen[False]):
                    continue
                seen[fused].add(key)
                # What a SparseCore sends is the only operation of a called computation: its origin is before the call.
                called = bool(by) and by[-1][1].opcode != "while"
                origin = inner.op_name or _traced(*(by[-1] if called else (computation, instruction)))
                summed = _summed(*(by[-1] if called else (where, inner)))
                yield _collective(where, inner, (*loops, origin), summed, ring, times, parameters, node)


def _within(module: Module, loop: Instruction) -> str:
    """Returns the prefix for operation names in a loop's body.

    If the compiler rewrote a loop to overlap sending with the next iteration, the loop has no name. Its prefix is then
    the layer loop in which most of its body was traced.
    """
    if loop.op_name:
        return loop.op_name + "/body/"
    body = module.computations[loop.called["body"][0]].instructions.values()
    loops = Counter(i.op_name[: match.end()] for i in body if (match := LAYERS.search(i.op_name)))
    return loops.most_common(1)[0][0] if loops else ""


def _traced(computation: Computation, instruction: Instruction) -> str:
    """Returns the name of the nearest traced operation among an instruction's inputs, or "".

    The compiler's own collectives have no name, and an iteration moved out of a loop is in no loop. The search does not
    pass through loops, whose results are not their operands.
    """
    near, seen = [instruction], {instruction.name}
    while near:
        for i in near:
            if "/" in i.op_name:
                return i.op_name
        before = {name for i in near for name in i.operands if i.opcode != "while"} - seen
        seen |= before
        near = [computation.instructions[name] for name in sorted(before)]
    return ""


def _collective(
    where: Computation,
    inner: Instruction,
    names: tuple[str, ...],
    summed: bool,
    ring: str,
    times: float,
    parameters: Collection[int],
    node: int,
) -> Collective:
    kind, network = inner.opcode.removesuffix("-start"), inner.opcode == "send"
    fewest = nodes_of(inner, node)
    operands = [where.instructions[name] for name in inner.operands]
    arrays, whole = [array for i in operands for array in _packed(where, i)], sum(i.arrays[0].bytes for i in operands)
    if network:
        kind = _between_slices(inner)
    elif where.name.startswith(SCATTER):  # its operand is padded
        kind, arrays = "reduce-scatter", [parameter.arrays[0] for parameter in where.parameters]
        whole = sum(array.bytes for array in arrays)
    n, elements = group_size(inner), {array.size for array in arrays}
    if kind == "all-gather":
        elements, whole = {size * n for size in elements}, whole * n
    share = (n - 1) / n
    received = {"all-reduce": 2 * share, "collective-permute": 1.0}.get(kind, share) * whole
    if fewest > 1:  # a node's devices receive the other nodes' data once, together
        network = True
        received *= (fewest - 1) / n / share
    backward = any("transpose(" in name for name in names)
    of_layer = elements <= set(parameters)
    if ring:
        kind, moves = RINGS[ring] + " (ring)", "weights" if ring == "_ag" else "gradients"
    elif (
        (kind in ("all-gather", "collective-permute") and summed)
        or (kind in ("reduce-scatter", "all-reduce") and backward and of_layer)
        or (kind == "all-reduce" and backward and inner.op_name.endswith(SHARES))
        or (kind == "all-reduce" and network and (backward or PSUM in inner.text))
    ):
        moves = "gradients"
    else:
        moves = "weights" if kind == "all-gather" and of_layer else "other"
    # A collective with a name of its own that was moved out of a loop is of all layers at once.
    in_layers = any(map(LAYERS.search, names[:-1] if inner.op_name else names))
    return Collective(kind, moves, network, whole, received, times, in_layers, names[-1] or inner.name)


def _between_slices(send: Instruction) -> str:
    transfer = re.search(rf'{TRANSFER}="(\w+)"', send.text)
    kind = transfer[1] if transfer else "nothing"
    if kind not in NETWORK:
        raise ValueError(f"{send.name}: {kind} is not a known kind of transfer between slices")
    return NETWORK[kind]


def _packed(where: Computation, operand: Instruction) -> list[Array]:
    """Returns the small arrays packed by the compiler into the operand, or the operand's own array."""
    whole, packs = operand.arrays[0], operand
    while packs.opcode in ("bitcast", "copy", "custom-call") and len(packs.operands) == 1:  # the call rounds up
        packs = where.instructions[packs.operands[0]]
    parts = [where.instructions[name].arrays[0] for name in packs.operands]
    size = sum(part.size for part in parts)
    return parts if packs.opcode in ("fusion", "concatenate") and size <= whole.size < size + TILE else [whole]


MOVED = ("collective-permute", "copy", "slice", "dynamic-slice", "async", "bitcast", "reshape", "get-tuple-element")
"""Instructions, asynchronous or not, returning their operand or part of it."""


def _summed(where: Computation, instruction: Instruction) -> bool:
    """Whether it sends its owner a padded part of a fused reduce-scatter's result or of a sum between slices."""
    if not instruction.operands:
        return False
    instruction = where.instructions[instruction.operands[0]]
    while instruction.opcode.removesuffix("-start").removesuffix("-done") in MOVED:
        instruction = where.instructions[instruction.operands[0]]
    scattered = any(name.startswith(SCATTER) for name in instruction.called.get("calls", ()))
    return scattered or (instruction.opcode == "recv-done" and "megascale" in instruction.text)


def nodes_of(collective: Instruction, node: int) -> int:
    """Counts the nodes, of `node` devices each, spanned by the collective's first group.

    1 for a permute, or if `node` is 0.

    Raises ValueError for an unknown group notation.
    """
    if not node or collective.opcode.startswith("collective-permute"):
        return 1
    return len({device // node for device in first_group(collective)})


def group_size(collective: Instruction) -> int:
    """Returns the number of devices (between slices, of slices) in the first group; 2 for a permute.

    Raises ValueError for an unknown group notation.
    """
    return 2 if collective.opcode.startswith("collective-permute") else len(first_group(collective))


def first_group(collective: Instruction) -> list[int]:
    """Returns the device numbers in a collective's first group; between slices, the slices.

    Raises ValueError for other notations, e.g. `replica_groups={}` (all devices) or a slice's own collective-permute.
    """
    order = r"\[([\d,]+)\](?:T\(([\d,]+)\))?"
    # Between slices: slices x chips, groups of devices, or pairs: "{1,2}x{0:63}".
    slices = r'_xla_megascale_target=("\{[\d,]+\}x|\{\{\d+(?:(?:,|->)\d+)+\})'
    if listed := re.search(rf"replica_groups=(\{{\{{[\d,]+\}})|{slices}", collective.text):
        return [int(device) for device in re.findall(r"\d+", listed[1] or listed[2])]
    if iota := re.search(rf"replica_groups=\[[\d,]*?(\d+)\]<={order}", collective.text):
        return _ordered(iota[2], iota[3]).reshape(-1)[: int(iota[1])].tolist()
    # A mesh's device order may stand between it and its axes: ], device_ids=([2,8]T(1,0)) {.
    axes = r"\{('\w+'(?:, *'\w+')*)\}"
    mesh = re.search(rf"replica_groups=mesh\[([^\]]*)\](?:, device_ids=\({order}\))? ?{axes}", collective.text)
    if mesh is None:
        raise ValueError(f"{collective.name}: its device groups have an unknown notation")
    sizes = {axis: int(n) for axis, n in re.findall(r"'(\w+)'=(\d+)", mesh[1])}
    within = re.findall(r"'(\w+)'", mesh[4])
    ids = _ordered(mesh[2], mesh[3]) if mesh[2] else np.arange(math.prod(sizes.values()))
    last = [list(sizes).index(axis) for axis in within]
    rest = [i for i in range(len(sizes)) if i not in last]
    ids = ids.reshape(list(sizes.values())).transpose(rest + last).reshape(-1)
    return ids[: math.prod(sizes[axis] for axis in within)].tolist()


def _ordered(sizes: str, permutation: str | None) -> np.ndarray:
    """Returns the devices in XLA's notation [sizes]T(permutation)."""
    ids = np.arange(math.prod(map(int, sizes.split(",")))).reshape([int(n) for n in sizes.split(",")])
    return ids.transpose([int(n) for n in permutation.split(",")]) if permutation else ids


def totals(collectives: Collection[Collective]) -> list[dict[str, Any]]:
    """Sums over collectives of equal kind, data and place.

    Returns JSON rows, chips of a slice first, layer loops first. A row has `kind`, `moves`, `network` and `in_layers`
    as `Collective`; and `count` (runs), `bytes` and `received`, per device in one run of the program.
    """
    groups: dict[tuple, list[Collective]] = defaultdict(list)
    for collective in collectives:
        groups[collective.network, not collective.in_layers, collective.kind, collective.moves].append(collective)
    return [
        {
            "kind": kind,
            "moves": moves,
            "network": network,
            "in_layers": not outside,
            "count": sum(c.times for c in members),
            "bytes": sum(c.bytes * c.times for c in members),
            "received": sum(c.received * c.times for c in members),
        }
        for (network, outside, kind, moves), members in sorted(groups.items())
    ]


# ---- Lower bounds on a step's time on given chips.


@dataclasses.dataclass(frozen=True)
class Bounds:
    """Lower bounds on a step's time in seconds. No program with these counts is faster than the largest bound."""

    compute: float
    hbm: float
    interconnect: float  # between the chips of a slice
    network: float = 0.0  # between slices; 0 for one slice, and without a published rate

    @property
    def step(self) -> float:
        return getattr(self, self.by)

    @property
    def by(self) -> str:
        """The largest bound's name: `compute`, `hbm`, `interconnect` or `network`."""
        return max((field.name for field in dataclasses.fields(self)), key=lambda name: getattr(self, name))


def bounds(program: ProgramCounts, topology: Topology) -> Bounds:
    """Divides one device's counts by the published rates of its chip (bfloat16 FLOPs) and links.

    An unpublished rate gives 0 seconds.
    """
    chip = topology.chip
    share = 1 / chip.devices
    return Bounds(
        compute=program.flops / (chip.flops * share),
        hbm=program.bytes / (chip.hbm_bandwidth * share),
        interconnect=program.received(network=False) / (topology.interconnect * share),
        network=program.received(network=True) / (chip.network * share),
    )
