"""Credit: from a sample group's rewards to an advantage per token, as pure numpy functions.

A group is G samples for one problem. A sample is P steps and a tail, the tokens after its last step, if any. So a chain
has P + 1 segments, and an array over them ends in P1. The verifier's reward arrives with the tail. Letters: G samples,
P steps, T tokens in one sample.

    segment reward -> sum of later rewards (`to_go`) -> less the group's baseline -> every token in the segment

A credit (`CREDITS`, or the user's own) defines segment rewards, and the PRM scales that it accepts. Credits
include the verifier's reward; credits from the PRM alone have names that show it, because a policy learns to please a
PRM faster than to be correct.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
from collections.abc import Callable, Sequence
from typing import Literal

import numpy as np
from jaxtyping import Float

from jprm.methods.rl.samples import Rollout
from jprm.options import find_part
from jprm.score.scale import WEIGHTS, Scale, check_scale

EQUAL = 1e-6
"""Returns are equal up to this fraction of the largest (or of 1, if that is more), as float32 scores are rounded."""

Array = np.ndarray
Process = list[Float[Array, " P1"]]
"""Rewards or advantages of a group's segments, by sample."""

StepScores = Sequence[Float[Array, " P"]]
"""The PRM's scores of a group's steps, by sample."""

Statistics = Callable[[Float[Array, " G"]], tuple[Float[Array, " G"], float]]
"""A group's returns to each sample's baseline, and the advantages' divisor."""


# Outcome advantages over a group.

ADVANTAGES: dict[str, Statistics] = {
    # Williams 1992
    "reinforce": lambda return_G: (np.zeros_like(return_G), 1.0),
    # Liu et al. 2025: of whole samples (G - 1) / G of RLOO
    "dr_grpo": lambda return_G: (np.full_like(return_G, return_G.mean()), 1.0),
    # Kool et al. 2019, Ahmadian et al. 2024
    "rloo": lambda return_G: ((return_G.sum() - return_G) / (len(return_G) - 1), 1.0),
    # Shao et al. 2024; G - 1 in the deviation, as in TRL and verl
    "grpo": lambda return_G: (np.full_like(return_G, return_G.mean()), float(np.std(return_G, ddof=1))),
}
"""Baselines by name: 0, the group's mean, the others' mean, the group's mean with division by the deviation.

A baseline over the other samples does not depend on the sample; the mean over all scales the expected gradient by (G -
1) / G. A group without variance gives 0, except under "reinforce", which has no baseline.
"""


def checked(reward_G: Float[Array, " G"], name: str) -> None:
    """Raises ValueError if `name` is not in `ADVANTAGES`, a reward is not finite, or the group is too small for it.

    Only "reinforce" accepts fewer than two samples.
    """
    if name not in ADVANTAGES:
        raise ValueError(f"advantage={name!r} is not one of {', '.join(ADVANTAGES)}")
    if not np.isfinite(reward_G).all():
        raise ValueError("a reward or a score is not finite: see that the PRM and the verifier return numbers")
    if len(reward_G) < 2 and name != "reinforce":
        raise ValueError(f"advantage={name!r} compares the samples of a group, and this group has {len(reward_G)}")


def equal(return_N: Float[Array, " N"]) -> bool:
    """Returns whether returns have no variance, up to rounding (`EQUAL`). There must be at least one."""
    return bool(np.ptp(return_N) <= EQUAL * max(1.0, np.abs(return_N).max()))


# Credit of steps: rewards of P + 1 segments from the scores of P steps.


def sum_form(score_P: Float[Array, " P"]) -> Float[Array, " P1"]:
    """Every step is rewarded with its score, the tail with 0.

    If scores are above 0, steps pay, and the policy adds some.
    """
    return np.append(np.asarray(score_P, np.float64), 0.0)


def last_form(score_P: Float[Array, " P"]) -> Float[Array, " P1"]:
    """The last step is rewarded with its score, all else with 0.

    An outcome model or fused verifier scores the whole chain there.
    """
    reward_P1 = np.zeros(len(score_P) + 1)
    reward_P1[-2:-1] = score_P[-1:]
    return reward_P1


