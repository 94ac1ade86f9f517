"""Records, servers' replies and programs with odd values at any place: each is used or refused in one line."""

import contextlib
import copy
import json

import pytest
from hostile import programs as hostile
from hypothesis import given, settings
from hypothesis import strategies as st
from stub_server import reply, serving
from test_growth import LOGS
from test_tree import exact, json_value, records

from jprm.io.jsonl import dump, parse
from jprm.methods.data.reader import Event
from jprm.methods.data.readers import find
from jprm.methods.policy.openai_client import ServerConfig, ServerPolicy
from jprm.methods.policy.protocol import Prefix
from jprm.methods.verify import sandbox
from jprm.methods.verify.programs import check_python
from jprm.methods.verify.sandbox import Limits
from jprm.methods.verify.verifiers import labelled
from jprm.tree import RecordError, record_of, tree_of

ODD = json_value | st.sampled_from(
    [10**400, -(10**30), 1e308, -0.0, "\ud800", "\0", "\n\n", "x" * 10_000, "[" * 5000, "9" * 5000, float("nan"),
     float("-inf")]
)  # fmt: skip
LONGEST = 2000
"""Characters of a message."""


def places(value, path=()):
    """Every path into a JSON value."""
    yield path
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield from places(inner, (*path, key))


def mutated(data, value):
    """The value with up to three of its parts replaced, removed or added under another's name."""
    value = {"": copy.deepcopy(value)}
    for _ in range(data.draw(st.integers(0, 3))):
        *path, key = data.draw(st.sampled_from(list(places(value))[1:]))
        inner = value
        for part in path:
            inner = inner[part]
        action = data.draw(st.sampled_from(["replace", "replace", "remove", "add"]))
        if action == "remove" and path:
            del inner[key]
        elif action == "add" and isinstance(inner, dict) and path:
            inner[data.draw(st.sampled_from([*inner, "steps", "nodes", "samples", "labels"]))] = data.draw(ODD)
        else:
            inner[key] = data.draw(ODD)
    return value[""]


def cut(data, content):
    """The bytes, perhaps without their end or with one changed."""
    at = data.draw(st.integers(0, len(content)))
    return data.draw(st.sampled_from([content, content, content[:at], content[:at] + b"\xff" + content[at + 1 :]]))


@given(st.data())
@settings(max_examples=60)
def test_an_odd_record_is_read_exactly_or_refused_in_one_line(data):
    line = cut(data, json.dumps(mutated(data, data.draw(records()))).encode())
    try:
        record = parse(line, "F:1")
        written = record_of(tree_of(record, "F:1"))
    except RecordError as error:
        assert str(error).startswith("F:1: ") and len(str(error)) < LONGEST
    else:
        if {"steps", "samples", "nodes"} & set(record):  # else another form, which becomes a chain
            assert exact(written) == exact(record)
        dump(written).encode()


@given(st.data())
@settings(max_examples=150)
def test_an_odd_log_is_read_or_refused_in_one_line(data):
    name = data.draw(st.sampled_from(sorted(LOGS)))
    item = mutated(data, data.draw(st.sampled_from(LOGS[name]))(2))
    reader = find(name)
    if reader.whole and not isinstance(item, list):
        return
    with contextlib.suppress(RecordError):
        item = parse(json.dumps(item).encode(), "F:1")
        events = [Event(f"F:{i}", value) for i, value in enumerate(item, start=1)] if reader.whole else item
        for record in reader.parse(events, "F:1", reader.options()):
            dump(record_of(tree_of(record))).encode()


@pytest.fixture(scope="module")
def server():
    with serving(None) as running:
        yield running


def test_a_long_finish_reason_is_shortened(server):
    server.script = lambda number, body: reply("a", finish="x" * 10_000)
    ((sample,),) = ServerPolicy(ServerConfig(server.url, "tiny")).sample([Prefix("p")], 1, until="end", seed=0)
    assert sample.error is not None and "finish_reason is 'xx" in sample.error and len(sample.error) < LONGEST


@given(st.data())
@settings(max_examples=60)
def test_an_odd_reply_is_a_sample_or_an_error_of_one_line(server, data):
    endpoint, until = data.draw(st.sampled_from(["completions", "chat"])), data.draw(st.sampled_from(["step", "end"]))
    text = data.draw(st.sampled_from(["a", "a\n\nb", "\n\n", "", "a\n\n"]))
    choice = {"finish_reason": data.draw(st.sampled_from(["stop", "length"])), "stop_reason": None, "text": text}
    choice |= {"message": {"content": text}, "logprobs": {"token_logprobs": [-1.0], "content": [{"logprob": -1.0}]}}
    whole = {"choices": [choice], "usage": {"completion_tokens": 3}}
    content = cut(data, json.dumps(mutated(data, whole)).encode())
    status = data.draw(st.sampled_from([200, 200, 200, 400, 503]))
    server.script = lambda number, body: (status, {}, content)
    config = ServerConfig(server.url, "tiny", endpoint=endpoint, logprobs=True, retries=0)
    ((sample,),) = ServerPolicy(config).sample([Prefix("p")], 1, until=until, seed=0)
    assert sample.finish_reason in ("stop", "step", "length", "error")
    assert (sample.error is None) == (sample.finish_reason != "error")
    assert len(sample.error or "") < LONGEST and "\n" not in (sample.error or "")
    assert all(step.strip() and config.delimiter not in step for step in sample.steps)
    json.dumps([sample.steps, sample.tokens, sample.logprob], allow_nan=False, ensure_ascii=False).encode()


PIECES = st.sampled_from([*hostile.ODD.values(), *hostile.FORGED.values(), "def area(s): return s * s", "x = 1", ""])


@pytest.mark.skipif(sandbox.refusal() is not None, reason=f"needs a sandbox: {sandbox.refusal()}")
@given(st.lists(PIECES, min_size=1, max_size=3), st.data())
@settings(max_examples=8)
def test_a_program_of_hostile_pieces_gets_labels_and_the_next_one_the_right_one(pieces, data):
    text = "\n".join(pieces)
    text = text[: data.draw(st.integers(1, max(1, len(text))))]
    with contextlib.suppress(RecordError):  # blank, or half a pair
        tree = tree_of({"problem": "p", "steps": [text], "tests": ["assert area(2) == 4"]})
        (verdict,) = check_python(tree, limits=Limits(seconds=10.0))
        assert verdict.label in (0, 1, None) and len(verdict.false or "") < LONGEST
        dump(record_of(labelled(tree, [verdict]))).encode()
    honest = tree_of({"problem": "p", "steps": ["def area(s): return s * s"], "tests": ["assert area(2) == 4"]})
    assert [verdict.label for verdict in check_python(honest, limits=Limits(seconds=60.0))] == [1]
