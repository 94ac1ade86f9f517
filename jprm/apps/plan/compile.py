"""Compiles an experiment's step for absent chips, from shapes alone: without weights or data."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jprm import objectives
from jprm.apps.plan.topologies import GIB
from jprm.experiment import Experiment
from jprm.model.heads import find
from jprm.model.lora import merge
from jprm.model.mesh import row_places
from jprm.rows import Rows, empty_rows
from jprm.score.scorer import readout_of_rows
from jprm.train import State, initial_state, make_step, reference_params
from jprm.train.optimizer import make_optimizer


def abstract_rows(mesh: Mesh | AbstractMesh, *lead: int, tokens: int, slots: int, extras: tuple[str, ...] = ()) -> Rows:
    """Returns `Rows` of shapes and shardings without values: (*lead, ...), with rows on the last axis of `lead`."""

    def abstract(place: Any, arrays: Any) -> Any:
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct((*lead, x.shape[1]), x.dtype, sharding=place), arrays)

    return jax.tree.map(abstract, row_places(mesh, len(lead) - 1), empty_rows(1, tokens, slots, extras))


def abstract_state(experiment: Experiment, mesh: Mesh | AbstractMesh) -> State:
    """Returns shapes, types and shardings of the initial training state, without reading the base model's files."""
    abstract = mesh if isinstance(mesh, AbstractMesh) else mesh.abstract_mesh
    with jax.sharding.use_abstract_mesh(abstract):
        state = jax.eval_shape(lambda: initial_state(experiment, load_base=False))
        reference = jax.eval_shape(lambda: reference_params(experiment, load=False))

    def placed(x: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, x.sharding.spec if x.ndim else P()))

    return jax.tree.map(placed, dataclasses.replace(state, reference=reference))


def training(
    experiment: Experiment, mesh: Mesh | AbstractMesh, backend: str = "tpu"
) -> tuple[Callable, tuple[Any, ...]]:
    """Returns the step that `jprm train` runs on the backend, and its arguments."""
    e = experiment
    objective = objectives.find(e.objective, e.objective_options)
    objectives.check(objective, e.task)
    step = make_step(objective, make_optimizer(e.optimizer), e.task, backend)
    data = experiment.data
    lead = data.rows // data.micro_rows, data.micro_rows
    rows = abstract_rows(mesh, *lead, tokens=data.tokens, slots=data.slots, extras=data.extras)
    state = abstract_state(experiment, mesh)
    return step, (state, rows, jax.ShapeDtypeStruct((), "float32", sharding=state.step.sharding))


def scoring(experiment: Experiment, mesh: Mesh | AbstractMesh) -> tuple[Callable, tuple[Any, ...]]:
    """Returns what `jprm score` runs on a batch of one row a device, and its arguments."""
    state, tokens = abstract_state(experiment, mesh), experiment.data.tokens
    with jax.sharding.use_abstract_mesh(mesh if isinstance(mesh, AbstractMesh) else mesh.abstract_mesh):
        params = jax.eval_shape(lambda state: merge(state.params, experiment.lora), state)
    params = jax.tree.map(lambda x: x.update(sharding=NamedSharding(mesh, x.sharding.spec)), params)
    rows = abstract_rows(mesh, mesh.shape["data"] * mesh.shape["fsdp"], tokens=tokens, slots=tokens // 2)
    return readout_of_rows, (params, experiment.model, rows, find(experiment.model.head).readout)


@dataclasses.dataclass(frozen=True)
class Memory:
    """HBM bytes of one device. Only `total` and `available` are known where the program does not fit.

    On TPUs `total` is the most that the compiler assigns at once, by which it refuses a program; `temporaries`, its
    other figure, counts some buffers twice.
    """

    total: float
    available: float
    arguments: float | None = None
    temporaries: float | None = None

    @property
    def fits(self) -> bool:
        return self.total <= self.available


def compiled(function: Callable, args: tuple, mesh: Mesh, available: float) -> tuple[Memory, str | None]:
    """Returns the compiled program's memory and its HLO text; the text is None where it does not fit the chip."""
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
    """Returns the figures in the compiler's refusal. Raises RuntimeError with the message where it has none."""
    found = re.search(r"\(([\d.]+)([KMGT]?)\) exceeds available HBM \(([\d.]+)([KMGT]?)\)", message) or re.search(
        r"Used ([\d.]+)([KMGT]?) of ([\d.]+)([KMGT]?) hbm", message
    )
    if not found:
        raise RuntimeError(f"the compiler failed: {message}")
    used, unit, limit, limit_unit = found.groups()
    return Memory(float(used) * UNITS[unit], float(limit) * UNITS[limit_unit])
