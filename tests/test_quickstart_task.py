"""The quickstart's task: its checker against the generator's truth, and what there is to learn and select."""

import importlib.util
import pathlib
import sys

import numpy as np
import pytest
from refusing import refused

PATH = pathlib.Path(__file__).parent.parent / "experiments/quickstart/task.py"


@pytest.fixture(scope="module")
def task():
    spec = importlib.util.spec_from_file_location("quickstart_task", PATH)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def worked(task):
    rng = np.random.default_rng(0)
    problems = [task.problem(rng) for _ in range(2000)]
    return problems, [task.solution(p, rng, task.Habits()) for p in problems]


def test_a_story_says_its_moves_and_no_more(task, worked):
    for problem in worked[0]:
        assert task.parse(problem.text) == problem
        assert all(1 <= count <= task.LARGEST for count in problem.counts)
    for text in (
        "",
        "Ana has 3 coins.",
        "Ana has 3 coins. On Monday Ana sleeps. How many coins does Ana have?",
        "x" * 1000,
    ):
        refused(ValueError, "story", task.parse, text)


def test_the_checker_agrees_with_the_generators_truth(task, worked):
    """Truth, told by the story alone: a right solution's steps are the story's counts; a wrong step leaves them."""
    rng = np.random.default_rng(1)
    for problem, steps in zip(*worked, strict=True):
        assert all(task.check(problem, task.solution(problem, rng, None)))
        written = [int(step.split("= ")[1]) for step in steps[:-1]]
        signs = [tuple(step.split()[2:4]) for step in steps[:-1]]
        truth = [
            sign == (move[0], str(move[1])) and result == task.apply(before, *move)
            for before, result, sign, move in zip(
                [problem.start, *written], written, signs, problem.moves, strict=False
            )
        ]
        assert task.check(problem, steps) == [*truth, True]


def test_what_a_checker_must_not_pass(task):
    problem = task.parse(
        "Ana has 37 coins. On Monday Ana finds 8 more. On Tuesday Ana loses 5. How many coins does Ana have?"
    )
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


def test_there_is_something_to_select_from(task, worked):
    """Some right answers have wrong working; authors are right often enough, and not too often."""
    right = np.array([task.answer_of(steps) == problem.answer for problem, steps in zip(*worked, strict=True)])
    sound = np.array([all(task.check(problem, steps)) for problem, steps in zip(*worked, strict=True)])
    assert 0.2 < right.mean() < 0.5
    assert 0.01 < (right & ~sound).mean() < 0.1
    assert not (sound & ~right).any()


def test_its_tokenizer_reads_back_what_it_wrote(task, worked):
    tokenizer = task.tokenizer()
    for problem, steps in zip(*worked, strict=True):
        for text in (problem.text, *steps):
            ids = tokenizer.encode(text).ids
            assert tokenizer.decode(ids) == text
            assert tokenizer.token_to_id("<unk>") not in ids
