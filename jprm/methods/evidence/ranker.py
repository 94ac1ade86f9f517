"""A linear ranker of chains with few parameters: losses, calibration, votes. All in numpy float64.

Two losses train it. `by_pairs` ranks every correct chain above every incorrect one. `by_answers` is the likelihood of a
weighted vote: the correct answer's share of the weights exp(s).

Evidence is standardised by the training chains; a missing number (NaN) counts as the mean and adds 0. The score is
linear, so every coefficient can be read. A problem's difficulty is common to all its chains, so it cannot enter the
loss.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import scipy  # its parts are loaded when they are first used
from jaxtyping import Float, Int

STRENGTHS = (1e-4, 1e-3, 1e-2, 1e-1, 1.0)
"""Regularisation strengths; validation problems choose among them."""

CLIP = 10.0  # standard deviations: a length of ten is as far as one of a thousand


class Chains(NamedTuple):
    """M chains with known outcomes. Pools and policies are numbered from 0 without gaps.

    `x_MF` is raw evidence, NaN if missing. `correct_M` is 1 or 0. `problem_M` is the pool: a problem of one policy.
    `class_M` is equal for equal answers in a pool, from 0; -1 without an answer.
    """

    x_MF: Float[np.ndarray, "M F"]
    correct_M: Float[np.ndarray, " M"]
    problem_M: Int[np.ndarray, " M"]
    policy_M: Int[np.ndarray, " M"]
    class_M: Int[np.ndarray, " M"]

    def where(self, chosen_M: np.ndarray) -> Chains:
        """Returns the chosen chains (a mask or indices), with pools renumbered without gaps, policies as before."""
        kept = Chains(*(column[chosen_M] for column in self))
        return kept._replace(problem_M=np.unique(kept.problem_M, return_inverse=True)[1].reshape(-1))


class Pairs(NamedTuple):
    """K pairs of a correct and an incorrect chain, by index, from one pool. A policy's weights sum to 1 / policies."""

    right_K: Int[np.ndarray, " K"]
    wrong_K: Int[np.ndarray, " K"]
    weight_K: Float[np.ndarray, " K"]


def pairs_of(chains: Chains) -> Pairs:
    """Returns every pair within pools. Pools of a policy weigh the same, and so do policies.

    Raises ValueError if no pool has both a correct and an incorrect chain.
    """
    order_M = np.argsort(chains.problem_M, kind="stable")
    right, wrong, weight, policy = [], [], [], []
    for members in np.split(order_M, np.flatnonzero(np.diff(chains.problem_M[order_M])) + 1):
        good, bad = members[chains.correct_M[members] > 0.5], members[chains.correct_M[members] <= 0.5]
        if (count := len(good) * len(bad)) == 0:
            continue
        right.append(np.repeat(good, len(bad)))
        wrong.append(np.tile(bad, len(good)))
        weight.append(np.full(count, 1 / count))
        policy.append(np.full(count, chains.policy_M[members[0]]))
    if not right:
        raise ValueError("no problem has both a correct and an incorrect chain, so there is nothing to rank")
    weight_K, policy_K = np.concatenate(weight), np.concatenate(policy)
    total_L = np.bincount(policy_K, weight_K)
    weight_K = weight_K / total_L[policy_K] / np.count_nonzero(total_L)
    return Pairs(np.concatenate(right), np.concatenate(wrong), weight_K)


def mixed_problems(chains: Chains) -> int:
    """Counts the pools with both a correct and an incorrect chain, e.g. 0 for no chains; only these train a ranker."""
    size_P = np.bincount(chains.problem_M)
    right_P = np.bincount(chains.problem_M, chains.correct_M)
    return int(((right_P > 0) & (right_P < size_P)).sum())


