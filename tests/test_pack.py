"""Packing: every step sees its own chain and counts once, for reward models, policies and siblings."""

import dataclasses
import itertools
import time

import jax
import numpy as np
import pytest
import tiny
from hypothesis import example, given, settings
from hypothesis import strategies as st
from refusing import refused
from tiny import Characters, one_chain_each, path, reasoning_trees

import jprm.pack
from jprm.experiment import TargetConfig
from jprm.methods.data.readers import find
from jprm.objectives import targets
from jprm.pack import pack, split
from jprm.rows import empty_rows
from jprm.token_tree import TokenTree, geometry, token_tree
from jprm.tokenizer import load_tokenizer, native_layout
from jprm.tree import Node, ReasoningTree, tree_of

LAYOUT = Characters()
EQUAL = (Node(-1, "ab", 1.0), Node(-1, "ab", -1.0), Node(0, "c", 1.0), Node(1, "c", 0.0), Node(-1, "ac", -1.0))
TARGETS = jax.jit(targets, static_argnums=1)


def chain_ids(tree, node):
    return tiny.chain_ids(tree, node, LAYOUT)


def longest(trees):
    """Tokens and steps of the longest chain: no row can be smaller without dropping steps."""
    nodes = [(tree, node) for tree in trees for node in range(len(tree.nodes))]
    tokens = max((len(chain_ids(*pair)) for pair in nodes), default=1)
    return tokens, max((len(path(*pair)) for pair in nodes), default=1)


def check(trees, packed, expected):
    """The central invariant, for every slot, and that exactly the `expected` (tree, node) pairs are owned."""
    rows = packed.rows
    index_T = np.arange(rows.tokens.shape[1])
    owned = []
    for b in range(len(rows.tokens)):
        for s in range(rows.step_end.shape[1]):
            if packed.node_BS[b, s] < 0:
                assert rows.weight[b, s] == 0 and packed.tree_BS[b, s] < 0
                continue
            tree, node = int(packed.tree_BS[b, s]), int(packed.node_BS[b, s])
            owned.append((tree, node))
            end = rows.step_end[b, s]
            seen = np.flatnonzero((index_T <= end) & (end < rows.until[b]))  # the rule of `jprm.rows`
            assert rows.tokens[b, seen].tolist() == chain_ids(trees[tree], node)
            assert rows.position[b, seen].tolist() == list(range(len(seen)))
            # The steps before it have slots in the same row: a policy that looks for the first error needs them.
            ends = {int(end) for end in rows.step_end[b]}
            ids = [len(chain_ids(trees[tree], above)) for above in path(trees[tree], node)]
            assert all(int(seen[length - 1]) in ends for length in ids)
    assert sorted(owned) == sorted(expected)


def every_node(trees):
    return [(i, node) for i, tree in enumerate(trees) for node in range(len(tree.nodes))]


def smallest(trees):
    """Tokens and slots of the smallest row that holds every chain and every problem."""
    tokens, slots = longest(trees)
    return max([tokens, *(len(tree.problem) + 1 for tree in trees)]), slots


