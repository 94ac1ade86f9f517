"""Packs trees into `Rows`, many trees per row. A tree too long for one row is split at its branches.

Each part of a split tree repeats the prefix that its chains need. Repeated steps keep their slots, labels and tree
weights, because some objectives look at earlier steps, but have weight 0, so every step counts once. If a row has
too few slots, a part repeats only its own steps' ancestors: among alternatives with equal text, only the continued
one.

If attention needs it (`jprm.model.attention.chain_rows`), a row holds one chain: a tree is split at every leaf.

A split separates alternatives, and objectives comparing them (e.g. `bradley_terry`) lose those pairs. With
`siblings` the cuts separate as few labelled pairs as possible, and only then repeat as few tokens as possible.
"""

from __future__ import annotations

import bisect
import dataclasses
import heapq
import itertools
from collections.abc import Iterable, Sequence
from typing import Literal

import numpy as np
from jaxtyping import Bool, Int, Int32

from jprm.rows import Rows, empty_rows
from jprm.token_tree import Geometry, TokenTree, chain_lengths, geometry, ranges, restrict
from jprm.tree import path_to

TooLong = Literal["error", "truncate"]


@dataclasses.dataclass(frozen=True)
class PackReport:
    """Counts of one packing. Reports add up."""

    trees: int = 0
    rows: int = 0
    cells: int = 0  # rows x tokens of a row
    tokens: int = 0  # without padding
    repeated: int = 0  # of these, prefixes repeated because a tree was split
    leaf_tokens: int = 0  # if every root-to-leaf chain were packed alone
    chain_tokens: int = 0  # if the chain of every labelled step were packed alone, as Lightman et al. trained
    steps: int = 0
    labelled: int = 0
    truncated: int = 0  # steps dropped because they do not fit a row, not in `steps`
    truncated_labelled: int = 0
    pairs_lost: int = 0  # pairs of labelled alternatives that are in different rows, because a tree was split
    problem_pairs_lost: int = 0  # the same for all labelled steps of a tree

    def __add__(self, other: PackReport) -> PackReport:
        return PackReport(*(a + b for a, b in zip(dataclasses.astuple(self), dataclasses.astuple(other), strict=True)))

    @property
    def padding_share(self) -> float:
        return (self.cells - self.tokens) / max(self.cells, 1)

    @property
    def saved(self) -> int:
        """Tokens saved by sharing prefixes, compared with packing every root-to-leaf chain."""
        return self.leaf_tokens - self.tokens

    def __str__(self) -> str:
        share = 100 * self.repeated / max(self.tokens, 1)
        text = (
            f"{self.trees:,} trees, {self.steps:,} steps ({self.labelled:,} labelled) in {self.rows:,} rows: "
            f"{self.tokens:,} tokens, {100 * self.padding_share:.1f} % padding, "
            f"{self.repeated:,} tokens ({share:.1f} %) repeated by splitting. "
            f"Sharing saved {self.saved:,} of the {self.leaf_tokens:,} tokens of all chains "
            f"({self.chain_tokens:,} with one chain per labelled step)"
        )
        lost = f"; {self.truncated:,} steps ({self.truncated_labelled:,} labelled) did not fit and were dropped"
        apart = f"; {self.pairs_lost:,} pairs of labelled alternatives are in different rows"
        return text + (lost if self.truncated else "") + (apart if self.pairs_lost else "")


@dataclasses.dataclass(frozen=True)
class Packed:
    """Rows of numpy arrays, and every slot's tree (index into the packed sequence) and node, or -1 if unused or not
    owned. One slot owns each packed step."""

    rows: Rows
    tree_BS: Int32[np.ndarray, "B S"]
    node_BS: Int32[np.ndarray, "B S"]
    report: PackReport


