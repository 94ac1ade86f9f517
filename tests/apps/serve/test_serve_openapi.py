"""`/openapi.json`: every route is there, every example is answered as described, and the page is plain."""

import dataclasses
import re
from collections.abc import Sequence
from typing import Annotated, Any, Literal

import jsonschema
import pytest
from test_serve import CONFIG, call, engine, post, prm  # noqa: F401  (fixtures)
from toy_policy import Markov

from jprm.apps.serve.app import make_app, operations
from jprm.apps.serve.openapi import document, page
from jprm.apps.web.http import Refusal, RequestFields, read_request

POST = {path: operation.takes for path, operation in operations().items() if operation.verb == "post"}
PAGES = re.compile(r"/|/docs|/openapi.json|.*[.](css|js|woff2)")


def test_every_route_is_described(engine):  # noqa: F811
    app = make_app([engine], CONFIG, policy=Markov())
    paths = {route.path for route in app.routes if not PAGES.fullmatch(route.path)}
    assert paths == operations().keys()
    (got,) = call(engine, ("GET", "/openapi.json", {}))
    assert got.json()["openapi"] == "3.1.0"
    for verbs in got.json()["paths"].values():
        for operation in verbs.values():
            assert operation["summary"] and operation["operationId"].isidentifier()


def schemas(verb, path):
    """The schemas of a route's request, where it has a body, and of its answer."""
    operation = document({path: operations()[path]}, False)["paths"][path][verb]
    parts = [operation.get("requestBody"), operation["responses"]["200"]]
    return [part and part["content"]["application/json"]["schema"] for part in parts]


@pytest.mark.parametrize("path", POST)
def test_every_example_is_answered_as_described(engine, path):  # noqa: F811
    takes, gives = schemas("post", path)
    jsonschema.validate(POST[path].example, takes)
    (got,) = call(engine, post(path, dict(POST[path].example)), policy=Markov())
    assert got.status_code == 200, got.text
    jsonschema.validate(got.json(), gives | {"required": list(gives["properties"])})


@pytest.mark.parametrize("path", ["/v1/models", "/v1/models/{name}", "/ready"])
def test_what_is_got_is_as_described(engine, path):  # noqa: F811
    _, gives = schemas("get", path)
    (got,) = call(engine, ("GET", path.replace("{name}", "tiny"), {}))
    jsonschema.validate(got.json(), gives | {"required": list(gives["properties"])})


@dataclasses.dataclass(frozen=True, kw_only=True)
class Thing(RequestFields):
    name: Annotated[str, "Its name.", {"maxLength": 3}]
    size: Annotated[float | None, {"exclusiveMinimum": 0}] = None
    parts: Annotated[str | Sequence[int], "One or several."] = ()
    from_: Annotated[Literal["left", "right"], "Where it is from."] = "left"
    more: Annotated[Any, "Not read."] = None


def test_a_request_is_read_as_its_type_says():
    assert read_request(Thing, {"name": "a", "other": 1}) == Thing(name="a")
    sent = {"name": "abc", "size": 1, "parts": [1, "x"], "from": "right", "more": [None]}  # the route reads the items
    assert read_request(Thing, sent) == Thing(name="abc", size=1.0, parts=[1, "x"], from_="right", more=[None])
    assert read_request(Thing, {"name": "a", "from": None, "size": None}) == Thing(name="a")


@pytest.mark.parametrize(
    ("sent", "param", "said"),
    [
        ({}, "name", "absent"),
        ({"name": None}, "name", "absent"),
        ({"name": 3}, "name", "not a str"),
        ({"name": [1] * 10**6}, "name", "not a str"),
        ({"name": "abcd"}, "name", "at most 3"),
        ({"name": "a", "size": 0}, "size", "above 0"),
        ({"name": "a", "size": True}, "size", "not a float"),
        ({"name": "a", "parts": {}}, "parts", "not a str"),
        ({"name": "a", "from": "up"}, "from", "left, right"),
    ],
)
def test_a_field_that_is_wrong_is_named(sent, param, said):
    for within, named in (("", param), ("thing", "thing")):
        with pytest.raises(Refusal, match=said) as refusal:
            read_request(Thing, sent, within)
        assert refusal.value.status == 400 and refusal.value.param == named and len(str(refusal.value)) < 400


def test_the_page_shows_texts_as_texts_and_loads_nothing_from_elsewhere(engine):  # noqa: F811
    (got,) = call(engine, ("GET", "/docs", {}))
    assert got.status_code == 200 and "/v1/rewards" in got.text
    assert not re.findall(r"(?:src|href)=\"?https?:", got.text) and "<script" not in got.text
    told = document({"/v1/score": operations()["/v1/score"]}, True)
    told["paths"]["/v1/score"]["post"]["summary"] = "<img src=x onerror=alert(1)>"
    assert "<img" not in page(told) and told["security"] == [{"key": []}]
