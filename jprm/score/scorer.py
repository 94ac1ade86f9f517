"""Scores from a trained model: chains, pools and trees go through the same packer and model as in training.

prm = jprm.load("runs/prm800k_smollm2")
prm.score(problem, steps)          # one probability a step
prm.score_many(records)            # records of any kind, with their scores put in
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from jprm.layout import Layout
from jprm.model.config import ModelConfig
from jprm.model.heads import Readout, find
from jprm.model.mesh import put_rows
from jprm.model.transformer import step_logits
from jprm.pack import Part, empty_rows, lay_out, pack, split, token_tree
from jprm.rows import Rows
from jprm.score.aggregate import DEFAULT_RULE
from jprm.score.implicit import LogRatio
from jprm.token_tree import TokenTree, chain_lengths, geometry
from jprm.tree import ReasoningTree, in_order_of, record_of, tree_of, with_scores

SHORTEST, FILLED, LONGEST = 256, 2048, 8192
"""Tokens of the shortest row that trees are packed into, of the longest that is made for many, and of the longest that
is made for one. A row is SHORTEST times a power of two, so few shapes are ever compiled; a chain longer than
LONGEST gets a row of its own size, the next power of two."""

CHUNK = 64
"""Records packed together by `score_many`: the unit of progress, and of what a killed run does again."""


@functools.partial(jax.jit, static_argnums=(1, 3))
def _score(params: dict, config: ModelConfig, rows: Rows, readout: Readout):
    return readout(step_logits(params, config, rows))


@dataclasses.dataclass(frozen=True)
class PRM:
    """A model, its layout and where it lies. `score` is the probability that a step is not wrong, by jprm's own models.

    What the score of a published model is, its adapter says (`jprm.adapters`).
    """

    params: dict
    config: ModelConfig
    layout: Layout
    mesh: Mesh
    semantics: str  # of the labels it was trained on; decides the default aggregation
    name: str  # the folder it was loaded from
    step: int  # of training
    readout: Readout = None  # step logits (..., C) to named outputs (...); None: as its head says
    ratio: LogRatio | None = None  # of an implicit PRM, in place of `readout`
    context: int | None = None  # tokens of the longest chain that the model takes
    aggregation: str = ""  # the rule that its authors use; "" is that of the semantics

    def __post_init__(self):
        if self.readout is None:
            object.__setattr__(self, "readout", find(self.config.head).readout)

    @property
    def rule(self) -> str:
        """How a chain's score is made of its steps' unless one is named: as its authors do, or as its labels ask."""
        return self.aggregation or DEFAULT_RULE[self.semantics]

    def score(self, problem: str, steps: Sequence[str]) -> np.ndarray:
        """(P,) float32, one probability a step; that of step k does not depend on the steps behind it."""
        (score_P,) = self.score_trees([tree_of({"problem": problem, "steps": list(steps)})])
        return np.array(list(map(as_written, score_P)), np.float32)

    def score_many(self, records: Iterable[dict[str, Any]]) -> Iterator[dict[str, Any]]:
        """The records in order, each with its scores: `scores` in a chain and in a pool's samples, `score` in a node.

        Raises RecordError for a record that is not valid, ValueError for a chain that no row holds and
        FloatingPointError for a score that is not finite.
        """
        records = iter(records)
        while chunk := list(itertools.islice(records, CHUNK)):
            trees = [tree_of(record) for record in chunk]
            for record, tree, score_N in zip(chunk, trees, self.score_trees(trees), strict=True):
                yield scored(record, tree, score_N)

    def score_trees(self, trees: Sequence[ReasoningTree]) -> list[np.ndarray]:
        """(N,) float32 for each tree of N nodes. Common prefixes within a tree are computed once.

        (Once for every chain, where attention takes no trees: `ModelConfig.chain_rows`.)
        """
        token_trees = [token_tree(tree, self.layout) for tree in trees]
        scores = [np.full(len(tree.nodes), np.nan, np.float32) for tree in trees]
        for tree in token_trees:
            longest = geometry(tree.length_R, tree.parent_R).depth_R.max(initial=0)
            self.check_length(int(longest), f"problem {tree.name!r}")
        problem = np.array([tree.length_R[0] for tree in token_trees])
        for rows, *slots in (_rows_of_chains if self._chain_rows else _rows_of_trees)(token_trees):
            try:
                for score_BS, first in self._run(rows, problem[slots[0]].astype(np.int32)):
                    tree_BS, node_BS = (a_BS[first : first + len(score_BS)] for a_BS in slots)
                    for tree, node, score in zip(*(a[tree_BS >= 0] for a in (tree_BS, node_BS, score_BS)), strict=True):
                        scores[tree][node] = score
            except jax.errors.JaxRuntimeError as error:
                if "RESOURCE_EXHAUSTED" not in str(error):
                    raise
                longest = max(np.unique(slots[0][slots[0] >= 0]), key=lambda i: len(token_trees[i].tokens_N))
                raise ValueError(
                    f"problem {trees[longest].problem[:60]!r}: a row of {rows.tokens.shape[1]:,} tokens does not fit in"
                    f" memory with attention={self.config.attention!r}. Drop it, or score with attention 'blocked' or"
                    " 'paths', or with dtype bfloat16 or int8"
                ) from error
        for tree, score_N in zip(trees, scores, strict=True):
            if not np.isfinite(score_N).all():
                node = int(np.argmin(np.isfinite(score_N)))
                raise FloatingPointError(
                    f"problem {tree.problem[:60]!r}, step {node}: the model's score is {score_N[node]}; its checkpoint"
                    " (or a bfloat16 overflow) is at fault: use an earlier checkpoint or float32"
                )
        return scores

    def _run(self, rows: Rows, problem_BS: np.ndarray) -> Iterator[tuple[np.ndarray, int]]:
        """(scores of a batch of rows, index of its first row); batches are one row a device, filled up with padding.

        Of chains they are as many rows a device as have FILLED tokens. `problem_BS` is the tokens of each step's
        problem.
        """
        size, count = self.mesh.shape["data"] * self.mesh.shape["fsdp"], len(rows.tokens)
        size *= max(1, FILLED // rows.tokens.shape[1]) if self._chain_rows else 1
        missing = -count % size
        if missing:
            filler = empty_rows(missing, rows.tokens.shape[1], rows.step_end.shape[1])
            rows = jax.tree.map(lambda a, b: np.concatenate([a, b]), rows, filler)
            problem_BS = np.concatenate([problem_BS, filler.step_end])
        with jax.set_mesh(self.mesh):
            for first in range(0, len(rows.tokens), size):
                some = slice(first, first + size)
                batch = put_rows(jax.tree.map(lambda a, i=some: a[i], rows), self.mesh)
                if self.ratio is None:
                    score_BS = _score(self.params, self.config, batch, self.readout)["score"]
                else:
                    score_BS = self.ratio(
                        self.params, self.config, batch, jax.device_put(problem_BS[some], batch.step_end.sharding)
                    )
                yield np.asarray(score_BS)[: count - first], first  # without the filler

    @property
    def _chain_rows(self) -> bool:
        """Whether a row must hold one chain, for this model or for that which it is divided by."""
        return self.config.chain_rows or (self.ratio is not None and self.ratio.config.chain_rows)

    def check_length(self, tokens: int, where: str) -> None:
        """Raises ValueError for a chain of more tokens than the model takes."""
        if self.context is not None and tokens > self.context:
            raise ValueError(
                f"{where}: its longest chain takes {tokens:,} tokens, and {self.name} reads {self.context:,} at most."
                " Drop it, or use a model with a longer context"
            )


def scored(record: dict[str, Any], tree: ReasoningTree, score_N: np.ndarray) -> dict[str, Any]:
    """Returns the record of `tree` with its scores as they are written, its keys in the order of `record`."""
    return in_order_of(record, record_of(with_scores(tree, map(as_written, score_N))))


def _rows_of_trees(trees: Sequence[TokenTree]) -> Iterator[tuple[Rows, np.ndarray, np.ndarray]]:
    """Rows of several trees, by their length; and the tree (an index into those given) and the node of every slot."""
    for tokens, members in _row_groups(trees).items():
        packed = pack([trees[i] for i in members], tokens, tokens // 2, too_long="error")
        yield packed.rows, np.where(packed.tree_BS >= 0, np.array(members)[packed.tree_BS], -1), packed.node_BS


def _rows_of_chains(trees: Sequence[TokenTree]) -> Iterator[tuple[Rows, np.ndarray, np.ndarray]]:
    """The same with a chain a row, each in the shortest that takes it."""
    groups: dict[int, list[Part]] = {}
    for index, tree in enumerate(trees):
        longest = _longest_row(tree)
        for part in split(tree, index, longest, longest // 2, too_long="error", chains=True)[0]:
            groups.setdefault(_size(_needed(part.tree)), []).append(part)
    for tokens, parts in groups.items():
        yield lay_out([[part] for part in parts], tokens, tokens // 2)


def _row_groups(trees: Sequence[TokenTree]) -> dict[int, list[int]]:
    """By the tokens of a row, the indices of the trees that are packed into such rows, so that little is padding.

    Row by row: each is of the longest size that what is left fills, so the last ones are short. Devices have no say in
    it: in rows of other lengths scores would differ by their rounding, and so would the files of several processes.
    """
    need = [_needed(tree) for tree in trees]
    left = sorted(range(len(trees)), key=lambda i: -need[i])
    groups: dict[int, list[int]] = {}
    while left:
        first, *later = left
        tokens = _row_tokens(trees[first])
        if need[first] <= LONGEST:  # a longer one is split at its branches, or longer than a row: nothing is put to it
            tokens = max(tokens, min(FILLED, 1 << (sum(need[i] for i in left).bit_length() - 1)))
        room, taken, left = tokens - need[first], [first], []
        for i in later:
            fits = need[i] <= room
            (taken if fits else left).append(i)
            room -= need[i] if fits else 0
        groups.setdefault(tokens, []).extend(taken)
    return groups


def _needed(tree: TokenTree) -> int:
    """Tokens of a row that holds the tree; rows have half as many slots, which equal chains can run out of first."""
    return max(len(tree.tokens_N), 2 * len(tree.run_M))


def _row_tokens(tree: TokenTree) -> int:
    """Tokens of the row that a tree is packed into, if it is alone. A longer one than LONGEST is split."""
    return _size(_needed(tree)) if _needed(tree) <= LONGEST else _longest_row(tree)


def _longest_row(tree: TokenTree) -> int:
    """Tokens of a row that takes every chain of a tree: LONGEST, unless one is longer."""
    depth_M = geometry(tree.length_R, tree.parent_R).depth_R[tree.run_M]
    return _size(max(LONGEST, int(depth_M.max(initial=0)), 2 * int(chain_lengths(tree).max(initial=0))))


def _size(tokens: int) -> int:
    """Tokens of the shortest row that has so many."""
    return max(SHORTEST, 1 << (tokens - 1).bit_length())


def as_written(score: float) -> float:
    """The score to seven decimals, and a small one to seven digits: those of a float32."""
    return float(f"{score:.7g}") if abs(score) < 0.1 else round(float(score), 7)
