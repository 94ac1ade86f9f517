"""Text to token ids: tokenizers behind one protocol, and layouts, which write one chain as ids.

tokenizer.json and SentencePiece models are read here, GGUF files by `jprm.methods.formats.gguf`.

The text of a problem or step is data: `encode` adds no special token and reads "<|im_start|>" as plain characters, so
data cannot inject control tokens. Layouts insert control tokens by id.
"""

from __future__ import annotations

import base64
import contextlib
import dataclasses
import datetime
import functools
import json
import math
import os
import re
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import tokenizers

from jprm.io.folders import local_copy
from jprm.io.outputs import atomic_write
from jprm.io.storage import path_of
from jprm.options import find_part, place_of

TEMPLATE, CONFIG = "chat_template.jinja", "tokenizer_config.json"
TOOLS, DATE = "additional_chat_templates/tool_use.jinja", "strftime_now"


@dataclasses.dataclass(frozen=True)
class ChatTemplate:
    """A chat template, and the special tokens (`bos_token`, ...) it may write, as (name, text) pairs.

    The pair `strftime_now` is the fixed date for a template that calls this function, if one was chosen.
    """

    text: str  # "" where all of a tokenizer's templates have names, and none is the default
    tokens: tuple[tuple[str, str], ...] = ()
    tools: str = ""  # in place of `text` where tools are given


class Tokenizer(Protocol):
    """A tokenizer's interface. Implementations must be picklable, for data workers."""

    bos: int | None
    eos: int | None
    chat: ChatTemplate | None

    @property
    def vocab_size(self) -> int:
        """One more than the largest id of a text, bos or eos."""
        ...

    def encode(self, text: str) -> list[int]:
        """Returns the ids of `text` alone, [] for "". It must add no token, and parse no control token.

        Raises ValueError if the text cannot be encoded, e.g. has a lone surrogate."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """Returns the text of `ids`, control tokens included."""
        ...

    def token_id(self, token: str) -> int | None:
        """Returns a token's id by its exact name, or `None`."""
        ...

    @property
    def special_ids(self) -> frozenset[int]:
        """Ids for non-text tokens, e.g. <|im_end|>."""
        ...

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Writes files atomically to the folder, made if absent; `load_tokenizer(folder)` must give equal ids."""


@dataclasses.dataclass(frozen=True)
class JsonTokenizer:
    """A tokenizer.json from the `tokenizers` library. All encoding raises ValueError as `Tokenizer.encode`."""

    inner: tokenizers.Tokenizer
    bos: int | None = None
    eos: int | None = None
    chat: ChatTemplate | None = None

    def __post_init__(self):
        # Not stored in tokenizer.json, so set whenever one is made, by unpickling too.
        self.inner.encode_special_tokens = True
        self.inner.no_truncation()
        self.inner.no_padding()

    def __reduce__(self):
        return _from_json, (self.inner.to_str(), self.bos, self.eos, self.chat)

    @functools.cached_property
    def vocab_size(self) -> int:
        """Ignores added special tokens, which no text produces: published ones may exceed the model's ids."""
        added = (i for i, token in self.inner.get_added_tokens_decoder().items() if not token.special)
        ends = (i for i in (self.bos, self.eos) if i is not None)
        return 1 + max([*self.inner.get_vocab(with_added_tokens=False).values(), *added, *ends], default=-1)

    def encode(self, text: str) -> list[int]:
        with library_errors(f"text {text[:40]!r}: the tokenizer fails on it"):
            return self.inner.encode(_checked(text), add_special_tokens=False).ids

    def encode_control(self, text: str, special: bool) -> list[int]:
        """Returns a trusted text's ids, with special tokens parsed; `special` adds e.g. bos around it."""
        with library_errors(f"text {text[:40]!r}: the tokenizer fails on it"):
            return self._control.encode(_checked(text), add_special_tokens=special).ids

    def encode_offsets(self, text: str) -> tuple[list[int], list[int]]:
        """Returns the ids of `encode_control(text, False)`, and the index of each token's first character."""
        with library_errors(f"text {text[:40]!r}: the tokenizer fails on it"):
            encoding = self._control.encode(_checked(text), add_special_tokens=False)
        return encoding.ids, [begin for begin, _ in encoding.offsets]

    @functools.cached_property
    def specials(self) -> re.Pattern[str] | None:
        """Matches special token names in a text; `None` if there are none."""
        added = self.inner.get_added_tokens_decoder().values()
        names = sorted((token.content for token in added if token.special and token.content), key=len, reverse=True)
        return re.compile("|".join(map(re.escape, names))) if names else None

    @functools.cached_property
    def _control(self) -> tokenizers.Tokenizer:
        copy = tokenizers.Tokenizer.from_str(self.inner.to_str())
        copy.encode_special_tokens = False
        return copy

    def decode(self, ids: Sequence[int]) -> str:
        return self.inner.decode(list(ids), skip_special_tokens=False)

    def token_id(self, token: str) -> int | None:
        return self.inner.token_to_id(token)

    @functools.cached_property
    def special_ids(self) -> frozenset[int]:
        return frozenset(i for i, token in self.inner.get_added_tokens_decoder().items() if token.special)

    def save(self, folder: str | os.PathLike[str]) -> None:
        names = {"bos_token": self.bos, "eos_token": self.eos}
        names = {key: None if value is None else self.inner.id_to_token(value) for key, value in names.items()}
        config = {"tokenizer_class": "PreTrainedTokenizerFast", **names}
        atomic_write(path_of(folder) / "tokenizer.json", self.inner.to_str(pretty=True))
        if self.chat is not None:
            config |= dict(self.chat.tokens)
            if self.chat.tools:
                named = {"default": self.chat.text, "tool_use": self.chat.tools}
                config["chat_template"] = [{"name": name, "template": text} for name, text in named.items() if text]
            else:
                atomic_write(path_of(folder) / TEMPLATE, self.chat.text)
        atomic_write(path_of(folder) / CONFIG, json.dumps(config, indent=2))


