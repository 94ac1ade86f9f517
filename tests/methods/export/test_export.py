"""Export for transformers: equal logits there, equal bits when read again."""

import dataclasses
import hashlib
import json
import os

import jax
import numpy as np
import pytest
import tiny_run as tiny
from families import breadth
from refusing import refused
from tiny import chain_ids, every_logit, params
from tiny_run import MODEL

import jprm
from jprm.apps import cli
from jprm.checkpoints.safetensors import Tensors
from jprm.experiment import to_json
from jprm.io.storage import only_run
from jprm.methods.export import export as exporting
from jprm.methods.export.export import export
from jprm.methods.formats import gguf, writing
from jprm.methods.formats.chat_template import prompt_of
from jprm.methods.formats.huggingface import load_decoder, model_config
from jprm.model.config import ExpertsConfig, RopeScaling
from jprm.model.heads import HEADS
from jprm.model.mesh import make_mesh
from jprm.model.parameters import LoraConfig
from jprm.score.scorer import PRM
from jprm.tokenizer import load_tokenizer, native_layout
from jprm.tree import tree_of

MIXTURE = dict(qkv_bias=False, qk_norm=False, mlps=("experts",), attention="reference", mlp_width=8,
               experts=ExpertsConfig(4, 2, 8))  # fmt: skip
GPT_OSS = MIXTURE | dict(
    qkv_bias=True, out_bias=True, mixers=("sinks",), experts=ExpertsConfig(4, 2, 8, clamp=0.7), windows=(3, 0),
    rope_scaling=RopeScaling("yarn", 4.0, 16, 1.0, 4.0, 1.2, truncate=False),
)  # fmt: skip
KINDS = {
    "llama": dict(qkv_bias=False, qk_norm=False),
    "llama3": dict(qkv_bias=False, qk_norm=False, rope_scaling=RopeScaling("llama3", 8.0, 16, 1.0, 4.0)),
    "qwen2": dict(qk_norm=False, layer_groups=(1, 1)),
    "qwen2-yarn": dict(qk_norm=False, rope_scaling=RopeScaling("yarn", 4.0, 16, 1.0, 4.0, 1.2)),
    "qwen3": dict(qkv_bias=False, head_dim=8, rope_scaling=RopeScaling("linear", 2.0)),
    "mistral-window": dict(qkv_bias=False, qk_norm=False, windows=(3,)),
    "qwen2-window": dict(qk_norm=False, windows=(0, 3)),
    "gemma2": dict(qkv_bias=False, qk_norm=False, design="gemma", windows=(3, 0), query_pre_attn_scalar=7),
    "ternary": dict(qkv_bias=False, head="ternary"),
    "glm4": dict(qk_norm=False, design="glm", rotary_dim=2, layer_groups=(1, 1)),
    "phi4": dict(qkv_bias=False, qk_norm=False, rotary_dim=2, windows=(3,)),
    "mixtral": MIXTURE,
    "mixtral-window": MIXTURE | dict(windows=(3,), layer_groups=(1, 1)),
    "gpt_oss": GPT_OSS,
}
FEW = ("llama", "qwen2", "gemma2", "ternary", "gpt_oss")
POLICIES = {"olmo2": dict(qkv_bias=False, qk_norm=False, design="olmo", qk_width_norm=True), **{
    kind: KINDS[kind] for kind in ("glm4", "phi4", "mixtral", "gpt_oss")}}  # fmt: skip
IDS = np.random.default_rng(0).integers(0, MODEL.vocab_size, 24).tolist()
CHAIN = {"problem": "What is 3 + 4?", "steps": ["3 + 4 = 7", "So 7.", "It is 8."]}


def untrained(folder, kind="llama"):
    """A PRM of random parameters, none of them zero, with the experiment that a run would have written."""
    model = dataclasses.replace(MODEL, **KINDS[kind])
    experiment = tiny.experiment(tiny.make_data(folder), model=model)
    (folder / "experiment.json").write_text(json.dumps(to_json(experiment)))
    layout = native_layout(load_tokenizer(folder / "tokenizer.json"))
    return PRM(params(model), model, layout, make_mesh(devices=jax.devices()[:1]), "rating", str(folder), 3)


def ids_of(prm):
    return chain_ids(tree_of(CHAIN), len(CHAIN["steps"]) - 1, prm.layout)


