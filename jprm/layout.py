"""Layouts: how one chain becomes token ids.

A problem and each of its steps are encoded alone and their ids concatenated; a joined string is never tokenised again,
because merges across a boundary would move the step's end. The score of a step is read at the last token of its ids.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Protocol

from jprm.tokenizer import Tokenizer


class Layout(Protocol):
    """Ids of one chain, piece by piece, exactly as the model that reads them was trained.

    `end` is the token that a policy writes behind the last step; None where there is none.
    """

    @property
    def end(self) -> int | None: ...

    def problem(self, text: str) -> list[int]:
        """Ids that every chain of the problem starts with."""
        ...

    def step(self, text: str, number: int) -> list[int]:
        """Ids of the step at 0-based depth `number`, never empty; its score is read at the last one."""
        ...


@dataclasses.dataclass(frozen=True)
class NativeLayout:
    """jprm's own: `[bos] problem newline`, then `step newline` each; bos only where the tokenizer has one."""

    tokenizer: Tokenizer

    @functools.cached_property
    def newline(self) -> tuple[int, ...]:
        return tuple(self.tokenizer.encode("\n"))

    @property
    def end(self) -> int | None:
        return self.tokenizer.eos

    def problem(self, text: str) -> list[int]:
        bos = [] if self.tokenizer.bos is None else [self.tokenizer.bos]
        return [*bos, *self.tokenizer.encode(text), *self.newline]

    def step(self, text: str, number: int) -> list[int]:
        del number  # plain text says nothing of depth
        return [*self.tokenizer.encode(text), *self.newline]
