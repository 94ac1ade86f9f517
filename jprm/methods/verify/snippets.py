"""Runs blocks of Python that a text shows one after another, in the sandbox, for what the last of them prints."""

from __future__ import annotations

import json
from collections.abc import Sequence

from jprm.methods.verify.sandbox import Limits, python, run

LIMITS = Limits(seconds=5.0, memory=1 << 30)

LONGEST = 2000
"""Characters of output that are kept."""

_RUNNER = """
import contextlib, io, json, sys
names = {"__name__": "__main__"}
*earlier, last = json.load(sys.stdin)
with contextlib.redirect_stdout(io.StringIO()):
    for block in earlier:
        try:
            exec(block, names)
        except Exception:  # it was printed when this block was the last
            pass
try:
    exec(last, names)
except Exception as error:
    print(f"{type(error).__name__}: {error}")
"""


def printed(blocks: Sequence[str], limits: Limits = LIMITS) -> str:
    """Returns what the last block prints after the earlier ones, with its error if it raises one.

    Only the standard library is available. `limits` are of all blocks together.

    Raises:
      OSError: there is no sandbox.
    """
    outcome = run([python(), "-I", "-S", "-c", _RUNNER], json.dumps(list(blocks)), limits)
    output = outcome.output.strip()
    if outcome.status is None:
        output += f"\nTimeoutError: longer than {limits.seconds:g} seconds"
    elif outcome.status < 0:
        output += f"\nended by signal {-outcome.status}"
    return output.strip()[:LONGEST]
