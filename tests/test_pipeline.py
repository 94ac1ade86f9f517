"""The pipeline: order only by seed and position, exact resume from anywhere, nothing lost."""

import collections
import dataclasses
import itertools
import json

import grain
import numpy as np
import pytest
from absl import flags
from refusing import refused
from tiny import Characters, packed_batches

from jprm.train.batches import PipelineConfig
from jprm.tree import Node, ReasoningTree


def letters_tree(i):
    """Problem i: a chain of 1 to 4 steps, the first token of which names the problem."""
    nodes = tuple(Node(k - 1, "s" * (1 + (i * 7 + k) % 5), float(k % 2)) for k in range(1 + i % 4))
    return ReasoningTree(chr(1000 + i), nodes)


TREES = [letters_tree(i) for i in range(23)]
CONFIG = PipelineConfig(("none",), "step", "error", rows=3, tokens=24, slots=8, window=5, seed=7)


def batches(config=CONFIG, source=TREES):
    return packed_batches(source, Characters(), config)


def equal(a, b):
    return all(np.array_equal(getattr(a, f.name), getattr(b, f.name)) for f in dataclasses.fields(a))


def problems(rows):
    return collections.Counter(rows.tokens[rows.tokens >= 1000].tolist())


def first_epoch(seed):
    return list(batches(dataclasses.replace(CONFIG, epochs=1, seed=seed)))


def test_an_epoch_holds_every_tree_once_and_batches_are_full():
    epoch = first_epoch(7)
    assert all(batch.tokens.shape == (3, 24) and batch.step_end.shape == (3, 8) for batch in epoch)
    assert sum(map(problems, epoch), collections.Counter()) == {1000 + i: 1 for i in range(23)}
    assert sum(batch.weight.sum() for batch in epoch) == sum(len(tree.nodes) for tree in TREES)


def test_rows_carry_over_between_epochs_and_only_the_last_batch_is_filled_up():
    three = list(batches(dataclasses.replace(CONFIG, epochs=3)))
    assert sum(map(problems, three), collections.Counter()) == {1000 + i: 3 for i in range(23)}
    assert all((batch.weight.sum(axis=1) > 0).all() for batch in three[:-1])
    endless = list(itertools.islice(batches(), len(three) - 1))
    assert all(map(equal, three, endless))


def test_the_order_follows_the_seed_and_changes_with_the_epoch():
    assert all(map(equal, first_epoch(7), first_epoch(7)))
    orders = [[t for batch in first_epoch(seed) for t in batch.tokens[batch.tokens >= 1000]] for seed in (7, 8)]
    assert orders[0] != orders[1]
    two = [t for b in batches(dataclasses.replace(CONFIG, epochs=2)) for t in b.tokens[b.tokens >= 1000]]
    assert two[:23] != two[23:]
    # Without shuffling, a window of one tree gives the trees as they come.
    plain = dataclasses.replace(CONFIG, shuffle=False, window=1, epochs=1)
    assert [t for b in batches(plain) for t in b.tokens[b.tokens >= 1000]] == list(range(1000, 1023))


@pytest.mark.parametrize("wrap", ["plain", "threads", "processes"])
def test_resume_is_exact_from_every_point(wrap):
    def dataset():
        if wrap == "threads":
            return grain.experimental.ThreadPrefetchIterDataset(batches(), prefetch_buffer_size=4)
        if wrap == "processes":
            flags.FLAGS.mark_as_parsed()  # Grain's workers read absl flags, which only absl.app would parse
            return batches().mp_prefetch(grain.MultiprocessingOptions(num_workers=1, per_worker_buffer_size=2))
        return batches()

    iterator, seen, states = iter(dataset()), [], []
    for _ in range(16):  # past the end of the first epoch
        states.append(json.loads(json.dumps(iterator.get_state())))
        seen.append(next(iterator))
    assert all(map(equal, seen, batches()))  # a prefetch changes nothing
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
    iterator = iter(batches(source=records.map(tree_of)))
    direct = iter(batches(source=[letters_tree(i) for i in range(1000)]))
    assert equal(next(iterator), next(direct))
    # One batch of 3 rows needs two windows of 5 trees at most; a window more is read ahead.
    assert len(asked) <= 20


def test_what_cannot_be_fed_is_refused():
    refused(ValueError, "source", batches, source=[])
    refused(ValueError, "window", dataclasses.replace, CONFIG, window=0)
    refused(ValueError, "31 tokens", next, iter(batches(source=[ReasoningTree("p", (Node(-1, "s" * 30),))])))


def test_trees_without_steps_neither_stop_nor_block_the_stream():
    bare = [ReasoningTree("p", ())] * 7
    first = next(iter(batches(source=bare)))
    assert first.tokens.shape == (3, 24) and first.weight.sum() == 0