def min_form(score_P: Float[Array, " P"], temperature: float) -> Float[Array, " P1"]:
    """c_j = softmax_j(-r / T) r_j (Cheng et al. 2025, PURE, equation 6): the worst step decides.

    sum(c) goes to min(r) as T goes to 0, and to the mean as T goes to infinity. A step's c depends on later steps, so
    rewards to go give a biased gradient of E[sum c], unlike with the other forms. The tail has 0. Raises ValueError
    unless the temperature T is above 0.
    """
    score_P = np.asarray(score_P, np.float64)
    if not temperature > 0:
        raise ValueError(f"temperature={temperature} must be above 0; small ones come near the minimum")
    if not len(score_P):
        return np.zeros(1)
    weight_P = np.exp((score_P.min() - score_P) / temperature)
    return np.append(weight_P / weight_P.sum() * score_P, 0.0)


def shaping(potential_P: Float[Array, " P"], gamma: float) -> Float[Array, " P1"]:
    """gamma Phi_{j+1} - Phi_j, with Phi_j the score after j steps (Ng et al. 1999). The optimal policy is unchanged.

    Phi is 0 before the first step, which shifts all samples of a problem alike, and after the end, as episodes require
    (Grzes 2017): with gamma = 1 the sum is 0. The tail loses the last step's potential.
    """
    phi = np.concatenate([[0.0], np.asarray(potential_P, np.float64), [0.0]])
    return gamma * phi[1:] - phi[:-1]


def progress(value_P: Float[Array, " P"], start: float) -> Float[Array, " P1"]:
    """V_j - V_{j-1} (Setlur et al. 2024): a step's advantage under the prover whose success rate the PRM predicts.

    `start` is the value before the first step, e.g. the mean of the group's first scores. The tail has 0.
    """
    return np.append(np.diff(np.asarray(value_P, np.float64), prepend=start), 0.0)


def implicit(log_ratio_P: Float[Array, " P"]) -> Float[Array, " P1"]:
    """q_j - q_{j-1}, with q_j = beta log(p / p_reference) of the chain up to step j (Yuan et al. 2024; PRIME).

    q_0 is 0, and so is the tail's reward. The scores `log_ratio_P` are the q_j.
    """
    return progress(log_ratio_P, 0.0)


def gate(credit_P1: Float[Array, " P1"], correct: bool) -> Float[Array, " P1"]:
    """Returns the credit if the chain is `correct`; else only its negative part, min(c, 0).

    So a rejected chain never pays. Multiplying credit by verdict would also forgive an incorrect chain its worst steps.
    """
    return credit_P1 if correct else np.minimum(credit_P1, 0.0)


def to_go(reward_P1: Float[Array, " P1"], gamma: float = 1.0) -> Float[Array, " P1"]:
    """Returns every segment's reward to go, in float64: the sum over k >= j of gamma^(k - j) r_k."""
    total, return_P1 = 0.0, np.zeros(len(reward_P1))
    for segment in reversed(range(len(reward_P1))):
        return_P1[segment] = total = float(reward_P1[segment]) + gamma * total
    return return_P1


# Baselines: rewards of every sample's segments to the advantages of the segments. They differ in the variance of the
# gradient: experiments/studies/credit.md has figures. C_j is the reward to go of segment j.


def less_full_return(reward_GP1: Process, name: str, gamma: float) -> Process:
    """C_j - b, with b over the samples' full returns C_1 (Kool et al. 2019, Ahmadian et al. 2024, for whole samples).

    C_j sums rewards from segment j on, discounted by `gamma`; `name` is the baseline, `reinforce`, `dr_grpo`, `rloo` or
    `grpo`. Returns an array by sample: an advantage per step, then the tail's. The baseline is the same for all
    segments, though later segments expect other returns than earlier ones. "grpo" also divides by the deviation. All
    advantages are 0 if returns are equal, except with "reinforce".
    """
    return_GP1 = [to_go(reward_P1, gamma) for reward_P1 in reward_GP1]
    total_G = np.array([return_P1[0] for return_P1 in return_GP1])
    if name != "reinforce" and equal(total_G if name == "grpo" else np.concatenate(return_GP1)):
        return [np.zeros(len(return_P1)) for return_P1 in return_GP1]
    baseline_G, scale = ADVANTAGES[name](total_G)
    return [(return_P1 - baseline) / scale for return_P1, baseline in zip(return_GP1, baseline_G, strict=True)]


