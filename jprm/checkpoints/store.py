"""A run's folder: its starting conditions, which must not change, and its Orbax checkpoints.

The folder holds `experiment.json`, the tokenizer, digests, `metrics.jsonl` and `checkpoints/STEP/`. Orbax writes a step
under a temporary name and renames it, so an existing step is whole; in a bucket, a marker file is written last. The
parts `params` and `optimizer` are arrays that any mesh can restore. `run` is JSON, written once for all processes: data
position, experiment, versions and goodput.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import pathlib
import secrets
import shutil
import sys
import tempfile
from collections.abc import Collection, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict
from fsspec.config import conf
from jax.sharding import Mesh, NamedSharding
from orbax.checkpoint import v1 as ocp

from jprm import data, multihost
from jprm.experiment import ID, REMOVED, RUN, Experiment, read, run_id, to_json, written
from jprm.io.jsonl import parse
from jprm.io.outputs import atomic_write, differing, digest, text_of_module, write_json
from jprm.io.storage import Found, Place, Remote, cache_folder, path_of, sha256_of
from jprm.model import parameters, transformer
from jprm.model.config import own_names, own_parts
from jprm.model.parameters import join, new_parameters
from jprm.objectives import COPY, source
from jprm.options import find_part, place_of
from jprm.tokenizer import Tokenizer, saved_bytes

FOLDER = "checkpoints"

DIGESTS = "digests.json"
"""File with digests of the run's data (by path), of user-defined model parts (by field), and of a reread `base`."""


def open_checkpoints(workdir: str | os.PathLike, keep: int | None = None, keep_every: int = 0) -> Checkpoints:
    """Opens the run's checkpoints, WORKDIR/checkpoints, to use with `with`; the caller decides when to save.

    Keeps the newest `keep` (0: all), and every multiple of `keep_every` steps, if positive, for good. A reader must
    leave `keep` out: it then deletes no files; a writer removes unfinished saves. Makes the folder. Raises ValueError
    if several processes would write to a store other than gs://.
    """
    policies = ocp.training.preservation_policies
    kept = [policies.LatestN(keep)] if keep else [policies.PreserveAll()]
    kept += [policies.EveryNSteps(keep_every)] if keep_every else []
    registry = ocp.handlers.local_registry()
    registry.add(ocp.handlers.JsonHandler, checkpointable_name="run")  # or its text would be taken for arrays
    context = ocp.Context()
    context.checkpointables.registry = registry
    folder = path_of(workdir).absolute() / FOLDER
    if multihost.count() < jax.process_count():
        _of_a_group(context)
        if keep is not None and folder.here is not False:
            folder.mkdir(parents=True, exist_ok=True)
    # Orbax's policies name their arguments otherwise than its own protocols.
    arguments: dict[str, Any] = dict(
        save_decision_policy=ocp.training.save_decision_policies.FixedIntervalPolicy(1),
        context=context,
        preservation_policy=policies.AnyPreservationPolicy(kept),
        cleanup_tmp_directories=keep is not None,  # a reader must not disturb a run that is writing
    )
    if folder.here is False:
        return _in_bucket(folder, arguments, keep, keep_every)
    return ocp.training.Checkpointer(str(folder), **arguments)


def savable(parts: dict[str, Any]) -> dict[str, Any]:
    """Returns a checkpoint's parts for Orbax: unchanged, unless a single process of several in the job saves.

    Orbax refuses single-process arrays in a multi-process job; these become host arrays.
    """
    if jax.process_count() == 1 or multihost.count() > 1:
        return parts
    return jax.tree.map(lambda x: np.asarray(x) if isinstance(x, jax.Array) else x, parts)


def _of_a_group(context: ocp.Context) -> None:
    """Makes Orbax wait only for the processes of the group.

    Orbax 0.12.8 supports this by `active_processes`, except in two functions, which are patched out: one creates the
    checkpoints folder and raises; the other compares folder names in a collective over all processes.
    """
    from orbax.checkpoint import checkpoint_manager
    from orbax.checkpoint.experimental.v1._src.saving import execution

    group = multihost.members()
    options = context.multiprocessing_options
    options.primary_host, options.active_processes = group[0], set(group)
    options.barrier_sync_key_prefix = f"processes_{group[0]}_to_{group[-1]}"
    for module, name in ((checkpoint_manager, "_create_root_directory"), (execution, "_check_directory_consistency")):
        getattr(module, name)  # an Orbax without it would go another way
        setattr(module, name, lambda *_: None)


