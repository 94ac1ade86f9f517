"""A file's shards: N runs of one command on disjoint records, and their outputs' checked merge.

A shard is an ordinary run. Its input is a file with its records (OUT.00003-of-00016.input) and its output is
OUT.00003-of-00016, so it continues, refuses and locks like any other run. A finished shard has a manifest
(OUT.00003-of-00016.manifest.json) with its request, counts and cost. `merge` checks the manifests against each other
and the input, and writes one file in input order.

A record's shard depends only on its problem. So one problem's records stay together, and adding, removing or moving
records does not move others. Commands whose results depend on neighbouring records (they pack them together) divide
blocks of consecutive records instead; a block goes to the shard for its first record's problem.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import hashlib
import itertools
import json
import math
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from jprm.io.jsonl import DAMAGED, RecordError, Rejects, parse, read_lines
from jprm.io.outputs import (
    check_unchanged,
    check_version,
    continued,
    differing,
    finish,
    input_of,
    stored_request,
    write_json,
)
from jprm.io.storage import Found, Place, path_of

MANIFEST_VERSION = 1

MOST = 100_000
"""Maximum shards per output."""

_NAME = re.compile(r"(.+)\.(\d{5,})-of-(\d{5,})")


@dataclasses.dataclass(frozen=True)
class Shard:
    """Part `index` (from 0) of a file's `count` parts."""

    index: int
    count: int

    def __post_init__(self):
        if not 0 <= self.index < self.count:
            raise ValueError(f"shard {self.index}/{self.count}: the first is 0, the last {self.count - 1}")

    def part_of(self, path: str | os.PathLike) -> Place:
        """Returns the shard's own file name beside `path`, e.g. `OUT.00003-of-00016`."""
        path = path_of(path)
        return path.with_name(f"{path.name}.{self.index:05d}-of-{self.count:05d}")


# ---- Division.


def problem_of(line: bytes) -> bytes:
    """Returns bytes of a record's problem: its `problem`, a chat's first 2 prompt messages (JSON), or else the line."""
    try:
        record = parse(line, "")
    except RecordError:
        record = None
    if isinstance(record, Mapping):
        if isinstance(problem := record.get("problem"), str):
            return problem.encode()
        if isinstance(messages := record.get("messages"), list):
            role = lambda message: message.get("role") if isinstance(message, Mapping) else None  # noqa: E731
            prompt = [message for message in messages if role(message) not in ("assistant", "tool")]
            return json.dumps(prompt[:2], sort_keys=True).encode()
    return line.strip()


def divided(lines: Iterable[bytes], count: int, unit: int) -> Iterator[tuple[int, list[bytes]]]:
    """Yields (shard from 0, lines) per block of `unit` lines, in order, by its first problem's hash modulo `count`."""
    lines = iter(lines)
    while block := list(itertools.islice(lines, unit)):
        yield int.from_bytes(hashlib.sha256(problem_of(block[0])).digest()[:8], "big") % count, block


def write_input(shard: Shard, lines: Iterable[bytes], source: Mapping[str, Any], output: Place, unit: int = 1) -> Place:
    """Writes the shard's lines to `OUTPUT.input`, unless it is finished; returns this file, which may be empty.

    `source` is `jprm.io.outputs.input_of` the whole input, `lines` its lines; blocks of `unit` lines stay together.
    `output` is the shard's (`part_of`). Raises ValueError if the file is of another input or unit, or in use.
    """
    part, request = _beside(output, ".input"), {**source, "unit": unit}
    with continued(part, request) as file:
        if file is not None:
            file.truncate(0)
            for index, block in divided(lines, shard.count, unit):
                if index == shard.index:
                    file.write(b"".join(block))
            finish(file, part, request)
    return part


def write_manifest(
    shard: Shard, output: Place, settings: Mapping[str, Any], counts: Mapping[str, Any], **cost: Any
) -> None:
    """Writes a finished shard's `OUTPUT.manifest.json`, atomically, after `write_input`.

    `settings` are dependencies beside the request, `counts` numbers to sum ({}: without records, and `merge` compares
    no settings). Of `cost` it uses `seconds=3.2`, `devices="H100"`. Raises FileNotFoundError if `output` is absent.
    """
    source = stored_request(_beside(output, ".input"))
    content = {
        "version": MANIFEST_VERSION, "shard": shard.index, "shards": shard.count, "unit": source.pop("unit"),
        "source": source, "output": output.checksum(), "records": _count(output), "settings": dict(settings),
        "counts": dict(counts), **cost,
    }  # fmt: skip
    write_json(_beside(output, ".manifest.json"), content)