def pair_loss(
    w_F: Float[np.ndarray, " F"], x_MF: Float[np.ndarray, "M F"], pairs: Pairs, strength: float = 0.0
) -> tuple[float, Float[np.ndarray, " F"]]:
    """Returns the weighted mean of log(1 + exp(s_wrong - s_right)) + strength |w|^2 / 2, and its gradient.

    s = x w, with weights w and x (M chains, F), which must be standardised (`Ranker.standard`): a NaN makes the loss
    NaN. This is the pairwise logistic loss (RankNet, Burges et al., ICML 2005).
    """
    score_M = x_MF @ w_F
    gap_K = score_M[pairs.right_K] - score_M[pairs.wrong_K]
    slope_K = -pairs.weight_K * scipy.special.expit(-gap_K)
    slope_M = np.bincount(pairs.right_K, slope_K, len(x_MF)) - np.bincount(pairs.wrong_K, slope_K, len(x_MF))
    loss = float(pairs.weight_K @ np.logaddexp(0, -gap_K)) + strength / 2 * float(w_F @ w_F)
    return loss, x_MF.T @ slope_M + strength * w_F


def answer_loss(
    w_F: Float[np.ndarray, " F"], x_MF: Float[np.ndarray, "M F"], chains: Chains, strength: float = 0.0
) -> tuple[float, Float[np.ndarray, " F"]]:
    """Returns the pools' mean -log(correct answer's share of exp(s)) + strength |w|^2 / 2, and its gradient.

    s = x w, with weights w and x (M chains, F), which must be standardised (`Ranker.standard`) and replaces
    `chains.x_MF`. Chains without an answer have no weight. Pools whose answers are all correct or all incorrect are
    left out; if all are, only the penalty remains. Pools of a policy weigh the same, and so do policies.
    """
    answered_M, score_M = chains.class_M >= 0, x_MF @ w_F
    log_all_P, all_M = _softmax_in_pools(np.where(answered_M, score_M, -np.inf), chains.problem_M)
    right_M = answered_M & (chains.correct_M > 0.5)
    log_right_P, of_right_M = _softmax_in_pools(np.where(right_M, score_M, -np.inf), chains.problem_M)
    some_P = np.bincount(chains.problem_M, right_M)
    mixed_P = (some_P > 0) & (some_P < np.bincount(chains.problem_M, answered_M))
    policy_P = np.zeros(len(mixed_P), int)
    policy_P[chains.problem_M] = chains.policy_M
    count_L = np.bincount(policy_P, mixed_P)
    share_P = mixed_P / np.maximum(count_L, 1)[policy_P] / max(np.count_nonzero(count_L), 1)
    value = share_P[mixed_P] @ (log_all_P - log_right_P)[mixed_P] + strength / 2 * float(w_F @ w_F)
    return float(value), x_MF.T @ (share_P[chains.problem_M] * (all_M - of_right_M)) + strength * w_F


def _softmax_in_pools(
    score_M: Float[np.ndarray, " M"], pool_M: Int[np.ndarray, " M"]
) -> tuple[Float[np.ndarray, " P"], Float[np.ndarray, " M"]]:
    """Returns log sum exp(score) per pool, and each chain's share of the sum (0 if its score is -inf)."""
    weight_M, top_P = relative_in_pools(score_M, pool_M)
    total_P = np.maximum(np.bincount(pool_M, weight_M), 1e-300)  # for pools without chains
    return top_P + np.log(total_P), weight_M / total_P[pool_M]


def relative_in_pools(
    log_M: Float[np.ndarray, " M"], pool_M: Int[np.ndarray, " M"]
) -> tuple[Float[np.ndarray, " M"], Float[np.ndarray, " P"]]:
    """Returns (weights divided by their pool's largest, the log of the largest per pool), from log weights of any size.

    `pool_M` has each weight's pool, from 0; -inf is a weight of 0. A pool of these alone has weights 0 and log -1e300.
    """
    top_P = np.full(int(pool_M.max(initial=-1)) + 1, -1e300)
    np.maximum.at(top_P, pool_M, log_M)
    return np.exp(log_M - top_P[pool_M]), top_P


Loss = Callable[[np.ndarray, np.ndarray, float], tuple[float, np.ndarray]]
"""Maps (w, x, strength) to the loss and its gradient."""


