"""Classifiers of many labels: each label an output, as transformers computes it; figures of classes; /classify."""

import dataclasses
import json

import numpy as np
import pytest
from published import PROBLEM, REASON, SIZES, STEPS, bytes_tokenizer, random_weights, softmax, tokenizer_of, trl_ids
from refusing import refused
from test_serve import call, post

import jprm
from jprm.apps.serve.engine import Engine
from jprm.methods.evaluate.benchmark import Request
from jprm.methods.evaluate.classes import best_threshold, figures
from jprm.methods.evaluate.scored import ScoreError
from jprm.tree import record_of, steps_only, tree_of

LABELS = ["correct", *(f"error {i}" for i in range(25))]


def classifier(folder, kind="Token", labels=LABELS, **config):
    """Writes a tiny classifier in transformers' layout, with its tokenizer; returns the model."""
    transformers = pytest.importorskip("transformers", reason=REASON)
    names = dict(id2label=dict(enumerate(labels)), label2id={label: i for i, label in enumerate(labels)})
    shape = transformers.Qwen2Config(
        **SIZES, **names, num_labels=len(labels), rope_theta=100.0, pad_token_id=0, **config
    )
    model = random_weights(getattr(transformers, f"Qwen2For{kind}Classification")(shape))
    model.save_pretrained(folder)
    inner, tokens = bytes_tokenizer()
    inner.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(tokens))
    return model


def logits(model, ids):
    torch = pytest.importorskip("torch", reason=REASON)
    with torch.no_grad():
        return model(torch.tensor([ids])).logits[0].numpy()


@pytest.mark.parametrize("several", [False, True])
def test_a_token_classifier_of_26_labels_has_an_output_a_label(tmp_path, several):
    kind = {"problem_type": "multi_label_classification"} if several else {}
    model = classifier(tmp_path, **kind)
    prm = jprm.load(tmp_path)
    ids, ends = trl_ids(tokenizer_of(tmp_path), PROBLEM, STEPS)
    at_PC = logits(model, ids)[ends]
    expected_PC = 1 / (1 + np.exp(-at_PC)) if several else softmax(at_PC)
    (outputs,) = prm.outputs_of([tree_of({"problem": PROBLEM, "steps": STEPS})])
    assert set(outputs) == {"score", *LABELS}
    np.testing.assert_allclose(np.stack([outputs[label] for label in LABELS], 1), expected_PC, atol=1e-5)
    np.testing.assert_array_equal(outputs["score"], outputs["correct"])
    by = prm.by("error 3").score(PROBLEM, STEPS)
    np.testing.assert_allclose(by, expected_PC[:, 4], atol=1e-5)


def test_a_sequence_classifier_reads_each_step_as_the_end(tmp_path):
    model = classifier(tmp_path, "Sequence", ["ok", "arithmetic", "logic"])
    adapter = {"like": "sequence-classes", "chat": False, "problem": "{problem}\n", "step": "{step}\n",
           "closing": "{step}\n<|im_end|>", "tokens": {"<|im_end|>": None},
           "outputs": {"wrong": {"arithmetic": 1, "logic": 1}}}  # fmt: skip
    (tmp_path / "adapter.json").write_text(json.dumps(adapter))
    prm, tokenizer = jprm.load(tmp_path), tokenizer_of(tmp_path)
    (outputs,) = prm.outputs_of([tree_of({"problem": PROBLEM, "steps": STEPS})])
    for k in range(len(STEPS)):
        ids = tokenizer.encode(PROBLEM + "\n")
        for step in STEPS[: k + 1]:
            ids = ids + tokenizer.encode(step + "\n")
        ids = [*ids, tokenizer.convert_tokens_to_ids("<|im_end|>")]
        probability_C = softmax(logits(model, ids)[None])[0]
        assert outputs["score"][k] == pytest.approx(probability_C[0], abs=1e-5) == outputs["ok"][k]
        assert outputs["wrong"][k] == pytest.approx(probability_C[1:].sum(), abs=1e-5)
        engine = Engine(prm, 256, "types")
        try:
            (got,) = call(engine, post("/classify", {"input": ids}))
        finally:
            engine.close()
        (row,) = got.json()["data"]
        assert row["label"] == ["ok", "arithmetic", "logic"][int(probability_C.argmax())] and row["num_classes"] == 3
        assert row["probs"] == pytest.approx(probability_C.tolist(), abs=1e-5)


