"""Readers of a sample's states and confidences: each gives a sample one number, higher for likelier right.

Formulas are those of the papers' code. A `Reader` is fitted on samples of known outcome (some need none), scored on
others. Fitting never sees the samples that are scored.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Bool, Float
from token_states import Sample  # pyright: ignore[reportMissingImports]

from jprm.methods.evidence.baselines import logistic

WINDOW = 32
"""Tokens of a window of confidence: DeepConf has 2,048, for chains a hundred times as long."""
RIDGES = (1e-3, 1e-2, 1e-1)
PASSES = (5, 10, 20, 40)

Score = Callable[[Sequence[Sample]], Float[np.ndarray, " M"]]


@dataclasses.dataclass(frozen=True)
class Fitting:
    """Samples of known outcome: those that train, and those that choose what training leaves open."""

    train: Sequence[Sample]
    train_right_M: Bool[np.ndarray, " M"]
    valid: Sequence[Sample]
    valid_right_K: Bool[np.ndarray, " K"]


def self_certainty(samples: Sequence[Sample]) -> Float[np.ndarray, " M"]:
    """Returns the mean over tokens of KL(uniform || p) (Kang et al. 2025, 2502.18581)."""
    return np.array([x.certainty_T.mean() for x in samples])


def log_probability(samples: Sequence[Sample]) -> Float[np.ndarray, " M"]:
    return np.array([x.logprob_T.mean() for x in samples])


def lowest_window(samples: Sequence[Sample]) -> Float[np.ndarray, " M"]:
    """Returns minus the least mean of C_t over WINDOW tokens, C_t = -mean log-probability of the 20 likeliest tokens.

    Fu et al. 2025 (2508.15260) call a high C_t confident: the likeliest token then takes the mass of the others.
    """

    def lowest(top_T: np.ndarray) -> float:
        sums = np.cumsum(np.r_[0.0, top_T])
        size = min(WINDOW, len(top_T))
        return float(np.min(sums[size:] - sums[:-size]) / size)

    return np.array([lowest(x.top_T) for x in samples])


def tail(samples: Sequence[Sample]) -> Float[np.ndarray, " M"]:
    """Returns the mean of C_t over the last WINDOW tokens."""
    return np.array([x.top_T[-WINDOW:].mean() for x in samples])


def clue(fitting: Fitting) -> Score:
    """CLUE (2510.01591): the nearer of two centroids of the states' change from the prompt to the end, all layers.

    The score is the distance from the centroid of wrong samples less that from the right ones, the mean over layers of
    Euclidean distances. Nothing is trained.
    """

    def change(x: Sample) -> np.ndarray:
        return x.state_TLD[-1].astype(np.float32) - x.prompt_LD.astype(np.float32)

    delta_MLD, right_M = np.stack([change(x) for x in fitting.train]), fitting.train_right_M
    right_LD, wrong_LD = delta_MLD[right_M].mean(0), delta_MLD[~right_M].mean(0)

    def score(samples: Sequence[Sample]) -> np.ndarray:
        delta_MLD = np.stack([change(x) for x in samples])
        far = [np.linalg.norm(delta_MLD - centroid, axis=-1).mean(-1) for centroid in (wrong_LD, right_LD)]
        return far[0] - far[1]

    return score


def last_state(fitting: Fitting) -> Score:
    """A logistic regression on the last token's state; layer and regularisation have the least validation loss."""
    candidates = []
    for layer in range(fitting.train[0].state_TLD.shape[1]):
        x_MD, valid_KD = (np.stack([x.state_TLD[-1, layer] for x in part]).astype(float) for part in
                          (fitting.train, fitting.valid))  # fmt: skip
        fitted = logistic(x_MD, fitting.train_right_M.astype(float), valid_KD, fitting.valid_right_K.astype(float))
        candidates.append((_loss(fitted(valid_KD), fitting.valid_right_K), layer, fitted))
    _, layer, chosen = min(candidates, key=lambda candidate: candidate[0])
    return lambda samples: _odds(chosen(np.stack([x.state_TLD[-1, layer] for x in samples]).astype(float)))


def swift(fitting: Fitting, seed: int = 0, *, ends: bool = False) -> Score:
    """SWIFT (2505.12225): with h_t all layers' states, g_t = sigmoid(a h_t + b) and r_t = c h_t + d, a sample scores
    sum g_t r_t / sum g_t. Trained on outcomes by cross-entropy. With `ends`, only the last token of each step is read.

    Ridge and passes have the least validation loss.
    """
    train, valid = (_flat(part, ends) for part in (fitting.train, fitting.valid))
    mean_F = train.x_NF.mean(0, dtype=np.float64).astype(np.float32)
    scale_F = train.x_NF.std(0, dtype=np.float64).astype(np.float32) + 1e-3
    best: tuple[float, Any] = (np.inf, None)
    for ridge in RIDGES:
        for params in _trained(train, fitting.train_right_M, mean_F, scale_F, ridge, seed):
            loss = _loss_of_odds(_gated(params, valid, mean_F, scale_F), fitting.valid_right_K)
            if loss < best[0]:
                best = loss, jax.tree.map(np.asarray, params)
    params = best[1]
    return lambda samples: _gated(params, _flat(samples, ends), mean_F, scale_F)


