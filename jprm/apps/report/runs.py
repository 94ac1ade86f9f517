"""Runs of `jprm train` side by side: the settings in which they differ, and the last values of their metrics."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from flax.traverse_util import flatten_dict

from jprm.checkpoints.kinds import RUN
from jprm.experiment import read, to_json
from jprm.io.storage import Place, is_remote, path_of
from jprm.methods.evaluate.blocks import ABSENT, Table

METRICS = "metrics.jsonl"
PLACES = ("name", "data.train", "data.valid", "base", "tokenizer", "trackers")
"""Fields that tell runs apart without changing what they compute: in the table only where nothing else differs."""

SHOWN = ("loss", "auroc", "tokens_per_second", "goodput")
"""Metrics of training in the table, after those of validation."""


def find_runs(folders: Sequence[str | os.PathLike]) -> list[Place]:
    """Returns the runs: each folder that is one, and those below any other, in the order of their names.

    Raises FileNotFoundError for a folder that is no run and has none.
    """
    runs = []
    for folder in map(path_of, folders):
        inside = [folder] if (folder / RUN).is_file() else folder.folders_with(RUN)
        if not inside:
            raise FileNotFoundError(f"{folder}: is no run and holds none: no {RUN} in it or below it")
        runs += inside
    return list(dict.fromkeys(runs))


def compare(folders: Sequence[str | os.PathLike]) -> dict[str, Any]:
    """Returns the runs in these folders: `{"differ": [field], "runs": [{"folder", "step", "steps", ...}]}`.

    A run has `settings`, its values of the fields in which the runs differ, and `metrics`, the last value of everything
    that its metrics.jsonl holds.

    Raises FileNotFoundError or ValueError, naming the file, for a folder without a run or a damaged one.
    """
    runs = find_runs(folders)
    configs = [flatten_dict(to_json(read(folder / RUN)), sep=".") for folder in runs]
    fields = dict.fromkeys(field for config in configs for field in config)
    differ = [field for field in fields if len({json.dumps(config.get(field)) for config in configs}) > 1]
    entries = []
    for folder, config in zip(runs, configs, strict=True):
        metrics = last_metrics(folder / METRICS)
        entry = {"folder": os.fspath(folder), "step": metrics.pop("step", 0), "steps": config["steps"]}
        entries.append(entry | {"settings": {field: config.get(field) for field in differ}, "metrics": metrics})
    return {"differ": differ, "runs": entries}


def last_metrics(path: Place) -> dict[str, Any]:
    """Returns the last value of every metric; empty where nothing is logged yet."""
    last: dict[str, Any] = {}
    for line in lines_of(path):
        last |= line
    return last


def lines_of(path: Place) -> list[dict[str, Any]]:
    """Returns the whole lines of a metrics.jsonl, none where it is not there. Raises ValueError for a damaged one."""
    parsed = []
    lines = path.read_bytes().splitlines(keepends=True) if path.is_file() else []
    for number, line in enumerate(lines, start=1):
        if line.endswith(b"\n"):  # a kill may leave half a line
            try:
                parsed.append(dict(json.loads(line)))
            except (ValueError, TypeError) as error:
                raise ValueError(f"{path}:{number}: is no line of metrics: {error}") from None
    return parsed


def tables(comparison: Mapping[str, Any]) -> Iterator[Table]:
    """Yields the table: a row a run, its differing settings and its figures."""
    runs = comparison["runs"]
    fields = [field for field in comparison["differ"] if field not in PLACES] or comparison["differ"]
    leaves = [field.rpartition(".")[2] for field in fields]
    heads = [leaf if leaves.count(leaf) == 1 else field for field, leaf in zip(fields, leaves, strict=True)]
    metrics = dict.fromkeys(name for run in runs for name in run["metrics"])
    shown = [name for name in metrics if name.startswith("valid_") and name != "valid_labels"]
    shown += [name for name in SHOWN if name in metrics]
    names = names_of([run["folder"] for run in runs])
    rows = [
        [name, *(setting(run["settings"][field]) for field in fields), f"{run['step']}/{run['steps']}",
         *(_cell(run["metrics"].get(metric)) for metric in shown)]
        for name, run in zip(names, runs, strict=True)
    ]  # fmt: skip
    yield Table("Runs", ("", *heads, "step", *(name.replace("_", " ") for name in shown)), rows)


def names_of(folders: Sequence[str]) -> list[str]:
    """Returns the folders without the path that they share."""
    parts = [(folder if is_remote(folder) else os.path.abspath(folder)).rstrip("/").split("/") for folder in folders]
    shared = len(os.path.commonprefix([path[:-1] for path in parts]))
    return ["/".join(path[shared:]) for path in parts]


def setting(value: Any) -> str:
    """Returns a value of an experiment as text, with all of its digits: runs may differ in the last one."""
    if value is None:
        return ABSENT
    return value if isinstance(value, str) else json.dumps(value)


def _cell(value: Any) -> str:
    """Returns a metric with four digits, and all digits before the point."""
    if not isinstance(value, float):
        return setting(value)
    return f"{value:.0f}" if 1e4 <= abs(value) < 1e15 else f"{value:.4g}"
