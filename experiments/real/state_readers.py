"""Readers of a sample's states and confidences: each gives a sample one number, higher for likelier right.

Formulas are those of the papers' code. A reader is fitted on samples of known outcome (some need none) and scores
others. Several fits on the same samples, such as those of cross-fitting, are trained side by side: the samples' states
are read once for all.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Bool, Float

from experiments.real.token_states import Sample

WINDOW = 32
"""Tokens of a window of confidence: DeepConf has 2,048, for chains a hundred times as long."""
RIDGES = (1e-3, 1e-2, 1e-1)
PASSES = (3, 6, 12, 24)

Score = Callable[[Sequence[Sample]], Float[np.ndarray, "S M"]]
"""Of M samples by each of S seeds."""


class ReaderFit(NamedTuple):
    """Which of the samples of known outcome train, and which choose what training leaves open."""

    train_M: Bool[np.ndarray, " M"]
    valid_M: Bool[np.ndarray, " M"]


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


CHUNK = 16
"""Tokens of a chunk of `lowest_contrast`."""


def contrast(samples: Sequence[Sample], larger: Sequence[Sample]) -> Float[np.ndarray, " M"]:
    """Returns the mean over tokens of log p of a larger base less log p of the smaller one (contrastive scoring).

    Raises ValueError where the two bases have different tokens.
    """
    return np.array([difference_T.mean() for difference_T in _differences(samples, larger)])


def lowest_contrast(samples: Sequence[Sample], larger: Sequence[Sample]) -> Float[np.ndarray, " M"]:
    """Returns the least mean of that difference over chunks of CHUNK tokens: chunks of one length, since sums over
    steps of varying length favour short ones. What is left at the end belongs to the last chunk.
    """

    def lowest(difference_T: np.ndarray) -> float:
        chunks = max(1, len(difference_T) // CHUNK)
        return min(part.mean() for part in np.split(difference_T, [CHUNK * k for k in range(1, chunks)]))

    return np.array([lowest(difference_T) for difference_T in _differences(samples, larger)])


def _differences(samples: Sequence[Sample], larger: Sequence[Sample]) -> list[Float[np.ndarray, " T"]]:
    for x, y in zip(samples, larger, strict=True):
        if len(x.logprob_T) != len(y.logprob_T):
            raise ValueError(
                "the larger base writes a sample in other tokens: contrast needs two bases of one tokenizer"
            )
    return [y.logprob_T - x.logprob_T for x, y in zip(samples, larger, strict=True)]


def clue(samples: Sequence[Sample], right_M: Bool[np.ndarray, " M"], fits: Sequence[ReaderFit]) -> list[Score]:
    """CLUE (2510.01591): the nearer of two centroids of the states' change from the prompt to the end, all layers.

    The score is the distance from the centroid of wrong samples less that from the right ones, the mean over layers of
    Euclidean distances. Nothing is trained.
    """

    def changes(samples: Sequence[Sample]) -> Float[np.ndarray, "M L D"]:
        return np.stack([x.state_TLD[-1].astype(np.float32) - x.prompt_LD.astype(np.float32) for x in samples])

    delta_MLD, scores = changes(samples), []
    for fit in fits:
        centroids = [delta_MLD[fit.train_M & is_M].mean(0) for is_M in (~right_M, right_M)]

        def score(samples: Sequence[Sample], centroids=centroids) -> np.ndarray:
            delta_MLD = changes(samples)
            wrong_M, right_M = (np.linalg.norm(delta_MLD - x_LD, axis=-1).mean(-1) for x_LD in centroids)
            return (wrong_M - right_M)[None]

        scores.append(score)
    return scores


STRENGTHS = (1e-4, 1e-3, 1e-2, 1e-1, 1.0)
ROUNDS = 400
"""Updates of the logistic regressions, which see all samples in each."""


def last_state(samples: Sequence[Sample], right_M: Bool[np.ndarray, " M"], fits: Sequence[ReaderFit]) -> list[Score]:
    """A logistic regression on the last token's state; layer and regularisation have the least validation loss.

    All layers, fits and strengths are one regression each, and are fitted side by side.
    """

    def ends(samples: Sequence[Sample]) -> Float[np.ndarray, "M L D"]:
        return np.stack([x.state_TLD[-1] for x in samples]).astype(np.float32)

    x_MLD = ends(samples)
    mean_LD, scale_LD = x_MLD.mean(0), x_MLD.std(0) + 1e-3
    z_MLD = (x_MLD - mean_LD) / scale_LD
    weight_MK = np.stack([fit.train_M for fit in fits], axis=1).astype(np.float32)
    params = jax.tree.map(np.asarray, _regressions(z_MLD, right_M.astype(np.float32), weight_MK))
    odds_MLKS = np.einsum("mld,ldks->mlks", z_MLD, params["kernel"]) + params["bias"]
    scores: list[Score] = []
    for k, fit in enumerate(fits):
        loss_LS = [
            [_loss(odds_MLKS[fit.valid_M, layer, k, s], right_M[fit.valid_M]) for s in range(len(STRENGTHS))]
            for layer in range(z_MLD.shape[1])
        ]
        layer, s = np.unravel_index(np.argmin(loss_LS), np.shape(loss_LS))
        kernel_D, bias = params["kernel"][layer, :, k, s], params["bias"][layer, k, s]

        def score(samples: Sequence[Sample], layer=layer, kernel_D=kernel_D, bias=bias) -> np.ndarray:
            z_MD = (ends(samples)[:, layer] - mean_LD[layer]) / scale_LD[layer]
            return (z_MD @ kernel_D + bias)[None]

        scores.append(score)
    return scores


@jax.jit
def _regressions(z_MLD, right_M, weight_MK) -> dict[str, Array]:
    """Returns the logistic regressions of every layer on each of K weightings, with every strength."""
    M, L, D = z_MLD.shape
    K, S = weight_MK.shape[1], len(STRENGTHS)

    def loss(params):
        odds_MLKS = jnp.einsum("mld,ldks->mlks", z_MLD, params["kernel"]) + params["bias"]
        each_MLKS = jax.nn.softplus(odds_MLKS) - right_M[:, None, None, None] * odds_MLKS
        mean_LKS = jnp.einsum("mlks,mk->lks", each_MLKS, weight_MK / weight_MK.sum(0))
        return jnp.sum(mean_LKS) + jnp.sum(jnp.array(STRENGTHS) / 2 * jnp.sum(params["kernel"] ** 2, (0, 1, 2)))

    rate = optax.cosine_decay_schedule(0.3 / D**0.5, ROUNDS)
    optimiser = optax.adam(rate)

    def update(carry: Any, _) -> tuple[Any, None]:
        params, state = carry
        changes, state = optimiser.update(jax.grad(loss)(params), state)
        return (optax.apply_updates(params, changes), state), None

    params = {"kernel": jnp.zeros((L, D, K, S)), "bias": jnp.zeros((L, K, S))}
    return jax.lax.scan(update, (params, optimiser.init(params)), length=ROUNDS)[0][0]


def swift(
    samples: Sequence[Sample], right_M: Bool[np.ndarray, " M"], fits: Sequence[ReaderFit],
    seeds: Sequence[int] = (0,), *, ends: bool = False,
) -> list[Score]:  # fmt: skip
    """SWIFT (2505.12225): with h_t all layers' states, g_t = sigmoid(a h_t + b) and r_t = c h_t + d, a sample scores
    sum g_t r_t / sum g_t. Trained on outcomes by cross-entropy. With `ends`, only the last token of each step is read.

    A fit's ridge and passes have the least validation loss. States are standardised by their own mean and spread.
    """
    flat = _flat(samples, ends)
    some_NF = flat.x_NF[:: max(1, len(flat.x_NF) // SPREAD)].astype(np.float32)
    standard = some_NF.mean(0), some_NF.std(0) + 1e-3
    chosen = [_trained(flat, right_M, fits, standard, seed) for seed in seeds]  # by seed and fit
    return [
        lambda samples, k=k: _gated(
            jax.tree.map(lambda *x: np.stack(x, axis=-1), *(of_fits[k] for of_fits in chosen)),
            _flat(samples, ends), standard,
        ).T
        for k in range(len(fits))
    ]  # fmt: skip


class Flat(NamedTuple):
    """Tokens of M samples, one after the other."""

    x_NF: Float[np.ndarray, "N F"]  # float16: all layers' states
    start_M: np.ndarray  # of each sample, and the end of the last: M + 1 of them


def _flat(samples: Sequence[Sample], ends: bool) -> Flat:
    at = [x.end_K if ends else np.arange(len(x.state_TLD)) for x in samples]
    x_NF = np.concatenate([x.state_TLD[index].reshape(len(index), -1) for x, index in zip(samples, at, strict=True)])
    return Flat(x_NF, np.cumsum([0, *map(len, at)]))


def _scores(params: Mapping[str, Array], x_NF, sample_N, standard, count: int) -> Array:
    """Returns the scores of `count` samples by each of G readers: (count, G)."""
    mean_F, scale_F = standard
    both_N2G = jnp.einsum("nf,fcg->ncg", (x_NF.astype(jnp.float32) - mean_F) / scale_F, params["kernel"])
    both_N2G += params["bias"]
    gate_NG = jax.nn.sigmoid(both_N2G[:, 0]) * (sample_N < count)[:, None]
    total_MG = jax.ops.segment_sum(gate_NG, sample_N, count + 1)[:count]
    return jax.ops.segment_sum(gate_NG * both_N2G[:, 1], sample_N, count + 1)[:count] / jnp.maximum(total_MG, 1e-6)


SPREAD = 100_000
"""Tokens, about, from which the states' mean and spread are taken."""
BATCH, CELLS = 64, 4096
"""Samples of a batch, and the multiple of tokens to which it is padded."""


