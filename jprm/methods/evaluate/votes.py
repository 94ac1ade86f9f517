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

LEAST = -(2**29)
"""The exponent of a weight of 0."""

TIE = 1e-6
"""Vote totals tie if they differ by less, relative to the largest: sampled ones are float32 sums in random order."""


@functools.lru_cache(maxsize=4)  # pools of one size need the same for every rule
def best_rank_probability(size: int, n_max: int) -> Float[np.ndarray, "N n"]:
    """Returns the probability that the best of n samples has rank r, for r < `size` = N and n = 1 .. n_max <= N.

    C(N - r - 1, n - 1) / C(N, n), computed as n / (N - r) times prod_{i<n} (N - r - i) / (N - i). All factors are at
    most 1, so it cannot overflow. The array is cached: do not change it.
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
    last and are incorrect; a valid sample's key must not be NaN.

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
    """Returns equivalence class ids (0, 1, ...) in order of appearance; -1 for a missing answer, NaN or a blank string.

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
    """Returns weights divided by their row's largest, from log weights; -inf is 0, also if the whole row is."""
    return np.exp(log_PN - np.maximum(log_PN.max(-1, keepdims=True, initial=-np.inf), -1e300))


class Votes(NamedTuple):
    """Vote accuracy of problem p with n samples and weighting k, n = 1 .. n_max.

    `standard_error_nK` is of the mean over problems, from sampling votes; 0 if exact.
    """

    value_PnK: Float[np.ndarray, "P n K"]
    standard_error_nK: Float[np.ndarray, "n K"]


