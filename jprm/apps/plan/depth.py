"""Figures of a program of many layers, from those of two programs of few.

Where every layer is written out, each adds the same instructions and arrays: figures are affine in the number of
layers. `tests/test_plan_rl.py` holds them against a program of all layers.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from jprm.apps.plan.counts import Program
from jprm.model.config import ModelConfig

PERIODS = 2, 4
"""Periods of the layers' pattern in the two programs: in fewer, the first and the last layer are neighbours."""


def depths(model: ModelConfig) -> tuple[int, ...]:
    """Returns the layers of the programs to compile: two numbers, or the model's own where that is no more."""
    found = tuple(periods * max(1, len(model.windows)) for periods in PERIODS)
    return found if found[-1] < model.layers else (model.layers,)


def total_at(totals: Mapping[int, float], layers: int) -> float:
    """Returns a figure at `layers` layers from those at one or two numbers of layers."""
    return sum(weight * totals[depth] for depth, weight in _weights(totals, layers).items())


def program_at(programs: Mapping[int, Program], layers: int) -> Program:
    """Returns the counts of the program with `layers` layers, as `total_at` does.

    Its collectives are those of both programs, each counted with its program's weight. The smaller program has a
    negative weight.
    """
    weights = _weights(programs, layers)
    return Program(
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
