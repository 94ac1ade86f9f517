"""Parts of logs without text: images get a placeholder, unknown kinds are skipped, and all are counted.

A program's session has thousands of lines, so one image or one line of a new kind must not lose the whole session.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any, Literal

from jprm.io.jsonl import RecordError, type_name
from jprm.methods.data.reader import LeftOut, object_in
from jprm.methods.messages.messages import PARTS_OF_THOUGHT, TEXTS, decoded, text_of_parts


@dataclasses.dataclass(frozen=True)
class SessionOptions:
    """Attributes:
    images: parts without text, e.g. images: `drop` inserts a placeholder such as "[image]", `error` rejects the item.
    """

    images: Literal["drop", "error"] = "drop"


@dataclasses.dataclass(frozen=True)
class LogOptions(SessionOptions):
    """Attributes:
    images: parts without text, e.g. images: `drop` inserts a placeholder such as "[image]", `error` rejects the item.
    """

    images: Literal["drop", "error"] = "error"


_NAMES = {
    "image": ("image", "image_url", "input_image", "output_image", "ImageContent", "image_base64"),
    "document": ("document",),
    "file": ("file", "input_file", "blob", "uri"),
    "audio": ("audio", "input_audio", "output_audio"),
    "video": ("video", "input_video", "video_url"),
}
_PLACEHOLDERS = {kind: name for name, kinds in _NAMES.items() for kind in kinds}


class Leftovers:
    """Counts, by name, the parts that were left out of the records; iterates over the counts so far, as `LeftOut`.

    `drop` is True with `images="drop"`: parts without text get a placeholder. Else readers raise RecordError for them.
    """

    def __init__(self, options: SessionOptions) -> None:
        self.drop = options.images == "drop"
        self._counts: collections.Counter[str] = collections.Counter()

    def __iter__(self) -> Iterator[LeftOut]:
        for what, count in self._counts.items():
            yield LeftOut(what, count)

    def skip(self, what: str) -> None:
        """Counts one part named `what`, cut to 80 characters."""
        self._counts[what if len(what) <= 80 else what[:79] + "…"] += 1

    def placeholder(self, part: Any) -> str:
        """Returns a placeholder for a part without text, e.g. "[image]", and counts it.

        A text, and a reference to a tool (`tool_named`), are returned as text and not counted.
        """
        if isinstance(part, str):
            return part
        if text := tool_named(part):
            return text
        kind = str(part.get("type")) if isinstance(part, Mapping) else type_name(part)
        name = _PLACEHOLDERS.get(kind, kind)
        self.skip(f"{name} in a message")
        return f"[{name}]"

    def plain(self, content: Any) -> Any:
        """Returns a copy of a list of parts, with text parts such as "[image]" for those without text, each counted.

        Unless `drop` is set, only tool references are replaced. Other contents (text, null) are returned unchanged.
        """
        if not isinstance(content, list):
            return content
        return [
            {"type": "text", "text": self.placeholder(part)}
            if not _is_text(part) and (self.drop or tool_named(part))
            else part
            for part in content
        ]

    def call(self, call: Mapping[str, Any]) -> Mapping[str, Any]:
        """Returns a call in the chat form.

        With `drop`, arguments that are text, but no JSON object, become {"input": TEXT} in a copy, and are counted.
        Otherwise the call is returned unchanged.
        """
        function = object_in(call, "function")
        arguments = function.get("arguments")
        try:
            readable = not isinstance(arguments, str) or isinstance(decoded(arguments, "", ""), Mapping | None)
        except RecordError:
            readable = False
        if readable or not self.drop:
            return call
        self.skip("arguments that are not a JSON object, read as text")
        return {**call, "function": {**function, "arguments": {"input": arguments}}}

    def text(self, content: Any, where: str, field: str) -> str:
        """Returns the joined text of a content (text, part or parts), "" for null.

        Raises RecordError, with `where` and `field`, if images are refused, or it is no content.
        """
        content = [content] if isinstance(content, Mapping) else content
        return "" if content is None else text_of_parts(self.plain(content), where, field)


def tool_named(part: Any) -> str:
    """Returns "[tool: NAME]" for a reference to a tool, which the server replaces by its schema; else ""."""
    if not isinstance(part, Mapping) or part.get("type") not in ("tool_reference", "tool_addition"):
        return ""
    tool = object_in(part, "tool", part)
    name = tool.get("tool_name", tool.get("name"))
    return f"[tool: {name}]" if isinstance(name, str) else ""


def _is_text(part: Any) -> bool:
    return isinstance(part, Mapping) and part.get("type") in (*TEXTS, *PARTS_OF_THOUGHT)


def is_content(value: Any) -> bool:
    """Whether a value is a non-empty list of text parts and parts with a placeholder, not data."""
    parts = value if isinstance(value, list) else []
    known = (*TEXTS, *_PLACEHOLDERS)
    return bool(parts) and all(isinstance(part, Mapping) and str(part.get("type")) in known for part in parts)
