"""Calibration maps from scores to probabilities: fitted on a calibration split and stored as JSON.

All maps are monotone, so best-of-n by one step's score cannot get worse. `temperature` and `platt` keep the order
strictly; `isotonic` and `quantile` may give neighbouring scores equal probabilities.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Any, Literal, get_args

import numpy as np
from jaxtyping import Bool, Float
from scipy.optimize import isotonic_regression, minimize
from scipy.special import expit

from jprm import options
from jprm.experiment import run_id
from jprm.io.jsonl import DAMAGED
from jprm.io.outputs import atomic_write
from jprm.io.storage import path_of
from jprm.score.scorer import PRM
from jprm.statistics import equal_mass_bins
from jprm.tree import as_written, in_order_of, record_of, tree_of, with_scores

CLIP = 1e-9
"""Scores are clipped to [CLIP, 1 - CLIP] before log-odds, which stay finite at 0 and 1; float32 scores near 1 stay
distinct.
"""

QUANTILES = 20


LogisticKind = Literal["temperature", "platt"]


@dataclasses.dataclass(frozen=True)
class Logistic:
    """sigmoid(slope * log-odds + intercept), slope >= 0. A temperature T is slope 1 / T, intercept 0."""

    kind: LogisticKind
    slope: float
    intercept: float

    def __post_init__(self):
        if not (np.isfinite([self.slope, self.intercept]).all() and self.slope >= 0):
            raise ValueError(f"{self.kind}: slope {self.slope}, intercept {self.intercept}: not finite, or falling")

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


@dataclasses.dataclass(frozen=True)
class Piecewise:
    """Linear interpolation between points (score, probability), constant outside them."""

    kind: Literal["isotonic", "quantile"]
    score: tuple[float, ...]
    probability: tuple[float, ...]

    def __post_init__(self):
        score_K, probability_K = np.array(self.score, float), np.array(self.probability, float)
        if not (len(score_K) == len(probability_K) > 0 and np.isfinite(score_K).all()):
            raise ValueError(f"{self.kind}: {len(score_K)} scores for {len(probability_K)} probabilities")
        rising = (np.diff(score_K) > 0).all() and (np.diff(probability_K) >= 0).all()
        if not (rising and (probability_K >= 0).all() and (probability_K <= 1).all()):
            raise ValueError(f"{self.kind}: the points do not rise, or leave [0, 1]")

    def to_json(self) -> dict[str, Any]:
        return {"kind": self.kind, "score": list(self.score), "probability": list(self.probability)}


Recalibration = Logistic | Piecewise


def from_json(record: Mapping[str, Any]) -> Recalibration:
    """Reads a map as `to_json` gives it, e.g. {"kind": "platt", "slope": 1.2, "intercept": 0.1}.

    `temperature` has the same keys; `isotonic` and `quantile` have the lists `score` and `probability`.

    Raises ValueError if the record is invalid.
    """
    logistic = isinstance(record, Mapping) and record.get("kind") in get_args(LogisticKind)
    return options.from_json(Logistic if logistic else Piecewise, record, "recalibration")


def apply(recalibration: Recalibration, score: Float[np.ndarray, "*N"]) -> Float[np.ndarray, "*N"]:
    """Returns float64 probabilities in [0, 1]. NaN stays NaN.

    Logistic maps clip scores to [1e-9, 1 - 1e-9] (`CLIP`). Raises ValueError if a score is outside [0, 1].
    """
    score = np.asarray(score, float)
    if ((score < 0) | (score > 1)).any():
        raise ValueError("recalibration takes scores in [0, 1]")
    if isinstance(recalibration, Logistic):
        return expit(recalibration.slope * _log_odds(score) + recalibration.intercept)
    mapped = np.interp(score, recalibration.score, recalibration.probability)
    return np.where(np.isnan(score), np.nan, mapped)


def fit(kind: str, score_N: Float[np.ndarray, " N"], right_N: Bool[np.ndarray, " N"]) -> Recalibration:
    """Fits the best map of a kind to a calibration split.

    temperature  minimises the log loss over T (Guo et al. 2017, arXiv 1706.04599, section 4.2)
    platt        minimises the log loss over slope and intercept (Platt 1999)
    isotonic     minimises the Brier score over all rising maps, by pool-adjacent-violators (Zadrozny & Elkan 2002)
    quantile     the fraction correct in 20 (`QUANTILES`) equal-mass bins at their mean scores (histogram binning,
                 Zadrozny & Elkan 2001), pooled to be monotone; smoother than isotonic if the split is small

    The two logistic maps fit Platt's targets, (n_right + 1) / (n_right + 2) and 1 / (n_wrong + 2) instead of 1 and 0,
    so that an optimum exists even if the scores separate the classes. If the best slope is negative (the scores are
    worse than chance), the best monotone map has slope 0, a constant probability.

    Raises ValueError if the split lacks correct or incorrect steps, or a score is NaN or outside [0, 1]; KeyError for
    another kind.
    """
    score_N, right_N = np.asarray(score_N, float), np.asarray(right_N, bool)
    if not ((score_N >= 0) & (score_N <= 1)).all():
        raise ValueError("recalibration takes scores in [0, 1]")
    if right_N.all() or not right_N.any():
        raise ValueError(
            f"a calibration split needs right and wrong steps: {right_N.sum()} of {len(right_N)} are right"
        )
    return KINDS[kind](kind, score_N, right_N)


def _fit_logistic(kind, score_N, right_N) -> Logistic:
    free = 1 if kind == "temperature" else 2
    n = right_N.sum()
    target_N = np.where(right_N, (n + 1) / (n + 2), 1 / (len(right_N) - n + 2))
    x_NK = np.stack([_log_odds(score_N), np.ones(len(score_N))][:free], 1)

    def loss(w_K):
        z_N = x_NK @ w_K
        return np.mean(np.logaddexp(0, z_N) - target_N * z_N), x_NK.T @ (expit(z_N) - target_N) / len(z_N)

    bounds, start = [(0, None), (None, None)][:free], np.array([1.0, 0.0][:free])
    limits = {"ftol": 1e-15, "gtol": 1e-10, "maxiter": 1000}
    best = minimize(loss, start, jac=True, bounds=bounds, method="L-BFGS-B", options=limits)
    return Logistic(kind, *map(float, [*best.x, 0.0][:2]))


def _fit_isotonic(kind, score_N, right_N) -> Piecewise:
    value_U, index_N, count_U = np.unique(score_N, return_inverse=True, return_counts=True)
    share_U = np.bincount(index_N.reshape(-1), right_N) / count_U
    level_U = np.clip(isotonic_regression(share_U, weights=count_U).x, 0, 1)
    return _piecewise(kind, value_U, level_U)


def _fit_quantile(kind, score_N, right_N) -> Piecewise:
    bin_N = equal_mass_bins(score_N, QUANTILES)
    n_B = np.bincount(bin_N)
    score_B, share_B = (np.bincount(bin_N, x_N) / n_B for x_N in (score_N, right_N))
    return _piecewise(kind, score_B, np.clip(isotonic_regression(share_B, weights=n_B).x, 0, 1))


def _piecewise(kind, score_K, probability_K) -> Piecewise:
    """Builds the map, dropping points inside a constant stretch."""
    change_K = np.diff(probability_K) != 0
    keep_K = np.r_[True, change_K] | np.r_[change_K, True]
    return Piecewise(kind, tuple(score_K[keep_K].tolist()), tuple(probability_K[keep_K].tolist()))


def _log_odds(score):
    score = np.clip(score, CLIP, 1 - CLIP)
    return np.log(score) - np.log1p(-score)


KINDS = {"temperature": _fit_logistic, "platt": _fit_logistic, "isotonic": _fit_isotonic, "quantile": _fit_quantile}


NAME = "calibration.json"


REMEDY = "run `jprm eval calibration --store`"


def store_calibration(prm: PRM, recalibration: Mapping[str, Any], files: Sequence[str], neutral: str | None) -> None:
    """Writes a map (`recalibration`, as by `to_json`) into calibration.json in the model's folder, atomically.

    An earlier map is replaced. The file also holds the run, the step, the calibration files, and the class of
    neutral ratings there (`neutral`: positive, negative, drop or `None`).

    Raises ValueError if the map is invalid, and OSError if the folder cannot be written.
    """
    from_json(recalibration)
    checkpoint = {"run": run_id(path_of(prm.name)), "step": prm.step}
    record = {"map": dict(recalibration), **checkpoint, "fitted_on": list(files), "neutral": neutral}
    atomic_write(path_of(prm.name) / NAME, json.dumps(record, indent=2) + "\n")


def stored_calibration(prm: PRM) -> Recalibration:
    """Returns the map in the model's folder.

    Raises FileNotFoundError if the map is missing, and ValueError if it is damaged or belongs to another run or step.
    """
    path = path_of(prm.name) / NAME
    if not path.is_file():
        raise FileNotFoundError(f"{path}: not there: this model has no recalibration map; {REMEDY}")
    try:
        record = json.loads(path.read_bytes())
        recalibration, step, run = from_json(record["map"]), record["step"], record.get("run", "")
    except DAMAGED as error:
        raise ValueError(f"{path}: no recalibration map ({error}); {REMEDY} again") from None
    if run and run != (ours := run_id(path_of(prm.name))):
        raise ValueError(f"{path}: fitted on the run {run}, and the model is {ours or 'of none'}; {REMEDY} again")
    if step != prm.step:
        raise ValueError(f"{path}: fitted on step {step}, but the model is at step {prm.step}; {REMEDY} again")
    return recalibration


def mapped(recalibration: Recalibration, record: dict[str, Any]) -> dict[str, Any]:
    """Returns a copy of a record whose steps all have scores, with the mapped ones; its other outputs stay.

    Raises RecordError if the record is invalid, and ValueError if a score is outside [0, 1].
    """
    tree = tree_of(record)
    score_N = apply(recalibration, np.array([node.score for node in tree.nodes], float))
    return in_order_of(record, record_of(with_scores(tree, map(as_written, score_N))))
