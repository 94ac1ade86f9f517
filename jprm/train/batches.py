"""An experiment's batches: its files' records as trees, checked against the target, packed into rows.

    records -> trees -> tokenised, shuffled anew every epoch -> windows, packed together -> rows shuffled -> batches
    token shards -> each stream's own, shuffled -> windows, and so on

The order depends only on (seed, position). Only two windows are in memory at a time. The iterator's state is a few
integers. A restored iterator gives the same batches bit for bit, also from the middle of a window.

Each process packs only its devices' rows: stream k of n packs every n-th window and fills the k-th of n equal row
blocks in every micro-batch. A batch therefore depends only on (seed, step, n), for any number of processes. With n = 1
every process packs everything.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import pathlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol, cast, runtime_checkable

import grain
import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jaxtyping import Int64

from jprm import data, multihost
from jprm.experiment import DataConfig, Experiment
from jprm.io.outputs import stamp_of
from jprm.io.storage import path_of
from jprm.model.attention import chain_rows
from jprm.model.mesh import spec
from jprm.options import find_part
from jprm.pack import PackReport, pack
from jprm.rows import PER_TOKEN, Rows, empty_rows
from jprm.token_tree import BEGIN, REFERENCE, TokenTree, token_tree
from jprm.tokenizer import Layout, Tokenizer, native_layout, saved_bytes
from jprm.tree import ReasoningTree, tree_of


def own_batches(
    experiment: Experiment, files: Sequence[str], mesh: Mesh, tokenizer: Tokenizer, *, once: bool = False
) -> Streams:
    """Returns this process's numpy rows of batches (A, B, ...), B = `micro_rows`: shuffled and endless.

    With `once` they are in file order, the last batch filled up with empty rows.

    Every process must call it; process 0 writes `data.cache` first. Raises FileNotFoundError or ValueError as
    `data.load`, ValueError for an empty file or a mix of shards and records, and as `tokens_of` and `pack`, mostly
    while iterating.
    """
    config, layout = experiment.data, native_layout(tokenizer)
    sources = _sources(experiment, files, layout)  # once for all streams, which some processes have more of
    count = max(1, config.streams)
    of_mesh = own_streams(mesh, config.micro_rows, count)
    streams = {k: _batches(experiment, sources, once=once, stream=(k, count)) for k in of_mesh}
    blank = empty_rows(config.rows // count, config.tokens, config.slots, config.extras) if once else None
    return Streams(streams, count, config.micro_rows, blank)


def _batches(
    experiment: Experiment, sources: list[Source], *, once: bool, stream: tuple[int, int]
) -> grain.IterDataset[tuple[Rows, np.ndarray]]:
    """Returns one stream's part of the batches."""
    config = experiment.data
    if once:  # every stream has a part
        config = dataclasses.replace(config, window=min(config.window, -(-sum(map(len, sources)) // stream[1])))
    pipeline = PipelineConfig(
        **vars(config), shuffle=not once, epochs=1 if once else None, stream=stream, chains=chain_rows(experiment.model)
    )
    shards = isinstance(sources[0], Endless)
    if once or not (shards or (len(sources) > 1 and config.mixture)):
        return counted_batches(_joined(sources), pipeline)
    seeded = [(dataclasses.replace(pipeline, seed=config.seed + i), source) for i, source in enumerate(sources)]
    endless = [cast(Endless, x).stream(p.seed, stream) if shards else _epoch(x, p).repeat() for p, x in seeded]
    if isinstance(config.mixture, str):
        endless = endless if shards else [x[stream[0] :: stream[1]] for x in endless]
        windows = find_part("jprm.methods.data.curriculum:Windows", {}, "curriculum")
        return _batched(windows(endless, experiment, functools.partial(_pack_window, pipeline), stream), pipeline)
    weights = config.mixture if len(config.mixture) == len(sources) else [len(source) for source in sources]
    return rows_of(_mixed(endless, weights).batch(config.window, batch_fn=list), pipeline, divided=shards)


def _joined(sources: Sequence[Any]) -> grain.MapDataset[Any]:
    whole = [grain.MapDataset.source(source) for source in sources]
    return whole[0] if len(whole) == 1 else grain.MapDataset.concatenate(whole)


def _mixed(sources: Sequence[grain.MapDataset[Any]], weights: Sequence[float]) -> grain.MapDataset[Any]:
    """Mixes endless sources in proportion to their weights; element i is a function of i."""
    if len(sources) == 1:
        return sources[0]
    return grain.MapDataset.mix(sources, weights=[weight / sum(weights) for weight in weights])


def _sources(experiment: Experiment, files: Sequence[str], layout: Layout) -> list[Source]:
    """Returns each file's token trees. Every process must call this equally often."""
    config = experiment.data
    shards = [file for file in files if data.is_shards(file)]
    if len(shards) == len(files):
        about = trees_depend_on(experiment, layout)
        shards_of = find_part(f"{STORED}:TokenShards", {}, "shards")
        return [shards_of(file, about, config.cache, config.cache_gb * 1e9) for file in files]
    if shards:
        raise ValueError(f"{shards[0]}: is shards of tokens, and other data are records: run `jprm tokenise` on all")
    loaded = {file: data.load(file) for file in files}
    if empty := [file for file, records in loaded.items() if not len(records)]:
        raise ValueError(f"{empty[0]}: holds no record. Give a file with records")
    apart = isinstance(config.mixture, str) or len(config.mixture) == len(files)
    parts = [[file] for file in files] if apart else [list(files)]
    tokenise_tree = functools.partial(tokens_of, experiment=experiment, layout=layout)
    sources = [_joined([loaded[file] for file in part]).map(tokenise_tree) for part in parts]
    if not config.cache:
        return list(sources)
    return [_cached(experiment, source, part, layout) for source, part in zip(sources, parts, strict=True)]


def _cached(
    experiment: Experiment, source: grain.MapDataset[Any], files: Sequence[str], layout: Layout
) -> Sequence[TokenTree]:
    """Returns the source's token trees from `data.cache`; process 0 first writes them if they are missing.

    A process that cannot see the folder, e.g. on another host's disk, writes its own.
    """
    config = experiment.data
    files_of = [[stamp_of(part) for part in path_of(file).files()] for file in files]
    about = {"files": files_of, **trees_depend_on(experiment, layout)}
    cached_trees = find_part(f"{STORED}:cached_trees", {}, "cached")
    trees = (source[i] for i in range(len(source)))

    def write() -> None:
        cached_trees(config.cache, trees, len(source), about)

    multihost.first(write)
    return cached_trees(config.cache, trees, len(source), about)


def tokens_of(record: Mapping[str, Any], experiment: Experiment, layout: Layout) -> TokenTree:
    """Returns a record's token tree. Raises ValueError as `tree_of` and `token_tree`, or if the target does not fit its
    labels."""
    config = experiment.data
    return token_tree(_checked(tree_of(record), experiment), layout, config.supervise, config.extras, config.weight)


def trees_depend_on(experiment: Experiment, layout: Layout) -> dict[str, Any]:
    """Returns the settings that an experiment's token trees depend on, apart from their records, as JSON.

    Keys: `tokenizer` (SHA-256 of its files), `supervise`, `extras`, `weight`, `target` (a list), `reference` (a name).
    """
    config, target = experiment.data, experiment.target
    return {
        "tokenizer": hashlib.sha256(saved_bytes(layout.tokenizer)).hexdigest(),
        "supervise": config.supervise, "extras": list(config.extras), "weight": config.weight,
        "target": [target.labels, target.consensus, target.after_error, target.soft],  # what `_checked` looks at
        "reference": pathlib.Path(experiment.reference).name if REFERENCE in config.extras else "",  # and this
    }  # fmt: skip


# --------------------------------------------------------------------------------------------------- labels and targets


def check_supervision(experiment: Experiment) -> None:
    """Raises ValueError if `data.supervise`, `data.extras`, the target and the model's steps do not fit together."""
    supervise, target = experiment.data.supervise, experiment.target
    if supervise != "step" and target.labels == "rating":
        raise ValueError(
            f"data.supervise={supervise!r} gives outcomes or tokens, not ratings: set target.labels to value or"
            " correctness, and target.neutral=none"
        )
    allowed = {"token": ("soft",), "outcome_steps": ("soft", "entropy"), "outcome_tokens": ("soft", "entropy")}
    if supervise in allowed and (target.after_error != "keep" or target.soft not in allowed[supervise]):
        gives = "token ids" if supervise == "token" else "mean outcomes, which no step is to blame for"
        raise ValueError(f"data.supervise={supervise!r} gives {gives}: set target.after_error=keep, target.soft=soft")
    if supervise == "token" and (target.smoothing or experiment.data.weight):
        raise ValueError("data.supervise='token' gives token ids: set target.smoothing=0, and no data.weight")
    if experiment.model.steps and supervise in ("token", "outcome_tokens"):
        raise ValueError(
            f"data.supervise={supervise!r} puts labels at tokens, and model.steps={experiment.model.steps!r} reads the"
            " ends of steps: use another, such as outcome_steps"
        )
    if REFERENCE in experiment.data.extras and not experiment.reference:
        raise ValueError("data.extras has a reference's log-probabilities: name that model in `reference`")
    if target.consensus and (supervise != "step" or target.consensus not in experiment.data.extras):
        raise ValueError(
            f"target.consensus={target.consensus!r} compares the labels of steps with an extra: set"
            " data.supervise=step and name it in data.extras"
        )


def _checked(tree: ReasoningTree, experiment: Experiment) -> ReasoningTree:
    """Returns the tree. Raises ValueError if the target does not fit its labels."""
    step, target = experiment.data.supervise == "step", experiment.target
    if step and tree.semantics != target.labels:
        raise ValueError(
            f"problem {tree.problem[:60]!r}: its labels are of semantics {tree.semantics!r}, but target.labels is"
            f" {target.labels!r}; make them equal"
        )
    judged = not target.consensus or all(n.label is None or target.consensus in n.extra for n in tree.nodes)
    if not judged:
        raise ValueError(
            f"problem {tree.problem[:60]!r}: a labelled step has no {target.consensus!r}, which target.consensus names"
        )
    of_turns = tree.of_messages and bool(experiment.reference) and experiment.data.supervise == "outcome"
    if of_turns and (BEGIN not in experiment.data.extras or REFERENCE in experiment.data.extras):
        raise ValueError(
            f"problem {tree.problem[:60]!r}: is a trajectory, of which a log ratio sums only the agent's tokens: set"
            f' data.extras=["{BEGIN}"], which says where its turns begin'
        )
    if REFERENCE in experiment.data.extras:
        _check_reference(tree, experiment.reference)
    # A value of 0 is a count: no completion was correct. A probability of being correct is hardly ever 0.
    zero_alone = step and target.labels == "correctness" and (target.after_error, target.soft) != ("keep", "soft")
    if zero_alone and any(node.label is not None and 0 < node.label < 1 for node in tree.nodes):
        raise ValueError(
            f"problem {tree.problem[:60]!r}: its labels are probabilities between 0 and 1, but target.after_error=mask"
            " and target.soft=hard take only 0 as incorrect: set keep and soft, or make the labels 0 and 1"
        )
    return tree


def _check_reference(tree: ReasoningTree, reference: str) -> None:
    """Raises ValueError if the tree lacks this reference's log-probabilities."""
    recorded, wanted = tree.extra.get(REFERENCE), pathlib.Path(reference).name
    whole = all(REFERENCE in node.extra for node in tree.nodes)
    if recorded != wanted or not whole:
        has = f"log-probabilities of {recorded!r}" if recorded and whole else "no log-probabilities of a reference"
        raise ValueError(
            f"problem {tree.problem[:60]!r}: it has {has}, and data.extras and `reference` name those of {wanted!r}:"
            " run `jprm label reference` with that model"
        )


# -------------------------------------------------------------------------------------------------------- trees to rows


@dataclasses.dataclass(frozen=True)
class PipelineConfig(DataConfig):
    """One data stream's packing."""

    shuffle: bool = True  # trees within an epoch, and the rows of a window
    epochs: int | None = None  # None repeats for ever
    stream: tuple[int, int] = (0, 1)  # (k, n): the k-th of n streams, which packs every n-th window
    chains: bool = False  # a row holds one chain; see `jprm.pack.pack`


COUNTS = tuple(field.name for field in dataclasses.fields(PackReport))
"""Names for the counts from `counted_batches`, in order."""


def counted_batches(trees: Source, config: PipelineConfig) -> grain.IterDataset[tuple[Rows, Int64[np.ndarray, "B K"]]]:
    """Returns batches (rows, count_BK) with packing counts in order of `COUNTS`; a window's are at its first row.

    With n streams a batch has exactly `rows` / n rows of numpy arrays. No row is dropped: rows left over when an epoch
    ends begin the next epoch's first batch. Empty rows with weight 0 complete the very last batch.

    trees: random access (`len` and `[i]`) to token trees, which may be made lazily.

    Raises ValueError if there is no tree; while iterating, raises like `pack`.
    """
    return rows_of(_epoch(trees, config).batch(config.window, batch_fn=list).repeat(config.epochs), config)


def _epoch(trees: Source, config: PipelineConfig) -> grain.MapDataset[Any]:
    """Returns one epoch's token trees, reshuffled in each."""
    if len(trees) == 0:
        raise ValueError("the data source is empty. Give at least one tree")
    source: grain.MapDataset[Any] = grain.MapDataset.source(trees).seed(config.seed)
    return source.shuffle() if config.shuffle else source


def rows_of(
    windows: grain.MapDataset[Any], config: PipelineConfig, *, divided: bool = False
) -> grain.IterDataset[tuple[Rows, Int64[np.ndarray, "B K"]]]:
    """Packs windows (lists of token trees) into batches as `counted_batches`, one window ahead in a thread.

    `divided` windows are all this stream's, else it takes every n-th. Raises like `pack` while iterating.
    """
    first, count = config.stream
    windows = windows if divided or count == 1 else windows[first::count]
    packed = windows.map_with_index(lambda i, trees: _pack_window(config, first + count * i, trees))
    # One thread packs one window ahead, so that the accelerator does not wait for the host between windows.
    return _batched(packed.to_iter_dataset(grain.ReadOptions(num_threads=1, prefetch_buffer_size=1)), config)


def _batched(packed: grain.IterDataset[Any], config: PipelineConfig) -> grain.IterDataset[Any]:
    """Cuts packed windows into this stream's batches."""
    rows = config.rows // config.stream[1]
    return grain.experimental.RebatchIterDataset(packed, rows).map(functools.partial(_fill_up, rows))


def _pack_window(config: PipelineConfig, index: int, trees: list[TokenTree]) -> tuple[Rows, np.ndarray]:
    c = config
    packed = pack(trees, c.tokens, c.slots, too_long=c.too_long, chains=c.chains, siblings=c.siblings)
    rows = packed.rows
    if len(rows.tokens) == 0:  # no tree of the window has a step; an empty row keeps the stream going
        rows = empty_rows(1, c.tokens, c.slots, tuple(rows.extras))
    count = len(rows.tokens)
    order_B = np.random.default_rng([c.seed, index]).permutation(count) if c.shuffle else np.arange(count)
    count_BK = np.zeros((count, len(COUNTS)), np.int64)
    count_BK[0] = dataclasses.astuple(packed.report)
    return jax.tree.map(lambda x_BX: x_BX[order_B], rows), count_BK


def _fill_up(count: int, batch: tuple[Rows, np.ndarray]) -> tuple[Rows, np.ndarray]:
    rows, count_BK = batch
    missing = count - len(rows.tokens)
    if missing == 0:
        return batch
    empty = empty_rows(missing, rows.tokens.shape[1], rows.step_end.shape[1], tuple(rows.extras))
    none_BK = np.zeros((count - len(count_BK), len(COUNTS)), np.int64)
    return jax.tree.map(lambda *pair: np.concatenate(pair), batch, (empty, none_BK))


# ---------------------------------------------------------------------------------------------------- a process's share


class Streams:
    """Iterates over Rows shaped (A, B, ...), A micro-batches of B rows, from `streams` of `count`.

    A stream gives A x B / count rows at a time, with packing counts (`counted_batches`). Rows from other processes'
    streams are zeros. A stream that has ended gives `blank` rows until the streams in all processes have; without
    `blank` streams must be endless.
    """

    def __init__(
        self, streams: Mapping[int, grain.IterDataset], count: int, micro_rows: int, blank: Rows | None = None
    ):
        self._count, self._micro_rows, self._blank = count, micro_rows, blank
        self._streams = {k: iter(stream) for k, stream in streams.items()}
        self._counts = {k: np.zeros(len(COUNTS), np.int64) for k in streams}

    def __iter__(self) -> Streams:
        return self

    def __next__(self) -> Rows:
        block = self._micro_rows // self._count
        parts, ended = {}, () if self._blank is None else ((self._blank, np.zeros((1, len(COUNTS)), np.int64)),)
        for k, stream in self._streams.items():
            parts[k], count_rK = next(stream, *ended)
            self._counts[k] = self._counts[k] + count_rK.sum(axis=0)
        if ended and multihost.everywhere(all(part is self._blank for part in parts.values())):
            raise StopIteration

        def put(*parts_rX: np.ndarray) -> np.ndarray:
            first = np.asarray(parts_rX[0])
            all_ABX = np.zeros((len(first) // block, self._micro_rows, *first.shape[1:]), first.dtype)
            for k, part_rX in zip(parts, parts_rX, strict=True):
                all_ABX[:, k * block : (k + 1) * block] = np.reshape(part_rX, (-1, block, *first.shape[1:]))
            return all_ABX

        return jax.tree.map(put, *parts.values())

    @property
    def report(self) -> PackReport:
        """All streams' packing counts since training began. Every process must call this, and waits for the others."""
        counts = self._shared({k: count_K.tolist() for k, count_K in self._counts.items()})
        return sum((PackReport(*count_K) for count_K in counts), start=PackReport())

    def get_state(self) -> dict[str, Any]:
        """Returns `{"streams", "counts"}` as JSON, a list each by stream number: positions and packing counts.

        It fits any number of processes. Every process must call this, and waits for the others.
        """
        places = self._shared({k: stream.get_state() for k, stream in self._streams.items()})
        return {"streams": places, "counts": self._shared({k: count.tolist() for k, count in self._counts.items()})}

    def set_state(self, state: dict[str, Any]) -> None:
        """Restores a `state` of `get_state` from as many streams, in place. (Version 0.1 recorded no counts.)"""
        for k, stream in self._streams.items():
            stream.set_state(state["streams"][k])
            if "counts" in state:
                self._counts[k] = np.array(state["counts"][k])

    def _shared(self, of_stream: dict[int, Any]) -> list[Any]:
        """Gathers a value per stream from all processes; two that own one stream have equal values."""
        of_all = {int(k): value for part in multihost.shared(of_stream) for k, value in part.items()}
        return [of_all[k] for k in range(self._count)]


def own_streams(mesh: Mesh, micro_rows: int, count: int) -> list[int]:
    """Returns the streams in ascending order, from 0 of `count`, with rows of a micro-batch on this process's devices.

    `micro_rows` must be a multiple of `count`.
    """
    place, block = NamedSharding(mesh, spec("batch")), micro_rows // count
    owned: set[int] = set()
    for (rows,) in filter(None, place.addressable_devices_indices_map((micro_rows,)).values()):
        first, stop, _ = rows.indices(micro_rows)
        owned |= set(range(first // block, (stop - 1) // block + 1))
    return sorted(owned)


# --------------------------------------------------------------------------------------------------- rows of one update


def check_rows(rows: Rows, vocab_size: int) -> None:
    """Raises ValueError, naming field, row and value, if a host array has another shape or an index outside its row.

    On the device such an index would read NaN, or another token. Labels and weights are left to the loss.
    """
    lead, T, S = rows.tokens.shape[:-1], rows.tokens.shape[-1], rows.step_end.shape[-1]
    fields = {field.name: getattr(rows, field.name) for field in dataclasses.fields(rows)} | rows.extras
    for name, x in fields.items():
        shape = (*lead, T if name in PER_TOKEN else S)
        if name != "extras" and np.shape(x) != shape:
            raise ValueError(f"rows.{name} is of shape {np.shape(x)}, and rows.tokens and step_end make it {shape}")
    for name, least, most in (
        ("tokens", 0, vocab_size - 1), ("position", 0, T - 1), ("until", np.arange(1, T + 1), T),
        ("step_end", 0, T - 1), ("parent", -1, S - 1),
    ):  # fmt: skip
        x = np.asarray(fields[name])
        if x.dtype.kind not in "iu":
            raise ValueError(f"rows.{name} is of type {x.dtype}, and not of integers")
        bad = (x < least) | (x > most)
        if name == "until":
            bad &= x.any(axis=-1, keepdims=True)  # rows that another process packs are zeros here
        if bad.any():
            at = tuple(map(int, np.argwhere(bad)[0]))
            raise ValueError(
                f"rows.{name}{list(at)} is {x[at]}, and must be from {np.broadcast_to(least, x.shape)[at]} to {most}"
            )


def micro_batches(rows: Rows, size: int) -> Rows:
    """Reshapes (A x B, ...) to (A, B, ...) on the host, B = `size`. Raises ValueError if B does not divide the rows."""
    return jax.tree.map(lambda x: np.asarray(x).reshape(-1, size, *x.shape[1:]), rows)


def unstacked(rows: Rows) -> Iterator[Rows]:
    """Yields the micro-batches from (A, B, ...)."""
    return (jax.tree.map(lambda x, i=i: x[i], rows) for i in range(len(rows.tokens)))


STORED = "jprm.methods.data.stored_trees"
"""Token trees on disk (a cache and shards), imported on first use."""


@runtime_checkable
class Endless(Protocol):
    """Token trees in their own order, e.g. from shards."""

    def stream(self, seed: int, stream: tuple[int, int]) -> grain.MapDataset[TokenTree]:
        """Returns the endless trees of `stream` (k, n), the k-th of n streams from 0, shuffled by `seed`."""
        ...


Source = grain.MapDataset | Sequence[TokenTree]
"""Token trees by index, tokenised lazily from records, or read from `data.cache` or shards."""
