"""The table of readers by source name.

Also defines five general readers: `jsonl` for jprm's own records, `pools` for pools, `trl` for TRL's stepwise records,
`text` for free text, and `columns` for arbitrary column names.
"""

from __future__ import annotations

import contextlib
import dataclasses
import typing
from collections.abc import Iterator
from typing import Any, Literal

from jprm.methods.data.cells import OTHER_FILE, take
from jprm.methods.data.columns import ColumnOptions, optional_columns, parse_columns, parse_layout, without_empty
from jprm.methods.data.reader import Dropped, LeftOut, NoOptions, Reader, Record, check_record
from jprm.methods.messages.free_text import sample_of
from jprm.options import find_part
from jprm.tree import RecordError, record_of, tree_of


@dataclasses.dataclass(frozen=True)
class PoolOptions:
    """Attributes:
    empty_samples: samples without steps: `error`, or `drop` them and count them in the key `empty_samples`. Evaluations
        count each as an incorrect sample that cannot be chosen and does not vote.
    """

    empty_samples: Literal["error", "drop"] = "error"


@dataclasses.dataclass(frozen=True)
class TextOptions:
    """Attributes:
    segmentation: how free text is split into steps: a rule of `jprm.steps.RULES`, e.g. `paragraphs`, or `auto`. The
        record names the rule.
    """

    segmentation: Literal["auto", "thoughts", "markers", "numbered", "paragraphs", "lines", "sentences"] = "auto"


def parse_record(item: Any, where: str, options: NoOptions) -> Iterator[Record]:
    """Yields the record as `record_of` writes it: TRL's stepwise records and free text become chains.

    Raises RecordError if it is invalid.
    """
    yield record_of(tree_of(item, where))


def parse_pool(item: Any, where: str, options: PoolOptions) -> Iterator[Record]:
    """Yields a pool, or a tree of messages (each leaf is a sample).

    Also accepts the pool layouts of other projects (`columns.parse_layout`). A sample that is a text or a free-text
    object is split into steps. Empty samples are yielded too (with `error`), and `Reader.read` refuses them.

    Raises RecordError if the item is a chain or has another form.
    """
    if isinstance(item, dict) and "samples" not in item and "nodes" in item and tree_of(item, where).of_messages:
        yield item
        return
    if isinstance(item, dict) and "samples" not in item and (pool := parse_layout(item, where, options.empty_samples)):
        yield from pool
        return
    if not isinstance(item, dict):
        raise RecordError(where, "record", f"is {type(item).__name__}, no object", OTHER_FILE)
    if "samples" not in item and "steps" in item:
        remedy = 'Group the chains of a problem: {"problem": .., "samples": [{"steps": [..]}, ..]}.'
        raise RecordError(where, "samples", "is absent: the record is one chain, not a pool", remedy)
    samples = take(item, "samples", list, where)
    samples = [
        sample_of(sample, where, f"samples[{i}]") if isinstance(sample, str | dict) else sample
        for i, sample in enumerate(samples)
    ]
    yield without_empty(dict(item) | {"samples": samples}, options.empty_samples)


def parse_stepwise(item: Any, where: str, options: NoOptions) -> Iterator[Record]:
    """Yields {"prompt", "completions", "labels"} as a chain; true becomes 1, false 0. RecordError for others."""
    take(item, "completions", list, where)
    yield from parse_record(item, where, options)


def parse_text(item: Any, where: str, options: TextOptions) -> Iterator[Record]:
    """Yields a chain from {"problem", "response"}, or from {"messages"} with one user and one assistant message.

    Other keys are kept, and `segmentation` names the rule. Raises RecordError for another form.
    """
    key = "messages" if isinstance(item, dict) and "messages" in item else "response"
    take(item, key, list if key == "messages" else str, where)
    yield from parse_record({**item, "segmentation": options.segmentation}, where, NoOptions())


COLUMNS = Reader(parse_columns, ColumnOptions, columns=optional_columns)
JSONL = Reader(parse_record, unique_ids=True)
POOLS = Reader(parse_pool, PoolOptions)
TRL = Reader(parse_stepwise)
TEXT = Reader(parse_text, TextOptions)


