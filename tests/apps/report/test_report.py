"""The page: its content, safety against injected data, and a browser that shows it without requests or errors.

The suites' folders come from synthetic scorers, so no model is needed.
"""

import csv
import io
import itertools
import json
import re
import shutil
from xml.etree import ElementTree

import numpy as np
import pytest
from browser import ESCAPE, WIDE, requests_of
from refusing import refused

from jprm.apps import cli
from jprm.apps.report import collect as collecting
from jprm.apps.report import page
from jprm.apps.report.collect import Page, chains, collect
from jprm.apps.report.page import svg
from jprm.apps.report.runs import Line, line_plot, training
from jprm.io.jsonl import write_records
from jprm.io.outputs import write_json
from jprm.methods.evaluate import diagnostics, plots, processbench
from jprm.methods.evaluate.benchmark import Request
from jprm.methods.evaluate.benchmarks import registered
from jprm.methods.evaluate.blocks import Figure, PageModel, decided, interval, last, percent, points
from jprm.methods.evaluate.findings import findings_of, lead, tiles, verdict
from jprm.methods.evaluate.processbench import SPLITS
from jprm.methods.evaluate.suite import Suite, results_of, tables
from jprm.tree import tree_of

NASTY = "</script><script>document.title = 'broken'</script><img src=x onerror=\"document.title='broken'\">"


def scored(rng, labels, quality):
    odds = np.where(np.array(labels, float) > 0.5, 1.5, 1.5 - quality) + rng.normal(size=len(labels))
    return np.round(1 / (1 + np.exp(-odds)), 4).tolist()


def records(quality, seed=1):
    """Chains, trees and pools with scores; those of two qualities are the same but for the scores."""
    rng, noise = np.random.default_rng(0), np.random.default_rng(seed)
    gsm8k = []
    for i in range(60):
        n = int(rng.integers(2, 7))
        error = int(rng.integers(n)) if rng.random() < 0.5 else -1
        labels = [1] * n if error < 0 else ([1] * error + [0] + [None] * n)[:n]
        truth = [float(error < 0 or k < error) for k in range(n)]
        steps = [f"Step {k} of chain {i}: x_{k} = {i}." for k in range(n)]
        gsm8k.append({"problem": f"What is {i} + {i}?", "steps": steps,
                     "labels": labels, "first_error": error, "correct": error < 0 or rng.random() < 0.2,
                     "scores": scored(noise, truth, quality)})  # fmt: skip
    gsm8k[0]["steps"][0] = NASTY
    trees = []
    for i in range(40):
        parents, ratings = [-1, 0, 0, 1, 2], [1, 1, -1, 0, -1]
        values = scored(noise, [r > 0 for r in ratings], quality)
        nodes = [{"parent": p, "text": f"node {j} of tree {i}", "label": r, "score": s}
                 for j, (p, r, s) in enumerate(zip(parents, ratings, values, strict=True))]  # fmt: skip
        trees.append({"problem": f"Tree {i}?", "nodes": nodes, "semantics": "rating"})
    pools = []
    for i in range(30):
        samples = []
        for k in range(6):
            right = bool(rng.random() < 0.5)
            answer = i if right else i + 1
            samples.append({"steps": [f"Sample {k}.", f"So {answer}."], "correct": right, "answer": answer,
                            "scores": scored(noise, [1, right], quality)})  # fmt: skip
        pools.append({"problem": f"Pool {i}?", "samples": samples})
    return {"gsm8k": gsm8k, "rated": trees, "pool": pools}


def write_folder(folder, files, name):
    """As `run_suite` leaves it."""
    paths = {key: folder / f"{key}.jsonl" for key in files}
    (folder / "scores").mkdir(parents=True)
    for key, items in files.items():
        write_records(folder / "scores" / f"{key}.jsonl", items)
        write_records(paths[key], items)
    data = {"processbench": (paths["gsm8k"],), "steps": (paths["rated"],), "best_of_n": (paths["pool"],),
            "calibration": (paths["gsm8k"],)}  # fmt: skip
    fitted = {"processbench": (paths["gsm8k"],), "calibration": (paths["rated"],)}
    suite = Suite("positive", data, fitted, ("absent.json",))
    model = {"name": name, "folder": f"runs/{name}", "step": 5, "semantics": "rating", "rule": "prod"}
    trees = {key: list(map(tree_of, items)) for key, items in files.items()}
    write_json(folder / "results.json", results_of(suite, trees) | {"model": model})
    return folder


