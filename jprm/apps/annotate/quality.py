"""A study's label quality (agreement, gold and repeated tasks, drift, time), and label export."""

from __future__ import annotations

import collections
import dataclasses
import os
import statistics
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from jprm.apps.annotate import Disagreements, Written, study
from jprm.apps.annotate.study import alike, ends_at_error, rated_tree, scores_of
from jprm.apps.annotate.tasks import REASONS, Task, Tasks
from jprm.io.jsonl import write_records
from jprm.io.outputs import check_output
from jprm.methods.evaluate.blocks import Table
from jprm.methods.label.crowd import alpha_of, coincidences
from jprm.statistics import bootstrap, difference, draws, weighted_mean
from jprm.tree import NONE, Node, ReasoningTree, as_tree, record_of, with_labels, with_scores


def tasks_of(folder: str | os.PathLike) -> Tasks:
    """Returns a study's current tasks, even while it is served.

    Raises ValueError if the folder is not a study, Conflict (a ValueError) if its events contradict each other,
    RecordError for a damaged record or event.
    """
    about = study.read(folder)
    return Tasks(about, study.events_in(about.events))


def labellings(tasks: Tasks) -> dict[int, list[Task]]:
    """Returns the finished work tasks by their tree's 0-based index, in rising order; {} if there are none yet.

    Each list has one task per annotator, in order of opening, without repetitions. Skipped and given-up tasks are
    included (`Task.finish`).
    """
    by_tree: dict[int, list[Task]] = collections.defaultdict(list)
    for task in tasks.by_id.values():
        if task.pool == "work" and task.finish and not task.again:
            by_tree[task.index].append(task)
    return dict(sorted(by_tree.items()))


def figures(tasks: Tasks) -> dict[str, Any]:
    """Returns the report as JSON data. Figures without data are null.

    A figure is `{"value", "low", "high"}` with a 95 % interval over tasks. A fraction also has its count `n`. A
    contrast is a difference of means, A minus B, and has `better`: the fraction of resamples with A above B, ties half
    (0 to 1). Task indices and steps count from 0.

    - `tasks`: counts `in_study`, `labelled`, `labelled_twice`, `steps`.
    - `agreement`: counts `steps` (with two ratings) and `chains` (with two labellings); figures `alpha` (ordinal),
      `wrong_or_not`, `first_error`; and `apart`, a list of disagreements: {"task": index, "first_error": {annotator:
      step or null}} or {"task", "wrong": {step: {annotator: bool}}} (`step` is an int key; JSON makes it text).
    - `annotators`: by name, counts `tasks`, `finish` ({reason: count}), `flagged`, `steps`; `minutes`, and the medians
      `seconds_a_step` and `seconds_a_task`; `screening` (`Tasks.screening`; null if the study has no
      screening tasks); figures `gold` and `repeats`; `drift`, null below 8 tasks, with contrasts (second half of the
      tasks minus first) `seconds_a_step` and `rated_wrong`.
    - `anchoring`: null below 8 labellings with and 8 without scores; else counts `shown` and `hidden`, and contrasts
      (shown minus hidden) `agreement`, `with_an_error`, `seconds_a_step`.
    """
    seed, done = tasks.study.config.seed, labellings(tasks)
    names = tasks.study.config.annotators
    return {
        "tasks": {"in_study": len(tasks.study.trees["work"]), "labelled": len(done),
                  "labelled_twice": sum(len(labelled) > 1 for labelled in done.values()),
                  "steps": sum(len(set().union(*(task.ratings for task in labelled))) for labelled in done.values())},
        "agreement": _agreement(tasks, [labelled for labelled in done.values() if len(labelled) > 1], seed),
        "annotators": {name: _annotator(tasks, name, seed) for name in names},
        "anchoring": _anchoring(tasks, [task for labelled in done.values() for task in labelled if task.rated], seed),
    }  # fmt: skip


STUCK_MINUTES = 30
"""With an open task, an annotator without events for longer counts as stuck."""


