"""`jprm serve`: scores over HTTP. Here is what its options say; the other files need a web framework."""

from __future__ import annotations

import dataclasses
from typing import Literal

from jprm.apps.web import Listen

Weights = Literal["copied", "split"]
"""How several devices hold a model: each all of it, or each a part."""


@dataclasses.dataclass(frozen=True)
class ServeConfig(Listen):
    """How `jprm serve` listens and what it accepts.

    Attributes:
      longest: Tokens of the longest chain.
      prefix_tokens: Tokens whose keys and values stay on the device, so that a client that sends `prompt_cache_key` has
        of its next request only the changed part computed; 0 for none.
      queue_seconds: Seconds of work that may wait. Further requests get status 503 and the time to come back after.
      answer_seconds: Seconds in which a request is answered, or gets status 504.
    """

    longest: int = 8192
    prefix_tokens: int = 4096
    queue_seconds: float = 30.0
    answer_seconds: float = 120.0

    def __post_init__(self):
        super().__post_init__()
        if self.prefix_tokens < 0:
            raise ValueError(f"prefix_tokens is {self.prefix_tokens}: it must be 0 or more")
        for field in ("longest", "queue_seconds", "answer_seconds"):
            if not getattr(self, field) > 0:
                raise ValueError(f"{field} is {getattr(self, field)}: it must be above 0")