def in_transformers(folder, ids):
    """Logits of every token, by the class that the folder itself names."""
    torch = pytest.importorskip("torch", reason="the extra 'parity' is not installed")
    transformers = pytest.importorskip("transformers", reason="the extra 'parity' is not installed")
    model, report = transformers.AutoModelForTokenClassification.from_pretrained(folder, output_loading_info=True)
    assert not any(report.values()), "a tensor is missing, left over or of another shape"
    with torch.no_grad():
        return model.eval()(torch.tensor([ids])).logits[0].numpy(), model.config


@pytest.mark.parametrize("kind", breadth(KINDS, but=FEW))
def test_transformers_computes_the_same_logits(tmp_path, kind):
    prm = untrained(tmp_path / "run", kind)
    folder, ids = export(prm, tmp_path / "out"), ids_of(prm)
    actual, config = in_transformers(folder, ids)
    wanted = every_logit(prm.params, prm.config, ids)
    np.testing.assert_allclose(actual, wanted, atol=1e-5, rtol=1e-5)  # float32 sums of 32 terms in another order
    assert np.abs(wanted).max() > 0.1
    assert tuple(config.id2label.values()) == HEADS[prm.config.head].channels


@pytest.mark.parametrize("kind", breadth(KINDS, but=FEW))
def test_what_is_exported_reads_back_bit_for_bit(tmp_path, kind):
    prm = untrained(tmp_path / "run", kind)
    single = export(prm, tmp_path / "one")
    many = export(prm, tmp_path / "many", shard_bytes=8_000)
    sizes = sorted(file.stat().st_size for file in many.glob("*.safetensors"))
    assert len(sizes) > 3 and not (many / "model.safetensors").exists()
    assert max(sizes[:-1]) < 8_000 + 2_000 < prm.params["decoder"]["embed"].nbytes < sizes[-1]  # with headers
    for folder in (single, many):
        config = model_config(folder, layer_groups=prm.config.layer_groups, head=prm.config.head, remat="nothing",
                              attention=prm.config.attention, attention_block=32)  # fmt: skip
        assert config == dataclasses.replace(prm.config, tied_embeddings=False)
        assert tiny.equal(load_decoder(folder, config), prm.params["decoder"])
        file = Tensors(folder)
        head = {"kernel": file.tensor("score.weight").T, "bias": file.tensor("score.bias")}
        assert tiny.equal(head, prm.params["head"])


@pytest.mark.parametrize("kind", POLICIES)
def test_a_policy_has_the_same_logits_in_transformers(tmp_path, kind):
    """Written by the family's record, and read back bit for bit."""
    torch = pytest.importorskip("torch", reason="the extra 'parity' is not installed")
    transformers = pytest.importorskip("transformers", reason="the extra 'parity' is not installed")
    config = dataclasses.replace(MODEL, **POLICIES[kind], head="language", tied_embeddings=False)
    values, tokenizer = params(config), load_tokenizer(tiny.make_data(tmp_path) / "tokenizer.json")
    (folder := tmp_path / "out").mkdir()
    writing.causal_lm(folder, values, config, tokenizer, 64, "float32", 8_000)
    model, report = transformers.AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(report.values())
    with torch.no_grad():
        actual = model.eval()(torch.tensor([IDS])).logits[0].numpy()
    wanted = every_logit(values, config, IDS)
    np.testing.assert_allclose(actual, wanted, atol=1e-5, rtol=1e-5)
    assert tiny.equal(load_decoder(folder, config), values["decoder"])


@pytest.mark.parametrize(
    "changes", [dict(windows=(3, 2)), dict(mixers=()), dict(out_bias=False), dict(mlps=()), dict(mlp_width=32),
                dict(rotary_dim=2), dict(qk_norm=True), dict(experts=ExpertsConfig(4, 2, 8, shared_width=8, clamp=0.7)),
                dict(design="glm"), dict(logit_softcap=2.0)],
)  # fmt: skip
def test_a_model_that_no_record_reads_back_is_refused(tmp_path, changes):
    config = dataclasses.replace(MODEL, **GPT_OSS | changes)
    tokenizer = load_tokenizer(tiny.make_data(tmp_path) / "tokenizer.json")
    refused(
        ValueError,
        "transformers|gpt-oss|layers of the kind",
        writing.decoder_json,
        "model",
        config,
        tokenizer,
        64,
        "float32",
    )