def standing(tasks: Tasks, now: float) -> dict[str, dict[str, Any]]:
    """Returns each annotator's progress by name: `state`, `minutes`, `on`. `now` is in seconds since 1970.

    `state`: `not begun` (no rating, comment or finish), `screening failed`, `done` (no open task), `stuck` (`minutes`
    above `STUCK_MINUTES`), else `working`. `minutes` since the last event; null before the first. `on`: {"problem": its
    first 200 characters, "step": from 1} of the open task at work, or null without one.
    """
    state_of = {}
    for name in tasks.study.config.annotators:
        own_tasks = tasks.opened_by(name)
        begun = [task for task in own_tasks if task.acts or task.finish or task.comments]
        opened = [task for task in own_tasks if not task.finish]
        last = max((task.touched for task in own_tasks), default=None)
        minutes = None if last is None else max(now - last, 0.0) / 60
        if tasks.screening(name)["passed"] is False:
            state = "screening failed"
        elif not opened:
            state = "done" if begun else "not begun"
        elif minutes is not None and minutes > STUCK_MINUTES:
            state = "stuck"
        else:
            state = "working" if begun else "not begun"
        at = max(opened, key=lambda task: (bool(task.acts), task.touched), default=None)
        on = at and {"problem": tasks.tree(at).problem[:200], "step": len(at.path) + 1}
        state_of[name] = {"state": state, "minutes": minutes, "on": on}
    return state_of


def _agreement(tasks: Tasks, twice: Sequence[Sequence[Task]], seed: int) -> dict[str, Any]:
    """Returns alpha over steps with two ratings, the agreement on wrong or not wrong, and the agreement on a chain's
    first error, or its absence.
    """
    units, task_U = [], []
    for number, pair in enumerate(twice):
        for ratings in _steps(pair):
            units.append(ratings)
            task_U.append(number)
    pairs_UCC = coincidences(units)

    def alpha(weight_RU: np.ndarray) -> np.ndarray:
        return alpha_of(np.einsum("ru,uck->rck", weight_RU, pairs_UCC))

    both = [pair for pair in twice if all(task.rated for task in pair)]
    chains = [pair for pair in both if ends_at_error(tasks.tree(pair[0]))]
    same = [float(len({task.error for task in pair}) == 1) for pair in chains]
    return {
        "steps": len(units),
        "alpha": _inside(bootstrap(alpha, task_U, seed=seed, fraction=False).json()) if units else None,
        "wrong_or_not": _fraction([float(len({rating == -1 for rating in unit}) == 1) for unit in units], seed, task_U),
        "chains": len(chains),
        "first_error": _fraction(same, seed),
        "apart": [difference for pair in both if (difference := _apart(tasks, pair))],
    }


def _steps(pair: Sequence[Task]) -> list[list[int]]:
    """Returns the ratings of every step with at least two annotators."""
    ratings = [task.ratings for task in pair]
    rated = [[of_one[step] for of_one in ratings if step in of_one] for step in sorted(set().union(*ratings))]
    return [values for values in rated if len(values) > 1]


def _apart(tasks: Tasks, pair: Sequence[Task]) -> dict[str, Any] | None:
    """Returns the annotators' disagreement: on a chain's first error, or on the wrong steps of a tree."""
    index, tree = pair[0].index, tasks.tree(pair[0])
    if ends_at_error(tree):
        errors = {task.annotator: task.error for task in pair}
        return {"task": index, "first_error": errors} if len(set(errors.values())) > 1 else None
    wrong = {task.annotator: task.wrong for task in pair}
    steps = {
        step: marked
        for step in range(len(tree.nodes))
        if len(set((marked := {name: marks[step] for name, marks in wrong.items() if step in marks}).values())) > 1
    }
    return {"task": index, "wrong": steps} if steps else None


def _annotator(tasks: Tasks, name: str, seed: int) -> dict[str, Any]:
    finished = [task for task in tasks.opened_by(name) if task.finish]
    work = [task for task in finished if task.pool == "work" and not task.again]
    before = {task.index: task for task in work if task.rated}
    known = [task for task in finished if task.pool == "gold"]
    again = [task for task in finished if task.again and task.rated and task.index in before]
    seconds = [act.seconds for task in finished for act in task.acts if act.rating is not None]
    total = [sum(act.seconds for act in task.acts) for task in finished]
    return {
        "tasks": len(finished),
        "finish": {reason: sum(task.finish == reason for task in finished) for reason in REASONS},
        "flagged": sum(task.flagged for task in finished),
        "steps": sum(len(task.ratings) for task in finished),
        "minutes": sum(total) / 60,
        "seconds_a_step": statistics.median(seconds) if seconds else None,
        "seconds_a_task": statistics.median(total) if finished else None,
        "screening": tasks.screening(name) if tasks.study.trees["screening"] else None,
        "gold": _fraction([tasks.as_known(task) for task in known], seed),
        "repeats": _fraction([alike(tasks.tree(task), task.wrong, before[task.index].wrong) for task in again], seed),
        "drift": _drift([task for task in work if task.acts], seed),
    }