def findings(model):
    return list(itertools.chain(*findings_of(model.results, registered())))


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("report")
    return [write_folder(root / "good", records(3.0), "good"), write_folder(root / "poor", records(0.3, 2), "poor<b>")]


@pytest.fixture(scope="module")
def written(folders, tmp_path_factory):
    """(the page of two models, the folder of its figures)."""
    out = tmp_path_factory.mktemp("page")
    line = ["report", *map(str, folders), "--output", str(out / "report.html"), "--figures", str(out / "figures")]
    assert cli.main(line) == 0
    return out / "report.html", out / "figures"


def test_it_is_one_page_without_requests_whose_data_cannot_break_out(written):
    text = written[0].read_text()
    assert "Content-Security-Policy" in text and "default-src 'none'" in text
    assert (
        not re.search(r"(?:src|href)=\"(?!#|data:)", text)
        and "@import" not in text
        and not re.search(r"url\((?!#)", text)
    )
    (data,) = re.findall(r'<script type="application/json" id="chains">(.*?)</script>', text, re.S)
    assert "<" not in data
    assert json.loads(data)["items"][0]["t"][0] == NASTY
    assert "poor&lt;b&gt;" in text.replace(data, "") and "poor<b>" not in text


def test_every_text_of_results_is_escaped(folders, tmp_path):
    """Markup in every string that is free text, and in every name that a figure, a table or a heading shows."""
    shutil.copytree(folders[0], tmp_path / "good")
    path = tmp_path / "good" / "results.json"
    results = json.loads(path.read_text())
    results["model"] |= {"name": NASTY, "folder": NASTY, "semantics": NASTY}
    results |= {"jprm": NASTY, "absent": [NASTY], "best_of_n": {NASTY: results["best_of_n"]["pool"]}}
    results["processbench"]["files"] = {NASTY: results["processbench"]["files"]["gsm8k"]}
    results["processbench"]["calibrate"] = NASTY
    results["steps"] |= {"neutral": NASTY, "baselines": {NASTY: results["steps"]["baselines"]["position"]}}
    results["diagnostics"][NASTY] = {"not_computed": NASTY}
    results["calibration"]["by"]["subset"][0]["group"] = NASTY
    write_json(path, results)
    page.report([tmp_path / "good"], tmp_path / "report.html", tmp_path / "figures")
    text = (tmp_path / "report.html").read_text()
    assert "<img" not in text and "<script>document" not in text
    assert text.count("&lt;img src=x") >= 14
    for file in (tmp_path / "figures").iterdir():
        assert "<img" not in file.read_text()


def test_results_without_a_step_or_version_are_shown(folders, tmp_path):
    copy = shutil.copytree(folders[0], tmp_path / "copy")
    results = json.loads((copy / "results.json").read_text())
    del results["jprm"], results["model"]["step"], results["model"]["semantics"]
    write_json(copy / "results.json", results)
    page.report([copy], tmp_path / "page.html")
    assert "step ? of" in (tmp_path / "page.html").read_text()


def test_figures_are_whole_files_that_parse(written):
    stored = {path.name: ElementTree.parse(path).getroot() for path in written[1].iterdir()}
    assert len(stored) > 2
    for root in stored.values():
        assert root.tag == "{http://www.w3.org/2000/svg}svg"
        assert root.find("{*}title").text and root.find("{*}desc").text


