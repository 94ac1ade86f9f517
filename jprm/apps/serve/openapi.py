"""`/openapi.json` and `/docs`: routes with fields, answers and examples, generated from the request types."""

from __future__ import annotations

import dataclasses
import json
import re
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING
from typing import Any, Literal

import jinja2
from starlette.requests import Request

import jprm
from jprm.apps.web import text_of_file
from jprm.apps.web.http import RequestFields, fields_of

Schema = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Operation:
    """One HTTP route: handler, one-line summary, response fields (`{}` if not JSON), and request type.

    A route with a request body must be a POST.
    """

    answer: Callable[[Request], Any]
    summary: str
    gives: Mapping[str, tuple[Any, str]] = dataclasses.field(default_factory=dict)
    takes: type[RequestFields] | None = None
    verb: Literal["get", "post"] = "get"


def posted(answer: Callable[[Request], Any], takes: type[RequestFields]) -> Operation:
    """Builds a POST operation.

    The summary is the docstring of the request type, and its `gives` are the answer's fields.
    """
    return Operation(answer, str(takes.__doc__), takes.gives, takes, "post")


def document(operations: Mapping[str, Operation], key: bool, root_path: str = "") -> dict[str, Any]:
    """Returns the OpenAPI 3.1 document of operations by path, as JSON data.

    `key`: whether clients need a key. `root_path` is its server's URL, e.g. /prm; the paths are unchanged.
    """
    described = {path: {operation.verb: _operation(path, operation)} for path, operation in operations.items()}
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


def _operation(path: str, operation: Operation) -> dict[str, Any]:
    verb = operation.verb
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
    """Returns the JSON schema of a type, or of a union if there are `others`; {} for Any.

    E.g. `Sequence[str]` gives {"type": "array", "items": {"type": "string"}}, a Literal {"enum": [...]}, a union
    {"anyOf": [...]}. Raises KeyError for a type that JSON lacks.
    """
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
    """Renders the document (`document`) as static HTML, without scripts or external resources."""
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
