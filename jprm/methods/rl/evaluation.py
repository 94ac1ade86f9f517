"""Evaluations: figures of the policy on held-out problems, guards that may end the run by them, and its verdict.

All evaluations draw with the same random numbers. Guards and verdict are pure functions of the evaluations.

The gaming guard looks at every evaluation, and the best of many evaluations is lucky: compared with it at 95 %, most
long runs whose accuracy never changes look worse at some time. So a comparison raises no more than a suspicion. Then
both policies draw fresh samples, and one test on these decides.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Bool, Float
from scipy.special import stdtr

from jprm.evaluate.best_of_n import shown_n
from jprm.evaluate.blocks import decided, percent, points
from jprm.layout import Layout
from jprm.methods.rl.config import GuardConfig, RLExperiment
from jprm.methods.rl.rollout import Group, neutral_tree, packed
from jprm.methods.verify.verifiers import Working, right_working
from jprm.objectives.policy_gradient import PolicyGradient
from jprm.statistics import bootstrap, mean_differences, weighted_mean
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
    figures: dict[str, Any] = {
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
    figures |= _proxies(groups, others) | {"examples": examples(groups, verdicts)}
    return {key: float(x) if isinstance(x, np.floating) else x for key, x in figures.items()}


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
    estimates = {}
    for k in shown_n(n):
        failed_P = np.prod(np.maximum(wrong_P1 - np.arange(k), 0) / (n - np.arange(k)), axis=1)
        estimates[str(k)] = float(np.mean(1 - failed_P))
    return estimates


def lowest(scores: Sequence[Float[np.ndarray, " P"]]) -> Float[np.ndarray, " G"]:
    """Returns every chain's lowest step score, 0 for a chain without steps."""
    return np.array([score_P.min() if len(score_P) else 0.0 for score_P in scores])


def _proxies(groups: Sequence[Group], others: Scores | None) -> dict[str, Any]:
    if not groups or groups[0].scores is None:
        return {}
    first = [scores for group in groups for scores in group.scores or []]
    wrong_N = np.concatenate([group.correct_G < 1 for group in groups])
    figures = {"proxy": lowest(first).mean(), "proxy_wrong": _mean(lowest(first)[wrong_N])}
    if others is not None:
        other = [scores for of_group in others for scores in of_group]
        apart = np.abs(np.concatenate(first) - np.concatenate(other))
        figures |= {"second": lowest(other).mean(), "disagreement": _mean(apart)}
    return figures


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
    """Returns the figures of an update's samples: reward, proxy, lengths, blank and cut chains, equal rewards."""
    chains = [one for group in groups for one in group.trajectories]
    figures = {
        "reward": np.mean([group.correct_G.mean() for group in groups]),
        "same_reward": np.mean([np.ptp(group.reward_G) == 0 for group in groups]),
        "chain_tokens": np.mean([len(one.ids) for one in chains]),
        "chain_steps": np.mean([len(one.steps) for one in chains]),
        "blank": np.mean([not one.steps for one in chains]),
        "truncated": np.mean([not one.ended for one in chains]),
    }
    if groups and groups[0].scores is not None:
        figures["proxy"] = np.mean([lowest(group.scores).mean() for group in groups if group.scores is not None])
    return {name: float(value) for name, value in figures.items()}


def _mean(value_N: np.ndarray) -> float | None:
    return float(np.mean(value_N)) if len(value_N) else None


# ---- Guards: whether an evaluation ends the run.

Evaluation = Mapping[str, Any]

FALSE_ALARMS = 0.05
"""The most of the runs without a loss of accuracy that the gaming guard ends, whatever their length."""

SUSPICION = 0.025
"""The p-value below which an evaluation looks worse than the best one."""


def best_of(evaluations: Sequence[Evaluation]) -> int:
    """Returns the index of the evaluation with the most correct answers, the first of equals."""
    return int(np.argmax([each["gold"] for each in evaluations]))


def suspected(evaluations: Sequence[Evaluation], config: GuardConfig) -> bool:
    """Returns whether the last evaluation looks like gaming: a higher PRM's score and fewer correct answers."""
    now, best = evaluations[-1], evaluations[best_of(evaluations)]
    if not config.gaming or "proxy" not in now or not now["proxy"] > best["proxy"]:
        return False
    return p_worse(best, now) < SUSPICION


