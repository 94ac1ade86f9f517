"""Edits keep what they should; a scorer with one known flaw is detected by its edit and by no other."""

import re

import numpy as np
import pytest

from jprm.methods.evaluate import diagnostics as edits
from jprm.tree import tree_of

CHAIN = {
    "problem": "Let $x$ be even. What is x + 2?",
    "steps": ["We add 2 to $x$. That is easy.", "So x + 2 is $y$.", "The answer is $y$."],
}


def test_each_edit_changes_what_it_names_and_nothing_else():
    edited = {name: edit(CHAIN) for name, edit in edits.MEANING_KEPT.items()}
    assert [" ".join(step.split()) for step in edited["whitespace"]["steps"]] == CHAIN["steps"]
    assert edited["latex"]["steps"][1] == r"So x + 2 is \(y\)."
    assert edits.latex(edited["latex"])["steps"] == CHAIN["steps"]  # and back
    assert edited["rename"]["problem"] == "Let $u$ be even. What is u + 2?"
    assert edited["rename"]["steps"][0] == "We add 2 to $u$. That is easy." and "$y$" in edited["rename"]["steps"][1]
    assert "".join(edited["merge"]["steps"]).replace("\n", "") == "".join(CHAIN["steps"])
    assert edited["merge"]["pairs"] == [(1, 0), (2, 1)]
    assert edited["split"]["steps"][:2] == ["We add 2 to $x$.", "That is easy."]
    assert edited["split"]["pairs"] == [(0, 1), (1, 2), (2, 3)]
    wordless = [step.removeprefix("Let us now look at this carefully. ") for step in edited["wordy"]["steps"]]
    assert wordless == CHAIN["steps"]
    bare = {"problem": "p", "steps": ["one step"]}
    assert edits.latex(bare) is edits.rename(bare) is edits.merge(bare) is edits.split(bare) is None


def test_some_edits_make_one_step_wrong():
    chain = {"problem": "p", "steps": ["1 is one.", "2.5 is less than 13, and $x$ is 4.", "So 4 is it."]}
    edited = {name: edit(chain) for name, edit in edits.MEANING_LOST.items()}
    assert edited["number"]["steps"] == [chain["steps"][0], "2.5 is less than 13, and $x$ is 5.", chain["steps"][2]]
    assert edited["negated"]["steps"][1] == "2.5 is not less than 13, and $x$ is 4."
    assert edited["unfounded"]["steps"][::2] == chain["steps"][:1] + chain["steps"][1:2]
    assert {record["at"] for record in edited.values()} == {1}
    bare = {"problem": "p", "steps": ["no more"]}
    assert edits.number(bare) is edits.negated(bare) is edits.unfounded(bare) is None


def test_names_in_words_are_no_variables():
    assert edits.rename({"problem": "Max has 3 boxes.", "steps": ["Six is x's half."]}) is None


def right_chains(n=80):
    """Chains whose steps say which problem they belong to and where they stand."""
    rng = np.random.default_rng(0)
    chains = []
    for i in range(n):
        count = int(rng.integers(3, 6))
        steps = [f"Part {k} of {i}: we look at $x$ here. Then x is {k}." for k in range(count)]
        chains.append({"problem": f"Problem {i} about $x$ in {count} parts", "steps": steps, "first_error": -1,
                       "correct": True})  # fmt: skip
    return chains


def clean(record, flaw=None):
    """Scores 0.9 wherever the text so far is the solution of the problem, whatever its form, and 0.1 elsewhere."""
    problem, count = re.search(r"Problem (\d+) .* in (\d+)", record["problem"]).groups()
    text, scores = "", []
    rng = np.random.default_rng(int(problem))
    for step in record["steps"]:
        text += " " + step
        parts = [tuple(map(int, numbers)) for numbers in re.findall(r"Part\s+(\d+)\s+of\s+(\d+)", text)]
        said = re.findall(r"\b[xu]\W*\s+is(\s+not)?\s+(\d+)", text)
        good = parts == [(k, int(problem)) for k in range(len(parts))] and "theorem" not in text
        good &= said == [("", str(k)) for k in range(len(said))]
        score = 0.9 if good else 0.1
        wanted = {"format": "\\(" in step, "space": "  " in step, "name": "$u$" in step,
                  "merged": step.count("Part") > 1, "half": "Part" not in step}  # fmt: skip
        if flaw in wanted and wanted[flaw]:
            score -= 0.4
        if flaw == "fluent":  # any text that has a part of the problem in it will do
            score = 0.9 if any(p == int(problem) for _, p in parts) else 0.1
        if flaw == "blind":  # fluent whatever the problem
            score = 0.9
        scores.append(float(np.clip(score + rng.normal() * 0.02, 0, 1)))
    return record | {"scores": scores}


def findings(flaw):
    chains = right_chains()
    edited = edits.edited(list(map(tree_of, chains)), seed=0)
    report = edits.edits_report(*([tree_of(clean(c, flaw)) for c in side] for side in (chains, edited)), seed=0)
    assert set(report["meaning_kept"]) == set(edits.MEANING_KEPT)
    return {name for part in report.values() for name, row in part.items() if row["finding"]}


@pytest.mark.parametrize(
    ("flaw", "flaws"),
    [
        (None, set()),
        ("format", {"latex"}),
        ("space", {"whitespace"}),
        ("name", {"rename"}),
        ("merged", {"merge"}),
        ("half", {"split"}),
        ("fluent", {"shuffled", "repeated", "bare_answer", *edits.MEANING_LOST}),
        ("blind", {"shuffled", "repeated", "bare_answer", "other_problem", *edits.MEANING_LOST}),
    ],
)
def test_each_flaw_is_found_by_its_edit_alone(flaw, flaws):
    assert findings(flaw) == flaws


def test_only_chains_without_an_error_are_edited():
    wrong = tree_of({"problem": "p", "steps": ["a"], "first_error": 0, "correct": True})
    assert edits.right_chains([wrong], 10) == []
    assert len(edits.right_chains([*map(tree_of, right_chains(5)), wrong], 3)) == 3