@dataclasses.dataclass(frozen=True)
class SentencePieceTokenizer:
    """A tokenizer.model from the `sentencepiece` library (which never parses control pieces from text)."""

    inner: Any  # sentencepiece.SentencePieceProcessor
    chat: ChatTemplate | None = None  # without use: trajectories need a tokenizer.json

    @property
    def bos(self) -> int | None:
        return self.inner.bos_id() if self.inner.bos_id() >= 0 else None

    @property
    def eos(self) -> int | None:
        return self.inner.eos_id() if self.inner.eos_id() >= 0 else None

    @property
    def vocab_size(self) -> int:
        return self.inner.get_piece_size()

    def encode(self, text: str) -> list[int]:
        return self.inner.encode(_checked(text), out_type=int)

    def decode(self, ids: Sequence[int]) -> str:
        return self.inner.decode([int(i) for i in ids])

    def token_id(self, token: str) -> int | None:
        index = self.inner.piece_to_id(token)
        return index if self.inner.id_to_piece(index) == token else None  # an unknown piece maps to <unk>

    @functools.cached_property
    def special_ids(self) -> frozenset[int]:
        return frozenset(i for i in range(self.vocab_size) if self.inner.is_control(i))

    def save(self, folder: str | os.PathLike[str]) -> None:
        atomic_write(path_of(folder) / "tokenizer.model", self.inner.serialized_model_proto())


def saved_bytes(tokenizer: Tokenizer) -> bytes:
    """Returns the saved files' contents, joined in order of their names, e.g. for a digest."""
    with tempfile.TemporaryDirectory() as folder:
        tokenizer.save(folder)
        return b"".join(file.read_bytes() for file in sorted(Path(folder).iterdir()))


def load_tokenizer(path: str | os.PathLike[str], vocab_size: int | None = None, *, of_model: bool = False) -> Tokenizer:
    """Loads a tokenizer from a folder (tokenizer.json before tokenizer.model), a tokenizer.json, a .model or a .gguf.

    With `of_model`, tokenizer_config.json must exist too, because a missing special token would change a trained
    model's scores.

    A Hub address `hf://OWNER/NAME@REVISION` or a bucket's folder is downloaded to a cache (OSError if that fails).
    Raises FileNotFoundError if there is none, and ValueError if the file is damaged, unknown, made to fill the memory,
    or has ids beyond the model's `vocab_size` (embeddings; `None`: unchecked).
    """
    names = ("tokenizer.json", "tokenizer.model", CONFIG, TEMPLATE, TOOLS)
    path = local_copy(place_of(path, names), names)
    if path.is_dir():
        files = [path / name for name in ("tokenizer.json", "tokenizer.model") if (path / name).is_file()]
        if not files:
            raise FileNotFoundError(f"{path}: holds neither tokenizer.json nor tokenizer.model")
        if of_model and files[0].suffix == ".json" and not (path / CONFIG).is_file():
            raise FileNotFoundError(f"{path / CONFIG}: not there; it names the token that begins a text. Fetch it too")
        path = files[0]
    if path.suffix not in LOADERS:
        give = "Give a folder, a tokenizer.json, a tokenizer.model, a .gguf file or hf://OWNER/NAME@REVISION"
        if not path.exists():
            raise FileNotFoundError(f"{path}: is not there. {give}")
        raise ValueError(f"{path}: not a tokenizer. {give}")
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such file")
    tokenizer = find_part(path.suffix, LOADERS, "tokenizer")(path)
    if vocab_size is not None and tokenizer.vocab_size > vocab_size:
        raise ValueError(
            f"{path}: has ids up to {tokenizer.vocab_size - 1:,}, and the model has embeddings for {vocab_size:,} only:"
            " it is the tokenizer of another model, or an experiment's `model` is that of an earlier `base`"
        )
    return tokenizer


