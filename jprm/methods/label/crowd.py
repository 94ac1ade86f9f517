"""Pools verdicts from judges and people: Dawid and Skene's model, a correction by gold labels, and agreement.

Each judge j has a confusion matrix e_j[c, v], the probability of verdict v on a step of true class c. Verdicts are
independent given the class (Dawid & Skene, Applied Statistics 28, 1979). EM estimates the class probabilities p, the
matrices and each step's posterior together, starting from the majority. An iteration equals that of `DawidSkene` in the
package crowd-kit, but the stopping bound there counts a step's prior once per verdict.

If judges are lenient about the same steps, they are not independent, and the model mistakes their common silence for
correctness; so does EM with a few gold labels held fixed. Here a few gold labels suffice: the posterior log-odds z
become a + b z, where (a, b) maximises the posterior density on the gold labels, under normal priors around a = 0 and b
= 1 (`PRIOR`). Without gold labels z stays as it is.

The model's matrices have the same bias. `matrices` recomputes them from the corrected posterior, and corrects them once
more per judge and verdict: shifting all log-odds together cannot reveal a careful judge among lenient ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import scipy  # its parts are loaded when they are first used
from jaxtyping import Float, Int

FLOOR = 1e-10
"""Smallest probability in `p` and in confusion matrices, as in crowd-kit."""

PRIOR = (4.0, 1.0)
"""Prior standard deviations of a and b. The prior of a is wide, since the judges' leniency is unknown."""

DOUBT = 1.0
"""Pseudo-count of gold labels agreeing with the corrected posterior, per judge and verdict (`matrices`)."""

MOST = 12.0
"""Log-odds are clipped to this before the correction (odds of 1 in 160,000)."""


class Crowd(NamedTuple):
    """Estimates for N steps, J judges and C classes: class probabilities by step, prior, confusions, EM rounds."""

    posterior_NC: Float[np.ndarray, "N C"]
    prior_C: Float[np.ndarray, " C"]
    confusion_JCV: Float[np.ndarray, "J C C"]  # [judge, true class, verdict]
    iterations: int


def majority(verdict_NJ: Int[np.ndarray, "N J"], classes: int) -> Float[np.ndarray, "N C"]:
    """Returns each class's share of the verdicts on every step, in [0, 1], from N steps by J judges.

    Verdicts are classes from 0 to `classes` - 1; others are missing. Raises ValueError if a step has no verdict.
    """
    votes_NC = (verdict_NJ[..., None] == np.arange(classes)).sum(1).astype(float)
    if (votes_NC.sum(1) == 0).any():
        raise ValueError("a step has no verdict: leave it out")
    return votes_NC / votes_NC.sum(1, keepdims=True)


