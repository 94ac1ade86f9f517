"""Token trees on disk: a cache on one machine, and shards for data that no machine should hold as a whole.

Reading and tokenising records takes most of the host's time; stored trees skip both. The cache (`data.cache`) is a
folder with one shard. `jprm tokenise` writes shards of equal size into a folder or bucket. Each process reads only the
shards in its own streams, and copies them to its disk if they are in a bucket.
"""

from __future__ import annotations

import bisect
import collections
import concurrent.futures
import contextlib
import dataclasses
import functools
import hashlib
import json
import math
import multiprocessing
import operator
import os
import pathlib
import shutil
import sys
import tempfile
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import grain
import numpy as np

from jprm import data
from jprm.data import REQUEST, SHARDS
from jprm.experiment import Experiment
from jprm.io.folders import made_once
from jprm.io.jsonl import DAMAGED
from jprm.io.outputs import Bar, check_version, differing, write_json
from jprm.io.shards import Shard
from jprm.io.storage import Place, Remote, cache_folder, is_remote, path_of, records_file, sha256_of
from jprm.token_tree import TokenTree
from jprm.tokenizer import load_tokenizer, native_layout
from jprm.train.batches import check_supervision, tokens_of, trees_depend_on

CACHE_VERSION = 1
"""Version of the format and of the trees that `token_tree` builds. Must be raised if either changes."""

# ------------------------------------------------------------------------------------------------------------- one file
# A shard is an ArrayRecord file of trees, one a record: five int32 (its tokens, runs, steps and bytes of the name, and
# tokens of the problem), then the arrays in the order of `_FIELDS`, of four bytes an element, `extras`, and the name.

_FIELDS = {
    "tokens_N": ("tokens", np.int32),
    "length_R": ("runs", np.int64),
    "parent_R": ("runs", np.int64),
    "run_M": ("steps", np.int64),
    "above_M": ("steps", np.int64),
    "node_M": ("steps", np.int64),
    "label_M": ("steps", np.float32),
    "weight_M": ("steps", np.float32),
}
"""For each array of a tree: the count that gives its length, and its dtype."""

_WRITE, _READ = "group_size:1,zstd:1", "readahead_buffer_size:0,max_parallelism:0"


def shard_name(index: int, count: int) -> str:
    return f"tokens-{index:05d}-of-{count:05d}.array_record"


def write_shard(path: str | os.PathLike, trees: Iterable[TokenTree], extras: Sequence[str]) -> dict[str, int]:
    """Writes trees, with the arrays named in `extras`, into a local ArrayRecord file, replaced (not atomically).

    Returns the counts `records`, `tokens`, `steps` and `labelled` (steps with a non-zero weight). Errors of the
    iterable pass; the file is then incomplete. Raises KeyError if a tree lacks one of `extras`.
    """
    from array_record.python.array_record_module import ArrayRecordWriter

    counts = collections.Counter(records=0, tokens=0, steps=0, labelled=0)
    writer = ArrayRecordWriter(os.fspath(path), _WRITE)
    for tree in trees:
        name = tree.name.encode()
        lengths = (len(tree.tokens_N), len(tree.length_R), len(tree.run_M), len(name), tree.problem)
        arrays = [(getattr(tree, field), dtype) for field, (_, dtype) in _FIELDS.items()]
        arrays += [(tree.extras[key], np.float32) for key in extras]
        parts = [np.ascontiguousarray(array, _stored(dtype)).tobytes() for array, dtype in arrays]
        writer.write(b"".join([np.array(lengths, "<i4").tobytes(), *parts, name]))
        labelled = int(np.count_nonzero(tree.weight_M))
        counts.update(records=1, tokens=len(tree.tokens_N), steps=len(tree.run_M), labelled=labelled)
    writer.close()
    return dict(counts)


