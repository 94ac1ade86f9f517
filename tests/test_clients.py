"""`jprm.clients` against the real application: the scores of the library, blank completions, batches, and retries."""

import asyncio
import gzip
import json
import pickle
import subprocess
import sys
import time

import httpx2 as httpx
import pytest
from refusing import refused
from test_serve import CONFIG, chains, engine, prm  # noqa: F401  (fixtures, which tests name as arguments)
from toy_policy import Markov

from jprm.apps.serve.app import make_app
from jprm.clients import AsyncClient, Client, ServerError

CHAINS = chains(5, seed=6)
FIRST = CHAINS[0]


class Recorded(httpx.ASGITransport):
    """The application without a socket, and the bodies that were sent."""

    def __init__(self, app, most=10**9):
        super().__init__(app, raise_app_exceptions=False)
        self.bodies, self.most = [], most

    async def handle_async_request(self, request):
        self.bodies.append(body := json.loads(request.content))
        if len(body.get("samples", ())) > self.most:
            return httpx.Response(413, json={"error": {"message": "send it in parts", "param": "samples"}})
        return await super().handle_async_request(request)


@pytest.fixture
def transport(engine):  # noqa: F811
    return Recorded(make_app([engine], CONFIG, policy=Markov()))


@pytest.fixture
def client(transport):
    with Client("http://localhost", transport=transport) as opened:
        yield opened


def test_a_machine_without_jax_has_the_client():
    code = "import sys; import jprm.clients; print(sorted({'jax', 'numpy', 'flax'} & set(sys.modules)))"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=True)
    assert run.stdout.strip() == "[]"


def test_scores_are_the_librarys(client, prm):  # noqa: F811
    assert client.score(**FIRST) == pytest.approx(prm.score(**FIRST).tolist(), abs=1e-6)
    assert client.score("p", []) == client.score("p", [" "]) == []
    answers = client.score_many(CHAINS, rule="min")
    for answer, chain in zip(answers, CHAINS, strict=True):
        assert answer.scores == pytest.approx(prm.score(**chain).tolist(), abs=1e-6)
        assert answer.score == pytest.approx(min(answer.scores), abs=1e-6)  # scores are written with 7 digits
        assert answer.record["problem"] == chain["problem"]


def test_blank_completions_are_answered_in_their_place(client, prm):  # noqa: F811
    text = "\n".join(FIRST["steps"])
    pool = {"problem": FIRST["problem"], "samples": [{"steps": []}, {"steps": FIRST["steps"]}, {"steps": ["", " "]}]}
    blank = {"problem": "p", "response": " \n"}
    nothing = {"problem": "p", "samples": [{"steps": []}]}
    silent = {"messages": [{"role": "user", "content": "p"}, {"role": "assistant", "content": ""}]}
    first, two, three, four = client.score_many([pool, blank, nothing, silent])
    expected = pytest.approx(prm.score(**FIRST).tolist(), abs=1e-6)
    assert [sample["scores"] for sample in first.record["samples"]] == [[], expected, []]
    assert two.score is None and two.scores == [] and three.record["samples"] == [{"steps": [], "scores": []}]
    assert four.score is None
    rewarded = client.rewards([{"problem": "p", "response": " "}, {"problem": "p", "response": text}])
    assert rewarded[0]["score"] is None and rewarded[0]["steps"] == [] and rewarded[1]["score"] is not None
    ranked = client.rerank(FIRST["problem"], [" ", text, ""])
    assert ranked[0][0] == 1 and ranked[1:] == [(0, None), (2, None)] and client.rerank("p", []) == []


def test_samples_of_one_problem_stay_together_and_come_back_in_order(transport, prm):  # noqa: F811
    samples = [{"problem": f"q{i % 3}", "response": "\n".join(CHAINS[i % 5]["steps"])} for i in range(12)]
    with Client("http://localhost", transport=transport, batch=8) as batched:
        answers = batched.rewards(samples, credit="progress")
    assert sorted(len(body["samples"]) for body in transport.bodies) == [4, 8]
    for body in transport.bodies:
        for problem in {sample["problem"] for sample in body["samples"]}:
            assert sum(sample["problem"] == problem for sample in body["samples"]) == 4
    with Client("http://localhost", transport=transport) as whole:
        for first, second in zip(whole.rewards(samples, credit="progress"), answers, strict=True):
            for a, b in zip(first["steps"], second["steps"], strict=True):
                assert a["reward"] == pytest.approx(b["reward"], abs=1e-5)  # rows of others round otherwise