def test_the_verdict_follows_the_figures(folders):
    models = collect(folders).models
    said = {model.name: list(verdict(findings(model))) for model in models}
    for model in models:
        use = model.results["best_of_n"]["pool"]["rules"][model.results["model"]["rule"]]
        rows = [row for row in said[model.name] if row[1].startswith("pool")]
        named = {"better": "good", "worse": "bad", "undecided": "open"}
        for (kind, sentence), figure_of in zip(rows, ("best_of_n", "weighted_vote"), strict=True):
            assert kind == named[decided(use[f"{figure_of}_minus_best_baseline"])]
            figures = (interval(last(use[figure_of])), points(use[f"{figure_of}_minus_best_baseline"]))
            assert all(figure in sentence for figure in (*figures, points(use[f"{figure_of}_minus_one_sample"])))
            baseline = model.results["best_of_n"]["pool"]["best_baseline"]["value"]
            assert f"({percent(baseline)} %)" in sentence
    assert next(kind for kind, sentence in said["good"] if "AUROC" in sentence) == "good"


def test_the_first_screen_begins_with_the_task_and_a_table_of_all_models(folders, written):
    models = collect(folders).models
    *said, table = page.glance(models)
    report = models[0].results["best_of_n"]["pool"]
    assert f"{report['n_problems']} problems, {report['n_max']} samples of each" in said[0] and len(said) == 2
    assert [row[0] for row in table.lines] == [model.name for model in models]
    best = report["rules"][models[0].results["model"]["rule"]]["best_of_n"]
    assert table.lines[0][1].startswith(percent(best["value"][-1]))
    assert percent(report["best_baseline"]["value"]) in table.lines[0][3]
    text = written[0].read_text()
    assert text.index('class="glance"') < text.index('class="lead"')


@pytest.mark.parametrize("more", [(), ("mine",)])
def test_the_average_beside_published_ones_is_of_the_same_four_splits(more):
    names = [*SPLITS, *more]
    scores = {name: records(3.0, seed)["gsm8k"] for seed, name in enumerate(names)}
    scores |= {name: records(0.3)["gsm8k"] for name in more}  # which would lower it
    trees = {name: list(map(tree_of, items)) for name, items in scores.items()}
    entry = processbench.figures(Request(trees, {"gsm8k": trees["gsm8k"]}))
    (table, _) = processbench.section([PageModel("m", {"processbench": entry})])
    cells = {cell for line in table.lines for cell in line}
    assert (interval(entry["average"]["half"]) in cells) == (not more)


def test_models_are_compared_pairwise_and_only_on_one_suite(folders, tmp_path):
    (pair,) = collect(folders).comparisons
    rows = {row["what"]: row for row in pair["rows"]}
    results = [json.loads((folder / "results.json").read_text()) for folder in folders]
    values = [r["processbench"]["files"]["gsm8k"]["f1"] for r in results]
    assert rows["ProcessBench gsm8k, F1 untuned threshold"]["value"] == pytest.approx(values[0] - values[1])
    values = [r["best_of_n"]["pool"]["rules"]["prod"]["best_of_n"]["value"][-1] for r in results]
    assert rows["pool, best of 6 by prod"]["value"] == pytest.approx(values[0] - values[1])
    values = [r["steps"]["auroc"]["value"] for r in results]
    assert rows["steps, AUROC"]["value"] == pytest.approx(values[0] - values[1])
    assert rows["steps, AUROC"]["better"] == 1.0 and rows["steps, AUROC"]["low"] > 0

    other = records(3.0)
    other["gsm8k"][5]["steps"][0] = "another step"
    refused(ValueError, "gsm8k", collect, [folders[0], write_folder(tmp_path / "other", other, "other")])
    changed = json.loads((folders[1] / "results.json").read_text()) | {"neutral": "drop"}
    shutil.copytree(folders[1], tmp_path / "drop")
    write_json(tmp_path / "drop" / "results.json", changed)
    refused(ValueError, "suite", collect, [folders[0], tmp_path / "drop"])


