"""Dialects of OpenAI-compatible servers: limits of tokens, ends, texts, thoughts, log-probabilities and counts."""

import itertools
import json
import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from stub_server import serving

from jprm.methods.judge.critiques import PROMPTS
from jprm.methods.judge.judge import Judge
from jprm.methods.policy.openai_client import ServerConfig, ServerPolicy
from jprm.methods.policy.protocol import LogProb, Prefix
from jprm.methods.policy.sample_cache import PolicyError

ENDPOINTS = ["completions", "chat"]


def answer(text, endpoint="chat", finish: Any = "stop", prompt_tokens=None, **choice):
    """A reply of status 200. `text` of a chat may be the fields of its message."""
    fields = (
        {"text": text}
        if endpoint == "completions"
        else {"message": text if isinstance(text, dict) else {"content": text}}
    )
    usage = {"completion_tokens": 3} | ({} if prompt_tokens is None else {"prompt_tokens": prompt_tokens})
    return 200, {}, {"choices": [{**fields, "finish_reason": finish, **choice}], "usage": usage}


def draw(server, until="end", problem="p", **changes):
    policy = ServerPolicy(ServerConfig(server.url, "tiny", **{"retries": 0, "backoff_s": 0.01} | changes))
    return policy.sample([Prefix(problem)], 1, until=until, seed=0)[0][0]


# ---- The limit of tokens.


@pytest.mark.parametrize("endpoint", ENDPOINTS)
@pytest.mark.parametrize(("extra", "limit"), [
    ({}, {"max_tokens": 90}),
    ({"max_tokens": 7}, {"max_tokens": 7}),
    ({"max_tokens": None}, {"max_completion_tokens": 90}),
    ({"max_completion_tokens": 64}, {"max_completion_tokens": 64}),
    ({"max_tokens": None, "max_completion_tokens": 64}, {"max_completion_tokens": 64}),
    ({"max_completion_tokens": 640}, {"max_completion_tokens": 90}),
    ({"max_tokens": None, "max_completion_tokens": None}, {}),
])  # fmt: skip
def test_the_limit_of_tokens_has_the_name_that_the_settings_give(serve, endpoint, extra, limit):
    server = serve(lambda number, body: answer("x", endpoint))
    assert draw(server, endpoint=endpoint, max_tokens=90, extra=extra).error is None
    (body,) = [body for _, body in server.requests]
    assert {key: body[key] for key in ("max_tokens", "max_completion_tokens") if key in body} == limit


@pytest.mark.parametrize(("message", "remedy"), [
    ("Unsupported parameter: 'max_tokens'. Use 'max_completion_tokens' instead.", '"max_tokens": null'),
    ("Unrecognized request arguments supplied: min_p, top_k", '"top_k": null, "min_p": null'),
    ("Unsupported value: 'temperature' does not support 0.8 with this model.", '"temperature": null'),
])  # fmt: skip
def test_a_parameter_that_a_server_refuses_is_named_with_the_remedy(serve, message, remedy):
    server = serve(lambda number, body: (400, {}, {"error": {"message": message}}))
    assert f'"extra": {{{remedy}}}' in draw(server, endpoint="chat").error


# ---- How a text ends.

ENDS = {
    "stop": ("step", "stop"), "STOP": ("step", "stop"), None: ("step", "stop"), "COMPLETE": ("step", "stop"),
    "eos": ("stop", "stop"), "eos_token": ("stop", "stop"), "end_turn": ("stop", "stop"),
    "stop_sequence": ("step", "stop"), "length": ("length", "length"), "max_tokens": ("length", "length"),
    "": ("step", "stop"), "endoftext": ("stop", "stop"), "model_length": ("length", "length"),
    "model_context_window_exceeded": ("length", "length"),
    "MAX_TOKENS": ("length", "length"), "content_filter": ("error", "error"), "tool_calls": ("error", "error"),
    "SAFETY": ("error", "error"), "error": ("error", "error"), 5: ("error", "error"),
}  # fmt: skip
"""The finish of a sample of one step, and of one to the end, by a server's word."""


