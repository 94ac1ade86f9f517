"""Scores over HTTP: /v1/score, /v1/rerank and /v1/continue, and what every route of scores shares.

Below the routes are the models, admission, waiting for the device, and the thread of a policy that writes steps.
"""

from __future__ import annotations

import asyncio
import collections
import concurrent.futures
import dataclasses
import functools
import itertools
import logging
import math
import threading
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any

import numpy as np
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse

from jprm.apps.serve import ServeConfig
from jprm.apps.serve.engine import Engine, Outputs
from jprm.apps.serve.judges import Judged, stream
from jprm.apps.web.http import Refusal, body_of, field, json_in, json_of, kind_of_body, worked
from jprm.io.jsonl import dump
from jprm.methods.decoding.sample_cache import PolicyError
from jprm.methods.judge.critiques import KEY
from jprm.methods.judge.judge import with_outputs
from jprm.methods.policy.protocol import Policy, Prefix, Sample
from jprm.score.aggregate import chain_scores
from jprm.score.scale import RULES
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

CALLER = "prompt_cache_key"
"""The field that names a caller, as in OpenAI's API: its requests compute the tokens alone that no earlier one had."""


async def score(request: Request) -> Response:
    """Scores one record, or with the content type application/x-ndjson one record a line.

    The answer to lines has the bytes of `jprm score`, which packs them by 64, so they share no row with other requests.
    """
    if kind_of_body(request) == LINES:
        return await _lines(request)
    body = await json_of(request)
    engine, rule, caller = options_of(request, body)
    for name in ("model", "rule", CALLER):
        body.pop(name, None)
    admit(request, engine)
    streams = field(body, "stream", bool, default=False)
    body.pop("stream", None)
    tree, tokens = await worked(request, lambda: _read(request, engine, body))

    def content(outputs: Outputs, cached: int | None = None) -> dict[str, Any]:
        return {
            "object": "score",
            "model": engine.name,
            "rule": rule,
            "record": record_with(body, tree, outputs, engine),
            "chains": chains(engine.prm, tree, outputs["score"], rule),
            "usage": usage(tokens, cached),
        }

    if streams:
        return stream(engine, tree, content)
    outputs, cached = await outputs_of(request, engine, tree, tokens, caller)
    return await worked(request, lambda: JSONResponse(content(outputs, cached)))


def options_of(request: Request, body: dict[str, Any]) -> tuple[Engine, str, str | None]:
    """Returns the engine, the rule, and the name that the caller's prefixes are kept under, None for none."""
    engine, caller = server_of(request).engine(body.get("model")), field(body, CALLER, str, default="")
    if len(caller) > 256:
        raise Refusal(400, f"{CALLER} has {len(caller)} characters: 256 at most", CALLER)
    return engine, rule_of(engine.prm, body.get("rule")), caller or None


async def outputs_of(
    request: Request, engine: Engine, tree: ReasoningTree, tokens: int, caller: str | None
) -> tuple[Outputs, int | None]:
    """Returns a tree's named outputs, and for a caller how many tokens an earlier tree had."""
    if caller is None:
        return (await answer(request, engine.score([tree], tokens)))[0], None
    return await answer(request, engine.score_cached(tree, tokens, caller))


def rule_of(prm: PRM, rule: Any) -> str:
    """Returns the rule by its name, the model's own for None. Raises Refusal for an unknown one."""
    if rule is not None and (not isinstance(rule, str) or rule not in RULES):
        raise Refusal(400, f"there is no rule {rule!r}: use {', '.join(RULES)}", "rule")
    return rule or prm.rule


