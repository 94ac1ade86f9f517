"""Scores from a trained model: chains, pools and trees go through the same packer and model as in training.

prm = jprm.load("runs/prm800k_smollm2")
prm.score(problem, steps)          # one score a step
prm.score_many(records)            # records of any kind, with their scores
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import jax
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Float

from jprm.layout import Layout
from jprm.model.config import ModelConfig
from jprm.model.heads import Readout, find
from jprm.model.mesh import put_rows
from jprm.model.transformer import step_logits
from jprm.pack import Part, empty_rows, lay_out, pack, split, token_tree
from jprm.rows import Rows
from jprm.score.aggregate import DEFAULT_RULE
from jprm.score.implicit import LogProbability, LogRatio
from jprm.score.memory import check_memory
from jprm.score.records import as_written, chain_tree, check_finite, scored
from jprm.score.scale import PROBABILITY, Scale
from jprm.token_tree import TokenTree, chain_lengths, geometry
from jprm.tree import ReasoningTree, tree_of

SHORTEST, FILLED, LONGEST = 256, 2048, 8192
"""Tokens of the shortest row, of the longest row that several trees share, and of the longest row made for one tree.

A row is SHORTEST times a power of two, so few shapes are compiled. A chain longer than LONGEST gets a row of its own
size, the next power of two."""

CHUNK = 64
"""Records that `score_many` packs together: the unit of progress, and what a killed run scores again."""


class Scorer(Protocol):
    """What scores files besides a `PRM`: `jprm.judge.judge.Judge`."""

    @property
    def name(self) -> str: ...

    @property
    def identity(self) -> dict[str, Any]:
        """What the scores depend on."""
        ...

    def score_many(self, records: Iterable[dict[str, Any]]) -> Iterator[dict[str, Any]]: ...


@functools.partial(jax.jit, static_argnums=(1, 3))
def readout_of_rows(params: dict, config: ModelConfig, rows: Rows, readout: Callable) -> dict[str, jax.Array]:
    return readout(step_logits(params, config, rows))


def _logits(logit_BSC: jax.Array) -> dict[str, jax.Array]:
    return {"logits": logit_BSC}


@dataclasses.dataclass(frozen=True)
class Prepared:
    """Trees that are ready for the device; see `PRM.prepare`."""

    trees: Sequence[ReasoningTree]
    token_trees: Sequence[TokenTree]
    batches: Iterable[tuple[Rows, np.ndarray, np.ndarray]]  # rows with the tree and the node of every slot


@dataclasses.dataclass(frozen=True, repr=False)
class PRM:
    """A process reward model, ready to score. `jprm.load` makes it.

    >>> prm.semantics, prm.rule, prm.output_names
    ('rating', 'prod', ('score',))

    The score of jprm's own models is the probability that a step is not wrong; the adapter of a published model
    (`jprm.adapters`) says what its score is.
    """

    params: dict
    config: ModelConfig
    layout: Layout
    mesh: Mesh
    semantics: str  # of the labels it was trained on; decides the default aggregation
    name: str  # the folder it was loaded from
    step: int  # of training
    # step logits (..., C) to named outputs (...); None: as its head says. It is never None after __post_init__.
    readout: Readout = None  # pyright: ignore[reportAssignmentType]
    ratio: LogRatio | LogProbability | None = None  # of an implicit PRM, in place of `readout`
    context: int | None = None  # tokens of the longest chain that the model takes
    aggregation: str = ""  # the rule that its authors use; "" is that of the semantics
    scale: Scale = PROBABILITY

    def __post_init__(self):
        if self.readout is None:
            object.__setattr__(self, "readout", find(self.config.head).readout)

    def __repr__(self) -> str:
        sizes = [x.size for x in jax.tree.leaves(self.params)]
        devices = f"{self.mesh.size} {self.mesh.devices.flat[0].platform}"
        return (
            f"PRM({self.name!r}, step {self.step}, head {self.config.head!r}, {sum(sizes):,} parameters, on {devices})"
        )

    @property
    def rule(self) -> str:
        """The rule that makes a chain's score of its steps': its authors' choice, or the one that fits its labels."""
        return self.aggregation or DEFAULT_RULE[self.semantics]

    def score(self, problem: str, steps: Sequence[str]) -> Float[np.ndarray, " P"]:
        """Returns one score a step, (P,) float32. The score of step k does not depend on later steps.

        >>> prm.score("What is 2 + 2?", ["2 + 2 = 4.", "So 4."]).shape
        (2,)

        Raises:
          TypeError: `steps` is one string, not a list of strings.
          ValueError: a problem or step without text, or a chain longer than the model takes.
        """
        (outputs,) = self._read(self._prepared([chain_tree(problem, steps)]), self.readout)
        return np.array(list(map(as_written, outputs["score"])), np.float32)

    def logits(self, problem: str, steps: Sequence[str]) -> Float[np.ndarray, "P C"]:
        """Returns the head's logits at every step, (P, C) float32, with C the channels of the head.

        Raises:
          TypeError, ValueError: as `score`; and for an implicit PRM, which has no logits of steps.
        """
        self._check_logits()
        (outputs,) = self._read(self._prepared([chain_tree(problem, steps)]), _logits)
        return outputs["logits"]

    def token_logits(self, ids: Sequence[int], places: Sequence[int]) -> Float[np.ndarray, "P C"]:
        """Returns the head's logits at P places of one chain of token ids, (P, C) float32.

        Raises:
          ValueError: as `logits`; no ids, ids beyond the vocabulary, or more than the model takes.
        """
        self._check_logits()
        self.check_length(len(ids), "token ids")
        if not ids or not 0 <= min(ids) <= max(ids) < self.config.vocab_size:
            raise ValueError(f"token ids: give at least one, each from 0 to {self.config.vocab_size - 1:,}")
        rows = empty_rows(1, size := _size(len(ids)), size // 2)
        rows.tokens[0, : len(ids)], rows.position[0, : len(ids)] = ids, range(len(ids))
        rows.until[0, : len(ids)] = len(ids)
        found = []
        for first in range(0, max(len(places), 1), size // 2):
            some = places[first : first + size // 2]
            rows.step_end[0, : len(some)] = some
            found += [outputs["logits"][0, : len(some)] for outputs, _ in self._run(rows, rows.step_end, _logits)]
        return np.concatenate(found)

    def _check_logits(self) -> None:
        if self.ratio is not None:
            raise ValueError(f"{self.name}: an implicit PRM scores by two models' tokens and has no logits of steps")

    def score_many(self, records: Iterable[dict[str, Any]]) -> Iterator[dict[str, Any]]:
        """Yields the records in order with their scores: `scores` in a chain and a pool's samples, `score` in a node.

        Named outputs of the head beyond the score are under `outputs`, lists by name in a chain or sample.

        >>> [chain] = prm.score_many([{"problem": "What is 2 + 2?", "steps": ["2 + 2 = 4."], "id": 7}])
        >>> sorted(chain), len(chain["scores"])
        (['id', 'problem', 'scores', 'steps'], 1)

        Raises:
          RecordError: a record that is not valid.
          ValueError: a chain longer than the model takes.
          FloatingPointError: a score that is not finite.
        """
        records = iter(records)
        while chunk := list(itertools.islice(records, CHUNK)):
            trees = [tree_of(record) for record in chunk]
            for record, tree, outputs in zip(chunk, trees, self.outputs_of(trees), strict=True):
                yield scored(record, tree, outputs)

    def score_trees(self, trees: Sequence[ReasoningTree]) -> list[Float[np.ndarray, " N"]]:
        """Returns (N,) float32 for each tree of N nodes. Common prefixes within a tree are computed once.

        Where attention takes one chain a row (`ModelConfig.chain_rows`), they are computed once for every chain.
        """
        return [outputs["score"] for outputs in self.outputs_of(trees)]

    def outputs_of(self, trees: Sequence[ReasoningTree] | Prepared) -> list[dict[str, Float[np.ndarray, " N"]]]:
        """Returns the head's named outputs for each tree of N nodes, (N,) float32 each; `score` is one of them.

        Args:
          trees: the trees, or what `prepare` made of them.

        Raises:
          ValueError, FloatingPointError: as `score_many`.
        """
        return self._read(trees if isinstance(trees, Prepared) else self._prepared(trees), self.readout)

    @property
    def output_names(self) -> tuple[str, ...]:
        """Names of what `outputs_of` returns."""
        return ("score",) if self.ratio is not None else tuple(name for name, _ in self.readout.outputs)

    def by(self, output: str) -> PRM:
        """Returns this model with another of its named outputs, such as `low`, as the score.

        Raises ValueError for an output that it does not have.
        """
        if output not in self.output_names:
            raise ValueError(
                f"{self.name}: has no output {output!r}, only {', '.join(self.output_names)}; `low` and `high` are"
                " those of the heads quantile and ensemble"
            )
        return self if output == "score" else dataclasses.replace(self, readout=Readout(score=self.readout[output]))

    def warm_up(self, longest: int) -> list[int]:
        """Compiles what chains of up to `longest` tokens need; returns the lengths of rows, in tokens.

        Afterwards no tree whose chains have at most so many tokens, and half as many steps, compiles anything.
        """
        sizes = [SHORTEST]
        while sizes[-1] < max(LONGEST, longest):
            sizes.append(2 * sizes[-1])
        for tokens in sizes:
            rows = empty_rows(1, tokens, tokens // 2)
            for readout in (self.readout, _logits) if self.ratio is None else (self.readout,):
                collections.deque(self._run(rows, rows.step_end, readout), maxlen=0)
        return sizes

    def prepare(self, trees: Sequence[ReasoningTree]) -> Prepared:
        """Tokenises and packs trees for `outputs_of`, without the device: a thread may do it while another scores.

        Raises ValueError for a chain longer than the model takes.
        """
        prepared = self._prepared(trees)
        return dataclasses.replace(prepared, batches=list(prepared.batches))

    def _prepared(self, trees: Sequence[ReasoningTree]) -> Prepared:
        token_trees = [token_tree(tree, self.layout) for tree in trees]
        for tree in token_trees:
            longest = geometry(tree.length_R, tree.parent_R).depth_R.max(initial=0)
            self.check_length(int(longest), f"problem {tree.name!r}")
        return Prepared(trees, token_trees, (_rows_of_chains if self._chain_rows else _rows_of_trees)(token_trees))

    def _read(self, prepared: Prepared, readout: Callable) -> list[dict[str, np.ndarray]]:
        """Returns what `readout` makes of the logits of each tree's steps, (N, ...) by name."""
        trees, token_trees = prepared.trees, prepared.token_trees
        problem = np.array([tree.length_R[0] for tree in token_trees])
        found: list[dict[str, np.ndarray]] = [{} for _ in trees]
        for rows, tree_BS, node_BS in prepared.batches:
            for outputs, first in self._fitting(trees, token_trees, tree_BS, rows, problem, readout):
                for name, value_BS in outputs.items():
                    tree_bS, node_bS = (x[first : first + len(value_BS)] for x in (tree_BS, node_BS))
                    for tree, node, value in zip(*(x[tree_bS >= 0] for x in (tree_bS, node_bS, value_BS)), strict=True):
                        if name not in found[tree]:
                            found[tree][name] = np.full((len(trees[tree].nodes), *value.shape), np.nan, np.float32)
                        found[tree][name][node] = value
        for tree, outputs in zip(trees, found, strict=True):
            for name, value_N in outputs.items():
                check_finite(tree, name, value_N)
        return found

    def _fitting(self, trees, token_trees, tree_BS, rows: Rows, problem, readout: Callable) -> Iterator:
        """Yields what `_run` does. Raises ValueError naming the longest tree of rows that do not fit in memory."""
        try:
            yield from self._run(rows, problem[tree_BS].astype(np.int32), readout)
        except (MemoryError, jax.errors.JaxRuntimeError) as error:
            if isinstance(error, jax.errors.JaxRuntimeError) and "RESOURCE_EXHAUSTED" not in str(error):
                raise
            longest = max(np.unique(tree_BS[tree_BS >= 0]), key=lambda i: len(token_trees[i].tokens_N))
            raise ValueError(
                f"problem {trees[longest].problem[:60]!r}: a row of {rows.tokens.shape[1]:,} tokens does not fit in"
                f" memory with attention={self.config.attention!r}. Drop it, or score with attention 'blocked' or"
                " 'paths', or with dtype bfloat16 or int8"
            ) from error

    def _run(self, rows: Rows, problem_BS: np.ndarray, readout: Callable) -> Iterator[tuple[dict, int]]:
        """Yields the outputs of a batch of rows by name, and the index of its first row.

        A batch is one row a device, filled up with padding; with one chain a row, as many rows a device as have FILLED
        tokens. `problem_BS` is the tokens of each step's problem. Raises MemoryError for a batch that cannot fit.
        """
        size, count = self.mesh.shape["data"] * self.mesh.shape["fsdp"], len(rows.tokens)
        a_device = max(1, FILLED // rows.tokens.shape[1]) if self._chain_rows else 1
        size *= a_device
        check_memory(self.config, rows.tokens.shape[1], a_device, self.mesh)
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
                    outputs = readout_of_rows(self.params, self.config, batch, readout)
                else:
                    start_BS = jax.device_put(problem_BS[some], batch.step_end.sharding)
                    outputs = {"score": self.ratio(self.params, self.config, batch, start_BS)}
                yield {name: np.asarray(x)[: count - first] for name, x in outputs.items()}, first  # without the filler

    @property
    def _chain_rows(self) -> bool:
        """Whether a row must hold one chain, for this model or for the reference of an implicit PRM."""
        return self.config.chain_rows or (self.ratio is not None and self.ratio.config.chain_rows)

    def fits(self, record: Mapping[str, Any]) -> bool:
        """Returns whether the model takes every chain of a record."""
        if self.context is None:
            return True
        tree = token_tree(tree_of(dict(record)), self.layout)
        return geometry(tree.length_R, tree.parent_R).depth_R.max(initial=0) <= self.context

    def check_length(self, tokens: int, where: str) -> None:
        """Raises ValueError for a chain of more tokens than the model takes."""
        if self.context is not None and tokens > self.context:
            raise ValueError(
                f"{where}: its longest chain takes {tokens:,} tokens, and {self.name} reads {self.context:,} at most."
                " Drop it (evaluations: --too-long skip), or use a model with a longer context"
            )


def _rows_of_trees(trees: Sequence[TokenTree]) -> Iterator[tuple[Rows, np.ndarray, np.ndarray]]:
    """Yields rows of several trees, by length, with the tree (its index in `trees`) and the node of every slot."""
    for tokens, members in _row_groups(trees).items():
        packed = pack([trees[i] for i in members], tokens, tokens // 2, too_long="error")
        yield packed.rows, np.where(packed.tree_BS >= 0, np.array(members)[packed.tree_BS], -1), packed.node_BS


def _rows_of_chains(trees: Sequence[TokenTree]) -> Iterator[tuple[Rows, np.ndarray, np.ndarray]]:
    """Yields rows of one chain each, the shortest that hold it, with the tree and the node of every slot."""
    groups: dict[int, list[Part]] = {}
    for index, tree in enumerate(trees):
        longest = _longest_row(tree)
        for part in split(tree, index, longest, longest // 2, too_long="error", chains=True)[0]:
            groups.setdefault(_size(_needed(part.tree)), []).append(part)
    for tokens, parts in groups.items():
        yield lay_out([[part] for part in parts], tokens, tokens // 2)


def _row_groups(trees: Sequence[TokenTree]) -> dict[int, list[int]]:
    """Returns, by the tokens of a row, the indices of the trees that are packed into such rows.

    Rows are chosen one by one, each of the longest size that the remaining trees fill, so the last ones are short and
    little is padding. The number of devices plays no part: rows of another length would change scores by their
    rounding, and with them the files of several processes.
    """
    need = [_needed(tree) for tree in trees]
    left = sorted(range(len(trees)), key=lambda i: -need[i])
    groups: dict[int, list[int]] = {}
    while left:
        first, *later = left
        tokens = _row_tokens(trees[first])
        if need[first] <= LONGEST:  # a longer one is split at its branches and shares no row
            tokens = max(tokens, min(FILLED, 1 << (sum(need[i] for i in left).bit_length() - 1)))
        room, taken, left = tokens - need[first], [first], []
        for i in later:
            fits = need[i] <= room
            (taken if fits else left).append(i)
            room -= need[i] if fits else 0
        groups.setdefault(tokens, []).extend(taken)
    return groups


def _needed(tree: TokenTree) -> int:
    """Returns the tokens of a row that holds the tree. Equal chains can use up its slots, half as many, first."""
    return max(len(tree.tokens_N), 2 * len(tree.run_M))


def _row_tokens(tree: TokenTree) -> int:
    """Returns the tokens of the row for this tree alone. A tree longer than LONGEST is split."""
    return _size(_needed(tree)) if _needed(tree) <= LONGEST else _longest_row(tree)


def _longest_row(tree: TokenTree) -> int:
    """Returns the tokens of a row that holds any one chain of the tree: LONGEST, unless a chain is longer."""
    depth_M = geometry(tree.length_R, tree.parent_R).depth_R[tree.run_M]
    return _size(max(LONGEST, int(depth_M.max(initial=0)), 2 * int(chain_lengths(tree).max(initial=0))))


def _size(tokens: int) -> int:
    """Returns the size of the shortest row with at least so many tokens."""
    return max(SHORTEST, 1 << (tokens - 1).bit_length())
