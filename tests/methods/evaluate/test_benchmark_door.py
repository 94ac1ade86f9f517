"""A new benchmark is one record and one line of the registry: suite, terminal, page, comparison and command follow."""

import dataclasses
import io
import json
import re

import numpy as np
import pytest
from refusing import refused
from rich.console import Console
from test_evaluate_run import short_rows  # noqa: F401  (autouse)
from tiny_run import chains

from jprm.apps import cli
from jprm.apps.cli.evaluate import evaluation
from jprm.apps.report.collect import Page
from jprm.apps.report.page import sections_of
from jprm.io.jsonl import write_records
from jprm.methods.data.reader import Reader, take
from jprm.methods.evaluate.benchmark import Benchmark, Files, ModelOptions
from jprm.methods.evaluate.benchmarks import BENCHMARKS
from jprm.methods.evaluate.blocks import Figure, Note, PageModel, Table, as_latex, as_markdown, interval, show
from jprm.methods.evaluate.findings import Finding
from jprm.methods.evaluate.suite import read_suite
from jprm.statistics import bootstrap, draws, weighted_mean


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options(ModelOptions):
    """Confidence: the mean score of a final step.

    For example:
      jprm eval final-score --model DIR --data toy.jsonl --json final_score.json
    """

    data: Files
    """Toy files."""


def parse(item, where, options):
    yield {"problem": take(item, "question", str, where), "steps": take(item, "lines", list, where)}


def finals(scores):
    trees = [tree for name in scores for tree in scores[name]]
    score_N = np.array([tree.nodes[-1].score for tree in trees])
    return lambda weight_RN: weighted_mean(score_N, weight_RN), [tree.problem for tree in trees]


def figures(request):
    return {"mean": bootstrap(*finals(request.data), seed=request.seed).json()}


def section(models):
    rows = [[model.name, interval(model.results["final_score"]["mean"])] for model in models]
    yield Table("Mean final score, %", ("", "mean"), rows)

    def draw(figure):
        figure.subplots().bar(range(len(models)), [m.results["final_score"]["mean"]["value"] for m in models])

    yield Figure("final_score", "Final scores", "A bar a model.", "Models", "Higher is more confident.", draw)
    yield Note("The mean over problems.")


def problem_draws(results, scores):
    of_toy = {name: scores[name] for name in results["sections"]["final_score"]}
    yield "final score", draws(*finals(of_toy), seed=results["seed"])


def findings(results):
    return [Finding("final score", results[name]["mean"]) for name in ("final_score", "own_score") if name in results]


FINAL_SCORE = Benchmark(
    name="final_score",
    title="Final scores <toy>",
    options=Options,
    tables=lambda report: [Table("Final scores", ("", "mean [95 %]"), [["all", interval(report["mean"])]])],
    figures=figures,
    reader=Reader(parse),
    section=section,
    findings=findings,
    problem_draws=problem_draws,
    left_out=lambda report: iter([("final score: steps before the last", 7)]),
)


@pytest.fixture
def registered(monkeypatch):
    monkeypatch.setitem(BENCHMARKS, FINAL_SCORE.name, FINAL_SCORE)  # the one line


@pytest.fixture
def toy_file(tmp_path):
    write_records(tmp_path / "toy.jsonl", [{"question": c["problem"], "lines": c["steps"]} for c in chains(9)])
    return tmp_path / "toy.jsonl"


def test_a_suite_a_table_a_page_and_a_comparison(registered, toy_file, tiny_run, tmp_path, capsys):
    (tmp_path / "suite.json").write_text(json.dumps({"final_score": {"data": [toy_file.name]}}))
    folders = [tmp_path / name for name in ("one", "two")]
    for folder in folders:
        line = ["--model", tiny_run.folder, "--suite", tmp_path / "suite.json", "--out", folder]
        assert cli.main(["eval", "suite", *map(str, line)]) == 0
    results = json.loads((folders[0] / "results.json").read_text())
    shown = interval(results["final_score"]["mean"])
    assert results["sections"] == {"final_score": ["toy"]} and results["data"]["toy"]["reader"] == "final_score"
    assert shown in capsys.readouterr().out

    page = tmp_path / "page.html"
    line = [*folders, "--out", page, "--figures", tmp_path / "figures"]
    assert cli.main(["report", *map(str, line)]) == 0
    text = re.sub("</?span>", "", page.read_text())
    assert re.search("<h2[^>]*>Final scores &lt;toy&gt;<", text) and "Mean final score, %" in text
    assert f"final score: {shown} %." in text and f"<b>{shown.partition(' ')[0]}</b>" in text  # the verdict, a tile
    assert "final score: steps before the last" in text
    assert ">final score</th><td>+0.0 points [-37.1, +37.1]</td>" in text  # the same model, on 9 problems
    names = {path.name for path in (tmp_path / "figures").iterdir()}
    assert {name for name in names if not name.startswith("training-")} == {"final_score.svg"}


