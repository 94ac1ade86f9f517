"""`ReasoningTree`: a problem is the root, a step is a node, a chain is a path.

Packing, training, labelling, scoring and search all take trees. A single chain is a tree with one branch. A pool of N
samples is a tree with N branches; the packer finds their common prefixes by token ids. In a trajectory, or a message
tree, every node has a role: assistant nodes are steps, all others are context, which is read but not scored.
"""

from __future__ import annotations

import dataclasses
import importlib
import itertools
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from jprm.io.jsonl import (
    RecordError,
    Rejects,
    answer_of,
    correct_of,
    label_of,
    list_of,
    number_of,
    object_of,
    parse,
    read_lines,
    reject_with,
    shortened,
    text_of,
)

SEMANTICS = ("correctness", "rating", "value", "advantage", "implicit")
"""The meaning of a label. `correctness`: the probability in [0, 1] that the step is correct. `rating`: a human's
three-way judgement, -1, 0 (neutral) or +1, which a training config turns into targets. `value`: the probability in
[0, 1] that a completion from here is correct (Monte Carlo). `advantage` and `implicit`: real numbers."""

MESSAGES = "jprm.methods.messages"
"""The package that reads and writes messages and free text, imported on first use."""

NONE: Mapping[str, Any] = {}
"""The shared empty dict for nodes without outputs or extra keys; a dict each would take 128 bytes."""


@dataclasses.dataclass(frozen=True, slots=True)
class Node:
    """One step, or a context message. A parent must come before its children.

    An assistant turn cut into steps is several nodes; all but the first have `continues`.
    """

    parent: int  # an index into the tree's nodes, -1 for the problem
    text: str  # of a message: its content, or the part of it that is this step
    label: float | None = None
    origin: str | None = None  # human, monte_carlo, formal, model:NAME@STEP
    correct: bool | None = None  # outcome of the chain that ends at this node, where it is known
    score: float | None = None  # of a PRM
    outputs: Mapping[str, float] = dataclasses.field(default_factory=lambda: NONE)  # of the head beside the score
    extra: Mapping[str, Any] = dataclasses.field(default_factory=lambda: NONE)  # keys unknown to jprm, untouched
    role: str | None = None  # of a message: system, user, assistant or tool; None in chains, pools and trees of steps
    continues: bool = False  # its message began at the parent

    @property
    def is_step(self) -> bool:
        """Whether the node is scored and trained; other nodes are context."""
        return self.role is None or self.role == "assistant"


@dataclasses.dataclass(frozen=True, slots=True)
class ReasoningTree:
    problem: str
    nodes: tuple[Node, ...]
    answer: str | float | None = None
    semantics: str = "correctness"
    kind: str = "tree"  # the record it came from: chain, pool, tree or trajectory
    extra: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def of_messages(self) -> bool:
        return bool(self.nodes) and self.nodes[0].role is not None

    @property
    def steps(self) -> list[int]:
        return [i for i, node in enumerate(self.nodes) if node.is_step]

    @property
    def tools(self) -> Sequence[Mapping[str, Any]]:
        """JSON schemas for the tools in the system message, or ()."""
        return self.extra.get("tools") or ()

    @property
    def system(self) -> str:
        """The system message before the problem, or ""."""
        text = self.extra.get("system")
        return text if isinstance(text, str) and not text.isspace() else ""

    @property
    def plain_problem(self) -> str:
        """The problem, for prompts without a system message. Raises ValueError if the tree has one."""
        if self.system:
            raise ValueError(
                f"problem {self.problem[:60]!r}: has a system message, and only models that score have a place for one."
                " Write it into the problem, or remove `system` from the record"
            )
        return self.problem


