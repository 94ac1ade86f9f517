"""The consensus of two sources on the first error of a chain."""

import collections

import pytest
from hypothesis import given
from hypothesis import strategies as st
from refusing import refused

from jprm.io.jsonl import write_records
from jprm.methods.label.jobs import consensus, first_error, implied, label_consensus
from jprm.tree import record_of, tree_of


def chain(labels, problem="p", **keys):
    return tree_of({"problem": problem, "steps": [f"s{i}" for i in range(len(labels))], "labels": labels} | keys)


@pytest.mark.parametrize(
    ("labels", "first"),
    [([1, 1], -1), ([1, 0.4, 1], 1), ([1, 0.5], -1), ([0, None], 0), ([None, 0], None), ([1, None], None)],
)
def test_first_error(labels, first):
    assert first_error(labels, 0.5) == first


def test_a_chain_is_kept_where_both_agree():
    human = [
        chain([1, -1, 1], "agree", semantics="rating"),
        chain([1, 0, 1], "both right", semantics="rating"),
        chain([1, 1, -1], "disagree", semantics="rating"),
        chain([1, 1, None], "open", semantics="rating"),
        chain([1, 1, 1], "only here", semantics="rating"),
    ]
    values = [
        chain([0.6, 0, 0], "agree", semantics="value", id=7),
        chain([0.6, 0.1, 0.2], "both right", semantics="value"),
        chain([0.6, 0, 0], "disagree", semantics="value"),
        chain([0.6, 1, 1], "open", semantics="value"),
        chain([0.6, 1, 1], "only there", semantics="value"),
        chain([0.6, 0, 0], "agree", semantics="value"),
    ]
    counts = collections.Counter()
    kept = list(consensus(values, human, counts=counts))
    assert [(tree.problem, tree.extra["consensus"]) for tree in kept] == [("agree", 1), ("both right", -1)]
    assert [node.label for node in kept[0].nodes] == [0.6, 0, 0] and kept[0].semantics == "value"
    assert counts == {"kept": 2, "disagree": 1, "unlabelled": 1, "not in the other": 1, "repeated": 1}
    # by another threshold the second has an error
    assert [tree.problem for tree in consensus(values, human, thresholds=(0.15, None))] == ["agree"]


def test_paths_of_trees_and_samples_of_pools_are_chains():
    nodes = [(-1, "s0", 1.0), (0, "s1", 0.0), (0, "t1", 1.0)]
    tree = tree_of({"problem": "p", "nodes": [{"parent": p, "text": t, "label": x} for p, t, x in nodes], "id": "x"})
    samples = [{"steps": ["s0", "s1"], "labels": [1, 0]}, {"steps": ["s0", "t1"], "labels": [0, 0]}]
    (kept,) = consensus([tree], [tree_of({"problem": "p", "samples": samples})])
    assert [(node.parent, node.text, node.label) for node in kept.nodes] == [(-1, "s0", 1.0), (0, "s1", 0.0)]
    assert "id" not in kept.extra


def test_a_source_that_contradicts_itself_agrees_with_nobody():
    assert not list(consensus([chain([1, 0])], [chain([1, 0]), chain([0, 0])]))


def test_gaps_of_a_search_are_filled_where_the_value_follows():
    assert implied([None, 0.5, None, 0.25, 0.0, None]) == [0.5, 0.5, 0.25, 0.25, 0.0, None]
    assert implied([None, 0.0]) == [None, 0.0]  # the error may be either
    (kept,) = consensus([chain([None, 0.5, 0], semantics="value")], [chain([1, 1, 0])])
    assert kept.extra["consensus"] == 2
    assert [node.label for node in kept.nodes] == [None, 0.5, 0]  # what was measured, no more
    assert not list(consensus([chain([1, None, 0], semantics="value")], [chain([1, 1, 0])]))


@given(st.lists(st.sampled_from([0.0, 0.5, 1.0, None]), min_size=1, max_size=6).filter(any))
def test_a_source_agrees_with_itself(labels):
    kept = list(consensus([chain(labels)], [chain(labels)]))
    assert len(kept) == (first_error(labels, 0.5) is not None)


def test_semantics_without_a_usual_threshold_need_one():
    trees = [chain([1.5, -2], semantics="advantage")]
    refused(ValueError, "'advantage'", list, consensus(trees, trees))
    assert [tree.extra["consensus"] for tree in consensus(trees, trees, thresholds=(0, 0))] == [1]


def test_files_without_records_are_refused(tmp_path):
    full, empty = tmp_path / "full.jsonl", tmp_path / "empty.jsonl"
    write_records(full, [record_of(chain([1]))])
    write_records(empty, [])
    for input, other in ((full, empty), (empty, full)):
        refused(ValueError, "empty.jsonl: holds no record", label_consensus, input, [other], tmp_path / "out.jsonl")
