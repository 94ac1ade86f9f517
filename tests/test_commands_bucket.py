"""Commands whose model, input and output are in a bucket: they write what they write on disk, also after kills."""

import dataclasses
import json
import time
import types
import uuid

import pytest
from buckets import objects
from refusing import refused
from starlette.testclient import TestClient
from test_evaluate_run import pool_file, processbench_file, short_rows  # noqa: F401  (autouse)
from test_export import untrained
from test_label_files import arithmetic
from test_search_files import PROBLEMS, Good
from test_storage import contents, killed_at, killed_everywhere
from tiny_run import chains, training
from toy_policy import Markov

from jprm.apps import cli
from jprm.apps.report.runs import names_of
from jprm.apps.serve import app as serving
from jprm.checkpoints.store import MARK
from jprm.data import load
from jprm.experiment import kind_of
from jprm.io.folders import is_whole, whole_folder
from jprm.io.jsonl import write_records
from jprm.io.storage import Remote, named_in
from jprm.methods.formats.export.export import export
from jprm.methods.label import files as label_files
from jprm.methods.label.config import MonteCarloConfig
from jprm.methods.label.files import label_monte_carlo, label_verify
from jprm.methods.search.best_of_n import BestOfN
from jprm.methods.search.files import search_file
from jprm.methods.search.lockstep import Rescorer, SearchConfig
from jprm.score import scorer
from jprm.tree import read_records


@pytest.fixture(autouse=True)
def own_caches(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "caches"))


@pytest.fixture(params=["memory", *(pytest.param(name, marks=pytest.mark.slow) for name in ("s3", "gcs"))])
def bucket(request):
    """An empty folder of a bucket."""
    place = "memory://bucket" if request.param == "memory" else request.getfixturevalue(request.param)
    return Remote(f"{place}/{uuid.uuid4().hex}")


@pytest.fixture
def model(tiny_run, bucket):
    """The tiny run, copied into the bucket with the marks that whole checkpoints have there."""
    (bucket / "run").upload_folder(tiny_run.folder)
    for step in (tiny_run.folder / "checkpoints").iterdir():
        (bucket / "run/checkpoints" / step.name / MARK).write_bytes(b"")
    return bucket / "run"


def jprm(*words):
    assert cli.main(list(map(str, words))) == 0


@pytest.fixture
def suites(tiny_run, model, bucket, tmp_path):
    """A suite's results, in the folder `out` of tmp_path and, computed twice, of the bucket."""
    bench = tmp_path / "bench"
    bench.mkdir()
    pool_file(bench / "pool.jsonl"), processbench_file(bench / "easy.json", 6, 1)
    suite = {"neutral": "drop", "best_of_n": {"data": ["pool.jsonl"]}, "steps": {"data": ["../bench/easy.json"]}}
    suite |= {"processbench": {"data": ["none.json", "../bench/easy.json"], "calibrate": "../bench/easy.json"}}
    (bench / "suite.json").write_text(json.dumps(suite))
    (bucket / "bench").upload_folder(bench)
    jprm("eval", "suite", "--model", tiny_run.folder, "--suite", bench / "suite.json", "--out", tmp_path / "out")
    for _ in range(2):
        jprm("eval", "suite", "--model", model, "--suite", bucket / "bench/suite.json", "--out", bucket / "out")


def test_a_suite_in_a_bucket_is_the_one_on_disk(suites, model, bucket, tmp_path):
    here, there = (json.loads((out / "results.json").read_bytes()) for out in (tmp_path / "out", bucket / "out"))
    assert there["model"].pop("folder") == model.url and here["model"].pop("folder")
    for results, place in ((here, tmp_path), (there, bucket)):
        assert results.pop("absent") == [f"{place}/bench/none.json"]
        results["data"] = {name: data | {"path": ""} for name, data in results["data"].items()}
    assert there == here
    assert {"/results.json", "/scores/easy.jsonl", "/scores/pool.jsonl"} <= set(objects(bucket / "out"))


@pytest.mark.slow  # draws the figures
def test_a_page_in_a_bucket_is_the_one_on_disk(suites, tiny_run, bucket, tmp_path):
    for place in (tmp_path, bucket):
        jprm("report", place / "out", "--out", place / "page.html", "--figures", place / "figures")
    page = (bucket / "page.html").read_text().replace(str(bucket), str(tmp_path))
    assert page.replace(f"{tmp_path}/run", str(tiny_run.folder)) == (tmp_path / "page.html").read_text()
    assert sorted((bucket / "figures").names()) == sorted(file.name for file in (tmp_path / "figures").iterdir())
    assert cli.main(["report", f"{bucket}/out", "--output", f"{bucket}/out/results.json"]) == 2


