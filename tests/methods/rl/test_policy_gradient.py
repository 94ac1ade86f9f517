"""Objectives of a policy: gradients over trees of samples, groups, and preferences."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from families import breadth
from refusing import refused
from tiny import TINY, chain_rows, filled, optimised, params, placed

from jprm.experiment import ObjectiveConfig, TargetConfig
from jprm.methods.implicit import Implicit
from jprm.methods.rl import credit, policy_gradient
from jprm.methods.rl.credit import CreditConfig
from jprm.methods.rl.policy_gradient import PolicyGradient
from jprm.methods.rl.samples import EXTRAS, Alternatives, Rollout, group_tree, of_chains, of_steps, preference_trees
from jprm.model import transformer
from jprm.model.mesh import MeshConfig, make_mesh, put_rows
from jprm.objectives import Mean, means
from jprm.pack import pack

SMALL = dataclasses.replace(TINY, head="language", vocab_size=4, layers=1, layer_groups=(1,))
TASK = ObjectiveConfig(SMALL, TargetConfig("correctness", "none", "keep"), reference=True)
PROMPT = (3, 3, 1)
TEXTS = [(0,), *itertools.product((1, 2, 3), range(4))]
T = 0.7
"""The temperature of all samples."""
MODEL, REFERENCE, OLDER = (jax.tree.map(jnp.asarray, params(SMALL, seed)) for seed in (0, 1, 2))


def table(params, config, rows):
    """The stand-in: a hidden state for every token at every depth."""
    return params["decoder"]["embed"][rows.tokens] * (1.0 + rows.position[..., None])


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    """Logits of 8 slots at a time, so that rows have several blocks."""
    monkeypatch.setattr(policy_gradient, "BLOCK", 8)


@pytest.fixture
def tabular(monkeypatch):
    monkeypatch.setattr(policy_gradient, "hidden", table)


def distributions(model):
    """log p(token | text so far), (13, 2, 4), at every token of every text, each text in a row of its own."""
    rows = jax.tree.map(jnp.asarray, chain_rows([[*PROMPT, *text] for text in TEXTS], 8))
    x_GTD = policy_gradient.hidden(model, SMALL, rows)[:, len(PROMPT) - 1 : len(PROMPT) + 1]
    return jax.nn.log_softmax(transformer.head_logits(model, SMALL, x_GTD) / T)


TOKENS = np.array([(*text, 0)[:2] for text in TEXTS])
REAL = np.array([[t < len(text) for t in range(2)] for text in TEXTS])


def log_probabilities(model):
    """Of the texts' tokens, (13, 2), 0 after their ends."""
    return jnp.where(REAL, jnp.take_along_axis(distributions(model), TOKENS[..., None], axis=-1)[..., 0], 0.0)


def text_probabilities(model):
    return jnp.exp(jnp.sum(log_probabilities(model), axis=1))


def trajectories(model):
    """All texts, every token a step."""
    drawn = np.asarray(jax.jit(lambda model: log_probabilities(model))(model))  # traced anew: tests differ in `hidden`
    stops = [tuple(range(1, len(text) + 1)) for text in TEXTS]
    return [
        Rollout(t, x[: len(t)], stop, ("x",) * len(t), True) for t, x, stop in zip(TEXTS, drawn, stops, strict=True)
    ]


def evaluated(objective, rows, models=(MODEL, REFERENCE), task=TASK):
    """Returns loss, count, metrics and gradient."""

    @jax.jit
    def run(model, reference, rows):
        def loss(model):
            total, count, metrics = objective({"model": model, "reference": reference}, rows, task)
            return total, (count, metrics)

        (total, (count, metrics)), gradient = jax.value_and_grad(loss, has_aux=True)(model)
        return total, count, metrics, gradient

    return jax.tree.map(np.asarray, run(*models, rows))


def close(actual, wanted, tolerance=1e-5):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance), actual, wanted)


def largest(gradient):
    return max(np.abs(x).max() for x in jax.tree.leaves(gradient))


