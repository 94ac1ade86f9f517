"""Hugging Face folders against transformers, which creates them and computes the expected values."""

import dataclasses
import json
import os
import pathlib
import re
import shutil
import tracemalloc
import zlib

import jax
import numpy as np
import pytest
import tiny_run
from families import breadth
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from refusing import refused
from safetensors.numpy import load_file, save_file
from tiny import chain_rows, hidden, logits

from jprm.checkpoints import base
from jprm.methods.formats.config_json import Fields
from jprm.methods.formats.families import FAMILIES, MISSING
from jprm.methods.formats.huggingface import load_decoder, model_config
from jprm.model import transformer
from jprm.model.mesh import MeshConfig, make_mesh, spec
from jprm.model.transformer import axes_of
from jprm.train.state import initial_state

REASON = "the extra 'parity' is not installed"
SIZES = dict(
    vocab_size=128, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=64, pad_token_id=None,
)  # fmt: skip
LLAMA3 = dict(
    rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=16
)
KINDS = {
    "llama": ("llama", {}),
    "llama2": ("llama", dict(num_key_value_heads=4, rms_norm_eps=1e-5)),
    "llama3": ("llama", dict(rope_parameters=dict(LLAMA3, rope_theta=500.0))),
    "llama-linear": ("llama", dict(rope_parameters=dict(rope_type="linear", factor=4.0, rope_theta=100.0))),
    "llama-head": ("llama", dict(head_dim=12)),
    "smollm2": ("llama", dict(tie_word_embeddings=True, num_attention_heads=8, num_key_value_heads=2)),
    "mistral": ("mistral", dict(sliding_window=None, head_dim=16)),
    "mistral-window": ("mistral", dict(sliding_window=7)),
    "qwen2": ("qwen2", dict(rope_parameters=dict(rope_type="default", rope_theta=1000.0))),
    "qwen2-yarn": ("qwen2", dict(rope_parameters=dict(
        rope_type="yarn", factor=4.0, original_max_position_embeddings=16, rope_theta=100.0, beta_fast=4.0))),
    "qwen2-window": ("qwen2", dict(use_sliding_window=True, sliding_window=5, max_window_layers=1)),
    "qwen3-window": ("qwen3", dict(head_dim=16, use_sliding_window=True, sliding_window=5, num_hidden_layers=3,
        layer_types=["sliding_attention", "full_attention", "full_attention"])),
    "gemma2": ("gemma2", dict(head_dim=12, sliding_window=6, query_pre_attn_scalar=20, num_hidden_layers=3,
        attn_logit_softcapping=2.0, final_logit_softcapping=3.0)),
    "gemma3": ("gemma3_text", dict(head_dim=12, sliding_window=6, query_pre_attn_scalar=20, num_hidden_layers=7,
        rope_parameters=dict(full_attention=dict(rope_type="linear", factor=4.0, rope_theta=500.0),
                             sliding_attention=dict(rope_type="default", rope_theta=50.0)))),
    "qwen3": ("qwen3", dict(head_dim=16, tie_word_embeddings=True)),
    "qwen3-yarn": ("qwen3", dict(head_dim=16, rope_parameters=dict(
        rope_type="yarn", factor=2.0, original_max_position_embeddings=32, rope_theta=1e6, attention_factor=1.5))),
    "granite": ("granite", dict(embedding_multiplier=12.0, attention_multiplier=0.1, residual_multiplier=0.3,
                                logits_scaling=4.0, tie_word_embeddings=True)),
}  # fmt: skip
DELTA = dict(linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=8, linear_value_head_dim=6,
             head_dim=16, num_hidden_layers=4)  # fmt: skip
