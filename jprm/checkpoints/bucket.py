"""Checkpoints in a bucket: whole where they hold `commit_success.txt`, which is written last and removed first.

Orbax writes to Google Cloud Storage itself, every process its own arrays. It writes to no other store: there one
process saves to its disk, and the files are uploaded from it.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import jax
from fsspec.config import conf
from orbax.checkpoint import v1 as ocp

from jprm.io.storage import Remote, cache_folder

MARK = "commit_success.txt"
"""Orbax's own name."""


def open_checkpoints(
    remote: Remote, given: Mapping[str, Any], keep: int | None, keep_every: int
) -> ocp.training.Checkpointer | Staged:
    """Opens the checkpoints of a bucket with Orbax's arguments; as `jprm.checkpoints.store.open_checkpoints`.

    Raises ValueError for a store that several processes cannot write to.
    """
    if remote.url.startswith("gs://"):
        # What TensorStore and other hosts write would be missing in a listing that is kept.
        conf.setdefault("gcs", {}).setdefault("use_listings_cache", False)
        return ocp.training.Checkpointer(remote.url, **given)
    if keep is not None and jax.process_count() > 1:
        raise ValueError(f"{remote}: checkpoints of several processes go to gs:// or to a folder that all can write to")
    return Staged(remote, given, keep, keep_every)


def committed(remote: Remote) -> list[int]:
    """Returns the steps of the whole checkpoints, in order."""
    marks = (file.parent for file in remote.files() if file.name == MARK)
    return sorted(int(step.name) for step in marks if step.parent == remote and step.name.isdigit())


class Staged:
    """Checkpoints that are saved on this machine's disk and uploaded from there, in the background.

    It has the attributes of Orbax's Checkpointer that runs use. The disk holds the newest checkpoint and the one that
    is being saved, while this object is open.
    """

    def __init__(self, remote: Remote, given: Mapping[str, Any], keep: int | None, keep_every: int):
        self.directory, self._keep, self._keep_every = remote, keep, keep_every
        name = hashlib.sha256(remote.url.encode()).hexdigest()[:16]
        name += f"-{os.getpid()}" if keep is None else ""  # the run that writes is one, and clears what a kill left
        self._folder = cache_folder("checkpoints") / name
        shutil.rmtree(self._folder, ignore_errors=True)
        if steps := committed(remote):
            (remote / str(steps[-1])).download_folder(self._folder / str(steps[-1]))
        newest = ocp.training.preservation_policies.LatestN(1)
        self._inner = ocp.training.Checkpointer(str(self._folder), **{**given, "preservation_policy": newest})
        self._uploader, self._uploading = ThreadPoolExecutor(1), Future[None]()
        self._uploading.set_result(None)

    def __enter__(self) -> Staged:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def latest(self) -> Any:
        return self._inner.latest

    def checkpointables_metadata(self, step: int) -> Any:
        return self._inner.checkpointables_metadata(step)

    def load_checkpointables(self, step: int, wanted: dict[str, Any]) -> dict[str, Any]:
        return self._inner.load_checkpointables(step, wanted)

    def save_checkpointables_async(self, step: int, parts: dict[str, Any], *, overwrite: bool = False) -> None:
        self.wait()
        self._inner.save_checkpointables_async(step, parts, overwrite=overwrite)
        self._uploading = self._uploader.submit(self._upload, step)

    def wait(self) -> None:
        """Waits until the last checkpoint is in the bucket. Raises what kept it from there."""
        self._inner.wait()
        self._uploading.result()

    def close(self) -> None:
        try:
            self.wait()
        finally:
            self._uploader.shutdown()
            with contextlib.suppress(Exception):  # of a save that failed, which `wait` raises
                self._inner.close()
            shutil.rmtree(self._folder, ignore_errors=True)

    def _upload(self, step: int) -> None:
        self._inner.wait()
        place = self.directory / str(step)
        place.remove_folder(first=MARK)  # what a killed run left of it
        place.upload_folder(self._folder / str(step), last=MARK)
        steps = committed(self.directory)
        kept = {s for s in steps if self._keep_every and s % self._keep_every == 0}
        kept |= set(steps[-self._keep :] if self._keep else steps)
        found = {file.url.removeprefix(f"{self.directory}/").partition("/")[0] for file in self.directory.files()}
        for other in found - set(map(str, kept)):
            (self.directory / other).remove_folder(first=MARK)
