"""The report's verdict compares a model with baselines whose thresholds are tuned as the model's are."""

import functools

import numpy as np
from scipy.stats import binom

from jprm.methods.evaluate.findings import verdict
from jprm.methods.evaluate.processbench import findings, processbench_report
from jprm.tree import tree_of


@functools.cache
def report(seed, n=40):
    """Chains whose scores and step lengths are noise of one distribution: neither knows of errors."""
    rng = np.random.default_rng(seed)
    trees = []
    for i in range(n):
        steps = int(rng.integers(2, 6))
        length = rng.permutation(60)[:steps] + 1
        record = {"problem": f"p{i}", "steps": ["x" * int(k) for k in length],
                  "scores": (-(rng.permutation(60)[:steps] + 1.0)).tolist(),
                  "first_error": int(rng.integers(steps)) if i % 2 else -1}  # fmt: skip
        trees.append(tree_of(record))
    return processbench_report({"a": trees}, "a", seed)["a"]


def test_a_scorer_of_noise_is_level_with_a_baseline_of_noise():
    files = [report(seed) for seed in range(60)]
    model = np.array([file["cross_fit"]["f1"] for file in files])
    base = [file["baselines"]["step_length"] for file in files]
    alike = model - np.array([row["cross_fit"]["f1"] for row in base])
    apart = model - np.array([row["f1"] for row in base])  # tuned on the chains that it is judged on
    error = np.std(alike, ddof=1) / np.sqrt(len(files))
    assert abs(alike.mean()) < 3 * error  # a two-sided test at 0.3 %
    assert apart.mean() < -3 * np.std(apart, ddof=1) / np.sqrt(len(files))


def test_a_scorer_of_noise_is_seldom_better_than_a_baseline_of_noise():
    """Each side has noise. Whether the baseline is inside the model's interval ignored the baseline's."""
    files = [report(seed) for seed in range(60)]
    results = [{"processbench": {"files": {"a": file}, "calibrate": "a", "average": None}} for file in files]
    by_file = list(map(findings, results))
    kinds = [kind for of_file in by_file for kind, _ in verdict(list(of_file))]
    assert kinds.count("good") <= binom.ppf(0.999, 60, 0.025)
    assert kinds.count("bad") <= binom.ppf(0.999, 60, 0.05)  # the best of two baselines is lucky twice as often
