"""What one request may ask for: bounds before any work, places in refusals, and work that ends with its client."""

import contextlib
import dataclasses
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from stub_server import reply
from test_judge import YES, judge
from test_serve import CHAIN, call, chains, engine, post, prm  # noqa: F401  (fixtures)
from test_serve_engine import Running
from test_serve_pooling import ids_of
from toy_policy import Markov

from jprm.apps.serve import ServeConfig
from jprm.apps.serve import call as calls
from jprm.apps.serve.engine import BATCH_TOKENS, SHORT, Engine
from jprm.apps.serve.judges import JudgeEngine
from jprm.apps.serve.pieces import PIECE, Abandoned, InPieces, Work
from jprm.methods.judge.compare import Comparison
from jprm.methods.policy.protocol import Prefix, Problem, Sample
from jprm.methods.search.beam import Beam
from jprm.methods.search.lockstep import Rescorer, SearchConfig, search
from jprm.tree import tree_of

FEW = ServeConfig(longest=256, items=20, critiques=4)
Q = [{"role": "user", "content": "q"}]


def test_a_trajectory_that_is_too_long_is_refused_by_its_last_turn(engine, monkeypatch):  # noqa: F811
    monkeypatch.setattr("jprm.apps.serve.engine.token_tree", None)  # which renders every turn
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}] * 100
    (got,) = call(engine, post("/v1/score", {"messages": turns}))
    assert got.status_code == 400 and "takes at most 256" in got.json()["error"]["message"], got.text
    assert "larger --longest (it is 256)" in got.json()["error"]["message"]


def test_short_chains_take_short_rows_on_a_cpu(prm):  # noqa: F811
    engine = Engine(prm, 8192, "tiny")  # noqa: F811
    engine.programs.lengths, engine.programs.seconds = [256, 2048, 8192], {256: 1.0, 2048: 1.0, 8192: 1.0}
    many = {"problem": "p", "samples": [{"steps": [f"{i} + 1"]} for i in range(3000)]}
    deep = {"problem": "p", "steps": ["x"] * 3000}
    rows = [engine._row([tree_of(record)]) for record in (many, deep, many | {"problem": "p" * 1500})]
    engine.close()
    assert rows == [2048, 8192, 4096]


def test_chains_that_are_long_together_are_not_listed(engine, monkeypatch):  # noqa: F811
    """The answer lists every chain, so leaves after one spine have the spine once each."""
    nodes = [{"parent": i - 1, "text": f"x{i}"} for i in range(10)]
    nodes += [{"parent": 9, "text": f"y{i}"} for i in range(10)]
    for lengths, status in ((11, 200), (10, 413)):  # of 10 chains of 11 steps, and at most so many times 10
        monkeypatch.setattr(calls, "LENGTHS", lengths / 3)
        (got,) = call(
            engine, post("/v1/score", {"problem": "a", "nodes": nodes}), config=ServeConfig(longest=256, items=30)
        )
        assert got.status_code == status


def test_a_line_that_is_too_long_is_named(engine):  # noqa: F811
    lines = b'{"problem": "q", "steps": ["a"]}\n\n{"problem": "q", "steps": ["' + b"1 " * 300 + b'"]}\n'
    (got,) = call(engine, post("/v1/score", lines, headers={"content-type": "application/x-ndjson"}))
    assert got.status_code == 400 and "line 3: a chain" in got.json()["error"]["message"]


def test_equal_documents_are_scored_once(engine):  # noqa: F811
    texts = ["\n".join(record["steps"]) for record in chains(3, seed=2)]
    alone, many = call(
        engine,
        post("/v1/rerank", {"query": CHAIN["problem"], "documents": texts}),
        post("/v1/rerank", {"query": CHAIN["problem"], "documents": texts * 50}),
    )
    assert alone.json()["usage"] == many.json()["usage"]
    value = {result["index"]: result["relevance_score"] for result in alone.json()["results"]}
    for result in many.json()["results"]:
        assert result["relevance_score"] == pytest.approx(value[result["index"] % 3], abs=1e-6)


@pytest.mark.parametrize("encoding", ["gzip", "deflate", "br", "GZIP, br"])
def test_a_compressed_body_is_refused_by_its_encoding(engine, encoding):  # noqa: F811
    headers = {"content-type": "application/json", "content-encoding": encoding}
    (got,) = call(engine, post("/v1/score", b"\x1f\x8b", headers=headers))
    assert got.status_code == 415 and encoding.lower() in got.json()["error"]["message"]


def test_pooling_follows_every_name_of_the_activation(engine, prm):  # noqa: F811
    ids, _ = ids_of(prm)
    names = ("use_activation", "activation", "softmax")
    raw = [call(engine, post("/pooling", {"input": ids, name: False}))[0].json()["data"] for name in names]
    on = [call(engine, post("/pooling", {"input": ids, name: True}))[0].json()["data"] for name in names]
    assert raw[0] == raw[1] == raw[2] != on[0] == on[1] == on[2]


