"""`Comparison`: a judge comparing a pool's samples with each other; same interface as `Judge`.

`pairwise` is a tournament: the judge sees two samples and names the better one, in both orders, because judges prefer a
position. If one order cannot be read, the pair is ignored. A sample's score is its mean win probability. Each
sample meets the next `rounds` samples around the pool, or all others (`rounds` 0). `listwise` shows all samples at once
and asks for a number in [0, 1] per sample, as RULER does (OpenPipe, 2025): relative scores from one critique. Samples
with equal text count as one, and score 0.5 if there is no other.

All steps in a sample get its score; shared steps get the mean. The rule is `last`.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Container, Iterator, Sequence
from typing import Any, Literal

import numpy as np
from jaxtyping import Float

from jprm.methods.answers.extraction import end_of_thoughts
from jprm.methods.judge.critiques import Critique, JudgePrompt, ReadCritique, Reading, ask, read, report
from jprm.methods.judge.judge import ByCritiques, digest_of, step_text
from jprm.methods.policy.protocol import Policy
from jprm.tree import ReasoningTree, chains_of

Compares = Literal["pairwise", "listwise"]

PROMPTS: dict[Compares, JudgePrompt] = {
    "pairwise": JudgePrompt(
        name="pairwise",
        text=(
            "Problem:\n{problem}\n\n{steps}\n\nWhich solution is better: more likely to be correct and complete?"
            " Compare them briefly. Then write \\boxed{1} for the first or \\boxed{2} for the second."
        ),
        step="Solution {number}:\n{step}",
        separator="\n\n",
        correct=("1",),
        incorrect=("2",),
    ),
    "listwise": JudgePrompt(
        name="listwise",
        text=(
            "Problem:\n{problem}\n\n{steps}\n\nCompare the {number} solutions: how likely is each to be correct and"
            " complete, relative to the others? Explain briefly. Then write {number} numbers from 0 to 1, one a"
            " solution, in their order, as \\boxed{0.9, 0.2}."
        ),
        step="Solution {number}:\n{step}",
        separator="\n\n",
        correct=("1",),
        incorrect=("0",),
    ),
}


@dataclasses.dataclass(frozen=True)
class Comparison(ByCritiques):
    """Compares pool samples, or tree leaves, with each other; scores are in [0, 1], see the module's docstring.

    `rounds` must be 0 for `listwise`. The other methods are as in `ByCritiques`.
    """

    policy: Policy
    compares: Compares
    samples: int = 1
    seed: int = 0
    rounds: int = 0  # of `pairwise`, how many next samples each is compared with; 0 for all

    output_names = ("score",)
    rule = "last"
    of_pool = True

    def of_prefixes(self) -> Comparison:
        """Raises ValueError: a prefix has no other samples to compare with."""
        raise ValueError(f"{self.name}: compares finished samples: score the pool that a search without it wrote")

    @property
    def prompt(self) -> JudgePrompt:
        return PROMPTS[self.compares]

    @property
    def name(self) -> str:
        """Identifies the policy, the prompt and the pairs, e.g. `POLICY/pairwise#1a2b3c4d`."""
        digest = digest_of([dataclasses.asdict(self.prompt), self.rounds])
        return f"{self.policy.name}/{self.compares}#{digest}"

    def reported(
        self, trees: Sequence[ReasoningTree], missing: Sequence[Container[int]] | None = None
    ) -> list[tuple[dict[str, np.ndarray], dict[str, Any]]]:
        """Returns (`{"score": (N,)}`, report) per tree, as `Judge.reported`; `missing` is ignored.

        The score is float32; NaN if no comparison could be read, and for context. A pool of one sample scores 0.5.

        Raises:
          ValueError: a chain or a tree with one leaf, so there is no comparison.
          PolicyError: every critique failed.
          OSError: the prompt runs code, and there is no sandbox.
        """
        plans, questions = [], []
        for tree in trees:
            chains = chains_of(tree)
            if len(chains) < 2 and tree.kind != "pool":
                raise ValueError(f"problem {tree.problem[:60]!r}: has one chain to compare: give the judge a pool")
            texts = ["\n".join(step_text(tree, i) for i in chain) for chain in chains]
            known = list(dict.fromkeys(texts))
            orders = list(self._shown(len(known)))
            of_tree = [self.prompt.filled(tree.plain_problem, [known[i] for i in order]) for order in orders]
            plans.append((tree, chains, texts, known, orders, self.samples * sum(map(len, of_tree))))
            questions += of_tree
        written = iter(ask(self.policy, self.prompt, questions, self.samples, self.seed))
        results = []
        for tree, chains, texts, known, orders, sent in plans:
            critiques = [(order, critique) for order in orders for critique in next(written)]
            read_of = [(order, critique, self._read(critique, len(order))) for order, critique in critiques]
            score_of = dict(zip(known, self._means(len(known), read_of), strict=True))
            leaves = [chains[texts.index(text)][-1] for text in known]
            judged: list[ReadCritique] = [
                ([leaves[i] for i in order], critique, reading) for order, critique, reading in read_of
            ]
            score_N = _of_nodes(tree, chains, [score_of[text] for text in texts])
            results.append(({"score": score_N}, report(judged, sent)))
        return results

    def questions(self, tree: ReasoningTree) -> int:
        """Returns the question count for a tree, 0 for one chain, as if no samples had equal text.

        Each question is asked `samples` times. Nothing is sampled here.
        """
        count = len(chains_of(tree))
        if self.compares == "listwise":
            return int(count > 1)
        return count * min(2 * (self.rounds or count), max(count - 1, 0))

    def _shown(self, count: int) -> Iterator[tuple[int, ...]]:
        """Yields the text indices in each question, in order."""
        if self.compares == "listwise":
            if count > 1:
                yield tuple(range(count))
            return
        seen = set()
        for apart in range(1, min(self.rounds or count, count - 1) + 1):
            for i in range(count):
                j = (i + apart) % count
                pair = min(i, j), max(i, j)
                if pair not in seen:
                    seen.add(pair)
                    yield pair
                    yield pair[::-1]

    def _read(self, critique: Critique, count: int) -> Reading:
        """Returns the compared samples' scores, in order."""
        if self.compares == "pairwise":
            reading = read(self.prompt, critique, 1)
            return dataclasses.replace(reading, scores=(p := reading.scores[0], 1 - p)) if reading.scores else reading
        if critique.finish_reason in ("error", "length"):
            return Reading("failed" if critique.finish_reason == "error" else "truncated")
        boxes = re.findall(self.prompt.verdict, critique.text[end_of_thoughts(critique.text) :])
        numbers = [part.strip() for part in boxes[-1].split(",")] if boxes else []
        if len(numbers) != count or not all(re.fullmatch(r"0|1|[01]?\.[0-9]{1,9}", number) for number in numbers):
            return Reading("unreadable")
        scores = tuple(map(float, numbers))
        if max(scores) > 1:
            return Reading("unreadable")
        return Reading("read", tuple(score >= 0.5 for score in scores), scores, (True,) * count)

    def _means(self, count: int, read_of: Sequence[tuple[tuple[int, ...], Critique, Reading]]) -> Sequence[float]:
        """Returns each text's mean score; 0.5 for a single text, NaN if no comparison counts."""
        if count < 2:
            return [0.5] * count
        read_in: dict[tuple[int, ...], list[tuple[float, ...]]] = {}
        for order, _, reading in read_of:
            if reading.scores:
                read_in.setdefault(order, []).append(reading.scores)
        scores: list[list[float]] = [[] for _ in range(count)]
        for order, values in read_in.items():
            if self.compares == "listwise" or order[::-1] in read_in:
                for i, score in zip(order, np.mean(values, axis=0), strict=True):
                    scores[i].append(score)
        return [float(np.mean(values)) if values else np.nan for values in scores]


def _of_nodes(
    tree: ReasoningTree, chains: Sequence[Sequence[int]], score_K: Sequence[float]
) -> Float[np.ndarray, " N"]:
    """Returns the mean score per step over the chains through it; NaN for context."""
    scores: list[list[float]] = [[] for _ in tree.nodes]
    for chain, score in zip(chains, score_K, strict=True):
        for node in chain:
            scores[node].append(score)
    return np.array([np.mean(values) if values else np.nan for values in scores], np.float32)
