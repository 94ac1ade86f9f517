"""`TokenTree`: a reasoning tree as a radix tree over token runs.

A run is a token stretch without a branch inside. A step's ids are inserted after its parent's end, so steps
that begin alike share their common prefix, and two equal steps end at the same token. Attention needs
two arrays: every run's length and parent, in depth-first order.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from array import array
from collections.abc import Sequence
from typing import Literal, get_args

import numpy as np
from jaxtyping import Bool, Float32, Int, Int32

from jprm.options import find_part
from jprm.tokenizer import Layout
from jprm.tree import ReasoningTree, above_of

Supervise = Literal["step", "outcome", "outcome_steps", "outcome_tokens", "token"]

WRITTEN_MESSAGES = "jprm.methods.messages.tokens:written_messages"
"""Tokenises a message tree; imported on first use."""

REFERENCE = "reference"
"""The extra written by `jprm label reference`: the reference model's log-probability for the steps so far."""


BEGIN = "begin"
"""A computed extra: the depth at which a step's own tokens begin. In a message tree this is the start of its
turn, else the problem's end."""


@dataclasses.dataclass(frozen=True)
class TokenTree:
    """N tokens in R runs, M steps. Runs are depth first, run 0 begins the problem; steps are ordered by last token."""

    name: str  # the beginning of the problem, for error messages
    tokens_N: Int32[np.ndarray, " N"]
    length_R: Int[np.ndarray, " R"]
    parent_R: Int[np.ndarray, " R"]  # -1 for run 0; otherwise less than the run's own index
    run_M: Int[np.ndarray, " M"]  # the run that ends with the step's last token
    above_M: Int[np.ndarray, " M"]  # the step before it on its chain, an index into M; -1 for a first step
    node_M: Int[np.ndarray, " M"]  # index of its node in the ReasoningTree
    label_M: Float32[np.ndarray, " M"]
    weight_M: Float32[np.ndarray, " M"]
    problem: int  # tokens of the problem
    extras: dict[str, Float32[np.ndarray, " M"]] = dataclasses.field(default_factory=dict)

    @functools.cached_property
    def start_R(self) -> Int[np.ndarray, " R"]:
        """Index of each run's first token."""
        return np.cumsum(self.length_R) - self.length_R


@dataclasses.dataclass(frozen=True)
class Geometry:
    last_R: Int[np.ndarray, " R"]  # the last run of the subtree of each run
    stop_R: Int[np.ndarray, " R"]  # one past its last token, as an index into the tree
    depth_R: Int[np.ndarray, " R"]  # tokens on the path from the root to its end, its own included
    until_N: Int[np.ndarray, " N"]  # one past the last token of the subtree that each token belongs to
    position_N: Int[np.ndarray, " N"]  # tokens between the root and each token


def geometry(length_R: Int[np.ndarray, " R"], parent_R: Int[np.ndarray, " R"]) -> Geometry:
    """Returns the geometry of runs in depth-first order, in O(R log R + N) for any nesting.

    Each round doubles the distance along last children, for all runs at once, until each run has its subtree's last
    run. A run's end has the depth of all tokens so far, less the runs whose subtrees have ended.
    """
    index_R = np.arange(len(length_R))
    last_R = index_R.copy()
    child_R = np.flatnonzero(parent_R >= 0)
    np.maximum.at(last_R, parent_R[child_R], child_R)
    while not np.array_equal(further_R := last_R[last_R], last_R):
        last_R = further_R
    stop_R = np.cumsum(length_R)
    ended_R = np.cumsum(np.bincount(last_R + 1, weights=length_R, minlength=len(length_R) + 1)[:-1].astype(np.int64))
    depth_R = stop_R - ended_R
    until_N = np.repeat(stop_R[last_R], length_R)
    return Geometry(last_R, stop_R, depth_R, until_N, np.arange(len(until_N)) - np.repeat(stop_R - depth_R, length_R))


