"""Heads of named outputs: what they learn by hand, from records to served scores, and an output as a filter."""

import dataclasses
import json

import jax
import numpy as np
import pytest
from families import breadth
from refusing import refused
from scipy.special import log_expit, log_softmax
from tiny import Characters
from tiny_run import MODEL, chains, experiment, lines, make_data, one_device

from jprm import loading, objectives
from jprm.apps import cli
from jprm.experiment import ObjectiveConfig, OptimizerConfig, TargetConfig, read
from jprm.io.jsonl import write_records
from jprm.model import heads
from jprm.objectives import NamedOutputs
from jprm.rows import empty_rows
from jprm.token_tree import token_tree
from jprm.train import train
from jprm.tree import tree_of

KINDS = ("bad", "cut")


def with_classes(records):
    """Chains whose steps have the class of their word: several, none, and not labelled where it is 'far'."""
    for record in records:
        classes = [[kind for kind in KINDS if kind in step] for step in record["steps"]]
        pairs = zip(record["steps"], classes, strict=True)
        record["classes"] = [None if "far" in x else kinds[0] if len(kinds) == 1 else kinds for x, kinds in pairs]
    return records


@pytest.mark.parametrize("activation", ["sigmoid", "softmax"])
def test_the_loss_is_that_by_hand(activation):
    config = ObjectiveConfig(
        dataclasses.replace(MODEL, head=f"{activation}=right,bad,cut"),
        TargetConfig("correctness", "none", "keep"), extras=KINDS,
    )  # fmt: skip
    objective = NamedOutputs()
    objectives.check(objective, config)
    logit_BSC = np.random.default_rng(0).normal(size=(1, 5, 3)).astype(np.float32)
    nan = np.nan
    label, bad, cut = [1, 0.25, 1, 1, 0], [0, 1, 1, nan, 0.5], [0, 0, 1, nan, nan]
    owned = [True, True, True, True, False]  # the last slot is another row's
    rows = dataclasses.replace(
        empty_rows(1, 8, 5), label=np.array([label], np.float32), weight=np.array([[1, 1, 0, 1, 0]], np.float32),
        owned=np.array([owned]), extras={"bad": np.array([bad], np.float32), "cut": np.array([cut], np.float32)},
    )  # fmt: skip
    total, count, metrics = jax.jit(objective.of_logits, static_argnums=2)(logit_BSC, rows, config)
    expected, steps = 0.0, 0
    for s, (z, w) in enumerate(zip(logit_BSC[0].astype(float), [1, 1, 0, 1, 0], strict=True)):
        known = [(bad[s], 1), (cut[s], 2)] if owned[s] else []
        known = [(t, k) for t, k in known if not np.isnan(t)]
        if activation == "sigmoid":
            for t, k, weight in [(label[s], 0, w), *((t, k, 1) for t, k in known)]:
                expected -= weight * (t * log_expit(z[k]) + (1 - t) * log_expit(-z[k]))
            steps += bool(w or known)
        elif known:
            target = np.zeros(3)
            target[[k for _, k in known]] = [t for t, _ in known]
            target[0] = 1 - target.max()
            expected -= target @ log_softmax(z) / target.sum()
            steps += 1
    assert float(total) == pytest.approx(expected, rel=1e-5) and float(count) == steps
    assert set(metrics) == {"scores", "bad", "cut"}


def test_classes_are_numbers_of_steps():
    record = {"problem": "p", "steps": ["a", "b", "c"], "classes": [["bad", "cut"], None, []], "labels": [1, 1, 0]}
    tree = token_tree(tree_of(record), Characters(), extras=KINDS)
    for key, value in (("bad", [1, np.nan, 0]), ("cut", [1, np.nan, 0])):
        np.testing.assert_array_equal(tree.extras[key][np.argsort(tree.node_M)], np.float32(value))
    refused(ValueError, "classes", token_tree, tree_of(record | {"classes": ["bad"]}), Characters(), extras=KINDS)


@pytest.mark.parametrize(("key", "value"), [
    ("score", [0.25, 0.5]), ("sigma", [0.125, 1]), ("outputs.sigma", [0.125, 1]), ("label", [1, 0]),
])  # fmt: skip
@pytest.mark.parametrize("shape", ["chain", "nodes"])
def test_scores_and_outputs_of_a_scored_file_are_extras(key, value, shape):
    chain = {"problem": "p", "semantics": "correctness", "steps": ["a", "b"], "labels": [1, 0], "scores": [0.25, 0.5],
             "outputs": {"sigma": [0.125, 1.0]}}  # fmt: skip
    nodes = [{"parent": i - 1, "text": "ab"[i], "label": 1 - i, "score": chain["scores"][i],
              "outputs": {"sigma": chain["outputs"]["sigma"][i]}} for i in range(2)]  # fmt: skip
    record = chain if shape == "chain" else {"problem": "p", "semantics": "correctness", "nodes": nodes}
    tree = token_tree(tree_of(record), Characters(), extras=(key,))
    np.testing.assert_array_equal(tree.extras[key][np.argsort(tree.node_M)], np.float32(value))
    refused(ValueError, "'other'", token_tree, tree_of(record), Characters(), extras=("other",))


