"""Labels of several judges as one: Dawid and Skene's model, gold labels against leniency, and the command."""

import json
import pathlib

import numpy as np
import pytest
from refusing import refused

from jprm.apps.cli import main
from jprm.io.jsonl import write_records
from jprm.methods.label.crowd import PRIOR, corrected, correction, dawid_skene, log_odds, majority, matrices
from jprm.methods.label.pooled import label_pooled, pooled, table
from jprm.tree import read_records


def judged(seed, steps, hit_rate, false_alarm, rate=0.3, hard=None):
    """Returns the true classes and verdicts of judges; of hard errors each finds this fraction of what it finds."""
    rng = np.random.default_rng(seed)
    correct = (rng.random(steps) >= rate).astype(int)
    ease = np.ones(steps) if hard is None else np.where(rng.random(steps) < 0.5, hard, 1.0)
    alarm = np.where(correct[:, None] == 1, false_alarm, np.array(hit_rate) * ease[:, None])
    return correct, 1 - (rng.random(alarm.shape) < alarm).astype(int)


LENIENT = ([0.1, 0.85, 0.85, 0.85], [0.02, 0.15, 0.15, 0.15])
ALL_LENIENT = ([0.9] * 5, [0.03] * 5)


def accuracy(p_N, correct):
    return np.mean((p_N >= 0.5) == correct)


def test_the_model_is_that_which_crowd_kit_gave():
    """Of 40 steps that four judges label, one of them lenient, each with some left out."""
    theirs = json.loads(pathlib.Path(__file__).with_name("crowd_kit.json").read_text())
    ours = dawid_skene(np.array(theirs["verdicts"]), iterations=theirs["iterations"], tolerance=-np.inf)
    np.testing.assert_allclose(ours.posterior_NC, theirs["posterior"], atol=1e-9)
    np.testing.assert_allclose(ours.prior_C, theirs["prior"], atol=1e-9)
    np.testing.assert_allclose(ours.confusion_JCV, theirs["confusion"], atol=1e-9)
    assert ours.iterations == theirs["iterations"] and dawid_skene(np.array(theirs["verdicts"])).iterations < 100


def test_the_model_beats_the_majority_where_one_judge_is_lenient():
    ahead = []
    for seed in range(10):
        correct, verdict_NJ = judged(seed, 1000, *LENIENT)
        model = dawid_skene(verdict_NJ)
        ahead.append(accuracy(model.posterior_NC[:, 1], correct) - accuracy(majority(verdict_NJ, 2)[:, 1], correct))
        np.testing.assert_allclose(model.confusion_JCV[:, 0, 0], LENIENT[0], atol=0.12)
        np.testing.assert_allclose(model.prior_C[0], 0.3, atol=0.06)
    assert min(ahead) > 0.01 and np.mean(ahead) > 0.03


def test_gold_labels_correct_judges_that_are_all_lenient():
    errors = {k: [] for k in (0, 20, 50, 200)}
    for seed in range(10):
        correct, verdict_NJ = judged(seed, 1000, *ALL_LENIENT, hard=1 / 6)
        p_N = dawid_skene(verdict_NJ).posterior_NC[:, 1]
        order = np.random.default_rng(seed).permutation(1000)
        for k, errors_of in errors.items():
            index_K = order[:k]
            q_N = corrected(p_N, *correction(p_N, correct[index_K], index_K))
            rest = order[200:]
            loss_N = -np.log(np.where(correct, q_N, 1 - q_N))
            errors_of.append((q_N[rest].mean() - correct[rest].mean(), loss_N[rest].mean()))
    bias, loss = ({k: np.mean([error[i] for error in errors_of]) for k, errors_of in errors.items()} for i in (0, 1))
    assert bias[0] > 0.1 and abs(bias[20]) < bias[0] / 2 and abs(bias[200]) < 0.02  # errors that nobody found
    assert loss[0] > 2 * loss[20] > 2 * loss[50] > 2 * loss[200]


