"""`POST /pooling`, vLLM's route for token classifiers (task `token_classify`), and `POST /classify`.

For a chain of token ids, returns the head's outputs at every token (vLLM's pooling type ALL), or, if the model's layout
ends each step with a special token, at these tokens (STEP). vLLM fields that this server cannot honour exactly are
refused.
"""

from __future__ import annotations

import base64
import dataclasses
import functools
import time
import uuid
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Annotated, Any, Literal

import numpy as np
from jaxtyping import Float
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from jprm.apps.serve.call import Call, usage
from jprm.apps.serve.engine import Engine
from jprm.apps.serve.score import OF_MODEL, Model
from jprm.apps.web.http import Refusal, RequestFields, json_of, read_request
from jprm.model.heads import Weighted, find
from jprm.score.scorer import PRM, SHORTEST
from jprm.tokenizer import JsonTokenizer, TemplateLayout

_REFUSED = {
    "messages": "a chat template is not applied here: send its text or token ids as `input`",
    "truncate_prompt_tokens": "a chain is never cut: send the tokens that are meant",
    "dimensions": "outputs of classes have no other dimensions",
    "normalize": "outputs of classes are not normalised",
}
"""vLLM fields that cannot be honoured, with the reason."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class PoolingRequest(RequestFields):
    """vLLM's token_classify: outputs at every token, or at the tokens that end steps."""

    input: Annotated[str | Sequence[Any], "A text, token ids, or a list of these."]
    task: Annotated[Literal["token_classify"] | None, "The only task."] = None
    use_activation: Annotated[bool | None, "Whether outputs are probabilities, not logits; absent, they are."] = None
    activation: Annotated[bool | None, "The same, as vLLM had it before."] = None
    softmax: Annotated[bool | None, "The same, as vLLM had it before that."] = None
    encoding_format: Annotated[Literal["float", "base64"], "How numbers are written."] = "float"
    embed_dtype: Annotated[Literal["float32"], "The numbers' type."] = "float32"
    endianness: Annotated[Literal["native", "little"], "The order of their bytes."] = "little"
    add_special_tokens: Annotated[bool, "Whether a text gets the tokenizer's special tokens."] = True
    model: Model = None
    user: Annotated[Any, "Not read."] = None
    request_id: Annotated[Any, "Not read."] = None
    priority: Annotated[Any, "Not read."] = None

    closed = True
    example = {"input": [[1, 2, 3]], "use_activation": False}
    gives = {"object": (str, "Always list."), "data": (Sequence[dict], "One entry an item of the input."), **OF_MODEL}

    @property
    def raw(self) -> bool:
        """Whether the request asks for logits instead of probabilities.

        `True` if `use_activation`, or one of its older names, is false.
        """
        return False in (self.use_activation, self.activation, self.softmax)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ClassifyRequest(PoolingRequest):
    """vLLM's classify: a classifier's outputs at the last token, or at the end of the last turn."""

    task: Annotated[Any, "Not read."] = None


async def pooling(request: Request) -> Response:
    """Answers vLLM's `token_classify`: for each chain in `input`, outputs at every token, in `data`.

    If the model's layout ends each step with a special token, only at these tokens. They are probabilities, or logits
    if `use_activation` is false. `data[i]["data"]` is a list of places, each a list of floats per class; with
    `encoding_format` base64, the text of the same as little-endian float32. The answer also has `id`, `object`
    ("list"), `created`, `model` and `usage`.

    Raises Refusal: 400 for unknown or refused fields, a model without logits, an invalid or too long chain; 404 for an
    unknown model, 413, 503 or 504 for too much work, and as `json_of`.
    """
    asked = await _read(request, PoolingRequest)
    engine, chains, outputs = await _outputs(request, asked, _places)
    packed = asked.encoding_format == "base64"
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
    """Answers vLLM's `classify`: `label`, `probs` and `num_classes` of each text in `input`, in `data`.

    Outputs are at the last token; for jprm's own models, at the token that ends the last turn. `probs` are logits if
    `use_activation` is false; `label` is the largest one's name. Raises Refusal like `pooling`.
    """
    asked = await _read(request, ClassifyRequest)
    engine, chains, outputs = await _outputs(request, asked, lambda prm, ids: [_last(prm, ids)])
    labels = labels_of(engine.prm)
    data = [
        {"index": i, "label": labels[int(np.argmax(x_C))], "probs": x_C.tolist(), "num_classes": len(x_C)}
        for i, (x_C,) in enumerate(outputs)
    ]
    about = {"id": f"classify-{uuid.uuid4().hex}", "object": "list", "created": int(time.time()), "model": engine.name}
    return JSONResponse(about | {"data": data, "usage": usage(sum(map(len, chains))) | {"completion_tokens": 0}})


async def _read(request: Request, kind: type[PoolingRequest]) -> PoolingRequest:
    body = await json_of(request)
    for name, why in _REFUSED.items():
        if body.get(name) is not None:
            raise Refusal(400, f"{name}: {why}", name)
    return read_request(kind, body)


