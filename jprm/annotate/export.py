"""A study's labels as records that `jprm prepare jsonl` and `jprm train` take."""

from __future__ import annotations

import collections
import os
from collections.abc import Collection, Iterator
from typing import Any

from jprm.annotate.chains import Chain
from jprm.annotate.config import Disagreements
from jprm.annotate.quality import labellings, tasks_of
from jprm.annotate.tasks import Task, Tasks
from jprm.jsonl import write_records
from jprm.outputs import check_output


def export(
    folder: str | os.PathLike,
    output: str | os.PathLike,
    *,
    disagreements: Disagreements,
    without: Collection[str] = (),
) -> dict[str, int]:
    """Writes the labelled chains of a study as rated chain records; returns counts.

    Chains that were skipped, and problems called bad, are left out. A chain on which an annotator gave up has the
    ratings until then. Chains with known labels, and second ratings by one annotator, are left out too. Labels of
    annotators named in `without` do not count.
    """
    tasks = tasks_of(folder)
    check_output(output, tasks.study.events)
    if unknown := sorted(set(without) - set(tasks.study.config.annotators)):
        raise ValueError(f"without: {unknown[0]!r} is no annotator of {os.fspath(folder)}")
    counts: collections.Counter[str] = collections.Counter(chains=0)
    found = list(_records(tasks, disagreements, without, counts))
    if not found:
        raise ValueError(f"{os.fspath(folder)}: no chain is labelled yet")
    write_records(output, found)
    return dict(counts)


def _records(
    tasks: Tasks, disagreements: str, without: Collection[str], counts: collections.Counter
) -> Iterator[Chain]:
    for index, some in labellings(tasks).items():
        some = [task for task in some if task.annotator not in without]
        kept = [task for task in some if task.ratings and task.finish not in ("skip", "bad_problem")]
        counts.update(f"left out: {task.finish}" for task in some if task not in kept)
        if not kept:
            continue
        chain = tasks.study.chains["work"][index]
        for group in [kept] if disagreements == "cut" else [[task] for task in kept]:
            labels = _agreed(group, len(chain["steps"]))
            if labels[0] is None:
                counts["left out: no step agreed on"] += 1
                continue
            counts["chains"] += 1
            counts["steps"] += sum(label is not None for label in labels)
            yield _record(chain, labels, group, [task.annotator for task in group if tasks.anchored(task)])


def _agreed(group: list[Task], steps: int) -> list[int | None]:
    """Returns the rating of every step up to the first on which the annotators differ."""
    labels: list[int | None] = [None] * steps
    for i in range(max(len(task.ratings) for task in group)):
        given = {task.ratings[i] for task in group if i < len(task.ratings)}
        if len(given) > 1:
            break
        labels[i] = given.pop()
    return labels


def _record(chain: Chain, labels: list[int | None], group: list[Task], anchored: list[str]) -> dict[str, Any]:
    kept = {key: value for key, value in chain.items() if key not in ("scores", "labels", "semantics", "outputs")}
    record = kept | {"labels": labels, "semantics": "rating", "annotators": [task.annotator for task in group]}
    comments = [{"annotator": task.annotator, **comment} for task in group for comment in task.comments]
    if comments:
        record["comments"] = comments
    if anchored:
        record["anchored"] = anchored
    if any(task.flagged for task in group):
        record["flagged"] = True
    return record
