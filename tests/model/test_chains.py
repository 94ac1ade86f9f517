"""Attention that needs one chain a row: rows are packed so, and train as their trees do."""

import dataclasses
import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from families import breadth
from tiny import TINY, filled, packed_trees, params, random_tree
from tiny_run import MODEL, experiment, lines, make_data, training

from jprm.experiment import TargetConfig
from jprm.model.attention import REFERENCE
from jprm.model.heads import HEADS
from jprm.model.transformer import step_logits
from jprm.objectives import likelihood, targets

T = 128
PLAIN = dataclasses.replace(TINY, attention="reference")


def plan(until_BT, position_BT, config):
    """The reference's plan, and NaN in the place of rows that hold anything but one chain."""
    index_T, end_B1 = jnp.arange(until_BT.shape[1]), until_BT[:, :1]
    alone_BT = (until_BT == jnp.maximum(end_B1, index_T + 1)) & ((position_BT == index_T) | (index_T >= end_B1))
    return REFERENCE.plan(until_BT, position_BT, config), jnp.all(alone_BT, axis=1)


def attend(q_BTKGH, k_BTKH, v_BTKH, planned, config, window=None):
    seen, alone_B = planned
    v_BTKH = jnp.where(alone_B[:, None, None, None], v_BTKH, jnp.nan)
    return REFERENCE.attend(q_BTKGH, k_BTKH, v_BTKH, seen, config, window)


ALONE = dataclasses.replace(REFERENCE, plan=plan, attend=attend, chain_rows=True)


@functools.partial(jax.jit, static_argnums=(1, 2))
def step(weights, config, target, rows):
    """What training differentiates, and its gradient."""

    def loss(weights):
        return likelihood(HEADS["binary"], step_logits(weights, config, rows), *targets(rows, target))

    return jax.value_and_grad(loss)(weights)


@pytest.mark.parametrize("after_error", ["keep", *breadth(["mask"])])
def test_chains_train_as_their_trees_do(after_error):
    """In float32 by the reference, so that only rows are at stake."""
    target = TargetConfig("rating", neutral="negative", after_error=after_error)
    trees = [random_tree(seed, 9) for seed in range(3)]
    whole, single = packed_trees(trees, T, 32), packed_trees(trees, T, 32, chains=True)
    assert len(single.rows.tokens) > 8 > len(whole.rows.tokens)
    whole, single = filled(whole.rows, 4), filled(single.rows, 24)
    assert targets(whole, target)[1].sum() == targets(single, target)[1].sum()
    loss, gradient = step(params(PLAIN), PLAIN, target, whole)
    for (name, x), y in zip(
        jax.tree_util.tree_leaves_with_path(step(params(PLAIN), PLAIN, target, single)),
        jax.tree.leaves((loss, gradient)),
        strict=True,
    ):
        size = np.abs(y).max()
        # Sums over other rows, on the scale of the largest: of some 30 steps, each off by a few 6e-8.
        np.testing.assert_allclose(x, y, atol=2e-5 * size, rtol=2e-5, err_msg=str(name))


def test_a_run_packs_chains_for_training_and_validation(tmp_path, one_device):
    """Rows of anything else would make its loss, or its validation's scores, NaN."""
    model = dataclasses.replace(MODEL, attention=f"{__name__}:ALONE")
    folder = make_data(tmp_path / "data")
    result = training.train(experiment(folder, model=model, steps=2, log_every=1), tmp_path / "run")
    assert all(np.isfinite(line["loss"]) for line in lines(tmp_path / "run") if "loss" in line)
    trees = [json.loads(line) for line in (folder / "valid.jsonl").read_text().splitlines()]
    assert result["valid_labels"] == sum(len(tree["nodes"]) for tree in trees)
    assert result["valid_auroc"] is not None
