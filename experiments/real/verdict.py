"""The verdict on readers of states, from the kept pools: see README.md for the protocol.

    python experiments/real/verdict.py --base runs/models/qwen2.5-coder-0.5b.gguf --out runs/real/verdict

Pools are `pools/own_train.jsonl.gz` and `pools/own_test.jsonl.gz` beside this file, and with --shared the first
problems of other policies. States that are missing are computed first, and resumably.
"""

from __future__ import annotations

import functools
import pathlib
import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
import tyro

sys.path.insert(0, str(pathlib.Path(__file__).parent))
import state_readers as readers  # pyright: ignore[reportMissingImports]
import token_states as states  # pyright: ignore[reportMissingImports]

from jprm.io.outputs import Bar, write_json
from jprm.methods.evidence import sources as evidence
from jprm.methods.evidence.fit import bucket, policy_of
from jprm.methods.evidence.ranker import (
    Chains,
    Ranker,
    auroc_in_problems,
    calibrated,
    fit_ranker,
    mixed_problems,
    pairs_of,
    vote_correct,
)
from jprm.methods.evidence.verifier import vote_weights
from jprm.tree import ReasoningTree, read_trees

HERE = pathlib.Path(__file__).parent
LAYERS = (3, 6, 9, 12, 15, 18, 21, 24)
SEEDS, FOLDS, DRAWS = 3, 5, 2000
OTHERS = ("chatgpt", "llama13b", "llama7b")


class Pool(NamedTuple):
    """The samples of a file: text evidence and outcomes, states, the bucket of each sample's problem."""

    chains: Chains
    samples: list[Any]
    bucket_M: np.ndarray

    def where(self, chosen_M: np.ndarray) -> Pool:
        some = [x for x, chosen in zip(self.samples, chosen_M, strict=True) if chosen]
        return Pool(self.chains.where(chosen_M), some, self.bucket_M[chosen_M])


def read(name: str, trees: Sequence[ReasoningTree], folder: pathlib.Path) -> Pool:
    policy = policy_of(name, trees, [evidence.find(source) for source in evidence.DEFAULT])
    samples = [sample for tree in trees for sample in states.read(folder, tree)]
    bucket_M = np.array([bucket(tree.problem, 10) for tree in trees])[policy.chains.problem_M]
    return Pool(policy.chains, samples, bucket_M)


class Arm(NamedTuple):
    """What chooses: log odds of every sample of a pool; one for each seed."""

    odds: Callable[[Pool], np.ndarray]


def of_number(score: Callable[[Sequence[Any]], np.ndarray], calibration: Pool) -> Arm:
    """Returns the arm of one number: its log odds by a logistic regression on samples that it was not fitted on."""

    def column(pool: Pool) -> Chains:
        return pool.chains._replace(x_MF=score(pool.samples)[:, None].astype(float))

    ranker = Ranker.standardising(column(calibration).x_MF)
    ranker = calibrated(Ranker(ranker.mean_F, ranker.scale_F, np.ones(1)), column(calibration))
    return Arm(lambda pool: ranker.log_odds(column(pool).x_MF))


def fitting_of(train: Pool, valid: Pool) -> readers.Fitting:
    return readers.Fitting(train.samples, train.chains.correct_M > 0.5, valid.samples, valid.chains.correct_M > 0.5)