MIXTURE = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16)
NEW = {
    "olmo3": ("olmo3", dict(num_hidden_layers=4, sliding_window=6, rope_parameters=dict(
        full_attention=dict(rope_type="linear", factor=4.0, rope_theta=500.0),
        sliding_attention=dict(rope_type="default", rope_theta=50.0)))),
    "smollm3": ("smollm3", dict(num_hidden_layers=4)),
    "ministral3": ("ministral3", dict(head_dim=16, rope_parameters=dict(
        rope_type="yarn", rope_theta=100.0, factor=4.0, original_max_position_embeddings=16, beta_fast=4.0,
        beta_slow=1.0, mscale=1.0, mscale_all_dim=1.0, llama_4_scaling_beta=0.5))),
    "phi4": ("phi3", dict(rope_parameters=dict(
        rope_type="default", rope_theta=100.0, partial_rotary_factor=0.5))),
    "qwen3_moe": ("qwen3_moe", MIXTURE | dict(head_dim=16, norm_topk_prob=True)),
    "qwen3_moe-dense": ("qwen3_moe", MIXTURE | dict(head_dim=16, num_hidden_layers=3, mlp_only_layers=[1])),
    "olmo2": ("olmo2", {}),
    "glm4": ("glm4", dict(head_dim=16)),
    "mixtral": ("mixtral", dict(num_local_experts=4, num_experts_per_tok=2, sliding_window=7)),
    "phi3": ("phi3", dict(sliding_window=7)),
    "gpt_oss": ("gpt_oss", dict(head_dim=16, num_local_experts=4, num_experts_per_tok=2, sliding_window=7,
        swiglu_limit=0.7, rope_parameters=dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=16,
                                               rope_theta=100.0, beta_fast=4.0, truncate=False))),
    "qwen3_5": ("qwen3_5_text", DELTA),
    "qwen3_next": ("qwen3_next", DELTA | MIXTURE | dict(shared_expert_intermediate_size=24,
                                                        layer_types=["linear_attention", "full_attention"] * 2)),
}  # fmt: skip
"""Their gradients are compared too. (Granite's are those of its multiplied matrices, which files do not hold.)"""
OLD = tuple(KINDS)
KINDS |= NEW
HYBRIDS = ("qwen3_5", "qwen3_next")
IDS = (np.random.default_rng(0).permutation(128)[:48]).tolist()


def make(folder, kind="llama", shard=None, head="CausalLM", **changes):
    """A folder of random weights as transformers saves it. Everything is random: biases and norms matter too."""
    pytest.importorskip("torch", reason=REASON)
    transformers = pytest.importorskip("transformers", reason=REASON)
    family, fields = KINDS[kind]
    name = {"llama": "Llama", "mistral": "Mistral", "qwen2": "Qwen2", "qwen3": "Qwen3", "gemma2": "Gemma2",
            "gemma3_text": "Gemma3Text", "olmo3": "Olmo3", "smollm3": "SmolLM3", "ministral3": "Ministral3",
            "phi3": "Phi3", "qwen3_moe": "Qwen3Moe", "qwen3_5_text": "Qwen3_5Text", "qwen3_next": "Qwen3Next",
            "olmo2": "Olmo2", "glm4": "Glm4", "granite": "Granite", "mixtral": "Mixtral", "gpt_oss": "GptOss",
            }[family]  # fmt: skip
    config = getattr(transformers, f"{name}Config")(**(SIZES | fields | changes))
    name = name.removesuffix("Text") if head == "CausalLM" else name
    config._attn_implementation = "eager"  # the only one that knows soft caps
    model = randomised(getattr(transformers, f"{name}{head}" if head == "Model" else f"{name}For{head}")(config))
    model.save_pretrained(folder, **({"max_shard_size": shard} if shard else {}))
    return model


def randomised(model):
    import torch

    with torch.no_grad():
        for key, value in model.named_parameters():
            torch.manual_seed(zlib.crc32(key.removeprefix("model.").encode()))  # whatever head is beside it
            value.copy_(torch.rand_like(value) + 0.5 if "norm" in key else torch.randn_like(value) * 0.2)
            if key.endswith("A_log"):  # slow decays: an output is else often one term, which its norm divides by itself
                value -= 3
    return model.eval()


def expected(model, ids=IDS):
    torch = pytest.importorskip("torch", reason=REASON)
    with torch.no_grad():
        decoder = getattr(model, "model", model)
        return decoder(torch.tensor([ids])).last_hidden_state[0].numpy()


