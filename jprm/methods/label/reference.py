"""Log-probabilities of a frozen language model, computed once for all training against it (`implicit`)."""

from __future__ import annotations

import dataclasses
import os
import pathlib
from collections.abc import Sequence

import jax

from jprm.checkpoints import base
from jprm.devices import enable_compile_cache
from jprm.io.storage import path_of
from jprm.layout import native_layout
from jprm.model.heads import of_channels
from jprm.model.int8 import Dtype
from jprm.model.mesh import MeshConfig, make_mesh
from jprm.score.implicit import LogProbability
from jprm.score.scorer import PRM
from jprm.token_tree import REFERENCE
from jprm.tokenizer import load_tokenizer
from jprm.tree import ReasoningTree, without_chain


def load_reference(path: str | os.PathLike, dtype: Dtype = "float32") -> PRM:
    """Returns a language model whose score of a step is the log-probability of the chain's steps up to it.

    `path` is like an experiment's `base`. Raises ValueError for a model without a language head.
    """
    enable_compile_cache()
    attention = "paths" if jax.default_backend() == "cpu" else "blocked"
    config = base.model_config(path, head=of_channels(0), attention=attention)
    grid = make_mesh(MeshConfig(), jax.local_devices())
    with jax.set_mesh(grid):
        params = {"decoder": base.load_decoder(path, config, dtype)}
        if not config.tied_embeddings:
            params["head"] = base.load_language_head(path, config)
    layout = native_layout(load_tokenizer(path, config.vocab_size))
    name = str(path_of(path).resolve())
    return PRM(params, config, layout, grid, "implicit", name, 0, ratio=LogProbability(config))


def label_trees(reference: PRM, trees: Sequence[ReasoningTree]) -> list[ReasoningTree]:
    """Returns the trees with the log-probability of every node's steps in its `extra`, and the model's name."""
    made = []
    for tree, log_N in zip(trees, reference.score_trees(trees), strict=True):
        nodes = tuple(
            dataclasses.replace(node, extra={**node.extra, REFERENCE: float(log)})
            for node, log in zip(tree.nodes, log_N, strict=True)
        )
        extra = {**without_chain(tree.extra), REFERENCE: pathlib.Path(reference.name).name}
        made.append(dataclasses.replace(tree, nodes=nodes, kind="tree", extra=extra))
    return made
