"""Cases of a family: a few stay in the quick suite, the others are marked `breadth` (docs/contributing.md says why)."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def breadth(cases: Iterable[Any], but: Collection[Any] = ()) -> list[Any]:
    """Returns the cases, all marked `breadth` except those in `but`, e.g. `breadth(["int8", "nf4"], but=["nf4"])`.

    A tuple has a value per argument of the test, as in `pytest.mark.parametrize`.
    """
    return [case if case in but else pytest.param(*_values(case), marks=pytest.mark.breadth) for case in cases]


def _values(case: Any) -> tuple[Any, ...]:
    return case if isinstance(case, tuple) else (case,)
