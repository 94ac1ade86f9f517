"""What another part, code or input has made is never taken for the same: each is changed, and the call is repeated."""

import dataclasses
import json
import os
import signal
import sys

import pytest
import test_sampler
import tiny_rl
import tiny_run as tiny
from refusing import refused
from storm_commands import METHOD
from test_scorer import short_rows  # noqa: F401  (autouse)
from test_search_files import run as search
from tiny_run import chains

import jprm
from jprm import options
from jprm.apps import cli
from jprm.checkpoints import store
from jprm.checkpoints.store import claim, data_digests
from jprm.io.jsonl import write_records
from jprm.io.outputs import code_of, digest
from jprm.io.storage import path_of
from jprm.methods.data import readers
from jprm.methods.data.prepare import prepare
from jprm.methods.evaluate.run import FileReader, scored_trees
from jprm.methods.jobs.score import score_file
from jprm.methods.label.jobs import label_outcomes, label_teacher, label_verify
from jprm.methods.rl.progress import claim_rl
from jprm.methods.search.growing_tree import find as method_of


@pytest.fixture
def input_file(tmp_path):
    path = tmp_path / "in.jsonl"
    write_records(path, chains(20))
    return path


@pytest.fixture
def alarm():
    """Ends a test that hangs."""
    before = signal.signal(signal.SIGALRM, lambda *_: pytest.fail("hangs"))
    signal.alarm(300)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


CHANGES = {
    "config": lambda prm: {"config": dataclasses.replace(prm.config, rope_theta=77.0)},
    "layout": lambda prm: {"layout": dataclasses.replace(prm.layout, later=("{step}", "\n\n"))},
}


@pytest.mark.parametrize("part", CHANGES)
def test_a_model_of_another_config_or_layout_is_another_request(prm, input_file, tmp_path, part):
    """Of scores, a teacher's labels and an evaluation; the parameters are the same numbers."""

    def every(prm):
        yield lambda: score_file(prm, input_file, tmp_path / "out.jsonl")
        yield lambda: label_teacher(prm, input_file, tmp_path / "soft.jsonl")
        yield lambda: scored_trees(prm, input_file, FileReader("jsonl", readers.find("jsonl"), {}), tmp_path / "scores")

    for make in every(prm):
        make()
    for make in every(dataclasses.replace(prm, **CHANGES[part](prm))):
        refused(ValueError, rf"\(digests.{part}\)", make)


def test_a_policy_of_another_config_has_another_name():
    """Samples and rollouts are kept by the policy's name."""
    model = test_sampler.MODEL
    names = [
        test_sampler.make(model=model).name for model in (model, model, dataclasses.replace(model, rope_theta=77.0))
    ]
    assert names[0] == names[1] != names[2]


