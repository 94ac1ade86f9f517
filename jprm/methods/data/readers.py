"""The readers by the name of their source, and those of jprm's own records (`jsonl`), pools among them (`pools`), TRL's
stepwise records (`trl`), free text (`text`), and records of any other names (`columns`)."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from typing import Any, Literal

from jprm.io.jsonl import shortened
from jprm.methods.data.reader import NoOptions, Reader, Record, take, until_error
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
    steps: a list of text, or one text, which is split; or a list of lists, each a chain of its own. A path through a
        list of objects names a field of each: `steps.text`, `steps.label`.
    labels: a list of numbers, booleans, nulls, or texts for them (`_LABELS`); of chains in lists, a list for each.
        A file with a column `labels` is refused where neither this nor `first_error` is given.
    first_error: the place of the first wrong step; null, a number below `first_step` and "N/A" stand for none. Steps
        before it get label 1, it gets 0, and later ones have none. A chain without one has labels 1 throughout, but
        none at all where `correct` says that its answer is wrong. Of chains in lists, a list of places.
    first_step: the place that the source gives the first step; required with `first_error`, no column.
    answer: the correct answer of the problem.
    correct: whether the chain's answer is correct: true and false, 1 and 0, or a word for them (`_VERDICTS`); of chains
        in lists, a list.
    semantics: what the labels mean; no column (`jprm.tree.SEMANTICS`).
    """

    problem: str = "problem"
    steps: str = "steps"
    labels: str = ""
    first_error: str = ""
    first_step: Literal[0, 1] | None = None
    answer: str = ""
    correct: str = ""
    semantics: Literal["correctness", "rating", "value", "advantage", "implicit"] = "correctness"

    def __post_init__(self):
        if self.labels and self.first_error:
            raise ValueError("labels and first_error: name one of them; steps get their labels from it")
        if bool(self.first_error) != (self.first_step is not None):
            raise ValueError("first_error needs first_step=0 or first_step=1: the place of a source's first step")


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
    """Yields a chain of the named columns, and of no others, or several. An error lists the columns that there are."""
    kinds: dict[str, Any] = {"problem": str, "steps": (list, str), "labels": list, "answer": (str, int, float)}
    kinds |= {"first_error": (int, str, list, type(None)), "correct": (bool, int, str, list, type(None))}
    columns = {field: getattr(options, field) for field in kinds}
    if isinstance(item, dict) and item.get("labels") and not (options.labels or options.first_error):
        raise RecordError(where, "labels", "is no column that is read", "Add --set labels=labels, or leave it out.")
    try:
        fields = {field: take(item, columns[field], kind, where) for field, kind in kinds.items() if columns[field]}
    except RecordError as error:
        shown = ", ".join(f"{key}={value!r:.60}" for key, value in item.items()) if isinstance(item, dict) else item
        raise RecordError(where, error.field, error.reason, f"This record has {shortened(str(shown), 600)}.") from None
    for chain in _in_lists(fields, columns, where):
        if "labels" in chain:
            chain["labels"] = [label_of(label, where, options.labels) for label in chain["labels"]]
            chain["semantics"] = options.semantics
        if isinstance(chain["steps"], str):
            chain["response"] = chain.pop("steps")
        if "correct" in chain:
            chain["correct"] = _verdict(chain["correct"], where, options.correct)
        (record,) = parse_record(chain, where, NoOptions())
        if options.first_error:
            first = _place(record.pop("first_error", None), len(record["steps"]), where, options)
            labels = until_error(first, len(record["steps"]), record.get("correct"))
            record |= {"labels": labels, "semantics": options.semantics}
            record |= {} if set(labels) == {None} else {"first_error": first}
        yield record


def _in_lists(record: Record, columns: dict[str, str], where: str) -> Iterator[Record]:
    """Yields one record for every list in `steps`, with its own of the other lists; else the record itself."""
    steps = record["steps"]
    if not (steps and isinstance(steps, list) and all(isinstance(step, list) for step in steps)):
        yield record
        return
    listed = [field for field in ("labels", "first_error", "correct") if field in record]
    for field in listed:
        if not isinstance(record[field], list) or len(record[field]) != len(steps):
            reason = f"is not one for each of the {len(steps)} lists of steps"
            raise RecordError(where, columns[field], reason, "Each list of steps is a chain with its own.")
    for i, chain in enumerate(steps):
        yield record | {"steps": chain} | {field: record[field][i] for field in listed}