def dawid_skene(
    verdict_NJ: Int[np.ndarray, "N J"],
    classes: int = 2,
    weight_N: Float[np.ndarray, " N"] | None = None,
    *,
    iterations: int = 100,
    tolerance: float = 1e-5,
) -> Crowd:
    """Fits class prior and confusion matrices of J judges by EM, at most `iterations` rounds; -1 is a missing verdict.

    Verdicts are classes from 0 to `classes` - 1; any other value counts as missing. Each step has weight `weight_N` (at
    least 0, not all 0, else the result is NaN), by default 1. EM stops early if the evidence lower bound per verdict
    (nats) grows by less than `tolerance`; a fit that has not converged is returned without a warning. Raises ValueError
    if a step has no verdict, or there are no steps.
    """
    if not verdict_NJ.size:
        raise ValueError("no step has a verdict")
    verdict_UJ, pattern_N = np.unique(verdict_NJ, axis=0, return_inverse=True)
    pattern_N = pattern_N.reshape(-1)
    weight_U = np.bincount(pattern_N, weight_N, len(verdict_UJ))
    said_UJV = (verdict_UJ[..., None] == np.arange(classes)).astype(float)
    posterior_UC = majority(verdict_UJ, classes)

    def fitted() -> tuple[Float[np.ndarray, " C"], Float[np.ndarray, "J C C"]]:
        count_JCV = np.maximum(np.einsum("u,uc,ujv->jcv", weight_U, posterior_UC, said_UJV), FLOOR)
        return weight_U @ posterior_UC / weight_U.sum(), count_JCV / count_JCV.sum(-1, keepdims=True)

    prior_C, confusion_JCV = fitted()
    bound, done = -np.inf, 0
    for _ in range(iterations):
        log_UC = _log_joint(said_UJV, prior_C, confusion_JCV)
        posterior_UC = np.exp(log_UC - log_UC.max(1, keepdims=True))
        posterior_UC /= posterior_UC.sum(1, keepdims=True)
        (prior_C, confusion_JCV), done = fitted(), done + 1
        inside_UC = np.maximum(posterior_UC, FLOOR)
        joint_U = (posterior_UC * _log_joint(said_UJV, prior_C, confusion_JCV)).sum(1)
        entropy_U = -(np.log(inside_UC) * inside_UC).sum(1)
        before, bound = bound, weight_U @ (joint_U + entropy_U) / (weight_U @ said_UJV.sum((1, 2)))
        if bound - before < tolerance:
            break
    return Crowd(posterior_UC[pattern_N], prior_C, confusion_JCV, done)


def _log_joint(said_UJV, prior_C, confusion_JCV) -> Float[np.ndarray, "U C"]:
    """Returns log p(class, verdicts)."""
    return np.log(np.maximum(prior_C, FLOOR)) + np.einsum("ujv,jcv->uc", said_UJV, np.log(confusion_JCV))


def correction(
    probability_N: Float[np.ndarray, " N"],
    gold_K: Int[np.ndarray, " K"],
    index_K: Int[np.ndarray, " K"],
    weight_K: Float[np.ndarray, " K"] | None = None,
) -> tuple[float, float]:
    """Fits a, b so that log-odds a + b z match K gold labels (0 or 1) of the steps `index_K`; z: present log-odds.

    `index_K` has places in `probability_N`, from 0. Gold labels have weight `weight_K`, by default 1. A prior favours a
    = 0 and b = 1, the result if there are no gold labels. Log-odds z are clipped to [-12, 12] (`MOST`).
    """
    z_K = log_odds(probability_N[index_K])
    count_K = np.ones_like(z_K) if weight_K is None else weight_K
    x_K2, mean_2, precision_2 = np.stack([np.ones_like(z_K), z_K], 1), np.array([0.0, 1.0]), np.array(PRIOR) ** -2

    def loss(weight_2):
        w_K = x_K2 @ weight_2
        value = count_K @ (np.logaddexp(0, w_K) - gold_K * w_K) + precision_2 @ (weight_2 - mean_2) ** 2 / 2
        gap_K = scipy.special.expit(w_K) - gold_K
        return value, x_K2.T @ (count_K * gap_K) + precision_2 * (weight_2 - mean_2)

    def hessian(weight_2):
        p_K = scipy.special.expit(x_K2 @ weight_2)
        return (x_K2.T * (count_K * p_K * (1 - p_K))) @ x_K2 + np.diag(precision_2)

    options = {"gtol": 1e-8}  # of a strictly convex loss
    a, b = scipy.optimize.minimize(loss, mean_2, jac=True, hess=hessian, method="trust-exact", options=options).x
    return float(a), float(b)


def corrected(probability_N: Float[np.ndarray, " N"], a: float, b: float) -> Float[np.ndarray, " N"]:
    """Returns the probabilities with log-odds a + b z; z: their present log-odds, clipped to +-12."""
    return scipy.special.expit(a + b * log_odds(probability_N))


