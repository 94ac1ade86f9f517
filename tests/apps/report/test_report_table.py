"""Tables over seeds: variances against draws of runs and problems, coverage, groups of runs, forms of output."""

import csv
import dataclasses
import io
import json
import shutil

import numpy as np
import pytest
from families import breadth
from refusing import refused
from test_report import records, write_folder

from jprm.apps import cli
from jprm.apps.report import runs
from jprm.apps.report.table import table_of, tables
from jprm.experiment import load, to_json
from jprm.io import storage
from jprm.io.outputs import write_json
from jprm.methods.formats import hub
from jprm.statistics import Draws, difference_of_runs, draws, interval, mean_of_runs, weighted_mean


def of_seeds(value_SP, n=1000):
    problems = [f"p{i}" for i in range(value_SP.shape[1])]
    return [draws(lambda w, x_P=x_P: weighted_mean(x_P, w), problems, n, seed=0) for x_P in value_SP]


def values(rng, seeds, problems, of_seed=0.1, of_problem=0.4, noise=0.3, shared=None):
    shared_P = of_problem * rng.normal(size=problems) if shared is None else shared
    return of_seed * rng.normal(size=(seeds, 1)) + shared_P + noise * rng.normal(size=(seeds, problems))


def test_the_variance_is_that_of_drawing_seeds_and_problems():
    """Brute force: runs and problems are drawn with replacement. Few runs and problems make its variance too small by
    (S - 1) / S and (G - 1) / G, and what both have in common is counted a third time."""
    rng, S, P = np.random.default_rng(0), 4, 30
    value_SP = values(rng, S, P)
    R = 40_000
    seed_RS, problem_RP = rng.integers(S, size=(R, S)), rng.integers(P, size=(R, P))
    weight_RS = np.stack([(seed_RS == s).mean(1) for s in range(S)], 1)
    weight_RP = np.stack([(problem_RP == p).mean(1) for p in range(P)], 1)
    brute = np.einsum("rs,sp,rp->r", weight_RS, value_SP, weight_RP, optimize=True).var()
    (of_seeds_, _), (of_problems, _) = mean_of_runs(of_seeds(value_SP, 20_000), fraction=False).terms
    m_S, m_P = value_SP.mean(1), value_SP.mean(0)
    common = (value_SP - m_S[:, None] - m_P + value_SP.mean()).var() / (S * P)
    exact = of_seeds_ * (S - 1) / S + of_problems * (P - 1) / P + common
    assert exact == pytest.approx(m_S.var() / S + m_P.var() / P + common, rel=0.03)  # 20,000 draws: 1 % a deviation
    assert brute == pytest.approx(exact, rel=0.03)


def test_one_run_has_the_interval_of_its_problems():
    rng = np.random.default_rng(1)
    (run,), (accuracy,) = of_seeds(values(rng, 1, 25)), of_seeds(rng.random((1, 25)) < 0.9)
    for of_runs, fraction in ((run, False), (accuracy, True)):
        between = mean_of_runs([of_runs], fraction=fraction).interval()
        np.testing.assert_allclose(between, interval(of_runs, fraction=fraction), rtol=1e-12)
    two = difference_of_runs([run], [run], same_seeds=True)
    assert (two.value, two.p) == (0, 1)


@pytest.mark.filterwarnings("ignore:Degrees of freedom")
def test_a_figure_that_is_undefined_has_no_interval():
    undefined = Draws(np.nan, np.full(10, np.nan), 5)
    assert np.isnan(mean_of_runs([undefined, undefined], fraction=True).interval()).all()


def test_p_is_where_the_interval_reaches_zero():
    estimate = mean_of_runs(of_seeds(0.1 + values(np.random.default_rng(2), 3, 40)), fraction=False)
    assert estimate.half(1 - estimate.p) == pytest.approx(abs(estimate.value))
    low, high = estimate.interval()[1:]
    assert (estimate.p < 0.05) == (not low <= 0 <= high)


@pytest.mark.parametrize("seeds", [2, *breadth([3, 5])])
@pytest.mark.parametrize("of_seed", [0.0, 0.1, 0.3])
def test_intervals_cover_and_tests_do_not_cry_wolf(seeds, of_seed):
    """400 simulated tables of 60 problems; at a true 5 % three standard deviations end at 8.3 %."""
    rng, missed, false = np.random.default_rng(3), 0, np.zeros(2)
    for _ in range(400):
        shared_P = 0.4 * rng.normal(size=60)
        a, b = (of_seeds(values(rng, seeds, 60, of_seed, shared=shared_P), 100) for _ in range(2))
        low, high = mean_of_runs(a, fraction=False).interval()[1:]
        missed += not low <= 0 <= high
        false += [difference_of_runs(a, b, same_seeds=same).p < 0.05 for same in (True, False)]
    assert missed <= 33 and (false <= 33).all()


