"""Expected accuracy of best of n and of votes, for each number of samples n.

Best of n chooses the sample with the highest key; its expectation has a closed form. A vote of n samples elects the
answer with the largest sum of weights (all 1 in a majority vote); if answers tie, their mean correctness counts. A vote
has no closed form: small pools are enumerated, larger ones sampled.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Key

from jprm.methods.answers import canonical_answer, equivalent, number_of

ENUMERATE = 10
"""The largest pool that is enumerated: 2^10 subsets per problem."""

BATCH_BYTES = 32 * 2**20

TIE = 1e-6
"""Vote totals tie if they differ by less, relative to the largest: sampled ones are float32 sums in random order."""


@functools.lru_cache(maxsize=4)  # pools of one size need the same for every rule
def best_rank_probability(size: int, n_max: int) -> Float[np.ndarray, "N n"]:
    """Returns the probability that the best of n samples has rank r, for r < `size` = N and n = 1 .. n_max.

    C(N - r - 1, n - 1) / C(N, n), computed as n / (N - r) times prod_{i<n} (N - r - i) / (N - i). All factors are at
    most 1, so it cannot overflow.
    """
    rank_N1, drawn_n = np.arange(size)[:, None], np.arange(n_max)
    none_better_Nn = np.cumprod(np.maximum(size - rank_N1 - drawn_n, 0) / (size - drawn_n), axis=1)
    return none_better_Nn * (drawn_n + 1) / (size - rank_N1)


def best_of_n(
    key_PN: Float[np.ndarray, "P N"],
    correct_PN: Float[np.ndarray, "P N"],
    valid_PN: Bool[np.ndarray, "P N"],
    size_P: Int[np.ndarray, " P"],
    n_max: int,
) -> Float[np.ndarray, "P n"]:
    """Returns the exact expected correctness of the highest key among n random samples, n = 1 .. n_max.

    Problem p has `size_P[p]` samples, in its first slots; `n_max` must be at most min(size_P). Invalid samples rank
    last and are incorrect.

    Tied samples are chosen with equal probability, so each counts as its tie group's mean correctness. The expectation
    sums this mean times `best_rank_probability` over the ranks; for t tied samples after r better ones the
    probabilities sum to [C(N - r, n) - C(N - r - t, n)] / C(N, n).
    """
    value_Pn = np.zeros((len(key_PN), n_max))
    for size in np.unique(size_P):
        of_size = size_P == size
        key_BN, correct_BN, valid_BN = (x[of_size, :size] for x in (key_PN, correct_PN, valid_PN))
        order_BN = np.argsort(np.where(valid_BN, -key_BN, np.nan), axis=-1)  # NaN goes last, after a valid -inf
        key_BN, correct_BN, valid_BN = (
            np.take_along_axis(x, order_BN, -1) for x in (key_BN, np.where(valid_BN, correct_BN, 0.0), valid_BN)
        )
        first_BN = np.ones(key_BN.shape, bool)
        first_BN[:, 1:] = valid_BN[:, 1:] & (key_BN[:, 1:] != key_BN[:, :-1])
        first_BN[:, 1:] |= valid_BN[:, 1:] != valid_BN[:, :-1]
        group_M = np.cumsum(first_BN.ravel()) - 1
        mean_G = np.bincount(group_M, correct_BN.ravel()) / np.bincount(group_M)
        value_Pn[of_size] = mean_G[group_M].reshape(key_BN.shape) @ best_rank_probability(int(size), n_max)
    return value_Pn


def answer_classes(answers: Sequence[Any]) -> Int[np.ndarray, " N"]:
    """Returns equivalence class ids in order of appearance; -1 if there is no answer.

    Equivalence (`equivalent`, in either order) is not transitive: 18% is equivalent to 0.18 and to 18. So numbers come
    first by size, then other answers, then percentages, and each joins the first class with an equivalent first answer.
    The classes do not depend on the order of samples.
    """
    forms = [_form(answer) for answer in answers]
    first_of: dict[str | float, str | float] = {}
    firsts: list[str | float] = []
    for answer in sorted({x for x in forms if x is not None}, key=_place):
        first_of[answer] = next((first for first in firsts if _same(first, answer)), answer)
        if first_of[answer] == answer:
            firsts.append(answer)
    class_of = {first: c for c, first in enumerate(dict.fromkeys(first_of[x] for x in forms if x is not None))}
    return np.array([-1 if x is None else class_of[first_of[x]] for x in forms], int)


def _form(answer: Any) -> str | float | None:
    """Returns the canonical answer, but keeps the text of a number with a unit: 5 cents are not 5 dollars."""
    canonical = canonical_answer(answer)
    with_unit = isinstance(answer, str) and isinstance(canonical, int | float) and (n := number_of(answer)) and n.unit
    return answer.strip() if with_unit else canonical


def _place(answer: str | float) -> tuple[bool, bool, float, str]:
    text = str(answer)
    plain = not isinstance(answer, str)
    return "%" in text or "percent" in text.lower(), not plain, answer if plain else 0, "" if plain else text


def _same(left: str | float, right: str | float) -> bool:
    return equivalent(left, right) or equivalent(right, left)  # 1<x<2 accepts (1,2), and not the reverse


def relative(log_PN: Float[np.ndarray, "*P N"]) -> Float[np.ndarray, "*P N"]:
    """Returns weights divided by their row's largest, from log weights, which must be -inf without a vote."""
    return np.exp(log_PN - np.maximum(log_PN.max(-1, keepdims=True, initial=-np.inf), -1e300))


