"""Credit: rewards of a group of samples to an advantage for every token, as pure numpy functions.

A group is G samples of one problem. A sample is P steps and a tail, the tokens after its last step, of which there may
be none. So a chain has P + 1 segments, and an array over them ends in P1. The verifier's reward arrives with the tail.
Letters: G samples, P steps, T tokens of one sample.

    reward of a segment -> sum of what follows (`to_go`) -> less the group's baseline -> every token of the segment

A credit (`CREDITS`) says what a segment is rewarded for. Credits take the verifier's reward too; those that leave the
PRM alone have names that say so, because a policy learns to please a PRM faster than to be correct.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Literal

import numpy as np
from jaxtyping import Float, Int

from jprm.rl.trajectory import Trajectory

EQUAL = 1e-6
"""Returns that differ by less, relative to the largest, are equal: float32 scores do not tell them apart."""

Array = np.ndarray
Statistics = Callable[[Float[Array, " G"]], tuple[Float[Array, " G"], float]]
"""Returns of a group to the baseline of every sample, and the scale by which advantages are divided."""


# Outcome advantages over a group.


def _no_baseline(return_G: Array) -> tuple[Array, float]:
    return np.zeros_like(return_G), 1.0


def _mean(return_G: Array) -> tuple[Array, float]:
    return np.full_like(return_G, return_G.mean()), 1.0


def _leave_one_out(return_G: Array) -> tuple[Array, float]:
    return (return_G.sum() - return_G) / (len(return_G) - 1), 1.0


def _standard(return_G: Array) -> tuple[Array, float]:
    return np.full_like(return_G, return_G.mean()), float(np.std(return_G, ddof=1))


ADVANTAGES: dict[str, Statistics] = {
    "reinforce": _no_baseline,  # Williams 1992
    "dr_grpo": _mean,  # Liu et al. 2025: (G - 1) / G of RLOO
    "rloo": _leave_one_out,  # Kool et al. 2019, Ahmadian et al. 2024
    "grpo": _standard,  # Shao et al. 2024; G - 1 in the deviation, as in TRL and verl
}
"""Baselines by name: none, the group's mean, the mean of the others, the mean with division by the deviation."""


def centred(return_GP1: Sequence[Float[Array, " P1"]], name: str) -> list[Float[Array, " P1"]]:
    """Returns the advantages of every sample's segments: their returns less the baseline, divided by the scale.

    Baseline and scale are taken over the samples' full returns, those of their first segments. A baseline over the
    other samples does not depend on the sample, and the mean over all scales the expected gradient by (G - 1) / G.

    Raises ValueError for an unknown name, a return that is not finite, or a group of one, which has no baseline.
    """
    if name not in ADVANTAGES:
        raise ValueError(f"advantage={name!r} is not one of {', '.join(ADVANTAGES)}")
    total_G = np.array([return_P1[0] for return_P1 in return_GP1], np.float64)
    if not all(np.isfinite(return_P1).all() for return_P1 in return_GP1):
        raise ValueError("a reward or a score is not finite: see that the PRM and the verifier return numbers")
    if len(total_G) < 2 and name != "reinforce":
        raise ValueError(f"advantage={name!r} compares the samples of a group, and this group has {len(total_G)}")
    if name != "reinforce" and equal(total_G if name == "grpo" else np.concatenate(return_GP1)):
        return [np.zeros(len(return_P1)) for return_P1 in return_GP1]
    baseline_G, scale = ADVANTAGES[name](total_G)
    pairs = zip(return_GP1, baseline_G, strict=True)
    return [(np.asarray(return_P1, np.float64) - baseline) / scale for return_P1, baseline in pairs]


def equal(return_N: Float[Array, " N"]) -> bool:
    """Returns whether returns have no variance, rounding aside."""
    return bool(np.ptp(return_N) <= EQUAL * max(1.0, np.abs(return_N).max()))


