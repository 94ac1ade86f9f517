"""Labels of programs by execution: the share of completions that pass, and outcomes of whole programs."""

import functools
import itertools
import json

import numpy as np
import pytest
from hostile import programs as hostile
from refusing import refused

from jprm.apps import cli
from jprm.io.jsonl import write_records
from jprm.methods import verify
from jprm.methods.evaluate.best_of_n import best_of_n_report, pools_of
from jprm.methods.label.config import MonteCarloConfig, OmegaConfig
from jprm.methods.label.jobs import label_outcomes
from jprm.methods.label.monte_carlo import Rollouts, label_problems, label_trees
from jprm.methods.policy.protocol import Prefix, Sample
from jprm.methods.rl import rollout
from jprm.methods.rl.samples import Rollout
from jprm.methods.verify import sandbox
from jprm.methods.verify.sandbox import Limits
from jprm.methods.verify.verifiers import VERIFIERS, Verifier, find, judge_programs
from jprm.tree import RecordError, read_records, tree_of, with_scores

needs_sandbox = pytest.mark.skipif(sandbox.refusal() is not None, reason=f"needs a sandbox: {sandbox.refusal()}")
pytestmark = needs_sandbox

QUICK, PATIENT = (
    Verifier(functools.partial(judge_programs, limits=Limits(seconds=seconds)), verify.tests_of)
    for seconds in (1.0, 30.0)
)

TESTS = ["assert total([1, 2]) == 3", "assert total([]) == 0", "assert total([5]) == 5"]
LINES = [
    ["def total(xs):"],
    ["    t = 0", "    t = 1"],
    ["    for x in xs:", "    for x in xs[1:]:"],
    ["        t += x", "        t = x", "        t += 1"],
    ["    return t", "    return t - 1"],
]
"""A program is one choice of each line."""


class Enumerating:
    """Sample j of a prefix is its completion number j, in the order of `itertools.product`."""

    name = "enumerating"

    def completions(self, prefix):
        return list(itertools.product(*LINES[len(prefix.steps) :]))

    def sample(self, prefixes, n, *, until, seed):
        def draw(prefix, number):
            all_ = self.completions(prefix)
            return Sample(all_[number % len(all_)], 5, "stop")

        return [[draw(prefix, seed + j) for j in range(n)] for prefix in prefixes]


def passes(steps):
    names = {}
    exec("\n".join(steps), names)
    try:
        for test in TESTS:
            exec(test, names)
    except Exception:
        return False
    return True


def labelled(tmp_path, policy, record, k, verifier="tests"):
    with Rollouts(policy, tmp_path / "rollouts.jsonl") as rollouts:
        config = MonteCarloConfig("soft", k=k, verifier=verifier)
        return next(label_trees([tree_of(record)], rollouts, config))


def test_labels_by_execution_equal_brute_force(tmp_path):
    """12 completions of the first step, 6 of the second, and so on: k = 12 takes each equally often."""
    policy = Enumerating()
    samples = [{"steps": list(steps)} for steps in itertools.product(*LINES)]
    tree = labelled(tmp_path, policy, {"problem": "sum", "samples": samples, "tests": TESTS}, k=24)
    paths = []
    for node in tree.nodes:
        paths.append((*(paths[node.parent] if node.parent >= 0 else ()), node.text))
        rest = policy.completions(Prefix("sum", paths[-1]))
        assert node.label == sum(passes(paths[-1] + tuple(end)) for end in rest) / len(rest)
        assert node.extra["rollouts"] == 24
    assert len({node.label for node in tree.nodes}) > 3


def test_a_prelude_stands_before_the_steps_and_fences_hold_the_code(tmp_path):
    prelude = "import math\ndef area(r):\n    '''Area.'''\n"
    record = {"problem": prelude, "steps": ["    return math.pi * r * r"], "tests": ["assert area(1) == math.pi"]}
    assert VERIFIERS["tests"].rewards([(record, record["steps"])]) == [0.0]  # tests see only the program's names
    record["tests"], record["prelude"] = ["assert 3.14 < area(1) < 3.15"], prelude
    fenced = ["So:", "```python\ndef area(r):\n    return 3.142 * r * r\n```"]
    assert VERIFIERS["tests"].rewards([(record, record["steps"]), (record, fenced), (record, ["x"])]) == [1.0, 1.0, 0.0]


