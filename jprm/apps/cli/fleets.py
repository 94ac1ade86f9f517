"""Division of large files: `--shard I/N` and `--engine ray`, and `jprm merge`.

A shard is an ordinary run of the command. jprm has no scheduler of its own; Ray schedules shards, scales, and restarts
dead workers.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import os
import platform
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Generic, TypeVar, cast

from tyro.conf import Positional, arg

import jprm
from jprm.apps import FIRST
from jprm.apps.cli.arguments import REFUSALS, first_records, print_counts, settings
from jprm.devices import enable_compile_cache
from jprm.io import shards
from jprm.io.jsonl import read_lines
from jprm.io.outputs import Bar, check_output, input_of
from jprm.io.storage import REPORT, Place, path_of


@dataclasses.dataclass(frozen=True)
class Ray:
    """Settings of `--engine ray`.

    Attributes:
      shards: number of shards. If a worker dies, only the last unfinished block of its shard is repeated.
      workers: number of processes, or the fewest and the most.
      gpus: GPUs per process.
    """

    shards: int
    workers: int | tuple[int, int] = 1
    gpus: float | None = None


@dataclasses.dataclass(frozen=True)
class Division:
    """
    Attributes:
      limit: Use only the first N records of the input, to try a command. They are copied to OUTPUT.firstN/.
      shard: Process only shard I of N (I from 0), and write OUT.0000I-of-0000N. `auto` and `auto/N` read I from the
        index of a Kubernetes, Slurm or Batch job. `jprm merge` joins the outputs.
      engine: `ray shards=N` runs all shards on a Ray cluster (RAY_ADDRESS, or this machine) and merges them; all
        machines must see the files. Further settings: workers=N or workers=MIN,MAX processes, gpus=NUMBER per process.
    """

    limit: Annotated[int | None, arg(metavar="N", help_behavior_hint=""), FIRST] = None
    shard: Annotated[str | None, arg(metavar="I/N", help_behavior_hint="")] = None
    engine: Annotated[tuple[str, ...], arg(metavar="ray KEY=VALUE ...", help_behavior_hint="")] = ()

    @property
    def ray(self) -> Ray | None:
        """The settings of `--engine ray`, or `None` without it.

        Raises ValueError if the options do not fit each other.
        """
        if not self.engine:
            return None
        if self.engine[0] != "ray":
            raise ValueError(f"--engine is {self.engine[0]!r}: it must be ray, e.g. --engine ray shards=8")
        if self.shard:
            raise ValueError("--engine ray runs all shards: leave out --shard")
        return settings(Ray, self.engine[1:], "engine ray")

    @property
    def here(self) -> bool:
        """Whether this process handles all records: neither `--shard` nor `--engine` is given."""
        return self.shard is None and not self.engine


Divided = Annotated[Division, arg(name="")]
UNDIVIDED = Division()


@dataclasses.dataclass
class RunFiles:
    """Files of one run, whole or one shard. `settings` are extra settings for the manifest that affect results."""

    input: Any
    output: Any
    more: list[Any]
    settings: dict[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def files(self) -> tuple[Any, Any]:
        return self.input, self.output


Work = Callable[[RunFiles], dict[str, Any]]
"""Processes one shard and returns its counts. It is pickled for other machines, so it loads models there (`Once`)."""

T = TypeVar("T")


class Once(Generic[T]):
    """Loads a model or policy at the first call, and keeps it for later shards of the process."""

    def __init__(self, make: Callable[[], T]):
        self._make, self._made = make, cast(T, None)

    def __call__(self) -> T:
        if self._made is None:
            self._made = self._make()
        return self._made


def divided(
    command: str, how: Division, work: Work, input: Any, output: Any, *more: Any, unit: int = 1, tell: bool = True
) -> None:
    """Calls `work` on all records, on one shard, or on every shard through Ray, as `how` requests; blocks until done.

    `work` receives `RunFiles`. With a limit, the input is first copied (`first_records`). A shard writes
    `OUT.0000I-of-0000N`, its input and a manifest; Ray's shards are then merged into `output`. Raises ValueError if the
    options or paths do not fit each other, or `work` failed on Ray, and ImportError for Ray without the extra `ray`;
    other errors of `work` pass through.

    Args:
      command: name for manifests, e.g. `label mc`.
      more: further output files, which are divided too.
      unit: consecutive records that must stay in one shard.
      tell: print the counts.
    """
    if tell:
        work = functools.partial(_counted, work)
    ray = how.ray
    if how.limit is not None:
        check_output(output, input, *more)
        input = first_records(input, how.limit, f"{os.fspath(output)}.first{how.limit}")
    if how.here:
        work(RunFiles(input, output, list(more)))
    else:
        _in_shards(command, how.shard, ray, work, input, output, more, unit)


def _in_shards(
    command: str,
    shard: str | None,
    ray: Ray | None,
    work: Work,
    input: Any,
    output: Any,
    more: Sequence[Any],
    unit: int,
) -> None:
    check_output(output, input, *more)
    if ray:  # a worker has another working folder
        input, output = path_of(input).address, path_of(output).address
        more = tuple(path_of(path).address for path in more)
    source = input_of(input)
    run = functools.partial(_run_shard, command, work, source, output, more, unit)
    if not ray:
        run(shard_of(str(shard)))
        return
    count, resources = ray.shards, {} if ray.gpus is None else {"num_gpus": ray.gpus}
    workers = (ray.workers, ray.workers) if isinstance(ray.workers, int) else ray.workers
    with Bar(f"shards of {path_of(output).name}", count) as bar:
        for _ in run_shards(lambda number: run(shards.Shard(number, count)), count, workers=workers, **resources):
            bar.add()
    merge(
        tuple(os.fspath(shards.Shard(number, count).part_of(output)) for number in range(count)), input=source["input"]
    )


def _counted(work: Work, part: RunFiles) -> dict[str, Any]:
    counts = work(part)
    print_counts(counts, part.output)
    return counts


def _run_shard(
    command: str, work: Work, source: dict[str, Any], output: Any, more: Sequence[Any], unit: int, shard: shards.Shard
) -> None:
    """Processes one shard and writes its manifest. The output is empty if the shard has no records."""
    begun = time.monotonic()
    part = RunFiles(None, shard.part_of(output), [shard.part_of(path) for path in more])
    part.input = shards.write_input(shard, _lines(path_of(source["input"])), source, part.output, unit)
    empty = next(shards.lines_of(part.input), None) is None
    if empty:
        part.output.write_bytes(b"")
        print(f"{part.output}: empty; this shard has no records")
    counts = {} if empty else work(part)
    about = {"command": command, "jprm": jprm.__version__, **part.settings}
    seconds = round(time.monotonic() - begun, 3)
    shards.write_manifest(shard, part.output, about, counts, seconds=seconds, devices=_devices())


def _lines(source: Place) -> Iterator[bytes]:
    """Yields the records in a file (or in a prepared folder, given by its report), each with one line end."""
    path = source.parent if source.name == REPORT else source
    return (line.rstrip(b"\r\n") + b"\n" for _, line in read_lines(path))


def _devices() -> str:
    """Returns count and kind of the accelerators, or the processor type if jax is not loaded."""
    if "jax" not in sys.modules:
        return platform.machine()
    import jax

    return f"{jax.local_device_count()} x {jax.local_devices()[0].device_kind}"


# ---- Shards on a Ray cluster.


class _Worker:
    """Ray worker process: runs one shard after another, so that `work` keeps its loaded models."""

    def __init__(self, work: Callable[[int], Any]):
        enable_compile_cache()
        self.work = work

    def __call__(self, row: dict[str, Any]) -> dict[str, Any]:
        refusal = ""
        try:
            self.work(int(row["id"]))
        except REFUSALS as error:  # Ray would wrap it in a report of itself
            refusal = str(error) or repr(error)
        return {"shard": row["id"], "refusal": refusal}


def run_shards(
    work: Callable[[int], Any], count: int, *, workers: tuple[int, int] = (1, 1), **resources: Any
) -> Iterator[int]:
    """Calls `work(0)` to `work(count - 1)` on a Ray cluster, and yields each number when its call ends, in any order.

    If a node or process dies, its shard is called again elsewhere; `work` must continue from existing output. `work` is
    pickled and sent to the workers.

    Args:
      workers: fewest and most processes; Ray scales between them.
      resources: per process, e.g. `num_cpus`, `num_gpus`, `resources={"TPU": 4}`. The cluster is RAY_ADDRESS, or this
        machine.

    Raises:
      ValueError: workers or shards below 1, or an error that `work` raised. Outputs of other shards stay.
    """
    ray: Any = importlib.import_module("ray")
    ray_data: Any = importlib.import_module("ray.data")

    least, most = workers
    if not 1 <= least <= most or count < 1:
        raise ValueError(f"{count} shards on {least} to {most} workers: all must be at least 1, and MIN at most MAX")
    if not ray.is_initialized():
        ray.init(log_to_driver=False, logging_level="ERROR", include_dashboard=False)
    context = ray_data.DataContext.get_current()
    context.enable_progress_bars = context.print_on_execution_start = False
    pool = ray_data.ActorPoolStrategy(min_size=least, max_size=most)
    rows = ray_data.range(count, override_num_blocks=count)
    done = rows.map(_Worker, fn_constructor_args=(work,), compute=pool, **({"num_cpus": 1} | resources))
    for row in done.iter_rows():
        if row["refusal"]:
            raise ValueError(f"shard {row['shard']}/{count}: {row['refusal']}")
        yield row["shard"]


# ---- Merging shards.


def merge(
    shards_: Annotated[Positional[tuple[str, ...]], arg(metavar="OUT.*")],
    output: Annotated[Path | None, arg(metavar="OUT", help_behavior_hint="")] = None,
    input: Annotated[Path | None, arg(metavar="F", help_behavior_hint="")] = None,
) -> None:
    """Join the outputs of all shards in input order, and add up their costs.

    If shards are missing, unfinished or from another request, names them and writes nothing. A file OUT of another
    request is an error. Beside OUT are its manifest, and OUT.rejects if lines were rejected. Shards are kept.

    For example:
      jprm score --model runs/prm --input pool.jsonl --output scored.jsonl --shard 0/2
      jprm score --model runs/prm --input pool.jsonl --output scored.jsonl --shard 1/2
      jprm merge scored.jsonl.*

    Args:
        shards_: Outputs of the shards. Other files that match the pattern are ignored.
        output: File to write. Default: the shards' name without its suffix.
        input: The divided input, needed if it is in a bucket and the shards are not: manifests alone never cause a
            download.
    """
    merged = shards.merge(shards_, output, _lines, input)
    rejected = f", {merged.rejected} rejected" if merged.rejected else ""
    print(f"{merged.path}: {merged.records} records of {merged.shards} shards{rejected}")
    if merged.counts:
        print("counts: " + ", ".join(f"{name}: {count:,}" for name, count in merged.counts.items()))
    devices = ", ".join(f"{count} on {device}" for device, count in merged.devices.items())
    longest = f"{merged.longest_seconds:,.1f} of the longest shard"
    print(f"seconds: {merged.seconds:,.1f} in all, {longest}; shards: {devices}")


# ---- Which shard this process is.


INDEX_AND_COUNT = (
    ("JOB_COMPLETION_INDEX", ""),  # Kubernetes' indexed jobs have no variable for their count
    ("SLURM_ARRAY_TASK_ID", "SLURM_ARRAY_TASK_COUNT"),
    ("BATCH_TASK_INDEX", "BATCH_TASK_COUNT"),  # Google Batch, also under Cluster Toolkit
    ("CLOUD_RUN_TASK_INDEX", "CLOUD_RUN_TASK_COUNT"),
    ("AWS_BATCH_JOB_ARRAY_INDEX", "AWS_BATCH_JOB_ARRAY_SIZE"),
)
"""Environment variables with the index and count of a job, by scheduler."""


def shard_of(text: str, environment: Mapping[str, str] = os.environ) -> shards.Shard:
    """Parses `I/N` (I from 0), `auto` or `auto/N`, e.g. `0/4`.

    `auto` reads the index, and the count if N is omitted, from the scheduler's environment variables
    (`INDEX_AND_COUNT`).

    Raises:
      ValueError: wrong form, index out of range, or no scheduler variables.
    """
    index, slash, count = text.partition("/")
    if index == "auto":
        index, jobs = _of_scheduler(environment)
        count = count if slash else jobs
        if not count:
            raise ValueError("--shard auto: the scheduler sets no shard count. Write auto/N")
    if not (index.isdecimal() and count.isdecimal()):
        raise ValueError(f"--shard {text}: write I/N, with I from 0 to N - 1, or auto or auto/N in a job with an index")
    return shards.Shard(int(index), int(count))


def _of_scheduler(environment: Mapping[str, str]) -> tuple[str, str]:
    for index, count in INDEX_AND_COUNT:
        if index in environment:
            first = int(environment.get("SLURM_ARRAY_TASK_MIN", 0)) if index.startswith("SLURM") else 0
            step = int(environment.get("SLURM_ARRAY_TASK_STEP", 1)) if index.startswith("SLURM") else 1
            return str((int(environment[index]) - first) // step), environment.get(count, "")
    known = ", ".join(index for index, _ in INDEX_AND_COUNT)
    raise ValueError(f"--shard auto: none of {known} is set; write I/N, with I from 0 to N - 1")
