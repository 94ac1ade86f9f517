"""Scores over HTTP: /v1/score, /v1/rerank and /v1/continue, and what every route of scores shares.

Below the routes are the models, admission, waiting for the device, and the thread of a policy that writes steps.
"""

from __future__ import annotations

import asyncio
import collections
import concurrent.futures
import contextlib
import dataclasses
import itertools
import logging
import math
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal

import numpy as np
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse

from jprm.apps.serve import ServeConfig
from jprm.apps.serve.engine import Engine, Outputs
from jprm.apps.serve.judges import Judged, stream
from jprm.apps.serve.pieces import InPieces, Work, started
from jprm.apps.web.http import Refusal, RequestFields, body_of, json_in, json_of, kind_of_body, read_request, worked
from jprm.io.jsonl import dump
from jprm.methods.decoding.sample_cache import PolicyError
from jprm.methods.judge.critiques import KEY
from jprm.methods.judge.judge import with_outputs
from jprm.methods.policy.protocol import Policy, Prefix, Sample
from jprm.score.aggregate import chain_scores
from jprm.score.scale import Rule
from jprm.score.scorer import CHUNK, PRM
from jprm.tokenizer import Tokenizer
from jprm.tree import (
    Node,
    ReasoningTree,
    chains_of,
    in_order_of,
    record_of,
    scored,
    tree_of,
)

LINES = "application/x-ndjson"

# Fields of several requests, and of several answers.
Model = Annotated[str | None, "The name of a model or judge; absent, the first one."]
RuleName = Annotated[Rule | None, "What makes a chain's score of its steps'; absent, the model's."]
Caller = Annotated[
    str, "Names the caller: only tokens that no earlier request of it had are computed.", {"maxLength": 256}
]
OF_RULE = {"rule": (str, "The rule.")}
OF_MODEL = {
    "model": (str, "The model that answered."),
    "usage": (dict, "prompt_tokens and total_tokens; a prefix that chains share counts once."),
}
TEXT, TEXTS = {"type": "string"}, {"type": "array", "items": {"type": "string"}}
OBJECTS = {"type": "array", "items": {"type": "object"}}
EXAMPLE: dict[str, Any] = {"problem": "What is 2 + 2?", "steps": ["2 + 2 = 4.", "So it is 4."]}


@dataclasses.dataclass(frozen=True, kw_only=True)
class ScoreRequest(RequestFields):
    """Score a chain, pool or tree. With Content-Type application/x-ndjson: a record a line, as `jprm score`."""

    # Of the record, which `tree_of` reads
    problem: Annotated[Any, TEXT, "What was asked."] = None
    steps: Annotated[Any, TEXTS, "A chain's steps."] = None
    response: Annotated[Any, TEXT, "In place of steps: a solution as free text."] = None
    messages: Annotated[Any, OBJECTS, "In place of problem and steps: a chat, or a trajectory with tools."] = None
    samples: Annotated[Any, OBJECTS, "A pool: several solutions, each with steps."] = None
    nodes: Annotated[Any, OBJECTS, "A tree: each node with parent (-1 for the problem) and text."] = None

    rule: RuleName = None
    model: Model = None
    prompt_cache_key: Caller = ""
    stream: Annotated[bool, "Judges: send critiques as they are written."] = False

    example = EXAMPLE
    gives = {
        "record": (dict, "The record with its scores."),
        "chains": (Sequence[dict], "Of every chain its nodes, its score by the rule, and its weakest node."),
        **OF_RULE,
        **OF_MODEL,
    }


OPTIONS = ("rule", "model", "prompt_cache_key", "stream")
"""Fields of `ScoreRequest` that are not the record's."""