@pytest.mark.parametrize("program", ["while True: pass", "import os\nos.kill(-1, 9)", hostile.FORGED["json.dumps"],
                                     hostile.ODD["bytes"]])  # fmt: skip
def test_a_hostile_completion_costs_its_own_share_alone(tmp_path, program):
    class Hostile(Enumerating):
        def completions(self, prefix):
            good = "def total(xs):\n    return sum(xs)"
            return [(good,), (program,), (good,), (good + "\n",)]

    record = {"problem": "sum", "steps": ["import itertools"], "tests": TESTS}
    labels = []
    for name in ("QUICK", "PATIENT"):  # honest programs may need over a second on a busy machine
        if labels != [0.75]:
            (tmp_path / name).mkdir()
            labels = [labelled(tmp_path / name, Hostile(), record, 4, f"test_code_labels:{name}").nodes[0].label]
    assert labels == [0.75]


def test_omega_takes_the_same_verifier(tmp_path):
    """Half of the completions begin with `t = 1`: the search finds that line, and nothing that passes after it."""
    with Rollouts(Enumerating(), tmp_path / "rollouts.jsonl") as rollouts:
        problem = tree_of({"problem": "sum", "steps": ["-"], "tests": TESTS})
        (tree,) = label_problems([problem], rollouts, OmegaConfig(k=24, searches=2, verifier="tests"))
    share = sum(map(passes, itertools.product(*LINES))) / 24
    assert tree.extra["value"] == share > 0 and tree.extra["tests"] == TESTS


def test_outcomes_of_pools_make_best_of_n_and_votes(tmp_path):
    bodies = ["sum(xs)", "len(xs)", "sum(xs[:])", "sum(xs) if xs else 0", "len(xs[:])", "xs +"]
    samples = [{"steps": ["def total(xs):", f"    return {body}"]} for body in bodies]
    cut = {"steps": ["def total(xs): return sum(xs)"], "finish_reason": "length", "answer": "old"}
    chain = {"problem": "sum", "steps": samples[0]["steps"], "tests": TESTS, "answer": "kept"}
    write_records(tmp_path / "in.jsonl", [{"problem": "sum", "samples": [*samples, cut], "tests": TESTS}, chain])
    files = ["--input", str(tmp_path / "in.jsonl"), "--output", str(tmp_path / "out.jsonl")]
    assert cli.main(["label", "outcomes", "--verifier", "tests", *files]) == 0
    pool, alone = read_records(tmp_path / "out.jsonl")
    assert alone == chain | {"correct": True, "passed": 3}
    records = pool["samples"]
    assert [sample["correct"] for sample in records] == [True, False, True, True, False, False, False]
    assert [sample.get("passed") for sample in records] == [3, 1, 3, 3, 1, 0, None]
    answers = [sample["answer"] for sample in records]
    assert answers[0] == answers[2] == answers[3] != answers[1] == answers[4] and answers[5:] == [None, None]
    tree = tree_of(pool)
    pools = pools_of([with_scores(tree, [0.5] * len(tree.nodes))])
    assert pools.class_PN.tolist() == [[0, 1, 0, 0, 1, -1, -1]]
    report = best_of_n_report([with_scores(tree, [0.5] * len(tree.nodes))] * 2, seed=0)
    assert report["majority"]["value"][-1] == 1 and report["pass_at_n"]["value"][-1] == 1


def test_a_branch_of_a_search_that_did_not_end_has_no_outcome(tmp_path):
    texts = [(-1, "def total(xs):"), (0, "    return sum(xs)"), (0, "    return 0"), (0, "    t = sum(xs)")]
    nodes = [{"parent": parent, "text": text} for parent, text in texts]
    for node, reason in zip(nodes[1:], ("stop", "stop", "step"), strict=True):
        node["draws"] = [{"from": 0, "finish_reason": reason, "tokens": 3}]
    write_records(tmp_path / "in.jsonl", [{"problem": "sum", "nodes": nodes, "tests": TESTS}])
    assert label_outcomes("tests", tmp_path / "in.jsonl", tmp_path / "out.jsonl") == {"chains": 2, "correct": 1}
    (tree,) = read_records(tmp_path / "out.jsonl")
    assert [node.get("correct") for node in tree["nodes"]] == [None, True, False, None] and tree["nodes"][3] == nodes[3]


