"""Adapters in PEFT's format: PEFT's score the same here, and jprm's score the same in PEFT."""

import dataclasses
import json
import pathlib
import shutil

import jax
import numpy as np
import pytest
import tiny_run as tiny
import tokenizers
from refusing import bad, refused
from safetensors.numpy import load_file, save_file
from tiny import chain_rows, every_logit, hidden

import jprm
from jprm.checkpoints import base
from jprm.methods.export.export import export
from jprm.methods.formats import peft
from jprm.model.parameters import LoraConfig, products

ROLES = {
    "query": "q_proj", "key": "k_proj", "value": "v_proj", "out": "o_proj", "gate": "gate_proj", "up": "up_proj",
    "down": "down_proj",
}  # fmt: skip
IDS = [3, 14, 15, 9, 26, 5, 35]
KINDS = {
    "all": dict(target_modules=list(ROLES.values())),
    "rslora": dict(target_modules=["q_proj", "v_proj", "down_proj"], use_rslora=True, lora_alpha=5),
    "one layer": dict(target_modules=["o_proj", "k_proj"], layers_to_transform=[1], lora_dropout=0.3),
    "head": dict(target_modules=["up_proj", "gate_proj"], task_type="TOKEN_CLS"),
}


@pytest.fixture(scope="module", autouse=True)
def libraries():
    """Imported when a test needs them: it takes seconds, which each process that collects tests would spend."""
    global torch, transformers, reference
    names = ("torch", "transformers", "peft")
    torch, transformers, reference = (
        pytest.importorskip(name, reason="the extra 'parity' is not installed") for name in names
    )


@pytest.fixture(scope="module")
def base_folder(tmp_path_factory):
    """A tiny Llama as transformers writes it, with a vocabulary of bytes."""
    folder = tmp_path_factory.mktemp("base")
    config = transformers.LlamaConfig(
        vocab_size=256, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, rope_theta=100.0, num_labels=2, max_position_embeddings=128,
    )  # fmt: skip
    torch.manual_seed(0)
    transformers.LlamaForTokenClassification(config).save_pretrained(folder)
    return folder


def adapted(base_folder, out, **changes):
    """A folder that PEFT wrote, with no adapter zero, and PEFT's model."""
    torch.manual_seed(1)
    model = transformers.LlamaForTokenClassification.from_pretrained(base_folder)
    model = reference.get_peft_model(model, reference.LoraConfig(**({"r": 3, "lora_alpha": 6} | changes)))
    with torch.no_grad():
        for name, value in model.named_parameters():
            if "lora_" in name or "modules_to_save" in name:
                value.copy_(0.5 * torch.randn_like(value))
    model.save_pretrained(out)
    return model.eval()


@pytest.mark.parametrize("kind", KINDS)
def test_peft_adapters_give_the_states_that_peft_gives(base_folder, tmp_path, kind):
    model = adapted(base_folder, tmp_path / "adapters", **KINDS[kind])
    config = base.model_config(tmp_path / "adapters", remat="nothing", attention="reference")
    params = {"decoder": base.load_decoder(tmp_path / "adapters", config)}
    actual = np.asarray(hidden(params, config, chain_rows([IDS], 64)))[0, : len(IDS)]
    with torch.no_grad():
        wanted = model(torch.tensor([IDS]), output_hidden_states=True)
    np.testing.assert_allclose(actual, wanted.hidden_states[-1][0].numpy(), atol=1e-4)  # float32, in another order
    with torch.no_grad(), model.disable_adapter():
        unchanged = model(torch.tensor([IDS]), output_hidden_states=True).hidden_states[-1][0].numpy()
    assert np.abs(actual - unchanged).max() > 0.1
    if kind == "head":
        file = peft.MergedTensors(tmp_path / "adapters")
        logit = actual @ file.tensor("score.weight").T + file.tensor("score.bias")
        np.testing.assert_allclose(logit, wanted.logits[0].numpy(), atol=1e-4)


def test_a_vocabulary_with_added_tokens_is_that_of_the_saved_embeddings(base_folder, tmp_path):
    torch.manual_seed(1)
    model = transformers.LlamaForTokenClassification.from_pretrained(base_folder)
    model.resize_token_embeddings(264)
    config = reference.LoraConfig(r=3, target_modules=["q_proj", "v_proj"], task_type="TOKEN_CLS")
    model = reference.get_peft_model(model, config)
    model.save_pretrained(tmp_path / "adapters")
    config = base.model_config(tmp_path / "adapters", remat="nothing", attention="reference")
    assert config.vocab_size == 264 and base.model_config(base_folder).vocab_size == 256
    params = {"decoder": base.load_decoder(tmp_path / "adapters", config)}
    ids = [*IDS, 260]  # one of the added tokens
    actual = np.asarray(hidden(params, config, chain_rows([ids], 64)))[0, : len(ids)]
    with torch.no_grad():
        wanted = model.eval()(torch.tensor([ids]), output_hidden_states=True).hidden_states[-1][0].numpy()
    np.testing.assert_allclose(actual, wanted, atol=1e-4)
    tiny.save_tokenizer(tmp_path / "bytes.json")
    tokenizer = tokenizers.Tokenizer.from_file(str(tmp_path / "bytes.json"))
    tokenizer.add_tokens(["<step>"])
    tokenizer.save(str(tmp_path / "adapters/tokenizer.json"))
    (tmp_path / "adapters/tokenizer_config.json").write_text("{}")
    assert jprm.load(tmp_path / "adapters", adapter="trl").config.vocab_size == 264


def damaged(folder, **fields):
    """The folder with fields of its adapter_config.json replaced."""
    path = folder / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))
    return folder


