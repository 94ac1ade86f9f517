"""Reinforcement learning in the tool world: rewards of the outcome, of turns by the PRM, and both, at equal samples.

    python -m experiments.tool_world.study run --seed 0 --out runs/tool_world_0
    python -m experiments.tool_world.learn run --world runs/tool_world_0
    python -m experiments.tool_world.learn table runs/tool_world_0 runs/tool_world_1 runs/tool_world_2

Every arm starts from the same policy and samples as many episodes of the same tasks. An episode's turns are sampled
into one cache of keys with what the tools answer between them, and the episodes of a task are one tree.
"""

from __future__ import annotations

import dataclasses
import json
import pathlib
import time
from typing import Annotated

import jax
import numpy as np
import tyro
from rich.console import Console

from experiments.tool_world import shop, study
from jprm.experiment import OptimizerConfig
from jprm.methods.evaluate.blocks import Table, interval, percent, points, show
from jprm.methods.formats.chat_template import template_of
from jprm.methods.policy.sampler import SamplerConfig, load_sampler
from jprm.methods.rl import rollout
from jprm.methods.rl.config import EnvironmentConfig, GuardConfig, RLExperiment, learner
from jprm.methods.rl.credit import CreditConfig, token_advantages
from jprm.methods.rl.loop import train
from jprm.methods.rl.samples import group_tree, sample_episodes
from jprm.methods.rl.sampling import OF_WORLD
from jprm.methods.worlds.environment import World
from jprm.methods.worlds.turns import TurnLayout
from jprm.statistics import Draws, difference_of_runs, draws, mean_of_runs, weighted_mean
from jprm.train import Trainer

BOTH = CreditConfig("min_form", "rloo", "constant", length=20, offset=-1.0, weight=0.5)
ARMS = {
    "outcome": dataclasses.replace(BOTH, name="verifier", offset=0.0),
    "turns": dataclasses.replace(BOTH, name="min_form_prm_alone"),
    "both": BOTH,
}

console = Console()


def working(record, steps):
    """Whether each turn is correct, by the world's labels, for evaluations."""
    calls = [shop.call_of(shop.parse(text)) for text in steps]
    return [all(verdict.values()) for verdict in shop.verdicts(record, calls)]


def experiment(
    arm: str = "both", world: pathlib.Path = pathlib.Path("runs/tool_world_0"), seed: int = 0
) -> RLExperiment:
    return RLExperiment(
        name=f"tool_world_{arm}",
        policy=str(world / "policy"),
        prm=str(world / "prm"),
        problems=(str(world / "learnt.jsonl"),),
        held_out=(str(world / "held_out.jsonl"),),
        environment=EnvironmentConfig(
            f"{pathlib.Path(shop.__file__).resolve()}:SHOP", turns=study.LIMITS.turns, template=str(world / "tokenizer")
        ),
        working=f"{pathlib.Path(__file__).resolve()}:working",
        credit=ARMS[arm],
        optimizer=OptimizerConfig(learning_rate=1e-3, decay="constant"),
        guards=GuardConfig(gaming=False),  # every arm has the same samples
        updates=30,
        problems_an_update=8,
        samples=8,
        max_tokens=study.MAX_TOKENS,
        sampler_rows=256,
        tokens=study.LIMITS.tokens,
        micro_rows=8,
        evaluate_every=10,
        evaluate_samples=4,
        checkpoint_every=10,
        keep=1,
        reference=False,
        seed=seed,
    )


def run(
    world: pathlib.Path = pathlib.Path("runs/tool_world_0"), seed: int = 0, arms: tuple[str, ...] = tuple(ARMS)
) -> None:
    """Run the arms on one seed's policy and PRM.

    Args:
        world: The folder of a finished study.
        seed: Of the tasks' order and the samples.
        arms: Which: outcome, turns, both.
    """
    for arm in arms:
        if not (world / f"rl_{arm}/rl.json").is_file():
            console.rule(arm)
            train(experiment(arm, world, seed), world / f"rl_{arm}")
    show([_table([world], arms)], console)


