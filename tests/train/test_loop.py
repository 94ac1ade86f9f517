"""Training runs from files to result.json: outputs, resume and refusals."""

import dataclasses
import gc
import json
import math
import shutil
import signal
import subprocess
import sys

import jax
import numpy as np
import pytest
import tiny_run as tiny
from refusing import refused
from tiny_run import assert_same_run, chains, equal, experiment, lines, make_data, one_device, params, training, trees

import jprm
from jprm.experiment import OptimizerConfig, TargetConfig, override
from jprm.io.jsonl import write_records
from jprm.methods.evaluate.steps import steps_report
from jprm.model.mesh import MeshConfig
from jprm.train.callbacks import Diverged, Log
from jprm.train.state import initial_state
from jprm.tree import read_records, tree_of

KEYS = {
    "step", "loss", "step_accuracy", "auroc", "learning_rate", "gradient_norm", "labels", "labels_per_second",
    "tokens_per_second",
}  # fmt: skip


def copy_of(run, tmp_path, step=None):
    """A copy of a run's folder; with `step`, as it was after the checkpoint of that step."""
    folder = tmp_path / "run"
    shutil.copytree(run.folder, folder)
    for path in (folder / "checkpoints").iterdir():
        if step is not None and int(path.name) > step:
            shutil.rmtree(path)
    return folder


def steps_of(folder):
    """The steps of the checkpoints that are there."""
    return sorted(int(path.name) for path in (folder / "checkpoints").glob("*") if path.name.isdigit())


def test_a_run_writes_its_metrics_result_and_checkpoints(tiny_run):
    log = lines(tiny_run.folder)
    training = [line for line in log if "loss" in line]
    # Every second step, and the third and sixth, where a checkpoint is.
    assert [line["step"] for line in training] == [2, 3, 4, 6]
    for line in training:
        assert line.keys() >= KEYS
        assert all(math.isfinite(line[key]) for key in KEYS)
        assert line["labels"] > 0
    assert training[-1]["loss"] < training[0]["loss"]
    assert [line["step"] for line in log if "valid_auroc" in line] == [6]
    assert tiny_run.result == json.loads((tiny_run.folder / "result.json").read_text())
    assert tiny_run.result == {**training[-1], **log[-1]}
    assert steps_of(tiny_run.folder) == [3, 6]
    assert json.loads((tiny_run.folder / "experiment.json").read_text())["name"] == "tiny"


def test_validation_is_what_the_evaluation_says(tiny_run, one_device):
    prm = jprm.load(tiny_run.folder)
    records = list(prm.score_many(read_records(tiny_run.experiment.data.valid[0])))
    report = steps_report(list(map(tree_of, records)), "positive", seed=0)
    assert tiny_run.result["valid_labels"] == report["n_right"] + report["n_wrong"]
    assert tiny_run.result["valid_step_accuracy"] == pytest.approx(report["accuracy"]["value"], abs=1e-9)
    # Rows of another length change a score's last digits, which may swap a pair or two of some hundreds.
    assert tiny_run.result["valid_auroc"] == pytest.approx(report["auroc"]["value"], abs=5e-3)


CHILD = """
import os, pathlib, signal, sys
import jax
jax.config.update("jax_num_cpu_devices", 8)
sys.path.insert(0, sys.argv[1])
import tiny_run as tiny
put_rows, steps = tiny.training.put_rows, []
def put(*args, lead=0):
    steps.append(lead)
    if steps.count(1) == 6:
        os.kill(os.getpid(), signal.SIGKILL)
    return put_rows(*args, lead=lead)
tiny.training.put_rows = put
data = pathlib.Path(sys.argv[2])
with tiny.one_device():
    tiny.training.train(tiny.experiment(data, **eval(sys.argv[3])), sys.argv[4])
"""


