"""The loop of reinforcement learning: killed in every phase, gamed on purpose, and what it refuses."""

import html
import itertools
import json
import re

import jax
import numpy as np
import pytest
from families import breadth
from flax.traverse_util import flatten_dict
from refusing import bad, refused
from tiny_rl import chain, experiment, make, refresh
from tiny_run import lines, one_device, untimed

from jprm.apps.report.page import report
from jprm.checkpoints.store import load_params
from jprm.experiment import read, to_json
from jprm.methods.rl import loop, rollout, samples, sampling
from jprm.methods.rl.config import RLExperiment
from jprm.methods.rl.credit import CreditConfig
from jprm.methods.rl.rollout import pass_at
from jprm.model.mesh import make_mesh
from jprm.options import from_json
from jprm.score.scale import PROBABILITY
from jprm.train.callbacks import Watchdog


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return make(tmp_path_factory.mktemp("rl") / "data")


@pytest.fixture(scope="module")
def whole(data):
    """A run whose sampler is an update behind, which nothing disturbed, and the phases that it went through."""
    phases, folder = [], data.with_name("whole")
    with pytest.MonkeyPatch.context() as patch, one_device():
        patch.setattr(Watchdog, "at", lambda self, *place: phases.append(place))
        result = loop.train(stale_experiment(data), folder)
    return folder, result, phases


def stale_experiment(data, **changes):
    return experiment(data, refresh=refresh(data), stale=1, objective_options={"truncate": 2.0}, **changes)


VERIFIER = dict(credit=CreditConfig("verifier", "rloo", "constant", length=16), prm="")
"""Without a PRM."""


class Killed(BaseException):
    """No code of a run handles it."""


SOME = [(3, "scoring"), (4, "updating"), (4, "checkpoint")]
ALL = [(0, "evaluating"), (1, "pushing"), (3, "sampling"), *SOME[:2], (4, "refreshing"), (4, "evaluating"),
       (4, "confirming"), SOME[2]]  # fmt: skip


def killed_in(places, config, run):
    """Trains, killed in one of these phases after another; returns what the last call returns."""
    left = list(places)

    def at(self, *place):
        if left and place == left[0]:
            left.pop(0)
            raise Killed

    with pytest.MonkeyPatch.context() as patch, one_device():
        patch.setattr(Watchdog, "at", at)
        while left:
            with pytest.raises(Killed):
                loop.train(config, run)
        return loop.train(config, run)


@pytest.mark.parametrize("places", [*breadth([SOME]), pytest.param(ALL, marks=pytest.mark.slow)], ids=["some", "all"])
def test_a_run_killed_in_any_phase_ends_bit_for_bit_like_a_whole_one(data, whole, tmp_path, places, one_device):
    folder, result, phases = whole
    assert {phase for _, phase in phases} == {phase for _, phase in ALL}
    assert killed_in(places, stale_experiment(data), tmp_path / "run") == result
    assert params_of(folder) == params_of(tmp_path / "run")
    assert (tmp_path / "run/rl.json").read_bytes() == (folder / "rl.json").read_bytes()
    assert untimed(lines(tmp_path / "run")) == untimed(lines(folder))


def params_of(folder):
    """The bytes of a policy's parameters by their names."""
    mesh = make_mesh(devices=jax.devices()[:1])
    with jax.set_mesh(mesh):
        params, _ = load_params(folder, read(folder / "experiment.json"), mesh)
    return {name: np.asarray(x).tobytes() for name, x in flatten_dict(params, sep="/").items()}


def test_a_refreshed_prm_is_adopted_for_its_auroc_on_fresh_steps_of_held_out_problems(whole):
    folder, result, _ = whole
    for refreshed in result["refreshes"]:
        assert refreshed["adopted"] == (refreshed["after"] >= refreshed["before"])
    first, last = result["refreshes"][0], result["evaluations"][-1]
    assert first["adopted"] and first["after"] > first["before"]
    assert last["prm"] == f"prm/{max(refreshed['update'] for refreshed in result['refreshes'] if refreshed['adopted'])}"
    assert (folder / last["prm"] / "experiment.json").is_file()
    at = next(evaluation for evaluation in result["evaluations"] if evaluation["update"] == first["update"])
    assert at["auroc"] == first["after"]  # the same samples, by the adopted PRM


