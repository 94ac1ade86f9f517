"""The tool world from data to report: a policy, its trajectories, a PRM of turns, an outcome model, what they find.

    python -m experiments.tool_world.study run --seed 0 --out runs/tool_world_0
    python -m experiments.tool_world.study run --seed 1 --out runs/tool_world_1 --like runs/tool_world_0
    python -m experiments.tool_world.study table runs/tool_world_0 runs/tool_world_1

A policy learns the trajectories of authors with habits (`shop.py`). It acts on other tasks, the world labels every turn
and every outcome, and two reward models learn from the same trajectories: the PRM from the labels of turns, the outcome
model from the outcome at each turn. On tasks that neither has seen, the same for all seeds, they find turns that are
not correct, and choose among the policy's trajectories. The simplest readers of a trajectory stand beside them.

A stage whose output is there is not run again.
"""

from __future__ import annotations

import collections
import json
import pathlib
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any

import jax
import numpy as np
import tyro
from rich.console import Console

import jprm
from experiments.tool_world import agents, shop
from jprm.io.jsonl import write_records
from jprm.methods.evaluate.blocks import Table, interval, percent, points, show
from jprm.methods.evaluate.processbench import right_at, weighted_f1
from jprm.methods.evaluate.votes import answer_classes, best_of_n, vote_accuracy
from jprm.methods.formats.chat_template import template_of
from jprm.methods.policy.sampler import SamplerConfig, load_sampler
from jprm.methods.rl.samples import sample_episodes
from jprm.methods.worlds.environment import World
from jprm.methods.worlds.turns import EpisodeLimits, TurnLayout
from jprm.score.scale import PROBABILITY
from jprm.statistics import Draws, auroc, difference_of_runs, draws, mean_of_runs, weighted_mean
from jprm.statistics import interval as interval_of
from jprm.train import train
from jprm.tree import tree_of

DEMONSTRATIONS = 8_000
"""Trajectories of authors, which the policy sees about 1.6 times."""

LABELLED, SAMPLES = 300, 4
"""Tasks whose trajectories are labelled, and trajectories of each."""

TESTED, TESTED_SAMPLES = 120, 16
HELD_OUT, LEARNT = 60, 200
"""Tasks of reinforcement learning: those that evaluations use, and those that are learnt from."""

LIMITS = EpisodeLimits(turns=10, tokens=agents.TOKENS)
MAX_TOKENS = 12  # of a turn
SEED_OF_TESTS = 10_000

console = Console()


def run(out: pathlib.Path = pathlib.Path("runs/tool_world_0"), seed: int = 0, like: pathlib.Path | None = None) -> None:
    """Run one seed: data, policy, trajectories, reward models, figures.

    Args:
        out: The folder for everything that is made; a run that was stopped continues in it.
        seed: Of the demonstrations, the tasks, the training and the samples. The tests are the same for all.
        like: A run whose policy and test trajectories are used. Seeds then differ in labelled tasks and reward models.
    """
    began = time.perf_counter()
    out.mkdir(parents=True, exist_ok=True)
    for name in ("policy", "test_tasks_acted.jsonl"):
        if like is not None and not (out / name).exists():
            (out / name).symlink_to((like / name).resolve())
    records = make_data(out, seed)
    if not (out / "policy/result.json").is_file():
        console.rule("the policy learns the authors' trajectories")
        train(agents.policy(out, seed), out / "policy")
    for name, samples in {"tasks": SAMPLES, "test_tasks": TESTED_SAMPLES}.items():
        act(out, name, records[name], samples, seed)
    for name in ("prm", "orm"):
        if not (out / name / "result.json").is_file():
            console.rule(f"{name} learns")
            train(agents.reward(out, name, seed), out / name)
    console.rule("figures")
    trajectories = read(out / "test_tasks_acted.jsonl")
    figures = measure(trajectories, {name: scored(out / name, trajectories) for name in ("prm", "orm")}, seed)
    np.savez(
        out / "draws.npz", **{f"{key}|{part}": getattr(x, part) for key, x in figures.items() for part in x._fields}
    )
    results: dict[str, Any] = {key: interval_of(x).json() for key, x in figures.items()}
    results |= {"seconds": round(time.perf_counter() - began, 1), "seed": seed, "habits": habits(trajectories)}
    (out / "results.json").write_text(json.dumps(results, indent=2) + "\n")
    show([Table(f"seed {seed}", ("", "%"), [[key, interval(results[key])] for key in figures])], console)


