"""The registry of benchmarks, in the order of suites, pages and model cards."""

from jprm.evaluate.benchmark import Benchmark
from jprm.evaluate.benchmarks import (
    best_of_n,
    calibration,
    contamination,
    diagnostics,
    drift,
    equal_cost,
    prmbench,
    processbench,
    searches,
    steps,
)

BENCHMARKS: dict[str, Benchmark] = {
    benchmark.name: benchmark
    for benchmark in (
        processbench.BENCHMARK,
        prmbench.BENCHMARK,
        steps.BENCHMARK,
        best_of_n.BENCHMARK,
        calibration.BENCHMARK,
        diagnostics.BENCHMARK,
        equal_cost.BENCHMARK,
        searches.BENCHMARK,
        drift.BENCHMARK,
        contamination.BENCHMARK,
    )
}
