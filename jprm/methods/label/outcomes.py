"""Outcomes of whole chains, by a verifier."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from jprm.methods.verify.verifiers import Outcome, Verifier, record_of_problem
from jprm.tree import ReasoningTree, chains_of

_CUT_OFF = Outcome(0.0, {"answer": None})


def outcomes(verifier: Verifier, trees: Sequence[ReasoningTree]) -> list[ReasoningTree]:
    """Returns the trees with `correct` at the end of every chain, and what else the verifier tells in its `extra`.

    A sample's `answer` is replaced; a chain's is the record's own, and stays. A chain whose `finish_reason` is not
    `stop` was cut off: it is incorrect, without an answer. A branch of a search that did not end stays as it is. All
    chains are judged together.
    """
    found = [(tree, record_of_problem(tree), chains_of(tree)) for tree in trees]
    whole = [
        (record, [tree.nodes[i].text for i in chain])
        for tree, record, chains in found
        for chain in chains
        if _is_whole(tree, chain)
    ]
    judged = iter(verifier.judge(whole) if whole else ())
    return [
        _with_outcomes(tree, {
            chain[-1]: next(judged) if _is_whole(tree, chain) else _CUT_OFF
            for chain in chains
            if tree.kind != "tree" or _is_whole(tree, chain)
        })
        for tree, _, chains in found
    ]  # fmt: skip


def _is_whole(tree: ReasoningTree, chain: Sequence[int]) -> bool:
    leaf = tree.nodes[chain[-1]].extra
    return any(draw.get("finish_reason", "stop") == "stop" for draw in leaf.get("draws", [leaf]))


def _with_outcomes(tree: ReasoningTree, outcome: dict[int, Outcome]) -> ReasoningTree:
    nodes = list(tree.nodes)
    for leaf, found in outcome.items():
        about = {key: value for key, value in found.about.items() if key != "answer" or tree.kind != "chain"}
        extra = {**nodes[leaf].extra, **about}
        nodes[leaf] = dataclasses.replace(nodes[leaf], correct=found.reward >= 1, extra=extra)
    return dataclasses.replace(tree, nodes=tuple(nodes))
