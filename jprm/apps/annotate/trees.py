"""What is labelled: trees, from any record that jprm reads. A chain is a tree whose steps have no alternatives."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator, Mapping, Sequence

from jprm.tree import SEMANTICS, Node, ReasoningTree, chains_of, read_trees, without_chain

Alternatives = Sequence[Sequence[int]]
"""The nodes from which a path may go on: at 0 after the problem, at i + 1 after node i."""


def alternatives_of(tree: ReasoningTree) -> list[list[int]]:
    """Returns the alternatives after the problem and after every node."""
    after: list[list[int]] = [[] for _ in range(len(tree.nodes) + 1)]
    for i, node in enumerate(tree.nodes):
        after[node.parent + 1].append(i)
    return after


def is_chain(tree: ReasoningTree) -> bool:
    """Whether no step has an alternative."""
    return all(node.parent == i - 1 for i, node in enumerate(tree.nodes))


def items_in(path: str | os.PathLike) -> Iterator[ReasoningTree]:
    """Yields a file's trees, and every chain of its chains and pools. Raises RecordError for a bad record."""
    for tree in read_trees(path):
        yield from [merged(tree)] if tree.kind == "tree" else _chains(tree)


def chains_in(path: str | os.PathLike) -> Iterator[ReasoningTree]:
    """Yields every chain of a file's chains, pools and trees. Raises RecordError for a bad record.

    A chain record keeps its further keys; a path of a pool or a tree has the problem's answer alone.
    """
    for tree in read_trees(path):
        yield from _chains(tree)


def trees_in(path: str | os.PathLike, most: int) -> Iterator[ReasoningTree]:
    """Yields a file's chains, pools and trees as trees with at most so many alternatives at a step (`pruned`).

    Raises RecordError for a bad record, ValueError for one without scores.
    """
    return (pruned(merged(tree), most) for tree in read_trees(path) if tree.nodes)


def merged(tree: ReasoningTree) -> ReasoningTree:
    """Returns the tree with alternatives of equal text as one node, which has what the first of them says."""
    nodes: list[Node] = []
    place, first = [-1], {}  # of the problem and every node; of every parent and text
    for node in tree.nodes:
        parent = place[node.parent + 1]
        at = first.setdefault((parent, node.text), len(nodes))
        place.append(at)
        if at == len(nodes):
            nodes.append(dataclasses.replace(node, parent=parent))
            continue
        known = nodes[at]
        fields = {name: getattr(node, name) for name in ("label", "score", "correct") if getattr(known, name) is None}
        nodes[at] = dataclasses.replace(known, **fields)
    return dataclasses.replace(tree, nodes=tuple(nodes), kind="tree", extra=without_chain(tree.extra))


def pruned(tree: ReasoningTree, most: int) -> ReasoningTree:
    """Returns the tree with the `most` most convincing alternatives at every step.

    An alternative is as convincing as the most convincing chain through it, and a chain as its lowest score.
    """
    score = scores_of(tree)
    after = alternatives_of(tree)
    best = list(score)
    for i in reversed(range(len(best))):
        best[i] = min(score[i], max((best[child] for child in after[i + 1]), default=score[i]))
    place, nodes = {-1: -1}, []
    kept = {i for some in after for i in sorted(some, key=lambda i: -best[i])[:most]}
    for i, node in enumerate(tree.nodes):
        if i in kept and node.parent in place:
            place[i] = len(nodes)
            nodes.append(dataclasses.replace(node, parent=place[node.parent]))
    return dataclasses.replace(tree, nodes=tuple(nodes))


def scores_of(tree: ReasoningTree) -> list[float]:
    """Returns the score of every node. Raises ValueError where one has none."""
    scores = [node.score for node in tree.nodes if node.score is not None]
    if len(scores) < len(tree.nodes):
        raise ValueError(f"a step of {tree.problem[:60]!r} has no score: run `jprm score` on the file first")
    return scores


def _chains(tree: ReasoningTree) -> Iterator[ReasoningTree]:
    if tree.kind == "chain":  # free text is split by now
        extra = {key: value for key, value in tree.extra.items() if key not in ("response", "messages", "segmentation")}
        yield dataclasses.replace(tree, extra=extra)
        return
    for path in chains_of(tree):
        some = [tree.nodes[i] for i in path]
        scored = all(node.score is not None for node in some)
        nodes = [
            Node(i - 1, node.text, node.label, score=node.score if scored else None) for i, node in enumerate(some)
        ]
        nodes[-1] = dataclasses.replace(nodes[-1], correct=some[-1].correct)
        semantics = tree.semantics if any(node.label is not None for node in nodes) else SEMANTICS[0]
        yield ReasoningTree(tree.problem, tuple(nodes), tree.answer, semantics, "chain")


def known_wrong(tree: ReasoningTree) -> dict[int, bool]:
    """Returns whether each labelled step is labelled incorrect."""
    limit = 0.0 if tree.semantics == "rating" else 0.5
    return {i: node.label < limit for i, node in enumerate(tree.nodes) if node.label is not None}


def alike(tree: ReasoningTree, one: Mapping[int, bool], other: Mapping[int, bool]) -> float:
    """Returns how far two labellings, of steps as wrong or not, agree.

    For a chain that is 1 or 0, whether they have the same first error or none; for a tree with alternatives the
    fraction of the steps that both label, 0 where there is none.
    """
    if is_chain(tree):
        first = (min((step for step, wrong in some.items() if wrong), default=None) for some in (one, other))
        return float(next(first) == next(first))
    both = one.keys() & other.keys()
    return sum(one[step] == other[step] for step in both) / len(both) if both else 0.0
