"""Published PRMs: recognised from their files, and scored as their authors' own code scores them."""

import dataclasses
import json

import jax
import numpy as np
import pytest
from families import breadth
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from published import (
    CASES,
    LLAMA_CHAT,
    PROBLEM,
    QWEN_CHAT,
    STEPS,
    bytes_tokenizer,
    chat,
    eurus_ids,
    make,
    pieces_tokenizer,
    plant,
    tokenizer_of,
)
from refusing import refused

import jprm
from experiments.studies.cost import parameters
from jprm.apps import cli
from jprm.methods.decoding.cache import LiveTrees
from jprm.methods.evaluate.run import as_in
from jprm.methods.formats.adapters import load as loading
from jprm.methods.formats.adapters import published as publications
from jprm.methods.formats.adapters import record
from jprm.methods.formats.adapters.load import layout_of, token_ids
from jprm.methods.formats.adapters.published import PUBLISHED, SIGNS
from jprm.methods.formats.chat_template import render
from jprm.methods.layers.head_init import _scores_steps, kept_head
from jprm.model.heads import HEADS
from jprm.model.mesh import MeshConfig, make_mesh
from jprm.score import scorer
from jprm.tokenizer import JsonTokenizer, native_layout

CLOSE = 1e-4
"""Two layers of float32 sums in another order, on logits of a few units."""


FEW = ("qwen-prm", "rlhflow", "trl", "skywork", "reasoneval-redundancy", "jprm")


@pytest.fixture(scope="module", autouse=True)
def small():
    """One device where no mesh is asked for, and rows of one length: few programs are compiled."""

    def mesh(config, devices):
        return make_mesh(config, jax.devices()[: max(1, config.data * config.fsdp * config.tensor)])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loading, "make_mesh", mesh)
        patch.setattr(scorer, "SHORTEST", 512)
        yield


@pytest.fixture(scope="module", params=breadth(CASES, but=FEW))
def published(request, tmp_path_factory):
    """(case, folder, reference, PRM) of a published model."""
    case = CASES[request.param]
    folder, reference = make(tmp_path_factory.mktemp("published"), case)
    prm = jprm.load(folder, adapter=case.adapter or None)
    assert prm.name == f"{folder.resolve()} ({request.param} {PUBLISHED[request.param].digest})"
    return case, folder, reference, prm


def logit(scores, reading):
    """The scores as log-odds: what differs by as little as the logits do, wherever no probability is near 0 or 1."""
    if reading.activation == "none":
        return scores
    low, high = min(0.0, *reading.factors), max(reading.factors)
    p = (scores.astype(np.float64) - low) / (high - low)
    assert ((0.003 < p) & (p < 0.997)).all(), "a seventh digit would be seen in the log-odds"
    return np.log(p / (1 - p))


def ids_of(prm, steps=STEPS, problem=PROBLEM):
    ids, ends = prm.layout.problem(problem), []
    for number, step in enumerate(steps):
        ids = ids + prm.layout.step(step, number)
        ends.append(len(ids) - 1)
    return ids, ends


def test_ids_positions_logits_and_scores_are_those_of_the_reference(published):
    case, _, reference, prm = published
    wanted, ends = case.ids(tokenizer_of(reference.folder), PROBLEM, STEPS)
    ids, stops = ids_of(prm)
    assert stops == ends and ids == wanted[: ends[-1] + 1]
    expected = case.score(reference.logits(wanted)[ends])
    scores = prm.score(PROBLEM, STEPS)
    np.testing.assert_allclose(logit(scores, prm.readout.score), logit(expected, prm.readout.score), atol=CLOSE, rtol=0)
    assert np.ptp(expected) > 100 * CLOSE  # else another position would pass too
    for k in range(1, len(STEPS)):
        np.testing.assert_allclose(prm.score(PROBLEM, STEPS[:k]), scores[:k], atol=1e-6, rtol=0)