def _read_tree(record: bytes, extras: Sequence[str]) -> TokenTree:
    *lengths, problem = np.frombuffer(record, "<i4", 5).tolist()
    sizes: dict[str, int] = dict(zip(("tokens", "runs", "steps", "name"), lengths, strict=True))
    start = 20

    def taken(kind: str, dtype: type) -> np.ndarray:
        nonlocal start
        array = np.frombuffer(record, _stored(dtype), sizes[kind], start).astype(dtype)
        start += array.size * _stored(dtype).itemsize
        return array

    fields = {field: taken(kind, dtype) for field, (kind, dtype) in _FIELDS.items()}
    more = {key: taken("steps", np.float32) for key in extras}
    name = taken("name", np.uint8).tobytes().decode()
    return TokenTree(name=name, problem=problem, extras=more, **fields)


def _stored(dtype: type) -> np.dtype:
    """Returns the little-endian dtype on disk."""
    return np.dtype(np.int32 if dtype is np.int64 else dtype).newbyteorder("<")


class TokenTrees(Sequence[TokenTree]):
    """The trees in a folder of shards, by index from 0; each is read on access. Picklable.

    Raises FileNotFoundError if the folder has no index, and ValueError if this is damaged or of a newer version.

    Attributes:
      about: the settings that the trees depend on (`jprm.train.batches`).
      records: the number of records in each shard.
    """

    def __init__(self, folder: str | os.PathLike):
        self.folder = path_of(folder)
        content = (self.folder / SHARDS).read_bytes()
        try:
            index = json.loads(content)
            check_version(index["version"], CACHE_VERSION, self.folder / SHARDS)
            self.about: dict[str, Any] = dict(index["about"])
            self.records = [operator.index(shard["records"]) for shard in index["shards"]]
            self._starts = [0, *np.cumsum(self.records, dtype=np.int64).tolist()]
        except DAMAGED as error:
            raise ValueError(f"{self.folder / SHARDS}: {error}. Tokenise the records again") from error
        self._id = hashlib.sha256(content).hexdigest()[:16]
        self._last: tuple[int, Any] = (-1, None)

    def __len__(self) -> int:
        return self._starts[-1]

    def __getitem__(self, index: Any) -> TokenTree:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]  # pyright: ignore[reportReturnType]
        if not 0 <= index < len(self):
            raise IndexError(index)
        shard = bisect.bisect_right(self._starts, index) - 1
        last = self._last  # threads may read at once
        if last[0] != shard:
            last = self._last = (shard, self.open(shard))
        return self.read(last[1], index - self._starts[shard])

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_last": (-1, None)}  # a reader stays in its process

    def open(self, shard: int) -> Any:
        """Opens a reader of shard `shard` (from 0), for `read`; waits for a download if needed.

        Raises ValueError if the shard is damaged, and OSError if it is missing or the download fails.
        """
        from array_record.python.array_record_module import ArrayRecordReader

        while True:
            path = self.fetch(shard)
            try:
                file = open(path, "rb")
            except FileNotFoundError:
                if self.folder.here is True:
                    raise
                continue  # the cache evicted it meanwhile
            with file:  # read through the open file: its path may be removed or rewritten at any time
                try:
                    reader = ArrayRecordReader(f"/dev/fd/{file.fileno()}", _READ)
                    if (count := reader.num_records()) == self.records[shard]:
                        return reader
                    reason = f"it has {count} records, and {SHARDS} says {self.records[shard]}"
                except Exception as error:  # a C++ error of no class of its own
                    reason = str(error)
            name = self.folder / shard_name(shard, len(self.records))
            remedy = "In `data.cache`, remove its folder; else run `jprm tokenise` into a new folder"
            raise ValueError(f"{name}: is damaged ({reason}). {remedy}")

    def read(self, reader: Any, record: int) -> TokenTree:
        return _read_tree(reader.read([record])[0], self.about["extras"])

    def fetch(self, shard: int) -> pathlib.Path:
        """Returns the path of shard `shard` (from 0), which is not checked."""
        return pathlib.Path(self.folder / shard_name(shard, len(self.records)))


# --------------------------------------------------------------------------------------------- the cache of one machine


