"""Time and memory of a best-of-n report: all rules and votes for every n, 500 problems of 1,860 samples, 1,000 draws.

    python -m experiments.bench.best_of_n_speed [--problems 500] [--samples 1860]

The pools are made up: 3 to 8 steps a sample, scores from a scorer that knows something, ten answers a problem. Reading
them from a file is left out. The last line is one JSON object: `seconds` of wall clock, compilation included,
`cpu_seconds`, and `peak_bytes` of the process, the pools included, of which `pools_bytes` before the report began.
"""

import argparse
import json
import resource
import time

import numpy as np

from jprm.methods.evaluate.best_of_n import best_of_n_report
from jprm.tree import ReasoningTree, tree_of


def pools(problems: int, count: int) -> list[ReasoningTree]:
    rng = np.random.default_rng(0)
    steps = {length: ["a step"] * length for length in range(3, 9)}  # shared: the texts are no part of the work
    trees = []
    for p in range(problems):
        skill = rng.beta(1, 1)
        samples = []
        for length, correct in zip(rng.integers(3, 9, count), rng.random(count) < skill, strict=True):
            scores = 1 / (1 + np.exp(-(rng.normal(size=length) + (1.0 if correct else 0.0))))
            answer = 0 if correct else int(rng.integers(1, 10))
            samples.append({"steps": steps[int(length)], "scores": scores.tolist(), "answer": str(answer),
                         "correct": bool(correct)})  # fmt: skip
        trees.append(tree_of({"problem": f"problem {p}", "answer": "0", "samples": samples}))
    return trees


def peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def main() -> None:
    args = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    args.add_argument("--problems", type=int, default=500)
    args.add_argument("--samples", type=int, default=1860, help="of every problem (default 1860)")
    args = args.parse_args()
    trees = pools(args.problems, args.samples)
    before, start, busy = peak(), time.perf_counter(), time.process_time()
    report = best_of_n_report(trees, seed=0)
    seconds, cpu = time.perf_counter() - start, time.process_time() - busy
    assert report["n_max"] == args.samples
    print(json.dumps({"bench": "best_of_n_speed", "seconds": seconds, "cpu_seconds": cpu, "peak_bytes": peak(),
                      "pools_bytes": before, "problems": args.problems, "samples": args.samples}))  # fmt: skip


if __name__ == "__main__":
    main()
