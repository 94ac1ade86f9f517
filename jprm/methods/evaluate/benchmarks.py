"""The registry of benchmarks, in the order of suites, pages and model cards. To add one, add a file and a line here."""

from __future__ import annotations

from jprm.methods.evaluate.benchmark import Benchmark
from jprm.options import find_part

BENCHMARKS: dict[str, Benchmark | str] = {
    "processbench": "jprm.methods.evaluate.processbench:BENCHMARK",
    "prmbench": "jprm.methods.evaluate.prmbench:BENCHMARK",
    "socratic_prmbench": "jprm.methods.evaluate.prmbench:SOCRATIC_PRMBENCH",
    "mr_ben": "jprm.methods.evaluate.mistakes:MR_BEN",
    "big_bench_mistake": "jprm.methods.evaluate.mistakes:BIG_BENCH_MISTAKE",
    "hard2verify": "jprm.methods.evaluate.mistakes:HARD2VERIFY",
    "steps": "jprm.methods.evaluate.steps:BENCHMARK",
    "classes": "jprm.methods.evaluate.classes:BENCHMARK",
    "agents": "jprm.methods.evaluate.agents:BENCHMARK",
    "best_of_n": "jprm.methods.evaluate.best_of_n:BENCHMARK",
    "calibration": "jprm.methods.evaluate.calibration:BENCHMARK",
    "diagnostics": "jprm.methods.evaluate.diagnostics:BENCHMARK",
}
"""Benchmarks, or `module:NAME` references that are imported on first use."""


def registered() -> dict[str, Benchmark]:
    return {name: find(name) for name in BENCHMARKS}


def find(name: str) -> Benchmark:
    """Returns a benchmark by name, or the user's own as `module:NAME` or `FILE.py:NAME`; ValueError if unknown."""
    return find_part(name, BENCHMARKS, "benchmark", Benchmark, files=True)
