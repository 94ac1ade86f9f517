"""`/openapi.json`: every route is there, every example is answered as described, and the page is plain."""

import re
import types

import pytest
from test_serve import CONFIG, call, engine, post, prm  # noqa: F401  (fixtures)
from toy_policy import Markov

from jprm.apps.serve.app import make_app
from jprm.apps.serve.openapi import GET, POST, document, page

KINDS = {"string": str, "array": list, "object": dict, "boolean": bool, "null": type(None)}
PAGES = re.compile(r"/|/runs|/docs|/openapi.json|.*[.](css|js|woff2)")


def test_every_route_is_described(engine):  # noqa: F811
    app = make_app([engine], CONFIG, policy=Markov(), shown=types.SimpleNamespace())
    paths = {route.path for route in app.routes if not PAGES.fullmatch(route.path)}
    assert paths == GET.keys() | POST.keys()
    (got,) = call(engine, ("GET", "/openapi.json", {}))
    assert got.json()["openapi"] == "3.1.0" and "/v1/runs" not in got.json()["paths"]
    for verbs in got.json()["paths"].values():
        for made in verbs.values():
            assert made["summary"] and made["operationId"].isidentifier()


@pytest.mark.parametrize("path", POST)
def test_every_example_is_answered_as_described(engine, path):  # noqa: F811
    (got,) = call(engine, post(path, dict(POST[path].example)), policy=Markov())
    assert got.status_code == 200, got.text
    for name, (schema, _) in POST[path].gives.items():
        kinds = schema.get("type", "object")
        assert type(got.json()[name]) in [KINDS[kind] for kind in ([kinds] if isinstance(kinds, str) else kinds)], name


@pytest.mark.parametrize("path", ["/v1/models", "/v1/models/{name}", "/ready"])
def test_what_is_got_is_as_described(engine, path):  # noqa: F811
    (got,) = call(engine, ("GET", path.replace("{name}", "tiny"), {}))
    assert got.json().keys() >= GET[path].gives.keys()


def test_the_page_shows_texts_as_texts_and_loads_nothing_from_elsewhere(engine):  # noqa: F811
    (got,) = call(engine, ("GET", "/docs", {}))
    assert got.status_code == 200 and "/v1/rewards" in got.text
    assert not re.findall(r"(?:src|href)=\"?https?:", got.text) and "<script" not in got.text
    told = document(["/v1/score"], True)
    told["paths"]["/v1/score"]["post"]["summary"] = "<img src=x onerror=alert(1)>"
    assert "<img" not in page(told) and told["security"] == [{"key": []}]