REWARD = np.random.default_rng(0).integers(0, 2, len(TEXTS)).astype(float)
SCORE = {prefix: float(x) for prefix, x in zip(
    sorted({text[:n] for text in TEXTS for n in (1, 2)}), np.random.default_rng(1).uniform(0.2, 1, 99), strict=False
)}  # fmt: skip
SCORES = [np.array([SCORE[text[: n + 1]] for n in range(len(text))]) for text in TEXTS]


def expected_rows(samples, config):
    """Rows whose loss is the expectation over all groups of two texts of the group's loss, divided by two."""
    chance = np.array([np.exp(sample.log_probability_T.astype(np.float64).sum()) for sample in samples])
    assert chance.sum() == pytest.approx(1, abs=1e-5)
    trees = []
    for pair in itertools.product(range(len(TEXTS)), repeat=2):
        group = [samples[g] for g in pair]
        advantage = credit.token_advantages(group, REWARD[list(pair)], [SCORES[g] for g in pair], config)
        trees.append(group_tree("p", PROMPT, group, [chance[list(pair)].prod() / 2 * x for x in advantage]))
    return pack(trees, 64, 64, too_long="error").rows


def test_expected_gradients_are_gradients_of_expectations():
    """One compiled function for all credits: rows differ only in their advantages."""
    task, samples = dataclasses.replace(TASK, reference=False), trajectories(MODEL)
    total = np.array([x.sum() for x in SCORES])
    last = np.array([x[-1] for x in SCORES])
    rewards = np.stack([REWARD, REWARD + total, REWARD + last])
    wanted = jax.jit(jax.jacrev(lambda model: -rewards @ text_probabilities(model)))(MODEL)
    of_reward, of_sum, of_last = (jax.tree.map(lambda x, i=i: np.asarray(x[i]), wanted) for i in range(3))
    assert largest(of_reward) > 0.02 and largest(jax.tree.map(np.subtract, of_reward, of_sum)) > 0.02
    run = jax.jit(jax.grad(lambda model, rows: PolicyGradient(temperature=T)({"model": model}, rows, task)[0]))
    for name, advantage, factor, gradient in [
        ("verifier", "reinforce", 1.0, of_reward),
        ("verifier", "rloo", 1.0, of_reward),
        ("verifier", "dr_grpo", 0.5, of_reward),  # (G - 1) / G
        ("shaping", "reinforce", 1.0, of_reward),  # its optimum is the verifier's, and so is every step towards it
        ("shaping", "rloo", 1.0, of_reward),
        ("sum", "rloo", 1.0, of_sum),
        ("implicit", "dr_grpo", 0.5, of_last),  # differences of scores add up to the last score
    ]:
        baseline = "return" if advantage == "dr_grpo" else None
        actual = run(MODEL, expected_rows(samples, CreditConfig(name, advantage, "constant", 1, baseline=baseline)))
        close(actual, jax.tree.map(lambda x, factor=factor: factor * x, gradient))


# Groups with duplicates, whose samples an older policy drew, against plain sums over the samples.

GROUP = np.random.default_rng(3).integers(0, len(TEXTS), 16)
ADVANTAGE = np.where(REAL, np.random.default_rng(4).normal(size=(len(TEXTS), 2)), 0)[GROUP]
LAST = np.array([np.where(np.arange(2) == len(TEXTS[g]) - 1, x[0], 0) for g, x in zip(GROUP, ADVANTAGE, strict=True)])
ADVANTAGE = ADVANTAGE + np.where(REAL[GROUP], 0.1 * np.random.default_rng(5).normal(size=(16, 2)), 0)
WEIGHT = np.where(REAL, np.random.default_rng(6).uniform(size=(len(TEXTS), 2)), 0)[GROUP]