def test_the_page_and_the_terminal_say_once_where_each_difference_lies(folders):
    (model, _) = collect(folders).models
    report, rule = model.results["best_of_n"]["pool"], model.results["model"]["rule"]
    said, use = lead(findings(model)), report["rules"][rule]
    place = {"better": "Better", "worse": "Worse", "undecided": "Not"}
    for finding in findings(model):
        if finding.difference is not None:
            (sentence,) = (sentence for sentence in said if f"{finding.what}, {points(finding.difference)}" in sentence)
            assert sentence.startswith(place[decided(finding.difference)]) and finding.baseline in sentence
    assert list(tables(model.results, registered()))[-len(said) :] == said
    baseline = np.mean([np.mean([s["correct"] for s in pool["samples"]]) for pool in records(3.0)["pool"]])
    difference = use["best_of_n"]["value"][-1] - baseline
    assert use["best_of_n_minus_one_sample"]["value"] == pytest.approx(difference, abs=1e-6)


def test_the_first_figure_of_processbench_is_tuned_off_the_chains_it_judges(folders):
    results = collect(folders).models[0].results
    (first,) = processbench.findings(results)  # the one file tunes the threshold
    assert first.figure["value"] == results["processbench"]["average"]["cross_fit"]["value"]


def test_the_tiles_are_the_first_finding_of_each_benchmark(folders):
    models = collect(folders).models
    shown = tiles(models, registered())
    firsts = [of_benchmark[0] for of_benchmark in findings_of(models[0].results, registered())]
    assert [what for what, _ in shown] == [f"{first.what}, %" for first in firsts if first.figure is not None]
    assert [[name for name, *_ in values] for _, values in shown] == [["good", "poor<b>"]] * 4
    for (_, values), first in zip(shown, firsts, strict=False):
        assert values[0][1:3] == tuple(interval(first.figure).split(" ", 1))


def test_what_is_not_computed_is_not_called_none():
    reason = {"not_computed": "too few problems"}
    assert all("too few problems" in line for line in diagnostics.tables({"wrong_process": reason}))
    said = list(diagnostics.tables({"wrong_process": reason, "nonsense": {"finding": False}}))
    assert len(said) == 2 and "1" in said[0]


def test_equal_chains_are_shown_once_and_counted():
    sample = {"steps": ["a", "b"], "correct": True, "scores": [0.9, 0.8]}
    pool = {"problem": "p", "samples": [sample, {**sample, "steps": ["a", "c"]}, sample, {**sample, "correct": False}]}
    data = chains(["m"], [{"pool": [tree_of(pool)]}])
    assert (data["all"], data["distinct"]) == (4, 3)
    assert [(item["t"], item["o"], item.get("n", 1)) for item in data["items"]] == [
        (["a", "b"], True, 2), (["a", "c"], True, 1), (["a", "b"], False, 1),
    ]  # fmt: skip


def test_a_page_holds_the_first_chains_of_each_order_and_not_more_than_its_room(monkeypatch):
    pools = [tree_of(pool) for pool in records(3.0)["pool"]]
    whole = chains(["m"], [{"pool": pools}])
    monkeypatch.setattr(collecting, "BYTES", 4000)
    page = chains(["m"], [{"pool": pools}])
    assert 0 < len(page["items"]) < len(whole["items"]) == whole["distinct"] == page["distinct"]
    assert len(json.dumps([page["items"], page["problems"]], ensure_ascii=False)) < 4400
    lowest = [min(item["c"][0]) for item in whole["items"] if not item["o"]]
    assert max(lowest) in [min(item["c"][0]) for item in page["items"] if not item["o"]]
    shown = {(page["problems"][item["p"]], *item["t"]) for item in page["items"]}
    assert shown <= {(whole["problems"][item["p"]], *item["t"]) for item in whole["items"]}


def test_trees_are_shown_depth_first_and_ratings_as_probabilities():
    tree = records(1.0)["rated"][0]
    (item,) = chains(["m"], [{"rated": [tree_of(tree)]}])["items"]
    assert item["t"] == [f"node {j} of tree 0" for j in (0, 1, 3, 2, 4)]
    assert item["d"] == [0, 1, 2, 1, 2] and item["l"] == [1.0, 1.0, 0.5, 0.0, 0.0]
    assert item["c"] == [[tree["nodes"][j]["score"] for j in (0, 1, 3, 2, 4)]]


