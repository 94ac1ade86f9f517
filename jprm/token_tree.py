"""`TokenTree`: a reasoning tree as a radix tree of token runs.

A run is a stretch of tokens that all its continuations share. The ids of a step are inserted below the end of its
parent, so steps that begin alike share their common prefix, and two equal steps end at the same token. Everything that
attention needs to know follows from two arrays, the length and the parent of every run in depth-first order.
"""

from __future__ import annotations

import dataclasses
import functools
from array import array
from typing import Literal

import numpy as np
from jaxtyping import Float32, Int, Int32

from jprm.layout import Layout
from jprm.tree import ReasoningTree

Supervise = Literal["step", "outcome", "token"]


@dataclasses.dataclass(frozen=True)
class TokenTree:
    """N tokens in R runs, M steps. Runs lie depth first, the problem is run 0; steps are ordered by last token."""

    name: str  # the beginning of the problem, for error messages
    tokens_N: Int32[np.ndarray, " N"]
    length_R: Int[np.ndarray, " R"]
    parent_R: Int[np.ndarray, " R"]  # -1 for the problem; otherwise less than the run's own index
    run_M: Int[np.ndarray, " M"]  # the run that ends with the step's last token
    above_M: Int[np.ndarray, " M"]  # the step before it on its chain, an index into M; -1 for a first step
    node_M: Int[np.ndarray, " M"]  # index of its node in the ReasoningTree
    label_M: Float32[np.ndarray, " M"]
    weight_M: Float32[np.ndarray, " M"]

    @functools.cached_property
    def start_R(self) -> Int[np.ndarray, " R"]:
        """The first token of each run."""
        return np.cumsum(self.length_R) - self.length_R


@dataclasses.dataclass(frozen=True)
class Geometry:
    """What follows from the shape of a tree alone; see `geometry`."""

    last_R: Int[np.ndarray, " R"]  # the last run of the subtree of each run
    stop_R: Int[np.ndarray, " R"]  # one past its last token, as an index into the tree
    depth_R: Int[np.ndarray, " R"]  # tokens on the path from the root to its end, its own included
    until_N: Int[np.ndarray, " N"]  # one past the last token of the subtree that each token belongs to
    position_N: Int[np.ndarray, " N"]  # tokens between the root and each token


