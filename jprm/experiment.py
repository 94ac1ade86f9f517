"""Experiments: frozen dataclasses built by a Python file and changed by `--set a.b=value` on the command line."""

from __future__ import annotations

import dataclasses
import difflib
import json
import math
import os
import pathlib
import re
import typing
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

import jax
from flax.core import FrozenDict

from jprm.io.jsonl import DAMAGED, parse
from jprm.io.outputs import check_version
from jprm.io.storage import Found, Given, Place, path_of
from jprm.model import Dtype
from jprm.model.config import ModelConfig
from jprm.model.mesh import MeshConfig
from jprm.model.parameters import LoraConfig
from jprm.model.transformer import check_model
from jprm.options import ForeignCode, MissingPart, assigned, check_foreign, find_part, from_json, frozen, place_of, run
from jprm.token_tree import REFERENCE, Supervise

VERSION = 2
"""Version of experiment.json. Version 1 had `loss` instead of `objective`, and no version."""

ID = "id"
"""Key of the unique run id, in experiment.json and in each checkpoint's `run`."""

LOG_RATIO = "log_ratio"
"""Attribute for objectives whose scores are log ratios to a reference, and its key in experiment.json."""

REMOVED = {"local_checkpoints", "local_every"}
"""Removed fields, which older files may contain. They never affected training."""

_RECOMPUTED = ("full", "attention")
"""`ModelConfig.remat` policies whose backward pass keeps no layer matrices."""