def test_bfloat16_is_the_rounded_model(tmp_path):
    prm = untrained(tmp_path / "run")
    folder = export(prm, tmp_path / "out", dtype="bfloat16")
    assert json.loads((folder / "config.json").read_text())["dtype"] == "bfloat16"
    rounded = jax.tree.map(lambda x: x.astype(jax.numpy.bfloat16).astype(np.float32), prm.params["decoder"])
    assert tiny.equal(load_decoder(folder, prm.config), rounded)


def test_the_folder_is_whole_and_says_what_it_is(tmp_path):
    prm = untrained(tmp_path / "run")
    folder = export(prm, tmp_path / "new" / "out")
    assert sorted(file.name for file in folder.iterdir()) == [
        "README.md", "SHA256SUMS", "adapter.json", "config.json", "export.json", "model.safetensors", "tokenizer.json",
        "tokenizer_config.json",
    ]  # fmt: skip
    sums = dict(reversed(line.split()) for line in (folder / "SHA256SUMS").read_text().splitlines())
    stored = {f.name: hashlib.sha256(f.read_bytes()).hexdigest() for f in folder.iterdir() if f.name != "SHA256SUMS"}
    assert sums == stored
    assert load_tokenizer(folder).encode("3 + 4") == prm.layout.tokenizer.encode("3 + 4")


def test_a_stopped_export_goes_on_and_nothing_is_half_written_or_replaced(tmp_path, monkeypatch):
    prm, out = untrained(tmp_path / "run"), tmp_path / "out"
    partial = tmp_path / "out.partial"
    partial.mkdir()
    (partial / "left").touch()
    with only_run(partial), pytest.raises(ValueError, match="out.partial.lock"):
        export(prm, out, shard_bytes=8_000)
    refused(ValueError, "out.partial", export, prm, out, shard_bytes=8_000)
    (partial / "left").unlink()

    saved, whole = [], writing.save

    def stop_at_the_third(path, arrays):
        if len(saved) == 2:
            path.with_name(path.name + ".partial").write_bytes(b"half")
            raise KeyboardInterrupt
        whole(path, arrays)
        saved.append(path.name)

    with monkeypatch.context() as patch:
        patch.setattr(writing, "save", stop_at_the_third)
        with pytest.raises(KeyboardInterrupt):
            export(prm, out, shard_bytes=8_000)
    assert not out.exists() and sorted(f.name for f in (partial / "new").glob("*.safetensors")) == saved

    def only_new(path, arrays):
        assert path.name not in saved
        whole(path, arrays)

    with monkeypatch.context() as patch:
        patch.setattr(writing, "save", only_new)
        export(prm, out, shard_bytes=8_000)
    export(prm, tmp_path / "straight", shard_bytes=8_000)
    assert contents(out) == contents(tmp_path / "straight")
    assert not partial.exists()

    # The same call again checks what is there; another one does not replace it.
    with monkeypatch.context() as patch:
        patch.setattr(writing, "save", None)
        assert export(prm, out, shard_bytes=8_000) == out
    refused(FileExistsError, "out", export, prm, out, dtype="bfloat16", shard_bytes=8_000)
    shard = out / saved[0]
    shard.write_bytes(shard.read_bytes()[:-1] + b"x")
    for check in (lambda: export(prm, out, shard_bytes=8_000), lambda: jprm.load(out)):
        refused(ValueError, f"{saved[0]}", check)
    shard.unlink()
    refused(ValueError, f"SHA256SUMS: '{saved[0]}'", export, prm, out, shard_bytes=8_000)


def contents(folder):
    return {file.name: file.read_bytes() for file in folder.iterdir()}


def test_a_linear_head_is_exact_in_qwens_two_layers():
    head = {"kernel": np.random.default_rng(0).normal(size=(16, 2)).astype(np.float32), "bias": np.float32([0.3, -2])}
    x = np.random.default_rng(1).normal(size=(100, 16)).astype(np.float32)
    two = {name: np.asarray(array, np.float64) for name, array in exporting.two_layers(head).items()}
    inner = np.maximum(x @ two["0.weight"].T + two["0.bias"], 0)
    wanted = x.astype(np.float64) @ head["kernel"] + head["bias"]
    np.testing.assert_allclose(inner @ two["2.weight"].T + two["2.bias"], wanted, rtol=1e-12)  # float64 sums
    assert two["0.weight"].shape == (16, 16) and two["2.weight"].shape == (2, 16)
    refused(ValueError, "4 .*3", exporting.two_layers, {"kernel": np.zeros((3, 2)), "bias": np.zeros(2)})