def geometry(length_R: Int[np.ndarray, " R"], parent_R: Int[np.ndarray, " R"]) -> Geometry:
    """Array function of run lengths and parents in depth-first order, in O(R log R + N) whatever the nesting.

    The last run of a subtree is found by following last children, all runs at once and twice as far every round. The
    depth of a run's end is all that was laid out so far, less the runs whose subtrees have ended.
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
    return Geometry(
        last_R=last_R,
        stop_R=stop_R,
        depth_R=depth_R,
        until_N=np.repeat(stop_R[last_R], length_R),
        position_N=np.arange(length_R.sum()) - np.repeat(stop_R - depth_R, length_R),
    )


def ranges(start_K: Int[np.ndarray, " K"], length_K: Int[np.ndarray, " K"]) -> Int[np.ndarray, " N"]:
    """The indices start, start + 1, ... of K stretches, one stretch after the other."""
    return np.arange(length_K.sum()) + np.repeat(start_K - (np.cumsum(length_K) - length_K), length_K)


def token_tree(tree: ReasoningTree, layout: Layout, supervise: Supervise = "step") -> TokenTree:
    """Tokenises a tree and merges what its chains share.

    `supervise="step"` takes a node's label (1 with weight 0 where there is none); `"outcome"` takes whether the chain
    that ends at the node is correct (1 or 0; weight 0 where unknown) and ignores step labels; `"token"`, for a policy,
    takes every leaf for the end of a whole chain and ignores both: see `next_tokens`.

    Raises:
        ValueError: a step without tokens, since a score needs a token to be read at; `"token"` under a layout whose
            chains have no end.
    """
    if supervise not in ("step", "outcome", "token"):
        raise ValueError(f"supervise is {supervise!r}; use 'step', 'outcome' or 'token'")
    end = _end_of_chain(layout) if supervise == "token" else []
    goes_on = {node.parent for node in tree.nodes}
    name = tree.problem if len(tree.problem) <= 60 else tree.problem[:57] + "..."
    # Runs are (start, length, parent) into one flat buffer of all ids, so that splitting a run copies nothing.
    flat = array("i", layout.problem(tree.problem))
    start, length, parent = [0], [len(flat)], [-1]
    child: dict[tuple[int, int], int] = {}  # (run, first token of the next run) -> next run
    number, run_of = [], []  # of every node: depth in steps, run that it ends
    for index, node in enumerate(tree.nodes):
        number.append(number[node.parent] + 1 if node.parent >= 0 else 0)
        ids = layout.step(node.text, number[-1])
        if not ids:
            raise ValueError(f"problem {name!r}, node {index}: the layout gives the step no tokens. Drop empty steps")
        ids = ids if index in goes_on else [*ids, *end]
        run, done = (run_of[node.parent] if node.parent >= 0 else 0), 0
        while done < len(ids):
            below = child.get((run, ids[done]))
            if below is None:
                below = child[run, ids[done]] = len(start)
                start.append(len(flat))
                length.append(len(ids) - done)
                parent.append(run)
                flat.extend(ids[done:])
                run = below
                break
            first, limit = start[below], min(length[below], len(ids) - done)
            shared = 1
            while shared < limit and flat[first + shared] == ids[done + shared]:
                shared += 1
            if shared < length[below]:  # the head is a new run; what ends at the tail's end stays there
                head = child[run, ids[done]] = len(start)
                start.append(first)
                length.append(shared)
                parent.append(run)
                child[head, flat[first + shared]] = below
                start[below], length[below], parent[below] = first + shared, length[below] - shared, head
                below = head
            run, done = below, done + shared
        run_of.append(run)

    order_R = _depth_first(np.array(start), np.array(length), np.array(parent))
    rank_R = np.argsort(order_R)
    start_R, length_R, parent_R = (np.array(x, np.int64)[order_R] for x in (start, length, parent))
    parent_R[1:] = rank_R[parent_R[1:]]
    run_M = rank_R[np.array(run_of, np.int64)]
    node_M = np.argsort(run_M, kind="stable")
    slot_M = np.argsort(node_M)
    above_M = np.array([node.parent for node in tree.nodes], np.int64)[node_M]
    above_M = np.where(above_M >= 0, slot_M[above_M], -1) if len(node_M) else above_M
    marks = [node.label if supervise == "step" else node.correct for node in tree.nodes]
    label_M = np.array([1.0 if mark is None else float(mark) for mark in marks], np.float32)[node_M]
    weight_M = np.array([mark is not None for mark in marks], np.float32)[node_M]
    tokens_N = np.array(flat, np.int32)[ranges(start_R, length_R)]
    laid = TokenTree(name, tokens_N, length_R, parent_R, run_M[node_M], above_M, node_M, label_M, weight_M)
    return next_tokens(laid) if supervise == "token" else laid


def next_tokens(tree: TokenTree) -> TokenTree:
    """The tree as a policy learns it: a slot for every token behind the problem, read at the token before it.

    A slot's label is the id of its token. Where chains part, the token they part at has a slot for each of them. Runs
    are single tokens here, and `node_M` is the index of the token.
    """
    total, problem = len(tree.tokens_N), int(tree.length_R[0])
    above_N = np.arange(-1, total - 1)
    above_N[tree.start_R[1:]] = (tree.start_R + tree.length_R - 1)[tree.parent_R[1:]]
    node_M = np.arange(problem, total)
    node_M = node_M[np.argsort(above_N[node_M], kind="stable")]
    slot_N = np.full(total, -1)
    slot_N[node_M] = np.arange(len(node_M))
    return TokenTree(
        name=tree.name,
        tokens_N=tree.tokens_N,
        length_R=np.ones(total, np.int64),
        parent_R=above_N,
        run_M=above_N[node_M],
        above_M=slot_N[above_N[node_M]],
        node_M=node_M,
        label_M=tree.tokens_N[node_M].astype(np.float32),
        weight_M=np.ones(len(node_M), np.float32),
    )


def _end_of_chain(layout: Layout) -> list[int]:
    """What a policy writes behind the last step of a chain."""
    if layout.end is None:
        raise ValueError("the tokenizer has no end-of-sequence token, and a policy could never end a chain: add one")
    return [layout.end]


def restrict(tree: TokenTree, run_K: Int[np.ndarray, " K"], step_L: Int[np.ndarray, " L"]) -> TokenTree:
    """The part of a tree made of the given runs and steps (ascending), which must hold their own ancestors."""
    start_K, length_K = tree.start_R[run_K], tree.length_R[run_K]
    parent_K, above_L = tree.parent_R[run_K], tree.above_M[step_L]
    return TokenTree(
        name=tree.name,
        tokens_N=tree.tokens_N[ranges(start_K, length_K)],
        length_R=length_K,
        parent_R=np.where(parent_K >= 0, np.searchsorted(run_K, parent_K), -1),
        run_M=np.searchsorted(run_K, tree.run_M[step_L]),
        above_M=np.where(above_L >= 0, np.searchsorted(step_L, above_L), -1),
        node_M=tree.node_M[step_L],
        label_M=tree.label_M[step_L],
        weight_M=tree.weight_M[step_L],
    )


def chain_lengths(tree: TokenTree) -> Int[np.ndarray, " M"]:
    """Steps on the chain that ends at each step, its own included."""
    length_M = [0] * len(tree.above_M)
    for slot, above in enumerate(tree.above_M.tolist()):  # a parent's run comes before its children's
        length_M[slot] = 1 + (length_M[above] if above >= 0 else 0)
    return np.array(length_M, np.int64)


def _depth_first(
    start_R: Int[np.ndarray, " R"], length_R: Int[np.ndarray, " R"], parent_R: Int[np.ndarray, " R"]
) -> Int[np.ndarray, " R"]:
    """Depth-first order of runs, the deepest of siblings last.

    Short branches before the long one that goes on: a part of a split tree then moves down the long one, and little
    of it is laid out twice. Siblings of equal depth keep the order in which they appeared.
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