@pytest.mark.parametrize(
    ("name", "template", "end"),
    [
        ("qwen-prm", QWEN_CHAT, "<|im_end|>"),
        ("eurus", QWEN_CHAT, "<|im_end|>"),
        ("rlhflow", LLAMA_CHAT.replace("2024\n\n<|", "2024\n\n{{ messages[0].content }}<|").replace(
            "in messages %}", "in messages[1:] %}"), "<|eot_id|>"),
    ],
)  # fmt: skip
def test_a_system_message_stands_where_the_chat_template_has_it(name, template, end):
    model_tokenizer, a = tokenizer(bytes_tokenizer), PUBLISHED[name]
    layout = layout_of(a, model_tokenizer, token_ids(a, model_tokenizer, 400, "here"))
    talk = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": PROBLEM}]
    talk.append({"role": "assistant", "content": "Yes."})
    ids = layout.problem(PROBLEM, "Be brief.")
    assert model_tokenizer.encode_control(render(template, talk, {}), special=False)[: len(ids)] == ids
    assert ids.count(layout.ids[end]) == layout.problem(PROBLEM, f"Be {end} brief.").count(layout.ids[end])  # is text


def test_rlhflow_joins_as_each_benchmarks_script_does(tmp_path):
    """ProcessBench's script joins problem and first step by an empty line, PRMBench's by a space."""
    folder, _ = make(tmp_path, CASES["rlhflow"])
    prm, tokenizer = jprm.load(folder), tokenizer_of(folder)
    for reader, between in (("processbench", "\n\n"), ("prmbench", " "), ("pools", " ")):
        problem = f"{PROBLEM} Say it."  # whose end is one token with the empty line
        wanted = chat(tokenizer, LLAMA_CHAT, f"{problem}{between}{STEPS[0]}", "+", STEPS[1], "+", STEPS[2], "+")
        ids, ends = ids_of(as_in(reader, prm), problem=problem)
        assert ids == wanted[: ends[-1] + 1] and ends[-1] == len(wanted) - 3


def test_company_and_shared_prefixes_make_no_difference(published):
    *_, prm = published
    other = {"problem": "1 + 1?", "steps": ["It is 2.", "Done"]}
    pool = {"problem": PROBLEM, "samples": [{"steps": STEPS}, {"steps": [*STEPS[:2], "So 30."]}, {"steps": STEPS[:1]}]}
    first, second = prm.score_many([other, pool])
    np.testing.assert_allclose(first["scores"], prm.score("1 + 1?", other["steps"]), atol=1e-6, rtol=0)
    for sample in second["samples"]:
        np.testing.assert_allclose(sample["scores"], prm.score(PROBLEM, sample["steps"]), atol=1e-6, rtol=0)


@pytest.mark.parametrize("name", ["qwen-prm", "rlhflow"])
def test_trees_that_grow_are_read_the_same_way(tmp_path, name):
    folder, _ = make(tmp_path, CASES[name])
    prm = jprm.load(folder)
    trees, scores = LiveTrees(prm), []
    (handle,) = trees.open([PROBLEM])
    for step in STEPS:
        (handle,), score_P = trees.extend([handle], [step])
        scores += score_P.tolist()
    np.testing.assert_allclose(scores, prm.score(PROBLEM, STEPS), atol=1e-5, rtol=0)
    refused(ValueError, "longest chain", trees.extend, [handle], ["7 " * prm.context])


def test_bad_chains_are_refused_before_anything_runs(published, monkeypatch):
    *_, prm = published

    def never(*args):
        raise AssertionError("the device was asked")

    monkeypatch.setattr(scorer, "readout_of_rows", never)
    refused(ValueError, r"steps\[1\]", prm.score, PROBLEM, [STEPS[0], " "])
    refused(ValueError, "longest chain", prm.score, PROBLEM, ["7 " * prm.context])


