"""Configs for the label methods; imports no array library."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from jprm.tree import ReasoningTree


@dataclasses.dataclass(frozen=True)
class Labeller:
    """Your own step labeller, for `jprm label FILE.py:NAME`.

    Attributes:
      labels: maps a tree to one label per node (in the order of `tree.nodes`), `None` if unknown.
      semantics: the labels' meaning: correctness, rating or value.
      check: (tree, where) raises ValueError if it cannot label the record. All records are checked before any is
        labelled.
    """

    labels: Callable[[ReasoningTree], Sequence[float | None]]
    semantics: str = "correctness"
    check: Callable[[ReasoningTree, str], object] = lambda tree, where: None


@dataclasses.dataclass(frozen=True)
class Adaptive:
    """Adds rollouts of a prefix while its confidence interval contains `threshold`.

    Attributes:
      threshold: a fraction of correct rollouts in (0, 1), between correct and incorrect.
      most: maximum rollouts per prefix.
      mean: budget: average rollouts per prefix of a tree, including the first k.
    """

    threshold: float
    most: int
    mean: float


@dataclasses.dataclass(frozen=True)
class MonteCarloConfig:
    """Monte Carlo values: the correct fraction of k completions per prefix.

    Rerun to continue a stopped command.

    For example:
      jprm label mc --policy server.json --input chains.jsonl --output values.jsonl --rollouts rollouts.jsonl \\
        --estimate soft

    Attributes:
      estimate: The fraction of correct rollouts (soft), or whether any is correct (hard).
      k: Rollouts per prefix (k in papers).
      seed: Number of the first rollout.
      z: Half-width of the confidence intervals in standard errors, e.g. 1.96 for 95 %.
      adaptive: Add rollouts while the confidence interval contains THRESHOLD: at most MOST per prefix, on average MEAN
        per prefix of a tree. The hard estimate still uses only the first k.
      tokens: With --adaptive, replaces MEAN by a common budget for all trees sampled together: average rollout tokens
        per prefix. The first k rollouts are always sampled.
      trees_at_once: Trees whose rollouts are sampled together.
      verifier: Judge of completed chains: the record's `answer`, its `tests` (programs), a checker's FILE.json, or your
        own, module:NAME or FILE.py:NAME.
    """

    estimate: Literal["soft", "hard"]
    k: int = 8
    seed: int = 0
    z: float = 1.96
    adaptive: Adaptive | None = None
    tokens: float | None = None
    trees_at_once: int = 32
    verifier: str = "answer"

    def __post_init__(self):
        if self.estimate not in ("soft", "hard"):
            raise ValueError(f"estimate is {self.estimate!r}: use 'soft' or 'hard'")
        if self.k < 1:
            raise ValueError(f"k is {self.k}: a value needs at least one rollout")
        if self.adaptive and (self.adaptive.most < self.k or self.adaptive.mean < self.k):
            raise ValueError(f"most and mean count the first k rollouts too: they must be at least {self.k}")
        if self.tokens is not None and (self.adaptive is None or not self.tokens > 0):
            raise ValueError(f"tokens is {self.tokens}: it is a positive budget of `adaptive`, which it needs")


@dataclasses.dataclass(frozen=True)
class OmegaConfig:
    """OmegaPRM: values from a tree search for first errors, by binary search.

    Rerun to continue a stopped command. Problems that are always or never solved are left out and counted. Steps in
    the records are ignored.

    For example:
      jprm label omega --policy server.json --input problems.jsonl --output trees.jsonl --rollouts rollouts.jsonl

    Attributes:
      alpha: In Q(s, r) = alpha^(1 - MC(s)) beta^(len(r) / L), as published.
      beta: beta in Q.
      length: L in Q, in tokens.
      c_puct: Exploration weight.
      k: Rollouts per state (k in papers).
      searches: Maximum binary searches per problem.
      budget: Maximum rollouts per problem. If it runs out, the search keeps the states valued so far.
      seed: Number of the first rollout.
      problems_at_once: Problems whose rollouts are sampled together.
      verifier: Judge of completed chains: the record's `answer`, its `tests` (programs), a checker's FILE.json, or your
        own, module:NAME or FILE.py:NAME.
    """

    alpha: float = 0.5
    beta: float = 0.9
    length: float = 500
    c_puct: float = 0.125
    k: int = 8
    searches: int = 100
    budget: int | None = None
    seed: int = 0
    problems_at_once: int = 32
    verifier: str = "answer"

    def __post_init__(self):
        if self.k < 1 or self.searches < 1:
            raise ValueError(f"k is {self.k} and searches {self.searches}: both must be at least 1")
        if self.problems_at_once < 1:
            raise ValueError(f"problems_at_once is {self.problems_at_once}: it must be at least 1")
        if self.budget is not None and self.budget < self.k:
            raise ValueError(f"a budget of {self.budget} rollouts is smaller than one state's k = {self.k}")


@dataclasses.dataclass(frozen=True)
class CritiqueConfig:
    """Critiques of labelled steps whose verdicts match the labels, to train a generative verifier on.

    The judge writes its number of critiques for each labelled question. The output has the question as the
    problem and the critique as the steps; train on it with `data.supervise="token"`, `model.head="language"` and
    `objective="next_token"`. Rerun to continue a stopped command.

    For example:
      jprm label critique --model judge.json --input labelled.jsonl --output critiques.jsonl --critiques kept.jsonl

    Attributes:
      most: Maximum critiques to keep per question (the first that match).
      threshold: Labels below this are errors. Default: 0.5 for correctness, 0 for ratings; for values, a step is an
        error if no rollout is correct.
      trees_at_once: Trees whose critiques are sampled together.
    """

    most: int = 1
    threshold: float | None = None
    trees_at_once: int = 64

    def __post_init__(self):
        if self.most < 1 or self.trees_at_once < 1:
            raise ValueError(f"most is {self.most} and trees_at_once {self.trees_at_once}: both must be at least 1")