def tree_of(record: Mapping[str, Any], where: str = "record") -> ReasoningTree:
    """Returns the tree for a chain, pool or tree record (schema version 1), or for another form as a chain.

    Other forms are TRL's stepwise records, free text and a plain exchange of chat messages. Other `messages` are a
    trajectory, and so is each tree path if nodes have a `role` (`jprm.methods.messages`).

    A chain is one branch, and so is each sample of a pool: its `correct` is on its last node, its other keys are in
    that node's `extra`. A pool without steps is a tree without nodes if `empty_samples` counts its samples. `record_of`
    is the exact inverse: known keys without content (a null, all-null labels, the default semantics) stay in
    `extra`. Unknown keys' values are shared, not copied.

    Raises RecordError, naming `where`, the field, the reason and the fix.
    """
    object_of(record, where, "record", "Write one JSON object a line.")
    kinds = [kind for kind, key in (("chain", "steps"), ("pool", "samples"), ("tree", "nodes")) if key in record]
    kinds += ["trajectory"] if "messages" in record and _messages().is_trajectory(record) else []
    if len(kinds) > 1:
        raise RecordError(
            where, "record", f"is a {' and a '.join(kinds)} at once", "Keep the key of one kind and rename the others."
        )
    if not kinds and any(key in record for key in ("response", "completions", "messages")):
        kinds, record = ["chain"], _messages().chain_of(record, where)
    if not kinds:
        has = shortened(", ".join(f"`{key}`" for key in record), 200) or "nothing"
        remedy = "A chain has `steps`, a pool `samples`, a tree `nodes`, free text `response`, a chat `messages`. Other"
        readers = importlib.import_module("jprm.methods.data.readers").readers_of(record) if where else []
        name, more = (readers[0], "") if readers else ("columns", " --set problem=NAME steps=NAME (or samples=NAME)")
        remedy += f" names: jprm prepare {name} --input FILE --output DIR{more}, then give DIR"
        raise RecordError(where, "record", f"has {has}: it is neither chain, pool nor tree", remedy)
    nodes = record["nodes"] if kinds == ["tree"] and isinstance(record["nodes"], list) else []
    if kinds == ["trajectory"] or any(isinstance(node, Mapping) and "role" in node for node in nodes):
        return _messages().tree_of_messages(record, where)

    extra = dict(record)
    problem = text_of(extra.pop("problem", None), where, "problem")
    if isinstance(system := extra.get("system"), str) and system and not system.isspace():
        text_of(system, where, "system")
    answer = answer_of(extra.get("answer"), where, "answer")
    semantics = semantics_of(extra, where)
    for key, absent in (("answer", answer is None), ("semantics", semantics == SEMANTICS[0])):
        if not absent:
            del extra[key]

    if kinds == ["chain"]:
        nodes, extra = _branch(extra, 0, semantics, where, "")
    elif kinds == ["pool"]:
        nodes = _samples(extra.pop("samples"), semantics, where)
        if not nodes and not extra.get("empty_samples"):
            raise RecordError(where, "samples", "is empty", "A pool has at least one sample.")
    else:
        nodes = _nodes(extra.pop("nodes"), semantics, where)
    return ReasoningTree(problem, tuple(nodes), answer, semantics, kinds[0], extra)


def chain_tree(problem: str, steps: Sequence[str]) -> ReasoningTree:
    """Returns the tree of one chain. Raises TypeError if steps are one string or problems are several, RecordError for
    no step or a blank text."""
    if isinstance(steps, str):
        raise TypeError("steps is one string: pass a list of steps, e.g. [text] for one step")
    if isinstance(problem, list | tuple):
        raise TypeError('several problems: pass [{"problem": ..., "steps": [...]}, ...] to `score_many`')
    return tree_of({"problem": problem, "steps": list(steps)})


