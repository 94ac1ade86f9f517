"""The first error of a chain, as labels tell it: two sources agree on it, or a judge's critique agrees with the labels.

Consensus keeps the chains on whose first error two sources of labels agree. Zhang et al. (arXiv:2501.07301) keep about
40 % of their chains with Monte Carlo labels and a judge, and raise their model's F1 on ProcessBench from 40.2 to 66.5.

Critiques for training a generative verifier are sampled from a judge and kept where their verdict is the known label.
This is rejection sampling, as for ThinkPRM (Khalifa et al. 2025, arXiv 2504.16828): a critique with the correct verdict
is taken for a correct critique. The kept ones are records on which `objective="next_token"` trains.
"""

from __future__ import annotations

import collections
import dataclasses
import hashlib
import itertools
import json
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from jprm.methods.judge.critiques import read
from jprm.methods.judge.judge import Judge
from jprm.methods.label.config import CritiqueConfig
from jprm.tree import ReasoningTree, chains_of

THRESHOLDS = {"correctness": 0.5, "rating": 0.0, "value": math.ulp(0.0)}
"""A step is an error if its label is below this: more likely incorrect than correct; rated -1; no correct rollout."""


def first_error(labels: Sequence[float | None], threshold: float) -> int | None:
    """Returns the index of the first label below the threshold, -1 if there is none.

    Returns None if an unlabelled step comes before it. Labels after the first error are not needed.
    """
    for i, label in enumerate(labels):
        if label is None:
            return None
        if label < threshold:
            return i
    return -1


def threshold_of(tree: ReasoningTree, threshold: float | None) -> float:
    """Returns the value below which a label is an error. Raises ValueError where the semantics have no default."""
    threshold = THRESHOLDS.get(tree.semantics) if threshold is None else threshold
    if threshold is None:
        raise ValueError(f"labels of semantics {tree.semantics!r} need a threshold below which a step is an error")
    return threshold


def consensus(
    one: Iterable[ReasoningTree],
    other: Iterable[ReasoningTree],
    *,
    thresholds: tuple[float | None, float | None] = (None, None),
    counts: collections.Counter | None = None,
) -> Iterator[ReasoningTree]:
    """Yields the chains of `one` on whose first error `other` agrees, each once, as one branch with `one`'s labels.

    Two chains are the same if their problems and steps are equal. A kept chain's `consensus` is the first error's
    index, or -1.

    Args:
      one, other: the two sources. Every sample of a pool and every path of a tree is a chain.
      thresholds: for each source, the value below which a label is an error; None for the default of its semantics.
      counts: receives the number of chains by outcome: kept, disagree, unlabelled (the first error is unknown in
        either source), repeated, not in the other.

    Raises:
      ValueError: semantics without a default threshold.
    """
    counts = collections.Counter() if counts is None else counts
    errors: dict[bytes, int | None] = {}
    for tree in other:
        for key, _, first in _chains(tree, thresholds[1]):
            if errors.setdefault(key, first) != first:
                errors[key] = None  # the source disagrees with itself
    seen = set()
    for tree in one:
        for key, path, first in _chains(tree, thresholds[0]):
            if key in seen:
                counts["repeated"] += 1
            elif key not in errors:
                counts["not in the other"] += 1
            elif first is None or errors[key] is None:
                counts["unlabelled"] += 1
            elif first != errors[key]:
                counts["disagree"] += 1
            else:
                counts["kept"] += 1
                yield _branch(tree, path, first)
            seen.add(key)


def _chains(tree: ReasoningTree, threshold: float | None) -> Iterator[tuple[bytes, list[int], int | None]]:
    threshold = threshold_of(tree, threshold)
    for path in chains_of(tree):
        nodes = [tree.nodes[i] for i in path]
        text = json.dumps([tree.problem, *(node.text for node in nodes)])
        labels = [node.label for node in nodes]
        if tree.semantics == "value" and threshold == THRESHOLDS["value"]:
            labels = implied(labels)
        yield hashlib.sha256(text.encode()).digest(), path, first_error(labels, threshold)