def test_qwens_own_format(tmp_path):
    """Its forward, written from its description: softmax of Linear, ReLU, Linear over transformers' Qwen2Model."""
    torch = pytest.importorskip("torch", reason="the extra 'parity' is not installed")
    transformers = pytest.importorskip("transformers", reason="the extra 'parity' is not installed")
    prm = untrained(tmp_path / "run", "qwen2")
    folder = export(prm, tmp_path / "out", format="qwen2-prm")
    fields = json.loads((folder / "config.json").read_text())
    assert fields["architectures"] == ["Qwen2ForProcessRewardModel"] and fields["model_type"] == "qwen2"
    assert "auto_map" not in fields  # there is no code in the folder
    assert fields["pooling_mode"] == "all" and (folder / "modules.json").is_file()  # as vLLM reads it
    assert tiny.equal(load_decoder(folder, prm.config), prm.params["decoder"])
    file, ids = Tensors(folder), ids_of(prm)
    score = {name: file.tensor(f"score.{name}") for name in ("0.weight", "0.bias", "2.weight", "2.bias")}
    with torch.no_grad():
        states = (
            transformers.Qwen2Model.from_pretrained(folder).eval()(torch.tensor([ids])).last_hidden_state[0].numpy()
        )
    inner = np.maximum(states @ score["0.weight"].T + score["0.bias"], 0)
    actual = inner @ score["2.weight"].T + score["2.bias"]
    wanted = every_logit(prm.params, prm.config, ids)
    np.testing.assert_allclose(actual, wanted, atol=1e-5, rtol=1e-5)  # float32 sums of 32 terms in another order

    hidden = {"hidden_kernel": np.full((16, 16), 0.5, np.float32), "hidden_bias": np.ones(16, np.float32)}
    deep = dataclasses.replace(prm, params=prm.params | {"head": prm.params["head"] | hidden})
    file = Tensors(export(deep, tmp_path / "deep", format="qwen2-prm"))
    np.testing.assert_array_equal(file.tensor("score.0.weight"), hidden["hidden_kernel"].T)
    np.testing.assert_array_equal(file.tensor("score.2.weight"), np.asarray(prm.params["head"]["kernel"]).T)
    refused(ValueError, "qwen2-prm", export, deep, tmp_path / "no")
    refused(ValueError, "Qwen2", export, untrained(tmp_path / "llama"), tmp_path / "no", format="qwen2-prm")


def test_float16_is_rounded_or_refused(tmp_path):
    prm = untrained(tmp_path / "run")
    folder = export(prm, tmp_path / "out", dtype="float16")
    rounded = jax.tree.map(lambda x: np.asarray(x).astype(np.float16).astype(np.float32), prm.params["decoder"])
    assert tiny.equal(load_decoder(folder, prm.config), rounded)
    large = prm.params | {"head": jax.tree.map(lambda x: 1e6 * x, prm.params["head"])}
    with pytest.raises(ValueError, match="score.weight"):
        export(dataclasses.replace(prm, params=large), tmp_path / "no", dtype="float16")


def test_adapters_alone_need_a_run_that_has_them_and_a_base_that_peft_can_load(tmp_path):
    refused(ValueError, r"\(lora.rank=0\)", export, untrained(tmp_path / "run"), tmp_path / "no", format="peft")
    prm = untrained(tmp_path / "lora")
    experiment = tiny.experiment(tmp_path / "lora", model=prm.config, lora=LoraConfig(rank=2))
    (tmp_path / "lora" / "experiment.json").write_text(json.dumps(to_json(experiment)))
    refused(ValueError, "base", export, prm, tmp_path / "no", format="peft")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(qkv_bias=True, qk_norm=True), "qkv_bias"),
        (dict(qkv_bias=False, design="gemma"), "Gemma 3"),
        (dict(qk_norm=False, attention_softcap=2.0), "transformers"),
        (dict(qk_norm=False, windows=(2, 3)), "windows"),
        (dict(head="scalar"), "'scalar'"),
        (dict(qkv_bias=False, qk_norm=False, width=18), "width 18"),
    ],
)
def test_models_that_transformers_lacks_are_refused(tmp_path, changes, message):
    prm = untrained(tmp_path / "run")
    prm = dataclasses.replace(prm, config=dataclasses.replace(MODEL, **changes))
    refused(ValueError, message, export, prm, tmp_path / "out")
    assert not list(tmp_path.glob("out*"))


