"""Heads, targets and labels that do not fit together are refused before training."""

import dataclasses

import pytest
from tiny_run import MODEL, VALUE, chains, experiment, make_data, training

from jprm.experiment import TargetConfig
from jprm.io.jsonl import write_records

RATING = TargetConfig("rating", "positive", "keep")
POLICY = dict(
    model=dataclasses.replace(MODEL, head="language"), objective="next_token", supervise="token", target=VALUE
)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        # As a rating the outcome 0 would be neutral, so right, and every token's id would be 1.
        (dict(supervise="outcome", target=RATING), "supervise='outcome' gives outcomes"),
        (POLICY | dict(target=RATING), "supervise='token' gives outcomes or tokens"),
        (POLICY | dict(target=TargetConfig("value", "none", "keep", "hard")), "gives token ids"),
        (POLICY | dict(target=TargetConfig("value", "none", "mask")), "gives token ids"),
        (dict(supervise="outcome_steps", target=TargetConfig("value", "none", "mask")), "gives mean outcomes"),
        (dict(supervise="outcome_tokens", target=TargetConfig("value", "none", "keep", "hard")), "mean outcomes"),
        (POLICY | dict(target=TargetConfig("value", "none", "keep", smoothing=0.1)), "set target.smoothing=0"),
        (dict(target=TargetConfig("value", "none", "keep", consensus="judge")), "name it in data.extras"),
        (dict(objective="td_lambda", target=VALUE), "'step' does not fit the objective, which takes outcome"),
        (
            dict(objective="implicit", supervise="outcome", target=VALUE),
            "binary'; it takes language",
        ),
        (POLICY | dict(objective="implicit"), "implicit needs `reference`"),
        (POLICY | dict(objective="implicit", reference="x"), "implicit needs data.supervise='outcome'"),
        (dict(supervise="token", target=VALUE), "'token' does not fit head 'binary', which takes step or outcome"),
        (POLICY | dict(supervise="step"), "'step' does not fit head 'language', which takes token"),
    ],
)
def test_what_is_supervised_fits_head_and_target(tmp_path, one_device, changes, message):
    with pytest.raises(ValueError, match=message):
        training.train(experiment(make_data(tmp_path / "data"), **changes), tmp_path / "run")


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
    with pytest.raises(ValueError, match="probabilities between 0 and 1"):
        training.train(run, tmp_path / "soft")
