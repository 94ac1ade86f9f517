"""What `jprm convert --format peft` writes: a LoRA run's adapters and head, for PEFT's token classifier."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

import jax
import numpy as np

from jprm.checkpoints import huggingface, store
from jprm.checkpoints.kinds import PUBLISHED
from jprm.checkpoints.peft import PREFIX
from jprm.experiment import Experiment
from jprm.io.local_copy import local_copy
from jprm.io.storage import path_of
from jprm.model.heads import find
from jprm.model.lora import PRODUCTS, A, B
from jprm.model.mesh import make_mesh
from jprm.score.scorer import PRM


def check(prm: PRM, experiment: Experiment) -> None:
    """Raises ValueError for a model that has no adapters, or whose head or base PEFT cannot load."""
    if not experiment.lora.rank:
        raise ValueError(
            f"{prm.name}: was trained without adapters (lora.rank=0); --format transformers writes it whole"
        )
    if not find(prm.config.head).classifier or "hidden_kernel" in prm.params["head"]:
        raise ValueError(f"{prm.name}: PEFT's token classifiers have a linear head over classes of one softmax")
    if not experiment.base or not (path_of(experiment.base) / PUBLISHED).is_file():
        raise ValueError(
            f"{prm.name}: its base {experiment.base or 'of random parameters'!r} is no Hugging Face folder, so PEFT has"
            " nothing to put the adapters on; --format transformers merges them"
        )
    if (layers := huggingface.model_config(local_copy(experiment.base, (PUBLISHED,))).layers) != prm.config.layers:
        raise ValueError(
            f"{prm.name}: has {prm.config.layers} of its base's {layers} layers, and PEFT would use them all;"
            " --format transformers merges the adapters"
        )


def tensors(prm: PRM, experiment: Experiment) -> dict[str, np.ndarray]:
    """Returns the file's tensors by name, in float32: A and B, a layer at a time, and the linear head."""
    mesh = make_mesh(devices=jax.devices()[:1])
    with jax.set_mesh(mesh):
        params, _ = store.load_params(prm.name, experiment, mesh)
    arrays: dict[str, np.ndarray] = {}
    first = 0
    for group, layers in enumerate(prm.config.layer_groups):
        stack = params["decoder"][f"layers_{group}"]
        for role in (role for role in PRODUCTS if role + A in stack):
            a, b = np.asarray(stack[role + A]), np.asarray(stack[role + B])
            rank = a.shape[-1]
            for i in range(layers):
                name = huggingface.name_of(role, first + i, prm.config).removesuffix(".weight")
                arrays[f"{PREFIX}model.{name}.lora_A.weight"] = np.ascontiguousarray(a[i].reshape(-1, rank).T)
                arrays[f"{PREFIX}model.{name}.lora_B.weight"] = np.ascontiguousarray(b[i].reshape(rank, -1).T)
        first += layers
    arrays[f"{PREFIX}score.weight"] = np.ascontiguousarray(np.asarray(params["head"]["kernel"]).T)
    arrays[f"{PREFIX}score.bias"] = np.asarray(params["head"]["bias"])
    return arrays


def config_json(experiment: Experiment, names: Iterable[str]) -> dict[str, Any]:
    """Returns the content of adapter_config.json. PEFT compares `target_modules` with the ends of modules' names."""
    lora = experiment.lora
    layered = (re.search(r"layers\.\d+\..+(?=\.lora_A\.weight)", name) for name in names)
    return {
        "peft_type": "LORA",
        "task_type": "TOKEN_CLS",
        "base_model_name_or_path": experiment.base,
        "r": lora.rank,
        "lora_alpha": int(lora.alpha) if lora.alpha == int(lora.alpha) else lora.alpha,
        "use_rslora": lora.rslora,
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "init_lora_weights": True,
        "target_modules": [found[0] for found in layered if found],
        "modules_to_save": ["score"],
        "inference_mode": True,
    }
