"""The server: loads and compiles the models, serves until SIGTERM; its routes, who may call them, what is measured."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any

import prometheus_client
import uvicorn
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, RedirectResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from jprm.apps.serve import ServeConfig, Weights, runs
from jprm.apps.serve.chat import chat
from jprm.apps.serve.engine import Closed, Engine, TextEngine
from jprm.apps.serve.judges import JudgeEngine
from jprm.apps.serve.openrlhf import View, get_reward, read_view
from jprm.apps.serve.pooling import classify, pooling
from jprm.apps.serve.rewards import rewards
from jprm.apps.serve.runs import Runs
from jprm.apps.serve.score import Server, Writer, alternatives, rerank, score, server_of, shutting_down
from jprm.apps.web import text_of_file
from jprm.apps.web.http import HANDLERS, MATH, file_routes, guards, key_of, page_route, timed
from jprm.io.storage import path_of
from jprm.loading import VERIFIER, load
from jprm.methods.cache import PrefixCache
from jprm.methods.judge.load import load_judge
from jprm.methods.policy.load import load_policy
from jprm.methods.policy.protocol import Policy
from jprm.model import Dtype
from jprm.model.mesh import MeshConfig
from jprm.score.scorer import PRM
from jprm.tokenizer import Tokenizer, load_tokenizer
from jprm.tree import read_records

DRAIN_SECONDS = 60
"""How long requests may take to be answered after SIGTERM."""


def serve(
    models: Sequence[str | os.PathLike],
    config: ServeConfig,
    *,
    judges: Sequence[str | os.PathLike] = (),
    view: str | os.PathLike | None = None,
    policy: str | os.PathLike | None = None,
    tokenizers: Sequence[str | os.PathLike] = (),
    calibration: str | os.PathLike | None = None,
    dtype: Dtype | None = None,
    attention: str | None = None,
    adapter: str | None = None,
    weights: Weights = "copied",
    runs: Sequence[str | os.PathLike] = (),
    say: Callable[[str], None] = print,
) -> None:
    """Serves models by their folders' names, and the curves of runs, until SIGTERM or Ctrl-C; answers what it admitted.

    Raises ValueError for an address that others reach without a key, no model and no run, or two models of one name.
    """
    if not models and not judges and not runs:
        raise ValueError("name the folder of a model to serve, or with --run that of a run to show")
    key = key_of(config)
    names, read_by = _named(models, "models"), _named(tokenizers, "tokenizers")
    stems = [path_of(path).stem for path in judges]
    if len({*names, *stems}) < len(names) + len(stems):
        raise ValueError(f"two models or judges have one name: {', '.join([*names, *stems])}. Rename a judge's file")
    prompts = read_view(view) if view else View()
    read_with = {name: load_tokenizer(path) for name, path in zip(read_by, tokenizers, strict=True)}
    writer = load_policy(policy) if policy else None
    shown = Runs(runs) if runs else None
    mesh = MeshConfig(data=-1, fsdp=1) if weights == "copied" else MeshConfig()
    engines = []
    for name, folder in zip(names, models, strict=True):
        if (path_of(folder) / VERIFIER).is_file():
            engines.append(TextEngine(load(folder, None, dtype, adapter, attention), config.longest, name))
            say(engines[-1].prm.read_as)
            continue
        prm = load(folder, mesh, dtype=dtype, adapter=adapter, attention=attention)
        say(f"{prm!r}: compiling")
        lengths = prm.warm_up(config.longest)
        cache = prefix_cache(prm, config.prefix_tokens)
        kept = f"; {cache.slots:,} tokens of prefixes are kept" if cache else ""
        say(f"{name}: compiled for rows of {', '.join(map(str, lengths))} tokens{kept}")
        engines.append(Engine(prm, config.longest, name, cache))
    for stem, path in zip(stems, judges, strict=True):
        engines.append(JudgeEngine(load_judge(path), config.longest, stem))
        say(f"{engines[-1].name}: {engines[-1].prm.name}, scores by critiques")
    known = list(read_records(calibration)) if calibration else None
    app = make_app(engines, config, key, prompts, writer, shown, read_with, known)
    uvicorn.run(app, **listening(config), log_level="info")


def _named(paths: Sequence[str | os.PathLike], what: str) -> list[str]:
    """Returns the name of every path, by which requests name it. Raises ValueError where two are equal."""
    names = [path_of(path).resolve().name for path in paths]
    if len(set(names)) < len(names):
        raise ValueError(f"two {what} have one name: {', '.join(names)}. Rename a folder")
    return names


def listening(config: ServeConfig) -> dict[str, Any]:
    """Returns uvicorn's arguments. Its access log would hold addresses and query strings; /metrics has the counts."""
    return dict(
        host=config.host, port=config.port, http=timed(config.body_seconds), access_log=False, server_header=False,
        timeout_graceful_shutdown=DRAIN_SECONDS, timeout_keep_alive=30,
    )  # fmt: skip


def prefix_cache(prm: PRM, tokens: int) -> PrefixCache | None:
    """Returns a cache of prefixes that is compiled, or None for 0 tokens and for models that cannot have one."""
    try:
        cache = PrefixCache(prm, tokens) if tokens else None
    except NotImplementedError:
        return None
    if cache is not None:
        cache.warm_up()
    return cache


