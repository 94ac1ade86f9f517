"""`POST /v1/score`: any record with the scores of its steps, or lines of records in and out."""

from __future__ import annotations

import asyncio
import collections
import concurrent.futures
import itertools
from collections.abc import AsyncIterator, Sequence
from typing import Any

import numpy as np
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse

from jprm.apps.serve.engine import Engine, Outputs
from jprm.apps.serve.http import admit, answer, check_size, server_of, tokens_of
from jprm.apps.web.guards import Refusal, body_of, field, json_in, json_of, kind_of_body, of_record
from jprm.io.jsonl import dump
from jprm.methods.search.chain_scores import chain_scores
from jprm.score.records import scored
from jprm.score.rules import RULES
from jprm.score.scorer import CHUNK, PRM
from jprm.tree import ReasoningTree, RecordError, chains_of, tree_of

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
    tree, tokens = await asyncio.to_thread(_read, request, engine, body)
    outputs, cached = await outputs_of(request, engine, tree, tokens, caller)

    def response() -> Response:
        made = {
            "object": "score",
            "model": engine.name,
            "rule": rule,
            "record": scored(body, tree, outputs),
            "chains": chains(engine.prm, tree, outputs["score"], rule),
            "usage": usage(tokens, cached),
        }
        return JSONResponse(made)

    return await asyncio.to_thread(response)  # a second for a body of megabytes, in which others are served


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
    weakest = [path[int(np.argmin(score_N[path]))] for path in paths]
    return [
        {"nodes": path, "score": float(value), "weakest": node}
        for path, value, node in zip(paths, value_B, weakest, strict=True)
    ]


def usage(tokens: int, cached: int | None = None) -> dict[str, Any]:
    """Returns the tokens of a request in OpenAI's form. A prefix that its chains share counts once."""
    made: dict[str, Any] = {"prompt_tokens": tokens, "total_tokens": tokens}
    return made if cached is None else made | {"prompt_tokens_details": {"cached_tokens": cached}}


def _read(request: Request, engine: Engine, record: dict[str, Any]) -> tuple[ReasoningTree, int]:
    try:
        tree = tree_of(record, "body")
    except RecordError as error:
        raise of_record(error) from None
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
                found = await answer(request, ahead.popleft())
                yield _written(chunk, found)
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
    found = []
    try:
        for number, line in enumerate(body.split(b"\n"), start=1):
            if line.strip():
                record = json_in(line, f"line {number}")
                tree = tree_of(record, f"line {number}")
                found.append((record, tree, tokens_of(request, engine, [tree], alone=True)))
        return found
    except RecordError as error:
        raise of_record(error) from None


def _written(chunk: Sequence[Any], found: Sequence[Outputs]) -> bytes:
    lines = [dump(scored(record, tree, outputs)) for (record, tree, _), outputs in zip(chunk, found, strict=True)]
    return "".join(line + "\n" for line in lines).encode()


async def rerank(request: Request) -> Response:
    """`POST /v1/rerank`: orders documents, which are solutions, by their chains' scores, for any rerank client."""
    body = await json_of(request)
    engine = server_of(request).engine(body.get("model"))
    rule, problem = rule_of(engine.prm, body.get("rule")), field(body, "query", str)
    texts = [text.get("text") if isinstance(text, dict) else text for text in field(body, "documents", list)]
    top = field(body, "top_n", int, default=len(texts) or 1)
    admit(request, engine)
    read = await asyncio.to_thread(
        lambda: [_read(request, engine, {"problem": problem, "response": text}) for text in texts]
    )
    tokens = sum(count for _, count in read)
    check_size(request, engine, tokens)
    found = await answer(request, engine.score([tree for tree, _ in read], tokens))
    values = [
        chains(engine.prm, tree, outputs["score"], rule)[0]["score"]
        for (tree, _), outputs in zip(read, found, strict=True)
    ]
    order = sorted(range(len(texts)), key=lambda i: (-values[i], i))[: max(top, 0)]
    results: list[dict[str, Any]] = [{"index": i, "relevance_score": values[i]} for i in order]
    if body.get("return_documents"):
        results = [{**result, "document": {"text": texts[result["index"]]}} for result in results]
    return JSONResponse({"model": engine.name, "results": results, "usage": usage(tokens)})
