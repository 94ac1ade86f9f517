"""The study of objectives in a world of a minute: a cell that is stopped and continued, its figures and tables."""

import dataclasses
import json

import jax
import numpy as np
import pytest
from refusing import refused
from tiny_run import MODEL, VALUE, experiment, make_data, training

import jprm
from experiments import objectives as study
from experiments.objectives import frozen as _frozen  # noqa: F401  (with it, what it imports are names of `study`)
from experiments.objectives import run as _run  # noqa: F401
from experiments.objectives import table as _table  # noqa: F401
from experiments.objectives.measure import measured
from experiments.quickstart import task
from jprm.checkpoints import base as bases
from jprm.io.jsonl import write_records
from jprm.methods.implicit import LogRatio
from jprm.methods.label.jobs import load_reference
from jprm.score.scale import PROBABILITY
from jprm.statistics import auroc
from jprm.token_tree import token_tree
from jprm.tree import read_records, tree_of


def world(folder):
    """What the study reads of a run of the quickstart, with two stories' worth of everything."""
    rng = np.random.default_rng(0)
    make_data(folder)
    (folder / "tokenizer").mkdir()
    (folder / "tokenizer.json").rename(folder / "tokenizer/tokenizer.json")
    pools, values = [], []
    for _ in range(8):
        story = task.problem(rng, (1, 2))
        habits = task.Habits(operation=0.9, unit=0.9, quantity=0.9, copied=0.5)
        chains = [task.solution(story, rng, habits) for _ in range(4)]
        answered = [(list(steps), task.answer_of(steps)) for steps in chains]
        samples = [{"steps": steps, "answer": x, "correct": x == story.answer} for steps, x in answered]
        pools.append({"problem": story.text, "answer": story.answer, "samples": samples})
        nodes = [{"parent": i - 1, "text": text, "label": i % 3 / 2, "rollouts": 4} for i, text in enumerate(chains[0])]
        values.append({"problem": story.text, "nodes": nodes, "semantics": "value"})
    formal = list(map(study.data.labelled, pools))
    for name, records in dict(pools=pools, test_pools=pools, monte_carlo=values, formal=formal).items():
        write_records(folder / f"{name}.jsonl", records)
    return folder


SIZES = dict(base="", model=MODEL, steps=2, checkpoint_every=1, tokens=256, slots=64, rows=2, micro_rows=2, window=8)


def test_cells_are_trained_measured_and_tabulated(tmp_path, monkeypatch, one_device):
    shared, out = world(tmp_path / "world"), tmp_path / "cells"
    monkeypatch.setattr(study.recipes, "_quickstart", lambda train, target, seed, *_: experiment(
        shared, tokenizer=str(shared / "tokenizer"), train=(train,), target=target, valid=(), seed=seed))  # fmt: skip
    cell = study.run.cell("quickstart", "quantile", 0, shared, out, **SIZES)
    folder = out / "quickstart/quantile/0"
    (folder / "cell.json").unlink()  # stopped after training and scoring
    (folder / "run/result.json").unlink()
    trained = (folder / "run/metrics.jsonl").read_bytes()
    again = study.run.cell("quickstart", "quantile", 0, shared, out, **SIZES)
    timed = "seconds_of_last_call"
    assert {**again, timed: 0} == {**cell, timed: 0} == {**json.loads((folder / "cell.json").read_text()), timed: 0}
    assert (folder / "run/metrics.jsonl").read_bytes() == trained
    test = cell["tests"]["quickstart"]
    assert test["n"] == 4 and len(test["problems"]) == 4 and len(test["chain_key"]) == 16
    figures = study.measure.figures([test, test], [cell["tests"]["valid"]] * 2)
    right_N = np.array(test["chain_correct"]) > 0.5
    assert figures["chain_auroc"]["value"] == pytest.approx(float(auroc(np.array(test["chain_key"]), right_N)))
    ahead = np.mean(test["weighted_vote"]) - np.mean(test["majority"])
    assert figures["vote_minus_majority"]["value"] == pytest.approx(ahead)
    assert 0 <= cell["tests"]["held_out_values"]["covered"]["value"] <= 1
    titles = [table.title for table in study.table.tables(out)]
    tested = [title.split(":")[0].removeprefix("trained on quickstart, tested on ") for title in titles]
    assert tested == ["quickstart, n = 4", "held_out_values"]


