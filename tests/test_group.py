"""Groups of samples as trees: every slot has the sums of the samples through it, against a dictionary of prefixes."""

import dataclasses

import numpy as np
import pytest
from refusing import refused

from jprm.methods.rl.samples import EXTRAS, Rollout, group_tree
from jprm.pack import pack

PROMPT = [9, 8]


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
    packed = pack([group_tree("p", PROMPT, samples, advantage, weight)], tokens, 64, too_long="error")
    rows, wanted = packed.rows, sums(samples, advantage, weight)
    assert (len(rows.tokens) > 1) == (tokens == 12)
    for row, slot in zip(*np.nonzero(rows.owned), strict=True):
        ids = prefixes(rows, row, slot)
        actual = {key: rows.extras[key][row, slot] for key in EXTRAS} | {"weight": rows.weight[row, slot]}
        assert actual == pytest.approx(wanted.pop(ids), rel=1e-6)
        before, end = ids[:-1], rows.step_end[row, slot]
        assert rows.tokens[row, end] == (before[-1] if before else PROMPT[-1])
        assert rows.position[row, end] == len(PROMPT) + len(before) - 1
    assert not wanted


def test_weights_count_samples_by_default():
    samples, advantage, _ = group(0)
    tree = group_tree("p", PROMPT, samples, advantage)
    np.testing.assert_array_equal(tree.weight_M, tree.extras["count"])
    assert tree.weight_M.sum() == sum(len(sample.ids) for sample in samples)
    assert tuple(tree.extras) == EXTRAS


def test_a_truncated_sample_may_begin_another():
    whole = sample(np.random.default_rng(3), longest=2)
    longer = Rollout((1, 2, 1, 0), np.full(4, -1, np.float32), (), (), True)
    cut = dataclasses.replace(longer, ids=(1, 2), log_probability_T=np.full(2, -1, np.float32), ended=False)
    tree = group_tree("p", PROMPT, [longer, cut, whole], [np.ones(4), -np.ones(2), np.zeros(len(whole.ids))])
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
        ((PROMPT, [], []), "sample"),
        ((PROMPT, [none], [np.zeros(0)]), "samples"),
        (([], samples, advantage), "a prompt"),
        ((PROMPT, samples, [x[1:] for x in advantage]), "advantages"),
        ((PROMPT, samples, advantage, weight[1:]), "weights"),
        ((PROMPT, samples, [x * np.nan for x in advantage]), "advantages"),
        ((PROMPT, [samples[0], other], [advantage[0]] * 2), "1.50"),
    ]:
        refused(ValueError, message, group_tree, "p", *arguments)