PAGE = {
    "/base.css": "jprm.apps.web:base.css",
    "/app.css": "jprm.apps.web:app.css",
    "/call.js": "jprm.apps.web:call.js",
    "/chain.js": "jprm.apps.web:chain.js",
    "/playground.css": "jprm.apps.serve:playground.css",
    "/playground.js": "jprm.apps.serve:playground.js",
    **MATH,
}
"""The playground's files."""

OPEN = ("/health", "/ready", "/", *PAGE, "/runs", *runs.FILES)
"""Routes that need no key: a load balancer asks them, or they are the page that asks for the key."""


def make_app(
    engines: Sequence[Engine],
    config: ServeConfig,
    key: str | None = None,
    view: View | None = None,
    policy: Policy | None = None,
    shown: runs.Runs | None = None,
    tokenizers: Mapping[str, Tokenizer] | None = None,
    calibration: Sequence[Mapping[str, Any]] | None = None,
) -> Starlette:
    """Returns the application. The engines' programs are to be compiled already: it is ready as soon as it runs.

    Args:
      engines: one a model; the first is the default. Without one there are no routes of scores.
      key: what a client sends as `Authorization: Bearer KEY`; None where no key is needed.
      view: how OpenRLHF's prompts are written.
      policy: what writes the steps of /v1/continue.
      shown: runs whose curves the page /runs shows.
      tokenizers: of the callers of /v1/rewards, by name; the first is the default.
      calibration: results of a search with known answers, by which /v1/chat/completions abstains.
    """
    registry = prometheus_client.CollectorRegistry()
    routes = [
        *(_routes_of_scores(policy, shown) if engines else ()),
        *(_routes_of_runs(bool(engines)) if shown else ()),
        Route("/health", lambda request: PlainTextResponse("ok")),
        Route("/ready", lambda request: PlainTextResponse("ready")),
        Route("/metrics", _metrics),
    ]
    middleware = [
        Middleware(_Measured, registry=registry, paths=[route.path for route in routes]),
        *guards(config, lambda path: None if path in OPEN else key),
    ]
    handlers = {**HANDLERS, Closed: lambda request, error: shutting_down(error).response()}

    @contextlib.asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        yield
        for engine in engines:  # what was admitted has been answered: uvicorn waits for its connections
            engine.close()
        if writer:
            writer.close()

    writer = Writer(policy) if policy else None
    app = Starlette(routes=routes, middleware=middleware, exception_handlers=handlers, lifespan=lifespan)
    app.state.listen, app.state.runs = config, shown
    app.state.server, app.state.view, app.state.registry = (
        Server({engine.name: engine for engine in engines}, config, writer, tokenizers or {}, calibration),
        view or View(),
        registry,
    )
    waiting = prometheus_client.Gauge("jprm_waiting_tokens", "Tokens that wait.", ["model"], registry=registry)
    rate = prometheus_client.Gauge("jprm_tokens_per_second", "Measured rate.", ["model"], registry=registry)
    for engine in engines:
        waiting.labels(engine.name).set_function(lambda engine=engine: engine.waiting_tokens)
        rate.labels(engine.name).set_function(lambda engine=engine: engine.rate)
    return app


def _routes_of_scores(policy: Policy | None, shown: runs.Runs | None) -> list[Route]:
    page = text_of_file("jprm.apps.serve:playground.html").replace("{{ policy }}", "yes" if policy else "no")
    return [
        Route("/v1/score", score, methods=["POST"]),
        Route("/v1/rewards", rewards, methods=["POST"]),
        Route("/v1/rerank", rerank, methods=["POST"]),
        Route("/v1/continue", alternatives, methods=["POST"]),
        Route("/v1/chat/completions", chat, methods=["POST"]),
        Route("/get_reward", get_reward, methods=["POST"]),
        Route("/pooling", pooling, methods=["POST"]),
        Route("/classify", classify, methods=["POST"]),
        Route("/v1/models", _models),
        page_route("/", page.replace("{{ runs }}", '<a href="runs">Runs</a>' if shown else ""), "playground.html"),
        *file_routes(PAGE),
    ]


def _routes_of_runs(playground: bool) -> list[Route]:
    page = text_of_file("jprm.apps.serve:runs.html")
    page = page.replace("{{ playground }}", '<a href=".">Playground</a>' if playground else "")
    return [
        page_route("/runs", page, "runs.html"),
        *([] if playground else [Route("/", lambda request: RedirectResponse("runs"))]),
        *file_routes(runs.FILES),
        Route("/v1/runs", runs.runs),
        Route("/v1/runs/metrics", runs.metrics),
    ]


async def _models(request: Request) -> Response:
    engines = server_of(request).engines
    data = [
        {"id": name, "object": "model", "owned_by": "jprm", "max_model_len": e.longest, "rule": e.prm.rule,
         "semantics": e.prm.semantics, "scale": e.prm.scale.weight, "step": getattr(e.prm, "step", 0)}
        for name, e in engines.items()
    ]  # fmt: skip
    return JSONResponse({"object": "list", "data": data})


async def _metrics(request: Request) -> Response:
    return Response(
        prometheus_client.generate_latest(request.app.state.registry), media_type=prometheus_client.CONTENT_TYPE_LATEST
    )


class _Measured:
    """Counts requests and their seconds by route and status, and nothing of what they hold."""

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