@dataclasses.dataclass(frozen=True)
class Part:
    """A tree, or a part of one, that fits in a row."""

    index: int  # of its tree, in the packed sequence
    tree: TokenTree
    owned_M: Bool[np.ndarray, " M"]  # the others are repeated only for their labels
    leaf_M: Bool[np.ndarray, " M"]  # no step of the whole tree continues it
    repeated: int = 0  # tokens, the first ones, that an earlier part of the tree holds too


def pack(
    trees: Sequence[TokenTree], tokens: int, slots: int, *, too_long: TooLong, chains: bool = False,
    siblings: bool = False,
) -> Packed:  # fmt: skip
    """Packs trees into rows (numpy) with exactly `tokens` tokens and `slots` step slots, deterministically.

    A fitting tree is never split. Parts go to rows by best fit, longest first. Trees without steps take no row: the
    result may have 0 rows.

    Args:
        chains: put one root-to-leaf chain in each row. A step's first chain owns it.
        too_long: handles steps with a chain longer than a row: "error", or "truncate" to drop and count them.
        siblings: cut trees to separate the fewest pairs of labelled alternatives.

    Raises ValueError for a chain longer than a row under "error", a problem that fills a row (also under "truncate"),
    unequal extras, sizes below 1, or another `too_long`.
    """
    if tokens < 1 or slots < 1:
        raise ValueError(f"a row of {tokens} tokens and {slots} slots holds no step; both must be positive")
    if too_long not in ("error", "truncate"):
        raise ValueError(f"too_long is {too_long!r}; use 'error' or 'truncate'")
    report = PackReport()
    parts: list[Part] = []
    for index, tree in enumerate(trees):
        if set(tree.extras) != set(trees[0].extras):
            raise ValueError(
                f"tree {index} ({tree.name!r}) has the extras {sorted(tree.extras)}, tree 0 has"
                f" {sorted(trees[0].extras)}. Give all trees of a pack the same extras"
            )
        pieces, counts = split(tree, index, tokens, slots, too_long=too_long, chains=chains, siblings=siblings)
        parts += pieces
        report += counts
    sizes = [(len(part.tree.tokens_N), len(part.tree.run_M)) for part in parts]
    bins = [[i] for i in range(len(parts))] if chains else _best_fit(sizes, tokens, slots)
    extras = tuple(trees[0].extras) if trees else ()
    rows, tree_BS, node_BS = lay_out([[parts[i] for i in members] for members in bins], tokens, slots, extras)
    return Packed(rows, tree_BS, node_BS, report + PackReport(rows=len(bins), cells=len(bins) * tokens))


def split(
    tree: TokenTree, index: int, tokens: int, slots: int, *, too_long: TooLong, chains: bool, siblings: bool = False
) -> tuple[list[Part], PackReport]:
    """Returns the parts of tree number `index`, in order of their first steps, and their counts (rows and cells 0).

    Options, rules and errors are those of `pack`.
    """
    fitting, shape = _fit(tree, index, tokens, slots, too_long)
    if chains:  # the end of a policy's chain, at which no slot is read, is a leaf too
        fitting, shape = _leading_to(fitting, shape, np.arange(len(fitting.run_M)))
    parts = list(_split(fitting, shape, index, tokens, slots, chains, siblings))
    return parts, _count(tree, fitting, shape, parts)


def _fit(tree: TokenTree, index: int, tokens: int, slots: int, too_long: TooLong) -> tuple[TokenTree, Geometry]:
    """Drops the steps whose own chain is longer than a row; returns the tree and its geometry."""
    shape = geometry(tree.length_R, tree.parent_R)
    if len(tree.run_M) == 0:
        return tree, shape
    problem = int(tree.length_R[0])
    if problem >= tokens:
        raise ValueError(
            f"tree {index} ({tree.name!r}): the problem alone takes {problem:,} tokens, and a row of "
            f"{tokens:,} has no room for a step. Use longer rows or drop the problem from the data"
        )
    depth_M, steps_M = shape.depth_R[tree.run_M], chain_lengths(tree)
    fits_M = (depth_M <= tokens) & (steps_M <= slots)
    if fits_M.all():
        return tree, shape
    if too_long == "error":
        raise ValueError(
            f"tree {index} ({tree.name!r}): its longest chain takes {depth_M.max():,} tokens and {steps_M.max():,} "
            f"steps, a row holds {tokens:,} tokens and {slots:,} steps. Use longer rows (or more slots), or "
            "too_long='truncate' to drop the steps that do not fit"
        )
    return _leading_to(tree, shape, np.flatnonzero(fits_M))  # a chain only grows downwards: these have their ancestors


