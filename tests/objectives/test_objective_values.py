"""Objectives and losses by their formulas, and the implicit reward's gradient over chains."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from families import breadth
from scipy import special
from tiny import TINY, Letters, chain_ids, chain_rows, filled, packed_trees, params, path, placed, random_tree, visible
from tiny_run import VALUE

from jprm.experiment import ObjectiveConfig
from jprm.methods import implicit
from jprm.methods.evaluate.steps import label_class
from jprm.methods.implicit import LogProbability, log_probs, parents
from jprm.methods.label.jobs import with_log_probabilities
from jprm.model.heads import HEADS as CHANNELS
from jprm.model.heads import Weighted
from jprm.model.mesh import MeshConfig, make_mesh, put_rows
from jprm.model.parameters import held_decoder
from jprm.model.transformer import head_logits, hidden
from jprm.objectives import OBJECTIVES, Pointwise, find, likelihood
from jprm.pack import pack
from jprm.rows import empty_rows
from jprm.score.scorer import PRM
from jprm.token_tree import REFERENCE, token_tree
from jprm.tree import Node, ReasoningTree

HEADS = {head: ObjectiveConfig(dataclasses.replace(TINY, head=head), VALUE) for head in ("binary", "scalar")}
PARENTS = [p for count in (1, 2, 3, 4) for p in itertools.product(*(range(-1, i) for i in range(count)))]
"""Every tree of up to four steps: 1 + 2 + 6 + 24."""


def trees():
    """Every shape, unlabelled nodes and inner outcomes among them, with few letters, so that texts coincide.

    The extra `node` of a node is its number among those of all trees.
    """
    rng, number = np.random.default_rng(0), itertools.count()
    for shape in PARENTS:
        inner = set(shape)
        nodes = []
        for i, parent in enumerate(shape):
            known = i not in inner or rng.random() < 0.2
            label = None if rng.random() < 0.15 else float(rng.choice([0.0, 0.25, 0.75, 1.0]))
            correct = bool(rng.integers(2)) if known and rng.random() < 0.85 else None
            extra = {"node": next(number)}
            nodes.append(Node(parent, str(rng.choice(list("abc"))), label, correct=correct, extra=extra))
        yield ReasoningTree("p", tuple(nodes), semantics="value")


TREES = list(trees())
OFFSETS = np.cumsum([0, *(len(tree.nodes) for tree in TREES)])


def log_odds(logit_NC):
    return logit_NC[:, -1] - (logit_NC[:, 0] if logit_NC.shape[1] == 2 else 0.0)


def compare(objective, head, supervise, brute, chains=False, tokens=16):
    """Asserts that the packed trees' loss, count and gradient are the sums of `brute(tree, log odds of its nodes)`."""
    token_trees = [token_tree(tree, Letters(), supervise, ("node",)) for tree in TREES]
    rows = pack(token_trees, tokens, 8, too_long="error", chains=chains).rows
    table = np.random.default_rng(1).normal(scale=2.0, size=(OFFSETS[-1], 2 if head == "binary" else 1))

    def packed(table):
        total, count, metrics = objective.of_logits(table[rows.extras["node"].astype(int)], rows, HEADS[head])
        return total, count

    def looped(table):
        s = log_odds(table)
        sums = [brute(tree, s[begin : begin + len(tree.nodes)]) for tree, begin in zip(TREES, OFFSETS, strict=False)]
        return sum(total for total, _ in sums), sum(count for _, count in sums)

    (actual, count), gradient = jax.jit(jax.value_and_grad(packed, has_aux=True))(jnp.asarray(table, jnp.float32))
    (wanted, number), slope = jax.jit(jax.value_and_grad(looped, has_aux=True))(jnp.asarray(table, jnp.float32))
    assert float(number) > 10
    np.testing.assert_allclose(count, number, rtol=1e-6)
    np.testing.assert_allclose(actual, wanted, rtol=1e-5)
    np.testing.assert_allclose(gradient, slope, rtol=1e-5, atol=1e-5)  # float32; gradients are of size 1