def test_outcomes_of_answers(tmp_path):
    pool = {"problem": "1+2", "answer": 3, "samples": [{"steps": ["so", "the answer is 3"]}, {"steps": ["4"]}]}
    write_records(tmp_path / "in.jsonl", [pool])
    assert label_outcomes("answer", tmp_path / "in.jsonl", tmp_path / "out.jsonl") == {"chains": 2, "correct": 1}
    (record,) = read_records(tmp_path / "out.jsonl")
    assert record["answer"] == 3
    assert [(sample["correct"], sample["answer"]) for sample in record["samples"]] == [(True, "3"), (False, "4")]


def test_records_and_verifiers_that_do_not_fit_cost_nothing(tmp_path, capsys, monkeypatch):
    (tmp_path / "in.jsonl").write_text(json.dumps({"problem": "p", "steps": ["x = 1"], "answer": 1}) + "\n")
    (tmp_path / "policy.json").write_text(json.dumps({"url": "http://localhost:9/v1", "model": "none"}))
    base = ["--input", str(tmp_path / "in.jsonl"), "--output", str(tmp_path / "out.jsonl")]
    mc = ["label", "mc", "--policy", str(tmp_path / "policy.json"), "--rollouts", str(tmp_path / "r.jsonl")]
    for command in (["label", "outcomes"], [*mc, "--estimate", "soft"]):
        assert cli.main([*command, *base, "--verifier", "tests"]) == 2
        assert "1: tests" in capsys.readouterr().err
        assert cli.main([*command, *base, "--verifier", "test"]) == 2
        assert "verifier='test'" in capsys.readouterr().err
    monkeypatch.setattr(sandbox, "refusal", lambda: "bwrap is not installed")
    refused(OSError, "installed", VERIFIERS["tests"].check, {"problem": "p", "tests": TESTS}, "here")
    assert not (tmp_path / "out.jsonl").exists() and not (tmp_path / "r.jsonl").exists()
    refused(RecordError, "prelude", VERIFIERS["tests"].check, {"problem": "p", "tests": TESTS, "prelude": 7}, "here")
    refused(ValueError, "list", find, "test_code_labels:TESTS")


def test_a_sandbox_that_does_not_start_is_no_label(monkeypatch):
    failed = [sandbox.CommandResult(1, "bwrap: no")] * 2
    monkeypatch.setattr("jprm.methods.verify.programs.run_servers", lambda *_, **__: failed)
    refused(OSError, "start", judge_programs, [({"problem": "p", "tests": TESTS}, ["x = 1"])])


def trajectory(steps, ended):
    """One token a step."""
    numbers = tuple(range(1, len(steps) + 1))
    return Rollout(numbers, np.zeros(len(steps), np.float32), numbers, tuple(steps), ended)


def test_reinforcement_learning_is_rewarded_by_tests(tmp_path):
    write_records(tmp_path / "p.jsonl", [{"problem": "sum", "tests": TESTS}, {"problem": "other", "answer": 1}])
    refused(RecordError, "p.jsonl:2: tests", rollout.read_records, [str(tmp_path / "p.jsonl")], VERIFIERS["tests"])
    write_records(tmp_path / "p.jsonl", [{"problem": "sum", "tests": TESTS}])
    records = rollout.read_records([str(tmp_path / "p.jsonl")], VERIFIERS["tests"])
    programs = [["def total(xs):", "    return sum(xs)"], ["def total(xs):", "    return 0"], []]
    drawn = [trajectory(steps, True) for steps in programs] + [trajectory(programs[0], False)]
    (group,) = rollout.judged(records, [drawn], VERIFIERS["tests"], -1.0, None)
    assert group.reward_G.tolist() == [1, 0, -1, -1]  # blank chains and those cut off have the floor