def test_runs_that_are_still_there_show_how_they_trained(folders, tmp_path):
    """A line that is still being written is left out; a model whose run is gone has no curve."""
    lines = [{"step": s, "loss": 1 / s, "goodput": 0.9} | ({"valid_loss": 2 / s} if s > 5 else {}) for s in range(1, 9)]
    write_records(tmp_path / "metrics.jsonl", lines)
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 9, "lo')
    drawn = [svg(figure) for figure in training([("here", tmp_path), ("gone", tmp_path / "gone")])]
    assert [re.findall(r"<title [^>]*>(.*?)</title>", text)[0] for text in drawn] == [
        "Training loss",
        "Fraction of the time spent training (goodput)",
    ]
    assert "here" in drawn[0] and "gone" not in drawn[0]
    assert drawn[0].count("stroke-dasharray") == 1 and drawn[1].count("stroke-dasharray") == 0
    whole = collect(folders)
    results = {**whole.models[0].results, "model": {**whole.models[0].results["model"], "folder": str(tmp_path)}}
    sections = page.sections_of(whole._replace(models=[PageModel("here", results), whole.models[1]]), {})
    assert [len(blocks) for id, _, blocks in sections if id == "training"] == [2]


def test_a_deep_tree_is_listed_in_time_of_its_length():
    n = 20_000
    nodes = [{"parent": i - 1, "text": "x", "score": 0.5} for i in range(n)]
    (item,) = chains(["m"], [{"f": [tree_of({"problem": "q", "nodes": nodes})]}])["items"]
    assert item["d"] == list(range(n))


@pytest.mark.parametrize("name", ["\x1b[2J", "a\x00", "$x_{$", "]]>"])
def test_a_figure_holds_any_name_as_text(name):
    figure = line_plot("n", name, [Line(name, [1, 2], [3, 4])], description=name, note="")
    shown = "".join(ElementTree.fromstring(svg(figure)).itertext())
    assert shown.count(name.replace("\x1b", "\\x1b").replace("\x00", "\\x00")) >= 2  # the title and the description


def test_a_figure_is_drawn_alike_twice_with_ids_of_its_own():
    def figure(name):
        def draw(canvas):
            axes = canvas.subplots()
            axes.plot([0, 1], [0, 1], color=plots.COLOURS[0], gid=f"{plots.NOTE}1 < 2")
            axes.set_xlabel("n <b>")

        return svg(Figure(name, "A & B", "what <it> shows", "", "", draw))

    text = figure("one")
    assert text == figure("one")
    ids = [set(re.findall(r' id="([^"]+)"', figure(name))) for name in ("one", "two")]
    assert ids[0] and not ids[0] & ids[1]
    links = set(re.findall(r'(?:url\(|href=")#([^")]+)', text))
    assert links and links <= ids[0]
    assert "<title>1 &lt; 2</title>" in text and "A &amp; B" in text and "n &lt;b&gt;" in text
    assert f"var(--s0, {plots.COLOURS[0]})" in text and f"var(--ink, {plots.INK})" in text


# What follows needs a browser.


@pytest.fixture
def opened(browser, written):
    browser.open("about:blank")
    browser.logs("performance"), browser.logs("browser")
    url = written[0].as_uri()
    browser.open(url)
    return browser, url


def test_the_browser_asks_for_nothing_and_complains_of_nothing(opened):
    browser, url = opened
    assert browser.run("return document.querySelectorAll('article').length") == 10
    assert set(requests_of(browser)) <= {url, "data:,"}
    assert browser.logs("browser") == []
    assert browser.run("return document.title") == "jprm: good, poor<b>"