def states(decoder, config, ids=IDS):
    return np.asarray(hidden({"decoder": decoder}, config, chain_rows([ids], len(ids))))[0]


def assert_states_close(actual, wanted, kind):
    # Two layers of float32 sums in another order, on states of size about one. A norm divides DeltaNet's outputs by
    # their own size, so that rounding grows: transformers' own float32 is 1e-4 from its float64 there.
    near = 3e-4 if kind in HYBRIDS else 1e-4
    np.testing.assert_allclose(actual, wanted, atol=near, rtol=near)
    assert np.abs(wanted).max() > 1


@pytest.mark.parametrize("kind", OLD)
def test_hidden_states_equal_those_of_transformers(tmp_path, kind):
    model = make(tmp_path, kind)
    config = model_config(tmp_path, attention="reference", remat="nothing")
    assert_states_close(states(load_decoder(tmp_path, config), config), expected(model), kind)


@pytest.mark.parametrize("kind", breadth(NEW, but=["olmo3", "gpt_oss", "qwen3_next"]))
def test_hidden_states_and_gradients_equal_those_of_transformers(tmp_path, kind):
    """Of every parameter: transformers' gradients are written as a folder, and read as its weights are."""
    torch = pytest.importorskip("torch", reason=REASON)
    model = make(tmp_path, kind)
    config = model_config(tmp_path, attention="reference", remat="nothing")
    decoder = load_decoder(tmp_path, config)
    weight_TD = np.random.default_rng(1).normal(size=(len(IDS), config.width)).astype(np.float32)
    states_TD = getattr(model, "model", model)(torch.tensor([IDS])).last_hidden_state[0]
    (states_TD * torch.tensor(weight_TD)).sum().backward()
    with torch.no_grad():
        for value in model.parameters():
            value.copy_(torch.zeros_like(value) if value.grad is None else value.grad)
    model.save_pretrained(tmp_path / "gradients")
    wanted = load_decoder(tmp_path / "gradients", config)
    rows = chain_rows([IDS], len(IDS))

    def weighted(decoder):
        x_TD = transformer.hidden({"decoder": decoder}, config, rows)[0]
        return (x_TD * weight_TD).sum(), x_TD

    actual, x_TD = jax.jit(jax.grad(weighted, has_aux=True))(decoder)
    assert_states_close(x_TD, states_TD.detach().numpy(), kind)
    # Sums of float32 in another order, which threads change from run to run: of an array's largest number, up to 2.4e-4
    # in hybrids (5e-5 where XLA optimises, which it does not here) and 4e-6 in others.
    of_largest, most = (4e-4, np.inf) if kind in HYBRIDS else (2e-5, 1e-3)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=min(of_largest * np.abs(b).max(), most)),
        actual, wanted,
    )  # fmt: skip


OWN = """
from jprm.methods.formats.config_json import Family, Stored

def values(fields, values):
    return {"design": "olmo", "qk_width_norm": True}

def tensors(fields, config):
    return {"up": Stored("mlp.up_proj.weight", factor=fields.number("up_factor")), "gate": Stored("mlp.w1.weight")}

MINE = Family("mine", values, reads={"up_factor"}, tensors=tensors)
"""


def test_a_family_outside_is_one_record(tmp_path, monkeypatch):
    make(tmp_path / "olmo", "olmo2")
    shutil.copytree(tmp_path / "olmo", tmp_path / "mine")
    fields = json.loads((tmp_path / "olmo/config.json").read_text())
    (tmp_path / "mine/config.json").write_text(json.dumps(fields | {"model_type": "mine", "up_factor": 2.0}))
    tensors = load_file(tmp_path / "olmo/model.safetensors")
    save_file({name.replace("gate_proj", "w1"): x for name, x in tensors.items()}, tmp_path / "mine/model.safetensors")
    refused(ValueError, "'mine' is not supported", model_config, tmp_path / "mine")
    (tmp_path / "own.py").write_text(OWN)
    monkeypatch.setenv("JPRM_FAMILIES", f"{tmp_path / 'own.py'}:MINE")
    config = model_config(tmp_path / "mine")
    assert config == model_config(tmp_path / "olmo")
    mine, theirs = (load_decoder(tmp_path / name, config) for name in ("mine", "olmo"))
    theirs["layers_0"]["up"] *= 2
    jax.tree.map(np.testing.assert_array_equal, mine, theirs)
    monkeypatch.setenv("JPRM_FAMILIES", f"{tmp_path / 'own.py'}:OTHER")
    refused(ValueError, "OTHER", model_config, tmp_path / "mine")


