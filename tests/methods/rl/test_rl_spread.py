"""An update's samples, rewards and scores, computed in parts by several processes, equal one process's."""

import json
import threading
import types

import numpy as np
import pytest
from test_rl_loop import Sevens
from test_samples import PROBLEMS, drawn, policy  # noqa: F401  (fixtures)
from tiny_rl import chain, reward

from jprm import multihost
from jprm.io.jsonl import write_records
from jprm.methods.rl import rollout, samples
from jprm.methods.verify.verifiers import of_function


@pytest.fixture
def processes(monkeypatch):
    """Returns a function that calls another in `count` threads, each a process to `jprm.multihost`."""
    process = threading.local()

    def run(count, call):
        said, results, barrier = [None] * count, [None] * count, threading.Barrier(count, timeout=300)

        def shared(value):
            said[process.index] = json.dumps(value)
            barrier.wait()
            told = [json.loads(message) for message in said]
            barrier.wait()
            return told

        def thread(index):
            process.index = index
            try:
                results[index] = call(index)
            except Exception as error:
                results[index] = error

        fake = types.SimpleNamespace(process_count=lambda: count, process_index=lambda: process.index)
        with monkeypatch.context() as patch:
            patch.setattr(multihost, "jax", fake)
            patch.setattr(multihost, "shared", shared)
            threads = [threading.Thread(target=thread, args=[i]) for i in range(count)]
            for started in threads:
                started.start()
            for started in threads:
                started.join()
        return results

    return run


def test_every_process_gets_the_trajectories_that_one_draws(processes, policy, drawn):  # noqa: F811
    calls, draw, alone = [], policy.draw, threading.Lock()

    def counted(prefixes, *args, **options):
        calls.append([prefix.problem for prefix in prefixes])
        with alone:  # processes share no jax; jax 0.12 crashes where two threads compile and cache one program
            return draw(prefixes, *args, **options)

    policy.draw = counted
    try:
        results = processes(3, lambda index: samples.sample(policy, PROBLEMS, 6, seed=3, update=5))
    finally:
        del policy.draw
    assert sorted(calls) == [[problem] for problem in PROBLEMS]  # the third has none to draw
    for result in results:
        for group, wanted in zip(result, drawn, strict=True):
            assert [(sample.ids, sample.steps, sample.ended) for sample in group] == [
                (a.ids, a.steps, a.ended) for a in wanted
            ]
            for sample, expected in zip(group, wanted, strict=True):  # float32 rounding, in batches of other sizes
                np.testing.assert_allclose(sample.log_probability_T, expected.log_probability_T, atol=1e-5)
                assert sample.log_probability_T.dtype == np.float32


RECORDS = [{"problem": f"p{i}", "answer": i} for i in range(5)]


CHAINS = [[chain(f"{i}"), chain("7", f"{i}7"), chain(), chain("0", ended=i > 2)] for i in range(5)]


@pytest.mark.parametrize("prm", [None, Sevens()])
def test_every_process_gets_the_groups_that_one_judges(processes, prm):
    seen = []

    def judge(record, steps):
        seen.append(record["problem"])
        return reward(record, steps)

    verifier = of_function(judge)
    alone = rollout.judged(RECORDS, CHAINS, verifier, -0.5, prm)
    once, seen[:] = list(seen), []
    for groups in processes(2, lambda index: rollout.judged(RECORDS, CHAINS, verifier, -0.5, prm)):
        for group, wanted in zip(groups, alone, strict=True):
            assert group.record == wanted.record and group.samples == wanted.samples
            np.testing.assert_array_equal(group.reward_G, wanted.reward_G)
            assert (group.scores is None) == (prm is None)
            for scores, others in zip(group.scores or [], wanted.scores or [], strict=True):
                np.testing.assert_array_equal(scores, others)
    assert sorted(seen) == sorted(once)  # nothing is judged twice


def test_a_verifier_that_fails_in_one_process_ends_all(processes):
    def judge(record, steps):
        return 2.0 if record["problem"] == "p3" else 0.0

    first, second = processes(2, lambda index: rollout.judged(RECORDS, CHAINS, of_function(judge), 0.0, None))
    assert str(second).startswith("problem 'p3': the verifier's reward 2.0")
    assert str(first).startswith("process 1 failed: ValueError: problem 'p3'")


def test_files_of_problems_that_differ_between_hosts_are_refused(processes, tmp_path):
    for i in range(2):
        write_records(tmp_path / f"{i}.jsonl", RECORDS[i:])
    verifier = of_function(reward)
    for error in processes(2, lambda index: rollout.read_records([str(tmp_path / f"{index}.jsonl")], verifier)):
        assert isinstance(error, ValueError) and "the hosts do not have the same problems there" in str(error)
    same = processes(2, lambda index: rollout.read_records([str(tmp_path / "0.jsonl")], verifier))
    assert same[0] == same[1] == RECORDS
