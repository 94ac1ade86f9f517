"""The labelling server: the page, an annotator's next tasks, and events.

Events are processed one at a time: checked, written to disk, applied, acknowledged. `shown` defines all tree data sent
to the page: never a label or its origin, and scores only in an anchoring study.
"""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
import hmac
import json
import os
import pathlib
import re
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from jprm.apps.annotate.quality import figures, standing, tables
from jprm.apps.annotate.study import EventLog, Study, chance, events_in, open_log, read, scores_of
from jprm.apps.annotate.tasks import Conflict, Reason, Task, Tasks
from jprm.apps.web import Listen, around, text_of_file
from jprm.apps.web.http import (
    HANDLERS,
    MATH,
    Refusal,
    RequestFields,
    file_routes,
    files_of,
    guards,
    json_of,
    key_of,
    listening,
    opened,
    page_route,
    read_request,
    under,
)
from jprm.methods.evaluate.blocks import Table
from jprm.tree import ReasoningTree


def serve(
    folder: str | os.PathLike,
    config: Listen,
    annotators: Sequence[str] = (),
    say: Callable[[str], None] = print,
) -> None:
    """Serves the study in a folder, blocking until SIGTERM; new `annotators` are added to its `study.json`.

    `say` gets one line per annotator's address, one for the study page, and one with counts. If JPRM_API_KEY is set, it
    is the server's key, and each address ends in the annotator's own key. Events are appended to `events.jsonl` in the
    folder.

    Raises ValueError if the folder is not a study or is being served, an annotator's name is invalid, or the address is
    public and there is no key; RecordError for a damaged record or line of events; OSError if the port is taken or a
    file of the study is missing.
    """
    key = key_of(config)
    study = read(folder, annotators)
    with open_log(study.events) as log:
        app = make_app(study, log, config, key)
        socket_ = opened(config)
        host = f"[{config.host}]" if ":" in config.host else config.host
        address = f"http://{host}:{socket_.getsockname()[1]}"
        for name in study.config.annotators:
            secret = f":{key_of_annotator(key, name)}" if key else ""
            say(f"{address}/#{name}{secret}")
        say(f"{address}/study{f'#{key_of_study(key)}' if key else ''} shows how the study stands, only to you")
        counts = ", ".join(f"{len(trees):,} of {pool}" for pool, trees in study.trees.items() if trees)
        say(f"{pathlib.Path(folder)}: {counts}; {len(log.events):,} events so far")
        options = listening(config, log_level="warning", timeout_graceful_shutdown=20)
        server = uvicorn.Server(uvicorn.Config(app, **options))
        server.run(sockets=[socket_])


FILES = files_of("jprm.apps.web", "base.css", "app.css", "chain.js") | MATH
FILES |= files_of("jprm.apps.annotate", "annotate.css", "annotate.js", "study.css", "study.js")
PERSONAL = re.compile(r"/v1/annotators/([\w.-]{1,64})/", re.ASCII)
LONGEST_COMMENT = 2000


def make_app(
    study: Study, log: EventLog, config: Listen, key: str | None = None, clock: Callable[[], float] = time.time
) -> Starlette:
    """Builds the application on the study's stored events (`log.events`); starts no server.

    With a `key`, each route under /v1/ needs a bearer key: `key_of_annotator` for an annotator's routes, `key_of_study`
    for /v1/study. `clock` returns the seconds since 1970 that events are stamped with.

    Raises Conflict if the stored events contradict each other.
    """

    def expected(path: str) -> str | None:
        if key is None or not path.startswith("/v1/"):
            return None  # the page itself holds nothing of the study
        if path == "/v1/study":
            return key_of_study(key)
        personal = PERSONAL.match(path)
        return key_of_annotator(key, personal[1] if personal else "")

    name = hashlib.sha256(study.salt.encode()).hexdigest()[:12]  # keeps studies on one address apart in a browser
    page = text_of_file("jprm.apps.annotate:annotate.html").replace("{{ study }}", name)
    routes = [
        page_route("/", page, "annotate.html"),
        page_route("/guidelines.txt", study.guidelines, "guidelines.txt"),
        *file_routes(FILES),
        Route("/v1/annotators/{annotator}/next", _next, methods=["POST"]),
        Route("/v1/annotators/{annotator}/events", _event, methods=["POST"]),
        page_route("/study", text_of_file("jprm.apps.annotate:study.html"), "study.html"),
        Route("/v1/study", _study),
        Route("/health", lambda request: PlainTextResponse("ok")),
    ]
    app = Starlette(routes=routes, middleware=[*under(config), *guards(config, expected)], exception_handlers=HANDLERS)
    app.state.listen, app.state.clock = config, clock
    app.state.tasks, app.state.log, app.state.one_at_a_time = Tasks(study, log.events), log, asyncio.Lock()
    app.state.one_report = asyncio.Lock()
    return app


