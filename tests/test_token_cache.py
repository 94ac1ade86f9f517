"""Token trees on disk: the same batches bit for bit, written once, whole after a kill."""

import dataclasses
import subprocess
import sys
import threading
import time
from pathlib import Path

import jax
import numpy as np
import pytest
import tiny_run as tiny
from refusing import refused

from jprm.io import folders
from jprm.io.jsonl import write_records
from jprm.methods.data.stored_trees import TokenTrees, cached_trees, write_trees
from jprm.token_tree import TokenTree, token_tree
from jprm.tokenizer import load_tokenizer, native_layout
from jprm.train.batches import batches_of
from jprm.tree import tree_of

RECORDS = tiny.trees(40, seed=3)
PLAIN = {"extras": []}


@pytest.fixture(scope="module")
def layout(tiny_run):
    return native_layout(load_tokenizer(tiny_run.folder))


def equal(first: TokenTree, second: TokenTree):
    for name in (field.name for field in dataclasses.fields(TokenTree)):
        x, y = getattr(first, name), getattr(second, name)
        np.testing.assert_equal(x, y, err_msg=name)
        assert getattr(x, "dtype", None) == getattr(y, "dtype", None), name
    assert list(first.extras) == list(second.extras)


@pytest.mark.parametrize("supervise", ["step", "outcome_tokens"])
def test_trees_come_back_as_they_were(layout, tmp_path, supervise):
    trees = [token_tree(tree_of(record), layout, supervise) for record in RECORDS]
    trees[3] = dataclasses.replace(trees[3], name="ein Umlaut: ä")
    if supervise == "step":
        trees = [dataclasses.replace(t, extras={"b": t.label_M / 3, "a": t.weight_M}) for t in trees]
    write_trees(tmp_path, trees, {"extras": list(trees[0].extras)})
    stored = TokenTrees(tmp_path)
    assert len(stored) == len(trees)
    for tree, other in zip(trees, stored, strict=True):
        equal(tree, other)
    equal(stored[2:9:3][1], trees[5])


def batches(files, layout, cache, count=1, **options):
    experiment = tiny.experiment(Path(files[0]).parent)
    config = dataclasses.replace(experiment.data, cache=str(cache), **options)
    experiment = dataclasses.replace(experiment, data=config)
    batches = iter(batches_of(experiment, files, layout))
    return batches, [next(batches) for _ in range(count)]


def test_batches_are_the_same_bit_for_bit_over_epochs_and_resumed(layout, tmp_path):
    for i in range(2):
        write_records(tmp_path / f"{i}.jsonl", RECORDS[i::2])
    files = [str(tmp_path / f"{i}.jsonl") for i in range(2)]
    _, expected = batches(files, layout, "", 12, window=8)
    resumed, rows = batches(files, layout, tmp_path / "cache", 12, window=8)
    jax.tree.map(np.testing.assert_array_equal, rows, expected)
    again, _ = batches(files, layout, tmp_path / "cache", window=8)
    again.set_state(resumed.get_state())
    jax.tree.map(np.testing.assert_array_equal, next(again), next(resumed))


def test_what_the_trees_depend_on_makes_other_trees(layout, tmp_path, monkeypatch):
    path, cache = tmp_path / "a.jsonl", tmp_path / "cache"
    write_records(path, RECORDS[:8])
    batches([str(path)], layout, cache)
    assert len(list(cache.iterdir())) == 1
    with monkeypatch.context() as patch:  # nothing is tokenised again
        patch.setattr("jprm.methods.data.stored_trees.write_trees", None)
        batches([str(path)], layout, cache, tokens=512, seed=7)
    batches([str(path)], layout, cache, supervise="outcome")
    assert len(list(cache.iterdir())) == 2
    write_records(path, RECORDS[8:16])
    batches([str(path)], layout, cache)
    assert len(list(cache.iterdir())) == 3


def test_a_bad_record_leaves_no_trees(layout, tmp_path):
    def trees():
        yield token_tree(tree_of(RECORDS[0]), layout)
        raise ValueError("record 2 is bad")

    refused(ValueError, "record 2", cached_trees, tmp_path, trees(), 2, PLAIN)
    assert list(tmp_path.iterdir()) == []


WRITE = """
import sys
from jprm.methods.data.stored_trees import cached_trees
from jprm.token_tree import merged
def trees():
    print("writing", flush=True)
    sys.stdin.readline()
    yield merged("theirs", [1, 2], [[3]])
cached_trees(sys.argv[1], trees(), 1, {"of": "both", "extras": []})
"""


@pytest.mark.parametrize("how", ["killed", "whole"])
def test_a_second_run_waits_for_the_first_or_takes_its_place(layout, tmp_path, monkeypatch, how):
    monkeypatch.setattr(folders, "WAIT_S", 0.01)
    command = [sys.executable, "-c", WRITE, str(tmp_path)]
    other = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert other.stdout.readline() == "writing\n"
    token_trees = [token_tree(tree_of(record), layout) for record in RECORDS[:3]]
    taken = []
    thread = threading.Thread(
        target=lambda: taken.append(cached_trees(tmp_path, token_trees, 3, {"of": "both"} | PLAIN))
    )
    thread.start()
    time.sleep(0.1)
    assert not taken, "it did not wait"
    other.kill() if how == "killed" else other.communicate("\n")
    thread.join(60)
    other.wait()
    assert len(taken[0]) == (3 if how == "killed" else 1)


def test_trees_that_another_run_wrote_meanwhile_are_taken(layout, tmp_path):
    """It ended between this one's look and its lock, so that this one's folder cannot have the name."""
    (tree,) = (token_tree(tree_of(record), layout) for record in RECORDS[:1])

    def trees():
        cached_trees(tmp_path / "other", [tree, tree], 2, PLAIN)
        (place,) = (tmp_path / "other").iterdir()
        place.rename(tmp_path / "cache" / place.name)
        yield tree

    assert len(cached_trees(tmp_path / "cache", trees(), 1, PLAIN)) == 2
    assert len(list((tmp_path / "cache").iterdir())) == 1
