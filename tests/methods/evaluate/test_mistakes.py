"""MR-Ben, BIG-Bench-Mistake and Hard2Verify: readers, the programs that decide four tasks, figures in closed form."""

import base64
import hashlib
import itertools
import json

import numpy as np
import pytest
from refusing import refused

from jprm.io.jsonl import write_records
from jprm.methods.data.readers import find
from jprm.methods.evaluate.benchmark import Request
from jprm.methods.evaluate.benchmarks import registered
from jprm.methods.evaluate.mistakes import MR_BEN, levels_report, mcc, mistakes_report, predicted
from jprm.methods.evaluate.run import source
from jprm.methods.evaluate.suite import standard_suite
from jprm.tree import read_trees, tree_of

SOLUTION = {
    "Question_UUID": "q", "Subject": "college_physics", "Question": "What?", "Options": "A: one\nB: two",
    "Model_Solution_Steps": ["Step 1: a", "", "Step 2: b", "Solution: B"], "Sampled_Model": "m",
    "Model_Solution_Correctness": "incorrect", "Model_Solution_First_Error_Step": "2",
}  # fmt: skip
PROGRAM = SOLUTION | {
    "Model_Solution_Steps": "def f():\n\n    return 2", "Model_Solution_First_Error_Step": "  return 2",
    "Subject": "coding",
}  # fmt: skip

PROOF = {
    "unique_id": "u", "question": "Prove it.", "model_response_by_step": ["a", "b", "c"], "human_labels": [1, 0, 1],
    "human_labels_first_error_idx": 1,
}  # fmt: skip


def read(name, item):
    reader = find(name)
    return list(reader.parse(item, "f:1", reader.options()))


def test_mr_ben_is_read_by_the_numbers_of_steps_and_lines_of_programs():
    (record,) = read("mr_ben", SOLUTION)
    assert record["steps"] == ["Step 1: a", "Step 2: b", "Solution: B"]
    assert (record["labels"], record["first_error"]) == ([1, 0, None], 1)
    assert (
        record["problem"] == "What?\nA: one\nB: two"
        and record["correct"] is False
        and record["task"] == "college_physics"
    )
    (record,) = read("mr_ben", PROGRAM)
    assert (record["steps"], record["first_error"]) == (["def f():", "    return 2"], 1)
    (record,) = read("mr_ben", PROGRAM | {"Model_Solution_First_Error_Step": "x = 1"})
    assert record["first_error"] is None and record["labels"] == [None, None]
    right = {"Model_Solution_Correctness": "correct", "Model_Solution_First_Error_Step": "N/A"}
    (record,) = read("mr_ben", SOLUTION | right)
    assert record["first_error"] == -1 and record["labels"] == [1, 1, 1]


def test_steps_without_text_are_left_out_and_the_place_moves():
    item = {"input": "( (", "steps": ["a", " ", "b"], "mistake_index": 2, "answer": None, "target": ") )"}
    (record,) = read("big_bench_mistake", item)
    assert (record["steps"], record["first_error"], record["task"]) == (["a", "b"], 1, "dyck_languages")
    assert record["correct"] is False and "answer" not in record


def encrypted(item, canary="c"):
    """As the authors publish a record: each text XORed with the SHA-256 of the canary, in base64."""
    key = hashlib.sha256(canary.encode()).digest()

    def hidden(value):
        text = (value if isinstance(value, str) else json.dumps(value)).encode()
        return base64.b64encode(bytes(a ^ b for a, b in zip(text, itertools.cycle(key), strict=False))).decode()

    return {"canary": canary} | {key: value if key == "unique_id" else hidden(value) for key, value in item.items()}


def test_hard2verify_is_read_as_published_and_in_plain_text():
    long = PROOF | {"question": "12", "model_response_by_step": ["\u221a2 is irrational. " * 20, "b", "c"]}
    for item in (PROOF, long, PROOF | {"human_labels": [1, 1, 1], "human_labels_first_error_idx": -1}):
        (record,) = read("hard2verify", encrypted(item))
        assert record["problem"] == item["question"] and record["steps"] == item["model_response_by_step"]
        assert record["labels"] == item["human_labels"] and record["id"] == "u"
        assert record["first_error"] == item["human_labels_first_error_idx"] and record["correct"] == (
            record["first_error"] < 0
        )
        assert read("hard2verify", item) == read("hard2verify", item | {"canary": "c"}) == [record]


def test_mcc_is_mr_bens_own():
    rng = np.random.default_rng(0)
    metrics = pytest.importorskip("sklearn.metrics")
    for _ in range(20):
        said, true = rng.random(30) < rng.random(), rng.random(30) < rng.random()
        assert mcc(said, true, np.ones((1, 30)))[0] == pytest.approx(metrics.matthews_corrcoef(true, said))
    assert mcc(np.ones(4, bool), np.array([True, False, True, False]), np.ones((1, 4)))[0] == 0


def tree(first, scores, task="a", problem=""):
    steps = [f"Step {i}" for i in range(len(scores))]
    record = {"problem": problem or f"p{first}{scores}", "steps": steps, "scores": scores}
    return tree_of(record | {"first_error": first, "task": task})


