import json
import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from refusing import refused
from rich.console import Console

from jprm.methods.data.readers import find
from jprm.methods.evaluate import prmbench as pb
from jprm.methods.evaluate.benchmark import Request
from jprm.methods.evaluate.blocks import PageModel, show
from jprm.methods.evaluate.prmbench import BENCHMARK, SOCRATIC_PRMBENCH
from jprm.methods.evaluate.run import OPTIONS, source_of
from jprm.methods.evaluate.scored import ScoreError
from jprm.score.scale import Scale
from jprm.tree import tree_of, with_scores


def record(name, labels, scores, idx=0):
    return {"problem": f"problem {idx}", "steps": ["step"] * len(labels), "labels": labels, "scores": scores,
            "classification": name, "idx": idx}  # fmt: skip


def published(chains, right_only=False):
    """The counts, ratios and order of operations of the benchmark's own script, -1 and all."""
    tp = fp = tn = fn = 0
    for labels, scores in chains:
        for label, score in zip(labels, scores, strict=True):
            called = score > 0.5
            tp, fp = tp + (label == 1 and called), fp + (label == 0 and called)
            tn, fn = tn + (label == 0 and not called), fn + (label == 1 and not called)

    def ratio(a, b):
        return a / b if b else -1

    precision, recall = ratio(tp, tp + fp), ratio(tp, tp + fn)
    f1 = ratio(2 * precision * recall, precision + recall)
    precision, recall = ratio(tn, tn + fn), ratio(tn, tn + fp)
    negative = ratio(2 * precision * recall, precision + recall)
    return f1 if right_only else f1 * 0.5 + negative * 0.5, tp, tn


CHAIN = st.lists(st.tuples(st.integers(0, 1), st.sampled_from([0.0, 0.4, 0.5, 0.6, 1.0])), min_size=1, max_size=6)


@pytest.mark.parametrize("taxonomy", [pb.PRMBENCH, pb.SOCRATIC], ids=lambda taxonomy: taxonomy.title)
@given(data=st.data())
def test_scores_equal_the_published_script(taxonomy, data):
    items = data.draw(st.lists(st.tuples(st.sampled_from(taxonomy.classes), CHAIN), min_size=1, max_size=12))
    chains = [(name, [label for label, _ in chain], [score for _, score in chain]) for name, chain in items]
    counts = np.zeros((len(taxonomy.classes), 4))
    for name, labels, scores in chains:
        right, called = np.array(labels) == 1, np.array(scores) > 0.5
        counts[taxonomy.classes.index(name)] += [
            (right & called).sum(), (~right & called).sum(), (~right & ~called).sum(), (right & ~called).sum()
        ]  # fmt: skip
    actual = pb.prm_scores(counts, taxonomy)
    expected, tp, tn = published([chain[1:] for chain in chains])
    if tp and tn:  # elsewhere the script has its -1
        assert actual[0] == pytest.approx(expected)
    for c, name in enumerate(taxonomy.classes):
        right_only = name in taxonomy.right_only
        expected, tp, tn = published([chain[1:] for chain in chains if chain[0] == name], right_only)
        if tp and (tn or right_only):
            assert actual[1 + c] == pytest.approx(expected)
    groups = actual[1 + len(taxonomy.classes) :]
    for group, value in zip(taxonomy.groups.values(), groups, strict=True):
        members = [actual[1 + taxonomy.classes.index(name)] for name in group]
        assert value == pytest.approx(np.mean(members), nan_ok=True)


def test_socratic_prmbench_keeps_the_numbers_in_its_steps(tmp_path):
    item = {
        "modified_question": "q", "modified_process": ["Restate.", "1. Add. 2. Halve."], "error_steps": [2, 3],
        "classification": "decomposition_redundancy", "idx": "gsm8k#1",
    }  # fmt: skip
    path = tmp_path / "test_decomposition_redundancy.jsonl"
    path.write_text(json.dumps(item))
    (chain,) = source_of(SOCRATIC_PRMBENCH, path).records(path)
    assert (chain["steps"], chain["labels"]) == (["Restate.", "1. Add. 2. Halve."], [1, 0])
    tree = with_scores(tree_of(chain), [0.9, 0.1])
    report = SOCRATIC_PRMBENCH.figures(Request({"test": [tree]}))
    assert report["prm_score"]["value"] == report["classes"]["decomposition_redundancy"]["prm_score"]["value"] == 1
    assert len(pb.SOCRATIC.classes) == len(set(pb.SOCRATIC.classes)) == 20
    show(SOCRATIC_PRMBENCH.tables(report), Console(width=120))
    refused(ScoreError, "'decomposition_redundancy'", BENCHMARK.figures, Request({"test": [tree]}))