@pytest.mark.parametrize("seeds, of_seed", [(1, 0.0), *breadth([(2, 0.0), (2, 0.5), (3, 0.0), (3, 0.5)])])
@pytest.mark.parametrize("logit, problems", [(4.0, 20), (4.0, 60), (6.0, 100), (-4.0, 60)])
def test_intervals_of_accuracies_near_the_ends_cover_within_0_and_1(logit, problems, seeds, of_seed):
    """Of 200 simulated tables about 95 % hold the truth; at a true 93 % three standard deviations end at 87.6 %."""
    rng = np.random.default_rng(4)

    def right(seeds, problems, lasting):
        noise = of_seed * rng.normal(size=(seeds, 1)) + 0.5 * rng.normal(size=(seeds, problems))
        return rng.random((seeds, problems)) < 1 / (1 + np.exp(-logit - lasting - noise))

    truth = right(400_000, 1, 1.5 * rng.normal(size=(400_000, 1))).mean()
    held = []
    for _ in range(200):
        runs = of_seeds(right(seeds, problems, 1.5 * rng.normal(size=problems)).astype(float), 200)
        _, low, high = mean_of_runs(runs, fraction=True).interval()
        assert 0 <= low < high <= 1
        held.append(low <= truth <= high)
    assert np.mean(held) > 0.876


def test_the_difference_of_one_run_and_several_says_that_it_is_over_problems_alone(evaluated):
    folders = [evaluated / "results/0.5-0", *(evaluated / f"results/0.012345678-{seed}" for seed in range(3))]
    single, several = (row for row in table_of(folders) if row.figure == "steps, AUROC")
    assert (single.over, several.over, several.less_over) == ("problems", "seeds and problems", "problems")
    (table,) = (table for table in tables([single, several]))
    shown = [dict(zip(table.columns, row, strict=True)) for row in table.rows]
    assert [row["interval over"] for row in shown] == ["problems", "seeds and problems"]
    assert [row["p over"] for row in shown] == ["\N{EN DASH}", "problems"]


@pytest.fixture(scope="module")
def evaluated(tmp_path_factory):
    """Suites of two learning rates and three seeds, and one of a run that is gone."""
    root = tmp_path_factory.mktemp("table")
    tiny = load("experiments/tiny.py", [])
    for rate, quality in ((0.012345678, 3.0), (0.5, 0.3)):
        for seed in range(3):
            run, folder = root / f"runs/{rate}-{seed}", root / f"results/{rate}-{seed}"
            optimizer = dataclasses.replace(tiny.optimizer, learning_rate=rate)
            run.mkdir(parents=True)
            write_json(run / "experiment.json", to_json(dataclasses.replace(tiny, seed=seed, optimizer=optimizer)))
            (run / "metrics.jsonl").write_text(json.dumps({"step": 3, "valid_loss": 0.25 + seed / 10}) + "\n")
            write_folder(folder, records(quality, seed), "model")
            results = json.loads((folder / "results.json").read_text())
            results["model"]["folder"] = str(run)
            write_json(folder / "results.json", results)
    return root


def test_a_table_groups_seeds_and_compares_settings(evaluated):
    rows = {(row.figure, row.group["optimizer.learning_rate"]): row for row in table_of([evaluated / "results"])}
    good, poor = (rows["steps, AUROC", rate] for rate in ("0.012345678", "0.5"))
    of_run = [json.loads((evaluated / f"results/0.5-{s}/results.json").read_text()) for s in range(3)]
    areas = [results["steps"]["auroc"]["value"] for results in of_run]
    assert poor.mean.value == pytest.approx(np.mean(areas)) and poor.spread == pytest.approx(np.std(areas, ddof=1))
    assert (poor.runs, poor.problems, poor.over, good.less_first) == (3, 40, "seeds and problems", None)
    assert poor.less_first.value == pytest.approx(poor.mean.value - good.mean.value) and poor.less_first.p < 0.01
    (alone,) = (row for row in table_of([evaluated / "results/0.5-1"]) if row.figure == "steps, AUROC")
    assert (alone.over, alone.group) == ("problems", {}) and np.isnan(alone.spread)


