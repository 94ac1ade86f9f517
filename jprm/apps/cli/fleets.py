"""Large files: `--shard I/N` and `--engine ray` of commands on records, and `jprm merge`.

jprm does not schedule. A shard is an ordinary run of the command; Ray schedules shards, scales, and restarts what died.
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
from typing import Annotated, Any, Generic, Literal, TypeVar, cast

from tyro.conf import Positional, arg

import jprm
from jprm.apps.cli.arguments import REFUSALS, first_records, print_counts
from jprm.devices import enable_compile_cache
from jprm.io import shards
from jprm.io.jsonl import read_lines
from jprm.io.outputs import Bar, check_output, input_of
from jprm.io.storage import REPORT, Place, path_of


@dataclasses.dataclass(frozen=True)
class Division:
    """
    Attributes:
      shard: Do only the records of shard I of N, counted from 0, and name the output OUT.0000I-of-0000N; `auto` and
        `auto/N` read I from a Kubernetes, Slurm or Batch job with an index. `jprm merge` makes one file of all.
      engine: Run here, or run all shards on a Ray cluster (RAY_ADDRESS, or this machine) and merge them. Every machine
        must see the files.
      shards: For ray: parts of the work. A worker that dies costs a shard's last unfinished block.
      workers: For ray: processes, at least and at most.
      gpus: For ray: GPUs of each process.
      limit: Only the first N records of the input, to try a command. OUTPUT.firstN/ gets a copy of them.
    """

    shard: Annotated[str | None, arg(metavar="I/N", help_behavior_hint="")] = None
    engine: Literal["here", "ray"] = "here"
    shards: Annotated[int | None, arg(metavar="INT", help_behavior_hint="")] = None
    workers: Annotated[tuple[int, int] | None, arg(metavar="MIN MAX", help_behavior_hint="")] = None
    gpus: Annotated[float | None, arg(metavar="FLOAT", help_behavior_hint="")] = None
    limit: Annotated[int | None, arg(metavar="N", help_behavior_hint="")] = None

    def __post_init__(self):
        asked = [name for name in ("shards", "workers", "gpus") if getattr(self, name) is not None]
        if asked and self.engine != "ray":
            raise ValueError(f"--{asked[0]} is of --engine ray")
        if self.engine == "ray" and (self.shard or not self.shards):
            raise ValueError("--engine ray runs all shards: give --shards N, and no --shard")

    @property
    def here(self) -> bool:
        """Whether one process of this machine does all records."""
        return self.shard is None and self.engine == "here"


Divided = Annotated[Division, arg(name="")]
UNDIVIDED = Division()


@dataclasses.dataclass
class RunFiles:
    """The files of one run: of a shard, or as the command line names them. `settings` are what the results depend on
    and the output's request does not hold."""

    input: Any
    output: Any
    more: list[Any]
    settings: dict[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def files(self) -> tuple[Any, Any]:
        return self.input, self.output


Work = Callable[[RunFiles], dict[str, Any]]
"""Does a part and returns what it counted. It is sent to other machines, and loads there what it needs (`Once`)."""

T = TypeVar("T")


class Once(Generic[T]):
    """Loads a model or policy at its first call, and keeps it for a process's other shards."""

    def __init__(self, make: Callable[[], T]):
        self._make, self._made = make, cast(T, None)

    def __call__(self) -> T:
        if self._made is None:
            self._made = self._make()
        return self._made


def divided(
    command: str, how: Division, work: Work, input: Any, output: Any, *more: Any, unit: int = 1, tell: bool = True
) -> None:
    """Calls `work` with the files of the command, of one shard, or on a cluster with those of every shard.

    Args:
      unit: consecutive records that stay together.
      tell: print what was counted.
    """
    if tell:
        work = functools.partial(_counted, work)
    if how.limit is not None:
        check_output(output, input, *more)
        input = first_records(input, how.limit, f"{os.fspath(output)}.first{how.limit}")
    if how.here:
        work(RunFiles(input, output, list(more)))
    else:
        _in_shards(command, how, work, input, output, more, unit)


def _in_shards(
    command: str, how: Division, work: Work, input: Any, output: Any, more: Sequence[Any], unit: int
) -> None:
    check_output(output, input, *more)
    if how.engine == "ray":  # a worker has another working folder
        input, output = path_of(input).address, path_of(output).address
        more = tuple(path_of(path).address for path in more)
    source = input_of(input)
    run = functools.partial(_run_shard, command, work, source, output, more, unit)
    if how.engine == "here":
        run(shard_of(str(how.shard)))
        return
    count, resources = how.shards or 1, {} if how.gpus is None else {"num_gpus": how.gpus}
    with Bar(f"shards of {path_of(output).name}", count) as bar:
        workers = how.workers or (1, 1)
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
    """Does a shard and writes its manifest. One without a record has an empty output."""
    begun = time.monotonic()
    part = RunFiles(None, shard.part_of(output), [shard.part_of(path) for path in more])
    part.input = shards.write_input(shard, _lines(path_of(source["input"])), source, part.output, unit)
    empty = next(shards.lines_of(part.input), None) is None
    if empty:
        part.output.write_bytes(b"")
    counts = {} if empty else work(part)
    about = {"command": command, "jprm": jprm.__version__, **part.settings}
    seconds = round(time.monotonic() - begun, 3)
    shards.write_manifest(shard, part.output, about, counts, seconds=seconds, devices=_devices())


def _lines(source: Place) -> Iterator[bytes]:
    """Yields the records of a file, or of the prepared folder with this report, each with one line end."""
    path = source.parent if source.name == REPORT else source
    return (line.rstrip(b"\r\n") + b"\n" for _, line in read_lines(path))


def _devices() -> str:
    """Returns what computed: the accelerators, or the machine's kind of processor."""
    if "jax" not in sys.modules:
        return platform.machine()
    import jax

    return f"{jax.local_device_count()} x {jax.local_devices()[0].device_kind}"


# ---- Shards on a Ray cluster.


class _Worker:
    """A process of the cluster that runs one shard after another, with what `work` loads kept between them."""

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
    """Calls `work` with 0 to count - 1 on a Ray cluster, and yields each number as its call ends, in any order.

    A shard whose node or process died is called again on another; it must continue what it finds. `work` is sent to the
    workers.

    Args:
      workers: processes, at least and at most: Ray scales between them.
      resources: of one process: `num_cpus`, `num_gpus`, `resources={"TPU": 4}`. The cluster is the one that RAY_ADDRESS
        names, or this machine.

    Raises:
      ValueError: workers or shards below 1; or what `work` refused, in its words. Other shards' files stay.
    """
    ray: Any = importlib.import_module("ray")
    ray_data: Any = importlib.import_module("ray.data")

    least, most = workers
    if not 1 <= least <= most or count < 1:
        raise ValueError(f"{count} shards on {least} to {most} workers: each is at least 1, and the first the lower")
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


# ---- What shards make together, and tables of it.


def merge(
    shards_: Annotated[Positional[tuple[str, ...]], arg(metavar="OUT.*")],
    output: Annotated[Path | None, arg(metavar="OUT", help_behavior_hint="")] = None,
    input: Annotated[Path | None, arg(metavar="F", help_behavior_hint="")] = None,
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
        input: The input that was divided, where it is in a bucket and the shards are not: nothing is downloaded because
          the shards' manifests say so.
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
    ("JOB_COMPLETION_INDEX", ""),  # Kubernetes' indexed jobs, which do not tell how many they are
    ("SLURM_ARRAY_TASK_ID", "SLURM_ARRAY_TASK_COUNT"),
    ("BATCH_TASK_INDEX", "BATCH_TASK_COUNT"),  # Google Batch, also under Cluster Toolkit
    ("CLOUD_RUN_TASK_INDEX", "CLOUD_RUN_TASK_COUNT"),
    ("AWS_BATCH_JOB_ARRAY_INDEX", "AWS_BATCH_JOB_ARRAY_SIZE"),
)
"""Environment variables in which schedulers tell a process its place."""


def shard_of(text: str, environment: Mapping[str, str] = os.environ) -> shards.Shard:
    """Returns the shard that `I/N`, `auto` or `auto/N` names.

    `auto` reads the index, and the number where N is not given, from what the scheduler sets (`INDEX_AND_COUNT`).

    Raises:
      ValueError: another form, an index out of range, or no scheduler's variables.
    """
    index, slash, count = text.partition("/")
    if index == "auto":
        index, jobs = _of_scheduler(environment)
        count = count if slash else jobs
        if not count:
            raise ValueError("--shard auto: the scheduler does not tell how many shards there are: write auto/N")
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
