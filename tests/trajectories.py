"""Random trajectories: turns with thoughts and calls, parallel calls, empty answers, errors of tools, further users."""

import random

WORDS = ("find", "the", "price", "of", "Café", "rows", "error", "42", "3.5", "and", "then", "数", "ok", "sum")
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": f"The tool {name}.",
            "parameters": {"type": "object", "properties": {"x": {"type": "string"}}, "required": ["x"]},
        },
    }
    for name in ("lookup", "submit")
]


def text(draw: random.Random, most: int = 8) -> str:
    return " ".join(draw.choice(WORDS) for _ in range(draw.randint(1, most)))


def trajectory(
    seed: int, *, turns: int = 4, system: bool = True, calls: bool = True, thoughts: bool = True, users: bool = True,
    parallel: bool = True, beside: bool = True,
) -> dict:  # fmt: skip
    """Returns a random record of up to so many turns. `calls`: turns call tools, `beside` with text beside the call."""
    draw = random.Random(seed)
    messages = [{"role": "system", "content": text(draw)}] if system and draw.random() < 0.7 else []
    messages.append({"role": "user", "content": text(draw)})
    count = draw.randint(1, turns)
    for turn in range(count):
        message: dict = {"role": "assistant", "content": text(draw)}
        if thoughts and draw.random() < 0.7:
            message["reasoning_content"] = text(draw)
        calling = calls and draw.random() < 0.7 and turn < count - 1
        if calling:
            number = draw.randint(1, 2) if parallel else 1
            functions = [{"name": "lookup", "arguments": {"x": text(draw, 2)}} for _ in range(number)]
            message["tool_calls"] = [
                {"type": "function", "id": f"call{turn:04}{j}", "function": function}
                for j, function in enumerate(functions)
            ]
            message["content"] = draw.choice(["", message["content"]]) if beside else ""
        messages.append(message)
        if calling:
            for call in message["tool_calls"]:
                content = draw.choice(["", "error: no such row", text(draw)])
                messages.append({"role": "tool", "tool_call_id": call["id"], "name": "lookup", "content": content})
        elif turn < count - 1:
            messages.append({"role": "user", "content": text(draw)})
            if not users:
                messages.pop()
                break
    record: dict = {"messages": messages, "outcome": draw.choice([0, 1, 0.5])}
    if calls and draw.random() < 0.8:
        record["tools"] = TOOLS
    return record


def labelled(record: dict, seed: int) -> dict:
    """Returns the record with ratings at some turns and scores at all."""
    draw = random.Random(seed)
    messages = [
        message | ({"label": draw.choice([-1, 0, 1])} if draw.random() < 0.6 else {}) | {"score": draw.random()}
        if message["role"] == "assistant"
        else message
        for message in record["messages"]
    ]
    return record | {"messages": messages, "semantics": "rating"}


def branched(seed: int, alternatives: int = 3, **options) -> dict:
    """Returns a tree of messages: several ways on from turns of one trajectory."""
    from jprm.methods.messages.records import read_trajectory, tree_of_trajectories
    from jprm.tree import record_of

    draw = random.Random(seed)
    first = labelled(trajectory(seed, **options), seed)
    records = [first]
    for i in range(alternatives - 1):
        other = labelled(trajectory(1000 * seed + i, **options), seed + i)
        starts = [k for k, message in enumerate(first["messages"]) if message["role"] == "assistant"]
        at = draw.choice(starts)
        rest = [k for k, message in enumerate(other["messages"]) if message["role"] == "assistant"][0]
        records.append({**first, "messages": first["messages"][:at] + other["messages"][rest:], "outcome": i % 2})
    return record_of(tree_of_trajectories([read_trajectory(record) for record in records]))


def long_run(turns: int, words: int = 8, result: int = 8, tools: bool = True) -> dict:
    """Returns a run in which each turn but the last calls a tool; its texts have so many words."""
    draw = random.Random(turns)

    def said(count: int) -> str:
        return " ".join(draw.choice(WORDS) for _ in range(count))

    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Find the price of rows."}]
    for turn in range(turns):
        call = {"type": "function", "id": f"call{turn}", "function": {"name": "lookup", "arguments": {"x": f"{turn}"}}}
        messages.append({"role": "assistant", "content": f"Turn {turn}: {said(words)}"})
        if turn < turns - 1:
            messages[-1]["tool_calls"] = [call]
            messages.append({"role": "tool", "tool_call_id": call["id"], "name": "lookup", "content": said(result)})
    return {"messages": messages, **({"tools": TOOLS} if tools else {})}
