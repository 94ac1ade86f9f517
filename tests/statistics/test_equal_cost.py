"""Expected tokens of scoring n samples, against the token trees of all subsets; and what a budget then buys."""

import itertools
from types import SimpleNamespace

import numpy as np
import pytest
from tiny import Letters

from experiments.studies.cost import Chooser, at_equal_cost, token_costs
from jprm.token_tree import token_tree
from jprm.tree import tree_of


def pools(seed, count=6):
    """Samples that share steps, beginnings of steps, and whole chains; some have no steps."""
    rng = np.random.default_rng(seed)
    drawn = []
    for p in range(count):
        chains = [["".join(rng.choice(list("ab"), rng.integers(1, 5))) for _ in range(rng.integers(0, 4))]
                  for _ in range(rng.integers(4, 7))]  # fmt: skip
        drawn.append((f"problem{'!' * p}", [*chains, chains[0]]))
    return drawn


def record(problem, chains):
    samples = [{"steps": steps} for steps in chains if steps]
    return {"problem": problem, "samples": samples, "empty_samples": len(chains) - len(samples)}


def tokens_of(problem, chains):
    nonempty = [steps for steps in chains if steps]
    return len(token_tree(tree_of(record(problem, nonempty)), Letters()).tokens_N) if nonempty else 0


@pytest.mark.parametrize("seed", range(5))
def test_expected_tokens_are_the_mean_over_all_subsets(seed):
    drawn = pools(seed)
    n_max = min(len(chains) for _, chains in drawn)
    found_n = token_costs([tree_of(record(*pool)) for pool in drawn], SimpleNamespace(layout=Letters()), n_max)[1]
    for n in range(1, n_max + 1):
        subsets = [[tokens_of(problem, x) for x in itertools.combinations(chains, n)] for problem, chains in drawn]
        assert found_n[n - 1] == pytest.approx(np.mean([np.mean(cost_of) for cost_of in subsets]), rel=1e-12)


def test_one_sample_is_not_charged_at_the_rate_of_many():
    """Nineteen samples that share all but their last token: one costs its whole row, not a nineteenth of the tree."""
    chains = [["a" * 20 + letter] for letter in "bcdefghijklmnopqrst"]
    tree = tree_of(record("p" * 9, chains))
    (written, found_n) = token_costs([tree], SimpleNamespace(layout=Letters()), 19)
    assert found_n[0] == tokens_of("p" * 9, chains[:1]) > 3.5 * found_n[-1] / 19
    scored = Chooser("scored", np.zeros((1, 19)), written * np.arange(1, 20) + found_n)
    plain = Chooser("plain", np.zeros((1, 19)), written * np.arange(1, 20))
    budgets = written * np.arange(1, 20)
    bought = at_equal_cost([plain, scored], budgets, ["p"], 0)["choosers"][1]["n"]
    by_hand = [max([n for n in range(1, 20) if written * n + found_n[n - 1] <= b + 1e-9], default=1) for b in budgets]
    assert bought == by_hand
    assert bought[1] == 1  # two samples and their scores cost more than a majority of two
