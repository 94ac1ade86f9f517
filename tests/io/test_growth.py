"""Foreign text is read in time proportional to its length. A case is a reader and a generator of its worst input."""

import asyncio
import functools
import itertools
import json
import os
import struct
import types
from typing import Any

import httpx2
import pytest
from chat_templates import FAMILIES
from families import breadth
from growth import LONGER, MOST, check, excess, seconds
from test_turns import read_by_jprm

from jprm import steps
from jprm.apps.serve import ServeConfig
from jprm.apps.serve.app import make_app, operations
from jprm.apps.serve.engine import Engine
from jprm.apps.web.http import Refusal, json_in
from jprm.checkpoints.safetensors import Tensors, read_json
from jprm.io import jsonl
from jprm.methods.answers import extract
from jprm.methods.answers.forms import canonical_answer
from jprm.methods.data.agents import atif
from jprm.methods.data.cells import literal
from jprm.methods.data.reader import Event, read_items
from jprm.methods.data.readers import READERS, find
from jprm.methods.evaluate import edits
from jprm.methods.formats import chat_template
from jprm.methods.formats.chat_template import guarded
from jprm.methods.formats.gguf import open_gguf
from jprm.methods.judge.critiques import PROMPTS, Critique, read
from jprm.methods.policy.protocol import LogProb
from jprm.methods.policy.sample_cache import PolicyError
from jprm.methods.verify.equations import equations
from jprm.methods.verify.fences import program_in
from jprm.methods.verify.programs import program_of
from jprm.score.scale import PROBABILITY
from jprm.score.scorer import PRM
from jprm.tokenizer import native_layout
from jprm.tree import record_of, tree_of


def cases_of(makes):
    """Every case of each reader or route; the first of each is quick."""
    cases = [(name, i) for name, of_name in makes.items() for i in range(len(of_name))]
    return breadth(cases, but=[(name, 0) for name in makes])


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


def nested(n):
    """An ATIF document with those of n subagents inside it."""
    inside = [atif_document(1) | {"trajectory_id": str(i)} for i in range(n)]
    return atif_document(1) | {"subagent_trajectories": inside}


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


ASKED = {"role": "user", "content": "q"}
THOUGHT = [{"type": "thinking", "thinking": "x" * 50}]
LOGS = {
    "agent_process_bench": [lambda n: {"messages": turns(n), "step_labels": {str(2 * i + 1): 1 for i in range(n)},
                                       "final_label": 1, "question": "q"}],
    "anthropic": [blocks, lambda n: {"messages": turns(n)}],
    "atif": [atif_document, nested, lambda n: atif_document(n, one=True)],
    "claude_code": [lambda n: claude(n, lambda _: [{"type": "text", "text": "x" * 200}]),
                    lambda n: claude(n, lambda _: [{"type": "thinking", "thinking": "x" * 200}]),
                    claude_results, claude_prompts],
    "codex": [lambda n: codex(n, codex_calls), lambda n: codex(n, codex_texts)],
    "inspect": [lambda n: {"messages": turns(n)}, lambda n: {"samples": [{"messages": turns(1)}] * n}],
    "mini_swe_agent": [lambda n: {"messages": turns(n), "info": {}}, lambda n: {"messages": one_turn(n)}],
    "openai": [lambda n: {"messages": one_turn(n)}, lambda n: {"messages": one_turn(n, named=False)},
               lambda n: {"input": codex(n, codex_calls)}, lambda n: {"input": codex(n, codex_texts)},
               lambda n: {"messages": [ASKED, {"role": "assistant", "content": [{"type": "text", "text": "x"}] * n}]},
               lambda n: {"messages": [ASKED, {"role": "assistant", "content": "x", "thinking_blocks": THOUGHT * n}]},
               lambda n: {"messages": turns(1), "tools": json.dumps([{"name": f"t{i}"} for i in range(n)])}],
    "openhands": [openhands_0, openhands_1],
    "otel": [spans, span],
    "swe_agent": [swe],
    "tau_bench": [lambda n: {"traj": turns(n), "info": {"task": {"instruction": "q"}}, "reward": 1.0}],
    "tau2_bench": [lambda n: {"messages": turns(n)},
                   lambda n: {"tasks": [{"id": str(i)} for i in range(n)],
                              "simulations": [{"messages": turns(1), "task_id": str(i)} for i in range(n)]}],
    "verifiers": [lambda n: {"prompt": "q", "completion": one_turn(n)[1:], "reward": 1.0, "example_id": 0}],
    "who_and_when": [lambda n: {"history": [{"role": "assistant", "name": "A", "content": "x"}] * n, "question": "q",
                                "mistake_step": "1"}],
}  # fmt: skip

