"""Rollouts, drawn from a policy once and kept: a JSON Lines file keyed by policy, prefix and seed.

A batch is on disk before any of it is used, so a run that is killed and started again neither repeats a rollout nor
loses one. Outcomes are not stored: they follow from the text and the checker of answers.
"""

from __future__ import annotations

import collections
import dataclasses
import fcntl
import hashlib
import json
import os
import pathlib
from collections.abc import Callable, Sequence
from typing import Any, Self

from jprm.answers import equivalent, extract_answer
from jprm.jsonl import dump, parse
from jprm.policy.protocol import Policy, Prefix, Sample
from jprm.tree import RecordError

Grader = Callable[[Prefix, Sample, Any], bool]
"""Whether a sample that completes a prefix reaches the true answer, the third argument."""


class PolicyError(ValueError):
    """A policy that gave nothing at all."""


def reaches_answer(prefix: Prefix, sample: Sample, truth: str | float) -> bool:
    """The grader for final answers. A chain that was cut off has none, whatever its text says so far."""
    if sample.finish_reason != "stop":
        return False
    return equivalent(truth, extract_answer("\n".join(prefix.steps + sample.steps)))


def prefix_key(prefix: Prefix) -> str:
    """Identifies a prefix by its problem and its steps, as they are divided."""
    return hashlib.sha256(json.dumps([prefix.problem, *prefix.steps]).encode()).hexdigest()


class Rollouts:
    """Completions of prefixes: `draw` takes from the file what it holds and asks the policy for the rest.

    A context manager, which holds a lock on the file.

    Attributes:
      sampled: rollouts that the policy was asked for and gave, since this object was made.
      failed: rollouts that the policy marked as errors; they are not kept, so a later run asks again.

    Raises:
      RecordError: FILE:LINE of a line that is no rollout. A last line without its end is what a kill leaves: it is
        cut off.
      ValueError: a file that another run is writing.
    """

    def __init__(self, policy: Policy, path: str | os.PathLike, *, batch: int = 256):
        self.policy, self.path, self.batch = policy, pathlib.Path(path), batch
        self.sampled = self.failed = 0
        self.last_error: str | None = None
        self._kept: dict[tuple[str, int], Sample] = {}
        self._file = None

    def __enter__(self) -> Self:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._file = open(self.path, "a+b")
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._read()
        except BlockingIOError:
            self._file.close()
            raise ValueError(f"{self.path}: another run is writing it. Wait for it, or name another file") from None
        except BaseException:
            self._file.close()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        self._file.close()

    def draw(self, requests: Sequence[tuple[Prefix, int, int]]) -> list[list[Sample]]:
        """For every (prefix, start, count), the rollouts numbered start .. start + count - 1; errors are left out.

        Raises:
          PolicyError: the policy failed at every rollout of a batch; what it gave before is kept.
        """
        missing: dict[tuple[int, int], dict[str, Prefix]] = collections.defaultdict(dict)
        for prefix, start, count in requests:
            key = prefix_key(prefix)
            for first, n in runs([s for s in range(start, start + count) if (key, s) not in self._kept]):
                missing[first, n][key] = prefix
        for (first, n), prefixes in missing.items():
            size = max(1, self.batch // n)
            keys = list(prefixes)
            for at in range(0, len(keys), size):
                self._sample([(key, prefixes[key]) for key in keys[at : at + size]], first, n)
        return [
            [self._kept[key, s] for s in range(start, start + count) if (key, s) in self._kept]
            for key, start, count in ((prefix_key(prefix), start, count) for prefix, start, count in requests)
        ]

    def _sample(self, prefixes: Sequence[tuple[str, Prefix]], first: int, n: int) -> None:
        drawn = self.policy.sample([prefix for _, prefix in prefixes], n, until="end", seed=first)
        lines, good = [], 0
        for (key, _), samples in zip(prefixes, drawn, strict=True):
            for seed, sample in zip(range(first, first + n), samples, strict=True):
                if sample.finish_reason == "error":
                    self.failed += 1
                    self.last_error = sample.error
                    continue
                good += 1
                self._kept[key, seed] = sample
                rollout = {"policy": self.policy.name, "prefix": key, "seed": seed} | dataclasses.asdict(sample)
                del rollout["error"]
                lines.append(dump(rollout) + "\n")
        self._file.write("".join(lines).encode())
        self._file.flush()
        os.fsync(self._file.fileno())
        self.sampled += good
        if not good:
            raise PolicyError(
                f"policy {self.policy.name} failed at all {n * len(prefixes)} rollouts of a batch: {self.last_error}. "
                f"Rollouts drawn before are in {self.path}; the same command continues from them"
            )

    def _read(self) -> None:
        self._file.seek(0)
        whole = 0
        for number, line in enumerate(self._file, start=1):
            if not line.endswith(b"\n"):
                break
            self._keep(line, f"{self.path}:{number}")
            whole += len(line)
        self._file.truncate(whole)

    def _keep(self, line: bytes, where: str) -> None:
        record = parse(line, where)
        try:
            if record["policy"] != self.policy.name:
                return
            steps = tuple(record["steps"])
            sample = Sample(steps, record["tokens"], record["finish_reason"], record["logprob"])
            self._kept[record["prefix"], record["seed"]] = sample
        except (TypeError, KeyError, ValueError, AttributeError) as error:
            remedy = "Remove the line, or name another file for the rollouts."
            raise RecordError(where, "rollout", f"cannot be read: {error!r}", remedy) from None


def runs(numbers: Sequence[int]) -> list[tuple[int, int]]:
    """(first, count) of the runs of consecutive numbers in an increasing list."""
    runs: list[tuple[int, int]] = []
    for number in numbers:
        if runs and sum(runs[-1]) == number:
            runs[-1] = (runs[-1][0], runs[-1][1] + 1)
        else:
            runs.append((number, 1))
    return runs
