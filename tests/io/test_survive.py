"""Preemption: bad steps skipped exactly, stops that save, kept checkpoints, a watchdog that names the host."""

import dataclasses
import functools
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import storm
from refusing import refused
from tiny_run import equal, experiment, lines, make_data, params, training, untimed, write_experiment

import jprm
from jprm.experiment import OptimizerConfig
from jprm.model.parameters import peak
from jprm.train import Stopped, callbacks
from jprm.train.callbacks import SKIPS, Diverged, Goodput, Watchdog, held_up
from jprm.train.state import MEMORY, make_optimizer, schedule, skipped

PLAIN = OptimizerConfig(learning_rate=0.1, warmup_steps=2, weight_decay=0.1)
GUARDED = dataclasses.replace(PLAIN, bad_steps="skip", spike=4.0)


@functools.cache
def parts_of(config):
    tx = make_optimizer(config)
    return tx.init, jax.jit(tx.update), jax.jit(schedule(config, 1000))


def walk(config, gradients, losses):
    """The parameters after each update of a made-up problem of two numbers, and the optimizer's last state."""
    init, update, rate = parts_of(config)
    x = {"w": jnp.array([1.0, -2.0])}
    state, path = init(x), []
    for gradient, loss in zip(gradients, losses, strict=True):
        now = rate(len(path) - skipped(state))
        updates, state = update({"w": jnp.asarray(gradient)}, state, x, loss=jnp.float32(loss), rate=now)
        x = optax.apply_updates(x, updates)
        path.append(np.asarray(x["w"]))
    return path, state


@pytest.mark.parametrize(
    "bad", [([np.nan, 1.0], 1.0), ([np.inf, 1.0], 1.0), ([0.1, 0.1], np.nan), ([0.1, 0.1], np.inf)]
)
def test_a_step_that_is_not_finite_leaves_no_trace(bad):
    gradients, losses = [[0.3, -0.2], [0.1, 0.4], [-0.2, 0.1]], [1.0, 0.9, 0.8]
    clean, state = walk(GUARDED, gradients, losses)
    assert int(skipped(state)) == 0
    for at in range(3):
        path, state = walk(GUARDED, [*gradients[:at], bad[0], *gradients[at:]], [*losses[:at], bad[1], *losses[at:]])
        assert int(skipped(state)) == 1
        np.testing.assert_array_equal(path[at], path[at - 1] if at else [1.0, -2.0])
        np.testing.assert_array_equal(path[:at] + path[at + 1 :], clean)
    # Where nothing is bad, a guard changes no bit.
    np.testing.assert_array_equal(walk(PLAIN, gradients, losses)[0], clean)


def test_a_spike_is_measured_against_what_was_usual():
    usual = [([0.3, 0.4], 2.0)] * MEMORY  # norm 0.5
    for last, spike in [
        (([0.9, 1.2], 2.0), False),  # norm 1.5: three times the mean
        (([1.5, 2.0], 2.0), True),  # norm 2.5: five times
        (([0.3, 0.4], 7.9), False),
        (([0.3, 0.4], 8.1), True),
    ]:
        gradients, losses = zip(*usual, last, strict=True)
        assert int(skipped(walk(GUARDED, gradients, losses)[1])) == spike
        assert int(skipped(walk(GUARDED, gradients[1:], losses[1:])[1])) == 0  # one step short of the memory
    refused(ValueError, "optimizer.spike=0.5", OptimizerConfig, 0.1, spike=0.5)


def spoil(monkeypatch, *steps):
    """The weights in these steps are not a number, so the loss and its gradient are not."""
    whole = training.make_step

    def broken(*args):
        step = whole(*args)

        def after(state, rows, rate):
            if int(state.step) + 1 in steps:
                rows = dataclasses.replace(rows, weight=rows.weight * float("nan"))
            return step(state, rows, rate)

        return after

    monkeypatch.setattr(training, "make_step", broken)