def ranges(start_K: Int[np.ndarray, " K"], length_K: Int[np.ndarray, " K"]) -> Int[np.ndarray, " N"]:
    """Concatenates K ranges start, ..., start + length - 1, e.g. starts [5, 0], lengths [2, 1]: [5, 6, 0]."""
    return np.arange(length_K.sum()) + np.repeat(start_K - (np.cumsum(length_K) - length_K), length_K)


class _Runs:
    """Runs under construction: (start, length, parent) into one id buffer, so splitting copies nothing."""

    def __init__(self, problem: Sequence[int]):
        self.flat = array("i", problem)
        self.start, self.length, self.parent = [0], [len(self.flat)], [-1]
        self._child: dict[tuple[int, int], int] = {}  # (run, first token of the next run) -> next run

    def insert(self, run: int, ids: Sequence[int]) -> int:
        """Adds ids after the end of `run`; returns the run that ends with the last id."""
        done = 0
        while done < len(ids):
            below = self._child.get((run, ids[done]))
            if below is None:
                self._child[run, ids[done]] = self._new(len(self.flat), len(ids) - done, run)
                self.flat.extend(ids[done:])
                return len(self.start) - 1
            first, limit = self.start[below], min(self.length[below], len(ids) - done)
            shared = 1
            while shared < limit and self.flat[first + shared] == ids[done + shared]:
                shared += 1
            if shared < self.length[below]:  # the first part is a new run; steps that end at the tail's end stay there
                head = self._child[run, ids[done]] = self._new(first, shared, run)
                self._child[head, self.flat[first + shared]] = below
                self.start[below], self.length[below] = first + shared, self.length[below] - shared
                self.parent[below] = below = head
            run, done = below, done + shared
        return run

    def _new(self, start: int, length: int, parent: int) -> int:
        self.start.append(start)
        self.length.append(length)
        self.parent.append(parent)
        return len(self.start) - 1

    def ordered(self) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """Returns tokens, lengths and parents in depth-first order, and each run's place in this order."""
        order_R = _depth_first(np.array(self.start), np.array(self.length), np.array(self.parent))
        rank_R = np.argsort(order_R)
        start_R, length_R, parent_R = (np.array(x, np.int64)[order_R] for x in (self.start, self.length, self.parent))
        parent_R[1:] = rank_R[parent_R[1:]]
        return np.array(self.flat, np.int32)[ranges(start_R, length_R)], length_R, parent_R, rank_R


