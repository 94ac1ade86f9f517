"""Plans a step: memory, computation and communication per device of a slice, and its minimum time."""

from __future__ import annotations

import dataclasses
import math
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jprm import objectives
from jprm.apps.plan import counts, hlo
from jprm.apps.plan.topologies import GIB, Topology, devices
from jprm.experiment import Experiment
from jprm.methods.evaluate.blocks import Table
from jprm.model import layers
from jprm.model.heads import find as find_head
from jprm.model.mesh import MESH_AXES, MeshConfig, abstract_rows, check_mesh, make_mesh, row_parts
from jprm.model.parameters import merge, widened
from jprm.model.transformer import REMAT, axes_of, check_model, chunk_count
from jprm.score.scorer import readout_of_rows
from jprm.train.state import State, initial_state, make_optimizer, make_step, reference_params


def plan(
    experiment: Experiment,
    topology: Topology,
    *,
    scoring: bool = False,
    say: Callable[[str], None] = lambda line: None,
) -> dict[str, Any]:
    """Compiles the experiment's training step (or its scoring step, with `scoring`) and measures the program.

    Returns JSON values; bytes and FLOPs are per device and step:

    - `experiment`, `step` ("training" or "scoring"), `topology`, `slices`, `chips`, `devices`, `mesh` (axis to size),
      `parameters` (their number), `rows` and `micro_rows` (of all devices), `tokens` (per row), `remat`, `attention`,
      `seconds_to_plan`.
    - `memory`: the fields of `Memory`, and `fits`. `model_flops`.
    - `program` and `bounds`: as `measured` returns them, with `program.flops_over_model`, `bounds.tokens_per_second`
      (of all chips) and `bounds.mfu` (a fraction of bfloat16 peak); null if the program does not fit.
    - `input`: `hosts`, `packers` and `tokens_per_second` for each packing host; null for scoring, or if it does not
      fit.

    No weights or data are read. Compiling blocks, for minutes if the model is large. `say` receives progress messages.

    Raises ValueError if the mesh does not divide the model or rows, or attention does not support the chips;
    FileNotFoundError if the devices' compiler is missing; RuntimeError if the compiler fails.
    """
    start, model, data = time.monotonic(), experiment.model, experiment.data
    mesh = make_mesh(experiment.mesh, devices(topology))
    check_model(model, topology.chip.backend, mesh.shape["context"])
    rows = row_parts(mesh) if scoring else data.rows
    micro_rows = rows if scoring else data.micro_rows
    check_mesh(model, mesh, micro_rows, data.tokens)
    say(f"tracing {experiment.name} for {topology.devices} devices")
    backend = topology.chip.backend
    function, args = scoring_step(experiment, mesh) if scoring else training_step(experiment, mesh, backend)
    params, trained = (args[0], ()) if scoring else (args[0].params, tuple(args[0].trained))
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        params = jax.eval_shape(widened, params)
    say("compiling; a large model takes minutes")
    memory, text = compiled(function, args, mesh, topology.chip.allotted)
    slots = data.tokens // 2 if scoring else data.slots
    needed = counts.model_flops(model, trained, rows, data.tokens, slots)
    result: dict[str, Any] = {
        "experiment": experiment.name,
        "step": "scoring" if scoring else "training",
        "topology": topology.name,
        **{key: getattr(topology, key) for key in ("slices", "chips", "devices")},
        "mesh": dict(mesh.shape),
        "parameters": sum(x.size for x in jax.tree.leaves(params)),
        "rows": rows,
        "micro_rows": micro_rows,
        "tokens": data.tokens,
        "remat": model.remat,
        "attention": model.attention,
        "memory": dataclasses.asdict(memory) | {"fits": memory.fits},
        "model_flops": needed / topology.devices,
        **dict.fromkeys(("program", "bounds", "input")),
    }
    if text is not None:
        say("reading the compiled program")
        at_once = micro_rows // row_parts(mesh)  # rows of a device
        kernels = layers.kernels(model, at_once, data.tokens, mesh.shape)
        program = counts.count(hlo.parse(text), layer_sizes(params, mesh), kernels, node(topology))
        result |= measured(program, topology)
        result["program"]["flops_over_model"] = program.flops * topology.devices / needed
        step = result["bounds"]["step"]
        result["bounds"]["tokens_per_second"] = rows * data.tokens / step
        result["bounds"]["mfu"] = needed / topology.chips / topology.chip.flops / step
        if not scoring:
            packers = min(data.streams, topology.hosts) or topology.hosts
            result["input"] = {"hosts": topology.hosts, "packers": packers,
                               "tokens_per_second": result["bounds"]["tokens_per_second"] / packers}  # fmt: skip
    return result | {"seconds_to_plan": time.monotonic() - start}


