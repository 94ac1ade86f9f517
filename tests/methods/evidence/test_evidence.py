"""Evidence: what sources say, the loss of the ranker, votes, and the verifier that a folder holds."""

import dataclasses
import json
import math
import os

import numpy as np
import pytest
from refusing import refused
from test_serve import call, post

import jprm
from jprm.apps import cli
from jprm.apps.serve.engine import TextEngine
from jprm.io.jsonl import RecordError
from jprm.methods.evaluate import baselines
from jprm.methods.evaluate.best_of_n import best_of_n_report, cut, drawn_pools, findings, pools_of, tables
from jprm.methods.evaluate.findings import verdict
from jprm.methods.evaluate.processbench import processbench_report
from jprm.methods.evaluate.scored import ScoreError
from jprm.methods.evidence import fit as fit_module
from jprm.methods.evidence import sources as evidence
from jprm.methods.evidence.baselines import (
    labelled_by_text,
    ranked_by_text,
    rows_of_steps,
    steps_without_false_equation,
)
from jprm.methods.evidence.fit import (
    PolicyPools,
    candidates,
    choose_verifier,
    choose_vote,
    fit,
    fit_calibrated,
    gains,
    policy_of,
    right_of,
)
from jprm.methods.evidence.ranker import (
    Chains,
    answer_loss,
    answer_shares,
    best_correct,
    calibrated,
    fit_near,
    fit_ranker,
    pair_loss,
    pairs_of,
    vote_correct,
)
from jprm.methods.evidence.sources import numbers, of_problem, results, value_of_step
from jprm.methods.evidence.verifier import Vote, pool_signals, vote_weights
from jprm.methods.jobs.score import score_file
from jprm.methods.label.jobs import teacher_labels
from jprm.methods.rl import rollout
from jprm.methods.rl.samples import Rollout
from jprm.methods.search.lockstep import live_scorer
from jprm.methods.verify import Verdict, verifiers
from jprm.methods.verify.arithmetic import check_arithmetic
from jprm.methods.verify.verifiers import Outcome
from jprm.options import ForeignCode
from jprm.score.scale import PROBABILITY
from jprm.tree import chains_of, tree_of, with_scores


def pool(problem, *samples, answer=None):
    record = {"problem": problem, "samples": [{"steps": steps, **about} for steps, about in samples]}
    return tree_of(record | ({} if answer is None else {"answer": answer}))


def made_pools(seed, n=60, samples=6, accuracy=0.5):
    """Pools of sums: an incorrect chain adds wrongly, or forgets a number of the problem."""
    rng, records = np.random.default_rng(seed), []
    for i in range(n):
        a, b, c = (int(x) for x in rng.integers(3, 40, 3))
        problem = f"Box {['red', 'blue'][i % 2]} number {seed} holds {a} nuts, {b} bolts and {c} pins. How many parts?"
        right, chains = a + b + c, []
        for _ in range(samples):
            kind = "right" if rng.random() < accuracy else rng.choice(["slip", "forgot"])
            slip = int(rng.integers(1, 4)) if kind == "slip" else 0
            first = f"A1: There are {a}+{b}={a + b + slip} nuts and bolts."
            total = a + b + slip + (0 if kind == "forgot" else c)
            last = f"A2: So there are {total} parts." if kind == "forgot" else f"A2: {a + b + slip}+{c}={total} parts."
            chains.append({"steps": [first, last], "answer": total, "correct": total == right})
        records.append({"problem": problem, "answer": right, "samples": chains})
    return records


