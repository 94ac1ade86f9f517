"""Scores from a trained model: chains, pools and trees go through the same packer and model as in training.

prm = jprm.load("runs/prm800k_smollm2")
prm.score(problem, steps)          # one probability a step
prm.score_many(records)            # records of any kind, with their scores put in
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import os
import pathlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from jprm.checkpoints import store
from jprm.layout import Layout, NativeLayout
from jprm.model.config import ModelConfig
from jprm.model.sharding import MeshConfig, make_mesh, put_rows
from jprm.model.transformer import step_logits
from jprm.pack import empty_rows, pack, token_tree
from jprm.rows import Rows
from jprm.token_tree import TokenTree, chain_lengths, geometry
from jprm.tokenizer import load_tokenizer
from jprm.train.config import read
from jprm.train.lora import merge
from jprm.train.losses import probability
from jprm.tree import ReasoningTree, chains_of, tree_of

SHORTEST, LONGEST = 1024, 8192
"""Tokens of the shortest and the longest row that trees are packed into. A row is SHORTEST times a power of two, so few
shapes are ever compiled; a chain longer than LONGEST gets a row of its own size, the next power of two."""

CHUNK = 64
"""Records packed together by `score_many`: the unit of progress, and of what a killed run does again."""


@functools.partial(jax.jit, static_argnums=1)
def _score(params: dict, config: ModelConfig, rows: Rows):
    return probability(step_logits(params, config, rows))


@dataclasses.dataclass(frozen=True)
class PRM:
    """A model, its layout and where it lies. `score` is the probability that a step is not wrong."""

    params: dict
    config: ModelConfig
    layout: Layout
    mesh: Mesh
    semantics: str  # of the labels it was trained on; decides the default aggregation
    name: str  # the folder it was loaded from
    step: int  # of training

    def score(self, problem: str, steps: Sequence[str]) -> np.ndarray:
        """(P,) float32, one probability a step; that of step k does not depend on the steps behind it."""
        record = {"problem": problem, "steps": list(steps)}
        return np.array(next(iter(self.score_many([record])))["scores"], np.float32)

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
        """(N,) float32 for each tree of N nodes. Common prefixes within a tree are computed once."""
        token_trees = [token_tree(tree, self.layout) for tree in trees]
        scores = [np.full(len(tree.nodes), np.nan, np.float32) for tree in trees]
        length_of = [_row_tokens(tree) for tree in token_trees]
        for tokens in sorted(set(length_of)):
            members = [i for i, length in enumerate(length_of) if length == tokens]
            # A step has two tokens at least, its text and its end, so these slots never run out before the tokens.
            packed = pack([token_trees[i] for i in members], tokens, tokens // 2, too_long="error")
            for score_BS, first in self._run(packed.rows):
                tree_BS = packed.tree_BS[first : first + len(score_BS)]
                node_BS = packed.node_BS[first : first + len(score_BS)]
                for tree, node, score in zip(*(a[tree_BS >= 0] for a in (tree_BS, node_BS, score_BS)), strict=True):
                    scores[members[tree]][node] = score
        for tree, score_N in zip(trees, scores, strict=True):
            if not np.isfinite(score_N).all():
                node = int(np.argmin(np.isfinite(score_N)))
                raise FloatingPointError(
                    f"problem {tree.problem[:60]!r}, step {node}: the model's score is {score_N[node]}; its checkpoint"
                    " (or a bfloat16 overflow) is at fault: use an earlier checkpoint or float32"
                )
        return scores

    def _run(self, rows: Rows) -> Iterator[tuple[np.ndarray, int]]:
        """(scores of a batch of rows, index of its first row); batches are one row a device, filled up with padding."""
        size = self.mesh.shape["data"] * self.mesh.shape["fsdp"]
        missing = -len(rows.tokens) % size
        if missing:
            filler = empty_rows(missing, rows.tokens.shape[1], rows.step_end.shape[1])
            rows = jax.tree.map(lambda a, b: np.concatenate([a, b]), rows, filler)
        with jax.set_mesh(self.mesh):
            for first in range(0, len(rows.tokens), size):
                batch = put_rows(jax.tree.map(lambda a, i=first: a[i : i + size], rows), self.mesh)
                yield np.asarray(_score(self.params, self.config, batch)), first


def load(folder: str | os.PathLike, mesh: MeshConfig | None = None) -> PRM:
    """The newest checkpoint of a run's folder, ready to score.

    Raises FileNotFoundError or ValueError, naming what is missing or damaged.
    """
    folder = pathlib.Path(folder)
    path = folder / "experiment.json"
    if not path.is_file():
        raise FileNotFoundError(f"{path}: not there; {folder} is not the folder of a run of `jprm train`")
    experiment = read(path)
    grid = make_mesh(mesh or MeshConfig())
    with jax.set_mesh(grid):
        params, step = store.load_params(folder, experiment, grid)
        params = merge(params, experiment.lora)
    outcome, rating = experiment.data.supervise == "outcome", experiment.target.labels == "rating"
    semantics = "value" if outcome else "rating" if rating else "correctness"
    return PRM(
        params, experiment.model, NativeLayout(load_tokenizer(folder)), grid, semantics, str(folder.resolve()), step
    )


def scored(record: dict[str, Any], tree: ReasoningTree, score_N: np.ndarray) -> dict[str, Any]:
    """A copy of the record with its scores put in; everything else is as it was."""
    values = [round(float(score), 7) for score in score_N]  # float32 has no more digits
    if tree.kind == "chain":
        return record | {"scores": values}
    if tree.kind == "tree":
        nodes = [node | {"score": value} for node, value in zip(record["nodes"], values, strict=True)]
        return record | {"nodes": nodes}
    chains = chains_of(tree)
    samples = [
        sample | {"scores": [values[node] for node in chain]}
        for sample, chain in zip(record["samples"], chains, strict=True)
    ]
    return record | {"samples": samples}


def _row_tokens(tree: TokenTree) -> int:
    """Tokens of the row that a tree is packed into."""
    longest = len(tree.tokens_N)
    if longest > LONGEST:  # it will be split at its branches, unless one chain is longer
        depth_M = geometry(tree.length_R, tree.parent_R).depth_R[tree.run_M]
        longest = max(LONGEST, int(depth_M.max(initial=0)), 2 * int(chain_lengths(tree).max(initial=0)))
    return max(SHORTEST, 1 << (longest - 1).bit_length())
