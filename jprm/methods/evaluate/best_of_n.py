"""Best of n over pools of samples: the expected accuracy of choosing by score, for every n at once.

Drawing n of a pool's N samples and keeping the one with the highest score has an exact expectation (`best_of_n`),
without simulation. Like the evaluation script of Lightman et al. (prm800k/eval/eval.py), a sample without an answer
takes one of the n places but cannot be chosen. The same holds for samples without steps; a tree cannot hold these, so
pool records count them in `empty_samples`.

Some scores depend on the other samples of the pool, e.g. those of a fused verifier. They were computed from all N
samples and would differ in a smaller draw. Their curves are NaN except at n = 1, where there is no choice, and at the
largest n if all pools have that size. Trivial baselines that read the pool are recomputed for a draw from each larger
pool.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Int

from jprm.methods.answers import canonical_answer, equivalent
from jprm.methods.evaluate import baselines, blocks
from jprm.methods.evaluate.benchmark import Benchmark, Report, Request, scale_of
from jprm.methods.evaluate.blocks import Block, Figure, Heading, PageModel, Table, last, left_out_words, percent, words
from jprm.methods.evaluate.findings import Finding, compared
from jprm.methods.evaluate.options import BestOfNOptions
from jprm.methods.evaluate.plots import Series, curves, slug
from jprm.methods.evaluate.run import UNREAD, model_of, scored_files, source, stored_trees
from jprm.methods.evaluate.scored import NothingToMeasure, ScoreError, scores_of
from jprm.methods.evaluate.votes import answer_classes, best_of_n, vote_accuracy
from jprm.methods.formats.adapters.published import named as adapter_of
from jprm.methods.jobs.score import stored_scale
from jprm.methods.verify.verifiers import UNDECIDED
from jprm.score.aggregate import RULES, rank_keys
from jprm.score.scale import LOG_ODDS, PROBABILITY, PROBABILITY_RULES, Scale
from jprm.statistics import TIE, Difference, group_numbers, interval, jsonable, mean_differences, mean_draws
from jprm.tree import Node, ReasoningTree, chains_of, read_trees, steps_only

DRAWN_SAMPLES = 2**23
"""The total number of samples drawn for votes.

