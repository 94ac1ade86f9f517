"""Agent logs as trajectories: AgentProcessBench, OpenAI and Anthropic client logs, and verifiers rollouts.

Other readers share `messages_of_blocks`, `trajectory_of`, `tools_of` and `kept`.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

from jprm.io.jsonl import RecordError, list_of, number_of, object_of, type_name
from jprm.methods.data.agents.conversation import Conversation
from jprm.methods.data.agents.parts import Leftovers, LogOptions, SessionOptions, tool_named
from jprm.methods.data.reader import Dropped, LeftOut, NoOptions, Reader, Record, object_in, take
from jprm.methods.messages.messages import call_of, decoded, text_of_parts
from jprm.methods.messages.records import read_trajectory


@dataclasses.dataclass(frozen=True)
class AgentProcessBenchOptions:
    """Attributes:
    missing: turns without a label: `error`, or `unlabelled`, which keeps them without a label.
    """

    missing: Literal["error", "unlabelled"] = "error"


def parse_agent_process_bench(item: Any, where: str, options: AgentProcessBenchOptions) -> Iterator[Record]:
    """Yields a trajectory of AgentProcessBench (Fan et al. 2026, arXiv 2603.14465), labelled with ratings.

    `step_labels` maps each turn's index (as text) to -1 (harmful), 0 (neutral) or 1. A `final_label` of 1 or -1 becomes
    the outcome 1 or 0; 0 gives no outcome. `question` becomes the problem, which groups the samples of a task.
    `total_index`, `query_index`, `sample_index` and `data_source` are kept.

    Raises RecordError if the item has another form, or a turn has no label (with `missing=error`).
    """
    messages = [dict(message) for message in _messages(item, "messages", where)]
    labels = take(item, "step_labels", dict, where)
    final = take(item, "final_label", int, where)
    if final not in (-1, 0, 1):
        raise RecordError(where, "final_label", f"is {final}, not -1, 0 or 1", "Is this file of AgentProcessBench?")
    turns = {str(i): message for i, message in enumerate(messages) if message.get("role") == "assistant"}
    for key, label in labels.items():
        if key not in turns:
            raise RecordError(where, f"step_labels[{key!r}]", "is the index of no turn", "Is the file whole?")
        turns[key]["label"] = label
    lacking = [i for i in turns if i not in labels]
    if lacking and options.missing == "error":
        remedy = "Set missing=unlabelled, or complete the file."
        raise RecordError(where, "step_labels", f"has no label of messages[{lacking[0]}]", remedy)
    record = {"problem": take(item, "question", str, where)}
    record["messages"] = [_known_role(message, where) for message in messages]
    record |= tools_of(item.get("tools"), where) | {"semantics": "rating"}
    if final:
        record["outcome"] = max(final, 0)
    about = {key: item[key] for key in ("total_index", "query_index", "sample_index", "data_source") if key in item}
    yield trajectory_of(record | about, where)


def parse_openai(item: Any, where: str, options: LogOptions) -> Iterator[Record | LeftOut]:
    """Yields trajectories from an OpenAI client log, in one of these layouts:

    - {"messages", "tools"}: a chat, e.g. from a fine-tuning file.
    - {"request": {"messages", "tools"}, "response": {"choices"}}: a call; each choice ends a separate trajectory.
    - {"input", "output"}: items of the Responses API.
    - {"prompt", "completion"}: a rollout, as messages or text.

    Developer messages become system messages. `id`, `problem`, `answer`, `semantics` and the outcome (`kept`) stay.
    Last come counts of skipped parts.

    Raises RecordError if the item has another form, lacks the request, or refers to text on the server.
    """
    item, left = object_of(item, where, "record", "Is this file of OpenAI's client?"), Leftovers(options)
    sides = item.get("request", item), item.get("response")
    request, response = (side["body"] if isinstance(side, Mapping) and "body" in side else side for side in sides)
    request = object_of(request, where, "request", "Write its `messages` or `input`.")
    about = {**kept(item, where), **tools_of(request.get("tools"), where, left)}
    answer = response if isinstance(response, Mapping) else item
    if "input" in request or "output" in answer:
        yield trajectory_of({**about, "messages": _responses(request, answer, where, left)}, where)
        yield from left
        return
    if "completion" in request and "messages" not in request:
        messages = _rollout(request, where)
    elif isinstance(response, Mapping) and "messages" not in request:
        raise RecordError(where, "messages", "are missing, and there is a response", _ANSWERS_ALONE.format("messages"))
    else:
        messages = list(_messages(request, "messages", where))
    ends: list[list] = [[]]
    if response is not None:
        choices = take(response, "choices", list, where, "response.")
        if not choices:
            raise RecordError(where, "response.choices", "is empty", "Leave out calls without an answer.")
        ends = [[take(choice, "message", dict, where, f"response.choices[{i}].")] for i, choice in enumerate(choices)]
    for end in ends:
        both = [{**message, "content": left.plain(message.get("content"))} for message in [*messages, *end]]
        yield trajectory_of({**about, "messages": [_known_role(message, where) for message in both]}, where)
    yield from left


def parse_anthropic(item: Any, where: str, options: LogOptions) -> Iterator[Record | LeftOut]:
    """Yields a trajectory from an Anthropic client log: {"system", "messages", "tools"}, optionally with "response".

    `thinking` becomes `reasoning_content`, `tool_use` a call, and each `tool_result` a tool message. User text beside
    results follows them. Neighbouring assistant messages are one turn, as in the API, e.g. a prefill and its response.
    `id`, `problem`, `answer`, `semantics` and the outcome (`kept`) stay. Last come counts of skipped parts.

    Raises RecordError if the item has another form, or a block has an unknown kind (with `images=error`).
    """
    left = Leftovers(options)
    request = item.get("request", item) if isinstance(item, Mapping) else {}
    conversation = list(_messages(request, "messages", where))
    if isinstance(response := item.get("response"), Mapping):
        conversation.append({"role": "assistant", "content": response.get("content")})
    messages: list[Record] = []
    if request.get("system"):
        messages.append({"role": "system", "content": text_of_parts(request["system"], where, "system")})
    turns: list[tuple[str, list[Any], str]] = []
    for i, message in enumerate(conversation):
        role, content, place = str(message.get("role")), message.get("content"), f"messages[{i}].content"
        blocks = [{"type": "text", "text": content}] if isinstance(content, str) else list_of(content, where, place)
        if turns and turns[-1][0] == role == "assistant":
            turns[-1][1].extend(blocks)
        else:
            turns.append((role, [*blocks], place))
    for role, blocks, place in turns:
        messages += messages_of_blocks(role, blocks, where, place, left)
    yield trajectory_of(
        {**kept(item, where), "messages": messages, **tools_of(request.get("tools"), where, left)}, where
    )
    yield from left


def parse_verifiers(item: Any, where: str, options: NoOptions) -> Iterator[Record]:
    """Yields a rollout saved by verifiers (`results.jsonl`), with its reward as the outcome.

    `prompt` and `completion` are messages or text. `example_id`, `answer` and `task` are kept; rollouts of one example
    share their problem.

    Raises RecordError if the item has another form.
    """
    item = object_of(item, where, "record", "Is this file of verifiers?")
    messages = _rollout(item, where)
    reward = take(item, "reward", (int, float), where)
    about = {key: item[key] for key in ("example_id", "answer", "task") if isinstance(item.get(key), str | int | float)}
    tools = item.get("tool_defs") or item.get("oai_tools") or object_in(item, "info").get("oai_tools")
    yield trajectory_of({**about, "messages": messages, **tools_of(tools, where), "outcome": reward}, where)


def _rollout(item: Mapping[str, Any], where: str) -> list[Record]:
    """Returns the messages of `prompt` (user) and `completion` (assistant), each given as messages or text."""
    messages: list[Record] = []
    for key, role in (("prompt", "user"), ("completion", "assistant")):
        value = item.get(key)
        inputs = [{"role": role, "content": value}] if isinstance(value, str) else _messages(item, key, where)
        messages += [_known_role(message, where) for message in inputs]
    return messages


def trajectory_of(record: Record, where: str) -> Record:
    """Returns a copy with normalised messages and `segment` "turn", so that a single exchange counts as a trajectory.

    `record` must have `messages`; other keys are kept. Raises RecordError, beginning with `where`, if it is invalid.
    """
    return read_trajectory({"segment": "turn", **record}, where) | {"segment": "turn"}


def run_of(record: Record, where: str) -> Record:
    """Returns `trajectory_of` a run. Raises `Dropped` if it has only system and user messages, e.g. after a failed
    first request, and RecordError if it is invalid.
    """
    if record["messages"] and all(message.get("role") in ("system", "user") for message in record["messages"]):
        raise Dropped(_NO_TURN)
    return trajectory_of(record, where)


_NO_TURN = "the agent has no turn"


def trajectories(
    sessions: Sequence[tuple[Sequence[Conversation], Record]],
    where: str,
    left: Leftovers,
    context: re.Pattern[str] = re.compile(""),
) -> Iterator[Record]:
    """Yields a trajectory for each part in which the agent has a turn.

    `problem`, which groups the runs of a task, is the session's first user message without the program's text. If a
    session has several such parts, each has its index from 0 as `part`. Messages without a turn are counted in `left`.

    sessions: (parts between compactions, fields of the records) for each session in the file.
    context: matches text that the program puts before a prompt, e.g. about the folder.

    Raises:
      Dropped: the agent has no turn in the file, e.g. because each request failed.
      RecordError: the file also has no user message, or a trajectory is invalid.
    """
    parts = [part for parts, _ in sessions for part in parts]
    if not any(part.has_turn for part in parts):
        if any(message["role"] == "user" for part in parts for message in part.messages):
            raise Dropped(_NO_TURN)
        skipped = ", ".join(part.what for part in left)
        reason = "no line holds a message of the user or the agent" + (f" (skipped: {skipped})" if skipped else "")
        raise RecordError(where, "line", reason, "Is this file of the named program?")
    for parts, about in sessions:
        texts = [m["content"] for part in parts for m in part.messages if m["role"] == "user" and m["content"].strip()]
        first = next(filter(None, (user_text(text, context) for text in texts)), texts[0] if texts else None)
        written = [part for part in parts if part.has_turn]
        for part in parts:
            if part.messages and not part.has_turn:
                left.skip("messages without a turn after them, e.g. after a last compaction")
        for i, part in enumerate(written):
            number = {"part": i} if len(written) > 1 else {}
            problem = {"problem": first} if first else {}
            yield trajectory_of({**problem, **about, **number, "messages": part.messages}, where)


def user_text(text: str, context: re.Pattern[str]) -> str:
    """Returns a user message without the start that `context` matches, stripped; "" if the rest is blank."""
    match = context.match(text)
    return text[match.end() if match else 0 :].strip()


OUTCOMES = ("outcome", "reward", "success", "resolved", "score")
"""Keys that may hold the outcome, in order of preference. The value is a number, or true if the task was solved."""


def kept(item: Mapping[str, Any], where: str, more: Sequence[str] = ()) -> Record:
    """Returns those of `problem`, `semantics`, `id`, `answer` and `more` that a log has, and its `outcome`.

    The outcome is the number under the first non-null key of `outcome`, `reward`, `success`, `resolved` and `score`;
    true becomes 1, false 0. If there is no `reward`, `reward_info.reward` is taken in its place. Raises RecordError if
    the outcome is no number.
    """
    kept = {key: item[key] for key in ("problem", "semantics", "id", "answer", *more) if key in item}
    item = {"reward": object_in(item, "reward_info").get("reward"), **item}  # as in tau2-bench
    if (name := next((name for name in OUTCOMES if item.get(name) is not None), None)) is not None:
        value = item[name]
        kept["outcome"] = int(value) if isinstance(value, bool) else number_of(value, where, name)
    return kept


_AROUND = ("tool", "json_schema", "function_declarations", "functionDeclarations", "function_tools", "output_tools")
"""Keys of an object around tool definitions, e.g. OpenInference's, Google's and pydantic-ai's."""

