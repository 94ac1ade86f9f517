"""Runs with outcomes as records of a critic: tasks held out, texts cut, the outcome as the label of every turn.

python -m examples.critic.prepare --input data/agents/agentrx/tau_dataset_full.json --out runs/critic
"""

import pathlib

import tyro

from experiments.studies.agents import cut, read
from jprm.io.jsonl import write_records
from jprm.methods.evidence.fit import bucket

FOLDS = 3


def main(input: pathlib.Path, out: pathlib.Path = pathlib.Path("runs/critic"), budget: int = 3000) -> None:
    """Write `train.jsonl` and `test.jsonl`, which share no task.

    Args:
        input: A results file of tau-bench.
        out: The folder.
        budget: Characters of a run that the critic reads, about.
    """
    parts: dict[str, list] = {"train": [], "test": []}
    for record in read("tau_bench", input):
        turns = [message for message in record["messages"] if message["role"] == "assistant"]
        for turn in turns:
            turn["label"] = int(record["outcome"])
        record["classes"] = [None] * len(turns)  # nobody labelled the other outputs
        part = "test" if bucket(record["problem"], FOLDS) == 0 else "train"
        if part == "test":  # one label a run, at its end
            for turn in turns[:-1]:
                del turn["label"]
        parts[part].append(cut(record, budget))
    out.mkdir(parents=True, exist_ok=True)
    for name, records in parts.items():
        write_records(out / f"{name}.jsonl", records)
        print(f"{name}: {len(records)} runs, {sum(record['outcome'] == 1 for record in records)} solved")


if __name__ == "__main__":
    tyro.cli(main)