def outcome(reward_G: Float[Array, " G"], name: str) -> Float[Array, " G"]:
    """Returns the advantages of whole samples; errors as in `centred`. A group without variance gives 0.

    "reinforce" has no baseline: it alone leaves equal rewards as they are.
    """
    return np.concatenate(centred([np.array([reward], np.float64) for reward in reward_G], name))


def grpo(reward_G: Float[Array, " G"]) -> Float[Array, " G"]:
    """Returns (R - mean) / deviation (Shao et al. 2024, DeepSeekMath)."""
    return outcome(reward_G, "grpo")


def dr_grpo(reward_G: Float[Array, " G"]) -> Float[Array, " G"]:
    """Returns R - mean (Liu et al. 2025, "Understanding R1-Zero-Like Training")."""
    return outcome(reward_G, "dr_grpo")


def rloo(reward_G: Float[Array, " G"]) -> Float[Array, " G"]:
    """Returns R - mean of the others (Kool et al. 2019; Ahmadian et al. 2024)."""
    return outcome(reward_G, "rloo")


def reinforce(reward_G: Float[Array, " G"], baseline: Literal["none", "mean", "others"]) -> Float[Array, " G"]:
    """R - baseline (Williams 1992): 0, the group's mean (Dr. GRPO), or the mean of the others (RLOO)."""
    names = {"none": "reinforce", "mean": "dr_grpo", "others": "rloo"}
    if baseline not in names:
        raise ValueError(f"baseline={baseline!r} is not one of {', '.join(names)}")
    return outcome(reward_G, names[baseline])


# Credit of steps: rewards of P + 1 segments from the scores of P steps.


def sum_form(score_P: Float[Array, " P"]) -> Float[Array, " P1"]:
    """Every step is rewarded with its score. Where scores are above 0, steps pay, and the policy adds some."""
    return np.append(np.asarray(score_P, np.float64), 0.0)


def min_form(score_P: Float[Array, " P"], temperature: float) -> Float[Array, " P1"]:
    """c_j = softmax_j(-r / T) r_j (Cheng et al. 2025, PURE, equation 6): the worst step decides.

    The sum of c goes to the minimum of r as T goes to 0, and to the mean as T goes to infinity. A step's c depends on
    the steps that follow it, so rewards to go are no unbiased gradient of E[sum c], as those of other forms are.
    """
    score_P = np.asarray(score_P, np.float64)
    if not temperature > 0:
        raise ValueError(f"temperature={temperature} must be above 0; small ones come near the minimum")
    if not len(score_P):
        return np.zeros(1)
    weight_P = np.exp((score_P.min() - score_P) / temperature)
    return np.append(weight_P / weight_P.sum() * score_P, 0.0)


def shaping(potential_P: Float[Array, " P"], gamma: float) -> Float[Array, " P1"]:
    """gamma Phi_{j+1} - Phi_j, Phi_j being the score after j steps (Ng et al. 1999). The optimal policy stays.

    Phi is 0 before the first step, which shifts all samples of a problem alike, and after the end, which must be so in
    episodes (Grzes 2017): with gamma = 1 the sum is 0. The tail has the last step's potential to lose.
    """
    phi = np.concatenate([[0.0], np.asarray(potential_P, np.float64), [0.0]])
    return gamma * phi[1:] - phi[:-1]


def progress(value_P: Float[Array, " P"], start: float) -> Float[Array, " P1"]:
    """V_j - V_{j-1} (Setlur et al. 2024): a step's advantage under the prover whose success rate the PRM predicts.

    `start` is the value before the first step.
    """
    return np.append(np.diff(np.asarray(value_P, np.float64), prepend=start), 0.0)


def implicit(log_ratio_P: Float[Array, " P"]) -> Float[Array, " P1"]:
    """q_j - q_{j-1}, q_j being beta log(p / p_reference) of the chain up to step j (Yuan et al. 2024; PRIME)."""
    return progress(log_ratio_P, 0.0)


