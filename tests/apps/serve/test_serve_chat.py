"""/v1/chat/completions: what a search finds, for OpenAI's client; progress, budgets, and the conformal filter."""

import concurrent.futures
import json
import math
import os
import subprocess
from typing import Any

import pytest
from browser import served
from test_serve import CONFIG, call, engine, post, prm  # noqa: F401  (fixtures, which tests name as arguments)
from test_serve_continue import Failing
from toy_policy import Markov
from toy_search import Script, Table

from jprm.apps.serve.app import make_app
from jprm.apps.serve.call import Writer
from jprm.apps.serve.chat import _Scores
from jprm.methods.jobs.score import identity
from jprm.methods.policy.protocol import Problem
from jprm.methods.search.beam import Beam
from jprm.methods.search.best_of_n import BestOfN
from jprm.methods.search.jobs import record
from jprm.methods.search.lockstep import Rescorer, SearchConfig, search
from jprm.methods.search.particles import Particles, odds, resampled

QUESTION = [{"role": "user", "content": "p0 1"}]


def ask(engine, policy=None, calibration=None, messages=QUESTION, **body):  # noqa: F811
    request = post("/v1/chat/completions", {"model": "tiny", "messages": messages} | body)
    return call(engine, request, policy=policy or Markov(), calibration=calibration)[0]


def expected(engine, method: Any, budget=2000, problem="p0 1", answer=None) -> dict[str, Any]:  # noqa: F811
    config = SearchConfig(method, engine.prm.rule, "weighted", budget)
    ((_, tree),) = search([Problem(problem, answer)], Markov(), Rescorer(engine.prm), config)
    about = {"method": type(method).__name__, **vars(method), "budget": budget, "seed": 0}
    about |= {"policy": "markov", "scorer": identity(engine.prm)}
    result = record(tree, config.rule, "weighted", method.kind, about)
    assert result is not None
    return result


@pytest.mark.parametrize(
    ("method", "asked"),
    [
        (BestOfN(4), {"method": "best-of-n", "n": 4}),
        (Beam(2, 2), {"method": "beam", "width": 2, "expand": 2}),
        (Particles(4), {"method": "particles", "particles": 4}),
    ],
)
def test_the_answer_is_the_searchs(engine, method, asked):  # noqa: F811
    got = ask(engine, search=asked | {"budget": 2000})
    assert got.status_code == 200, got.text
    answer, result = got.json(), expected(engine, method)["search"]
    assert answer["search"]["answer"] == result["answer"] and answer["search"]["score"] == pytest.approx(
        result["score"]
    )
    (choice,) = answer["choices"]
    assert choice["message"]["content"].endswith(f"answer is {result['answer']}")
    assert choice["finish_reason"] == "stop" and answer["usage"]["completion_tokens"] == result["policy_tokens"]


@pytest.mark.parametrize("late", [False, True])
def test_a_stream_has_progress_and_then_the_answer(engine, monkeypatch, late):  # noqa: F811
    """Also where the event loop goes on only when the search has ended."""
    whole = ask(engine, search={"method": "beam", "budget": 2000}).json()
    run = Writer.run

    def ended(*arguments):
        future = run(*arguments)
        concurrent.futures.wait([future] if late else [])
        return future

    monkeypatch.setattr(Writer, "run", ended)
    got = ask(engine, search={"method": "beam", "budget": 2000}, stream=True, stream_options={"include_usage": True})
    events = [line.removeprefix("data: ") for line in got.text.splitlines() if line]
    assert events[-1] == "[DONE]"
    chunks = [json.loads(event) for event in events[:-1]]
    content = "".join(c["choices"][0]["delta"].get("content") or "" for c in chunks if c["choices"])
    assert content == whole["choices"][0]["message"]["content"] and chunks[-1]["usage"] == whole["usage"]
    progress = [c["search"]["completion_tokens"] for c in chunks if "samples" in c.get("search", {})]
    assert len(progress) > 2 and progress == sorted(progress) and progress[-1] == whole["usage"]["completion_tokens"]


def test_a_budget_too_small_is_a_refusal(engine):  # noqa: F811
    answer = ask(engine, search={"method": "beam", "budget": 8}).json()
    message = answer["choices"][0]["message"]
    assert message["content"] is None and "budget" in message["refusal"]
    assert answer["choices"][0]["finish_reason"] == "content_filter"


