"""The tree of a problem while it is searched: nodes, the draws that made them, and what they cost."""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Iterable, Mapping
from typing import Any

from jprm.policy.protocol import Prefix, Sample

ROOT = -1
"""The problem itself, as the parent of first steps."""


@dataclasses.dataclass(frozen=True)
class Problem:
    """What is searched. `answer` is the true one, None where it is not known; `extra` are the record's other keys."""

    text: str
    answer: str | float | None = None
    extra: Mapping[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, slots=True)
class Draw:
    """A sample in its place: it went on from node `start` and came to node `end`, the same if it has no step.

    `over_budget`: the tokens of this draw and those before it are more than the problem's budget. It is scored and
    kept, but no method goes on from it and it is never the result.
    """

    start: int
    end: int
    sample: Sample
    over_budget: bool = False


class GrowingTree:
    """Nodes by index, a parent before its children; equal steps below one parent are one node.

    Attributes:
      parent, text, score, handle: of every node. A score is NaN until it is known; the handle is the scorer's, None
        before it has one and after it is released.
      draws: all samples that did not fail, in order.
      finished: nodes where a draw ended its chain with `stop`, so that the path to them is a whole chain.
      open: nodes after which a chain may go on.
      failed, error: draws that the policy marked as errors, and the last reason.
      spent, overspent: generated tokens of the draws within and over the budget.
      notes: what a method has to say about a node, for the record.
      ended: why the search ended: `done`, `budget`, or what the method returned (`max_steps`, `simulations`, `rounds`).
    """

    def __init__(self, problem: Problem, handle: int, budget: int | None):
        self.problem, self.root_handle, self.budget = problem, handle, budget
        self.parent: list[int] = []
        self.text: list[str] = []
        self.score: list[float] = []
        self.handle: list[int | None] = []
        self.draws: list[Draw] = []
        self.finished: set[int] = set()
        self.open: set[int] = {ROOT}
        self.failed, self.error = 0, None
        self.spent = self.overspent = 0
        self.notes: dict[int, dict[str, Any]] = collections.defaultdict(dict)
        self.ended = ""
        self.asked: collections.Counter = collections.Counter()  # (node, until) -> draws so far, which number the next
        self.new: list[int] = []  # nodes without a score yet
        self.released: list[int] = []  # nodes that the scorer has not been told of
        self._child: dict[tuple[int, str], int] = {}
        self._tokens: dict[str, list[int]] = {"step": [0, 0], "end": [0, 0]}  # sum and count, by what was asked for

    def path(self, node: int) -> list[int]:
        """The nodes from the first step to this one."""
        path = []
        while node != ROOT:
            path.append(node)
            node = self.parent[node]
        return path[::-1]

    def steps(self, node: int) -> tuple[str, ...]:
        return tuple(self.text[i] for i in self.path(node))

    def prefix(self, node: int) -> Prefix:
        return Prefix(self.problem.text, self.steps(node))

    def add(self, start: int, sample: Sample, until: str) -> Draw | None:
        """The draw of a sample from node `start`, its steps as nodes; None for one that failed."""
        if sample.finish_reason == "error":
            self.failed, self.error = self.failed + 1, sample.error
            return None
        tokens = self._tokens[until]
        tokens[0], tokens[1] = tokens[0] + sample.tokens, tokens[1] + 1
        over = self.budget is not None and (self.overspent > 0 or self.spent + sample.tokens > self.budget)
        if over:
            self.overspent += sample.tokens
        else:
            self.spent += sample.tokens
        end, passed = start, []
        for step in sample.steps:
            end = self._child_of(end, step)
            passed.append(end)
        if not over:
            self.open.update(passed[:-1])
            if sample.finish_reason == "step":
                self.open.add(end)
            if sample.finish_reason == "stop" and end != ROOT:
                self.finished.add(end)
        draw = Draw(start, end, sample, over)
        self.draws.append(draw)
        return draw

    def affordable(self, until: str) -> float:
        """How many further draws the budget has room for, by the mean of those so far; infinite while that is open."""
        total, count = self._tokens[until]
        if self.budget is None or not total:
            return math.inf
        return (self.budget - self.spent) * count / total

    def release(self, nodes: Iterable[int]) -> None:
        """No method will go on from these; a later draw of the same step is a node of its own."""
        for node in nodes:
            self.released.append(node)
            self._child.pop((self.parent[node], self.text[node]), None)

    def _child_of(self, parent: int, step: str) -> int:
        node = self._child.setdefault((parent, step), len(self.text))
        if node == len(self.text):
            self.parent.append(parent)
            self.text.append(step)
            self.score.append(math.nan)
            self.handle.append(None)
            self.new.append(node)
        return node
