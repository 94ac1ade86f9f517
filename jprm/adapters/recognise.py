"""Which adapter a folder needs: recognised from its files, or read from a user's JSON file."""

from __future__ import annotations

import dataclasses
import os
import pathlib
import re
from typing import Any, get_type_hints

from jprm import registry
from jprm.adapters.published import PUBLISHED
from jprm.adapters.record import FILE, Adapter
from jprm.checkpoints import kinds
from jprm.checkpoints.kinds import kind_of
from jprm.checkpoints.safetensors import Tensors, read_json
from jprm.io.storage import named_in, path_of
from jprm.options import OptionError, values_of
from jprm.tokenizer import load_tokenizer

OUTER = "pretrained_model."
"""What a value head's wrapper may put before the names of the model in it."""


@dataclasses.dataclass(frozen=True)
class Signs:
    """What identifies an adapter's folder. All fields that are set must match."""

    architecture: str = ""  # regular expression for the whole of the first of config.json's `architectures`
    tensor: str = ""
    token: str = ""  # of the tokenizer, by its name
    named: str = ""  # regular expression, ignoring case, in the folder's path or config.json's `_name_or_path`
    labels: tuple[str, ...] = ()  # config.json's `id2label`
    lora: bool = False  # a PEFT folder

    def found(
        self, architecture: str, tensors: frozenset[str], place: str, labels: tuple[str, ...], lora: bool
    ) -> bool:
        """Returns whether all fields but the token match; finding that takes a tokenizer."""
        return (
            re.fullmatch(self.architecture or ".*", architecture) is not None
            and (not self.tensor or self.tensor in tensors)
            and re.search(self.named, place, re.IGNORECASE) is not None
            and (not self.labels or self.labels == labels)
            and lora == self.lora
        )


_TOKENS = r"\w+ForTokenClassification"

SIGNS: tuple[tuple[str, Signs], ...] = (
    ("pure", Signs(tensor="score.weight", named=r"\bpure\b|jinachris")),
    ("pure", Signs(tensor="score.0.weight", named=r"\bpure\b|jinachris")),
    ("qwen-prm", Signs("Qwen2ForProcessRewardModel", tensor="score.0.weight", token="<extra_0>")),
    ("qwen-rm", Signs("Qwen2ForRewardModel", tensor="score.0.weight")),
    ("reward", Signs(r"\w+ForSequenceClassification", tensor="score.weight")),
    ("pqm", Signs(tensor="v_head.summary.weight", token="[PRM]")),
    ("skywork", Signs("Qwen2.*", tensor="v_head.summary.weight")),
    ("reasoneval", Signs(tensor="score_head.weight")),
    ("math-psa", Signs(lora=True, named=r"psa|openr")),
    ("jprm", Signs(_TOKENS, tensor="score.weight", labels=("wrong", "right"))),
    ("jprm-ternary", Signs(_TOKENS, tensor="score.weight", labels=("negative", "neutral", "positive"))),
    ("trl", Signs(_TOKENS, tensor="score.weight")),
    ("math-shepherd", Signs("MistralForCausalLM", named=r"math.?shepherd")),
    ("llemma", Signs("LlamaForCausalLM", named=r"llemma.*(prm|orm)|llemma.reward")),
    ("rlhflow", Signs("LlamaForCausalLM", named=r"PRM.(mistral|deepseek)|rlhflow.*prm")),
    ("eurus", Signs("Qwen2ForCausalLM", named=r"eurusprm|implicit.?prm")),
)
"""Adapters by their signs; the first match counts. A causal language model's files do not tell that it is a PRM, so
these are recognised by their names alone."""


_INCORRECT = frozenset("- 0 bad error false incorrect invalid negative no wrong".split())
_CORRECT = frozenset("+ 1 correct good ok positive right true valid yes".split())


def _of_steps(labels: tuple[str, ...]) -> bool:
    """Returns whether the labels of a token classifier are those of incorrect and correct steps, or say nothing."""
    words = [label.lower().removeprefix("step_").removeprefix("label_") for label in labels]
    return len(words) == 2 and words[0] in _INCORRECT and words[1] in _CORRECT


def named(adapter: str) -> Adapter:
    """Returns the record of a JSON file, of a published name, or the user's own (`module:NAME`, `FILE.py:NAME`)."""
    if str(adapter).endswith(".json"):
        return read(adapter)
    return registry.find(str(adapter), PUBLISHED, "adapter", Adapter, files=True)


def recognise(folder: pathlib.Path) -> Adapter:
    """Returns the adapter of a folder: its own `adapter.json`, or the published one whose signs match."""
    if (folder / FILE).is_file():
        return read(folder / FILE)
    lora = kind_of(folder) == "peft"
    fields = read_json(folder / (kinds.PEFT if lora else kinds.PUBLISHED))
    architectures = fields.get("architectures")
    architecture = str(architectures[0]) if isinstance(architectures, list) and architectures else ""
    parts = folder.resolve().parts[-3:]  # a download's cache has the model's name two above the files
    place = f"{'/'.join(parts)} {fields.get('_name_or_path', '')}"
    tensors = frozenset() if lora else frozenset(name.removeprefix(OUTER) for name in Tensors(folder))
    tokenizer = None if lora else load_tokenizer(folder)
    labels = fields.get("id2label")
    labels = tuple(str(labels.get(str(i), "")) for i in range(len(labels))) if isinstance(labels, dict) else ()
    for name, signs in SIGNS:
        marked = not signs.token or (tokenizer is not None and tokenizer.token_id(signs.token) is not None)
        if marked and signs.found(architecture, tensors, place, labels, lora):
            if name == "trl" and labels and not _of_steps(labels):
                raise ValueError(
                    f"{folder}: its labels are {', '.join(labels[:6])}{', ...' * (len(labels) > 6)}: not an incorrect"
                    " step, then a correct one. If it is a PRM, say how it is read: --adapter trl where the second"
                    f" label is that of correct steps, or a file {FILE} in the folder"
                )
            return PUBLISHED[name]
    raise ValueError(
        f"{folder}: {architecture or 'a LoRA'} with these tensors is no PRM that jprm recognises. Say how it is read:"
        f" --adapter NAME, with one of {', '.join(PUBLISHED)}, or a file {FILE} in the folder"
    )


def read(path: str | os.PathLike) -> Adapter:
    """Reads the record in a JSON file. Raises ValueError or FileNotFoundError naming file and field."""
    path = path_of(path)
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such file")
    fields: dict[str, Any] = read_json(path)
    like = fields.pop("like", None)
    if like is not None and (not isinstance(like, str) or like not in PUBLISHED):
        raise ValueError(f"{path}: like {like!r} is not one of {', '.join(PUBLISHED)}")
    try:
        values_of(get_type_hints(Adapter) | {"like": str}, fields)  # an adapter takes them as they are written
    except OptionError as error:
        raise ValueError(f"{path}: {error}") from None
    for name in ("base", "reference"):  # relative to the file that names them
        if fields.get(name):
            fields[name] = str(named_in(path, fields[name]))
    try:
        if like is None:
            return Adapter(**fields)
        if "semantics" in fields:
            fields.setdefault("aggregation", "")
        if "problem" in fields or fields.get("chat"):  # the other record's place for a system message is not this one's
            fields.setdefault("system", ())
        return dataclasses.replace(PUBLISHED[like], **({"name": path.parent.resolve().name} | fields))
    except (TypeError, ValueError) as error:
        raise ValueError(f"{path}: {re.sub(r'^.*__init__.. ', '', str(error))}") from error