# ---- Merging.


@dataclasses.dataclass(frozen=True)
class Merged:
    """The merged file, and its shards' summed counts and costs."""

    path: Place
    shards: int
    records: int
    rejected: int
    counts: dict[str, float]
    seconds: float
    longest_seconds: float
    devices: dict[str, int]  # shards on each


def merge(
    paths: Sequence[str | os.PathLike],
    output: str | os.PathLike | None = None,
    lines: Callable[[Place], Iterator[bytes]] | None = None,
    input: str | os.PathLike | None = None,
) -> Merged:
    """Joins all shards' outputs into one file, in the divided input's order; blocks until it is whole.

    Has an undivided run's request, so the command without `--shard` accepts it; OUT.rejects and OUT.manifest.json are
    written beside it. If it is merged already, only the manifest is written again.

    Args:
      paths: outputs of the shards; other files that match `OUT.*` are ignored.
      output: file to write. Default: the name without e.g. `.00003-of-00016`.
      lines: reads the divided input, given its path in the request. Default: `lines_of`.
      input: the divided input. Without it, the manifests' path must be on this machine or in the shards' bucket.

    Raises:
      ValueError: shards are missing, unfinished, duplicated, or of different requests or inputs; or a result does not
        belong to the input. No file is written.
      FileNotFoundError: the divided input is gone.
    """
    stem, paths = _complete(paths)
    output = path_of(output) if output is not None else stem
    manifests = [_manifest(path) for path in paths]
    source, unit = manifests[0]["source"], manifests[0]["unit"]
    if input is None or not path_of(input).is_same(source["input"]):
        Found(_beside(paths[0], ".manifest.json"), "source.input", source["input"]).data()  # raises for an address
    request = _one_request(paths, manifests) | source
    check_unchanged(request, "Run the shards again")
    results = [_Results(path) for path in paths]
    with contextlib.ExitStack() as stack, continued(output, request) as file:
        if file is not None:
            file.truncate(0)
            rejects = stack.enter_context(Rejects(_beside(output, ".rejects")))
            try:
                for index, block in divided((lines or lines_of)(path_of(source["input"])), len(paths), unit):
                    for line in block:
                        if results[index].rejects(line):
                            rejects.add(line, RecordError(os.fspath(paths[index]), "line", "was rejected", ""))
                        else:
                            file.write(b"".join(results[index].results_of(line)))
                for shard in results:
                    shard.check_end()
            except ValueError:
                file.truncate(0)  # leaves nothing
                raise
            finish(file, output, request)
    written, refused = sum(map(_count, paths)), sum(_count(_beside(path, ".rejects")) for path in paths)
    counts = collections.Counter()
    for manifest in manifests:
        counts.update({key: value for key, value in manifest["counts"].items() if isinstance(value, int | float)})
    seconds = [float(manifest.get("seconds", 0.0)) for manifest in manifests]
    devices = collections.Counter(str(manifest.get("devices", "unknown")) for manifest in manifests)
    merged = Merged(output, len(paths), written, refused, dict(counts), sum(seconds), max(seconds), dict(devices))
    fields = {key: value for key, value in dataclasses.asdict(merged).items() if key != "path"}
    write_json(_beside(output, ".manifest.json"), {"version": MANIFEST_VERSION, **fields})
    return merged


def _count(path: Place) -> int:
    return sum(1 for _ in read_lines(path)) if path.exists() else 0


class _Results:
    """Matches a shard's results with its input: each result belongs to the next record of its problem.

    A command may write no result for a record, or several. If each problem has as many results as records, every record
    gets one; otherwise a problem's results all follow its first record.
    """

    def __init__(self, path: Place):
        self.path = path
        rejects = _beside(path, ".rejects")
        self._rejects = collections.Counter(lines_of(rejects)) if rejects.exists() else collections.Counter()
        records = collections.Counter(problem_of(line) for line in lines_of(_beside(path, ".input")))
        records.subtract(problem_of(line) for line in self._rejects.elements())
        self._one_each = +records == collections.Counter(map(problem_of, lines_of(path)))
        self._results = lines_of(path)
        self._next = next(self._results, None)

    def rejects(self, line: bytes) -> bool:
        """Returns whether the command rejected this input line; call it once per line, including equal lines."""
        refused = self._rejects[line] > 0
        self._rejects[line] -= refused
        return refused

    def results_of(self, line: bytes) -> Iterator[bytes]:
        """Yields an input line's results."""
        problem = problem_of(line)
        while self._next is not None and problem_of(self._next) == problem:
            result, self._next = self._next, next(self._results, None)
            yield result
            if self._one_each:
                return

    def check_end(self) -> None:
        if self._next is not None:
            raise ValueError(
                f"{self.path}: holds a record that its input does not have, or has them in another order. Remove it and"
                " run the shard again"
            )