def saved(workdir: Place) -> bool:
    """Returns whether the run has a whole checkpoint."""
    folder = workdir / FOLDER
    if folder.here is False:
        return bool(committed(folder))
    return any(step.name.isdecimal() for step in folder.glob("*"))


def abstract(tree: Any) -> Any:
    """Returns a tree of jax arrays (no numbers) as sharded `jax.ShapeDtypeStruct`s, for Orbax to restore into."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), tree)


def restore(checkpoints: Checkpoints, wanted: dict[str, Any]) -> dict[str, Any]:
    """Returns the newest checkpoint's parts `wanted`: `params`, `optimizer` (abstract arrays), `run` (`None`: JSON).

    Raises ValueError, naming folder and fix, if there is no checkpoint, or it is damaged or from another model.
    """
    with _newest(checkpoints) as step:
        return checkpoints.load_checkpointables(step, wanted)


def run_of(checkpoints: Checkpoints) -> dict[str, Any]:
    """Returns the newest checkpoint's `run`: `id`, `data` (position), `experiment`, `versions`, `goodput`.

    It is {} in best/ of earlier releases. Raises ValueError as `restore`, and if the checkpoint belongs to another run,
    e.g. was copied into this folder.
    """
    with _newest(checkpoints) as step:
        has_run = "run" in checkpoints.checkpointables_metadata(step).metadata
        run = checkpoints.load_checkpointables(step, {"run": None})["run"] if has_run else {}
    folder = path_of(str(checkpoints.directory)).parent
    if run and (theirs := run.get(ID, "")) != (ours := run_id(folder)):
        name = run.get("experiment", {}).get("name")
        raise ValueError(
            f"{checkpoints.directory}/{step}: is of the run {theirs or 'without id'} ({name}), and {folder} is the run"
            f" {ours or 'without id'}. Move it to its own folder: this run then has its own newest checkpoint again"
        )
    return run


@contextlib.contextmanager
def _newest(checkpoints: Checkpoints) -> Iterator[int]:
    """Yields the newest step for reading, and converts errors as `restore` describes."""
    folder = checkpoints.directory
    if checkpoints.latest is None:
        raise ValueError(f"{folder}: holds no complete checkpoint. Train first, or name the run's folder")
    step = checkpoints.latest.step
    try:
        yield step
    except Exception as error:  # Orbax and TensorStore raise many types for a damaged or a different tree
        cause: BaseException = error
        while cause.__cause__ or cause.__context__:  # the innermost error names the file or array
            cause = cause.__cause__ or cause.__context__ or cause
        reason = str(cause).strip().splitlines()[0][:300] if str(cause).strip() else type(cause).__name__
        raise ValueError(
            f"{folder}/{step}: cannot be restored ({reason}). If its files are damaged, remove that folder to"
            " continue from an earlier step; if the experiment has changed, use another --workdir"
        ) from error


def load_params(
    folder: str | os.PathLike, experiment: Experiment, mesh: Mesh, new: str = "", stored: bool = False
) -> tuple[dict, int]:
    """Restores {"decoder", "head"} of the newest checkpoint onto the mesh, LoRA unmerged; returns it and the step.

    Missing parameters that match the regular expression `new` are omitted. A reread base (`Experiment.rereads`) is in
    the run's storage type if `stored`, else float32. Raises ValueError as `run_of`, if others miss or the base changed.
    """

    def init(key: jax.Array) -> dict:
        params: dict[str, Any] = flatten_dict(transformer.init(experiment.model, key), sep="/")
        if experiment.lora.rank:
            params |= parameters.init_adapters(experiment.lora, experiment.model, experiment.optimizer.freeze, key)
        return join(params)

    base = _base(folder, experiment, stored) if experiment.rereads else {}
    with open_checkpoints(folder) as checkpoints:
        run_of(checkpoints)
        wanted = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, x.sharding.spec)),
            flatten_dict(jax.eval_shape(init, jax.random.key(0)), sep="/"),
        )
        with _newest(checkpoints) as latest:
            metadata = checkpoints.checkpointables_metadata(latest).metadata["params"]
        wanted = {path: x for path, x in wanted.items() if path not in base}
        present = wanted if metadata is None else flatten_dict(metadata, sep="/")  # None: damaged, as `restore` says
        left_out = new_parameters(folder, wanted.keys() - present.keys(), new)
        wanted = join({path: x for path, x in wanted.items() if path not in left_out})
        params = restore(checkpoints, {"params": wanted})["params"]
        return join(flatten_dict(params, sep="/"), base), checkpoints.latest.step


def _base(folder: str | os.PathLike, experiment: Experiment, stored: bool) -> dict[str, Any]:
    """Returns the base's decoder as a flat dict. Raises ValueError if it changed since the run was trained on it."""
    digests = path_of(folder) / DIGESTS
    path = place_of(Found(path_of(folder) / RUN, "base", experiment.base))
    if parse(digests.read_bytes(), str(digests)).get("base") != digest(path.contents()):
        raise ValueError(f"{path}: changed since {folder} was trained on it. Restore it, or name a copy as its base")
    load_decoder = find_part("jprm.checkpoints.base:load_decoder", {}, "base")
    decoder = load_decoder(path, experiment.model, experiment.base_dtype, experiment.new_parameters)
    return flatten_dict({"decoder": decoder if stored else parameters.widened(decoder)}, sep="/")