@pytest.mark.parametrize("bucket", ["memory"], indirect=True)
def test_a_search_killed_at_any_operation_ends_like_a_whole_one(bucket, tmp_path, monkeypatch):
    def search(folder, policy):
        config = SearchConfig(BestOfN(4), "prod", budget=400, at_once=2)
        files = place / "problems.jsonl", folder / "out.jsonl"
        return search_file(policy, Rescorer(Good()), {"model": "good"}, *files, config)

    place, whole = tmp_path, Markov()
    write_records(place / "problems.jsonl", PROBLEMS)
    counts = search(place, whole)
    expected = {"/out.jsonl": (place / "out.jsonl").read_bytes()}
    (bucket / "problems.jsonl").upload(place / "problems.jsonl")
    place, policies = bucket, {}
    run = lambda folder: search(folder, policies.setdefault(folder, Markov()))  # noqa: E731
    for folder in killed_everywhere(monkeypatch, bucket, run):
        assert contents(folder) == expected and policies[folder].sampled == whole.sampled
    assert {**counts, "prm_tokens": 0} == {**search(folder, whole), "prm_tokens": 0, "rejected": 0}


def test_a_search_in_a_bucket_is_the_one_on_disk(tiny_run, model, bucket, tmp_path, serve):
    policy = {"url": serve(arithmetic).url, "model": "tiny", "retries": 0}
    (tmp_path / "policy.json").write_text(json.dumps(policy))
    write_records(tmp_path / "in.jsonl", [{"problem": "1+2", "answer": "3"}, {"problem": "2+1", "answer": "3"}])
    bucket.upload_folder(tmp_path)
    for place, scores in ((tmp_path, tiny_run.folder), (bucket, model)):
        files = ["--policy", place / "policy.json", "--input", place / "in.jsonl", "--output", place / "out.jsonl"]
        jprm("search", "best-of-n", "--n", 4, "--model", scores, "--budget", 4000, *files)
        jprm("eval", "best-of-n", "--input", place / "out.jsonl", "--json", place / "best.json")
    found = (bucket / "out.jsonl").read_text().replace(model.url, str(tiny_run.folder))
    assert found == (tmp_path / "out.jsonl").read_text()
    assert (bucket / "best.json").read_bytes() == (tmp_path / "best.json").read_bytes()


def test_the_names_of_runs_leave_out_what_they_share(tmp_path):
    assert names_of(["gs://b/rates/seed=0", "gs://b/rates/seed=1/"]) == ["seed=0", "seed=1"]
    assert names_of([f"{tmp_path}/a/run", f"{tmp_path}/b"]) == ["a/run", "b"]
    assert names_of(["gs://b/run", str(tmp_path / "run")]) == ["gs://b/run", str(tmp_path / "run")]


def test_a_file_in_a_bucket_names_others(tmp_path):
    names = ("b.json", "../c/b.json", "s3://other/b.json")
    assert [str(named_in("gs://x/a/suite.json", name)) for name in names] == [
        "gs://x/a/b.json", "gs://x/c/b.json", "s3://other/b.json"
    ]  # fmt: skip
    assert named_in(tmp_path / "suite.json", "/b") == named_in("gs://x/suite.json", "/b")
    assert named_in(tmp_path / "suite.json", "b/c") == tmp_path / "b/c"


def sums(count):
    """Chains of equations, every third of which has one that is wrong."""
    steps = [[f"{i} + 1 = {i + 1}", f"{i} * 2 = {2 * i + (i % 3 == 0)}", "So it is."] for i in range(count)]
    return [{"problem": f"p{i}", "steps": chain, "answer": "1", "id": i} for i, chain in enumerate(steps)]


LABELS = {
    "verify": lambda input, output: label_verify("arithmetic", input, output),
    "mc": lambda input, output: label_monte_carlo(
        Markov(), input, output, output.with_name("rollouts.jsonl"), MonteCarloConfig("soft", k=2, trees_at_once=1)
    ),
}


