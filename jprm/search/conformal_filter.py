"""The filter behind a search: it accepts a result or abstains, with a bound on the error rate of what it accepts.

The threshold comes from results on other problems whose answers are known: the lowest at which, with a stated
confidence over such calibration sets, at most a stated share of the accepted answers is wrong
(`jprm.evaluate.conformal.accept_threshold`). The bound holds for problems like those, searched in the same way.
"""

from __future__ import annotations

import os
import pathlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from jprm.evaluate.conformal import Threshold, accept_threshold
from jprm.jsonl import read_records, write_records

Path = str | os.PathLike

_COSTS = {"chosen", "answer", "score", "correct", "ended", "policy_tokens", "over_budget_tokens", "reason", "failed",
          "error", "unscored_steps", "empty", "accepted", "threshold", "confidence", "error_rate", "seed"}  # fmt: skip
"""Keys of `search` that are results, or may differ; the others say how the problems were searched."""


def calibrate(records: Sequence[Mapping[str, Any]], error_rate: float, confidence: float) -> Threshold:
    """The threshold on the chosen chain's score. A search that chose nothing accepts nothing: it is left out.

    Raises:
      ValueError: a record that is no result of a search, has a problem that another one has, or a choice whose
        correctness is not known or whose score is no probability.
    """
    scores, right, seen = [], [], set()
    for i, record in enumerate(records, start=1):
        found = _found(record, i)
        if record["problem"] in seen:
            raise ValueError(f"record {i}: problem: occurs twice; chains of one problem say less than they count for")
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
    """The record with `search.accepted`, and the threshold and its promise beside it."""
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
      ValueError: as `calibrate`; results that were searched in another way than the calibration's, or share a problem.
    """
    if len({os.path.realpath(path) for path in (input, calibration, output)}) < 3:
        raise ValueError("input, calibration and output are three files: one of them is named twice")
    known, records = (list(read_records(path)) for path in (calibration, input))
    how, problems = _one_way(known, calibration), {record["problem"] for record in known}
    other = _one_way(records, input)
    for key in sorted(how.keys() | other.keys()):
        if how.get(key) != other.get(key):
            raise ValueError(
                f"search.{key}: is {other.get(key)!r} in {os.fspath(input)} and {how.get(key)!r} in"
                f" {os.fspath(calibration)}: a threshold holds for results that were searched in the same way"
            )
    for i, record in enumerate(records, start=1):
        if record["problem"] in problems:
            raise ValueError(f"{os.fspath(input)}: record {i}: problem: is in the calibration too. Take it out of one")
    threshold = calibrate(known, error_rate, confidence)
    accepted = [accept(record, threshold) for record in records]
    pathlib.Path(output).parent.mkdir(parents=True, exist_ok=True)
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
    """How the records were searched, which is one way for all."""
    if not records:
        raise ValueError(f"{os.fspath(path)}: holds no record")
    ways = [{k: v for k, v in _found(record, i).items() if k not in _COSTS} for i, record in enumerate(records, 1)]
    for i, way in enumerate(ways, start=1):
        if way != ways[0]:
            raise ValueError(f"{os.fspath(path)}: record {i}: was searched in another way than the first")
    return ways[0]


def _found(record: Mapping[str, Any], i: int) -> Mapping[str, Any]:
    found = record.get("search")
    if not isinstance(found, Mapping) or "chosen" not in found:
        raise ValueError(f"record {i}: search: is absent; the filter takes what `jprm search` writes")
    return found


def _score(found: Mapping[str, Any], i: int) -> float | None:
    """The chosen chain's score; None where nothing was chosen, or by a vote that needs no score."""
    score = found.get("score")
    if found["chosen"] is None or score is None:
        return None
    if not 0 <= score <= 1:
        raise ValueError(f"record {i}: search.score: is {score}, no probability. Search with a rule that gives one")
    return score