def matrices(
    verdict_NJ: Int[np.ndarray, "N J"],
    probability_N: Float[np.ndarray, " N"],
    gold_K: Int[np.ndarray, " K"],
    index_K: Int[np.ndarray, " K"],
    weight_N: Float[np.ndarray, " N"] | None = None,
) -> Float[np.ndarray, "J 2 2"]:
    """Returns each judge's matrix [judge, true class, verdict] from corrected class 1 probabilities and gold labels.

    Verdicts are 0 or 1; others are missing. Gold labels, 0 or 1, are of the steps `index_K`, counted from 0. Per judge
    and verdict, class 1's fraction is the mean probability plus the gold labels' mean residual, shrunk by one
    pseudo-count (`DOUBT`). Steps have weight `weight_N`. Given a judge's verdict, gold labels must be a random sample;
    they may favour a verdict, e.g. steps that one judge calls wrong.
    """
    weight_N = np.ones(len(verdict_NJ)) if weight_N is None else weight_N
    said_NJV = (verdict_NJ[..., None] == np.arange(2)) * weight_N[:, None, None]
    said_KJV, distance_K = said_NJV[index_K], gold_K - probability_N[index_K]
    steps_JV = said_NJV.sum(0)
    mean_JV = np.einsum("n,njv->jv", probability_N, said_NJV) / np.maximum(steps_JV, FLOOR)
    mean_JV = mean_JV + np.einsum("k,kjv->jv", distance_K, said_KJV) / (said_KJV.sum(0) + DOUBT)
    of_one_JV = steps_JV * np.clip(mean_JV, 0, 1)
    count_JCV = np.maximum(np.stack([steps_JV - of_one_JV, of_one_JV], axis=1), FLOOR)
    return count_JCV / count_JCV.sum(-1, keepdims=True)


def log_odds(probability_N: Float[np.ndarray, " N"]) -> Float[np.ndarray, " N"]:
    """Returns log(p / (1 - p)), clipped to [-12, 12] (`MOST`)."""
    return np.clip(scipy.special.logit(probability_N), -MOST, MOST)


# ---- Krippendorff's alpha for ordinal ratings.

Ratings = Sequence[Sequence[float | None]]
"""Each unit's ratings, in any order; `None` for a missing rating."""


def coincidences(units: Ratings) -> Float[np.ndarray, "U C C"]:
    """Returns each unit's coincidences of values c and k: n_c (n_k - [c = k]) / (m - 1), with m ratings in the unit.

    C counts the distinct values of all units, in ascending order. 0 throughout if a unit has one rating or none.
    Weighted sums over the units go to `alpha_of`.
    """
    rated = [[value for value in unit if value is not None] for unit in units]
    values = sorted({value for unit in rated for value in unit})
    count_UC = np.array([[unit.count(value) for value in values] for unit in rated], float)
    count_UC = count_UC.reshape(len(rated), len(values))
    pairs_UCC = count_UC[:, :, None] * count_UC[:, None, :]
    pairs_UCC -= count_UC[:, :, None] * np.eye(len(values))
    return pairs_UCC / np.maximum(count_UC.sum(-1) - 1, 1)[:, None, None]


def alpha_of(observed_CC: Float[np.ndarray, "*R C C"]) -> Float[np.ndarray, "*R"]:
    """Returns Krippendorff's alpha, 1 - D_o / D_e, with the ordinal distance, from summed coincidences. 0 is chance.

    1 is agreement, below 0 worse than chance. NaN if all ratings are equal (Computing Krippendorff's Alpha-Reliability,
    2011, section D).

    The distance from c to k > c is the squared number of ratings from c to k, where ratings at c and k count half.
    """
    n_C = observed_CC.sum(-1)
    below_C = np.cumsum(n_C, -1) - n_C / 2
    square_CC = (below_C[..., :, None] - below_C[..., None, :]) ** 2
    total = n_C.sum(-1)
    disagreement = (total - 1) * (observed_CC * square_CC).sum((-2, -1))
    expected = (n_C[..., :, None] * n_C[..., None, :] * square_CC).sum((-2, -1))
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.where(expected > 0, 1 - disagreement / expected, np.nan)