@pytest.mark.parametrize("word", ENDS)
@pytest.mark.parametrize("endpoint", ENDPOINTS)
def test_a_servers_word_for_an_end_is_read(serve, endpoint, word):
    server = serve(lambda number, body: answer("one step", endpoint, word))
    drawn = [draw(server, until, endpoint=endpoint).finish_reason for until in ("step", "end")]
    assert drawn == list(ENDS[word])


def test_a_text_without_a_word_for_its_end_is_cut_if_it_has_all_tokens(serve):
    for word in (None, ""):
        server = serve(lambda number, body, word=word: answer("one", finish=word))
        assert [draw(server, endpoint="chat", max_tokens=most).finish_reason for most in (3, 4)] == ["length", "stop"]


# ---- Texts in parts, and thoughts.


@pytest.mark.parametrize("message", [
    {"content": [{"type": "thinking", "thinking": [{"type": "text", "text": "Hm."}]},
                 {"type": "text", "text": "It is 4."}]},
    {"content": "It is 4.", "reasoning_content": "Hm."},
    {"content": "It is 4.", "reasoning": "Hm."},
    {"content": "It is 4.", "thinking": "Hm."},
    {"content": "It is 4.", "thinking_blocks": [{"type": "thinking", "thinking": "Hm."}]},
    {"content": [{"type": "text", "text": "It is 4."}], "reasoning_details": [{"type": "x", "text": "Hm."}]},
    {"content": "It is 4.", "provider_specific_fields": {"reasoning_content": "Hm."}},
    {"content": "<think>\nHm.\n</think>\n\nIt is 4.", "reasoning_content": "Hm."},
    {"content": "It is 4.", "reasoning": "Hm.", "reasoning_details": [{"text": "H"}, {"text": "m."}]},
    {"content": "It is 4.", "reasoning": {"effort": "low"}, "thinking": True, "reasoning_details": [{"text": "Hm."}]},
])  # fmt: skip
def test_thoughts_of_every_name_and_texts_in_parts_are_read(serve, message):
    server = serve(lambda number, body: answer(message))
    assert draw(server, endpoint="chat").steps == ("<think>\nHm.\n</think>", "It is 4.")


@pytest.mark.parametrize("content", [[{"type": "text", "text": "It is "}, {"type": "text", "text": "4."}], "It is 4."])
def test_a_text_without_thoughts_is_itself(serve, content):
    server = serve(lambda number, body: answer({"content": content, "reasoning": "", "thinking": None}))
    assert draw(server, endpoint="chat").steps == ("It is 4.",)


@pytest.mark.parametrize("content", [[{"type": "image_url"}], [5], {"a": 1}, 5, [{"type": "text", "text": None}]])
def test_a_content_that_is_no_text_fails_in_one_line(serve, content):
    server = serve(lambda number, body: answer({"content": content}))
    error = draw(server, endpoint="chat").error
    assert error and "\n" not in error


# ---- Log-probabilities.


def table(form, places):
    """The log-probabilities of tokens, [(token, number, {other: number})], in a chat's form or a completion's."""
    if form == "chat":
        return {"content": [
            {"token": token, "logprob": value, "top_logprobs": [{"token": t, "logprob": x} for t, x in others.items()]}
            for token, value, others in places
        ]}  # fmt: skip
    tokens, values, others = zip(*places, strict=True)
    return {"tokens": tokens, "token_logprobs": values, "top_logprobs": others}


@pytest.mark.parametrize(("endpoint", "form"), list(itertools.product(ENDPOINTS, ENDPOINTS)))
def test_log_probabilities_are_read_in_either_endpoints_form(serve, endpoint, form):
    places = [("It", -0.5, {"It": -0.5, "So": -1.5}), (" is", -0.25, {" is": -0.25, " was": -2.0})]
    server = serve(lambda number, body: answer("It is", endpoint, logprobs=table(form, places)))
    sample = draw(server, endpoint=endpoint, logprobs=True, top_logprobs=2)
    assert sample.logprob == -0.75 and sample.token_logprobs == (("It", -0.5), (" is", -0.25))
    assert sample.alternatives == ({"It": -0.5, "So": -1.5}, {" is": -0.25, " was": -2.0})