WRONG = """
from jprm.methods.formats.config_json import Family, Stored

FEATURE = Family("llama", lambda fields, values: {"convolution": 4})
NOTHING = Family("llama", lambda fields, values: None)
DESIGN = Family("llama", lambda fields, values: {"design": "mamba"})
KIND = Family("llama", lambda fields, values: {"mixers": ("mamba",)})
FIELD = Family("llama", lambda fields, values: {"qk_norm": fields.flag("norms", None)})
ROLE = Family("llama", tensors=lambda fields, config: {"qeury": Stored("self_attn.q_proj.weight")})
SHAPE = Family("llama", tensors=lambda fields, config: {"query": Stored("self_attn.q_proj.weight", lambda x: x[:3])})
OBJECT = 3
"""


@pytest.mark.parametrize(
    ("name", "message"),
    [("FEATURE", "'llama' sets convolution"), ("NOTHING", "'llama' sets None"), ("DESIGN", "design='mamba'"),
     ("KIND", "'mamba'"), ("FIELD", "norms is None"), ("ROLE", "'qeury'; the roles are .*query"),
     ("SHAPE", r"q_proj.weight is of shape \(3, 32\)"), ("OBJECT", "wrong.py:OBJECT"), ("NONE", "wrong.py:NONE")],
)  # fmt: skip
def test_a_record_that_asks_for_an_unknown_feature_is_refused(tmp_path, monkeypatch, name, message):
    make(tmp_path, "llama")
    (tmp_path / "wrong.py").write_text(WRONG)
    monkeypatch.setenv("JPRM_FAMILIES", f"{tmp_path / 'wrong.py'}:{name}")
    refused(ValueError, message, lambda: load_decoder(tmp_path, model_config(tmp_path)))


@pytest.mark.parametrize("name", MISSING)
def test_a_refused_family_says_what_is_missing(tmp_path, name):
    configured(tmp_path, model_type=name)
    refused(ValueError, f"{name}.*which needs {re.escape(MISSING[name])}", model_config, tmp_path)


@pytest.mark.parametrize("tied", [True, False])
def test_a_granite_policy_has_the_logits_of_transformers(tmp_path, tied):
    torch = pytest.importorskip("torch", reason=REASON)
    model = make(tmp_path, "granite", tie_word_embeddings=tied)
    config = model_config(tmp_path, head="language", attention="reference", remat="nothing")
    params = base.load_language_model(tmp_path, config)
    with torch.no_grad():
        wanted = model(torch.tensor([IDS])).logits[0, -1].numpy()
    np.testing.assert_allclose(logits(params, config, chain_rows([IDS], len(IDS)))[0, 0], wanted, atol=1e-4, rtol=1e-4)


