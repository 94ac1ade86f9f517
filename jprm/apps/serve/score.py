"""Scores over HTTP: /v1/score, /v1/rerank and /v1/continue."""

from __future__ import annotations

import asyncio
import collections
import concurrent.futures
import dataclasses
import itertools
from collections.abc import AsyncIterator, Sequence
from typing import Annotated, Any, Literal

import numpy as np
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse

from jprm.apps.serve.call import Call, finite, placed, server_of, usage
from jprm.apps.serve.engine import Engine, Outputs
from jprm.apps.serve.judges import JudgedOutputs, stream
from jprm.apps.web.http import Refusal, RequestFields, body_of, json_in, json_of, kind_of_body, read_request
from jprm.io.jsonl import dump
from jprm.methods.judge.judge import judged_record, with_outputs
from jprm.methods.policy.protocol import Prefix, Sample
from jprm.score.aggregate import chain_scores
from jprm.score.scale import Rule
from jprm.score.scorer import CHUNK
from jprm.tree import Node, ReasoningTree, scored, tree_of

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
    """Score a chain, pool or tree. With Content-Type application/x-ndjson: one record per line, like `jprm score`."""

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
"""Fields of `ScoreRequest` that are not part of the record."""


async def score(request: Request) -> Response:
    """Answers `POST /v1/score`: `record` (with its scores), `chains` (`Call.chains`), `rule`, `model`, `usage`.

    If the content type is application/x-ndjson, scores one record per line and streams the records with scores. That
    answer is byte-identical to `jprm score`, which packs them in chunks of 64; so they share no row with other
    requests. With `stream`, a judge's answer is a stream of events (`jprm.apps.serve.judges.stream`).

    Raises Refusal: 400 for an invalid request, 404 for an unknown model, 413 for a too large request, 503 or 504 if it
    waits too long, 502 if a judge's policy fails, and as `json_of`; RecordError for a bad record.
    """
    if kind_of_body(request) == LINES:
        return await _lines(request)
    body = await json_of(request)
    asked = read_request(ScoreRequest, body)
    call = Call(request, asked.model, asked.rule)
    record = {name: value for name, value in body.items() if name not in OPTIONS}
    call.check_items([record])
    call.admit()
    tree, tokens = await call.worked(lambda: _read(call, record))

    def content(outputs: Outputs, cached: int | None = None) -> dict[str, Any]:
        return {
            "object": "score",
            "model": call.engine.name,
            "rule": call.rule,
            "record": record_with(record, tree, outputs, call.engine),
            "chains": call.chains(tree, outputs["score"]),
            "usage": usage(tokens, cached),
        }

    if asked.stream:
        return stream(call.engine, tree, content)
    outputs, cached = await call.outputs_of(tree, tokens, asked.prompt_cache_key)
    return await call.worked(lambda: JSONResponse(content(outputs, cached)))


def record_with(body: dict[str, Any], tree: ReasoningTree, outputs: Outputs, engine: Engine) -> dict[str, Any]:
    """Returns a copy of the record with its scores, and a judge's critiques under `judge`, like `jprm score`.

    `tree` is `body`'s tree, `outputs` its named outputs from the engine.
    """
    if not isinstance(outputs, JudgedOutputs):
        return scored(body, tree, outputs)
    return judged_record(body, with_outputs(tree, outputs), {"name": engine.prm.name, **outputs.report})


def _read(call: Call, record: dict[str, Any]) -> tuple[ReasoningTree, int]:
    tree = tree_of(record, "body")
    with call.naming("samples", lambda: _samples(tree)):
        return tree, call.tokens_of([tree])


def _samples(tree: ReasoningTree) -> list[ReasoningTree]:
    """Returns the samples of a pool as separate trees; [] for other records."""
    starts = [i for i, node in enumerate(tree.nodes) if node.parent < 0] if tree.kind == "pool" else []
    return [
        ReasoningTree(
            tree.problem, tuple(Node(k - 1, node.text) for k, node in enumerate(tree.nodes[a:b])), extra=tree.extra
        )
        for a, b in itertools.pairwise([*starts, len(tree.nodes)])
    ]


async def _lines(request: Request) -> Response:
    call = Call(request, request.query_params.get("model"))
    body, engine = await body_of(request), call.engine
    call.admit()
    records = await asyncio.to_thread(_records, call, body)
    chunks = [records[i : i + CHUNK] for i in range(0, len(records), CHUNK)]
    ahead: collections.deque[concurrent.futures.Future] = collections.deque()

    def ask(chunk: Sequence[Any]) -> None:
        ahead.append(engine.score([tree for _, tree, _ in chunk], sum(tokens for *_, tokens in chunk), alone=True))

    async def written() -> AsyncIterator[bytes]:
        """Yields the lines of each chunk; the next chunk is packed meanwhile."""
        try:
            for chunk, later in itertools.zip_longest(chunks, chunks[1:]):
                if not ahead:
                    ask(chunk)
                if later:
                    ask(later)
                outputs = await call.answer(ahead.popleft())
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


