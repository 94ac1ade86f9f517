"""A study: the trees to label, who labels them, and what is mixed in to measure the labels."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import pathlib
import secrets
from collections.abc import Sequence
from typing import Any, NamedTuple

from jprm.apps.annotate.config import StudyConfig
from jprm.apps.annotate.trees import is_chain, items_in, known_wrong, scores_of
from jprm.io.folders import whole_folder
from jprm.io.jsonl import RecordError, write_records
from jprm.io.outputs import write_json
from jprm.score.files import stored_scale
from jprm.score.scale import PROBABILITY, check_scale
from jprm.tree import ReasoningTree, record_of

POOLS = ("work", "gold", "screening")
EVENTS = "events.jsonl"


class Study(NamedTuple):
    """A study's folder, configuration and trees. `salt` makes the names of tasks say nothing of what they hold."""

    folder: pathlib.Path
    config: StudyConfig
    trees: dict[str, list[ReasoningTree]]
    guidelines: str
    salt: str

    @property
    def events(self) -> pathlib.Path:
        return self.folder / EVENTS


def create(
    folder: str | os.PathLike,
    work: str | os.PathLike,
    config: StudyConfig,
    *,
    gold: str | os.PathLike | None = None,
    screening: str | os.PathLike | None = None,
    guidelines: str | os.PathLike | None = None,
) -> None:
    """Writes a study's folder, whole or not at all.

    Raises ValueError where the folder exists; RecordError for a bad record, one of `gold` or `screening` without
    labels, or one without scores or with alternatives in a study of anchoring.
    """
    if os.path.lexists(folder):
        raise ValueError(f"{os.fspath(folder)}: is there already. Leave --input out to continue it, or name another")
    text = (pathlib.Path(guidelines) if guidelines else pathlib.Path(__file__).with_name("guidelines.txt")).read_text()
    trees = {
        pool: list(items_in(path)) if path else [] for pool, path in zip(POOLS, (work, gold, screening), strict=True)
    }
    for pool, path in (("gold", gold), ("screening", screening)):
        for number, tree in enumerate(trees[pool], start=1):
            if not known_wrong(tree):
                raise RecordError(f"{path}, task {number}", "labels", "are absent", "Tasks that measure have labels.")
    if config.anchored_fraction:
        check_scale(stored_scale(work), ("score",), os.fspath(work), "a page that shows scores")
        for number, tree in enumerate(trees["work"], start=1):
            if not is_chain(tree):
                remedy = "Anchoring is measured on chains: `jprm annotate select` without --alternatives writes them."
                raise RecordError(f"{work}, task {number}", "nodes", "have alternatives", remedy)
            if any(node.score is None for node in tree.nodes):
                raise RecordError(f"{work}, task {number}", "scores", "are absent", "Anchored chains show them.")
            PROBABILITY.fractions(scores_of(tree), f"{work}, task {number}")
    with whole_folder(folder) as new:
        for pool, found in trees.items():
            write_records(new / f"{pool}.jsonl", map(record_of, found))
        (new / "guidelines.txt").write_text(text)
        write_json(new / "study.json", {"version": 1, "salt": secrets.token_hex(16), **dataclasses.asdict(config)})


def read(folder: str | os.PathLike, annotators: Sequence[str] = ()) -> Study:
    """Returns the study of a folder; `annotators` that it lacks are added to it.

    Raises ValueError naming the file where it is no study, RecordError for a bad record.
    """
    folder = pathlib.Path(folder)
    file = folder / "study.json"
    try:
        found: dict[str, Any] = json.loads(file.read_text())
        version, salt = found.pop("version"), found.pop("salt")
        found["annotators"] = tuple(found["annotators"])
        config = StudyConfig(**found)
    except FileNotFoundError:
        raise ValueError(f"{folder}: holds no study.json. `jprm annotate serve --input` makes a study") from None
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"{file}: is no study: {error}") from None
    if version != 1:
        raise ValueError(f"{file}: is of version {version!r}, and this jprm reads 1: upgrade jprm")
    if new := tuple(name for name in dict.fromkeys(annotators) if name not in config.annotators):
        config = dataclasses.replace(config, annotators=config.annotators + new)
        write_json(file, {"version": version, "salt": salt, **dataclasses.asdict(config)})
    trees = {pool: list(items_in(path)) if (path := folder / f"{pool}.jsonl").stat().st_size else [] for pool in POOLS}
    return Study(folder, config, trees, (folder / "guidelines.txt").read_text(), salt)


def chance(seed: int, *parts: Any) -> float:
    """Returns a number in [0, 1) that depends on the seed and the parts alone."""
    digest = hashlib.sha256(json.dumps([seed, *parts]).encode()).digest()
    return int.from_bytes(digest[:8], "big") / 2**64
