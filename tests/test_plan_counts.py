"""Counts of programs that were written by hand: products, loops, kernels and memory."""

import numpy as np
import pytest

from jprm.apps.plan import counts, hlo


@pytest.mark.parametrize("seed", range(4))
def test_a_convolution_counts_what_meets_an_input(seed):
    rng = np.random.default_rng(seed)
    size, window, stride, low, lhs, rhs = (int(rng.integers(1, 5)) for _ in range(6))
    outputs = 1 + max(0, (size - 1) * lhs + 2 * low - (window - 1) * rhs) // stride
    dilated = np.zeros((size - 1) * lhs + 1 + 8 * low + 64)
    dilated[low : low + (size - 1) * lhs + 1 : lhs] = 1  # ones where the input has an element
    pairs = sum(dilated[o * stride + w * rhs] for o in range(outputs) for w in range(window))
    assert counts._pairs_along(size, window, outputs, stride, low, lhs, rhs) == pairs


LOOP = """HloModule loop

%body (s: (u32[], f32[4,8], f32[8,16])) -> (u32[], f32[4,8], f32[8,16]) {
  %s = (u32[], f32[4,8]{1,0}, f32[8,16]{1,0}) parameter(0)
  %i = u32[]{:T(128)} get-tuple-element(%s), index=0
  %two = u32[] constant(2)
  %next = u32[] add(%i, %two)
  %x = f32[4,8]{1,0:T(8,128)S(1)} get-tuple-element(%s), index=1
  %w = f32[8,16]{1,0} get-tuple-element(%s), index=2
  %y = f32[4,16]{1,0} dot(%x, %w), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  %k = f32[4,16]{1,0} custom-call(%x, %w), custom_call_target="tpu_custom_call", backend_config={CONFIG}
  ROOT %t = (u32[], f32[4,8]{1,0}, f32[8,16]{1,0}) tuple(%next, %x, %w)
}

%condition (s: (u32[], f32[4,8], f32[8,16])) -> pred[] {
  %s.1 = (u32[], f32[4,8]{1,0}, f32[8,16]{1,0}) parameter(0)
  %j = u32[] get-tuple-element(%s.1), index=0
  %end = u32[] constant(9)
  ROOT %less = pred[] compare(%j, %end), direction=DIRECTION
}

ENTRY %main (a: f32[4,8], b: f32[8,16]) -> (u32[], f32[4,8], f32[8,16]) {
  %a = f32[4,8]{1,0} parameter(0)
  %b = f32[8,16]{1,0} parameter(1)
  %zero = u32[] constant(1)
  %start = u32[] copy(%zero)
  %state = (u32[], f32[4,8]{1,0}, f32[8,16]{1,0}) tuple(%start, %a, %b)
  ROOT %loop = (u32[], f32[4,8]{1,0}, f32[8,16]{1,0}) while(%state), condition=%condition, body=%body
}
"""


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


SLICE = """HloModule slice

ENTRY %main (a: f32[1024]) -> f32[8] {
  %a = f32[1024]{0:T(1024)} parameter(0)
  %s = ((f32[1024]{0:T(1024)}), f32[8]{0:T(1024)PLACE}, s32[]{:S(2)}) slice-start(%a), slice={[0:8]}
  ROOT %d = f32[8]{0:T(1024)PLACE} slice-done(%s)
}
"""


@pytest.mark.parametrize(("place", "times"), [("S(1)", 1), ("", 2)])
def test_of_an_array_a_slice_reads_the_slice(place, times):
    """Begun and done apart, from HBM to the chip's own memory or within HBM."""
    assert counts.count(hlo.parse(SLICE.replace("PLACE", place))).bytes == times * 8 * 4


