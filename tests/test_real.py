"""The experiments on real models: published scores divided into chains, states read back, readers in closed form."""

import pathlib
import sys

import numpy as np
import pytest

sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "experiments/real"))
import published_prms as published  # pyright: ignore[reportMissingImports]
import state_readers as readers  # pyright: ignore[reportMissingImports]
import token_states as states  # pyright: ignore[reportMissingImports]
import verdict  # pyright: ignore[reportMissingImports]

from jprm.methods.evidence import sources as evidence
from jprm.methods.evidence.fit import policy_of
from jprm.statistics import auroc
from jprm.tree import chain_tree, tree_of


@pytest.mark.parametrize("split", published.SPLITS)
def test_published_scores_give_the_published_aurocs(shared_data, split):
    read = published.read(shared_data / f"published_scores/processbench_{split}.json")
    assert len(read.first_error_C) == 250
    assert len(read.step) == 5
    for model, numbers in read.published.items():
        assert float(auroc(read.step[model], read.right_N)) == pytest.approx(numbers["step_auroc"], abs=1e-9)
        right_C = read.first_error_C < 0
        assert float(auroc(read.chain[model], right_C)) == pytest.approx(numbers["chain_auroc"], abs=1e-9)
        for c, score_K in enumerate(read.by_chain(read.step[model])):
            assert score_K.min() >= read.chain[model][c]
            assert not right_C[c] or score_K.min() == read.chain[model][c]
            assert right_C[c] or read.first_error_C[c] == len(score_K) - 1


def test_flat_steps_are_divided_into_chains_with_their_scores():
    rng = np.random.default_rng(0)
    sizes, right_C = rng.integers(1, 6, 40), rng.random(40) < 0.5
    steps = [rng.random((3, size)) for size in sizes]
    right_N = np.concatenate([[True] * (size - 1) + [bool(right)] for size, right in zip(sizes, right_C, strict=True)])
    later_MC = np.where(right_C, np.inf, rng.random((3, 40)))  # after its first error a chain may be scored lower
    chain_MC = np.minimum(np.stack([x.min(axis=1) for x in steps], axis=1), later_MC)
    ends = published.chains_of_file(right_N, right_C, np.concatenate(steps, axis=1), chain_MC)
    assert len(ends) == 40
    assert ends[-1] == sizes.sum()
    assert [end for end, right in zip(ends, right_C, strict=True) if not right] == np.cumsum(sizes)[~right_C].tolist()
    for start, end, right, least_M in zip([0, *ends], ends, right_C, chain_MC.T, strict=False):
        if right:  # other divisions can be as good: steps above the least may be of either of two right chains
            assert np.array_equal(np.concatenate(steps, axis=1)[:, start:end].min(axis=1), least_M)


PROBLEM, STEPS = (
    "A pen costs 3. How much are 4 pens?",
    (["4 pens cost 4 * 3 = 12.", "The answer is 12."], ["4 + 3 = 7."]),
)


@pytest.mark.slow  # a minute: SmolLM2-135M is loaded
def test_a_sample_has_the_same_states_in_a_pool_as_by_itself(smollm2_gguf, tmp_path):
    base = states.Base.load(str(smollm2_gguf), (2, 5), "{problem}")
    pool = tree_of({"problem": PROBLEM, "samples": [{"steps": steps} for steps in STEPS]})
    alone = [chain_tree(PROBLEM, steps) for steps in STEPS]
    assert sum(states.compute(base, 2, [pool, *alone], tmp_path)) > 0
    assert list(states.compute(base, 2, [pool, *alone], tmp_path)) == []  # nothing is computed twice
    for shared, tree in zip(states.read(tmp_path, pool), alone, strict=True):
        (single,) = states.read(tmp_path, tree)
        assert shared.end_K.tolist() == single.end_K.tolist()
        assert shared.end_K[-1] == len(shared.logprob_T) - 1
        for name, one, other in zip(shared._fields, shared, single, strict=True):
            np.testing.assert_allclose(one, other, rtol=2e-3, atol=2e-2, err_msg=name)  # float16, sums in another order
        assert (shared.entropy_T >= 0).all()
        assert (shared.certainty_T >= 0).all()


def sample(top_T) -> states.Sample:
    zero_T = np.zeros(len(top_T))
    state_TLD = np.zeros((len(top_T), 2, 3), np.float16)
    return states.Sample(state_TLD, state_TLD[0], zero_T, zero_T, np.array(top_T, float), zero_T, np.array([1, 2]))


