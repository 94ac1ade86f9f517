"""Streams: a batch depends on their number, not on who packs them; any process resumes all of them."""

import dataclasses
import itertools
import json
from collections import Counter

import jax
import numpy as np
import pytest
from test_pipeline import CONFIG, equal, letters_tree, problems
from tiny import Characters, packed_batches, tokenised

from jprm.model.mesh import MeshConfig, make_mesh
from jprm.train.batches import COUNTS, Streams, counted_batches, own_streams

TREES = [letters_tree(i) for i in range(23)]
COUNT, MICRO = 3, 6


def stream(k, count=COUNT, made=packed_batches, **changes):
    changes = dict(rows=2 * MICRO, stream=(k, count)) | changes
    return made(TREES, Characters(), dataclasses.replace(CONFIG, **changes))


def counted(trees, layout, config):
    return counted_batches(tokenised(trees, layout, config), config)


def batches(*own, count=COUNT):
    return Streams({k: stream(k, count, counted) for k in own}, count, MICRO)


def blocks(rows, own):
    """The rows of these streams."""
    block = MICRO // COUNT
    some = [i for k in own for i in range(k * block, (k + 1) * block)]
    return jax.tree.map(lambda x: x[:, some], rows)


@pytest.mark.parametrize("own", [[0], [1, 2], [0, 1, 2]])
def test_each_packs_its_blocks_of_the_same_batches(own):
    """From the start, and where it goes on from the places of all."""
    whole, states, rows = batches(0, 1, 2), [], []
    for _ in range(6):
        states.append(json.loads(json.dumps(whole.get_state())))
        rows.append(next(whole))
    assert rows[0].tokens.shape == (2, MICRO, 24) and len(states[3]["streams"]) == COUNT
    assert not equal(rows[0], rows[3])
    for start in (0, 3):
        again = batches(*own)
        if start:
            again.set_state(states[start])
        for mine, all_of_it in zip(itertools.islice(again, 3), rows[start:], strict=False):
            assert equal(blocks(mine, own), blocks(all_of_it, own))
            others = blocks(mine, [k for k in range(COUNT) if k not in own])
            assert not any(np.any(x) for x in jax.tree.leaves(others))


def test_one_stream_is_the_plain_pipeline():
    for rows, plain in zip(itertools.islice(batches(0, count=1), 4), stream(0, 1), strict=False):
        assert equal(jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), rows), plain)


def test_streams_share_an_epoch_between_them():
    found = sum((problems(batch) for k in range(COUNT) for batch in stream(k, epochs=1)), start=Counter())
    assert found == {1000 + i: 1 for i in range(23)}


def test_counts_of_packing_are_of_the_rows_that_came_and_resume():
    """Whatever process packed them; of a whole epoch they are the packer's report."""
    whole, epoch = batches(0, 1, 2), [list(stream(k, made=counted, epochs=1)) for k in range(COUNT)]
    for _ in itertools.islice(whole, 3):
        pass
    assert sum(batch[1][:, COUNTS.index("trees")].sum() for stream in epoch for batch in stream) == len(TREES)
    first = sum(batch[1] for stream in epoch for batch in stream[:1]).sum(axis=0)
    state = json.loads(json.dumps(whole.get_state()))
    again = batches(0, 1, 2)
    assert whole.report.trees >= first[COUNTS.index("trees")] > again.report.trees == 0
    again.set_state(state)
    assert again.report == whole.report and again.get_state() == state
    next(whole), next(again)
    assert again.report == whole.report
    again.set_state({"streams": state["streams"]})  # of a run that counted nothing
    assert again.report == whole.report


@pytest.mark.parametrize(
    ("sizes", "count", "mine"),
    [((8, 1, 1), 8, range(8)), ((2, 2, 2), 2, range(2)), ((1, 1, 8), 4, range(4)), ((1, 2, 1, 4), 1, range(1))],
)
def test_one_process_has_all_streams(sizes, count, mine):
    assert own_streams(make_mesh(MeshConfig(*sizes)), 8, count) == list(mine)


class Place:
    """The rows of some devices."""

    def __init__(self, *slices):
        self.slices = slices

    def addressable_devices_indices_map(self, shape):
        return {i: (piece,) for i, piece in enumerate(self.slices)}


@pytest.mark.parametrize(
    ("slices", "count", "mine"),
    [
        ((slice(0, 2), slice(2, 4)), 4, [0, 1]),  # two devices of eight rows' first half
        ((slice(6, 7), slice(7, 8)), 4, [3]),  # half of a stream's block each
        ((slice(2, 6),), 2, [0, 1]),  # a device's rows lie across two blocks
        ((slice(None, None),), 8, list(range(8))),
    ],
)
def test_a_process_has_the_streams_that_reach_its_devices(monkeypatch, slices, count, mine):
    monkeypatch.setattr("jprm.train.batches.NamedSharding", lambda mesh, spec: Place(*slices))
    assert own_streams(jax.sharding.get_mesh(), 8, count) == mine
