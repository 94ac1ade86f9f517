"""Outputs in buckets: in fsspec's own memory, and in the servers of `buckets` where these are installed."""

import itertools
import json
import time
import types
import uuid

import pytest
from buckets import objects
from refusing import refused
from tiny_run import chains

from jprm import loading
from jprm.apps import cli
from jprm.io import storage
from jprm.io.jsonl import write_records
from jprm.io.outputs import atomic_write, check_output, input_of
from jprm.io.storage import Appended, Remote, check_named, path_of
from jprm.methods.formats.adapters.load import load as published
from jprm.methods.scored_files import score_file
from jprm.score.scorer import CHUNK

COUNT = 3 * CHUNK + 7


@pytest.fixture(params=["memory", "s3", "gcs"])
def folder(request):
    """An empty folder of a bucket."""
    bucket = "memory://bucket" if request.param == "memory" else request.getfixturevalue(request.param)
    return Remote(f"{bucket}/{uuid.uuid4().hex}")


def test_objects(folder):
    file = folder / "a/b.txt"
    assert not file.exists() and not folder.exists()
    file.write_bytes(b"one", new=True)
    with pytest.raises(FileExistsError):
        file.write_bytes(b"two", new=True)
    assert file.read_bytes() == b"one" and file.is_file() and (folder / "a").is_dir() and not (folder / "a").is_file()
    before = input_of(file)
    assert before == {"input": file.url, "bytes": 3, "modified": before["modified"]} and before == input_of(file.url)
    time.sleep(1.1)  # the S3 server's times are whole seconds where content is the same; ours differs
    atomic_write(file, "six\n")
    assert file.read_bytes() == b"six\n" and input_of(file) != before
    (folder / "a/c").write_bytes(b"")
    assert (folder / "a").names() == ["b.txt", "c"]
    assert (file.name, file.parent, file.with_name("c")) == ("b.txt", folder / "a", folder / "a/c")
    (folder / "a/c").unlink()
    (folder / "a/c").unlink(missing_ok=True)
    refused(FileNotFoundError, "a/c", (folder / "a/c").read_bytes)
    assert list(objects(folder)) == ["/a/b.txt"]


def test_a_file_grows_by_whole_objects_and_is_cut(folder):
    with Appended(folder / "f") as file:
        file.write(b"one\ntwo\n")
        file.flush()
        file.write(b"three\n")
        file.flush()
        file.write(b"lost by the kill\n")
    assert objects(folder) == {"/f/000000000000000": b"one\ntwo\n", "/f/000000000000008": b"three\n"}
    with Appended(folder / "f") as file:
        file.seek(0)
        assert (file.readline(), file.tell(), list(file)) == (b"one\n", 4, [b"two\n", b"three\n"])
        file.truncate(4)
        file.write(b"2\n")
        file.flush()
        assert objects(folder) == {"/f/000000000000000": b"one\n", "/f/000000000000004": b"2\n"}
        with Appended(folder / "f") as other:
            other.write(b"other\n")
            other.flush()
        file.write(b"late\n")
        refused(ValueError, "writing", file.flush)
    with Appended(folder / "f") as file:
        file.become(folder / "whole")
    assert objects(folder) == {"/whole": b"one\n2\nother\n"}


class Lengths:
    """Scores a step by the length of its text."""

    name, identity = "lengths", {"model": "lengths"}

    def score_many(self, records):
        for record in records:
            yield record | {"scores": [len(step) / 100 for step in record["steps"]]}


@pytest.fixture(scope="module")
def scored(tmp_path_factory):
    """The bytes of an input with two bad lines, and of its output and rejects on this machine."""
    local = tmp_path_factory.mktemp("scored")
    write_records(local / "in.jsonl", chains(COUNT))
    lines = (local / "in.jsonl").read_bytes().splitlines(keepends=True)
    (local / "in.jsonl").write_bytes(b"".join([lines[0], b"{\n", *lines[1:], b"[]\n"]))
    score_file(Lengths(), local / "in.jsonl", local / "out.jsonl", on_error="skip")
    return [(local / name).read_bytes() for name in ("in.jsonl", "out.jsonl", "out.jsonl.rejects")]


def killed_at(count, monkeypatch):
    """Has the process end after the `count`-th operation that changes the bucket."""
    left = itertools.count(count - 1, -1)

    def ending(method):
        def run(self, *args, **options):
            method(self, *args, **options)
            if next(left) == 0:
                raise KeyboardInterrupt

        return run

    for name in ("write_bytes", "upload", "unlink"):
        monkeypatch.setattr(Remote, name, ending(getattr(storage.Remote, name)))


def killed_everywhere(monkeypatch, bucket, run, before=lambda folder: None, between=lambda folder: None):
    """Calls `run(folder)` with a new folder each time, killed after another operation each time, and then again.

    `before` fills the folder first, and `between` sees what the killed call left. Yields the folder after the other.
    """
    for count in itertools.count(1):
        folder, killed = bucket / str(count), False
        before(folder)
        with monkeypatch.context() as patch:
            killed_at(count, patch)
            try:
                run(folder)
            except KeyboardInterrupt:
                killed = True
        between(folder)
        run(folder)
        yield folder
        if not killed:
            assert count > 3
            return


def contents(folder):
    """The objects of a folder, without those that hold a request."""
    return {name: content for name, content in objects(folder).items() if not name.endswith(".info.json")}