def _fraction(hits: Sequence[float], seed: int, task_N: Sequence[int] | None = None) -> dict[str, Any] | None:
    """Returns the mean with its 95 % interval over tasks (one per hit by default), and the number of hits `n`, if there
    are hits.
    """
    if not hits:
        return None
    hit_N = np.array(hits)
    tasks = np.arange(len(hits)) if task_N is None else task_N
    mean = bootstrap(lambda weight_RN: weighted_mean(hit_N, weight_RN), tasks, seed=seed)
    return mean.json() | {"n": len(hits)}


def _drift(work: Sequence[Task], seed: int) -> dict[str, Any] | None:
    """Returns the change from the first to the second half of an annotator's tasks: seconds per step, and fraction of
    steps rated wrong, given at least 8 tasks.
    """
    if len(work) < 8:
        return None
    late_N, task_N = np.arange(len(work)) >= len(work) / 2, range(len(work))
    wrong_N = [sum(task.wrong.values()) / len(task.wrong) for task in work]
    return {
        "seconds_a_step": _contrast(list(map(_seconds_a_step, work)), late_N, task_N, seed),
        "rated_wrong": _inside(_contrast(wrong_N, late_N, task_N, seed)),
    }


def _seconds_a_step(task: Task) -> float:
    return sum(act.seconds for act in task.acts) / len(task.ratings)


def _contrast(value_N: Sequence[float], second_N: np.ndarray, task_N: Sequence[int], seed: int) -> dict[str, Any]:
    """Returns the difference in means, marked minus other values, with a 95 % interval over tasks."""
    x_N, one_N = np.array(value_N), second_N.astype(float)

    def change(weight_RN: np.ndarray) -> np.ndarray:
        return weighted_mean(x_N, weight_RN * one_N) - weighted_mean(x_N, weight_RN * (1 - one_N))

    return difference(draws(change, task_N, seed=seed)).json()


def _inside(figure: dict[str, Any]) -> dict[str, Any]:
    """Clips the interval of a figure to [-1, 1], its possible range."""
    ends = {key: min(max(figure[key], -1.0), 1.0) for key in ("low", "high") if figure[key] is not None}
    return figure | ends


DOUBTED = 0.5
"""The model doubts a step with a score below this."""


def _anchoring(tasks: Tasks, rated: Sequence[Task], seed: int) -> dict[str, Any] | None:
    """Returns the effect of showing scores, shown minus hidden: `agreement` of the first error with the first step that
    the model doubts (or neither exists), `with_an_error`, `seconds_a_step`. `None` for fewer than 8 of either.

    Chance decides who sees scores of which chains, so the differences are causal effects (Tversky and Kahneman 1974).
    """
    shown_N = np.array([tasks.anchored(task) for task in rated], bool)
    if min(shown_N.sum(), (~shown_N).sum()) < 8:
        return None
    chain_N, agrees_N = [task.index for task in rated], []
    for task in rated:
        doubted = next((i for i, score in enumerate(scores_of(tasks.tree(task))) if score < DOUBTED), None)
        agrees_N.append(float(task.error == doubted))
    return {
        "shown": int(shown_N.sum()),
        "hidden": int((~shown_N).sum()),
        "agreement": _inside(_contrast(agrees_N, shown_N, chain_N, seed)),
        "with_an_error": _inside(_contrast([float(task.error is not None) for task in rated], shown_N, chain_N, seed)),
        "seconds_a_step": _contrast(list(map(_seconds_a_step, rated)), shown_N, chain_N, seed),
    }