@pytest.mark.parametrize("hard", [1, 1 / 2, 1 / 3, 1 / 6])
@pytest.mark.parametrize("k", [1, 10, 400])
def test_a_correction_is_the_mode_of_its_posterior(hard, k):
    for seed in range(5):
        correct, verdict_NJ = judged(seed, 1000, *ALL_LENIENT, hard=hard)
        p_N = dawid_skene(verdict_NJ).posterior_NC[:, 1]
        index_K = np.random.default_rng(seed).permutation(1000)[:k]
        a, b = correction(p_N, correct[index_K], index_K)
        gap_K = correct[index_K] - corrected(p_N[index_K], a, b)
        slope = [gap_K.sum() - a / PRIOR[0] ** 2, gap_K @ log_odds(p_N[index_K]) - (b - 1) / PRIOR[1] ** 2]
        np.testing.assert_allclose(slope, 0, atol=1e-5)


def test_no_gold_label_changes_nothing_and_steps_weigh_as_often_as_they_are_there():
    _, verdict_NJ = judged(0, 50, *LENIENT)
    p_N = dawid_skene(verdict_NJ).posterior_NC[:, 1]
    none = np.zeros(0, int)
    assert correction(p_N, none, none) == pytest.approx((0, 1))
    weight_N = np.random.default_rng(0).integers(1, 4, 50)
    weighted = dawid_skene(verdict_NJ, weight_N=weight_N.astype(float))
    repeated = dawid_skene(np.repeat(verdict_NJ, weight_N, axis=0))
    np.testing.assert_allclose(weighted.confusion_JCV, repeated.confusion_JCV, atol=1e-9)
    refused(ValueError, "no verdict", dawid_skene, np.array([[1, 1], [-1, -1]]))


