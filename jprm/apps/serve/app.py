"""The server: routes, access and metrics.

The port opens first. Then the models are loaded; while they compile, requests that can already be answered are served.
SIGTERM ends the server.
"""

from __future__ import annotations

import contextlib
import gc
import json
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from typing import Any

import prometheus_client
import uvicorn
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from jprm.apps.serve import ServeConfig, Served, openapi
from jprm.apps.serve.call import Server, Writer, server_of
from jprm.apps.serve.chat import ChatRequest, chat
from jprm.apps.serve.engine import Engine, TextEngine
from jprm.apps.serve.judges import JudgeEngine
from jprm.apps.serve.openapi import Operation, posted
from jprm.apps.serve.openrlhf import QueriesRequest, View, get_reward, read_view
from jprm.apps.serve.pooling import ClassifyRequest, PoolingRequest, classify, pooling
from jprm.apps.serve.rewards import RewardsRequest, rewards
from jprm.apps.serve.score import ContinueRequest, RerankRequest, ScoreRequest, alternatives, rerank, score
from jprm.apps.web import text_of_file
from jprm.apps.web.http import (
    HANDLERS,
    MATH,
    file_routes,
    files_of,
    guards,
    key_of,
    listening,
    opened,
    page_route,
    under,
)
from jprm.io.storage import path_of
from jprm.loading import VERIFIER, load
from jprm.methods.decoding.cache import PrefixCache
from jprm.methods.formats.hub import name_of
from jprm.methods.judge import is_judge
from jprm.methods.judge.load import load_judge_of_steps
from jprm.methods.policy.load import load_policy
from jprm.methods.policy.protocol import Policy
from jprm.model.mesh import MeshConfig
from jprm.options import place_of
from jprm.score.scorer import PRM
from jprm.tokenizer import Tokenizer, load_tokenizer
from jprm.tree import read_records

DRAIN_SECONDS = 60
"""Time to finish open requests after SIGTERM."""

SWITCH_SECONDS = 0.001
"""The thread switch interval, a fifth of Python's default, so that reading a large request does not block others."""


def serve(config: Served, say: Callable[[str], None] = print) -> None:
    """Serves models under their folders' names, blocking until SIGTERM or Ctrl-C; finishes all admitted requests.

    The port opens at once; models load and compile in threads meanwhile, and `say` gets a line as each is ready. If
    JPRM_API_KEY is set, clients must send it.

    Raises ValueError if the address is public but no key is set, no model is named, or two models share a name; OSError
    if the port is unavailable. An error of loading (e.g. FileNotFoundError, RecordError) ends the server and is raised.
    """
    if not config.model:
        raise ValueError("name the folder of a model to serve, or a judge's JSON file")
    key = key_of(config)
    names, read_by = (
        [path_of(path).stem if is_judge(path) else name_of(place_of(path).resolve()) for path in config.model],
        [name_of(place_of(path).resolve()) for path in config.tokenizer],
    )
    for what, called in {"models or judges": names, "tokenizers": read_by}.items():
        if len(set(called)) < len(called):
            raise ValueError(f"two {what} have one name: {', '.join(called)}. Rename a folder, or a judge's file")
    mesh = MeshConfig(data=-1, fsdp=1) if config.weights == "copied" else MeshConfig()
    options: dict[str, Any] = {"dtype": config.dtype, "adapter": config.adapter, "attention": config.attention}

    def load_all() -> None:
        prompts = read_view(config.view) if config.view else View()
        read_with = {name: load_tokenizer(path) for name, path in zip(read_by, config.tokenizer, strict=True)}
        known = list(read_records(config.calibration)) if config.calibration else None
        engines = []
        for name, folder in zip(names, config.model, strict=True):
            if is_judge(folder):
                engines.append(JudgeEngine(load_judge_of_steps(folder), config.longest, name))
                say(f"{name}: {engines[-1].prm.name}, scores by critiques")
                continue
            if (place_of(folder) / VERIFIER).is_file():
                engines.append(TextEngine(load(folder, None, **options), config.longest, name))
                say(engines[-1].prm.read_as)
                continue
            prm = load(folder, mesh, **options)
            cache = prefix_cache(prm, config.prefix_tokens)
            kept = f"; {cache.slots:,} tokens of prefixes are kept" if cache else ""
            say(f"{name}: {prm!r}{kept}")
            engines.append(Engine(prm, config.longest, name, cache))
        begin(app, engines, prompts, load_policy(config.policy) if config.policy else None, read_with, known)
        gc.freeze()  # loaded objects stay: collecting them during a large request would block all others
        for engine in engines:
            engine.warm_up(say)

    app = _application(config, key, bool(config.policy))
    server, failure = uvicorn.Server(uvicorn.Config(app, **serving(config))), []

    def load_or_end() -> None:
        try:
            load_all()
        except BaseException as error:
            failure.append(error)
            server.should_exit = True

    sys.setswitchinterval(SWITCH_SECONDS)
    app.state.when_open = threading.Thread(target=load_or_end, name="jprm loading", daemon=True).start
    server.run()
    if failure:
        raise failure[0]


