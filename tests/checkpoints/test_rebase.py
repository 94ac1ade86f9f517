"""`--set base=OTHER`: the other model's shape and tokenizer come along, what the experiment chose stays."""

import json

import numpy as np
import pytest
from refusing import refused
from safetensors.numpy import save_file

from jprm.checkpoints.base import model_config
from jprm.experiment import load

FILE = """
from jprm.checkpoints import base
from jprm.experiment import DataConfig, Experiment, OptimizerConfig, TargetConfig

def experiment():
    return Experiment(
        name="x", base={base!r}, tokenizer={base!r},
        model=base.model_config({base!r}, layers=2, layer_groups=(1, 1), remat="dots", head="scalar"),
        data=DataConfig(("none",), "step", "error"), target=TargetConfig("correctness", "none", "keep"),
        objective="cross_entropy", optimizer=OptimizerConfig(1e-5), steps=1,
    )
"""


def published(folder, **shape):
    shape = {"num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, **shape}
    config = {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "rms_norm_eps": 1e-6, "rope_theta": 1e4}
    config |= {"vocab_size": 64, "intermediate_size": 64, "hidden_size": 32, "tie_word_embeddings": True} | shape
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    save_file({"model.norm.weight": np.ones(config["hidden_size"], np.float32)}, folder / "model.safetensors")
    return str(folder)


@pytest.fixture
def file(tmp_path):
    (tmp_path / "own.py").write_text(FILE.format(base=published(tmp_path / "small")))
    return tmp_path / "own.py"


def test_the_shape_is_the_new_bases_and_what_the_experiment_chose_stays(file, tmp_path):
    wide = published(tmp_path / "wide", hidden_size=64, num_hidden_layers=6, rope_theta=1e6, vocab_size=80)
    experiment = load(file, [f"base={wide}", "model.remat=full"])
    expected = model_config(wide, layers=2, layer_groups=(1, 1), head="scalar", remat="full")
    assert experiment.model == expected
    assert experiment.base == experiment.tokenizer == wide


def test_what_the_settings_name_is_as_they_say(file, tmp_path):
    wide = published(tmp_path / "wide", hidden_size=64)
    experiment = load(
        file, [f"base={wide}", "tokenizer=mine", "model.rope_theta=5.0", "model.layers=3", "model.layer_groups=[1, 2]"]
    )
    assert (experiment.tokenizer, experiment.model.rope_theta, experiment.model.layers) == ("mine", 5.0, 3)
    assert experiment.model.width == 64


def test_the_same_base_changes_nothing(file, tmp_path):
    assert load(file, [f"base={tmp_path / 'small'}"]) == load(file)


def test_a_base_that_is_not_there_is_one_line(file, tmp_path):
    wide = published(tmp_path / "wide", hidden_size=64)
    file.write_text(file.read_text().replace('name="x", base=', 'name="x", base="gone" or '))
    refused(ValueError, "which fields of `model` are those of gone", load, file, [f"base={wide}"])
