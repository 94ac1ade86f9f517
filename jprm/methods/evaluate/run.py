"""Runs a benchmark's command: reads its files, scores each once, computes the report.

Scores are stored beside the report, in `OUT.scores/`, so that a stopped command continues and a second one scores
nothing.
"""

from __future__ import annotations

import dataclasses
import hashlib
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from jprm.io.jsonl import dump, parse
from jprm.io.outputs import check_input, digest, stamp_of
from jprm.io.storage import path_of
from jprm.loading import load
from jprm.methods.data.reader import Reader, read_items
from jprm.methods.data.readers import find
from jprm.methods.evaluate.benchmark import Benchmark, Report, Request, Scorer, TooLong
from jprm.methods.jobs import score as scored
from jprm.methods.jobs.score import identity, request_of, write_scores
from jprm.options import find_part
from jprm.score.scorer import PRM
from jprm.tree import ReasoningTree, read_trees, steps_only

PathLike = str | os.PathLike

OPTIONS: dict[str, dict[str, str]] = {
    "prm800k": {"human_written": "unlabelled", "control_questions": "drop"},
    "pools": {"empty_samples": "drop"},
    "agent_process_bench": {"missing": "unlabelled"},
    "prmbench": {"outside": "ignore", "empty": "drop", "prefix": "strip"},
}
"""How evaluations read files. PRM800K: only ratings that humans gave to a model's steps are judged. PRMBench: as in its
own evaluation, error steps beyond a chain's end are no steps, nor is the one step without text, and steps are scored
without the number before them."""


class FileReader(NamedTuple):
    """How a file is read: the reader's name, which is part of the request for scores, the reader and its options."""

    name: str
    reader: Reader
    options: Mapping[str, Any]

    @property
    def request(self) -> dict[str, Any]:
        """What the records depend on, beside the file."""
        return {"reader": self.name, **self.options, "reading": digest(self.reader)}

    def records(self, path: PathLike) -> list[dict[str, Any]]:
        """Returns a file's records."""
        return [record for _, record in self.reader.read(path, **self.options)]


def run(benchmark: Benchmark, options: Any) -> Report:
    """Returns the report of a benchmark's command."""
    if benchmark.run is not None:
        return benchmark.run(options)
    if benchmark.figures is None:
        raise ValueError(f"benchmark {benchmark.name!r} has neither `run` nor `figures`: give it one")
    request = load_and_score(benchmark, options)[1]
    return next(iter(benchmark.reports(benchmark.figures(request))))


def load_and_score(benchmark: Benchmark, options: Any) -> tuple[PRM, Request]:
    """Returns the model that the options name, and its scores of their files `data` and `calibrate`."""
    calibrate = getattr(options, "calibrate", ())
    calibrate = calibrate if isinstance(calibrate, tuple) else (calibrate,)
    files = {name: (path, source_of(benchmark, path)) for name, path in by_name([*options.data, *calibrate]).items()}
    read_all(files)
    prm = load(options.model, adapter=options.adapter)
    scores, too_long = scored_files(prm, files, f"{options.to}.scores", options.too_long)
    scores = seen_by(benchmark, scores)
    data, fitted = ({name: scores[name] for name in by_name(paths)} for paths in (options.data, calibrate))
    neutral = getattr(options, "neutral", "drop")
    return prm, Request(data, fitted, neutral, scale=prm.scale, too_long=too_long)


def read_all(files: Mapping[str, tuple[PathLike, FileReader]]) -> dict[str, list[dict[str, Any]]]:
    """Returns the records of all files: before the first is scored, so that a bad file is not found hours later."""
    return {name: source.records(path) for name, (path, source) in files.items()}


def seen_by(benchmark: Benchmark, scores: Mapping[str, Sequence[ReasoningTree]]) -> dict[str, Sequence[ReasoningTree]]:
    """Returns the scored trees as a benchmark's figures take them: of only steps where it reads no context."""
    return {name: trees if benchmark.context else list(map(steps_only, trees)) for name, trees in scores.items()}


def source_of(benchmark: Benchmark, path: PathLike) -> FileReader:
    """Returns how a benchmark reads a file."""
    if isinstance(benchmark.reader, Reader):
        return FileReader(benchmark.name, benchmark.reader, benchmark.reading)
    return source(benchmark.reader or format_of(path))


def source(reader: str) -> FileReader:
    """Returns how evaluations read files of a reader in `jprm.methods.data.readers`."""
    return FileReader(reader, find(reader), OPTIONS.get(reader, {}))


