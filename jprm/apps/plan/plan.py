"""A plan: what one device of a slice would hold, compute and send in a step, and how fast the step can be at most."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable
from typing import Any

import jax

from jprm.apps.plan import collectives, compile, counts, hlo, roofline
from jprm.apps.plan.topologies import Topology, devices
from jprm.experiment import Experiment
from jprm.model import chunked_mlp
from jprm.model.attention import find
from jprm.model.mesh import check_mesh, make_mesh
from jprm.model.transformer import AXES


def plan(
    experiment: Experiment,
    topology: Topology,
    *,
    scoring: bool = False,
    epoch_tokens: float | None = None,
    epoch_labels: float | None = None,
    say: Callable[[str], None] = lambda line: None,
) -> dict[str, Any]:
    """Compiles the experiment's training step, or with `scoring` its scoring step, and measures the program.

    Returns plain JSON values; bytes and FLOPs are of one device and one step. `program`, `bounds` and `epoch` are None
    where the program does not fit, and `epoch` where `epoch_tokens` is None. `say` receives progress messages.

    Raises ValueError where the mesh does not divide the model or the rows, or attention is for other machines, and
    FileNotFoundError without the devices' compiler.
    """
    start, model, data = time.monotonic(), experiment.model, experiment.data
    model.check_attention(backend=topology.chip.backend)
    if find(model.attention).chain_rows:
        raise ValueError(f"attention={model.attention!r} is compiled on a GPU alone; plan with 'gpu_kernel'")
    mesh = make_mesh(experiment.mesh, devices(topology))
    rows = mesh.shape["data"] * mesh.shape["fsdp"] if scoring else data.rows
    micro_rows = rows if scoring else data.micro_rows
    check_mesh(model, mesh, micro_rows, data.tokens)
    say(f"tracing {experiment.name} for {topology.devices} devices")
    made = compile.scoring(experiment, mesh) if scoring else compile.training(experiment, mesh, topology.chip.backend)
    function, args = made
    params, trained = (args[0], ()) if scoring else (args[0].params, tuple(args[0].trained))
    say("compiling; a large model takes minutes")
    memory, text = compile.compiled(function, args, mesh, topology.chip.allotted)
    slots = data.tokens // 2 if scoring else data.slots
    needed = roofline.model_flops(model, trained, rows, data.tokens, slots)
    result: dict[str, Any] = {
        "experiment": experiment.name,
        "step": "scoring" if scoring else "training",
        "topology": topology.name,
        "slices": topology.slices,
        "chips": topology.chips,
        "devices": topology.devices,
        "mesh": dict(mesh.shape),
        "parameters": sum(x.size for x in jax.tree.leaves(params)),
        "rows": rows,
        "micro_rows": micro_rows,
        "tokens": data.tokens,
        "remat": model.remat,
        "attention": model.attention,
        "memory": dataclasses.asdict(memory) | {"fits": memory.fits},
        "model_flops": needed / topology.devices,
        "program": None,
        "bounds": None,
        "epoch": None,
    }
    if text is not None:
        say("reading the compiled program")
        at_once = micro_rows // (mesh.shape["data"] * mesh.shape["fsdp"])  # rows of a device
        kernels = find(model.attention).flops(model, at_once, data.tokens, mesh.shape["tensor"], mesh.shape["context"])
        program = counts.count(hlo.parse(text), layer_sizes(params, mesh), kernels, node(topology))
        result |= _measured(program, topology, needed, rows * data.tokens, epoch_tokens, epoch_labels)
    return result | {"seconds_to_plan": time.monotonic() - start}


def _measured(
    program: counts.Program, topology: Topology, needed: float, tokens: int, epoch_tokens: float | None,
    epoch_labels: float | None,
) -> dict[str, Any]:  # fmt: skip
    """Returns the fields `program`, `bounds` and `epoch` of a plan; `needed`: the model's FLOPs for a step."""
    bound = roofline.bounds(program, topology.chip)
    per_second = tokens / bound.step
    hours = (epoch_tokens or 0) / per_second / 3600
    return {
        "program": {
            "flops": program.flops,
            "flops_over_model": program.flops * topology.devices / needed,
            "hbm_bytes": program.bytes,
            "collectives": collectives.totals(program.collectives),
            "others_in_layers": sorted({c.name for c in program.collectives if c.in_layers and c.moves == "other"}),
            "uncounted_kernels": list(program.uncounted),
        },
        "bounds": dataclasses.asdict(bound)
        | {
            "step": bound.step,
            "by": bound.by,
            "tokens_per_second": per_second,
            "mfu": needed / topology.chips / topology.chip.flops / bound.step,
        },
        "epoch": {
            "tokens": epoch_tokens,
            "labels_per_second": epoch_labels and per_second * epoch_labels / epoch_tokens,
            "hours": hours,
            "chip_hours": hours * topology.chips,
        }
        if epoch_tokens
        else None,
    }


def node(topology: Topology) -> int:
    """Returns the GPUs of a node where there are several nodes; 0 for one, and for TPUs."""
    return topology.chips // topology.slices if topology.chip.backend == "gpu" and topology.slices > 1 else 0


def layer_sizes(params: dict, mesh: jax.sharding.Mesh) -> set[int]:
    """Returns the sizes of one layer's parameters, and of the MLP's chunks, as gathered on one device."""
    sizes = set()
    for name, group in params["decoder"].items():
        for role, x in group.items() if name.startswith("layers_") else ():
            split = math.prod(mesh.shape["tensor"] for axis in x.sharding.spec if axis == "tensor")
            sizes.add(x.size // x.shape[0] // split)
            if "mlp" in AXES.get(role, ()):
                sizes.add(x.size // x.shape[0] // split // chunked_mlp.count(x.shape[AXES[role].index("mlp")] // split))
    return sizes