NESTED = """HloModule nested

%sliced (p: f32[36,64], i: s32[]) -> f32[64] {
  %p = f32[36,64]{1,0} parameter(0)
  %i = s32[] parameter(1)
  %zero = s32[] constant(0)
  %part = f32[1,64]{1,0} dynamic-slice(%p, %i, %zero), dynamic_slice_sizes={1,64}
  ROOT %flat = f32[64]{0} bitcast(%part)
}

%outer (q: f32[2304], j: s32[], x: f32[64]) -> f32[64] {
  %q = f32[2304]{0} parameter(0)
  %stack = f32[36,64]{1,0} bitcast(%q)
  %j = s32[] parameter(1)
  %x = f32[64]{0} parameter(2)
  %row = f32[64]{0} fusion(%stack, %j), kind=kLoop, calls=%sliced
  ROOT %sum = f32[64]{0} add(%row, WITH)
}

ENTRY %main (a: f32[2304], k: s32[], b: f32[64]) -> f32[64] {
  %a = f32[2304]{0} parameter(0)
  %k = s32[]{:S(6)} parameter(1)
  %b = f32[64]{0} parameter(2)
  ROOT %y = f32[64]{0} fusion(%a, %k, %b), kind=kLoop, calls=%outer
}
"""


def test_of_an_operand_that_a_nested_fusion_slices_the_slice_is_read():
    assert counts.count(hlo.parse(NESTED.replace("WITH", "%x"))).bytes == 4 * (64 + 64 + 64)
    whole = NESTED.replace("WITH", "%first").replace(
        "  ROOT %sum", "  %first = f32[64]{0} custom-call(%stack, %x)\n  ROOT %sum"
    )
    assert counts.count(hlo.parse(whole)).bytes == 4 * (2304 + 64 + 64)


CARRIED = """HloModule carried

%async_collective_fusion.1 (p: f32[8], q: f32[64], x: f32[32]) -> (f32[32], f32[8], f32[64]) {
  %p = f32[8]{0} parameter(0)
  %q = f32[64]{0} parameter(1)
  %x = f32[32]{0} parameter(2)
  %own = f32[32]{0} negate(%x)
  %gathered = f32[64]{0} all-gather(%p), replica_groups=[1,8]<=[8], dimensions={0}
  ROOT %t = (f32[32]{0}, f32[8]{0}, f32[64]{0}) tuple(%own, %p, %gathered)
}

%last (p2: f32[8], q2: f32[64]) -> f32[64] {
  %p2 = f32[8]{0} parameter(0)
  %q2 = f32[64]{0} parameter(1)
  %whole = f32[64]{0} all-gather(%p2), replica_groups=[1,8]<=[8], dimensions={0}
  ROOT %done = f32[64]{0} custom-call(%p2, %q2, %whole), custom_call_target="AsyncCollectiveDone"
}

ENTRY %main (a: f32[8], b: f32[64], c: f32[32]) -> f32[64] {
  %a = f32[8]{0} parameter(0)
  %b = f32[64]{0} parameter(1)
  %c = f32[32]{0} parameter(2)
  %step = (f32[32]{0}, f32[8]{0}, f32[64]{0}) fusion(%a, %b, %c), kind=kOutput, calls=%async_collective_fusion.1
  %sent = f32[8]{0} get-tuple-element(%step), index=1
  %there = f32[64]{0} get-tuple-element(%step), index=2
  ROOT %end = f32[64]{0} fusion(%sent, %there), kind=kCustom, calls=%last
}
"""


def test_a_collective_that_fusions_carry_on_counts_once():
    """A fusion beside it counts its own work, 32 in and 32 out; the last one writes the 64 that were gathered."""
    assert counts.count(hlo.parse(CARRIED)).bytes == 4 * (32 + 32 + 64)


def test_a_loop_whose_turns_are_not_known_is_refused():
    with pytest.raises(hlo.UnknownTrips, match="loop"):
        counts.count(hlo.parse(LOOP.replace("DIRECTION", "LT").replace("add(%i, %two)", "multiply(%i, %two)")))
