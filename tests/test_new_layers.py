"""A decoder with a layer more than its base: a named error, or random weights where they are asked for."""

import dataclasses

import flax.linen as nn
import jax
import numpy as np
import pytest
from flax.traverse_util import flatten_dict
from refusing import refused
from test_gguf import write
from tiny import params
from tiny_run import MODEL, experiment, make_data, one_device, training

import jprm
from jprm.checkpoints import base
from jprm.experiment import override
from jprm.methods.formats.export.writing import decoder_tensors
from jprm.model import transformer
from jprm.model.mesh import make_mesh
from jprm.model.parameters import LoraConfig
from jprm.train import state as training_state
from jprm.train.state import initial_state


class Forked(transformer.Layers):
    """Layers of a fork, which scale their output: the parameter is a new one."""

    @nn.compact
    def __call__(self, *inputs):
        experts_L = self.param("experts", nn.initializers.normal(1.0), (self.stop - self.first,))
        x_BTD, sums = super().__call__(*inputs)
        return x_BTD * (1 + 0.1 * experts_L.sum()).astype(self.config.dtype), sums


@pytest.fixture
def fork(monkeypatch):
    """The model of a fork, with a theta of its own: nothing compiled for the model before it fits."""
    params(MODEL)  # made once, and before the fork
    monkeypatch.setattr(transformer, "Layers", Forked)
    return dataclasses.replace(MODEL, rope_theta=123.0)


def started(run):
    with one_device(), jax.set_mesh(make_mesh(devices=jax.devices()[:1])):
        state = initial_state(run)
        return {path: np.asarray(x) for path, x in (state.trained | state.frozen).items()}


def test_a_layer_that_the_base_lacks_is_an_error_or_starts_at_random(fork, tmp_path):
    weights = params(MODEL)["decoder"]
    file = write(tmp_path / "m.gguf", fork, weights)
    run = experiment(tmp_path, model=fork, base=str(file))
    refused(ValueError, "m.gguf: .*decoder/layers_0/experts", started, run)
    refused(ValueError, "decoder/layers_0/experts", base.load_decoder, file, fork, new="router")
    actual, random = started(override(run, ["new_parameters=experts$"])), started(dataclasses.replace(run, base=""))
    assert actual.keys() == random.keys()
    for path, x in flatten_dict({"decoder": weights}, sep="/").items():
        np.testing.assert_allclose(actual[path], x, atol=1e-6)
    for path in ("decoder/layers_0/experts", "head/kernel", "head/bias"):
        np.testing.assert_array_equal(actual[path], random[path])
    assert actual["decoder/layers_0/experts"].any()
    with pytest.raises(ValueError, match="decoder/layers_0/experts"):
        started(dataclasses.replace(run, new_parameters="experts$", lora=LoraConfig(rank=2)))
    with pytest.raises(ValueError, match="layers_0/experts"):
        list(decoder_tensors({"layers_0": {"experts": np.ones(2)}}, fork))


def test_a_pattern_of_new_parameters_that_matches_none_is_an_error(tmp_path):
    file = write(tmp_path / "m.gguf", MODEL, params(MODEL)["decoder"])
    refused(ValueError, "new_parameters='query'", base.load_decoder, file, MODEL, new="query")


def test_a_run_of_before_the_layer(tmp_path, monkeypatch):
    data = make_data(tmp_path / "data")
    before = experiment(data, model=dataclasses.replace(MODEL, rope_theta=124.0), steps=1)
    with one_device():
        training.train(before, tmp_path / "run")
        old = started(dataclasses.replace(before, base=str(tmp_path / "run")))
        monkeypatch.setattr(transformer, "Layers", Forked)
        training_state._random.clear_cache()  # of the model as it was
        refused(ValueError, "run: .*decoder/layers_0/experts", jprm.load, tmp_path / "run")
    run = dataclasses.replace(before, base=str(tmp_path / "run"))
    refused(ValueError, "decoder/layers_0/experts", started, run)
    actual = started(dataclasses.replace(run, new_parameters="experts"))
    assert actual.keys() - old.keys() == {"decoder/layers_0/experts"}
    np.testing.assert_array_equal(actual["decoder/layers_0/query"], old["decoder/layers_0/query"])
