"""What the benchmarks count: FLOPs, pairs and padding against closed forms, and the page that they write."""

import collections
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny import TINY, packed_trees, random_tree, visible

from experiments.bench import attention, yardsticks
from jprm.model.parameters import matrices, model_flops


def test_pairs_are_what_the_rule_shows_of_real_tokens():
    packed = packed_trees([random_tree(seed) for seed in range(5)])
    real = yardsticks.real_tokens(packed.rows)
    assert real.sum() == packed.report.tokens < real.size
    assert yardsticks.visible_pairs(packed.rows) == np.asarray(visible(packed.rows.until))[real].sum()


@pytest.mark.parametrize("training", [True, False])
def test_flops_of_a_chain_are_those_of_the_plan(training):
    T = 48
    trained = ["decoder/embed", *(f"decoder/layers_0/{name}" for name in matrices(TINY))] if training else []
    expected = model_flops(TINY, trained, rows=1, tokens=T, slots=0)
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


def test_time_goes_to_the_innermost_instruction_and_is_divided_among_threads():
    where = pytest.importorskip("experiments.bench.where")

    def event(name, start, duration):
        stats = [("hlo_op", name), ("hlo_module", "m")] if name else []
        return types.SimpleNamespace(stats=stats, start_ns=start, duration_ns=duration)

    one = [event("loop", 0, 100), event("dot", 10, 30), event("add", 15, 5), event("dot", 60, 20), event("b", 100, 7)]
    other = [event("up", 60, 30), event(None, 0, 500), event("late", 200, 10)]
    spent = {op: (round(seconds * 1e9), times) for (_, op), (seconds, times) in where.shares([one, other]).items()}
    # dot and up share 60 to 80, loop and up 80 to 90
    assert spent == {"loop": (45, 1), "dot": (35, 2), "add": (5, 1), "b": (7, 1), "up": (15, 1), "late": (10, 1)}


def test_work_is_told_apart_by_what_is_fused():
    where = pytest.importorskip("experiments.bench.where")

    def step(w_DF, x_BTD, key_BTD, index_T):
        score_BTT = jnp.einsum("btd,bsd->bts", x_BTD, key_BTD)
        y_BTF = jnp.einsum("bts,bsd->btd", score_BTT, x_BTD) @ w_DF
        return jax.nn.silu(y_BTF), x_BTD[:, index_T]

    shapes = (64, 32), (3, 128, 64), (3, 128, 64)
    arguments = [jax.ShapeDtypeStruct(shape, "float32") for shape in shapes] + [jax.ShapeDtypeStruct((9,), "int32")]
    module = where.hlo.parse(jax.jit(step).lower(*arguments).compile().as_text())
    work = collections.Counter()
    for kind, flops, _ in where.needs(module).values():
        work[kind] += flops
    assert work[where.PROJECTIONS] == 2 * 3 * 128 * 64 * 32
    assert work[where.ATTENTION] == 2 * (2 * 3 * 128 * 128 * 64)
    assert {where.MOVES, where.OTHER} <= work.keys()