def labelled(tree):
    return [i for i, node in enumerate(tree.nodes) if node.label is not None]


@pytest.mark.parametrize("among", ["alternatives", "problem"])
def test_bradley_terry_is_a_loop_over_pairs(among):
    def brute(tree, s):
        loss, count = 0.0, 0
        for i, j in itertools.permutations(labelled(tree), 2):
            first, second = tree.nodes[i], tree.nodes[j]
            if (among == "problem" or first.parent == second.parent) and first.label > second.label:
                loss, count = loss - jax.nn.log_sigmoid(s[i] - s[j]), count + 1
        return loss, count

    compare(find("bradley_terry", {"among": among}), "scalar", "step", brute)


def pqm_of_chain(s, right, margin):
    """The terms of one chain, by the paper's formula: their sum and their number."""
    correct, wrong = [i for i, r in enumerate(right) if r], [i for i, r in enumerate(right) if not r]
    wrongs = sum((jnp.exp(s[w] + margin) for w in wrong), 0.0)
    loss = sum((-jnp.log(jnp.exp(s[t]) / (jnp.exp(s[t]) + 1 + sum(jnp.exp(s[i]) for i in correct if i < t) + wrongs))
                for t in correct), 0.0)  # fmt: skip
    return (loss - jnp.log(1 / (1 + wrongs)), len(correct) + 1) if wrong else (loss, len(correct))


def chain_of(s, right):
    """Rows of one chain with these log-odds and marks, and its logits."""
    nodes = tuple(Node(i - 1, "a", float(mark)) for i, mark in enumerate(right))
    tree = token_tree(ReasoningTree("p", nodes, semantics="value"), Letters())
    s_S = jnp.pad(jnp.asarray(s, jnp.float32), (0, 8 - len(s)))
    return pack([tree], 16, 8, too_long="error").rows, s_S[None, :, None]


def test_pqm_is_the_mean_over_chains_of_their_means():
    """Chains of 2 and 8 steps whose last step is incorrect: sums and counts of the two rows add up."""
    rng = np.random.default_rng(0)
    q = {8: rng.normal(size=8), 2: rng.normal(size=2)}
    marks = {n: [True] * (n - 1) + [False] for n in q}
    terms = [pqm_of_chain(q[n], marks[n], 4.0) for n in q]
    wanted = {
        "chains": np.mean([total / count for total, count in terms]),
        "steps": sum(total for total, _ in terms) / sum(count for _, count in terms),
    }
    for mean, value in wanted.items():
        of_rows = [find("pqm", {"mean": mean}).of_logits(logit, rows, HEADS["scalar"])[:2]
                   for rows, logit in (chain_of(q[n], marks[n]) for n in q)]  # fmt: skip
        actual = sum(total for total, _ in of_rows) / sum(count for _, count in of_rows)
        np.testing.assert_allclose(actual, value, rtol=1e-6)
    np.testing.assert_allclose([wanted["chains"], wanted["steps"]], [3.958, 4.434], atol=5e-4)
    assert find("pqm").mean == "chains"


@pytest.mark.parametrize(("chains", "tokens"), [(False, 16), *breadth([(True, 16), (False, 6)])])
def test_pqm_of_a_tree_is_that_of_its_chains_alone(chains, tokens):
    """Also where trees are split, at every leaf or to fit rows of 6 tokens."""

    def brute(tree, s):
        loss, count = 0.0, 0
        for end in sorted(set(range(len(tree.nodes))) - {node.parent for node in tree.nodes}):
            labelled_steps = [i for i in path(tree, end) if tree.nodes[i].label is not None]
            total, terms = pqm_of_chain(
                s[np.array(labelled_steps, int)], [tree.nodes[i].label >= 0.5 for i in labelled_steps], 4.0
            )
            if terms:
                loss, count = loss + total / terms, count + 1
        return loss, count

    compare(find("pqm"), "binary", "step", brute, chains, tokens)


