"""A suite: one file names the benchmarks, one folder holds their scores and results."""

import json
import pathlib
import shutil

import pytest
from refusing import refused
from test_evaluate_run import pool_file, prm800k_file, processbench_file, short_rows  # noqa: F401  (autouse)

from jprm.apps import cli
from jprm.methods.evaluate import suite as suites
from jprm.score import scorer

STUDIES = pathlib.Path(__file__).resolve().parent.parent / "experiments/studies"


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
def done(tiny_run, folder, short_rows):  # noqa: F811
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
def test_figures_that_the_chains_do_not_allow_are_left_out(wrong, tiny_run, folder, short_rows, tmp_path, capsys):  # noqa: F811
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


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"benchmarks": {}}, "benchmarks: unknown"),
        ({"neutral": "maybe"}, "'maybe'"),
        ({"steps": {"data": []}}, "steps.data"),
        ({"steps": {"files": ["rated.jsonl"]}}, "object"),
        ({"steps": {"data": ["absent.jsonl"]}}, "absent.jsonl"),
        ({"calibration": {"data": ["hard.json"], "calibrate": ["no.json"]}}, "no.json"),
        ({"processbench": {"data": ["hard.json"], "calibrate": ["hard.json", "easy.json"]}}, "one threshold"),
        ({"seed": "0"}, "seed"),
        ({"seed": 2**63}, "9223372036854775808"),
    ],
)
def test_a_wrong_suite_is_named(folder, change, said):
    path = folder / "wrong.json"
    path.write_text(json.dumps(whole() | change))
    refused((ValueError, FileNotFoundError), said, suites.read_suite, path)
    path.write_text("{}")
    refused(ValueError, "no suite", suites.read_suite, path)


def test_diagnostics_drift_and_contamination(folder, done, tiny_run, tmp_path, capsys):
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
    line = ["--data", tmp_path / "train.jsonl", "--benchmark", folder / "easy.json", folder / "rated.jsonl"]
    assert cli.main(["eval", "contamination", *map(str, line), "--output", str(out)]) == 0
    easy, rated = json.loads(out.read_text())["benchmarks"].values()
    assert (easy["n"], easy["shared"], easy["examples"][0]["problem"]) == (12, 1, "q1 3")
    assert (rated["n"], rated["shared"]) == (5, 1) and rated["examples"][0]["in"] == str(tmp_path / "train.jsonl")