@settings(max_examples=150, deadline=None)
@given(st.lists(reasoning_trees(), max_size=4), st.integers(0, 12), st.integers(0, 6))
@example([ReasoningTree("p", EQUAL)], 0, 2)  # equal steps end at one token and keep their own slots
def test_every_step_sees_its_own_chain_and_counts_once_whatever_the_row(trees, spare_tokens, spare_slots):
    tokens, slots = smallest(trees)
    tokens, slots = tokens + spare_tokens, slots + spare_slots
    packed = pack([token_tree(tree, LAYOUT) for tree in trees], tokens, slots, too_long="error")
    assert packed.rows.tokens.shape[1] == tokens and packed.rows.step_end.shape[1] == slots
    check(trees, packed, every_node(trees))

    rows, report = packed.rows, packed.report
    used_BS = rows.step_end > 0
    assert (np.diff(np.where(used_BS, rows.step_end, tokens), axis=1) >= 0).all()
    owned_BS = packed.node_BS >= 0
    for b, s in zip(*np.nonzero(owned_BS), strict=True):
        node = trees[packed.tree_BS[b, s]].nodes[packed.node_BS[b, s]]
        assert rows.label[b, s] == (1.0 if node.label is None else node.label)
        assert rows.weight[b, s] == (node.label is not None)
    nodes = [(tree, i) for tree in trees for i in range(len(tree.nodes))]
    parents = {(id(tree), node.parent) for tree in trees for node in tree.nodes}
    assert report.leaf_tokens == sum(len(chain_ids(t, i)) for t, i in nodes if (id(t), i) not in parents)
    assert report.chain_tokens == sum(len(chain_ids(t, i)) for t, i in nodes if t.nodes[i].label is not None)
    assert (report.steps, report.truncated) == (len(nodes), 0)
    assert report.labelled == (rows.weight > 0).sum()
    distinct = {(i, tuple(chain_ids(t, n)[:k])) for i, t in enumerate(trees) for n in range(len(t.nodes))
                for k in range(1, len(chain_ids(t, n)) + 1)}  # fmt: skip
    assert report.tokens - report.repeated == len(distinct)  # fully shared: a token for every distinct prefix
    assert report.cells == rows.tokens.size


def owned(packed, value_BS):
    """The values of the slots that own a step, by tree and node."""
    return {
        (int(t), int(n)): float(value)
        for t, n, value in zip(packed.tree_BS.flat, packed.node_BS.flat, np.asarray(value_BS).flat, strict=True)
        if n >= 0
    }


@settings(max_examples=150, deadline=None)
@given(st.lists(reasoning_trees(), max_size=4), st.integers(0, 12), st.integers(0, 6))
def test_rows_of_chains_own_every_step_once(trees, spare_tokens, spare_slots):
    tokens, slots = smallest(trees)
    tokens, slots = tokens + spare_tokens, slots + spare_slots
    token_trees = [token_tree(tree, LAYOUT) for tree in trees]
    packed = pack(token_trees, tokens, slots, too_long="error", chains=True)
    check(trees, packed, every_node(trees))
    rows, report = packed.rows, packed.report
    assert one_chain_each(rows).all() and rows.step_end.shape[1] == slots
    leaves = {tuple(chain_ids(tree, node)) for tree in trees for node in range(len(tree.nodes))}
    alone = [ids for ids in leaves if not any(ids == other[: len(ids)] for other in leaves - {ids})]
    chains_read = [tuple(rows.tokens[b, : rows.until[b, 0]].tolist()) for b in range(len(rows.tokens))]
    # And more where equal steps need the slots of several rows, or trees are equal.
    assert set(chains_read) >= set(alone)
    whole = pack(token_trees, tokens, slots, too_long="error").report
    laid_out = ("rows", "cells", "tokens", "repeated", "pairs_lost", "problem_pairs_lost")
    assert report == dataclasses.replace(whole, **{name: getattr(report, name) for name in laid_out})
    assert report.tokens == sum(map(len, chains_read))
    assert report.cells == rows.tokens.size
    assert report.tokens - report.repeated == whole.tokens - whole.repeated


@pytest.mark.parametrize("after_error", ["keep", "mask"])
@settings(max_examples=60, deadline=None)
@given(trees=st.lists(reasoning_trees(), min_size=1, max_size=3))
def test_parts_have_the_targets_of_their_trees(after_error, trees):
    """With slots for all steps of a chain, those of equal alternatives too, among which an error masks what follows."""
    policy = TargetConfig("rating", neutral="negative", after_error=after_error)
    token_trees = [token_tree(tree, LAYOUT) for tree in trees]
    targets = []
    for tokens, chains in [(128, False), (smallest(trees)[0], False), (128, True)]:
        packed = pack(token_trees, tokens, 64, too_long="error", chains=chains)
        count, rows = len(packed.rows.tokens), empty_rows(42, 128, 64)
        for whole, part in zip(jax.tree.leaves(rows), jax.tree.leaves(packed.rows), strict=True):
            whole[:count, : part.shape[1]] = part
        target_BS, weight_BS = (np.asarray(x)[:count] for x in TARGETS(rows, policy))
        targets.append((owned(packed, target_BS), owned(packed, weight_BS), weight_BS.sum()))
    assert targets[0] == targets[1] == targets[2]


