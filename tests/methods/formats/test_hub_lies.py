"""A server in the Hub's place that lies: no file outside of the cache, no token elsewhere, an end, and one line."""

import contextlib
import gzip
import itertools
import pathlib
import socket
import time
import types

import local_hub
import pytest
from huggingface_hub import close_session, constants
from local_hub import COMMIT
from refusing import refused

from jprm.apps import cli
from jprm.io.storage import path_of
from jprm.methods.formats import hub
from jprm.options import place_of

TOKEN = "hf_secretsecretsecret"


@pytest.fixture
def lying(tmp_path, monkeypatch):
    """The hub, and another host, which is one too."""
    servers = local_hub.LocalHub(), local_hub.LocalHub()
    with contextlib.ExitStack() as stack:
        address, elsewhere = (stack.enter_context(local_hub.serving(server)) for server in servers)
        template = address + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "ENDPOINT", address)
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "home/cache"))
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home/ours"))
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        monkeypatch.setenv("HF_ENDPOINT", address)
        monkeypatch.chdir(tmp_path)
        for server in servers:
            server.repositories["ana/mine"] = {"config.json": b'{"a": 1}', "model.safetensors": b"0" * 5_000}
            server.token = TOKEN
        hub.folder.cache_clear()
        hub._resolved.cache_clear()
        local_hub.asked_what_asks(servers[0])
        yield *servers, elsewhere
    close_session()


def fetched_nothing(tmp_path):
    """No file beside the caches, and none in them but what the library keeps of a listing and of a branch."""
    assert {path.name for path in tmp_path.iterdir()} <= {"home"}
    return not list((tmp_path / "home").rglob("*.py")) and not list(tmp_path.rglob("*pwned*"))


ESCAPES = "\x1b]0;x\x07\x1b[2J"
COMMITS = [
    "w/victim", "../../../../../pwned", "/tmp/pwned", 7, None, "c" * 39, "c" * 39 + "\n", "c" * 20 + "\0" + "d" * 19,
    "C" * 40, "c" * 5_000, ESCAPES + "c" * 28, ["c" * 40], {"a": 1}, True,
]  # fmt: skip


@pytest.mark.parametrize("sha", COMMITS, ids=range(len(COMMITS)))
def test_a_commit_has_forty_hexadecimal_digits(lying, tmp_path, capfd, sha):
    lying[0].lies["sha"] = sha
    assert cli.main(["convert", "hf://ana/mine@main", str(tmp_path / "out")]) == 2
    lines = capfd.readouterr().err.splitlines()
    assert len(lines) == 1 and lines[0].startswith("error: hf://ana/mine@main: ") and "\x1b" not in lines[0], lines
    assert fetched_nothing(tmp_path) and not list(tmp_path.rglob("refs/*"))


def replaced(**fields):
    return lambda listing: [file | fields for file in listing]


LISTINGS = {
    "oid": replaced(oid="../../../../../pwned"),
    "oid that is none": replaced(oid=None),
    "oid by file": lambda listing: [file | {"oid": f"w/drop/{file['path']}.py"} for file in listing],
    "lfs": replaced(lfs={"oid": "../../x", "size": 3, "pointerSize": 1}),
    "lfs that is a text": replaced(lfs="x"),
    "size": replaced(size=-5),
    "size that is a text": replaced(size="x"),
    "no path": lambda listing: [{"type": "file"}],
    "a path that is a number": replaced(path=7),
    "an object": lambda listing: {"a": 1},
    "a number": lambda listing: 7,
    "numbers": lambda listing: [7],
}


@pytest.mark.parametrize("listing", LISTINGS.values(), ids=LISTINGS)
def test_a_listing_is_one(lying, tmp_path, listing):
    lying[0].lies["listing"] = listing
    refused((OSError, ValueError), "^hf://ana/mine@main: ", place_of, "hf://ana/mine@main")
    assert fetched_nothing(tmp_path) and not lying[0].gets(".json")


@pytest.mark.parametrize("answer", [b"[" * 100_000 + b"]" * 100_000, b"<html>log in</html>", b"\xff", b'"x"', b""])
def test_an_answer_that_is_no_json_of_a_hub_is_one_line(lying, tmp_path, answer):
    lying[0].lies["answer"] = answer
    for address in ("hf://ana/mine@main", f"hf://ana/mine@{COMMIT}"):
        refused((OSError, ValueError), f"^{address}: ", place_of, address)
    assert fetched_nothing(tmp_path)


@pytest.mark.parametrize("headers", [
    {"ETag": '"w/drop/{file}.py"'}, {"ETag": '"../../../../../pwned"'}, {"ETag": "x"},
    {"X-Linked-Etag": '"/tmp/pwned"'}, {"X-Repo-Commit": "../../../../pwned"}, {"ETag": '"' + "d" * 41 + '"'},
    {"X-Xet-Hash": "e" * 64, "X-Xet-Refresh-Route": "http://127.0.0.1:9/token"},
])  # fmt: skip
def test_headers_name_no_path_and_no_other_host(lying, tmp_path, headers):
    lying[0].lies["headers"] = headers
    refused(OSError, "^hf://ana/mine@main: ", place_of, "hf://ana/mine@main")
    assert fetched_nothing(tmp_path)


