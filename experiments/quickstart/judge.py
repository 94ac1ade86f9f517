"""What the quickstart found: the ways of using the reward models, compared on problems that nobody has seen."""

from __future__ import annotations

import pathlib
from typing import Any

import numpy as np
import task
from rich.console import Console
from rich.table import Table

import jprm
from jprm.evaluate.best_of_n import best_of_n, best_of_n_report
from jprm.evaluate.metrics import auroc, bootstrap, weighted_mean
from jprm.evaluate.processbench import processbench_report
from jprm.jsonl import read_records, write_records
from jprm.policy.protocol import Policy
from jprm.score.live import LiveTrees
from jprm.search import choose
from jprm.search.beam import DVTS, Beam
from jprm.search.best_of_n import BestOfN
from jprm.search.growing import Problem
from jprm.search.lockstep import SearchConfig, search
from jprm.search.mcts import MCTS
from jprm.tree import tree_of

SCORERS = {"prm": ("formal", "min"), "prm_monte_carlo": ("monte_carlo", "min"), "orm": ("outcome", "last")}
"""By name in the results: the model's folder, and the rule that makes a chain's score of its steps'."""

BUDGET_SAMPLES = 16
"""The searches may generate as many tokens a problem as best of this many takes on average."""

METHODS = {
    "best_of_n": BestOfN(64),
    "beam": Beam(width=4, expand=4),
    "dvts": DVTS(subtrees=4, expand=4),
    "mcts": MCTS(simulations=200, expand=4),
}


def judge(policy: Policy, out: pathlib.Path, seed: int) -> dict[str, Any]:
    """Every figure, with 95 % intervals over problems."""
    pools = list(read_records(out / "test_pools.jsonl"))
    scored, reports = {}, {}
    for name, (folder, _) in SCORERS.items():
        path = out / f"test_scored_{folder}.jsonl"
        if not path.is_file():
            write_records(path, jprm.load(out / folder).score_many(pools))
        scored[name] = list(read_records(path))
        reports[name] = best_of_n_report(scored[name], seed)
    first = reports["prm"]
    curves = {"majority": first["majority"], "oracle": first["pass_at_n"], "random": first["baselines"]["random"]}
    curves |= {name: reports[name]["rules"][rule]["best_of_n"] for name, (_, rule) in SCORERS.items()}
    curves["prm_weighted_vote"] = first["rules"]["min"]["weighted_vote"]
    last = first["n_max"] - 1

    def at(curve: str, n: int) -> dict[str, float]:
        return {key: curves[curve][key][n - 1] for key in ("value", "low", "high")}

    return {
        **{f"{name}_best_of_{last + 1}": at(name, last + 1) for name in SCORERS},
        f"majority_{last + 1}": at("majority", last + 1),
        "pass_1": at("oracle", 1),
        f"pass_{last + 1}": at("oracle", last + 1),
        "n": first["n"],
        "curves": curves,
        "wrong_working": {name: wrong_working(scored[name], rule, seed) for name, (_, rule) in SCORERS.items()}
        | {"sample": wrong_working(scored["prm"], None, seed)},
        "first_error": {name: first_error(records, seed) for name, records in scored.items()},
        "label_agreement": label_agreement(out),
        "search": searches(policy, out, pools, seed),
    }


def wrong_working(records: list[dict], rule: str | None, seed: int) -> dict[str, Any]:
    """How often the chosen of all samples has the right answer and a wrong step; `rule` None chooses at random."""
    size = min(len(record["samples"]) for record in records)
    samples = [record["samples"][:size] for record in records]
    wrong_PN = np.array(
        [[float(_wrong_working(record, x)) for x in own] for record, own in zip(records, samples, strict=True)]
    )
    key_PN = np.zeros(wrong_PN.shape)
    if rule:
        reduce = {"min": min, "last": lambda scores: scores[-1]}[rule]
        key_PN = np.array([[reduce(x["scores"]) for x in own] for own in samples])
    valid_PN = np.array([[x["answer"] is not None for x in own] for own in samples])
    value_P = best_of_n(key_PN, wrong_PN, valid_PN, np.full(len(records), size), size)[:, -1]
    return bootstrap(lambda w: weighted_mean(value_P, w), [r["problem"] for r in records], seed=seed).json()


def _wrong_working(record: dict, sample: dict) -> bool:
    return bool(sample["correct"]) and not all(task.check(task.parse(record["problem"]), sample["steps"]))


def first_error(records: list[dict], seed: int, samples: int = 8) -> dict[str, Any]:
    """F1 as in ProcessBench on the first few samples of each problem; its threshold is chosen on half the problems."""
    chains = []
    for record in records:
        problem = task.parse(record["problem"])
        for sample in record["samples"][:samples]:
            wrong = [i for i, right in enumerate(task.check(problem, sample["steps"])) if not right]
            chains.append({"problem": record["problem"], "steps": sample["steps"], "scores": sample["scores"],
                           "first_error": wrong[0] if wrong else -1})  # fmt: skip
    half = len(chains) // 2 // samples * samples
    report = processbench_report({"chosen on": chains[:half], "judged on": chains[half:]}, "chosen on", seed)
    return report["judged on"]["tuned"]


