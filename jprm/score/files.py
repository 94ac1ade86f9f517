"""Scored files: written a chunk at a time, renamed when whole, continued if interrupted, reused when finished."""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import tempfile
from collections.abc import Iterable
from itertools import islice
from typing import Any

import jax
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from jprm import processes
from jprm.evaluate.recalibration import Recalibration
from jprm.jsonl import Rejects, atomic_file, dump, read_lines, read_records
from jprm.model.config import Attention
from jprm.model.int8 import Dtype
from jprm.score.calibrated import mapped, stored_calibration
from jprm.score.scorer import CHUNK, PRM, load
from jprm.score.together import score_many


def score_file(
    model: str | os.PathLike, input: str | os.PathLike, output: str | os.PathLike, *, on_error: str = "stop",
    dtype: Dtype | None = None, adapter: str | None = None, attention: Attention | None = None,
    calibrated: bool = False,
) -> str:  # fmt: skip
    """Scores a JSON Lines file of chains, pools or trees; returns a sentence that says what was done.

    `dtype`, `adapter` and `attention` are those of `jprm.load`. With on_error='skip', lines that are no record go to
    `OUTPUT.rejects`, byte for byte. With `calibrated`, scores go through the map of `jprm.score.calibrated`, which
    raises where the model has none.
    """
    output = pathlib.Path(output)
    if jax.process_count() > 1 and not processes.everywhere(pathlib.Path(input).is_file()):
        raise ValueError(f"{input}: is not there on every host; input, output and model lie where all can read")
    total = sum(1 for _ in read_lines(input))
    prm = load(model, dtype=dtype, adapter=adapter, attention=attention)
    calibration = stored_calibration(prm) if calibrated else None
    asked = {name: value for name, value in {"dtype": dtype, "attention": attention}.items() if value}
    asked |= {"calibration": calibration.to_json()} if calibration else {}
    with contextlib.ExitStack() as stack:
        kept = output.parent if processes.is_first() else stack.enter_context(tempfile.TemporaryDirectory())
        rejects = stack.enter_context(Rejects(pathlib.Path(kept) / (output.name + ".rejects")))
        records = read_records(input, on_error=on_error, rejects=rejects)
        there = write_scores(prm, records, output, request_of(prm, input, **asked), total, calibration)
        for _ in records:  # not read where the output was finished; its rejects are to stay
            pass
        rejected = f", {rejects.count} rejected" if rejects.count else ""
    again = f" ({there} were there already)" if there else ""
    written = processes.first(lambda: sum(1 for _ in read_lines(output)))
    return f"{output}: {written} records scored{again}{rejected}"


def request_of(prm: PRM, input: str | os.PathLike, **more: Any) -> dict[str, Any]:
    """What the scores depend on: the model and its step, the input and its age, and whatever else the caller names."""
    stat = os.stat(input)
    return {"model": prm.name, "step": prm.step, "input": os.path.abspath(input), "bytes": stat.st_size,
            "modified": stat.st_mtime_ns, **more}  # fmt: skip


def write_scores(
    prm: PRM,
    records: Iterable[dict[str, Any]],
    output: str | os.PathLike,
    request: dict[str, Any],
    total: int | None,
    calibration: Recalibration | None = None,
) -> int:
    """Writes the scored records to `output`; returns how many were there from an earlier, interrupted call.

    Lines go to `OUTPUT.part`; `OUTPUT.info.json` holds the request. A call with the same request continues behind the
    last whole chunk, or does nothing where `output` is finished. Another request raises ValueError and touches nothing.

    Of several processes, which all call this, each scores its share, and the first writes.
    """
    output = pathlib.Path(output)
    part = output.with_name(output.name + ".part")
    finished, there = processes.first(lambda: _begin(output, part, request))
    if finished:
        return there
    lines = score_many(prm, islice(records, there, None))
    if not processes.is_first():
        for _ in lines:
            pass
        return there
    columns = TextColumn(f"scoring {output.name}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    with part.open("ab") as file, Progress(*columns) as bar:
        task = bar.add_task("", total=total, completed=there)
        for count, record in enumerate(lines, start=1):
            record = record if calibration is None else mapped(calibration, record)
            file.write(dump(record).encode() + b"\n")
            if count % CHUNK == 0:
                file.flush()
            bar.advance(task)
    os.replace(part, output)
    return there


def _begin(output: pathlib.Path, part: pathlib.Path, request: dict[str, Any]) -> tuple[bool, int]:
    """(whether the output is finished, the records that are there): `part` ends with a whole chunk afterwards."""
    info = output.with_name(output.name + ".info.json")
    output.parent.mkdir(parents=True, exist_ok=True)
    if part.exists() and part.stat().st_size == 0:
        part.unlink()  # of a call that stopped before anything was scored
    before = json.loads(info.read_text()) if info.exists() else {}
    differ = [name for name in {**request, **before} if request.get(name) != before.get(name)]
    for path in (output, part):
        if path.exists() and differ:
            raise ValueError(
                f"{path}: is there, but of another model, input or request ({', '.join(differ)}). Remove it or name"
                " another file"
            )
    if output.exists():
        return True, sum(1 for _ in read_lines(output))
    with atomic_file(info) as file:
        file.write((json.dumps(request, indent=2) + "\n").encode())
    with part.open("a+b") as file:
        file.seek(0)
        there, end = 0, 0
        for count, line in enumerate(iter(file.readline, b""), start=1):
            if count % CHUNK == 0 and line.endswith(b"\n"):
                there, end = count, file.tell()
        file.truncate(end)  # records scored together before are so again: neighbours matter to a score's last digit
    return False, there