def test_what_is_too_large_is_sent_in_halves(engine):  # noqa: F811
    transport = Recorded(make_app([engine], CONFIG), most=2)
    samples = [{"problem": f"q{i}", "response": "\n".join(CHAINS[i]["steps"])} for i in range(5)]
    with Client("http://localhost", transport=transport) as small:
        assert [answer["score"] is not None for answer in small.rewards(samples)] == [True] * 5
        assert [len(body["samples"]) for body in transport.bodies][0] == 5
        with pytest.raises(ServerError, match="parts") as raised:
            small.rewards([{"problem": "q", "response": "a"}] * 3)
    assert raised.value.status == 413


def test_alternatives_are_the_policys(client):
    answers = client.continue_(FIRST["problem"], FIRST["steps"][:1], n=3, seed=2)
    assert len(answers) == 3 and all({"steps", "scores", "score"} <= answer.keys() for answer in answers)


def test_an_error_of_the_request_is_told_at_once(client, transport):
    with pytest.raises(ServerError, match="rule") as raised:
        client.score_many([FIRST], rule="best")
    assert (raised.value.status, raised.value.param, len(transport.bodies)) == (400, "rule", 1)


ANSWER = (200, {}, {"record": {"scores": [0.5]}, "chains": []})


@pytest.mark.parametrize("first", [(503, {"Retry-After": "0"}, {}), None, (200, {}, b"half"), (429, {}, b"")])
def test_what_may_pass_is_tried_again(serve, first):
    server = serve(lambda number, body: first if number == 0 else ANSWER)
    with Client(server.url, backoff_s=0.01) as client:
        assert client.score("p", ["s"]) == [0.5]
    assert len(server.requests) == 2


def test_patience_ends_and_the_wait_that_the_server_asks_for_is_kept(serve):
    server = serve(lambda number, body: (503, {"Retry-After": "900"}, {"error": {"message": "loading"}}))
    with Client(server.url, backoff_s=0.01) as client, pytest.raises(ServerError, match="loading"):
        client.score("p", ["s"])
    assert len(server.requests) == 1


def test_the_key_is_sent_and_addresses_are_checked(serve, monkeypatch):
    server = serve(lambda number, body: ANSWER)
    monkeypatch.setenv("JPRM_URL", server.url)
    monkeypatch.setenv("JPRM_API_KEY", "secret")
    with Client() as client:
        client.score("p", ["s"])
    assert server.headers[0]["Authorization"] == "Bearer secret"
    for url in ("localhost:8000", "ftp://localhost", "http://me:secret@localhost"):
        refused(ValueError, "url", Client, url)


def test_it_works_in_an_event_loop_and_pickled(serve):
    server = serve(lambda number, body: ANSWER)
    client = pickle.loads(pickle.dumps(Client(server.url)))

    async def inside():
        async with AsyncClient(server.url) as other:
            return client.score("p", ["s"]), await other.score("p", ["s"])

    assert asyncio.run(inside()) == ([0.5], [0.5])
    client.close()
    assert client.score("p", ["s"]) == [0.5]
    client.close()


def test_the_first_error_ends_the_other_requests(serve):
    bad = (400, {}, {"error": {"message": "bad", "param": "problem"}})
    server = serve(lambda number, body: bad if body["problem"] == "bad" else (503, {"Retry-After": "60"}, {}))
    with Client(server.url) as client, pytest.raises(ServerError, match="bad"):
        client.score_many([{"problem": name, "steps": ["s"]} for name in ("a", "b", "bad")])