def make_data(out: pathlib.Path, seed: int) -> dict[str, list[dict]]:
    """Writes tokenizer, demonstrations and tasks; no problem is in two files."""
    agents.save_tokenizer(out / "tokenizer")
    seen: set[str] = set()
    tasks = {"test_tasks": shop.tasks(np.random.default_rng(SEED_OF_TESTS), TESTED, seen)}
    tasks["held_out"] = shop.tasks(np.random.default_rng(SEED_OF_TESTS + 1), HELD_OUT, seen)
    for number, (name, count) in enumerate({"tasks": LABELLED, "learnt": LEARNT}.items()):
        tasks[name] = shop.tasks(np.random.default_rng([seed, number]), count, seen)
    rng = np.random.default_rng([seed, 2])
    authors = (shop.task(rng) for _ in range(2 * DEMONSTRATIONS))
    others = [record for record in authors if record["problem"] not in seen][:DEMONSTRATIONS]
    tasks["demonstrations"] = [shop.demonstration(record, rng, shop.Habits()) for record in others]
    for name, records in tasks.items():
        if not (out / f"{name}.jsonl").is_file():
            write_records(out / f"{name}.jsonl", records)
    return tasks


def act(out: pathlib.Path, name: str, records: Sequence[dict], samples: int, seed: int) -> None:
    """Has the policy act on every task so many times, and writes the trajectories with the world's labels."""
    if (out / f"{name}_acted.jsonl").is_file():
        return
    console.rule(f"{name}: {samples} trajectories of each")
    policy = load_sampler(out / "policy", SamplerConfig(temperature=1.0, max_tokens=MAX_TOKENS, rows=256))
    layout = TurnLayout(policy.tokenizer, *template_of(out / "tokenizer"))
    world = World(shop.SHOP)
    drawn = sample_episodes(policy, world, layout, LIMITS, records, samples, seed=seed, update=0)
    write_records(out / f"{name}_acted.jsonl", (
        {**record, "messages": shop.labelled(record, episode.messages()),
         "outcome": episode.reward if episode.ended else 0.0, "submitted": shop.answer_of(episode.messages())}
        for record, episodes in zip(records, drawn, strict=True)
        for episode in episodes
    ))  # fmt: skip