def test_figures_alone_are_shown(monkeypatch):
    """A benchmark without tables and without a section: every figure that has an interval, for each model."""
    figure = {"value": 0.5, "low": 0.25, "high": 0.75}
    report = {"mean": figure, "n": 3, "by": {"kind_a": figure | {"value": 0.625}}}
    bare = Benchmark(name="bare", title="Bare", figures=lambda request: report)
    monkeypatch.setitem(BENCHMARKS, "bare", bare)
    (table,) = bare.tables(report)
    rows = [["mean", "0.5 [0.25, 0.75]"], ["by / kind a", "0.625 [0.25, 0.75]"]]
    assert table.lines == rows
    models = [PageModel("one", {"bare": report, "model": {"folder": "none"}, "absent": []})]
    heading, blocks = next(
        (head, blocks) for id, head, blocks in sections_of(Page(models, [], {}, []), {}) if id == "bare"
    )
    assert heading == "Bare" and [block.lines for block in blocks] == [rows]


def test_cells_are_written_alike_everywhere():
    figure = {"value": 0.5, "low": 0.25, "high": 0.75}
    less = {"value": 0.1, "low": -0.1, "high": 0.3, "better": 0.8}
    table = Table("T", ("", "a", "b", "c", "d", "e"), [["row", 3, 0.5, figure, less, None], None])
    texts = ["row", "3", "50.0", "50.0 [25.0, 75.0]", "+10.0 points [-10.0, +30.0]", "–"]
    assert table.lines == [texts, None]
    assert all(text in as_markdown([table]) for text in texts)
    assert Table("T", ("", "d"), [["row", less | {"low": None, "high": None}]]).lines == [["row", "10.0"]]
    assert "50.0 [25.0, 75.0] & $+10.0 points [-10.0, +30.0]$ & --" in as_latex([table])


OWN = """
import dataclasses
from test_benchmark_door import FINAL_SCORE

OWN = dataclasses.replace(FINAL_SCORE, name="own_score", title="Own <scores>")
WITHOUT = dataclasses.replace(OWN, figures=None)
TAKEN = dataclasses.replace(OWN, name="steps")
"""


def test_a_file_of_ones_own_is_a_section_of_a_suite(toy_file, tiny_run, tmp_path, capsys):
    """The page, which runs no code that results name, shows its figures and says that it does not draw them."""
    (tmp_path / "own.py").write_text(OWN)
    suite = tmp_path / "suite.json"
    suite.write_text(json.dumps({"own.py:OWN": {"data": [toy_file.name]}}))
    out = tmp_path / "out"
    line = ["eval", "suite", "--model", tiny_run.folder, "--suite", suite, "--output", out]
    assert cli.main(list(map(str, line))) == 0
    results = json.loads((out / "results.json").read_text())
    assert interval(results["own_score"]["mean"]) in capsys.readouterr().out
    assert results["others"] == {"own_score": {"benchmark": f"{tmp_path / 'own.py'}:OWN", "title": "Own <scores>"}}
    (tmp_path / "own.py").write_text("raise SystemExit('ran')")
    assert cli.main(["report", str(out), "--output", str(tmp_path / "page.html")]) == 0
    page = re.sub("</?span>", "", (tmp_path / "page.html").read_text())
    mean = results["own_score"]["mean"]
    assert re.search("<h2[^>]*>Own &lt;scores&gt;<", page) and f"{mean['value']:.4g} [{mean['low']:.4g}, " in page
    assert f"drawing and comparison of {tmp_path / 'own.py'}:OWN" in page


@pytest.mark.parametrize(
    ("key", "message"),
    [
        ("own.py:WITHOUT", "`figures`"),
        ("own.py:TAKEN", "'steps'"),
        ("own.py:NONE", "NONE"),
        ("other.py:OWN", "there is no file"),
        ("test_benchmark_door:OWN", "jprm.methods.evaluate.benchmark.Benchmark"),
    ],
)
def test_a_section_that_is_no_benchmark_is_refused(key, message, tmp_path):
    (tmp_path / "own.py").write_text(OWN)
    (tmp_path / "suite.json").write_text(json.dumps({key: {"data": ["toy.jsonl"]}}))
    refused(ValueError, message, read_suite, tmp_path / "suite.json")


def test_a_command(registered, toy_file, tiny_run, tmp_path, capsys):
    out = tmp_path / "final_score.json"
    line = ["final-score", "--model", tiny_run.folder, "--data", toy_file, "--json", out]
    evaluation().cli(prog="jprm eval", args=list(map(str, line)))
    report = json.loads(out.read_text())
    assert interval(report["mean"]) in capsys.readouterr().out and 0 <= report["mean"]["value"] <= 1
    with pytest.raises(SystemExit):
        evaluation().cli(prog="jprm eval", args=["final-score", "--help"])


@pytest.mark.parametrize("name", ["[/red]", "[link=http://a]b[/link]", "\x1b[2J", "\x1b]0;a\x07", "\u202e", "a\rb"])
def test_names_move_no_terminal(name):
    file = io.StringIO()
    show([name, Table(name, ("", name), [[name, 1]], name)], Console(file=file, width=200, force_terminal=True))
    plain = re.sub(r"\x1b\[[\d;]*m", "", file.getvalue())  # colours of the table
    shown = name.encode("unicode_escape").decode()
    assert plain.count(shown) == 5 and set(re.findall(r"[^ -~\n]", plain)) <= set("\u2503\u2501\u2547\u2502")