def naive(model, reference, options):
    """The loss, sample by sample and token by token."""
    log, old, away = (log_probabilities(x)[GROUP] for x in (model, OLDER, reference))
    real, importance = REAL[GROUP], 1.0
    advantage = LAST if options.ratio == "sequence" else ADVANTAGE
    length = real.sum(axis=1, keepdims=True)
    apart = log - old
    if options.truncate:
        near = jax.lax.stop_gradient(log)
        shift = jnp.sum(near - old, axis=1, keepdims=True) / length if options.ratio == "sequence" else near - old
        importance, apart = jnp.minimum(jnp.exp(shift), options.truncate), log - near
    if options.ratio == "sequence":
        apart = jnp.sum(apart, axis=1, keepdims=True) / length
    ratio = jnp.exp(apart) * jnp.ones((1, 2))
    clipped = jnp.clip(ratio, 1 - options.clip_low, 1 + options.clip_high)
    surrogate = jnp.minimum(ratio * advantage, clipped * advantage)
    if options.dual_clip:
        surrogate = jnp.where(advantage < 0, jnp.maximum(surrogate, options.dual_clip * advantage), surrogate)
    cut = (jnp.abs(surrogate - ratio * advantage) > 1e-7) & real
    p, q = distributions(model)[GROUP], distributions(reference)[GROUP]
    exact = jnp.sum(jnp.exp(p) * (p - q), axis=-1)
    sampled = jnp.exp(log - old) * (jnp.exp(away - log) - 1 - (away - log))
    far = exact if options.estimator == "exact" else sampled
    loss = jnp.sum(jnp.where(real, -importance * surrogate + options.kl * WEIGHT * far, 0))
    metrics = {
        "clipped": jnp.sum(cut * jnp.abs(advantage)) / jnp.sum(jnp.abs(advantage)),
        "kl": jnp.sum(real * far) / real.sum(),
        "entropy": -jnp.sum(jnp.where(real, jnp.sum(jnp.exp(p) * p, axis=-1), 0)) / real.sum(),
        "kl_old": jnp.sum(jnp.where(real, jnp.exp(log - old) - 1 - (log - old), 0)) / real.sum(),
    }
    return loss, metrics


def tree_rows(tokens, advantage=ADVANTAGE, count=8):
    samples = [trajectories(OLDER)[g] for g in GROUP]
    sizes = [len(sample.ids) for sample in samples]
    cut = lambda values: [x[:n] for x, n in zip(values, sizes, strict=True)]  # noqa: E731
    rows = pack([group_tree("p", PROMPT, samples, cut(advantage), cut(WEIGHT))], tokens, 16, too_long="error").rows
    return filled(rows, count) if count else rows


VARIANTS = {
    "grpo": PolicyGradient(temperature=T),
    "clip-higher": PolicyGradient(temperature=T, clip_low=0.1, clip_high=0.5),
    "dual clip": PolicyGradient(temperature=T, dual_clip=1.5),
    "gspo": PolicyGradient(temperature=T, ratio="sequence", clip_low=0.1, clip_high=0.1),
    "k3": PolicyGradient(temperature=T, kl=0.3),
    "stale, exact": PolicyGradient(temperature=T, kl=0.3, estimator="exact", truncate=1.2),
    "stale sequences": PolicyGradient(temperature=T, ratio="sequence", truncate=1.1),
}
"""Each cuts some of the advantages off."""


@pytest.mark.parametrize("name", breadth(VARIANTS, but=["grpo", "dual clip", "gspo", "k3"]))
def test_a_tree_is_its_sequences(name, tabular):
    options = VARIANTS[name]
    summed = jax.value_and_grad(lambda model: naive(model, REFERENCE, options), has_aux=True)
    (loss, metrics), gradient = jax.jit(summed)(MODEL)
    advantage = LAST if options.ratio == "sequence" else ADVANTAGE
    assert len(set(GROUP.tolist())) < len(GROUP)
    rows = tree_rows(32, advantage)
    evaluation = evaluated(options, rows)
    assert int((rows.tree >= 0).any(axis=1).sum()) == 1
    close(evaluation[0], loss)
    assert evaluation[1] == len(GROUP)
    close(evaluation[3], gradient)
    close(means(evaluation[2], 1.0), {key: float(x) for key, x in metrics.items()})
    assert options.truncate or 0.05 < metrics["clipped"] < 0.95


EVERYTHING = PolicyGradient("sequence", 0.1, 0.2, dual_clip=1.1, temperature=T, kl=0.3, truncate=1.1)