def test_the_channel_of_right_is_the_right_one(published):
    """A head is planted that calls the first step right and the second wrong, by a margin that no float32 survives."""
    case, folder, reference, prm = published
    ids, ends = ids_of(prm)
    x_PD = reference.states(ids)[ends[:2]]
    w_D = np.linalg.lstsq(x_PD, np.array([200.0, -200.0]), rcond=None)[0]
    plant(reference, w_D)
    scores = jprm.load(folder, adapter=case.adapter or None).score(PROBLEM, STEPS)
    assert len(scores) == len(STEPS)  # and a probability of exactly 0 or 1 keeps its step
    factors = prm.readout.score.factors
    if prm.readout.score.activation == "none":
        np.testing.assert_allclose(scores[:2], (200, -200), rtol=1e-3)
        return
    assert scores[0] == sum(f for f, row in zip(factors, case.rows, strict=True) if row > 0) == 1
    assert scores[1] == sum(f for f, row in zip(factors, case.rows, strict=True) if row < 0)


def test_text_is_never_a_token(published):
    """What a problem or a step says names no control token."""
    *_, prm = published
    control = [i for name, i in prm.layout.ids.items() if name[0] in "<["]
    plain, odd = (ids_of(prm, [step], PROBLEM + step)[0] for step in ("x", "".join(prm.layout.ids)))
    assert [i for i in odd if i in control] == [i for i in plain if i in control]


MESH = MeshConfig(1, 2, 2)
IMPLICIT = dataclasses.replace(CASES["math-psa"], lora=False, name="EurusPRM")


def test_an_implicit_prm_is_the_log_ratio_of_two_models_along_the_chain(tmp_path):
    folder, model = make(tmp_path, IMPLICIT)
    refused(ValueError, "adapter.json", jprm.load, folder)
    _, other = make(tmp_path, dataclasses.replace(IMPLICIT, name="other"), seed="other")
    (folder / "adapter.json").write_text(json.dumps({"like": "eurus", "reference": "../other", "scale": 0.05}))
    prm = jprm.load(folder)
    ids, ends = ids_of(prm)
    wanted, at = eurus_ids(tokenizer_of(folder), PROBLEM, STEPS)
    assert (ids, ends) == (wanted[: at[-1] + 1], at)

    def log_probs(reference):
        torch = reference.torch
        with torch.no_grad():
            return reference.model(torch.tensor([ids])).logits[0].log_softmax(-1)[range(len(ids) - 1), ids[1:]].numpy()

    ratio = 0.05 * (log_probs(model) - log_probs(other))  # of the token behind each index
    start = len(prm.layout.problem(PROBLEM))
    expected = [ratio[start - 1 : end].sum() for end in ends]
    both = [{k: v for k, v in p["decoder"].items() if k != "embed"} for p in (prm.params, prm.ratio.params)]
    heads = [p.get("head") or p["decoder"]["embed"] for p in (prm.params, prm.ratio.params)]
    assert parameters(prm) == sum(x.size for x in jax.tree.leaves([both, heads]))
    assert parameters(prm) == 2 * parameters(dataclasses.replace(prm, ratio=None))
    scores = prm.score(PROBLEM, STEPS)
    np.testing.assert_allclose(scores, expected, atol=CLOSE, rtol=0)
    assert np.abs(expected).min() > 100 * CLOSE
    pool = {"problem": PROBLEM, "samples": [{"steps": STEPS[:1]}, {"steps": [*STEPS[:1], "So 30."]}, {"steps": STEPS}]}
    (scored,) = prm.score_many([pool])
    for sample in scored["samples"]:
        np.testing.assert_allclose(sample["scores"], prm.score(PROBLEM, sample["steps"]), atol=1e-5, rtol=0)
    np.testing.assert_allclose(scored["samples"][0]["scores"], scores[:1], atol=1e-5, rtol=0)
    np.testing.assert_allclose(jprm.load(folder, MESH).score(PROBLEM, STEPS), scores, atol=CLOSE, rtol=0)


