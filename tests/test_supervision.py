"""Heads, targets and labels that do not fit together are refused before training."""

import dataclasses

import pytest
from families import breadth
from refusing import bad, refused
from tiny_run import MODEL, VALUE, chains, experiment, make_data, training

from jprm.experiment import TargetConfig, to_json
from jprm.io.jsonl import write_records

POLICY = {"model": {"head": "language"}, "objective": "next_token", "supervise": "token", "target": to_json(VALUE)}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        *bad("what is supervised"),
        *([POLICY | changes, message] for changes, message in bad("what a policy learns from")),
    ],
)
def test_what_is_supervised_fits_head_target_and_data(tmp_path, one_device, changes, message):
    values = {"model": dataclasses.replace(MODEL, **changes.get("model", {}))}
    if "target" in changes:
        values["target"] = TargetConfig(**changes["target"])
    run = experiment(make_data(tmp_path / "data"), **changes | values)
    refused(ValueError, message, training.train, run, tmp_path / "run")


@pytest.mark.parametrize("target", [("mask", "soft"), *breadth([(("keep", "hard"),)])])
def test_probabilities_of_being_right_have_no_first_error(tmp_path, one_device, target):
    """A teacher's are never 0: no step would be masked, or every step, also one of 0.02, be right."""
    data = make_data(tmp_path / "data")
    soft = [c | {"labels": [0.02, *(1.0 for _ in c["labels"][1:])], "semantics": "correctness"} for c in chains(8)]
    plain = [c | {"labels": [round(x) for x in c["labels"]]} for c in soft]
    run = experiment(data, target=TargetConfig("correctness", "none", *target), steps=2, valid=())
    write_records(data / "train.jsonl", plain)
    training.train(run, tmp_path / "plain")
    write_records(data / "train.jsonl", soft)
    refused(ValueError, "between 0 and 1", training.train, run, tmp_path / "soft")
