"""Rows that trees are scored in: few lengths, so that few shapes are compiled, and little padding."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from jprm.pack import Part, lay_out, pack, split
from jprm.rows import Rows
from jprm.token_tree import TokenTree, chain_lengths, geometry

SHORTEST, FILLED, LONGEST = 256, 2048, 8192
"""Tokens of the shortest row, of the longest row that several trees share, and of the longest row made for one tree.

A row is SHORTEST times a power of two, so few shapes are compiled. A chain longer than LONGEST gets a row of its own
size, the next power of two."""


def rows_of_trees(trees: Sequence[TokenTree]) -> Iterator[tuple[Rows, np.ndarray, np.ndarray]]:
    """Yields rows of several trees, by length, with the tree (its index in `trees`) and the node of every slot."""
    for tokens, members in row_groups(trees).items():
        packed = pack([trees[i] for i in members], tokens, tokens // 2, too_long="error")
        yield packed.rows, np.where(packed.tree_BS >= 0, np.array(members)[packed.tree_BS], -1), packed.node_BS


def rows_of_chains(trees: Sequence[TokenTree]) -> Iterator[tuple[Rows, np.ndarray, np.ndarray]]:
    """Yields rows of one chain each, the shortest that hold it, with the tree and the node of every slot."""
    groups: dict[int, list[Part]] = {}
    for index, tree in enumerate(trees):
        longest = _longest_row(tree)
        for part in split(tree, index, longest, longest // 2, too_long="error", chains=True)[0]:
            groups.setdefault(row_size(_needed(part.tree)), []).append(part)
    for tokens, parts in groups.items():
        yield lay_out([[part] for part in parts], tokens, tokens // 2)


def row_groups(trees: Sequence[TokenTree]) -> dict[int, list[int]]:
    """Returns, by the tokens of a row, the indices of the trees that are packed into such rows.

    Rows are chosen one by one, each of the longest size that the remaining trees fill, so the last ones are short and
    little is padding. The number of devices plays no part: rows of another length would change scores by their
    rounding, and with them the files of several processes.
    """
    need = [_needed(tree) for tree in trees]
    left = sorted(range(len(trees)), key=lambda i: -need[i])
    groups: dict[int, list[int]] = {}
    while left:
        first, *later = left
        tokens = _row_tokens(trees[first])
        if need[first] <= LONGEST:  # a longer one is split at its branches and shares no row
            tokens = max(tokens, min(FILLED, 1 << (sum(need[i] for i in left).bit_length() - 1)))
        room, taken, left = tokens - need[first], [first], []
        for i in later:
            fits = need[i] <= room
            (taken if fits else left).append(i)
            room -= need[i] if fits else 0
        groups.setdefault(tokens, []).extend(taken)
    return groups


def _needed(tree: TokenTree) -> int:
    """Returns the tokens of a row that holds the tree. Equal chains can use up its slots, half as many, first."""
    return max(len(tree.tokens_N), 2 * len(tree.run_M))


def _row_tokens(tree: TokenTree) -> int:
    """Returns the tokens of the row for this tree alone. A tree longer than LONGEST is split."""
    return row_size(_needed(tree)) if _needed(tree) <= LONGEST else _longest_row(tree)


def _longest_row(tree: TokenTree) -> int:
    """Returns the tokens of a row that holds any one chain of the tree: LONGEST, unless a chain is longer."""
    depth_M = geometry(tree.length_R, tree.parent_R).depth_R[tree.run_M]
    return row_size(max(LONGEST, int(depth_M.max(initial=0)), 2 * int(chain_lengths(tree).max(initial=0))))


def row_size(tokens: int) -> int:
    """Returns the size of the shortest row with at least so many tokens."""
    return max(SHORTEST, 1 << (tokens - 1).bit_length())