async def score(request: Request) -> Response:
    """Scores one record, or with the content type application/x-ndjson one record a line.

    The answer to lines has the bytes of `jprm score`, which packs them by 64, so they share no row with other requests.
    """
    if kind_of_body(request) == LINES:
        return await _lines(request)
    body = await json_of(request)
    asked = read_request(ScoreRequest, body)
    engine = server_of(request).engine(asked.model)
    rule = asked.rule or engine.prm.rule
    record = {name: value for name, value in body.items() if name not in OPTIONS}
    check_items(request, [record])
    admit(request, engine)
    tree, tokens = await worked(request, lambda: _read(request, engine, record))

    def content(outputs: Outputs, cached: int | None = None) -> dict[str, Any]:
        return {
            "object": "score",
            "model": engine.name,
            "rule": rule,
            "record": record_with(record, tree, outputs, engine),
            "chains": chains(engine.prm, tree, outputs["score"], rule),
            "usage": usage(tokens, cached),
        }

    if asked.stream:
        return stream(engine, tree, content)
    outputs, cached = await outputs_of(request, engine, tree, tokens, asked.prompt_cache_key)
    return await worked(request, lambda: JSONResponse(content(outputs, cached)))


async def outputs_of(
    request: Request, engine: Engine, tree: ReasoningTree, tokens: int, caller: str
) -> tuple[Outputs, int | None]:
    """Returns a tree's named outputs, and for a caller how many tokens an earlier tree had."""
    if not caller:
        return (await answer(request, engine.score([tree], tokens)))[0], None
    return await answer(request, engine.score_cached(tree, tokens, caller))


def chains(prm: PRM, tree: ReasoningTree, score_N: np.ndarray, rule: str) -> list[dict[str, Any]]:
    """Returns for every chain its nodes, its score by the rule, and the node of its lowest score."""
    paths = chains_of(tree)
    value_B, _ = chain_scores([score_N[path].tolist() for path in paths], rule, prm.scale)
    known = [[node for node in path if np.isfinite(score_N[node])] for path in paths]
    return [
        {"nodes": path, "score": finite(value) if len(scored) == len(path) else None,
         "weakest": min(scored, key=lambda node: score_N[node], default=None)}
        for path, value, scored in zip(paths, value_B, known, strict=True)
    ]  # fmt: skip


def finite(score: float) -> float | None:
    """Returns a score as JSON has it: null where a judge gave none."""
    return float(score) if math.isfinite(score) else None


def record_with(body: dict[str, Any], tree: ReasoningTree, outputs: Outputs, engine: Engine) -> dict[str, Any]:
    """Returns the record with its scores, and a judge's critiques under `judge`, as `jprm score` writes it."""
    if not isinstance(outputs, Judged):
        return scored(body, tree, outputs)
    about = {"name": engine.prm.name, **outputs.report}
    return in_order_of(body, record_of(with_outputs(tree, outputs)) | {KEY: about})


def usage(tokens: int, cached: int | None = None) -> dict[str, Any]:
    """Returns the tokens of a request in OpenAI's form. A prefix that its chains share counts once."""
    counts: dict[str, Any] = {"prompt_tokens": tokens, "total_tokens": tokens}
    return counts if cached is None else counts | {"prompt_tokens_details": {"cached_tokens": cached}}


def _read(request: Request, engine: Engine, record: dict[str, Any]) -> tuple[ReasoningTree, int]:
    tree = tree_of(record, "body")
    with naming(request, engine, "samples", lambda: _samples(tree)):
        return tree, tokens_of(request, engine, [tree])


def _samples(tree: ReasoningTree) -> list[ReasoningTree]:
    """Returns the samples of a pool, each as a tree; none of another record."""
    starts = [i for i, node in enumerate(tree.nodes) if node.parent < 0] if tree.kind == "pool" else []
    return [
        ReasoningTree(
            tree.problem, tuple(Node(k - 1, node.text) for k, node in enumerate(tree.nodes[a:b])), extra=tree.extra
        )
        for a, b in itertools.pairwise([*starts, len(tree.nodes)])
    ]


