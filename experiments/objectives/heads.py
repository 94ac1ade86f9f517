"""Heads on a frozen decoder's states: at the ends of steps, and for `outcome_tokens` trained at every token."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import pathlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float, Int

from experiments.objectives import states
from jprm import objectives
from jprm.experiment import Experiment, ObjectiveConfig
from jprm.model.heads import find
from jprm.pack import pack
from jprm.rows import Rows
from jprm.token_tree import Supervise, token_tree
from jprm.tokenizer import load_tokenizer, native_layout
from jprm.tree import ReasoningTree, with_scores

DEPTH = 15
"""Layers below the states: on validation problems better than 9 or 21 of the 30, or all three."""
TOKENS, SLOTS, TOKEN_SLOTS = 2**17, 512, 2**13
"""A row of steps, or of as many problems' tokens. Nothing attends here: only the slots cost anything."""


@dataclasses.dataclass(frozen=True)
class Fit:
    """How heads are trained: chosen on validation pools of ChatGPT and Llama-7B, by outcomes and by ranking."""

    hidden: int = 128
    epochs: int = 4
    rows: int = 4
    learning_rate: float = 1e-3
    weight_decay: float = 0.1
    dropout: float = 0.3


class Known(NamedTuple):
    """Trees, the number of states that each has, and all states in order: of its nodes, or of its tokens.

    Steps and tokens beyond a row have NaN, and so have a problem's tokens.
    """

    trees: list[ReasoningTree]
    size_K: Int[np.ndarray, " K"]
    state_ND: Float[np.ndarray, "N D"]


class Labelled(NamedTuple):
    """An objective's rows on the host, and the scaled states at their slots."""

    rows: Rows
    x_RSD: Float[np.ndarray, "R S D"]


class Scaling(NamedTuple):
    """Standardises states by the mean and deviation of the training steps, and clips outliers."""

    mean_D: Float[np.ndarray, " D"]
    std_D: Float[np.ndarray, " D"]

    @classmethod
    def fitted(cls, state_ND: np.ndarray) -> Scaling:
        x_ND = state_ND.astype(np.float32)
        return cls(np.nanmean(x_ND, 0), np.nanstd(x_ND, 0) + 1e-6)

    def __call__(self, state_ND: np.ndarray) -> Float[np.ndarray, "N D"]:
        x_ND = (state_ND.astype(np.float32) - self.mean_D) / self.std_D
        return np.clip(np.nan_to_num(x_ND), -8, 8)


def known(path: pathlib.Path, folder: pathlib.Path, problems: int | None, supervise: Supervise = "step") -> Known:
    """Returns a file's trees and their states, which it computes where `folder` lacks them.

    They are the states of all tokens if `supervise` is `outcome_tokens`, otherwise those at the ends of steps.
    """
    of_tokens = supervise == "outcome_tokens"
    folder /= f"{'tokens_' if of_tokens else ''}after_{DEPTH}"
    trees, chunks = states.known(path, folder, problems, functools.partial(_load, of_tokens, DEPTH))
    size_K, state_ND = sizes(trees, of_tokens), np.concatenate([chunk["state_ND"] for chunk in chunks])
    if len(state_ND) != (count := size_K.sum()):
        raise ValueError(f"{folder}: has {len(state_ND)} states, {path} needs {count}: delete the folder")
    return Known(trees, size_K, state_ND)


def sizes(trees: Sequence[ReasoningTree], of_tokens: bool) -> Int[np.ndarray, " K"]:
    """Returns every tree's number of tokens, or of nodes."""
    layout = states.layout()
    return np.array([len(token_tree(tree, layout).tokens_N if of_tokens else tree.nodes) for tree in trees], np.int64)


def _load(of_tokens: bool, depth: int) -> Callable[[Sequence[ReasoningTree]], states.Chunk]:
    frozen = states.Frozen.load((depth,))

    def of_trees(trees: Sequence[ReasoningTree]) -> states.Chunk:
        packed = states.packed(trees, "outcome_tokens" if of_tokens else "step")
        first_N = np.cumsum([0, *sizes(trees, of_tokens)])
        found_ND = np.full((first_N[-1], frozen.config.width), np.nan, np.float16)
        for i, (tree_S, node_S) in enumerate(zip(packed.tree_BS, packed.node_BS, strict=True)):
            rows = jax.tree.map(lambda x, i=i: x[i : i + 1], packed.rows)
            x_TD, some_S = np.asarray(states.below(frozen.params, frozen.config, rows))[0], tree_S >= 0
            found_ND[first_N[tree_S[some_S]] + node_S[some_S]] = x_TD[rows.step_end[0, some_S]]
        return {"state_ND": found_ND}

    return of_trees


def fitted(experiment: Experiment, train: Known, fit: Fit) -> Callable[[Known], list[ReasoningTree]]:
    """Returns a function that scores trees by a head trained on others."""
    scaling = Scaling.fitted(train.state_ND)
    params = trained(experiment, labelled(train, scaling, experiment), fit)
    return lambda test: scored(params, experiment, test.trees, scaling(test.state_ND))