@functools.cache
def everything():
    return jax.jit(jax.value_and_grad(lambda model: naive(model, REFERENCE, EVERYTHING)[0]))(MODEL)


@pytest.mark.parametrize(
    "split",
    [
        None,
        *breadth([MeshConfig(fsdp=2, tensor=2)]),
        pytest.param(MeshConfig(fsdp=2, context=2), marks=pytest.mark.slow),
    ],
    ids=["one device", "four devices", "four devices, tokens split"],
)
def test_split_trees_and_several_devices_change_nothing(split):
    """With the transformer, and with sequences whose ratios need the slots that a part repeats."""
    rows, models = tree_rows(8, LAST), (MODEL, REFERENCE)
    assert int((rows.tree >= 0).any(axis=1).sum()) > 1 and ((rows.tree >= 0) & ~rows.owned).any()
    task = dataclasses.replace(TASK, model=dataclasses.replace(SMALL, attention_block=4))
    wanted = everything()
    if split is None:
        evaluation = evaluated(EVERYTHING, rows, task=task)
    else:
        mesh = make_mesh(split, jax.devices()[:4])
        with jax.set_mesh(mesh):
            models = [placed(x, mesh) for x in models]
            evaluation = evaluated(EVERYTHING, put_rows(rows, mesh), models, task)
    close((evaluation[0], evaluation[3]), wanted)
    assert evaluation[1] == len(GROUP)


def test_the_kl_term_is_that_of_the_enumerated_vocabulary(tabular):
    """Texts weigh their probability under the policy that drew them: the sampled estimate is then an expectation."""
    chance = np.asarray(text_probabilities(OLDER), np.float64)
    samples = trajectories(OLDER)
    nothing = [np.zeros(len(sample.ids)) for sample in samples]
    weight = [np.full(len(sample.ids), p) for sample, p in zip(samples, chance, strict=True)]
    rows = pack([group_tree("p", PROMPT, samples, nothing, weight)], 32, 16, too_long="error").rows

    def brute_force(model):
        """Over prefixes, as often as the older policy visits them: the first token's, then those of 1, 2 and 3."""
        p, q = distributions(model), distributions(REFERENCE)
        kl = jnp.sum(jnp.exp(p) * (p - q), axis=-1)
        visits = jnp.exp(distributions(OLDER)[0, 0])
        second = [next(g for g, text in enumerate(TEXTS) if text[0] == first) for first in (1, 2, 3)]
        return kl[0, 0] + sum(jax.lax.stop_gradient(visits[TEXTS[g][0]]) * kl[g, 1] for g in second)

    loss, gradient = jax.jit(jax.value_and_grad(brute_force))(MODEL)
    assert largest(gradient) > 0.1
    for estimator in ("k3", "exact"):
        evaluation = evaluated(PolicyGradient(temperature=T, kl=1.0, estimator=estimator), rows)
        close((evaluation[0], evaluation[3]), (loss, gradient))


def test_ratios_are_to_the_proximal_policy_where_rows_have_one(tabular):
    """Its log-probabilities, computed by the learner, may come in an extra; those of now are the default."""
    options = VARIANTS["stale, exact"]
    rows = tree_rows(32)
    near = jax.jit(lambda rows: policy_gradient.log_probabilities(MODEL, SMALL, rows, T))(rows)
    with_proximal = dataclasses.replace(rows, extras={**rows.extras, "proximal": np.asarray(near)})
    close(evaluated(options, with_proximal), evaluated(options, rows))