def less_return_to_go(reward_GP1: Process, name: str, gamma: float) -> Process:
    """C_j - b_j, with b_j over C_j in the samples that reach the j-th segment (Peters & Schaal 2008).

    C_j sums rewards from segment j on, discounted by `gamma`; `name` must be `rloo` or `dr_grpo`. The result has the
    form of `less_full_return`. b_j is 0 if no other sample reaches j. It depends on j, known before the segment is
    sampled, and on other samples, so the gradient is unbiased for any lengths.
    """
    return_GP1 = [to_go(reward_P1, gamma) for reward_P1 in reward_GP1]
    advantages = [np.zeros(len(return_P1)) for return_P1 in return_GP1]
    for j in range(max(map(len, return_GP1))):
        reaching = [g for g, return_P1 in enumerate(return_GP1) if len(return_P1) > j]
        return_N = np.array([return_GP1[g][j] for g in reaching])
        if len(reaching) == 1:
            baseline_N = np.zeros(1)
        else:
            baseline_N = return_N if equal(return_N) else ADVANTAGES[name](return_N)[0]
        for g, advantage in zip(reaching, return_N - baseline_N, strict=True):
            advantages[g][j] = advantage
    return advantages


def less_step_reward(reward_GP1: Process, name: str, gamma: float) -> Process:
    """The sum of gamma^(k - j) (c_k - m) over steps k >= j, in the form of `less_full_return`.

    `name` must be `rloo`, `dr_grpo` or `grpo`. m averages the other samples' mean step rewards (Cui et al. 2025, PRIME,
    and Cheng et al. 2025, PURE, per token), with "dr_grpo" over all samples. With "grpo" c_k is less the mean over all
    steps in the group and divided by their deviation (Shao et al. 2024, DeepSeekMath, section 4.1.3): sums over several
    steps do not scale with full returns' deviation.

    m is subtracted once per following step. If the policy decides how many follow, that changes the objective: a step
    costs m. The tail's reward is ignored, its advantage 0; all are 0 if the step rewards are equal.
    """
    steps_GP, count = [reward_P1[:-1] for reward_P1 in reward_GP1], len(reward_GP1)
    step_N = np.concatenate(steps_GP)
    if not len(step_N) or equal(step_N):
        return [np.zeros(len(reward_P1)) for reward_P1 in reward_GP1]
    centre_G, scale = np.full(count, step_N.mean()), 1.0
    if name == "grpo":
        scale = float(step_N.std(ddof=1))
    else:
        mean_G = np.array([step_P.mean() if len(step_P) else 0.0 for step_P in steps_GP])
        counted_GG = np.array([len(step_P) > 0 for step_P in steps_GP]) & ~(
            np.eye(count, dtype=bool) & (name == "rloo")
        )
        centre_G = counted_GG @ mean_G / np.maximum(counted_GG.sum(1), 1)
    pairs = zip(steps_GP, centre_G, strict=True)
    return [to_go(np.append((step_P - centre) / scale, 0.0), gamma) for step_P, centre in pairs]


BASELINES = {"to_go": less_return_to_go, "return": less_full_return, "step": less_step_reward}
"""Functions that subtract a baseline from segment returns, by name."""


# Advantages of whole methods, which have baselines of their own.

States = Sequence[Sequence[object]]
"""For each sample, a key for the state before each segment: equal states have equal keys."""


def normalised(return_N: Float[Array, " N"], name: str) -> Float[Array, " N"]:
    """Returns each return less its baseline, over the divisor, by `ADVANTAGES[name]`.

    `name` is `reinforce`, `dr_grpo`, `rloo` or `grpo`. 0 if there is only one return, or all are equal, also with
    "reinforce".
    """
    if len(return_N) < 2 or equal(return_N):
        return np.zeros(len(return_N))
    baseline_N, scale = ADVANTAGES[name](return_N)
    return (return_N - baseline_N) / scale


def gdpo(reward_G: Float[Array, " G"], score_GP: StepScores, states: States, config: CreditConfig) -> Process:
    """A_i = norm(R)_i + w norm(S)_i, each component normalised separately in the group (Liu et al. 2026, GDPO).

    norm is `normalised`, w `config.weight`; S is a sample's mean step score, 0 without steps. A sample's segments all
    have the same advantage; `states` are unused. Summing before normalising would lose the component with the smaller
    spread. The paper also divides by the batch's deviation, one number for all samples in an update.
    """
    score_G = np.array([score_P.mean() if len(score_P) else 0.0 for score_P in score_GP])
    total_G = normalised(reward_G, config.advantage) + config.weight * normalised(score_G, config.advantage)
    return [np.full(len(score_P) + 1, total) for score_P, total in zip(score_GP, total_G, strict=True)]


