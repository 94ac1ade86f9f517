"""Interventions: the cost of a critic that stops an agent at every turn with a score below a threshold.

    over      good turns at which it intervenes (over-intervention)
    under     bad turns at which it does not (under-intervention)
    false     solved runs in which it intervenes at least once

The threshold for a task maximises balanced accuracy on the turns of other tasks, in `FOLDS` folds. Two critics need no
model: `telemetry`, a regression on the turn number, retries and errors, fitted to the labels of other tasks; and
`random`, which intervenes at random turns, as often as the scores do.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Int

from jprm.methods.evaluate import baselines
from jprm.statistics import bootstrap, numbered, weighted_mean

FOLDS = 5
CUTS = 64
"""Thresholds to try: quantiles of the scores."""


class RunOfTurns(NamedTuple):
    """One run of an agent. `bad_T` is 1 for a bad turn, 0 for another, NaN without a label.

    `problem` is the task; `telemetry_TF` has F features per turn.
    """

    problem: str
    score_T: Float[np.ndarray, " T"]
    bad_T: Float[np.ndarray, " T"]
    telemetry_TF: Float[np.ndarray, "T F"]
    solved: bool


def interventions_report(runs: Sequence[RunOfTurns], seed: int) -> dict[str, Any] | None:
    """Returns over, under and false interventions of the critics `scores`, `telemetry` and `random`.

    They are in `figures`, by critic, as `over`, `under` and `false`: fractions `{"value", "low", "high"}` with 95 %
    intervals over tasks; `false` only if a run is solved, `telemetry` only if it can be fitted. `n_good` and `n_bad`
    count turns, `n_solved` runs. Returns `None` unless at least two tasks have good turns, at least two have bad ones,
    and every turn has a score.
    """
    bad_M = np.concatenate([run.bad_T for run in runs]) if runs else np.zeros(0)
    score_M = np.concatenate([run.score_T for run in runs]) if runs else np.zeros(0)
    run_M = np.repeat(np.arange(len(runs)), [len(run.score_T) for run in runs])
    task_K = numbered([run.problem for run in runs])
    task_M = task_K[run_M]
    if np.isnan(score_M).any() or any(len(set(task_M[bad_M == kind])) < 2 for kind in (0, 1)):
        return None
    flags = {"scores": flagged(score_M, bad_M, task_M)}
    classes = [np.where(np.isnan(run.bad_T), -1, 1 - run.bad_T).astype(int) for run in runs]
    fitted = baselines.fitted([run.telemetry_TF for run in runs], classes, [run.problem for run in runs])
    if fitted is not None:
        flags["telemetry"] = flagged(np.concatenate(fitted), bad_M, task_M)
    flags["random"] = np.full(len(score_M), flags["scores"].mean())
    solved_K = np.array([run.solved for run in runs])

    def mean(value_N: np.ndarray, task_N: np.ndarray) -> dict[str, Any]:
        return bootstrap(lambda weight_RN: weighted_mean(value_N, weight_RN), task_N, seed=seed).json()

    figures: dict[str, Any] = {}
    for name, flag_M in flags.items():
        none_K = np.ones(len(runs))
        np.multiply.at(none_K, run_M, 1 - flag_M)  # the chance of a run without an intervention
        figures[name] = {
            "over": mean(flag_M[bad_M == 0], task_M[bad_M == 0]),
            "under": mean(1 - flag_M[bad_M == 1], task_M[bad_M == 1]),
        }
        if solved_K.any():
            figures[name]["false"] = mean(1 - none_K[solved_K], task_K[solved_K])
    counts = {"n_good": int((bad_M == 0).sum()), "n_bad": int((bad_M == 1).sum()), "n_solved": int(solved_K.sum())}
    return counts | {"figures": figures}


def flagged(
    score_M: Float[np.ndarray, " M"], bad_M: Float[np.ndarray, " M"], task_M: Int[np.ndarray, " M"]
) -> Float[np.ndarray, " M"]:
    """Returns 1 for turns below the threshold fitted on other folds of tasks (0 without labels there), else 0.

    `bad_M` is 1, 0, or NaN without a label; `task_M` numbers the tasks from 0.
    """
    flag_M = np.zeros(len(score_M))
    for fold in range(FOLDS):
        inside_M = task_M % FOLDS == fold
        known_M = ~inside_M & ~np.isnan(bad_M)
        if known_M.any():
            flag_M[inside_M] = score_M[inside_M] < threshold(score_M[known_M], bad_M[known_M] == 1)
    return flag_M


def threshold(score_N: Float[np.ndarray, " N"], bad_N: Bool[np.ndarray, " N"]) -> float:
    """Returns the score (a quantile of `score_N`) below which calling a turn bad has the highest balanced accuracy.

    If all turns are of one class, only the accuracy on that class counts.
    """
    cuts = np.unique(np.quantile(score_N, np.linspace(0, 1, CUTS)))
    cuts = np.append(cuts, np.nextafter(cuts[-1], np.inf))
    below_CN = score_N < cuts[:, None]
    right = sum((below_CN[:, bad_N == kind] == kind).mean(1) for kind in (True, False) if (bad_N == kind).any())
    return float(cuts[int(np.argmax(right))])
