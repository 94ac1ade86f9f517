"""A PRM on the states of Qwen2.5-Coder-0.5B, and the same model as a judge, on failed runs of agents and on tau-bench.

    python -m experiments.studies.agents --base qwen2.5-coder-0.5b.gguf --shared ../shared/data --out runs/agents
    jprm eval agents --input runs/agents/scored/who_and_when.jsonl --output runs/agents/who_and_when.json
    jprm eval agents --input runs/agents/judged/who_and_when.jsonl --output runs/agents/who_and_when_judge.json

The model reads each run once, as a tree. The trunk is the run as a judge's question shows it, and the judge's question
about each turn is a branch. A run is one file of the folder `readings`: a stopped call continues.

The PRM is a logistic regression on states, fitted to the labels of other tasks as `probe_rows` fits a head (five
folds). The layer of the states, and whether they are of the turn's or of the question's last token, are chosen by the
AUROC on the two other sets. The judge's score is the probability of Yes, against No, as the first word of its verdict.

Runs are cut to fit CPUs: each message keeps its begin and its end, as many characters as `budget` allows. Scores are
put beside the uncut turns, so that baselines see whole turns.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
import os
import pathlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import tyro
from jaxtyping import Float
from scipy.special import expit

from experiments.real.token_states import Base, streams
from jprm.io.jsonl import write_records
from jprm.io.outputs import Bar, atomic_file
from jprm.methods.data.readers import find
from jprm.methods.evidence.fit import bucket
from jprm.methods.judge.critiques import PROMPTS
from jprm.methods.layers.head_init import Steps, fitted_head
from jprm.model.transformer import head_logits
from jprm.pack import pack
from jprm.rows import padded_size
from jprm.statistics import Interval, auroc, bootstrap, weighted_mean
from jprm.token_tree import TokenTree, merged
from jprm.tokenizer import Layout
from jprm.tree import tree_of

LAYERS = (8, 12, 16)
"""Of 24: the states of the PRM are after one of these."""
PLACES = ("turn", "question")
PROMPT = dataclasses.replace(
    PROMPTS["plain"],
    text=(
        "Problem:\n{problem}\n\nSolution so far:\n{steps}\n\n"
        "Is step {number} correct? Write \\boxed{Yes} or \\boxed{No}."
    ),
    step="Step {number}:\n{step}",
)
SHOWN = dataclasses.replace(PROMPT, text=PROMPT.text.partition("\n\nIs step")[0])
"""The prompt up to the turn."""
OPENING = "\\boxed{"
BLOCK, LEAST = 256, 64
"""Rows are multiples of BLOCK tokens, with at least LEAST slots: each size is compiled once."""
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
    return {
        name: [{**record, "problem": str(tree_of(record).problem)} for record in records]
        for name, records in sets.items()
    }


def read(reader: str, path: pathlib.Path, **options: Any) -> Iterator[dict[str, Any]]:
    return (record for _, record in find(reader).read(path, **options))


def turns_of(record: Mapping[str, Any]) -> tuple[str, list[str]]:
    """Returns the task of a cut record, and each turn with the messages since the one before it."""
    messages = record["messages"]
    task = next((i for i, message in enumerate(messages) if message["role"] == "user"), 0)
    turns: list[str] = []
    waiting: list[str] = []
    for i, message in enumerate(messages):
        if i != task or message["role"] == "assistant":
            waiting.append(f"[{message['role']}] {message['content']}")
        if message["role"] == "assistant":
            turns, waiting = [*turns, "\n".join(waiting)], []
    return messages[task]["content"], turns


def questions(record: Mapping[str, Any], layout: Layout) -> TokenTree:
    """Returns a cut record's tree with two ends per turn, 2k and 2k + 1: the turn's end, and its question's."""
    problem, turns = turns_of(record)
    opening, ids = layout.tokenizer.encode(OPENING), []
    for k in range(1, len(turns) + 1):
        asked = [*layout.problem(PROMPT.filled(problem, turns[:k])), *opening]
        shown = layout.problem(SHOWN.filled(problem, turns[:k]))
        ids += [os.path.commonprefix([asked, shown]), asked]
    return merged(problem[:60], ids[0][:1], [path[1:] for path in ids])