def gigpo(reward_G: Float[Array, " G"], score_GP: StepScores, states: States, config: CreditConfig) -> Process:
    """A_j = norm(sum_k r_k) + w norm(C_j | equal states) (Feng et al. 2025, GiGPO).

    norm is `normalised`, w `config.weight`. Rewards are the steps' scores, and the verifier's at the end. C_j is the
    reward to go, discounted by `config.gamma`, compared among all the group's segments that begin in the same state; a
    state with one occurrence gives 0.
    """
    reward_GP1 = [np.append(score_P, reward) for score_P, reward in zip(score_GP, reward_G, strict=True)]
    total_G = normalised(np.array([reward_P1.sum() for reward_P1 in reward_GP1]), config.advantage)
    places: dict[object, list[tuple[int, int]]] = {}
    for i, of_sample in enumerate(states):
        for j, state in enumerate(of_sample):
            places.setdefault(state, []).append((i, j))
    return_GP1 = [to_go(reward_P1, config.gamma) for reward_P1 in reward_GP1]
    advantages = [np.full(len(return_P1), total) for return_P1, total in zip(return_GP1, total_G, strict=True)]
    for equals in places.values():
        step_N = normalised(np.array([return_GP1[i][j] for i, j in equals]), config.advantage)
        for (i, j), advantage in zip(equals, step_N, strict=True):
            advantages[i][j] += config.weight * advantage
    return advantages


def turn_gae(reward_G: Float[Array, " G"], score_GP: StepScores, states: States, config: CreditConfig) -> Process:
    """A_j = sum_{k >= j} (gamma lam)^(k - j) (r_k + gamma V_k - V_(k-1)), with one turn as one action.

    Schulman et al. 2016; over turns: Li et al. 2025, Turn-PPO. V_k is the PRM's score after step k, V_0 the mean of the
    group's first scores (0 if no sample has steps), and the value after the end is 0, where the verifier's reward
    arrives. `states` are unused.
    """
    first = [score_P[0] for score_P in score_GP if len(score_P)]
    start = float(np.mean(first)) if first else 0.0
    advantages = []
    for reward, score_P in zip(reward_G, score_GP, strict=True):
        value = np.concatenate([[start], score_P, [0.0]])
        delta_P1 = config.gamma * value[1:] - value[:-1]
        delta_P1[-1] += reward
        advantages.append(to_go(delta_P1, config.gamma * config.lam))
    return advantages


# Named credits.

Form = Callable[["Float[Array, ' P']", "CreditConfig", float], "Float[Array, ' P1']"]
"""(step scores, options, mean score of the group's first steps) to segment rewards."""


@dataclasses.dataclass(frozen=True)
class Credit:
    """Rewards for a chain's steps.

    form: (step scores with `offset` added, options, mean score of the group's first steps) to P + 1 segment rewards;
        by default steps are not rewarded.
    scales: the scales that `form` accepts (`jprm.score.scale.Scale.weight`).
    tail: whether the form rewards the tail, which is not a step.
    verifier: whether the verifier's reward counts.
    follows: whether a segment is credited with later rewards. Progress is an advantage already.
    whole: (rewards, scores with `offset` added, states, options) to segment advantages, which are not weighted again,
        for a method with its own baselines.
    """

    source: str
    form: Form | None = None
    verifier: bool = True
    follows: bool = True
    scales: tuple[str, ...] = ("score", "half")
    tail: bool = False
    whole: Callable[[Float[Array, " G"], StepScores, States, CreditConfig], Process] | None = None

    @property
    def prm(self) -> bool:
        """Whether the credit needs step scores."""
        return self.form is not None or self.whole is not None


