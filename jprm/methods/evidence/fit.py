"""Fits a verifier to pools with known outcomes: `jprm fuse fit`.

Each file of pools is one policy. A digest of the normalised problem text splits the problems, the same way for all
policies: seven tenths train the ranker, one tenth chooses its regularisation, two tenths calibrate it. The vote's trust
in the evidence is chosen on policies left out of the training (`choose_vote`).

A verifier must not be worse than its sources. On held-out problems, `choose_verifier` compares it with every number
that can choose alone (e.g. a PRM's product, or the answer's share), and takes the number if it is ahead.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import os
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from jaxtyping import Float, Int

from jprm.io.outputs import input_of
from jprm.io.storage import path_of
from jprm.methods.data.overlap import normalise
from jprm.methods.evaluate.best_of_n import outcome_of
from jprm.methods.evaluate.run import source as reader_of
from jprm.methods.evaluate.scored import ScoreError
from jprm.methods.evaluate.votes import answer_classes
from jprm.methods.evidence import sources as evidence
from jprm.methods.evidence.ranker import (
    Chains,
    Ranker,
    auroc_in_problems,
    best_correct,
    calibrated,
    fit_near,
    fit_ranker,
    joined,
    mixed_problems,
    pairs_of,
    vote_correct,
)
from jprm.methods.evidence.sources import Source, answers_of
from jprm.methods.evidence.verifier import FusedVerifier, Vote, request_of
from jprm.statistics import numbered
from jprm.tree import ReasoningTree, chains_of, tree_of

CHUNK = 64
FOLDS = 3
POWERS = (0.25, 0.5, 1.0, 1.5, 2.0)
VOTES = [Vote(*setting) for setting in itertools.product(POWERS, (0.0, 1.0, 2.0), (0.0, 2.0))]
KEPT = (1.0, 0.4, 0.15)
"""Fractions of incorrect chains to keep for a left-out policy. Below 1 it simulates stronger policies, since a trust
fitted to policies of one strength hurts stronger ones.
"""


@dataclasses.dataclass(frozen=True)
class PolicyPools:
    """Evidence and outcomes of the pools in one file."""

    name: str  # the file's
    problems: list[str]  # the text of each pool's problem
    chains: Chains  # of all pools
    seconds: dict[str, float]  # by source, what reading the evidence took
    tokens: dict[str, int] = dataclasses.field(default_factory=dict)  # by source, of its model or written by its judge

    def chains_where(self, keep: Callable[[str], bool]) -> Chains:
        """Returns the chains whose problem text satisfies `keep`, with pools renumbered from 0; possibly empty.

        The new numbers are no longer places in `problems`.
        """
        kept_P = np.array([keep(problem) for problem in self.problems])
        return self.chains.where(kept_P[self.chains.problem_M])


def bucket(problem: str, n: int) -> int:
    """Hashes a problem's normalised text to a number from 0 to n - 1, the same on every machine."""
    return int(hashlib.sha256(normalise(problem).encode()).hexdigest(), 16) % n


def read_policy(
    path: str | os.PathLike, sources: Sequence[Source], keep: Callable[[str], bool] = lambda problem: True
) -> PolicyPools:
    """Reads a file's pools, and the sources' evidence on them, for problems whose text `keep` accepts.

    The policy's name is the file's, without folder and last ending. Waits for the sources' models. Pools without steps
    are left out.

    Raises RecordError if a record is not a pool, ScoreError if an outcome is unknown or no pool is left,
    FileNotFoundError if the file is absent; errors of the sources pass.
    """
    trees = [tree_of(record) for record in reader_of("pools").records(path)]
    trees = [tree for tree in trees if tree.nodes and keep(tree.problem)]
    if not trees:
        raise ScoreError(f"{os.fspath(path)}: holds no pool to fit a verifier to")
    return policy_of(path_of(path).stem, trees, sources)


