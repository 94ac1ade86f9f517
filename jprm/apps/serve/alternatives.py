"""`POST /v1/continue`: a policy writes next steps, or ends of the chain, and the model scores them."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from jprm.apps.serve.http import admit, server_of, tokens_of
from jprm.apps.serve.score import options_of, outputs_of, usage
from jprm.apps.web.guards import Refusal, field, json_of, of_record
from jprm.methods.policy.protocol import Prefix, Sample
from jprm.methods.search.chain_scores import chain_scores
from jprm.tree import Node, ReasoningTree, RecordError, tree_of

MOST = 64
"""Alternatives of one request."""


async def alternatives(request: Request) -> Response:
    """Returns n alternatives after the steps so far, each with its scores and its chain's score by the rule."""
    body = await json_of(request)
    server = server_of(request)
    if server.writer is None:
        raise Refusal(400, "this server has no policy: start it with --policy", "model")
    engine, rule, caller = options_of(request, body)
    prefix, n, until, seed = _asked(body)
    admit(request, engine)
    samples = await server.writer.sample(request, prefix, n, until, seed)
    if all(sample.error is not None for sample in samples):
        raise Refusal(502, f"the policy gave nothing: {samples[0].error}")
    tree, paths = _tree(prefix, samples)
    tokens = await asyncio.to_thread(tokens_of, request, engine, [tree])
    outputs, cached = {"score": np.zeros(0)}, None
    if tree.nodes:
        outputs, cached = await outputs_of(request, engine, tree, tokens, caller)
    score_N, before = outputs["score"], len(prefix.steps)
    value_B, _ = chain_scores([score_N[path].tolist() for path in paths], rule, engine.prm.scale)
    made = [
        {"steps": list(sample.steps), "scores": score_N[path[before:]].tolist(),
         "score": float(value) if path and not sample.error else None,
         "finish_reason": sample.finish_reason, "tokens": sample.tokens}
        | ({"error": sample.error} if sample.error else {})
        for sample, path, value in zip(samples, paths, value_B, strict=True)
    ]  # fmt: skip
    written = sum(sample.tokens for sample in samples)
    return JSONResponse({
        "object": "alternatives", "model": engine.name, "policy": server.writer.policy.name, "rule": rule,
        "scores": score_N[:before].tolist(), "alternatives": made,
        "usage": usage(tokens, cached) | {"completion_tokens": written, "total_tokens": tokens + written},
    })  # fmt: skip


def _asked(body: dict[str, Any]) -> tuple[Prefix, int, str, int]:
    """Returns the prefix, the number of alternatives, where they end, and the number of the first sample."""
    steps, n = field(body, "steps", list, default=[]), field(body, "n", int, default=4)
    until, seed = field(body, "until", str, default="step"), field(body, "seed", int, default=0)
    if not 1 <= n <= MOST:
        raise Refusal(400, f"n is {n}: from 1 to {MOST}", "n")
    if until not in ("step", "end"):
        raise Refusal(400, f"until is {until!r}: use step or end", "until")
    if seed < 0:
        raise Refusal(400, f"seed is {seed}: from 0", "seed")
    try:  # the checks of any record, on steps that may be none yet
        tree = tree_of({"problem": field(body, "problem", str), "steps": steps or ["-"]}, "body")
    except RecordError as error:
        raise of_record(error) from None
    return Prefix(tree.problem, tuple(node.text for node in tree.nodes) if steps else ()), n, until, seed


def _tree(prefix: Prefix, samples: list[Sample]) -> tuple[ReasoningTree, list[list[int]]]:
    """Returns the tree of the steps so far and all alternatives, and the nodes of each alternative's chain."""
    nodes = [Node(i - 1, step) for i, step in enumerate(prefix.steps)]
    before, paths = list(range(len(nodes))), []
    for sample in samples:
        path = list(before)
        for step in sample.steps:
            nodes.append(Node(path[-1] if path else -1, step))
            path.append(len(nodes) - 1)
        paths.append(path)
    return ReasoningTree(prefix.problem, tuple(nodes)), paths
