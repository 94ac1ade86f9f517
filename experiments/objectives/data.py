"""The study's data: files to train on, to choose by, and to test on, made once in a folder."""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import pathlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from experiments.quickstart import task
from jprm.io.jsonl import write_records
from jprm.methods.data.overlap import normalise
from jprm.methods.data.readers import find
from jprm.tree import ReasoningTree, read_records, record_of, tree_of

POLICIES = ("chatgpt", "llama7b", "llama13b")


class Files(NamedTuple):
    """`train` by the kind of label; `valid` and `tests` are pools of chains of known outcome, or labelled trees."""

    train: Mapping[str, pathlib.Path]
    valid: pathlib.Path
    tests: Mapping[str, pathlib.Path]


def quickstart(shared: pathlib.Path, out: pathlib.Path) -> Files:
    """A finished run of `experiments/quickstart` in the folder `shared`. Its test problems are split in two halves.

    Of the problems with rollouts a fifth is left out of `values`, to see whether bounds hold labels not trained on.
    """
    pools = list(map(labelled, read_records(shared / "test_pools.jsonl")))
    half = len(pools) // 2
    parts = {"valid": pools[:half], "test": pools[half:]}
    formal = {"formal": shared / "formal.jsonl", "outcome": shared / "pools.jsonl"}
    train = formal | {"monte_carlo": shared / "monte_carlo.jsonl"}
    values = list(read_records(shared / "monte_carlo.jsonl"))
    kept = len(values) * 4 // 5
    parts |= {"values": values[:kept], "held_out_values": values[kept:]}
    alternatives = (record_of(merged(tree_of(record))) for record in read_records(shared / "formal.jsonl"))
    files = _written(out, parts | {"alternatives": alternatives})
    train |= {"alternatives": files["alternatives"], "values": files["values"]}
    return Files(train, files["valid"], {"quickstart": files["test"], "held_out_values": files["held_out_values"]})


def prm800k(shared: pathlib.Path, out: pathlib.Path) -> Files:
    """Phase 1, of which every twentieth problem is for validation; its test split, and a pool of another policy."""
    options: dict[str, Any] = {"human_written": "unlabelled", "control_questions": "keep"}

    def trees(name: str) -> list[dict]:
        return [record for _, record in find("prm800k").read(shared / f"prm800k/{name}.jsonl", **options)]

    records = trees("phase1_train")
    held_out = {normalise(record["problem"]) for record in records[::20]}
    parts = {True: [], False: []}
    for record in records:
        parts[normalise(record["problem"]) in held_out].append(record)
    pool = (record for record in gsm8k_pools(shared, "chatgpt") if part_of(record) == "test")
    parts_ = {"train": parts[False], "valid": parts[True], "phase1_test": trees("phase1_test"), "chatgpt": pool}
    files = _written(out, parts_)
    tests = {name: files[name] for name in ("phase1_test", "chatgpt")}
    return Files({"rating": files["train"], "alternatives": files["train"]}, files["valid"], tests)


def gsm8k(*policies: str) -> Callable[[pathlib.Path, pathlib.Path], Files]:
    """These policies' pools to train on; all policies' samples of other problems to test on.

    The problems are from GSM8K's test split, so models trained here are for this study of transfer only.
    """

    def make(shared: pathlib.Path, out: pathlib.Path) -> Files:
        parts: dict[str, list[dict]] = {part: [] for part in ("train", "valid", *POLICIES)}
        # All pools list the problems in one order: problem by problem, the first ones are of all policies.
        for records in itertools.zip_longest(*(gsm8k_pools(shared, name) for name in POLICIES)):
            for name, record in zip(POLICIES, records, strict=True):
                if record and (part := part_of(record)) == "test":
                    parts[name].append(record)
                elif record and name in policies:
                    parts[part].append(record)
        files = _written(out, parts)
        return Files({"outcome": files["train"]}, files["valid"], {name: files[name] for name in POLICIES})

    return make


SOURCES: dict[str, Callable[[pathlib.Path, pathlib.Path], Files]] = {
    "quickstart": quickstart, "prm800k": prm800k, **{f"gsm8k_{policy}": gsm8k(policy) for policy in POLICIES},
    **{f"gsm8k_but_{policy}": gsm8k(*(other for other in POLICIES if other != policy)) for policy in POLICIES},
}  # fmt: skip


def files(source: str, shared: pathlib.Path, out: pathlib.Path) -> Files:
    """Returns the files of a data set, which it writes to `out`. Raises ValueError where there is no such set."""
    if source not in SOURCES:
        raise ValueError(f"{source}: no such data set; there are {', '.join(SOURCES)}")
    return SOURCES[source](shared, out)


def gsm8k_pools(shared: pathlib.Path, policy: str) -> Iterator[dict]:
    """Yields a policy's pools, their samples without steps counted only."""
    path = shared / f"pools/gsm8k_{policy}_n19.jsonl"
    return (record for _, record in find("pools").read(path, empty_samples="drop"))


def part_of(record: Mapping[str, Any]) -> str:
    """Returns `train`, `valid` or `test`: of 1,319 problems about 900, 100 and 319, by a hash of their text."""
    number = int(hashlib.sha256(normalise(record["problem"]).encode()).hexdigest(), 16)
    if number % 1319 >= 1000:
        return "test"
    return "valid" if number // 1319 % 10 == 0 else "train"


def labelled(record: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a pool of the quickstart with the labels of its checker."""
    problem = task.parse(record["problem"])
    samples = [{**sample, "labels": task.labels(problem, sample["steps"])} for sample in record["samples"]]
    return {**record, "samples": samples}


def merged(tree: ReasoningTree) -> ReasoningTree:
    """Returns a pool as a tree in which equal steps after equal steps are one node, and so have alternatives."""
    index: dict[tuple[int, str], int] = {}
    nodes, place = [], []
    for node in tree.nodes:
        parent = place[node.parent] if node.parent >= 0 else -1
        at = index.setdefault((parent, node.text), len(nodes))
        if at == len(nodes):
            nodes.append(dataclasses.replace(node, parent=parent, extra={}))
        place.append(at)
    return ReasoningTree(tree.problem, tuple(nodes), tree.answer, tree.semantics)


def _written(out: pathlib.Path, parts: Mapping[str, Iterable[dict]]) -> dict[str, pathlib.Path]:
    out.mkdir(parents=True, exist_ok=True)
    paths = {name: out / f"{name}.jsonl" for name in parts}
    for name, records in parts.items():
        if not paths[name].is_file():
            write_records(paths[name], records)
    return paths