@contextlib.contextmanager
def naming(
    request: Request, engine: Engine, what: str, trees: Callable[[], Sequence[ReasoningTree | None]]
) -> Iterator[None]:
    """Names the place of the first tree that `tokens_of` refuses (400) by itself, such as `samples[3]`."""
    try:
        yield
    except Refusal as refusal:
        for i, tree in enumerate(trees() if refusal.status == 400 else ()):
            if tree is not None:
                with placed(f"{what}[{i}]", what):
                    tokens_of(request, engine, [tree])
        raise


async def _lines(request: Request) -> Response:
    engine = server_of(request).engine(request.query_params.get("model"))
    body = await body_of(request)
    admit(request, engine)
    records = await asyncio.to_thread(_records, request, engine, body)
    chunks = [records[i : i + CHUNK] for i in range(0, len(records), CHUNK)]
    ahead: collections.deque[concurrent.futures.Future] = collections.deque()

    def ask(chunk: Sequence[Any]) -> None:
        ahead.append(engine.score([tree for _, tree, _ in chunk], sum(tokens for *_, tokens in chunk), alone=True))

    async def written() -> AsyncIterator[bytes]:
        """Yields the lines of each chunk; the chunk after it is packed meanwhile."""
        try:
            for chunk, later in itertools.zip_longest(chunks, chunks[1:]):
                if not ahead:
                    ask(chunk)
                if later:
                    ask(later)
                outputs = await answer(request, ahead.popleft())
                yield _written(chunk, outputs, engine)
        finally:
            for future in ahead:
                future.cancel()

    lines = written()
    first = await anext(lines, b"")  # an error in it is still an error of the request

    async def all_lines() -> AsyncIterator[bytes]:
        yield first
        async for part in lines:
            yield part

    return StreamingResponse(all_lines(), media_type=LINES)


def _records(request: Request, engine: Engine, body: bytes) -> list[tuple[dict[str, Any], ReasoningTree, int]]:
    """Returns the records with their trees and tokens. Every line is checked before the first is scored."""
    sent = [(i, line) for i, line in enumerate(body.split(b"\n"), start=1) if line.strip()]
    if len(sent) > (most := server_of(request).config.items):
        raise Refusal(413, f"{len(sent):,} lines, and this server takes {most:,} at once: send them in parts")
    lines = [(i, json_in(line, f"line {i}")) for i, line in sent]
    check_items(request, [record for _, record in lines], place="record {}")
    records = []
    for i, record in lines:
        with placed(f"line {i}"):
            tree = tree_of(record, f"line {i}")
            records.append((record, tree, tokens_of(request, engine, [tree], alone=True)))
    check_trees(request, engine, [tree for _, tree, _ in records])
    return records


@contextlib.contextmanager
def placed(where: str, param: str | None = None) -> Iterator[None]:
    """Names the place, such as `samples[3]`, in a Refusal that does not name it."""
    try:
        yield
    except Refusal as refusal:
        message = refusal.message if refusal.message.startswith(where) else f"{where}: {refusal.message}"
        raise Refusal(refusal.status, message, refusal.param or param, refusal.headers) from None


def _written(chunk: Sequence[Any], results: Sequence[Outputs], engine: Engine) -> bytes:
    pairs = zip(chunk, results, strict=True)
    lines = [dump(record_with(record, tree, outputs, engine)) for (record, tree, _), outputs in pairs]
    return "".join(line + "\n" for line in lines).encode()


@dataclasses.dataclass(frozen=True, kw_only=True)
class RerankRequest(RequestFields):
    """Order solutions by their chains' scores, for any rerank client."""

    query: Annotated[str, "The problem."]
    documents: Annotated[Sequence[str | dict], "Solutions as free text, each by itself or in an object's `text`."]
    top_n: Annotated[int | None, "How many to return; absent, all.", {"minimum": 0}] = None
    return_documents: Annotated[bool, "Whether their texts are returned."] = False
    rule: RuleName = None
    model: Model = None

    example = {"query": EXAMPLE["problem"], "documents": ["2 + 2 = 4.", "2 + 2 = 5."]}
    gives = {"results": (Sequence[dict], "index and relevance_score, the best first."), **OF_MODEL}


