"""Files and folders of this machine and of buckets: in fsspec's memory, and in the servers of `buckets` if there."""

import dataclasses
import json
import os

import fsspec
import pytest
from buckets import objects
from refusing import refused

from jprm import data
from jprm.apps import cli
from jprm.io import storage
from jprm.io.folders import local_copy
from jprm.io.outputs import atomic_write, check_output, input_of, stamp_of
from jprm.io.storage import Appended, Found, Local, Remote, mark_own, named_in, path_of
from jprm.methods.formats.adapters.load import load as published


def test_a_file_of_any_place(place):
    file, other = place / "a/b.txt", place / "a/c"
    assert not (file.exists() or place.exists() or file.holds_bytes()) and place.files() == []
    atomic_write(file, "one")
    assert (file.read_bytes(), file.read_text(), file.holds_bytes()) == (b"one", "one", True)
    assert file.is_file() and (place / "a").is_dir() and not (place / "a").is_file()
    assert path_of(str(file)) == file and (file.name, file.parent, file.with_name("c")) == ("b.txt", place / "a", other)
    assert (file.suffix, file.stem, file.address) == (".txt", "b", str(file))
    before, stamp = input_of(file), stamp_of(file)
    assert before["input"] == str(file) and (before, stamp) == (input_of(str(file)), stamp_of(str(file)))
    with file.reading() as opened:
        assert opened.read() == b"one"
    with pytest.raises(ValueError, match="changed"), file.reading():
        file.write_bytes(b"six\n")
    assert input_of(file) != before and stamp_of(file) != stamp
    with pytest.raises(KeyboardInterrupt), file.replacing() as new:
        new.write(b"half of it")
        raise KeyboardInterrupt
    assert file.read_bytes() == b"six\n" and place.files() == [file]
    if file.append(b"more\n"):
        assert file.read_bytes() == b"six\nmore\n"
    other.write_bytes(b"")
    assert place.files() == [file, other] and place.folders_with("c") == [place / "a"] and other.files() == [other]
    assert other.modified() >= file.modified() - 1 and len(place.contents()) == 2
    assert file.is_same(str(file)) and not file.is_same(other)
    refused(ValueError, "input", check_output, file, str(file))
    other.unlink()
    other.unlink(missing_ok=True)
    for call in (other.read_bytes, other.check_readable, other.modified):
        refused(FileNotFoundError, "a/c", call)


def test_a_folder_of_any_place_is_filled_with_files(place):
    with (place / "deep/er").filling() as folder, (Local(folder) / "x").replacing() as file:
        file.write(b"x")
    assert [file.read_bytes() for file in place.files()] == [b"x"] and place.folders_with("x") == [place / "deep/er"]


def test_a_file_that_grows_in_any_place_is_cut_and_becomes_whole(place):
    part, late = place / "f.part", b"of another process"
    with part.growing("mine") as file:
        file.write(b"one\ntwo\n")
        file.flush()
        file.write(b"three\n")
        file.flush()
    assert part.holds_bytes()
    with part.growing("mine") as file:
        file.seek(0)
        assert (file.readline(), file.tell(), list(file)) == (b"one\n", 4, [b"two\n", b"three\n"])
        file.truncate(4)
        file.write(b"2\n")
        file.flush()
        with pytest.raises(ValueError, match="writing"), part.growing("mine") as other:
            other.write(late)
            other.flush()
            file.write(b"lost\n")
            file.flush()
    with part.growing("mine") as file:
        file.become(place / "whole")
    assert place.files() == [place / "whole"]
    assert (place / "whole").read_bytes().removesuffix(late) == b"one\n2\n"  # in a bucket the other was the first
    part.discard()


def test_a_file_in_a_bucket_grows_by_whole_objects(bucket):
    with Appended(bucket / "f") as file:
        file.write(b"one\ntwo\n")
        file.flush()
        file.write(b"three\n")
        file.flush()
        file.write(b"lost by the kill\n")
    assert objects(bucket) == {"/f/000000000000000": b"one\ntwo\n", "/f/000000000000008": b"three\n"}
    with Appended(bucket / "f") as file:
        file.truncate(4)
        file.write(b"2\n")
        file.flush()
    assert objects(bucket) == {"/f/000000000000000": b"one\n", "/f/000000000000004": b"2\n"}


def test_an_object_is_new_only_once(bucket):
    file = bucket / "a/b"
    file.write_bytes(b"one", new=True)
    with pytest.raises(FileExistsError):
        file.write_bytes(b"two", new=True)
    assert objects(bucket) == {"/a/b": b"one"} and (bucket / "a").names() == ["b"]


def test_what_a_bucket_holds_is_copied_once_and_again_when_it_changes(bucket, monkeypatch, tmp_path):
    for name, content in {"m/a": b"one", "m/b": b"two", "m/deeper/c": b"three"}.items():
        (bucket / name).write_bytes(content)
    here = local_copy(bucket / "m")
    assert {file.name: file.read_bytes() for file in here.iterdir()} == {"a": b"one", "b": b"two"}
    assert str(here).endswith(bucket.url.replace("://", "/") + "/m") and local_copy(tmp_path) == tmp_path
    assert local_copy((bucket / "m/b").url).read_bytes() == b"two"
    assert [file.name for file in local_copy(bucket / "m", names=["a", "none"]).iterdir()] == ["a"]
    with monkeypatch.context() as patch:
        patch.setattr(Remote, "download", lambda *_: pytest.fail("it is there"))
        assert local_copy(bucket / "m") == here
    (bucket / "m/b").write_bytes(b"four")
    assert (local_copy(bucket / "m") / "b").read_bytes() == b"four"
    refused(FileNotFoundError, "/n", local_copy, bucket / "n", names=["x", "y"])
    download = Remote.download

    def changing(self, file):
        download(self, file)
        self.write_bytes(b"longer than before")

    (bucket / "m/a").write_bytes(b"five")
    with monkeypatch.context() as patch, pytest.raises(OSError, match="m/a"):
        patch.setattr(Remote, "download", changing)
        local_copy(bucket / "m/a")


