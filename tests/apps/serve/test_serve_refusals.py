"""Requests that a server refuses, route by route: the status, the field, and that nothing was computed for them.

`refused_requests.json` has the requests: {"times": [a text or a list, n]} stands for n of it, {"raw": TEXT} for a body
that is no JSON.
"""

import json
import pathlib
from typing import Any

import pytest
from test_serve import call, engine, post, prm  # noqa: F401  (fixtures, which tests name as arguments)
from toy_policy import Markov

from jprm.apps.serve import ServeConfig

REFUSED = json.loads((pathlib.Path(__file__).parent / "refused_requests.json").read_text(encoding="utf-8"))
FEW = {"items": 20, "critiques": 4}
CASES = [
    (limits, path, *case)
    for limits, routes in (({}, REFUSED["any server"]), (FEW, REFUSED["a server of few items"]))
    for path, cases in routes.items()
    for case in cases
]


def built(value: Any) -> Any:
    if isinstance(value, list):
        return [built(item) for item in value]
    if not isinstance(value, dict):
        return value
    if value.keys() == {"times"}:
        part, count = value["times"]
        return built(part) * count
    return {key: built(item) for key, item in value.items()}


@pytest.mark.parametrize(("limits", "path", "body", "status", "param", "place"), CASES)
def test_a_refusal_names_the_field_and_costs_nothing(engine, monkeypatch, limits, path, body, status, param, place):  # noqa: F811
    """The field as OpenAI's errors name it, and what the message says of its place."""
    monkeypatch.setattr(engine, "score", None)  # to call it would fail
    monkeypatch.setattr(engine, "tokens_of", None if limits else engine.tokens_of)
    config, policy, content = ServeConfig(longest=256, **limits), Markov(), built(body)
    raw = content["raw"].encode() if content.keys() == {"raw"} else json.dumps(content).encode()
    (got,) = call(engine, post(path, raw), config=config, policy=policy)
    error = got.json()["error"]
    assert (got.status_code, error["param"]) == (status, param) and place in error["message"], got.text
    assert policy.sampled == 0 and "--on-error" not in error["message"]