def label_agreement(out: pathlib.Path) -> dict[str, float]:
    """Monte Carlo values against the formal checker, over the distinct steps of the labelled samples."""
    formal, value = {}, {}
    for target, file in ((formal, "formal"), (value, "monte_carlo")):
        for record in read_records(out / f"{file}.jsonl"):
            tree, path = tree_of(record), []
            for i, node in enumerate(tree.nodes):
                path.append((*(path[node.parent] if node.parent >= 0 else (tree.problem,)), node.text))
                if node.label is not None and not (file == "monte_carlo" and i not in _inner(tree)):
                    target[path[i]] = node.label
    both = [key for key in formal if key in value]
    right_N, value_N = np.array([formal[k] > 0.5 for k in both]), np.array([value[k] for k in both])
    return {
        "steps": len(both),
        "auroc": float(auroc(value_N, right_N)),
        "accuracy_hard": float(np.mean((value_N > 0) == right_N)),
        "right_of_valueless": float(right_N[value_N == 0].mean()) if (value_N == 0).any() else None,
        "wrong_of_valued": float((~right_N[value_N > 0]).mean()),
    }


def _inner(tree) -> set[int]:
    """Nodes that go on: a leaf's value is its outcome, not an estimate."""
    return {node.parent for node in tree.nodes}


def searches(policy: Policy, out: pathlib.Path, pools: list[dict], seed: int) -> dict[str, Any]:
    """Every method with the formal PRM, at equal policy tokens a problem."""
    tokens = np.mean([sample["tokens"] for record in pools for sample in record["samples"]])
    budget = round(BUDGET_SAMPLES * float(tokens))
    prm = jprm.load(out / "formal")
    found = {}
    for name, method in METHODS.items():
        scorer = LiveTrees(prm)
        problems = [Problem(record["problem"], record["answer"]) for record in pools]
        config = SearchConfig(method=method, rule="min", budget=budget, seed=seed + 10_000, at_once=len(problems))
        right, wrong_working, spent = (np.zeros(len(problems)) for _ in range(3))
        for index, tree in search(problems, policy, scorer, config):
            answer_of = choose.answers(tree)
            result = choose.choose(tree, "min", "best", answer_of)
            spent[index] = tree.spent
            if result.draw is not None:
                steps = tree.steps(tree.draws[result.draw].end)
                right[index] = task.answer_of(steps) == pools[index]["answer"]
                wrong_working[index] = right[index] and not all(task.check(task.parse(pools[index]["problem"]), steps))
        groups = [record["problem"] for record in pools]
        found[name] = {
            "accuracy": bootstrap(lambda w, x=right: weighted_mean(x, w), groups, seed=seed).json(),
            "wrong_working": float(wrong_working.mean()),
            "policy_tokens": float(spent.mean()),
            "prm_tokens": scorer.tokens / len(problems),
        }
    return {"budget": budget, "methods": found}


def show(console: Console, results: dict[str, Any]) -> None:
    """The verdict in the terminal."""
    n = results["n"][-1]
    table = Table(title=f"on {n} samples of each unseen problem")
    for column in ("chosen by", "right answer", "95 % interval", "of these with wrong working"):
        table.add_column(column, justify="left" if column == "chosen by" else "right")
    rows = [
        ("one sample", "pass_1", "sample"),
        ("majority vote", f"majority_{n}", None),
        ("outcome reward model", f"orm_best_of_{n}", "orm"),
        ("PRM, labels by rollouts", f"prm_monte_carlo_best_of_{n}", "prm_monte_carlo"),
        ("PRM, formal labels", f"prm_best_of_{n}", "prm"),
        ("any of them (oracle)", f"pass_{n}", None),
    ]
    for text, key, working in rows:
        figure = results[key]
        wrong = f"{results['wrong_working'][working]['value']:.1%}" if working else ""
        table.add_row(text, f"{figure['value']:.1%}", f"{figure['low']:.1%} to {figure['high']:.1%}", wrong)
    console.print(table)
    table = Table(title=f"search with the formal PRM, {results['search']['budget']} policy tokens a problem")
    for column in ("method", "right answer", "95 % interval", "policy tokens", "PRM tokens"):
        table.add_column(column, justify="left" if column == "method" else "right")
    for name, found in results["search"]["methods"].items():
        figure = found["accuracy"]
        table.add_row(name, f"{figure['value']:.1%}", f"{figure['low']:.1%} to {figure['high']:.1%}",
                      f"{found['policy_tokens']:.0f}", f"{found['prm_tokens']:.0f}")  # fmt: skip
    console.print(table)
