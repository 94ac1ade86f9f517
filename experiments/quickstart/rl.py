"""Reinforcement learning on the quickstart's policy and PRM: gaming and its cure, in minutes.

    make quickstart                                                          # the policy and the PRM
    python experiments/quickstart/rl.py                                      # gaming and its cure, and their page
    make quickstart-rl                                                       # six of the arms, three seeds
    jprm rl experiments/quickstart/rl.py --workdir runs/rl --set seed=1      # one arm: min-form + verifier

Every arm starts from the same policy, and samples the same number of chains of the same problems.

Three seeds, 20 updates, correct answers on 200 held-out problems in %: start 33 to 40; verifier 84 to 90; min-form +
verifier 83 to 88; rejection sampling 86 to 90. With the PRM alone the guard ended the run by update 12. (That was with
`credit.baseline="return"`, and with a guard that did not draw fresh samples.) An arm of 20 updates takes two minutes on
two cores.
"""

from __future__ import annotations

import dataclasses
import pathlib
import sys

import jax
import tyro
from rich.console import Console

sys.path.insert(0, str(pathlib.Path(__file__).parent))
import task

from jprm.apps.report.page import report
from jprm.experiment import OptimizerConfig
from jprm.methods.evaluate.blocks import Table, interval, percent, show
from jprm.methods.rl.config import GuardConfig, RLExperiment
from jprm.methods.rl.credit import CreditConfig
from jprm.methods.rl.loop import train
from jprm.train import Stopped

QUICKSTART = pathlib.Path("runs/quickstart")
GUARDED = CreditConfig("min_form", "rloo", "constant", length=48, offset=-1.0, weight=0.5)
ARMS = {
    "verifier": {"credit": dataclasses.replace(GUARDED, name="verifier")},
    "sum": {"credit": dataclasses.replace(GUARDED, name="sum_prm_alone", offset=0.0)},
    "min_form": {"credit": dataclasses.replace(GUARDED, name="min_form_prm_alone", offset=0.0)},
    "min_form_verifier": {"credit": GUARDED},
    "rejection": {"method": "rejection"},
    "dpo": {"method": "dpo"},
    "step_dpo": {"method": "step_dpo"},
    "demonstrations": {"method": "demonstrations", "problems": ("solutions.jsonl",)},
}
"""What each arm changes. `sum` and `min_form` have the PRM alone, without guards for the reward: they are there to be
gamed."""


def working(record, steps):
    """Whether each step is right, by the task's checker, which reads the story too."""
    return task.check(task.parse(record["problem"]), steps)


def experiment(arm: str = "min_form_verifier", quickstart: pathlib.Path = QUICKSTART, seed: int = 0) -> RLExperiment:
    changes = dict(ARMS[arm])
    files = changes.pop("problems", ("problems.jsonl",))
    return RLExperiment(
        name=f"quickstart_rl_{arm}",
        policy=str(quickstart / "policy"),
        prm=str(quickstart / "formal"),
        problems=tuple(str(quickstart / file) for file in files),
        held_out=(str(quickstart / "test_problems.jsonl"),),
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
        **{"credit": GUARDED, **changes},
    )


def main(
    quickstart: pathlib.Path = QUICKSTART, out: pathlib.Path = pathlib.Path("runs/quickstart_rl"), seed: int = 0,
    arms: tuple[str, ...] = ("min_form", "min_form_verifier"),
) -> None:  # fmt: skip
    """Run arms of the quickstart's reinforcement learning.

    Args:
        quickstart: The folder of a finished quickstart.
        out: Where to write a run for each arm, and the page. What is there is continued.
        seed: Of problems and samples.
        arms: Which: verifier, sum, min_form, min_form_verifier, rejection, dpo, step_dpo, demonstrations.
    """
    console, rows = Console(), []
    for arm in arms:
        console.rule(arm)
        result = train(experiment(arm, quickstart, seed), out / f"{arm}_{seed}")
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
