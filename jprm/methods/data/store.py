"""Writes prepared folders: records as ArrayRecord, by TFDS without TensorFlow. `jprm.data` reads them."""

from __future__ import annotations

import contextlib
import errno
import io
import os
import pathlib
import shutil
from collections.abc import Iterable, Iterator
from typing import Any

import tensorflow_datasets as tfds

from jprm.io import jsonl
from jprm.methods.data.reader import Record


class Records(tfds.core.GeneratorBasedBuilder):
    """The TFDS builder of jprm: a reader's records, in order, as the split `train`.

    A record is one JSON line in a `Text` feature, so that it comes back exactly, with unknown keys. Trees differ in
    keys and depth, which a fixed feature spec could only hold by padding and renaming.
    """

    VERSION = tfds.core.Version("1.0.0")

    def __init__(self, records: Iterable[tuple[str, Record]], **kwargs: Any):
        self._records = records
        super().__init__(file_format="array_record", **kwargs)  # the default, TFRECORD, needs TensorFlow

    def _info(self) -> tfds.core.DatasetInfo:
        features = tfds.features.FeaturesDict({"record": tfds.features.Text()})
        info = tfds.core.DatasetInfo(builder=self, features=features, disable_shuffling=True)
        info.initialize_from_bucket = lambda: None  # it would ask a server, and leaves a folder in /tmp
        return info

    def _split_generators(self, dl_manager: tfds.download.DownloadManager) -> dict[str, Any]:
        return {"train": self._generate_examples()}

    def _generate_examples(self) -> Iterator[tuple[str, dict[str, str]]]:
        for key, record in self._records:
            yield key, {"record": jsonl.dump(record)}


def write(folder: pathlib.Path, records: Iterable[tuple[str, Record]]) -> int:
    """Writes (unique key, record) pairs into a new folder, in order; returns how many.

    Raises:
      Exception: an error of the iterable, unchanged.
      OSError: a full disk, or another error of writing.
    """
    count, failure = 0, None

    def watched() -> Iterator[tuple[str, Record]]:  # TFDS rewrites the messages of errors that pass through it
        nonlocal count, failure
        try:
            for pair in records:
                count += 1
                yield pair
        except Exception as error:  # of a reader, of any class: raised again below as it was
            failure = error
            raise

    tfds.disable_progress_bar()
    work = folder / "tfds"
    builder = Records(watched(), data_dir=work)
    try:
        with contextlib.redirect_stdout(io.StringIO()):  # it announces a download
            builder.download_and_prepare()
    except Exception as error:  # TFDS has no class for "no records", nor for an error of the iterable
        if failure is None and count > 0:
            raise OSError(errno.EIO, f"could not be written: {error}", os.fspath(folder)) from error
    if failure is not None:
        raise failure
    if count == 0:
        return 0
    for file in pathlib.Path(builder.data_dir).iterdir():
        file.rename(folder / file.name)
    shutil.rmtree(work)
    return count
