"""Judges behind the routes of scores, critiques as a stream, and rubrics."""

import concurrent.futures
import gc
import json

import numpy as np
import pytest
from refusing import refused
from stub_server import reply
from test_judge import CHAIN, NO, TREE, YES, judge, write_judge
from test_serve import call, post

from jprm.apps.serve.judges import JudgeEngine
from jprm.io.jsonl import dump
from jprm.methods.judge.critiques import RUBRIC
from jprm.methods.judge.judge import Judge, Rubric
from jprm.methods.judge.load import load_judge, load_plain_judge
from jprm.score.aggregate import chain_scores
from jprm.tree import RecordError, tree_of

CRITERIA = {
    "sums": {"text": "Every sum is right.", "weight": 3},
    "use": {"text": "The step helps.", "weight": 1},
    "style": {"text": "The step is short.", "weight": 0},
}


def verdict(number, body):
    """The plain prompt: the second step is wrong, and nothing is said about a step "mute"."""
    steps = body["prompt"].split("Solution so far:\n")[1].split("\n\n")[0].splitlines()
    return reply("no verdict" if "mute" in steps[-1] else NO if "= 4" in steps[-1] or "bad" in steps[-1] else YES)


def of_criterion(number, body):
    """Sums are right but in the second step, no step helps, and all are short."""
    criterion = body["prompt"].split("by this criterion alone: ")[1].split("\n")[0]
    right = {"Every sum is right.": "Judge step 2" not in body["prompt"], "The step helps.": False}
    return reply(YES if right.get(criterion, True) else NO)


@pytest.fixture
def engine(serve):
    running = JudgeEngine(judge(serve(verdict)), 256, "judge")
    yield running
    running.close()


@pytest.fixture
def rubric(serve, tmp_path):
    write_judge(tmp_path / "judge.json", serve(of_criterion), criteria=CRITERIA, prompt="rubric")
    running = JudgeEngine(load_judge(tmp_path / "judge.json"), 256, "rubric")
    yield running
    running.close()


def test_scores_and_lines_are_the_judges(engine):
    got, lines, models = call(
        engine,
        post("/v1/score", CHAIN),
        post(
            "/v1/score",
            (dump(CHAIN) + "\n" + dump(TREE) + "\n").encode(),
            headers={"content-type": "application/x-ndjson"},
        ),
        ("GET", "/v1/models", {}),
    )
    answer, expected = got.json(), list(engine.judge.score_many([CHAIN, TREE]))
    assert answer["record"] == expected[0] and answer["record"]["scores"] == [1.0, 0.0, 1.0]
    assert answer["chains"] == [{"nodes": [0, 1, 2], "score": 0.0, "weakest": 1}]
    assert [json.loads(line) for line in lines.text.splitlines()] == expected
    assert models.json()["data"][0]["id"] == "judge"


def test_critiques_are_streamed_and_the_whole_follows(engine):
    (got,) = call(engine, post("/v1/score", CHAIN | {"stream": True}))
    events = [line.removeprefix("data: ") for line in got.text.splitlines() if line]
    *critiques, whole = [json.loads(event) for event in events[:-1]]
    assert events[-1] == "[DONE]" and all(critique["object"] == "critique" for critique in critiques)
    scores = {tuple(critique["nodes"]): critique["scores"] for critique in critiques}
    assert scores == {(0,): [1.0], (1,): [0.0], (2,): [1.0]}
    (alone,) = call(engine, post("/v1/score", CHAIN))
    assert whole == alone.json()


def test_a_step_without_a_verdict_has_no_score(engine):
    chain = {"problem": "p", "steps": ["a", "mute"]}
    got, rewarded, ranked, paid = call(
        engine,
        post("/v1/score", chain),
        post("/v1/rewards", {"credit": "sum", "samples": [{"problem": "p", "response": "a\nmute"},
                                                           {"problem": "p", "response": "a\nbad"}]}),
        post("/v1/rerank", {"query": "p", "documents": ["a\nmute"]}),
        post("/get_reward", {"query": ["pa\nmute"], "prompts": ["p"], "labels": [""]}),
    )  # fmt: skip
    assert got.json()["chains"] == [{"nodes": [0, 1], "score": None, "weakest": 0}]
    assert "scores" not in got.json()["record"]
    mute, known = rewarded.json()["samples"]
    assert [step["score"] for step in mute["steps"]] == [1.0, None] and mute["score"] is None
    assert "reward" not in mute["steps"][0]
    assert [step["reward"] for step in known["steps"]] == [1.0, 0.0]
    assert ranked.status_code == paid.status_code == 502


