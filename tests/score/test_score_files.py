"""Files of scores: they survive a kill, and belong to one model and one input."""

import dataclasses
import functools
import json

import jax
import pytest
from refusing import refused
from test_scorer import short_rows  # noqa: F401  (autouse)
from tiny_run import chains, pool_of, trees

import jprm
from jprm.apps import cli
from jprm.io.jsonl import write_records
from jprm.methods.evaluate.run import scorer as scorer_of
from jprm.methods.jobs.score import identity, score_file
from jprm.methods.label.jobs import label_teacher
from jprm.model.heads import Readout, Weighted
from jprm.model.mesh import MeshConfig, make_mesh
from jprm.score import scorer
from jprm.tree import read_records, tree_of


@pytest.fixture
def input_file(tmp_path):
    path = tmp_path / "in.jsonl"
    write_records(path, unique([*chains(20), *trees(3), pool_of(chains(2)), *chains(6, seed=3)][:27]))
    return path


def unique(records):
    return [record | {"id": i} for i, record in enumerate(records)]


@pytest.fixture
def score(prm):
    """`score_file` by the tiny model."""
    return functools.partial(score_file, prm)


def test_a_scored_file_holds_what_score_many_gives(prm, score, input_file, tmp_path):
    said = score(input_file, tmp_path / "out.jsonl")
    assert "27 records" in said
    assert list(read_records(tmp_path / "out.jsonl")) == list(prm.score_many(read_records(input_file)))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.jsonl", "out.jsonl", "out.jsonl.info.json"]


