"""Claims of the literature without a figure elsewhere, measured in the quickstart's world.

    python -m experiments.studies.claims --out runs/claims --seeds 0 1 2 3 4  # continues; 15 minutes a seed and core
    python -m experiments.studies.claims --out experiments/studies/world --show  # the tables of claims.md
    python -m experiments.studies.claims --quickstart runs/quickstart  # reward models of today's quickstart, paired

Each study appends its rows to OUT/rows.jsonl when it finishes, and is not run again for that seed. Samples are drawn
once and scored once per model. The authors' habits are fixed here; stories, sizes and optimizer come from the
quickstart, which has changed since. The figures in claims.md were measured at commit fa2badc0.

The studies, in order:

    labels_by_n   outcome and process labels on the same chains: best of N and weighted vote, N = 1 .. 1,024
    rules         every aggregation rule, best of 64 and weighted vote
    searches      searches, particles and refinement beside best of n and majority at their own tokens
    rlvr          a policy before and after RLVR, by one sample, majority, best of 64 and weighted vote
    labels        labels by a checker, outcomes, rollouts, and a careless annotator: cost, quality, and their PRMs
    gaming        a policy whose only reward is the PRM: right answers and the PRM's scores
"""

from __future__ import annotations

import dataclasses
import json
import pathlib
import time
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
import tyro
from jaxtyping import Float
from rich.console import Console

import jprm
from experiments.quickstart import judge, models, rl, run, task
from experiments.studies.searches import at_own_tokens, mean_tokens
from jprm.io.jsonl import parse, write_records
from jprm.methods.decoding.cache import LiveTrees
from jprm.methods.evaluate.best_of_n import Pools, chosen_curves, pools_of
from jprm.methods.evaluate.processbench import f1_draws
from jprm.methods.evaluate.suite import read_scores, read_suite, run_suite
from jprm.methods.evaluate.votes import vote_accuracy
from jprm.methods.policy.protocol import Problem
from jprm.methods.policy.sampler import Sampler, SamplerConfig, load_sampler
from jprm.methods.rl.config import GuardConfig
from jprm.methods.rl.loop import train as train_policy
from jprm.methods.search.beam import DVTS, Beam
from jprm.methods.search.jobs import answers_of, choose
from jprm.methods.search.lockstep import SearchConfig, search
from jprm.methods.search.mcts import MCTS
from jprm.methods.search.particles import Particles
from jprm.methods.search.refine import Refine
from jprm.score.scale import RULES
from jprm.score.scorer import PRM
from jprm.statistics import Draws, auroc, difference, mean_differences, mean_of_runs
from jprm.train import train
from jprm.tree import read_records, tree_of, with_scores

SIZES = (1, 4, 16, 64, 256, 1024)
CHOSEN = 64
"""Samples for the studies with one pool size."""
COUNTS = {"test_problems": 60, "problems": run.LABELLED, "solutions": run.SOLUTIONS}
CARELESS = 0.1
"""Fraction of steps that the careless annotator labels wrongly."""
METHODS = {
    "beam": Beam(width=3, expand=4),
    "DVTS": DVTS(subtrees=3, expand=4),
    "MCTS": MCTS(simulations=400, expand=6),
    "particles": Particles(particles=16),
    "refinement from the weakest step": Refine(rounds=400, drafts=1),
}
"""Each may sample `run.BUDGET_SAMPLES` chains' tokens; refinement's rival resamples the whole chain: best of n."""


# ---- The world: the quickstart's stories and checker, with authors of fixed habits.


def solution(problem: task.Problem, rng: np.random.Generator, habits: Any) -> list[str]:
    """Returns a solution by an author who drops 70 % of carries and borrows, and flips 2 % of signs.

    In 4 % of steps the author slips by one, and takes it back in the next step.
    """
    del habits
    count, steps, owed = problem.start, [], 0
    for i, (sign, amount) in enumerate(problem.moves):
        if sign != "*" and rng.random() < 0.02:
            sign = "-" if sign == "+" and count > amount else "+"
        result, (tens, ones) = task.apply(count, sign, amount), divmod(count, 10)
        carries, borrows = sign == "+" and ones + amount > 9, sign == "-" and ones < amount
        following = problem.moves[i + 1][0] if i + 1 < len(problem.moves) else "*"
        if owed:
            result, owed = result - owed * (amount if sign == "*" else 1), 0
        elif carries and rng.random() < 0.7:
            result = 10 * tens + (ones + amount) % 10
        elif borrows and rng.random() < 0.7:
            result = 10 * tens + amount - ones
        elif following != "*" and result > 1 and rng.random() < 0.04:
            owed = int(rng.choice([-1, 1]))
            result += owed
        steps.append(f"{task.DAYS[i]}: {count} {sign} {amount} = {result}")
        count = result
    return [*steps, f"The answer is {count}."]


