"""Chooses among a pool's programs, by what is known without the benchmark's tests.

    python experiments/code_pool/choose.py --pools runs/code_pool/pools.jsonl --out runs/code_pool/chosen.json

`pass@k` is the exact expectation over subsets of k of a problem's programs. A choice has the expected accuracy of a
program of its best group, ties as a random one of them. Intervals are 95 %, over problems.

    dual agreement   CodeT (Chen et al. 2022, arXiv 2207.10397): programs that pass the same of the model's own tests
                     are a group. Its score is the root of their number times the tests they pass, each as often as the
                     model wrote it. Where no program passes a test, any is chosen, as in its script.
    most tests       the programs that pass the most of these tests
    share            the largest group of programs that answered the calls of all tests alike, if they ran to their end
    shortest, longest  by characters
    NAME             the last step score of a file of scored pools (`--scores NAME=FILE`), on the problems that it has
    NAME vote        the group of `share` whose programs' last step scores have the largest sum
"""

from __future__ import annotations

import argparse
import collections
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Bool, Float

from jprm.io.outputs import write_json
from jprm.statistics import difference, draws, interval, weighted_mean
from jprm.tree import read_records

Pool = Mapping[str, Any]


def pass_at(correct_N: Bool[np.ndarray, " N"], k: int) -> float:
    """Returns the chance that k different programs, drawn at random, have a correct one: 1 - C(N - c, k) / C(N, k)."""
    n, c = len(correct_N), int(correct_N.sum())
    return 1.0 if n - c < k else 1 - float(np.prod(1 - k / np.arange(n - c + 1, n + 1)))


def dual_agreement(pool: Pool) -> Float[np.ndarray, " N"]:
    """Returns CodeT's score of each program; all 0 where none passes a test."""
    weights = np.array(pool["weights"], float)
    groups = collections.Counter(tuple(sample["passes"]) for sample in pool["samples"])
    return np.array(
        [
            np.sqrt(groups[key]) * weights[list(key)].sum()
            for sample in pool["samples"]
            for key in [tuple(sample["passes"])]
        ]
    )


def most_tests(pool: Pool) -> Float[np.ndarray, " N"]:
    """Returns how many of the model's tests each program passes, each as often as it was written."""
    weights = np.array(pool["weights"], float)
    return np.array([weights[list(sample["passes"])].sum() for sample in pool["samples"]])


def share(pool: Pool, weight_N: Float[np.ndarray, " N"] | None = None) -> Float[np.ndarray, " N"]:
    """Returns how many programs answered the tests' calls as each did, or the sum of their weights.

    A program that did not run to its end has 0.
    """
    sums: dict[str, float] = collections.defaultdict(float)
    behaviour = [sample["behaviour"] for sample in pool["samples"]]
    for outcome, weight in zip(behaviour, np.ones(len(behaviour)) if weight_N is None else weight_N, strict=True):
        sums[outcome] += weight
    return np.array([0 if outcome is None else sums[outcome] for outcome in behaviour], float)


def length(pool: Pool) -> Float[np.ndarray, " N"]:
    return np.array([sum(map(len, sample["steps"])) for sample in pool["samples"]], float)


CHOICES: dict[str, Callable[[Pool], Float[np.ndarray, " N"]]] = {
    "dual agreement": dual_agreement,
    "most tests": most_tests,
    "share": share,
    "shortest": lambda pool: -length(pool),
    "longest": length,
}


def chosen(key_N: Float[np.ndarray, " N"], correct_N: Bool[np.ndarray, " N"]) -> float:
    """Returns the expected accuracy of a program of the highest key."""
    return float(np.mean(correct_N[key_N == key_N.max()]))


def report(
    pools: Sequence[Pool], keys: Mapping[str, Sequence[Float[np.ndarray, " N"]]], seed: int = 0
) -> dict[str, Any]:
    """Returns pass@k and every choice's accuracy, with its gains over a random program and over `share`.

    Gains are paired over problems.
    """
    correct = [np.array([sample["correct"] for sample in pool["samples"]]) for pool in pools]
    problems = [pool["problem"] for pool in pools]

    def drawn(values: Sequence[float]) -> Any:
        return draws(lambda w: weighted_mean(np.array(values), w), problems, seed=seed)

    at = {k: drawn([pass_at(outcomes, k) for outcomes in correct]) for k in (1, 2, 5, 10, 100)}
    by_choice = {
        name: drawn([chosen(behaviours, right) for behaviours, right in zip(key, correct, strict=True)])
        for name, key in keys.items()
    }
    rows = {
        name: interval(accuracy).json() | {"gain": difference(accuracy, at[1]).json()}
        for name, accuracy in by_choice.items()
    }
    for name in rows.keys() - {"share"} if "share" in by_choice else ():
        rows[name]["over_share"] = difference(by_choice[name], by_choice["share"]).json()
    return {
        "n": len(pools),
        "pass_at": {str(k): interval(accuracy).json() for k, accuracy in at.items()},
        "chosen": rows,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--pools", required=True, type=pathlib.Path)
    parser.add_argument("--scores", nargs="*", default=[], metavar="NAME=FILE")
    parser.add_argument("--out", required=True, type=pathlib.Path)
    options = parser.parse_args()
    pools = list(read_records(options.pools))
    results = {"all": report(pools, {name: [key(pool) for pool in pools] for name, key in CHOICES.items()})}
    for name, path in (argument.split("=", 1) for argument in options.scores):
        by_problem = {record["problem"]: record["samples"] for record in read_records(path)}
        scored = [pool for pool in pools if pool["problem"] in by_problem]
        keys = {other: [key(pool) for pool in scored] for other, key in CHOICES.items()}
        last = [np.array([sample["scores"][-1] for sample in by_problem[pool["problem"]]]) for pool in scored]
        keys |= {name: last, f"{name} vote": [share(pool, score_N) for pool, score_N in zip(scored, last, strict=True)]}
        results[name] = report(scored, keys)
    write_json(options.out, results)
    for name, result in results.items():
        print(f"{name}: {result['n']} problems")
        for k, figures in result["pass_at"].items():
            print(f"  pass@{k:8} {_said(figures)}")
        for choice, figures in result["chosen"].items():
            over = f", over shares {_said(figures['over_share'])}" if "over_share" in figures else ""
            print(f"  {choice:15} {_said(figures)}, gain {_said(figures['gain'])}{over}")


def _said(figures: Mapping[str, float]) -> str:
    return f"{100 * figures['value']:.1f} [{100 * figures['low']:.1f}, {100 * figures['high']:.1f}]"


if __name__ == "__main__":
    main()
