"""Commands whose model, input and output are in a bucket: they write what they write on disk, also after kills."""

import dataclasses
import json
import time
import types

import pytest
from buckets import contents, in_memory, killed_at, killed_everywhere, objects
from refusing import refused
from starlette.testclient import TestClient
from test_evaluate_run import short_rows  # noqa: F401  (autouse)
from test_export import untrained
from test_label_files import arithmetic
from test_search_files import PROBLEMS, Good
from tiny_run import chains, pool_file, processbench_file, training
from toy_policy import Markov

from jprm.apps import cli
from jprm.apps.report.runs import names_of
from jprm.apps.serve import app as serving
from jprm.checkpoints.store import MARK
from jprm.data import load
from jprm.experiment import kind_of
from jprm.io.folders import is_whole, whole_folder
from jprm.io.jsonl import write_records
from jprm.io.storage import Remote
from jprm.methods.export.export import export
from jprm.methods.jobs.score import score_file
from jprm.methods.label import jobs as label_files
from jprm.methods.label.config import MonteCarloConfig
from jprm.methods.label.jobs import label_monte_carlo, label_verify
from jprm.methods.search.best_of_n import BestOfN
from jprm.methods.search.jobs import search_file
from jprm.methods.search.lockstep import Rescorer, SearchConfig
from jprm.score import scorer
from jprm.score.scorer import CHUNK
from jprm.tree import read_records

COUNT = 3 * CHUNK + 7


@pytest.fixture
def model(tiny_run, bucket):
    """The tiny run, copied into the bucket with the marks that whole checkpoints have there."""
    (bucket / "run").upload_folder(tiny_run.folder)
    for step in (tiny_run.folder / "checkpoints").iterdir():
        (bucket / "run/checkpoints" / step.name / MARK).write_bytes(b"")
    return bucket / "run"


def jprm(*words):
    assert cli.main(list(map(str, words))) == 0


def sums(count):
    """Chains of equations, every third of which has one that is wrong."""
    steps = [[f"{i} + 1 = {i + 1}", f"{i} * 2 = {2 * i + (i % 3 == 0)}", "So it is."] for i in range(count)]
    return [{"problem": f"p{i}", "steps": chain, "answer": "1", "id": i} for i, chain in enumerate(steps)]


# ---- What a command writes, in a folder with all that it reads.

LABEL = "--input {place}/sums.jsonl --output {place}"
SUITE = "eval suite --model {model} --suite {place}/bench/suite.json --out {place}/results"
COMMANDS = {
    "labels": [
        f"label mc --policy {{place}}/policy.json --rollouts {{place}}/r.jsonl --estimate hard --k 2 {LABEL}/mc.jsonl",
        f"label teacher --model {{model}} {LABEL}/teacher.jsonl",
        f"label outcomes --verifier answer {LABEL}/outcomes.jsonl",
        "label consensus --input {place}/mc.jsonl --other {place}/mc.jsonl --output {place}/agreed.jsonl",
    ],
    "search": [
        "search best-of-n --n 4 --model {model} --budget 4000 --policy {place}/policy.json"
        " --input {place}/problems.jsonl --output {place}/found.jsonl",
        "eval best-of-n --input {place}/found.jsonl --json {place}/best.json",
    ],
    "suite": [SUITE, SUITE],  # the second call finds what is there
    "page": [SUITE, "report {place}/results --out {place}/page.html --figures {place}/figures"],
    "prepare": [
        "prepare jsonl --source {place}/chains.jsonl --exclude {place}/excluded.jsonl --out {place}/data",
        "score --model {model} --input {place}/data --output {place}/scored.jsonl",
    ],
}


@pytest.fixture
def here(tmp_path, serve):
    """A folder of this machine with every input."""
    folder, records = tmp_path / "here", chains(12)
    (folder / "bench").mkdir(parents=True)
    (folder / "policy.json").write_text(json.dumps({"url": serve(arithmetic).url, "model": "tiny", "retries": 0}))
    problems = [{"problem": "1+2", "answer": "3"}, {"problem": "2+1", "answer": "3"}]
    inputs = {"sums": sums(3), "problems": problems, "chains": records, "excluded": records[3:5]}
    for name, part in inputs.items():
        write_records(folder / f"{name}.jsonl", part)
    pool_file(folder / "bench/pool.jsonl"), processbench_file(folder / "bench/easy.json", 6, 1)
    suite = {"neutral": "drop", "best_of_n": {"data": ["pool.jsonl"]}, "steps": {"data": ["easy.json"]}}
    suite |= {"processbench": {"data": ["none.json", "easy.json"], "calibrate": "easy.json"}}
    (folder / "bench/suite.json").write_text(json.dumps(suite))
    return folder


