"""Evaluation commands and suites on published files: reading, scoring once, reporting."""

import dataclasses
import json
import shutil
import subprocess
import sys

import pytest
from pod import REPOSITORY
from refusing import bad, refused
from tiny_run import WORDS, chains, pool_file, pool_of, processbench_file, trees

from jprm.apps import cli
from jprm.io.jsonl import read_lines, write_records
from jprm.methods.data.prepare import prepare
from jprm.methods.evaluate import best_of_n
from jprm.methods.evaluate import suite as suites
from jprm.methods.evaluate.benchmarks import find
from jprm.methods.evaluate.options import OPTIONS
from jprm.methods.evaluate.run import run, source
from jprm.score import scorer


@pytest.fixture(scope="module", autouse=True)
def short_rows():
    """Rows of 128 tokens on one device: this is about files."""
    import tiny_run as tiny

    with pytest.MonkeyPatch.context() as patch, tiny.one_device():
        patch.setattr(scorer, "SHORTEST", 128)
        patch.setattr(scorer, "LONGEST", 512)
        yield


@pytest.fixture
def counted(monkeypatch):
    """The number of trees that the model was asked to score."""
    trees = []
    whole = scorer.PRM._prepared
    monkeypatch.setattr(
        scorer.PRM, "_prepared", lambda self, requested, *more: trees.extend(requested) or whole(self, requested, *more)
    )
    return trees


def prm800k_file(path, count):
    """Two completions at each of three steps, the first of which was chosen; and a step that the labeler wrote."""

    def step(i, k, written=None):
        completions = [{"text": f"{WORDS[0]} {i}", "rating": 1}, {"text": f"{WORDS[1]} {k}", "rating": [-1, 0][k % 2]}]
        chosen = None if written else 0
        return {"completions": completions, "human_completion": written, "chosen_completion": chosen}

    write_records(path, [
        {"question": {"problem": f"what is {i}?", "ground_truth_answer": str(i)},
         "label": {"steps": [step(i, 0), step(i, 1, {"text": "by hand"}), step(i, 2)], "finish_reason": "solution"},
         "is_quality_control_question": i == 0, "is_initial_screening_question": False}
        for i in range(count)
    ])  # fmt: skip
    return path


def report_of(name, **options):
    """The report that the library computes for the options of a command."""
    return run(find(name), OPTIONS[name](**options))


def call(command, *args):
    return cli.main(["eval", command, *map(str, args)])


def test_processbench(tiny_run, tmp_path, counted):
    easy, hard = processbench_file(tmp_path / "easy.json", 12, 1), processbench_file(tmp_path / "hard.json", 9, 2)
    out = tmp_path / "report.json"
    args = ["--model", tiny_run.folder, "--data", hard, easy, "--calibrate", easy, "--json", out]
    assert call("processbench", *args) == 0
    report = json.loads(out.read_text())
    assert list(report) == ["hard", "easy"]
    for name, n in [("hard", 9), ("easy", 12)]:
        assert report[name]["n"] == report[name]["n_error"] + report[name]["n_correct"] == n
        assert report[name]["threshold"] == 0.5
        assert report[name]["tuned"]["calibrated_on"] == "easy"
        assert report[name]["tuned"]["in_sample"] == (name == "easy")
    assert report["easy"]["tuned"]["f1"] == report["easy"]["upper_bound"]["f1"]
    assert len(counted) == 21

    # Again, and with only the calibration left out of the report: nothing is scored twice.
    options = dict(model=tiny_run.folder, calibrate=easy, to=out)
    assert report_of("processbench", data=(hard, easy), **options) == report
    assert list(report_of("processbench", data=(hard,), **options)) == ["hard"]
    assert len(counted) == 21
    assert sorted(path.name for path in (tmp_path / "report.json.scores").iterdir()) == [
        "easy.jsonl", "easy.jsonl.info.json", "hard.jsonl", "hard.jsonl.info.json",
    ]  # fmt: skip


