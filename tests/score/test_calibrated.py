"""The calibration map in a model's folder: stored, applied on request, refused if absent or of another step."""

import json
import shutil

import numpy as np
import pytest
from test_evaluate_run import short_rows  # noqa: F401  (autouse)
from tiny_run import chains, pool_of, processbench_file, trees

from jprm.apps import cli
from jprm.io.jsonl import write_records
from jprm.methods.jobs.calibration_map import NAME, apply, from_json, mapped
from jprm.tree import read_records


@pytest.fixture(scope="module")
def model(tiny_run, tmp_path_factory):
    """A copy: storing a map changes the folder."""
    return shutil.copytree(tiny_run.folder, tmp_path_factory.mktemp("calibrated") / "model")


def score(model, *args):
    return cli.main(["score", "--model", str(model), *map(str, args)])


def test_scores_are_mapped_when_asked_and_only_then(model, tmp_path, capsys):
    file, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    write_records(file, [chains(1)[0], trees(1)[0], pool_of(chains(3, 1))])
    assert score(model, "--input", file, "--output", out, "--calibrated") == 2
    assert "calibration.json" in capsys.readouterr().err
    assert not out.exists()

    hard, easy = processbench_file(tmp_path / "hard.json", 9, 2), processbench_file(tmp_path / "easy.json", 12, 1)
    line = ["--model", model, "--data", hard, "--calibrate", easy, "--neutral", "drop", "--json", tmp_path / "c.json"]
    assert cli.main(["eval", "calibration", *map(str, line), "--store", "platt"]) == 0
    stored = json.loads((model / NAME).read_text())
    assert stored["map"] == json.loads((tmp_path / "c.json").read_text())["recalibrated"]["platt"]["map"]
    assert stored["fitted_on"] == [str(easy)]

    plain = tmp_path / "plain.jsonl"
    assert score(model, "--input", file, "--output", plain) == 0
    assert score(model, "--input", file, "--output", out, "--calibrated") == 0
    platt = from_json(stored["map"])
    (chain, tree, pool), (as_chain, as_tree, as_pool) = read_records(plain), read_records(out)
    pairs = [(chain["scores"], as_chain["scores"])]
    pairs += [([n["score"] for n in tree["nodes"]], [n["score"] for n in as_tree["nodes"]])]
    pairs += [(a["scores"], b["scores"]) for a, b in zip(pool["samples"], as_pool["samples"], strict=True)]
    for before, after in pairs:
        np.testing.assert_allclose(after, apply(platt, np.array(before)), atol=1e-6)  # both are written with 7 digits
    # A file of raw scores is not continued as one of mapped scores.
    assert score(model, "--input", file, "--output", plain, "--calibrated") == 2
    assert "request" in capsys.readouterr().err

    for damage, said in [
        (lambda r: r | {"step": 3}, "step 3"),
        (lambda r: r | {"map": {"kind": "spline"}}, "recalibration"),
        (lambda r: [], "recalibration"),
    ]:
        (model / NAME).write_text(json.dumps(damage(stored)))
        assert score(model, "--input", file, "--output", tmp_path / "more.jsonl", "--calibrated") == 2
        assert said in capsys.readouterr().err


def test_mapping_keeps_everything_else():
    same = from_json({"kind": "platt", "slope": 1.0, "intercept": 0.0})
    record = {"problem": "p", "steps": ["a", "b"], "scores": [0.25, 1.0], "mine": [1]}
    assert mapped(same, record) == record and mapped(same, record) is not record
