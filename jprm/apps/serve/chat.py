"""`POST /v1/chat/completions`: answers by a search, for any OpenAI client.

    client.chat.completions.create(model="prm", messages=[...], extra_body={"search": {"method": "beam", "width": 4}})

The `--policy` writes steps, the model scores them, and a method of `jprm search` decides. With `stream`, the answer
begins with progress chunks, which have an empty delta and a field `search`. With `error_rate`, the answer is a refusal
if the conformal filter, calibrated on `--calibrate`, does not accept it.

The search runs in the policy's thread. Its scores come from the engine, which serves other requests in between.
"""

from __future__ import annotations

import asyncio
import dataclasses
import time
import uuid
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Annotated, Any, get_type_hints

import numpy as np
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse

from jprm.apps.serve.call import Call, server_of
from jprm.apps.serve.engine import Engine
from jprm.apps.serve.pieces import InPieces
from jprm.apps.serve.score import EXAMPLE, OF_MODEL, Model, RuleName
from jprm.apps.web.http import LAST_EVENT, Refusal, RequestFields, event, fields_of, json_of, read_request
from jprm.methods.jobs.score import identity
from jprm.methods.messages.free_text import exchange
from jprm.methods.policy.protocol import Problem
from jprm.methods.policy.sample_cache import PolicyError
from jprm.methods.search.growing_tree import METHODS, Choice, GrowingTree, find
from jprm.methods.search.jobs import accept, calibrate, record, way_of
from jprm.methods.search.lockstep import Rescorer, SearchConfig, search
from jprm.options import OptionError, values_of
from jprm.tree import ReasoningTree, path_to

BUDGET, MOST = 8192, 65536
"""Generated tokens of a request: default and maximum."""

AT_ONCE = 256
"""The most samples of one round, since their length may be unknown."""

_ROUNDS = ("n", "simulations", "rounds", "max_steps")
"""Options that limit the length of a search, rather than its samples per round."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ChatRequest(RequestFields):
    """OpenAI's chat completions, answered by a search with the policy and the model's scores."""

    messages: Annotated[Sequence[dict], "One user's message."]
    search: Annotated[dict | None, "method and its options, choose, rule, seed, budget, error_rate, confidence."] = None
    stream: Annotated[bool, "Whether to send progress, and then the answer, as server-sent events."] = False
    stream_options: Annotated[dict | None, "include_usage."] = None
    model: Model = None

    example = {
        "messages": [{"role": "user", "content": EXAMPLE["problem"]}],
        "search": {"method": "best-of-n", "n": 2, "budget": 2000},
    }
    gives = {
        "choices": (Sequence[dict], "The answer."),
        "search": (dict, "The final answer, its score, and tokens."),
        **OF_MODEL,
    }


FRACTION = {"exclusiveMinimum": 0, "exclusiveMaximum": 1}


@dataclasses.dataclass(frozen=True, kw_only=True)
class SearchRequest(RequestFields):
    """The field `search`: these fields and the method's options."""

    method: Annotated[str, "Its name in `METHODS`."] = "best-of-n"
    choose: Annotated[Choice, "As `SearchConfig` has it, like the fields below."] = "weighted"
    rule: RuleName = None
    seed: Annotated[int, {"minimum": 0}] = 0
    budget: Annotated[int, {"minimum": 1, "maximum": MOST}] = BUDGET
    error_rate: Annotated[float | None, FRACTION] = None
    confidence: Annotated[float, FRACTION] = 0.9


