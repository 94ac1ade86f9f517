"""Chains to label, from any record that jprm reads."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from typing import Any

from jprm.jsonl import read_records
from jprm.tree import Node, ReasoningTree, chains_of, tree_of

Chain = dict[str, Any]
"""A chain record, as docs/data.md describes it."""


def chains_in(path: str | os.PathLike) -> Iterator[Chain]:
    """Yields every chain of a file's chains, pools and trees as a chain record. Raises RecordError for a bad record.

    A chain record keeps its further keys; a path of a pool or a tree has the problem's answer alone.
    """
    for record in read_records(path):
        tree = tree_of(record)
        if tree.kind == "chain":
            yield {
                key: value for key, value in record.items() if key not in ("response", "messages", "segmentation")
            } | _chain(tree, list(range(len(tree.nodes))))
        else:
            yield from (_chain(tree, path) for path in chains_of(tree))


def _chain(tree: ReasoningTree, path: Sequence[int]) -> Chain:
    nodes: list[Node] = [tree.nodes[i] for i in path]
    chain: Chain = {"problem": tree.problem, "steps": [node.text for node in nodes]}
    labels, scores = [node.label for node in nodes], [node.score for node in nodes]
    if any(label is not None for label in labels):
        chain |= {"labels": labels, "semantics": tree.semantics}
    if None not in scores:
        chain["scores"] = scores
    if tree.answer is not None:
        chain["answer"] = tree.answer
    if nodes[-1].correct is not None:
        chain["correct"] = nodes[-1].correct
    return chain


def first_error(chain: Chain) -> int | None:
    """Returns the index of the first step that is labelled incorrect, None where there is none."""
    limit = 0.0 if chain.get("semantics") == "rating" else 0.5
    labels = chain.get("labels", ())
    return next((i for i, label in enumerate(labels) if label is not None and label < limit), None)