def by_pairs(chains: Chains) -> Loss:
    """Returns `pair_loss` on these chains: each correct chain should score above the incorrect ones of its pool.

    Raises ValueError if no pool has both a correct and an incorrect chain.
    """
    pairs = pairs_of(chains)
    return lambda w_F, x_MF, strength: pair_loss(w_F, x_MF, pairs, strength)


def by_answers(chains: Chains) -> Loss:
    """Returns `answer_loss` on these chains: the votes of correct answers, for a verifier that votes.

    Does not raise if no pool is mixed: the loss is then 0 (and the penalty).
    """
    return lambda w_F, x_MF, strength: answer_loss(w_F, x_MF, chains, strength)


@dataclasses.dataclass(frozen=True)
class Ranker:
    """Scores chains: s = ((x - mean) / scale) w, with log odds of correctness slope s + intercept."""

    mean_F: Float[np.ndarray, " F"]
    scale_F: Float[np.ndarray, " F"]
    weight_F: Float[np.ndarray, " F"]
    slope: float = 1.0
    intercept: float = 0.0
    strength: float = 0.0  # of the regularisation in the fit

    @classmethod
    def standardising(cls, x_MF: Float[np.ndarray, "M F"]) -> Ranker:
        """Returns a ranker with zero weights that standardises by these chains' mean and standard deviation.

        NaN is left out. A number that does not vary has scale 1; one without any value has mean 0.
        """
        present_MF = np.ma.masked_array(x_MF, np.isnan(x_MF))
        mean_F, scale_F = present_MF.mean(0).filled(0.0), present_MF.std(0).filled(0.0)
        return cls(mean_F, np.where(scale_F > 1e-9, scale_F, 1.0), np.zeros(x_MF.shape[1]))

    def standard(self, x_MF: Float[np.ndarray, "M F"]) -> Float[np.ndarray, "M F"]:
        """Standardises the evidence by the training chains, clipped to +-10 deviations; NaN becomes 0."""
        return np.nan_to_num(np.clip((x_MF - self.mean_F) / self.scale_F, -CLIP, CLIP))

    def score(self, x_MF: Float[np.ndarray, "M F"]) -> Float[np.ndarray, " M"]:
        """Returns the uncalibrated scores, which the ranking loss trained."""
        return self.standard(x_MF) @ self.weight_F

    def log_odds(self, x_MF: Float[np.ndarray, "M F"]) -> Float[np.ndarray, " M"]:
        """Returns the calibrated natural log-odds that each chain is correct."""
        return self.slope * self.score(x_MF) + self.intercept

    def of_one(self, number: int) -> Ranker:
        """Returns a ranker with weight 1 on only one number, by its index, e.g. the sum of a PRM's log scores.

        Slope and intercept stay, so calibrate it again for `log_odds`. A negative index counts from the end. Raises
        IndexError if there is no such number.
        """
        return dataclasses.replace(self, weight_F=np.eye(len(self.mean_F))[number])


def fit_ranker(train: Chains, valid: Chains) -> Ranker:
    """Returns an uncalibrated ranker with the least loss by pairs on `train`; `valid` chooses the regularisation.

    Raises ValueError if one of the two has no pool with both a correct and an incorrect chain.
    """
    blank = Ranker.standardising(train.x_MF)
    x_MF, loss = blank.standard(train.x_MF), by_pairs(train)
    valid_x_MF, valid_loss = blank.standard(valid.x_MF), by_pairs(valid)
    best, least, weight_F = blank, np.inf, blank.weight_F
    for strength in sorted(STRENGTHS, reverse=True):  # from the stiffest on, each starts where the last one ended
        weight_F = scipy.optimize.minimize(loss, weight_F, (x_MF, strength), method="L-BFGS-B", jac=True).x
        now, _ = valid_loss(weight_F, valid_x_MF, 0.0)
        if now < least:
            best, least = dataclasses.replace(blank, weight_F=weight_F, strength=strength), now
    return best