def test_a_head_of_two_layers_on_a_mesh_and_in_int8(tmp_path):
    folder, _ = make(tmp_path, CASES["qwen-prm"])
    single, many = (jprm.load(folder, mesh).score(PROBLEM, STEPS) for mesh in (None, MESH))
    np.testing.assert_allclose(many, single, atol=1e-6, rtol=0)
    small = jprm.load(folder, dtype="int8").score(PROBLEM, STEPS)
    assert 0 < np.abs(small - single).max() < 0.05


def tokenizer(kind):
    inner, names = kind()
    return JsonTokenizer(inner, names["bos_token"] and inner.token_to_id(names["bos_token"]))


def test_tokens_that_are_absent_split_or_have_other_ids_are_refused():
    refused(ValueError, "<.im_start.>", token_ids, PUBLISHED["qwen-prm"], tokenizer(pieces_tokenizer), 400, "here")
    refused(ValueError, "ки", token_ids, PUBLISHED["math-shepherd"], tokenizer(bytes_tokenizer), 400, "here")
    psa = dataclasses.replace(PUBLISHED["math-psa"], vocabulary=(400,))
    refused(ValueError, "259.*76325", token_ids, psa, tokenizer(bytes_tokenizer), 400, "here")
    assert token_ids(PUBLISHED["math-psa"], tokenizer(bytes_tokenizer), 400, "here")[" +"] != 488
    refused(ValueError, "259.*200", token_ids, psa, tokenizer(bytes_tokenizer), 200, "here")


def test_a_label_that_a_step_has_already_is_not_written_twice():
    for name, kind in (("math-shepherd", pieces_tokenizer), ("math-psa", bytes_tokenizer), ("pqm", pieces_tokenizer)):
        a, model_tokenizer = PUBLISHED[name], tokenizer(kind)
        layout = layout_of(a, model_tokenizer, token_ids(a, model_tokenizer, 400, "here"))
        for number in range(3):
            labelled = layout.step(f"Step {number + 1}: 7 eggs.", number)
            assert labelled == layout.step("7 eggs.", number) != layout.step(f"Step {number + 2}: 7 eggs.", number)


def test_every_record_is_json(tmp_path):
    for name, a in PUBLISHED.items():
        (tmp_path / "a.json").write_text(json.dumps(record.to_json(a)))
        assert publications.read(tmp_path / "a.json") == a == dataclasses.replace(a)
        assert name == a.name
    assert len({a.digest for a in PUBLISHED.values()}) == len(PUBLISHED)


def test_what_jprm_exports_is_read_as_jprm_lays_it_out():
    for name, head in (("jprm", "binary"), ("jprm-ternary", "ternary")):
        labels = HEADS[head].channels
        assert PUBLISHED[name].channels == labels and set(PUBLISHED[name].score) == set(labels[1:])
        assert dict((sign.labels, other) for other, sign in SIGNS if sign.labels)[labels] == name
    model_tokenizer = tokenizer(pieces_tokenizer)
    native, layout = native_layout(model_tokenizer), layout_of(PUBLISHED["jprm"], model_tokenizer, {})
    assert native.problem(PROBLEM) == layout.problem(PROBLEM)
    assert [native.step(step, i) for i, step in enumerate(STEPS)] == [layout.step(s, i) for i, s in enumerate(STEPS)]


MINE = {
    "name": "mine",
    "problem": "<|im_start|>user\n{problem}<|im_end|>\n<|im_start|>assistant\n",
    "step": "{step}<extra_0>",
    "tokens": {"<|im_start|>": None, "<|im_end|>": None, "<extra_0>": 151651},
    "channels": ["wrong", "right"],
    "score": {"right": 1},
}