_FIELDS = {key: key for key in ("name", "description", "parameters", "strict", "format")} | {
    "title": "name",  # OpenHands
    "input_schema": "parameters",  # Anthropic
    "inputSchema": "parameters",  # MCP and Vercel AI
    "parameters_json_schema": "parameters",  # pydantic-ai and Google
    "parametersJsonSchema": "parameters",
}
"""The fields of a tool definition that a model reads, and their names in the chat form."""


def tools_of(value: Any, where: str, left: Leftovers | None = None) -> Record:
    """Returns {"tools": [...]} with tool definitions of any known form in the chat form; {} if there are none.

    A value is a definition, a list, JSON text, or an object around them, e.g. `{"function_declarations": [...]}`. If
    `left` is given, tools without a name, e.g. a search on the server, are left out and counted; else they stay as
    they are.

    Raises RecordError if JSON text is damaged.
    """
    schemas, waiting = [], [value] if value else []
    while waiting:
        tool = json_in(waiting.pop(), where, "tools")
        if isinstance(tool, Mapping) and (inner := [tool[key] or [] for key in _AROUND if key in tool]):
            tool = inner
        if isinstance(tool, list):
            waiting += tool[::-1]
        elif isinstance(tool, Mapping) and (not left or {"function", "name", "title"} & tool.keys()):
            schemas.append({"type": "function", "function": _function(tool, where)})
        elif not left:
            schemas.append(tool)
        elif isinstance(tool, Mapping) and tool.get("type", "function") != "function":
            left.skip(f"tool of type {tool['type']!r}, which the server runs")
        else:
            left.skip("tool without a name")
    return {"tools": schemas} if schemas else {}


