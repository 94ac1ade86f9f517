"""/v1/continue: what a policy writes after a prefix, with the library's scores."""

import asyncio
import threading

import httpx2 as httpx
import pytest
from refusing import refused
from test_serve import CHAIN, CONFIG, call, engine, post, prm  # noqa: F401  (fixtures, which tests name as arguments)
from toy_policy import Markov

from jprm.apps.serve import call as calls
from jprm.apps.serve.app import make_app
from jprm.methods.policy.protocol import Prefix, Sample

PROBLEM, STEPS = CHAIN["problem"], ["good 0", "bad 1"]


class Failing:
    name = "failing"

    def sample(self, prefixes, n, *, until, seed):
        return [[Sample((), 0, "error", error="connection refused")] * n for _ in prefixes]


class Slow(Markov):
    """A policy that waits for `go`."""

    def __init__(self):
        super().__init__()
        self.go = threading.Event()

    def sample(self, prefixes, n, *, until, seed):
        assert self.go.wait(300)
        return super().sample(prefixes, n, until=until, seed=seed)


def ask(engine, policy, *bodies):  # noqa: F811
    return call(engine, *(post("/v1/continue", body) for body in bodies), policy=policy)


@pytest.mark.parametrize(("until", "steps"), [("step", STEPS), ("end", STEPS), ("end", [])])
def test_alternatives_are_the_policys_and_their_scores_the_librarys(engine, prm, until, steps):  # noqa: F811
    """The prefix is computed once for all, in other rows than a chain alone: 1e-6, as for requests at once."""
    (got,) = ask(
        engine, Markov(), {"problem": PROBLEM, "steps": steps, "n": 3, "until": until, "seed": 5, "rule": "min"}
    )
    answer = got.json()
    expected = Markov().sample([Prefix(PROBLEM, tuple(steps))], 3, until=until, seed=5)[0]
    assert [tuple(alternative["steps"]) for alternative in answer["alternatives"]] == [
        sample.steps for sample in expected
    ]
    for alternative in answer["alternatives"]:
        whole = prm.score(PROBLEM, steps + alternative["steps"]).tolist()
        assert answer["scores"] + alternative["scores"] == pytest.approx(whole, abs=1e-6)
        assert alternative["score"] == pytest.approx(min(whole), abs=1e-6)
        assert alternative["finish_reason"] == ("step" if until == "step" else "stop")
    assert answer["policy"] == "markov" and answer["usage"]["completion_tokens"] == sum(s.tokens for s in expected)


def test_a_policy_that_is_absent_or_fails_is_said(engine):  # noqa: F811
    (none,) = ask(engine, None, {"problem": PROBLEM})
    assert none.status_code == 400 and "start it with --policy" in none.json()["error"]["message"]
    (failed,) = ask(engine, Failing(), {"problem": PROBLEM})
    assert failed.status_code == 502 and "connection refused" in failed.json()["error"]["message"]


def test_requests_beyond_those_that_may_wait_are_told_to_come_back(engine, monkeypatch):  # noqa: F811
    monkeypatch.setattr(calls, "WAITING", 2)
    policy, answers = Slow(), []
    app = make_app([engine], CONFIG, policy=policy)

    async def send():
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            asked = [client.post("/v1/continue", json={"problem": PROBLEM, "n": 1}) for _ in range(3)]
            for answer in asyncio.as_completed(asked):
                answers.append(await answer)
                policy.go.set()  # the first answer refuses

    asyncio.run(send())
    assert answers[0].status_code == 503
    assert sorted(a.status_code for a in answers) == [200, 200, 503]
    assert [a.headers["retry-after"] for a in answers if a.status_code == 503] == ["5"]


def test_the_policys_thread_ends_with_the_server(engine):  # noqa: F811
    app = make_app([engine], CONFIG, policy=Markov())
    app.state.server.writer.close()
    refused(RuntimeError, "after shutdown", app.state.server.writer._thread.submit, print)
