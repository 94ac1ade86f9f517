"""Layouts: how one chain becomes token ids.

A template is a sequence of segments, and each segment is encoded by itself: a string that joins the problem and the
steps is never tokenised again, because merges across a boundary would move a step's end. A step's score is read at its
last token.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Mapping, Sequence
from typing import Protocol

from jprm.tokenizer import Tokenizer

Template = Sequence[str]
"""Segments. Each is split at {bos} and at the names of the layout's `ids`. A part between is tokenised at once, with
{problem}, {system}, {step} or {number} (from 1) filled in as text. {bos} is empty where there is no such token."""

_FIELD = re.compile(r"\{(problem|system|step|number)\}")
_LABEL = re.compile(r"(\S[^{}]*\{number\}[^{}]*)\{step\}")

_CONTROL = re.compile(r"(<[^\s<>]+>|\[/?[A-Z_]+\])")

_ANCHORS = ("\n", ".", "0")
"""Texts to encode before a segment that continues a text. The first that merges with nothing after it is used."""


class Layout(Protocol):
    """Token ids of a chain, piece by piece, exactly as the model saw them in training."""

    @property
    def tokenizer(self) -> Tokenizer: ...

    @property
    def turns(self) -> bool:
        """Whether the model takes trajectories, which the tokenizer's chat template writes (`jprm.token_tree`)."""
        ...

    def problem(self, text: str, system: str = "") -> list[int]:
        """Returns the ids that every chain of the problem starts with, after its system message where it has one.

        Raises ValueError for a system message where the layout has no place for one.
        """
        ...

    def step(self, text: str, number: int) -> list[int]:
        """Returns the ids of the step at 0-based depth `number`, never empty; its score is read at the last one."""
        ...

    def last(self, text: str, number: int) -> list[int] | None:
        """Returns the ids of the step where its chain ends with it, if it is read there and not as other steps follow.

        None: the score is read at the end of `step`, whatever follows.
        """
        ...