# ---- Offsets: the place of a step's last character, without a scan of all tokens for each.


def test_a_long_response_with_offsets_is_read_at_once(engine):  # noqa: F811
    """A scan of all tokens for every step took 45 seconds for 50,000 steps."""
    from jprm.apps.serve.rewards import ScoredSample

    n = 100_000
    sample = ScoredSample(None, "", [(2 * i, 2 * i + 1) for i in range(n)], [(i, i + 1) for i in range(2 * n)], None)
    begin = time.thread_time()
    assert sample.places("") == list(range(0, 2 * n, 2)) and time.thread_time() - begin < 20


def test_offsets_that_go_back_are_refused_and_those_without_characters_pass(engine):  # noqa: F811
    sample = {"problem": "q", "response": "ab", "offsets": [[0, 0], [0, 1], [0, 0], [1, 2], [0, 0]]}
    back = sample | {"offsets": [[1, 2], [0, 1]]}
    good, bad = call(engine, post("/v1/rewards", {"samples": [sample]}), post("/v1/rewards", {"samples": [back]}))
    assert good.json()["samples"][0]["steps"][0]["token"] == 3
    assert bad.status_code == 400 and "offsets[1]" in bad.json()["error"]["message"]


# ---- Searches.


def test_a_budget_bounds_the_first_round(prm):  # noqa: F811
    policy = Markov()
    config = SearchConfig(Beam(1, 10**6), "min", budget=50)
    ((_, tree),) = search([Problem("q")], policy, Rescorer(prm), config)
    assert policy.sampled == 50 and tree.ended == "budget"


def test_pieces_are_the_samples_of_one_call_and_end_when_stopped():
    prefixes = [Prefix(f"q{i}") for i in range(5)]
    for n in (1, 3, PIECE, 2 * PIECE + 1):
        whole = Markov().sample(prefixes, n, until="step", seed=3)
        assert InPieces(Markov(), Work()).sample(prefixes, n, until="step", seed=3) == whole
    work, policy = Work(), Markov()
    stopping = InPieces(policy, work, lambda piece: work.cancel())
    with pytest.raises(Abandoned):
        stopping.sample(prefixes, 1000, until="step", seed=0)
    assert policy.sampled == PIECE


class Slow:
    """A policy that waits for `go` in every piece."""

    name, calls = "slow", 0

    def __init__(self):
        self.go = threading.Event()

    def sample(self, prefixes, n, *, until, seed):
        self.calls += 1
        assert self.go.wait(300)
        return [[Sample(("good",), 1, "stop")] * n for _ in prefixes]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": Q, "search": {"method": "beam", "width": 1, "expand": 256}}),
        ("/v1/continue", {"problem": "q", "n": 64, "until": "end"}),
    ],
)
def test_the_policys_work_ends_with_its_client(engine, path, body):  # noqa: F811
    for seconds in (0.1, 1, 10, 60):  # a longer limit if the policy did not begin within the last
        policy = Slow()
        late = ServeConfig(longest=256, answer_seconds=seconds)
        (got,) = call(engine, post(path, body), policy=policy, config=late)
        assert got.status_code == 504
        policy.go.set()
        if policy.calls:
            break
    time.sleep(0.3)  # time in which the work would continue
    assert policy.calls == 1


# ---- Short work goes between the rows of long work.


def test_short_work_is_let_in_between_the_rows_of_long_work(prm):  # noqa: F811
    expected = prm.score(**CHAIN).tolist()
    begun, waits, answered = threading.Event(), threading.Event(), threading.Event()
    reached = {0: begun.set, 1: lambda: waits.wait(300), 3: lambda: answered.wait(300)}  # by batches of the long work
    with Running(prm) as running, ThreadPoolExecutor(2) as pool:
        running.score(CHAIN)
        running.engine.rate = 1e9  # where that took a second, the long work would be refused
        long = {"problem": "p", "samples": [{"steps": [f"{i} + 1 = {i + 1}"]} for i in range(3000)]}
        running.engine.prm = Slowly(prm, lambda place: reached.get(place, int)())
        whole = pool.submit(running.score, long)
        assert begun.wait(300)
        short = pool.submit(running.score, CHAIN)
        while not running.engine._jobs:
            time.sleep(0.01)
        waits.set()
        assert short.result(300).json()["record"]["scores"] == pytest.approx(expected, abs=1e-6)
        assert not whole.done() and not answered.is_set()
        answered.set()
        assert whole.result(300).status_code == 200
        running.engine.run(lambda: None).result(300)
        assert running.engine.waiting_tokens == running.engine.busy_tokens == 0


