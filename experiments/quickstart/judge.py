"""The quickstart's figures: the ways to use reward models, compared on problems that no model has seen.

The benchmarks, their intervals and the page come from `jprm eval suite` and `jprm report`. This file writes what they
read, and adds the quickstart's own figures: search at equal cost, correct answers with incorrect steps, and how well
rollouts agree with the checker.
"""

from __future__ import annotations

import collections
import dataclasses
import json
import pathlib
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

import numpy as np
from rich.console import Console

import jprm
from experiments.quickstart import task
from experiments.studies.searches import at_own_tokens, mean_tokens
from jprm.apps.report.page import report
from jprm.io.jsonl import write_records
from jprm.methods.decoding.cache import LiveTrees
from jprm.methods.evaluate.best_of_n import chosen_curves, pools_of
from jprm.methods.evaluate.blocks import Table, interval, last, percent, words
from jprm.methods.evaluate.blocks import show as show_tables
from jprm.methods.evaluate.suite import read_scores, read_suite, run_suite
from jprm.methods.policy.protocol import Policy, Problem
from jprm.methods.search.beam import DVTS, Beam
from jprm.methods.search.best_of_n import BestOfN
from jprm.methods.search.jobs import answers_of, choose
from jprm.methods.search.lockstep import SearchConfig, search
from jprm.methods.search.mcts import MCTS
from jprm.statistics import auroc, bootstrap, weighted_mean
from jprm.tree import ReasoningTree, chains_of, read_records, tree_of

MODELS = {"formal": "prm", "monte_carlo": "prm_monte_carlo", "outcome": "orm"}
"""The folder of each reward model, and its name in the results."""

NAMED = {"formal": "PRM, formal labels", "monte_carlo": "PRM, rollouts", "outcome": "ORM"}
"""The folder of each reward model, and its name in tables."""

CHAINS = 8
"""Samples of each problem whose first error is looked for."""

SEARCHED, BUDGET_SAMPLES = 50, 16
"""Problems that are searched; the searches may generate as many tokens as so many samples take on average."""

METHODS = {
    "best of n": BestOfN(64),
    "beam": Beam(width=3, expand=4),
    "DVTS": DVTS(subtrees=3, expand=4),
    "MCTS": MCTS(simulations=400, expand=6),
}
"""Rounds of 12 steps: the budget of some 620 tokens pays for six of 8 tokens a step, and the longest chain has six. A
search that runs out of tokens before its chains end has nothing to show."""


def judge(policy: Policy, out: pathlib.Path, seed: int, begin: Callable[[str], None]) -> dict[str, Any]:
    """Writes the page and returns every figure, with 95 % intervals over problems."""
    suites, results = evaluated(out, seed, begin, task, MODELS)
    results["mistakes"] = mistakes(out)
    begin("searches with the PRM on formal labels")
    results["search"] = searches(policy, out, suites["formal"], seed)
    begin("the page")
    more = {
        "What this run is evidence for": [caveats_table()],
        "Choosing among samples": [*chosen_tables(results), mistakes_table(results["mistakes"])],
        "Search at equal cost": searched_tables(results),
        "Two kinds of labels": [labels_table(results["label_agreement"])],
    }
    report([out / "judged" / name for name in MODELS], out / "report.html", more=more)
    return results


def evaluated(
    out: pathlib.Path, seed: int, begin: Callable[[str], None], world: ModuleType, models: Mapping[str, str]
) -> tuple[dict[str, dict], dict[str, Any]]:
    """Returns the suite's results by reward model, and the figures of all."""
    suite = read_suite(write_suite(out, seed, world))
    suites = {}
    for name in models:
        begin(f"evaluation: {NAMED[name]}")
        suites[name] = run_suite(out / name, suite, out / "judged" / name)
    results = {
        **_best_of_n(suites, models),
        "wrong_working": {models[name]: _wrong_working(out, name, suites[name], seed, world) for name in models},
        "first_error": {models[name]: suites[name]["processbench"]["files"]["chains"]["tuned"] for name in models},
        "label_agreement": label_agreement(out),
        "baselines": baselines(suites[next(iter(models))]["best_of_n"]["test_pools"]),
    }
    return suites, results


