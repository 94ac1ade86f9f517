"""Property tests with fresh examples: `make fuzz`, or `python tests/fuzz.py --minutes 10 [arguments of pytest]`.

Runs all tests that hypothesis drives, again and again in one process, until the time is over. Prints every failure as a
case to keep. Exits with status 1 if there was one.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
import time
from pathlib import Path

import pytest

os.environ["HYPOTHESIS_PROFILE"] = "fuzz"  # see tests/conftest.py


class Cases:
    """A pytest plugin that collects failures by test and stops a round when the time is over."""

    def __init__(self, end: float):
        self.end, self.failures, self.passed = end, {}, 0

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.failures[report.nodeid] = case(report.longreprtext)
        self.passed += report.passed and report.when == "call"

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:  # a broken test file: no round would run it
            self.failures[report.nodeid], self.end = report.longreprtext, 0

    def pytest_runtest_teardown(self, item: pytest.Item) -> None:
        if time.monotonic() > self.end:
            item.session.shouldstop = "the time is over"


def case(text: str) -> str:
    """Returns a report's falsifying example as a decorator of its test; the whole report if there is none."""
    text = re.sub(
        r"^(E   )?(\s*\| ?)?", "", text, flags=re.MULTILINE
    )  # pytest's margin, and that of an exception group
    match = re.search(r"^(?:Falsifying example|Failing test case): \w+\((.*?)^\)", text, re.MULTILINE | re.DOTALL)
    return f"@example({match[1]})" if match else text


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=10)
    options, rest = parser.parse_known_args()
    cases, rounds = Cases(time.monotonic() + 60 * options.minutes), 0
    tests = Path(__file__).parent
    args = ["-m", "hypothesis and not slow", "-p", "no:cacheprovider", "--tb=short", "--durations=0", "--rootdir"]
    while not rounds or time.monotonic() < cases.end:
        rounds += 1
        if pytest.main([*args, str(tests.parent), *(rest or [str(tests)])], plugins=[cases]) > 2:
            break  # not passed, failed or stopped: no tests, or wrong arguments
    print(f"{rounds} rounds, {cases.passed} tests passed, {len(cases.failures)} failed")
    for test, example in cases.failures.items():
        print(f"\n{test}: keep as\n{example}")
    return bool(cases.failures)


if __name__ == "__main__":
    sys.exit(main())