def policy_of(name: str, trees: Sequence[ReasoningTree], sources: Sequence[Source]) -> PolicyPools:
    """Reads the sources on a policy's pools: evidence, outcome, problem and answer per chain, and the sources' cost.

    Each tree must have steps. All chains have policy 0. Raises ScoreError, naming the policy (`name`) and the record
    from 0, if a sample's outcome is unknown; errors of the sources pass.
    """
    seconds, tokens, columns = {}, {}, []
    for source in sources:
        start, before = time.perf_counter(), source.tokens()
        parts = (evidence.read([source], trees[i : i + CHUNK]) for i in range(0, len(trees), CHUNK))
        columns.append(list(itertools.chain.from_iterable(parts)))
        seconds[source.name], tokens[source.name] = time.perf_counter() - start, source.tokens() - before
    x, correct, problem, classes = [], [], [], []
    for i, (tree, *parts) in enumerate(zip(trees, *columns, strict=True)):
        leaves = [chain[-1] for chain in chains_of(tree)]
        x.append(np.concatenate(parts, axis=1)[leaves])
        ends = [tree.nodes[leaf] for leaf in leaves]
        correct += [outcome_of(tree.answer, n, f"{name}, record {i}") for n in ends]
        problem.append(np.full(len(leaves), i))
        classes.append(answer_classes(answers_of(tree)))
    x_MF = np.concatenate(x)
    chains = Chains(x_MF, np.array(correct), np.concatenate(problem), np.zeros(len(x_MF), int), np.concatenate(classes))
    return PolicyPools(name, [tree.problem for tree in trees], chains, seconds, tokens)


def fit_calibrated(
    policies: Sequence[PolicyPools],
    keep: Callable[[str], bool] = lambda problem: True,
) -> Ranker:
    """Fits a ranker (`by_pairs`) to the problems that satisfy `keep`.

    Seven tenths of the problems train the weights, one chooses the regularisation, and two calibrate the scores.

    Raises ValueError if one of the three parts has no problem with both a correct and an incorrect chain.
    """

    def part(tenths: Sequence[int], what: str) -> Chains:
        chosen = [
            policy.chains_where(lambda problem: keep(problem) and bucket(problem, 10) in tenths) for policy in policies
        ]
        chosen = [chains for chains in chosen if len(chains.problem_M)]
        chains = joined(chosen) if chosen else None
        if chains is None or not mixed_problems(chains):
            none = f"none of those that {what} has both a correct and an incorrect chain"
            raise ValueError(f"too few problems: {none}. Give more pools, fifty problems at the least")
        return chains

    ranker = fit_ranker(part(range(7), "train the ranker"), part([7], "choose its regularisation"))
    return calibrated(ranker, part([8, 9], "calibrate it"))


def gains(ranker: Ranker, vote: Vote, chains: Chains) -> Float[np.ndarray, " P"]:
    """Returns (P,): each pool's weighted-vote correctness minus its majority-vote correctness, in [-1, 1]."""
    return vote_correct(chains, vote.weights(ranker, chains)) - vote_correct(chains, np.ones(len(chains.problem_M)))


def stronger(chains: Chains, kept: float, seed: int) -> Chains:
    """Returns the chains less random incorrect ones, each kept with probability `kept`, to simulate a stronger policy.

    Equal for equal `seed`. Every pool keeps its first chain: a stronger policy still fails if it has no correct chain.
    """
    drawn_M = np.random.default_rng(seed).random(len(chains.correct_M))
    first_M = np.zeros(len(drawn_M), bool)
    first_M[np.unique(chains.problem_M, return_index=True)[1]] = True
    return chains.where((chains.correct_M > 0.5) | (drawn_M < kept) | first_M)