def test_metrics_of_training_have_the_seeds_alone(evaluated):
    rows = table_of([evaluated / "runs"])
    assert [(row.figure, row.over, row.problems) for row in rows] == [("valid loss", "seeds", 0)] * 2
    half = 4.302653 * 0.1 / 3**0.5  # Student's t of two degrees of freedom
    np.testing.assert_allclose(rows[0].mean.interval(), [0.35, 0.35 - half, 0.35 + half], rtol=1e-6)
    both = table_of([evaluated / "results", evaluated / "runs"])
    assert {row.figure for row in both} >= {"valid loss", "steps, AUROC"}


def test_a_table_is_refused_where_runs_cannot_be_told_apart(evaluated, tmp_path):
    refused(ValueError, "--over", table_of, [evaluated / "results"], ["sed"])
    shutil.copytree(evaluated / "runs/0.5-1", tmp_path / "copied/again")
    refused(ValueError, "settings", table_of, [evaluated / "runs", tmp_path / "copied"])
    (tmp_path / "none").mkdir()
    refused(FileNotFoundError, "results.json", table_of, [tmp_path / "none"])


def test_every_form_holds_the_same_figures(evaluated, capsys):
    def printed(*options):
        assert cli.main(["table", str(evaluated / "results"), *options]) == 0
        return capsys.readouterr().out

    rows = list(csv.DictReader(io.StringIO(printed("--format", "csv"))))
    wanted = table_of([evaluated / "results"])
    assert [float(row["mean"]) for row in rows] == [row.mean.value for row in wanted]
    assert [row["optimizer.learning_rate"] for row in rows[:2]] == ["0.012345678", "0.5"]
    latex, markdown, plain = printed("--format", "latex"), printed("--format", "markdown"), printed()
    for row in wanted:
        shown = f"{100 * row.mean.value:.1f}"
        assert f"& {shown} &" in latex and f"| {shown} |" in markdown and shown in plain
    assert r"optimizer.learning\_rate" in latex and latex.count(r"\begin{tabular}") == latex.count(r"\end{tabular}")
    assert "0.012345678" in plain and "\N{HORIZONTAL ELLIPSIS}" not in plain
    assert cli.main(["table", str(evaluated / "results"), "--format", "html"]) == 2


def test_settings_that_differ_in_the_last_digit_differ_in_the_table():
    entry = {"step": 1, "steps": 1, "metrics": {"loss": 0.123456, "tokens_per_second": 123456.7}}
    rates = [0.00123456, 0.00123457]
    entries = [entry | {"folder": f"runs/{rate}", "settings": {"rate": rate, "s": "x" * 90}} for rate in rates]
    (table,) = runs.tables({"differ": ["rate", "s"], "runs": entries, "left_out": []})
    assert [row[1:] for row in table.rows] == [[str(r), "x" * 90, "1/1", "0.1235", "123457"] for r in rates]


@pytest.mark.parametrize("folder", ["http://127.0.0.1:9/secretbucket/run", "hf://evil/run", "gs://evil/run"])
def test_results_at_an_address_are_of_a_run_that_is_not_known(evaluated, tmp_path, monkeypatch, capsys, folder):
    """Nothing is asked there: a stranger's results would learn who reads them."""
    monkeypatch.setattr(storage, "_store", lambda remote: pytest.fail(f"asked {remote}"))
    monkeypatch.setattr(hub, "_asking", lambda *arguments: pytest.fail(f"asked {arguments}"))
    suite = tmp_path / "suite"
    shutil.copytree(next((evaluated / "results").iterdir()), suite)
    results = json.loads((suite / "results.json").read_text())
    results["model"]["folder"] = folder
    (suite / "results.json").write_text(json.dumps(results))
    assert cli.main(["table", str(suite)]) == 0
    assert cli.main(["report", str(suite), "--output", str(tmp_path / "page.html")]) == 0


def test_results_of_another_run_in_the_same_folder_are_refused(evaluated, tmp_path):
    suite, run = tmp_path / "suite", tmp_path / "run"
    shutil.copytree(next((evaluated / "results").iterdir()), suite)
    shutil.copytree(next((evaluated / "runs").iterdir()), run)
    results = json.loads((suite / "results.json").read_text())
    for id, good in (("a" * 16, True), ("b" * 16, False)):
        results["model"] |= {"folder": str(run), "run": id}
        write_json(suite / "results.json", results)
        write_json(run / "experiment.json", json.loads((run / "experiment.json").read_text()) | {"id": "a" * 16})
        if good:
            assert table_of([suite])
        else:
            refused(ValueError, f"run {'b' * 16}, .* is the run {'a' * 16}", table_of, [suite])
