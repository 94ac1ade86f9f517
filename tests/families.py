"""Cases of a family: a few stay in the quick suite, the others are marked `breadth` (see docs/contributing.md)."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def breadth(cases: Iterable[Any], but: Collection[Any] = ()) -> list[Any]:
    """Marks the cases `breadth`, except the ones in `but`, e.g. `breadth(["int8", "nf4"], but=["nf4"])`.

    If a test has several arguments, each case must be a tuple with one value per argument.
    """
    return [case if case in but else pytest.param(*_values(case), marks=pytest.mark.breadth) for case in cases]


def _values(case: Any) -> tuple[Any, ...]:
    return case if isinstance(case, tuple) else (case,)
