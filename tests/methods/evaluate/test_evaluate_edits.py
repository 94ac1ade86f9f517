"""Edits keep what they should; a scorer with one known flaw is detected by its edit and by no other."""

import re

import numpy as np
import pytest

from jprm.methods.evaluate import diagnostics, edits
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


# ---- A perfect reader: it knows a text's variable and formulas, and takes it whatever letter or notation they have.
# `@` is the variable, `[[...]]` a formula.

SAFE = [
    "Let @ be even. What is @ + 2?",
    "Solve [[2@ + 1 = 7]]. So [[@ = 3]] and 2@ = 6.",
    "Put f(@) = @^2 + 1, so f'(@) = 2@ + 0; then [[f(@) \\leq g(@_1)]] in any case.",
    r"If [[@ \in \{1, 2\}]] then [[\begin{pmatrix} @ \\@ \end{pmatrix}]] has [[\text{an even sum}]].",
]
UNSAFE = [
    "f(@) = @^2 + 2b@ + 1.", "Here a@ + bp = c.", "[[ab@ = 6]] and [[@ = 2]].", r"[[\frac @y]] is [[@/y]].",
    "[[@ = 1]], so bp@ = bp.", r"As [[\int @^2 d@]] is.", "Each row is 5 @ 4 = 20, and @ is one.",
    "The @-axis is where @ = 0.", "The line of @n in [[@ + n]].", "A square of m @ m cells, @ = 3.",
    "She runs 3@ as far, @ = 2.", "The sum an@ = 4, @ = 1.", "sin(@)=@n(@)", r"[[@y \neq 0]], [[@ > 0]]",
    "Note @'s root, [[@]].",
]  # fmt: skip


def written(template, letter="x", left="$", right="$"):
    return template.replace("@", letter).replace("[[", left).replace("]]", right)


@pytest.mark.parametrize("template", SAFE)
@pytest.mark.parametrize("letter", ["x", "k"])
def test_rename_changes_every_occurrence_of_the_variable(template, letter):
    renamed = edits.rename({"problem": written("Find @.", letter), "steps": [written(template, letter)]})
    assert renamed["steps"] == [written(template, letter=renamed["problem"][5])]


@pytest.mark.parametrize("template", UNSAFE)
def test_rename_leaves_a_letter_that_may_be_a_factor_a_times_sign_or_a_name(template):
    assert edits.rename({"problem": "Find it.", "steps": [written(template)]}) is None


def test_rename_takes_no_letter_that_a_product_has():
    renamed = edits.rename({"problem": "Find x.", "steps": ["x + uv = 2 and [w] = 3q."]})
    assert renamed["problem"] == "Find r."


FORMULAS = [
    "So [[@]] is [[y^2]].",
    r"[[\$5 + \$3 = \$8]], and [[2^3]], [[\text{the total of all}]].",
    "Then $$@ = 2$$ and [[(@ + 1)]].",
]
MONEY = [
    "He spends $2640 on shoes each year (24: $110).", "$5 + $3 = $8", "From $5 to $@$.", "5$, 6$ or 7$",
    "A cost of $5 or 6$.", "($5)+($3)", "US$5 and $6/hour.", "$20 for [[@]] items", "in $: 5, and $ 6 more",
]  # fmt: skip


@pytest.mark.parametrize("template", FORMULAS)
def test_latex_rewrites_formulas_and_back(template):
    plain, other = written(template), written(template, left=r"\(", right=r"\)")
    assert edits.latex({"problem": "p", "steps": [plain]})["steps"] == [other]
    if "$" not in other:
        assert edits.latex({"problem": "p", "steps": [other]})["steps"] == [plain]


@pytest.mark.parametrize("template", MONEY)
def test_latex_leaves_money(template):
    formula = edits.latex({"problem": "p", "steps": [written(template), "So $x$."]})["steps"]
    assert formula == [written(template), r"So \(x\)."]
    assert edits.latex({"problem": "p", "steps": [written(template, left=r"\(", right=r"\)")]}) is None


def test_split_keeps_formulas_and_names_whole():
    for whole in ("So $P(x; A)$ is 2.", "It is 5! \\cdot 2.", "Mr. Smith has 2.", "Mrs. Smith has 2."):
        assert edits.split({"problem": "p", "steps": [whole]}) is None
    two = edits.split({"problem": "p", "steps": ["One:\n- a. \nTwo! Three."]})
    assert two["steps"] == ["One:\n- a.", "Two! Three."]


def test_a_perfect_reader_has_no_finding():
    """It scores a text 1 if it is the template in some letter and some notation, else 0."""
    texts = [*SAFE, *UNSAFE, *FORMULAS, *MONEY]
    notations = (("$", "$"), (r"\(", r"\)"))
    forms = [{written(text, letter, *sides) for letter in "xuvw" for sides in notations} for text in texts]
    chains = [{"problem": f"Problem {i}.", "steps": [written(text)]} for i, text in enumerate(texts)]
    kept = [
        record | {"edit": name, "of": i}
        for i, chain in enumerate(chains)
        for name in ("whitespace", "latex", "rename", "wordy")
        if (record := edits.MEANING_KEPT[name](chain))
    ]

    def read(record, i):
        step = " ".join(record["steps"][0].split()).removeprefix("Let us now look at this carefully. ")
        return tree_of(record | {"scores": [float(step in forms[i])]})

    whole = [read(chain, i) for i, chain in enumerate(chains)]
    changed = [read(record, record["of"]) for record in kept]
    report = diagnostics.edits_report(whole, changed, seed=0)["meaning_kept"]
    assert set(report) == {"whitespace", "latex", "rename", "wordy"}
    assert not any(row["change"]["value"] or row["finding"] for row in report.values())


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
    report = diagnostics.edits_report(*([tree_of(clean(c, flaw)) for c in side] for side in (chains, edited)), seed=0)
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
    assert diagnostics.right_chains([wrong], 10) == []
    assert len(diagnostics.right_chains([*map(tree_of, right_chains(5)), wrong], 3)) == 3
