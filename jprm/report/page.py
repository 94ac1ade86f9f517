"""`jprm report`: one HTML page that needs nothing else: no network, no server, no fonts.

What comes from data is escaped here or put in with `textContent` there; the policy in the head forbids the browser any
request at all.
"""

from __future__ import annotations

import json
import os
import pathlib
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from importlib import resources
from typing import Any

from jprm.outputs import atomic_file
from jprm.report import sections, svg
from jprm.report.collect import collect
from jprm.report.verdict import sentences

POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:"
VERDICTS = {"good": "yes", "bad": "no", "open": "open"}

SORTS = {
    "convincing": "most convincing wrong chains first",
    "doubted": "most doubted right chains first",
    "step": "largest distance from a label first",
    "models": "largest distance between models first",
    "file": "in the order of the files",
}


def report(
    folders: Sequence[str | os.PathLike],
    out: str | os.PathLike,
    figures: str | os.PathLike | None = None,
    more: Mapping[str, str] | None = None,
) -> None:
    """Writes the page for the folders of `jprm eval suite`, and with `figures` each figure as an SVG file.

    `more` are sections of the caller's own, behind the comparison: HTML by heading, all text in it escaped.

    Raises FileNotFoundError or ValueError where a folder is not finished or the folders are not of one suite.
    """
    page = collect(folders)
    drawn = dict(sections.figures(page))
    with atomic_file(out) as file:
        file.write(html(page, drawn, more or {}).encode())
    if figures is not None:
        folder = pathlib.Path(figures)
        folder.mkdir(parents=True, exist_ok=True)
        for name, (_, figure) in drawn.items():
            with atomic_file(folder / f"{name}.svg") as file:
                file.write(svg.standalone(figure).encode())


def html(page: Mapping[str, Any], drawn: Mapping[str, tuple[str, str]], more: Mapping[str, str]) -> str:
    """The page as text. `drawn`: name -> (how to read it, SVG); `more`: heading -> HTML of a section."""
    title = "jprm: " + ", ".join(model["name"] for model in page["models"])
    parts = [
        f'<section id="{name}" aria-labelledby="{name}-head"><h2 id="{name}-head">{escape(head)}</h2>{body}</section>'
        for name, head, body in _sections(page, drawn, more)
        if body
    ]
    links = "".join(
        f'<a href="#{name}">{escape(head)}</a>' for name, head, body in _sections(page, drawn, more) if body
    )
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">'
        '<meta name="viewport" content="width=device-width,initial-scale=1"><link rel="icon" href="data:,">'
        f"<title>{escape(title)}</title><style>{svg.STYLE}{_file('page.css')}</style></head><body>"
        '<a class="skip" href="#chain-browser">To the chains</a>'
        f"<header><h1>{escape(title)}</h1>{_about(page)}<nav>{links}</nav></header><main>{''.join(parts)}</main>"
        f"<footer>Made by jprm {escape(page['models'][0]['results']['jprm'])}. Brackets are 95 % intervals over"
        " problems.</footer>"
        f'<script type="application/json" id="chains">{embedded(page["chains"])}</script>'
        f"<script>{_file('page.js')}</script></body></html>\n"
    )


def embedded(data: Any) -> str:
    """JSON that no text inside can close or comment out: `<` stands as its escape."""
    return json.dumps(data, ensure_ascii=False, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")


def _sections(page, drawn, more) -> Iterator[tuple[str, str, str]]:
    yield "verdict", "Verdict", _verdict(page)
    yield "compare", "Comparison of models", sections.comparison(page)
    for i, (heading, body) in enumerate(more.items()):
        yield f"more-{i}", heading, body
    yield "best-of-n", "Best of n", sections.best_of_n(page, drawn)
    yield "processbench", "ProcessBench", sections.processbench(page)
    yield "steps", "Step labels", sections.steps(page)
    yield "prmbench", "PRMBench", sections.prmbench(page)
    yield "calibration", "Calibration", sections.calibration(page, drawn)
    yield "heat", "Scores by step", sections.heat(page, drawn)
    yield "diagnostics", "Diagnostics", sections.diagnostics(page)
    yield "left-out", "What was left out", sections.left_out(page)
    yield "chain-browser", "Chains", _browser(page)


def _about(page) -> str:
    lines = []
    for model in page["models"]:
        of = model["results"]["model"]
        lines.append(f"{model['name']}: step {of['step']} of {of['folder']}, trained on {of['semantics']}")
    return "".join(f'<p class="soft">{escape(line)}</p>' for line in lines)


def _verdict(page) -> str:
    parts = []
    for model in page["models"]:
        if len(page["models"]) > 1:
            parts.append(f"<h3>{escape(model['name'])}</h3>")
        items = (
            f'<li class="{kind}"><b>{VERDICTS[kind]}</b> {escape(said)}</li>'
            for kind, said in sentences(model["results"])
        )
        parts.append(f'<ul class="verdict">{"".join(items)}</ul>')
    return (
        '<p class="soft">“yes”: the data show the good; “no”: they show a fault or no use; “open”: they do not'
        " decide.</p>" + "".join(parts)
    )


def _browser(page) -> str:
    chains, several = page["chains"], len(page["models"]) > 1

    def select(name, label, options, wide=False):
        chosen = "".join(f'<option value="{escape(str(k))}">{escape(v)}</option>' for k, v in options.items())
        kind = ' class="wide"' if wide else ""
        return f'<label{kind}>{label}<select id="{name}">{chosen}</select></label>'

    sorts = {key: words for key, words in SORTS.items() if several or key != "models"}
    models = select("model", "Model", dict(enumerate(chains["models"])))
    return (
        '<p class="soft">Each step has its score and its label. The colour is the score: blue is high, orange low,'
        " pale near one half. An error that scores high is what a chooser falls for.</p>"
        '<p class="keys"><kbd>/</kbd> search, <kbd>Esc</kbd> clear, <kbd>n</kbd> <kbd>p</kbd> next and previous page,'
        " <kbd>j</kbd> <kbd>k</kbd> next and previous chain</p>"
        '<div class="controls" role="search"><label class="wide">Search in problems and steps'
        '<input id="search" type="search" autocomplete="off" spellcheck="false"></label>'
        + select("sort", "Order", sorts, wide=True)
        + select("kind", "Show", {"": "all", "wrong": "wrong chains", "right": "right chains"})
        + select("file", "File", {"": "all"} | dict(enumerate(chains["files"])))
        + (models if several else models.replace("<label", "<label hidden", 1))
        + '</div><div class="pager"><button id="first" type="button">First</button>'
        '<button id="back" type="button">Back</button><button id="next" type="button">Next</button>'
        '<button id="last" type="button">Last</button><span id="where" aria-live="polite"></span></div>'
        '<div id="list"></div><noscript>The chains need JavaScript; all else does not.</noscript>'
    )


def _file(name: str) -> str:
    return resources.files("jprm.report").joinpath(name).read_text(encoding="utf-8")
