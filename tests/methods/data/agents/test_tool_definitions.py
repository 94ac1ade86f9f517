"""Tool definitions: each form of the logs becomes the chat form, by one function."""

import json

import pytest

from jprm.methods.data.agents.logs import tools_of
from jprm.methods.data.agents.parts import Leftovers, LogOptions

PARAMETERS = {"type": "object", "properties": {"item": {"type": "string"}}}
ABOUT = {"name": "price", "description": "[USD] A price."}
FUNCTION = {**ABOUT, "parameters": PARAMETERS}
CHAT = {"type": "function", "function": FUNCTION}

FORMS = {
    "chat": CHAT,
    "chat without a type": {"function": FUNCTION},
    "OpenAI's Responses API": {"type": "function", **FUNCTION, "strict": None},
    "Anthropic": {**ABOUT, "input_schema": PARAMETERS, "cache_control": {"type": "ephemeral"}},
    "MCP": {
        **ABOUT,
        "title": "Prices",
        "inputSchema": PARAMETERS,
        "annotations": {"readOnlyHint": True},
        "_meta": None,
    },
    "OpenHands 1": {"title": "price", "description": "[USD] A price.", "input_schema": PARAMETERS, "kind": "PriceTool"},
    "inspect-ai": {**FUNCTION, "options": None},
    "Google": {"function_declarations": [FUNCTION]},
    "Google's REST": {"functionDeclarations": [{**ABOUT, "parametersJsonSchema": PARAMETERS}]},
    "pydantic-ai": {"function_tools": [{**ABOUT, "parameters_json_schema": PARAMETERS}], "output_tools": None},
    "OpenInference": {"tool": {"json_schema": json.dumps(CHAT)}},
    "OpenLLMetry": {**ABOUT, "parameters": json.dumps(PARAMETERS)},
    "Vercel AI": json.dumps({"type": "function", **ABOUT, "inputSchema": PARAMETERS}),
}


@pytest.mark.parametrize("form", FORMS)
def test_each_form_of_a_definition_becomes_the_chat_form(form):
    for value in ([FORMS[form], FORMS[form]], json.dumps([FORMS[form], FORMS[form]])):
        assert tools_of(value, "f:1") == {"tools": [CHAT, CHAT]}
    assert list(tools_of([FORMS[form]], "f:1")["tools"][0]["function"]) == list(FUNCTION)


def test_a_chat_definition_keeps_its_fields_and_their_order():
    function = {"parameters": PARAMETERS, "return": {"type": "string"}, **ABOUT, "strict": None}
    (tool,) = tools_of([{"type": "function", "function": function}], "f:1")["tools"]
    assert list(tool["function"].items()) == list(function.items())


@pytest.mark.parametrize("value", [None, "", [], {}, "[]", [[]], {"function_tools": [], "output_tools": None}])
def test_no_definitions_are_no_tools(value):
    assert tools_of(value, "f:1") == {}


def test_tools_without_a_name_are_counted():
    left = Leftovers(LogOptions())
    assert tools_of([{"type": "web_search"}, "price", {"mode": "text"}, CHAT], "f:1", left) == {"tools": [CHAT]}
    counts = {part.what: part.count for part in left}
    assert counts == {"tool of type 'web_search', which the server runs": 1, "tool without a name": 2}