@pytest.mark.parametrize("folder", ["memory"], indirect=True)
def test_a_run_killed_at_any_operation_ends_bit_for_bit_like_a_whole_one(folder, scored, monkeypatch):
    """And what a reader finds under the output's name in the meantime is nothing, or all of it."""
    given, expected, rejected = scored
    (folder / "in.jsonl").write_bytes(given)
    score = lambda place: score_file(Lengths(), folder / "in.jsonl", place / "out.jsonl", on_error="skip")  # noqa: E731

    def between(place):
        out = place / "out.jsonl"
        assert not out.is_file() or out.read_bytes() == expected

    places = list(killed_everywhere(monkeypatch, folder, score, between=between))
    assert all(contents(place) == {"/out.jsonl": expected, "/out.jsonl.rejects": rejected} for place in places)
    # The request, four pieces, the output, the pieces removed and the rejects; the last run is not killed.
    assert len(places) == 1 + 4 + 1 + 4 + 1 + 1


def test_a_scored_file_in_a_bucket_is_the_one_on_disk(folder, scored):
    given, expected, rejected = scored
    (folder / "in.jsonl").write_bytes(given)
    said = score_file(Lengths(), folder / "in.jsonl", folder / "out.jsonl", on_error="skip")
    assert said == f"{folder}/out.jsonl: {COUNT} records scored, 2 rejected"
    again = score_file(Lengths(), folder / "in.jsonl", folder / "out.jsonl", on_error="skip")
    assert again == f"{folder}/out.jsonl: {COUNT} records scored ({COUNT} were there already), 2 rejected"
    stored = objects(folder)
    assert (stored["/out.jsonl"], stored["/out.jsonl.rejects"]) == (expected, rejected)
    assert json.loads(stored["/out.jsonl.info.json"])["input"] == f"{folder}/in.jsonl"
    (folder / "in.jsonl").write_bytes(given + given[:0] + given.splitlines(keepends=True)[0].replace(b'"c0"', b'"new"'))
    with pytest.raises(ValueError, match="request"):
        score_file(Lengths(), folder / "in.jsonl", folder / "out.jsonl", on_error="skip")
    assert objects(folder)["/out.jsonl"] == expected


class Interrupted(Lengths):
    """A scorer of another name, during whose run another run begins."""

    name, identity = "other", {"model": "other"}

    def __init__(self, meanwhile, after):
        self.meanwhile, self.after = meanwhile, after

    def score_many(self, records):
        for count, record in enumerate(super().score_many(records)):
            if count == self.after:
                self.meanwhile()
            yield record


def test_of_two_runs_with_one_output_none_takes_what_is_the_others(folder, scored):
    given, expected, _ = scored
    (folder / "in.jsonl").write_bytes(given)

    def score(scorer, out):
        score_file(scorer, folder / "in.jsonl", folder / out, on_error="skip")

    with pytest.raises(ValueError, match="begun"):  # before the first piece: the later wins
        score(Interrupted(lambda: score(Lengths(), "a.jsonl"), 1), "a.jsonl")
    assert objects(folder)["/a.jsonl"] == expected

    def later():
        refused(ValueError, "request", score, Lengths(), "b.jsonl")

    score(Interrupted(later, CHUNK + 1), "b.jsonl")  # after it the first does
    assert json.loads(objects(folder)["/b.jsonl.info.json"])["model"] == "other"


def test_the_input_is_no_output(folder):
    refused(ValueError, "input", check_output, folder / "f", (folder / "f").url)
    assert path_of("runs/a://b").name == "b" and not storage.is_remote("/tmp/x") and storage.is_remote(folder)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("rl e.py --workdir w --set working=gs://b/e", "working=gs://b/e: is to be a file or folder of this machine"),
        ("eval gs://b/e.py:MINE --json out.json", "gs://b/e.py:MINE: is to be a file or folder of this machine"),
        ("train e.py --workdir w --set data.cache=s3://b/m", "data.cache=s3://b/m: is to be a file or folder"),
        ("annotate export gs://b/m --output out", "gs://b/m: is to be a file or folder of this machine"),
        ("score --model m --input nowhere://b/f --output out.jsonl", "nowhere://b/f: ValueError: Protocol not known"),
        ("score --model m --input memory://bucket/none --output out.jsonl", "memory://bucket/none: no such object"),
    ],
)
def test_what_is_not_there_is_one_line(line, said, capsys):
    assert cli.main(line.split()) == 2
    assert capsys.readouterr().err.startswith(f"error: {said}")


@pytest.mark.parametrize(
    ("file", "name", "place", "good"),
    [
        ("/models/a/adapter.json", "/models/b", "", True),
        ("/models/a/adapter.json", "b", "", True),
        ("/models/a/adapter.json", "http://127.0.0.1:9/b", "", False),
        ("/models/a/adapter.json", "gs://bucket/b", "", False),
        ("gs://bucket/a/adapter.json", "gs://bucket/b", "", True),
        ("gs://bucket/a/adapter.json", "gs://other/b", "", False),
        ("gs://bucket/a/adapter.json", "s3://bucket/b", "", False),
        ("/cache/a/adapter.json", "gs://bucket/b", "gs://bucket/a", True),
        ("/cache/a/adapter.json", "gs://other/b", "gs://bucket/a", False),
    ],
)
def test_a_file_of_a_folder_names_no_address_elsewhere(file, name, place, good):
    if good:
        check_named(file, "reference", name, place)
    else:
        refused(ValueError, "nothing is downloaded", check_named, file, "reference", name, place)


def test_a_models_folder_names_no_address(tmp_path):
    fields = {"like": "eurus", "reference": "http://127.0.0.1:9/secret/model"}
    (tmp_path / "adapter.json").write_text(json.dumps(fields))
    refused(ValueError, "nothing is downloaded", published, tmp_path)
    experiment = types.SimpleNamespace(reference="http://127.0.0.1:9/secret/model")
    refused(ValueError, "nothing is downloaded", loading._log_ratio, tmp_path, experiment, 0.1, None, None, None)
