"""The conformal filter: what it accepts, guarantees and refuses."""

import json

import numpy as np
import pytest
from refusing import refused

from jprm.apps import cli
from jprm.io.jsonl import write_records
from jprm.methods.evaluate.conformal import accept_threshold
from jprm.methods.search.files import accept, calibrate, filter_file
from jprm.tree import read_records

WAY = {"method": "BestOfN", "n": 8, "rule": "prod", "choose": "best", "policy": "p", "seed": 0}


def results(count, number, name="p", **way):
    """Chosen chains whose score is the probability that they are right."""
    rng = np.random.default_rng(number)
    score_N = rng.uniform(size=count)
    right_N = rng.uniform(size=count) < score_N
    return [
        {"problem": f"{name}{i}", "samples": [{"steps": ["s"]}], "search": WAY | way | {
            "chosen": 0, "answer": "1", "score": float(score), "correct": bool(right), "policy_tokens": i}}
        for i, (score, right) in enumerate(zip(score_N, right_N, strict=True))
    ]  # fmt: skip


def files(tmp_path, known, new):
    write_records(tmp_path / "known.jsonl", known)
    write_records(tmp_path / "new.jsonl", new)
    return tmp_path / "new.jsonl", tmp_path / "known.jsonl", tmp_path / "out.jsonl"


def test_the_threshold_is_that_of_the_bound():
    records = results(500, 0)
    scores, right = (np.array([record["search"][key] for record in records]) for key in ("score", "correct"))
    threshold = calibrate(records, 0.2, 0.9)
    assert threshold == accept_threshold(scores, right, 0.2, confidence=0.9) and 0.4 < threshold.threshold < 0.9
    edge = {**records[0], "search": records[0]["search"] | {"score": threshold.threshold}}
    assert accept(edge, threshold)["search"]["accepted"]
    edge["search"]["score"] -= 1e-9
    assert not accept(edge, threshold)["search"]["accepted"]


def test_a_search_without_a_choice_is_not_accepted_and_not_counted():
    records = results(500, 0)
    none = {"problem": "none", "search": WAY | {"chosen": None, "score": None, "correct": None}}
    threshold = calibrate(records, 0.2, 0.9)
    assert calibrate([*records, none], 0.2, 0.9) == threshold
    assert accept(none, threshold)["search"]["accepted"] is False


def test_too_few_results_accept_nothing():
    threshold = calibrate(results(5, 0), 0.01, 0.99)
    verdict = accept(results(1, 1)[0], threshold)["search"]
    assert (verdict["accepted"], verdict["threshold"]) == (False, None)


def test_the_command(tmp_path, capsys):
    new, known, out = files(tmp_path, results(500, 0), results(200, 1, "q"))
    args = ["search", "filter", "--input", str(new), "--calibrate", str(known), "--output", str(out)]
    assert cli.main([*args, "--error-rate", "0.2", "--confidence", "0.9"]) == 0
    records = list(read_records(out))
    taken = [record["search"] for record in records if record["search"]["accepted"]]
    assert len(records) == 200 and 20 < len(taken) < 150
    assert {(x["error_rate"], x["confidence"]) for x in taken} == {(0.2, 0.9)}
    assert min(x["score"] for x in taken) >= taken[0]["threshold"]
    said = capsys.readouterr().out
    assert f"accepted: {len(taken)}, abstained: {200 - len(taken)}" in said
    assert sum(not x["correct"] for x in taken) == int(said.split("accepted_wrong: ")[1].split(",")[0])


@pytest.mark.parametrize(
    ("known", "new", "said"),
    [
        (results(9, 0), results(9, 1, "q", n=4, seed=1), "search.n"),
        (results(9, 0), results(9, 1), "1: problem"),
        (results(9, 0) + results(1, 1), results(9, 1, "q"), "10: problem"),
        (results(9, 0) + results(9, 0, "r", n=4), results(9, 1, "q"), "record 10"),
        ([{"problem": "p", "steps": ["s"]}], results(9, 1, "q"), "1: search"),
    ],
)
def test_refusals(known, new, said, tmp_path):
    new, known, out = files(tmp_path, known, new)
    refused(ValueError, said, filter_file, new, known, out, 0.2, 0.9)
    assert not out.exists()


def test_refused_scores():
    records = json.loads(json.dumps(results(3, 0)))
    records[1]["search"]["correct"] = None
    refused(ValueError, "record 2: search.correct", calibrate, records, 0.2, 0.9)
    records[0]["search"]["score"] = 1.5
    refused(ValueError, "record 1: search.score", calibrate, records, 0.2, 0.9)
