"""The page of runs of `jprm rl`: correct answers beside the PRM's score, drift, lengths, and what the policy learnt."""

from __future__ import annotations

import functools
import itertools
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jprm
from jprm.apps.report.collect import Page
from jprm.apps.report.training import training
from jprm.io.jsonl import parse
from jprm.io.outputs import check_version
from jprm.io.storage import path_of
from jprm.methods.evaluate.blocks import ABSENT, Block, Figure, Model, Note, Table, interval, percent
from jprm.methods.evaluate.plots import COLOURS, slug
from jprm.methods.rl import RESULT

VERSION = 1
"""The newest version of rl.json that is read."""


def is_run(folder: str | os.PathLike) -> bool:
    """Returns whether `jprm rl` wrote the folder."""
    return (path_of(folder) / RESULT).is_file()


def collect_runs(folders: Sequence[str | os.PathLike]) -> tuple[Page, list, list, First]:
    """Returns the page, its sections, its verdicts and the first screen's words and figures.

    Raises ValueError for a folder that `jprm rl` did not write.
    """
    models, sections, verdicts, runs, results = [], [], [], [], []
    chains: dict[str, Any] = {"models": ["PRM"], "files": [], "problems": [], "items": []}
    for index, folder in enumerate(folders):
        if not is_run(folder):
            raise ValueError(f"{folder}: holds no {RESULT}; a page shows runs of jprm rl, or suites, not both")
        result = parse((path_of(folder) / RESULT).read_bytes(), f"{folder}/{RESULT}")
        check_version(result.get("version"), VERSION, f"{folder}/{RESULT}")
        name = f"{result['name']} ({path_of(folder).name})"
        about = {"step": result["update"], "folder": str(folder), "semantics": "its own samples"}
        models.append(Model(name, {"model": about, "jprm": jprm.__version__}))
        sections.append((f"run-{index}", name, list(blocks(name, result))))
        runs.append((name, folder))
        results.append((path_of(folder).name, result))
        verdicts.append((name, [(kind(sentence), sentence) for sentence in result["verdict"]]))
        _add_chains(chains, name, result)
    if len(results) > 1:
        sections.insert(0, ("runs", "Runs", [_together(results)]))
    if figures := list(training(runs)):
        sections.append(("training", "Training", figures))
    leads = [(name, _lead(sentences)) for name, sentences in verdicts]
    return Page(models, [], chains, []), sections, verdicts, First(leads, _tiles(results))


def _lead(sentences: list[tuple[str, str]]) -> str:
    """Returns the first bad verdict, else the first of all."""
    return next((sentence for mark, sentence in sentences if mark == "bad"), sentences[0][1])


class First(NamedTuple):
    """What the first screen says: a sentence for each run, and figures, each with (run, value, interval)."""

    leads: list[tuple[str, str]]
    tiles: list[tuple[str, list[tuple[str, str, str]]]]


def kind(sentence: str) -> str:
    """Returns how a sentence of the verdict is marked: `good`, `bad`, `open`, or `fact` where nothing was to decide."""
    if sentence.startswith("A guard ended the run"):
        return "bad"
    if not sentence.startswith("Correct answers"):
        return "fact"
    return {"better.": "good", "worse.": "bad"}.get(sentence.rpartition(", ")[2], "open")


def _tiles(results: Sequence[tuple[str, dict[str, Any]]]) -> list[tuple[str, list[tuple[str, str, str]]]]:
    """Returns correct answers at the start, of the kept policy and at the end, and the PRM's score at the end."""
    figures: dict[str, list[tuple[str, str, str]]] = {}
    for name, of in results:
        rows = of["evaluations"]
        kept = (of.get("fresh") or rows[of["best"]]) if of["ended"] else rows[-1]
        for what, row in (("right at the start, %", rows[0]), ("right at the end, %", rows[-1]), ("kept, %", kept)):
            right = {"value": row["gold"], "low": row["gold_low"], "high": row["gold_high"]}
            value, _, inside = interval(right).partition(" ")
            figures.setdefault(what, []).append((name, value, inside))
        if "proxy" in rows[0]:
            score = (name, f"{rows[-1]['proxy']:.2f}", f"from {rows[0]['proxy']:.2f}")
            figures.setdefault("PRM's lowest score", []).append(score)
    return list(figures.items())