def written(path, records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


@pytest.fixture(scope="module")
def fused(tmp_path_factory):
    folder = tmp_path_factory.mktemp("fused")
    files = [written(folder / f"policy{i}.jsonl", made_pools(i, accuracy=0.3 + 0.2 * i)) for i in range(2)]
    return fit(files, out=folder / "verifier"), folder / "verifier", files


def test_a_pool_without_steps_has_no_rows_beside_others():
    chain = tree_of({"problem": "1 + 1?", "steps": ["1 + 1 = 2"]})
    trees = [chain, tree_of({"problem": "p", "samples": [], "empty_samples": 2})]
    (alone,), rows = rows_of_steps([chain]), rows_of_steps(trees)
    np.testing.assert_array_equal(rows[0], alone)
    assert rows[1].shape == (0, alone.shape[1]) and steps_without_false_equation(trees)[1].shape == (0,)
    assert labelled_by_text(trees, [np.ones(1, int), np.zeros(0, int)]) is None  # too few to fit


def test_numbers_in_text():
    assert numbers("A3: She paid $1,200.50 for 3.5 kg.") == (1200.5, 3.5)
    assert numbers("Step 2. 16-3=13") == (16, 3, 13)
    assert results("16 - 3 - 4 = 9 and 9*2 = $18, so 12+6=18") == (9, 18, 18)
    assert results("3*4=12+5=17") == (17,)
    assert value_of_step("so 7 of 12") == 12
    assert value_of_step("no number") is None
    assert of_problem("She eats three of 16 eggs, a dozen are left") == {3, 16, 12}


def test_evidence_of_a_chain():
    tree = tree_of({
        "problem": "Ann has 3 pens and 4 cups. How many things does Ann have?",
        "steps": ["A1: Ann has 3 pens and 9 hats.", "A2: 3+4=8 things.", "A3: 8-1=7 things.", "A3: 8-1=7 things."],
    })  # fmt: skip
    rows = {name: evidence.find(name).read([tree])[0] for name in ("arithmetic", "numbers", "form")}
    assert rows["arithmetic"].tolist() == [[0, 0, 0, 0], [1, 1 / 2, 0, 0], [1, 1 / 3, 1 / 3, 0], [1, 1 / 4, 2 / 4, 0]]
    used, nowhere, copied, asked, linked = rows["numbers"].T
    assert used.tolist() == [0.5, 1, 1, 1]
    np.testing.assert_allclose(nowhere, math.log1p(1))  # 9; 8 is computed, 1 is a constant
    assert copied.tolist() == [0, 0, 0, 0]
    assert asked.tolist() == [1 / 2, 1 / 2, 1 / 2, 1 / 2]  # of `things` and `ann`
    assert linked.tolist() == [0, 0, 1 / 3, 2 / 4]
    assert rows["form"][:, 2].tolist() == [0, 0, 0, 1 / 4]
    assert rows["form"][:, -1].tolist() == [0, 0, 0, 0]
    np.testing.assert_allclose(rows["form"][:, 0], np.log([1, 2, 3, 4]))
    below = tree_of({"problem": "p", "steps": ["3 - 4 = -1", "9 - 4 = 5", "so \\boxed{-\\$5}"]})
    assert evidence.find("form").read([below])[0][:, -1].tolist() == [1, 0, 1]


@pytest.mark.parametrize(
    ("steps", "labels"),
    [
        (["\\[ x = \\frac{165}{1.1} \\]", "\\[ x = 150 \\]"], [None, 1]),
        (["\\[ x = \\frac{165}{1.1} \\]", "Hence:", "\\[ x = 160 \\]"], [None, None, 0]),
        (["1. **Total cost** = 54 * $4", "Total cost = $216"], [None, 1]),
        (["Total cost = 54 * 4", "Cost of cups = 210", "Cups = 3"], [None, None, None]),
        (["Cups = 3", "Cups = 5"], [None, None]),  # two statements, of which neither is computed
        (["Cups = 2 + 3 = 6", "Cups = 6"], [0, None]),
    ],
)  # fmt: skip
def test_a_quantity_is_held_against_what_an_earlier_step_said_of_it(steps, labels):
    assert evidence.labels_of(steps) == labels


def test_what_a_pool_says_by_brute_force():
    chains = [([f"1+{x}={y}", f"so {z}"], {"answer": z}) for x, y, z in [(2, 3, 3), (2, 3, 3), (2, 4, 4), (5, 6, 4)]]
    tree = pool("Count.", *chains)
    row = evidence.find("pool").read([tree])[0]
    answers = [3, 3, 4, 4]
    values = [{3}, {3}, {4}, {6}]
    for i in range(4):
        others = [j for j in range(4) if j != i]
        share = np.mean([answers[j] == answers[i] for j in others])
        rival = max(np.mean([answers[j] == x for j in others]) for x in set(answers) - {answers[i]})
        common = np.mean([np.mean([v in values[j] for j in others]) for v in values[i]])
        np.testing.assert_allclose(row[2 * i + 1], [share, share - rival, common, common, 0], atol=1e-12)
    assert np.isnan(evidence.find("pool").read([tree_of({"problem": "p", "steps": ["1+1=2"]})])[0]).all()


def test_pools_count_equivalent_answers_together():
    """`value_of_step` gives 0.5 for the first steps, and the answers that equal it are spelled in four ways."""
    spelled = ["0.5", r"\frac{1}{2}", "1/2", "50%", "5 cents", "5 dollars", None, "x+1", "1+x"]
    chains = [(["1/4 + 1/4 = 0.5", "So."], {"answer": answer}) for answer in spelled]
    row = evidence.find("pool").read([pool("Count.", *chains)])[0]
    shares = {answer: row[2 * i : 2 * i + 2, :2].tolist() for i, answer in enumerate(spelled)}
    for answer in spelled[:4]:  # three others of four, before two of another class
        assert shares[answer] == [[3 / 8, 1 / 8]] * 2
    for answer in ("5 cents", "5 dollars"):
        assert shares[answer] == [[4 / 8, 2 / 8], [0, -4 / 8]]
    assert shares[None] == [[4 / 8, 2 / 8], [0, -4 / 8]]
    for answer in ("x+1", "1+x"):
        assert shares[answer] == [[4 / 8, 3 / 8], [1 / 8, -3 / 8]]


@pytest.mark.parametrize("name", ["arithmetic", "numbers", "form"])
def test_a_row_does_not_depend_on_later_steps(name):
    record = made_pools(3, n=1)[0]
    steps = record["samples"][0]["steps"] + ["A3: That is 5 more."]
    whole = evidence.find(name).read([tree_of({"problem": record["problem"], "steps": steps})])[0]
    for k in range(1, len(steps)):
        part = evidence.find(name).read([tree_of({"problem": record["problem"], "steps": steps[:k]})])[0]
        np.testing.assert_array_equal(whole[:k], part)


def test_scores_as_evidence():
    rows, odds = np.array(evidence.score_rows([0.8, math.nan, 0.2, 0.5])), math.log(4)  # of 0.8, and minus that of 0.2
    expected = [[0.8, 0.8, 0.8, 0], [0.8, 0.8, math.nan, 0], [0.2, 0.5, 0.5, 2 / 3]]
    np.testing.assert_allclose(rows[[0, 1, 3], :4], expected)
    logs = [math.log(0.8), math.log(0.8), math.log(0.08)]
    expected = [[odds, odds, odds], [odds, math.nan, odds], [-odds, 0, 0]]
    np.testing.assert_allclose(rows[[0, 1, 3], 4:], np.column_stack([logs, expected]), atol=1e-12)
    assert len(rows[0]) == len(evidence.SCORES)
    assert np.isfinite(evidence.score_rows([0.0, 1.0])).all()
    (ratio,) = evidence.score_rows([1.0], [40.0])  # a log ratio: its weight is 1, and its log odds are kept
    assert ratio[-3:] == (40.0, 40.0, 40.0)
    record = {"problem": "p", "samples": [{"steps": ["a", "b"], "scores": [0.5, 0.25], "logprob": -4.0}]}
    tree = tree_of(record)
    np.testing.assert_allclose(evidence.find("stored").read([tree])[0][1, :4], [0.25, 0.375, 0.25, 1])
    np.testing.assert_allclose(evidence.find("logprob").read([tree])[0], [[math.nan] * 2, [-2, -2]])


def random_chains(seed, n=40, samples=5, numbers=3):
    rng = np.random.default_rng(seed)
    problem_M = np.repeat(np.arange(n), samples)
    x_MF = rng.normal(size=(n * samples, numbers))
    correct_M = (rng.random(n * samples) < 1 / (1 + np.exp(-x_MF @ np.arange(numbers)))).astype(float)
    return Chains(x_MF, correct_M, problem_M, problem_M % 2, rng.integers(-1, 3, n * samples))


def test_the_loss_is_that_of_all_pairs_and_its_gradient_that_of_differences():
    chains, w_F = random_chains(0), np.array([0.3, -0.2, 0.7])
    pairs = pairs_of(chains)
    expected, score_M = np.zeros((2, 2)), chains.x_MF @ w_F
    for p in range(40):
        here = np.flatnonzero(chains.problem_M == p)
        losses = [
            np.log1p(np.exp(score_M[j] - score_M[i]))
            for i in here for j in here if chains.correct_M[i] > chains.correct_M[j]
        ]  # fmt: skip
        if losses:
            expected[p % 2] += np.mean(losses), 1
    loss, slope_F = pair_loss(w_F, chains.x_MF, pairs, 0.1)
    np.testing.assert_allclose(loss, (expected[:, 0] / expected[:, 1]).mean() + 0.05 * w_F @ w_F)
    steps = 1e-6 * np.eye(3)
    above, below = ([pair_loss(w_F + sign * d, chains.x_MF, pairs, 0.1)[0] for d in steps] for sign in (1, -1))
    numeric = np.subtract(above, below) / 2e-6
    np.testing.assert_allclose(slope_F, numeric, atol=1e-8)


def test_answer_loss_is_the_share_of_the_correct_answer_in_the_weights():
    chains, w_F = random_chains(0), np.array([0.3, -0.2, 0.7])
    expected, score_M = np.zeros((2, 2)), chains.x_MF @ w_F
    for p in range(40):
        here = np.flatnonzero((chains.problem_M == p) & (chains.class_M >= 0))
        weight, right = np.exp(score_M[here]), chains.correct_M[here] > 0
        if 0 < right.sum() < len(here):
            expected[p % 2] += -np.log(weight[right].sum() / weight.sum()), 1
    loss, slope_F = answer_loss(w_F, chains.x_MF, chains, 0.1)
    np.testing.assert_allclose(loss, (expected[:, 0] / expected[:, 1]).mean() + 0.05 * w_F @ w_F)
    steps = 1e-6 * np.eye(3)
    above, below = ([answer_loss(w_F + sign * d, chains.x_MF, chains, 0.1)[0] for d in steps] for sign in (1, -1))
    np.testing.assert_allclose(slope_F, np.subtract(above, below) / 2e-6, atol=1e-8)
    huge = answer_loss(1e4 * w_F, chains.x_MF, chains)
    assert np.isfinite(huge[0]) and np.isfinite(huge[1]).all()


def test_answer_loss_grows_with_the_distance_however_far():
    """If the correct answer is 800 nats behind, the loss is 800, and its slope leads back."""
    chains = Chains(np.array([[0.0], [1]]), np.array([1.0, 0]), np.zeros(2, int), np.zeros(2, int), np.arange(2))
    loss, slope_F = answer_loss(np.array([800.0]), chains.x_MF, chains)
    assert (loss, slope_F[0]) == (800, 1)


def test_no_chain_has_no_vote():
    """E.g. a small policy has no problems in some folds."""
    none = random_chains(0).where(np.zeros(200, bool))
    assert len(vote_correct(none, np.zeros(0))) == len(best_correct(none, np.zeros(0))) == 0
    policies = [of_strength(name, problems) for name, problems in (("large", 300), ("small", 2))]
    assert choose_verifier(policies, Vote(), ["pool.answer_share"])[1]  # so the check was not skipped


@pytest.mark.filterwarnings("error")
def test_a_policy_with_one_problem_has_no_say_in_the_vote():
    policies = [of_strength(name, problems) for name, problems in (("a", 150), ("b", 160), ("c", 1))]
    vote, rows = choose_vote(policies, 0)
    assert {row["left_out"] for row in rows} == {"a", "b"} and all(np.isfinite(row["standard_error"]) for row in rows)


def of_strength(name, problems):
    """A policy whose evidence is better for correct chains."""
    rng, problem_M = np.random.default_rng(problems), np.repeat(np.arange(problems), 8)
    class_M = rng.integers(0, 3, len(problem_M))
    x_MF = rng.normal((class_M == 0).astype(float), 1.0)[:, None]
    chains = Chains(x_MF, (class_M == 0) * 1.0, problem_M, np.zeros(len(problem_M), int), class_M)
    return PolicyPools(name, [f"{name} {i}" for i in range(problems)], chains, {})


def test_the_best_chain_and_the_shares_of_answers_by_brute_force():
    chains = random_chains(5)
    score_M = np.random.default_rng(5).integers(0, 3, 200).astype(float)
    best_P = best_correct(chains, score_M)
    for p in range(40):
        here = np.flatnonzero((chains.problem_M == p) & (chains.class_M >= 0))
        leaders = here[score_M[here] == score_M[here].max(initial=-1)]
        assert best_P[p] == pytest.approx(chains.correct_M[leaders].mean() if len(leaders) else 0)
    np.testing.assert_allclose(
        answer_shares(np.array([1.0, 2, 3, 9]), np.array([0, 1, 0, -1])), [2 / 3, 1 / 3, 2 / 3, 0]
    )
    assert answer_shares(np.ones(2), np.array([-1, -1])).tolist() == [0, 0]


def scored_pools(seed, know, n=80, samples=6):
    """Pools of chains whose text says nothing; `know` are the log odds by which scores tell right from wrong."""
    rng, records = np.random.default_rng(seed), []
    for i in range(n):
        chains = []
        for _ in range(samples):
            right = rng.random() < 0.45
            score = 1 / (1 + np.exp(-rng.normal(know if right else -know)))
            answer = 7 if right else int(rng.integers(8, 10))
            chains.append({"steps": ["So."], "answer": answer, "correct": right, "scores": [float(score)]})
        records.append({"problem": f"Problem {seed} {i}: what?", "answer": 7, "samples": chains})
    return records


def test_a_verifier_with_a_model_chooses_answers_and_is_not_below_it(tmp_path):
    for i in range(2):
        (tmp_path / str(i)).mkdir()
    files = [written(tmp_path / str(i) / "pools.jsonl", scored_pools(i, know=0.7)) for i in range(2)]
    verifier = fit(files, ["form", "pool", "stored"], out=tmp_path / "verifier")
    assert [*verifier.measured["auroc_in_problems"]] == list(map(str, files))  # of one name: told apart by folder
    assert (verifier.chooses, verifier.measured["chosen"]) == ("answers", "fused")
    held_out = verifier.measured["held_out"]
    alone = [max(of_both) for name, of_both in held_out.items() if name != "fused"]
    assert (
        min(held_out["fused"]) >= max(alone) - 1e-9 > 0.5 and {"stored.sum_log", "pool.answer_share"} < held_out.keys()
    )
    (record,) = verifier.score_many(scored_pools(5, know=0.7, n=1))
    score = {sample["answer"]: sample["scores"][-1] for sample in record["samples"]}
    assert all(sample["scores"][-1] == score[sample["answer"]] for sample in record["samples"])
    assert sum(score.values()) == pytest.approx(1)  # each answer's share of the vote
    vote = {answer: 0.0 for answer in score}
    for sample in record["samples"]:
        vote[sample["answer"]] += sample["outputs"]["vote"][-1]
    assert max(vote, key=vote.get) == max(score, key=score.get)
    again = jprm.load(tmp_path / "verifier")
    assert list(again.score_many([record])) == list(verifier.score_many([record]))
    assert again.identity == verifier.identity and again.chooses == "answers"
    alone = verifier.score(record["problem"], ["So."])  # a chain alone has no pool, so it has no share
    assert 0 < alone[0] < 1


@pytest.mark.parametrize(("signal", "noise", "taken"), [(3.0, 30.0, "stored.sum_log"), (1.0, -0.1, "fused")])
def test_a_source_takes_the_place_of_a_verifier_that_it_is_ahead_of(signal, noise, taken):
    """By a standard error at least: a lead by chance is no reason to drop the verifier."""
    names = ["stored.sum_log", "form.noise"]
    rng, policies = np.random.default_rng(0), []
    for name in ("a", "b"):
        problems = [f"{name} {i}" for i in range(150)]
        problem_M = np.repeat(np.arange(150), 6)
        correct_M = (rng.random(900) < 0.5).astype(float)
        scatter = 0.0 if signal == 3 else 1.0
        x_MF = rng.normal(size=(900, 2)) * [scatter, 1] + np.outer(2 * correct_M - 1, [signal, 0])
        class_M = np.arange(900)  # each answer once: a vote of weights that are nearly equal is a draw
        policies.append(PolicyPools(name, problems, Chains(x_MF, correct_M, problem_M, 0 * problem_M, class_M), {}))
    real = fit_module.candidates

    def misled(*arguments, **options):
        found = real(*arguments, **options)
        ranker, vote, chooses = found["fused"]
        return found | {"fused": (dataclasses.replace(ranker, weight_F=np.array([1.0, noise])), vote, chooses)}

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fit_module, "candidates", misled)
        chosen, held_out = choose_verifier(policies, Vote(), names)
    assert chosen == taken and held_out["stored.sum_log"][0] > held_out["fused"][0], held_out
    assert choose_verifier(policies, Vote(), names)[0] == "fused"