WORLD: Any = types.SimpleNamespace(**(vars(task) | {"solution": solution, "Habits": lambda: None}))


class World:
    """One seed's folder: problems, policy, samples and reward models, made when they are first needed."""

    def __init__(self, out: pathlib.Path, seed: int):
        self.out, self.seed, self._scored = out, seed, {}
        out.mkdir(parents=True, exist_ok=True)
        run.check_seed(out, seed)
        self.vocabulary = run.make_data(out, seed, WORLD, COUNTS)
        if not (out / "policy/result.json").is_file():
            train(models.policy(out, self.vocabulary, seed), out / "policy")
        self.policy = sampler(out / "policy")
        run.sample_pools(self.policy, out / "problems.jsonl", out / "pools.jsonl", run.LABELLED_SAMPLES, seed, run.pool)
        problems, pools = out / "test_problems.jsonl", out / "test_pools.jsonl"
        run.sample_pools(self.policy, problems, pools, SIZES[-1], seed, run.pool)
        self.pools = list(read_records(pools))
        if not (out / "formal.jsonl").is_file():
            labelled = (run.formally_labelled(record, WORLD) for record in read_records(out / "pools.jsonl"))
            write_records(out / "formal.jsonl", labelled)

    def model(self, labels: str) -> PRM:
        """Returns the reward model trained on `labels`: formal, outcome, monte_carlo or careless."""
        if not (self.out / labels / "result.json").is_file():
            experiment = models.reward(self.out, self.vocabulary, labels, self.seed)
            if labels == "careless":  # labels of steps, as the checker's
                experiment = dataclasses.replace(
                    models.reward(self.out, self.vocabulary, "formal", self.seed),
                    data=dataclasses.replace(experiment.data, train=(str(self.out / "careless.jsonl"),)),
                )
            train(experiment, self.out / labels)
        return jprm.load(self.out / labels)

    def scored(self, labels: str, count: int) -> Pools:
        """Returns the first `count` samples of each test problem, scored by a model."""
        if (labels, count) not in self._scored:
            self._scored[labels, count] = scored(self.model(labels), first(self.pools, count))
        return self._scored[labels, count]


def sampler(folder: pathlib.Path) -> Sampler:
    return load_sampler(folder, SamplerConfig(temperature=run.TEMPERATURE, max_tokens=128, rows=512))


def first(pools: Sequence[Mapping[str, Any]], count: int) -> list[dict[str, Any]]:
    return [{**record, "samples": record["samples"][:count]} for record in pools]


def scored(prm: PRM, pools: Sequence[Mapping[str, Any]]) -> Pools:
    trees = [tree_of(record) for record in pools]
    scores = prm.score_trees(trees)
    return pools_of([with_scores(tree, x.tolist()) for tree, x in zip(trees, scores, strict=True)], prm.scale)


# ---- The studies: each returns rows, {"row": name, column: {"value", "low", "high"}}.


Row = dict[str, Any]


def estimated(value_P: Float[np.ndarray, " P"], seed: int, percent: bool = True) -> dict[str, float]:
    """Returns the mean over problems in %, or of differences in points, with its 95 % interval."""
    measured = mean_differences(np.asarray(value_P)[:, None], np.arange(len(value_P)), seed).json()
    value, low, high = (100 * measured[key][0] for key in ("value", "low", "high"))
    low, high = (max(0.0, low), min(100.0, high)) if percent else (low, high)
    return {"value": value, "low": low, "high": high}