def test_the_lowest_window_is_the_least_of_all_windows():
    top_T = np.random.default_rng(0).random(100)
    windows = [top_T[i : i + readers.WINDOW].mean() for i in range(100 - readers.WINDOW + 1)]
    assert readers.lowest_window([sample(top_T)])[0] == pytest.approx(min(windows))
    assert readers.lowest_window([sample(top_T[:5])])[0] == pytest.approx(top_T[:5].mean())
    assert readers.tail([sample(top_T)])[0] == pytest.approx(top_T[-readers.WINDOW :].mean())


def with_states(rng, right: bool) -> states.Sample:
    """A sample of which one number in six says whether it is right."""
    x_TLD = rng.standard_normal((int(rng.integers(5, 20)), 2, 3))
    x_TLD[:, 1, 2] += 1.5 if right else -1.5
    return sample(np.ones(len(x_TLD)))._replace(
        state_TLD=x_TLD.astype(np.float16), prompt_LD=np.zeros((2, 3)), end_K=np.array([2, len(x_TLD) - 1])
    )


@pytest.mark.parametrize("name", readers.FITTED)
def test_fitted_readers_find_what_tells_right_from_wrong(name):
    rng = np.random.default_rng(0)
    right_M = np.arange(120) % 3 > 0
    samples = [with_states(rng, right) for right in right_M]
    fitting = readers.Fitting(samples[:60], right_M[:60], samples[60:80], right_M[60:80])
    score_K = readers.FITTED[name](fitting, 0)(samples[80:])
    assert auroc(score_K, right_M[80:]) > 0.9


def test_gates_weigh_tokens_as_the_formula_says():
    rng = np.random.default_rng(1)
    samples = [with_states(rng, True) for _ in range(40)]
    params = {"kernel": rng.standard_normal((6, 2)), "bias": rng.standard_normal(2)}
    by_hand = []
    for x in samples:
        gate_T, reward_T = (x.state_TLD.reshape(-1, 6).astype(float) @ params["kernel"] + params["bias"]).T
        gate_T = 1 / (1 + np.exp(-gate_T))
        by_hand.append((gate_T * reward_T).sum() / gate_T.sum())
    flat = readers._flat(samples, ends=False)
    np.testing.assert_allclose(readers._gated(params, flat, np.zeros(6), np.ones(6)), by_hand, rtol=1e-4, atol=1e-5)


def test_arms_choose_by_what_their_readers_find(monkeypatch):
    monkeypatch.setattr(readers, "PASSES", (5,))
    monkeypatch.setattr(readers, "RIDGES", (1e-2,))
    rng = np.random.default_rng(2)
    trees, samples = [], []
    for number in range(60):
        right_K = rng.random(6) < 0.4
        answers = [12 if right else int(rng.integers(20, 23)) for right in right_K]
        records = [
            {"steps": [f"I add {i} things.", f"The answer is {a}."], "answer": str(a)} for i, a in enumerate(answers)
        ]
        trees.append(tree_of({"problem": f"How many, number {number}?", "answer": "12", "samples": records}))
        samples += [with_states(rng, right) for right in right_K]
    policy = policy_of("own", trees, [evidence.find("form")])
    bucket_M = (np.arange(60) % 10)[policy.chains.problem_M]
    pool = verdict.Pool(policy.chains, samples, bucket_M)
    arms = verdict.arms(pool, seed=0)
    result = verdict.figures(pool, [arms, arms])
    assert result["problems"] == 60
    for name in ("SWIFT", "last state", "CLUE", "fused"):
        assert result["arms"][name]["vote less majority"]["low"] > 0
        assert result["arms"][name]["AUROC in problems"] > 90
    assert result["arms"]["text"]["vote less text"] == {"value": 0, "low": 0, "high": 0}
    assert abs(result["arms"]["tail"]["vote less majority"]["value"]) < 1e-9  # the same number for every sample


def test_the_best_sample_is_never_one_without_an_answer():
    chains = verdict.Chains(*map(np.array, (np.zeros((4, 1)), [0.0, 1, 1, 0], [0, 0, 1, 1], [0] * 4, [-1, 0, 0, 1])))
    assert verdict.best_correct(chains, np.array([9.0, 1, 2, 2])).tolist() == [1.0, 0.5]