_UNRECORDED = ("implicit", "jprm.objectives.implicit:implicit")
"""Log-ratio objectives of runs before 0.2, which did not record `log_ratio`. Their beta was 0.05."""


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class DataConfig:
    """Where records come from and how they are packed.

    train, valid: folders from `jprm prepare` or `jprm tokenise`, or JSONL files, local or in a bucket; valid may be
        empty.
    rows, micro_rows: rows per update, computed micro_rows at a time (gradient accumulation).
    window: trees packed together. A larger window pads less but starts later. If a row holds one chain
        (`Implementation.chain_rows`), it only costs memory: a few trees are enough.
    streams: a micro-batch has this many blocks, each packed by itself, so that a host packs only its own. Like the
        seed, it determines the data order. 0: one per process when the run starts, or the next smaller divisor of
        micro_rows; the run keeps that number.
    cache: local folder for token trees, so that records are tokenised once; empty for no cache. Shards of tokens in a
        bucket (`jprm tokenise`) are copied to it, by default to ~/.cache/jprm/tokens.
    cache_gb: maximum size for those copies in GB; the least recently used are deleted.
    mixture: one weight per entry of `train`; records are sampled by weight and repeat as needed, e.g. (2, 1). Or a
        function of the step, FILE.py:NAME (`jprm.methods.data.curriculum`). Empty: every record once per epoch.
    supervise: `step`: every labelled step (a PRM). `outcome`: the ends of chains with known outcome (an ORM).
        `outcome_steps`, `outcome_tokens`: that outcome at the chain's every step or token, as in Lightman et al. and
        Cobbe et al.; a shared prefix gets the mean over its chains. `token`: every step token and the end of chain (a
        policy, with the language head).
    too_long: if a chain exceeds a row, raise an `error` or `truncate` it and count the lost steps.
    siblings: cut a tree longer than a row so that the cut separates the fewest pairs of labelled alternatives.
    extras: node keys, or `score` and outputs of a scored file, e.g. `sigma`. Objectives receive their numbers as
        `Rows.extras`, NaN if a node lacks the key.
    weight: node key whose number multiplies the weight of the node's label, e.g. `rollouts` for Monte Carlo labels.
        Nodes without it keep their weight. Empty: all labels weigh 1.
    """

    train: tuple[str, ...]
    supervise: Supervise
    too_long: Literal["error", "truncate"]
    valid: tuple[str, ...] = ()
    tokens: int = 2048
    slots: int = 512
    rows: int = 8
    micro_rows: int = 1
    window: int = 128
    streams: int = 0
    cache: str = ""
    cache_gb: float = 50.0
    mixture: tuple[float, ...] | str = ()
    seed: int = 0
    siblings: bool = False
    extras: tuple[str, ...] = ()
    weight: str = ""

    def __post_init__(self):
        for field in ("tokens", "slots", "window"):
            if getattr(self, field) < 1:
                raise ValueError(f"data.{field} is {getattr(self, field)}; it must be at least 1")
        if self.rows < 1 or self.micro_rows < 1 or self.rows % self.micro_rows:
            raise ValueError(f"data.rows={self.rows} is not a positive multiple of data.micro_rows={self.micro_rows}")
        if self.streams < 0 or self.micro_rows % max(self.streams, 1):
            raise ValueError(f"data.streams={self.streams} does not divide data.micro_rows={self.micro_rows}")
        weights = self.mixture or (1.0,) * len(self.train)
        if ":" not in weights if isinstance(weights, str) else len(weights) != len(self.train) or min(weights) <= 0:
            known = f"a positive weight for each of {len(self.train)} files"
            raise ValueError(f"data.mixture={self.mixture} is not {known}, nor FILE.py:NAME")
        if self.cache_gb <= 0:
            raise ValueError(f"data.cache_gb={self.cache_gb} must be positive")
        if not self.train:
            raise ValueError("data.train is empty. Give it a folder from `jprm prepare`, or a JSONL file")


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Experiment:
    """Everything needed by `jprm train`.

    objective: a name in `jprm.objectives.OBJECTIVES`, `module:function`, or `FILE.py:function`. In an experiment file
        defining its own: `objective=f"{__file__}:function"`. The run keeps a copy of the file.
    objective_options: hyperparameters of the objective, by name, if they differ from the defaults.
    base: a GGUF file, a Hugging Face folder, another run's folder, or empty for random parameters.
    base_dtype: storage type of the frozen base while only adapters or the head are trained. If it is smaller than
        float32, checkpoints omit the base, and the run rereads it from `base`. Matrices are then dequantised, and
        adapters added, layer by layer, so model.remat must be `full` or `attention`.
    new_parameters: regular expression for paths of decoder parameters missing in `base`; they start at random.
        Other missing parameters are an error.
    reference: a second, frozen model of the same shape for the objective, in any form accepted for `base`; optional.
        Checkpoints omit it. With data.extras=("reference",) it is not loaded: the data contain its log-probabilities.
    reference_dtype: storage type of the reference. If it equals `base`, in path and type, adapters share the base's
        decoder.
    tokenizer: a file or a folder.
    stall_action: action of the watchdog: `report` the process holding up the others, or also `abort` each process stuck
        at a step, so that its launcher restarts it.
    trackers: further sinks for metrics beside `metrics.jsonl`: names in `jprm.train.callbacks.TRACKERS`, or
        `module:NAME`.
    """

    name: str
    model: ModelConfig
    tokenizer: str
    data: DataConfig
    target: TargetConfig
    objective: str
    optimizer: OptimizerConfig
    steps: int
    base: str = ""
    base_dtype: Dtype = "float32"
    reference: str = ""
    reference_dtype: Dtype = "float32"
    objective_options: Mapping[str, Any] = FrozenDict()
    lora: LoraConfig = LoraConfig()  # of rank 0: no adapters
    new_parameters: str = ""
    probe_rows: int = 0  # rows on which the head is fitted before training; 0: it starts at zero
    mesh: MeshConfig = MeshConfig()
    seed: int = 0
    log_every: int = 10
    valid_every: int = 0  # 0: at the end only
    checkpoint_every: int = 100
    keep: int = 2  # newest checkpoints kept
    keep_every: int = 0  # checkpoints of steps that are a multiple of this are kept for good; 0: none
    stall_seconds: int = 300  # without a step until the watchdog of several processes reports; 0: never
    stall_action: Literal["report", "abort"] = "report"
    trackers: tuple[str, ...] = ()
    profile: tuple[int, int] = (0, 0)  # the first and the last step to trace with jax's profiler; (0, 0): none

    def __post_init__(self):
        object.__setattr__(self, "objective_options", frozen(self.objective_options, "objective_options"))
        check_model(self.model)
        if self.steps < 1:
            raise ValueError(f"steps={self.steps} must be positive")
        if self.rereads and (not self.base or self.model.product_layers or self.model.remat not in _RECOMPUTED):
            raise ValueError(
                f"base_dtype={self.base_dtype!r} needs a base, model.remat {' or '.join(_RECOMPUTED)}, and"
                " model.product_layers=0: all else keeps what the base's matrices stand for, of every layer"
            )
        for field, pattern in self.patterns:
            try:
                re.compile(pattern)
            except re.error as error:
                raise ValueError(f"{field}={pattern!r} is no regular expression: {error}") from None
        if self.new_parameters and not self.base:
            raise ValueError(f"new_parameters={self.new_parameters!r} needs a base, which lacks them; leave it empty")
        if self.probe_rows < 0:
            raise ValueError(f"probe_rows={self.probe_rows} must not be negative")
        if self.probe_rows and self.model.head_hidden:
            raise ValueError(f"probe_rows={self.probe_rows} fits a linear head; with model.head_hidden set it to 0")
        for field in ("log_every", "checkpoint_every"):
            if getattr(self, field) < 1:
                raise ValueError(f"{field}={getattr(self, field)} must be positive")
        if not -(2**63) <= self.seed < 2**63 or not 0 <= self.data.seed < 2**32:
            raise ValueError(f"seed={self.seed} must fit 64 bits, data.seed={self.data.seed} be from 0 to {2**32 - 1}")
        if self.profile != (0, 0) and not 1 <= self.profile[0] <= self.profile[1]:
            raise ValueError(f"profile={self.profile} must be the first and the last step to trace, or (0, 0)")
        if self.keep_every < 0 or (self.keep_every and self.keep_every % self.checkpoint_every):
            raise ValueError(f"keep_every={self.keep_every} is no multiple of checkpoint_every={self.checkpoint_every}")

    @property
    def patterns(self) -> list[tuple[str, str]]:
        """(field, regular expression, "" if unset) for each pattern searched in parameter paths."""
        optimizer, lora = self.optimizer, ("lora.targets", self.lora.targets)
        fields = {f"optimizer.{field}": getattr(optimizer, field) for field in ("no_decay", "freeze")}
        factors = [("optimizer.rate_factors", pattern) for pattern, _ in optimizer.rate_factors]
        return [*fields.items(), *factors, lora, ("new_parameters", self.new_parameters)]

    @property
    def rereads(self) -> bool:
        """Whether checkpoints omit the base's decoder, which is then read from `base` whenever the run is opened."""
        return self.base_dtype != "float32"

    @property
    def task(self) -> ObjectiveConfig:
        second = bool(self.reference) and REFERENCE not in self.data.extras
        return ObjectiveConfig(self.model, self.target, self.lora, second, self.data.supervise, self.data.extras)

    @property
    def semantics(self) -> str:
        """Meaning of the head's scores, which determines their aggregation (`jprm.tree.SEMANTICS`)."""
        if self.data.supervise.startswith("outcome"):
            return "value"
        return {"progress": "advantage", "relative": "correctness"}.get(self.target.soft, self.target.labels)


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class ObjectiveConfig:
    """The experiment as seen by an objective; equal for all runs of a sweep over e.g. learning rates."""

    model: ModelConfig
    target: TargetConfig
    lora: LoraConfig = LoraConfig()
    reference: bool = False  # whether a second model is computed
    supervise: Supervise = "step"
    extras: tuple[str, ...] = ()


