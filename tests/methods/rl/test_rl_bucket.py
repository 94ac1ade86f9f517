"""Reinforcement learning with policy, PRM, problems and run in a bucket."""

import json

import pytest
from buckets import objects
from test_rl_loop import SOME, data, killed_in, params_of, stale_experiment, whole  # noqa: F401  (fixtures)
from tiny_run import lines, one_device, untimed

from jprm.apps.report.page import report
from jprm.checkpoints.store import MARK
from jprm.io.storage import Remote
from jprm.methods.policy.load import load_policy
from jprm.methods.policy.sampler import SamplerConfig
from jprm.methods.rl.engine import EngineConfig, Probes, RemoteSampler


@pytest.mark.slow  # a run of seconds, started four times
def test_a_run_in_a_bucket_that_is_killed_is_the_one_on_disk(bucket, data, whole):  # noqa: F811
    (bucket / "data").upload_folder(data)
    for name in ("policy", "prm"):
        (bucket / "data" / name / "checkpoints/1" / MARK).write_bytes(b"")
    folder, result, _ = whole
    run = bucket / "run"
    again = killed_in(SOME, stale_experiment(bucket / "data"), run)
    with one_device():
        assert params_of(folder) == params_of(run) and params_of(folder / "best") == params_of(run / "best")
    assert json.loads(json.dumps(again).replace(f"{bucket}/data", str(data))) == json.loads(json.dumps(result))
    assert json.loads((run / "rl.json").read_bytes()) == json.loads(json.dumps(again))
    assert untimed(map(json.loads, (run / "metrics.jsonl").read_bytes().splitlines())) == untimed(lines(folder))
    assert load_policy(run).name.startswith(f"{run}@") and load_policy(run).tokenizer.vocab_size == 16
    report([run], run / "page.html")
    assert "Right answers" in (run / "page.html").read_text()
    records = {f"/{file.name}": file.read_bytes() for file in (folder / "prm").glob("*.jsonl")}
    assert records and objects(run / "prm").items() >= records.items()


def test_an_engine_gets_its_parameters_from_a_disk():
    probes = Probes([], Remote("memory://bucket/run/engine"), 64)
    with pytest.raises(ValueError, match="engine.folder"):
        RemoteSampler(
            EngineConfig("http://localhost:1"), probes, {}, None, None, None, SamplerConfig(1.0, 1.0, 8), "policy"
        )
