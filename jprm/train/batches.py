"""The batches of an experiment: its files' records as trees, checked against the target, packed into rows."""

from __future__ import annotations

import dataclasses
import hashlib
import pathlib
from collections.abc import Iterator, Sequence
from typing import Any, cast

import grain
import jax
import numpy as np

from jprm import data, multihost
from jprm.data import token_cache
from jprm.data.pipeline import PipelineConfig, counted_batches
from jprm.data.streams import Streams, own_streams
from jprm.data.token_cache import TokenTrees
from jprm.experiment import Experiment
from jprm.layout import Layout, native_layout
from jprm.rows import PER_TOKEN, Rows
from jprm.token_tree import REFERENCE, token_tree
from jprm.tokenizer import Tokenizer, saved_bytes
from jprm.tree import ReasoningTree, tree_of


def check_supervision(experiment: Experiment) -> None:
    """Raises ValueError where the target does not take the labels that `data.supervise` gives."""
    supervise, target = experiment.data.supervise, experiment.target
    if supervise != "step" and target.labels == "rating":
        raise ValueError(
            f"data.supervise={supervise!r} gives outcomes or tokens, not ratings: set target.labels to value or"
            " correctness, and target.neutral=none"
        )
    allowed = {"token": ("soft",), "outcome_steps": ("soft", "entropy"), "outcome_tokens": ("soft", "entropy")}
    if supervise in allowed and (target.after_error != "keep" or target.soft not in allowed[supervise]):
        gives = "token ids" if supervise == "token" else "mean outcomes, which no step is to blame for"
        raise ValueError(
            f"data.supervise={supervise!r} gives {gives}: set target.after_error=keep and target.soft=soft"
        )
    if supervise == "token" and target.smoothing:
        raise ValueError("data.supervise='token' gives token ids: set target.smoothing=0")
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


def training_batches(experiment: Experiment, mesh: jax.sharding.Mesh, tokenizer: Tokenizer) -> Streams:
    """Returns endless batches of shape (A, B, ...). This process packs the rows that its devices compute."""
    config, layout = experiment.data, native_layout(tokenizer)
    source = _source(experiment, config.train, layout)  # once for all streams, which some processes have more of
    streams = {
        k: _batches(experiment, source, layout, stream=(k, config.streams))
        for k in own_streams(mesh, config.micro_rows, config.streams)
    }
    return Streams(streams, config.streams, config.micro_rows)


def batches_of(
    experiment: Experiment, files: Sequence[str], layout: Layout, *, once: bool = False
) -> grain.IterDataset[tuple[Rows, np.ndarray]]:
    """Returns batches of `data.rows` rows: shuffled and endless, or with `once` in file order.

    Beside the rows are the counts of packing them (`jprm.data.pipeline.counted_batches`).
    """
    return _batches(experiment, _source(experiment, files, layout), layout, once=once)


def _batches(
    experiment: Experiment, source: Source, layout: Layout, *, once: bool = False, stream: tuple[int, int] = (0, 1)
) -> grain.IterDataset[tuple[Rows, np.ndarray]]:
    """Returns one stream's part of the batches."""
    config = experiment.data
    pipeline = PipelineConfig(
        rows=config.rows // stream[1], tokens=config.tokens, slots=config.slots, too_long=config.too_long,
        supervise=config.supervise, extras=config.extras, weight=config.weight,
        window=config.window, seed=config.seed, shuffle=not once,
        epochs=1 if once else None, stream=stream, chains=experiment.model.chain_rows, siblings=config.siblings,
    )  # fmt: skip
    if isinstance(source, TokenTrees):
        return counted_batches(source, None, pipeline)
    return counted_batches(source, layout, pipeline, lambda record: _checked(tree_of(record), experiment))


Source = grain.MapDataset | TokenTrees
"""Records by index, or with `data.cache` their token trees."""


def _source(experiment: Experiment, files: Sequence[str], layout: Layout) -> Source:
    """Returns the files' records or token trees. Every process calls this as often as the others."""
    sources = [grain.MapDataset.source(data.load(file)) for file in files]
    source = grain.MapDataset.concatenate(sources) if len(sources) > 1 else sources[0]
    return _token_trees(experiment, source, files, layout) if experiment.data.cache and len(source) else source


def _token_trees(experiment: Experiment, source: grain.MapDataset, files: Sequence[str], layout: Layout) -> TokenTrees:
    """Returns the source's token trees from `data.cache`, where process 0 writes them first if they are not there.

    A process that does not see that folder, because it is on another host's disk, writes its own.
    """
    config, target = experiment.data, experiment.target
    given = {"supervise": config.supervise, "extras": config.extras, "weight": config.weight}
    about = {
        "files": [token_cache.files_of(file) for file in files],
        "tokenizer": hashlib.sha256(saved_bytes(layout.tokenizer)).hexdigest(),
        **given,
        "target": [target.labels, target.consensus, target.after_error, target.soft],  # what `_checked` looks at
        "reference": pathlib.Path(experiment.reference).name if REFERENCE in config.extras else "",  # and this
    }
    records = (cast(dict[str, Any], source[i]) for i in range(len(source)))
    trees = (token_tree(_checked(tree_of(record), experiment), layout, **given) for record in records)

    def write() -> None:
        token_cache.cached(config.cache, trees, len(source), about)

    multihost.first(write)
    return token_cache.cached(config.cache, trees, len(source), about)


def _checked(tree: ReasoningTree, experiment: Experiment) -> ReasoningTree:
    """Returns the tree. Raises ValueError where the target does not fit its labels."""
    step, target = experiment.data.supervise == "step", experiment.target
    if step and tree.semantics != target.labels:
        raise ValueError(
            f"problem {tree.problem[:60]!r}: its labels are of semantics {tree.semantics!r}, but target.labels is"
            f" {target.labels!r}; set it to what the labels are"
        )
    judged = not target.consensus or all(n.label is None or target.consensus in n.extra for n in tree.nodes)
    if not judged:
        raise ValueError(
            f"problem {tree.problem[:60]!r}: a labelled step has no {target.consensus!r}, which target.consensus names"
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
    """Raises ValueError where a tree has not this reference's log-probabilities."""
    found, wanted = tree.extra.get(REFERENCE), pathlib.Path(reference).name
    whole = all(REFERENCE in node.extra for node in tree.nodes)
    if found != wanted or not whole:
        has = f"log-probabilities of {found!r}" if found and whole else "no log-probabilities of a reference"
        raise ValueError(
            f"problem {tree.problem[:60]!r}: it has {has}, and data.extras and `reference` name those of {wanted!r}:"
            " run `jprm label reference` with that model"
        )


def check_rows(rows: Rows, vocab_size: int) -> None:
    """Raises ValueError naming field, row and value of host arrays that do not index into their rows.

    On the device an index beyond its row reads NaN, or another token. Labels and weights are left to the loss.
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
    """Reshapes (A x B, ...) to (A, B, ...) on the host: A micro-batches of `size` rows."""
    return jax.tree.map(lambda x: np.asarray(x).reshape(-1, size, *x.shape[1:]), rows)


def unstacked(rows: Rows) -> Iterator[Rows]:
    """Yields the micro-batches of (A, B, ...)."""
    return (jax.tree.map(lambda x, i=i: x[i], rows) for i in range(len(rows.tokens)))
