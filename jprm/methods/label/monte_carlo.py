"""Monte Carlo values (the accepted fraction of a prefix's k completions), and OmegaPRM's search.

Math-Shepherd (arXiv:2312.08935) calls this fraction the soft estimate, and "any completion is correct" the hard one.
The adaptive mode samples more rollouts while the confidence interval contains the threshold between correct and
incorrect. Under such stopping the fraction is biased, and an interval for a fixed number of rollouts loses coverage. So
there the soft estimate is `unbiased` and the interval is a `confidence_sequence`, valid at any stopping time. The hard
estimate uses only the first k rollouts.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import itertools
import math
import os
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
from jaxtyping import Bool, Float, Int
from scipy.special import betaln, log_ndtr, xlog1py, xlogy

from jprm.methods.label.config import MonteCarloConfig, OmegaConfig
from jprm.methods.policy.protocol import Policy, Prefix, Sample
from jprm.methods.policy.sample_cache import KeptPolicy, PolicyError, prefix_key
from jprm.methods.verify import verifiers
from jprm.tree import Node, ReasoningTree, with_labels, without_chain

ORIGIN = "monte_carlo"


def label_trees(
    trees: Iterable[ReasoningTree], rollouts: Rollouts, config: MonteCarloConfig
) -> Iterator[ReasoningTree]:
    """Yields new trees in order, with a value in [0, 1] on every node as its label; semantics `value`.

    Chains and pools become kind `tree`. A node's `extra` counts its successful `rollouts` and the `right` ones, and has
    the interval from `low` to `high`, `wilson` or, if adaptive, `confidence_sequence`, with `config.z`. Adaptive labels
    also depend on the first k rollouts: `first_rollouts` and `first_right`. A leaf with a known outcome takes it as its
    value, without rollouts or interval. If all rollouts of a node failed, it stays unlabelled. Lazy:
    `config.trees_at_once` trees are sampled together, and waited for. `rollouts` must be entered (`with`).

    Raises:
      ValueError: the verifier is unknown.
      RecordError: the verifier cannot judge a tree.
      PolicyError: the policy failed at all rollouts of a batch.
    """
    trees, verifier = iter(trees), verifiers.find(config.verifier)
    while chunk := list(itertools.islice(trees, config.trees_at_once)):
        records = [verifiers.record_of_problem(tree) for tree in chunk]
        for record in records:
            verifier.check(record, f"problem {record['problem'][:80]!r}")
        yield from _label_chunk(chunk, records, rollouts, config, verifier)


def prefixes_of(tree: ReasoningTree) -> list[Prefix]:
    """Returns the prefix up to and including each node, in the order of `tree.nodes`."""
    prefixes: list[Prefix] = []
    for node in tree.nodes:
        before = prefixes[node.parent].steps if node.parent >= 0 else ()
        prefixes.append(Prefix(tree.plain_problem, (*before, node.text)))
    return prefixes


@dataclasses.dataclass
class _Counts:
    """Rollout counts for a tree's N nodes. `asked` includes failed ones; `rounds`: (right, total) after each round."""

    known_N: Bool[np.ndarray, " N"]
    asked_N: Int[np.ndarray, " N"]
    right_N: Int[np.ndarray, " N"]
    total_N: Int[np.ndarray, " N"]
    tokens_N: Int[np.ndarray, " N"]
    rounds: list[tuple[Int[np.ndarray, " N"], Int[np.ndarray, " N"]]] = dataclasses.field(default_factory=list)


def _counts(tree: ReasoningTree) -> _Counts:
    inner = {node.parent for node in tree.nodes}
    known = [node.correct is not None and i not in inner for i, node in enumerate(tree.nodes)]
    none_N = np.zeros(len(known), int)
    return _Counts(np.array(known, bool), none_N, none_N.copy(), none_N.copy(), none_N.copy())


