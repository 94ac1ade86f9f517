"""Edits of correct chains: some keep the meaning, and scores should stay; some are nonsense, and scores should not.

An edit makes a new record with `edit` (its name), `of` (the index of the chain it was made from) and, if the meaning is
kept, `pairs`: (step before, step after) that end at the same place of the argument and should score the same.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from jprm.evaluate.benchmark import Scorer
from jprm.evaluate.scored import scores_of
from jprm.statistics import bootstrap, jsonable, weighted_mean
from jprm.tree import ReasoningTree

Record = dict[str, Any]

_DOLLARS = re.compile(r"(?<![\\$])\$(?!\$)([^$\n]+?)(?<!\\)\$(?!\$)")
_PARENTHESES = re.compile(r"\\\((.+?)\\\)")
_VARIABLE = re.compile(r"(?<![A-Za-z\\])([xyznk])(?![A-Za-z'])")
_SENTENCE = re.compile(r"(?<=[.;!?])\s+(?=[A-Z$\\])")
NEW_NAMES = "uvwqrs"

EDITED = 100
"""Correct chains that are edited: about ten edits each make a thousand chains to score."""


def whitespace(chain: Record) -> Record | None:
    """Doubles every space, and ends each step with a newline."""
    return _same_steps(chain, [step.replace(" ", "  ") + "\n" for step in chain["steps"]])


def latex(chain: Record) -> Record | None:
    r"""Rewrites `$x$` as `\(x\)`, or the reverse; returns None where the chain has neither."""
    steps = [_DOLLARS.sub(r"\\(\1\\)", step) for step in chain["steps"]]
    if steps == chain["steps"]:
        steps = [_PARENTHESES.sub(r"$\1$", step) for step in chain["steps"]]
    return _same_steps(chain, steps)


def rename(chain: Record) -> Record | None:
    """Gives one of the variables x, y, z, n, k a new letter, also in the problem; None if there is none."""
    texts = [chain["problem"], *chain["steps"]]
    used = {letter for text in texts for letter in re.findall(r"(?<![A-Za-z])([A-Za-z])(?![A-Za-z])", text)}
    found = [letter for text in texts for letter in _VARIABLE.findall(text)]
    new = next((letter for letter in NEW_NAMES if letter not in used), None)
    if not found or new is None:
        return None
    old = found[0]
    problem, *steps = (_VARIABLE.sub(lambda m: str(new if m[1] == old else m[1]), text) for text in texts)
    return _same_steps(chain, steps, problem)


def merge(chain: Record) -> Record | None:
    """Joins every two steps; None for a single step."""
    steps = chain["steps"]
    if len(steps) < 2:
        return None
    merged = ["\n".join(steps[i : i + 2]) for i in range(0, len(steps), 2)]
    pairs = [(min(2 * j + 1, len(steps) - 1), j) for j in range(len(merged))]
    return chain | {"steps": merged, "pairs": pairs}


def split(chain: Record) -> Record | None:
    """Splits every step of several sentences into two; None if there is none."""
    steps, pairs = [], []
    for i, step in enumerate(chain["steps"]):
        parts = _SENTENCE.split(step)
        half = len(parts) // 2
        steps += [" ".join(parts[:half]), " ".join(parts[half:])] if half else [step]
        pairs.append((i, len(steps) - 1))
    return chain | {"steps": steps, "pairs": pairs} if len(steps) > len(chain["steps"]) else None


MEANING_KEPT: dict[str, Callable[[Record], Record | None]] = {
    "whitespace": whitespace,
    "latex": latex,
    "rename": rename,
    "merge": merge,
    "split": split,
}


def nonsense(chains: Sequence[Record], seed: int) -> list[Record]:
    """Returns for every chain: `shuffled` steps; `other_problem`, another chain's steps; `repeated`, one step over and
    over; `bare_answer`, the last step alone. Leaves out what equals the chain."""
    rng, made = np.random.default_rng(seed), []
    for i, chain in enumerate(chains):
        steps = chain["steps"]
        other = next((c for c in [*chains[i + 1 :], *chains[:i]] if c["problem"] != chain["problem"]), chain)
        variants = {
            "shuffled": [steps[k] for k in rng.permutation(len(steps))],
            "other_problem": other["steps"],
            "repeated": [steps[len(steps) // 2]] * len(steps),
            "bare_answer": steps[-1:],
        }
        made += [
            {"problem": chain["problem"], "steps": list(variant), "edit": name, "of": i}
            for name, variant in variants.items()
            if list(variant) != list(steps)
        ]
    return made


def edited(chains: Sequence[ReasoningTree], seed: int) -> list[Record]:
    """Records of all edits of all chains."""
    plain = [{"problem": chain.problem, "steps": [node.text for node in chain.nodes]} for chain in chains]
    kept = [
        found | {"edit": name, "of": i}
        for i, chain in enumerate(plain)
        for name, edit in MEANING_KEPT.items()
        if (found := edit(chain)) is not None
    ]
    return kept + nonsense(plain, seed)


def right_chains(trees: Sequence[ReasoningTree], most: int) -> list[ReasoningTree]:
    """Returns the first `most` chains of ProcessBench that have no error and a correct answer."""
    return [tree for tree in trees if tree.extra.get("first_error") == -1 and tree.nodes[-1].correct][:most]


def edits_of(chains: Sequence[ReasoningTree], score: Scorer, seed: int, threshold: float = 0.5) -> dict[str, Any]:
    """Edits up to `EDITED` right chains, scores the edits and reports how scores react."""
    right = right_chains(chains, EDITED)
    if not right:
        return {"meaning_kept": {"not_computed": "no chain without an error, whose meaning an edit could keep"}}
    return edits_report(right, score(edited(right, seed), "edits"), seed, threshold=threshold)


def edits_report(
    chains: Sequence[ReasoningTree],
    changed: Sequence[ReasoningTree],
    seed: int,
    *,
    threshold: float = 0.5,
    margin: float = 0.05,
    nonsense_margin: float = 0.2,
) -> dict[str, dict[str, dict[str, Any]]]:
    """Returns how scores react to edits, from scored chains and their scored edits (the trees of `edited`).

    `meaning_kept`, by edit: `change`, the mean distance of a step's score before and after, with an interval over
    problems; `shift`, the same with its sign; `flips`, the fraction of steps that cross `threshold`. A finding is
    a change above `margin`. `nonsense`, by kind: `preferred`, how often its lowest score is above the right chain's,
    ties half. A finding is more than `nonsense_margin`: a search would be drawn to it.
    """
    before = scores_of(chains, [f"chain {i}" for i in range(len(chains))])
    after = scores_of(changed, [f"edit {i}" for i in range(len(changed))])
    report: dict[str, dict[str, dict[str, Any]]] = {"meaning_kept": {}, "nonsense": {}}
    for name in dict.fromkeys(tree.extra["edit"] for tree in changed):
        rows = [
            (tree.extra, score_P) for tree, score_P in zip(changed, after, strict=True) if tree.extra["edit"] == name
        ]
        problems, values = [], []
        for edit, score_P in rows:
            whole_P = before[edit["of"]]
            pairs = [(whole_P[i], score_P[j]) for i, j in edit["pairs"]] if "pairs" in edit else None
            values += pairs or [(whole_P.min(), score_P.min())]
            problems += [chains[edit["of"]].problem] * len(pairs or [0])
        old_N, new_N = np.array(values, float).T

        def interval(x_N, fraction, problems=problems):
            return bootstrap(lambda w: weighted_mean(x_N, w), problems, seed=seed, fraction=fraction)

        if name in MEANING_KEPT:
            change = interval(np.abs(new_N - old_N), fraction=False)
            report["meaning_kept"][name] = {
                "n": len(rows),
                "change": change.json(),
                "shift": jsonable((new_N - old_N).mean()),
                "flips": jsonable(((new_N >= threshold) != (old_N >= threshold)).mean()),
                "margin": margin,
                "finding": bool(change.low > margin),
            }
        else:
            preferred = interval((new_N > old_N) + 0.5 * (new_N == old_N), fraction=True)
            report["nonsense"][name] = {
                "n": len(rows),
                "preferred": preferred.json(),
                "margin": nonsense_margin,
                "finding": bool(preferred.low > nonsense_margin),
            }
    return report


def _same_steps(chain: Record, steps: Sequence[str], problem: str | None = None) -> Record | None:
    """Returns the chain with other texts for the same steps; None if nothing changes."""
    if list(steps) == chain["steps"]:
        return None
    return {
        "problem": chain["problem"] if problem is None else problem,
        "steps": list(steps),
        "pairs": [(i, i) for i in range(len(steps))],
    }
