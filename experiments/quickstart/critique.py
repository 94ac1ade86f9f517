"""A generative verifier in the quickstart's world: its critiques redo a step, and rejection sampling trains it.

    make quickstart                                   # the policy, the labelled chains and the PRM
    python -m experiments.quickstart.critique         # its verifier, in a folder `critique` of the quickstart's

A critique of a step has two lines: the step as it should be, and "+" or "-", whether the step is that. Authors with the
quickstart's habits of error write critiques of chains; no label is used. The policy learns from them and so becomes a
judge that makes its authors' mistakes. It criticises every labelled step four times, `jprm label critique` keeps what
agrees with the formal checker, and another verifier learns only from that, from the policy and for as many tokens as
the quickstart's PRM. Both judge the steps of problems that no model has seen.

What one run gave (seed 0) is in experiments/quickstart/judges.md: AUROC of steps 64.8 % for authors'
critiques, 74.5 % for kept ones, 98.5 % for the PRM. The stages took about 10 minutes of a busy machine of two cores.
"""

from __future__ import annotations

import dataclasses
import json
import pathlib
import sys
from typing import Any, cast

import jax
import numpy as np
import tyro
from rich.console import Console

import jprm
from experiments.quickstart import models, task
from jprm.experiment import Experiment
from jprm.io.jsonl import write_records
from jprm.methods.evaluate.blocks import Table, interval, show
from jprm.methods.judge.judge import Judge
from jprm.methods.judge.load import load_judge
from jprm.methods.label.config import CritiqueConfig
from jprm.methods.label.jobs import label_critique
from jprm.statistics import auroc, bootstrap, weighted_mean
from jprm.token_tree import token_tree
from jprm.tokenizer import Layout
from jprm.train import Stopped, train
from jprm.tree import ReasoningTree, read_records, tree_of

AUTHORED = 800
"""Labelled problems whose chains authors criticise."""

AUTHORED_STEPS, KEPT_STEPS = 180, models.REWARD_STEPS
"""Updates of the two verifiers, of 2,048 tokens each."""

SAMPLES, VOTES = 4, 8
"""Critiques of each labelled step, and the most of each tested step."""

TEMPERATURE = 0.7
"""Of critiques, as of the quickstart's samples. At 1 a critique agrees with its label by luck more often: of those that
were kept for correct steps, 27 % redo the step otherwise, and 22 % at 0.7."""

TESTED_CHAINS = 2
"""Chains of each of the 100 tested problems."""

PROMPT = {
    "name": "redo", "text": "{problem}\n{steps}", "step": "{step}", "separator": "\n", "verdict": r"(?m)^([-+])$",
    "correct": ["+"], "incorrect": ["-"],
}  # fmt: skip


def redone(problem: task.Problem, steps: list[str], rng: np.random.Generator, habits: task.Habits | None) -> str | None:
    """Returns the last of these steps as an author would write it after the others; None if the others hold no sum."""
    count, i = problem.start, len(steps) - 1
    for step in steps[:-1]:
        equation = task.EQUATION.fullmatch(step)
        if equation is None:
            return None
        count = int(equation[5])
    if i >= len(problem.days):
        return f"The answer is {count}."
    return task.worked(problem, i, count, rng, habits)[0]


def authored(records: list[dict], rng: np.random.Generator) -> list[dict[str, Any]]:
    """Returns a critique of every distinct step of pools, by authors with habits."""
    corrected = {}
    for record in records:
        problem = task.parse(record["problem"])
        for sample in record["samples"]:
            for end in range(1, len(sample["steps"]) + 1):
                steps = sample["steps"][:end]
                question = "\n".join([record["problem"], *steps])
                redo = redone(problem, steps, rng, task.Habits())
                if redo is not None and question not in corrected:
                    corrected[question] = {"problem": question, "steps": [redo, "+" if redo == steps[-1] else "-"]}
    return list(corrected.values())


def verifier(quickstart: pathlib.Path, data: pathlib.Path, steps: int, seed: int) -> Experiment:
    vocabulary = task.tokenizer().get_vocab_size()
    policy = models.policy(quickstart, vocabulary, seed)
    return dataclasses.replace(
        policy,
        name=f"quickstart_{data.stem}",
        base=str(quickstart / "policy"),
        data=dataclasses.replace(policy.data, train=(str(data),)),
        steps=steps,
        checkpoint_every=60,
    )


def judge_of(folder: pathlib.Path, samples: int, seed: int) -> Judge:
    """Returns a trained verifier as a judge, by a file that `jprm score --model` takes as well."""
    sampler = {"model": str(folder), "temperature": TEMPERATURE, "max_tokens": 32, "rows": 512, "logprobs": True}
    section = {"prompt": PROMPT, "samples": samples, "seed": seed}
    path = folder.with_suffix(".json")
    path.write_text(json.dumps(sampler | {"judge": section}, indent=2) + "\n")
    return cast(Judge, load_judge(path))


