"""What the outcome PRM is trained on: of each fitting problem with right and wrong samples, two of either.

    python -m experiments.real.outcomes --output runs/real    # fit.jsonl, valid.jsonl: seconds

Problems of buckets 0 to 6 of `pools/own_train.jsonl.gz` train, the first twelve of bucket 7 are for validation.
"""

from __future__ import annotations

import pathlib
from typing import Any

import tyro

from jprm.io.jsonl import parse, read_lines, write_records
from jprm.methods.evidence.fit import bucket

HERE = pathlib.Path(__file__).parent
OF_EITHER = 2
HELD_OUT = 12


def main(output: pathlib.Path, pool: pathlib.Path = HERE / "pools/own_train.jsonl.gz") -> None:
    """Write the samples that train a PRM on outcomes, and those for validation.

    Args:
        output: A folder.
        pool: Pools of the policy's samples.
    """
    fit, valid = [], []
    for number, line in read_lines(pool):
        record = parse(line, f"{pool}:{number}")
        tenth = bucket(record["problem"], 10)
        chosen = mixed(record)
        if chosen and tenth < 7:
            fit.append({**record, "samples": chosen})
        elif chosen and tenth == 7 and len(valid) < HELD_OUT:
            valid.append({**record, "samples": chosen})
    for name, records in (("fit", fit), ("valid", valid)):
        write_records(output / f"{name}.jsonl", records)
        print(f"{output / name}.jsonl: {len(records)} problems")


def mixed(record: dict[str, Any]) -> list[dict[str, Any]]:
    """Returns the first OF_EITHER right and as many wrong samples that have an answer; none where either is lacking."""
    answered = [sample for sample in record["samples"] if sample.get("answer") is not None]
    right = [sample for sample in answered if sample["correct"] is True]
    wrong = [sample for sample in answered if sample["correct"] is not True]
    return right[:OF_EITHER] + wrong[:OF_EITHER] if right and wrong else []


if __name__ == "__main__":
    tyro.cli(main)
