"""Plans of `jprm rl`: its programs, compiled one by one, and what a device holds while each of them runs.

    update   a step of the optimizer on rows of sampled tokens, with the reference
    scoring  the PRM on a row a device, where it is a run of jprm
    prefill  the prompts of a batch of samples
    decode   one more token of each of them
    push     the learner's parameters as the sampler's

Learner, reference, sampler and PRM stay on the devices. The sampler's caches are there in prefill and decode alone.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding

from jprm.checkpoints.kinds import RUN, kind_of
from jprm.experiment import Experiment, read
from jprm.model import decode
from jprm.model.attention.registry import find
from jprm.model.lora import merge
from jprm.model.mesh import check_mesh, make_mesh, spec
from jprm.plan import collectives, compile, counts, hlo, roofline
from jprm.plan.plan import layer_sizes
from jprm.plan.topologies import Topology, devices
from jprm.policy import decoding, sampler
from jprm.rl.config import RLExperiment, learner
from jprm.rl.group import EXTRAS
from jprm.storage import path_of

Program = tuple[Callable, tuple[Any, ...], float, int]
"""A function to lower, its arguments, the bytes of a device that it is given and that stay there, and how often an
update runs it."""


def plan(config: RLExperiment, topology: Topology, say: Callable[[str], None] = lambda line: None) -> dict[str, Any]:
    """Compiles the programs of an update for a slice and measures them; bytes and FLOPs are of one device.

    The policy's folder needs only its config.json, or experiment.json. An update is taken at its longest: every sample
    has `max_tokens`, and samples share no token. `update_seconds` is a lower bound for such an update, None where a
    program does not fit. Raises as `jprm.plan.plan.plan` does.
    """
    if topology.chip.backend != "tpu":
        raise ValueError(f"--rl plans for TPU slices, not for {topology.name}")
    start, experiment = time.monotonic(), longest(config)
    model, data = experiment.model, experiment.data
    model.check_attention(backend="tpu")
    mesh = make_mesh(config.mesh, devices(topology))
    check_mesh(model, mesh, data.micro_rows, data.tokens)
    say(f"tracing {experiment.name} for {topology.devices} devices")
    made, resident = programs(config, experiment, mesh)
    measured = {}
    for name, (function, arguments, stays, times) in made.items():
        say(f"compiling {name}")
        memory, text = compile.compiled(function, arguments, mesh, topology.chip.allotted)
        peak = memory.total + sum(resident.values()) - stays
        measured[name] = {"times": times, "peak": peak, "fits": peak <= topology.chip.allotted, "program": None}
        if text is not None:
            sizes = layer_sizes(params_of(arguments), mesh)
            kernels = _kernels(experiment, mesh) if name == "update" else {}
            measured[name] |= _measured(counts.count(hlo.parse(text), sizes, kernels), topology)
    bounds = [each["times"] * each["seconds"] for each in measured.values() if each["program"]]
    return {
        "experiment": config.name, "topology": topology.name, "slices": topology.slices, "chips": topology.chips,
        "devices": topology.devices, "mesh": dict(mesh.shape), "rows": data.rows, "tokens": data.tokens,
        "parameters": sum(x.size for x in jax.tree.leaves(params_of(made["update"][1]))),
        "resident": resident, "available": topology.chip.allotted, "programs": measured,
        "fits": all(each["fits"] for each in measured.values()),
        "update_seconds": sum(bounds) if len(bounds) == len(measured) else None,
        "seconds_to_plan": time.monotonic() - start,
    }  # fmt: skip


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
    step, arguments = compile.training(experiment, mesh)
    state, model = arguments[0], experiment.model
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        learnt = jax.eval_shape(lambda state: merge(state.params, experiment.lora), state)
        copied = jax.eval_shape(lambda params: decode.unstacked(params, model)[0], learnt)
    learnt, copied = _placed(learnt, mesh), _placed(copied, mesh)
    resident = {
        "parameters": held(state.params), "moments": held(state.optimizer), "reference": held(state.reference),
        "sampler": held(copied),
    }  # fmt: skip
    found = {"update": (step, arguments, held(state), config.minibatches)}
    if config.prm and kind_of(config.prm) == "run":
        prm = read(path_of(config.prm) / RUN)
        function, scored = compile.scoring(prm, mesh)
        resident["PRM"] = held(scored[0])
        tokens = config.problems_an_update * config.samples * config.tokens  # every chain in a row of its own
        rows = mesh.shape["data"] * mesh.shape["fsdp"] * prm.data.tokens
        found["scoring"] = function, scored, held(scored[0]), -(-tokens // rows)
    found |= _sampling(config, copied, dataclasses.replace(model, layer_groups=(1,) * model.layers), mesh)
    # The old copy goes before the new one is made.
    found["push"] = decode.unstack, (learnt, model.layer_groups), held(learnt) + resident["sampler"], 1
    return found, {name: size for name, size in resident.items() if size}


def _sampling(config: RLExperiment, params: Mapping, model: Any, mesh: Mesh) -> dict[str, Program]:
    """Returns prefill and one step of decoding, of a batch of the longest prompts that rows leave room for."""
    split = mesh.shape["data"] * mesh.shape["fsdp"]
    m, most = sampler.jobs_at_once(config.problems_an_update, config.samples, config.sampler_rows, split)
    jobs = config.problems_an_update * -(-config.samples // m)
    prompts, distinct = (split * sampler.power(-(-min(most, n) // split)) for n in (jobs, config.problems_an_update))
    batches = -(-jobs // most)
    size = sampler.power(max(sampler.SHORTEST_PROMPT, config.tokens - config.max_tokens))
    room = sampler.power(config.max_tokens)

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
        "prefill": (decoding.prefill, prompt, held(params), batches),
        "decode": (token, step, held(params), batches * config.max_tokens),
    }


def held(arrays: Any) -> float:
    """Returns the bytes that one device holds of arrays with shardings."""
    return sum(
        math.prod(x.sharding.shard_shape(x.shape)) * jnp.dtype(x.dtype).itemsize for x in jax.tree.leaves(arrays)
    )


def params_of(arguments: tuple[Any, ...]) -> Any:
    """Returns the parameters among a program's arguments, of which they are the first."""
    return getattr(arguments[0], "params", arguments[0])


