"""Rollouts: prefixes completed to the end, sampled in batches and cached (`jprm.methods.policy.sample_cache`)."""

from __future__ import annotations

import collections
import os
from collections.abc import Sequence
from typing import Self

from jprm.methods.policy.protocol import Policy, Prefix, Sample
from jprm.methods.policy.sample_cache import KeptPolicy, PolicyError, prefix_key


class Rollouts:
    """Completions of prefixes: `draw` takes rollouts from the file and samples the missing ones.

    A context manager that opens the file as `KeptPolicy` does, with its errors.

    Attributes:
      failed: rollouts that the policy marked as errors. They are not kept, so that a later run samples them again.
      last_error: the message of the last one.
    """

    def __init__(self, policy: Policy, path: str | os.PathLike, *, batch: int = 256):
        self._policy, self._batch = KeptPolicy(policy, path), batch
        self.failed, self.last_error = 0, None
        self._failed_in_a_row = 0  # prefixes

    @property
    def sampled(self) -> int:
        """Rollouts that the policy has sampled for this object."""
        return self._policy.sampled

    def __enter__(self) -> Self:
        self._policy.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._policy.__exit__(*error)

    def draw(self, requests: Sequence[tuple[Prefix, int, int]], *, tolerated: int = 0) -> list[list[Sample]]:
        """Returns, for every (prefix, start, count), rollouts start .. start + count - 1 without the failed ones.

        A batch is on disk before any of it is used.

        Args:
          tolerated: prefixes in a row at which a policy that has answered before may fail.

        Raises:
          PolicyError: the policy failed at every rollout of a batch and of more prefixes than that. Earlier batches are
            kept.
        """
        missing: dict[tuple[int, int], dict[str, Prefix]] = collections.defaultdict(dict)
        for prefix, start, count in requests:
            key = prefix_key(prefix)
            for run in self._policy.missing(key, count, "end", start):
                missing[run][key] = prefix
        for (first, n), prefixes in missing.items():
            size, asked = max(1, self._batch // n), list(prefixes.values())
            for at in range(0, len(asked), size):
                self._sample(asked[at : at + size], first, n, tolerated)
        return [self._policy.kept(prefix, count, "end", start) for prefix, start, count in requests]

    def _sample(self, prefixes: Sequence[Prefix], first: int, n: int, tolerated: int) -> None:
        drawn = [sample for each in self._policy.sample(prefixes, n, until="end", seed=first) for sample in each]
        errors = [sample.error for sample in drawn if sample.finish_reason == "error"]
        if errors:
            self.failed += len(errors)
            self.last_error = errors[-1]
        self._failed_in_a_row = self._failed_in_a_row + len(prefixes) if len(errors) == len(drawn) else 0
        if self._failed_in_a_row > (tolerated if self._policy.answered else 0):
            raise PolicyError(
                f"policy {self._policy.name} failed at all {len(drawn)} rollouts of a batch: {self.last_error}. "
                f"Earlier rollouts are in {self._policy.path}; the same command continues from them"
            )
