"""`ModelConfig`: one frozen record for every decoder that jprm computes."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, Literal

import flax.linen as nn
import jax
import numpy as np

from jprm.options import find_part

KINDS = {
    "attention": "jprm.model.transformer:ATTENTION",
    "deltanet": "jprm.methods.layers.deltanet:DELTANET",
    "dense": "jprm.model.transformer:DENSE",
    "experts": "jprm.methods.layers.experts:EXPERTS",
    "sinks": "jprm.methods.layers.attending:SINKS",
}
"""Layer kinds by name (`jprm.model.layers`), imported on first use; `module:NAME` is the user's own."""

NORMS = ("attention_norm", "mlp_norm", "attention_post_norm", "mlp_post_norm")
"""Before the mixer, before the MLP, after the mixer, after the MLP."""

MOST_LAYERS = 10_000
"""A limit, so that a damaged file cannot fill the memory; published models have at most 126."""


@dataclasses.dataclass(frozen=True)
class RopeScaling:
    """How the frequencies differ from theta^(-2i / head_dim). A kind's unused fields keep their defaults.

    linear: divides all by `factor` (Chen et al. 2023).
    llama3: divides long wavelengths by `factor`, keeps short ones, blends between (Llama 3.1's `apply_scaling`).
    yarn: the same by a ramp over the pairs, and multiplies cos and sin by `attention_factor` (Peng et al. 2023).
    """

    kind: Literal["none", "linear", "llama3", "yarn"] = "none"
    factor: float = 1.0
    positions: int = 0  # of the context before it was stretched; llama3 and yarn
    low: float = 1.0  # llama3: low_freq_factor; yarn: beta_slow
    high: float = 1.0  # llama3: high_freq_factor; yarn: beta_fast
    attention_factor: float = 1.0
    truncate: bool = True  # yarn: the ends of the ramp are whole pairs

    def __post_init__(self):
        if self.kind not in ("none", "linear", "llama3", "yarn"):
            raise ValueError(f"rope_scaling.kind={self.kind!r} is not one of none, linear, llama3, yarn")
        if not self.factor > 0 or not self.attention_factor > 0:
            raise ValueError(f"rope_scaling: factor={self.factor} and attention_factor must be positive")
        if self.kind in ("llama3", "yarn") and (self.positions < 1 or not 0 < self.low < self.high):
            raise ValueError(
                f"rope_scaling: {self.kind} needs positions={self.positions} of at least 1 and"
                f" 0 < low={self.low} < high={self.high}"
            )


@dataclasses.dataclass(frozen=True)
class DeltaNetConfig:
    """Options of `deltanet` layers (`jprm.methods.layers.deltanet`). Value heads share key heads in order."""

    key_heads: int = 0
    value_heads: int = 0
    key_dim: int = 0
    value_dim: int = 0
    conv: int = 4  # tokens of the convolution
    chunk: int = 64  # tokens that are computed together
    states: int = 0  # kept of a row; 0: `deltanet.bound`

    def __post_init__(self):
        if min(self.key_heads, self.value_heads, self.key_dim, self.value_dim, self.states) < 0:
            raise ValueError(f"deltanet: {self} has a negative size")
        if self.conv < 2 or self.chunk < 1:
            raise ValueError(f"deltanet: conv={self.conv} must be at least 2, and chunk={self.chunk} at least 1")


