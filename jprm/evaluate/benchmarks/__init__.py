"""The registry of benchmarks, in the order of suites, pages and model cards. A new one is a file and a line here."""

import importlib

from jprm import registry
from jprm.evaluate.benchmark import Benchmark

NAMES = (
    "processbench",
    "prmbench",
    "steps",
    "best_of_n",
    "calibration",
    "diagnostics",
    "equal_cost",
    "searches",
    "drift",
    "contamination",
)

BENCHMARKS: dict[str, Benchmark] = {
    benchmark.name: benchmark
    for benchmark in (importlib.import_module(f"{__name__}.{name}").BENCHMARK for name in NAMES)
}


def find(name: str) -> Benchmark:
    """Returns the benchmark of a name, or the user's own as `module:NAME` or `FILE.py:NAME`."""
    return registry.find(name, BENCHMARKS, "benchmark", Benchmark, files=True)
