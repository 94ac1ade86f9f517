"""The tool world's task: questions about a shop, tools that know its table, authors with habits, and exact labels.

A question is about prices and stock that only the tools know: "Shop 37. What do 3 pear cost?" An agent looks facts up,
has the calculator work with them and submits an answer. It has two turns more than the shortest way takes.

    lookup pen price    -> 7            filter toy    -> pen kite
    calc 3 * 7          -> 21           submit 21     (ends the episode)

A policy that learns from the authors takes over their habits: a wrong lookup whose number is then believed, a number
that was not observed, a call made twice, and an answer submitted before it is known. Some of these are right by luck.

Labels are exact. Of every turn the world knows whether the task can still be solved in the turns that are left, by
facts and not by luck (`solvable`), and whether it came nearer by this turn (`informs`). A turn is correct if both hold.
So a right answer by luck has outcome 1 and a turn that is incorrect.
"""

from __future__ import annotations

import copy
import dataclasses
import itertools
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import tokenizers
from tokenizers import Regex, decoders, models, pre_tokenizers

from jprm.methods.worlds.environment import Environment, Message, Record, Reply

KINDS = {
    "toy": ("kite", "ball", "doll", "drum"),
    "tool": ("saw", "file", "axe", "drill"),
    "fruit": ("pear", "fig", "plum", "lime"),
}
FIELDS = ("price", "stock")
SPARE = 2
"""Turns beyond the shortest way."""