async def chat(request: Request) -> Response:
    """Answers a problem with the chain that a search chooses: a chat completion, with further fields in `search`.

    These are `method`, `choose`, `rule`, `answer`, `score`, `ended` and `policy_tokens`; with an `error_rate` also
    `accepted`, `threshold`, `error_rate` and `confidence`. If the search abstains, `content` is null and `refusal` has
    the reason. With `stream`, the answer is a stream of server-sent events; errors after its start are events too.

    Raises Refusal: 400 for an invalid or unsupported request or without a policy, 404 for an unknown model, 413 if it
    is too large, 503 if the server is loading or busy, 502 if the policy fails or writes no step, 504 if it is late,
    and as `json_of`; RecordError for invalid messages.
    """
    body = await json_of(request)
    server = server_of(request)
    writer = server.policy
    for name in _REFUSED:
        if body.get(name):
            raise Refusal(400, f"{name}: a search answers with text, and does not follow it", name)
    if body.get("n") not in (None, 1):
        raise Refusal(400, "n: a search gives one answer; its own n is search.n", "n")
    sent = read_request(ChatRequest, body)
    call = Call(request, sent.model)
    engine = call.engine
    call.check_items([body])
    problem, asked, config = _question(sent, engine)
    if asked.error_rate is not None and server.calibration is None:
        raise Refusal(400, "error_rate needs results with known answers: start the server with --calibrate", "search")
    call.admit()
    loop, progress = asyncio.get_running_loop(), asyncio.Queue()
    future = writer.run(
        lambda policy: _searched(problem, asked, config, policy, engine, server.calibration),
        lambda state: loop.call_soon_threadsafe(progress.put_nowait, state),
    )

    async def result() -> dict[str, Any]:  # late, or the client has gone: the search ends before its next samples
        return await call.answer(future)

    if sent.stream:
        counts = bool(sent.stream_options and sent.stream_options.get("include_usage"))
        events = _events(counts, engine, result, future.cancel, progress)
        return StreamingResponse(events, media_type="text/event-stream")
    reply = await result()
    message = {"role": "assistant", "content": reply["content"], "refusal": reply["refusal"]}
    choice = {"index": 0, "message": message, "finish_reason": reply["finish_reason"], "logprobs": None}
    about = _about(engine, "chat.completion")
    return JSONResponse(about | {"choices": [choice], "usage": reply["usage"], "search": reply["search"]})


async def _events(
    counts: bool, engine: Engine, result: Callable[[], Any], end: Callable[[], Any], progress: asyncio.Queue
) -> AsyncIterator[bytes]:
    """Yields progress while the search runs, then the answer and optionally its usage, as server-sent events."""
    about = _about(engine, "chat.completion.chunk")

    def chunk(delta: dict[str, Any], reason: str | None = None, **more: Any) -> bytes:
        choices = [{"index": 0, "delta": delta, "finish_reason": reason, "logprobs": None}]
        return event(about | {"choices": choices} | more)

    ended = asyncio.ensure_future(result())
    yield chunk({"role": "assistant", "content": ""})
    try:
        while not ended.done():
            state = asyncio.ensure_future(progress.get())
            await asyncio.wait({ended, state}, return_when=asyncio.FIRST_COMPLETED)
            if state.done():
                yield chunk({}, search=state.result())
            else:
                state.cancel()
        answer = ended.result()
        while not progress.empty():  # what came with the end
            yield chunk({}, search=progress.get_nowait())
    except Refusal as refusal:
        yield event(refusal.content)
        return
    finally:
        ended.cancel()
        end()
    delta = {"refusal": answer["refusal"]} if answer["refusal"] else {"content": answer["content"]}
    yield chunk(delta)
    yield chunk({}, answer["finish_reason"], search=answer["search"])
    if counts:
        yield event(about | {"choices": [], "usage": answer["usage"]})
    yield LAST_EVENT


def _about(engine: Engine, kind: str) -> dict[str, Any]:
    return {"id": f"chatcmpl-{uuid.uuid4().hex}", "object": kind, "created": int(time.time()), "model": engine.name}


# ---- What is asked for.

_REFUSED = ("tools", "functions", "logprobs", "response_format", "audio", "modalities")
"""OpenAI fields that a search cannot honour. Sampling options are set in the policy's file."""


def _question(sent: ChatRequest, engine: Engine) -> tuple[str, SearchRequest, SearchConfig]:
    """Parses the problem and the search options."""
    # The checks of an exchange, on an answer that is not there yet
    texts = exchange({"messages": [*sent.messages, {"role": "assistant", "content": "-"}]}, "body")
    if "system" in texts:
        raise Refusal(400, "messages: a system message is set by the policy's own prompt", "messages")
    search = sent.search or {}
    asked = read_request(SearchRequest, search, "search")
    if asked.method not in METHODS:  # a client must not have the server import a file
        raise Refusal(400, f"search.method is {asked.method!r}: use {', '.join(METHODS)}", "search")
    options = {name: value for name, value in search.items() if name not in fields_of(SearchRequest)}
    for key, value in options.items():
        most = asked.budget if key in _ROUNDS else AT_ONCE  # a sample has a token at least
        if type(value) is int and value > most:
            reason = f"at most {most:,} with a budget of {asked.budget:,}"
            raise Refusal(400, f"search.{key} is {value:,}: {reason}", "search")
    method = find(asked.method)
    defaults = {"n": 8} if asked.method == "best-of-n" else {}
    try:
        values_of(get_type_hints(method), options)
        rule = asked.rule or engine.prm.rule
        config = SearchConfig(method(**(defaults | options)), rule, asked.choose, asked.budget, asked.seed)
    except (OptionError, TypeError, ValueError) as error:
        raise Refusal(400, f"search: {error}", "search") from None
    tree = GrowingTree(Problem(texts["user"]), 0, asked.budget, engine.prm.scale, engine.prm.semantics)
    if (first := sum(ask.n for ask in next(config.method.steps(tree, config.rule)))) > AT_ONCE:
        raise Refusal(400, f"search: its first round takes {first:,} samples: at most {AT_ONCE}", "search")
    return texts["user"], asked, config