def _label_chunk(chunk, records, rollouts, config, verifier):
    prefixes = [prefixes_of(tree) for tree in chunk]
    counts = [_counts(tree) for tree in chunk]
    more = [np.where(counted.known_N, 0, config.k) for counted in counts]
    while any(n.any() for n in more):
        places = [(t, i) for t, n in enumerate(more) for i in np.flatnonzero(n)]
        requests = [(prefixes[t][i], config.seed + int(counts[t].asked_N[i]), int(more[t][i])) for t, i in places]
        drawn = rollouts.draw(requests)
        accepted = verifier.accepts([(records[t], prefixes[t][i], s) for (t, i), s in zip(places, drawn, strict=True)])
        for (t, i), samples, right in zip(places, drawn, accepted, strict=True):
            counts[t].asked_N[i] += more[t][i]
            counts[t].total_N[i] += len(right)
            counts[t].right_N[i] += sum(right)
            counts[t].tokens_N[i] += sum(sample.tokens for sample in samples)
        for counted in counts:
            counted.rounds.append((counted.right_N.copy(), counted.total_N.copy()))
        more = _more(config, counts)
    return [_labelled(tree, counted, config) for tree, counted in zip(chunk, counts, strict=True)]


def _more(config: MonteCarloConfig, counts: Sequence[_Counts]) -> list[Int[np.ndarray, " N"]]:
    """Returns the next rollouts per prefix in several trees, under a budget per tree or for all trees."""
    adaptive = config.adaptive
    if adaptive is None:
        return [np.zeros_like(counted.total_N) for counted in counts]
    limits = {"k": config.k, "most": adaptive.most, "seed": config.seed}
    if config.tokens is None:
        budgets = [int(adaptive.mean * (~counted.known_N).sum()) - int(counted.asked_N.sum()) for counted in counts]
        return [allocate(_open(config, c), c.asked_N, budget=b, **limits) for c, b in zip(counts, budgets, strict=True)]
    columns = [(c.total_N, c.tokens_N, c.asked_N, c.known_N, _open(config, c)) for c in counts]
    total_S, tokens_S, asked_S, known_S, open_S = map(np.concatenate, zip(*columns, strict=True))
    mean = tokens_S.sum() / max(1, total_S.sum())
    budget = int((config.tokens * (~known_S).sum() - tokens_S.sum()) / max(1.0, mean))
    granted_S = allocate(open_S, asked_S, budget=budget, **limits)
    return np.split(granted_S, np.cumsum([len(counted.total_N) for counted in counts])[:-1])


def _open(config: MonteCarloConfig, counts: _Counts) -> Bool[np.ndarray, " N"]:
    """Returns which prefixes are still undecided."""
    assert config.adaptive is not None
    return ~counts.known_N & undecided(counts.right_N, counts.total_N, config.adaptive.threshold, config.z)


def _estimates(counts: _Counts, config: MonteCarloConfig) -> Float[np.ndarray, " N"]:
    right_N, total_N = counts.rounds[0] if counts.rounds else (counts.right_N, counts.total_N)
    if config.estimate == "hard":
        return hard(right_N, total_N)
    value_N = soft(counts.right_N, counts.total_N)
    if config.adaptive is None:
        return value_N
    for i in np.flatnonzero(counts.total_N > total_N):
        totals = tuple(sorted({int(total[i]) for _, total in counts.rounds} - {0}))
        value_N[i] = unbiased(int(counts.right_N[i]), totals, config.adaptive.threshold, config.z)
    return value_N


def _labelled(tree: ReasoningTree, counts: _Counts, config: MonteCarloConfig) -> ReasoningTree:
    value_N = _estimates(counts, config)
    interval = wilson if config.adaptive is None else confidence_sequence
    low_N, high_N = interval(counts.right_N, counts.total_N, config.z)
    labels, notes = [], []
    for i, node in enumerate(tree.nodes):
        note = {"rollouts": int(counts.total_N[i]), "right": int(counts.right_N[i])}
        if counts.known_N[i]:
            label = float(bool(node.correct))
        else:
            label = None if np.isnan(value_N[i]) else float(value_N[i])
            note |= {"low": round(float(low_N[i]), 6), "high": round(float(high_N[i]), 6)}
            if config.adaptive is not None:
                right_N, total_N = counts.rounds[0]
                note |= {"first_rollouts": int(total_N[i]), "first_right": int(right_N[i])}
        labels.append(label)
        notes.append(note)
    return with_labels(tree, labels, "value", ORIGIN, notes)


