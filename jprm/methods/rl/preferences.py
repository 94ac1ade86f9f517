"""Preferences: right and wrong continuations of one prefix, which DPO compares.

    dpo        the samples of a problem: right are those that the verifier accepts (Rafailov et al. 2023)
    step_dpo   the steps that samples took after the same steps (Lai et al. 2024, arXiv 2406.18629). A step is right if
               a sample through it is accepted, the hard estimate of Math-Shepherd

Every right continuation is compared with every wrong one. They are the chains of a tree whose problem is the prefix, so
that the log ratio which the objective `implicit` sums over a chain is the continuation's.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

import numpy as np
from jaxtyping import Float

from jprm.methods.rl.trajectory import Trajectory
from jprm.token_tree import TokenTree, merged

Ids = tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Alternatives:
    """What follows a prefix. Equal samples are as many continuations, equal steps are one."""

    prefix: Ids
    right: list[Ids]
    wrong: list[Ids]


def of_chains(
    prompt: Sequence[int], samples: Sequence[Trajectory], reward_G: Float[np.ndarray, " G"]
) -> list[Alternatives]:
    """Returns the samples after their prompt."""
    pairs = list(zip((one.ids for one in samples), reward_G, strict=True))
    right, wrong = [ids for ids, reward in pairs if reward >= 1], [ids for ids, reward in pairs if reward < 1]
    return [Alternatives(tuple(prompt), right, wrong)]


def of_steps(
    prompt: Sequence[int], samples: Sequence[Trajectory], reward_G: Float[np.ndarray, " G"]
) -> list[Alternatives]:
    """Returns the next steps after every sequence of steps, by depth. A chain without steps is one step."""
    reached: dict[Ids, dict[Ids, bool]] = {}
    for one, reward in zip(samples, reward_G, strict=True):
        stops = one.step_stop or (len(one.ids),)
        for begin, stop in zip((0, *stops), stops, strict=False):
            steps = reached.setdefault(one.ids[:begin], {})
            step = one.ids[begin:stop]
            steps[step] = steps.get(step, False) or bool(reward >= 1)
    return [
        Alternatives(
            (*prompt, *prefix),
            [s for s, right in steps.items() if right],
            [s for s, right in steps.items() if not right],
        )
        for prefix, steps in sorted(reached.items(), key=lambda item: len(item[0]))
    ]


def preference_trees(name: str, each: Alternatives, tokens: int) -> Iterator[TokenTree]:
    """Yields trees of at most `tokens` tokens in which every right continuation meets every wrong one once.

    The label of a chain is 1 if it is right, else 0. Where all do not fit one tree, the longer side is halved. A pair
    that does not fit is a tree of its own, which the packer refuses.
    """
    if not each.right or not each.wrong:
        return
    tree = merged(name, each.prefix, [*each.right, *each.wrong])
    if len(tree.tokens_N) <= tokens or len(each.right) == len(each.wrong) == 1:
        yield dataclasses.replace(tree, label_M=(tree.node_M < len(each.right)).astype(np.float32))
        return
    side = max(("right", "wrong"), key=lambda side: (len(some := getattr(each, side)) > 1, sum(map(len, some))))
    some = getattr(each, side)
    for half in (some[: len(some) // 2], some[len(some) // 2 :]):
        yield from preference_trees(name, dataclasses.replace(each, **{side: half}), tokens)
