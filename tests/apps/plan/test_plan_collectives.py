"""Plans by the compiler: collectives, counts of operations, and what fits."""

import json
import pathlib

import jax
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType
from refusing import refused

from jprm.apps import cli
from jprm.apps.plan import counts, fits, hlo, topologies
from jprm.apps.plan.counts import ProgramCounts, collectives, count, group_size, nodes_of, totals
from jprm.apps.plan.plan import Memory, abstract_state
from jprm.model.mesh import MESH_AXES


def hlo_text(name):
    return (pathlib.Path(__file__).parent / "hlo" / f"{name}.txt").read_text()


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("replica_groups=mesh['a'=4,'b'=2] {'a'}", 4),
        ("replica_groups=mesh['a'=4,'b'=2] {'a','b'}", 8),
        ("replica_groups=mesh['a'=1,'b'=8,'c'=2], device_ids=([2,8]T(1,0)) {'b'}", 8),  # of devices in another order
        ("replica_groups=[2,4]<=[8]", 4),
        ("replica_groups=[2,4]<=[4,2]T(1,0)", 4),
        ("replica_groups={{0,1,2},{3,4,5}}", 3),
        ('_xla_megascale_target="{1,2,3}x{0:63}"', 3),  # slices, and chips of each
        ("_xla_megascale_target={{100000,200000},{100001,200001}}", 2),
        ("_xla_megascale_target={{100000->200000},{200000->100000}}", 2),
    ],
)
def test_groups_of_devices(text, size):
    assert group_size(hlo._instruction(f"  %g = f32[8]{{0}} all-gather(%x), channel_id=1, {text}")) == size


def test_groups_that_are_not_known_are_refused():
    for text in ("{}", "mesh['a'=8,'b'=2] {'a':(2)4,'b'}"):
        with pytest.raises(ValueError, match="device groups have an unknown notation"):
            group_size(hlo._instruction(f"  %g = f32[8]{{0}} all-gather(%x), replica_groups={text}"))
    permute = "  %p = f32[8]{0} collective-permute-start(%x), source_target_pairs={{0,1},{1,0}}"
    assert group_size(hlo._instruction(permute)) == 2


@pytest.mark.parametrize(
    ("text", "nodes"),
    [
        ("replica_groups={{0,1,2,3},{4,5,6,7}}", 1),
        ("replica_groups={{0,4},{1,5},{2,6},{3,7}}", 2),
        ("replica_groups=[2,4]<=[8]", 1),
        ("replica_groups=[1,8]<=[8]", 2),
        ("replica_groups=[4,2]<=[2,4]T(1,0)", 2),
        ("replica_groups=mesh['data'=2,'fsdp'=4] {'fsdp'}", 1),
        ("replica_groups=mesh['data'=2,'fsdp'=4] {'data'}", 2),
        ("replica_groups=mesh['data'=4,'fsdp'=2], device_ids=([2,4]T(1,0)) {'fsdp'}", 2),
    ],
)
def test_gpus_of_a_node_share_its_network(text, nodes):
    """Nodes of 4: for 64 bytes of a sum over 8 GPUs on 2 nodes, each node receives half of it twice, by 4 GPUs."""
    collective = hlo._instruction(f"  %g = f32[16]{{0}} all-reduce(%x), channel_id=1, {text}, to_apply=%sum")
    assert nodes_of(collective, 4) == nodes and nodes_of(collective, 0) == 1
    program = f"""HloModule one

ENTRY %main (x: f32[16]) -> f32[16] {{
  %x = f32[16]{{0}} parameter(0)
  ROOT %g = f32[16]{{0}} all-reduce(%x), channel_id=1, {text}, to_apply=%sum
}}
"""
    (reduced,) = collectives(hlo.parse(program), (), 4)
    n = group_size(collective)
    assert reduced.network == (nodes > 1)
    assert reduced.received == (2 * 64 * (n - 1) / n if nodes == 1 else 2 * 64 * (1 - 1 / nodes) / (n / nodes))


def test_products_of_cublas_are_counted():
    assert count(hlo.parse(hlo_text("cublas"))).flops == 2 * 8 * 32 * 4


PIPELINED = hlo_text("pipelined")
"""Two layers' gradients of 8 x 16, and of a norm of 16, on two slices of 4 chips: one turn of the loop is taken out and
runs first, and what its shares are summed to is waited for in the next turn. Nothing that the compiler made has a name.
"""


def test_what_slices_send_each_other_while_they_compute():
    module = hlo.parse(PIPELINED.replace("MORE", "ALL_REDUCE"))
    sent = {
        (row["network"], row["in_layers"], row["kind"], row["moves"]): (row["count"], row["bytes"], row["received"])
        for row in totals(list(collectives(module, {8 * 16, 16})))
    }
    assert sent == {
        # Three turns of the loop, and the one before it; of the 256 bytes three quarters come from others.
        (False, True, "reduce-scatter", "gradients"): (4, 4 * 256, 4 * 192),
        (False, True, "all-reduce", "gradients"): (3, 3 * 128, 3 * 2 * 96),  # two norms, packed
        # Of two slices each gets the other's: 64 bytes a share; the last when the loop is over.
        (True, True, "all-reduce", "gradients"): (3, 3 * 64, 3 * 64),
        (True, False, "all-reduce", "gradients"): (1, 64, 64),
        (False, False, "all-gather", "gradients"): (1, 64, 48),  # of what was summed, and not of weights
        (True, False, "all-reduce", "other"): (1, 32, 32),
    }


