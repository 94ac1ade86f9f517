"""Reinforcement learning on the quickstart's policy and PRM: gaming and its cure, in minutes.

    make quickstart                                                          # the policy and the PRM
    python -m experiments.quickstart.rl                                      # gaming and its cure, and their page
    make quickstart-rl                                                       # six of the arms, three seeds
    jprm rl experiments/quickstart/rl.py --workdir runs/rl --set seed=1      # one arm: min-form + verifier

    python -m experiments.quickstart.rl --small --arms verifier min_form evidence evidence_and_prm  # label-free rewards

Every arm starts from the same policy, and samples the same number of chains of the same problems.

Three seeds, 20 updates, correct answers on 200 held-out problems in %: start 33 to 40; verifier 84 to 90; min-form +
verifier 83 to 88; rejection sampling 86 to 90. With the PRM alone the guard ended the run by update 12. (That was with
`credit.baseline="return"`, and with a guard that did not draw fresh samples.) An arm of 20 updates takes two minutes on
two cores.
"""

from __future__ import annotations

import dataclasses
import json
import pathlib
import sys
from collections.abc import Collection
from typing import Any

import jax
import tyro
from rich.console import Console

from experiments.quickstart import task
from jprm.apps.report.page import report
from jprm.experiment import RUN, OptimizerConfig, read
from jprm.io.jsonl import write_records
from jprm.loading import VERIFIER
from jprm.methods.evaluate.blocks import Table, interval, percent, show
from jprm.methods.evidence.fit import fit
from jprm.methods.evidence.sources import DEFAULT
from jprm.methods.rl.config import GuardConfig, RLExperiment
from jprm.methods.rl.credit import CreditConfig
from jprm.methods.rl.loop import train
from jprm.train import Stopped
from jprm.train import train as train_prm
from jprm.tree import read_records

QUICKSTART = pathlib.Path("runs/quickstart")
GUARDED = CreditConfig("min_form", "rloo", "constant", length=48, offset=-1.0, weight=0.5)
LAST = CreditConfig("last_prm_alone", "rloo", "constant", length=48, weight=0.5)
ARMS = {
    "verifier": {"credit": dataclasses.replace(GUARDED, name="verifier")},
    "sum": {"credit": dataclasses.replace(GUARDED, name="sum_prm_alone", offset=0.0)},
    "min_form": {"credit": dataclasses.replace(GUARDED, name="min_form_prm_alone", offset=0.0)},
    "min_form_verifier": {"credit": GUARDED},
    "rejection": {"method": "rejection"},
    "dpo": {"method": "dpo"},
    "step_dpo": {"method": "step_dpo"},
    "demonstrations": {"method": "demonstrations", "problems": ("solutions.jsonl",)},
    "evidence": {"credit": LAST, "prm": "fused"},
    "evidence_and_prm": {"credit": LAST, "prm": "fused_and_prm"},
}
"""What each arm changes. `sum` and `min_form` have the PRM alone, without guards for the reward: they are there to be
gamed. `evidence` and `evidence_and_prm` have only a fused verifier: no gold answer of the problems that they are
trained on. With `small` the PRM alone has not seen labels of these problems either."""

SMALL: dict[str, Any] = dict(
    problems=("other_problems.jsonl",), held_out=("fewer_test_problems.jsonl",), updates=12, problems_an_update=16,
    samples=8, evaluate_every=4, evaluate_samples=2, reference=False, guards=GuardConfig(gaming=False),
    checkpoint_every=12,
)  # fmt: skip
"""The comparison of rewards without gold answers, for a busy machine: half of the labelled problems, whose outcomes no
verifier was fitted to, and no guard that ends a run, to see when gaming begins."""