def frozen_world(folder, monkeypatch, groups):
    """The world, and in place of SmolLM2 a tiny model with these groups of layers."""
    shared = world(folder)
    monkeypatch.setattr(study.recipes, "_quickstart", lambda train, target, seed, _, wanted: experiment(
        shared, tokenizer=str(shared / "tokenizer"), train=(train,), target=target, valid=(), seed=seed,
        reference=str(shared / "base") if wanted.changes.get("head") == "language" else ""))  # fmt: skip
    base = experiment(shared, tokenizer=str(shared / "tokenizer"), valid=(), steps=1, checkpoint_every=1)
    model = dataclasses.replace(MODEL, layer_groups=groups)
    training.train(dataclasses.replace(base, model=model), shared / "base")
    monkeypatch.setattr(study.states, "smollm2", lambda: str(shared / "base"))
    monkeypatch.setattr(bases, "check_language_model", bases._opened)  # the tiny base is a PRM
    for module, name, size in (
        (study.states, "TOKENS", 512), (study.states, "SLOTS", 64), (study.states, "CHUNK", 4),
        (study.heads, "SLOTS", 64), (study.heads, "TOKEN_SLOTS", 512), (study.heads, "DEPTH", groups[0]),
        (study.language, "GROUPS", groups),
    ):  # fmt: skip
        monkeypatch.setattr(module, name, size)
    study.language.frozen.cache_clear()
    study.states.layout.cache_clear()
    return shared


@pytest.mark.breadth
def test_heads_on_a_frozen_decoder_learn_from_its_states(tmp_path, monkeypatch, one_device):
    out = tmp_path / "cells"
    shared = frozen_world(tmp_path / "world", monkeypatch, (2,))
    cell = study.frozen.cell("quickstart", "pqm", 0, shared, out, hidden=8, epochs=2)
    prm = jprm.load(shared / "base")
    trees = [tree_of(record) for record in prm.score_many(read_records(shared / "formal.jsonl"))]
    monkeypatch.setattr(study.states.Frozen, "load", None)  # a second cell computes no states
    state_ND = study.heads.known(shared / "formal.jsonl", out / "states/quickstart_formal", None).state_ND
    state_ND, norm_D = state_ND.astype(np.float32), prm.params["decoder"]["final_norm"]
    x_ND = state_ND / np.sqrt(np.mean(state_ND**2, -1, keepdims=True) + prm.config.norm_eps) * norm_D
    logit_NC = x_ND @ prm.params["head"]["kernel"] + prm.params["head"]["bias"]
    right_N = 1 / (1 + np.exp(logit_NC[:, 0] - logit_NC[:, 1]))
    # States are kept as float16, of 11 bits.
    np.testing.assert_allclose(right_N, [node.score for tree in trees for node in tree.nodes], atol=2e-3)
    assert cell["tests"]["quickstart"]["n"] == 4
    study.frozen.cell("quickstart", "cross_entropy", 0, shared, out, hidden=8, epochs=2)
    for named, file, count in (("after_2", "monte_carlo", 4), ("3 problems", "pools", 3)):
        refused(ValueError, named, study.heads.known, shared / f"{file}.jsonl", out / "states/quickstart_formal", count)
    for named, task_, objective in (("gsm8k", "gsm8k", "pqm"), ("rank", "quickstart", "rank")):
        refused(ValueError, named, study.frozen.cell, task_, objective, 0, shared, out)