It allows 8 to 128 random orders of the pools: 128 for 1,319 pools of 19, and 9 for 500 pools of 1,860, with a standard
error of at most 0.0075; the choice of problems alone has 0.02.
"""

SHOWN_RULES = ("prod", "min", "last", "mean")
USES = ("best_of_n", "weighted_vote")

COMPARED = 2**24
"""The most numbers in columns of differences to compare at once (128 MB)."""


class Pools(NamedTuple):
    """P problems with up to N samples each; samples without steps come last. Slots from `size_P` on are padding."""

    problem: list[str]
    size_P: Int[np.ndarray, " P"]
    empty_P: Int[np.ndarray, " P"]  # samples without steps among them: incorrect, without an answer
    correct_PN: Float[np.ndarray, "P N"]
    answered_PN: Bool[np.ndarray, "P N"]  # the sample has an answer, or the file has none at all
    class_PN: Int[np.ndarray, "P N"] | None  # equal for equal answers, -1 for none; None if the file has no answers
    key: dict[str, Float[np.ndarray, "P N"]]  # rule -> ranking key; -inf for a chain without a step
    log_weight: dict[str, Float[np.ndarray, "P N"]]  # rule -> log of the chain's vote weight, at most 0
    steps_PN: Int[np.ndarray, "P N"]
    length_PN: Int[np.ndarray, "P N"]  # characters
    of_pool: bool = False  # a sample's score depends on the pool's others

    @property
    def with_steps_PN(self) -> Bool[np.ndarray, "P N"]:
        return np.arange(self.correct_PN.shape[1]) < (self.size_P - self.empty_P)[:, None]


def pools_of(
    trees: Iterable[ReasoningTree], scale: Scale = PROBABILITY, first: list[ReasoningTree] | None = None
) -> Pools:
    """Reads scored pools one at a time.

    min, mean, last and max use scores on any scale; other rules and votes use their weights (`Scale.weights`). `first`
    collects the trees, at most until they have too many samples for text baselines.

    Raises ScoreError if a record is not a pool, lacks a score or the outcome of a sample (`outcome_of`), or has scores
    outside [0, 1] though `scale` is of probabilities, and NothingToMeasure if there are no records.
    """
    problem, empty, with_steps, classes = [], [], [], []  # of each pool
    steps, length, scores, correct, vote = [], [], [], [], []  # of each sample with steps
    with_answers = False
    for i, tree in enumerate(map(steps_only, trees), start=1):
        if tree.kind != "pool":
            fix = "Best-of-n takes pools, {problem, samples}; `jprm eval agents` chooses among trials of a task"
            raise ScoreError(f"record {i}: no samples. {fix}")
        if first is not None and len(steps) <= baselines.MOST_SAMPLES:
            first.append(tree)
        (score_N,) = scores_of([tree], [f"record {i}"], probability=scale.weight == "score")
        chains = chains_of(tree)
        problem.append(tree.problem)
        empty.append(_empty_samples(tree, f"record {i}"))
        with_steps.append(len(chains))
        for chain in chains:
            leaf = tree.nodes[chain[-1]]
            steps.append(len(chain))
            length.append(sum(len(tree.nodes[node].text) for node in chain))
            scores.append(score_N[chain].astype(np.float32))
            correct.append(outcome_of(tree.answer, leaf, f"record {i}"))
            vote.append(leaf.outputs.get("vote", np.nan))
        leaves = [tree.nodes[chain[-1]] for chain in chains]
        with_answers |= any("answer" in leaf.extra for leaf in leaves)
        classes.append(answer_classes([leaf.extra.get("answer") for leaf in leaves]))
    if not problem:
        raise NothingToMeasure("no pool records: best-of-n needs {problem, samples} records with scores")
    empty_P, with_steps_P, steps_B = np.array(empty), np.array(with_steps), np.array(steps, int)
    vote_B = np.array(vote, float)
    size_P = with_steps_P + empty_P
    if any(correct) and not any((class_N >= 0).any() for class_N in classes):
        with_answers = False  # every answer is null, and still some samples are correct, e.g. proofs
    with_steps_PN = np.arange(size_P.max()) < with_steps_P[:, None]
    placed = functools.partial(_placed, with_steps_PN)
    class_PN = placed(np.concatenate(classes), -1) if with_answers else None
    mask_BP = np.arange(max(1, steps_B.max(initial=0))) < steps_B[:, None]
    score_BP = np.zeros(mask_BP.shape, np.float32)
    score_BP[mask_BP] = np.concatenate([*scores, np.zeros(0, np.float32)])
    key, log_weight = _keys_and_weights(score_BP, mask_BP, scale)
    if of_pool := len(vote_B) > 0 and not np.isnan(vote_B).any():  # a fused verifier computes vote weights itself
        log_weight["last"] = PROBABILITY.log_weights(vote_B)
    return Pools(
        problem=problem,
        size_P=size_P,
        empty_P=empty_P,
        correct_PN=placed(np.array(correct, float), 0.0),
        answered_PN=with_steps_PN if class_PN is None else class_PN >= 0,
        class_PN=class_PN,
        key={rule: placed(np.asarray(key_B, float), -np.inf) for rule, key_B in key.items()},
        log_weight={rule: placed(log_B, -np.inf) for rule, log_B in log_weight.items()},
        steps_PN=placed(steps_B, 0),
        length_PN=placed(np.array(length, int), 0),
        of_pool=of_pool,
    )


def at_ends(curve_Pn: Float[np.ndarray, "P n"], size_P: Int[np.ndarray, " P"]) -> Float[np.ndarray, "P n"]:
    """Returns a curve that is NaN except at n = 1 and, if all pools have one size, at that size."""
    kept_Pn = np.full(curve_Pn.shape, np.nan)
    kept_Pn[:, 0] = curve_Pn[:, 0]
    if size_P.max() == curve_Pn.shape[1]:
        kept_Pn[:, -1] = curve_Pn[:, -1]
    return kept_Pn


def drawn_pools(pools: Pools, n: int, seed: int) -> tuple[Pools, Int[np.ndarray, "P n"]]:
    """Draws n samples from each pool without replacement; returns the new pools and the slots drawn (P, n), ascending.

    Every pool must hold at least n samples: smaller ones silently get padding.
    """
    rng, slots = np.random.default_rng(seed), pools.correct_PN.shape[1]
    order_PN = np.where(np.arange(slots) < pools.size_P[:, None], rng.random((len(pools.size_P), slots)), np.inf)
    slot_Pn = np.sort(np.argsort(order_PN, axis=1)[:, :n], axis=1)

    def of_drawn(x_PN: np.ndarray) -> np.ndarray:
        return np.take_along_axis(x_PN, slot_Pn, axis=1)

    drawn = pools._replace(
        size_P=np.full(len(slot_Pn), n),
        empty_P=n - of_drawn(pools.with_steps_PN).sum(1),
        class_PN=None if pools.class_PN is None else of_drawn(pools.class_PN),
        key={rule: of_drawn(key_PN) for rule, key_PN in pools.key.items()},
        log_weight={rule: of_drawn(log_PN) for rule, log_PN in pools.log_weight.items()},
        **{name: of_drawn(getattr(pools, name)) for name in ("correct_PN", "answered_PN", "steps_PN", "length_PN")},
    )
    return drawn, slot_Pn


def cut(tree: ReasoningTree, slot_n: Int[np.ndarray, " n"]) -> ReasoningTree:
    """Returns a pool's tree with only the samples in these slots (from 0, as in `chains_of`).

    Slots beyond the samples with steps are ignored; `empty_samples` in `extra` stays.
    """
    chains = chains_of(tree)
    nodes = list(dict.fromkeys(i for slot in slot_n if slot < len(chains) for i in chains[slot]))
    place_of = {-1: -1} | {i: place for place, i in enumerate(nodes)}
    return dataclasses.replace(
        tree, nodes=tuple(dataclasses.replace(tree.nodes[i], parent=place_of[tree.nodes[i].parent]) for i in nodes)
    )


def _placed(with_steps_PN: Bool[np.ndarray, "P N"], flat_B: Any, fill: float) -> np.ndarray:
    """Scatters one number per sample with steps into (P, N); `fill` elsewhere."""
    x_PN = np.full(with_steps_PN.shape, fill)
    x_PN[with_steps_PN] = np.asarray(flat_B)
    return x_PN


def _keys_and_weights(score_BP, mask_BP, scale: Scale) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns (ranking keys, log vote weights) of the chains, each by rule."""
    key, log_BP = rank_keys(score_BP, mask_BP), scale.log_weights(score_BP)
    if scale.weight != "score":
        of_weights = rank_keys(scale.weights(score_BP), mask_BP, log_BP)
        key |= {rule: of_weights[rule] for rule in PROBABILITY_RULES}
    log_weight = {rule: scale.log_votes(np.asarray(key_B, float), rule) for rule, key_B in key.items()}
    sum_B = log_BP.sum(1, where=mask_BP)  # in float64: float32 sums would break ties
    log_weight |= {"prod": sum_B, "mean_log": sum_B / mask_BP.sum(1)}
    return key, log_weight


