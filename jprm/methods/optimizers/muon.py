"""Muon for matrices and Adam for the rest: `optimizer.name=muon` (Jordan et al. 2024, by optax.contrib).

A parameter is a matrix if its kind says which axes its product sums over (`jprm.model.layers.Weight.inputs`). Layers
are stacked on a leading axis, which is a batch of matrices. Orthogonalising a matrix takes all of it, so every device
gathers the matrices that the mesh splits, and keeps its own part of the result.
"""

from __future__ import annotations

from typing import Any, cast

import jax
import optax
from jax.sharding import PartitionSpec
from optax.contrib import MuonDimensionNumbers, scale_by_muon

from jprm.experiment import OptimizerConfig
from jprm.model import layers


def muon(config: OptimizerConfig) -> optax.GradientTransformation:
    """Returns Muon with momentum `b1` for matrices, and Adam with `b1`, `b2` and `eps` for the rest.

    It takes flat parameters {path: array}, and applies neither learning rate nor weight decay.
    """

    def axes(flat: Any) -> Any:
        return {path: dimensions(path) or optax.MaskedNode() for path in flat}

    def kind(flat: Any) -> Any:
        return {path: "muon" if dimensions(path) else "adam" for path in flat}

    matrices = _gathered(scale_by_muon(beta=config.b1, weight_dimension_numbers=axes))
    return optax.partition({"muon": matrices, "adam": optax.scale_by_adam(config.b1, config.b2, config.eps)}, kind)


def dimensions(path: str) -> MuonDimensionNumbers | None:
    """Returns the axes that the product of the stacked matrix at `path` sums over, and the others.

    The layer axis 0 is in neither. `None` for other parameters, e.g. norms and the head.
    """
    try:
        weight = layers.weight_of(path.rpartition("/")[2])
    except KeyError:
        return None
    summed = [i for i, axis in enumerate(weight.axes, start=1) if axis in weight.inputs]
    rest = [i for i, axis in enumerate(weight.axes, start=1) if axis not in weight.inputs]
    return MuonDimensionNumbers(tuple(summed), tuple(rest)) if summed else None


def _gathered(inner: optax.GradientTransformation) -> optax.GradientTransformation:
    """Returns the transformation of whole matrices. optax multiplies them, which split ones refuse."""

    def whole(tree):
        return jax.tree.map(lambda x: jax.sharding.reshard(x, PartitionSpec()), tree)

    def update(updates: Any, state: Any, params: Any = None):
        places = jax.tree.map(lambda x: jax.typeof(x).sharding.spec, updates)
        split = lambda tree: jax.tree.map(jax.sharding.reshard, tree, places)  # noqa: E731
        updates, new = inner.update(whole(updates), state._replace(mu=whole(state.mu)), params)
        return split(updates), cast(Any, new)._replace(mu=split(cast(Any, new).mu))

    return optax.GradientTransformation(inner.init, update)