def test_the_most_convincing_wrong_chain_comes_first_and_markup_is_text(opened):
    browser, _ = opened
    wrong = [r for r in records(3.0)["gsm8k"] if r["first_error"] >= 0]
    paths = [(0, 2), (0, 2, 4)]  # the wrong nodes and what leads to them
    trees = [max(min(r["nodes"][j]["score"] for j in path) for path in paths) for r in records(3.0)["rated"]]
    pools = [min(s["scores"]) for r in records(3.0)["pool"] for s in r["samples"] if not s["correct"]]
    best = max([*(min(r["scores"]) for r in wrong), *trees, *pools])
    first = browser.run("return [...document.querySelectorAll('article:first-child .said span:first-child')]"
                        ".map(e => +e.textContent)")  # fmt: skip
    assert any(score == pytest.approx(best, abs=5e-4) for score in first)
    browser.run("const s = document.getElementById('search'); s.value = 'onerror';"
                "s.dispatchEvent(new Event('input'))")  # fmt: skip
    browser.wait("return document.querySelectorAll('article').length === 1")
    assert browser.run("return document.querySelector('article .text').textContent") == NASTY
    assert browser.run("return document.querySelectorAll('article script, article img').length") == 0
    assert browser.run("return document.title") == "jprm: good, poor<b>"


def test_the_keyboard_searches_turns_pages_and_clears(opened):
    browser, _ = opened
    where = "document.getElementById('where').textContent"
    everything = browser.run(f"return {where}")
    browser.press("n")
    browser.wait(f"return {where}.includes('page 2')")
    browser.press("/")
    browser.press(*"tree 39")
    browser.wait(f"return {where}.startsWith('1 of')")
    assert browser.run("return document.querySelector('article .problem').textContent") == "Tree 39?"
    browser.press(ESCAPE)
    browser.wait(f"return {where} === {json.dumps(everything)}")
    browser.press("j")
    assert browser.run("return document.activeElement.tagName") == "ARTICLE"


def test_tables_are_copied_as_text_in_three_forms(opened):
    browser, _ = opened
    browser.run("navigator.clipboard.writeText = text => { window.copied = text; return Promise.resolve(); }")
    rows = browser.run("return [...document.querySelector('section table').rows].length")
    texts = {}
    for name in ("Markdown", "LaTeX", "CSV"):
        browser.run(
            "[...document.querySelectorAll('.copy button')].find(b => b.textContent === arguments[0]).click()", name
        )
        texts[name] = browser.run("return window.copied")
    (head, *_) = lines = list(csv.reader(io.StringIO(texts["CSV"])))
    assert len(lines) == rows and {len(line) for line in lines} == {len(head)}
    assert texts["Markdown"].count("\n") == rows + 1 and texts["LaTeX"].count(r" \\") == rows


def test_formulas_bring_their_script_and_other_pages_do_not_grow(browser, written, tmp_path):
    """KaTeX is in the page only where a formula is; it draws MathML, which needs neither style nor fonts."""
    assert "katex.render=" not in written[0].read_text() and written[0].stat().st_size < 500_000
    files = records(3.0)
    files["gsm8k"][0]["problem"], files["gsm8k"][0]["steps"][0] = r"What is $\frac{1}{2}$?", r"It is \[ x^2. \]" + NASTY
    folder = write_folder(tmp_path / "math", files, "math")
    assert cli.main(["report", str(folder), "--output", str(tmp_path / "report.html")]) == 0
    requests_of(browser), browser.logs("browser")
    browser.size(1200, 900)
    browser.open((tmp_path / "report.html").as_uri())
    browser.run("const s = document.getElementById('search'); s.value = 'frac'; s.dispatchEvent(new Event('input'))")
    browser.wait("return document.querySelectorAll('article').length === 1")
    assert browser.run("return document.querySelectorAll('article math mfrac, article math msup').length") == 2
    assert browser.run("return document.querySelector('article .text').textContent").endswith(NASTY)
    assert browser.logs("browser") == [] and len(requests_of(browser)) == 1


@pytest.mark.slow
def test_axe_finds_no_violation(browser, tmp_path):
    files = records(3.0)
    files["gsm8k"][0]["problem"], files["gsm8k"][0]["steps"][0] = r"What is $\frac{1}{2}$?", f"It is {WIDE}"
    folder = write_folder(tmp_path / "math", files, "math")
    assert cli.main(["report", str(folder), "--output", str(tmp_path / "report.html")]) == 0
    browser.open((tmp_path / "report.html").as_uri())
    browser.size(640, 500, 2)  # 1280 pixels at a zoom of 200 %
    for scheme in browser.schemes():
        for search in ("", "frac"):
            browser.run("document.querySelectorAll('details').forEach(e => { e.open = true; });"
                        "const s = document.getElementById('search'); s.value = arguments[0];"
                        "s.dispatchEvent(new Event('input'))", search)  # fmt: skip
            browser.wait("return document.querySelectorAll('article').length" + (" === 1" if search else " > 1"))
            assert browser.axe() == [], (scheme, search)