def fit_near(
    chains: Chains, part_M: Int[np.ndarray, " M"], few_F: Float[np.ndarray, " F"], cost_F: Float[np.ndarray, " F"]
) -> Ranker:
    """Returns a calibrated ranker for a vote (`answer_loss`) near the best one by few numbers: 1 in `few_F`, else 0.

    The penalty is on the distance from that vote's weights, so other numbers count only as far as they help; `cost_F`
    multiplies it per number. Each part of the chains (`part_M`) is held out in turn, to choose the strength of the
    penalty, and to calibrate. There must be two parts or more, each with whole pools; this is not checked.

    Raises ValueError if a part has no pool with both a correct and an incorrect chain.
    """
    parts = [part_M == part for part in np.unique(part_M)]
    if not all(mixed_problems(chains.where(held_M)) for held_M in parts):
        raise ValueError("too few problems: a part of them has no correct or no incorrect chain. Give more pools")

    strengths = (1e3, *sorted(STRENGTHS, reverse=True))

    def fitted(chains: Chains) -> list[Ranker]:
        """Returns a ranker for each strength."""
        blank, loss = Ranker.standardising(chains.x_MF), by_answers(chains)
        x_MF = blank.standard(chains.x_MF)

        def of_few(w_F: np.ndarray) -> tuple[float, np.ndarray]:
            value, slope_F = loss(w_F * few_F, x_MF, 1e-4)
            return value, slope_F * few_F

        def from_few(d_F: np.ndarray, strength: float) -> tuple[float, np.ndarray]:
            value, slope_F = loss(few_weight_F + d_F, x_MF, 0.0)
            return value + strength / 2 * float(cost_F @ d_F**2), slope_F + strength * cost_F * d_F

        few_weight_F = few_F * scipy.optimize.minimize(of_few, few_F, method="L-BFGS-B", jac=True).x
        d_F, rankers = np.zeros(len(few_F)), []
        for strength in strengths:
            d_F = scipy.optimize.minimize(from_few, d_F, (strength,), method="L-BFGS-B", jac=True).x
            rankers.append(dataclasses.replace(blank, weight_F=few_weight_F + d_F, strength=strength))
        return rankers

    loss_S, score_SM = np.zeros(len(strengths)), np.zeros((len(strengths), len(part_M)))
    for held_M in parts:
        held = chains.where(held_M)
        held_loss = by_answers(held)
        for s, ranker in enumerate(fitted(chains.where(~held_M))):
            loss_S[s] += held_loss(ranker.weight_F, ranker.standard(held.x_MF), 0.0)[0]
            score_SM[s, held_M] = ranker.score(held.x_MF)
    best = int(np.argmin(loss_S))
    return calibrated(fitted(chains)[best], chains, score_M=score_SM[best])


def calibrated(
    ranker: Ranker, chains: Chains, floor: float = 1e-3, score_M: Float[np.ndarray, " M"] | None = None
) -> Ranker:
    """Returns the ranker with slope and intercept from a logistic regression on chains outside the training.

    Policies weigh the same; there must be a chain. The slope is at least `floor`, so that probabilities never reverse
    the ranking. `score_M` replaces the ranker's own scores of the chains, if it was trained on them.
    """
    score_M = ranker.score(chains.x_MF) if score_M is None else score_M
    size_L = np.bincount(chains.policy_M)
    weight_M = 1 / size_L[chains.policy_M] / np.count_nonzero(size_L)

    def loss(theta: np.ndarray) -> tuple[float, np.ndarray]:
        z_M = theta[0] * score_M + theta[1]
        rest_M = weight_M * (scipy.special.expit(z_M) - chains.correct_M)
        value = weight_M @ (np.logaddexp(0, z_M) - chains.correct_M * z_M) + 1e-6 * theta @ theta
        return float(value), np.array([rest_M @ score_M, rest_M.sum()]) + 2e-6 * theta

    bounds = [(floor, None), (None, None)]
    slope, intercept = scipy.optimize.minimize(loss, np.array([1.0, 0.0]), method="L-BFGS-B", jac=True, bounds=bounds).x
    return dataclasses.replace(ranker, slope=float(slope), intercept=float(intercept))


