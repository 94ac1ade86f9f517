"""Does evidence help on policies that it was not fitted to? Leave-one-policy-out over the three pools of GSM8K.

    python -m experiments.evidence.transfer --pools ../shared/data/pools --solutions \
        ../shared/data/gsm8k/example_model_solutions.jsonl --out transfer.json

Hardware: two CPU cores, about 4 minutes. Results: experiments/evidence/README.md.

Problems are those of GSM8K test: this is a study of transfer between policies. Rankers are fitted on problems whose
normalised text has int(sha256(text), 16) % 1319 < 1000, votes are tested on the others, and of each policy only the
two others' chains are seen. Intervals draw problems with all their policies. `--solutions` are GSM8K's published
solutions of four fine-tuned models of 2021 (Cobbe et al.), a pool of four a problem: another origin, another way of
writing, and with most incorrect ones removed a far stronger policy.
"""

from __future__ import annotations

import argparse
import json
import pathlib
from collections.abc import Sequence

import numpy as np

from jprm.methods.evidence import sources as evidence
from jprm.methods.evidence.fit import (
    VOTES,
    PolicyPools,
    bucket,
    choose_vote,
    fit_calibrated,
    gains,
    policy_of,
    problem_ids,
    read_policy,
    stronger,
)
from jprm.methods.evidence.ranker import (
    Chains,
    Ranker,
    auroc_in_problems,
    calibrated,
    fit_ranker,
    joined,
    pairs_of,
    vote_correct,
)
from jprm.methods.evidence.verifier import Vote
from jprm.statistics import mean_differences
from jprm.tree import ReasoningTree, tree_of

MODELS = ("6b_finetuning", "6b_verification", "175b_finetuning", "175b_verification")
LABELS = (10, 30, 100)
PRIOR = 100
"""Problems of the new policy that weigh as much as the ranker of the other policies."""

TRIVIAL = {
    "shortest": ("form.log_step_length", -1.0),
    "fewest steps": ("form.log_steps", -1.0),
    "no false equation": ("arithmetic.any_false", -1.0),
    "most common values": ("pool.values_share", 1.0),
    "uses most numbers": ("numbers.used", 1.0),
}


def training(problem: str) -> bool:
    return bucket(problem, 1319) < 1000


def testing(problem: str) -> bool:
    return not training(problem)


def summary(gain_P: np.ndarray, problems: Sequence[str]) -> dict:
    """Returns a mean in points with its 95 % interval over problems."""
    less = mean_differences(gain_P[:, None], problem_ids(problems).tolist(), 0)
    points = {key: round(100 * float(value[0]), 2) for key, value in less._asdict().items()}
    return points | {"better": round(float(less.better[0]), 2)}


def with_only(policy: PolicyPools, columns: np.ndarray) -> PolicyPools:
    """Returns a policy with some of its numbers."""
    chains = policy.chains._replace(x_MF=policy.chains.x_MF[:, columns])
    return PolicyPools(policy.name, policy.problems, chains, policy.seconds)


def transfer(policies: Sequence[PolicyPools]) -> tuple[dict, dict[str, tuple[Ranker, Vote]]]:
    """Returns the gain over the majority on each policy by a verifier of the others, and those verifiers."""
    rows, pooled, problems, fitted = {}, [], [], {}
    for policy in policies:
        others = [other for other in policies if other is not policy]
        ranker = fit_calibrated(others, training)
        vote, _ = choose_vote(others, 0, training)
        test = policy.chains_where(testing)
        gain_P = gains(ranker, vote, test)
        names = [problem for problem in policy.problems if testing(problem)]
        fitted[policy.name] = ranker, vote
        rows[policy.name] = {
            "majority": round(100 * float(vote_correct(test, np.ones(len(test.class_M))).mean()), 1),
            "gain": summary(gain_P, names),
            "auroc_in_problems": round(auroc_in_problems(ranker.score(test.x_MF), pairs_of(test)), 3),
            "vote": vote.__dict__,
            "fixed_powers": {
                f"{power:g}": summary(gains(ranker, Vote(power, 0, 0), test), names) for power in (0.25, 0.5, 1, 1.5, 2)
            },
            "made_stronger": {
                f"{kept:g}": summary(gains(ranker, vote, stronger(test, kept, 1)), names) for kept in (0.4, 0.15)
            },
        }
        pooled.append(gain_P)
        problems += names
    rows["mean"] = {"gain": summary(np.concatenate(pooled), problems)}
    return rows, fitted


