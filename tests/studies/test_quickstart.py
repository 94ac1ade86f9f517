"""The quickstart: its task's checker against the generator's truth, and its judgement on synthetic samples and labels;
with `-m slow`, all of it at reduced size."""

import itertools
import json
import re
import shutil

import numpy as np
import pytest
from refusing import refused
from rich.console import Console
from tiny import Letters

from experiments.quickstart import critique, equal_cost, judge, models, rl, run, task
from jprm.experiment import read
from jprm.io.jsonl import write_records
from jprm.methods.judge.critiques import JudgePrompt, verdicts
from jprm.methods.judge.judge import Judge
from jprm.methods.policy.protocol import Sample
from jprm.options import find_part
from jprm.tree import read_records, tree_of


@pytest.fixture(scope="module")
def worked():
    rng = np.random.default_rng(0)
    problems = [task.problem(rng) for _ in range(2000)]
    return problems, [task.solution(p, rng, task.Habits()) for p in problems]


def test_a_story_says_its_moves_and_no_more(worked):
    for problem in worked[0]:
        assert task.parse(problem.text) == problem
        assert all(1 <= count <= task.LARGEST for count in problem.counts)
    odd = "Ana has 3 coins. On Monday Ana sleeps. How many coins does Ana have?"
    for text in ("", "Ana has 3 coins.", odd, "x" * 1000):
        refused(ValueError, "story", task.parse, text)


def test_the_checker_agrees_with_the_generators_truth(worked):
    """Truth, told only by the story: a right solution's steps are the story's counts; a wrong step leaves them."""
    rng = np.random.default_rng(1)
    for problem, steps in zip(*worked, strict=True):
        assert all(task.check(problem, task.solution(problem, rng, None)))
        written = [int(step.split("= ")[1]) for step in steps[:-1]]
        signs = [tuple(step.split()[2:4]) for step in steps[:-1]]
        moves = zip([problem.start, *written], written, signs, problem.moves, strict=False)
        truth = [
            sign == (move[0], str(move[1])) and result == task.apply(before, *move)
            for before, result, sign, move in moves
        ]
        assert task.check(problem, steps) == [*truth, True]


STORY = (
    "Ana has 8 coins. On Monday Ben gives Ana 3. On Tuesday Ana loses 2 pairs. On Wednesday Ben finds 2 more."
    " On Thursday Ana sells 3. How many coins does Ana have?"
)


def test_a_sentence_changes_the_count_of_its_owner_alone():
    assert task.parse(STORY).moves == [("+", 3), ("-", 4), ("+", 0), ("-", 3)]
    assert task.parse(STORY.replace("Ben", "Dia")).moves == task.parse(STORY).moves
    bought = STORY.replace("Ben gives Ana 3", "Ben buys 3 from Ana")
    assert task.parse(bought).moves[0] == ("-", 3)


@pytest.mark.parametrize(
    ("step", "wrong", "kind"),
    [
        (0, "Monday: 8 - 3 = 5", "operation"),
        (0, "Monday: 8 + 0 = 8", "skipped"),
        (0, "Monday: 8 + 2 = 10", "copied"),
        (0, "Monday: 8 + 3 = 1", "sum"),
        (1, "Tuesday: 11 - 2 = 9", "unit"),
        (1, "Tuesday: 8 - 4 = 4", "count"),
        (1, "Wednesday: 11 - 4 = 7", "form"),
        (2, "Wednesday: 7 + 2 = 9", "quantity"),
        (3, "Thursday: 7 + 3 = 10", "operation"),
        (4, "The answer is 5.", "form"),
    ],
)
def test_mistakes_are_named_by_what_a_reader_sees(step, wrong, kind):
    problem = task.parse(STORY)
    steps = task.solution(problem, np.random.default_rng(0), None)
    assert task.mistakes(problem, steps) == [None] * 5
    assert task.mistakes(problem, [*steps[:step], wrong])[step] == kind


