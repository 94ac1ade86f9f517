"""Plans of `jprm rl`: its programs, compiled one by one, and what a device holds while each of them runs.

    update   a step of the optimizer on rows of sampled tokens, with the reference, on all devices
    scoring  the PRM on a row a device, where it is a run of jprm
    prefill  the prompts of a batch of samples
    decode   one more token of each of them
    push     a layer of the learner's parameters, sent as the sampler stores it
    packing  an update's rows, by every host's processor: measured where the plan is made

Learner and reference are split over all devices. Every host has a copy of the sampler and of the PRM, and samples and
scores its part of the problems, as `jprm rl` does. All of it stays on the devices; the sampler's caches are there in
only prefill and decode. With `sampling_hosts` the last hosts have sampler and PRM, and run scoring, prefill and
decode; the others have and run the rest. Both work at the same time, and then push together.

In prefill and decode the layers are no loop, so that both take minutes to compile where layers are many.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding

from jprm.apps.plan import counts, hlo
from jprm.apps.plan.counts import Collective
from jprm.apps.plan.plan import compiled, layer_sizes, measured, node, placed, scoring_step, seconds, training_step
from jprm.apps.plan.topologies import GIB, Topology, devices
from jprm.experiment import RUN, Experiment, kind_of, read
from jprm.io.storage import path_of
from jprm.methods.decoding import decode
from jprm.methods.evaluate.blocks import Table
from jprm.methods.policy import sampler
from jprm.methods.rl.config import RLExperiment, learner
from jprm.methods.rl.rollout import packed
from jprm.methods.rl.samples import EXTRAS, Rollout, group_tree
from jprm.model import layers
from jprm.model.attention import chain_rows
from jprm.model.config import ModelConfig
from jprm.model.mesh import MeshConfig, check_mesh, make_mesh, mesh_by_heads, row_parts, spec
from jprm.model.parameters import held_decoder, merge
from jprm.model.transformer import check_model
from jprm.rows import padded_size

SAMPLED = ("sampler", "PRM", "scoring", "prefill", "decode")
"""What hosts that sample hold and run."""


@dataclasses.dataclass(frozen=True)
class PlannedProgram:
    """What an update runs.

    function, arguments: what is lowered; the first argument is the parameters or holds them.
    stays: bytes of a device that it is given and that stay there.
    times: how often an update runs it.
    mesh, topology: of the devices that run it together.
    sent: collectives that the compiled program does not have.
    """

    function: Callable
    arguments: tuple[Any, ...]
    stays: float
    times: int
    mesh: Mesh
    topology: Topology
    sent: tuple[Collective, ...] = ()


def plan(config: RLExperiment, topology: Topology, say: Callable[[str], None] = lambda line: None) -> dict[str, Any]:
    """Compiles the programs of an update for a slice and measures them; bytes and FLOPs are of one device.

    The policy's folder needs only its config.json, or experiment.json. An update is taken at its longest: every sample
    has `max_tokens`, and samples share no token. `update_seconds` is a lower bound for such an update, None where a
    program does not fit. `expected_seconds` is at the rate that MaxText publishes for its training on such chips.

    Raises as `jprm.apps.plan.plan.plan` does, and ValueError where `sampling_hosts` leaves no host to learn.
    """
    start, experiment = time.monotonic(), longest(config)
    model, data, chip = experiment.model, experiment.data, topology.chip
    learners = topology.without(config.sampling_hosts)
    mesh = make_mesh(config.mesh, devices(learners))
    check_model(model, chip.backend, mesh.shape["context"])
    check_mesh(model, mesh, data.micro_rows, data.tokens)
    say(f"tracing {experiment.name} for {topology.devices} devices")
    runs, resident = programs(config, experiment, mesh, topology)
    figures_of, at_once = {}, data.micro_rows // row_parts(mesh)  # rows of a device
    for name, program in runs.items():
        beside = [size for part, size in resident.items() if together(config, part, name)]
        kernels = layers.kernels(model, at_once, data.tokens, mesh.shape) if name == "update" else {}
        figures_of[name] = measure(name, program, sum(beside), kernels, say)
    say("packing rows")
    host = packing_seconds(config, experiment)
    fits, work = all(figures["program"] for figures in figures_of.values()), {}
    if fits:  # seconds of what hosts do for an update; packing is the processor's
        took = {name: figures["times"] * figures["bounds"]["step"] for name, figures in figures_of.items()}
        work = {"sampling": sum(s for name, s in took.items() if name in SAMPLED), "push": took["push"]}
        work["learning"] = took["update"]
    apart = config.sampling_hosts > 0
    return {
        "experiment": config.name, "topology": topology.name, "slices": topology.slices, "chips": topology.chips,
        "devices": topology.devices, "mesh": dict(mesh.shape), "rows": data.rows, "tokens": data.tokens,
        "sampling_hosts": config.sampling_hosts,
        "host": {"chips": topology.host.chips, "mesh": dict(runs["decode"].mesh.shape), "packing_seconds": host},
        "parameters": sum(x.size for x in jax.tree.leaves(params_of(runs["update"]))),
        "resident": resident, "available": chip.allotted, "programs": figures_of, "work": work,
        "fits": all(figures["fits"] for figures in figures_of.values()),
        "update_seconds": in_all(work, host, apart) if fits else None,
        "expected_seconds": in_all(work, host, apart, chip.reached) if fits and chip.reached else None,
        "seconds_to_plan": time.monotonic() - start,
    }  # fmt: skip


def together(config: RLExperiment, first: str, second: str) -> bool:
    """Says whether a device holds or runs both: two parts or programs of an update."""
    return not config.sampling_hosts or (first in SAMPLED) == (second in SAMPLED)


def in_all(work: Mapping[str, float], packing: float, apart: bool, reached: float = 1.0) -> float:
    """Returns the seconds of an update, its programs at this fraction of their bounds' rate."""
    learning, sampling = work["learning"] / reached + packing, work["sampling"] / reached
    return work["push"] / reached + (max(learning, sampling) if apart else learning + sampling)