@dataclasses.dataclass(frozen=True)
class Flat:
    """Tokens of many samples, one after the other."""

    x_NF: np.ndarray  # float16: all layers' states
    sample_N: np.ndarray


def _flat(samples: Sequence[Sample], ends: bool) -> Flat:
    at = [x.end_K if ends else np.arange(len(x.state_TLD)) for x in samples]
    x_NF = np.concatenate([x.state_TLD[index].reshape(len(index), -1) for x, index in zip(samples, at, strict=True)])
    return Flat(x_NF, np.repeat(np.arange(len(samples)), [len(index) for index in at]))


@functools.partial(jax.jit, static_argnums=5)
def _scores(params: Mapping[str, Array], x_NF, sample_N, mean_F, scale_F, count: int) -> Array:
    both_N2 = ((x_NF.astype(jnp.float32) - mean_F) / scale_F) @ params["kernel"] + params["bias"]
    gate_N = jax.nn.sigmoid(both_N2[:, 0]) * (sample_N < count)
    total_M = jax.ops.segment_sum(gate_N, sample_N, count + 1)[:count]
    return jax.ops.segment_sum(gate_N * both_N2[:, 1], sample_N, count + 1)[:count] / jnp.maximum(total_M, 1e-6)


BATCH, CELLS = 32, 2048
"""Samples of a batch, and the multiple of tokens to which it is padded."""


def _batch(flat: Flat, members: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    parts = [np.flatnonzero(flat.sample_N == m) for m in members]
    index, number = np.concatenate(parts), np.repeat(np.arange(len(parts)), [len(part) for part in parts])
    size = -(-len(index) // CELLS) * CELLS
    x_NF = np.zeros((size, flat.x_NF.shape[1]), np.float16)
    x_NF[: len(index)] = flat.x_NF[index]
    return x_NF, np.pad(number, (0, size - len(number)), constant_values=BATCH)


def _gated(params, flat: Flat, mean_F, scale_F) -> np.ndarray:
    M, scores = int(flat.sample_N[-1]) + 1, []
    for a in range(0, M, BATCH):
        members = np.arange(a, min(a + BATCH, M))
        scores.append(np.asarray(_scores(params, *_batch(flat, members), mean_F, scale_F, BATCH))[: len(members)])
    return np.concatenate(scores)


OPTIMISER = optax.scale_by_adam()
RATE = 0.1
"""Of the F states' parameters, over the root of F: a step so moves scores of any base alike."""


@jax.jit
def _step(params, state, x_NF, sample_N, mean_F, scale_F, right_B, weight_B, ridge):
    def loss(params):
        odds_B = _scores(params, x_NF, sample_N, mean_F, scale_F, BATCH)
        each_B = jax.nn.softplus(odds_B) - right_B * odds_B
        return jnp.sum(weight_B * each_B) / jnp.sum(weight_B) + ridge * jnp.sum(params["kernel"] ** 2)

    update, state = OPTIMISER.update(jax.grad(loss)(params), state)
    rate = RATE / x_NF.shape[1] ** 0.5
    return jax.tree.map(lambda x, change: x - rate * change, params, update), state


def _trained(train: Flat, right_M, mean_F, scale_F, ridge: float, seed: int):
    """Yields the parameters after each of PASSES."""
    rng = np.random.default_rng(seed)
    F, M = train.x_NF.shape[1], len(right_M)
    params = {"kernel": jnp.asarray(0.01 * rng.standard_normal((F, 2)) / np.sqrt(F), jnp.float32), "bias": jnp.zeros(2)}
    state = OPTIMISER.init(params)
    for done in range(1, max(PASSES) + 1):
        order_M = rng.permutation(M)
        for a in range(0, M, BATCH):
            members = order_M[a : a + BATCH]
            lacking = BATCH - len(members)
            right_B, weight_B = (
                np.pad(x.astype(np.float32), (0, lacking)) for x in (right_M[members], np.ones(len(members)))
            )
            batch = *_batch(train, members), mean_F, scale_F
            params, state = _step(params, state, *batch, right_B, weight_B, ridge)
        if done in PASSES:
            yield params


def _odds(p: np.ndarray) -> np.ndarray:
    p = np.clip(p, 1e-6, 1 - 1e-6)
    return np.log(p) - np.log1p(-p)


def _loss(p_K: np.ndarray, right_K: np.ndarray) -> float:
    return _loss_of_odds(_odds(p_K), right_K)


def _loss_of_odds(odds_K: np.ndarray, right_K: np.ndarray) -> float:
    return float(np.mean(np.logaddexp(0, odds_K) - right_K * odds_K))


UNTRAINED: dict[str, Score] = {
    "log-probability": log_probability, "self-certainty": self_certainty,
    "lowest window": lowest_window, "tail": tail,
}  # fmt: skip
FITTED: dict[str, Callable[[Fitting, int], Score]] = {
    "CLUE": lambda fitting, seed: clue(fitting),
    "last state": lambda fitting, seed: last_state(fitting),
    "SWIFT": swift,
    "SWIFT by steps": lambda fitting, seed: swift(fitting, seed, ends=True),
}
