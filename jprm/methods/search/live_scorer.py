"""Scorers of trees that grow during a search."""

from __future__ import annotations

import collections
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
from jaxtyping import Float

from jprm.methods.judge.critiques import Critique, Reading, read
from jprm.methods.judge.judge import Judge
from jprm.pack import token_tree
from jprm.score.scale import PROBABILITY
from jprm.tree import Node, ReasoningTree


class LiveScorer(Protocol):
    """Scores trees while they grow. A handle is a prefix: a problem, or a step after another handle.

    `tokens` counts the tokens computed so far, without padding.
    """

    tokens: int

    def open(self, problems: Sequence[str]) -> list[int]:
        """Returns a handle for every problem."""
        ...

    def extend(self, parents: Sequence[int], steps: Sequence[str]) -> tuple[list[int], Float[np.ndarray, " P"]]:
        """Appends steps[i] after parents[i]; returns the new handles and their scores, float32.

        Parents may be of several trees, and one may occur several times.
        """
        ...

    def release(self, handles: Sequence[int]) -> None:
        """Frees handles that are never extended again, as far as no live descendant needs them."""
        ...


def live_scorer(prm: Any) -> LiveScorer:
    """Returns the scorer of a judge, or the one that computes every token once, or `Rescorer` for models it refuses."""
    from jprm.score.cache import LiveTrees

    if isinstance(prm, Judge):
        return LiveJudge(prm)
    try:
        return LiveTrees(prm)
    except NotImplementedError:
        return Rescorer(prm)


class Rescorer:
    """A `LiveScorer` over anything with `score_trees`, as `jprm.PRM`: computes the path to every new step again.

    `tokens` stays 0 if `prm` has no `layout`. `jprm.score.cache` computes every token once.
    """

    def __init__(self, prm: Any):
        self.prm, self.tokens = prm, 0
        self.scale = getattr(prm, "scale", PROBABILITY)
        self.semantics = getattr(prm, "semantics", "correctness")
        self._parent: list[int] = []  # by handle; -1 for a problem
        self._text: list[str] = []

    def open(self, problems: Sequence[str]) -> list[int]:
        return [self._new(-1, problem) for problem in problems]

    def extend(self, parents: Sequence[int], steps: Sequence[str]) -> tuple[list[int], Float[np.ndarray, " P"]]:
        paths = [self._path(parent) for parent in parents]
        nodes: dict[int, list[Node]] = collections.defaultdict(list)  # by the problem's handle
        index: dict[int, int] = {}  # of a handle in its tree
        place = []
        for (root, *path), step in zip(paths, steps, strict=True):
            at, tree = -1, nodes[root]
            for handle in path:
                if handle not in index:
                    index[handle] = len(tree)
                    tree.append(Node(at, self._text[handle]))
                at = index[handle]
            place.append((root, len(tree)))
            tree.append(Node(at, step))
        trees = {root: ReasoningTree(self._text[root], tuple(tree)) for root, tree in nodes.items()}
        scores = dict(zip(trees, self._score(list(trees.values())), strict=True))
        handles = [self._new(parent, step) for parent, step in zip(parents, steps, strict=True)]
        return handles, np.array([scores[root][i] for root, i in place], np.float32)

    def release(self, handles: Sequence[int]) -> None:
        """Frees nothing: there is only text."""

    def _score(self, trees: list[ReasoningTree]) -> list[np.ndarray]:
        if (layout := getattr(self.prm, "layout", None)) is not None:
            self.tokens += sum(len(token_tree(tree, layout).tokens_N) for tree in trees)
        return self.prm.score_trees(trees)

    def _new(self, parent: int, text: str) -> int:
        self._parent.append(parent)
        self._text.append(text)
        return len(self._text) - 1

    def _path(self, handle: int) -> list[int]:
        path = []
        while handle >= 0:
            path.append(handle)
            handle = self._parent[handle]
        return path[::-1]


class LiveJudge(Rescorer):
    """A `LiveScorer` over a `Judge`: asks about every new step once, whatever the steps before it were judged.

    `tokens` counts generated tokens. `take` returns the critiques of a step.

    Raises:
      PolicyError: every critique of new steps failed.
    """

    def __init__(self, judge: Judge):
        super().__init__(judge)
        self._judged: dict[int, list[tuple[Critique, Reading]]] = {}
        self._said: dict[int, str] = {}  # by handle, the first critique, which a conversation repeats

    def extend(self, parents: Sequence[int], steps: Sequence[str]) -> tuple[list[int], Float[np.ndarray, " P"]]:
        judge: Judge = self.prm
        paths, questions = [self._path(parent) for parent in parents], []
        for (root, *path), step in zip(paths, steps, strict=True):
            texts, said = [*(self._text[i] for i in path), step], [self._said[i] for i in path]
            questions.append(judge.prompt.filled(self._text[root], texts, said))
        distinct = list(dict.fromkeys(questions))
        written = dict(zip(distinct, judge.ask(distinct), strict=True))
        self.tokens += sum(critique.tokens for critiques in written.values() for critique in critiques)
        handles = [self._new(parent, step) for parent, step in zip(parents, steps, strict=True)]
        score_P = np.full(len(handles), np.nan, np.float32)
        for i, (handle, path, question) in enumerate(zip(handles, paths, questions, strict=True)):
            critiques = written[question]
            readings = [read(judge.prompt, critique, len(path)) for critique in critiques]
            if values := [reading.scores[-1] for reading in readings if reading.scores]:
                score_P[i] = np.mean(values)
            self._judged[handle] = list(zip(critiques, readings, strict=True))
            self._said[handle] = critiques[0].text
        return handles, score_P

    def take(self, handle: int) -> list[tuple[Critique, Reading]]:
        """Returns the critiques of a step and what they say, once."""
        return self._judged.pop(handle)
