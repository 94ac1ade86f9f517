"""`jprm report`: one self-contained HTML page, without network, server or fonts.

The template escapes all data; the page's script sets it with `textContent`. A content security policy in the page's
head forbids any request.
"""

from __future__ import annotations

import dataclasses
import io
import itertools
import json
import os
import re
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jinja2
import matplotlib
from markupsafe import Markup
from matplotlib.figure import Figure as Canvas

import jprm
from jprm.apps.report.collect import Page, collect, ranked
from jprm.apps.report.runs import Line, line_plot, training
from jprm.apps.report.scored import collect_scored, is_records
from jprm.apps.web import text_of_file
from jprm.io.jsonl import parse, printable
from jprm.io.outputs import atomic_write, check_output, check_version
from jprm.io.storage import path_of
from jprm.methods.evaluate.benchmarks import BENCHMARKS, registered
from jprm.methods.evaluate.blocks import (
    ABSENT,
    Block,
    Figure,
    Note,
    PageModel,
    Table,
    decided,
    interval,
    percent,
    plain,
)
from jprm.methods.evaluate.findings import Tiles, findings_of, first_fault, lead, tiles, verdict
from jprm.methods.evaluate.plots import COLOURS, GRID, INK, NOTE, heat_maps, slug
from jprm.methods.evaluate.run import trained_on_words
from jprm.methods.rl import RESULT

SORTS = {
    "convincing": "most convincing wrong chains first",
    "doubted": "most doubted right chains first",
    "step": "largest distance from a label first",
    "models": "largest distance between models first",
    "lowest": "lowest step first",
    "file": "in the order of the files",
}

SCRIPTS = ("jprm.apps.web:math.js", "jprm.apps.web:chain.js", "jprm.apps.report:page.js")
KATEX = ("jprm.apps.web:katex/katex.min.js",)
"""270 KB, only for pages with formulas. They become MathML, which browsers draw without KaTeX's styles and fonts."""

FORMULA = re.compile(  # as in jprm/apps/web/math.js
    r"\\\[|\$\$|\\begin\{|\\\(|(?<![\\$])\$(?![\s$])(?:[^$\\\n]|\\[^\n]){1,2000}?(?<!\s)\$(?!\d)"
)

More = Mapping[str, Iterable[Block]]


def report(
    folders: Sequence[str | os.PathLike],
    out: str | os.PathLike,
    figures: str | os.PathLike | None = None,
    more: More | None = None,
) -> None:
    """Writes a page for scored files, or for folders of `jprm eval suite` or `jprm rl`; replaces `out` atomically.

    `figures` is a folder for the page's figures as NAME.svg; `None` writes no files. `more` adds sections by heading,
    after the comparison; only suites have it.

    Raises FileNotFoundError or ValueError if a folder is missing or unfinished, or the folders are not of one kind or
    suite; ValueError without a folder, or if `out` is also an input.
    """
    for folder in folders:
        if not path_of(folder).exists():
            raise FileNotFoundError(
                f"{folder}: does not exist. Give a folder of `jprm eval suite`, a run of `jprm rl`, or a scored file"
            )
    check_output(out, *(file for folder in folders for file in path_of(folder).files() if ".json" in file.name))
    if folders and all(map(is_records, folders)):
        page, said = collect_scored(folders)
        sections = [(name, heading, blocks) for name, heading, content in _of_chains(page) if (blocks := list(content))]
        verdicts, first = [], First([(page.models[0].name, said)], [])
    elif folders and is_run(folders[0]):
        page, sections, verdicts, first = collect_runs(folders)
    else:
        page = collect(folders)
        sections = list(sections_of(page, more or {}))
        findings_by_model = {
            model.name: list(itertools.chain(*findings_of(model.results, registered()))) for model in page.models
        }
        warnings = {model.name: trained_on_words(model.results) for model in page.models}
        verdicts = [
            (name, [*(("bad", line) for line in warnings[name]), *verdict(findings)])
            for name, findings in findings_by_model.items()
        ]
        leads = [(name, warnings[name] + lead(findings)) for name, findings in findings_by_model.items() if findings]
        first = First(leads, tiles(page.models, registered()), glance(page.models))
    drawn = {block.name: svg(block) for _, _, blocks in sections for block in blocks if isinstance(block, Figure)}
    home = os.path.join(os.path.dirname(os.path.abspath(out)), "")
    atomic_write(out, html(page, sections, drawn, verdicts, first, home))
    if figures is not None:
        for name, text in drawn.items():
            atomic_write(path_of(figures) / f"{name}.svg", text)