def fit_verifiers(quickstart: pathlib.Path) -> None:
    """Fits what the label-free arms are rewarded by to the samples of the first half of the labelled problems.

    They are `fused`, of the sources without a model; `formal_quarter`, a PRM of formal labels on the half's first half;
    and `fused_and_prm`, with that PRM, on its second half. The policy learns on `other_problems.jsonl`, the second half
    of all, whose answers and labels none of them has seen.
    """
    pools = list(read_records(quickstart / "pools.jsonl"))
    half = len(pools) // 2
    first, second = {record["problem"] for record in pools[:half]}, quickstart / "other_problems.jsonl"
    if not second.is_file():
        problems = _lines(quickstart / "problems.jsonl")
        write_records(second, (record for record in problems if record["problem"] not in first))
        write_records(quickstart / "fitted_pools.jsonl", pools[:half])
        tested = _lines(quickstart / "test_problems.jsonl")
        write_records(quickstart / "fewer_test_problems.jsonl", tested[: len(tested) // 2])
    write_records(quickstart / "fitted_apart.jsonl", pools[half // 2 : half])
    prm = trained_apart(quickstart, "formal", {record["problem"] for record in pools[: half // 2]}, "formal_quarter")
    for name, file, more in (("fused", "fitted_pools", []), ("fused_and_prm", "fitted_apart", [f"prm={prm}"])):
        if not (quickstart / name / VERIFIER).is_file():
            fit([quickstart / f"{file}.jsonl"], [*DEFAULT, *more], out=quickstart / name)


def trained_apart(out: pathlib.Path, name: str, problems: Collection[str], apart: str) -> pathlib.Path:
    """Trains the model of folder `name` anew, in folder `apart`, on only the records of these problems; returns it.

    What is fitted to the scores of a model, or paid by them, is to be of problems whose labels it has not seen.
    """
    folder = out / apart
    if not (folder / "result.json").is_file():
        whole = read(out / name / RUN)
        records = [record for file in whole.data.train for record in read_records(file)]
        write_records(out / f"{apart}.jsonl", (record for record in records if record["problem"] in problems))
        data = dataclasses.replace(whole.data, train=(str(out / f"{apart}.jsonl"),))
        train_prm(dataclasses.replace(whole, name=f"{whole.name}_{apart}", data=data), folder)
    return folder


def _lines(path: pathlib.Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def working(record, steps):
    """Whether each step is right, by the task's checker, which reads the story too."""
    return task.check(task.parse(record["problem"]), steps)


def experiment(
    arm: str = "min_form_verifier", quickstart: pathlib.Path = QUICKSTART, seed: int = 0, small: bool = False
) -> RLExperiment:
    changes = ARMS[arm] | (SMALL if small else {})
    files, held_out = changes.pop("problems", ("problems.jsonl",)), changes.pop("held_out", ("test_problems.jsonl",))
    whole = RLExperiment(
        name=f"quickstart_rl_{arm}",
        policy=str(quickstart / "policy"),
        prm=str(quickstart / changes.pop("prm", "formal_quarter" if small else "formal")),
        problems=tuple(str(quickstart / file) for file in files),
        held_out=tuple(str(quickstart / file) for file in held_out),
        working=f"{__file__}:working",
        optimizer=OptimizerConfig(learning_rate=3e-4, decay="constant"),
        guards=GuardConfig(),
        updates=20,
        problems_an_update=16,
        samples=16,
        max_tokens=96,
        sampler_rows=512,
        tokens=512,
        micro_rows=4,
        evaluate_every=4,
        evaluate_samples=8,
        checkpoint_every=4,
        seed=seed,
        credit=GUARDED,
    )
    return dataclasses.replace(whole, **changes)


def main(
    quickstart: pathlib.Path = QUICKSTART, out: pathlib.Path = pathlib.Path("runs/quickstart_rl"), seed: int = 0,
    arms: tuple[str, ...] = ("min_form", "min_form_verifier"), small: bool = False,
) -> None:  # fmt: skip
    """Run arms of the quickstart's reinforcement learning.

    Args:
        quickstart: The folder of a finished quickstart.
        out: Where to write a run for each arm, and the page. What is there is continued.
        seed: Of problems and samples.
        arms: Which: verifier, sum, min_form, min_form_verifier, rejection, dpo, step_dpo, demonstrations, evidence,
            evidence_and_prm.
        small: Fewer and smaller updates, and no guard that ends a run: the comparison of rewards without gold answers.
    """
    console, rows = Console(), []
    if any(arm.startswith("evidence") for arm in arms) or small:
        fit_verifiers(quickstart)
    for arm in arms:
        console.rule(arm)
        result = train(experiment(arm, quickstart, seed, small), out / f"{arm}_{seed}")
        shown = result["evaluations"][result["best"] if result["ended"] else -1]
        last = result["evaluations"][-1]
        gold = {"value": shown["gold"], "low": shown["gold_low"], "high": shown["gold_high"]}
        rows.append((
            arm, f"{result['update']}", f"{result['sampled_tokens']:,}", interval(gold), percent(last["gold"]),
            f"{last['proxy']:.2f}", percent(shown["working"]), result["ended"].partition(":")[0],
        ))  # fmt: skip
    columns = ("arm", "updates", "sampled tokens", "right, % (kept)", "right at the end", "PRM's lowest score",
               "right working, % (kept)", "guard")  # fmt: skip
    page = out / f"report_{seed}.html"
    report([out / f"{arm}_{seed}" for arm in arms], page)
    show([Table(f"reinforcement learning, seed {seed}", columns, rows)], console)
    console.print(f"{page}: the page")


if __name__ == "__main__":
    jax.config.update("jax_platforms", "cpu")
    try:
        tyro.cli(main)
    except Stopped as stopped:
        sys.exit(str(stopped))
