"""How a server begins: the port before the models, lengths of rows one by one, and what `/ready` says of all that."""

import concurrent.futures
import contextlib
import threading

import pytest
from prometheus_client.parser import text_string_to_metric_families
from test_serve import CHAIN, CONFIG, call, chains, post, prm  # noqa: F401  (a fixture)
from tiny import compiling

from jprm.apps.serve import ServeConfig, Served
from jprm.apps.serve.app import _application, serve
from jprm.apps.serve.engine import Engine
from jprm.score.scorer import PRM
from jprm.tree import tree_of

LONG = {"problem": "long", "steps": [f"dot {i}" for i in range(60)]}
"""More than 256 tokens."""


@pytest.fixture
def gates(prm, monkeypatch):  # noqa: F811
    """Events by length of rows, each of which compiling that length waits for; and the lengths in their order."""
    gate, order, compile_rows = {256: threading.Event(), 512: threading.Event()}, [], PRM.compile

    def compile_after(self, tokens):
        order.append(tokens)
        assert gate[tokens].wait(60)
        compile_rows(self, tokens)

    monkeypatch.setattr(PRM, "compile", compile_after)
    engine = Engine(prm, 512, "tiny")
    yield engine, gate, order
    for event in gate.values():
        event.set()
    engine.close()


def ready(engine):
    (got,) = call(engine, ("GET", "/ready", {}))
    return got.status_code, got.json()


def test_what_is_compiled_is_served_while_the_rest_is_compiled(gates, prm):  # noqa: F811
    engine, gate, order = gates
    said = []
    engine.warm_up(said.append)
    status, body = ready(engine)
    assert status == 503 and body["left"][:2] == ["tiny: 256", "tiny: 512"] and "compiled" in body["reason"]
    gate[256].set()
    got = call(engine, *(post("/v1/score", chain) for chain in chains(12, seed=4)))  # together more than a row of 256
    assert {answer.status_code for answer in got} == {200}
    status, body = ready(engine)
    assert status == 200 and body["left"][0] == "tiny: 512" and list(body["models"]["tiny"]["compiled"]) == ["256"]
    gate[512].set()
    (long,) = call(engine, post("/v1/score", LONG))
    assert long.json()["record"]["scores"] == pytest.approx(
        prm.score(LONG["problem"], LONG["steps"]).tolist(), abs=1e-6
    )
    while not said:
        threading.Event().wait(0.01)
    assert order == [256, 512] and ready(engine)[1]["left"] == []


def test_a_longer_chain_has_its_rows_compiled_once(gates):
    engine, gate, order = gates
    waiting = engine.score([tree_of(LONG)], 400)
    while order != [512]:
        threading.Event().wait(0.01)
    engine.warm_up(lambda text: None)
    for event in gate.values():
        event.set()
    assert len(waiting.result(60)[0]["score"]) == 60
    while engine.programs.left:
        threading.Event().wait(0.01)
    assert order.count(256) == 1


def test_rows_of_the_server_are_bounded_by_its_longest_chain(prm):  # noqa: F811
    with contextlib.closing(Engine(prm, 256, "tiny")) as engine:
        engine.warm_up(lambda text: None)
        while engine.programs.left:
            threading.Event().wait(0.01)
        pool = {"problem": "wide", "samples": [{"steps": [f"end {j}", "far 2"]} for j in range(60)]}
        with compiling() as compiled:
            (got,) = call(engine, post("/v1/score", pool))
        assert got.status_code == 200 and not compiled and list(engine.programs.seconds) == [256]


def test_a_length_that_does_not_fit_is_told_and_the_others_are_served(prm, monkeypatch):  # noqa: F811
    compile_rows = PRM.compile

    def small(self, tokens):
        if tokens > 256:
            raise MemoryError("too large")
        compile_rows(self, tokens)

    monkeypatch.setattr(PRM, "compile", small)
    with contextlib.closing(Engine(prm, 512, "tiny")) as engine:
        engine.warm_up(lambda text: None)
        while engine.programs.left:
            threading.Event().wait(0.01)
        status, body = ready(engine)
        assert status == 200 and "too large" in body["models"]["tiny"]["failed"]["512"]
        assert call(engine, post("/v1/score", CHAIN))[0].status_code == 200


def test_a_device_that_fails_is_not_ready_until_it_works_again(prm, monkeypatch):  # noqa: F811
    with contextlib.closing(Engine(prm, 256, "tiny")) as engine:
        assert ready(engine)[0] == 200
        with monkeypatch.context() as patch:

            def broken(self, prepared):
                raise RuntimeError("the device is lost")

            patch.setattr(PRM, "outputs_of", broken)
            assert call(engine, post("/v1/score", CHAIN))[0].status_code == 500
            engine.run(lambda: None).result(60)  # after the chain that tries the device
            status, body = ready(engine)
            assert status == 503 and "RuntimeError" in body["reason"]
            engine.run(lambda: None).result(60)
            assert ready(engine)[0] == 503
            engine.run(lambda: None).result(60)
        ready(engine)  # has it tried again
        engine.run(lambda: None).result(60)
        assert ready(engine)[0] == 200 and call(engine, post("/v1/score", CHAIN))[0].status_code == 200


def test_while_models_load_the_server_lives_and_says_so():
    import asyncio

    import httpx2 as httpx

    app = _application(ServeConfig(), None, True, False, None)

    async def send():
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost") as client:
            paths = ("/health", "/ready", "/metrics", "/v1/models")
            gets = [await client.get(path) for path in paths]
            return [*gets, await client.post("/v1/score", json=CHAIN)]

    health, not_ready, metrics, models, score = asyncio.run(send())
    assert health.status_code == 200 and metrics.status_code == 200
    assert not_ready.status_code == 503 and "loading" in not_ready.json()["reason"]
    assert models.status_code == score.status_code == 503 and "Retry-After" in score.headers


def test_a_model_that_cannot_be_loaded_ends_the_server(tmp_path):
    """The port is open by then, so the error comes from the thread that loads."""
    with concurrent.futures.ThreadPoolExecutor(1) as pool, pytest.raises(FileNotFoundError, match="nothing"):
        pool.submit(serve, Served(model=(tmp_path / "nothing",), port=0)).result(60)


def test_counters_are_prometheus_counters(prm):  # noqa: F811
    with contextlib.closing(Engine(prm, 256, "tiny")) as engine:
        call(engine, *(post("/v1/score", chain) for chain in chains(3)))
        engine.run(lambda: None).result(60)
        (metrics,) = call(engine, ("GET", "/metrics", {}))
        families = {family.name: family for family in text_string_to_metric_families(metrics.text)}
        assert all(family.documentation for family in families.values())
        samples = {s.name: s.value for f in families.values() for s in f.samples if s.labels.get("model") == "tiny"}
        tokens = sum(engine.tokens_of([tree_of(chain)]) for chain in chains(3))
        assert families["jprm_tokens"].type == "counter" and samples["jprm_tokens_total"] == tokens
        assert samples["jprm_trees_total"] == 3 and samples["jprm_failures_total"] == 0
        assert 0 < samples["jprm_device_seconds_total"] and samples["jprm_waiting_tokens"] == 0
        assert not any("per_second" in name for name in families)
        assert CHAIN["problem"] not in metrics.text
