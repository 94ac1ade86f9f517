"""A group of samples as one tree of tokens: what samples share is computed once.

Samples through one token share its probability ratio r. So two numbers a token carry any group exactly, the sums U and
D of its samples' positive and negative advantages:

    sum_i min(r A_i, clip(r) A_i) = min(r, 1 + high) U + max(r, 1 - low) D
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
from jaxtyping import Float, Int

from jprm.methods.rl.trajectory import Trajectory
from jprm.token_tree import TokenTree, merged, next_tokens, ranges

EXTRAS = ("old", "gain", "penalty", "count")
"""Of every slot: the token's log-probability when it was sampled, the sum of the positive advantages of the samples
through it, the sum of the negative ones, and the number of these samples."""

SPREAD = 1.0
"""Log-probabilities of one shared token differ between samples by rounding alone, in bfloat16 by tenths."""


def group_tree(
    name: str,
    prompt_ids: Sequence[int],
    trajectories: Sequence[Trajectory],
    advantage: Sequence[Float[np.ndarray, " T"]],
    weight: Sequence[Float[np.ndarray, " T"]] | None = None,
) -> TokenTree:
    """Returns the tree of a group, with a slot for every sampled token: see `jprm.token_tree.next_tokens`.

    A slot's weight is the sum of its samples' weights, by default their number: what the KL term and metrics multiply,
    and what makes `next_token` on the tree the likelihood of the samples. Its extras are `EXTRAS`.

    Args:
        name: for error messages.
        advantage: of every token of every sample, norms folded in (`jprm.methods.rl.credit.token_advantages`).
        weight: of every token of every sample (`jprm.methods.rl.credit.token_weights`).

    Raises ValueError for a group or a sample without tokens, arrays of other lengths, and samples of different models:
    their log-probabilities of a shared token differ.
    """
    lengths = [len(one.ids) for one in trajectories]
    weight = [np.ones(length) for length in lengths] if weight is None else weight
    if not lengths or not min(lengths) or not len(prompt_ids):
        raise ValueError(f"{name!r}: a group has a prompt and at least one sample, and samples have tokens")
    for what, arrays in {"advantages": advantage, "weights": weight}.items():
        if [len(array) for array in arrays] != lengths:
            raise ValueError(f"{name!r}: {what} for {[len(x) for x in arrays]} tokens, the samples have {lengths}")
        if not all(np.isfinite(array).all() for array in arrays):
            raise ValueError(f"{name!r}: {what} are not all finite")
    shared = merged(name, prompt_ids, [one.ids for one in trajectories])
    tree = next_tokens(shared)
    slot_K = _slots(shared, tree)
    old_K = np.concatenate([np.asarray(one.log_probability_T, np.float64) for one in trajectories])
    advantage_K = np.concatenate(advantage).astype(np.float64)

    def total(value_K):
        return np.bincount(slot_K, value_K, len(tree.node_M))

    count_M = total(np.ones(len(slot_K)))
    old_M = total(old_K) / count_M
    if (spread := np.abs(old_K - old_M[slot_K]).max()) > SPREAD:
        raise ValueError(
            f"{name!r}: log-probabilities of a shared token lie {spread:.2f} from their mean, so that these samples are"
            " of different models or temperatures. Make a group of each"
        )
    extras = {
        "old": old_M,
        "gain": total(np.maximum(advantage_K, 0.0)),
        "penalty": total(np.minimum(advantage_K, 0.0)),
        "count": count_M,
    }
    return dataclasses.replace(
        tree,
        weight_M=total(np.concatenate(weight)).astype(np.float32),
        extras={key: extras[key].astype(np.float32) for key in EXTRAS},
    )


def _slots(shared: TokenTree, tree: TokenTree) -> Int[np.ndarray, " K"]:
    """Returns the slot of every token of every sample, one sample after the other."""
    slot_N = np.full(len(tree.tokens_N), -1)
    slot_N[tree.node_M] = np.arange(len(tree.node_M))
    paths = []
    for run in shared.run_M[np.argsort(shared.node_M)].tolist():
        path = []
        while run > 0:  # run 0 is the prompt
            path.append(run)
            run = int(shared.parent_R[run])
        path_R = np.array(path[::-1])
        paths.append(slot_N[ranges(shared.start_R[path_R], shared.length_R[path_R])])
    return np.concatenate(paths)
