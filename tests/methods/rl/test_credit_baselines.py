"""Baselines of credits that reward steps: bias and variance of the gradient, by enumerating all groups of a small task.

A chain has up to three steps, each right or wrong, and after a step the policy may end it (`free`) or must not. The
policy is a table of logits. The verifier accepts only chains of right steps.
"""

import collections
import functools
import itertools
import math
from typing import NamedTuple

import numpy as np
import pytest

from jprm.methods.rl.credit import BASELINES, CreditConfig, segment_advantages

DEPTH = 3
RIGHT, ENDS = 0.7, 0.4
"""Probabilities of a right step after right ones, and of an end after a step where the policy may end."""


class Chain(NamedTuple):
    chance: float
    score_P: np.ndarray
    reward: float
    gradient_PL: np.ndarray


@functools.cache
def chains(free):
    """All chains with their chance, scores, reward, and gradients of the log-probability of each step."""
    rng, endings, places = np.random.default_rng(0), [], {}
    spread = {steps: rng.normal(0, 0.1) for n in range(1, DEPTH + 1) for steps in itertools.product("rw", repeat=n)}

    def place(what):
        return places.setdefault(what, len(places))

    lengths = range(1, DEPTH + 1) if free else [DEPTH]
    for steps in (x for n in lengths for x in itertools.product("rw", repeat=n)):
        chance, decided = 1.0, []
        for j, step in enumerate(steps):
            prefix, ended = steps[:j], j + 1 == len(steps)
            p_right = RIGHT if "w" not in prefix else 0.4
            chance *= p_right if step == "r" else 1 - p_right
            decided.append([(place(("step", prefix)), (step == "r") - p_right)])
            if free and j + 1 < DEPTH:
                chance *= ENDS if ended else 1 - ENDS
                decided[-1].append((place(("end", steps[: j + 1])), ended - ENDS))
        score_P = [(0.25 if "w" in steps[:n] else 0.8) + spread[steps[:n]] for n in range(1, len(steps) + 1)]
        endings.append((chance, np.array(score_P), float("w" not in steps), decided))
    gradients = [np.zeros((len(score_P), len(places))) for _, score_P, _, _ in endings]
    for gradient_PL, (*_, decided) in zip(gradients, endings, strict=True):
        for j, decisions in enumerate(decided):
            for at, value in decisions:
                gradient_PL[j, at] = value
    return [Chain(p, x_P, reward, y_PL) for (p, x_P, reward, _), y_PL in zip(endings, gradients, strict=True)]


def moments(config, free, size):
    """Returns mean (L) and total variance of the gradient of a group of so many samples, over all groups."""
    all_chains = chains(free)
    assert sum(chain.chance for chain in all_chains) == pytest.approx(1)
    first, second = np.zeros(all_chains[0].gradient_PL.shape[1]), 0.0
    for group in itertools.combinations_with_replacement(range(len(all_chains)), size):
        repeats = math.prod(map(math.factorial, collections.Counter(group).values()))
        members = [all_chains[i] for i in group]
        chance = math.factorial(size) / repeats * math.prod(member.chance for member in members)
        rewards, scores = np.array([member.reward for member in members]), [member.score_P for member in members]
        advantages = segment_advantages(rewards, scores, config)
        gradient_L = sum(a[:-1] @ member.gradient_PL for a, member in zip(advantages, members, strict=True)) / size
        first, second = first + chance * gradient_L, second + chance * gradient_L @ gradient_L
    return first, second - first @ first


def config(name, advantage="rloo", **options):
    return CreditConfig(name, advantage, "constant", 1, **options)


def true_gradient(name, free, offset):
    """Of the expected sum of all rewards."""
    total = {"verifier": lambda x: 0.0, "sum": lambda x: x.sum(), "implicit": lambda x: x[-1]}[name]
    return sum(
        chain.chance * (chain.reward + total(chain.score_P + offset)) * chain.gradient_PL.sum(0)
        for chain in chains(free)
    )


@pytest.mark.parametrize("name, offset", [("sum", 0.0), ("sum", -1.0), ("verifier", 0.0), ("implicit", 0.0)])
def test_full_returns_and_returns_to_go_are_unbiased_baselines(name, offset):
    for free in (False, True):
        wanted = true_gradient(name, free, offset)
        for baseline in ("to_go", "return"):
            mean, _ = moments(config(name, baseline=baseline, offset=offset), free, 2)
            np.testing.assert_allclose(mean, wanted, atol=1e-12)


def test_a_baseline_of_step_rewards_is_unbiased_where_all_chains_are_as_long():
    for name in ("sum", "implicit"):
        mean, _ = moments(config(name, baseline="step"), False, 2)
        np.testing.assert_allclose(mean, true_gradient(name, False, 0.0), atol=1e-12)


def test_a_baseline_of_step_rewards_makes_steps_cost_their_mean():
    """So no offset changes anything: scores above 0 do not pay for more steps, and those below 0 do not for fewer."""
    plain, shifted = (moments(config("sum", baseline="step", offset=offset), True, 2)[0] for offset in (0.0, -1.0))
    np.testing.assert_allclose(plain, shifted, atol=1e-12)
    assert np.abs(plain - true_gradient("sum", True, 0.0)).max() > 0.02


def test_dr_grpo_is_rloo_less_by_one_over_the_group_for_some_credits():
    for free in (False, True):
        for name in ("verifier", "sum", "implicit"):
            rloo, dr_grpo = (moments(config(name, x, baseline="return"), free, 3)[0] for x in ("rloo", "dr_grpo"))
            np.testing.assert_allclose(dr_grpo, rloo * 2 / 3, atol=1e-12)
    for name, options in {"min_form": {}, "progress": {}, "sum": {"gate": True, "offset": -0.5}}.items():
        both = (config(name, x, **options, baseline="return") for x in ("rloo", "dr_grpo"))
        rloo, dr_grpo = (moments(settings, True, 3)[0] for settings in both)
        assert np.abs(dr_grpo - rloo * 2 / 3).max() > 1e-3, name
    rloo, dr_grpo = (moments(config("min_form", x), False, 3)[0] for x in ("rloo", "dr_grpo"))
    np.testing.assert_allclose(dr_grpo, rloo * 2 / 3, atol=1e-12)  # to go, where all samples reach every step


def variances(free, size):
    """By credit, offset and baseline."""
    variance_of = {("verifier", 0.0, "to_go"): moments(config("verifier"), free, size)[1]}
    for name, offset, baseline in itertools.product(("sum", "min_form"), (0.0, -1.0), BASELINES):
        settings = config(name, offset=offset, baseline=baseline)
        variance_of[name, offset, baseline] = moments(settings, free, size)[1]
    return variance_of


def test_returns_to_go_have_less_variance_than_full_returns_over_credits_offsets_and_lengths():
    ratios = []
    for free in (False, True):
        variance = variances(free, 3)
        assert all(
            value > variance["verifier", 0.0, "to_go"] for (name, *_), value in variance.items() if name != "verifier"
        )
        ratios += [variance[n, x, "to_go"] / variance[n, x, "return"] for n in ("sum", "min_form") for x in (0.0, -1.0)]
    assert len(ratios) == 8 and max(ratios) < 1.15 and np.exp(np.mean(np.log(ratios))) < 0.9
    assert config("min_form").subtracted is BASELINES["to_go"]