def arms(own: Pool, seed: int) -> dict[str, Arm]:
    """Returns all arms, fitted on the policy's training problems."""
    parts = {what: own.where(np.isin(own.bucket_M, tenths)) for what, tenths in
             (("train", range(7)), ("valid", [7]), ("calibration", [8, 9]))}  # fmt: skip
    train, valid, calibration = parts["train"], parts["valid"], parts["calibration"]
    result = {name: of_number(score, calibration) for name, score in readers.UNTRAINED.items()}
    scores: dict[str, Any] = dict(readers.UNTRAINED)
    crossed: dict[str, Any] = {}  # of the samples that train and choose, by readers of other folds
    both = own.where(np.isin(own.bucket_M, range(8)))
    fold_M = both.chains.problem_M % FOLDS
    for name, fit in readers.FITTED.items():
        scores[name] = fit(fitting_of(train, valid), seed)
        result[name] = of_number(scores[name], calibration)
        crossed[name] = np.zeros(len(fold_M))
        for fold in range(FOLDS):
            rest = both.where(fold_M != fold)
            kept = rest.where(rest.bucket_M < 7), rest.where(rest.bucket_M == 7)
            crossed[name][fold_M == fold] = fit(fitting_of(*kept), seed)(both.where(fold_M == fold).samples)
    text = calibrated(fit_ranker(train.chains, valid.chains), calibration.chains)
    result["text"] = Arm(lambda pool: text.log_odds(pool.chains.x_MF))

    def joined(pool: Pool, columns: Sequence[np.ndarray]) -> Chains:
        return pool.chains._replace(x_MF=np.column_stack([pool.chains.x_MF, *columns]))

    def with_scores(pool: Pool) -> Chains:
        return joined(pool, [score(pool.samples) for score in scores.values()])

    known = joined(both, [crossed[name] if name in crossed else scores[name](both.samples) for name in scores])
    fused = fit_ranker(known.where(both.bucket_M < 7), known.where(both.bucket_M == 7))
    fused = calibrated(fused, with_scores(calibration))
    result["fused"] = Arm(lambda pool: fused.log_odds(with_scores(pool).x_MF))
    return result


def best_correct(chains: Chains, odds_M: np.ndarray) -> np.ndarray:
    """Returns how correct each pool's best sample with an answer is; ties share."""
    odds_M = np.where(chains.class_M >= 0, odds_M, -np.inf)
    top_P = np.full(int(chains.problem_M.max()) + 1, -np.inf)
    np.maximum.at(top_P, chains.problem_M, odds_M)
    leads_M = odds_M >= top_P[chains.problem_M] - 1e-12
    return np.bincount(chains.problem_M, leads_M * chains.correct_M) / np.bincount(chains.problem_M, leads_M)


def interval(value_SP: np.ndarray, seed: int = 0) -> dict[str, float]:
    """Returns the mean over seeds and problems in points, with its interval over draws of both."""
    rng = np.random.default_rng(seed)
    S, P = value_SP.shape
    drawn = [value_SP[np.ix_(rng.integers(S, size=S), rng.integers(P, size=P))].mean() for _ in range(DRAWS)]
    low, high = np.quantile(drawn, [0.025, 0.975])
    return {"value": 100 * value_SP.mean(), "low": 100 * low, "high": 100 * high}


def figures(pool: Pool, by_seed: Sequence[dict[str, Arm]]) -> dict[str, Any]:
    """Returns the figures of one policy's pools, by arm."""
    chains = pool.chains
    majority_P = vote_correct(chains, np.ones(len(chains.correct_M)))
    size_P = np.bincount(chains.problem_M)
    result: dict[str, Any] = {
        "problems": len(size_P), "samples": len(chains.correct_M),
        "mean": 100 * float(np.mean(np.bincount(chains.problem_M, chains.correct_M) / size_P)),
        "any": 100 * float(np.mean(np.bincount(chains.problem_M, chains.correct_M) > 0)),
        "majority": interval(majority_P[None]), "arms": {},
    }  # fmt: skip
    odds = {name: np.stack([arms[name].odds(pool) for arms in by_seed]) for name in by_seed[0]}
    votes = {
        name: np.stack([vote_correct(chains, vote_weights(odds_M, np.ones(len(odds_M)))) for odds_M in odds_SM])
        for name, odds_SM in odds.items()
    }
    for name, odds_SM in odds.items():
        best_SP = np.stack([best_correct(chains, odds_M) for odds_M in odds_SM])
        areas = [auroc_in_problems(odds_M, pairs_of(chains)) for odds_M in odds_SM] if mixed_problems(chains) else []
        result["arms"][name] = {
            "vote": interval(votes[name]), "vote less majority": interval(votes[name] - majority_P),
            "vote less text": interval(votes[name] - votes["text"]),
            "best less majority": interval(best_SP - majority_P),
            "AUROC in problems": 100 * float(np.mean(areas)) if areas else None,
        }  # fmt: skip
    return result


