"""`jprm.Trainer`: the loop's steps by hand, sweeps that compile once, longer runs, callbacks."""

import dataclasses
import itertools
import json
import shutil

import numpy as np
import pytest
from test_step import ROWS
from tiny_run import equal, experiment, lines, loop, params, save_tokenizer, trainer

import jprm
from jprm.data.pipeline import empty_rows
from jprm.train.optimizer import schedule
from jprm.train.step import make_step


def test_by_hand_is_the_loop(tiny_run, tmp_path, one_device):
    run = tiny_run.experiment
    with jprm.Trainer(run, tmp_path / "run") as made:
        sums = [made.step(rows) for rows in itertools.islice(made.batches, 3)]
        made.save()
    with jprm.Trainer(run, tmp_path / "run") as made:  # continues
        assert int(made.state.step) == 3
        sums += [made.step(rows) for rows in itertools.islice(made.batches, 3)]
        values = made.evaluate()
        made.save()
    assert equal(params(tmp_path / "run"), params(tiny_run.folder))
    wanted = {name: tiny_run.result[name] for name in values}
    assert values == wanted and set(values) == {
        "valid_loss", "valid_step_accuracy", "valid_auroc", "valid_labels",
    }  # fmt: skip
    rates = [line["learning_rate"] for line in lines(tiny_run.folder) if "loss" in line]
    assert [float(metrics.learning_rate) for metrics in sums][1::2][:1] == rates[:1]
    assert set(sums[-1].means()) == {"loss", "step_accuracy", "auroc"}


def test_validation_reports_the_loss(tiny_run, tmp_path, one_device):
    """The mean over all labels is what the objective gives for all rows at once."""
    made = jprm.Trainer(tiny_run.experiment)
    before = made.evaluate()
    assert before["valid_loss"] == pytest.approx(np.log(2), rel=1e-5)  # a head of zeros
    assert before["valid_labels"] == tiny_run.result["valid_labels"]
    with pytest.raises(ValueError, match="no folder; make it with Trainer"):
        made.save()


def test_own_arrays_and_an_own_function(tmp_path, one_device):
    """Without data: the experiment's files are not there."""
    run = experiment(tmp_path, tokens=64, slots=16, rows=2, micro_rows=2)
    save_tokenizer(tmp_path / "tokenizer.json")
    seen = []

    def objective(given, rows, config):
        seen.append(config)
        return trainer.objectives.find("squared_error")(given, rows, config)

    made = jprm.Trainer(run, objective=objective)
    one = dataclasses.replace(ROWS, **{k: x[0] for k, x in vars(ROWS).items() if k != "extras"})
    losses = [made.step(one).means()["loss"] for _ in range(8)]
    assert losses[-1] < losses[0] and int(made.state.step) == 8
    assert seen and set(seen) == {run.task}
    metrics = made.step(empty_rows(2, 64, 16))
    assert metrics.count == metrics.gradient_norm == 0


def test_a_sweep_over_rates_and_schedules_compiles_once(tiny_run, tmp_path, one_device):
    optimizer, steps = tiny_run.experiment.optimizer, set()
    first = next(jprm.Trainer(tiny_run.experiment).batches)
    make_step.cache_clear()
    for i, (rate, decay) in enumerate([(0.1, "cosine"), (0.01, "linear"), (0.001, "constant")]):
        changed = dataclasses.replace(optimizer, learning_rate=rate, decay=decay, warmup_steps=i)
        made = jprm.Trainer(dataclasses.replace(tiny_run.experiment, optimizer=changed, steps=6 + i))
        metrics = [made.step(first) for _ in range(3)]
        steps.add(made._step)
        wanted = [np.float32(schedule(changed, 6 + i)(n)) for n in range(3)]
        np.testing.assert_allclose([metric.learning_rate for metric in metrics], wanted, rtol=1e-6)
    assert len(steps) == 1 and steps.pop()._cache_size() == 1


def test_a_run_may_be_made_longer(tiny_run, tmp_path, one_device):
    """From the last checkpoint, with the schedule of the new number of steps."""
    shutil.copytree(tiny_run.folder, tmp_path / "run")
    longer = dataclasses.replace(tiny_run.experiment, steps=10, log_every=1)
    seen = []
    result = loop.train(longer, tmp_path / "run", callbacks=[seen.append])
    assert result["step"] == 10 and jprm.load(tmp_path / "run").step == 10
    rates = [line["learning_rate"] for line in seen if "loss" in line]
    np.testing.assert_allclose(rates, [schedule(longer.optimizer, 10)(n) for n in range(6, 10)], rtol=1e-6)
    assert seen == lines(tmp_path / "run")[-len(seen) :]
    assert json.loads((tmp_path / "run" / "experiment.json").read_text())["steps"] == 10


def test_skipped_steps_do_not_advance_the_schedule(tiny_run, one_device):
    skipping = dataclasses.replace(tiny_run.experiment.optimizer, bad_steps="skip")
    made = jprm.Trainer(dataclasses.replace(tiny_run.experiment, optimizer=skipping))
    rows = next(made.batches)
    bad = dataclasses.replace(rows, weight=rows.weight * np.float32("nan"))
    metrics = [made.step(some) for some in (rows, bad, bad, rows)]
    assert [int(metric.skipped) for metric in metrics] == [0, 1, 1, 0]
    rate = schedule(skipping, 6)
    np.testing.assert_allclose([m.learning_rate for m in metrics], [rate(n) for n in (0, 1, 1, 1)], rtol=1e-6)
