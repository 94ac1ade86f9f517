"""`prepare`: source files -> a folder of records, with an account of every item that went in."""

from __future__ import annotations

import collections
import dataclasses
import json
import os
import pathlib
import shutil
from collections.abc import Iterator, Sequence
from typing import Any

import rich.console
import rich.markup
import rich.progress
import rich.table

from jprm import jsonl
from jprm.data import REPORT, store
from jprm.data.fetch import fetch, is_url, sha256_of
from jprm.data.overlap import normalise, problems_in, problems_of
from jprm.data.reader import Reader, Record, choose
from jprm.data.readers import READERS
from jprm.tree import tree_of


@dataclasses.dataclass(frozen=True)
class PrepareReport:
    """What became of every item, as `report.json` in the folder has it.

    `read` items = those rejected, dropped by the options, excluded, or kept. `excluded` counts records for each
    benchmark file that holds their problem: one may count for two files; `excluded_records` counts each once.
    `sha256` holds the checksum of every local file that was read: with the five fields before it, it is the request.
    """

    name: str
    source: list[str]
    exclude: list[str]
    options: dict[str, Any]
    on_error: str
    sha256: dict[str, str]
    read: int = 0
    kept: int = 0
    steps: int = 0
    labels: dict[str, int] = dataclasses.field(default_factory=dict)
    dropped: dict[str, int] = dataclasses.field(default_factory=dict)
    excluded: dict[str, int] = dataclasses.field(default_factory=dict)
    excluded_records: int = 0
    rejected: int = 0
    reasons: list[str] = dataclasses.field(default_factory=list)


def prepare(
    name: str,
    source: Sequence[str | os.PathLike],
    out: str | os.PathLike,
    exclude: Sequence[str | os.PathLike] = (),
    on_error: str = "stop",
    *,
    sha256: Sequence[str] = (),
    overwrite: bool = False,
    console: rich.console.Console | None = None,
    **options: Any,
) -> PrepareReport:
    """Reads source files into the folder `out`, which appears when all of it is written.

    Args:
      name: a key of `READERS`.
      source: local files, or URLs, which are downloaded beside `out` and must match a SHA-256.
      out: the folder. One that is there already from the same request is left as it is, and its report returned.
      exclude: benchmark files, in any format that jprm reads; records of their problems are left out, by
        `normalise`d text.
      on_error: `stop` at the first bad item, leaving nothing; `skip` writes them, byte for byte, to
        `out`/rejects.jsonl.
      sha256: checksums that downloads may have, beside those of the known releases.
      overwrite: replace a folder that is there; the old one stays until the new one is whole.
      console: where to print; stderr by default.
      options: of the reader.

    Raises:
      RecordError: a bad item, for `stop`.
      ValueError: an unknown name or option, no source, nothing kept, or `out` holds something else.
      FileNotFoundError: a source or benchmark that is not there.
    """
    console = console or rich.console.Console(stderr=True)
    out = pathlib.Path(out)
    if name not in READERS:
        raise ValueError(f"no reader is called {name!r}: use one of {', '.join(READERS)}")
    reader = READERS[name]
    chosen = dataclasses.asdict(choose(reader.options, options))
    if not source:
        known = "".join(f"\n  {url}" for url in reader.releases) or " none"
        raise ValueError(f"no source: give the files of {name}, or the URLs of its public release:{known}")
    if on_error not in ("stop", "skip"):
        raise ValueError(f"on_error is {on_error!r}: use 'stop' or 'skip'")
    paths = [os.fspath(path) for path in (*source, *exclude)]
    for path in paths:
        if not is_url(path) and not os.path.isfile(path):
            raise FileNotFoundError(f"{path}: no such file. Give the path of a source or benchmark file.")
    sums = {path: sha256_of(path) for path in paths if not is_url(path)}
    report = PrepareReport(name, paths[: len(source)], paths[len(source) :], chosen, on_error, sums)
    there = _report_of(out) if out.exists() else None
    if there is not None and not overwrite:
        return _there_already(out, there, report, console)

    files = [_local(path, reader, out, sha256, console) for path in source]
    banned = {os.fspath(path): problems_in(path) for path in exclude}
    work = out.with_name(out.name + ".partial")
    with jsonl.only_run(work):
        shutil.rmtree(work, ignore_errors=True)  # of a run that was killed
        work.mkdir(parents=True)
        try:
            report = _write(work, reader, files, banned, report, console)
            if report.kept == 0:
                _print(report, console)
                raise ValueError(f"no record is left of {report.read:,} items read: nothing was written to {out}")
            (work / REPORT).write_text(json.dumps(dataclasses.asdict(report), indent=2, ensure_ascii=False) + "\n")
            _replace(work, out)
        finally:
            shutil.rmtree(work, ignore_errors=True)
    _print(report, console)
    console.print(f"{out}: written")
    return report


