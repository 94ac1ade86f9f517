"""`jprm.Trainer`: the loop's steps by hand, sweeps that compile once, longer runs, callbacks."""

import contextlib
import dataclasses
import itertools
import json
import shutil

import jax
import numpy as np
import pytest
from refusing import refused
from test_step import ROWS
from tiny_run import equal, experiment, lines, params, save_tokenizer, training

import jprm
from jprm.experiment import read
from jprm.io.storage import path_of
from jprm.train.batches import empty_rows
from jprm.train.callbacks import Profile
from jprm.train.state import make_step, schedule


def test_by_hand_is_the_loop(tiny_run, tmp_path, one_device):
    run = tiny_run.experiment
    with jprm.Trainer(run, tmp_path / "run") as trainer:
        sums = [trainer.step(rows) for rows in itertools.islice(trainer.batches, 3)]
        trainer.save()
    with jprm.Trainer(run, tmp_path / "run") as trainer:  # continues
        assert int(trainer.state.step) == 3
        sums += [trainer.step(rows) for rows in itertools.islice(trainer.batches, 3)]
        values = trainer.evaluate()
        trainer.save()
    assert equal(params(tmp_path / "run"), params(tiny_run.folder))
    wanted = {name: tiny_run.result[name] for name in values}
    assert values == wanted
    assert set(values) == {f"valid_{name}" for name in ("loss", "step_accuracy", "auroc", "labels")}
    rates = [line["learning_rate"] for line in lines(tiny_run.folder) if "loss" in line]
    assert [float(metrics.learning_rate) for metrics in sums][1::2][:1] == rates[:1]
    assert set(sums[-1].means()) == {"loss", "step_accuracy", "auroc"}


def test_a_trainer_takes_another_run_s_parameters(tiny_run, one_device):
    """Its step and its optimizer stay as they are."""
    trainer = jprm.Trainer(tiny_run.experiment)
    before = trainer.evaluate()
    assert before["valid_loss"] == pytest.approx(np.log(2), rel=1e-5)  # a head of zeros
    assert before["valid_labels"] == tiny_run.result["valid_labels"]
    refused(ValueError, "Trainer", trainer.save)  # without a folder
    before = jax.tree.map(np.asarray, trainer.state.optimizer)
    assert not equal(jax.tree.map(np.asarray, trainer.params), params(tiny_run.folder))
    assert trainer.take(tiny_run.folder) == 6
    assert equal(jax.tree.map(np.asarray, trainer.params), params(tiny_run.folder))
    assert int(trainer.state.step) == 0 and equal(jax.tree.map(np.asarray, trainer.state.optimizer), before)


def test_own_arrays_and_an_own_function(tmp_path, one_device):
    """Without data: the experiment's files are not there."""
    notebook, rows = in_a_notebook(tmp_path, steps=9)
    run, seen = notebook.experiment, []

    def objective(params, rows, config):
        seen.append(config)
        return training.objectives.find("squared_error")(params, rows, config)

    trainer = jprm.Trainer(run, objective=objective)
    batch = jax.tree.map(lambda x: x[0], rows)
    losses = [trainer.step(batch).means()["loss"] for _ in range(8)]
    assert losses[-1] < losses[0] and int(trainer.state.step) == 8
    assert seen and set(seen) == {run.task}
    metrics = trainer.step(empty_rows(2, 64, 16))
    assert metrics.count == metrics.gradient_norm == 0


def test_a_sweep_over_rates_and_schedules_compiles_once(tiny_run, tmp_path, one_device):
    optimizer, steps = tiny_run.experiment.optimizer, set()
    first = next(jprm.Trainer(tiny_run.experiment).batches)
    make_step.cache_clear()
    for i, (rate, decay) in enumerate([(0.1, "cosine"), (0.01, "linear"), (0.001, "constant")]):
        changed = dataclasses.replace(optimizer, learning_rate=rate, decay=decay, warmup_steps=i)
        trainer = jprm.Trainer(dataclasses.replace(tiny_run.experiment, optimizer=changed, steps=6 + i))
        metrics = [trainer.step(first) for _ in range(3)]
        steps.add(trainer._step)
        wanted = [np.float32(schedule(changed, 6 + i)(n)) for n in range(3)]
        np.testing.assert_allclose([metric.learning_rate for metric in metrics], wanted, rtol=1e-6)
    assert len(steps) == 1 and steps.pop()._cache_size() == 1