@pytest.mark.breadth
def test_a_language_model_is_written_from_its_file(smollm2_gguf, tmp_path, monkeypatch):
    """With its chat template; a classifier, which jprm would write as what it is not, is refused."""
    config = dataclasses.replace(gguf.model_config(smollm2_gguf), layers=1)  # a thirtieth of the time
    monkeypatch.setattr(gguf, "model_config", lambda path, **changes: dataclasses.replace(config, **changes))
    folder = export(smollm2_gguf, tmp_path / "out", dtype="bfloat16")
    fields = json.loads((folder / "config.json").read_text())
    assert (fields["architectures"], fields["max_position_embeddings"]) == (["LlamaForCausalLM"], 8192)
    assert prompt_of(folder, "{problem}") == prompt_of(smollm2_gguf, "{problem}")
    text = "What is 12 + 30?\n"
    assert load_tokenizer(folder).encode(text) == load_tokenizer(smollm2_gguf).encode(text)
    (folder / "config.json").write_text(json.dumps(fields | {"_model_name_or_path": "SmolLM2"}))
    (folder / "SHA256SUMS").unlink()
    monkeypatch.undo()
    again = export(folder, tmp_path / "again", dtype="bfloat16")
    assert (again / "model.safetensors").read_bytes() == (folder / "model.safetensors").read_bytes()
    prm = export(untrained(tmp_path / "run"), tmp_path / "prm")
    for source, options in ((prm, {}), (folder, {"format": "qwen2-prm"})):
        refused(ValueError, "reward model|was not trained here", export, source, tmp_path / "no", **options)


@pytest.mark.breadth
def test_from_a_folder_through_training_to_a_folder(tmp_path, one_device, capsys):
    """`base` takes an exported folder, and `jprm convert` writes the run that started there."""
    start = export(untrained(tmp_path / "first", "qwen2"), tmp_path / "start")
    changes = dict(layer_groups=(1, 1), remat="nothing", attention=MODEL.attention, attention_block=32)
    experiment = tiny.experiment(
        tiny.make_data(tmp_path / "data"), model=model_config(start, **changes), base=str(start), steps=1,
        checkpoint_every=1, valid=(),
    )  # fmt: skip
    tiny.training.train(experiment, tmp_path / "run")
    assert cli.main(["convert", str(tmp_path / "run"), str(tmp_path / "out")]) == 0
    assert capsys.readouterr().out.endswith("out: whole, as its SHA256SUMS says\n")
    prm = jprm.load(tmp_path / "run")
    exported = load_decoder(tmp_path / "out", prm.config)
    assert tiny.equal(exported, prm.params["decoder"])
    before = load_decoder(start, prm.config)
    moved = jax.tree.map(lambda a, b: np.abs(np.asarray(a) - np.asarray(b)).max(), exported, before)
    assert 0 < max(jax.tree.leaves(moved)) < 0.02  # one step of Adam at a learning rate of 0.01, from the base
    ids = ids_of(prm)
    actual, _ = in_transformers(tmp_path / "out", ids)
    pieces = [prm.layout.problem(CHAIN["problem"]), *(prm.layout.step(step, 0) for step in CHAIN["steps"])]
    ends = np.cumsum([len(ids) for ids in pieces])
    probability = 1 / (1 + np.exp(actual[:, 0] - actual[:, 1]))
    np.testing.assert_allclose(prm.score(**CHAIN), probability[ends[1:] - 1], atol=1e-5)
    again = jprm.load(tmp_path / "out")  # by its adapter.json
    assert (again.semantics, again.config.head) == ("rating", "binary")
    np.testing.assert_array_equal(again.score(**CHAIN), prm.score(**CHAIN))
    two = jprm.load(export(tmp_path / "run", tmp_path / "two", format="qwen2-prm"))
    np.testing.assert_allclose(two.score(**CHAIN), prm.score(**CHAIN), atol=1e-6)  # the same logits, summed in 16 units


def test_every_file_may_be_read_by_whom_the_umask_lets(tmp_path):
    before = os.umask(0o022)
    try:
        export(untrained(tmp_path / "run"), tmp_path / "out")
    finally:
        os.umask(before)
    assert {oct(path.stat().st_mode & 0o777) for path in (tmp_path / "out").iterdir()} == {"0o644"}
