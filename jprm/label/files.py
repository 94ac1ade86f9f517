"""Labels from file to file: what `jprm label` calls. Each prints what it did and returns the counts."""

from __future__ import annotations

import collections
import os
from collections.abc import Iterable, Iterator

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from jprm.jsonl import read_lines, read_records, write_records
from jprm.label.consensus import consensus
from jprm.label.monte_carlo import MonteCarloConfig, label_trees
from jprm.label.omega import OmegaConfig, label_problems
from jprm.label.rollouts import Rollouts
from jprm.policy.protocol import Policy
from jprm.tree import ReasoningTree, record_of, tree_of

Path = str | os.PathLike


def label_monte_carlo(policy: Policy, input: Path, output: Path, rollouts: Path, config: MonteCarloConfig) -> dict:
    """Monte Carlo values for the chains, pools and trees of a file. The file of rollouts makes it continue."""
    _check(input, output, rollouts)
    with Rollouts(policy, rollouts) as drawn, _Bar(output, sum(1 for _ in read_lines(input))) as bar:
        trees = label_trees(_trees(input), drawn, config)
        counts = _write(output, bar.follow(trees))
    return counts | {"rollouts": drawn.sampled, "failed": drawn.failed}


def label_omega(policy: Policy, input: Path, output: Path, rollouts: Path, config: OmegaConfig) -> dict:
    """OmegaPRM's trees for the problems of a file. The file of rollouts makes it continue."""
    _check(input, output, rollouts)
    left_out = collections.Counter()
    with Rollouts(policy, rollouts) as drawn, _Bar(output, sum(1 for _ in read_lines(input))) as bar:
        trees = label_problems(bar.follow(_trees(input)), drawn, config, left_out=left_out)
        counts = _write(output, trees)
    return counts | dict(left_out) | {"rollouts": drawn.sampled, "failed": drawn.failed}


def label_consensus(
    input: Path, other: Path, output: Path, thresholds: tuple[float | None, float | None] = (None, None)
) -> dict:
    """The chains of `input` on whose first error `other` agrees."""
    counts = collections.Counter()
    write_records(output, map(record_of, consensus(_trees(input), _trees(other), thresholds=thresholds, counts=counts)))
    return dict(counts)


def _trees(path: Path) -> Iterator[ReasoningTree]:
    return map(tree_of, read_records(path))


def _check(input: Path, output: Path, rollouts: Path) -> None:
    """Bad input is refused before the first rollout is paid for."""
    if len({os.path.realpath(path) for path in (input, output, rollouts)}) < 3:
        raise ValueError("input, output and rollouts are three files: one of them is named twice")
    for number, tree in enumerate(_trees(input), start=1):
        if tree.answer is None:
            raise ValueError(
                f"{os.fspath(input)}: record {number}: answer: is absent, so no rollout can be right or wrong. "
                "Give the record its `answer`, or remove it."
            )


def _write(output: Path, trees: Iterable[ReasoningTree]) -> dict:
    counts = collections.Counter(trees=0, labels=0)

    def records():
        for tree in trees:
            counts["trees"] += 1
            counts["labels"] += sum(node.label is not None for node in tree.nodes)
            yield record_of(tree)

    write_records(output, records())
    return dict(counts)


class _Bar(Progress):
    def __init__(self, output: Path, total: int):
        columns = TextColumn("labelling {task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
        super().__init__(*columns)
        self.task = self.add_task(os.path.basename(output), total=total)

    def follow(self, items: Iterable) -> Iterator:
        for item in items:
            yield item
            self.advance(self.task)
