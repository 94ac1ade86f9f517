"""`Adapter`: the record of how a checkpoint scores steps, and the JSON that a user writes it in.

    {
      "name": "mine",
      "problem": "<|im_start|>user\\n{problem}<|im_end|>\\n<|im_start|>assistant\\n",
      "step": "{step}<step>",
      "tokens": {"<|im_start|>": null, "<|im_end|>": null, "<step>": 151651},
      "head": "score",
      "channels": ["wrong", "right"],
      "score": {"right": 1},
      "semantics": "correctness"
    }

`"like": NAME` takes every field that is not given from the published record of that name.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from typing import Any, Literal, cast

from jprm.score.aggregate import DEFAULT_RULE, RULES
from jprm.score.scale import WEIGHTS, Scale
from jprm.tokenizer import Template
from jprm.tree import SEMANTICS

FILE = "adapter.json"


@dataclasses.dataclass(frozen=True)
class Adapter:
    """How a chain is written for a checkpoint, where its steps are scored, and what its logits mean.

    A step's score is read at the last token of its template, or of `closing`. Where a published layout has more text
    after that token, the next step's template begins with that text, so a score never depends on what comes after it.
    """

    name: str
    problem: Template  # () where `chat` is true
    step: Template
    channels: Template = ()
    """The head's outputs, in order. Of a language head: the tokens whose logits are taken."""
    score: Mapping[str, float] = dataclasses.field(default_factory=dict)
    """Channel to factor: the score is the sum of factor x activation over these channels."""
    labels: bool = False
    """Whether config.json's `id2label` names the channels, each of which is an output of its own beside the score, and
    its `problem_type` says whether they are sigmoids. Where `score` is empty, it is the one label that says correct."""
    head: str = "score"
    """The module of the checkpoint that holds the head; its layers may be numbered, as in a torch Sequential."""
    mean: bool = False  # whether the one channel is the mean of a language head's logits
    activation: Literal["softmax", "sigmoid", "none", "log_ratio"] = "softmax"
    """Over the channels. `log_ratio` has none: the score is `scale` times the sum, over the tokens of the steps so far,
    of log p(token) under the model less that under the model in the folder `reference`."""
    first: Template = ()  # of the first step, where it is not `step`
    closing: Template = ()
    """Of an outcome reward model, which reads a whole conversation at its end: the template of the last step, up to
    there. Every step is then scored as if its chain ended with it, and the next one follows `step`."""
    system: Template = ()
    """In place of `problem` where there is a system message, with {system} and {problem}. Without it such a problem is
    refused."""
    turns: bool = False
    """Whether the model was trained on trajectories too, which the tokenizer's chat template writes."""
    chat: bool = False
    """Whether the folder's own chat template gives `problem`, `closing` and `system`, as
    `jprm.methods.formats.chat_template` renders it."""
    tokens: Mapping[str, int | None] = dataclasses.field(default_factory=dict)
    """Strings that must be one token each, and their published ids; null where none is published."""
    vocabulary: tuple[int, ...] = ()
    """Sizes of the published vocabularies, by config.json. The published ids are checked where the size is one."""
    joined: bool = False
    """Whether the reference tokenises one joined string: then text behind text gets no word start of its own."""
    strip: bool = False  # whether the reference drops the white space around a step
    semantics: str = "correctness"  # of its scores, one of `jprm.tree.SEMANTICS`
    aggregation: str = ""  # the rule its authors use, one of `jprm.score.aggregate.RULES`; "" is that of the semantics
    context: int | None = None  # tokens of the longest chain it was made for; None: what config.json says
    base: str = ""  # of a LoRA: the folder of the model that it changes, where adapter_config.json's is not it
    reference: str = ""  # of log_ratio: the folder of the other model
    scale: float = 1.0  # of log_ratio: beta
    outputs: Mapping[str, Mapping[str, float]] = dataclasses.field(default_factory=dict)
    """Further named outputs, such as types of errors: name to (channel to factor)."""
    redundancy: Mapping[str, float] | None = None
    """Channel to factor, as `score`: a second output, by which PRMBench judges steps without need."""
    redundancy_threshold: float | None = None  # above it a step is redundant
    threshold: float | None = None  # above it a step is correct; None: 0.5
    benchmarks: Mapping[str, Mapping[str, Any]] | None = None
    """Fields that differ in the authors' scripts of single benchmarks, by the name of the reader of their files."""
    weight: str | None = None
    """How a score becomes a vote's weight, one of `jprm.score.scale.Weight`; None: it is a probability."""

    def __post_init__(self):
        for field in ("problem", "step", "first", "closing", "system", "channels", "vocabulary"):
            value = getattr(self, field)
            object.__setattr__(self, field, (value,) if isinstance(value, str) else tuple(value))
        if not self.aggregation and self.semantics in SEMANTICS:
            object.__setattr__(self, "aggregation", DEFAULT_RULE[self.semantics])
        if reason := _wrong(self):
            raise ValueError(f"adapter {self.name!r}: {reason}")

    @property
    def score_scale(self) -> Scale:
        """What its scores mean."""
        threshold = 0.5 if self.threshold is None else self.threshold
        return Scale(threshold, cast(Any, self.weight or "score"), self.redundancy_threshold)

    def in_benchmark(self, reader: str) -> Adapter:
        """Returns the record as the authors' script of the benchmark of this reader has it."""
        fields = (self.benchmarks or {}).get(reader)
        return dataclasses.replace(self, **fields, benchmarks=None) if fields else self

    @property
    def digest(self) -> str:
        """Eight hexadecimal digits that identify the record's content."""
        return hashlib.sha256(json.dumps(to_json(self), sort_keys=True).encode()).hexdigest()[:8]