@pytest.mark.parametrize("margin", [0.0, *breadth([4.0])])
def test_pqm_by_steps_counts_each_step_of_a_tree_once(margin):
    """A correct step's rivals are collected chain by chain, each once."""

    def brute(tree, s):
        labelled_steps = labelled(tree)
        chains = [[i for i in path(tree, end) if i in labelled_steps] for end in range(len(tree.nodes))]
        right = {i: tree.nodes[i].label >= 0.5 for i in labelled_steps}
        loss, count = 0.0, 0
        for t in (i for i in labelled_steps if right[i]):
            on = {i for chain in chains if t in chain for i in chain}
            rivals = {i for i in on if not right[i]} | {i for i in path(tree, t)[:-1] if right.get(i)}
            below = 1 + sum(jnp.exp(s[i] + (0.0 if right[i] else margin)) for i in rivals)
            loss, count = loss - jnp.log(jnp.exp(s[t]) / (jnp.exp(s[t]) + below)), count + 1
        if wrong := [i for i in labelled_steps if not right[i]]:
            loss, count = loss - jnp.log(1 / (1 + sum(jnp.exp(s[i] + margin) for i in wrong))), count + 1
        line = [node.parent for node in tree.nodes] == list(range(-1, len(tree.nodes) - 1))
        if line and labelled_steps:  # on one chain it is the published loss
            published = pqm_of_chain(s[np.array(labelled_steps)], [right[i] for i in labelled_steps], margin)
            assert published[1] == count
            return published
        return loss, count

    compare(find("pqm", {"margin": margin, "mean": "steps"}), "binary", "step", brute)


@pytest.mark.parametrize(("decay", "chains"), [(0.6, False), *breadth([(0.0, True), (1.0, True)])])
def test_td_lambda_is_the_sum_over_chains_alone(decay, chains):
    """Also where a tree is split at every leaf."""

    def brute(tree, s):
        loss, count = 0.0, 0
        for end, node in enumerate(tree.nodes):
            if node.correct is None:
                continue
            target, later = float(node.correct), None
            for t in reversed(path(tree, end)):
                if later is not None:
                    target = (1 - decay) * jax.lax.stop_gradient(jax.nn.sigmoid(s[later])) + decay * target
                loss -= target * jax.nn.log_sigmoid(s[t]) + (1 - target) * jax.nn.log_sigmoid(-s[t])
                count, later = count + 1, t
        return loss, count

    compare(find("td_lambda", {"trace_decay": decay}), "scalar", "outcome", brute, chains)


# ---- `implicit` on packed trees: what tokens are conditioned on, and loss and gradient against a loop over chains.


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
    [("cross_entropy", "float32", False), *breadth([("cross_entropy", "float32", True), ("dpo", "int8", True)])],
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


# ---- Losses against their formulas in float64.


squared_error = OBJECTIVES["squared_error"].loss
rng = np.random.default_rng(0)
LOGITS = {classes: rng.normal(scale=3, size=(2, 5, classes)).astype(np.float32) for classes in (1, 2, 3, 5)}
TARGET, WEIGHT = rng.uniform(size=(2, 5)), rng.integers(0, 2, (2, 5)) * 0.5
close = functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6)  # float32 sums of ten terms of size 1


OF = {1: CHANNELS["scalar"], 2: CHANNELS["binary"], 3: CHANNELS["ternary"]}
"""Heads by their logits."""


def softmax(logit_BSC):
    return special.softmax(logit_BSC.astype(np.float64), axis=-1)


def right(classes):
    return special.expit(LOGITS[1][..., 0].astype(np.float64)) if classes == 1 else 1 - softmax(LOGITS[classes])[..., 0]


@pytest.mark.parametrize("classes", [1, 2, 3])
def test_a_score_is_the_probability_that_the_step_is_not_wrong(classes):
    close(OF[classes].readout(LOGITS[classes])["score"], right(classes))


def test_a_score_of_three_classes_is_never_above_one():
    """Of 10,000 sure judgements some twenty are, before they are cut: 1 + 2^-23."""
    logit_BSC = (8 * np.random.default_rng(0).normal(size=(100, 100, 3))).astype(np.float32)
    assert jnp.sum(jax.nn.softmax(logit_BSC)[..., 1:], axis=-1).max() > 1
    assert OF[3].readout.score(logit_BSC).max() == 1
    assert Weighted("softmax", (0.0, 1.0, 1.0))(logit_BSC).max() == 1