async def rerank(request: Request) -> Response:
    """`POST /v1/rerank`."""
    asked = read_request(RerankRequest, await json_of(request))
    engine = server_of(request).engine(asked.model)
    if not asked.query.strip():
        raise Refusal(400, "query is empty", "query")
    check_items(request, asked.documents, "documents", "documents[{}]")
    texts: list[Any] = [text.get("text") if isinstance(text, dict) else text for text in asked.documents]
    admit(request, engine)

    def read() -> tuple[list[ReasoningTree], list[int], int]:
        """Returns the trees of documents that differ, the tree of each document, and the tokens."""
        trees: list[ReasoningTree] = []
        places, tokens, seen = [], 0, {}
        for i, text in enumerate(texts):
            if not isinstance(text, str) or not text.strip():
                reason = "is empty" if isinstance(text, str) else f"is of type {type(text).__name__}, not str"
                raise Refusal(400, f"documents[{i}] {reason}", "documents")
            if text not in seen:
                seen[text] = len(trees)
                with placed(f"documents[{i}]", "documents"):
                    trees.append(tree_of({"problem": asked.query, "response": text}, f"documents[{i}]"))
                    tokens += tokens_of(request, engine, trees[-1:])
            places.append(seen[text])
        check_trees(request, engine, trees)
        check_size(request, engine, tokens)
        return trees, places, tokens

    trees, places, tokens = await worked(request, read, len(texts))
    outputs = await answer(request, engine.score(trees, tokens))

    def response() -> Response:
        rule = asked.rule or engine.prm.rule
        ends = [chains(engine.prm, tree, output["score"], rule)[0] for tree, output in zip(trees, outputs, strict=True)]
        values = [ends[place]["score"] for place in places]
        if None in values:
            raise Refusal(502, f"documents[{values.index(None)}]: no critique of a step could be read", "documents")
        order = sorted(range(len(texts)), key=lambda i: (-values[i], i))[: asked.top_n]
        results: list[dict[str, Any]] = [{"index": i, "relevance_score": values[i]} for i in order]
        if asked.return_documents:
            results = [{**result, "document": {"text": texts[result["index"]]}} for result in results]
        return JSONResponse({"model": engine.name, "results": results, "usage": usage(tokens)})

    return await worked(request, response, len(texts))


@dataclasses.dataclass(frozen=True, kw_only=True)
class ContinueRequest(RequestFields):
    """Alternatives after the steps so far, written by the server's policy and scored."""

    problem: Annotated[str, "What was asked."]
    steps: Annotated[Sequence[str], "Steps so far."] = ()
    n: Annotated[int, "Alternatives.", {"minimum": 1, "maximum": 64}] = 4
    until: Annotated[Literal["step", "end"], "Whether each is one step or the rest."] = "step"
    seed: Annotated[int, "The number of the first sample.", {"minimum": 0}] = 0
    rule: RuleName = None
    model: Model = None
    prompt_cache_key: Caller = ""

    example = {"problem": EXAMPLE["problem"], "steps": ["2 + 2 = 4."], "n": 2}
    gives = {
        "alternatives": (Sequence[dict], "steps, scores, score, finish_reason and tokens of each."),
        "scores": (Sequence[float | None], "Of the steps so far."),
        "policy": (str, "What wrote them."),
        **OF_RULE,
        **OF_MODEL,
    }