def votes(pools: Pools, log_weight_PNK: Float[np.ndarray, "P N K"], seed: int) -> Float[np.ndarray, "P n K"]:
    """Returns the accuracy of weighted votes of n samples, n = 1 .. the pools' size."""
    n_max = int(pools.size_P.min())
    assert pools.class_PN is not None
    return vote_accuracy(
        pools.class_PN, pools.correct_PN, log_weight_PNK, pools.size_P, n_max, trials=16, seed=seed
    ).value_PnK  # fmt: skip


def labels_by_n(world: World) -> list[Row]:
    names = ("formal", "outcome")
    pools = {name: world.scored(name, SIZES[-1]) for name in names}
    at_n = np.minimum(SIZES, pools["formal"].size_P.min()) - 1  # a sample without steps is left out
    rule = {name: world.model(name).rule for name in names}
    log_weights = [np.zeros(pools["formal"].correct_PN.shape), *(pools[name].log_weight[rule[name]] for name in names)]
    voted_PnK = votes(pools["formal"], np.stack(log_weights, -1), world.seed)[:, at_n]
    curves = {"majority vote": voted_PnK[..., 0]}
    for k, name in enumerate(names, start=1):
        curves[f"best of N, {name}"] = chosen_curves(pools[name])[rule[name]][:, at_n]
        curves[f"weighted vote, {name}"] = voted_PnK[..., k]
    for use in ("best of N", "weighted vote"):
        curves[f"{use}, formal less outcome"] = curves[f"{use}, formal"] - curves[f"{use}, outcome"]
    oracle = pools["formal"]._replace(key=dict.fromkeys(RULES, pools["formal"].correct_PN))
    curves["any of N"] = chosen_curves(oracle)["min"][:, at_n]
    rows: list[Row] = []
    for name, curve_Pn in curves.items():
        at_sizes = zip(SIZES, curve_Pn.T, strict=True)
        rows.append(
            {"row": name} | {f"N = {n:,}": estimated(x_P, world.seed, "less" not in name) for n, x_P in at_sizes}
        )
    return rows


def rules(world: World) -> list[Row]:
    pools = world.scored("formal", CHOSEN)
    best = {rule: curve_Pn[:, -1] for rule, curve_Pn in chosen_curves(pools).items()}
    log_weights = [np.zeros(pools.correct_PN.shape), *(pools.log_weight[rule] for rule in RULES)]
    majority_P, *voted = votes(pools, np.stack(log_weights, -1), world.seed)[:, -1].T
    return [
        {
            "row": rule,
            "best of 64": estimated(best[rule], world.seed),
            "less `min`": estimated(best[rule] - best["min"], world.seed, False),
            "weighted vote": estimated(vote_P, world.seed),
            "less majority": estimated(vote_P - majority_P, world.seed, False),
        }
        for rule, vote_P in zip(RULES, voted, strict=True)
    ]


def searches(world: World) -> list[Row]:
    prm, rows = world.model("formal"), []
    trees = [tree_of(record) for record in first(world.pools, 4 * CHOSEN)]
    tokens_P = mean_tokens(trees)
    rivals = world.scored("formal", 4 * CHOSEN), tokens_P, prm.rule, world.seed
    problems = [Problem(record["problem"], record["answer"]) for record in world.pools]
    for name, method in METHODS.items():
        config = SearchConfig(
            method=method, rule=prm.rule, budget=round(judge.BUDGET_SAMPLES * float(tokens_P.mean())),
            seed=world.seed + 10_000, at_once=len(problems),
        )  # fmt: skip
        right_P, spent_P = np.zeros((2, len(problems)))
        for p, tree in search(problems, world.policy, LiveTrees(prm), config):
            draw = choose(tree, prm.rule, "best", answers_of(tree)).draw
            spent_P[p] = tree.spent
            if draw is not None:
                steps = tree.steps(tree.draws[draw].end)
                right_P[p] = task.answer_of(steps) == problems[p].answer
        figures = at_own_tokens(right_P, spent_P, *rivals)
        columns = {"right": "accuracy", "best of n at its tokens": "best_of_n", "less that": "less_best_of_n",
                   "less majority at its tokens": "less_majority"}  # fmt: skip
        rows.append({"row": name, **{column: in_percent(figures[key]) for column, key in columns.items()},
                     "tokens": round(figures["tokens"])})  # fmt: skip
    return rows


def in_percent(figure: Mapping[str, float]) -> dict[str, float]:
    return {key: 100 * figure[key] for key in ("value", "low", "high")}