def html(
    page: Page, sections: Sequence[tuple[str, str, Sequence[Block]]], drawn: Mapping[str, str],
    verdicts: Sequence[tuple[str, Sequence[tuple[str, str]]]] = (), first: First | None = None, home: str = "",
) -> str:  # fmt: skip
    """Returns the page's HTML, from sections (id, heading, blocks) and SVG figures by name, for every `Figure` in them.

    `verdicts` is [(model name, [(kind, sentence)])]; a kind must be `good`, `bad`, `open` or `fact`.
    Folders of models below `home`, the page's own folder, are named from there, e.g. `formal`.

    Raises ValueError if the chains have NaN or an infinity, jinja2's UndefinedError if a figure is missing.
    """
    several = len(page.models) > 1
    figures = [block for _, _, blocks in sections for block in blocks if isinstance(block, Figure)]
    picture = dataclasses.replace(figures[0], name=f"first-{figures[0].name}") if figures else None
    loader = jinja2.PackageLoader("jprm.apps.report", ".")
    environment = jinja2.Environment(loader=loader, autoescape=True, undefined=jinja2.StrictUndefined)
    return environment.get_template("page.html").render(
        home=home,
        title="jprm: " + ", ".join(model.name for model in page.models),
        models=page.models,
        leads=first.leads if first else [],
        tiles=first.tiles if first else [],
        glance=[(type(block).__name__, block) for block in first.glance] if first else [],
        picture=picture,
        picture_svg=Markup(svg(picture)) if picture else "",
        verdicts=verdicts,
        sections=[(id, head, [(type(block).__name__, block) for block in blocks]) for id, head, blocks in sections],
        svg={name: Markup(text) for name, text in drawn.items()},
        sorts=[(key, SORTS[key]) for key in orders_of(page.chains, several)],
        labelled=any(label is not None for item in page.chains["items"] for label in item["l"]),
        judged=any(item["w"] is not None for item in page.chains["items"]),
        files=[("", "all"), *enumerate(page.chains["files"])],
        names=list(enumerate(page.chains["models"])),
        counts=counts_of(page.chains),
        chains=Markup(embedded(page.chains)),
        css=Markup("".join(text_of_file(file) for file in ("jprm.apps.web:base.css", "jprm.apps.report:page.css"))),
        js=Markup("".join(map(text_of_file, [*(KATEX if has_formulas(page.chains) else ()), *SCRIPTS]))),
    )


def orders_of(chains: Mapping[str, Any], several: bool) -> list[str]:
    """Returns the keys of `SORTS` that are available, the default first; orders by label only if there are labels.

    `chains` is the browser's data; `several` (models) adds `models`. Scored files begin with `lowest`.
    """
    known = any(item["w"] is not None for item in chains["items"])
    labels = any(label is not None for item in chains["items"] for label in item["l"])
    by_label = ["convincing", "doubted"] * known + ["step"] * labels + ["models"] * several
    return ["lowest", *by_label, "file"] if "weights" in chains else [*by_label, "lowest", "file"]


def counts_of(chains: Mapping[str, Any]) -> str:
    """Returns sentences on how many chains are distinct and on the page; "" if all are."""
    every, distinct, shown = (chains.get("all", 0), chains.get("distinct", 0), len(chains["items"]))
    sentences = (
        [f"{distinct:,} of {every:,} chains are distinct; equal ones are shown once."] if distinct < every else []
    )
    if shown < distinct:
        sentences.append(
            f"The page holds {shown:,} of {distinct:,}: those that come first in each order, and others at random. All"
            " are in the scored files."
        )
    return " ".join(sentences)


def has_formulas(chains: Mapping[str, Any]) -> bool:
    """Whether any text in the browser's data (`chains`) may contain a formula."""
    texts = itertools.chain(
        chains["problems"],
        (text for item in chains["items"] for text in item["t"]),
        (critique[3] for item in chains["items"] for of_model in item.get("j", ()) for critique in of_model),
    )
    return any(FORMULA.search(text) for text in texts)