def _together(results: Sequence[tuple[str, dict[str, Any]]]) -> Figure:
    """Returns a plot of all runs: right answers, and the PRM's lowest score dashed."""

    lines = []
    for (name, of), colour in zip(results, itertools.cycle(COLOURS)):
        rows = of["evaluations"]
        x = [row["update"] for row in rows]
        lines.append(Line(f"{name}: right answers, %", x, [100 * row["gold"] for row in rows], colour))
        if "proxy" in rows[0]:
            score = [100 * row["proxy"] for row in rows]
            lines.append(Line(f"{name}: PRM's lowest score x 100", x, score, colour, "--"))
    title = "Right answers and the PRM's score, by run"
    return Figure(
        name="runs-together", title=title, description=f"{title}, at every evaluation.", caption=title,
        note="Where a run's dashed line rises and its solid one falls, the policy has learnt what the PRM overrates.",
        draw=functools.partial(_draw, lines=lines, x_label="update"),
    )  # fmt: skip


def blocks(name: str, result: dict[str, Any]) -> Iterator[Block]:
    """Yields a run's table and figures."""
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


class Line(NamedTuple):
    """A named curve over the evaluations."""

    label: str
    x: Sequence[float]
    values: Sequence[float]
    colour: str = COLOURS[0]
    style: str = "-"


def _draw(figure: Any, lines: Sequence[Line], x_label: str) -> None:
    axes = figure.subplots()
    for line in lines:
        axes.plot(line.x, line.values, line.style, color=line.colour, marker="o", markersize=3, label=line.label)
    axes.set_xlabel(x_label)
    if x_label == "update":
        axes.xaxis.get_major_locator().set_params(integer=True)
    axes.set_ylim(bottom=0)
    axes.grid(axis="y")
    axes.legend(loc="upper left", bbox_to_anchor=(0, -0.2), frameon=False)


def _figure(
    name: str, what: str, title: str, rows: Sequence[dict], values: Mapping[str, Sequence[float]], by_kl: bool = False
) -> Figure:
    """Returns a plot of one run's figures, by name, over its updates or its distance from the start."""
    x = [row["kl"] or 0.0 for row in rows] if by_kl else [row["update"] for row in rows]
    lines = [Line(label, x, y, colour) for (label, y), colour in zip(values.items(), COLOURS, strict=False)]
    return Figure(
        name=f"{what}-{slug(name)}", title=title, description=f"{title} at the evaluations of {name}.", caption=title,
        note="A point is an evaluation on the held-out problems, with the same random numbers each time.",
        draw=functools.partial(_draw, lines=lines, x_label="KL from the start, nats a token" if by_kl else "update"),
    )  # fmt: skip


def _add_chains(chains: dict[str, Any], name: str, result: dict[str, Any]) -> None:
    """Adds the examples of the first evaluation, the best and the last to the browser's data."""
    rows = result["evaluations"]
    for at in sorted({0, result["best"], len(rows) - 1}):
        chains["files"].append(f"{name}, update {rows[at]['update']}")
        for example in rows[at]["examples"]:
            if not example["steps"]:
                continue
            if example["problem"] not in chains["problems"]:
                chains["problems"].append(example["problem"])
            count = len(example["steps"])
            chains["items"].append({
                "f": len(chains["files"]) - 1, "p": chains["problems"].index(example["problem"]),
                "t": example["steps"], "l": [None] * count, "c": [example["scores"] or [0.5] * count], "o": False,
            })  # fmt: skip


def _number(value: float | None) -> str:
    return ABSENT if value is None else f"{value:.3f}"
