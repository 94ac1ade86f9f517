"""Records into trees, and scores into records as files hold them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jprm.tree import ReasoningTree, in_order_of, record_of, tree_of, with_scores


def chain_tree(problem: str, steps: Sequence[str]) -> ReasoningTree:
    """Returns the tree of one chain. Raises TypeError for steps that are one string, ValueError for blank text."""
    if isinstance(steps, str):
        raise TypeError("steps is one string: pass a list of steps, [text] where there is one")
    return tree_of({"problem": problem, "steps": list(steps)})


def check_finite(tree: ReasoningTree, name: str, value_N: np.ndarray) -> None:
    if not np.isfinite(value_N).all():
        node = int(np.argmin(np.isfinite(value_N).reshape(len(value_N), -1).all(1)))
        raise FloatingPointError(
            f"problem {tree.problem[:60]!r}, step {node}: the model's {name} is {value_N[node]}; its checkpoint (or a"
            " bfloat16 overflow) is at fault: use an earlier checkpoint or float32"
        )


def scored(record: dict[str, Any], tree: ReasoningTree, outputs: Mapping[str, np.ndarray]) -> dict[str, Any]:
    """Returns the record of `tree` with the outputs as they are written, its keys in the order of `record`.

    Of `outputs`, (N,) each, `score` becomes the nodes' score and the others their named outputs.
    """
    columns = {name: list(map(as_written, value_N)) for name, value_N in outputs.items()}
    return in_order_of(record, record_of(with_scores(tree, columns.pop("score", []), columns)))


def as_written(score: float) -> float:
    """Returns the score as files hold it: seven decimals, or seven digits where it is small, as float32 has."""
    return float(f"{score:.7g}") if abs(score) < 0.1 else round(float(score), 7)
