"""`prepare`: writes source files into a folder of records and counts the fate of every item."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import errno
import hashlib
import io
import json
import os
import pathlib
import re
import shutil
import time
import urllib.parse
import urllib.request
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal

import rich.console
import rich.markup
import rich.progress
import rich.table
import tensorflow_datasets as tfds

from jprm.io import jsonl
from jprm.io.folders import is_whole, local_copy, tidy, whole_folder
from jprm.io.jsonl import RecordError, Rejects, dump, shortened
from jprm.io.outputs import Bar, atomic_file, check_input, code_of, differing, stamp_of
from jprm.io.storage import REPORT, Place, cache_folder, is_remote, only_run, path_of, records_file, sha256_of
from jprm.methods.data import readers
from jprm.methods.data.overlap import Texts, normalise, problems_in, problems_of
from jprm.methods.data.reader import Reader, Record, check_record, choose
from jprm.methods.messages.records import messages_of
from jprm.tree import ReasoningTree


@dataclasses.dataclass(frozen=True)
class PrepareRequest:
    """The arguments of `prepare`, stored in the folder's report.

    `sha256` holds the checksum of each local file, `code` digests of a user's own reader files.
    """

    name: str
    source: list[str]
    exclude: list[str]
    options: dict[str, Any]
    on_error: str
    sha256: dict[str, str]
    code: dict[str, str] = dataclasses.field(default_factory=dict, kw_only=True)
    duplicates: str = dataclasses.field(default="keep", kw_only=True)
    near: float | None = dataclasses.field(default=None, kw_only=True)
    part: str = dataclasses.field(default="", kw_only=True)
    """The part of the problems, e.g. `train, without held_out=0.1`; empty for all."""


@dataclasses.dataclass(frozen=True)
class PrepareReport(PrepareRequest):
    """The request and the counts of a prepared folder, as stored in `report.json`.

    Every item is rejected, dropped (by reason), excluded, repeated, in another part, or kept. `excluded` counts records
    per benchmark file, so a record may count for two files; `excluded_records` counts it once. `left_out` counts item
    parts that records do not hold, e.g. images. `labels` counts steps per label, e.g. `{"1": 7, "none": 2}`;
    `unlabelled` counts records without a label, `all_right` records with only label 1, `several` items that became
    several records. `rejections` counts the errors in `reasons` by kind, under the first error of each kind.
    """

    read: int = 0
    kept: int = 0
    steps: int = 0
    labels: dict[str, int] = dataclasses.field(default_factory=dict)
    dropped: dict[str, int] = dataclasses.field(default_factory=dict)
    left_out: dict[str, int] = dataclasses.field(default_factory=dict)
    excluded: dict[str, int] = dataclasses.field(default_factory=dict)
    excluded_records: int = 0
    unlabelled: int = 0
    all_right: int = 0
    repeated: int = 0
    rejected: int = 0
    reasons: list[str] = dataclasses.field(default_factory=list)
    rejections: dict[str, int] = dataclasses.field(default_factory=dict)
    several: int = 0
    other_part: int = 0


def prepare(
    name: str,
    source: Sequence[str | os.PathLike],
    out: str | os.PathLike,
    exclude: Sequence[str | os.PathLike] = (),
    on_error: str = "stop",
    *,
    sha256: Sequence[str] = (),
    overwrite: bool = False,
    duplicates: Literal["keep", "drop"] = "keep",
    near: float | None = None,
    parts: Mapping[str, float] | None = None,
    console: rich.console.Console | None = None,
    **options: Any,
) -> PrepareReport:
    """Reads source files into the folder `out`, which appears once it is complete; returns its report.

    Prints the counts. Waits for downloads.

    Args:
      name: a key of `jprm.methods.data.readers.READERS`, or your own reader as `module:NAME` or `FILE.py:NAME`.
      source: files (JSON Lines, JSON lists, Parquet, Arrow, CSV), also in a bucket, or URLs, e.g. `hf://datasets/...`.
        Downloads are stored in a folder `downloads` beside `out` (for a bucket, in jprm's cache) and must match a
        SHA-256, unless the address names a commit.
      out: the folder, also in a bucket. If the same request already wrote it, it is left alone and its report is
        returned.
      exclude: benchmark files in any supported format; records with one of their problems (compared by `normalise`) are
        left out.
      on_error: `stop` at the first bad item without writing the folder, or `skip` bad items and copy them to
        `out`/rejects.jsonl.
      sha256: further accepted checksums of downloads, besides the known releases.
      overwrite: replace an existing folder; the old one stays until the new one is complete.
      duplicates: `drop` leaves out records that repeat the problem and steps of an earlier record.
      near: the Jaccard similarity from which `exclude` and `duplicates` treat texts as equal (`overlap.Texts`).
      parts: the fraction of problems in each part, e.g. `{"held_out": 0.1}`, below 1 in all; a hash of the problem
        chooses. `out` then holds one folder per part, and `train` with the other problems. The report of `train` is
        returned.
      console: by default prints to stderr.
      options: reader options, and `split`, the list to read if the file holds several splits.

    Raises:
      RecordError: an item is bad and `on_error` is `stop`.
      ValueError: a name or option is unknown, there is no source, no record is left, a source changes meanwhile, a
        download has another checksum, or `out` holds something else or is being written.
      FileNotFoundError, OSError: a source or benchmark does not exist, or a download or writing failed.
      ImportError: an extra is missing: `parquet` for tables, or `near`.
    """
    console = console or rich.console.Console(stderr=True)
    out = path_of(out)
    request = dataclasses.replace(_request(name, source, exclude, on_error, options), duplicates=duplicates, near=near)
    if parts:
        return _prepare_parts(request, parts, out, sha256, overwrite, console)
    return _prepare(request, None, out, sha256, overwrite, console)


def _prepare(
    request: PrepareRequest,
    problems: Collection[str] | None,
    out: Place,
    sha256: Sequence[str],
    overwrite: bool,
    console: rich.console.Console,
) -> PrepareReport:
    """Writes the folder of records; `problems`, if given, selects them by problem key."""
    duplicates, name = request.duplicates, request.name
    if duplicates not in ("keep", "drop"):
        raise ValueError(f"duplicates is {duplicates!r}: use 'keep' or 'drop'")
    stored = _report_of(out) if is_whole(out) else None
    if inside := [path for path in request.sha256 if str(path_of(path).resolve()).startswith(f"{out.resolve()}/")]:
        raise ValueError(f"{inside[0]}: is in {out}, the folder to write: move it, or name another folder")
    if stored is not None and not overwrite:
        return _unchanged(out, stored, request, console)
    reader = readers.find(name)
    files = [_local(path, reader, out, sha256, console) for path in request.source]
    with whole_folder(out, replace=overwrite, last=REPORT) as work:
        report = _write(work, reader, files, request, problems, console)
        _print(report, console)
        if reader.drops:
            console.print(f"left out of every record: {reader.drops}", markup=False, highlight=False, soft_wrap=True)
        if report.kept == 0:
            left_out = "".join(f"; left out: {part}" for part in [*report.left_out][:3])
            raise ValueError(f"no record is left of {report.read:,} items read: nothing was written to {out}{left_out}")
        column = request.options.get("labels")
        if name == "columns" and column and report.unlabelled == report.kept:
            raise ValueError(f"no record has a label in {column!r}: name another column, or leave `labels` out")
        if changed := [path for path, sha256 in request.sha256.items() if _sha256(path) != sha256]:
            raise ValueError(f"{changed[0]}: changed while it was read; nothing was written to {out}. Run again")
        (work / REPORT).write_text(json.dumps(dataclasses.asdict(report), indent=2, ensure_ascii=False) + "\n", "utf-8")
    console.print(f"{out}: written", markup=False)
    return report


def _prepare_parts(
    request: PrepareRequest,
    parts: Mapping[str, float],
    out: Place,
    sha256: Sequence[str],
    overwrite: bool,
    console: rich.console.Console,
) -> PrepareReport:
    """Writes one folder per part and `train` with the rest. No problem is in two folders."""
    if "train" in parts or any(not 0 < share < 1 for share in parts.values()) or sum(parts.values()) >= 1:
        raise ValueError(f"parts are {dict(parts)}: give fractions below 1 in all; `train` has the rest")
    if bad := [name for name in parts if not re.fullmatch(r"[\w-]+", name)]:
        raise ValueError(f"part {bad[0]!r}: its name is that of a folder: letters, digits, - and _")
    reader = readers.find(request.name)
    files = [_local(path, reader, out / "train", sha256, console) for path in request.source]
    read = (reader.read(file, on_error="skip", rejects=_Ignored(), **request.options) for file in files)
    left = sorted({_problem_key(record) for records in read for _, record in records})
    said, of_all = ", ".join(f"{name}={share:g}" for name, share in parts.items()), len(left)
    for name, share in parts.items():
        count = max(1, round(share * of_all))
        if count >= len(left):
            raise ValueError(f"the sources have {of_all} problems, too few for {said} and train")
        chosen, left = set(left[:count]), left[count:]
        _prepare(dataclasses.replace(request, part=f"{name} of {said}"), chosen, out / name, sha256, overwrite, console)
    train = dataclasses.replace(request, part=f"train, without {said}")
    return _prepare(train, set(left), out / "train", sha256, overwrite, console)


def _problem_key(record: Record) -> str:
    """Returns the SHA-256 of the normalised problem; its order assigns problems to parts."""
    tree = check_record(record, "record")
    return hashlib.sha256(normalise(record["problem"] if tree is None else tree.problem).encode()).hexdigest()


class _Ignored(Rejects):
    """Discards rejects while problems are collected; they are counted later, when the parts are written."""

    def __init__(self):
        self.errors = []

    def add(self, line: bytes, error: RecordError) -> None:
        pass


def _request(name, source, exclude, on_error, options) -> PrepareRequest:
    """Checks the arguments and builds the request."""
    reader = readers.find(name)
    split = options.get("split")
    if split is not None and not isinstance(split, str):
        raise ValueError(f"split is {split!r}: give the name of a split")
    reading = {key: value for key, value in options.items() if key != "split"}
    chosen = dataclasses.asdict(choose(reader.options, reading)) | ({} if split is None else {"split": split})
    if not source:
        known = "".join(f"\n  {url}" for url in reader.releases) or " none"
        raise ValueError(f"no source: give the files of {name}, or the URLs of its public release:{known}")
    source, exclude = [os.fspath(path) for path in source], [os.fspath(path) for path in exclude]
    local = [path for path in source if not is_url(path)] + exclude
    for path in local:
        if not path_of(path).exists():
            raise FileNotFoundError(f"{path}: no such file. Give the path of a source or benchmark file.")
        check_input(path)
    sums = {path: _sha256(path) for path in local}
    return PrepareRequest(name, source, exclude, chosen, on_error, sums, code=code_of(reader))


def _sha256(path: str) -> str:
    return sha256_of(local_copy(records_file(path)))


def _report_of(out: Place) -> PrepareReport:
    try:
        return PrepareReport(**json.loads((out / REPORT).read_bytes()))
    except (OSError, *jsonl.DAMAGED):  # never replaced, not even by `overwrite`: it may be anything
        raise ValueError(f"{out} exists and is not a prepared folder: choose another name, or remove it") from None


def _unchanged(
    out: Place, stored: PrepareReport, request: PrepareRequest, console: rich.console.Console
) -> PrepareReport:
    """Returns the report of an existing folder. Raises ValueError if another request wrote it."""
    differ = differing({name: getattr(stored, name) for name in vars(request)}, vars(request))
    if differ:
        raise ValueError(f"{out} holds another preparation ({', '.join(differ)} differ): use another name or overwrite")
    tidy(out)
    console.print(f"{out}: is there already, with {stored.kept} records; nothing to do", markup=False)
    return stored


def _local(source: str, reader: Reader, out: Place, sha256: Sequence[str], console: rich.console.Console) -> Place:
    """Returns the path of a source, downloading it first if it is a URL."""
    if not is_url(source):
        return path_of(source)
    known = reader.releases.get(resolved(source))
    with _progress(console) as progress:
        task = progress.add_task(source, total=None)
        folder = cache_folder("downloads") if is_remote(out) else out.with_name("downloads")
        allowed = {*sha256, *([known] if known else [])}
        return path_of(fetch(source, folder, allowed, lambda n, total: progress.update(task, completed=n, total=total)))


class _Tally:
    def __init__(self, request: PrepareRequest, problems: Collection[str] | None):
        self._problems = problems
        self.counts: collections.Counter[str] = collections.Counter()  # by their names in the report
        self.labels, self.dropped, self.left_out = (collections.Counter[str]() for _ in range(3))
        self.excluded = collections.Counter(dict.fromkeys(request.exclude, 0))
        self._banned = {path: Texts(problems_in(path), request.near) for path in request.exclude}
        self._kept = Texts(near=request.near) if request.duplicates == "drop" else None

    def keeps(self, record: Record) -> bool:
        """Counts a record and decides whether to keep it.

        It must belong to this part, must not be in a benchmark, and must not repeat an earlier record.
        """
        if self._problems is not None and _problem_key(record) not in self._problems:
            self.counts["other_part"] += 1
            return False
        texts = {normalise(text) for text in problems_of(record)} if self._banned else set()
        hits = [file for file, problems in self._banned.items() if any(map(problems.holds, texts))]
        self.excluded.update(hits)
        if hits:
            self.counts["excluded_records"] += 1
            return False
        tree = check_record(record, "record") or ReasoningTree(record["problem"], ())
        texts = [tree.problem, *(node.text for node in tree.nodes)]
        if tree.of_messages:  # calls are said beside the text
            texts = [dump(message) for message in messages_of(tree, range(len(tree.nodes)))]
        if self._kept is not None and self._kept.add(normalise("\n".join(texts))):
            self.counts["repeated"] += 1
            return False
        labels = [tree.nodes[i].label for i in tree.steps]
        self.labels.update("none" if label is None else f"{label:g}" for label in labels)
        self.counts.update(steps=len(labels), unlabelled=int(set(labels) <= {None}), all_right=int(set(labels) == {1}))
        return True

    def report(self, request: PrepareRequest, kept: int, rejects: Rejects) -> PrepareReport:
        about: dict[str, Any] = dict(self.counts, kept=kept, rejected=rejects.count)
        about |= {"labels": dict(self.labels.most_common()), "reasons": [str(error) for error in rejects.errors]}
        about |= {"dropped": dict(self.dropped), "excluded": dict(self.excluded)}
        about |= {"left_out": dict(self.left_out.most_common()), "rejections": _by_kind(rejects.errors)}
        return PrepareReport(**vars(request), **about)


def _by_kind(errors: Sequence[RecordError]) -> dict[str, int]:
    """Groups errors that differ only in numbers and quoted texts; returns the first of each group with its count."""
    kinds: dict[tuple[str, str], list[RecordError]] = {}
    for error in errors:
        kind = re.sub(r"\d+", "0", error.field), re.sub(r"'[^']*'|\"[^\"]*\"|\d+", "0", error.reason)
        kinds.setdefault(kind, []).append(error)
    most = sorted(kinds.values(), key=len, reverse=True)
    return {shortened(str(same[0]), 400): len(same) for same in most}


def _write(
    work: pathlib.Path,
    reader: Reader,
    files: Collection[Place],
    request: PrepareRequest,
    problems: Collection[str] | None,
    console: rich.console.Console,
) -> PrepareReport:
    tally, first_of = _Tally(request, problems), {}
    megabytes = sum(stamp_of(path)["bytes"] for path in files) / 1e6

    def records(rejects: Rejects, bar: Bar) -> Iterator[tuple[str, Record]]:
        def advance(count: int) -> None:
            tally.counts["read"] += 1
            bar.add(count / 1e6)

        for index, path in enumerate(files):
            bar.add(0, path.name)
            read = reader.read(
                path,
                on_error=request.on_error,
                rejects=rejects,
                on_drop=lambda reason: tally.dropped.update([reason]),
                on_left_out=lambda left: tally.left_out.update({left.what: left.count}),
                on_bytes=advance,
                first_of=first_of,
                **request.options,
            )
            for key, record in read:
                tally.counts["several"] += key.endswith(".1")
                if tally.keeps(record):
                    yield f"{index}.{key}", record

    bar = Bar("MB read", int(megabytes), shown=megabytes >= SHOWN_MB)
    with Rejects(work / "rejects.jsonl") as rejects, bar:
        kept = write_folder(work, records(rejects, bar))
    return tally.report(request, kept, rejects)


SHOWN_MB = 10
"""Progress is shown from this file size on (in megabytes)."""


def _progress(console: rich.console.Console) -> rich.progress.Progress:
    return rich.progress.Progress(
        rich.progress.TextColumn("{task.description}", markup=False),
        rich.progress.BarColumn(),
        rich.progress.DownloadColumn(),
        rich.progress.TimeRemainingColumn(),
        console=console,
        transient=True,
    )


def _print(report: PrepareReport, console: rich.console.Console) -> None:
    console.print(jsonl.printable(f"{report.name}: {', '.join(report.source)}"), markup=False, soft_wrap=True)
    table = rich.table.Table(show_header=False)
    table.add_column(overflow="fold")  # a reason or path goes on in the next line
    table.add_column(no_wrap=True, justify="right")
    rows = [("items read", report.read), ("records kept", report.kept), ("steps", report.steps)]
    rows += [("items that became several records", report.several)] if report.several else []
    rows += [(f"of other parts ({report.part})", report.other_part)] if report.part else []
    rows += [(f"  label {label}", count) for label, count in list(report.labels.items())[:8]]
    rows += [("records without a label", report.unlabelled), ("records with only label 1", report.all_right)]
    rows += [(f"dropped: {reason}", count) for reason, count in report.dropped.items()]
    rows += [(f"left out: {part}", count) for part, count in report.left_out.items()]
    rows += [(f"excluded, in {file}", count) for file, count in report.excluded.items()]
    rows += [("repeated", report.repeated)] if report.duplicates == "drop" else []
    rows += [("rejected", report.rejected), *((f"  {first}", n) for first, n in list(report.rejections.items())[:8])]
    more = "  and more, see report.json" if report.kept else "  and more"  # without a record, no folder is written
    rows += [(more, "")] if len(report.rejections) > 8 else []
    for what, count in rows:
        table.add_row(rich.markup.escape(jsonl.printable(what)), f"{count:,}" if isinstance(count, int) else count)
    console.print(table)


# ---- Downloads of public releases, each with a checksum.

_CHUNK = 1 << 20

_PATIENCE_S, _SLOWEST = 60.0, 10_000
"""A download is aborted if, after this many seconds, it was slower than this many bytes per second."""
_HUB = re.compile(r"hf://datasets/([^/@]+/[^/@]+)(?:@(refs/(?:convert|pr)/[^/]+|[^/]+))?/(.+)")


_PINNED = re.compile(
    r"hf://datasets/[^/@]+/[^/@]+@[0-9a-f]{40}/.+|https://raw\.githubusercontent\.com/[^/]+/[^/]+/[0-9a-f]{40}/.+"
)
"""Addresses with a commit hash, which fixes the content. They need no checksum."""


def is_url(source: str | os.PathLike) -> bool:
    return urllib.parse.urlsplit(os.fspath(source)).scheme in ("http", "https", "file", "hf")


def resolved(url: str) -> str:
    """Returns the HTTP address of `hf://datasets/OWNER/NAME[@REVISION]/FILE`; other URLs unchanged.

    The revision is by default `main`. The environment variable HF_ENDPOINT names a mirror of the Hugging Face Hub.
    Raises ValueError for other `hf://` forms.
    """
    if not url.startswith("hf:"):
        return url
    match = _HUB.fullmatch(url)
    if match is None:
        raise ValueError(f"{url}: is not of the form hf://datasets/OWNER/NAME[@REVISION]/FILE")
    name, revision, file = match[1], urllib.parse.quote(match[2] or "main", safe=""), urllib.parse.quote(match[3])
    endpoint = os.environ.get("HF_ENDPOINT", "https://huggingface.co").rstrip("/")
    return f"{endpoint}/datasets/{name}/resolve/{revision}/{file}"


def fetch(
    url: str,
    folder: str | os.PathLike,
    allowed: Collection[str],
    on_bytes: Callable[[int, int | None], None] = lambda done, total: None,
) -> pathlib.Path:
    """Downloads a URL into `folder`, unless a valid copy is there; returns the file's path. Waits until it is whole.

    A copy is valid if its SHA-256 is among `allowed` (hex digits), or its address names the same commit. The folder is
    made if absent, and the file replaced atomically. `on_bytes` gets the bytes so far and the total, `None` if unknown.

    Raises:
      ValueError: `allowed` is empty and the address names no commit, the download has another checksum, `url` is
        malformed, or another process is downloading it. An earlier file stays.
      OSError: the download failed, was too slow, or could not be written.
    """
    pinned = not allowed and _PINNED.fullmatch(url) is not None
    if not allowed and not pinned:
        remedy = "Name a commit as its revision (@ and 40 digits), pass the checksum you trust with --sha256, or a file"
        raise ValueError(f"{url}: no SHA-256 is known for it. {remedy}")
    address = resolved(url)
    name = pathlib.PurePosixPath(urllib.parse.urlsplit(address).path).name
    if pinned:  # many files share a name; the digest tells them apart
        name = f"{hashlib.sha256(address.encode()).hexdigest()[:12]}-{name}"
    path = pathlib.Path(folder) / name
    if path.is_file() and (pinned or sha256_of(path) in allowed):
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    digest, done, begin = hashlib.sha256(), 0, time.monotonic()
    with only_run(path), atomic_file(path) as file, urllib.request.urlopen(address, timeout=_PATIENCE_S) as response:
        length = response.headers.get("Content-Length") or ""
        total = int(length) if re.fullmatch("[0-9]{1,18}", length) else None
        if response.headers.get("Content-Encoding", "identity") != "identity":
            raise OSError(f"{url}: the server compresses it, which was not requested")
        while chunk := response.read1(_CHUNK):  # and not `read`, which waits for all of a chunk
            file.write(chunk)
            digest.update(chunk)
            done += len(chunk)
            on_bytes(done, total)
            if (seconds := time.monotonic() - begin) > _PATIENCE_S and done < _SLOWEST * seconds:
                raise OSError(f"{url}: sent {done:,} bytes in {seconds:.0f} s. Run the same command again")
        if total is not None and done != total:
            raise OSError(f"{url}: ended after {done:,} of {total:,} bytes. Run the same command again")
        if not pinned and digest.hexdigest() not in allowed:
            reason = f"its SHA-256 is {digest.hexdigest()}, not {' or '.join(sorted(allowed))}"
            raise ValueError(f"{url}: {reason}. Check it; if you trust it, pass its checksum with --sha256")
    return path


# ----------------------------------------------------------------------------------------------------------- the folder


class Records(tfds.core.GeneratorBasedBuilder):
    """The TFDS builder of prepared folders: a reader's records, in order, as the split `train`.

    Each record is one line of JSON in a `Text` feature, so it comes back exactly, with unknown keys. Trees differ in
    keys and depth, so a fixed feature spec would have to pad and rename them.
    """

    VERSION = tfds.core.Version("1.0.0")

    def __init__(self, records: Iterable[tuple[str, Record]], **kwargs: Any):
        self._records = records
        super().__init__(file_format="array_record", **kwargs)  # the default, TFRECORD, needs TensorFlow

    def _info(self) -> tfds.core.DatasetInfo:
        features = tfds.features.FeaturesDict({"record": tfds.features.Text()})
        info = tfds.core.DatasetInfo(builder=self, features=features, disable_shuffling=True)
        info.initialize_from_bucket = lambda: None  # it would ask a server, and leaves a folder in /tmp
        return info

    def _split_generators(self, dl_manager: tfds.download.DownloadManager) -> dict[str, Any]:
        return {"train": self._generate_examples()}

    def _generate_examples(self) -> Iterator[tuple[str, dict[str, str]]]:
        for key, record in self._records:
            yield key, {"record": jsonl.dump(record)}


def write_folder(folder: pathlib.Path, records: Iterable[tuple[str, Record]]) -> int:
    """Writes (unique key, record) pairs into an existing local folder, in order; returns their number.

    The folder becomes a TFDS dataset, split `train`, of one JSON text (`record`) each. For 0 pairs no files are
    written. Not atomic: the caller must remove the folder after an error.

    Raises:
      Exception: an error of the iterable, unchanged.
      OSError: writing failed, e.g. because the disk is full.
    """
    count, failure = 0, None

    def watched() -> Iterator[tuple[str, Record]]:  # TFDS rewrites the messages of errors that pass through it
        nonlocal count, failure
        try:
            for pair in records:
                count += 1
                yield pair
        except Exception as error:  # of a reader, of any class: raised again below as it was
            failure = error
            raise

    tfds.disable_progress_bar()
    work = folder / "tfds"
    builder = Records(watched(), data_dir=work)
    try:
        with contextlib.redirect_stdout(io.StringIO()):  # it announces a download
            builder.download_and_prepare()
    except Exception as error:  # TFDS has no class for "no records", nor for an error of the iterable
        if failure is None and count > 0:
            raise OSError(errno.EIO, f"could not be written: {error}", os.fspath(folder)) from error
    if failure is not None:
        raise failure
    if count == 0:
        return 0
    for file in pathlib.Path(builder.data_dir).iterdir():
        file.rename(folder / file.name)
    shutil.rmtree(work)
    return count
