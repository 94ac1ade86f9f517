"""Token ids of a chain as an adapter's templates say."""

from __future__ import annotations

import dataclasses
import functools
import os
import re
from collections.abc import Mapping

from jprm.adapters.record import Adapter, Template
from jprm.tokenizer import Tokenizer

_FIELD = re.compile(r"\{(problem|step|number)\}")
_LABEL = re.compile(r"(\S[^{}]*\{number\}[^{}]*)\{step\}")

_ANCHORS = ("\n", ".", "0")
"""Texts to encode before a segment that continues a text. The first that merges with nothing after it is used."""


@dataclasses.dataclass(frozen=True)
class TemplateLayout:
    """A `Layout` made of an adapter's templates.

    A template may name control tokens; what is filled in is plain text. A step that begins with its template's label
    ("Step 2:") does not get it twice.
    """

    tokenizer: Tokenizer
    adapter: Adapter
    ids: Mapping[str, int]  # of `adapter.tokens`, by `token_ids`

    def problem(self, text: str) -> list[int]:
        return self._ids(self.adapter.problem, {"problem": text}, joined=False)

    def step(self, text: str, number: int) -> list[int]:
        template = self.adapter.step if number else self.adapter.first or self.adapter.step
        before = self.adapter.problem if number <= 0 else self.adapter.step
        text = text.strip() if self.adapter.strip else text
        label = _LABEL.search("".join(template))
        if label and text.startswith(stem := label[1].replace("{number}", str(number + 1)).rstrip()):
            text = text[len(stem) :].lstrip()
        values = {"step": text, "number": str(number + 1)}
        return self._ids(template, values, joined=self._cut(before[-1])[-1] not in self._control)

    def _ids(self, template: Template, values: Mapping[str, str], joined: bool) -> list[int]:
        """Returns the template's ids, filled in; `joined` is whether text stands before it."""
        ids: list[int] = []
        for segment in template:
            for piece in self._cut(segment):
                if piece == "{bos}":
                    ids += [] if self.tokenizer.bos is None else [self.tokenizer.bos]
                elif piece in self.ids:
                    ids.append(self.ids[piece])
                elif text := _FIELD.sub(lambda field: values[field[1]], piece):
                    ids += self._encode(text, joined and self.adapter.joined)
                joined = piece not in self._control
        return ids

    def _cut(self, segment: str) -> list[str]:
        """Splits the segment at its tokens, longest name first; a piece is a token's name, "{bos}" or text."""
        names = sorted(("{bos}", *self.ids), key=len, reverse=True)
        return [piece for piece in re.split("(" + "|".join(map(re.escape, names)) + ")", segment) if piece] or [""]

    @functools.cached_property
    def _control(self) -> frozenset[str]:
        """Tokens that end a text: after them a tokenizer begins anew. Others are text that happens to be one token."""
        return frozenset({"{bos}"} | {name for name, i in self.ids.items() if _by_name(self.tokenizer, name) == i})

    def _encode(self, text: str, joined: bool) -> list[int]:
        """Returns the text's ids; a text that continues another gets no word start of SentencePiece's."""
        if not joined or not self._word_start:
            return self.tokenizer.encode(text)
        for anchor in _ANCHORS:
            before, whole = self.tokenizer.encode(anchor), self.tokenizer.encode(anchor + text)
            if whole[: len(before)] == before:
                return whole[len(before) :]
        raise ValueError(
            f"text {text[:40]!r}: merges with whatever stands before it; remove the white space it starts with"
        )

    @functools.cached_property
    def _word_start(self) -> bool:
        encode = self.tokenizer.encode
        return encode("\na") != encode("\n") + encode("a")


def token_ids(adapter: Adapter, tokenizer: Tokenizer, vocab_size: int, where: str | os.PathLike) -> dict[str, int]:
    """Returns the ids of the adapter's tokens in the folder's own tokenizer.

    A token is looked up by its text, which must be one token, or else by its name, as control tokens are found.

    Raises:
      ValueError: a token that is absent, splits or is outside the model's vocabulary, or whose id is not the published
        one although `vocab_size` is the published vocabulary's.
    """
    probe = TemplateLayout(tokenizer, dataclasses.replace(adapter, joined=True), {})
    found = {}
    for name, published in adapter.tokens.items():
        text = probe._encode(name, True)
        whole = len(text) == 1 and tokenizer.decode(text).strip() == name.strip()  # one unknown is one token too
        token = text[0] if whole else _by_name(tokenizer, name)
        if token is None:
            raise ValueError(
                f"{where}: adapter {adapter.name!r} needs {name!r} as one token, and the tokenizer splits it into"
                f" {len(text)} and has none of that name: it is not the tokenizer of such a model, or the adapter is"
                " another's (--adapter)"
            )
        if not token < vocab_size:
            raise ValueError(f"{where}: token {name!r} has id {token}, the model has embeddings for {vocab_size} only")
        if published is not None and vocab_size in adapter.vocabulary and token != published:
            raise ValueError(
                f"{where}: token {name!r} has id {token}, and {published} in the published vocabulary of adapter"
                f" {adapter.name!r}: the tokenizer is not the one that the model was trained with"
            )
        found[name] = token
    return found


def _by_name(tokenizer: Tokenizer, name: str) -> int | None:
    try:
        return tokenizer.token_id(name)
    except KeyError:
        return None
