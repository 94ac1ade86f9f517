"""The experiments on real models: published scores divided into chains, states read back, readers in closed form."""

import functools
import json

import jax.numpy as jnp
import numpy as np
import pytest
from refusing import refused
from scipy.optimize import minimize

from experiments.real import (
    contrast_scores,
    contrast_steps,
    outcomes,
    prm_scores,
    reader_scores,
    step_labels,
    trivial,
    verdict,
)
from experiments.real import published_prms as published
from experiments.real import state_readers as readers
from experiments.real import token_states as states
from jprm.io.jsonl import write_records
from jprm.io.outputs import Bar
from jprm.statistics import auroc
from jprm.tree import chain_tree, chains_of, tree_of


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


def test_averages_over_splits_are_paired():
    def split(seed):
        rng = np.random.default_rng(seed)
        chain_N = np.repeat(np.arange(40), 3)
        first_error_C = np.where(rng.random(40) < 0.5, 2, -1)
        right_N = np.arange(120) % 3 < np.where(first_error_C < 0, 3, 2)[chain_N]
        step = {"a": right_N + rng.normal(0, 0.6, 120), "b": right_N + rng.normal(0, 1.5, 120)}
        chain = {name: np.minimum.reduceat(score_N, np.arange(0, 120, 3)) for name, score_N in step.items()}
        return published.Split(chain_N, right_N, first_error_C, step, chain, {"a": {}, "b": {}})

    splits = {name: split(seed) for seed, name in enumerate(published.SPLITS)}
    result = published.figures(splits)
    average, pair = result["average_f1_tuned_on_gsm8k"], result["pairs"]["f1"]["a less b"]["average"]
    for model in ("a", "b"):
        parts = [result["splits"][s]["models"][model]["f1_tuned_on_gsm8k"] for s in splits]
        assert average[model]["value"] == pytest.approx(np.mean([part["value"] for part in parts]))
        width = average[model]["high"] - average[model]["low"]  # of four independent splits: half of one's
        assert width == pytest.approx(np.mean([part["high"] - part["low"] for part in parts]) / 2, rel=0.25)
    assert pair["value"] == pytest.approx(average["a"]["value"] - average["b"]["value"])
    assert pair["low"] < pair["value"] < pair["high"]


PROBLEM = "A pen costs 3. How much are 4 pens?"
STEPS = ["4 pens cost 4 * 3 = 12.", "The answer is 12."], ["4 + 3 = 7."]


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
        for name, expected, actual in zip(shared._fields, shared, single, strict=True):
            np.testing.assert_allclose(
                expected, actual, rtol=2e-3, atol=2e-2, err_msg=name
            )  # float16, sums in another order
        assert (shared.entropy_T >= 0).all()
        assert (shared.certainty_T >= 0).all()


@pytest.mark.breadth
def test_a_stopped_contrast_continues_with_what_is_missing(smollm2_gguf, tmp_path, monkeypatch):
    for name in ("own_train", "own_test", *verdict.OTHERS):
        pools_of(tmp_path / f"{name}.jsonl.gz", 2)
    monkeypatch.setattr(contrast_scores.states, "calibrates", lambda tree: "number 1" in tree.problem)
    (tmp_path / "prompt.txt").write_text("{problem}")
    monkeypatch.setattr(contrast_scores, "HERE", tmp_path)
    monkeypatch.setattr(states.Base, "load", functools.cache(states.Base.load))
    read, known = contrast_scores.samples_of, {}

    def once(base, tree):  # the two bases are one
        name = states.name_of(tree)
        return known[name] if name in known else known.setdefault(name, read(base, tree))

    monkeypatch.setattr(contrast_scores, "samples_of", once)

    def scores(problems: int) -> dict:
        output, base = tmp_path / "contrast.jsonl", str(smollm2_gguf)
        contrast_scores.main(base, base, output, tmp_path, problems=problems, other=1, dtype="float32")
        return verdict.read_scores([output])

    first, whole = scores(1), scores(2)
    assert [pool for pool, _ in whole] == ["own_train", *verdict.OTHERS, "own_test", "own_test"]
    assert first.items() <= whole.items()
    base = states.Base.load(str(smollm2_gguf), (1,), "{problem}", "float32")
    (tree, _) = states.answered(tmp_path / "own_test.jsonl.gz")
    kept = whole["own_test", states.name_of(tree)]
    assert kept["contrast"] == [0.0] * len(kept["contrast"])  # of a base with itself
    larger = [x.logprob_T for x in states.samples_of(states.computed(base, 1, tree), tree)]
    np.testing.assert_allclose(kept["larger log-probability"], [x_T.mean() for x_T in larger], rtol=1e-4)
    for chain, logprob_T in list(zip(chains_of(tree), larger, strict=True))[:1]:  # alone: its steps add up to the same
        steps = [tree.nodes[i].text for i in chain]
        sum_K, tokens_K = contrast_steps.sums_of(base, tree_of({"problem": tree.problem, "steps": steps}))
        assert len(sum_K) == len(steps) and tokens_K.sum() == len(logprob_T)
        assert sum_K.sum() == pytest.approx(logprob_T.sum(), rel=1e-4)