def test_scores_without_a_signal_leave_the_majority():
    sources = [evidence.find(name) for name in ("pool", "stored")]
    policies = [policy_of(f"p{i}", list(map(tree_of, scored_pools(i, know=0.0))), sources) for i in (0, 1)]
    fresh = policy_of("new", list(map(tree_of, scored_pools(9, know=0.0, n=200))), sources).chains
    vote, names = Vote(), evidence.names(sources)
    chosen = candidates(policies, vote, names)[choose_verifier(policies, vote, names)[0]]
    less_P = right_of(chosen, fresh) - vote_correct(fresh, np.ones(len(fresh.problem_M)))
    assert less_P.mean() > -0.02


def test_a_vote_stays_near_a_few_numbers_unless_others_help():
    rng = np.random.default_rng(0)
    problem_M, few_F = np.repeat(np.arange(200), 6), np.array([0.0, 1.0, 0.0])
    x_MF, class_M = rng.normal(size=(1200, 3)), np.arange(1200)
    for other in (0.0, 1.5):
        odds_M = x_MF @ np.array([0.0, 1.5, other])
        correct_M = (rng.random(1200) < 1 / (1 + np.exp(-odds_M))).astype(float)
        chains = Chains(x_MF, correct_M, problem_M, 0 * problem_M, class_M)
        ranker = fit_near(chains, problem_M % 5, few_F, np.ones(3))
        share_F = np.abs(ranker.weight_F / ranker.weight_F[1])
        assert share_F[0] < 0.15 and (share_F[2] > 0.7 if other else share_F[2] < 0.15), (ranker.strength, share_F)
        assert np.corrcoef(ranker.log_odds(x_MF), odds_M)[0, 1] > 0.97
        assert 0.7 < np.polyfit(odds_M, ranker.log_odds(x_MF), 1)[0] < 1.3  # calibrated
    costly = fit_near(chains, problem_M % 5, few_F, np.array([1.0, 1.0, 1e4]))
    assert abs(costly.weight_F[2]) < 0.3 * costly.weight_F[1]
    solved = chains._replace(correct_M=np.maximum(chains.correct_M, problem_M % 5 == 0))  # a part cannot tell
    refused(ValueError, "too few problems", fit_near, solved, problem_M % 5, few_F, np.ones(3))


