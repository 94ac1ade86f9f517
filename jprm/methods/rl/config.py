"""`RLExperiment`: the experiment of `jprm rl`, and the policy's training as an `Experiment`."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, Literal

from flax.core import FrozenDict

from jprm.checkpoints import base
from jprm.experiment import RUN, DataConfig, Experiment, OptimizerConfig, TargetConfig, frozen, kind_of, read
from jprm.methods.rl import credit as credits
from jprm.methods.rl.credit import CreditConfig
from jprm.methods.rl.engine import EngineConfig
from jprm.model import Dtype
from jprm.model.config import ModelConfig
from jprm.model.heads import of_channels
from jprm.model.mesh import MeshConfig
from jprm.model.parameters import LoraConfig
from jprm.options import place_of


@dataclasses.dataclass(frozen=True)
class UpdateMethod:
    """An update's data, and its objective with fixed options.

    samples: whether the policy samples; else it learns from the solutions in the problem files, as many tokens as an
        update's samples would have.
    pairs: whether right and wrong continuations are compared (`jprm.methods.rl.samples`).
    """

    objective: str
    options: Mapping[str, Any] = FrozenDict()
    samples: bool = True
    pairs: bool = False


_DPO = UpdateMethod("implicit", FrozenDict(loss="dpo"), pairs=True)
METHODS = {
    "policy_gradient": UpdateMethod("policy_gradient"),  # samples with their credit
    "rejection": UpdateMethod(
        "next_token"
    ),  # the samples that the verifier accepts (Dong et al. 2023; Gulcehre et al. 2023)
    "dpo": _DPO,
    "step_dpo": _DPO,
    "demonstrations": UpdateMethod("next_token", samples=False),
}


@dataclasses.dataclass(frozen=True)
class GuardConfig:
    """Penalties for samples, and conditions to end a run.

    floor: the reward for a blank or cut-off chain; below 0 it counts under every credit.
    gaming: end the run, and restore the best checkpoint, if the PRM's score is above the best checkpoint's and fewer
        answers are correct. An evaluation raises the suspicion, and fresh samples from both policies decide: at most 5
        % of runs without a loss are ended (`jprm.methods.rl.progress.fresh_test`).
    kl_budget: end the run if the estimated KL(policy, start), in nats per token, is above it; 0: no limit.
    disagreement: end the run if the two PRMs' step scores differ by more on average; 0: no limit.

    Raises ValueError if a limit is negative or not finite, or `floor` is above 0.
    """

    floor: float = -1.0
    gaming: bool = True
    kl_budget: float = 0.0
    disagreement: float = 0.0

    def __post_init__(self):
        if not -math.inf < self.floor <= 0:
            raise ValueError(f"guards.floor={self.floor} must be a finite number, at most 0")
        for field in ("kl_budget", "disagreement"):
            if not 0 <= getattr(self, field) < math.inf:
                raise ValueError(f"guards.{field}={getattr(self, field)} must be a finite number, not below 0")


@dataclasses.dataclass(frozen=True)
class EnvironmentConfig:
    """The environment in which the policy acts; without one it only writes chains. See
    `jprm.methods.worlds.environment`.

    name: `FILE.py:NAME` or `module:NAME`.
    turns: the most turns per episode. `max_tokens` limits one turn, and `tokens` all turns with the environment's
        answers.
    at_once, seconds, processes: as in `World`. A call that fails or takes too long costs its sample and is counted.
    template: a folder with the chat template; empty: the policy's.

    Raises ValueError if `turns`, `at_once` or `seconds` is not above 0; the environment is imported later.
    """

    name: str
    turns: int = 16
    at_once: int = 16
    seconds: float = 30.0
    processes: bool = False
    template: str = ""

    def __post_init__(self):
        if min(self.turns, self.at_once) < 1 or not self.seconds > 0:
            raise ValueError("environment: turns, at_once and seconds must be above 0")


@dataclasses.dataclass(frozen=True)
class RefreshConfig:
    """The PRM's own training on the current policy's steps.

    every: updates between refreshes, each on the last update's samples; 0: the PRM stays fixed.
    labels: `working`, the check of the working; `rollouts`, whether the verifier accepts the current policy's
        completions of a step; `outcome`, the verifier's rewards for chains, for an outcome model or an implicit PRM.
    rollouts, chains: for labels="rollouts", completions per step, and labelled samples per problem.
    steps, learning_rate: for the PRM's optimizer, which otherwise keeps its run's settings.
    replay: more files with labelled steps to train on, e.g. the PRM's own data.

    Raises ValueError if a number is not above 0, except `every`.
    """

    every: int = 0
    steps: int = 50
    learning_rate: float = 1e-4
    replay: tuple[str, ...] = ()
    labels: Literal["working", "rollouts", "outcome"] = "working"
    rollouts: int = 8
    chains: int = 4

    def __post_init__(self):
        if self.every < 0 or min(self.steps, self.rollouts, self.chains) < 1 or not self.learning_rate > 0:
            raise ValueError(
                "refresh: every must not be below 0; steps, learning_rate, rollouts, chains must be above 0"
            )


@dataclasses.dataclass(frozen=True)
class RLExperiment:
    """A policy's reinforcement learning.

    An update samples `samples` chains for each of `problems_an_update` problems, lets the verifier and the PRM judge
    them, computes every token's credit, and trains on them in `minibatches` optimizer steps.

    policy: the run, Hugging Face folder or GGUF file from which the policy starts.
    model: model fields that its files lack, or changes to a run's model: dtype, remat, attention, ...
    problems, held_out: JSON Lines of {"problem": ..., "answer": ...}, or with other fields for the verifier, e.g.
    `tests`; only evaluations use the second.
    prm, second_prm: PRM folders, or empty. The second never gives credit: its disagreement shows gaming.
    verifier: `answer`, `boxed` (only a box counts), `tests` (for programs), a checker's FILE.json, or your own,
        `module:NAME` or `FILE.py:NAME`: a function from (record, steps) to a reward in [0, 1], or a
        `jprm.methods.verify.verifiers.Verifier`.
    working: (record, steps) to whether each step is right, None if unknown, for evaluations: `arithmetic`, or as above.
    environment: the environment in which the policy acts; its reward replaces the verifier's.
    method: a name in `METHODS`.
    tokens: per row. The longest prompt and `max_tokens` must fit, with pairs twice `max_tokens`.
    sampler_rows: the most samples decoded at once.
    sampler_dtype: the sampler's matrix storage type; empty: the policy's computation dtype.
    prm_dtype: the PRMs' storage type; if bfloat16 or float32, also their computation dtype. Empty: as trained.
    reference_dtype: the reference decoder's storage type.
    stale: an update's samples are drawn this many updates earlier, by the policy at that time. 0: by the policy that
        learns from them.
    carry: with `stale`, sampling stops with the update's last sample. Later updates' unfinished samples continue with
        the next policy, and each token keeps the log-probability under the policy that sampled it.
    sampling_hosts: with `stale`, the job's last processes, this many, sample and judge while the others learn; 0: all
        processes do both, in turn.
    reference: keep the start's parameters and measure the KL against them.
    checkpoint_every: updates between checkpoints. A new best evaluation has one too.
    engine: servers that sample instead of this process. Such a run does not continue bit for bit.

    Raises ValueError, naming the field, if one is out of range or does not fit another. Opens no file.
    """

    name: str
    policy: str
    problems: tuple[str, ...]
    held_out: tuple[str, ...]
    credit: CreditConfig
    optimizer: OptimizerConfig
    updates: int
    method: Literal["policy_gradient", "rejection", "dpo", "step_dpo", "demonstrations"] = "policy_gradient"
    objective_options: Mapping[str, Any] = FrozenDict()
    model: Mapping[str, Any] = FrozenDict()
    prm: str = ""
    second_prm: str = ""
    verifier: str = "answer"
    working: str = "arithmetic"
    environment: EnvironmentConfig | None = None
    guards: GuardConfig = GuardConfig()
    refresh: RefreshConfig = RefreshConfig()
    problems_an_update: int = 16
    samples: int = 16
    temperature: float = 1.0
    max_tokens: int = 512
    sampler_rows: int = 256
    sampler_dtype: Literal["", "float32", "bfloat16", "int8"] = ""
    prm_dtype: Literal["", "float32", "bfloat16", "int8"] = ""
    reference_dtype: Dtype = "float32"
    minibatches: int = 1
    stale: int = 0
    carry: bool = False
    sampling_hosts: int = 0
    tokens: int = 2048
    micro_rows: int = 1
    lora: LoraConfig = LoraConfig()
    reference: bool = True
    engine: EngineConfig | None = None
    evaluate_every: int = 10  # updates
    evaluate_samples: int = 4  # per held-out problem
    mesh: MeshConfig = MeshConfig()
    seed: int = 0
    checkpoint_every: int = 10
    keep: int = 2  # newest checkpoints kept
    stall_seconds: int = 300  # as in `jprm.experiment.Experiment`; 0: never
    trackers: tuple[str, ...] = ()  # as in `jprm.experiment.Experiment`

    def __post_init__(self):
        for field in ("objective_options", "model"):
            object.__setattr__(self, field, frozen(getattr(self, field), field))
        for field in ("updates", "problems_an_update", "samples", "max_tokens", "sampler_rows", "minibatches", "tokens",
                      "micro_rows", "evaluate_every", "evaluate_samples", "checkpoint_every"):  # fmt: skip
            if getattr(self, field) < 1:
                raise ValueError(f"{field}={getattr(self, field)} must be positive")
        if self.stale < 0 or (self.stale and not METHODS[self.method].samples):
            raise ValueError(f"stale={self.stale} must not be below 0, and is of methods that sample")
        if self.carry and (not self.stale or self.method != "policy_gradient" or self.engine or self.environment):
            raise ValueError(
                "carry=true needs samples that are drawn ahead, in this process and without an environment: set stale"
                " above 0 and method='policy_gradient', and no engine"
            )
        if self.sampling_hosts:
            self._check_sampling_hosts()
        if self.engine and self.temperature != 1:
            raise ValueError(
                f"temperature={self.temperature} must be 1 with an engine, which reports log-probabilities at 1"
            )
        if not self.temperature > 0:
            raise ValueError(f"temperature={self.temperature} must be above 0: the policy has to explore")
        if self.problems_an_update % self.minibatches:
            raise ValueError(
                f"problems_an_update={self.problems_an_update} must be a multiple of minibatches={self.minibatches}"
            )
        if "temperature" in self.objective_options:
            raise ValueError("objective_options.temperature always equals the samples': set only temperature")
        if set_by_method := set(METHODS[self.method].options) & set(self.objective_options):
            raise ValueError(f"objective_options.{min(set_by_method)} is set by method={self.method!r}: leave it out")
        last, ratio = self.credit.norm == "last", self.objective_options.get("ratio", "token")
        if self.method == "policy_gradient" and last != (ratio == "sequence"):
            raise ValueError(
                f"credit.norm={self.credit.norm!r} with objective_options.ratio={ratio!r}: ratios of sequences belong"
                " to norm='last', which puts a sample's advantage on its last token, and to nothing else"
            )
        if self.environment:
            self._check_environment(last or ratio == "sequence")
        if not self.problems or not self.held_out:
            raise ValueError("problems and held_out must each name at least one JSON Lines file")
        if self.method == "policy_gradient" and credits.find(self.credit.name).prm and not self.prm:
            raise ValueError(f"credit.name={self.credit.name!r} needs the scores of a PRM: set prm to its folder")
        if self.refresh.every and not (self.prm and METHODS[self.method].samples):
            raise ValueError(f"refresh.every={self.refresh.every} needs a prm, and a method that samples")
        if self.second_prm and not self.prm:
            raise ValueError("second_prm needs a prm to compare with. Set prm")
        if self.guards.disagreement and not self.second_prm:
            raise ValueError(f"guards.disagreement={self.guards.disagreement} needs second_prm")
        if self.guards.kl_budget and not self.reference:
            raise ValueError(f"guards.kl_budget={self.guards.kl_budget} needs reference=true")

    def _check_sampling_hosts(self) -> None:
        """Raises ValueError for settings that do not fit sampling hosts."""
        reason = ""
        if self.sampling_hosts < 0:
            reason = "must not be below 0"
        elif not self.stale:
            reason = "samples while the others learn, so samples are drawn ahead: set stale=1 or more"
        elif self.engine:
            reason = "the engine samples already; leave one of them out"
        elif self.carry:
            reason = "carry=true goes on with the newest policy, so that learners would wait; set carry=false"
        elif self.refresh.every:
            reason = f"refresh.every={self.refresh.every} trains the PRM, which learners do not hold; set it to 0"
        if reason:
            raise ValueError(f"sampling_hosts={self.sampling_hosts}: {reason}")

    def _check_environment(self, of_sequences: bool) -> None:
        """Raises ValueError for settings that do not fit episodes."""
        reason = ""
        if self.method not in ("policy_gradient", "rejection"):
            reason = f"method={self.method!r} takes whole texts of the policy; use policy_gradient or rejection"
        elif of_sequences:
            reason = "ratios of sequences would count what the world wrote; use objective_options.ratio='token'"
        elif self.engine:
            reason = "an engine samples whole chains; leave it out, and the policy is sampled in this process"
        elif self.refresh.every:
            reason = f"refresh.every={self.refresh.every} labels chains of steps; set it to 0"
        if reason:
            raise ValueError(f"environment={self.environment.name!r}: {reason}")  # pyright: ignore


def learner(config: RLExperiment) -> Experiment:
    """Returns the policy's training as an experiment; the loop supplies its data. Raises as `model_of`.

    Its steps are the optimizer's, `updates` x `minibatches`. Base, tokenizer and reference are the start policy's.
    """
    rows, method = config.micro_rows, METHODS[config.method]
    options = {"temperature": config.temperature} if config.method == "policy_gradient" else method.options
    return Experiment(
        name=config.name,
        model=model_of(config.policy, config.model),
        tokenizer=config.policy,
        data=DataConfig(
            train=config.problems, supervise="outcome" if method.pairs else "token", too_long="error",
            tokens=config.tokens, slots=4 * config.samples if method.pairs else config.tokens,
            rows=rows, micro_rows=rows, seed=config.seed % 2**32,
        ),
        target=TargetConfig(labels="correctness", neutral="none", after_error="keep"),
        objective=method.objective,
        objective_options={**config.objective_options, **options},
        optimizer=config.optimizer,
        steps=config.updates * config.minibatches,
        base=config.policy,
        reference=config.policy if config.reference else "",
        reference_dtype=config.reference_dtype,
        lora=config.lora,
        mesh=config.mesh,
        seed=config.seed,
        log_every=config.minibatches,
        checkpoint_every=config.checkpoint_every * config.minibatches,
        keep=config.keep,
        stall_seconds=config.stall_seconds,
        trackers=config.trackers,
    )  # fmt: skip


def model_of(path: str, changes: Mapping[str, Any] = FrozenDict()) -> ModelConfig:
    """Returns the model of the policy at `path` (run, Hugging Face folder or GGUF file), with `changes` of its fields.

    Reads no weights, but downloads an `hf://` model whole. Raises ValueError for a reward model, an unsupported one or
    an unknown field, FileNotFoundError if there is no model at `path`, OSError if the Hub cannot give it.
    """
    if unknown := set(changes) - {field.name for field in dataclasses.fields(ModelConfig)}:
        raise ValueError(f"model.{min(unknown)} is not a field of a model")
    if kind_of(place := place_of(path)) != "run":
        return base.model_config(path, head=of_channels(0), **changes)
    model = dataclasses.replace(read(place / RUN).model, **changes)
    if model.head != of_channels(0):
        raise ValueError(f"{path}: its head is {model.head!r}; a policy has a language head")
    return model