def measure(
    name: str, program: PlannedProgram, resident: float, kernels: Mapping[str, float], say: Callable[[str], None]
) -> dict[str, Any]:
    """Compiles a program; returns its figures. `resident`: bytes that its devices hold while it runs."""
    say(f"compiling {name}")
    available = program.topology.chip.allotted
    memory, text = compiled(program.function, program.arguments, program.mesh, available)
    peak = memory.total + resident - program.stays
    figures = {"times": program.times, "peak": peak, "fits": peak <= available, "program": None}
    if text is None:
        return figures
    sizes = layer_sizes(params_of(program), program.mesh) if name != "push" else set()
    counted = counts.count(hlo.parse(text), sizes, kernels, node(program.topology))
    counted = dataclasses.replace(counted, collectives=counted.collectives + program.sent)
    return figures | measured(counted, program.topology)


def longest(config: RLExperiment) -> Experiment:
    """Returns the learner's experiment with the rows of a step whose samples are longest and share nothing."""
    experiment, rows = learner(config), config.micro_rows
    samples = -(-config.problems_an_update // config.minibatches) * config.samples
    batches = -(-samples * config.max_tokens // config.tokens // rows)
    extras = EXTRAS if config.method == "policy_gradient" else ()
    data = dataclasses.replace(experiment.data, rows=rows << (batches - 1).bit_length(), extras=extras)
    return dataclasses.replace(experiment, data=data)


def programs(
    config: RLExperiment, experiment: Experiment, mesh: Mesh, topology: Topology
) -> tuple[dict[str, PlannedProgram], dict[str, float]]:
    """Returns an update's programs, and the bytes of a device that stay there, by what they are.

    mesh: of the devices that learn, all but those of the topology's last `config.sampling_hosts` hosts.
    """
    step, arguments = training_step(experiment, mesh, topology.chip.backend)
    state, model, host = arguments[0], experiment.model, topology.host
    learners = topology.without(config.sampling_hosts)
    sampler_mesh = mesh_by_heads(model, devices(host))
    sampler_model = sampler.decoding_config(model, sampler_mesh.shape["tensor"], config.sampler_dtype or model.dtype)
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        learnt = placed(jax.eval_shape(lambda state: merge(state.params, experiment.lora), state), mesh)
    copied = copy_of(learnt, config, model, mesh, sampler_mesh)
    resident = {
        "parameters": held(state.params), "moments": held(state.optimizer), "reference": held(state.reference),
        "sampler": held(copied),
    }  # fmt: skip
    every = mesh, learners
    runs = {"update": PlannedProgram(step, arguments, held(state), config.minibatches, *every)}
    problems = -(-config.problems_an_update // (config.sampling_hosts or topology.hosts))  # of the host with the most
    if config.prm and kind_of(config.prm) == "run":
        prm, width = read(path_of(config.prm) / RUN), make_mesh(MeshConfig(), devices(host))
        function, scored = _scoring(prm, width, config)
        resident["PRM"] = held(scored[0])
        tokens = problems * config.samples * config.tokens  # every chain in a row of its own
        times = -(-tokens // (width.size * prm.data.tokens))
        runs["scoring"] = PlannedProgram(function, scored, held(scored[0]), times, width, host)
    for name, (function, inputs, times) in _sampling(config, copied, sampler_model, sampler_mesh, problems).items():
        unused = held(copied.get("head", {})) if name == "prefill" else 0.0  # the compiler is not given it
        runs[name] = PlannedProgram(function, inputs, resident["sampler"] - unused, times, sampler_mesh, host)
    # The old copy goes before the new one is made. Where nodes split the parameters, a layer comes from all of them.
    group, index = sampler.layer_places(model)[0]
    stack = {role: learnt["decoder"][f"layers_{group}"][role] for role in index}
    nodes = node(learners) and learners.slices // mesh.shape["data"]
    index = dict.fromkeys(index, jax.ShapeDtypeStruct((), "int32", sharding=NamedSharding(mesh, spec(mesh=mesh))))
    dtype = config.sampler_dtype or model.dtype
    send = sampler.stored_layer, (stack, index, sampler.repeats(model, sampler_mesh.shape["tensor"]), dtype)
    size = held(copied["decoder"]["layers_0"])
    far = size * (nodes - 1) / nodes if nodes > 1 else 0.0
    sent = [
        Collective("all-gather", "weights", between, part, part, 1.0, False, "push")
        for between, part in ((False, size - far), (True, far)) if part
    ]  # fmt: skip
    stays = held(stack)
    if config.sampling_hosts:  # a learner holds a layer's copy while it sends it; with fewer learners they take turns
        turns, between = -(-config.sampling_hosts // learners.hosts), topology.slices > 1
        sent.append(Collective("collective-permute", "weights", between, size, size, turns, False, "push"))
        stays -= size
    runs["push"] = PlannedProgram(*send, stays, model.layers, *every, tuple(sent))
    return runs, {name: size for name, size in resident.items() if size}


def copy_of(learnt: Mapping, config: RLExperiment, model: ModelConfig, mesh: Mesh, sampler_mesh: Mesh) -> dict:
    """Returns the shapes of the sampler's copy, `jprm.methods.policy.sampler.decoding_copy`."""

    def shapes(stored: sampler.Stored, part: Mapping, place_on: Mesh) -> dict:
        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
            arrays = jax.eval_shape(stored, part)
        return jax.tree.map(
            lambda x, place: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(place_on, place)),
            arrays, sampler.places_of(arrays, place_on),
        )  # fmt: skip

    return sampler.decoding_copy(learnt, model, sampler_mesh, config.sampler_dtype or model.dtype, shapes)


def _scoring(prm: Experiment, mesh: Mesh, config: RLExperiment) -> tuple[Callable, tuple[Any, ...]]:
    """Returns what scores a batch of one row a device, the PRM stored as `prm_dtype`."""
    function, (params, model, *rest) = scoring_step(prm, mesh)
    if config.prm_dtype:
        dtype = config.prm_dtype
        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
            decoder = jax.eval_shape(lambda decoder: held_decoder(decoder, dtype), params["decoder"])
        params = {**params, "decoder": placed(decoder, mesh)}
        model = model if dtype == "int8" else dataclasses.replace(model, dtype=dtype)
    return function, (params, model, *rest)


def packing_seconds(config: RLExperiment, experiment: Experiment) -> float:
    """Returns how long this machine's processor packs an update's rows for: every host packs them all.

    It packs one group of the longest samples, which share no token.
    """
    T, V, rng = config.max_tokens, experiment.model.vocab_size, np.random.default_rng(0)
    drawn = [tuple(rng.integers(1, V, T).tolist()) for _ in range(config.samples)]
    samples = [Rollout(ids, np.zeros(T, np.float32), (T,), ("",), True) for ids in drawn]
    prompt = rng.integers(1, V, max(1, config.tokens - T)).tolist()
    began = time.process_time()  # a busy machine takes longer, which a host would not
    tree = group_tree("longest", prompt, samples, [np.ones(T)] * config.samples)
    packed([tree], experiment.data, chain_rows(experiment.model))
    return (time.process_time() - began) * config.problems_an_update


def _sampling(
    config: RLExperiment, params: Mapping, model: ModelConfig, mesh: Mesh, problems: int
) -> dict[str, tuple[Callable, tuple[Any, ...], int]]:
    """Returns prefill and one step of decoding, of a batch of the longest prompts that rows leave room for.

    `problems` are of one host. Each is a function, its arguments, and how often an update runs it.
    """
    split = row_parts(mesh)
    alone = config.tokens - config.max_tokens <= config.max_tokens
    m, most = sampler.jobs_at_once(problems, config.samples, config.sampler_rows, split, alone)
    jobs = problems * -(-config.samples // m)
    prompts, distinct = (split * padded_size(-(-min(most, n) // split)) for n in (jobs, problems))
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
        past = jax.eval_shape(lambda params, *inputs: decode.prefill(params, model, *inputs), params, *prompt[2:])
        cache = jax.eval_shape(lambda: decode.empty_cache(model, rows_B, room))
        key_B = jax.eval_shape(decode.keys, rows(rows_B, dtype="uint32"), rows(rows_B, dtype="uint32"))
    samples = decode.DecodingState(
        whole(), rows(rows_B), rows(rows_B), rows(rows_B), rows(rows_B), rows(rows_B, room),
        rows(rows_B, room, dtype="float32"), rows(rows_B), rows(rows_B, dtype="float32"), placed(cache, mesh),
    )  # fmt: skip
    step = (
        params, model, config.temperature, 1.0, samples, placed(past, mesh), rows(rows_B), placed(key_B, mesh),
        whole(model.vocab_size, 2, dtype="int8"), whole(model.vocab_size, dtype="bool"), whole(dtype="bool"),
        whole(),
    )  # fmt: skip
    token = jax.jit(decode.next_token, static_argnums=(1, 2, 3), donate_argnums=4)
    return {"prefill": (decode.prefill, prompt, batches), "decode": (token, step, batches * config.max_tokens)}


def held(arrays: Any) -> float:
    return sum(
        math.prod(x.sharding.shard_shape(x.shape)) * jnp.dtype(x.dtype).itemsize for x in jax.tree.leaves(arrays)
    )


def params_of(program: PlannedProgram) -> Any:
    """Returns the parameters among a program's arguments, of which they are the first."""
    return getattr(program.arguments[0], "params", program.arguments[0])


def tables(plan: Mapping[str, Any]) -> Iterator[Table | str]:
    mesh, host_mesh = (
        " ".join(f"{axis}={size}" for axis, size in sizes.items()) for sizes in (plan["mesh"], plan["host"]["mesh"])
    )
    slices = f"{plan['slices']} x " if plan["slices"] > 1 else ""
    apart, chips, resident = plan["sampling_hosts"], plan["host"]["chips"], plan["resident"]
    who = f"{apart} host{'s' * (apart > 1)} at the end only for sampling, each" if apart else "each host samples"
    yield (
        f"{plan['experiment']}, reinforcement learning: {plan['parameters'] / 1e9:.2f} B parameters on"
        f" {slices}{plan['topology']}, {plan['chips']} chips; mesh {mesh}; an update of at most {plan['rows']} rows of"
        f" {plan['tokens']:,} tokens a step; {who} on {chips} chips, {host_mesh}"
    )
    sampled = [part for part in resident if part in SAMPLED]
    learnt = [part for part in resident if part not in SAMPLED]
    sides = {" that learns": learnt, " that samples": sampled} if apart else {"": [*resident]}
    for whose, parts in sides.items():
        sizes = [(part, resident[part]) for part in parts] + [("total", sum(resident[part] for part in parts))]
        rows = [[part, f"{size / GIB:.2f}"] for part, size in sizes]
        yield Table("memory" + whose, (f"on a device{whose} all the time", "GiB"), rows)
    columns = ("program", "times", "peak GiB", "FLOPs", "HBM bytes", "sent bytes", "at least", "expected", "by")
    rows = []
    for name, figures in plan["programs"].items():
        peak = f"{figures['peak'] / GIB:.2f}" + ("" if figures["fits"] else ": does not fit")
        cells = [name, f"{figures['times']:,}", peak]
        if program := figures["program"]:
            received = program["received"] + program["between_slices"]
            cells += [f"{x:.4g}" for x in (program["flops"], program["hbm_bytes"], received)]
            bounds = figures["bounds"]
            hoped = seconds(bounds["expected"]) if bounds["expected"] else ""
            cells += [seconds(bounds["step"]), hoped, bounds["by"]]
        rows.append(cells + [""] * (len(columns) - len(cells)))
    packing = seconds(plan["host"]["packing_seconds"])
    rows.append(["packing", "1", "", "", "", "", packing, packing, "this machine's processor"])
    yield Table("programs", columns, rows)
    fits = "it fits" if plan["fits"] else "it does not fit"
    yield f"{plan['available'] / GIB:.2f} GiB are available: {fits}"
    if plan["update_seconds"] is not None:
        least = seconds(plan["update_seconds"])
        yield f"an update takes {least} or more, if all samples have the largest length"
        if apart:
            work, packing = plan["work"], plan["host"]["packing_seconds"]
            learning, sampling = seconds(work["learning"] + packing), seconds(work["sampling"])
            yield f"learning and packing take {learning}, sampling and scoring {sampling} of it at the same time"
    if plan["expected_seconds"] is not None:
        yield (
            f"expected: {seconds(plan['expected_seconds'])}, the programs at the fraction of the chip's rate that"
            " MaxText publishes for its training"
        )
    yield f"planned in {plan['seconds_to_plan']:.0f} s"