def _leading_to(tree: TokenTree, shape: Geometry, step_L: Int[np.ndarray, " L"]) -> tuple[TokenTree, Geometry]:
    """Keeps these steps, which must include their ancestors, and only the runs leading to them."""
    ends_R = np.bincount(tree.run_M[step_L], minlength=len(tree.length_R))
    before_R = np.concatenate([[0], np.cumsum(ends_R)])
    needed_R = before_R[shape.last_R + 1] > before_R[:-1]
    needed_R[0] = True
    kept = restrict(tree, np.flatnonzero(needed_R), step_L)
    return kept, geometry(kept.length_R, kept.parent_R)


def _split(
    tree: TokenTree, shape: Geometry, index: int, tokens: int, slots: int, chains: bool, siblings: bool
) -> Iterable[Part]:
    """Yields a tree's parts, each at most a row.

    A part is the path to its first step and all runs from there to its last step's run. Runs between two parts, e.g.
    the end of a policy's chain, are dropped: no slot is read there, and no step continues them.
    """
    count = len(tree.run_M)
    if count == 0:
        return
    leaf_M = _leaves(tree)
    if not chains and len(tree.tokens_N) <= tokens and count <= slots:
        yield Part(index, tree, np.ones(count, bool), leaf_M)
        return
    cuts = _leaf_cuts(tree, shape, slots) if chains else _cuts(tree, shape, tokens, slots, siblings)
    parents = tree.parent_R.tolist()
    for begin, end in itertools.pairwise(cuts):
        path_K = np.array(path_to(tree.run_M[begin], parents), np.int64)
        prefix_K = path_K[path_K <= tree.run_M[begin - 1]] if begin else path_K[:0]  # in the part before as well
        run_K = np.concatenate([path_K, np.arange(path_K[-1] + 1, tree.run_M[end - 1] + 1)])
        ends = (np.searchsorted(tree.run_M[:begin], prefix_K, side) for side in ("left", "right"))
        repeated = ranges(first_K := next(ends), next(ends) - first_K)  # steps before `begin` that end on the prefix
        if len(repeated) + end - begin > slots:
            repeated = _above(tree, begin, end)
        step_L = np.concatenate([repeated, np.arange(begin, end)])
        owned_L = np.arange(len(step_L)) >= len(repeated)
        yield Part(index, restrict(tree, run_K, step_L), owned_L, leaf_M[step_L], int(tree.length_R[prefix_K].sum()))


def _above(tree: TokenTree, begin: int, end: int) -> Int[np.ndarray, " L"]:
    """Returns the steps before `begin` that are ancestors of steps begin..end-1."""
    above = set()
    for step in tree.above_M[begin:end].tolist():
        while 0 <= step < begin and step not in above:
            above.add(step)
            step = int(tree.above_M[step])
    return np.array(sorted(above), np.int64)