@contextlib.contextmanager
def library_errors(message: str) -> Iterator[None]:
    """Turns errors from the `tokenizers` library, which are bare Exceptions and panics, into ValueError."""
    try:
        yield
    except BaseException as error:
        if type(error) is not Exception and type(error).__name__ != "PanicException":
            raise
        raise ValueError(f"{message} ({str(error)[:200]})") from None


def _from_json(text: str, bos: int | None, eos: int | None, chat: ChatTemplate | None) -> JsonTokenizer:
    return JsonTokenizer(tokenizers.Tokenizer.from_str(text), bos, eos, chat)


def _load_json(path: Path) -> JsonTokenizer:
    with library_errors(f"{path}: not a tokenizer.json, fetch or export it again"):
        inner = tokenizers.Tokenizer.from_file(str(path))
    content = json.loads(path.read_bytes())
    if (growth := math.prod(map(_growth, _parts(content)))) > _GROWTH:
        raise ValueError(f"{path}: its replacements make a text up to {growth:.2g} times as long. Do not trust it")
    config_path = path.parent / CONFIG
    try:
        config = json.loads(config_path.read_bytes()) if config_path.is_file() else {}
        names = {key: config.get(key) for key in ("bos_token", "eos_token")}
    except (ValueError, RecursionError, AttributeError) as error:
        raise ValueError(f"{config_path}: is not a JSON object ({error}). Fetch it again") from None
    ids = {}
    for key, token in names.items():
        token = token.get("content") if isinstance(token, dict) else token
        ids[key] = inner.token_to_id(token) if isinstance(token, str) else None
        if token is not None and ids[key] is None:
            raise ValueError(f"{config_path}: {key} is {token!r}, not a token in {path}. Fetch both again")
    return JsonTokenizer(inner, ids["bos_token"], ids["eos_token"], chat_of(path.parent))


_GROWTH = 1000
"""Limit on the factor by which normalizers and decoders may lengthen a text. The published maximum is ALBERT's, 484."""