def trivial(policies: Sequence[PolicyPools], names: Sequence[str]) -> dict:
    """Returns what single numbers gain in the vote and their AUROC, on the problems of the tests and on all.

    A chain weighs a tenth of another where its number is on the wrong side of its pool's mean.
    """
    rows = {}
    for label, (number, sign) in TRIVIAL.items():
        row = {}
        for policy in policies:
            for part, keep in (("test", testing), ("all", lambda problem: True)):
                chains = policy.chains_where(keep)
                value_M = sign * np.nan_to_num(chains.x_MF[:, names.index(number)])
                size_P = np.bincount(chains.problem_M)
                mean_P = np.bincount(chains.problem_M, value_M) / size_P
                weight_M = np.where(value_M < mean_P[chains.problem_M] - 1e-9, 0.1, 1.0)
                gain_P = vote_correct(chains, weight_M) - vote_correct(chains, np.ones(len(weight_M)))
                row[f"{policy.name}, {part}"] = {
                    "gain": summary(gain_P, [problem for problem in policy.problems if keep(problem)]),
                    "auroc_in_problems": round(auroc_in_problems(value_M, pairs_of(chains)), 3),
                }
        rows[label] = row
    return rows


def another_origin(policies: Sequence[PolicyPools], path: pathlib.Path, sources: Sequence) -> dict:
    """Returns the gains, by a verifier of all three policies, on the published solutions of four other models."""
    trees = [tree for line in path.read_text().splitlines() if testing((tree := solutions(json.loads(line))).problem)]
    test = policy_of("solutions", trees, sources)
    ranker, (vote, _) = fit_calibrated(policies, training), choose_vote(policies, 0, training)
    row: dict = {
        "auroc_in_problems": round(auroc_in_problems(ranker.score(test.chains.x_MF), pairs_of(test.chains)), 3)
    }
    for kept in (1.0, 0.4, 0.15):
        chains = stronger(test.chains, kept, 1)
        row[f"incorrect kept {kept:g}"] = {
            "one sample": round(100 * float(np.mean(_means(chains))), 1),
            "majority": round(100 * float(vote_correct(chains, np.ones(len(chains.class_M))).mean()), 1),
            "gain": summary(gains(ranker, vote, chains), test.problems),
            "best of n less one sample": summary(_chosen(ranker, chains) - _means(chains), test.problems),
        }
    return row


def solutions(item: dict) -> ReasoningTree:
    """Returns a problem's four solutions as a pool."""
    samples = []
    for model in MODELS:
        *steps, answer = item[model]["solution"].strip().split("\n")
        final = answer.removeprefix("A: ") if answer.startswith("A: ") else None
        steps += [] if final is not None else [answer]
        samples.append({"steps": steps or [answer], "answer": final, "correct": item[model]["is_correct"]})
    return tree_of({"problem": item["question"], "samples": samples})


def _means(chains: Chains) -> np.ndarray:
    return np.bincount(chains.problem_M, chains.correct_M) / np.bincount(chains.problem_M)


def _chosen(ranker: Ranker, chains: Chains) -> np.ndarray:
    """Returns how correct the chain with the highest score of each pool is; ties count as their mean."""
    score_M = ranker.score(chains.x_MF)
    top_P = np.full(int(chains.problem_M.max()) + 1, -np.inf)
    np.maximum.at(top_P, chains.problem_M, score_M)
    leads_M = score_M >= top_P[chains.problem_M] - 1e-12
    return np.bincount(chains.problem_M, leads_M * chains.correct_M) / np.bincount(chains.problem_M, leads_M)