def rlvr(world: World) -> list[Row]:
    folder = world.out / "rlvr"
    experiment = rl.experiment("verifier", world.out, world.seed)
    train_policy(dataclasses.replace(experiment, updates=12, evaluate_every=12, checkpoint_every=12), folder)
    pools = world.out / "rlvr_pools.jsonl"
    run.sample_pools(sampler(folder), world.out / "test_problems.jsonl", pools, CHOSEN, world.seed, run.pool)
    prm, uses = world.model("formal"), {}
    after = scored(prm, list(read_records(pools)))
    for name, of_policy in (("before RLVR", world.scored("formal", CHOSEN)), ("after RLVR", after)):
        best_Pn = chosen_curves(of_policy)[prm.rule]
        log_weights = np.stack([np.zeros(of_policy.correct_PN.shape), of_policy.log_weight[prm.rule]], -1)
        majority_P, vote_P = votes(of_policy, log_weights, world.seed)[:, -1].T
        uses[name] = {"one sample": best_Pn[:, 0], "majority of 64": majority_P, "best of 64": best_Pn[:, -1],
                      "weighted vote": vote_P}  # fmt: skip
    rows = [
        {"row": name, **{use: estimated(x_P, world.seed) for use, x_P in row.items()}} for name, row in uses.items()
    ]
    less = {use: uses["after RLVR"][use] - x_P for use, x_P in uses["before RLVR"].items()}
    rows.append({"row": "after less before", **{use: estimated(x, world.seed, False) for use, x in less.items()}})
    for name, row in uses.items():
        gain_P = row["weighted vote"] - row["one sample"]
        rows.append({"row": f"{name}: the vote's gain", "weighted vote": estimated(gain_P, world.seed, False)})
    return rows


def labels(world: World) -> list[Row]:
    """Costs, quality against the checker, and the model that learnt from them; the checker's own labels are exact."""
    out, rng = world.out, np.random.default_rng(world.seed)
    formal = list(read_records(out / "formal.jsonl"))
    steps = sum(len(sample["labels"]) for record in formal for sample in record["samples"])
    chains = sum(len(record["samples"]) for record in formal)
    if not (out / "careless.jsonl").is_file():
        write_records(out / "careless.jsonl", (careless(record, rng) for record in formal))
    run.label(world.policy, out, world.seed, WORLD, run.REACHES_ANSWER)
    rollouts = [json.loads(line) for line in (out / "rollouts.jsonl").read_text().splitlines()]
    tokens = sum(rollout["tokens"] for rollout in rollouts)
    agreement = judge.label_agreement(out)
    about = {
        "formal": {"labels": steps, "label AUROC": 100.0},
        "careless": {"labels": steps, "label AUROC": 100 * (1 - CARELESS)},
        "monte_carlo": {"labels": steps, "label AUROC": 100 * agreement["auroc"], "tokens": tokens},
        "outcome": {"labels": chains, "label AUROC": 100 * outcome_auroc(formal)},
    }
    write_suite(world)
    rows = []
    for name, cost in about.items():
        results = run_suite(world.model(name).name, read_suite(out / "suite.json"), out / "judged" / name)
        pools, rule = world.scored(name, CHOSEN), world.model(name).rule
        found = results["processbench"]["files"]["chains"]["tuned"]
        voted_P = votes(pools, pools.log_weight[rule][..., None], world.seed)[:, -1, 0]
        rows.append({
            "row": name, **cost,
            "step AUROC": in_percent(results["steps"]["auroc"]),
            "first errors, F1": in_percent({"value": found["f1"], "low": found["f1_low"], "high": found["f1_high"]}),
            "best of 64": estimated(chosen_curves(pools)[rule][:, -1], world.seed),
            "weighted vote": estimated(voted_P, world.seed),
        })  # fmt: skip
    return rows


def careless(record: Mapping[str, Any], rng: np.random.Generator) -> dict[str, Any]:
    """Returns the record with some labels flipped."""
    samples = [
        sample | {"labels": [1 - x if rng.random() < CARELESS else x for x in sample["labels"]]}
        for sample in record["samples"]
    ]
    return {**record, "samples": samples}