def test_names_with_signs_are_not_fetched(lying):
    for name in (
        "[!x].json",
        "*.json",
        "a\nb.json",
        "\x1b]0;x\x07.json",
        "..\\..\\x.json",
        "../../pwned.json",
        "\u202e.json",
    ):
        lying[0].repositories["ana/mine"][name] = b"{}"
    names = {file.name for file in place_of("hf://ana/mine@main").files()}
    assert names == {"config.json", "model.safetensors"}


def test_the_next_page_of_a_listing_is_of_the_hub(lying):
    server, other, elsewhere = lying
    server.lies["link"] = f"{elsewhere}/api/models/ana/mine/tree/{COMMIT}"
    refused(OSError, "another host", place_of, "hf://ana/mine@main")
    assert not other.asked and server.tokens[0] == f"Bearer {TOKEN}"


def test_a_listing_has_an_end(lying, monkeypatch):
    monkeypatch.setattr(hub, "PAGES", 5)
    lying[0].lies["pages"] = True
    refused(OSError, "more than 5 pages", place_of, "hf://ana/mine@main")
    assert len(lying[0].asked) < 10


def test_a_server_that_drips_is_left(lying, monkeypatch):
    """By a clock that goes on by a minute at each look, so that no pause of this machine is the server's."""
    looks = itertools.count(step=60.0)
    lying[0].lies["slowly"] = lambda pause=time.sleep: pause(0.02)
    with monkeypatch.context() as patch:
        patch.setattr(hub, "time", types.SimpleNamespace(monotonic=lambda: next(looks)))
        for address in ("hf://ana/mine@main", f"hf://ana/mine@{COMMIT}"):
            refused(OSError, "bytes in", place_of, address)
    del lying[0].lies["slowly"]
    assert place_of(f"hf://ana/mine@{COMMIT}", ("config.json",)).is_dir()


@pytest.mark.parametrize("late", [False, True], ids=["open", "late"])
def test_a_server_that_drips_its_headers_is_left(lying, monkeypatch, late):
    """Also if the connection opens only after its time."""
    connect = socket.create_connection
    if late:
        monkeypatch.setattr(socket, "create_connection", lambda *how, **more: time.sleep(0.6) or connect(*how, **more))
    monkeypatch.setattr(hub, "BEGIN_S", 0.3)
    lying[0].lies |= {"slowly": lambda pause=time.sleep: pause(0.02), "headers slowly": True}
    began = time.monotonic()
    refused(OSError, "begun to answer|cannot be reached", place_of, "hf://ana/mine@main")
    assert time.monotonic() - began < 200  # the headers take 1,200


@pytest.mark.parametrize(
    "body", [b"0" * 100_000, b"0" * 5_001, gzip.compress(b"0" * 5_000, mtime=0)], ids=["long", "one", "zip"]
)
def test_a_file_is_no_longer_than_its_listing_says(lying, tmp_path, body):
    lying[0].lies |= {"body": body}
    refused(OSError, "bytes|damaged|broke off", place_of, "hf://ana/mine@main")
    assert not list(tmp_path.rglob("*.incomplete"))


def test_a_compressed_answer_is_not_unpacked(lying):
    bomb = gzip.compress(b"\0" * 10_000_000)
    lying[0].lies |= {"body": bomb, "headers": {"Content-Encoding": "gzip"}}
    refused(OSError, "compressed", place_of, "hf://ana/mine@main")


def test_a_snapshot_that_leads_out_of_the_cache_is_refused(lying, tmp_path):
    place = place_of("hf://ana/mine@main")
    hub.folder.cache_clear()
    (tmp_path / "outside.json").write_bytes(b"{}")
    (place / "config.json").unlink()
    pathlib.Path(place / "config.json").symlink_to(tmp_path / "outside.json")
    refused(OSError, "out of the cache", place_of, "hf://ana/mine@main")
    assert (tmp_path / "outside.json").exists()


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
def test_a_push_stays_at_the_hub(lying, tmp_path, monkeypatch, capfd, status):
    server, other, elsewhere = lying
    monkeypatch.setattr("jprm.methods.export.export.export", lambda source, target, **options: path_of(target))
    (tmp_path / "written").mkdir()
    (tmp_path / "written/model.safetensors").write_bytes(b"1234")
    server.lies |= {"redirect": elsewhere, "status": status}
    assert cli.main(["convert", "runs/mine", str(tmp_path / "written"), "--push", "ana/mine"]) == 2
    assert not other.asked and not other.pushed
    out, err = capfd.readouterr()
    assert "uploaded" not in out and TOKEN not in out + err


def test_the_commit_of_a_push_is_one(lying, tmp_path, monkeypatch):
    server, *_ = lying
    server.lies["sha"] = ESCAPES
    (tmp_path / "written").mkdir()
    (tmp_path / "written/README.md").write_bytes(b"1234")
    refused(OSError, "as a commit", hub.push, path_of(tmp_path / "written"), "ana/mine")