def _leaf_cuts(tree: TokenTree, shape: Geometry, slots: int) -> list[int]:
    """Returns the cuts 0, ..., M that give one chain per part: the end of each leaf's steps.

    A chain with more steps than slots (many steps may be equal) is cut into several rows.
    """
    following_M = np.append(tree.run_M[1:], len(tree.length_R))
    closed_R = np.bincount(shape.last_R[tree.run_M] + 1, minlength=len(tree.length_R) + 1)
    seen_M = np.arange(len(tree.run_M)) - np.cumsum(closed_R)[tree.run_M]  # earlier steps on the path of each
    steps_J = np.concatenate([[0], np.cumsum(chain_lengths(tree))])
    cuts = [0]
    for end in (np.flatnonzero(following_M > shape.last_R[tree.run_M]) + 1).tolist():
        while (begin := cuts[-1]) < end:
            with_path = begin + slots - seen_M[begin]  # while all steps that end on the chain have slots
            with_above = np.searchsorted(steps_J, steps_J[begin] + slots, "right") - 1  # or only ancestors
            cuts.append(min(end, int(max(with_path, with_above))))
    return cuts


def _cuts(tree: TokenTree, shape: Geometry, tokens: int, slots: int, siblings: bool) -> list[int]:
    """Returns the cuts 0, ..., M with the fewest total tokens for which every part fits a row.

    Let new_j count the tree's tokens up to the end of step j - 1. A part with the steps i <= k < j takes step i's chain
    and the tokens from there to new_j: depth_i + new_j - new_(i + 1), or prefix_i + new_j - new_i. The best cuts for
    the first j steps extend the best cuts for the first i, over all i from which a part reaches j. With `siblings` a
    pair of labelled alternatives in one part is worth more than all tokens.
    """
    count = len(tree.run_M)
    new_M = shape.stop_R[tree.run_M]
    new_J = np.concatenate([[0], new_M])
    prefix_M = shape.depth_R[tree.run_M] - (new_M - new_J[:-1])
    base_M = prefix_M - new_J[:-1]
    # The slots of a part that begins at each step, less the step where it ends: its own steps, and the steps before it
    # that they continue. A step that is continued again after others is new to the parts that begin in between.
    length_M = chain_lengths(tree)
    slots_M = length_M - 1 - np.arange(count)
    before, length, left = tree.above_M.tolist(), [*length_M.tolist(), 0], [0] * count
    prefix, base, new = prefix_M.tolist(), base_M.tolist(), new_J.tolist()
    cost, back = [0] * (count + 1), [0] * (count + 1)
    begins: list[tuple[int, int]] = []  # of parts: a heap of costs and first steps
    pair, labelled_M = count * tokens + 1, (tree.weight_M > 0).tolist()
    seen: dict[int, list[int]] = {}  # labelled steps so far, by the step before them
    for end in range(1, count + 1):
        old, step = end - 2, before[end - 1]
        while old != step:  # up from the step before and from this one, to the last step that both continue
            if length[old] >= length[step]:
                left[old], old = end - 1, before[old]
            else:
                slots_M[left[step] : end - 1] += 1
                step = before[step]
        heapq.heappush(begins, (cost[end - 1] + prefix[end - 1], end - 1))
        if siblings and labelled_M[end - 1]:
            if earlier := seen.setdefault(before[end - 1], []):  # each is in a part with this step that begins up to it
                begins = [
                    (value - pair * (len(earlier) - bisect.bisect_left(earlier, first)), first)
                    for value, first in begins
                ]
                heapq.heapify(begins)
            earlier.append(end - 1)
        while base[begins[0][1]] + new[end] > tokens or slots_M[begins[0][1]] + end > slots:
            heapq.heappop(begins)  # nor does it fit where a part ends later
        cost[end], back[end] = begins[0]  # the earliest of equals: the longest part
    cuts = [count]
    while cuts[-1]:
        cuts.append(back[cuts[-1]])
    return cuts[::-1]


def _best_fit(sizes: Sequence[tuple[int, int]], tokens: int, slots: int) -> list[list[int]]:
    """Assigns parts to rows by best-fit decreasing: the longest part first, to the fullest row with room."""
    bins: list[list[int]] = []
    slots_left: list[int] = []
    room: list[tuple[int, int]] = []  # (tokens left, row), ascending
    for part in sorted(range(len(sizes)), key=lambda i: (-sizes[i][0], -sizes[i][1], i)):
        need, steps = sizes[part]
        at = bisect.bisect_left(room, (need, -1))
        while at < len(room) and slots_left[room[at][1]] < steps:
            at += 1
        if at < len(room):
            left, row = room.pop(at)
        else:
            left, row = tokens, len(bins)
            bins.append([])
            slots_left.append(slots)
        bins[row].append(part)
        slots_left[row] -= steps
        bisect.insort(room, (left - need, row))
    return bins


