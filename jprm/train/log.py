"""The log: sums of metrics over steps, written as lines, a progress bar and the experiment's trackers."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Sequence
from typing import Any, Self

import jax
import numpy as np

from jprm import multihost
from jprm.experiment import Experiment, to_json
from jprm.io.outputs import Bar, atomic_write
from jprm.io.storage import Place
from jprm.pack import PackReport
from jprm.train.callbacks import Goodput, Trackers, versions
from jprm.train.step import Metrics

SKIPS = 10
"""Bad steps in a row after which a run that leaves them out ends: the next would be bad too."""

REWRITE_S = 10
"""Seconds between two writings of a metrics file in a bucket, which stores limit to one a second."""

Callback = Callable[[dict[str, Any]], None]


class Diverged(FloatingPointError):
    """The loss, its gradient or the parameters after the step are not finite, or a spike."""


class MetricsFile:
    """`metrics.jsonl`. On this machine every line is appended at once.

    An object of a bucket cannot grow: it is written anew, at most every `REWRITE_S` seconds and at `flush`.

    Args:
      start: the step that training continues from. Lines of later steps go: these steps are logged again.
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
    """Sums metrics over `log_every` steps and writes them: a JSON line, the progress bar, the experiment's trackers.

    Every process sums, since every process must see a step that has diverged. Process 0 writes. A context manager,
    which shows the bar and tells the trackers how the run ended.
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
        """Adds a step's sums, which become a line at every `log_every`-th step, and at this one with `close`.

        Every checkpoint closes a line, because sums are not saved: a run that was stopped logs the same lines. `more`
        goes into the line, of a loop that makes its own batches; it may have nothing to learn from in a step.
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
        self.bar.add()
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

    def write_losses(self, step: int, report: PackReport, pairs: bool) -> None:
        """Writes what the packer lost since training began, if anything: labels, and pairs where they are compared."""
        lost = {"truncated_labels": report.truncated_labelled, "pairs_lost": report.pairs_lost if pairs else 0}
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
        note = " ".join(
            f"{k} {v:.4g}"
            for k, v in values.items()
            if k in ("loss", "auroc", "valid_auroc", "tokens_per_second", "reward", "proxy", "gold", "pairs_lost")
            and v is not None
        )
        self.bar.add(0, note)
        if not self.bar.console.is_terminal:  # a log file gets lines
            print(json.dumps(values), flush=True)

    def flush(self) -> None:
        """Returns when all lines are in the run's folder."""
        if self.lines is not None:
            self.lines.flush()

    def _means(self, total: Metrics, newest: Metrics, seconds: float) -> dict[str, float | None]:
        return {
            **total.means(),
            "learning_rate": float(newest.learning_rate),
            "gradient_norm": float(total.gradient_norm) / self.steps,
            "labels": float(total.count),
            "labels_per_second": float(total.count) / seconds,
            "tokens_per_second": float(total.tokens) / seconds,
            "seconds": seconds,
            **self._step_seconds(),
            **self._utilisation(float(total.tokens)),
            **self.goodput.fractions(),
        }

    def _step_seconds(self) -> dict[str, float]:
        """Returns the median, the 95th percentile and the longest time of the line's steps."""
        if not self._times:
            return {}
        names = ("step_seconds_p50", "step_seconds_p95", "step_seconds_max")
        return dict(zip(names, np.percentile(self._times, (50, 95, 100)).tolist(), strict=True))

    def _utilisation(self, tokens: float) -> dict[str, float]:
        """Returns `mfu`: the model's FLOPs for the real tokens over what the devices could do in the steps' time.

        Where rows hold trees it is an upper estimate: their attention has fewer pairs than that of a row-long chain.
        """
        if self._least_seconds is None or not self._times:
            return {}
        filled = tokens / (self.steps * self._cells)
        return {"mfu": filled * self._least_seconds / float(np.mean(self._times))}
