"""GGUF base models against transformers, and damaged files."""

import dataclasses

import gguf
import jax
import numpy as np
import pytest
from refusing import refused
from tiny import GEMMA, TINY, params

from jprm.methods.formats import gguf as formats
from jprm.methods.formats.gguf import GgufFile, load_decoder, model_config, open_gguf
from jprm.model.config import RopeScaling, frequencies


def test_the_hyper_parameters_of_smollm2(smollm2_gguf):
    config = model_config(smollm2_gguf, layers=3, layer_groups=(2, 1), head="scalar")
    assert dataclasses.asdict(config) | {
        "vocab_size": 49152, "layers": 3, "width": 576, "heads": 9, "kv_heads": 3, "head_dim": 64, "mlp_width": 1536,
        "rope_theta": 100000.0, "norm_eps": 1e-5, "qkv_bias": False, "qk_norm": False, "tied_embeddings": True,
    } == dataclasses.asdict(config)  # fmt: skip


def write(path, config, decoder, architecture="llama", leave_out=(), extra=(), also=None, quantised=None, **fields):
    """A GGUF file of `decoder`, heads in llama.cpp's order where the architecture has it.

    With `quantised`, a type, the matrices of layers are random blocks of it; or a tensor's name to its type.
    """
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

    def norm(w):
        return np.add(w, 1, dtype=np.float32) if config.design == "gemma" else w

    groups = [decoder[f"layers_{i}"] for i in range(len(config.layer_groups))]
    layers = [
        {name: np.asarray(x[i]) for name, x in group.items()} for group in groups for i in range(len(group["out"]))
    ]
    tensors = {"token_embd.weight": decoder["embed"], "output_norm.weight": norm(decoder["final_norm"])}
    for i, layer in enumerate(layers):
        layer = {name: norm(value) if name.endswith("norm") else value for name, value in layer.items()}
        tensors |= {f"blk.{i}.{name}": value for name, value in {
            "attn_norm.weight": layer["attention_norm"], "ffn_norm.weight": layer["mlp_norm"],
            "attn_q.weight": heads_last(layer["query"]), "attn_k.weight": heads_last(layer["key"]),
            "attn_v.weight": plain(layer["value"]), "attn_output.weight": layer["out"].reshape(-1, config.width).T,
            "ffn_gate.weight": layer["gate"].T, "ffn_up.weight": layer["up"].T, "ffn_down.weight": layer["down"].T,
            "attn_q_norm.weight": layer["query_norm"], "attn_k_norm.weight": layer["key_norm"],
        }.items()}  # fmt: skip
        if config.qkv_bias:
            biases = {"q": heads_last(layer["query_bias"]), "k": heads_last(layer["key_bias"])}
            biases["v"] = layer["value_bias"].reshape(-1)
            tensors |= {f"blk.{i}.attn_{name}.bias": value for name, value in biases.items()}
        if config.design == "gemma":
            tensors[f"blk.{i}.post_attention_norm.weight"] = layer["attention_post_norm"]
            tensors[f"blk.{i}.post_ffw_norm.weight"] = layer["mlp_post_norm"]
    tensors |= also or {}
    for name in extra:
        tensors[name] = np.zeros(config.width, np.float32)
    for name, value in tensors.items():
        if isinstance(quantised, dict):
            kind = quantised.get(name)
        else:
            kind = quantised if name.startswith("blk.") and value.ndim == 2 else None
        if kind is not None:
            writer.add_tensor(name, blocks(kind, value.shape), raw_dtype=kind)
        elif name not in leave_out:
            kind = np.int8 if value.dtype == np.int8 else np.float32
            writer.add_tensor(name, np.ascontiguousarray(value, dtype=kind))
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
    refused(ValueError, "2 layers", model_config, file, layers=3)
    refused(ValueError, "width is 16", load_decoder, file, dataclasses.replace(TINY, width=32))
    first = load_decoder(file, dataclasses.replace(TINY, layers=1, layer_groups=()))
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(a, b[:1]), first["layers_0"], decoder["layers_0"])


GEMMA3 = dataclasses.replace(GEMMA, attention_softcap=0.0, query_pre_attn_scalar=GEMMA.head_dim)