def test_prmbench(tiny_run, tmp_path, counted):
    """The release has error steps beyond the end of a chain, which are no steps."""
    items = [
        {"modified_question": chain["problem"], "modified_process": chain["steps"], "idx": f"test_{i}",
         "error_steps": [k for k, label in enumerate(chain["labels"], start=1) if label < 1] + [99],
         "classification": ["circular", "redundency"][i % 2]}
        for i, chain in enumerate(chains(6))
    ]  # fmt: skip
    file, out = tmp_path / "two_classes.jsonl", tmp_path / "prmbench.json"
    write_records(file, items)
    assert call("prmbench", "--model", tiny_run.folder, "--data", file, "--json", out) == 0
    report = json.loads(out.read_text())
    assert set(report["classes"]) == {"circular", "redundency"} and report["n"] == 6
    assert report["n_wrong"] == sum(len(item["error_steps"]) - 1 for item in items)
    assert report["groups"]["simplicity"]["value"] is not None and report["groups"]["soundness"]["value"] is None
    assert report_of("prmbench", model=tiny_run.folder, data=(file,), to=out) == report and len(counted) == 6


def test_steps(tiny_run, tmp_path, counted):
    raw, stored, chain = prm800k_file(tmp_path / "raw.jsonl", 5), tmp_path / "own.jsonl", tmp_path / "chain.jsonl"
    write_records(stored, trees(4))
    rated = [{"problem": c["problem"], "steps": c["steps"], "ratings": c["labels"]} for c in chains(4)]
    write_records(chain, rated)
    out = tmp_path / "steps.json"
    args = ["--model", tiny_run.folder, "--data", raw, stored, chain, "--neutral", "drop", "--json", out]
    assert call("steps", *args) == 0
    report = json.loads(out.read_text())
    assert report["neutral"] == "drop"
    # Four records, the fifth being a control question, of three steps: each right one beside one that is wrong or
    # (in the second step) neutral, which is dropped like the unrated step of the labeler.
    labels = [node["label"] for tree in trees(4) for node in tree["nodes"]] + [
        x for c in chains(4) for x in c["labels"]
    ]
    assert report["n_records"] == 4 + 4 + 4
    assert report["n_right"] == 4 * 3 + labels.count(1)
    assert report["n_wrong"] == 4 * 2 + labels.count(-1)
    assert report["baselines"]["constant"]["auroc"]["value"] == 0.5
    assert 0 <= report["auroc"]["low"] <= report["auroc"]["value"] <= report["auroc"]["high"] <= 1
    assert len(counted) == 12

    options = dict(model=tiny_run.folder, data=(raw, stored, chain), to=out)
    again = report_of("steps", neutral="negative", **options)  # another policy, the same scores
    assert len(counted) == 12
    assert again["n_wrong"] == report["n_wrong"] + 4 + labels.count(0)


def test_chains_beyond_the_context_are_refused_or_counted(tiny_run, tmp_path, capsys, monkeypatch):
    """With `skip` the figures are those of the file without them, and table and report count them."""
    whole, short, out = (tmp_path / name for name in ("pools.jsonl", "short.jsonl", "out.json"))
    records = [pool_of(chains(4, seed)) | {"problem": f"pool {seed}"} for seed in range(3)]
    write_records(short, records)
    long = {"problem": "pool", "samples": [{"steps": ["far " * 60], "correct": True}]}
    write_records(whole, [records[0], long, *records[1:]])
    model_of = best_of_n.model_of
    monkeypatch.setattr(best_of_n, "model_of", lambda options: dataclasses.replace(model_of(options), context=120))
    options = ["--model", tiny_run.folder, "--json", out]
    assert call("best-of-n", *options, "--input", whole) == 2
    error = capsys.readouterr().err
    assert "reads 120" in error and "--on-error skip" in error and not out.exists()
    assert call("best-of-n", *options, "--input", whole, "--on-error", "skip") == 0
    report = json.loads(out.read_text())
    assert call("best-of-n", *options, "--input", short) == 0
    assert report == json.loads(out.read_text()) | {"too_long": 1}