def write_suite(out: pathlib.Path, seed: int, world: ModuleType) -> pathlib.Path:
    """Writes the suite over the test pools.

    Thresholds and calibration maps are fitted on the first half of the problems and judged on the second.
    """
    pools = list(read_records(out / "test_pools.jsonl"))
    for name, half in (("tuning_chains", pools[: len(pools) // 2]), ("chains", pools[len(pools) // 2 :])):
        if not (out / f"{name}.jsonl").is_file():
            write_records(out / f"{name}.jsonl", (chain for record in half for chain in _chains(record, world)))
    fitted = {"data": ["chains.jsonl"], "calibrate": "tuning_chains.jsonl"}
    suite = {
        "neutral": "drop",
        "seed": seed,
        "processbench": fitted,
        "steps": {"data": ["chains.jsonl"]},
        "best_of_n": {"data": ["test_pools.jsonl"]},
        "calibration": fitted,
    }
    (out / "suite.json").write_text(json.dumps(suite, indent=2) + "\n")
    return out / "suite.json"


def _chains(record: dict, world: ModuleType) -> list[dict]:
    """Returns some of a pool's samples in ProcessBench's format: `label` is the first incorrect step's index, or -1."""
    chains = []
    for sample in record["samples"][:CHAINS]:
        wrong = np.flatnonzero(~np.array(world.check(world.parse(record["problem"]), sample["steps"])))
        first = int(wrong[0]) if len(wrong) else -1
        chains.append({"problem": record["problem"], "steps": sample["steps"], "label": first,
                      "final_answer_correct": sample["correct"]})  # fmt: skip
    return chains


def _best_of_n(suites: dict[str, dict], models: Mapping[str, str]) -> dict[str, Any]:
    """Returns the curves, and their last points by model; each model takes the rule that fits its labels."""
    reports = {name: results["best_of_n"]["test_pools"] for name, results in suites.items()}
    first = next(iter(reports.values()))
    curves = {"majority": first["majority"], "pass": first["pass_at_n"], "random": first["baselines"]["random"]}
    for name, report_ in reports.items():
        rule = report_["rules"][suites[name]["model"]["rule"]]
        curves |= {f"{models[name]}_best_of": rule["best_of_n"], f"{models[name]}_vote": rule["weighted_vote"]}

    def at(curve: str, n: int) -> dict[str, float]:
        return {key: curves[curve][key][n - 1] for key in ("value", "low", "high")}

    n = first["n_max"]
    ends = {f"{curve}_{n}": at(curve, n) for curve in curves if curve != "random"} | {"pass_1": at("pass", 1)}
    against = {}
    for name, report_ in reports.items():
        rule = report_["rules"][suites[name]["model"]["rule"]]
        against |= {
            f"{models[name]}_minus_majority": last(rule["minus_majority"]),
            f"{models[name]}_best_of_less_baseline": rule["best_of_n_minus_best_baseline"],
            f"{models[name]}_vote_less_baseline": rule["weighted_vote_minus_best_baseline"],
        }
    return (
        ends | against | {"n": n, "curves": curves, "rules": {models[k]: s["model"]["rule"] for k, s in suites.items()}}
    )


def _wrong_working(out: pathlib.Path, model: str, results: dict, seed: int, world: ModuleType) -> dict[str, Any]:
    """Returns how often the best sample has the correct answer and an incorrect step; `random`: one sample."""
    scored = read_scores(out / "judged" / model, results)["test_pools"]
    trees = [_with_wrong_working(tree, world) for tree in scored]
    pools = pools_of(trees)
    value_P = chosen_curves(pools)[results["model"]["rule"]][:, -1]
    outcomes = [[node.correct for node in tree.nodes if node.correct is not None] for tree in trees]
    return {
        "chosen": bootstrap(lambda w: weighted_mean(value_P, w), pools.problem, seed=seed).json(),
        "one_sample": float(np.mean([np.mean(of_pool) for of_pool in outcomes])),
    }


def _with_wrong_working(tree: ReasoningTree, world: ModuleType) -> ReasoningTree:
    """Returns the pool with `correct` for samples that have the correct answer and an incorrect step."""
    nodes = list(tree.nodes)
    for chain in chains_of(tree):
        sample = {"correct": nodes[chain[-1]].correct, "steps": [nodes[i].text for i in chain]}
        wrong_working = _is_wrong_working({"problem": tree.problem}, sample, world)
        nodes[chain[-1]] = dataclasses.replace(nodes[chain[-1]], correct=wrong_working)
    return dataclasses.replace(tree, nodes=tuple(nodes))


def _is_wrong_working(record: dict, sample: dict, world: ModuleType = task) -> bool:
    return bool(sample["correct"]) and not all(world.check(world.parse(record["problem"]), sample["steps"]))


def baselines(report_: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the trivial baselines of best of n, any model's report, by name: `best_of_n` and `vote`."""
    figures: dict[str, Any] = {"best": report_["best_baseline"]["name"], "choosers": {}}
    for use, curves in (("best_of_n", report_["baselines"]), ("vote", report_["baseline_votes"])):
        for name, curve in curves.items():
            if curve is not None and name != "random":
                figures["choosers"].setdefault(f"baseline: {words(name)}", {})[use] = last(curve)
    return figures


def mistakes(out: pathlib.Path) -> dict[str, dict[str, int]]:
    """Counts wrong steps by kind: of the authors, and of the policy's samples of the test problems."""
    counts = {}
    for name, file in (("authors", "solutions.jsonl"), ("samples", "test_pools.jsonl")):
        chains = (
            (record["problem"], sample["steps"])
            for record in read_records(out / file)
            for sample in record.get("samples", [record])
        )
        kinds = (kind for problem, steps in chains for kind in task.mistakes(task.parse(problem), steps) if kind)
        counts[name] = dict(collections.Counter(kinds).most_common())
    return counts


def label_agreement(out: pathlib.Path) -> dict[str, Any]:
    """Monte Carlo values against the formal checker, over the distinct steps of the labelled samples that go on: the
    value of a last step is its outcome, not an estimate."""
    formal, value = _labels_by_path(out / "formal.jsonl"), _labels_by_path(out / "monte_carlo.jsonl")
    both = [key for key in formal if key in value]
    right_N, value_N = np.array([formal[key] > 0.5 for key in both]), np.array([value[key] for key in both])
    none = value_N == 0
    return {
        "steps": len(both),
        "auroc": float(auroc(value_N, right_N)),
        "accuracy_hard": float(np.mean(~none == right_N)),
        "right_without_value": float(right_N[none].mean()) if none.any() else None,
        "wrong_with_value": float((~right_N[~none]).mean()) if not none.all() else None,
    }


def _labels_by_path(file: pathlib.Path) -> dict[tuple[str, ...], float]:
    """Returns the label of every step that another follows, by problem and steps."""
    labels = {}
    for record in read_records(file):
        tree = tree_of(record)
        paths, inner = [], {node.parent for node in tree.nodes}
        for i, node in enumerate(tree.nodes):
            paths.append((*(paths[node.parent] if node.parent >= 0 else (tree.problem,)), node.text))
            if i in inner and node.label is not None:
                labels[paths[i]] = node.label
    return labels


def searches(policy: Policy, out: pathlib.Path, suite: dict, seed: int) -> dict[str, Any]:
    """Runs every method with the PRM of formal labels and one budget of tokens a problem.

    Each is compared with best of n and majority vote of the test pools at the tokens that it spent, paired over
    problems (`experiments/studies/searches.py`).
    """
    pools, rule = list(read_records(out / "test_pools.jsonl"))[:SEARCHED], suite["model"]["rule"]
    scored = read_scores(out / "judged" / "formal", suite)["test_pools"][:SEARCHED]
    rivals = pools_of(scored), mean_tokens(scored), rule, seed
    tokens = np.mean([sample["tokens"] for record in pools for sample in record["samples"]])
    budget = round(BUDGET_SAMPLES * float(tokens))
    prm = jprm.load(out / "formal")
    problems = [Problem(record["problem"], record["answer"]) for record in pools]
    groups, methods = [record["problem"] for record in pools], {}
    for name, method in METHODS.items():
        scorer = LiveTrees(prm)
        config = SearchConfig(method=method, rule=rule, budget=budget, seed=seed + 10_000, at_once=len(problems))
        right_P, wrong_working_P, spent_P = np.zeros((3, len(problems)))
        for p, tree in search(problems, policy, scorer, config):
            result = choose(tree, rule, "best", answers_of(tree))
            spent_P[p] = tree.spent
            if result.draw is not None:
                steps = tree.steps(tree.draws[result.draw].end)
                sample = {"steps": steps, "correct": task.answer_of(steps) == pools[p]["answer"]}
                right_P[p], wrong_working_P[p] = sample["correct"], _is_wrong_working(pools[p], sample)
        methods[name] = at_own_tokens(right_P, spent_P, *rivals) | {
            "wrong_working": bootstrap(_mean_of(wrong_working_P), groups, seed=seed).json(),
            "policy_tokens": float(spent_P.mean()),
            "prm_tokens": scorer.tokens / len(problems),
        }
    return {"problems": len(problems), "budget": budget, "rule": rule, "methods": methods}


def _mean_of(value_P: np.ndarray) -> Callable[[np.ndarray], np.ndarray]:
    return lambda weight_RP: weighted_mean(value_P, weight_RP)


CAVEATS = {
    "a world made for it": "Most mistakes are true equations about the wrong thing, which no checker sees. The habits"
    " were chosen on problems of other seeds, as experiments/quickstart/README.md tells.",
    "one run": "Other seeds differ by some points: experiments/quickstart/seeds.py tabulates several.",
    "first errors": "The outcome reward model learns the outcome of a chain at each of its steps. It is never told"
    " where an error is, and the PRMs are.",
}
"""What a reader must know before the figures."""


def caveats_table(caveats: Mapping[str, str] = CAVEATS) -> Table:
    """The caveats as a table of the page."""
    return Table("", ("", ""), list(caveats.items()), text=1)


def chosen_tables(results: dict[str, Any]) -> list[Table]:
    """Returns every chooser's share of right answers, the models less the best trivial one, and wrong working."""
    n, working, trivial = results["n"], results["wrong_working"], results["baselines"]
    named = {MODELS[folder]: words_ for folder, words_ in NAMED.items() if MODELS[folder] in working}
    rows = [
        (words_, interval(results[f"{name}_best_of_{n}"]), interval(results[f"{name}_vote_{n}"]))
        for name, words_ in named.items()
    ]
    for name, uses in trivial["choosers"].items():
        best, vote = (interval(uses[use]) if use in uses else "" for use in ("best_of_n", "vote"))
        rows.append((name, best, vote))
    rows += [
        ("baseline: majority", "", interval(results[f"majority_{n}"])),
        ("one sample", interval(results["pass_1"]), ""),
        ("any of them is right (oracle)", interval(results[f"pass_{n}"]), ""),
    ]
    less = [
        (words_, *map(interval, (results[f"{name}_best_of_less_baseline"], results[f"{name}_vote_less_baseline"],
                                 results["first_error"][name]["less"])))
        for name, words_ in named.items()
    ]  # fmt: skip
    wrong = [(words_, interval(working[name]["chosen"])) for name, words_ in named.items()]
    wrong.append(("one sample", percent(next(iter(working.values()))["one_sample"])))
    title = f"less the best trivial baseline ({words(trivial['best'])}), points"
    return [
        Table(f"right answers of {n} samples, %", ("chosen by", f"best of {n}", "weighted vote"), rows),
        Table(title, ("model", f"best of {n}", "weighted vote", "first errors, F1"), less),
        Table("right answers by wrong working, %", ("chosen by", ""), wrong),
    ]


def mistakes_table(counts: Mapping[str, Mapping[str, int]]) -> Table:
    """Returns the kinds of wrong steps, the commonest of the samples first."""
    rows = [
        (KINDS[kind], *(percent(kinds.get(kind, 0) / max(sum(kinds.values()), 1)) for kinds in counts.values()))
        for kind in sorted(KINDS, key=lambda kind: -counts["samples"].get(kind, 0))
    ]
    return Table("wrong steps by kind, %", ("", *counts), rows)


KINDS = {
    "operation": "wrong operation",
    "quantity": "another's things counted",
    "unit": "pairs counted as one",
    "skipped": "a day skipped",
    "copied": "a number copied wrongly",
    "count": "the count above copied wrongly",
    "sum": "a false equation",
    "form": "no step of this kind",
}


def show(console: Console, results: dict[str, Any]) -> None:
    """Prints the verdict."""
    show_tables([*chosen_tables(results), *searched_tables(results)], console)


def searched_tables(results: dict[str, Any]) -> list[Table]:
    """Returns each search beside best of n and the majority at its own tokens, and its costs."""
    search, rows = results["search"], results["search"]["methods"].items()
    keys = ("accuracy", "less_best_of_n", "less_majority")
    right = [(name, *(interval(row[key]) for key in keys)) for name, row in rows]
    cost = [
        (name, f"{row['policy_tokens']:.0f}", f"{row['prm_tokens']:.0f}", interval(row["wrong_working"]))
        for name, row in rows
    ]
    title = f"search with the PRM on formal labels, {search['problems']} problems, {search['budget']} tokens each"
    return [
        Table(title, ("method", "right, %", "less best of n", "less majority"), right,
              caption="best of n and majority have the search's own tokens on each problem"),
        Table("the searches' cost", ("method", "policy tokens", "PRM tokens", "wrong working, %"), cost),
    ]  # fmt: skip


def labels_table(agreement: dict[str, Any]) -> Table:
    rows = [
        ("steps that both label", f"{agreement['steps']:,}"),
        ("AUROC of the rollouts' value against the checker", percent(agreement["auroc"])),
        ("agree, where any right rollout means right", percent(agreement["accuracy_hard"])),
        ("of steps without a right rollout, right", percent(agreement["right_without_value"])),
        ("of steps with a right rollout, wrong", percent(agreement["wrong_with_value"])),
    ]
    return Table("labels by rollouts against the formal checker", ("", "%"), rows)