@dataclasses.dataclass(frozen=True)
class TemplateLayout:
    """A `Layout` made of templates. They may name control tokens; what is filled in is plain text.

    A step that begins with its template's label ("Step 2:") does not get it twice.
    """

    tokenizer: Tokenizer
    opening: Template  # with {problem}
    later: Template  # of a step, with {step} and perhaps {number}
    first: Template = ()  # of the first step; () is that of the later ones
    closing: Template = ()  # of a step that ends its chain, where every step is read so
    ids: Mapping[str, int] = dataclasses.field(default_factory=dict)  # of the tokens that templates name
    joined: bool = False  # whether a text that continues another gets no word start of SentencePiece's
    strip: bool = False  # whether white space around a step is dropped
    benchmarks: Mapping[str, Layout] = dataclasses.field(default_factory=dict)
    """The layouts of the model authors' scripts for single benchmarks, by the name of the reader of their files."""
    system: Template = ()
    """In place of `opening` where there is a system message, with {system} and {problem}; () has no place for one."""
    turns: bool = False  # whether the model takes trajectories

    def problem(self, text: str, system: str = "") -> list[int]:
        if not system:
            return self._filled(self._pieces[0], {"problem": text})
        if not self.system:
            raise ValueError(
                f"problem {text[:60]!r}: has a system message, and the model's layout has no place for one. Write it"
                " into the problem, or name its place in the adapter's `system`"
            )
        return self._filled(self._parsed(self.system, False), {"problem": text, "system": system})

    def step(self, text: str, number: int) -> list[int]:
        template = self.later if number else self.first or self.later
        return self._step(text, number, template, self._pieces[2 if number else 1])

    def last(self, text: str, number: int) -> list[int] | None:
        return self._step(text, number, self.closing, self._pieces[4 if number else 3]) if self.closing else None

    def _step(
        self, text: str, number: int, template: Template, pieces: Sequence[list[int] | tuple[str, bool]]
    ) -> list[int]:
        text = text.strip() if self.strip else text
        label = _LABEL.search("".join(template))
        if label and text.startswith(stem := label[1].replace("{number}", str(number + 1)).rstrip()):
            text = text[len(stem) :].lstrip()
        return self._filled(pieces, {"step": text, "number": str(number + 1)})

    def __str__(self) -> str:
        """Returns the templates as one line."""
        fields = (("problem", self.opening), ("first step", self.first), ("step", self.later), ("end", self.closing))
        return ", ".join(f"{name} {''.join(template)!r}" for name, template in fields if template)

    @property
    def end_of_step(self) -> int | None:
        """The token that ends every step, where the template names one."""
        return self.ids.get(self._cut(self.later[-1])[-1])

    def _filled(self, pieces: Sequence[list[int] | tuple[str, bool]], values: Mapping[str, str]) -> list[int]:
        ids: list[int] = []
        for piece in pieces:
            if isinstance(piece, list):
                ids += piece
            else:
                text, joined = piece
                ids += self.encode(_FIELD.sub(lambda field: values.get(field[1], field[0]), text), joined)
        return ids

    @functools.cached_property
    def _pieces(self) -> tuple[list[list[int] | tuple[str, bool]], ...]:
        """The pieces of the opening, of first and later steps, and of both as the last one: ids, or a text to fill in
        and its `joined`."""
        after_opening, after_step = (
            self._cut(template[-1])[-1] not in self._control for template in (self.opening, self.later)
        )
        return (
            self._parsed(self.opening, False),
            self._parsed(self.first or self.later, after_opening),
            self._parsed(self.later, after_step),
            self._parsed(self.closing, after_opening),
            self._parsed(self.closing, after_step),
        )

    def _parsed(self, template: Template, joined: bool) -> list[list[int] | tuple[str, bool]]:
        """Returns the template's pieces; `joined` is whether text stands before it."""
        pieces: list[list[int] | tuple[str, bool]] = []
        for piece in (piece for segment in template for piece in self._cut(segment)):
            if piece == "{bos}":
                pieces.append([] if self.tokenizer.bos is None else [self.tokenizer.bos])
            elif piece in self.ids:
                pieces.append([self.ids[piece]])
            elif _FIELD.search(piece):
                pieces.append((piece, joined and self.joined))
            elif piece:
                pieces.append(self.encode(piece, joined and self.joined))
            joined = piece not in self._control
        return pieces

    def _cut(self, segment: str) -> list[str]:
        """Splits the segment at its tokens, longest name first; a piece is a token's name, "{bos}" or text."""
        names = sorted(("{bos}", *self.ids), key=len, reverse=True)
        return [piece for piece in re.split("(" + "|".join(map(re.escape, names)) + ")", segment) if piece] or [""]

    @functools.cached_property
    def _control(self) -> frozenset[str]:
        """Tokens that end a text: after them a tokenizer begins anew. Others are text that happens to be one token."""
        return frozenset({"{bos}"} | {name for name, i in self.ids.items() if self.tokenizer.token_id(name) == i})

    def encode(self, text: str, joined: bool) -> list[int]:
        """Returns the text's ids. A `joined` text continues another one: it gets no word start of SentencePiece's."""
        if not text or not joined or not self._word_start:
            return self.tokenizer.encode(text) if text else []
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


def native_layout(tokenizer: Tokenizer) -> TemplateLayout:
    """Returns jprm's own layout: `[bos] problem newline`, then `step newline` each; bos where the tokenizer has one.

    A system message stands before the problem, with a newline after it. Trajectories are written by the tokenizer's
    chat template.
    """
    system = ("{bos}{system}", "\n", "{problem}", "\n")
    return TemplateLayout(tokenizer, ("{bos}{problem}", "\n"), ("{step}", "\n"), system=system, turns=True)


def prompt_layout(tokenizer: Tokenizer, prompt: str, delimiter: str) -> TemplateLayout:
    """Returns the layout of a prompt with {problem} and control tokens, and a delimiter a step."""
    before, field, after = prompt.partition("{problem}")
    cut = [_CONTROL.split(text) for text in (before, after)]
    ids = control_tokens(tokenizer, prompt)
    return TemplateLayout(tokenizer, (*cut[0], field, *cut[1]), ("{step}", delimiter), ids=ids)


def control_tokens(tokenizer: Tokenizer, text: str) -> dict[str, int]:
    """Returns the control tokens in a text by name: the tokenizer's tokens of the forms <|im_start|> and [INST]."""
    found = {name: tokenizer.token_id(name) for name in _CONTROL.findall(text)}
    return {name: i for name, i in found.items() if i is not None}
