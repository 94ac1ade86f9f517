"""Objectives: what training minimises, as functions `objective(params, rows, config) -> (loss_sum, count, metrics)`.

`params["model"]` are the model's parameters, adapters merged; `params["reference"]` those of the frozen second model,
where the experiment has one. `rows` is a micro-batch; `config` is an `ObjectiveConfig`. The loss is the mean: all sums
over micro-batches and devices, divided by all counts. `metrics` are as in `jprm.objectives.metrics`.

An objective may have a method `check(config)` that raises ValueError where it does not fit, before anything is loaded.
"""

from __future__ import annotations

import functools
import importlib.machinery
import importlib.util
import os
import pathlib
import sys
from collections.abc import Callable
from typing import Any, cast

from jaxtyping import Scalar

from jprm import registry
from jprm.experiment import ObjectiveConfig
from jprm.objectives.cross_entropy import cross_entropy
from jprm.objectives.next_token import next_token
from jprm.objectives.pointwise import Pointwise, likelihood
from jprm.objectives.squared_error import squared_error
from jprm.objectives.ternary_cross_entropy import ternary_cross_entropy
from jprm.rows import Rows

Objective = Callable[[dict[str, Any], Rows, ObjectiveConfig], tuple[Scalar, Scalar, dict[str, Any]]]

OBJECTIVES: dict[str, Objective] = {
    "cross_entropy": cross_entropy,
    "ternary_cross_entropy": ternary_cross_entropy,
    "squared_error": squared_error,
    "next_token": next_token,
    "likelihood": Pointwise(likelihood),  # of any head that has one
}

COPY = "objective.py"
"""The copy, in a run's folder, of the file that defines its objective."""


def find(name: str, workdir: str | os.PathLike | None = None) -> Objective:
    """Returns the objective of an experiment.

    Args:
        name: a registered name, `module:function`, or `FILE.py:function`.
        workdir: the run's folder. Its copy of FILE.py is read where FILE.py is gone.

    Raises ValueError where there is none, or where FILE.py is not what the run started with.
    """
    text = source(name, workdir)
    if text is None:
        return registry.find(name, OBJECTIVES, "objective")
    path, _, function = name.rpartition(":")
    found = _defined(path, text).get(function)
    if not callable(found):
        raise ValueError(f"objective={name!r}: {path} defines no function {function}")
    return cast(Objective, found)


def check(objective: Objective, config: ObjectiveConfig) -> None:
    """Calls the objective's own `check`, if it has one."""
    if hasattr(objective, "check"):
        objective.check(config)


def source(name: str, workdir: str | os.PathLike | None = None) -> str | None:
    """Returns the text of the file that `name` names, None where it names no file; errors as in `find`."""
    path = pathlib.Path(name.rpartition(":")[0])
    if path.suffix != ".py":
        return None
    files = [path, pathlib.Path(workdir) / COPY] if workdir else [path]
    texts = [file.read_text() for file in files if file.is_file()]
    if not texts:
        raise ValueError(f"objective={name!r}: there is no file {path}")
    if len(set(texts)) > 1:
        raise ValueError(f"{path}: differs from {files[1]}, which the run started with. Use another --workdir")
    return texts[0]


@functools.cache
def _defined(path: str, text: str) -> dict[str, Any]:
    """Runs a file, once, and returns what it defines."""
    spec = importlib.machinery.ModuleSpec(f"jprm_objective_{pathlib.Path(path).stem}", loader=None)
    module = importlib.util.module_from_spec(spec)
    module.__file__, sys.modules[spec.name] = path, module  # a dataclass of the file looks there for names
    exec(compile(text, path, "exec"), module.__dict__)
    return module.__dict__