def implied(values: Sequence[float | None]) -> list[float | None]:
    """Fills every gap in a chain's values with the next positive value.

    A correct completion of a prefix completes every shorter prefix too, so those values are also above 0. A tree search
    values few prefixes.
    """
    filled, later = list(values), None
    for i, value in reversed([*enumerate(values)]):
        if value is None:
            filled[i] = later
        elif value > 0:
            later = value
    return filled


def _branch(tree: ReasoningTree, path: Sequence[int], first: int) -> ReasoningTree:
    nodes = tuple(dataclasses.replace(tree.nodes[i], parent=depth - 1) for depth, i in enumerate(path))
    extra = {
        key: value for key, value in tree.extra.items() if key not in ("steps", "samples", "labels", "scores", "id")
    }
    extra["consensus"] = first
    return dataclasses.replace(tree, nodes=nodes, kind="tree", extra=extra)


# ---- Critiques whose verdict is the label.


def matching_critiques(
    trees: Iterable[ReasoningTree], judge: Judge, config: CritiqueConfig, counts: collections.Counter
) -> Iterator[dict[str, Any]]:
    """Yields a record for each kept critique: its question as the problem, its text as the steps, and its `verdict`.

    The verdict is whether the step is correct or, for prompts about whole chains, the first error's index or -1. Only
    questions whose verdict the labels give are asked. `counts` receives counts of questions, critiques and tokens.

    Raises:
      ValueError: semantics without a default threshold.
      PolicyError: every critique of `config.trees_at_once` trees failed.
    """
    trees = iter(trees)
    while chunk := list(itertools.islice(trees, config.trees_at_once)):
        counts["trees"] += len(chunk)
        thresholds = [threshold_of(tree, config.threshold) for tree in chunk]
        known = [_known(tree, judge, threshold) for tree, threshold in zip(chunk, thresholds, strict=True)]
        asked = judge.critiques(chunk, [list(verdicts) for verdicts in known])
        for verdicts, answers in zip(known, asked, strict=True):
            for answer in answers:
                wanted = {verdicts[tuple(path)] for path in answer.paths if tuple(path) in verdicts}
                if len(wanted) != 1:  # labels of equal steps differ, or there are none
                    counts["unknown"] += 1
                    continue
                (verdict,) = wanted
                counts["questions"] += 1
                kept = 0
                for critique in answer.critiques:
                    reading = read(judge.prompt, critique, len(answer.paths[0]))
                    counts["critiques"] += 1
                    counts[reading.status] += 1
                    counts["tokens"] += critique.tokens
                    agrees = reading.status == "read" and _verdict(judge, reading.correct, 0.5) == verdict
                    counts["matching"] += agrees
                    if agrees and kept < config.most:
                        kept += 1
                        counts["kept"] += 1
                        opening = (judge.prompt.opening,) if judge.prompt.opening else ()
                        steps = [*opening, *critique.steps]
                        yield {"problem": answer.question, "steps": steps, "verdict": verdict, "origin": judge.name}


def _known(tree: ReasoningTree, judge: Judge, threshold: float) -> dict[tuple[int, ...], int]:
    """Returns the verdict that labels give, by the path that it is about."""
    verdicts = {
        tuple(path): _verdict(judge, [tree.nodes[i].label for i in path], threshold) for path in judge.paths(tree)
    }
    return {path: verdict for path, verdict in verdicts.items() if verdict is not None}


def _verdict(judge: Judge, labels: Sequence[float | None], threshold: float) -> int | None:
    """Returns whether the last step is correct or, for prompts about whole chains, the first error's index or -1."""
    if judge.prompt.asks == "step":
        return None if labels[-1] is None else int(labels[-1] >= threshold)
    return first_error(labels, threshold)
