"""A run's folder: it belongs to one experiment, whose record, objective and tokenizer are in it."""

from __future__ import annotations

import pathlib
import tempfile

from flax.traverse_util import flatten_dict

from jprm.checkpoints import store
from jprm.checkpoints.kinds import RUN
from jprm.experiment import Experiment, read, to_json, written
from jprm.objectives import COPY, source
from jprm.outputs import atomic_file
from jprm.storage import Place
from jprm.tokenizer import Tokenizer

FREE = ("mesh", "steps", "log_every", "valid_every", "checkpoint_every", "keep", "keep_every", "stall_seconds", "base",
        "tokenizer", "trackers", "profile", "data.cache", "optimizer.bad_steps", "optimizer.spike")  # fmt: skip
"""Fields that may differ when a run continues: they change neither the parameters' meaning nor the data's order. The
tokenizer may be at another path, but must be the same. With other `steps` the schedule is computed anew."""


def claim(workdir: Place, experiment: Experiment, tokenizer: Tokenizer, log_ratio: float | None = None) -> None:
    """Writes the experiment, and its objective's `log_ratio`, into its folder.

    Raises ValueError where checkpoints of another experiment are there.
    """
    path = workdir / RUN
    if path.exists() and store.saved(workdir):
        new, old = (flatten_dict(to_json(e), sep=".") for e in (experiment, read(path)))
        differing = sorted(
            key for key in {**old, **new} if not {key, key.split(".")[0]} & set(FREE) and old.get(key) != new.get(key)
        )
        if differing:
            detail = "; ".join(f"{key}: {old.get(key)} there, {new.get(key)} here" for key in differing)
            fix = "Use another --workdir"
            if "objective" in differing:
                fix += f", or continue with objective {read(path).objective!r}: name it, or Trainer(objective=...)"
            raise ValueError(f"{path}: is another experiment's run ({detail}). {fix}")
        _check_tokenizer(workdir, tokenizer, experiment.tokenizer)
    workdir.mkdir(parents=True, exist_ok=True)
    objective = source(experiment.objective, workdir)
    for name, text in [(RUN, written(experiment, log_ratio)), *([(COPY, objective)] if objective is not None else [])]:
        with atomic_file(workdir / name) as file:
            file.write(text.encode())
    tokenizer.save(workdir)


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