def gate(credit_P1: Float[Array, " P1"], correct: bool) -> Float[Array, " P1"]:
    """Returns the credit of a chain that the verifier accepts; of others only what is below 0, so that they never pay.

    The product of credit and verdict would also forgive an incorrect chain its worst steps.
    """
    return credit_P1 if correct else np.minimum(credit_P1, 0.0)


def to_go(reward_P1: Float[Array, " P1"], gamma: float = 1.0) -> Float[Array, " P1"]:
    """Returns the reward to go of every segment: the sum over k >= j of gamma^(k - j) r_k."""
    total, return_P1 = 0.0, np.zeros(len(reward_P1))
    for segment in reversed(range(len(reward_P1))):
        return_P1[segment] = total = float(reward_P1[segment]) + gamma * total
    return return_P1


# Named credits.

Form = Callable[["Float[Array, ' P']", "CreditConfig", float], "Float[Array, ' P1']"]
"""(scores of the steps, options, mean score of the group's first steps) to rewards of segments."""


@dataclasses.dataclass(frozen=True)
class Credit:
    """What the steps of a chain are rewarded for.

    form: None rewards no step.
    verifier: whether the verifier's reward counts.
    follows: whether a segment answers for the rewards that follow it. Progress is an advantage already.
    """

    source: str
    form: Form | None = None
    verifier: bool = True
    follows: bool = True

    @property
    def prm(self) -> bool:
        """Whether the credit needs the scores of steps."""
        return self.form is not None


_WITH_VERIFIER = {
    "sum": Credit("step rewards of PPO: Wang et al. 2024, Math-Shepherd", lambda r, config, start: sum_form(r)),
    "min_form": Credit("Cheng et al. 2025, PURE", lambda r, config, start: min_form(r, config.temperature)),
    "implicit": Credit("Cui et al. 2025, PRIME", lambda r, config, start: implicit(r)),
    "progress": Credit("Setlur et al. 2024, PAV", lambda r, config, start: progress(r, start), follows=False),
}
PRM_ALONE = "_prm_alone"
CREDITS: dict[str, Credit] = {
    "verifier": Credit("outcome alone: RLVR, Lambert et al. 2024"),
    "shaping": Credit("Ng et al. 1999", lambda r, config, start: shaping(r, config.gamma)),
    **_WITH_VERIFIER,
    **{name + PRM_ALONE: dataclasses.replace(x, verifier=False) for name, x in _WITH_VERIFIER.items()},
}
"""Credits by name. Shaping rewards nothing by itself, so it has no PRM alone."""


@dataclasses.dataclass(frozen=True)
class CreditConfig:
    """From rewards and scores to tokens.

    name: in `CREDITS`.
    advantage: in `ADVANTAGES`.
    norm: what a token's advantage is divided by. `sequence`, the tokens of its sample (GRPO); `group`, the mean number
        of tokens in the group (DAPO, Yu et al. 2025); `constant`, `length` (Dr. GRPO); `last` puts a sample's whole
        advantage on its last token, for the ratio of sequences (GSPO).
    length: tokens, for norm=constant.
    weight: of steps' rewards beside the verifier's.
    temperature: of the min-form.
    gamma: discount by segment.
    offset: added to every score. -1 makes probabilities at most 0, so that an added step never pays.
    gate: apply `gate`.
    """

    name: str
    advantage: str
    norm: Literal["sequence", "group", "constant", "last"]
    length: int = 0
    weight: float = 1.0
    temperature: float = 0.1
    gamma: float = 1.0
    offset: float = 0.0
    gate: bool = False

    def __post_init__(self):
        if self.name not in CREDITS:
            raise ValueError(f"credit.name={self.name!r} is not one of {', '.join(CREDITS)}")
        if self.advantage not in ADVANTAGES:
            raise ValueError(f"credit.advantage={self.advantage!r} is not one of {', '.join(ADVANTAGES)}")
        if self.norm not in ("sequence", "group", "constant", "last"):
            raise ValueError(f"credit.norm={self.norm!r} is not one of sequence, group, constant, last")
        if (self.norm == "constant") != (self.length > 0):
            raise ValueError(f"credit.norm={self.norm!r} with length={self.length}: norm='constant' alone has a length")
        if not self.temperature > 0 or not 0 < self.gamma <= 1:
            raise ValueError(f"credit: temperature={self.temperature} must be above 0, gamma={self.gamma} in (0, 1]")
        if self.gate and (self.name in ("verifier", "shaping") or not CREDITS[self.name].verifier):
            raise ValueError(f"credit.gate does not fit {self.name!r}: it takes a PRM's credit beside the verifier's")
        if self.norm == "last" and not CREDITS[self.name].follows:
            raise ValueError(f"credit.norm='last' has one advantage a sample, which {self.name!r} has not")


