"""What adaptive rollouts save: the same error of Monte Carlo labels for fewer tokens, in the quickstart's world.

    python -m experiments.quickstart.budgets --run runs/quickstart [--problems 80]

For a chain of each unseen problem, 96 rollouts of every prefix are drawn once from the quickstart's policy, and kept.
The value of a prefix is taken from 64 of them; the other 32, in twenty random orders, are what `label mc` draws from,
with the same number for each prefix, with a mean for each tree (`--adaptive`), or with one budget of tokens for all
(`--tokens`). A label errs where it is on the other side of 0.5 than the value. Fixed before it was run: the threshold,
k = 4 first rollouts, at most 32, z = 1.645. Intervals are over problems.
"""

from __future__ import annotations

import json
import pathlib
import tempfile
from collections.abc import Sequence
from typing import Any

import numpy as np
import tyro

from jprm.io.outputs import Bar
from jprm.methods.label.config import Adaptive, MonteCarloConfig
from jprm.methods.label.monte_carlo import Rollouts, label_trees, prefixes_of
from jprm.methods.policy.protocol import Prefix, Sample
from jprm.methods.policy.sample_cache import KeptPolicy, prefix_key
from jprm.methods.policy.sampler import SamplerConfig, load_sampler
from jprm.methods.verify import verifiers
from jprm.statistics import bootstrap, weighted_mean
from jprm.tree import tree_of

THRESHOLD, FIRST, MOST, TRUTH, ORDERS, Z = 0.5, 4, 32, 64, 20, 1.645


class Replay:
    """A policy that gives each prefix's kept rollouts in an order of its own."""

    name = "replay"

    def __init__(self, kept: dict[str, list[Sample]], order: np.ndarray):
        self.kept, self.order, self.tokens = kept, order, 0

    def sample(self, prefixes: Sequence[Prefix], n: int, *, until: str, seed: int) -> list[list[Sample]]:
        drawn = [[self.kept[prefix_key(p)][self.order[seed + j]] for j in range(n)] for p in prefixes]
        self.tokens += sum(sample.tokens for samples in drawn for sample in samples)
        return drawn


def main(run: pathlib.Path = pathlib.Path("runs/quickstart"), problems: int = 80) -> None:
    """Measure what budgets of rollouts save.

    Args:
        run: The quickstart's folder, with its policy.
        problems: Chains whose prefixes are labelled.
    """
    records = [json.loads(line) for line in (run / "test_problems.jsonl").read_text().splitlines()[:problems]]
    policy = load_sampler(run / "policy", SamplerConfig(temperature=0.7, max_tokens=120))
    with KeptPolicy(policy, run / "budgets.rollouts.jsonl") as kept:
        starts = [Prefix(record["problem"]) for record in records]
        chains = [samples[0].steps for samples in kept.sample(starts, 1, until="end", seed=10_000)]
        trees = [
            tree_of({"problem": record["problem"], "answer": record["answer"], "steps": list(steps)})
            for record, steps in zip(records, chains, strict=True)
            if steps
        ]
        prefixes = [prefix for tree in trees for prefix in prefixes_of(tree)]
        with Bar("rollouts", len(prefixes)) as bar:
            for at in range(0, len(prefixes), 16):
                kept.sample(prefixes[at : at + 16], TRUTH + MOST, until="end", seed=0)
                bar.add(len(prefixes[at : at + 16]))
        drawn = {prefix_key(p): kept.kept(p, TRUTH + MOST, "end", 0) for p in prefixes}
    verifier, side_N, problem_N = verifiers.find("answer"), [], []
    for i, tree in enumerate(trees):
        record = verifiers.record_of_problem(tree)
        for prefix in prefixes_of(tree):
            right = verifier.accepts([(record, prefix, drawn[prefix_key(prefix)][:TRUTH])])[0]
            side_N.append(np.mean(right) >= THRESHOLD)
            problem_N.append(i)
    adaptive = {mean: Adaptive(THRESHOLD, MOST, mean) for mean in (4, 6, 8, 12)}
    tokens = np.mean([sample.tokens for samples in drawn.values() for sample in samples])
    settings: dict[str, dict[str, Any]] = {f"{k} each": {"k": k} for k in (4, 6, 8, 12, 16, 24, 32)}
    settings |= {f"adaptive, mean {m}": {"k": FIRST, "adaptive": a} for m, a in adaptive.items()}
    settings |= {
        f"adaptive, {m} x tokens": {"k": FIRST, "adaptive": a, "tokens": m * float(tokens)} for m, a in adaptive.items()
    }
    print(f"{len(trees)} chains, {len(side_N)} prefixes, {np.mean(side_N):.1%} above {THRESHOLD}")
    for name, setting in settings.items():
        config = MonteCarloConfig("soft", z=Z, trees_at_once=len(trees), **setting)
        wrong_N, spent = np.zeros(len(side_N)), []
        for order in range(ORDERS):
            replay = Replay(drawn, TRUTH + np.random.default_rng(order).permutation(MOST))
            with tempfile.TemporaryDirectory() as folder:
                with Rollouts(replay, pathlib.Path(folder) / "r.jsonl") as rollouts:
                    labelled = list(label_trees(trees, rollouts, config))
            label_N = np.array([node.label for tree in labelled for node in tree.nodes], float)
            wrong_N += (label_N >= THRESHOLD) != np.array(side_N)
            spent.append(replay.tokens / len(side_N))
        error = bootstrap(lambda weight_RP, x=wrong_N / ORDERS: weighted_mean(x, weight_RP), problem_N, seed=0)
        row = {"setting": name, "tokens": round(float(np.mean(spent)), 1), **error.json()}
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    tyro.cli(main)