def choose_vote(
    policies: Sequence[PolicyPools], seed: int, keep: Callable[[str], bool] = lambda problem: True
) -> tuple[Vote, list[dict[str, Any]]]:
    """Chooses the vote's trust in the evidence; returns it with its gains on each left-out policy.

    Each policy is left out in turn, and votes with a ranker fitted to the others, on problems that they were not
    trained on, both as it is and made stronger (`KEPT`). A `VOTES` candidate is safe if each gain is at least minus its
    standard error. The best safe candidate has the highest mean gain on the unchanged policies. The result is the least
    trusting candidate within one standard error of it, paired by problem: a difference that these policies cannot show
    may hurt others. If no candidate is safe, the one with the highest lowest gain is taken. With a single policy, the
    result is (`Vote()`, []). A gain is {"left_out": policy's name, "incorrect_kept": of `KEPT`, "gain",
    "standard_error"}, with fractions. Policies of one name share a row; a policy with a single pool has no row. `seed`
    is for `stronger`; only problems that satisfy `keep` are used. Raises ValueError like `fit_calibrated`.
    """
    if len(policies) < 2:
        return Vote(), []
    scenarios: dict[tuple[str, float], list[list[np.ndarray]]] = {}
    for policy, fold in itertools.product(policies, range(FOLDS)):
        others = [other for other in policies if other is not policy]
        ranker = fit_calibrated(others, lambda problem, fold=fold: keep(problem) and bucket(problem, FOLDS) != fold)
        held = policy.chains_where(lambda problem, fold=fold: keep(problem) and bucket(problem, FOLDS) == fold)
        for kept in KEPT:
            chains = stronger(held, kept, seed)
            scenarios.setdefault((policy.name, kept), []).append([gains(ranker, vote, chains) for vote in VOTES])
    # A policy with a single problem has no standard error: it cannot show that a vote hurts.
    scenarios = {key: folds for key, folds in scenarios.items() if sum(len(fold[0]) for fold in folds) > 1}
    gain_SV, error_SV = np.zeros((2, len(scenarios), len(VOTES)))
    for s, folds in enumerate(scenarios.values()):
        for v in range(len(VOTES)):
            gain_P = np.concatenate([fold[v] for fold in folds])
            gain_SV[s, v], error_SV[s, v] = gain_P.mean(), gain_P.std(ddof=1) / np.sqrt(len(gain_P))
    harmless_V = (gain_SV + error_SV >= 0).all(0)
    if harmless_V.any():
        as_is = [fold for (_, kept), folds in scenarios.items() if kept == 1 for fold in folds]
        gain_PV = np.concatenate([np.stack(fold, axis=1) for fold in as_is])
        best = int(np.argmax(np.where(harmless_V, gain_PV.mean(0), -np.inf)))
        less_PV = gain_PV[:, [best]] - gain_PV
        near_V = harmless_V & (less_PV.mean(0) <= less_PV.std(0, ddof=1) / np.sqrt(len(less_PV)))
        trust = {v: (VOTES[v].power, -VOTES[v].agreement, -VOTES[v].distance) for v in np.flatnonzero(near_V)}
        chosen = int(min(trust, key=lambda v: trust[v]))
    else:
        chosen = int(np.argmax(gain_SV.min(0)))
    rows = [
        {"left_out": name, "incorrect_kept": kept, "gain": float(gain), "standard_error": float(error)}
        for (name, kept), gain, error in zip(scenarios, gain_SV[:, chosen], error_SV[:, chosen], strict=True)
    ]
    return VOTES[chosen], rows


HELD_OUT = 5
ALONE = {"sum_log", "lowest", "mean", "last", "answer_share"}
"""Numbers that can choose alone: a model's rules prod, min, mean and last, and the majority."""
PRODUCT = ".sum_log"
NEAR = {*evidence.LOGS, "answer_share"}
"""Numbers akin to a model's product or a vote; a fit near the product penalises others `FAR` times as much."""
FAR = 10.0
Verifier = tuple[Ranker, Vote, str]
"""(ranker, vote, "chains" or "answers")."""


