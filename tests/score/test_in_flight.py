"""Scoring with two batches in flight: the order of work, what the device waited, and the same bits as one by one."""

import subprocess
import sys
import threading

import numpy as np
import pytest
from test_scorer import short_rows  # noqa: F401  (autouse)
from tiny import compiling
from tiny_run import chains, pool_of, trees

from jprm.rows import empty_rows
from jprm.score import scorer
from jprm.score.scorer import BATCHES, Speed, ahead, in_flight
from jprm.tree import tree_of


def test_the_next_batch_is_dispatched_before_results_are_fetched():
    """A device that ends a batch only when the next one is there would never end with one batch in flight."""
    dispatched, done, most = [threading.Event() for _ in range(5)], [], []

    def dispatch(item):
        dispatched[item - 1].set()  # the first sets the last's, which has no next one
        most.append(item + 1 - len(done))

        def fetch():
            assert dispatched[item].wait(300), f"batch {item + 1} was not dispatched"
            return 10 * item

        return fetch

    for item, result in in_flight(range(5), dispatch, Speed()):
        assert result == 10 * item
        done.append(item)
    assert done == [*range(5)] and max(most) == BATCHES == 2


def test_two_threads_run_two_batches_at_once_in_order():
    both = threading.Barrier(2, timeout=300)  # broken if a batch runs alone

    def dispatch(item):
        return lambda: both.wait() * 0 + item

    assert [*in_flight(range(6), dispatch, Speed(), threads=2)] == [(item, item) for item in range(6)]


class Machine:
    """A host and a device with a clock each: making a batch takes `host` seconds, computing it `device`."""

    def __init__(self, host, device):
        self.host, self.device = host, device
        self.now = self.free = 0.0

    def clock(self):
        return self.free if threading.current_thread().name.startswith("jprm fetching") else self.now

    def items(self, count):
        for item in range(count):
            self.now += self.host
            yield item

    def dispatch(self, item):
        begun = self.now

        def fetch():
            self.free = max(self.free, begun) + self.device
            return self.free

        return fetch


@pytest.mark.parametrize(
    ("host", "device", "waited", "seconds"),
    [
        (3.0, 1.0, 9 * 2.0, 9 * 3.0 + 1.0),  # every batch but the first comes two seconds after the one before ended
        (1.0, 3.0, 0.0, 10 * 3.0),
        (2.0, 2.0, 0.0, 10 * 2.0),
    ],
)
def test_the_device_waits_from_the_end_of_a_batch_to_the_next_dispatch(host, device, waited, seconds):
    machine = Machine(host, device)
    speed = Speed(machine.clock)
    for _, finished in in_flight(machine.items(10), machine.dispatch, speed):
        machine.now = max(machine.now, finished)  # the host has waited for the results
    assert (speed.waited, speed.seconds) == (waited, seconds)


def test_tokens_and_padding_are_counted(prm):
    rows = empty_rows(2, 8, 4)
    rows.position[0, :3], rows.until[0, :3] = [0, 1, 1], [3, 2, 3]  # a problem and two alternatives of a token each
    speed = Speed()
    speed.count(rows)
    speed.add(1.0, 3.0)
    assert (speed.tokens, speed.cells) == (3, 16)
    waited = "2 tokens/s, 81% padding, the device waited 0% of 2.0 s for the host"
    assert str(speed).startswith(waited) and "windows" not in str(speed)
    records, speed = [*chains(9, seed=5), *trees(5, seed=5)], Speed()
    list(prm.score_many(records, speed))
    flat = [scorer.token_tree(tree_of(record), prm.layout) for record in records]
    assert speed.tokens == sum(len(tree.tokens_N) for tree in flat)
    assert f"{speed.tokens / sum(len(tree.node_M) for tree in flat):,.1f} tokens read per step" in str(speed)


def failing(at):
    for item in range(10):
        if item == at:
            raise KeyError("bad")
        yield item


@pytest.mark.parametrize("at", [0, 1, 5])
def test_what_an_item_raises_comes_after_the_results_before_it(at):
    def dispatch(item):
        if item == 7 - at:
            raise MemoryError
        return lambda: item

    done = []
    with pytest.raises(KeyError, match="bad"):
        for item in ahead(failing(at)):
            done.append(item)
    assert done == [*range(at)]
    done.clear()
    with pytest.raises(MemoryError if 7 - at < at else KeyError):
        for item, _ in in_flight(ahead(failing(at)), dispatch, Speed()):
            done.append(item)
    assert done == [*range(min(at, 7 - at))]


def test_files_are_scored_with_the_bits_of_their_chunks(prm):
    """Each chunk alone, without anything in flight beside it."""
    records = [*chains(20), *trees(3), pool_of(chains(2)), *chains(6, seed=3, longest=40)]
    expected = []
    for first in range(0, len(records), 8):
        chunk = [tree_of(record) for record in records[first : first + 8]]
        score = [np.full(len(tree.nodes), np.nan, np.float32) for tree in chunk]
        for batch in prm.prepare(chunk).batches:
            value_BS = np.asarray(prm._run(batch, prm.readout)["score"])
            for at in zip(*np.nonzero(batch.tree_BS >= 0), strict=True):
                score[batch.tree_BS[at]][batch.node_BS[at]] = value_BS[at]
        expected += score
    actual = [outputs["score"] for _, chunk in prm._read(ahead(prm._chunks(records)), prm.readout) for outputs in chunk]
    assert len(actual) == len(records)
    for a, b in zip(actual, expected, strict=True):
        np.testing.assert_array_equal(a, b)


def test_nothing_is_compiled_where_the_device_would_wait(prm):
    """What a chunk needs is compiled by the thread that packs it, and nothing is compiled twice."""
    scorer.readout_of_rows.clear_cache()
    with compiling() as compiled:
        records = [*chains(20), *chains(12, seed=3, longest=40), *trees(3)]
        first = list(prm.score_many(records))
        assert len(compiled) >= 2 and all(name.startswith("jprm packing") for name in compiled)
        compiled.clear()
        assert list(prm.score_many(records)) == first and not compiled


@pytest.mark.parametrize("code", ["in_flight(range(9), lambda item: lambda: item, Speed())", "ahead(iter(range(9)))"])
def test_a_program_may_end_before_its_scores_do(code):
    """As after `next(prm.score_many(records))`, whose generator is closed when the interpreter has no threads left."""
    program = f"from jprm.score.scorer import Speed, ahead, in_flight; scores = {code}; next(scores)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stderr) == (0, "")
