"""Mesh shapes, remat policies and rows at a time: tried one after another, each with the best of those before it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

from jprm.experiment import Experiment
from jprm.model.mesh import MESH_AXES, MeshConfig
from jprm.model.transformer import REMAT
from jprm.plan.plan import plan
from jprm.plan.topologies import Topology


def search(experiment: Experiment, topology: Topology, **options: Any) -> tuple[list[dict], dict | None]:
    """The plans that were made, and the one of most tokens a second that fits; None where none does.

    Compiling takes minutes, so not every combination is tried: first the meshes, then remat with the best of them, then
    the rows that are computed at once. Where nothing fits yet, the candidate that is nearest to it goes on.

    Raises ValueError where no mesh divides the model and the rows.
    """
    tried: dict[Experiment, dict] = {}
    best = experiment
    for candidates in (meshes,) if options.get("scoring") else (meshes, remats, micro_rows):
        for candidate in candidates(best, topology):
            if candidate not in tried:
                tried[candidate] = _planned(candidate, topology, options)
        if not tried:
            raise ValueError(
                f"no mesh of {topology.devices} devices divides data.rows={experiment.data.rows} and the model's width"
                f" {experiment.model.width}: make data.rows a multiple of the devices"
            )
        best = max(tried, key=lambda candidate: merit(tried[candidate]))
    plans = list(tried.values())
    fitting = [found for found in plans if found["bounds"]]
    return plans, max(fitting, key=merit, default=None)


def _planned(candidate: Experiment, topology: Topology, options: dict[str, Any]) -> dict:
    say: Callable[[str], None] = options.get("say", lambda line: None)
    mesh, data = candidate.mesh, candidate.data
    sizes = " x ".join(str(getattr(mesh, axis)) for axis in MESH_AXES)
    name = f"mesh {sizes}, remat {candidate.model.remat}, {data.micro_rows} rows"
    return plan(candidate, topology, **{**options, "say": lambda line: say(f"{name}: {line}")})


def merit(found: dict) -> tuple[bool, float]:
    """Larger is better: what fits before what does not, then tokens a second, or the memory that is missing."""
    if found["bounds"]:
        return True, found["bounds"]["tokens_per_second"]
    return False, found["memory"]["available"] - found["memory"]["total"]


def meshes(experiment: Experiment, topology: Topology) -> Iterator[Experiment]:
    """Those that divide the model and its rows, with a row at a time for each part of the batch.

    tensor: up to 8; data: a replica of the weights a slice, or two; context: as the experiment has it.
    """
    model, data, context = experiment.model, experiment.data, experiment.mesh.context
    for tensor in (1, 2, 4, 8):
        for replicas in (topology.slices, 2 * topology.slices):
            fsdp, left = divmod(topology.devices, tensor * replicas * context)
            whole = not left and fsdp and not data.rows % (fsdp * replicas) and not model.width % (fsdp * context)
            if whole and not any(size % tensor for size in (model.kv_heads, model.mlp_width, model.vocab_size)):
                changed = dataclasses.replace(data, micro_rows=fsdp * replicas)
                yield dataclasses.replace(experiment, mesh=MeshConfig(replicas, fsdp, tensor, context), data=changed)


def remats(experiment: Experiment, topology: Topology) -> Iterator[Experiment]:
    del topology
    for remat in REMAT:
        yield dataclasses.replace(experiment, model=dataclasses.replace(experiment.model, remat=remat))


def micro_rows(experiment: Experiment, topology: Topology) -> Iterator[Experiment]:
    """From a row a device to all rows at once, by factors of two; rows of an update stay."""
    del topology
    rows = experiment.mesh.data * experiment.mesh.fsdp  # the mesh is one of `meshes`, all of whose sizes are said
    while rows <= experiment.data.rows:
        if experiment.data.rows % rows == 0:
            yield dataclasses.replace(experiment, data=dataclasses.replace(experiment.data, micro_rows=rows))
        rows *= 2
