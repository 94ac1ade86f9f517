"""Counts of programs that were written by hand: products, loops, kernels and memory."""

import pathlib

import numpy as np
import pytest

from jprm.apps.plan import counts, hlo


def hlo_text(name):
    return (pathlib.Path(__file__).parent / "hlo" / f"{name}.txt").read_text()


@pytest.mark.parametrize("seed", range(4))
def test_a_convolution_counts_what_meets_an_input(seed):
    rng = np.random.default_rng(seed)
    size, window, stride, low, lhs, rhs = (int(rng.integers(1, 5)) for _ in range(6))
    outputs = 1 + max(0, (size - 1) * lhs + 2 * low - (window - 1) * rhs) // stride
    dilated = np.zeros((size - 1) * lhs + 1 + 8 * low + 64)
    dilated[low : low + (size - 1) * lhs + 1 : lhs] = 1  # ones where the input has an element
    pairs = sum(dilated[o * stride + w * rhs] for o in range(outputs) for w in range(window))
    assert counts._pairs_along(size, window, outputs, stride, low, lhs, rhs) == pairs


LOOP = hlo_text("loop")


@pytest.mark.parametrize(("direction", "turns"), [("LT", 4), ("LE", 5)])  # 1, 3, 5, 7 and 9
def test_turns_kernels_and_memory_of_a_loop_that_was_written_by_hand(direction, turns):
    text = LOOP.replace("DIRECTION", direction).replace("CONFIG", '{"cost_estimate":{"flops":"1000","bytes":"7"}}')
    program = counts.count(hlo.parse(text))
    assert program.flops == turns * (2 * 4 * 8 * 16 + 1000) and program.uncounted == ()
    # The product and the kernel each read w and write (4, 16); x lies on the chip. The counter grows, and was copied.
    assert program.bytes == turns * (2 * 4 * (8 * 16 + 4 * 16) + 3 * 4) + 2 * 4
    named = counts.count(hlo.parse(text), kernels={"k": 5.0})
    assert named.flops == turns * (2 * 4 * 8 * 16 + 5)
    silent = counts.count(hlo.parse(text.replace("cost_estimate", "other")))
    assert silent.flops == turns * 2 * 4 * 8 * 16 and silent.uncounted == ("k",)


SLICE = hlo_text("slice")


@pytest.mark.parametrize(("place", "times"), [("S(1)", 1), ("", 2)])
def test_of_an_array_a_slice_reads_the_slice(place, times):
    """Begun and done apart, from HBM to the chip's own memory or within HBM."""
    assert counts.count(hlo.parse(SLICE.replace("PLACE", place))).bytes == times * 8 * 4


NESTED = hlo_text("nested")


def test_of_an_operand_that_a_nested_fusion_slices_the_slice_is_read():
    assert counts.count(hlo.parse(NESTED.replace("WITH", "%x"))).bytes == 4 * (64 + 64 + 64)
    whole = NESTED.replace("WITH", "%first").replace(
        "  ROOT %sum", "  %first = f32[64]{0} custom-call(%stack, %x)\n  ROOT %sum"
    )
    assert counts.count(hlo.parse(whole)).bytes == 4 * (2304 + 64 + 64)


CARRIED = hlo_text("carried")


def test_a_collective_that_fusions_carry_on_counts_once():
    """A fusion beside it counts its own work, 32 in and 32 out; the last one writes the 64 that were gathered."""
    assert counts.count(hlo.parse(CARRIED)).bytes == 4 * (32 + 32 + 64)


def test_a_loop_whose_turns_are_not_known_is_refused():
    with pytest.raises(hlo.UnknownTrips, match="loop"):
        counts.count(hlo.parse(LOOP.replace("DIRECTION", "LT").replace("add(%i, %two)", "multiply(%i, %two)")))
