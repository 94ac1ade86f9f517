"""Monte Carlo labels: closed forms, a Markov chain with known values, and rollouts that survive a kill."""

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from refusing import refused
from toy_policy import Markov

from jprm.methods.label.config import Adaptive, MonteCarloConfig
from jprm.methods.label.monte_carlo import Rollouts, allocate, hard, label_trees, soft, wilson
from jprm.methods.policy.protocol import Prefix, Sample
from jprm.methods.policy.sample_cache import PolicyError, prefix_key
from jprm.methods.verify.verifiers import VERIFIERS
from jprm.tree import RecordError, record_of, tree_of

CHAIN = {"problem": "p", "steps": ["good 0", "bad 1", "good 2"], "answer": 1}


def test_hard_and_soft_estimates():
    """3 of 8: HE 1, SE .375 (Math-Shepherd)."""
    right, total = np.array([3, 0, 8, 0]), np.array([8, 8, 8, 0])
    np.testing.assert_array_equal(hard(right, total), [1, 0, 1, np.nan])
    np.testing.assert_array_equal(soft(right, total), [0.375, 0, 1, np.nan])


@given(st.integers(1, 500).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n))), st.floats(0.5, 4))
def test_wilson_bounds_solve_their_equation(counts, z):
    right, total = counts
    share = right / total
    low, high = (float(x) for x in wilson(right, total, z))
    assert 0 <= low <= share <= high <= 1
    for bound in (low, high):
        if 0 < bound < 1:  # |share - p| = z sqrt(p (1 - p) / n), to the rounding of a difference of numbers near 1
            assert abs(share - bound) == pytest.approx(z * (bound * (1 - bound) / total) ** 0.5, abs=1e-9)
    assert (low == 0) == (right == 0) and (high == 1) == (right == total)


def test_wilson_published_value_and_empty():
    low, high = wilson(np.array([3, 0]), np.array([8, 0]))
    np.testing.assert_allclose(low, [0.1368, 0], atol=5e-5)
    np.testing.assert_allclose(high, [0.6943, 1], atol=5e-5)


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 12)), min_size=1, max_size=9), st.integers(-3, 40))
def test_allocation_stays_within_its_limits(prefixes, budget):
    open_, asked = map(np.array, zip(*prefixes, strict=True))
    given_ = allocate(open_, asked, k=4, most=10, budget=budget, seed=0)
    wanted = np.where(open_, np.clip(10 - asked, 0, 4), 0)
    assert (given_ >= 0).all() and (given_ <= wanted).all()
    assert given_.sum() == max(0, min(budget, wanted.sum()))


def test_allocation_depends_on_who_is_open_alone():
    open_ = np.array([True, False, True, True])
    first = allocate(open_, np.full(4, 8), k=8, most=64, budget=8, seed=0)
    assert sorted(first) == [0, 0, 0, 8]
    assert len({tuple(allocate(open_, np.full(4, 8), k=8, most=64, budget=8, seed=s)) for s in range(20)}) == 3


def test_values_of_a_markov_chain(tmp_path):
    policy = Markov(length=4)
    config = MonteCarloConfig("soft", k=400)
    with Rollouts(policy, tmp_path / "r.jsonl") as rollouts:
        (tree,) = label_trees([tree_of(CHAIN)], rollouts, config)
    assert (tree.semantics, tree.kind) == ("value", "tree")
    assert {node.origin for node in tree.nodes} == {"monte_carlo"}
    truth = [policy.value_of(Prefix("p", tuple(CHAIN["steps"][: i + 1]))) for i in range(3)]
    for node, value in zip(tree.nodes, truth, strict=True):
        # 4 standard errors of 400 draws; the seeds are fixed
        assert node.label == pytest.approx(value, abs=4 * (value * (1 - value) / 400) ** 0.5)
        assert node.extra["rollouts"] == 400 and node.label == node.extra["right"] / 400
        assert node.extra["low"] < node.label < node.extra["high"]
    assert tree_of(json.loads(json.dumps(record_of(tree)))) == tree


def test_markov_values_by_hand():
    policy = Markov(length=4, keep=0.8, heal=0.25)
    assert policy.value(True, 1) == 0.8
    assert policy.value(True, 2) == pytest.approx(0.8 * 0.8 + 0.2 * 0.25)
    assert policy.value(False, 2) == pytest.approx(0.25 * 0.8 + 0.75 * 0.25)