@settings(max_examples=100, deadline=None)
@given(st.lists(reasoning_trees(), min_size=1, max_size=3), st.integers(5, 16), st.integers(1, 4), st.booleans())
def test_truncate_drops_exactly_what_cannot_fit_and_counts_it(trees, tokens, slots, chains):
    packed = pack([token_tree(tree, LAYOUT) for tree in trees], tokens, slots, too_long="truncate", chains=chains)
    fits = [
        (i, node)
        for i, node in every_node(trees)
        if len(chain_ids(trees[i], node)) <= tokens and len(path(trees[i], node)) <= slots
    ]
    check(trees, packed, fits)
    dropped = set(every_node(trees)) - set(fits)
    assert packed.report.truncated == len(dropped)
    assert packed.report.truncated_labelled == sum(trees[i].nodes[node].label is not None for i, node in dropped)


@settings(max_examples=100, deadline=None)
@given(reasoning_trees(most=30))
def test_geometry_equals_parent_pointers(tree):
    tokens = token_tree(tree, LAYOUT)
    shape = geometry(tokens.length_R, tokens.parent_R)
    run_N = np.repeat(np.arange(len(tokens.length_R)), tokens.length_R)
    first_R = np.cumsum(tokens.length_R) - tokens.length_R

    def above(run):
        while run >= 0:
            yield run
            run = tokens.parent_R[run]

    for n, run in enumerate(run_N):
        depth = sum(tokens.length_R[r] for r in above(run)) - tokens.length_R[run]
        assert shape.position_N[n] == depth + n - first_R[run]
        assert shape.until_N[n] == 1 + max(m for m, other in enumerate(run_N) if run in above(other))


def test_geometry_takes_a_forest():
    shape = geometry(np.array([2, 1, 3, 1]), np.array([-1, 0, -1, 2]))
    assert shape.until_N.tolist() == [3, 3, 3, 7, 7, 7, 7]
    assert shape.position_N.tolist() == [0, 1, 2, 0, 1, 2, 3]


def test_padding_sees_only_itself():
    packed = pack([token_tree(ReasoningTree("p", (Node(-1, "a"),)), LAYOUT)], 6, 3, too_long="error")
    assert packed.rows.until.tolist() == [[2, 2, 3, 4, 5, 6]]
    assert packed.rows.tokens.tolist() == [[ord("p"), ord("a"), 0, 0, 0, 0]]
    assert packed.rows.position.tolist() == [[0, 1, 0, 0, 0, 0]]
    assert packed.rows.step_end.tolist() == [[1, 0, 0]]


def test_repeated_steps_keep_their_label_and_weigh_nothing():
    nodes = (Node(-1, "abc", -1.0), *(Node(0, c * 4, 1.0) for c in "vwxyz"))
    packed = pack([token_tree(ReasoningTree("p", nodes), LAYOUT)], 12, 4, too_long="error")
    rows = packed.rows
    assert rows.tokens.shape[0] == 3 and packed.report.repeated == 8
    assert rows.label[:, 0].tolist() == [-1, -1, -1]
    assert sorted(rows.weight[:, 0].tolist()) == [0, 0, 1]
    assert rows.weight.sum() == 6


