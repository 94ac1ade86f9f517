"""Fits the head on the untrained decoder before fine-tuning (LP-FT, Kumar et al. 2022, arXiv 2202.10054).

A new head starts at zero, so the first updates would move a pretrained decoder for an uninformed head, on hidden states
with dimensions that differ a hundredfold in size. Fitting takes forward passes only. If the base is a run with the same
head, that head is reused.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import itertools
import os
import re
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jaxtyping import Float

from jprm import multihost
from jprm.checkpoints import base, store
from jprm.experiment import RUN, Experiment, TargetConfig, kind_of, read
from jprm.io.folders import local_copy
from jprm.io.outputs import Bar
from jprm.model.config import ModelConfig
from jprm.model.heads import HEADS, find
from jprm.model.mesh import at_tokens, put_rows, spec
from jprm.model.parameters import merge
from jprm.model.transformer import hidden, states_at_steps
from jprm.objectives import targets
from jprm.options import place_of
from jprm.rows import Rows
from jprm.statistics import auroc

PENALTIES = (1e-3, 1e-2, 1e-1, 1.0, 10.0)
"""L2 penalties per labelled step, on standardised states. The best on held-out steps is used."""


class Steps(NamedTuple):
    """Labelled steps: hidden states, targets in [0, 1], weights."""

    x_ND: Float[np.ndarray, "N D"]
    target_N: Float[np.ndarray, " N"]
    weight_N: Float[np.ndarray, " N"]


def head_of_run(path: str | os.PathLike, experiment: Experiment) -> dict[str, Any]:
    """Returns a run's non-decoder parameters if its head and step layer match the experiment; otherwise {}.

    They are e.g. `{"head": {"kernel", "bias"}}`, on the current mesh, with adapters merged. A path of another kind
    gives {}. Raises FileNotFoundError or ValueError if there is no model, ValueError if the run is damaged, OSError if
    a model at `hf://` cannot be downloaded.
    """
    if kind_of(path := place_of(path)) != "run":
        return {}
    other = read(path / RUN)
    if any(getattr(other.model, name) != getattr(experiment.model, name) for name in ("head", "head_hidden", "steps")):
        return {}
    params = merge(store.load_params(path, other, jax.sharding.get_mesh(), experiment.new_parameters)[0], other.lora)
    return {name: part for name, part in params.items() if name != "decoder"}


def kept_head(path: str | os.PathLike, experiment: Experiment) -> dict[str, Any]:
    """Like `head_of_run`, but prints a notice (the first process) if a PRM base has a head that it does not use."""
    head = head_of_run(path, experiment)
    if not head and multihost.is_first() and _scores_steps(path):
        print(f"the head of {path} is not used: training starts from its decoder and a head of zeros")
    return head


_STEP_HEAD = re.compile(r"(^|\.)(score|score_head|v_head|classifier)\.")


def _scores_steps(path: str | os.PathLike) -> bool:
    """Whether a base is a PRM, recognised by its tensor names or as a published model."""
    if (kind := kind_of(path := place_of(path))) == "run":
        return bool(find(read(path / RUN).model.head).channels)
    module = importlib.import_module(base.MODULES[kind])
    file = module.open_tensors(copy := local_copy(path))
    if any(map(_STEP_HEAD.search, getattr(file, "tensors", file))):  # of GGUF, by name; of folders, iterable
        return True
    if kind != "huggingface":
        return False
    recognise = importlib.import_module("jprm.methods.formats.adapters.published").recognise
    with contextlib.suppress(ValueError, OSError):  # a language model, which no adapter knows
        recognise(copy)  # a PRM with a language-model head: verdicts are tokens, e.g. RLHFlow's "+"
        return True
    return False


def labelled_steps(
    params: dict, config: ModelConfig, target: TargetConfig, batches: Iterable[Rows], rows: int
) -> Steps:
    """Returns the labelled steps in the first `rows` rows, rounded down to whole batches, at least one, in order.

    All processes must call it, with equal batches (at least one), on the current mesh; it shows a progress bar. Each
    computes its devices' rows and sends the others only labelled steps: most slots have no label.
    """
    mesh = jax.sharding.get_mesh()
    place = NamedSharding(mesh, spec("batch", mesh=mesh))
    labelled: list[tuple[np.ndarray, ...]] = []
    batches = iter(batches)
    first = next(batches)
    count = max(1, rows // len(first.tokens))
    with Bar("fitting the head", count) as bar:
        for i, batch in enumerate(bar.follow(itertools.chain([first], itertools.islice(batches, count - 1)))):
            arguments = params, config, target, put_rows(batch, mesh)
            if not labelled:
                multihost.compile_together(_states, *arguments)
            labelled += _own_steps(i * len(batch.tokens), *jax.device_put(_states(*arguments), place))
    local = map(np.concatenate, zip(*labelled, strict=True))
    row_N, *steps = (np.concatenate(multihost.arrays(part)) for part in local)
    order_N = np.argsort(row_N, kind="stable")  # as one process reads them
    return Steps(*(part[order_N] for part in steps))


def _own_steps(first: int, *arrays: jax.Array) -> Iterator[tuple[np.ndarray, ...]]:
    """Yields (row, state, target, weight) of the labelled steps on each of this process's devices.

    If several devices have a row, only the first yields its steps. `first` is the number of the batch's first row.
    """
    for pieces in zip(*(x.addressable_shards for x in arrays), strict=True):
        x_BSD, target_BS, weight_BS = (np.asarray(piece.data) for piece in pieces)
        some_BS = (weight_BS > 0) & (pieces[0].replica_id == 0)
        row_N = np.nonzero(some_BS)[0] + (pieces[0].index[0].start or 0) + first
        yield row_N.astype(np.int32), x_BSD[some_BS], target_BS[some_BS], weight_BS[some_BS]


def fitted_head(head: str, steps: Steps) -> tuple[dict[str, np.ndarray], float | None]:
    """Fits a linear head with `log_odds`, e.g. "binary"; returns it, and the AUROC on the held-out last fifth.

    The head is {"kernel": (D, C), "bias": (C,)}, float32. The fit is a logistic regression on standardised states; the
    standardisation is folded into the weights. The last fifth chooses the penalty, then all steps are fitted. The AUROC
    is `None` if the held-out steps are all correct or all incorrect.

    Raises:
      ValueError: the head has another kind, or the steps are all correct or all incorrect.
    """
    log_odds_C = np.array(find(head).log_odds)
    if not log_odds_C.size:
        takes = " or ".join(name for name, other in HEADS.items() if other.log_odds)
        raise ValueError(f"probe_rows fits a {takes} head, not {head!r}; set it to 0")
    if len(set((steps.target_N >= 0.5).tolist())) < 2:
        raise ValueError(f"probe_rows: all {len(steps.target_N)} labelled steps are of one class; take more")
    kept = len(steps.target_N) * 4 // 5
    train, rest = Steps(*(x[:kept] for x in steps)), Steps(*(x[kept:] for x in steps))
    candidates = list(_path(train))
    losses = [_loss(rest.x_ND @ w_D + b, rest) for w_D, b in candidates]
    best = int(np.argmin(losses))
    w_D, b = candidates[best]
    right_N = rest.target_N >= 0.5
    area = float(auroc(rest.x_ND @ w_D, right_N, rest.weight_N)) if 0 < right_N.sum() < len(right_N) else None
    w_D, b = list(_path(steps, PENALTIES[best:]))[0]
    kernel_DC, bias_C = w_D[:, None] * log_odds_C, b * log_odds_C
    return {"kernel": kernel_DC.astype(np.float32), "bias": bias_C.astype(np.float32)}, area


@functools.partial(jax.jit, static_argnums=(1, 2))
def _states(params: dict, config: ModelConfig, target: TargetConfig, rows: Rows):
    x_BSD = states_at_steps(params, config, at_tokens(hidden(params, config, rows), rows.step_end), rows.parent)
    return x_BSD.astype(jnp.float32), *targets(rows, target)


def _path(steps: Steps, penalties: Iterable[float] = PENALTIES) -> Iterator[tuple[np.ndarray, float]]:
    """Yields (weights, bias) on raw states for each penalty, by Newton's method with warm starts."""
    mean_D = np.average(steps.x_ND, axis=0, weights=steps.weight_N)
    std_D = np.sqrt(np.average((steps.x_ND - mean_D) ** 2, axis=0, weights=steps.weight_N)) + 1e-6
    z_NE = np.concatenate([(steps.x_ND - mean_D) / std_D, np.ones((len(steps.x_ND), 1))], 1).astype(np.float64)
    total, D = steps.weight_N.sum(), len(mean_D)
    w_E = np.zeros(D + 1)
    for penalty in penalties:
        ridge_E = np.append(np.full(D, penalty * total), 0.0)  # the bias is free
        for _ in range(20):
            p_N = 1 / (1 + np.exp(-np.clip(z_NE @ w_E, -30, 30)))
            slope_E = z_NE.T @ (steps.weight_N * (p_N - steps.target_N)) + ridge_E * w_E
            curve_N = steps.weight_N * np.maximum(p_N * (1 - p_N), 1e-6)
            move_E = np.linalg.solve((z_NE * curve_N[:, None]).T @ z_NE + np.diag(ridge_E + 1e-9), slope_E)
            w_E = w_E - move_E
            if np.abs(move_E).max() < 1e-6:
                break
        w_D = w_E[:D] / std_D
        yield w_D, float(w_E[D] - mean_D @ w_D)


def _loss(logit_N, steps: Steps) -> float:
    """Returns the mean cross-entropy."""
    loss_N = np.logaddexp(0, logit_N) - steps.target_N * logit_N
    return float(np.average(loss_N, weights=steps.weight_N))
