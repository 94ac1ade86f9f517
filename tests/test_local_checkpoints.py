"""Checkpoints on the hosts: what is lost with their disks comes from another replica, or from the run's folder."""

import shutil
import signal

import jax
import pytest
from pod import Pod
from refusing import refused
from tiny_run import equal, experiment, lines, make_data, params, untimed, write_experiment

from jprm.methods.local_checkpoints import check
from jprm.model.mesh import MeshConfig, make_mesh


def command(folder, name, pace):
    """Three processes with a device each, replicas of one another, and a folder for each as its host's disk."""
    return ["-m", "storm_child", str(pace), "train", str(folder / "experiment.py"), "--workdir", str(folder / name),
            "--set", f"local_checkpoints={folder / name}-host{{process}}"]  # fmt: skip


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("local")
    run = experiment(
        make_data(folder / "data"), mesh=MeshConfig(data=3), steps=8, rows=6, micro_rows=3, valid=(), log_every=1,
        checkpoint_every=4, local_checkpoints="x", local_every=2,
    )  # fmt: skip
    write_experiment(folder / "experiment.py", run)
    with Pod(folder / "logs", 3, 1) as pod:
        pod.complete(command(folder, "whole", 0))
    return folder


@pytest.mark.slow
@pytest.mark.parametrize(("lost", "step"), [((0, 1), 6), ((1, 2), 4)])
def test_a_run_continues_from_what_is_left(whole, lost, step):
    name = "lost" + "".join(map(str, lost))
    hosts = [whole / f"{name}-host{i}" for i in range(3)]
    with Pod(whole / "logs", 3, 1) as pod:
        pod.start(command(whole, name, 0.4))
        assert pod.until(lambda: all((host / "steps" / "6").is_dir() for host in hosts[1:])), pod.log()[-3000:]
        pod.signal(signal.SIGKILL)
        pod.wait()
        for i in lost:
            shutil.rmtree(hosts[i])
        assert f"continuing from step {step} " in pod.complete(command(whole, name, 0))[0]
    assert untimed(lines(whole / name)) == untimed(lines(whole / "whole"))
    assert equal(params(whole / name), params(whole / "whole"))


def test_a_mesh_without_replicas_on_hosts_of_their_own_is_refused(tiny_run):
    devices = jax.devices()
    refused(ValueError, "mesh.data", check, make_mesh(MeshConfig(fsdp=2), devices[:2]))
    refused(ValueError, "process 0", check, make_mesh(MeshConfig(data=2), devices[:2]))
    refused(ValueError, "local_every", experiment, tiny_run.folder, local_every=3)