def labelled(train: Known, scaling: Scaling, experiment: Experiment) -> Labelled:
    """Packs whole trees as the objective wants them, and puts their scaled states into their slots."""
    data, layout = experiment.data, native_layout(load_tokenizer(experiment.tokenizer))
    token_trees = [token_tree(tree, layout, data.supervise, data.extras, data.weight) for tree in train.trees]
    slots = TOKEN_SLOTS if data.supervise == "outcome_tokens" else SLOTS
    packed = pack(token_trees, TOKENS, slots, too_long="truncate", siblings=data.siblings)
    first_K, some_RS = np.cumsum(train.size_K) - train.size_K, packed.tree_BS >= 0
    x_RSD = np.zeros((*some_RS.shape, train.state_ND.shape[-1]), np.float32)
    x_RSD[some_RS] = scaling(train.state_ND[first_K[packed.tree_BS[some_RS]] + packed.node_BS[some_RS]])
    return Labelled(packed.rows, x_RSD)


def initial(key: Array, width: int, channels: int, fit: Fit) -> dict[str, Array]:
    """Returns the parameters of a head with one hidden layer; its logits start at 0."""
    hidden_DE = jax.random.normal(key, (width, fit.hidden)) * width**-0.5
    out = {"kernel": jnp.zeros((fit.hidden, channels)), "bias": jnp.zeros(channels)}
    return {"hidden_kernel": hidden_DE, "hidden_bias": jnp.zeros(fit.hidden), **out}


def logits(params: dict[str, Array], x: Float[Array, "*B D"], key: Array | None = None, dropout: float = 0.0):
    """Returns the logits (..., C); with a key, states and hidden units are dropped."""
    if key is not None:
        first, second = jax.random.split(key)
        x = x * jax.random.bernoulli(first, 1 - dropout, x.shape) / (1 - dropout)
    y = jax.nn.gelu(x @ params["hidden_kernel"] + params["hidden_bias"])
    if key is not None:
        y = y * jax.random.bernoulli(second, 1 - dropout, y.shape) / (1 - dropout)
    return y @ params["kernel"] + params["bias"]


def trained(experiment: Experiment, labelled: Labelled, fit: Fit) -> dict[str, Array]:
    """Returns a head trained by the experiment's objective; the seed is of its start and of the order of rows."""
    objective: Any = objectives.find(experiment.objective, experiment.objective_options)
    count = len(labelled.x_RSD)
    total = fit.epochs * -(-count // fit.rows)
    rate = optax.warmup_cosine_decay_schedule(0.0, fit.learning_rate, max(total // 20, 1), total)
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(rate, weight_decay=fit.weight_decay))
    key = jax.random.key(experiment.seed)
    params = initial(key, labelled.x_RSD.shape[-1], find(experiment.model.head).size(0), fit)
    state, rng = optimizer.init(params), np.random.default_rng(experiment.seed)
    update = jax.jit(functools.partial(_update, optimizer, objective, experiment.task, fit.dropout))
    for step, rows_B in enumerate(itertools.chain.from_iterable(orders(rng, count, fit.epochs, fit.rows))):
        rows = jax.tree.map(lambda x, rows_B=rows_B: x[rows_B], labelled.rows)
        params, state = update(params, state, rows, labelled.x_RSD[rows_B], jax.random.fold_in(key, step))
    return params


def orders(rng: np.random.Generator, count: int, epochs: int, rows: int) -> Iterator[np.ndarray]:
    """Yields every epoch's batches of rows; a last batch is filled up with rows of the epoch's beginning."""
    for _ in range(epochs):
        order = np.resize(rng.permutation(count), -(-count // rows) * rows)
        yield order.reshape(-1, rows)


def _update(optimizer, objective: Any, task: ObjectiveConfig, dropout: float, params, state, rows: Rows, x_BSD, key):
    def loss(params):
        total, weight, _ = objective.of_logits(logits(params, x_BSD, key, dropout), rows, task)
        return total / jnp.maximum(weight, 1)

    updates, state = optimizer.update(jax.grad(loss)(params), state, params)
    return optax.apply_updates(params, updates), state


def scored(
    params: dict[str, Array], experiment: Experiment, trees: Sequence[ReasoningTree], x_ND: np.ndarray
) -> list[ReasoningTree]:
    """Returns the trees with the head's scores."""
    readout = find(experiment.model.head).readout
    assert readout is not None  # heads of steps have one
    score_N = np.asarray(jax.jit(lambda x: readout.score(logits(params, x)))(x_ND))
    parts = np.split(score_N, np.cumsum([len(tree.nodes) for tree in trees])[:-1])
    return [with_scores(tree, part.tolist()) for tree, part in zip(trees, parts, strict=True)]
