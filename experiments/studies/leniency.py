"""How many gold labels correct lenient judges, by how lenient they are: the bias and the log loss, simulated.

    python -m experiments.studies.leniency

Judges label 1,000 steps, 30 % of them wrong, and k steps drawn at random have gold labels. Figures are of 600 other
steps, means of 20 runs with 95 % intervals. In the first two tables five judges find 90 % of one half of the errors and
of the other half the fraction in the column's head, the same half for all, which Dawid and Skene's model takes for
correctness. In the third, one judge of four is lenient, and the model knows.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from jaxtyping import Int
from rich.console import Console

from jprm.methods.evaluate.blocks import Table, show
from jprm.methods.label.crowd import corrected, correction, dawid_skene, majority

STEPS, RUNS, WRONG = 1000, 20, 0.3
HARD = (0.9, 0.45, 0.3, 0.15, 0.05)
GOLD = (0, 10, 20, 50, 100, 200, 400)

FIVE = ([0.9] * 5, [0.03] * 5)
ONE_LENIENT = ([0.1, 0.85, 0.85, 0.85], [0.02, 0.15, 0.15, 0.15])
"""Which fraction of errors each judge finds, and of correct steps calls wrong."""

Judges = tuple[Sequence[float], Sequence[float]]


def judged(
    rng: np.random.Generator, judges: Judges, hard: float
) -> tuple[Int[np.ndarray, " N"], Int[np.ndarray, "N J"]]:
    """Returns which steps are correct, and the verdicts; of one half of the errors each judge finds at most `hard`."""
    found_J, alarm_J = np.array(judges[0]), np.array(judges[1])
    correct_N = (rng.random(STEPS) >= WRONG).astype(int)
    hard_N = rng.random(STEPS) < 0.5
    found_NJ = np.where(hard_N[:, None], np.minimum(found_J, hard), found_J)
    alarm_NJ = np.where(correct_N[:, None] == 1, alarm_J, found_NJ)
    return correct_N, 1 - (rng.random(alarm_NJ.shape) < alarm_NJ).astype(int)


def simulated(judges: Judges, hard: float) -> np.ndarray:
    """Returns accuracy, log loss and bias of the majority, and of the model with each number of gold labels, by run."""
    told_RKM = np.zeros((RUNS, 1 + len(GOLD), 3))
    for run in range(RUNS):
        rng = np.random.default_rng(run)
        correct_N, verdict_NJ = judged(rng, judges, hard)
        p_N = dawid_skene(verdict_NJ).posterior_NC[:, 1]
        order = rng.permutation(STEPS)
        rest, golds = order[max(GOLD) :], [order[:gold] for gold in GOLD]
        labels = [corrected(p_N, *correction(p_N, correct_N[index_K], index_K)) for index_K in golds]
        for k, q_N in enumerate([majority(verdict_NJ, 2)[:, 1], *labels]):
            right_N, q_N = correct_N[rest], np.clip(q_N[rest], 0.01 if not k else 0, 0.99 if not k else 1)
            loss = -np.log(np.where(right_N == 1, q_N, 1 - q_N)).mean()
            told_RKM[run, k] = np.mean((q_N >= 0.5) == right_N), loss, q_N.mean() - right_N.mean()
    return told_RKM


def main() -> None:
    lenient = [_cells(simulated(FIVE, hard)) for hard in HARD]
    names = ["majority", "model", *(f"with {k} gold labels" for k in GOLD[1:])]
    for m, title in ((2, "fraction correct, less the true one"), (1, "log loss")):
        rows = [[name, *(cells[k][m] for cells in lenient)] for k, name in enumerate(names)]
        show([Table(title, ("", *(f"find {hard:.0%}" for hard in HARD)), rows)], Console(width=140))
    rows = [[name, *cells] for name, cells in zip(names, _cells(simulated(ONE_LENIENT, 1.0)), strict=True)]
    show([Table("one of four lenient", ("", "accuracy", "log loss", "bias"), rows)], Console(width=140))


def _cells(told_RKM: np.ndarray) -> list[list[str]]:
    mean_KM, error_KM = told_RKM.mean(0), 1.96 * told_RKM.std(0, ddof=1) / RUNS**0.5
    return [[f"{m:+.3f} ± {e:.3f}" for m, e in zip(*row, strict=True)] for row in zip(mean_KM, error_KM, strict=True)]


if __name__ == "__main__":
    main()