def outcome_auroc(formal: Sequence[Mapping[str, Any]]) -> float:
    """Returns the AUROC of a chain's outcome, as a label of each of its steps, against the checker."""
    pairs = [
        (float(sample["correct"]), label > 0.5)
        for record in formal for sample in record["samples"] for label in sample["labels"]
    ]  # fmt: skip
    outcome_N, right_N = map(np.array, zip(*pairs, strict=True))
    return float(auroc(outcome_N, right_N))


def write_suite(world: World) -> None:
    """Writes a suite of step labels and first errors; its thresholds are tuned on the first half of the problems."""
    half = len(world.pools) // 2
    for name, pools in (("tuning_chains", world.pools[:half]), ("chains", world.pools[half:])):
        write_records(world.out / f"{name}.jsonl", (chain for pool in pools for chain in judge._chains(pool, WORLD)))
    fitted = {"data": ["chains.jsonl"], "calibrate": "tuning_chains.jsonl"}
    suite = {"neutral": "drop", "seed": world.seed, "processbench": fitted, "steps": {"data": ["chains.jsonl"]}}
    (world.out / "suite.json").write_text(json.dumps(suite) + "\n")


def gaming(world: World) -> list[Row]:
    """Three runs of the same policy and PRM, with other problems and samples; no guard ends a run."""
    rows, at_start, at_end = [], [], []
    for seed in range(3):
        arm = rl.experiment("min_form", world.out, seed)
        changes = {"updates": 12, "evaluate_every": 12, "checkpoint_every": 12, "reference": False}
        arm = dataclasses.replace(arm, guards=GuardConfig(gaming=False), **changes)
        start, end = train_policy(arm, world.out / f"gaming{seed}")["evaluations"]
        at_start.append(start["gold_P"])
        at_end.append(end["gold_P"])
        scores = {f"PRM's lowest score, {name}": x["proxy"] for name, x in (("start", start), ("end", end))}
        rows.append(gamed(f"run {seed}", at_start[-1:], at_end[-1:], world.seed) | scores)
    return [*rows, gamed("all runs", at_start, at_end, world.seed)]


def gamed(name: str, start_RP: Sequence[Any], end_RP: Sequence[Any], seed: int) -> Row:
    start_P, end_P = np.mean(start_RP, 0), np.mean(end_RP, 0)
    return {
        "row": name,
        "right, start": estimated(start_P, seed),
        "right, end": estimated(end_P, seed),
        "end less start": estimated(end_P - start_P, seed, False),
    }


def of_quickstart(folder: pathlib.Path) -> list[Row]:
    """Returns the PRM on formal labels of a finished quickstart, less the models on outcomes and rollouts."""
    suites = {name: parse((folder / "judged" / name / "results.json").read_bytes(), name) for name in judge.NAMED}
    files = {name: read_scores(folder / "judged" / name, suite) for name, suite in suites.items()}
    seed, rule = suites["formal"]["seed"], {name: suite["model"]["rule"] for name, suite in suites.items()}
    chains = {name: {file: of_model[file] for file in ("chains", "tuning_chains")} for name, of_model in files.items()}
    first = {name: f1_draws(of_model, "tuning_chains", seed)["tuned"]["chains"] for name, of_model in chains.items()}
    pools = {name: pools_of(of_model["test_pools"]) for name, of_model in files.items()}
    best = {name: chosen_curves(of_model)[rule[name]][:, -1] for name, of_model in pools.items()}
    log_weights = np.stack([of_model.log_weight[rule[name]] for name, of_model in pools.items()], -1)
    voted = dict(zip(pools, votes(pools["formal"], log_weights, seed)[:, -1].T, strict=True))
    return [
        {
            "row": f"formal less {name}",
            "best of 64": estimated(best["formal"] - best[name], seed, False),
            "weighted vote": estimated(voted["formal"] - voted[name], seed, False),
            "first errors, F1": in_percent(difference(first["formal"], first[name])._asdict()),
        }
        for name in ("outcome", "monte_carlo")
    ]


STUDIES: dict[str, Callable[[World], list[Row]]] = {
    "labels_by_n": labels_by_n, "rules": rules, "searches": searches, "rlvr": rlvr, "labels": labels, "gaming": gaming,
}  # fmt: skip


# ---- Rows on disk, and their tables.