def test_experts_in_mxfp4_are_those_of_transformers(tmp_path):
    torch = pytest.importorskip("torch", reason=REASON)
    mxfp4 = pytest.importorskip("transformers.integrations.mxfp4", reason=REASON)
    make(tmp_path, "gpt_oss", hidden_size=64, intermediate_size=96)
    config, tensors = model_config(tmp_path), load_file(tmp_path / "model.safetensors")
    packed, draw = dict(tensors), np.random.default_rng(0)
    for name, x in tensors.items():
        if name.endswith(("gate_up_proj", "down_proj")):
            blocks = draw.integers(0, 256, (x.shape[0], x.shape[2], x.shape[1] // 32, 16), np.uint8)
            scales = draw.integers(120, 130, blocks.shape[:-1], np.uint8)
            del packed[name]
            packed |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
            whole = mxfp4.convert_moe_packed_tensors(torch.tensor(blocks), torch.tensor(scales), dtype=torch.float32)
            tensors[name] = np.ascontiguousarray(whole.numpy())
    save_file(tensors, tmp_path / "model.safetensors")
    wanted = load_decoder(tmp_path, config)
    save_file(packed, tmp_path / "model.safetensors")
    fields = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(fields | {"quantization_config": {"quant_method": "mxfp4"}}))
    assert model_config(tmp_path) == config
    jax.tree.map(np.testing.assert_array_equal, load_decoder(tmp_path, config), wanted)


def test_what_gpt_oss_has_beyond_is_refused_by_name(tmp_path):
    make(tmp_path, "gpt_oss")
    fields = json.loads((tmp_path / "config.json").read_text())
    others = {"quantization_config": {"quant_method": "awq"}, "swiglu_alpha": 2.0, "attention_bias": False}
    for name, value in others.items():
        (tmp_path / "config.json").write_text(json.dumps(fields | {name: value}))
        refused(ValueError, name, model_config, tmp_path)


def test_the_scalings_change_the_numbers():
    """Else the test above would pass with the scaling left out."""
    from jprm.model.config import RopeScaling, frequencies

    plain = frequencies(8, 500.0)
    for scaling in (RopeScaling("linear", 4.0), RopeScaling("llama3", 8.0, 16, 1.0, 4.0),
                    RopeScaling("yarn", 4.0, 16, 1.0, 4.0)):  # fmt: skip
        ratio = frequencies(8, 500.0, scaling) / plain
        assert ratio.min() == pytest.approx(1 / scaling.factor) and ratio.max() <= 1


@pytest.mark.parametrize(("head", "shard"), [("Model", None), ("CausalLM", "20KB"), ("TokenClassification", "20KB")])
def test_shards_and_heads_make_no_difference(tmp_path, head, shard):
    make(tmp_path / "one", "qwen3")
    make(tmp_path / "other", "qwen3", shard, head)
    config = model_config(tmp_path / "one")
    assert dataclasses.replace(model_config(tmp_path / "other"), tied_embeddings=config.tied_embeddings) == config
    first, second = (load_decoder(tmp_path / name, config) for name in ("one", "other"))
    assert len(list((tmp_path / "other").glob("*.safetensors"))) > (1 if shard else 0)
    jax.tree.map(np.testing.assert_array_equal, first, second)


def test_layers_groups_and_places(tmp_path):
    make(tmp_path, "qwen2", num_hidden_layers=3)
    config = model_config(tmp_path, layer_groups=(2, 1))
    whole = load_decoder(tmp_path, dataclasses.replace(config, layer_groups=(3,)))
    parts = load_decoder(tmp_path, config)
    for name, stack in whole["layers_0"].items():
        np.testing.assert_array_equal(stack[:2], parts["layers_0"][name])
        np.testing.assert_array_equal(stack[2:], parts["layers_1"][name])
    first = load_decoder(tmp_path, model_config(tmp_path, layers=1))["layers_0"]
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(a[:1], b), whole["layers_0"], first)
    with jax.set_mesh(make_mesh(MeshConfig(2, 2, 2))):
        placed = base.load_decoder(tmp_path, config)
    for part in ("layers_0", "layers_1"):
        for name, array in placed[part].items():
            assert array.sharding.spec == spec(*axes_of(name))
    assert placed["embed"].sharding.spec == spec(*axes_of("embed"))
    jax.tree.map(np.testing.assert_array_equal, placed, parts)
    refused(ValueError, "3 layers", base.model_config, tmp_path, layers=4)
    refused(ValueError, "rope_theta", load_decoder, tmp_path, dataclasses.replace(config, rope_theta=7.0))


def test_the_host_holds_one_tensor_at_a_time(tmp_path):
    make(tmp_path, num_hidden_layers=8, intermediate_size=2**14)
    config = model_config(tmp_path)
    load_decoder(tmp_path, config)  # compiles
    tracemalloc.start()
    try:
        decoder = jax.block_until_ready(load_decoder(tmp_path, config))
        peak = tracemalloc.get_traced_memory()[1]  # numpy's and Python's memory; that of devices is not in it
    finally:
        tracemalloc.stop()
    largest = decoder["layers_0"]["up"][0].nbytes
    assert largest < peak < 1.3 * largest


