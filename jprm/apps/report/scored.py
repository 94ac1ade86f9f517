"""The page of scored files: every chain or trajectory from `jprm score`, lowest step first."""

from __future__ import annotations

import glob
import os
from collections.abc import Iterator, Sequence

import jprm
from jprm.apps.report.collect import Page, chains, heat, only_turns
from jprm.io.outputs import stored_request
from jprm.io.storage import REPORT, path_of
from jprm.methods.data.agents.atif import is_atif
from jprm.methods.evaluate.blocks import PageModel
from jprm.methods.evaluate.run import is_scored
from jprm.methods.jobs.score import stored_scale
from jprm.methods.judge.critiques import KEY
from jprm.tree import ReasoningTree, read_trees


def is_records(path: str | os.PathLike) -> bool:
    """Whether a path is a file or prepared folder, not a suite or run; `False` if it does not exist.

    Raises ValueError for an hf:// address.
    """
    return path_of(path).is_file() or (path_of(path) / REPORT).is_file()


def files_of(path: str | os.PathLike) -> list[str]:
    """Returns the record files behind a path: itself, unless it is one of the following.

    For a report of `jprm eval`, e.g. steps.json, they are the files in steps.json.scores/; for ATIF output of `jprm
    score`, PATH.turns.jsonl, which need not exist.
    """
    if behind := sorted(glob.glob(f"{glob.escape(os.fspath(path))}.scores/*.jsonl")):
        return behind
    if path_of(path).is_file() and is_atif(path):
        return [f"{os.fspath(path)}.turns.jsonl"]
    return [os.fspath(path)]


def collect_scored(paths: Sequence[str | os.PathLike]) -> tuple[Page, list[str]]:
    """Returns the page of scored files, for one model named after the files, and sentences that describe them.

    Raises ValueError if a file has no record or no scores, or two files have scores on different scales; RecordError
    for a bad record.
    """
    files = list(dict.fromkeys(file for path in paths for file in files_of(path)))
    scales = {file: stored_scale(file) for file in files}
    if len(set(scales.values())) > 1:
        raise ValueError(f"{', '.join(files)}: hold scores of different meaning. Show them on pages of their own")
    trees: dict[str, list[ReasoningTree]] = {}
    for file in files:
        trees[_name(file, files)] = read = list(map(only_turns, read_trees(file)))
        if not read:
            raise ValueError(f"{file}: holds no record. Was the command that wrote it stopped?")
        if all(node.score is None for tree in read for node in tree.nodes):
            fix = "Score it first: jprm score --model DIR --input FILE --output SCORED.jsonl, and give SCORED.jsonl"
            if any(KEY in tree.extra for tree in read):
                fix = "None of the judge's critiques could be read: they are in the file under `judge`"
            raise ValueError(f"{file}: no step has a score. {fix}")
    by = {name: stored_request(file).get("model") for name, file in zip(trees, files, strict=True)}
    scored_by = ", ".join(dict.fromkeys(str(model) for model in by.values() if model))
    said = [*_said(trees), *([f"Scored by {scored_by}."] if scored_by else [])]
    model = PageModel(", ".join(trees), {"model": {}, "jprm": jprm.__version__})
    data = chains(["score"], [trees], placed=True) | {"weights": [scales[files[0]].weight]}
    heatmap = heat({name: list(filter(is_scored, records)) for name, records in trees.items()})
    return Page([model], [], data, [heatmap]), said


def _name(file: str, files: Sequence[str]) -> str:
    """Returns the file's name, or its path if another file has the same name."""
    name = path_of(file).name
    return file if sum(path_of(other).name == name for other in files) > 1 else name


def _said(trees: dict[str, list[ReasoningTree]]) -> Iterator[str]:
    every = [tree for records in trees.values() for tree in records]
    scores = [node.score for tree in every for node in tree.nodes]
    what = "records" if len(every) != 1 else "record"
    yield f"{len(every):,} {what} with {len(scores):,} steps. The chain or run with the lowest step comes first."
    if missing := scores.count(None):
        unread = sum(not is_scored(tree) for tree in every)
        yield f"{missing:,} steps of {unread:,} records have no score, e.g. because a critique could not be read."
