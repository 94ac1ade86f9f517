"""Ray: classes for pipelines, and shards on a cluster whose nodes die."""

import functools
import json

import numpy as np
import pytest
import tiny_run as tiny
from refusing import refused
from stub_server import completion
from test_scorer import short_rows  # noqa: F401  (autouse)
from test_shards import arithmetic, files, verify  # noqa: F401  (a fixture)
from tiny_run import chains, pool_of, trees

import jprm
from jprm.apps import cli, fleet
from jprm.io.jsonl import RecordError, write_records


@pytest.fixture(scope="module")
def cluster():
    """A Ray cluster of this machine with two processes."""
    ray = pytest.importorskip("ray", reason="needs the extra `ray`")
    ray.init(num_cpus=2, log_to_driver=False, logging_level="ERROR", include_dashboard=False)
    yield ray
    ray.shutdown()


def test_batches_are_records_as_json_or_as_columns():
    records = [
        {"problem": "p", "steps": ["a", "b"], "answer": 3},
        {"problem": "q", "steps": ["c"], "extra": {"k": [1.5]}},
    ]
    assert fleet.records_in(fleet.batch_of(records)) == records
    columns = {
        "problem": np.array(["p", "q"]),
        "steps": np.array([np.array(["a", "b"]), np.array(["c"])], object),
        "answer": np.array([3, None], object),
        "extra": np.array([None, {"k": np.array([1.5])}], object),
    }
    assert fleet.records_in(columns) == records
    refused(RecordError, "row 1", fleet.records_in, {"record": np.array(['{"problem": "p"}', "no JSON"])})


def test_scores_of_batches_are_those_of_the_scorer(tiny_run):
    with tiny.one_device():
        score = fleet.Score(tiny_run.folder)
        records = [*chains(3), *trees(2), pool_of(chains(2))]
        scored = [json.loads(text) for text in score(fleet.batch_of(records))["record"]]
        assert scored == list(jprm.load(tiny_run.folder).score_many(records))


def test_labels_of_batches_are_those_of_the_command(files):  # noqa: F811
    input, _, whole = files
    batch = {"record": np.array(input.read_text().splitlines(), object)}
    labelled = fleet.Label(functools.partial(fleet.by_check, "arithmetic"))(batch)["record"]
    assert list(labelled) == whole.decode().splitlines()


def test_shards_on_ray_give_the_bytes_of_one_process(files, cluster):  # noqa: F811
    input, output, whole = files
    on_ray = ["--engine", "ray", "--shards", "5", "--workers", "1", "2"]
    assert verify(input, output, *on_ray) == 0
    assert output.read_bytes() == whole
    assert verify(input, output, *on_ray) == 0  # finished shards are found
    assert verify(input, output) == 0


def test_a_bad_record_is_the_command_s_own_error(files, cluster, capsys):  # noqa: F811
    input, output, _ = files
    with input.open("a") as file:
        file.write('{"problem": "p", "steps": "no list"}\n')
    capsys.readouterr()
    assert verify(input, output, "--engine", "ray", "--shards", "3") == 2
    error = capsys.readouterr().err
    assert "error: " in error and "steps" in error and ".input:" in error and not output.exists()


@pytest.mark.parametrize(
    "options",
    [["--engine", "ray"], ["--engine", "ray", "--shards", "2", "--shard", "0/2"], ["--shards", "2"], ["--gpus", "1"],
     ["--engine", "ray", "--shards", "0"]],
)  # fmt: skip
def test_options_that_do_not_fit_are_refused(files, options, capsys):  # noqa: F811
    input, output, _ = files
    assert verify(input, output, *options) == 2 and "--" in capsys.readouterr().err


def test_a_dead_process_costs_no_record_and_doubles_none(cluster, tmp_path):
    """Each shard kills its process at its first attempt, after half of its work."""

    def work(number, folder=str(tmp_path)):
        import os

        mark = f"{folder}/{number}.begun"
        if not os.path.exists(mark):
            open(mark, "w").close()
            os.kill(os.getpid(), 9)
        return number * number

    assert sorted(fleet.run_shards(work, 6, workers=(2, 2))) == [(number, number**2) for number in range(6)]


@pytest.fixture
def policy(serve, tmp_path):
    """The file of a policy whose server answers by a function of prompt and seed."""
    path = tmp_path / "policy.json"
    path.write_text(json.dumps({"url": serve(completion).url, "model": "stand-in"}))
    return path


@pytest.mark.parametrize("kind", ["outcomes", "teacher", "mc"])
def test_labels_by_outcomes_models_and_rollouts_are_those_of_the_commands(tiny_run, tmp_path, policy, kind):
    records = [
        {"problem": f"p {i}", "steps": ["a", "b"][: 1 + i % 2], "answer": str(i % 3)} for i in range(4)
    ] if kind == "mc" else [{**pool_of(chains(3, seed=i)), "answer": "2"} for i in range(3)]  # fmt: skip
    if kind == "outcomes":
        for i, sample in enumerate(sample for record in records for sample in record["samples"]):
            sample.pop("correct", None)
            sample["answer"] = str(i % 3)
    write_records(tmp_path / "in.jsonl", records)
    make, options = {
        "outcomes": (functools.partial(fleet.by_outcome, "answer"), ["--verifier", "answer"]),
        "teacher": (functools.partial(fleet.by_teacher, tiny_run.folder), ["--model", str(tiny_run.folder)]),
        "mc": (
            functools.partial(fleet.by_rollouts, policy, k=4, estimate="soft"),
            ["--policy", str(policy), "--rollouts", str(tmp_path / "r.jsonl"), "--k", "4", "--estimate", "soft"],
        ),
    }[kind]
    command = ["label", kind, "--input", str(tmp_path / "in.jsonl"), "--output", str(tmp_path / "out.jsonl")]
    with tiny.one_device():
        assert cli.main([*command, *options]) == 0
        found = fleet.Label(make)(fleet.batch_of(records))["record"]
    assert list(found) == (tmp_path / "out.jsonl").read_text().splitlines()
