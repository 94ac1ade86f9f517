"""Where steps end in sampled tokens: a table that a decoding loop reads, a token at a time."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from jaxtyping import Int8

from jprm.tokenizer import Tokenizer


def step_text(text: str) -> str:
    """Returns a step's text without line breaks around it and white space after it: code is indented."""
    return text.lstrip("\r\n").rstrip()


def progress_table(tokenizer: Tokenizer, delimiter: str, vocab_size: int) -> Int8[np.ndarray, "V P"]:
    """Returns the progress after a token, by token and progress before it; -1 where the token ends a step.

    Progress is the number of the delimiter's characters at the end of the text, plus the delimiter's length if there is
    more than white space before them: a blank step is no step. A delimiter may end inside a token.
    """
    size = len(delimiter)
    table = np.zeros((vocab_size, 2 * size), np.int8)
    for token in range(vocab_size):
        text = tokenizer.decode([token]) if token < tokenizer.vocab_size else ""
        for progress in range(2 * size):
            table[token, progress] = _advance(text, progress % size, progress >= size, delimiter)
    return table


def _advance(text: str, matched: int, written: bool, delimiter: str) -> int:
    for letter in text:
        written = written or not letter.isspace()
        tail = delimiter[:matched] + letter
        matched = next(k for k in range(len(tail), -1, -1) if tail.endswith(delimiter[:k]))
        if matched == len(delimiter):
            if written:
                return -1
            matched = 0
    return matched + len(delimiter) * written


def step_stops(table_VP: Int8[np.ndarray, "V P"], ids: Sequence[int]) -> tuple[int, ...]:
    """Returns, for each step that its delimiter ends in these ids, the index after its last token."""
    stops, progress = [], 0
    for index, token in enumerate(ids, start=1):
        progress = int(table_VP[token, progress])
        if progress < 0:
            stops.append(index)
            progress = 0
    return tuple(stops)
