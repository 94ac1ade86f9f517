"""Around a long run's steps: log and trackers, time accounting, a watchdog for stalled hosts, a profile."""

from __future__ import annotations

import contextlib
import dataclasses
import faulthandler
import functools
import json
import math
import os
import pathlib
import platform
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib import metadata
from typing import Any, Literal, Protocol, Self

import jax
import numpy as np

import jprm
from jprm import multihost
from jprm.experiment import Experiment, to_json
from jprm.io.outputs import Bar, atomic_write
from jprm.io.storage import Place
from jprm.options import find_part
from jprm.pack import PackReport
from jprm.train.state import Metrics

SKIPS = 10
"""Consecutive bad steps after which a run that skips them ends."""

REWRITE_S = 10
"""Least seconds between rewrites of a metrics file in a bucket; stores limit rewrites to one per second."""

PERCENTILES = {"p50": 50, "p95": 95, "max": 100}

SHOWN = ("loss", "auroc", "valid_auroc", "tokens_per_second", "reward", "proxy", "gold", "pairs_lost")
"""Metrics in the progress bar; `metrics.jsonl` has all."""

Callback = Callable[[dict[str, Any]], None]


class Diverged(FloatingPointError):
    """The loss, its gradient or the updated parameters are not finite, or a spike."""


class MetricsFile:
    """`metrics.jsonl`. On a local disk every line is appended at once.

    A bucket's object cannot grow: it is rewritten at most every `REWRITE_S` seconds, and at `flush`.

    start: the step from which training continues. Later steps' lines are removed, because they will be logged again.
    """

    def __init__(self, path: Place, start: int):
        self.path = path
        lines = path.read_bytes().splitlines(keepends=True) if path.is_file() else []
        whole = [(line, json.loads(line)) for line in lines if line.endswith(b"\n")]  # a kill may leave half a line
        self.kept: list[dict[str, Any]] = [values for _, values in whole if values["step"] <= start]
        self._text = b"".join(line for line, values in whole if values["step"] <= start)
        self._flushed, self._since = len(self._text), time.monotonic()
        if whole:
            atomic_write(path, self._text)

    def add(self, values: dict[str, Any]) -> None:
        line = (json.dumps(values) + "\n").encode()
        if not self.path.append(line):
            self._text += line
            if time.monotonic() - self._since > REWRITE_S:
                self.flush()

    def flush(self) -> None:
        if len(self._text) > self._flushed:
            self.path.write_bytes(self._text)
            self._flushed, self._since = len(self._text), time.monotonic()