def _report_of(out: pathlib.Path) -> PrepareReport:
    try:
        return PrepareReport(**json.loads((out / REPORT).read_text()))
    except (OSError, ValueError, TypeError):  # never replaced, not even by `overwrite`: it may be anything
        raise ValueError(f"{out} exists and is not a prepared folder: choose another name, or remove it") from None


def _there_already(
    out: pathlib.Path, there: PrepareReport, wanted: PrepareReport, console: rich.console.Console
) -> PrepareReport:
    request = [field.name for field in dataclasses.fields(wanted)[:6]]
    differ = [name for name in request if getattr(there, name) != getattr(wanted, name)]
    if differ:
        raise ValueError(f"{out} holds another preparation ({', '.join(differ)} differ): use another name or overwrite")
    console.print(f"{out}: is there already, with {there.kept} records; nothing to do")
    return there


def _local(
    source: str | os.PathLike, reader: Reader, out: pathlib.Path, sha256: Sequence[str], console: rich.console.Console
) -> pathlib.Path:
    if not is_url(source):
        return pathlib.Path(source)
    known = reader.releases.get(os.fspath(source))
    with rich.progress.Progress(*_columns(), console=console, transient=True) as progress:
        task = progress.add_task(os.fspath(source), total=None)
        folder = out.with_name("downloads")
        return fetch(
            os.fspath(source),
            folder,
            {*sha256, *([known] if known else [])},
            lambda done, total: progress.update(task, completed=done, total=total),
        )


def _write(
    work: pathlib.Path,
    reader: Reader,
    files: Sequence[pathlib.Path],
    banned: dict[str, set[str]],
    report: PrepareReport,
    console: rich.console.Console,
) -> PrepareReport:
    read, steps, excluded_records = 0, 0, 0
    dropped, labels, excluded = (
        collections.Counter(),
        collections.Counter(),
        collections.Counter(dict.fromkeys(banned, 0)),
    )

    def records(rejects: jsonl.Rejects, progress: rich.progress.Progress) -> Iterator[tuple[str, Record]]:
        nonlocal read, steps, excluded_records

        for index, path in enumerate(files):
            task = progress.add_task(path.name, total=path.stat().st_size)

            def advance(count: int, task: rich.progress.TaskID = task) -> None:
                nonlocal read
                read += 1
                progress.advance(task, count)

            found = reader.read(
                path,
                on_error=report.on_error,
                rejects=rejects,
                on_drop=lambda reason: dropped.update([reason]),
                on_bytes=advance,
                **report.options,
            )
            for key, record in found:
                texts = {normalise(text) for text in problems_of(record)}
                hits = [file for file, problems in banned.items() if texts & problems]
                if hits:
                    excluded.update(hits)
                    excluded_records += 1
                    continue
                nodes = tree_of(record).nodes
                steps += len(nodes)
                labels.update("none" if node.label is None else f"{node.label:g}" for node in nodes)
                yield f"{index}.{key}", record

    with (
        jsonl.Rejects(work / "rejects.jsonl") as rejects,
        rich.progress.Progress(*_columns(), console=console, transient=True) as progress,
    ):
        kept = store.write(work, records(rejects, progress))
    return dataclasses.replace(
        report,
        read=read,
        kept=kept,
        steps=steps,
        labels=dict(labels.most_common()),
        dropped=dict(dropped),
        excluded=dict(excluded),
        excluded_records=excluded_records,
        rejected=rejects.count,
        reasons=[str(error) for error in rejects.errors],
    )


def _replace(work: pathlib.Path, out: pathlib.Path) -> None:
    old = out.with_name(out.name + ".old")
    shutil.rmtree(old, ignore_errors=True)
    if out.exists():
        out.rename(old)
    work.rename(out)
    shutil.rmtree(old, ignore_errors=True)


def _columns() -> list[rich.progress.ProgressColumn]:
    return [
        rich.progress.TextColumn("{task.description}"),
        rich.progress.BarColumn(),
        rich.progress.DownloadColumn(),
        rich.progress.TimeRemainingColumn(),
    ]


def _print(report: PrepareReport, console: rich.console.Console) -> None:
    console.print(rich.markup.escape(f"{report.name}: {', '.join(report.source)}"), soft_wrap=True)
    table = rich.table.Table(show_header=False)
    rows = [("items read", report.read), ("records kept", report.kept), ("steps", report.steps)]
    rows += [(f"  label {label}", count) for label, count in list(report.labels.items())[:8]]
    rows += [(f"dropped by the options: {reason}", count) for reason, count in report.dropped.items()]
    rows += [(f"excluded, in {file}", count) for file, count in report.excluded.items()]
    rows += [("rejected", report.rejected)] + [(f"  {reason}", "") for reason in report.reasons[:8]]
    more = "  and more, see report.json" if report.kept else "  and more"  # without a record, no folder is written
    rows += [(more, "")] if len(report.reasons) > 8 else []
    for what, count in rows:
        table.add_row(rich.markup.escape(what), f"{count:,}" if isinstance(count, int) else count)
    console.print(table)