def _wrong(a: Adapter) -> str:
    """Returns what is wrong with a record, "" for nothing."""
    if a.activation not in ("softmax", "sigmoid", "none", "log_ratio"):
        return f"activation {a.activation!r} is not one of softmax, sigmoid, none, log_ratio"
    if a.semantics not in SEMANTICS:
        return f"semantics {a.semantics!r} is not one of {', '.join(SEMANTICS)}"
    if a.aggregation not in RULES:
        return f"aggregation {a.aggregation!r} is not one of {', '.join(RULES)}"
    if a.chat and (a.problem or a.closing or a.system):
        return "problem, closing and system are the chat template's where chat is true"
    if a.system and not all("".join(a.system).count(name) == 1 for name in ("{system}", "{problem}")):
        return "system must hold {system} and {problem} once"
    if "{step}" in "".join(a.problem) or not (a.chat or any("{problem}" in part for part in a.problem)):
        return "problem must hold {problem}, and not {step}"
    if a.closing and a.activation == "log_ratio":
        return "closing is for a model with a head, not for log_ratio"
    for field, template in (("step", a.step), ("first", a.first or a.step), ("closing", a.closing or a.step)):
        if sum(part.count("{step}") for part in template) != 1 or "{problem}" in "".join(template):
            return f"{field} must hold {{step}} once, and not {{problem}}"
    for reader, fields in (a.benchmarks or {}).items():
        if not isinstance(fields, Mapping) or not fields or set(fields) - {"problem", "step", "first"}:
            return f"benchmarks: {reader}: give an object with problem, step or first"
        if reason := _wrong(a.in_benchmark(reader)):
            return f"benchmarks: {reader}: {reason}"
    if a.weight not in (None, *WEIGHTS):
        return f"weight {a.weight!r} is not one of {', '.join(WEIGHTS)}"
    if a.labels:
        return "channels are config.json's where labels is true" if a.channels else ""
    if a.activation == "log_ratio":
        return "log_ratio takes no channels and no score" if a.channels or a.score else ""
    if a.context is not None and a.context < 1:
        return f"context is {a.context}; it must be positive"
    if not a.channels or len(set(a.channels)) < len(a.channels):
        return "channels must be names, each once"
    if not a.score or (unknown := sorted(set(a.score) - set(a.channels))):
        return f"score names {unknown[0]!r}, which is no channel" if a.score else "score is empty"
    if unknown := sorted(set(a.redundancy or ()) - set(a.channels)):
        return f"redundancy names {unknown[0]!r}, which is no channel"
    for name, factors in a.outputs.items():
        if name in ("score", "redundancy") or not isinstance(factors, Mapping) or not factors:
            return f"outputs: {name!r} must be another name than score, with factors of channels"
        if unknown := sorted(set(factors) - set(a.channels)):
            return f"outputs: {name!r} names {unknown[0]!r}, which is no channel"
    if (a.redundancy is None) != (a.redundancy_threshold is None):
        return "redundancy and redundancy_threshold are given together"
    if a.mean and (a.head != "lm_head" or len(a.channels) != 1):
        return "mean is of the logits of lm_head, for one channel"
    if a.head == "lm_head" and not a.mean and (absent := sorted(set(a.channels) - set(a.tokens))):
        return f"channel {absent[0]!r} of the language head is not among tokens"
    return ""


def to_json(adapter: Adapter) -> dict[str, Any]:
    """Returns the record as `jprm.methods.formats.adapters.published.read` takes it."""
    fields = dataclasses.asdict(adapter)
    absent = {name for name in ("labels", "outputs") if not fields[name]}  # so that older records keep their digests
    return {name: value for name, value in fields.items() if value is not None and name not in absent}
