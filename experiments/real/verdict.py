"""The verdict on readers of states, from kept pools and kept scores of their samples: see README.md for the protocol.

    python -m experiments.real.verdict --out runs/real/verdict.json                   # two minutes
    python -m experiments.real.verdict --out verdict.json --scores mine.jsonl         # of `reader_scores.py`
    python -m experiments.real.verdict --out verdict.json --scores                    # the arms that read no model

Pools are `pools/NAME.jsonl.gz` beside this file: `own_train`, `own_test`, and those of other policies (`OTHERS`).
"""

from __future__ import annotations

import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import tyro

from experiments.real import token_states as states
from jprm.io.jsonl import parse, read_lines
from jprm.io.outputs import Bar, write_json
from jprm.methods.evidence import sources as evidence
from jprm.methods.evidence.fit import bucket, policy_of
from jprm.methods.evidence.ranker import (
    Chains,
    Ranker,
    auroc_in_problems,
    best_correct,
    calibrated,
    fit_ranker,
    mixed_problems,
    pairs_of,
    vote_correct,
)
from jprm.methods.evidence.verifier import vote_weights
from jprm.tree import ReasoningTree, chains_of

HERE = pathlib.Path(__file__).parent
DRAWS = 2000
OTHERS = ("chatgpt", "coder15", "llama13b", "llama7b")
TEXT = sum(len(evidence.find(name).numbers) for name in evidence.DEFAULT)
"""Numbers of the arm `text`; those of the log-probability follow them."""
ALONE = ("outcome PRM", "contrast", "lowest contrast", "larger log-probability")
"""Not among the fused verifier's sources, nor scored on the problems that fit it: the outcome PRM was trained on their
outcomes, and what two bases say, fitted to nothing, costs most."""
LARGER = "coder15"
"""The policy of the larger base, which `contrast_scores.py` reads by: its own majority is what to do instead."""


class Pool(NamedTuple):
    """The samples of a file: their evidence without a model and outcomes, each reader's scores by seed, the bucket of
    the problem.

    lost: problems of which no sample has an answer. Every arm is wrong there.
    problems: their texts, the lost ones last.
    """

    chains: Chains
    score_SM: Mapping[str, np.ndarray]
    bucket_M: np.ndarray
    lost: int = 0
    problems: tuple[str, ...] = ()

    def where(self, chosen_M: np.ndarray) -> Pool:
        scores = {name: score_SM[:, chosen_M] for name, score_SM in self.score_SM.items()}
        return Pool(self.chains.where(chosen_M), scores, self.bucket_M[chosen_M])

    def score(self, name: str, seed: int) -> np.ndarray:
        score_SM = self.score_SM[name]
        return score_SM[seed % len(score_SM)]  # some have one for all seeds


def read(path: pathlib.Path, scores: Mapping[tuple[str, str], Mapping[str, Any]]) -> Pool:
    """Returns the pool of the problems up to the last one that all readers have scored, all where there are no readers.

    Readers of ALONE need no scores of the training problems that fit arms: they are NaN there. If there are no others,
    all training problems are in the pool, and those calibrate that have scores.
    Raises SystemExit where another problem before the last one is not scored.
    """
    name, trees = path.name.split(".")[0], list(states.answered(path))
    of_trees = [scores.get((name, states.name_of(tree)), {}) for tree in trees]
    readers = {reader for of_tree in of_trees for reader in of_tree}

    def lacking(tree: ReasoningTree, of_tree: Mapping[str, Any]) -> set[str]:
        fitting = name == "own_train" and (not states.calibrates(tree) or readers <= set(ALONE))
        return readers - of_tree.keys() - (set(ALONE) if fitting else set())

    scored = [i for i, of_tree in enumerate(of_trees) if (of_tree or not readers) and not lacking(trees[i], of_tree)]
    last = max(scored, default=-1)
    if name == "own_train" and readers <= set(ALONE) and scored:  # the text is fitted to all
        last = len(trees) - 1
    if last < 0:
        raise SystemExit(f"error: {path}: no problem has all readers' scores; make them with reader_scores.py")
    whole = [i for i in range(last + 1) if trees[i].nodes]
    if missing := sum(bool(lacking(trees[i], of_trees[i])) for i in whole):
        raise SystemExit(f"error: {path}: {missing} problems lack scores; make them with reader_scores.py")
    lost = [trees[i].problem for i in range(whole[-1]) if not trees[i].nodes]
    trees, of_trees = [trees[i] for i in whole], [of_trees[i] for i in whole]
    policy = policy_of(name, trees, [evidence.find(source) for source in (*evidence.DEFAULT, "logprob")])
    unscored = [np.full(len(chains_of(tree)), np.nan) for tree in trees]
    by_reader = {}
    for reader in sorted(readers):
        of_problems = [
            np.atleast_2d(of_tree.get(reader, nan_M)) for of_tree, nan_M in zip(of_trees, unscored, strict=True)
        ]
        by_reader[reader] = np.concatenate(of_problems, axis=1)
    bucket_M = np.array([bucket(tree.problem, 10) for tree in trees])[policy.chains.problem_M]
    return Pool(policy.chains, by_reader, bucket_M, len(lost), (*(tree.problem for tree in trees), *lost))


