"""Labels from file to file: what `jprm label` calls. Each prints what it did and returns the counts."""

from __future__ import annotations

import collections
import os
import pathlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import islice

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from jprm.jsonl import dump, parse, read_lines, read_records, write_records
from jprm.label.config import MonteCarloConfig, OmegaConfig
from jprm.label.consensus import consensus
from jprm.label.monte_carlo import label_trees
from jprm.label.omega import label_problems
from jprm.label.rollouts import Rollouts
from jprm.outputs import continued, cut, input_of
from jprm.policy.protocol import Policy
from jprm.tree import ReasoningTree, record_of, tree_of
from jprm.verify.checkers import Kind, checker, labelled
from jprm.verify.python_steps import tests_of

Path = str | os.PathLike


def label_monte_carlo(policy: Policy, input: Path, output: Path, rollouts: Path, config: MonteCarloConfig) -> dict:
    """Monte Carlo values for the chains, pools and trees of a file. The file of rollouts makes it continue."""
    _check(input, output, rollouts)
    with Rollouts(policy, rollouts) as drawn, _Bar(output, sum(1 for _ in read_lines(input))) as bar:
        trees = label_trees(_trees(input), drawn, config)
        counts = _write(output, bar.follow(trees))
    return counts | {"rollouts": drawn.sampled, "failed": drawn.failed}


def label_omega(policy: Policy, input: Path, output: Path, rollouts: Path, config: OmegaConfig) -> dict:
    """OmegaPRM's trees for the problems of a file, with or without chains. The file of rollouts makes it continue."""
    _check(input, output, rollouts, _problems)
    left_out = collections.Counter()
    with Rollouts(policy, rollouts) as drawn, _Bar(output, sum(1 for _ in read_lines(input))) as bar:
        trees = label_problems(bar.follow(_problems(input)), drawn, config, left_out=left_out)
        counts = _write(output, trees)
    return counts | dict(left_out) | {"rollouts": drawn.sampled, "failed": drawn.failed}


def label_consensus(
    input: Path, other: Path, output: Path, thresholds: tuple[float | None, float | None] = (None, None)
) -> dict:
    """The chains of `input` on whose first error `other` agrees."""
    if os.path.realpath(output) in (os.path.realpath(input), os.path.realpath(other)):
        raise ValueError(f"{os.fspath(output)}: is an input too; name another output")
    counts = collections.Counter(kept=0)
    write_records(output, map(record_of, consensus(_trees(input), _trees(other), thresholds=thresholds, counts=counts)))
    return dict(counts)


def label_verify(kind: Kind, input: Path, output: Path, *, in_sandbox: bool = True) -> dict:
    """Formal labels for the chains, pools and trees of a file. A call that was stopped continues."""
    check = checker(kind, in_sandbox=in_sandbox)
    for number, tree in enumerate(_trees(input), start=1):
        if kind == "python":
            tests_of(tree, f"{os.fspath(input)}: record {number}")
    request = {"kind": kind, "sandbox": in_sandbox}
    _continued(input, output, request, lambda trees: [labelled(tree, check(tree)) for tree in trees], chunk=1)
    counts = collections.Counter({"trees": 0, "right": 0, "wrong": 0, "not checkable": 0})
    for tree in _trees(output):
        counts["trees"] += 1
        counts.update({1: "right", 0: "wrong", None: "not checkable"}[node.label] for node in tree.nodes)
    return dict(counts)


def label_teacher(model: Path, input: Path, output: Path) -> dict:
    """A teacher's scores as labels for the chains, pools and trees of a file. A call that was stopped continues."""
    from jprm.label.teacher import label_trees as taught
    from jprm.loading import load
    from jprm.score.scorer import CHUNK

    prm = load(model)
    request = {"model": prm.name, "step": prm.step}
    _continued(input, output, request, lambda trees: taught(prm, trees), chunk=CHUNK)
    sizes = [len(tree.nodes) for tree in _trees(output)]
    return {"trees": len(sizes), "labels": sum(sizes)}


def _continued(
    input: Path, output: Path, request: dict, label: Callable[[list[ReasoningTree]], list[ReasoningTree]], chunk: int
) -> None:
    """Labels the trees of `input`, `chunk` together, into `OUTPUT.part`, which gets its name when it is whole.

    The same request continues behind the last whole chunk, or does nothing where `output` is finished.

    Raises:
      ValueError: as `jprm.outputs`; nothing is touched.
    """
    output, total = pathlib.Path(output), sum(1 for _ in read_lines(input))
    with continued(output, request | input_of(input)) as opened:
        if opened is None:
            return
        file, part = opened
        with _Bar(output, total) as bar:
            there = cut(file, chunk)
            bar.advance(bar.task, there)
            trees = islice(_trees(input), there, None)
            while batch := list(islice(trees, chunk)):
                file.writelines(dump(record_of(tree)).encode() + b"\n" for tree in label(batch))
                file.flush()
                bar.advance(bar.task, len(batch))
        os.replace(part, output)


def _trees(path: Path) -> Iterator[ReasoningTree]:
    return map(tree_of, read_records(path))


def _problems(path: Path) -> Iterator[ReasoningTree]:
    """As `_trees`; a record that is a problem alone is one too, with a step that nobody reads."""
    for number, line in read_lines(path):
        where = f"{os.fspath(path)}:{number}"
        record = parse(line, where)
        alone = isinstance(record, Mapping) and not {"steps", "samples", "nodes", "completions"} & set(record)
        yield tree_of({**record, "steps": ["-"]} if alone else record, where)


def _check(input: Path, output: Path, rollouts: Path, read: Callable[[Path], Iterator[ReasoningTree]] = _trees) -> None:
    """Bad input is refused before the first rollout is paid for."""
    if len({os.path.realpath(path) for path in (input, output, rollouts)}) < 3:
        raise ValueError("input, output and rollouts are three files: one of them is named twice")
    for number, tree in enumerate(read(input), start=1):
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