def test_the_ranker_finds_the_direction_and_the_calibration_its_probabilities():
    ranker = fit_ranker(random_chains(1, n=2000), random_chains(2, n=500))
    weight_F = ranker.weight_F / ranker.scale_F  # the loss shrinks them; the calibration undoes that
    np.testing.assert_allclose(weight_F / weight_F[1], [0, 1, 2], atol=0.15)  # sampling error of 2,000 problems
    fresh = random_chains(3, n=2000)
    ranker = calibrated(ranker, random_chains(4, n=2000))
    expected = fresh.x_MF @ np.arange(3)
    assert np.abs(ranker.log_odds(fresh.x_MF) - expected).mean() < 0.2


def test_absent_evidence_adds_nothing():
    ranker = fit_ranker(random_chains(1, n=200), random_chains(2, n=200))
    x_F = ranker.mean_F.copy()
    assert ranker.score(np.full((1, 3), np.nan))[0] == ranker.score(x_F[None])[0] == 0


def test_votes_by_brute_force():
    chains, weight_M = random_chains(5), np.random.default_rng(5).integers(1, 4, 200).astype(float)
    found_P = vote_correct(chains, weight_M)
    for p in range(40):
        here = np.flatnonzero((chains.problem_M == p) & (chains.class_M >= 0))
        totals = {c: weight_M[here][chains.class_M[here] == c].sum() for c in set(chains.class_M[here])}
        right = {c: chains.correct_M[here][chains.class_M[here] == c].mean() for c in totals}
        leaders = [c for c in totals if totals[c] == max(totals.values())]
        assert found_P[p] == pytest.approx(np.mean([right[c] for c in leaders]) if leaders else 0)