def fresh_test(best: Evaluation, now: Evaluation, earlier: int, seed: int) -> dict[str, Any]:
    """Returns the test of a suspicion on fresh samples of both policies, as JSON holds it.

    The k-th test of a run rejects at p < FALSE_ALARMS / (k (k + 1)), levels whose sum over all k is FALSE_ALARMS. Fresh
    samples do not depend on what raised the suspicion, so by the union bound this sum bounds the false alarms of a run.

    Args:
        best, now: evaluations on the same problems, on samples that nothing was chosen by.
        earlier: the number of the run's tests before.
    """
    level = FALSE_ALARMS / ((earlier + 1) * (earlier + 2))
    change = {key: x for key, x in gold_change(best, now, seed).items() if key != "better"}
    return {"best": best["gold"], "now": now["gold"], **change, "p": p_worse(best, now), "level": level}


def p_worse(before: Evaluation, after: Evaluation) -> float:
    """Returns the one-sided p-value of "no fewer answers are correct after", by the t-test paired by problem."""
    change_P = np.array(after["gold_P"]) - np.array(before["gold_P"])
    if len(change_P) < 2 or change_P.mean() >= 0:
        return 1.0
    error = change_P.std(ddof=1) / math.sqrt(len(change_P))
    return float(stdtr(len(change_P) - 1, change_P.mean() / error)) if error else 0.0


def fired(evaluations: Sequence[Evaluation], config: GuardConfig) -> str:
    """Returns the guard that the last evaluation fires, in words; empty where none does.

    The evaluation has the key `check` where `fresh_test` tested a suspicion.
    """
    now, best = evaluations[-1], evaluations[best_of(evaluations)]
    if (test := now.get("check")) and test["p"] < test["level"]:
        return (
            f"gaming: the PRM's score rose from {best['proxy']:.3f} to {now['proxy']:.3f} since update {best['update']}"
            f" while correct answers changed by {points(test)} on fresh samples"
        )
    if config.kl_budget and (now.get("kl") or 0.0) > config.kl_budget:
        return f"KL budget: {now['kl']:.4f} nats a token from the start, more than {config.kl_budget:g}"
    if config.disagreement and now["disagreement"] is not None and now["disagreement"] > config.disagreement:
        return (
            f"disagreement: the two PRMs' scores of a step lie {now['disagreement']:.3f} apart, more than"
            f" {config.disagreement:g}"
        )
    return ""


def gold_change(before: Evaluation, after: Evaluation, seed: int) -> dict[str, Any]:
    """Returns the paired difference in correct answers over the same problems, `after` less `before`."""
    difference_P1 = np.array(after["gold_P"])[:, None] - np.array(before["gold_P"])[:, None]
    problems = [str(i) for i in range(len(difference_P1))]
    interval = mean_differences(difference_P1, problems, seed).json()
    return {key: value[0] for key, value in interval.items()}


def verdict(evaluations: Sequence[Evaluation], ended: str, seed: int, fresh: Evaluation | None = None) -> list[str]:
    """Returns what the run shows, a sentence each.

    `fresh` is the best policy's evaluation on samples that it was not chosen by, which a run has at its end. The
    samples that it was chosen by show it better than it is.
    """
    first, last, best = evaluations[0], evaluations[-1], evaluations[best_of(evaluations)]
    shown = (fresh or best) if ended else last
    change, where = gold_change(first, shown, seed), ", on fresh samples," if ended and fresh else ""
    if shown is first or (ended and best is first):
        sentences = [f"Correct answers: {percent(first['gold'])} % at the start. No later evaluation was better."]
    else:
        sentences = [
            f"Correct answers went from {percent(first['gold'])} % to {percent(shown['gold'])} %{where} at update"
            f" {shown['update']}: {points(change)} on the same problems, {decided(change)}."
        ]
    if ended:
        sentences.append(f"A guard ended the run at update {last['update']}, {ended}.")
        sentences.append(f"The parameters are those of the best evaluation, at update {best['update']}.")
    elif fresh and best is not last and gold_change(fresh, last, seed)["high"] < 0:
        sentences.append(
            f"Update {best['update']}, which best/ holds, was better than the last: {percent(fresh['gold'])} % on fresh"
            " samples."
        )
    tests = [each["check"] for each in evaluations if "check" in each]
    if unconfirmed := sum(test["p"] >= test["level"] for test in tests):
        sentences.append(
            f"At {unconfirmed} of {len(evaluations)} evaluations the run looked like gaming, and fresh samples did"
            " not confirm it."
        )
    if "proxy" in first:
        moved = "rose" if last["proxy"] > first["proxy"] else "fell"
        sentences.append(
            f"The PRM's mean lowest score {moved} from {first['proxy']:.3f} to {last['proxy']:.3f} by update"
            f" {last['update']}."
        )
    sentences.append(
        f"Right working: {percent(first['working'])} % of chains at the start, {percent(shown['working'])} % at update"
        f" {shown['update']}. Tokens a chain: {first['tokens']:.1f} and {shown['tokens']:.1f}."
    )
    return sentences
