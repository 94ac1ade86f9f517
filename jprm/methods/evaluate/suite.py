"""Suites: all benchmarks named in one file, scored once and written as one `results.json`.

    {"neutral": "positive",
     "processbench": {"data": ["gsm8k.json", "math.json", "olympiadbench.json"], "calibrate": "gsm8k.json"},
     "prmbench":     {"data": ["circular.jsonl", "redundency.jsonl"]},
     "steps":        {"data": ["phase1_test.jsonl"]},
     "best_of_n":    {"data": ["pool.jsonl"]},
     "calibration":  {"data": ["math.json"], "calibrate": ["gsm8k.json"]}}

A section may be your own benchmark, with the key `"module:NAME"` or `"FILE.py:NAME"`; its results are stored under its
name.

Every section is optional. Paths are relative to the suite's file. A missing file of `data` is skipped and listed under
`absent`, so that one suite works on machines with only some of the splits. It is an error if a section has no file at
all, or a file of `calibrate` is missing. `"too_long": "skip"` leaves out and counts records with a chain beyond the
model's context.

The output folder has `results.json`, and `scores/NAME.jsonl` for each file. An interrupted run resumes from the scores,
and `jprm report` shows them chain by chain.
"""

from __future__ import annotations

import dataclasses
import itertools
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, get_args

import jprm
from jprm.experiment import run_id
from jprm.io.jsonl import DAMAGED, parse
from jprm.io.outputs import check_output, write_json
from jprm.io.storage import Place, mark_own, named_in, path_of
from jprm.methods.evaluate.benchmark import Benchmark, Report, Request, Scorer, Scores, TooLong
from jprm.methods.evaluate.benchmarks import find, registered
from jprm.methods.evaluate.blocks import Results, Table
from jprm.methods.evaluate.findings import findings_of, lead
from jprm.methods.evaluate.run import (
    TRAINED_ON,
    FileReader,
    by_name,
    check_neutral,
    is_scored,
    open_scorer,
    read_all,
    scored_files,
    scorer,
    seen_by,
    source_of,
    trained_on,
    trained_on_words,
)
from jprm.methods.evaluate.scored import NothingToMeasure
from jprm.methods.evaluate.steps import NEUTRAL
from jprm.methods.jobs import score as scored
from jprm.score.scale import PROBABILITY, Scale
from jprm.score.scorer import PRM
from jprm.tree import ReasoningTree, RecordError, read_records, read_trees

PathLike = str | os.PathLike

RESERVED = frozenset(
    "jprm neutral seed sections data meaning absent too_long unread trained_on model others not_computed".split()
)
"""Keys of `results.json` that are not benchmarks."""


@dataclasses.dataclass(frozen=True)
class Suite:
    """The content of a suite's file, with resolved paths.

    Attributes:
      neutral: the class of neutral ratings; if `None`, there must be no such rating.
      data: the files of each section that exist.
      calibrate: the files of each section for fitting thresholds and maps.
      absent: the missing files of `data`.
      too_long: `skip` leaves out and counts records with a chain beyond the model's context; `error` raises.
      others: the user's own sections, as {section: `module:NAME`}.
      benchmarks: the benchmarks of all sections.
    """

    neutral: str | None
    data: Mapping[str, tuple[Place, ...]]
    calibrate: Mapping[str, tuple[Place, ...]]
    absent: tuple[str, ...]
    seed: int = 0
    too_long: TooLong = "error"
    others: Mapping[str, str] = dataclasses.field(default_factory=dict)
    benchmarks: Mapping[str, Benchmark] = dataclasses.field(default_factory=registered)


def read_suite(path: PathLike) -> Suite:
    """Reads a suite's file, e.g. `{"neutral": "drop", "steps": {"data": ["math.jsonl"]}}`.

    A section is a benchmark's name, `module:NAME` or `FILE.py:NAME`, with `data` and, where the benchmark needs it,
    `calibrate`: a file or a list of files. Other keys are `neutral` (positive, negative, drop or null), `seed` (0 by
    default) and `too_long` (`error` by default, or `skip`).

    Raises the errors of `suite_of`, FileNotFoundError if the file is missing, and ValueError if it is not JSON.
    """
    path = path_of(path)
    return suite_of(parse(path.read_bytes(), os.fspath(path)), path)


