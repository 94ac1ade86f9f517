"""Trajectories: agent turns and the replies of users and tools, as chat messages.

A record is {"messages": [...], "tools": [...]?, "outcome": number?, "segment": str?}. Each assistant message is a turn.
A turn is one step, or is split into steps by a rule of `jprm.steps` (`segment`). Messages from the system, the user and
tools are context: the model reads them, but they are neither scored nor trained.

In a tree, every node has a role, and a path of a tree of messages is a trajectory. `jprm.tree.tree_of` calls
`tree_of_messages` for records with roles; `record_of_messages` is its inverse.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Any

from jprm import steps
from jprm.io.jsonl import RecordError, answer_of, label_of, list_of, number_of, object_of, text_of
from jprm.methods.messages.messages import check_calls, normal_message, text_of_parts
from jprm.tree import NONE, SEMANTICS, Node, ReasoningTree, are_outputs, parent_of, path_to, semantics_of, with_rest

ROLES = ("system", "user", "assistant", "tool")

SEGMENTS = ("turn", "parts", "auto", *steps.RULES)
"""Units of a step: the whole turn, each text part of its content, or the steps found by a rule of `jprm.steps`."""

OWN_KEYS = ("label", "labels", "score", "scores", "outputs", "origin", "correct", "outcome", "parent",
            "reward", "mc_return")  # fmt: skip
"""Message keys that belong to jprm; chat templates never see them."""


KNOWN = {"messages": None, "tools": [], "outcome": None, "segment": "turn", "semantics": SEMANTICS[0]}
"""Keys of a trajectory record and their defaults."""


def known(record: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the items of `record` whose keys are in `KNOWN`, if not null or the default, in the order of `KNOWN`."""
    return {key: record[key] for key, absent in KNOWN.items() if record.get(key) not in (None, absent)}


def problem_of(messages: Sequence[Mapping[str, Any]], extra: Mapping[str, Any]) -> str:
    """Returns `extra["problem"]` if it is not blank, else the text of the first user message.

    Failing that, the first message with text, or "(no text)". `messages` must be checked (`read_message`).
    """
    if isinstance(text := extra.get("problem"), str) and text.strip():
        return text
    texts = [(content_of(message), message["role"]) for message in messages]
    texts = [(text, role) for text, role in texts if text.strip()]
    return next((text for text, role in texts if role == "user"), texts[0][0] if texts else "(no text)")


def is_trajectory(record: Mapping[str, Any]) -> bool:
    """Whether a record with `messages` is a trajectory, rather than a plain exchange.

    A plain exchange has one user and one assistant message, without tools, labels, scores, `outcome` or `segment`. It
    is free text, which `jprm.methods.messages.free_text` splits into the steps of a chain.
    """
    if "messages" not in record:
        return False
    if any(key in record for key in ("tools", "outcome", "segment")):
        return True
    messages = record["messages"]
    if not isinstance(messages, list) or not all(isinstance(message, Mapping) for message in messages):
        return False
    roles = [message.get("role") for message in messages]
    marked = any(message.get("tool_calls") or any(key in message for key in OWN_KEYS) for message in messages)
    return marked or "tool" in roles or roles.count("assistant") > 1 or roles.count("user") > 1


def read_trajectory(record: Mapping[str, Any], where: str = "record") -> dict[str, Any]:
    """Returns a copy of a trajectory record, validated, with normal messages (`jprm.methods.messages.messages`).

    Known keys come first (`known`). `classes` of turns become the record's list, one entry per turn. An absent
    `content` becomes null, which is allowed if the turn has calls or thoughts. An empty content is always allowed,
    since a tool may return no text.

    Raises RecordError with `where`, the message and its field, the reason and a remedy.
    """
    record = object_of(record, where, "record", "Write one JSON object a line.")
    messages = list_of(record.get("messages"), where, "messages")
    _check_prompt(record, where)
    segment, semantics = read_segment(record, where), semantics_of(record, where)
    check_tools(record.get("tools"), where)
    if record.get("outcome") is not None:
        number_of(record["outcome"], where, "outcome")
    records, ids = [], None
    for i, message in enumerate(messages):
        message = read_message(message, segment, semantics, where, f"messages[{i}]")
        ids = check_answer(message, ids, where, f"messages[{i}]")
        records.append(message)
    if not any(message["role"] == "assistant" for message in records):
        raise RecordError(where, "messages", "have no turn of the assistant", "There is nothing to score without one.")
    checked = {**record, "messages": records, **_classes_of_turns(record, records, segment, where)}
    return known(checked) | checked


