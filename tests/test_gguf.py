"""GGUF base models against transformers, and damaged files."""

import dataclasses

import gguf
import jax
import numpy as np
import pytest
from tiny import TINY, params

from jprm.checkpoints.gguf import Reader, load_decoder, model_config
from jprm.gguf_file import open_gguf
from jprm.model.mesh import MeshConfig, make_mesh, spec
from jprm.model.rope import RopeScaling, frequencies
from jprm.model.transformer import AXES


def test_the_hyper_parameters_of_smollm2(smollm2_gguf):
    config = model_config(smollm2_gguf, layers=3, layer_groups=(2, 1), head="scalar")
    assert dataclasses.asdict(config) | {
        "vocab_size": 49152, "layers": 3, "width": 576, "heads": 9, "kv_heads": 3, "head_dim": 64, "mlp_width": 1536,
        "rope_theta": 100000.0, "norm_eps": 1e-5, "qkv_bias": False, "qk_norm": False, "tied_embeddings": True,
    } == dataclasses.asdict(config)  # fmt: skip


def write(path, config, decoder, architecture="llama", leave_out=(), extra=(), also=None, **fields):
    """A GGUF file of `decoder`, heads in llama.cpp's order where the architecture has it."""
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(config.layers)
    writer.add_embedding_length(config.width)
    writer.add_head_count(config.heads)
    writer.add_head_count_kv(config.kv_heads)
    writer.add_key_length(config.head_dim)
    writer.add_feed_forward_length(config.mlp_width)
    writer.add_rope_freq_base(config.rope_theta)
    writer.add_layer_norm_rms_eps(config.norm_eps)
    for key, value in fields.items():
        getattr(writer, key)(value)

    def heads_last(x):  # (D, ..., H) or (..., H) to (heads x H, D) or (heads x H)
        x = np.moveaxis(x, 0, -1) if x.shape[0] == config.width and x.ndim > 2 else x
        x = x.reshape(-1, config.head_dim, *((config.width,) if x.shape[-1] == config.width and x.ndim > 2 else ()))
        if architecture == "llama":  # pair i at (2i, 2i + 1)
            half = config.head_dim // 2
            x = np.stack([x[:, :half], x[:, half:]], axis=2).reshape(x.shape)
        return x.reshape(-1, *x.shape[2:])

    def plain(x):
        return np.moveaxis(x, 0, -1).reshape(-1, config.width)

    tensors = {"token_embd.weight": decoder["embed"], "output_norm.weight": decoder["final_norm"]}
    for i in range(config.layers):
        layer = {name: np.asarray(value[i]) for name, value in decoder["layers_0"].items()}
        tensors |= {f"blk.{i}.{name}": value for name, value in {
            "attn_norm.weight": layer["attention_norm"], "ffn_norm.weight": layer["mlp_norm"],
            "attn_q.weight": heads_last(layer["query"]), "attn_k.weight": heads_last(layer["key"]),
            "attn_v.weight": plain(layer["value"]), "attn_output.weight": layer["out"].reshape(-1, config.width).T,
            "ffn_gate.weight": layer["gate"].T, "ffn_up.weight": layer["up"].T, "ffn_down.weight": layer["down"].T,
            "attn_q.bias": heads_last(layer["query_bias"]), "attn_k.bias": heads_last(layer["key_bias"]),
            "attn_v.bias": layer["value_bias"].reshape(-1),
            "attn_q_norm.weight": layer["query_norm"], "attn_k_norm.weight": layer["key_norm"],
        }.items()}  # fmt: skip
    tensors |= also or {}
    for name in extra:
        tensors[name] = np.zeros(config.width, np.float32)
    for name, value in tensors.items():
        if name not in leave_out:
            writer.add_tensor(name, np.ascontiguousarray(value, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3"])
def test_a_written_file_reads_back(tmp_path, architecture):
    decoder = params()["decoder"]
    file = write(tmp_path / "m.gguf", TINY, decoder, architecture)
    known = model_config(file, attention_block=TINY.attention_block)
    assert known == TINY
    jax.tree.map(np.testing.assert_array_equal, load_decoder(file, TINY), decoder)
    with pytest.raises(ValueError, match="has 2 layers, not 3"):
        model_config(file, layers=3)
    with pytest.raises(ValueError, match="width is 16, the config says 32"):
        load_decoder(file, dataclasses.replace(TINY, width=32))
    first = load_decoder(file, dataclasses.replace(TINY, layers=1, layer_groups=()))
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(a, b[:1]), first["layers_0"], decoder["layers_0"])


def test_rope_scaling_is_read(tmp_path):
    """The numbers that a scaling gives are held against transformers in test_huggingface."""
    decoder, length = params()["decoder"], dict(add_rope_scaling_orig_ctx_len=16)

    def scaling(**fields):
        return model_config(write(tmp_path / "m.gguf", TINY, decoder, **fields)).rope_scaling

    linear = dict(add_rope_scaling_type=gguf.RopeScalingType.LINEAR, add_rope_scaling_factor=4.0)
    assert scaling(**linear) == RopeScaling("linear", 4.0)
    yarn = dict(add_rope_scaling_type=gguf.RopeScalingType.YARN, add_rope_scaling_factor=4.0)
    assert scaling(**yarn, **length) == RopeScaling("yarn", 4.0, 16, 1.0, 32.0, 0.1 * np.log(4.0) + 1)
    llama3 = RopeScaling("llama3", 8.0, 8192, 1.0, 4.0)
    config = dataclasses.replace(TINY, rope_theta=1e9)  # a head of two pairs: one fast, one slow
    divisor_H = frequencies(config.head_dim, 1e9) / frequencies(config.head_dim, 1e9, llama3)
    file = write(tmp_path / "m.gguf", config, decoder, also={"rope_freqs.weight": divisor_H})
    assert divisor_H.max() == 8 and model_config(file).rope_scaling == llama3


def test_a_file_is_parsed_once_until_it_changes(tmp_path):
    file = write(tmp_path / "m.gguf", TINY, params()["decoder"])
    first = open_gguf(file)
    assert open_gguf(str(file)) is first
    write(file, TINY, params()["decoder"], add_rope_scaling_type=gguf.RopeScalingType.LINEAR)
    assert open_gguf(file) is not first


def test_parameters_are_put_where_the_mesh_wants_them(tmp_path):
    file = write(tmp_path / "m.gguf", TINY, params()["decoder"])
    with jax.set_mesh(make_mesh(MeshConfig(2, 2, 2))):
        decoder = load_decoder(file, TINY)
    for name, array in decoder["layers_0"].items():
        assert array.sharding.spec == spec(*AXES[name])
    jax.tree.map(np.testing.assert_array_equal, decoder, params()["decoder"])


def test_files_that_are_cut_or_of_another_kind_are_refused(tmp_path):
    decoder = params()["decoder"]
    whole = write(tmp_path / "m.gguf", TINY, decoder).read_bytes()
    for length in [0, 3, 100, 1000, len(whole) // 2, len(whole) - 40]:
        (tmp_path / "cut.gguf").write_bytes(whole[:length])
        with pytest.raises(ValueError, match="cut.gguf: not a complete GGUF file .*download it again"):
            Reader(tmp_path / "cut.gguf")
    (tmp_path / "text.gguf").write_text("not a model at all, only text" * 10)
    with pytest.raises(ValueError, match="text.gguf: not a complete GGUF file"):
        Reader(tmp_path / "text.gguf")
    with pytest.raises(FileNotFoundError, match="No such file.*none.gguf"):
        Reader(tmp_path / "none.gguf")

    def refused(message, **changes):
        file = write(tmp_path / "other.gguf", TINY, decoder, **changes)
        with pytest.raises(ValueError, match=f"other.gguf: {message}"):
            load_decoder(file, model_config(file))

    refused("architecture 'gemma' is not supported; one of llama, qwen2, qwen3 is", architecture="gemma")
    yarn = dict(add_rope_scaling_type=gguf.RopeScalingType.YARN)
    refused("metadata llama.rope.scaling.factor is missing", **yarn)
    refused("RoPE scaling 'yarn': rope_scaling: yarn needs positions=0", **yarn, add_rope_scaling_factor=4.0)
    refused("RoPE scaling 'longrope' is not supp", add_rope_scaling_type=gguf.RopeScalingType.LONGROPE,
            add_rope_scaling_factor=4.0)  # fmt: skip
    refused("metadata llama.rope.scaling.attn_factor .2.0. is not supported", add_rope_scaling_attn_factors=2.0)
    refused("tensor rope_freqs.weight is not of Llama 3.1's scaling", extra=("rope_freqs.weight",))
    refused("sliding-window attention .8 tokens. is not supported", add_sliding_window=8)
    refused("rotary embeddings on 2 of 4 dimensions", add_rope_dimension_count=2)
    refused("tensor blk.1.ffn_up.weight is missing", leave_out=("blk.1.ffn_up.weight",))
    refused("tensor token_embd.weight is missing", leave_out=("token_embd.weight",))
    refused("tensor blk.2.attn_norm.weight is there, beyond the model's", extra=("blk.2.attn_norm.weight",))
    for name in ("blk.0.attn_output.bias", "blk.0.ffn_down.bias", "blk.0.ffn_gate_exps.weight"):
        refused(f"tensors that jprm does not know: {name}", extra=(name,))

    writer = gguf.GGUFWriter(tmp_path / "bare.gguf", "llama")  # such as a file that holds a tokenizer alone
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(ValueError, match="bare.gguf: metadata llama.attention.head_count is missing"):
        model_config(tmp_path / "bare.gguf")
