"""`jprm tokenise`: an experiment's records as shards of tokens (`stored_trees.py`), by all cores, resumable.

Each shard is written whole by one worker, and beside it what it holds. A command that runs again writes what is
missing; several machines write a part each. Whoever finds all shards there writes the folder's index.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import json
import math
import multiprocessing
import os
import pathlib
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from typing import Any

import grain
import numpy as np

from jprm import data
from jprm.data import REQUEST, SHARDS
from jprm.experiment import Experiment
from jprm.io.outputs import differing, write_json
from jprm.io.progress import Bar
from jprm.io.shards import Shard
from jprm.io.storage import Place, path_of, sha256_of
from jprm.layout import native_layout
from jprm.methods.data.stored_trees import CACHE_VERSION, shard_name, write_shard
from jprm.tokenizer import load_tokenizer
from jprm.train.batches import check_supervision, trees_depend_on, trees_of

TOKENS = 1 << 24
"""Of a shard, about: 40 MB compressed."""

WHOLE = Shard(0, 1)

SAMPLE = 256
"""Records that are tokenised to tell how many shards there are to be."""


@dataclasses.dataclass(frozen=True)
class Tokenised:
    """What the shards of a folder hold. `written` of `shards` are there; fewer while other parts are being written."""

    shards: int
    written: int
    records: int
    tokens: int
    steps: int
    labelled: int
    bytes: int


def tokenise(
    experiment: Experiment,
    out: str | os.PathLike,
    source: Sequence[str] = (),
    *,
    shards: int | None = None,
    workers: int | None = None,
    part: Shard = WHOLE,
) -> Tokenised:
    """Writes the token trees of records, shuffled, into a folder of shards; continues one that was stopped.

    Args:
      experiment: says how: its tokenizer, `data.supervise`, `data.extras`, `data.weight` and target.
      out: the folder, also in a bucket.
      source: prepared folders and JSON Lines files; by default `data.train`. Each worker holds a JSON Lines file in
        memory, and reads a prepared folder as it goes.
      shards: by default as many as give each `TOKENS`.
      workers: processes; by default one for each core.
      part: writes each `part.count`-th shard alone.

    Raises:
      ValueError: a record that the target does not take, no records, or `out` holds something else.
    """
    check_supervision(experiment)
    out, source = path_of(out), list(source or experiment.data.train)
    records, layout = _records(source), native_layout(load_tokenizer(experiment.tokenizer))
    if len(records) == 0:
        raise ValueError(f"{source[0]}: there are no records to tokenise")
    if shards is not None and not 1 <= shards <= len(records):
        raise ValueError(f"--shards {shards}: must be from 1 to the number of records, {len(records):,}")
    if workers is not None and workers < 1:
        raise ValueError(f"--workers {workers} must be positive")
    request = {
        "version": CACHE_VERSION, "about": trees_depend_on(experiment, layout), "records": len(records),
        "source": [{"name": path_of(file).name, **data.marker(file).checksum()} for file in source],
    }  # fmt: skip
    if shards is None:
        picked = _shuffled(len(records))[:SAMPLE].tolist()
        mean = np.mean([len(tree.tokens_N) for tree in trees_of((records[i] for i in picked), experiment, layout)])
        shards = min(len(records), math.ceil(len(records) * float(mean) / TOKENS))
    request["shards"] = shards
    if _claimed(out, request):
        return _told(json.loads((out / SHARDS).read_bytes())["shards"], shards)
    names = [shard_name(index, shards) for index in range(shards)]
    missing = [i for i in range(part.index, shards, part.count) if not _manifest(out, names[i]).exists()]
    settings = (experiment, source, out, shards)
    workers = min(workers or len(os.sched_getaffinity(0)), max(1, len(missing)))
    due = len(names[part.index :: part.count])
    with Bar("tokenising", due, due - len(missing)) as bar:
        for _ in _written(settings, missing, workers):
            bar.add()
    done = [_manifest(out, name) for name in names]
    counts = [json.loads(file.read_bytes()) if file.exists() else None for file in done]
    if all(counts):
        write_json(out / SHARDS, request | {"shards": counts})
    return _told([count for count in counts if count], shards)


def _records(source: Sequence[str]) -> Any:
    """Returns the records of all files, by index."""
    return grain.MapDataset.concatenate([grain.MapDataset.source(data.load(file)) for file in source])


def _shuffled(count: int) -> np.ndarray:
    """Returns the order of records in the shards, the same whatever is written with them."""
    return np.random.default_rng(0).permutation(count)


def _claimed(out: Place, request: dict[str, Any]) -> bool:
    """Writes the request into the folder. Returns whether all is there. Raises ValueError where another one is."""
    mark = out / REQUEST
    if not mark.exists():
        if out.exists() and out.files():
            raise ValueError(f"{out}: holds other files; name a new folder")
        out.mkdir(parents=True, exist_ok=True)
        write_json(mark, request)
    there = json.loads(mark.read_bytes())
    if other := differing(there, request):
        raise ValueError(
            f"{out}: was begun with another {' and another '.join(other)}: give the same, or name another folder"
        )
    return (out / SHARDS).is_file()


def _manifest(out: Place, name: str) -> Place:
    """Returns the file that says what a shard holds, which is written after it."""
    return out / f"{name}.json"


_WORKER: list[Any] = []
"""Of a worker process: what it needs for each of its shards."""


def _written(settings: tuple[Experiment, list[str], Place, int], missing: list[int], workers: int) -> Iterator[int]:
    """Writes shards; yields each one's index when it is whole."""
    if workers == 1:
        _start(*settings)
        yield from map(_write, missing)
        return
    context = multiprocessing.get_context("spawn")  # a fork would copy threads of jax
    with concurrent.futures.ProcessPoolExecutor(workers, context, _start, settings) as pool:
        futures = [pool.submit(_write, index) for index in missing]
        try:
            yield from (future.result() for future in concurrent.futures.as_completed(futures))
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


def _start(experiment: Experiment, source: list[str], out: Place, shards: int) -> None:
    records = _records(source)
    layout = native_layout(load_tokenizer(experiment.tokenizer))
    _WORKER[:] = [experiment, records, layout, out, np.array_split(_shuffled(len(records)), shards)]


def _write(index: int) -> int:
    experiment, records, layout, out, parts = _WORKER
    name = shard_name(index, len(parts))
    with tempfile.TemporaryDirectory() as folder:
        work = pathlib.Path(folder) / name
        trees = trees_of((records[int(i)] for i in parts[index]), experiment, layout)
        counts = write_shard(work, trees, experiment.data.extras)
        about = counts | {"bytes": work.stat().st_size, "sha256": sha256_of(work)}
        with (out / name).replacing() as target, work.open("rb") as made:
            shutil.copyfileobj(made, target, 1 << 20)
    write_json(_manifest(out, name), about)
    return index


def _told(counts: Sequence[dict[str, int]], shards: int) -> Tokenised:
    names = ("records", "tokens", "steps", "labelled", "bytes")
    return Tokenised(shards, len(counts), *(sum(count[name] for count in counts) for name in names))