def _classes_of_turns(
    record: Mapping[str, Any], messages: Sequence[dict[str, Any]], segment: str, where: str
) -> dict[str, Any]:
    """Takes `classes` out of the turns; returns them as the record's field, `{"classes": [...]}`, or {}.

    A turn's classes are an object of outcomes, e.g. `{"loop": 1, "wrong_tool": 0}` (values of at least 0.5 hold), a
    name, a list of names, or null. Raises RecordError for anything else.
    """
    if not any("classes" in message for message in messages):
        return {}
    if "classes" in record or segment != "turn":
        remedy = "Write one of the two; classes of steps inside turns go into the record's list."
        raise RecordError(where, "classes", "stand beside turns, and the record has its own or a `segment`", remedy)
    classes: list[list[str] | None] = []
    for i, message in enumerate(messages):
        field, outcomes = f"messages[{i}].classes", message.pop("classes", None)
        if message["role"] != "assistant":
            if outcomes is not None:
                raise RecordError(where, field, f"is of the {message['role']}", "Only turns of the assistant have it.")
            continue
        if isinstance(outcomes, Mapping):
            flags = {name: int(value) if isinstance(value, bool) else value for name, value in outcomes.items()}
            values = {name: number_of(value, where, f"{field}.{name}") for name, value in flags.items()}
            outcomes = [name for name, value in values.items() if value >= 0.5]
        names = [outcomes] if isinstance(outcomes, str) else outcomes
        names = None if names is None else [text_of(name, where, field) for name in list_of(names, where, field)]
        classes.append(names)
    return {"classes": classes}


def read_message(message: Any, segment: str, semantics: str, where: str, field: str) -> dict[str, Any]:
    """Validates and normalises a message; an absent `content` becomes null. Raises RecordError, naming `field`.

    Returns a new dict; other keys stay. Labels must fit `semantics`, e.g. `correctness`, and their number the steps by
    `segment`, e.g. `turn`.
    """
    role = object_of(message, where, field, 'Write {"role": "user", "content": ...}.').get("role")
    if role not in ROLES:
        raise RecordError(where, field + ".role", f"is {role!r}", f"Use one of {', '.join(ROLES)}.")
    message = normal_message(message, where, field)
    if message.get("function_call"):
        raise RecordError(where, field + ".function_call", "is the older form of a call", "Write `tool_calls`.")
    checked = {**message, "content": message.get("content")}
    if checked["content"] is not None:
        text_of_parts(checked["content"], where, field + ".content")
    elif role != "assistant":
        raise RecordError(where, field + ".content", "is null or absent", 'Write a string, "" where there is none.')
    if (calls := message.get("tool_calls")) is not None:
        check_calls(calls, role, where, field + ".tool_calls")
    elif checked["content"] is None and not message.get("reasoning_content") and role == "assistant":
        remedy = 'Write the turn\'s text, "" where it wrote nothing.'
        raise RecordError(where, field + ".content", "is null or absent, and the turn calls no tool", remedy)
    for key in ("tool_call_id", "name"):
        if message.get(key) is not None:
            text_of(message[key], where, f"{field}.{key}", blank=True)
    _check_marks(checked, segment, semantics, where, field)
    return checked


def content_of(message: Mapping[str, Any]) -> str:
    """Returns the joined text of a checked message; "" without text."""
    content = message.get("content")
    if isinstance(content, list):
        return "".join(part["text"] for part in content)
    return content or ""


