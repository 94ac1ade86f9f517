"""The collectives of a compiled program: how often each runs, and what it moves.

Between the chips of a slice they are collective instructions. Between slices, over the data centre's network, they are
a `send` and a `recv`, whose attributes name the collective that the hosts perform.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator

import numpy as np

from jprm.apps.plan.hlo import Array, Computation, Instruction, Module

LAYERS = re.compile(r"layers_\d+\)*/while/body/")  # brackets: jvp(layers_0) and its transpose
"""Matches the names of operations in a layer loop's body (`jprm.model.transformer`)."""

KINDS = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute", "ragged-all-to-all")

TRANSFER = "_xla_megascale_transfer_type"

NETWORK = {
    "ALL_GATHER": "all-gather", "ALL_REDUCE": "all-reduce", "REDUCE_SCATTER": "reduce-scatter",
    "ALL_TO_ALL": "all-to-all", "ONE_TO_ONE": "collective-permute",
}  # fmt: skip
"""Values of the attribute TRANSFER of a `send` between slices."""

PSUM = '_xla_host_transfer_rendezvous="psum'
"""In the text of gradients' sums between slices. The compiler's own sums are all-reduces."""

TILE = 1024
"""XLA rounds packed arrays up to a multiple of this many elements."""

SCATTER = "all-reduce-scatter"
"""How the name of a fused reduce-scatter begins: an all-reduce of a padded operand, and a slice, in a fusion."""

SHARES = "shard_map/psum"
"""How the name of a gradient's sum over `data` ends (`jprm.model.collectives.gathered_weight`)."""

RINGS = {"_ag": "all-gather", "_rs": "reduce-scatter"}
"""A product whose operand travels around a ring meanwhile: XLA names the loop windowed_dot_general_body_ag where it
gathers the operand, and _rs where it scatters the result."""


@dataclasses.dataclass(frozen=True)
class Collective:
    """One collective instruction. Bytes are per device and execution.

    moves: `weights` (gathered), `gradients` (summed and scattered), or `other`.
    network: between slices, else between the chips of a slice.
    in_layers: in a layer loop, or in a turn that the compiler moved out of it.
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
    """Yields the collectives of the module's entry.

    parameters: sizes of a layer's parameters, as gathered on a device. node: devices of a node where several nodes of
    GPUs are joined by a network.

    Raises ValueError for a collective whose devices, or whose kind between slices, are not recognised.
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
                # What a SparseCore sends is alone in a called computation: its origin is before the call.
                called = bool(by) and by[-1][1].opcode != "while"
                own = inner.op_name or _origin(*(by[-1] if called else (computation, instruction)))
                summed = _summed(*(by[-1] if called else (where, inner)))
                yield _collective(where, inner, (*loops, own), summed, ring, times, parameters, node)


def _within(module: Module, loop: Instruction) -> str:
    """Returns the prefix of operation names in a loop's body.

    A loop that the compiler rewrote, to send in one turn while the next computes, has no name of its own. Its prefix is
    the layer loop in which most of its body was traced.
    """
    if loop.op_name:
        return loop.op_name + "/body/"
    body = module.computations[loop.called["body"][0]].instructions.values()
    found = Counter(i.op_name[: match.end()] for i in body if (match := LAYERS.search(i.op_name)))
    return found.most_common(1)[0][0] if found else ""


def _origin(computation: Computation, instruction: Instruction) -> str:
    """Returns the name of the nearest traced operation that an instruction computes from, or an empty text.

    The compiler's own collectives have no name, and a turn that it moved out of a loop is in no loop. The search does
    not pass through loops, whose results are not their operands.
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
    given = [where.instructions[name] for name in inner.operands]
    arrays, whole = [array for i in given for array in _packed(where, i)], sum(i.arrays[0].bytes for i in given)
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
    if fewest > 1:  # what a node needs from the others is received once, by all of its devices together
        network = True
        received *= (fewest - 1) / n / share
    backward = any("transpose(" in name for name in names)
    if ring:
        kind, moves = RINGS[ring] + " (ring)", "weights" if ring == "_ag" else "gradients"
    elif kind in ("all-gather", "collective-permute") and summed:
        moves = "gradients"
    elif kind == "all-gather" and elements <= set(parameters):
        moves = "weights"
    elif kind in ("reduce-scatter", "all-reduce") and backward and elements <= set(parameters):
        moves = "gradients"
    elif kind == "all-reduce" and backward and inner.op_name.endswith(SHARES):
        moves = "gradients"
    elif kind == "all-reduce" and network and (backward or PSUM in inner.text):
        moves = "gradients"
    else:
        moves = "other"
    # A collective with a name of its own that was moved out of a loop is of all layers at once.
    in_layers = any(map(LAYERS.search, names[:-1] if inner.op_name else names))
    return Collective(kind, moves, network, whole, received, times, in_layers, names[-1] or inner.name)


def _between_slices(send: Instruction) -> str:
    found = re.search(rf'{TRANSFER}="(\w+)"', send.text)
    said = found[1] if found else "nothing"
    if said not in NETWORK:
        raise ValueError(f"what do slices send each other by {send.name}? {said} is no kind that is known")
    return NETWORK[said]


def _packed(where: Computation, operand: Instruction) -> list[Array]:
    """Returns the small arrays that the compiler packed into the operand, or the operand's own."""
    own, packs = operand.arrays[0], operand
    while packs.opcode in ("bitcast", "copy", "custom-call") and len(packs.operands) == 1:  # the call rounds up
        packs = where.instructions[packs.operands[0]]
    parts = [where.instructions[name].arrays[0] for name in packs.operands]
    size = sum(part.size for part in parts)
    return parts if packs.opcode in ("fusion", "concatenate") and size <= own.size < size + TILE else [own]