@pytest.mark.parametrize("stale", [2, pytest.param(0, marks=pytest.mark.slow)])
def test_samples_are_drawn_so_many_updates_before(data, tmp_path, monkeypatch, stale, one_device):
    """A step of the optimizer is an update here, so that the policy's name tells which update it is of."""
    drawn = []

    def sample(policy, problems, n, *, seed, update, costs):
        drawn.append((update, int(policy.name.partition("#")[0].rpartition("@")[2])))
        return samples.sample(policy, problems, n, seed=seed, update=update, costs=costs)

    monkeypatch.setattr(sampling, "sample", sample)
    loop.train(experiment(data, evaluate_every=4, stale=stale, minibatches=1, **VERIFIER), tmp_path / "run")
    assert [call for call in drawn if call[0] > 0] == [(n, max(0, n - 1 - stale)) for n in range(1, 5)]
    behind = [row.get("behind") for row in lines(tmp_path / "run") if "loss" in row]
    assert behind == ([0, 1, 2, 2] if stale else [None] * 4)


@pytest.mark.slow
def test_ratios_of_all_minibatches_are_to_the_policy_before_the_update(data, tmp_path, monkeypatch, one_device):
    """It is the one that sampled here, and the second minibatch comes after a step of the optimizer."""
    seen, step = [], loop.Trainer.step
    monkeypatch.setattr(loop.Trainer, "step", lambda self, rows: seen.append(rows) or step(self, rows))
    alone = dict(credit=CreditConfig("verifier", "reinforce", "constant", length=16), prm="", reference=False)
    loop.train(experiment(data, updates=1, objective_options={"truncate": 2.0}, **alone), tmp_path / "run")
    assert len(seen) == 2
    for rows in seen:
        proximal, old = (rows.extras[key][rows.owned] for key in ("proximal", "old"))
        np.testing.assert_allclose(proximal, old, atol=1e-4)  # the learner's against the sampler's, float32
    (row,) = (row for row in lines(tmp_path / "run") if "kl_old" in row)
    assert row["kl_old"] > 1e-4  # a mean over both steps: the parameters moved between them


@pytest.mark.slow
def test_best_is_written_though_a_kill_came_between_it_and_its_checkpoint(data, tmp_path, monkeypatch, one_device):
    save, killed = loop.Loop._save_best, []

    def kill(self):
        if self.progress.update and not killed:
            killed.append(self.progress.update)
            raise Killed
        save(self)

    monkeypatch.setattr(loop.Loop, "_save_best", kill)
    config = experiment(data, method="dpo", updates=8, minibatches=1, evaluate_every=8, prm="", samples=16)
    with pytest.raises(Killed):
        loop.train(config, tmp_path / "run")
    assert params_of(tmp_path / "run/best") != params_of(tmp_path / "run")
    result = loop.train(config, tmp_path / "run")
    assert killed == [8] and result["evaluations"][result["best"]]["update"] == 8
    assert params_of(tmp_path / "run/best") == params_of(tmp_path / "run")


class Sevens:
    """A PRM that is fond of sevens."""

    scale = PROBABILITY

    def score_trees(self, trees):
        return [np.array([float("7" in node.text) for node in tree.nodes], np.float32) for tree in trees]


def test_gaming_ends_the_run_and_the_best_parameters_are_restored(data, tmp_path, monkeypatch, one_device):
    monkeypatch.setattr(loop.loading, "load", lambda folder, **_: Sevens())
    alone = CreditConfig("sum_prm_alone", "rloo", "constant", length=16)
    config = experiment(data, credit=alone, updates=40, minibatches=1, samples=8, problems_an_update=8)
    result = loop.train(config, tmp_path / "run")
    best, last = result["evaluations"][result["best"]], result["evaluations"][-1]
    assert result["ended"].startswith("gaming") and result["update"] < 40
    assert last["proxy"] > best["proxy"] and last["gold"] < best["gold"]
    assert last["check"]["p"] < last["check"]["level"] and last["check"]["now"] < last["check"]["best"]
    assert result["fresh"]["update"] == best["update"] and result["fresh"]["gold_P"] != best["gold_P"]
    assert params_of(tmp_path / "run") == params_of(tmp_path / "run/best")
    assert loop.train(config, tmp_path / "run") == result  # nothing is left to do
    assert any("A guard ended the run" in sentence for sentence in result["verdict"])