def test_best_of_n(tiny_run, tmp_path, counted):
    pools, out = pool_file(tmp_path / "pools.jsonl"), tmp_path / "best.json"
    assert call("best-of-n", "--model", tiny_run.folder, "--input", pools, "--json", out) == 0
    report = json.loads(out.read_text())
    assert report["n_problems"] == 3 and report["n_max"] == 4
    mean = report["mean_accuracy"]
    for curves in report["rules"].values():
        assert curves["best_of_n"]["value"][0] == pytest.approx(mean)  # the best of one is any one
        assert all(
            a <= b + 1e-12 for a, b in zip(curves["best_of_n"]["value"], report["pass_at_n"]["value"], strict=True)
        )
    assert len(counted) == 3
    # Scored by `jprm score` or by the command itself: the same report.
    scored = tmp_path / "best.json.scores" / "pools.jsonl"
    stored = report_of("best_of_n", input=scored, to=tmp_path / "other.json")
    assert stored | {"own_rule": report["own_rule"]} == report  # a file of scores does not name the model's rule
    assert report_of("best_of_n", input=pools, model=tiny_run.folder, to=out) == report
    assert len(counted) == 3
    assert len(list(read_lines(scored))) == 3


def test_a_file_that_is_not_there_is_refused_before_another_is_scored(tiny_run, tmp_path, capsys):
    data = processbench_file(tmp_path / "gsm8k.json", 6, 1)
    line = ["--model", tiny_run.folder, "--data", data, "--calibrate", tmp_path / "none.json"]
    assert call("processbench", *line, "--json", tmp_path / "r.json") == 2
    assert "none.json" in capsys.readouterr().err
    assert not (tmp_path / "r.json.scores").exists()


@pytest.mark.parametrize("reader", ["processbench", "prmbench", "pools", "jsonl"])
def test_a_file_without_records_is_refused(reader, tmp_path):
    (tmp_path / "empty.jsonl").write_text("\n")
    refused(ValueError, "empty.jsonl: holds no record", source(reader).records, tmp_path / "empty.jsonl")


def test_a_prepared_folder_is_evaluated_as_its_records(tiny_run, tmp_path):
    write_records(tmp_path / "held.jsonl", trees(6, seed=3))
    prepare("jsonl", [tmp_path / "held.jsonl"], tmp_path / "prepared")
    for name in ("held.jsonl", "prepared"):
        command = ["eval", "steps", "--model", str(tiny_run.folder), "--neutral", "drop"]
        assert cli.main([*command, "--data", str(tmp_path / name), "--json", str(tmp_path / f"{name}.json")]) == 0
    assert (tmp_path / "prepared.json").read_bytes() == (tmp_path / "held.jsonl.json").read_bytes()


# ---- A suite: one file names the benchmarks, one folder holds their scores and results.