def main(
    base: str, out: pathlib.Path, pools: pathlib.Path = HERE / "pools", shared: pathlib.Path | None = None,
    others: int = 32, keep_states: bool = True,
) -> None:  # fmt: skip
    """Fit every reader on the policy's training pools and measure all on its test pools, and on other policies.

    Args:
        base: The policy's model.
        out: The folder of states and of `verdict.json`.
        pools: The folder of `own_train.jsonl.gz` and `own_test.jsonl.gz`.
        shared: The folder with `pools/` of other policies.
        others: Problems of each other policy.
        keep_states: Leave the states in the folder, some 15 MB a problem.
    """
    trees = {
        name: [tree for tree in read_trees(pools / f"{name}.jsonl.gz") if tree.nodes]
        for name in ("own_train", "own_test")
    }
    out.mkdir(parents=True, exist_ok=True)
    if shared is not None:
        for policy in OTHERS:
            path = out / f"{policy}.jsonl"
            first_problems(shared / f"pools/gsm8k_{policy}_n19.jsonl", others, path)
            trees[policy] = list(read_trees(path))
    loaded = functools.cache(lambda: states.Base.load(base, LAYERS, (HERE / "prompt.txt").read_text().rstrip("\n")))
    for name, some in trees.items():
        with Bar(f"states of {name}", len(some)) as bar:
            missing = [t for t in some if not (out / "states" / f"{states.name_of(t)}.npz").is_file()]
            bar.add(len(some) - len(missing))
            for _ in states.compute(loaded(), len(LAYERS), missing, out / "states") if missing else ():
                bar.add()
    read_pools = {name: read(name, some, out / "states") for name, some in trees.items()}
    by_seed = []
    with Bar("fitting readers", SEEDS) as bar:
        for seed in bar.follow(range(SEEDS)):
            by_seed.append(arms(read_pools["own_train"], seed))
    result = {name: figures(pool, by_seed) for name, pool in read_pools.items() if name != "own_train"}
    write_json(out / "verdict.json", result)
    show(result)


def first_problems(path: pathlib.Path, count: int, out: pathlib.Path) -> None:
    """Writes the pools of the first problems by their hash, each chain once."""
    import hashlib

    from jprm.io.jsonl import parse, read_lines, write_records

    records = [parse(line, f"{path}:{number}") for number, line in read_lines(path)]
    records.sort(key=lambda record: hashlib.sha256(record["problem"].encode()).hexdigest())
    distinct = [
        {**r, "samples": list({tuple(sample["steps"]): sample for sample in reversed(r["samples"])}.values())[::-1]}
        for r in records[:count]
    ]
    write_records(out, distinct)


def show(result: dict[str, Any]) -> None:
    def text(x: dict[str, float]) -> str:
        return f"{x['value']:5.1f} [{x['low']:.1f}, {x['high']:.1f}]"

    for name, of in result.items():
        print(f"\n{name}: {of['problems']} problems, majority {text(of['majority'])}")
        print(f"  of one sample {of['mean']:.1f}, of any {of['any']:.1f}; points:")
        for arm, row in of["arms"].items():
            less, best, over = (
                text(row[key]) for key in ("vote less majority", "best less majority", "vote less text")
            )
            area = "" if row["AUROC in problems"] is None else f"{row['AUROC in problems']:.1f}"
            print(f"  {arm:16} vote less majority {less:22} best {best:22} vote less text {over:22} AUROC {area}")


if __name__ == "__main__":
    jax.config.update("jax_platforms", "cpu")
    tyro.cli(main)