def test_a_run_may_be_made_longer(tiny_run, tmp_path, one_device):
    """From the last checkpoint, with the schedule of the new number of steps."""
    shutil.copytree(tiny_run.folder, tmp_path / "run")
    longer = dataclasses.replace(tiny_run.experiment, steps=10, log_every=1)
    seen = []
    result = training.train(longer, tmp_path / "run", callbacks=[seen.append])
    assert result["step"] == 10 and jprm.load(tmp_path / "run").step == 10
    rates = [line["learning_rate"] for line in seen if "loss" in line]
    np.testing.assert_allclose(rates, [schedule(longer.optimizer, 10)(n) for n in range(6, 10)], rtol=1e-6)
    assert seen == lines(tmp_path / "run")[-len(seen) :]
    assert json.loads((tmp_path / "run" / "experiment.json").read_text())["steps"] == 10


def test_skipped_steps_do_not_advance_the_schedule(tiny_run, one_device):
    skipping = dataclasses.replace(tiny_run.experiment.optimizer, bad_steps="skip")
    trainer = jprm.Trainer(dataclasses.replace(tiny_run.experiment, optimizer=skipping))
    rows = next(trainer.batches)
    metrics = [trainer.step(batch) for batch in (rows, spoilt(rows), spoilt(rows), rows)]
    assert [int(metric.skipped) for metric in metrics] == [0, 1, 1, 0]
    rate = schedule(skipping, 6)
    np.testing.assert_allclose([m.learning_rate for m in metrics], [rate(n) for n in (0, 1, 1, 1)], rtol=1e-6)


def in_a_notebook(tmp_path, **changes):
    """A trainer without data, and the rows of its steps."""
    save_tokenizer(tmp_path / "tokenizer.json")
    run = experiment(tmp_path, **(dict(tokens=64, slots=16, rows=2, micro_rows=2) | changes))
    return jprm.Trainer(run), jax.tree.map(lambda x: x[:1], ROWS)


def spoilt(rows):
    return dataclasses.replace(rows, weight=rows.weight * np.float32("nan"))


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("step_end", 9999, r"rows.step_end\[0"),
        ("tokens", 10**6, r"rows.tokens\[0"),
        ("tokens", -1, r"rows.tokens\[0"),
        ("parent", 16, r"rows.parent\[0"),
        ("until", 3, r"rows.until\[0"),
        ("position", 64, r"rows.position\[0"),
    ],
)
def test_rows_that_do_not_index_into_themselves_are_refused(field, value, message, tmp_path, one_device):
    trainer, rows = in_a_notebook(tmp_path)
    array = np.array(getattr(rows, field))
    array[0, 1, 3] = value
    plain = dataclasses.replace(rows, tokens=rows.tokens.astype(np.float32))
    refused(ValueError, message, trainer.step, dataclasses.replace(rows, **{field: array}))
    refused(ValueError, "rows.label", trainer.step, dataclasses.replace(rows, label=rows.label[..., :8]))
    refused(ValueError, "rows.tokens", trainer.measure, plain, trainer.objective)
    assert int(trainer.state.step) == 0
    assert np.isfinite(trainer.step(rows).means()["loss"])


def test_a_bad_step_leaves_the_last_good_state(tmp_path, one_device):
    trainer, rows = in_a_notebook(tmp_path)
    trainer.step(rows)
    good = jax.tree.map(np.array, (trainer.state.step, trainer.state.trained, trainer.state.optimizer))
    bad = trainer.step(spoilt(rows))
    assert np.isnan(bad.means()["loss"]) and not np.isfinite(bad.gradient_norm)
    assert equal((trainer.state.step, trainer.state.trained, trainer.state.optimizer), good)
    assert np.isfinite(trainer.step(rows).means()["loss"]) and int(trainer.state.step) == 2


def test_losses_of_small_weights_are_divided_by_their_count(tmp_path, one_device):
    """Weights are relative: multiplied by 0.05, where the count of a few labels is below 1, nothing changes."""
    trainer, rows = in_a_notebook(tmp_path)
    apart, _ = in_a_notebook(tmp_path)
    few = dataclasses.replace(rows, weight=rows.weight * (np.cumsum(rows.weight).reshape(rows.weight.shape) <= 3))
    light = dataclasses.replace(few, weight=few.weight * np.float32(0.05))
    assert few.weight.sum() == 3
    both = (trainer, few), (apart, light)
    values = [(run.measure(batch, run.objective), run.step(batch).means()) for run, batch in both]
    for whole, part in zip(*values, strict=True):
        assert part["loss"] == pytest.approx(whole["loss"], rel=1e-5) == pytest.approx(np.log(2), rel=1e-4)
        assert part["step_accuracy"] == pytest.approx(whole["step_accuracy"])
    trained, other = (jax.tree.map(np.asarray, run.state.trained) for run in (trainer, apart))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), trained, other)


def test_evaluating_without_validation_data_is_an_error(tmp_path, one_device):
    trainer, rows = in_a_notebook(tmp_path, valid=())
    refused(ValueError, "data.valid", trainer.evaluate)
    refused(ValueError, "objective", trainer.measure, jax.tree.map(lambda x: x[:0], rows), trainer.objective)