_LABELS = {"+": 1.0, "-": 0.0, "1": 1.0, "0": 0.0, "-1": -1.0, "1.0": 1.0, "0.0": 0.0, "true": 1.0, "false": 0.0}
"""Labels as tables of text have them."""


def label_of(label: Any, where: str, field: str) -> Any:
    """Returns a label as a number: true is 1 and false 0, and a text what `_LABELS` says. Numbers and nulls stay."""
    if isinstance(label, bool):
        return float(label)
    if isinstance(label, str):
        if (word := label.strip().lower()) not in _LABELS:
            remedy = f"A label is a number, true, false, null or one of {', '.join(_LABELS)}."
            raise RecordError(where, field, f"holds {label!r}", remedy)
        return _LABELS[word]
    return label


def _place(value: Any, steps: int, where: str, options: ColumnOptions) -> int:
    """Returns the index of the first wrong step, -1 for none."""
    if isinstance(value, str):
        text = value.strip()
        value = int(text) if re.fullmatch(r"-?\d{1,9}", text) else None if text.lower() in _NO_ERROR else value
    if value is None or (type(value) is int and value < (options.first_step or 0)):
        return -1
    if type(value) is not int or value >= steps + (options.first_step or 0):
        remedy = f"It is the place of a step, and the first one has place {options.first_step}."
        raise RecordError(where, options.first_error, f"is {value!r}, for {steps} steps", remedy)
    return value - (options.first_step or 0)


def _verdict(value: Any, where: str, field: str) -> bool | None:
    """Returns whether an answer is correct, None where nothing is said."""
    verdict = value.strip().lower() if isinstance(value, str) else value
    if isinstance(verdict, bool) or verdict is None:
        return verdict
    if verdict not in _VERDICTS:
        known = ", ".join(map(str, _VERDICTS))
        raise RecordError(where, field, f"is {value!r}", f"Write true or false, or one of {known}.")
    return _VERDICTS[verdict]


_VERDICTS = {1: True, 0: False, "true": True, "false": False, "correct": True, "incorrect": False, "right": True,
             "wrong": False, "yes": True, "no": False, "1": True, "0": False}  # fmt: skip
_NO_ERROR = ("", "n/a", "na", "none", "null")


COLUMNS = Reader(parse_columns, ColumnOptions)
JSONL = Reader(parse_record)
POOLS = Reader(parse_pool, PoolOptions)
TRL = Reader(parse_stepwise)
TEXT = Reader(parse_text, TextOptions)


READERS: dict[str, Reader | str] = {
    "actprm": "jprm.methods.data.step_labels:ACTPRM",
    "agent_process_bench": "jprm.methods.data.agents.logs:AGENT_PROCESS_BENCH",
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
    "jsonl": JSONL,
    "math": "jprm.methods.data.solutions:MATH",
    "math_aps": "jprm.methods.data.step_labels:MATH_APS",
    "math_shepherd": "jprm.methods.data.step_labels:MATH_SHEPHERD",
    "mini_swe_agent": "jprm.methods.data.agents.scaffolds:MINI_SWE_AGENT",
    "mr_ben": "jprm.methods.evaluate.mistakes_reader:MR_BEN",
    "openai": "jprm.methods.data.agents.logs:OPENAI",
    "openhands": "jprm.methods.data.agents.openhands:OPENHANDS",
    "otel": "jprm.methods.data.agents.logs:OTEL",
    "pools": POOLS,
    "prm800k": "jprm.methods.data.step_labels:PRM800K",
    "prmbench": "jprm.methods.data.step_labels:PRMBENCH",
    "processbench": "jprm.methods.data.step_labels:PROCESSBENCH",
    "programs": "jprm.methods.data.solutions:PROGRAMS",
    "rlhflow": "jprm.methods.data.step_labels:RLHFLOW",
    "swe_agent": "jprm.methods.data.agents.scaffolds:SWE_AGENT",
    "tau_bench": "jprm.methods.data.agents.published:TAU_BENCH",
    "text": TEXT,
    "trl": TRL,
    "ultra_interact": "jprm.methods.data.step_labels:ULTRA_INTERACT",
    "verifiers": "jprm.methods.data.agents.logs:VERIFIERS",
    "versaprm": "jprm.methods.data.step_labels:VERSAPRM",
    "who_and_when": "jprm.methods.data.agents.published:WHO_AND_WHEN",
}
"""Records, or `module:NAME` of records: their modules are imported when they are asked for."""


def find(name: str) -> Reader:
    """Returns the reader of a name, or the user's own as `module:NAME` or `FILE.py:NAME`; errors as `find_part`."""
    return find_part(name, READERS, "reader", Reader, files=True)
