import numpy as np
import pytest
from families import breadth
from simulated import at_least, correlated

from jprm.methods.evaluate import calibration as cal
from jprm.statistics import equal_mass_bins


def sample(rng, problems, true_p):
    """Scores and labels of five steps a problem, correlated within it, and the ECE of the population in these bins."""
    score_PS = rng.beta(4, 1.5, (problems, 5))
    p_PS = np.clip(true_p(score_PS), 0, 1)
    right_N, score_N, problem_N = correlated(rng, p_PS, 0.3).ravel(), score_PS.ravel(), np.repeat(range(problems), 5)
    bins = int(np.clip(problems // cal.PROBLEMS_PER_BIN, 1, cal.BINS))
    bin_N = equal_mass_bins(score_N, bins)
    truth = np.abs(np.bincount(bin_N, p_PS.ravel() - score_N)).sum() / len(score_N)
    return score_N, right_N, problem_N, bins, truth


POPULATIONS = {
    "calibrated": lambda score: score,
    "0.03 too sure": lambda score: score - 0.03,
    "0.1 too sure": lambda score: score - 0.1,
    "0.03 to either side": lambda score: score + 0.03 * np.sign(np.sin(12 * score)),
}


@pytest.mark.parametrize("name", breadth(POPULATIONS, but=["calibrated"]))
@pytest.mark.parametrize(("problems", "repetitions"), [(20, 400), (60, 120), (200, 120)])
def test_the_interval_covers_the_ece(name, problems, repetitions):
    """The percentile bootstrap covered 13 % at a true ECE of 0.03, and a bound by the spread of the resampled ECE 89 %
    at 20 problems and 0.1: where the gap of the sample is small, folding at 0 hides the spread of its noise."""
    rng, covered, bias, plain_bias = np.random.default_rng(0), [], [], []
    for _ in range(repetitions):
        *data, bins, truth = sample(rng, problems, POPULATIONS[name])
        between = cal.ece_interval(*data, bins, seed=0)
        covered.append(between.low <= truth <= between.high)
        assert between.low <= between.value <= between.high
        bias.append(between.value - truth)
        plain_bias.append(cal.ece(*data[:2], bins) - truth)
    assert at_least(covered, 0.95)
    if name != "0.1 too sure":  # there noise cancels, and the plain one has no bias
        assert abs(np.mean(bias)) < np.mean(plain_bias) * (0.5 if problems > 20 else 0.65)


def test_the_map_is_chosen_without_the_data_that_judges_it():
    """Isotonic fits the noise of a small split best, and a calibrated scorer needs no map."""
    rng, chosen = np.random.default_rng(1), []
    for _ in range(10):
        score_N, right_N, problem_N, *_ = sample(rng, 60, POPULATIONS["calibrated"])
        chosen.append(cal.choose_map(score_N, right_N, problem_N, seed=0))
    assert chosen.count("temperature") + chosen.count("platt") >= 8
