"""Where a tree is cut, and the pairs of alternatives that a cut separates."""

import itertools

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from test_pack import LAYOUT, smallest
from tiny import reasoning_trees

import jprm.pack
from jprm.pack import pack, split, token_tree
from jprm.tree import Node, ReasoningTree


def test_pairs_of_alternatives_that_a_split_separates_are_counted():
    nodes = (*(Node(-1, c * 4, 1.0) for c in "vwx"), Node(-1, "yyyy"), Node(0, "a", 1.0), Node(0, "b", 1.0))
    tree = token_tree(ReasoningTree("p", nodes), LAYOUT)
    assert pack([tree], 64, 8, too_long="error").report.pairs_lost == 0
    alone = pack([tree], 64, 8, too_long="error", chains=True).report
    assert alone.pairs_lost == 3 + 1 and "4 pairs of labelled alternatives" in str(alone)


@settings(max_examples=40, deadline=None)
@given(reasoning_trees(most=8), st.integers(0, 6), st.integers(0, 3))
@example(ReasoningTree("p", (Node(-1, "b"), Node(-1, "bb"), Node(0, "a"), Node(1, "a"))), 0, 0)  # bb repeats no step
def test_cuts_are_the_best_of_all(tree, spare_tokens, spare_slots):
    """Of all ways to cut: the fewest tokens, and with `siblings` first the fewest pairs lost."""
    tokens, slots = smallest([tree])
    tokens, slots = tokens + spare_tokens, slots + spare_slots
    given = token_tree(tree, LAYOUT)
    count = len(given.run_M)
    found = []
    for inner in itertools.product((False, True), repeat=max(count - 1, 0)):
        cuts = [0, *(i + 1 for i, cut in enumerate(inner) if cut), count]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(jprm.pack, "_cuts", lambda *_, cuts=cuts: cuts)
            parts, report = split(given, 0, tokens, slots, too_long="error", chains=False)
        if all(len(part.tree.tokens_N) <= tokens and len(part.tree.run_M) <= slots for part in parts):
            found.append((report.pairs_lost, report.tokens))
    plain, together = (
        split(given, 0, tokens, slots, too_long="error", chains=False, siblings=siblings)[1]
        for siblings in (False, True)
    )
    assert plain.tokens == min(tokens for _, tokens in found)
    assert (together.pairs_lost, together.tokens) == min(found)


def test_a_row_of_alternatives_stays_together():
    """PRM800K's form: alternatives of which one continues. By tokens alone the second set would be cut."""
    nodes = (Node(-1, "aaa", 1.0), *(Node(0, c * 3, 1.0) for c in "bcd"), *(Node(3, c * 3, 1.0) for c in "efg"))
    tree = token_tree(ReasoningTree("p", nodes), LAYOUT)
    lost = [pack([tree], 18, 8, too_long="error", siblings=siblings).report.pairs_lost for siblings in (False, True)]
    assert lost == [2, 0]