# ------------------------------------------------------------------------------------------ what a run was started with

FREE = ("mesh", "steps", "log_every", "valid_every", "checkpoint_every", "keep", "keep_every", "stall_seconds",
        "stall_action", "base", "tokenizer", "trackers", "profile", "data.cache",
        "data.cache_gb", "optimizer.bad_steps", "optimizer.spike", *REMOVED)  # fmt: skip
"""Fields that may differ when a run continues, because they affect neither the parameters' meaning nor the data order.
The tokenizer may have moved, but must be the same. If `steps` differs, the schedule is recomputed."""


def stream_count(workdir: Place | None, processes: int, micro_rows: int) -> int:
    """Returns a run's data streams: recorded in `workdir`, else the most up to `processes` to divide `micro_rows`."""
    if workdir is not None and (workdir / RUN).exists() and saved(workdir):
        return max(1, read(workdir / RUN).data.streams)
    return next(count for count in range(min(processes, micro_rows), 0, -1) if micro_rows % count == 0)


def claim(workdir: Place, experiment: Experiment, tokenizer: Tokenizer, log_ratio: float | None = None) -> str:
    """Writes the experiment with its objective's `log_ratio`, digests, tokenizer and user code into the run's folder.

    Returns the run id, new unless the folder has checkpoints. Every process must call it, and waits for the others.
    Raises ValueError if it has checkpoints of another experiment (beyond `FREE`) or tokenizer, or data or code changed.
    """
    id = multihost.first(_own_id, workdir, experiment, tokenizer)
    files = {path: path_of(path) for path in (*experiment.data.train, *experiment.data.valid)}
    digests = data_digests(files | ({"base": place_of(experiment.base)} if experiment.rereads else {}))
    multihost.first(_record, workdir, experiment, tokenizer, log_ratio, id, digests)
    return id


def _own_id(workdir: Place, experiment: Experiment, tokenizer: Tokenizer) -> str:
    """Returns a new id, or the id of this experiment's run if the folder has its checkpoints."""
    if not ((path := workdir / RUN).exists() and saved(workdir)):
        return secrets.token_hex(8)
    check_experiment(path, to_json(read(path)), to_json(experiment), FREE)
    _check_tokenizer(workdir, tokenizer, experiment.tokenizer)
    return run_id(workdir)  # "" stays: checkpoints of an earlier release have none


def _record(workdir: Place, experiment: Experiment, tokenizer: Tokenizer, log_ratio, id: str, digests) -> None:
    objective = source(experiment.objective, workdir)
    parts: dict[str, Any] = dict(own_parts(experiment.model))
    named = {"optimizer.name": experiment.optimizer.name, "optimizer.decay": experiment.optimizer.decay}
    custom = {field: name for field, name in (named | {"data.mixture": experiment.data.mixture}).items() if ":" in name}
    parts |= {field: find_part(str(name), {}, field, files=True) for field, name in custom.items()}
    keep_digests(workdir, {name: digest(part) for name, part in parts.items()} | digests)
    modules = {field: sys.modules[name.rpartition(":")[0]] for field, name in own_names(experiment.model).items()}
    copies = {f"{field}.py": text_of_module(module) for field, module in modules.items()}
    for name, text in {RUN: written(experiment, log_ratio, id), COPY: objective, **copies}.items():
        if text is not None:
            atomic_write(workdir / name, text)
    tokenizer.save(workdir)