TEMPLATE = (
    "{% for message in messages %}<{{ message.role }}>"
    "{% generation %}{{ message.content or '' }}{% for call in message.tool_calls or [] %}{{ call.function.name }} "
    "{{ call.function.arguments.values()|join(' ') }}{% endfor %}<end>{% endgeneration %}"
    "{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)
"""The tokenizer's chat template: a call is written as it is sampled."""

ARGUMENTS = {"lookup": ("item", "field"), "filter": ("kind",), "calc": ("left", "sign", "right"), "submit": ("answer",)}


# ---- Tasks.


@dataclasses.dataclass(frozen=True)
class Habits:
    """How often an author makes each mistake where it can occur."""

    wrong_tool: float = 0.18  # looks up another field or thing, and believes the number
    ignored: float = 0.15  # goes on with another number or thing than was observed
    repeated: float = 0.12  # makes the last call once more
    luck: float = 0.35  # submits before everything is known


def tasks(rng: np.random.Generator, count: int, seen: set[str]) -> list[dict[str, Any]]:
    """Returns so many tasks whose problems are not in `seen`, and adds theirs."""
    records = []
    while len(records) < count:
        record = task(rng)
        if record["problem"] not in seen:
            seen.add(record["problem"])
            records.append(record)
    return records


def task(rng: np.random.Generator) -> dict[str, Any]:
    """Returns the record of a task: its problem, its table, what it asks and its answer."""
    table = {
        str(item): {"kind": kind, **{field: int(rng.integers(2, 10)) for field in FIELDS}}
        for kind, items in KINDS.items()
        for item in rng.choice(items, 2 + int(rng.integers(2)), replace=False)
    }
    a, b = (str(item) for item in rng.choice(list(table), 2, replace=False))
    kind, amount = str(rng.choice(list(KINDS))), int(rng.integers(2, 10))
    asks = [
        {"asks": "total", "item": a, "amount": amount},
        {"asks": "sum", "items": [a, b]},
        {"asks": "worth", "item": a},
        {"asks": "cheaper", "items": [a, b]},
        {"asks": "cheapest", "kind": kind},
    ]
    wanted = asks[int(rng.integers(len(asks)))]
    record = {"shop": int(rng.integers(100)), "table": table, **wanted}
    if len({table[item]["price"] for item in compared(record)}) < len(compared(record)):
        return task(rng)  # no two equal prices to compare
    return {"problem": f"Shop {record['shop']}. {question(record)}", "answer": answer(record), **record}


def question(record: Record) -> str:
    asks = record["asks"]
    if asks == "total":
        return f"What do {record['amount']} {record['item']} cost?"
    if asks == "sum":
        return "What do {} and {} cost?".format(*record["items"])
    if asks == "worth":
        return f"What is all {record['item']} worth?"
    if asks == "cheaper":
        return "Which is cheaper, {} or {}?".format(*record["items"])
    return f"Which {record['kind']} is cheapest?"


def compared(record: Record) -> list[str]:
    """Returns the things whose prices a task compares; none for one that computes."""
    if record["asks"] == "cheapest":
        return [item for item, facts in record["table"].items() if facts["kind"] == record["kind"]]
    return record["items"] if record["asks"] == "cheaper" else []


def answer(record: Record) -> str:
    table = record["table"]
    if items := compared(record):
        return min(items, key=lambda item: table[item]["price"])
    left, sign, right = operands(record)
    return str(compute(value(record, left), sign, value(record, right)))


Fact = tuple[str, str]
"""(thing, field), or ("", number) for a number that the question states."""


def operands(record: Record) -> tuple[Fact, str, Fact]:
    """Returns the calculation that answers a task."""
    if record["asks"] == "total":
        return ("", str(record["amount"])), "*", (record["item"], "price")
    if record["asks"] == "worth":
        return (record["item"], "price"), "*", (record["item"], "stock")
    return (record["items"][0], "price"), "+", (record["items"][1], "price")


def value(record: Record, fact: Fact) -> int:
    item, field = fact
    return record["table"][item][field] if item else int(field)


def compute(left: int, sign: str, right: int) -> int:
    return {"+": left + right, "*": left * right, "-": left - right}[sign]


def needed(record: Record) -> list[Fact]:
    """Returns the facts that must be looked up."""
    if items := compared(record):
        return [(item, "price") for item in items]
    left, _, right = operands(record)
    return [fact for fact in (left, right) if fact[0]]


# ---- The world: calls, what they answer, and how far an agent is from an answer that it knows.


def tool(record: Record, name: str, arguments: Sequence[str]) -> str:
    """Returns what a tool answers."""
    table = record["table"]
    if name == "lookup" and len(arguments) == 2 and arguments[0] in table and arguments[1] in FIELDS:
        return str(table[arguments[0]][arguments[1]])
    if name == "filter" and len(arguments) == 1 and arguments[0] in KINDS:
        return " ".join(item for item, facts in table.items() if facts["kind"] == arguments[0])
    if name == "calc" and len(arguments) == 3 and arguments[1] in "+*-":
        if arguments[0].isdecimal() and arguments[2].isdecimal():
            return str(compute(int(arguments[0]), arguments[1], int(arguments[2])))
    return "error"


def distance(record: Record, calls: Sequence[Sequence[str]]) -> int:
    """Returns the fewest turns to an answer that is known after these calls, the last turn submits it."""
    known: set[Fact] = set()
    listed = calculated = False
    for call in calls:
        name, *arguments = call or [""]
        if name == "lookup" and tool(record, name, arguments) != "error":
            known.add((arguments[0], arguments[1]))
        listed |= name == "filter" and arguments == [record.get("kind")]
        if name == "calc" and not compared(record) and known.issuperset(needed(record)):
            left, sign, right = operands(record)
            pair = [str(value(record, left)), str(value(record, right))]
            calculated |= arguments in ([pair[0], sign, pair[1]], [pair[1], sign, pair[0]])
    left_out = sum(fact not in known for fact in needed(record))
    if compared(record):
        return left_out + (record["asks"] == "cheapest" and not listed) + 1
    return left_out + (not calculated) + 1


def limit(record: Record) -> int:
    """Returns the most turns of an episode."""
    return distance(record, ()) + SPARE


def reset(record: Record) -> tuple[dict[str, Any], list[Message]]:
    return {"record": record, "calls": []}, [{"role": "user", "content": record["problem"]}]


def step(state: dict[str, Any], message: Message) -> Reply:
    record, call = state["record"], call_of(message)
    state["calls"].append(call)
    if call and call[0] == "submit":
        return Reply((), True, float(call[1:] == [record["answer"]]))
    if len(state["calls"]) >= limit(record):
        return Reply((), True, 0.0)
    return Reply(({"role": "tool", "content": tool(record, call[0], call[1:]) if call else "error"},))


def parse(text: str) -> Message:
    """Returns the assistant message of a turn: a tool call, or content that calls nothing."""
    name, *arguments = text.split(" ")
    if name in ARGUMENTS and len(arguments) == len(ARGUMENTS[name]) and all(arguments):
        function = {"name": name, "arguments": dict(zip(ARGUMENTS[name], arguments, strict=True))}
        return {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": function}]}
    return {"role": "assistant", "content": text}


def call_of(message: Message) -> list[str]:
    """Returns the name and the arguments of a message's call, [] where it has none."""
    for call in message.get("tool_calls") or ():
        return [call["function"]["name"], *call["function"]["arguments"].values()]
    return []


def answer_of(messages: Sequence[Message]) -> str | None:
    """Returns the submitted answer."""
    call = call_of(messages[-1]) if messages else []
    return call[1] if call[:1] == ["submit"] else None


SHOP = Environment(reset, step, copy.deepcopy, copy.deepcopy, parse, answer_of)
"""The door: `experiments/tool_world/shop.py:SHOP`."""


def verdicts(record: Record, calls: Sequence[Sequence[str]]) -> list[dict[str, bool]]:
    """Returns, of every turn, whether it keeps the task solvable and whether it informs."""
    most, told = limit(record), []
    for number, call in enumerate(calls, start=1):
        before, after = distance(record, calls[: number - 1]), distance(record, calls[:number])
        if call[:1] == ["submit"]:
            known = before == 1 and call[1:] == [record["answer"]]
            told.append({"solvable": known, "informs": known})
        else:
            told.append({"solvable": after <= most - number, "informs": after < before})
    return told


def labelled(record: Record, messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Returns the messages with the world's labels on the assistant's: 1 for a turn that is correct, else 0."""
    calls = [call_of(message) for message in messages if message["role"] == "assistant"]
    told = iter(verdicts(record, calls))
    return [
        {**message, "label": float(all((verdict := next(told)).values())), **verdict}
        if message["role"] == "assistant"
        else dict(message)
        for message in messages
    ]


# ---- Authors.


def demonstration(record: Record, rng: np.random.Generator, habits: Habits | None) -> dict[str, Any]:
    """Returns a trajectory that an author wrote; without habits it is the shortest way."""
    state, messages = reset(record)
    seen = list(messages)
    author = _calls(record, rng, habits)
    call = next(author)
    while True:
        message = parse(" ".join(call))
        reply = step(state, message)
        seen += [message, *reply.messages]
        if reply.done:
            return {**record, "messages": seen, "outcome": reply.reward}
        observed = reply.messages[0]["content"]
        if habits and rng.random() < habits.repeated and state["calls"][-2:-1] != [call]:
            continue
        call = author.send(observed)


def _calls(record: Record, rng: np.random.Generator, habits: Habits | None):
    """Yields an author's calls and receives what the tools answer."""
    habits = habits or Habits(0, 0, 0, 0)
    table, beliefs = record["table"], {}
    facts = needed(record)
    if record["asks"] == "cheapest":
        listed = yield ["filter", record["kind"]]
        facts = [(item, "price") for item in listed.split(" ")]
    for number, (item, field) in enumerate(facts):
        if number and compared(record) and rng.random() < habits.luck:
            break
        asked = item, field
        if rng.random() < habits.wrong_tool:
            others = [(item, FIELDS[field == "price"])] + [(other, field) for other in table if other != item]
            asked = others[int(rng.integers(2)) and int(rng.integers(len(others)))]
        beliefs[item, field] = int((yield ["lookup", *asked]))
    if compared(record):
        best = min(beliefs, key=beliefs.__getitem__)[0]
        if rng.random() < habits.ignored:
            best = str(rng.choice([item for item, _ in facts]))
        yield ["submit", best]
    left, sign, right = operands(record)
    pair = [beliefs[fact] if fact[0] else int(fact[1]) for fact in (left, right)]
    if rng.random() < habits.ignored:
        pair[int(rng.integers(2))] = int(rng.integers(2, 10))
    if rng.random() < habits.luck / 2:
        yield ["submit", str(compute(pair[0], "+" if sign == "*" else "*", pair[1]))]
    result = yield ["calc", str(pair[0]), sign, str(pair[1])]
    yield ["submit", result]


def tokenizer() -> tokenizers.Tokenizer:
    """Returns a tokenizer of words and numbers of up to two digits, each with the space before it."""
    words = "Shop What do and cost is all worth Which cheaper or cheapest error".split()
    words += [*ARGUMENTS, *FIELDS, *KINDS, *itertools.chain.from_iterable(KINDS.values())]
    pieces = [*map(str, range(100)), *"+*-?,.", *words]
    special = ["<end>", "<unk>", "<user>", "<assistant>", "<tool>", "<system>"]
    vocabulary = [*special, "\n", " ", *pieces, *(f" {piece}" for piece in pieces)]
    inner = tokenizers.Tokenizer(models.WordLevel({piece: i for i, piece in enumerate(vocabulary)}, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.Split(
        Regex(r" ?\d{1,2}| ?[A-Za-z]+| ?[^\s\dA-Za-z]|\n| "), behavior="isolated"
    )
    inner.decoder = decoders.Fuse()
    inner.add_special_tokens(special)
    return inner


def tokenizer_config() -> Mapping[str, str]:
    return {"eos_token": "<end>", "chat_template": TEMPLATE}


def habit_of(record: Record, messages: Sequence[Message]) -> str:
    """Returns what went wrong first, in words: the baseline of a reader who looks only at the calls."""
    calls = [call_of(message) for message in messages if message["role"] == "assistant"]
    for number, verdict in enumerate(verdicts(record, calls)):
        if not all(verdict.values()):
            call = calls[number]
            if call in calls[:number]:
                return "repeated call"
            if call[:1] == ["submit"]:
                return "right by luck" if call[1:] == [record["answer"]] else "wrong answer"
            return {"lookup": "wrong lookup", "calc": "other number", "filter": "wrong filter"}.get(
                re.sub(r"\W.*", "", call[0]) if call else "", "no call"
            )
    return "none"
