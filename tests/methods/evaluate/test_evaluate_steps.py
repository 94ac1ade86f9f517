import dataclasses
import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from refusing import refused

from jprm.io.outputs import write_json
from jprm.methods.evaluate import steps as ev
from jprm.methods.evaluate.findings import verdict
from jprm.methods.evaluate.run import check_neutral
from jprm.methods.evaluate.scored import ScoreError
from jprm.methods.evidence.baselines import cross_fitted
from jprm.statistics import auroc
from jprm.tree import tree_of

SCORE = st.sampled_from([0.0, 0.25, 0.5, 0.75, 1.0])
RATING = st.sampled_from([-1, 0, 1, None])


@st.composite
def trees(draw):
    nodes = [
        {"parent": draw(st.integers(-1, i - 1)), "text": "x" * (i + 1), "label": draw(RATING), "score": draw(SCORE)}
        for i in range(draw(st.integers(1, 10)))
    ]
    return {"problem": draw(st.sampled_from(["p", "q", "r"])), "semantics": "rating", "nodes": nodes}


def paths_of(nodes):
    parents = {node["parent"] for node in nodes}
    for leaf in set(range(len(nodes))) - parents:
        path = [leaf]
        while nodes[path[0]]["parent"] >= 0:
            path.insert(0, nodes[path[0]]["parent"])
        yield path


def first_error_by_definition(records, neutral, threshold=0.5):
    """(number of chains with an error, found; without one, found), one path at a time."""
    chains = set()
    for t, record in enumerate(records):
        for path in paths_of(record["nodes"]):
            classes = [ev.label_class(record["nodes"][i]["label"], "rating", neutral) for i in path]
            error = classes.index(0) if 0 in classes else -1
            cut = path[: error + 1] if error >= 0 else path
            if -1 not in classes[: len(cut)]:
                chains.add((t, tuple(cut), error))
    counts = {True: [0, 0], False: [0, 0]}
    for t, path, error in chains:
        scores = [records[t]["nodes"][i]["score"] for i in path]
        first = next((i for i, score in enumerate(scores) if score < threshold), -1)
        counts[error >= 0][0] += 1
        counts[error >= 0][1] += first == error
    return counts


@given(st.lists(trees(), min_size=1, max_size=4), st.sampled_from(ev.NEUTRAL))
@settings(deadline=None, max_examples=40)
def test_figures_equal_their_definitions(records, neutral):
    nodes = [(t, node) for t, record in enumerate(records) for node in record["nodes"]]
    classes = [ev.label_class(node["label"], "rating", neutral) for _, node in nodes]
    if not {0, 1} <= set(classes):
        refused(ScoreError, "labelled", ev.steps_report, list(map(tree_of, records)), neutral, seed=0)
        return
    arrays = [(t, n["parent"], c, n["score"]) for (t, n), c in zip(nodes, classes, strict=True)]
    right, wrong = ([x for x in arrays if x[2] == c] for c in (1, 0))

    def share(pairs):
        won = [1.0 if a[3] > b[3] else 0.5 if a[3] == b[3] else 0.0 for a, b in pairs]
        return np.mean(won) if won else None

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ev, "bootstrap", lambda statistic, groups, seed: Point(statistic, groups))
        report = ev.steps_report(list(map(tree_of, records)), neutral, seed=0)
    assert report["auroc"]["value"] == pytest.approx(share([(a, b) for a in right for b in wrong]))
    siblings = [(a, b) for a in right for b in wrong if a[:2] == b[:2]]
    assert report["alternatives"]["value"] == pytest.approx(share(siblings))
    assert report["alternatives"]["n_pairs"] == len(siblings)
    agree = [(score >= 0.5) == (c == 1) for _, _, c, score in arrays if c != -1]
    assert report["accuracy"]["value"] == pytest.approx(np.mean(agree))
    (n_error, found_error), (n_correct, found_correct) = first_error_by_definition(records, neutral).values()
    first_error = report["first_error"]
    assert (first_error["n_error"], first_error["n_correct"]) == (n_error, n_correct)
    for key, n, found_count in (
        ("error_accuracy", n_error, found_error),
        ("correct_accuracy", n_correct, found_correct),
    ):
        assert first_error[key] == (pytest.approx(found_count / n) if n else None)
    assert report["baselines"]["constant"]["auroc"]["value"] == 0.5


class Point:
    """Stands for `bootstrap` where only the value is of interest."""

    def __init__(self, statistic, groups):
        value = float(statistic(np.ones((1, len(groups))))[0])
        self.value = None if np.isnan(value) else value

    def json(self):
        return {"value": self.value, "low": None, "high": None}


PRM800K_LIKE = {
    "problem": "p",
    "semantics": "rating",
    "nodes": [
        {"parent": -1, "text": "a", "label": 1, "score": 0.9},
        {"parent": 0, "text": "longer", "label": -1, "score": 0.2},
        {"parent": 0, "text": "bb", "label": 0, "score": 0.6},
        {"parent": 0, "text": "human", "label": None, "score": 0.5},
        {"parent": 3, "text": "after an unlabelled step", "label": -1, "score": 0.1},
        {"parent": 2, "text": "c", "label": 1, "score": 0.4},
    ],
}