T = typing.TypeVar("T")


def load(path: str | os.PathLike, overrides: Sequence[str] = (), kind: type[T] = Experiment) -> T:
    """Calls `experiment()` in the .py file and applies `a.b=value` overrides (see `override`).

    Raises FileNotFoundError without the file; ValueError if it is no .py file, defines no `kind`, or an override does
    not fit. Errors of the file's own code pass.
    """
    names, what = names_in(path), f"a {kind.__module__}.{kind.__name__}"
    if "experiment" not in names:
        raise ValueError(f"{path}: defines no function experiment() that returns {what}")
    experiment = names["experiment"]()
    if not isinstance(experiment, kind):
        raise ValueError(f"{path}: experiment() returns a {type(experiment).__name__}, not {what}")
    return override(experiment, overrides)


def names_in(path: str | os.PathLike) -> dict[str, Any]:
    """Executes a Python file, at every call, and returns its globals. Errors of its code pass.

    Raises FileNotFoundError if it does not exist, ValueError if it is no .py file.
    """
    path = os.fspath(path)
    if not os.path.isfile(path):
        raise FileNotFoundError(f"{path}: no such experiment file")
    if not path.endswith(".py"):
        raise ValueError(f"{path}: not an experiment (a .py file with experiment()). Others: examples/trainers/")
    return run(path, pathlib.Path(path).read_text(encoding="utf-8-sig"))