def test_a_server_that_drips_ends_with_patience(serve):
    """Every piece comes sooner than the limit, the whole does not; attempts and waits are within patience."""
    server = serve(lambda number, body: (200, {}, (b" ",) * 6000))
    for patience_s in (0.8, 8, 80):  # a machine may stand still for the first attempt's patience
        start, server.requests[:] = time.monotonic(), []
        with Client(server.url, timeout_s=0.3, patience_s=patience_s, backoff_s=0.01) as client:
            refused(ServerError, "no answer in", client.score, "p", ["s"])
        assert time.monotonic() - start < 250  # the pieces of one answer take 300
        if len(server.requests) > 1:
            return
    pytest.fail("tried once")


def test_a_compressed_answer_is_not_unpacked(serve):
    bomb = gzip.compress(bytes(10**7))
    server = serve(lambda number, body: (200, {"Content-Encoding": "gzip"}, bomb))
    with Client(server.url) as client, pytest.raises(ServerError, match="compressed"):
        client.score("p", ["s"])
    assert len(server.requests) == 1 and server.headers[0]["Accept-Encoding"] == "identity"


@pytest.mark.parametrize(
    "body", [b"key was Bearer SECRET", {"error": {"message": "no SECRET here", "param": "SECRET"}}]
)
def test_the_key_is_in_no_error(serve, body):
    server = serve(lambda number, _: (401, {}, body))
    with Client(server.url, "SECRET") as client, pytest.raises(ServerError) as raised:
        client.score("p", ["s"])
    assert "SECRET" not in f"{raised.value} {raised.value.param}" and "***" in str(raised.value)


LOOP = []
LOOP.append(LOOP)


@pytest.mark.parametrize(
    ("sample", "place"),
    [
        ({"response": "a \ud83d"}, r"samples\[1\].response holds half"),
        ({"response": "a", "outcome": float("nan")}, r"samples\[1\].outcome is nan"),
        ({"ids": [1, float("inf")]}, r"samples\[1\].ids\[1\] is inf"),
        ({"response": "a", "extra": {"deep": [b"x"]}}, r"samples\[1\].extra.deep\[0\] is of type bytes"),
        ({"response": "a", "extra": LOOP}, r"samples\[1\]"),
    ],
)
def test_what_cannot_be_encoded_is_refused_at_once_with_its_place(serve, sample, place):
    server = serve(lambda number, body: ANSWER)
    with Client(server.url) as client:
        refused(ValueError, place, client.rewards, [{"problem": "q", "response": "a"}, {"problem": "q", **sample}])
        with pytest.raises(ValueError, match=place.replace("samples", "records")):
            client.score_many([{"problem": "q", "response": "a"}, {"problem": "q", **sample}])
    assert not server.requests


ANSWERS = [
    b"null", b"5", b"[]", b"{}", b'"x"', b"[" * 5000 + b"]" * 5000, b'{"record": 5, "chains": []}',
    b'{"record": {}, "chains": []}', b'{"record": {"scores": []}, "chains": []}', b'{"record": {"scores": [1]}}',
    b'{"record": {"scores": 1}, "chains": 1}', b'{"samples": 5}', b'{"samples": []}', b'{"results": [5]}',
    b'{"results": 5}',
    b'{"results": [{"index": 9, "relevance_score": 1}]}', b'{"results": [{"index": "0"}]}', b'{"alternatives": {}}',
    b'{"alternatives": []}', b"not JSON", b"\xff", b"",
]  # fmt: skip


@pytest.mark.parametrize("content", ANSWERS)
def test_an_answer_of_another_form_is_an_error_of_one_line(content):
    transport = httpx.MockTransport(lambda request: httpx.Response(200, content=content))
    with Client("http://localhost", transport=transport, patience_s=0.0) as client:
        for ask in (
            lambda: client.score("p", ["a"]), lambda: client.rewards([{"problem": "p", "response": "a"}]),
            lambda: client.rerank("p", ["a"]), lambda: client.continue_("p", n=2),
        ):  # fmt: skip
            with pytest.raises(ServerError) as caught:
                ask()
            assert "\n" not in str(caught.value) and len(str(caught.value)) < 1000