def record_of(tree: ReasoningTree) -> dict[str, Any]:
    """Returns the record of a tree, in its original kind: `record_of(tree_of(r)) == r`.

    Raises ValueError if a chain or pool branches, or has node fields that such a record cannot hold.
    """
    if tree.of_messages:
        return _messages().record_of_messages(tree)
    record: dict[str, Any] = {"problem": tree.problem}
    if tree.kind == "tree":
        record["nodes"] = [_record_of_node(node) for node in tree.nodes]
    else:
        starts = [i for i, node in enumerate(tree.nodes) if node.parent == -1]
        none = not starts and not (tree.kind == "pool" and tree.extra.get("empty_samples"))
        if none or any(node.parent not in (-1, i - 1) for i, node in enumerate(tree.nodes)):
            raise ValueError(f"the steps of a {tree.kind} follow one another; this one branches: use kind='tree'")
        bounds = itertools.pairwise([*starts, len(tree.nodes)])
        branches = [_record_of_branch(tree.nodes[start:end]) for start, end in bounds]
        if tree.kind == "pool":
            record["samples"] = branches
        elif tree.kind == "chain" and len(branches) == 1:
            record |= branches[0]
        else:
            raise ValueError(f"kind={tree.kind!r} has {len(branches)} branches: use 'chain' (one), 'pool' or 'tree'")
    return with_rest(record, tree)


def with_rest(record: dict[str, Any], tree: ReasoningTree) -> dict[str, Any]:
    """Returns the record with the tree's answer, semantics (unless the default) and extra keys, which replace none."""
    if tree.answer is not None:
        record["answer"] = tree.answer
    if tree.semantics != SEMANTICS[0]:
        record["semantics"] = tree.semantics
    return record | {key: value for key, value in tree.extra.items() if key not in record}


def chains_of(tree: ReasoningTree, *, context: bool = False) -> list[list[int]]:
    """Returns the path, as node indices, to each last step, in their order; steps only, or with `context` all nodes."""
    above, steps = above_of(tree), tree.steps
    inner = {above[i] for i in steps}
    parents = [node.parent for node in tree.nodes] if context else above
    return [path_to(leaf, parents) for leaf in steps if leaf not in inner]


def path_to(node: int, parents: Sequence[int]) -> list[int]:
    """Returns the node indices from the root to `node`, inclusive, by all nodes' parents (negative for a first one)."""
    path = []
    while node >= 0:
        path.append(node)
        node = parents[node]
    return path[::-1]


def steps_only(tree: ReasoningTree) -> ReasoningTree:
    """Removes the context from a message tree, so each step follows the previous step on its path.

    The result is a chain, or a pool with one sample per last step. Other trees are returned unchanged.
    """
    if not tree.of_messages:
        return tree
    above, steps = above_of(tree), tree.steps
    place_of = {node: place for place, node in enumerate(steps)} | {-1: -1}
    nodes = [dataclasses.replace(tree.nodes[i], parent=place_of[above[i]], role=None, continues=False) for i in steps]
    return dataclasses.replace(tree, nodes=tuple(nodes), kind="pool" if tree.kind == "tree" else "chain")


def above_of(tree: ReasoningTree) -> list[int]:
    """Returns for each node the last step before it on its path, or -1; context is skipped."""
    above: list[int] = []
    for node in tree.nodes:
        parent = node.parent
        above.append(parent if parent < 0 or tree.nodes[parent].is_step else above[parent])
    return above


def with_scores(
    tree: ReasoningTree, scores: Iterable[float | None], outputs: Mapping[str, Sequence[float]] | None = None
) -> ReasoningTree:
    """Returns a copy with scores[i] as node i's score, and `outputs` (equally long lists) as its named outputs.

    They replace earlier ones; with `None` the outputs stay. Entries of context nodes are ignored. Raises ValueError if
    there is not one score per node.
    """
    nodes = []
    for i, (node, score) in enumerate(zip(tree.nodes, scores, strict=True)):
        if not node.is_step:
            nodes.append(node)
            continue
        named = node.outputs if outputs is None else {name: values[i] for name, values in outputs.items()} or NONE
        nodes.append(dataclasses.replace(node, score=score, outputs=named))
    return dataclasses.replace(tree, nodes=tuple(nodes))


