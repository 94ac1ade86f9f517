"""The cache of prefixes: scores of a PRM, only tokens after a known prefix, a fixed pool, callers kept apart."""

import dataclasses
import threading

import jax
import numpy as np
import pytest
from families import breadth
from refusing import refused
from test_live import CLOSE, LAYOUT, make, word
from tiny import compiling

from jprm.methods.decoding import cache as caches
from jprm.methods.decoding.cache import PrefixCache
from jprm.model.mesh import MeshConfig, make_mesh
from jprm.score import scorer
from jprm.token_tree import token_tree
from jprm.tree import tree_of


@pytest.fixture(scope="module", autouse=True)
def small():
    """Few tokens a call and short paths, so that chains of some letters need several of both."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(caches, "EDIT", 8)
        patch.setattr(caches, "SHORTEST_PREFIX", 16)
        patch.setattr(scorer, "SHORTEST", 64)
        yield


@pytest.fixture(scope="module")
def prm():
    return make()


def record_of(rng):
    """A chain or a pool whose samples share steps."""
    problem, steps = rng.choice(["a", "bcabcabc"]), [word(rng) for _ in range(rng.integers(1, 6))]
    if rng.random() < 0.5:
        return {"problem": problem, "steps": steps}
    samples = [{"steps": [*steps[: rng.integers(len(steps) + 1)], word(rng)]} for _ in range(3)]
    return {"problem": problem, "samples": samples}


def prefixes_of(tree):
    """Every token of a tree as the ids from its chain's first to itself."""
    chains: list[tuple] = []
    for node in tree.nodes:
        above = chains[node.parent] if node.parent >= 0 else tuple(LAYOUT.problem(tree.problem))
        chains.append((*above, *LAYOUT.step(node.text, 0)))
    return {chain[:n] for chain in chains for n in range(1, len(chain) + 1)}


def same(got, expected):
    for name, value_N in got.items():
        np.testing.assert_allclose(value_N, expected[name], **CLOSE)


@pytest.mark.parametrize("sizes, seed", [((1, 1, 1), 0), *breadth([((2, 2, 2), 1)])])
def test_outputs_are_the_models_and_only_new_tokens_are_computed(sizes, seed):
    prm, rng = make(make_mesh(MeshConfig(*sizes), jax.devices()[: int(np.prod(sizes))])), np.random.default_rng(seed)
    cache, known = PrefixCache(prm, 1024), {"me": set(), "you": set()}
    trees = [tree_of(record_of(rng)) for _ in range(10)]
    for tree, expected in zip(trees, prm.outputs_of(trees), strict=True):
        caller, tokens = rng.choice(["me", "you"]), prefixes_of(tree)
        got, cached = cache.outputs_of(tree, caller)
        same(got, expected)
        assert cached == len(tokens & known[caller])
        known[caller] |= tokens
    assert known["me"] & known["you"] and len(cache._slots.free) == 1024 - sum(map(len, known.values()))


def test_an_edit_computes_what_follows_it(prm):
    cache, steps = PrefixCache(prm, 256), ["abcab", "bca", "ccb", "aab"]
    chain = lambda steps: tree_of({"problem": "abc", "steps": steps})  # noqa: E731
    assert cache.outputs_of(chain(steps), "me")[1] == 0
    edited = chain([*steps[:2], "cab", steps[3]])
    got, cached = cache.outputs_of(edited, "me")
    same(got, prm.outputs_of([edited])[0])
    # The problem, two steps and the first letter of the third: "ccb" and "cab" begin alike.
    assert cached == len(LAYOUT.problem("abc")) + sum(len(LAYOUT.step(step, 0)) for step in steps[:2]) + 1
    assert cache.outputs_of(chain(steps), "me")[1] == len(token_tree(chain(steps), LAYOUT).tokens_N)  # undone


def test_a_full_pool_gives_up_what_was_used_least_recently(prm):
    """Against a plain list of prefixes in the order of their use, of which the first leave; chains have no ties."""
    rng, slots, order = np.random.default_rng(2), 60, []
    cache = PrefixCache(prm, slots)
    for _ in range(40):
        tree = tree_of({"problem": rng.choice(["a", "bcabcabc"]), "steps": [word(rng, 3) for _ in range(6)]})
        caller = rng.choice(["me", "you"])
        tokens = {(caller, *prefix) for prefix in prefixes_of(tree)}
        got, cached = cache.outputs_of(tree, caller)
        assert cached == len(tokens & set(order))
        order = [tokens_of for tokens_of in order if tokens_of not in tokens] + sorted(tokens, key=len, reverse=True)
        order = order[-slots:]
        assert sorted([*cache._slots.free, *cache._key]) == list(range(slots)) and len(cache._key) <= len(order)
        assert {cache._slot[key] for key in cache._key.values()} == set(cache._key)
        assert all(before in cache._key for before, _ in cache._slot if isinstance(before, int))  # no orphan
        same(got, prm.outputs_of([tree])[0])
    assert len(order) == slots


def test_nothing_is_compiled_after_the_warm_up(prm):
    cache, rng = PrefixCache(prm, 200), np.random.default_rng(3)
    cache.warm_up()
    with compiling() as compiled:
        for _ in range(10):
            cache.outputs_of(tree_of(record_of(rng)), "me")
        cache.outputs_of(tree_of({"problem": "a", "steps": ["abcabcab"] * 20}), "me")
    assert threading.current_thread().name not in compiled


def test_what_does_not_fit_is_refused_and_a_failure_leaves_nothing_behind(prm, monkeypatch):
    cache = PrefixCache(prm, 30)
    tree = tree_of({"problem": "a", "steps": ["abc", "cab"]})
    refused(ValueError, "30", cache.outputs_of, tree_of({"problem": "a", "steps": ["abcabcab"] * 20}), "me")
    cache.outputs_of(tree, "me")

    def fail(*args):
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(caches, "_extend", fail)
        with pytest.raises(MemoryError):
            cache.outputs_of(tree_of({"problem": "a", "steps": ["abc", "bbb"]}), "me")
    assert len(cache._slots.free) == 30
    got, cached = cache.outputs_of(tree, "me")
    assert cached == 0
    same(got, prm.outputs_of([tree])[0])
    with pytest.raises(NotImplementedError, match="head='language'"):
        PrefixCache(dataclasses.replace(prm, config=dataclasses.replace(prm.config, head="language")), 30)
