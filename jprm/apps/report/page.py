"""`jprm report`: one HTML page that needs nothing else: no network, no server, no fonts.

The template escapes everything that comes from data; the page's script sets it with `textContent`. The policy in the
page's head forbids the browser any request.
"""

from __future__ import annotations

import collections
import dataclasses
import io
import itertools
import json
import os
import re
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import jinja2
import matplotlib
from markupsafe import Markup
from matplotlib.figure import Figure as Canvas

from jprm.apps.report.collect import Page, collect
from jprm.apps.report.rl import First, collect_runs, is_run
from jprm.apps.report.training import training
from jprm.apps.web import text_of_file
from jprm.io.outputs import atomic_file, check_output
from jprm.io.storage import Place, path_of
from jprm.methods.evaluate.benchmarks import BENCHMARKS, registered
from jprm.methods.evaluate.blocks import (
    Block,
    Figure,
    Model,
    Note,
    Table,
    decided,
    interval,
    plain,
    points,
)
from jprm.methods.evaluate.plots import COLOURS, GRID, INK, NOTE, heat_maps, slug

SORTS = {
    "convincing": "most convincing wrong chains first",
    "doubted": "most doubted right chains first",
    "step": "largest distance from a label first",
    "models": "largest distance between models first",
    "file": "in the order of the files",
}

SCRIPTS = ("jprm.apps.web:math.js", "jprm.apps.web:chain.js", "jprm.apps.report:page.js")
KATEX = ("jprm.apps.web:katex/katex.min.js",)
"""270 KB, for pages with formulas. They are MathML, which browsers draw without KaTeX's style and fonts."""

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
    """Writes the page for the folders of `jprm eval suite`, or of `jprm rl`; each figure into `figures` as SVG.

    `more` holds sections of the caller's own by heading, which follow the comparison.

    Raises FileNotFoundError or ValueError where a folder is not finished or the folders are not of one suite.
    """
    check_output(out, *(file for folder in folders for file in _files(path_of(folder))))
    if folders and is_run(folders[0]):
        page, sections, verdicts, first = collect_runs(folders)
    else:
        page = collect(folders)
        sections = list(sections_of(page, more or {}))
        verdicts = [(model.name, list(verdict(model))) for model in page.models]
        leads = [
            (name, " ".join([*against_trivial(model), lead(sentences)]))
            for model, (name, sentences) in zip(page.models, verdicts, strict=True)
            if sentences
        ]
        first = First(leads, tiles(page.models))
    drawn = {block.name: svg(block) for _, _, blocks in sections for block in blocks if isinstance(block, Figure)}
    with atomic_file(out) as file:
        file.write(html(page, sections, drawn, verdicts, first).encode())
    if figures is not None:
        for name, text in drawn.items():
            with atomic_file(path_of(figures) / f"{name}.svg") as file:
                file.write(text.encode())


def _files(folder: Place) -> Iterable[Place]:
    """Returns the files that the page may be made of, which it must not replace."""
    return (file for file in folder.files() if ".json" in file.name)


def html(
    page: Page, sections: Sequence[tuple[str, str, Sequence[Block]]], drawn: Mapping[str, str],
    verdicts: Sequence[tuple[str, Sequence[tuple[str, str]]]] = (), first: First | None = None,
) -> str:  # fmt: skip
    """Returns the page as text, from its sections (id, heading, blocks) and the SVG of its figures by name."""
    several = len(page.models) > 1
    figures = [block for _, _, blocks in sections for block in blocks if isinstance(block, Figure)]
    picture = dataclasses.replace(figures[0], name=f"first-{figures[0].name}") if figures else None
    loader = jinja2.PackageLoader("jprm.apps.report", ".")
    environment = jinja2.Environment(loader=loader, autoescape=True, undefined=jinja2.StrictUndefined)
    return environment.get_template("page.html").render(
        title="jprm: " + ", ".join(model.name for model in page.models),
        models=page.models,
        leads=first.leads if first else [],
        tiles=first.tiles if first else [],
        picture=picture,
        picture_svg=Markup(svg(picture)) if picture else "",
        verdicts=verdicts,
        sections=[(id, head, [(type(block).__name__, block) for block in blocks]) for id, head, blocks in sections],
        svg={name: Markup(text) for name, text in drawn.items()},
        sorts=[(key, said) for key, said in SORTS.items() if several or key != "models"],
        files=[("", "all"), *enumerate(page.chains["files"])],
        names=list(enumerate(page.chains["models"])),
        chains=Markup(embedded(page.chains)),
        css=Markup("".join(text_of_file(file) for file in ("jprm.apps.web:base.css", "jprm.apps.report:page.css"))),
        js=Markup("".join(map(text_of_file, [*(KATEX if has_formulas(page.chains) else ()), *SCRIPTS]))),
    )


def has_formulas(chains: Mapping[str, Any]) -> bool:
    """Returns whether a problem, a step or a critique of the browser's data may have a formula."""
    texts = itertools.chain(
        chains["problems"],
        (text for item in chains["items"] for text in item["t"]),
        (told[3] for item in chains["items"] for of in item.get("j", ()) for told in of),
    )
    return any(FORMULA.search(text) for text in texts)


