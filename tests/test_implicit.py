"""`implicit` on packed trees: what tokens are conditioned on, and loss and gradient against a loop over chains."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_objective_values import TREES
from tiny import TINY, Letters, chain_ids, chain_rows, filled, packed_trees, params, placed, random_tree, visible
from tiny_run import VALUE

from jprm.experiment import ObjectiveConfig
from jprm.methods import implicit
from jprm.methods.implicit import LogProbability, log_probs, parents
from jprm.methods.label.files import with_log_probabilities
from jprm.model.mesh import MeshConfig, make_mesh, put_rows
from jprm.model.parameters import held_decoder
from jprm.model.transformer import head_logits, hidden
from jprm.objectives import find
from jprm.pack import empty_rows, pack, token_tree
from jprm.score.scorer import PRM
from jprm.token_tree import REFERENCE

CONFIG = dataclasses.replace(TINY, layers=1, head="language", attention="reference", remat="nothing")
TASK = ObjectiveConfig(CONFIG, VALUE, reference=True, supervise="outcome")
BETA = 2.0
ENDS = [(tree, node) for tree in TREES for node, step in enumerate(tree.nodes) if step.correct is not None]
PAIRS = np.array([
    (i, j)
    for (i, (tree, better)), (j, (other, worse)) in itertools.permutations(enumerate(ENDS), 2)
    if tree is other and tree.nodes[better].correct > tree.nodes[worse].correct
])  # fmt: skip


def rewards(params, reference):
    """beta log(p / p_reference) of the steps of every chain, which is alone in its row; no tree, slot or block."""
    chains = [chain_ids(tree, node, Letters()) for tree, node in ENDS]
    rows = chain_rows(chains, 8)
    start_C = np.array([len(Letters().problem(tree.problem)) for tree, _ in ENDS])
    end_C = np.array([len(ids) for ids in chains])

    def log_p(params):
        logit_CTV = head_logits(params, CONFIG, hidden(params, CONFIG, rows))
        log_CTV = jax.nn.log_softmax(logit_CTV)[:, :-1]
        log_CT = jnp.take_along_axis(log_CTV, rows.tokens[:, 1:, None], axis=-1)[..., 0]
        index_T = np.arange(1, 8)
        scored_CT = (index_T >= start_C[:, None]) & (index_T < end_C[:, None])
        return jnp.sum(jnp.where(scored_CT, log_CT, 0.0), axis=-1)

    return BETA * (log_p(params) - log_p(reference))


def brute(loss, params, reference):
    r_C = rewards(params, reference)
    if loss == "dpo":
        return jnp.mean(jnp.log1p(jnp.exp(r_C[PAIRS[:, 1]] - r_C[PAIRS[:, 0]]))), len(PAIRS)
    right_C = np.array([tree.nodes[node].correct for tree, node in ENDS])
    return jnp.mean(jnp.log1p(jnp.exp(jnp.where(right_C, -r_C, r_C)))), len(ENDS)


@pytest.mark.parametrize(
    ("loss", "dtype", "stored"),
    [("cross_entropy", "float32", False), ("cross_entropy", "float32", True), ("dpo", "int8", True)],
)
def test_gradient_is_the_sum_over_chains_alone(loss, dtype, stored):
    """The trained model's, to 1e-5. The reference gets none, whether it is computed or `stored` in the data."""
    model, reference = params(CONFIG), dict(params(CONFIG, seed=1))
    reference["decoder"] = held_decoder(reference["decoder"], dtype)
    task, trees, extras, both = TASK, TREES, (), {"reference": reference}
    if stored:
        grid = make_mesh(MeshConfig(), jax.devices()[:1])
        with jax.set_mesh(grid):
            held = placed(reference, grid)
        prm = PRM(held, CONFIG, Letters(), grid, "implicit", "base", 0, ratio=LogProbability(CONFIG))
        trees, extras, both = with_log_probabilities(prm, TREES), (REFERENCE,), {}
        task = dataclasses.replace(TASK, reference=False, extras=extras)
    rows = pack([token_tree(tree, Letters(), "outcome", extras) for tree in trees], 16, 8, too_long="error").rows
    objective = find("implicit", {"beta": BETA, "loss": loss})
    objective.check(task)

    def packed(model):
        total, count, _ = objective({"model": model, **both}, rows, task)
        return total / count, count

    (actual, count), gradient = jax.jit(jax.value_and_grad(packed, has_aux=True))(model)
    looped = jax.value_and_grad(lambda model: brute(loss, model, reference), has_aux=True)
    (wanted, number), slope = jax.jit(looped)(model)
    assert count == number > 20
    np.testing.assert_allclose(actual, wanted, rtol=1e-5)
    assert max(float(jnp.max(jnp.abs(x))) for x in jax.tree.leaves(slope)) > 0.1  # so 1e-5 is a close tolerance
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5), gradient, slope)


def test_only_marked_tokens_are_computed(monkeypatch):
    """They are put side by side, and blocks of others are left out when it runs."""
    monkeypatch.setattr(implicit, "BLOCK", 4)
    rows = pack([token_tree(tree, Letters(), "outcome") for tree in TREES], 16, 8, too_long="error").rows
    rows, model = jax.tree.map(jnp.asarray, (rows, params(CONFIG)))
    some_BT = np.random.default_rng(0).random(rows.tokens.shape) < 0.2
    every_BT = log_probs(model, CONFIG, rows)
    calls = []

    def counted(*arguments):
        jax.debug.callback(lambda: calls.append(1))
        return head_logits(*arguments)

    monkeypatch.setattr(implicit, "head_logits", counted)
    found_BT = log_probs.__wrapped__(model, CONFIG, rows, jnp.asarray(some_BT))
    jax.effects_barrier()
    np.testing.assert_allclose(found_BT, np.where(some_BT, every_BT, 0.0), rtol=1e-5, atol=1e-6)
    most = int(np.max(np.sum(some_BT & (np.asarray(parents(rows.position)) >= 0), axis=1)))
    assert len(calls) == -(-most // 4) < 4


RANDOM = [random_tree(seed, 12) for seed in range(20)]


def by_visibility(until_BT):
    """The last other token that a token sees, from the T x T rule."""
    before_BTS = np.asarray(visible(until_BT)) & ~np.eye(until_BT.shape[1], dtype=bool)
    return np.max(np.where(before_BTS, np.arange(until_BT.shape[1]), -1), axis=-1)


@pytest.mark.parametrize(("tokens", "chains"), [(32, False), (64, False), (128, False), (64, True)])
def test_a_tokens_parent_is_the_last_token_that_it_sees(tokens, chains):
    """Trees are cut at their branches where rows are short; padding has none. On a mesh too."""
    rows = packed_trees(RANDOM, tokens, tokens // 2, too_long="truncate", chains=chains).rows
    wanted = by_visibility(rows.until)
    np.testing.assert_array_equal(jax.jit(parents)(rows.position), wanted)
    with jax.set_mesh(mesh := make_mesh(MeshConfig())):
        put = put_rows(filled(rows, -(-len(rows.tokens) // 8) * 8), mesh)
        np.testing.assert_array_equal(np.asarray(jax.jit(parents)(put.position))[: len(wanted)], wanted)
    assert (parents(jnp.asarray(empty_rows(2, 16, 4).position)) == -1).all()


def test_no_array_grows_with_the_square_of_the_row():
    program = jax.jit(parents).lower(jnp.zeros((1, 4096), jnp.int32)).compile()
    assert program.memory_analysis().temp_size_in_bytes < 100 * 4096