FIELDS = dict(
    model_type="llama", vocab_size=128, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
    num_attention_heads=4, num_key_value_heads=2, rms_norm_eps=1e-5, max_position_embeddings=64,
)  # fmt: skip


def configured(folder, **changes):
    fields = {name: value for name, value in (FIELDS | changes).items() if value != "absent"}
    (folder / "config.json").write_text(json.dumps(fields))
    return folder


def test_fields_of_old_and_new_configs_mean_the_same(tmp_path):
    old = model_config(configured(tmp_path, rope_theta=5e5, rope_scaling=LLAMA3 | {"type": "llama3"}))
    new = model_config(configured(tmp_path, rope_parameters=LLAMA3 | {"rope_theta": 5e5}))
    assert old == new and old.rope_theta == 5e5 and old.rope_scaling.positions == 16
    smollm2 = dict(
        architectures=["LlamaForCausalLM"], attention_bias=False, attention_dropout=0.0, bos_token_id=1,
        eos_token_id=2, hidden_act="silu", initializer_range=0.04, is_llama_config=True, mlp_bias=False,
        pad_token_id=2, pretraining_tp=1, rope_interleaved=False, rope_scaling=None, rope_theta=1e5,
        tie_word_embeddings=True, torch_dtype="bfloat16", transformers_version="4.42.3", use_cache=True,
        **{"transformers.js_config": {"kv_cache_dtype": {"q4f16": "float16"}}},
    )  # fmt: skip
    assert model_config(configured(tmp_path, **smollm2)).tied_embeddings
    math_7b = dict(model_type="qwen2", use_sliding_window=False, sliding_window=4096, max_window_layers=28)
    assert model_config(configured(tmp_path, **math_7b)).qkv_bias
    provenance = dict(
        unsloth_version="2026.9.1", unsloth_fixed=True, model_name="a/b", trl_version="0.2", max_length=20
    )
    assert model_config(configured(tmp_path, **math_7b | provenance)) == model_config(configured(tmp_path, **math_7b))


def test_a_files_own_head_is_read_though_the_config_says_tied(tmp_path):
    folder = configured(tmp_path, tie_word_embeddings=True)
    embed = np.random.default_rng(0).normal(size=(8, 4)).astype(np.float32)
    for i, (head, tied) in enumerate(((embed, True), (embed + 1, False), (embed[:4], False), (None, True))):
        tensors = {"model.embed_tokens.weight": embed} | ({} if head is None else {"lm_head.weight": head})
        save_file(tensors, file := folder / "model.safetensors")
        os.utime(file, ns=(i, i))
        assert model_config(folder).tied_embeddings is tied


def test_an_inner_object_is_refused_if_it_is_a_text():
    fields = Fields(pathlib.Path("config.json"), {"a": "b", "c": {"d": 1}, "e": None})
    assert fields.nested("c").count("d") == 1 and not fields.nested("e").fields and not fields.nested("f").fields
    with pytest.raises(ValueError, match=r"config.json: a 'b' is not an object"):
        fields.nested("a")


def test_windows_are_where_transformers_puts_them(tmp_path):
    def windows(**changes):
        return model_config(configured(tmp_path, num_hidden_layers=7, **changes)).windows

    mistral, qwen = dict(model_type="mistral"), dict(model_type="qwen2", use_sliding_window=True, sliding_window=32)
    assert windows(**mistral, sliding_window=32) == (32,)
    assert windows(**mistral) == (4096,) and windows(**mistral, sliding_window=None) == ()
    assert windows(**qwen) == () and windows(**qwen, max_window_layers=5) == (0, 0, 0, 0, 0, 32, 32)
    kinds = ["sliding_attention", "full_attention"] * 3 + ["sliding_attention"]
    assert windows(**qwen, layer_types=kinds) == (32, 0)
    gemma = dict(head_dim=8, hidden_activation="gelu_pytorch_tanh")
    assert windows(model_type="gemma2", sliding_window=16, **gemma) == (16, 0)
    assert windows(model_type="gemma3_text", sliding_window=16, **gemma) == (16, 16, 16, 16, 16, 0)
    assert windows(model_type="gemma3_text", sliding_window=16, sliding_window_pattern=2, **gemma) == (16, 0)