def override(experiment: T, assignments: Sequence[str]) -> T:
    """Returns a copy with all `a.b=value` assignments (`options.assigned`), so dependent fields can change together.

    A new `base` also brings its model shape and tokenizer (`jprm.checkpoints.base.rebased`, whose errors pass).

    Raises ValueError for an unknown field (but not below `objective_options`), another type, or a refused value.
    """
    tree, named = to_json(experiment), set()
    for assignment in assignments:
        key, value = assigned(assignment)
        *parents, leaf = key.split(".")
        place = tree
        for parent in parents:
            place = place.get(parent) if isinstance(place, dict) else None
        if not isinstance(place, dict) or (leaf not in place and parents != ["objective_options"]):
            known = place if isinstance(place, dict) else tree
            near = [path for path in _paths(tree) if path.rpartition(".")[2] == leaf]
            near = near or [".".join([*parents, match]) for match in difflib.get_close_matches(leaf, known)]
            meant = f"did you mean {' or '.join(near)}?" if near else f"the fields there are {', '.join(known)}"
            raise ValueError(f"--set {assignment!r}: {key} is no field; {meant}")
        place[leaf] = value
        named.add(key)
    changed = from_json(type(experiment), tree)
    if isinstance(experiment, Experiment) and experiment.base and changed.base not in ("", experiment.base):
        return find_part("jprm.checkpoints.base:rebased", {}, "base")(experiment, changed, named)
    return changed


def _paths(tree: Mapping[str, Any], within: str = "") -> Iterator[str]:
    """Yields every field's dotted path, e.g. `data.train`."""
    for name, value in tree.items():
        yield within + name
        yield from _paths(value, f"{within}{name}.") if isinstance(value, Mapping) else ()


def read(path: str | os.PathLike) -> Experiment:
    """Returns the experiment of a run from its experiment.json, without importing the objective.

    Raises FileNotFoundError without the file; ValueError if it is damaged, of a newer version, names a part that does
    not exist (MissingPart), or a module in the run's folder or the current one (ForeignCode).
    """
    return read_record(path)[0]


def read_record(path: str | os.PathLike) -> tuple[Experiment, float | None]:
    """Like `read`, with its errors; also returns the objective's `log_ratio` (beta), `None` if the head scores."""
    try:
        values = parse(path_of(path).read_bytes(), os.fspath(path))
        version = values.pop("version", 1) if isinstance(values, dict) else 1
        check_version(version, VERSION, path)
        if version == 1 and "loss" in values:
            values["objective"] = values.pop("loss")
        for field in (REMOVED | {ID}) & set(values):
            del values[field]
        _check_names(values, path)
        log_ratio = values.pop(LOG_RATIO, None) if isinstance(values, dict) else None
        experiment = from_json(Experiment, values)
        if log_ratio is None and experiment.objective in _UNRECORDED:
            log_ratio = experiment.objective_options.get("beta", 0.05)
        return experiment, from_json(float | None, log_ratio, LOG_RATIO)
    except ForeignCode:
        raise
    except MissingPart as error:
        raise MissingPart(f"{path}: {error}") from error
    except DAMAGED as error:
        raise ValueError(
            f"{path}: is damaged or of another version of jprm ({error}). Put a copy back, or train in another folder"
        ) from error


def _check_names(values: Any, path: str | os.PathLike) -> None:
    """Raises ForeignCode if a part's name would import code of the folder. Only an objective may be `FILE.py:NAME`."""
    values = values if isinstance(values, dict) else {}
    model, objective = values.get("model"), str(values.get("objective"))
    names = dict(model if isinstance(model, dict) else {})
    names |= {} if objective.rpartition(":")[0].endswith(".py") else {"objective": objective}
    for field, name in names.items():
        for entry in name if isinstance(name, list) else [name]:  # a pattern of layers names several
            if isinstance(entry, str):
                check_foreign(entry, path_of(path).parent, f"{path}: {field}")