def serving(config: ServeConfig) -> dict[str, Any]:
    """Returns keyword arguments of `uvicorn.Config` (`listening`, and time limits).

    Raises OSError if the port is unavailable, which is tried by opening it for a moment.
    """
    opened(config).close()
    return listening(config, timeout_graceful_shutdown=DRAIN_SECONDS, timeout_keep_alive=30)


def prefix_cache(prm: PRM, tokens: int) -> PrefixCache | None:
    """Returns an empty cache for `tokens` tokens of prefixes, allocated on the device.

    Returns `None` if `tokens` is 0 or the model does not support one, e.g. an implicit PRM.
    """
    try:
        return PrefixCache(prm, tokens) if tokens else None
    except NotImplementedError:
        return None


PAGE = files_of(
    "jprm.apps.web", "base.css", "app.css", "call.js", "chain.js", "markdown.js", "markdown/markdown-it.min.js"
)
PAGE |= files_of("jprm.apps.serve", "playground.css", "playground.js") | MATH
"""Files of the playground."""

DOCS = files_of("jprm.apps.web", "base.css", "app.css") | files_of("jprm.apps.serve", "docs.css")
"""The files of the routes page."""

OPEN = ("/health", "/ready", "/", *PAGE, "/openapi.json", "/docs", "/docs.css")
"""Routes without a key: health checks for load balancers, and pages without data (the playground asks for the key)."""


def make_app(
    engines: Sequence[Engine],
    config: ServeConfig,
    key: str | None = None,
    view: View | None = None,
    policy: Policy | None = None,
    tokenizers: Mapping[str, Tokenizer] | None = None,
    calibration: Sequence[Mapping[str, Any]] | None = None,
) -> Starlette:
    """Builds the application for engines that are ready to score; starts no server.

    Its shutdown closes the engines, which ends their threads.

    Args:
      engines: one per model; the first is the default. Of two with one name the last is used.
      key: if given, clients must send `Authorization: Bearer KEY`, except on the routes in `OPEN`.
      view: the format of OpenRLHF's prompts; by default the prompt is the problem.
      policy: writes the steps for /v1/continue and /v1/chat/completions, which answer 400 without it.
      tokenizers: of the clients of /v1/rewards, by name; the first is the default.
      calibration: search results with known answers, which /v1/chat/completions uses to abstain.
    """
    app = _application(config, key, policy is not None)
    begin(app, engines, view or View(), policy, tokenizers or {}, calibration)
    return app


def begin(
    app: Starlette,
    engines: Sequence[Engine],
    view: View,
    policy: Policy | None,
    tokenizers: Mapping[str, Tokenizer],
    calibration: Sequence[Mapping[str, Any]] | None,
) -> None:
    """Attaches the engines and options to an application, whose routes answer 503 until then; see `make_app`.

    With a policy, starts its thread (`Writer`).
    """
    by_name = {engine.name: engine for engine in engines}
    app.state.view = view
    app.state.server = Server(by_name, app.state.listen, Writer(policy) if policy else None, tokenizers, calibration)


def _application(config: ServeConfig, key: str | None, policy: bool) -> Starlette:
    """Builds the application without engines: scoring routes answer 503 until `begin` is called."""
    registry = prometheus_client.CollectorRegistry()
    described = operations()
    document = openapi.document(described, key is not None, config.root_path)
    playground = text_of_file("jprm.apps.serve:playground.html").replace("{{ policy }}", "yes" if policy else "no")
    pages = [page_route("/", playground, "playground.html"), *file_routes(PAGE)]
    routes = [
        *(Route(path, about.answer, methods=[about.verb.upper()]) for path, about in described.items()),
        *pages,
        page_route("/openapi.json", json.dumps(document), "openapi.json"),
        page_route("/docs", openapi.page(document), "docs.html"),
        *file_routes({name: file for name, file in DOCS.items() if name not in [page.path for page in pages]}),
    ]
    middleware = [
        *under(config),
        Middleware(_Measured, registry=registry, paths=[route.path for route in routes]),
        *guards(config, lambda path: None if path in OPEN else key),
    ]

    @contextlib.asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        app.state.when_open()
        yield
        if server := app.state.server:  # all admitted requests are answered: uvicorn waits for its connections
            for engine in server.engines.values():
                engine.close()
            if server.writer:
                server.writer.close()

    app = Starlette(routes=routes, middleware=middleware, exception_handlers=HANDLERS, lifespan=lifespan)
    app.state.listen, app.state.registry = config, registry
    app.state.server, app.state.when_open = None, lambda: None
    registry.register(_EngineCounters(app))
    return app