def test_published_gemma_configs(tmp_path):
    shared = dict(
        attention_bias=False, attention_dropout=0.0, cache_implementation="hybrid", head_dim=256,
        hidden_activation="gelu_pytorch_tanh", query_pre_attn_scalar=256, rms_norm_eps=1e-6, sliding_window=8,
        num_hidden_layers=12, use_cache=True,
    )  # fmt: skip
    two = dict(model_type="gemma2", hidden_act="gelu_pytorch_tanh", rope_theta=10000.0, attn_logit_softcapping=50.0,
               final_logit_softcapping=30.0)  # fmt: skip
    config = model_config(configured(tmp_path, **shared | two))
    assert (config.design, config.windows, config.tied_embeddings) == ("gemma", (8, 0), True)
    assert (config.attention_softcap, config.logit_softcap, config.rope_theta) == (50.0, 30.0, 1e4)
    assert config.query_scale == 1 / 16 and not config.qk_norm and not config.rope_theta_local
    three = dict(
        model_type="gemma3_text", attn_logit_softcapping=None, final_logit_softcapping=None, rope_scaling=None,
        rope_local_base_freq=10000, rope_theta=1000000, sliding_window_pattern=6,
    )  # fmt: skip
    config = model_config(configured(tmp_path, **shared | three))
    assert config.windows == (8, 8, 8, 8, 8, 0) and config.qk_norm and not config.attention_softcap
    assert (config.rope_theta, config.rope_theta_local, config.rope_scaling.kind) == (1e6, 1e4, "none")
    assert model_config(tmp_path, layers=2).windows == config.windows


ODD = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=4)
    | st.lists(st.integers(), max_size=2)
    | st.dictionaries(st.text(max_size=3), st.integers(), max_size=2)
)
KEYS = [
    *FIELDS, "head_dim", "rope_theta", "sliding_window", "layer_types", "tie_word_embeddings", "hidden_act",
    "use_sliding_window", "max_window_layers", "sliding_window_pattern", "query_pre_attn_scalar", "rope_parameters",
    "attn_logit_softcapping", "final_logit_softcapping", "rope_local_base_freq", "hidden_activation",
    "max_position_embeddings", "quantization_config",
]  # fmt: skip
GEMMA = {"hidden_activation": "gelu_pytorch_tanh", "head_dim": 8}
FAMILY = st.sampled_from([*FAMILIES])
KINDS_OF_LAYERS = st.lists(st.sampled_from(["full_attention", "sliding_attention"]), max_size=3)
ROPE = st.dictionaries(
    st.sampled_from(["type", "rope_type", *LLAMA3, "beta_fast", "rope_theta"]),
    ODD | st.sampled_from(["linear", "llama3", "yarn"]),
)
FUZZ = settings(
    max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)


@FUZZ
@given(FAMILY, st.dictionaries(st.sampled_from(KEYS), ODD | KINDS_OF_LAYERS, max_size=4), ROPE | ODD)
def test_no_config_does_more_than_be_refused(tmp_path, family, changes, rope):
    fields = FIELDS | (GEMMA if "gemma" in family else {}) | {"model_type": family} | changes
    (tmp_path / "config.json").write_text(json.dumps(fields | {"rope_scaling": rope}))
    try:
        config = model_config(tmp_path)
    except ValueError as error:
        assert str(error).startswith(f"{tmp_path / 'config.json'}: ")
    else:
        assert config.heads % config.kv_heads == 0 and all(0 <= window < 2**31 for window in config.windows)