def steps_of(message: Mapping[str, Any], segment: str) -> list[str]:
    """Splits a turn into step texts; joined, they equal its content. A turn without text is one step.

    `message` must be checked. `segment` is `turn` (one step), `parts` (the content's parts), `auto`, or a rule of
    `jprm.steps`.
    """
    text = content_of(message)
    if segment == "parts":
        parts = message.get("content")
        return [part["text"] for part in parts] or [""] if isinstance(parts, list) else [text]
    return [text] if segment == "turn" or not text.strip() else steps.split(text, segment)


def check_answer(
    message: Mapping[str, Any], ids: Mapping[str, None] | None, where: str, field: str
) -> Mapping[str, None] | None:
    """Checks a message against the call ids of the last turn; returns the `ids` for the next message.

    They are the keys of a dict; `None` before the first turn. {} if the turn has no calls or a call has no id: then
    tools may answer under any id. A tool message without an id passes.

    Raises RecordError if a tool message comes before any turn, or its `tool_call_id` is not a call of the last turn.
    """
    if message["role"] == "assistant":
        calls = message.get("tool_calls") or []
        named = [call["id"] for call in calls if isinstance(call.get("id"), str)]
        return dict.fromkeys(named if len(named) == len(calls) else ())
    if message["role"] != "tool":
        return ids
    if ids is None:
        raise RecordError(where, field + ".role", "is 'tool' before any turn", "A tool answers a call of a turn.")
    call_id = message.get("tool_call_id")
    if ids and call_id is not None and call_id not in ids:
        reason = f"is {call_id!r}, and the turn before calls {', '.join(map(repr, ids))}"
        raise RecordError(where, field + ".tool_call_id", reason, "Name the call that the tool answers.")
    return ids


def _check_prompt(record: Mapping[str, Any], where: str) -> None:
    """Raises RecordError if the record has `system`, `instructions`, `documents` or `functions` beside its messages.

    A model would not read them: a chat template writes only messages and tools.
    """
    for key in ("system", "instructions", "documents", "functions"):
        if record.get(key):
            remedy = "Write it as the first message, of the role system; functions go into `tools`."
            raise RecordError(where, key, "is part of the prompt, and a trajectory has it in its messages", remedy)


def read_segment(record: Mapping[str, Any], where: str) -> str:
    """Returns the record's `segment`, `turn` if absent or null. Raises RecordError unless it is one of `SEGMENTS`."""
    segment = "turn" if record.get("segment") is None else record["segment"]
    if segment not in SEGMENTS:
        raise RecordError(where, "segment", f"is {segment!r}", f"Use one of {', '.join(SEGMENTS)}.")
    return segment


def check_tools(tools: Any, where: str) -> None:
    """Raises RecordError unless `tools` is absent or a list of schemas with names.

    The name is `function.name` or, in a schema without `function`, `name`. `where` is FILE:LINE, for the message.
    """
    for i, tool in enumerate([] if tools is None else list_of(tools, where, "tools")):
        schema = object_of(tool, where, f"tools[{i}]", "Write its JSON schema.").get("function", tool)
        if not isinstance(schema, Mapping) or not isinstance(schema.get("name"), str) or not schema["name"]:
            remedy = 'Write {"type": "function", "function": {"name": ..., "parameters": {...}}}.'
            raise RecordError(where, f"tools[{i}]", "has no name", remedy)