def test_a_record_of_ones_own(tmp_path):
    """Separators of any number of tokens, by ten lines of JSON in the folder or beside it."""
    folder, reference = make(tmp_path, CASES["trl"])
    (folder / "adapter.json").write_text(json.dumps({"like": "trl", "step": ["{step}", "\n\n\n"]}))
    prm = jprm.load(folder)
    ids, ends = ids_of(prm)
    assert "(model " in prm.name and (prm.semantics, prm.aggregation) == ("correctness", "prod")
    assert len(prm.layout.tokenizer.encode("\n\n\n")) == 2
    expected = CASES["trl"].score(reference.logits(ids)[ends])
    np.testing.assert_allclose(prm.score(PROBLEM, STEPS), expected, atol=CLOSE, rtol=0)
    (tmp_path / "mine.json").write_text(json.dumps(MINE))
    mine = jprm.load(folder, adapter=str(tmp_path / "mine.json"))
    control = {"<extra_0>": mine.layout.ids["<extra_0>"], "<|im_end|>": mine.layout.ids["<|im_end|>"]}
    assert mine.layout.step("x", 0)[-1] == control["<extra_0>"] and control["<|im_end|>"] in mine.layout.problem("p")


ODD = st.none() | st.booleans() | st.integers() | st.text(max_size=4) | st.lists(st.text(max_size=3), max_size=2)


@settings(
    max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
@given(st.dictionaries(st.sampled_from([*MINE, "like", "scale", "context", "first", "vocabulary"]), ODD))
def test_no_record_does_more_than_be_refused(tmp_path, changes):
    (tmp_path / "adapter.json").write_text(json.dumps(MINE | changes))
    try:
        assert publications.read(tmp_path / "adapter.json").digest
    except ValueError as error:
        assert str(error).startswith(f"{tmp_path / 'adapter.json'}: ")


def test_a_family_that_jprm_does_not_read_is_named(tmp_path, monkeypatch):
    from safetensors.numpy import save_file

    monkeypatch.setattr(publications, "load_tokenizer", lambda folder: None)
    save_file({"v_head.weight": np.zeros((1, 2), np.float32)}, tmp_path / "model.safetensors")
    for family, architecture, said in (
        ("internlm2", "InternLM2ForRewardModel", "model_type 'internlm2' is not supported"),
        ("llama", "LlamaForRewardModel", "LlamaForRewardModel with these tensors is no PRM.*--adapter NAME"),
    ):
        (tmp_path / "config.json").write_text(json.dumps({"model_type": family, "architectures": [architecture]}))
        refused(ValueError, said, publications.recognise, tmp_path)


@pytest.mark.parametrize("labels", [["O", "B-PER"], ["right", "wrong"], ["O", "B-PER", "I-PER"], ["wrong"]])
def test_a_token_classifier_of_other_labels_is_no_prm(tmp_path, labels):
    folder, _ = make(tmp_path, CASES["trl"])
    fields = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(fields | {"id2label": dict(enumerate(labels))}))
    refused(ValueError, f"{', '.join(labels)}", jprm.load, folder)
    if len(labels) == 2:
        jprm.load(folder, adapter="trl")  # at the user's word
    for names in (["LABEL_0", "LABEL_1"], ["negative", "positive"], ["-", "+"]):
        (folder / "config.json").write_text(json.dumps(fields | {"id2label": dict(enumerate(names))}))
        assert publications.recognise(folder).name == "trl"


def test_an_adapter_has_any_number_of_channels(tmp_path):
    from safetensors.numpy import load_file, save_file

    folder, reference = make(tmp_path, CASES["trl"])
    rng, path = np.random.default_rng(0), folder / "model.safetensors"
    tensors = load_file(path)
    head = {name: tensors[name] for name in CASES["trl"].head if name in tensors}
    save_file(tensors | {name: rng.normal(size=(4, *x.shape[1:])).astype(x.dtype) for name, x in head.items()}, path)
    changes = {"channels": ["a", "b", "c", "d"], "score": {"b": 0.5, "d": 1.0}}
    (folder / "adapter.json").write_text(json.dumps({"like": "trl"} | changes))
    prm = jprm.load(folder)
    ids, ends = ids_of(prm)
    power_T4 = np.exp(reference.logits(ids)[ends])
    expected = (0.5 * power_T4[:, 1] + power_T4[:, 3]) / power_T4.sum(-1)
    np.testing.assert_allclose(prm.score(PROBLEM, STEPS), expected, atol=CLOSE, rtol=0)