def scored(record: dict[str, Any], tree: ReasoningTree, outputs: Mapping[str, Iterable[float]]) -> dict[str, Any]:
    """Returns `tree`'s record with its new scores, rounded for files, with keys ordered as in `record`.

    Of the outputs, (N,) each, `score`, which is required, becomes the nodes' score; the others become named outputs.
    Raises ValueError as `with_scores` and `record_of`.
    """
    columns = {name: list(map(as_written, value_N)) for name, value_N in outputs.items()}
    return in_order_of(record, record_of(with_scores(tree, columns.pop("score", []), columns)))


def as_written(score: float) -> float:
    """Rounds a score for files: seven decimals, or seven digits if it is below 0.1, as precise as float32."""
    return float(f"{score:.7g}") if abs(score) < 0.1 else round(float(score), 7)


def with_labels(
    tree: ReasoningTree, labels: Iterable[float | None], semantics: str, origin: str, notes: Sequence[Mapping] = ()
) -> ReasoningTree:
    """Returns a copy with labels[i] and `origin` (the method) at node i, notes[i] in its `extra`, and `semantics`.

    Earlier labels are removed, and so is the `false` of an earlier check. A node without a label has no origin. A chain
    or pool becomes a tree. Labels and `semantics` are unchecked. Raises ValueError if a list has not one per node.
    """
    tree, nodes = as_tree(tree), []
    for node, label, note in zip(tree.nodes, labels, notes or [NONE] * len(tree.nodes), strict=True):
        if not node.is_step:
            nodes.append(node)
            continue
        extra = {key: value for key, value in node.extra.items() if key not in ("label", "labels", "origin", "false")}
        origin_of = origin if label is not None else None
        nodes.append(dataclasses.replace(node, label=label, origin=origin_of, extra={**extra, **note}))
    return dataclasses.replace(tree, nodes=tuple(nodes), semantics=semantics)


def as_tree(tree: ReasoningTree) -> ReasoningTree:
    """Returns a chain or pool with steps as kind `tree`; sample keys that nodes have too become e.g. `sample_text`."""
    keys = ("parent", "text", "label", "origin", "score", "outputs", "role", "continues") if tree.kind == "pool" else ()
    extras = [{f"sample_{key}" if key in keys else key: x for key, x in node.extra.items()} for node in tree.nodes]
    nodes = tuple(dataclasses.replace(node, extra=extra) for node, extra in zip(tree.nodes, extras, strict=True))
    kind = "tree" if tree.kind in ("chain", "pool") and nodes else tree.kind
    return dataclasses.replace(tree, nodes=nodes, kind=kind, extra=without_chain(tree.extra))


def in_order_of(record: Any, value: Any) -> Any:
    """Returns `value` with keys in the order of `record`'s, recursively, also in lists; new keys come last."""
    if isinstance(value, dict) and isinstance(record, Mapping):
        keys = [key for key in record if key in value]
        return {key: in_order_of(record.get(key), value[key]) for key in dict.fromkeys([*keys, *value])}
    if isinstance(value, list) and isinstance(record, list) and value and isinstance(value[0], dict):
        return list(map(in_order_of, record, value))
    return value