@pytest.mark.parametrize("decay", ["cosine", "constant"])
def test_a_step_after_the_last_would_learn_nothing(decay, tmp_path, one_device):
    optimizer = dataclasses.replace(experiment(tmp_path).optimizer, decay=decay)
    trainer, rows = in_a_notebook(tmp_path, steps=2, optimizer=optimizer)
    rates = [float(trainer.step(rows).learning_rate) for _ in range(2)]
    assert min(rates) > 0
    if decay == "constant":
        assert trainer.step(rows).learning_rate > 0
    else:
        refused(ValueError, "2 steps", trainer.step, rows)
    skipping = dataclasses.replace(optimizer, bad_steps="skip")
    trainer, _ = in_a_notebook(tmp_path, steps=2, optimizer=skipping)
    assert [int(trainer.step(batch).skipped) for batch in (spoilt(rows), rows, rows)] == [1, 0, 0]


def mean_and_extremes(params, rows, config):
    """An objective that judges two scores: the model's, and its opposite."""
    loss, count, metrics = training.objectives.find("cross_entropy")(params, rows, config)
    scores = metrics["scores"]
    return loss, count, {"scores": scores, "opposite": dataclasses.replace(scores, score_BS=1 - scores.score_BS)}


def test_two_judged_scores_have_names_of_their_own(tmp_path, one_device):
    trainer, rows = in_a_notebook(tmp_path)
    trainer = jprm.Trainer(dataclasses.replace(trainer.experiment, steps=20), objective=mean_and_extremes)
    for _ in range(9):
        trainer.step(rows)
    for values in (trainer.step(rows).means(), trainer.measure(rows, trainer.objective)):
        judged = {"step_accuracy", "auroc", "opposite_step_accuracy", "opposite_auroc"}
        assert set(values) - {"labels"} == {"loss", *judged}
        assert values["auroc"] != 0.5 and values["opposite_auroc"] == pytest.approx(1 - values["auroc"], abs=1e-6)


@dataclasses.dataclass(frozen=True)
class Scaled:
    factor: float = 1.0

    def __call__(self, params, rows, config):
        loss, count, metrics = training.objectives.find("cross_entropy")(params, rows, config)
        return self.factor * loss, count, metrics


@pytest.mark.breadth
def test_a_run_records_the_objective_that_was_given(tiny_run, tmp_path, one_device):
    def recorded(folder, objective, **changes):
        with jprm.Trainer(dataclasses.replace(tiny_run.experiment, **changes), folder, objective=objective) as trainer:
            trainer.step(next(trainer.batches))
            trainer.save()
        saved = read(folder / "experiment.json")
        return saved.objective, dict(saved.objective_options)

    local = lambda *args: mean_and_extremes(*args)  # noqa: E731
    assert recorded(tmp_path / "a", mean_and_extremes) == ("test_trainer:mean_and_extremes", {})
    assert recorded(tmp_path / "b", Scaled(2.0)) == ("test_trainer:Scaled", {"factor": 2.0})
    assert recorded(tmp_path / "d", local)[0].endswith("<locals>.<lambda>")
    for name, same in (("a", mean_and_extremes), ("b", Scaled(2.0)), ("d", local)):
        refused(ValueError, "test_trainer:.*cross_entropy", training.train, tiny_run.experiment, tmp_path / name)
        with jprm.Trainer(tiny_run.experiment, tmp_path / name, objective=same) as trainer:
            assert int(trainer.state.step) == 1
    assert np.isfinite(jprm.load(tmp_path / "d").score("p0 1", ["add 1"])).all()


@pytest.mark.parametrize(
    ("window", "first", "last", "traced"),
    [
        ((0, 0), 1, 4, []),
        ((2, 3), 1, 4, ["begin 2", "end 3"]),
        ((2, 3), 3, 4, ["begin 3", "end 3"]),  # the run continues inside the window
        ((2, 9), 1, 4, ["begin 2", "end 4"]),  # an error, or the last step, comes before the window ends
        ((2, 3), 4, 5, []),
    ],
)
def test_a_profile_traces_its_window_once(tmp_path, monkeypatch, window, first, last, traced):
    events, step = [], first
    monkeypatch.setattr(jax.profiler, "start_trace", lambda folder: events.append(f"begin {step}"))
    monkeypatch.setattr(jax.profiler, "stop_trace", lambda: events.append(f"end {step}"))
    with contextlib.suppress(KeyError), contextlib.closing(Profile(path_of(tmp_path), window)) as profile:
        for step in range(first, last + 1):
            profile.before(step)
            profile.after(step, np.zeros(1))
        raise KeyError
    assert events == traced