_WITH_VERIFIER = {
    "sum": Credit("step rewards of PPO: Wang et al. 2024, Math-Shepherd", lambda r, config, start: sum_form(r)),
    "min_form": Credit("Cheng et al. 2025, PURE", lambda r, config, start: min_form(r, config.temperature)),
    "last": Credit("outcome models: Cobbe et al. 2021", lambda r, config, start: last_form(r)),
    "implicit": Credit("Cui et al. 2025, PRIME", lambda r, config, start: implicit(r), scales=("sigmoid",)),
    "progress": Credit(
        "Setlur et al. 2024, PAV", lambda r, config, start: progress(r, start), follows=False, scales=("score",)
    ),
}
PRM_ALONE = "_prm_alone"
CREDITS: dict[str, Credit] = {
    "verifier": Credit("outcome alone: RLVR, Lambert et al. 2024"),
    "shaping": Credit("Ng et al. 1999", lambda r, config, start: shaping(r, config.gamma), scales=WEIGHTS, tail=True),
    "gdpo": Credit("Liu et al. 2026, GDPO, arXiv 2601.05242", whole=gdpo),
    "gigpo": Credit("Feng et al. 2025, GiGPO, arXiv 2505.10978", whole=gigpo),
    "turn_gae": Credit(
        "Schulman et al. 2016; Li et al. 2025, Turn-PPO, arXiv 2512.17008", whole=turn_gae, scales=("score",)
    ),
    **_WITH_VERIFIER,
    **{name + PRM_ALONE: dataclasses.replace(x, verifier=False) for name, x in _WITH_VERIFIER.items()},
}
"""Credits by name. Shaping alone has no net reward, so it has no PRM-alone variant. Any potential shapes, also log
odds."""


def find(name: str) -> Credit:
    """Returns the credit named in `CREDITS`, `module:NAME` or `FILE.py:NAME`, which is imported or executed.

    Raises ValueError if it is unknown or absent (`MissingPart`), or no `Credit`. Errors of its code pass.
    """
    return find_part(name, CREDITS, "credit.name", Credit, files=True)


@dataclasses.dataclass(frozen=True)
class CreditConfig:
    """From rewards and scores to tokens.

    name: in `CREDITS`, e.g. `sum` or `sum_prm_alone`, or your own `Credit`, `module:NAME` or `FILE.py:NAME`.
    advantage: `reinforce`, `dr_grpo`, `rloo` or `grpo` (`ADVANTAGES`).
    baseline: `to_go`, `return` or `step` (`BASELINES`); by default `step` with advantage="grpo", which allows no other,
        and `to_go` otherwise.
    norm: the divisor for a token's advantage. `sequence`, its sample's tokens (GRPO); `group`, the group's mean token
        count (DAPO, Yu et al. 2025); `constant`, `length` (Dr. GRPO); `last` puts a sample's whole advantage on its
        last token, for sequence ratios (GSPO).
    length: tokens, for norm=constant.
    weight: factor for step rewards beside the verifier's.
    temperature: for the min-form.
    gamma: discount per segment.
    lam: lambda for `turn_gae`: 1 is R - V before the turn, 0 the change in value.
    offset: added to every score. -1 makes probabilities at most 0, so an added step never pays.
    gate: apply `gate`.

    Raises ValueError, naming the field, if one is unknown, out of range or does not fit another; also as `find`.
    """

    name: str
    advantage: str
    norm: Literal["sequence", "group", "constant", "last"]
    length: int = 0
    weight: float = 1.0
    temperature: float = 0.1
    gamma: float = 1.0
    lam: float = 0.95
    offset: float = 0.0
    gate: bool = False
    baseline: Literal["to_go", "return", "step"] | None = None

    def __post_init__(self):
        credit = find(self.name)
        if self.advantage not in ADVANTAGES:
            raise ValueError(f"credit.advantage={self.advantage!r} is not one of {', '.join(ADVANTAGES)}")
        if self.norm not in ("sequence", "group", "constant", "last"):
            raise ValueError(f"credit.norm={self.norm!r} is not one of sequence, group, constant, last")
        if (self.norm == "constant") != (self.length > 0):
            raise ValueError(f"credit.norm={self.norm!r} with length={self.length}: only norm='constant' has a length")
        if not self.temperature > 0 or not 0 < self.gamma <= 1:
            raise ValueError(f"credit: temperature={self.temperature} must be above 0, gamma={self.gamma} in (0, 1]")
        if self.baseline is not None and (self.baseline not in BASELINES or self.advantage == "reinforce"):
            raise ValueError(
                f"credit.baseline={self.baseline!r} with advantage={self.advantage!r}: baselines are"
                f" {', '.join(BASELINES)}, and advantage='reinforce' has none"
            )
        if self.advantage == "grpo" and self.baseline not in (None, "step"):
            raise ValueError(
                f"credit.baseline={self.baseline!r} does not fit advantage='grpo': it divides by the deviation of step"
                " rewards. Leave baseline out, or choose another advantage"
            )
        if not 0 <= self.lam <= 1:
            raise ValueError(f"credit.lam={self.lam} must be in [0, 1]")
        if credit.whole and self.baseline is not None:
            raise ValueError(f"credit.baseline={self.baseline!r}: {self.name!r} has its own. Leave baseline out")
        if credit.whole is turn_gae and self.advantage != "reinforce":
            raise ValueError(f"credit.advantage={self.advantage!r}: turn_gae's baseline is the value. Set 'reinforce'")
        if credit.tail and self.of_steps:
            raise ValueError(
                f"credit.name={self.name!r} rewards the tail, but a baseline of steps leaves it out: choose"
                " advantage='rloo' or 'dr_grpo', and baseline='to_go' or 'return'"
            )
        if self.offset and "sigmoid" in credit.scales:
            raise ValueError(
                f"credit.offset={self.offset} does not fit {self.name!r}: it shifts probabilities, and a constant added"
                " to log ratios or to a potential means nothing"
            )
        if self.gate and (credit.tail or not credit.form or not credit.verifier):
            raise ValueError(f"credit.gate does not fit {self.name!r}: it takes a PRM's credit beside the verifier's")
        if self.norm == "last" and (not credit.follows or credit.whole not in (None, gdpo)):
            raise ValueError(f"credit.norm='last' needs one advantage a sample; {self.name!r} has one a step")

    @property
    def of_steps(self) -> bool:
        """Whether the baseline is over step rewards."""
        return self.baseline == "step" or self.advantage == "grpo"

    @property
    def subtracted(self) -> Callable[[Process, str, float], Process]:
        """The function in `BASELINES`, also if `baseline` is `None`; `return` with "reinforce", which subtracts 0."""
        default = {"grpo": "step", "reinforce": "return"}.get(self.advantage, "to_go")  # reinforce subtracts 0
        return BASELINES[self.baseline or default]

    def check(self, scale: Scale, model: str) -> None:
        """Raises ValueError, naming `model`, if the credit needs step scores and does not accept the PRM's scale."""
        credit = find(self.name)
        if credit.prm:
            check_scale(scale, credit.scales, model, f"credit.name={self.name!r}")