def embedded(data: Any) -> str:
    """Returns JSON that no text inside can close or comment out: `<` is written as its escape."""
    return json.dumps(data, ensure_ascii=False, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")


def verdict(model: Model) -> Iterator[tuple[str, str]]:
    """Yields (`good`, `bad` or `open`, sentence) for every benchmark in a model's results."""
    for name, benchmark in registered().items():
        if name in model.results:
            yield from benchmark.verdict(model.results)


def against_trivial(model: Model) -> Iterator[str]:
    """Yields sentences on where a model is better, worse and not told apart from the best trivial baselines."""
    found = [
        (decided(less), f"{what}: {points(less)} ({base})")
        for name, benchmark in registered().items()
        if name in model.results
        for what, base, less in benchmark.against_trivial(model.results)
        if less["low"] is not None
    ]
    for kind, said in (("better", "Better than"), ("worse", "Worse than"), ("undecided", "Not told apart from")):
        if some := [text for of_kind, text in found if of_kind == kind]:
            yield f"{said} the best trivial baseline in {'; '.join(some)}."


def lead(sentences: Sequence[tuple[str, str]]) -> str:
    """Returns one sentence on a verdict's sentences: how many are of each kind."""
    count = collections.Counter(kind for kind, _ in sentences)
    names = {"good": ("strength", "strengths"), "bad": ("fault", "faults"), "open": ("undecided", "undecided")}
    parts = [f"{count[kind]} {some[count[kind] > 1]}" for kind, some in names.items() if count[kind]]
    return f"{len(sentences)} finding{'s'[: len(sentences) > 1]}: {', '.join(parts)}."


def tiles(models: Sequence[Model]) -> list[tuple[str, list[tuple[str, str, str]]]]:
    """Returns what the first screen's four figures are, and (model, value, interval) of each."""
    figures: dict[str, list[tuple[str, str, str]]] = {}
    for model in models:
        for name, benchmark in registered().items():
            for what, figure in benchmark.headline(model.results) if name in model.results else ():
                value, _, inside = interval(figure).partition(" ")
                figures.setdefault(what, []).append((model.name, value, inside))
    return list(figures.items())[:4]


def sections_of(page: Page, more: More) -> Iterator[tuple[str, str, list[Block]]]:
    """Yields (id, heading, blocks) of every section that has something to show."""
    benchmarks = {name: x for name, x in registered().items() if name in page.models[0].results}
    sections: list[tuple[str, str, Iterable[Block]]] = [("compare", "Comparison of models", _comparison(page))]
    sections += [(f"more-{i}", heading, blocks) for i, (heading, blocks) in enumerate(more.items())]
    for name, benchmark in benchmarks.items():
        blocks = benchmark.section(page.models) if benchmark.section else _plain(page.models, name)
        sections.append((name.replace("_", "-"), benchmark.title, blocks))
    sections += [(slug(name), str(other["title"]), _plain(page.models, name)) for name, other in _others(page).items()]
    sections += [("heat", "Scores by step", _heat(page)), ("training", "Training", _training(page.models))]
    sections += [("left-out", "What was left out", _left_out(page))]
    for name, heading, blocks in sections:
        if blocks := list(blocks):
            yield name, heading, blocks


def _others(page: Page) -> dict[str, Any]:
    """Returns the user's own benchmarks that are not registered here, as the results name them.

    A results file may come from elsewhere, so the code that it names is not run.
    """
    others = page.models[0].results.get("others", {})
    return {name: other for name, other in others.items() if name not in BENCHMARKS}


def _plain(models: Sequence[Model], name: str) -> Iterator[Block]:
    """Yields every figure of a benchmark that draws none, or whose code is not at hand."""
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


def _training(models: Sequence[Model]) -> Iterator[Block]:
    return training([(model.name, model.results["model"]["folder"]) for model in models])


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
"""The CSS variable of each colour; the page sets lighter ones on a dark background."""


def svg(figure: Figure) -> str:
    """Draws a figure. The same figure gives the same text; its ids begin with its name."""
    with matplotlib.rc_context({**STYLE, "svg.hashsalt": figure.name}):
        canvas = Canvas(figsize=figure.size, facecolor="none")
        figure.draw(canvas)
        for axes in canvas.axes:
            axes.set_facecolor("none")
        file = io.StringIO()
        nothing = dict.fromkeys(("Creator", "Date", "Format", "Type"))
        canvas.savefig(file, format="svg", bbox_inches="tight", metadata=nothing)
    root = ElementTree.fromstring(file.getvalue())
    _reference(root, figure.name)
    width, height = (float(x) for x in root.get("viewBox", "").split()[2:])
    for key in ("width", "height", "version"):
        root.attrib.pop(key, None)
    root.attrib |= {
        "class": "plot",
        "role": "img",
        "aria-labelledby": f"{figure.name}-title {figure.name}-text",
        # Text of 10 points is that of the page; a phone scrolls what is wide.
        "style": f"max-width:{1.35 * width:.0f}px;min-width:{0 if width < 420 else 520}px;"
        f"aspect-ratio:{width:g}/{height:g};stroke-linejoin:round;stroke-linecap:butt",
    }
    for style in root.findall(f"{{{SVG}}}defs/{{{SVG}}}style"):  # its selector is `*`: of the whole page
        style.text = ""
    title, description = (
        ElementTree.Element(f"{{{SVG}}}{tag}", id=f"{figure.name}-{end}")
        for tag, end in (("title", "title"), ("desc", "text"))
    )
    title.text, description.text = figure.title, figure.description
    root[:0] = [title, description]
    return ElementTree.tostring(root, encoding="unicode") + "\n"


def _reference(root: ElementTree.Element, name: str) -> None:
    """Makes ids the figure's own, colours variables, and ids that begin with `NOTE` notes of their elements."""
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
