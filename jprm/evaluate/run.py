"""The evaluation commands: read a benchmark's file, score it once, compute the report.

Scores lie beside the report, in `OUT.scores/`, so that a stopped command continues and a second one scores nothing.
"""

from __future__ import annotations

import hashlib
import os
import pathlib
from collections.abc import Sequence
from typing import Any

from jprm.data.reader import read_items
from jprm.data.readers import READERS
from jprm.evaluate import diagnostics as diagnostic
from jprm.evaluate.best_of_n import best_of_n_report
from jprm.evaluate.calibration import calibration_report
from jprm.evaluate.diagnostics import diagnostics_report
from jprm.evaluate.edits import edited, edits_report, right_chains
from jprm.evaluate.equal_cost import equal_cost_report
from jprm.evaluate.prmbench import prmbench_report
from jprm.evaluate.processbench import processbench_report
from jprm.evaluate.steps import steps_report
from jprm.jsonl import dump, parse, read_records
from jprm.loading import load
from jprm.score.calibration_map import store_calibration
from jprm.score.files import request_of, write_scores
from jprm.score.scorer import PRM

PathLike = str | os.PathLike

EDITED = 100
"""Right chains that are edited: ten edits each is a thousand chains to score."""

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
    files = by_name([*data, calibrate])
    records = {name: scored_records(prm, path, "processbench", f"{out}.scores") for name, path in files.items()}
    report = processbench_report(records, pathlib.Path(calibrate).stem, seed)
    return {pathlib.Path(path).stem: report[pathlib.Path(path).stem] for path in data}


def prmbench(model: PathLike, data: Sequence[PathLike], out: PathLike, seed: int = 0) -> dict:
    """PRMScore of the classes that the files hold, at 0.5 as published."""
    prm = load(model)
    files = by_name(data).values()
    return prmbench_report(
        [record for path in files for record in scored_records(prm, path, "prmbench", f"{out}.scores")], seed
    )


def steps(model: PathLike, data: Sequence[PathLike], neutral: str, out: PathLike, seed: int = 0) -> dict:
    """Step AUROC, average precision and first-error accuracy on files of the PRM800K format or jprm's own."""
    prm = load(model)
    files = by_name(data).values()
    records = [record for path in files for record in scored_records(prm, path, format_of(path), f"{out}.scores")]
    return steps_report(records, neutral, seed)


def calibration(
    model: PathLike,
    data: Sequence[PathLike],
    calibrate: Sequence[PathLike],
    neutral: str,
    out: PathLike,
    seed: int = 0,
    store: str | None = None,
) -> dict:
    """Calibration of step scores on files with step labels, before and after maps fitted on the files `calibrate`.

    `store` names the map that is kept in the model's folder.
    """
    prm = load(model)
    files = by_name([*data, *calibrate])
    records = {name: scored_records(prm, path, format_of(path), f"{out}.scores") for name, path in files.items()}
    fitted = [record for path in calibrate for record in records[pathlib.Path(path).stem]]
    names = dict.fromkeys(pathlib.Path(path).stem for path in data)
    report = calibration_report({name: records[name] for name in names}, fitted, neutral, seed)
    if store is not None:
        store_calibration(prm, report["recalibrated"][store]["map"], list(map(os.fspath, calibrate)), neutral)
    return report


def best_of_n(input: PathLike, model: PathLike | None, out: PathLike, seed: int = 0) -> dict:
    """Best-of-n curves of scored pools; with `model`, the pools are scored first."""
    if model is None:
        return best_of_n_report(list(read_records(input)), seed)
    return best_of_n_report(scored_records(load(model), input, "pools", f"{out}.scores"), seed)


def equal_cost(
    models: Sequence[PathLike],
    input: PathLike,
    policy_parameters: float,
    policy_tokens_per_second: float | None,
    out: PathLike,
    seed: int = 0,
) -> dict:
    """Majority vote and choices by each model at equal cost, on one file of pools."""
    loaded = {pathlib.Path(prm.name).name: prm for prm in map(load, models)}
    if len(loaded) < len(models):
        raise ValueError(f"{', '.join(map(str, models))}: two models of one name: rename one")
    scores = {name: scored_records(prm, input, "pools", f"{out}.scores/{name}") for name, prm in loaded.items()}
    return equal_cost_report(scores, loaded, policy_parameters, policy_tokens_per_second, seed)


def diagnostics(
    model: PathLike, chains: Sequence[PathLike], pools: Sequence[PathLike], out: PathLike, seed: int = 0
) -> dict:
    """All diagnostics that ProcessBench chains and pools allow, by name; of pools by file."""
    prm = load(model)
    files = by_name([*chains, *pools])
    if not files:
        raise ValueError("diagnostics need files of --chains or --pools")
    scores = {
        name: scored_records(prm, path, "processbench" if path in chains else "pools", f"{out}.scores")
        for name, path in files.items()
    }
    found = [record for path in chains for record in scores[pathlib.Path(path).stem]]
    report = diagnostics_report(
        found if chains else None,
        {pathlib.Path(path).stem: scores[pathlib.Path(path).stem] for path in pools},
        0.5,
        seed,
    )
    return report | (edits(prm, found, f"{out}.scores", seed) if chains else {})


def edits(prm: PRM, chains: Sequence[dict[str, Any]], folder: PathLike, seed: int) -> dict:
    """`meaning_kept` and `nonsense` of up to `EDITED` right chains; their edits are scored into `FOLDER/edits-*.jsonl`,
    a file for each set of edits, so that a suite may grow."""
    right = right_chains(chains, EDITED)
    if not right:
        return {"meaning_kept": {"not_computed": "no chain without an error, whose meaning an edit could keep"}}
    made = edited(right, seed)
    digest = hashlib.sha256("".join(map(dump, made)).encode()).hexdigest()
    output = pathlib.Path(folder) / f"edits-{digest[:12]}.jsonl"
    write_scores(prm, made, output, {"model": prm.name, "step": prm.step, "edits": digest}, len(made))
    return edits_report(right, list(read_records(output)), seed)


def drift(before: PathLike, after: PathLike, seed: int = 0) -> dict:
    """Whether the scores of two files of scored chains or pools have drifted apart."""
    return diagnostic.drift(list(read_records(before)), list(read_records(after)), seed)


def scored_records(prm: PRM, path: PathLike, reader: str, folder: PathLike) -> list[dict[str, Any]]:
    """The file's records with scores, from `FOLDER/NAME.jsonl` where they are there."""
    output = pathlib.Path(folder) / f"{pathlib.Path(path).stem}.jsonl"
    options = OPTIONS.get(reader, {})
    records = [record for _, record in READERS[reader].read(path, **options)]
    write_scores(prm, records, output, request_of(prm, path, reader=reader, **options), len(records))
    return list(read_records(output))


def by_name(paths: Sequence[PathLike]) -> dict[str, PathLike]:
    """The files by the names that the report and the scores beside it have for them.

    Raises FileNotFoundError for one that is not there, before any is scored, and ValueError for two of one name.
    """
    files: dict[str, PathLike] = {}
    for path in paths:
        os.stat(path)
        other = files.setdefault(pathlib.Path(path).stem, path)
        if os.path.abspath(other) != os.path.abspath(path):
            raise ValueError(f"{other} and {path} are two files of one name, and so are their scores: rename one")
    return files


def format_of(path: PathLike) -> str:
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