def test_supervise_outcome_takes_the_chain_and_ignores_step_labels():
    nodes = (Node(-1, "a", -1.0), Node(0, "b", 1.0, correct=True), Node(0, "c", 1.0, correct=False))
    packed = pack([token_tree(ReasoningTree("p", nodes), LAYOUT, "outcome")], 8, 3, too_long="error")
    order = np.argsort(packed.node_BS[0])
    assert packed.rows.label[0, order].tolist() == [1, 1, 0]
    assert packed.rows.weight[0, order].tolist() == [0, 1, 1]
    refused(ValueError, "outcome_steps", token_tree, ReasoningTree("p", nodes), LAYOUT, "both")


def test_what_cannot_be_packed_is_refused_by_name():
    long = token_tree(ReasoningTree("problem", (Node(-1, "abcdef"),)), LAYOUT)
    short = token_tree(ReasoningTree("p", (Node(-1, "a"),)), LAYOUT)
    refused(ValueError, "tree 1.*13.*10", pack, [short, long], 10, 2, too_long="error")
    for policy in ("error", "truncate"):
        refused(ValueError, "tree 0", pack, [long], 7, 2, too_long=policy)
    refused(ValueError, "node 1", token_tree, ReasoningTree("p", (Node(-1, "a"), Node(0, ""))), LAYOUT)
    refused(ValueError, "truncate", pack, [short], 10, 2, too_long="drop")
    refused(ValueError, "positive", pack, [short], 0, 2, too_long="error")


def test_a_tree_without_steps_takes_no_room():
    packed = pack([token_tree(ReasoningTree("a problem longer than the row", ()), LAYOUT)], 4, 2, too_long="error")
    assert packed.rows.tokens.shape == (0, 4) and packed.report.trees == 1 and packed.report.cells == 0
    assert pack([], 4, 2, too_long="error").rows.tokens.shape == (0, 4)


