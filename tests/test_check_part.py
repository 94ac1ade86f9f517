"""`jprm.testing`: the table of every registered part and of a fork's; faults are found and named."""

import dataclasses
import pathlib

import forks
import pytest
from families import breadth
from refusing import refused
from test_deltanet import HYBRID, MIXED
from test_objectives_contract import CASES, experiment_of
from tiny_run import MODEL, experiment

from jprm.experiment import OptimizerConfig, override
from jprm.model.config import KINDS
from jprm.model.heads import HEADS
from jprm.objectives import OBJECTIVES
from jprm.testing import CHECKS, check_part, examine, main

FILE = forks.__file__
PLAIN = dataclasses.replace(MODEL, qkv_bias=False)  # transformers has no class with biases and norms of heads


def of(model=PLAIN, objective="cross_entropy", optimizer="adamw", **changes):
    """An experiment with a model of these changes."""
    model = dataclasses.replace(model, vocab_size=256, **changes)
    optimizer = OptimizerConfig(learning_rate=0.01, name=optimizer)
    return experiment(pathlib.Path("data"), model=model, objective=objective, optimizer=optimizer)


def of_case(case):
    return override(experiment_of(case, pathlib.Path("data"), layers=1), ["model.qkv_bias=false"])


REGISTERED = {
    "attention, dense": of(),
    "deltanet": of(HYBRID),
    "experts": of(MIXED, attention="reference"),
    "sinks": of(mixers=("sinks",)),
    "muon": of(optimizer="muon"),
    **{name: of_case(case) for name, case in CASES.items()},
}
OWN = {
    "attention sinks": of(mixers=("forks:SINKS",)),
    "softmax1": of(mixers=("forks:SOFTMAX1", "attention")),
    "gated recurrent unit": of(mixers=("forks:LRU", "attention")),
    "head of two outputs": of(head="forks:GAUSS"),
    "hinge": of(objective=f"{FILE}:hinge"),
    "Muon": of(optimizer=f"{FILE}:muon"),
}


def tokenised(name):
    return CASES[name].tokenised if name in CASES else None


def test_every_registered_part_is_in_the_table():
    heads, objectives = ({getattr(case, field) for case in CASES.values()} for field in ("head", "objective"))
    assert set(HEADS) <= heads and set(OBJECTIVES) <= objectives
    assert set(KINDS) == {"attention", "dense", "deltanet", "experts", "sinks"}


@pytest.mark.slow
@pytest.mark.parametrize("name", [*REGISTERED, *OWN])
def test_a_part_computes_the_same_everywhere(name):
    """As `tests/parts/table.py` prints it for the page."""
    report = examine((REGISTERED | OWN)[name], tokenise=tokenised(name))
    print(report)
    report.check()


@pytest.mark.parametrize("name", ["gated recurrent unit", *breadth(["head of two outputs"])])
def test_parts_of_a_fork_are_the_same_alone_live_and_cached(name):
    report = check_part(OWN[name], only=("packed", "split", "scored", "live", "cached"))
    assert report["cached"].status == ("refused" if "recurrent" in name else "ok")


@pytest.mark.parametrize(
    ("wrong", "check", "status"),
    [
        (of(mixers=("forks:WRONG_SINKS",)), "live", "differs"),
        (of(mixers=("forks:WRONG_SINKS",)), "cached", "differs"),
        (of(attention="forks:WRONG_SOFTMAX"), "live", "differs"),
        (of(mixers=("forks:WRONG_LRU",)), "packed", "differs"),
        (of(objective=f"{FILE}:wrong_hinge"), "split", "differs"),
        (of(optimizer=f"{FILE}:wrong_muon"), "updates", "fails"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_fault_is_found(wrong, check, status, capsys):
    with pytest.raises(AssertionError, match=f"{check} {status}"):
        check_part(wrong, only=(check,))
    assert f"| {check} |" in capsys.readouterr().out


def test_a_pair_objective_that_counts_in_the_whole_tree_is_the_same_split():
    check_part(of(objective=f"{FILE}:hinge"), only=("packed", "chains", "split"))


@pytest.mark.breadth
def test_what_jprm_refuses_is_in_the_table_with_its_reason():
    report = examine(of(mixers=("forks:SINKS",)), only=("exported",))
    assert report["exported"].status == "refused" and "forks:SINKS" in report["exported"].note


def test_an_unknown_check_is_refused():
    refused(ValueError, ", ".join(CHECKS), examine, of(), only=("alone",))


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["nofile.py"], "error: nofile.py: no such experiment file"),
        ([FILE, "--trees", "nofile.jsonl"], "error: nofile.jsonl: No such file or directory"),
    ],
    ids=["experiment", "trees"],
)
def test_the_command_refuses_what_it_cannot_read_in_one_line(arguments, line, capsys):
    assert main(arguments) == 2
    assert capsys.readouterr().err == f"{line}\n"
