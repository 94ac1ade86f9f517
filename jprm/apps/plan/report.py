"""Prints a plan, or a search's plans, as tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from jprm.apps.plan.topologies import GIB
from jprm.model.mesh import MESH_AXES


def show(plan: Mapping[str, Any], console: Console) -> None:
    """Prints the tables of one plan."""
    mesh = " ".join(f"{axis}={size}" for axis, size in plan["mesh"].items())
    slices = f"{plan['slices']} x " if plan["slices"] > 1 else ""
    half = "" if plan["devices"] == plan["chips"] else f" ({plan['devices']} devices: figures are of half a chip)"
    console.print(
        f"{plan['experiment']}, {plan['step']}: {plan['parameters'] / 1e9:.2f} B parameters on"
        f" {slices}{plan['topology']}, {plan['chips']} chips{half}; mesh {mesh}; {plan['rows']} rows of"
        f" {plan['tokens']:,} tokens, {plan['micro_rows']} at a time; remat {plan['remat']}; attention"
        f" {plan['attention']}"
    )
    memory = plan["memory"]
    table = Table("memory a device", "GiB", title=verdict(memory), title_justify="left")
    shown = {"arguments": "arguments", "temporaries": "temporaries", "total": "at once", "available": "available"}
    for name, label in shown.items():
        if memory[name] is not None:
            table.add_row(label, f"{memory[name] / GIB:.2f}")
    console.print(table)
    if plan["program"] is None:
        return
    program, bounds = plan["program"], plan["bounds"]

    table = Table("a step, a device", "", "at least", title="work", title_justify="left")
    table.add_row("model FLOPs", f"{plan['model_flops']:.4g}", "")
    ratio = f"{program['flops']:.4g} ({program['flops_over_model']:.2f} of the model's)"
    table.add_row("compiled FLOPs", ratio, seconds(bounds["compute"]))
    table.add_row("HBM bytes", f"{program['hbm_bytes']:.4g}", seconds(bounds["hbm"]))
    for name, between_slices in (("interconnect", False), ("network", True))[: 1 + (plan["slices"] > 1)]:
        received = sum(row["received"] for row in program["collectives"] if row["network"] == between_slices)
        least = seconds(bounds[name]) if bounds[name] or not received else "no published rate"
        table.add_row(f"{name} bytes", f"{received:.4g}", least)
    console.print(table)

    if program["collectives"]:
        table = Table("collective", "of", "where", "times", "GB", title="collectives", title_justify="left")
        for row in program["collectives"]:
            where = "layer loop" if row["in_layers"] else "outside it"
            kind = row["kind"] + " between slices" * row["network"]
            table.add_row(kind, row["moves"], where, f"{row['count']:,.0f}", f"{row['bytes'] / 1e9:.3f}")
        console.print(table)
    for name in program["others_in_layers"]:
        console.print(f"in the layer loop, not known to be of weights or of gradients: {name}")
    for name in program["uncounted_kernels"]:
        console.print(f"a kernel without a cost estimate, whose FLOPs are not counted: {name}")

    console.print(
        f"bound: at most {bounds['tokens_per_second']:,.0f} tokens/s, MFU {bounds['mfu']:.1%}, by {bounds['by']}; a"
        f" step takes {seconds(bounds['step'])} or more"
    )
    if plan["epoch"]:
        epoch = plan["epoch"]
        labels = f", {epoch['labels_per_second']:,.0f} labels/s at most" if epoch["labels_per_second"] else ""
        console.print(
            f"epoch of {epoch['tokens']:,.0f} tokens: at least {epoch['hours']:.3g} hours,"
            f" {epoch['chip_hours']:.3g} chip-hours{labels}"
        )
    console.print(f"planned in {plan['seconds_to_plan']:.0f} s")


def show_search(plans: Sequence[Mapping[str, Any]], best: Mapping[str, Any] | None, console: Console) -> None:
    """Prints one line per candidate, within 80 columns."""
    table = Table(
        "", " x ".join(MESH_AXES), "remat", "rows", "GiB", "tokens/s", "MFU", "bound by", box=None, padding=(0, 1)
    )
    for plan in plans:
        memory, bounds = plan["memory"], plan["bounds"]
        cells = ["best" if plan is best else "", " x ".join(str(size) for size in plan["mesh"].values())]
        cells += [plan["remat"], str(plan["micro_rows"]), f"{memory['total'] / GIB:.2f}"]
        if bounds:
            table.add_row(*cells, f"{bounds['tokens_per_second']:,.0f}", f"{bounds['mfu']:.1%}", bounds["by"])
        else:
            table.add_row(*cells, "", "", "does not fit")
    console.print(table)
    if best is None:
        console.print("none of them fits: use a larger slice, shorter rows or fewer slots")


def verdict(memory: Mapping[str, Any]) -> str:
    spare = (memory["available"] - memory["total"]) / GIB
    return f"fits, {spare:.2f} GiB to spare" if memory["fits"] else f"does not fit: {-spare:.2f} GiB too much"


def seconds(value: float) -> str:
    return f"{value:.2f} s" if value >= 1 else f"{value * 1e3:.3g} ms"