def test_long_work_that_nobody_waits_for_ends(prm):  # noqa: F811
    with Running(prm, answer_seconds=2.0) as running:
        running.score(CHAIN)
        running.engine.rate = 1e9  # it would be refused
        long = {"problem": "p", "samples": [{"steps": [f"{i} + 1 = {i + 1}"] * 3} for i in range(900)]}
        running.engine.prm = Slowly(prm, lambda place: time.sleep(1))
        assert running.score(long).status_code == 504
        until = time.monotonic() + 300
        while running.engine.busy_tokens:
            assert time.monotonic() < until
            time.sleep(0.05)
        assert running.engine.counts["failures"] == 0 and not running.engine.failure


class Slowly:
    """A model that calls a function before each batch of rows, with the batch's number."""

    def __init__(self, prm, before):  # noqa: F811
        self.prm, self.before = prm, before

    def __getattr__(self, name):
        return getattr(self.prm, name)

    def outputs_of(self, prepared):
        def slow():
            for place, batch in enumerate(prepared.batches):
                self.before(place)
                yield batch

        return self.prm.outputs_of(dataclasses.replace(prepared, batches=slow()))


def test_long_work_waits_for_all_and_short_work_for_a_batch_of_each(prm):  # noqa: F811
    running = Engine(prm, 256, "tiny")
    go = threading.Event()
    try:
        running.run(go.wait, tokens=10 * BATCH_TOKENS)
        futures = [running.run(lambda: None, tokens=10 * BATCH_TOKENS) for _ in range(3)]
        while not running.busy_tokens:
            time.sleep(0.01)
        running.rate = 1.0
        assert running.wait_seconds(SHORT) <= 5 * BATCH_TOKENS < 40 * BATCH_TOKENS == running.wait_seconds(SHORT + 1)
        go.set()
        for future in futures:
            future.result(300)
    finally:
        go.set()
        running.close()


# ---- Judges.


@pytest.fixture
def judged(serve):
    running = JudgeEngine(judge(serve(lambda number, body: reply(YES))), 256, "judge")
    yield running
    running.close()


def test_critiques_are_counted_before_any_is_asked_for(judged):
    server = judged.judge.policy
    steps = {"problem": "q", "steps": ["a"] * 5}
    pool = {"problem": "q", "samples": [{"steps": ["a", "b"]}, {"steps": ["c"] * 3}]}
    documents = {"query": "q", "documents": [f"x{i}" for i in range(5)]}
    for path, body in (("/v1/score", steps), ("/v1/score", pool), ("/v1/rerank", documents)):
        (got,) = call(judged, post(path, body), config=FEW)
        assert got.status_code == 413 and "5 critiques" in got.json()["error"]["message"]
    assert judged.rate == 0 and server is judged.judge.policy
    (got,) = call(judged, post("/v1/score", steps | {"steps": ["a"] * 4}), config=FEW)
    assert got.status_code == 200 and judged.rate > 0


@pytest.mark.parametrize(
    ("compares", "rounds", "asked"), [("pairwise", 0, 20), ("pairwise", 1, 10), ("listwise", 0, 1)]
)
def test_questions_of_a_judge_that_compares_are_counted(serve, compares, rounds, asked):
    server = serve(lambda number, body: reply(YES))
    pool = {"problem": "q", "samples": [{"steps": [f"{i}"]} for i in range(5)]}
    with contextlib.closing(
        JudgeEngine(Comparison(judge(server).policy, compares, rounds=rounds), 256, "judge")
    ) as running:
        assert running.critiques_of([tree_of(pool)]) == asked
        (got,) = call(running, post("/v1/score", pool), config=FEW)
        assert (got.status_code == 413) == (asked > 4) and (asked == 1 or not server.requests)
        (got,) = call(running, post("/v1/score", pool | {"stream": True}))
        assert got.status_code == 400


def test_a_judge_that_has_enough_to_do_says_when_to_come_back(serve):
    go = threading.Event()
    running = JudgeEngine(judge(serve(lambda number, body: (go.wait(300), reply(YES))[1])), 256, "judge")
    try:
        running.rate = 0.01  # pieces a second, of each of eight threads
        work = [running.ask(PIECE, lambda judge: go.wait(300)) for _ in range(8)]
        (got,) = call(running, post("/v1/score", CHAIN), config=ServeConfig(longest=256))
        assert got.status_code == 503 and int(got.headers["retry-after"]) == 70
        go.set()
        for future in work:
            future.result(300)
        running.close()  # its threads have ended, and so counted their work as done
        assert running.wait_seconds() == 0
    finally:
        go.set()
        running.close()


@pytest.mark.breadth
def test_critiques_that_nobody_waits_for_are_not_asked_for(serve):
    for seconds in (0.5, 5, 50):  # a longer limit if the piece was not requested within the last
        go = threading.Event()
        server = serve(lambda number, body, go=go: (go.wait(300), reply(YES))[1])
        running = JudgeEngine(judge(server), 256, "judge")
        late = ServeConfig(longest=256, answer_seconds=seconds)
        (got,) = call(running, post("/v1/score", {"problem": "q", "steps": ["a"] * 300}), config=late)
        go.set()
        running.close()
        assert got.status_code == 504
        if server.requests:
            break
    assert len(server.requests) == PIECE