def guarded(run, **changes):
    return dataclasses.replace(
        run.experiment, optimizer=dataclasses.replace(run.experiment.optimizer, bad_steps="skip"), **changes
    )


def test_a_bad_step_is_left_out_counted_and_survives_a_restart(tiny_run, tmp_path, one_device, monkeypatch):
    spoil(monkeypatch, 2)
    skipping = guarded(tiny_run, log_every=1)
    result = training.train(skipping, tmp_path / "run")
    assert [line.get("skipped_steps") for line in lines(tmp_path / "run")][:6] == [0, 1, 0, 0, 0, 0]
    assert np.isfinite(result["loss"]) and not equal(params(tmp_path / "run"), params(tiny_run.folder))
    before = params(tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "6")
    training.train(skipping, tmp_path / "run")
    assert equal(params(tmp_path / "run"), before)


def test_a_run_that_stopped_at_a_bad_step_goes_on_without_it(tiny_run, tmp_path, one_device, monkeypatch):
    """What is done about bad steps may change: the optimizer's state goes behind a guard, and comes out of it."""
    spoil(monkeypatch, 5)
    refused(Diverged, "step 5: .*bad_steps=skip", training.train, tiny_run.experiment, tmp_path / "run")
    training.train(guarded(tiny_run), tmp_path / "run")
    assert lines(tmp_path / "run")[-2]["skipped_steps"] == 1
    once = dataclasses.replace(tiny_run.experiment, checkpoint_every=1)
    training.train(once, tmp_path / "run")  # finished: it restores


def test_bad_steps_in_a_row_end_the_run(tiny_run, tmp_path, one_device, monkeypatch):
    spoil(monkeypatch, *range(2, 2 + SKIPS))
    data = dataclasses.replace(tiny_run.experiment.data, valid=())
    with pytest.raises(Diverged, match=f"step {1 + SKIPS}:"):
        training.train(guarded(tiny_run, steps=20, data=data), tmp_path / "run")


def test_sigterm_saves_and_the_run_goes_on_exactly(tiny_run, tmp_path, one_device, monkeypatch):
    put_rows, calls = training.put_rows, []

    def put(*args, **kwargs):
        calls.append(1)
        if len(calls) == 2:
            os.kill(os.getpid(), signal.SIGTERM)
        return put_rows(*args, **kwargs)

    monkeypatch.setattr(training, "put_rows", put)
    before = signal.getsignal(signal.SIGTERM)
    refused(Stopped, "SIGTERM: .*step 2", training.train, tiny_run.experiment, tmp_path / "run")
    assert signal.getsignal(signal.SIGTERM) is before
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == ["2"]
    assert not (tmp_path / "run" / "result.json").exists()
    training.train(tiny_run.experiment, tmp_path / "run")
    assert equal(params(tmp_path / "run"), params(tiny_run.folder))
    assert untimed(lines(tmp_path / "run")) == untimed(lines(tiny_run.folder))


def test_a_compiler_that_changes_in_mid_run_is_reported(tiny_run, tmp_path, one_device, monkeypatch, capfd):
    shutil.copytree(tiny_run.folder, tmp_path / "run")
    longer = dataclasses.replace(tiny_run.experiment, steps=7)
    before, after = callbacks.versions(), callbacks.versions() | {"jaxlib": "9.9.9", "libtpu": "0.0.99"}
    monkeypatch.setattr(callbacks, "versions", lambda: after)
    training.train(longer, tmp_path / "run")
    assert f"jaxlib {before['jaxlib']} -> 9.9.9" in capfd.readouterr().err


