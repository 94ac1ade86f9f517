"""Trajectories as trees of nodes with roles, and back.

A path of a tree of messages is a trajectory. `tree_of_messages` is what `jprm.tree.tree_of` calls for a record with
roles, `record_of_messages` its inverse.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Any

from jprm.io.jsonl import RecordError, answer_of, list_of
from jprm.methods.trajectories.records import (
    OWN_KEYS,
    Trajectory,
    check_answer,
    content_of,
    problem_of,
    read_message,
    read_segment,
    read_tools,
    read_trajectory,
    steps_of,
)
from jprm.tree import NONE, SEMANTICS, Node, ReasoningTree, are_outputs, parent_of, path_to, semantics_of, with_rest


def tree_of_messages(record: Mapping[str, Any], where: str = "record") -> ReasoningTree:
    """Returns the tree of a trajectory's record, or of one whose nodes are messages.

    Raises RecordError, as `jprm.tree.tree_of`.
    """
    return _of_nodes(record, where) if "nodes" in record else _of_trajectory(read_trajectory(record, where), where)


def record_of_messages(tree: ReasoningTree) -> dict[str, Any]:
    """Returns the record of a tree of messages: `tree_of_messages`'s inverse.

    Raises ValueError for alternatives inside a turn.
    """
    if tree.kind == "trajectory":
        (trajectory,) = trajectories_of(tree)
        return trajectory.record()
    return with_rest({"nodes": _records_of_messages(tree)}, tree)


OF_LEAVES = ("answer", "id")
"""Keys of a trajectory that, in a tree of several, are at its last message."""


def messages_of(tree: ReasoningTree, path: Sequence[int]) -> list[dict[str, Any]]:
    """Returns the messages of nodes that follow one another, as a chat template takes them, without jprm's own keys."""
    marks = ("label", "labels", "score", "scores", "outputs", "origin", "correct", "outcome")
    messages = []
    for i in path:
        node = tree.nodes[i]
        if node.continues and messages:
            messages[-1]["content"] = (messages[-1]["content"] or "") + node.text
            continue
        null = "content" in node.extra and node.extra["content"] is None
        others = {key: value for key, value in node.extra.items() if key not in ("content", *marks)}
        if others.get("reasoning") and not others.get("reasoning_content"):  # vLLM's name; templates know the other
            others["reasoning_content"] = others.pop("reasoning")
        messages.append({"role": node.role, "content": None if null else node.text, **others})
    return messages


def trajectories_of(tree: ReasoningTree) -> list[Trajectory]:
    """Returns the trajectory of every path of a tree of messages to a leaf, in the order of the leaves.

    `tree_of_trajectories` is the inverse. A leaf's own `outcome` is its trajectory's.
    """
    parents = [node.parent for node in tree.nodes]
    extra, trajectories = dict(tree.extra), []
    extra |= {} if tree.answer is None else {"answer": tree.answer}
    tools, outcome, segment = (extra.pop(key, None) for key in ("tools", "outcome", "segment"))
    for leaf in sorted({*range(len(parents))} - {*parents}):
        groups = nodes_of_messages(tree, path_to(leaf, parents))
        records = [_record_of_message([tree.nodes[i] for i in group], segment or "turn") for group in groups]
        reward, about = outcome, dict(extra)
        if tree.kind != "trajectory":
            reward = records[-1].pop("outcome", None) if outcome is None else outcome
            about |= {key: records[-1].pop(key) for key in OF_LEAVES if key in records[-1]}
        last = next((record for record in records[::-1] if record["role"] == "assistant"), {})
        if last.get("correct") is not None and last["correct"] is _reached(reward):
            del last["correct"]
        about |= {key: None for key in ("tools", "outcome", "segment") if key in tree.extra and tree.extra[key] is None}
        trajectories.append(
            Trajectory(tuple(records), tuple(tools or ()), reward, segment or "turn", tree.semantics, about)
        )
    return trajectories


def tree_of_trajectories(trajectories: Sequence[Trajectory]) -> ReasoningTree:
    """Returns the tree of messages of trajectories of one task; what they share from the start is there once.

    Messages are shared that are equal in all that a model reads. Two trajectories that are equal to their ends stay
    two leaves. Labels and scores of shared turns are the first trajectory's. The tree's other keys are those that all
    trajectories have alike; an `answer` of one trajectory goes to its leaf.

    Raises ValueError for trajectories of different tools, segments or semantics.
    """
    first = trajectories[0]
    for other in trajectories[1:]:
        for field in ("tools", "segment", "semantics"):
            if getattr(other, field) != getattr(first, field):
                raise ValueError(f"trajectories of one tree have the same {field}; these differ")
    shared = {k: v for k, v in first.extra.items() if all(t.extra.get(k) == v for t in trajectories)}
    nodes: list[Node] = []
    ends: dict[tuple[int, str], int] = {}  # (parent, message) -> the last node of the message
    for trajectory in trajectories:
        above = -1
        for i, message in enumerate(trajectory.messages):
            said = {key: value for key, value in message.items() if key not in OWN_KEYS}
            key = (above, json.dumps(said, sort_keys=True))
            last = i == len(trajectory.messages) - 1
            if key in ends and not last:
                above = ends[key]
                continue
            if last:
                of_leaf = {k: v for k, v in trajectory.extra.items() if k in OF_LEAVES and k not in shared}
                of_leaf |= {} if trajectory.outcome is None else {"outcome": trajectory.outcome}
                message = {**message, **of_leaf}
            nodes += _nodes_of_message(message, above, len(nodes), trajectory.segment)
            above = len(nodes) - 1
            if not last:
                ends[key] = above
    extra = dict(shared)
    answer = extra.pop("answer", None)
    extra |= {"tools": list(first.tools)} if first.tools else {}
    extra |= {"segment": first.segment} if first.segment != "turn" else {}
    return ReasoningTree(first.problem, _with_outcomes(nodes), answer, first.semantics, "tree", extra)


