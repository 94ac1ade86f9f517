"""False alarms and power of the diagnostic of incorrect steps in chains with a correct answer."""

import numpy as np
import pytest

from jprm.methods.studies.diagnostics import diagnostics_report
from jprm.tree import tree_of


def chains(n, seed, hidden, noise, flaw=None):
    """n chains, half with an error, of which a fraction `hidden` has a correct answer.

    A good scorer's log-odds are 2 at correct steps and -1 at incorrect ones, with noise. `outcome` sees the answer
    alone, and `blind` nothing.
    """
    rng = np.random.default_rng([n, seed])
    trees = []
    for i in range(n):
        length = int(rng.integers(2, 10))
        error = int(rng.integers(length)) if rng.random() < 0.5 else -1
        label = np.arange(length) < error if error >= 0 else np.ones(length, bool)
        correct = error < 0 or rng.random() < hidden
        seen = {None: label, "outcome": np.full(length, correct), "blind": np.ones(length, bool)}[flaw]
        scores = 1 / (1 + np.exp(-np.where(seen, 2.0, -1.0) - noise * rng.normal(size=length)))
        trees.append(tree_of({"problem": f"p{i}", "steps": ["step"] * length, "first_error": error,
                              "correct": bool(correct), "scores": scores.tolist()}))  # fmt: skip
    return trees


def reports(runs, n, *args):
    return [diagnostics_report(chains(n, seed, *args), {}, 0.5, seed)["wrong_process"] for seed in range(runs)]


def found(runs, *args):
    return sum(report.get("finding", False) for report in reports(runs, *args))


@pytest.mark.parametrize(("n", "hidden", "noise"), [(30, 0.3, 1.0), (60, 0.1, 2.0), (60, 0.3, 2.0), (100, 0.3, 2.0)])
def test_a_good_scorer_is_no_finding_however_few_the_chains(n, hidden, noise):
    assert found(40, n, hidden, noise) <= 5  # above 5 of 40 at a rate of 5 %: 1.4 %


@pytest.mark.parametrize("flaw", ["outcome", "blind"])
def test_a_scorer_that_does_not_see_the_process_is_found(flaw):
    assert found(12, 500, 0.5, 1.0, flaw) >= 9  # below 9 of 12 at a power of 90 %: 2.6 %


def test_few_chains_are_not_computed():
    few = reports(10, 30, 0.1, 1.0)
    assert all("10 of each are needed" in report["not_computed"] for report in few)
