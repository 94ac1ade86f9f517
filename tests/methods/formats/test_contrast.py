"""The contrast: a step's score is its log-probability under one language model less that under another."""

import dataclasses
import json

import jax
import numpy as np
import pytest
from published import CASES, PROBLEM, STEPS, bytes_tokenizer, make, pieces_tokenizer
from refusing import refused
from tiny_run import experiment

import jprm
from jprm.apps import cli
from jprm.checkpoints import base as bases
from jprm.methods.evidence import sources as evidence
from jprm.methods.formats.adapters.load import check_one_tokenizer
from jprm.methods.search.lockstep import live_scorer
from jprm.tokenizer import JsonTokenizer, prompt_layout
from jprm.tree import tree_of

LARGE = dataclasses.replace(CASES["math-psa"], lora=False, name="large")
SAMPLES = [STEPS, [*STEPS[:1], "So 30."]]

pytestmark = pytest.mark.usefixtures("rows_of_512")


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("contrast")
    large, model = make(folder, LARGE)
    small, other = make(folder, dataclasses.replace(LARGE, name="small"), seed="other")
    return large, small, model, other


def expected(prm, model, other, steps):
    """The sum of log ratios up to each step's end, by the models in torch."""
    ids, ends = list(prm.layout.problem(PROBLEM)), []
    start = len(ids)
    for number, step in enumerate(steps, start=1):
        ids += prm.layout.step(step, number)
        ends.append(len(ids))

    def log_probs(reference):
        with reference.torch.no_grad():
            logits = reference.model(reference.torch.tensor([ids])).logits[0]
        return logits.log_softmax(-1)[range(len(ids) - 1), ids[1:]].numpy()

    ratio = log_probs(model) - log_probs(other)
    return [ratio[start - 1 : end - 1].sum() for end in ends]


def test_a_contrast_is_the_log_ratio_of_two_models_with_prefixes_shared(models, tmp_path):
    large, small, model, other = models
    pool = tmp_path / "pool.jsonl"
    pool.write_text(json.dumps({"problem": PROBLEM, "samples": [{"steps": steps} for steps in SAMPLES]}) + "\n")
    command = ["score", "--model", str(large), "--reference", str(small), "--input", str(pool)]
    assert cli.main([*command, "--output", str(tmp_path / "scored.jsonl")]) == 0
    (scored,) = map(json.loads, (tmp_path / "scored.jsonl").read_text().splitlines())
    prm = jprm.load(large, reference=str(small))
    assert (prm.semantics, prm.rule, prm.scale.weight) == ("implicit", "last", "sigmoid")
    for sample, steps in zip(scored["samples"], SAMPLES, strict=True):
        np.testing.assert_allclose(sample["scores"], expected(prm, model, other, steps), atol=1e-4, rtol=0)
    assert np.abs(scored["samples"][0]["scores"]).min() > 0.01
    info = json.loads((tmp_path / "scored.jsonl.info.json").read_text())
    assert info["scale"]["weight"] == "sigmoid"  # evaluations read the scores as log odds


def test_a_folder_with_a_record_is_the_same_scorer_for_commands_that_take_one_name(models, tmp_path):
    large, small, *_ = models
    record = {"like": "contrast", "base": str(large), "reference": str(small)}
    (tmp_path / "adapter.json").write_text(json.dumps(record))
    both = jprm.load(tmp_path), jprm.load(large, reference=str(small))
    assert str(both[0].layout) == str(both[1].layout)
    assert jax.tree.all(jax.tree.map(np.array_equal, *((prm.params, prm.ratio.params) for prm in both)))
    written = record | {"problem": "<|im_start|>user\n{problem}<|im_end|>\n<|im_start|>assistant\n"}
    (tmp_path / "adapter.json").write_text(json.dumps(written))
    ids = jprm.load(tmp_path).layout.problem("p")
    assert ids[0] == both[0].layout.tokenizer.token_id("<|im_start|>")  # a control token, and not its characters


def test_two_models_must_share_a_tokenizer(models):
    (one, _), (other, _) = bytes_tokenizer(), pieces_tokenizer()
    one, other = JsonTokenizer(one), JsonTokenizer(other)
    check_one_tokenizer(one, one, one.vocab_size, "large", "small")
    check_one_tokenizer(one, JsonTokenizer(one.inner, eos=one.vocab_size), 10_000, "chat", "base")
    refused(ValueError, "large and small have different", check_one_tokenizer, one, other, 10_000, "large", "small")
    refused(ValueError, "different tokenizers", check_one_tokenizer, one, one, 10, "large", "a small embedding")
    large, *_ = models
    refused(ValueError, "--reference has no use", jprm.load, large, adapter="trl", reference=str(large))
    refused(FileNotFoundError, "absent", jprm.load, large, reference=str(large / "absent"))


def test_a_model_with_a_head_for_scores_is_no_language_model(models, tmp_path, monkeypatch):
    large, *_ = models
    prm, _ = make(tmp_path, dataclasses.replace(CASES["qwen-prm"], name="prm"))
    value, _ = make(tmp_path, dataclasses.replace(CASES["skywork"], name="value"))
    for head in (prm, value):
        refused(ValueError, f"{head.name}: its head is (score|v_head)", jprm.load, head, reference=str(large))
        refused(ValueError, f"{head.name}: its head is", jprm.load, large, reference=str(head))
    (tmp_path / "run").mkdir()
    (tmp_path / "run/experiment.json").write_text("{}")
    monkeypatch.setattr(bases, "read", lambda place: experiment(tmp_path))  # its embedding may be tied
    refused(ValueError, "run: its head is 'binary'", bases.check_language_model, tmp_path / "run")
    written = {"like": "contrast", "base": str(large)}
    (tmp_path / "adapter.json").write_text(json.dumps(written))
    refused(ValueError, '"like": "contrast", "reference"', jprm.load, tmp_path)


def test_a_contrast_reads_the_tokens_that_a_policy_with_the_same_prompt_writes(models, tmp_path):
    large, small, *_ = models
    prompt = "<|im_start|>user\n{problem}\nThink.<|im_end|>\n<|im_start|>assistant\n"
    (tmp_path / "written.json").write_text(json.dumps({"like": "contrast", "problem": prompt}))
    layout = jprm.load(large, adapter=str(tmp_path / "written.json"), reference=str(small)).layout
    sampled = prompt_layout(layout.tokenizer, prompt, "\n")
    assert layout.problem(PROBLEM) == sampled.problem(PROBLEM)
    assert [layout.step(s, 1) for s in STEPS] == [sampled.step(s, 1) for s in STEPS]


def test_a_contrast_scores_chains_while_a_search_grows_them_and_is_a_source_of_evidence(models, tmp_path):
    large, small, *_ = models
    prm = jprm.load(large, reference=str(small))
    live = live_scorer(prm)
    (root,) = live.open([PROBLEM])
    (handle,), first_P = live.extend([root], [STEPS[0]])
    _, second_P = live.extend([handle], [STEPS[1]])
    wanted = prm.score(PROBLEM, STEPS[:2])
    np.testing.assert_allclose([first_P[0], second_P[0]], wanted, atol=1e-4, rtol=0)
    (tmp_path / "adapter.json").write_text(
        json.dumps({"like": "contrast", "base": str(large), "reference": str(small)})
    )
    source = evidence.find(f"prm={tmp_path}")
    (x_NF,) = source.read([tree_of({"problem": PROBLEM, "steps": STEPS[:2]})])
    column = source.numbers.index("last_log_odds")
    np.testing.assert_allclose(x_NF[:, column], wanted, atol=1e-4, rtol=0)  # the log ratio itself, which no clip cuts