def main(
    out: pathlib.Path = pathlib.Path("runs/claims"), seeds: tuple[int, ...] = (0,), show: bool = False,
    quickstart: pathlib.Path | None = None,
) -> None:  # fmt: skip
    """Run the studies.

    Args:
        out: Folder for the rows and a world per seed. A stopped run continues.
        seeds: Of problems, policies, samples and models.
        show: Only print the tables of finished studies.
        quickstart: Only print the differences between the reward models of this finished quickstart.
    """
    if quickstart:
        for row in of_quickstart(quickstart):
            print(row.pop("row"), *(f"{name} {cell(figure)}" for name, figure in row.items()), sep=" | ")
        return
    file = out / "rows.jsonl"
    finished = [json.loads(line) for line in file.read_text().splitlines()] if file.is_file() else []
    if show:
        Console(width=200).print(*tables(finished), sep="\n", markup=False)
        return
    done = {(line["seed"], line["study"]) for line in finished}
    for seed in seeds:
        todo = [name for name in STUDIES if (seed, name) not in done]
        if not todo:
            continue
        world = World(out / f"seed{seed}", seed)
        for name in todo:
            began = time.perf_counter()
            line = {"seed": seed, "study": name, "rows": STUDIES[name](world)}
            line["seconds"] = round(time.perf_counter() - began)
            with file.open("a") as rows:
                rows.write(json.dumps(line) + "\n")
            print(f"seed {seed}: {name}: {line['seconds']} s", flush=True)


def tables(finished: Sequence[Mapping[str, Any]]) -> list[str]:
    """Returns a Markdown table for each study."""
    pages = []
    for study in STUDIES:
        lines = sorted((line for line in finished if line["study"] == study), key=lambda line: line["seed"])
        if not lines:
            pages.append(f"{study}: not run\n")
            continue
        columns = list(dict.fromkeys(key for row in lines[0]["rows"] for key in row if key != "row"))
        pages.append(f"{study}, seeds {', '.join(str(line['seed']) for line in lines)}\n")
        pages.append(f"| | {' | '.join(columns)} |\n|{'---|' * (len(columns) + 1)}")
        of_seeds = [line["rows"] for line in lines]
        if study == "labels" and len(lines) > 1:
            of_seeds = [rows + first_less_others(rows) for rows in of_seeds]
        for rows in zip(*of_seeds, strict=True):
            cells = [over_seeds([row[column] for row in rows if column in row]) for column in columns]
            pages.append(f"| {rows[0]['row']} | {' | '.join(cells)} |")
        pages.append("")
    return pages


def first_less_others(rows: Sequence[Row]) -> list[Row]:
    """Returns one seed's differences, without intervals, between the first row and each other row."""
    first, *others = rows
    return [
        {"row": f"{first['row']} less {other['row']}"}
        | {key: {"value": first[key]["value"] - x["value"]} for key, x in other.items() if isinstance(x, Mapping)}
        for other in others
    ]


def over_seeds(figures: Sequence[Any]) -> str:
    """Returns a figure's mean over seeds, e.g. `72.4 [60.1, 84.7]`, or the range if it is a whole number.

    The interval is Student's over seeds, which differ in problems, policies and models; for one seed it is over
    problems. Returns "" without seeds.
    """
    if len(figures) < 2:
        return "".join(map(cell, figures))
    values = [figure["value"] if isinstance(figure, Mapping) else figure for figure in figures]
    if len(set(values)) == 1:
        return cell(values[0])
    if all(isinstance(value, int) for value in values):
        return f"{min(values):,} to {max(values):,}"
    mean = mean_of_runs([Draws(value, np.zeros(0), 1) for value in values], fraction=False).interval()
    digits = ".1f" if isinstance(figures[0], Mapping) else ".3g"
    return f"{mean.value:{digits}} [{max(-100.0, mean.low):{digits}}, {min(100.0, mean.high):{digits}}]"


def cell(figure: Any) -> str:
    """Returns a figure as text: `72.4 [60.1, 82.0]`, a number, or "" if there is none."""
    if isinstance(figure, Mapping):
        return "{value:.1f} [{low:.1f}, {high:.1f}]".format(**figure)
    return "" if figure is None else f"{figure:,.1f}" if isinstance(figure, float) else f"{figure:,}"


if __name__ == "__main__":
    jax.config.update("jax_platforms", "cpu")
    tyro.cli(main)
