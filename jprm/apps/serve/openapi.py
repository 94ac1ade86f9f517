"""`/openapi.json` and `/docs`: every route with its fields, its answer and an example.

Nothing reads requests by what is written here: a test sends every example, and compares routes and answers.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

import jinja2

import jprm
from jprm.apps.web import text_of_file
from jprm.score.scale import RULES

Schema = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Operation:
    """What a route takes and gives.

    Attributes:
      summary: what it does, in a sentence.
      takes: fields of the JSON body, or of the query of a GET: name to (schema, what it is).
      required: those without which there is nothing to do.
      example: a body that the server answers.
      gives: fields of the answer; {} where it is no JSON.
      content: the type of the answer.
    """

    summary: str
    takes: Mapping[str, tuple[Schema, str]] = dataclasses.field(default_factory=dict)
    required: Sequence[str] = ()
    example: Mapping[str, Any] | None = None
    gives: Mapping[str, tuple[Schema, str]] = dataclasses.field(default_factory=dict)
    content: str = "application/json"


def _list(of: Schema) -> Schema:
    return {"type": "array", "items": of}


TEXT: Schema = {"type": "string"}
WHOLE: Schema = {"type": "integer", "minimum": 0}
NUMBER: Schema = {"type": "number"}
SCORE: Schema = {"type": ["number", "null"]}
FLAG: Schema = {"type": "boolean"}
OBJECT: Schema = {"type": "object"}
ANY: Schema = {}

MODEL = {"model": (TEXT, "The name of a model or judge; absent, the first one.")}
RULE = {
    "rule": ({"type": "string", "enum": list(RULES)}, "What makes a chain's score of its steps'; absent, the model's.")
}
CALLER = {"prompt_cache_key": (TEXT, "Names the caller: only tokens that no earlier request of it had are computed.")}
USAGE = {"usage": (OBJECT, "prompt_tokens and total_tokens; a prefix that chains share counts once.")}
OF_MODEL = {"model": (TEXT, "The model that answered.")}
PROBLEM = {"problem": (TEXT, "What was asked.")}
RECORD = {
    **PROBLEM,
    "steps": (_list(TEXT), "A chain's steps."),
    "response": (TEXT, "In place of steps: a solution as free text."),
    "messages": (_list(OBJECT), "In place of problem and steps: chat messages, or a trajectory with tools."),
    "samples": (_list(OBJECT), "A pool: several solutions, each with steps."),
    "nodes": (_list(OBJECT), "A tree: each node with parent (-1 for the problem) and text."),
}
CHAIN = {"problem": "What is 2 + 2?", "steps": ["2 + 2 = 4.", "So it is 4."]}
INPUT = {
    "input": ({"oneOf": [TEXT, _list(ANY)]}, "A text, token ids, or a list of these."),
    "task": ({"type": "string", "enum": ["token_classify"]}, "The only task."),
    "use_activation": (FLAG, "Whether outputs are probabilities, not logits."),
    "encoding_format": ({"type": "string", "enum": ["float", "base64"]}, "How numbers are written."),
    "add_special_tokens": (FLAG, "Whether a text gets the tokenizer's special tokens."),
}
LISTED = {"object": (TEXT, ""), "data": (_list(OBJECT), "One entry an item of the input.")}

POST: dict[str, Operation] = {
    "/v1/score": Operation(
        "Score a chain, pool or tree. With Content-Type application/x-ndjson: a record a line, as `jprm score`.",
        {**RECORD, **RULE, **MODEL, **CALLER, "stream": (FLAG, "Judges: send critiques as they are written.")},
        example=CHAIN,
        gives={
            "record": (OBJECT, "The record with its scores."),
            "chains": (_list(OBJECT), "Of every chain its nodes, its score by the rule, and its weakest node."),
            "rule": (TEXT, "The rule."),
            **OF_MODEL,
            **USAGE,
        },
    ),
    "/v1/rewards": Operation(
        "Every step's span, token, score and reward, for a trainer's samples.",
        {
            "samples": (_list(OBJECT), "Each with problem or prompt, and response, ids or messages; offsets, outcome."),
            "credit": ({"oneOf": [TEXT, OBJECT]}, "What a step is rewarded for; absent, there are only scores."),
            "tokenizer": (TEXT, "Of the ids: a name of --tokenizer."),
            **RULE,
            **MODEL,
        },
        required=("samples",),
        example={"credit": "min_form", "samples": [{"problem": CHAIN["problem"], "response": "2 + 2 = 4."}]},
        gives={
            "samples": (_list(OBJECT), "Of every sample its steps, its score, and with a credit its rewards."),
            "credit": ({"type": ["object", "null"]}, "The credit with its options."),
            "rule": (TEXT, "The rule."),
            **OF_MODEL,
            **USAGE,
        },
    ),
    "/v1/rerank": Operation(
        "Order solutions by their chains' scores, for any rerank client.",
        {
            "query": (TEXT, "The problem."),
            "documents": (_list({"oneOf": [TEXT, OBJECT]}), "Solutions as free text."),
            "top_n": (WHOLE, "How many to return; absent, all."),
            "return_documents": (FLAG, "Whether their texts are returned."),
            **RULE,
            **MODEL,
        },
        required=("query", "documents"),
        example={"query": CHAIN["problem"], "documents": ["2 + 2 = 4.", "2 + 2 = 5."]},
        gives={"results": (_list(OBJECT), "index and relevance_score, the best first."), **OF_MODEL, **USAGE},
    ),
    "/v1/continue": Operation(
        "Alternatives after the steps so far, written by the server's policy and scored.",
        {
            **PROBLEM,
            "steps": (_list(TEXT), "Steps so far."),
            "n": ({"type": "integer", "minimum": 1, "maximum": 64}, "Alternatives; absent, 4."),
            "until": ({"type": "string", "enum": ["step", "end"]}, "Whether each is one step or the rest."),
            "seed": (WHOLE, "The number of the first sample."),
            **RULE,
            **MODEL,
            **CALLER,
        },
        required=("problem",),
        example={"problem": CHAIN["problem"], "steps": ["2 + 2 = 4."], "n": 2},
        gives={
            "alternatives": (_list(OBJECT), "steps, scores, score, finish_reason and tokens of each."),
            "scores": (_list(SCORE), "Of the steps so far."),
            "policy": (TEXT, "What wrote them."),
            "rule": (TEXT, "The rule."),
            **OF_MODEL,
            **USAGE,
        },
    ),
    "/v1/chat/completions": Operation(
        "OpenAI's chat completions, answered by a search of the policy under the model's scores.",
        {
            "messages": (_list(OBJECT), "One user's message."),
            "search": (OBJECT, "method with its options, choose, rule, seed, budget, error_rate, confidence."),
            "stream": (FLAG, "Whether to send progress, and then the answer, as server-sent events."),
            "stream_options": (OBJECT, "include_usage."),
            **MODEL,
        },
        required=("messages",),
        example={
            "messages": [{"role": "user", "content": CHAIN["problem"]}],
            "search": {"method": "best-of-n", "n": 2, "budget": 2000},
        },
        gives={
            "choices": (_list(OBJECT), "The answer."),
            "search": (OBJECT, "The final answer, its score, and tokens."),
            **OF_MODEL,
            **USAGE,
        },
    ),
    "/get_reward": Operation(
        "OpenRLHF's remote reward model.",
        {
            "query": (_list(TEXT), "Prompts with their responses."),
            "prompts": (_list(TEXT), "The prompts."),
            "labels": (_list(ANY), "Not read."),
            **RULE,
            **MODEL,
        },
        required=("query", "prompts"),
        example={"query": ["What is 2 + 2?2 + 2 = 4."], "prompts": ["What is 2 + 2?"], "labels": ["4"]},
        gives={
            "rewards": (_list(NUMBER), "Of every query its chain's score."),
            "scores": (_list(NUMBER), "The same."),
            "extra_logs": (OBJECT, "lowest_step and steps of every query."),
        },
    ),
    "/pooling": Operation(
        "vLLM's token_classify: outputs at every token, or at the tokens that end steps.",
        {**INPUT, **MODEL},
        required=("input",),
        example={"input": [[1, 2, 3]], "use_activation": False},
        gives={**LISTED, **OF_MODEL, **USAGE},
    ),
    "/classify": Operation(
        "vLLM's classify: a classifier's outputs at the last token.",
        {**{name: value for name, value in INPUT.items() if name != "task"}, **MODEL},
        required=("input",),
        example={"input": [[1, 2, 3]], "use_activation": False},
        gives={**LISTED, **OF_MODEL, **USAGE},
    ),
}

GET: dict[str, Operation] = {
    "/v1/models": Operation(
        "The models and judges.", gives={"object": (TEXT, ""), "data": (_list(OBJECT), "id, rule, scale and more.")}
    ),
    "/v1/models/{name}": Operation(
        "A model or judge.",
        {"name": (TEXT, "Its id.")},
        required=("name",),
        gives={"id": (TEXT, ""), "rule": (TEXT, "")},
    ),
    "/v1/runs": Operation("Runs whose curves are shown.", gives={"data": (_list(OBJECT), "id, experiment, steps.")}),
    "/v1/runs/metrics": Operation(
        "New lines of a run's metrics.",
        {
            "run": (TEXT, "Its id."),
            "file": (TEXT, "Of the last answer."),
            "from": (WHOLE, "`next` of the last answer."),
        },
        required=("run",),
        gives={"lines": (_list(OBJECT), "Metrics by name."), "next": (WHOLE, "Where to go on."), "file": (TEXT, "")},
    ),
    "/health": Operation("Whether the server lives.", content="text/plain"),
    "/ready": Operation(
        "Whether every model scores: 200, or 503 with the reason.",
        gives={
            "ready": (FLAG, "Whether scores can be asked for."),
            "reason": (TEXT, "Why not."),
            "left": (_list(TEXT), "What is still to be compiled."),
            "models": (OBJECT, "Of each what is compiled, in seconds by the length of rows."),
        },
    ),
    "/metrics": Operation("Counters and times, for Prometheus.", content="text/plain"),
}


def document(paths: Sequence[str], key: bool, root_path: str = "") -> dict[str, Any]:
    """Returns the OpenAPI 3.1 document of the routes in `paths`, under `root_path`; `key`: whether clients need one."""
    described: dict[str, dict[str, Any]] = {}
    for verb, operations in (("post", POST), ("get", GET)):
        for path, operation in operations.items():
            if path in paths:
                described.setdefault(path, {})[verb] = _operation(path, verb, operation)
    error = {"type": "object", "properties": {name: ANY for name in ("message", "type", "param", "code")}}
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
    name = re.sub(r"\W+", "_", f"{verb}{path}").rstrip("_")
    ok: dict[str, Any] = {"description": "The answer."}
    schema: Schema = {"type": "string"} if operation.content != "application/json" else _object(operation.gives)
    ok["content"] = {operation.content: {"schema": schema}}
    described: dict[str, Any] = {"operationId": name, "summary": operation.summary, "responses": {"200": ok}}
    if verb == "post":
        fault = {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}
        described["responses"]["default"] = {"description": "An error.", "content": fault}
        body = {"schema": _object(operation.takes, operation.required), "example": operation.example}
        described["requestBody"] = {"required": True, "content": {"application/json": body}}
    elif operation.takes:
        described["parameters"] = [
            {"name": key, "in": "path" if f"{{{key}}}" in path else "query", "required": key in operation.required}
            | {"schema": schema, "description": text}
            for key, (schema, text) in operation.takes.items()
        ]
    return described


def _object(fields: Mapping[str, tuple[Schema, str]], required: Sequence[str] = ()) -> Schema:
    properties = {name: schema | ({"description": text} if text else {}) for name, (schema, text) in fields.items()}
    return {"type": "object", "properties": properties} | ({"required": list(required)} if required else {})


def page(document: Mapping[str, Any]) -> str:
    """Returns the document as a page that loads nothing from elsewhere and runs nothing."""
    operations = {"post": POST, "get": GET}
    routes = [
        (verb, path, described["summary"], operations[verb][path])
        for path, verbs in document["paths"].items()
        for verb, described in verbs.items()
    ]
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True)
    environment.filters |= {"kind": _kind, "json": json.dumps}
    template = environment.from_string(text_of_file("jprm.apps.serve:docs.html"))
    return template.render(version=document["info"]["version"], routes=routes)


def _kind(schema: Schema) -> str:
    if "enum" in schema:
        return " or ".join(map(str, schema["enum"]))
    if "oneOf" in schema:
        return " or ".join(map(_kind, schema["oneOf"]))
    if schema.get("type") == "array":
        return f"list of {_kind(schema['items'])}"
    kind = schema.get("type", "any")
    return kind if isinstance(kind, str) else " or ".join(kind)