READERS: dict[str, Reader | str] = {
    "actprm": "jprm.methods.data.step_labels:ACTPRM",
    "agent_process_bench": "jprm.methods.data.agents.logs:AGENT_PROCESS_BENCH",
    "agentrx": "jprm.methods.data.agents.published:AGENTRX",
    "anthropic": "jprm.methods.data.agents.logs:ANTHROPIC",
    "atif": "jprm.methods.data.agents.atif:ATIF",
    "big_bench_mistake": "jprm.methods.evaluate.mistakes_reader:BIG_BENCH_MISTAKE",
    "claude_code": "jprm.methods.data.agents.claude_code:CLAUDE_CODE",
    "codex": "jprm.methods.data.agents.codex:CODEX",
    "columns": COLUMNS,
    "er_prm": "jprm.methods.data.step_labels:ER_PRM",
    "genprm_math": "jprm.methods.data.step_labels:GENPRM_MATH",
    "gsm8k": "jprm.methods.data.solutions:GSM8K",
    "gsm8k_solutions": "jprm.methods.data.solutions:GSM8K_SOLUTIONS",
    "hard2verify": "jprm.methods.evaluate.mistakes_reader:HARD2VERIFY",
    "inspect": "jprm.methods.data.agents.inspect_ai:INSPECT",
    "jsonl": JSONL,
    "math": "jprm.methods.data.solutions:MATH",
    "math_aps": "jprm.methods.data.step_labels:MATH_APS",
    "math_shepherd": "jprm.methods.data.step_labels:MATH_SHEPHERD",
    "mini_swe_agent": "jprm.methods.data.agents.scaffolds:MINI_SWE_AGENT",
    "mr_ben": "jprm.methods.evaluate.mistakes_reader:MR_BEN",
    "openai": "jprm.methods.data.agents.logs:OPENAI",
    "openhands": "jprm.methods.data.agents.openhands:OPENHANDS",
    "otel": "jprm.methods.data.agents.otel:OTEL",
    "pools": POOLS,
    "prm800k": "jprm.methods.data.step_labels:PRM800K",
    "prmbench": "jprm.methods.data.step_labels:PRMBENCH",
    "processbench": "jprm.methods.data.step_labels:PROCESSBENCH",
    "programs": "jprm.methods.data.solutions:PROGRAMS",
    "rlhflow": "jprm.methods.data.step_labels:RLHFLOW",
    "swe_agent": "jprm.methods.data.agents.scaffolds:SWE_AGENT",
    "tau2_bench": "jprm.methods.data.agents.published:TAU2_BENCH",
    "tau_bench": "jprm.methods.data.agents.published:TAU_BENCH",
    "text": TEXT,
    "trl": TRL,
    "ultra_interact": "jprm.methods.data.step_labels:ULTRA_INTERACT",
    "verifiers": "jprm.methods.data.agents.logs:VERIFIERS",
    "versaprm": "jprm.methods.data.step_labels:VERSAPRM",
    "who_and_when": "jprm.methods.data.agents.published:WHO_AND_WHEN",
}
"""Readers, or `module:NAME` references that are imported on first use."""


def readers_of(item: Any) -> list[str]:
    """Names the readers that accept an item, jprm's own formats last, except `columns` and readers of whole files.

    Each is tried with `options_of`, and imported for it. [] if no reader accepts the item.
    """
    names = []
    for name in READERS:
        with contextlib.suppress(ValueError, Dropped):
            reader = find(name)
            records = [] if reader.whole or name == "columns" else reader.parse(item, "", options_of(reader))
            if [check_record(record, "") for record in records if not isinstance(record, LeftOut)]:
                names.append(name)
    return sorted(names, key=lambda name: name in ("jsonl", "pools", "trl", "text"))


def options_of(reader: Reader) -> Any:
    """Returns the reader's options with their defaults; a required one, a Literal, takes its first allowed value."""
    kind = reader.options
    hints = typing.get_type_hints(kind)
    needed = [field.name for field in dataclasses.fields(kind) if field.default is dataclasses.MISSING]
    return kind(**{name: typing.get_args(hints[name])[0] for name in needed})


def find(name: str) -> Reader:
    """Returns a reader by name, or the user's own as `module:NAME` or `FILE.py:NAME`, which is executed.

    Raises ValueError if there is no such reader, or the object is no `Reader`. Errors of the user's code pass.
    """
    return find_part(name, READERS, "reader", Reader, files=True)