def _function(tool: Mapping[str, Any], where: str) -> Record:
    """Returns a tool's `function` in the chat form. From other forms it takes only the fields that a model reads."""
    chat = isinstance(tool.get("function"), Mapping)
    definition, function = tool["function"] if chat else tool, {}
    for key, value in definition.items():
        name = _FIELDS.get(key, key)
        if (name == key or definition.get(name) is None) and (chat or key in _FIELDS and value is not None):
            function[name] = json_in(value, where, "tools") if name == "parameters" else value
    return function


def json_in(value: Any, where: str, field: str) -> Any:
    """Parses text that begins with { or [; returns other values unchanged. Raises RecordError if it is not JSON."""
    return decoded(value, where, field) if isinstance(value, str) and value.lstrip()[:1] in ("[", "{") else value


def _messages(item: Any, key: str, where: str) -> Iterator[Record]:
    """Yields the messages of a list, which may be JSON text."""
    value = decoded(item.get(key), where, key) if isinstance(item, Mapping) else None
    for i, message in enumerate(take({key: value}, key, list, where)):
        yield dict(object_of(message, where, f"{key}[{i}]", "Is the file whole?"))


def _known_role(message: Mapping[str, Any], where: str) -> Record:
    """Renames the role developer to system, and decodes calls given as JSON text."""
    record = {key: value for key, value in message.items() if value is not None or key == "content"}
    if record.get("role") == "developer":
        record["role"] = "system"
    if isinstance(calls := record.get("tool_calls"), list):
        record["tool_calls"] = [decoded(call, where, f"tool_calls[{j}]") for j, call in enumerate(calls)]
    return record


