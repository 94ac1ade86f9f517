"""Every experiment file: it can be made, one step of it runs in the small, and its whole step type-checks in the large.

A new file in experiments/ is tested without a change here.
"""

import dataclasses
import functools
import math
import re
from pathlib import Path

import jax
import pytest
from families import breadth
from jax.sharding import AbstractMesh, AxisType
from tiny_run import MODEL, chains, make_data, trees

import jprm
from jprm.experiment import from_json, load, names_in, override, to_json
from jprm.io.jsonl import write_records
from jprm.methods.rl.config import RLExperiment
from jprm.model.config import DeltaNetConfig
from jprm.model.mesh import MESH_AXES, MeshConfig, check_mesh
from jprm.train import train

FILES = sorted(Path(__file__).resolve().parents[2].joinpath("experiments").glob("*.py"))
SIZES = ("vocab_size", "width", "heads", "kv_heads", "head_dim", "mlp_width")
NAMES = [path.stem for path in FILES if re.search(r"def experiment\(.*-> Experiment:", path.read_text())]


@functools.cache
def experiment_of(name):
    """The experiment, or the reason why its base model is not here."""
    try:
        return load(next(path for path in FILES if path.stem == name))
    except FileNotFoundError as error:
        return error


@pytest.fixture(params=NAMES)
def whole(request):
    experiment = experiment_of(request.param)
    if isinstance(experiment, FileNotFoundError):
        pytest.skip(f"needs its base model: {experiment}")
    return experiment


def test_there_are_experiments():
    assert "prm800k_smollm2" in NAMES


@pytest.mark.parametrize("file", [path for path in FILES if path.stem not in NAMES], ids=lambda path: path.stem)
def test_an_experiment_of_reinforcement_learning_is_a_record_too(file, tmp_path):
    names = names_in(file)
    names["write_shapes"](tmp_path)
    whole = names["experiment"](tmp_path)
    assert from_json(RLExperiment, to_json(whole)) == whole


def test_it_is_a_record_that_json_and_the_command_line_can_hold(whole):
    assert from_json(type(whole), to_json(whole)) == whole
    short = override(whole, ["steps=3", "optimizer.learning_rate=1e-9"])
    assert (short.steps, short.optimizer.learning_rate) == (3, 1e-9)


def records_for(experiment):
    """Records with the labels that the experiment asks for."""
    if experiment.data.supervise == "outcome":
        return [{key: chain[key] for key in chain if key not in ("labels", "semantics")} for chain in chains(8)]
    if experiment.target.labels == "rating":
        return trees(8)
    labelled = [(tree, [node | {"label": (node["label"] + 1) / 2} for node in tree["nodes"]]) for tree in trees(8)]
    return [tree | {"semantics": experiment.target.labels, "nodes": nodes} for tree, nodes in labelled]


def in_the_small(whole, folder):
    """The same options with two groups of layers as narrow as the tests have, rows as short, and made-up records."""
    groups = tuple(1 for _ in whole.model.layer_groups)  # a freezing rule names groups
    attention = "blocked" if whole.model.attention == "kernel" else whole.model.attention  # a CPU would interpret it
    nested = {}
    if whole.model.deltanet.key_heads:
        nested["deltanet"] = DeltaNetConfig(2, 4, 4, 6, chunk=16)
    if whole.model.experts.count:
        nested["experts"] = dataclasses.replace(whole.model.experts, count=4, used=2, width=8, balance=0.0)
    model = dataclasses.replace(
        whole.model, rotary_dim=min(whole.model.rotary_dim, 2), **nested, layers=len(groups), layer_groups=groups,
        attention=attention,
        attention_block=MODEL.attention_block, **{name: getattr(MODEL, name) for name in SIZES},
    )  # fmt: skip
    micro = min(whole.data.micro_rows, 4)  # as many micro-batches, of fewer rows
    data = dataclasses.replace(
        whole.data, train=(str(folder / "train.jsonl"),), valid=(), tokens=128, slots=32, window=8, micro_rows=micro,
        rows=whole.data.rows // whole.data.micro_rows * micro,
    )  # fmt: skip
    return dataclasses.replace(
        whole, model=model, data=data, mesh=MeshConfig(), base="", base_dtype="float32",
        tokenizer=str(folder / "tokenizer.json"), steps=1, log_every=1,
    )  # fmt: skip


@pytest.mark.parametrize("whole", breadth(NAMES, but=["tiny"]), indirect=True)
def test_one_step_of_it_runs_in_the_small(whole, tmp_path, one_device):
    folder = make_data(tmp_path / "data")
    small = in_the_small(whole, folder)
    write_records(folder / "train.jsonl", records_for(small))
    result = train(small, tmp_path / "run")
    assert result["step"] == 1 and result["labels"] > 0
    if whole.objective == "cross_entropy":  # a head of zeros knows nothing, one that was fitted does
        zero = math.isclose(result["loss"], math.log(2), rel_tol=1e-5)
        assert result["loss"] < math.log(2) if whole.probe_rows else zero
    assert result["gradient_norm"] > 0 and result["learning_rate"] > 0
    assert jprm.load(tmp_path / "run").step == 1


@pytest.mark.parametrize("adapters", [False, *breadth([True])], ids=["its own", "adapters"])
def test_its_step_type_checks_in_the_large(whole, adapters):
    """By shapes only: nothing is allocated, nothing compiled, though the mesh be a pod's.

    Adapters are trained by two devices a row, unless a layer is recurrent, which refuses rows in parts.
    """
    rank = 8 * (adapters or whole.rereads)
    devices_a_row = 1 if "deltanet" in whole.model.mixers else 2
    shape = (1, 1, 1, devices_a_row, 1) if adapters else (1, whole.data.micro_rows, whole.mesh.tensor, 1, 1)
    micro = max(whole.data.micro_rows, shape[0])
    rows = max(whole.data.rows, micro)
    whole = override(whole, [f"lora.rank={rank}", f"data.micro_rows={micro}", f"data.rows={rows}"])
    if shape[3] > 1 and whole.model.attention == "paths":  # which takes whole rows
        whole = override(whole, ["model.attention=blocked"])
    mesh = AbstractMesh(shape, MESH_AXES, axis_types=(AxisType.Explicit,) * 5)
    check_mesh(whole.model, mesh, micro, whole.data.tokens)
    step, arguments = pytest.importorskip("jprm.apps.plan.plan").training_step(whole, mesh)
    with jax.sharding.use_abstract_mesh(mesh):
        after, metrics = jax.eval_shape(step, *arguments)
    state = arguments[0]
    form = lambda tree: jax.tree.map(lambda x: (x.shape, x.dtype), tree)  # noqa: E731
    place = lambda tree: jax.tree.map(lambda x: x.sharding.spec, tree)  # noqa: E731
    assert form(after) == form(state)
    assert place(after.trained) == place(state.trained)
    assert metrics.loss.shape == ()
    frozen = sum(x.size for x in jax.tree.leaves(state.frozen))
    assert frozen > 0 or not (whole.optimizer.freeze or rank)
    if rank:
        assert sum(x.size for x in state.trained.values()) < 0.2 * frozen
