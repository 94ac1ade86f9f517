"""What to label: above all wrong answers that the model finds convincing (Lightman et al. 2023, section 2).

What a model already scores right teaches it little, and a random chain is mostly that. But a sample chosen by a model
says nothing of all chains, so some are drawn at random from all of them, with known probability. A tree counts as its
most convincing chain.
"""

from __future__ import annotations

import collections
import dataclasses
import os
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from jprm.apps.annotate import SelectConfig
from jprm.apps.annotate.study import chains_in, scores_of, trees_in
from jprm.io.jsonl import write_records
from jprm.io.outputs import check_output
from jprm.methods.data.overlap import normalise, problems_in
from jprm.score.files import stored_scale
from jprm.score.scale import PROBABILITY, Scale
from jprm.tree import ReasoningTree, chains_of, record_of


def select(trees: Sequence[ReasoningTree], config: SelectConfig, scale: Scale = PROBABILITY) -> list[ReasoningTree]:
    """Returns the trees to label, shuffled, each with `selection`: its stratum, and for random ones the probability.

    The random trees are drawn first and from all: as a sample they stand for all. Where a stratum has too few trees,
    others take its place (`fill`), drawn from what is left. Equal trees count once. `scale` says what scores mean: they
    are compared with labels as fractions.

    Raises ValueError where a tree has no scores, or one that the scale has not.
    """
    left = list({(tree.problem, *((node.parent, node.text) for node in tree.nodes)): tree for tree in trees}.values())
    scores = {id(tree): scale.fractions(scores_of(tree), repr(tree.problem[:60])).tolist() for tree in left}

    def convincing(tree: ReasoningTree, wrong: bool) -> float | None:
        """Returns the lowest score of the most convincing chain, or of the most convincing one known to be wrong."""
        chains = [path for path in chains_of(tree) if not wrong or tree.nodes[path[-1]].correct is False]
        return max((min(scores[id(tree)][i] for i in path) for path in chains), default=None)

    rng = np.random.default_rng(config.seed)
    order = rng.permutation(len(left))
    total, count = len(left), min(config.count, len(left))
    counts = {name: round(count * getattr(config, name)) for name in ("convincing", "rest", "disagreement")}
    pools: dict[str, Callable[[ReasoningTree], float | None]] = {
        "convincing": lambda tree: convincing(tree, wrong=True),
        "disagreement": lambda tree: _distance(tree, scores[id(tree)]),
        "rest": lambda tree: convincing(tree, wrong=False),
    }
    drawn = {int(i) for i in order[: count - sum(counts.values())]}
    chosen: dict[int, str] = {}
    for name, key in pools.items():
        free = [i for i in range(total) if i not in drawn and i not in chosen]
        ranked = [(value, i) for i in free if (value := key(left[i])) is not None]
        ranked.sort(key=lambda pair: (-pair[0], pair[1]))
        chosen |= {i: name for _, i in ranked[: counts[name]]}
    probability = len(drawn) / total if total else 0.0
    chosen |= dict.fromkeys(sorted(drawn), "random")
    more = (int(i) for i in order if i not in chosen)
    chosen |= {next(more): "fill" for _ in range(count - len(chosen))}
    places = sorted(chosen)
    selection = [{"stratum": chosen[i]} | ({"probability": probability} if i in drawn else {}) for i in places]
    return [
        dataclasses.replace(left[places[k]], extra={**left[places[k]].extra, "selection": selection[k]})
        for k in rng.permutation(len(places))
    ]


def _distance(tree: ReasoningTree, scores: Sequence[float]) -> float | None:
    """Returns the largest distance of a score from its label, both in [0, 1], None without labels."""
    low = -1.0 if tree.semantics in ("rating", "advantage") else 0.0
    pairs = zip(scores, tree.nodes, strict=True)
    labelled = [(score, node.label) for score, node in pairs if node.label is not None]
    return max((abs(score - (label - low) / (1 - low)) for score, label in labelled), default=None)


def select_file(
    source: str | os.PathLike,
    output: str | os.PathLike,
    config: SelectConfig,
    exclude: Iterable[str | os.PathLike] = (),
) -> dict[str, Any]:
    """Writes the selected chains, or trees, of a file of scored records; returns counts.

    Problems of the files `exclude`, benchmarks, are left out. What the scores mean is in `SOURCE.info.json`, which
    `jprm score` writes; without it they are probabilities.
    """
    exclude = list(exclude)
    check_output(output, source, *exclude)
    banned = {problem for path in exclude for problem in problems_in(path)}
    trees = list(trees_in(source, config.alternatives) if config.alternatives else chains_in(source))
    left = [tree for tree in trees if not banned or normalise(tree.problem) not in banned]
    chosen = select(left, config, stored_scale(source))
    if not chosen:
        raise ValueError(f"{os.fspath(source)}: no chain is left to select")
    write_records(output, map(record_of, chosen))
    strata = collections.Counter(tree.extra["selection"]["stratum"] for tree in chosen)
    kind = "trees" if config.alternatives else "chains"
    return {kind: len(trees), "excluded": len(trees) - len(left), "selected": len(chosen), **strata}