def test_scores_that_know_the_first_error_find_it_in_every_split():
    rng, splits = np.random.default_rng(0), {}
    for split in contrast_steps.SPLITS:
        errors, steps = rng.integers(-1, 4, 40), [f"step {i}" for i in range(4)]
        trees = [tree_of({"problem": f"{i}", "steps": steps, "first_error": int(e)}) for i, e in enumerate(errors)]
        known = [np.where(np.arange(4) == e, 0.0, 1.0) for e in errors]
        splits[split] = contrast_steps.Split(trees, {"known": known, "random": [rng.random(4) for _ in errors]})
    for of_arm in contrast_steps.figures(splits).values():
        assert of_arm["known"]["AUROC"].value == 1 and of_arm["known"]["F1"].value == 1
        assert abs(of_arm["random"]["AUROC"].value - 0.5) < 0.2 and of_arm["random"]["F1"].value < 0.5


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


def test_contrast_is_what_a_larger_base_finds_likelier():
    rng = np.random.default_rng(1)
    small_T, large_T = -rng.random(53), -rng.random(53)
    (small, large) = (sample(np.ones(53))._replace(logprob_T=x_T) for x_T in (small_T, large_T))
    assert readers.contrast([small], [large])[0] == pytest.approx(large_T.mean() - small_T.mean())
    chunks = [(0, 16), (16, 32), (32, 53)]  # the last one takes what is left
    least = min((large_T - small_T)[a:b].mean() for a, b in chunks)
    assert readers.lowest_contrast([small], [large])[0] == pytest.approx(least)
    assert readers.lowest_contrast([small], [small])[0] == 0
    refused(ValueError, "tokens", readers.contrast, [small], [sample(np.ones(52))])


def with_states(rng, right: bool) -> states.Sample:
    """A sample of which one number in six says whether it is right."""
    x_TLD = rng.standard_normal((int(rng.integers(5, 20)), 2, 3))
    x_TLD[:, 1, 2] += 1.5 if right else -1.5
    return sample(np.ones(len(x_TLD)))._replace(
        state_TLD=x_TLD.astype(np.float16), prompt_LD=np.zeros((2, 3)), end_K=np.array([2, len(x_TLD) - 1])
    )


@pytest.fixture
def few_passes(monkeypatch):
    monkeypatch.setattr(readers, "PASSES", (5, 12))
    monkeypatch.setattr(readers, "RIDGES", (1e-2,))


@pytest.mark.parametrize("name", readers.FITTED)
def test_fitted_readers_find_what_tells_right_from_wrong(name):
    rng = np.random.default_rng(0)
    right_M = np.arange(120) % 3 > 0
    samples = [with_states(rng, right) for right in right_M]
    index_M = np.arange(120)
    fits = [readers.ReaderFit(index_M < 60, (index_M >= 60) & (index_M < 80))]
    for score_K in readers.FITTED[name](samples, right_M, fits, (0, 1))[0](samples[80:]):
        assert auroc(score_K, right_M[80:]) > 0.9


@pytest.mark.parametrize("name", readers.FITTED)
def test_fits_side_by_side_are_those_by_themselves(name, few_passes):
    rng = np.random.default_rng(3)
    right_M = rng.random(60) < 0.5
    samples = [with_states(rng, right) for right in right_M]
    fits = [readers.ReaderFit(np.arange(60) % 5 == k, np.arange(60) % 5 == 4) for k in range(3)]
    together = readers.FITTED[name](samples, right_M, fits, (0,))
    shift_M = np.arange(60) % 5 == 3  # of no use to the first two fits: their batches and states stay as they are
    for k in range(2):
        (alone,) = readers.FITTED[name](samples, np.where(shift_M, ~right_M, right_M), [fits[k]], (0,))
        if name.startswith("SWIFT"):  # batches of other samples, so other rounding and steps: the order is what matters
            order, same = np.argsort(alone(samples)[0]), np.argsort(together[k](samples)[0])
            assert np.corrcoef(np.argsort(order), np.argsort(same))[0, 1] > 0.9
        else:
            np.testing.assert_allclose(together[k](samples), alone(samples), rtol=1e-6)


