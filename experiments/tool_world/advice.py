"""Advice in the tool world: a policy that is told the critic's lowest turn, beside none and a turn by chance.

    python -m experiments.tool_world.advice run --seed 0 --out runs/advice_0
    python -m experiments.tool_world.advice table runs/advice_0 runs/advice_1 runs/advice_2

A PRM of turns is trained as in `study.py` and is the critic. The policy learns authors' trajectories of which half have
advice by chance, so that it has seen such messages, and no reason to heed them. From it each arm is trained by
reinforcement learning on outcomes alone, with as many episodes, in its own world: advice that is of use there is learnt
to be used. `labels` tells the world's own labels, so it bounds what a critic can do. A stage whose output is there is
not run again.
"""

from __future__ import annotations

import dataclasses
import json
import pathlib
import time
import zlib
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import jax
import numpy as np
import tyro
from rich.console import Console

from experiments.tool_world import agents, learn, shop, study
from jprm.io.jsonl import write_records
from jprm.methods.agents.advice import Critic, advised
from jprm.methods.evaluate.blocks import Table, interval, points, show
from jprm.methods.evaluate.votes import answer_classes, vote_accuracy
from jprm.methods.formats.chat_template import render, template_of
from jprm.methods.policy.sampler import SamplerConfig, load_sampler
from jprm.methods.rl.config import EnvironmentConfig
from jprm.methods.rl.loop import train as train_rl
from jprm.methods.rl.samples import sample_episodes
from jprm.methods.worlds.environment import Environment, World
from jprm.methods.worlds.turns import TurnLayout
from jprm.statistics import Draws, difference_of_runs, draws, mean_of_runs, weighted_mean
from jprm.train import train

EVERY = 2
WORDS = "error {turn}? {percent}."
"""The message, in words of the world's tokenizer."""

UPDATES, TESTED_SAMPLES = 30, 16
VOTE_TOKENS = 600
"""Of a task: what a vote at equal tokens may read and write, the critic's reading included."""

ARMS = ("none", "random", "critic", "labels")

console = Console()


def at_random(record: Mapping[str, Any]) -> list[float]:
    """Returns scores that say nothing, the same for the same messages."""
    rng = np.random.default_rng(zlib.crc32(json.dumps(record["messages"]).encode()))
    return rng.random(sum(message["role"] == "assistant" for message in record["messages"])).tolist()


@dataclasses.dataclass(frozen=True)
class Labels:
    """The world's own labels as a critic: only it knows the tables."""

    tasks: Mapping[str, Mapping[str, Any]] = dataclasses.field(repr=False)

    def __call__(self, record: Mapping[str, Any]) -> list[float]:
        messages = shop.labelled(self.tasks[record["problem"]], record["messages"])
        return [message["label"] for message in messages if message["role"] == "assistant"]


def world(arm: str, out: str) -> Environment:
    """Returns the world of an arm; its folder holds the critic and the tasks."""
    folder = pathlib.Path(out)
    if arm == "none":
        return shop.SHOP
    tasks = [record for name in ("learnt", "held_out", "test_tasks") for record in study.read(folder / f"{name}.jsonl")]
    critics = {
        "random": at_random,
        "critic": Critic(folder / "prm"),
        "labels": Labels({t["problem"]: t for t in tasks}),
    }
    return advised(shop.SHOP, critics[arm], every=EVERY, words=WORDS)


def with_advice(record: Mapping[str, Any]) -> dict[str, Any]:
    """Returns an author's trajectory with advice by chance, which the author does not heed."""
    messages, turns = [], 0
    for message in record["messages"]:
        messages.append(message)
        turns += message["role"] == "assistant"
        if message["role"] == "tool" and not turns % EVERY:
            score = at_random({"messages": messages})
            low = int(np.argmin(score))
            content = WORDS.format(turn=low + 1, percent=int(100 * score[low]))
            messages = [*messages, {"role": "user", "content": content}]
    return {**record, "messages": messages}