@pytest.mark.parametrize("again", [False, True])
def test_an_input_of_the_same_size_and_time_is_another_input(prm, input_file, tmp_path, again):
    """Written over in its place, or renamed over; and the same bytes with another time are the same input."""
    score_file(prm, input_file, tmp_path / "out.jsonl")
    stat, text = os.stat(input_file), input_file.read_text()
    changed = text.replace("q0 3", "q0 4", 1)
    other = tmp_path / "other.jsonl" if again else input_file
    other.write_text(changed.replace('"c4"', '"x4"'))
    os.utime(other, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    os.rename(other, input_file)
    now = os.stat(input_file)
    assert (now.st_size, now.st_mtime_ns) == (stat.st_size, stat.st_mtime_ns)
    refused(ValueError, r"\(sha256\)", score_file, prm, input_file, tmp_path / "out.jsonl")
    input_file.write_text(text)
    assert "20 were there already" in score_file(prm, input_file, tmp_path / "out.jsonl")


def edited(path, before, after):
    path.write_text(path.read_text().replace(before, after))


def test_a_verifier_whose_file_changed_is_another_request(tmp_path):
    """Its own file, and one of the user's that it imports."""
    write_records(tmp_path / "in.jsonl", [{"problem": "p", "steps": ["a"], "answer": "1"}])
    verifier, helper = tmp_path / "verifier.py", tmp_path / "stale_helper.py"
    helper.write_text("def reward():\n    return 0.0\n")
    verifier.write_text(
        f"import sys\nsys.path.insert(0, {str(tmp_path)!r})\nfrom stale_helper import reward\nsys.path.pop(0)\n"
        "def judge(record, steps):\n    return reward()\n"
    )
    call = (f"{verifier}:judge", tmp_path / "in.jsonl", tmp_path / "out.jsonl")
    assert label_outcomes(*call) == label_outcomes(*call) == {"chains": 1, "correct": 0}
    edited(helper, "0.0", "1.0")
    del sys.modules["stale_helper"]
    options.defined.cache_clear()
    refused(ValueError, r"\(digests.verifier\)", label_outcomes, *call)
    (tmp_path / "out.jsonl").unlink()
    assert label_outcomes(*call) == {"chains": 1, "correct": 1}
    edited(verifier, "return reward()", "return 0.5 * reward()")
    refused(ValueError, r"\(digests.verifier\)", label_outcomes, *call)
    del sys.modules["stale_helper"]


def test_a_search_method_whose_file_changed_is_another_request(tmp_path):
    write_records(tmp_path / "problems.jsonl", [{"problem": "p", "steps": ["-"], "answer": "7"}])
    method_file = tmp_path / "method.py"
    method_file.write_text(METHOD)
    for _ in range(2):
        search(tmp_path, method=method_of(f"{method_file}:Some")())
    edited(method_file, "ROOT, 4", "ROOT, 3")
    refused(ValueError, r"\(digests.method\)", search, tmp_path, method=method_of(f"{method_file}:Some")())


READER = """
from jprm.methods.data.reader import Reader
def parse(item, where, options):
    yield {"problem": item["problem"], "steps": item["steps"]}
READER = Reader(parse)
"""


def test_a_reader_whose_file_changed_is_another_request(prm, input_file, tmp_path):
    reader_file = tmp_path / "reader.py"
    reader_file.write_text(READER)
    name = f"{reader_file}:READER"

    def read():
        return scored_trees(prm, input_file, FileReader(name, readers.find(name), {}), tmp_path / "scores")

    prepared = prepare(name, [input_file], tmp_path / "prepared")
    assert prepared == prepare(name, [input_file], tmp_path / "prepared")
    assert len(read()) == len(read()) == 20
    edited(reader_file, 'item["steps"]', 'item["steps"][:1]')
    refused(ValueError, r"\(reading\)", read)
    refused(ValueError, r"code\.", prepare, name, [input_file], tmp_path / "prepared")


HEAD = """
import jax
from jprm.model.heads import Head, Readout, HEADS
import dataclasses
def score(logit_BSC):
    return jax.nn.sigmoid(logit_BSC[..., 0])
HEAD = dataclasses.replace(HEADS["binary"], readout=Readout(score=score))
"""


@pytest.fixture
def head(tmp_path, monkeypatch):
    """A user's head, as a function that edits its file."""
    head_file = tmp_path / "stale_head.py"
    head_file.write_text(HEAD)
    monkeypatch.syspath_prepend(tmp_path)

    def edit():
        edited(head_file, "jax.nn.sigmoid(logit", "jax.nn.sigmoid(-1 * logit")
        del sys.modules["stale_head"]

    yield edit
    sys.modules.pop("stale_head", None)


def test_a_head_whose_file_changed_continues_no_scores(prm, head, input_file, tmp_path):
    def loaded():
        readout = options.find_part("stale_head:HEAD", {}, "head").readout
        config = dataclasses.replace(prm.config, head="stale_head:HEAD")
        return dataclasses.replace(prm, config=config, readout=readout)

    out = tmp_path / "out.jsonl"
    score_file(loaded(), input_file, out)
    assert "20 were there already" in score_file(loaded(), input_file, out)
    head()
    refused(ValueError, r"\(digests.head, digests.model.head\)", score_file, loaded(), input_file, out)


@pytest.fixture
def claimed(tmp_path, monkeypatch):
    """A function that claims a run's folder for an experiment, as if the run had a checkpoint."""
    monkeypatch.setattr(store, "saved", lambda workdir: [3])
    tiny.make_data(tmp_path)

    def claim_run(**changes):
        experiment = tiny.experiment(tmp_path, **changes)
        claim(tmp_path / "run", experiment, jprm.tokenizer.load_tokenizer(experiment.tokenizer))

    return claim_run


def test_a_run_keeps_its_heads_code_and_refuses_another(head, claimed, tmp_path):
    model = dataclasses.replace(tiny.MODEL, head="stale_head:HEAD")
    claimed(model=model)
    claimed(model=model)
    assert (tmp_path / "run/head.py").read_text() == HEAD
    head()
    refused(ValueError, "digests.json", claimed, model=model)
    assert (tmp_path / "run/head.py").read_text() == HEAD


@pytest.mark.parametrize("name", ["train.jsonl", "valid.jsonl"])
def test_a_run_does_not_go_on_with_other_data(claimed, tmp_path, name):
    """Of the same path, size and time; a copy of the same bytes is the same data."""
    claimed()
    file = tmp_path / name
    stat, text = os.stat(file), file.read_text()
    file.write_text(text.replace('"label": 1', '"label": 0', 1))
    os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    refused(ValueError, name, claimed)
    file.write_text(text)
    claimed()


def test_a_run_of_reinforcement_learning_keeps_its_verifier(tmp_path, monkeypatch):
    verifier = tmp_path / "verifier.py"
    verifier.write_text("def judge(record, steps):\n    return 1.0\n")
    config = tiny_rl.experiment(tiny_rl.make(tmp_path / "data"), verifier=f"{verifier}:judge")
    monkeypatch.setattr(store, "saved", lambda workdir: [3])
    claim_rl(tmp_path / "run", config)
    claim_rl(tmp_path / "run", config)
    edited(verifier, "1.0", "0.0")
    refused(ValueError, "verifier", claim_rl, tmp_path / "run", config)


def test_prepared_data_have_a_digest_of_their_content(tmp_path):
    write_records(tmp_path / "in.jsonl", chains(3))
    for name in ("one", "two"):
        prepare("jsonl", [tmp_path / "in.jsonl"], tmp_path / name)
    places = {name: path_of(tmp_path / name) for name in ("one", "two", "in.jsonl", "missing")}
    digests = data_digests(places)
    assert digests == {name: digest(place.contents()) for name, place in places.items() if name != "missing"}
    assert digests["one"] == digests["two"] != digests["in.jsonl"]
    write_records(tmp_path / "in.jsonl", chains(4))
    prepare("jsonl", [tmp_path / "in.jsonl"], tmp_path / "two", overwrite=True)
    assert data_digests(places)["two"] != digests["one"] == data_digests(places)["one"]


def test_a_digest_follows_values_and_code(tmp_path):
    """Closures, defaults and methods count; order of keys, and where the file lies, do not."""

    def reader_of(text, folder="a"):
        file = tmp_path / folder / "part.py"
        file.parent.mkdir(exist_ok=True)
        file.write_text(text)
        return options.find_part(f"{file}:part", {}, "part", files=True)

    text = "def made(x, y=1):\n    return lambda: x + y\npart = made(1)\n"
    assert digest(reader_of(text)) == digest(reader_of(text)) == digest(reader_of(text, "b"))
    assert digest(reader_of(text)) != digest(reader_of(text.replace("y=1", "y=2")))
    assert digest({"a": 1, "b": [2.0]}) == digest({"b": [2.0], "a": 1}) != digest({"a": 1, "b": [2]})

    def near(scale):
        return lambda x: x * scale

    assert digest(near(1)) == digest(near(1)) != digest(near(2))
    assert code_of(readers.find("jsonl")) == {} and list(code_of(reader_of(text))) == [str(tmp_path / "a" / "part.py")]
    loop = {"a": 1}
    loop["b"] = loop
    assert digest(loop)


def test_a_pipe_without_a_writer_is_refused(alarm, prm, tmp_path, capsys, monkeypatch):
    """By every command that reads records: nothing waits."""
    monkeypatch.setattr("jprm.loading.load", lambda *_, **__: prm)
    pipe, out = tmp_path / "pipe", str(tmp_path / "out.jsonl")
    os.mkfifo(pipe)
    (tmp_path / "policy.json").write_text(json.dumps({"url": "http://127.0.0.1:9", "model": "m"}))
    policy = ["--policy", str(tmp_path / "policy.json"), "--input", str(pipe), "--output", out]
    for command in (
        ["score", "--model", "m", "--input", str(pipe), "--output", out],
        ["label", "verify", "--kind", "arithmetic", "--input", str(pipe), "--output", out],
        ["label", "outcomes", "--verifier", "answer", "--input", str(pipe), "--output", out],
        ["label", "teacher", "--model", "m", "--input", str(pipe), "--output", out],
        ["label", "mc", *policy, "--rollouts", str(tmp_path / "r.jsonl"), "--estimate", "soft"],
        ["search", "best-of-n", *policy, "--model", "m", "--budget", "10"],
        ["eval", "processbench", "--model", "m", "--input", str(pipe), "--calibrate", str(pipe), "--output", out],
    ):
        status = cli.main(command)
        said = capsys.readouterr().err
        assert status == 2 and "pipe: " in said and ("file" in said), (command, said)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["pipe", "policy.json"]


def test_an_empty_input_is_refused(prm, tmp_path):
    empty, out = tmp_path / "empty.jsonl", tmp_path / "out.jsonl"
    empty.write_text("\n")
    for call in (
        lambda: score_file(prm, empty, out),
        lambda: label_verify("arithmetic", empty, out),
        lambda: label_outcomes("answer", empty, out),
        lambda: label_teacher(prm, empty, out),
        lambda: search(tmp_path, input="empty.jsonl"),
    ):  # fmt: skip
        refused(ValueError, "empty.jsonl", call)
    assert [path.name for path in tmp_path.iterdir()] == ["empty.jsonl"]