def measured(program: counts.ProgramCounts, topology: Topology) -> dict[str, Any]:
    """Returns {"program": the work of a device in one run, "bounds": its minimum seconds}, as JSON data.

    `program` has `flops`, `hbm_bytes`, `received` and `between_slices` (bytes), `collectives` (`totals`), and lists of
    names, `others_in_layers` and `uncounted_kernels`. `bounds` has `compute`, `hbm`, `interconnect` and `network` (see
    `Bounds`), the largest of them as `step`, its name as `by`, and `expected`, its seconds at the fraction of peak
    published for the chip, `None` without one.
    """
    bound = counts.bounds(program, topology)
    return {
        "program": {
            "flops": program.flops,
            "hbm_bytes": program.bytes,
            "received": program.received(network=False),
            "between_slices": program.received(network=True),
            "collectives": counts.totals(program.collectives),
            "others_in_layers": sorted({c.name for c in program.collectives if c.in_layers and c.moves == "other"}),
            "uncounted_kernels": list(program.uncounted),
        },
        "bounds": dataclasses.asdict(bound)
        | {"step": bound.step, "expected": expected(bound.step, topology), "by": bound.by},
    }


RECORDS, SHARDS = 0.54e6, 6.6e6
"""Tokens packed per second by one core of a 2-core machine (`experiments/bench/host_speed.py`)."""


def expected(bound: float, topology: Topology) -> float | None:
    """Returns `bound`, in seconds, at MaxText's published fraction of peak for the chip; `None` if it is not known."""
    return bound / topology.chip.reached if topology.chip.reached else None


def node(topology: Topology) -> int:
    """Returns the GPUs per node if there are several nodes; 0 for a single node, and for TPUs."""
    return topology.chips // topology.slices if topology.chip.backend == "gpu" and topology.slices > 1 else 0