def test_tensors_that_do_not_fit_the_config_are_refused(tmp_path):
    make(tmp_path)
    config, file = model_config(tmp_path), tmp_path / "model.safetensors"
    whole = load_file(file)

    def bad(message, remove=(), **changes):
        tensors = {name: value for name, value in (whole | changes).items() if name not in remove}
        save_file(tensors, file)
        refused(ValueError, f"{tmp_path}.*{message}", load_decoder, tmp_path, config)

    up = "model.layers.1.mlp.up_proj.weight"
    bad(f"{up}", [up])
    bad(f"{up}", **{up: whole[up].T.copy()})
    bad(f"{up}", **{up: whole[up].astype(np.int8)})
    third = up.replace("1", "2")
    bad(f"{third}", **{third: whole[up]})
    for name in ("model.layers.0.self_attn.o_proj.bias", "model.layers.0.norm.weight", "other", "model.embed.weight"):
        bad(f"{name}", **{name: whole[up]})


@pytest.mark.parametrize("tied", [False, True])
def test_a_policy_starts_with_the_bases_own_head(tmp_path, tied):
    """Whatever config.json says of it: from one of zeros, or from the embedding, it would begin anew."""
    torch = pytest.importorskip("torch", reason=REASON)
    model, path = make(tmp_path / "base"), tmp_path / "base/config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"tie_word_embeddings": tied}))
    config = model_config(tmp_path / "base", head="language", attention="reference", remat="nothing")
    begun = tiny_run.experiment(tmp_path, model=config, base=str(tmp_path / "base"), objective="next_token")
    with tiny_run.one_device(), jax.set_mesh(make_mesh(begun.mesh)):
        params = jax.tree.map(np.asarray, initial_state(begun).params)
        other = dataclasses.replace(begun, model=dataclasses.replace(config, tied_embeddings=True))
        refused(ValueError, "tied_embeddings", initial_state, other)
    without_mesh = jax.tree.map(np.asarray, base.load_language_model(tmp_path / "base", config))
    assert tiny_run.equal(without_mesh, params)
    with torch.no_grad():
        wanted = model(torch.tensor([IDS])).logits[0, -1].numpy()
    np.testing.assert_allclose(logits(params, config, chain_rows([IDS], len(IDS)))[0, 0], wanted, atol=1e-4, rtol=1e-4)


def test_the_base_is_chosen_by_its_path(tmp_path):
    refused(FileNotFoundError, "none", base.model_config, tmp_path / "none")
    (tmp_path / "model.safetensors").touch()
    refused(ValueError, "config.json", base.model_config, tmp_path / "model.safetensors")
    refused(FileNotFoundError, "experiment.json", base.model_config, tmp_path)


def test_the_text_of_a_model_with_images_is_read(tmp_path):
    """Gemma 3 from 4B on: its text's fields are inside `text_config`, those at transformers' defaults left out."""
    torch = pytest.importorskip("torch", reason=REASON)
    transformers = pytest.importorskip("transformers", reason=REASON)
    text = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=7, sliding_window=6, head_dim=16)
    vision = dict(hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=1, image_size=28,
                  patch_size=14)  # fmt: skip
    config = transformers.Gemma3Config(
        text_config=text | dict(vocab_size=128), vision_config=vision, mm_tokens_per_image=4
    )
    config._attn_implementation = "eager"
    model = randomised(transformers.Gemma3ForConditionalGeneration(config))
    model.save_pretrained(tmp_path)
    with torch.no_grad():
        wanted = model.model.language_model(torch.tensor([IDS])).last_hidden_state[0].numpy()
    for shorter in (False, True):
        fields = json.loads((tmp_path / "config.json").read_text())
        if shorter:  # as the 4B model is published
            kept = {"hidden_size", "intermediate_size", "num_hidden_layers", "sliding_window", "head_dim", "vocab_size",
                    "model_type", "rope_parameters"}  # fmt: skip
            fields["text_config"] = {k: v for k, v in fields["text_config"].items() if k in kept}
            (tmp_path / "config.json").write_text(json.dumps(fields))
        text_config = model_config(tmp_path, attention="reference", remat="nothing")
        assert text_config.heads == 8 and text_config.tied_embeddings
        np.testing.assert_allclose(
            states(load_decoder(tmp_path, text_config), text_config), wanted, atol=1e-4, rtol=1e-4
        )