def tables(report: Mapping[str, Any]) -> Iterator[Table | str]:
    """Yields sentences, one table of annotators (a column each), and a closing sentence.

    `report` is from `figures`; with a key `standing` (from `standing`) the table begins with the progress. Rows without
    any entry are left out.
    """
    tasks, agreement = report["tasks"], report["agreement"]
    yield (
        f"{tasks['labelled']:,} of {tasks['in_study']:,} tasks labelled, {tasks['labelled_twice']:,} of them twice:"
        f" {tasks['steps']:,} steps"
    )
    if agreement["alpha"]:
        yield (
            f"Ordinal alpha {_number(agreement['alpha']) or 'undefined'} over {agreement['steps']:,} steps that two"
            f" rated; both or neither call one wrong in {_percent(agreement['wrong_or_not'])}"
        )
    if agreement["chains"]:
        yield f"The same first error or none in {_percent(agreement['first_error'])} of {agreement['chains']:,} chains"
    if not agreement["steps"]:
        yield "No step has two ratings yet, so agreement is not computed"
    if anchoring := report["anchoring"]:
        yield (
            f"Scores were shown on {anchoring['shown']:,} labellings and hidden on {anchoring['hidden']:,}. Shown less"
            f" hidden: first errors as the model's {_points(anchoring['agreement'])} points, chains with an error"
            f" {_points(anchoring['with_an_error'])}, seconds a step {_number(anchoring['seconds_a_step'], '+.1f')}"
        )
    rows = {
        "tasks": lambda row: f"{row['tasks']:,}",
        "steps": lambda row: f"{row['steps']:,}",
        "minutes": lambda row: f"{row['minutes']:.1f}",
        "seconds a step, median": lambda row: _plain(row["seconds_a_step"]),
        "seconds a task, median": lambda row: _plain(row["seconds_a_task"]),
        "screening": lambda row: (
            "{right:g} of {tasks}, {done} done".format_map(row["screening"]) if row["screening"] else ""
        ),
        "known tasks, labelled as known": lambda row: _percent(row["gold"], n=True),
        "repeated tasks, labelled as before": lambda row: _percent(row["repeats"], n=True),
        "drift: seconds a step": lambda row: _number(row["drift"] and row["drift"]["seconds_a_step"], "+.1f"),
        "drift: steps rated wrong, points": lambda row: _points(row["drift"] and row["drift"]["rated_wrong"]),
        "skipped, given up, bad problem": lambda row: " / ".join(
            str(row["finish"][reason]) for reason in ("skip", "give_up", "bad_problem")
        ),
        "flagged": lambda row: f"{row['flagged']:,}",
    }
    cells = [[what, *map(cell, report["annotators"].values())] for what, cell in rows.items()]
    if standing := report.get("standing"):
        where = {
            "state": lambda row: row["state"],
            "last event, ago": lambda row: _ago(row["minutes"]),
            "working on": lambda row: f"step {row['on']['step']}: {row['on']['problem']}" if row["on"] else "",
        }
        cells = [[what, *map(cell, standing.values())] for what, cell in where.items()] + cells
    cells = [row for row in cells if any(row[1:])]  # what the study does not have, or not yet
    yield Table("", ("", *report["annotators"]), cells)
    words = {
        "known": "Known tasks have labels that are known to be right: they measure the annotators.",
        "repeated": "Repeated tasks come to one annotator twice.",
        "drift": "Drift is the second half of the tasks less the first.",
    }
    said = [text for word, text in words.items() if any(row[0].startswith(word) for row in cells)]
    yield " ".join(["Brackets are 95 % intervals over tasks.", *said])


def _ago(minutes: float | None) -> str:
    if minutes is None:
        return ""
    return "now" if minutes < 1 else f"{minutes:.0f} min" if minutes < 90 else f"{minutes / 60:.0f} h"


def _plain(value: float | None) -> str:
    return "" if value is None else f"{value:.1f}"


def _number(figure: Mapping[str, Any] | None, form: str = ".2f", scale: float = 1.0, unit: str = "") -> str:
    if not figure or figure["value"] is None:
        return ""
    value, low, high = (None if figure[key] is None else scale * figure[key] for key in ("value", "low", "high"))
    return f"{value:{form}}{unit}" + ("" if low is None else f" [{low:{form}}, {high:{form}}]")


def _points(figure: Mapping[str, Any] | None) -> str:
    return _number(figure, "+.0f", 100)


def _percent(figure: Mapping[str, Any] | None, n: bool = False) -> str:
    return _number(figure, ".0f", 100, " %") + (f" of {figure['n']}" if n and figure else "")


# ------------------------------------------------------------------------------- labels as records, to train on


def export(
    folder: str | os.PathLike,
    output: str | os.PathLike,
    *,
    disagreements: Disagreements,
    without: Collection[str] = (),
    written: Written | None = None,
) -> dict[str, int]:
    """Writes the labels of a study as chain and tree records with ratings (1, 0, -1), even while it is served.

    Skipped tasks and bad problems are left out. A task that an annotator gave up keeps the ratings until then. Gold
    tasks and repetitions are left out, as are labels of annotators in `without`. If an annotator wrote a step, the
    record becomes a tree with this step as an alternative: rated 1 if `written` is `positive`, else unlabelled. If
    annotators of a task differ, `disagreements` is `cut` (one record, without the disputed labels and the steps after
    them) or `each` (one record per annotator).

    `output` is replaced atomically. Returns counts: `tasks` (records), `steps` (labelled), and if above 0 `written` and
    e.g. `left out: skip`.

    Raises ValueError if the folder is not a study, `without` has an unknown name, `written` is missing though steps
    were written, there are no labels yet, or `output` is a file of the study's events or not a plain file.
    """
    tasks = tasks_of(folder)
    check_output(output, tasks.study.events)
    if unknown := sorted(set(without) - set(tasks.study.config.annotators)):
        raise ValueError(f"without: {unknown[0]!r} is no annotator of {os.fspath(folder)}")
    if written is None and any(task.written for labelled in labellings(tasks).values() for task in labelled):
        raise ValueError(f"{os.fspath(folder)}: annotators wrote steps: give --written positive or unlabelled")
    counts: collections.Counter[str] = collections.Counter(tasks=0)
    records = list(_records(tasks, disagreements, without, written, counts))
    if not records:
        raise ValueError(f"{os.fspath(folder)}: nothing is labelled yet")
    write_records(output, records)
    return dict(counts)


