"""Scores of trees as arrays. A missing score is an error that names its step, never a step left out."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from jaxtyping import Float

from jprm.tree import ReasoningTree


class ScoreError(ValueError):
    """A scored record without the scores, labels or outcomes that an evaluation needs."""


def scores_of(
    trees: Sequence[ReasoningTree], names: Sequence[str] | None = None, *, probability: bool = False
) -> list[Float[np.ndarray, " N"]]:
    """Returns the scores of each tree's nodes. `names` name the trees in messages.

    Raises ScoreError where a node has no finite score, or with `probability` none in [0, 1].
    """
    flat = [node.score for tree in trees for node in tree.nodes]
    score_M = np.array([np.nan if score is None else score for score in flat], float)
    good_M = (score_M >= 0) & (score_M <= 1) if probability else np.isfinite(score_M)
    sizes = [len(tree.nodes) for tree in trees]
    if not good_M.all():
        first = int(np.argmin(good_M))
        tree = int(np.searchsorted(np.cumsum(sizes), first, side="right"))
        where = f"{names[tree] if names else f'record {tree}'}, step {first - sum(sizes[:tree])}"
        value = "no score" if flat[first] is None else f"score {flat[first]}"
        wanted = "a probability in [0, 1]" if probability else "a finite score"
        fix = "Score the file again with `jprm score`."
        if probability and np.isfinite(score_M).all():
            fix = (
                "Name the adapter of the model that scored them (--adapter), or score the file again with `jprm score`."
            )
        raise ScoreError(f"{where}: {value}. {(~good_M).sum()} of {len(flat)} steps lack {wanted}. {fix}")
    return np.split(score_M, np.cumsum(sizes)[:-1]) if trees else []