@pytest.mark.parametrize("labels", [["a", "b", "c"], ["correct", "valid", "wrong"], ["ok", "ok", "bad"]])
def test_labels_that_do_not_name_one_score_are_refused(tmp_path, labels):
    classifier(tmp_path, labels=labels)
    refused(ValueError, "labels|id2label", jprm.load, tmp_path)


def made_up(seed, count=60):
    """Chains with two outputs, of which `a` is calibrated and `b` says nothing."""
    rng = np.random.default_rng(seed)
    trees = []
    for i in range(count):
        p, q = rng.uniform(size=4).tolist(), rng.uniform(size=4).tolist()
        classes: list = [["a"] * bool(rng.uniform() < x) + ["b"] * bool(rng.uniform() < 0.3) for x in p]
        classes[3] = None
        record = {"problem": f"p{i}", "steps": list("wxyz"), "scores": p, "outputs": {"a": p, "b": q}}
        trees.append(tree_of(record | {"classes": classes}))
    return trees


def test_figures_of_classes():
    report = figures(Request({"x": made_up(0, 200)}, {"y": made_up(1, 200)}))
    a, b = report["classes"]["a"], report["classes"]["b"]
    assert report["n_steps"] == 600 and a["n"] > 200
    assert a["auroc"]["low"] > 0.75 and b["auroc"]["low"] < 0.5 < b["auroc"]["high"]
    assert a["ece"] < a["ece_if_calibrated"] and b["ece"] > b["ece_if_calibrated"]
    assert b["threshold"] < 0.1 and b["f1_tuned"]["value"] > b["f1"]["value"]  # to say yes always is best for b


FORMS = (list, lambda names: {name: int(name in names) for name in "ab"}, lambda names: names[0] if names else [])
"""Ways to write a turn's classes: a list, an object, a single name."""


def turns_from(tree, form):
    """The chain as a trajectory: each step a turn with its classes beside it, and a question before it."""
    messages: list[dict] = []
    for node, names in zip(tree.nodes, tree.extra["classes"], strict=True):
        turn = {"role": "assistant", "content": node.text, "score": node.score, "outputs": dict(node.outputs)}
        turn |= {} if names is None else {"classes": form(names[:1])}
        messages += [{"role": "user", "content": "Go on."}, turn]
    return tree_of({"problem": tree.problem, "messages": messages})


@pytest.mark.parametrize("form", FORMS, ids=["list", "object", "name"])
def test_figures_of_classes_beside_turns_are_those_of_chains(form):
    chains = made_up(2)
    turns = [steps_only(tree_of(record_of(turns_from(tree, form)))) for tree in chains]  # as the command reads a file
    single = [
        dataclasses.replace(tree, extra={"classes": [names and names[:1] for names in tree.extra["classes"]]})
        for tree in chains
    ]
    assert figures(Request({"x": turns})) == figures(Request({"x": single}))


def test_the_threshold_has_the_largest_f1():
    rng = np.random.default_rng(3)
    for _ in range(20):
        value_N, positive_N = rng.integers(0, 6, 15) / 5, rng.uniform(size=15) < 0.4
        threshold = best_threshold(value_N, positive_N)
        if not positive_N.any():
            assert threshold is None
            continue
        scores = {}
        for t in np.unique(value_N):
            alarm_N = value_N >= t
            scores[t] = 2 * (alarm_N & positive_N).sum() / (alarm_N.sum() + positive_N.sum())
        assert scores[threshold] == pytest.approx(max(scores.values()))


@pytest.mark.parametrize("classes", [None, ["a"], ["c", "a", "a", "a"], [1, "a", "a", "a"]])
def test_wrong_classes_are_refused(classes):
    record = {"problem": "p", "steps": list("wxyz"), "scores": [0.5] * 4, "outputs": {"a": [0.5] * 4}}
    with pytest.raises(ScoreError, match="record 1"):
        figures(Request({"x": [tree_of(record | ({"classes": classes} if classes else {}))]}))