def test_packing_is_deterministic_and_fills_rows():
    rng = np.random.default_rng(0)
    words = ["".join(chr(c) for c in rng.integers(97, 123, size=n)) for n in rng.integers(1, 40, size=300)]
    trees = [token_tree(ReasoningTree("p", (Node(-1, word, 1.0),)), LAYOUT) for word in words]
    first, second = (pack(trees, 64, 32, too_long="error") for _ in range(2))
    for field in dataclasses.fields(first.rows):
        assert np.array_equal(getattr(first.rows, field.name), getattr(second.rows, field.name))
    assert np.array_equal(first.node_BS, second.node_BS) and first.report == second.report
    assert first.report.rows == -(-first.report.tokens // 64)  # best fit decreasing reaches the lower bound here
    assert "300 trees, 300 steps (300 labelled)" in str(first.report)


SHAPES = {  # the parent and the text of step i
    "deep": (lambda i: i - 1, lambda i: "a"),
    "wide": (lambda i: -1, lambda i: "x" + chr(200 + i)),
    "equal": (lambda i: -1, lambda i: "a"),
    "comb": (lambda i: i - 1 if i % 2 else max(i - 2, -1), lambda i: "ab"[i % 2]),  # alternatives, one of which goes on
}


@pytest.mark.parametrize("shape", SHAPES)
def test_a_tree_of_100_000_steps_takes_seconds(shape):
    count, (parent, text) = 100_000, SHAPES[shape]
    nodes = tuple(Node(parent(i), text(i), 1.0) for i in range(count))
    start = time.process_time()
    tree = token_tree(ReasoningTree("p", nodes), LAYOUT)
    # A chain cannot be split, so the nested trees get rows that hold them.
    tokens, slots = (count + 8, count + 8) if shape in ("deep", "comb") else (1024, 128)
    packed = pack([tree], tokens, slots, too_long="error")
    assert time.process_time() - start < 300  # it takes one; a quadratic step anywhere would take hours
    assert np.array_equal(np.sort(packed.node_BS[packed.node_BS >= 0]), np.arange(count))
    assert packed.report.steps == count and packed.rows.weight.sum() == count


@pytest.mark.breadth
def test_prm800k_phase_1_is_laid_out_in_17_times_fewer_tokens(shared_data, smollm2_gguf):
    layout, path = native_layout(load_tokenizer(smollm2_gguf)), shared_data / "prm800k" / "phase1_train.jsonl"
    read = find("prm800k").read(path, human_written="unlabelled", control_questions="drop")
    trees = [token_tree(tree_of(record), layout) for _, record in read]

    long = pack(trees, 8192, 512, too_long="error").report
    assert (long.trees, long.labelled, long.truncated) == (942, 48_672, 0)
    assert long.tokens <= 1_750_000 and long.padding_share < 0.05
    assert long.chain_tokens > 17 * long.tokens

    # Prefixes of about half a row are inherent in rows that chains fill; what splitting repeats must stay near that.
    short = pack(trees, 1024, 64, too_long="truncate").report
    assert short.repeated < 1_250_000 and short.padding_share < 0.05
    assert short.truncated == 8_308


# ---- The packer for policies against brute force: every next token of every chain is learned once, whatever the row.


POLICY = Characters(end=0)


def tree_with(*nodes):
    return ReasoningTree("p", tuple(Node(parent, text) for parent, text in nodes))


# Ends of chains lie between the parts of this one in rows of many lengths.
BUSHY = tree_with(
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


def check_policy(tree, tokens, slots, chains):
    """No part exceeds a row or lacks a parent, and the slots that own something are `next_tokens`, each once."""
    whole, wanted = token_tree(tree, POLICY, "token"), next_tokens(tree)
    for part in split(whole, 0, tokens, slots, too_long="error", chains=chains)[0]:
        assert len(part.tree.tokens_N) <= tokens and len(part.tree.run_M) <= slots
        assert part.tree.parent_R[0] == -1
        assert all(0 <= parent < run for run, parent in enumerate(part.tree.parent_R[1:], 1))
    packed = pack([whole], tokens, slots, too_long="error", chains=chains)
    rows, report, slots_read = packed.rows, packed.report, []
    assert not chains or one_chain_each(rows).all()
    assert np.array_equal(packed.node_BS >= 0, rows.weight > 0)
    for row, slot in zip(*np.nonzero(rows.weight), strict=True):
        end = rows.step_end[row, slot]
        seen = (np.arange(tokens) <= end) & (rows.until[row] > end)
        assert rows.position[row, seen].tolist() == list(range(seen.sum()))
        slots_read.append((tuple(rows.tokens[row, seen].tolist()), int(rows.label[row, slot])))
    assert len(slots_read) == len(wanted) and set(slots_read) == wanted
    assert report.tokens <= report.cells and report.repeated >= 0
    read = {ids[:i] for ids, _ in wanted for i in range(1, len(ids) + 1)}
    assert len(read) <= report.tokens - report.repeated <= len(whole.tokens_N)  # the ends may be missing, no more
    return report


def smallest_of(tree):
    """Tokens and slots of the smallest row that holds every chain; its end needs a slot and no room."""
    tokens, _ = smallest([tree])
    return tokens, tokens - len(tree.problem) + 1


@settings(max_examples=200, deadline=None)
@given(reasoning_trees(), st.integers(0, 24), st.integers(0, 12) | st.just(100), st.booleans())
@example(tree_with((-1, "a"), (-1, "aaa")), 0, 0, False)
def test_a_policy_learns_every_next_token_once(tree, spare_tokens, spare_slots, chains):
    tokens, slots = smallest_of(tree)
    check_policy(tree, tokens + spare_tokens, slots + spare_slots, chains)


@pytest.mark.parametrize("chains", [False, True])
@pytest.mark.parametrize("spare_slots", [0, 1, 5, 100])
def test_ends_of_chains_between_parts_take_no_room(spare_slots, chains):
    tokens, slots = smallest_of(BUSHY)
    whole = len(token_tree(BUSHY, POLICY, "token").tokens_N)
    for row in range(tokens, whole + 3):
        check_policy(BUSHY, row, slots + spare_slots, chains)


def test_a_part_begins_with_the_problem_and_not_with_the_end_of_another_chain():
    tree = token_tree(tree_with((-1, "a"), (-1, "b")), POLICY, "token")
    for tokens, padding in [(2, []), (3, [0])]:
        packed = pack([tree], tokens, 3, too_long="error")
        assert packed.rows.tokens.tolist() == [[*map(ord, "pa"), *padding], [*map(ord, "pb"), *padding]]
        assert (packed.report.tokens, packed.report.repeated, packed.report.steps) == (4, 1, 4)


def test_a_tree_that_fits_keeps_the_ends_of_its_chains():
    whole = len(token_tree(BUSHY, POLICY, "token").tokens_N)
    assert check_policy(BUSHY, whole, 100, False).tokens == whole > check_policy(BUSHY, whole - 1, 100, False).tokens


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


# ---- Where a tree is cut, and the pairs of alternatives that a cut separates.


def test_pairs_of_alternatives_that_a_split_separates_are_counted():
    nodes = (*(Node(-1, c * 4, 1.0) for c in "vwx"), Node(-1, "yyyy"), Node(0, "a", 1.0), Node(0, "b", 1.0))
    tree = token_tree(ReasoningTree("p", nodes), LAYOUT)
    together = pack([tree], 64, 8, too_long="error").report
    assert together.pairs_lost == together.problem_pairs_lost == 0
    alone = pack([tree], 64, 8, too_long="error", chains=True).report
    assert alone.pairs_lost == 3 + 1 and "4 pairs of labelled alternatives" in str(alone)
    assert alone.problem_pairs_lost == 5 * 4 // 2 - 1  # all of five labelled steps, but `v` and the `a` that follows it


@settings(max_examples=40, deadline=None)
@given(reasoning_trees(most=8), st.integers(0, 6), st.integers(0, 3))
@example(ReasoningTree("p", (Node(-1, "b"), Node(-1, "bb"), Node(0, "a"), Node(1, "a"))), 0, 0)  # bb repeats no step
def test_cuts_are_the_best_of_all(tree, spare_tokens, spare_slots):
    """Of all ways to cut: the fewest tokens, and with `siblings` first the fewest pairs lost."""
    tokens, slots = smallest([tree])
    tokens, slots = tokens + spare_tokens, slots + spare_slots
    whole = token_tree(tree, LAYOUT)
    count = len(whole.run_M)
    kept = []
    for inner in itertools.product((False, True), repeat=max(count - 1, 0)):
        cuts = [0, *(i + 1 for i, cut in enumerate(inner) if cut), count]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(jprm.pack, "_cuts", lambda *_, cuts=cuts: cuts)
            parts, report = split(whole, 0, tokens, slots, too_long="error", chains=False)
        if all(len(part.tree.tokens_N) <= tokens and len(part.tree.run_M) <= slots for part in parts):
            kept.append((report.pairs_lost, report.tokens))
    plain, together = (
        split(whole, 0, tokens, slots, too_long="error", chains=False, siblings=siblings)[1]
        for siblings in (False, True)
    )
    assert plain.tokens == min(tokens for _, tokens in kept)
    assert (together.pairs_lost, together.tokens) == min(kept)


def test_a_row_of_alternatives_stays_together():
    """PRM800K's form: alternatives of which one continues. By tokens alone the second set would be cut."""
    nodes = (Node(-1, "aaa", 1.0), *(Node(0, c * 3, 1.0) for c in "bcd"), *(Node(3, c * 3, 1.0) for c in "efg"))
    tree = token_tree(ReasoningTree("p", nodes), LAYOUT)
    lost = [pack([tree], 18, 8, too_long="error", siblings=siblings).report.pairs_lost for siblings in (False, True)]
    assert lost == [2, 0]
