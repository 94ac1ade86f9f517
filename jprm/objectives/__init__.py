"""Objectives: what training minimises, as functions `objective(params, rows, config) -> (loss_sum, count, metrics)`.

`params["model"]` are the model's parameters, adapters merged; `params["reference"]` those of the frozen second model,
where the experiment has one. `rows` is a micro-batch; `config` is an `ObjectiveConfig`. The loss is the mean: all sums
over micro-batches and devices, divided by all counts. `metrics` are as in `jprm.objectives.metrics`.

An objective may have a method `check(config)` that raises ValueError where it does not fit, before anything is loaded.
A model scores by its head, unless its objective has a number `log_ratio`: then scores are that number times the sum of
log(p / p_reference) over a chain's tokens (`jprm.score.implicit`), p_reference being the experiment's reference model.
The run records the number, so that loading it does not need the objective.

Hyperparameters are fields of a frozen dataclass, with defaults. An experiment sets them in `objective_options`:

    @dataclasses.dataclass(frozen=True)
    class Hinge:
        margin: float = 1.0  # `--set objective_options.margin=0.5`

        def __call__(self, params, rows, config): ...

    hinge = Hinge()  # register or name this instance; or name the class, whose fields may then lack defaults

Options are the fields of type bool, int, float, str or Literal; other fields are no options.
"""

from __future__ import annotations

import dataclasses
import os
import pathlib
import typing
from collections.abc import Callable, Mapping
from typing import Any, cast

from jaxtyping import Scalar

from jprm import registry
from jprm.experiment import LOG_RATIO, ObjectiveConfig
from jprm.io.storage import path_of
from jprm.objectives.steps import (
    Pointwise,
    bradley_terry,
    cross_entropy,
    likelihood,
    next_token,
    pqm,
    squared_error,
    td_lambda,
    ternary_cross_entropy,
)
from jprm.options import OptionError, described, values_of
from jprm.rows import Rows

Objective = Callable[[dict[str, Any], Rows, ObjectiveConfig], tuple[Scalar, Scalar, dict[str, Any]]]

OBJECTIVES: dict[str, Objective | str] = {
    "cross_entropy": cross_entropy,
    "ternary_cross_entropy": ternary_cross_entropy,
    "squared_error": squared_error,
    "next_token": next_token,
    "likelihood": Pointwise(likelihood),  # of any head that has one
    "policy_gradient": "jprm.objectives.policy_gradient:policy_gradient",  # on groups that `jprm.methods.rl` samples
    "bradley_terry": bradley_terry,
    "pqm": pqm,
    "td_lambda": td_lambda,
    "implicit": "jprm.objectives.implicit:implicit",
}
"""Objectives by name. One written `module:NAME` is imported when it is asked for."""

PLAIN = (bool, int, float, str)
"""Types of options, beside Literal."""

COPY = "objective.py"
"""The copy, in a run's folder, of the file that defines its objective."""


def find(name: str, options: Mapping[str, Any] | None = None, workdir: str | os.PathLike | None = None) -> Objective:
    """Returns the objective of an experiment. Equal names and options give equal objectives, which hash alike.

    Args:
        name: a registered name, `module:NAME`, or `FILE.py:NAME`, of a function or of a dataclass with `__call__`.
        options: hyperparameters in place of the objective's defaults.
        workdir: the run's folder. Its copy of FILE.py is read where FILE.py is gone.

    Raises ValueError where there is none, where FILE.py is not what the run started with, or for unknown options.
    """
    text = source(name, workdir)
    if text is None:
        return with_options(registry.find(name, OBJECTIVES, "objective"), options or {}, name)
    path, _, function = name.rpartition(":")
    objective = registry.defined(path, text).get(function)
    if not callable(objective):
        raise ValueError(f"objective={name!r}: {path} defines no function {function}")
    return with_options(objective, options or {}, name)


def with_options(objective: Any, options: Mapping[str, Any], name: str) -> Objective:
    """Returns the objective, called `name` in errors, with these options in place of its defaults.

    Raises ValueError, listing the objective's options, for one that is unknown, missing, or of another type or range;
    and for an objective that does not hash.
    """
    kinds = option_types(objective)
    try:
        values = values_of(kinds, options)
        if isinstance(objective, type):
            objective = objective(**values)
        elif values:
            objective = dataclasses.replace(objective, **values)
        hash(objective)  # a step is compiled once for each objective: a dataclass must be frozen
    except (TypeError, ValueError) as error:
        reason = f"{error.field}: {error.reason}" if isinstance(error, OptionError) else error
        known = described(kinds)
        raise ValueError(f"objective={name!r}, of which objective_options may set: {known}: {reason}") from error
    return cast(Objective, objective)


def recorded(objective: Objective) -> tuple[str, dict[str, Any]]:
    """Returns the name and the options by which an experiment records an objective that a program holds as an object.

    `find` takes them, unless the object is in no module: a function of a notebook or of another function.
    """
    if not dataclasses.is_dataclass(objective):
        kind = objective if hasattr(objective, "__qualname__") else type(objective)
        return f"{kind.__module__}:{kind.__qualname__}", {}
    kind = type(objective)
    for name in OBJECTIVES:
        known = registry.find(name, OBJECTIVES, "objective")
        if type(known) is kind:
            values = {option: getattr(objective, option) for option in option_types(known)}
            options = {option: value for option, value in values.items() if value != getattr(known, option)}
            if dataclasses.replace(cast(Any, known), **options) == objective:
                return name, options
    return f"{kind.__module__}:{kind.__qualname__}", {name: getattr(objective, name) for name in option_types(kind)}


def option_types(objective: Any) -> dict[str, Any]:
    """Returns the options of an objective: the fields of a dataclass, or of its instance, whose types are plain."""
    if not dataclasses.is_dataclass(objective):
        return {}
    kinds = typing.get_type_hints(objective if isinstance(objective, type) else type(objective))
    plain = {field.name: kinds[field.name] for field in dataclasses.fields(objective) if field.init}
    return {name: kind for name, kind in plain.items() if kind in PLAIN or typing.get_origin(kind) is typing.Literal}


def check(objective: Objective, config: ObjectiveConfig) -> None:
    """Calls the objective's own `check`, if it has one."""
    if hasattr(objective, "check"):
        objective.check(config)


def log_ratio(objective: Objective) -> float | None:
    """Returns the factor of the log ratio by which the objective's model scores; None where it scores by its head."""
    return getattr(objective, LOG_RATIO, None)


def source(name: str, workdir: str | os.PathLike | None = None) -> str | None:
    """Returns the text of the file that `name` names, None where it names no file; errors as in `find`."""
    path = pathlib.Path(name.rpartition(":")[0])
    if path.suffix != ".py":
        return None
    files = [path, path_of(workdir) / COPY] if workdir else [path]
    texts = [file.read_text() for file in files if file.is_file()]
    if not texts:
        raise ValueError(f"objective={name!r}: there is no file {path}")
    if len(set(texts)) > 1:
        raise ValueError(f"{path}: differs from {files[1]}, which the run started with. Use another --workdir")
    return texts[0]
