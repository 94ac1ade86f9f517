"""Published agent runs as trajectories: tau-bench, tau2-bench, Who&When and AgentRx."""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import re
from collections.abc import Iterator, Mapping
from typing import Any

from jprm.io.jsonl import RecordError, list_of, object_of, parse
from jprm.io.storage import path_of
from jprm.methods.data.agents.logs import kept, trajectory_of
from jprm.methods.data.agents.parts import Leftovers, SessionOptions
from jprm.methods.data.reader import Dropped, LeftOut, NoOptions, Reader, Record, object_in, take
from jprm.methods.messages.messages import THOUGHTS, WRAPPERS
from jprm.methods.messages.records import read_message
from jprm.tree import SEMANTICS


def parse_tau_bench(item: Any, where: str, options: NoOptions) -> Iterator[Record]:
    """Yields one trial of tau-bench (Yao et al. 2024, arXiv 2406.12045), with its reward as the outcome.

    The problem is the task instruction. Only the simulated user sees it, but it groups the trials of a task. `task_id`,
    `trial` and `info` are kept. The file has no tool schemas.

    Raises RecordError if the item has another form.
    """
    turns = enumerate(take(item, "traj", list, where))
    messages = [read_message(message, "turn", SEMANTICS[0], where, f"traj[{i}]") for i, message in turns]
    record = {"problem": take(item, "info.task.instruction", str, where), "messages": messages}
    record["outcome"] = take(item, "reward", (int, float), where)
    yield trajectory_of(record | {key: item[key] for key in ("task_id", "trial", "info") if key in item}, where)


def parse_who_and_when(item: Any, where: str, options: NoOptions) -> Iterator[Record]:
    """Yields a failed log of Who&When (Zhang et al. 2025, arXiv 2505.00212) with its first wrong step.

    Every message is a turn unless its role is `human`; this includes a terminal's messages, because `mistake_step`
    counts them. A turn begins with its agent's name in brackets, since chat templates do not show `name`. The agents'
    prompts form one system message. Turns before `mistake_step` (from 0) get label 1, that turn 0, and later ones no
    label. The outcome is 0. `question` becomes the problem, `ground_truth` the answer; other keys are kept.

    Raises RecordError if the item has another form, or `mistake_step` names no turn.
    """
    item = object_of(item, where, "record", "Is this file of Who&When?")
    history, messages = take(item, "history", list, where), []
    prompts = item.get("system_prompt") or {}
    prompts = object_of(prompts, where, "system_prompt", "Write an object of a prompt for each agent.")
    if prompts:
        text = "\n\n".join(f"[{name}]\n{take(prompts, name, str, where, 'system_prompt.')}" for name in prompts)
        messages.append({"role": "system", "content": text})
    step = _index(take(item, "mistake_step", (str, int), where), len(history), where)
    for i, message in enumerate(history):
        place = f"history[{i}]."
        role, content = (take(message, key, str, where, place) for key in ("role", "content"))
        if role == "human":
            if i == step:
                raise RecordError(where, "mistake_step", "is the human's message", "Name a step of an agent.")
            messages.append({"role": "user", "content": content})
            continue
        name = take(message, "name", str, where, place) if "name" in message else role
        turn: Record = {"role": "assistant", "name": name, "content": f"[{name}]\n{content}"}
        messages.append(turn | ({"label": int(i < step)} if i <= step else {}))
    known = ("history", "system_prompt", "question", "ground_truth")
    record = {"problem": take(item, "question", str, where), "messages": messages, "outcome": 0}
    record |= {"answer": item.get("ground_truth"), "semantics": "correctness"}
    yield trajectory_of(record | {key: value for key, value in item.items() if key not in known}, where)


def _index(value: str | int, count: int, where: str) -> int:
    text = str(value).strip()
    if not re.fullmatch(r"[0-9]{1,9}", text) or int(text) >= count:
        remedy = f"Write the index of one of the {count} messages, from 0."
        raise RecordError(where, "mistake_step", f"is {value!r}", remedy)
    return int(text)