def token_tree(
    tree: ReasoningTree, layout: Layout, supervise: Supervise = "step", extras: tuple[str, ...] = (), weight: str = "",
    context: int | None = None,
) -> TokenTree:  # fmt: skip
    """Tokenises a tree and merges its chains' common prefixes.

    In a message tree, context has no labels at steps, and no slots at tokens.

    Args:
        supervise: `step` takes node labels (1 with weight 0 if missing). `outcome` takes `correct` from the chain that
            ends at the node (1 or 0; weight 0 if unknown). `outcome_steps` and `outcome_tokens` take the mean outcome
            over the chains through a step or token, with their number as weight. If the loss is linear in the target,
            as cross-entropy is, this equals the sum over separate chains, each with its outcome at every step or token;
            for a squared error the gradient does. `token`, for a policy, ends a whole chain at every leaf; see
            `next_tokens`.
        extras: keys of numbers in nodes, or `label`, `score`, an output, a name in the record's `classes` (then 1 or
            0). A missing number becomes NaN. `begin` is computed (`BEGIN`).
        weight: a key of nodes. It multiplies the label's or outcome's weight (not for `token`). A missing number
            is 1, and so is a 0 if the outcome is known (Monte Carlo samples no rollouts from such a node).
        context: read trajectories in windows of at most so many tokens (`jprm.methods.messages.tokens.windows_of`).

    Raises ValueError for a step without tokens; `token` with a tokenizer without eos; slots per token with extras; an
    extra or weight that no node has, or that is no number; negative weights; a system message without a place.
    """
    if supervise not in get_args(Supervise):
        raise ValueError(f"supervise is {supervise!r}; use one of {', '.join(get_args(Supervise))}")
    if supervise in ("token", "outcome_tokens") and extras:
        raise ValueError(f"extras {extras} have one number a step, but {supervise!r} has a slot for every token")
    name = tree.problem if len(tree.problem) <= 60 else tree.problem[:57] + "..."
    if tree.of_messages:
        written = find_part(WRITTEN_MESSAGES, {}, "written")(tree, layout, context)
    else:
        written = _written(tree, layout, name, supervise)
    shape = merged(name, written.problem, written.chunks, written.parents, written.lasts)
    label_N, weight_N = _labels(tree, name, supervise, weight)
    node_M = np.array(written.nodes, np.int64)[shape.node_M]
    whole = dataclasses.replace(
        shape,
        node_M=node_M,
        label_M=label_N[node_M],
        weight_M=weight_N[node_M],
        extras={
            key: _begins(tree, written, shape, supervise) if key == BEGIN
            else _extra(tree, name, key, "extras", absent=math.nan)[node_M]
            for key in extras
        },
    )  # fmt: skip
    if supervise not in ("outcome_tokens", "token"):
        return whole
    slots = {"outcome_tokens": outcome_tokens, "token": next_tokens}[supervise](whole)
    if not written.spans:
        return slots
    agents_N = _on_spans(shape, [written.spans[place] for place in shape.node_M.tolist()])
    return _only(slots, agents_N[slots.node_M])


@dataclasses.dataclass(frozen=True)
class Written:
    """M steps as token ids, each after its parent's ids."""

    problem: list[int]
    chunks: list[list[int]]  # the ids of each step, the context before it included
    parents: list[int]  # the step that each continues, an earlier one; -1 for the problem
    nodes: Sequence[int]  # the node of each
    lasts: Sequence[list[int] | None] = ()  # as in `merged`
    spans: Sequence[tuple[int, int]] = ()  # the depths between which the agent wrote each, of a tree of messages


def _written(tree: ReasoningTree, layout: Layout, name: str, supervise: Supervise) -> Written:
    """Tokenises a tree's steps by the layout. Raises ValueError if a step has no tokens."""
    end = [layout.tokenizer.eos] if supervise == "token" else []  # a policy ends every chain
    if None in end:
        raise ValueError("the tokenizer has no end-of-sequence token, so a policy could never end a chain; add one")
    parents = [node.parent for node in tree.nodes]
    inner, depth = set(parents), []  # depth of every node, in steps
    chunks, lasts = [], []
    for index, node in enumerate(tree.nodes):
        depth.append(depth[node.parent] + 1 if node.parent >= 0 else 0)
        ids = layout.step(node.text, depth[-1])
        if not ids:
            raise ValueError(f"problem {name!r}, node {index}: the layout gives the step no tokens. Drop empty steps")
        chunks.append(ids if index in inner else [*ids, *end])
        lasts.append(layout.last(node.text, depth[-1]))
    return Written(layout.problem(tree.problem, tree.system), chunks, parents, range(len(chunks)), lasts)


def _begins(tree: ReasoningTree, written: Written, shape: TokenTree, supervise: Supervise) -> Float32[np.ndarray, " M"]:
    """Returns the depth at which each step's own tokens begin, in the order of `shape`.

    Raises ValueError for outcomes if the chat template rewrites earlier turns: a chain's tokens are then on several
    paths.
    """
    if not written.spans:
        return np.full(len(shape.node_M), len(written.problem), np.float32)
    above, steps = above_of(tree), set(tree.steps)
    again = [node for node, parent in zip(written.nodes, written.parents, strict=True)
             if parent < 0 and above[node] in steps]  # fmt: skip
    if again and supervise == "outcome":
        raise ValueError(
            f"problem {shape.name!r}, node {again[0]}: the chat template rewrites the turns before this one, so that"
            " no path has all that the agent wrote. Train with a template that keeps them"
        )
    return np.array([written.spans[place][0] for place in shape.node_M.tolist()], np.float32)


