"""Parses a compiled program's text: instructions, executed computations and loop trips."""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from collections.abc import Iterator

BYTES = {"pred": 1, "s4": 0.5, "u4": 0.5, "bf16": 2, "token": 0, "opaque": 0}
"""Bytes per element, for types whose name does not end in their number of bits."""

_ARRAY = re.compile(r"([a-z]+\d*[a-z0-9]*)\[([\d,]*)\](?:\{([^{}]*)\})?")
_LINE = re.compile(r"\s*(ROOT )?%?([\w.-]+) = ")
_OPCODE = re.compile(r"\s*([\w-]+)\(")
_CALLED = re.compile(r"(calls|body|condition|to_apply|branch_computations|called_computations)=(\{[^}]*\}|%?[\w.-]+)")
_HEADER = re.compile(r"(ENTRY )?%?([\w.-]+) \(.*\{\s*$")


@dataclasses.dataclass(frozen=True)
class Array:
    """A buffer's type, shape and memory."""

    dtype: str
    shape: tuple[int, ...]
    hbm: bool  # else memory on the chip

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def bytes(self) -> float:
        digits = re.match(r"[a-z]+(\d+)", self.dtype)
        return self.size * BYTES.get(self.dtype, int(digits.group(1)) / 8 if digits else 4)

    @property
    def hbm_bytes(self) -> float:
        return self.bytes if self.hbm else 0.0


@dataclasses.dataclass(frozen=True)
class Instruction:
    name: str
    opcode: str
    arrays: tuple[Array, ...]  # of the result: one, or a tuple's
    operands: tuple[str, ...]
    inside: str  # the text in brackets: a constant's value, a parameter's number
    text: str  # the attributes
    root: bool

    def attribute(self, name: str) -> str:
        """Returns the value in `name=value`, up to the next comma or space outside brackets; "" if absent."""
        match = re.search(rf"(?:^|[ ,]){name}=(\{{[^}}]*\}}|[^,\s]+)", self.text)
        return match.group(1) if match else ""

    @functools.cached_property
    def called(self) -> dict[str, tuple[str, ...]]:
        """The names of called computations by role, e.g. `calls`, `body`, `condition`.

        {} if it calls no computation.
        """
        return {kind: tuple(re.findall(r"[\w.-]+", names)) for kind, names in _CALLED.findall(self.text)}

    @functools.cached_property
    def op_name(self) -> str:
        """Its origin in the traced function, e.g. `jit(step)/.../layers_0/while/body/dot_general`; "" if unknown."""
        match = re.search(r'op_name="([^"]*)"', self.text)
        return match.group(1) if match else ""


@dataclasses.dataclass(frozen=True)
class Computation:
    name: str
    instructions: dict[str, Instruction]

    @functools.cached_property
    def root(self) -> Instruction:
        return next(i for i in self.instructions.values() if i.root)

    @functools.cached_property
    def parameters(self) -> list[Instruction]:
        unordered = [i for i in self.instructions.values() if i.opcode == "parameter"]
        return sorted(unordered, key=lambda i: int(i.inside))

    @functools.cached_property
    def users(self) -> dict[str, list[Instruction]]:
        users: dict[str, list[Instruction]] = {name: [] for name in self.instructions}
        for instruction in self.instructions.values():
            for operand in instruction.operands:
                users[operand].append(instruction)
        return users


@dataclasses.dataclass(frozen=True)
class Module:
    computations: dict[str, Computation]
    entry: str

    def executed(self) -> Iterator[tuple[Computation, float, tuple[tuple[Computation, Instruction], ...]]]:
        """Yields (computation, number of runs, enclosing loops and calls from the outside in).

        The entry first, with 1 and (). Each loop or call comes with its own computation. Computations of fusions and
        reductions are not yielded; all branches of a conditional are. Raises UnknownTrips if a loop's trips cannot be
        read.
        """
        stack: list[tuple[str, float, tuple[tuple[Computation, Instruction], ...]]] = [(self.entry, 1.0, ())]
        while stack:
            name, times, by = stack.pop()
            computation = self.computations[name]
            yield computation, times, by
            for instruction in computation.instructions.values():
                called, path = instruction.called, (*by, (computation, instruction))
                if instruction.opcode == "while":
                    stack.append((called["body"][0], times * trips(self, computation, instruction), path))
                elif instruction.opcode in ("call", "conditional", "async-start", "call-start"):
                    names = [n for kind in ("to_apply", "calls", "branch_computations") for n in called.get(kind, ())]
                    stack += [(n, times, path) for n in names]

    def fused(self, instruction: Instruction) -> Iterator[tuple[Computation, Instruction]]:
        """Yields the instructions inside a fusion, and in nested ones, each with its computation.

        Other instructions yield no item.
        """
        for name in instruction.called.get("calls", ()) if instruction.opcode == "fusion" else ():
            for inner in self.computations[name].instructions.values():
                yield self.computations[name], inner
                yield from self.fused(inner)


def parse(text: str) -> Module:
    """Parses a compiled program's text, as from jax's `compiled.as_text()`.

    Raises ValueError if it has no entry computation, or an instruction without an operation.
    """
    computations, entry, current = {}, "", None
    for line in text.splitlines():
        if current is None:
            header = _HEADER.match(line)
            if header and " = " not in line.split("(", 1)[0]:
                current, entry = {}, header.group(2) if header.group(1) else entry
                name = header.group(2)
        elif line.startswith("}"):
            computations[name], current = Computation(name, current), None
        elif instruction := _instruction(line):
            current[instruction.name] = instruction
    if entry not in computations:
        raise ValueError("the text of the compiled program has no readable ENTRY computation")
    return Module(computations, entry)