def _check_marks(message: Mapping[str, Any], segment: str, semantics: str, where: str, field: str) -> None:
    """Checks labels, scores and outcomes.

    They must be numbers per turn, or lists with one entry per step if a `segment` rule splits turns.
    """
    marks = [key for key in ("label", "labels", "score", "scores") if message.get(key) is not None]
    if marks and message["role"] != "assistant":
        reason = f"is of the {message['role']}, whose messages are context"
        raise RecordError(where, f"{field}.{marks[0]}", reason, "Only turns of the assistant have one.")
    single, many = ("label", "score"), ("labels", "scores")
    for key, other in zip(many, single, strict=True) if segment == "turn" else zip(single, many, strict=True):
        if key in message:
            reason = f"is there, and `segment` is {segment!r}"
            raise RecordError(where, f"{field}.{key}", reason, f"Write `{other}`, or another `segment`.")
    if segment == "turn":
        label_of(message.get("label"), semantics, where, f"{field}.label")
        if "score" in message:
            number_of(message["score"], where, f"{field}.score")
    else:
        for key in (key for key in many if message.get(key) is not None):
            count, values = len(steps_of(message, segment)), list_of(message[key], where, f"{field}.{key}")
            if len(values) != count:
                reason = f"has {len(values)} entries for {count} steps"
                raise RecordError(where, f"{field}.{key}", reason, "Give one entry a step.")
            for j, value in enumerate(values):
                place = f"{field}.{key}[{j}]"
                label_of(value, semantics, where, place) if key == "labels" else number_of(value, where, place)
    if message.get("outcome") is not None:
        number_of(message["outcome"], where, f"{field}.outcome")


# ---- Trajectories as trees of nodes with roles, and back.


def tree_of_messages(record: Mapping[str, Any], where: str = "record") -> ReasoningTree:
    """Builds the tree of a trajectory record, or a record with messages as nodes.

    Its kind is `trajectory`, or `tree` for a record with `nodes`. A final turn without `correct` takes it from an
    `outcome` of 0 or 1. Raises RecordError, naming `where`, the field, the reason and the fix.
    """
    return _of_nodes(record, where) if "nodes" in record else _of_trajectory(read_trajectory(record, where), where)


def record_of_messages(tree: ReasoningTree) -> dict[str, Any]:
    """Converts a tree of messages to its record; the inverse of `tree_of_messages`.

    {"messages", ...} for a trajectory, else {"nodes", ...}. Raises ValueError if alternatives begin inside a turn, a
    turn's labels have several origins, or only some of its steps have scores.
    """
    if tree.kind == "trajectory":
        (record,) = trajectories_of(tree)
        return record
    return with_rest({"nodes": _records_of_messages(tree)}, tree)


OF_LEAVES = ("answer", "id")
"""Keys of a trajectory that move to its last message in a tree of several trajectories."""


def messages_of(tree: ReasoningTree, path: Sequence[int]) -> list[dict[str, Any]]:
    """Returns the messages along a path for a chat template: `role`, `content` (text or null) and e.g. `tool_calls`.

    `path` has node indices from the first message on, e.g. by `jprm.tree.path_to`. jprm's own keys are left
    out, e.g. labels and scores (`OWN_KEYS`).
    """
    messages = []
    for group in nodes_of_messages(tree, path):
        first, text = tree.nodes[group[0]], "".join(tree.nodes[i].text for i in group)
        null = not text and "content" in first.extra and first.extra["content"] is None
        others = {key: value for key, value in first.extra.items() if key not in ("content", *OWN_KEYS)}
        messages.append({"role": first.role, "content": None if null else text, **others})
    return messages


def trajectories_of(tree: ReasoningTree) -> list[dict[str, Any]]:
    """Returns one trajectory record per leaf, in leaf order; the inverse of `tree_of_trajectories`.

    The `outcome` of a leaf becomes the outcome of its trajectory. Raises ValueError if a turn's labels have several
    origins, or only some of its steps have scores.
    """
    parent = [node.parent for node in tree.nodes]
    extra, trajectories = dict(tree.extra), []
    extra |= {} if tree.answer is None else {"answer": tree.answer}
    tools, outcome, segment = (extra.pop(key, None) for key in ("tools", "outcome", "segment"))
    segment = segment or "turn"
    for leaf in sorted(set(range(len(tree.nodes))) - set(parent)):
        groups = nodes_of_messages(tree, path_to(leaf, parent))
        records = [_record_of_message([tree.nodes[i] for i in group], segment) for group in groups]
        reward, about = outcome, dict(extra)
        if tree.kind != "trajectory":
            reward = records[-1].pop("outcome", None) if outcome is None else outcome
            about |= {key: records[-1].pop(key) for key in OF_LEAVES if key in records[-1]}
        last = next((record for record in records[::-1] if record["role"] == "assistant"), {})
        if last.get("correct") is not None and last["correct"] is _reached(reward):
            del last["correct"]
        about |= {key: None for key in ("tools", "outcome", "segment") if key in tree.extra and tree.extra[key] is None}
        fields = {
            "messages": records,
            "tools": tools,
            "outcome": reward,
            "segment": segment,
            "semantics": tree.semantics,
        }
        trajectories.append(known(fields) | about | known(fields))
    return trajectories


