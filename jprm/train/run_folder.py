"""A run's folder: it belongs to one experiment, whose record, own code, digests of data and tokenizer are in it."""

from __future__ import annotations

import pathlib
import sys
import tempfile
from collections.abc import Collection, Mapping
from typing import Any

from flax.traverse_util import flatten_dict

from jprm.checkpoints import store
from jprm.checkpoints.kinds import RUN
from jprm.experiment import Experiment, read, to_json, written
from jprm.io.digests import digest, sha256_of, text_of
from jprm.io.jsonl import parse
from jprm.io.outputs import atomic_file, differing, write_json
from jprm.io.storage import Place, Remote, path_of
from jprm.objectives import COPY, source
from jprm.score.identity import own_modules, own_parts
from jprm.tokenizer import Tokenizer

FREE = ("mesh", "steps", "log_every", "valid_every", "checkpoint_every", "keep", "keep_every", "stall_seconds", "base",
        "tokenizer", "trackers", "profile", "data.cache", "optimizer.bad_steps", "optimizer.spike")  # fmt: skip
"""Fields that may differ when a run continues: they change neither the parameters' meaning nor the data's order. The
tokenizer may be at another path, but must be the same. With other `steps` the schedule is computed anew."""


DIGESTS = "digests.json"
"""In a run's folder: digests of its data and of the user's own parts of its model, by path and by field."""


def claim(workdir: Place, experiment: Experiment, tokenizer: Tokenizer, log_ratio: float | None = None) -> None:
    """Writes the experiment, and its objective's `log_ratio`, into its folder.

    Raises ValueError where checkpoints of another experiment are there.
    """
    path = workdir / RUN
    if path.exists() and store.saved(workdir):
        check_experiment(path, to_json(read(path)), to_json(experiment), FREE)
        _check_tokenizer(workdir, tokenizer, experiment.tokenizer)
    objective = source(experiment.objective, workdir)
    parts, data = own_parts(experiment.model), (*experiment.data.train, *experiment.data.valid)
    digests = {name: digest(part) for name, part in parts.items()}
    keep_digests(workdir, digests | {path: data_digest(path) for path in data if path_of(path).exists()})
    copies = {f"{name}.py": text_of(sys.modules[place]) for name, place in own_modules(experiment.model).items()}
    for name, text in {RUN: written(experiment, log_ratio), COPY: objective, **copies}.items():
        if text is not None:
            with atomic_file(workdir / name) as file:
                file.write(text.encode())
    tokenizer.save(workdir)


def check_experiment(path: Place, there: Any, here: Any, free: Collection[str]) -> None:
    """Raises ValueError where two experiments differ in a field that is not free, as JSON values."""
    old, new = (flatten_dict(each, sep=".") for each in (there, here))
    names = [name for name in sorted(differing(old, new)) if not {name, name.split(".")[0]} & set(free)]
    if names:
        detail = "; ".join(f"{name}: {old.get(name)} there, {new.get(name)} here" for name in names)
        fix = "Use another --workdir"
        if "objective" in names:
            fix += f", or continue with objective {old['objective']!r}: name it, or Trainer(objective=...)"
        raise ValueError(f"{path}: is another experiment's run ({detail}). {fix}")


def keep_digests(workdir: Place, digests: Mapping[str, str]) -> None:
    """Writes what a run depends on, by part, into its folder. Raises ValueError where a part was another one.

    What an earlier release has not written is taken as it is.
    """
    path = workdir / DIGESTS
    there = parse(path.read_bytes(), str(path)) if path.exists() else {}
    changed = [part for part in differing(there, {**there, **digests}) if part in there]
    if changed and store.saved(workdir):
        raise ValueError(
            f"{path}: {', '.join(changed)} changed since the run started. Restore what the run started with (copies of"
            f" code are in {workdir}), or use another --workdir"
        )
    workdir.mkdir(parents=True, exist_ok=True)
    write_json(path, {**there, **digests})


def data_digest(path: str) -> str:
    """Returns a digest of the content of a file or a prepared folder; in a bucket, of what the store says of it."""
    place = path_of(path)
    if isinstance(place, Remote):
        return digest([file.stamp() for file in (place.files() if place.is_dir() else [place])])
    files = [place] if place.is_file() else sorted(file for file in place.rglob("*") if file.is_file())
    return digest([[str(file.relative_to(place)), sha256_of(file)] for file in files])


def _check_tokenizer(workdir: Place, tokenizer: Tokenizer, path: str) -> None:
    """Raises ValueError where the tokenizer that the run started with differs from this one."""
    with tempfile.TemporaryDirectory() as folder:  # compared as files: they hold all that a tokenizer is
        tokenizer.save(folder)
        for file in sorted(pathlib.Path(folder).iterdir()):
            there = workdir / file.name
            if not there.is_file() or there.read_bytes() != file.read_bytes():
                raise ValueError(
                    f"{there}: is not the tokenizer that {path} holds, and the parameters were trained with it. Set"
                    f" tokenizer={workdir}, or use another --workdir"
                )