async def alternatives(request: Request) -> Response:
    """`POST /v1/continue`."""
    body = await json_of(request)
    server = server_of(request)
    if server.writer is None:
        raise Refusal(400, "this server has no policy: start it with --policy", "model")
    asked = read_request(ContinueRequest, body)
    engine = server.engine(asked.model)
    rule = asked.rule or engine.prm.rule
    check_items(request, [body])
    # The checks of any record, on steps that may be none yet
    record = tree_of({"problem": asked.problem, "steps": asked.steps or ["-"]}, "body")
    prefix = Prefix(record.problem, tuple(node.text for node in record.nodes) if asked.steps else ())
    admit(request, engine)
    samples = await server.writer.sample(request, prefix, asked.n, asked.until, asked.seed)
    if all(sample.error is not None for sample in samples):
        raise Refusal(502, f"the policy gave nothing: {samples[0].error}")
    tree, paths = _tree(prefix, samples)
    tokens = await worked(request, lambda: tokens_of(request, engine, [tree]))
    outputs, cached = {"score": np.zeros(0)}, None
    if tree.nodes:
        outputs, cached = await outputs_of(request, engine, tree, tokens, asked.prompt_cache_key)
    score_N, before = outputs["score"], len(prefix.steps)
    value_B, _ = chain_scores([score_N[path].tolist() for path in paths], rule, engine.prm.scale)
    written_steps = [
        {"steps": list(sample.steps), "scores": list(map(finite, score_N[path[before:]])),
         "score": finite(value) if path and not sample.error else None,
         "finish_reason": sample.finish_reason, "tokens": sample.tokens}
        | ({"error": sample.error} if sample.error else {})
        for sample, path, value in zip(samples, paths, value_B, strict=True)
    ]  # fmt: skip
    written = sum(sample.tokens for sample in samples)
    return JSONResponse({
        "object": "alternatives", "model": engine.name, "policy": server.writer.policy.name, "rule": rule,
        "scores": list(map(finite, score_N[:before])), "alternatives": written_steps,
        "usage": usage(tokens, cached) | {"completion_tokens": written, "total_tokens": tokens + written},
    })  # fmt: skip


def _tree(prefix: Prefix, samples: list[Sample]) -> tuple[ReasoningTree, list[list[int]]]:
    """Returns the tree of the steps so far and all alternatives, and the nodes of each alternative's chain."""
    nodes = [Node(i - 1, step) for i, step in enumerate(prefix.steps)]
    before, paths = list(range(len(nodes))), []
    for sample in samples:
        path = list(before)
        for step in sample.steps:
            nodes.append(Node(path[-1] if path else -1, step))
            path.append(len(nodes) - 1)
        paths.append(path)
    return ReasoningTree(prefix.problem, tuple(nodes)), paths


@dataclasses.dataclass(frozen=True)
class Server:
    """What routes work with: the models by name, the first being the default; what is accepted; a policy; and the
    tokenizers of callers."""

    engines: Mapping[str, Engine]
    config: ServeConfig
    writer: Writer | None = None
    tokenizers: Mapping[str, Tokenizer] = dataclasses.field(default_factory=dict)
    calibration: Sequence[Mapping[str, Any]] | None = None  # results of a search whose answers are known

    def engine(self, name: str | None) -> Engine:
        """Returns the engine of a model's name, that of the first model for None."""
        if name is None:
            return next(iter(self.engines.values()))
        if name not in self.engines:
            raise Refusal(404, f"there is no model {name!r}: use {', '.join(self.engines)}", "model")
        return self.engines[name]


def server_of(request: Request) -> Server:
    """Returns what is served. Raises Refusal (503) while the models are loading."""
    if request.app.state.server is None:
        raise Refusal(503, "the models are loading: come back later", headers={"Retry-After": "2"})
    return request.app.state.server


def admit(request: Request, engine: Engine, tokens: int = 0) -> None:
    """Raises Refusal (503, with the time to come back) where work of so many tokens would wait for too long."""
    config, wait = server_of(request).config, engine.wait_seconds(tokens)
    if wait > config.queue_seconds:
        seconds = math.ceil(wait - config.queue_seconds)
        raise Refusal(503, f"{wait:.0f} seconds of work wait: come back later", headers={"Retry-After": str(seconds)})


CHARACTERS = 64
"""A text of more characters for every token of the longest chain is not tokenised: no tokenizer makes so few of it."""