def standard_suite(folder: PathLike) -> Suite:
    """Returns the suite of all published benchmarks found in a folder; missing files are `absent`.

    Names are as in `Benchmark.standard`, e.g. `processbench/math.json`. Neutral ratings count as positive; thresholds
    are tuned on the first file found. Raises FileNotFoundError if all files are missing.
    """
    folder = path_of(folder)
    sections: dict[str, Any] = {}
    names = [name for benchmark in registered().values() for name in benchmark.standard]
    present = {name for name in names if (folder / name).is_file()}
    for section, benchmark in registered().items():
        if data := [name for name in benchmark.standard if name in present]:
            sections[section] = {"data": data} | ({"calibrate": data[0]} if "calibrate" in benchmark.needs else {})
    if not sections:
        raise FileNotFoundError(f"{folder}: has none of the standard suite's files, such as {names[0]}")
    absent = tuple(os.fspath(folder / name) for name in names if name not in present)
    return dataclasses.replace(suite_of({"neutral": "positive", **sections}, folder / "standard"), absent=absent)


def suite_of(suite: Any, path: Place) -> Suite:
    """Builds a suite from a file's content (format: `read_suite`); paths are relative to the file `path`.

    Other missing files are `absent`. Raises ValueError (with file and field) if the content is invalid or two files
    share a name, FileNotFoundError if a file of `calibrate`, or every file of a section, is missing.
    """
    where = os.fspath(path)
    suite, others = _named(suite, path)
    benchmarks = registered() | {name: benchmark for name, (_, benchmark) in others.items()}
    known = {name: benchmark for name, benchmark in benchmarks.items() if benchmark.figures}
    if not isinstance(suite, dict) or not set(suite) & set(known):
        raise ValueError(f"{where}: no suite: it names none of the sections {', '.join(known)}, nor FILE.py:NAME")
    if unknown := set(suite) - set(known) - {"neutral", "seed", "too_long"}:
        names = ", ".join([*known, "neutral", "seed", "too_long"])
        raise ValueError(f"{where}: {', '.join(sorted(unknown))}: unknown. A suite has {names}")
    judged = [name for name in known if name in suite and "neutral" in known[name].needs]
    if judged and suite.get("neutral") not in (*NEUTRAL, None):
        raise ValueError(
            f"{where}: neutral is {suite.get('neutral')!r}; {' and '.join(judged)} need {'|'.join(NEUTRAL)}"
        )
    if not isinstance(suite.get("seed", 0), int) or not 0 <= suite.get("seed", 0) < 2**63:
        raise ValueError(f"{where}: seed is {suite['seed']!r}, not a whole number from 0 to 2^63 - 1")
    if suite.get("too_long", "error") not in get_args(TooLong):
        raise ValueError(f"{where}: too_long is {suite['too_long']!r}, not one of {', '.join(get_args(TooLong))}")
    data, calibrate, absent = {}, {}, []
    for section in (name for name in known if name in suite):
        files = _section(suite[section], known[section], path)
        data[section] = tuple(p for p in files["data"] if p.exists())
        absent += [os.fspath(p) for p in files["data"] if not p.exists()]
        if not data[section]:
            raise FileNotFoundError(
                f"{files['data'][0]}: not there, and neither is any other file of {section} in {where}"
            )
        if "calibrate" in files:
            calibrate[section] = files["calibrate"]
    by_name([file for files in [*data.values(), *calibrate.values()] for file in files])  # no two of one name
    settings = {key: suite[key] for key in ("seed", "too_long") if key in suite}
    absent = tuple(dict.fromkeys(absent))
    places = {name: place for name, (place, _) in others.items()}
    return Suite(
        suite.get("neutral", None if judged else "drop"),
        data,
        calibrate,
        absent,
        **settings,
        others=places,
        benchmarks=benchmarks,
    )


def _named(suite: Any, path: Place) -> tuple[Any, dict[str, tuple[str, Benchmark]]]:
    """Replaces keys of the user's own benchmarks by their names; also returns {name: (place, benchmark)}.

    A Python file is relative to the suite's file.
    """
    if not isinstance(suite, dict):
        return suite, {}
    where, sections, others = os.fspath(path), dict(suite), {}
    for key in [key for key in suite if ":" in key]:
        file, _, attribute = key.rpartition(":")
        place = f"{named_in(path, file)}:{attribute}" if file.endswith(".py") else key
        try:
            benchmark = find(place)
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from error
        name = benchmark.name
        if benchmark.figures is None:
            raise ValueError(f"{where}: {key}: has no `figures`, so it is no section. Run it as `jprm eval {key}`")
        if name in sections or name in RESERVED or registered().get(name, benchmark) is not benchmark:
            raise ValueError(f"{where}: {key}: its name {name!r} is that of another section. Rename the benchmark")
        sections[name], others[name] = sections.pop(key), (place, benchmark)
    return sections, others


