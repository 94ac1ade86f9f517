"""A suite: every benchmark that one file names, scored once, computed in one go, and written as one `results.json`.

    {"neutral": "positive",
     "processbench": {"data": ["gsm8k.json", "math.json", "olympiadbench.json"], "calibrate": "gsm8k.json"},
     "prmbench":     {"data": ["circular.jsonl", "redundency.jsonl"]},
     "steps":        {"data": ["phase1_test.jsonl"]},
     "best_of_n":    {"data": ["pool.jsonl"]},
     "calibration":  {"data": ["math.json"], "calibrate": ["gsm8k.json"]}}

Every section may be left out. Paths are relative to the suite's file. A file of `data` that is not there is left out
and listed under `absent`, so that one suite serves machines that hold some of the splits; a section that has lost all
of its files is an error, and so is a missing file of `calibrate`.

The folder: `results.json`, and `scores/NAME.jsonl` for each file, from which a stopped run continues and which the page
of `jprm report` shows chain by chain.
"""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jprm
from jprm.evaluate.best_of_n import best_of_n_report
from jprm.evaluate.calibration import calibration_report
from jprm.evaluate.diagnostics import diagnostics_report
from jprm.evaluate.prmbench import prmbench_report
from jprm.evaluate.processbench import average_f1, processbench_report
from jprm.evaluate.report import write_json
from jprm.evaluate.run import by_name, edits, format_of, scored_records
from jprm.evaluate.steps import NEUTRAL, steps_report
from jprm.jsonl import parse, read_records
from jprm.loading import load
from jprm.score.scorer import PRM

PathLike = str | os.PathLike

KEYS = {
    "processbench": {"data", "calibrate"},
    "prmbench": {"data"},
    "steps": {"data"},
    "best_of_n": {"data"},
    "calibration": {"data", "calibrate"},
}
"""The sections of a suite and what each must say."""


@dataclasses.dataclass(frozen=True)
class Suite:
    """What a suite's file says, with paths that can be opened."""

    neutral: str
    data: Mapping[str, tuple[pathlib.Path, ...]]  # section -> the files that are there
    calibrate: Mapping[str, tuple[pathlib.Path, ...]]  # section -> the files that thresholds and maps are fitted on
    absent: tuple[str, ...]
    seed: int = 0


def read_suite(path: PathLike) -> Suite:
    """Raises ValueError, naming file and field, for what is not a suite; FileNotFoundError for a missing file."""
    path = pathlib.Path(path)
    where = os.fspath(path)
    found = parse(path.read_bytes(), where)
    if not isinstance(found, dict) or not set(found) & set(KEYS):
        raise ValueError(f"{where}: no suite: it names none of the sections {', '.join(KEYS)}")
    if unknown := set(found) - set(KEYS) - {"neutral", "seed"}:
        known = ", ".join([*KEYS, "neutral", "seed"])
        raise ValueError(f"{where}: {', '.join(sorted(unknown))}: unknown. A suite has {known}")
    if {"steps", "calibration"} & set(found) and found.get("neutral") not in NEUTRAL:
        raise ValueError(
            f"{where}: neutral is {found.get('neutral')!r}; steps and calibration need {'|'.join(NEUTRAL)}"
        )
    if not isinstance(found.get("seed", 0), int) or not 0 <= found.get("seed", 0) < 2**63:
        raise ValueError(f"{where}: seed is {found['seed']!r}, not a whole number from 0 to 2^63 - 1")
    data, calibrate, absent = {}, {}, []
    for section in (name for name in KEYS if name in found):
        said = found[section]
        if not isinstance(said, dict) or set(said) != KEYS[section]:
            raise ValueError(
                f"{where}: {section}: give an object with {' and '.join(sorted(KEYS[section]))}, nothing else"
            )
        for key, value in said.items():
            files = [value] if isinstance(value, str) else value
            if not isinstance(files, list) or not files or not all(isinstance(file, str) for file in files):
                raise ValueError(f"{where}: {section}.{key}: {value!r} is no list of files")
            paths = tuple(path.parent / file for file in files)
            if key == "calibrate":
                for missing in (p for p in paths if not p.is_file()):
                    raise FileNotFoundError(f"{missing}: not there, and {where} wants {section} fitted on it")
                calibrate[section] = paths
                continue
            data[section] = tuple(p for p in paths if p.is_file())
            absent += [os.fspath(p) for p in paths if not p.is_file()]
            if not data[section]:
                raise FileNotFoundError(f"{paths[0]}: not there, and neither is any other file of {section} in {where}")
    if len(calibrate.get("processbench", "1")) != 1:
        raise ValueError(f"{where}: processbench.calibrate: one threshold is tuned on one file")
    by_name([file for files in [*data.values(), *calibrate.values()] for file in files])  # no two of one name
    return Suite(found.get("neutral", "drop"), data, calibrate, tuple(dict.fromkeys(absent)), found.get("seed", 0))