def test_chain_records_and_other_semantics(tmp_path):
    chain = {"problem": "q", "steps": ["a", "b"], "labels": [0.875, 0.125], "scores": [0.9, 0.1], "semantics": "value"}
    report = ev.steps_report(list(map(tree_of, [PRM800K_LIKE, chain])), "negative", seed=0)
    assert (report["n_problems"], report["n_steps"], report["n_right"], report["n_wrong"]) == (2, 8, 3, 4)
    write_json(tmp_path / "report.json", report)
    assert json.loads((tmp_path / "report.json").read_text()) == report


def test_neutral_is_needed_for_neutral_ratings_only():
    chain = {"problem": "q", "steps": ["a", "b"], "labels": [1, 0], "scores": [0.9, 0.1]}
    report = ev.steps_report([tree_of(chain)], None, seed=0)
    assert (report["n_right"], report["n_wrong"]) == (1, 1)
    refused(ScoreError, "neutral", ev.steps_report, [tree_of(PRM800K_LIKE)], None, seed=0)
    refused(ScoreError, "f, record 1: .*neutral", check_neutral, None, {"f": [PRM800K_LIKE]})
    check_neutral(None, {"f": [chain]})
    check_neutral("drop", {"f": [PRM800K_LIKE]})


@pytest.mark.parametrize(
    "labels, said",
    [(None, "0 .*right and 0 wrong"), ([1, 1], "2 .*right and 0 wrong"), ([0, 0], "0 .*right and 2 wrong")],
)
def test_steps_of_one_class_are_counted(labels, said):
    chain = {"problem": "q", "steps": ["a", "b"], "labels": labels or [None, None], "scores": [0.9, 0.1]}
    refused(ScoreError, said, ev.steps_report, [tree_of(chain)], None, seed=0)


def test_bad_input_is_named():
    tree = tree_of(PRM800K_LIKE)
    refused(TypeError, "neutral", ev.steps_report, [tree], seed=0)
    refused(ValueError, "positive", ev.steps_report, [tree], "ignore", seed=0)
    for bad in ({"score": None}, {"score": float("nan")}, {"label": 2}):
        nodes = (*tree.nodes[:5], dataclasses.replace(tree.nodes[5], **bad))
        with pytest.raises(ScoreError, match="record 2"):
            ev.steps_report([tree, dataclasses.replace(tree, nodes=nodes)], "positive", seed=0)
    with pytest.raises(ScoreError, match="'implicit'"):
        ev.steps_report([dataclasses.replace(tree, semantics="implicit")], "positive", seed=0)


def test_a_long_chain_takes_linear_time():
    size = 100_000
    nodes = [{"parent": i - 1, "text": "x", "label": 1 - 2 * (i == size - 1), "score": 0.7} for i in range(size)]
    parent, classes = (np.array([node[key] for node in nodes]) for key in ("parent", "label"))
    classes = (classes == 1).astype(int)
    ends, wrong = ev.judged_chains(parent, classes)
    assert (ends.tolist(), wrong.tolist()) == ([size - 1], [True])
    assert not ev.judged_right(parent, np.full(size, 0.7), ends, wrong, 0.5)[0]
    assert len(ev.alternatives(parent, classes)) == 0


def labelled_by(rng, wrong, problems=60, steps=6):
    """Chains whose steps of depth d and c characters are wrong with probability `wrong(d, c)`; scores are random."""
    records = []
    for p in range(problems):
        nodes = []
        for d, c in enumerate(rng.integers(5, 80, steps)):
            label = -1 if rng.random() < wrong(d, c) else 1
            nodes.append({"parent": d - 1, "text": "x" * int(c), "label": label, "score": float(rng.random())})
        records.append({"problem": f"problem {p}", "semantics": "rating", "nodes": nodes})
    return list(map(tree_of, records))


def test_a_model_is_measured_from_position_and_length_together():
    trees = labelled_by(np.random.default_rng(0), lambda d, c: 1 / (1 + np.exp(5 - d / 1.5 - c / 15)))
    report = ev.steps_report(trees, "drop", seed=0)
    areas = {name: row["auroc"]["value"] for name, row in report["baselines"].items()}
    assert areas["position_and_length"] > max(areas["position"], areas["step_length"]) + 0.03
    less = report["ahead"]["auroc"]
    assert less["baseline"] == max(areas, key=lambda name: areas[name])
    assert less["value"] == pytest.approx(report["auroc"]["value"] - areas[less["baseline"]])
    assert less["high"] < 0
    findings = list(ev.findings({"steps": report}))
    assert [finding.difference for finding in findings] == [less]  # chains have no alternatives
    assert next(verdict(findings))[0] == "bad"
    assert next(ev.tables(report | {"too_long": 0})).rows[0][2] == less


def test_labels_that_nothing_tells_are_told_by_no_fitted_baseline():
    """Fitted to the labels that they are judged on, ten numbers would tell some of them."""
    areas, problems = [], [f"problem {i}" for i in range(40)]
    for seed in range(8):
        rng = np.random.default_rng(seed)
        rows, classes = rng.normal(size=(40, 4, 10)), rng.integers(0, 2, (40, 4))
        score_M = np.concatenate(cross_fitted(list(rows), list(classes), problems))
        areas.append(auroc(score_M, classes.ravel() == 1))
    assert abs(np.mean(areas) - 0.5) < 0.04