def vote_accuracy(
    class_PN: Int[np.ndarray, "P N"],
    correct_PN: Float[np.ndarray, "P N"],
    log_weight_PNK: Float[np.ndarray, "P N K"],
    size_P: Int[np.ndarray, " P"],
    n_max: int,
    *,
    trials: int,
    seed: int,
) -> Votes:
    """Returns the accuracy of votes among n samples per problem, for n up to `n_max`.

    `class_PN` is from `answer_classes`, by problem. `log_weight_PNK` has the logarithms of the weights (all 0 for a
    majority vote), -inf for a weight of 0. Only ratios within a vote count, however small its weights are beside others
    of the pool. `n_max` must be at most min(size_P). A sample of class -1 has no answer: it takes one of the n places
    but does not vote. A vote without any answer is incorrect. The correctness of a class is the mean over its samples;
    classes with equal totals count as their mean. Exact if all pools have at most `ENUMERATE` samples; otherwise the
    mean over `trials` random orders of each pool. Every n uses the first n of an order, with all weightings, so n =
    size is exact and differences between weightings have less noise. Raises ValueError if there are no problems, or
    fewer than 2 `trials` to sample.
    """
    in_pool_PN = np.arange(class_PN.shape[1]) < size_P[:, None]
    class_PN = np.where(in_pool_PN, class_PN, -1)
    correct_PC = _class_correct(class_PN, correct_PN)
    if not len(size_P):
        raise ValueError("no problems to vote on")
    mantissa_PNK, exponent_PNK = _binary(np.where(class_PN[..., None] >= 0, log_weight_PNK, -np.inf))
    if size_P.max() <= ENUMERATE:
        value_PnK = np.zeros((len(size_P), n_max, mantissa_PNK.shape[2]))
        for size in np.unique(size_P):
            at_once = max(1, BATCH_BYTES // (8 * 2**size * size * mantissa_PNK.shape[2]))
            of_size = np.flatnonzero(size_P == size)
            for part in np.split(of_size, range(at_once, len(of_size), at_once)):
                class_BN, mantissa_BNK, exponent_BNK = (x[part, :size] for x in (class_PN, mantissa_PNK, exponent_PNK))
                value_PnK[part] = _enumerated(class_BN, correct_PC[part], mantissa_BNK, exponent_BNK, n_max)
        return Votes(value_PnK, np.zeros(value_PnK.shape[1:]))
    if trials < 2:
        raise ValueError(f"a standard error needs at least 2 trials, not {trials}")
    mean_PnK, variance_PnK = _sampled(
        jax.random.key(seed), class_PN, correct_PC, mantissa_PNK, exponent_PNK, in_pool_PN, n_max=n_max, trials=trials
    )
    # Orders are drawn independently for each problem, so the variances of the problems' means add.
    standard_error_nK = np.sqrt(np.asarray(variance_PnK, float).sum(0) / trials) / len(size_P)
    return Votes(np.asarray(mean_PnK, float), standard_error_nK)


def _binary(log: Float[np.ndarray, "*shape"]) -> tuple[Float[np.ndarray, "*shape"], Int[np.ndarray, "*shape"]]:
    """Returns (mantissa, exponent) with exp(log) = mantissa * 2^exponent; the mantissa is in [1, 2), or 0 for -inf.

    Sums scaled by a power of two keep their ties.
    """
    finite = log > -np.inf
    exponent = np.floor(np.where(finite, log, 0.0) / np.log(2))
    mantissa = np.where(finite, np.exp(np.where(finite, log, 0.0) - exponent * np.log(2)), 0.0)
    return mantissa, np.where(finite, np.clip(exponent, LEAST, -LEAST), LEAST).astype(np.int32)


def _class_correct(class_PN, correct_PN):
    """Returns the mean correctness of each answer class, (P, C); 0 if a problem lacks the class."""
    problem_PN = np.arange(len(class_PN))[:, None] + np.zeros_like(class_PN)
    count_PC = np.zeros((len(class_PN), max(1, class_PN.max(initial=0) + 1)))
    right_PC = np.zeros_like(count_PC)
    answered_PN = class_PN >= 0
    np.add.at(count_PC, (problem_PN[answered_PN], class_PN[answered_PN]), 1)
    np.add.at(right_PC, (problem_PN[answered_PN], class_PN[answered_PN]), correct_PN[answered_PN])
    return right_PC / np.maximum(count_PC, 1)


def _enumerated(class_BN, correct_BC, mantissa_BNK, exponent_BNK, n_max):
    """Returns exact expectations, (B, n_max, K), over all subsets of N samples."""
    size = class_BN.shape[1]
    member_BNC = class_BN[:, :, None] == np.arange(correct_BC.shape[1])
    chosen_MN = (np.arange(1, 2**size)[:, None] >> np.arange(size)) & 1
    exponent_BMNK = np.where(chosen_MN[:, :, None], exponent_BNK[:, None], 2 * LEAST)
    exponent_BMNK -= exponent_BMNK.max(2, keepdims=True)
    weight_BMNK = np.ldexp(mantissa_BNK[:, None], exponent_BMNK)
    total_BMCK = member_BNC.swapaxes(1, 2)[:, None].astype(float) @ weight_BMNK
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
    mantissa_PNK: Float[Array, "P N K"],
    exponent_PNK: Int[Array, "P N K"],
    in_pool_PN: Bool[Array, "P N"],
    *,
    n_max: int,
    trials: int,
) -> tuple[Float[Array, "P n K"], Float[Array, "P n K"]]:
    """Returns mean and variance over random orders. Leaders are updated per sample, without a pass over classes.

    A total is in units of 2^scale, with scale the largest exponent so far when a sample of its class was last added.
    """
    trial_T = jnp.arange(trials)

    def in_units(x_TK, shift_TK):
        """Returns x / 2^shift, with shift >= 0; -1, for no sample, stays."""
        unit_TK = jax.lax.bitcast_convert_type(jnp.maximum(127 - shift_TK, 0) << 23, jnp.float32)  # 2^-shift, exactly
        return jnp.where(x_TK < 0, x_TK, x_TK * unit_TK)

    def problem(inputs):
        key, class_N, correct_C, mantissa_NK, exponent_NK, in_pool_N = inputs
        place_TN = jax.random.uniform(key, (trials, len(class_N)))
        order_TN = jnp.argsort(jnp.where(in_pool_N, place_TN, 2.0), axis=-1)

        def add_sample(carry, index_T):
            total_TCK, scale_TCK, top_TK, scale_TK, tied_TK, right_TK = carry
            class_T, exponent_TK = class_N[index_T], exponent_NK[index_T]
            answered_T1 = (class_T >= 0)[:, None]
            now_TK = jnp.maximum(scale_TK, exponent_TK)
            weight_TK = in_units(mantissa_NK[index_T], now_TK - exponent_TK)
            top_TK = in_units(top_TK, now_TK - scale_TK)
            before_TK = in_units(total_TCK[trial_T, class_T], now_TK - scale_TCK[trial_T, class_T])
            after_TK = jnp.where(answered_T1, jnp.maximum(before_TK, 0.0) + weight_TK, before_TK)
            correct_T1 = correct_C[class_T][:, None]
            near_TK = TIE * jnp.maximum(top_TK, 0.0)
            leads_TK = answered_T1 & (after_TK > top_TK + near_TK)
            joins_TK = answered_T1 & ~leads_TK & (after_TK >= top_TK - near_TK) & (before_TK < top_TK - near_TK)
            right_TK = jnp.where(leads_TK, correct_T1, right_TK + jnp.where(joins_TK, correct_T1, 0.0))
            tied_TK = jnp.where(leads_TK, 1.0, tied_TK + joins_TK)
            total_TCK = total_TCK.at[trial_T, class_T].set(after_TK)
            scale_TCK = scale_TCK.at[trial_T, class_T].set(now_TK)
            top_TK = jnp.maximum(top_TK, jnp.where(answered_T1, after_TK, -1.0))
            value_TK = right_TK / jnp.maximum(tied_TK, 1.0)
            return (total_TCK, scale_TCK, top_TK, now_TK, tied_TK, right_TK), (
                value_TK.mean(0),
                value_TK.var(0, ddof=1),
            )

        shape_TK, shape_TCK = (trials, K := mantissa_NK.shape[1]), (trials, len(correct_C), K)
        start = jnp.full(shape_TCK, -1.0), jnp.full(shape_TCK, LEAST), jnp.full(shape_TK, -1.0)
        start += jnp.full(shape_TK, LEAST), jnp.zeros(shape_TK), jnp.zeros(shape_TK)
        return jax.lax.scan(add_sample, start, order_TN[:, :n_max].T)[1]

    inputs = (jax.random.split(key, len(class_PN)), class_PN, correct_PC, mantissa_PNK, exponent_PNK, in_pool_PN)
    # Many problems at once, as far as their totals (T, C, K) fit into BATCH_BYTES: a step of one is all overhead.
    batch = max(1, min(len(class_PN), BATCH_BYTES // (8 * trials * correct_PC.shape[1] * mantissa_PNK.shape[2])))
    return jax.lax.map(problem, inputs, batch_size=batch)