def test_no_array_has_the_vocabulary_of_a_row(tabular, monkeypatch):
    """The logits of a row of 8,192 slots over 9,504 tokens, a sixteenth of Qwen2.5's, are 297 MiB."""
    monkeypatch.setattr(policy_gradient, "BLOCK", 128)
    wide = dataclasses.replace(SMALL, vocab_size=152_064 // 16, tied_embeddings=True)
    task = dataclasses.replace(TASK, model=wide)
    model = jax.eval_shape(lambda: transformer.init(wide, jax.random.key(0)))
    rows = jax.tree.map(lambda x: jax.ShapeDtypeStruct((1, 8192), x.dtype), tree_rows(32))

    def temporary(objective):
        def loss(model, reference, rows):
            return objective({"model": model, "reference": reference}, rows, task)[0]

        with optimised():
            report = jax.jit(jax.grad(loss)).lower(model, model, rows).compile().memory_analysis()
        assert report is not None
        return report.temp_size_in_bytes

    for estimator in ("k3", "exact"):
        assert temporary(PolicyGradient(estimator=estimator, kl=0.1)) < 297 * 2**20 / 8


def test_metrics_of_nothing_have_no_mean():
    assert means({"kl": Mean(jnp.float32(0), jnp.float32(0)), "x": np.float32(3)}, 2.0) == {"kl": None, "x": 1.5}


def test_what_does_not_fit_is_refused():
    for options in (dict(clip_low=0.0), dict(dual_clip=0.9), dict(estimator="k1")):
        refused(ValueError, str(*options.values()), PolicyGradient, **options)
    binary = dataclasses.replace(TASK, model=dataclasses.replace(SMALL, head="binary"))
    refused(ValueError, "'binary'", PolicyGradient().check, binary)
    refused(ValueError, "kl=0.1", PolicyGradient(kl=0.1).check, dataclasses.replace(TASK, reference=False))
    rows = dataclasses.replace(tree_rows(32), extras={})
    refused(ValueError, "penalty", PolicyGradient(), {"model": MODEL}, rows, TASK)


# ---- Groups of samples as trees: every slot has the sums of the samples through it.


TWO_IDS = [9, 8]


def sample(rng, longest=6):
    """A trajectory over two letters, so that prefixes and whole samples repeat; 0 ends it. One model sampled it."""
    ids = rng.integers(1, 3, rng.integers(0, longest)).tolist() + [0]
    old = [-1.0 - 0.1 * (sum(ids[:t]) % 7) - 0.3 * token for t, token in enumerate(ids)]
    return Rollout(tuple(ids), np.array(old, np.float32), (), (), True)


def group(seed, count=12, **changes):
    rng = np.random.default_rng(seed)
    samples = [sample(rng, **changes) for _ in range(count)]
    advantage = [rng.normal(size=len(sample.ids)) for sample in samples]
    weight = [rng.uniform(size=len(sample.ids)) for sample in samples]
    return samples, advantage, weight


def sums(samples, advantage, weight):
    """Of every prefix that a sample has: the numbers of its last token."""
    sums_of = {}
    for sample, advantage_T, weight_T in zip(samples, advantage, weight, strict=True):
        for t in range(len(sample.ids)):
            nothing = {"old": sample.log_probability_T[t], **dict.fromkeys(("gain", "penalty", "count", "weight"), 0)}
            values = sums_of.setdefault(sample.ids[: t + 1], nothing)
            values["gain"] += max(advantage_T[t], 0)
            values["penalty"] += min(advantage_T[t], 0)
            values["count"] += 1
            values["weight"] += weight_T[t]
    return sums_of


def prefixes(rows, row, slot):
    """The ids of a slot's sample up to its token, by the slots' parents."""
    ids = ()
    while slot >= 0:
        ids = (int(rows.label[row, slot]), *ids)
        slot = rows.parent[row, slot]
    return ids


@pytest.mark.parametrize("tokens", [64, 12])
@pytest.mark.parametrize("seed", range(3))
def test_slots_have_the_sums_of_their_samples(seed, tokens):
    samples, advantage, weight = group(seed)
    assert len({sample.ids for sample in samples}) < len(samples)  # there are duplicates
    packed = pack([group_tree("p", TWO_IDS, samples, advantage, weight)], tokens, 64, too_long="error")
    rows, wanted = packed.rows, sums(samples, advantage, weight)
    assert (len(rows.tokens) > 1) == (tokens == 12)
    for row, slot in zip(*np.nonzero(rows.owned), strict=True):
        ids = prefixes(rows, row, slot)
        actual = {key: rows.extras[key][row, slot] for key in EXTRAS} | {"weight": rows.weight[row, slot]}
        assert actual == pytest.approx(wanted.pop(ids), rel=1e-6)
        before, end = ids[:-1], rows.step_end[row, slot]
        assert rows.tokens[row, end] == (before[-1] if before else TWO_IDS[-1])
        assert rows.position[row, end] == len(TWO_IDS) + len(before) - 1
    assert not wanted


def test_weights_count_samples_by_default():
    samples, advantage, _ = group(0)
    tree = group_tree("p", TWO_IDS, samples, advantage)
    np.testing.assert_array_equal(tree.weight_M, tree.extras["count"])
    assert tree.weight_M.sum() == sum(len(sample.ids) for sample in samples)
    assert tuple(tree.extras) == EXTRAS


def test_a_truncated_sample_may_begin_another():
    whole = sample(np.random.default_rng(3), longest=2)
    longer = Rollout((1, 2, 1, 0), np.full(4, -1, np.float32), (), (), True)
    cut = dataclasses.replace(longer, ids=(1, 2), log_probability_T=np.full(2, -1, np.float32), ended=False)
    tree = group_tree("p", TWO_IDS, [longer, cut, whole], [np.ones(4), -np.ones(2), np.zeros(len(whole.ids))])
    rows = pack([tree], 16, 16, too_long="error").rows
    by_prefix = {prefixes(rows, 0, s): s for s in range(16) if rows.owned[0, s]}
    both, single = by_prefix[1, 2], by_prefix[1, 2, 1]
    assert (rows.extras["gain"][0, both], rows.extras["penalty"][0, both]) == (1, -1)
    assert (rows.extras["gain"][0, single], rows.extras["penalty"][0, single]) == (1, 0)


def test_a_group_that_means_nothing_is_refused():
    samples, advantage, weight = group(0)
    none = Rollout((), np.zeros(0, np.float32), (), (), False)
    other = dataclasses.replace(samples[0], log_probability_T=samples[0].log_probability_T - 3)
    for arguments, message in [
        ((TWO_IDS, [], []), "sample"),
        ((TWO_IDS, [none], [np.zeros(0)]), "samples"),
        (([], samples, advantage), "a prompt"),
        ((TWO_IDS, samples, [x[1:] for x in advantage]), "advantages"),
        ((TWO_IDS, samples, advantage, weight[1:]), "weights"),
        ((TWO_IDS, samples, [x * np.nan for x in advantage]), "advantages"),
        ((TWO_IDS, [samples[0], other], [advantage[0]] * 2), "1.50"),
    ]:
        refused(ValueError, message, group_tree, "p", *arguments)


# ---- DPO and Step-DPO on trees against loops over pairs of sequences.


PREFERENCE = ObjectiveConfig(SMALL, TargetConfig("correctness", "none", "keep"), reference=True, supervise="outcome")
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


def naive_preference(model, reference, pairs):
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
    ("alternatives", "pairs_of"),
    [(of_chains, pairs_of_chains), *breadth([(of_steps, pairs_of_steps)])],
    ids=["dpo", "step_dpo"],
)
def test_trees_of_preferences_are_loops_over_pairs(alternatives, pairs_of):
    samples, reward = sampled(1)
    pairs = pairs_of(samples, reward)
    assert len(pairs) > 5
    wanted = jax.jit(jax.value_and_grad(lambda model: naive_preference(model, REFERENCE, pairs)))(MODEL)
    assert largest(wanted[1]) > 0.1
    for tokens in (32, 16):  # 16: sides are halved
        trees = [t for pair in alternatives(PROMPT, samples, reward) for t in preference_trees("p", pair, tokens)]
        rows = filled(pack(trees, tokens, 16, too_long="error").rows, 24)
        loss, count, metrics, gradient = evaluated(Implicit(BETA, "dpo"), rows, task=PREFERENCE)
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
    refused(
        ValueError, "'test_attention:MINE'", Implicit(loss="dpo").check, dataclasses.replace(PREFERENCE, model=model)
    )
