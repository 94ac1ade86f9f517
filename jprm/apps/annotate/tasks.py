"""Assignment of tasks: each annotator's tasks, as derived from the events, and the next one."""

from __future__ import annotations

import collections
import dataclasses
import hashlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Literal, NamedTuple, get_args

from jprm.apps.annotate.study import Alternatives, Study, alike, alternatives_of, chance, known_wrong, rated_tree
from jprm.tree import ReasoningTree

AHEAD = 2
"""Open tasks per annotator: the current one, and the next in case the connection is lost."""

CLAIM_SECONDS = 24 * 3600.0
"""After this time, an unfinished task is also given to another annotator."""

REPEAT_AFTER = 20
"""Minimum number of tasks before a task is repeated."""

FINISHED = ("solution", "found_error")
Reason = Literal["solution", "found_error", "give_up", "bad_problem", "skip"]
REASONS: tuple[str, ...] = get_args(Reason)
"""How a task ends: at the end of a path, if no alternative is acceptable, or for one of three other reasons."""


class Conflict(ValueError):
    """An event that contradicts earlier ones, e.g. a second rating of a step from another window."""


class Act(NamedTuple):
    """A step's rating, or (without `rating`) the choice of a rated step. `chosen`: the path continues from it."""

    step: int
    rating: int | None
    seconds: float
    chosen: bool


@dataclasses.dataclass(frozen=True)
class Task:
    """Tree `index` of a pool, assigned to an annotator. `again`: repeated. `finish`: a `Reason`, or None while open."""

    id: str
    annotator: str
    pool: str
    index: int
    again: bool
    touched: float
    acts: tuple[Act, ...] = ()
    finish: str | None = None
    flagged: bool = False
    comments: tuple[Mapping[str, Any], ...] = ()
    written: str = ""  # the step that the annotator would write after `path`, where every alternative is wrong

    @property
    def rated(self) -> bool:
        """Whether a path was rated to its end, or until no alternative is acceptable (`finish` is in `FINISHED`)."""
        return self.finish in FINISHED

    @property
    def path(self) -> list[int]:
        """Steps (node indices) from which the annotator continued, in order; [] at the beginning."""
        return [act.step for act in self.acts if act.chosen]

    @property
    def ratings(self) -> dict[int, int]:
        """Last rating (-1, 0 or 1) of each rated step, by node index in order of first rating."""
        return {act.step: act.rating for act in self.acts if act.rating is not None}

    @property
    def wrong(self) -> dict[int, bool]:
        """Whether each rated step is rated wrong (-1), by node index."""
        return {step: rating == -1 for step, rating in self.ratings.items()}

    @property
    def error(self) -> int | None:
        """Index of the first step rated wrong, or `None`."""
        return next((step for step, wrong in self.wrong.items() if wrong), None)


def changed(task: Task, after: Alternatives, event: Mapping[str, Any], recovers: bool = False) -> Task:
    """Returns a new task, as it is after an event. Raises Conflict if the event does not fit.

    `after` are the whole tree's alternatives (`alternatives_of`). An event has its `time` (seconds since 1970), and its
    `kind` with other keys, which must be there: `rate` (`step`, `rating`: -1, 0 or 1, `seconds`), `choose` (`step`,
    `seconds`), `write` (`text`; only if all alternatives are wrong), `finish` (`reason`: a `Reason`), `flag` (`on`),
    `comment` (`step`, `text`), or `undo`, whose `step` is the last one, -1 if there is none, or `None` to undo the
    finish. Steps are node indices.

    Rating a step without alternatives also chooses it, unless it is wrong. With `recovers` (trajectories), the path may
    continue from a wrong step: the task ends if no step is left.
    """
    kind = event["kind"]
    task = dataclasses.replace(task, touched=event["time"])
    if kind == "flag":
        return dataclasses.replace(task, flagged=event["on"])
    if kind == "comment":
        return dataclasses.replace(task, comments=(*task.comments, {k: event[k] for k in ("step", "text")}))
    if kind == "undo":
        if event["step"] != (None if task.finish else task.acts[-1].step if task.acts else -1):
            raise Conflict("this is not the last thing done: another window is at work on this task")
        before = {"finish": None} if task.finish else {"acts": task.acts[:-1], "written": ""}
        return dataclasses.replace(task, **before)
    if task.finish:
        raise Conflict("the task is finished: undo first")
    path, ratings = task.path, task.ratings
    alternatives = after[path[-1] + 1 if path else 0]
    wrong = [ratings.get(step) == -1 for step in alternatives]
    if kind == "finish":
        complete = "solution" if not alternatives else "found_error" if all(wrong) and not recovers else None
        if event["reason"] != complete and event["reason"] in FINISHED:
            raise Conflict("steps are left to rate")
        return dataclasses.replace(task, finish=event["reason"])
    if kind == "write":
        if not alternatives or not all(wrong) or recovers:
            raise Conflict("a step may be written only if every alternative is rated wrong")
        return dataclasses.replace(task, written=event["text"])
    step, lone = event["step"], len(alternatives) == 1
    if step not in alternatives or (lone and step in ratings):
        raise Conflict("this is not a next step: another window is at work on this task")
    if kind == "rate":
        act = Act(step, event["rating"], event["seconds"], lone and (recovers or event["rating"] != -1))
    elif len(ratings.keys() & set(alternatives)) < len(alternatives) or (ratings[step] == -1 and not recovers):
        raise Conflict("a step is chosen that is not wrong, when all its alternatives are rated")
    else:
        act = Act(step, None, event["seconds"], True)
    return dataclasses.replace(task, acts=(*task.acts, act))