def segment_rewards(reward_G: Float[Array, " G"], scores: StepScores, config: CreditConfig) -> Process:
    """Returns the form's rewards for every sample's segments, in float64; 0 if the credit has no form.

    Scores get `config.offset`, but rewards not yet `config.weight`. With `config.gate` they pass `gate`, correct if the
    verifier's reward is above 0. The verifier's own rewards are not included. For the arguments see
    `segment_advantages`.

    Raises ValueError if the form does not give P + 1 rewards, or rewards the tail although `tail` is `False`.
    """
    credit = find(config.name)
    scores = [np.asarray(score_P, np.float64) + config.offset for score_P in scores]
    first = [score_P[0] for score_P in scores if len(score_P)]
    start = float(np.mean(first)) if first else 0.0
    process = []
    for reward, score_P in zip(reward_G, scores, strict=True):
        step_P1 = np.zeros(len(score_P) + 1)
        if credit.form:
            step_P1 = np.asarray(credit.form(score_P, config, start), np.float64)
        if len(step_P1) != len(score_P) + 1:
            raise ValueError(
                f"credit.name={config.name!r}: gives {len(step_P1)} rewards for {len(score_P)} steps, and needs one for"
                " each and one for the tail"
            )
        if step_P1[-1] and not credit.tail:
            raise ValueError(f"credit.name={config.name!r}: rewards the tail, and its Credit has tail=False")
        process.append(gate(step_P1, reward > 0) if config.gate else step_P1)
    return process


