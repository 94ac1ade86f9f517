"""Runs are found at any depth, and none within another."""

import pytest

from jprm.apps.report.runs import find_runs
from jprm.checkpoints.kinds import RUN
from jprm.io.storage import path_of


@pytest.fixture(params=["disk", "bucket"])
def root(request, tmp_path):
    return path_of(tmp_path if request.param == "disk" else f"{request.getfixturevalue('s3')}/runs")


def test_nested_runs(root):
    for name in ("b", "a/deep/er", "a/deep/er/checkpoints/1", "c"):
        (root / name).mkdir(parents=True, exist_ok=True)
        (root / name / RUN).write_bytes(b"{}")
    (root / "d").mkdir(exist_ok=True)
    (root / "d" / "notes.txt").write_bytes(b"x")
    assert find_runs([root]) == [root / "a/deep/er", root / "b", root / "c"]
    assert find_runs([root / "b", root / "a"]) == [root / "b", root / "a/deep/er"]
    with pytest.raises(FileNotFoundError, match="d"):
        find_runs([root / "d"])
