"""Experiments as files, as JSON and with overrides: exact round trips, and mistakes named by field."""

import dataclasses
import json

import numpy as np
import pytest
from refusing import refused
from tiny import TINY

from jprm import experiment
from jprm.experiment import DataConfig, Experiment, OptimizerConfig, TargetConfig, from_json, load, override, to_json
from jprm.model.mesh import MeshConfig
from jprm.options import MissingPart

EXPERIMENT = Experiment(
    name="tiny",
    model=dataclasses.replace(TINY, layer_groups=(1, 1)),
    tokenizer="tokenizer.json",
    data=DataConfig(train=("a.jsonl", "b"), supervise="step", too_long="error", rows=8, micro_rows=2),
    target=TargetConfig("rating", "drop", "mask"),
    objective="cross_entropy",
    optimizer=OptimizerConfig(1e-3, rate_factors=(("head", 10.0), ("embed", 0.5))),
    steps=10,
    mesh=MeshConfig(tensor=2),
)


@pytest.mark.parametrize(
    ("place", "told"), [("nowhere.heads:HEAD", "No module named 'nowhere'"), ("jprm.model:HEAD", "HEAD")]
)
def test_a_run_whose_module_is_not_here_names_it_and_is_not_damaged(tmp_path, place, told):
    path = tmp_path / "experiment.json"
    path.write_text(experiment.written(EXPERIMENT).replace('"head": "binary"', f'"head": "{place}"'))
    with pytest.raises(MissingPart, match=f"^{path}: head='{place}': .*{told}") as refused:
        experiment.read(path)
    assert "damaged" not in str(refused.value)


def test_json_and_back():
    assert from_json(Experiment, json.loads(json.dumps(to_json(EXPERIMENT)))) == EXPERIMENT
    hash(from_json(Experiment, to_json(EXPERIMENT)))  # static under jit: lists became tuples again
    assert from_json(OptimizerConfig, {"learning_rate": 1}) == OptimizerConfig(1.0)  # defaults, and int for float


def test_overrides():
    changed = override(
        EXPERIMENT,
        ["model.layers=3", "model.layer_groups=[2, 1]", "optimizer.learning_rate=1e-4", 'data.train=["c"]',
         "name=x = y", "optimizer.rate_factors=[[\"head\", 2]]", "optimizer.freeze=embed",
         "target.neutral=positive"],
    )  # fmt: skip
    assert changed.model == dataclasses.replace(EXPERIMENT.model, layers=3, layer_groups=(2, 1))
    assert changed.data.train == ("c",) and changed.name == "x = y"
    assert changed.optimizer == OptimizerConfig(1e-4, freeze="embed", rate_factors=(("head", 2.0),))
    assert changed.target.neutral == "positive" and changed.target.after_error == "mask"
    assert override(EXPERIMENT, []) == EXPERIMENT


def test_options_of_an_objective(tmp_path):
    """Any name: only the objective knows its options."""
    configured = dataclasses.replace(EXPERIMENT, objective_options={"beta": 0.1, "levels": [1, [2]]})
    same = override(EXPERIMENT, ["objective_options.beta=0.1", "objective_options.levels=[1, [2]]"])
    assert same == configured and hash(same) == hash(configured)
    assert override(configured, ["objective_options.beta=0.2"]).objective_options["beta"] == 0.2
    assert json.loads(experiment.written(configured))["objective_options"] == {"beta": 0.1, "levels": [1, [2]]}
    (tmp_path / "experiment.json").write_text(experiment.written(configured))
    assert experiment.read(tmp_path / "experiment.json") == configured
    older = {
        key: value for key, value in json.loads(experiment.written(EXPERIMENT)).items() if key != "objective_options"
    }
    (tmp_path / "experiment.json").write_text(json.dumps(older))
    assert experiment.read(tmp_path / "experiment.json") == EXPERIMENT
    single = {"beta": np.float32(0.1)}
    refused(ValueError, "objective_options.beta", dataclasses.replace, EXPERIMENT, objective_options=single)


def test_a_tuple_may_be_written_as_python_writes_it():
    for text in ("('tensorboard', \"wandb\")", '["tensorboard", "wandb"]'):
        assert override(EXPERIMENT, [f"trackers={text}"]).trackers == ("tensorboard", "wandb")
    assert override(EXPERIMENT, ["name=(1"]).name == "(1"


def test_one_group_of_layers_follows_their_number():
    whole = dataclasses.replace(EXPERIMENT, model=TINY)
    assert override(whole, ["model.layers=5"]).model == dataclasses.replace(TINY, layers=5, layer_groups=(5,))
    refused(ValueError, "layer_groups .*layers=5", override, EXPERIMENT, ["model.layers=5"])


def test_an_experiment_file(tmp_path):
    """It may define dataclasses of its own."""
    file = tmp_path / "run.py"
    file.write_text(
        "from __future__ import annotations\nimport dataclasses, json\n"
        "from jprm.experiment import Experiment, from_json\n"
        "@dataclasses.dataclass(frozen=True)\nclass Size:\n    width: int = 16\n"
        f"def experiment():\n    return from_json(Experiment, json.loads({json.dumps(to_json(EXPERIMENT))!r}))\n"
    )
    assert load(file) == EXPERIMENT
    assert load(file, ["steps=7"]) == dataclasses.replace(EXPERIMENT, steps=7)
    refused(FileNotFoundError, "none.py", load, tmp_path / "none.py")
    for name in ("run.json", "empty.py"):
        (tmp_path / name).write_text("{}")
        refused(ValueError, name, load, tmp_path / name)


def test_a_run_of_the_first_version_is_read(tmp_path):
    file, now = tmp_path / "experiment.json", json.loads(experiment.written(EXPERIMENT))
    first = {"loss": EXPERIMENT.objective, **{k: v for k, v in now.items() if k not in ("objective", "version")}}
    for values in (now, first):
        file.write_text(json.dumps(values))
        assert experiment.read(file) == EXPERIMENT
    for changes, message in [({"version": 9}, "version 9"), ({"losses": 1}, "losses")]:
        file.write_text(json.dumps(now | changes))
        refused(ValueError, message, experiment.read, file)
