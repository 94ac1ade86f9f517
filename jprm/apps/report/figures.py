"""Plots as SVG text that a page embeds or a file holds: titled, described, and coloured by CSS variables."""

from __future__ import annotations

import io
import re
import xml.etree.ElementTree as ElementTree
from typing import Any

import matplotlib
from matplotlib.figure import Figure as Canvas

from jprm.evaluate.blocks import Figure
from jprm.evaluate.plots import COLOURS, GRID, INK, NOTE

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
