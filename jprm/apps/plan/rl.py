"""Plans of `jprm rl`: its programs, compiled one by one, and what a device holds while each of them runs.

    update   a step of the optimizer on rows of sampled tokens, with the reference
    scoring  the PRM on a row a device, where it is a run of jprm
    prefill  the prompts of a batch of samples
    decode   one more token of each of them
    push     the learner's parameters as the sampler's

Learner, reference, sampler and PRM stay on the devices. The sampler's caches are there in prefill and decode alone.

In prefill and decode the layers are no loop, and a program of all layers takes long to compile. These two are compiled
with few layers, and their figures are continued to all of them (`rl`).
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding

from jprm.apps.plan import counts, hlo
from jprm.apps.plan.plan import compiled, layer_sizes, scoring_step, seconds, training_step
from jprm.apps.plan.topologies import GIB, Topology, devices
from jprm.checkpoints.kinds import RUN, kind_of
from jprm.experiment import Experiment, read
from jprm.io.storage import path_of
from jprm.methods.evaluate.blocks import Table
from jprm.methods.policy import decoding, sampler
from jprm.methods.rl.config import RLExperiment, learner
from jprm.methods.rl.samples import EXTRAS
from jprm.model import decode
from jprm.model.attention import find
from jprm.model.config import ModelConfig
from jprm.model.lora import merge
from jprm.model.mesh import check_mesh, make_mesh, row_parts, spec
from jprm.rows import padded_size


@dataclasses.dataclass(frozen=True)
class Program:
    """What an update runs.

    variants: by the number of their layers, functions to lower and their arguments. One is the program itself; two have
        fewer layers.
    stays: bytes of a device that it is given and that stay there.
    times: how often an update runs it.
    """

    variants: Mapping[int, tuple[Callable, tuple[Any, ...]]]
    stays: float
    times: int


def plan(config: RLExperiment, topology: Topology, say: Callable[[str], None] = lambda line: None) -> dict[str, Any]:
    """Compiles the programs of an update for a slice and measures them; bytes and FLOPs are of one device.

    The policy's folder needs only its config.json, or experiment.json. An update is taken at its longest: every sample
    has `max_tokens`, and samples share no token. `update_seconds` is a lower bound for such an update, None where a
    program does not fit. Raises as `jprm.apps.plan.plan.plan` does.
    """
    if topology.chip.backend != "tpu":
        raise ValueError(f"--rl plans for TPU slices, not for {topology.name}")
    start, experiment = time.monotonic(), longest(config)
    model, data = experiment.model, experiment.data
    model.check_attention(backend="tpu")
    mesh = make_mesh(config.mesh, devices(topology))
    check_mesh(model, mesh, data.micro_rows, data.tokens)
    say(f"tracing {experiment.name} for {topology.devices} devices")
    runs, resident = programs(config, experiment, mesh)
    measured = {}
    for name, program in runs.items():
        kernels = _kernels(experiment, mesh) if name == "update" else {}
        measured[name] = measure(name, program, model.layers, sum(resident.values()), kernels, mesh, topology, say)
    bounds = [each["times"] * each["seconds"] for each in measured.values() if each["program"]]
    return {
        "experiment": config.name, "topology": topology.name, "slices": topology.slices, "chips": topology.chips,
        "devices": topology.devices, "mesh": dict(mesh.shape), "rows": data.rows, "tokens": data.tokens,
        "parameters": sum(x.size for x in jax.tree.leaves(params_of(*runs["update"].variants.values()))),
        "resident": resident, "available": topology.chip.allotted, "programs": measured,
        "fits": all(each["fits"] for each in measured.values()),
        "update_seconds": sum(bounds) if len(bounds) == len(measured) else None,
        "seconds_to_plan": time.monotonic() - start,
    }  # fmt: skip


def measure(
    name: str, program: Program, layers: int, resident: float, kernels: Mapping[str, float], mesh: Mesh,
    topology: Topology, say: Callable[[str], None],
) -> dict[str, Any]:  # fmt: skip
    """Compiles a program; returns its figures, those of `layers` layers where it is compiled with fewer."""
    totals, counted, available = {}, {}, topology.chip.allotted
    for size, lowered in program.variants.items():
        say(f"compiling {name}" + (f" of {size} layers" if len(program.variants) > 1 else ""))
        memory, text = compiled(*lowered, mesh, available)
        totals[size] = memory.total
        if text is not None:
            counted[size] = counts.count(hlo.parse(text), layer_sizes(params_of(lowered), mesh), kernels)
    peak = total_at(totals, layers) + resident - program.stays
    measured = {
        "times": program.times, "peak": peak, "fits": peak <= available, "program": None,
        "compiled_layers": [*totals] if len(totals) > 1 else None,
    }  # fmt: skip
    if len(counted) < len(totals):
        return measured
    return measured | _measured(program_at(counted, layers), topology)


def longest(config: RLExperiment) -> Experiment:
    """Returns the learner's experiment with the rows of a step whose samples are longest and share nothing."""
    experiment, rows = learner(config), config.micro_rows
    samples = -(-config.problems_an_update // config.minibatches) * config.samples
    batches = -(-samples * config.max_tokens // config.tokens // rows)
    extras = EXTRAS if config.method == "policy_gradient" else ()
    data = dataclasses.replace(experiment.data, rows=rows << (batches - 1).bit_length(), extras=extras)
    return dataclasses.replace(experiment, data=data)


def programs(config: RLExperiment, experiment: Experiment, mesh: Mesh) -> tuple[dict[str, Program], dict[str, float]]:
    """Returns an update's programs, and the bytes of a device that stay there, by what they are."""
    step, arguments = training_step(experiment, mesh)
    state, model = arguments[0], experiment.model
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        learnt = jax.eval_shape(lambda state: merge(state.params, experiment.lora), state)
        copied = jax.eval_shape(lambda params: decode.unstacked(params, model)[0], learnt)
    learnt, copied = _placed(learnt, mesh), _placed(copied, mesh)
    resident = {
        "parameters": held(state.params), "moments": held(state.optimizer), "reference": held(state.reference),
        "sampler": held(copied),
    }  # fmt: skip
    runs = {"update": Program({model.layers: (step, arguments)}, held(state), config.minibatches)}
    if config.prm and kind_of(config.prm) == "run":
        prm = read(path_of(config.prm) / RUN)
        function, scored = scoring_step(prm, mesh)
        resident["PRM"] = held(scored[0])
        tokens = config.problems_an_update * config.samples * config.tokens  # every chain in a row of its own
        rows = row_parts(mesh) * prm.data.tokens
        runs["scoring"] = Program({prm.model.layers: (function, scored)}, held(scored[0]), -(-tokens // rows))
    some = [_sampling(config, *shallow(copied, model, layers), mesh) for layers in depths(model)]
    for name, (_, _, times) in some[0].items():
        variants = {each[name][1][1].layers: each[name][:2] for each in some}
        runs[name] = Program(variants, resident["sampler"], times)
    # The old copy goes before the new one is made.
    push = {model.layers: (decode.unstack, (learnt, model))}
    runs["push"] = Program(push, held(learnt) + resident["sampler"], 1)
    return runs, {name: size for name, size in resident.items() if size}


def shallow(params: Mapping, model: ModelConfig, layers: int) -> tuple[dict, ModelConfig]:
    """Returns the first layers of an unstacked model."""
    decoder = {
        name: x for name, x in params["decoder"].items()
        if not name.startswith("layers_") or int(name.removeprefix("layers_")) < layers
    }  # fmt: skip
    return {**params, "decoder": decoder}, dataclasses.replace(model, layers=layers, layer_groups=(1,) * layers)


def _sampling(
    config: RLExperiment, params: Mapping, model: ModelConfig, mesh: Mesh
) -> dict[str, tuple[Callable, tuple[Any, ...], int]]:
    """Returns prefill and one step of decoding, of a batch of the longest prompts that rows leave room for.

    Each is a function, its arguments, and how often an update runs it.
    """
    split = row_parts(mesh)
    m, most = sampler.jobs_at_once(config.problems_an_update, config.samples, config.sampler_rows, split)
    jobs = config.problems_an_update * -(-config.samples // m)
    prompts, distinct = (split * padded_size(-(-min(most, n) // split)) for n in (jobs, config.problems_an_update))
    batches = -(-jobs // most)
    size = padded_size(max(sampler.SHORTEST_PROMPT, config.tokens - config.max_tokens))
    room = padded_size(config.max_tokens)

    def rows(*shape: int, dtype: Any = "int32") -> Any:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec("batch", mesh=mesh)))

    def whole(*shape: int, dtype: Any = "int32") -> Any:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec(mesh=mesh)))

    rows_B = prompts * m
    prompt = params, model, rows(distinct, size), rows(distinct), rows(prompts)
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        past = jax.eval_shape(lambda params, *some: decoding.prefill(params, model, *some), params, *prompt[2:])
        cache = jax.eval_shape(lambda: decode.empty_cache(model, rows_B, room))
        key_B = jax.eval_shape(decoding.keys, rows(rows_B, dtype="uint32"), rows(rows_B, dtype="uint32"))
    samples = decoding.Samples(
        whole(), rows(rows_B), rows(rows_B), rows(rows_B), rows(rows_B, room), rows(rows_B, room, dtype="float32"),
        rows(rows_B), rows(rows_B, dtype="float32"), _placed(cache, mesh),
    )  # fmt: skip
    step = (
        params, model, config.temperature, 1.0, samples, _placed(past, mesh), rows(rows_B), _placed(key_B, mesh),
        whole(model.vocab_size, 2, dtype="int8"), whole(model.vocab_size, dtype="bool"), whole(dtype="bool"),
    )  # fmt: skip
    token = jax.jit(decoding.next_token, static_argnums=(1, 2, 3), donate_argnums=4)
    return {
        "prefill": (decoding.prefill, prompt, batches),
        "decode": (token, step, batches * config.max_tokens),
    }


def held(arrays: Any) -> float:
    """Returns the bytes that one device holds of arrays with shardings."""
    return sum(
        math.prod(x.sharding.shard_shape(x.shape)) * jnp.dtype(x.dtype).itemsize for x in jax.tree.leaves(arrays)
    )


def params_of(lowered: tuple[Callable, tuple[Any, ...]]) -> Any:
    """Returns the parameters among a function's arguments, of which they are the first."""
    _, (first, *_) = lowered
    return getattr(first, "params", first)


def _placed(arrays: Any, mesh: Mesh) -> Any:
    return jax.tree.map(lambda x: x.update(sharding=NamedSharding(mesh, x.sharding.spec)), arrays)


def _kernels(experiment: Experiment, mesh: Mesh) -> Mapping[str, float]:
    model, data = experiment.model, experiment.data
    rows = data.micro_rows // row_parts(mesh)
    return find(model.attention).flops(model, rows, data.tokens, mesh.shape["tensor"], mesh.shape["context"])


def _measured(program: counts.Program, topology: Topology) -> dict[str, Any]:
    bounds = counts.bounds(program, topology.chip)
    return {
        "program": {
            "flops": program.flops, "hbm_bytes": program.bytes,
            "received": program.received(network=False), "between_slices": program.received(network=True),
            "collectives": counts.totals(program.collectives), "uncounted_kernels": list(program.uncounted),
        },
        "bounds": dataclasses.asdict(bounds), "by": bounds.by, "seconds": bounds.step,
    }  # fmt: skip


def tables(plan: Mapping[str, Any]) -> Iterator[Table | str]:
    """Yields the tables and lines of a plan."""
    mesh = " ".join(f"{axis}={size}" for axis, size in plan["mesh"].items())
    slices = f"{plan['slices']} x " if plan["slices"] > 1 else ""
    yield (
        f"{plan['experiment']}, reinforcement learning: {plan['parameters'] / 1e9:.2f} B parameters on"
        f" {slices}{plan['topology']}, {plan['chips']} chips; mesh {mesh}; an update of at most {plan['rows']} rows of"
        f" {plan['tokens']:,} tokens a step"
    )
    resident = (*plan["resident"].items(), ("total", sum(plan["resident"].values())))
    yield Table("memory", ("on a device all the time", "GiB"), [[name, f"{size / GIB:.2f}"] for name, size in resident])
    columns = ("program", "times", "peak GiB", "FLOPs", "HBM bytes", "interconnect bytes", "at least", "by")
    rows = []
    for name, each in plan["programs"].items():
        peak = f"{each['peak'] / GIB:.2f}" + ("" if each["fits"] else ": does not fit")
        cells = [name + ("*" if each["compiled_layers"] else ""), f"{each['times']:,}", peak]
        if program := each["program"]:
            received = program["received"] + program["between_slices"]
            cells += [f"{x:.4g}" for x in (program["flops"], program["hbm_bytes"], received)]
            cells += [seconds(each["seconds"]), each["by"]]
        rows.append(cells + [""] * (len(columns) - len(cells)))
    yield Table("programs", columns, rows)
    for few, more in {tuple(each["compiled_layers"]) for each in plan["programs"].values() if each["compiled_layers"]}:
        yield f"* continued to all layers from programs of {few} and {more}: every layer adds the same"
    fits = "it fits" if plan["fits"] else "it does not fit"
    yield f"{plan['available'] / GIB:.2f} GiB are available: {fits}"
    if plan["update_seconds"] is not None:
        least = seconds(plan["update_seconds"])
        yield f"an update takes {least} or more, if all samples have the largest length"
    yield f"planned in {plan['seconds_to_plan']:.0f} s"


# ---- Figures of a program of many layers, from those of two programs of few.
#
# Where every layer is written out, each adds the same instructions and arrays: figures are affine in the number of
# layers. `tests/test_plan_rl.py` holds them against a program of all layers.

PERIODS = 2, 4
"""Periods of the layers' pattern in the two programs: in fewer, the first and the last layer are neighbours."""


def depths(model: ModelConfig) -> tuple[int, ...]:
    """Returns the layers of the programs to compile: two numbers, or the model's own where that is no more."""
    few = tuple(periods * max(1, len(model.windows)) for periods in PERIODS)
    return few if few[-1] < model.layers else (model.layers,)


def total_at(totals: Mapping[int, float], layers: int) -> float:
    """Returns a figure at `layers` layers from those at one or two numbers of layers."""
    return sum(weight * totals[depth] for depth, weight in _weights(totals, layers).items())


def program_at(programs: Mapping[int, counts.Program], layers: int) -> counts.Program:
    """Returns the counts of the program with `layers` layers, as `total_at` does.

    Its collectives are those of both programs, each counted with its program's weight. The smaller program has a
    negative weight.
    """
    weights = _weights(programs, layers)
    return counts.Program(
        flops=sum(weight * programs[depth].flops for depth, weight in weights.items()),
        bytes=sum(weight * programs[depth].bytes for depth, weight in weights.items()),
        collectives=tuple(
            dataclasses.replace(collective, times=weight * collective.times)
            for depth, weight in weights.items()
            for collective in programs[depth].collectives
        ),
        uncounted=tuple(sorted({name for program in programs.values() for name in program.uncounted})),
    )


def _weights(of: Mapping[int, object], layers: int) -> dict[int, float]:
    """Returns what each program counts on the line through them: 1 for a single one."""
    few, more = min(of), max(of)
    at = (layers - few) / (more - few) if more > few else 1.0
    return {few: 1 - at, more: at} if more > few else {few: 1.0}
