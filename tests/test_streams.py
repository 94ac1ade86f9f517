"""The input pipeline: batches, streams over processes, and what resumes."""

import collections
import dataclasses
import itertools
import json
from collections import Counter

import grain
import jax
import numpy as np
import pytest
from absl import flags
from families import breadth
from refusing import refused
from tiny import Characters, packed_batches, tokenised

from jprm.model.mesh import MeshConfig, make_mesh
from jprm.train.batches import COUNTS, PipelineConfig, Streams, counted_batches, own_streams
from jprm.tree import Node, ReasoningTree


def letters_tree(i):
    """Problem i: a chain of 1 to 4 steps, the first token of which names the problem."""
    nodes = tuple(Node(k - 1, "s" * (1 + (i * 7 + k) % 5), float(k % 2)) for k in range(1 + i % 4))
    return ReasoningTree(chr(1000 + i), nodes)


TREES = [letters_tree(i) for i in range(23)]
COUNT, MICRO = 3, 6
CONFIG = PipelineConfig(("none",), "step", "error", rows=3, tokens=24, slots=8, window=5, seed=7)


def stream(k, count=COUNT, batches_of=packed_batches, **changes):
    changes = dict(rows=2 * MICRO, stream=(k, count)) | changes
    return batches_of(TREES, Characters(), dataclasses.replace(CONFIG, **changes))


def counted(trees, layout, config):
    return counted_batches(tokenised(trees, layout, config), config)


def batches(*indices, count=COUNT):
    return Streams({k: stream(k, count, counted) for k in indices}, count, MICRO)


def blocks(rows, indices):
    """The rows of these streams."""
    block = MICRO // COUNT
    rows_B = [i for k in indices for i in range(k * block, (k + 1) * block)]
    return jax.tree.map(lambda x: x[:, rows_B], rows)


@pytest.mark.parametrize("indices", [[0], [1, 2], [0, 1, 2]])
def test_each_packs_its_blocks_of_the_same_batches(indices):
    """From the start, and where it goes on from the places of all."""
    whole, states, rows = batches(0, 1, 2), [], []
    for _ in range(6):
        states.append(json.loads(json.dumps(whole.get_state())))
        rows.append(next(whole))
    assert rows[0].tokens.shape == (2, MICRO, 24) and len(states[3]["streams"]) == COUNT
    assert not equal(rows[0], rows[3])
    for start in (0, 3):
        again = batches(*indices)
        if start:
            again.set_state(states[start])
        for mine, all_of_it in zip(itertools.islice(again, 3), rows[start:], strict=False):
            assert equal(blocks(mine, indices), blocks(all_of_it, indices))
            others = blocks(mine, [k for k in range(COUNT) if k not in indices])
            assert not any(np.any(x) for x in jax.tree.leaves(others))


def test_one_stream_is_the_plain_pipeline():
    for rows, plain in zip(itertools.islice(batches(0, count=1), 4), stream(0, 1), strict=False):
        assert equal(jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), rows), plain)


def test_streams_share_an_epoch_between_them():
    problems_read = sum((problems(batch) for k in range(COUNT) for batch in stream(k, epochs=1)), start=Counter())
    assert problems_read == {1000 + i: 1 for i in range(23)}


def test_counts_of_packing_are_of_the_rows_that_came_and_resume():
    """Whatever process packed them; of a whole epoch they are the packer's report."""
    whole, epoch = batches(0, 1, 2), [list(stream(k, batches_of=counted, epochs=1)) for k in range(COUNT)]
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


# ---- The pipeline: order only by seed and position, exact resume from anywhere, nothing lost.


def batches_of(config=CONFIG, source=TREES):
    return packed_batches(source, Characters(), config)


def equal(a, b):
    return all(np.array_equal(getattr(a, f.name), getattr(b, f.name)) for f in dataclasses.fields(a))


def problems(rows):
    return collections.Counter(rows.tokens[rows.tokens >= 1000].tolist())


def first_epoch(seed):
    return list(batches_of(dataclasses.replace(CONFIG, epochs=1, seed=seed)))