def _parts(content: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yields the parts that change a text, unnested from their sequences."""
    waiting = [content.get(key) for key in ("normalizer", "pre_tokenizer", "decoder")]
    while waiting:
        part = waiting.pop()
        if isinstance(part, list):
            waiting += part
        elif isinstance(part, dict):
            yield part
            waiting += [value for key, value in part.items() if key.endswith("s")]  # normalizers, pretokenizers, ...


def _growth(part: Mapping[str, Any]) -> float:
    """Estimates the largest factor by which a tokenizer.json part alone, without inner parts, lengthens a text."""
    kind, longer = part.get("type"), len(str(part.get("content", part.get("prepend", ""))).encode())
    if kind == "Replace":
        pattern = part.get("pattern")
        shortest = len(str(pattern.get("String", "")).encode()) if isinstance(pattern, dict) else 0
        return max(1, longer / shortest if shortest else 1 + longer)  # an expression may match nothing
    if kind == "Precompiled":  # a table of replacements, each with a null at its end, after a trie
        table = base64.b64decode(str(part.get("precompiled_charsmap")))
        return max(map(len, table[4 + int.from_bytes(table[:4], "little") :].split(b"\0")), default=0) / 3
    return {"Prepend": 1 + longer, "NFKC": 11, "NFKD": 11, "ByteLevel": 2, "Lowercase": 2}.get(str(kind), 1)


def sentencepiece_of(path: Path, content: bytes) -> SentencePieceTokenizer:
    import sentencepiece

    try:
        return SentencePieceTokenizer(sentencepiece.SentencePieceProcessor(model_proto=content))
    except RuntimeError as error:
        raise ValueError(f"{path}: not a SentencePiece model ({error}). Fetch it again") from error


LOADERS: dict[str, Any] = {
    ".json": _load_json, ".model": lambda path: sentencepiece_of(path, path.read_bytes()),
    ".gguf": "jprm.methods.formats.gguf:load_tokenizer",
}  # fmt: skip
"""Readers of tokenizer files by suffix."""


LONGEST_TEMPLATE = 2**20
"""Limit on a chat template's characters. Published ones have up to a few tens of thousands."""


def chat_of(folder: Path) -> ChatTemplate | None:
    """Returns the chat template in a tokenizer's folder, or `None`.

    Raises FileNotFoundError or ValueError if it is damaged, too long or lacks the file naming its tokens.
    """
    config, files = folder / CONFIG, {"default": folder / TEMPLATE, "tool_use": folder / TOOLS}
    files = {name: file for name, file in files.items() if file.is_file()}
    if not config.is_file() and files:
        raise FileNotFoundError(f"{config}: not there; it names the special tokens of the chat template. Fetch it too")
    try:
        fields = json.loads(config.read_bytes()) if config.is_file() else {}
        texts = {name: file.read_text(encoding="utf-8") for name, file in files.items()}
        tokens = {key: fields[key] for key in fields if key.endswith("_token") or key == DATE}
        template = texts or fields.get("chat_template")
    except (ValueError, RecursionError, AttributeError) as error:
        raise ValueError(f"{config}: it or {TEMPLATE} beside it is damaged ({error}). Fetch both again") from None
    return checked_template(folder, template, tokens)


def checked_template(path: Path, template: Any, tokens: Mapping[str, Any]) -> ChatTemplate | None:
    """Returns a tokenizer's chat template: a text, `default` and `tool_use` of several (others are ignored), or `None`.

    `path` is for errors, `tokens` are its control tokens by name, e.g. `bos_token`, and the date that it may write.

    Raises ValueError for another type, a template too long, or an invalid date.
    """
    if template in (None, "", [], {}):
        return None
    if isinstance(template, list):  # of {"name", "template"}
        template = {str(entry.get("name")): entry.get("template") for entry in template if isinstance(entry, Mapping)}
    named = template if isinstance(template, Mapping) else {"default": template}
    for name, text in named.items():
        if not isinstance(text, str) or len(text) > LONGEST_TEMPLATE:
            reason = "is no text" if not isinstance(text, str) else f"has more than {LONGEST_TEMPLATE:,} characters"
            raise ValueError(f"{path}: its chat template {name!r} {reason}. Fetch the file again, or remove it")
    try:
        datetime.date.fromisoformat(tokens.get(DATE) or "2026-01-31")
    except (TypeError, ValueError):
        raise ValueError(f'{path}: {DATE} is {tokens[DATE]!r} in {CONFIG}. Write a day, "2026-01-31"') from None
    texts = {key: token.get("content") if isinstance(token, dict) else token for key, token in tokens.items()}
    pairs = tuple(sorted((key, text) for key, text in texts.items() if isinstance(text, str)))
    return ChatTemplate(named.get("default", ""), pairs, named.get("tool_use", ""))


def _checked(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        where = f"character {error.start} is a lone surrogate, which no tokenizer can encode"
        raise ValueError(f"text {text[:40]!r}: {where}. Replace it in the data") from error
    return text


# ------------------------------------------------------------------------------------------------------------- layouts
#
# A template is a sequence of segments, and each segment is encoded by itself: a string that joins the problem and the
# steps is never tokenised again, because merges across a boundary would move a step's end. A step's score is read at
# its last token.

Template = Sequence[str]
"""Segments. Each is split at {bos} and at the names in the layout's `ids`. The parts between are tokenised separately,
with {problem}, {system}, {step} or {number} (from 1) filled in as text. {bos} is empty if there is no such token."""

_FIELD = re.compile(r"\{(problem|system|step|number)\}")
_LABEL = re.compile(r"(\S[^{}]*\{number\}[^{}]*)\{step\}")

_CONTROL = re.compile(r"(<[^\s<>]+>|\[/?[A-Z_]+\])")

_ANCHORS = ("\n", ".", "0")
"""Texts to encode before a segment continuing a text. The first one that does not merge with it is used."""


class Layout(Protocol):
    """Token ids of a chain, piece by piece, exactly as the model saw them in training."""

    @property
    def tokenizer(self) -> Tokenizer: ...

    @property
    def turns(self) -> bool:
        """Whether the model takes trajectories, written by the tokenizer's chat template (`jprm.token_tree`)."""
        ...

    def problem(self, text: str, system: str = "") -> list[int]:
        """Returns the ids at the start of every chain for the problem. Raises ValueError if `system` has no place."""
        ...

    def step(self, text: str, number: int) -> list[int]:
        """Returns the ids of the step at depth `number`, from 0, at the last of which its score is read.

        [] if the layout drops all of the step, which `token_tree` refuses. Raises ValueError as `Tokenizer.encode`."""
        ...

    def last(self, text: str, number: int) -> list[int] | None:
        """Returns the ids for step `number` (from 0) if it ends its chain and is then read differently; else `None`."""
        ...


@dataclasses.dataclass(frozen=True)
class TemplateLayout:
    """A `Layout` from templates, which may name control tokens. Filled-in values are plain text.

    If a step already begins with its template's label, e.g. "Step 2:", the label is not repeated.
    """

    tokenizer: Tokenizer
    opening: Template  # with {problem}
    later: Template  # of a step, with {step} and perhaps {number}
    first: Template = ()  # of the first step; () means `later`
    closing: Template = ()  # of a step that ends its chain, where every step is read so
    ids: Mapping[str, int] = dataclasses.field(default_factory=dict)  # of the tokens that templates name
    joined: bool = False  # whether a text that continues another gets no word start of SentencePiece's
    strip: bool = False  # whether white space around a step is dropped
    benchmarks: Mapping[str, Layout] = dataclasses.field(default_factory=dict)
    """Layouts from the authors' scripts for single benchmarks, by the reader of their files."""
    system: Template = ()
    """Replaces `opening` if there is a system message, with {system} and {problem}; () has no place for one."""
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
        fields = (("problem", self.opening), ("first step", self.first), ("step", self.later), ("end", self.closing))
        return ", ".join(f"{name} {''.join(template)!r}" for name, template in fields if template)

    @property
    def end_of_step(self) -> int | None:
        """The id of the token at every step's end, or `None` if the template names none."""
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
        """Pieces of opening, first and later steps, and both as last steps: ids, or (text to fill, `joined`)."""
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
        """Splits the template into pieces; `joined` means that text precedes it."""
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
        """Splits the segment at its tokens, longest name first; a piece is a token name, "{bos}" or text."""
        names = sorted(("{bos}", *self.ids), key=len, reverse=True)
        return [piece for piece in re.split("(" + "|".join(map(re.escape, names)) + ")", segment) if piece] or [""]

    @functools.cached_property
    def _control(self) -> frozenset[str]:
        """Names after which the tokenizer starts anew. Other names are text that happens to be one token."""
        return frozenset({"{bos}"} | {name for name, i in self.ids.items() if self.tokenizer.token_id(name) == i})

    def encode(self, text: str, joined: bool) -> list[int]:
        """Returns ids, with no word start if `joined` to another; ValueError if all of `_ANCHORS` merge with it."""
        if not text or not joined or not self._word_start:
            return self.tokenizer.encode(text) if text else []
        for anchor in _ANCHORS:
            before, whole = self.tokenizer.encode(anchor), self.tokenizer.encode(anchor + text)
            if whole[: len(before)] == before:
                return whole[len(before) :]
        raise ValueError(f"text {text[:40]!r}: merges with any text before it; remove the white space it starts with")

    @functools.cached_property
    def _word_start(self) -> bool:
        encode = self.tokenizer.encode
        return encode("\na") != encode("\n") + encode("a")


def native_layout(tokenizer: Tokenizer) -> TemplateLayout:
    """Returns jprm's own layout: `[bos] problem newline`, then `step newline` each; bos if the tokenizer has one.

    A system message precedes the problem, followed by a newline. Trajectories use the tokenizer's chat template.
    """
    system = ("{bos}{system}", "\n", "{problem}", "\n")
    return TemplateLayout(tokenizer, ("{bos}{problem}", "\n"), ("{step}", "\n"), system=system, turns=True)


def prompt_layout(tokenizer: Tokenizer, prompt: str, delimiter: str) -> TemplateLayout:
    """Returns the layout for a prompt with {problem} and, if wanted, {bos}; a delimiter follows each step.

    Names in the prompt that the tokenizer knows as tokens, e.g. <|im_start|>, become their ids (`control_tokens`).
    Raises ValueError if the prompt lacks {problem}.
    """
    before, field, after = prompt.partition("{problem}")
    if not field:
        raise ValueError(f"the prompt {prompt!r} has no {{problem}}")
    cut = [_CONTROL.split(text) for text in (before, after)]
    ids = control_tokens(tokenizer, prompt)
    return TemplateLayout(tokenizer, (*cut[0], field, *cut[1]), ("{step}", delimiter), ids=ids)


def control_tokens(tokenizer: Tokenizer, text: str) -> dict[str, int]:
    """Returns the ids of tokens like <|im_start|> or [INST] in a text, by name, without unknown ones."""
    ids = {name: tokenizer.token_id(name) for name in _CONTROL.findall(text)}
    return {name: i for name, i in ids.items() if i is not None}