@pytest.mark.parametrize(
    ("habit", "kinds"),
    [
        ("operation", {"operation"}), ("unit", {"unit"}), ("quantity", {"quantity"}), ("skipped", {"skipped"}),
        ("copied", {"copied", "unit"}), ("carry", {"sum"}), ("borrow", {"sum"}),
    ],
)  # fmt: skip
def test_a_habit_makes_its_own_kind_of_mistake(habit, kinds):
    rng = np.random.default_rng(2)
    never = dict.fromkeys(("operation", "unit", "quantity", "skipped", "copied", "carry", "borrow"), 0.0)
    habits, seen = task.Habits(**never | {habit: 1.0}), set()
    for problem in (task.problem(rng) for _ in range(200)):
        steps = task.solution(problem, rng, habits)
        seen |= {kind for kind in task.mistakes(problem, steps) if kind}
        assert all(task.check(problem, task.solution(problem, rng, task.Habits(**never))))
    assert seen == kinds


def test_most_mistakes_are_true_equations(worked):
    kinds = [kind for problem, steps in zip(*worked, strict=True) for kind in task.mistakes(problem, steps) if kind]
    assert kinds.count("sum") < len(kinds) / 4
    assert {"operation", "quantity", "unit", "skipped", "copied"} < set(kinds)


def test_what_a_checker_must_not_pass():
    days = "On Monday Ana finds 8 more. On Tuesday Ana loses 5."
    problem = task.parse(f"Ana has 37 coins. {days} How many coins does Ana have?")
    right = ["Monday: 37 + 8 = 45", "Tuesday: 45 - 5 = 40", "The answer is 40."]
    assert task.labels(problem, right) == [1, 1, 1]
    wrong_steps = {
        0: ["Monday: 37 + 8 = 35", "Monday: 73 + 8 = 81", "Tuesday: 37 + 8 = 45", "Monday: 37 + 8 = 45 and so on"],
        1: ["Tuesday: 40 - 5 = 35", "Tuesday: 45 + 5 = 50", "The answer is 45.", ""],
        2: ["The answer is 41.", "Wednesday: 40 + 0 = 40", "The answer is 40"],
    }
    for position, step in ((position, step) for position, steps in wrong_steps.items() for step in steps):
        wrong = [*right[:position], step, *right[position + 1 :]]
        assert task.labels(problem, wrong)[: position + 1] == [1.0] * position + [0.0], step
    # By itself, what goes on correctly from a mistake is right.
    assert task.labels(problem, ["Monday: 37 + 8 = 35", "Tuesday: 35 - 5 = 30", "The answer is 30."]) == [0, 1, 1]
    assert task.labels(problem, right[:2]) == [1, 1]
    assert task.labels(problem, [*right, "The answer is 40."]) == [1, 1, 0, 0]


def test_there_is_something_to_select_from(worked):
    """Some right answers have wrong working; authors are right often enough, and not too often."""
    right = np.array([task.answer_of(steps) == problem.answer for problem, steps in zip(*worked, strict=True)])
    sound = np.array([all(task.check(problem, steps)) for problem, steps in zip(*worked, strict=True)])
    assert 0.2 < right.mean() < 0.5
    assert 0.01 < (right & ~sound).mean() < 0.1
    assert not (sound & ~right).any()


def test_its_tokenizer_reads_back_what_it_wrote(worked):
    tokenizer = task.tokenizer()
    for problem, steps in zip(*worked, strict=True):
        for text in (problem.text, *steps):
            ids = tokenizer.encode(text).ids
            assert tokenizer.decode(ids) == text
            assert tokenizer.token_to_id("<unk>") not in ids


PROBLEM = "Ana has 7 coins. On Monday Ana finds 5 more. On Tuesday Ana loses 2. How many coins does Ana have?"
SOUND = ["Monday: 7 + 5 = 12", "Tuesday: 12 - 2 = 10", "The answer is 10."]
LUCKY = ["Monday: 7 + 5 = 13", "Tuesday: 13 - 2 = 10", "The answer is 10."]
WRONG = ["Monday: 7 + 5 = 12", "Tuesday: 12 - 2 = 11", "The answer is 11."]


def sample(steps):
    return {"steps": steps, "answer": int(steps[-1].split()[-1][:-1]), "correct": steps[-1] == SOUND[-1], "tokens": 9}


