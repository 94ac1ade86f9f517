"""The loop of reinforcement learning: killed in every phase, gamed on purpose, and what it refuses."""

import json

import numpy as np
import pytest
from tiny_rl import experiment, make
from tiny_run import lines, one_device, untimed

from jprm.rl import loop
from jprm.rl.credit import CreditConfig
from jprm.train.preemption import Watchdog


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return make(tmp_path_factory.mktemp("rl") / "data")


@pytest.fixture(scope="module")
def whole(data):
    """A run that nothing disturbed, and the phases that it went through."""
    phases, folder = [], data.with_name("whole")
    with pytest.MonkeyPatch.context() as patch, one_device():
        patch.setattr(Watchdog, "at", lambda self, *place: phases.append(place))
        result = loop.train(experiment(data), folder)
    return folder, result, phases


class Killed(BaseException):
    """No code of a run handles it."""


def checkpoint(folder):
    """The newest checkpoint's files: all parameters and moments, and what is kept of the run."""
    step = max((folder / "checkpoints").iterdir(), key=lambda path: int(path.name))
    return step.name, json.loads((step / "run").read_text() if (step / "run").is_file() else "{}")


def test_a_run_killed_in_every_phase_ends_bit_for_bit_like_a_whole_one(data, whole, tmp_path, monkeypatch):
    folder, result, phases = whole
    assert {phase for _, phase in phases} == {
        "evaluating", "sampling", "scoring", "updating", "pushing", "checkpoint"
    }  # fmt: skip
    places = [(0, "evaluating"), (1, "pushing"), (3, "sampling"), (3, "scoring"), (4, "updating"), (4, "checkpoint")]
    assert set(places) <= set(phases)

    def at(self, *place):
        if places and place == places[0]:
            places.pop(0)
            raise Killed

    monkeypatch.setattr(Watchdog, "at", at)
    with one_device():
        while places:
            with pytest.raises(Killed):
                loop.train(experiment(data), tmp_path / "run")
        again = loop.train(experiment(data), tmp_path / "run")
        before, after = params_of(folder), params_of(tmp_path / "run")
    assert before.keys() == after.keys() and all(before[name] == after[name] for name in before)
    assert again == result and (tmp_path / "run/rl.json").read_bytes() == (folder / "rl.json").read_bytes()
    assert untimed(lines(tmp_path / "run")) == untimed(lines(folder))


def params_of(folder):
    import jax
    from flax.traverse_util import flatten_dict

    from jprm.checkpoints.store import load_params
    from jprm.experiment import read
    from jprm.model.mesh import make_mesh

    mesh = make_mesh(devices=jax.devices()[:1])
    with jax.set_mesh(mesh):
        found, _ = load_params(folder, read(folder / "experiment.json"), mesh)
    return {name: np.asarray(x).tobytes() for name, x in flatten_dict(found, sep="/").items()}


class Sevens:
    """A PRM that is fond of sevens."""

    def score_trees(self, trees):
        return [np.array([float("7" in node.text) for node in tree.nodes], np.float32) for tree in trees]


def test_gaming_ends_the_run_and_the_best_parameters_are_restored(data, tmp_path, monkeypatch):
    monkeypatch.setattr(loop.loading, "load", lambda folder: Sevens())
    alone = CreditConfig("sum_prm_alone", "rloo", "constant", length=16)
    config = experiment(data, credit=alone, updates=40, minibatches=1, samples=8, problems_an_update=8)
    with one_device():
        result = loop.train(config, tmp_path / "run")
        best = result["evaluations"][result["best"]]
        last = result["evaluations"][-1]
        assert result["ended"].startswith("gaming") and result["update"] < 40
        assert last["proxy"] > best["proxy"] and last["gold"] < best["gold"]
        assert params_of(tmp_path / "run") == params_of(tmp_path / "run/best")
        assert loop.train(config, tmp_path / "run") == result  # nothing is left to do
    assert any("A guard ended the run" in sentence for sentence in result["verdict"])