BAD = [math.nan, math.inf, -math.inf, 3.0, 800.0, 10**400, -(10**400), True, "a", [], {}]


@pytest.mark.parametrize("value", BAD, ids=str)
def test_a_number_that_is_no_log_probability_makes_the_table_unknown(serve, value):
    with pytest.raises(ValueError, match="log-probability"):
        LogProb(value)
    tables = [
        table(form, [("It", own, {"It": -0.1, "So": other})])
        for form in ENDPOINTS for own, other in ((value, -0.1), (-0.1, value))
    ]  # fmt: skip
    server = serve(lambda number, body: answer("It", logprobs=tables[number]))
    for _ in tables:
        sample = draw(server, endpoint="chat", logprobs=True, top_logprobs=2)
        assert (sample.steps, sample.logprob, sample.token_logprobs, sample.alternatives) == (("It",), None, (), ())


def test_rounding_above_zero_is_zero():
    assert LogProb(1e-7) == 0.0 and LogProb(-3) == -3.0 and LogProb(-9999.0) == -9999.0


def rated(serve, top, written="4", own=-0.1):
    """The score, from 0 to 1, of a judge on a scale of 9 whose reply has these log-probabilities."""
    prompt = PROMPTS["scale"]
    places = [("\\boxed{", -0.1, {}), (written, own, top), ("}", -0.1, {})]
    server = serve(lambda number, body: answer(f"\\boxed{{{written}}}", logprobs=table("chat", places)))
    config = ServerConfig(
        server.url, "tiny", endpoint="chat", prompt="{problem}", logprobs=True, top_logprobs=3, retries=0
    )
    (record,) = Judge(ServerPolicy(config), prompt).score_many([{"problem": "p", "steps": ["a"]}])
    return record["scores"][0] * (prompt.scale - 1) + 1, record["judge"]["by_vote"]


@pytest.mark.parametrize(("top", "own", "mean", "by_vote"), [
    ({"4": -0.7, "2": -0.7}, -0.7, 3.0, 0),
    ({"4": -9999.0, "2": -9999.0}, -9999.0, 3.0, 0),
    ({"The": -0.1, "4": -9999.0, "2": -9999.0}, -9999.0, 3.0, 0),
    ({"4": -0.1, "2": 800.0}, -0.1, 4.0, 1),
    ({"4": -0.1, "2": math.inf}, -0.1, 4.0, 1),
    ({"4": -0.1, "2": 10**400}, -0.1, 4.0, 1),
    ({"4": -0.1, "5": 3.0}, -0.1, 4.0, 1),
    ({"4": -0.1, "\u0665": 5.0}, -0.1, 4.0, 1),
    ({"4": -0.1}, 1000.0, 4.0, 1),
])  # fmt: skip
def test_a_rating_is_a_mean_by_probabilities_or_a_vote(serve, top, own, mean, by_vote):
    assert rated(serve, top, own=own) == (pytest.approx(mean), by_vote)


@pytest.mark.parametrize("endpoint", ENDPOINTS)
def test_log_probabilities_that_do_not_come_are_reported_once(serve, endpoint, capsys):
    server = serve(lambda number, body: answer("x", endpoint, logprobs=None))
    policy = ServerPolicy(ServerConfig(server.url, "tiny", endpoint=endpoint, logprobs=True))
    for _ in range(2):
        policy.sample([Prefix("p")], 2, until="end", seed=0)
    assert capsys.readouterr().err.count("logprobs are requested") == 1
    draw(server, endpoint=endpoint)
    assert not capsys.readouterr().err


# ---- Prompts that a server has cut.


@pytest.mark.parametrize("endpoint", ENDPOINTS)
@pytest.mark.parametrize(("count", "believed"), [(2051, False), (20_000, True), (0, True), (None, True), (1, False)])
def test_a_server_that_read_a_part_of_its_prompt_is_not_believed(serve, endpoint, count, believed):
    problem = "".join(f"{i} apples and {i * i} pears. " for i in range(3000))
    server = serve(lambda number, body: answer("x", endpoint, prompt_tokens=count))
    error = draw(server, endpoint=endpoint, problem=problem).error
    assert (error is None) == believed and (believed or "OLLAMA_CONTEXT_LENGTH" in str(error))


