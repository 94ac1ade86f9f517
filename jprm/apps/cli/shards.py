"""`--shard I/N` of the commands that read and write one record after another, and `jprm merge`."""

from __future__ import annotations

import dataclasses
import platform
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

from tyro.conf import Positional, arg

import jprm
from jprm.io import shards
from jprm.io.jsonl import dump
from jprm.io.outputs import check_output, input_of
from jprm.io.storage import Place, path_of

Shard = Annotated[
    str | None,
    arg(
        metavar="I/N",
        help="Do the records of shard I of N alone, counted from 0, and name the output OUT.0000I-of-0000N; `auto` and"
        " `auto/N` read I from a Kubernetes, Slurm or Batch job with an index. `jprm merge` makes one file of all.",
        help_behavior_hint="",
    ),
]


@dataclasses.dataclass
class Part:
    """The files of one run: of a shard, or as the command line names them. The command adds what it counted, and the
    settings that its output's request does not hold."""

    input: Any
    output: Any
    more: list[Any]
    counts: dict[str, Any] = dataclasses.field(default_factory=dict)
    settings: dict[str, Any] = dataclasses.field(default_factory=dict)


def sharded(command: str, shard: str | None, input: Any, output: Any, *more: Any, unit: int = 1) -> Iterator[Part]:
    """Yields the files of a run: for a shard its own, once, and none where it has no record.

    A shard whose loop ends well gets its manifest. `unit`: consecutive records that stay together.
    """
    if shard is None:
        yield Part(input, output, list(more))
        return
    chosen = shards.shard_of(shard)
    check_output(output, input, *more)
    part = Part(None, chosen.of(output), [chosen.of(each) for each in more])
    source = _source(path_of(input))
    part.input = shards.write_input(chosen, _lines(path_of(source["input"])), source, part.output, unit)
    begun = time.monotonic()
    if part.input.read_bytes():
        yield part
    else:
        part.output.write_bytes(b"")
    about = {"command": command, "jprm": jprm.__version__, **part.settings}
    shards.write_manifest(
        chosen, part.output, about, part.counts, seconds=round(time.monotonic() - begun, 3), devices=_devices()
    )


def _source(input: Place) -> dict[str, Any]:
    """Returns the request's part about an input: a prepared folder is known by its report."""
    from jprm.data import REPORT

    return input_of(input / REPORT if input.is_dir() else input)


def _lines(source: Place) -> Iterator[bytes]:
    """Yields the records of a file, or of the prepared folder with this report."""
    from jprm.data import REPORT, load

    if source.name != REPORT:
        return shards.lines_of(source)
    return (dump(record).encode() + b"\n" for record in load(source.parent))


def _devices() -> str:
    """Returns what computed: the accelerators, or the machine's kind of processor."""
    if "jax" not in sys.modules:
        return platform.machine()
    import jax

    return f"{jax.local_device_count()} x {jax.local_devices()[0].device_kind}"


def merge(
    shards_: Annotated[Positional[tuple[str, ...]], arg(metavar="OUT.*")],
    output: Annotated[Path | None, arg(metavar="OUT", help_behavior_hint="")] = None,
) -> None:
    """Make one file of the outputs of all shards, in the order of their input, and add up what they cost.

    Shards that are missing, unfinished or of another request are named, and nothing is written.

    For example:
      jprm score --model runs/prm --input pool.jsonl --output scored.jsonl --shard 0/2
      jprm score --model runs/prm --input pool.jsonl --output scored.jsonl --shard 1/2
      jprm merge scored.jsonl.*

    Args:
        shards_: The shards' outputs. Other files of their names are passed over.
        output: The file to write. Default: the shards' name without its end.
    """
    merged = shards.merge(shards_, output, _lines)
    rejected = f", {merged.rejected} rejected" if merged.rejected else ""
    print(f"{merged.path}: {merged.records} records of {merged.shards} shards{rejected}")
    if merged.counts:
        print("counts: " + ", ".join(f"{name}: {count:,}" for name, count in merged.counts.items()))
    devices = ", ".join(f"{count} on {device}" for device, count in merged.devices.items())
    print(
        f"seconds: {merged.seconds:,.1f} in all, {merged.longest_seconds:,.1f} of the longest shard; shards: {devices}"
    )