def test_regressions_side_by_side_are_those_of_a_solver():
    rng = np.random.default_rng(5)
    z_MLD, weight_MK = rng.standard_normal((200, 2, 6)), (rng.random((200, 3)) < 0.7).astype(float)
    right_M = (z_MLD[:, 0, 0] + rng.standard_normal(200) > 0).astype(float)
    ours = readers._regressions(jnp.asarray(z_MLD, jnp.float32), jnp.asarray(right_M), jnp.asarray(weight_MK))
    for layer, k, s in ((0, 0, 2), (1, 2, 3), (0, 1, 4)):
        weight_M, x_MD = weight_MK[:, k] / weight_MK[:, k].sum(), z_MLD[:, layer]

        def loss(w_D, x_MD=x_MD, weight_M=weight_M, strength=readers.STRENGTHS[s]):
            odds_M = x_MD @ w_D[:-1] + w_D[-1]
            return weight_M @ (np.logaddexp(0, odds_M) - right_M * odds_M) + strength / 2 * w_D[:-1] @ w_D[:-1]

        exact_D = minimize(loss, np.zeros(7)).x
        np.testing.assert_allclose(ours["kernel"][layer, :, k, s], exact_D[:-1], atol=5e-3)
        assert float(ours["bias"][layer, k, s]) == pytest.approx(exact_D[-1], abs=5e-3)


def test_gates_weigh_tokens_as_the_formula_says():
    rng = np.random.default_rng(1)
    samples = [with_states(rng, True) for _ in range(70)]  # more than a batch
    params = {"kernel": rng.standard_normal((6, 2, 3)), "bias": rng.standard_normal((2, 3))}
    by_hand = []
    for x in samples:
        both_T2G = np.einsum("tf,fcg->tcg", x.state_TLD.reshape(-1, 6).astype(float), params["kernel"]) + params["bias"]
        gate_TG = 1 / (1 + np.exp(-both_T2G[:, 0]))
        by_hand.append((gate_TG * both_T2G[:, 1]).sum(0) / gate_TG.sum(0))
    flat = readers._flat(samples, ends=False)
    np.testing.assert_allclose(readers._gated(params, flat, (np.zeros(6), np.ones(6))), by_hand, rtol=1e-4, atol=1e-5)


def test_the_largest_are_those_of_a_sort():
    x_NV = np.random.default_rng(0).standard_normal((5, 5000)).astype(np.float32)
    for k in (1, 20, 40):
        np.testing.assert_array_equal(states.largest(jnp.asarray(x_NV), k), -np.sort(-x_NV, axis=1)[:, :k])


def pools_of(path, problems, right_share=0.4):
    """Writes a file of pools; returns whether each sample that has an answer is right."""
    rng, rights = np.random.default_rng(2), []
    with path.open("w") as file:
        for number in range(problems):
            samples = []
            for i in range(6):
                right = rng.random() < right_share
                answer = 12 if right else int(rng.integers(20, 23))
                cut = i == 0 and number % 4 == 1
                steps = [f"I add {i} things.", f"The answer is {answer}."]
                samples.append({"steps": steps, "answer": None if cut else str(answer), "correct": right and not cut})
                rights += [] if cut else [right]
            if number == 5:  # nothing to choose from
                rights = rights[: -sum(x["answer"] is not None for x in samples)]
                samples = [{**x, "answer": None, "correct": False} for x in samples]
            record = {"problem": f"How many, number {number}?", "answer": "12", "samples": samples}
            file.write(json.dumps(record) + "\n")
    return np.array(rights)


