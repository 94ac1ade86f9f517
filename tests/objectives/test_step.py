"""The training step: what it counts, what it learns and what it leaves unchanged."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from refusing import refused
from sklearn.metrics import roc_auc_score
from tiny import TINY, Stepper, filled, packed_trees, params, random_tree, with_nodes

from jprm import objectives
from jprm.experiment import ObjectiveConfig, OptimizerConfig, TargetConfig
from jprm.model.heads import HEADS
from jprm.model.parameters import join, split
from jprm.model.transformer import step_logits
from jprm.objectives import BINS, likelihood
from jprm.rows import empty_rows
from jprm.train.state import State, make_optimizer

CONFIG = dataclasses.replace(TINY, attention="reference", layer_groups=(1, 1))
TARGET = TargetConfig("rating", neutral="negative", after_error="keep")
OPTIMIZER = OptimizerConfig(learning_rate=0.01, decay="constant", freeze="embed|layers_0")
STEP = Stepper(CONFIG, TARGET, "cross_entropy", OPTIMIZER, 100)
START = jax.jit(make_optimizer(OPTIMIZER).init)  # else each zero of each shape is a program


def fresh():
    trained, frozen = (
        {path: jnp.array(value) for path, value in part.items()} for part in split(params(CONFIG), OPTIMIZER.freeze)
    )
    return State(jnp.int32(0), trained, frozen, START(trained))


def learnable(seed):
    """A step with an a in it is right."""
    return with_nodes(random_tree(seed, 8), lambda _, node: {"label": 1.0 if "a" in node.text else -1.0})


def micro_batches(trees, lead):
    rows = filled(packed_trees(trees, 64, 16).rows, lead[0] * lead[1])
    return jax.tree.map(lambda x: x.reshape(*lead, *x.shape[1:]), rows)


ROWS = micro_batches([learnable(seed) for seed in range(6)], (3, 2))


def test_metrics_are_sums_over_labelled_steps():
    rows = jax.tree.map(lambda x: x.reshape(6, -1), ROWS)
    weight, positive = rows.weight, rows.label > 0

    @jax.jit
    @functools.partial(jax.grad, has_aux=True)
    def gradient_of_the_mean(trained):
        logit_BSC = step_logits(join(trained, fresh().frozen), CONFIG, rows)
        return likelihood(HEADS["binary"], logit_BSC, positive, weight / weight.sum()), logit_BSC

    gradient, logit = gradient_of_the_mean(fresh().trained)
    score = np.asarray(HEADS["binary"].readout.score(logit))
    _, metrics = STEP(fresh(), ROWS)
    sums = metrics.objective["scores"]
    assert metrics.count == weight.sum() == 48
    assert sums.right == (weight * ((score > 0.5) == positive)).sum()
    expected = -np.where(positive, np.log(score), np.log1p(-score))
    np.testing.assert_allclose(metrics.loss, (weight * expected).sum(), rtol=1e-4)  # log(1 - p) of a float32 p
    np.testing.assert_allclose(metrics.gradient_norm, optax.tree.norm(gradient), rtol=1e-4)  # sums of micro-batches
    real = packed_trees([learnable(seed) for seed in range(6)], 64, 16).report.tokens
    assert metrics.tokens == real
    np.testing.assert_array_equal(sums.histogram_CN.sum(1), [(weight * ~positive).sum(), (weight * positive).sum()])

    # AUROC from the histogram is exact where no bin holds both classes.
    wrong_N, right_N = np.asarray(sums.histogram_CN)
    below_N = np.cumsum(wrong_N) - wrong_N
    auroc = (right_N * (below_N + wrong_N / 2)).sum() / (right_N.sum() * wrong_N.sum())
    bins = np.minimum((score * BINS).astype(int), BINS - 1)[weight > 0]
    assert auroc == pytest.approx(roc_auc_score(positive[weight > 0], bins))


def test_it_learns_what_can_be_learned_and_leaves_the_frozen_alone():
    compiled = STEP.cache_size()
    state, losses = fresh(), []
    before = {path: np.asarray(value) for path, value in state.frozen.items()}
    for _ in range(60):
        state, metrics = STEP(state, ROWS)
        losses.append(float(metrics.loss / metrics.count))
    assert losses[-1] < 0.3 * losses[0] and metrics.objective["scores"].right > 0.9 * metrics.count
    assert state.step == 60 and metrics.learning_rate == np.float32(0.01)
    assert {path.split("/")[1] for path in before} == {"embed", "layers_0"}
    for path, value in state.frozen.items():
        np.testing.assert_array_equal(value, before[path])
    assert jax.tree.structure(state.params) == jax.tree.structure(params(CONFIG))
    assert STEP.cache_size() <= compiled + 1  # 60 calls, one compilation


def test_padding_rows_weigh_nothing():
    batch = micro_batches([learnable(0), learnable(1)], (1, 2))
    padded = jax.tree.map(lambda a, b: np.concatenate([a, b.reshape(2, 2, *b.shape[1:])]), batch, empty_rows(4, 64, 16))
    alone, metrics = STEP(fresh(), batch)
    with_padding, padded_metrics = STEP(fresh(), padded)
    actual, wanted = (padded_metrics, with_padding.params), (metrics, alone.params)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), actual, wanted)


def test_a_batch_without_labels_changes_nothing_that_is_not_decayed():
    empty = jax.tree.map(lambda x: x.reshape(3, 2, *x.shape[1:]), empty_rows(6, 64, 16))
    before = jax.tree.map(np.asarray, fresh().params)
    state, metrics = STEP(fresh(), empty)
    assert metrics.loss == metrics.count == metrics.tokens == metrics.gradient_norm == 0
    jax.tree.map(np.testing.assert_array_equal, state.params, before)


def test_combinations_that_do_not_fit_are_refused():
    third = dataclasses.replace(TARGET, neutral="third")
    ternary = dataclasses.replace(CONFIG, head="ternary")
    for model, target, loss, message in [
        (ternary, third, "cross_entropy", "'ternary'"),
        (CONFIG, TARGET, "ternary_cross_entropy", "takes ternary"),
        (CONFIG, third, "cross_entropy", "neutral='third'"),
        (ternary, TARGET, "ternary_cross_entropy", "'ternary'"),
    ]:
        refused(ValueError, message, objectives.check, objectives.find(loss), ObjectiveConfig(model, target))
    objectives.check(objectives.find("ternary_cross_entropy"), ObjectiveConfig(ternary, third))