def test_gemma3_is_read(tmp_path):
    """With llama.cpp's values where the file has none; what they mean is held against transformers elsewhere."""
    decoder = params(GEMMA3)["decoder"]
    window = dict(architecture="gemma3", add_sliding_window=5)
    options = dict(add_sliding_window_pattern=2, add_rope_freq_base_swa=10.0, add_final_logit_softcapping=1.0)
    file = write(tmp_path / "m.gguf", GEMMA3, decoder, **window, **options)
    known = model_config(file, attention_block=GEMMA3.attention_block, layer_groups=GEMMA3.layer_groups)
    assert known == GEMMA3

    def same(path, actual, expected):
        # A norm's 1 + w was rounded to float32, between 1 and 4, and so was the difference.
        np.testing.assert_allclose(actual, expected, rtol=0, atol=2.0**-23 if path[-1].key.endswith("norm") else 0)

    jax.tree_util.tree_map_with_path(same, load_decoder(file, known), decoder)

    few = write(tmp_path / "m.gguf", GEMMA3, decoder, **window)
    assert model_config(few).windows == (5,) and model_config(few).rope_theta_local == 10_000
    assert model_config(few).logit_softcap == 0
    fields = open_gguf(few).fields
    fields["gemma3.block_count"] = 62
    assert model_config(few).windows == (5, 5, 5, 5, 5, 0)
    assert model_config(few).query_pre_attn_scalar == GEMMA3.width // GEMMA3.heads  # the 27B model
    fields["gemma3.attention.sliding_window_pattern"] = 1
    assert model_config(few).windows == () and model_config(few).rope_theta_local == 0
    fields["gemma3.block_count"] = fields["gemma3.attention.sliding_window_pattern"] = 2_000_000_000
    refused(ValueError, "layers=2,000,000,000", model_config, few)
    llama = write(tmp_path / "m.gguf", TINY, params()["decoder"], extra=("blk.0.post_ffw_norm.weight",))
    refused(ValueError, "blk.0.post_ffw_norm.weight", model_config, llama)


