"""Arithmetic in steps: what is correct, incorrect or undecided, and agreement with human labels."""

import json
import time
from fractions import Fraction

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from jprm.methods.data.solutions import GSM8K
from jprm.methods.verify.arithmetic import check_arithmetic

RIGHT = [
    "Natalia sold 48/2 = <<48/2=24>>24 clips in May.",
    "16 tbs - 4 tbs = 12 tbs",
    "2 tbs / 50 tbs * 100% = 4%",
    "He pays $1,250 + $2,360.50 = $3,610.50.",
    "10/3 = 3.33",
    "2/3 = 0.66",  # truncated
    "1/3 = 33%",
    "20% of 60 = 12",
    "Half is 1/2 of 30 = 15",
    "She has 3 x 4 = 12 apples.",
    "$270 / 2 people = $135/person",
    r"\[ \frac{3}{5} \times 30 = 18 \]",
    r"So \(\sqrt{50} = 5\sqrt{2}\).",
    r"$\pi \cdot 2^2 \approx 12.57$",
    "2 1/2 * 2 = 5",
    r"$2\frac{1}{2} + 1 = 3.5$",
    r"$(x + 1)^2 = x^2 + 2x + 1$",
    r"$\frac{x^2 - 1}{x - 1} = x + 1$",
    r"\[4x = 100\] Solving for \(x\), we get: \[x = \frac{100}{4}\] \[x = 25\]",
    "5! = 120",
    "3 + 4 < 8",
    "60 * 4/5 = (60 * 4) / 5 = 240 / 5 = 48",
    "100 (initially invited) + 200 (invited by others) = 300 guests",
    "5 times 3 = 15",
    "2^10 = 1024",
    "7 − 2 = 5",
    r"\[ = \frac{60 \text{ cm}}{2} = 30 \text{ cm, in all} \]",
    r"so $x - 4 = 1 \implies x = 5$; $x - 4 = 11$",
    r"Factorials:\n- \(4! = 4 \times 3 \times 2 \times 1\)\n- \(3! = 6\)".replace("\\n", "\n"),  # bullets
]
WRONG = [
    "Natalia sold 48/2 = <<48/2=25>>25 clips in May.",
    "16 tbs - 4 tbs = 13 tbs",
    "10/3 = 3.34",
    "10/3 = 3",
    "He pays $1,250 + $2,360 = $3,600.",
    "20% of 60 = 13",
    "3 x 4 = 12 and 12 x 2 = 25",
    r"\[ \frac{3}{5} \times 30 = 20 \]",
    r"$\sqrt{50} = 6\sqrt{2}$",
    r"\[4x = 100\] Solving for \(x\), we get: \[x = 20\]",
    "60 * 4/5 = 240 / 5 = 49",
    "3 + 4 > 8",
    "5 * 0.3 = 1.8",
]
OPEN = [
    "There are 12 months in a year.",
    "1 foot = 12 inches",
    "x = 5",
    "Let 3x + 5 = 2x + 7.",  # a condition, not an identity
    "total - 5 = 10",
    "The product of 5 and 3 + 2 = 17",
    "2 hours + 30 minutes = 150 minutes",
    "3 million / 2 = 1,500,000",
    "3.33 * 3 = 10",  # 3.33 may be rounded
    "10/3 = 3 whole boxes",
    "$200 + 20% = $240",
    "5 + 3 = 8 + 2",  # goes on from 8
    "7 + 8 = 3 (mod 12)",
    "2,5 * 2 = 5",  # a decimal comma
    "12:30 + 45 = 13:15",
    "101_2 + 1 = 6",
    "1st - 5 = 6th",
    "f(2) = 5 and f(3) = 9",
    r"\(\frac{1}{37} = 0.\overline{027}\)",
    "1/3 + 1/3 = 0.6...",
    r"\[49 - 6 = 3ab\] \[43 = 3ab\]",
    r"\[f^{-1}(9) = 5\] so \[f^{-1}(13) = 11\]",
    "s = 1 + 2x and s' = 1 - 2x",
    "She has 5 boxes (3 + 2 of each kind) and cost = price",
    "9**9**9 = 5",
    "9^{9^{9}} + 1 = 5",
    "10^100000 / 10^99999 = 11",
    "5 / 0 = 7",
    "(((" * 1500 + "1 = 2",
    "__import__('os').system('true') = 1 + 1 + 1",
    "= = = 5 + = 3",
    "",
]


