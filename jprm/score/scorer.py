"""Scores from a trained model. Chains, pools and trees use the same packer and model as training.

prm = jprm.load("runs/prm800k_smollm2")
prm.score(problem, steps)          # one score per step
prm.score_many(records)            # records of any kind, with their scores
"""

from __future__ import annotations

import collections
import concurrent.futures
import contextlib
import dataclasses
import functools
import itertools
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol, TypeVar, cast

import jax
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Float

from jprm.model.attention import chain_rows
from jprm.model.config import ModelConfig
from jprm.model.heads import Readout, Unless, find
from jprm.model.mesh import put_rows, row_parts
from jprm.model.transformer import check_model, step_logits
from jprm.pack import Part, lay_out, pack, split
from jprm.rows import Rows, empty_rows, padded_size, padded_sizes
from jprm.score.aggregate import DEFAULT_RULE
from jprm.score.scale import PROBABILITY, Scale
from jprm.token_tree import BEGIN, TokenTree, chain_lengths, geometry, token_tree
from jprm.tokenizer import Layout
from jprm.tree import ReasoningTree, above_of, as_written, chain_tree, scored, tree_of

CHUNK = 64
"""Records packed together by `score_many`; progress and resumption work in these units."""


@functools.partial(jax.jit, static_argnums=(1, 3))
def readout_of_rows(params: dict, config: ModelConfig, rows: Rows, readout: Callable) -> dict[str, jax.Array]:
    return readout(step_logits(params, config, rows))


def _logits(logit_BSC: jax.Array) -> dict[str, jax.Array]:
    return {"logits": logit_BSC}


class LogScore(Protocol):
    """Scores from token log-probabilities (`jprm.methods.implicit`) instead of a head."""

    @property
    def params(self) -> Mapping: ...  # of the reference model, where there is one

    @property
    def config(self) -> ModelConfig: ...

    def __call__(self, params: dict, config: ModelConfig, rows: Rows, start_BS: Any) -> Any: ...

    def compile(self, params: dict, config: ModelConfig, rows: Rows) -> None: ...


@dataclasses.dataclass(frozen=True)
class Prepared:
    """Packed trees, ready for the device; see `PRM.prepare`."""

    trees: Sequence[ReasoningTree]
    token_trees: Sequence[TokenTree]
    batches: Iterable[Batch]
    records: Sequence[dict[str, Any]] = ()  # of the trees, for `PRM.score_many`