@pytest.mark.slow
def test_fifty_megabytes_stay_usable(browser, tmp_path):
    text = "A step that says something about the problem at hand, at some length. " * 4
    items = [{"f": 0, "p": i % 1000, "t": [f"{text} {i}.{k}" for k in range(8)], "l": [1] * 7 + [i % 2],
              "c": [[0.9] * 7 + [round((i % 997) / 997, 4)]], "o": None} for i in range(21_000)]  # fmt: skip
    data = {"models": ["m"], "files": ["f"], "problems": [f"p{i}" for i in range(1000)],
            "items": collecting.ranked(items)}  # fmt: skip
    model = {"name": "m", "folder": "f", "step": 1, "semantics": "rating", "rule": "prod"}
    results = {"model": model, "sections": {}, "data": {},
               "diagnostics": {}, "absent": [], "jprm": "0"}  # fmt: skip
    whole = Page([PageModel("m", results)], [], data, [{}])
    file = tmp_path / "big.html"
    file.write_text(page.html(whole, [], {}))
    assert file.stat().st_size > 50e6
    browser.open(file.as_uri())
    assert browser.run("return document.querySelectorAll('article').length") == 10
    took = browser.run("""const s = document.getElementById('sort'), t = performance.now();
        s.value = 'step'; s.dispatchEvent(new Event('change')); return performance.now() - t""")
    assert took < 3000  # a quarter of a second on a quiet machine


def test_the_best_baseline_is_the_first_and_is_seen_on_a_phone(browser, folders, tmp_path):
    """At 1,280 pixels nothing of the table of steps is cut; at 390 the model and its best baseline are whole."""
    (model,) = collect([folders[0]]).models
    best = model.results["steps"]["ahead"]["auroc"]["baseline"].replace("_", " ")
    assert cli.main(["report", str(folders[0]), "--output", str(tmp_path / "report.html")]) == 0
    browser.open((tmp_path / "report.html").as_uri())
    for width, whole in ((1280, None), (390, 3)):
        browser.size(width, 900)
        browser.run("document.querySelectorAll('details').forEach(e => { e.open = true; })")
        heads, right, ends = browser.run("""
            const tables = document.querySelectorAll('#steps table'), table = tables[tables.length - 1];
            const cells = [...table.rows[0].cells], box = table.parentElement.getBoundingClientRect();
            return [cells.map(e => e.textContent), box.right, cells.map(e => e.getBoundingClientRect().right)]""")
        assert heads[2] == f"baseline: {best}"
        assert all(end <= right + 1 for end in ends[:whole]), (width, ends, right)
        assert browser.overflow() <= 0


def test_the_heat_map_has_the_steps_that_chains_have_and_a_legend():
    from matplotlib.figure import Figure

    from jprm.apps.report.collect import BINS, COLUMNS
    from jprm.methods.evaluate.plots import heat_maps

    for longest, labels in ((3, ["1", "2", "3"]), (12, ["1", "2", "4", "6", "8", "10", "12+"])):
        rows = [[int(j < longest) for j in range(COLUMNS)] for _ in range(BINS)]
        figure = Figure()
        heat_maps(figure, {"right steps": rows, "wrong steps": rows})
        assert [tick.get_text() for tick in figure.axes[0].get_xticklabels()] == labels
        assert [text.get_text() for text in figure.axes[1].get_legend().get_texts()] == ["0 %", "5 %", "10 %"]


def test_diagnostics_that_nobody_asked_for_are_no_finding():
    from jprm.methods.evaluate.diagnostics import BENCHMARK as DIAGNOSTICS

    assert list(DIAGNOSTICS.findings({"diagnostics": {}})) == []