def _placed(arrays: Any, mesh: Mesh) -> Any:
    return jax.tree.map(lambda x: x.update(sharding=NamedSharding(mesh, x.sharding.spec)), arrays)


def _kernels(experiment: Experiment, mesh: Mesh) -> Mapping[str, float]:
    model, data = experiment.model, experiment.data
    rows = data.micro_rows // (mesh.shape["data"] * mesh.shape["fsdp"])
    return find(model.attention).flops(model, rows, data.tokens, mesh.shape["tensor"], mesh.shape["context"])


def _measured(program: counts.Program, topology: Topology) -> dict[str, Any]:
    bounds = roofline.bounds(program, topology.chip)
    return {
        "program": {
            "flops": program.flops, "hbm_bytes": program.bytes,
            "received": program.received(network=False), "between_slices": program.received(network=True),
            "collectives": collectives.totals(program.collectives), "uncounted_kernels": list(program.uncounted),
        },
        "bounds": dataclasses.asdict(bounds), "by": bounds.by, "seconds": bounds.step,
    }  # fmt: skip


def show(plan: Mapping[str, Any], console: Any) -> None:
    """Prints the tables of a plan."""
    from rich.table import Table

    from jprm.plan.report import seconds
    from jprm.plan.topologies import GIB

    mesh = " ".join(f"{axis}={size}" for axis, size in plan["mesh"].items())
    slices = f"{plan['slices']} x " if plan["slices"] > 1 else ""
    console.print(
        f"{plan['experiment']}, reinforcement learning: {plan['parameters'] / 1e9:.2f} B parameters on"
        f" {slices}{plan['topology']}, {plan['chips']} chips; mesh {mesh}; an update of at most {plan['rows']} rows of"
        f" {plan['tokens']:,} tokens a step"
    )
    table = Table("on a device all the time", "GiB", title_justify="left")
    for name, size in (*plan["resident"].items(), ("total", sum(plan["resident"].values()))):
        table.add_row(name, f"{size / GIB:.2f}")
    console.print(table)
    table = Table("program", "times", "peak GiB", "FLOPs", "HBM bytes", "interconnect bytes", "at least", "by")
    for name, each in plan["programs"].items():
        cells = [name, f"{each['times']:,}", f"{each['peak'] / GIB:.2f}" + ("" if each["fits"] else ": does not fit")]
        if program := each["program"]:
            received = program["received"] + program["between_slices"]
            cells += [f"{x:.4g}" for x in (program["flops"], program["hbm_bytes"], received)]
            cells += [seconds(each["seconds"]), each["by"]]
        table.add_row(*cells)
    console.print(table)
    fits = "it fits" if plan["fits"] else "it does not fit"
    console.print(f"{plan['available'] / GIB:.2f} GiB are available: {fits}")
    if plan["update_seconds"] is not None:
        least = seconds(plan["update_seconds"])
        console.print(f"an update takes {least} or more, if all samples have the largest length")
    console.print(f"planned in {plan['seconds_to_plan']:.0f} s")
