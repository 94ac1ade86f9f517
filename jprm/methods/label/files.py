"""Labels from file to file, for `jprm label`. Every function returns counts."""

from __future__ import annotations

import collections
import dataclasses
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import islice

from jprm.fields import tests_of
from jprm.io.digests import digest
from jprm.io.jsonl import count, dump, parse, read_lines, write_records
from jprm.io.outputs import check_input, check_output, continued, cut, finish, input_of
from jprm.io.progress import Bar
from jprm.io.storage import path_of
from jprm.methods.judge.critiques import cost
from jprm.methods.judge.judge import Judge
from jprm.methods.label.config import CritiqueConfig, MonteCarloConfig, OmegaConfig
from jprm.methods.label.consensus import consensus
from jprm.methods.label.critique import matching_critiques
from jprm.methods.label.monte_carlo import label_trees
from jprm.methods.label.omega import label_problems
from jprm.methods.label.outcomes import outcomes
from jprm.methods.label.rollouts import Rollouts
from jprm.methods.policy.protocol import Policy
from jprm.methods.policy.sample_cache import KeptPolicy
from jprm.methods.verify import verifiers
from jprm.methods.verify.verifiers import Kind, checker, labelled
from jprm.model import Dtype
from jprm.tree import ReasoningTree, read_records, record_of, tree_of

Path = str | os.PathLike

OUTCOMES_AT_ONCE = 64
"""Records whose chains are judged together: programs run in batches."""

FLUSH_SECONDS = 1.0
"""Work that a kill may cost. In a bucket every flush is an object."""


def label_monte_carlo(policy: Policy, input: Path, output: Path, rollouts: Path, config: MonteCarloConfig) -> dict:
    """Labels the chains, pools and trees of a file with Monte Carlo values. The file of rollouts makes it continue."""
    _check(input, output, rollouts, config.verifier)
    with Rollouts(policy, rollouts) as drawn, _bar(output, count(input)) as bar:
        trees = label_trees(_trees(input), drawn, config)
        counts = _write(output, bar.follow(trees))
    return counts | {"rollouts": drawn.sampled, "failed": drawn.failed}


def label_omega(policy: Policy, input: Path, output: Path, rollouts: Path, config: OmegaConfig) -> dict:
    """Writes OmegaPRM's trees for the problems of a file. The file of rollouts makes it continue."""
    _check(input, output, rollouts, config.verifier, _problems)
    left_out = collections.Counter()
    with Rollouts(policy, rollouts) as drawn, _bar(output, count(input)) as bar:
        trees = label_problems(bar.follow(_problems(input)), drawn, config, left_out=left_out)
        counts = _write(output, trees)
    return counts | dict(left_out) | {"rollouts": drawn.sampled, "failed": drawn.failed}


def label_critique(judge: Judge, input: Path, output: Path, critiques: Path, config: CritiqueConfig) -> dict:
    """Writes the judge's critiques whose verdicts match the labels of a file. The file of critiques makes it continue.

    Raises:
      ValueError: a file without a label.
    """
    check_output(output, input, critiques)
    check_output(critiques, input)
    trees = list(_trees(input))
    if not any(node.label is not None for tree in trees for node in tree.nodes):
        raise ValueError(f"{os.fspath(input)}: no step has a label, so no critique can match one")
    counts = collections.Counter(trees=0, questions=0, critiques=0, matching=0, kept=0, tokens=0)
    with KeptPolicy(judge.policy, critiques) as policy, _bar(output, len(trees)) as bar:
        judge = dataclasses.replace(judge, policy=policy)
        write_records(output, matching_critiques(bar.follow(trees), judge, config, counts))
    return dict(counts)


def label_consensus(
    input: Path, other: Path, output: Path, thresholds: tuple[float | None, float | None] = (None, None)
) -> dict:
    """Writes the chains of `input` on whose first error `other` agrees."""
    check_output(output, input, other)
    counts = collections.Counter(kept=0)
    write_records(output, map(record_of, consensus(_trees(input), _trees(other), thresholds=thresholds, counts=counts)))
    return dict(counts)


def label_verify(kind: Kind, input: Path, output: Path, *, in_sandbox: bool = True) -> dict:
    """Labels the chains, pools and trees of a file by computation. The same call continues a stopped one."""
    check = checker(kind, in_sandbox=in_sandbox)
    for number, tree in enumerate(_trees(input), start=1):
        if kind == "python":
            tests_of(tree.extra, f"{os.fspath(input)}: record {number}")
    request = {"kind": kind, "sandbox": in_sandbox}
    _continued(input, output, request, lambda trees: [labelled(tree, check(tree)) for tree in trees], chunk=1)
    counts = collections.Counter({"trees": 0, "correct": 0, "incorrect": 0, "not checkable": 0})
    for tree in _trees(output):
        counts["trees"] += 1
        counts.update({1: "correct", 0: "incorrect", None: "not checkable"}[node.label] for node in tree.nodes)
    return dict(counts)


def label_outcomes(verifier: str, input: Path, output: Path) -> dict:
    """Judges the whole chains of a file by a verifier. The same call continues a stopped one."""
    judge = verifiers.find(verifier)
    check_output(output, input)
    for number, tree in enumerate(_trees(input), start=1):
        judge.check(verifiers.record_of_problem(tree), f"{os.fspath(input)}: record {number}")
    request = {"verifier": verifier, "digests": {"verifier": digest(judge)}}
    _continued(input, output, request, lambda trees: outcomes(judge, trees), chunk=OUTCOMES_AT_ONCE)
    found = [node.correct for tree in _trees(output) for node in tree.nodes if node.correct is not None]
    return {"chains": len(found), "correct": sum(found)}