def check_experiment(path: Place, recorded: Any, here: Any, free: Collection[str]) -> None:
    """Raises ValueError, naming `path`, if two JSON experiments differ beyond `free`, e.g. "mesh", "data.cache"."""
    old, new = (flatten_dict(config, sep=".") for config in (recorded, here))
    names = [name for name in sorted(differing(old, new)) if not {name, name.split(".")[0]} & set(free)]
    if names:
        detail = "; ".join(f"{name}: {old.get(name)} there, {new.get(name)} here" for name in names)
        fix = "Use another --workdir"
        if "objective" in names:
            fix += f", or continue with objective {old['objective']!r}: name it, or Trainer(objective=...)"
        raise ValueError(f"{path}: is another experiment's run ({detail}). {fix}")


def keep_digests(workdir: Place, digests: Mapping[str, str]) -> None:
    """Merges digests by dependency (e.g. a data file) into WORKDIR/digests.json, made if absent.

    Raises ValueError if one changed and there is a checkpoint; without one it is replaced. New dependencies are added.
    """
    path = workdir / DIGESTS
    recorded = parse(path.read_bytes(), str(path)) if path.exists() else {}
    changed = [part for part in differing(recorded, {**recorded, **digests}) if part in recorded]
    if changed and saved(workdir):
        raise ValueError(
            f"{path}: {', '.join(changed)} changed since the run started. Restore the original (copies of code"
            f" are in {workdir}), or use another --workdir"
        )
    workdir.mkdir(parents=True, exist_ok=True)
    write_json(path, {**recorded, **digests})


def data_digests(places: Mapping[str, Place]) -> dict[str, str]:
    """Returns 16 hex digits by name for each place's contents (in a bucket, its metadata); absent places are omitted.

    Token shards are identified by their index, which holds their digests. Every process must call it and hashes a part.
    """

    def listed(place: Place) -> str | dict[str, int]:
        if (place / data.SHARDS).is_file():
            return digest((place / data.SHARDS).read_text())
        if place.here is False:
            return digest(place.contents())
        return {str(file.relative_to(place)): file.stat().st_size for file in place.files()}

    contents: dict[str, Any] = multihost.first(
        lambda: {name: listed(place) for name, place in places.items() if place.exists()}
    )
    files = [(name, *file) for name, x in contents.items() if isinstance(x, dict) for file in x.items()]
    hashed = lambda part: [sha256_of(places[name] / file) for name, file, _ in part]  # noqa: E731
    for (name, file, _), checksum in zip(files, multihost.spread(hashed, files, [x[2] for x in files]), strict=True):
        contents[name][file] = checksum
    return {name: digest(list(map(list, x.items()))) if isinstance(x, dict) else x for name, x in contents.items()}


def _check_tokenizer(workdir: Place, tokenizer: Tokenizer, path: str) -> None:
    """Raises ValueError if this tokenizer differs from the one that the run started with."""
    with tempfile.TemporaryDirectory() as folder:  # compared as files: they hold all that a tokenizer is
        tokenizer.save(folder)
        for file in sorted(pathlib.Path(folder).iterdir()):
            stored = workdir / file.name
            if not stored.is_file() or stored.read_bytes() != file.read_bytes():
                raise ValueError(
                    f"{stored}: is not the tokenizer that {path} holds, and the parameters were trained with it. Set"
                    f" tokenizer={workdir}, or use another --workdir"
                )


# ---- Checkpoints in a bucket: whole if they hold `commit_success.txt`, which is written last and removed first.
#
# Orbax writes to Google Cloud Storage itself, every process its own arrays. In other stores it would rename the step's
# folder at the end, which copies every file there. So one process saves to its disk and uploads the files.

MARK = "commit_success.txt"
"""Orbax's name for it."""


def _in_bucket(
    remote: Remote, arguments: Mapping[str, Any], keep: int | None, keep_every: int
) -> ocp.training.Checkpointer | Staged:
    """Opens checkpoints in a bucket; see `open_checkpoints`."""
    if remote.url.startswith("gs://"):
        # What TensorStore and other hosts write would be missing in a listing that is kept.
        conf.setdefault("gcs", {}).setdefault("use_listings_cache", False)
        return ocp.training.Checkpointer(remote.url, **arguments)
    if keep is not None and multihost.count() > 1:
        raise ValueError(f"{remote}: checkpoints of several processes go to gs:// or to a folder that all can write to")
    return Staged(remote, arguments, keep, keep_every)


def committed(remote: Remote) -> list[int]:
    """Returns the whole checkpoints' steps in WORKDIR/checkpoints, ascending; [] if it is absent."""
    marks = (file.parent for file in remote.files() if file.name == MARK)
    return sorted(int(step.name) for step in marks if step.parent == remote and step.name.isdecimal())


