"""Files of a bucket on this machine's disk, for what is read at random places: data, base models, tokenizers."""

from __future__ import annotations

import hashlib
import json
import os
import pathlib
from collections.abc import Sequence

from jprm.io.folders import made_once
from jprm.io.storage import Remote, cache_folder, path_of


def local_copy(path: str | os.PathLike, names: Sequence[str] = ()) -> pathlib.Path:
    """Returns a path of this machine unchanged; or a copy of the object, or of the files directly in a bucket's folder.

    A copy is made once and kept in ~/.cache/jprm/buckets under a name that holds sizes and versions of the objects, so
    that changed objects make another. It may be removed when no command uses it.

    Args:
      names: of a folder's files, if not all are needed.

    Raises:
      FileNotFoundError: nothing is there.
      OSError: the bucket cannot be read, or its objects change meanwhile.
    """
    remote = path_of(path)
    if not isinstance(remote, Remote):
        return remote
    files = _files(remote, names)
    if not files:
        raise FileNotFoundError(f"{remote}: no such file or folder" + (f" with {' or '.join(names)}" if names else ""))
    stamps = {file.url: file.stamp() for file in files}
    digest = hashlib.sha256(json.dumps(stamps, sort_keys=True).encode()).hexdigest()[:16]

    def fetch(new: pathlib.Path) -> None:
        for file in files:
            target = _below(new, file)
            target.parent.mkdir(parents=True, exist_ok=True)
            file.download(target)
            if file.stamp() != stamps[file.url] or target.stat().st_size != stamps[file.url]["bytes"]:
                raise OSError(f"{file}: changed while it was copied. Run the command again when it is complete")

    return _below(made_once(cache_folder("buckets") / digest, fetch), remote)


def _files(remote: Remote, names: Sequence[str]) -> list[Remote]:
    if remote.is_file():
        return [remote]
    return [remote / name for name in remote.names() if name in names or not names]


def _below(folder: pathlib.Path, remote: Remote) -> pathlib.Path:
    """Returns where the copy is: a path that ends in the address, so that errors show it."""
    return folder / remote.url.replace("://", "/")