class Log:
    """Sums metrics over `log_every` steps and writes them to a JSON line, the progress bar and the trackers.

    Every process sums, because every process must notice divergence, and calls the callbacks. Process 0 writes. As a
    context manager, it shows the bar and reports the run's end to the trackers.
    """

    def __init__(
        self, workdir: Place, experiment: Experiment, start: int, goodput: Goodput,
        callbacks: Sequence[Callback] = (), least_seconds: float | None = None,
    ):  # fmt: skip
        self._times: list[float] = []  # seconds of the steps of a line
        self._least_seconds, self._cells = least_seconds, experiment.data.rows * experiment.data.tokens
        self.callbacks = callbacks
        self.every, self.goodput = experiment.log_every, goodput
        self.skips, self.skipped, self.in_a_row = experiment.optimizer.bad_steps == "skip", 0, 0
        self.last: dict[str, Any] = {}
        self.writes, self.steps_due = multihost.is_first(), experiment.steps
        self.sum: Metrics | None = None
        self.steps, self.since, self.labels = 0, time.perf_counter(), 0.0
        note = "compiling" if start < experiment.steps else "finished"
        self.bar = Bar(experiment.name, experiment.steps, start, note, shown=self.writes)
        self.lines: MetricsFile | None = None  # of process 0
        if self.writes:
            self.lines = MetricsFile(workdir / "metrics.jsonl", start)
            for values in self.lines.kept:
                self.last |= values
        self.trackers: Trackers | None = None  # of process 0

        def track() -> None:
            config = {"experiment": to_json(experiment), "versions": versions()}
            self.trackers = Trackers(experiment.trackers, workdir, experiment.name, config, start)

        if experiment.trackers:
            multihost.first(track)

    def __enter__(self) -> Self:
        self.bar.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> None:
        self.bar.__exit__(kind, error, trace)
        self.flush()
        if self.trackers:
            whole = self.last.get("step", 0) >= self.steps_due
            self.trackers.close("failed" if kind else "finished" if whole else "stopped")

    def add(
        self, step: int, metrics: Metrics, checkpoints, *, close: bool = False, more: dict[str, Any] | None = None
    ) -> None:
        """Waits for a step's sums and adds them; writes a line at every `log_every`-th step, or now with `close`.

        Every checkpoint must close a line, because sums are not saved; a stopped run then logs the same lines.
        `more` is added to the line, by a loop with its own batches, which may have steps without labels.
        `checkpoints` are the run's, from which an error names the last.
        Raises Diverged for a bad step that is not skipped; ValueError if a line without `more` has no labels.
        """
        metrics = jax.tree.map(np.asarray, metrics)
        left_out = bool(metrics.skipped)
        self.in_a_row = self.in_a_row + 1 if left_out else 0
        finite = all(map(math.isfinite, (metrics.loss, metrics.gradient_norm, metrics.parameter_norm)))
        if self.in_a_row >= SKIPS or (left_out and not self.skips) or not (left_out or finite):
            good = f"step {checkpoints.latest.step}" if checkpoints.latest else "none yet"
            raise Diverged(
                f"step {step}: loss {float(metrics.loss)}, gradient norm {float(metrics.gradient_norm)}, norm of the"
                f" parameters after it {float(metrics.parameter_norm)}{', a spike' if finite else ''}"
                f"{f', the {SKIPS}th bad step in a row' if self.in_a_row >= SKIPS else ''}; last good checkpoint:"
                f" {good}. Lower optimizer.learning_rate or clip_norm, look at the data of this step"
                f"{'' if self.skips else ', or set optimizer.bad_steps=skip'}"
            )
        if (seconds := self.goodput.step(counts=not left_out)) is not None:
            self._times.append(seconds)
        self.bar.add(1, "" if self.bar.tasks[0].description == "compiling" else None)
        if left_out:
            self.skipped += 1
        else:
            self.labels += float(metrics.count)
            self.sum = metrics if self.sum is None else jax.tree.map(np.add, self.sum, metrics)
            self.steps += 1
        if close or step % self.every == 0:
            if self.steps and self.labels == 0 and more is None:
                raise ValueError(
                    f"no labelled step in {self.steps} updates: data.supervise and target leave every step of the data"
                    " without a label; `outcome` needs records with `correct`"
                )
            now = time.perf_counter()
            means = {} if self.sum is None else self._means(self.sum, metrics, now - self.since)
            skips = {"skipped_steps": self.skipped} if self.skips else {}
            self.write({"step": step, **(more or {}), **means, **skips})
            self.sum, self.steps, self.skipped, self.since, self._times = None, 0, 0, now, []

    def write_losses(self, step: int, report: PackReport, pairs: bool | Literal["problem"]) -> None:
        """Writes a line with `truncated_labels` and `pairs_lost` since training began, each if above 0, as `write`.

        `pairs`: whether the objective compares alternatives, or all steps of a "problem".
        """
        apart = report.problem_pairs_lost if pairs == "problem" else report.pairs_lost if pairs else 0
        lost = {"truncated_labels": report.truncated_labelled, "pairs_lost": apart}
        if any(lost.values()):
            self.write({"step": step, **{name: count for name, count in lost.items() if count}})

    def write(self, values: dict[str, Any]) -> None:
        self.last |= values
        for callback in self.callbacks:
            callback(values)
        if self.lines is None:
            return
        self.lines.add(values)
        if self.trackers:
            self.trackers.log(values)
        shown = {name.replace("_", " "): value for name, value in values.items() if name in SHOWN and value is not None}
        self.bar.add(0, ", ".join(f"{name} {v:,.0f}" if v >= 1000 else f"{name} {v:.3g}" for name, v in shown.items()))

    def flush(self) -> None:
        if self.lines is not None:
            self.lines.flush()

    def _means(self, total: Metrics, newest: Metrics, seconds: float) -> dict[str, float | None]:
        times, least = self._times, self._least_seconds
        filled = float(total.tokens) / (self.steps * self._cells)  # if rows hold trees, `mfu` is an upper bound
        return {
            **total.means(),
            "learning_rate": float(newest.learning_rate),
            "gradient_norm": float(total.gradient_norm) / self.steps,
            "labels": float(total.count),
            "labels_per_second": float(total.count) / seconds,
            "tokens_per_second": float(total.tokens) / seconds,
            "seconds": seconds,
            **{f"step_seconds_{x}": float(np.percentile(times, p)) for x, p in PERCENTILES.items() if times},
            **({"mfu": filled * least / float(np.mean(times))} if least is not None and times else {}),
            **self.goodput.fractions(),
        }