def cached_trees(
    folder: str | os.PathLike, trees: Iterable[TokenTree], total: int, about: Mapping[str, Any]
) -> TokenTrees:
    """Returns the trees cached in `folder` for the settings `about`; writes them first if absent.

    Args:
      folder: on this machine; ValueError for a bucket.
      trees: consumed only if they are not cached yet.
      total: their number, for the progress bar.
      about: JSON settings that identify the trees, including their `extras`. They must name the data too: a cache with
        equal settings is returned without a look at `trees`.

    While another process writes the same trees, waits for it. The folder of a setting appears once it is complete.
    Raises ValueError for a damaged cache; errors of `trees`, and OSError of writing, pass.
    """
    if is_remote(folder):
        raise ValueError(f"data.cache={folder}: is to be a folder of this machine, which reads it at random places")
    name = hashlib.sha256(json.dumps(["shard", CACHE_VERSION, about], sort_keys=True).encode()).hexdigest()[:16]

    def make(new: pathlib.Path) -> None:
        with Bar("tokenising", total) as bar:
            write_trees(new, bar.follow(trees), about)

    return TokenTrees(made_once(pathlib.Path(folder) / name, make))


def write_trees(folder: pathlib.Path, trees: Iterable[TokenTree], about: Mapping[str, Any]) -> None:
    """Writes the trees as one shard, then the index, which makes the folder readable. The folder must exist.

    `about` is a JSON object with the settings that the trees depend on, and the names of their `extras`. Existing files
    are replaced. Errors of `trees` pass; KeyError if a tree lacks one of the extras.
    """
    counts = write_shard(folder / shard_name(0, 1), trees, about["extras"])
    write_json(folder / SHARDS, {"version": CACHE_VERSION, "about": about, "shards": [counts]})


# --------------------------------------------------------------------------------------------------------------- shards
# Written by `jprm tokenise`, some thousand trees each. All records are shuffled before they are split into shards, so
# each shard is a random sample of the data.

TOGETHER = 4
"""The number of shards that a stream shuffles together."""


class TokenShards(TokenTrees):
    """The trees in a folder written by `jprm tokenise`; `stream` returns them in an endless order.

    Args:
      folder: a local folder or a bucket.
      about: the settings that the trees must depend on (`jprm.train.batches`), if they must match.
      cache: the local folder for copies of shards in a bucket, by default `tokens` in jprm's cache.
      most: the size limit of the cache in bytes, shared by all its users.

    Raises:
      ValueError: the shards have another version, or were made with settings other than `about`.
      FileNotFoundError: the folder has no index, e.g. because `jprm tokenise` has not ended.
    """

    def __init__(
        self, folder: str | os.PathLike, about: Mapping[str, Any] | None = None,
        cache: str | os.PathLike = "", most: float = 50e9,
    ):  # fmt: skip
        super().__init__(folder)
        if about is not None and (other := differing(self.about, about)):
            names = " and another ".join(other)
            reason = f"its tokens were made with another {names} than the experiment's"
            raise ValueError(f"{self.folder}: {reason}. Set that, or run `jprm tokenise` into another folder")
        self._cache = (pathlib.Path(cache or cache_folder("tokens")), most)

    def fetch(self, shard: int) -> pathlib.Path:
        """Returns the local path of shard `shard` (from 0), waiting for a download if needed; OSError if it fails."""
        if self.folder.here is True:
            return super().fetch(shard)
        name = shard_name(shard, len(self.records))
        return fetched(self.folder / name, f"{self._id}-{name}", *self._cache)

    def stream(self, seed: int, stream: tuple[int, int]) -> grain.MapDataset[TokenTree]:
        """Returns the endless tree order (`ShardOrder`) for `stream`, (k, n): stream k (from 0) of n."""
        return grain.MapDataset.range(sys.maxsize).map(ShardOrder(self, seed, stream))


