"""Evaluations: figures of the policy on held-out problems, with the same random numbers at every evaluation."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import Bool, Float

from jprm.evaluate.best_of_n import shown_n
from jprm.layout import Layout
from jprm.methods.rl.config import RLExperiment
from jprm.methods.rl.rollout import Group, neutral_tree, packed
from jprm.methods.verify.verifiers import Working, right_working
from jprm.objectives.policy_gradient import PolicyGradient
from jprm.statistics import bootstrap, weighted_mean
from jprm.train import Trainer

STREAM = -1
"""The number that evaluations have in place of an update's: their draws are no update's, and equal at all of them."""


def fresh(update: int, *, report: bool = False) -> int:
    """Returns the number of draws that no other evaluation shares: of a guard's test after this update, or a report's.

    What was chosen by its figures, or ended the run by them, is measured on other samples.
    """
    return STREAM - 1 - 2 * update - report


EXAMPLES = 3

Scores = Sequence[Sequence[Float[np.ndarray, " P"]]]
"""A PRM's, of every step, by problem and sample."""


def evaluation(groups: Sequence[Group], working: Working, others: Scores | None, seed: int) -> dict[str, Any]:
    """Returns the figures of held-out groups, as JSON holds them. `others`: the second PRM's scores, if there is one.

    gold: mean reward of the verifier, with `gold_low` and `gold_high`, its 95 % interval over problems; `gold_P` by
        problem. `pass`: by k, the probability that one of k samples is correct (Chen et al. 2021).
    proxy: mean over chains of the PRM's lowest step score, and `proxy_wrong` over incorrect chains alone.
    working: proportion of chains whose working is right; `right_with_wrong_working`, of correct chains.
    disagreement: mean distance of the two PRMs' scores of a step; `second`: the second one's `proxy`.
    tokens, steps: of a chain. blank, truncated: proportions of chains.
    """
    correct_PN = np.array([group.correct_G for group in groups])
    problems = np.arange(len(groups))
    interval = bootstrap(lambda w: weighted_mean(correct_PN.mean(1), w), problems, seed=seed).json()
    chains = [one for group in groups for one in group.trajectories]
    verdicts = [[right_working(working(g.record, one.steps)) for one in g.trajectories] for g in groups]
    working_PN = np.array(verdicts, bool)
    found: dict[str, Any] = {
        "gold": interval["value"], "gold_low": interval["low"], "gold_high": interval["high"],
        "gold_P": correct_PN.mean(1).tolist(),
        "pass": pass_at(correct_PN >= 1),
        "working": working_PN.mean(),
        "right_with_wrong_working": _mean(~working_PN[correct_PN >= 1]),
        "tokens": np.mean([len(one.ids) for one in chains]),
        "steps": np.mean([len(one.steps) for one in chains]),
        "blank": np.mean([not one.steps for one in chains]),
        "truncated": np.mean([not one.ended for one in chains]),
    }  # fmt: skip
    found |= _proxies(groups, others) | {"examples": examples(groups, verdicts)}
    return {key: float(x) if isinstance(x, np.floating) else x for key, x in found.items()}


def drift(trainer: Trainer, layout: Layout, groups: Sequence[Group], config: RLExperiment) -> float | None:
    """Returns KL(policy, reference) in nats a token: its mean over the tokens of held-out samples.

    Each token's KL is a sum over the vocabulary at the temperature of the samples, given the tokens before it.
    """
    data = dataclasses.replace(trainer.experiment.data, supervise="token", slots=config.tokens)
    trees = [
        neutral_tree(g.record["problem"][:60], layout.problem(g.record["problem"]), g.trajectories) for g in groups
    ]
    rows, _ = packed(trees, data, trainer.experiment.model.chain_rows)
    return trainer.measure(rows, PolicyGradient(temperature=config.temperature, estimator="exact"))["kl"]


def pass_at(correct_PN: Bool[np.ndarray, "P N"]) -> dict[str, float]:
    """Returns, for the powers of two up to N, the unbiased estimate of pass@k: 1 - C(N - c, k) / C(N, k)."""
    n = correct_PN.shape[1]
    wrong_P1 = n - correct_PN.sum(1, keepdims=True)
    found = {}
    for k in shown_n(n):
        failed_P = np.prod(np.maximum(wrong_P1 - np.arange(k), 0) / (n - np.arange(k)), axis=1)
        found[str(k)] = float(np.mean(1 - failed_P))
    return found


def lowest(scores: Sequence[Float[np.ndarray, " P"]]) -> Float[np.ndarray, " G"]:
    """Returns every chain's lowest step score, 0 for a chain without steps."""
    return np.array([score_P.min() if len(score_P) else 0.0 for score_P in scores])


def _proxies(groups: Sequence[Group], others: Scores | None) -> dict[str, Any]:
    if not groups or groups[0].scores is None:
        return {}
    first = [scores for group in groups for scores in group.scores or []]
    wrong_N = np.concatenate([group.correct_G < 1 for group in groups])
    found = {"proxy": lowest(first).mean(), "proxy_wrong": _mean(lowest(first)[wrong_N])}
    if others is not None:
        other = [scores for of_group in others for scores in of_group]
        apart = np.abs(np.concatenate(first) - np.concatenate(other))
        found |= {"second": lowest(other).mean(), "disagreement": _mean(apart)}
    return found


def examples(groups: Sequence[Group], verdicts: Sequence[Sequence[bool]]) -> list[dict[str, Any]]:
    """Returns the incorrect chains that the PRM rates highest, or without a PRM the first of them."""
    rows = []
    for group, right in zip(groups, verdicts, strict=True):
        for i, one in enumerate(group.trajectories):
            if group.correct_G[i] < 1:
                scores = group.scores[i] if group.scores else None
                top = float(lowest([scores])[0]) if scores is not None else 0.0
                rows.append((-top, len(rows), {
                    "problem": group.record["problem"], "answer": group.record["answer"], "steps": list(one.steps),
                    "scores": None if scores is None else [round(float(x), 4) for x in scores],
                    "right_working": bool(right[i]), "ended": one.ended,
                }))  # fmt: skip
    return [row for *_, row in sorted(rows, key=lambda row: row[:2])[:EXAMPLES]]


def train_figures(groups: Sequence[Group]) -> dict[str, float]:
    """Returns an update's own figures: reward, proxy, lengths, blank and cut chains, and groups without variance."""
    chains = [one for group in groups for one in group.trajectories]
    found = {
        "reward": np.mean([group.correct_G.mean() for group in groups]),
        "same_reward": np.mean([np.ptp(group.reward_G) == 0 for group in groups]),
        "chain_tokens": np.mean([len(one.ids) for one in chains]),
        "chain_steps": np.mean([len(one.steps) for one in chains]),
        "blank": np.mean([not one.steps for one in chains]),
        "truncated": np.mean([not one.ended for one in chains]),
    }
    if groups and groups[0].scores is not None:
        found["proxy"] = np.mean([lowest(group.scores).mean() for group in groups if group.scores is not None])
    return {name: float(value) for name, value in found.items()}


def _mean(value_N: np.ndarray) -> float | None:
    return float(np.mean(value_N)) if len(value_N) else None