@pytest.mark.breadth
def test_a_head_is_trained_at_every_token_and_read_at_the_ends_of_steps(tmp_path, monkeypatch, one_device):
    out, heads = tmp_path / "cells", study.heads
    shared = frozen_world(tmp_path / "world", monkeypatch, (2,))
    cell = study.frozen.cell("quickstart", "outcome_tokens", 0, shared, out, hidden=8, epochs=2)
    pools, folder = shared / "pools.jsonl", out / "states/quickstart_pools"
    steps = heads.known(pools, folder, None)
    tokens = heads.known(pools, folder, None, "outcome_tokens")
    first_K = np.cumsum(tokens.size_K) - tokens.size_K
    trees = [token_tree(tree, study.states.layout()) for tree in tokens.trees]
    assert [len(tree.tokens_N) for tree in trees] == tokens.size_K.tolist()
    ends = [(tree.start_R + tree.length_R - 1)[tree.run_M[np.argsort(tree.node_M)]] for tree in trees]
    end_N = np.concatenate([first + end for first, end in zip(first_K, ends, strict=True)])
    # The same tokens, in rows packed otherwise: sums in another order, kept as float16.
    np.testing.assert_allclose(tokens.state_ND[end_N], steps.state_ND, atol=2e-2, rtol=2e-3)
    of_problem = np.isnan(tokens.state_ND[:, 0])
    assert of_problem.sum() == sum(tree.problem for tree in trees)
    files = study.data.files("quickstart", shared, out / "quickstart/data")
    settings = study.recipes.experiment("quickstart", "outcome_tokens", 0, files, shared)
    rows = heads.labelled(tokens, lambda x: x, settings)
    assert (rows.rows.weight > 0).sum() == (~of_problem).sum()  # a slot for every token of a step
    assert {tuple(x) for x in rows.x_RSD[rows.rows.weight > 0]} == {tuple(x) for x in tokens.state_ND[~of_problem]}
    assert cell["tests"]["quickstart"]["n"] == 4


@pytest.mark.breadth
def test_the_last_layers_alone_become_an_implicit_prm(tmp_path, monkeypatch, one_device):
    out, language = tmp_path / "cells", study.language
    shared = frozen_world(tmp_path / "world", monkeypatch, (1, 1))
    assert sum(MODEL.layer_groups) == 2
    cell = study.frozen.cell("quickstart", "dpo", 0, shared, out, learning_rate=1e-2)
    known = language.known(shared / "pools.jsonl", out / "states/quickstart_pools", None)
    model = language.frozen()
    untrained = language.scored(model.params, 0.05, known)
    files = study.data.files("quickstart", shared, out / "quickstart/data")
    settings = study.recipes.experiment("quickstart", "implicit", 0, files, shared)
    trained = language.fitted(settings, known, language.Fit(learning_rate=1e-2)).args[0]
    reference = load_reference(str(shared / "base"))
    ratio = LogRatio(reference.params, reference.config, 0.05)
    placed = jax.tree.map(lambda x, like: jax.device_put(np.asarray(x), like.sharding), trained, reference.params)
    prm = dataclasses.replace(reference, params=placed, ratio=ratio)
    wanted = prm.score_trees(known.trees)
    scored = language.scored(trained, 0.05, known)
    assert {node.score for tree in untrained for node in tree.nodes} == {0.0}
    score_N = np.array([node.score for tree in scored for node in tree.nodes])
    # States are kept as float16, of 11 bits; scores are up to a hundred times larger than this.
    np.testing.assert_allclose(score_N, np.concatenate(wanted), atol=2e-3)
    assert np.abs(score_N).max() > 0.05
    assert cell["rule"] == "last" and len(set(cell["tests"]["quickstart"]["chain_score"])) > 2


def test_a_head_finds_what_its_states_say(tmp_path):
    shared = world(tmp_path / "world")
    settings = experiment(shared, target=VALUE, valid=(), tokenizer=str(shared / "tokenizer"))
    trees = [tree_of(record) for record in read_records(shared / "formal.jsonl")]
    label_N = np.array([node.label for tree in trees for node in tree.nodes])
    x_ND = np.random.default_rng(0).normal(size=(len(label_N), 6)).astype(np.float32)
    x_ND[:, 3] += 6 * label_N
    known = study.heads.Known(trees, np.array([len(tree.nodes) for tree in trees]), x_ND)
    rows = study.heads.labelled(known, lambda x: x, settings)
    some_RS = rows.rows.weight > 0
    assert some_RS.sum() == len(label_N)  # every step is in one slot, with its own state
    pairs = [np.stack([rows.rows.label[some_RS], rows.x_RSD[some_RS][:, 3]], 1), np.stack([label_N, x_ND[:, 3]], 1)]
    assert len({tuple(map(tuple, pair[np.argsort(pair[:, 1])].astype(np.float32))) for pair in pairs}) == 1
    head = study.heads.trained(settings, rows, study.heads.Fit(hidden=8, epochs=60, rows=1))
    scored = study.heads.scored(head, settings, trees, x_ND)
    score_N = np.array([node.score for tree in scored for node in tree.nodes])
    assert auroc(score_N, label_N > 0.5) > 0.99