def vote_correct(chains: Chains, weight_M: Float[np.ndarray, " M"]) -> Float[np.ndarray, " P"]:
    """Returns each pool's accuracy in [0, 1] by weighted vote: the leading answers' mean correctness.

    Weights must be at least 0; if all are 0, all answers lead. A pool without an answer counts as incorrect.
    """
    size = int(chains.problem_M.max(initial=-1)) + 1
    labelled_M = chains.class_M >= 0
    stride = int(chains.class_M.max(initial=0)) + 1
    key_M = chains.problem_M[labelled_M] * stride + chains.class_M[labelled_M]
    _, index_M = np.unique(key_M, return_inverse=True)
    total_G = np.bincount(index_M, weight_M[labelled_M])
    right_G = np.bincount(index_M, chains.correct_M[labelled_M]) / np.bincount(index_M)
    pool_G = np.zeros(len(total_G), int)
    pool_G[index_M] = chains.problem_M[labelled_M]
    top_P = np.full(size, -np.inf)
    np.maximum.at(top_P, pool_G, total_G)
    leads_G = total_G >= top_P[pool_G] * (1 - 1e-12)
    leaders_P = np.bincount(pool_G, leads_G, size)
    return np.bincount(pool_G, leads_G * right_G, size) / np.maximum(leaders_P, 1)


def best_correct(chains: Chains, score_M: Float[np.ndarray, " M"]) -> Float[np.ndarray, " P"]:
    """Returns the correctness of each pool's best chain with an answer, averaged over ties; 0 without an answer."""
    score_M = np.where(chains.class_M >= 0, score_M, -np.inf)
    top_P = np.full(int(chains.problem_M.max(initial=-1)) + 1, -np.inf)
    np.maximum.at(top_P, chains.problem_M, score_M)
    leads_M = (score_M >= top_P[chains.problem_M] - 1e-12) & (chains.class_M >= 0)
    leaders_P = np.bincount(chains.problem_M, leads_M)
    return np.bincount(chains.problem_M, leads_M * chains.correct_M) / np.maximum(leaders_P, 1)


def answer_shares(weight_N: Float[np.ndarray, " N"], class_N: Int[np.ndarray, " N"]) -> Float[np.ndarray, " N"]:
    """Returns each chain's answer's share of one pool's weight; 0 without an answer (class -1).

    The weights must be at least 0. Chains without an answer are left out of the total; if it is 0, all shares are 0.
    """
    answered_N = class_N >= 0
    total_C = np.bincount(class_N[answered_N], weight_N[answered_N]) if answered_N.any() else np.ones(1)
    return np.where(answered_N, total_C[class_N] / max(total_C.sum(), 1e-300), 0.0)


def auroc_in_problems(score_M: Float[np.ndarray, " M"], pairs: Pairs) -> float:
    """Returns the mean over pools of P(a correct chain scores above an incorrect one); ties count half.

    In [0, 1]; pools and policies are weighted as in `pairs_of`.
    """
    gap_K = score_M[pairs.right_K] - score_M[pairs.wrong_K]
    return float(pairs.weight_K @ ((gap_K > 0) + 0.5 * (gap_K == 0)) / pairs.weight_K.sum())


def joined(parts: Sequence[Chains]) -> Chains:
    """Concatenates `Chains`; each becomes one policy, numbered from 0, with problem numbers of its own.

    Raises TypeError if there are no `parts`.
    """
    offsets = np.cumsum([0, *(int(part.problem_M.max(initial=-1)) + 1 for part in parts)])
    numbered = [
        part._replace(problem_M=part.problem_M + start, policy_M=np.full_like(part.policy_M, i))
        for i, (part, start) in enumerate(zip(parts, offsets, strict=False))
    ]
    return Chains(*map(np.concatenate, zip(*numbered, strict=True)))
