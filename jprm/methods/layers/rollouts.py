"""A head for K right ones of N rollouts: a Beta distribution of the chance that a rollout from a step ends right.

    jprm train EXPERIMENT.py --workdir RUN --set model.head=jprm.methods.layers.rollouts:BETA \\
      objective=jprm.methods.layers.rollouts:counts data.extras='["rollouts"]'

Cross-entropy on the fraction K / N learns only the chance, and takes 1 of 2 for as much as 50 of 100. The likelihood
of the counts themselves is the Beta-binomial's: what stays unknown after reading a step becomes the distribution's
spread. Data are those of `jprm label mc --estimate soft`, whose nodes say how many `rollouts` they had.

Beside `score`, the mean, records have `low` and `high`, between which nine tenths lie about, and `worth`: how many
rollouts the guess is worth. `settled` says when rollouts of a step can stop.
"""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
import numpy as np
from jax.scipy.special import betaln, gammaln
from jaxtyping import Array, Bool, Float
from scipy import stats

from jprm.model.heads import NORMAL, PROBABILITY, Head, Readout, log_odds_log_likelihood
from jprm.objectives import Judged, OfSteps, heads, targets

LARGEST = 8.0
"""Of the logarithms of the two parameters, in size: a guess is worth at most some 6,000 rollouts."""


def _parameters(logit_BSC: Float[Array, "*B 2"]) -> tuple[Array, Array]:
    parameter_BSC = jnp.exp(jnp.clip(logit_BSC.astype(jnp.float32), -LARGEST, LARGEST))
    return parameter_BSC[..., 0], parameter_BSC[..., 1]


def _worth(logit_BSC: Array) -> Float[Array, "*B"]:
    right_BS, wrong_BS = _parameters(logit_BSC)
    return right_BS + wrong_BS


def _mean(logit_BSC: Array) -> Float[Array, "*B"]:
    return _parameters(logit_BSC)[0] / _worth(logit_BSC)


def _spread(logit_BSC: Array) -> Float[Array, "*B"]:
    mean_BS = _mean(logit_BSC)
    return NORMAL * jnp.sqrt(mean_BS * (1 - mean_BS) / (_worth(logit_BSC) + 1))


def _low(logit_BSC: Array) -> Float[Array, "*B"]:
    return jnp.maximum(_mean(logit_BSC) - _spread(logit_BSC), 0.0)


def _high(logit_BSC: Array) -> Float[Array, "*B"]:
    return jnp.minimum(_mean(logit_BSC) + _spread(logit_BSC), 1.0)


def _one_rollout(logit_BSC: Array, target_BS: Array) -> Float[Array, "*B"]:
    return log_odds_log_likelihood(logit_BSC[..., :1] - logit_BSC[..., 1:], target_BS)


BETA = Head(
    ("right", "wrong"), Readout(score=_mean, low=_low, high=_high, worth=_worth), PROBABILITY, _one_rollout,
    log_odds=(0.5, -0.5),
)  # fmt: skip
"""The logits are the logarithms of the parameters; at the start both are 1, the uniform distribution."""


def log_likelihood(
    right_BS: Array, wrong_BS: Array, k_BS: Float[Array, "*B"], n_BS: Float[Array, "*B"]
) -> Float[Array, "*B"]:
    """Returns the Beta-binomial's log probability of k right of n rollouts."""
    ways_BS = gammaln(n_BS + 1) - gammaln(k_BS + 1) - gammaln(n_BS - k_BS + 1)
    return ways_BS + betaln(k_BS + right_BS, n_BS - k_BS + wrong_BS) - betaln(right_BS, wrong_BS)


@dataclasses.dataclass(frozen=True)
class Counts(OfSteps):
    """Minus the log-likelihood of each step's counts, the mean over steps. A step without a number had one rollout."""

    supervise = ("step",)
    rollouts: str = "rollouts"  # the key of nodes that has their number

    def of_logits(self, logit_BSC, rows, config):
        target_BS, weight_BS = targets(rows, config.target)
        n_BS = jnp.maximum(jnp.nan_to_num(rows.extras[self.rollouts], nan=1.0), 1.0)
        loss = -jnp.sum(weight_BS * log_likelihood(*_parameters(logit_BSC), target_BS * n_BS, n_BS))
        judged = Judged(*BETA.judge(logit_BSC, target_BS), weight_BS)
        return loss, jnp.sum(weight_BS), {"scores": judged}

    def check(self, config) -> None:
        super().check(config)
        if heads.find(config.model.head) is not BETA:
            raise ValueError(f"the objective takes head jprm.methods.layers.rollouts:BETA, not {config.model.head!r}")
        if self.rollouts not in config.extras:
            raise ValueError(f"data.extras lacks {self.rollouts!r}: it names the nodes' number of rollouts")


counts = Counts()


def settled(
    score_N: Float[np.ndarray, " N"], worth_N: Float[np.ndarray, " N"], k_N: np.ndarray, n_N: np.ndarray,
    threshold: float, error: float = 0.05,
) -> Bool[np.ndarray, " N"]:  # fmt: skip
    """Returns whether it is known on which side of `threshold` each step's chance is, but for a probability of `error`.

    A guess of mean `score_N` that is worth `worth_N` rollouts, and k right of n further ones. Guesses that promise more
    than they hold settle too early: see `jprm eval calibration`.
    """
    below_N = stats.beta.cdf(threshold, score_N * worth_N + k_N, (1 - score_N) * worth_N + n_N - k_N)
    return np.minimum(below_N, 1 - below_N) <= error
