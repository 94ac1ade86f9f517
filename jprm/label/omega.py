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
import math
from collections.abc import Iterable, Iterator, Sequence

import numpy as np
from jaxtyping import Float, Int

from jprm.label.config import OmegaConfig
from jprm.label.monte_carlo import ORIGIN, wilson
from jprm.label.rollouts import Grader, Rollouts, reaches_answer
from jprm.policy.protocol import Prefix, Sample
from jprm.tree import Node, ReasoningTree, without_chain


def quality(mc: Float[np.ndarray, "*S"], tokens: Int[np.ndarray, "*S"], config: OmegaConfig) -> Float[np.ndarray, "*S"]:
    """Returns Q(s, r) = alpha^(1 - MC(s)) beta^(len(r) / L), high for short errors from mostly correct states."""
    return config.alpha ** (1 - np.asarray(mc)) * config.beta ** (np.asarray(tokens) / config.length)


def exploration(visits: Int[np.ndarray, "*S"], total: int, config: OmegaConfig) -> Float[np.ndarray, "*S"]:
    """Returns U(s) = c_puct sqrt(sum_i N(s_i)) / (1 + N(s)), summed over all states of the tree."""
    return config.c_puct * math.sqrt(total) / (1 + np.asarray(visits))


@dataclasses.dataclass
class State:
    """A valued prefix: `right` of `total` rollouts reach the answer, and `visits` is N(s)."""

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
      states: by the steps of their prefix, () for the problem.
      wrong: the candidates, as (prefix, rollout).
      errors: the chains that end at a first error.
      spent: rollouts of all states.
    """

    problem: str
    answer: str | float
    states: dict[tuple[str, ...], State] = dataclasses.field(default_factory=dict)
    wrong: list[tuple[tuple[str, ...], Sample]] = dataclasses.field(default_factory=list)
    errors: list[tuple[str, ...]] = dataclasses.field(default_factory=list)
    searches: int = 0
    spent: int = 0


def label_problems(
    trees: Iterable[ReasoningTree],
    rollouts: Rollouts,
    config: OmegaConfig,
    grader: Grader = reaches_answer,
    *,
    left_out: collections.Counter | None = None,
) -> Iterator[ReasoningTree]:
    """Yields a tree of values for every problem; the nodes of the given trees are not used.

    Problems whose first k rollouts are all correct or all incorrect have no error to find. They are left out and
    counted in `left_out` as "too easy" and "too hard" (or "no rollouts").
    """
    for tree in trees:
        if tree.answer is None:
            raise ValueError(f"the problem {tree.problem[:80]!r} has no answer, so no rollout can be judged")
        search = run_search(tree.problem, tree.answer, rollouts, config, grader)
        root = search.states.get(())
        if root is None or not 0 < root.mc < 1 or len(search.states) + len(search.errors) < 2:
            reason = "no rollouts" if root is None else "too easy" if root.mc == 1 else "too hard"
            if left_out is not None:
                left_out["nothing found" if root and 0 < root.mc < 1 else reason] += 1
            continue
        yield tree_of_search(search, tree)


def run_search(
    problem: str, answer: str | float, rollouts: Rollouts, config: OmegaConfig, grader: Grader = reaches_answer
) -> Search:
    """Searches until no candidate is left or `config.searches` or `config.budget` is reached."""
    search = Search(problem, answer)
    _value(search, (), rollouts, config, grader)
    while search.wrong and search.searches < config.searches:
        prefix, rollout = search.wrong.pop(select(search, config))
        search.states[prefix].visits += 1
        search.searches += 1
        first = first_error(search, prefix, rollout.steps, rollouts, config, grader)
        if first is None:  # the budget is spent
            break
        search.errors.append(prefix + rollout.steps[: first + 1])
    return search


def select(search: Search, config: OmegaConfig) -> int:
    """Returns the index of the candidate with the largest Q + U, the first of equals."""
    states = [search.states[prefix] for prefix, _ in search.wrong]
    tokens = np.array([rollout.tokens for _, rollout in search.wrong])
    mc, visits = np.array([state.mc for state in states]), np.array([state.visits for state in states])
    total = sum(state.visits for state in search.states.values())
    return int(np.argmax(quality(mc, tokens, config) + exploration(visits, total, config)))


def first_error(
    search: Search,
    prefix: tuple[str, ...],
    steps: Sequence[str],
    rollouts: Rollouts,
    config: OmegaConfig,
    grader: Grader = reaches_answer,
) -> int | None:
    """Returns the index of the first step after which no rollout is correct; None if the budget ends first.

    `steps` is an incorrect rollout from a state of MC > 0. Invariant: some rollout after steps[:low] is correct, none
    after steps[:high] is. So at most ceil(log2(len(steps))) new states are valued.
    """
    low, high = 0, len(steps)
    while high - low > 1:
        middle = (low + high) // 2
        state = _value(search, prefix + tuple(steps[:middle]), rollouts, config, grader)
        if state is None:
            return None
        low, high = (middle, high) if state.right else (low, middle)
    return high - 1


def _value(search: Search, steps: tuple[str, ...], rollouts: Rollouts, config: OmegaConfig, grader: Grader):
    """Returns a prefix's state, valued by k rollouts if new. Incorrect ones become candidates if others are correct."""
    if steps in search.states:
        return search.states[steps]
    if config.budget is not None and search.spent + config.k > config.budget:
        return None
    prefix = Prefix(search.problem, steps)
    (samples,) = rollouts.draw([(prefix, config.seed, config.k)])
    search.spent += config.k
    if not samples:
        return None
    right = [grader(prefix, sample, search.answer) for sample in samples]
    state = search.states[steps] = State(sum(right), len(samples))
    if 0 < state.right < state.total:
        # A rollout that was cut off counts as incorrect, but may have no error.
        wrong = [sample for sample, good in zip(samples, right, strict=True) if not good]
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
    return ReasoningTree(search.problem, tuple(nodes), search.answer, "value", "tree", extra)