def _records(call: Call, body: bytes) -> list[tuple[dict[str, Any], ReasoningTree, int]]:
    """Parses and checks all lines before the first is scored; returns (record, tree, tokens)."""
    sent = [(i, line) for i, line in enumerate(body.split(b"\n"), start=1) if line.strip()]
    if len(sent) > (most := call.config.items):
        raise Refusal(413, f"{len(sent):,} lines, and this server takes {most:,} at once: send them in parts")
    lines = [(i, json_in(line, f"line {i}")) for i, line in sent]
    call.check_items([record for _, record in lines], place="record {}")
    records = []
    for i, record in lines:
        with placed(f"line {i}"):
            tree = tree_of(record, f"line {i}")
            records.append((record, tree, call.tokens_of([tree], alone=True)))
    call.check_trees([tree for _, tree, _ in records])
    return records


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
    """Answers `POST /v1/rerank`: `results`, `model`, `usage`. Equal documents are scored once.

    `results` has `index` and `relevance_score` (the chain score), the best first, equal scores in order of index; at
    most `top_n`. With `return_documents`, also {"document": {"text": ...}}.

    Raises Refusal: 400 if the query or a document is empty, 502 if a judge gave no score, and as `score`.
    """
    asked = read_request(RerankRequest, await json_of(request))
    call = Call(request, asked.model, asked.rule)
    if not asked.query.strip():
        raise Refusal(400, "query is empty", "query")
    call.check_items(asked.documents, "documents", "documents[{}]")
    call.admit()
    texts: list[Any] = [text.get("text") if isinstance(text, dict) else text for text in asked.documents]
    first: dict[str, int] = {}
    for i, text in enumerate(texts):
        if not isinstance(text, str) or not text.strip():
            reason = "is empty" if isinstance(text, str) else f"is of type {type(text).__name__}, not str"
            raise Refusal(400, f"documents[{i}] {reason}", "documents")
        first.setdefault(text, i)

    def chain(i: int) -> ReasoningTree:
        return tree_of({"problem": asked.query, "response": texts[i]}, f"documents[{i}]")

    chains, tokens = await call.single_chains("documents", list(first.values()), chain)
    value_of = {text: scored[0] for text, scored in zip(first, chains, strict=True) if scored}
    order = sorted(range(len(texts)), key=lambda i: (-value_of[texts[i]], i))[: asked.top_n]
    results: list[dict[str, Any]] = [{"index": i, "relevance_score": value_of[texts[i]]} for i in order]
    if asked.return_documents:
        results = [{**result, "document": {"text": texts[result["index"]]}} for result in results]
    return JSONResponse({"model": call.engine.name, "results": results, "usage": usage(tokens)})


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
    """Answers `POST /v1/continue`: `alternatives` in the order of samples, `scores` of the steps so far, `policy`.

    An alternative has `steps`, their `scores`, `score` (of the chain; null after an error), `finish_reason`, `tokens`,
    and `error` if the policy failed. The answer also has `rule`, `model` and `usage`.

    Raises Refusal: 400 without a policy, 502 if each sample failed, 503 if too many requests wait, and as `score`.
    """
    body = await json_of(request)
    writer = server_of(request).policy
    asked = read_request(ContinueRequest, body)
    call = Call(request, asked.model, asked.rule)
    call.check_items([body])
    # The checks of any record, on steps that may be none yet
    record = tree_of({"problem": asked.problem, "steps": asked.steps or ["-"]}, "body")
    prefix = Prefix(record.problem, tuple(node.text for node in record.nodes) if asked.steps else ())
    call.admit()
    (samples,) = await call.answer(
        writer.run(lambda policy: policy.sample([prefix], asked.n, until=asked.until, seed=asked.seed))
    )
    if all(sample.error is not None for sample in samples):
        raise Refusal(502, f"the policy gave nothing: {samples[0].error}")
    tree, paths = _tree(prefix, samples)
    tokens = await call.worked(lambda: call.tokens_of([tree]))
    outputs, cached = {"score": np.zeros(0)}, None
    if tree.nodes:
        outputs, cached = await call.outputs_of(tree, tokens, asked.prompt_cache_key)
    score_N, before = outputs["score"], len(prefix.steps)
    value_B, _ = chain_scores([score_N[path].tolist() for path in paths], call.rule, call.engine.prm.scale)
    written_steps = [
        {"steps": list(sample.steps), "scores": list(map(finite, score_N[path[before:]])),
         "score": finite(value) if path and not sample.error else None,
         "finish_reason": sample.finish_reason, "tokens": sample.tokens}
        | ({"error": sample.error} if sample.error else {})
        for sample, path, value in zip(samples, paths, value_B, strict=True)
    ]  # fmt: skip
    written = sum(sample.tokens for sample in samples)
    return JSONResponse({
        "object": "alternatives", "model": call.engine.name, "policy": writer.policy.name, "rule": call.rule,
        "scores": list(map(finite, score_N[:before])), "alternatives": written_steps,
        "usage": usage(tokens, cached) | {"completion_tokens": written, "total_tokens": tokens + written},
    })  # fmt: skip


def _tree(prefix: Prefix, samples: list[Sample]) -> tuple[ReasoningTree, list[list[int]]]:
    """Builds the tree of steps and alternatives; also returns each alternative's path."""
    nodes = [Node(i - 1, step) for i, step in enumerate(prefix.steps)]
    before, paths = list(range(len(nodes))), []
    for sample in samples:
        path = list(before)
        for step in sample.steps:
            nodes.append(Node(path[-1] if path else -1, step))
            path.append(len(nodes) - 1)
        paths.append(path)
    return ReasoningTree(prefix.problem, tuple(nodes)), paths
