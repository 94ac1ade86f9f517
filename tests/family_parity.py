"""How near the families of Hugging Face are, as a table in Markdown: `python tests/family_parity.py [KIND ...]`.

Tiny random models of transformers beside jprm, in float32 on a CPU. Every difference is the largest of any number, over
the largest number of its array:

    hidden states     of 48 tokens
    gradients         of every parameter, of a random sum of hidden states; the worst array
    packed = alone    scores of random trees, packed, and of every chain in a row of its own
    sharded           scores and gradients on four simulated devices, and on one
    float64           hidden states of transformers in float32 and in float64: what rounding does there

"""

from __future__ import annotations

import os

os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=4"

import contextlib
import pathlib
import sys
import tempfile
from collections.abc import Iterator
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import torch
from pod import FOLDERS
from tiny import Letters, chain_ids, chain_rows, packed_trees, placed, random_tree

from jprm.methods.formats.huggingface import load_decoder, model_config
from jprm.model import transformer

sys.path += FOLDERS
import test_huggingface as families

from jprm.model.config import ModelConfig
from jprm.model.mesh import MeshConfig, make_mesh, put_rows
from jprm.rows import Rows

TREES = [random_tree(seed, nodes=8) for seed in range(4)]


def apart(actual, wanted) -> float:
    """Returns the largest difference of any array over the largest number of that array."""

    def of_array(a, b) -> float:
        a, b = np.asarray(a), np.asarray(b)
        return float(np.abs(a - b).max() / (np.abs(b).max() or 1))

    distances = jax.tree.map(of_array, actual, wanted)
    return max(jax.tree.leaves(distances))


@contextlib.contextmanager
def in_float64() -> Iterator[None]:
    """Lets transformers' modules, which compute parts in float32, compute all of it in float64."""
    names = {"float32": torch.float64, "float": torch.float64}
    with contextlib.ExitStack() as stack:
        for name, value in names.items():
            stack.enter_context(mock.patch.object(torch, name, value))
        stack.enter_context(mock.patch.object(torch.Tensor, "float", torch.Tensor.double))
        yield


def loss(params, config: ModelConfig, rows: Rows):
    return jnp.sum(jnp.sin(transformer.step_logits(params, config, rows)[..., 0]) * rows.owned)


def with_head(decoder, config: ModelConfig) -> dict:
    kernel = jax.random.normal(jax.random.key(1), (config.width, 2)) * config.width**-0.5
    return {"decoder": decoder, "head": {"kernel": kernel, "bias": jnp.zeros(2)}}


def packed_apart(params, config: ModelConfig) -> float:
    packed, layout = packed_trees(TREES), Letters()
    score = np.asarray(jax.jit(transformer.step_logits, static_argnums=1)(params, config, packed.rows))
    slots = [(b, s) for b, s in np.argwhere(packed.node_BS >= 0)]
    chains = [chain_ids(TREES[packed.tree_BS[b, s]], packed.node_BS[b, s], layout) for b, s in slots]
    rows = chain_rows(chains, packed.rows.tokens.shape[1])
    alone = np.asarray(jax.jit(transformer.step_logits, static_argnums=1)(params, config, rows))[:, 0]
    return apart(np.array([score[b, s] for b, s in slots]), alone)


def sharded_apart(params, config: ModelConfig) -> float:
    packed = packed_trees(TREES).rows
    rows = jax.tree.map(lambda x: np.concatenate([x] * 4)[:4], packed)
    both = jax.jit(jax.value_and_grad(loss), static_argnums=1)
    wanted = both(params, config, rows)
    mesh = make_mesh(MeshConfig(1, 2, 1, 1, 2) if config.experts.count else MeshConfig(1, 2, 2), jax.devices()[:4])
    with jax.set_mesh(mesh):
        actual = both(placed(params, mesh), config, put_rows(rows, mesh))
    return apart(actual, wanted)


def of_family(kind: str, folder: pathlib.Path) -> dict[str, float]:
    model = families.make(folder, kind)
    config = model_config(folder, attention="reference", remat="nothing")
    decoder, ids = load_decoder(folder, config), torch.tensor([families.IDS])
    rows = chain_rows([families.IDS], len(families.IDS))
    hidden = jax.jit(lambda x: transformer.hidden({"decoder": x}, config, rows)[0])
    wanted_TD = families.expected(model)
    distances = {"hidden states": apart(hidden(decoder), wanted_TD), "of": float(np.abs(wanted_TD).max())}

    weight_TD = np.random.default_rng(1).normal(size=wanted_TD.shape).astype(np.float32)
    (getattr(model, "model", model)(ids).last_hidden_state[0] * torch.tensor(weight_TD)).sum().backward()
    values = {name: x.detach().clone() for name, x in model.named_parameters()}
    with torch.no_grad():
        for x in model.parameters():
            x.copy_(torch.zeros_like(x) if x.grad is None else x.grad)
    model.save_pretrained(folder / "gradients")
    gradients = jax.jit(jax.grad(lambda x: jnp.sum(hidden(x) * weight_TD)))(decoder)
    distances["gradients"] = apart(gradients, load_decoder(folder / "gradients", config))

    with torch.no_grad(), in_float64():
        for name, x in model.named_parameters():
            x.copy_(values[name])
        model.config._experts_implementation = "eager"
        exact_TD = families.expected(model.double())
    distances["transformers - float64"] = apart(wanted_TD, exact_TD)
    distances["jprm - float64"] = apart(hidden(decoder), exact_TD)
    params = with_head(decoder, config)
    distances["packed = alone"], distances["sharded"] = packed_apart(params, config), sharded_apart(params, config)
    return distances


def main() -> None:
    for n, kind in enumerate(sys.argv[1:] or families.NEW):
        with tempfile.TemporaryDirectory() as folder:
            report = of_family(kind, pathlib.Path(folder))
        if not n:
            print("| family | " + " | ".join(report) + " |\n" + "|---" * (len(report) + 1) + "|")
        print(f"| {kind} | " + " | ".join(f"{x:.2g}" for x in report.values()) + " |", flush=True)


if __name__ == "__main__":
    main()
