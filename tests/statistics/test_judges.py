"""Coverage of the figures of judges who miss the same errors, corrected by gold labels, at known truth."""

import numpy as np
import pytest
from simulated import at_least

from jprm.methods.label.pooled import pooled

STEPS, RUNS, FOUND, ALARM, RATE = 600, 30, 0.9, 0.03, 0.3


@pytest.mark.slow
@pytest.mark.parametrize(
    ("share", "hard", "careful", "gold", "level"),
    [
        (0.0, 1.0, 0, 60, 0.95),  # independent
        (0.2, 0.15, 0, 60, 0.9),  # a fifth of the errors is seen by few
        (0.5, 0.15, 0, 60, 0.95),
        (0.5, 0.15, 0, 200, 0.95),
        (0.5, 0.15, 1, 60, 0.85),  # one judge of five finds the others' half too: few gold labels, a little too narrow
        (0.5, 0.15, 1, 200, 0.95),
    ],
)
def test_the_figures_of_judges_cover(share, hard, careful, gold, level):
    covered = {"found": [], "false_alarm": [], "rate": []}
    names, problems = list("abcde"), [str(n // 5) for n in range(STEPS)]
    lenient_J = np.arange(5) < 5 - careful
    truth_J = np.where(lenient_J, (1 - share) * FOUND + share * min(hard, FOUND), FOUND)
    for seed in range(RUNS):
        rng = np.random.default_rng(seed)
        correct_N, hard_N = rng.random(STEPS) >= RATE, rng.random(STEPS) < share
        found_NJ = np.where(hard_N[:, None] & lenient_J, min(hard, FOUND), FOUND)
        verdict_NJ = 1 - (rng.random((STEPS, 5)) < np.where(correct_N[:, None], ALARM, found_NJ)).astype(int)
        index_K = rng.permutation(STEPS)[:gold]
        report, _ = pooled(verdict_NJ, names, problems, correct_N[index_K].astype(int), index_K, 0)
        for name, found in zip(names, truth_J, strict=True):
            for key, truth in (("found", found), ("false_alarm", ALARM)):
                figure = report["judges"][name][key]
                covered[key].append(figure["low"] <= truth <= figure["high"])
        covered["rate"].append(report["error_rate"]["low"] <= RATE <= report["error_rate"]["high"])
    print(share, hard, careful, gold, {key: round(float(np.mean(values)), 3) for key, values in covered.items()})
    for values in covered.values():
        assert at_least(values, level)
