"""`/openapi.json` and `/docs`: every route with its fields, its answer and an example, from the requests' types."""

from __future__ import annotations

import dataclasses
import json
import re
import types
import typing
from collections.abc import Mapping, Sequence
from dataclasses import MISSING
from typing import Any

import jinja2

import jprm
from jprm.apps.serve.chat import ChatRequest
from jprm.apps.serve.openrlhf import QueriesRequest
from jprm.apps.serve.pooling import ClassifyRequest, PoolingRequest
from jprm.apps.serve.rewards import RewardsRequest
from jprm.apps.serve.runs import LinesRequest
from jprm.apps.serve.score import ContinueRequest, RerankRequest, ScoreRequest
from jprm.apps.web import text_of_file
from jprm.apps.web.http import RequestFields, fields_of

Schema = dict[str, Any]

POST: dict[str, type[RequestFields]] = {
    "/v1/score": ScoreRequest,
    "/v1/rewards": RewardsRequest,
    "/v1/rerank": RerankRequest,
    "/v1/continue": ContinueRequest,
    "/v1/chat/completions": ChatRequest,
    "/get_reward": QueriesRequest,
    "/pooling": PoolingRequest,
    "/classify": ClassifyRequest,
}


@dataclasses.dataclass(frozen=True)
class Operation:
    """What a route does, in a sentence; fields of its answer, {} where it is no JSON; and what it takes."""

    summary: str
    gives: Mapping[str, tuple[Any, str]] = dataclasses.field(default_factory=dict)
    takes: type[RequestFields] | None = None


GET: dict[str, Operation] = {
    "/v1/models": Operation(
        "The models and judges.",
        {"object": (str, "Always list."), "data": (Sequence[dict], "id, rule, scale and more.")},
    ),
    "/v1/models/{name}": Operation("A model or judge.", {"id": (str, "Its name."), "rule": (str, "Its own rule.")}),
    "/v1/runs": Operation("Runs whose curves are shown.", {"data": (Sequence[dict], "id, experiment, steps.")}),
    "/v1/runs/metrics": Operation(str(LinesRequest.__doc__), LinesRequest.gives, LinesRequest),
    "/health": Operation("Whether the server lives."),
    "/ready": Operation(
        "Whether every model scores: 200, or 503 with the reason.",
        {
            "ready": (bool, "Whether scores can be asked for."),
            "reason": (str, "Why not."),
            "left": (Sequence[str], "What is still to be compiled."),
            "models": (dict, "Of each what is compiled, in seconds by the length of rows."),
        },
    ),
    "/metrics": Operation("Counters and times, for Prometheus."),
}


def document(paths: Sequence[str], key: bool, root_path: str = "") -> dict[str, Any]:
    """Returns the OpenAPI 3.1 document of the routes in `paths`, under `root_path`; `key`: whether clients need one."""
    posts = {path: Operation(str(asked.__doc__), asked.gives, asked) for path, asked in POST.items()}
    described: dict[str, dict[str, Any]] = {}
    for verb, operations in (("post", posts), ("get", GET)):
        for path, operation in operations.items():
            if path in paths:
                described.setdefault(path, {})[verb] = _operation(path, verb, operation)
    error = {"type": "object", "properties": {name: {} for name in ("message", "type", "param", "code")}}
    components: dict[str, Any] = {"schemas": {"Error": {"type": "object", "properties": {"error": error}}}}
    about = {
        "openapi": "3.1.0",
        "info": {
            "title": "jprm serve",
            "version": jprm.__version__,
            "description": "Scores of process reward models over HTTP. Errors have OpenAI's form.",
        },
        "paths": described,
        "components": components,
    }
    if root_path:
        about["servers"] = [{"url": root_path}]
    if key:
        components["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
        about["security"] = [{"key": []}]
    return about


def _operation(path: str, verb: str, operation: Operation) -> dict[str, Any]:
    gives = {name: schema_of(kind) | {"description": text} for name, (kind, text) in operation.gives.items()}
    text = {"text/plain": {"schema": {"type": "string"}}}
    described: dict[str, Any] = {
        "operationId": re.sub(r"\W+", "_", f"{verb}{path}").rstrip("_"),
        "summary": operation.summary,
        "responses": {"200": {"description": "The answer.", "content": _json(_object(gives)) if gives else text}},
    }
    fields = fields_of(operation.takes) if operation.takes else {}
    takes = {
        name: schema_of(*kinds) | dict(about) | ({} if default in (MISSING, None, "", ()) else {"default": default})
        for name, (kinds, about, default) in fields.items()
    }
    required = [name for name, (_, _, default) in fields.items() if default is MISSING]
    if verb == "get":
        takes |= {name: {"type": "string"} for name in re.findall(r"{(\w+)}", path)}
        described["parameters"] = [
            {"name": name, "in": "path" if f"{{{name}}}" in path else "query", "schema": schema}
            | {"required": name in required or f"{{{name}}}" in path}
            for name, schema in takes.items()
        ]
    elif operation.takes:
        body = _object(takes) | {"required": required, "additionalProperties": not operation.takes.closed}
        error = {"description": "An error.", "content": _json({"$ref": "#/components/schemas/Error"})}
        described["requestBody"] = {"required": True, "content": _json(body, example=operation.takes.example)}
        described["responses"]["default"] = error
    return described


def _json(schema: Schema, **more: Any) -> dict[str, Any]:
    return {"application/json": {"schema": schema, **more}}


def _object(properties: Mapping[str, Schema]) -> Schema:
    return {"type": "object", "properties": properties}


_NAMES = {str: "string", int: "integer", float: "number", bool: "boolean", dict: "object", type(None): "null"}


def schema_of(kind: Any, *others: Any) -> Schema:
    """Returns the JSON schema of a type, or of any of several."""
    if others:
        return {"anyOf": list(map(schema_of, (kind, *others)))}
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if origin is typing.Literal:
        return {"enum": list(args)}
    if origin in (typing.Union, types.UnionType):
        return schema_of(*args)
    if origin is Sequence:
        return {"type": "array", "items": schema_of(*args)}
    return {} if kind is Any else {"type": _NAMES[kind]}


def page(document: Mapping[str, Any]) -> str:
    """Returns the document as a page that loads nothing from elsewhere and runs nothing."""
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.ChainableUndefined, trim_blocks=True)
    environment.filters |= {"kind": _kind, "json": json.dumps, "named": _named}
    template = environment.from_string(text_of_file("jprm.apps.serve:docs.html"))
    return template.render(version=document["info"]["version"], paths=document["paths"])


def _named(parameters: Sequence[Mapping[str, Any]]) -> dict[str, Schema]:
    return {parameter["name"]: parameter["schema"] for parameter in parameters}


def _kind(schema: Schema) -> str:
    if "enum" in schema:
        return " or ".join(map(str, schema["enum"]))
    if "anyOf" in schema:
        return " or ".join(map(_kind, schema["anyOf"]))
    if schema.get("type") == "array":
        return f"list of {_kind(schema['items'])}"
    return schema.get("type", "any")