def test_the_page_of_a_run_tells_its_verdict_and_shows_what_the_prm_overrates(whole, tmp_path):
    folder, result, _ = whole
    report([folder], tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text()
    assert all(html.escape(sentence, quote=False) in page.replace("&#39;", "'") for sentence in result["verdict"])
    chains = json.loads(re.search(r'id="chains">(.*?)</script>', page, re.S)[1])
    assert [item["t"] for item in chains["items"]][:1] == [result["evaluations"][0]["examples"][0]["steps"]]
    refused(ValueError, "rl.json", report, [folder, tmp_path], tmp_path / "page.html")


@pytest.mark.parametrize("changes, message", bad("a run of reinforcement learning"))
def test_what_does_not_fit_is_refused_before_a_run_begins(data, tmp_path, changes, message):
    with pytest.raises(ValueError, match=message), one_device():
        loop.train(from_json(RLExperiment, to_json(experiment(data)) | changes), tmp_path / "run")
    assert not list(tmp_path.rglob("checkpoints/*"))


def test_a_folder_belongs_to_one_experiment(data, whole, tmp_path, one_device):
    other = stale_experiment(data, credit=CreditConfig("min_form", "rloo", "constant", length=16))
    refused(ValueError, "credit.offset: -1.0.*0.0", loop.train, other, whole[0])
    (tmp_path / "held.jsonl").write_text((data / "problems.jsonl").read_text())
    seen = experiment(data, held_out=(str(tmp_path / "held.jsonl"),))
    refused(ValueError, "24 problems", loop.train, seen, tmp_path / "run")


def test_a_step_is_scored_after_the_steps_before_it_in_its_own_sample():
    class Paths:
        """Scores a step by a number of its path from the problem."""

        def score_trees(self, trees):
            return [np.array([self._of(tree, i) for i in range(len(tree.nodes))], np.float32) for tree in trees]

        def _of(self, tree, i):
            return 0.0 if i < 0 else 10 * self._of(tree, tree.nodes[i].parent) + int(tree.nodes[i].text)

    drawn = [chain(*texts) for texts in ("123", "4", "", "56")]
    (scores,) = rollout.scored(Paths(), [{"problem": "p"}], [drawn])
    assert [score_P.tolist() for score_P in scores] == [[1, 12, 123], [4], [], [5, 56]]


def test_pass_at_k_is_the_share_of_subsets_with_a_correct_sample():
    correct_PN = np.array([[1, 0, 0, 1], [0, 0, 0, 0], [1, 1, 1, 1]], bool)
    for k, value in pass_at(correct_PN).items():
        subsets = [correct_PN[:, list(subset)].any(1) for subset in itertools.combinations(range(4), int(k))]
        assert value == pytest.approx(np.mean(subsets))


def test_demonstrations_become_likelier(data, tmp_path, one_device):
    config = experiment(data, method="demonstrations", updates=3, minibatches=1, evaluate_every=3, prm="")
    result = loop.train(config, tmp_path / "run")
    rows = [row for row in lines(tmp_path / "run") if "loss" in row]
    assert rows[-1]["loss"] < rows[0]["loss"]
    assert result["sampled_tokens"] == 3 * 16 * 9  # "1+2=1", a newline, "1", a newline and the end
    assert "proxy" not in result["evaluations"][0]


SLOW = [pytest.param(method, marks=pytest.mark.slow) for method in ("rejection", "step_dpo")]


@pytest.mark.parametrize("method", [*breadth(["dpo"]), *SLOW])
def test_baselines_make_correct_answers_likelier(data, tmp_path, method, one_device):
    config = experiment(data, method=method, updates=8, minibatches=1, evaluate_every=8, prm="", samples=16)
    first, last = loop.train(config, tmp_path / "run")["evaluations"]
    assert last["gold"] > first["gold"]
    assert abs(first["kl"]) < 1e-6 < last["kl"]
    rows = [row for row in lines(tmp_path / "run") if "loss" in row]
    assert method == "rejection" or rows[-1]["loss"] < rows[0]["loss"] == pytest.approx(np.log(2))