async def _outputs(
    request: Request, asked: PoolingRequest, places: Callable[[PRM, Sequence[int]], list[int]]
) -> tuple[Engine, list[list[int]], list[np.ndarray]]:
    """Returns the engine, the chains in `input`, and their outputs at `places`, (P, C) float32."""
    call = Call(request, asked.model)
    engine = call.engine
    _check(asked, engine.prm)
    several = [asked.input] if isinstance(asked.input, str) else asked.input
    if not all(type(x) is int for x in several[: engine.longest + 1]):
        call.check_items(several, "input", "input[{}]")
    call.admit()
    places_of: dict[tuple[int, ...], int] = {}  # equal chains are computed once

    def read() -> tuple[list[list[int]], list[int]]:
        chains = _chains(engine, asked)
        return chains, [places_of.setdefault(tuple(ids), len(places_of)) for ids in chains]

    chains, place_of = await call.worked(read, len(several))
    tokens = {ids: max(len(ids), SHORTEST) for ids in places_of}  # each takes a row of its own
    call.check_size(sum(tokens.values()))

    def run(ids: tuple[int, ...]) -> Future:
        return engine.run(lambda: engine.prm.token_logits(ids, places(engine.prm, ids)), tokens[ids])

    outputs = await call.in_turn([functools.partial(run, ids) for ids in places_of])
    score = engine.prm.readout.score
    several = isinstance(score, Weighted) and score.activation == "sigmoid"
    outputs = outputs if asked.raw else [activated(logit_PC, several) for logit_PC in outputs]
    return engine, chains, [outputs[place] for place in place_of]


def labels_of(prm: PRM) -> list[str]:
    """Returns the head's channel names, or the labels of a published classifier, one per output, in order."""
    names = list(find(prm.config.head).channels)
    for name, output in prm.readout.outputs:
        if name != "score" and isinstance(output, Weighted) and sorted(output.factors)[-2:] in ([0.0, 1.0], [1.0]):
            names[output.factors.index(1.0)] = name
    return names


def activated(logit_PC: Float[np.ndarray, "P C"], several: bool = False) -> Float[np.ndarray, "P C"]:
    """Applies vLLM's default activation: sigmoid for one logit, softmax over the classes otherwise.

    `several`: labels are independent (`problem_type: multi_label_classification`), so each has its own sigmoid.
    """
    if several or logit_PC.shape[1] == 1:
        return np.exp(-np.logaddexp(0, -logit_PC))
    weight_PC = np.exp(logit_PC - logit_PC.max(axis=1, keepdims=True))
    return weight_PC / weight_PC.sum(axis=1, keepdims=True)


def _check(asked: PoolingRequest, prm: PRM) -> None:
    """Raises Refusal unless the model has the requested logits or probabilities."""
    if not isinstance(prm, PRM):
        raise Refusal(400, f"{prm.name}: has no logits, as a judge or a fused verifier; use /v1/score", "model")
    if prm.ratio is not None:
        raise Refusal(400, f"{prm.name} is an implicit PRM, which has no logits: use /v1/score", "model")
    if prm.config.steps:
        raise Refusal(400, f"{prm.name} reads the ends of steps, which tokens do not tell: use /v1/score", "model")
    score = prm.readout.score
    classes = isinstance(score, Weighted) and score.activation in ("softmax", "sigmoid")
    if len({asked.use_activation, asked.activation, asked.softmax} - {None}) > 1:
        raise Refusal(400, "use_activation, activation and softmax are one field, and differ", "use_activation")
    if not asked.raw and not classes:
        raise Refusal(400, "use_activation: this model's logits are no classes; ask for false", "use_activation")


def _chains(engine: Engine, asked: PoolingRequest) -> list[list[int]]:
    """Returns the token ids of every chain in `input`. Raises Refusal if one is invalid or too long."""
    sent, special = asked.input, asked.add_special_tokens
    several = not isinstance(sent, str) and not all(type(x) is int for x in sent)
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
    return chains


def _ids(prm: PRM, text: str, special: bool) -> list[int]:
    """Tokenises a text, parsing special tokens like vLLM."""
    tokenizer = prm.layout.tokenizer
    if not isinstance(tokenizer, JsonTokenizer):
        raise Refusal(400, "input is a text, and this model has no tokenizer.json: send token ids", "input")
    return tokenizer.encode_control(text, special)


def _places(prm: PRM, ids: Sequence[int]) -> list[int]:
    """Returns the indices of step-end tokens, or of all tokens if there is no such token."""
    layout = prm.layout
    end = layout.end_of_step if isinstance(layout, TemplateLayout) else None
    return [i for i, token in enumerate(ids) if end is None or token == end]


def _last(prm: PRM, ids: Sequence[int]) -> int:
    """Returns the index of the last token; for jprm's own models, of the control token that ends the last turn.

    Many templates write a newline after that token, e.g. `<|im_end|>` in Qwen's, but turns are scored at the token.
    """
    tokenizer, at = prm.layout.tokenizer, len(ids) - 1
    if not (prm.layout.turns and isinstance(tokenizer, JsonTokenizer) and tokenizer.specials):
        return at
    while at and tokenizer.decode([ids[at]]).isspace():
        at -= 1
    return at if tokenizer.specials.fullmatch(tokenizer.decode([ids[at]])) else len(ids) - 1