def test_what_a_judge_has_not_is_refused(engine):
    got, pooled = call(engine, post("/classify", {"input": [1]}), post("/pooling", {"input": [1]}))
    assert got.status_code == pooled.status_code == 400


def test_a_dead_policy_is_a_bad_gateway(serve):
    engine = JudgeEngine(judge(serve(lambda number, body: (400, {}, {}))), 256, "judge")
    got, streamed = call(engine, post("/v1/score", CHAIN), post("/v1/score", CHAIN | {"stream": True}))
    engine.close()
    assert got.status_code == 502 and "failed at all" in streamed.text


def test_an_error_of_a_judge_ends_its_stream_with_an_event_that_quotes_nothing(serve, monkeypatch):
    engine = JudgeEngine(judge(serve(lambda number, body: (400, {}, {}))), 256, "judge")

    def failing(*arguments):
        raise ZeroDivisionError("secret")

    monkeypatch.setattr(Judge, "critiques", failing)
    got, streamed = call(engine, post("/v1/score", CHAIN), post("/v1/score", CHAIN | {"stream": True}))
    engine.close()
    assert got.status_code == 500 and "ZeroDivisionError while scoring" in streamed.text
    assert "secret" not in got.text + streamed.text


def test_what_a_dead_policy_said_of_several_steps_is_in_no_log(serve, caplog, monkeypatch):
    """It may quote the request, and asyncio logs what nobody has read."""
    engine = JudgeEngine(judge(serve(lambda number, body: (400, {}, {}))), 256, "judge")
    submit = engine.ask

    def failed(critiques, function):
        future = submit(critiques, function)
        concurrent.futures.wait([future])
        return future

    monkeypatch.setattr(engine, "ask", failed)  # so that all fail at once
    gc.freeze()  # the collection below sees only this test's objects
    (streamed,) = call(engine, post("/v1/score", CHAIN | {"stream": True}))
    engine.close()
    gc.collect()
    assert "failed at all" in streamed.text and not [record for record in caplog.records if record.name == "asyncio"]


def test_a_rubric_has_an_output_a_criterion_and_their_weighted_mean(rubric):
    (outputs,) = rubric.judge.outputs_of([tree_of(CHAIN)])
    np.testing.assert_array_equal(outputs["sums"], [1, 0, 1])
    np.testing.assert_array_equal(outputs["use"], [0, 0, 0])
    np.testing.assert_array_equal(outputs["style"], [1, 1, 1])
    np.testing.assert_allclose(outputs["score"], [0.75, 0, 0.75])
    got, streamed, rewarded = call(
        rubric,
        post("/v1/score", CHAIN),
        post("/v1/score", CHAIN | {"stream": True}),
        post("/v1/rewards", {"samples": [{"problem": "p", "response": "a\nb"}]}),
    )
    record = got.json()["record"]
    (expected,) = rubric.judge.score_many([CHAIN])
    assert record == expected and record["outputs"]["sums"] == [1.0, 0.0, 1.0]
    assert record["judge"]["asked"] == 9 and {c["criterion"] for c in record["judge"]["critiques"]} == set(CRITERIA)
    score = chain_scores([[0.75, 0, 0.75]], rubric.judge.rule)[0][0]
    assert got.json()["chains"][0]["score"] == pytest.approx(float(score))
    assert streamed.text.count('"object": "critique"') == 9
    assert rewarded.json()["samples"][0]["steps"][1]["outputs"] == {"sums": 0.0, "use": 0.0, "style": 1.0}


def test_a_criterion_may_have_a_question_of_its_own(tmp_path, serve):
    kind = {"text": "It is kind.", "prompt": "{problem}\n{steps}\nIs it so? {criterion}"}
    write_judge(tmp_path / "judge.json", serve(verdict), criteria={"kind": kind, "true": {"text": "It is true."}})
    judges = load_judge(tmp_path / "judge.json").judges
    assert judges["kind"].prompt.filled("p", ["s"]) == "p\nStep 1: s\nIs it so? It is kind."
    assert "It is true." in judges["true"].prompt.text and "Judge step" in judges["true"].prompt.text


def test_labels_take_no_rubric(tmp_path, serve):
    write_judge(tmp_path / "judge.json", serve(verdict), criteria=CRITERIA)
    rubric = load_judge(tmp_path / "judge.json")
    assert isinstance(rubric, Rubric) and rubric.judges["use"].prompt.asks == RUBRIC.asks
    refused(RecordError, "criteria", load_plain_judge, tmp_path / "judge.json")