def test_folders_that_show_no_sign_are_refused(tmp_path):
    folder, _ = make(tmp_path, dataclasses.replace(CASES["rlhflow"], name="llama"))
    refused(ValueError, "LlamaForCausalLM", jprm.load, folder)
    refused(ValueError, "adapter='other'", jprm.load, folder, adapter="other")
    refused(ValueError, "score.weight", jprm.load, folder, adapter="trl")
    refused(FileNotFoundError, "experiment.json", jprm.load, tmp_path)
    assert jprm.load(folder, adapter="rlhflow").name.endswith(f"(rlhflow {PUBLISHED['rlhflow'].digest})")


def test_reasoneval_gives_redundancy_beside_validity(tmp_path):
    folder, _ = make(tmp_path, CASES["reasoneval"])
    prm, redundancy = jprm.load(folder), jprm.load(folder, adapter="reasoneval-redundancy")
    assert prm.output_names == ("score", "redundancy") and redundancy.output_names == ("score",)
    assert (prm.scale.redundancy, redundancy.scale.redundancy) == (0.15, None)
    [record] = prm.score_many([{"problem": PROBLEM, "steps": STEPS}])
    np.testing.assert_allclose(record["outputs"]["redundancy"], redundancy.score(PROBLEM, STEPS), rtol=1e-6)


def test_commands_take_an_adapter(tmp_path, capsys):
    folder, _ = make(tmp_path, CASES["reasoneval"])
    pool = {"problem": PROBLEM, "samples": [{"steps": STEPS, "correct": True, "answer": "31"},
                                            {"steps": STEPS[:1], "correct": False, "answer": "36"}]}  # fmt: skip
    (tmp_path / "in.jsonl").write_text(json.dumps(pool) + "\n")
    scored = tmp_path / "out.jsonl"
    model = ["--model", str(folder), "--adapter", "reasoneval-redundancy"]
    files = ["--input", str(tmp_path / "in.jsonl"), "--output", str(scored)]
    assert cli.main(["score", *model, *files]) == 0
    scores = json.loads(scored.read_text())["samples"][0]["scores"]
    alone = jprm.load(folder, adapter="reasoneval-redundancy").score(PROBLEM, STEPS)
    np.testing.assert_allclose(scores, alone, rtol=1e-6)  # float32
    assert cli.main(["score", "--model", str(folder), *files]) == 2  # scores under another adapter are not these
    assert "model" in capsys.readouterr().err
    report = ["--json", str(tmp_path / "report.json")]
    assert cli.main(["eval", "best-of-n", *model, *files[:2], *report]) == 0
    assert cli.main(["eval", "best-of-n", *model[:2], "--adapter", "none", *files[:2], *report]) == 2
    assert "adapter='none'" in capsys.readouterr().err


def test_a_base_whose_verdicts_are_tokens_is_known_as_a_prm(tmp_path, capsys):
    """Training says that its verdicts are not used; a language model of the same files has none."""
    verdicts, _ = make(tmp_path / "a", CASES["rlhflow"])
    language, _ = make(tmp_path / "b", dataclasses.replace(CASES["rlhflow"], name="llama"))
    for folder, said in ((verdicts, f"the head of {verdicts} is not used"), (language, "")):
        assert kept_head(folder, None) == {}
        assert said in capsys.readouterr().out and bool(said) == _scores_steps(folder)
