"""The quickstart's figures: the ways to use reward models, compared on problems that no model has seen.

The benchmarks, their intervals and the page come from `jprm eval suite` and `jprm report`. This file writes what they
read, and adds the quickstart's own figures: search at equal cost, correct answers with incorrect steps, and how well
rollouts agree with the checker.
"""

from __future__ import annotations

import dataclasses
import json
import pathlib
from collections.abc import Callable, Collection, Mapping
from types import ModuleType
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import track

import jprm
from experiments.quickstart import task
from experiments.studies.searches import at_own_tokens, mean_tokens
from jprm.apps.report.page import report
from jprm.experiment import RUN, read
from jprm.io.jsonl import write_records
from jprm.loading import VERIFIER
from jprm.methods.decoding.cache import LiveTrees
from jprm.methods.evaluate.best_of_n import best_of_n_report, chosen_curves, pools_of
from jprm.methods.evaluate.blocks import Table, interval, last, percent, words
from jprm.methods.evaluate.blocks import show as show_tables
from jprm.methods.evaluate.suite import read_scores, read_suite, run_suite
from jprm.methods.evidence.fit import fit
from jprm.methods.evidence.sources import DEFAULT
from jprm.methods.policy.protocol import Policy, Problem
from jprm.methods.search.beam import DVTS, Beam
from jprm.methods.search.best_of_n import BestOfN
from jprm.methods.search.jobs import answers_of, choose
from jprm.methods.search.lockstep import SearchConfig, search
from jprm.methods.search.mcts import MCTS
from jprm.statistics import auroc, bootstrap, weighted_mean
from jprm.train import train
from jprm.tree import ReasoningTree, chains_of, read_records, tree_of

MODELS = {"formal": "prm", "monte_carlo": "prm_monte_carlo", "outcome": "orm"}
"""The folder of each reward model, and its name in the results."""

CHAINS = 8
"""Samples of each problem whose first error is looked for."""

SEARCHED, BUDGET_SAMPLES = 100, 16
"""Problems that are searched; the searches may generate as many tokens as so many samples take on average."""

METHODS = {
    "best of n": BestOfN(64),
    "beam": Beam(width=3, expand=4),
    "DVTS": DVTS(subtrees=3, expand=4),
    "MCTS": MCTS(simulations=400, expand=6),
}
"""Rounds of 12 steps: the budget of some 620 tokens pays for six of 8 tokens a step, and the longest chain has six. A
search that runs out of tokens before its chains end has nothing to show."""


def judge(policy: Policy, out: pathlib.Path, seed: int, console: Console) -> dict[str, Any]:
    """Writes the page and returns every figure, with 95 % intervals over problems."""
    suites, results = evaluated(out, seed, console, task, MODELS)
    console.rule("search, with the PRM of formal labels")
    results["search"] = searches(policy, out, suites["formal"], seed, console)
    more = {
        "What this run is evidence for": [caveats_table()],
        "Search at equal cost": search_tables(results),
        "Two kinds of labels": [labels_table(results["label_agreement"])],
    }
    report([out / "judged" / name for name in MODELS], out / "report.html", more=more)
    return results


