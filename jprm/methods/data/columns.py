"""Readers of arbitrary column names: `columns` takes the name of each field; `pools` knows other projects' layouts.

Every value is checked for its type (`cells.py`), and errors name the column. Columns that no option names stay in the
record, e.g. ids, which then reach the scored files.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

from jprm.io.jsonl import shortened
from jprm.methods.data.cells import INVALID, OTHER_FILE, holds, label_of, literal, place_of, take, verdict_of
from jprm.methods.data.reader import Record, others, until_error
from jprm.methods.data.step_labels import parted
from jprm.methods.messages.free_text import are_solutions, prompt_of, sample_of, tagged_steps
from jprm.tree import RecordError, record_of, tree_of


@dataclasses.dataclass(frozen=True)
class ColumnOptions:
    """Attributes: the column for each field, as a dotted path, e.g. `doc.question`. Must be empty if the file lacks it.

    problem: text, or messages, whose system message becomes `system`.
    steps: a list of texts, or one text to split, at step tags (`ки`, `<extra_0>`) if it has any. A path through a list
        of objects reads one field from each, e.g. `steps.text`. A list of lists is read as several chains, or as steps
        in pieces if each inner list holds one text or has one label. If empty, the records are problems without
        solutions.
    nested: how to read inner lists: `steps` or `chains`. Must be set if the file leaves it open, and must be `steps` if
        steps look like whole solutions. Not a column.
    samples: texts (split like `steps`), lists of steps, or objects with `response` or `steps`. The record becomes a
        pool.
    labels: a list of numbers, booleans, nulls or words, e.g. `["correct", "wrong"]`; null if the chain has no labels.
        If `steps` holds several chains, one list per chain. A file with a column `labels` is refused unless this or
        `first_error` is given.
    scores: a list of stored step scores, e.g. a PRM's. If the record holds samples or several chains, one list for
        each.
    first_error: the number of the first wrong step; null, "N/A" or a number below `first_step` if every step is right.
        Steps before it get label 1, the wrong step 0, later steps no label. If every step is right, all get 1, but if
        `correct` is false too, no step gets a label. If `steps` holds several chains, one number per chain.
    first_step: the source's number for the first step, 0 or 1; required with `first_error`. Not a column.
    answer: the problem's reference answer.
    correct: whether the chain's answer is correct: true or false, 1 or 0, or a word such as "yes". For samples and
        several chains, a list.
    predictions: a list with each sample's own answer.
    semantics: the meaning of the labels (`jprm.tree.SEMANTICS`), e.g. `rating`. Not a column.
    empty_samples: see `pools`. Not a column.
    """

    problem: str = "problem"
    steps: str = "steps"
    nested: Literal["steps", "chains"] | None = None
    samples: str = ""
    labels: str = ""
    scores: str = ""
    first_error: str = ""
    first_step: Literal[0, 1] | None = None
    answer: str = ""
    correct: str = ""
    predictions: str = ""
    semantics: Literal["correctness", "rating", "value", "advantage", "implicit"] = "correctness"
    empty_samples: Literal["error", "drop"] = "error"

    def __post_init__(self):
        if self.labels and self.first_error:
            raise ValueError("labels and first_error: name one of them; steps get their labels from it")
        if bool(self.first_error) != (self.first_step is not None):
            raise ValueError("first_error needs first_step=0 or first_step=1: the place of a source's first step")
        if self.samples and self.first_error:
            raise ValueError("samples and first_error: first errors are of chains, one a record")


_KINDS: dict[str, tuple[type, ...]] = {
    "problem": (str, list),
    "steps": (list, str),
    "samples": (list, str),
    "labels": (list, str, type(None)),
    "scores": (list, str, type(None)),
    "first_error": (int, float, str, list, type(None)),
    "answer": (str, int, float, list, type(None)),
    "correct": (bool, int, float, str, list, type(None)),
    "predictions": (list, str),
}
_LISTED = ("steps", "samples", "labels", "scores", "correct", "predictions")
"""Fields that may hold a list written as Python text."""

_MEANT = frozenset(
    "problem steps labels samples nodes semantics prompt completions messages response answer correct scores outputs"
    " first_error segmentation system tools outcome segment empty_samples search undecided".split()
)
"""Keys with a meaning in records. Columns with these names are moved into `columns` unless an option names them."""


def optional_columns(options: ColumnOptions) -> list[str]:
    """Returns the columns of labels, scores, first_error and correct that are set: some records may lack them."""
    return [path for path in (options.labels, options.scores, options.first_error, options.correct) if path]


def parse_columns(item: Any, where: str, options: ColumnOptions) -> Iterator[Record]:
    """Yields one or several chains, a pool, or a problem, read from the named columns.

    Other columns are kept; if their name has a meaning in records, e.g. `answer` or `outcome`, they move into
    `columns`. Of several chains, each gets the item's `id` with its number, e.g. "7.0".

    Raises RecordError if a column is missing (listing those of the record) or has another type, lists differ in length,
    or a column `labels` is not named by an option.
    """
    if not isinstance(item, Mapping):
        raise RecordError(where, "record", f"is {type(item).__name__}, no object", "Write one JSON object a line.")
    if item.get("labels") and not (options.labels or options.first_error or options.correct == "labels"):
        remedy = "Add --set labels=labels (correct=labels if they are one for each sample), or leave it out."
        raise RecordError(where, "labels", "is no column that is read", remedy)
    columns = {field: path for field in _KINDS if (path := getattr(options, field))}
    if options.samples:
        columns.pop("steps", None)
    try:
        fields = {field: take(item, path, _KINDS[field], where) for field, path in columns.items()}
        if fields.get("answer", "") is None and not holds(item, options.answer):
            raise RecordError(where, options.answer, "is absent", OTHER_FILE)
    except RecordError as error:
        if error.remedy != OTHER_FILE:
            raise
        shown = ", ".join(f"{key}={value!r:.60}" for key, value in item.items())
        raise RecordError(where, error.field, error.reason, f"This record has {shortened(shown, 600)}.") from None
    for field in _LISTED:
        if isinstance(fields.get(field), str) and isinstance(value := literal(fields[field]), list):
            fields[field] = value
    record = _problem(fields, columns, where)
    kept = _kept(item, columns.values())
    if options.samples:
        yield _pool(fields, columns, record, options, where) | kept
        return
    if "steps" not in fields:
        yield record | kept
        return
    chains = [
        _chain(chain, record, columns, options, where)
        for chain in _chains(item, fields, columns, options.nested, where)
    ]
    several = len(chains) > 1 and isinstance(kept.get("id"), str | int)
    for number, chain in enumerate(chains):  # an id is of one record
        yield chain | kept | ({"id": f"{kept['id']}.{number}"} if several else {})


def _problem(fields: Record, columns: Mapping[str, str], where: str) -> Record:
    """Builds the record with its problem, system message and answer."""
    problem = fields["problem"]
    if isinstance(problem, list) and problem and all(isinstance(text, str) for text in problem):
        if len(problem) > 1:
            reason = f"holds {len(problem)} texts, not one"
            raise RecordError(where, columns["problem"], reason, "Name the column that holds the messages themselves.")
        (problem,) = problem
    record = {"problem": problem} if isinstance(problem, str) else prompt_of(problem, where, columns["problem"])
    answer = fields.get("answer")
    if answer is None:
        return record
    if isinstance(answer, list):
        if len(answer) != 1 or isinstance(answer[0], bool) or not isinstance(answer[0], str | int | float):
            raise RecordError(
                where, columns["answer"], "is a list, not one text or number", "Name the one that counts."
            )
        (answer,) = answer
    return record | {"answer": answer}


# ---- Chains.


_PER_CHAIN = ("steps", "labels", "scores", "first_error", "correct")


def _chains(item: Mapping, fields: Record, columns: Mapping[str, str], nested: str | None, where: str) -> list[Record]:
    """Splits an item into chains; returns each chain's own fields, e.g. `steps` and `labels`."""
    steps = fields["steps"]
    values = {field: fields[field] for field in _PER_CHAIN if field in fields}
    if isinstance(steps, str) or not steps or not all(isinstance(step, list) for step in steps):
        return [values]
    for i, step in enumerate(steps):
        for j, text in enumerate(step):
            _text(text, where, f"{columns['steps']}[{i}][{j}]")
    if nested == "steps" or (nested is None and _are_steps(item, values, where, columns["steps"])):
        return [values | {"steps": ["\n".join(step) for step in steps]}]
    listed = [field for field in values if field != "steps" and values[field] is not None]
    for field in listed:
        if not isinstance(values[field], list) or len(values[field]) != len(steps):
            reason = f"is not one for each of the {len(steps)} lists of steps"
            raise RecordError(where, columns[field], reason, "Each list of steps is a chain with its own.")
    return [values | {"steps": chain} | {field: values[field][i] for field in listed} for i, chain in enumerate(steps)]