def candidates(
    policies: Sequence[PolicyPools],
    vote: Vote,
    names: Sequence[str],
    keep: Callable[[str], bool] = lambda problem: True,
) -> dict[str, Verifier]:
    """Returns verifiers by name: "fused", and each number that can choose alone, as `NAME` and `NAME vote`.

    `names` must be the full names of all columns in order (`jprm.methods.evidence.sources.names`); this is unchecked.
    One with an ending in `ALONE`, e.g. `stored.sum_log`, can choose alone. Only problems that satisfy `keep` are used.
    If the features include a model's scores (`votes`), the fused verifier is trained to vote near the model's product
    and chooses answers. With text alone it ranks chains, which transfers better to other policies, and votes as
    cautiously as `vote`.

    Raises ValueError like `fit_calibrated`.
    """
    chains = joined([policy.chains_where(keep) for policy in policies])
    blank, verifiers = Ranker.standardising(chains.x_MF), {}
    if votes(names):
        product_F = np.array([float(name.endswith(PRODUCT)) for name in names])
        kept = (problem for policy in policies for problem in policy.problems if keep(problem))
        fifth_M = np.array([bucket(f"fifth {problem}", HELD_OUT) for problem in kept])[chains.problem_M]
        cost_F = np.array([1.0 if name.rpartition(".")[2] in NEAR else FAR for name in names])
        ranker = fit_near(chains, fifth_M, product_F, cost_F)
        verifiers["fused"] = ranker, Vote(1 / ranker.slope, 0.0, 0.0), "answers"
    else:
        verifiers["fused"] = fit_calibrated(policies, keep), vote, "chains"
    for number, name in enumerate(names):
        if name.rpartition(".")[2] in ALONE:
            alone = calibrated(blank.of_one(number), chains), Vote(1.0, 0.0, 0.0)
            verifiers |= {name: (*alone, "chains"), f"{name} vote": (*alone, "answers")}
    return verifiers


def votes(names: Sequence[str]) -> bool:
    """Returns whether a full name (`SOURCE.NUMBER`) ends in `.sum_log`, as a model's product does.

    The verifier is then trained to vote.
    """
    return any(name.endswith(PRODUCT) for name in names)


def right_of(verifier: Verifier, chains: Chains) -> Float[np.ndarray, "2 P"]:
    """Returns the correctness in [0, 1] of each pool's best chain (row 0) and vote (row 1); ties are averaged.

    Row 0 is the vote too if the verifier chooses "answers". A pool without an answer has 0.
    """
    ranker, vote, chooses = verifier
    voted_P = vote_correct(chains, vote.weights(ranker, chains))
    best_P = voted_P if chooses == "answers" else best_correct(chains, ranker.log_odds(chains.x_MF))
    return np.stack([best_P, voted_P])


def choose_verifier(
    policies: Sequence[PolicyPools], vote: Vote, names: Sequence[str]
) -> tuple[str, dict[str, list[float]]]:
    """Returns the candidate's name to take, and each candidate's held-out accuracy [by best of n, by vote].

    `vote`, `names` and the candidates' names are as in `candidates`.
    A fifth of the problems is held out at a time, and policies weigh the same. The fused verifier is taken, judged by
    the worse of its two uses, unless another candidate is ahead by a standard error: the best of several looks better
    than it is. Accuracies are fractions. If there are too few problems to hold out any, returns ("fused", {}): no
    ValueError is raised.
    """

    def fold_of(problem: str) -> int:
        return bucket(f"held out {problem}", HELD_OUT)  # of another digest than the tenths of `fit_calibrated`

    right: dict[str, list[np.ndarray]] = {}
    weights = []
    try:
        for fold in range(HELD_OUT):
            verifiers = candidates(policies, vote, names, lambda problem, fold=fold: fold_of(problem) != fold)
            for policy in policies:
                held = policy.chains_where(lambda problem, fold=fold: fold_of(problem) == fold)
                weights.append(
                    np.full(int(held.problem_M.max(initial=-1)) + 1, 1 / len(policy.problems) / len(policies))
                )
                for name, verifier in verifiers.items():
                    right.setdefault(name, []).append(right_of(verifier, held))
    except ValueError:
        return "fused", {}
    weight_P = np.concatenate(weights)
    right_2P = {name: np.concatenate(of_folds, axis=1) for name, of_folds in right.items()}
    accuracy = {name: (of_both @ weight_P).tolist() for name, of_both in right_2P.items()}
    use = int(np.argmin(accuracy["fused"]))

    def ahead(name: str) -> bool:
        ahead_P = right_2P[name][use] - right_2P["fused"][use]
        mean = weight_P @ ahead_P
        return mean > np.sqrt(weight_P**2 @ (ahead_P - mean) ** 2)

    return max(filter(ahead, accuracy), key=lambda name: accuracy[name][use], default="fused"), accuracy