@pytest.mark.parametrize("kind", LABELS)
@pytest.mark.parametrize("bucket", ["memory"], indirect=True)
def test_labels_killed_at_any_operation_end_like_those_on_disk(kind, bucket, tmp_path, monkeypatch):
    monkeypatch.setattr(label_files, "FLUSH_SECONDS", 0.0)
    write_records(tmp_path / "in.jsonl", sums(5))
    label = LABELS[kind]
    counts = label(tmp_path / "in.jsonl", tmp_path / "out.jsonl")
    (bucket / "in.jsonl").upload(tmp_path / "in.jsonl")
    for folder in killed_everywhere(
        monkeypatch, bucket, lambda folder: label(bucket / "in.jsonl", folder / "out.jsonl")
    ):
        stored = contents(folder)
        assert stored.pop("/out.jsonl") == (tmp_path / "out.jsonl").read_bytes()
        assert b"".join(stored.values()) == (b"" if kind == "verify" else (tmp_path / "rollouts.jsonl").read_bytes())
    assert counts.items() >= ({"trees": 5, "incorrect": 2} if kind == "verify" else {"labels": 15}).items()


def test_labels_in_a_bucket_are_those_on_disk(tiny_run, model, bucket, tmp_path, serve):
    write_records(tmp_path / "in.jsonl", sums(3))
    (tmp_path / "policy.json").write_text(json.dumps({"url": serve(arithmetic).url, "model": "tiny", "retries": 0}))
    bucket.upload_folder(tmp_path)
    for place, teacher in ((tmp_path, tiny_run.folder), (bucket, model)):
        options = {
            "mc": ["--policy", place / "policy.json", "--rollouts", place / "r.jsonl", "--estimate", "hard", "--k", 2],
            "teacher": ["--model", teacher],
            "outcomes": ["--verifier", "answer"],
        }
        for kind, more in options.items():
            jprm("label", kind, *more, "--input", place / "in.jsonl", "--output", place / f"{kind}.jsonl")
        files = ["--input", place / "mc.jsonl", "--other", place / "mc.jsonl", "--output", place / "agreed.jsonl"]
        jprm("label", "consensus", *files)
    for name in ("mc", "teacher", "outcomes", "agreed"):
        assert (bucket / f"{name}.jsonl").read_bytes() == (tmp_path / f"{name}.jsonl").read_bytes()


@pytest.mark.parametrize("bucket", ["memory"], indirect=True)
def test_a_folder_killed_at_any_operation_is_the_old_one_the_new_one_or_none(bucket, monkeypatch):
    old, new = ({f"/{name}": version for name in names} for names, version in (("abz", b"old"), ("acz", b"new")))

    def there(folder):
        for name, content in old.items():
            Remote(f"{folder}/out{name}").write_bytes(content)
        (folder / "out2/a").write_bytes(b"beside")

    def write(folder):
        with whole_folder(folder / "out", replace=True, last="z") as local:
            for name, content in new.items():
                (local / name[1:]).write_bytes(content)

    def between(folder):
        stored = objects(folder / "out")
        assert stored in (old, new) or ("/z" not in stored and not is_whole(folder / "out"))

    for folder in killed_everywhere(monkeypatch, bucket, write, there, between):
        assert objects(folder / "out") == new and is_whole(folder / "out")
        assert (folder / "out2/a").exists() and not (folder / "out.partial").exists()
    with pytest.raises(FileExistsError, match="already"), whole_folder(folder / "out"):
        pass


def test_data_prepared_in_a_bucket_are_those_on_disk(bucket, tmp_path, capsys):
    records = chains(12)
    write_records(tmp_path / "in.jsonl", records)
    write_records(tmp_path / "bench.jsonl", records[3:5])
    bucket.upload_folder(tmp_path)
    for place in (tmp_path, bucket):
        files = ["--source", place / "in.jsonl", "--exclude", place / "bench.jsonl", "--out", place / "data"]
        jprm("prepare", "jsonl", *files)
    assert list(load(bucket / "data")) == list(load(tmp_path / "data")) == records[:3] + records[5:]
    here, there = (json.loads((place / "data/report.json").read_bytes()) for place in (tmp_path, bucket))
    assert json.loads(json.dumps(there).replace(str(bucket), str(tmp_path))) == here
    jprm("prepare", "jsonl", *files)
    assert "10" in capsys.readouterr().err
    (bucket / "in.jsonl").write_bytes(b"{}\n")
    assert cli.main(["prepare", "jsonl", *map(str, files), "--overwrite"]) == 2
    assert f"{bucket}/in.jsonl:1: " in capsys.readouterr().err and len(load(bucket / "data")) == 10
    assert cli.main(["prepare", "jsonl", *map(str, files)]) == 2
    assert "sha256" in capsys.readouterr().err