@pytest.mark.breadth
def test_a_killed_run_continues_exactly(tmp_path, request, one_device):
    """It ends before its sixth step, while its second checkpoint may be half written."""
    data, killed, whole = make_data(tmp_path / "data"), tmp_path / "killed", tmp_path / "whole"
    # Checkpoints lie between lines of the log and in the middle of a window of packed trees.
    changes = dict(steps=12, log_every=3, checkpoint_every=2, valid_every=5)
    code = [sys.executable, "-c", CHILD, str(request.config.rootpath / "tests"), str(data), repr(changes), str(killed)]
    child = subprocess.run(code, capture_output=True, text=True, timeout=600)
    assert child.returncode == -signal.SIGKILL, child.stderr
    assert 2 in steps_of(killed) and max(steps_of(killed)) <= 4 and not (killed / "result.json").exists()

    result = training.train(experiment(data, **changes), killed)
    training.train(experiment(data, **changes), whole)
    assert_same_run(killed, whole)
    assert tiny.untimed([result]) == tiny.untimed([json.loads((whole / "result.json").read_text())])


def test_metrics_are_read_one_step_late_and_nothing_is_compiled_after_the_first_step(tiny_run, tmp_path, monkeypatch):
    """So the device has its next step before the host waits for this one; a checkpoint waits for its own."""
    events, compiled, make, add = [], [], training.make_step, Log.add

    def making(*args):
        step = make(*args)

        def counted(state, rows, rate):
            done = step(state, rows, rate)
            events.append(("step", int(done[0].step)))
            compiled.append(step._cache_size())
            return done

        return counted

    def adding(log, step, *args, **options):
        events.append(("read", step))
        return add(log, step, *args, **options)

    with one_device():
        monkeypatch.setattr(training, "make_step", making)
        monkeypatch.setattr(Log, "add", adding)
        training.train(dataclasses.replace(tiny_run.experiment, steps=5, checkpoint_every=4, seed=3), tmp_path / "run")
    late = [("step", 1), ("step", 2), ("read", 1), ("step", 3), ("read", 2), ("step", 4), ("read", 3), ("read", 4)]
    assert events == [*late, ("step", 5), ("read", 5)]
    assert len(compiled) == 5 and len(set(compiled)) == 1


def test_a_mesh_gives_the_same_losses_and_checkpoints_go_to_another(tiny_run, tmp_path):
    """float32 sums over devices in another order; Adam makes up to a learning rate of a gradient that is about zero."""
    many, single = tmp_path / "many", tmp_path / "one"
    on_mesh = dataclasses.replace(tiny_run.experiment, mesh=MeshConfig(2, 2, 2), keep=9)
    training.train(on_mesh, many)
    assert steps_of(many) == [3, 6]

    def losses(folder):
        return np.array([line["loss"] for line in lines(folder) if "loss" in line])

    np.testing.assert_allclose(losses(many)[0], losses(tiny_run.folder)[0], rtol=1e-5)
    np.testing.assert_allclose(losses(many), losses(tiny_run.folder), rtol=1e-3)

    shutil.copytree(many, single)
    shutil.rmtree(single / "checkpoints" / "6")
    with one_device():
        training.train(tiny_run.experiment, single)
    np.testing.assert_allclose(losses(single), losses(many), rtol=1e-3)
    # The other way: one device's checkpoint, in pieces on eight.
    prm = jprm.load(tiny_run.folder)
    assert {len(x.addressable_shards) for x in jax.tree.leaves(prm.params)} == {8}
    assert equal(jax.tree.map(np.asarray, prm.params), params(tiny_run.folder))


