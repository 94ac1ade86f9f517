"""Published runs of agents as trajectories: tau-bench's results and Who&When."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from jprm.io.jsonl import RecordError, object_of
from jprm.methods.data.agents.logs import trajectory_of
from jprm.methods.data.reader import NoOptions, Reader, Record, take
from jprm.methods.messages.records import read_message
from jprm.tree import SEMANTICS


def parse_tau_bench(item: Any, where: str, options: NoOptions) -> Iterator[Record]:
    """Yields one trial of tau-bench (Yao et al. 2024, arXiv 2406.12045), its reward as the outcome.

    The problem is the task's instruction, which the simulated user knows, not the agent: trials of one task belong
    together. `task_id`, `trial` and `info` stay. The file has no schemas of the tools.
    """
    turns = enumerate(take(item, "traj", list, where))
    messages = [read_message(message, "turn", SEMANTICS[0], where, f"traj[{i}]") for i, message in turns]
    record = {"problem": take(item, "info.task.instruction", str, where), "messages": messages}
    record["outcome"] = take(item, "reward", (int, float), where)
    yield trajectory_of(record | {key: item[key] for key in ("task_id", "trial", "info") if key in item}, where)


def parse_who_and_when(item: Any, where: str, options: NoOptions) -> Iterator[Record]:
    """Yields a failed log of Who&When (Zhang et al. 2025, arXiv 2505.00212): the first wrong step, and who made it.

    Every message but a human's is a turn, a terminal's too, because the file counts them all as steps. A turn begins
    with its agent's name in brackets, since chat templates show no `name`. Prompts of the agents are one system
    message. Turns before the step `mistake_step` have label 1, that turn has 0, later ones have none.
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


TAU_BENCH = Reader(parse_tau_bench)
WHO_AND_WHEN = Reader(parse_who_and_when)