def embedded(data: Any) -> str:
    """Returns data as JSON that is safe inside a script element: `<` is escaped.

    Raises ValueError for NaN or infinity.
    """
    return json.dumps(data, ensure_ascii=False, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")


def glance(models: Sequence[PageModel]) -> list[str | Table]:
    """Returns the blocks for the top of the page, from benchmarks that all models have; [] if there are none."""
    everywhere = [
        benchmark for name, benchmark in registered().items() if all(name in model.results for model in models)
    ]
    return [block for benchmark in everywhere for block in benchmark.glance(models)]


def sections_of(page: Page, more: More) -> Iterator[tuple[str, str, list[Block]]]:
    """Yields (id, heading, blocks) of every non-empty section, in the page's order; `more` are blocks by heading.

    Ids are e.g. `compare`, `more-0`, a benchmark's name with dashes, `heat`, `training` and `left-out`.
    """
    benchmarks = {name: x for name, x in registered().items() if name in page.models[0].results}
    sections: list[tuple[str, str, Iterable[Block]]] = [("compare", "Comparison of models", _comparison(page))]
    sections += [(f"more-{i}", heading, blocks) for i, (heading, blocks) in enumerate(more.items())]
    for name, benchmark in benchmarks.items():
        blocks = benchmark.section(page.models) if benchmark.section else _plain(page.models, name)
        sections.append((name.replace("_", "-"), benchmark.title, blocks))
    sections += [(slug(name), str(other["title"]), _plain(page.models, name)) for name, other in _others(page).items()]
    folders = [(model.name, model.results["model"]["folder"]) for model in page.models]
    sections += [*_of_chains(page), ("training", "Training", training(folders))]
    sections += [("left-out", "What was left out", _left_out(page))]
    for name, heading, blocks in sections:
        if blocks := list(blocks):
            yield name, heading, blocks


def _of_chains(page: Page) -> list[tuple[str, str, Iterable[Block]]]:
    return [("heat", "Scores by step", _heat(page))]


def _others(page: Page) -> dict[str, Any]:
    """Returns benchmarks in the results that are not registered here.

    Their code is not run, because a results file may come from elsewhere.
    """
    others = page.models[0].results.get("others", {})
    return {name: other for name, other in others.items() if name not in BENCHMARKS}


def _plain(models: Sequence[PageModel], name: str) -> Iterator[Block]:
    """Yields a table of all figures, for a benchmark without its own section or code."""
    return plain({model.name: model.results.get(name) for model in models})


def _comparison(page: Page) -> Iterator[Block]:
    for pair in page.comparisons:
        rows = [[row["what"], row, row["better"], decided(row)] for row in pair["rows"]]
        columns = ("", "difference", "ahead in % of draws", f"{pair['a']} is")
        yield Table(f"{pair['a']} less {pair['b']}, on the same problems", columns, rows)
    if page.comparisons:
        yield Note(
            "Both models met the same problems, so these are drawn together and the difference is taken within each"
            " draw: it can be sure where the two intervals overlap. “Undecided” is not “equal”."
        )


def _heat(page: Page) -> Iterator[Block]:
    for model, counts in zip(page.models, page.heat, strict=True):
        if any(any(map(any, rows)) for rows in counts.values()):
            yield Figure(
                name=f"heat-{slug(model.name)}",
                title="Scores by step",
                description=f"Scores of {model.name} by step, right and wrong steps.",
                caption=model.name,
                note="A column is the first, second, ... step of a chain; its cells divide that column's steps by"
                " score, dark for many. A good scorer is dark at the top for right steps and at the bottom for wrong"
                " ones, in every column alike.",
                draw=lambda figure, counts=counts: heat_maps(figure, counts),
                size=(8.2, 3.2),
            )


def _left_out(page: Page) -> Iterator[Block]:
    results = page.models[0].results
    rows = [[f"file {path}", "is not there"] for path in results["absent"]]
    too_long = results.get("too_long", {})
    rows += [[f"{name}: records with a chain too long for the model", str(n)] for name, n in too_long.items() if n]
    for model in page.models:
        unread = model.results.get("unread", {}).items()
        rows += [[f"{name}: records with a step that {model.name} did not judge", str(n)] for name, n in unread if n]
    for other in _others(page).values():
        what = "shown as plain numbers, as this page runs no code that results name: register it and call the library"
        rows.append([f"drawing and comparison of {other['benchmark']}", what])
    rows += [[f"figures of {name}", reason] for name, reason in results.get("not_computed", {}).items()]
    for name, benchmark in registered().items():
        if name in results:
            rows += [[what, str(count)] for what, count in benchmark.left_out(results[name]) if count]
    if rows:
        yield Table("", ("", "count"), rows)


# ---- Plots as SVG text that the page embeds or a file holds: titled, described, and coloured by CSS variables.

SVG, XLINK = "http://www.w3.org/2000/svg", "http://www.w3.org/1999/xlink"
ElementTree.register_namespace("", SVG)
ElementTree.register_namespace("xlink", XLINK)

STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",  # text stays text
    "text.parse_math": False,  # a name may hold dollars
    "font.family": "sans-serif",
    "font.size": 10,
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "xtick.color": INK,
    "ytick.color": INK,
    "grid.color": GRID,
    "lines.linewidth": 1.8,
    "path.simplify": False,
}
VARIABLES = {INK: "ink", GRID: "grid"} | {colour: f"s{i}" for i, colour in enumerate(COLOURS)}
"""The CSS variable of each colour; on a dark background the page sets lighter values."""


CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f]")
"""Control characters that XML forbids, and carriage returns."""


def svg(figure: Figure) -> str:
    """Draws a figure as SVG text. Deterministic; all ids begin with the figure's name.

    Errors of its `draw` pass through.
    """
    with matplotlib.rc_context({**STYLE, "svg.hashsalt": figure.name}):
        canvas = Canvas(figsize=figure.size, facecolor="none")
        figure.draw(canvas)
        for axes in canvas.axes:
            axes.set_facecolor("none")
        file = io.StringIO()
        nothing = dict.fromkeys(("Creator", "Date", "Format", "Type"))
        canvas.savefig(file, format="svg", bbox_inches="tight", metadata=nothing)
    root = ElementTree.fromstring(CONTROL.sub("\N{REPLACEMENT CHARACTER}", file.getvalue()))
    _reference(root, figure.name)
    width, height = (float(x) for x in root.get("viewBox", "").split()[2:])
    for key in ("width", "height", "version"):
        root.attrib.pop(key, None)
    root.attrib |= {
        "class": "plot",
        "role": "img",
        "aria-labelledby": f"{figure.name}-title {figure.name}-text",
        # 10 point text matches the page; on a phone, wide plots scroll.
        "style": f"max-width:{1.35 * width:.0f}px;min-width:{0 if width < 420 else 520}px;"
        f"aspect-ratio:{width:g}/{height:g};stroke-linejoin:round;stroke-linecap:butt",
    }
    for style in root.findall(f"{{{SVG}}}defs/{{{SVG}}}style"):  # its selector is `*`: of the whole page
        style.text = ""
    title, description = (
        ElementTree.Element(f"{{{SVG}}}{tag}", id=f"{figure.name}-{end}")
        for tag, end in (("title", "title"), ("desc", "text"))
    )
    title.text, description.text = printable(figure.title), printable(figure.description)
    root[:0] = [title, description]
    return ElementTree.tostring(root, encoding="unicode") + "\n"


def _reference(root: ElementTree.Element, name: str) -> None:
    """Prefixes ids, replaces colours by CSS variables, and turns ids that begin with `NOTE` into tooltips."""
    for element in root.iter():
        label = element.attrib.pop("id", None)
        if label is not None and label.startswith(NOTE):
            note = ElementTree.Element(f"{{{SVG}}}title")
            note.text = label.removeprefix(NOTE)
            element.insert(0, note)
        elif label is not None:
            element.set("id", f"{name}-{label}")
        link = element.get(f"{{{XLINK}}}href")
        if link:
            element.set(f"{{{XLINK}}}href", f"#{name}-{link[1:]}")
        for key in ("style", "clip-path", "fill", "stroke"):
            if key in element.attrib:
                element.set(key, _restyled(element.attrib[key], name))


def _restyled(text: str, name: str) -> str:
    text = text.replace("url(#", f"url(#{name}-")
    text = re.sub(r"#[0-9a-f]{6}", lambda m: f"var(--{VARIABLES[m[0]]}, {m[0]})" if m[0] in VARIABLES else m[0], text)
    return re.sub(r"(font: [\d.]+px) [^;]+", r"\1 system-ui, sans-serif", text)


# ----------------------------------------------------------------------------------------------- reinforcement learning


VERSION = 1
"""The newest supported version of rl.json."""


def is_run(folder: str | os.PathLike) -> bool:
    """Whether `jprm rl` wrote the folder (it has `rl.json`); `False` if it does not exist."""
    return (path_of(folder) / RESULT).is_file()


