"""Writes scored files in chunks; resumes interrupted files and reuses finished ones."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, Literal, Protocol

import jax
import numpy as np

import jprm
from jprm import multihost
from jprm.checkpoints.store import fingerprint
from jprm.io.jsonl import Rejects, count, dump, read_lines, write_records
from jprm.io.outputs import Bar, continued, cut, digest, finish, input_of, stored_request
from jprm.io.storage import Growing, Place, path_of
from jprm.methods.data.agents import atif
from jprm.model.config import own_parts
from jprm.score.scale import PROBABILITY, Scale
from jprm.score.scorer import CHUNK, PRM, LongChain, Speed
from jprm.tree import ReasoningTree, RecordError, read_records, scored, tree_of


class Scorer(Protocol):
    """A scorer other than `PRM`, e.g. a judge; it may leave steps without a score.

    A method `completed(records)`, if there is one, gets the records of a finished file if one has `judge.incomplete`
    turns; it must yield them all, with those scored again.
    """

    semantics: str
    scale: Scale

    @property
    def name(self) -> str: ...

    @property
    def rule(self) -> str: ...

    @property
    def identity(self) -> dict[str, Any]:
        """The settings that the scores depend on, as a JSON object, e.g. {"judge": "mean", "samples": 4, "seed": 0}."""
        ...

    def score_many(self, records: Iterable[dict[str, Any]]) -> Iterator[dict[str, Any]]: ...

    def about(self, records: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
        """Returns `name`, `folder` and `step` for a result file, and e.g. a judge's cost of scoring these records."""
        ...


def score_file(
    prm: PRM | Scorer,
    input: str | os.PathLike,
    output: str | os.PathLike,
    *,
    on_error: Literal["stop", "skip"] = "stop",
    calibrated: bool = False,
    prepared: Sequence[dict[str, Any]] | None = None,
    speed: Speed | None = None,
) -> str:
    """Scores a JSON Lines file of chains, pools or trees; returns a one-line summary.

    Resumes and reuses `output` as `write_scores`, whose notes hold here too: every process must call this.

    Args:
      input: plain or gzip, or a prepared folder; also in a bucket.
      output: the records in order, with scores as by `PRM.score_many`; appears once it is complete. Until then it is
        `OUTPUT.part`, and `OUTPUT.info.json` keeps the request.
      on_error: `skip` copies bad lines byte for byte to `OUTPUT.rejects`, and over-long records there as JSON.
      calibrated: map scores through the map stored with the model (`jprm.methods.jobs.calibration_map`).
      prepared: the records, if `input` is only a file that identifies them, e.g. a prepared folder's report.
      speed: collects the tokens and times of this process; the summary then ends with them.

    Raises:
      RecordError: a line is bad and `on_error` is `stop`.
      ValueError: a host cannot see the input, a chain is too long (with `stop`), another request wrote the output, or
        `calibrated` is set for a scorer that is no `PRM`.
      FileNotFoundError: `input` is missing, or `calibrated` is set and the model has no map.
      FloatingPointError: a score is not finite.
      OSError: the output cannot be written.
    """
    output = path_of(output)
    if jax.process_count() > 1 and not multihost.everywhere(path_of(input).exists()):
        raise ValueError(f"{input}: is not there on every host. Put input, output and model where all hosts can read")
    total = count(input) if prepared is None else len(prepared)
    mapped, request = None, request_of(prm, input)
    if calibrated:
        from jprm.methods.jobs import calibration_map

        if not isinstance(prm, PRM):
            raise ValueError(f"{prm.name}: has no stored calibration map")
        stored = calibration_map.stored_calibration(prm)
        mapped = functools.partial(calibration_map.mapped, stored)
        request["calibration"] = stored.to_json()
    speed = speed or Speed()
    with contextlib.ExitStack() as stack:
        folder = output.parent if multihost.is_first() else path_of(stack.enter_context(tempfile.TemporaryDirectory()))
        rejects = stack.enter_context(Rejects(folder / (output.name + ".rejects")))
        lines = prepared if prepared is not None else read_records(input, on_error=on_error, rejects=rejects)
        records = iter(lines) if on_error == "stop" else _fitting(prm, lines, rejects)
        try:
            earlier = write_scores(prm, records, output, request, total, mapped, speed)
        except LongChain as error:
            place = _line_of_long(prm, input) if prepared is None else os.fspath(input)
            raise ValueError(f"{place}: {error}") from None
        for _ in records:  # unread where the output was finished; its rejects are to stay
            pass
        rejected = f", {rejects.count} rejected" if rejects.count else ""
    again = f" ({earlier} were there already)" if earlier else ""
    written = multihost.first(lambda: sum(1 for _ in read_lines(output)))
    what = "record" if written == 1 else "records"
    return f"{output}: {written} {what} scored{again}{rejected}" + (f"; {speed}" if speed.tokens else "")


