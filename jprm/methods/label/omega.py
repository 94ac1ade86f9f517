"""OmegaPRM (Luo et al., arXiv:2406.06592): Monte Carlo values from a tree search for first errors.

A state is a prefix with MC, the fraction of its k rollouts that are correct. Each search takes the incorrect rollout
that looks most informative, finds its first error by binary search and adds the prefixes on the way as states. That
costs O(k log M) rollouts for M steps; valuing every step costs k M.

Rollouts are split into steps first, so a search ends at a single step; the paper splits by tokens and ends at a
sixteenth of the mean length. Only incorrect rollouts are candidates: a correct one has no first error.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
import math
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
from jaxtyping import Float, Int

from jprm.methods.label.config import OmegaConfig
from jprm.methods.label.monte_carlo import ORIGIN, Rollouts, wilson
from jprm.methods.policy.protocol import Prefix, Sample
from jprm.methods.verify import verifiers
from jprm.tree import Node, ReasoningTree, without_chain

Result = TypeVar("Result")
Judged = list[tuple[Sample, bool]]
Steps = Generator[Prefix, Judged | None, Result]
"""A part of a search: it yields prefixes and receives the k rollouts of each, without failed ones, each with whether it
is correct."""

FAILED_IN_A_ROW = 16
"""Prefixes in a row, all of whose rollouts fail, after which the policy is taken to be down."""


def quality(mc: Float[np.ndarray, "*S"], tokens: Int[np.ndarray, "*S"], config: OmegaConfig) -> Float[np.ndarray, "*S"]:
    """Returns Q(s, r) = alpha^(1 - MC(s)) beta^(len(r) / L), high for short errors from mostly correct states."""
    return config.alpha ** (1 - np.asarray(mc)) * config.beta ** (np.asarray(tokens) / config.length)


def exploration(visits: Int[np.ndarray, "*S"], total: int, config: OmegaConfig) -> Float[np.ndarray, "*S"]:
    """Returns U(s) = c_puct sqrt(sum_i N(s_i)) / (1 + N(s)), summed over all states of the tree."""
    return config.c_puct * math.sqrt(total) / (1 + np.asarray(visits))


@dataclasses.dataclass
class State:
    """A valued prefix: `right` of `total` rollouts are correct, and `visits` is N(s)."""

    right: int
    total: int
    visits: int = 0

    @property
    def mc(self) -> float:
        return self.right / self.total if self.total else math.nan


@dataclasses.dataclass
class Search:
    """The search of one problem.

    Attributes:
      record: of the problem, for the verifier.
      states: by the steps of their prefix, () for the problem.
      wrong: the candidates, as (prefix, rollout).
      errors: the chains that end at a first error.
      spent: rollouts of all states.
    """

    record: Mapping[str, Any]
    states: dict[tuple[str, ...], State] = dataclasses.field(default_factory=dict)
    wrong: list[tuple[tuple[str, ...], Sample]] = dataclasses.field(default_factory=list)
    errors: list[tuple[str, ...]] = dataclasses.field(default_factory=list)
    searches: int = 0
    spent: int = 0

    @property
    def problem(self) -> str:
        return self.record["problem"]


def label_problems(
    trees: Iterable[ReasoningTree],
    rollouts: Rollouts,
    config: OmegaConfig,
    *,
    left_out: collections.Counter | None = None,
) -> Iterator[ReasoningTree]:
    """Yields a tree of values for every problem; the nodes of the given trees are not used.

    Problems whose first k rollouts are all correct or all incorrect have no error to find. They are left out and
    counted in `left_out` as "too easy" and "too hard" (or "no rollouts").
    """
    trees, check = iter(trees), verifiers.find(config.verifier).check
    while chunk := list(itertools.islice(trees, config.problems_at_once)):
        searches = [Search(verifiers.record_of_problem(tree) | {"problem": tree.plain_problem}) for tree in chunk]
        for search in searches:
            check(search.record, f"problem {search.problem[:80]!r}")
        run_searches(searches, rollouts, config)
        for tree, search in zip(chunk, searches, strict=True):
            root = search.states.get(())
            if root is None or not 0 < root.mc < 1 or len(search.states) + len(search.errors) < 2:
                reason = "no rollouts" if root is None else "too easy" if root.mc == 1 else "too hard"
                if left_out is not None:
                    left_out["nothing found" if root and 0 < root.mc < 1 else reason] += 1
                continue
            yield tree_of_search(search, tree)


def run_searches(searches: Sequence[Search], rollouts: Rollouts, config: OmegaConfig) -> None:
    """Runs searches together: every round samples k rollouts of one prefix of each, and judges them.

    Raises:
      PolicyError: the policy failed at all rollouts of more than `FAILED_IN_A_ROW` prefixes in a row.
    """
    verifier = verifiers.find(config.verifier)
    waiting: list[tuple[Search, Steps[None], Judged | None]]
    waiting = [(search, _search(search, config), None) for search in searches]
    while waiting:
        asks = []
        for search, steps, judged in waiting:
            try:
                asks.append((search, steps, steps.send(judged)))
            except StopIteration:
                continue
        requests = [(prefix, config.seed, config.k) for *_, prefix in asks]
        drawn = rollouts.draw(requests, tolerated=FAILED_IN_A_ROW) if asks else []
        completions = [
            (search.record, prefix, samples) for (search, _, prefix), samples in zip(asks, drawn, strict=True)
        ]
        right = verifier.accepts(completions)
        waiting = [
            (search, steps, list(zip(*judged, strict=True)))
            for (search, steps, _), *judged in zip(asks, drawn, right, strict=True)
        ]


def _search(search: Search, config: OmegaConfig) -> Steps[None]:
    """Searches until no candidate is left or `config.searches` or `config.budget` is reached.

    A candidate is dropped where all rollouts of a prefix on its way fail.
    """
    yield from _value(search, (), config)
    while search.wrong and search.searches < config.searches:
        prefix, rollout = search.wrong.pop(select(search, config))
        search.states[prefix].visits += 1
        search.searches += 1
        first = yield from first_error(search, prefix, rollout.steps, config)
        if first is not None:
            search.errors.append(prefix + rollout.steps[: first + 1])
        elif not _affords(search, config):
            break


def select(search: Search, config: OmegaConfig) -> int:
    """Returns the index of the candidate with the largest Q + U, the first of equals."""
    states = [search.states[prefix] for prefix, _ in search.wrong]
    tokens = np.array([rollout.tokens for _, rollout in search.wrong])
    mc, visits = np.array([state.mc for state in states]), np.array([state.visits for state in states])
    total = sum(state.visits for state in search.states.values())
    return int(np.argmax(quality(mc, tokens, config) + exploration(visits, total, config)))


def first_error(
    search: Search, prefix: tuple[str, ...], steps: Sequence[str], config: OmegaConfig
) -> Steps[int | None]:
    """Returns the index of the first step after which no rollout is correct; None if the budget or a policy ends it.

    `steps` is an incorrect rollout from a state of MC > 0. Invariant: some rollout after steps[:low] is correct, none
    after steps[:high] is. So at most ceil(log2(len(steps))) new states are valued.
    """
    low, high = 0, len(steps)
    while high - low > 1:
        middle = (low + high) // 2
        state = yield from _value(search, prefix + tuple(steps[:middle]), config)
        if state is None:
            return None
        low, high = (middle, high) if state.right else (low, middle)
    return high - 1


def _affords(search: Search, config: OmegaConfig) -> bool:
    return config.budget is None or search.spent + config.k <= config.budget


def _value(search: Search, steps: tuple[str, ...], config: OmegaConfig) -> Steps[State | None]:
    """Returns a prefix's state, valued by k rollouts if new; None if they fail or exceed the budget.

    Incorrect rollouts become candidates if others are correct.
    """
    if steps in search.states:
        return search.states[steps]
    if not _affords(search, config):
        return None
    judged = yield Prefix(search.problem, steps)
    search.spent += config.k
    if not judged:
        return None
    state = search.states[steps] = State(sum(right for _, right in judged), len(judged))
    if 0 < state.right < state.total:
        # A rollout that was cut off counts as incorrect, but may have no error.
        wrong = [sample for sample, right in judged if not right]
        search.wrong += [(steps, sample) for sample in wrong if sample.steps and sample.finish_reason == "stop"]
    return state


def tree_of_search(search: Search, source: ReasoningTree) -> ReasoningTree:
    """Returns the states and first errors as a tree of values, with the source's problem, answer and other keys.

    A node is a step. Valued prefixes have their MC, `rollouts`, `right`, the Wilson interval and `visits`. A first
    error that ends a rollout has value 0 and `correct` false. Steps between states are unlabelled.
    """
    index: dict[tuple[str, ...], int] = {(): -1}
    nodes: list[Node] = []
    errors = set(search.errors)
    for steps in sorted({steps for steps in (*search.states, *errors) if steps}, key=len):
        for end in range(1, len(steps) + 1):
            if steps[:end] not in index:
                index[steps[:end]] = len(nodes)
                nodes.append(Node(index[steps[: end - 1]], steps[end - 1]))
    for steps, i in index.items():
        if steps in search.states and steps:
            state = search.states[steps]
            low, high = (round(float(x), 6) for x in wilson(np.array(state.right), np.array(state.total)))
            extra = {"rollouts": state.total, "right": state.right, "low": low, "high": high, "visits": state.visits}
            nodes[i] = dataclasses.replace(nodes[i], label=state.mc, origin=ORIGIN, extra=extra)
        elif steps in errors:
            nodes[i] = dataclasses.replace(nodes[i], label=0.0, origin=ORIGIN, correct=False)
    root = search.states[()]
    extra = without_chain(source.extra) | {"value": root.mc, "searches": search.searches, "rollouts": search.spent}
    return ReasoningTree(search.problem, tuple(nodes), source.answer, "value", "tree", extra)