def test_no_server_cuts_a_short_prompt(serve):
    server = serve(lambda number, body: answer("x", prompt_tokens=5))
    assert draw(server, endpoint="chat", problem="How many apples are left of them? " * 20).error is None


@pytest.mark.parametrize("text", [" " * 80_000, "\n" * 80_000, "-" * 80_000])
def test_runs_of_one_character_are_few_tokens(serve, text):
    server = serve(lambda number, body: answer("x", prompt_tokens=700))
    assert draw(server, endpoint="chat", problem=text + "p").error is None


# ---- Any reply: types and ranges.

VALUES = st.sampled_from([
    None, True, 0, -1, 0.5, -0.5, 10**400, -(2**63), 1e308, -1e308, math.inf, -math.inf, math.nan, "", "a", "stop", "4",
    "\ud800", "x" * 5000, [], {}, [[]], [None], [{}], {"a": 1}, [{"type": "text", "text": "4"}], [{"type": "image"}],
])  # fmt: skip
KEYS = [
    "choices", "usage", "error", "choices.0", "choices.0.text", "choices.0.message", "choices.0.message.content",
    "choices.0.message.reasoning_content", "choices.0.message.thinking_blocks", "choices.0.message.extra_content",
    "choices.0.finish_reason", "choices.0.stop_reason", "choices.0.logprobs", "choices.0.logprobs.content",
    "choices.0.logprobs.content.1", "choices.0.logprobs.content.1.token", "choices.0.logprobs.content.1.logprob",
    "choices.0.logprobs.content.1.top_logprobs", "choices.0.logprobs.content.1.top_logprobs.0.logprob",
    "choices.0.logprobs.tokens", "choices.0.logprobs.token_logprobs", "choices.0.logprobs.top_logprobs",
    "usage.completion_tokens", "usage.prompt_tokens",
]  # fmt: skip


def put(value, path, new):
    *path, last = [int(key) if key.isdigit() else key for key in path.split(".")]
    for key in path:
        value = value[key]
    value[last] = new


@pytest.fixture(scope="module")
def stub():
    with serving(None) as running:
        yield running


@given(
    st.sampled_from(ENDPOINTS), st.sampled_from(["plain", "scale"]), st.lists(st.tuples(st.sampled_from(KEYS), VALUES))
)
@settings(max_examples=60)
def test_any_reply_is_a_critique_or_an_error_of_one_line(stub, endpoint, name, changes):
    word = "4" if name == "scale" else "Yes"
    places = [("\\boxed{", -0.1, {}), (word, -0.1, {word: -0.1, "2": -2.0}), ("}", -0.1, {})]
    logprobs = table("completions", places) | table("chat", places)
    text = f"\\boxed{{{word}}}"
    choice = {"text": text, "message": {"content": text}, "finish_reason": "stop", "logprobs": logprobs}
    content = {"choices": [choice], "usage": {"completion_tokens": 3, "prompt_tokens": 50}}
    content = json.loads(json.dumps(content))
    for path, value in changes[:2]:
        try:
            put(content, path, value)
        except (TypeError, KeyError, IndexError):
            continue  # an earlier change has removed the place
    stub.script = lambda number, body: (200, {}, content)
    config = ServerConfig(
        stub.url, "tiny", endpoint=endpoint, prompt="{problem}", logprobs=True, top_logprobs=2, retries=0
    )
    try:
        (record,) = Judge(ServerPolicy(config), PROMPTS[name]).score_many([{"problem": "p", "steps": ["a"]}])
    except PolicyError as error:
        assert "\n" not in str(error) and len(str(error)) < 2000
    else:
        assert all(score is None or 0 <= score <= 1 for score in record["scores"])
        json.dumps(record, allow_nan=False, ensure_ascii=False).encode()