# ---- The search.


class _Scores:
    """An engine as the scorer of a search; earlier rounds are cached under a key of the search."""

    def __init__(self, engine: Engine):
        self.engine, self.scale, self.semantics = engine, engine.prm.scale, engine.prm.semantics
        self.key, self.tokens = uuid.uuid4().hex, 0

    def score_trees(self, trees: Sequence[ReasoningTree]) -> list[np.ndarray]:
        scores = []
        for tree in trees:
            tokens = self.engine.tokens_of([tree])
            outputs, cached = self.engine.score_cached(tree, tokens, self.key).result()
            self.tokens += tokens - cached
            scores.append(outputs["score"])
        return scores


def _searched(
    problem: str, asked: SearchRequest, config: SearchConfig, policy: InPieces, engine: Engine,
    known: Sequence[Mapping[str, Any]] | None,
) -> dict[str, Any]:  # fmt: skip
    """Runs the search; returns the answer's fields. Raises Refusal if the policy fails or writes no step."""
    scores = _Scores(engine)
    try:
        ((_, tree),) = search([Problem(problem)], policy, Rescorer(scores), config)
    except PolicyError as error:
        raise Refusal(502, f"the policy gave nothing: {error}") from None
    method = config.method
    about = {"method": type(method).__name__, **vars(method), "budget": config.budget, "seed": config.seed}
    about |= {"policy": policy.name, "scorer": dict(identity(engine.prm))}
    result = record(tree, config.rule, config.choose, method.kind, about)
    if result is None:
        raise Refusal(502, f"the policy wrote no step: {tree.error or 'every chain is empty'}")
    verdict = {} if asked.error_rate is None else _accepted(result, known or (), asked)
    outcome = result["search"]
    answered = {key: outcome[key] for key in ("method", "choose", "rule", "answer", "score", "ended", "policy_tokens")}
    refusal, content = outcome.get("reason"), None
    if outcome["chosen"] is not None:
        content = "\n".join(_steps(result))
        if verdict and not verdict["accepted"]:
            refusal, content = "the score is below the threshold that the error rate needs: no answer", None
    tokens = {"prompt_tokens": scores.tokens, "completion_tokens": policy.tokens}
    return {
        "content": content, "refusal": refusal, "finish_reason": "stop" if content is not None else "content_filter",
        "usage": tokens | {"total_tokens": sum(tokens.values())}, "search": answered | verdict,
    }  # fmt: skip


def _steps(result: Mapping[str, Any]) -> list[str]:
    chosen = result["search"]["chosen"]
    if "samples" in result:
        return result["samples"][chosen]["steps"]
    nodes = result["nodes"]
    return [nodes[i]["text"] for i in path_to(chosen, [node["parent"] for node in nodes])]


def _accepted(result: Mapping[str, Any], known: Sequence[Mapping[str, Any]], asked: SearchRequest) -> dict[str, Any]:
    """Returns the verdict of the conformal filter. Raises Refusal if the calibration used a different search."""
    this_way, other = way_of(result, 1), way_of(known[0], 1)
    if differing := sorted(key for key in this_way.keys() | other.keys() if this_way.get(key) != other.get(key)):
        key = differing[0]
        reason = f"is {this_way.get(key)!r}, and {other.get(key)!r} in the calibration"
        raise Refusal(400, f"search.{key} {reason}: a threshold holds for the same search", "search")
    if any(record["problem"] == result["problem"] for record in known):
        raise Refusal(400, "the problem is in the calibration, so that its threshold does not hold", "messages")
    try:
        verdict = accept(result, calibrate(known, asked.error_rate or 0.0, asked.confidence))["search"]
    except ValueError as error:
        raise Refusal(400, f"the calibration: {error}", "search") from None
    return {key: verdict[key] for key in ("accepted", "threshold", "error_rate", "confidence")}