def parse_tau2_bench(item: Any, where: str, options: SessionOptions) -> Iterator[Record | LeftOut]:
    """Yields the simulations of tau2-bench (Barres et al. 2025, arXiv 2506.07982), with rewards as outcomes.

    An item is a results file, {"tasks", "simulations"}, or one simulation. The problem is the simulated user's
    instructions in `tasks`, if present, as text or JSON. The scripted greeting is left out, and so are calls of the
    user's own tools, which the agent does not see. `id`, `reward_info`, `task_id`, `trial` and `termination_reason` are
    kept. Last come counts of skipped parts, and of simulations without a turn.

    Raises RecordError if the item has another form, e.g. that of a voice run.
    """
    item, left = object_of(item, where, "record", "Is this file of tau2-bench?"), Leftovers(options)
    tasks = list_of(item.get("tasks") or [], where, "tasks")
    tasks = {str(task.get("id")): task for task in tasks if isinstance(task, Mapping)}
    inside = "simulations" in item
    for i, simulation in enumerate(take(item, "simulations", list, where) if inside else [item]):
        field = f"simulations[{i}]." if inside else ""
        simulation = object_of(simulation, where, field or "record", "Write a simulation.")
        if simulation.get("ticks") and not simulation.get("messages"):
            reason = "are a voice run in full duplex, in which both sides speak at once"
            raise RecordError(where, field + "ticks", reason, "Give a run with `messages`: only turns are read.")
        messages = list(_tau2_messages(simulation, where, field, left))
        if inside and not any(message["role"] == "assistant" for message in messages):
            left.skip("simulation without a turn of the agent")
            continue
        record: Record = {"messages": messages}
        scenario = tasks.get(str(simulation.get("task_id")), {}).get("user_scenario")
        if isinstance(scenario, Mapping) and (asked := scenario.get("instructions")):
            record["problem"] = asked if isinstance(asked, str) else json.dumps(asked, ensure_ascii=False)
        about = ("task_id", "trial", "termination_reason", "reward_info")
        record |= {key: value for key, value in kept(simulation, where, about).items() if value is not None}
        yield trajectory_of(record, where)
    yield from left


_GREETING = "Hi! How can I help you today?"


def _tau2_messages(item: Mapping[str, Any], where: str, field: str, left: Leftovers) -> Iterator[Record]:
    messages = take(item, "messages", list, where, field)
    for i, message in enumerate(messages):
        message = object_of(message, where, f"{field}messages[{i}]", "Write a message.")
        inner = list_of(message.get("tool_messages") or [message], where, f"{field}messages[{i}].tool_messages")
        for said in (said for said in inner if isinstance(said, Mapping)):
            role, calls = said.get("role"), said.get("tool_calls") or []
            if i == 0 and role == "assistant" and said.get("content") == _GREETING and not calls:
                left.skip("greeting that a script says")
            elif role == "tool" and said.get("requestor") == "user" or role == "user" and said.get("content") is None:
                left.skip("call of the user's own tools, or its result")
            elif role == "tool":
                yield {"role": "tool", "content": said.get("content") or "", "tool_call_id": said.get("id")}
            elif role == "assistant":
                raw = object_in(said, "raw_data")
                choices = raw.get("choices")
                raw = choices[0] if isinstance(choices, list) and choices and isinstance(choices[0], Mapping) else raw
                raw = object_in(raw, "message", raw)
                keys = (*THOUGHTS, *WRAPPERS)
                thoughts = {key: source[key] for source in (raw, said) for key in keys if source.get(key)}
                yield {**thoughts, "role": role, "content": said.get("content"), "tool_calls": calls}
            else:
                yield {"role": role, "content": said.get("content")}


@dataclasses.dataclass(frozen=True)
class AgentRxOptions:
    """Attributes:
    runs: the annotated runs: a file (`tau_dataset_full.json`) or a folder (`magentic_dataset`). Must be set.
    """

    runs: str = ""


