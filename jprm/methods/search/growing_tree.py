"""A problem's tree during a search, and a search method's requests.

A method is a frozen config with `steps(tree, rule)`, a generator that yields `Ask`s and receives scored `Draw`s. This
file and the methods import no array library, so that `jprm search METHOD --help` is fast.
"""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Callable, Generator, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Literal, get_args

from jprm.methods.policy.protocol import Prefix, Problem, Sample, Until
from jprm.options import find_part
from jprm.score.scale import PROBABILITY, Scale
from jprm.tree import path_to

if TYPE_CHECKING:
    import numpy as np
    from jaxtyping import Float

ROOT = -1
"""The problem itself, as parent for first steps."""


@dataclasses.dataclass(frozen=True, slots=True)
class Ask:
    """A request for n samples after `node` (or `ROOT`): one step each, or to the chain's end."""

    node: int
    n: int
    until: Until


@dataclasses.dataclass(frozen=True, slots=True)
class Draw:
    """A sample and its place: it continues node `start` and ends at node `end`, the same node if it has no step.

    `over_budget`: the tokens up to and including this sample exceed the problem's budget. It is scored and recorded,
        but methods must not continue from it, and it is never the result.
    """

    start: int
    end: int
    sample: Sample
    over_budget: bool = False


Steps = Generator[list[Ask], list[list[Draw]], str | None]
"""A running method: yields requests, receives the draws for each, without failed ones and ones over the budget.
Returns the reason why it ended, unless it is `done`."""


Finish = Callable[[str, Sequence[str]], tuple[str | None, bool | None]]
"""(problem, a whole chain's steps) to its answer and whether it is correct, if known."""


class GrowingTree:
    """Nodes by index, a parent before its children. Equal steps after one parent are one node."""

    def __init__(
        self,
        problem: Problem,
        handle: int,  # the scorer's, for the problem
        budget: int | None,  # generated tokens; None is unlimited
        scale: Scale = PROBABILITY,
        semantics: str = "correctness",
        finished_by: Finish | None = None,
    ):
        self.problem, self.root_handle, self.budget = problem, handle, budget
        self.scale, self.semantics = scale, semantics  # what the scorer's scores mean
        self.finished_by = finished_by  # None for chains, whose text is read
        self.parent: list[int] = []  # of each node, as the next three
        self.text: list[str] = []
        self.score: list[float] = []  # NaN until it is known
        self.handle: list[int | None] = []  # the scorer's; None before the node has one, and after its release
        self.draws: list[Draw] = []  # all samples that did not fail, in order
        self.finished: set[int] = set()  # nodes where a draw ended its chain with `stop`: the path to them is whole
        self.open: set[int] = {ROOT}  # nodes after which a chain may continue
        self.failed, self.error = 0, None  # how many samples the policy marked as errors, and the last reason
        self.spent = self.overspent = 0  # generated tokens of the draws within and over the budget
        self.notes: dict[int, dict[str, Any]] = collections.defaultdict(dict)  # what a method adds to a node's record
        self.judged: dict[int, list[tuple[Any, Any]]] = {}  # by node, a judge's critiques and what they say
        self.ended = ""  # why: `done`, `budget`, or what the method returned (`max_steps`, `simulations`, `rounds`)
        self.asked: collections.Counter = collections.Counter()  # node -> samples so far; numbers the next
        self.new: list[int] = []  # nodes without a score
        self.released: list[int] = []  # nodes whose release the scorer has not seen
        self._child: dict[tuple[int, str], int] = {}
        self._tokens: dict[str, list[int]] = {"step": [0, 0], "end": [0, 0]}  # sum and count, by `until`

    def path(self, node: int) -> list[int]:
        """Returns the node indices from the first step to this node; [] for `ROOT`. Raises IndexError if unknown."""
        return path_to(node, self.parent)

    def steps(self, node: int) -> tuple[str, ...]:
        return tuple(self.text[i] for i in self.path(node))

    def prefix(self, node: int) -> Prefix:
        """Returns the problem and the steps to this node, to continue from."""
        return Prefix(self.problem.text, self.steps(node))

    def chain_scores(self, nodes: Sequence[int], rule: str) -> tuple[Float[np.ndarray, " N"], Float[np.ndarray, " N"]]:
        """Returns (score, sort key), (N,) each, for the chains that end at these nodes, by `rule`, e.g. `min`.

        Arrays of float64. Both are NaN if a step's score is not finite, or the chain is empty (`ROOT`). Raises KeyError
        for an unknown rule, ValueError if the rule multiplies probabilities and a score is outside [0, 1].
        """
        from jprm.score.aggregate import chain_scores

        return chain_scores([[self.score[i] for i in self.path(node)] for node in nodes], rule, self.scale)

    def add(self, start: int, sample: Sample, until: str) -> Draw | None:
        """Adds a sample's steps as nodes after node `start` (or `ROOT`) and returns its draw.

        A failed sample is only counted in `failed`: returns `None`. `until` is the request's, `step` or `end`, for
        `affordable`. A step equal to an existing child that is not released reuses its node; others wait in `new` for
        their score. After a sample over the budget, a chain neither continues nor counts as finished.
        """
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
        """Returns how many samples (`until`: step or end) the budget still allows, by their mean length so far.

        Unrounded, e.g. 2.4; 0 if the budget is spent. Before the first sample, each counts as one token. `math.inf` if
        there is no budget.
        """
        total, count = self._tokens[until]
        if self.budget is None:
            return math.inf
        return (self.budget - self.spent) * (count / total if total else 1)

    def release(self, nodes: Iterable[int]) -> None:
        """Declares that the method will not continue from these nodes (indices, not `ROOT`), which stay in the tree.

        A later sample of the same step is a new node. The nodes are queued in `released`; the search frees the scorer's
        memory after its round, and requesting samples after one of them is then an AssertionError.
        """
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


def at_least_one(config: Any, *names: str) -> None:
    """Raises ValueError if any of these fields (`names`) of a config is below 1, AttributeError if it is absent."""
    for name in names:
        if getattr(config, name) < 1:
            raise ValueError(f"{name} is {getattr(config, name)}: it must be at least 1")


# ----------------------------------------------------------------------------- the methods by the name of their command

METHODS = {
    "best-of-n": "jprm.methods.search.best_of_n:BestOfN",
    "beam": "jprm.methods.search.beam:Beam",
    "dvts": "jprm.methods.search.beam:DVTS",
    "particles": "jprm.methods.search.particles:Particles",
    "mcts": "jprm.methods.search.mcts:MCTS",
    "refine": "jprm.methods.search.refine:Refine",
}
"""Methods by command name. A new method is one file, like `jprm.methods.search.refine`, and one line here, or a file
by the user: `jprm search NAME` and `jprm search FILE.py:NAME` take its options from the config's fields, and
their help from its docstring."""

Choice = Literal["best", "majority", "weighted"]
CHOICES: tuple[str, ...] = get_args(Choice)


def find(name: str) -> Any:
    """Returns a search method's config class (no instance) by its name in `METHODS`, `module:NAME` or `FILE.py:NAME`.

    A file is executed once per content. Raises ValueError if the name is unknown or the object is not a class,
    MissingPart if the module, file or object does not exist.
    """
    return find_part(name, METHODS, "method", type, files=True)
