"""Reading foreign text takes time in proportion to its length: time(4n) is at most 6 time(n) in the worst cases.

A case is a parser or validator and a generator of its worst input. Sizes are chosen so that a run takes milliseconds;
CPU time is compared, so that a busy machine does not matter. A case that fails is measured once more.
"""

import gc
import itertools
import json
import time

import pytest

from jprm.io import jsonl
from jprm.methods.data.agents import atif
from jprm.methods.data.cells import literal
from jprm.methods.data.reader import Event
from jprm.methods.data.readers import find
from jprm.tree import tree_of

FASTEST, MOST = 0.006, 6
"""Seconds of CPU of the smaller input at least, and how much longer four times as much may take."""


def seconds(call, value, runs):
    """The least CPU time of a few runs. A refusal is an answer too."""
    least = float("inf")
    for _ in range(runs):
        gc.collect()
        gc.disable()
        begin = time.process_time()
        try:
            call(value)
        except ValueError:
            pass
        finally:
            least = min(least, time.process_time() - begin)
            gc.enable()
    return least


def growth(call, make):
    """Returns time(4n) / time(n), for an n at which time grows with n and is long enough to measure."""
    before, n = 0.0, 64
    while True:
        value = make(n)
        if (now := seconds(call, value, 1)) > FASTEST and now > 1.4 * before or now > 10 * FASTEST or n >= 2**22:
            break
        before, n = now, 2 * n
    return seconds(call, make(4 * n), 2) / seconds(call, value, 3)


def check(call, make):
    ratio = growth(call, make)
    if ratio > MOST:
        ratio = min(ratio, growth(call, make))
    assert ratio <= MOST, f"4 times the input takes {ratio:.1f} times as long"


# ---- Logs of agents, one case a reader at least.


def turns(n, answer="x"):
    """Messages of a conversation of n turns."""
    pairs = ([{"role": "assistant", "content": answer}, {"role": "user", "content": "y"}] for _ in range(n))
    return [{"role": "user", "content": "q"}, *itertools.chain.from_iterable(pairs)]


def called(i, **more):
    return {"id": f"c{i}", "type": "function", "function": {"name": "a", "arguments": "{}"}, **more}


def one_turn(n, named=True):
    """A turn of n calls, and an answer to each."""
    answers = [{"role": "tool", "content": "x"} | ({"tool_call_id": f"c{i}"} if named else {}) for i in range(n)]
    calls = [called(i) for i in range(n)]
    return [{"role": "user", "content": "q"}, {"role": "assistant", "content": "x", "tool_calls": calls}, *answers]


def claude(n, blocks):
    said = [{"type": "user", "message": {"role": "user", "content": "q"}, "uuid": "u", "sessionId": "s"}]
    for i in range(n):
        message = {"id": "m", "role": "assistant", "content": blocks(i)}
        said.append({"type": "assistant", "uuid": f"a{i}", "parentUuid": f"a{i - 1}" if i else "u", "message": message})
    return said


def claude_results(n):
    said: list[dict] = claude(
        1, lambda _: [{"type": "tool_use", "id": f"t{i}", "name": "a", "input": {}} for i in range(n)]
    )
    for i in range(n):
        content = [{"type": "tool_result", "tool_use_id": f"t{i}", "content": "x"}]
        said.append({"type": "user", "uuid": f"r{i}", "parentUuid": f"r{i - 1}" if i else "a0",
                     "message": {"role": "user", "content": content}})  # fmt: skip
    return said


def claude_prompts(n):
    """One answer, and n prompts that each take the place of the last."""
    said = claude(n, lambda _: [{"type": "text", "text": "x"}])
    return said + [{"type": "user", "uuid": f"p{i}", "parentUuid": f"a{n - 1}",
                    "message": {"role": "user", "content": "y"}} for i in range(n)]  # fmt: skip