def _records(
    tasks: Tasks, disagreements: str, without: Collection[str], written: str | None, counts: collections.Counter
) -> Iterator[dict[str, Any]]:
    for index, labelled in labellings(tasks).items():
        labelled = [task for task in labelled if task.annotator not in without]
        kept = [task for task in labelled if task.acts and task.finish not in ("skip", "bad_problem")]
        counts.update(f"left out: {task.finish}" for task in labelled if task not in kept)
        if not kept:
            continue
        for group in [kept] if disagreements == "cut" else [[task] for task in kept]:
            tree = tasks.study.trees["work"][index]
            labels = _agreed(group, rated_tree(tree))
            if not any(label is not None for label in labels):
                counts["left out: no step agreed on"] += 1
                continue
            counts["tasks"] += 1
            counts["steps"] += sum(label is not None for label in labels)
            anchored = [task.annotator for task in group if tasks.anchored(task)]
            if added := [_written(task) for task in group if task.written and _all_wrong(task, tree, labels)]:
                counts["written"] += len(added)
                tree = as_tree(tree)
                tree = dataclasses.replace(tree, nodes=(*tree.nodes, *added), kind="tree")
                labels += [1 if written == "positive" else None] * len(added)
            yield _record(tree, labels, group, anchored)


def _all_wrong(task: Task, tree: ReasoningTree, labels: Sequence[int | None]) -> bool:
    """Whether the exported labels call all alternatives wrong that the annotator's own step replaces."""
    parent = task.path[-1] if task.path else -1
    return all(label == -1 for node, label in zip(tree.nodes, labels, strict=True) if node.parent == parent)


def _written(task: Task) -> Node:
    """Returns an annotator's own step, in the form of the PRM800K reader."""
    parent = task.path[-1] if task.path else -1
    return Node(parent, task.written, origin="human_written", extra={"annotator": task.annotator})


def _agreed(group: list[Task], tree: ReasoningTree) -> list[int | None]:
    """Returns the rating of each step up to the first one on which annotators differ, then `None`.

    In a trajectory only that step has no rating: its annotators continue from the same turn in any case.
    """
    ratings, labels, apart = [task.ratings for task in group], [], set()
    for i, node in enumerate(tree.nodes):
        rated = {by_step[i] for by_step in ratings if i in by_step}
        if len(rated) > 1 or (node.parent in apart and not tree.of_messages):
            apart.add(i)
        labels.append(rated.pop() if rated and i not in apart else None)
    return labels


def _record(tree: ReasoningTree, labels: list[int | None], group: list[Task], anchored: list[str]) -> dict[str, Any]:
    chosen = {step for task in group for step in task.path}
    if tree.of_messages:
        nodes = _turns(tree, labels, chosen)
    else:
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


def _turns(tree: ReasoningTree, labels: Sequence[int | None], chosen: Collection[int]) -> list[Node]:
    """Returns a message tree's nodes with step labels, and `chosen` if a path had alternatives.

    Other message data are kept, except earlier labels and scores.
    """
    label_of: dict[int, int | None] = dict(zip(tree.steps, labels, strict=True))
    places = [tree.steps[step] for step in chosen] if tree.kind == "tree" else []
    notes = [{"chosen": True} if i in places and not node.continues else NONE for i, node in enumerate(tree.nodes)]
    labelled = with_labels(tree, [label_of.get(i) for i in range(len(tree.nodes))], "rating", "human", notes)
    return list(with_scores(labelled, [None] * len(labelled.nodes), {}).nodes)


def _node(node: Node, label: int | None, chosen: bool) -> Node:
    """Returns a tree's node in the form of the PRM800K reader, with `chosen` if a path continued there."""
    if node.origin == "human_written":
        return dataclasses.replace(node, label=label)
    extra = {key: value for key, value in node.extra.items() if key not in ("chosen", "label", "origin", "false")}
    extra |= {"chosen": True} if chosen else {}
    return Node(node.parent, node.text, label, None if label is None else "human", node.correct, extra=extra or NONE)
