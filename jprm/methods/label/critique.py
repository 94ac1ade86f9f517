"""Critiques for training a generative verifier: sampled from a judge, kept where their verdict is the known label.

This is rejection sampling, as for ThinkPRM (Khalifa et al. 2025, arXiv 2504.16828): a critique with the correct verdict
is taken for a correct critique. The kept ones are records on which `objective="next_token"` trains.
"""

from __future__ import annotations

import collections
import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from jprm.methods.judge.critiques import Reading, read
from jprm.methods.judge.judge import Judge
from jprm.methods.label.config import CritiqueConfig
from jprm.methods.label.consensus import THRESHOLDS, first_error
from jprm.tree import ReasoningTree


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
                    agrees = reading.status == "read" and _verdict(judge, reading) == verdict
                    counts["matching"] += agrees
                    if agrees and kept < config.most:
                        kept += 1
                        counts["kept"] += 1
                        opening = (judge.prompt.opening,) if judge.prompt.opening else ()
                        steps = [*opening, *critique.steps]
                        yield {"problem": answer.question, "steps": steps, "verdict": verdict, "origin": judge.name}


def threshold_of(tree: ReasoningTree, threshold: float | None) -> float:
    """Returns the value below which a label is an error. Raises ValueError where the semantics have no default."""
    found = THRESHOLDS.get(tree.semantics) if threshold is None else threshold
    if found is None:
        raise ValueError(f"labels of semantics {tree.semantics!r} need a threshold below which a step is an error")
    return found


def _known(tree: ReasoningTree, judge: Judge, threshold: float) -> dict[tuple[int, ...], int]:
    """Returns the verdict that labels give, by the path that it is about."""
    found = {}
    for path in judge.paths(tree):
        labels = [tree.nodes[i].label for i in path]
        if judge.prompt.asks == "step":
            verdict = None if labels[-1] is None else int(labels[-1] >= threshold)
        else:
            verdict = first_error(labels, threshold)
        if verdict is not None:
            found[tuple(path)] = verdict
    return found


def _verdict(judge: Judge, reading: Reading) -> int:
    """Returns what a critique says, in the form of `_known`."""
    if judge.prompt.asks == "step":
        return int(reading.correct[-1])
    return first_incorrect(reading.correct)


def first_incorrect(correct: Sequence[bool]) -> int:
    """Returns the index of the first verdict against a step, -1 where there is none."""
    return next((i for i, good in enumerate(correct) if not good), -1)