def test_chains_name_their_first_wrong_step():
    record = {"problem": PROBLEM, "answer": 10, "samples": [sample(steps) for steps in (SOUND, LUCKY, WRONG)]}
    chains = judge._chains(record, task)
    assert [(chain["label"], chain["final_answer_correct"]) for chain in chains] == [(-1, True), (0, True), (1, False)]
    working = [judge._is_wrong_working(record, sample) for sample in record["samples"]]
    assert working == [False, True, False]


def test_labels_agree_over_steps_that_go_on(tmp_path):
    """Of the four distinct inner steps, the lucky chain's first has a value above 0 but is wrong: 3 of 4 agree."""
    formal = [sample(steps) | {"labels": labels} for steps, labels in ((SOUND, [1, 1, 1]), (LUCKY, [0, 0, 0]))]
    value = [sample(steps) | {"labels": labels} for steps, labels in ((SOUND, [1, 1, 1]), (LUCKY, [0.5, 0, 1]))]
    for name, samples in (("formal", formal), ("monte_carlo", value)):
        write_records(tmp_path / f"{name}.jsonl", [{"problem": PROBLEM, "samples": samples}])
    wanted = {"steps": 4, "accuracy_hard": 0.75, "auroc": 1, "right_without_value": 0, "wrong_with_value": 1 / 3}
    report = judge.label_agreement(tmp_path)
    assert {name: report[name] for name in wanted} == pytest.approx(wanted)


def test_an_author_without_habits_criticises_as_the_checker_does():
    rng = np.random.default_rng(0)
    prompt = JudgePrompt(**critique.PROMPT)
    for _ in range(300):
        problem = task.problem(rng)
        steps = task.solution(problem, rng, task.Habits())
        for end, right in enumerate(task.check(problem, steps), start=1):
            redo = critique.redone(problem, steps[:end], rng, None)
            assert (redo == steps[end - 1]) == right
            [verdict] = verdicts(prompt, f"{redo}\n{'+' if right else '-'}", end)
            assert verdict.correct == right
    assert critique.redone(problem, ["Monday: what?", steps[0]], rng, None) is None


def test_the_cost_of_critiques_is_the_mean_over_all_choices_of_samples():
    critic = Judge(policy=None, prompt=JudgePrompt(**equal_cost.critique.PROMPT), samples=2)  # pyright: ignore
    layout, chains, generated = Letters(), [SOUND, LUCKY, WRONG, SOUND], 77
    tree = tree_of({"problem": PROBLEM, "samples": [sample(steps) for steps in chains]})
    prefixes = [{tuple(steps[:end]) for end in range(1, len(steps) + 1)} for steps in chains]
    asked = len(set.union(*prefixes))  # equal steps after equal steps are asked about once
    assert asked == 8

    def cost(subset):
        questions = [critic.prompt.filled(PROBLEM, list(steps)) for steps in set.union(*(prefixes[i] for i in subset))]
        return sum(2 * len(layout.problem(question)) + generated / asked for question in questions)

    wanted_n = [np.mean([cost(subset) for subset in itertools.combinations(range(4), n)]) for n in (1, 2, 3, 4)]
    found_n = equal_cost.critique_tokens([tree], critic, layout, generated, 4)
    np.testing.assert_allclose(found_n, wanted_n, rtol=1e-12)


def test_a_policys_samples_become_pools():
    whole = Sample(tuple(SOUND), 9, "stop")
    cut = Sample(tuple(SOUND[:2]), 6, "length")
    assert find_part(run.REACHES_ANSWER, {}, "verifier", files=True) is task.reaches_answer  # of the rollouts
    pool = run.pool({"problem": PROBLEM, "answer": 10}, [whole, cut])
    assert [(sample["answer"], sample["correct"]) for sample in pool["samples"]] == [(10, True), (None, False)]


