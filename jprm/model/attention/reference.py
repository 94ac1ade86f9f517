"""Attention by the rule written out, with memory O(T^2): what the other implementations are tested against."""

from __future__ import annotations

import functools

from jprm.model.attention.blocked import attend, plan
from jprm.model.attention.interface import Implementation

REFERENCE = Implementation(plan, functools.partial(attend, at_once=True))