def lay_out(
    bins: list[list[Part]], tokens: int, slots: int, extras: tuple[str, ...] = ()
) -> tuple[Rows, np.ndarray, np.ndarray]:
    """Writes each list of parts, which must fit and have these `extras`, to a row of `tokens` tokens and `slots` slots.

    Returns (rows, tree_BS, node_BS) as in `Packed`.
    """
    rows = empty_rows(len(bins), tokens, slots, extras)
    tree_BS, node_BS = (np.full((len(bins), slots), -1, np.int32) for _ in range(2))
    for row, members in enumerate(bins):
        token, slot = 0, 0
        for number, part in enumerate(members):
            tree, owned_M = part.tree, part.owned_M
            shape = geometry(tree.length_R, tree.parent_R)
            span = slice(token, token + len(tree.tokens_N))
            rows.tokens[row, span] = tree.tokens_N
            rows.position[row, span] = shape.position_N
            rows.until[row, span] = shape.until_N + token
            steps = slice(slot, slot + len(tree.run_M))
            rows.step_end[row, steps] = shape.stop_R[tree.run_M] - 1 + token
            rows.label[row, steps] = tree.label_M
            rows.weight[row, steps] = tree.weight_M * owned_M
            rows.tree[row, steps] = number
            rows.parent[row, steps] = np.where(tree.above_M >= 0, tree.above_M + slot, -1)
            rows.problem[row, steps] = tree.problem
            rows.owned[row, steps] = owned_M
            rows.tree_weight[row, steps] = tree.weight_M
            rows.leaf[row, steps] = part.leaf_M
            for name in extras:
                rows.extras[name][row, steps] = tree.extras[name]
            tree_BS[row, steps] = np.where(owned_M, part.index, -1)
            node_BS[row, steps] = np.where(owned_M, tree.node_M, -1)
            token, slot = span.stop, steps.stop
    return rows, tree_BS, node_BS


def _count(tree: TokenTree, kept: TokenTree, shape: Geometry, parts: list[Part]) -> PackReport:
    depth_M, laid_out = shape.depth_R[kept.run_M], sum(len(part.tree.tokens_N) for part in parts)
    labelled = int((kept.weight_M > 0).sum())
    lost = [_pairs(kept, True, a) - sum(_pairs(part.tree, part.owned_M, a) for part in parts) for a in (True, False)]
    return PackReport(
        trees=1, tokens=laid_out, repeated=sum(part.repeated for part in parts),
        leaf_tokens=int(depth_M[_leaves(kept)].sum()), chain_tokens=int(depth_M[kept.weight_M > 0].sum()),
        steps=len(depth_M), labelled=labelled, truncated=len(tree.run_M) - len(depth_M),
        truncated_labelled=int((tree.weight_M > 0).sum()) - labelled, pairs_lost=lost[0], problem_pairs_lost=lost[1],
    )  # fmt: skip


def _leaves(tree: TokenTree) -> Bool[np.ndarray, " M"]:
    """Marks the steps without a following step."""
    leaf_M = np.ones(len(tree.above_M), bool)
    leaf_M[tree.above_M[tree.above_M >= 0]] = False
    return leaf_M


def _pairs(tree: TokenTree, some_M: Bool[np.ndarray, " M"] | bool, alternatives: bool) -> int:
    """Counts pairs of labelled `alternatives`, or of any labelled steps, among the marked steps."""
    rivals = np.bincount((tree.above_M[(tree.weight_M > 0) & some_M] + 1) * alternatives)
    return int((rivals * (rivals - 1) // 2).sum())