def _are_steps(item: Mapping, values: Record, where: str, column: str) -> bool:
    """Whether each inner list is one step in pieces, rather than a chain.

    `True` if there is one label per list, a single first error or outcome for the item, or one text per list. Raises
    RecordError if the file leaves it open.
    """
    steps, labels = values["steps"], values.get("labels")
    if labels and any(label is not None for label in labels):
        return not any(isinstance(label, list) for label in labels) and len(labels) == len(steps)
    told = [values[field] for field in ("first_error", "correct") if field in values]
    if told:
        return not any(isinstance(value, list) for value in told)
    if isinstance(item.get(column.partition(".")[0]), list) and "." in column:
        return False
    single = [len(step) == 1 for step in steps]
    if any(single) and not all(single):
        reason = f"holds {len(steps)} lists, of one text and of several: each may be a step or a chain"
        raise RecordError(where, column, reason, "Say which: --set nested=steps or nested=chains.")
    return all(single)


def _chain(chain: Record, problem: Record, columns: Mapping[str, str], options: ColumnOptions, where: str) -> Record:
    entries = {field: chain[field] for field in ("labels", "scores") if chain.get(field) is not None}
    steps, record = chain["steps"], dict(problem)
    if isinstance(steps, str) and tagged_steps(steps):
        record["problem"], steps = _tagged(steps, problem["problem"], where, columns["steps"])
    if isinstance(steps, str) and (rows := _pieces(steps, *entries.values())):
        steps, *listed = map(list, zip(*rows, strict=True))
        entries = dict(zip(entries, listed, strict=True))
    if isinstance(steps, str):
        (record,) = [record_of(tree_of(record | {"response": steps}, where))]
    else:
        record["steps"] = _steps(steps, where, columns["steps"], options.nested == "steps")
    count = len(record["steps"])
    if "correct" in chain:
        record["correct"] = verdict_of(chain["correct"], where, columns["correct"])
    if "labels" in entries:
        record["labels"] = _labels(entries["labels"], count, options.semantics, where, options.labels)
    if "scores" in entries:
        record["scores"] = _listed(entries["scores"], count, where, options.scores)
    if entries:
        record["semantics"] = options.semantics
    if options.first_error:
        first = place_of(chain.get("first_error"), options.first_step or 0, count, where, options.first_error)
        labels = until_error(first, count, record.get("correct"))
        record |= {"labels": labels, "semantics": options.semantics}
        record |= {} if set(labels) <= {None} else {"first_error": first}
    return record_of(tree_of(record, where))