@pytest.mark.parametrize("name", ["sigmoid=right,right", "softmax=score,bad", "sigmoid=right", "sigmoid=a,b c"])
def test_names_that_are_none_are_refused(name):
    refused(ValueError, "head", heads.find, name)


def test_an_output_without_numbers_is_refused():
    model = dataclasses.replace(MODEL, head="sigmoid=right,bad,cut")
    config = ObjectiveConfig(model, TargetConfig("rating", "drop", "keep"), extras=("bad",))
    refused(ValueError, "cut", objectives.check, NamedOutputs(), config)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run of a head with two kinds of errors, which every step's word shows."""
    folder = tmp_path_factory.mktemp("named")
    make_data(folder)
    for name, count in (("train", 60), ("valid", 20)):
        write_records(folder / f"{name}.jsonl", with_classes(chains(count, seed=count)))
    run = experiment(
        folder, model=dataclasses.replace(MODEL, head="sigmoid=right,bad,cut"), objective="named_outputs",
        extras=KINDS, rows=4, steps=60, log_every=30, checkpoint_every=60,
        optimizer=OptimizerConfig(learning_rate=0.02, warmup_steps=2),
    )  # fmt: skip
    with one_device():
        train(run, folder / "run")
    return folder


def score(folder, name, *options):
    """Scores chains into a file of this name; returns the exit status."""
    files = ["--input", str(folder / "valid.jsonl"), "--output", str(folder / f"{name}.jsonl")]
    return cli.main(["score", "--model", str(folder / "run"), *files, *options])


def test_kinds_are_learnt_scored_and_filtered(trained):
    last = lines(trained / "run")[-1]
    assert last["valid_bad_auroc"] > 0.9 and last["valid_cut_auroc"] > 0.9 and last["valid_auroc"] > 0.9
    scores = {}
    for name, by in (("plain", []), ("bad", ["--by", "bad"]), ("kept", ["--by", "right unless cut > 0.3"])):
        assert score(trained, name, *by) == 0
        scores[name] = lines(trained, f"{name}.jsonl")
    vetoed = 0
    for plain, bad, kept in zip(scores["plain"], scores["bad"], scores["kept"], strict=True):
        outputs = plain["outputs"]
        assert set(outputs) == {"right", "bad", "cut"} and outputs["right"] == plain["scores"]
        assert bad["scores"] == outputs["bad"]
        expected = [0.0 if cut > 0.3 else x for x, cut in zip(plain["scores"], outputs["cut"], strict=True)]
        assert kept["scores"] == expected
        vetoed += expected.count(0.0)
    assert vetoed > 5
    command = ["eval", "classes", "--model", str(trained / "run"), "--input", str(trained / "valid.jsonl")]
    assert cli.main([*command, "--json", str(trained / "classes.json")]) == 0


@pytest.mark.parametrize(
    "by", ["right unless cut", "right unless none > 0.5", "none unless cut > 0.5", "right unless cut > x"]
)
def test_filters_that_are_none_are_refused(trained, by):
    assert score(trained, "refused", "--by", by) == 2
    assert not (trained / "refused.jsonl").exists()


def test_another_filter_does_not_continue_a_file(trained):
    assert score(trained, "again") == 0
    before = (trained / "again.jsonl").read_bytes()
    assert score(trained, "again", "--by", "bad") == 2 and (trained / "again.jsonl").read_bytes() == before


@pytest.mark.parametrize("activation", [*breadth(["softmax"]), "sigmoid"])
def test_an_export_reads_as_a_token_classifier(trained, tmp_path, activation, one_device):
    model = dataclasses.replace(MODEL, head=f"{activation}=right,bad,cut", qk_norm=False)
    run = dataclasses.replace(read(trained / "run" / "experiment.json"), model=model, steps=4)
    train(run, tmp_path / "run")
    assert cli.main(["convert", str(tmp_path / "run"), str(tmp_path / "exported")]) == 0
    config = json.loads((tmp_path / "exported" / "config.json").read_text())
    assert config["id2label"] == {"0": "right", "1": "bad", "2": "cut"}
    record = chains(1, seed=5)[0]
    stored, exported = (loading.load(tmp_path / name).outputs_of([tree_of(record)])[0] for name in ("run", "exported"))
    assert ("problem_type" in config) == (activation == "sigmoid")
    for name in ("score", "right", *KINDS):
        np.testing.assert_allclose(stored[name], exported[name], atol=1e-6)
