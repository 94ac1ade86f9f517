"""A policy whose samples are stored on disk, so a killed run never pays twice for a sample."""

from __future__ import annotations

import collections
import contextlib
import hashlib
import io
import json
import os
from collections.abc import Sequence
from typing import Any, Self

from jprm.io.jsonl import dump, parse
from jprm.io.outputs import cut
from jprm.io.storage import Growing, path_of
from jprm.methods.policy.protocol import Policy, Prefix, Sample, Until
from jprm.tree import RecordError

Place = tuple[Until, str, int]


class PolicyError(ValueError):
    """The policy produced no sample."""


def prefix_key(prefix: Prefix) -> str:
    """Returns the SHA-256 hex digest of the problem and steps, under which samples are stored."""
    return hashlib.sha256(json.dumps([prefix.problem, *prefix.steps]).encode()).hexdigest()


class KeptPolicy:
    """A `Policy` that stores another policy's samples in a JSON Lines file, and samples only missing ones.

    Samples are stored before a call returns. Failed ones are not stored, so they are sampled again. Derived data, e.g.
    whether an answer is correct, are not stored either. It must be entered (`with`) before use: this creates the file
    and its folder if absent, reads it, and locks it until the end of the block. In a bucket, where the file consists of
    pieces (`jprm.io.storage.Appended`), the second concurrent writer is refused. Samples under another policy's name
    are kept in the file, and ignored. It raises when entered.

    Attributes:
      sampled: number of samples drawn by the other policy and stored by this object.

    Raises:
      RecordError: a line, named FILE:LINE, is not a sample. An incomplete last line, left by a kill, is cut off.
      ValueError: another run is writing the file.
    """

    def __init__(self, policy: Policy, path: str | os.PathLike):
        self.policy, self.path, self.name, self.sampled = policy, path_of(path), policy.name, 0
        self._kept: dict[Place, Sample] = {}
        self._file = Growing(io.BytesIO(), self.path)  # before `__enter__`
        self._held = contextlib.ExitStack()

    def __enter__(self) -> Self:
        with contextlib.ExitStack() as stack:
            self._file = stack.enter_context(self.path.growing())
            self._read()
            self._held = stack.pop_all()
        return self

    def __exit__(self, *error: Any) -> None:
        self._held.__exit__(*error)

    @property
    def answered(self) -> bool:
        """Whether any sample of this policy is stored."""
        return bool(self._kept)

    def missing(self, key: str, n: int, until: Until, seed: int) -> list[tuple[int, int]]:
        """Returns (first, count) for each run of missing numbers in seed .. seed + n - 1; [] if all are stored.

        `key` is the prefix's `prefix_key`.
        """
        return consecutive([number for number in range(seed, seed + n) if (until, key, number) not in self._kept])

    @property
    def tokens(self) -> int:
        """Generated tokens in all stored samples of this policy, also from earlier runs: their total cost."""
        return sum(sample.tokens for sample in self._kept.values())

    def kept(self, prefix: Prefix, n: int, until: Until, seed: int) -> list[Sample]:
        """Returns the stored ones among samples seed .. seed + n - 1 of a prefix, in order; may be empty."""
        key = prefix_key(prefix)
        return [self._kept[place] for i in range(seed, seed + n) if (place := (until, key, i)) in self._kept]

    def sample(self, prefixes: Sequence[Prefix], n: int, *, until: Until, seed: int) -> list[list[Sample]]:
        """See `Policy.sample`; asks the other policy only for missing samples, and passes its errors on.

        Failed samples are returned, too. After an error the samples of completed calls to it are stored. Equal prefixes
        get equal samples.
        """
        keys = [prefix_key(prefix) for prefix in prefixes]
        missing: dict[tuple[int, int], dict[str, Prefix]] = collections.defaultdict(dict)
        for key, prefix in zip(keys, prefixes, strict=True):
            for run in self.missing(key, n, until, seed):
                missing[run][key] = prefix
        failed: dict[Place, Sample] = {}
        for (first, count), asked in missing.items():
            drawn = self.policy.sample(list(asked.values()), count, until=until, seed=first)
            by_place: dict[Place, Sample] = {
                (until, key, first + i): sample
                for key, samples in zip(asked, drawn, strict=True)
                for i, sample in enumerate(samples)
            }
            failed |= {place: sample for place, sample in by_place.items() if sample.finish_reason == "error"}
            self._keep({place: sample for place, sample in by_place.items() if place not in failed})
        known = collections.ChainMap(failed, self._kept)
        return [[known[until, key, number] for number in range(seed, seed + n)] for key in keys]

    def _keep(self, samples: dict[Place, Sample]) -> None:
        self._kept |= samples
        self.sampled += len(samples)
        self._file.write("".join(dump(self._record(*entry)) + "\n" for entry in samples.items()).encode())
        self._file.flush()
        os.fsync(self._file.fileno())

    def _record(self, place: Place, sample: Sample) -> dict[str, Any]:
        until, prefix, seed = place
        kept = {name: getattr(sample, name) for name in ("steps", "tokens", "finish_reason", "logprob")}
        return {"policy": self.name, "until": until, "prefix": prefix, "seed": seed} | kept

    def _read(self) -> None:
        cut(self._file, 1)
        self._file.seek(0)
        for number, line in enumerate(self._file, start=1):
            where = f"{self.path}:{number}"
            record = parse(line, where)
            try:
                if record["policy"] == self.name:
                    kept = record["tokens"], record["finish_reason"], record["logprob"]
                    place = record["until"], record["prefix"], record["seed"]
                    self._kept[place] = Sample(tuple(record["steps"]), *kept)
            except (TypeError, KeyError, ValueError, AttributeError) as error:
                remedy = "Remove the line, or name another file."
                raise RecordError(where, "sample", f"cannot be read: {error!r}", remedy) from None


def consecutive(numbers: Sequence[int]) -> list[tuple[int, int]]:
    """Splits increasing numbers into consecutive runs, as (first, count), e.g. [3, 4, 7] into [(3, 2), (7, 1)]."""
    runs: list[tuple[int, int]] = []
    for number in numbers:
        if runs and sum(runs[-1]) == number:
            runs[-1] = (runs[-1][0], runs[-1][1] + 1)
        else:
            runs.append((number, 1))
    return runs
