"""Free text is split at the places that a reader would choose, loses no character, and is read as chains."""

import pytest
from growth import check
from hypothesis import example, given
from hypothesis import strategies as st
from refusing import refused
from tiny_run import save_tokenizer

from jprm import steps
from jprm.methods.data.readers import find
from jprm.methods.label.monte_carlo import prefixes_of
from jprm.token_tree import token_tree
from jprm.tokenizer import TemplateLayout, load_tokenizer, native_layout
from jprm.tree import record_of, tree_of

PIECES = [
    *("Step 1: ", "step 2\n", "1. ", "2) ", "**3.** ", "\n\n", "\n", " ", ". ", "? ", "e.g. ", "3.5", "$", "$$"),
    *("\\[", "\\]", "\\(", "\\)", "```", "~~~\n", "\\begin{a}", "\\end{a}", "<think>", "</think>"),
    *("A", "so x = 2", "\u3002", "\r\n"),
]
texts = st.lists(st.sampled_from(PIECES) | st.text(max_size=5), max_size=30).map("".join)


@given(texts, st.sampled_from(["auto", *steps.RULES]))
@example(" \n\n a", "paragraphs")
@example(" \n ", "auto")
def test_joined_steps_are_the_text_and_none_is_blank(text, rule):
    pieces = steps.split(text, rule)
    assert "".join(pieces) == text
    assert all(step.strip() for step in pieces) or not text.strip()
    assert steps.split(text, steps.rule_of(text)) == steps.split(text)


@pytest.mark.parametrize(
    ("rule", "pieces"),
    [
        ("markers", ["Step 1: add.\nIt is 5.\n\n", "Step 2: multiply.\n"]),
        ("markers", ["### Step 1\nAdd.\n", "### Step 2\nMultiply."]),
        ("numbered", ["1. Take 2.5 of it.\n", "2. Add.\n\nDone."]),
        ("paragraphs", ["First\nand more\n\n", "second\n \n", "third"]),
        ("paragraphs", ["Code:\n\n", "```py\na = 1\n\nb = 2\n```\n\n", "End."]),
        ("paragraphs", ["\\begin{align}\na\n\nb\n\\end{align}\n\n", "So \\[ c\n\nd \\] holds."]),
        ("lines", ["First.  And more.\n", "$$a\nb$$\n", "3. third"]),
        ("lines", ["3. is odd.\n", "7. is too."]),  # numbers that do not count up are no markers
        ("lines", ["Step 2 uses this.\n", "Step 1 does not."]),
        ("lines", [*(f"{letter}\n" for letter in "abcdef"), "g\n\n", "h"]),  # nor one blank line a paragraph's end
        ("sentences", ["We use e.g. Dr. A. B. Smith's 3.5 rule. ", "Is it 4? ", "Yes."]),
        ("sentences", ["It costs $5. ", "He pays $7. ", "So $x. A$ is it."]),
        ("thoughts", ["<think>\nWait.\n\n", "No.\n</think>\n\n", "It is 4."]),
    ],
)
def test_rules_cut_where_a_reader_would(rule, pieces):
    text = "".join(pieces)
    assert steps.rule_of(text) == rule
    assert steps.split(text) == pieces


@pytest.mark.parametrize(
    "unit", ["$", "\\[", "\\(", "\\begin{a}", "```a\n", "~~~\n```\n", "a. ", " \n", "1. a\n", "-", "* ", "$a\n", "`"]
)
def test_time_is_linear_in_the_text(unit):
    text = unit * (200_000 // len(unit))
    assert "".join(steps.split(text)) == text
    check(steps.split, lambda n: unit * (n // len(unit)))


RESPONSE = {"problem": "2+3+4?", "response": "2+3 = 5\n5+4 = 9\n", "id": 7}
CHAT = {"messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "2+3+4?"},
                     {"role": "assistant", "content": [{"type": "text", "text": "2+3 = 5\n5+4 = 9\n"}]}]}  # fmt: skip

ASK, REPLY = {"role": "user", "content": "2+3+4?"}, {"role": "assistant", "content": "2+3 = 5\n5+4 = 9"}


def said(**fields):
    return {"messages": [ASK, REPLY | fields]}


@pytest.mark.parametrize("record", [RESPONSE, CHAT])
def test_free_text_is_a_chain_that_names_its_rule(record):
    tree = tree_of(record)
    chain = {"problem": "2+3+4?", "steps": ["2+3 = 5", "5+4 = 9"], "segmentation": "lines"}
    chain |= {"system": "Be brief."} if record is CHAT else {}
    assert record_of(tree) == record | chain
    assert tree_of(record_of(tree)) == tree  # what was written is read again
    assert next(iter(find("text").parse(record, "f:1", find("text").options()))) == record | chain


THOUGHTS = "2+3 first.\n\nThat is 5."


@pytest.mark.parametrize("field", ["reasoning_content", "reasoning"])
def test_thoughts_in_a_field_are_the_thoughts_in_tags(field):
    inline = f"<think>\n{THOUGHTS}\n</think>\n\n{REPLY['content']}"
    wanted = ["<think>\n2+3 first.", "That is 5.\n</think>", "2+3 = 5\n5+4 = 9"]
    about = {"tool_calls": [], "refusal": None, "id": "m-1", "created": 7}
    for record in (said(**{field: THOUGHTS}, **about), {"problem": "p", "response": REPLY["content"], field: THOUGHTS}):
        tree = tree_of(record)
        assert [node.text for node in tree.nodes] == wanted
        assert [node.text for node in tree_of(said(content=inline)).nodes] == wanted
        assert tree_of(record_of(tree)) == tree and tree.extra["segmentation"] == "thoughts"
    assert len(tree_of(said(**{field: ""})).nodes) == 2  # as servers write where there are none


def test_a_system_message_reaches_the_tokens_or_is_refused(tmp_path):
    save_tokenizer(tmp_path / "tokenizer.json")
    tokenizer = load_tokenizer(tmp_path)
    native = native_layout(tokenizer)
    tokens = token_tree(tree_of(CHAT), native).tokens_N.tolist()
    prompt = native.problem("2+3+4?", "Be brief.")
    assert tokens[: len(prompt)] == prompt == native.problem("Be brief.\n2+3+4?")
    chat = TemplateLayout(tokenizer, ("U:{problem}\n",), ("{step}\n",), system=("S:{system}\nU:{problem}\n",))
    assert chat.problem("1?", "{problem}") == tokenizer.encode("S:{problem}\nU:1?\n")
    plain = TemplateLayout(tokenizer, ("{problem}",), ("{step}\n",))
    refused(ValueError, "system message", token_tree, tree_of(CHAT), plain)
    refused(ValueError, "system message", prefixes_of, tree_of(CHAT))


def test_a_record_chooses_its_rule():
    assert tree_of(RESPONSE | {"segmentation": "paragraphs"}).nodes[0].text == "2+3 = 5\n5+4 = 9"
