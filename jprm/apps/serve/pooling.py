"""`POST /pooling`: vLLM's route for token classifiers, with the task `token_classify`; and `POST /classify`.

A chain of token ids gives the head's outputs at every token (vLLM's pooling type ALL), or, where the model's layout
ends each step with a token of its own, at these tokens (STEP). What vLLM's fields ask for and this server would not do
exactly is refused.
"""

from __future__ import annotations

import base64
import time
import uuid
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from jaxtyping import Float
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from jprm.apps.serve.engine import Engine
from jprm.apps.serve.score import admit, check_items, check_size, in_turn, server_of, usage
from jprm.apps.web.http import Refusal, field, json_of, worked
from jprm.model.heads import Weighted, find
from jprm.score.scorer import PRM, SHORTEST
from jprm.tokenizer import JsonTokenizer, TemplateLayout

_REFUSED = {
    "messages": "a chat template is not applied here: send its text or token ids as `input`",
    "truncate_prompt_tokens": "a chain is never cut: send the tokens that are meant",
    "dimensions": "outputs of classes have no other dimensions",
    "normalize": "outputs of classes are not normalised",
}
"""Fields of vLLM that would not be followed, and why."""

_FIELDS = {"model", "input", "task", "encoding_format", "embed_dtype", "endianness", "add_special_tokens", "user",
           "request_id", "priority"}  # fmt: skip
"""Fields that are followed, or change no output."""

_ACTIVATION = ("use_activation", "activation", "softmax")
"""Names that vLLM has had for whether outputs are probabilities, the newest first."""


async def pooling(request: Request) -> Response:
    """Returns the outputs of each chain of `input`: probabilities, or logits with `use_activation: false`."""
    body = await json_of(request)
    engine, chains, outputs = await _outputs(request, body, _places)
    packed = body.get("encoding_format") == "base64"
    data = [
        {"index": i, "object": "pooling",
         "data": base64.b64encode(x_PC.astype("<f4").tobytes()).decode() if packed else x_PC.tolist()}
        for i, x_PC in enumerate(outputs)
    ]  # fmt: skip
    about = {"id": f"pooling-{uuid.uuid4().hex[:16]}", "object": "list", "created": int(time.time())}
    used = usage(sum(map(len, chains)))
    used = {name: used[name] for name in ("prompt_tokens", "total_tokens")} | {"completion_tokens": 0}
    used |= {"prompt_tokens_details": None, "completion_tokens_details": None}
    return JSONResponse(about | {"model": engine.name, "data": data, "usage": used})


async def classify(request: Request) -> Response:
    """`POST /classify`: vLLM's route for sequence classifiers, the outputs at the last token of each text."""
    body = await json_of(request)
    body.pop("task", None)
    engine, chains, outputs = await _outputs(request, body, lambda prm, ids: [len(ids) - 1])
    labels = labels_of(engine.prm)
    data = [
        {"index": i, "label": labels[int(np.argmax(x_C))], "probs": x_C.tolist(), "num_classes": len(x_C)}
        for i, (x_C,) in enumerate(outputs)
    ]
    about = {"id": f"classify-{uuid.uuid4().hex}", "object": "list", "created": int(time.time()), "model": engine.name}
    return JSONResponse(about | {"data": data, "usage": usage(sum(map(len, chains))) | {"completion_tokens": 0}})


async def _outputs(
    request: Request, body: dict[str, Any], places: Callable[[PRM, Sequence[int]], list[int]]
) -> tuple[Engine, list[list[int]], list[np.ndarray]]:
    """Returns the engine, the chains of `input`, and each one's outputs at its `places`, (P, C) float32."""
    engine = server_of(request).engine(body.get("model"))
    _check(body, engine.prm)
    several = body["input"] if isinstance(body.get("input"), list) else [body.get("input")]
    if not all(type(x) is int for x in several[: engine.longest + 1]):
        check_items(request, several, "input", "input[{}]")
    admit(request, engine)
    places_of: dict[tuple[int, ...], int] = {}  # equal chains are computed once

    def read() -> tuple[list[list[int]], list[int]]:
        chains = _chains(engine, body)
        return chains, [places_of.setdefault(tuple(ids), len(places_of)) for ids in chains]

    chains, place_of = await worked(request, read, len(several))
    counts = [max(len(ids), SHORTEST) for ids in places_of]  # each takes a row of its own
    check_size(request, engine, sum(counts))
    outputs = await in_turn(
        request,
        [
            (
                lambda ids=ids, count=count: engine.run(
                    lambda: engine.prm.token_logits(ids, places(engine.prm, ids)), count
                )
            )
            for ids, count in zip(places_of, counts, strict=True)
        ],
    )
    outputs = outputs if _raw(body) else list(map(activated, outputs))
    return engine, chains, [outputs[place] for place in place_of]


