"""Heads, targets and labels that do not fit together are refused before training."""

import dataclasses

import pytest
from refusing import refused
from tiny_run import MODEL, VALUE, chains, experiment, make_data, training

from jprm.experiment import TargetConfig
from jprm.io.jsonl import write_records

RATING = TargetConfig("rating", "positive", "keep")
LANGUAGE = dataclasses.replace(MODEL, head="language")
POLICY = dict(model=LANGUAGE, objective="next_token", supervise="token", target=VALUE)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(target=TargetConfig("correctness", "none", "keep")), "'rating'"),
        (dict(objective="ternary_cross_entropy"), "'binary'"),
        (dict(tokens=16, model=dataclasses.replace(MODEL, attention_block=16)), "longer"),
        # As a rating the outcome 0 would be neutral, so right, and every token's id would be 1.
        (dict(supervise="outcome", target=RATING), "supervise='outcome'"),
        (POLICY | dict(target=RATING), "supervise='token'"),
        (POLICY | dict(target=TargetConfig("value", "none", "keep", "hard")), "token"),
        (POLICY | dict(target=TargetConfig("value", "none", "mask")), "token"),
        (dict(supervise="outcome_steps", target=TargetConfig("value", "none", "mask")), "outcomes"),
        (dict(supervise="outcome_tokens", target=TargetConfig("value", "none", "keep", "hard")), "mean outcomes"),
        (POLICY | dict(target=TargetConfig("value", "none", "keep", smoothing=0.1)), "set target.smoothing=0"),
        (dict(target=TargetConfig("value", "none", "keep", consensus="judge")), "data.extras"),
        (dict(objective="td_lambda", target=VALUE), "'step'"),
        (dict(objective="implicit", supervise="outcome", target=VALUE), "language"),
        (POLICY | dict(objective="implicit"), "`reference`"),
        (POLICY | dict(objective="implicit", reference="x"), "data.supervise='outcome'"),
        (dict(supervise="token", target=VALUE), "'token'"),
        (POLICY | dict(supervise="step"), "'step'"),
    ],
)
def test_what_is_supervised_fits_head_target_and_data(tmp_path, one_device, changes, message):
    refused(ValueError, message, training.train, experiment(make_data(tmp_path / "data"), **changes), tmp_path / "run")


@pytest.mark.parametrize("target", [("mask", "soft"), ("keep", "hard")])
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