def q4_k(block):
    """ggml-common.h: 8 parts of 32 numbers, each d x scale x 4 bits - dmin x least, scale and least of 6 bits."""
    d, dmin = np.frombuffer(block[:4], np.float16).astype(np.float32)
    packed, bits, numbers = block[4:16], block[16:], []
    for part in range(8):
        if part < 4:
            scale, least = packed[part] & 63, packed[part + 4] & 63
        else:
            scale = packed[part + 4] & 15 | packed[part - 4] >> 6 << 4
            least = packed[part + 4] >> 4 | packed[part] >> 6 << 4
        four = [byte >> 4 * (part % 2) & 15 for byte in bits[part // 2 * 32 : part // 2 * 32 + 32]]
        numbers += [d * np.float32(scale) * np.float32(q) - dmin * np.float32(least) for q in four]
    return numbers


def q6_k(block):
    """ggml-common.h: 16 parts of 16 numbers, each d x scale x (6 bits - 32), 4 low and 2 high ones apart."""
    low, high, scale = block[:128], block[128:192], np.frombuffer(block[192:208], np.int8)
    d, numbers = np.frombuffer(block[208:], np.float16).astype(np.float32)[0], []
    for i in range(256):
        half, part, at = i // 128, i % 128 // 32, i % 32
        four = low[half * 64 + part % 2 * 32 + at] >> 4 * (part // 2) & 15
        two = high[half * 32 + at] >> 2 * part & 3
        numbers.append(d * np.float32(scale[i // 16]) * np.float32((four | two << 4) - 32))
    return numbers


def blocks(kind, shape, seed=0):
    """Random blocks of a quantisation type, of which every scale is a small number."""
    block, size = gguf.GGML_QUANT_SIZES[kind]
    data = np.random.default_rng(seed).integers(0, 256, (shape[0], shape[1] // block, size), np.uint8)
    scales = {"Q2_K": (80, 82), "Q3_K": (108,), "Q6_K": (208,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q5_1": (0, 2)}
    for at in scales.get(kind.name, (0,)):
        data[..., at + 1] = data[..., at + 1] % 16 + 16  # the exponent of a float16, whose low byte is the one before
    return data.reshape(shape[0], -1)


@pytest.mark.parametrize("kind", ["Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "Q8_0"])
def test_a_model_of_quantised_matrices_is_read(tmp_path, monkeypatch, kind):
    """Its blocks are dequantised bit for bit as the format says, or else as the package gguf does."""
    config = dataclasses.replace(TINY, width=256, mlp_width=256, head_dim=64, qkv_bias=False)
    kind = gguf.GGMLQuantizationType[kind]
    file = write(tmp_path / "m.gguf", config, params(config)["decoder"], "qwen3", quantised=kind)
    raw = blocks(kind, (256, 256))
    if exact := {"Q4_K": q4_k, "Q6_K": q6_k}.get(kind.name):
        expected = np.array([exact(block.tobytes()) for block in raw], np.float32)
    else:
        expected = gguf.dequantize(raw, kind)
    assert np.isfinite(expected).all() and len(np.unique(expected)) > 100
    monkeypatch.setattr(formats, "AT_ONCE", 5 * 256)  # rows at a time, the last ones fewer
    layer = load_decoder(file, model_config(file))["layers_0"]
    np.testing.assert_array_equal(layer["up"][0], expected.T)
    np.testing.assert_array_equal(layer["query"][1], expected.T.reshape(layer["query"].shape[1:]))


def test_a_type_that_holds_no_weights_or_is_not_known_is_refused(tmp_path):
    also = {"token_embd.weight": np.zeros((TINY.vocab_size, TINY.width), np.int8)}
    file = write(tmp_path / "m.gguf", TINY, params()["decoder"], also=also)
    refused(ValueError, "m.gguf: .*token_embd.weight", load_decoder, file, model_config(file))


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


def test_files_that_are_cut_or_of_another_kind_are_refused(tmp_path):
    decoder = params()["decoder"]
    whole = write(tmp_path / "m.gguf", TINY, decoder).read_bytes()
    for length in [0, 3, 100, 1000, len(whole) // 2, len(whole) - 40]:
        (tmp_path / "cut.gguf").write_bytes(whole[:length])
        refused(ValueError, "cut.gguf", GgufFile, tmp_path / "cut.gguf")
    (tmp_path / "text.gguf").write_text("not a model at all, only text" * 10)
    refused(ValueError, "text.gguf", GgufFile, tmp_path / "text.gguf")
    refused(FileNotFoundError, "none.gguf", GgufFile, tmp_path / "none.gguf")

    def bad(message, **changes):
        file = write(tmp_path / "other.gguf", TINY, decoder, **changes)
        refused(ValueError, f"other.gguf: .*{message}", lambda: load_decoder(file, model_config(file)))

    bad("'gemma'", architecture="gemma")
    yarn = dict(add_rope_scaling_type=gguf.RopeScalingType.YARN)
    bad("llama.rope.scaling.factor", **yarn)
    bad("positions=0", **yarn, add_rope_scaling_factor=4.0)
    bad("'longrope'", add_rope_scaling_type=gguf.RopeScalingType.LONGROPE,
            add_rope_scaling_factor=4.0)  # fmt: skip
    bad("llama.rope.scaling.attn_factor", add_rope_scaling_attn_factors=2.0)
    bad("rope_freqs.weight", extra=("rope_freqs.weight",))
    bad("sliding", add_sliding_window=8)
    bad("2 of 4", add_rope_dimension_count=2)
    bad("blk.1.ffn_up.weight", leave_out=("blk.1.ffn_up.weight",))
    bad("token_embd.weight", leave_out=("token_embd.weight",))
    bad("blk.2.attn_norm.weight", extra=("blk.2.attn_norm.weight",))
    for name in ("blk.0.attn_output.bias", "blk.0.ffn_down.bias", "blk.0.ffn_gate_exps.weight"):
        bad(f"{name}", extra=(name,))

    writer = gguf.GGUFWriter(tmp_path / "bare.gguf", "llama")  # such as a file that holds only a tokenizer
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    refused(ValueError, "bare.gguf: .*llama.attention.head_count", model_config, tmp_path / "bare.gguf")


def in_parts(path, count, tensors=10):
    """Writes a model of some tensors in several files, as llama.cpp's gguf-split names them; returns their paths."""
    writer = gguf.GGUFWriter(path / "m.gguf", "llama", split_max_tensors=-(-tensors // count))
    for i in range(tensors):
        writer.add_tensor(f"blk.{i}.w", np.full((2, 32), i, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return sorted(path.glob("m*.gguf"))


@pytest.mark.parametrize("count", [2, 5])
def test_a_model_in_several_files_is_read_by_any_of_them(tmp_path, count):
    files = in_parts(tmp_path, count)
    assert len(files) == count
    for file in files:
        whole = GgufFile(file)
        assert whole.architecture == "llama" and len(whole.tensors) == 10
        assert [whole.tensor(f"blk.{i}.w").max() for i in range(10)] == list(range(10))


def test_a_part_of_a_model_names_what_is_missing_and_the_tool_that_merges(tmp_path):
    first, second, third = in_parts(tmp_path, 3)
    third.rename(tmp_path / "other.gguf")
    refused(ValueError, "m-00003-of-00003.gguf is not there.*llama-gguf-split --merge", open_gguf, first)
    refused(ValueError, "a model in 3 files.*llama-gguf-split --merge", open_gguf, tmp_path / "other.gguf")
    third.write_bytes(second.read_bytes())
    refused(ValueError, "is not part 3 of 3", open_gguf, first)