LENGTHS = 64
"""The lengths of a request's chains together, in steps, at most so many times its items: an answer lists each chain."""


def check_items(request: Request, records: Sequence[Any], param: str | None = None, place: str = "") -> None:
    """Refuses what holds too much, before anything is made of it.

    Args:
      records: as they were sent: objects, or texts.
      param: the field that they are in.
      place: of a record, such as `documents[{}]` with its index.

    Raises Refusal: 413 for more steps, nodes, samples, turns and records together than the server takes, 400 for a text
    that no chain has room for.
    """
    config, left = server_of(request).config, itertools.count()
    most = CHARACTERS * config.longest
    for i, record in enumerate(records):
        for item in _items(record):
            if next(left) >= config.items:
                what = f"more than {config.items:,} steps, samples and texts"
                raise Refusal(413, f"{what}, which is what the server takes (--items): send them in parts", param)
            if isinstance(item, str) and len(item) > most:
                where = f"{place.format(i)} has" if place else "it has"
                raise Refusal(
                    400, f"{where} a text of {len(item):,} characters: no chain has more than {most:,}", param
                )


def _items(record: Any) -> Iterator[Any]:
    """Yields the texts, steps, nodes, samples and turns that a record as it was sent holds."""
    if not isinstance(record, dict):
        yield record
        return
    yield from (record[key] for key in _TEXTS if isinstance(record.get(key), str))
    for key in _LISTS:
        if isinstance(inner := record.get(key), list):
            for value in inner:
                yield from _items(value)


_LISTS = ("steps", "nodes", "completions", "messages", "samples")
_TEXTS = ("problem", "prompt", "system", "response", "text", "content", "reasoning_content")
"""Fields of records that hold items, and those whose texts become chains."""


def check_trees(request: Request, engine: Engine, trees: Sequence[ReasoningTree]) -> None:
    """Raises Refusal (413) for chains whose lengths together are too much to list, and too many critiques."""
    config = server_of(request).config
    total = sum(_lengths(tree) for tree in trees)
    if total > LENGTHS * config.items:
        most = f"{LENGTHS * config.items:,}"
        raise Refusal(413, f"the chains have {total:,} steps together, and {most} at most: send them in parts")
    if (critiques := engine.critiques_of(trees)) > config.critiques:
        most = f"{config.critiques:,}"
        raise Refusal(413, f"{critiques:,} critiques, and a request may ask for {most}: send it in parts")


def _lengths(tree: ReasoningTree) -> int:
    """Returns the sum of the chains' lengths, in nodes, without making the chains."""
    depth, inner = [], set()
    for node in tree.nodes:
        depth.append(1 + (depth[node.parent] if node.parent >= 0 else 0))
        inner.add(node.parent)
    return sum(length for i, length in enumerate(depth) if i not in inner)


def tokens_of(request: Request, engine: Engine, trees: Sequence[ReasoningTree], alone: bool = False) -> int:
    """Returns the tokens of the trees, as `Engine.tokens_of`.

    Raises Refusal (400) for a chain longer than the server or model takes, and as `check_trees` and `check_size`.
    """
    check_trees(request, engine, trees)
    try:
        tokens = engine.tokens_of(trees, alone)
    except ValueError as error:
        raise Refusal(400, str(error)) from None
    check_size(request, engine, tokens)
    return tokens


def check_size(request: Request, engine: Engine, tokens: int) -> None:
    """Raises Refusal for work that by the measured rate takes longer than an answer may (413), and as `admit`."""
    most = server_of(request).config.answer_seconds
    if engine.rate and tokens > most * engine.rate:
        seconds = tokens / engine.rate
        raise Refusal(
            413, f"{tokens:,} tokens take about {seconds:,.0f} seconds, and {most:g} at most: send it in parts"
        )
    admit(request, engine, tokens)