class Staged:
    """Checkpoints saved to local disk and uploaded in the background.

    Has the Orbax Checkpointer's attributes. While open, the disk holds the newest checkpoint and the one being saved.
    """

    def __init__(self, remote: Remote, arguments: Mapping[str, Any], keep: int | None, keep_every: int):
        self.directory, self._keep, self._keep_every = remote, keep, keep_every
        name = hashlib.sha256(remote.url.encode()).hexdigest()[:16]
        name += f"-{os.getpid()}" if keep is None else ""  # the run that writes is one, and clears what a kill left
        self._folder = cache_folder("checkpoints") / name
        shutil.rmtree(self._folder, ignore_errors=True)
        if steps := committed(remote):
            (remote / str(steps[-1])).download_folder(self._folder / str(steps[-1]))
        newest = ocp.training.preservation_policies.LatestN(1)
        self._inner = ocp.training.Checkpointer(str(self._folder), **{**arguments, "preservation_policy": newest})
        self._uploader, self._uploading = ThreadPoolExecutor(1), Future[None]()
        self._uploading.set_result(None)

    def __enter__(self) -> Staged:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __getattr__(self, name: str) -> Any:
        """Delegates to Orbax's Checkpointer of the local folder."""
        return getattr(self._inner, name)

    def save_checkpointables_async(self, step: int, parts: dict[str, Any], *, overwrite: bool = False) -> None:
        self.wait()
        self._inner.save_checkpointables_async(step, parts, overwrite=overwrite)
        self._uploading = self._uploader.submit(self._upload, step)

    def wait(self) -> None:
        """Blocks until the last checkpoint is in the bucket. Raises a failed upload's error."""
        self._inner.wait()
        self._uploading.result()

    def close(self) -> None:
        try:
            self.wait()
        finally:
            self._uploader.shutdown()
            with contextlib.suppress(Exception):  # of a save that failed, which `wait` raises
                self._inner.close()
            shutil.rmtree(self._folder, ignore_errors=True)

    def _upload(self, step: int) -> None:
        self._inner.wait()
        place = self.directory / str(step)
        place.remove_folder(first=MARK)  # what a killed run left of it
        place.upload_folder(self._folder / str(step), last=MARK)
        steps = committed(self.directory)
        kept = {s for s in steps if self._keep_every and s % self._keep_every == 0}
        kept |= set(steps[-self._keep :] if self._keep else steps)
        uploaded = {file.url.removeprefix(f"{self.directory}/").partition("/")[0] for file in self.directory.files()}
        for other in uploaded - set(map(str, kept)):
            (self.directory / other).remove_folder(first=MARK)


Checkpoints = ocp.training.Checkpointer | Staged

SUMMED_AT_ONCE = 1 << 24
"""Array elements that a fingerprint sums at a time."""


def fingerprint(params: Any, tokenizer: Tokenizer, mesh: Mesh) -> str:
    """Returns 16 hex digits, different for models with different parameters or tokenizers.

    Sums on the devices of `mesh` read each parameter once; the digits do not depend on it. Every process must call it.
    """
    content = hashlib.sha256()
    with jax.set_mesh(mesh):
        sums = [_sums_of(x) for x in jax.tree.leaves(params)]
    about = [(jax.tree_util.keystr(path), x.shape, str(x.dtype)) for path, x in jax.tree.leaves_with_path(params)]
    content.update(json.dumps([about, sums]).encode())
    content.update(saved_bytes(tokenizer))
    return content.hexdigest()[:16]


def _sums_of(x: jax.Array) -> list[int]:
    """Returns `_sums` of an array, in parts if it is large."""
    if x.size <= SUMMED_AT_ONCE or not x.is_fully_replicated:
        return np.asarray(_sums(x)).tolist()
    rows = max(1, SUMMED_AT_ONCE * len(x) // x.size)
    parts = [np.asarray(_sums(x[start : start + rows])) for start in range(0, len(x), rows)]
    return np.stack(parts).sum(axis=0, dtype=np.uint32).tolist()


@jax.jit
def _sums(x: jax.Array) -> jax.Array:
    """Returns an array's sum of bits modulo 2^32, plain and scrambled. Exact in any order of addition."""
    kind = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32}[x.dtype.itemsize]
    bits = jax.lax.bitcast_convert_type(x, kind).astype(jnp.uint32)
    mixed = (bits ^ (bits >> 15)) * jnp.uint32(2654435761)
    return jnp.stack([jnp.sum(bits, dtype=jnp.uint32), jnp.sum(mixed ^ (mixed >> 13), dtype=jnp.uint32)])