@pytest.mark.parametrize("bucket", ["memory"], indirect=True)
def test_an_export_into_a_bucket_is_the_one_on_disk(bucket, tmp_path, monkeypatch):
    prm = untrained(tmp_path / "run")
    (tmp_path / "run/calibration.json").write_text("{}")
    (bucket / "run").upload_folder(tmp_path / "run")
    there = dataclasses.replace(prm, name=f"{bucket}/run")
    export(prm, tmp_path / "out")
    with monkeypatch.context() as patch:
        killed_at(4, patch)
        with pytest.raises(KeyboardInterrupt):
            export(there, bucket / "out")
    refused(FileNotFoundError, "model", kind_of, bucket / "out")
    for _ in range(2):  # the second call checks the sums
        assert export(there, bucket / "out") == bucket / "out"
    assert kind_of(bucket / "out") == "huggingface" and not (bucket / "out.partial").exists()
    stored = objects(bucket / "out")
    assert set(stored) == {f"/{file.name}" for file in (tmp_path / "out").iterdir()}
    for name in stored.keys() - {"/export.json", "/SHA256SUMS"}:  # these depend on the model's place
        assert stored[name] == (tmp_path / "out" / name[1:]).read_bytes()
    refused(FileExistsError, "already", export, there, bucket / "out", dtype="bfloat16")
    (bucket / "out/config.json").write_bytes(b"{}")
    refused(ValueError, "config.json", export, there, bucket / "out")


@pytest.mark.slow  # trains a model of a known family
def test_a_model_converted_in_a_bucket_scores_there(tiny_run, bucket, tmp_path):
    llama = dataclasses.replace(tiny_run.experiment.model, qk_norm=False, qkv_bias=False)
    training.train(dataclasses.replace(tiny_run.experiment, model=llama, steps=2), bucket / "run")
    jprm("convert", bucket / "run", bucket / "out")
    write_records(tmp_path / "in.jsonl", chains(5))
    (bucket / "in.jsonl").upload(tmp_path / "in.jsonl")
    for model in ("run", "out"):
        jprm("score", "--model", bucket / model, "--input", bucket / "in.jsonl", "--output", bucket / f"{model}.jsonl")
    assert json.loads((bucket / "out.jsonl.info.json").read_bytes())["model"].startswith(f"{bucket}/out (")
    of_run, of_out = (
        [record["scores"] for record in read_records(bucket / f"{name}.jsonl")] for name in ("run", "out")
    )
    assert of_out == [pytest.approx(scores, abs=1e-5) for scores in of_run]  # other layouts of the same products
    jprm("prepare", "jsonl", "--source", bucket / "in.jsonl", "--out", bucket / "data")
    jprm("score", "--model", bucket / "run", "--input", bucket / "data", "--output", bucket / "prepared.jsonl")
    assert list(read_records(bucket / "prepared.jsonl")) == list(read_records(bucket / "run.jsonl"))
    (bucket / "adapter.json").write_bytes((bucket / "out/adapter.json").read_bytes())
    files = ["--input", bucket / "in.jsonl", "--output", bucket / "again.jsonl"]
    jprm("score", "--model", bucket / "out", "--adapter", bucket / "adapter.json", *files)
    assert (bucket / "again.jsonl").read_bytes() == (bucket / "out.jsonl").read_bytes()


def test_models_in_a_bucket_are_served_by_their_names(model, monkeypatch, one_device):
    served = []
    recording = lambda config: types.SimpleNamespace(run=lambda: served.append(config.app))  # noqa: E731
    monkeypatch.setattr(serving.uvicorn, "Server", recording)
    monkeypatch.setattr(scorer.PRM, "compile", lambda self, tokens: None)
    jprm("serve", model, "--run", model.parent, "--prefix-tokens", 0)
    with TestClient(served[0], base_url="http://localhost") as client:
        while client.get("/ready").status_code == 503:
            time.sleep(0.01)
        assert [entry["id"] for entry in client.get("/v1/models").json()["data"]] == ["run"]
        (run,) = client.get("/v1/runs").json()["data"]
        assert run["steps"] == 6 and 0 <= run["quiet_seconds"] < 60
        got = client.get("/v1/runs/metrics", params={"run": run["id"]}).json()
        lines = [json.loads(line) for line in (model / "metrics.jsonl").read_bytes().splitlines()]
        assert [line["step"] for line in got["lines"]] == [line["step"] for line in lines]
        place = {"run": run["id"], "file": got["file"], "from": got["next"]}
        (model / "metrics.jsonl").write_bytes((model / "metrics.jsonl").read_bytes() + b'{"step": 7}\n{"st')
        assert client.get("/v1/runs/metrics", params=place).json()["lines"] == [{"step": 7}]
        (model / "metrics.jsonl").write_bytes(b'{"step": 1}\n')  # a run that begins anew
        assert client.get("/v1/runs/metrics", params=place).json()["lines"] == [{"step": 1}]