def test_a_run_can_start_from_another_run(tiny_run, one_device, capsys):
    """A PRM goes on with its head; another head begins at zero, and that is said."""
    begun = dataclasses.replace(tiny_run.experiment, base=str(tiny_run.folder))
    trained = params(tiny_run.folder)
    with jax.set_mesh(training.make_mesh(begun.mesh)):
        assert equal(initial_state(begun).params, trained) and np.any(trained["head"]["kernel"])
        assert "head" not in capsys.readouterr().out
        two = initial_state(dataclasses.replace(begun, model=dataclasses.replace(begun.model, head="ternary"))).params
    assert equal(two["decoder"], trained["decoder"]) and not np.any(two["head"]["kernel"])
    assert f"the head of {tiny_run.folder} is not used" in capsys.readouterr().out
    other = dataclasses.replace(begun, model=dataclasses.replace(begun.model, rope_theta=5.0))
    with jax.set_mesh(training.make_mesh(begun.mesh)), pytest.raises(ValueError, match="model.rope_theta=100.0"):
        initial_state(other)


def test_the_folder_of_another_experiment_is_refused(tiny_run, tmp_path, one_device):
    folder = copy_of(tiny_run, tmp_path)
    before = (folder / "experiment.json").read_bytes()
    other = override(tiny_run.experiment, ["seed=7", "optimizer.b2=0.5"])
    message = r"\(optimizer.b2: 0.95 there, 0.5 here; seed: 0 there, 7 here\)"
    refused(ValueError, message, training.train, other, folder)
    assert (folder / "experiment.json").read_bytes() == before
    # What changes neither the parameters nor the order of the data may differ.
    assert training.train(dataclasses.replace(tiny_run.experiment, log_every=1, keep=5), folder) == tiny_run.result
    assert lines(folder) == lines(tiny_run.folder)  # it was finished


def test_a_run_goes_on_with_its_own_tokenizer_alone(tiny_run, tmp_path, one_device):
    folder, path = copy_of(tiny_run, tmp_path), tmp_path / "moved" / "tokenizer.json"
    path.parent.mkdir()
    shutil.copy(tiny_run.experiment.tokenizer, path)
    moved = dataclasses.replace(tiny_run.experiment, tokenizer=str(path))
    assert training.train(moved, folder) == tiny_run.result  # it lies elsewhere, and is the same
    before = (folder / "tokenizer.json").read_bytes()
    content = json.loads(path.read_text("utf-8"))
    swapped = {"a": content["model"]["vocab"]["b"], "b": content["model"]["vocab"]["a"]}
    content["model"]["vocab"] |= swapped
    path.write_text(json.dumps(content))
    refused(ValueError, "run/tokenizer.json", training.train, moved, folder)
    assert (folder / "tokenizer.json").read_bytes() == before


