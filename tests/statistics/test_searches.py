"""Best of n and votes at the tokens of a search, against all subsets of the pools."""

import itertools
import json

import numpy as np
import pytest
from refusing import refused

from experiments.studies import searches
from jprm.apps import cli
from jprm.io.jsonl import write_records
from jprm.statistics import difference, draws, weighted_mean
from jprm.tree import tree_of


def pools(rng, count=6, size=5):
    drawn = []
    for p in range(count):
        samples = [
            {"steps": ["a", "b"], "scores": rng.random(2).round(2).tolist(), "answer": a, "correct": a == "1",
             "tokens": int(rng.integers(5, 15))}
            for a in rng.choice(["1", "2", "3"], size).tolist()
        ]  # fmt: skip
        drawn.append({"problem": f"p{p}", "answer": "1", "samples": samples})
    return drawn


def results(rng, drawn, low, high):
    return [
        {"problem": record["problem"], "answer": "1", "nodes": [{"parent": -1, "text": "a"}],
         "search": {"method": "Beam", "rule": "min", "chosen": 0, "correct": bool(rng.random() < 0.6),
                    "policy_tokens": int(rng.integers(low, high)), "over_budget_tokens": 3}}
        for record in reversed(drawn)  # in another order than the pools
    ]  # fmt: skip


def at(n, samples):
    """Expected accuracy of best of n by the lowest score, and of a majority of n, for a whole n: all subsets."""
    best, vote = [], []
    for subset in itertools.combinations(samples, n):
        top = max(min(s["scores"]) for s in subset)
        best.append(np.mean([s["correct"] for s in subset if min(s["scores"]) == top]))
        counts = {a: sum(s["answer"] == a for s in subset) for a in {s["answer"] for s in subset}}
        vote.append(np.mean([a == "1" for a, c in counts.items() if c == max(counts.values())]))
    return np.array([np.mean(best), np.mean(vote)])


@pytest.mark.parametrize(("low", "high"), [(8, 45), (1, 90)])  # within the pools; also below one sample, beyond them
def test_each_problem_gets_the_tokens_that_its_search_spent(low, high, tmp_path):
    rng = np.random.default_rng(0)
    drawn = pools(rng)
    records = results(rng, drawn, low, high)
    report = searches.searches_report({"beam": list(map(tree_of, records))}, list(map(tree_of, drawn)), seed=0)["beam"]
    by_problem = {record["problem"]: record["samples"] for record in drawn}
    right, rival, below, beyond = [], [], 0, 0
    for record in records:
        samples = by_problem[record["problem"]]
        n = (record["search"]["policy_tokens"] + 3) / np.mean([s["tokens"] for s in samples])
        below, beyond = below + (n < 1), beyond + (n > 5)
        n = min(max(n, 1), 5)
        whole = min(int(n), 4)
        rival.append((1 - (n - whole)) * at(whole, samples) + (n - whole) * at(whole + 1, samples))
        right.append(record["search"]["correct"])
    right, rival = np.array(right, float), np.array(rival)
    assert (report["below_one"], report["beyond_pool"]) == (below, beyond) and (low > 5 or below and beyond)
    assert report["accuracy"]["value"] == pytest.approx(right.mean())
    problems = [record["problem"] for record in records]
    for name, value in zip(("best_of_n", "majority"), rival.T, strict=True):
        assert report[name]["value"] == pytest.approx(value.mean(), abs=1e-6)
        paired = difference(*(draws(lambda w, x=x: weighted_mean(x, w), problems, seed=0) for x in (right, value)))
        assert report[f"less_{name}"] == pytest.approx(paired.json(), abs=1e-5)
    write_records(tmp_path / "beam.jsonl", records)
    write_records(tmp_path / "pool.jsonl", drawn)
    paths = ["--searches", str(tmp_path / "beam.jsonl"), "--pool", str(tmp_path / "pool.jsonl")]
    assert cli.main(["eval", f"{searches.__file__}:SEARCHES", *paths, "--json", str(tmp_path / "out.json")]) == 0
    assert json.loads((tmp_path / "out.json").read_text())["beam"] == json.loads(json.dumps(report))


@pytest.mark.parametrize(
    ("change", "message"),
    [({"search": None}, "jprm"), ({"problem": "new"}, "pool"), ({}, "occurs twice")],
)
def test_results_that_cannot_be_compared_are_refused(change, message):
    rng = np.random.default_rng(0)
    drawn = pools(rng)
    records = results(rng, drawn, 8, 45)
    records.append(records[0] | change)
    searched, pooled = list(map(tree_of, records)), list(map(tree_of, drawn))
    refused(ValueError, message, searches.searches_report, {"beam": searched}, pooled, seed=0)