FUNCTIONS = [
    r"sqrt(16)/2 = 2",
    r"sqrt 16 / 2 = 2",
    r"2sqrt(9) + 1 = 7",
    r"sqrt{16}/2 = 2",
    r"4 + 4 = 2sqrt(16)",
    r"log(100) + 1 = 3",
    r"log2(8) + 1 = 4",
    r"log_{2}8 + 1 = 4",
    r"log10(1000)/3 = 1",
    r"cos 0 + 1 = 2",
    r"sin(0) * 5 + 2 = 2",
    r"tan(45°) + 1 = 2",
    r"abs(-5) + 3 = 8",
    r"factorial(5)/2 = 60",
    r"5 factorial / 2 = 60",
    r"3 * 2 = 3 factorial",
    r"the square root of 16 / 2 = 2",
    r"square root of (9 + 16) = 5",
    r"the cube root of 27 + 1 = 4",
    r"4 + 4 = 4 square root of 4",
    r"5 choose 2 + 1 = 11",
    r"5 squared + 1 = 26",
    r"Area(4)/2 = 8",
    r"double(5) + 1 = 11",
    r"\operatorname{log}(100) + 1 = 3",
    r"\text{abs}(-5) + 3 = 8",
    r"(sqrt(16)) (3 + 1) = 16",
    r"sqrt(3^2 + 4^2) = 5",
    r"\sqrt{16}/2 = 2",
    r"\sqrt[3]{8} + 1 = 3",
    r"\log_2 8 + 1 = 4",
    r"|-5| + 3 = 8",
    r"max(3, 5) + 1 = 6",
    r"gcd(12, 18) + 1 = 7",
    r"5 percent of 60 = 3",
]
"""True, but the number beside a word is not a term by itself."""
FALSE_LINKS = [
    "2+2=4=5",
    "2 + 2 = 4 = 5",
    "2+2=4=4=5",
    "2+2=4=5=5",
    "3*4=12=13=12",
    "x = 2 + 2 = 4 = 5",
    "5 = 2 + 3 = 6",
    "1 + 1 = 2 apples = 3 apples",
    "1/2 = 0.5 = 0.6",
    "3 + 1 = 4 < 3",
    "2+2=4\n=5",
]
UNITS_CHANGE = [
    "5 * 12 = 60 minutes = 1 hour",
    "2 * 8 = 16 slices = 4 portions",
    "1 yard = 3 feet = 36 inches",
    "2 * 50 = 100 cents = $1",
    "4 * 5 = 20 quarters = $5",
]


@pytest.mark.parametrize("text", FUNCTIONS)
def test_a_true_equation_with_a_function_is_never_incorrect(text):
    assert check_arithmetic(text, limit_s=60).label != 0


@pytest.mark.parametrize("text", ["sqrt(16)/2 = 8", "log(100)/2 = 50", "cos 0 + 1 = 1", "8 + 1 = 9 squared"])
def test_a_function_is_not_dropped(text):
    assert check_arithmetic(text, limit_s=60).label != 1


@pytest.mark.parametrize("text", FALSE_LINKS)
def test_every_link_of_a_chain_is_checked(text):
    assert check_arithmetic(text, limit_s=60).label == 0


@pytest.mark.parametrize("text", UNITS_CHANGE)
def test_a_link_between_units_is_never_incorrect(text):
    assert check_arithmetic(text, limit_s=60).label != 0


@pytest.mark.parametrize(("texts", "label"), [(RIGHT, 1), (WRONG, 0), (OPEN, None)], ids=["right", "wrong", "open"])
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
    (one, a), (two, b) = draw(sums(depth - 1)), draw(sums(depth - 1))
    operator = draw(st.sampled_from("+-*/"))
    assume(b or operator != "/")
    value = {"+": a + b, "-": a - b, "*": a * b, "/": a / b if b else None}[operator]
    sign = draw(
        st.sampled_from({"*": ["*", " x ", r" \times ", " · "], "/": ["/", " ÷ "]}.get(operator, [f" {operator} "]))
    )
    return f"({one}{sign}{two})", value


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
    assert time.monotonic() - start < 60  # 2, and the start of a worker on a busy machine
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
