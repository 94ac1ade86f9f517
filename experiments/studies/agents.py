"""A PRM on frozen states beside telemetry and position, on failed runs of agents and on outcomes of tau-bench.

    python -m experiments.studies.agents --shared ../shared/data --out runs/agents     # 20 minutes on 2 cores
    jprm eval agents --input runs/agents/scored/who_and_when.jsonl --output runs/agents/who_and_when.json

SmolLM2-135M reads each run once, through its first LAYERS layers. The PRM is a logistic regression on its states at the
ends of turns, fitted to the labels of other tasks as `probe_rows` fits a head (five folds). Runs are cut to fit CPUs:
each message keeps its begin and its end, as many characters as `budget` allows. Scores are put beside the uncut turns,
so that baselines see whole turns.
"""

from __future__ import annotations

import functools
import json
import pathlib
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import tyro
from scipy.special import expit

from experiments.objectives import heads, states
from jprm.io.jsonl import write_records
from jprm.methods.data.readers import find
from jprm.methods.evidence.fit import bucket
from jprm.methods.layers.head_init import Steps, fitted_head
from jprm.tree import tree_of

LAYERS = 10
"""Of 30: a probe finds ratings of steps best in layers 9 to 15."""
FOLDS = 5
FEWEST = 40
"""The fewest characters of a message, however long the run."""


def cut(record: dict[str, Any], budget: int) -> dict[str, Any]:
    """Returns the record with each message in at most `budget` characters per message of the run; calls become text.

    The text is a critic's input: clients such as OpenHands' send role and text of messages, without calls.
    """
    most = max(FEWEST, budget // len(record["messages"]))
    return {**record, "messages": [{**message, "content": text_of(message, most)} for message in record["messages"]]}


def text_of(message: dict[str, Any], most: int) -> str:
    calls = [call.get("function", call) for call in message.get("tool_calls") or ()]
    texts = [message.get("content") or "", *(json.dumps(call["arguments"]) for call in calls)]
    first, *arguments = (middle_cut(text, most // len(texts)) for text in texts)
    named = (f"[call] {call['name']} {text}" for call, text in zip(calls, arguments, strict=True))
    return "\n".join(filter(None, [first, *named])) or "-"


def middle_cut(text: str, most: int) -> str:
    half = most // 2
    return text if len(text) <= most else f"{text[:half]} ... {text[-half:]}"


def records_of(shared: pathlib.Path) -> dict[str, list[dict[str, Any]]]:
    """Returns the runs of every set. A run of tau-bench has its outcome as the label of each turn."""
    agents = shared / "agents"
    rx, runs = agents / "agentrx" / "ground_truth", agents / "agentrx"
    sets = {
        "who_and_when": list(read("who_and_when", agents / "who_and_when.jsonl")),
        "agentrx": [
            *read("agentrx", rx / "tau_ground_truth.json", runs=str(runs / "tau_dataset_full.json")),
            *read("agentrx", rx / "magentic_one_ground_truth.json", runs=str(runs / "magentic_dataset")),
        ],
        "tau_bench": list(read("tau_bench", runs / "tau_dataset_full.json")),
    }
    for record in sets["tau_bench"]:
        for message in record["messages"]:
            if message["role"] == "assistant":
                message["label"] = int(record["outcome"])
    return sets


def read(reader: str, path: pathlib.Path, **options: Any) -> Iterator[dict[str, Any]]:
    return (record for _, record in find(reader).read(path, **options))


def scored(records: Sequence[dict[str, Any]], file: pathlib.Path, folder: pathlib.Path) -> list[dict[str, Any]]:
    """Returns the records with an out-of-fold score at every turn. `file` has them as the model reads them."""
    load = functools.partial(heads._load, False, LAYERS)
    trees, chunks = states.known(file, folder, None, load)
    first = np.cumsum([0, *(len(tree.nodes) for tree in trees)])
    state_ND = np.concatenate([chunk["state_ND"] for chunk in chunks]).astype(np.float32)
    rows = [state_ND[at + np.array(tree.steps)] for at, tree in zip(first, trees, strict=False)]
    labels = [[tree.nodes[i].label for i in tree.steps] for tree in trees]
    classes = [np.array([-1 if label is None else int(label >= 0.5) for label in of_tree]) for of_tree in labels]
    fold_K = np.array([bucket(record["problem"], FOLDS) for record in records])
    out = []
    for record, score_T in zip(records, cross_fitted(rows, classes, fold_K), strict=True):
        scores = iter(score_T.tolist())
        turns = [m | {"score": next(scores)} if m["role"] == "assistant" else m for m in record["messages"]]
        out.append({**record, "messages": turns})
    return out


def cross_fitted(rows: Sequence[np.ndarray], classes: Sequence[np.ndarray], fold_K: np.ndarray) -> list[np.ndarray]:
    """Returns each run's scores by a head that is fitted to the other folds."""
    scores: list[np.ndarray] = [np.zeros(0)] * len(rows)
    for fold in range(FOLDS):
        x_ND, class_N = (
            np.concatenate([part[k] for k in np.flatnonzero(fold_K != fold).tolist()]) for part in (rows, classes)
        )
        known_N = class_N >= 0
        target_N = class_N[known_N].astype(np.float32)
        params, _ = fitted_head("scalar", Steps(x_ND[known_N], target_N, np.ones_like(target_N)))
        for k in np.flatnonzero(fold_K == fold).tolist():
            scores[k] = expit(rows[k] @ params["kernel"] + params["bias"])[:, 0]
    return scores


def main(
    shared: pathlib.Path = pathlib.Path("../shared/data"), out: pathlib.Path = pathlib.Path("runs/agents"),
    budget: int = 3000, limit: int | None = None,
) -> None:  # fmt: skip
    """Score every set of runs into `OUT/scored/`; a stopped call continues.

    Args:
        shared: The folder of the data.
        out: The folder for records, states and scores.
        budget: Characters of a run that the model reads, about.
        limit: Only the first runs of each set.
    """
    for folder in ("read", "scored"):
        (out / folder).mkdir(parents=True, exist_ok=True)
    for name, records in records_of(shared).items():
        records, file = records[:limit], out / "read" / f"{name}.jsonl"
        records = [{**record, "problem": str(tree_of(record).problem)} for record in records]
        write_records(file, [cut(record, budget) for record in records])
        with_scores = scored(records, file, out / "states" / name)
        if name == "tau_bench":  # one label a run, at its end
            for record in with_scores:
                turns = [message for message in record["messages"] if message["role"] == "assistant"]
                for turn in turns[:-1]:
                    del turn["label"]
        write_records(out / "scored" / f"{name}.jsonl", with_scores)
        print(f"{name}: {len(records)} runs")


if __name__ == "__main__":
    tyro.cli(main)