@dataclasses.dataclass(frozen=True)
class ExpertsConfig:
    """Options of `experts` MLPs (`jprm.methods.layers.experts`)."""

    count: int = 0
    used: int = 0  # for each token
    width: int = 0  # of one expert
    normalised: bool = True  # the weights of those that are used sum to 1
    shared_width: int = 0  # Qwen3-Next: of an expert that all tokens use; 0: there is none
    clamp: float = 0.0  # gpt-oss: limit of a clamped SwiGLU, with biases; 0: SwiGLU without biases
    balance: float = 0.0  # factor of the load-balancing loss, added to objectives at step ends; transformers' is 0.001

    def __post_init__(self):
        if min(self.count, self.used, self.width, self.shared_width, self.clamp, self.balance) < 0:
            raise ValueError(f"experts: {self} has a negative size or factor")


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class ModelConfig:
    vocab_size: int
    layers: int
    width: int
    heads: int
    kv_heads: int
    head_dim: int
    mlp_width: int
    rope_theta: float
    norm_eps: float
    qkv_bias: bool = False  # Qwen2
    out_bias: bool = False  # gpt-oss: of attention's output projection
    qk_norm: bool = False  # Qwen3, Gemma 3: RMSNorm of every query and key head
    qk_width_norm: bool = False  # OLMo 2 and 3: RMSNorm of all query heads together, and of all key heads
    attention_gate: bool = False  # Qwen3-Next, Qwen3.5: heads' outputs are multiplied by the sigmoid of a projection
    design: Literal["llama", "gemma", "glm", "olmo", "qwen3_next"] = "llama"
    """gemma: norms multiply by 1 + w, two more norms follow attention and MLP, the gate is GELU (by tanh) instead of
        SiLU, and the embedding is multiplied by sqrt(width). glm: the same four norms. olmo: norms follow attention
        and MLP, and none precede them. qwen3_next: norms multiply by 1 + w."""
    mixers: tuple[str, ...] = ()
    """Mixer per layer, repeated over the layers: names in `KINDS` or `module:NAME`, e.g. three `deltanet` and one
    `attention`. () is attention everywhere."""
    mlps: tuple[str, ...] = ()  # the same for MLPs; (): dense everywhere
    deltanet: DeltaNetConfig = DeltaNetConfig()
    experts: ExpertsConfig = ExpertsConfig()
    windows: tuple[int, ...] = ()
    """Sliding window per layer, repeated over the layers, e.g. (4096, 0). A query sees keys less than n positions
    before it; 0 is no window, () no window in any layer."""
    rope_layers: tuple[int, ...] = ()
    """SmolLM3: 0 for each layer without rotation, repeated as windows are; () rotates in all layers."""
    rotary_dim: int = 0  # Qwen3-Next, Phi-4-mini: of a head, that are rotated; 0: all of head_dim
    query_growth: tuple[float, ...] = ()  # Ministral 3: beta, and positions after which queries grow; () is none
    rope_theta_local: float = 0.0  # Gemma 3: of layers with a window, unscaled; 0: rope_theta
    query_pre_attn_scalar: int = 0  # Gemma: attention's logits are divided by its root; 0: head_dim
    attention_softcap: float = 0.0  # Gemma 2: attention's logits x become cap tanh(x / cap); 0: no cap
    logit_softcap: float = 0.0  # Gemma 2: the same for the language head's logits
    rope_scaling: RopeScaling = RopeScaling()  # Llama 3.1, and contexts stretched after training
    tied_embeddings: bool = True  # matters to the language head only
    head: str = "binary"  # a name in `jprm.model.heads.HEADS`, or module:NAME
    head_hidden: bool = False  # Qwen2.5-Math-PRM: a layer of the decoder's width and a ReLU precede the head
    steps: str = ""  # a layer of states at step ends before the head, module:NAME (`step_layer`); "": none
    layer_groups: tuple[int, ...] = ()
    """Layers are stacked and scanned in these groups, `layers_0`, `layers_1`, ...; () is one group. A freezing rule
    can name a group, and frozen groups below the first trained one need no backward pass. A single group always has
    all `layers`."""
    dtype: Literal["float32", "bfloat16"] = "float32"  # of the computation; parameters are float32
    remat: Literal["nothing", "dots", "attention", "full"] = "full"
    """The backward pass recomputes: nothing; everything but products; the MLP (attention is kept); everything but
    layer inputs. Memory falls in this order."""
    product_layers: int = 0
    """Each group's last layers, this many, keep products like `remat="dots"`, as memory allows."""
    attention: str = "blocked"  # a name in `jprm.model.attention.ATTENTION`, or module:NAME
    attention_block: int = 256  # queries a block of `blocked` and `paths`; `kernel` chooses its own

    def __post_init__(self):
        for field in _COUNTS:
            if not 0 < getattr(self, field) < 2**31:
                raise ValueError(f"{field}={getattr(self, field)} must be a positive integer")
        if self.layers > MOST_LAYERS:
            raise ValueError(f"layers={self.layers:,}: at most {MOST_LAYERS:,} are supported")
        if not 1 < self.rope_theta < math.inf or not 0 < self.norm_eps < math.inf:
            raise ValueError(f"rope_theta={self.rope_theta} must be above 1, norm_eps={self.norm_eps} above 0")
        if not 0 <= self.product_layers <= self.layers:
            raise ValueError(f"product_layers={self.product_layers} must be from 0 to layers={self.layers}")
        if len(self.layer_groups) < 2:
            object.__setattr__(self, "layer_groups", (self.layers,))
        object.__setattr__(self, "layer_groups", tuple(self.layer_groups))
        if sum(self.layer_groups) != self.layers or min(self.layer_groups) < 1:
            raise ValueError(f"layer_groups {self.layer_groups} must be positive and add up to layers={self.layers}")
        if self.heads % self.kv_heads:
            raise ValueError(f"heads={self.heads} is not a multiple of kv_heads={self.kv_heads}")
        if self.head_dim % 2:
            raise ValueError(f"head_dim={self.head_dim} is odd; rotary embeddings rotate pairs")
        self._check_kinds()
        for field in ("rope_theta_local", "query_pre_attn_scalar", "attention_softcap", "logit_softcap"):
            if not 0 <= getattr(self, field) < math.inf:
                raise ValueError(f"{field}={getattr(self, field)} must be a positive number, or 0 for none")
        if self.rope_theta_local and not self.windows:
            raise ValueError(f"rope_theta_local={self.rope_theta_local} needs layers with a window: set windows")
        for field, values in _CHOICES.items():
            if getattr(self, field) not in values:
                raise ValueError(f"{field}={getattr(self, field)!r} is not one of {', '.join(values)}")

    def _check_kinds(self) -> None:
        """Normalises the layer patterns, so that equal models have equal configs; refuses invalid ones."""
        short = {place: name for name, place in KINDS.items()}  # so that one kind has one name
        for field, plain in (("mixers", "attention"), ("mlps", "dense")):
            pattern = tuple(short.get(name, name) for name in getattr(self, field))
            pattern = () if set(pattern) <= {plain} else pattern[: _repeats(pattern)]
            object.__setattr__(self, field, pattern)
        windows, rope = tuple(self.windows), tuple(map(int, self.rope_layers))
        if min(windows, default=0) < 0:
            raise ValueError(f"windows {windows} must be positive, or 0 for a layer that sees all")
        object.__setattr__(self, "windows", windows[: _repeats(windows)] if any(windows) else ())
        object.__setattr__(self, "rope_layers", () if all(rope) else rope[: _repeats(rope)])
        object.__setattr__(self, "query_growth", tuple(map(float, self.query_growth)))
        if self.query_growth and (len(self.query_growth) != 2 or min(self.query_growth) <= 0):
            raise ValueError(
                f"query_growth {self.query_growth} must be beta and positions, both positive, or () for none"
            )
        if self.rotary_dim % 2 or not 0 <= self.rotary_dim <= self.head_dim:
            raise ValueError(f"rotary_dim={self.rotary_dim} must be even and at most head_dim={self.head_dim}")
        if self.qk_norm and self.qk_width_norm:
            raise ValueError("qk_norm and qk_width_norm are norms of the same queries and keys; choose one")

    @property
    def centred_norms(self) -> bool:
        return self.design in ("gemma", "qwen3_next")

    @property
    def norms(self) -> tuple[str, ...]:
        """The names in `NORMS` that each layer has, in their order."""
        first, count = {"gemma": (0, 4), "glm": (0, 4), "olmo": (2, 2)}.get(self.design, (0, 2))
        return NORMS[first : first + count]

    @property
    def group(self) -> int:
        """Query heads per key-value head."""
        return self.heads // self.kv_heads

    @property
    def query_scale(self) -> float:
        return (self.query_pre_attn_scalar or self.head_dim) ** -0.5