def messages_of_blocks(
    role: str, blocks: Sequence[Any], where: str, place: str, left: Leftovers | None = None
) -> list[Record]:
    """Converts the blocks of an Anthropic message to messages; a user's tool results come before its text.

    A server tool becomes a call and its result; a failed result begins with "error: ". Encrypted thinking is left out.
    An assistant message without readable blocks is empty; a user's is left out. `place` is the path of `blocks` in
    errors.

    Raises RecordError if a block has another kind, unless `left` may drop it (by default it may not), or a field of
    it is missing.
    """
    left = left or Leftovers(SessionOptions("error"))
    messages: list[Record] = []
    texts, thoughts, calls = [], [], []

    def flush() -> None:
        record: Record = {"role": role, "content": "".join(texts)}
        record |= {"reasoning_content": "\n".join(thoughts)} if thoughts else {}
        record |= {"tool_calls": [*calls]} if calls else {}
        messages.append(record)
        for held in (texts, thoughts, calls):
            held.clear()

    for j, block in enumerate(blocks):
        field, kind = f"{place}[{j}]", block.get("type") if isinstance(block, Mapping) else type_name(block)
        within = field + "."
        if kind in ("text", "thinking") and left.drop and block.get(kind) is None:
            left.skip(f"{kind} without a text")
        elif kind == "text":
            texts.append(take(block, "text", str, where, within))
        elif kind == "thinking" and role == "assistant":
            thoughts.append(take(block, "thinking", str, where, within))
        elif kind == "redacted_thinking" and role == "assistant":
            continue  # encrypted: there is no text to read
        elif kind in _CALLS and role == "assistant":
            calls.append(call_of(take(block, "name", str, where, within), block.get("input"), block.get("id")))
        elif kind == "tool_result" and role == "user":
            text = left.text(block.get("content"), where, within + "content")
            text = f"error: {text}" if block.get("is_error") else text
            messages.append({"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": text})
        elif str(kind).endswith("_tool_result") and role == "assistant":
            flush()
            text = json.dumps(_readable(block.get("content")), ensure_ascii=False)
            messages.append({"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": text})
        elif not left.drop and not tool_named(block):
            remedy = "Only text, thinking, tool_use and tool_result are read: write the rest as text, or remove it."
            raise RecordError(where, field, f"is {kind!r} of the {role}", remedy)
        elif kind in _SILENT:
            left.skip(f"{kind} in a message")
        else:
            texts.append(left.placeholder(block))
    if texts or thoughts or calls or role == "assistant" and not messages:
        flush()
    return messages


