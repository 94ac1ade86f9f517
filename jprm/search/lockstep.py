"""Many problems at once: the methods of all of them ask, the policy samples, the scorer scores, and they go on.

A method is a generator over one problem's tree: it yields what it wants drawn and gets the draws, scored. So it reads
as if its problem were alone, while a round of all problems is one call of the policy for every number of draws that is
asked for (one, where all ask alike) and one call of the scorer for every step of depth that the draws have (one, where
a draw is a step).
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
import math
from collections.abc import Callable, Generator, Iterable, Iterator
from typing import Any, Literal

from jprm.policy.protocol import Policy, Sample
from jprm.policy.sample_cache import PolicyError
from jprm.score.aggregate import RULES
from jprm.search.growing import Draw, GrowingTree, Problem
from jprm.search.scorer import LiveScorer


@dataclasses.dataclass(frozen=True, slots=True)
class Ask:
    """n draws from a node: of one step, or to the end of the chain."""

    node: int
    n: int
    until: Literal["step", "end"]


Steps = Generator[list[Ask], list[list[Draw]], str | None]
"""A method at work: asks out, their draws in, without those that failed or are over the budget. What it returns is why
it ended, None for `done`."""

CHOICES = ("best", "majority", "weighted")


@dataclasses.dataclass(frozen=True)
class SearchConfig:
    """How problems are searched.

    Attributes:
      method: a configuration such as `BestOfN(16)` or `Beam(4, 4)`; its `steps(tree, rule)` is the method at work.
      rule: one of `jprm.score.aggregate.RULES`: from the scores of steps to that of a chain.
      choose: `best` returns the finished chain of the highest score; `majority` the answer that most finished draws
        have, `weighted` the one whose draws have the largest sum of scores, and its chain of the highest score.
      budget: generated tokens of a problem at most; None for no limit. Draws that do not fit any more, by the mean of
        those before, are not asked for; one that turns out too long, and all behind it, are marked `over_budget`.
      seed: draws of a prefix are numbered from here.
      at_once: problems that advance together.
    """

    method: Any
    rule: str
    choose: Literal["best", "majority", "weighted"] = "best"
    budget: int | None = None
    seed: int = 0
    at_once: int = 32

    def __post_init__(self):
        if self.rule not in RULES:
            raise ValueError(f"rule is {self.rule!r}: use one of {', '.join(RULES)}")
        if self.choose not in CHOICES:
            raise ValueError(f"choose is {self.choose!r}: use one of {', '.join(CHOICES)}")
        if self.budget is not None and self.budget < 1:
            raise ValueError(f"a budget of {self.budget} tokens buys nothing: give at least the tokens of one step")
        if self.at_once < 1:
            raise ValueError(f"at_once is {self.at_once}: at least one problem is searched at a time")


@dataclasses.dataclass
class _Running:
    index: int
    tree: GrowingTree
    steps: Steps
    asks: list[Ask]
    last: bool = False  # the budget ends with this round


def search(
    problems: Iterable[Problem], policy: Policy, scorer: LiveScorer, config: SearchConfig
) -> Iterator[tuple[int, GrowingTree]]:
    """(index, finished search) of every problem, in the order in which they finish.

    A draw that fails is counted in its tree and the rest goes on.

    Raises:
      PolicyError: a round in which every draw of every problem failed: the policy is down. Where one is left of those
        that started together, or at most half, and the policy has answered before, the fault may be their own (a prefix
        that has grown too long), and it counts as theirs.
    """
    numbered = enumerate(problems)
    answered = [False]  # whether the policy ever was
    while chunk := list(itertools.islice(numbered, config.at_once)):
        roots = scorer.open([problem.text for _, problem in chunk])
        running = []
        for (index, problem), root in zip(chunk, roots, strict=True):
            tree = GrowingTree(problem, root, config.budget)
            running.append(_Running(index, tree, config.method.steps(tree, config.rule), []))
        ended = _advance(running, lambda run: next(run.steps))
        while True:
            for run in ended:
                _release(scorer, run.tree, all_nodes=True)
                yield run.index, run.tree
            running = [run for run in running if not run.tree.ended]
            if not running:
                break
            drawn = _draw(running, policy, config.seed, answered, few=max(1, len(chunk) // 2))
            _score([run.tree for run in running], scorer)
            ended = _advance(running, lambda run, drawn=drawn: run.steps.send(drawn[run.index]))
            for run in running:
                _release(scorer, run.tree)


def _advance(running: list[_Running], resume: Callable[[_Running], list[Ask]]) -> list[_Running]:
    """Lets every method decide on its next asks; those that ended, their trees marked."""
    for run in running:
        try:
            run.asks = resume(run)
        except StopIteration as stop:
            run.tree.ended = "budget" if run.last else stop.value or "done"
            continue
        if not run.last:
            run.asks, run.last = _within_budget(run.tree, run.asks)
            if any(ask.n for ask in run.asks):
                continue
        run.tree.ended = "budget"
        run.steps.close()
    return [run for run in running if run.tree.ended]


def _within_budget(tree: GrowingTree, asks: list[Ask]) -> tuple[list[Ask], bool]:
    """The asks, less the draws that the budget has no room for, and whether any were cut."""
    share, kept = 1.0, []
    for ask in asks:
        all_of_it = tree.affordable(ask.until)
        room = all_of_it if all_of_it == math.inf else share * all_of_it
        n = ask.n if room >= ask.n else math.floor(room + 1e-9)
        share -= n / all_of_it if n else 0.0
        kept.append(dataclasses.replace(ask, n=n))
        if n < ask.n:
            kept += [dataclasses.replace(rest, n=0) for rest in asks[len(kept) :]]
            return kept, True
    return kept, False


def _draw(
    running: list[_Running], policy: Policy, seed: int, answered: list[bool], few: int
) -> dict[int, list[list[Draw]]]:
    """Samples for all asks, in the trees; for each problem the draws that its method may use."""
    calls = collections.defaultdict(list)  # asks with one n and one number of the first draw are one call
    for run in running:
        for place, ask in enumerate(run.asks):
            if ask.n:
                first = seed + run.tree.asked[ask.node, ask.until]
                run.tree.asked[ask.node, ask.until] += ask.n
                calls[ask.until, first, ask.n].append((run, place, ask))
    samples: dict[tuple[int, int], list[Sample]] = {}
    for (until, first, n), members in calls.items():
        drawn = policy.sample([run.tree.prefix(ask.node) for run, _, ask in members], n, until=until, seed=first)
        samples |= {(run.index, place): each for (run, place, _), each in zip(members, drawn, strict=True)}
    failed = [sample.error for each in samples.values() for sample in each if sample.finish_reason == "error"]
    down = len(failed) == sum(map(len, samples.values()))
    if down and (len(running) > few or not answered[0]):
        raise PolicyError(
            f"policy {policy.name} failed at all {len(failed)} draws of a round (problems: {len(running)}): "
            f"{failed[-1]}. See that it answers and try again; what `jprm search` had drawn before is kept"
        )
    answered[0] |= not down
    found = {}
    for run in running:
        draws = [
            [run.tree.add(ask.node, sample, ask.until) for sample in samples.get((run.index, place), ())]
            for place, ask in enumerate(run.asks)
        ]
        found[run.index] = [[draw for draw in each if draw and not draw.over_budget] for each in draws]
        run.last |= run.tree.overspent > 0
    return found


def _score(trees: list[GrowingTree], scorer: LiveScorer) -> None:
    """Scores all new nodes; a node is extended once its parent has been."""
    new = [(tree, node) for tree in trees for node in tree.new]
    for tree in trees:
        tree.new.clear()
    while new:
        parents = [tree.root_handle if (i := tree.parent[node]) < 0 else tree.handle[i] for tree, node in new]
        ready = [(*item, parent) for item, parent in zip(new, parents, strict=True) if parent is not None]
        new = [item for item, parent in zip(new, parents, strict=True) if parent is None]
        assert ready, "a method asked for draws below a node that it had released"
        handles, score_P = scorer.extend([p for _, _, p in ready], [tree.text[node] for tree, node, _ in ready])
        for (tree, node, _), handle, score in zip(ready, handles, score_P, strict=True):
            tree.handle[node], tree.score[node] = handle, float(score)


def _release(scorer: LiveScorer, tree: GrowingTree, all_nodes: bool = False) -> None:
    """Tells the scorer what is not needed any more."""
    nodes = range(len(tree.handle)) if all_nodes else tree.released
    gone = [tree.handle[node] for node in nodes if tree.handle[node] is not None]
    for node in nodes:
        tree.handle[node] = None
    if all_nodes:
        gone.append(tree.root_handle)
    tree.released.clear()
    if gone:
        scorer.release(gone)
