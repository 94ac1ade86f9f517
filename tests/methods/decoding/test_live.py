"""Live trees: scores equal those of whole chains, every token is computed once, slots are reused."""

import dataclasses
import itertools
import math

import jax
import numpy as np
import pytest
from refusing import refused
from tiny import TINY, Letters, params, placed

from jprm.methods.decoding import cache
from jprm.methods.decoding.cache import LiveTrees
from jprm.model.mesh import MeshConfig, make_mesh
from jprm.rows import padded_size
from jprm.score import scorer
from jprm.score.scorer import PRM

# Two layers of float32 sums in another order, each off by a few 6e-8, on logits of size 1.
CLOSE = dict(atol=1e-4, rtol=0)
LAYOUT = Letters(end=(28,))


def make(mesh=None, **changes):
    mesh = mesh or make_mesh(MeshConfig(), jax.devices()[:1])
    config = dataclasses.replace(TINY, **{"attention": "reference", **changes})
    return PRM(placed(params(config), mesh), config, LAYOUT, mesh, "correctness", "tiny", 1)


@pytest.fixture(scope="module", autouse=True)
def small():
    """Few slots and short paths, so that trees of some letters meet every size."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {"SLOTS": 16, "TOKENS": 64, "SHORTEST_STEP": 8, "SHORTEST_PATH": 32}.items():
            patch.setattr(cache, name, value)
        patch.setattr(scorer, "SHORTEST", 64)
        yield


@pytest.fixture(scope="module")
def prm():
    return make()


def word(rng, longest=6):
    return "".join(rng.choice(list("abc"), rng.integers(1, longest + 1)))


def grow(prm, seed, rounds, keep):
    """Beam-like (`keep` beams of each of three problems) or, with None, wild trees; every score is checked at the end.

    Returns the trees, the tokens of what was opened and extended, and the most tokens that were live at a time.
    """
    rng, trees = np.random.default_rng(seed), LiveTrees(prm)
    problems = [word(rng) for _ in range(3)]
    expected_tokens = sum(len(LAYOUT.problem(problem)) for problem in problems)
    chain_of = {root: (problem, ()) for root, problem in zip(trees.open(problems), problems, strict=True)}
    live_handles, grown, most = list(chain_of), [], 0
    for _ in range(rounds):
        parents = (
            [int(p) for p in rng.choice(live_handles, 6)] if keep is None else [p for p in live_handles for _ in "ab"]
        )
        steps = [word(rng) for _ in parents]
        handles, score_P = trees.extend(parents, steps)
        assert score_P.dtype == np.float32 and score_P.shape == (len(parents),)
        expected_tokens += sum(len(LAYOUT.step(step, 0)) for step in steps)
        for handle, parent, step, score in zip(handles, parents, steps, score_P, strict=True):
            problem, before = chain_of[parent]
            chain_of[handle] = (problem, (*before, step))
            grown.append((*chain_of[handle], score))
        most = max(most, sum(len(node.slots) for node in trees._nodes.values()))
        if keep is None:
            live_handles = [*live_handles, *handles]
            dropped = [h for h in live_handles if rng.random() < 0.3] if len(live_handles) > 8 else []
            live_handles = [h for h in live_handles if h not in dropped]
        else:
            dropped = live_handles + handles
            best = [h for p in problems for h in [h for h in handles if chain_of[h][0] == p][-keep:]]
            live_handles, dropped = best, [h for h in dropped if h not in best]
        trees.release(dropped)
    records = [{"problem": problem, "steps": list(steps)} for problem, steps, _ in grown]
    again = [record["scores"][-1] for record in prm.score_many(records)]
    np.testing.assert_allclose([score for *_, score in grown], again, **CLOSE)
    assert len({round(float(score), 4) for *_, score in grown}) > 5
    return trees, expected_tokens, most, live_handles


@pytest.mark.parametrize("seed, keep", [(0, 2), (1, None), (2, None)])
def test_scores_are_those_of_whole_chains_and_tokens_are_computed_once(prm, seed, keep):
    trees, expected_tokens, most, live_handles = grow(prm, seed, 6, keep)
    assert trees.tokens == expected_tokens
    # Slots of what was dropped were used again: no more were made than the fullest moment needed.
    assert trees._slots.size <= 2 * max(most, 16) and (keep is None or expected_tokens > trees._slots.size)
    owned = np.concatenate([node.slots for node in trees._nodes.values()])
    np.testing.assert_array_equal(np.sort(np.concatenate([owned, trees._slots.free])), np.arange(trees._slots.size))
    trees.release(live_handles)
    assert not trees._nodes and len(trees._slots.free) == trees._slots.size


def test_an_ancestor_stays_while_a_descendant_lives(prm):
    trees = LiveTrees(prm)
    (root,) = trees.open(["ab"])
    (first,), _ = trees.extend([root], ["a"])
    (second,), _ = trees.extend([first], ["b"])
    trees.release([root, first])
    (_,), score = trees.extend([second], ["c"])
    np.testing.assert_allclose(score, prm.score("ab", ["a", "b", "c"])[-1:], **CLOSE)
    for handle in (root, first, 99):
        refused(ValueError, f"{handle}", trees.extend, [handle], ["d"])
    trees.release([first, 99])  # nothing is freed twice
    bare = LiveTrees(dataclasses.replace(prm, layout=Letters()))
    refused(ValueError, "tokens", bare.extend, bare.open(["ab"]), [""])
    assert bare.extend([], [])[0] == []


def test_few_shapes_are_compiled(prm):
    trees = LiveTrees(prm)
    roots = trees.open(["a", "bc", "abc"])
    sizes = []
    for count in (1, 2, 3, 5, 6, 7, 8, 4):
        trees.extend([roots[i % 3] for i in range(count)], ["abcabc"[: 1 + i % 6] for i in range(count)])
        sizes.append(cache._extend._cache_size())
    doublings = int(math.log2(trees._slots.size / 16))
    assert len(set(sizes)) <= 4 + doublings  # batches of 1, 2, 4, 8


def test_steps_go_into_batches_of_the_fewest_cells_and_calls(prm):
    """Against all partitions of the steps in the order of their lengths; a step too long for a batch has its own."""

    def cost(batch):
        cells = padded_size(len(batch)) * padded_size(max(batch), 8)
        return cells + cache.CALL if cells <= 64 or len(batch) == 1 else math.inf

    trees, rng = LiveTrees(prm), np.random.default_rng(0)
    for _ in range(30):
        lengths = rng.integers(1, rng.choice([10, 30, 100]), 8).tolist()
        ordered, least = sorted(lengths), math.inf
        for cuts in itertools.product([False, True], repeat=7):
            ends = [n for n, cut in enumerate(cuts, 1) if cut]
            parts = [ordered[a:b] for a, b in zip([0, *ends], [*ends, 8], strict=True)]
            least = min(least, sum(map(cost, parts)))
        batches = list(trees._batches(lengths, [0] * 8))
        assert sorted(i for batch in batches for i in batch) == list(range(8))
        assert sum(cost([lengths[i] for i in batch]) for batch in batches) == least


@pytest.mark.breadth
@pytest.mark.parametrize("sizes", [(2, 2, 2)])
def test_every_mesh_scores_as_one_device_does(sizes):
    grow(make(make_mesh(MeshConfig(*sizes))), 3, 3, None)


@pytest.mark.breadth
def test_the_way_of_attention_does_not_matter_to_a_cache():
    """Tokens that are decoded have a way of their own."""
    scores = []
    for way in ("blocked", "paths"):
        trees = LiveTrees(make(head_dim=8, dtype="bfloat16", attention=way))
        root = trees.open(["ab"])
        scores.append(trees.extend(root * 3, ["abc", "abd", "ccc"])[1])
    np.testing.assert_array_equal(*scores)


def test_a_score_that_is_not_finite_is_an_error_and_its_nodes_are_dropped(prm):
    broken = dataclasses.replace(prm, params=jax.tree.map(lambda x: x * math.nan, prm.params))
    trees = LiveTrees(broken)
    roots = trees.open(["a"])
    refused(FloatingPointError, "step 'b'", trees.extend, roots, ["b"])
    assert list(trees._nodes) == roots


def test_a_language_model_is_no_scorer(prm):
    config = dataclasses.replace(prm.config, head="language")
    refused(NotImplementedError, "head='language'", LiveTrees, dataclasses.replace(prm, config=config))