STUDIES = REPOSITORY / "experiments/studies"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Files of every section but PRMBench, and the suite that names them."""
    folder = tmp_path_factory.mktemp("suite")
    processbench_file(folder / "easy.json", 12, 1), processbench_file(folder / "hard.json", 9, 2)
    prm800k_file(folder / "rated.jsonl", 5), pool_file(folder / "pool.jsonl")
    write(folder, whole())
    return folder


def whole():
    return {
        "neutral": "positive",
        "processbench": {"data": ["hard.json", "easy.json", "olympiadbench.json"], "calibrate": "easy.json"},
        "steps": {"data": ["rated.jsonl"]},
        "best_of_n": {"data": ["pool.jsonl"]},
        "calibration": {"data": ["hard.json"], "calibrate": ["easy.json"]},
    }


def write(folder, suite):
    (folder / "suite.json").write_text(json.dumps(suite))
    return folder / "suite.json"


@pytest.fixture(scope="module")
def done(tiny_run, folder, short_rows):
    out = folder / "out"
    assert cli.main(["eval", "suite", "--model", str(tiny_run.folder), "--suite", str(folder / "suite.json"),
                     "--output", str(out)]) == 0  # fmt: skip
    return out


def test_everything_is_computed_from_scores_made_once(done, folder, tiny_run, monkeypatch):
    results = suites.read_results(done)
    assert results["sections"] == {
        "processbench": ["hard", "easy"], "steps": ["rated"], "best_of_n": ["pool"], "calibration": ["hard"],
    }  # fmt: skip
    assert [path.rsplit("/", 1)[1] for path in results["absent"]] == ["olympiadbench.json"]
    assert results["model"]["step"] == 6 and results["neutral"] == "positive"
    assert {name: data["n"] for name, data in results["data"].items()} == {"hard": 9, "easy": 12, "rated": 4, "pool": 3}
    files = results["processbench"]["files"]
    assert list(files) == ["hard", "easy"]
    for kind, f1 in [("half", lambda f: f["f1"]), ("tuned", lambda f: f["tuned"]["f1"])]:
        assert results["processbench"]["average"][kind]["value"] == pytest.approx(sum(map(f1, files.values())) / 2)
    assert results["steps"]["n_records"] == 4 and results["best_of_n"]["pool"]["n_max"] == 4
    diagnostics = results["diagnostics"]
    kinds = "lowest_at_end wrong_process length_slopes over_optimisation meaning_kept meaning_lost nonsense"
    assert set(diagnostics) == set(kinds.split())
    assert diagnostics["meaning_kept"]["whitespace"]["n"] > 0 and "bare_answer" in diagnostics["nonsense"]

    # Again: the model is asked for nothing, and the results are the same.
    monkeypatch.setattr(scorer.PRM, "_prepared", lambda *args: pytest.fail("scored again"))
    suite = suites.read_suite(folder / "suite.json")
    assert json.loads(json.dumps(suites.run_suite(tiny_run.folder, suite, done))) == results
    assert suites.read_scores(done, results)["hard"][0].nodes[0].score is not None


def test_it_continues_where_it_was_stopped(done, folder, tiny_run, tmp_path, monkeypatch):
    """Killed in the third file: the first two are kept, and no results are there until all is done."""
    whole_scores, calls = scorer.PRM._prepared, []

    def dies(self, trees, *more):
        calls.append(len(trees))
        if len(calls) == 3:
            raise KeyboardInterrupt
        return whole_scores(self, trees, *more)

    suite = suites.read_suite(folder / "suite.json")
    with monkeypatch.context() as patch:
        patch.setattr(scorer.PRM, "_prepared", dies)
        with pytest.raises(KeyboardInterrupt):
            suites.run_suite(tiny_run.folder, suite, tmp_path)
    refused(FileNotFoundError, "results.json", suites.read_results, tmp_path)
    calls.clear()
    monkeypatch.setattr(scorer.PRM, "_prepared", lambda *args: calls.append(1) or whole_scores(*args))
    results = suites.run_suite(tiny_run.folder, suite, tmp_path)
    assert len(calls) == 4  # the third and the fourth file, and the edits in two chunks
    assert json.loads(json.dumps(results)) == suites.read_results(done)


@pytest.mark.parametrize("wrong", [True, False])
def test_figures_that_the_chains_do_not_allow_are_left_out(wrong, tiny_run, folder, short_rows, tmp_path, capsys):
    """Chains that are all wrong, or all right, have no F1 and tune no threshold; all else is computed."""
    items = [item for item in json.loads((folder / "easy.json").read_text()) if (item["label"] >= 0) == wrong]
    (tmp_path / "alike.json").write_text(json.dumps(items))
    shutil.copy(folder / "hard.json", tmp_path)
    path = write(tmp_path, {
        "neutral": "positive", "steps": {"data": ["alike.json"]},
        "processbench": {"data": ["alike.json", "hard.json"], "calibrate": "alike.json"},
        "calibration": {"data": ["hard.json"], "calibrate": ["hard.json"]},
    })  # fmt: skip
    out = tmp_path / "out"
    assert cli.main(["eval", "suite", "--model", str(tiny_run.folder), "--suite", str(path), "--output", str(out)]) == 0
    told, results = capsys.readouterr().out, suites.read_results(out)
    assert "calibration" not in results and "calibration" in results["not_computed"]
    assert ("steps" in results) != ("steps" in results["not_computed"])
    alike, hard = results["processbench"]["files"].values()
    before = told[: told.index("scoring ")]
    assert f"alike: has no chains {'without' if wrong else 'with'} an error" in before and "tuned on it" in before
    assert "hard: " not in before
    assert alike["f1"] is alike["tuned"] is hard["tuned"] is None and 0 <= hard["f1"] <= 1
    assert alike["error_accuracy" if wrong else "correct_accuracy"] is not None
    assert results["processbench"]["average"]["tuned"] is None
    assert results["not_computed"]["calibration"] in " ".join(told.split())
    assert cli.main(["report", str(out), "--output", str(tmp_path / "page.html")]) == 0
    assert results["not_computed"]["calibration"] in (tmp_path / "page.html").read_text()


def test_a_file_that_cannot_be_read_is_named_before_any_is_scored(folder, tiny_run, tmp_path, capsys):
    shutil.copy(folder / "easy.json", tmp_path)
    (tmp_path / "rated.jsonl").write_text("{")
    path = write(tmp_path, {"neutral": "positive", "steps": {"data": ["rated.jsonl"]},
                            "processbench": {"data": ["easy.json"], "calibrate": "easy.json"}})  # fmt: skip
    out = tmp_path / "out"
    assert cli.main(["eval", "suite", "--model", str(tiny_run.folder), "--suite", str(path), "--output", str(out)]) == 2
    assert "rated.jsonl:1" in capsys.readouterr().err and not (out / "scores" / "easy.jsonl").exists()
    line = ["--input", tmp_path / "easy.json", "--calibrate", tmp_path / "rated.jsonl", "--output", tmp_path / "r.json"]
    assert cli.main(["eval", "processbench", "--model", str(tiny_run.folder), *map(str, line)]) == 2
    assert "rated.jsonl:1" in capsys.readouterr().err and not (tmp_path / "r.json.scores").exists()


def test_half_written_caches_are_named(done, tmp_path):
    shutil.copytree(done, tmp_path / "copy")
    results = suites.read_results(tmp_path / "copy")
    path = tmp_path / "copy" / "scores" / "hard.jsonl"
    path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:-1]))
    refused(ValueError, "8 records", suites.read_scores, tmp_path / "copy", results)
    path.unlink()
    refused(FileNotFoundError, "hard.jsonl", suites.read_scores, tmp_path / "copy", results)
    (tmp_path / "copy" / "results.json").write_text('{"sections": {}')
    refused(ValueError, "results.json", suites.read_results, tmp_path / "copy")


@pytest.mark.parametrize(("change", "said"), bad("a suite of benchmarks"))
def test_a_wrong_suite_is_named(folder, change, said):
    path = folder / "wrong.json"
    path.write_text(json.dumps(whole() | change))
    refused((ValueError, FileNotFoundError), said, suites.read_suite, path)
    path.write_text("{}")
    refused(ValueError, "no suite", suites.read_suite, path)


def test_diagnostics_and_drift_as_commands(folder, done, tiny_run, tmp_path, capsys):
    """The commands of their own give what the suite gives, and what they are made for."""
    out = tmp_path / "d.json"
    line = ["--chains", folder / "hard.json", folder / "easy.json", "--pools", folder / "pool.jsonl", "--json", out]
    assert cli.main(["eval", "diagnostics", "--model", str(tiny_run.folder), *map(str, line)]) == 0
    report, wanted = json.loads(out.read_text()), suites.read_results(done)["diagnostics"]
    assert report["nonsense"] == wanted["nonsense"] and report["length_slopes"] == wanted["length_slopes"]

    hard, pool = (str(done / "scores" / f"{name}.jsonl") for name in ("hard", "pool"))
    for before, after in [(hard, hard), (hard, pool)]:
        assert cli.main(["eval", f"{STUDIES}/drift.py:DRIFT", before, after, "--json", str(out)]) == 0
        assert f"verdict: {json.loads(out.read_text())['verdict']}" in capsys.readouterr().out
    assert cli.main(["eval", f"{STUDIES}/drift.py:DRIFT", hard, hard, "--json", str(out)]) == 0
    assert json.loads(out.read_text())["verdict"] == "same"

    (tmp_path / "train.jsonl").write_text(
        "".join(json.dumps({"problem": p, "steps": ["s"]}) + "\n" for p in ("Q1  3", "What is\\, 2?", "new"))
    )
    line = [tmp_path / "train.jsonl", folder / "easy.json", folder / "rated.jsonl"]
    script = [sys.executable, str(REPOSITORY / "examples/contamination.py"), *map(str, line)]
    told = subprocess.run(script, capture_output=True, text=True, check=True).stdout
    assert "easy.json: 1 of 12 problems" in told and "q1 3" in told and "rated.jsonl: 1 of 5 problems" in told