def _on_spans(tree: TokenTree, range_M: Sequence[tuple[int, int]]) -> Bool[np.ndarray, " N"]:
    """Marks the tokens at depths range_M[m][0] <= depth < range_M[m][1] on the path of any step m."""
    shape, written_N = geometry(tree.length_R, tree.parent_R), np.zeros(len(tree.tokens_N), bool)
    for run, (begin, end) in zip(tree.run_M.tolist(), range_M, strict=True):
        while run >= 0 and shape.depth_R[run] > begin:
            first, start = int(shape.depth_R[run] - tree.length_R[run]), int(tree.start_R[run])
            written_N[start + max(begin - first, 0) : start + min(end, int(shape.depth_R[run])) - first] = True
            run = int(tree.parent_R[run])
    return written_N


def _only(tree: TokenTree, some_M: Bool[np.ndarray, " M"]) -> TokenTree:
    """Keeps only the marked slots; each continues the last marked slot on its path."""
    new_M, nearest = np.cumsum(some_M) - 1, [-1] * len(some_M)
    for slot, above in enumerate(tree.above_M.tolist()):  # a slot comes before those that continue it
        nearest[slot] = -1 if above < 0 else (int(new_M[above]) if some_M[above] else nearest[above])
    return dataclasses.replace(
        tree, run_M=tree.run_M[some_M], above_M=np.array(nearest, np.int64)[some_M], node_M=tree.node_M[some_M],
        label_M=tree.label_M[some_M], weight_M=tree.weight_M[some_M],
        extras={key: extra_M[some_M] for key, extra_M in tree.extras.items()},
    )  # fmt: skip


def _labels(
    tree: ReasoningTree, name: str, supervise: Supervise, weight: str
) -> tuple[Float32[np.ndarray, " M"], Float32[np.ndarray, " M"]]:
    """Returns every node's label and weight, in node order."""
    marks = [node.label if supervise == "step" else node.correct for node in tree.nodes]
    label_M = np.array([1.0 if mark is None else mark for mark in marks])
    weight_M = np.array([mark is not None for mark in marks], float)
    if weight:
        number_M = _extra(tree, name, weight, "weight", absent=1.0)
        if (number_M < 0).any():
            raise ValueError(f"problem {name!r}: {weight} (data.weight) is negative. Weights must be 0 or more")
        known_M = np.array([node.correct is not None for node in tree.nodes], bool)
        weight_M *= np.where((number_M == 0) & known_M, 1.0, number_M)
    if supervise == "outcome_steps":
        right_M = label_M * weight_M
        for i in reversed(range(len(tree.nodes))):
            if (above := tree.nodes[i].parent) >= 0:
                right_M[above] += right_M[i]
                weight_M[above] += weight_M[i]
        label_M = np.divide(right_M, weight_M, out=np.ones_like(right_M), where=weight_M > 0)
    return label_M.astype(np.float32), weight_M.astype(np.float32)


