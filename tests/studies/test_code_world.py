"""The code world's task against brute force; with `-m slow`, all of it at reduced size."""

import json

import numpy as np
import pytest
from refusing import refused

from experiments.code_world import functions
from experiments.code_world import world as code_world
from jprm.tree import read_records

STATES = [[], [5], list(range(-2, 40)), list(range(40, -2, -1)), [3, 1, 2, 3, 0, 7], [9, 9, 1, 4, 2, 8, 6, 5]]


def effect(line):
    """What a line does to every state; the error's name where it raises."""
    names, effects = {}, []
    exec("def g(xs):\n" + line + "\n    return xs", names)
    for state in STATES:
        try:
            effects.append(names["g"](list(state)))
        except ValueError:
            effects.append("ValueError")
    return effects


def test_the_checker_equals_what_lines_do():
    rng = np.random.default_rng(0)
    seen = set()
    for _ in range(300):
        problem = functions.problem(rng)
        assert functions.parse(problem.text) == problem
        right, steps = functions.solution(problem, rng, None), functions.solution(problem, rng, functions.Habits())
        judged = functions.check(problem, steps)
        assert judged == [effect(step) == effect(other) for step, other in zip(steps, right, strict=True)]
        assert functions.check(problem, right) == [True] * len(right)
        assert functions.check(problem, [*right, right[-1]])[-1] is False
        seen |= {(sentence, ok) for (sentence, _), ok in zip(problem.sentences, judged, strict=True)}
    traps = [name for name, (_, wrong) in (functions.OPERATIONS | functions.RETURNS).items() if wrong]
    assert {(name, False) for name in traps} <= seen
    least = functions.Problem((("Keep at least {}.", 3),))
    assert functions.check(least, ["    xs = [x for x in xs if x > 2]"]) == [True]
    refused(ValueError, "problem", functions.parse, "Keep at most 3. Return the list.")


def test_the_tokenizer_keeps_every_character():
    rng = np.random.default_rng(1)
    tokenizer = functions.tokenizer()
    for _ in range(200):
        problem = functions.problem(rng)
        text = "\n".join([problem.text, *functions.solution(problem, rng, functions.Habits())]) + "\n"
        ids = tokenizer.encode(text).ids
        assert tokenizer.decode(ids) == text and tokenizer.token_to_id("<unk>") not in ids


def test_no_bug_in_one_line_passes_the_tests():
    """As programs that Python runs: each line left out, as a bad habit has it, or with an amount off by one."""
    rng = np.random.default_rng(3)
    seen = 0
    for _ in range(40):
        problem = functions.problem(rng)
        record, right = functions.record(problem, rng), functions.solution(problem, rng, None)
        for i, (sentence, amount) in enumerate(problem.sentences):
            line, habit = (functions.OPERATIONS | functions.RETURNS)[sentence]
            others = [line.format(amount - 1), line.format(amount + 1), (habit or line).format(amount)]
            others += [""] if sentence in functions.OPERATIONS else []
            for other in {"    " + text for text in others} - {right[i]}:
                names = {}
                exec("\n".join([functions.PRELUDE, *right[:i], other, *right[i + 1 :]]), names)
                with pytest.raises((AssertionError, ValueError)):
                    [exec(test, names) for test in record["tests"]]
                seen += 1
    assert seen > 300


@pytest.mark.slow
def test_the_whole_of_it(one_device, tmp_path, monkeypatch):
    """Few problems, but the whole policy: a shorter training leaves no correct program. All stages, twice."""
    small = {"COUNTS": {"test_problems": 24, "problems": 12, "solutions": 14_000}, "SAMPLES": 4, "TEST_SAMPLES": 8,
             "POLICY_STEPS": 360, "REWARD_STEPS": 8}  # fmt: skip
    for name, value in small.items():
        monkeypatch.setattr(code_world, name, value)
    code_world.main(tmp_path / "out")
    report = json.loads((tmp_path / "out/results.json").read_text())
    for key in ("prm_monte_carlo_best_of_8", "orm_best_of_8", "orm_vote_8", "majority_8", "pass_1", "pass_8"):
        assert report[key]["low"] <= report[key]["value"] <= report[key]["high"]
    assert report["label_agreement"]["steps"] > 10 and np.isfinite(report["label_agreement"]["auroc"])
    pools = list(read_records(tmp_path / "out/test_pools.jsonl"))
    for pool in pools:
        by_answer = {}
        for sample in pool["samples"]:
            assert sample["correct"] == (sample.get("passed") == len(pool["tests"]))
            by_answer.setdefault(sample["answer"], set()).add(sample["correct"])
        assert all(len(outcomes) == 1 for outcomes in by_answer.values())  # equal behaviour passes or fails together
    page = (tmp_path / "out/report.html").read_text()
    assert "first wrong lines" in page and "right answers of 8 samples" in page
    written = {path: path.stat().st_mtime_ns for path in (tmp_path / "out").rglob("checkpoints/*")}
    code_world.main(tmp_path / "out")
    again = json.loads((tmp_path / "out/results.json").read_text())
    timed = {"seconds", "cpu_seconds", "peak_gb", "stages"}
    untimed = {key: value for key, value in report.items() if key not in timed}
    assert untimed == {key: value for key, value in again.items() if key not in timed}
    assert written == {path: path.stat().st_mtime_ns for path in (tmp_path / "out").rglob("checkpoints/*")}