def _batch(flat: Flat, members: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns the tokens of some samples, and of each its sample; BATCH for padding."""
    parts = [np.arange(int(flat.start_M[m]), int(flat.start_M[m + 1])) for m in members]
    index_N = np.concatenate(parts)
    sample_N = np.repeat(np.arange(len(parts)), [len(part) for part in parts])
    lacking = -len(index_N) % CELLS
    return np.pad(index_N, (0, lacking)), np.pad(sample_N, (0, lacking), constant_values=BATCH)


@jax.jit
def _scores_of(params, x_NF, sample_N, standard) -> Array:
    return _scores(params, x_NF, sample_N, standard, BATCH)


@jax.jit
def _scores_at(params, x_NF, index_N, sample_N, standard) -> Array:
    return _scores(params, x_NF[index_N], sample_N, standard, BATCH)


def _gated(params, flat: Flat, standard) -> Float[np.ndarray, "M G"]:
    M, scores = len(flat.start_M) - 1, []
    for a in range(0, M, BATCH):
        members = np.arange(a, min(a + BATCH, M))
        index_N, sample_N = _batch(flat, members)
        scores.append(np.asarray(_scores_of(params, flat.x_NF[index_N], sample_N, standard))[: len(members)])
    return np.concatenate(scores)


OPTIMISER = optax.scale_by_adam()
RATE = 0.1
"""Of the F states' parameters, over the root of F: a step so moves scores of any base alike."""


@jax.jit
def _step(params, state, x_NF, index_N, sample_N, standard, right_B, weight_BG, ridge_G):
    def loss(params):
        odds_BG = _scores(params, x_NF[index_N], sample_N, standard, BATCH)
        each_BG = jax.nn.softplus(odds_BG) - right_B[:, None] * odds_BG
        mean_G = jnp.sum(weight_BG * each_BG, 0) / jnp.maximum(jnp.sum(weight_BG, 0), 1)
        return jnp.sum(mean_G + ridge_G * jnp.sum(params["kernel"] ** 2, (0, 1)))  # readers share no parameter

    update, state = OPTIMISER.update(jax.grad(loss)(params), state)
    rate = RATE / x_NF.shape[1] ** 0.5
    return jax.tree.map(lambda x, change: x - rate * change, params, update), state


def _trained(flat: Flat, right_M, fits: Sequence[ReaderFit], standard, seed: int) -> list[dict[str, np.ndarray]]:
    """Returns each fit's parameters with the least validation loss: of RIDGES, after one of PASSES."""
    rng = np.random.default_rng(seed)
    F, K, R = flat.x_NF.shape[1], len(fits), len(RIDGES)
    train_MG, valid_MG = (np.repeat(np.stack(masks, axis=1), R, axis=1) for masks in zip(*fits, strict=True))
    used = np.flatnonzero((train_MG | valid_MG).any(axis=1))
    first_F2 = 0.01 * rng.standard_normal((F, 2)) / np.sqrt(F)
    kernel_F2G = np.repeat(first_F2[:, :, None], K * R, axis=2).astype(np.float32)
    params: Any = {"kernel": jnp.asarray(kernel_F2G), "bias": jnp.zeros((2, K * R))}
    state, ridge_G = OPTIMISER.init(params), jnp.tile(jnp.array(RIDGES), K)
    x_NF, standard = jnp.asarray(flat.x_NF), jax.tree.map(jnp.asarray, standard)
    best: list[tuple[float, Any]] = [(np.inf, None)] * K
    for done in range(1, max(PASSES) + 1):
        order = rng.permutation(used[train_MG[used].any(axis=1)])
        for a in range(0, len(order), BATCH):
            members = order[a : a + BATCH]
            lacking = ((0, BATCH - len(members)),)
            right_B = np.pad(right_M[members].astype(np.float32), lacking)
            weight_BG = np.pad(train_MG[members].astype(np.float32), (*lacking, (0, 0)))
            params, state = _step(params, state, x_NF, *_batch(flat, members), standard, right_B, weight_BG, ridge_G)
        if done not in PASSES:
            continue
        judged = used[valid_MG[used].any(axis=1)]
        parts = [judged[a : a + BATCH] for a in range(0, len(judged), BATCH)]
        odds_JG = np.concatenate([
            np.asarray(_scores_at(params, x_NF, *_batch(flat, part), standard))[: len(part)] for part in parts
        ])  # fmt: skip
        now = jax.tree.map(np.asarray, params)
        for g in range(K * R):
            valid_J = valid_MG[judged, g]
            loss = _loss(odds_JG[valid_J, g], right_M[judged[valid_J]])
            if loss < best[g // R][0]:
                best[g // R] = loss, jax.tree.map(lambda x, g=g: x[..., g], now)
    return [params for _, params in best]


def _loss(odds_K: np.ndarray, right_K: np.ndarray) -> float:
    return float(np.mean(np.logaddexp(0, odds_K) - right_K * odds_K))


UNTRAINED: dict[str, Callable[[Sequence[Sample]], Float[np.ndarray, " M"]]] = {
    "log-probability": log_probability, "self-certainty": self_certainty,
    "lowest window": lowest_window, "tail": tail,
}  # fmt: skip
OF_TWO: dict[str, Callable[[Sequence[Sample], Sequence[Sample]], Float[np.ndarray, " M"]]] = {
    "contrast": contrast, "lowest contrast": lowest_contrast,
}  # fmt: skip
"""Of a base's samples and the same ones as a larger base sees them."""
FITTED: dict[str, Callable[[Sequence[Sample], np.ndarray, Sequence[ReaderFit], Sequence[int]], list[Score]]] = {
    "CLUE": lambda samples, right_M, fits, seeds: clue(samples, right_M, fits),
    "last state": lambda samples, right_M, fits, seeds: last_state(samples, right_M, fits),
    "SWIFT": swift,
    "SWIFT by steps": lambda samples, right_M, fits, seeds: swift(samples, right_M, fits, seeds, ends=True),
}