def test_an_epoch_holds_every_tree_once_and_batches_are_full():
    epoch = first_epoch(7)
    assert all(batch.tokens.shape == (3, 24) and batch.step_end.shape == (3, 8) for batch in epoch)
    assert sum(map(problems, epoch), collections.Counter()) == {1000 + i: 1 for i in range(23)}
    assert sum(batch.weight.sum() for batch in epoch) == sum(len(tree.nodes) for tree in TREES)


def test_rows_carry_over_between_epochs_and_only_the_last_batch_is_filled_up():
    three = list(batches_of(dataclasses.replace(CONFIG, epochs=3)))
    assert sum(map(problems, three), collections.Counter()) == {1000 + i: 3 for i in range(23)}
    assert all((batch.weight.sum(axis=1) > 0).all() for batch in three[:-1])
    endless = list(itertools.islice(batches_of(), len(three) - 1))
    assert all(map(equal, three, endless))


def test_the_order_follows_the_seed_and_changes_with_the_epoch():
    assert all(map(equal, first_epoch(7), first_epoch(7)))
    orders = [[t for batch in first_epoch(seed) for t in batch.tokens[batch.tokens >= 1000]] for seed in (7, 8)]
    assert orders[0] != orders[1]
    two = [t for b in batches_of(dataclasses.replace(CONFIG, epochs=2)) for t in b.tokens[b.tokens >= 1000]]
    assert two[:23] != two[23:]
    # Without shuffling, a window of one tree gives the trees as they come.
    plain = dataclasses.replace(CONFIG, shuffle=False, window=1, epochs=1)
    assert [t for b in batches_of(plain) for t in b.tokens[b.tokens >= 1000]] == list(range(1000, 1023))


@pytest.mark.parametrize("wrap", ["plain", "threads", *breadth(["processes"])])
def test_resume_is_exact_from_every_point(wrap):
    def dataset():
        if wrap == "threads":
            return grain.experimental.ThreadPrefetchIterDataset(batches_of(), prefetch_buffer_size=4)
        if wrap == "processes":
            flags.FLAGS.mark_as_parsed()  # Grain's workers read absl flags, which only absl.app would parse
            return batches_of().mp_prefetch(grain.MultiprocessingOptions(num_workers=1, per_worker_buffer_size=2))
        return batches_of()

    iterator, seen, states = iter(dataset()), [], []
    for _ in range(16):  # past the end of the first epoch
        states.append(json.loads(json.dumps(iterator.get_state())))
        seen.append(next(iterator))
    assert all(map(equal, seen, batches_of()))  # a prefetch changes nothing
    points = range(16) if wrap != "processes" else [7]  # a process takes a second to start
    for point in points:
        resumed = iter(dataset())
        resumed.set_state(states[point])
        again = list(itertools.islice(resumed, 16 - point))
        assert len(again) == 16 - point and all(map(equal, again, seen[point:]))
        resumed.close()
    # Backwards on the same iterator too, as after a rejected step.
    iterator.set_state(states[3])
    assert equal(next(iterator), seen[3])
    iterator.close()
    assert len(json.dumps(states[-1])) < 1000


def test_records_become_trees_one_at_a_time():
    asked = []

    def tree_of(record):
        asked.append(record["i"])
        return letters_tree(record["i"])

    records = grain.MapDataset.source([{"i": i} for i in range(1000)])
    iterator = iter(batches_of(source=records.map(tree_of)))
    direct = iter(batches_of(source=[letters_tree(i) for i in range(1000)]))
    assert equal(next(iterator), next(direct))
    # One batch of 3 rows needs two windows of 5 trees at most; a window more is read ahead.
    assert len(asked) <= 20


def test_what_cannot_be_fed_is_refused():
    refused(ValueError, "source", batches_of, source=[])
    refused(ValueError, "window", dataclasses.replace, CONFIG, window=0)
    refused(ValueError, "31 tokens", next, iter(batches_of(source=[ReasoningTree("p", (Node(-1, "s" * 30),))])))


def test_trees_without_steps_neither_stop_nor_block_the_stream():
    bare = [ReasoningTree("p", ())] * 7
    first = next(iter(batches_of(source=bare)))
    assert first.tokens.shape == (3, 24) and first.weight.sum() == 0