async def answer(request: Request, future: concurrent.futures.Future, deadline: float | None = None) -> Any:
    """Returns the future's result. Cancels it where the client goes away or the time is up.

    `deadline`, by `time.monotonic`, is that of an answer that begins now where it is None.

    Raises Refusal: 504 when late, 499 when the client has gone, 400 for a request that the model refuses, 500
    for anything else that fails.
    """
    waiting, gone = asyncio.wrap_future(future), asyncio.ensure_future(_gone(request))
    seconds = server_of(request).config.answer_seconds
    left = seconds if deadline is None else max(0.0, deadline - time.monotonic())
    try:
        done, _ = await asyncio.wait({waiting, gone}, timeout=left, return_when=asyncio.FIRST_COMPLETED)
        if waiting in done:
            return waiting.result()
        raise Refusal(499, "the client has gone") if done else Refusal(504, f"no answer within {seconds:g} seconds")
    except (Refusal, asyncio.CancelledError):
        raise
    except PolicyError as error:  # of a judge
        raise Refusal(502, str(error)) from None
    except ValueError as error:
        raise Refusal(400, str(error)) from None
    except Exception as error:  # its message may quote the request, which no log is to hold
        logging.getLogger(__name__).error("%s while scoring a request", type(error).__name__)
        raise Refusal(500, f"{type(error).__name__} while scoring the request") from None
    finally:
        gone.cancel()
        waiting.cancel()


async def in_turn(request: Request, pieces: Sequence[Callable[[], concurrent.futures.Future]]) -> list[Any]:
    """Returns the results of the pieces of one request, which others' requests may come between.

    One is begun while the one before it runs. All have the time of one answer. Raises Refusal as `answer`.
    """
    deadline = time.monotonic() + server_of(request).config.answer_seconds
    waiting: collections.deque[concurrent.futures.Future] = collections.deque()
    results = []
    try:
        for place, piece in enumerate(pieces):
            waiting.append(piece())
            if place:
                results.append(await answer(request, waiting.popleft(), deadline))
        if waiting:
            results.append(await answer(request, waiting.popleft(), deadline))
        return results
    finally:
        for future in waiting:
            future.cancel()


async def _gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


WAITING = 8
"""Requests that may wait for the policy."""


class Counted(InPieces):
    """A policy in pieces that counts what it draws, and tells of it."""

    def __init__(self, policy: Policy, work: Work, tell: Callable[[dict[str, int]], Any]):
        self.samples = self.tokens = 0

        def drawn(piece: Sequence[Sequence[Sample]]) -> None:
            self.samples += sum(map(len, piece))
            self.tokens += sum(sample.tokens for samples in piece for sample in samples)
            tell({"samples": self.samples, "completion_tokens": self.tokens})

        super().__init__(policy, work, drawn)


class Writer:
    """A policy and its thread: it samples for one request at a time, for as long as its client waits."""

    def __init__(self, policy: Policy):
        self.policy, self._room = policy, threading.Semaphore(WAITING)
        self._thread = concurrent.futures.ThreadPoolExecutor(1, "jprm policy")

    async def sample(self, request: Request, prefix: Prefix, n: int, until: Any, seed: int) -> list[Sample]:
        """Returns n samples. Raises Refusal: 503 where enough requests wait, else as `answer`."""
        work = self.run(lambda policy: policy.sample([prefix], n, until=until, seed=seed))
        return (await answer(request, work))[0]

    def run(
        self, function: Callable[[Counted], Any], tell: Callable[[dict[str, int]], Any] = lambda state: None
    ) -> Work:
        """Returns the future of what a function of the policy returns in its thread. Raises Refusal as `sample`."""
        if not self._room.acquire(blocking=False):
            raise Refusal(503, f"{WAITING} requests wait for the policy: come back later", headers={"Retry-After": "5"})
        future = started(self._thread, lambda work: function(Counted(self.policy, work, tell)))
        future.add_done_callback(lambda future: self._room.release())
        return future

    def close(self) -> None:
        self._thread.shutdown()