def chosen_curves(pools: Pools) -> dict[str, Float[np.ndarray, "P n"]]:
    """Returns each problem's expected accuracy by rule, for n = 1 .. the smallest pool size.

    NaN as in `at_ends` if scores depend on the whole pool (`Pools.of_pool`).
    """
    curves = {rule: _chosen_by(pools, pools.key[rule]) for rule in RULES}
    return {rule: at_ends(curve_Pn, pools.size_P) for rule, curve_Pn in curves.items()} if pools.of_pool else curves


def _chosen_by(pools: Pools, key_PN: Float[np.ndarray, "P N"]) -> Float[np.ndarray, "P n"]:
    return best_of_n(key_PN, pools.correct_PN, pools.answered_PN, pools.size_P, int(pools.size_P.min()))


def best_of_n_report(
    trees: Iterable[ReasoningTree], seed: int, trials: int | None = None, scale: Scale = PROBABILITY
) -> dict[str, Any]:
    """Returns curves over n = 1 .. `n_max`, the smallest pool size; draws from larger pools use all their samples.

    A curve is `{"value", "low", "high"}`, lists over `n` with 95 % intervals over problems.

    - `rules`: per rule, `best_of_n`, `weighted_vote` and `minus_majority` (best-of-n minus majority vote on the same
      problems, at the largest n, in lists of one), and paired differences at the largest n from the best baseline and
      from one random sample: `best_of_n_minus_best_baseline`, `weighted_vote_minus_one_sample`, ...
      Differences have `value`, `low`, `high` and `better`, the fraction of resamples with the rule ahead.
    - `majority`, and `pass_at_n` (the oracle).
    - `baselines`: `random` (all scores equal) and the baselines of `baselines.py`; `baseline_votes` has their votes.
      `best_baseline` is the `name` (`majority`, `random`, NAME or `NAME.vote`) and `value` of the most accurate one at
      the largest n. There, these votes and pool-reading baselines use a single draw from each larger pool.
    - `paired`: all rules compared with each other and with majority vote (`compare_curves`).
    - `none_right` and `all_right`: the number of problems that no choice can change.
    - `n` (1 .. `n_max`), `n_problems`, `n_samples`, `largest_pool`, `repeated_problems`, `trials`, `without_answer` and
      `without_steps` (samples), and `mean_accuracy`, the mean over problems of the share of correct samples.

    Votes are sampled over `trials` orders, by default as many as `DRAWN_SAMPLES` allows, and have a `standard_error` (0
    if exact). They are null if the file has no answers. `seed` draws orders and resamples. Raises NothingToMeasure or
    ScoreError as `pools_of` does.
    """
    first: list[ReasoningTree] = []
    pools = pools_of(trees, scale, first)
    few = pools.with_steps_PN.sum() <= baselines.MOST_SAMPLES
    trivial = baselines.of_pools(first) if few else _by_length(pools)
    n_max = int(pools.size_P.min())
    trials = trials or int(np.clip(DRAWN_SAMPLES // pools.size_P.sum(), 8, 128))
    curves, errors = _curves(pools, trivial, n_max, trials, seed)
    if pools.size_P.max() > n_max > 1:
        drawn, slot_Pn = drawn_pools(pools, n_max, seed)
        again = baselines.of_pools(list(map(cut, first, slot_Pn))) if few else _by_length(drawn)
        of_drawn, _ = _curves(drawn, again, n_max, trials, seed)
        curves |= {name: np.append(curves[name][:, :-1], of_drawn[name][:, -1:], axis=1)
                   for name in _reading_pool(again) if name in curves}  # fmt: skip
    rivals, pairs = {rule: curves[f"{rule}.best_of_n"] for rule in RULES}, list(itertools.combinations(RULES, 2))
    if "majority" in curves:
        rivals["majority"] = curves["majority"]
        pairs += [(rule, "majority") for rule in RULES]
    problem_P = group_numbers(pools.problem)
    intervals = {
        name: interval(mean_draws(curve_Pn, problem_P, seed=seed)).json()
        | ({"standard_error": jsonable(errors[name])} if name in errors else {})
        for name, curve_Pn in curves.items()  # one at a time: all draws of all curves would fill the memory
    }
    paired = compare_curves(rivals, rivals, pairs, problem_P, seed)
    at_most = {row["a"]: {key: row[key][-1:] for key in Difference._fields} for row in paired if row["b"] == "majority"}
    choices = [name for name in ("majority", "random", *trivial, *map("{}.vote".format, trivial)) if name in curves]
    best = max(choices, key=lambda name: np.nan_to_num(curves[name][:, -1].mean()))
    uses = [name for name in curves if name.endswith(USES)]
    minus = {}
    for what, base_P in (("best_baseline", curves[best][:, -1]), ("one_sample", curves["random"][:, 0])):
        ahead_PC = np.stack([curves[name][:, -1] - base_P for name in uses], axis=1)
        ahead = mean_differences(ahead_PC, problem_P, seed).json()
        minus |= {f"{name}_minus_{what}": {key: x[i] for key, x in ahead.items()} for i, name in enumerate(uses)}
    in_pool_PN = np.arange(pools.correct_PN.shape[1]) < pools.size_P[:, None]
    right_P = np.where(in_pool_PN, pools.correct_PN, 0.0).sum(1)
    mean_of_pools = [row[:n].mean() for row, n in zip(pools.correct_PN, pools.size_P, strict=True)]
    return {
        "n_problems": len(pools.problem),
        "n_samples": int(pools.size_P.sum()),
        "n_max": n_max,
        "largest_pool": int(pools.size_P.max()),
        "without_answer": int((in_pool_PN & ~pools.answered_PN).sum()),
        "without_steps": int(pools.empty_P.sum()),
        "none_right": int((right_P == 0).sum()),
        "all_right": int((right_P == pools.size_P).sum()),
        "repeated_problems": len(pools.problem) - len(set(pools.problem)),
        "mean_accuracy": float(np.mean(mean_of_pools)),
        "trials": trials,
        "n": list(range(1, n_max + 1)),
        "pass_at_n": intervals["pass_at_n"],
        "majority": intervals.get("majority"),
        "rules": {
            rule: {kind: intervals.get(f"{rule}.{kind}") for kind in USES}
            | {"minus_majority": at_most.get(rule)}
            | {
                f"{use}_minus_{base}": minus.get(f"{rule}.{use}_minus_{base}")
                for use in USES
                for base in ("best_baseline", "one_sample")
            }
            for rule in RULES
        },
        "baselines": {name: intervals[name] for name in ("random", *trivial)},
        "baseline_votes": {name: intervals.get(f"{name}.vote") for name in trivial},
        "best_baseline": {"name": best, "value": float(curves[best][:, -1].mean())},
        "paired": paired,
    }


def _by_length(pools: Pools) -> dict[str, list[baselines.Chosen]]:
    """Returns the baselines that need no text, for all pools at once."""
    there_PN = pools.with_steps_PN
    numbers = {"fewest_steps": -pools.steps_PN[there_PN], "shortest": -pools.length_PN[there_PN]}
    return {name: [baselines.doubted(key_B, np.nonzero(there_PN)[0])] for name, key_B in numbers.items()}


def compare_curves(
    a: Mapping[str, Float[np.ndarray, "P n"]],
    b: Mapping[str, Float[np.ndarray, "P n"]],
    pairs: Sequence[tuple[str, str]],
    problems: Sequence[Any] | np.ndarray,
    seed: int,
) -> list[dict[str, Any]]:
    """Returns the differences between pairs of curves, (name in `a`, name in `b`).

    Each row has the names as `a` and `b`, and the lists `n` (as `blocks.shown_n`) and, over `n`, `value` (a less b),
    `low`, `high` and `better`, the fraction of resamples with a ahead. [] without pairs. Curves hold expected
    accuracies per problem at n = 1, 2, ..., all in `a` or `b` of one length.
    """
    if not pairs:
        return []
    n = np.array(blocks.shown_n(min(a[pairs[0][0]].shape[1], b[pairs[0][1]].shape[1])))
    at_once = max(1, COMPARED // (len(a[pairs[0][0]]) * len(n)))
    rows = []
    for first in range(0, len(pairs), at_once):
        part = pairs[first : first + at_once]
        columns = [a[name][:, n - 1] - b[other][:, n - 1] for name, other in part]
        less = mean_differences(np.concatenate(columns, axis=1), problems, seed)
        sure = np.tile(n == 1, len(part)) & (np.abs(less.value) < TIE)  # of one sample all choose the same
        low, high = (np.where(sure, less.value, end) for end in (less.low, less.high))
        columns_of_pairs = less._replace(low=low, high=high).json()
        rows += [
            {"a": name, "b": other, "n": n.tolist()}
            | {key: value[i * len(n) : (i + 1) * len(n)] for key, value in columns_of_pairs.items()}
            for i, (name, other) in enumerate(part)
        ]
    return rows


def _curves(
    pools: Pools, trivial: Mapping[str, Sequence[baselines.Chosen]], n_max: int, trials: int, seed: int
) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Returns accuracies (P, n) by chooser, and the standard errors of votes.

    Choosers that read the whole pool are limited by `at_ends`.
    """

    def placed(chosen: Sequence[baselines.Chosen], field: str, fill: float) -> np.ndarray:
        return _placed(pools.with_steps_PN, np.concatenate([getattr(pool, field) for pool in chosen]), fill)

    curves = {
        "pass_at_n": _chosen_by(pools, pools.correct_PN),
        "random": _chosen_by(pools, np.zeros(pools.correct_PN.shape)),
        **{name: _chosen_by(pools, placed(chosen, "key_K", -np.inf)) for name, chosen in trivial.items()},
        **{f"{rule}.best_of_n": curve_Pn for rule, curve_Pn in chosen_curves(pools).items()},
    }
    errors: dict[str, np.ndarray] = {}
    if pools.class_PN is not None:
        log_weights = {"majority": np.zeros(pools.correct_PN.shape)}
        log_weights |= {f"{rule}.weighted_vote": pools.log_weight[rule] for rule in RULES}
        of_trivial = {f"{name}.vote": placed(chosen, "weight_K", 0.0) for name, chosen in trivial.items()}
        log_weights |= {name: PROBABILITY.log_weights(weight_PN) for name, weight_PN in of_trivial.items()}
        log_weight_PNK = np.stack(list(log_weights.values()), -1)
        votes = vote_accuracy(
            pools.class_PN, pools.correct_PN, log_weight_PNK, pools.size_P, n_max, trials=trials, seed=seed
        )
        for k, name in enumerate(log_weights):
            curves[name], errors[name] = votes.value_PnK[:, :, k], votes.standard_error_nK[:, k]
    of_pool = _reading_pool(trivial) + ([f"{rule}.weighted_vote" for rule in RULES] if pools.of_pool else [])
    return curves | {name: at_ends(curves[name], pools.size_P) for name in of_pool if name in curves}, errors


def _reading_pool(trivial: Mapping[str, Sequence[baselines.Chosen]]) -> list[str]:
    """Returns the trivial curves whose keys or weights depend on the whole pool.

    All votes do, since a chain below the pool's mean has less weight (`baselines.doubted`).
    """
    names = [name for name, chosen in trivial.items() if any(pool.of_pool for pool in chosen)]
    return names + [f"{name}.vote" for name in trivial]


def _empty_samples(tree: ReasoningTree, where: str) -> int:
    """Returns the number of samples without steps, counted by the reader or a search."""
    count = tree.extra.get("empty_samples", 0)
    if not isinstance(count, int) or isinstance(count, bool) or count < 0:
        raise ScoreError(f"{where}: empty_samples is {count!r}: give the number of samples without steps")
    return count


def outcome_of(truth: Any, leaf: Node, where: str) -> float:
    """Returns 1 if a sample is correct (`leaf.correct`, or else its `extra["answer"]` equals `truth`), else 0.

    A sample that its verifier left undecided, or that has no answer, is incorrect. Raises ScoreError, naming `where`,
    if both `leaf.correct` and `truth` are absent.
    """
    if leaf.correct is not None or UNDECIDED in leaf.extra:
        return float(leaf.correct or False)
    if canonical_answer(truth) is None:
        remedy = "Give each sample `correct` (`jprm label outcomes`), or the record its `answer`"
        raise ScoreError(f"{where}: outcome unknown. {remedy}.")
    return float(equivalent(truth, leaf.extra.get("answer")))


def run(options: BestOfNOptions) -> Report:
    if options.model is not None:
        prm = model_of(options)
        files = {"pools": (options.input, source("pools"))}
        scored, too_long = scored_files(prm, files, f"{options.to}.scores", options.too_long)
        return figures(Request(scored, scale=prm.scale, too_long=too_long))["pools"] | {"own_rule": prm.rule}
    scale = adapter_of(options.adapter).score_scale if options.adapter else _told_scale(options.input)
    unread: list[str] = []
    placed = ((f"{options.input}:{line}", tree) for line, tree in enumerate(read_trees(options.input), start=1))
    report = best_of_n_report(stored_trees(placed, options.on_error, unread), seed=0, scale=scale) | {"too_long": 0}
    return report | ({UNREAD: unread} if unread else {})


def _told_scale(path: str | os.PathLike) -> Scale:
    """Returns the score scale of a file: stored beside it, or else inferred from `semantics` and range.

    Scores outside [0, 1] with semantics implicit, advantage or value are rewards; advantages in [-1, 1] are
    differences.
    """
    if (scale := stored_scale(path)) != PROBABILITY:
        return scale
    semantics, low, high = set(), 0.0, 1.0
    for tree in read_trees(path):
        semantics.add(tree.semantics)
        if semantics & {"correctness", "rating"}:
            return scale
        scores = [node.score for node in tree.nodes if node.score is not None]
        low, high = min([low, *scores]), max([high, *scores])
    if (low, high) == (0, 1):
        return scale
    return Scale(threshold=0.0, weight="half") if semantics == {"advantage"} and low >= -1 and high <= 1 else LOG_ODDS


def figures(request: Request) -> Report:
    return {
        name: best_of_n_report(records, request.seed, scale=request.scale) | {"too_long": request.too_long.get(name, 0)}
        for name, records in request.data.items()
    }


def tables(report: Report) -> Iterator[Table | str]:
    if report.get("none_right") == report["n_problems"]:
        yield (
            f"No sample of these {report['n_problems']} problems is correct, so that no choice can be right. Were they"
            " cut off (max_tokens), or are their answers not read? Look at `finish_reason` and `answer` of samples."
        )
        return
    n_max, own_rule = report["n_max"], report.get("own_rule")
    shown = sorted({2**k for k in range(n_max.bit_length() - 1)} | {n_max})
    named = {
        "oracle (pass@n)": report["pass_at_n"],
        "majority vote": report["majority"],
        **{
            f"{use} by {words(rule)}{' (its own rule)' * (rule == own_rule)}": curves[key]
            for use, key in (("best", "best_of_n"), ("vote", "weighted_vote"))
            for rule, curves in report["rules"].items()
        },
        **_trivial(report),
    }
    rows = [
        [label, *(curve["value"][n - 1] for n in shown[:-1]), last(curve)]
        for label, curve in named.items()
        if curve is not None
    ]
    title = f"Best of n: {report['n_problems']} problems, mean accuracy {percent(report['mean_accuracy'])} %"
    title += left_out_words(report)
    hidden = any(curves["best_of_n"]["value"][-1] is None for curves in report["rules"].values())
    caption = f"Not shown: {_of_unequal_pools(report)}." if hidden else ""
    yield Table(title, ("", *(f"n = {n}" for n in shown[:-1]), f"n = {n_max} [95 %]"), rows, caption)
    if (base := report.get("best_baseline")) is None:  # a report of 0.1
        return
    rows = [
        [words(rule), *(curves[f"{use}_minus_best_baseline"] for use in USES)]
        for rule, curves in report["rules"].items()
    ]
    title = f"Less the best trivial baseline, {_named(base['name'])}, which is right in {percent(base['value'])} %"
    yield Table(title, ("", "best of n", "weighted vote"), rows)


def section(models: Sequence[PageModel]) -> Iterator[Block]:
    for name, first in models[0].results["best_of_n"].items():
        yield Heading(f"{name}: {first['n_problems']} problems")
        if len(models) > 1:
            yield _figure_of_models(name, models)
        for model in models:
            yield _figure(name, model)
            yield _table(model.name, model.results["best_of_n"][name])


def _table(model: str, report: Report) -> Table:
    pairs = {(row["a"], row["b"]): row for row in report["paired"]}
    rows = []
    for rule, curves_of_rule in report["rules"].items():
        row = pairs.get((rule, "majority"))
        against = [last(row), row["better"][-1]] if row else ["", ""]
        vote = curves_of_rule["weighted_vote"]
        rows.append([words(rule), last(curves_of_rule["best_of_n"]), *against, vote and last(vote)])
    rivals = {"oracle": report["pass_at_n"], "majority": report["majority"]}
    rows += [[label, last(curve), "", "", ""] for label, curve in rivals.items() if curve is not None]
    votes = report.get("baseline_votes", {})  # results of 0.1 have none
    rows += [
        [f"baseline: {words(name)}", last(curve), "", "", (vote := votes.get(name)) and last(vote)]
        for name, curve in sorted(report["baselines"].items(), key=lambda item: -(item[1]["value"][-1] or 0.0))
    ]
    columns = (f"{model}, n = {report['n_max']}", "best of n, %", "less majority vote", "ahead in % of draws",
               "weighted vote, %")  # fmt: skip
    return Table("How often the chosen chain is right", columns, rows)


def _figure(name: str, model: PageModel) -> Figure:
    report, first = model.results["best_of_n"][name], model.results["model"]["rule"]
    rules = list(dict.fromkeys([first, *SHOWN_RULES]))[:3]
    series = [_series(f"by {words(rule)}", report["rules"][rule]["best_of_n"], band=rule == first) for rule in rules]
    series += [_series(label, curve, dashed=True) for label, curve in _rivals(report).items()]
    return Figure(
        name=f"best_of_n-{slug(name)}-{slug(model.name)}",
        title=f"Best of n, {name}, {model.name}",
        description=f"Accuracy of best-of-n on {name} for n = 1 to {report['n_max']}, by rule, with rivals; values in"
        " the table.",
        caption=model.name,
        note="Across: the number of samples chosen among. Up: the fraction of problems whose chosen sample is right;"
        " exact, not simulated. The band is the 95 % interval over problems. The oracle is the most that any chooser"
        " can reach.",
        draw=functools.partial(curves, series=series, x_label="n", y_label="right, %"),
    )


def _figure_of_models(name: str, models: Sequence[PageModel]) -> Figure:
    rules = [(model, model.results["model"]["rule"]) for model in models]
    series = [
        _series(f"{model.name}, {words(rule)}", model.results["best_of_n"][name]["rules"][rule]["best_of_n"], band=True)
        for model, rule in rules
    ]
    rivals = _rivals(models[0].results["best_of_n"][name])
    series += [_series(label, curve, dashed=True) for label, curve in rivals.items() if label != "oracle"]
    return Figure(
        name=f"best_of_n-{slug(name)}-models",
        title=f"Best of n, {name}",
        description=f"Accuracy of best-of-n on {name} by model; values in the tables.",
        caption="All models",
        note="The models on the same problems, each by the rule that fits its labels. Bands that overlap do not mean a"
        " tie: see the paired comparison.",
        draw=functools.partial(curves, series=series, x_label="n", y_label="right, %"),
    )


def _series(label: str, curve: Mapping[str, Any], *, band: bool = False, dashed: bool = False) -> Series:
    return Series(label, curve["value"], *((curve["low"], curve["high"]) if band else (None, None)), dashed)


def _rivals(report: Report) -> dict[str, Mapping[str, Any]]:
    rivals = {"oracle": report["pass_at_n"], "majority": report["majority"], "random": report["baselines"]["random"]}
    best = _named(report["best_baseline"]["name"]) if "best_baseline" in report else "shortest"
    if best not in ("majority vote", "a blind choice"):
        rivals[best] = _trivial(report)[best]
    return {label: curve for label, curve in rivals.items() if curve is not None}


def _trivial(report: Report) -> dict[str, Mapping[str, Any]]:
    """Returns the curves of the trivial baselines and of their votes, by display name."""
    votes = {f"{name}.vote": curve for name, curve in report.get("baseline_votes", {}).items() if curve is not None}
    return {_named(name): curve for name, curve in {**report["baselines"], **votes}.items()}


def _named(baseline: str) -> str:
    name, vote, _ = baseline.partition(".vote")
    plain = {"majority": "majority vote", "random": "a blind choice"}.get(name, words(name))
    return f"vote by {plain}" if vote else plain


def findings(results: Mapping[str, Any]) -> Iterator[Finding]:
    """Yields best of n and weighted vote for each file, by the model's own rule."""
    rule = results["model"]["rule"]
    for name, report in results["best_of_n"].items():
        use, n_max = report["rules"][rule], report["n_max"]
        base = _named(report.get("best_baseline", {}).get("name", ""))  # results of 0.1 have none
        fall = results.get("diagnostics", {}).get("over_optimisation", {}).get(name, {}).get(rule)
        notes = {"best_of_n": _peak(use["best_of_n"], words(rule), fall), "weighted_vote": ""}
        if use["weighted_vote"] is not None:
            notes["weighted_vote"] = f"Majority vote has {percent(report['majority']['value'][-1])} %."
        for kind, wording in (("best_of_n", "best of {}"), ("weighted_vote", "weighted vote of {}")):
            if use[kind] is None:
                continue
            if use[kind]["value"][-1] is None:
                note = f"Not shown: {_of_unequal_pools(report)}."
                yield Finding(f"{name}, {wording.format(n_max)}", None, note=note, kind="open")
                continue
            note, from_one = notes[kind], use.get(f"{kind}_minus_one_sample")
            if from_one is not None and from_one["low"] is not None:
                note = f"It is {compared(from_one, 'one sample')}. {note}"
            less = use.get(f"{kind}_minus_best_baseline")
            yield Finding(f"{name}, {wording.format(n_max)}", last(use[kind]), base, less, note)


def _of_unequal_pools(report: Report) -> str:
    least, most = report["n_max"], report["largest_pool"]
    sizes = f"scores depend on all samples of a pool, and pools have {least} to {most}"
    return f"{sizes}. Keep {least} of each, and score these"


def _peak(curve: Mapping[str, Any], rule: str, fall: Mapping[str, Any] | None) -> str:
    """Describes the maximum of a curve over n; `fall` is the diagnostic that decides if it drops afterwards."""
    n_max = len(curve["value"])
    if curve["value"][-1] is None:
        return ""
    if None in curve["value"]:
        return f"By {rule}; below n = {n_max} the curve is left out: a score depends on all samples of the pool."
    peak = int(np.argmax(curve["value"]))
    top, end = (f"{percent(curve['value'][i])} %" for i in (peak, -1))
    if peak == n_max - 1:
        return f"By {rule} it is highest at n = {n_max}, the largest: more samples have not made it worse."
    if fall is not None and fall["finding"]:
        return f"By {rule} it falls with n: {top} at n = {peak + 1}, {end} at {n_max}."
    return f"By {rule} it is highest at n = {peak + 1} with {top}; that it falls, to {end} at {n_max}, is not shown."


def glance(models: Sequence[PageModel]) -> Iterator[str | Table]:
    """Yields a description of the first file, and a table with the best trivial chooser."""
    name, report = next(iter(models[0].results["best_of_n"].items()))
    if "best_baseline" not in report:  # results of 0.1
        return
    n_max, one_right = report["n_max"], report["baselines"]["random"]["value"][0]
    sentence = (
        f"{name}: {report['n_problems']:,} problems, {n_max} samples of each. One is right in {percent(one_right)} %"
    )
    if report["majority"] is not None:
        many = report["majority"]["value"][-1]
        sentence += f", the most common answer in {percent(many)} %"
        sentence += ": incorrect answers agree more often than correct ones" if many < one_right else ""
    yield f"{sentence}."
    yield "A model's scores choose a sample, or weigh the votes. A trivial chooser reads the text, without a model."
    rows = []
    for model in models:
        of_model = model.results["best_of_n"][name]
        use, base = of_model["rules"][model.results["model"]["rule"]], of_model["best_baseline"]
        vote = "" if use["weighted_vote"] is None else blocks.interval(last(use["weighted_vote"]))
        rival = f"{percent(base['value'])} ({_named(base['name'])})"
        rows.append((model.name, blocks.interval(last(use["best_of_n"])), vote, rival))
    yield Table("Right, %", ("", f"best of {n_max}", "weighted vote", "best trivial chooser"), rows)


def problem_draws(results: Mapping[str, Any], scores: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for name in results["best_of_n"]:
        pools = pools_of(scores[name], scale_of(results))
        for rule, curve_Pn in chosen_curves(pools).items():
            drawn = mean_draws(curve_Pn[:, -1], pools.problem, seed=results["seed"])
            yield f"{name}, best of {curve_Pn.shape[1]} by {words(rule)}", drawn


def left_out(entry: Report) -> Iterator[tuple[str, int]]:
    for name, report in entry.items():
        yield f"{name}: samples without an answer (cannot be chosen)", report["without_answer"]
        yield f"{name}: samples without a step (cannot be chosen)", report.get("without_steps", 0)
        yield f"{name}: problems without a right sample", report["none_right"]
        yield f"{name}: problems with right samples only", report["all_right"]
        yield f"{name}: repeated problems (drawn together)", report["repeated_problems"]
        yield f"{name}: samples beyond the largest n", report["largest_pool"] - report["n_max"]


BENCHMARK = Benchmark(
    name="best_of_n",
    title="Best of n",
    tables=tables,
    run=run,
    figures=figures,
    reader="pools",
    reports=lambda entry: entry.values(),
    section=section,
    findings=findings,
    glance=glance,
    problem_draws=problem_draws,
    left_out=left_out,
)
