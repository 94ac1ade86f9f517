"""Pools with samples without steps, against brute force over all subsets of all samples."""

import itertools

import numpy as np
import pytest
from refusing import refused

import jprm
from experiments.studies.cost import equal_cost_report
from jprm.io.jsonl import write_records
from jprm.methods.data.readers import find
from jprm.methods.evaluate.best_of_n import best_of_n_report, pools_of
from jprm.methods.evaluate.run import scored_trees, source
from jprm.methods.evaluate.scored import ScoreError
from jprm.score.aggregate import RULES
from jprm.tree import record_of, tree_of


def records(sizes, empty, seed=0, answers=True):
    """Pools of `sizes` samples, the first of each `empty` without steps. Scores are distinct."""
    rng = np.random.default_rng(seed)
    rows = []
    for p, (size, none) in enumerate(zip(sizes, empty, strict=True)):
        scores = (rng.permutation(size) + 1) / (size + 1)
        samples = []
        for i in range(size):
            right = bool(rng.random() < 0.5) and i >= none
            sample = {"steps": [], "correct": False} if i < none else {
                "steps": ["x"], "scores": [float(scores[i])], "correct": right}  # fmt: skip
            if answers and i >= none:
                sample["answer"] = "1" if right else "2"
            samples.append(sample)
        rows.append({"problem": f"p{p}", "samples": samples})
    return rows


def read(pools):
    reader = find("pools")
    options = reader.options(empty_samples="drop")
    return [tree_of(record) for item in pools for record in reader.parse(item, "here", options)]


def best(subset):
    kept = [s for s in subset if s["steps"]]
    return max(kept, key=lambda s: s["scores"][0])["correct"] if kept else False


def majority(subset):
    votes = [s["answer"] for s in subset if s["steps"]]
    ones, twos = votes.count("1"), votes.count("2")
    return 0.0 if not votes else 0.5 if ones == twos else float(ones > twos)


@pytest.mark.parametrize("answers", [True, False])
def test_samples_without_steps_take_their_places(answers):
    pools = records([4, 5, 6, 4], [2, 0, 3, 4], answers=answers)
    report = best_of_n_report(read(pools), seed=0)
    assert (report["n_max"], report["n_samples"], report["without_steps"]) == (4, 19, 9)
    assert report["mean_accuracy"] == pytest.approx(
        np.mean([np.mean([s["correct"] for s in r["samples"]]) for r in pools])
    )
    for n in range(1, 5):
        for key, chosen in (("best_of_n", best), ("majority", majority)):
            if key == "majority" and not answers:
                continue
            wanted = np.mean([np.mean([chosen(x) for x in itertools.combinations(r["samples"], n)]) for r in pools])
            actual = report["rules"]["prod"][key] if key == "best_of_n" else report[key]
            assert actual["value"][n - 1] == pytest.approx(wanted, abs=1e-12), (key, n)
    curves = pools_of(read(pools))
    assert all(curve.shape[0] == 4 for curve in (curves.key[rule] for rule in RULES))


def test_a_pool_of_empty_samples_alone_is_scored_and_counted(tiny_run, tmp_path, one_device):
    pools = records([3, 3], [3, 1])
    for record in pools:
        for sample in record["samples"]:
            sample.pop("scores", None)
    write_records(tmp_path / "pool.jsonl", pools)
    prm = jprm.load(tiny_run.folder)
    trees = scored_trees(prm, tmp_path / "pool.jsonl", source("pools"), tmp_path / "scores")
    assert [len(tree.nodes) for tree in trees] == [0, 2]
    assert [tree_of(record_of(tree)) for tree in trees] == trees
    report = best_of_n_report(trees, seed=0)
    assert (report["n_problems"], report["n_max"], report["without_steps"]) == (2, 3, 4)
    assert equal_cost_report({"tiny": trees}, {"tiny": prm}, 1e6, None, seed=0)["n_max"] == 3


def test_a_count_that_is_none_is_refused():
    (tree,) = read(records([2], [0]))
    record = record_of(tree)
    for count in (-1, True, "2", 0.5):
        refused(ScoreError, "record 1", pools_of, [tree_of(record | {"empty_samples": count})])