def test_trust_falls_with_agreement_and_distance():
    vote = Vote(2.0, 1.0, 2.0)
    power_P = vote.powers(np.array([0.2, 0.9, 0.2]), np.array([0.5, 0.5, 2.0]))
    np.testing.assert_allclose(power_P, [1.6, 0.2, 0.4])

    def chains_of(pool_M, class_M):
        zero_M = np.zeros(len(pool_M), int)
        return Chains(zero_M[:, None], zero_M, np.array(pool_M), zero_M, np.array(class_M))

    weight_M = vote_weights(np.array([1.0, 3.0, 9.0, 12.0]), np.full(4, 0.5), chains_of([0, 0, 1, 1], [0, 1, 0, 1]))
    np.testing.assert_allclose(weight_M, [np.exp(-1), 1, 1, 1])
    weight_M = vote_weights(np.array([-0.002, 0.001, 5]), np.full(3, 1e3), chains_of([0, 0, 0], [0, 1, -1]))
    np.testing.assert_allclose(weight_M, [np.exp(-3), 1, 0])  # the third has no answer
    ranker = fit_ranker(random_chains(1, n=200), random_chains(2, n=200))
    chains = random_chains(6)
    share_P, distance_P = pool_signals(ranker, chains)
    for p in range(40):
        here = chains.problem_M == p
        classes = chains.class_M[here].tolist()
        assert share_P[p] == pytest.approx(max(classes.count(c) for c in {*classes, -2} - {-1}) / len(classes))
        assert distance_P[p] == pytest.approx(np.sqrt(np.mean(ranker.standard(chains.x_MF[here]) ** 2)))


def test_evidence_helps_on_a_policy_that_it_was_not_fitted_to():
    sources = [evidence.find(name) for name in evidence.DEFAULT]
    policies = [policy_of(f"p{i}", list(map(tree_of, made_pools(i, accuracy=0.25 + 0.1 * i))), sources) for i in (0, 1)]
    new = policy_of("new", list(map(tree_of, made_pools(9, n=100, accuracy=0.35))), sources)
    ranker, (vote, rows) = fit_calibrated(policies), choose_vote(policies, 0)
    gain_P = gains(ranker, vote, new.chains)
    assert gain_P.mean() > 2 * gain_P.std() / np.sqrt(len(gain_P)) > 0
    assert {row["left_out"] for row in rows} == {"p0", "p1"}


def test_a_stored_verifier_is_the_same(fused):
    verifier, folder, files = fused
    again = jprm.load(folder)
    records = made_pools(7, n=8)
    assert list(verifier.score_many(records)) == list(again.score_many(records))
    assert again.identity == verifier.identity
    assert again.rule == "last"
    scores = again.score(records[0]["problem"], records[0]["samples"][0]["steps"])
    assert scores.shape == (2,)
    assert ((scores >= 0) & (scores <= 1)).all()
    assert [path.name for path in folder.iterdir()] == ["verifier.json"]


def test_a_verifier_scores_files_and_is_evaluated(fused, tmp_path):
    _, folder, files = fused
    scored = tmp_path / "scored.jsonl"
    score_file(jprm.load(folder), files[0], scored)
    sample = json.loads(scored.read_text().splitlines()[0])["samples"][0]
    assert len(sample["scores"]) == len(sample["outputs"]["vote"]) == 2
    command = ["eval", "best-of-n", "--model", str(folder), "--input", str(files[0])]
    assert cli.main([*command, "--json", str(tmp_path / "report.json")]) == 0
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["rules"]["last"]["weighted_vote"]["value"][-1] > report["majority"]["value"][-1]