def test_figures_in_closed_form():
    trees = [
        tree(-1, [0.9, 0.8]),  # right
        tree(-1, [0.9, 0.2]),  # a mistake is said to be at 1
        tree(1, [0.9, 0.2]),  # right
        tree(0, [0.9, 0.2], "b"),  # at 1, and it is at 0
        tree(None, [0.9, 0.9], "b"),  # of unknown place, and said to have none
    ]
    assert predicted([np.array([0.9, 0.2, 0.1]), np.array([0.9])], 0.5).tolist() == [1, -1]
    report = mistakes_report(trees, 0.5, 0)
    assert (report["n"], report["n_error"], report["n_not_located"]) == (5, 3, 1)
    values = {key: report[key]["value"] for key in ("error_accuracy", "correct_accuracy", "f1", "accuracy")}
    assert values == {"error_accuracy": 0.5, "correct_accuracy": 0.5, "f1": 0.5, "accuracy": 0.5}
    # called correct and so: 1; called wrong and so: 2; the others: 1 and 1
    assert report["mcc"]["value"] == pytest.approx((1 * 2 - 1 * 1) / np.sqrt(2 * 2 * 3 * 3))
    assert -1 <= report["mcc"]["low"] <= report["mcc"]["high"] <= 1
    # a finds one mistake of one, and calls one of two right solutions so; b none of two, of which one has no place
    assert report["mr_score"]["value"] == pytest.approx(((0.2 * 1 / 2 + 0.3) + 0) / 2)
    assert report["mr_score"]["pooled"] == pytest.approx(0.2 / 6 + 0.3 * 1 / 3)
    request = Request({"c": trees[:4], "d": trees[4:]}, seed=0)  # subjects are files, where there are several
    by_file = MR_BEN.figures(request)["mr_score"]["value"]
    assert by_file == pytest.approx((0.2 * (1 * 2 - 0) / np.sqrt(1 * 2 * 2 * 3) + 0.3 / 2 + 0) / 2)
    assert MR_BEN.figures(Request({"c": trees}, seed=0))["mr_score"] == report["mr_score"]
    assert report["tasks"]["b"]["error_accuracy"]["value"] == 0
    assert report["baselines"]["none"]["accuracy"]["value"] == 0.5


def test_levels_are_hard2verifys_own():
    """`calculate_metrics` and `calculate_error_id_metrics` of the authors' `utils.py`, of step verdicts."""
    metrics = pytest.importorskip("sklearn.metrics")
    rng = np.random.default_rng(0)
    labels = [(rng.random(rng.integers(1, 6)) < 0.8).astype(int).tolist() for _ in range(60)]
    scores = [rng.random(len(labels_of)).tolist() for labels_of in labels]
    trees = [
        tree_of({"problem": f"p{i % 30}", "steps": ["s"] * len(labels_of), "labels": labels_of, "scores": score,
                 "first_error": labels_of.index(0) if 0 in labels_of else -1})
        for i, (labels_of, score) in enumerate(zip(labels, scores, strict=True))
    ]  # fmt: skip
    levels = levels_report(trees, 0.25, 0)["levels"]

    def counts_of(truth, said):
        right, wrong = (metrics.recall_score(truth, said, pos_label=label) for label in (1, 0))
        return [right, wrong, (right + wrong) / 2, 2 * right * wrong / (right + wrong)]

    verdicts = [[int(score >= 0.25) for score in of_chain] for of_chain in scores]
    expected = {
        "steps": counts_of(sum(labels, []), sum(verdicts, [])),
        "responses": counts_of([min(x) for x in labels], [min(x) for x in verdicts]),
    }
    first, named = ([of_chain.index(0) if 0 in of_chain else -1 for of_chain in side] for side in (labels, verdicts))
    right = np.mean([said == -1 for true, said in zip(first, named, strict=True) if true == -1])
    wrong = np.mean([said == true for true, said in zip(first, named, strict=True) if true != -1])
    expected["first error"] = [right, wrong, (right + wrong) / 2, 2 * right * wrong / (right + wrong)]
    assert {name: [figure["value"] for figure in row.values()] for name, row in levels.items()} == {
        name: pytest.approx(row) for name, row in expected.items()
    }
    assert list(levels["steps"]) == ["right", "wrong", "accuracy", "f1"]


def test_solutions_of_one_question_are_scored_into_one_file(tmp_path):
    """A file of records with an `id` of another line is refused, and a question of MR-Ben has three solutions."""
    records = [record for name in ("gpt", "llama") for record in read("mr_ben", SOLUTION | {"Sampled_Model": name})]
    write_records(tmp_path / "scored.jsonl", records)
    assert [tree.extra["generator"] for tree in read_trees(tmp_path / "scored.jsonl")] == ["gpt", "llama"]
    assert {tree.extra["question_id"] for tree in read_trees(tmp_path / "scored.jsonl")} == {"q"}


def test_the_published_files_are_read_whole(shared_data):
    counts = {"physics": (667, 348, 0), "chemistry": (848, 466, 0), "coding": (238, 164, 13)}
    for name, wanted in counts.items():
        records = source("mr_ben").records(shared_data / f"mrben/{name}.json")
        places = [record["first_error"] for record in records]
        assert (len(places), sum(place != -1 for place in places), places.count(None)) == wanted
    for name in ("dyck_languages", "multistep_arithmetic", "tracking_shuffled_objects", "word_sorting"):
        records = source("big_bench_mistake").records(shared_data / f"big_bench_mistake/{name}.jsonl")
        assert {record["task"] for record in records} == {name}


def test_the_standard_suite_takes_what_is_there(tmp_path):
    refused(FileNotFoundError, "processbench/gsm8k.json", standard_suite, tmp_path)
    for name in ("processbench/math.json", "mrben/physics.json"):
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_text(json.dumps([]))
    suite = standard_suite(tmp_path)
    assert {section: [path.name for path in paths] for section, paths in suite.data.items()} == {
        "processbench": ["math.json"], "mr_ben": ["physics.json"]}  # fmt: skip
    assert [path.name for path in suite.calibrate["processbench"]] == ["math.json"]
    assert len(suite.absent) == sum(len(benchmark.standard) for benchmark in registered().values()) - 2