def frequencies(head_dim: int, theta: float, scaling: RopeScaling = RopeScaling()) -> np.ndarray:
    """Returns theta^(-2 i / head_dim), scaled, (head_dim / 2,) float32 radians per position, not `attention_factor`."""
    H = head_dim
    power_H = np.float32(theta) ** (np.arange(0, H, 2, dtype=np.float32) / np.float32(H))
    plain_H = np.float32(1) / power_H
    slow_H = plain_H / np.float32(scaling.factor)
    if scaling.kind == "none":
        return plain_H
    if scaling.kind == "linear":
        return slow_H
    if scaling.kind == "llama3":
        turns_H = scaling.positions * plain_H / np.float32(2 * math.pi)  # over the old context
        fast_H = (turns_H - scaling.low) / (scaling.high - scaling.low)
    else:

        def pair(turns: float) -> float:
            """Returns the (fractional) pair index that makes `turns` turns over the old context."""
            return H * math.log(scaling.positions / (turns * 2 * math.pi)) / (2 * math.log(theta))

        first, last = pair(scaling.high), pair(scaling.low)
        if scaling.truncate:
            first, last = math.floor(first), math.ceil(last)
        first, last = max(first, 0), min(last, H - 1)
        width = last - first if last != first else 0.001
        fast_H = 1 - (np.arange(H // 2, dtype=np.float32) - first) / width
    fast_H = np.clip(fast_H, 0, 1).astype(np.float32)
    return slow_H * (1 - fast_H) + plain_H * fast_H


def step_layer(name: str) -> type[nn.Module]:
    """Returns the module named by `ModelConfig.steps` (`module:NAME`); it changes the hidden states at step ends.

    It must be a Linen module with one field, `config`, called with states x_BSD (B, S, D), after the final norm and in
    the computation dtype, and parent_BS (B, S), the previous step's slot (-1 at a first step). It returns states with
    the same shape. Its parameters are `params["steps"]`: trained with the head, always float32.

    A step's state must depend only on earlier steps in its own chain. Slots hold whole trees in training, one chain in
    a live search, and padding with parent -1.

    Raises ValueError if there is no such class, or it is no Linen module.
    """
    layer = find_part(name, {}, "model.steps", type)
    if not issubclass(layer, nn.Module):
        raise ValueError(f"model.steps={name!r} is {layer.__name__}, not a flax.linen.Module")
    return layer


def own_parts(config: ModelConfig) -> dict[str, Any]:
    """Returns the parts named `module:NAME` in the config, as `own_names`. Raises MissingPart if one does not exist."""
    return {field: find_part(name, {}, f"model.{field}") for field, name in own_names(config).items()}


def own_names(config: ModelConfig) -> dict[str, str]:
    """Returns a config's `module:NAME` values by field, e.g. {"mixers.0": "mymodule:NAME"} for a pattern's first."""
    named: dict[str, Any] = {}
    for field, value in ((field.name, getattr(config, field.name)) for field in dataclasses.fields(config)):
        named |= {f"{field}.{i}": x for i, x in enumerate(value)} if isinstance(value, tuple) else {field: value}
    return {field: name for field, name in named.items() if isinstance(name, str) and ":" in name}


def _repeats(pattern: tuple) -> int:
    """Returns the length of the shortest prefix that repeats to the pattern."""
    return next((n for n in range(1, len(pattern)) if pattern[n:] == pattern[: len(pattern) - n]), len(pattern))


_COUNTS = (
    "vocab_size", "layers", "width", "heads", "kv_heads", "head_dim", "mlp_width", "attention_block",
)  # fmt: skip
_CHOICES = {
    "design": ("llama", "gemma", "glm", "olmo", "qwen3_next"),
    "dtype": ("float32", "bfloat16"),
    "remat": ("nothing", "dots", "attention", "full"),
}
