"""Reinforcement learning where some processes of a job sample while the others learn."""

import dataclasses
import json
import os
import signal
import time

import jax
import numpy as np
import pytest
from pod import Pod
from refusing import refused
from test_rl_loop import params_of
from test_rl_processes import numbers_of
from tiny_rl import ahead, make, refresh
from tiny_run import lines, one_device, untimed

from jprm.methods.rl import loop, rollout, sampling_hosts
from jprm.methods.rl.engine import EngineConfig
from jprm.methods.rl.samples import Rollout
from jprm.methods.rl.sampling import Ahead
from jprm.train.callbacks import Watchdog

FILE = """
import pathlib
import test_rl_hosts as tests
from tiny_rl import ahead


def experiment():
    tests.meet_fault({fault})
    return ahead(pathlib.Path({data!r}), **{changes})
"""


def meet_fault(fault):
    """Sends a signal to this process in a phase: (process, update, phase, signal)."""
    at = Watchdog.at
    if fault is None or fault[0] != jax.process_index():
        return

    def signalled(self, step, doing):
        at(self, step, doing)
        if (step, doing) == tuple(fault[1:3]):
            os.kill(os.getpid(), fault[3])
            time.sleep(8)  # so long all processes may take to agree on the update at which they stop

    Watchdog.at = signalled


def start(folder, run, processes, fault=None, **changes):
    """Runs `jprm rl` in so many processes of one device; returns the exit statuses and the logs."""
    file = folder / f"{run}.py"
    file.write_text(FILE.format(fault=fault, data=str(folder / "data"), changes=changes))
    with Pod(folder / f"{run}_logs", processes, 1) as pod:
        pod.start(["-m", "jprm", "rl", str(file), "--workdir", str(folder / run)])
        return pod.wait(grace=10), [pod.log(i) for i in range(processes)]


def ended(folder, run, processes, **changes):
    """As `start`, with processes that all end well; returns their logs."""
    statuses, logs = start(folder, run, processes, **changes)
    assert statuses == [0] * processes, "".join(log[-3000:] for log in logs)
    return logs


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make(tmp_path_factory.mktemp("hosts") / "data").parent


@pytest.fixture(scope="module")
def whole(folder):
    """A learner and a host that samples."""
    logs = ended(folder, "whole", 2, sampling_hosts=1)
    assert "Correct answers" in logs[0] and "Correct answers" not in logs[1]
    return folder / "whole"


def equal(run, other):
    """Whether two runs have the same figures, parameters and best parameters, bit for bit."""
    of_run = [json.loads((run_folder / "rl.json").read_bytes()) for run_folder in (run, other)]
    assert of_run[0]["evaluations"] == of_run[1]["evaluations"] and of_run[0]["fresh"] == of_run[1]["fresh"]
    assert untimed(lines(run)) == untimed(lines(other))
    with one_device():
        for part in ("", "best"):
            assert params_of(run / part) == params_of(other / part)


@pytest.mark.slow
def test_a_learner_learns_from_a_sampling_host_what_one_process_learns_from_itself(folder, whole):
    ended(folder, "alone", 1)
    assert [line["behind"] for line in lines(whole) if "behind" in line] == [0, 1, 1, 1]
    equal(whole, folder / "alone")


@pytest.mark.slow
def test_the_command_continues_after_any_host_was_killed_or_got_sigterm(folder, whole):
    faults = [
        (1, 2, "sampling", signal.SIGKILL), (0, 3, "updating", signal.SIGKILL), (1, 3, "sampling", signal.SIGTERM)
    ]  # fmt: skip
    for process, update, phase, number in faults:
        fault = (process, update, phase, int(number))
        statuses, logs = start(folder, "killed", 2, fault, sampling_hosts=1, checkpoint_every=1)
        if number == signal.SIGKILL:
            assert statuses[process] == -number and 0 not in statuses
        else:
            assert statuses == [143, 143] and all("the same command continues" in log for log in logs)
    ended(folder, "killed", 2, sampling_hosts=1, checkpoint_every=1)
    equal(folder / "killed", whole)


@pytest.mark.slow
def test_samples_that_wait_are_learnt_by_a_job_of_another_kind(folder, whole):
    """One that samples and learns in turn continues one that does both at once, and the other way round."""
    fault = (0, 3, "updating", int(signal.SIGKILL))
    assert start(folder, "mixed", 2, fault, sampling_hosts=1, checkpoint_every=1)[0][0] == -signal.SIGKILL
    assert start(folder, "mixed", 1, (0, 3, "updating", int(signal.SIGTERM)), checkpoint_every=1)[0] == [143]
    ended(folder, "mixed", 2, sampling_hosts=1, checkpoint_every=1)
    equal(folder / "mixed", whole)


