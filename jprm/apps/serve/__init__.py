"""`jprm serve`: scores over HTTP. Here is what its options say; the other files need a web framework."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated, Literal

from tyro.conf import Positional, arg

from jprm.apps import Name, StoredAs, one_of
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
      items: Texts, steps, nodes and samples of one request, together and at most; more get status 413.
      critiques: Critiques that one request may ask of a judge, at most.
    """

    longest: int = 8192
    prefix_tokens: int = 4096
    queue_seconds: float = 30.0
    answer_seconds: float = 120.0
    items: int = 4096
    critiques: int = 1024

    def __post_init__(self):
        super().__post_init__()
        if self.prefix_tokens < 0:
            raise ValueError(f"prefix_tokens is {self.prefix_tokens}: it must be 0 or more")
        for field in ("longest", "queue_seconds", "answer_seconds", "items", "critiques"):
            if not getattr(self, field) > 0:
                raise ValueError(f"{field} is {getattr(self, field)}: it must be above 0")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Served(ServeConfig):
    """What `jprm serve` serves, and how.

    Attributes:
      model: Folders of trained or published models, also in a bucket. A request names a folder, or takes the first.
      judge: Judges beside the models or alone, as for `jprm score --judge`; a request names a file without `.json`.
      policy: What writes steps for /v1/continue and /v1/chat/completions: a model's folder, a GGUF file, or a policy's
        JSON file.
      view: How prompts of /get_reward and /v1/rewards are written: {"prompt": "...{problem}...", "ends": [...],
        "segmentation": "auto"}.
      tokenizer: Tokenizers of callers that send token ids to /v1/rewards: folders, or files tokenizer.json, .model or
        .gguf. A request names a folder or file, or takes the first.
      calibration: Results of `jprm search` for problems with known answers, by which /v1/chat/completions abstains
        where a request names an `error_rate`. Its own searches must be the same.
      adapter: How to read a published model whose files do not show it: a name, or a JSON file.
      reference: A smaller language model: the models' scores are log ratios to it, as in `jprm score`.
      dtype: How the parameters are stored; int8 takes a quarter of float32's memory, nf4 an eighth. Default: as
        trained; a published model in float32, on a GPU in bfloat16.
      attention: The attention implementation, as in `jprm score`.
      weights: Whether every local device has a copy of the parameters and rows of its own, or a part of the parameters,
        for a model that is too large for one device.
    """

    model: Annotated[Positional[tuple[Path, ...]], arg(metavar="DIR ...")] = ()
    judge: Annotated[tuple[Path, ...], arg(metavar="P.json ...", help_behavior_hint="")] = ()
    policy: Annotated[Path | None, arg(metavar="P", help_behavior_hint="")] = None
    view: Annotated[Path | None, arg(metavar="VIEW.json", help_behavior_hint="")] = None
    tokenizer: Annotated[tuple[Path, ...], arg(metavar="DIR ...", help_behavior_hint="")] = ()
    calibration: Annotated[Path | None, arg(name="calibrate", metavar="KNOWN.jsonl", help_behavior_hint="")] = None
    adapter: Name = None
    reference: Name = None
    dtype: StoredAs = None
    attention: Name = None
    weights: Annotated[Weights, one_of(Weights)] = "copied"
