"""What the benchmarks count: FLOPs, pairs and padding against closed forms, and the page that they write."""

import numpy as np
import pytest
from tiny import TINY, packed_trees, random_tree, visible

counts = pytest.importorskip("jprm.apps.plan.counts")  # which the yardsticks count by
attention = pytest.importorskip("experiments.bench.attention")
yardsticks = pytest.importorskip("experiments.bench.yardsticks")


def test_pairs_are_what_the_rule_shows_of_real_tokens():
    packed = packed_trees([random_tree(seed) for seed in range(5)])
    real = yardsticks.real_tokens(packed.rows)
    assert real.sum() == packed.report.tokens < real.size
    assert yardsticks.visible_pairs(packed.rows) == np.asarray(visible(packed.rows.until))[real].sum()


@pytest.mark.parametrize("training", [True, False])
def test_flops_of_a_chain_are_those_of_the_plan(training):
    T = 48
    trained = ["decoder/embed", *(f"decoder/layers_0/{name}" for name in counts.matrices(TINY))] if training else []
    expected = counts.model_flops(TINY, trained, rows=1, tokens=T, slots=0)
    assert yardsticks.model_flops(TINY, T, T * (T + 1) // 2, training) == expected


@pytest.mark.parametrize("way", ["paths", "jax.nn"])
def test_attention_is_measured_on_a_chain(way, tmp_path):
    measured = attention.measure(way, "chain", 256, tmp_path)
    assert measured["seconds"] > 0 and measured["bytes"] > 0
    # Of 256 x 256 pairs T (T + 1) / 2 are needed.
    assert measured["needed"] == pytest.approx((256 * 257 / 2) / {"paths": attention_pairs(256), "jax.nn": 256**2}[way])


def attention_pairs(T: int) -> int:
    """Returns the pairs that blocks of 128 queries compute: each its own and whole chunks of 256 keys before it."""
    return sum(128 * (128 + 256 * -(-start // 256)) for start in range(0, T, 128))


def test_sides_are_measured_in_turns_and_their_medians_count():
    calls = []

    def side(name, numbers):
        return lambda: calls.append(name) or {"seconds": next(numbers), "name": name}

    ours, peer = iter([3.0, 1.0, 8.0]), iter([2, 2, 5])
    medians = yardsticks.measure(3, ours=side("ours", ours), none=None, peer=side("peer", peer))
    assert calls == ["ours", "peer"] * 3
    assert medians == {"ours": {"seconds": 3.0, "name": "ours"}, "none": {}, "peer": {"seconds": 2, "name": "peer"}}
