"""The evaluation commands: read a benchmark's file, score it once, compute the report.

Scores lie beside the report, in `OUT.scores/`, so that a stopped command continues and a second one scores nothing.
"""

from __future__ import annotations

import os
import pathlib
from collections.abc import Sequence
from typing import Any

from jprm.data.reader import read_items
from jprm.data.readers import READERS
from jprm.evaluate.best_of_n import best_of_n_report
from jprm.evaluate.calibration import calibration_report
from jprm.evaluate.prmbench import prmbench_report
from jprm.evaluate.processbench import processbench_report
from jprm.evaluate.steps import steps_report
from jprm.jsonl import parse, read_records
from jprm.score.files import request_of, write_scores
from jprm.score.scorer import PRM, load

PathLike = str | os.PathLike

OPTIONS: dict[str, dict[str, str]] = {
    "prm800k": {"human_written": "unlabelled", "control_questions": "drop"},
    "pools": {"empty_samples": "drop"},
    "prmbench": {"outside": "ignore", "empty": "drop"},
}
"""How benchmark files are read: only ratings that humans gave to a model's steps are judged; error steps that PRMBench
names beyond a chain's end are no steps, as in its own evaluation, and neither is its one step without text."""


def processbench(model: PathLike, data: Sequence[PathLike], calibrate: PathLike, out: PathLike, seed: int = 0) -> dict:
    """ProcessBench's F1 a file, at 0.5 and at the threshold tuned on `calibrate`, which may be one of the files."""
    prm = load(model)
    files = _by_name([*data, calibrate])
    records = {name: scored_records(prm, path, "processbench", out) for name, path in files.items()}
    report = processbench_report(records, pathlib.Path(calibrate).stem, seed)
    return {pathlib.Path(path).stem: report[pathlib.Path(path).stem] for path in data}


def prmbench(model: PathLike, data: Sequence[PathLike], out: PathLike, seed: int = 0) -> dict:
    """PRMScore of the classes that the files hold, at 0.5 as published."""
    prm = load(model)
    files = _by_name(data).values()
    return prmbench_report([record for path in files for record in scored_records(prm, path, "prmbench", out)], seed)


def steps(model: PathLike, data: Sequence[PathLike], neutral: str, out: PathLike, seed: int = 0) -> dict:
    """Step AUROC, average precision and first-error accuracy on files of the PRM800K format or jprm's own."""
    prm = load(model)
    files = _by_name(data).values()
    records = [record for path in files for record in scored_records(prm, path, _format(path), out)]
    return steps_report(records, neutral, seed)


def calibration(
    model: PathLike, data: Sequence[PathLike], calibrate: Sequence[PathLike], neutral: str, out: PathLike, seed: int = 0
) -> dict:
    """Calibration of step scores on files with step labels, before and after maps fitted on the files `calibrate`."""
    prm = load(model)
    files = _by_name([*data, *calibrate])
    records = {name: scored_records(prm, path, _format(path), out) for name, path in files.items()}
    fitted = [record for path in calibrate for record in records[pathlib.Path(path).stem]]
    names = dict.fromkeys(pathlib.Path(path).stem for path in data)
    return calibration_report({name: records[name] for name in names}, fitted, neutral, seed)


def best_of_n(input: PathLike, model: PathLike | None, out: PathLike, seed: int = 0) -> dict:
    """Best-of-n curves of scored pools; with `model`, the pools are scored first."""
    if model is None:
        return best_of_n_report(list(read_records(input)), seed)
    return best_of_n_report(scored_records(load(model), input, "pools", out), seed)


def scored_records(prm: PRM, path: PathLike, reader: str, out: PathLike) -> list[dict[str, Any]]:
    """The file's records with scores, from the cache beside `out` where they are there."""
    output = pathlib.Path(f"{out}.scores") / f"{pathlib.Path(path).stem}.jsonl"
    options = OPTIONS.get(reader, {})
    records = [record for _, record in READERS[reader].read(path, **options)]
    write_scores(prm, records, output, request_of(prm, path, reader=reader, **options), len(records))
    return list(read_records(output))


def _by_name(paths: Sequence[PathLike]) -> dict[str, PathLike]:
    """The files by the names that the report and the scores beside it have for them."""
    files: dict[str, PathLike] = {}
    for path in paths:
        other = files.setdefault(pathlib.Path(path).stem, path)
        if os.path.abspath(other) != os.path.abspath(path):
            raise ValueError(f"{other} and {path} are two files of one name, and so are their scores: rename one")
    return files


def _format(path: PathLike) -> str:
    """A benchmark as released, prm800k for its chains with ratings as well, else jprm's own records."""
    for number, raw in read_items(path):
        item = parse(raw, f"{os.fspath(path)}:{number}")
        keys = item.keys() if isinstance(item, dict) else ()
        if "modified_process" in keys:
            return "prmbench"
        if {"label", "final_answer_correct"} <= set(keys):
            return "processbench"
        return "prm800k" if "question" in keys or "ratings" in keys else "jsonl"
    raise ValueError(f"{os.fspath(path)}: holds no record")
