"""What active selection saves over random, on the quickstart's problems, where every label is known.

A PRM here is a linear head on the states of the quickstart's policy: its fit takes milliseconds, so that twenty seeds
are affordable. Both arms begin with the same random chains; then each gets more, a round at a time, chosen by
`jprm annotate select` with the head of the round before, or at random. Labels end at the first error, as annotators'
do. Run it after `make quickstart`:

    python -m experiments.quickstart.selection --quickstart runs/quickstart --out runs/annotation.json
"""

from __future__ import annotations

import dataclasses
import json
import pathlib
from typing import NamedTuple

import jax
import numpy as np
import tyro
from scipy.stats import t

import jprm
from experiments.quickstart import task
from jprm.apps.annotate import SelectConfig
from jprm.apps.annotate.study import select
from jprm.checkpoints import base
from jprm.methods.layers.head_init import Steps, fitted_head
from jprm.model.heads import Head, find
from jprm.statistics import auroc
from jprm.tree import chains_of, read_records, tree_of

FIRST, ROUND, ROUNDS = 20, 20, 9
"""Chains of the first, random selection, of a round, and rounds: 200 chains in the end."""

STATES = Head(channels=tuple(f"x{i}" for i in range(128)), readout=None, target=find("binary").target)
"""The states themselves as logits: with an identity as its kernel a model gives what a linear head reads."""


class Chains(NamedTuple):
    """Chains with the states at their steps, (P, D) each."""

    records: list[dict]
    states: list[np.ndarray]


def states_of(out: pathlib.Path, file: str, samples: int) -> Chains:
    """Returns the first samples of every problem of a file of pools, with the label of every step as `truth`."""
    prm = jprm.load(out / "formal")
    config = dataclasses.replace(prm.config, head="selection:STATES")
    size = config.width
    with jax.set_mesh(prm.mesh):
        decoder = base.load_decoder(out / "policy", config)
    params = {
        "decoder": decoder,
        "head": {"kernel": np.eye(size, dtype=np.float32), "bias": np.zeros(size, np.float32)},
    }
    prm = dataclasses.replace(prm, params=params, config=config, readout=everything)
    pools = [pool | {"samples": pool["samples"][:samples]} for pool in read_records(out / file)]
    trees = [tree_of(pool) for pool in pools]
    records, states = [], []
    for tree, outputs in zip(trees, prm.outputs_of(trees), strict=True):
        for path in chains_of(tree):
            steps = [tree.nodes[i].text for i in path]
            truth = task.labels(task.parse(tree.problem), steps)
            correct = tree.nodes[path[-1]].correct
            records.append({"problem": tree.problem, "steps": steps, "truth": truth, "correct": correct})
            states.append(outputs["states"][path])
    return Chains(records, states)


def everything(logit_BSC: jax.Array) -> dict[str, jax.Array]:
    return {"score": logit_BSC[..., 0], "states": logit_BSC}


def annotated(truth: list[float], rng: np.random.Generator, error: float) -> list[float]:
    """Returns the labels of an annotator who errs on a step with a probability, up to the first one called wrong."""
    labels = [label if rng.random() >= error else 1 - label for label in truth]
    return labels[: labels.index(0.0) + 1] if 0.0 in labels else labels


def fitted(chains: Chains, chosen: list[int], labels: dict[int, list[float]]) -> tuple[np.ndarray, float]:
    order = np.random.default_rng(len(chosen)).permutation(chosen)  # the last fifth chooses the penalty
    x_ND = np.concatenate([chains.states[i][: len(labels[i])] for i in order])
    target_N = np.concatenate([labels[i] for i in order])
    head, _ = fitted_head("binary", Steps(x_ND, target_N, np.ones(len(target_N))))
    wrong, right = (0, 1)  # the channels of the head
    kernel_DC, bias_C = head["kernel"], head["bias"]
    return kernel_DC[:, right] - kernel_DC[:, wrong], float(bias_C[right] - bias_C[wrong])


def scores(chains: Chains, head: tuple[np.ndarray, float]) -> list[np.ndarray]:
    return [1 / (1 + np.exp(-np.clip(x_PD @ head[0] + head[1], -30, 30))) for x_PD in chains.states]


def measured(test: Chains, head: tuple[np.ndarray, float]) -> dict[str, float]:
    """Returns the AUROC of steps, and the solve rate of the best sample by the product of its scores."""
    scores_of = scores(test, head)
    truth_N = np.concatenate([record["truth"] for record in test.records]) > 0.5
    best: dict[str, tuple[float, bool]] = {}
    for record, score_P in zip(test.records, scores_of, strict=True):
        value = float(np.log(score_P).sum())
        if record["problem"] not in best or value > best[record["problem"]][0]:
            best[record["problem"]] = value, bool(record["correct"])
    solved = float(np.mean([right for _, right in best.values()]))
    return {"auroc": float(auroc(np.concatenate(scores_of), truth_N)), "best_of_n": solved}