def parse_agentrx(item: Any, where: str, options: AgentRxOptions) -> Iterator[Record]:
    """Yields a failed run of AgentRx (Microsoft 2026) with all failures that annotators marked.

    An item is a record of `ground_truth/`. A turn with a failure gets label 0, every other turn 1, also later ones.
    `classes` lists the failure categories of each turn, in lower case with underscores; `failures` lists {"message",
    "category", "agent", "reason", "root_cause"}, where `message` is an index from 0 and `root_cause` a boolean; the
    record's own `root_cause` is the index of that message, or null. `step_number` in the file counts messages from 1. A
    file of runs is read once per process.

    Raises `Dropped` if `runs` lacks the run, and RecordError if `runs` is missing or the item has another form.
    """
    name = take(item, "trajectory_id", (str, int), where)
    run = _run_of(options.runs, str(name), where)
    if isinstance(run, Mapping):  # of tau-bench
        (record,) = parse_tau_bench(run, where, NoOptions())
    else:
        run = list_of(run, where, "run")
        messages = [_turn(message, where, f"messages[{i}].") for i, message in enumerate(run)]
        record = {"messages": messages, "outcome": 0}
    messages, failures = record["messages"], []
    root = object_in(item, "root_cause").get("failure_id")
    for j, failure in enumerate(take(item, "failures", list, where)):
        within = f"failures[{j}]."
        step = take(failure, "step_number", (int, str), where, within)
        step = int(step) if re.fullmatch("[0-9]{1,9}", str(step)) else 0
        if not 1 <= step <= len(messages):
            reason = f"is {failure['step_number']!r}, and the run has {len(messages)} messages"
            raise RecordError(where, within + "step_number", reason, "Is this the file of these runs?")
        category = take(failure, "failure_category", str, where, within).lower()
        category = re.sub(r"[^a-z0-9]+", "_", category).strip("_")
        about = {"message": step - 1, "category": category, "agent": failure.get("failed_agent")}
        about |= {
            "reason": failure.get("step_reason"),
            "root_cause": root is not None and str(failure.get("failure_id")) == str(root),
        }
        failures.append(about)
    turns = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    categories: dict[int, list[str]] = {}
    for failure in failures:
        categories.setdefault(failure["message"], []).append(failure["category"])
    for i in turns:
        messages[i]["label"] = int(i not in categories)
    record |= {"classes": [categories.get(i, []) for i in turns], "failures": failures, "semantics": "correctness"}
    record |= {"root_cause": next((failure["message"] for failure in failures if failure["root_cause"]), None)}
    summary = {"trajectory_id": name, "failure_summary": item.get("failure_summary")}
    yield trajectory_of(record | summary, where)


def _turn(message: Any, where: str, place: str) -> Record:
    """Converts a Magentic-One message: an agent's turn (`role` is its name), or a human message."""
    role, content = (take(message, key, str, where, place) for key in ("role", "content"))
    if role == "human":
        return {"role": "user", "content": content}
    return {"role": "assistant", "name": role, "content": f"[{role}]\n{content}"}


def _run_of(runs: str, name: str, where: str) -> Any:
    """Returns a run from `runs`, a file of all runs or a folder of NAME.json files. Raises Dropped if it is absent."""
    if not runs or not path_of(runs).exists():
        raise RecordError(
            where, "runs", f"{runs or 'the option'} is no file and no folder", "Set runs=PATH of AgentRx's runs."
        )
    if not path_of(runs).is_dir():
        run = _runs_of(runs).get(name)
    else:  # a name that the file gives leads to a file of the folder alone
        place = path_of(runs) / f"{name}.json"
        known = re.fullmatch("[0-9A-Za-z-]+", name) and place.is_file()
        run = parse(place.read_bytes(), os.fspath(place)) if known else None
    if run is None:
        raise Dropped("the run is not in the files of runs")
    return run


@functools.lru_cache(maxsize=2)
def _runs_of(path: str) -> dict[str, Any]:
    runs = list_of(parse(path_of(path).read_bytes(), path), path, "runs")
    return {str(run.get("task_id")): run for run in runs if isinstance(run, Mapping)}


TAU_BENCH = Reader(parse_tau_bench)
WHO_AND_WHEN = Reader(parse_who_and_when)
TAU2_BENCH = Reader(
    parse_tau2_bench,
    SessionOptions,
    drops="the script's greeting, calls of the user's tools, costs, times and the environment's policy and tools",
)
AGENTRX = Reader(parse_agentrx, AgentRxOptions)
