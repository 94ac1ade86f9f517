"""Runs a benchmark's command: reads its files, scores each once, and computes the report.

Scores are stored beside the report, in `OUT.scores/`, so that an interrupted command resumes and a repeated one reuses
them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from jprm.data import is_shards
from jprm.experiment import RUN, read
from jprm.io.jsonl import dump, parse
from jprm.io.outputs import check_input, digest, stamp_of
from jprm.io.storage import is_remote, path_of
from jprm.loading import load
from jprm.methods.data.overlap import normalise, problems_of
from jprm.methods.data.reader import Reader, read_items
from jprm.methods.data.readers import find
from jprm.methods.evaluate.benchmark import Benchmark, Report, Request, Scorer, TooLong
from jprm.methods.evaluate.scored import ScoreError
from jprm.methods.jobs import score as scored
from jprm.methods.jobs.score import identity, request_of, write_scores
from jprm.methods.judge import is_judge
from jprm.methods.judge.critiques import KEY as CRITIQUES
from jprm.options import find_part
from jprm.score.scorer import PRM
from jprm.tree import ReasoningTree, read_trees, steps_only, tree_of

PathLike = str | os.PathLike

OPTIONS: dict[str, dict[str, str]] = {
    "prm800k": {"human_written": "unlabelled", "control_questions": "drop"},
    "pools": {"empty_samples": "drop"},
    "agent_process_bench": {"missing": "unlabelled"},
    "prmbench": {"outside": "ignore", "empty": "drop", "prefix": "strip"},
}
"""Reader options for evaluations.

PRM800K: only human ratings of model steps count. PRMBench, as in its own evaluation: error steps beyond a chain's end
and the one step without text are ignored, and steps are scored without their number.
"""


class FileReader(NamedTuple):
    """A reader, its options, and its name, which is part of the request for scores."""

    name: str
    reader: Reader
    options: Mapping[str, Any]

    @property
    def request(self) -> dict[str, Any]:
        """The settings that the records depend on, besides the file: `reader` (its name), its options, and `reading`, a
        digest of its code.
        """
        return {"reader": self.name, **self.options, "reading": digest(self.reader)}

    def records(self, path: PathLike) -> list[dict[str, Any]]:
        if records := [record for _, record in self.reader.read(path, **self.options)]:
            return records
        raise ValueError(f"{os.fspath(path)}: holds no record. Was the command that wrote it stopped?")


def run(benchmark: Benchmark, options: Any) -> Report:
    """Returns the report of a benchmark's command, with `trained_on` if the model was trained on some of the problems.

    `options` is an instance of `benchmark.options`; scores are kept beside `options.to`, which must be set. Writes no
    report. Raises ValueError if `by` names an output without a model, and the errors of the benchmark and of loading.
    """
    if getattr(options, "by", None) and options.model is None:
        raise ValueError(f"--by {options.by}: names an output of a model. Give --model")
    if benchmark.run is not None:
        report = benchmark.run(options)
    elif benchmark.figures is None:
        raise ValueError(f"benchmark {benchmark.name!r} has neither `run` nor `figures`: give it one")
    else:
        request = load_and_score(benchmark, options)[1]
        report = next(iter(benchmark.reports(benchmark.figures(request))))
    paths = [path for name in ("data", "chains", "pools", "input") for path in _listed(getattr(options, name, ()))]
    seen = trained_on(getattr(options, "model", None), paths)
    return report | {TRAINED_ON: seen} if seen else report


def _listed(paths: Any) -> tuple[PathLike, ...]:
    return paths if isinstance(paths, tuple) else (paths,)


# ------------------------------------------------------------- files that hold their scores, of some steps perhaps none

UNREAD = "unread"
"""Report key: the places (`FILE:LINE`) of records left out because a step has no score."""


def stored_trees(
    trees: Iterable[tuple[str, ReasoningTree]], on_error: str, unread: list[str]
) -> Iterator[ReasoningTree]:
    """Yields the trees with a score for every step; appends the places of others to `unread`.

    `trees` has (place, tree), e.g. place `scores.jsonl:12`; `on_error` is `stop` or `skip`. A tree may be left out if
    one of its critiques was unreadable, or if `on_error` is `skip`.

    Raises ScoreError, with the place, for any other tree with an unscored step.
    """
    for place, tree in trees:
        if is_scored(tree):
            yield tree
        elif CRITIQUES in tree.extra or on_error == "skip":
            unread.append(place)
        else:
            step = [node.score is None for node in tree.nodes if node.is_step].index(True)
            fix = "Score the file again with `jprm score`, or leave such records out by --on-error skip."
            raise ScoreError(f"{place}: step {step}: no score. {fix}")


def unread_words(report: Mapping[str, Any]) -> list[str]:
    """Returns a line with the number of records left out and the first five places of the list `unread`, or []."""
    places = report.get(UNREAD, ())
    named = ", ".join(places[:SHOWN]) + (", ..." if len(places) > SHOWN else "")
    return [f"{len(places)} left out, with a step without a score (an unreadable critique): {named}"] if places else []


SHOWN = 5


# ------------------------------------------------------------------ problems that the evaluated run was trained on

TRAINED_ON = "trained_on"
"""Report key: `{"problems", "seen"}` for each file that shares problems with the run's own data.train."""