@pytest.mark.parametrize(
    ("f1", "negative", "published"), [(75.7, 28.3, 52.0), (86.9, 46.7, 66.8), (90.8, 29.2, 60.0), (64.9, 29.2, 47.0)]
)
def test_prm_score_of_published_f1s(f1, negative, published):
    """Llemma-PRM800k, GPT-4o, ReasonEval-7B and Math-Shepherd in the benchmark's own results, all classes."""
    # Any counts with these two F1s: with a wrong verdict of each kind on w steps, F1 = 2 tp / (2 tp + 2 w).
    counts = pb.Confusion(f1 / (100 - f1), 1, negative / (100 - negative), 1)
    assert [100 * x for x in pb.f1s(counts)] == pytest.approx([f1, negative])
    assert 100 * pb.prm_score(counts) == pytest.approx(published, abs=0.1)  # each of three numbers is rounded to 0.05


def test_report_by_hand():
    records = [
        record("circular", [1, 0, 1, 0], [0.9, 0.1, 0.5, 0.8]),  # 0.5 is not above 0.5
        record("circular", [1, 1], [0.9, 0.9], idx=1),
        record("circular", [0, 0], [0.1, 0.1], idx=1),  # repeated
        record("redundency", [0, 1], [0.7, 0.9], idx=0),
        record("multi_solutions", [1, 1, 1], [0.9, 0.9, 0.2], idx=7),
    ]
    report = pb.prmbench_report(list(map(tree_of, records)), seed=0)
    json.dumps(report, allow_nan=False)
    circular = report["classes"]["circular"]
    # 3 right called right, 1 wrong called right, 1 wrong called wrong, 1 right called wrong
    assert (circular["f1"], circular["negative_f1"]) == (0.75, 0.5) and circular["prm_score"]["value"] == 0.625
    assert (circular["n"], circular["n_steps"], circular["n_wrong"]) == (2, 6, 2)
    assert (circular["right_accuracy"], circular["wrong_accuracy"], circular["first_error_accuracy"]) == (0.75, 0.5, 1)
    redundency = report["classes"]["redundency"]
    assert (
        redundency["prm_score"]["value"] == pytest.approx((2 / 3 + 0) / 2) and redundency["first_error_accuracy"] == 0
    )
    multi = report["classes"]["multi_solutions"]
    assert multi["prm_score"]["value"] == pytest.approx(0.8) and multi["wrong_accuracy"] is None
    assert report["groups"]["simplicity"]["value"] == pytest.approx((0.625 + 1 / 3) / 2)
    assert report["groups"]["soundness"]["value"] is report["groups"]["sensitivity"]["value"] is None
    # all classes together: 6, 2, 1, 2
    assert report["prm_score"]["value"] == pytest.approx((12 / 16 + 2 / 6) / 2)
    assert report["repeated"] == 1 and report["first_error_accuracy"] == 0.5
    show(BENCHMARK.tables(report), Console(width=120))


@given(st.lists(st.tuples(st.sampled_from([0.0, 0.3, 0.5, 0.9]), st.integers(0, 1)), min_size=1, max_size=10))
def test_no_threshold_beats_the_best(items):
    score, right = (np.array(x, float) for x in zip(*items, strict=True))
    threshold, top = pb.best_threshold(score, right)

    def at(t):
        called, true = score > t, right == 1
        return pb.prm_score(pb.Confusion((true & called).sum(), (~true & called).sum(), (~true & ~called).sum(),
                                      (true & ~called).sum()))  # fmt: skip

    values = [at(t) for t in (-1, 0.0, 0.3, 0.5, 0.9)]
    if np.isnan(values).all():
        assert np.isnan(top)
    else:
        assert top == np.nanmax(values) == at(threshold)


