"""The first bad turn of a failed trajectory: which turn, and which agent, is to blame.

A prediction names one turn of each trajectory that has a labelled bad turn. It is right within k where it is at most k
turns from the first labelled one; `agent` is whether the turn that it names is of the agent to blame, which is the
record's `mistake_agent`, else the `name` of the labelled turn. Names are compared without what stands in parentheses
after them ("Orchestrator (thought)") and without case. Predictions of scores:

    lowest           the turn of the lowest score, the first of equals
    below            the first turn below the threshold, else the lowest

and without a model: the `first`, `second` and `last` turn, the `longest`, and `any` turn at random, whose figures are
expectations. `any agent` is the chance of an agent at random among those of the trajectory. Who&When is of Zhang et al.
2025, arXiv 2505.00212.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from jprm.methods.evaluate.blocks import Table
from jprm.methods.evaluate.trials import features
from jprm.statistics import Draws, difference, draws, interval, weighted_mean
from jprm.tree import ReasoningTree, chains_of

WITHIN = (0, 1, 3, 5)
"""Distances in turns at which a predicted turn counts as right."""


class Failed(NamedTuple):
    """A trajectory with a labelled bad turn."""

    task: str
    place: int  # of its first bad turn, from 0
    agents: list[str]  # of each turn; "" where it has no name
    to_blame: str
    scores: list[float] | None
    characters: list[int]


def agent_of(name: str) -> str:
    """Returns an agent's name as names are compared: without what stands in parentheses, without case."""
    return re.sub(r"\s*\(.*\)\s*$", "", name).strip().casefold()


def failed_of(trees: Sequence[ReasoningTree]) -> list[Failed]:
    """Returns the trajectories that have a labelled bad turn: -1 as a rating, else below 0.5."""
    failed = []
    for tree in trees:
        bound = 0 if tree.semantics == "rating" else 0.5
        for chain in chains_of(tree):
            nodes = [tree.nodes[i] for i in chain]
            place = next((k for k, node in enumerate(nodes) if node.label is not None and node.label < bound), None)
            if place is None:
                continue
            agents = [agent_of(str(node.extra.get("name") or "")) for node in nodes]
            blamed = tree.extra.get("mistake_agent")
            to_blame = agent_of(blamed) if isinstance(blamed, str) else agents[place]
            scores = [float(node.score) for node in nodes if node.score is not None]
            known = scores if len(scores) == len(nodes) else None
            failed.append(Failed(tree.problem, place, agents, to_blame, known, features(tree, chain).characters))
    return failed


def first_bad_report(trees: Sequence[ReasoningTree], threshold: float, seed: int) -> dict[str, Any]:
    """Returns the figures of every prediction with 95 % intervals over tasks; {} where no turn is labelled bad.

    `ahead` is each figure of the scores less the best trivial prediction's of that figure, on the same resamples.
    """
    failed = failed_of(trees)
    if not failed:
        return {}
    named = all(run.to_blame and any(run.agents) for run in failed)
    figures = [f"within_{k}" if k else "step" for k in WITHIN] + ["agent"] * named
    rows = {name: _drawn([_certain(run, at(run)) for run in failed], failed, seed) for name, at in _TRIVIAL.items()}
    rows["any"] = _drawn([_random(run) for run in failed], failed, seed)
    if named:  # of the other figures it says nothing
        chance = [[np.nan] * len(WITHIN) + [(run.to_blame in run.agents) / len({*run.agents})] for run in failed]
        rows["any agent"] = _drawn(chance, failed, seed)
    scores: dict[str, Draws] = {}
    if all(run.scores is not None for run in failed):
        scores["lowest"] = _drawn([_certain(run, _lowest(run)) for run in failed], failed, seed)
        scores["below"] = _drawn([_certain(run, _below(run, threshold)) for run in failed], failed, seed)

    def shown(predictions: Mapping[str, Draws]) -> dict[str, Any]:
        return {
            name: {figure: interval(_column(drawn, c)).json() for c, figure in enumerate(figures)
                   if np.isfinite(drawn.value[c])}
            for name, drawn in predictions.items()
        }  # fmt: skip

    best = [max(rows, key=lambda name, c=c: np.nan_to_num(rows[name].value[c], nan=-1)) for c in range(len(figures))]
    return {
        "n": len(failed), "n_tasks": len({run.task for run in failed}), "figures": figures,
        "scores": shown(scores), "trivial": shown(rows), "best_trivial": dict(zip(figures, best, strict=True)),
        "ahead": {
            name: {figure: difference(_column(drawn, c), _column(rows[best[c]], c)).json()
                   for c, figure in enumerate(figures)}
            for name, drawn in scores.items()
        },
    }  # fmt: skip


_TRIVIAL = {
    "first": lambda run: 0,
    "second": lambda run: min(1, len(run.agents) - 1),
    "last": lambda run: len(run.agents) - 1,
    "longest": lambda run: int(np.argmax(run.characters)),
}


def _lowest(run: Failed) -> int:
    return int(np.argmin(np.array(run.scores)))


def _below(run: Failed, threshold: float) -> int:
    below = np.array(run.scores) < threshold
    return int(np.argmax(below)) if below.any() else _lowest(run)


def _certain(run: Failed, place: int) -> list[float]:
    """Returns the figures of a prediction: right within each distance, and the right agent."""
    return [float(abs(place - run.place) <= k) for k in WITHIN] + [float(run.agents[place] == run.to_blame)]


def _random(run: Failed) -> list[float]:
    """Returns the mean of `_certain` over all turns."""
    return np.mean([_certain(run, place) for place in range(len(run.agents))], 0).tolist()


def _drawn(value_KC: list[list[float]], failed: Sequence[Failed], seed: int) -> Draws:
    value = np.array(value_KC)
    return draws(lambda weight_RK: weighted_mean(value, weight_RK), [run.task for run in failed], seed=seed)


def _column(drawn: Draws, c: int) -> Draws:
    return Draws(drawn.value[c], drawn.drawn_R[:, c], drawn.groups)


def tables(reports: Mapping[str, Mapping[str, Any]]) -> Iterator[Table]:
    """Yields the tables of the `first_bad` of one or several models' reports, by name."""
    first = next(iter(reports.values()))
    heads = ["right turn" if figure == "step" else figure.replace("_", " ") for figure in first["figures"]]

    def row(name: str, figures: Mapping[str, Any]) -> list[Any]:
        return [name, *(figures.get(figure) for figure in first["figures"])]

    def of_models(key: str) -> list[Any]:
        return [
            row(f"{model}: {name}" if len(reports) > 1 else name, figures)
            for model, report in reports.items() for name, figures in report[key].items()
        ]  # fmt: skip

    rows = of_models("scores")
    rows += [None] * bool(rows) + [row(f"trivial: {name}", figures) for name, figures in first["trivial"].items()]
    title = f"First bad turn of {first['n']} trajectories, {first['n_tasks']} tasks"
    yield Table(title, ("named by", *heads), rows)
    if rows := of_models("ahead"):
        yield Table("Less the best trivial one", ("named by", *heads), [*rows, row("it is", first["best_trivial"])])