def _closed(text: str, start: int) -> int:
    """Returns the index after the closing bracket for the one at `start`."""
    depth = 0
    for match in re.compile(r"[()]").finditer(text, start):
        depth += 1 if match.group() == "(" else -1
        if depth == 0:
            return match.end()
    return len(text)


def _instruction(line: str) -> Instruction | None:
    head = _LINE.match(line)
    if not head:
        return None
    start = head.end()
    end = _closed(line, start) if line[start] == "(" else line.index(" ", start)
    opcode = _OPCODE.match(line, end)
    if opcode is None:
        raise ValueError(f"no operation in the line {line[:200]!r} of the compiled program")
    behind = _closed(line, opcode.end() - 1)
    inside = line[opcode.end() : behind - 1]
    arrays = tuple(
        Array(dtype, tuple(map(int, shape.split(","))) if shape else (), not re.search(r"S\([1-9]", layout or ""))
        for dtype, shape, layout in _ARRAY.findall(line[start:end])
    )
    operands = tuple(re.findall(r"%([\w.-]+)", inside))
    return Instruction(
        head.group(2), opcode.group(1), arrays, operands, inside, line[behind:].lstrip(", "), bool(head.group(1))
    )


class UnknownTrips(ValueError):
    """A loop's trip count cannot be read from the program's text."""


def trips(module: Module, computation: Computation, loop: Instruction) -> int:
    """Returns how often a loop's body runs, by XLA's annotation or a counter with constant bounds and steps.

    `computation` holds the `loop`. A loop whose trips depend on the rows names a `jax.named_scope`, `expected_turns_N`:
    its trips if one chain fills a row. Raises UnknownTrips, a ValueError, if there is no such information.
    """
    known = re.search(r'"?known_trip_count"?[:=]\{"?n"?[:=]"?(\d+)', loop.text)
    if known:
        return int(known.group(1))
    if expected := re.search(r"expected_turns_(\d+)", loop.op_name):
        return int(expected.group(1))
    try:
        return _turns(module, computation, loop)
    except UnknownTrips as error:
        raise UnknownTrips(f"how often does {loop.name} ({loop.op_name}) run? {error}") from error


def _turns(module: Module, computation: Computation, loop: Instruction) -> int:
    condition, body = (module.computations[loop.called[kind][0]] for kind in ("condition", "body"))
    compare = condition.root
    while compare.opcode == "fusion":
        condition, compare = _into(module, condition, compare)
    sides = [_affine(module, condition, name) for name in compare.operands]
    limit = next((offset for index, offset in sides if index is None), None)
    index = next((index for index, offset in sides if index is not None), None)
    if compare.opcode != "compare" or limit is None or index is None:
        raise UnknownTrips("its condition is no comparison with a constant")
    counter, step = _affine(module, body, body.root.operands[index])
    first_of, first = _affine(module, computation, computation.instructions[loop.operands[0]].operands[index])
    if counter != index or not step or first_of is not None:
        raise UnknownTrips("its counter does not go from a constant by constant steps")
    if compare.attribute("direction") in ("LE", "GE"):
        limit += 1 if step > 0 else -1
    return max(0, math.ceil((limit - first) / step))


def _into(module: Module, outer: Computation, fusion: Instruction) -> tuple[Computation, Instruction]:
    """Returns a fusion's computation, with outer values in place of its parameters, and its root."""
    inner = module.computations[fusion.called["calls"][0]]
    values = {p.name: outer.instructions[name] for p, name in zip(inner.parameters, fusion.operands, strict=True)}
    # One table holds the names of both computations.
    table = dict(outer.instructions) | dict(inner.instructions)
    for name, value in values.items():
        table[name] = Instruction(name, "copy", value.arrays, (value.name,), "", "", False)
    return Computation(inner.name, table), inner.root


def _affine(module: Module, where: Computation, name: str) -> tuple[int | None, int]:
    """Returns `name` as (index or `None`, constant): an element of the loop's state plus a constant.

    Raises UnknownTrips for any other value.
    """
    i = where.instructions[name]
    if i.opcode == "constant":
        return None, int(i.inside)
    if i.opcode in ("copy", "bitcast", "convert", "copy-done", "reshape", "copy-start", "optimization-barrier"):
        return _affine(module, where, i.operands[0])
    if i.opcode == "get-tuple-element":
        source, index = where.instructions[i.operands[0]], int(i.attribute("index"))
        if source.opcode == "parameter":
            return index, 0
        if source.opcode == "tuple":
            return _affine(module, where, source.operands[index])
        if source.opcode == "fusion":
            inner, root = _into(module, where, source)
            return _affine(module, inner, root.operands[index])
    if i.opcode == "fusion":
        inner, root = _into(module, where, i)
        return _affine(module, inner, root.name)
    if i.opcode in ("add", "subtract"):
        (left, a), (right, b) = (_affine(module, where, operand) for operand in i.operands)
        if left is None or right is None:
            sign = 1 if i.opcode == "add" else -1
            if right is None or sign == 1:
                return (right if left is None else left), a + sign * b
    raise UnknownTrips(f"{name} is a {i.opcode}")