def _line_of_long(prm: PRM | Scorer, path: str | os.PathLike) -> str:
    """Returns FILE:LINE of the first record that is too long for the model."""
    pairs = zip(read_lines(path), read_records(path), strict=False)
    long = (number for (number, _), record in pairs if isinstance(prm, PRM) and not prm.fits(record))
    return f"{os.fspath(path)}:{next(long, '?')}"


def _fitting(prm: PRM | Scorer, records: Iterable[dict[str, Any]], rejects: Rejects) -> Iterator[dict[str, Any]]:
    """Yields the records that fit the context; passes over-long ones to `rejects`."""
    for record in records:
        if not isinstance(prm, PRM) or prm.fits(record):
            yield record
            continue
        reason, remedy = f"is longer than the {prm.context:,} tokens that {prm.name} reads", "Shorten or drop it."
        error = RecordError(str(record.get("problem", ""))[:60], "record", reason, remedy)
        rejects.add(dump(record).encode(), error)


def score_atif(
    prm: PRM | Scorer,
    input: str | os.PathLike,
    output: str | os.PathLike,
    *,
    calibrated: bool = False,
    speed: Speed | None = None,
) -> str:
    """Scores a file of ATIF documents; writes each turn's score to `extra.jprm` of its step; returns a summary.

    The trajectories go to `OUTPUT.turns.jsonl` like any output of `score_file`, with its options, and are resumed and
    reused in the same way. The final output is built from them and keeps all other bytes of the input (gzip is
    unpacked); it replaces an existing file atomically.

    Raises RecordError if a document is not ATIF, ValueError if a chain is too long or another request wrote the turns,
    FileNotFoundError if the input or (with `calibrated`) the model's map is missing, and FloatingPointError if a score
    is not finite.
    """
    documents = atif.records_of(input)
    turns, flat = f"{output}.turns.jsonl", [record for records in documents for record in records]
    summary = score_file(prm, input, turns, calibrated=calibrated, prepared=flat, speed=speed)
    if multihost.is_first():
        lines = read_records(turns)
        about = {"scored_by": prm.name, "semantics": prm.semantics, "version": jprm.__version__}
        about |= {} if prm.scale == PROBABILITY else {"scale": dataclasses.asdict(prm.scale)}
        text = atif.scored(input, [list(islice(lines, len(records))) for records in documents], about)
        with path_of(output).alone(), path_of(output).replacing() as file:
            file.write(text.encode())
    return f"{output}: written from {summary}"


def request_of(prm: PRM | Scorer, input: str | os.PathLike, **more: Any) -> dict[str, Any]:
    """Returns a scored file's request: the entries of `identity`, `input` (path) and `sha256`, and `more`.

    For an input in a bucket, `bytes` and `modified` replace `sha256`.

    Raises FileNotFoundError if the input is missing, and ValueError for a pipe.
    """
    return {**identity(prm), **input_of(input), **more}


def stored_scale(path: str | os.PathLike) -> Scale:
    """Returns the score scale in `PATH.info.json` beside the scored file, else that of probabilities.

    Raises ValueError if a newer jprm wrote it.
    """
    return Scale(**(stored_request(path).get("scale") or {}))


def write_scores(
    prm: PRM | Scorer,
    records: Iterable[dict[str, Any]],
    output: str | os.PathLike,
    request: dict[str, Any],
    total: int | None,
    mapped: Callable[[dict[str, Any]], dict[str, Any]] | None = None,
    speed: Speed | None = None,
) -> int:
    """Writes scored records to `output`; returns the number that an earlier call had written.

    A call with the same request resumes after the last complete chunk. A finished `output` stays, except that a judge
    is asked again about turns without a score. Every process must call this: each scores its chunks, and process 0
    writes. `output` appears once it is complete; until then it is `OUTPUT.part`, and `OUTPUT.info.json` keeps the
    request, a JSON object. `total` is the number of records for the progress bar, if known; `mapped` transforms each
    scored record before it is written; `speed` counts the work of one process.

    Raises:
      ValueError: `output` belongs to another request, or another process is writing it; it stays unchanged.
      LongChain: a ValueError: a chain does not fit into the model's context.
      Exception: an error of the records or the scorer, unchanged; whole chunks stay in `OUTPUT.part`.
    """
    output = path_of(output)
    with contextlib.ExitStack() as stack:
        opened: list[Growing] = []  # in process 0, where the output is not finished

        def begin() -> tuple[bool, int]:
            part = stack.enter_context(continued(output, request))
            opened.extend([part] if part else [])
            # whole chunks: which records are packed together changes a score's last digit
            return (False, cut(part, CHUNK)) if part else (True, sum(1 for _ in read_lines(output)))

        finished, earlier = multihost.first(begin)
        if finished:
            if multihost.is_first() and not isinstance(prm, PRM):
                _complete(prm, output)
            return earlier
        lines = scored_lines(prm, islice(records, earlier, None), speed)
        if not opened:
            for _ in lines:
                pass
            return earlier
        part = opened[0]
        with Bar(f"scoring {output.name}", total, earlier) as bar:
            for number, record in enumerate(lines, start=1):
                record = record if mapped is None else mapped(record)
                part.write(dump(record).encode() + b"\n")
                if number % CHUNK == 0:
                    part.flush()
                bar.add()
        part.flush()
        finish(part, output, request)
    return earlier


