"""Accepts the result of a search or abstains, with a bound on the error rate of accepted results.

The threshold comes from results on other problems with known answers. It is the lowest at which, with the requested
confidence over such calibration sets, at most the requested fraction of accepted answers is incorrect
(`jprm.methods.evaluate.conformal.accept_threshold`). The bound holds for problems like those, searched the same way.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from jprm.io.jsonl import write_records
from jprm.io.outputs import check_output
from jprm.io.storage import path_of
from jprm.methods.evaluate.conformal import Threshold, accept_threshold
from jprm.tree import read_records

Path = str | os.PathLike

_COSTS = {"chosen", "answer", "score", "correct", "ended", "policy_tokens", "over_budget_tokens", "reason", "failed",
          "error", "unscored_steps", "empty", "accepted", "threshold", "confidence", "error_rate", "seed"}  # fmt: skip
"""Keys of `search` that are results, or may differ. The others describe how the problems were searched."""


def calibrate(records: Sequence[Mapping[str, Any]], error_rate: float, confidence: float) -> Threshold:
    """Returns the threshold on the chosen chain's score. Searches that chose nothing are left out.

    Raises:
      ValueError: a record that is no search result, repeats a problem, or has a choice of unknown correctness or
        whose score is no probability.
    """
    scores, right, seen = [], [], set()
    for i, record in enumerate(records, start=1):
        found = _found(record, i)
        if record["problem"] in seen:
            raise ValueError(f"record {i}: problem: occurs twice; the bound needs one result per problem")
        seen.add(record["problem"])
        if (score := _score(found, i)) is None:
            continue
        if found.get("correct") is None:
            raise ValueError(
                f"record {i}: search.correct: is not known. Give the problem its `answer` and search again"
            )
        scores.append(score)
        right.append(found["correct"])
    return accept_threshold(np.array(scores), np.array(right, bool), error_rate, confidence=confidence)


def accept(record: Mapping[str, Any], threshold: Threshold) -> dict[str, Any]:
    """Returns the record with `search.accepted`, the threshold, its error rate and its confidence."""
    score = _score(_found(record, 1), 1)
    verdict = {
        "accepted": score is not None and score >= threshold.threshold,
        "threshold": threshold.to_json()["threshold"],
        "error_rate": threshold.alpha,
        "confidence": threshold.confidence,
    }
    return dict(record) | {"search": dict(record["search"]) | verdict}


def filter_file(input: Path, calibration: Path, output: Path, error_rate: float, confidence: float) -> dict[str, Any]:
    """Writes the results in `input` with `search.accepted`; returns counts and the threshold.

    Raises:
      ValueError: as `calibrate`; results that were searched differently from the calibration's, or share a problem.
    """
    check_output(output, input, calibration)
    known, records = (list(read_records(path)) for path in (calibration, input))
    how, problems = _one_way(known, calibration), {record["problem"] for record in known}
    other = _one_way(records, input)
    for key in sorted(how.keys() | other.keys()):
        if how.get(key) != other.get(key):
            raise ValueError(
                f"search.{key}: is {other.get(key)!r} in {os.fspath(input)} and {how.get(key)!r} in"
                f" {os.fspath(calibration)}: a threshold holds for results that were searched the same way"
            )
    for i, record in enumerate(records, start=1):
        if record["problem"] in problems:
            raise ValueError(f"{os.fspath(input)}: record {i}: problem: is in the calibration too. Remove it from one")
    threshold = calibrate(known, error_rate, confidence)
    accepted = [accept(record, threshold) for record in records]
    path_of(output).parent.mkdir(parents=True, exist_ok=True)
    write_records(output, accepted)
    return _counts(accepted) | {"threshold": threshold.to_json()["threshold"]}


def _counts(records: Iterable[Mapping[str, Any]]) -> dict[str, int]:
    found = [record["search"] for record in records]
    taken = [x for x in found if x["accepted"]]
    counts = {"accepted": len(taken), "abstained": len(found) - len(taken)}
    if all(x.get("correct") is not None for x in taken):
        counts["accepted_wrong"] = sum(not x["correct"] for x in taken)
    return counts


def _one_way(records: Sequence[Mapping[str, Any]], path: Path) -> dict[str, Any]:
    """Returns how the records were searched, which must be the same for all."""
    if not records:
        raise ValueError(f"{os.fspath(path)}: holds no record")
    ways = [{k: v for k, v in _found(record, i).items() if k not in _COSTS} for i, record in enumerate(records, 1)]
    for i, way in enumerate(ways, start=1):
        if way != ways[0]:
            raise ValueError(f"{os.fspath(path)}: record {i}: was searched differently from the first")
    return ways[0]


def _found(record: Mapping[str, Any], i: int) -> Mapping[str, Any]:
    found = record.get("search")
    if not isinstance(found, Mapping) or "chosen" not in found:
        raise ValueError(f"record {i}: search: is absent; the input must be of `jprm search`")
    return found


def _score(found: Mapping[str, Any], i: int) -> float | None:
    """Returns the chosen chain's score; None if nothing was chosen, or by a vote that needs no score."""
    score = found.get("score")
    if found["chosen"] is None or score is None:
        return None
    if not 0 <= score <= 1:
        raise ValueError(f"record {i}: search.score: is {score}, no probability. Search with a rule that gives one")
    return score