def run_suite(model: PathLike, suite: Suite, out: PathLike, said: Callable[[str], None] = lambda line: None) -> dict:
    """Scores what is not scored yet, computes everything, writes and returns `results.json`.

    `said` is told what is being done. Raises what the sections raise for records that cannot be judged; a diagnostic
    that finds nothing to look at is `{"not_computed": reason}` instead.
    """
    out = pathlib.Path(out)
    (out / "results.json").unlink(missing_ok=True)  # those of an earlier run must not stand beside newer scores
    prm = load(model)
    scores = {}
    for name, (path, reader) in _files(suite).items():
        said(f"scoring {path}")
        scores[name] = scored_records(prm, path, reader, out / "scores")
    said("computing")
    results = results_of(suite, scores) | {"model": _model(prm)}
    if "processbench" in suite.data:
        chains = [record for name in _names(suite.data["processbench"]) for record in scores[name]]
        results["diagnostics"] |= edits(prm, chains, out / "scores", suite.seed)
    write_json(out / "results.json", results)
    return results


def results_of(suite: Suite, scores: Mapping[str, Sequence[Mapping[str, Any]]]) -> dict[str, Any]:
    """Everything that a suite asks for, of scored records by the name of their file."""
    names = {section: _names(files) for section, files in suite.data.items()}
    fitted = {section: _names(files) for section, files in suite.calibrate.items()}
    seed, results = suite.seed, {"jprm": jprm.__version__, "neutral": suite.neutral, "seed": suite.seed}
    results["sections"] = names
    results["data"] = {
        name: {"path": os.fspath(path), "reader": reader, "n": len(scores[name])}
        for name, (path, reader) in _files(suite).items()
    }
    results["absent"] = list(suite.absent)
    if "processbench" in names:
        (tuned_on,) = fitted["processbench"]
        chains = {name: scores[name] for name in dict.fromkeys([*names["processbench"], tuned_on])}
        report = processbench_report(chains, tuned_on, seed)
        results["processbench"] = {
            "files": {name: report[name] for name in names["processbench"]},
            "average": average_f1(chains, tuned_on, seed, names["processbench"]),
            "calibrate": tuned_on,
        }
    if "prmbench" in names:
        results["prmbench"] = prmbench_report([r for name in names["prmbench"] for r in scores[name]], seed)
    if "steps" in names:
        results["steps"] = steps_report([r for name in names["steps"] for r in scores[name]], suite.neutral, seed)
    if "best_of_n" in names:
        results["best_of_n"] = {name: best_of_n_report(scores[name], seed) for name in names["best_of_n"]}
    if "calibration" in names:
        calibrate = [record for name in fitted["calibration"] for record in scores[name]]
        files = {name: scores[name] for name in names["calibration"]}
        results["calibration"] = calibration_report(files, calibrate, suite.neutral, seed)
    files = results.get("processbench", {}).get("files", {})
    results["diagnostics"] = diagnostics_report(
        [record for name in files for record in scores[name]] if files else None,
        {name: scores[name] for name in names.get("best_of_n", [])},
        next(iter(files.values()))["tuned"]["threshold"] if files else 0.5,
        seed,
    )
    return results


def read_results(folder: PathLike) -> dict[str, Any]:
    """The `results.json` that `run_suite` wrote. Raises FileNotFoundError or ValueError that says what to do."""
    path = pathlib.Path(folder) / "results.json"
    if not path.is_file():
        raise FileNotFoundError(f"{path}: not there: {folder} is no finished folder of `jprm eval suite`")
    try:
        results = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path}: not JSON ({error}); run `jprm eval suite` again") from None
    if not (isinstance(results, dict) and {"sections", "data"} <= set(results) and "rule" in results.get("model", {})):
        raise ValueError(f"{path}: not the results of a suite; run `jprm eval suite` again")
    return results


def read_scores(folder: PathLike, results: Mapping[str, Any]) -> dict[str, list[dict[str, Any]]]:
    """The scored records that the results rest on, by name. Raises ValueError where a file is absent or not whole."""
    found = {}
    for name, data in results["data"].items():
        path = pathlib.Path(folder) / "scores" / f"{name}.jsonl"
        if not path.is_file():
            raise FileNotFoundError(f"{path}: not there; run `jprm eval suite` again")
        found[name] = list(read_records(path))
        if len(found[name]) != data["n"]:
            raise ValueError(f"{path}: {len(found[name])} records, not {data['n']}; run `jprm eval suite` again")
    return found


def _files(suite: Suite) -> dict[str, tuple[pathlib.Path, str]]:
    """Each file once, under its name, with the reader that its section wants."""
    readers = {"processbench": "processbench", "prmbench": "prmbench", "best_of_n": "pools"}
    found: dict[str, tuple[pathlib.Path, str]] = {}
    for section, paths in [*suite.data.items(), *suite.calibrate.items()]:
        for path in paths:
            if path.stem not in found:
                found[path.stem] = path, readers.get(section) or format_of(path)
    return found


def _names(files: Sequence[pathlib.Path]) -> list[str]:
    return list(dict.fromkeys(path.stem for path in files))


def _model(prm: PRM) -> dict[str, Any]:
    of = {"name": pathlib.Path(prm.name).name, "folder": prm.name, "step": prm.step}
    return of | {"semantics": prm.semantics, "rule": prm.rule}