def test_what_the_filter_does_not_accept_is_a_refusal(engine):  # noqa: F811
    known = [expected(engine, BestOfN(4), problem=f"p1 {i}", answer=1) for i in range(20)]
    asked = {"method": "best-of-n", "n": 4, "budget": 2000}
    strict = ask(engine, calibration=known, search=asked | {"error_rate": 0.001})
    message = strict.json()["choices"][0]["message"]
    assert message["content"] is None and "threshold" in message["refusal"]
    assert strict.json()["search"]["accepted"] is False
    loose = ask(engine, calibration=known, search=asked | {"error_rate": 0.99, "confidence": 0.5}).json()
    assert loose["search"]["accepted"] is True and loose["choices"][0]["message"]["content"]
    other = ask(engine, calibration=known, search=asked | {"n": 5, "error_rate": 0.1})
    assert other.status_code == 400 and "search.n" in other.json()["error"]["message"]
    repeated = [{"role": "user", "content": "p1 3"}]
    seen = ask(engine, calibration=known, search=asked | {"error_rate": 0.1}, messages=repeated)
    assert seen.status_code == 400 and "calibration" in seen.json()["error"]["message"]
    assert ask(engine, search=asked | {"error_rate": 0.1}).status_code == 400


def test_scores_come_from_the_engine_and_reuse_what_is_kept(engine, prm):  # noqa: F811
    scorer = Rescorer(_Scores(engine))
    (root,) = scorer.open(["p"])
    (first,), first_scores = scorer.extend([root], ["good 1"])
    _, two = scorer.extend([first, first], ["bad 2", "good 3"])
    assert [*first_scores, two[0]] == pytest.approx(prm.score("p", ["good 1", "bad 2"]).tolist(), abs=1e-6)


def test_a_policy_that_is_absent_or_fails_is_said(engine):  # noqa: F811
    (none,) = call(engine, post("/v1/chat/completions", {"messages": QUESTION}))
    assert none.status_code == 400
    failed = ask(engine, Failing())
    assert failed.status_code == 502 and "connection refused" in failed.json()["error"]["message"]
    assert "connection refused" in ask(engine, Failing(), stream=True).text


# ---- The particle filter.


def test_particles_go_where_the_odds_are():
    """After one step `a` has odds of 9 to 1 and `b` of 1 to 9: of four particles all, or all but one, are at `a`."""
    table = {(): ["a", "b"], ("a",): ["a."], ("b",): ["b."]}
    scores = {"a": 0.9, "b": 0.1, "a.": 0.9, "b.": 0.1}
    method: Any = Particles(4)
    config = SearchConfig(method, "last", "weighted", None)
    ((_, tree),) = search([Problem("p")], policy := Script(table), Table(scores), config)
    assert tree.ended == "done"
    assert sum(n for prefixes, n, *_ in policy.calls if ("a",) in prefixes) >= 3


def test_resampling_keeps_expected_counts():
    weights = odds([math.log(0.9), math.log(0.5), math.log(0.1), math.nan], 1.0)
    assert weights == pytest.approx([1, 1 / 9, 1 / 81, 0])
    counts = [0.0] * 4
    for k in range(1000):
        drawn = resampled([0, 1, 2, 3], weights, 8, k / 1000)
        assert len(drawn) == 8 and 3 not in drawn
        for item in drawn:
            counts[item] += 1 / 1000
    assert counts == pytest.approx([8 * w / sum(weights) for w in weights], abs=0.02)


CLIENT = """
import json, os
from openai import OpenAI
client = OpenAI(base_url=os.environ["JPRM_URL"] + "/v1", api_key="none")
asked = dict(model="tiny", messages=[{"role": "user", "content": "p0 1"}],
             extra_body={"search": {"method": "beam", "budget": 2000}})
whole = client.chat.completions.create(**asked)
parts = [c.choices[0].delta.content or "" for c in client.chat.completions.create(stream=True, **asked) if c.choices]
print(json.dumps({"whole": whole.choices[0].message.content, "stream": "".join(parts)}))
"""


@pytest.mark.slow
def test_the_client_of_openai(engine):  # noqa: F811
    python = os.environ.get("JPRM_OPENAI")
    if not python:
        pytest.skip("JPRM_OPENAI names no interpreter with openai")
    with served(make_app([engine], CONFIG, policy=Markov())) as (_, port):
        url = f"http://127.0.0.1:{port}"
        done = subprocess.run([python, "-c", CLIENT], capture_output=True, text=True, env={"JPRM_URL": url})
    assert done.returncode == 0, done.stderr[-2000:]
    got = json.loads(done.stdout)
    result = expected(engine, Beam())
    assert got["whole"] == got["stream"] and got["whole"].endswith(f"answer is {result['search']['answer']}")