def test_a_checkpoint_says_what_it_is_and_some_are_kept(tiny_run, tmp_path, one_device):
    kept = dataclasses.replace(tiny_run.experiment, checkpoint_every=1, keep=1, keep_every=4)
    training.train(kept, tmp_path / "run")
    folder = tmp_path / "run" / "checkpoints"
    assert sorted(path.name for path in folder.iterdir()) == ["4", "6"]
    run = json.loads((folder / "6" / "run" / "data.json").read_text())
    assert run["experiment"]["name"] == "tiny" and run["experiment"]["keep_every"] == 4
    assert run["versions"]["jprm"] == jprm.__version__ and run["versions"]["jax"] == jax.__version__
    assert 0 < run["goodput"]["productive"] and run["goodput"]["began"] < time.time()
    assert run["versions"]["commit"] is None or len(run["versions"]["commit"]) >= 40
    refused(ValueError, "keep_every=4", dataclasses.replace, kept, checkpoint_every=3)


def test_goodput_counts_steps_over_all_the_time_since_the_first_start(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(callbacks, "time", types.SimpleNamespace(time=lambda: now[0], perf_counter=lambda: now[0]))

    def after(seconds, do, *args):
        now[0] += seconds
        do(*args)

    first = Goodput()
    after(30, first.step)  # the first step compiled
    after(2, first.step)
    after(2, first.step)
    after(5, first.rest)  # a checkpoint
    after(2, first.step)
    after(2, first.step, False)  # a step that was left out
    assert first.productive == 6 and first.fractions() == {"goodput": 6 / 43}
    first.add("saving", 5)
    again = Goodput(**json.loads(json.dumps(first.saved)))
    with again.doing("compiling"):
        now[0] += 7
    after(10, again.step)  # 10 s in the queue
    again.add("input", 1)
    after(4, again.step)
    parts = {"goodput": 9, "lost_compiling": 7, "lost_input": 1, "lost_saving": 5, "lost_stops": 42}
    assert again.fractions() == pytest.approx({name: seconds / 64 for name, seconds in parts.items()})


def test_a_run_says_where_its_time_goes(tiny_run):
    for line in (line for line in lines(tiny_run.folder) if "loss" in line):
        lost = [value for name, value in line.items() if name.startswith("lost_")]
        assert {"lost_starting", "lost_compiling"} <= line.keys() and sum(lost) + line["goodput"] == pytest.approx(1)
        assert "mfu" not in line and line.get("step_seconds_p50", 0) <= line.get("step_seconds_max", 0)
    assert peak("TPU v5 lite") < peak("TPU v5") and peak("NVIDIA H100 80GB HBM3") and peak("cpu") is None
    chips = pytest.importorskip("jprm.apps.plan.topologies").CHIPS
    others = ("NVIDIA A10G", "NVIDIA L40S", "NVIDIA GeForce RTX 3090 Ti", "NVIDIA GeForce RTX 4090 Laptop GPU")
    assert list(map(peak, others)) == [None] * 4 and peak("NVIDIA A100-SXM4-80GB") == chips["a100"].flops
    kinds = {"TPU v4": "v4", "TPU v5 lite": "v5e", "TPU v5": "v5p", "TPU v6 lite": "v6e", "NVIDIA A100": "a100",
             "NVIDIA GeForce RTX 3090": "rtx3090", "NVIDIA GeForce RTX 4090": "rtx4090", "NVIDIA L4": "l4",
             "NVIDIA GeForce RTX 5090": "rtx5090", "NVIDIA A10": "a10"}  # fmt: skip
    assert all(peak(kind) == chips[name].flops for kind, name in kinds.items())


HANGING = """
import pathlib, sys, time
from ctypes import PyDLL
from jprm import train as training
step, at, count, watchdogs = training.Trainer.step, training.Watchdog.at, [0], []
def seen(self, *args):
    watchdogs.append(self)
    at(self, *args)
def hangs(self, rows):
    count[0] += 1
    if count[0] == 4 and not pathlib.Path({mark!r}).exists():
        pathlib.Path({mark!r}).touch()
        self.checkpoints.wait()
        watchdogs[-1].seconds = 1  # only now: a busy machine may take long to get here
        watchdogs[-1].at(3, "step")
        PyDLL(None).sleep(100)  # in C, and it keeps the lock that other threads of Python need
    return step(self, rows)
training.Trainer.step, training.Watchdog.at = hangs, seen
from jprm.apps.cli import main
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.breadth
def test_a_process_whose_main_thread_hangs_ends_and_continues(tmp_path):
    prepared = make_data(tmp_path / "data")
    run = dataclasses.replace(
        experiment(prepared, valid=()), steps=6, checkpoint_every=2, stall_seconds=600, stall_action="abort"
    )
    write_experiment(tmp_path / "experiment.py", run)
    code = HANGING.format(mark=str(tmp_path / "hung"))
    command = [sys.executable, "-c", code, "train", str(tmp_path / "experiment.py"), "--workdir", str(tmp_path / "run")]
    environment = os.environ | {"JAX_NUM_CPU_DEVICES": "1"}  # the suite's own flags: its compiled programs are found
    first = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=400)
    assert first.returncode == 1, first.stderr[-2000:]  # no launcher takes it for final
    assert "Timeout" in first.stderr and "in hangs" in first.stderr
    second = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=400)
    assert second.returncode == 0 and "continuing from step 2" in second.stdout, second.stderr[-2000:]


def beat(step, doing="step", since=0.0, said=100.0, host="h", waits=False):
    return {"step": step, "doing": doing, "since": since, "time": said, "host": host, "pid": 7, "waits": waits}


@pytest.mark.parametrize(
    ("beats", "named"),
    [
        ([beat(5), beat(4, "data", 20, host="slow"), beat(5)], ["process 1 on slow", "step 4", "data", "80 s"]),
        ([beat(5), beat(5, "data", 20), beat(5)], ["process 1 on h", "data"]),
        ([beat(5), beat(5, said=30, since=10, host="gone")], ["no heartbeat", "process 1 on gone", "90 s"]),
        ([None, beat(5)], ["no heartbeat", "process 0"]),
        ([beat(5, "scoring", 20, waits=True), beat(5, "scoring", 20)], ["process 1 on h", "scoring"]),
        ([beat(5), beat(5)], ["all 2 processes"]),
    ],
)
def test_the_watchdog_names_who_is_waited_for(beats, named):
    said = held_up(dict(enumerate(beats)), now=100.0, seconds=60)
    assert "60 s at step 5" in said and all(name in said for name in named)


def test_the_watchdog_speaks_once_a_stall(tmp_path, monkeypatch, capsys):
    """The clock stops between three beats, or process 0 could miss its own heartbeat on a busy machine."""
    now, own = [100.0], tmp_path / "heartbeats" / "0.json"
    monkeypatch.setattr(callbacks.jax, "process_count", lambda: 2)
    monkeypatch.setattr(callbacks, "time", types.SimpleNamespace(time=lambda: now[0]))
    watchdog = Watchdog(tmp_path, 0.2)
    watchdog.at(3, "step")
    with watchdog:
        for now[0] in (101.0, 102.0, 103.0):  # a beat comes after the report of the one before
            while json.loads(own.read_text())["time"] < now[0]:
                time.sleep(0.01)
    (line,) = capsys.readouterr().err.splitlines()
    assert "at step 3: no heartbeat from process 1" in line
    assert json.loads(own.read_text())["pid"] == os.getpid()
    with Watchdog(tmp_path / "none", 0):
        pass
    assert not (tmp_path / "none").exists()


@pytest.mark.slow
@pytest.mark.parametrize(("name", "kills", "options"), [("pod", 6, {}), ("commands", 8, {"most": 1}), ("edits", 8, {})])
def test_a_storm_loses_nothing(tmp_path, name, kills, options):
    counts = storm.STORMS[name](tmp_path, kills, seed=1, **options)
    assert (counts["kills"], counts["differing_bytes"], counts.get("stale", 0)) == (kills, 0, 0)
    assert counts["restarts"] >= 1 and (name != "edits" or counts["refused"] > 0)