@pytest.mark.parametrize("kind", [pytest.param(kind, marks=[pytest.mark.slow] * (kind == "page")) for kind in COMMANDS])
def test_a_command_in_a_bucket_writes_what_it_writes_on_disk(kind, tiny_run, model, bucket, here):
    bucket.upload_folder(here)
    before, written = set(contents(bucket)), []
    for place, scores in ((here, tiny_run.folder), (bucket, model)):
        for command in COMMANDS[kind]:
            jprm(*command.format(place=place, model=scores).split())
        written.append({
            name: content.replace(str(scores).encode(), b"MODEL").replace(str(place).encode(), b"PLACE")
            for name, content in contents(place).items() if name not in before
        })  # fmt: skip
    assert written[0].keys() == written[1].keys() and len(written[0]) >= len(set(COMMANDS[kind]))
    for name, content in written[0].items():
        assert written[1][name] == content, name
    if kind == "page":
        assert cli.main(["report", f"{bucket}/results", "--output", f"{bucket}/results/results.json"]) == 2


# ---- What a command writes that is killed after any operation that changes the bucket.


class Lengths:
    """Scores a step by the length of its text, and calls `meanwhile` after so many records."""

    def __init__(self, name="lengths", after=-1, meanwhile=None):
        self.name, self.identity, self.after, self.meanwhile = name, {"model": name}, after, meanwhile

    def score_many(self, records):
        for count, record in enumerate(records):
            if count == self.after:
                self.meanwhile()
            yield record | {"scores": [len(step) / 100 for step in record["steps"]]}


def scoring(policy, input, output):
    return score_file(Lengths(), input, output, on_error="skip")


def searching(policy, input, output):
    config = SearchConfig(BestOfN(4), "prod", budget=400, at_once=2)
    return search_file(policy, Rescorer(Good()), {"model": "good"}, input, output, config)


def rolling(policy, input, output):
    config = MonteCarloConfig("soft", k=2, trees_at_once=1)
    return label_monte_carlo(policy, input, output, output.with_name("rollouts.jsonl"), config)


def two_bad(lines):
    return b"".join([lines[0], b"{\n", *lines[1:], b"[]\n"])


KILLED = {  # the command, its records, and how many operations it takes
    "score": (scoring, chains(COUNT), 1 + 4 + 1 + 4 + 1),  # request, pieces, output, pieces removed, rejects
    "search": (searching, PROBLEMS, 0),
    "verify": (lambda policy, input, output: label_verify("arithmetic", input, output), sums(5), 0),
    "mc": (rolling, sums(5), 0),
}


@in_memory
@pytest.mark.parametrize("kind", KILLED)
def test_a_command_killed_at_any_operation_ends_like_one_on_disk(kind, bucket, tmp_path, monkeypatch):
    """And what a reader finds under the output's name in the meantime is nothing, or all of it."""
    monkeypatch.setattr(label_files, "FLUSH_SECONDS", 0.0)
    (run, records, operations), here, policies = KILLED[kind], tmp_path / "here", {}
    write_records(tmp_path / "in.jsonl", records)
    if kind == "score":
        (tmp_path / "in.jsonl").write_bytes(two_bad((tmp_path / "in.jsonl").read_bytes().splitlines(True)))
    here.mkdir()
    counts = run(policy := Markov(), tmp_path / "in.jsonl", here / "out.jsonl")
    expected = contents(here)
    (bucket / "in.jsonl").upload(tmp_path / "in.jsonl")

    def run_command(folder):
        return run(policies.setdefault(folder, Markov()), bucket / "in.jsonl", folder / "out.jsonl")

    def between(folder):
        out = folder / "out.jsonl"
        assert not out.is_file() or out.read_bytes() == expected["/out.jsonl"]

    for folder in killed_everywhere(monkeypatch, bucket, run_command, between=between):
        assert contents(folder) == expected
        if kind == "search":  # nothing is drawn again, and a finished file is counted
            assert policies[folder].sampled == policy.sampled
            assert counts | {"prm_tokens": 0} == run_command(folder) | {"prm_tokens": 0, "rejected": 0}
    assert operations in (0, len(policies) - 1)  # the last run is not killed


@in_memory
def test_a_folder_killed_at_any_operation_is_the_old_one_the_new_one_or_none(bucket, monkeypatch):
    old, new = ({f"/{name}": version for name in names} for names, version in (("abz", b"old"), ("acz", b"new")))

    def before(folder):
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

    for folder in killed_everywhere(monkeypatch, bucket, write, before, between):
        assert objects(folder / "out") == new and is_whole(folder / "out")
        assert (folder / "out2/a").exists() and not (folder / "out.partial").exists()
    with pytest.raises(FileExistsError, match="already"), whole_folder(folder / "out"):
        pass


def test_a_scored_file_in_a_bucket_is_continued_and_of_one_request(bucket):
    write_records(bucket / "in.jsonl", chains(COUNT))
    (bucket / "in.jsonl").write_bytes(content := two_bad((bucket / "in.jsonl").read_bytes().splitlines(True)))
    files = (None, bucket / "in.jsonl", bucket / "out.jsonl")
    assert scoring(*files) == f"{bucket}/out.jsonl: {COUNT} records scored, 2 rejected"
    assert scoring(*files) == f"{bucket}/out.jsonl: {COUNT} records scored ({COUNT} were there already), 2 rejected"
    before = objects(bucket)
    assert json.loads(before["/out.jsonl.info.json"])["input"] == f"{bucket}/in.jsonl"
    (bucket / "in.jsonl").write_bytes(content + content.splitlines(True)[0].replace(b'"c0"', b'"new"'))
    refused(ValueError, "request", scoring, *files)
    assert objects(bucket)["/out.jsonl"] == before["/out.jsonl"]


