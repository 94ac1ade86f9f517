"""What a critic costs: counted turn by turn, and its baselines."""

import numpy as np

from jprm.methods.evaluate.interventions import FOLDS, RunOfTurns, flagged, interventions_report, threshold

RNG = np.random.default_rng(0)


def run(task, quality, solved, turns=6):
    """A run whose scores tell its bad turns, as far as `quality` says."""
    bad_T = (RNG.random(turns) < 0.4).astype(float) if not solved else np.zeros(turns)
    score_T = np.where(RNG.random(turns) < quality, 1 - bad_T, RNG.random(turns))
    place_T = np.arange(turns, dtype=float)
    return RunOfTurns(f"task {task}", score_T, bad_T, np.column_stack([place_T, place_T % 2]), solved)


def reported(runs):
    report = interventions_report(runs, 0)
    assert report is not None
    return report


RUNS = [run(task, 0.8, solved) for task in range(30) for solved in (False, True)]


def test_rates_are_those_of_a_count():
    figures = reported(RUNS)["figures"]["scores"]
    tasks = sorted({run.problem for run in RUNS})
    over, under, false = [], [], []
    for fold in range(FOLDS):
        others = [run for run in RUNS if tasks.index(run.problem) % FOLDS != fold]
        cut = threshold(np.concatenate([r.score_T for r in others]), np.concatenate([r.bad_T for r in others]) == 1)
        for r in (r for r in RUNS if tasks.index(r.problem) % FOLDS == fold):
            over += [score < cut for score, bad in zip(r.score_T, r.bad_T, strict=True) if not bad]
            under += [score >= cut for score, bad in zip(r.score_T, r.bad_T, strict=True) if bad]
            false += [any(score < cut for score in r.score_T)] * r.solved
    for key, counted in (("over", over), ("under", under), ("false", false)):
        assert np.isclose(figures[key]["value"], np.mean(counted))


def test_random_turns_stop_as_often_and_a_perfect_critic_never_errs():
    random = reported(RUNS)["figures"]["random"]
    rate = random["over"]["value"]
    assert np.isclose(random["under"]["value"], 1 - rate) and np.isclose(random["false"]["value"], 1 - (1 - rate) ** 6)
    perfect = reported([r._replace(score_T=1 - r.bad_T) for r in RUNS])["figures"]["scores"]
    assert [perfect[key]["value"] for key in ("over", "under", "false")] == [0, 0, 0]


def test_no_threshold_sees_its_own_task():
    score_M, bad_M, task_M = np.array([0.1, 0.9, 0.5, 0.6]), np.array([1.0, 0, 0, 1]), np.array([0, 0, 1, 1])
    np.testing.assert_array_equal(flagged(score_M, bad_M, task_M)[:2], [1, 0])  # of task 1: bad from below 0.6 on
    changed = flagged(np.array([0.1, 0.9, 0.5, 0.6]), np.array([0.0, 1, 0, 1]), task_M)
    np.testing.assert_array_equal(changed[:2], flagged(score_M, bad_M, task_M)[:2])


def test_runs_without_labels_count_if_they_are_solved_and_too_few_tasks_give_nothing():
    unlabelled = [r._replace(bad_T=np.full(6, np.nan)) if r.solved else r for r in RUNS]
    report = reported(unlabelled)
    assert report["n_solved"] == 30 and "false" in report["figures"]["scores"]
    assert interventions_report(RUNS[:1], 0) is None and interventions_report([], 0) is None
    assert interventions_report([r._replace(score_T=np.full(6, np.nan)) for r in RUNS], 0) is None