def trained_on(model: PathLike | None, paths: Sequence[PathLike]) -> dict[str, dict[str, int]]:
    """Counts each file's problems, and those also in the training data of the run `model`; omits files without any.

    Returns `{file name without suffix: {"problems", "seen"}}`, of distinct problems. Compares normalised text. If
    training data is gone, in a bucket, or stored as tokens, it only counts if the evaluated file is one of its files.
    Returns {} unless `model` is the folder of a run on this machine.
    """
    if model is None or is_remote(model) or not (path_of(model) / RUN).is_file():
        return {}
    wanted = {path_of(path).stem: set(map(normalise, problems_at(path))) for path in paths}
    known = {problem for problems in wanted.values() for problem in problems}
    seen: set[str] = set()
    addresses: set[str] = set()
    for name in read(path_of(model) / RUN).data.train:
        with contextlib.suppress(ValueError, OSError):  # the run may come from anyone, and name any path
            file = path_of(name)
            addresses.add(file.address)
            if file.here is True and file.exists() and not is_shards(file):
                seen |= known & set(map(normalise, problems_at(file)))
    counts = {}
    for path in paths:
        problems = wanted[path_of(path).stem]
        count = len(problems if path_of(path).address in addresses else problems & seen)
        if count:
            counts[path_of(path).stem] = {"problems": len(problems), "seen": count}
    return counts


def problems_at(path: PathLike) -> Iterator[str]:
    """Yields the problems in a file of any known format, repeated ones too; skips items that are not JSON.

    Raises FileNotFoundError if the file is missing.
    """
    for _, line in read_items(path):
        with contextlib.suppress(ValueError, RecursionError):
            yield from problems_of(json.loads(line))


def trained_on_words(report: Mapping[str, Any]) -> list[str]:
    """Returns a warning for each file with problems that the run was trained on (report key `trained_on`), or []."""
    return [
        f"{name}: {count['seen']:,} of {count['problems']:,} problems are in data.train of this run: its figures do not"
        " show how it does on new problems"
        for name, count in report.get(TRAINED_ON, {}).items()
    ]


def model_of(options: Any) -> PRM:
    """Loads `options.model` with `options.adapter`; its score becomes the output `options.by` (`None`: `score`).

    Raises ValueError if the model lacks that output.
    """
    prm = load(options.model, adapter=options.adapter)
    try:
        return prm.by(options.by or "score")
    except ValueError as error:
        raise ValueError(f"--by {error}") from error


def load_and_score(benchmark: Benchmark, options: Any) -> tuple[PRM, Request]:
    """Loads the model named by the options, and scores the files `data` and `calibrate` into `OUT.scores/`.

    Returns the model and the request for the figures. `options` is a `ModelOptions` with `data`, and optionally
    `calibrate` and `neutral`; OUT is `options.to`, which must be set. Before the model is loaded, raises
    FileNotFoundError if a file is missing, ScoreError if ratings are neutral and `neutral` is `None`, and ValueError if
    two files share a name or one has no record.
    """
    calibrate = getattr(options, "calibrate", ())
    calibrate = calibrate if isinstance(calibrate, tuple) else (calibrate,)
    files = {name: (path, source_of(benchmark, path)) for name, path in by_name([*options.data, *calibrate]).items()}
    neutral = getattr(options, "neutral", "drop")
    check_neutral(neutral, read_all(files))
    prm = model_of(options)
    scores, too_long = scored_files(prm, files, f"{options.to}.scores", options.too_long)
    scores = seen_by(benchmark, scores)
    data, fitted = ({name: scores[name] for name in by_name(paths)} for paths in (options.data, calibrate))
    return prm, Request(data, fitted, neutral, scale=prm.scale, too_long=too_long)


def read_all(files: Mapping[str, tuple[PathLike, FileReader]]) -> dict[str, list[dict[str, Any]]]:
    """Returns each file's records by name, to find bad files before any is scored.

    Raises ValueError if one has no record, RecordError if one is malformed, FileNotFoundError if a file is missing.
    """
    return {name: source.records(path) for name, (path, source) in files.items()}