@pytest.mark.parametrize(
    ("line", "named"),
    [
        ("rl e.py --workdir w --set working=gs://b/e", "working=gs://b/e"),
        ("eval gs://b/e.py:MINE --json out.json", "gs://b/e.py:MINE"),
        ("train e.py --workdir w --set data.cache=s3://b/m", "data.cache=s3://b/m"),
        ("annotate export gs://b/m --output out", "gs://b/m"),
        ("score --model m --input nowhere://b/f --output out.jsonl", "nowhere://b/f"),
        ("score --model m --input memory://bucket/none --output out.jsonl", "memory://bucket/none"),
    ],
)
def test_what_is_not_there_is_one_line(line, named, capsys):
    assert cli.main(line.split()) == 2
    assert capsys.readouterr().err.startswith(f"error: {named}: ")


@pytest.mark.parametrize(
    ("folder", "name", "good"),
    [
        ("/models/a", "/models/b", True),
        ("/models/a", "b", True),
        ("/models/a", "http://127.0.0.1:9/b", False),
        ("/models/a", "gs://bucket/b", False),
        ("/models/a", "hf://a/b", False),
        ("memory://bucket/a", "memory://bucket/b", True),
        ("memory://bucket/a", "memory://other/b", False),
        ("memory://bucket/a", "s3://bucket/b", False),
    ],
)
def test_found_data_is_here_or_in_the_bucket_of_its_file(folder, name, good, tmp_path):
    if folder.startswith("/"):
        folder = f"{tmp_path}{folder}"
        os.makedirs(folder)
    file = path_of(folder) / "adapter.json"
    file.write_bytes(folder.encode())
    found = Found(file, "reference", name)
    if good:
        assert os.fspath(found.data()) == name
    else:
        refused(ValueError, "reference", found.data)
    with pytest.raises(TypeError):
        path_of(found)  # pyright: ignore[reportArgumentType]  # which the type checker finds first


def test_a_file_is_its_writers_own_with_its_content_on_his_machine(tmp_path, monkeypatch):
    file, copy = path_of(tmp_path / "verifier.json"), path_of(tmp_path / "copy.json")
    file.write_text("one")
    mark_own(file)
    copy.write_text("one")
    found, foreign = Found(copy, "sources[0]", "gs://b/model"), Found(file, "sources[0]", "gs://b/model")
    assert (
        found.written_here and found.trusted("is read") == "gs://b/model" and os.fspath(found.data()) == "gs://b/model"
    )
    file.write_text("two")
    assert not foreign.written_here
    refused(ValueError, "sources.*mark_own", foreign.trusted, "is read")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "another machine"))
    assert not found.written_here


@pytest.mark.parametrize("address", ["memory://b/../../x", "gs://b/a/./c", "memory://../x", "s3://b/x/.."])
def test_an_address_climbs_nowhere(address):
    refused(ValueError, "without . and ..", path_of, address)


def test_the_copy_of_a_bucket_stays_in_its_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    store, up = fsspec.filesystem("memory"), "/".join([".."] * 20)
    for name in (f"x/{up}{tmp_path}/out/config.json", f"run/1/{up}{tmp_path}/out/a"):
        store.pipe_file(f"/climbing/{name}", b"{}")
    found = Found(path_of("memory://climbing/run/experiment.json"), "base", "")
    named = dataclasses.replace(found, text=f"memory://climbing/x/{up}{tmp_path}/out")
    refused(ValueError, "without . and ..", lambda: local_copy(named.data()))
    with pytest.raises((ValueError, OSError)):
        Remote("memory://climbing/run/1").download_folder(tmp_path / "copy")
    assert not (tmp_path / "out").exists()


def test_a_model_of_the_hub_is_no_path():
    for make in (path_of, local_copy, data.load):
        refused(ValueError, "hf://a/b: is no file", make, "hf://a/b")


def test_a_models_folder_names_no_address(tmp_path):
    fields = {"like": "eurus", "reference": "http://127.0.0.1:9/secret/model"}
    (tmp_path / "adapter.json").write_text(json.dumps(fields))
    refused(ValueError, "reference", published, tmp_path)


@pytest.mark.parametrize(
    ("file", "name", "address"),
    [
        ("gs://x/a/suite.json", "b.json", "gs://x/a/b.json"),
        ("gs://x/a/suite.json", "../c/b.json", "gs://x/c/b.json"),
        ("gs://x/a/suite.json", "s3://other/b.json", "s3://other/b.json"),
        ("gs://x/suite.json", "/b", "/b"),
        ("/a/suite.json", "/b", "/b"),
        ("/a/suite.json", "b/c", "/a/b/c"),
    ],
)
def test_a_file_names_others(file, name, address):
    assert str(named_in(file, name)) == address


def test_a_path_is_no_address():
    assert path_of("runs/a://b").name == "b"
    assert not storage.is_remote("/tmp/x") and storage.is_remote(Remote("memory://x"))
