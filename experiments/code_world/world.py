"""The whole loop for programs: a policy, labels by running tests, reward models, and a verdict. Nothing is downloaded.

    python -m experiments.code_world.world --seed 0 --out runs/code_world

A policy learns short functions (`functions.py`) from solutions whose authors have bad habits. It is sampled; every
prefix of a sample is completed, and the share of completions that pass the problem's tests in the sandbox is the value
of its last line. A process reward model learns these values, and an outcome reward model whether whole samples pass.
They are compared on problems that neither has seen: against the planted bugs, which a checker knows, and by best of n,
where programs that do the same on the tests' inputs vote together.

Everything is measured in the run, from the seed; a stage whose output is there is not run again. The stages, the models
and most figures are the quickstart's (`experiments/quickstart`).
"""

from __future__ import annotations

import dataclasses
import json
import pathlib
import sys
from collections.abc import Callable
from typing import Any

import jax
import tyro

import jprm
from experiments.code_world import functions
from experiments.quickstart import judge, models
from experiments.quickstart import run as quickstart
from jprm.apps.report.page import report
from jprm.experiment import OptimizerConfig
from jprm.loading import VERIFIER
from jprm.methods.evaluate.best_of_n import best_of_n_report
from jprm.methods.evaluate.blocks import Table, last, percent, show
from jprm.methods.evidence.fit import fit
from jprm.methods.evidence.sources import DEFAULT
from jprm.methods.label.jobs import label_outcomes
from jprm.methods.policy.protocol import Sample
from jprm.methods.policy.sampler import SamplerConfig, load_sampler
from jprm.train import Stopped, train
from jprm.tree import read_records, tree_of

MODELS = {"monte_carlo": "prm_monte_carlo", "outcome": "orm"}
"""The folder of each reward model, and its name in the results."""

COUNTS = {"test_problems": 150, "problems": 250, "solutions": 14_000}
SAMPLES, TEST_SAMPLES = 8, 32
TOKENS, POLICY_STEPS, REWARD_STEPS = 256, 360, 240
"""Tokens of a row, and updates of 4 rows: 0.37 M tokens for the policy, 0.25 M for each reward model."""

console = quickstart.console


def main(out: pathlib.Path = pathlib.Path("runs/code_world"), seed: int = 0) -> None:
    """Run the code world.

    Args:
        out: The folder for everything that is made; a run that was stopped continues in it.
        seed: Of the problems, the solutions, the training and the samples.
    """
    out.mkdir(parents=True, exist_ok=True)
    quickstart.check_seed(out, seed)
    stages = quickstart.Stages(out / "stages.json")
    stages.begin("a policy learns from authors with habits of error")
    vocabulary = quickstart.make_data(out, seed, functions, COUNTS)
    trained(out, "policy", models.policy(out, vocabulary, seed), POLICY_STEPS)
    policy = load_sampler(out / "policy", SamplerConfig(temperature=quickstart.TEMPERATURE, max_tokens=96, rows=512))
    for problems, pools, count in (("problems", "pools", SAMPLES), ("test_problems", "test_pools", TEST_SAMPLES)):
        sampled = out / f"sampled_{pools}.jsonl"
        stages.begin(f"samples, {pools}")
        quickstart.sample_pools(policy, out / f"{problems}.jsonl", sampled, count, seed, pool)
        stages.begin(f"tests of samples, {pools}")
        label_outcomes("tests", sampled, out / f"{pools}.jsonl")
    stages.begin("labels by rollouts")
    quickstart.label(policy, out, seed, functions, "tests")
    for labels in MODELS:
        stages.begin(f"training: {judge.NAMED[labels]}")
        trained(out, labels, models.reward(out, vocabulary, labels, seed), REWARD_STEPS)
    results = judged(out, seed, stages.begin)
    results |= stages.totals() | {"seed": seed}
    (out / "results.json").write_text(json.dumps(results, indent=2) + "\n")
    show(tables(results), console)
    console.print(
        f"{results['seconds']:.0f} seconds. {out / 'results.json'}: every figure. {out / 'report.html'}: the page"
    )


def trained(out: pathlib.Path, name: str, experiment, steps: int) -> None:
    """Trains one of the quickstart's models on this world's data."""
    if not (out / name / "result.json").is_file():
        data = dataclasses.replace(experiment.data, tokens=TOKENS, slots=TOKENS)
        warmup = 30 if name == "policy" else 20
        changes = dict(
            name=f"code_{name}", data=data, steps=steps, checkpoint_every=steps,
            optimizer=OptimizerConfig(learning_rate=2e-3, warmup_steps=warmup, weight_decay=0.01),
        )  # fmt: skip
        train(dataclasses.replace(experiment, **changes), out / name)


def pool(record: dict, samples: list[Sample]) -> dict:
    """Returns a pool record, to be judged by its tests."""
    whole = [
        {"steps": list(sample.steps), "tokens": sample.tokens, "finish_reason": sample.finish_reason}
        for sample in samples
        if sample.steps
    ]
    return record | {"samples": whole} | ({"empty_samples": empty} if (empty := len(samples) - len(whole)) else {})


def judged(out: pathlib.Path, seed: int, begin: Callable[[str], None]) -> dict:
    """Writes the page and returns every figure, with 95 % intervals over problems."""
    suites, results = judge.evaluated(out, seed, begin, functions, MODELS)
    begin("evidence without a model")
    results["baselines"]["choosers"] |= evidence(out, seed)
    results["steps"] = {MODELS[name]: suites[name]["steps"] for name in MODELS}
    more = {"What this run is evidence for": [judge.caveats_table(CAVEATS)], "Programs": tables(results)}
    report([out / "judged" / name for name in MODELS], out / "report.html", more=more)
    return results


def evidence(out: pathlib.Path, seed: int) -> dict[str, Any]:
    """Fits a verifier without a model to the outcomes of the labelled samples (`jprm fuse fit`); returns its figures on
    the test pools, and none with too few labelled problems."""
    folder = out / "evidence"
    if not (folder / VERIFIER).is_file():
        try:
            fit([out / "pools.jsonl"], DEFAULT, out=folder, seed=seed)
        except ValueError as error:
            console.print(f"evidence: {error}")
            return {}
    scored = list(map(tree_of, jprm.load(folder).score_many(read_records(out / "test_pools.jsonl"))))
    curves = best_of_n_report(scored, seed)["rules"]["last"]
    figures = {"best_of_n": last(curves["best_of_n"]), "vote": last(curves["weighted_vote"])}
    return {"evidence without a model": figures}


CAVEATS = {
    "one run": "One seed of a small world. Other seeds differ by some points.",
    "truth": "A line is right if it does what its sentence says. A program with a wrong line may pass all tests, where"
    " a later line hides it or no input shows it.",
    "first errors": "The outcome reward model learns the outcome of a program at each of its lines. It is never told"
    " where a bug is, and rollouts tell it only by their outcomes.",
}


def tables(results: dict) -> list[Table]:
    errors = [(name, percent(figures["f1"])) for name, figures in results["first_error"].items()]
    return [
        *judge.chosen_tables(results),
        Table("first wrong lines", ("model", "F1, %"), errors),
        judge.labels_table(results["label_agreement"]),
    ]


if __name__ == "__main__":
    jax.config.update("jax_platforms", "cpu")  # its models are made for one, as the quickstart's
    try:
        tyro.cli(main)
    except Stopped as stopped:  # SIGTERM during a training
        sys.exit(str(stopped))
