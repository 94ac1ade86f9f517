"""Guards: whether an evaluation ends the run, and the run's verdict in words. Pure functions of the evaluations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jprm.evaluate.paired import mean_differences
from jprm.evaluate.wording import decided, percent, points
from jprm.rl.config import GuardConfig

Evaluation = Mapping[str, Any]


def best_of(evaluations: Sequence[Evaluation]) -> int:
    """Returns the index of the evaluation with the most correct answers, the first of equals."""
    return int(np.argmax([each["gold"] for each in evaluations]))


def fired(evaluations: Sequence[Evaluation], config: GuardConfig, seed: int) -> str:
    """Returns the guard that the last evaluation fires, in words; empty where none does."""
    now, best = evaluations[-1], evaluations[best_of(evaluations)]
    change = gold_change(best, now, seed)
    if config.gaming and "proxy" in now and now["proxy"] > best["proxy"] and change["high"] < 0:
        return (
            f"gaming: the PRM's score rose from {best['proxy']:.3f} to {now['proxy']:.3f} since update {best['update']}"
            f" while correct answers changed by {points(change)}"
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
    found = mean_differences(difference_P1, [str(i) for i in range(len(difference_P1))], seed).json()
    return {key: value[0] for key, value in found.items()}


def verdict(evaluations: Sequence[Evaluation], ended: str, seed: int) -> list[str]:
    """Returns what the run shows, a sentence each."""
    first, last, best = evaluations[0], evaluations[-1], evaluations[best_of(evaluations)]
    shown = best if ended else last
    change = gold_change(first, shown, seed)
    if shown is first:
        sentences = [f"Correct answers: {percent(first['gold'])} % at the start. No later evaluation was better."]
    else:
        sentences = [
            f"Correct answers went from {percent(first['gold'])} % to {percent(shown['gold'])} % at update"
            f" {shown['update']}: {points(change)} on the same problems, {decided(change)}."
        ]
    if ended:
        sentences.append(f"A guard ended the run at update {last['update']}, {ended}.")
        sentences.append(f"The parameters are those of the best evaluation, at update {best['update']}.")
    elif best is not last and gold_change(best, last, seed)["high"] < 0:
        sentences.append(f"Update {best['update']}, which best/ holds, was better than the last.")
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
