"""The decoder: a tree equals its chains, other parts of the row do not matter, and implementations agree."""

import dataclasses
import functools
import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from families import breadth
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tiny import (
    GEMMA,
    TINY,
    Letters,
    chain_ids,
    chain_rows,
    filled,
    hidden,
    logits,
    packed_trees,
    params,
    random_tree,
    reasoning_trees,
    visible,
)  # fmt: skip

from jprm.methods.data.step_labels import PRM800K
from jprm.model.heads import HEADS
from jprm.model.transformer import step_logits
from jprm.objectives import likelihood
from jprm.pack import pack
from jprm.token_tree import token_tree
from jprm.tokenizer import load_tokenizer, native_layout
from jprm.tree import Node, tree_of

PATHS = dataclasses.replace(TINY, attention="paths", attention_block=32)
PLAIN = dataclasses.replace(TINY, attention="reference")
GEMMA_PATHS = dataclasses.replace(GEMMA, attention="paths")
ROWS, TOKENS, SLOTS, CHAINS = 3, 64, 16, 24

# Two layers of float32 sums of up to some 50 products in another order, each off by a few 6e-8, on logits of size 1.
close = functools.partial(np.testing.assert_allclose, atol=1e-4, rtol=1e-4)


@functools.partial(jax.jit, static_argnums=1)
def loss_of(weights, config, rows):
    """Summed loss, every slot with its own target, and the logits; and its gradient."""

    def loss(weights):
        logit_BSC = step_logits(weights, config, rows)
        return likelihood(HEADS["binary"], logit_BSC, rows.label, rows.weight), logit_BSC

    return jax.value_and_grad(loss, has_aux=True)(weights)