def layer_sizes(params: dict, mesh: jax.sharding.Mesh) -> set[int]:
    """Returns the sizes, in elements, of a layer's parameters and MLP chunks, as gathered on one device.

    `params` are abstract parameters with sharding, e.g. of `abstract_state`.
    """
    sizes = set()
    for name, group in params["decoder"].items():
        for role, x in group.items() if name.startswith("layers_") else ():
            split = math.prod(mesh.shape[axis] for axis in x.sharding.spec if axis in ("tensor", "expert"))
            sizes.add(x.size // x.shape[0] // split)
            if "mlp" in axes_of(role):
                sizes.add(x.size // x.shape[0] // split // chunk_count(x.shape[axes_of(role).index("mlp")] // split))
    return sizes


# ---- Compiling an experiment's step for absent chips from shapes alone, without weights or data.


def abstract_state(experiment: Experiment, mesh: Mesh | AbstractMesh) -> State:
    """Returns the abstract initial training state, sharded on `mesh`, without reading the base model.

    Its leaves are `jax.ShapeDtypeStruct`.
    """
    abstract = mesh if isinstance(mesh, AbstractMesh) else mesh.abstract_mesh
    with jax.sharding.use_abstract_mesh(abstract):
        state = jax.eval_shape(lambda: initial_state(experiment, load_base=False))
        if experiment.task.reference:
            reference = jax.eval_shape(lambda: reference_params(experiment, load=False))
            state = dataclasses.replace(state, reference=reference)

    def put(x: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, x.sharding.spec if x.ndim else P()))

    return jax.tree.map(put, state)


def training_step(
    experiment: Experiment, mesh: Mesh | AbstractMesh, backend: str = "tpu"
) -> tuple[Callable, tuple[Any, ...]]:
    """Returns the jitted step run by `jprm train` on the backend ("tpu", "gpu" or "cpu"), and its abstract arguments.

    These are (state, rows, learning rate as a float32 scalar). Raises ValueError if the objective is unknown or does
    not fit the experiment.
    """
    e = experiment
    objective = objectives.find(e.objective, e.objective_options)
    objectives.check(objective, e.task)
    step = make_step(objective, make_optimizer(e.optimizer), e.task, backend)
    data = experiment.data
    lead = data.rows // data.micro_rows, data.micro_rows
    rows = abstract_rows(mesh, *lead, tokens=data.tokens, slots=data.slots, extras=data.extras)
    state = abstract_state(experiment, mesh)
    return step, (state, rows, jax.ShapeDtypeStruct((), "float32", sharding=state.step.sharding))


def scoring_step(experiment: Experiment, mesh: Mesh | AbstractMesh) -> tuple[Callable, tuple[Any, ...]]:
    """Returns the jitted function run by `jprm score` on a batch with one row per device, and its arguments.

    These are (abstract parameters, model config, abstract rows, readout).
    """
    state, tokens = abstract_state(experiment, mesh), experiment.data.tokens
    with jax.sharding.use_abstract_mesh(mesh if isinstance(mesh, AbstractMesh) else mesh.abstract_mesh):
        params = jax.eval_shape(lambda state: merge(state.params, experiment.lora), state)
    params = placed(params, mesh)
    rows = abstract_rows(mesh, row_parts(mesh), tokens=tokens, slots=tokens // 2)
    return readout_of_rows, (params, experiment.model, rows, find_head(experiment.model.head).readout)


def placed(arrays: Any, mesh: Mesh | AbstractMesh) -> Any:
    """Returns the tree of abstract arrays on this mesh; each must have a NamedSharding, whose spec it keeps."""
    return jax.tree.map(lambda x: x.update(sharding=NamedSharding(mesh, x.sharding.spec)), arrays)


@dataclasses.dataclass(frozen=True)
class Memory:
    """HBM bytes per device. If the program does not fit, only `total` and `available` are known.

    On TPUs, `total` is the compiler's assigned peak, by which it rejects a program; `temporaries` counts some
    buffers twice.
    """

    total: float
    available: float
    arguments: float | None = None
    temporaries: float | None = None

    @property
    def fits(self) -> bool:
        return self.total <= self.available


def compiled(function: Callable, args: tuple, mesh: Mesh, available: float) -> tuple[Memory, str | None]:
    """Compiles for the mesh's devices; returns memory, and HLO text if the program fits, else `None`.

    Blocks, for minutes. `function` is jitted, `args` are abstract; `available` are the bytes of a device, which the
    compiler's own figure replaces if it rejects the program for its size. Raises RuntimeError for other failures.
    """
    with jax.set_mesh(mesh):
        lowered = function.lower(*args)
        try:
            program = lowered.compile()
        except jax.errors.JaxRuntimeError as error:
            return overflow(str(error)), None
    sizes = program.memory_analysis()
    fresh = sizes.output_size_in_bytes - sizes.alias_size_in_bytes  # not written in place of the arguments
    at_once = sizes.argument_size_in_bytes + fresh + sizes.temp_size_in_bytes
    if mesh.devices.flat[0].platform == "tpu":
        at_once = sizes.peak_memory_in_bytes
    total = at_once + sizes.generated_code_size_in_bytes
    memory = Memory(total, available, sizes.argument_size_in_bytes, sizes.temp_size_in_bytes)
    return memory, program.as_text() if memory.fits else None  # XLA compiles what no GPU holds


UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": GIB, "T": 2**40}


def overflow(message: str) -> Memory:
    """Parses the compiler's error that a program does not fit, as `Memory` with `total` and `available` in bytes.

    Raises RuntimeError with the message if it lacks figures.
    """
    figures = re.search(r"\(([\d.]+)([KMGT]?)\) exceeds available HBM \(([\d.]+)([KMGT]?)\)", message) or re.search(
        r"Used ([\d.]+)([KMGT]?) of ([\d.]+)([KMGT]?) hbm", message
    )
    if not figures:
        raise RuntimeError(f"the compiler failed: {message}")
    used, unit, limit, limit_unit = figures.groups()
    return Memory(float(used) * UNITS[unit], float(limit) * UNITS[limit_unit])


# ---- Search over mesh shapes, then remat policies, then rows at a time, each from the best plan so far.


def search(
    experiment: Experiment,
    topology: Topology,
    *,
    scoring: bool = False,
    say: Callable[[str], None] = lambda line: None,
) -> tuple[list[dict], dict | None]:
    """Returns all plans, and among the fitting ones, if any, the plan with the highest token rate.

    The plans are dicts as `plan` returns them, in the order tried; the best one is `None` if none fits. Tries meshes,
    then rematerialisation, then rows at once (only meshes with `scoring`), each from the best so far. Compiling takes
    minutes, so not every combination is tried. While no candidate fits, the search continues from the one exceeding
    memory least.

    Raises ValueError if no mesh divides the model and the rows, and as `plan`.
    """
    tried: dict[Experiment, dict] = {}
    best = experiment
    for candidates in (meshes,) if scoring else (meshes, remats, micro_rows):
        for candidate in candidates(best, topology):
            if candidate not in tried:
                sizes = " x ".join(str(getattr(candidate.mesh, axis)) for axis in MESH_AXES)
                name = f"mesh {sizes}, remat {candidate.model.remat}, {candidate.data.micro_rows} rows"
                tried[candidate] = plan(
                    candidate, topology, scoring=scoring, say=lambda line, name=name: say(f"{name}: {line}")
                )
        if not tried:
            raise ValueError(
                f"no mesh of {topology.devices} devices divides data.rows={experiment.data.rows} and the model's width"
                f" {experiment.model.width}: make data.rows a multiple of the devices"
            )
        best = max(tried, key=lambda candidate: merit(tried[candidate]))
    plans = list(tried.values())
    fitting = [candidate for candidate in plans if candidate["bounds"]]
    return plans, max(fitting, key=merit, default=None)


def merit(plan: dict) -> tuple[bool, float]:
    """Returns a sort key, larger for better plans: fitting ones first, then by token rate.

    Plans that do not fit are sorted by missing memory, the least missing first.
    """
    if plan["bounds"]:
        return True, plan["bounds"]["tokens_per_second"]
    return False, plan["memory"]["available"] - plan["memory"]["total"]


def meshes(experiment: Experiment, topology: Topology) -> Iterator[Experiment]:
    """Yields the experiment with meshes that divide the model and its rows, with one row at a time per batch part.

    tensor: up to 8; data: one or two weight replicas per slice; context and expert: as in the experiment.
    """
    model, data, context, expert = experiment.model, experiment.data, experiment.mesh.context, experiment.mesh.expert
    narrow = (model.kv_heads, model.mlp_width, model.vocab_size, model.deltanet.key_heads, model.experts.width)
    for tensor in (1, 2, 4, 8):
        for replicas in (topology.slices, 2 * topology.slices):
            fsdp, left = divmod(topology.devices, tensor * replicas * context * expert)
            rows = fsdp * replicas * expert
            divides = not left and fsdp and not data.rows % rows and not model.width % (fsdp * context)
            if divides and not any(size % tensor for size in narrow):
                mesh = MeshConfig(replicas, fsdp, tensor, context, expert)
                changed = dataclasses.replace(data, micro_rows=rows)
                yield dataclasses.replace(experiment, mesh=mesh, data=changed)


def remats(experiment: Experiment, _: Topology) -> Iterator[Experiment]:
    for remat in REMAT:
        yield dataclasses.replace(experiment, model=dataclasses.replace(experiment.model, remat=remat))


def micro_rows(experiment: Experiment, _: Topology) -> Iterator[Experiment]:
    """Yields the experiment with micro-batches from one row per batch shard to all rows per update, by factors of two.

    Sizes that do not divide `data.rows` are skipped. Its mesh must have no -1. The second argument has no effect.
    """
    rows = experiment.mesh.data * experiment.mesh.fsdp * experiment.mesh.expert  # a mesh of `meshes` has no -1
    while rows <= experiment.data.rows:
        if experiment.data.rows % rows == 0:
            yield dataclasses.replace(experiment, data=dataclasses.replace(experiment.data, micro_rows=rows))
        rows *= 2


# ---- Tables of a plan, and of a search's plans.


def tables(plan: Mapping[str, Any]) -> Iterator[Table | str]:
    mesh = " ".join(f"{axis}={size}" for axis, size in plan["mesh"].items())
    slices = f"{plan['slices']} x " if plan["slices"] > 1 else ""
    half = "" if plan["devices"] == plan["chips"] else f" ({plan['devices']} devices: figures are of half a chip)"
    yield (
        f"{plan['experiment']}, {plan['step']}: {plan['parameters'] / 1e9:.2f} B parameters on"
        f" {slices}{plan['topology']}, {plan['chips']} chips{half}; mesh {mesh}; {plan['rows']} rows of"
        f" {plan['tokens']:,} tokens, {plan['micro_rows']} at a time; remat {plan['remat']}; attention"
        f" {plan['attention']}"
    )
    memory = plan["memory"]
    shown = {"arguments": "arguments", "temporaries": "temporaries", "total": "at once", "available": "available"}
    rows = [[label, f"{memory[name] / GIB:.2f}"] for name, label in shown.items() if memory[name] is not None]
    yield Table(verdict(memory), ("memory a device", "GiB"), rows)
    if plan["program"] is None:
        return
    program, bounds = plan["program"], plan["bounds"]

    reached = bounds["step"] / bounds["expected"] if bounds["expected"] else 0.0

    def times(least: float) -> list[str]:
        return [seconds(least), seconds(least / reached) if reached else ""]

    ratio = f"{program['flops']:.4g} ({program['flops_over_model']:.2f} of the model's)"
    rows = [
        ["model FLOPs", f"{plan['model_flops']:.4g}", "", ""],
        ["compiled FLOPs", ratio, *times(bounds["compute"])],
        ["HBM bytes", f"{program['hbm_bytes']:.4g}", *times(bounds["hbm"])],
    ]
    for name, of_program in (("interconnect", "received"), ("network", "between_slices"))[: 1 + (plan["slices"] > 1)]:
        received = program[of_program]
        least = times(bounds[name]) if bounds[name] or not received else ["no published rate", ""]
        rows.append([f"{name} bytes", f"{received:.4g}", *least])
    yield Table("work", ("a step, a device", "", "at least", "expected"), rows)

    if program["collectives"]:
        rows = []
        for row in program["collectives"]:
            where = "layer loop" if row["in_layers"] else "outside it"
            kind = row["kind"] + " between slices" * row["network"]
            rows.append([kind, row["moves"], where, f"{row['count']:,.0f}", f"{row['bytes'] / 1e9:.3f}"])
        yield Table("collectives", ("collective", "of", "where", "times", "GB"), rows)
    for name in program["others_in_layers"]:
        yield f"in the layer loop, not known to be of weights or of gradients: {name}"
    for name in program["uncounted_kernels"]:
        yield f"a kernel without a cost estimate, whose FLOPs are not counted: {name}"

    yield (
        f"bound: at most {bounds['tokens_per_second']:,.0f} tokens/s, MFU {bounds['mfu']:.1%}, by {bounds['by']}; a"
        f" step takes {seconds(bounds['step'])} or more"
    )
    if reached:
        yield (
            f"expected: {seconds(bounds['expected'])} a step, at the {reached:.0%} of the chip's rate that MaxText"
            " publishes for its own training"
        )
    if need := plan["input"]:
        rate = need["tokens_per_second"]
        way = "records" if rate < RECORDS else "only shards of tokens (jprm tokenise)"
        way = way if rate < SHARDS else "neither: set data.streams to the number of hosts"
        yield (
            f"input: {need['packers']} of {need['hosts']} hosts pack up to {rate:,.0f} tokens/s each; a core packed"
            f" {RECORDS:,.0f} from records and {SHARDS:,.0f} from shards of tokens, so that this takes {way}"
        )
    yield f"planned in {plan['seconds_to_plan']:.0f} s"


def tables_of_search(plans: Sequence[Mapping[str, Any]], best: Mapping[str, Any] | None) -> Iterator[Table | str]:
    """Yields a table with one line per candidate, then the tables of the best one, or a sentence if `best` is None."""
    shown = [axis for axis in MESH_AXES if axis != "expert" or any(plan["mesh"].get(axis, 1) > 1 for plan in plans)]
    rows = []
    for plan in plans:
        memory, bounds = plan["memory"], plan["bounds"]
        cells = ["best" if plan is best else "", " x ".join(str(plan["mesh"][axis]) for axis in shown)]
        cells += [plan["remat"], str(plan["micro_rows"]), f"{memory['total'] / GIB:.2f}"]
        if bounds:
            cells += [f"{bounds['tokens_per_second']:,.0f}", f"{bounds['mfu']:.1%}", bounds["by"]]
        else:
            cells += ["", "", "does not fit"]
        rows.append(cells)
    columns = ("", " x ".join(shown), "remat", "rows", "GiB", "tokens/s", "MFU", "bound by")
    yield Table("candidates", columns, rows)
    if best is None:
        yield "none of them fits: use a larger slice, shorter rows or fewer slots"
    else:
        yield from tables(best)


def verdict(memory: Mapping[str, Any]) -> str:
    spare = (memory["available"] - memory["total"]) / GIB
    return f"fits, {spare:.2f} GiB to spare" if memory["fits"] else f"does not fit: {-spare:.2f} GiB too much"


def seconds(value: float) -> str:
    return f"{value:.2f} s" if value >= 1 else f"{value * 1e3:.3g} ms"