def test_of_two_runs_with_one_output_none_takes_what_is_the_others(bucket):
    write_records(bucket / "in.jsonl", chains(COUNT))

    def score(scorer, out):
        score_file(scorer, bucket / "in.jsonl", bucket / out)

    def refusing():
        refused(ValueError, "request", score, Lengths(), "b.jsonl")

    first = Lengths("other", 1, lambda: score(Lengths(), "a.jsonl"))
    refused(ValueError, "begun", score, first, "a.jsonl")  # before the first piece: the later wins
    score(Lengths("other", CHUNK + 1, refusing), "b.jsonl")  # after it the first does
    assert [json.loads(objects(bucket)[f"/{x}.jsonl.info.json"])["model"] for x in "ab"] == ["lengths", "other"]
    score(Lengths(), "whole.jsonl")
    assert objects(bucket)["/a.jsonl"] == objects(bucket)["/whole.jsonl"]


def test_the_names_of_runs_leave_out_what_they_share(tmp_path):
    assert names_of(["gs://b/rates/seed=0", "gs://b/rates/seed=1/"]) == ["seed=0", "seed=1"]
    assert names_of([f"{tmp_path}/a/run", f"{tmp_path}/b"]) == ["a/run", "b"]
    assert names_of(["gs://b/run", str(tmp_path / "run")]) == ["gs://b/run", str(tmp_path / "run")]


def test_data_prepared_in_a_bucket_are_of_one_request(bucket, capsys):
    records = chains(12)
    write_records(bucket / "in.jsonl", records)
    command = ["prepare", "jsonl", "--source", f"{bucket}/in.jsonl", "--out", f"{bucket}/data"]
    for _ in range(2):
        jprm(*command)
    assert list(load(bucket / "data")) == records
    (bucket / "in.jsonl").write_bytes(b"{}\n")
    assert cli.main([*command, "--overwrite"]) == 2
    assert f"{bucket}/in.jsonl:1: " in capsys.readouterr().err and len(load(bucket / "data")) == 12
    assert cli.main(command) == 2
    assert "sha256" in capsys.readouterr().err


@in_memory
def test_an_export_into_a_bucket_is_the_one_on_disk(bucket, tmp_path, monkeypatch):
    prm = untrained(tmp_path / "run")
    (tmp_path / "run/calibration.json").write_text("{}")
    (bucket / "run").upload_folder(tmp_path / "run")
    remote = dataclasses.replace(prm, name=f"{bucket}/run")
    export(prm, tmp_path / "out")
    with monkeypatch.context() as patch:
        killed_at(4, patch)
        with pytest.raises(KeyboardInterrupt):
            export(remote, bucket / "out")
    refused(FileNotFoundError, "model", kind_of, bucket / "out")
    for _ in range(2):  # the second call checks the sums
        assert export(remote, bucket / "out") == bucket / "out"
    assert kind_of(bucket / "out") == "huggingface" and not (bucket / "out.partial").exists()
    stored = objects(bucket / "out")
    assert set(stored) == {f"/{file.name}" for file in (tmp_path / "out").iterdir()}
    for name in stored.keys() - {"/export.json", "/SHA256SUMS"}:  # these depend on the model's place
        assert stored[name] == (tmp_path / "out" / name[1:]).read_bytes()
    refused(FileExistsError, "already", export, remote, bucket / "out", dtype="bfloat16")
    (bucket / "out/config.json").write_bytes(b"{}")
    refused(ValueError, "config.json", export, remote, bucket / "out")


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
    (bucket / "adapter.json").write_bytes((bucket / "out/adapter.json").read_bytes())
    files = ["--input", bucket / "in.jsonl", "--output", bucket / "again.jsonl"]
    jprm("score", "--model", bucket / "out", "--adapter", bucket / "adapter.json", *files)
    assert (bucket / "again.jsonl").read_bytes() == (bucket / "out.jsonl").read_bytes()


def test_models_in_a_bucket_are_served_by_their_names(model, monkeypatch, one_device):
    served = []
    recording = lambda config: types.SimpleNamespace(run=lambda: served.append(config.app))  # noqa: E731
    monkeypatch.setattr(serving.uvicorn, "Server", recording)
    monkeypatch.setattr(scorer.PRM, "compile", lambda self, tokens: None)
    jprm("serve", model, "--set", "prefix_tokens=0")
    with TestClient(served[0], base_url="http://localhost") as client:
        while client.get("/ready").status_code == 503:
            time.sleep(0.01)
        assert [entry["id"] for entry in client.get("/v1/models").json()["data"]] == ["run"]