def _labels(labels: Any, count: int, semantics: str, where: str, column: str) -> list[float | None]:
    labels = _listed(labels, count, where, column, ", null for none")
    return [label_of(label, semantics, where, f"{column}[{i}]") for i, label in enumerate(labels)]


def _listed(values: Any, count: int, where: str, column: str, also: str = "") -> list:
    """Returns the list; raises RecordError unless it has one entry per step."""
    if not isinstance(values, list):
        raise RecordError(where, column, f"is {type(values).__name__}, not list", f"Give one entry per step{also}.")
    if len(values) != count:
        reason = f"has {len(values)} entries for {count} steps"
        raise RecordError(where, column, reason, f"Give one entry per step{also}.")
    return values


def _pieces(text: Any, *lists: Any) -> list[tuple]:
    """Splits a text at blank lines; returns [(piece, its entry in each list)], or [] if the counts differ.

    E.g. [("2 + 2 = 4", 1), ("So 5", 0)] for two pieces and labels. Empty pieces are left out.
    """
    pieces = text.split("\n\n") if isinstance(text, str) else []
    if not lists or not all(isinstance(values, list) and len(values) == len(pieces) for values in lists):
        return []
    return [row for row in zip(map(str.strip, pieces), *lists, strict=True) if row[0]]


def _steps(steps: Sequence[Any], where: str, column: str, sure: bool) -> list[str]:
    """Strips step tags. Raises RecordError for prefixes of one solution, and unless `sure` for whole solutions."""
    texts = [_text(step, where, f"{column}[{i}]") for i, step in enumerate(steps)]
    if not sure and are_solutions(texts):
        remedy = f"Give --set samples={column} and no steps, or nested=steps if they are steps after all."
        raise RecordError(where, column, f"holds {len(texts)} whole solutions, not the steps of one", remedy)
    if len(texts) > 2 and all(a.strip() and b.startswith(a) and a != b for a, b in itertools.pairwise(texts)):
        remedy = "Remove from each entry the text of the entry before."
        raise RecordError(where, column, "holds prefixes of one solution: each begins with the entry before", remedy)
    return [" ".join(pieces) if (pieces := tagged_steps(text)) else text for text in texts]