def collect_runs(
    folders: Sequence[str | os.PathLike],
) -> tuple[Page, list[tuple[str, str, list[Block]]], list[tuple[str, list[tuple[str, str]]]], First]:
    """Returns the page, its sections (id, heading, blocks), its verdicts, and the top of the page.

    A verdict is (run's name, [(kind, sentence)]); see `kind`. Raises ValueError if `jprm rl` did not write a folder, or
    its `rl.json` is damaged or of a newer jprm.
    """
    models, sections, verdicts, runs, results = [], [], [], [], []
    chains: dict[str, Any] = {"models": ["PRM"], "files": [], "problems": [], "items": []}
    for index, folder in enumerate(folders):
        if not is_run(folder):
            raise ValueError(f"{folder}: holds no {RESULT}; a page shows runs of jprm rl, or suites, not both")
        result = parse((path_of(folder) / RESULT).read_bytes(), f"{folder}/{RESULT}")
        check_version(result.get("version"), VERSION, f"{folder}/{RESULT}")
        name = printable(f"{result['name']} ({path_of(folder).name})")
        about = {"step": result["update"], "folder": str(folder), "semantics": "its own samples"}
        models.append(PageModel(name, {"model": about, "jprm": jprm.__version__}))
        sections.append((f"run-{index}", name, list(blocks(name, result))))
        runs.append((name, folder))
        results.append((path_of(folder).name, result))
        verdicts.append((name, [(kind(sentence), sentence) for sentence in result["verdict"]]))
        _add_chains(chains, name, result)
    if len(results) > 1:
        sections.insert(0, ("runs", "Runs", [_together(results)]))
    if figures := list(training(runs)):
        sections.append(("training", "Training", figures))
    leads = [(name, [first_fault(sentences)]) for name, sentences in verdicts]
    return Page(models, [], chains, []), sections, verdicts, First(leads, _tiles(results))


class First(NamedTuple):
    """The top of the page: sentences per model or run, and figures."""

    leads: list[tuple[str, list[str]]]
    tiles: Tiles
    glance: Sequence[str | Table] = ()


def kind(sentence: str) -> str:
    """Returns the kind of a verdict sentence: `good`, `bad`, `open`, or `fact` if it decides no question.

    `open` stands for a sentence about correct answers that ends in neither "better." nor "worse.".
    """
    if sentence.startswith("A guard ended the run"):
        return "bad"
    if not sentence.startswith("Correct answers"):
        return "fact"
    return {"better.": "good", "worse.": "bad"}.get(sentence.rpartition(", ")[2], "open")


def _tiles(results: Sequence[tuple[str, dict[str, Any]]]) -> Tiles:
    """Returns correct answers at the start, the end and for the kept policy, and the PRM's final score."""
    figures: dict[str, list[tuple[str, str, str, str]]] = {}
    for name, result in results:
        rows = result["evaluations"]
        kept = (result.get("fresh") or rows[result["best"]]) if result["ended"] else rows[-1]
        for what, row in (("right at the start, %", rows[0]), ("right at the end, %", rows[-1]), ("kept, %", kept)):
            right = {"value": row["gold"], "low": row["gold_low"], "high": row["gold_high"]}
            value, _, inside = interval(right).partition(" ")
            figures.setdefault(what, []).append((name, value, inside, ""))
        if "proxy" in rows[0]:
            score = (name, f"{rows[-1]['proxy']:.2f}", f"from {rows[0]['proxy']:.2f}", "")
            figures.setdefault("PRM's lowest score", []).append(score)
    return list(figures.items())


def _together(results: Sequence[tuple[str, dict[str, Any]]]) -> Figure:
    """Plots all runs: correct answers, and the PRM's lowest score dashed."""
    lines = []
    for (name, result), colour in zip(results, itertools.cycle(COLOURS)):
        rows = result["evaluations"]
        x = [row["update"] for row in rows]
        lines.append(Line(f"{name}: right answers, %", x, [100 * row["gold"] for row in rows], colour))
        if "proxy" in rows[0]:
            score = [100 * row["proxy"] for row in rows]
            lines.append(Line(f"{name}: PRM's lowest score x 100", x, score, colour, "--"))
    title = "Right answers and the PRM's score, by run"
    note = "Where a run's dashed line rises and its solid one falls, the policy has learnt what the PRM overrates."
    said = f"{title}, at every evaluation."
    return line_plot("runs-together", title, lines, description=said, note=note, x_label="update", few=True)