class Scripted:
    """Rollout number j of any prefix is right if `outcomes[j]`; None is an error, "cut" a truncated right answer."""

    name = "scripted"

    def __init__(self, outcomes):
        self.outcomes, self.asked = outcomes, []

    def sample(self, prefixes, n, *, until, seed):
        assert until == "end"
        self.asked += [(prefix, seed + j) for prefix in prefixes for j in range(n)]
        return [[self.draw_one(self.outcomes[seed + j]) for j in range(n)] for _ in prefixes]

    def draw_one(self, outcome):
        if outcome is None:
            return Sample((), 0, "error", error="gone")
        return Sample((f"The answer is {int(bool(outcome))}",), 5, "length" if outcome == "cut" else "stop")


@pytest.mark.parametrize(("estimate", "label"), [("soft", 0.375), ("hard", 1.0)])
def test_exact_estimates_and_a_truncated_rollout_is_not_right(tmp_path, estimate, label):
    policy = Scripted([1, 0, 1, 0, "cut", 0, 1, 0])
    with Rollouts(policy, tmp_path / "r.jsonl") as rollouts:
        (tree,) = label_trees([tree_of(CHAIN)], rollouts, MonteCarloConfig(estimate))
    assert [node.label for node in tree.nodes] == [label] * 3


def test_known_outcomes_cost_nothing_and_pools_share_prefixes(tmp_path):
    policy = Scripted([1, 0])
    pool = {"problem": "p", "answer": 1, "samples": [{"steps": ["a", "b"], "correct": True}, {"steps": ["a", "c"]}]}
    with Rollouts(policy, tmp_path / "r.jsonl") as rollouts:
        (tree,) = label_trees([tree_of(pool)], rollouts, MonteCarloConfig("soft", k=2))
    assert [node.label for node in tree.nodes] == [0.5, 1.0, 0.5, 0.5]
    assert sorted({prefix.steps for prefix, _ in policy.asked}) == [("a",), ("a", "c")]
    assert len(policy.asked) == 4


def test_adaptive_rollouts_go_where_the_threshold_is_open(tmp_path):
    policy = Scripted([1, 0] * 32)
    config = MonteCarloConfig("soft", k=8, adaptive=Adaptive(threshold=0.5, most=24, mean=100))
    with Rollouts(policy, tmp_path / "r.jsonl") as rollouts:
        empty = tree_of({"problem": "1+2", "answer": "3", "samples": [], "empty_samples": 2})
        tree, without_steps = label_trees([tree_of(CHAIN), empty], rollouts, config)
        assert [node.extra["rollouts"] for node in tree.nodes] == [24] * 3 and not without_steps.nodes
        assert rollouts.sampled == 72
    decided = Scripted([1] * 64)
    with Rollouts(decided, tmp_path / "d.jsonl") as rollouts:
        (tree,) = label_trees([tree_of(CHAIN)], rollouts, config)
        assert [node.extra["rollouts"] for node in tree.nodes] == [8] * 3
    tight = MonteCarloConfig("soft", k=8, adaptive=Adaptive(threshold=0.5, most=24, mean=12))
    with Rollouts(Scripted([1, 0] * 32), tmp_path / "t.jsonl") as rollouts:
        (tree,) = label_trees([tree_of(CHAIN)], rollouts, tight)
        assert rollouts.sampled == 36


def test_one_budget_of_tokens_moves_rollouts_to_the_trees_that_need_them(tmp_path):
    """One tree is decided after its first rollouts; what it leaves of the budget goes to the other."""
    trees = [tree_of(CHAIN | {"problem": "sure"}), tree_of(CHAIN | {"problem": "open"})]

    class Two(Scripted):
        def sample(self, prefixes, n, *, until, seed):
            sure = Scripted([1] * 64).sample(prefixes, n, until=until, seed=seed)
            open_ = Scripted([1, 0] * 32).sample(prefixes, n, until=until, seed=seed)
            return [s if p.problem == "sure" else o for p, s, o in zip(prefixes, sure, open_, strict=True)]

    per_rollout = Scripted([1]).sample([Prefix("p")], 1, until="end", seed=0)[0][0].tokens
    adaptive = Adaptive(threshold=0.5, most=64, mean=12)
    drawn = {}
    for name, tokens in (("each", None), ("all", 12.0 * per_rollout)):
        with Rollouts(Two([]), tmp_path / f"{name}.jsonl") as rollouts:
            config = MonteCarloConfig("soft", k=8, adaptive=adaptive, tokens=tokens)
            labelled = list(label_trees(trees, rollouts, config))
            drawn[name] = [sum(node.extra["rollouts"] for node in tree.nodes) for tree in labelled]
    assert drawn == {"each": [24, 36], "all": [24, 48]}  # 12 for each of 6 prefixes are 72


def test_a_budget_of_tokens_belongs_to_adaptive_rollouts():
    for wrong in ({"tokens": 5.0}, {"adaptive": Adaptive(0.5, 16, 8), "tokens": 0.0}):
        refused(ValueError, "tokens", MonteCarloConfig, "soft", **wrong)