def edited(folder, tmp_path, change):
    data = json.loads((folder / "verifier.json").read_text())
    change(data)
    (tmp_path / "verifier.json").write_text(json.dumps(data))
    return tmp_path


@pytest.mark.parametrize(
    ("change", "error"),
    [
        (lambda data: data.pop("format"), "format"),
        (lambda data: data.update(sources=3), "sources"),
        (lambda data: data["sources"].append({}), r"sources\[4\]"),
        (lambda data: data["sources"][0].update(version=0), "version"),
        (lambda data: data["sources"][0].update(request=[1]), r"sources\[0\].request"),
        (lambda data: data["coefficients"].pop("form.whole"), "coefficients"),
        (lambda data: data["coefficients"]["form.whole"].update(mean="x"), "coefficients.form.whole.mean"),
        (lambda data: data["coefficients"]["form.whole"].update(scale=0), "scale"),
        (lambda data: data["vote"].pop("power"), "vote.power"),
        (lambda data: data.pop("calibration"), "calibration"),
    ],
)
def test_a_damaged_verifier_is_refused(fused, tmp_path, change, error):
    refused((RecordError, ValueError), error, jprm.load, edited(fused[1], tmp_path, change))


def test_a_verifier_that_is_its_own_source_is_refused(fused, tmp_path):
    def change(data):
        data["sources"][0]["name"] = f"prm={tmp_path}"

    refused(
        RecordError, "verifier.json: (sources: lead back|.*recursion)", jprm.load, edited(fused[1], tmp_path, change)
    )


def test_code_that_comes_with_a_verifier_is_not_run(fused, tmp_path):
    (tmp_path / "mine.py").write_text("raise SystemExit('ran')\n")
    entry = {"name": f"{tmp_path}/mine.py:MINE", "version": 1, "numbers": ["x"], "request": {}}
    refused(ForeignCode, "never run", jprm.load, edited(fused[1], tmp_path, lambda data: data["sources"].append(entry)))


def test_a_source_of_ones_own(fused, tmp_path):
    code = tmp_path / "code"
    code.mkdir()
    (code / "mine.py").write_text(
        "from jprm.methods.evidence.sources import Source, of_chains\n"
        "def lengths(problem, steps):\n    return [(float(len(step)),) for step in steps]\n"
        "LENGTH = Source('length', ('characters',), of_chains(lengths))\n"
        "WIDE = Source('wide', ('a', 'b'), of_chains(lengths))\n"
    )
    verifier = fit(fused[2], ["form", f"{code}/mine.py:LENGTH"], out=tmp_path / "own")
    record = made_pools(4, n=1)
    assert list(jprm.load(tmp_path / "own").score_many(record)) == list(verifier.score_many(record))
    refused(ValueError, "each", fit, fused[2], [f"{code}/mine.py:WIDE"], out=tmp_path / "wide")
    (code / "mine.py").write_text("changed = 1\n")
    refused(ValueError, "has changed", jprm.load, tmp_path / "own")


def test_what_cannot_be_fitted_is_refused(fused, tmp_path):
    files, out = fused[2], tmp_path / "out"
    refused(ValueError, "arithmetic", fit, files, ["oracle"], out=out)
    refused(ValueError, "twice", fit, files, ["form", "form"], out=out)
    refused(ValueError, "twice", fit, [files[0], files[0]], out=out)
    with pytest.raises(ScoreError, match="outcome unknown"):
        fit([written(tmp_path / "a.jsonl", [{"problem": "p", "samples": [{"steps": ["1"]}]}])], out=out)
    refused(RecordError, "samples", fit, [written(tmp_path / "b.jsonl", [{"problem": "p", "steps": ["1"]}])], out=out)
    refused(ValueError, "problems", fit, [written(tmp_path / "c.jsonl", made_pools(1, n=3))], out=out)
    assert not out.exists()


def test_a_verifier_takes_no_options_of_models(fused):
    refused(ValueError, "fused verifier", jprm.load, fused[1], dtype="bfloat16")


def test_a_search_scores_prefixes_by_the_sources_that_can(fused):
    verifier, _, _ = fused
    record = made_pools(6, n=1)[0]
    (first, second), (other, _) = (sample["steps"] for sample in record["samples"][:2])
    live = live_scorer(verifier)
    (root,) = live.open([record["problem"]])
    handles, score_P = live.extend([root, root], [first, other])
    _, last_P = live.extend([handles[0]], [second])
    alone = verifier.of_prefixes()
    expected = alone.score(record["problem"], [first, second])
    assert score_P[0] == expected[0]
    assert last_P[0] == expected[1]  # whatever else is searched at once
    assert verifier.score(record["problem"], [first, second])[1] == expected[1]  # a chain alone has no pool
    refused(ValueError, "vote", verifier.by, "vote")


def test_a_verifier_is_a_teacher(fused):
    verifier, _, _ = fused
    tree = tree_of(made_pools(6, n=1)[0])
    (labelled,) = teacher_labels(verifier, [tree])
    assert labelled.semantics == "value"
    np.testing.assert_allclose([node.label for node in labelled.nodes], verifier.score_trees([tree])[0], rtol=1e-6)


def test_a_verifier_rewards_groups_by_their_last_step(fused):
    verifier, _, _ = fused
    record = made_pools(6, n=1, samples=3)[0]
    texts = [tuple(sample["steps"]) for sample in record["samples"]]
    drawn = [Rollout((0, 1), np.zeros(2, np.float32), (1, 2), steps, True) for steps in texts]
    (group,) = rollout.judged([record], [drawn], verifiers.of_function(lambda record, steps: 0.0), 0.0, verifier)
    expected = verifier.score_trees([tree_of(record)])[0]
    np.testing.assert_allclose(np.concatenate(group.scores), expected, rtol=1e-6)
    np.testing.assert_allclose(group.chain_scores, expected[1::2], rtol=1e-6)


