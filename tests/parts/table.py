"""Prints the table in docs/extending.md, a row per part: python tests/parts/table.py [PART ...]"""

import sys
from pathlib import Path

sys.path[:0] = [str(folder) for folder in Path(__file__).resolve().parents[1:3]]

import conftest  # noqa: F401, E402  (eight devices, and the folders of tests)
import test_check_part as tested  # noqa: E402

from jprm.testing import CHECKS, examine  # noqa: E402


def cell(row):
    """Returns a difference, marked if it is too large, or the row's status; nothing if the check does not apply."""
    if row.difference is None:
        return "" if row.status == "not applicable" else row.status
    return f"**{row.difference:.0e}**" if row.wrong else f"{row.difference:.0e}"


def main():
    parts = tested.REGISTERED | tested.OWN
    shown = [check for check in CHECKS if check != "gradients"]
    print("| part |", " | ".join(shown), "|\n|---|" + "---|" * len(shown))
    for name in sys.argv[1:] or parts:
        report = examine(parts[name], tokenise=tested.tokenised(name))
        print(f"| {name} |", " | ".join(cell(report[check]) for check in shown), "|", flush=True)
        for row in report.rows:
            if row.note:
                print(f"{name}, {row.check}: {row.note}", file=sys.stderr, flush=True)


main()