def read(path: pathlib.Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def scored(model: pathlib.Path, trajectories: Sequence[dict]) -> list[np.ndarray]:
    """Returns a model's score of every turn of each trajectory."""
    trees = [tree_of(record) for record in trajectories]
    scores = jprm.load(model).score_trees(trees)
    return [np.asarray(score_N)[tree.steps] for tree, score_N in zip(trees, scores, strict=True)]


# ---- Figures.


def turns_of(record: Mapping[str, Any]) -> list[dict]:
    return [message for message in record["messages"] if message["role"] == "assistant"]


def readers(trajectories: Sequence[dict]) -> dict[str, list[np.ndarray]]:
    """Returns the scores of readers that learn nothing, of every turn: high where they take a turn for correct."""
    by_reader: dict[str, list[np.ndarray]] = collections.defaultdict(list)
    for record in trajectories:
        calls = [tuple(shop.call_of(turn)) for turn in turns_of(record)]
        by_reader["no repeated call"].append(np.array([float(call not in calls[:i]) for i, call in enumerate(calls)]))
        by_reader["early turns"].append(-np.arange(len(calls)) / 100.0)
        by_reader["not the last"].append(np.arange(len(calls)) < len(calls) - 1.0)
        by_reader["all"].append(np.ones(len(calls)))
    return dict(by_reader)


def measure(trajectories: Sequence[dict], models: Mapping[str, list[np.ndarray]], seed: int) -> dict[str, Draws]:
    """Returns the figures with their draws over problems, which are the same for all seeds."""
    problems = [record["problem"] for record in trajectories]
    label = [np.array([turn["label"] for turn in turns_of(record)]) for record in trajectories]
    first_N = np.array([int(np.argmin(x)) if (x < 1).any() else -1 for x in label])
    group_T = np.repeat(problems, [len(x) for x in label])
    figures: dict[str, Draws] = {}

    def add(name: str, statistic: Callable[[np.ndarray], Any], groups: Sequence[Any] | np.ndarray) -> None:
        figures[name] = draws(statistic, groups, seed=SEED_OF_TESTS)

    simple = readers(trajectories)
    for name, score in {**models, **simple}.items():
        flat_T, right_T = np.concatenate(score), np.concatenate(label) > 0.5
        if name != "all":
            add(f"turns AUROC, {name}", lambda w, s=flat_T, r=right_T: auroc(s, r, w), group_T)
        if name != "early turns":  # its scores are no probabilities
            right_N = right_at(first_N, score, 0.5)
            add(f"first bad turn F1, {name}", lambda w, r=right_N: weighted_f1(r, first_N, w).f1, problems)
    shape = (len(dict.fromkeys(problems)), -1)
    correct_PN = np.array([record["outcome"] for record in trajectories]).reshape(shape)
    valid_PN = np.array([record["submitted"] is not None for record in trajectories]).reshape(shape)
    class_PN = np.array([answer_classes(row) for row in _rows([r["submitted"] for r in trajectories], shape[0])])
    keys = {"PRM, worst turn": [x.min() for x in models["prm"]], "PRM, product": [x.prod() for x in models["prm"]],
            "PRM, last turn": [x[-1] for x in models["prm"]],
            "outcome model, last turn": [x[-1] for x in models["orm"]],
            "outcome model, worst turn": [x.min() for x in models["orm"]],
            "fewest turns": [-len(x) for x in label], "one of them": [0.0 for _ in label],
            "fewest repeated calls": [x.sum() - len(x) for x in simple["no repeated call"]],
            "oracle": correct_PN.ravel()}  # fmt: skip
    size_P, tasks = np.full(shape[0], correct_PN.shape[1]), list(dict.fromkeys(problems))
    for name, key in keys.items():
        key_PN = np.array(key, float).reshape(shape)
        curve_Pn = best_of_n(key_PN, correct_PN, valid_PN | (name == "oracle"), size_P, correct_PN.shape[1])
        for n in (4, correct_PN.shape[1]):
            add(f"best of {n}, {name}", lambda w, x=curve_Pn[:, n - 1]: weighted_mean(x, w), tasks)
    voters = {"majority": np.zeros(len(label)), **{k: PROBABILITY.log_weights(keys[k]) for k in list(keys)[:5]}}
    log_weight_PNK = np.stack([x.reshape(shape) for x in voters.values()], axis=-1)
    value_PnK = vote_accuracy(class_PN, correct_PN, log_weight_PNK, size_P, size_P[0], trials=8, seed=seed).value_PnK
    for k, name in enumerate(voters):
        add(f"vote of {size_P[0]}, {name}", lambda w, x=value_PnK[:, -1, k]: weighted_mean(x, w), tasks)
    add("turns that are correct", lambda w: weighted_mean(np.concatenate(label), w), group_T)
    return figures


def _rows(values: list, count: int) -> list[list]:
    size = len(values) // count
    return [values[i * size : (i + 1) * size] for i in range(count)]


def habits(trajectories: Sequence[dict]) -> dict[str, int]:
    """Returns how often each mistake was the first, and of which outcome."""
    counted = collections.Counter(
        f"{shop.habit_of(record, record['messages'])}, outcome {record['outcome']:.0f}" for record in trajectories
    )
    return dict(counted.most_common())


def table(runs: Annotated[tuple[pathlib.Path, ...], tyro.conf.Positional]) -> None:
    """Print the means over seeds with 95 % intervals over seeds and problems, and what the PRM adds.

    Args:
        runs: Folders of finished runs.
    """
    loaded = [np.load(path / "draws.npz") for path in runs]
    names = [key.removesuffix("|value") for key in loaded[0] if key.endswith("|value")]

    def draws_of(name: str) -> list[Draws]:
        return [Draws(x[f"{name}|value"], x[f"{name}|drawn_R"], int(x[f"{name}|groups"])) for x in loaded]

    rows = []
    for name in names:
        mean = mean_of_runs(draws_of(name), fraction=True).interval()
        by_seed = " ".join(percent(float(x.value)) for x in draws_of(name))
        rows.append([name, interval({"value": mean.value, "low": mean.low, "high": mean.high}), by_seed])
    show([Table(f"means of {len(runs)} seeds", ("%", "mean [95 %]", "by seed"), rows)], console)
    pairs = [("turns AUROC, prm", "turns AUROC, orm"), ("first bad turn F1, prm", "first bad turn F1, orm"),
             ("turns AUROC, prm", "turns AUROC, no repeated call")]  # fmt: skip
    last = next(name.split(",")[0] for name in names if name.endswith("oracle") and "best of 4" not in name)
    vote = next(name.split(",")[0] for name in names if name.startswith("vote"))
    pairs += [(f"{what}, PRM, worst turn", f"{what}, outcome model, last turn") for what in ("best of 4", last, vote)]
    pairs += [(f"{last}, PRM, worst turn", f"{vote}, majority"), (f"{vote}, PRM, worst turn", f"{vote}, majority")]
    rows = []
    for a, b in pairs:
        gap = difference_of_runs(draws_of(a), draws_of(b), same_seeds=True).interval()
        rows.append([a, b, points({"value": gap.value, "low": gap.low, "high": gap.high})])
    show([Table("differences, paired", ("", "less", "points [95 %]"), rows)], console)


if __name__ == "__main__":
    jax.config.update("jax_platforms", "cpu")
    tyro.extras.subcommand_cli_from_dict({"run": run, "table": table})