def reading(base: Base, tree: TokenTree) -> dict[str, np.ndarray]:
    """Returns the states at the ends of T turns and of their questions, (T, L, D), and the probability of Yes, (T,)."""
    size = -(-len(tree.tokens_N) // BLOCK) * BLOCK
    packed = pack([tree], size, padded_size(len(tree.run_M), LEAST), too_long="error")
    state_BTLD, last_BTD = streams(base.params, base.config, jax.tree.map(jnp.asarray, packed.rows), len(LAYERS))
    end_M = np.zeros(len(tree.run_M), np.int64)
    own_S = packed.node_BS[0] >= 0
    end_M[packed.node_BS[0, own_S]] = packed.rows.step_end[0, own_S]
    state_MLD = np.asarray(state_BTLD[0, end_M])
    padded = np.pad(end_M[1::2], (0, -len(end_M[1::2]) % LEAST), mode="edge")
    logit_NV = head_logits(base.params, base.config, last_BTD[0, padded])
    yes, no = (base.layout.tokenizer.encode(word)[0] for word in ("Yes", "No"))
    yes_T = np.asarray(logit_NV[: len(end_M) // 2, yes] - logit_NV[: len(end_M) // 2, no], np.float32)
    return {"turn": state_MLD[::2], "question": state_MLD[1::2], "yes": expit(yes_T)}


def readings(base: Base, records: Sequence[Mapping[str, Any]], folder: pathlib.Path) -> list[dict[str, np.ndarray]]:
    """Returns the readings of cut records. It computes the ones that `folder` lacks."""
    folder.mkdir(parents=True, exist_ok=True)
    trees = [questions(record, base.layout) for record in records]
    files = [folder / f"{hashlib.sha256(tree.tokens_N.tobytes()).hexdigest()[:20]}.npz" for tree in trees]
    missing = {file: tree for file, tree in zip(files, trees, strict=True) if not file.is_file()}
    with Bar(folder.name, sum(len(tree.tokens_N) for tree in missing.values())) as bar:
        for file, tree in missing.items():
            x = reading(base, tree)
            with atomic_file(file) as stream:
                np.savez(stream, **x)  # pyright: ignore[reportArgumentType]
            bar.add(len(tree.tokens_N))
    return [dict(np.load(file)) for file in files]


Scores = list[Float[np.ndarray, " T"]]
"""A score per turn of each run."""


def prm_scores(records: Sequence[dict[str, Any]], read_K: Sequence[Mapping[str, np.ndarray]]) -> dict[str, Scores]:
    """Returns the out-of-fold scores of the turns, by the place of the states and their layer."""
    classes = [class_of(record) for record in records]
    fold_K = np.array([bucket(record["problem"], FOLDS) for record in records])
    return {
        f"{place} {layer}": cross_fitted([x[place][:, i].astype(np.float32) for x in read_K], classes, fold_K)
        for place, (i, layer) in itertools.product(PLACES, enumerate(LAYERS))
    }


def class_of(record: Mapping[str, Any]) -> np.ndarray:
    """Returns each turn's class, 0 or 1; -1 without a label."""
    labels = [message.get("label") for message in record["messages"] if message["role"] == "assistant"]
    return np.array([-1 if label is None else int(label >= 0.5) for label in labels])


def area(records: Sequence[Mapping[str, Any]], scores: Scores) -> float:
    """Returns the AUROC over all labelled turns."""
    class_N = np.concatenate([class_of(record) for record in records])
    return float(auroc(np.concatenate(scores)[class_N >= 0], class_N[class_N >= 0] == 1))


def less(records: Sequence[Mapping[str, Any]], scores: Scores, others: Scores) -> dict[str, Interval]:
    """Returns paired differences over tasks, the first scores' figure less the others'.

    `auroc` is over labelled turns. `named` is over runs with a bad turn: whether the lowest score is at the first one.
    """
    classes = [class_of(record) for record in records]
    task_N = np.concatenate([[record["problem"]] * len(x) for record, x in zip(records, classes, strict=True)])
    class_N = np.concatenate(classes)
    (a_N, b_N), known_N = (np.concatenate(x) for x in (scores, others)), class_N >= 0

    def areas(weight_RN: np.ndarray) -> np.ndarray:
        good_N = class_N[known_N] == 1
        return auroc(a_N[known_N], good_N, weight_RN) - auroc(b_N[known_N], good_N, weight_RN)

    bad = [k for k, class_T in enumerate(classes) if (class_T == 0).any()]
    first_K = [int(np.argmax(classes[k] == 0)) for k in bad]
    hit_K, other_K = (
        np.array([np.argmin(x[k]) == t for k, t in zip(bad, first_K, strict=True)]) for x in (scores, others)
    )
    gain_K = hit_K.astype(float) - other_K
    tasks = [records[k]["problem"] for k in bad]
    return {
        "auroc": bootstrap(areas, task_N[known_N], seed=0, fraction=False),
        "named": bootstrap(lambda weight_RK: weighted_mean(gain_K, weight_RK), tasks, seed=0, fraction=False),
    }


def with_scores(record: dict[str, Any], score_T: np.ndarray) -> dict[str, Any]:
    scores = iter(score_T.tolist())
    turns = [m | {"score": next(scores)} if m["role"] == "assistant" else m for m in record["messages"]]
    return {**record, "messages": turns}


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
    base: str, shared: pathlib.Path = pathlib.Path("../shared/data"), out: pathlib.Path = pathlib.Path("runs/agents"),
    budget: int = 3000, limit: int | None = None,
) -> None:  # fmt: skip
    """Score every set of runs into `OUT/scored/` and `OUT/judged/`; a stopped call continues.

    Args:
        base: A model with a chat template that answers Yes or No.
        shared: The folder of the data.
        out: The folder for records, readings and scores.
        budget: Characters of a run that the model reads, about.
        limit: Only the first runs of each set.
    """
    loaded = Base.load(base, LAYERS, "{problem}", "bfloat16")
    sets, read_of, scores = {}, {}, {}
    for name, records in records_of(shared).items():
        sets[name] = records[:limit]
        cuts = [cut(record, budget) for record in sets[name]]
        read_of[name] = readings(loaded, cuts, out / "readings" / f"{pathlib.Path(base).stem} {budget}" / name)
    for name, records in sets.items():
        scores[name] = prm_scores(records, read_of[name])
        print(name, len(records), {reader: round(area(records, x), 3) for reader, x in scores[name].items()})
    for name, records in sets.items():
        others = [other for other in sets if other != name]
        best = max(scores[name], key=lambda reader: sum(area(sets[other], scores[other][reader]) for other in others))
        if name == "tau_bench":  # one label a run, at its end
            records = [with_last_label(record) for record in records]
        of_model = {"scored": scores[name][best], "judged": [x["yes"] for x in read_of[name]]}
        print(f"{name}: PRM {best}, less judge: {less(records, *of_model.values())}")
        for folder, of_runs in of_model.items():
            (out / folder).mkdir(parents=True, exist_ok=True)
            scored = (with_scores(record, score_T) for record, score_T in zip(records, of_runs, strict=True))
            write_records(out / folder / f"{name}.jsonl", scored)


def with_last_label(record: dict[str, Any]) -> dict[str, Any]:
    """Returns the record with only the last turn's label."""
    last = max(i for i, message in enumerate(record["messages"]) if message["role"] == "assistant")
    return {**record, "messages": [m if i == last else {k: v for k, v in m.items() if k != "label"}
                                   for i, m in enumerate(record["messages"])]}  # fmt: skip


if __name__ == "__main__":
    try:
        tyro.cli(main)
    except (ValueError, OSError) as error:
        raise SystemExit(f"error: {error}") from None
