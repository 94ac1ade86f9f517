"""Fleets on Ray: what the commands do, as classes for `ray.data`, and the shards of a command on a cluster.

Ray schedules, scales, restarts what died and moves data; jprm supplies functions of records. In a pipeline of your own:

    dataset = ray.data.read_json("gs://BUCKET/pools/")
    scored = dataset.map_batches(fleet.Score, fn_constructor_args=["runs/prm"], batch_size=64, num_gpus=1,
                                 compute=ray.data.ActorPoolStrategy(min_size=1, max_size=16))
    scored.write_parquet("gs://BUCKET/scored/")

A batch has one row a record: its keys as columns, or the whole record as JSON in the column `record`. Results have one
row a record with its JSON in `record`, since records of one file differ in keys and depth, which a table's schema
cannot. Scores of packed records depend in the last digit on their neighbours: `run_shards`, which the commands' option
`--engine ray` uses, keeps one process's blocks and therefore its bytes.
"""

from __future__ import annotations

import importlib
import json
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from jprm.devices import enable_compile_cache
from jprm.io.jsonl import dump, parse
from jprm.tree import ReasoningTree, record_of, tree_of

Batch = Mapping[str, np.ndarray]


def records_in(batch: Batch) -> list[dict[str, Any]]:
    """Returns the records of a batch of rows. Raises RecordError for a text in `record` that is no JSON object."""
    if "record" in batch:
        texts = [text if isinstance(text, bytes) else str(text).encode() for text in batch["record"]]
        return [parse(text, f"row {number} of a batch") for number, text in enumerate(texts)]
    rows = zip(*(_plain(column) for column in batch.values()), strict=True)
    return [{key: value for key, value in zip(batch, row, strict=True) if value is not None} for row in rows]


def batch_of(records: list[dict[str, Any]]) -> dict[str, np.ndarray]:
    """Returns records as rows of a table: the JSON of each."""
    return {"record": np.array([dump(record) for record in records], object)}


def _plain(value: Any) -> Any:
    """Returns what Arrow and NumPy made of JSON's lists, objects and numbers as Python's own. An absent key is None."""
    if isinstance(value, np.ndarray | list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items() if item is not None}
    return value.item() if isinstance(value, np.generic) else value


class Score:
    """Scores every step, as `jprm score`, by a run, a published PRM or a fused verifier. `options`: of `jprm.load`."""

    def __init__(self, model: str | os.PathLike, **options: Any):
        import jprm

        self.scorer = jprm.load(model, **options)

    def __call__(self, batch: Batch) -> dict[str, np.ndarray]:
        return batch_of(list(self.scorer.score_many(records_in(batch))))


class JudgeScore(Score):
    """Scores every step by a judge's critiques, as `jprm score --judge`. `policy` is the judge's JSON file."""

    def __init__(self, policy: str | os.PathLike):
        from jprm.methods.judge.load import load_judge

        self.scorer = load_judge(Path(policy))


class Label:
    """Labels every step. `label` takes a list of trees and returns the labelled ones, in order.

    It is called once, where the pipeline runs, to load what it needs: `Label(functools.partial(by_teacher, DIR))`.
    """

    def __init__(self, make: Callable[[], Callable[[list[ReasoningTree]], list[ReasoningTree]]]):
        self.label = make()

    def __call__(self, batch: Batch) -> dict[str, np.ndarray]:
        return batch_of([record_of(tree) for tree in self.label([tree_of(record) for record in records_in(batch)])])


def by_check(kind: Any) -> Callable[[list[ReasoningTree]], list[ReasoningTree]]:
    """Returns labels by computation, as `jprm label verify`."""
    from jprm.methods.verify.verifiers import checker, labelled

    check = checker(kind, in_sandbox=True)
    return lambda trees: [labelled(tree, check(tree)) for tree in trees]


