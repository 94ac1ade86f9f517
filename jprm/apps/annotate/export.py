"""A study's labels as records that `jprm prepare jsonl` and `jprm train` take."""

from __future__ import annotations

import collections
import dataclasses
import os
from collections.abc import Collection, Iterator
from typing import Any

from jprm.apps.annotate import Disagreements
from jprm.apps.annotate.quality import labellings, tasks_of
from jprm.apps.annotate.tasks import Task, Tasks
from jprm.io.jsonl import write_records
from jprm.io.outputs import check_output
from jprm.tree import NONE, Node, ReasoningTree, record_of


def export(
    folder: str | os.PathLike,
    output: str | os.PathLike,
    *,
    disagreements: Disagreements,
    without: Collection[str] = (),
) -> dict[str, int]:
    """Writes what is labelled in a study, as chain and tree records with ratings; returns counts.

    Tasks that were skipped, and problems called bad, are left out. A task on which an annotator gave up has the
    ratings until then. Tasks with known labels, and second ratings by one annotator, are left out too. Labels of
    annotators named in `without` do not count.
    """
    tasks = tasks_of(folder)
    check_output(output, tasks.study.events)
    if unknown := sorted(set(without) - set(tasks.study.config.annotators)):
        raise ValueError(f"without: {unknown[0]!r} is no annotator of {os.fspath(folder)}")
    counts: collections.Counter[str] = collections.Counter(tasks=0)
    records = list(_records(tasks, disagreements, without, counts))
    if not records:
        raise ValueError(f"{os.fspath(folder)}: nothing is labelled yet")
    write_records(output, records)
    return dict(counts)


def _records(
    tasks: Tasks, disagreements: str, without: Collection[str], counts: collections.Counter
) -> Iterator[dict[str, Any]]:
    for index, some in labellings(tasks).items():
        some = [task for task in some if task.annotator not in without]
        kept = [task for task in some if task.acts and task.finish not in ("skip", "bad_problem")]
        counts.update(f"left out: {task.finish}" for task in some if task not in kept)
        if not kept:
            continue
        tree = tasks.study.trees["work"][index]
        for group in [kept] if disagreements == "cut" else [[task] for task in kept]:
            labels = _agreed(group, tree)
            if not any(label is not None for label in labels):
                counts["left out: no step agreed on"] += 1
                continue
            counts["tasks"] += 1
            counts["steps"] += sum(label is not None for label in labels)
            yield _record(tree, labels, group, [task.annotator for task in group if tasks.anchored(task)])


def _agreed(group: list[Task], tree: ReasoningTree) -> list[int | None]:
    """Returns the rating of every step, None from any step on which the annotators differ."""
    ratings, labels, apart = [task.ratings for task in group], [], set()
    for i, node in enumerate(tree.nodes):
        rated = {some[i] for some in ratings if i in some}
        if len(rated) > 1 or node.parent in apart:
            apart.add(i)
        labels.append(rated.pop() if rated and i not in apart else None)
    return labels


def _record(tree: ReasoningTree, labels: list[int | None], group: list[Task], anchored: list[str]) -> dict[str, Any]:
    chosen = {step for task in group for step in task.path}
    nodes = [
        dataclasses.replace(node, label=label, score=None, outputs=NONE)
        if tree.kind == "chain"
        else _node(node, label, i in chosen)
        for i, (node, label) in enumerate(zip(tree.nodes, labels, strict=True))
    ]
    extra = {key: value for key, value in tree.extra.items() if key not in ("scores", "labels", "semantics", "outputs")}
    extra["annotators"] = [task.annotator for task in group]
    comments = [{"annotator": task.annotator, **comment} for task in group for comment in task.comments]
    if comments:
        extra["comments"] = comments
    if anchored:
        extra["anchored"] = anchored
    if any(task.flagged for task in group):
        extra["flagged"] = True
    return record_of(dataclasses.replace(tree, nodes=tuple(nodes), semantics="rating", extra=extra))


def _node(node: Node, label: int | None, chosen: bool) -> Node:
    """Returns a tree's node as the reader of PRM800K gives it: `chosen` where a path went on."""
    extra = {key: value for key, value in node.extra.items() if key not in ("chosen", "label", "origin", "false")}
    extra |= {"chosen": True} if chosen else {}
    return Node(node.parent, node.text, label, None if label is None else "human", node.correct, extra=extra or NONE)