@pytest.mark.parametrize("head", ["language", "ternary"])
def test_a_loss_over_classes_is_that_of_the_chosen_ones(head):
    chosen = np.array([[0, 2, 1, 1, 0], [2, 2, 0, 1, 2]])
    p = np.take_along_axis(softmax(LOGITS[3]), chosen[..., None], -1)[..., 0]
    close(likelihood(CHANNELS[head], LOGITS[3], chosen.astype(np.float32), WEIGHT), -(WEIGHT * np.log(p)).sum())
    if head == "language":  # and a policy's score is its token's probability
        score, positive = CHANNELS[head].judge(LOGITS[3], chosen.astype(np.float32))
        close(score, p)
        assert positive.all()


@pytest.mark.parametrize("head", ["binary", "scalar"])
def test_training_calls_those_steps_right_that_the_evaluation_does(head):
    label_S = np.array([0, 0.25, 0.5, 0.75, 1], np.float32)  # of two or four rollouts, half are often right
    _, right_BS = CHANNELS[head].judge(LOGITS[2 if head == "binary" else 1][:1], label_S[None])
    assert right_BS[0].tolist() == [label_class(label, "value", "drop") == 1 for label in label_S.tolist()]


@pytest.mark.parametrize("classes", [1, 2])
def test_losses_equal_their_formulas(classes):
    p, cross_entropy = right(classes), functools.partial(likelihood, OF[classes])
    expected = -TARGET * np.log(p) - (1 - TARGET) * np.log(1 - p)
    close(cross_entropy(LOGITS[classes], TARGET, WEIGHT), (WEIGHT * expected).sum())
    close(squared_error(OF[classes], LOGITS[classes], TARGET, WEIGHT), (WEIGHT * (p - TARGET) ** 2).sum())
    # A soft target is a mixture of hard ones.
    hard_right = cross_entropy(LOGITS[classes], np.ones((2, 5)), WEIGHT * TARGET)
    hard_wrong = cross_entropy(LOGITS[classes], np.zeros((2, 5)), WEIGHT * (1 - TARGET))
    close(cross_entropy(LOGITS[classes], TARGET, WEIGHT), hard_right + hard_wrong)


def test_one_logit_is_the_difference_of_two():
    logit_BSC = LOGITS[2]
    log_odds = logit_BSC[..., 1:] - logit_BSC[..., :1]
    for loss in (likelihood, squared_error):
        close(loss(OF[1], log_odds, TARGET, WEIGHT), loss(OF[2], logit_BSC, TARGET, WEIGHT))


@pytest.mark.parametrize("name", [name for name, objective in OBJECTIVES.items() if isinstance(objective, Pointwise)])
@pytest.mark.parametrize("size", [0.0, 100.0, 1e30])
def test_losses_and_gradients_are_finite_where_the_model_is_certain(name, size):
    for head in [head for head in CHANNELS if OBJECTIVES[name].target in (None, CHANNELS[head].target)]:
        loss = functools.partial(OBJECTIVES[name].loss, CHANNELS[head])
        logit_BSC = size * jnp.sign(LOGITS[CHANNELS[head].size(3)])
        for target in (0.0, 1.0):
            value, gradient = jax.value_and_grad(loss)(logit_BSC, jnp.full((2, 5), target), jnp.ones((2, 5)))
            assert np.isfinite(value) and np.isfinite(gradient).all()
        assert loss(logit_BSC, jnp.ones((2, 5)), jnp.zeros((2, 5))) == 0  # no label, no loss


def test_a_wrong_certainty_still_has_a_gradient():
    slope = jax.grad(functools.partial(likelihood, OF[2]))
    close(slope(jnp.array([[[100.0, -100.0]]]), jnp.ones((1, 1)), jnp.ones((1, 1))), [[[1, -1]]])