def _section(section: Any, benchmark: Benchmark, path: Place) -> dict[str, tuple[Place, ...]]:
    """Returns a section's paths by key. Files of `calibrate` must exist."""
    where, name, keys = os.fspath(path), benchmark.name, {"data", "calibrate"} & set(benchmark.needs)
    if not isinstance(section, dict) or set(section) != keys:
        raise ValueError(f"{where}: {name}: give an object with {' and '.join(sorted(keys))}, nothing else")
    paths = {}
    for key, value in section.items():
        files = [value] if isinstance(value, str) else value
        if not isinstance(files, list) or not files or not all(isinstance(file, str) for file in files):
            raise ValueError(f"{where}: {name}.{key}: {value!r} is no list of files")
        paths[key] = tuple(named_in(path, file) for file in files)
    for missing in (p for p in paths.get("calibrate", ()) if not p.exists()):
        raise FileNotFoundError(f"{missing}: not there, and {where} wants {name} fitted on it")
    if benchmark.one_calibration_file and len(paths["calibrate"]) != 1:
        raise ValueError(f"{where}: {name}.calibrate: one threshold is tuned on one file")
    return paths


def run_suite(model: PathLike, suite: Suite, out: PathLike, tell: Callable[[str], None] = lambda line: None) -> Report:
    """Scores all files (reusing existing scores), computes every section, and writes and returns `OUT/results.json`.

    `model` is a model's folder or a judge's JSON file. Scores go to `OUT/scores/NAME.jsonl`; if one is missing, an
    older `results.json` is deleted first. `tell` receives a line at the start of each piece of work. Raises the errors
    of `open_scorer`, `check_neutral` and `scored_files` (e.g. ValueError if the scores in OUT are by another model),
    and of a section for invalid records; sections without enough data are listed under `not_computed` with the reason.
    """
    out = path_of(out)
    prm, files = open_scorer(model), _files(suite)
    check_output(out / "results.json", *(path for path, _ in files.values()))
    if not all((out / "scores" / f"{name}.jsonl").exists() for name in files):
        (out / "results.json").unlink(missing_ok=True)  # results of an earlier run must not stand beside newer scores
    for line in _foreseen(suite, files):
        tell(line)
    scores, left_out = scored_files(prm, files, out / "scores", suite.too_long, tell)
    tell("computing")
    if not isinstance(prm, PRM):  # a judge; a diagnostic's edits of chains would cost as much again
        judged = (record for name in files for record in read_records(out / "scores" / f"{name}.jsonl"))
        about = prm.about(judged) | _meaning(prm)
        results = results_of(suite, scores, scale=prm.scale) | {"model": about, "unread": left_out}
    else:
        about = {"name": path_of(prm.name).name, "folder": prm.name, "step": prm.step}
        about |= {"run": id} if (id := run_id(path_of(prm.name))) else {}
        results = results_of(suite, scores, scorer(prm, out / "scores"), prm.scale, left_out)
        results |= {"model": about | _meaning(prm)}
    if seen := trained_on(model, [path for path, _ in files.values()]):
        results[TRAINED_ON] = seen
    write_json(out / "results.json", results)
    mark_own(out / "results.json")
    return results


def _foreseen(suite: Suite, files: Mapping[str, tuple[Place, FileReader]]) -> Iterator[str]:
    records = read_all(files)
    check_neutral(suite.neutral, records)
    for section, paths in suite.data.items():
        fitted = _names(suite.calibrate.get(section, ()))
        records_of = {name: records[name] for name in dict.fromkeys([*_names(paths), *fitted])}
        yield from suite.benchmarks[section].foreseen(records_of, fitted)


def results_of(
    suite: Suite,
    scores: Scores,
    score: Scorer | None = None,
    scale: Scale = PROBABILITY,
    too_long: Mapping[str, int] | None = None,
) -> Report:
    """Computes all sections of a suite from scored records by file name.

    `score` rescores edited chains for diagnostics, which lack edits without it; `scale` is the scores' meaning, and
    `too_long` counts left-out records by file. If the records are too few or too uniform for a section, it is left out
    and `not_computed` has the reason. Raises KeyError if `scores` lacks a file. The report lacks `model`, which
    `run_suite` adds.
    """
    results: Report = {"jprm": jprm.__version__, "neutral": suite.neutral, "seed": suite.seed}
    results["sections"] = {section: _names(files) for section, files in suite.data.items()}
    results["data"] = {
        name: {"path": os.fspath(path), "reader": source.name, "n": len(scores[name])}
        for name, (path, source) in _files(suite).items()
    }
    domains = {(tree.extra.get("domain"), tree.extra.get("rubric")) for trees in scores.values() for tree in trees}
    results["meaning"] = [
        {"domain": domain, "rubric": rubric} for domain, rubric in sorted(domains - {(None, None)}, key=str)
    ]
    results |= {"absent": list(suite.absent), "too_long": dict(too_long or {}), "not_computed": {}}
    if suite.others:
        results["others"] = {
            name: {"benchmark": place, "title": suite.benchmarks[name].title} for name, place in suite.others.items()
        }
    requests = {}
    for name, benchmark in suite.benchmarks.items():
        if benchmark.figures is not None and name in suite.data:
            data, calibrate = (
                {file: scores[file] for file in _names(files.get(name, ()))} for files in (suite.data, suite.calibrate)
            )
            data, calibrate = seen_by(benchmark, data), seen_by(benchmark, calibrate)
            requests[name] = Request(data, calibrate, suite.neutral, suite.seed, scale, too_long or {})
            try:
                results[name] = benchmark.figures(requests[name])
            except NothingToMeasure as error:
                results["not_computed"][name] = str(error)
    for name, benchmark in suite.benchmarks.items():
        if benchmark.derive is not None:
            results[name] = benchmark.derive(requests, results, score)
    return results