def with_labels(policies: Sequence[PolicyPools], fitted: dict[str, tuple[Ranker, Vote]], seeds: int = 5) -> dict:
    """Returns what the outcomes of k problems of the new policy add, mean over draws of the k problems.

    The ranker of the other policies is trained on with the k problems, which weigh k / (k + PRIOR), and calibrated on
    them; the vote's power is, among the candidates, the one with the highest gain on the k problems whose standard
    error does not tell it from the transferred one less.
    """
    rows = {}
    for policy in policies:
        others = [other for other in policies if other is not policy]
        ranker, vote = fitted[policy.name]
        old = joined([other.chains_where(training) for other in others])
        names = [problem for problem in policy.problems if testing(problem)]
        pool = sorted(problem for problem in policy.problems if training(problem))
        test, row = policy.chains_where(testing), {}
        base_P = gains(ranker, vote, test)
        for k in LABELS:
            gains_of = []
            for seed in range(seeds):
                chosen = set(np.random.default_rng(seed).choice(pool, k, replace=False).tolist())
                gains_of.append(gains(*adapted(ranker, vote, old, policy.chains_where(chosen.__contains__), k), test))
            gain_P = np.mean(gains_of, axis=0)
            row[str(k)] = {"gain": summary(gain_P, names), "more": summary(gain_P - base_P, names)}
        rows[policy.name] = row
    return rows


def adapted(ranker: Ranker, vote: Vote, old, new, k: int) -> tuple[Ranker, Vote]:
    """Returns ranker and vote after k problems of the new policy."""
    share = k / (k + PRIOR)
    both = joined([old, new])
    try:
        refit = calibrated(fit_ranker(both, new), new)
    except ValueError:  # no problem with both kinds of chains among so few
        return ranker, vote
    mixed = Ranker(
        ranker.mean_F,
        ranker.scale_F,
        (1 - share) * ranker.weight_F + share * refit.weight_F * ranker.scale_F / refit.scale_F,
        (1 - share) * ranker.slope + share * refit.slope,
        (1 - share) * ranker.intercept + share * refit.intercept,
    )
    best, before_P = vote, gains(mixed, vote, new)
    for other in VOTES:
        more_P = gains(mixed, other, new) - before_P
        if more_P.mean() > 2 * more_P.std(ddof=1) / np.sqrt(len(more_P)):
            best, before_P = other, gains(mixed, other, new)
    return mixed, best


def main(pools: pathlib.Path, out: pathlib.Path, other: pathlib.Path | None = None) -> None:
    sources = [evidence.find(name) for name in evidence.DEFAULT]
    names = evidence.names(sources)
    policies = [read_policy(path, sources) for path in sorted(pools.glob("*.jsonl"))]
    text_alone = np.array([not name.startswith("pool.") for name in names])
    all_of_it, fitted = transfer(policies)
    report = {
        "all sources": all_of_it,
        "without the pool": transfer([with_only(policy, text_alone) for policy in policies])[0],
        "trivial": trivial(policies, names),
        "labels": with_labels(policies, fitted),
        "seconds": {policy.name: {name: round(s, 1) for name, s in policy.seconds.items()} for policy in policies},
    }
    if other is not None:
        report["another origin"] = another_origin(policies, other, sources)
    out.write_text(json.dumps(report, indent=1) + "\n")
    print(json.dumps(report, indent=1))


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--pools", type=pathlib.Path, required=True)
    parser.add_argument("--out", type=pathlib.Path, required=True)
    parser.add_argument("--solutions", type=pathlib.Path)
    options = parser.parse_args()
    main(options.pools, options.out, options.solutions)