class ShardOrder:
    """Maps i to the i-th tree in stream k out of n.

    Depends only on the seed, the shards, k and n.

    The shards of all epochs, reshuffled each epoch, form one endless sequence. Stream k takes its elements k, k + n, k
    + 2n, ..., so each process reads only its own shards. The trees of `TOGETHER` consecutive shards are shuffled
    together (fewer if a stream has fewer per epoch).
    """

    def __init__(self, shards: TokenShards, seed: int, stream: tuple[int, int]):
        self._shards, self._seed, self._stream = shards, seed, stream
        self._together = max(1, min(TOGETHER, len(shards.records) // stream[1]))
        self._ends = [0]  # trees in the groups before each group
        self._open: dict[int, tuple[list[Any], list[int], np.ndarray]] = {}

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_open": {}}  # readers stay in their process

    def __call__(self, index: int) -> TokenTree:
        while index >= self._ends[-1]:
            members = self.members(len(self._ends) - 1)
            self._ends.append(self._ends[-1] + sum(self._shards.records[shard] for shard in members))
        group = bisect.bisect_right(self._ends, index) - 1
        if group not in self._open:
            for old in [other for other in self._open if abs(other - group) > 1]:  # a window may lie across two groups
                del self._open[old]
            self._open[group] = self._opened(group)
        readers, starts, order_N = self._open[group]
        place = int(order_N[index - self._ends[group]])
        member = bisect.bisect_right(starts, place) - 1
        return self._shards.read(readers[member], place - starts[member])

    def members(self, group: int) -> list[int]:
        """Returns the folder's indices of the shards in group `group` (from 0); over two epochs one may occur twice."""
        (k, n), count, trees = self._stream, len(self._shards.records), []
        for i in range(group * self._together, (group + 1) * self._together):
            epoch, place = divmod(k + n * i, count)
            trees.append(int(np.random.default_rng([self._seed, 0, epoch]).permutation(count)[place]))
        return trees

    def _opened(self, group: int) -> tuple[list[Any], list[int], np.ndarray]:
        members = self.members(group)
        readers = [self._shards.open(shard) for shard in members]
        if not self._shards.folder.here:  # the next group's copies are made while this one is read
            threading.Thread(target=self._ahead, args=[group + 1], daemon=True).start()
        starts = np.cumsum([0, *(self._shards.records[shard] for shard in members)]).tolist()
        order_N = np.random.default_rng([self._seed, 1, self._stream[0], group]).permutation(starts.pop())
        return readers, starts, order_N

    def _ahead(self, group: int) -> None:
        with contextlib.suppress(OSError):  # reported where the shard is opened
            for shard in self.members(group):
                self._shards.fetch(shard)


def fetched(remote: Remote, name: str, cache: pathlib.Path, most: float) -> pathlib.Path:
    """Returns the cached copy of a remote object, downloading it if needed.

    The copy is `cache`/`name`; it appears once it is whole, and is not compared with the object again. A download
    evicts the least recently used copies (`*.array_record`), so that the cache has at most `most` bytes. A process can
    go on reading an evicted copy that it has open. If several threads ask for the same copy, one downloads it and the
    others wait.

    Raises OSError if the object is missing, the download fails or the disk is full.
    """
    path = cache / name
    with _copying(path):
        with contextlib.suppress(FileNotFoundError):
            os.utime(path)  # used last
            return path
        cache.mkdir(parents=True, exist_ok=True)
        handle, partial = tempfile.mkstemp(dir=cache, prefix=".", suffix=".partial")
        os.close(handle)
        try:
            remote.download(partial)
            _make_room(cache, most - os.path.getsize(partial))
            os.replace(partial, path)
        finally:
            pathlib.Path(partial).unlink(missing_ok=True)
    return path


@functools.cache
def _copying(path: pathlib.Path) -> threading.Lock:
    return threading.Lock()


def _make_room(cache: pathlib.Path, most: float) -> None:
    """Removes the least recently used copies until the cache has at most `most` bytes."""
    files = []
    for path in cache.glob("*.array_record"):
        with contextlib.suppress(FileNotFoundError):  # another process removed it
            about = path.stat()
            files.append((about.st_mtime_ns, about.st_size, path))
    size = sum(bytes for _, bytes, _ in files)
    for _, bytes, path in sorted(files):
        if size <= most:
            break
        path.unlink(missing_ok=True)
        size -= bytes


# ------------------------------------------------------------------------------------------------------ jprm tokenise
# One worker writes each shard, and its counts beside it. A repeated command writes only missing shards; several
# machines can write a part each. The process that finds all shards complete writes the folder's index.

TOKENS = 1 << 24
"""The approximate tokens per shard, about 40 MB compressed."""

WHOLE = Shard(0, 1)

SAMPLE = 256
"""Records tokenised to estimate the number of shards."""


@dataclasses.dataclass(frozen=True)
class Tokenised:
    """Totals over the `written` shards, fewer than `shards` while other machines still write their parts.

    `labelled` counts steps with a weight; `bytes` are on disk.
    """

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
    """Tokenises shuffled records into a folder of shards; resumes an interrupted run, and returns the totals.

    A shard appears once it is whole. The folder becomes readable with the last one; a later call with the same request
    writes nothing more. Waits for all of its shards.

    Args:
      experiment: provides the tokenizer, target, `data.supervise`, `data.extras` and `data.weight`.
      out: the folder, also in a bucket.
      source: prepared folders and JSON Lines files; by default `data.train`. Each worker holds a JSON Lines file in
        memory, but streams a prepared folder.
      shards: by default chosen so that each has about 16.8 million tokens (`TOKENS`).
      workers: processes; by default one per core.
      part: writes only every `part.count`-th shard, so that several machines can share the work.

    Raises:
      ValueError: the target rejects a record, there are no records, `shards` or `workers` is out of range, or `out`
        holds something else.
      FileNotFoundError: a source or the tokenizer is missing.
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
        "source": [{"name": path_of(file).name, **records_file(file).checksum()} for file in source],
    }  # fmt: skip
    if shards is None:
        picked = _shuffled(len(records))[:SAMPLE].tolist()
        mean = np.mean([len(tokens_of(records[i], experiment, layout).tokens_N) for i in picked])
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
    """Concatenates the records of all files."""
    return grain.MapDataset.concatenate([grain.MapDataset.source(data.load(file)) for file in source])


def _shuffled(count: int) -> np.ndarray:
    """Returns the fixed order of records in the shards."""
    return np.random.default_rng(0).permutation(count)


def _claimed(out: Place, request: dict[str, Any]) -> bool:
    """Writes or checks the request in the folder; returns whether all shards are complete."""
    mark = out / REQUEST
    if not mark.exists():
        if out.exists() and out.files():
            raise ValueError(f"{out}: holds other files; name a new folder")
        out.mkdir(parents=True, exist_ok=True)
        write_json(mark, request)
    recorded = json.loads(mark.read_bytes())
    if other := differing(recorded, request):
        names = " and another ".join(other)
        raise ValueError(f"{out}: was begun with another {names}: give the same, or name another folder")
    return (out / SHARDS).is_file()


def _manifest(out: Place, name: str) -> Place:
    """Returns the path of a shard's counts (JSON), which are written after the shard."""
    return out / f"{name}.json"


_WORKER: list[Any] = []
"""State of a worker process, set by `_start`."""


def _written(settings: tuple[Experiment, list[str], Place, int], missing: list[int], workers: int) -> Iterator[int]:
    """Writes the missing shards; yields the index of each when complete."""
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
        trees = (tokens_of(records[int(i)], experiment, layout) for i in parts[index])
        counts = write_shard(work, trees, experiment.data.extras)
        about = counts | {"bytes": work.stat().st_size, "sha256": sha256_of(work)}
        with (out / name).replacing() as target, work.open("rb") as written:
            shutil.copyfileobj(written, target, 1 << 20)
    write_json(_manifest(out, name), about)
    return index


def _told(counts: Sequence[dict[str, int]], shards: int) -> Tokenised:
    names = ("records", "tokens", "steps", "labelled", "bytes")
    return Tokenised(shards, len(counts), *(sum(count[name] for count in counts) for name in names))