def written(experiment: Experiment, log_ratio: float | None = None, id: str = "") -> str:
    """Returns the text of experiment.json, which `read_record` and `run_id` read; `None` or "" leaves a key out."""
    extra = {key: value for key, value in ((ID, id), (LOG_RATIO, log_ratio)) if value not in (None, "")}
    return json.dumps({"version": VERSION, **extra, **to_json(experiment)}, indent=2) + "\n"


def run_id(folder: Place) -> str:
    """Returns a run's random id; "" if there is no run, or it has none. Raises ValueError if its file is no JSON."""
    path = folder / RUN
    values = parse(path.read_bytes(), str(path)) if path.is_file() else {}
    return str(values.get(ID, "")) if isinstance(values, dict) else ""


def to_json(config: Any) -> Any:
    """Converts a frozen dataclass to a dict of JSON values, tuples to lists; inverse of `jprm.options.from_json`."""
    return json.loads(json.dumps(dataclasses.asdict(config), default=dict))


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class OptimizerConfig:
    """Patterns are matched (re.search) against parameter paths, e.g. `decoder/layers_0/query` or `head/kernel`."""

    learning_rate: float
    name: str = "adamw"  # or muon, or FILE.py:NAME (`jprm.train.state.OPTIMIZERS`)
    warmup_steps: int = 0
    decay: str = "cosine"  # or linear, both to 0 after the last step; constant, or FILE.py:NAME
    b1: float = 0.9
    b2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.0
    no_decay: str = r"norm|bias|embed"
    clip_norm: float = 1.0  # of the global gradient; 0 does not clip
    freeze: str = ""  # "" freezes nothing
    rate_factors: tuple[tuple[str, float], ...] = ()  # (pattern, factor): the first that matches
    bad_steps: Literal["stop", "skip"] = "stop"  # at a spike, or a loss or gradient not finite
    spike: float = 0.0  # a loss or gradient norm above this times its running mean is a spike; 0: none is

    def __post_init__(self):
        for field in ("learning_rate", "warmup_steps", "weight_decay", "clip_norm", "spike"):
            if not 0 <= getattr(self, field) < math.inf:
                raise ValueError(f"optimizer.{field}={getattr(self, field)} must be a finite number, not below 0")
        for field, known in {"name": ("adamw", "muon"), "decay": ("constant", "cosine", "linear")}.items():
            if (value := getattr(self, field)) not in known and ":" not in value:
                raise ValueError(f"optimizer.{field}={value!r} is not one of {', '.join(known)}, nor FILE.py:NAME")
        if self.spike and not self.spike > 1:
            raise ValueError(f"optimizer.spike={self.spike} must be above 1, or 0 for never")

    @property
    def guarded(self) -> bool:
        return self.bad_steps == "skip" or self.spike > 0


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class TargetConfig:
    """How labels become training targets. Fields that change the learned model have no default.

    labels: semantics of the labels, which must equal those of the trees, and of the model's scores, which determine
        their aggregation (`jprm.score.aggregate.DEFAULT_RULE`). `rating`: a judgement in {-1, 0, 1}. `correctness`: the
        probability in [0, 1] that the step is correct. `value`: the probability that the chain will end correctly.
    neutral: target for the rating 0: `positive` (Lightman et al.), `negative` (TRL's script), `third` (a separate
        class, for the ternary head) or `drop` (weight 0). For other labels it must be `none`.
    after_error: `keep` or `mask` (weight 0) the steps after an earlier error on their own path. With neutral=negative,
        a neutral step counts as an error. The incorrect step itself keeps its weight, as do its alternatives and their
        continuations. Paths are compared by tokens, not nodes. Alternatives with equal text end at the same token: each
        keeps its label and weight, and an error in one masks the continuations of all. A step starting with all tokens
        of an incorrect alternative counts as its continuation; if steps end with newlines, only a step of several lines
        can.
    soft: transform of a probability. With v the step's value and u the previous step's:
        `soft`: v itself. `hard`: 1 if v > `threshold`, else 0 (with threshold 0, Math-Shepherd's estimate). `entropy`:
            log(1 - v + v e^eta) / eta, the reward of rollouts under entropy regularisation (ER-PRM, Zhang et al. 2024,
            arXiv 2412.11006). `relative`: 1 if v >= `threshold` u and v > 0, else 0 (GenPRM, Zhao et al. 2025, arXiv
            2504.00891). `progress`: (1 + v - u) / 2, the advantage v - u scaled to a probability, so `squared_error`
            regresses 2 p - 1 on it (PAV, Setlur et al. 2024, arXiv 2410.08146). The last three need labels="value".
            `relative` and `progress` skip steps whose u is unknown: first steps, and steps after an unlabelled one.
    threshold: for `hard` and `relative`.
    eta: for `entropy`; it approaches `soft` towards 0, and `hard` towards infinity.
    smoothing: a target t becomes (1 - smoothing) t + smoothing / 2.
    consensus: an extra (`data.extras`) with a judge's verdict in [0, 1]. Steps keep their weight up to the first step
        on their path on which label > `threshold` and verdict > 0.5 disagree. (Zhang et al. 2025, arXiv 2501.07301,
        drop the whole chain, as does `jprm label consensus`.) Empty: no judge.
    """

    labels: Literal["rating", "correctness", "value"]
    neutral: Literal["positive", "negative", "third", "drop", "none"]
    after_error: Literal["keep", "mask"]
    soft: Literal["soft", "hard", "entropy", "relative", "progress"] = "soft"
    threshold: float = 0.0
    eta: float = 1.0
    smoothing: float = 0.0
    consensus: str = ""

    def __post_init__(self):
        if self.soft in ("entropy", "relative", "progress") and self.labels != "value":
            raise ValueError(f"target.soft={self.soft!r} takes labels='value', not {self.labels!r}")
        if self.soft == "relative" and not self.threshold > 0:
            raise ValueError("target.soft='relative' needs target.threshold, the least progress of a correct step")
        if not 0 <= self.threshold or not 0 < self.eta <= 50:
            raise ValueError(f"target.threshold={self.threshold} must be 0 or more, target.eta={self.eta} in (0, 50]")
        if not 0 <= self.smoothing < 1 or (self.smoothing and self.neutral == "third"):
            raise ValueError(f"target.smoothing={self.smoothing} must be in [0, 1), and 0 with neutral='third'")
        if (self.labels == "rating") == (self.neutral == "none"):
            raise ValueError(
                f"labels={self.labels!r} with neutral={self.neutral!r}: only ratings have a neutral class"
                " (positive, negative, third or drop); all others need neutral='none'"
            )