# ---- Step labels, pools, trees and texts.


def chain(n, **more):
    return {"problem": "q", "steps": [f"Step {i}: x" for i in range(n)], **more}


def tree(n, parent):
    return {"problem": "q", "nodes": [{"parent": parent(i), "text": f"x{i}"} for i in range(n)]}


def messages_tree(n, parent):
    """A tree whose nodes are messages: a question, a turn of n calls, and answers."""
    nodes = [{"parent": i - 1, **message} for i, message in enumerate(one_turn(n))]
    return {"nodes": nodes[:2] + [{**node, "parent": parent(i)} for i, node in enumerate(nodes[2:], start=2)]}


def spoken(n, role="user"):
    """A tree of messages in a line, each with its own outcome."""
    nodes = [{"parent": i - 1, "role": role, "content": "x", "outcome": 1} for i in range(n)]
    return {"nodes": [*nodes, {"parent": n - 1, "role": "assistant", "content": "x"}]}


def many_steps(n, segment):
    content = [{"type": "text", "text": "x" * 50}] * n if segment == "parts" else "x. X\n\n" * n
    said = [{"role": "user", "content": "q"}, {"role": "assistant", "content": content}]
    return {"messages": said, "segment": segment}


def dialogue(n, first, answer):
    turns = [{"role": role, "content": text} for i in range(n) for role, text in (("user", "x"), ("assistant", answer))]
    return {"conversations": [{"role": "user", "content": first}, *turns[1:]]}


def prm800k(n):
    step = {"completions": [{"text": "x", "rating": 1}, {"text": "y", "rating": -1}], "chosen_completion": 0}
    return {"question": {"problem": "q"}, "label": {"steps": [step] * n}}


def otherwise(n):
    return "\n\n".join(f"Step {i}: x" for i in range(n))


