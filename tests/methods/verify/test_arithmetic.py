"""Arithmetic in steps: what is correct, incorrect or undecided, and agreement with human labels."""

import json
import pathlib
import time
from fractions import Fraction

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from jprm.methods.data.solutions import GSM8K
from jprm.methods.verify.arithmetic import check_arithmetic

CASES = json.loads((pathlib.Path(__file__).parent / "arithmetic_cases.json").read_text(encoding="utf-8"))
"""Texts by what they are. Of `functions` the equations are true, but the number beside a word is no term by itself; in
`units_change` the two sides have other units."""
DEEP = "(((" * 1500 + "1 = 2"


@pytest.mark.parametrize("text", CASES["functions"] + CASES["units_change"])
def test_a_true_equation_with_a_function_or_another_unit_is_never_incorrect(text):
    assert check_arithmetic(text, limit_s=60).label != 0


@pytest.mark.parametrize("text", ["sqrt(16)/2 = 8", "log(100)/2 = 50", "cos 0 + 1 = 1", "8 + 1 = 9 squared"])
def test_a_function_is_not_dropped(text):
    assert check_arithmetic(text, limit_s=60).label != 1


@pytest.mark.parametrize("text", CASES["false_links"])
def test_every_link_of_a_chain_is_checked(text):
    assert check_arithmetic(text, limit_s=60).label == 0


@pytest.mark.parametrize(
    ("texts", "label"), [(CASES["right"], 1), (CASES["wrong"], 0), ([*CASES["open"], DEEP], None)],
    ids=["right", "wrong", "open"])  # fmt: skip
def test_verdicts(texts, label):
    verdicts = {text: check_arithmetic(text, limit_s=60) for text in texts}
    assert {text: verdict for text, verdict in verdicts.items() if verdict.label != label} == {}
    for verdict in verdicts.values():
        assert bool(verdict.checked) == (label is not None) and bool(verdict.false) == (label == 0)


@st.composite
def sums(draw, depth=3):
    """(text, value) of an expression, with every pair in brackets."""
    if not depth or draw(st.booleans()):
        number = draw(st.integers(0, 200))
        return str(number), Fraction(number)
    (left, a), (right, b) = draw(sums(depth - 1)), draw(sums(depth - 1))
    operator = draw(st.sampled_from("+-*/"))
    assume(b or operator != "/")
    value = {"+": a + b, "-": a - b, "*": a * b, "/": a / b if b else None}[operator]
    signs = {"*": ["*", " x ", r" \times ", " · "], "/": ["/", " ÷ "]}
    sign = draw(st.sampled_from(signs.get(operator, [f" {operator} "])))
    return f"({left}{sign}{right})", value


@settings(max_examples=80, deadline=None, suppress_health_check=list(HealthCheck))
@given(sums(), st.integers(1, 5))
def test_random_sums(pair, off):
    text, value = pair
    assume(text.startswith("("))
    assert check_arithmetic(f"so {text[1:-1]} = {value}.", limit_s=60).label == 1
    assert check_arithmetic(f"so {text[1:-1]} = {value + off}.", limit_s=60).label == 0


def test_no_step_takes_long():
    start = time.monotonic()
    assert check_arithmetic("(x+1)(y+2)(z+3)(a+b+c+x+y)^12 (1+x+y+z)^12 = (x+2)^12 (y+a+b)^12", limit_s=1).label is None
    assert check_arithmetic(" = ".join(["1 + 1 / 2 - x"] * 400), limit_s=1).label is None
    assert check_arithmetic("1 + 1 = 2", limit_s=0).label is None  # no time at all
    assert time.monotonic() - start < 300  # 2, and the start of a worker on a busy machine
    assert check_arithmetic("1 + 1 = 2", limit_s=60).label == 1  # by the next worker


def test_worked_solutions_of_gsm8k_hold(shared_data):
    """All are meant to be right. Of those called wrong in 1,500 problems, 7 of 8 are slips of the authors."""
    path = shared_data / "gsm8k" / "train.jsonl"
    labels = []
    with path.open() as file:
        for line, _ in zip(file, range(150), strict=False):
            (chain,) = GSM8K.parse(json.loads(line), "gsm8k", GSM8K.options("strip"))
            labels += [check_arithmetic(step).label for step in chain["steps"]]
    assert labels.count(1) / len(labels) > 0.85
    assert labels.count(0) <= 2


def test_what_is_called_wrong_people_call_wrong(shared_data):
    """ProcessBench's gsm8k: people marked the first wrong step, so labels up to it are known."""
    before, at = [], []
    for record in json.loads((shared_data / "processbench" / "gsm8k.json").read_text()):
        first = record["label"] if record["label"] >= 0 else len(record["steps"])
        before += [check_arithmetic(step).label for step in record["steps"][:first]]
        at += [check_arithmetic(step).label for step in record["steps"][first : first + 1]]
    assert before.count(0) <= 1 and at.count(0) >= 18
    assert before.count(1) / len(before) > 0.45
