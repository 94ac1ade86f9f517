"""Scored files: written a chunk at a time, renamed when whole, continued if interrupted, reused when finished."""

from __future__ import annotations

import json
import os
import pathlib
from collections.abc import Iterable
from itertools import islice
from typing import Any

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from jprm.jsonl import Rejects, atomic_file, dump, read_lines, read_records
from jprm.model.int8 import Dtype
from jprm.score.scorer import CHUNK, PRM, load


def score_file(
    model: str | os.PathLike, input: str | os.PathLike, output: str | os.PathLike, *, on_error: str = "stop",
    dtype: Dtype | None = None, adapter: str | None = None,
) -> str:  # fmt: skip
    """Scores a JSON Lines file of chains, pools or trees; returns a sentence that says what was done.

    `dtype` is what the model's parameters are held in, and `adapter` how it is read, as in `jprm.load`.

    With on_error='skip', lines that are no record go to `OUTPUT.rejects`, byte for byte.
    """
    output = pathlib.Path(output)
    total = sum(1 for _ in read_lines(input))
    prm = load(model, dtype=dtype, adapter=adapter)
    with Rejects(output.with_name(output.name + ".rejects")) as rejects:
        asked = {"dtype": dtype} if dtype else {}
        records = read_records(input, on_error=on_error, rejects=rejects)
        there = write_scores(prm, records, output, request_of(prm, input, **asked), total)
        for _ in records:  # not read where the output was finished; its rejects are to stay
            pass
        rejected = f", {rejects.count} rejected" if rejects.count else ""
    again = f" ({there} were there already)" if there else ""
    return f"{output}: {sum(1 for _ in read_lines(output))} records scored{again}{rejected}"


def request_of(prm: PRM, input: str | os.PathLike, **more: Any) -> dict[str, Any]:
    """What the scores depend on: the model and its step, the input and its age, and whatever else the caller names."""
    stat = os.stat(input)
    return {"model": prm.name, "step": prm.step, "input": os.path.abspath(input), "bytes": stat.st_size,
            "modified": stat.st_mtime_ns, **more}  # fmt: skip


def write_scores(
    prm: PRM, records: Iterable[dict[str, Any]], output: str | os.PathLike, request: dict[str, Any], total: int | None
) -> int:
    """Writes the scored records to `output`; returns how many were there from an earlier, interrupted call.

    Lines go to `OUTPUT.part`; `OUTPUT.info.json` holds the request. A call with the same request continues behind the
    last whole chunk, or does nothing where `output` is finished. Another request raises ValueError and touches nothing.
    """
    output = pathlib.Path(output)
    part, info = output.with_name(output.name + ".part"), output.with_name(output.name + ".info.json")
    output.parent.mkdir(parents=True, exist_ok=True)
    if part.exists() and part.stat().st_size == 0:
        part.unlink()  # of a call that stopped before anything was scored
    same = info.exists() and json.loads(info.read_text()) == request
    for path in (output, part):
        if path.exists() and not same:
            raise ValueError(
                f"{path}: is there, but of another model, input or request. Remove it or name another file"
            )
    if output.exists():
        return sum(1 for _ in read_lines(output))
    with atomic_file(info) as file:
        file.write((json.dumps(request, indent=2) + "\n").encode())
    with part.open("a+b") as file:
        file.seek(0)
        there, end = 0, 0
        for count, line in enumerate(iter(file.readline, b""), start=1):
            if count % CHUNK == 0 and line.endswith(b"\n"):
                there, end = count, file.tell()
        file.truncate(end)  # records scored together before are so again: neighbours matter to a score's last digit
        records = iter(records)
        for _ in islice(records, there):
            pass
        columns = TextColumn(f"scoring {output.name}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
        with Progress(*columns) as bar:
            task = bar.add_task("", total=total, completed=there)
            for count, record in enumerate(prm.score_many(records), start=1):
                file.write(dump(record).encode() + b"\n")
                if count % CHUNK == 0:
                    file.flush()
                bar.advance(task)
    os.replace(part, output)
    return there