STEPS = {
    "actprm": [lambda n: {"question": "q", "steps": ["x"] * n, "hard_labels": [1] * n}],
    "big_bench_mistake": [lambda n: {"input": "(", "steps": ["x"] * n, "mistake_index": n - 1, "target": "x"}],
    "columns": [chain, lambda n: {"problem": "q", "steps": [["x"]] * n},
                lambda n: {"problem": "q", "steps": "x\n\n" * n}],
    "er_prm": [lambda n: {"text": "q\n\nx" + "ки x" * n, "value": [0.5] * n}],
    "genprm_math": [lambda n: dialogue(n, "Question: q\n\nx", "\\boxed{Yes}"),
                    lambda n: dialogue(1, "Question: q\n\nx", "\\boxed{" * n + "Yes}")],
    "gsm8k": [lambda n: {"question": "q", "answer": "x <<1+1=2>>\n" * n + "#### 1"},
              lambda n: {"question": "q", "answer": "<<" * n + "#### 1"}],
    "gsm8k_solutions": [lambda n: {"question": "q", "ground_truth": "A: 1"}
                        | {f"m{i}": {"solution": "x\nA: 1", "is_correct": True} for i in range(n)}],
    "hard2verify": [lambda n: {"question": "q", "model_response_by_step": ["x"] * n, "human_labels": [1] * n}],
    "jsonl": [chain, lambda n: {"problem": "q", "samples": [chain(3)] * n},
              lambda n: tree(n, lambda i: i - 1), lambda n: tree(n, lambda i: -1),
              lambda n: tree(n, lambda i: (i - 1) // 2),
              lambda n: messages_tree(n, lambda i: i - 1), lambda n: messages_tree(n, lambda i: 1), spoken,
              lambda n: many_steps(n, "parts"), lambda n: many_steps(n, "paragraphs"),
              lambda n: {"messages": one_turn(n)}, lambda n: {"messages": turns(n)},
              lambda n: {"messages": turns(3), "tools": [{"name": f"t{i}"} for i in range(n)]}],
    "math": [lambda n: {"problem": "q", "solution": "x. Y\n\n" * n}],
    "math_aps": [lambda n: {"question": "q", "process": "x\n\n" * n, "label": ["+"]}],
    "math_shepherd": [lambda n: {"input": "q Step 1: " + "x ки" * n, "label": "q Step 1: " + "x +" * n}],
    "mr_ben": [lambda n: {"Model_Solution_Correctness": "incorrect", "Question": "q", "Subject": "s",
                          "Model_Solution_First_Error_Step": str(n),
                          "Model_Solution_Steps": [f"Step {i}: x" for i in range(1, n + 1)]}],
    "pools": [lambda n: {"problem": "q", "samples": [chain(2)] * n},
              lambda n: {"problem": "q", "samples": [{"steps": []}] * n}],
    "prm800k": [prm800k, lambda n: {"problem": "q", "steps": ["x"] * n, "ratings": [1] * n}],
    "prmbench": [lambda n: {"modified_process": ["x"] * n, "modified_question": "q", "error_steps": list(range(1, n))}],
    "processbench": [lambda n: chain(n, label=n - 1, final_answer_correct=False)],
    "programs": [lambda n: {"problem": "q", "tests": ["assert f()"], "solution": "x = 1\n" * n},
                 lambda n: {"problem": "q", "tests": ["assert f()"] * n, "solution": "x = 1\n"}],
    "rlhflow": [lambda n: dialogue(n, "q Step 1: x", "+")],
    "text": [lambda n: {"problem": "q", "response": "x. Y\n\n" * n}],
    "trl": [lambda n: {"prompt": "q", "completions": ["x"] * n, "labels": [True] * n}],
    "ultra_interact": [lambda n: {"trajectory": [{"value": "q"}], "chosen": otherwise(n), "rejected": otherwise(n)}],
    "versaprm": [lambda n: {"question": "q", "chain_of_thoughts": ["x"] * n, "labels": [1] * n},
                 lambda n: {"question": "q", "chain_of_thoughts": str(["x"] * n), "labels": str([1] * n)}],
}  # fmt: skip
CHOSEN = {"gsm8k": {"calculator_marks": "strip"}, "gsm8k_solutions": {"calculator_marks": "strip"},
          "math": {"steps": "sentences"}, "pools": {"empty_samples": "drop"}, "programs": {"steps": "statements"},
          "prm800k": {"human_written": "positive", "control_questions": "keep"}}  # fmt: skip
READ = LOGS | STEPS


def test_every_reader_has_a_worst_case():
    assert READERS.keys() == READ.keys() | {"agentrx"}  # it reads a folder of tau-bench's runs beside its item


@pytest.mark.parametrize(("name", "case"), cases_of(READ))
def test_records_are_read_in_time_of_their_length(name, case):
    reader = find(name)
    options = reader.options(**CHOSEN.get(name, {}))

    def read(item):
        events = [Event(f"f:{i}", value) for i, value in enumerate(item, start=1)] if reader.whole else item
        for record in reader.parse(events, "f:1", options):
            if isinstance(record, dict):  # and not a count of lines that were left out
                record_of(tree_of(record))

    check(read, READ[name][case])


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


# ---- Tables and cells.

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


@pytest.mark.parametrize(("name", "case"), cases_of(TABLES))
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


# ---- Texts of models: steps, answers, equations, fences, verdicts.

PIECES = [
    "a", "a ", "1 ", "\n", "\n\n", "$", "$x$ ", "$$", "\\[", "\\(", "{", "{}", "(", "[", "\\boxed{", "\\boxed{1} ",
    "\\frac{", "\\text{", "\\begin{a}", "\\begin{align}\n", "\\end{align}", "```", "```\n", "```python\nx\n```\n",
    "~~~\n", "<think>", "</think>", "<<", "<<1+1=2>>", "<|", "<|a", "= 1 ", "1+", "--", "1/", "**", "**a** ", "1^",
    "1,", ".", ". ", "e.g. ", "Step 1: ", "\nStep 1: x", "1. x\n", "- x\n", "# x\n", "> ", "#### 1\n",
    "The answer is 1. ", "Answer: ", "is ", "x=1, ", "or ", "and ", "\\", "\\\\", "&= 1 \\\\", "|", "%", "1% ", ":",
    "'", "Wait, ", "def f():\n", "[[B]]", "(A) ", "[DONE] ", "\u200b", "\\sqrt{", "\\left(", "5 apples ", "dollars ",
    "\r\n", "\\cup ", "(1,2)", "0.(3)", "10^", "x+", "f(x)", ">>> x\n",
]  # fmt: skip
CHARACTERS, AT_ONCE = 5_000, 0.01
"""A text of so many characters that is read in so many seconds of CPU is not measured twice. No window of the rules of
answers is longer."""

TEXTS = {
    **{f"steps by {rule}": functools.partial(steps.split, rule=rule) for rule in ("auto", *steps.RULES)},
    "answer": extract,
    "stated answer": lambda text: extract("The answer is " + text),
    "boxed answer": lambda text: extract("\\boxed{" + text + "}"),
    "canonical answer": canonical_answer,
    "equations": equations,
    "equation": lambda text: equations(text + " = 1"),
    "program": program_in,
    "programs of steps": lambda text: program_of({}, [text, text]),
    "control tokens": guarded,
    **{f"edit {edit.__name__}": functools.partial(lambda edit, text: edit({"problem": "q", "steps": [text]}), edit)
       for edit in (edits.latex, edits.rename, edits.split)},
    "almost a unit": lambda text: canonical_answer(f"x{text}!"),
    **{f"verdict of {name}": functools.partial(lambda prompt, text: read_critique(prompt, text), prompt)
       for name, prompt in PROMPTS.items()},
}  # fmt: skip


AROUND = {"stated answer", "boxed answer", "canonical answer", "equation", "programs of steps"}
"""Readers that are above already; here text surrounds their input."""


def read_critique(prompt, text):
    tokens = [(text[i : i + 4], LogProb(-0.1)) for i in range(0, len(text), 4)]
    others = [{piece: value, "5": LogProb(-2)} for piece, value in tokens]
    read(prompt, Critique((text,), text, len(tokens), "stop", 0, tuple(tokens), 0, None, tuple(others)), 3)


@pytest.mark.parametrize("name", breadth(TEXTS, but=TEXTS.keys() - AROUND))
def test_texts_are_read_in_time_of_their_length(name):
    for piece in PIECES:

        def make(n, piece=piece):
            return piece * (n // len(piece))

        once = seconds(TEXTS[name], make(CHARACTERS))
        if once > AT_ONCE and seconds(TEXTS[name], make(LONGER * CHARACTERS)) > MOST * once:
            assert excess(TEXTS[name], make, CHARACTERS) is None, piece


# ---- Files: lists, tables, headers of models.


def whole_list(n):
    return "[" + ",\n".join(['{"problem": "q", "steps": ["x"]}'] * n) + "]"


FILES = {
    "f.jsonl": [lambda n: '{"problem": "q", "steps": ["x"]}\n' * n, lambda n: "\n" * n],
    "f.json": [whole_list, lambda n: "[" + "[" * n, lambda n: "[" + "1, " * n, lambda n: "[{}" + "," * n,
               lambda n: "[" + " " * n, lambda n: '{"data": ' + whole_list(n) + "}", lambda n: "{" * n],
    "f.csv": [lambda n: "problem,steps\n" + "q,x\n" * n, lambda n: "problem,steps\n" + 'q,"' + "[" * n + ']"\n',
              lambda n: ",".join(f"c{i}" for i in range(n)) + "\n" + "x," * (n - 1) + "x\n",
              lambda n: 'a\n"' + '""' * n],
}  # fmt: skip


@pytest.mark.parametrize(("name", "case"), cases_of(FILES))
def test_files_are_read_in_time_of_their_length(tmp_path, name, case):
    def write(n):
        (tmp_path / name).write_text(FILES[name][case](n))
        return tmp_path / name

    check(lambda path: [jsonl.parse(line, "f:1") for _, line in read_items(path)], write)


def packed(text):
    return struct.pack("<Q", len(text)) + text.encode()


def gguf_header(tensors=(), fields=()):
    return b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(fields)) + b"".join([*fields, *tensors])


def gguf_tensor(name, shape):
    return packed(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, 0, 0)


def gguf_texts(name, texts):
    return packed(name) + struct.pack("<IIQ", 9, 8, len(texts)) + b"".join(map(packed, texts))


EMPTY = {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}
HEADERS = {
    "gguf": [lambda n: gguf_header([gguf_tensor("a", [2**40] * n)]),
             lambda n: gguf_header([gguf_tensor(f"t{i}", [0]) for i in range(n)]),
             lambda n: gguf_header([], [packed(f"f{i}") + struct.pack("<IB", 0, 1) for i in range(n)]),
             lambda n: gguf_header([], [gguf_texts("tokenizer.ggml.tokens", [f"t{i}" for i in range(n)])])],
    "safetensors": [twice, lambda n: json.dumps({f"t{i}": EMPTY for i in range(n)}).encode(),
                    lambda n: json.dumps({"t": {**EMPTY, "shape": [0] * n}}).encode()],
    "json": [twice],
}  # fmt: skip
TIMES = itertools.count()


@pytest.mark.parametrize(("kind", "case"), cases_of(HEADERS))
def test_headers_of_models_are_read_in_time_of_their_length(tmp_path, kind, case):
    read_header = {"gguf": open_gguf, "safetensors": Tensors, "json": read_json}[kind]

    def write(n):
        file, content = tmp_path / f"m{n}.{kind}", HEADERS[kind][case](n)
        file.write_bytes(struct.pack("<Q", len(content)) * (kind == "safetensors") + content)
        return file

    def fresh(file):
        os.utime(file, ns=(0, next(TIMES)))  # which no cache knows
        return read_header(file)

    check(fresh, write)


# ---- Requests: what a server does before it scores, and its tokens.


class Untrained(PRM):
    """A model without parameters."""

    layout: Any = None
    context: Any = None
    ratio: Any = None
    rule: Any = "min"
    semantics: Any = "correctness"
    step: Any = 0
    scale: Any = PROBABILITY
    config: Any = types.SimpleNamespace(steps=False)
    readout: Any = types.SimpleNamespace(score=None)

    def __init__(self, layout):
        self.__dict__ |= {"layout": layout, "tokenizer": layout.tokenizer}  # it is frozen


class Refusing(Engine):
    """An engine that counts tokens as others do, and refuses to score."""

    def __init__(self, prm):
        self.prm, self.name, self.longest, self.rate = prm, "m", 2**30, 0.0

    def wait_seconds(self, tokens=0):
        return 0.0

    def _add(self, job):
        job.future.set_exception(ValueError("untrained"))
        return job.future


class Silent:
    """A policy that fails."""

    name = "silent"

    def sample(self, prefixes, n, *, until, seed):
        raise PolicyError("silent")


def keys(n):
    return {str(i): 0 for i in range(n)}


LOGITS = {"use_activation": False}
# For n messages, the chat template's process renders all messages up to each turn.
ROUTES = {
    "/v1/score": [chain, lambda n: tree(n, lambda i: i - 1), lambda n: tree(n, lambda i: -1),
                  lambda n: keys(n) | chain(1),
                  lambda n: {"problem": "q", "samples": [chain(2)] * n}, lambda n: {"messages": one_turn(n)},
                  lambda n: {"messages": one_turn(n, named=False)}, lambda n: {"messages": turns(n // 8)},
                  lambda n: {"problem": "q", "response": "x. Y\n\n" * n},
                  lambda n: {"problem": "x " * n, "steps": ["x"]},
                  lambda n: b'{"problem": "q", "steps": ["x"]}\n' * n,
                  twice, lambda n: json.dumps({"messages": [called(0, arguments=twice(n).decode())]}).encode()],
    "/v1/rewards": [lambda n: {"samples": [chain(2)] * n},
                    lambda n: {"samples": [{"problem": "q", "response": "x\n\n" * n}]},
                    lambda n: {"samples": [{"messages": one_turn(n)}]},
                    lambda n: {"samples": [{"messages": turns(n // 8)}]},
                    lambda n: {"samples": [{"problem": "q", "response": "x", "outcome": 1} | keys(n)]}],
    "/v1/rerank": [lambda n: {"query": "q", "documents": [f"x{i}" for i in range(n)]},
                   lambda n: {"query": "q", "documents": ["x\n\n" * n]}],
    "/v1/continue": [lambda n: {"problem": "q", "steps": ["x"] * n}],
    "/v1/chat/completions": [lambda n: {"messages": [{"role": "user", "content": "q"}] * n},
                             lambda n: {"messages": [{"role": "user", "content": [{"type": "text", "text": "q"}] * n}]},
                             lambda n: {"messages": [{"role": "user", "content": "q"}], "search": keys(n)}],
    "/get_reward": [lambda n: {"query": ["q x"] * n, "prompts": ["q"] * n},
                    lambda n: {"query": ["x\n\n" * n], "prompts": ["x"]}],
    "/pooling": [lambda n: {"input": [1] * n, **LOGITS}, lambda n: {"input": ["x"] * n, **LOGITS},
                 lambda n: {"input": "x " * n, **LOGITS}],
    "/classify": [lambda n: {"input": [1] * n, **LOGITS}, lambda n: {"input": ["x"] * n, **LOGITS}],
}  # fmt: skip


@pytest.mark.parametrize(("path", "case"), cases_of(ROUTES))
def test_requests_are_read_in_time_of_their_length(path, case):
    tokenizer = read_by_jprm("qwen2.5")
    engine = Refusing(Untrained(native_layout(tokenizer)))
    config = ServeConfig(body_bytes=2**30, items=2**30)
    app = make_app([engine], config, policy=Silent())

    def send(body):
        content = body if isinstance(body, bytes) else json.dumps(body).encode()

        async def post():
            transport = httpx2.ASGITransport(app)
            async with httpx2.AsyncClient(transport=transport, base_url="http://localhost") as client:
                kind = "application/x-ndjson" if content.endswith(b"\n") else "application/json"
                return await client.post(path, content=content, headers={"content-type": kind})

        return asyncio.run(post())

    assert send(ROUTES[path][case](3)).status_code in (200, 400, 502)
    check(send, ROUTES[path][case])


def test_every_route_that_takes_text_has_a_worst_case():
    assert ROUTES.keys() == {path for path, route in operations().items() if route.verb == "post"}


@pytest.mark.parametrize("family", FAMILIES)
def test_a_conversation_is_rendered_up_to_its_last_turn_in_time_of_its_length(family):
    template, bos, eos, options = FAMILIES[family]
    answer = chat_template._prepare()
    tokens = {"bos_token": bos or "", "eos_token": eos}

    def render(messages):
        rendered = answer({"template": template, "messages": messages, "tokens": tokens, "turns": [len(messages) - 2]})
        assert "texts" in rendered, rendered

    check(render, turns)


EVENT = {"uuid": "a" * 8, "kind": "comment", "task": "t", "text": "x"}


@pytest.mark.parametrize("make", [lambda n: {**EVENT, "text": "x " * n}, *breadth([lambda n: EVENT | keys(n)]),
                                  lambda n: EVENT | {"kind": "k" * n}])  # fmt: skip
def test_events_of_annotators_are_read_in_time_of_their_length(make):
    annotate = pytest.importorskip("jprm.apps.annotate.app")

    def read_line(line):
        try:
            annotate.read_event(json_in(line, "body"), "ana", 0.0)
        except Refusal:
            pass

    check(read_line, lambda n: json.dumps(make(n)).encode())