def assert_trees_close(a, b, **tolerance):
    """Leaf by leaf, against the largest element of the leaf: small sums of large terms are as exact as those terms."""
    for (name, x), y in zip(jax.tree_util.tree_leaves_with_path(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_allclose(x, y, **tolerance, atol=1e-4 * np.abs(y).max() + 1e-7, err_msg=str(name))


WAYS = st.sampled_from([PLAIN, PATHS, GEMMA_PATHS])


@settings(max_examples=40, deadline=None)
@given(st.lists(reasoning_trees(), min_size=1, max_size=3), st.integers(0, 99), WAYS)
def test_a_tree_equals_its_chains_each_alone_with_the_gradients(trees, seed, config):
    packed = packed_trees(trees, TOKENS, SLOTS, too_long="truncate")
    owned_BS = packed.node_BS >= 0
    pairs = list(zip(packed.tree_BS[owned_BS].tolist(), packed.node_BS[owned_BS].tolist(), strict=True))
    assume(len(packed.rows.tokens) <= ROWS and 1 <= len(pairs) <= CHAINS)

    target_N = np.random.default_rng(seed).uniform(size=len(pairs)).astype(np.float32)
    label_BS = np.zeros(owned_BS.shape, np.float32)
    label_BS[owned_BS] = target_N
    rows = filled(dataclasses.replace(packed.rows, label=label_BS, weight=owned_BS.astype(np.float32)), ROWS)
    alone = chain_rows([chain_ids(trees[t], n, Letters()) for t, n in pairs], TOKENS, CHAINS)
    alone.label[: len(pairs), 0] = target_N

    weights, plain = params(config), dataclasses.replace(config, attention="reference")
    (loss, logit_BSC), gradient = loss_of(weights, config, rows)
    (loss_alone, logit_N1C), gradient_alone = loss_of(weights, plain, alone)
    close(np.asarray(logit_BSC)[: len(owned_BS)][owned_BS], logit_N1C[: len(pairs), 0])
    close(loss, loss_alone)
    assert_trees_close(gradient, gradient_alone, rtol=1e-4)


@pytest.mark.parametrize("most", [*breadth([4]), pytest.param(40, marks=pytest.mark.slow)])
def test_real_trees_equal_their_chains(shared_data, smollm2_gguf, most):
    """50 PRM800K trees with the real tokenizer; of every one, up to `most` steps, the last of its path among them."""
    layout, tokens, rng = native_layout(load_tokenizer(smollm2_gguf)), 1024, np.random.default_rng(0)
    file, options = shared_data / "prm800k" / "phase1_train.jsonl", {"human_written": "positive"}
    records = list(itertools.islice(PRM800K.read(file, control_questions="keep", **options), 300))
    trees = []
    for i in rng.permutation(len(records)):
        tree = tree_of(records[i][1])
        flat = token_tree(tree, layout)
        if len(flat.tokens_N) < tokens:
            trees.append((tree, flat))
    trees = trees[:50]
    assert len(trees) == 50
    config = dataclasses.replace(
        PATHS, vocab_size=layout.tokenizer.vocab_size, width=32, head_dim=8, rope_theta=1e5, attention_block=256
    )
    packed = pack([flat for _, flat in trees], tokens, 128, too_long="error")
    score = {}
    for b, *part in zip(range(len(packed.rows.tokens)), packed.tree_BS, packed.node_BS, strict=True):
        row = jax.tree.map(lambda x: x[b : b + 1], packed.rows)  # noqa: B023
        for t, n, logit_C in zip(*part, np.asarray(logits(params(config), config, row))[0], strict=True):
            score[int(t), int(n)] = logit_C
    assert set(score) - {(-1, -1)} == {(t, n) for t, (tree, _) in enumerate(trees) for n in range(len(tree.nodes))}

    plain, few = dataclasses.replace(config, attention="reference"), 8
    pairs = [
        (t, n)
        for t, (tree, _) in enumerate(trees)
        for n in {*rng.permutation(len(tree.nodes))[:most], len(tree.nodes) - 1}
    ]
    chains = sorted(((chain_ids(trees[t][0], int(n), layout), (t, int(n))) for t, n in pairs), key=lambda c: len(c[0]))
    for first in range(0, len(chains), few):
        part = chains[first : first + few]
        length = -(-len(part[-1][0]) // 256) * 256  # few shapes to compile
        logit_N1C = logits(params(config), plain, chain_rows([ids for ids, _ in part], length, few))
        close(np.stack([score[pair] for _, pair in part]), logit_N1C[: len(part), 0])


def test_where_a_tree_lies_and_what_lies_beside_it_do_not_matter():
    trees = [random_tree(seed, 8) for seed in range(6)]
    packed = packed_trees(trees, TOKENS, 20)
    assert len(packed.rows.tokens) < 6  # several trees a row
    together = np.asarray(logits(params(), PATHS, filled(packed.rows, 6)))
    for index, tree in enumerate(trees):
        alone = packed_trees([tree], 32, 9)  # another row length, another number of slots and of rows
        mine_BS = packed.tree_BS == index
        order = np.argsort(packed.node_BS[mine_BS])
        expected = np.asarray(logits(params(), PATHS, alone.rows))[0, np.argsort(alone.node_BS[0, : len(tree.nodes)])]
        close(together[: len(mine_BS)][mine_BS][order], expected)


def test_the_score_of_a_step_does_not_depend_on_later_steps():
    steps = random_tree(3, 8).nodes
    chain = [Node(i - 1, node.text) for i, node in enumerate(steps)]
    whole = dataclasses.replace(random_tree(3), nodes=tuple(chain))
    logit_SC = np.asarray(logits(params(), TINY, packed_trees([whole], 32, 8).rows))[0]
    for k in range(1, 8):
        prefix = dataclasses.replace(whole, nodes=tuple(chain[:k]))
        np.testing.assert_array_equal(logits(params(), TINY, packed_trees([prefix], 32, 8).rows)[0, :k], logit_SC[:k])


def test_a_logit_depends_on_the_visible_tokens_and_on_no_other():
    rows = packed_trees([random_tree(5, 10), random_tree(6, 4)], 64, 16).rows
    assert len(rows.tokens) == 1
    rows = dataclasses.replace(rows, tokens=np.arange(64, dtype=np.int32)[None])  # no two alike: embedding row = token
    weights = params()

    def score(embed_VD):
        decoder = weights["decoder"] | {"embed": embed_VD}
        return step_logits(weights | {"decoder": decoder}, PATHS, rows)[0, :, 1]

    gradient_SV = np.abs(jax.jit(jax.jacrev(score))(weights["decoder"]["embed"])).max(-1)
    seen_ST = np.asarray(visible(rows.until))[0][rows.step_end[0]]
    np.testing.assert_array_equal(gradient_SV > 0, seen_ST)


def test_padding_alone_gives_finite_numbers_and_no_gradient():
    rows = packed_trees([], TOKENS, SLOTS).rows
    (loss, logit_BSC), gradient = loss_of(params(), PATHS, filled(rows, ROWS))
    assert loss == 0 and np.isfinite(logit_BSC).all()
    assert all(not np.any(g) for g in jax.tree.leaves(gradient))


@pytest.fixture(scope="module")
def some_rows():
    rows = filled(packed_trees([random_tree(seed) for seed in range(3)], TOKENS, SLOTS).rows, ROWS)
    return dataclasses.replace(rows, label=(rows.label > 0).astype(np.float32))


def test_what_is_computed_again_changes_nothing(some_rows):
    (loss, _), gradient = loss_of(params(), PLAIN, some_rows)
    for change in (dict(remat="nothing"), dict(remat="dots"), dict(remat="attention"), dict(product_layers=1)):
        (other, _), other_gradient = loss_of(params(), dataclasses.replace(PLAIN, **change), some_rows)
        np.testing.assert_allclose(other, loss, rtol=1e-6)
        assert_trees_close(other_gradient, gradient, rtol=1e-4)


def test_groups_of_layers_are_one_stack_cut_in_pieces(some_rows):
    single = dataclasses.replace(PLAIN, layers=3, layer_groups=())
    double = dataclasses.replace(single, layer_groups=(2, 1))
    weights = params(single)
    decoder = {name: value for name, value in weights["decoder"].items() if name != "layers_0"}
    for name, part in (("layers_0", slice(0, 2)), ("layers_1", slice(2, 3))):
        decoder[name] = jax.tree.map(lambda x: x[part], weights["decoder"]["layers_0"])  # noqa: B023
    assert jax.tree.map(jnp.shape, {**weights, "decoder": decoder}) == jax.tree.map(jnp.shape, params(double))
    close(logits({**weights, "decoder": decoder}, double, some_rows), logits(weights, single, some_rows))


def test_bfloat16_is_near_float32(some_rows):
    low = dataclasses.replace(PATHS, dtype="bfloat16")
    logit_BSC = logits(params(), low, some_rows)
    assert logit_BSC.dtype == jnp.float32
    assert jax.eval_shape(lambda: hidden(params(), low, some_rows)).dtype == jnp.bfloat16
    expected = np.asarray(logits(params(), TINY, some_rows))
    # 8 bits of mantissa: each of some ten roundings on the way is off by 2^-9 of the stream, of size 1.
    assert np.abs(logit_BSC - expected).max() < 0.05 < np.abs(expected).max()


def test_layers_for_cpus_multiply_bfloat16_to_float32_and_others_do_not(some_rows):
    """Else XLA converts both operands to float32 first, which takes twice as long."""
    for way, wide in ((PATHS, "f32"), (PLAIN, "bf16")):
        low = dataclasses.replace(way, dtype="bfloat16", remat="nothing")
        text = jax.jit(lambda rows, c=low: hidden(params(), c, rows)).lower(some_rows).as_text()
        gate_and_up = re.findall(r"dot_general .*xbf16>, tensor<16x32xbf16>\) -> tensor<.*x32x(\w+)>", text)
        assert set(gate_and_up) == {wide}


@pytest.mark.parametrize(
    "head, tied, classes", [("ternary", True, 3), ("scalar", True, 1), ("language", True, 64), ("language", False, 64)]
)
def test_heads_read_the_hidden_state_at_the_step_ends(some_rows, head, tied, classes):
    config = dataclasses.replace(PLAIN, head=head, tied_embeddings=tied)
    weights = params(config)
    x_BTD = np.asarray(hidden(weights, config, some_rows))
    kernel_DC = weights["head"]["kernel"] if "head" in weights else weights["decoder"]["embed"].T
    bias_C = weights.get("head", {}).get("bias", np.zeros(classes))
    x_BSD = np.stack([x_TD[end_S] for x_TD, end_S in zip(x_BTD, some_rows.step_end, strict=True)])
    close(logits(weights, config, some_rows), x_BSD @ kernel_DC + bias_C)


def test_every_part_of_gemma_matters(some_rows):
    """Else parity could hold with a part left out on both sides of a test."""
    language = dataclasses.replace(GEMMA, head="language", layer_groups=())
    expected = logits(params(language), language, some_rows)
    for change in (dict(windows=(5,)), dict(windows=(6, 0)), dict(rope_theta_local=0.0), dict(attention_softcap=0.0),
                   dict(query_pre_attn_scalar=0), dict(logit_softcap=0.0), dict(design="llama")):  # fmt: skip
        other = dataclasses.replace(language, **change)
        weights = params(language)
        assert np.abs(logits(weights, other, some_rows) - expected).max() > 1e-3, change


def test_equal_windows_are_equal_configs():
    for windows in ((4, 0), (4, 0, 4), (4, 0, 4, 0)):
        assert dataclasses.replace(TINY, windows=windows).windows == (4, 0)
    assert dataclasses.replace(TINY, windows=(4, 4, 4)).windows == (4,)
    assert dataclasses.replace(TINY, windows=(4, 4, 0)).windows == (4, 4, 0)
    assert dataclasses.replace(TINY, windows=(0, 0)) == TINY