def without_chain(extra: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a chain's or pool's extra keys without `steps`, `samples`, `labels`, `semantics`, for a tree record."""
    return {key: value for key, value in extra.items() if key not in ("steps", "samples", "labels", "semantics")}


def _messages() -> Any:
    return importlib.import_module(MESSAGES)


def semantics_of(record: Mapping[str, Any], where: str) -> str:
    """Returns a record's label semantics, by default `correctness`. Raises RecordError if not in `SEMANTICS`."""
    semantics = SEMANTICS[0] if record.get("semantics") is None else record["semantics"]
    if semantics not in SEMANTICS:
        raise RecordError(where, "semantics", f"is {semantics!r}", f"Use one of {', '.join(SEMANTICS)}.")
    return semantics


def parent_of(value: Any, i: int, start: str, where: str) -> int:
    """Returns the `parent` of node i. Raises RecordError if it is no earlier node nor -1, which errors call `start`."""
    if not isinstance(value, int) or isinstance(value, bool) or not -1 <= value < i:
        reason = f"is {value!r}, neither -1 ({start}) nor the index of an earlier node"
        raise RecordError(where, f"nodes[{i}].parent", reason, "Put parents before their children.")
    return value


def _branch(branch: Mapping[str, Any], start: int, semantics: str, where: str, field: str) -> tuple[list[Node], dict]:
    """Returns a chain's or sample's nodes, numbered from `start`, and the remaining keys."""
    extra = dict(branch)
    steps = list_of(extra.pop("steps", None), where, field + "steps")
    if not steps:
        raise RecordError(where, field + "steps", "is empty", "A chain has at least one step.")
    labels, scores = _column(extra, "labels", steps, where, field), _column(extra, "scores", steps, where, field)
    for i in range(len(steps)):
        label_of(labels[i], semantics, where, f"{field}labels[{i}]")
        if "scores" in extra:
            number_of(scores[i], where, f"{field}scores[{i}]")
    if any(label is not None for label in labels):
        del extra["labels"]
    extra.pop("scores", None)
    outputs = extra.pop("outputs") if are_outputs(extra.get("outputs"), len(steps)) else {}
    correct = correct_of(extra.get("correct"), where, field + "correct")
    if correct is not None:
        del extra["correct"]
    nodes = [
        Node(start + i - 1 if i else -1, text_of(text, where, f"{field}steps[{i}]"), label, score=score,
             outputs={name: values[i] for name, values in outputs.items()} or NONE)
        for i, (text, label, score) in enumerate(zip(steps, labels, scores, strict=True))
    ]  # fmt: skip
    nodes[-1] = dataclasses.replace(nodes[-1], correct=correct)
    return nodes, extra


def _column(branch: Mapping[str, Any], key: str, steps: list, where: str, field: str) -> list:
    """Returns a list with one entry per step, nulls if the branch has no such key."""
    if key not in branch:
        return [None] * len(steps)
    values = list_of(branch[key], where, field + key)
    if len(values) != len(steps):
        reason = f"has {len(values)} entries for {len(steps)} steps"
        raise RecordError(where, field + key, reason, "Give one entry per step.")
    return values


def are_outputs(value: Any, steps: int | None) -> bool:
    """Returns whether a value is a non-empty mapping of named outputs: one number each, or lists of `steps` numbers."""
    if not isinstance(value, Mapping) or not value:
        return False
    columns = value.values() if steps is not None else [[number] for number in value.values()]
    return all(
        isinstance(column, list) and len(column) == (steps or 1) and set(map(type, column)) <= {int, float}
        for column in columns
    )


def _samples(samples: Any, semantics: str, where: str) -> list[Node]:
    nodes: list[Node] = []
    for i, sample in enumerate(list_of(samples, where, "samples")):
        field = f"samples[{i}]"
        if not isinstance(sample, Mapping) or "steps" not in sample:
            sample = _messages().sample_of(sample, where, field)
        answer_of(sample.get("answer"), where, field + ".answer")
        branch, extra = _branch(sample, len(nodes), semantics, where, field + ".")
        nodes += branch[:-1] + [dataclasses.replace(branch[-1], extra=extra)]
    return nodes


def _nodes(records: Any, semantics: str, where: str) -> list[Node]:
    nodes = []
    for i, record in enumerate(list_of(records, where, "nodes")):
        field = f"nodes[{i}]"
        object_of(record, where, field, 'Write {"parent": -1, "text": ...}.')
        extra = dict(record)
        parent = parent_of(extra.pop("parent", None), i, "the problem", where)
        score = number_of(extra.pop("score"), where, field + ".score") if "score" in extra else None
        outputs = extra.pop("outputs") if are_outputs(extra.get("outputs"), None) else NONE
        text = text_of(extra.pop("text", None), where, field + ".text")
        origin = extra.get("origin")
        if origin is not None:
            text_of(origin, where, field + ".origin")
        label = label_of(extra.get("label"), semantics, where, field + ".label")
        correct = correct_of(extra.get("correct"), where, field + ".correct")
        for key, value in (("label", label), ("origin", origin), ("correct", correct)):
            if value is not None:
                del extra[key]
        nodes.append(Node(parent, text, label, origin, correct, score, outputs, extra or NONE))
    if not nodes:
        raise RecordError(where, "nodes", "is empty", "A tree has at least one node.")
    return nodes


def _record_of_branch(nodes: Sequence[Node]) -> dict[str, Any]:
    leaf = nodes[-1]
    if any(node.origin is not None for node in nodes) or any(n.correct is not None or n.extra for n in nodes[:-1]):
        raise ValueError("a step of a chain or pool has only text, label and score; this one has more: use kind='tree'")
    branch: dict[str, Any] = {"steps": [node.text for node in nodes]}
    labels, scores = [node.label for node in nodes], [node.score for node in nodes]
    if any(label is not None for label in labels):
        branch["labels"] = labels
    if leaf.correct is not None:
        branch["correct"] = leaf.correct
    if any(score is not None for score in scores):
        if None in scores:
            raise ValueError("a chain or sample must have scores at all steps or at no step: use kind='tree'")
        branch["scores"] = scores
    if any(node.outputs.keys() != leaf.outputs.keys() for node in nodes):
        raise ValueError("a chain or sample must have the same named outputs at every step: use kind='tree'")
    if leaf.outputs:
        branch["outputs"] = {name: [node.outputs[name] for node in nodes] for name in leaf.outputs}
    return branch | {key: value for key, value in leaf.extra.items() if key not in branch}


def _record_of_node(node: Node) -> dict[str, Any]:
    record: dict[str, Any] = {"parent": node.parent, "text": node.text}
    known = {"label": node.label, "origin": node.origin, "correct": node.correct, "score": node.score}
    record |= {key: value for key, value in known.items() if value is not None}
    if node.outputs:
        record["outputs"] = dict(node.outputs)
    return record | {key: value for key, value in node.extra.items() if key not in record}


def read_records(
    path: str | os.PathLike, *, on_error: str = "stop", rejects: Rejects | None = None
) -> Iterator[dict[str, Any]]:
    """Yields a JSON Lines file's valid records in order; blank lines are skipped.

    Args:
      path: a UTF-8 file with one record per line, plain or gzip, or a prepared folder.
      on_error: `stop` raises at the first bad record; `skip` hands its line, byte for byte, to `rejects`.
      rejects: takes the bad lines; required for `skip`.

    Raises RecordError with FILE:LINE, field, reason and fix under `stop`, also if two records have the same `id`; while
    iterating, errors of `read_lines`, e.g. FileNotFoundError; ValueError for another `on_error` or no `rejects`.
    """
    return (record for record, _ in _read(path, reject_with(on_error, rejects)))


def read_trees(path: str | os.PathLike) -> Iterator[ReasoningTree]:
    """Yields a JSON Lines file's records as trees, with the order and errors of `read_records` under `stop`."""
    return (tree for _, tree in _read(path, reject_with("stop", None)))


def check_id(record: Mapping[str, Any], where: str, place: str, first_of: dict[str, str]) -> None:
    """Raises RecordError if another place has the record's id; else adds it to `first_of` (id to `line 3`, e.g.)."""
    if isinstance(record.get("id"), str | int):
        first = first_of.setdefault(json.dumps(record["id"]), place)
        if first != place:
            reason = f"{record['id']!r} is the id of {first} too"
            raise RecordError(where, "id", reason, "Make ids unique, or remove one of the two lines.")


def _read(
    path: str | os.PathLike, reject: Callable[[bytes, RecordError], None]
) -> Iterator[tuple[dict[str, Any], ReasoningTree]]:
    first_of: dict[str, str] = {}
    for number, line in read_lines(path):
        where = f"{os.fspath(path)}:{number}"
        try:
            record = parse(line, where)
            tree = tree_of(record, where)
            check_id(record, where, f"line {number}", first_of)
        except RecordError as error:
            reject(line, error)
        else:
            yield record, tree
