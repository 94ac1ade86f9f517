"""Search over mesh shapes, then remat policies, then rows at a time, each with the best of what was found before."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

from jprm.apps.plan.plan import plan
from jprm.apps.plan.topologies import Topology
from jprm.experiment import Experiment
from jprm.model.mesh import MESH_AXES, MeshConfig
from jprm.model.transformer import REMAT


def search(experiment: Experiment, topology: Topology, **options: Any) -> tuple[list[dict], dict | None]:
    """Returns all plans, and the fitting one with the most tokens a second, or None.

    Compiling takes minutes, so not every combination is tried. Where nothing fits yet, the search continues with the
    candidate that lacks the least memory.

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
    """Returns a key, larger for better plans: fitting ones first, then by tokens a second or by missing memory."""
    if found["bounds"]:
        return True, found["bounds"]["tokens_per_second"]
    return False, found["memory"]["available"] - found["memory"]["total"]


def meshes(experiment: Experiment, topology: Topology) -> Iterator[Experiment]:
    """Yields meshes that divide the model and its rows, with one row at a time for each part of the batch.

    tensor: up to 8; data: one or two replicas of the weights per slice; context: the experiment's own.
    """
    model, data, context = experiment.model, experiment.data, experiment.mesh.context
    for tensor in (1, 2, 4, 8):
        for replicas in (topology.slices, 2 * topology.slices):
            fsdp, left = divmod(topology.devices, tensor * replicas * context)
            divides = not left and fsdp and not data.rows % (fsdp * replicas) and not model.width % (fsdp * context)
            if divides and not any(size % tensor for size in (model.kv_heads, model.mlp_width, model.vocab_size)):
                changed = dataclasses.replace(data, micro_rows=fsdp * replicas)
                yield dataclasses.replace(experiment, mesh=MeshConfig(replicas, fsdp, tensor, context), data=changed)


def remats(experiment: Experiment, topology: Topology) -> Iterator[Experiment]:
    del topology
    for remat in REMAT:
        yield dataclasses.replace(experiment, model=dataclasses.replace(experiment.model, remat=remat))


def micro_rows(experiment: Experiment, topology: Topology) -> Iterator[Experiment]:
    """Yields micro-batches from one row a device to all rows of an update, by factors of two."""
    del topology
    rows = experiment.mesh.data * experiment.mesh.fsdp  # a mesh of `meshes` has no -1
    while rows <= experiment.data.rows:
        if experiment.data.rows % rows == 0:
            yield dataclasses.replace(experiment, data=dataclasses.replace(experiment.data, micro_rows=rows))
        rows *= 2