@pytest.mark.slow
def test_two_learners_and_two_sampling_hosts_learn_what_two_processes_learn(folder):
    runs = {"apart": (4, 2), "in_turn": (2, 0)}
    for run, (processes, hosts) in runs.items():
        ended(folder, run, processes, sampling_hosts=hosts)
    apart, in_turn = (untimed(lines(folder / run)) for run in runs)
    for name in ("sampled_tokens", "gold", "reward"):  # the same ids were drawn
        assert [line.get(name) for line in apart] == [line.get(name) for line in in_turn]
    # Problems are decoded in other batches: float32 rounding, in 8 steps.
    before, after, start_ = (numbers_of(folder / run) for run in (*runs, "data/policy"))
    assert max(np.abs(before[name] - after[name]).max() for name in before) < 1e-5
    assert max(np.abs(before[name] - start_[name]).max() for name in before) > 1e-2


@pytest.mark.slow
def test_an_error_of_a_sampling_host_ends_the_job_with_its_reason(folder):
    statuses, logs = start(folder, "refused", 2, sampling_hosts=1, prm=str(folder / "data" / "no_prm"))
    assert statuses == [2, 2] and all("no_prm" in log for log in logs)


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"stale": 0, "objective_options": {}}, "sampling_hosts=1: .*set stale=1"),
        ({"carry": True}, "carry=false"),
        ({"engine": EngineConfig("http://localhost:1")}, "the engine samples already"),
        ({"sampling_hosts": -1}, "below 0"),
    ],
)
def test_what_sampling_hosts_do_not_go_with_is_refused(tmp_path, changes, message):
    refused(ValueError, message, ahead, tmp_path, **{"sampling_hosts": 1} | changes)
    refused(ValueError, "refresh.every=4", ahead, tmp_path, sampling_hosts=1, refresh=refresh(tmp_path))


def test_a_job_without_a_process_that_learns_is_refused(folder, tmp_path):
    config = ahead(folder / "data", sampling_hosts=1)
    with pytest.raises(ValueError, match="sampling_hosts=1: the job has 1 process.*at least 2 with --distributed"):
        loop.train(config, tmp_path / "run")
    assert sampling_hosts.parted(dataclasses.replace(config, sampling_hosts=0)) == ((0,), ())
    assert not (tmp_path / "run").exists()


def test_a_judged_group_survives_a_message_and_a_checkpoint():
    sample = Rollout((1, 2, 3), np.array([-0.1, -0.7, -1e-9], np.float32), (2, 3), ("a", "b"), True)
    record = {"problem": "p", "answer": 3}
    scores, second = [np.array([0.1, 0.7], np.float32)], [np.array([0.3, 1e-7], np.float32)]
    group = rollout.Group(record, [sample], np.array([1 / 3]), scores, True, 2, second)
    told = json.loads(json.dumps(group.json()))
    again = rollout.Group.of_json(told, {"p": record})
    assert again.json() == group.json() and again.record is record
    assert again.scores is not None and again.scores[0].dtype == np.float32
    waiting = loop.Progress(update=3, ahead=[Ahead(4, 2, [], judged=[told])])
    restored = loop.Progress()
    restored.set_state(json.loads(json.dumps(waiting.get_state())))
    assert restored == waiting and restored.ahead[0].judged == [told]


GROUPS = """
import sys
from jprm import multihost
multihost.start(sys.argv[-1])
import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from jprm.methods.policy.transfer import copied, sent
from jprm.model.mesh import gathered, make_mesh, put

here, all_of_them = jax.process_index(), range(3)
kind = (0,) if here == 0 else (1, 2)
place = PartitionSpec(None, "fsdp")
with multihost.among(kind):
    assert multihost.is_first() == (here in (0, 1)) and len(make_mesh().devices.flat) == 2 * len(kind)
    assert multihost.spread(lambda some: [[here, x] for x in some], [5, 6]) == {
        0: [[0, 5], [0, 6]], 1: [[1, 5], [2, 6]]}[min(here, 1)]
    assert multihost.first(lambda: here) == kind[0] and multihost.everywhere(here > 0) == (here > 0)
    for n in (1, 2):
        if here == 0:
            multihost.post("question", [n, "x" * 100_000])
        else:
            assert multihost.received("question") == [n, "x" * 100_000]
    own, x = make_mesh(devices=jax.local_devices()), np.arange(24, dtype=np.int8).reshape(3, 8)
    if here == 0:
        x_here = put(x, NamedSharding(make_mesh(), place))
        assert (gathered(x_here) == x).all()
        given = copied(x_here, own, place)
    else:
        given = jax.ShapeDtypeStruct(x.shape, x.dtype)
    with multihost.among(all_of_them):
        multihost.meet()
        taken = sent(given, own, place, [0], [1, 2])
    if here == 0:
        assert taken is None
    else:
        assert taken.sharding == NamedSharding(own, place) and (np.asarray(taken) == x).all()
    try:
        multihost.spread(lambda some: [1 / (here - 2)], [5, 6])
    except (ValueError, ZeroDivisionError) as error:
        print("raised:", error)
assert multihost.shared(here) == [0, 1, 2]
"""


def test_groups_of_processes_compute_and_decide_apart_and_write_to_each_other(tmp_path):
    with Pod(tmp_path, 3, 2) as pod:
        assert "process 2 failed: ZeroDivisionError" in pod.complete(["-c", GROUPS])[1]