def segment_advantages(
    reward_G: Float[Array, " G"],
    scores: StepScores,
    config: CreditConfig,
    states: States | None = None,
) -> list[Float[Array, " P1"]]:
    """Returns the advantages for every sample's segments, in float64: all of `config` except its norm is applied.

    A sample with P steps has P + 1 of them, the tail's last.

    Args:
        reward_G: the verifier's rewards, above 0 for a correct sample. A negative one is a penalty, e.g. for a chain
            that was cut off, and counts under every credit.
        scores: the PRM's scores for every sample's steps. `verifier` needs only their number.
        states: state keys before each segment, for `gigpo`; by default only the first ones are equal.

    Raises ValueError like `checked`, and if the form does not give P + 1 rewards.
    """
    credit, process = find(config.name), segment_rewards(reward_G, scores, config)
    outcome_G = np.array([reward if credit.verifier or reward < 0 else 0.0 for reward in reward_G], np.float64)
    checked(outcome_G, config.advantage)
    checked(np.concatenate(process), "reinforce")
    if credit.whole:
        score_GP = [np.asarray(score_P, np.float64) + config.offset for score_P in scores]
        checked(np.concatenate([*score_GP, [0.0]]), "reinforce")
        apart = [[0, *((i, j) for j in range(len(score_P)))] for i, score_P in enumerate(score_GP)]
        return credit.whole(outcome_G, score_GP, apart if states is None else states, config)
    arriving = [
        np.append(np.zeros(len(step_P1) - 1), reward) for step_P1, reward in zip(process, outcome_G, strict=True)
    ]
    whole = less_full_return(arriving, config.advantage, config.gamma)
    earned = config.subtracted(process, config.advantage, config.gamma) if credit.follows else process
    return [of_R + config.weight * of_steps for of_R, of_steps in zip(whole, earned, strict=True)]


def token_weights(lengths: Sequence[int], config: CreditConfig) -> list[Float[Array, " T"]]:
    """Returns every token's weight by `config.norm`, given the samples' lengths: one over the length in tokens.

    That is the sample's own length for `sequence` and `last`, the group's mean for `group`, `config.length` for
    `constant`. Divided by the sample count, the weights' sum over a group is 1, or the mean length over
    `config.length`.
    """
    mean = sum(lengths) / max(len(lengths), 1)
    scale = {"group": mean, "constant": config.length}
    return [np.full(length, 1.0 / max(scale.get(config.norm, length), 1)) for length in lengths]


def token_advantages(
    samples: Sequence[Rollout],
    reward_G: Float[Array, " G"],
    scores: StepScores,
    config: CreditConfig,
) -> list[Float[Array, " T"]]:
    """Returns every token's advantage, with its norm folded in; a segment's advantage is on all its tokens.

    With norm="last", the sample's advantage is on its last token, undivided. An environment's tokens have 0.

    Raises ValueError if a sample does not have one score per step, and like `segment_advantages`.
    """
    for index, (sample, score_P) in enumerate(zip(samples, scores, strict=True)):
        if len(score_P) != len(sample.step_stop):
            raise ValueError(f"sample {index} has {len(sample.step_stop)} steps and {len(score_P)} scores")
    states = [states_of(sample) for sample in samples] if find(config.name).whole is gigpo else None
    advantages = segment_advantages(reward_G, scores, config, states)
    if config.norm == "last":
        return [np.append(np.zeros(len(x.ids) - 1), a[0]) for x, a in zip(samples, advantages, strict=True)]
    return [
        weight_T * np.repeat(advantage_P1, np.diff([0, *sample.step_stop, len(sample.ids)]))
        for sample, advantage_P1, weight_T in zip(samples, advantages, sampled_weights(samples, config), strict=True)
    ]


def states_of(sample: Rollout) -> list[object]:
    """Returns the hashable state keys before each of a sample's P + 1 segments.

    In an episode the state is the environment's text before the turn, where the segment begins: its spans of ids. Else
    it is all earlier tokens, as a SHA-256 hex digest. The first state in a group's samples is the problem.
    """
    states, prefix, spans = [], hashlib.sha256(), list(sample.observed)
    for begin, stop in itertools.pairwise([0, *sample.step_stop, len(sample.ids)]):
        seen = [spans.pop(0) for _ in range(len(spans)) if spans[0][0] < stop]
        states.append(tuple(tuple(sample.ids[a:b]) for a, b in seen) if seen else prefix.hexdigest())
        prefix.update(np.asarray(sample.ids[begin:stop], np.int64).tobytes())
    return states


def sampled_weights(samples: Sequence[Rollout], config: CreditConfig) -> list[Float[Array, " T"]]:
    """Returns `token_weights` for the sampled tokens; an environment's tokens have weight 0 and are not counted."""
    sampled = [sample.sampled_T for sample in samples]
    weights = token_weights([int(sampled_T.sum()) for sampled_T in sampled], config)
    spread = []
    for sampled_T, weight_N in zip(sampled, weights, strict=True):
        weight_T = np.zeros(len(sampled_T))
        weight_T[sampled_T] = weight_N
        spread.append(weight_T)
    return spread