def as_messages(tree: ReasoningTree) -> ReasoningTree:
    """Returns a chain, pool or tree of steps as a tree of messages: the problem is the user's, a chain is one turn.

    A step that another one follows gets a newline. `as_steps` is the inverse.
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


def as_steps(tree: ReasoningTree, kind: str = "tree") -> ReasoningTree:
    """Returns the tree of steps, of a `kind`, that `as_messages` made a tree of messages of."""
    start = [node for node in tree.nodes if not node.is_step]
    inner = {node.parent for node in tree.nodes}
    nodes = [
        dataclasses.replace(node, parent=max(node.parent - len(start), -1), role=None, continues=False,
                            text=node.text[:-1] if i in inner else node.text)
        for i, node in enumerate(tree.nodes) if node.is_step
    ]  # fmt: skip
    extra = {key: value for key, value in tree.extra.items() if key != "segment"}
    if start[0].role == "system":
        extra["system"] = start[0].text
    return dataclasses.replace(tree, problem=start[-1].text, nodes=tuple(nodes), kind=kind, extra=extra)


def nodes_of_messages(tree: ReasoningTree, path: Sequence[int]) -> list[list[int]]:
    """Returns the nodes of a path, one list a message."""
    groups: list[list[int]] = []
    for i in path:
        if tree.nodes[i].continues and groups:
            groups[-1].append(i)
        else:
            groups.append([i])
    return groups


def _of_trajectory(trajectory: Trajectory, where: str) -> ReasoningTree:
    extra, nodes = dict(trajectory.extra), []
    extra |= {"tools": list(trajectory.tools)} if trajectory.tools else {}
    extra |= {"outcome": trajectory.outcome} if trajectory.outcome is not None else {}
    extra |= {"segment": trajectory.segment} if trajectory.segment != "turn" else {}
    answer = answer_of(extra.get("answer"), where, "answer")
    if answer is not None:
        del extra["answer"]
    for message in trajectory.messages:
        nodes += _nodes_of_message(message, len(nodes) - 1, len(nodes), trajectory.segment)
    last = max(i for i, node in enumerate(nodes) if node.is_step)
    if nodes[last].correct is None:
        nodes[last] = dataclasses.replace(nodes[last], correct=_reached(trajectory.outcome))
    return ReasoningTree(trajectory.problem, tuple(nodes), answer, trajectory.semantics, "trajectory", extra)


def _of_nodes(record: Mapping[str, Any], where: str) -> ReasoningTree:
    """Returns the tree of a record whose nodes are messages, each after its parent."""
    extra, nodes = dict(record), []
    records = list_of(extra.pop("nodes"), where, "nodes")
    segment, semantics = read_segment(extra, where), semantics_of(extra, where)
    read_tools(extra.get("tools"), where)
    answer = answer_of(extra.get("answer"), where, "answer")
    for key, absent in (("answer", answer is None), ("semantics", semantics == SEMANTICS[0])):
        if not absent:
            del extra[key]
    end_of: list[int] = []  # the last node of each message
    calls_at: list[list | None] = []
    messages = []
    for i, message in enumerate(records):
        field = f"nodes[{i}]"
        message = read_message(message, segment, semantics, where, field)
        parent = parent_of(message.pop("parent", None), i, "the start", where)
        calls_at.append(check_answer(message, calls_at[parent] if parent >= 0 else None, where, field))
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
    """Returns the nodes of a checked message, numbered from `start`: one, or one for each step of a turn."""
    extra = {key: value for key, value in message.items() if key not in ("role", "content", "parent")}
    if not isinstance(message.get("content"), str):
        extra["content"] = message.get("content")
    role = message["role"]
    if role != "assistant":
        return [Node(parent, content_of(message), extra=extra or NONE, role=role)]
    texts = steps_of(message, segment)
    columns: dict[str, list] = {}
    for one, many in (("label", "labels"), ("score", "scores")):
        key = one if segment == "turn" else many
        values = [message.get(key)] if segment == "turn" else message.get(key) or []
        columns[one] = list(values) or [None] * len(texts)
        if any(value is not None for value in columns[one]):
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
    """Returns the message of its nodes, with labels and scores: `_nodes_of_message`'s inverse."""
    first, last = parts[0], parts[-1]
    text = "".join(part.text for part in parts)
    content = [{"type": "text", "text": part.text} for part in parts] if segment == "parts" and last.continues else text
    record: dict[str, Any] = {"role": first.role, "content": first.extra.get("content", content)}
    for one, many in (("label", "labels"), ("score", "scores")):
        values = [getattr(part, one) for part in parts]
        if any(value is not None for value in values):
            if one == "score" and None in values:
                raise ValueError("a turn has a score at every step or at none")
            record |= {one: values[0]} if segment == "turn" else {many: values}
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
    """Returns whether an outcome says that the task was solved: 1 or 0; None for another reward."""
    return bool(outcome) if isinstance(outcome, int | float) and outcome in (0, 1) else None


def _with_outcomes(nodes: Sequence[Node]) -> tuple[Node, ...]:
    """Returns the nodes with `correct` at each last step whose own `outcome`, or that of a leaf after it, says it."""
    judged = list(nodes)
    for i, node in enumerate(nodes):
        reached = _reached(node.extra.get("outcome"))
        if reached is None:
            continue
        at = i
        while at >= 0 and not nodes[at].is_step:
            at = nodes[at].parent
        if at >= 0 and judged[at].correct is None:
            judged[at] = dataclasses.replace(judged[at], correct=reached)
    return tuple(judged)
