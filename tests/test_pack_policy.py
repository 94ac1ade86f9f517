"""The packer for policies against brute force: every next token of every chain is learned once, whatever the row."""

import numpy as np
import pytest
import test_pack
from hypothesis import example, given, settings
from hypothesis import strategies as st
from refusing import refused
from test_pack import LAYOUT, chain_ids
from tiny import Characters, one_chain_each, reasoning_trees

from jprm.pack import pack, split, token_tree
from jprm.token_tree import TokenTree
from jprm.tree import Node, ReasoningTree

POLICY = Characters(end=0)


def tree_of(*nodes):
    return ReasoningTree("p", tuple(Node(parent, text) for parent, text in nodes))


# Ends of chains lie between the parts of this one in rows of many lengths.
BUSHY = tree_of(
    (-1, "a"), (0, "aaaa"), (1, "aaaa"), (0, "abaa"), (0, "b"), (2, "a"), (2, "baa"), (2, "aaaa"), (3, "baaa"),
    (1, "baaa"), (6, "aaa"), (0, "a"), (1, "a"), (3, "aa"),
)  # fmt: skip


def next_tokens(tree):
    """The pairs (tokens so far, next token) of all chains."""
    pairs = set()
    for leaf in set(range(len(tree.nodes))) - {node.parent for node in tree.nodes}:
        ids = [*chain_ids(tree, leaf), POLICY.end]
        pairs |= {(tuple(ids[:i]), ids[i]) for i in range(len(tree.problem), len(ids))}
    return pairs


def check(tree, tokens, slots, chains):
    """No part exceeds a row or lacks a parent, and the slots that own something are `next_tokens`, each once."""
    given, wanted = token_tree(tree, POLICY, "token"), next_tokens(tree)
    for part in split(given, 0, tokens, slots, too_long="error", chains=chains)[0]:
        assert len(part.tree.tokens_N) <= tokens and len(part.tree.run_M) <= slots
        assert part.tree.parent_R[0] == -1
        assert all(0 <= parent < run for run, parent in enumerate(part.tree.parent_R[1:], 1))
    packed = pack([given], tokens, slots, too_long="error", chains=chains)
    rows, report, found = packed.rows, packed.report, []
    assert not chains or one_chain_each(rows).all()
    assert np.array_equal(packed.node_BS >= 0, rows.weight > 0)
    for row, slot in zip(*np.nonzero(rows.weight), strict=True):
        end = rows.step_end[row, slot]
        seen = (np.arange(tokens) <= end) & (rows.until[row] > end)
        assert rows.position[row, seen].tolist() == list(range(seen.sum()))
        found.append((tuple(rows.tokens[row, seen].tolist()), int(rows.label[row, slot])))
    assert len(found) == len(wanted) and set(found) == wanted
    assert report.tokens + report.padding == report.cells and report.repeated >= 0
    read = {ids[:i] for ids, _ in wanted for i in range(1, len(ids) + 1)}
    assert len(read) <= report.tokens - report.repeated <= len(given.tokens_N)  # the ends may be missing, no more
    return report


def smallest(tree):
    """Tokens and slots of the smallest row that holds every chain; its end needs a slot and no room."""
    tokens, _ = test_pack.smallest([tree])
    return tokens, tokens - len(tree.problem) + 1


@settings(max_examples=200, deadline=None)
@given(reasoning_trees(), st.integers(0, 24), st.integers(0, 12) | st.just(100), st.booleans())
@example(tree_of((-1, "a"), (-1, "aaa")), 0, 0, False)
def test_a_policy_learns_every_next_token_once(tree, spare_tokens, spare_slots, chains):
    tokens, slots = smallest(tree)
    check(tree, tokens + spare_tokens, slots + spare_slots, chains)


@pytest.mark.parametrize("chains", [False, True])
@pytest.mark.parametrize("spare_slots", [0, 1, 5, 100])
def test_ends_of_chains_between_parts_take_no_room(spare_slots, chains):
    tokens, slots = smallest(BUSHY)
    whole = len(token_tree(BUSHY, POLICY, "token").tokens_N)
    for row in range(tokens, whole + 3):
        check(BUSHY, row, slots + spare_slots, chains)


def test_a_part_begins_with_the_problem_and_not_with_the_end_of_another_chain():
    tree = token_tree(tree_of((-1, "a"), (-1, "b")), POLICY, "token")
    for tokens, padding in [(2, []), (3, [0])]:
        packed = pack([tree], tokens, 3, too_long="error")
        assert packed.rows.tokens.tolist() == [[*map(ord, "pa"), *padding], [*map(ord, "pb"), *padding]]
        assert (packed.report.tokens, packed.report.repeated, packed.report.steps) == (4, 1, 4)


def test_a_tree_that_fits_keeps_the_ends_of_its_chains():
    whole = len(token_tree(BUSHY, POLICY, "token").tokens_N)
    assert check(BUSHY, whole, 100, False).tokens == whole > check(BUSHY, whole - 1, 100, False).tokens


def test_the_end_of_a_policys_chain_needs_no_room():
    """Nothing is read at it. In a row without room for it, nothing is repeated either."""
    tree = token_tree(ReasoningTree("p", (Node(-1, "abc"), Node(0, "d"))), POLICY, "token")
    for tokens, laid_out in [(6, 6), (5, 5)]:
        for chains in (False, True):
            report = pack([tree], tokens, 6, too_long="error", chains=chains).report
            assert (report.tokens, report.repeated, report.steps) == (5 if chains else laid_out, 0, 5)


def test_an_end_without_steps_that_exceeds_a_row_takes_no_room():
    """As a tool's long reply after the last step of a trajectory: it is in no part, whatever comes after it."""
    long = 30
    tree = TokenTree(
        "t", np.arange(2 + long + 2, dtype=np.int32), np.array([1, 1, long, 2]), np.array([-1, 0, 1, 0]),
        np.array([1, 3]), np.array([-1, -1]), np.arange(2), np.zeros(2, np.float32), np.ones(2, np.float32), 1,
    )  # fmt: skip
    parts, report = split(tree, 0, 8, 4, too_long="error", chains=False)
    assert [part.tree.tokens_N.tolist() for part in parts] == [[0, 1], [0, 2 + long, 3 + long]]
    assert (report.tokens, report.repeated, report.steps) == (5, 1, 2)


def test_a_policy_needs_an_end_of_sequence_token():
    refused(ValueError, "end-of-sequence", token_tree, BUSHY, LAYOUT, "token")