def tables(results: Results, benchmarks: Mapping[str, Benchmark]) -> Iterator[Table | str]:
    """Yields the terminal tables of every section, then lines on missing sections and files, warnings and `lead`."""
    for name, benchmark in benchmarks.items():
        for report in benchmark.reports(results[name]) if name in results else ():
            yield from benchmark.tables(report)
    for name, reason in results.get("not_computed", {}).items():
        yield f"not computed: {benchmarks[name].title}: {reason}"
    for folder, paths in itertools.groupby(results["absent"], os.path.dirname):
        first, *others = map(os.path.basename, paths)
        yield f"absent: {os.path.join(folder, first)}" + (f" and {len(others)} more of this folder" if others else "")
    yield from trained_on_words(results)
    for name, count in results.get("unread", {}).items():
        if count:
            yield f"{name}: {count} records left out, with a step of which no critique could be read"
    yield from lead(list(itertools.chain(*findings_of(results, benchmarks))))


def read_results(folder: PathLike) -> dict[str, Any]:
    """Reads a `results.json` written by `run_suite`.

    Raises FileNotFoundError if it is missing, and ValueError if it is damaged.
    """
    path = path_of(folder) / "results.json"
    if not path.is_file():
        raise FileNotFoundError(f"{path}: not there: {folder} is no finished folder of `jprm eval suite`")
    try:
        results = parse(path.read_bytes(), os.fspath(path))
        model, counts = results["model"], [file["n"] for file in results["data"].values()]
        counts += results.get("unread", {}).values()
        whole = {"sections", "neutral", "seed"} <= results.keys() and "rule" in model
        whole &= isinstance(model["name"], str) and all(type(count) is int for count in counts)
    except RecordError as error:
        raise ValueError(f"{path}: {error.reason}; run `jprm eval suite` again") from None
    except DAMAGED:
        whole = False
    if not whole:
        raise ValueError(f"{path}: not the results of a suite; run `jprm eval suite` again")
    return results


def read_scores(folder: PathLike, results: Mapping[str, Any], unread: bool = False) -> dict[str, list[ReasoningTree]]:
    """Returns the scored trees behind the results, by file name; `unread` includes records that a judge left unscored.

    `results` is as from `read_results`. Raises FileNotFoundError if a file of scores is missing, and ValueError if one
    is damaged or does not have the number of records in `results`.
    """
    scores = {}
    for name, data in results["data"].items():
        if "/" in name:
            raise ValueError(f"{folder}: results.json: data: {name!r} is no file's name; run `jprm eval suite` again")
        path = path_of(folder) / "scores" / f"{name}.jsonl"
        if not path.is_file():
            raise FileNotFoundError(f"{path}: not there; run `jprm eval suite` again")
        scores[name] = list(read_trees(path))
        n = data["n"] + results.get("unread", {}).get(name, 0)
        if len(scores[name]) != n:
            raise ValueError(f"{path}: {len(scores[name])} records, not {n}; run `jprm eval suite` again")
        if not unread and "unread" in results:
            scores[name] = list(filter(is_scored, scores[name]))
    return scores


def _files(suite: Suite) -> dict[str, tuple[Place, FileReader]]:
    """Returns each file once, by name, with the reader of the first section that uses it."""
    files: dict[str, tuple[Place, FileReader]] = {}
    for section, paths in [*suite.data.items(), *suite.calibrate.items()]:
        for path in paths:
            if path.stem not in files:
                files[path.stem] = path, source_of(suite.benchmarks[section], path)
    return files


def _names(files: Sequence[Place]) -> list[str]:
    return list(dict.fromkeys(path.stem for path in files))


def _meaning(prm: PRM | scored.Scorer) -> dict[str, Any]:
    return {"semantics": prm.semantics, "rule": prm.rule, "scale": dataclasses.asdict(prm.scale)}