def _raw(body: dict[str, Any]) -> bool:
    """Returns whether logits are asked for, not probabilities."""
    return any(body.get(name) is False for name in _ACTIVATION)


def labels_of(prm: PRM) -> list[str]:
    """Returns the names of the head's channels: those of a published classifier's labels, else the head's own."""
    names = list(find(prm.config.head).channels)
    for name, output in prm.readout.outputs:
        if name != "score" and isinstance(output, Weighted) and sorted(output.factors)[-2:] in ([0.0, 1.0], [1.0]):
            names[output.factors.index(1.0)] = name
    return names


def activated(logit_PC: Float[np.ndarray, "P C"]) -> Float[np.ndarray, "P C"]:
    """Returns what vLLM's classifiers give by default: the sigmoid of one logit, the softmax of several."""
    if logit_PC.shape[1] == 1:
        return 1 / (1 + np.exp(-logit_PC))
    weight_PC = np.exp(logit_PC - logit_PC.max(axis=1, keepdims=True))
    return weight_PC / weight_PC.sum(axis=1, keepdims=True)


def _check(body: dict[str, Any], prm: PRM) -> None:
    """Raises Refusal for fields that would not be followed exactly, and for models whose outputs are no classes."""
    if not isinstance(prm, PRM):
        raise Refusal(400, f"{prm.name}: has no logits, as a judge or a fused verifier; use /v1/score", "model")
    for name in body.keys() - _FIELDS - _REFUSED.keys() - {*_ACTIVATION}:
        if body[name] is not None:
            raise Refusal(400, f"{name}: is not known here, and would not be followed: leave it out", name)
    if body.get("task") not in (None, "token_classify"):
        raise Refusal(400, f"task {body['task']!r}: this server has only token_classify", "task")
    for name, why in _REFUSED.items():
        if body.get(name) is not None:
            raise Refusal(400, f"{name}: {why}", name)
    for name, values in {
        "encoding_format": ("float", "base64"),
        "embed_dtype": ("float32",),
        "endianness": ("native", "little"),
        "add_special_tokens": (True, False),
        **dict.fromkeys(_ACTIVATION, (True, False)),
    }.items():
        if (value := body.get(name)) is not None and (type(value) is not type(values[0]) or value not in values):
            raise Refusal(400, f"{name} {value!r}: use {' or '.join(map(str, values))}", name)
    if prm.ratio is not None:
        raise Refusal(400, f"{prm.name} is an implicit PRM, which has no logits: use /v1/score", "model")
    if prm.config.steps:
        raise Refusal(400, f"{prm.name} reads the ends of steps, which tokens do not tell: use /v1/score", "model")
    score = prm.readout.score
    classes = isinstance(score, Weighted) and score.activation == ("softmax" if len(score.factors) > 1 else "sigmoid")
    if len({body[name] for name in _ACTIVATION if body.get(name) is not None}) > 1:
        raise Refusal(400, f"{' and '.join(_ACTIVATION)} are one field, and differ", "use_activation")
    if not _raw(body) and not classes:
        raise Refusal(400, "use_activation: this model's logits are no classes; ask for false", "use_activation")


def _chains(engine: Engine, body: dict[str, Any]) -> list[list[int]]:
    """Returns the token ids of every chain of `input`. Raises Refusal for what is no chain, or too long a one."""
    sent = field(body, "input", (str, list))
    several = isinstance(sent, list) and not all(type(x) is int for x in sent)
    special = body.get("add_special_tokens") is not False
    chains = []
    for i, item in enumerate(sent if several else [sent]):
        where = f"input[{i}]" if several else "input"
        ids = _ids(engine.prm, item, special) if isinstance(item, str) else item
        if not (isinstance(ids, list) and ids and all(type(x) is int for x in ids)):
            raise Refusal(400, f"{where}: input is a text, token ids, or a list of these, none of them empty", "input")
        if len(ids) > engine.longest:
            reason = f"a chain has {len(ids):,} tokens, and this server takes {engine.longest:,}"
            raise Refusal(400, f"{where}: {reason}", "input")
        chains.append(ids)
    if not chains:
        raise Refusal(400, "input is a text, token ids, or a list of these, none of them empty", "input")
    return chains


def _ids(prm: PRM, text: str, special: bool) -> list[int]:
    """Returns the ids of a text in which special tokens are read as such, as vLLM reads them."""
    tokenizer = prm.layout.tokenizer
    if not isinstance(tokenizer, JsonTokenizer):
        raise Refusal(400, "input is a text, and this model has no tokenizer.json: send token ids", "input")
    return tokenizer.encode_control(text, special)


def _places(prm: PRM, ids: Sequence[int]) -> list[int]:
    """Returns where outputs are read: at the token that ends each step, where the layout has one, else everywhere."""
    layout = prm.layout
    end = layout.end_of_step if isinstance(layout, TemplateLayout) else None
    return [i for i, token in enumerate(ids) if end is None or token == end]