def _tagged(text: str, problem: str, where: str, column: str) -> tuple[str, list[str]]:
    """Splits tagged text into the problem and its steps; the text may repeat the problem at its start."""
    same = problem.strip() == text.strip()
    if not same and problem.strip() and text.lstrip().startswith(problem.strip()):
        text = text.lstrip()[len(problem.strip()) :]
    pieces = tagged_steps(text)
    if same:
        problem, pieces[0] = parted(pieces[0], where, column)
    return problem, pieces


def _text(value: Any, where: str, field: str) -> str:
    if not isinstance(value, str):
        remedy = "A step is a text. Of objects, name the field that holds it, e.g. steps=steps.text."
        raise RecordError(where, field, f"is {type(value).__name__ if value is not None else 'null'}, not str", remedy)
    return value


# ---- Pools.


_PER_SAMPLE = {"correct": "correct", "predictions": "answer", "labels": "labels", "scores": "scores"}
"""Fields with one value per sample, and the key of that value in the sample."""


def _pool(fields: Record, columns: Mapping[str, str], problem: Record, options: ColumnOptions, where: str) -> Record:
    """Builds a pool; each list in `_PER_SAMPLE` gives every sample its value."""
    column, values = columns["samples"], fields["samples"]
    if not isinstance(values, list):
        raise RecordError(where, column, "is str, not list", "Name a column with a list of samples.")
    if column == "resps" and len(values) == 1 and isinstance(values[0], list):  # lm-eval has one list per request
        values = values[0]
    samples = [_sample(value, where, f"{column}[{i}]") for i, value in enumerate(values)]
    for field, key in _PER_SAMPLE.items():
        listed = fields.get(field)
        if listed is None:
            continue
        listed = [listed] if not isinstance(listed, list) and len(samples) == 1 else listed
        if not isinstance(listed, list) or len(listed) != len(samples):
            shown = f"has {len(listed)} entries" if isinstance(listed, list) else f"is {type(listed).__name__}"
            remedy = "Give a list with an entry for each sample."
            raise RecordError(where, columns[field], f"{shown} for {len(samples)} samples", remedy)
        for i, (sample, value) in enumerate(zip(samples, listed, strict=True)):
            sample |= _of_sample(key, value, sample, options, where, f"{columns[field]}[{i}]")
    pool = problem | {"samples": samples}
    if options.labels or options.scores:
        pool["semantics"] = options.semantics
    return without_empty(pool, options.empty_samples)


def _sample(value: Any, where: str, field: str) -> Record:
    if isinstance(value, list):
        texts = [_text(text, where, f"{field}[{i}]") for i, text in enumerate(value)]
        return {"steps": texts} if len(texts) > 1 else sample_of(texts[0] if texts else "", where, field)
    return sample_of(value, where, field)


def _of_sample(key: str, value: Any, sample: Record, options: ColumnOptions, where: str, field: str) -> Record:
    """Returns {key: value} after a check of one sample's value; {} if its labels or scores are null.

    If the text has one label or score per piece between blank lines, the pieces become the sample's steps.
    """
    if key == "correct":
        return {key: verdict_of(value, where, field)}
    if key == "answer":
        if isinstance(value, bool) or not isinstance(value, str | int | float | None):
            raise RecordError(where, field, f"is {type(value).__name__}, not text or a number", "Give each its answer.")
        return {key: None if value == INVALID else value}
    if value is None:
        return {}
    if "segmentation" in sample and (rows := _pieces(sample.get("response"), value)):
        steps, value = map(list, zip(*rows, strict=True))
        sample |= {"steps": steps, "segmentation": "paragraphs"}
    if key == "scores":
        return {key: _listed(value, len(sample["steps"]), where, field)}
    if not isinstance(value, list):
        remedy = "A sample's labels are a list of one for each step. If it says whether the sample is right, give "
        raise RecordError(
            where, field, f"is {type(value).__name__}, not list", f"{remedy}--set correct={options.labels}."
        )
    return {key: _labels(value, len(sample["steps"]), options.semantics, where, field)}


