"""Runs while they train: their metrics over HTTP, as far as they are written, for a page that draws them."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import hashlib
import io
import json
import math
import os
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import IO, Annotated, Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from jprm.apps.report.runs import METRICS, differing, find_runs, flat, heads_of, left_out, names_of, setting
from jprm.apps.web.http import Refusal, RequestFields, files_of, read_request
from jprm.experiment import RUN
from jprm.io.jsonl import parse
from jprm.io.storage import Place, path_of
from jprm.tree import RecordError

FILES = files_of("jprm.apps.web", "base.css", "app.css", "call.js", "chain.js", at="/runs/")
FILES |= files_of("jprm.apps.serve", "runs.css", "runs.js", at="/runs/")
"""The page's files."""

PART = 2**20
"""Bytes of metrics that one answer reads at most."""

LONGEST_LINE = 2**24
"""Bytes of a line beyond a part."""

LOOK_SECONDS = 60
"""How often the folders are searched for what is not shown, which walks through all of them."""


class Runs:
    """The runs in some folders, those that appear later in a folder of runs included.

    Raises FileNotFoundError for a folder that is no run and has none.
    """

    def __init__(self, folders: Sequence[str | os.PathLike]):
        self._folders = folders
        self._looked, self._left_out = -math.inf, []
        find_runs(folders)

    def by_name(self) -> dict[str, Place]:
        """Returns the runs' folders by their names, which leave out the path that all share."""
        folders = find_runs(self._folders)
        return dict(zip(names_of([os.fspath(folder) for folder in folders]), folders, strict=True))

    def states(self) -> dict[str, Any]:
        """Returns the list of runs, with the settings in which they differ, and what is in the folders beside them."""
        folders = self.by_name()
        configs = {name: _config(folder / RUN) for name, folder in folders.items()}
        settings = {name: flat(config) for name, config in configs.items()}
        heads = heads_of(differing(list(settings.values())))
        data = [
            _state(name, folder, configs[name])
            | {"settings": {head: setting(settings[name].get(field)) for field, head in heads.items()}}
            for name, folder in folders.items()
        ]
        if time.monotonic() > self._looked + LOOK_SECONDS:
            self._looked = time.monotonic()
            self._left_out = [f"{at} {reason}" for at, reason in left_out(self._folders, list(folders.values()))]
        return {"object": "list", "data": data, "left_out": self._left_out}


async def runs(request: Request) -> Response:
    """`GET /v1/runs`: every run, what it is to take, settings that differ, how long ago it wrote; what is left out."""
    return JSONResponse(await asyncio.to_thread(request.app.state.runs.states))


@dataclasses.dataclass(frozen=True, kw_only=True)
class LinesRequest(RequestFields):
    """New lines of a run's metrics."""

    run: Annotated[str, "Its id."] = ""
    file: Annotated[str, "Of the last answer."] = ""
    from_: Annotated[int, "`next` of the last answer.", {"minimum": 0}] = 0

    gives = {
        "lines": (Sequence[dict], "Metrics by name."),
        "next": (int, "Where to go on."),
        "file": (str, "What tells the file from another of its name."),
    }


async def metrics(request: Request) -> Response:
    """`GET /v1/runs/metrics`: the whole lines after a byte, and where to go on.

    A file that another has replaced, as when a run starts anew, is read from its beginning.
    """
    query: dict[str, Any] = dict(request.query_params)
    if re.fullmatch("[0-9]{1,15}", query.get("from", "")):
        query["from"] = int(query["from"])
    asked = read_request(LinesRequest, query)
    folder = (await asyncio.to_thread(request.app.state.runs.by_name)).get(asked.run)
    if folder is None:
        raise Refusal(404, f"there is no run {asked.run!r}", "run")
    try:
        lines = await asyncio.to_thread(read_lines, folder / METRICS, asked.file, asked.from_)
    except ValueError as error:
        raise Refusal(400, f"run {asked.run!r}: {METRICS} {str(error).partition(': ')[2]}", "run") from None
    return JSONResponse(lines)


@contextlib.contextmanager
def _opened(path: Place) -> Iterator[tuple[IO[bytes], str, int]]:
    """Opens a file; yields it, what tells it from another of its name, and its size."""
    path = path_of(path)
    path.check_readable()  # a pipe or a device in a folder that many share would hold the thread for ever
    if path.here is False:  # every object is a new one; those of one run begin with the same line
        content = path.read_bytes()
        yield io.BytesIO(content), hashlib.sha256(content.partition(b"\n")[0]).hexdigest()[:16], len(content)
        return
    with path.open("rb") as opened:
        about = os.fstat(opened.fileno())
        yield opened, f"{about.st_dev}-{about.st_ino}", about.st_size


def read_lines(path: Place, file: str, start: int) -> dict[str, Any]:
    """Returns the numbers of the whole lines after byte `start`: `file`, `from`, `next`, `end` of the file and `lines`.

    Half a line, which is still being written, is left for the next call. Whole lines that are no JSON objects are left
    out and counted as `damaged`, and so is each part of an endless one. Without a file there are no lines.

    Raises ValueError for a pipe or a device.
    """
    try:
        with _opened(path) as (opened, now, size):
            start = start if file == now and start <= size else 0
            opened.seek(start)
            data = opened.read(PART)
            whole = data[: data.rfind(b"\n") + 1]
            if not whole and len(data) == PART:  # a line longer than a part
                data += opened.readline(LONGEST_LINE)
                whole = data if len(data) == PART + LONGEST_LINE else data[: data.rfind(b"\n") + 1]
    except FileNotFoundError:
        return {"file": "", "from": 0, "next": 0, "end": 0, "lines": [], "damaged": 0}
    lines, damaged = [], 0
    for line in whole.splitlines():
        try:
            value = json.loads(line, parse_constant=lambda name: None)  # NaN is no number that a page could draw
        except (ValueError, RecursionError):
            value = None
        if isinstance(value, dict):
            lines.append({k: v for k, v in value.items() if type(v) in (int, float) and math.isfinite(v)})
        else:
            damaged += 1
    end = max(size, start + len(whole))
    return {"file": now, "from": start, "next": start + len(whole), "end": end, "lines": lines, "damaged": damaged}


def _state(name: str, folder: Place, config: Mapping[str, Any]) -> dict[str, Any]:
    try:
        quiet: float | None = max(0.0, time.time() - (folder / METRICS).modified())
    except FileNotFoundError:
        quiet = None  # nothing is written yet
    return {"id": name, "experiment": config.get("name", name), "steps": config.get("steps"), "quiet_seconds": quiet}


def _config(path: Place) -> dict[str, Any]:
    """Returns a run's configuration, {} where it is just being replaced or is of no use."""
    try:
        config = parse(path.read_bytes(), path.name)
    except (OSError, RecordError):
        return {}
    return config if isinstance(config, dict) else {}