def _extra(tree: ReasoningTree, name: str, key: str, field: str, absent: float) -> Float32[np.ndarray, " M"]:
    """Returns each node's number under `key`, e.g. `rollouts`; of a scored file also `score`, and outputs by name.

    If a record has `classes`, with a name, a list of names or `None` per step, the number is whether the step has the
    class. `absent` replaces a missing number; errors name the option `field`.
    """
    fields, output = ("score", "label"), key.removeprefix("outputs.")
    values = [x.extra.get(key, getattr(x, key) if key in fields else x.outputs.get(output)) for x in tree.nodes]
    absent_everywhere = values and all(value is None for value in values)
    if absent_everywhere and field == "extras" and "classes" in tree.extra:
        classes = tree.extra["classes"]
        if not isinstance(classes, list) or len(classes) != len(tree.steps):
            raise ValueError(f"problem {name!r}: classes must be a list with a name, names or null for each step")
        for node, label in zip(tree.steps, classes, strict=True):
            values[node] = None if label is None else float(key in ([label] if isinstance(label, str) else label))
    elif absent_everywhere:
        raise ValueError(f"problem {name!r}: no node has {key!r}. Change data.{field}, or add the key to the records")
    for index, value in enumerate(values):
        if value is not None and (isinstance(value, bool) or not isinstance(value, int | float)):
            raise ValueError(f"problem {name!r}, node {index}: {key} is {value!r}, not a number")
    return np.array([absent if value is None else value for value in values], np.float32)


def merged(
    name: str, problem: Sequence[int], steps: Sequence[Sequence[int]], parents: Sequence[int] | None = None,
    lasts: Sequence[Sequence[int] | None] = (),
) -> TokenTree:  # fmt: skip
    """Merges steps (lists of at least one id) into a tree, with labels and weights 1; `node_M` are step indices.

    parents: the earlier step that each continues, or -1 for the problem (the default).
    lasts: ids of steps read as their chain's last (`Layout.last`). Such an end is not continued, so each is a separate
        chain, with `above_M` -1.
    """
    runs, run_of, read_at = _Runs(problem), [], []
    above_N = np.full(len(steps), -1) if parents is None else np.array(parents, np.int64)
    inner = set(above_N.tolist())
    for index, (ids, parent) in enumerate(zip(steps, above_N.tolist(), strict=True)):
        above = run_of[parent] if parent >= 0 else 0
        last = lasts[index] if lasts else None
        run_of.append(runs.insert(above, ids) if last is None or index in inner else above)
        read_at.append(run_of[-1] if last is None else runs.insert(above, last))
    if any(last is not None for last in lasts):
        run_of, above_N = read_at, np.full(len(steps), -1)
    tokens_N, length_R, parent_R, rank_R = runs.ordered()
    run_M = rank_R[np.array(run_of, np.int64)]
    node_M = np.argsort(run_M, kind="stable")
    above_M = above_N[node_M]
    return TokenTree(
        name=name, tokens_N=tokens_N, length_R=length_R, parent_R=parent_R, run_M=run_M[node_M],
        above_M=np.where(above_M >= 0, np.argsort(node_M)[above_M], -1) if len(node_M) else above_M, node_M=node_M,
        label_M=np.ones(len(steps), np.float32), weight_M=np.ones(len(steps), np.float32), problem=len(problem),
    )  # fmt: skip


def next_tokens(tree: TokenTree) -> TokenTree:
    """Returns the tree, without extras, to train a policy: a slot for every token after the problem, read before it.

    A slot's label is its token id, its weight 1. At a branch, the last shared token has a slot per branch. Runs are
    single tokens, and `node_M` is the token index.
    """
    total, above_N = len(tree.tokens_N), tokens_above(tree)
    node_M = np.arange(int(tree.length_R[0]), total)
    node_M = node_M[np.argsort(above_N[node_M], kind="stable")]
    slot_N = np.full(total, -1)
    slot_N[node_M] = np.arange(len(node_M))
    return dataclasses.replace(
        tree, length_R=np.ones(total, np.int64), parent_R=above_N, run_M=above_N[node_M],
        above_M=slot_N[above_N[node_M]], node_M=node_M, label_M=tree.tokens_N[node_M].astype(np.float32),
        weight_M=np.ones(len(node_M), np.float32),
    )  # fmt: skip