class Tasks:
    """All tasks of a study. Changes only by `apply`, so replaying the events restores the same tasks.

    `by_id` has the tasks; `trees` and `alternatives` the rated trees and their alternatives, by pool and index. The
    constructor raises Conflict if the events contradict each other.
    """

    def __init__(self, study: Study, events: Iterable[Mapping[str, Any]] = ()):
        self.study = study
        self.by_id: dict[str, Task] = {}
        self._of: dict[str, list[str]] = {name: [] for name in study.config.annotators}
        self._on: dict[int, list[str]] = collections.defaultdict(list)  # tasks on each tree of work
        self.trees = {pool: list(map(rated_tree, trees)) for pool, trees in study.trees.items()}
        self.alternatives = {pool: list(map(alternatives_of, trees)) for pool, trees in self.trees.items()}
        self._seen: dict[str, Mapping[str, Any]] = {}
        config = study.config
        double = config.double_fraction if len(config.annotators) > 1 else 0.0
        self._wanted = [1 + (chance(config.seed, "double", i) < double) for i in range(len(study.trees["work"]))]
        for event in events:
            self.apply(event)

    def opened_by(self, annotator: str) -> list[Task]:
        """Returns the annotator's tasks in order of opening, finished ones too; [] if the annotator is unknown."""
        return [self.by_id[id] for id in self._of.get(annotator, ())]

    def tree(self, task: Task) -> ReasoningTree:
        """Returns the tree to rate in a task; for a trajectory, only its turns (`rated_tree`)."""
        return self.trees[task.pool][task.index]

    def anchored(self, task: Task) -> bool:
        """Whether the annotator sees the model's scores in this task (decided by chance, from the study's seed).

        Always `False` outside the pool `work`.
        """
        config = self.study.config
        return (
            task.pool == "work" and chance(config.seed, "anchor", task.annotator, task.index) < config.anchored_fraction
        )

    def known(self, event: Mapping[str, Any]) -> bool:
        """Whether this event was applied: a client resends it if the acknowledgement was lost. Changes nothing.

        Events are compared without `time`. Raises Conflict if another event has its uuid.
        """
        seen = self._seen.get(event["uuid"])
        if seen is not None and any(seen.get(key) != event.get(key) for key in {*seen, *event} - {"time"}):
            raise Conflict(f"uuid {event['uuid']} is another event's: give each event a uuid of its own")
        return seen is not None

    def after(self, event: Mapping[str, Any]) -> Task:
        """Returns the event's task as it would be after the event, without applying it.

        Events are from `next`, or as in `changed` with `task` (its id) and `annotator`. Raises Conflict if the event
        does not fit, or its task is unknown or another annotator's.
        """
        if event["kind"] == "open":
            fields = {key: event[key] for key in ("annotator", "pool", "index", "again")}
            return Task(event["task"], **fields, touched=event["time"])
        task = self.by_id.get(event["task"])
        if task is None or task.annotator != event["annotator"]:
            raise Conflict("this task is not this annotator's")
        return changed(task, self.alternatives[task.pool][task.index], event, recovers=self.tree(task).of_messages)

    def apply(self, event: Mapping[str, Any]) -> None:
        """Applies an event of `after` with a `uuid`, which is not compared (see `known`).

        Raises Conflict, without any change, if it does not fit.
        """
        task = self.after(event)
        if event["kind"] == "open":
            self._of.setdefault(task.annotator, []).append(task.id)
            if task.pool == "work":
                self._on[task.index].append(task.id)
        self.by_id[task.id] = task
        self._seen[event["uuid"]] = event

    def next(self, annotator: str, now: float) -> dict[str, Any] | None:
        """Returns the event that opens the annotator's next task, not yet applied.

        Returns `None` if `AHEAD` tasks are open, none is left, or the screening is unfinished or failed. `now` is in
        seconds since 1970: a work task left open for `CLAIM_SECONDS` is offered to others. The event has `uuid`, `kind`
        ("open"), `annotator`, `task` (the new id), `pool`, `index`, `again` (a repetition), and `time`, which is `now`.
        """
        opened = self.opened_by(annotator)
        if sum(task.finish is None for task in opened) >= AHEAD:
            return None
        place = self._place(annotator, opened, now)
        if place is None:
            return None
        pool, index, again = place
        id = hashlib.sha256(f"{self.study.salt} {annotator} {pool} {index} {again}".encode()).hexdigest()[:20]
        names = {"uuid": f"open-{id}", "kind": "open", "annotator": annotator, "task": id}
        return {**names, "pool": pool, "index": index, "again": again, "time": now}

    def as_known(self, task: Task) -> float:
        """Returns the agreement, from 0 to 1, of a finished task with its known labels (`alike`).

        0 if it is not `rated`.
        """
        tree = self.tree(task)
        return task.rated * alike(tree, task.wrong, known_wrong(tree))

    def screening(self, annotator: str) -> dict[str, Any]:
        """Returns the annotator's screening: counts `tasks` and `done`, `right`, and `passed`.

        `right` is the sum of agreements (`as_known`), with two decimals. `passed` is `None` until all are done; then
        whether `right` is at least `pass_screening * tasks`, `True` without screening tasks.
        """
        trees = self.study.trees["screening"]
        done = [task for task in self.opened_by(annotator) if task.pool == "screening" and task.finish]
        right = round(sum(map(self.as_known, done)), 2)
        passed = right >= self.study.config.pass_screening * len(trees) if len(done) == len(trees) else None
        return {"tasks": len(trees), "done": len(done), "right": right, "passed": passed}

    def _place(self, annotator: str, opened: list[Task], now: float) -> tuple[str, int, bool] | None:
        """Returns (pool, index, is a repetition) of the next task.

        There is no next task if screening is not passed, or all tasks are done.
        """
        screened = sum(task.pool == "screening" for task in opened)
        if screened < len(self.study.trees["screening"]):
            return "screening", screened, False
        if not self.screening(annotator)["passed"]:
            return None
        config, count = self.study.config, len(opened) - screened
        drawn = chance(config.seed, "kind", annotator, count)
        if drawn < config.gold_fraction and (left := list(self._left(opened, "gold"))):
            return "gold", min(left, key=lambda i: chance(config.seed, "gold", annotator, i)), False
        if config.gold_fraction <= drawn < config.gold_fraction + config.repeat_fraction:
            before = [task for task in opened[:-REPEAT_AFTER] if task.pool == "work" and task.rated and not task.again]
            again = {task.index for task in opened if task.again}
            if old := [task.index for task in before if task.index not in again]:
                return "work", old[int(chance(config.seed, "repeat", annotator, count) * len(old))], True
        left = self._left(opened, "work")
        return next((("work", i, False) for i in left if self._open(i, now)), None)

    def _left(self, opened: list[Task], pool: str) -> Iterator[int]:
        """Yields a pool's trees that are new to the annotator."""
        seen = {task.index for task in opened if task.pool == pool}
        return (i for i in range(len(self.study.trees[pool])) if i not in seen)

    def _open(self, index: int, now: float) -> bool:
        """Whether a tree needs another annotator."""
        tasks = [self.by_id[id] for id in self._on[index]]
        busy = [task for task in tasks if task.finish or now - task.touched < CLAIM_SECONDS]
        return sum(task.finish != "skip" and not task.again for task in busy) < self._wanted[index]