@pytest.mark.parametrize(
    ("said", "kind", "bytes", "received"),
    [
        ("ALL_GATHER", "all-gather", 64, 32), ("REDUCE_SCATTER", "reduce-scatter", 32, 16),
        ("ALL_TO_ALL", "all-to-all", 32, 16), ("ONE_TO_ONE", "collective-permute", 32, 32),
    ],
)  # fmt: skip
def test_all_kinds_between_slices(said, kind, bytes, received):
    sent = [c for c in collectives(hlo.parse(PIPELINED.replace("MORE", said)), ()) if c.network]
    assert ("all-reduce", 64) in {(c.kind, c.bytes) for c in sent}
    assert [(c.kind, c.moves, c.bytes, c.received) for c in sent if c.name == "jit(step)/jvp(M)/sum"] == [
        (kind, "other", bytes, received)
    ]
    with pytest.raises(ValueError, match="send.3.*ALL_AT_ONCE"):
        list(collectives(hlo.parse(PIPELINED.replace("MORE", "ALL_AT_ONCE")), ()))


def test_the_network_bounds_a_step():
    program = ProgramCounts(0.0, 0.0, tuple(collectives(hlo.parse(PIPELINED.replace("MORE", "ALL_REDUCE")), ())))
    bounds = counts.bounds(program, topologies.find("v5p-128"))
    # 288 bytes at 50 Gb/s; the 1,392 within a slice at 600 GB/s.
    assert bounds.network == pytest.approx(288 / 6.25e9) and bounds.by == "network" and bounds.step == bounds.network
    assert bounds.interconnect == pytest.approx((4 * 192 + 3 * 192 + 48) / 600e9)
    assert counts.bounds(program, topologies.find("v4-8")).network == 0  # whose rate nobody publishes


# ---- Counts of programs that were written by hand: products, loops, kernels and memory.


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


# ---- What fits on one card: the sizes of what is kept, by closed forms, and the table.


def size_of(way, size="7B"):
    """Bytes of the frozen and the trained parameters, without allocating any."""
    mesh = AbstractMesh((1,) * 5, MESH_AXES, axis_types=(AxisType.Explicit,) * 5)
    state = abstract_state(fits.experiment(size, way, 2048), mesh)
    return [sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(part)) for part in (state.frozen, state.trained)]


def test_a_base_takes_what_its_type_says():
    c = fits.experiment("7B", "training, all parameters", 2048).model
    layer = c.width * (2 * c.heads + 2 * c.kv_heads) * c.head_dim + 3 * c.width * c.mlp_width
    matrices, embed = c.layers * layer, c.vocab_size * c.width
    vectors = c.layers * (2 * c.width + (c.heads + 2 * c.kv_heads) * c.head_dim) + c.width
    assert size_of("training, all parameters")[0] == 0
    frozen, trained = size_of("LoRA, base in 4 bits")
    assert frozen == matrices * 36 // 64 + 2 * embed + 4 * vectors
    assert trained < 4 * 45e6
    norms = c.layers * 2 * c.width + c.width
    assert size_of("LoRA, base in bfloat16") == [2 * (matrices + embed + vectors - norms) + 4 * norms, trained]
    assert size_of("scoring in 4 bits") == [frozen, 4 * 2 * (c.width + 1)]


def test_the_smallest_card_of_each_size():
    assert [fits.smallest(gigabytes * 1e9) for gigabytes in (22.2, 22.3, 31.6, 44.5, 78, 78.2, 139)] == [
        "24 GB", "32 GB", "48 GB", "80 GB", "80 GB", "141 GB", "none",
    ]  # fmt: skip


def test_a_table_that_stopped_goes_on(tmp_path, monkeypatch, capsys):
    compiled = []

    def fake(function, arguments, mesh, available):
        if len(compiled) == 3:
            raise KeyboardInterrupt
        compiled.append(arguments)
        return Memory(30e9, available, 20e9), None

    monkeypatch.setattr(fits, "devices", lambda topology: jax.devices()[:1])
    monkeypatch.setattr(fits, "compiled", fake)
    monkeypatch.setattr(fits, "training_step", lambda config, *_: (None, config.name))
    monkeypatch.setattr(fits, "scoring_step", lambda config, *_: (None, config.name))
    with pytest.raises(KeyboardInterrupt):
        fits.fits(tmp_path / "fits.json")
    compiled[:] = []
    monkeypatch.setattr(fits, "compiled", lambda *_: (compiled.append(_) or Memory(30e9, 0.0, 20e9), None))
    report = fits.fits(tmp_path / "fits.json")
    cells = len(fits.SHAPES) * len(fits.WAYS) * len(fits.TOKENS)
    assert len(compiled) == cells - 3 and len(report["cells"]) == cells
    assert json.loads((tmp_path / "fits.json").read_text()) == report
    table, note = fits.tables(report)
    assert [row for row in table.rows if row][0] == ["0.5B", "training, all parameters", *["30.0", "32 GB"] * 2]


def test_the_table_takes_nothing_else(monkeypatch):
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    refused(ValueError, "--fits takes only --output", cli.plan, fits=True, topology="h100-1")
    refused(ValueError, "name an experiment file and --topology, or --fits", cli.plan)