def codex(n, items):
    said = [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": "q"}]}]
    return said + [item for i in range(n) for item in items(i)]


def codex_calls(i):
    call = {"type": "function_call", "name": "a", "arguments": "{}", "call_id": f"c{i}"}
    return call, {"type": "function_call_output", "call_id": f"c{i}", "output": "x"}


def codex_texts(i):
    return ({"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "x" * 200}]},)


def openhands_0(n):
    said = [{"action": "message", "source": "user", "args": {"content": "q"}}]
    for i in range(n):
        about = {"tool_call_metadata": {"tool_call_id": f"c{i}"}}
        said.append({"action": "run", "source": "agent", "args": {"command": "ls", "thought": "t"}, **about})
        said.append({"observation": "run", "content": "x", **about})
    return said


def openhands_1(n):
    said = [{"kind": "MessageEvent", "llm_message": {"role": "user", "content": [{"type": "text", "text": "q"}]}}]
    for i in range(n):
        call = {"id": f"c{i}", "name": "a", "arguments": "{}"}
        thought = [{"type": "text", "text": "x" * 200}]
        said.append(
            {"kind": "ActionEvent", "id": f"e{i}", "llm_response_id": "r", "thought": thought, "tool_call": call}
        )
    for i in range(n):
        observed = {"content": [{"type": "text", "text": "x"}]}
        said.append({"kind": "ObservationEvent", "tool_call_id": f"c{i}", "observation": observed})
    return said


def swe(n):
    history: list[dict] = [{"role": "user", "content": "q"}]
    for i in range(n):
        history.append({"role": "assistant", "content": "x", "tool_calls": [called(i)]})
        history.append({"role": "tool", "content": "y", "tool_call_ids": [f"c{i}"]})
    return {"history": history, "info": {}}


def blocks(n):
    """Anthropic's form of one turn of n calls, and their results."""
    uses = [{"type": "tool_use", "id": f"t{i}", "name": "a", "input": {}} for i in range(n)]
    results = [{"type": "tool_result", "tool_use_id": f"t{i}", "content": "x"} for i in range(n)]
    said = [("user", "q"), ("assistant", uses), ("user", results)]
    return {"messages": [{"role": role, "content": content} for role, content in said]}


def atif_document(n, one=False):
    """An ATIF document of n steps, or of one step with n calls and their results."""
    steps = [{"step_id": 1, "source": "user", "message": "q"}]
    if one:
        calls = [{"tool_call_id": f"c{i}", "function_name": "a", "arguments": {}} for i in range(n)]
        results = [{"source_call_id": f"c{i}", "content": "x"} for i in range(n)]
        steps.append({"step_id": 2, "source": "agent", "message": "x", "tool_calls": calls,
                      "observation": {"results": results}})  # fmt: skip
    else:
        steps += [{"step_id": i + 2, "source": "agent", "message": "x" * 100} for i in range(n)]
    about = {"schema_version": "ATIF-v1.4", "session_id": "s", "agent": {"name": "a", "version": "1"}}
    return about | {"steps": steps}


def spans(n):
    """n spans of a trace."""
    asked, answered = ([{"role": role, "parts": [{"type": "text", "content": "x"}]}] for role in ("user", "assistant"))
    messages = {"gen_ai.input.messages": asked, "gen_ai.output.messages": answered}
    return {"resourceSpans": [{"scopeSpans": [{"spans": [{"attributes": messages} for _ in range(n)]}]}]}


def span(n):
    """One span of n turns."""
    said = [
        {"role": role, "parts": [{"type": "text", "content": "x"}]} for _ in range(n) for role in ("user", "assistant")
    ]
    return {"attributes": {"gen_ai.input.messages": said, "gen_ai.output.messages": said[-1:]}}


LOGS = {
    "agent_process_bench": [lambda n: {"messages": turns(n), "step_labels": {str(2 * i + 1): 1 for i in range(n)},
                                       "final_label": 1, "question": "q"}],
    "anthropic": [blocks, lambda n: {"messages": turns(n)}],
    "atif": [atif_document, lambda n: atif_document(n, one=True)],
    "claude_code": [lambda n: claude(n, lambda _: [{"type": "text", "text": "x" * 200}]),
                    lambda n: claude(n, lambda _: [{"type": "thinking", "thinking": "x" * 200}]),
                    claude_results, claude_prompts],
    "codex": [lambda n: codex(n, codex_calls), lambda n: codex(n, codex_texts)],
    "mini_swe_agent": [lambda n: {"messages": turns(n), "info": {}}, lambda n: {"messages": one_turn(n)}],
    "openai": [lambda n: {"messages": one_turn(n)}, lambda n: {"messages": one_turn(n, named=False)},
               lambda n: {"input": codex(n, codex_calls)}, lambda n: {"input": codex(n, codex_texts)}],
    "openhands": [openhands_0, openhands_1],
    "otel": [spans, span],
    "swe_agent": [swe],
    "tau_bench": [lambda n: {"traj": turns(n), "info": {"task": {"instruction": "q"}}, "reward": 1.0}],
    "verifiers": [lambda n: {"prompt": "q", "completion": one_turn(n)[1:], "reward": 1.0, "example_id": 0}],
    "who_and_when": [lambda n: {"history": [{"role": "assistant", "name": "A", "content": "x"}] * n, "question": "q",
                                "mistake_step": "1"}],
}  # fmt: skip


@pytest.mark.parametrize(("name", "case"), [(name, i) for name, makes in LOGS.items() for i in range(len(makes))])
def test_logs_are_read_in_time_of_their_length(name, case):
    reader = find(name)

    def read(item):
        events = [Event(f"f:{i}", value) for i, value in enumerate(item, start=1)] if reader.whole else item
        for record in reader.parse(events, "f:1", reader.options()):
            tree_of(record)

    check(read, LOGS[name][case])


def scored_document(path):
    records = atif.records_of(path)
    for record in itertools.chain.from_iterable(records):
        for message in record["messages"]:
            message |= {"score": 0.5} if message["role"] == "assistant" else {}
    atif.scored(path, records, {"m": 1})


@pytest.mark.parametrize("make", [lambda n: [atif_document(n)], lambda n: [atif_document(2)] * n])
def test_scores_are_written_into_documents_in_time_of_their_length(tmp_path, make):
    def write(n):
        (tmp_path / "f").write_text("\n".join(map(json.dumps, make(n))))
        return tmp_path / "f"

    check(scored_document, write)


# ---- JSON.


def twice(n):
    return ("{" + ",".join(f'"{i}":0' for i in range(n)) + ',"z":0,"z":0}').encode()


@pytest.mark.parametrize("make", [
    twice,
    lambda n: json.dumps({"x": twice(n).decode()}).encode(),
    lambda n: b"[" * n,
    lambda n: b'"' + b"\\u00e9" * n + b'"',
    lambda n: b"\n" * n,
])  # fmt: skip
def test_json_is_read_in_time_of_its_length(make):
    check(lambda line: jsonl.parse(line, "f:1"), make)


TABLES = {
    "columns": [
        lambda n: {"problem": "p", "steps": ["a ки"] * n},
        lambda n: {"problem": "p", "steps": "a ки " * n},
        lambda n: {"problem": "p ки" * n, "steps": "p ки" * n},
        lambda n: {"problem": "p", "steps": [["a"]] * n},
        lambda n: {"problem": "p", "steps": "['" + "a' '" * n + "']"},
    ],
    "pools": [
        lambda n: {"problem": "p", "completions": ["a\n\nb"] * n},
        lambda n: {"problem": "p", "samples": ["a"] * n},
    ],
    "math_shepherd": [
        lambda n: {"input": "p Step 1: a ки" + " b ки" * n, "value": ["+"] * (n + 1)},
        lambda n: {"input": "p Step 1: a ки" + " b ки" * n, "label": "p Step 1: a +" + " b +" * n},
    ],
    "math_aps": [
        lambda n: {"question": "q", "reasoning_steps": [
            {"solution_prefix": f"q\n\n{i}", "mc_value": 1.0} for i in range(n)]},
        lambda n: {"question": "q", "reasoning_steps": {"text": "q", "children": [
            {"text": "a", "mc_value": 1.0, "children": []} for _ in range(n)]}},
    ],
    "versaprm": [lambda n: {"question": "q", "chain_of_thoughts": str(["a"] * n), "labels": str([1] * n)}],
}  # fmt: skip


@pytest.mark.parametrize(("name", "case"), [(name, i) for name, makes in TABLES.items() for i in range(len(makes))])
def test_tables_are_read_in_time_of_their_length(name, case):
    reader = find(name)
    check(lambda item: list(reader.parse(item, "f:1", reader.options())), TABLES[name][case])


@pytest.mark.parametrize("make", [
    lambda n: "[" + "'a' " * n + "]",
    lambda n: "['" + "\\" * n + "]",
    lambda n: "{" + "'a': 1, " * n + "}",
    lambda n: "[" + "np.float64(1.0) " * n + "]",
    lambda n: "[" + "a" * n + "]",
    lambda n: "[" + " " * n + "x y]",
])  # fmt: skip
def test_cells_are_read_in_time_of_their_length(make):
    check(literal, make)
