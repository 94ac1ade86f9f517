"""The initial head, fitted before training."""

import dataclasses

import numpy as np
import pytest
from refusing import refused
from tiny_run import experiment, lines, make_data, one_device, training

from jprm.methods.layers import head_init
from jprm.methods.layers.head_init import Steps, fitted_head
from jprm.model.heads import find


def made_up(count=3000, seed=0):
    """States of very different sizes, the small ones of which say what is right, as a pretrained decoder's do."""
    rng = np.random.default_rng(seed)
    size_D = np.array([100.0, 10.0, 1.0, 0.1])
    x_ND = (rng.normal(size=(count, 4)) + [5, 0, 0, 0]) * size_D
    logit_N = x_ND[:, 3] / 0.1 * 1.5 - x_ND[:, 2] + 0.5
    target_N = (rng.uniform(size=count) < 1 / (1 + np.exp(-logit_N))).astype(np.float32)
    return Steps(x_ND.astype(np.float32), target_N, rng.integers(1, 3, count).astype(np.float32)), logit_N


@pytest.mark.parametrize("head", ["binary", "scalar", "quantile", "ensemble", "sigmoid=right,loop"])
def test_the_head_is_the_logistic_regression_of_sklearn(head, monkeypatch):
    linear_model = pytest.importorskip("sklearn.linear_model")
    steps, _ = made_up()
    monkeypatch.setattr(head_init, "PENALTIES", (0.1,))
    params, _ = fitted_head(head, steps)
    weight_N = steps.weight_N.astype(float)
    mean_D = np.average(steps.x_ND, axis=0, weights=weight_N)
    std_D = np.sqrt(np.average((steps.x_ND - mean_D) ** 2, axis=0, weights=weight_N))
    z_ND = (steps.x_ND - mean_D) / std_D
    reference = linear_model.LogisticRegression(C=1 / (0.1 * weight_N.sum()), tol=1e-8, max_iter=1000)
    wanted_N = reference.fit(z_ND, steps.target_N, sample_weight=weight_N).predict_proba(z_ND)[:, 1]
    score_N = find(head).readout.score(steps.x_ND @ params["kernel"] + params["bias"])
    np.testing.assert_allclose(score_N, wanted_N, atol=1e-4)  # float32 sums of states of size 500


def test_it_finds_what_small_states_say_and_says_how_well():
    steps, logit_N = made_up()
    params, area = fitted_head("scalar", steps)
    found_N = (steps.x_ND @ params["kernel"] + params["bias"])[:, 0]
    assert np.corrcoef(found_N, logit_N)[0, 1] > 0.99
    assert 0.8 < area < 0.95  # that of the true log-odds is about 0.88
    half = steps._replace(target_N=np.full_like(steps.target_N, 0.25))
    refused(ValueError, "labelled", fitted_head, "scalar", half)
    refused(ValueError, "not 'ternary'", fitted_head, "ternary", steps)


def test_a_head_of_two_layers_is_not_fitted(tmp_path):
    """The fit is to the decoder's states, and its weights would be put behind the layer that comes between."""
    whole = experiment(tmp_path)
    with pytest.raises(ValueError, match="probe_rows=8"):
        dataclasses.replace(whole, probe_rows=8, model=dataclasses.replace(whole.model, head_hidden=True))


def test_training_starts_from_the_fitted_head_and_fits_it_once(tmp_path, capsys):
    make_data(tmp_path)
    begun = dataclasses.replace(experiment(tmp_path), probe_rows=8, steps=3, log_every=1, checkpoint_every=2)
    with one_device():
        training.train(dataclasses.replace(begun), tmp_path / "run")
        assert "the head is fitted on" in capsys.readouterr().out
        losses = [line["loss"] for line in lines(tmp_path / "run") if "loss" in line]
        assert losses[0] < np.log(2) - 0.02  # a head of zeros has log 2
        training.train(dataclasses.replace(begun), tmp_path / "run")
    assert "the head is fitted on" not in capsys.readouterr().out