def test_the_report_has_each_judges_errors_with_intervals():
    _, verdict_NJ = judged(1, 600, *LENIENT)
    none = np.zeros(0, int)
    names, problems = ["a", "b", "c", "d"], [str(n // 3) for n in range(600)]
    report, p_N = pooled(verdict_NJ, names, problems, none, none, 0)
    for name, hit_rate, alarm in zip(names, *LENIENT, strict=True):
        judge = report["judges"][name]
        assert judge["found"]["low"] < hit_rate < judge["found"]["high"]
        assert judge["false_alarm"]["low"] < alarm < judge["false_alarm"]["high"]
    assert report["error_rate"]["value"] == pytest.approx(1 - p_N.mean()) and report["problems"] == 200
    assert report["alpha"]["value"] < 0.5


def test_matrices_are_counted_where_every_step_is_gold():
    correct, verdict_NJ = judged(2, 400, *LENIENT)
    verdict_NJ[::7, 2] = -1
    counted = [
        [[np.mean(verdict_N[(verdict_N >= 0) & (correct == c)] == v) for v in (0, 1)] for c in (0, 1)]
        for verdict_N in verdict_NJ.T
    ]
    p_N = dawid_skene(verdict_NJ).posterior_NC[:, 1]
    np.testing.assert_allclose(matrices(verdict_NJ, p_N, correct, np.arange(400)), counted, atol=0.02)
    none = np.zeros(0, int)
    np.testing.assert_allclose(matrices(verdict_NJ, correct.astype(float), none, none), counted)


def test_gold_labels_correct_the_figures_of_judges():
    """Four judges miss the same half of the errors and a careful one does not: tests/statistics has the coverage."""
    correct, verdict_NJ = judged(0, 600, *ALL_LENIENT, hard=1 / 6)
    verdict_NJ[:, 4] = np.random.default_rng(1).random(600) >= np.where(correct, 0.03, 0.9)
    index_K = np.random.default_rng(0).permutation(600)[:150]
    names, problems = list("abcde"), [str(n // 5) for n in range(600)]
    report, p_N = pooled(verdict_NJ, names, problems, correct[index_K], index_K, 0)
    for name, found in zip(names, [0.525] * 4 + [0.9], strict=True):
        judge = report["judges"][name]
        assert judge["found"]["low"] < found < judge["found"]["high"] < found + 0.2
        assert judge["false_alarm"]["low"] < 0.03 < judge["false_alarm"]["high"] < 0.2
    np.testing.assert_array_equal(p_N[index_K], correct[index_K])
    assert report["error_rate"]["value"] == pytest.approx(1 - p_N.mean())
    assert "corrected by 150 gold labels" in table(report).title
    none = np.zeros(0, int)
    assert "independent" in table(pooled(verdict_NJ[:60], names, problems[:60], none, none, 0)[0]).title


def chain(problem, labels, **more):
    return {"problem": problem, "steps": [f"step {i}" for i in range(len(labels))], "labels": labels, **more}


def test_the_command_pools_any_number_of_files(tmp_path, capsys):
    rng = np.random.default_rng(0)
    correct, verdict_NJ = judged(0, 120, *LENIENT)
    correct, verdict_NJ = correct.reshape(40, 3), verdict_NJ.reshape(40, 3, 4)
    for j, name in enumerate("abcd"):
        rows = [chain(f"p{i}", verdict_NJ[i, :, j].tolist()) for i in range(40)]
        if name == "d":  # ratings, in another order, without some
            rows = [{**row, "labels": [2 * x - 1 for x in row["labels"]], "semantics": "rating"} for row in rows[:35]]
            rows = [rows[i] for i in rng.permutation(35)]
        write_records(tmp_path / f"{name}.jsonl", rows)
    write_records(tmp_path / "gold.jsonl", [chain("p0", correct[0].tolist()), chain("p1", [1, None, None])])
    files = [str(tmp_path / f"{name}.jsonl") for name in "abcd"]
    command = ["label", "consensus", "--input", files[0], "--other", *files[1:]]
    command += ["--output", str(tmp_path / "out.jsonl")]
    pooling = [*command, "--by", "dawid_skene", "--gold", str(tmp_path / "gold.jsonl"), "--report",
               str(tmp_path / "r.json")]  # fmt: skip
    assert main(pooling) == 0
    assert "errors called errors" in capsys.readouterr().out
    report = json.loads((tmp_path / "r.json").read_text())
    assert list(report["judges"]) == ["a", "b", "c", "d"] and report["judges"]["d"]["verdicts"] == 105
    assert report["gold"] == 4 and set(report["correction"]) == {"a", "b"}
    records = list(read_records(tmp_path / "out.jsonl"))
    labels = [[node["label"] for node in record["nodes"]] for record in records]
    assert labels[0] == correct[0].tolist() and [record["problem"] for record in records][:2] == ["p0", "p1"]
    assert accuracy(np.array(labels).reshape(-1), correct.reshape(-1)) > 0.85
    assert main(command) == 0  # all four agree on the first error
    agreed = {record["problem"] for record in read_records(tmp_path / "out.jsonl")}
    assert agreed and "p35" not in agreed
    assert main([*command, "--gold", files[1]]) == 2


def test_files_that_cannot_be_pooled_are_refused(tmp_path):
    first, second, gold = (tmp_path / name for name in ("a.jsonl", "b.jsonl", "gold.jsonl"))
    write_records(first, [chain("p", [1, 0])])
    write_records(second, [chain("q", [1, 0])])
    write_records(gold, [chain("q", [1, 0])])
    out = tmp_path / "out.jsonl"
    refused(ValueError, "two judges of one name", label_pooled, [first, first], out, [None] * 3)
    refused(ValueError, "no step of", label_pooled, [first, second], out, [None] * 3)
    write_records(second, [chain("p", [1, 0])])
    refused(ValueError, "nothing is corrected", label_pooled, [first, second], out, [None] * 3, gold)
    assert not out.exists()
