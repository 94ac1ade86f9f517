"""The readers by the name of their source, and those of jprm's own records (`jsonl`), pools among them (`pools`), TRL's
stepwise records (`trl`), free text (`text`), and records of any other names (`columns`)."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any, Literal

from jprm.io.jsonl import shortened
from jprm.methods.data import agents, solutions, step_labels
from jprm.methods.data.reader import NoOptions, Reader, Record, take
from jprm.options import find_part
from jprm.tree import RecordError, record_of, tree_of


@dataclasses.dataclass(frozen=True)
class PoolOptions:
    """Attributes:
    empty_samples: samples without steps: `error`, or `drop` them and count them in the key `empty_samples`. Evaluations
        take each as a sample that is incorrect, cannot be chosen and has no vote.
    """

    empty_samples: Literal["error", "drop"] = "error"


@dataclasses.dataclass(frozen=True)
class TextOptions:
    """Attributes:
    segmentation: how free text is split into steps: a rule of `jprm.steps.RULES`, or `auto`. The record names the rule.
    """

    segmentation: Literal["auto", "thoughts", "markers", "numbered", "paragraphs", "lines", "sentences"] = "auto"


@dataclasses.dataclass(frozen=True)
class ColumnOptions:
    """Attributes: the column that holds each field of a chain, a dotted path into nested ones; empty for none.

    problem: text.
    steps: a list of text, or one text, which is split.
    labels: a list of numbers, booleans or nulls.
    semantics: what the labels mean; no column (`jprm.tree.SEMANTICS`).
    """

    problem: str
    steps: str
    labels: str = ""
    answer: str = ""
    correct: str = ""
    semantics: Literal["correctness", "rating", "value", "advantage", "implicit"] = "correctness"


def parse_record(item: Any, where: str, options: NoOptions) -> Iterator[Record]:
    """Yields the record, a stepwise one as a chain."""
    yield record_of(tree_of(item, where))


def parse_pool(item: Any, where: str, options: PoolOptions) -> Iterator[Record]:
    """Yields a pool, with or without samples that have no steps, or a tree of messages, whose leaves are samples."""
    if isinstance(item, dict) and "samples" not in item and "nodes" in item and tree_of(item, where).of_messages:
        yield item
        return
    samples = take(item, "samples", list, where)
    if options.empty_samples == "drop":
        kept = [sample for sample in samples if not (isinstance(sample, dict) and sample.get("steps") == [])]
        if len(kept) < len(samples):
            item = item | {"samples": kept, "empty_samples": len(samples) - len(kept)}
    yield item


def parse_stepwise(item: Any, where: str, options: NoOptions) -> Iterator[Record]:
    """Yields {"prompt", "completions", "labels"} as a chain, true as 1 and false as 0."""
    take(item, "completions", list, where)
    yield from parse_record(item, where, options)


def parse_text(item: Any, where: str, options: TextOptions) -> Iterator[Record]:
    """Yields {"problem", "response"}, or {"messages"} of one user and one assistant, as a chain."""
    key = "messages" if isinstance(item, dict) and "messages" in item else "response"
    take(item, key, list if key == "messages" else str, where)
    yield from parse_record({**item, "segmentation": options.segmentation}, where, NoOptions())


def parse_columns(item: Any, where: str, options: ColumnOptions) -> Iterator[Record]:
    """Yields a chain of the named columns, and of no others. An error lists the columns that there are."""
    kinds = {"problem": str, "steps": (list, str), "labels": list, "answer": (str, int, float), "correct": bool}
    columns = {field: getattr(options, field) for field in kinds}
    try:
        chain = {field: take(item, columns[field], kind, where) for field, kind in kinds.items() if columns[field]}
    except RecordError as error:
        there = ", ".join(f"{key}={value!r:.60}" for key, value in item.items()) if isinstance(item, dict) else item
        raise RecordError(where, error.field, error.reason, f"This record has {shortened(str(there), 600)}.") from None
    if options.labels:
        chain["labels"] = [float(label) if isinstance(label, bool) else label for label in chain["labels"]]
        chain["semantics"] = options.semantics
    if isinstance(chain["steps"], str):
        chain["response"] = chain.pop("steps")
    yield from parse_record(chain, where, NoOptions())


COLUMNS = Reader(parse_columns, ColumnOptions)
JSONL = Reader(parse_record)
POOLS = Reader(parse_pool, PoolOptions)
TRL = Reader(parse_stepwise)
TEXT = Reader(parse_text, TextOptions)


READERS: dict[str, Reader] = {
    "agent_process_bench": agents.AGENT_PROCESS_BENCH,
    "anthropic": agents.ANTHROPIC,
    "columns": COLUMNS,
    "gsm8k": solutions.GSM8K,
    "gsm8k_solutions": solutions.GSM8K_SOLUTIONS,
    "jsonl": JSONL,
    "math": solutions.MATH,
    "math_shepherd": step_labels.MATH_SHEPHERD,
    "openai": agents.OPENAI,
    "otel": agents.OTEL,
    "pools": POOLS,
    "prm800k": step_labels.PRM800K,
    "prmbench": step_labels.PRMBENCH,
    "processbench": step_labels.PROCESSBENCH,
    "programs": solutions.PROGRAMS,
    "text": TEXT,
    "trl": TRL,
    "verifiers": agents.VERIFIERS,
}


def find(name: str) -> Reader:
    """Returns the reader of a name, or the user's own as `module:NAME` or `FILE.py:NAME`; errors as `find_part`."""
    return find_part(name, READERS, "reader", Reader, files=True)