def key_of_annotator(key: str, annotator: str) -> str:
    """Derives an annotator's key, 32 hex digits, from the server's key, without revealing it."""
    return hmac.new(key.encode(), f"annotator {annotator}".encode(), "sha256").hexdigest()[:32]


def key_of_study(key: str) -> str:
    """Derives the key, 32 hex digits, of the study's page, which shows label quality and is hidden from annotators."""
    return hmac.new(key.encode(), b"study", "sha256").hexdigest()[:32]


async def _study(request: Request) -> Response:
    """Returns the current report and each annotator's progress, read from the file of events. Read-only."""
    state = request.app.state
    study: Study = state.tasks.study

    def report() -> dict[str, Any]:
        tasks = Tasks(study, events_in(study.events))
        about = {"name": study.folder.name} | figures(tasks) | {"standing": standing(tasks, state.clock())}
        blocks = list(tables(about))
        (table,) = (block for block in blocks if isinstance(block, Table))
        sentences = [block for block in blocks if isinstance(block, str)]
        return about | {"said": sentences, "table": {"columns": table.columns, "rows": table.lines}}

    async with state.one_report:  # one report at a time; annotators never wait for it
        return JSONResponse(await asyncio.to_thread(report))


def shown(tasks: Tasks, task: Task) -> dict[str, Any]:
    """Returns the page's data for a task, as JSON data: the texts, and the annotator's own input.

    - `task`: its id. `problem`: a text. `steps`: the text of every node to rate; steps are 0-based indices into it.
    - `after`: lists of alternatives (steps), after the problem and after every step, in a random order per annotator,
      because the record's order may reflect a model.
    - `acts`: [step, rating] pairs, in order; the rating is -1, 0 or 1, or null for a choice. `finish`: a `Reason` or
      null.
    - `flagged`: a boolean. `comments`: [{"step", "text"}, ...]. `written`: the annotator's own step, or "".
    - `scores`: one per step, with two decimals; only if the task shows scores (`Tasks.anchored`).
    - `around`: the messages around each turn (`jprm.apps.web.around`), and `tools` (`tool_texts`); only for
      trajectories.

    Raises ValueError if scores are shown and one is missing.
    """
    whole = tasks.study.trees[task.pool][task.index]
    tree, names = tasks.tree(task), (tasks.study.config.seed, "order", task.annotator, task.pool, task.index)
    return {
        "task": task.id,
        "problem": tree.problem,
        "steps": [node.text for node in tree.nodes],
        "after": [
            sorted(siblings, key=lambda i: chance(*names, i)) for siblings in tasks.alternatives[task.pool][task.index]
        ],
        "acts": [[act.step, act.rating] for act in task.acts],
        "finish": task.finish,
        "flagged": task.flagged,
        "comments": task.comments,
        "written": task.written,
        **({"scores": [round(score, 2) for score in scores_of(tree)]} if tasks.anchored(task) else {}),
        **({"around": around(whole), "tools": tool_texts(whole)} if whole.of_messages else {}),
    }


def tool_texts(tree: ReasoningTree) -> list[tuple[str, str]]:
    """Returns each tool's (name, JSON schema as indented text) in a message tree; [] without tools."""
    schemas = [tool.get("function", tool) for tool in tree.tools]
    return [(schema["name"], json.dumps(schema, ensure_ascii=False, indent=1)) for schema in schemas]


async def _next(request: Request) -> Response:
    """Opens tasks until the annotator has enough; returns them, and the last finished one for undo."""
    await json_of(request)
    annotator, state = _annotator(request), request.app.state
    tasks: Tasks = state.tasks
    async with state.one_at_a_time:
        while event := tasks.next(annotator, state.clock()):
            await _store(state, event)
    opened = tasks.opened_by(annotator)
    finished = [task for task in opened if task.finish]
    screening = tasks.screening(annotator)
    if screening["passed"] is None:
        del screening["right"]  # it would reveal the labels
    return JSONResponse(
        {
            "tasks": [shown(tasks, task) for task in opened if not task.finish],
            "previous": shown(tasks, max(finished, key=lambda task: task.touched)) if finished else None,
            "finished": len(finished),
            "in_study": len(tasks.study.trees["work"]),
            "screening": screening,
        }
    )