class Votes(NamedTuple):
    """Vote accuracy of problem p with n samples and weighting k, n = 1 .. n_max."""

    value_PnK: Float[np.ndarray, "P n K"]
    standard_error_nK: Float[np.ndarray, "n K"]  # of the mean over problems, from sampling votes; 0 where exact


def vote_accuracy(
    class_PN: Int[np.ndarray, "P N"],
    correct_PN: Float[np.ndarray, "P N"],
    weight_PNK: Float[np.ndarray, "P N K"],
    size_P: Int[np.ndarray, " P"],
    n_max: int,
    *,
    trials: int,
    seed: int,
) -> Votes:
    """Returns the accuracy of votes among n samples per problem, for n up to `n_max`.

    `n_max` must be at most min(size_P), and weights at least 0. A sample of class -1 has no answer: it takes one of the
    n places but does not vote. A vote without any answer is incorrect. The correctness of a class is the mean over its
    samples. Exact if all pools have at most `ENUMERATE` samples; otherwise the mean over `trials` random orders of each
    pool. Every n uses the first n of an order, with all weightings, so n = size is exact and differences between
    weightings have less noise.
    """
    in_pool_PN = np.arange(class_PN.shape[1]) < size_P[:, None]
    class_PN = np.where(in_pool_PN, class_PN, -1)
    correct_PC = _class_correct(class_PN, correct_PN)
    if not len(size_P):
        raise ValueError("no problems to vote on")
    if size_P.max() <= ENUMERATE:
        value_PnK = np.zeros((len(size_P), n_max, weight_PNK.shape[2]))
        for size in np.unique(size_P):
            at_once = max(1, BATCH_BYTES // (8 * 2**size * correct_PC.shape[1] * weight_PNK.shape[2]))
            of_size = np.flatnonzero(size_P == size)
            for part in np.split(of_size, range(at_once, len(of_size), at_once)):
                weight_BNK = _scaled(weight_PNK[part, :size], in_pool_PN[part, :size])
                value_PnK[part] = _enumerated(class_PN[part, :size], correct_PC[part], weight_BNK, n_max)
        return Votes(value_PnK, np.zeros(value_PnK.shape[1:]))
    weight_PNK = _scaled(weight_PNK, in_pool_PN)
    if trials < 2:
        raise ValueError(f"a standard error needs at least 2 trials, not {trials}")
    mean_PnK, variance_PnK = _sampled(
        jax.random.key(seed), class_PN, correct_PC, weight_PNK, in_pool_PN, n_max=n_max, trials=trials
    )
    # Orders are drawn independently for each problem, so the variances of the problems' means add.
    standard_error_nK = np.sqrt(np.asarray(variance_PnK, float).sum(0) / trials) / len(size_P)
    return Votes(np.asarray(mean_PnK, float), standard_error_nK)


def _scaled(weight_PNK, in_pool_PN):
    """Scales the weights per pool and weighting by a power of two, to a largest weight in [1/2, 1).

    Only ratios matter in a vote, and small weights would underflow float32. A power of two keeps ties.
    """
    top_P1K = np.where(in_pool_PN[:, :, None], weight_PNK, 0.0).max(1, keepdims=True)
    return np.ldexp(weight_PNK, -np.frexp(top_P1K)[1])


def _class_correct(class_PN, correct_PN):
    """Returns the mean correctness of each answer class, (P, C); 0 if a problem lacks the class."""
    problem_PN = np.arange(len(class_PN))[:, None] + np.zeros_like(class_PN)
    count_PC = np.zeros((len(class_PN), max(1, class_PN.max(initial=0) + 1)))
    right_PC = np.zeros_like(count_PC)
    answered_PN = class_PN >= 0
    np.add.at(count_PC, (problem_PN[answered_PN], class_PN[answered_PN]), 1)
    np.add.at(right_PC, (problem_PN[answered_PN], class_PN[answered_PN]), correct_PN[answered_PN])
    return right_PC / np.maximum(count_PC, 1)


def _enumerated(class_BN, correct_BC, weight_BNK, n_max):
    """Returns exact expectations, (B, n_max, K), over all subsets of N samples."""
    size = class_BN.shape[1]
    member_BNC = class_BN[:, :, None] == np.arange(correct_BC.shape[1])
    chosen_MN = (np.arange(1, 2**size)[:, None] >> np.arange(size)) & 1
    total_BMCK = np.einsum("mn,bnc,bnk->bmck", chosen_MN, member_BNC, weight_BNK)
    top_BM1K = total_BMCK.max(2, keepdims=True)
    # Equal sums added in different orders must still tie: compare them to 12 digits of the largest.
    total_BMCK = np.round(total_BMCK / np.where(top_BM1K > 0, top_BM1K, 1), 12)
    present_BMC1 = (chosen_MN @ member_BNC > 0)[..., None]
    total_BMCK = np.where(present_BMC1, total_BMCK, -1.0)
    winner_BMCK = present_BMC1 & (total_BMCK == total_BMCK.max(2, keepdims=True))
    value_BMK = np.einsum("bmck,bc->bmk", winner_BMCK, correct_BC) / np.maximum(winner_BMCK.sum(2), 1)
    size_M = chosen_MN.sum(1)
    return np.stack([value_BMK[:, size_M == n].mean(1) for n in range(1, n_max + 1)], axis=1)


@functools.partial(jax.jit, static_argnames=("n_max", "trials"))
def _sampled(
    key: Key[Array, ""],
    class_PN: Int[Array, "P N"],
    correct_PC: Float[Array, "P C"],
    weight_PNK: Float[Array, "P N K"],
    in_pool_PN: Bool[Array, "P N"],
    *,
    n_max: int,
    trials: int,
) -> tuple[Float[Array, "P n K"], Float[Array, "P n K"]]:
    """Returns mean and variance over random orders. Leaders are updated per sample, without a pass over classes."""
    trial_T = jnp.arange(trials)

    def problem(inputs):
        key, class_N, correct_C, weight_NK, in_pool_N = inputs
        place_TN = jax.random.uniform(key, (trials, len(class_N)))
        order_TN = jnp.argsort(jnp.where(in_pool_N, place_TN, 2.0), axis=-1)

        def add_sample(carry, index_T):
            total_TCK, top_TK, tied_TK, right_TK = carry
            class_T, weight_TK = class_N[index_T], weight_NK[index_T]
            answered_T1 = (class_T >= 0)[:, None]
            before_TK = total_TCK[trial_T, class_T]  # -1 until the class has a sample
            after_TK = jnp.where(answered_T1, jnp.maximum(before_TK, 0.0) + weight_TK, before_TK)
            correct_T1 = correct_C[class_T][:, None]
            near_TK = TIE * jnp.maximum(top_TK, 0.0)
            leads_TK = answered_T1 & (after_TK > top_TK + near_TK)
            joins_TK = answered_T1 & ~leads_TK & (after_TK >= top_TK - near_TK) & (before_TK < top_TK - near_TK)
            right_TK = jnp.where(leads_TK, correct_T1, right_TK + jnp.where(joins_TK, correct_T1, 0.0))
            tied_TK = jnp.where(leads_TK, 1.0, tied_TK + joins_TK)
            total_TCK = total_TCK.at[trial_T, class_T].set(after_TK)
            carry = (total_TCK, jnp.maximum(top_TK, jnp.where(answered_T1, after_TK, -1.0)), tied_TK, right_TK)
            value_TK = right_TK / jnp.maximum(tied_TK, 1.0)
            return carry, (value_TK.mean(0), value_TK.var(0, ddof=1))

        shape_TK = (trials, weight_NK.shape[1])
        start = (jnp.full((trials, len(correct_C), shape_TK[1]), -1.0), jnp.full(shape_TK, -1.0))
        start += (jnp.zeros(shape_TK), jnp.zeros(shape_TK))
        return jax.lax.scan(add_sample, start, order_TN[:, :n_max].T)[1]

    inputs = (jax.random.split(key, len(class_PN)), class_PN, correct_PC, weight_PNK, in_pool_PN)
    # Many problems at once, as far as their totals (T, C, K) fit into BATCH_BYTES: a step of one is all overhead.
    batch = max(1, min(len(class_PN), BATCH_BYTES // (4 * trials * correct_PC.shape[1] * weight_PNK.shape[2])))
    return jax.lax.map(problem, inputs, batch_size=batch)
