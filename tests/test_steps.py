"""Free text is split at the places that a reader would choose, loses no character, and is read as chains."""

import json
import time

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from jprm import steps
from jprm.data.readers import READERS
from jprm.tree import RecordError, record_of, tree_of

PIECES = [
    *(
        "Step 1: ",
        "step 2\n",
        "1. ",
        "2) ",
        "**3.** ",
        "\n\n",
        "\n",
        " ",
        ". ",
        "? ",
        "e.g. ",
        "3.5",
        "$",
        "$$",
        "\\[",
        "\\]",
    ),
    *("\\(", "\\)", "```", "~~~\n", "\\begin{a}", "\\end{a}", "<think>", "</think>", "A", "so x = 2", "\u3002", "\r\n"),
]
texts = st.lists(st.sampled_from(PIECES) | st.text(max_size=5), max_size=30).map("".join)


@given(texts, st.sampled_from(["auto", *steps.RULES]))
@example(" \n\n a", "paragraphs")
@example(" \n ", "auto")
def test_joined_steps_are_the_text_and_none_is_blank(text, rule):
    found = steps.split(text, rule)
    assert "".join(found) == text
    assert all(step.strip() for step in found) or not text.strip()
    assert steps.split(text, steps.rule_of(text)) == steps.split(text)


@pytest.mark.parametrize(
    ("rule", "found"),
    [
        ("markers", ["Step 1: add.\nIt is 5.\n\n", "Step 2: multiply.\n"]),
        ("markers", ["### Step 1\nAdd.\n", "### Step 2\nMultiply."]),
        ("numbered", ["1. Take 2.5 of it.\n", "2. Add.\n\nDone."]),
        ("paragraphs", ["First\nand more\n\n", "second\n \n", "third"]),
        ("paragraphs", ["Code:\n\n", "```py\na = 1\n\nb = 2\n```\n\n", "End."]),
        ("paragraphs", ["\\begin{align}\na\n\nb\n\\end{align}\n\n", "So \\[ c\n\nd \\] holds."]),
        ("lines", ["First.  And more.\n", "$$a\nb$$\n", "3. third"]),
        ("sentences", ["We use e.g. Dr. A. B. Smith's 3.5 rule. ", "Is it 4? ", "Yes."]),
        ("sentences", ["It costs $5. ", "He pays $7. ", "So $x. A$ is it."]),
        ("thoughts", ["<think>\nWait.\n\n", "No.\n</think>\n\n", "It is 4."]),
    ],
)
def test_rules_cut_where_a_reader_would(rule, found):
    text = "".join(found)
    assert steps.rule_of(text) == rule
    assert steps.split(text) == found


def test_numbers_that_do_not_count_up_are_no_markers():
    assert steps.rule_of("3. is odd.\n7. is too.") == "lines"
    assert steps.rule_of("Step 2 uses this.\nStep 1 does not.") == "lines"


def test_one_blank_line_among_many_lines_is_no_paragraph():
    assert steps.rule_of("\n".join("abcdefg") + "\n\nh") == "lines"


@pytest.mark.parametrize(
    "unit", ["$", "\\[", "\\(", "\\begin{a}", "```a\n", "~~~\n```\n", "a. ", " \n", "1. a\n", "-", "* ", "$a\n", "`"]
)
def test_time_is_linear_in_the_text(unit):
    """200,000 characters take about 0.2 s; a quadratic search takes minutes."""
    text = unit * (200_000 // len(unit))
    began = time.process_time()
    assert "".join(steps.split(text)) == text
    assert time.process_time() - began < 10


RESPONSE = {"problem": "2+3+4?", "response": "2+3 = 5\n5+4 = 9\n", "id": 7}
CHAT = {"messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "2+3+4?"},
                     {"role": "assistant", "content": [{"type": "text", "text": "2+3 = 5\n5+4 = 9\n"}]}]}  # fmt: skip


@pytest.mark.parametrize("record", [RESPONSE, CHAT])
def test_free_text_is_a_chain_that_names_its_rule(record):
    tree = tree_of(record)
    made = {"problem": "2+3+4?", "steps": ["2+3 = 5", "5+4 = 9"], "segmentation": "lines"}
    assert record_of(tree) == record | made
    assert tree_of(record_of(tree)) == tree  # what was written is read again
    assert next(iter(READERS["text"].parse(record, "f:1", READERS["text"].options()))) == record | made


def test_a_record_chooses_its_rule():
    assert tree_of(RESPONSE | {"segmentation": "paragraphs"}).nodes[0].text == "2+3 = 5\n5+4 = 9"


@pytest.mark.parametrize(
    ("record", "message"),
    [
        (RESPONSE | {"response": " "}, "response: is empty"),
        (RESPONSE | {"response": 3}, "response: is a number, not text"),
        (RESPONSE | {"segmentation": "words"}, "segmentation: is 'words', no rule"),
        (CHAT | {"problem": "p"}, "messages: has `problem` beside it"),
        ({"messages": CHAT["messages"][:2]}, "messages: lacks"),
        ({"messages": CHAT["messages"] * 2}, r"messages\[3\].role: is 'system' here"),
        ({"messages": [{"role": "user", "content": None}]}, r"messages\[0\].content: is null"),
        ({"messages": ["hi"]}, r"messages\[0\]: is a string"),
    ],
)
def test_bad_free_text_names_its_field(record, message):
    with pytest.raises(RecordError, match=message):
        tree_of(json.loads(json.dumps(record)), "f:1")
