"""A run's folder: what may change when a run continues, the experiment and its parts, and digests of the data."""

from __future__ import annotations

import pathlib
import sys
import tempfile
from collections.abc import Collection, Mapping
from typing import Any

from flax.traverse_util import flatten_dict

from jprm import data
from jprm.checkpoints import store
from jprm.experiment import RUN, Experiment, read, to_json, written
from jprm.io.jsonl import parse
from jprm.io.outputs import atomic_write, differing, digest, text_of_module, write_json
from jprm.io.storage import Place, path_of
from jprm.model.config import own_modules, own_parts
from jprm.objectives import COPY, source
from jprm.tokenizer import Tokenizer

FREE = ("mesh", "steps", "log_every", "valid_every", "checkpoint_every", "keep", "keep_every", "stall_seconds",
        "stall_action", "local_checkpoints", "local_every", "base", "tokenizer", "trackers", "profile", "data.cache",
        "data.cache_gb", "optimizer.bad_steps", "optimizer.spike")  # fmt: skip
"""Fields that may differ when a run continues: they change neither the parameters' meaning nor the data's order. The
tokenizer may be at another path, but must be the same. With other `steps` the schedule is computed anew."""


def streams(workdir: Place | None, processes: int, micro_rows: int) -> int:
    """Returns the number of a run's streams: its own, or else as many as processes can have."""
    if workdir is not None and (workdir / RUN).exists() and store.saved(workdir):
        return max(1, read(workdir / RUN).data.streams)
    return next(count for count in range(min(processes, micro_rows), 0, -1) if micro_rows % count == 0)


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
    if experiment.rereads:
        digests |= {"base": data_digest(experiment.base)}
    keep_digests(workdir, digests | {path: data_digest(path) for path in data if path_of(path).exists()})
    copies = {f"{name}.py": text_of_module(sys.modules[place]) for name, place in own_modules(experiment.model).items()}
    for name, text in {RUN: written(experiment, log_ratio), COPY: objective, **copies}.items():
        if text is not None:
            atomic_write(workdir / name, text)
    tokenizer.save(workdir)


def check_experiment(path: Place, recorded: Any, here: Any, free: Collection[str]) -> None:
    """Raises ValueError where two experiments differ in a field that is not free, as JSON values."""
    old, new = (flatten_dict(config, sep=".") for config in (recorded, here))
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
    path = workdir / store.DIGESTS
    recorded = parse(path.read_bytes(), str(path)) if path.exists() else {}
    changed = [part for part in differing(recorded, {**recorded, **digests}) if part in recorded]
    if changed and store.saved(workdir):
        raise ValueError(
            f"{path}: {', '.join(changed)} changed since the run started. Restore what the run started with (copies of"
            f" code are in {workdir}), or use another --workdir"
        )
    workdir.mkdir(parents=True, exist_ok=True)
    write_json(path, {**recorded, **digests})


def data_digest(path: str) -> str:
    """Returns a digest of the content of a file or a folder; in a bucket, of what the store says of it.

    Shards of tokens are told by their index, which holds the digest of each.
    """
    place = path_of(path)
    if (place / data.SHARDS).is_file():
        return digest((place / data.SHARDS).read_text())
    return digest(place.contents())


def _check_tokenizer(workdir: Place, tokenizer: Tokenizer, path: str) -> None:
    """Raises ValueError where the tokenizer that the run started with differs from this one."""
    with tempfile.TemporaryDirectory() as folder:  # compared as files: they hold all that a tokenizer is
        tokenizer.save(folder)
        for file in sorted(pathlib.Path(folder).iterdir()):
            stored = workdir / file.name
            if not stored.is_file() or stored.read_bytes() != file.read_bytes():
                raise ValueError(
                    f"{stored}: is not the tokenizer that {path} holds, and the parameters were trained with it. Set"
                    f" tokenizer={workdir}, or use another --workdir"
                )
