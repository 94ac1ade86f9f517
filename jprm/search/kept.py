"""A policy whose samples are kept on disk, so that a search that is killed pays for none of them twice."""

from __future__ import annotations

import collections
import dataclasses
import fcntl
import os
import pathlib
from collections.abc import Sequence
from typing import Any, Literal, Self

from jprm.jsonl import dump, parse
from jprm.label.rollouts import prefix_key, runs
from jprm.policy.protocol import Policy, Prefix, Sample
from jprm.tree import RecordError


class KeptPolicy:
    """A `Policy` that asks another one, and answers from a JSON Lines file what that one has answered before.

    A call's samples are on disk before it returns; those that failed are not kept, so they are asked for again. A
    context manager, which holds a lock on the file.

    Attributes:
      sampled: samples that the other policy gave since this object was made.

    Raises:
      RecordError: FILE:LINE of a line that is no sample. A last line without its end is what a kill leaves: it is cut
        off.
      ValueError: a file that another run is writing.
    """

    def __init__(self, policy: Policy, path: str | os.PathLike):
        self.policy, self.path, self.name, self.sampled = policy, pathlib.Path(path), policy.name, 0
        self._kept: dict[tuple[str, str, int], Sample] = {}
        self._file = None

    def __enter__(self) -> Self:
        self._file = open(self.path, "a+b")
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._read()
        except BlockingIOError:
            self._file.close()
            raise ValueError(f"{self.path}: another run is writing it. Wait for it, or name another output") from None
        except BaseException:
            self._file.close()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        self._file.close()

    def sample(
        self, prefixes: Sequence[Prefix], n: int, *, until: Literal["step", "end"], seed: int
    ) -> list[list[Sample]]:
        numbers = range(seed, seed + n)
        keys = [prefix_key(prefix) for prefix in prefixes]
        missing: dict[tuple[int, int], dict[str, Prefix]] = collections.defaultdict(dict)
        for key, prefix in zip(keys, prefixes, strict=True):
            for run in runs([number for number in numbers if (until, key, number) not in self._kept]):
                missing[run][key] = prefix
        failed: dict[tuple[str, str, int], Sample] = {}
        lines = []
        for (first, count), asked in missing.items():
            drawn = self.policy.sample(list(asked.values()), count, until=until, seed=first)
            for key, samples in zip(asked, drawn, strict=True):
                for number, sample in zip(range(first, first + count), samples, strict=True):
                    place = (until, key, number)
                    if sample.finish_reason == "error":
                        failed[place] = sample
                        continue
                    self._kept[place] = sample
                    lines.append(dump(_record(self.name, place, sample)) + "\n")
        self._file.write("".join(lines).encode())
        self._file.flush()
        os.fsync(self._file.fileno())
        self.sampled += len(lines)
        places = [[(until, key, number) for number in numbers] for key in keys]
        return [[failed.get(place) or self._kept[place] for place in each] for each in places]

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
            if record["policy"] == self.name:
                sample = Sample(tuple(record["steps"]), record["tokens"], record["finish_reason"], record["logprob"])
                self._kept[record["until"], record["prefix"], record["seed"]] = sample
        except (TypeError, KeyError, ValueError, AttributeError) as error:
            remedy = "Remove the line, or name another output."
            raise RecordError(where, "sample", f"cannot be read: {error!r}", remedy) from None


def _record(name: str, place: tuple[str, str, int], sample: Sample) -> dict[str, Any]:
    until, prefix, seed = place
    record = {"policy": name, "until": until, "prefix": prefix, "seed": seed} | dataclasses.asdict(sample)
    del record["error"]
    return record
