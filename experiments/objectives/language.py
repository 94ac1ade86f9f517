"""Implicit PRMs of which only the last layers are trained, on a frozen decoder's states of every token.

The reference is the same decoder as it was, so that its log-probabilities are kept beside the states.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import pathlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Bool, Float

from experiments.objectives import states
from experiments.objectives.heads import orders
from jprm.experiment import Experiment
from jprm.io.outputs import Bar
from jprm.methods.implicit import log_probs_of, on_paths, path_sum, scored_tokens
from jprm.model.config import ModelConfig
from jprm.model.layers import rms_norm
from jprm.model.transformer import norm_scale
from jprm.objectives import find
from jprm.pack import Packed
from jprm.rows import Rows
from jprm.token_tree import Supervise
from jprm.tree import ReasoningTree, with_scores

GROUPS = (26, 4)
"""Layers that stay as they are, and those that are trained. Logits cost as much as eight layers."""


@dataclasses.dataclass(frozen=True)
class Fit:
    """How layers are trained. The rate was chosen on validation pools of ChatGPT, by cross-entropy."""

    epochs: int = 1
    rows: int = 1
    learning_rate: float = 3e-4
    weight_decay: float = 0.01


class KnownTexts(NamedTuple):
    """Trees, the rows of every chunk of them, the states below the trained layers and the reference's log p."""

    trees: list[ReasoningTree]
    packed: list[Packed]
    x_KRTD: list[Float[np.ndarray, "R T D"]]
    reference_KRT: list[Float[np.ndarray, "R T"]]


@functools.cache
def frozen() -> states.Frozen:
    return states.Frozen.load(GROUPS, "language")


def known(
    path: pathlib.Path, folder: pathlib.Path, problems: int | None, supervise: Supervise = "outcome"
) -> KnownTexts:
    """Returns a file's trees and the states of their tokens, which it computes where `folder` lacks them."""
    folder = folder / f"tokens_after_{GROUPS[0]}"
    trees, chunks = states.known(path, folder, problems, lambda: _chunk)
    packed = [states.packed(trees[i : i + states.CHUNK], supervise) for i in range(0, len(trees), states.CHUNK)]
    for rows, chunk in zip(packed, chunks, strict=True):
        if not np.array_equal(rows.rows.tokens, chunk["token_RT"]):
            raise ValueError(f"{folder}: has the states of other trees than {path}: delete the folder")
    return KnownTexts(trees, packed, [chunk["x_RTD"] for chunk in chunks], [chunk["reference_RT"] for chunk in chunks])


def _chunk(trees: Sequence[ReasoningTree]) -> states.Chunk:
    model, rows = frozen(), states.packed(trees, "outcome").rows
    x_RTD = np.zeros((*rows.tokens.shape, model.config.width), np.float16)
    reference_RT = np.zeros(rows.tokens.shape, np.float32)
    for i in range(len(rows.tokens)):
        row = jax.tree.map(lambda x, i=i: x[i : i + 1], rows)
        x_RTD[i] = np.asarray(states.below(model.params, model.config, row))[0]
        # From the states as they are kept, so that an untrained model's log ratio is exactly 0.
        reference_RT[i] = np.asarray(log_probs(model.params, model.config, row, x_RTD[i : i + 1], of_steps(row)))[0]
    return {"token_RT": rows.tokens, "x_RTD": x_RTD, "reference_RT": reference_RT}


@functools.partial(jax.jit, static_argnums=1)
def log_probs(
    params: dict[str, Any], config: ModelConfig, rows: Rows, x_BTD: Array, some_BT: Bool[Array, "B T"] | None = None
) -> Float[Array, "B T"]:
    """Returns every token's log-probability, 0 where it is not among `some`, from the states below the last group."""
    x_BTD = states.through(1, params, config, rows, x_BTD.astype(jnp.float32))
    x_BTD = rms_norm(x_BTD, norm_scale(params["decoder"]["final_norm"], config), config.norm_eps)
    return log_probs_of(x_BTD, params, config, rows, some_BT)