def run(
    out: pathlib.Path = pathlib.Path("runs/advice_0"), seed: int = 0, arms: tuple[str, ...] = ARMS,
    updates: int = UPDATES,
) -> None:  # fmt: skip
    """Run one seed: the critic, the policy, its training in each arm's world, and tests.

    Args:
        out: The folder for everything that is made; a run that was stopped continues in it.
        seed: Of the demonstrations, the tasks, the training and the samples. The tests are the same for all.
        arms: Which: none, random, critic, labels.
        updates: Of reinforcement learning.
    """
    began = time.perf_counter()
    out.mkdir(parents=True, exist_ok=True)
    records = study.make_data(out, seed)
    if not (out / "demonstrations_advised.jsonl").is_file():
        write_records(
            out / "demonstrations_advised.jsonl",
            (with_advice(r) if i % 2 else r for i, r in enumerate(records["demonstrations"])),
        )
    policy = agents.policy(out, seed)
    if not (out / "policy/result.json").is_file():
        console.rule("the policy learns the authors' trajectories")
        data = dataclasses.replace(policy.data, train=(str(out / "demonstrations_advised.jsonl"),))
        train(dataclasses.replace(policy, data=data), out / "policy")
    study.act(out, "tasks", records["tasks"], study.SAMPLES, seed)
    if not (out / "prm/result.json").is_file():
        console.rule("the critic learns")
        train(agents.reward(out, "prm", seed), out / "prm")
    for arm in arms:
        (out / f"{arm}.py").write_text(
            f"from experiments.tool_world import advice\n\nWORLD = advice.world({arm!r}, {str(out)!r})\n"
        )
        if not (out / f"rl_{arm}/rl.json").is_file():
            console.rule(arm)
            train_rl(_experiment(arm, out, seed, updates), out / f"rl_{arm}")
    results = {"start": {"none": _tested(out, "policy", "none", records["test_tasks"], seed)}}
    for arm in arms:
        results[arm] = {arm: _tested(out, f"rl_{arm}", arm, records["test_tasks"], seed)}
    if {"critic", "random"} <= set(arms):  # whether it heeds what the advice says
        results["critic"]["random"] = _tested(out, "rl_critic", "random", records["test_tasks"], seed)
    (out / "results.json").write_text(json.dumps(results) + "\n")
    print(f"{time.perf_counter() - began:.0f} s")
    table((out,))


def _experiment(arm: str, out: pathlib.Path, seed: int, updates: int) -> Any:
    base = learn.experiment("outcome", out, seed)
    assert base.environment is not None
    environment = dataclasses.replace(base.environment, name=f"{(out / f'{arm}.py').resolve()}:WORLD", seconds=300.0)
    assert isinstance(environment, EnvironmentConfig)
    return dataclasses.replace(
        base, name=f"tool_world_advice_{arm}", prm="", environment=environment, updates=updates,
        evaluate_every=updates, checkpoint_every=50,
    )  # fmt: skip


def _tested(out: pathlib.Path, policy: str, arm: str, records: Sequence[dict], seed: int) -> dict[str, Any]:
    """Returns a policy's episodes in an arm's world: outcomes and answers of every task, and mean tokens."""
    sampler = load_sampler(out / policy, SamplerConfig(temperature=1.0, max_tokens=study.MAX_TOKENS, rows=256))
    layout = TurnLayout(sampler.tokenizer, *template_of(out / "tokenizer"))
    place = World(world(arm, str(out)), seconds=300.0)
    drawn = sample_episodes(sampler, place, layout, study.LIMITS, records, TESTED_SAMPLES, seed=seed, update=0)
    if place.failures:
        raise RuntimeError(f"{arm}: the world lost episodes: {dict(place.failures)}")
    episodes = [episode for samples in drawn for episode in samples]
    read = [_read(episode.messages()) for episode in episodes] if arm == "critic" else [0]
    return {
        "outcome_PN": [[episode.reward if episode.ended else 0.0 for episode in samples] for samples in drawn],
        "answer_PN": [[shop.answer_of(episode.messages()) for episode in samples] for samples in drawn],
        "turns": float(np.mean([len(episode.steps) for episode in episodes])),
        "tokens": float(np.mean([len(episode.prompt) + len(episode.ids) for episode in episodes])),
        "critic_tokens": float(np.mean(read)),
    }