def read_scores(paths: Sequence[pathlib.Path]) -> dict[tuple[str, str], dict[str, Any]]:
    """Returns the scores of every problem by pool and name; several files may hold different readers.

    Raises SystemExit, naming file and line, for a record without `pool`, `problem` and `scores`.
    """
    scores: dict[tuple[str, str], dict[str, Any]] = {}
    for path in paths:
        for number, line in read_lines(path):
            record = parse(line, f"{path}:{number}")
            if missing := [key for key in ("pool", "problem", "scores") if key not in record]:
                raise SystemExit(
                    f"error: {path}:{number}: lacks {', '.join(missing)}; reader_scores.py writes such files"
                )
            scores.setdefault((record["pool"], record["problem"]), {}).update(record["scores"])
    return scores


Arm = Callable[[Pool], np.ndarray]
"""What chooses: log odds of every sample of a pool."""


def of_number(name: str, seed: int, calibration: Pool) -> Arm:
    """Returns the arm of one reader: its log odds by a logistic regression on samples that it was not fitted on."""

    def column(pool: Pool) -> Chains:
        return pool.chains._replace(x_MF=pool.score(name, seed)[:, None])

    calibration = calibration.where(np.isfinite(calibration.score(name, seed)))
    ranker = Ranker.standardising(column(calibration).x_MF)
    ranker = calibrated(Ranker(ranker.mean_F, ranker.scale_F, np.ones(1)), column(calibration))
    return lambda pool: ranker.log_odds(column(pool).x_MF)


def arms(policy_pool: Pool, seed: int) -> dict[str, Arm]:
    """Returns all arms, fitted on the policy's training problems."""
    parts = {what: policy_pool.where(np.isin(policy_pool.bucket_M, tenths)) for what, tenths in
             (("train", range(7)), ("valid", [7]), ("calibration", [8, 9]))}  # fmt: skip
    train, valid, calibration = parts["train"], parts["valid"], parts["calibration"]
    result = {name: of_number(name, seed, calibration) for name in policy_pool.score_SM}

    def ranked(columns: Callable[[Pool], Sequence[np.ndarray]]) -> Arm:
        def chains(pool: Pool) -> Chains:
            return pool.chains._replace(x_MF=np.column_stack(columns(pool)))

        ranker = calibrated(fit_ranker(chains(train), chains(valid)), chains(calibration))
        return lambda pool: ranker.log_odds(chains(pool).x_MF)

    result["text"] = ranked(lambda pool: [pool.chains.x_MF[:, :TEXT]])
    result["text and log-probability"] = ranked(lambda pool: [pool.chains.x_MF])
    if readers := [name for name in policy_pool.score_SM if name not in ALONE]:
        result["fused"] = ranked(
            lambda pool: [pool.chains.x_MF[:, :TEXT], *(pool.score(name, seed) for name in readers)]
        )
    return result


def interval(value_SP: np.ndarray, seed: int = 0) -> dict[str, float]:
    """Returns the mean over seeds and problems in points, with its interval over draws of both."""
    rng = np.random.default_rng(seed)
    S, P = value_SP.shape
    drawn = [value_SP[np.ix_(rng.integers(S, size=S), rng.integers(P, size=P))].mean() for _ in range(DRAWS)]
    low, high = np.quantile(drawn, [0.025, 0.975])
    return {"value": 100 * value_SP.mean(), "low": 100 * low, "high": 100 * high}


def majorities(pool: Pool) -> dict[str, float]:
    """Returns the share of majority votes that are right, by problem; ties are divided."""
    right_P = np.append(vote_correct(pool.chains, np.ones(len(pool.chains.correct_M))), np.zeros(pool.lost))
    return dict(zip(pool.problems, right_P.tolist(), strict=True))


