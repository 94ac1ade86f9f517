"""The map from scores to probabilities that lies in a model's folder as `calibration.json`, and its application.

It holds for the checkpoint whose scores it was fitted on, so it names that step and is refused for another.
"""

from __future__ import annotations

import json
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jprm.evaluate.recalibration import Recalibration, apply, from_json
from jprm.evaluate.scored import as_written
from jprm.jsonl import atomic_file
from jprm.score.scorer import PRM

NAME = "calibration.json"
REMEDY = "run `jprm eval calibration --store`"


def store_calibration(prm: PRM, recalibration: Mapping[str, Any], files: Sequence[str], neutral: str) -> None:
    """Writes the map of `to_json` into the model's folder, with what it was fitted on; an earlier one is replaced."""
    from_json(recalibration)
    record = {"map": dict(recalibration), "step": prm.step, "fitted_on": list(files), "neutral": neutral}
    with atomic_file(pathlib.Path(prm.name) / NAME) as file:
        file.write((json.dumps(record, indent=2) + "\n").encode())


def stored_calibration(prm: PRM) -> Recalibration:
    """Raises FileNotFoundError where the folder has no map, ValueError for one that is damaged or of another step."""
    path = pathlib.Path(prm.name) / NAME
    if not path.is_file():
        raise FileNotFoundError(f"{path}: not there: this model has no recalibration map; {REMEDY}")
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        recalibration, step = from_json(record["map"]), record["step"]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path}: no recalibration map ({error}); {REMEDY} again") from None
    if step != prm.step:
        raise ValueError(f"{path}: fitted on step {step}, but the model is at step {prm.step}; {REMEDY} again")
    return recalibration


def mapped(recalibration: Recalibration, record: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of a scored chain, pool or tree whose scores went through the map."""

    def of(scores):
        return list(map(as_written, apply(recalibration, np.array(scores, float))))

    if "nodes" in record:
        values = of([node["score"] for node in record["nodes"]])
        nodes = [node | {"score": value} for node, value in zip(record["nodes"], values, strict=True)]
        return dict(record) | {"nodes": nodes}
    if "samples" in record:
        return dict(record) | {"samples": [sample | {"scores": of(sample["scores"])} for sample in record["samples"]]}
    return dict(record) | {"scores": of(record["scores"])}
