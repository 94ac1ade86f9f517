"""Votes over answers in several spellings, against votes over the numbers that they spell."""

import os
import pathlib
from fractions import Fraction

import numpy as np
import pytest
import scipy
from refusing import refused
from toy_search import Script, Table

from jprm.methods.answers import canonical_answer, equivalent, library
from jprm.methods.evaluate import votes
from jprm.methods.evaluate.best_of_n import best_of_n_report, pools_of
from jprm.methods.evaluate.votes import answer_classes, vote_accuracy
from jprm.methods.policy.protocol import Problem
from jprm.methods.search.best_of_n import BestOfN, stays_ahead
from jprm.methods.search.jobs import answers_of, choose
from jprm.methods.search.lockstep import SearchConfig, search
from jprm.tree import tree_of

HALVES = [r"\frac{1}{2}", "1/2", "0.5", r"\dfrac12", "\\frac{2}{4}"]


def pool(answers, truth="1/2", problem="p"):
    """No sample has `correct`: the truth decides."""
    samples = [{"steps": ["a"], "scores": [0.5], "answer": answer} for answer in answers]
    return tree_of({"problem": problem, "answer": truth, "samples": samples})


def test_spellings_of_one_answer_do_not_split_a_majority():
    report = best_of_n_report([pool([*HALVES, "3", "3", "3"])], seed=0)
    assert report["mean_accuracy"] == 5 / 8
    assert report["majority"]["value"][-1] == 1.0
    assert report["rules"]["prod"]["weighted_vote"]["value"][-1] == 1.0


def test_a_search_votes_by_equivalence():
    texts = [rf"The answer is {answer}." for answer in [*HALVES, "3", "3", "3"]]
    policy, config = Script({(): texts}), SearchConfig(BestOfN(8), "prod", "majority")
    ((_, tree),) = search([Problem("p", "1/2", {})], policy, Table(dict.fromkeys(texts, 0.5)), config)
    result = choose(tree, "prod", "majority", answers_of(tree))
    assert result.correct is True


def spelled(value, rng):
    n, d = value.numerator, value.denominator
    forms = [f"{n}/{d}", rf"\frac{{{n}}}{{{d}}}", rf"\dfrac{{{2 * n}}}{{{2 * d}}}", str(float(value)), f"${n}/{d}$"]
    return forms[rng.integers(len(forms))]


def test_votes_over_spellings_are_votes_over_numbers():
    rng = np.random.default_rng(0)
    numbers = [Fraction(int(rng.integers(-3, 4)), int(rng.choice([1, 2, 4, 8]))) for _ in range(6)]
    drawn = [[numbers[i] for i in rng.integers(len(numbers), size=8)] for _ in range(20)]
    plain = [pool([float(x) for x in answers], float(answers[0]), str(i)) for i, answers in enumerate(drawn)]
    spelt = [
        pool([spelled(x, rng) for x in answers], spelled(answers[0], rng), str(i)) for i, answers in enumerate(drawn)
    ]
    np.testing.assert_array_equal(pools_of(plain).class_PN, pools_of(spelt).class_PN)
    as_numbers, spellings = (best_of_n_report(trees, seed=0)["majority"]["value"] for trees in (plain, spelt))
    assert as_numbers == spellings


FORMS = ["1/3", "0.333333", "0.3333", "18%", "0.18", "18", "18 percent", "x+1", "1+x", "(1,2)", "1,2", "2,1", "1<x<2",
         "x=5", "5", "10 cm", "10", r"2\sqrt{2}", r"\sqrt{8}", "red", "RED", r"\infty", "4i+3", "1 000", "1000 dollars",
         10**9, "1000000001", None, "nan"]  # fmt: skip


@pytest.mark.parametrize(
    ("classes", "weights"),
    [([0] + [1] * 10, [1.0] + [0.1] * 10), ([0] * 3 + [1] * 2 + [-1] * 6, [0.1, 0.2, 0.3, 0.2, 0.4] + [0.0] * 6)],
)
def test_sampled_votes_tie_where_sums_are_equal_in_another_order(classes, weights):
    """Eleven samples are too many to enumerate, and float32 sums of ten tenths are not quite 1."""
    class_1N, size = np.array([classes]), len(classes)
    right_1N, log_1N1 = (class_1N == 0).astype(float), scipy.special.xlogy(1, weights)[None, :, None]
    elected = vote_accuracy(class_1N, right_1N, log_1N1, np.array([size]), size, trials=32, seed=0)
    assert elected.value_PnK[0, -1, 0] == 0.5 and elected.standard_error_nK[-1, 0] == 0


@pytest.mark.parametrize("enumerated", [True, False])
def test_votes_of_some_samples_weigh_by_ratio_however_far_below_the_pool_they_are(monkeypatch, enumerated):
    """Weights of three levels `gap` nats apart: at 30 nats a level outvotes those below it, so at more too."""
    monkeypatch.setattr(votes, "ENUMERATE", 10 * enumerated)
    rng = np.random.default_rng(3)
    class_PN, right_PN, level_PN = (
        rng.integers(-1, 3, (20, 8)),
        rng.random((20, 8)).round(),
        rng.integers(0, 3, (20, 8)),
    )
    within_PNK = np.stack([np.zeros((20, 8)), rng.normal(size=(20, 8))], -1)  # ties, and none
    near, *far = (
        vote_accuracy(
            class_PN, right_PN, within_PNK - gap * level_PN[..., None], np.full(20, 8), 8, trials=16, seed=0
        ).value_PnK
        for gap in (30, 90, 800, 1e6)
    )
    for value_PnK in far:
        np.testing.assert_array_equal(value_PnK, near)