def label_teacher(model: Path, input: Path, output: Path) -> dict:
    """Labels the chains, pools and trees of a file with a teacher's scores. The same call continues a stopped one."""
    from jprm.loading import load
    from jprm.methods.label.teacher import label_trees as taught
    from jprm.score.identity import identity

    check_output(output, input)
    check_input(input)
    prm = load(model)
    return _taught(input, output, identity(prm), lambda trees: taught(prm, trees))


def label_judge(judge: Judge, input: Path, output: Path, domain: str, rubric: str) -> dict:
    """Labels the chains, pools and trees of a file with a judge's scores. The same call continues a stopped one.

    Raises:
      ValueError: an empty domain or rubric.
    """
    from jprm.methods.label.teacher import judge_trees

    if not domain.strip() or not rubric.strip():
        raise ValueError("labels of a judge need a domain and a rubric, which says what a correct step is taken to be")
    check_output(output, input)
    request = judge.identity | {"domain": domain, "rubric": rubric}
    counts = _taught(input, output, request, lambda trees: judge_trees(judge, trees, domain, rubric))
    return counts | {"generated_tokens": cost(read_records(output))["tokens"]}


def _taught(
    input: Path, output: Path, request: dict, label: Callable[[list[ReasoningTree]], list[ReasoningTree]]
) -> dict:
    """Writes labelled trees as `_continued`, and returns counts of them."""
    from jprm.score.scorer import CHUNK

    _continued(input, output, request, label, chunk=CHUNK)
    counts = collections.Counter(trees=0, labels=0)
    for tree in _trees(output):
        counts["trees"] += 1
        counts["labels"] += sum(node.label is not None for node in tree.nodes)
    return dict(counts)


def label_reference(model: Path, input: Path, output: Path, dtype: Dtype = "float32") -> dict:
    """Adds a language model's log-probabilities to the records of a file. The same call continues a stopped one."""
    from jprm.methods.label.reference import label_trees, load_reference
    from jprm.score.identity import identity
    from jprm.score.scorer import CHUNK

    check_output(output, input)
    check_input(input)
    reference = load_reference(model, dtype)
    request = identity(reference) | {"stored": dtype}
    _continued(input, output, request, lambda trees: label_trees(reference, trees), chunk=CHUNK)
    sizes = [len(tree.nodes) for tree in _trees(output)]
    return {"trees": len(sizes), "log-probabilities": sum(sizes)}


def _continued(
    input: Path, output: Path, request: dict, label: Callable[[list[ReasoningTree]], list[ReasoningTree]], chunk: int
) -> None:
    """Labels the trees of `input`, `chunk` at a time, into `OUTPUT.part`, which is renamed once it is whole.

    The same request continues after the last whole chunk, or does nothing if `output` is finished.

    Raises:
      ValueError: as `jprm.io.outputs`; nothing is touched.
    """
    output, total = path_of(output), count(input)
    request = request | input_of(input)
    with continued(output, request) as part:
        if part is None:
            return
        there, due = cut(part, chunk), 0.0
        with _bar(output, total, there) as bar:
            trees = islice(_trees(input), there, None)
            while batch := list(islice(trees, chunk)):
                part.write("".join(f"{dump(record_of(tree))}\n" for tree in label(batch)).encode())
                if time.monotonic() >= due:
                    part.flush()
                    due = time.monotonic() + FLUSH_SECONDS
                bar.add(len(batch))
        finish(part, output, request)


def _trees(path: Path) -> Iterator[ReasoningTree]:
    return map(tree_of, read_records(path))


def _problems(path: Path) -> Iterator[ReasoningTree]:
    """As `_trees`, but also takes records that are a problem alone, which get a step that nobody reads."""
    for number, line in read_lines(path):
        where = f"{os.fspath(path)}:{number}"
        record = parse(line, where)
        alone = isinstance(record, Mapping) and not {"steps", "samples", "nodes", "completions"} & set(record)
        yield tree_of({**record, "steps": ["-"]} if alone else record, where)


def _check(
    input: Path,
    output: Path,
    rollouts: Path,
    verifier: str,
    read: Callable[[Path], Iterator[ReasoningTree]] = _trees,
) -> None:
    """Refuses bad input before the first rollout is paid for."""
    check_output(output, input, rollouts)
    check_output(rollouts, input)
    check = verifiers.find(verifier).check
    for number, tree in enumerate(read(input), start=1):
        check(verifiers.record_of_problem(tree), f"{os.fspath(input)}: record {number}")


def _write(output: Path, trees: Iterable[ReasoningTree]) -> dict:
    counts = collections.Counter(trees=0, labels=0)

    def records():
        for tree in trees:
            counts["trees"] += 1
            counts["labels"] += sum(node.label is not None for node in tree.nodes)
            yield record_of(tree)

    write_records(output, records())
    return dict(counts)


def _bar(output: Path, total: int, done: int = 0) -> Bar:
    return Bar(f"labelling {os.path.basename(output)}", total, done)