@dataclasses.dataclass(frozen=True, repr=False)
class PRM:
    """A process reward model, ready to score. `jprm.load` makes it.

    >>> prm.semantics, prm.rule, prm.output_names
    ('rating', 'prod', ('score',))

    In jprm's own models the score is the probability that a step is not wrong. For a published model its adapter
    (`jprm.methods.formats.adapters`) defines the score. Scoring blocks, and compiles each new row length first
    (`warm_up`). It raises ValueError if a row does not fit in memory.
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
    ratio: LogScore | None = None  # of an implicit PRM, in place of `readout`
    context: int | None = None  # tokens of the longest chain that the model takes
    aggregation: str = ""  # the rule that its authors use; "" is that of the semantics
    scale: Scale = PROBABILITY

    def __post_init__(self):
        check_model(self.config)
        if self.readout is None:
            object.__setattr__(self, "readout", find(self.config.head).readout)

    def __repr__(self) -> str:
        sizes = [x.size for x in jax.tree.leaves(self.params)]
        devices = f"{self.mesh.size} {self.mesh.devices.flat[0].platform}"
        about = f"step {self.step}, head {self.config.head!r}, {sum(sizes):,} parameters, on {devices}"
        return f"PRM({self.name!r}, {about})"

    @property
    def read_as(self) -> str:
        """`FOLDER: LAYOUT; scores are of SEMANTICS, a chain's rule is RULE`, one line for logs."""
        return f"{self.name}: {self.layout}; scores are of {self.semantics}, a chain's rule is {self.rule}"

    @property
    def rule(self) -> str:
        """The aggregation rule, e.g. "prod": the authors' choice, or the label semantics' default."""
        return self.aggregation or DEFAULT_RULE[self.semantics]

    def score(self, problem: str, steps: Sequence[str]) -> Float[np.ndarray, " P"]:
        """Returns one score per step, (P,) float32, as in files (7 decimals). Step k's does not depend on later steps.

        >>> prm.score("What is 2 + 2?", ["2 + 2 = 4.", "So 4."]).shape
        (2,)

        Raises TypeError if `steps` is one string; ValueError if it is empty, the problem or a step is blank, or the
        chain is too long; FloatingPointError for a non-finite score.
        """
        (outputs,) = self._outputs(self._prepared([chain_tree(problem, steps)]), self.readout)
        return np.array(list(map(as_written, outputs["score"])), np.float32)

    def logits(self, problem: str, steps: Sequence[str]) -> Float[np.ndarray, "P C"]:
        """Returns (P, C) float32 logits, C the head's channels. Raises like `score`; ValueError for an implicit PRM."""
        self._check_logits()
        (outputs,) = self._outputs(self._prepared([chain_tree(problem, steps)]), _logits)
        return outputs["logits"]

    def token_logits(self, ids: Sequence[int], places: Sequence[int]) -> Float[np.ndarray, "P C"]:
        """Returns the head's logits at the P token indices `places` of the chain `ids`, (P, C) float32.

        They may be non-finite. Raises ValueError for an implicit PRM, a model with a step layer, places outside the
        chain, and invalid, missing or too many ids; MemoryError if a device cannot hold the row.
        """
        self._check_logits()
        if self.config.steps:
            raise ValueError(f"{self.name}: model.steps needs the ends of steps, and token ids have none: use `score`")
        self.check_length(len(ids), "token ids")
        if not ids or not 0 <= min(ids) <= max(ids) < self.config.vocab_size:
            raise ValueError(f"token ids: give at least one, each from 0 to {self.config.vocab_size - 1:,}")
        if not all(0 <= place < len(ids) for place in places):
            raise ValueError(f"places: give indices of the token ids, each from 0 to {len(ids) - 1:,}")
        rows = empty_rows(1, size := padded_size(len(ids), SHORTEST), size // 2)
        rows.tokens[0, : len(ids)], rows.position[0, : len(ids)] = ids, range(len(ids))
        rows.until[0, : len(ids)] = len(ids)
        parts = []
        for first in range(0, max(len(places), 1), size // 2):
            part = places[first : first + size // 2]
            rows.step_end[0, : len(part)] = part
            (batch,) = self._batches(rows, rows.step_end, rows.tree, rows.tree)
            parts.append(np.asarray(self._run(batch, _logits)["logits"])[0, : len(part)])
        return np.concatenate(parts)

    def _check_logits(self) -> None:
        if self.ratio is not None:
            raise ValueError(
                f"{self.name}: an implicit PRM scores by the tokens of two models, and has no step logits. Use `score`"
            )

    def score_many(self, records: Iterable[dict[str, Any]], speed: Speed | None = None) -> Iterator[dict[str, Any]]:
        """Yields copies of the records in order with new scores: `scores` in chains and pool samples, `score` in nodes.

        Further named outputs are under `outputs`: {name: number} in a node, lists in a chain or sample. All have 7
        decimals. A thread reads up to three chunks (CHUNK records each) ahead. `speed` counts tokens and times.

        >>> [chain] = prm.score_many([{"problem": "What is 2 + 2?", "steps": ["2 + 2 = 4."], "id": 7}])
        >>> sorted(chain), len(chain["scores"])
        (['id', 'problem', 'scores', 'steps'], 1)

        Raises:
          RecordError: an invalid record, in place of its whole chunk; like any error it ends the scores.
          ValueError: a chain too long for the model; at once, if `records` is one record or a file name.
          FloatingPointError: a non-finite score.
        """
        if isinstance(records, str | os.PathLike | Mapping):
            raise ValueError("score_many takes records, [{...}, ...]. To read a file, use jprm.tree.read_records(FILE)")
        return (
            scored(record, tree, outputs)
            for prepared, results in self._read(ahead(self._chunks(records)), self.readout, speed)
            for record, tree, outputs in zip(prepared.records, prepared.trees, results, strict=True)
        )

    def _chunks(self, records: Iterable[dict[str, Any]]) -> Iterator[Prepared]:
        """Yields packed record chunks, and compiles their programs."""
        records, compiled, places = iter(records), set(), map("record {}".format, itertools.count(1))
        while chunk := list(itertools.islice(records, CHUNK)):
            prepared = dataclasses.replace(self.prepare(list(map(tree_of, chunk, places))), records=chunk)
            for batch in prepared.batches if self.ratio is None else ():
                if batch.rows.tokens.shape not in compiled:
                    compiled.add(batch.rows.tokens.shape)
                    with self._fitting(prepared, batch):
                        self._compile(batch)
            yield prepared

    def score_trees(self, trees: Sequence[ReasoningTree]) -> list[Float[np.ndarray, " N"]]:
        """Returns unrounded scores, (N,) for N nodes, NaN at messages that are no step. Raises like `score_many`."""
        return [outputs["score"] for outputs in self.outputs_of(trees)]

    def outputs_of(self, trees: Sequence[ReasoningTree] | Prepared) -> list[dict[str, Float[np.ndarray, " N"]]]:
        """Returns {output name: (N,)} for each tree, NaN at messages that are no step; `turn` is a message's own log
        ratio by an implicit PRM. Raises like `score_many`."""
        return self._outputs(trees if isinstance(trees, Prepared) else self._prepared(trees), self.readout)

    @property
    def output_names(self) -> tuple[str, ...]:
        return ("score",) if self.ratio is not None else tuple(name for name, _ in self.readout.outputs)

    def by(self, output: str) -> PRM:
        """Returns a model with another named output, e.g. `low`, as its only one, `score`; itself for "score".

        `NAME unless OTHER > 0.5` scores 0 if another output is above a limit, so such a step is never chosen.
        Raises ValueError for an unknown output, another form, and a limit if 0 is not the worst score.
        """
        if output == "score":
            return self
        name, filtered, condition = output.partition(" unless ")
        other, above, limit = condition.partition(" > ")
        if unknown := [x for x in ((name, other) if filtered else (name,)) if x not in self.output_names]:
            raise ValueError(
                f"{self.name}: has no output {unknown[0]!r}, only {', '.join(self.output_names)}; `low` and `high` are"
                " those of the heads quantile and ensemble"
            )
        if not filtered:
            return dataclasses.replace(self, readout=Readout(score=self.readout[name]))
        try:
            readout = Unless(self.readout[name], self.readout[other], float(limit if above else "no limit"))
        except ValueError:
            raise ValueError(f"{output!r}: write it as `NAME unless OTHER > 0.5`") from None
        if self.scale.weight != "score":
            raise ValueError(f"{output!r}: {self.name} needs a model that scores probabilities, with 0 as the worst")
        return dataclasses.replace(self, readout=Readout(score=readout))

    def compile(self, tokens: int) -> None:
        """Compiles rows of `tokens` tokens (see `row_lengths`) and waits. Raises MemoryError if they do not fit."""
        rows = empty_rows(1, tokens, tokens // 2)
        for batch in self._batches(rows, rows.step_end, rows.tree, rows.tree):
            self._compile(batch)

    def warm_up(self, longest: int) -> list[int]:
        """Compiles rows for chains up to `longest` tokens (also above `context`), and waits; returns the row lengths.

        Afterwards no chain with at most so many tokens, and half as many steps, compiles anything; nor do trees of such
        chains prepared for rows with at most so many tokens. Raises MemoryError if a device cannot hold such rows.
        """
        lengths = row_lengths(longest)
        for tokens in lengths:
            self.compile(tokens)
        return lengths

    def prepare(self, trees: Sequence[ReasoningTree], row: int | None = None) -> Prepared:
        """Tokenises and packs trees for `outputs_of`, without the device, e.g. in a thread while another scores.

        row: the largest row in tokens, at most LONGEST (also `None`), unless a chain is longer. Larger trees are split;
            scores then change by rounding. Raises ValueError if a chain is too long for the model.
        """
        prepared = self._prepared(trees, row)
        return dataclasses.replace(prepared, batches=list(prepared.batches))

    def _prepared(self, trees: Sequence[ReasoningTree], row: int | None = None) -> Prepared:
        turns = [self.ratio is not None and tree.of_messages for tree in trees]
        token_trees = [
            token_tree(tree, self.layout, extras=(BEGIN,) * turn, context=self.context)
            for tree, turn in zip(trees, turns, strict=True)
        ]
        for tree in token_trees:
            self.check_length(longest_chain(tree), f"problem {tree.name!r}")
        start = [
            np.full(len(tree.nodes), flat.length_R[0], np.int32) for tree, flat in zip(trees, token_trees, strict=True)
        ]
        for i in np.flatnonzero(turns).tolist():  # a log ratio is summed only over the turn: see `_sums_of_turns`
            start[i][token_trees[i].node_M] = token_trees[i].extras[BEGIN]
            token_trees[i] = dataclasses.replace(token_trees[i], extras={})
        start_N, first_K = np.concatenate([*start, [0]]), np.cumsum([0, *map(len, start)])
        rows = (rows_of_chains if self._chain_rows else rows_of_trees)(token_trees, min(row or LONGEST, LONGEST))
        if trees and not any(len(tree.run_M) for tree in token_trees):  # pools without steps: their row is padding
            rows = [(padding := empty_rows(1, SHORTEST, SHORTEST // 2), padding.tree, padding.tree)]
        batches = (
            self._batches(packed, start_N[np.where(tree_BS >= 0, first_K[tree_BS] + node_BS, -1)], tree_BS, node_BS)
            for packed, tree_BS, node_BS in rows
        )
        return Prepared(trees, token_trees, itertools.chain.from_iterable(batches))

    def _outputs(self, prepared: Prepared, readout: Callable) -> list[dict[str, np.ndarray]]:
        """Applies `readout` to each tree's step logits; returns (N, ...) by name."""
        return [outputs for _, results in self._read([prepared], readout) for outputs in results]

    def _read(
        self, chunks: Iterable[Prepared], readout: Callable, speed: Speed | None = None
    ) -> Iterator[tuple[Prepared, list[dict[str, np.ndarray]]]]:
        """Yields the chunks in order, with the results of `_outputs`. Several batches are in flight."""
        speed = speed or Speed()

        def parts() -> Iterator[tuple[Prepared, list[dict[str, np.ndarray]], Batch, bool]]:
            for prepared in chunks:
                stepless = dict.fromkeys(self.output_names, np.zeros(0, np.float32))
                results = [{} if tree.nodes else stepless.copy() for tree in prepared.trees]
                for batch, after in itertools.pairwise(itertools.chain(prepared.batches, [None])):
                    yield prepared, results, cast(Batch, batch), after is None

        def dispatch(part) -> Callable[[], dict[str, np.ndarray]]:
            prepared, _, batch, _ = part
            with self._fitting(prepared, batch):
                outputs = self._run(batch, readout)

            def fetch() -> dict[str, np.ndarray]:
                with self._fitting(prepared, batch):
                    return jax.device_get(outputs)

            return fetch

        # A CPU runs one thread's programs one by one, and small operations leave cores idle, so that two threads start
        # short rows. Long ones keep the cores busy, and two at a time might not fit in memory.
        one_cpu = self.mesh.size == 1 and self.mesh.devices.flat[0].platform == "cpu"

        def start(part) -> Callable[[], dict[str, np.ndarray]]:
            short = part[2].rows.tokens.size <= FILLED
            return (lambda: dispatch(part)()) if one_cpu and short else dispatch(part)

        for (prepared, results, batch, last), outputs in in_flight(parts(), start, speed, BATCHES if one_cpu else 1):
            speed.count(batch.rows)
            _place(outputs, batch, prepared.trees, results)
            if last:
                speed.read(prepared)
                for i, (tree, outputs_N) in enumerate(zip(prepared.trees, results, strict=True)):
                    if self.ratio is not None and tree.of_messages:
                        results[i] = outputs_N = _sums_of_turns(tree, outputs_N["score"])
                    for name, value_N in outputs_N.items():
                        check_finite(tree, name, value_N)
                yield prepared, results

    @contextlib.contextmanager
    def _fitting(self, prepared: Prepared, batch: Batch) -> Iterator[None]:
        """Raises ValueError naming the longest tree if the batch does not fit in memory."""
        try:
            yield
        except (MemoryError, jax.errors.JaxRuntimeError) as error:
            if isinstance(error, jax.errors.JaxRuntimeError) and "RESOURCE_EXHAUSTED" not in str(error):
                raise
            members = np.unique(batch.tree_BS[batch.tree_BS >= 0])
            longest = max(members, key=lambda i: len(prepared.token_trees[i].tokens_N))
            raise ValueError(
                f"problem {prepared.trees[longest].problem[:60]!r}: a row of {batch.rows.tokens.shape[1]:,} tokens does"
                f" not fit in memory with attention={self.config.attention!r}. Drop it, or score with attention"
                " 'blocked' or 'paths', or with dtype bfloat16 or int8"
            ) from error

    def _a_device(self, rows: Rows) -> int:
        """Returns rows per device at a time: one, or as many one-chain rows as FILLED tokens allow."""
        return max(1, FILLED // rows.tokens.shape[1]) if self._chain_rows else 1

    def _batches(self, rows: Rows, *of_slots: np.ndarray) -> Iterator[Batch]:
        """Yields batches for all devices; `of_slots` are the other fields of a `Batch`."""
        return batches(rows, *of_slots, size=row_parts(self.mesh) * self._a_device(rows))

    def _put(self, batch: Batch) -> Rows:
        """Puts the batch's rows on the devices. Raises MemoryError if they cannot fit."""
        check_memory(self.config, batch.rows.tokens.shape[1], self._a_device(batch.rows), self.mesh)
        return put_rows(batch.rows, self.mesh)

    def _compile(self, batch: Batch) -> None:
        with jax.set_mesh(self.mesh):
            rows = self._put(batch)
            if self.ratio is None:
                readout_of_rows.lower(self.params, self.config, rows, self.readout).compile()
            else:
                self.ratio.compile(self.params, self.config, rows)

    def _run(self, batch: Batch, readout: Callable) -> dict[str, jax.Array]:
        """Dispatches a batch; returns its outputs by name, which the device may still be computing."""
        with jax.set_mesh(self.mesh):
            rows = self._put(batch)
            if self.ratio is None:
                return readout_of_rows(self.params, self.config, rows, readout)
            start_BS = jax.device_put(batch.problem_BS, rows.step_end.sharding)
            return {"score": self.ratio(self.params, self.config, rows, start_BS)}

    @property
    def _chain_rows(self) -> bool:
        """Whether a row must hold one chain, for this model or an implicit PRM's reference."""
        return chain_rows(self.config) or (self.ratio is not None and chain_rows(self.ratio.config))

    def fits(self, record: Mapping[str, Any]) -> bool:
        """Returns whether all chains are within `context`; True if it is None. Raises RecordError if one is invalid."""
        if (limit := self.context) is None:
            return True
        return longest_chain(token_tree(tree_of(dict(record)), self.layout, context=limit)) <= limit

    def check_length(self, tokens: int, where: str) -> None:
        """Raises LongChain, naming `where`, if a chain of so many tokens exceeds `context` (`None`: never)."""
        if self.context is not None and tokens > self.context:
            raise LongChain(
                f"{where}: its longest chain takes {tokens:,} tokens, and {self.name} reads {self.context:,} at most."
                " Leave it out (--on-error skip), or use a model with a longer context"
            )


class LongChain(ValueError):
    """A chain with more tokens than the model can read."""


def longest_chain(tree: TokenTree) -> int:
    """Returns the length of the tree's longest chain in tokens, problem included."""
    return int(geometry(tree.length_R, tree.parent_R).depth_R.max(initial=0))


def check_finite(tree: ReasoningTree, name: str, value_N: np.ndarray) -> None:
    """Raises FloatingPointError if the output `name` is not finite at a step; other messages are not checked."""
    finite_N = np.isfinite(value_N).all(axis=tuple(range(1, value_N.ndim)))
    if tree.of_messages:
        finite_N = finite_N | np.array([not node.is_step for node in tree.nodes])
    if not finite_N.all():
        node = int(np.argmin(finite_N))
        raise FloatingPointError(
            f"problem {tree.problem[:60]!r}, step {node}: the model's {name} is {value_N[node]}; its checkpoint (or a"
            " bfloat16 overflow) is at fault: use an earlier checkpoint or float32"
        )


def _sums_of_turns(tree: ReasoningTree, own_N: Float[np.ndarray, " N"]) -> dict[str, Float[np.ndarray, " N"]]:
    """Returns each assistant turn's log ratio as `turn`, and its sum along the path as the score."""
    score_N, above = own_N.copy(), above_of(tree)
    for i in tree.steps:  # a turn comes after those before it
        if above[i] >= 0:
            score_N[i] += score_N[above[i]]
    return {"score": score_N, "turn": own_N}


def _place(outputs: dict, batch: Batch, trees: Sequence[ReasoningTree], results: list[dict[str, np.ndarray]]) -> None:
    """Writes a batch's outputs to their trees and nodes in `results`."""
    used_BS = batch.tree_BS >= 0
    for name, value_BS in outputs.items():
        for tree, node, value in zip(*(x[used_BS] for x in (batch.tree_BS, batch.node_BS, value_BS)), strict=True):
            if name not in results[tree]:
                results[tree][name] = np.full((len(trees[tree].nodes), *value.shape), np.nan, np.float32)
            results[tree][name][node] = value


# ----------------------------------------------- rows: few lengths, so that few shapes are compiled, and little padding

SHORTEST, FILLED, LONGEST = 256, 2048, 8192
"""Tokens in the shortest row, the longest row shared by trees, and the longest row for one tree.

Rows are SHORTEST times a power of two, so few shapes are compiled. A chain longer than LONGEST gets a row at its own
size, the next power of two.
"""


def row_lengths(longest: int) -> list[int]:
    """Returns the row lengths for chains up to `longest` tokens, ascending, e.g. [256, 512, 1024] for 600."""
    return padded_sizes(longest, SHORTEST)


def rows_of_trees(trees: Sequence[TokenTree], row: int) -> Iterator[tuple[Rows, np.ndarray, np.ndarray]]:
    """Yields (rows, each slot's tree index, its node) per row length; both are (B, S), -1 in unused slots. Rows have at
    most `row` tokens, unless a chain needs more."""
    for tokens, members in row_groups(trees, row).items():
        packed = pack([trees[i] for i in members], tokens, tokens // 2, too_long="error")
        yield packed.rows, np.where(packed.tree_BS >= 0, np.array(members)[packed.tree_BS], -1), packed.node_BS


def rows_of_chains(trees: Sequence[TokenTree], row: int) -> Iterator[tuple[Rows, np.ndarray, np.ndarray]]:
    """Yields like `rows_of_trees`, but one chain per row, and each row as short as possible."""
    groups: dict[int, list[Part]] = {}
    for index, tree in enumerate(trees):
        longest = _longest_row(tree, row)
        for part in split(tree, index, longest, longest // 2, too_long="error", chains=True)[0]:
            groups.setdefault(padded_size(_needed(part.tree), SHORTEST), []).append(part)
    for tokens, parts in groups.items():
        yield lay_out([[part] for part in parts], tokens, tokens // 2)


def row_groups(trees: Sequence[TokenTree], row: int) -> dict[int, list[int]]:
    """Returns {row length: tree indices} for `rows_of_trees`; `row` is the longest shared row.

    Rows are chosen one by one, each at the largest size filled by the remaining trees, so the last ones are short and
    padding is small. The number of devices must not matter: other row lengths would change scores by rounding, and with
    them the files of several processes.
    """
    need = [_needed(tree) for tree in trees]
    left = sorted(range(len(trees)), key=lambda i: -need[i])
    groups: dict[int, list[int]] = {}
    while left:
        first, *later = left
        if need[first] <= row:
            fullest = min(FILLED, row, 1 << (sum(need[i] for i in left).bit_length() - 1))
            tokens = max(padded_size(need[first], SHORTEST), fullest)
        else:  # it is split at its branches and shares no row
            tokens = _longest_row(trees[first], row)
        room, taken, left = tokens - need[first], [first], []
        for i in later:
            fits = need[i] <= room
            (taken if fits else left).append(i)
            room -= need[i] if fits else 0
        groups.setdefault(tokens, []).extend(taken)
    return groups


def _needed(tree: TokenTree) -> int:
    """Returns the row length for the tree. (Many equal chains can use up the slots, half as many, first.)"""
    return max(len(tree.tokens_N), 2 * len(tree.run_M))


def _longest_row(tree: TokenTree, row: int) -> int:
    """Returns a row length for any one chain in the tree: `row`, unless a chain is longer."""
    depth_M = geometry(tree.length_R, tree.parent_R).depth_R[tree.run_M]
    return padded_size(max(row, int(depth_M.max(initial=0)), 2 * int(chain_lengths(tree).max(initial=0))), SHORTEST)


# ------------------------------------------------------------- batches: on the device while the host packs what follows
#
# A thread makes items one ahead. A batch is dispatched before the results of the one before it are fetched, so the
# device has work while the host reads results. Another thread waits for results and notes when they were there.

T = TypeVar("T")
R = TypeVar("R")

BATCHES = 2
"""Batches in flight: one computing, one waiting."""


@dataclasses.dataclass(frozen=True)
class Batch:
    """Rows computed at once on the devices, with padding rows, and every slot's owner."""

    rows: Rows
    problem_BS: np.ndarray  # tokens of each slot's problem; for a log ratio of a turn, tokens before the turn
    tree_BS: np.ndarray  # the index of each slot's tree; -1 in unused slots
    node_BS: np.ndarray


def batches(rows: Rows, *of_slots: np.ndarray, size: int) -> Iterator[Batch]:
    """Yields batches of `size` rows; padding fills the last one. `of_slots` are a `Batch`'s other fields."""
    fields = rows, *of_slots
    if missing := -len(rows.tokens) % size:
        filler = empty_rows(missing, rows.tokens.shape[1], rows.step_end.shape[1])
        fillers = filler, filler.step_end, filler.tree, filler.tree
        fields = jax.tree.map(lambda a, b: np.concatenate([a, b]), fields, fillers)
    for first in range(0, len(fields[0].tokens), size):
        yield Batch(*jax.tree.map(lambda a, i=first: a[i : i + size], fields))


@dataclasses.dataclass
class Speed:
    """Device throughput from the first batch's dispatch to the last result, in seconds of `clock`.

    waited: seconds without a batch in flight, while the host was packing, compiling or writing.
    """

    clock: Callable[[], float] = time.monotonic
    tokens: int = 0  # without padding
    cells: int = 0  # with padding
    seconds: float = 0.0
    waited: float = 0.0
    steps: int = 0
    runs: int = 0  # trajectories
    windows: int = 0  # texts in which the trajectories were read
    _last: float | None = None

    def add(self, dispatched: float, finished: float) -> None:
        """Adds a batch, dispatched and finished at these times of `clock`, in dispatch order."""
        begun = dispatched if self._last is None else self._last
        self.waited += max(0.0, dispatched - begun)
        self._last = max(begun, finished)
        self.seconds += self._last - begun

    def count(self, rows: Rows) -> None:
        """Adds a batch to `cells` and `tokens`. A padding token is at position 0 and sees only itself."""
        self.cells += rows.tokens.size
        self.tokens += int(((rows.position > 0) | (rows.until > np.arange(1, rows.tokens.shape[1] + 1))).sum())

    def read(self, prepared: Prepared) -> None:
        """Adds the trees to `steps`, `runs` and `windows`."""
        for tree, flat in zip(prepared.trees, prepared.token_trees, strict=True):
            self.steps, run = self.steps + len(flat.node_M), tree.kind == "trajectory"
            self.runs, self.windows = self.runs + run, self.windows + run * int((flat.above_M < 0).sum())

    def __str__(self) -> str:
        windows = f" ({self.runs:,} runs in {self.windows:,} windows)" if self.runs else ""
        return (
            f"{self.tokens / self.seconds:,.0f} tokens/s, {1 - self.tokens / self.cells:.0%} padding, the device waited"
            f" {self.waited / self.seconds:.0%} of {self.seconds:.1f} s for the host,"
            f" {self.tokens / max(self.steps, 1):,.1f} tokens read per {'turn' if self.runs else 'step'}{windows}"
        )


class _Thread(concurrent.futures.ThreadPoolExecutor):
    """An executor that is joined on exit, unless the interpreter is already finalizing."""

    _ending = staticmethod(sys.is_finalizing)  # the module's names are gone too

    def __exit__(self, *_: object) -> None:
        if not self._ending():
            self.shutdown()


def ahead(items: Iterable[T]) -> Iterator[T]:
    """Yields the items while a thread makes the next one; an exception in it is raised in the item's place."""
    end, items = object(), iter(items)
    with _Thread(1, "jprm packing") as thread:
        following = thread.submit(next, items, end)
        while (item := following.result()) is not end:
            following = thread.submit(next, items, end)
            yield cast(T, item)


def in_flight(
    items: Iterable[T], dispatch: Callable[[T], Callable[[], R]], speed: Speed, threads: int = 1
) -> Iterator[tuple[T, R]]:
    """Yields each item with its results, in order, after the next item is dispatched.

    `dispatch` returns a function that waits for the results; one of `threads` calls it. Exceptions, also while making
    or dispatching an item, are raised after earlier items' results. Adds each item's times to `speed`.
    """
    waiting: collections.deque[tuple[T, float, concurrent.futures.Future]] = collections.deque()
    items, failure, more = iter(items), None, True

    def fetched(fetch: Callable[[], R]) -> tuple[R, float]:
        return fetch(), speed.clock()

    with _Thread(threads, "jprm fetching") as thread:
        while True:
            while more and len(waiting) < BATCHES:
                try:
                    item = next(items)
                    fetch = dispatch(item)
                    waiting.append((item, speed.clock(), thread.submit(fetched, fetch)))
                except StopIteration:
                    more = False
                except Exception as error:  # the results before it come first
                    failure, more = error, False
            if not waiting:
                break
            item, dispatched, future = waiting.popleft()
            results, finished = future.result()
            speed.add(dispatched, finished)
            yield item, results
    if failure is not None:
        raise failure


# ------------------ memory: a row that no device holds is refused before XLA's compiler ends the process at such a size


def check_memory(config: ModelConfig, tokens: int, rows: int, mesh: Mesh) -> None:
    """Raises MemoryError if a device cannot hold the temporaries for its `rows` rows with `tokens` tokens each.

    A lower bound: hidden states, and the float32 logits if `attention` is `reference`. Unknown memory passes.
    """
    pairs = config.heads * tokens * tokens * 4 if config.attention == "reference" else 0
    parts = mesh.size // row_parts(mesh)  # the devices that share a row
    needed, memory = rows * (2 * tokens * config.width * 4 + pairs) // parts, memory_of(mesh)
    if memory is not None and needed > memory:
        raise MemoryError(f"{needed:,} bytes at least for temporaries, and a device has {memory:,}")


def memory_of(mesh: Mesh) -> int | None:
    """Returns one mesh device's memory in bytes (host memory for a CPU), or `None` if unknown."""
    device = mesh.devices.flat[0]
    if device.platform == "cpu":
        try:
            return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        except (AttributeError, OSError, ValueError):
            return None
    return (device.memory_stats() or {}).get("bytes_limit")
