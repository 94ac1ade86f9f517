"""Plans: names, counts of a compiled program against counts by hand, and one plan from end to end.

Compiling for a TPU needs libtpu (the extra `tpu`), not a TPU.
"""

import dataclasses
import io
import json
import pathlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from refusing import refused
from rich.console import Console
from tiny import TINY, optimised

from jprm.apps import cli
from jprm.apps.plan import counts, hlo, topologies
from jprm.apps.plan import plan as planning
from jprm.apps.plan.topologies import GIB
from jprm.methods.evaluate.blocks import show
from jprm.model import transformer
from jprm.model.config import ModelConfig
from jprm.model.mesh import MESH_AXES, MeshConfig
from jprm.model.transformer import visible_pairs

SLICES = [
    ("v4-32", "2x2x4", 16, 16), ("v5e-16", "4x4", 16, 16), ("v5p-128", "4x4x4", 64, 64), ("v5p-512", "4x8x8", 256, 256),
    ("v6e-64", "8x8", 64, 64), ("tpu7x-128", "4x4x4", 64, 128), ("v5litepod-16", "4x4", 16, 16),
    ("h100-8", "8", 8, 8), ("b200-1", "1", 1, 1),
    ("rtx4090-1", "1", 1, 1), ("RTX3090-2", "2", 2, 2), ("rtx5090-1", "1", 1, 1), ("l4-4", "4", 4, 4),
    ("a10-8", "8", 8, 8),
]  # fmt: skip


@pytest.mark.parametrize(("name", "shape", "chips", "devices"), SLICES)
def test_names_that_people_know(name, shape, chips, devices):
    topology = topologies.find(name)
    assert (topology.shape, topology.chips, topology.devices) == (shape, chips, devices)
    assert np.prod([int(size) for size in shape.split("x")]) == chips
    assert topologies.find(name, slices=2).devices == 2 * devices


def test_every_gpu_has_a_target_of_its_own_size():
    folder = pathlib.Path(topologies.__file__).parent / "gpu_targets"
    for name, chip in topologies.CHIPS.items():
        if chip.backend == "gpu":
            text = (folder / f"{name}.txtpb").read_text()
            assert f"device_memory_size: {int(chip.hbm)}\n" in text and chip.allotted == 0.92 * chip.hbm
            bandwidth = int(re.search(r"memory_bandwidth: (\d+)", text)[1])
            assert bandwidth == pytest.approx(chip.hbm_bandwidth, rel=0.05)


def test_a_wrong_name_lists_the_right_ones():
    refused(ValueError, "'v5p-64x'.*v5p-4096", topologies.find, "v5p-64x")
    refused(ValueError, "v4-32.*v5e-16.*v5p-128.*v6e-64.*tpu7x-128", topologies.find, "x100-8")
    refused(ValueError, "slices=0", topologies.find, "v4-8", 0)


def tpu(name):
    pytest.importorskip("libtpu", reason="needs libtpu: the extra `tpu`")
    return topologies.devices(topologies.find(name))


def placed(mesh, shape, dtype, *spec):
    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, P(*spec)))


L, D, B = 6, 1024, 2048


@pytest.fixture(scope="module", params=["cpu", "v5e-8"])
def program(request):
    """Gradient descent on L square matrices of D x D, split over 8 devices with their B rows, and rematerialised."""
    devices = jax.devices() if request.param == "cpu" else tpu(request.param)
    mesh = Mesh(np.array(devices), ("fsdp",), axis_types=(AxisType.Explicit,))

    def update(w_LDF, x_BD):
        def loss(w_LDF):
            def body(x, w):
                product = jnp.einsum("BD,DF->BF", x, w.astype(jnp.bfloat16), out_sharding=P("fsdp"))
                return jnp.tanh(product), None

            with jax.named_scope("layers_0"):
                return jax.lax.scan(body, x_BD, w_LDF)[0].astype(jnp.float32).sum()

        return w_LDF - 0.1 * jax.grad(loss)(w_LDF)

    with jax.set_mesh(mesh), optimised():
        args = placed(mesh, (L, D, D), jnp.float32, None, "fsdp"), placed(mesh, (B, D), jnp.bfloat16, "fsdp")
        text = jax.jit(update).lower(*args).compile().as_text()
    return counts.count(hlo.parse(text), {D * D})


