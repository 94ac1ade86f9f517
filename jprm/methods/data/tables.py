"""Records as Parquet: what DuckDB, pandas and `datasets` read without parsing JSON, and evaluations without trees.

A folder of tables has one row a chain: a chain's record, a sample of a pool, also one without steps, or a leaf of a
tree. Its files hold the rows of whole records, in the records' order.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, cast

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from jaxtyping import Float, Int

from jprm.io.folders import whole_folder
from jprm.io.jsonl import dump
from jprm.io.outputs import check_version
from jprm.io.storage import path_of
from jprm.score.scale import PROBABILITY, Scale
from jprm.tree import Node, chains_of, tree_of

SCHEMA = pa.schema(
    [
        ("record", pa.int64()),  # from 0
        ("chain", pa.int32()),  # of the record, from 0
        ("kind", pa.string()),  # chain, pool or tree
        ("problem", pa.string()),
        ("gold", pa.string()),  # the problem's answer
        ("steps", pa.list_(pa.string())),
        ("scores", pa.list_(pa.float64())),  # null for a chain without; an item is null where a step has none
        ("labels", pa.list_(pa.float64())),
        ("semantics", pa.string()),  # of the labels
        ("answer", pa.string()),  # the chain's own
        ("correct", pa.bool_()),
        ("rest", pa.string()),  # JSON of the keys of the chain's last step or sample that have no column
    ]
)

VERSION = 1

MARK = "tables.json"
"""Names the format. It is written last."""


def write(
    records: Iterable[Mapping[str, Any]], out: str | os.PathLike, rows: int = 200_000, scale: Scale = PROBABILITY
) -> int:
    """Writes records as a folder of Parquet files of about `rows` rows each; returns how many rows.

    `scale` is what the scores mean, which evaluations of the folder take.

    Raises FileExistsError for a folder that is there, and RecordError for what is no record.
    """
    if path_of(out).exists():
        raise FileExistsError(f"{os.fspath(out)}: is there already; name another folder")
    written = 0
    of_records = (rows_of(record, number) for number, record in enumerate(records))
    with whole_folder(out, last=MARK) as folder:
        for part in itertools.count():
            group: list[dict[str, Any]] = []
            for row in of_records:
                group += row
                if len(group) >= rows:
                    break
            if not group:
                break
            pq.write_table(pa.Table.from_pylist(group, SCHEMA), folder / f"part-{part:05d}.parquet", compression="zstd")
            written += len(group)
        about = {"format": "jprm tables", "version": VERSION, "rows": written, "scale": dataclasses.asdict(scale)}
        (folder / MARK).write_text(json.dumps(about) + "\n")
    return written


def rows_of(record: Mapping[str, Any], number: int = 0) -> list[dict[str, Any]]:
    """Returns the rows of a record, those of samples without steps last. Raises RecordError."""
    tree = tree_of(record, f"record {number}")
    shared = {"record": number, "kind": tree.kind, "problem": tree.problem, "gold": _text(tree.answer)}
    shared["semantics"] = tree.semantics
    rows = []
    for chain in chains_of(tree):
        nodes, leaf = [tree.nodes[i] for i in chain], tree.nodes[chain[-1]]
        rest = {key: value for key, value in leaf.extra.items() if key != "answer"} | dict(leaf.outputs)
        rows.append(
            {
                **shared,
                "chain": len(rows),
                "steps": [node.text for node in nodes],
                "scores": _numbers(nodes, "score"),
                "labels": _numbers(nodes, "label"),
                "answer": _text(tree.answer if tree.kind == "chain" else leaf.extra.get("answer")),
                "correct": leaf.correct,
                "rest": dump(rest) if rest else None,
            }
        )
    for _ in range(int(tree.extra.get("empty_samples") or 0)):
        rows.append({**shared, "chain": len(rows), "steps": [], "correct": False})
    return rows


def read(path: str | os.PathLike, columns: list[str], rows: int = 65_536) -> Iterator[pa.Table]:
    """Yields some columns of a folder of tables, some rows at a time. Whole records stay in one file, not in one table.

    Raises ValueError for a folder that is none.
    """
    scale_of(path)  # a whole folder
    for file in path_of(path).files():
        if not file.name.endswith(".parquet"):
            continue
        table = pq.ParquetFile(str(file))
        if lacking := set(columns) - set(table.schema_arrow.names):
            names = ", ".join(sorted(lacking))
            raise ValueError(f"{file}: has no column {names}. Write the folder with `jprm tabulate` again")
        for batch in table.iter_batches(rows, columns=columns):
            yield pa.Table.from_batches([batch])


def scale_of(path: str | os.PathLike) -> Scale:
    """Returns what the scores of a folder of tables mean. Raises ValueError for another folder, or a newer version."""
    try:
        about = json.loads((path_of(path) / MARK).read_bytes())
        version, scale = about["version"], Scale(**about["scale"])
    except (OSError, ValueError, TypeError, KeyError):
        raise ValueError(f"{os.fspath(path)}: is no folder of `jprm tabulate`, or one that is not whole") from None
    check_version(version, VERSION, path_of(path) / MARK)
    return scale


def characters_of(table: pa.Table) -> tuple[Int[np.ndarray, " B"], Int[np.ndarray, " M"]]:
    """Returns how many steps each row has, and each step's characters."""
    steps = cast(pa.ListArray, table["steps"].combine_chunks())
    count_B = steps.value_lengths().fill_null(0).to_numpy(zero_copy_only=False)
    return count_B, pc.call_function("utf8_length", [steps.flatten()]).to_numpy(zero_copy_only=False)


def numbers_of(table: pa.Table, name: str) -> tuple[Int[np.ndarray, " B"], Float[np.ndarray, " M"]]:
    """Returns how many numbers a column of lists has in each row, and all of them, NaN where one is absent."""
    lists = cast(pa.ListArray, table[name].combine_chunks())
    count_B = lists.value_lengths().fill_null(0).to_numpy(zero_copy_only=False)
    return count_B, lists.flatten().to_numpy(zero_copy_only=False).astype(float)


def _text(value: Any) -> str | None:
    return value if value is None or isinstance(value, str) else json.dumps(value)


def _numbers(nodes: list[Node], name: str) -> list[float | None] | None:
    values = [getattr(node, name) for node in nodes]
    return None if all(value is None for value in values) else values