def blocks(name: str, result: dict[str, Any]) -> Iterator[Block]:
    """Yields a run's table, a note and figures: right answers, over KL (if it is measured), and lengths.

    `result` is the object in `rl.json`; `name` is shown in the figures.
    """
    rows = result["evaluations"]
    k = max(map(int, rows[0]["pass"]))
    columns = ("update", "sampled tokens", "right, %", f"any of {k} right, %", "right working, %",
               "right with wrong working, %", "PRM's lowest score", "of wrong chains", "second PRM's", "PRMs apart",
               "KL", "tokens", "steps", "blank or cut, %")  # fmt: skip
    shown = [(str(row["update"]), row) for row in rows]
    if fresh := result.get("fresh"):  # its samples did not choose it, and its KL is not measured again
        shown.append((f"{fresh['update']}, fresh samples", {**rows[result["best"]], "kl": None, **fresh}))
    table = [
        (
            update, f"{row['sampled_tokens']:,}",
            interval({"value": row["gold"], "low": row["gold_low"], "high": row["gold_high"]}),
            percent(row["pass"][str(k)]), percent(row["working"]), percent(row["right_with_wrong_working"]),
            *(_number(row.get(key)) for key in ("proxy", "proxy_wrong", "second", "disagreement", "kl")),
            f"{row['tokens']:.1f}", f"{row['steps']:.1f}", percent(row["blank"] + row["truncated"]),
        )
        for update, row in shown
    ]  # fmt: skip
    yield Table("held-out problems", columns, table, strong=(result["best"],))
    yield Note(
        "KL(policy, start) is in nats a token of these samples, summed over the vocabulary. The PRM's lowest score is a"
        " chain's worst step. Where it rises and right answers fall, the policy has learnt what the PRM overrates; the"
        " chains below are those it rates highest among the wrong ones. A second PRM gives no credit: how far apart the"
        " two score a step shows the same. The best evaluation is lucky among several: the row of fresh samples"
        " measures its policy again."
    )
    right = {"right answers, %": [100 * row["gold"] for row in rows]}
    if "proxy" in rows[0]:
        score = {"PRM's lowest score x 100": [100 * row["proxy"] for row in rows]}
        yield _figure(name, "gold", "Right answers and the PRM's score", rows, right | score)
    if any(row["kl"] is not None for row in rows):
        yield _figure(name, "kl", "Right answers over the distance from the start", rows, right, by_kl=True)
    lengths = {f"{what} a chain": [row[what] for row in rows] for what in ("tokens", "steps")}
    yield _figure(name, "lengths", "Lengths", rows, lengths)


def _figure(
    name: str, what: str, title: str, rows: Sequence[dict], values: Mapping[str, Sequence[float]], by_kl: bool = False
) -> Figure:
    """Plots figures of one run over its updates or its KL from the start."""
    x = [row["kl"] or 0.0 for row in rows] if by_kl else [row["update"] for row in rows]
    lines = [Line(label, x, y, colour) for (label, y), colour in zip(values.items(), COLOURS, strict=False)]
    note = "A point is an evaluation on the held-out problems, with the same random numbers each time."
    said, x_label = f"{title} at the evaluations of {name}.", "KL from the start, nats a token" if by_kl else "update"
    return line_plot(f"{what}-{slug(name)}", title, lines, description=said, note=note, x_label=x_label, few=True)


def _add_chains(chains: dict[str, Any], name: str, result: dict[str, Any]) -> None:
    """Adds a run's examples, from its first, best and last evaluation, to the browser's data `chains`."""
    rows = result["evaluations"]
    for at in sorted({0, result["best"], len(rows) - 1}):
        chains["files"].append(f"{name}, update {rows[at]['update']}")
        for example in rows[at]["examples"]:
            if not example["steps"]:
                continue
            if example["problem"] not in chains["problems"]:
                chains["problems"].append(example["problem"])
            count = len(example["steps"])
            item: dict[str, Any] = {
                "f": len(chains["files"]) - 1, "p": chains["problems"].index(example["problem"]),
                "t": example["steps"], "l": [None] * count, "c": [example["scores"] or [0.5] * count], "o": False,
            }  # fmt: skip
            chains["items"] += ranked([item])


def _number(value: float | None) -> str:
    return ABSENT if value is None else f"{value:.3f}"