def lines_of(path: Place) -> Iterator[bytes]:
    """Yields the non-blank lines, each ending in one newline. Raises as `read_lines`."""
    return (line.rstrip(b"\r\n") + b"\n" for _, line in read_lines(path))


def _complete(shards: Sequence[str | os.PathLike]) -> tuple[Place, list[Place]]:
    """Returns the shards' common name and their outputs in order; all must exist and be finished."""
    named = [(match, path_of(path)) for path in shards if (match := _NAME.fullmatch(os.fspath(path)))]
    if not named:
        raise ValueError("no shard among the files: give all of OUT.00000-of-N to the last")
    stems = sorted({(match[1], int(match[3])) for match, _ in named})
    if len(stems) > 1:
        raise ValueError(f"shards of {len(stems)} outputs: {', '.join(f'{stem} in {count}' for stem, count in stems)}."
                         " Merge each alone")  # fmt: skip
    (stem, count), doubles = stems[0], collections.Counter(match[2] for match, _ in named)
    if count > MOST:
        raise ValueError(f"{named[0][1]}: is one of {count:,} shards, and {MOST:,} at most are merged")
    if twice := [index for index, times in doubles.items() if times > 1]:
        raise ValueError(f"{stem}.{twice[0]}-of-{count:05d}: given twice")
    paths = [Shard(index, count).part_of(stem) for index in range(count)]
    missing = [path for path in paths if not (path.exists() and _beside(path, ".manifest.json").exists())]
    if missing:
        begun = [path.name for path in missing if _beside(path, ".part").exists() or path.exists()]
        more = "" if len(missing) <= 8 else f" and {len(missing) - 8} more"
        raise ValueError(
            f"{len(missing)} of {count} shards are missing: {', '.join(path.name for path in missing[:8])}{more}"
            + (f". Begun and not finished: {', '.join(begun[:8])}" if begun else "")
            + ". Run their commands again: they continue"
        )
    return path_of(stem), paths


def _beside(path: Place, end: str) -> Place:
    return path.with_name(path.name + end)


def _manifest(path: Place) -> dict[str, Any]:
    file = _beside(path, ".manifest.json")
    for input_file in (file, path):
        input_file.check_readable()
    try:
        content = json.loads(file.read_bytes())
        check_version(content["version"], MANIFEST_VERSION, file)
        if not all(isinstance(content[key], dict) for key in ("source", "settings", "counts")):
            raise TypeError("a part of it is no object")
        if not (type(content["unit"]) is int and 0 < content["unit"] < 2**31):
            raise TypeError(f"unit is {content['unit']!r}")
        seconds = content.get("seconds", 0.0)
        if type(seconds) not in (int, float) or not 0 <= float(seconds) < math.inf:
            raise TypeError(f"seconds is {seconds!r}")
        if not isinstance(content["source"]["input"], str):
            raise TypeError("source.input is no path")
        changed = content["output"] != path.checksum()
    except DAMAGED as error:
        raise ValueError(f"{file}: is no manifest of a shard ({error}). Run the shard's command again") from None
    records = _count(path)
    if changed or content.get("records", records) != records:
        raise ValueError(f"{path}: has changed since its command finished. Remove it and run the command again")
    return content


def _one_request(paths: Sequence[Place], manifests: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Returns the shards' common request, without inputs. Raises ValueError if two differ.

    A shard without records has no request.
    """
    asked = []
    for path, manifest in zip(paths, manifests, strict=True):
        stamps, request = input_of(_beside(path, ".input")), stored_request(path)
        about = {key: manifest.get(key) for key in ("source", "unit", "shards")}
        about |= {"command": manifest["settings"].get("command")}
        if manifest["counts"]:
            settings = {"settings": manifest["settings"]}
            about |= settings | {"request": {key: value for key, value in request.items() if key not in stamps}}
        asked.append(about)
    whole = next((request for request in asked if "request" in request), asked[0])
    for path, of_shard in zip(paths, asked, strict=True):
        if differ := differing({key: whole[key] for key in of_shard}, of_shard):
            raise ValueError(
                f"{path}: is of another request than the first shard ({', '.join(differ)}). Remove it and its manifest,"
                " and run its command again"
            )
    return whole.get("request", {})