def tree_of_trajectories(records: Sequence[Mapping[str, Any]]) -> ReasoningTree:
    """Merges checked trajectories of one task, at least one, into a tree that shares their common prefixes.

    `records` must come from `read_trajectory`. Messages are shared if the model reads the same text. Two identical
    trajectories still get two leaves. Shared turns take labels and scores from the first trajectory. The tree keeps the
    keys that are equal in all trajectories; a different `answer` or `id` goes to the leaf, any other differing key is
    lost.

    Raises ValueError if the trajectories differ in tools, segment or semantics, IndexError if there are no records.
    """
    first, segment = known(records[0]), records[0].get("segment") or "turn"
    for field in ("tools", "segment", "semantics"):
        if any(known(other).get(field) != first.get(field) for other in records):
            raise ValueError(f"trajectories of one tree have the same {field}; these differ")
    others = [{k: v for k, v in record.items() if k not in known(record)} for record in records]
    shared = {k: v for k, v in others[0].items() if all(other.get(k) == v for other in others)}
    nodes: list[Node] = []
    ends: dict[tuple[int, str], int] = {}  # (parent, message) -> the last node of the message
    for record, other in zip(records, others, strict=True):
        above = -1
        for i, message in enumerate(record["messages"]):
            content = {key: value for key, value in message.items() if key not in OWN_KEYS}
            key = (above, json.dumps(content, sort_keys=True))
            last = i == len(record["messages"]) - 1
            if key in ends and not last:
                above = ends[key]
                continue
            if last:
                of_leaf = {k: v for k, v in other.items() if k in OF_LEAVES and k not in shared}
                of_leaf |= {} if record.get("outcome") is None else {"outcome": record["outcome"]}
                message = {**message, **of_leaf}
            nodes += _nodes_of_message(message, above, len(nodes), segment)
            above = len(nodes) - 1
            if not last:
                ends[key] = above
    extra = dict(shared)
    answer = extra.pop("answer", None)
    extra |= {key: first[key] for key in ("tools", "segment") if key in first}
    problem, semantics = problem_of(records[0]["messages"], others[0]), first.get("semantics", SEMANTICS[0])
    return ReasoningTree(problem, _with_outcomes(nodes), answer, semantics, "tree", extra)


def as_messages(tree: ReasoningTree) -> ReasoningTree:
    """Converts a tree of steps to a tree of messages; returns a tree of messages unchanged.

    The problem becomes a user message, after the system message if there is one, and each chain one turn. A newline
    joins a step to the next one. The result has kind `tree` and segment `parts`.
    """
    if tree.of_messages:
        return tree
    start = [Node(-1, tree.system, role="system")] if tree.system else []
    start += [Node(len(start) - 1, tree.problem, role="user")]
    inner = {node.parent for node in tree.nodes}
    nodes = [
        dataclasses.replace(node, parent=node.parent + len(start), text=node.text + "\n" * (i in inner),
                            role="assistant", continues=node.parent >= 0)
        for i, node in enumerate(tree.nodes)
    ]  # fmt: skip
    extra = {key: value for key, value in tree.extra.items() if not tree.system or key != "system"}
    return dataclasses.replace(tree, nodes=(*start, *nodes), kind="tree", extra=extra | {"segment": "parts"})