@pytest.mark.breadth
def test_arms_choose_by_what_their_readers_find(tmp_path, few_passes):
    """From pools and states through kept scores to the verdict; samples and problems without answers count as wrong."""
    rights = {name: pools_of(tmp_path / f"{name}.jsonl.gz", 60) for name in ("own_train", "own_test")}
    rng, records = np.random.default_rng(4), []
    for name, right_M in rights.items():
        trees = reader_scores.trees_of(tmp_path / f"{name}.jsonl.gz", None)
        samples = [with_states(rng, right) for right in right_M]
        ends = np.cumsum([len(tree.nodes) // 2 for tree in trees])
        by_problem = [samples[a:b] for a, b in zip([0, *ends], ends, strict=False)]
        assert [right for tree in trees for right in reader_scores.rights(tree)] == right_M.tolist()
        if name == "own_train":
            with Bar("fitting", len(readers.FITTED)) as bar:
                fitted = reader_scores.fit(trees, by_problem, bar)
        for tree, of_tree in zip(trees, by_problem, strict=True):
            chosen = 1 + reader_scores.fold_of(tree) if name == "own_train" else 0
            records.append(reader_scores.record(name, tree, of_tree, {k: fits[chosen] for k, fits in fitted.items()}))
    write_records(tmp_path / "scores_states.jsonl", records)
    known = verdict.read_scores([tmp_path / "scores_states.jsonl"])
    train, test = (verdict.read(tmp_path / f"{name}.jsonl.gz", known) for name in ("own_train", "own_test"))
    assert test.lost == 1
    arms = verdict.arms(train, seed=0)
    result = verdict.figures(test, [arms, verdict.arms(train, seed=1)])
    assert result["problems"] == 60
    for name in ("SWIFT", "last state", "CLUE", "fused"):
        assert result["arms"][name]["vote less majority"]["low"] > 0
        assert result["arms"][name]["AUROC in problems"] > 90
    assert result["arms"]["text"]["vote less text"] == {"value": 0, "low": 0, "high": 0}
    assert abs(result["arms"]["tail"]["vote less majority"]["value"]) < 1e-9  # the same number for every sample


def test_a_pool_ends_at_the_last_problem_that_all_readers_scored(tmp_path):
    pools_of(tmp_path / "own_test.jsonl.gz", 12)
    trees = reader_scores.trees_of(tmp_path / "own_test.jsonl.gz", None)

    def known(*readers_of):
        scores_of = {}
        for tree, names in zip(trees, readers_of, strict=False):
            scores = {name: [0.5] * (len(tree.nodes) // 2) for name in names}
            scores_of["own_test", states.name_of(tree)] = scores
        return scores_of

    pool = verdict.read(tmp_path / "own_test.jsonl.gz", known(*["ab"] * 4, *["a"] * 6))
    assert int(pool.chains.problem_M.max()) + 1 == 4
    refused(SystemExit, "1 problems lack scores", verdict.read, tmp_path / "own_test.jsonl.gz", known("ab", "a", "ab"))


def test_a_reader_trained_on_all_outcomes_is_judged_without_scores_of_what_fits(tmp_path):
    right_M, known = pools_of(tmp_path / "own_train.jsonl.gz", 60), {}
    for tree in reader_scores.trees_of(tmp_path / "own_train.jsonl.gz", None):
        score_M = np.where(reader_scores.rights(tree), 0.9, 0.1).tolist()
        held_out = verdict.bucket(tree.problem, 10) >= 7
        known["own_train", states.name_of(tree)] = {"of all": score_M} | ({"outcome PRM": score_M} if held_out else {})
    pool = verdict.read(tmp_path / "own_train.jsonl.gz", known)
    score_M = pool.score("outcome PRM", 0)
    assert np.isnan(score_M).tolist() == (pool.bucket_M < 7).tolist()
    odds = {name: arm(pool) for name, arm in verdict.arms(pool, seed=0).items()}
    held_out_M = pool.bucket_M >= 7
    assert auroc(odds["outcome PRM"][held_out_M], right_M[: len(score_M)][held_out_M]) == 1
    assert np.isfinite(odds["fused"]).all()


def test_outcomes_are_of_fitting_problems_with_as_many_right_as_wrong_samples(tmp_path):
    pools_of(tmp_path / "own_train.jsonl", 80)
    outcomes.main(tmp_path, tmp_path / "own_train.jsonl")
    tenths = {"fit": range(7), "valid": [7]}
    for name, of_tenth in tenths.items():
        records = [json.loads(line) for line in (tmp_path / f"{name}.jsonl").read_text().splitlines()]
        assert records
        for record in records:
            right = [sample["correct"] for sample in record["samples"]]
            assert 0 < sum(right) <= 2 and 0 < len(right) - sum(right) <= 2
            assert all(sample["answer"] is not None for sample in record["samples"])
            assert verdict.bucket(record["problem"], 10) in of_tenth


def test_scores_without_their_problem_are_one_line(tmp_path):
    write_records(tmp_path / "scores.jsonl", [{"pool": "own_test", "scores": {}}])
    refused(SystemExit, r"scores.jsonl:1: lacks problem", verdict.read_scores, [tmp_path / "scores.jsonl"])


def test_a_prms_rule_is_the_one_that_ranks_held_out_samples(tmp_path):
    """Least scores tell right from wrong here, last ones do not."""
    pools_of(tmp_path / "own_train.jsonl", 80)
    records = []
    for number, line in enumerate((tmp_path / "own_train.jsonl").read_text().splitlines()):
        record = json.loads(line)
        for i, sample in enumerate(record["samples"]):
            sample["scores"] = [0.9 if sample["correct"] else 0.2, 0.5 + 0.01 * ((7 * i + number) % 5)]
        records.append(record)
    write_records(tmp_path / "scored" / "own_train.jsonl", records)
    prm_scores.main("PRM", (tmp_path / "scored/own_train.jsonl",), tmp_path / "scores.jsonl")
    for tree in reader_scores.trees_of(tmp_path / "own_train.jsonl", None):
        scores = verdict.read_scores([tmp_path / "scores.jsonl"])["own_train", states.name_of(tree)]["PRM"]
        right = reader_scores.rights(tree)
        of_right, of_wrong = ([x for x, r in zip(scores, right, strict=True) if r == which] for which in (True, False))
        assert not of_right or not of_wrong or min(of_right) > max(of_wrong)


@pytest.mark.breadth
def test_kept_scores_of_ratings_are_ahead_of_position_and_length(shared_data, capsys):
    step_labels.main(shared_data)
    printed = capsys.readouterr().out
    assert "step AUROC: PRM 72.6 [69.7, 75.3]" in printed
    assert "step AUROC: position and length 66.4 [62.1, 70.5]" in printed


def test_the_best_sample_is_never_one_without_an_answer():
    chains = verdict.Chains(*map(np.array, (np.zeros((4, 1)), [0.0, 1, 1, 0], [0, 0, 1, 1], [0] * 4, [-1, 0, 0, 1])))
    assert verdict.best_correct(chains, np.array([9.0, 1, 2, 2])).tolist() == [1.0, 0.5]


def test_trivial_choosers_doubt_by_rules_and_break_ties(tmp_path):
    """Two answers of two samples each: rules decide, else the likelier tokens, else both are chosen by half."""
    problem = "A box holds 12 nuts and 30 bolts. How many parts?"
    samples = [
        {"steps": ["12 + 30 = 42", "So 42."], "answer": "42", "correct": True, "tokens": 10, "logprob": -1.0},
        {"steps": ["It is 12 and 30, 42."], "answer": "42", "correct": True, "tokens": 10, "logprob": -4.0},
        {"steps": ["12 + 30 = 43", "So 43.5"], "answer": "43.5", "correct": False, "tokens": 10, "logprob": -2.0},
        {"steps": ["```python", "print(43.5)"], "answer": "43.5", "correct": False, "tokens": 10, "logprob": -2.0},
    ]
    path = tmp_path / "own_test.jsonl"
    write_records(path, [{"problem": problem, "answer": "42", "samples": samples}])
    pool = verdict.read(path, {})
    of_samples = trivial.signals(path, pool)
    doubts = {rule: of_samples[rule].tolist() for rule in trivial.RULES}
    assert doubts["false equation"] == [False, False, True, False]
    assert doubts["not whole"] == [False, False, True, True] and doubts["program"] == [False, False, False, True]
    five = trivial.weights(trivial.Chooser("", ("not whole", "program")), of_samples)
    np.testing.assert_allclose(five, [1, 1, 0.1, 0.01])
    cases = [((), "", 0.5), ((), "log-probability", 0.0), ((), "shortest", 1.0), (("program",), "", 1.0)]
    for rules, ties, right in cases:
        chooser = trivial.Chooser("", rules, ties)
        assert trivial.vote(pool, trivial.weights(chooser, of_samples)).tolist() == [right], chooser
    best = trivial.best_choosers(pool, of_samples)
    assert 1 < len(best) < len(trivial.EVERY) == 96
    assert all(trivial.vote(pool, trivial.weights(chooser, of_samples)).tolist() == [1.0] for chooser in best)
