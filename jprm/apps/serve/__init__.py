"""`jprm serve`: scores over HTTP. This file holds only the options; the other files import a web framework."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated, Literal

from tyro.conf import Positional, arg

from jprm.apps import FIRST, Hidden, Name, StoredAs
from jprm.apps.web import Listen

Weights = Literal["copied", "split"]
"""Parameters on several devices: a full copy on each, or a part on each."""


@dataclasses.dataclass(frozen=True)
class ServeConfig(Listen):
    """Address and limits of `jprm serve`.

    Attributes:
      longest: The most tokens of a chain.
      prefix_tokens: Tokens whose keys and values are cached on the device. If a client sends `prompt_cache_key`, only
        the changed part of its next request is computed. 0 disables the cache.
      queue_seconds: The most seconds of queued work. Further requests get status 503 with a Retry-After header.
      answer_seconds: The time limit of a request in seconds; later answers become status 504.
      items: The most texts, steps, nodes and samples of a request together; larger requests get status 413.
      critiques: The most critiques that a request may ask of a judge.
    """

    longest: Annotated[int, FIRST] = 8192
    prefix_tokens: Hidden[int] = 4096
    queue_seconds: Hidden[float] = 30.0
    answer_seconds: Hidden[float] = 120.0
    items: Hidden[int] = 4096
    critiques: Hidden[int] = 1024

    def __post_init__(self):
        super().__post_init__()
        if self.prefix_tokens < 0:
            raise ValueError(f"prefix_tokens is {self.prefix_tokens}: it must be 0 or more")
        for field in ("longest", "queue_seconds", "answer_seconds", "items", "critiques"):
            if not getattr(self, field) > 0:
                raise ValueError(f"{field} is {getattr(self, field)}: it must be above 0")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Served(ServeConfig):
    """Models and options of `jprm serve`.

    Attributes:
      model: Folders of trained or published models, also in a bucket, and JSON files of judges. A request names a
        folder, or a file without `.json`; the first is the default.
      policy: The policy that writes steps for /v1/continue and /v1/chat/completions: a model folder, a GGUF file, or a
        policy's JSON file.
      view: The format of prompts in /get_reward and /v1/rewards, e.g. {"prompt": "...{problem}...", "ends": [...],
        "segmentation": "auto"}.
      tokenizer: Tokenizers for clients that send token ids to /v1/rewards: folders, or tokenizer.json, .model or .gguf
        files. A request names a folder or file; the first is the default.
      calibration: Results of `jprm search` on problems with known answers. /v1/chat/completions uses them to abstain if
        a request has an `error_rate`. They must come from the same kind of search.
      adapter: Adapter of a published model that cannot be detected: a name or a JSON file.
      dtype: Storage type of the parameters. int8 takes a quarter of float32's memory, nf4 an eighth. Default: as
        trained; for a published model float32, on a GPU bfloat16.
      attention: The attention implementation, as in `jprm score`.
      weights: Whether each local device has a copy of the parameters and its own rows, or only a part of the
        parameters, for a model that is too large for one device.
    """

    model: Annotated[Positional[tuple[Path, ...]], arg(metavar="DIR|P.json ...")] = ()
    policy: Annotated[Path | None, arg(metavar="P", help_behavior_hint=""), FIRST] = None
    view: Annotated[Path | None, arg(metavar="VIEW.json", help_behavior_hint="")] = None
    tokenizer: Annotated[tuple[Path, ...], arg(metavar="DIR ...", help_behavior_hint="")] = ()
    calibration: Annotated[Path | None, arg(name="calibrate", metavar="KNOWN.jsonl", help_behavior_hint="")] = None
    adapter: Annotated[Name, FIRST] = None
    dtype: Annotated[StoredAs, FIRST] = None
    attention: Name = None
    weights: Hidden[Weights] = "copied"
