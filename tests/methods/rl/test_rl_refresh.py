"""Labels for a PRM that follows the policy: from rollouts, against enumeration, and from outcomes."""

import dataclasses

import numpy as np
import pytest
from refusing import refused
from test_rl_loop import data  # noqa: F401  (a fixture)
from tiny_rl import PRM, chain, experiment, save_run
from tiny_run import VALUE

from jprm.methods.policy.protocol import Sample
from jprm.methods.rl import loop, refresh
from jprm.methods.rl.config import RefreshConfig
from jprm.methods.rl.credit import CreditConfig
from jprm.methods.rl.rollout import Group
from jprm.methods.verify.verifiers import of_function


class Digits:
    """A policy whose i-th completion of a prefix is the step of digit i."""

    def __init__(self):
        self.prefixes = []

    def sample(self, prefixes, n, *, until, seed):
        self.prefixes += prefixes
        assert until == "end" and len(set(prefixes)) == len(prefixes)
        return [[Sample((str(i),), 1, "stop" if i else "length", 0.0) for i in range(n)] for _ in prefixes]


def product_is_even(record, steps):
    return float(np.prod([int(step) for step in steps]) % 2 == 0)


GROUPS = [
    Group({"problem": "p"}, [chain("1", "3", "5"), chain("1", "2"), chain()], np.array([0.0, 1.0, -1.0]), None),
    Group({"problem": "q"}, [chain("4", "1"), chain("1")], np.array([1.0, -1.0]), None),
]


def test_verdicts_are_the_fractions_of_completions_that_the_verifier_accepts():
    policy, verifier = Digits(), of_function(product_is_even)
    both, single = (
        refresh.verdicts_of_rollouts(GROUPS, policy, verifier, RefreshConfig(rollouts=6, chains=n)) for n in (2, 1)
    )
    # Of completions 0 to 5 the first is cut off. After an odd prefix 2 and 4 are accepted, after an even one all.
    assert both == [[[2 / 6, 2 / 6, 0.0], [2 / 6, 1.0], []], [[5 / 6, 1.0], [0.0]]]
    assert len(policy.prefixes) == 2 * 3  # the shared first step is completed once
    assert single[0][1] == [None, None]


def test_labels_are_as_the_prm_takes_them():
    verdicts = [[[0.25, None, 0.0], [None, None], []], [[1.0, 0.5], [0.0]]]
    for semantics, wanted in {
        "value": [[0.25, None, 0.0], [1.0, 0.5], [0.0]],
        "correctness": [[1.0, None, 0.0], [1.0, 1.0], [0.0]],
        "rating": [[1.0, None, -1.0], [1.0, 1.0], [-1.0]],
    }.items():
        records = refresh.labelled(GROUPS, verdicts, semantics)
        assert [sample["labels"] for record in records for sample in record["samples"]] == wanted
        assert {record["semantics"] for record in records} == {semantics}
    short = [[[0.5], *verdicts[0][1:]]]
    refused(ValueError, "1 verdicts for a chain with 3", refresh.labelled, GROUPS[:1], short, "value")
    outcomes = [[sample["correct"] for sample in record["samples"]] for record in refresh.with_outcomes(GROUPS)]
    assert outcomes == [[False, True], [True, False]]


def test_labels_that_the_prm_does_not_take_are_refused(data, tmp_path):  # noqa: F811
    save_run(tmp_path / "values", PRM, 1, 1.0, target=VALUE)
    of_values = experiment(data, prm=str(tmp_path / "values"), refresh=RefreshConfig(1))
    outcome = experiment(data, refresh=RefreshConfig(1, labels="outcome"))
    refused(ValueError, "refresh.labels='working'", refresh.check, outcome)
    refused(ValueError, "refresh.labels='rollouts'", refresh.check, of_values)
    refresh.check(dataclasses.replace(of_values, refresh=RefreshConfig(1, labels="rollouts")))


@pytest.mark.slow
@pytest.mark.parametrize("labels", ["rollouts", "outcome"])
def test_a_prm_learns_from_the_policy_and_is_adopted_by_its_auroc(data, tmp_path, labels, one_device):  # noqa: F811
    """The outcome model is an implicit PRM: the policy's architecture, with the policy as its reference."""
    prm = tmp_path / "prm"
    if labels == "outcome":
        model = dataclasses.replace(PRM, head="language")
        save_run(prm, model, 0, 0.3, target=VALUE, objective="implicit", supervise="outcome",
                 reference=str(data / "policy"))  # fmt: skip
    else:
        save_run(prm, PRM, 1, 1.0, target=VALUE)
    config = experiment(
        data, prm=str(prm), refresh=RefreshConfig(1, 20, 0.01, labels=labels, rollouts=4), updates=2, evaluate_every=1,
        credit=CreditConfig("verifier", "rloo", "constant", length=16),
    )  # fmt: skip
    result = loop.train(config, tmp_path / "run")
    assert [refreshed["update"] for refreshed in result["refreshes"]] == [1, 2]
    for refreshed, evaluation in zip(result["refreshes"], result["evaluations"][1:], strict=True):
        assert refreshed["adopted"] == (refreshed["after"] >= refreshed["before"])
        assert evaluation["auroc"] == max(refreshed["after"], refreshed["before"])
    lengths = [len((tmp_path / f"run/prm/{n}.jsonl").read_text().splitlines()) for n in (1, 2)]
    assert lengths == [4, 4]  # a record for every problem of the update