def operations() -> dict[str, Operation]:
    every = {
        "/health": Operation(lambda request: PlainTextResponse("ok"), "Whether the server lives."),
        "/ready": Operation(_ready, "Whether every model scores: 200, or 503 with the reason.", READY),
        "/metrics": Operation(_metrics, "Counters and times, for Prometheus."),
    }
    of_models = {
        "/v1/score": posted(score, ScoreRequest),
        "/v1/rewards": posted(rewards, RewardsRequest),
        "/v1/rerank": posted(rerank, RerankRequest),
        "/v1/continue": posted(alternatives, ContinueRequest),
        "/v1/chat/completions": posted(chat, ChatRequest),
        "/get_reward": posted(get_reward, QueriesRequest),
        "/pooling": posted(pooling, PoolingRequest),
        "/classify": posted(classify, ClassifyRequest),
        "/v1/models": Operation(
            _models,
            "The models and judges.",
            {"object": (str, "Always list."), "data": (Sequence[dict], "id, rule, scale and more.")},
        ),
        "/v1/models/{name}": Operation(
            _model, "A model or judge.", {"id": (str, "Its name."), "rule": (str, "Its own rule.")}
        ),
    }
    return of_models | every


async def _models(request: Request) -> Response:
    return JSONResponse({"object": "list", "data": list(map(_about, server_of(request).engines.values()))})


async def _model(request: Request) -> Response:
    return JSONResponse(_about(server_of(request).engine(request.path_params["name"])))


def _about(engine: Engine) -> dict[str, Any]:
    prm = engine.prm
    return {
        "id": engine.name, "object": "model", "owned_by": "jprm", "max_model_len": engine.longest, "rule": prm.rule,
        "semantics": prm.semantics, "scale": prm.scale.weight, "step": getattr(prm, "step", 0),
    }  # fmt: skip


READY: dict[str, tuple[Any, str]] = {
    "ready": (bool, "Whether scores can be asked for."),
    "reason": (str, "Why not."),
    "left": (Sequence[str], "What is still to be compiled."),
    "models": (dict, "Of each what is compiled, in seconds by the length of rows."),
}


async def _ready(request: Request) -> Response:
    """Answers 200 if every model can score, else 503 with the reason; both list the compiled programs."""
    server: Server | None = request.app.state.server
    if server is None:
        return JSONResponse({"ready": False, "reason": "the models are loading", "left": ["loading"]}, 503)
    models, reasons, left = {}, [], []
    for name, engine in server.engines.items():
        programs, reason = engine.programs, engine.unready()
        compiled = {str(tokens): round(seconds, 3) for tokens, seconds in sorted(programs.seconds.items())}
        models[name] = {
            "ready": not reason, "compiled": compiled, "left": programs.left, "prefixes": programs.prefixes,
            **({"failed": {str(tokens): why for tokens, why in programs.failed.items()}} if programs.failed else {}),
        }  # fmt: skip
        reasons += [f"{name}: {reason}"] if reason else []
        left += [f"{name}: {tokens}" for tokens in programs.left]
        left += [] if programs.prefixes else [f"{name}: prefixes"]
    content = {"ready": not reasons, "reason": "; ".join(reasons), "left": left, "models": models}
    return JSONResponse(content, 503 if reasons else 200)


async def _metrics(request: Request) -> Response:
    return Response(
        prometheus_client.generate_latest(request.app.state.registry), media_type=prometheus_client.CONTENT_TYPE_LATEST
    )


class _EngineCounters(prometheus_client.registry.Collector):
    """Exports the counters of every engine, and the work that is waiting."""

    def __init__(self, app: Starlette):
        self.app = app

    def collect(self) -> Iterator[Metric]:
        engines = self.app.state.server.engines.values() if self.app.state.server else ()
        for name, text in {
            "tokens": "Tokens computed, equal steps after equal steps once, without padding.",
            "cached_tokens": "Tokens that were not computed again: those of kept prefixes.",
            "trees": "Chains, pools and trees scored.",
            "batches": "Batches that ran on the device.",
            "device_seconds": "Seconds in which the device ran batches.",
            "failures": "Chains, pools and trees whose scores failed.",
        }.items():
            counter = CounterMetricFamily(f"jprm_{name}", text, labels=["model"])
            for engine in engines:
                counter.add_metric([engine.name], engine.counts[name])
            yield counter
        compiling = CounterMetricFamily("jprm_compile_seconds", "Seconds of compiling.", labels=["model"])
        waiting = GaugeMetricFamily("jprm_waiting_tokens", "Tokens of the work that waits.", labels=["model"])
        for engine in engines:
            compiling.add_metric([engine.name], sum(engine.programs.seconds.values()))
            waiting.add_metric([engine.name], engine.waiting_tokens)
        yield from (compiling, waiting)


class _Measured:
    """Measures request times by route and status; never records request content."""

    def __init__(self, app: ASGIApp, registry: prometheus_client.CollectorRegistry, paths: Sequence[str]):
        self.app, self.paths = app, paths
        self.seconds = prometheus_client.Histogram(
            "jprm_request_seconds", "Time from the request to the end of its answer.", ["route", "status"],
            registry=registry, buckets=(0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100),
        )  # fmt: skip

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        began, status = time.monotonic(), 500

        async def watched(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self.app(scope, receive, watched)
        finally:
            known = scope["path"] if scope["path"] in self.paths else "other"
            self.seconds.labels(known, status).observe(time.monotonic() - began)