def check_neutral(neutral: str | None, records: Mapping[str, Sequence[Mapping[str, Any]]]) -> None:
    """Raises ScoreError if `neutral` is `None` and a record has a neutral rating, i.e. a `rating` label of 0."""
    if neutral is None:
        for name, items in records.items():
            for i, tree in enumerate(map(tree_of, items), start=1):
                if tree.semantics == "rating" and any(node.label == 0 for node in tree.nodes):
                    raise ScoreError(
                        f"{name}, record {i}: has a neutral rating. Choose how it counts: --neutral"
                        " positive|negative|drop (`neutral` in a suite)"
                    )


def seen_by(benchmark: Benchmark, scores: Mapping[str, Sequence[ReasoningTree]]) -> dict[str, Sequence[ReasoningTree]]:
    """Returns the trees by file, without context messages unless `benchmark.context`."""
    return {name: trees if benchmark.context else list(map(steps_only, trees)) for name, trees in scores.items()}


def source_of(benchmark: Benchmark, path: PathLike) -> FileReader:
    """Returns the benchmark's reader, or the one that `format_of` detects if it has none."""
    if isinstance(benchmark.reader, Reader):
        return FileReader(benchmark.name, benchmark.reader, benchmark.reading)
    return source(benchmark.reader or format_of(path))


def source(reader: str) -> FileReader:
    """Returns a reader of `jprm.methods.data.readers` with its options for evaluations (`OPTIONS`).

    Raises ValueError if there is no reader of that name.
    """
    return FileReader(reader, find(reader), OPTIONS.get(reader, {}))


def open_scorer(path: PathLike) -> PRM | scored.Scorer:
    """Loads the model in a folder, or the judge in a JSON file (a name that ends in `.json`).

    Raises FileNotFoundError if `path` is missing, and the errors of `jprm.load` or `load_judge`.
    """
    if is_judge(path):
        return find_part("jprm.methods.judge.load:load_judge", {}, "judge")(path)
    return load(path)


def scored_files(
    prm: PRM | scored.Scorer,
    files: Mapping[str, tuple[PathLike, FileReader]],
    folder: PathLike,
    too_long: TooLong = "error",
    tell: Callable[[str], None] = lambda line: None,
) -> tuple[dict[str, list[ReasoningTree]], dict[str, int]]:
    """Returns each file's scored trees, and the number of records left out, both by name.

    A model leaves out over-long records if `too_long` is "skip" (else raises LongChain, a ValueError), a judge records
    with an unreadable critique. Calls `tell` with a line before each file. Files and other errors: see `scored_trees`.
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
    """Returns the scored trees of a file, read from `FOLDER/NAME.jsonl` or scored into it.

    NAME is that of `path`, without suffix. Chains are laid out as in the authors' script for the benchmark. A judge's
    records with an unreadable critique are left out. With `too_long="skip"`, records with a chain beyond the context of
    the model, or of any model in `also`, are left out. A second call resumes, or reads the finished file. Raises
    ValueError if `path` has no record, or the output belongs to another request or is being written, RecordError if a
    record is malformed, FileNotFoundError if `path` is missing, and other errors of `write_scores`.
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
    """Whether every step has a score; messages need none."""
    return all(node.score is not None for node in tree.nodes if node.is_step)


def as_in(reader: str, prm: PRM) -> PRM:
    """Returns the model with the layout of the authors' script for this reader's benchmark; unchanged without one."""
    return dataclasses.replace(prm, layout=getattr(prm.layout, "benchmarks", {}).get(reader, prm.layout))


def scorer(prm: PRM, folder: PathLike) -> Scorer:
    """Returns `score(records, name)`, which scores records into `FOLDER/NAME-DIGEST.jsonl` and returns their trees.

    DIGEST is of the records, so another set of records has another file. A finished file is read, not scored again.
    """
    scored_by = identity(prm)

    def score(records, name):
        text = hashlib.sha256("".join(map(dump, records)).encode()).hexdigest()
        output = path_of(folder) / f"{name}-{text[:12]}.jsonl"
        write_scores(prm, records, output, {**scored_by, name: text}, len(records))
        return list(read_trees(output))

    return score


def by_name(paths: Sequence[PathLike]) -> dict[str, PathLike]:
    """Returns the files by their name without suffix (e.g. `math`), which the report and the scores have.

    Raises FileNotFoundError if a file is missing (before any is scored), and ValueError if two files share a name.
    A file given twice counts once.
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
    """Returns the name of a file's reader (e.g. `processbench`) by the keys in its first record, by default `jsonl`.

    Raises ValueError if the file is empty or its first record is not JSON, FileNotFoundError if it is missing.
    """
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
