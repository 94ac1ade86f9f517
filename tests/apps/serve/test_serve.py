"""The server: its answers equal the library's, a bad request harms no other, and what it cannot take it refuses."""

import asyncio
import json
import re
import threading

import httpx2 as httpx
import numpy as np
import pytest
import tiny_run as tiny
from refusing import refused
from tiny import compiling

import jprm
from jprm.apps.serve import ServeConfig
from jprm.apps.serve.app import PAGE, make_app, prefix_cache
from jprm.apps.serve.engine import Engine
from jprm.apps.serve.openrlhf import View
from jprm.io.jsonl import dump, write_records
from jprm.methods.jobs.score import score_file
from jprm.score import scorer
from jprm.tree import tree_of

PATIENT = {"longest": 256, "queue_seconds": 3600.0, "answer_seconds": 3600.0}
"""Where a machine stands still for seconds, the rate that a server measures is small: nothing is refused for that."""
CONFIG = ServeConfig(**PATIENT)


def chains(count, seed=0):
    return [{key: record[key] for key in ("problem", "steps")} for record in tiny.chains(count, seed=seed)]


CHAIN = chains(1)[0]


@pytest.fixture(scope="module")
def prm(tiny_run):
    """A model whose longest rows have 512 tokens, so that few shapes are compiled."""
    with tiny.one_device(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(scorer, "LONGEST", 512)
        loaded = jprm.load(tiny_run.folder)
        assert loaded.warm_up(512) == [256, 512]
        yield loaded


@pytest.fixture
def engine(prm):
    running = Engine(prm, 256, "tiny")
    yield running
    running.close()


def call(engine, *requests, config=CONFIG, key=None, view=None, policy=None, headers=None, **more):
    """Returns the responses of requests (method, path, arguments) that are sent at once."""
    app = make_app([engine], config, key, view, policy, **more)

    async def send():
        async with httpx.AsyncClient(
            transport=httpx.ASGITransport(app, raise_app_exceptions=False),
            base_url="http://localhost",
            headers=headers,
        ) as client:
            return await asyncio.gather(*(client.request(m, path, **options) for m, path, options in requests))

    return asyncio.run(send())


def post(path, body, **more):
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    return ("POST", path, {"content": content, "headers": {"content-type": "application/json"}, **more})


def test_a_record_comes_back_with_the_librarys_scores(engine, prm):
    (got,) = call(engine, post("/v1/score", CHAIN))
    answer = got.json()
    expected = prm.score(CHAIN["problem"], CHAIN["steps"])
    assert answer["record"]["scores"] == pytest.approx(expected.tolist(), abs=1e-7)
    assert answer["chains"][0]["weakest"] == int(np.argmin(expected))
    assert (
        answer["model"] == "tiny"
        and answer["rule"] == prm.rule
        and answer["usage"]["prompt_tokens"] == engine.tokens_of([tree_of(CHAIN)])
    )


def test_free_text_is_split_and_the_rule_is_reported(engine):
    text = {"problem": CHAIN["problem"], "response": "\n".join(CHAIN["steps"]), "rule": "min"}
    (got,) = call(engine, post("/v1/score", text))
    record = got.json()["record"]
    assert record["steps"] == CHAIN["steps"] and record["segmentation"] in jprm.steps.RULES
    assert got.json()["chains"][0]["score"] == pytest.approx(min(record["scores"]))


def test_lines_have_the_bytes_of_the_command_under_load(engine, prm, tmp_path):
    records = chains(100)
    write_records(tmp_path / "in.jsonl", records)
    score_file(prm, tmp_path / "in.jsonl", tmp_path / "out.jsonl")
    lines = post("/v1/score", (tmp_path / "in.jsonl").read_bytes(), headers={"content-type": "application/x-ndjson"})
    answers = call(engine, lines, *(post("/v1/score", record) for record in records[:20]), lines)
    assert answers[0].content == answers[-1].content == (tmp_path / "out.jsonl").read_bytes()


def test_the_rate_of_lines_is_that_of_each_chunk(engine):
    """Admission divides by it: a body of many chunks once counted all its tokens in the seconds of the first."""
    records = chains(130)
    seen, score = [], engine.score
    engine.score = lambda trees, tokens, alone: seen.append(tokens) or score(trees, tokens, alone)
    body = "".join(dump(record) + "\n" for record in records).encode()
    (got,) = call(engine, post("/v1/score", body, headers={"content-type": "application/x-ndjson"}))
    assert got.status_code == 200
    trees = [tree_of(record) for record in records]
    assert seen == [engine.tokens_of(trees[i : i + 64]) for i in (0, 64, 128)]


def test_requests_at_once_equal_requests_alone_and_share_one_tree(engine, prm):
    """Rows of another length round differently: 1e-6 is ten units in the last place of a float32 near 1."""
    samples = [dict(CHAIN, steps=CHAIN["steps"][:n]) for n in range(1, len(CHAIN["steps"]) + 1)] + chains(8, seed=3)
    with compiling() as compiled:
        answers = call(engine, *(post("/v1/score", record) for record in samples))
    together = [answer.json()["record"]["scores"] for answer in answers]
    for record, scores in zip(samples, together, strict=True):
        assert scores == pytest.approx(prm.score(record["problem"], record["steps"]).tolist(), abs=1e-6)
    assert not compiled  # after the warm-up


def test_a_poisoned_request_fails_alone_and_leaves_the_server_ready(engine, monkeypatch, caplog):
    outputs_of = type(engine.prm).outputs_of

    def poisoned(self, prepared):
        if any(node.text == "poison" for tree in prepared.trees for node in tree.nodes):
            raise FloatingPointError("secret: not finite")
        return outputs_of(self, prepared)

    monkeypatch.setattr(type(engine.prm), "outputs_of", poisoned)
    bad = dict(CHAIN, steps=["poison"])
    answers = call(engine, *(post("/v1/score", bad if i == 3 else record) for i, record in enumerate(chains(9))))
    assert [a.status_code for a in answers] == [500 if i == 3 else 200 for i in range(9)]
    assert "FloatingPointError" in answers[3].text and "FloatingPointError" in caplog.text
    assert "secret" not in answers[3].text + caplog.text
    engine.run(lambda: None).result(300)  # after the chain that tries the device
    assert call(engine, ("GET", "/ready", {}))[0].status_code == 200


def test_a_caller_has_the_rest_of_its_request_alone_computed(prm):
    """1e-5: attention sums over cached and new keys in two parts, and rounding errors of 6e-8 grow over the layers."""
    running = Engine(prm, 256, "tiny", prefix_cache(prm, 512))
    edited = dict(CHAIN, steps=[*CHAIN["steps"][:-1], "far 9"])
    send = lambda record, **more: call(running, post("/v1/score", record | more))[0].json()  # noqa: E731
    first, second, third = (send(r, prompt_cache_key="me") for r in (CHAIN, edited, CHAIN))
    other, none = send(CHAIN, prompt_cache_key="you"), send(CHAIN)
    running.close()
    for got, record in ((first, CHAIN), (second, edited), (third, CHAIN), (other, CHAIN)):
        assert got["record"]["scores"] == pytest.approx(
            prm.score(record["problem"], record["steps"]).tolist(), abs=1e-5
        )
        assert "prompt_cache_key" not in got["record"]
    total = first["usage"]["total_tokens"]
    cached = [got["usage"]["prompt_tokens_details"]["cached_tokens"] for got in (first, second, third, other)]
    assert cached[0] == cached[3] == 0 and cached[2] == total and 0 < total - cached[1] <= len("far 9\n")
    assert "prompt_tokens_details" not in none["usage"] and running.counts["cached_tokens"] == sum(cached)


def test_rerank_orders_documents_by_their_chains(engine):
    records = [dict(record, problem=CHAIN["problem"]) for record in chains(5, seed=2)]
    documents = ["\n".join(record["steps"]) for record in records]
    body = {"query": CHAIN["problem"], "documents": documents, "top_n": 3, "return_documents": True}
    (got,) = call(engine, post("/v1/rerank", body))
    results = got.json()["results"]
    values = [result["relevance_score"] for result in results]
    assert len(results) == 3 and values == sorted(values, reverse=True)
    assert all(result["document"]["text"] == documents[result["index"]] for result in results)


def test_openrlhfs_call_gets_the_chains_scores(engine, prm):
    view = View(prompt="<user>{problem}<assistant>", ends=("<end>",), segmentation="lines")
    prompt = f"<user>{CHAIN['problem']}<assistant>"
    body = {
        "query": [prompt + "\n".join(CHAIN["steps"]) + "<end>", prompt + " "],
        "prompts": [prompt] * 2,
        "labels": ["", ""],
    }
    (got,) = call(engine, post("/get_reward", body | {"rule": "min"}), view=view)
    lowest = float(prm.score(CHAIN["problem"], CHAIN["steps"]).min())
    assert got.json()["rewards"] == got.json()["scores"] == pytest.approx([lowest, 0.0], abs=1e-6)
    assert got.json()["extra_logs"]["steps"] == [len(CHAIN["steps"]), 0]
    (got,) = call(engine, post("/get_reward", {"query": ["x"], "prompts": ["y"], "labels": [""]}), view=view)
    assert got.status_code == 400 and got.json()["error"]["param"] == "query"


def test_keys_hosts_and_origins(engine):
    requests = [("GET", path, {}) for path in ("/v1/models", "/health", "/ready", "/metrics")]
    assert [a.status_code for a in call(engine, *requests, key="secret")] == [401, 200, 200, 401]
    (got,) = call(engine, requests[0], key="secret", headers={"authorization": "Bearer secret"})
    assert got.json()["data"][0]["id"] == "tiny"
    first, second = call(engine, *(("GET", f"/v1/models/{name}", {}) for name in ("tiny", "other")))
    assert first.json() == got.json()["data"][0] and second.status_code == 404
    (got,) = call(engine, ("GET", "/v1/models", {"headers": {"host": "evil.example:8000"}}))
    assert got.status_code == 400 and "--set hosts='[\"evil.example\"]'" in got.json()["error"]["message"]
    for names, host in ((("gpu.example",), "gpu.example"), (("*.example",), "a.example:80"), ((), "[::1]:8000")):
        config = ServeConfig(longest=256, hosts=names)
        (got,) = call(engine, ("GET", "/v1/models", {"headers": {"host": host}}), config=config)
        assert got.status_code == 200
    (got,) = call(engine, ("GET", "/v1/models", {"headers": {"origin": "https://evil.example"}}))
    assert "access-control-allow-origin" not in got.headers
    refused(ValueError, "sites", ServeConfig, origins=("*",))


def test_under_a_path_of_a_proxy_links_and_the_key_hold(engine):
    config = ServeConfig(longest=256, root_path="/prm")
    pages = "/", "/playground.js", "/docs", "/health", "/v1/models"
    for root in ("/prm", ""):  # a proxy that leaves the path as it is, and one that takes it away
        got = call(engine, *(("GET", root + path, {}) for path in pages), config=config, key="secret")
        assert [answer.status_code for answer in got] == [200, 200, 200, 200, 401]
    asked = (("GET", path, {}) for path in ("/prm", "/prmx/health", "/openapi.json"))
    scored, bare, other, described = call(engine, post("/prm/v1/score", CHAIN), *asked, config=config)
    assert scored.status_code == 200 and other.status_code == 404
    assert bare.is_redirect and bare.headers["location"] == "/prm/"  # from where a page's relative links lead back
    assert described.json()["servers"] == [{"url": "/prm"}]
    for path in ("/", "/docs", *(path for path in PAGE if path.endswith((".js", ".css")))):
        (got,) = call(engine, ("GET", path, {}), config=config)
        assert not re.search(r"""(href=|src=|fetch\(|url\()["'`]?/""", got.text), path
    for wrong in ("prm", "/prm/", "//evil", "/a b"):
        refused(ValueError, "root_path", ServeConfig, root_path=wrong)


def test_an_overload_is_refused_with_the_time_to_come_back_and_passes(engine):
    started, go = threading.Event(), threading.Event()
    engine.rate = 10.0
    blocked = engine.run(lambda: (started.set(), go.wait(300)), tokens=10_000)
    assert started.wait(300)
    (got,) = call(engine, post("/v1/score", CHAIN), config=ServeConfig(longest=256))
    # Of longer work, short work waits for a batch of 8,192 tokens: 819 seconds, of which 30 are accepted
    assert got.status_code == 503 and int(got.headers["retry-after"]) == 790
    go.set()
    blocked.result(300)
    engine.run(lambda: None).result(300)  # by then the long work is counted as done
    (got,) = call(engine, post("/v1/score", CHAIN))
    assert got.status_code == 200


def test_a_late_answer_is_cancelled_and_its_work_dropped(engine):
    started, go = threading.Event(), threading.Event()
    blocked = engine.run(lambda: (started.set(), go.wait(300)))
    assert started.wait(300)
    (got,) = call(engine, post("/v1/score", CHAIN), config=ServeConfig(longest=256, answer_seconds=0.05))
    assert got.status_code == 504
    go.set()
    blocked.result(300)
    engine.run(lambda: None).result(300)
    assert engine.waiting_tokens == engine.busy_tokens == 0


def test_a_record_without_its_answer_is_written_as_it_came(engine):
    (got,) = call(engine, post("/v1/score", dict(CHAIN, id="x", note={"a": [1, None]})))
    record = got.json()["record"]
    assert dump({k: v for k, v in record.items() if k != "scores"}) == dump(dict(CHAIN, id="x", note={"a": [1, None]}))
