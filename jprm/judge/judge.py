"""`Judge`: a policy that writes critiques, with the interface of a PRM.

judge = load_judge("judge.json")
judge.score(problem, steps)          # one score a step, NaN where no critique could be read
judge.score_many(records)            # records of any kind, with their scores and critiques
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
from jaxtyping import Float

from jprm.judge.prompts import JudgePrompt, probability, verdicts
from jprm.policy.protocol import Policy, Prefix, Sample
from jprm.policy.sample_cache import PolicyError
from jprm.score.scale import PROBABILITY, Scale
from jprm.score.scorer import CHUNK, as_written, chain_tree
from jprm.tree import ReasoningTree, chains_of, in_order_of, record_of, tree_of, with_scores

KEY = "judge"
"""The key of a scored record under which critiques and their counts are."""


@dataclasses.dataclass(frozen=True, slots=True)
class Judgement:
    """What critiques say about a tree of N nodes.

    Attributes:
      score_N: float32; NaN where no critique could be read.
      report: counts, generated tokens, and `critiques`; JSON values.
    """

    score_N: Float[np.ndarray, " N"]
    report: dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Judge:
    """A generative verifier, ready to score.

    A critique's score of a step is the probability of its verdict's token where the policy reports log-probabilities
    (`logprobs`), else 1 or 0. A step's score is the mean over the critiques that could be read. Truncated, unreadable
    and failed critiques are counted and give no score. For prompts about whole chains, the steps after the first
    incorrect one have its score: they are not judged, and the rule `min` ignores them.

    Attributes:
      policy: who writes the critiques.
      prompt: what it is asked.
      samples: critiques per question.
      seed: number of the first one.
    """

    policy: Policy
    prompt: JudgePrompt
    samples: int = 1
    seed: int = 0

    semantics = "correctness"
    scale: Scale = dataclasses.field(default=PROBABILITY, init=False)
    output_names = ("score",)

    def __post_init__(self):
        if self.samples < 1:
            raise ValueError(f"samples is {self.samples}: it must be 1 or more")

    @property
    def name(self) -> str:
        """Identifies the policy and the prompt."""
        digest = hashlib.sha256(json.dumps(dataclasses.asdict(self.prompt)).encode()).hexdigest()[:8]
        return f"{self.policy.name}/{self.prompt.name}#{digest}"

    @property
    def rule(self) -> str:
        """The rule that makes a chain's score of its steps'."""
        return "prod" if self.prompt.asks == "step" else "min"

    @property
    def identity(self) -> dict[str, Any]:
        """What the scores depend on, for the request of a file that holds them."""
        return {"judge": self.name, "samples": self.samples, "seed": self.seed}

    def score(self, problem: str, steps: Sequence[str]) -> Float[np.ndarray, " P"]:
        """Returns one score a step, (P,) float32, NaN where no critique could be read.

        Raises:
          TypeError, ValueError: as `jprm.score.scorer.PRM.score`.
          PolicyError: every critique failed.
        """
        return self.judgements([chain_tree(problem, steps)])[0].score_N

    def score_many(self, records: Iterable[dict[str, Any]]) -> Iterator[dict[str, Any]]:
        """Yields the records in order with their scores, and under `judge` the critiques and what they cost.

        A chain or sample with a step without a score has no scores at all; a node without one has no `score`.

        Raises:
          RecordError: a record that is not valid.
          PolicyError: every critique of `CHUNK` records failed.
        """
        records = iter(records)
        while chunk := list(itertools.islice(records, CHUNK)):
            trees = [tree_of(record) for record in chunk]
            for record, tree, judgement in zip(chunk, trees, self.judgements(trees), strict=True):
                made = record_of(with_scores(tree, _writable(tree, judgement.score_N), {}))
                yield in_order_of(record, made | {KEY: {"name": self.name, **judgement.report}})

    def score_trees(self, trees: Sequence[ReasoningTree]) -> list[Float[np.ndarray, " N"]]:
        """Returns (N,) float32 for each tree of N nodes, NaN where no critique could be read."""
        return [judgement.score_N for judgement in self.judgements(trees)]

    def outputs_of(self, trees: Sequence[ReasoningTree]) -> list[dict[str, Float[np.ndarray, " N"]]]:
        """Returns `{"score": (N,)}` for each tree, as `score_trees`."""
        return [{"score": score_N} for score_N in self.score_trees(trees)]

    def judgements(self, trees: Sequence[ReasoningTree]) -> list[Judgement]:
        """Returns what critiques say about each tree. Equal questions about a tree are asked once.

        Raises:
          PolicyError: every critique failed.
        """
        asked = [_questions(tree, self.prompt) for tree in trees]
        opening = (self.prompt.opening,) if self.prompt.opening else ()
        prefixes = [Prefix(question, opening) for questions in asked for question in questions]
        drawn = self.policy.sample(prefixes, self.samples, until="end", seed=self.seed) if prefixes else []
        errors = [sample.error for samples in drawn for sample in samples]
        if errors and all(errors):
            raise PolicyError(f"policy {self.policy.name} failed at all {len(errors)} critiques: {errors[-1]}")
        answers = iter(drawn)
        return [
            _judgement(self.prompt, tree, [(paths, next(answers)) for paths in questions.values()])
            for tree, questions in zip(trees, asked, strict=True)
        ]


def _questions(tree: ReasoningTree, prompt: JudgePrompt) -> dict[str, list[list[int]]]:
    """Returns the paths, as node indices from the problem, that each question is about."""
    if prompt.asks == "step":
        paths: list[list[int]] = []
        for i, node in enumerate(tree.nodes):
            paths.append([*(paths[node.parent] if node.parent >= 0 else []), i])
    else:
        paths = chains_of(tree)
    found: dict[str, list[list[int]]] = {}
    for path in paths:
        found.setdefault(prompt.filled(tree.problem, [tree.nodes[i].text for i in path]), []).append(path)
    return found


def _judgement(
    prompt: JudgePrompt, tree: ReasoningTree, answers: Sequence[tuple[list[list[int]], list[Sample]]]
) -> Judgement:
    """Returns the means over the critiques that could be read, and the report on all of them."""
    scores: list[list[float]] = [[] for _ in tree.nodes]
    counts = {"asked": 0, "read": 0, "truncated": 0, "unreadable": 0, "failed": 0, "by_probability": 0, "by_vote": 0}
    critiques, tokens = [], 0
    for paths, samples in answers:
        for sample in samples:
            status, found = _read(prompt, sample, len(paths[0]))
            counts["asked"] += 1
            counts[status] += 1
            tokens += sample.tokens
            kinds = ["by_vote" if voted else "by_probability" for _, voted in found]
            for kind in kinds:
                counts[kind] += 1
            values = [value for value, _ in found]
            if found and prompt.asks != "step":
                values += values[-1:] * (len(paths[0]) - len(values))
            for path in paths if found else ():
                for node, value in zip(path[-len(values) :], values, strict=True):
                    scores[node].append(value)
            critique: dict[str, Any] = {"nodes": [path[-1] for path in paths], "status": status}
            critique |= {"scores": [as_written(value) for value in values]} if values else {}
            critiques.append(critique | {"tokens": sample.tokens, "text": sample.error or "\n".join(sample.steps)})
    score_N = np.array([np.mean(values) if values else np.nan for values in scores], np.float32)
    return Judgement(score_N, {**counts, "tokens": tokens, "critiques": critiques})


def _read(prompt: JudgePrompt, sample: Sample, steps: int) -> tuple[str, list[tuple[float, bool]]]:
    """Returns a critique's status, and (score, whether by vote) of each step that it judges."""
    if sample.finish_reason == "error":
        return "failed", []
    if sample.finish_reason == "length":
        return "truncated", []
    text = "\n".join(sample.steps)
    found = verdicts(prompt, text, steps)
    if found is None:
        return "unreadable", []
    by_token = [probability(verdict, text, sample.token_logprobs) for verdict in found]
    return "read", [(v.correct * 1.0 if p is None else p, p is None) for v, p in zip(found, by_token, strict=True)]


def _writable(tree: ReasoningTree, score_N: np.ndarray) -> list[float | None]:
    """Returns the scores as records hold them: in a chain or sample at every step or at none."""
    scores = [None if np.isnan(score) else as_written(score) for score in score_N]
    if tree.kind == "tree":
        return scores
    starts = [i for i, node in enumerate(tree.nodes) if node.parent == -1]
    for start, end in itertools.pairwise([*starts, len(scores)]):
        if None in scores[start:end]:
            scores[start:end] = [None] * (end - start)
    return scores