def _table(worlds: list[pathlib.Path] | tuple[pathlib.Path, ...], arms: tuple[str, ...]) -> Table:
    rows = []
    for arm in arms:
        results = [json.loads((world / f"rl_{arm}/rl.json").read_text()) for world in worlds]
        for when, at in (("start", 0), ("end", -1)):
            runs = [result["evaluations"][at] for result in results]
            mean = mean_of_runs([_draws(run["gold_P"]) for run in runs], fraction=True).interval()
            gold = {"value": mean.value, "low": mean.low, "high": mean.high}
            rows.append([
                f"{arm}, {when}", interval(gold), percent(float(np.mean([run["working"] for run in runs]))),
                percent(float(np.mean([run["right_with_wrong_working"] for run in runs]))),
                f"{np.mean([run['steps'] for run in runs]):.2f}",
                f"{np.mean([result['sampled_tokens'] for result in results]):,.0f}" if at else "",
            ])  # fmt: skip
    columns = ("arm", "solved, %", "all turns correct, %", "of solved with a bad turn, %", "turns", "tokens")
    return Table(f"reinforcement learning, {len(worlds)} seeds", columns, rows)


def _draws(gold_P: list[float]) -> Draws:
    return draws(lambda w: weighted_mean(np.array(gold_P), w), np.arange(len(gold_P)), seed=study.SEED_OF_TESTS)


def table(worlds: Annotated[tuple[pathlib.Path, ...], tyro.conf.Positional]) -> None:
    """Print the means over seeds, and paired differences between arms at the end."""
    show([_table(worlds, tuple(ARMS))], console)
    end = {
        arm: [_draws(json.loads((w / f"rl_{arm}/rl.json").read_text())["evaluations"][-1]["gold_P"]) for w in worlds]
        for arm in ARMS
    }
    rows = []
    for a, b in (("turns", "outcome"), ("both", "outcome"), ("both", "turns")):
        gap = difference_of_runs(end[a], end[b], same_seeds=True).interval()
        rows.append([a, b, points({"value": gap.value, "low": gap.low, "high": gap.high})])
    show([Table("solved at the end, paired", ("", "less", "points [95 %]"), rows)], console)


def speed(world: pathlib.Path = pathlib.Path("runs/tool_world_0"), repeats: int = 5) -> None:
    """Time a step of the optimizer on trees of groups and on one row a trajectory, in turns.

    Args:
        world: The folder of a finished study.
        repeats: Of each.
    """
    config = experiment("outcome", world)
    records = study.read(world / "learnt.jsonl")[: config.problems_an_update]
    policy = load_sampler(world / "policy", SamplerConfig(temperature=1.0, max_tokens=study.MAX_TOKENS, rows=256))
    layout = TurnLayout(policy.tokenizer, *template_of(world / "tokenizer"))
    drawn = sample_episodes(policy, World(shop.SHOP), layout, study.LIMITS, records, config.samples, seed=0, update=1)
    trees, alone = [], []
    for group in rollout.judged(records, drawn, OF_WORLD, config.guards.floor, None):
        samples, prompt = group.samples, group.samples[0].prompt
        advantage = token_advantages(samples, group.reward_G, [np.zeros(len(x.steps)) for x in samples], config.credit)
        trees.append(group_tree("group", prompt, samples, advantage))
        alone += [group_tree("one", prompt, [x], [a]) for x, a in zip(samples, advantage, strict=True)]
    with Trainer(learner(config)) as trainer:
        packs = {"trees": (trees, False), "one row a trajectory": (alone, True)}
        rows = {name: rollout.packed(trees, trainer.experiment.data, chains) for name, (trees, chains) in packs.items()}
        times: dict[str, list[float]] = {name: [] for name in packs}
        for name in packs:
            jax.block_until_ready(trainer.step(rows[name][0]))
        for _ in range(repeats):
            for name in packs:
                began = time.perf_counter()
                jax.block_until_ready(trainer.step(rows[name][0]))
                times[name].append(time.perf_counter() - began)
    show([Table("a step of the optimizer", ("", "rows", "tokens", "padded", "seconds"), [
        [name, str(np.prod(rows[name][0].tokens.shape[:2])), f"{rows[name][1].tokens:,}",
         f"{rows[name][0].tokens.size:,}", f"{np.median(times[name]):.3f}"] for name in packs
    ])], console)  # fmt: skip


if __name__ == "__main__":
    jax.config.update("jax_platforms", "cpu")
    tyro.extras.subcommand_cli_from_dict({"run": run, "table": table, "speed": speed})