def fitted(experiment: Experiment, train: KnownTexts, fit: Fit) -> Callable[[KnownTexts], list[ReasoningTree]]:
    """Returns a function that scores trees by layers trained on others. The seed is of the order of rows."""
    objective: Any = find(experiment.objective, experiment.objective_options)
    params, config = frozen().params, frozen().config
    layers = params["decoder"]["layers_1"]
    row = [(k, i) for k, packed in enumerate(train.packed) for i in range(len(packed.rows.tokens))]
    total = fit.epochs * -(-len(row) // fit.rows)
    rate = optax.warmup_cosine_decay_schedule(0.0, fit.learning_rate, max(total // 10, 1), total)
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(rate, b2=0.98, weight_decay=fit.weight_decay))

    @jax.jit
    def update(layers, state, rows: Rows, x_BTD, reference_BT):
        def loss(layers):
            log_BT = log_probs(with_layers(params, layers), config, rows, x_BTD, scored_tokens(rows, experiment.task))
            of_chains = (path_sum(x_BT, rows, rows.problem) for x_BT in (log_BT, reference_BT))
            total, weight, _ = objective.of_log_probs(*of_chains, rows, experiment.task)
            return total / jnp.maximum(weight, 1)

        updates, state = optimizer.update(jax.grad(loss)(layers), state, layers)
        return optax.apply_updates(layers, updates), state

    state, rng = optimizer.init(layers), np.random.default_rng(experiment.seed)
    batches = itertools.chain.from_iterable(orders(rng, len(row), fit.epochs, fit.rows))
    with Bar("training", total) as bar:
        for batch in bar.follow(batches):
            layers, state = update(layers, state, *_batch(train, [row[i] for i in batch]))
    return functools.partial(scored, with_layers(params, layers), objective.beta)


def with_layers(params: dict[str, Any], layers: Any) -> dict[str, Any]:
    return {**params, "decoder": {**params["decoder"], "layers_1": layers}}


def _batch(known: KnownTexts, places: Sequence[tuple[int, int]]) -> tuple[Rows, np.ndarray, np.ndarray]:
    rows = [jax.tree.map(lambda x, i=i: x[i], known.packed[k].rows) for k, i in places]
    x_BTD, reference_BT = (np.stack([x[k][i] for k, i in places]) for x in (known.x_KRTD, known.reference_KRT))
    return jax.tree.map(lambda *x: np.stack(x), *rows), x_BTD, reference_BT


def scored(params: dict[str, Any], beta: float, known: KnownTexts) -> list[ReasoningTree]:
    """Returns the trees with the summed log ratios as scores; `filled` says what a step beyond a row gets."""
    results = []
    with Bar("scoring", len(known.packed)) as bar:
        for k, packed in enumerate(bar.follow(known.packed)):
            trees = known.trees[k * states.CHUNK : (k + 1) * states.CHUNK]
            scores = [np.full(len(tree.nodes), np.nan) for tree in trees]
            for i, (tree_S, node_S) in enumerate(zip(packed.tree_BS, packed.node_BS, strict=True)):
                rows, x_BTD, reference_BT = _batch(known, [(k, i)])
                ratio_BT = log_probs(params, frozen().config, rows, x_BTD, of_steps(rows)) - reference_BT
                score_S = np.asarray(path_sum(beta * ratio_BT, rows, rows.problem))[0]
                for s in np.nonzero(tree_S >= 0)[0]:
                    scores[tree_S[s]][node_S[s]] = score_S[s]
            results += [with_scores(tree, filled(tree, score_N)) for tree, score_N in zip(trees, scores, strict=True)]
    return results


@jax.jit
def of_steps(rows: Rows) -> Bool[Array, "B T"]:
    """Marks the tokens of steps: no score takes the log-probabilities of a problem."""
    return jnp.any(on_paths(rows, rows.problem), axis=1)


def filled(tree: ReasoningTree, score_N: np.ndarray) -> list[float]:
    """Returns the scores. A missing one (NaN) becomes the score of the step before it, or 0 if there is none."""
    inherited: list[float] = []
    for node, score in zip(tree.nodes, score_N.tolist(), strict=True):
        before = inherited[node.parent] if node.parent >= 0 else 0.0
        inherited.append(before if np.isnan(score) else score)
    return inherited