def test_classes_are_those_of_pairwise_comparison():
    """The comparison of numbers leaves out no pair that `equivalent` accepts."""
    numbers = [0.18, 0.3333, 0.333333, 5, 10, 18, 1000, 10**9, 10**9 + 1]
    texts = sorted(str(form) for form in FORMS if isinstance(canonical_answer(form), str) and "%" not in form)
    texts = [form for form in texts if "percent" not in form] + ["18 percent", "18%"]
    firsts, class_of = [], {}
    for form in [*numbers, *texts]:
        classes = [c for c, first in enumerate(firsts) if equivalent(first, form) or equivalent(form, first)]
        class_of[form] = classes[0] if classes else len(firsts)
        if not classes:
            firsts.append(form)
    expected = [class_of.get(canonical_answer(form), -1) for form in FORMS]
    classes = answer_classes(FORMS)
    assert (np.equal.outer(classes, classes) == np.equal.outer(expected, expected)).all()
    assert class_of["18%"] == class_of[0.18] != class_of[18] and expected.count(class_of[1000]) == 2
    assert (classes == -1).tolist() == [form in (None, "nan") for form in FORMS]


def test_classes_do_not_depend_on_the_order_of_the_samples():
    rng, classes = np.random.default_rng(0), answer_classes(FORMS)
    for _ in range(50):
        order = rng.permutation(len(FORMS))
        actual = answer_classes([FORMS[i] for i in order])
        same = np.equal.outer(classes, classes)[np.ix_(order, order)]
        assert (np.equal.outer(actual, actual) == same).all()
        kept = actual[actual >= 0]
        assert list(dict.fromkeys(kept)) == list(range(kept.max() + 1))  # numbered as they appear


def test_numbers_beyond_the_floats_are_compared_by_value():
    assert answer_classes(["1e999", "2e998", "10e998"]).tolist() == [0, 1, 0]


def seconds_of_library(call):
    """Returns the CPU seconds of SymPy's process during a call."""

    def spent():
        (worker,) = library._worker._idle
        fields = pathlib.Path(f"/proc/{worker.process.pid}/stat").read_text().rpartition(")")[2].split()
        return sum(map(int, fields[11:13])) / os.sysconf("SC_CLK_TCK")

    assert not equivalent("x^{99}", "x+98", limit_s=60)  # starts the process
    before = spent()
    call()
    return spent() - before


@pytest.mark.skipif(not os.path.exists("/proc/self/stat"), reason="needs /proc")
def test_many_distinct_expressions_take_seconds():
    """Each is read once, so 1,770 comparisons take far less time than 1,770 new expressions would."""
    new = seconds_of_library(lambda: [equivalent(f"x^{{{n}}}+y", rf"z^{{{n}}}\sqrt{{3}}") for n in range(70, 80)]) / 10
    answers = [rf"{a}\sqrt{{{b}}}+x^{{{c}}}" for a in range(2, 6) for b in (2, 3, 5, 7, 11) for c in (2, 3, 4)]
    classes = []
    assert seconds_of_library(lambda: classes.extend(answer_classes(answers))) < 1770 / 3 * new
    assert classes == list(range(60))
    assert answer_classes([None, "", "  ", float("nan"), "7"]).tolist() == [-1, -1, -1, -1, 0]


@pytest.mark.parametrize("truth", ["0.5", 0.5, r"\frac12"])
def test_correctness_by_answer_is_equivalence(truth):
    np.testing.assert_array_equal(pools_of([pool([*HALVES, "3", None], truth)]).correct_PN, [[1] * 5 + [0, 0]])


def test_the_mass_ahead_is_that_of_the_beta_distribution():
    for first in range(12):
        for second in range(first + 1):
            exact = scipy.special.betaincc(first + 1, second + 1, 0.5)
            assert stays_ahead(first, second) == pytest.approx(exact, abs=1e-12)


def test_a_vote_stops_when_it_is_decided():
    texts = [f"The answer is {answer}." for answer in [1, 1, 2, 1, 1, 1, 1, 1, *[2] * 56]]
    scores = Table(dict.fromkeys(texts, 0.5))
    for decided, drawn in ((0.0, 64), (0.8, 4), (0.95, 8)):
        policy, config = Script({(): texts}), SearchConfig(BestOfN(64, decided), "prod", "majority")
        ((_, tree),) = search([Problem("p", "1", {})], policy, scores, config)
        assert len(tree.draws) == drawn
        assert tree.ended == ("decided" if drawn < 64 else "done")
    refused(ValueError, "decided stops a majority", SearchConfig, BestOfN(8, 0.9), "prod", "best")
    refused(ValueError, "probability below 1", BestOfN, 8, 1.0)
