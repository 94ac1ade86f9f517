"""`make fuzz` finds a failing example, prints it as a case, and the suite itself draws the same examples every time."""

import os
import subprocess
import sys
from pathlib import Path

import hypothesis

FUZZ = Path(__file__).parent / "fuzz.py"

PROPERTY = """
from hypothesis import given, strategies as st

@given(st.integers(0, 10**6))
def test_small(n):
    assert n < 1000
"""


def test_a_failure_is_printed_as_a_case(tmp_path):
    file = tmp_path / "test_property.py"
    file.write_text(PROPERTY)
    environment = {key: value for key, value in os.environ.items() if key != "HYPOTHESIS_PROFILE"}
    run = subprocess.run(
        [sys.executable, str(FUZZ), "--minutes", "0.001", str(file), "--confcutdir", str(tmp_path)],
        capture_output=True, text=True, env=environment, cwd=tmp_path, timeout=300,
    )  # fmt: skip
    assert run.returncode == 1, run.stdout + run.stderr
    assert "test_small: keep as\n@example(\n    n=1000,\n)" in run.stdout


def test_the_suite_draws_the_same_examples():
    if os.environ.get("HYPOTHESIS_PROFILE") != "fuzz":
        assert hypothesis.settings().derandomize