async def _event(request: Request) -> Response:
    """Stores one event. A duplicate is acknowledged again."""
    state = request.app.state
    event = read_event(await json_of(request), _annotator(request), state.clock())
    async with state.one_at_a_time:
        try:
            known = state.tasks.known(event)
            task = None if known else state.tasks.after(event)
        except Conflict as error:
            raise Refusal(409, str(error)) from None
        if task is not None:
            steps, step = len(state.tasks.tree(task).nodes), event.get("step")
            if step is not None and step >= steps:  # refused only here: older studies may have comments on such
                raise Refusal(400, f"step {step} does not exist: the task has steps 0 to {steps - 1}", "step")
            await _store(state, event)
    return JSONResponse({"acknowledged": event["uuid"]})


async def _store(state: Any, event: Mapping[str, Any]) -> None:
    try:
        await asyncio.to_thread(state.log.append, event)
    except OSError as error:
        reason = error.strerror or error
        raise Refusal(507, f"the server could not store this: {reason}. Nothing that it confirmed is lost") from None
    state.tasks.apply(event)


def _annotator(request: Request) -> str:
    name = request.path_params["annotator"]
    if name not in request.app.state.tasks.study.config.annotators:
        raise Refusal(404, f"there is no annotator {name!r} in this study", "annotator")
    return name


@dataclasses.dataclass(frozen=True, kw_only=True)
class EventRequest(RequestFields):
    """A client's event. Its kind determines the optional fields (`FIELDS`)."""

    kind: str
    uuid: str
    task: str
    step: Annotated[int | None, {"minimum": 0}] = None
    rating: Annotated[int | None, {"minimum": -1, "maximum": 1}] = None
    seconds: Annotated[float | None, {"minimum": 0, "maximum": 86400}] = None
    on: bool | None = None
    text: str | None = None
    reason: Reason | None = None


FIELDS = {
    "rate": ("step", "rating", "seconds"),
    "choose": ("step", "seconds"),
    "undo": ("step",),
    "flag": ("on",),
    "comment": ("step", "text"),
    "write": ("text", "seconds"),
    "finish": ("reason", "seconds"),
}
"""Fields per kind of event. A null step stands for the whole chain, or for no step."""


def read_event(body: Mapping[str, Any], annotator: str, now: float) -> dict[str, Any]:
    """Validates a client's event for storage.

    Returns a new dict: `uuid` (8 to 64 ASCII letters, digits, `_` and `-`), `kind`, `annotator`, `task`, the kind's
    fields (`FIELDS`; an absent `step` is `None`), and `time`, which is `now`. Seconds are rounded to milliseconds,
    texts stripped. Whether task and step exist is not checked.

    Raises Refusal (400) with the field that is unknown, absent or wrong.
    """
    asked = read_request(EventRequest, body)
    if asked.kind not in FIELDS:
        raise Refusal(400, f"kind is one of {', '.join(FIELDS)}", "kind")
    if not re.fullmatch(r"[\w-]{8,64}", asked.uuid, re.ASCII) or asked.uuid.startswith("open-"):
        raise Refusal(400, "uuid has other than 8 to 64 letters, digits and dashes", "uuid")
    event: dict[str, Any] = {"uuid": asked.uuid, "kind": asked.kind, "annotator": annotator, "task": asked.task}
    event |= {name: getattr(asked, name) for name in FIELDS[asked.kind]}
    if unknown := sorted(body.keys() - event.keys()):
        raise Refusal(400, f"{unknown[0]} is unknown for {asked.kind}", unknown[0])
    if absent := [name for name, value in event.items() if value is None and name != "step"]:
        raise Refusal(400, f"{absent[0]} is absent", absent[0])
    if "seconds" in event:
        event["seconds"] = round(event["seconds"], 3)
    if "text" in event:
        event["text"] = event["text"].strip()
        if len(event["text"]) > LONGEST_COMMENT or asked.kind == "comment" and not event["text"]:
            raise Refusal(
                400, f"text has at most {LONGEST_COMMENT:,} characters, and of a comment at least one", "text"
            )
    return event | {"time": now}