def fit(
    paths: Sequence[str | os.PathLike],
    sources: Sequence[str] = evidence.DEFAULT,
    *,
    out: str | os.PathLike,
    seed: int = 0,
    tell: Callable[[str], None] = lambda line: None,
) -> FusedVerifier:
    """Fits a verifier to files of pools, one policy each, writes it to the folder `out` (`save`), and returns it.

    `sources` are names as for `jprm.methods.evidence.sources.find`. `seed` draws the chains that `choose_vote` drops;
    `tell` gets a line per stage. In `measured` a file has its name without ending, or its path if two have one name.
    Waits for the sources' models. An earlier verifier in `out` is replaced at the end; after an error it is unchanged.

    Raises:
        ValueError: no source, a source or file is repeated, a source is unknown or missing, or too few problems.
        FileNotFoundError: a file or a source's model is absent.
        ScoreError, RecordError: a record is not a pool, or its outcome is unknown.
        OSError: a source `verdicts=` has no sandbox; other errors of the sources pass.
    """
    for what, names in (("source", [*sources]), ("file", [os.path.abspath(path) for path in paths])):
        if twice := [name for name in names if names.count(name) > 1]:
            raise ValueError(f"the {what} {twice[0]} is there twice: name each once")
    if not sources:
        raise ValueError("no source: name at least one")
    witnesses = tuple(evidence.find(name) for name in sources)
    policies = []
    for path in paths:
        tell(f"reading the evidence in {os.fspath(path)}")
        policy = read_policy(path, witnesses)
        alone = [path_of(other).stem for other in paths].count(policy.name) == 1
        policies.append(policy if alone else dataclasses.replace(policy, name=os.fspath(path)))
    tell("fitting")
    fit_calibrated(policies)  # refuses pools that are too few before the longer fits
    names = evidence.names(witnesses)
    vote, left_out = (Vote(), []) if votes(names) else choose_vote(policies, seed)
    chosen, held_out = choose_verifier(policies, vote, names)
    ranker, vote, chooses = candidates(policies, vote, names)[chosen]
    cost = {
        source.name: {
            "needs": source.needs,
            "seconds": round(sum(policy.seconds[source.name] for policy in policies), 2),
            "tokens": sum(policy.tokens[source.name] for policy in policies),
        }
        for source in witnesses
    }
    measured = {
        "trained_on": [input_of(path) for path in paths],
        "chains": int(sum(len(policy.chains.problem_M) for policy in policies)),
        "cost": cost,
        "auroc_in_problems": {policy.name: _auroc(ranker, policy) for policy in policies},
        "policies_left_out": left_out,
        "chosen": chosen,
        "held_out": held_out,
    }
    name = str(path_of(out).resolve())
    request = request_of(witnesses, ranker, vote, chooses)
    verifier = FusedVerifier(witnesses, ranker, vote, name, request, measured, chooses)
    verifier.save(out)
    return verifier


def _auroc(ranker: Ranker, policy: PolicyPools) -> float | None:
    """Returns the within-problem AUROC on the ranker's calibration problems, if some are mixed."""
    chains = policy.chains_where(lambda problem: bucket(problem, 10) in (8, 9))
    return auroc_in_problems(ranker.score(chains.x_MF), pairs_of(chains)) if mixed_problems(chains) else None


def problem_ids(problems: Sequence[str]) -> Int[np.ndarray, " P"]:
    """Returns ids from 0, equal for equal normalised texts: a bootstrap resamples a problem with all its policies."""
    return numbered([normalise(problem) for problem in problems])