def test_a_verifier_is_served(fused):
    verifier, _, _ = fused
    record = made_pools(6, n=1)[0]
    engine = TextEngine(verifier, 256, "fused")
    scored, pooled = call(engine, post("/v1/score", record), post("/pooling", {"input": [1, 2]}))
    engine.close()
    assert scored.json()["record"] == json.loads(json.dumps(next(verifier.score_many([record]))))
    assert [chain["score"] for chain in scored.json()["chains"]] == pytest.approx(
        [sample["scores"][-1] for sample in scored.json()["record"]["samples"]]
    )  # as written, a score has the shortest decimals of its float32
    assert pooled.status_code == 400


def test_verdicts_are_evidence(monkeypatch):
    monkeypatch.setattr(evidence.verifiers.sandbox, "require", lambda: None)
    verdicts = iter([[1, None, 0], [1, 1, 1]])
    checked = lambda tree: [Verdict(label) for label in next(verdicts)]  # noqa: E731
    monkeypatch.setattr(evidence.verifiers, "checker", lambda kind: checked)
    trees = [tree_of({"problem": "p", "steps": ["a", "b", "c"]})] * 2
    first, second = evidence.find("verdicts=python").read(trees)
    np.testing.assert_allclose(first, [[0, 0, 1, 0], [0, 0, 1 / 2, 1 / 2], [1, 1 / 3, 1 / 3, 1 / 3]])
    assert second[-1].tolist() == [0, 0, 1, 0]
    judged = lambda chains: [Outcome(float("good" in "".join(steps))) for _, steps in chains]  # noqa: E731
    monkeypatch.setattr(evidence.verifiers, "judge_programs", judged)
    record = {"problem": "p", "tests": ["assert f(1) == 1"], "samples": [{"steps": ["x", "good"]}, {"steps": ["bad"]}]}
    np.testing.assert_array_equal(evidence.find("verdicts=tests").read([tree_of(record)])[0][:, 0], [np.nan, 1, 0])
    refused(ValueError, "verdicts=", evidence.find, "verdicts=answer")


def test_what_a_model_costs_is_kept(fused, tmp_path, monkeypatch):
    class Model:
        scale, layout = PROBABILITY, None
        identity = {"model": "m"}

        def score_trees(self, trees):
            return [np.full(len(tree.nodes), 0.5) for tree in trees]

    monkeypatch.setattr("jprm.loading.load", lambda path: Model())
    cost = fit(fused[2], ["form", "prm=m"], out=tmp_path / "with_model").measured["cost"]
    needs = {name: spent["needs"] for name, spent in cost.items()}
    assert needs == {"form": "nothing", f"prm={os.path.abspath('m')}": "model"}
    assert all(spent["seconds"] >= 0 and spent["tokens"] == 0 for spent in cost.values())


# ---- Trivial baselines.


def test_baselines_of_pools(fused):
    trees = [tree_of(record) for record in made_pools(11, n=80, accuracy=0.4)]
    chosen = baselines.of_pools(trees)
    assert list(chosen) == list(baselines.POOLS)
    for tree, says in zip(trees, chosen["no_false_equation"], strict=True):
        false = np.array([check_arithmetic(tree.nodes[c[0]].text).label == 0 for c in chains_of(tree)])
        np.testing.assert_array_equal(says.key_K, -false.astype(float))
        if false.any() and not false.all():
            np.testing.assert_array_equal(says.weight_K, np.where(false, baselines.DOUBTED, 1.0))
    right = [[node.correct for node in tree.nodes if node.correct is not None] for tree in trees]
    top = [bool(r[int(np.argmax(says.key_K))]) for r, says in zip(right, chosen["text_features"], strict=True)]
    assert np.mean(top) > np.mean(np.concatenate(right)) + 0.2  # 0.4, and a chain that uses all and adds well is right
    few = baselines.of_pools(trees[:20])
    assert "text_features" not in few
    assert "no_false_equation" in few


def test_a_problem_is_ranked_by_rankers_of_other_problems(fused):
    trees = [tree_of(record) for record in made_pools(11, n=80)]
    flipped = list(trees)
    nodes = [dataclasses.replace(n, correct=None if n.correct is None else not n.correct) for n in trees[5].nodes]
    flipped[5] = dataclasses.replace(trees[5], nodes=tuple(nodes))
    before, after = (ranked_by_text(side)[5].key_K for side in (trees, flipped))
    np.testing.assert_array_equal(before, after)


def test_baselines_of_steps():
    rng, trees = np.random.default_rng(0), []
    for i in range(200):
        a, b = (int(x) for x in rng.integers(3, 40, 2))
        wrong = i % 2
        steps = [f"{a}+{b}={a + b}.", f"So {a + b}+1={a + b + 1 + wrong}.", "That is all."]
        record = {"problem": f"{i}: {a} and {b}?", "steps": steps, "first_error": 1 if wrong else -1}
        trees.append(tree_of(record))
    scores = baselines.of_steps(trees)
    assert list(scores) == list(baselines.STEPS)
    assert [s.tolist() for s in scores["no_false_equation"][:2]] == [[1, 1, 1], [1, 0, 0]]
    report = processbench_report({"made": [with_scores(t, [0.5] * 3) for t in trees]}, "made", 0)["made"]
    assert report["baselines"]["no_false_equation"]["f1"] == 1
    assert report["baselines"]["text_features"]["cross_fit"]["f1"] > 0.9
    assert report["tuned"]["less"]["value"] < 0
    assert report["tuned"]["less"]["baseline"] in ("no_false_equation", "text_features")
    assert "text_features" not in baselines.of_steps(trees[:60])


