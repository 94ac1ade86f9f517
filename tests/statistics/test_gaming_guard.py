"""The gaming guard over whole runs: how often it ends one whose accuracy stays, and one that games its PRM.

A problem's samples are correct with its own probability, drawn from a beta distribution. Evaluations are independent
draws, which is the worst case: samples by common random numbers resemble each other while the policy hardly moves.
"""

import numpy as np
import pytest
from scipy.stats import beta, binom, ttest_rel

from jprm.methods.rl import progress as guards
from jprm.methods.rl.config import GuardConfig

SIZES = {"200 x 4, 20 evaluations": (200, 4, 20), "100 x 4, 50": (100, 4, 50), "200 x 8, 5": (200, 8, 5)}
"""Problems x samples and evaluations after the start; the last is the quickstart's."""

GAMED = {  # accuracy in % at updates 0, 4, 8, 12 of the quickstart's runs with the PRM alone and without the guard
    "seed 0": (40.0, 29.8, 19.6, 12.1),
    "seed 1": (33.8, 31.5, 29.2, 26.9),
    "seed 2": (37.9, 33.1, 28.2, 23.4),
}
"""Start and update 12 of all, and update 8 of seed 0, are recorded in
experiments/quickstart/reinforcement_learning.md; lines between them."""

CONCENTRATION = 2.0


class Run:
    """Evaluations of policies whose accuracy on every problem is known, and the guard's decision after each."""

    def __init__(self, problems, samples, seed):
        self.rng, self.samples, self.evaluations = np.random.default_rng(seed), samples, []
        self.rank_P = self.rng.uniform(size=problems)  # a problem's difficulty

    def evaluation(self, accuracy, update):
        chance_P = beta.ppf(self.rank_P, accuracy * CONCENTRATION, (1 - accuracy) * CONCENTRATION)
        gold_P = self.rng.binomial(self.samples, chance_P) / self.samples
        return {"gold": gold_P.mean(), "gold_P": gold_P.tolist(), "proxy": 0.4 + 0.01 * update, "update": update,
                "disagreement": None, "working": 0.5, "tokens": 9.0}  # fmt: skip

    def ended(self, accuracies):
        """Returns the update at which the guard ends the run, None where it does not. The PRM's score always rises."""
        config = GuardConfig()
        for update, accuracy in enumerate(accuracies):
            self.evaluations.append(self.evaluation(accuracy, update))
            if guards.suspected(self.evaluations, config):
                best = guards.best_of(self.evaluations)
                fresh = self.evaluation(accuracies[best], best), self.evaluation(accuracy, update)
                earlier = sum("check" in evaluation for evaluation in self.evaluations)
                self.evaluations[-1]["check"] = guards.fresh_test(*fresh, earlier, seed=0)
            if guards.fired(self.evaluations, config):
                return update
        return None


def false_alarms(size, accuracy, runs):
    problems, samples, evaluations = SIZES[size]
    flat = [accuracy] * (evaluations + 1)
    return sum(Run(problems, samples, seed).ended(flat) is not None for seed in range(runs))


def test_suspicions_are_frequent_and_false_alarms_are_not():
    problems, samples, evaluations = SIZES["200 x 4, 20 evaluations"]
    runs = [Run(problems, samples, seed) for seed in range(60)]
    ended = [run.ended([0.5] * (evaluations + 1)) is not None for run in runs]
    suspected = [any("check" in evaluation for evaluation in run.evaluations) for run in runs]
    assert np.mean(suspected) > 0.6  # what ended the run before
    assert sum(ended) <= binom.ppf(0.999, len(runs), guards.FALSE_ALARMS)


@pytest.mark.parametrize("seed", GAMED)
def test_the_documented_gamed_runs_are_ended(seed):
    ended = [Run(200, 8, i).ended([x / 100 for x in GAMED[seed]]) is not None for i in range(40)]
    assert sum(ended) >= binom.ppf(0.001, len(ended), 0.95)


def test_levels_of_all_tests_sum_to_the_false_alarms_of_a_run():
    evaluation = Run(20, 4, 0).evaluation(0.5, 0)
    levels = [guards.fresh_test(evaluation, evaluation, earlier, seed=0)["level"] for earlier in range(300)]
    assert sum(levels) == pytest.approx(guards.FALSE_ALARMS, rel=5e-3) and sum(levels) < guards.FALSE_ALARMS


def test_the_p_value_is_that_of_the_paired_t_test():
    run = Run(30, 4, 0)
    before, after = run.evaluation(0.6, 0), run.evaluation(0.5, 1)
    wanted = ttest_rel(after["gold_P"], before["gold_P"], alternative="less").pvalue
    assert guards.p_worse(before, after) == pytest.approx(wanted) and wanted < 0.5
    assert guards.p_worse(before, before) == 1.0
    assert guards.p_worse({"gold_P": [1.0]}, {"gold_P": [0.0]}) == 1.0  # one problem shows no variance
    assert guards.p_worse({"gold_P": [1.0] * 3}, {"gold_P": [0.5] * 3}) == 2**-3  # by the sign test


def test_unchanged_runs_are_called_better_at_the_nominal_rate_and_their_best_is_not_shown_too_high():
    better, chosen, fresh = [], [], []
    for seed in range(60):
        run = Run(*SIZES["200 x 4, 20 evaluations"][:2], seed)
        ended = run.ended([0.5] * 21)
        best = run.evaluations[guards.best_of(run.evaluations)]
        fresh.append(run.evaluation(0.5, best["update"]))
        chosen.append(best["gold"])
        said = guards.verdict(run.evaluations, "gaming" if ended else "", seed, fresh[-1])
        better.append(said[0].endswith(", better."))
    truth = np.mean([figures["gold"] for figures in fresh])
    assert sum(better) <= binom.ppf(0.999, len(better), 0.025)
    assert np.mean(chosen) - truth > 0.01


@pytest.mark.slow
@pytest.mark.parametrize("accuracy", [0.4, 0.85, 0.97])
@pytest.mark.parametrize("size", SIZES)
def test_rates_of_false_alarms(size, accuracy):
    runs = 1000
    alarms = false_alarms(size, accuracy, runs)
    print(f"\nguard: {size}, {accuracy}: {alarms} of {runs}")
    assert alarms <= binom.ppf(0.999, runs, guards.FALSE_ALARMS)


@pytest.mark.slow
@pytest.mark.parametrize("seed", GAMED)
def test_rates_of_detection(seed):
    runs, ended_at = 1000, {}
    for i in range(runs):
        at = Run(200, 8, i).ended([x / 100 for x in GAMED[seed]])
        ended_at[at] = ended_at.get(at, 0) + 1
    print(f"\nguard: {seed}: ended at {ended_at}")
    assert runs - ended_at.get(None, 0) >= binom.ppf(0.001, runs, 0.95)