def _complete(scorer: Scorer, output: Place) -> None:
    """Asks a judge again about the turns without a score in a finished output, and rewrites it.

    If it is stopped, or every critique fails, the output stays as it was.
    """
    if (ask := getattr(scorer, "completed", None)) is None:  # no judge
        return
    from jprm.methods.judge.judge import missing_of

    if any(map(missing_of, read_records(output))):
        write_records(output, ask(read_records(output)))


# ---------------------------------------------------------------------- settings that scores depend on


def identity(prm: PRM | Scorer) -> dict[str, Any]:
    """Returns the settings that a model's scores depend on, for the request of a scored file.

    A `PRM`'s are `model` (its name), `step`, `digests` (of model, config, layout, head and the user's own parts),
    `dtype` and `attention`; another scorer's are its `identity`. All processes must call this. The digests
    change if the model in the folder is replaced at the same step. `scale` is included if scores are not probabilities,
    so that the file can be evaluated without the model.
    """
    if not isinstance(prm, PRM):
        return prm.identity
    params = [prm.params] if prm.ratio is None else [prm.params, prm.ratio.params]
    ratio = prm.ratio and {name: value for name, value in vars(prm.ratio).items() if name != "params"}
    digests = {
        "model": fingerprint(params, prm.layout.tokenizer, prm.mesh),
        "config": digest(prm.config),
        "layout": digest(prm.layout),
        "head": digest([prm.readout, ratio, prm.semantics]),
    } | {f"model.{name}": digest(part) for name, part in own_parts(prm.config).items()}
    about = {"model": prm.name, "step": prm.step, "digests": digests}
    about |= {"dtype": prm.config.dtype, "attention": prm.config.attention}
    return about | ({} if prm.scale == PROBABILITY else {"scale": dataclasses.asdict(prm.scale)})


def scored_lines(
    prm: PRM | Scorer, records: Iterable[dict[str, Any]], speed: Speed | None = None
) -> Iterator[dict[str, Any]]:
    """Yields copies of the records in order, with scores as `prm.score_many` adds them.

    Every process must pass the same records; each gets all scores.

    Each process computes its chunks on its own devices, so the model must fit on the devices of one process. Chunks are
    packed as in a single process, so the scores are bit-identical. The chunks of a round are neighbours, so the written
    part is always a prefix. `speed` counts a PRM's work in a single process only. A `Scorer` must run in a
    single process (else ValueError). Works lazily.

    Raises RecordError if a record is invalid, LongChain (a ValueError) if a chain is too long, and FloatingPointError
    if a score is not finite.
    """
    if jax.process_count() == 1:
        yield from prm.score_many(records, speed) if isinstance(prm, PRM) else prm.score_many(records)
        return
    if not isinstance(prm, PRM):
        raise ValueError(f"{prm.name}: scores in one process")
    records = iter(records)
    while part := list(islice(records, CHUNK * jax.process_count())):
        trees = [tree_of(record) for record in part]
        for record, tree, outputs in zip(part, trees, _gathered(prm, trees), strict=True):
            yield scored(record, tree, outputs)


def _gathered(prm: PRM, trees: Sequence[ReasoningTree]) -> Iterator[dict[str, np.ndarray]]:
    """Yields each tree's named outputs, (N,) float32. Each process computes at most one chunk."""

    def outputs_of(chunks: Sequence[Sequence[ReasoningTree]]) -> list[list[dict[str, list[float]]]]:
        return [
            [{name: value_N.tolist() for name, value_N in outputs.items()} for outputs in prm.outputs_of(chunk)]
            for chunk in chunks
        ]

    chunks = [trees[i : i + CHUNK] for i in range(0, len(trees), CHUNK)]
    for outputs in itertools.chain.from_iterable(multihost.spread(outputs_of, chunks)):
        yield {name: np.array(value_N, np.float32) for name, value_N in outputs.items()}