def test_a_prepared_folder_is_scored_as_its_records(prm, input_file, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("jprm.loading.load", lambda *_, **__: prm)
    folder, out = tmp_path / "prepared", tmp_path / "out.jsonl"
    assert cli.main(["prepare", "jsonl", "--input", str(input_file), "--output", str(folder)]) == 0
    command = ["score", "--model", "m", "--output", str(out), "--input"]
    assert cli.main([*command, str(folder)]) == 0
    assert list(read_records(out)) == list(prm.score_many(read_records(input_file)))
    assert cli.main([*command, str(folder)]) == 0
    assert cli.main([*command, str(input_file)]) == 2
    assert "request" in capsys.readouterr().err
    assert cli.main([*command, str(tmp_path)]) == 2
    assert "prepared" in capsys.readouterr().err


def test_a_model_that_was_replaced_at_the_same_step_is_another_request(prm, score, input_file, tmp_path):
    """Of scores, of a teacher's labels and of the edits that an evaluation scores beside."""
    chains = [record for record in read_records(input_file) if "steps" in record][:1]

    def every(prm):
        yield lambda: score_file(prm, input_file, tmp_path / "out.jsonl")
        yield lambda: label_teacher(prm, input_file, tmp_path / "soft.jsonl")
        yield lambda: scorer_of(prm, tmp_path)(chains, "edits")

    for make in every(prm):
        make()
    kernel = prm.params["head"]["kernel"]
    changed = prm.params | {"head": prm.params["head"] | {"kernel": kernel * 1.001}}
    for make in every(dataclasses.replace(prm, params=changed)):
        refused(ValueError, "digests.model", make)


@pytest.mark.breadth
def test_the_digest_of_a_model_is_the_same_on_any_mesh(prm, tiny_run, monkeypatch):
    monkeypatch.setattr(jprm.loading, "make_mesh", make_mesh)  # all devices
    whole = jprm.load(tiny_run.folder, MeshConfig(fsdp=4, tensor=2))
    assert whole.mesh.size == 8 and identity(whole)["digests"] == identity(prm)["digests"]
    before = identity(prm)["digests"]
    monkeypatch.setattr("jprm.checkpoints.store.SUMMED_AT_ONCE", 16)  # large arrays are summed by parts
    assert identity(prm)["digests"] == before
    permuted = jax.tree.map(lambda x: x[..., ::-1] + 1, prm.params)
    assert identity(dataclasses.replace(prm, params=permuted))["digests"] != identity(prm)["digests"]


def test_an_output_of_another_release_is_refused(score, input_file, tmp_path):
    """An earlier one does not say what config its scores are of."""
    score(input_file, tmp_path / "out.jsonl")
    info, output = tmp_path / "out.jsonl.info.json", (tmp_path / "out.jsonl").read_bytes()
    recorded = json.loads(info.read_text())
    info.write_text(json.dumps(recorded | {"version": 3}))
    refused(ValueError, "out.jsonl.info.json: .*version 3", score, input_file, tmp_path / "out.jsonl")
    assert recorded.pop("digests")
    info.write_text(json.dumps(recorded | {"version": 1, "digest": "0" * 16}))
    refused(ValueError, "of another model, input or request ", score, input_file, tmp_path / "out.jsonl")
    assert (tmp_path / "out.jsonl").read_bytes() == output


@pytest.mark.parametrize("after", [0, 3, 8, 13, 26])
def test_a_stopped_file_continues_to_the_same_bytes(prm, score, input_file, tmp_path, monkeypatch, after):
    score(input_file, tmp_path / "whole.jsonl")
    whole = scorer.PRM.score_many
    asked = []

    def stopped(self, records, speed):
        for count, record in enumerate(whole(self, records)):
            if count == after:
                raise KeyboardInterrupt
            yield record

    def counted(self, records, speed):
        for record in whole(self, records):
            asked.append(record)
            yield record

    output = tmp_path / "out.jsonl"
    monkeypatch.setattr(scorer.PRM, "score_many", stopped)
    with pytest.raises(KeyboardInterrupt):
        score(input_file, output)
    assert not output.exists()
    part = tmp_path / "out.jsonl.part"
    assert part.exists() == (after >= 8), "without a whole chunk nothing is left, not even the request"
    if part.exists():
        with part.open("ab") as file:
            file.write(b'{"problem": "ha')  # as a kill leaves it
    monkeypatch.setattr(scorer.PRM, "score_many", counted)
    score(input_file, output)
    assert output.read_bytes() == (tmp_path / "whole.jsonl").read_bytes()
    assert len(asked) == 27 - after // 8 * 8  # whole chunks are not scored again

    asked.clear()
    assert "27 were there already" in score(input_file, output)
    assert asked == []


def test_an_output_of_another_request_is_left_alone(prm, score, input_file, tmp_path, monkeypatch):
    output = tmp_path / "out.jsonl"
    score(input_file, output)
    before = output.read_bytes()
    other_input = tmp_path / "other.jsonl"
    write_records(other_input, chains(2, seed=9))
    refused(ValueError, "out.jsonl: .*sha256", score, other_input, output)
    newer = functools.partial(score_file, dataclasses.replace(prm, step=prm.step + 1))
    refused(ValueError, r"\(step\)", newer, input_file, output)
    output.rename(tmp_path / "out.jsonl.part")  # as if it had been stopped
    refused(ValueError, "out.jsonl.part", newer, input_file, output)
    assert (tmp_path / "out.jsonl.part").read_bytes() == before
    (tmp_path / "out.jsonl.part").unlink()
    (tmp_path / "out.jsonl.info.json").unlink()
    output.write_text("mine\n")
    refused(ValueError, "out.jsonl", score, input_file, output)
    assert output.read_text() == "mine\n"


def test_bad_lines_stop_or_go_to_the_rejects(prm, score, input_file, tmp_path):
    good = input_file.read_bytes().splitlines(keepends=True)
    bad = [b'{"problem": "p"}\n', b"\xff\xfe\n", b'  {"problem": "p", "steps": ["a"], "labels": [1, 2]}\r\n']
    input_file.write_bytes(b"".join([*good[:2], bad[0], *good[2:9], bad[1], bad[2], *good[9:]]))
    output, rejects = tmp_path / "out.jsonl", tmp_path / "out.jsonl.rejects"
    refused(jprm.tree.RecordError, r"in.jsonl:3: ", score, input_file, output)
    assert not output.exists() and not rejects.exists()

    for _ in range(2):  # a finished output keeps its rejects
        assert "27 records scored" in score(input_file, output, on_error="skip")
        assert rejects.read_bytes() == b"".join(bad)
    input_file.write_bytes(b"".join(good))
    score(input_file, tmp_path / "clean.jsonl")
    assert (tmp_path / "clean.jsonl").read_bytes() == output.read_bytes()


def test_named_outputs_are_written_beside_the_scores(prm, input_file, tmp_path):
    readout = Readout(score=prm.readout.score, low=Weighted("softmax", (0.0, 0.5)))
    double = dataclasses.replace(prm, readout=readout)
    assert double.output_names == ("score", "low")
    score_file(double, input_file, tmp_path / "out.jsonl")
    for plain, record in zip(
        prm.score_many(read_records(input_file)), read_records(tmp_path / "out.jsonl"), strict=True
    ):
        tree = tree_of(record)
        assert [node.score for node in tree.nodes] == [node.score for node in tree_of(plain).nodes]
        for node in tree.nodes:
            assert node.outputs.keys() == {"low"} and abs(node.outputs["low"] - node.score / 2) < 1e-6
        chain = record.get("samples", [record])[0]
        assert len(chain["outputs"]["low"]) == len(chain["scores"]) if "nodes" not in record else True


def test_records_beyond_the_context_stop_or_go_to_the_rejects(prm, input_file, tmp_path):
    """What is left is scored as a file without them is."""
    short = [*read_records(input_file)]
    long = {"problem": "long", "steps": ["far " * 60]}
    whole, out = tmp_path / "whole.jsonl", tmp_path / "out.jsonl"
    write_records(whole, [short[0], long, *short[1:]])
    prm = dataclasses.replace(prm, context=120)
    short = [record for record in short if prm.fits(record)]
    refused(ValueError, "whole.jsonl:2: .*reads 120", score_file, prm, whole, out)
    assert "1 rejected" in score_file(prm, whole, out, on_error="skip")
    assert list(read_records(out)) == list(prm.score_many(short))
    assert list(read_records(f"{out}.rejects")) == [long]


def test_an_output_of_another_format_is_refused(input_file, tmp_path, capsys):
    command = ["score", "--model", "m", "--input", str(input_file), "--output", str(tmp_path / "o.csv")]
    assert cli.main(command) == 2 and "jsonl" in capsys.readouterr().err