MOVED = ("collective-permute", "copy", "slice", "dynamic-slice", "async", "bitcast", "reshape", "get-tuple-element")
"""Instructions, asynchronous or not, that return their operand or a part of it."""


def _summed(where: Computation, instruction: Instruction) -> bool:
    """Whether it sends to its owner a padded part of a fused reduce-scatter's result, or of a sum between slices."""
    if not instruction.operands:
        return False
    instruction = where.instructions[instruction.operands[0]]
    while instruction.opcode.removesuffix("-start").removesuffix("-done") in MOVED:
        instruction = where.instructions[instruction.operands[0]]
    scattered = any(name.startswith(SCATTER) for name in instruction.called.get("calls", ()))
    return scattered or (instruction.opcode == "recv-done" and "megascale" in instruction.text)


def nodes_of(collective: Instruction, node: int) -> int:
    """Returns how many nodes of so many devices the collective's first group spans; 1 where `node` is 0.

    Raises ValueError for an unknown notation of groups.
    """
    if not node or collective.opcode.startswith("collective-permute"):
        return 1
    if listed := re.search(r"replica_groups=\{\{([\d,]+)\}", collective.text):
        return len({int(x) // node for x in listed[1].split(",")})
    order = r"\[([\d,]+)\](?:T\(([\d,]+)\))?"
    if iota := re.search(rf"replica_groups=\[[\d,]*?(\d+)\]<={order}", collective.text):
        ids, size = _ordered(iota[2], iota[3]).reshape(-1), int(iota[1])
    elif mesh := re.search(
        rf"replica_groups=mesh\[([^\]]*)\](?:, device_ids=\({order}\))? ?\{{([^}}]*)\}}", collective.text
    ):
        sizes = {axis: int(n) for axis, n in re.findall(r"'(\w+)'=(\d+)", mesh[1])}
        within = re.findall(r"'(\w+)'", mesh[4])
        ids = _ordered(mesh[2], mesh[3]) if mesh[2] else np.arange(math.prod(sizes.values()))
        last = [list(sizes).index(axis) for axis in within]
        rest = [i for i in range(len(sizes)) if i not in last]
        ids = ids.reshape(list(sizes.values())).transpose(rest + last).reshape(-1)
        size = math.prod(sizes[axis] for axis in within)
    else:
        raise ValueError(f"which devices does {collective.name} take? It says no groups that are known")
    return len({x // node for x in ids[:size].tolist()})


def _ordered(sizes: str, permutation: str | None) -> np.ndarray:
    """Returns the devices in XLA's notation [sizes]T(permutation)."""
    ids = np.arange(math.prod(map(int, sizes.split(",")))).reshape([int(n) for n in sizes.split(",")])
    return ids.transpose([int(n) for n in permutation.split(",")]) if permutation else ids


def group_size(collective: Instruction) -> int:
    """Returns the number of devices in a group, from XLA's notations of groups; 2 for a permute.

    Raises ValueError for an unknown notation.
    """
    if collective.opcode.startswith("collective-permute"):
        return 2
    # A mesh's device order may stand between it and its axes: ], device_ids=([2,8]T(1,0)) {.
    axes = r"\{'\w+'(?:, *'\w+')*\}"
    groups = re.search(rf"replica_groups=(mesh\[[^\]]*\][^{{]*{axes}|\[[\d,]*\]<=|\{{\{{[^}}]*\}})", collective.text)
    # Between slices: slices x chips, groups of devices, or pairs: "{1,2}x{0:63}".
    slices = re.search(r'_xla_megascale_target=("\{[\d,]+\}x|\{\{\d+(?:(?:,|->)\d+)+\})', collective.text)
    known = groups or slices
    if known is None:
        raise ValueError(f"how many devices does {collective.name} take? It says no groups that are known")
    text = known[1]
    if text.startswith("mesh"):
        sizes = dict(re.findall(r"'(\w+)'=(\d+)", text))
        return math.prod(int(sizes[axis]) for axis in re.findall(r"'(\w+)'", text.split("{")[1]))
    if text.startswith("["):
        return int(text[1:].split("]")[0].split(",")[-1])
    return len(re.findall(r"\d+", text))


def totals(found: Collection[Collective]) -> list[dict]:
    """Returns totals of collectives of the same kind, what they move and where they are."""
    groups: dict[tuple, list[Collective]] = defaultdict(list)
    for collective in found:
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