# ------------------------------------------------------------------------------------------------------------- trackers
#
# They take a run's metrics beside `metrics.jsonl`. A tracker is a function from a `TrackedRun` to a `Tracker`: one of
# `TRACKERS`, or the user's own as `module:NAME`.

IDS = "trackers.json"
"""The file in a run's folder with each tracker's id for the run."""

Status = Literal["finished", "stopped", "failed"]


@dataclasses.dataclass(frozen=True)
class TrackedRun:
    """A tracker's information about its run.

    config: JSON with "experiment" (its configuration) and "versions" (library versions, and jprm's git commit).
    step: the step from which training continues. A tracker may have seen later steps, which are logged again.
    id: `Tracker.id` from this run's first start; empty for a new run.
    """

    folder: Place
    name: str
    config: Mapping[str, Any]
    step: int
    id: str


class Tracker(Protocol):
    """Takes one run's metrics. An exception, also on opening, ends the tracker and not the run."""

    id: str

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Takes the numbers by name from one `metrics.jsonl` line, without `step`; a step may have several lines."""
        ...

    def close(self, status: Status) -> None: ...


TRACKERS: dict[str, Callable[[TrackedRun], Tracker] | str] = {
    "tensorboard": "jprm.apps.trackers:TensorBoard",
    "wandb": "jprm.apps.trackers:WandB",
    "mlflow": "jprm.apps.trackers:MLflow",
}
"""Trackers by name. Each needs the pip extra with its name."""


class Trackers:
    """One run's open trackers; each continues its own run if `folder` has its id.

    Raises ValueError for an unknown tracker, or one whose package is not installed.
    """

    def __init__(self, names: Sequence[str], folder: Place, name: str, config: Mapping[str, Any], step: int):
        makers = {key: find_part(key, TRACKERS, "trackers") for key in names}
        if wrong := [key for key, make in makers.items() if not callable(make)]:
            raise ValueError(f"trackers={wrong[0]!r} is not a function from a TrackedRun to a Tracker")
        path = folder / IDS
        ids = json.loads(path.read_text()) if path.is_file() else {}
        self._open: dict[str, Tracker] = {}
        for key, make in makers.items():
            try:
                self._open[key] = make(TrackedRun(folder, name, config, step, ids.get(key, "")))
            except ModuleNotFoundError as error:
                hint = f"pip install 'jax-prm[{key}]'" if key in TRACKERS else "install it"
                raise ValueError(f"trackers={key!r} needs {error.name}, which is not installed: {hint}") from error
            except Exception as error:  # of any class, such as that of a store that the package no longer writes
                _left_out(key, error)
        if new := {key: tracker.id for key, tracker in self._open.items() if tracker.id}:
            atomic_write(path, json.dumps(ids | new, indent=2) + "\n")

    def log(self, values: Mapping[str, Any]) -> None:
        numbers = {
            name: value for name, value in values.items()
            if name != "step" and isinstance(value, int | float) and not isinstance(value, bool)
        }  # fmt: skip
        for key, tracker in list(self._open.items()):
            self._guarded(key, lambda tracker=tracker: tracker.log(values["step"], numbers))

    def close(self, status: Status) -> None:
        for key, tracker in list(self._open.items()):
            self._guarded(key, lambda tracker=tracker: tracker.close(status))

    def _guarded(self, key: str, call: Callable[[], None]) -> None:
        """Calls a tracker. If it fails in any way, it is dropped, so the run goes on."""
        try:
            call()
        except Exception as error:
            self._open.pop(key)
            _left_out(key, error)


def _left_out(key: str, error: Exception) -> None:
    print(f"tracker {key}: {type(error).__name__}: {error}; the run goes on without it, in metrics.jsonl")


# -------------------------------------------------------------------------------------------------- where the time goes


@dataclasses.dataclass
class Goodput:
    """Seconds in productive steps, over the seconds since the run first started, stops included.

    Other seconds are `spent` by class: starting (loading and restoring), compiling (a start's first step), input
    (waiting for rows while the devices are idle), saving and validating. The remainder is lost: stops, queues, and
    repeated steps after a kill. The sums are saved with the checkpoint.
    """

    began: float = dataclasses.field(default_factory=lambda: time.time())
    productive: float = 0.0
    spent: dict[str, float] = dataclasses.field(default_factory=dict)
    _mark: float | None = dataclasses.field(default=None, init=False)  # when the last step ended
    _waited: float = dataclasses.field(default=0.0, init=False)  # for input, since then

    def step(self, counts: bool = True) -> float | None:
        """Ends a step; returns the seconds since the last one or `rest` (`None` at first).

        With `counts` they are added to the productive ones, except seconds spent on `input`.
        """
        now = time.perf_counter()
        spent = None if self._mark is None else now - self._mark
        if counts and spent is not None:
            self.productive += max(0.0, spent - self._waited)
        self._mark, self._waited = now, 0.0
        return spent

    def rest(self) -> None:
        """Discards the time since the last step."""
        self._mark, self._waited = time.perf_counter(), 0.0

    def add(self, name: str, seconds: float) -> None:
        """Counts seconds of a class, by any name; `input` seconds are subtracted from the step's time."""
        self.spent[name] = self.spent.get(name, 0.0) + seconds
        if name == "input":
            self._waited += seconds

    @contextlib.contextmanager
    def doing(self, name: str) -> Iterator[None]:
        """Counts the block's seconds under a class."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.add(name, time.perf_counter() - start)

    @property
    def saved(self) -> dict[str, Any]:
        """The arguments to restore this object: `began` (Unix time), `productive`, `spent` (by class)."""
        return {"began": self.began, "productive": self.productive, "spent": self.spent}

    def fractions(self) -> dict[str, float]:
        """Returns `goodput` and, if seconds are `spent`, `lost_CLASS` by class (e.g. `lost_input`), `lost_stops`.

        They are fractions of the time since `began`, and sum to 1.
        """
        total = max(time.time() - self.began, 1e-9)
        shares = {f"lost_{name}": seconds / total for name, seconds in sorted(self.spent.items())}
        good = self.productive / total
        rest = {"lost_stops": max(0.0, 1 - good - sum(shares.values()))} if shares else {}
        return {"goodput": good, **shares, **rest}


# -------------------------------------------------------------------------------------------------------- stalled hosts

HEARTBEATS = "heartbeats"

START = 12
"""A start may take this many times `stall_seconds` before its first step is done: an hour by default."""


class Watchdog:
    """If several processes make no step for `seconds` (0: never), each reports on stderr which process is late.

    Each process writes its position to a small file in the run's folder. With `abort`, a process without a step for a
    tenth longer writes its threads' stacks and exits with status 1, even if its main thread is stuck, so the launcher
    restarts it. (The timer is a C thread, which needs no Python lock.) A start, which loads and compiles, may
    take `START` times as long.
    """

    def __init__(self, workdir: Place, seconds: float, action: Literal["report", "abort"] = "report"):
        self.folder, self.seconds, self._aborts = workdir / HEARTBEATS, seconds, action == "abort" and seconds > 0
        self._place: tuple[int, str, float] = (0, "the start", time.time())
        self._first: int | None = None  # step of this start
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def at(self, step: int, doing: str) -> None:
        """Records that the main thread begins `doing` (e.g. `data`, `step`) at this step (from 1); restarts time."""
        self._place = (step, doing, time.time())
        self._first = step if self._first is None else self._first
        self._arm()

    def _arm(self) -> None:
        """Ends the process 10% later than its watchdog reports, unless this is called again before."""
        if self._aborts:
            starting = self._first is None or self._place[0] <= self._first
            limit = 1.1 * self.seconds * (START if starting else 1)
            faulthandler.dump_traceback_later(limit, exit=True, file=sys.__stderr__ or sys.stderr)

    def __enter__(self) -> Watchdog:
        self._arm()
        if self.seconds and jax.process_count() > 1:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._beat()
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._aborts:
            faulthandler.cancel_dump_traceback_later()
        self._over.set()
        if self._thread.is_alive():
            self._thread.join()

    def _watch(self) -> None:
        reported = None
        while not self._over.wait(min(10.0, self.seconds / 4)):
            with contextlib.suppress(OSError):  # this thread does not report a full or absent disk
                self._beat()
                place = self._place
                if time.time() - place[2] > self.seconds and place != reported:
                    reported = place
                    sentence = held_up(read_beats(self.folder, jax.process_count()), time.time(), self.seconds)
                    print(f"watchdog: {sentence}", file=sys.stderr, flush=True)

    def _beat(self) -> None:
        step, doing, since = self._place
        beat = {"step": step, "doing": doing, "since": since, "time": time.time()}
        beat["waits"] = multihost.waiting.is_set()
        beat |= {"host": socket.gethostname(), "pid": os.getpid()}
        atomic_write(self.folder / f"{jax.process_index()}.json", json.dumps(beat))


def read_beats(folder: Place, count: int) -> dict[int, dict[str, Any] | None]:
    """Returns each process's last heartbeat (0 to `count` - 1) in WORKDIR/heartbeats, `None` if it cannot be read.

    Keys: `step`, `doing`, `since` and `time` (Unix time), `waits` (for other processes), `host`, `pid`.
    """
    beats: dict[int, dict[str, Any] | None] = {}
    for index in range(count):
        try:
            beats[index] = json.loads((folder / f"{index}.json").read_bytes())
        except (OSError, ValueError):
            beats[index] = None
    return beats


def held_up(beats: Mapping[int, dict[str, Any] | None], now: float, seconds: float) -> str:
    """Returns a sentence naming the processes for which the others wait, from heartbeats of `read_beats` at Unix time
    `now`.

    These are the processes silent for `seconds`; else the ones at the earliest step; else, if all are at the same step,
    the ones still waiting for data; else the ones that have not yet shared a value. If no process differs, the sentence
    names the shared causes.
    """
    silent = [i for i, beat in beats.items() if beat is None or now - beat["time"] > seconds]
    heard = {i: beat for i, beat in beats.items() if beat is not None and i not in silent}
    furthest = max((beat["step"] for beat in heard.values()), default=0)
    behind = [i for i, beat in heard.items() if beat["step"] < furthest]
    if not behind:
        behind = [i for i, beat in heard.items() if beat["doing"] == "data"]
    if not behind:
        behind = [i for i, beat in heard.items() if not beat.get("waits")]
    start = f"no step for {seconds:g} s at step {furthest}: "
    if silent:
        return start + "no heartbeat from " + ", ".join(_who(i, beats[i], now) for i in silent)
    if behind and len(behind) < len(heard):
        return start + "the others wait for " + ", ".join(_who(i, beats[i], now) for i in behind)
    doing = " and ".join(sorted({beat["doing"] for beat in heard.values()}))
    return start + f"all {len(heard)} processes are in the same place ({doing}): compilation, devices, network or disk"


def _who(index: int, beat: dict[str, Any] | None, now: float) -> str:
    if beat is None:
        return f"process {index}"
    spent = f"at step {beat['step']} ({beat['doing']}) for {now - beat['since']:.0f} s"
    return f"process {index} on {beat['host']}, pid {beat['pid']}, {spent}"


# ------------------------------------------------------------------------------------------------- profile and versions

PROFILE = "profile"


class Profile:
    """Traces steps window[0] to window[1] into the run's folder `profile`, in process 0; (0, 0) traces none.

    `close` ends a trace that an error interrupts. A run that continues inside the window traces the remaining steps.
    """

    def __init__(self, workdir: Place, window: tuple[int, int]):
        self.folder, self.window, self._trace = workdir / PROFILE, window, contextlib.ExitStack()
        self._tracing = False
        self.close = self._trace.close

    def before(self, step: int) -> None:
        if not self._tracing and self.window[0] <= step <= self.window[1] and multihost.is_first():
            jax.profiler.start_trace(self._trace.enter_context(self.folder.filling()))
            self._trace.callback(jax.profiler.stop_trace)
            self._tracing = True

    def after(self, step: int, metrics: Any) -> None:
        """If the window ends at this step, waits for the devices to compute `metrics` and ends the trace."""
        if self._tracing and step >= self.window[1]:
            jax.block_until_ready(metrics)
            self._tracing = False
            self.close()


@functools.cache
def versions() -> dict[str, str | None]:
    """Returns versions by library, of `python`, of `jprm`, and its `commit`: of the checkout (by git), else
    JPRM_COMMIT, else `None`. The result is cached and must not be changed.

    `libtpu` and jax's CUDA plugins, which compile the step, are included if installed.
    """
    commit, checkout = os.environ.get("JPRM_COMMIT") or None, pathlib.Path(jprm.__file__).parent.parent
    if (checkout / ".git").exists():
        describe = ["git", "-C", str(checkout), "describe", "--always", "--dirty", "--abbrev=40"]
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            commit = subprocess.run(describe, capture_output=True, text=True, timeout=30, check=True).stdout.strip()
    libraries = {name: metadata.version(name) for name in ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint")}
    for name in COMPILERS:
        with contextlib.suppress(metadata.PackageNotFoundError):
            libraries[name] = metadata.version(name)
    return {"jprm": jprm.__version__, "commit": commit, "python": platform.python_version(), **libraries}


COMPILERS = ("jax", "jaxlib", "libtpu", "jax-cuda12-plugin", "jax-cuda13-plugin")
"""The distributions that compile a step, on CPUs, TPUs and GPUs."""


def changed_compiler(before: Mapping[str, str | None]) -> str | None:
    """Returns a sentence naming the compilers changed during a run, or `None`.

    `before` is an earlier result of `versions`. Version 0.1 recorded only jax and jaxlib: an unknown version does not
    count as changed.
    """
    now = versions()
    changed = [f"{name} {before[name]} -> {now[name]}" for name in COMPILERS
               if before.get(name) and now.get(name) and before[name] != now[name]]  # fmt: skip
    if not changed:
        return None
    return f"the compiler changed since the last checkpoint ({', '.join(changed)}): later steps may round otherwise"