# A restore that fails leaves reads of Orbax behind; they end, with warnings, when they are collected.
@pytest.mark.breadth
@pytest.mark.filterwarnings("ignore:coroutine", "ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_damaged_checkpoint_is_named_and_the_one_before_it_goes_on(tiny_run, tmp_path, one_device):
    folder = copy_of(tiny_run, tmp_path)
    newest = folder / "checkpoints" / "6"
    refused = []
    for path in sorted(path for path in newest.rglob("*") if path.is_file()):
        content = path.read_bytes()
        path.write_bytes(content[: len(content) // 2])
        try:
            training.train(tiny_run.experiment, folder)
        except ValueError as error:
            assert str(newest) in str(error) and "remove that folder" in str(error)
            assert "\n" not in str(error)
            refused.append(path)
        else:  # a file that nothing is read from
            assert equal(params(folder), params(tiny_run.folder))
        path.write_bytes(content)
    largest = max(newest.rglob("*"), key=lambda path: path.stat().st_size)
    assert largest in refused

    shutil.rmtree(newest)
    training.train(tiny_run.experiment, folder)
    assert equal(params(folder), params(tiny_run.folder))
    gc.collect()


def test_a_checkpoint_and_a_line_of_the_log_that_were_not_finished_are_ignored(tiny_run, tmp_path, one_device):
    folder = copy_of(tiny_run, tmp_path, step=3)
    half = folder / "checkpoints" / "6.orbax-checkpoint-tmp"
    shutil.copytree(tiny_run.folder / "checkpoints" / "6" / "params", half / "params")
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 7, "lo')
    assert jprm.load(folder).step == 3
    assert half.exists()  # a reader must not disturb a run that is writing
    training.train(tiny_run.experiment, folder)
    assert_same_run(folder, tiny_run.folder)
    assert steps_of(folder) == [3, 6]


def test_a_rate_that_is_too_high_stops_before_anything_is_saved(tiny_run, tmp_path, one_device):
    rate = OptimizerConfig(learning_rate=1e30)
    wild = dataclasses.replace(tiny_run.experiment, optimizer=rate, checkpoint_every=1, valid_every=1)
    refused(Diverged, "step 1: .*optimizer.learning_rate", training.train, wild, tmp_path / "run")
    assert steps_of(tmp_path / "run") == []
    assert not (tmp_path / "run" / "result.json").exists()


def test_not_a_number_stops_the_run_at_its_step(tiny_run, tmp_path, one_device, monkeypatch):
    whole = training.make_step

    def broken(*args):
        step = whole(*args)

        def after(state, rows, rate):
            spoil = float("nan") if int(state.step) == 4 else 1.0
            trained = jax.tree.map(lambda x: x * spoil, state.trained)
            return step(dataclasses.replace(state, trained=trained), rows, rate)

        return after

    monkeypatch.setattr(training, "make_step", broken)
    spoilt = dataclasses.replace(tiny_run.experiment, checkpoint_every=2)
    refused(Diverged, "step 5: .*step 4", training.train, spoilt, tmp_path / "run")
    assert steps_of(tmp_path / "run") == [2, 4]
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(params(tmp_path / "run")))

    monkeypatch.setattr(training, "make_step", whole)  # the same run without the fault goes on from step 4
    training.train(spoilt, tmp_path / "run")
    assert equal(params(tmp_path / "run"), params(tiny_run.folder))


CORRECTNESS = TargetConfig("correctness", "none", "keep")


def test_no_data_is_refused(tmp_path, one_device):
    data = make_data(tmp_path / "data")
    (data / "train.jsonl").write_text("\n")
    refused(ValueError, "train.jsonl", training.train, experiment(data), tmp_path / "run")
    nowhere = experiment(data, train=(str(data / "nowhere.jsonl"),))
    refused(FileNotFoundError, "nowhere.jsonl", training.train, nowhere, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_labels_of_one_class_have_no_auroc(tmp_path, one_device):
    """NaN is no JSON: it is null."""
    data = make_data(tmp_path / "data")
    right = [tree | {"nodes": [node | {"label": 1} for node in tree["nodes"]]} for tree in trees(8)]
    write_records(data / "train.jsonl", right)
    write_records(data / "valid.jsonl", right)
    result = training.train(experiment(data), tmp_path / "run")
    assert result["auroc"] is None and result["valid_auroc"] is None
    json.loads((tmp_path / "run" / "result.json").read_text(), parse_constant=pytest.fail)


@pytest.mark.breadth
def test_outcomes_train_on_the_ends_of_chains_alone(tmp_path, one_device):
    data = make_data(tmp_path / "data")
    records = chains(4, longest=4)
    write_records(data / "train.jsonl", records)
    orm = experiment(data, supervise="outcome", target=CORRECTNESS, valid=())
    result = training.train(orm, tmp_path / "run")
    # The chains share a row, which is one epoch.
    labels = sum(line["labels"] for line in lines(tmp_path / "run"))
    assert labels == orm.steps * orm.data.rows * len(records)
    assert jprm.load(tmp_path / "run").semantics == "value"
    assert set(tiny.untimed([result])[0]) == KEYS - {"labels_per_second", "tokens_per_second"}


def test_data_without_a_label_are_refused(tmp_path, one_device):
    data = make_data(tmp_path / "data")
    write_records(data / "train.jsonl", [{k: v for k, v in c.items() if k != "correct"} for c in chains(8)])
    orm = experiment(data, supervise="outcome", target=CORRECTNESS, steps=2, log_every=1, valid=())
    refused(ValueError, "1 updates", training.train, orm, tmp_path / "run")