def without_empty(pool: Record, choice: str) -> Record:
    """Returns the pool; if `choice` is `drop`, a copy without samples whose `steps` are [], if there are any.

    The copy counts them in `empty_samples`.
    """
    samples = pool["samples"]
    full = [sample for sample in samples if not (isinstance(sample, Mapping) and sample.get("steps") == [])]
    if choice != "drop" or len(full) == len(samples):
        return pool
    return pool | {"samples": full, "empty_samples": len(samples) - len(full)}


_LAYOUTS: dict[str, dict[str, tuple[str, ...]]] = {
    "completions": {"problem": ("problem", "prompt"), "answer": ("answer",), "scores": ("scores",)},  # search-and-learn
    "responses": {"problem": ("problem", "prompt", "question"), "answer": ("answer",)},  # its_hub
    "resps": {  # EleutherAI/lm-evaluation-harness, --log_samples
        "problem": (
            "doc.problem",
            "doc.question",
            "doc.prompt",
            "doc.input",
            "doc.query",
            "arguments.gen_args_0.arg_0",
        ),
        "answer": ("target",),
    },
    "code": {  # math-evaluation-harness, Qwen2.5-Math
        "problem": ("question", "problem"),
        "answer": ("gt", "answer"),
        "correct": ("score",),
        "predictions": ("pred",),
    },
    "answers": {"problem": ("prompt", "question"), "answer": ("gt",), "correct": ("labels",)},  # RLHFlow's test sets
}
"""Columns of other projects' pools, by the key of the samples. The first path that exists is used."""


def parse_layout(
    item: Mapping[str, Any], where: str, empty_samples: Literal["error", "drop"]
) -> Iterator[Record] | None:
    """Returns an iterator over the one pool of another project's record; `None` if its keys fit no layout.

    Beside a problem, the samples must be a list under `completions` (search-and-learn), `responses` (its_hub), `resps`
    (lm-evaluation-harness), `code` (Qwen2.5-Math) or `answers` (RLHFlow). Of a reference answer, only the text after
    `####` is kept.

    With `empty_samples` `drop`, samples without steps are left out and counted in the pool's `empty_samples`. The
    iterator raises RecordError if a field has another type, or lists differ in length.
    """
    for samples, fields in _LAYOUTS.items():
        named: dict[str, Any] = {
            field: next((path for path in paths if _has(item, path)), "") for field, paths in fields.items()
        }
        if isinstance(item.get(samples), list) and named["problem"]:
            scores = item["scores"] if named.pop("scores", "") else None
            if isinstance(scores, list) and all(
                itertools.starmap(_pieces, itertools.zip_longest(item[samples], scores))
            ):
                named |= {"scores": "scores", "semantics": "value"}  # else `scores` is kept like any other column
            options = ColumnOptions(samples=samples, empty_samples=empty_samples, **named)
            return map(_with_last_answer, parse_columns(item, where, options))
    return None


def _with_last_answer(pool: Record) -> Record:
    """Keeps only the text after `####` of a reference solution, as in GSM8K."""
    answer = pool.get("answer")
    return pool | {"answer": answer.rpartition("####")[2].strip()} if isinstance(answer, str) else pool


def _has(item: Any, path: str) -> bool:
    for key in path.split("."):
        item = item.get(key) if isinstance(item, Mapping) else None
    return item is not None


# ---- Columns that no option names.


def _kept(item: Mapping[str, Any], paths: Sequence[str] | Any) -> Record:
    rest = dict(item)
    for path in paths:
        rest = _without(rest, path.split(".") if path not in rest else [path])
    kept = others(rest, *_MEANT)
    meant = {key: value for key, value in rest.items() if key in _MEANT}
    return kept | ({"columns": meant} if meant else {})


def _without(value: Any, path: Sequence[str]) -> Any:
    """Returns `value` without the part at a path (in a list: of each item) and without containers it leaves empty."""
    key, *inner = path
    if isinstance(value, list):
        items = [_without(item, path) for item in value]
        return items if any(item not in ({}, []) for item in items) else []
    if not isinstance(value, Mapping) or key not in value:
        return value
    rest = {name: part for name, part in value.items() if name != key}
    left = _without(value[key], inner) if inner else None
    if inner and left not in ({}, []):
        rest[key] = left
    return rest