def nodes_of_messages(tree: ReasoningTree, path: Sequence[int]) -> list[list[int]]:
    """Groups the node indices of a path by message, in order: a turn has one per step, other messages have one."""
    groups: list[list[int]] = []
    for i in path:
        if tree.nodes[i].continues and groups:
            groups[-1].append(i)
        else:
            groups.append([i])
    return groups


def _of_trajectory(extra: dict[str, Any], where: str) -> ReasoningTree:
    problem, semantics = problem_of(extra["messages"], extra), extra.get("semantics") or SEMANTICS[0]
    nodes: list[Node] = []
    for message in extra.pop("messages"):
        nodes += _nodes_of_message(message, len(nodes) - 1, len(nodes), extra.get("segment") or "turn")
    answer = answer_of(extra.get("answer"), where, "answer")
    for key, absent in (("answer", answer is None), ("semantics", semantics == SEMANTICS[0])):
        if not absent:
            del extra[key]
    last = max(i for i, node in enumerate(nodes) if node.is_step)
    if nodes[last].correct is None:
        nodes[last] = dataclasses.replace(nodes[last], correct=_reached(extra.get("outcome")))
    return ReasoningTree(problem, tuple(nodes), answer, semantics, "trajectory", extra)


def _of_nodes(record: Mapping[str, Any], where: str) -> ReasoningTree:
    """Returns the tree of a record with messages as nodes; each must come after its parent."""
    extra, nodes = dict(record), []
    records = list_of(extra.pop("nodes"), where, "nodes")
    segment, semantics = read_segment(extra, where), semantics_of(extra, where)
    _check_prompt(extra, where)
    check_tools(extra.get("tools"), where)
    answer = answer_of(extra.get("answer"), where, "answer")
    for key, absent in (("answer", answer is None), ("semantics", semantics == SEMANTICS[0])):
        if not absent:
            del extra[key]
    end_of: list[int] = []  # the last node of each message
    ids_at: list[Mapping[str, None] | None] = []  # that an answer to each message may name
    messages = []
    for i, message in enumerate(records):
        field = f"nodes[{i}]"
        message = read_message(message, segment, semantics, where, field)
        parent = parent_of(message.pop("parent", None), i, "the start", where)
        ids_at.append(check_answer(message, ids_at[parent] if parent >= 0 else None, where, field))
        answer_of(message.get("answer"), where, field + ".answer")
        above = end_of[parent] if parent >= 0 else -1
        nodes += _nodes_of_message(message, above, len(nodes), segment)
        end_of.append(len(nodes) - 1)
        messages.append(message)
    if not any(node.is_step for node in nodes):
        raise RecordError(where, "nodes", "have no turn of the assistant", "There is nothing to score without one.")
    problem = problem_of(messages, extra)
    return ReasoningTree(problem, _with_outcomes(nodes), answer, semantics, "tree", extra)


def _nodes_of_message(message: Mapping[str, Any], parent: int, start: int, segment: str) -> list[Node]:
    """Converts a checked message to nodes, numbered from `start`; a turn has one per step."""
    extra = {key: value for key, value in message.items() if key not in ("role", "content", "parent")}
    if not isinstance(message.get("content"), str):
        extra["content"] = message.get("content")
    role = message["role"]
    if role != "assistant":
        return [Node(parent, content_of(message), extra=extra or NONE, role=role)]
    texts = steps_of(message, segment)
    columns: dict[str, list] = {}
    for single, many in (("label", "labels"), ("score", "scores")):
        key = single if segment == "turn" else many
        values = [message.get(key)] if segment == "turn" else message.get(key) or []
        columns[single] = list(values) or [None] * len(texts)
        if any(value is not None for value in columns[single]):
            del extra[key]
    outputs: Mapping[str, Any] = NONE
    if are_outputs(extra.get("outputs"), None if segment == "turn" else len(texts)):
        outputs = extra.pop("outputs")
    marked = any(label is not None for label in columns["label"])
    origin = extra.pop("origin") if marked and isinstance(extra.get("origin"), str) else None
    correct = extra.pop("correct") if isinstance(extra.get("correct"), bool) else None
    nodes = []
    for j, text in enumerate(texts):
        label = columns["label"][j]
        named = {name: value if segment == "turn" else value[j] for name, value in outputs.items()} or NONE
        nodes.append(
            Node(parent if j == 0 else start + j - 1, text, label, origin if label is not None else None,
                 correct if j == len(texts) - 1 else None, columns["score"][j], named,
                 (extra or NONE) if j == 0 else NONE, role, j > 0)
        )  # fmt: skip
    return nodes