# ------------------------------------------------------------------------------------------------------ what a path is
#
# Decided by the files in the folder, for loading, training, sampling and export.

RUN, PEFT, PUBLISHED = "experiment.json", "adapter_config.json", "config.json"
ADAPTER = "adapter.json"  # alone only if it names the `base` elsewhere; an export holds one beside its config.json

Kind = Literal["run", "peft", "huggingface", "gguf"]


def kind_of(path: Given | Found) -> Kind:
    """Returns `run` (experiment.json), `peft` (adapter_config.json), `huggingface` (config.json) or `gguf`, a file.

    Raises:
      FileNotFoundError: the path does not exist, or the folder lacks all marker files.
      ValueError: another kind of file.
      OSError: a model at `hf://`, which is downloaded, is not there or cannot be reached.
    """
    path = place_of(path)
    if path.is_dir():
        files: dict[str, Kind] = {RUN: "run", PEFT: "peft", PUBLISHED: "huggingface"}
        for name, kind in files.items():
            if (path / name).is_file():
                return kind
        if (path / ADAPTER).is_file() and b'"base"' in (path / ADAPTER).read_bytes():
            return "huggingface"
        raise FileNotFoundError(
            f"{path}: holds no model: neither {RUN} (a run of `jprm train`), {PUBLISHED} (a Hugging Face model) nor"
            f" {PEFT} (a LoRA of PEFT) is there"
        )
    if not path.exists():
        what = "Give a model's folder or hf://OWNER/NAME@REVISION; a base or a policy may be a GGUF file"
        if re.fullmatch(r"[\w-]+/[\w.-]+", os.fspath(path)) and not path.parent.exists():
            what = f"Of the Hugging Face Hub it is hf://{path}"
        raise FileNotFoundError(f"{path}: no such file or folder. {what}")
    if path.suffix != ".gguf":
        raise ValueError(f"{path}: not a .gguf file. Give the folder that holds {PUBLISHED}")
    return "gguf"