def test_a_model_trained_apart_reads_records_of_the_named_problems_alone(tiny_run, one_device, tmp_path):
    """What is fitted to its scores is of other problems."""
    (tmp_path / "prm").mkdir()
    shutil.copy(tiny_run.folder / "experiment.json", tmp_path / "prm")
    (file,) = tiny_run.experiment.data.train
    problems = sorted({record["problem"] for record in read_records(file)})
    folder = rl.trained_apart(tmp_path, "prm", set(problems[::2]), "half")
    (apart,) = read(folder / "experiment.json").data.train
    assert {record["problem"] for record in read_records(apart)} == set(problems[::2])
    before = (folder / "result.json").stat().st_mtime_ns
    assert rl.trained_apart(tmp_path, "prm", set(), "half") == folder
    assert (folder / "result.json").stat().st_mtime_ns == before
    other = rl.trained_apart(tmp_path, "prm", set(problems[1::2]), "other")  # another split has a model of its own
    (apart,) = read(other / "experiment.json").data.train
    assert {record["problem"] for record in read_records(apart)} == set(problems[1::2])


def test_tables_fit_a_terminal_of_80_columns(capsys):
    figure = {"value": -0.1234, "low": -0.2345, "high": -0.0123, "better": 0.0}
    curves = {f"{name}_{use}_64": figure for name in judge.MODELS.values() for use in ("best_of", "vote")}
    less = {f"{name}_{use}_less_baseline": figure for name in judge.MODELS.values() for use in ("best_of", "vote")}
    search = dict.fromkeys(("accuracy", "less_best_of_n", "less_majority", "wrong_working"), figure)
    results = {
        **curves, **less, "n": 64, "majority_64": figure, "pass_1": figure, "pass_64": figure,
        "wrong_working": dict.fromkeys(judge.MODELS.values(), {"chosen": figure, "one_sample": 0.01}),
        "first_error": dict.fromkeys(judge.MODELS.values(), {"less": figure}),
        "baselines": {"best": "no_false_equation", "choosers": {"baseline: most numbers used": {"best_of_n": figure}}},
        "search": {"problems": 100, "budget": 620, "methods": dict.fromkeys(
            judge.METHODS, search | {"policy_tokens": 598.0, "prm_tokens": 246.0})},
    }  # fmt: skip
    judge.show(Console(width=80), results)
    printed = capsys.readouterr().out
    assert "most numbers used" in printed and "MCTS" in printed
    assert max(map(len, printed.splitlines())) <= 80


@pytest.mark.slow
def test_the_whole_of_it(one_device, tmp_path, monkeypatch, capsys):
    """Half of the policy's training and few problems: every stage, every key, and a second run that does nothing."""
    for module, values in (
        (run, dict(SOLUTIONS=6000, LABELLED=100, ROLLOUTS=2, TESTED=16, TESTED_SAMPLES=8)),
        (models, dict(POLICY_STEPS=240, REWARD_STEPS=20)),
        (judge, dict(SEARCHED=8)),
    ):
        for name, value in values.items():
            monkeypatch.setattr(module, name, value)
    run.main(tmp_path / "out")
    printed = capsys.readouterr().out
    assert not re.search(r'^{"', printed, re.M)  # lines for people
    assert max(len(line) for line in printed.splitlines() if str(tmp_path) not in line) <= 100
    results = json.loads((tmp_path / "out/results.json").read_text())
    for key in ("prm_best_of_8", "orm_best_of_8", "majority_8", "pass_1", "pass_8"):
        assert results[key]["low"] <= results[key]["value"] <= results[key]["high"]
    assert results["pass_8"]["value"] >= max(results[key]["value"] for key in ("prm_best_of_8", "pass_1"))
    assert set(results["search"]["methods"]) == {"best of n", "beam", "DVTS", "MCTS"}
    assert 0 < results["peak_gb"] < 3 and results["seconds"] > 0
    page = (tmp_path / "out/report.html").read_text()
    assert "Search at equal cost" in page and str(tmp_path) not in page
    assert not re.search(r"""(?:src|href)=["']https?:|url\(["']?https?:""", page)  # it asks for nothing
    written = {path: path.stat().st_mtime_ns for path in (tmp_path / "out").rglob("checkpoints/*")}
    run.main(tmp_path / "out")
    again = json.loads((tmp_path / "out/results.json").read_text())
    timed = {"seconds", "cpu_seconds", "peak_gb", "stages"}
    assert {k: v for k, v in again.items() if k not in timed} == {k: v for k, v in results.items() if k not in timed}
    assert written == {path: path.stat().st_mtime_ns for path in (tmp_path / "out").rglob("checkpoints/*")}
    assert np.isfinite(results["label_agreement"]["auroc"])
