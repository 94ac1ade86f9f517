"""DPO and Step-DPO on trees against loops over pairs of sequences."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from refusing import refused
from test_policy_gradient import MODEL, PROMPT, REFERENCE, SMALL, close, evaluated, largest
from tiny import chain_rows, filled

from jprm.experiment import ObjectiveConfig, TargetConfig
from jprm.methods.implicit import Implicit
from jprm.methods.rl.samples import Alternatives, Rollout, of_chains, of_steps, preference_trees
from jprm.model import transformer
from jprm.pack import pack

TASK = ObjectiveConfig(SMALL, TargetConfig("correctness", "none", "keep"), reference=True, supervise="outcome")
BETA = 0.3
LONGEST = 6


def sampled(seed, count=12):
    """Samples of up to three steps of one or two tokens, of which many begin alike, and rewards."""
    rng = np.random.default_rng(seed)
    samples = []
    for _ in range(count):
        sizes = rng.integers(1, 3, rng.integers(0, 4))
        ids = (*rng.integers(1, 3, sizes.sum()).tolist(), 0)
        stops = tuple(np.cumsum(sizes).tolist())
        stops = (*stops[:-1], len(ids)) if stops else ()
        samples.append(Rollout(ids, np.zeros(len(ids), np.float32), stops, ("x",) * len(stops), True))
    return samples, rng.integers(0, 2, count).astype(float)


def pairs_of_chains(samples, reward):
    """(right, wrong) as whole texts and the number of tokens before what is compared."""
    both = itertools.product(range(len(samples)), repeat=2)
    return [(samples[i].ids, samples[j].ids, 0) for i, j in both if reward[i] == 1 and reward[j] == 0]


def pairs_of_steps(samples, reward):
    """By brute force: all pairs of different steps after equal steps; a step is right if a sample through it is."""
    paths = []
    for sample in samples:
        stops = sample.step_stop or (len(sample.ids),)
        paths.append([sample.ids[a:b] for a, b in zip((0, *stops), stops, strict=False)])

    def reached(path):
        return any(texts[: len(path)] == path and right for texts, right in zip(paths, reward, strict=True))

    steps = {tuple(path[: n + 1]) for path in paths for n in range(len(path))}
    pairs = []
    for a, b in itertools.product(steps, repeat=2):
        if a[:-1] == b[:-1] and reached(list(a)) and not reached(list(b)):
            texts = (tuple(itertools.chain(*x)) for x in (a, b))
            pairs.append((*texts, sum(map(len, a[:-1]))))
    return pairs


def naive(model, reference, pairs):
    """The sum over pairs of -log sigmoid of the difference of log ratios, every text in a row of its own."""
    texts = sorted({text for pair in pairs for text in pair[:2]})
    rows = jax.tree.map(jnp.asarray, chain_rows([[*PROMPT, *text] for text in texts], len(PROMPT) + 8))
    target = np.array([[*text, *[0] * (8 - len(text))] for text in texts])

    def log_probabilities(params):
        x_GTD = transformer.hidden(params, SMALL, rows)[:, len(PROMPT) - 1 : -1]
        log_GTV = jax.nn.log_softmax(transformer.head_logits(params, SMALL, x_GTD))
        return jnp.take_along_axis(log_GTV, target[..., None], axis=-1)[..., 0]

    ratio = log_probabilities(model) - log_probabilities(reference)
    loss = 0.0
    for right, wrong, begin in pairs:
        a, b = (BETA * jnp.sum(ratio[texts.index(text), begin : len(text)]) for text in (right, wrong))
        loss -= jax.nn.log_sigmoid(a - b)
    return loss


@pytest.mark.parametrize(
    ("alternatives", "pairs_of"), [(of_chains, pairs_of_chains), (of_steps, pairs_of_steps)], ids=["dpo", "step_dpo"]
)
def test_trees_of_preferences_are_loops_over_pairs(alternatives, pairs_of):
    samples, reward = sampled(1)
    pairs = pairs_of(samples, reward)
    assert len(pairs) > 5
    wanted = jax.jit(jax.value_and_grad(lambda model: naive(model, REFERENCE, pairs)))(MODEL)
    assert largest(wanted[1]) > 0.1
    for tokens in (32, 16):  # 16: sides are halved
        trees = [t for pair in alternatives(PROMPT, samples, reward) for t in preference_trees("p", pair, tokens)]
        rows = filled(pack(trees, tokens, 16, too_long="error").rows, 24)
        loss, count, metrics, gradient = evaluated(Implicit(BETA, "dpo"), rows, task=TASK)
        assert count == len(pairs) and metrics["pair_accuracy"] <= count
        close((loss, gradient), wanted)


@pytest.mark.parametrize("seed", range(8))
def test_every_right_continuation_meets_every_wrong_one_once(seed):
    samples, reward = sampled(seed, 20)
    for pair in (*of_chains(PROMPT, samples, reward), *of_steps(PROMPT, samples, reward)):
        met, least = [], len(pair.prefix) + 2 * LONGEST + 2
        for tree in preference_trees("p", pair, least):
            assert len(tree.tokens_N) <= least and tree.problem == len(pair.prefix)
            packed = pack([tree], least, 64, too_long="error")
            assert packed.report.rows == 1 and packed.report.pairs_lost == 0
            right = tree.label_M == 1
            met += [(r, w) for r in texts(tree, right) for w in texts(tree, ~right)]
        assert sorted(met) == sorted(itertools.product(pair.right, pair.wrong))


def texts(tree, some_M):
    """The continuations that end at these slots."""
    ids_read = []
    for run in tree.run_M[some_M].tolist():
        ids = []
        while run > 0:
            begin = tree.start_R[run]
            ids = tree.tokens_N[begin : begin + tree.length_R[run]].tolist() + ids
            run = tree.parent_R[run]
        ids_read.append(tuple(ids))
    return ids_read


def test_there_is_nothing_to_learn_where_all_are_right_or_a_pair_does_not_fit():
    assert list(preference_trees("p", Alternatives((1,), [(2,)], []), 9)) == []
    (tree,) = preference_trees("p", Alternatives((1,), [(2, 2)], [(3, 3)]), 4)
    assert len(tree.tokens_N) == 5  # the packer splits it, and the loop refuses such rows before it begins


def test_dpo_refuses_an_attention_with_one_chain_a_row():
    model = dataclasses.replace(SMALL, attention="test_attention:MINE")
    refused(ValueError, "'test_attention:MINE'", Implicit(loss="dpo").check, dataclasses.replace(TASK, model=model))