def test_a_chain_is_measured_by_its_probability():
    """Votes by odds need absolute probabilities, not fractions of a pool's largest."""
    samples = [{"steps": ["a"], "scores": [p], "answer": str(p), "correct": p == 0.6} for p in (0.6, 0.3)]
    pool = tree_of({"problem": "p", "answer": "0.6", "samples": samples})
    assert measured([pool], PROBABILITY, "prod")["chain_score"] == pytest.approx([0.6, 0.3])


def test_seeds_are_averaged_problem_by_problem():
    def test(keys):
        fields = {"n": 2, "problems": ["a", "b"], "chain_problem": [0, 0, 1, 1], "chain_correct": [1.0, 0.0, 1.0, 0.0]}
        values = {"best_of_n": [1.0, keys[2]], "one_sample": [0.5, 0.5], "majority": [0.5, 0.5]}
        return fields | values | {"weighted_vote": [1.0, keys[2]], "chain_key": keys, "chain_score": keys}

    good, bad = test([0.9, 0.1, 0.8, 0.2]), test([0.9, 0.1, 0.2, 0.8])
    mean = study.measure.figures([good, bad], [good, good])
    assert mean["chain_auroc"]["value"] == pytest.approx((1.0 + 0.75) / 2)
    assert mean["chain_auroc"]["seeds"] == [1.0, 0.75]
    assert mean["within_auroc"]["value"] == pytest.approx((1.0 + 0.5) / 2)  # of two problems, one upside down in `bad`
    both = study.measure.mean_over_tests([[good, bad], [good]], "weighted_vote", "majority")
    assert both["value"] == pytest.approx((0.5 + (0.0 + 0.3) / 2) / 2)  # of the first problem, and of the second
    easy = {**good, "chain_correct": [1.0, 1.0, 1.0, 0.0]}  # whose first problem says nothing of its chains
    assert study.measure.figures([easy], None)["within_auroc"]["value"] == 1.0
    assert mean["vote_minus_majority"]["value"] == pytest.approx(0.25)


@pytest.mark.parametrize("spread", [0.0, 0.1, 0.4])
def test_intervals_cover_other_seeds_and_other_problems(spread):
    """Differences of three seeds on 40 problems, whose seeds are apart by nothing, little or most of what there is."""
    covered, over_problems = 0, 0
    for run in range(200):
        rng = np.random.default_rng([run, int(100 * spread)])
        value_SP = spread * rng.normal(size=(3, 1)) + 0.5 * rng.normal(size=40) + 0.3 * rng.normal(size=(3, 40))
        report = study.measure.of_values([str(i) for i in range(40)], value_SP)
        assert report["value"] == pytest.approx(value_SP.mean()) and report["seeds"] == value_SP.mean(1).tolist()
        covered += report["low"] <= 0.0 <= report["high"]
        alone = study.measure.of_values([str(i) for i in range(40)], [value_SP.mean(0)])
        over_problems += alone["low"] <= 0.0 <= alone["high"]
    assert covered >= 181  # of 190 expected at 95 %, less three standard errors
    assert over_problems < 120 or spread < 0.4  # intervals over problems only leave the seeds out


def test_equal_steps_become_one_node_whose_alternatives_compare():
    steps = [["a", "b"], ["a", "c"], ["d"], ["a", "b"]]
    record = {"problem": "p", "samples": [{"steps": s, "labels": [1.0] * len(s), "correct": True} for s in steps]}
    tree = study.data.merged(tree_of(record))
    assert [(node.parent, node.text) for node in tree.nodes] == [(-1, "a"), (0, "b"), (0, "c"), (-1, "d")]


def test_a_step_beyond_a_row_scores_as_the_step_before_it():
    parents = [-1, 0, 1, -1, 3]
    tree = tree_of({"problem": "p", "nodes": [{"parent": i, "text": f"s{n}"} for n, i in enumerate(parents)]})
    filled = study.language.filled(tree, np.array([0.5, np.nan, np.nan, np.nan, -2.0]))
    assert filled == [0.5, 0.5, 0.5, 0.0, -2.0]