def outcome_tokens(tree: TokenTree) -> TokenTree:
    """Returns the tree with a slot at every token after the problem; labels must be outcomes, and extras absent.

    A slot's label is the mean outcome over chains through its token, its weight their total weight. Runs are single
    tokens, and `node_M` is the token index.
    """
    total, above_N, shape = len(tree.tokens_N), tokens_above(tree), geometry(tree.length_R, tree.parent_R)
    node_M = np.arange(tree.problem, total)
    end_M = shape.stop_R[tree.run_M] - 1

    def below(x_M):
        sum_J = np.concatenate([[0.0], np.cumsum(np.bincount(end_M, x_M, minlength=total))])
        return sum_J[shape.until_N[node_M]] - sum_J[node_M]

    right_M, weight_M = below(tree.weight_M * tree.label_M), below(tree.weight_M)
    return dataclasses.replace(
        tree, length_R=np.ones(total, np.int64), parent_R=above_N, run_M=node_M,
        above_M=np.maximum(above_N[node_M] - tree.problem, -1), node_M=node_M,
        label_M=np.divide(right_M, weight_M, out=np.ones_like(right_M), where=weight_M > 0).astype(np.float32),
        weight_M=weight_M.astype(np.float32),
    )  # fmt: skip


def tokens_above(tree: TokenTree) -> Int[np.ndarray, " N"]:
    """Returns the index of each token's previous token on its path, -1 for the first."""
    above_N = np.arange(-1, len(tree.tokens_N) - 1)
    above_N[tree.start_R[1:]] = (tree.start_R + tree.length_R - 1)[tree.parent_R[1:]]
    return above_N


def restrict(tree: TokenTree, run_K: Int[np.ndarray, " K"], step_L: Int[np.ndarray, " L"]) -> TokenTree:
    """Keeps these runs and steps (ascending indices), which must include their ancestors."""
    start_K, length_K = tree.start_R[run_K], tree.length_R[run_K]
    parent_K, above_L = tree.parent_R[run_K], tree.above_M[step_L]
    return dataclasses.replace(
        tree, tokens_N=tree.tokens_N[ranges(start_K, length_K)], length_R=length_K,
        parent_R=np.where(parent_K >= 0, np.searchsorted(run_K, parent_K), -1),
        run_M=np.searchsorted(run_K, tree.run_M[step_L]),
        above_M=np.where(above_L >= 0, np.searchsorted(step_L, above_L), -1),
        node_M=tree.node_M[step_L], label_M=tree.label_M[step_L], weight_M=tree.weight_M[step_L],
        extras={name: extra_M[step_L] for name, extra_M in tree.extras.items()},
    )  # fmt: skip


def chain_lengths(tree: TokenTree) -> Int[np.ndarray, " M"]:
    """Returns the number of steps on the chain up to each step, inclusive."""
    length_M = [0] * len(tree.above_M)
    for slot, above in enumerate(tree.above_M.tolist()):  # a parent's run comes before its children's
        length_M[slot] = 1 + (length_M[above] if above >= 0 else 0)
    return np.array(length_M, np.int64)


def _depth_first(
    start_R: Int[np.ndarray, " R"], length_R: Int[np.ndarray, " R"], parent_R: Int[np.ndarray, " R"]
) -> Int[np.ndarray, " R"]:
    """Returns a depth-first run order with the deepest sibling last.

    A split tree's later parts then follow the longest branch and repeat little. Equally deep siblings keep their order.
    """
    by_start = np.argsort(start_R, kind="stable").tolist()  # a parent's tokens appeared before its children's
    parent, below = parent_R.tolist(), length_R.tolist()
    children: list[list[int]] = [[] for _ in parent]
    for run in reversed(by_start):
        children[run].reverse()
        children[run].sort(key=below.__getitem__)
        below[run] += below[children[run][-1]] if children[run] else 0
        if parent[run] >= 0:
            children[parent[run]].append(run)
    order, stack = [], [0]
    while stack:
        order.append(run := stack.pop())
        stack.extend(reversed(children[run]))
    return np.array(order)