def segment_advantages(
    reward_G: Float[Array, " G"], scores: Sequence[Float[Array, " P"]], config: CreditConfig
) -> list[Float[Array, " P1"]]:
    """Returns the advantages of the segments of every sample.

    Args:
        reward_G: the verifier's rewards, above 0 for a correct sample. One below 0 is a penalty, as of a chain that was
            cut off, and counts under every credit.
        scores: the PRM's scores of every sample's steps. `verifier` looks at their number alone.

    Raises ValueError as `centred` does.
    """
    credit = CREDITS[config.name]
    scores = [np.asarray(score_P, np.float64) + config.offset for score_P in scores]
    first = [score_P[0] for score_P in scores if len(score_P)]
    start = float(np.mean(first)) if first else 0.0
    process, returns = [], []
    for reward, score_P in zip(reward_G, scores, strict=True):
        step_P1 = credit.form(score_P, config, start) if credit.form else np.zeros(len(score_P) + 1)
        step_P1 = config.weight * (gate(step_P1, reward > 0) if config.gate else step_P1)
        earned_P1 = step_P1.copy() if credit.follows else np.zeros(len(step_P1))
        earned_P1[-1] += reward if credit.verifier or reward < 0 else 0.0
        process.append(step_P1)
        returns.append(to_go(earned_P1, config.gamma))
    advantages = centred(returns, config.advantage)
    if credit.follows:
        return advantages
    return [outcome + step for outcome, step in zip(advantages, process, strict=True)]


def token_weights(lengths: Sequence[int], config: CreditConfig) -> list[Float[Array, " T"]]:
    """Returns the weight of every token of every sample, by `config.norm`; with `last`, as with `sequence`.

    Divided by the number of samples, their sum over a group is 1, or the mean length over `config.length`.
    """
    mean = sum(lengths) / max(len(lengths), 1)
    scale = {"group": mean, "constant": config.length}
    return [np.full(length, 1.0 / max(scale.get(config.norm, length), 1)) for length in lengths]


def token_advantages(
    trajectories: Sequence[Trajectory],
    reward_G: Float[Array, " G"],
    scores: Sequence[Float[Array, " P"]],
    config: CreditConfig,
) -> list[Float[Array, " T"]]:
    """Returns the advantage of every token of a group, its norm folded in: a segment's on all its tokens.

    Raises ValueError where a sample has not one score a step, and as `centred` does.
    """
    for index, (one, score_P) in enumerate(zip(trajectories, scores, strict=True)):
        if len(score_P) != len(one.step_stop):
            raise ValueError(f"sample {index} has {len(one.step_stop)} steps and {len(score_P)} scores")
    advantages = segment_advantages(reward_G, scores, config)
    lengths = [len(one.ids) for one in trajectories]
    if config.norm == "last":
        return [np.append(np.zeros(n - 1), x[0]) for n, x in zip(lengths, advantages, strict=True)]
    weights = token_weights(lengths, config)
    return [
        weight_T * np.repeat(advantage_P1, segment_lengths(one))
        for one, advantage_P1, weight_T in zip(trajectories, advantages, weights, strict=True)
    ]


def segment_lengths(one: Trajectory) -> Int[Array, " P1"]:
    """Returns the number of tokens of every step and of the tail."""
    return np.diff([0, *one.step_stop, len(one.ids)])