def evaluated(
    out: pathlib.Path, seed: int, console: Console, world: ModuleType, models: Mapping[str, str]
) -> tuple[dict[str, dict], dict[str, Any]]:
    """Returns the suite's results by reward model, and the figures of all."""
    suite = read_suite(write_suite(out, seed, world))
    suites = {}
    for name in models:
        console.rule(f"judging the reward model of labels: {name}")
        suites[name] = run_suite(out / name, suite, out / "judged" / name, console.print)
    first = next(iter(models))
    results = {
        **_best_of_n(suites, models),
        "wrong_working": {models[name]: _wrong_working(out, name, suites[name], seed, world) for name in models},
        "first_error": {models[name]: suites[name]["processbench"]["files"]["chains"]["tuned"] for name in models},
        "label_agreement": label_agreement(out),
        "evidence": evidence(out, first, suites[first]["best_of_n"]["test_pools"], seed),
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
    against = {
        f"{models[name]}_minus_majority": {
            key: value[-1] for key, value in report_["rules"][suites[name]["model"]["rule"]]["minus_majority"].items()
        }
        for name, report_ in reports.items()
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


def evidence(out: pathlib.Path, prm: str, report_: Mapping[str, Any], seed: int) -> dict[str, Any]:
    """Fits verifiers to the outcomes of the labelled samples (`jprm fuse fit`): of the sources that need no model, and
    of these with the PRM in the folder `prm`. That PRM is trained on the first half of the problems and the verifier
    on the second, since scores of problems whose labels a PRM has seen are better than any others. Returns their
    figures on the test pools beside the trivial baselines of `report_`, any model's best of n on them. Too few labelled
    problems for a verifier leave it out."""
    figures: dict[str, Any] = {"best_baseline": report_["best_baseline"], "baselines": {}}
    for use, curves in (("best_of_n", report_["baselines"]), ("vote", report_["baseline_votes"])):
        for name, curve in curves.items():
            if curve is not None:
                figures["baselines"].setdefault(name, {})[use] = last(curve)
    pools = list(read_records(out / "pools.jsonl"))
    half = len(pools) // 2
    write_records(out / "pools_apart.jsonl", pools[half:])
    apart = trained_apart(out, prm, {record["problem"] for record in pools[:half]}, f"{prm}_half")
    for name, file, more in (
        ("evidence", "pools.jsonl", []), ("evidence_and_prm", "pools_apart.jsonl", [f"prm={apart}"]),
    ):  # fmt: skip
        folder = out / name
        if not (folder / VERIFIER).is_file():
            try:
                fit([out / file], [*DEFAULT, *more], out=folder, seed=seed)
            except ValueError as error:
                figures[name] = str(error)
                continue
        scored = list(map(tree_of, jprm.load(folder).score_many(read_records(out / "test_pools.jsonl"))))
        curves = best_of_n_report(scored, seed)["rules"]["last"]
        figures[name] = {
            "best_of_n": last(curves["best_of_n"]), "vote": last(curves["weighted_vote"]),
            "best_of_n_less_baseline": curves["best_of_n_minus_best_baseline"],
            "vote_less_baseline": curves["weighted_vote_minus_best_baseline"],
        }  # fmt: skip
    return figures


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
        train(dataclasses.replace(whole, name=f"{whole.name}_{apart}", data=data), folder)
    return folder


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


def searches(policy: Policy, out: pathlib.Path, suite: dict, seed: int, console: Console) -> dict[str, Any]:
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
        done = track(search(problems, policy, scorer, config), name, total=len(problems), console=console)
        for p, tree in done:
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
    "tuned on the test": "The task, the temperature and the authors' habits were chosen while best of 64 was watched on"
    " problems like these: the figures show that the loop works, not what PRMs are worth.",
    "one run": "Other seeds differ by some points: experiments/quickstart/seeds.py tabulates several.",
    "first errors": "The outcome reward model learns the outcome of a chain at each of its steps. It is never told"
    " where an error is, and the PRMs are.",
}
"""What a reader must know before the figures."""


def caveats_table(caveats: Mapping[str, str] = CAVEATS) -> Table:
    """The caveats as a table of the page."""
    return Table("", ("", ""), list(caveats.items()), text=1)


CHOSEN_COLUMNS = ("chosen by", "right answer, %", "right with wrong working, %")
SEARCHED_COLUMNS = ("method", "right answer, %", "best of n at its tokens", "less that", "less majority at its tokens",
                    "right with wrong working, %", "policy tokens", "PRM tokens")  # fmt: skip


def chosen_rows(results: dict[str, Any]) -> list[tuple[str, ...]]:
    n, working = results["n"], results["wrong_working"]
    return [
        ("one sample", interval(results["pass_1"]), percent(working["orm"]["one_sample"])),
        ("majority vote", interval(results[f"majority_{n}"]), ""),
        *(
            (said, interval(results[f"{name}_best_of_{n}"]), interval(working[name]["chosen"]))
            for name, said in (
                ("orm", "outcome reward model"),
                ("prm_monte_carlo", "PRM, labels by rollouts"),
                ("prm", "PRM, formal labels"),
            )
            if name in working
        ),
        *(
            (f"vote weighted by the {said}", interval(results[f"{name}_vote_{n}"]), "")
            for name, said in (("orm", "outcome reward model"), ("prm_monte_carlo", "PRM by rollouts"), ("prm", "PRM"))
            if name in working
        ),
        *evidence_rows(results["evidence"]),
        ("any of them is right (oracle)", interval(results[f"pass_{n}"]), ""),
    ]


def evidence_rows(evidence: dict[str, Any]) -> list[tuple[str, ...]]:
    """Returns rows of the trivial baselines and of the verifiers that weigh evidence, each chosen by and in a vote."""
    rows = [
        (f"{'vote by ' * (use == 'vote')}{words(name)} (baseline)", interval(curve), "")
        for use in ("best_of_n", "vote")
        for name, uses in evidence["baselines"].items()
        if name != "random" and (curve := uses.get(use))
    ]
    named = {"evidence": "evidence without a model", "evidence_and_prm": "evidence and the PRM"}
    fitted = {name: said for name, said in named.items() if isinstance(evidence[name], dict)}
    rows += [(said, interval(evidence[name]["best_of_n"]), "") for name, said in fitted.items()]
    return rows + [(f"vote weighted by {said}", interval(evidence[name]["vote"]), "") for name, said in fitted.items()]


def searched_rows(results: dict[str, Any]) -> list[tuple[str, ...]]:
    return [
        (name, *(interval(row[key]) for key in ("accuracy", "best_of_n", "less_best_of_n", "less_majority",
                                                "wrong_working")),
         f"{row['policy_tokens']:.0f}", f"{row['prm_tokens']:.0f}")
        for name, row in results["search"]["methods"].items()
    ]  # fmt: skip


def show(console: Console, results: dict[str, Any]) -> None:
    """Prints the verdict."""
    show_tables([*search_tables(results), CAVEATS["tuned on the test"]], console)


def search_tables(results: dict[str, Any]) -> list[Table]:
    return [
        Table(f"best of {results['n']} samples of each unseen problem", CHOSEN_COLUMNS, chosen_rows(results)),
        Table(f"search with the PRM of formal labels, {_budget(results)}", SEARCHED_COLUMNS, searched_rows(results)),
    ]


def _budget(results: dict[str, Any]) -> str:
    search = results["search"]
    return f"at most {search['budget']} tokens of the policy a problem, {search['problems']} problems"


def labels_table(agreement: dict[str, Any]) -> Table:
    rows = [
        ("steps that both label", f"{agreement['steps']:,}"),
        ("AUROC of the rollouts' value against the checker", percent(agreement["auroc"])),
        ("agree, where any right rollout means right", percent(agreement["accuracy_hard"])),
        ("of steps without a right rollout, right", percent(agreement["right_without_value"])),
        ("of steps with a right rollout, wrong", percent(agreement["wrong_with_value"])),
    ]
    return Table("labels by rollouts against the formal checker", ("", "%"), rows)