def _record_of_message(parts: Sequence[Node], segment: str) -> dict[str, Any]:
    """Converts nodes to their message, with labels and scores; the inverse of `_nodes_of_message`."""
    first, last = parts[0], parts[-1]
    text = "".join(part.text for part in parts)
    content = [{"type": "text", "text": part.text} for part in parts] if segment == "parts" and last.continues else text
    record: dict[str, Any] = {"role": first.role, "content": first.extra.get("content", content)}
    for single, many in (("label", "labels"), ("score", "scores")):
        values = [getattr(part, single) for part in parts]
        if any(value is not None for value in values):
            if single == "score" and None in values:
                raise ValueError("a turn has a score at every step or at none")
            record |= {single: values[0]} if segment == "turn" else {many: values}
    if first.outputs:
        names = first.outputs
        record["outputs"] = {n: names[n] if segment == "turn" else [p.outputs[n] for p in parts] for n in names}
    origins = {part.origin for part in parts} - {None}
    if len(origins) > 1:
        raise ValueError(f"a turn's labels have one origin; these have {', '.join(sorted(map(str, origins)))}")
    if origins:
        record["origin"] = origins.pop()
    if last.correct is not None and last.correct is not _reached(first.extra.get("outcome")):
        record["correct"] = last.correct
    extra = {key: value for part in parts for key, value in part.extra.items()}
    return record | {key: value for key, value in extra.items() if key not in record}


def _records_of_messages(tree: ReasoningTree) -> list[dict[str, Any]]:
    groups: list[list[int]] = []
    place: dict[int, int] = {}  # of each node: its message
    for i, node in enumerate(tree.nodes):
        if node.continues and node.parent >= 0 and groups[place[node.parent]][-1] == node.parent:
            place[i] = place[node.parent]
            groups[place[i]].append(i)
        elif node.continues:
            raise ValueError("alternatives inside a turn have no place in a tree of messages")
        else:
            place[i] = len(groups)
            groups.append([i])
    records = []
    segment = tree.extra.get("segment") or "turn"
    for group in groups:
        parent = tree.nodes[group[0]].parent
        if parent >= 0 and groups[place[parent]][-1] != parent:
            raise ValueError("a message follows the middle of a turn: a tree of messages has no place for it")
        message = _record_of_message([tree.nodes[i] for i in group], segment)
        records.append({"parent": place[parent] if parent >= 0 else -1, **message})
    return records


def _reached(outcome: Any) -> bool | None:
    """Returns whether the task was solved: true for 1, false for 0; other outcomes leave it open."""
    return bool(outcome) if isinstance(outcome, int | float) and outcome in (0, 1) else None


def _with_outcomes(nodes: Sequence[Node]) -> tuple[Node, ...]:
    """Sets `correct` of final steps from their `outcome`, or from a later leaf's."""
    judged = list(nodes)
    steps: list[int] = []  # the last step of each node's path, -1 for none
    for i, node in enumerate(nodes):
        steps.append(at := i if node.is_step else steps[node.parent] if node.parent >= 0 else -1)
        reached = _reached(node.extra.get("outcome"))
        if reached is not None and at >= 0 and judged[at].correct is None:
            judged[at] = dataclasses.replace(judged[at], correct=reached)
    return tuple(judged)