def chains(prm: PRM, tree: ReasoningTree, score_N: np.ndarray, rule: str) -> list[dict[str, Any]]:
    """Returns for every chain its nodes, its score by the rule, and the node of its lowest score."""
    paths = chains_of(tree)
    value_B, _ = chain_scores([score_N[path].tolist() for path in paths], rule, prm.scale)
    known = [[node for node in path if np.isfinite(score_N[node])] for path in paths]
    return [
        {"nodes": path, "score": finite(value) if len(some) == len(path) else None,
         "weakest": min(some, key=lambda node: score_N[node], default=None)}
        for path, value, some in zip(paths, value_B, known, strict=True)
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
    return tree, tokens_of(request, engine, [tree])


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
        async for some in lines:
            yield some

    return StreamingResponse(all_lines(), media_type=LINES)


def _records(request: Request, engine: Engine, body: bytes) -> list[tuple[dict[str, Any], ReasoningTree, int]]:
    """Returns the records with their trees and tokens. Every line is checked before the first is scored."""
    records = []
    for number, line in enumerate(body.split(b"\n"), start=1):
        if line.strip():
            record = json_in(line, f"line {number}")
            tree = tree_of(record, f"line {number}")
            records.append((record, tree, tokens_of(request, engine, [tree], alone=True)))
    return records


def _written(chunk: Sequence[Any], results: Sequence[Outputs], engine: Engine) -> bytes:
    pairs = zip(chunk, results, strict=True)
    lines = [dump(record_with(record, tree, outputs, engine)) for (record, tree, _), outputs in pairs]
    return "".join(line + "\n" for line in lines).encode()


async def rerank(request: Request) -> Response:
    """`POST /v1/rerank`: orders documents, which are solutions, by their chains' scores, for any rerank client."""
    body = await json_of(request)
    engine = server_of(request).engine(body.get("model"))
    rule, problem = rule_of(engine.prm, body.get("rule")), field(body, "query", str)
    texts = [text.get("text") if isinstance(text, dict) else text for text in field(body, "documents", list)]
    top = field(body, "top_n", int, default=len(texts) or 1)
    admit(request, engine)
    read = await worked(
        request, lambda: [_read(request, engine, {"problem": problem, "response": text}) for text in texts]
    )
    tokens = sum(count for _, count in read)
    check_size(request, engine, tokens)
    scored_trees = await answer(request, engine.score([tree for tree, _ in read], tokens))
    values = [
        chains(engine.prm, tree, outputs["score"], rule)[0]["score"]
        for (tree, _), outputs in zip(read, scored_trees, strict=True)
    ]
    if None in values:
        raise Refusal(502, f"documents[{values.index(None)}]: no critique of a step could be read", "documents")
    order = sorted(range(len(texts)), key=lambda i: (-values[i], i))[: max(top, 0)]
    results: list[dict[str, Any]] = [{"index": i, "relevance_score": values[i]} for i in order]
    if body.get("return_documents"):
        results = [{**result, "document": {"text": texts[result["index"]]}} for result in results]
    return JSONResponse({"model": engine.name, "results": results, "usage": usage(tokens)})


MOST = 64
"""Alternatives of one request."""


async def alternatives(request: Request) -> Response:
    """Returns n alternatives after the steps so far, each with its scores and its chain's score by the rule."""
    body = await json_of(request)
    server = server_of(request)
    if server.writer is None:
        raise Refusal(400, "this server has no policy: start it with --policy", "model")
    engine, rule, caller = options_of(request, body)
    prefix, n, until, seed = _asked(body)
    admit(request, engine)
    samples = await server.writer.sample(request, prefix, n, until, seed)
    if all(sample.error is not None for sample in samples):
        raise Refusal(502, f"the policy gave nothing: {samples[0].error}")
    tree, paths = _tree(prefix, samples)
    tokens = await worked(request, lambda: tokens_of(request, engine, [tree]))
    outputs, cached = {"score": np.zeros(0)}, None
    if tree.nodes:
        outputs, cached = await outputs_of(request, engine, tree, tokens, caller)
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


def _asked(body: dict[str, Any]) -> tuple[Prefix, int, str, int]:
    """Returns the prefix, the number of alternatives, where they end, and the number of the first sample."""
    steps, n = field(body, "steps", list, default=[]), field(body, "n", int, default=4)
    until, seed = field(body, "until", str, default="step"), field(body, "seed", int, default=0)
    if not 1 <= n <= MOST:
        raise Refusal(400, f"n is {n}: from 1 to {MOST}", "n")
    if until not in ("step", "end"):
        raise Refusal(400, f"until is {until!r}: use step or end", "until")
    if seed < 0:
        raise Refusal(400, f"seed is {seed}: from 0", "seed")
    # The checks of any record, on steps that may be none yet
    tree = tree_of({"problem": field(body, "problem", str), "steps": steps or ["-"]}, "body")
    return Prefix(tree.problem, tuple(node.text for node in tree.nodes) if steps else ()), n, until, seed


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

    def engine(self, name: Any) -> Engine:
        """Returns the engine of a model's name, that of the first model for None."""
        if name is None:
            return next(iter(self.engines.values()))
        if not isinstance(name, str):
            raise Refusal(400, f"model is of type {type(name).__name__}, not str", "model")
        if name not in self.engines:
            raise Refusal(404, f"there is no model {name!r}: use {', '.join(self.engines)}", "model")
        return self.engines[name]


def server_of(request: Request) -> Server:
    """Returns what is served. Raises Refusal (503) while the models are loading."""
    if request.app.state.server is None:
        raise Refusal(503, "the models are loading: come back later", headers={"Retry-After": "2"})
    return request.app.state.server


def admit(request: Request, engine: Engine) -> None:
    """Raises Refusal (503, with the time to come back) where more work waits than the server takes."""
    config, wait = server_of(request).config, engine.wait_seconds()
    if wait > config.queue_seconds:
        seconds = math.ceil(wait - config.queue_seconds)
        raise Refusal(503, f"{wait:.0f} seconds of work wait: come back later", headers={"Retry-After": str(seconds)})


def tokens_of(request: Request, engine: Engine, trees: Sequence[ReasoningTree], alone: bool = False) -> int:
    """Returns the tokens of the trees, as `Engine.tokens_of`.

    Raises Refusal (400) for a chain longer than the server or model takes, and as `check_size`.
    """
    try:
        tokens = engine.tokens_of(trees, alone)
    except ValueError as error:
        raise Refusal(400, str(error)) from None
    check_size(request, engine, tokens)
    return tokens


def check_size(request: Request, engine: Engine, tokens: int) -> None:
    """Raises Refusal (413) for work that by the measured rate takes longer than an answer may."""
    most = server_of(request).config.answer_seconds
    if engine.rate and tokens > most * engine.rate:
        seconds = tokens / engine.rate
        raise Refusal(
            413, f"{tokens:,} tokens take about {seconds:,.0f} seconds, and {most:g} at most: send it in parts"
        )


async def answer(request: Request, future: concurrent.futures.Future) -> Any:
    """Returns the future's result. Cancels it where the client goes away or the time is up.

    Raises Refusal: 504 when late, 499 when the client has gone, 400 for a request that the model refuses, 500
    for anything else that fails.
    """
    waiting, gone = asyncio.wrap_future(future), asyncio.ensure_future(_gone(request))
    seconds = server_of(request).config.answer_seconds
    try:
        done, _ = await asyncio.wait({waiting, gone}, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
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


async def _gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


WAITING = 8
"""Requests that may wait for the policy."""


class Writer:
    """A policy and its thread: it samples for one request at a time."""

    def __init__(self, policy: Policy):
        self.policy, self._room = policy, threading.Semaphore(WAITING)
        self._thread = concurrent.futures.ThreadPoolExecutor(1, "jprm policy")

    async def sample(self, request: Request, prefix: Prefix, n: int, until: Any, seed: int) -> list[Sample]:
        """Returns n samples. Raises Refusal: 503 where enough requests wait, else as `answer`."""
        sample = functools.partial(self.policy.sample, [prefix], n, until=until, seed=seed)
        return (await answer(request, self.run(sample)))[0]

    def run(self, function: Callable[[], Any]) -> concurrent.futures.Future:
        """Returns the future of what a function returns in the policy's thread. Raises Refusal as `sample`."""
        if not self._room.acquire(blocking=False):
            raise Refusal(503, f"{WAITING} requests wait for the policy: come back later", headers={"Retry-After": "5"})
        future = self._thread.submit(function)
        future.add_done_callback(lambda future: self._room.release())
        return future

    def close(self) -> None:
        self._thread.shutdown()