def figures(pool: Pool, by_seed: Sequence[Mapping[str, Arm]], larger: Mapping[str, float] | None = None) -> dict:
    """Returns the figures of one policy's pools, by arm.

    larger: `majorities` of the larger base's own samples. Arms that read by it are compared with it on these problems.
    """
    chains = pool.chains

    def every(value_P: np.ndarray) -> np.ndarray:
        return np.append(value_P, np.zeros(pool.lost))

    majority_P = every(vote_correct(chains, np.ones(len(chains.correct_M))))
    right_P = every(np.bincount(chains.problem_M, chains.correct_M))
    result: dict[str, Any] = {
        "problems": len(right_P), "answers": len(chains.correct_M), "any": 100 * float(np.mean(right_P > 0)),
        "majority": interval(majority_P[None]), "arms": {},
    }  # fmt: skip
    shown = [name for name in by_seed[0] if name not in ALONE or name in pool.score_SM]
    odds = {name: np.stack([arms[name](pool) for arms in by_seed]) for name in shown}
    one_M = np.ones(len(chains.problem_M))
    votes = {
        name: np.stack([every(vote_correct(chains, vote_weights(odds_M, one_M, chains))) for odds_M in odds_SM])
        for name, odds_SM in odds.items()
    }
    for name, odds_SM in odds.items():
        best_SP = np.stack([every(best_correct(chains, odds_M)) for odds_M in odds_SM])
        areas = [auroc_in_problems(odds_M, pairs_of(chains)) for odds_M in odds_SM] if mixed_problems(chains) else []
        result["arms"][name] = {
            "vote": interval(votes[name]), "vote less majority": interval(votes[name] - majority_P),
            "vote less text": interval(votes[name] - votes["text"]),
            "best less majority": interval(best_SP - majority_P),
            "AUROC in problems": 100 * float(np.mean(areas)) if areas else None,
        }  # fmt: skip
        if larger is not None and name in ALONE[1:]:
            known_P = np.array([problem in larger for problem in pool.problems])
            larger_P = np.array([larger.get(problem, 0.0) for problem in pool.problems])
            result["arms"][name]["vote less the larger's majority"] = interval((votes[name] - larger_P)[:, known_P])
    return result


def main(
    out: pathlib.Path,
    pools: pathlib.Path = HERE / "pools",
    scores: tuple[pathlib.Path, ...] | None = None,
    seeds: int = 3,
) -> None:
    """Fit the verdict's arms on the policy's training pools, and measure all on its test pools and on other policies.

    Args:
        out: A file for the figures, as JSON.
        pools: The folder of the pools.
        scores: Files of scores; by default all `scores*.jsonl.gz` of the pools' folder. `--scores` without a file: the
            arms that read no model.
        seeds: Of readers that have any.
    """
    known = read_scores(sorted(pools.glob("scores*.jsonl.gz")) if scores is None else scores)
    others = sorted({pool for pool, _ in known} - {"own_train", "own_test"}) if known else OTHERS
    names = ["own_train", "own_test", *others]
    with Bar("reading pools", len(names)) as bar:
        read_pools = {name: read(pools / f"{name}.jsonl.gz", known) for name in bar.follow(names)}
    needed = read_pools["own_train"].score_SM.keys() - set(ALONE)
    lacking = [name for name in names if not needed <= read_pools[name].score_SM.keys()]
    if lacking:
        print(f"left out, since not all readers scored them: {', '.join(lacking)}")
    names = [name for name in names if name not in lacking]
    with Bar("fitting arms", seeds) as bar:
        by_seed = [arms(read_pools["own_train"], seed) for seed in bar.follow(range(seeds))]
    with Bar("drawing intervals", len(names) - 1) as bar:
        larger = {"own_test": majorities(read(pools / f"{LARGER}.jsonl.gz", {}))} if "contrast" in by_seed[0] else {}
        tested = bar.follow([name for name in names if name != "own_train"])
        result = {name: figures(read_pools[name], by_seed, larger.get(name)) for name in tested}
    write_json(out, result)
    show(result)


def show(result: dict[str, Any]) -> None:
    def text(x: dict[str, float]) -> str:
        return f"{x['value']:5.1f} [{x['low']:.1f}, {x['high']:.1f}]"

    for name, of_pool in result.items():
        print(f"\n{name}: {of_pool['problems']} problems, majority {text(of_pool['majority'])}")
        print(f"  of any {of_pool['any']:.1f}; points:")
        for arm, row in of_pool["arms"].items():
            less, best, over = (
                text(row[key]) for key in ("vote less majority", "best less majority", "vote less text")
            )
            area = "" if row["AUROC in problems"] is None else f"{row['AUROC in problems']:.1f}"
            print(f"  {arm:24} vote less majority {less:22} best {best:22} vote less text {over:22} AUROC {area}")
            if beside := row.get("vote less the larger's majority"):
                print(f"  {'':24} vote less the larger base's own majority {text(beside)}")


if __name__ == "__main__":
    try:
        tyro.cli(main)
    except (ValueError, OSError) as error:
        raise SystemExit(f"error: {error}") from None