def curve(pool: Chains, test: Chains, seed: int, active: bool, error: float) -> list[dict[str, float]]:
    """Returns the figures after each round, with the chains and steps that were labelled by then."""
    rng = np.random.default_rng(seed)
    chosen = rng.permutation(len(pool.records))[:FIRST].tolist()
    labels: dict[int, list[float]] = {}
    points = []
    for round_ in range(ROUNDS + 1):
        labels |= {i: annotated(pool.records[i]["truth"], rng, error) for i in chosen if i not in labels}
        head = fitted(pool, chosen, labels)
        points.append({"chains": len(chosen), "steps": sum(map(len, labels.values())), **measured(test, head)})
        left = [i for i in range(len(pool.records)) if i not in labels]
        if active:
            score_of = scores(pool, head)
            offered = [tree_of(pool.records[i] | {"scores": score_of[i].tolist(), "index": i}) for i in left]
            chosen += [tree.extra["index"] for tree in select(offered, SelectConfig(ROUND, seed=1000 * seed + round_))]
        else:
            chosen += rng.permutation(left)[:ROUND].tolist()
    return points


def saved(active: list[dict], random: list[dict], unit: str) -> float:
    """Returns how many times the labels random selection needs for the AUROC of active selection at half of its own.

    Interpolated between rounds; the last round where random selection never gets there, which makes it a lower bound.
    """
    middle = active[len(active) // 2]
    reached = np.maximum.accumulate([point["auroc"] for point in random])
    at = int(np.argmax(reached >= middle["auroc"]))
    if reached[-1] < middle["auroc"]:
        return random[-1][unit] / middle[unit]
    if at == 0:
        return random[0][unit] / middle[unit]
    low, high = reached[at - 1], reached[at]
    part = (middle["auroc"] - low) / (high - low)
    return (random[at - 1][unit] + part * (random[at][unit] - random[at - 1][unit])) / middle[unit]


def interval(values: list[float]) -> list[float]:
    """Returns the mean and its 95 % interval over seeds, by Student's t."""
    half = t.ppf(0.975, len(values) - 1) * np.std(values, ddof=1) / np.sqrt(len(values))
    return [round(float(x), 4) for x in (np.mean(values), np.mean(values) - half, np.mean(values) + half)]


def main(
    quickstart: pathlib.Path = pathlib.Path("runs/quickstart"),
    out: pathlib.Path = pathlib.Path("runs/annotation.json"),
    seeds: int = 20,
    error: float = 0.0,
) -> None:
    """Compare active and random selection.

    Args:
        quickstart: The finished quickstart.
        out: The file for all figures.
        seeds: Repetitions; each draws its own first chains and its own random ones.
        error: How often an annotator mislabels a step.
    """
    pool = unique(states_of(quickstart, "pools.jsonl", 8))
    test = states_of(quickstart, "test_pools.jsonl", 16)
    runs = [[curve(pool, test, seed, active, error) for active in (True, False)] for seed in range(seeds)]
    results: dict = {"pool": len(pool.records), "test_chains": len(test.records), "seeds": seeds, "error": error}
    results["rounds"] = [
        {"chains": runs[0][0][k]["chains"]}
        | {f"{arm}_{figure}": interval([run[i][k][figure] for run in runs])
           for i, arm in enumerate(("active", "random")) for figure in ("steps", "auroc", "best_of_n")}
        | {f"gain_{figure}": interval([run[0][k][figure] - run[1][k][figure] for run in runs])
           for figure in ("auroc", "best_of_n")}
        for k in range(ROUNDS + 1)
    ]  # fmt: skip
    results["times_the_labels"] = {
        unit: interval([saved(run[0], run[1], unit) for run in runs]) for unit in ("chains", "steps")
    }
    out.write_text(json.dumps(results, indent=1) + "\n")
    print(json.dumps(results, indent=1))


def unique(chains: Chains) -> Chains:
    """Returns each chain once, as `select` counts it."""
    first = {(r["problem"], *r["steps"]): i for i, r in reversed(list(enumerate(chains.records)))}
    kept = sorted(first.values())
    return Chains([chains.records[i] for i in kept], [chains.states[i] for i in kept])


if __name__ == "__main__":
    tyro.cli(main)