_CALLS = ("tool_use", "server_tool_use", "mcp_tool_use")
_SILENT = ("fallback", "container_upload", "compaction")
"""Notes from the server to the client."""


def _readable(value: Any) -> Any:
    """Removes encrypted fields from a server tool's content."""
    if isinstance(value, Mapping):
        return {key: _readable(held) for key, held in value.items() if not str(key).startswith("encrypted_")}
    return [_readable(held) for held in value] if isinstance(value, list) else value


_ON_SERVER = ("previous_response_id", "conversation", "prompt")
"""Fields of the Responses API that refer to text stored on the server."""

_ANSWERS_ALONE = "Put the request's `{}` beside each answer: a batch's output file has only the answers."

_NOT_WHOLE = ("local_shell_call", "web_search_call")
"""Calls of the Responses API that have no result items."""


def _responses(request: Mapping[str, Any], answer: Mapping[str, Any], where: str, left: Leftovers) -> list[Record]:
    """Converts Responses API items to messages; neighbouring items of one turn are joined.

    Raises RecordError if an item has another kind, or part of the conversation is only on the server.
    """
    for key in _ON_SERVER:
        if request.get(key) or answer.get(key):
            reason = "names text that the server keeps, and the log lacks"
            raise RecordError(where, key, reason, "Write the whole conversation into `input`.")
    if not request.get("input"):
        raise RecordError(where, "input", "is missing, and there is an `output`", _ANSWERS_ALONE.format("input"))
    prompt, output = request["input"], answer.get("output")
    items = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list_of(prompt, where, "input")
    items = [*items, *list_of([] if output is None else output, where, "output")]
    instructions = request.get("instructions") or answer.get("instructions")
    if instructions and isinstance(instructions, str):
        items = [{"role": "system", "content": instructions}, *items]
    elif instructions:
        items = [*list_of(instructions, where, "instructions"), *items]
    conversation = Conversation(between="\n", left=left)
    for i, item in enumerate(items):
        kind, field = item.get("type") if isinstance(item, Mapping) else None, f"items[{i}]"
        if kind in _NOT_WHOLE or kind == "function_call_output" and not conversation.has_turn:
            raise RecordError(where, field, f"is {kind!r}, whose call or results the log lacks", "Give the whole log.")
        if not conversation.add_item(item, where, field):
            raise RecordError(where, field + ".type", f"is {kind!r}", "Remove the item if the model did not read it.")
    return conversation.messages


AGENT_PROCESS_BENCH = Reader(parse_agent_process_bench, AgentProcessBenchOptions)
OPENAI = Reader(parse_openai, LogOptions)
ANTHROPIC = Reader(parse_anthropic, LogOptions)
VERIFIERS = Reader(parse_verifiers)