def open_scorer(path: PathLike) -> PRM | scored.Scorer:
    """Returns the model in a folder, or the judge of a JSON file."""
    if os.fspath(path).endswith(".json"):
        return find_part("jprm.methods.judge.load:load_judge", {}, "judge")(path)
    return load(path)


def scored_files(
    prm: PRM | scored.Scorer,
    files: Mapping[str, tuple[PathLike, FileReader]],
    folder: PathLike,
    too_long: TooLong = "error",
    tell: Callable[[str], None] = lambda line: None,
) -> tuple[dict[str, list[ReasoningTree]], dict[str, int]]:
    """Returns the scored trees of each file (`scored_trees`), and how many records it leaves out.

    A model leaves out records as too long, a judge those with a step of which no critique could be read.
    """
    scores, left_out = {}, {}
    for name, (path, source) in files.items():
        tell(f"scoring {path}")
        scores[name] = scored_trees(prm, path, source, folder, too_long)
        left_out[name] = len(source.records(path)) - len(scores[name])
    return scores, left_out


def scored_trees(
    prm: PRM | scored.Scorer,
    path: PathLike,
    source: FileReader,
    folder: PathLike,
    too_long: TooLong = "error",
    also: Sequence[PRM] = (),
) -> list[ReasoningTree]:
    """Returns the scored trees of a file's records, read from `FOLDER/NAME.jsonl` or scored into it.

    Chains are written as the authors' script of the file's benchmark has them. With `too_long="skip"` records with a
    chain beyond the context of the model, or of one of `also`, are left out.
    """
    output = path_of(folder) / f"{path_of(path).stem}.jsonl"
    records = source.records(path)
    if not isinstance(prm, PRM):
        write_scores(prm, records, output, request_of(prm, path, **source.request), len(records))
        return list(filter(is_scored, read_trees(output)))
    models = [as_in(source.name, model) for model in (prm, *also)]
    limit = {"too_long": "skip", "contexts": [model.context for model in models]} if too_long == "skip" else {}
    if limit:
        records = [record for record in records if all(model.fits(record) for model in models)]
    request = request_of(prm, path, **source.request, **limit)
    write_scores(models[0], records, output, request, len(records))
    return list(read_trees(output))


def is_scored(tree: ReasoningTree) -> bool:
    """Returns whether every step has a score."""
    return all(node.score is not None for node in tree.nodes if node.is_step)


def as_in(reader: str, prm: PRM) -> PRM:
    """The model with the layout of the authors' script for the benchmark of this reader."""
    return dataclasses.replace(prm, layout=getattr(prm.layout, "benchmarks", {}).get(reader, prm.layout))


def scorer(prm: PRM, folder: PathLike) -> Scorer:
    """Scores further records into `FOLDER/NAME-DIGEST.jsonl`, a file for each set of records."""
    scored_by = identity(prm)

    def score(records, name):
        text = hashlib.sha256("".join(map(dump, records)).encode()).hexdigest()
        output = path_of(folder) / f"{name}-{text[:12]}.jsonl"
        write_scores(prm, records, output, {**scored_by, name: text}, len(records))
        return list(read_trees(output))

    return score


def by_name(paths: Sequence[PathLike]) -> dict[str, PathLike]:
    """Returns the files by the names that the report and the scores beside it use.

    Raises FileNotFoundError for a missing file, before any is scored, and ValueError for two files of one name.
    """
    files: dict[str, PathLike] = {}
    for path in paths:
        check_input(path)
        place = stamp_of(path)["input"]
        other = files.setdefault(path_of(path).stem, path)
        if stamp_of(other)["input"] != place:
            raise ValueError(f"{other} and {path} are two files of one name, and so are their scores: rename one")
    return files


def format_of(path: PathLike) -> str:
    """Returns the reader of a file by the keys of its first record: a released benchmark, else jprm's own records."""
    for number, raw in read_items(path):
        item = parse(raw, f"{os.fspath(path)}:{number}")
        keys = item.keys() if isinstance(item, dict) else ()
        if {"step_labels", "final_label"} <= set(keys):
            return "agent_process_bench"
        if str(item.get("schema_version") if keys else "").startswith("ATIF"):
            return "atif"
        if {"traj", "task_id", "reward"} <= set(keys):
            return "tau_bench"
        if {"history", "mistake_step"} <= set(keys):
            return "who_and_when"
        if "modified_process" in keys:
            return "prmbench"
        if {"label", "final_answer_correct"} <= set(keys):
            return "processbench"
        return "prm800k" if "question" in keys or "ratings" in keys else "jsonl"
    raise ValueError(f"{os.fspath(path)}: holds no record")
