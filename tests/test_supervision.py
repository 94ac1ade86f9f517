"""Heads, targets and labels that do not go together are refused before anything is learned from them."""

import dataclasses

import pytest
from tiny_run import MODEL, experiment, loop, make_data

from jprm.train.targets import TargetConfig

VALUE = TargetConfig("value", "none", "keep")
RATING = TargetConfig("rating", "positive", "keep")
POLICY = dict(model=dataclasses.replace(MODEL, head="language"), loss="next_token", supervise="token", target=VALUE)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        # As a rating the outcome 0 would be neutral, so right, and every token's id would be 1.
        (dict(supervise="outcome", target=RATING), "supervise='outcome' gives no ratings"),
        (POLICY | dict(target=RATING), "supervise='token' gives no ratings"),
        (POLICY | dict(target=TargetConfig("value", "none", "keep", "hard")), "gives ids of tokens"),
        (POLICY | dict(target=TargetConfig("value", "none", "mask")), "gives ids of tokens"),
        (dict(supervise="token", target=VALUE), "'token' and 'language' go together"),
        (POLICY | dict(supervise="step"), "'token' and 'language' go together"),
    ],
)
def test_what_is_supervised_fits_head_and_target(tmp_path, one_device, changes, message):
    with pytest.raises(ValueError, match=message):
        loop.train(experiment(make_data(tmp_path / "data"), **changes), tmp_path / "run")
