"""Layouts: how one chain becomes token ids.

The problem and each step are encoded alone and their ids concatenated. A joined string is never tokenised again: merges
across a boundary would move the step's end. A step's score is read at its last token.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Protocol

from jprm.tokenizer import Tokenizer


class Layout(Protocol):
    """Token ids of a chain, piece by piece, exactly as the model saw them in training."""

    @property
    def tokenizer(self) -> Tokenizer: ...

    def problem(self, text: str) -> list[int]:
        """Returns the ids that every chain of the problem starts with."""
        ...

    def step(self, text: str, number: int) -> list[int]:
        """Returns the ids of the step at 0-based depth `number`, never empty; its score is read at the last one."""
        ...


@dataclasses.dataclass(frozen=True)
class NativeLayout:
    """jprm's own layout: `[bos] problem newline`, then `step newline` each; bos where the tokenizer has one."""

    tokenizer: Tokenizer

    @functools.cached_property
    def newline(self) -> tuple[int, ...]:
        return tuple(self.tokenizer.encode("\n"))

    def problem(self, text: str) -> list[int]:
        bos = [] if self.tokenizer.bos is None else [self.tokenizer.bos]
        return [*bos, *self.tokenizer.encode(text), *self.newline]

    def step(self, text: str, number: int) -> list[int]:
        del number  # plain text says nothing of depth
        return [*self.tokenizer.encode(text), *self.newline]
