"""Simulated data of known truth, and the bounds that a simulated coverage keeps."""

import numpy as np
from scipy.stats import binom, norm


def at_least(covered, level, *, miss=1e-3):
    """Whether so many of these repetitions covered is compatible with a coverage of `level`."""
    return sum(covered) >= binom.ppf(miss, len(covered), level)


def correlated(rng, probability_PS, correlation):
    """Outcomes (P, S) of the given probabilities; those of a problem correlate, by a Gaussian copula."""
    shared_P1, own_PS = rng.normal(size=(len(probability_PS), 1)), rng.normal(size=probability_PS.shape)
    return norm.cdf(np.sqrt(correlation) * shared_P1 + np.sqrt(1 - correlation) * own_PS) < probability_PS