def test_errors_leave_fewer_rollouts_and_are_asked_for_again(tmp_path):
    with Rollouts(Scripted([1, None, 0, None]), tmp_path / "r.jsonl") as rollouts:
        (tree,) = label_trees([tree_of(CHAIN)], rollouts, MonteCarloConfig("soft", k=4))
        assert [(n.extra["rollouts"], n.label) for n in tree.nodes] == [(2, 0.5)] * 3
        assert (rollouts.sampled, rollouts.failed, rollouts.last_error) == (6, 6, "gone")
    again = Scripted([0, 1, 1, 1])
    with Rollouts(again, tmp_path / "r.jsonl") as rollouts:
        (tree,) = label_trees([tree_of(CHAIN)], rollouts, MonteCarloConfig("soft", k=4))
    assert {number for _, number in again.asked} == {1, 3}
    assert [n.label for n in tree.nodes] == [0.75] * 3


def test_a_policy_that_is_gone_is_an_error_that_says_why(tmp_path):
    with Rollouts(Scripted([None] * 4), tmp_path / "r.jsonl") as rollouts, pytest.raises(PolicyError, match="gone"):
        list(label_trees([tree_of(CHAIN)], rollouts, MonteCarloConfig("soft", k=4)))


def test_a_problem_without_an_answer_is_refused(tmp_path):
    chain = tree_of({key: CHAIN[key] for key in ("problem", "steps")})
    with Rollouts(Markov(), tmp_path / "r.jsonl") as rollouts, pytest.raises(RecordError, match="'p': answer"):
        list(label_trees([chain], rollouts, MonteCarloConfig("soft")))


def test_another_policy_or_prefix_draws_its_own_rollouts(tmp_path):
    for name, steps in [("one", ("a",)), ("two", ("a",)), ("one", ("a", "b")), ("one", ("a",))]:
        policy = Markov()
        policy.name = name
        with Rollouts(policy, tmp_path / "r.jsonl") as rollouts:
            rollouts.draw([(Prefix("p", steps), 0, 4)])
    assert policy.sampled == 0  # the last repeats the first
    assert prefix_key(Prefix("p", ("a", "b"))) != prefix_key(Prefix("p", ("ab",))) != prefix_key(Prefix("pa", ("b",)))


def test_a_killed_run_neither_repeats_nor_loses_a_rollout(tmp_path):
    class Mortal(Markov):
        left = 3

        def sample(self, *args, **options):
            self.left -= 1
            if not self.left:
                raise KeyboardInterrupt
            return super().sample(*args, **options)

    path = tmp_path / "r.jsonl"
    with pytest.raises(KeyboardInterrupt), Rollouts(Mortal(), path, batch=8) as rollouts:
        list(label_trees([tree_of(CHAIN)], rollouts, MonteCarloConfig("soft")))
    kept = path.read_bytes()
    assert len(kept.splitlines()) == 16  # two batches
    path.write_bytes(kept + b'{"policy": "markov", "pre')  # killed while it wrote
    policy = Markov()
    with Rollouts(policy, path) as rollouts:
        resumed = list(label_trees([tree_of(CHAIN)], rollouts, MonteCarloConfig("soft")))
    assert policy.sampled == 8 and path.read_bytes().startswith(kept)
    keys = [(r["policy"], r["prefix"], r["seed"]) for r in map(json.loads, path.read_bytes().splitlines())]
    assert len(keys) == len(set(keys)) == 24
    with Rollouts(Markov(), tmp_path / "whole.jsonl") as rollouts:
        assert list(label_trees([tree_of(CHAIN)], rollouts, MonteCarloConfig("soft"))) == resumed


def test_a_line_that_is_no_rollout_is_named(tmp_path):
    path = tmp_path / "r.jsonl"
    for line in (b'{"policy": "markov"}\n', b"[]\n", b"{\n"):
        path.write_bytes(line)
        with pytest.raises(RecordError, match=r"r\.jsonl:1: "), Rollouts(Markov(), path):
            pass
        assert path.read_bytes() == line


def test_two_runs_do_not_write_one_file(tmp_path):
    path = tmp_path / "r.jsonl"
    with Rollouts(Markov(), path), pytest.raises(ValueError, match="writing"), Rollouts(Markov(), path):
        pass
    with Rollouts(Markov(), path):
        pass


def test_final_answers_are_graded_over_the_whole_chain():
    said, record = Prefix("p", ("so the answer is 5",)), {"problem": "p", "answer": 5}
    whole, other, cut = Sample((), 1, "stop"), Sample(("no, the answer is 6",), 5, "stop"), Sample((), 1, "length")
    reports = VERIFIERS["answer"].accepts([(record, said, [cut, whole]), (record, said, [other]), (record, said, [])])
    assert reports == [[False, True], [False], []]