def test_a_random_scorer_gets_what_theory_predicts(shared_data):
    records = []
    for path in sorted((shared_data / "prmbench").glob("*.jsonl")):
        records += [tree_of(chain) for _, chain in find("prmbench").read(path, **OPTIONS["prmbench"])]
    rng = np.random.default_rng(0)
    report = pb.prmbench_report([with_scores(tree, rng.random(len(tree.nodes))) for tree in records], seed=0)
    assert report["repeated"] == 5 and set(report["classes"]) == set(pb.PRMBENCH.classes)
    share = 1 - report["n_wrong"] / report["n_steps"]
    # precision is the share of right steps, recall 1/2; and the same for the wrong ones
    theory = (share / (share + 0.5) + (1 - share) / (1.5 - share)) / 2
    assert report["baselines"]["coin"]["prm_score"] == pytest.approx(theory)
    # 1,800 wrong steps, half found: the standard error of that share is 0.012, of PRMScore less than half of it
    assert report["n_wrong"] > 1500 and report["prm_score"]["value"] == pytest.approx(theory, abs=0.02)
    assert report["prm_score"]["low"] < theory < report["prm_score"]["high"]
    perfect = [with_scores(tree, [float(node.label) for node in tree.nodes]) for tree in records]
    report = pb.prmbench_report(perfect, seed=0)
    assert report["prm_score"]["value"] == report["prm_score"]["high"] == 1.0
    assert {group["value"] for group in report["groups"].values()} == {1.0}


@pytest.mark.parametrize("bench", [BENCHMARK, SOCRATIC_PRMBENCH], ids=lambda bench: bench.title)
def test_section_of_the_report_lists_baselines_best_first(bench):
    name = (pb.PRMBENCH if bench is BENCHMARK else pb.SOCRATIC).classes[0]
    report = bench.figures(Request({"f": [tree_of(record(name, [1, 1, 0], [0.9, 0.2, 0.1]))]}))
    table = next(iter(bench.section([PageModel("one", {bench.name: report})])))
    rows = {row[0]: row[1] for row in table.rows if row[0].startswith("baseline")}
    assert len(rows) == 3 and list(rows.values()) == sorted(rows.values(), reverse=True)


def test_bad_records_are_refused():
    refused(ScoreError, "'odd'", pb.prmbench_report, [tree_of(record("odd", [1], [0.5]))], 0)
    with pytest.raises(ScoreError, match="circular 0, step 1"):
        pb.prmbench_report([with_scores(tree_of(record("circular", [1, 1], [0.5, 0.5])), [0.5, None])], 0)
    refused(ScoreError, "labels", pb.prmbench_report, [tree_of(record("circular", [1, None], [0.5, 0.5]))], 0)
    refused(ScoreError, "PRMBench", pb.prmbench_report, [], 0)


@given(
    st.lists(
        st.tuples(st.sampled_from([*pb.PRMBENCH.classes[:2], "confidence"]), CHAIN, st.integers(0, 99)), min_size=1
    )
)
def test_redundancy_is_judged_by_its_own_output_and_threshold(items):
    """mr_eval/tasks/prmtest_classified/task.py: `labels = [not item > 0.15 ...]` for redundency and circular only."""
    trees, steps = [], []
    for i, (name, chain, seed) in enumerate(items):
        redundancy = np.random.default_rng(seed).choice([0.0, 0.15, 0.2, 0.9], len(chain)).tolist()
        tree = tree_of(record(name, [label for label, _ in chain], [score for _, score in chain], i))
        trees.append(with_scores(tree, [score for _, score in chain], {"redundancy": redundancy}))
        by_redundancy = name in ("redundency", "circular")
        steps += [
            (label, not other > 0.15 if by_redundancy else score > 0.5)
            for (label, score), other in zip(chain, redundancy, strict=True)
        ]
    report = pb.prmbench_report(trees, 0, Scale(redundancy=0.15))
    label, called = np.array(steps).T == 1
    assert report["accuracy"] == pytest.approx((label == called).mean())
    expected = pb.prm_score(pb.Confusion(*(int(x.sum()) for x in (label & called, ~label & called, ~label & ~called,
                                                               label & ~called))))  # fmt: skip
    assert report["prm_score"]["value"] == pytest.approx(expected, nan_ok=True) or np.isnan(expected)


def test_steps_are_read_without_the_number_before_them(shared_data):
    """The published wrappers' `remove_step_prefix`; all 2,326 steps of multi_solutions have such a number."""
    numbered, spaced = re.compile(r"(step\s*\d+\.|\d+\.\s)", re.IGNORECASE), 0
    for path in sorted((shared_data / "prmbench").glob("*.jsonl")):
        for _, chain in find("prmbench").read(path, **OPTIONS["prmbench"]):
            assert all(step == step.strip() and not numbered.match(step) for step in chain["steps"])
            spaced += sum(step.strip() != step for step in chain["modified_process"])
    kept = [chain["steps"] for _, chain in find("prmbench").read(path, outside="ignore", empty="drop")]
    assert sum(bool(numbered.match(step.strip())) for steps in kept for step in steps) == 2326 and spaced > 2000