# ---- Rollouts: prefixes completed to the end, sampled in batches and cached.


class Rollouts(KeptPolicy):
    """Completions of prefixes: `draw` reads stored rollouts and samples the missing ones.

    It must be entered (`with`), which creates or reads the file `path` and locks it: see `KeptPolicy`. Up to `batch`
    rollouts are sampled per call of the policy. `failed` counts failed rollouts of this object, which are not stored;
    `last_error` is the last one's reason, or `None`.
    """

    def __init__(self, policy: Policy, path: str | os.PathLike, *, batch: int = 256):
        super().__init__(policy, path)
        self._batch = batch
        self.failed, self.last_error = 0, None  # rollouts marked as errors, which a later run samples again
        self._failed_in_a_row = 0  # prefixes

    def draw(self, requests: Sequence[tuple[Prefix, int, int]], *, tolerated: int = 0) -> list[list[Sample]]:
        """Returns rollouts start .. start + count - 1 for every (prefix, start, count), except failed ones.

        `start` counts from 0. One list per request, in order; shorter than `count`, or [], if rollouts failed. Waits
        for the policy. A batch is written to disk before it is used.

        Args:
          tolerated: consecutive prefixes at which a policy that has worked before may fail.

        Raises PolicyError if the policy failed at all rollouts of a batch, and at more than `tolerated` prefixes in a
        row. Earlier batches are kept.
        """
        missing: dict[tuple[int, int], dict[str, Prefix]] = collections.defaultdict(dict)
        for prefix, start, count in requests:
            key = prefix_key(prefix)
            for run in self.missing(key, count, "end", start):
                missing[run][key] = prefix
        for (first, n), prefixes in missing.items():
            size, asked = max(1, self._batch // n), list(prefixes.values())
            for at in range(0, len(asked), size):
                self._sample(asked[at : at + size], first, n, tolerated)
        return [self.kept(prefix, count, "end", start) for prefix, start, count in requests]

    def _sample(self, prefixes: Sequence[Prefix], first: int, n: int, tolerated: int) -> None:
        drawn = [sample for samples in self.sample(prefixes, n, until="end", seed=first) for sample in samples]
        errors = [sample.error for sample in drawn if sample.finish_reason == "error"]
        if errors:
            self.failed += len(errors)
            self.last_error = errors[-1]
        self._failed_in_a_row = self._failed_in_a_row + len(prefixes) if len(errors) == len(drawn) else 0
        if self._failed_in_a_row > (tolerated if self.answered else 0):
            kept = f"Earlier rollouts are in {self.path}; the same command continues from them"
            raise PolicyError(f"policy {self.name} failed at all {len(drawn)} rollouts: {self.last_error}. {kept}")


# ---- Estimates and intervals from a fixed number of rollouts, and which prefixes get more.


def soft(right: Int[np.ndarray, "*S"], total: Int[np.ndarray, "*S"]) -> Float[np.ndarray, "*S"]:
    """Soft estimate: `right` of `total` rollouts, a fraction; NaN if `total` is 0."""
    right, total = np.asarray(right, float), np.asarray(total, float)
    return np.divide(right, total, out=np.full(total.shape, np.nan), where=total > 0)


def hard(right: Int[np.ndarray, "*S"], total: Int[np.ndarray, "*S"]) -> Float[np.ndarray, "*S"]:
    """Hard estimate: 1.0 if any rollout is correct (`right` > 0), else 0.0; NaN if `total` is 0."""
    return np.where(np.asarray(total) > 0, (np.asarray(right) > 0).astype(float), np.nan)


def wilson(
    right: Int[np.ndarray, "*S"], total: Int[np.ndarray, "*S"], z: float = 1.96
) -> tuple[Float[np.ndarray, "*S"], Float[np.ndarray, "*S"]]:
    """Returns (low, high) of Wilson's score interval (E. B. Wilson, JASA 22, 1927); (0, 1) if `total` is 0.

    The bounds are the solutions p of |right / total - p| = z sqrt(p (1 - p) / total).
    """
    right, total = np.asarray(right, float), np.asarray(total, float)
    scale = total + z * z
    middle = (right + z * z / 2) / scale
    spread = right * (total - right) / np.maximum(total, 1) + z * z / 4
    half = z * np.sqrt(spread) / scale
    # 0 right of n, or n of n: the bound is exact, rounding would leave 1e-17
    low = np.where(right == 0, 0.0, np.maximum(middle - half, 0.0))
    return low, np.where(right == total, 1.0, np.minimum(middle + half, 1.0))


def allocate(
    open_S: Bool[np.ndarray, " S"], asked_S: Int[np.ndarray, " S"], *, k: int, most: int, budget: int, seed: int
) -> Int[np.ndarray, " S"]:
    """Returns the next round's rollouts for each of S prefixes.

    An open prefix gets at most k, and with its earlier `asked_S` at most `most`; the sum is at most the budget, 0 if
    that is negative. `open_S` marks undecided prefixes; others get 0. The seed decides the service order. It must not
    depend on outcomes, or the estimates would be biased.
    """
    wanted_S = np.where(open_S, np.clip(most - asked_S, 0, k), 0)
    order_S = np.random.default_rng(seed).permutation(len(wanted_S))
    before_S = np.cumsum(wanted_S[order_S]) - wanted_S[order_S]
    granted_S = np.zeros_like(wanted_S)
    granted_S[order_S] = np.clip(budget - before_S, 0, wanted_S[order_S])
    return granted_S


# ---- Estimates from trials that stop when they have decided on which side of a threshold a probability is.

_BISECTIONS = 50


def confidence_sequence(
    right: Int[np.ndarray, "*S"], total: Int[np.ndarray, "*S"], z: float = 1.96
) -> tuple[Float[np.ndarray, "*S"], Float[np.ndarray, "*S"]]:
    """Returns the (low, high) success probabilities not rejected by `right` of `total` trials; (0, 1) if `total` is 0.

    Covers with probability at least 1 - alpha at any stopping time, with the alpha of z standard errors (z = 1.96: 5
    %). Inverts Ville's inequality for the likelihood ratio of the beta(1/2, 1/2) mixture to p (H. Robbins, Annals of
    Mathematical Statistics 41, 1970).
    """
    right, total = np.asarray(right, float), np.asarray(total, float)
    mean = np.divide(right, total, out=np.full(total.shape, 0.5), where=total > 0)
    ends = []
    for outside in (np.zeros_like(mean), np.ones_like(mean)):
        inside = mean
        for _ in range(_BISECTIONS):
            middle = (inside + outside) / 2
            kept = undecided(right, total, middle, z)
            inside, outside = np.where(kept, middle, inside), np.where(kept, outside, middle)
        ends.append(outside)
    return np.where(right == 0, 0.0, ends[0]), np.where(right == total, 1.0, ends[1])


def undecided(
    right: Float[np.ndarray, "*S"], total: Float[np.ndarray, "*S"], p: Float[np.ndarray, "*#S"] | float, z: float
) -> Bool[np.ndarray, "*S"]:
    """Returns whether probability p lies in the `confidence_sequence` of `right` of `total` trials.

    `z` is in standard errors, as there. `True` if `total` is 0.
    """
    right, wrong = np.asarray(right, float), np.asarray(total, float) - right
    fixed = xlogy(right, p) + xlog1py(wrong, -np.asarray(p))
    mixture = betaln(right + 0.5, wrong + 0.5) - math.log(math.pi)
    return mixture - fixed < -math.log(2) - log_ndtr(-z)


@functools.lru_cache(maxsize=4096)
def unbiased(right: int, totals: tuple[int, ...], threshold: float, z: float) -> float:
    """Returns the unbiased estimate from trials that were counted at `totals`, and continued while undecided.

    This is the expectation of the first trial given the successes at the last total: the fraction of sequences with
    this end that begin with a success (Girshick, Mosteller & Savage, Annals of Mathematical Statistics 17, 1946). A
    limit on the trials of an undecided probability must not depend on their outcomes.

    Args:
      right: successes at the last total, 0 to totals[-1].
      totals: numbers of trials at each decision, increasing.
      threshold: trials continued while `undecided(..., threshold, z)`.
      z: half-width in standard errors, as in `confidence_sequence`.
    """
    tilt = right / totals[-1]  # weighs all sequences with this end alike, and keeps the sums from underflow
    if len(totals) == 1:
        return tilt
    sequences = _binomial(totals[0], tilt)
    starting = sequences * np.arange(totals[0] + 1) / totals[0]
    for before, after in zip(totals[:-1], totals[1:], strict=True):
        continued = undecided(np.arange(before + 1.0), np.full(before + 1, float(before)), threshold, z)
        block = _binomial(after - before, tilt)
        sequences = np.convolve(np.where(continued, sequences, 0.0), block)
        starting = np.convolve(np.where(continued, starting, 0.0), block)
    return float(starting[right] / sequences[right])


def _binomial(n: int, p: float) -> Float[np.ndarray, " N"]:
    """Returns the probabilities of 0 .. n successes."""
    s = np.arange(n + 1.0)
    return np.exp(xlogy(s, p) + xlog1py(n - s, -p) - betaln(s + 1, n - s + 1)) / (n + 1)


# ------------------------------------------------------------------------------------------------------------- OmegaPRM
# Luo et al., arXiv:2406.06592: a tree search for first errors. A state is a prefix with MC, the correct fraction of its
# k rollouts. Each search takes the most promising incorrect rollout, finds its first error by binary search, and adds
# the prefixes on the way as states. That costs O(k log M) rollouts for M steps, instead of k M for all steps.
#
# Rollouts are split into steps first, so a search ends at a single step; the paper splits by tokens and ends at a
# sixteenth of the mean length. Only incorrect rollouts are candidates: a correct one has no first error.

Result = TypeVar("Result")
JudgedSamples = list[tuple[Sample, bool]]
Steps = Generator[Prefix, JudgedSamples | None, Result]
"""Part of a search: yields prefixes, and receives (rollout, is correct) for their rollouts, except failed ones."""

FAILED_IN_A_ROW = 16
"""If all rollouts for so many prefixes in a row fail, the policy counts as down."""


def quality(mc: Float[np.ndarray, "*S"], tokens: Int[np.ndarray, "*S"], config: OmegaConfig) -> Float[np.ndarray, "*S"]:
    """Q(s, r) = alpha^(1 - MC(s)) beta^(len(r) / L): high for short errors from mostly correct states.

    `mc` is MC(s), `tokens` the rollout's length len(r); alpha, beta and L (`length`) are the config's.
    """
    return config.alpha ** (1 - np.asarray(mc)) * config.beta ** (np.asarray(tokens) / config.length)


def exploration(visits: Int[np.ndarray, "*S"], total: int, config: OmegaConfig) -> Float[np.ndarray, "*S"]:
    """U(s) = c_puct sqrt(sum_i N(s_i)) / (1 + N(s)): `visits` is N(s), `total` the sum over all states of the tree."""
    return config.c_puct * math.sqrt(total) / (1 + np.asarray(visits))


@dataclasses.dataclass
class ValuedPrefix:
    """A valued prefix: `right` of `total` rollouts are correct; `visits` is N(s)."""

    right: int
    total: int
    visits: int = 0

    @property
    def mc(self) -> float:
        return self.right / self.total if self.total else math.nan


@dataclasses.dataclass
class Search:
    """The search's state for one problem; `run_searches` fills it."""

    record: Mapping[str, Any]  # of the problem, for the verifier
    states: dict[tuple[str, ...], ValuedPrefix] = dataclasses.field(default_factory=dict)  # by their prefix's steps
    wrong: list[tuple[tuple[str, ...], Sample]] = dataclasses.field(default_factory=list)  # candidates, after a prefix
    errors: list[tuple[str, ...]] = dataclasses.field(default_factory=list)  # the chains that end at a first error
    searches: int = 0
    spent: int = 0  # rollouts of all states

    @property
    def problem(self) -> str:
        return self.record["problem"]


def label_problems(
    trees: Iterable[ReasoningTree],
    rollouts: Rollouts,
    config: OmegaConfig,
    *,
    left_out: collections.Counter | None = None,
) -> Iterator[ReasoningTree]:
    """Yields a tree of values (`tree_of_search`) for every problem, in order; nodes of the given trees are ignored.

    If a problem's first k rollouts are all correct or all incorrect, there is no error to find. It yields no tree, and
    is counted in `left_out` as "too easy" or "too hard"; also "no rollouts" if all failed, and "nothing found". Lazy:
    `config.problems_at_once` are searched together, and waited for. `rollouts` must be entered (`with`).

    Raises ValueError for an unknown verifier, RecordError if it cannot judge a problem, PolicyError like
    `run_searches`.
    """
    left_out = collections.Counter() if left_out is None else left_out
    trees, check = iter(trees), verifiers.find(config.verifier).check
    while chunk := list(itertools.islice(trees, config.problems_at_once)):
        searches = [Search(verifiers.record_of_problem(tree) | {"problem": tree.plain_problem}) for tree in chunk]
        for search in searches:
            check(search.record, f"problem {search.problem[:80]!r}")
        run_searches(searches, rollouts, config)
        for tree, search in zip(chunk, searches, strict=True):
            if reason := _why_none(search):
                left_out[reason] += 1
            else:
                yield tree_of_search(search, tree)


def _why_none(search: Search) -> str:
    """Returns the reason why a search yields no tree; "" if it yields one."""
    if (root := search.states.get(())) is None:
        return "no rollouts"
    if not 0 < root.mc < 1:
        return "too easy" if root.mc == 1 else "too hard"
    return "" if len(search.states) + len(search.errors) > 1 else "nothing found"


def run_searches(searches: Sequence[Search], rollouts: Rollouts, config: OmegaConfig) -> None:
    """Runs searches in lockstep, to their end: each round samples and judges k rollouts of one prefix per search.

    Fills the given searches in place; the limits `config.searches` and `config.budget` are per search. Raises
    ValueError for an unknown verifier, PolicyError if the policy failed at all rollouts of more than 16
    (`FAILED_IN_A_ROW`) prefixes in a row.
    """
    verifier = verifiers.find(config.verifier)
    waiting: list[tuple[Search, Steps[None], JudgedSamples | None]]
    waiting = [(search, _search(search, config), None) for search in searches]
    while waiting:
        asks = []
        for search, steps, judged in waiting:
            try:
                asks.append((search, steps, steps.send(judged)))
            except StopIteration:
                continue
        requests = [(prefix, config.seed, config.k) for *_, prefix in asks]
        drawn = rollouts.draw(requests, tolerated=FAILED_IN_A_ROW) if asks else []
        completions = [
            (search.record, prefix, rollouts_of) for (search, _, prefix), rollouts_of in zip(asks, drawn, strict=True)
        ]
        right = verifier.accepts(completions)
        judged = [list(zip(*pair, strict=True)) for pair in zip(drawn, right, strict=True)]
        waiting = [(search, steps, judgements) for (search, steps, _), judgements in zip(asks, judged, strict=True)]


def _search(search: Search, config: OmegaConfig) -> Steps[None]:
    """Searches until there is no candidate, or `config.searches` or `config.budget` is reached.

    If all rollouts of a prefix fail, its candidate is dropped.
    """
    yield from _value(search, (), config)
    while search.wrong and search.searches < config.searches:
        prefix, rollout = search.wrong.pop(select(search, config))
        search.states[prefix].visits += 1
        search.searches += 1
        first = yield from first_error(search, prefix, rollout.steps, config)
        if first is not None:
            search.errors.append(prefix + rollout.steps[: first + 1])
        elif not _affords(search, config):
            break


def select(search: Search, config: OmegaConfig) -> int:
    """Returns the index in `search.wrong` of the candidate with the largest Q + U (the first, if tied).

    Raises ValueError if there is no candidate.
    """
    states = [search.states[prefix] for prefix, _ in search.wrong]
    tokens = np.array([rollout.tokens for _, rollout in search.wrong])
    mc, visits = np.array([state.mc for state in states]), np.array([state.visits for state in states])
    total = sum(state.visits for state in search.states.values())
    return int(np.argmax(quality(mc, tokens, config) + exploration(visits, total, config)))


def first_error(
    search: Search, prefix: tuple[str, ...], steps: Sequence[str], config: OmegaConfig
) -> Steps[int | None]:
    """Returns the index in `steps` of the first one after which no rollout is correct; None if budget or policy fails.

    A generator (`Steps`): get the result with `yield from`. `steps` is an incorrect rollout from the state after
    `prefix`, with MC > 0. Invariant: some rollout after steps[:low] is correct, but no rollout after steps[:high]. So
    at most ceil(log2(len(steps))) new states are valued.
    """
    low, high = 0, len(steps)
    while high - low > 1:
        middle = (low + high) // 2
        state = yield from _value(search, prefix + tuple(steps[:middle]), config)
        if state is None:
            return None
        low, high = (middle, high) if state.right else (low, middle)
    return high - 1


def _affords(search: Search, config: OmegaConfig) -> bool:
    return config.budget is None or search.spent + config.k <= config.budget


def _value(search: Search, steps: tuple[str, ...], config: OmegaConfig) -> Steps[ValuedPrefix | None]:
    """Returns a prefix's state, sampling k rollouts if it is new, unless they fail or exceed the budget.

    If some rollouts are correct and some are not, the incorrect ones become candidates, unless they were cut off.
    """
    if steps in search.states:
        return search.states[steps]
    if not _affords(search, config):
        return None
    judged = yield Prefix(search.problem, steps)
    search.spent += config.k
    if not judged:
        return None
    state = search.states[steps] = ValuedPrefix(sum(right for _, right in judged), len(judged))
    if 0 < state.right < state.total:
        # A rollout that was cut off counts as incorrect, but may have no error.
        wrong = [sample for sample, right in judged if not right]
        search.wrong += [(steps, sample) for sample in wrong if sample.steps and sample.finish_reason == "stop"]
    return state


def tree_of_search(search: Search, source: ReasoningTree) -> ReasoningTree:
    """Returns the states and first errors as a tree of values, with the source's problem, answer and other keys.

    Each node is a step. Valued prefixes have their MC as `label`, `rollouts`, `right`, the 95 % Wilson interval as
    `low` and `high`, and `visits`. A first error that ends a rollout has label 0, and `correct` is false. Steps between
    states are unlabelled. The tree's `extra` also has the problem's own MC as `value`, `searches`, and all `rollouts`,
    including failed ones. Raises KeyError if the problem itself was not valued ("no rollouts").
    """
    index: dict[tuple[str, ...], int] = {(): -1}
    nodes: list[Node] = []
    errors = set(search.errors)
    for steps in sorted({steps for steps in (*search.states, *errors) if steps}, key=len):
        for end in range(1, len(steps) + 1):
            if steps[:end] not in index:
                index[steps[:end]] = len(nodes)
                nodes.append(Node(index[steps[: end - 1]], steps[end - 1]))
    for steps, i in index.items():
        if steps in search.states and steps:
            state = search.states[steps]
            low, high = (round(float(x), 6) for x in wilson(np.array(state.right), np.array(state.total)))
            extra = {"rollouts": state.total, "right": state.right, "low": low, "high": high, "visits": state.visits}
            nodes[i] = dataclasses.replace(nodes[i], label=state.mc, origin=ORIGIN, extra=extra)
        elif steps in errors:
            nodes[i] = dataclasses.replace(nodes[i], label=0.0, origin=ORIGIN, correct=False)
    root = search.states[()]
    extra = without_chain(source.extra) | {"value": root.mc, "searches": search.searches, "rollouts": search.spent}
    return ReasoningTree(search.problem, tuple(nodes), source.answer, "value", "tree", extra)
