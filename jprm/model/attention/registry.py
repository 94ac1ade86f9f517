"""The attention implementations: all exact, chosen by `ModelConfig.attention`.

| name | for | rows | memory |
|---|---|---|---|
| `reference` | tests | any | O(T^2) |
| `blocked` | everything | any | O(block x T) |
| `paths` | CPUs | any, unsplit | O(block x T) |
| `kernel` | TPUs; interpreted on a CPU, slowly, for tests | any | O(T) |
| `gpu_kernel` | NVIDIA GPUs; compiled, not run on one yet; interpreted on a CPU for tests | any | O(T) |
| `cudnn` | NVIDIA GPUs; it has not run on one yet | one chain each, unsplit | O(T) |

Decoding with a cache has attention of its own (`jprm.model.decode`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax
from jaxtyping import Array, Float, Int

from jprm import registry
from jprm.methods.kernels.gpu import GPU_KERNEL, ampere_or_later
from jprm.methods.kernels.gpu_cudnn import CUDNN
from jprm.methods.kernels.tpu import KERNEL
from jprm.model.attention.blocked import BLOCKED
from jprm.model.attention.cpu_paths import PATHS
from jprm.model.attention.interface import Implementation
from jprm.model.attention.reference import REFERENCE
from jprm.model.mesh import parts

if TYPE_CHECKING:
    from jprm.model.config import ModelConfig

ATTENTION: dict[str, Implementation] = {
    "reference": REFERENCE, "blocked": BLOCKED, "paths": PATHS, "kernel": KERNEL,
    "gpu_kernel": GPU_KERNEL, "cudnn": CUDNN,
}  # fmt: skip
"""Name to implementation. A config may also name one of the user's own module, as `module:NAME`."""


def find(name: str) -> Implementation:
    """Returns the implementation of the name. Raises ValueError where there is none."""
    return registry.find(name, ATTENTION, "attention", Implementation)


def check(name: str, config: ModelConfig, backend: str | None = None, context: int = 1) -> Implementation:
    """Returns the implementation. Raises ValueError where it refuses the model, the backend or rows in so many parts.

    backend: of jax, or None for any.
    """
    found = find(name)
    if reason := found.refuses(config, backend, context):
        raise ValueError(reason)
    return found


def plan(until_BT: Int[Array, "B T"], position_BT: Int[Array, "B T"], config: ModelConfig) -> Any:
    """Returns what `config.attention` needs to know of the rows. Raises ValueError where it refuses them, or this
    backend."""
    own = check(config.attention, config, jax.default_backend(), parts(until_BT))
    return own.plan(until_BT, position_BT, config)


def attend(q_BTKGH, k_BSKH, v_BSKH, plan: Any, config: ModelConfig, window=None) -> Float[Array, "B T K G H"]:
    """Returns grouped-query attention by `config.attention`, as `Implementation.attend`."""
    return find(config.attention).attend(q_BTKGH, k_BSKH, v_BSKH, plan, config, window)


FAST = {"cpu": "paths", "gpu": "gpu_kernel"}
"""The fastest implementation by backend; `blocked` on others."""


def suited(name: str) -> str:
    """Returns the name of the implementation, or of the fastest one here if it is for other machines.

    On a GPU, `gpu_kernel` also takes the place of `blocked`, which published models and old runs name.
    """
    here = jax.default_backend()
    fast = FAST.get(here, "blocked") if here != "gpu" or ampere_or_later() else "blocked"
    if find(name).backend not in ("", here) or (name == "blocked" and here == "gpu"):
        return fast
    return name