def test_flops_are_counted_with_the_turns_of_the_loops(program):
    # Three products of (B / 8, D) with (D, D) a layer: forward, and the gradients of input and weights. That of the
    # first input is not needed, and may or may not be computed.
    product = 2 * B / 8 * D * D
    assert (3 * L - 1) * product <= program.flops <= 3 * L * product


def test_collectives_are_found_in_the_layer_loop(program):
    inside = [c for c in program.collectives if c.in_layers]
    assert {c.moves for c in inside} == {"weights", "gradients"}
    gathered = sum(c.bytes * c.times for c in inside if c.moves == "weights")
    # Each layer's matrix is gathered forward and backward, in bfloat16 or, converted later, in float32.
    assert gathered in (2 * L * D * D * 2, 2 * L * D * D * 4)
    assert all(c.times == L for c in inside)
    assert program.bytes > L * D * D * 4 / 8  # the weights at least are written


def test_model_flops_are_those_of_the_formula():
    model = ModelConfig(
        vocab_size=100, layers=4, width=8, heads=4, kv_heads=2, head_dim=6, mlp_width=10, rope_theta=1e4, norm_eps=1e-6,
        layer_groups=(3, 1),
    )  # fmt: skip
    T, matrix = 16, 2 * (8 * 4 * 6) + 2 * (8 * 2 * 6) + 3 * (8 * 10)
    params = jax.eval_shape(lambda: transformer.init(model, jax.random.key(0)))["decoder"]["layers_1"]
    assert sum(x.size for name, x in params.items() if not name.endswith("norm")) == matrix
    pairs = 4 * 4 * 6 * (T * (T + 1) // 2)  # 4 H a head and pair
    head = 8 * 2 * 5
    every = {"decoder/embed"} | {f"decoder/layers_{i}/{name}" for i in (0, 1) for name in counts.matrices(model)}
    upper = {path for path in every if "layers_1" in path}
    flops = [counts.model_flops(model, trained, 3, T, 5) for trained in (every, upper, ())]
    assert flops[0] == 3 * (4 * (6 * matrix * T + 3 * pairs) + 6 * head)
    assert flops[1] == 3 * (3 * (2 * matrix * T + pairs) + 6 * matrix * T + 3 * pairs + 6 * head)
    assert flops[2] == 3 * (4 * (2 * matrix * T + pairs) + 2 * head)
    adapters = {f"{path}_lora_a" for path in upper}  # the matrix's own gradient is not needed
    assert counts.model_flops(model, adapters, 3, T, 5) == flops[1] - 3 * 2 * matrix * T
    assert visible_pairs(T, 4) == sum(min(i + 1, 4) for i in range(T))


REFUSALS = [
    "RESOURCE_EXHAUSTED: Ran out of memory on HBM, the total memory required for HLO temporaries (20.50G) exceeds"
    " available HBM (15.75G).",
    "RESOURCE_EXHAUSTED: XLA:TPU compile permanent error. Ran out of memory in memory space hbm. Used 20.50G of 15.75G"
    " hbm. Exceeded hbm capacity by 4.75G.",
]


@pytest.mark.parametrize("message", REFUSALS)
def test_the_compilers_refusal_is_read(message):
    memory = planning.overflow(message)
    assert (memory.total, memory.available, memory.fits) == (20.5 * GIB, 15.75 * GIB, False)
    refused(RuntimeError, "UNIMPLEMENTED", planning.overflow, "UNIMPLEMENTED: something else")


@pytest.mark.parametrize("name", ["v4-8", "v5e-4", "v5p-8", "v6e-4", "tpu7x-8"])
def test_a_program_that_does_not_fit_is_reported(name):
    """By the compiler itself, which also says what a chip has."""
    slice = topologies.find(name)
    mesh = Mesh(np.array(tpu(name)[:1]), ("one",), axis_types=(AxisType.Explicit,))
    args = (placed(mesh, (2**36,), jnp.float32),)
    with optimised():
        memory, text = planning.compiled(jax.jit(lambda x: x + 1), args, mesh, slice.chip.allotted)
    assert text is None and not memory.fits and memory.total >= 2 * 4 * 2**36  # its argument and its result
    assert memory.available == pytest.approx(slice.chip.allotted, rel=1e-3)  # two decimals of a GiB are printed


FILE = """
import dataclasses, sys
sys.path.insert(0, {tests!r})
from tiny import TINY
from jprm.experiment import DataConfig, Experiment
from jprm.experiment import OptimizerConfig
from jprm.objectives import TargetConfig

def experiment():
    return Experiment(
        name="small", base="/not/there", tokenizer="/not/there",
        model=dataclasses.replace(
            TINY, vocab_size=512, layers=3, width=1024, head_dim=128, kv_heads=4, mlp_width=512, dtype="bfloat16",
            attention="kernel",
        ),
        data=DataConfig(
            train=("/not/there",), supervise="step", too_long="error", tokens=256, slots=16, rows=8, micro_rows=8
        ),
        target=TargetConfig("rating", neutral="positive", after_error="keep"), objective="cross_entropy",
        optimizer=OptimizerConfig(learning_rate=1e-4), steps=10,
    )
"""


@pytest.fixture
def file(tmp_path, request):
    path = tmp_path / "small.py"
    path.write_text(FILE.format(tests=str(request.config.rootpath / "tests")))
    return path


@pytest.mark.breadth
def test_a_plan_from_end_to_end(file, tmp_path, capsys, monkeypatch):
    tpu("v5e-8")
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")  # the command sets it
    out = tmp_path / "plan.json"
    line = f"plan {file} --topology v5e-8 --output {out}"
    with optimised():
        assert cli.main(line.split()) == 0
    report = json.loads(out.read_text())
    memory, program, bounds = report["memory"], report["program"], report["bounds"]
    state = 3 * 4 * report["parameters"] / 8  # parameters and two moments in float32, over 8 chips
    assert state < memory["arguments"] < 1.2 * state
    assert memory["fits"] and memory["arguments"] < memory["total"]
    # Of one step, not two: XLA makes two copies of the model where the micro-batch is a loop of one turn. Beside the
    # recomputed forward pass (8 products for 6), the kernels compute the pair of whole blocks that a row of 256 is.
    assert 1 < program["flops_over_model"] < 2
    assert program["uncounted_kernels"] == []
    assert program["others_in_layers"] == []
    assert {row["moves"] for row in program["collectives"] if row["in_layers"]} == {"weights", "gradients"}
    assert bounds["step"] == max(bounds["compute"], bounds["hbm"], bounds["interconnect"]) and bounds["network"] == 0
    assert bounds["tokens_per_second"] == pytest.approx(8 * 256 / bounds["step"])
    assert report["input"] == {"hosts": 1, "packers": 1, "tokens_per_second": bounds["tokens_per_second"]}


@pytest.mark.slow
def test_slices_send_each_other_gradients_alone(file, tmp_path, monkeypatch):
    """And the chips of each what those of one slice do: the compiler's rewriting of the layer loop hides nothing."""
    from jprm.experiment import load

    tpu("v5e-8")
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    out = tmp_path / "plan.json"
    line = f"plan {file} --topology v5e-8 --slices 2 --set mesh.data=2 data.rows=16 data.micro_rows=16 --output {out}"
    with optimised():
        assert cli.main(line.split()) == 0
    plan, model = json.loads(out.read_text()), load(file, []).model
    program, bytes = plan["program"], {}
    for row in program["collectives"]:
        bytes[row["network"], row["in_layers"], row["kind"], row["moves"]] = row["bytes"]
    matrices = 2 * model.layers * sum(counts.matrices(model).values())  # bfloat16
    assert bytes[False, True, "all-gather", "weights"] == 2 * matrices  # forward and backward
    assert bytes[False, True, "reduce-scatter", "gradients"] == matrices
    assert program["others_in_layers"] == []
    # A chip's eighth of every layer's gradient, and of the embedding's in float32. The last go when the loop is over.
    sent = {key[1:]: size for key, size in bytes.items() if key[0]}
    least = matrices / 8 + 4 * model.vocab_size * model.width / 8
    assert {kind for _, kind, _ in sent} == {"all-reduce"}
    gradients = sent[True, "all-reduce", "gradients"] + sent[False, "all-reduce", "gradients"]
    assert least <= gradients < 1.05 * least  # padded
    assert sent[False, "all-reduce", "other"] < 0.01 * least
    # Two slices: of a sum, each receives what it sends, at v5e's 25 Gb/s.
    assert plan["bounds"]["network"] == pytest.approx(sum(sent.values()) / (25e9 / 8))


def test_the_scoring_step_is_the_scorers(file):
    """By shapes only: a row a device of the mesh, a score for each of its slots."""
    from jprm.experiment import load

    mesh = jax.sharding.AbstractMesh((1, 4, 2, 1, 1), MESH_AXES, axis_types=(AxisType.Explicit,) * 5)
    score, args = planning.scoring_step(load(file, ["lora.rank=4", "model.attention=blocked"]), mesh)
    with jax.sharding.use_abstract_mesh(mesh):
        score_BS = score.eval_shape(*args)["score"]
    assert score_BS.shape == (4, 128) and score_BS.sharding.spec[0] == ("data", "fsdp")
    assert {x.dtype for x in jax.tree.leaves(args[0])} == {jnp.dtype("float32")}
    assert not [path for path in args[0]["decoder"]["layers_0"] if "lora" in path]  # merged, as the scorer does


def test_a_candidate_is_told_whole_in_a_narrow_console():
    memory, bounds = {"total": 20.0 * GIB}, {"tokens_per_second": 123456.0, "mfu": 0.4567, "by": "interconnect"}
    candidate = {
        "mesh": {axis: 1024 for axis in planning.MESH_AXES},
        "remat": "nothing",
        "micro_rows": 16,
        "memory": memory,
    }
    console = Console(file=io.StringIO(), width=30)
    show(planning.tables_of_search([candidate | {"bounds": bounds}, candidate | {"bounds": None}], None), console)
    for cell in (" x ".join(["1024"] * len(planning.MESH_AXES)), "123,456", "45.7%", "interconnect", "does not fit"):
        assert cell in console.file.getvalue()


def test_a_search_keeps_the_best_of_every_stage(monkeypatch, file):
    """Without a compiler: 2 x fsdp does not fit, `dots` is faster than `full`, two rows a device are faster still."""
    from jprm.experiment import load

    def plan(experiment, topology, scoring, say):
        mesh, data = experiment.mesh, experiment.data
        fits = mesh.data == 1 and experiment.model.remat != "nothing" and data.micro_rows <= 16
        speed = data.micro_rows + (experiment.model.remat == "dots") - mesh.tensor
        memory = {"total": 20.0, "available": 30.0 if fits else 10.0}
        return {"made": experiment, "memory": memory, "bounds": {"tokens_per_second": speed} if fits else None}

    monkeypatch.setattr(planning, "plan", plan)
    whole = load(file, ["data.rows=32"])
    plans, best = planning.search(whole, topologies.find("v5e-8"))
    assert best["made"].mesh == MeshConfig(1, 8, 1)
    assert (best["made"].model.remat, best["made"].data.micro_rows) == ("dots", 16)
    assert len(plans) == len({plan["made"] for plan in plans}) > 6
    assert {plan["made"].mesh.tensor for plan in plans} == {1, 2, 4}  # 8 does not divide the key-value heads
    with pytest.raises(ValueError, match="data.rows=9"):
        planning.search(load(file, ["data.rows=9", "data.micro_rows=9"]), topologies.find("v5e-8"))


def test_layer_sizes_are_of_one_layer():
    model = dataclasses.replace(TINY, layers=3)
    mesh = jax.sharding.AbstractMesh((1, 2, 2, 1, 1), MESH_AXES, axis_types=(AxisType.Explicit,) * 5)
    from jprm.apps.plan.plan import layer_sizes

    with jax.sharding.use_abstract_mesh(mesh):
        params = jax.eval_shape(lambda: transformer.init(model, jax.random.key(0)))
    sizes = layer_sizes(params, mesh)
    D, F = model.width, model.mlp_width
    assert {D, D * F // 2, D * model.heads * model.head_dim // 2} <= sizes and D * F not in sizes