@pytest.mark.parametrize(("fields", "message"), bad("PEFT's adapter_config.json"))
def test_what_would_change_the_numbers_is_refused_by_name(peft_folder, tmp_path, fields, message):
    folder = tmp_path / "adapters"
    shutil.copytree(peft_folder, folder)
    config = base.model_config(folder)
    refused((ValueError, FileNotFoundError), message, base.load_decoder, damaged(folder, **fields), config)


def test_tensors_that_do_not_fit_are_refused(peft_folder, tmp_path):
    folder = tmp_path / "adapters"
    shutil.copytree(peft_folder, folder)
    config, file = base.model_config(folder), folder / "adapter_model.safetensors"
    tensors = load_file(file)
    name = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
    for change, message in [
        ({name.replace("_A", "_B"): None}, "lora_A"),
        ({"base_model.model.lm_head.lora_A.weight": tensors[name]}, "lora_A"),
        ({key: None for key in tensors}, "LoRA"),
        ({name.replace("layers.0", "layers.9").replace("_A", f"_{x}"): tensors[name] for x in "AB"}, "another model"),
        ({name.replace("lora_A.weight", "lora_magnitude"): tensors[name]}, "lora_magnitude"),
    ]:
        save_file({key: value for key, value in (tensors | change).items() if value is not None}, file)
        refused(ValueError, message, base.load_decoder, folder, config)
    file.rename(folder / "adapter_model.bin")
    refused(ValueError, "adapter_model.bin", base.load_decoder, folder, config)


def test_a_relative_base_is_in_the_loras_folder_or_else_in_the_working_directory(peft_folder, tmp_path, monkeypatch):
    folder = shutil.copytree(peft_folder, tmp_path / "adapters")
    source = json.loads((folder / "adapter_config.json").read_text())["base_model_name_or_path"]
    damaged(folder, base_model_name_or_path="model")
    monkeypatch.chdir(tmp_path)
    shutil.copytree(source, tmp_path / "model")
    assert peft.base_of(folder) == pathlib.Path("model")
    shutil.copytree(source, folder / "model")
    assert peft.base_of(folder) == folder / "model"
    shutil.copytree(peft_folder, folder / "model", dirs_exist_ok=True)
    refused(ValueError, "base_model_name_or_path", peft.base_of, folder)


def test_a_matrix_that_is_saved_whole_replaces_the_models(peft_folder, tmp_path):
    folder = shutil.copytree(peft_folder, tmp_path / "adapters")
    config, file = base.model_config(folder), folder / "adapter_model.safetensors"
    embed = np.ones((256, 16), np.float32)
    save_file(load_file(file) | {"base_model.model.model.embed_tokens.weight": embed}, file)
    plain, whole = base.load_decoder(peft_folder, config), base.load_decoder(folder, config)
    assert tiny.equal(whole["embed"], embed) and tiny.equal(whole["layers_0"], plain["layers_0"])


@pytest.fixture(scope="module")
def peft_folder(base_folder, tmp_path_factory):
    folder = tmp_path_factory.mktemp("peft") / "adapters"
    adapted(base_folder, folder, **KINDS["all"])
    return folder


def test_what_jprm_trains_scores_in_peft_as_here_and_reads_back_bit_for_bit(base_folder, tmp_path, one_device):
    data = tiny.make_data(tmp_path / "data")
    model = base.model_config(base_folder, layer_groups=(1, 1), remat="nothing", attention="paths", attention_block=32)
    experiment = tiny.experiment(
        data, model=model, base=str(base_folder),
        lora=LoraConfig(rank=3, alpha=5.0, targets="query|out|down", rslora=True),
        optimizer=dataclasses.replace(tiny.experiment(data).optimizer, freeze="embed|layers_0"), steps=2, valid=(),
    )  # fmt: skip
    tiny.training.train(experiment, tmp_path / "run")
    out = export(tmp_path / "run", tmp_path / "out", format="peft")
    prm = jprm.load(tmp_path / "run")
    assert tiny.equal(base.load_decoder(out, model), prm.params["decoder"])
    assert tiny.equal(peft.MergedTensors(out).tensor("score.weight").T, prm.params["head"]["kernel"])
    assert tiny.equal(peft.MergedTensors(out).tensor("score.bias"), prm.params["head"]["bias"])
    rounded = jax.tree.map(lambda x: x.astype("bfloat16"), prm.params["decoder"]["layers_1"])
    held = base.load_decoder(out, model, "bfloat16")["layers_1"]
    assert all(tiny.equal(held[role], rounded[role]) for role in products().keys() & held)
    assert "LoRA: rank 3, scale 2.88675, on query|out|down" in (out / "README.md").read_text()
    fields = json.loads((out / "adapter_config.json").read_text())
    assert fields["target_modules"] == [
        f"layers.1.{m}" for m in ("self_attn.q_proj", "self_attn.o_proj", "mlp.down_proj")
    ]

    reference_model = reference.PeftModel.from_pretrained(
        transformers.AutoModelForTokenClassification.from_pretrained(base_folder), out
    )
    wanted = every_logit(jax.tree.map(np.asarray, prm.params), prm.config, IDS)
    with torch.no_grad():
        actual = reference_model.eval()(input_ids=torch.tensor([IDS])).logits[0].numpy()
    np.testing.assert_allclose(actual, wanted, atol=1e-4)
    whole = export(tmp_path / "run", tmp_path / "whole")  # merged
    with torch.no_grad():
        merged = (
            transformers.AutoModelForTokenClassification.from_pretrained(whole).eval()(torch.tensor([IDS])).logits[0]
        )
    np.testing.assert_allclose(merged, wanted, atol=1e-5)
