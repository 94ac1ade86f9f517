"""The tokens that implicit process rewards are conditioned on."""

import jax
import jax.numpy as jnp
import numpy as np
from tiny import filled, packed_trees, random_tree, visible

from jprm.methods.implicit import parents
from jprm.model.mesh import MeshConfig, make_mesh, put_rows
from jprm.pack import empty_rows

TREES = [random_tree(seed, 12) for seed in range(20)]


def by_visibility(until_BT):
    """The last other token that a token sees, from the T x T rule."""
    before_BTS = np.asarray(visible(until_BT)) & ~np.eye(until_BT.shape[1], dtype=bool)
    return np.max(np.where(before_BTS, np.arange(until_BT.shape[1]), -1), axis=-1)


def test_a_tokens_parent_is_the_last_token_that_it_sees():
    for tokens in (32, 64, 128):  # trees are cut at their branches where rows are short
        rows = packed_trees(TREES, tokens, tokens // 2, too_long="truncate").rows
        np.testing.assert_array_equal(jax.jit(parents)(rows.position), by_visibility(rows.until))


def test_chains_and_padding_have_no_parents_elsewhere():
    rows = packed_trees(TREES, 64, 32, too_long="truncate", chains=True).rows
    np.testing.assert_array_equal(parents(jnp.asarray(rows.position)), by_visibility(rows.until))
    assert (parents(jnp.asarray(empty_rows(2, 16, 4).position)) == -1).all()


def test_parents_on_a_mesh():
    rows = filled(packed_trees(TREES, 64, 32, too_long="truncate").rows, 32)
    mesh = make_mesh(MeshConfig())
    with jax.set_mesh(mesh):
        found = jax.jit(parents)(put_rows(rows, mesh).position)
    np.testing.assert_array_equal(found, by_visibility(rows.until))


def test_no_array_grows_with_the_square_of_the_row():
    program = jax.jit(parents).lower(jnp.zeros((1, 4096), jnp.int32)).compile()
    assert program.memory_analysis().temp_size_in_bytes < 100 * 4096
