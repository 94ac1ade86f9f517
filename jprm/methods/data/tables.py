"""Records as Parquet: what DuckDB, pandas and `datasets` read without parsing JSON, and evaluations as they go.

A folder of tables has one row a chain: a chain's record, a sample of a pool, also one without steps, or a leaf of a
tree. Its files hold the rows of whole records, in the records' order.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from jprm.io.folders import whole_folder
from jprm.io.jsonl import dump
from jprm.io.outputs import check_version
from jprm.io.storage import path_of
from jprm.score.scale import PROBABILITY, Scale
from jprm.tree import Node, ReasoningTree, chains_of, tree_of

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


def trees(path: str | os.PathLike) -> Iterator[ReasoningTree]:
    """Yields the chains and pools of a folder of tables, some rows of which are in memory at a time.

    A step has its text, score and label, a sample its answer, its outcome and the weight of its vote: what evaluations
    read. Raises ValueError for a folder that is none, and for a tree, of which a table repeats what chains share.
    """
    scale_of(path)  # a whole folder
    for number, rows in itertools.groupby(_rows(path), lambda row: row["record"]):
        yield _tree_of(list(rows), f"{os.fspath(path)}, record {number}")


_READ = ["record", "kind", "problem", "gold", "steps", "scores", "labels", "semantics", "answer", "correct", "rest"]


def _rows(path: str | os.PathLike, at_once: int = 8192) -> Iterator[dict[str, Any]]:
    for file in path_of(path).files():
        if not file.name.endswith(".parquet"):
            continue
        table = pq.ParquetFile(str(file))
        if lacking := set(_READ) - set(table.schema_arrow.names):
            names = ", ".join(sorted(lacking))
            raise ValueError(f"{file}: has no column {names}. Write the folder with `jprm tabulate` again")
        for batch in table.iter_batches(at_once, columns=_READ):
            yield from batch.to_pylist()


def _tree_of(rows: list[dict[str, Any]], where: str) -> ReasoningTree:
    """Returns the record of its rows."""
    first, nodes = rows[0], []
    if first["kind"] == "tree":
        raise ValueError(f"{where}: a tree, of which a table repeats shared steps: give the JSON Lines file")
    for row in rows:
        steps, start = row["steps"], len(nodes)
        scores, labels = (row[name] or [None] * len(steps) for name in ("scores", "labels"))
        parents = [-1, *range(start, start + len(steps) - 1)]
        nodes += map(Node, parents, steps, labels, itertools.repeat(None), itertools.repeat(None), scores)
        if steps:
            answer = {} if row["answer"] is None else {"answer": row["answer"]}
            vote = json.loads(row["rest"]).get("vote") if row["rest"] and '"vote"' in row["rest"] else None
            outputs = {} if vote is None else {"vote": vote}
            nodes[-1] = dataclasses.replace(nodes[-1], correct=row["correct"], extra=answer, outputs=outputs)
    extra = {"empty_samples": empty} if (empty := sum(not row["steps"] for row in rows)) else {}
    return ReasoningTree(first["problem"], tuple(nodes), first["gold"], first["semantics"], first["kind"], extra)


def scale_of(path: str | os.PathLike) -> Scale:
    """Returns what the scores of a folder of tables mean. Raises ValueError for another folder, or a newer version."""
    try:
        about = json.loads((path_of(path) / MARK).read_bytes())
        version, scale = about["version"], Scale(**about["scale"])
    except (OSError, ValueError, TypeError, KeyError):
        raise ValueError(f"{os.fspath(path)}: is no folder of `jprm tabulate`, or one that is not whole") from None
    check_version(version, VERSION, path_of(path) / MARK)
    return scale


def _text(value: Any) -> str | None:
    return value if value is None or isinstance(value, str) else json.dumps(value)


def _numbers(nodes: list[Node], name: str) -> list[float | None] | None:
    values = [getattr(node, name) for node in nodes]
    return None if all(value is None for value in values) else values