def _read(messages: Sequence[Mapping[str, Any]]) -> int:
    """Returns how many tokens the critic read: the episode so far, at each advice, without the advice."""
    tokenizer, seen, total = shop.tokenizer(), [], 0
    for number, message in enumerate(messages):
        if message["role"] == "user" and number:
            text = render(shop.TEMPLATE, seen, {"eos_token": "<end>"}, reply=False)
            total += len(tokenizer.encode(text).ids)
        else:
            seen.append(message)
    return total


def _figures(result: Mapping[str, Any]) -> dict[str, Draws]:
    """Returns the solved fraction of one episode, and of a vote of as many as VOTE_TOKENS pay for."""
    outcome_PN = np.array(result["outcome_PN"])
    n = _votes(result)
    class_PN = np.array([answer_classes(row) for row in result["answer_PN"]])
    size_P = np.full(len(outcome_PN), outcome_PN.shape[1])
    weight_PNK = np.ones((*outcome_PN.shape, 1))
    vote_PnK = vote_accuracy(class_PN, outcome_PN, weight_PNK, size_P, n, trials=32, seed=0).value_PnK
    value = {"one": outcome_PN.mean(1), "vote": vote_PnK[:, n - 1, 0]}
    return {
        name: draws(lambda w, x=value_P: weighted_mean(x, w), np.arange(len(value_P)), seed=study.SEED_OF_TESTS)
        for name, value_P in value.items()
    }


def _votes(result: Mapping[str, Any]) -> int:
    """Returns how many episodes VOTE_TOKENS pay for, of those that there are."""
    return max(1, min(int(VOTE_TOKENS / (result["tokens"] + result["critic_tokens"])), TESTED_SAMPLES))


def table(runs: Annotated[tuple[pathlib.Path, ...], tyro.conf.Positional]) -> None:
    """Print means over seeds with 95 % intervals over seeds and tasks, and paired differences.

    Args:
        runs: Folders of finished runs.
    """
    loaded = [json.loads((path / "results.json").read_text()) for path in runs]
    arms = {(policy, told): [run[policy][told] for run in loaded] for policy in loaded[0] for told in loaded[0][policy]}
    figures = {arm: [_figures(result) for result in results] for arm, results in arms.items()}
    rows = []
    for arm, results in arms.items():
        tokens = np.mean([[result["tokens"], result["critic_tokens"], _votes(result)] for result in results], 0)
        told = [_interval(mean_of_runs([row[name] for row in figures[arm]], fraction=True)) for name in ("one", "vote")]
        rows.append([*arm, *map(interval, told), f"{np.mean([result['turns'] for result in results]):.2f}",
                     f"{tokens[0]:.0f} + {tokens[1]:.0f}", f"{tokens[2]:.0f}"])  # fmt: skip
    columns = ("policy of", "told", "solved, %", "vote, %", "turns", "tokens", "votes")
    show([Table(f"{len(runs)} seeds; vote of {VOTE_TOKENS} tokens", columns, rows)], console)
    rows = []
    for a, b in (("critic", "none"), ("critic", "random"), ("random", "none"), ("labels", "none")):
        if (a, a) in figures and (b, b) in figures:
            gaps = [
                _interval(difference_of_runs(*([x[name] for x in figures[c, c]] for c in (a, b)), same_seeds=True))
                for name in ("one", "vote")
            ]
            rows.append([a, b, *map(points, gaps)])
    show([Table("differences, paired", ("", "less", "one episode [95 %]", "vote [95 %]"), rows)], console)


def _interval(draws: Any) -> dict[str, float]:
    estimate = draws.interval()
    return {"value": estimate.value, "low": estimate.low, "high": estimate.high}


if __name__ == "__main__":
    jax.config.update("jax_platforms", "cpu")
    tyro.extras.subcommand_cli_from_dict({"run": run, "table": table})