def by_outcome(verifier: str) -> Callable[[list[ReasoningTree]], list[ReasoningTree]]:
    """Returns outcomes of whole chains, as `jprm label outcomes`."""
    from jprm.methods.label.files import with_outcomes
    from jprm.methods.verify import verifiers

    judge = verifiers.find(verifier)
    return lambda trees: with_outcomes(judge, trees)


def by_teacher(model: str | os.PathLike) -> Callable[[list[ReasoningTree]], list[ReasoningTree]]:
    """Returns soft labels by a model, as `jprm label teacher`."""
    import jprm
    from jprm.methods.label.files import teacher_labels

    prm = jprm.load(model)
    return lambda trees: teacher_labels(prm, trees)


def by_rollouts(policy: str | os.PathLike, **config: Any) -> Callable[[list[ReasoningTree]], list[ReasoningTree]]:
    """Returns Monte Carlo values, as `jprm label mc`, by fields of `MonteCarloConfig`. Rollouts are not kept."""
    from jprm.methods.label.config import MonteCarloConfig
    from jprm.methods.label.monte_carlo import Rollouts, label_trees
    from jprm.methods.policy.load import load_policy

    sampled, settings = load_policy(policy), MonteCarloConfig(**config)

    def label(trees: list[ReasoningTree]) -> list[ReasoningTree]:
        with tempfile.TemporaryDirectory() as folder, Rollouts(sampled, Path(folder) / "rollouts.jsonl") as rollouts:
            return list(label_trees(iter(trees), rollouts, settings))

    return label


# ---- The shards of a command.


REFUSALS = (ValueError, OSError, NotImplementedError, FloatingPointError)
"""What a command raises for a user's mistake. Ray would wrap it in a report of itself, so it comes back as a result."""


class _Worker:
    """A process of the cluster that runs one shard after another, with what `work` loads kept between them."""

    def __init__(self, work: Callable[[int], Any]):
        enable_compile_cache()
        self.work = work

    def __call__(self, row: dict[str, Any]) -> dict[str, Any]:
        try:
            return {"shard": row["id"], "result": json.dumps(self.work(int(row["id"]))), "refusal": ""}
        except REFUSALS as error:
            return {"shard": row["id"], "result": "null", "refusal": str(error) or repr(error)}


def run_shards(
    work: Callable[[int], Any], count: int, *, workers: tuple[int, int] = (1, 1), **resources: Any
) -> Iterator[tuple[int, Any]]:
    """Calls `work` with 0 to count - 1 on a Ray cluster, and yields (number, result) as each ends, in any order.

    A shard whose node or process died is called again on another; it must continue what it finds. `work` is sent to the
    workers, and what it returns comes back as JSON.

    Args:
      workers: processes, at least and at most: Ray scales between them.
      resources: of one process: `num_cpus`, `num_gpus`, `resources={"TPU": 4}`. The cluster is the one that RAY_ADDRESS
        names, or this machine.

    Raises:
      ValueError: workers or shards below 1; or what `work` refused, in its words. Other shards' files stay.
    """
    ray: Any = importlib.import_module("ray")
    data: Any = importlib.import_module("ray.data")

    least, most = workers
    if not 1 <= least <= most or count < 1:
        raise ValueError(f"{count} shards on {least} to {most} workers: each is at least 1, and the first the lower")
    if not ray.is_initialized():
        ray.init(log_to_driver=False, logging_level="ERROR", include_dashboard=False)
    context = data.DataContext.get_current()
    context.enable_progress_bars = context.print_on_execution_start = False
    pool = data.ActorPoolStrategy(min_size=least, max_size=most)
    rows = data.range(count, override_num_blocks=count)
    done = rows.map(_Worker, fn_constructor_args=(work,), compute=pool, **({"num_cpus": 1} | resources))
    for row in done.iter_rows():
        if row["refusal"]:
            raise ValueError(f"shard {row['shard']}/{count}: {row['refusal']}")
        yield row["shard"], json.loads(row["result"])