def test_curves_of_scores_that_know_the_pool_have_no_n_in_between(fused):
    """Two samples of nineteen would have other scores: what all nineteen say is no choice among two."""
    verifier, _, _ = fused
    records = made_pools(12, n=60, accuracy=0.4)
    trees = [tree_of(record) for record in verifier.score_many(records)]
    blind = [with_scores(tree, [0.5] * len(tree.nodes)) for tree in map(tree_of, records)]
    report, plain = best_of_n_report(trees, 0), best_of_n_report(blind, 0)
    n_max = report["n_max"]
    assert n_max >= 3
    for curve in (report["rules"]["last"]["best_of_n"], report["rules"]["last"]["weighted_vote"],
                  *report["baseline_votes"].values(), report["baselines"]["text_features"]):  # fmt: skip
        assert curve["value"][1:-1] == [None] * (n_max - 2) and None not in (curve["value"][0], curve["value"][-1])
        assert curve["value"][0] == pytest.approx(plain["mean_accuracy"])  # of one sample nothing is chosen
    for curve in (plain["rules"]["last"]["best_of_n"], report["majority"], report["baselines"]["shortest"]):
        assert None not in curve["value"]
    results = {"model": {"rule": "last"}, "best_of_n": {"pools": report}}
    assert any("left out" in finding.note for finding in findings(results))
    assert list(tables(report))


def test_scores_that_know_the_pool_are_not_shown_for_pools_of_unequal_size(fused):
    """Samples of a larger pool were scored with the pool's others, which a draw of the smallest size does not have."""
    verifier, _, _ = fused
    records = made_pools(12, n=80, accuracy=0.4)
    for i, record in enumerate(records):
        record["samples"] = record["samples"][: 3 if i % 10 else 6]
        record["empty_samples"] = int(i % 10 == 1)  # a sample without steps takes a place
    trees = [tree_of(record) for record in verifier.score_many(records)]
    report = best_of_n_report(trees, 0)
    assert (report["n_max"], report["largest_pool"]) == (3, 6)
    for curve in (report["rules"]["last"]["best_of_n"], report["rules"]["last"]["weighted_vote"]):
        assert curve["value"][1:] == [None, None]
        assert curve["value"][0] == pytest.approx(report["baselines"]["random"]["value"][0])
    drawn, slot_Pn = drawn_pools(pools_of(trees), 3, 0)
    assert drawn.empty_P.sum() == sum(slot_n[-1] >= len(chains_of(t)) for t, slot_n in zip(trees, slot_Pn, strict=True))
    alone = [cut(tree, slot_n) for tree, slot_n in zip(trees, slot_Pn, strict=True)]
    for tree, empty in zip(alone, drawn.empty_P, strict=True):
        tree.extra["empty_samples"] = int(empty)
    of_drawn = best_of_n_report(alone, 0)
    for kind in ("baselines", "baseline_votes"):
        for name, curve in report[kind].items():
            if kind == "baseline_votes" or name == "text_features":
                assert curve["value"][1:] == [None, pytest.approx(of_drawn[kind][name]["value"][-1])], name
    results = {"model": {"rule": "last"}, "best_of_n": {"pools": report}}
    notes = [finding.note for finding in findings(results)]
    assert len(notes) == 2 and all("pools have 3 to 6. Keep 3 of each" in note for note in notes)
    assert "Keep 3 of each" in next(iter(tables(report))).caption and list(verdict(list(findings(results))))


def test_drawn_pools_hold_n_samples_of_each_pool_at_random():
    samples = [[{"steps": [f"{i} {k}"], "correct": k == 0, "answer": k} for k in range(i + 2)] for i in range(3)]
    records = [{"problem": str(i), "samples": samples[i]} for i in range(3)]
    trees = [with_scores(tree_of(record), [0.1 * k for k in range(i + 2)]) for i, record in enumerate(records)]
    pools, count = pools_of(trees), np.zeros(4)
    for seed in range(600):
        drawn, slot_Pn = drawn_pools(pools, 2, seed)
        assert (
            drawn.correct_PN.shape == (3, 2)
            and (np.diff(slot_Pn) > 0).all()
            and (slot_Pn < pools.size_P[:, None]).all()
        )
        for tree, slot_n in zip(map(cut, trees, slot_Pn), slot_Pn, strict=True):
            assert [node.text for node in tree.nodes] == [f"{tree.problem} {k}" for k in slot_n]
        count += np.bincount(slot_Pn[2], minlength=4)
    np.testing.assert_allclose(count / 600, 0.5, atol=0.07)


def test_best_of_n_is_compared_with_the_best_baseline(fused):
    verifier, _, _ = fused
    records = made_pools(12, n=60, accuracy=0.4)
    trees = [with_scores(t, s) for t in map(tree_of, records) for s in verifier.score_trees([t])]
    report = best_of_n_report(trees, 0)
    rivals = {"majority": report["majority"], **report["baselines"]}
    rivals |= {f"{name}.vote": curve for name, curve in report["baseline_votes"].items()}
    assert report["best_baseline"]["value"] == pytest.approx(max(curve["value"][-1] for curve in rivals.values()))
    for kind in ("best_of_n", "weighted_vote"):
        less = report["rules"]["last"][f"{kind}_minus_best_baseline"]
        value = report["rules"]["last"][kind]["value"][-1] - report["best_baseline"]["value"]
        assert less["value"] == pytest.approx(value)
        assert less["low"] <= value <= less["high"]
    results = {"model": {"rule": "last"}, "best_of_n": {"pools": report}}
    uses = [report["rules"]["last"][f"{kind}_minus_best_baseline"] for kind in ("best_of_n", "weighted_vote")]
    assert [finding.difference for finding in findings(results)] == uses