def tested(quickstart: pathlib.Path) -> list[ReasoningTree]:
    """Returns chains of the tested problems with the formal checker's labels."""
    chains, taken = [], {}
    for record in read_records(quickstart / "chains.jsonl"):
        taken[record["problem"]] = taken.get(record["problem"], 0) + 1
        if taken[record["problem"]] <= TESTED_CHAINS:
            labels = task.labels(task.parse(record["problem"]), record["steps"])
            chains.append(tree_of({"problem": record["problem"], "steps": record["steps"], "labels": labels}))
    return chains


def accuracy(trees: list[ReasoningTree], scores: list[np.ndarray], seed: int) -> dict[str, Any]:
    """Returns step accuracy at 0.5 and AUROC, with intervals over problems; a step that was not judged is incorrect."""
    label_M = np.array([node.label for tree in trees for node in tree.nodes]) > 0.5
    problems = [tree.problem for tree in trees for _ in tree.nodes]
    score_M = np.concatenate(scores)
    right_M = (score_M > 0.5) == label_M
    right_M[np.isnan(score_M)] = False
    filled_M = np.nan_to_num(score_M, nan=0.5)
    return {
        "accuracy": bootstrap(lambda w: weighted_mean(right_M, w), problems, seed=seed).json(),
        "auroc": bootstrap(lambda w: auroc(filled_M, label_M, w), problems, seed=seed).json(),
        "steps": len(label_M), "incorrect": int((~label_M).sum()), "unread": int(np.isnan(score_M).sum()),
    }  # fmt: skip


def judged(trees: list[ReasoningTree], judge: Judge, layout: Layout, seed: int) -> dict[str, Any]:
    """Returns `accuracy` of a judge, and its cost a step: generated tokens, and all that the model computes."""
    judgements = judge.judgements(trees)
    steps = sum(len(tree.nodes) for tree in trees)
    generated = sum(judgement.report["tokens"] for judgement in judgements)
    read = 0
    for tree in trees:
        for end in range(1, len(tree.nodes) + 1):
            question = judge.prompt.filled(tree.problem, [node.text for node in tree.nodes[:end]])
            read += len(layout.problem(question))
    cost = {"generated": generated / steps, "computed": (read + generated) / steps}
    return accuracy(trees, [judgement.score_N for judgement in judgements], seed) | cost


def main(quickstart: pathlib.Path = pathlib.Path("runs/quickstart"), seed: int = 0) -> None:
    """Train and measure the generative verifier.

    Args:
        quickstart: The folder of a finished quickstart. What is made goes into its folder `critique`.
        seed: Of the authors, the training and the critiques.
    """
    console, out = Console(), quickstart / "critique"
    out.mkdir(exist_ok=True)
    if not (out / "authored.jsonl").is_file():
        pools = list(read_records(quickstart / "pools.jsonl"))[:AUTHORED]
        write_records(out / "authored.jsonl", authored(pools, np.random.default_rng(seed)))
    train(verifier(quickstart, out / "authored.jsonl", AUTHORED_STEPS, seed), out / "authored")
    if not (out / "kept.jsonl").is_file():
        console.rule("critiques of labelled steps")
        judge = judge_of(out / "authored", SAMPLES, seed)
        counts = label_critique(
            judge, quickstart / "formal.jsonl", out / "kept.jsonl", out / "sampled.jsonl", CritiqueConfig()
        )
        (out / "counts.json").write_text(json.dumps(counts, indent=2) + "\n")
    train(verifier(quickstart, out / "kept.jsonl", KEPT_STEPS, seed), out / "kept")
    console.rule("steps of unseen problems")
    trees, prm = tested(quickstart), jprm.load(quickstart / "formal")
    tokens = sum(len(token_tree(tree, prm.layout).tokens_N) for tree in trees)
    figures = {"PRM": accuracy(trees, prm.score_trees(trees), seed)}
    figures["PRM"] |= {"generated": 0.0, "computed": tokens / figures["PRM"]["steps"]}
    for name, samples in (("authored", 1), ("authored", VOTES), ("kept", 1), ("kept", VOTES)):
        figures[f"{name}, {samples}"] = judged(trees, judge_of(out / name, samples, seed + 1), prm.layout, seed)
    counts = json.loads((out / "counts.json").read_text())
    (out / "results.json").write_text(json.dumps({"kept": counts, "judges": figures}, indent=2) + "\n")
    rows = [
        (name, interval(row["accuracy"]), interval(row["auroc"]), f"{row['generated']:.1f}", f"{row['computed']:.0f}")
        for name, row in figures.items()
    ]
    columns = (
        "verifier, critiques a step",
        "step accuracy",
        "AUROC",
        "generated tokens a step",
        "computed tokens a step",
    )
    show([Table("steps of unseen problems", columns, rows), f"critiques of labelled steps: {counts}"], console)


if __name__ == "__main__":
    jax.config.update("jax_platforms", "cpu")
    try:
        tyro.cli(main)
    except Stopped as stopped:
        sys.exit(str(stopped))
