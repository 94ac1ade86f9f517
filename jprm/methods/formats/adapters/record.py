"""`Adapter`: the record of how a checkpoint scores steps, and its JSON form:

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

`"like": NAME` takes omitted fields from the published record NAME.
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
    """A checkpoint's chain layout, step score positions, and logit meaning.

    A step's score is read at the last token of its template, or of `closing`. If a published layout has more text after
    that token, the next step's template must begin with it, so that a score never depends on later text.
    """

    name: str
    problem: Template  # () where `chat` is true
    step: Template
    channels: Template = ()
    """Outputs of the head, in order; for a language head, the tokens with these logits."""
    score: Mapping[str, float] = dataclasses.field(default_factory=dict)
    """Factor by channel: the score is the sum of factor x activation."""
    labels: bool = False
    """Take channels from config.json's `id2label`, each also as a separate output; its `problem_type` decides whether
    they are sigmoids. If `score` is empty, it is the one label that means correct."""
    head: str = "score"
    """Module with the head; its layers may be numbered, as in a torch Sequential."""
    mean: bool = False  # the single channel is the mean of a language head's logits
    activation: Literal["softmax", "sigmoid", "none", "log_ratio"] = "softmax"
    """Activation over the channels. `log_ratio` has no channels: the score is `scale` times the steps' log-probability
    so far under the model, minus the same under the model `reference`.
    """
    first: Template = ()  # for the first step, if it differs from `step`
    closing: Template = ()
    """For an outcome reward model, which scores at the end of a conversation: the last step's template, up to that end.
    Every step is then scored as if it were the last; the next step follows `step`.
    """
    system: Template = ()
    """Replaces `problem` if there is a system message; must contain {system} and {problem}. If empty, problems with a
    system message are refused."""
    turns: bool = False
    """The model was also trained on trajectories, written by the tokenizer's chat template."""
    chat: bool = False
    """Take `problem`, `closing` and `system` from the folder's chat template, as rendered by
    `jprm.methods.formats.chat_template`."""
    tokens: Mapping[str, int | None] = dataclasses.field(default_factory=dict)
    """Strings that must each be one token, with their published ids, or null."""
    vocabulary: tuple[int, ...] = ()
    """Published vocabulary sizes in config.json. Published ids are checked only for these sizes."""
    joined: bool = False
    """The reference code tokenises one joined string, so that later parts do not start a new word."""
    strip: bool = False  # the reference code strips white space around steps
    semantics: str = "correctness"  # one of `jprm.tree.SEMANTICS`
    aggregation: str = ""  # the authors' rule, one of `jprm.score.aggregate.RULES`; "": by semantics
    context: int | None = None  # longest supported chain in tokens; None: by config.json
    base: str = ""  # for a LoRA: folder of the base model, if adapter_config.json's is wrong
    reference: str = ""  # for log_ratio: folder of the other model
    scale: float = 1.0  # for log_ratio: beta
    outputs: Mapping[str, Mapping[str, float]] = dataclasses.field(default_factory=dict)
    """Further outputs by name, e.g. error types: each a factor by channel."""
    redundancy: Mapping[str, float] | None = None
    """Factor by channel, as in `score`: a second output, by which PRMBench finds redundant steps."""
    redundancy_threshold: float | None = None  # above it a step is redundant
    threshold: float | None = None  # above it a step is correct; None: 0.5
    benchmarks: Mapping[str, Mapping[str, Any]] | None = None
    """Fields changed in the authors' benchmark scripts, by the benchmark reader's name."""
    weight: str | None = None
    """Map from scores to vote weights, one of `jprm.score.scale.Weight`; by default the score is a probability."""

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
        """Threshold, vote weight and redundancy threshold; a threshold of `None` is 0.5, a weight of `None` `score`."""
        threshold = 0.5 if self.threshold is None else self.threshold
        return Scale(threshold, cast(Any, self.weight or "score"), self.redundancy_threshold)

    def in_benchmark(self, reader: str) -> Adapter:
        """Returns the record with the fields of `benchmarks[reader]`; itself if there are none."""
        fields = (self.benchmarks or {}).get(reader)
        return dataclasses.replace(self, **fields, benchmarks=None) if fields else self

    @property
    def digest(self) -> str:
        """Eight hex digits that identify the record's content."""
        return hashlib.sha256(json.dumps(to_json(self), sort_keys=True).encode()).hexdigest()[:8]


def _wrong(a: Adapter) -> str:
    """Returns the reason why a record is invalid, or ""."""
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
    """Returns the record as `published.read` takes it, without null fields, false `labels` and empty `outputs`."""
    fields = dataclasses.asdict(adapter)
    absent = {name for name in ("labels", "outputs") if not fields[name]}  # so that older records keep their digests
    return {name: value for name, value in fields.items() if value is not None and name not in absent}
