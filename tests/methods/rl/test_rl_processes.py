"""Reinforcement learning by two processes: equal to one, and bit for bit to itself when it was stopped."""

import contextlib
import json

import numpy as np
import pytest
from pod import Pod
from test_engine import Served
from test_rl_loop import params_of
from tiny_rl import ahead, by_engine, make, servable, stormy
from tiny_run import lines, one_device, untimed, write_experiment

from jprm.methods.rl import loop, samples, sampling
from jprm.methods.rl.rollout import fresh

pytestmark = pytest.mark.slow  # a minute: process 1 finds none of its programs in jax's cache, which process 0 writes

CHILD = """
import json, os, pathlib, signal, sys
from jprm import multihost
folder, where = pathlib.Path(sys.argv[1]), sys.argv[-1]
multihost.start(where)
import jax
import test_rl_processes as tests
from jprm.methods.rl import loop
from jprm.train import Stopped
from jprm.train.callbacks import Watchdog

config = getattr(tests, sys.argv[2])(folder / "data")
with tests.written(folder / f"drawn.{jax.process_index()}.json"):
    result = loop.train(config, folder / "whole")
print("verdict:", result["verdict"])

at = Watchdog.at
def signalled(self, update, phase):
    at(self, update, phase)
    if (update, phase) == (2, "scoring") and jax.process_index() == 1:
        os.kill(os.getpid(), signal.SIGTERM)
Watchdog.at = signalled
try:
    loop.train(config, folder / "stopped")
    print("not stopped")
except Stopped as stopped:
    print("stopped:", stopped)
assert loop.train(config, folder / "stopped") == result
"""


ENGINE = """
import pathlib, sys
from jprm import multihost
multihost.start(sys.argv[-1])
import tiny_rl
from jprm.methods.rl import loop
folder = pathlib.Path(sys.argv[1])
loop.train(tiny_rl.by_engine(folder / "data", sys.argv[2], folder / "pushed", updates=2), folder / "two")
"""


def small(data):
    return ahead(data, evaluate_every=4)


@contextlib.contextmanager
def written(path):
    """Writes the ids of every update's samples in order into a file."""
    every = []

    def sample(policy, problems, n, *, seed, update, costs):
        drawn = samples.sample(policy, problems, n, seed=seed, update=update, costs=costs)
        every.append([update, [[sample.ids for sample in samples] for samples in drawn]])
        return drawn

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sampling, "sample", sample)
        yield
    path.write_text(json.dumps(every))


def pod(folder, name, devices):
    make(folder / "data")
    with Pod(folder, 2, devices) as both:
        return folder, both.complete(["-c", CHILD, str(folder), name])


@pytest.fixture(scope="module")
def both(tmp_path_factory):
    return pod(tmp_path_factory.mktemp("both"), "small", 1)


def stopped_equals_whole(folder, logs, updates):
    said = [line for log in logs for line in log.splitlines() if "stopped:" in line]
    assert len(said) == 2 and said[0] == said[1] and f"of {updates}; the same command continues" in said[0]
    assert json.loads((folder / "stopped/rl.json").read_bytes()) == json.loads((folder / "whole/rl.json").read_bytes())
    assert untimed(lines(folder / "stopped")) == untimed(lines(folder / "whole"))
    for run in ("", "/best"):
        with one_device():
            assert params_of(folder / f"stopped{run}") == params_of(folder / f"whole{run}")


def test_a_signal_to_one_stops_both_and_they_go_on_bit_for_bit(both):
    folder, logs = both
    stopped_equals_whole(folder, logs, 4)
    assert sorted(path.name for path in (folder / "whole/heartbeats").iterdir()) == ["0.json", "1.json"]
    assert all("verdict:" in log for log in logs)


def test_two_learn_what_one_learns(both):
    folder, _ = both
    with one_device(2), written(folder / "drawn.json"):
        alone = loop.train(small(folder / "data"), folder / "alone")
    drawn = [json.loads((folder / name).read_text()) for name in ("drawn.0.json", "drawn.1.json", "drawn.json")]
    assert drawn[0] == drawn[1] == drawn[2]
    assert [update for update, _ in drawn[2]] == [-1, 1, 2, 3, 4, -1, fresh(4, report=True)]
    together = json.loads((folder / "whole/rl.json").read_bytes())
    assert together["evaluations"][-1]["gold_P"] == alone["evaluations"][-1]["gold_P"]
    # Sums over devices are in another order, and samples are decoded in other batches: float32 rounding, in 8 steps.
    before, after = numbers_of(folder / "alone"), numbers_of(folder / "whole")
    apart = max(np.abs(before[name] - after[name]).max() for name in before)
    start = numbers_of(folder / "data/policy")
    moved = max(np.abs(before[name] - start[name]).max() for name in before)
    assert apart < 1e-5 and moved > 1e-2  # numbers of about 1
    for first, second in zip(untimed(lines(folder / "alone")), untimed(lines(folder / "whole")), strict=True):
        assert first.keys() == second.keys()
        np.testing.assert_allclose([*first.values()], [*second.values()], rtol=1e-3, atol=1e-5)


def numbers_of(folder):
    with one_device():
        return {name: np.frombuffer(x, np.float32) for name, x in params_of(folder).items()}


def test_refreshes_by_rollouts_and_a_second_prm_go_on_bit_for_bit(tmp_path):
    folder, logs = pod(tmp_path, "stormy", 2)
    stopped_equals_whole(folder, logs, 4)
    refreshes = json.loads((folder / "whole/rl.json").read_bytes())["refreshes"]
    assert [refresh["update"] for refresh in refreshes] == [2, 4]
    with one_device(4):
        alone = loop.train(stormy(folder / "data"), folder / "alone")
    first = [run["evaluations"][0] for run in (alone, json.loads((folder / "whole/rl.json").read_bytes()))]
    assert first[0]["gold_P"] == first[1]["gold_P"]
    for name in ("proxy", "second", "auroc", "tokens"):
        assert first[0][name] == pytest.approx(first[1][name], rel=1e-5)  # float32 rounding


def test_the_command_continues_a_run_and_process_0_prints_its_verdict(both, tmp_path):
    folder, _ = both
    file = write_experiment(tmp_path / "rl.py", small(folder / "data"))
    before = (folder / "whole/rl.json").read_bytes()
    with Pod(tmp_path, 2, 1) as again:
        logs = again.complete(["-m", "jprm", "rl", str(file), "--workdir", str(folder / "whole")])
    assert "Correct answers" in logs[0] and "Correct answers" not in logs[1]
    assert (folder / "whole/rl.json").read_bytes() == before


def test_a_server_samples_for_two_processes_what_it_samples_for_one(serve, tmp_path):
    served, data = Served(serve), servable(tmp_path / "data")
    with one_device(2):
        alone = loop.train(by_engine(data, served.url, tmp_path / "alone_pushed", updates=2), tmp_path / "one")
    pushes = len(served.updates)
    with Pod(tmp_path, 2, 1) as pod:
        pod.complete(["-c", ENGINE, str(tmp_path), served.url])
    assert len(served.updates) == 2 * pushes == 2 * 3  # only by process 0
    together = json.loads((tmp_path / "two/rl.json").read_bytes())
    assert [evaluation["gold_P"] for evaluation in together["evaluations"]] == [
        evaluation["gold_P"] for evaluation in alone["evaluations"]
    ]
    first, second = numbers_of(tmp_path / "one"), numbers_of(tmp_path / "two")
    assert max(np.abs(first[name] - second[name]).max() for name in first) < 1e-5  # float32 rounding, as above
