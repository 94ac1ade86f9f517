"""`jprm label`: step labels without humans."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal

from tyro.conf import FlagCreatePairsOff, arg

from jprm.apps import Hidden, one_of
from jprm.apps.cli.arguments import (
    Commands,
    Count,
    EnvironmentOption,
    Folder,
    Judge,
    Number,
    PolicyFile,
    built,
    command,
    policy_of,
    print_counts,
)
from jprm.apps.cli.fleets import UNDIVIDED, Divided, Once, RunFiles, divided
from jprm.methods.label.config import Adaptive, CritiqueConfig, MonteCarloConfig, OmegaConfig
from jprm.methods.verify.verifiers import KINDS
from jprm.model import Dtype

label = Commands()

Input = Annotated[Path, arg(metavar="F.jsonl")]
Output = Annotated[Path, arg(metavar="G.jsonl")]


@dataclasses.dataclass(frozen=True)
class RolloutOptions:
    """
    Attributes:
      policy: A run or Hugging Face folder, a GGUF file, or a JSON file with a server's `url` and `model`.
      input: Records with problems and answers, one per line.
      output: The records as trees with a value in each node.
      rollouts: File that stores rollouts. Stored rollouts are not sampled again.
      environment: Environment of an agent, FILE.py:NAME or module:NAME. The input must then hold trajectories with the
        fields of the environment's tasks (for omega, only the tasks); the environment's reward is the verifier.
        turns=INT limits an episode (default: 16).
    """

    policy: PolicyFile
    input: Input
    output: Output
    rollouts: Annotated[Path, arg(metavar="R.jsonl")]
    environment: EnvironmentOption = ()


def label_mc(files: Any, chosen: Any, how: Any) -> None:
    from jprm.methods.label.jobs import label_monte_carlo

    adaptive = Adaptive(*chosen.adaptive) if chosen.adaptive else None
    config = built(MonteCarloConfig, chosen, adaptive=adaptive)
    together = config.trees_at_once if config.tokens else 1  # trees that share a budget
    _by_rollouts("label mc", label_monte_carlo, files, config, together, how)


def label_omega(files: Any, chosen: Any, how: Any) -> None:
    from jprm.methods.label.jobs import label_omega

    _by_rollouts("label omega", label_omega, files, built(OmegaConfig, chosen), 1, how)


def _by_rollouts(
    command: str, label: Callable[..., dict], files: RolloutOptions, config: Any, unit: int, how: Any
) -> None:
    loaded = Once(lambda: policy_of(files.policy, files.environment))

    def work(part: RunFiles) -> dict:
        policy = loaded()
        part.settings = {"policy": policy.name, **dataclasses.asdict(config)}
        return label(policy, *part.files, part.more[0], config)

    divided(command, how, work, files.input, files.output, files.rollouts, unit=unit)


@dataclasses.dataclass(frozen=True)
class CritiqueOptions:
    """
    Attributes:
      model: JSON file of a judge, as for `jprm score`.
      input: Records with labelled steps, one per line.
      output: One record per kept critique.
      critiques: File for all critiques. Stored critiques are not sampled again.
    """

    model: Judge
    input: Input
    output: Output
    critiques: Annotated[Path, arg(metavar="K.jsonl")]


def label_critique(files: Any, chosen: Any, how: Any) -> None:
    from jprm.methods.judge.load import load_plain_judge
    from jprm.methods.label.jobs import label_critique

    config = built(CritiqueConfig, chosen)
    loaded = Once(lambda: load_plain_judge(files.model))

    def work(part: RunFiles) -> dict:
        judge = loaded()
        part.settings = {**judge.identity, **dataclasses.asdict(config)}
        return label_critique(judge, *part.files, part.more[0], config)

    divided("label critique", how, work, files.input, files.output, files.critiques)


AdaptiveNumbers = Annotated[tuple[float, int, float] | None, arg(metavar="THRESHOLD MOST MEAN", help_behavior_hint="")]
Rollouts = Annotated[int, arg(name="n")]
AtOnce = Annotated[int, arg(name="at-once")]
MONTE_CARLO = {
    "k": Rollouts,
    "adaptive": AdaptiveNumbers,
    "tokens": Number,
    "trees_at_once": AtOnce,
    "z": Hidden[float],
}
PUBLISHED = {"c_puct": Hidden[float], "alpha": Hidden[float], "beta": Hidden[float], "length": Hidden[float]}
OMEGA = PUBLISHED | {"k": Rollouts, "budget": Count, "problems_at_once": AtOnce}
CRITIQUE = {"threshold": Number, "trees_at_once": AtOnce}
label.command(name="mc")(command(label_mc, MonteCarloConfig, RolloutOptions, Divided, UNDIVIDED, **MONTE_CARLO))
label.command(name="omega")(command(label_omega, OmegaConfig, RolloutOptions, Divided, UNDIVIDED, **OMEGA))
label.command(name="critique")(command(label_critique, CritiqueConfig, CritiqueOptions, Divided, UNDIVIDED, **CRITIQUE))


@label.command(name="verify")
def label_verify(
    kind: Annotated[str, arg(metavar=f"{'|'.join(KINDS)}|FILE.json", help_behavior_hint="")],
    input: Input,
    output: Output,
    unsafe_no_sandbox: FlagCreatePairsOff[bool] = False,
    how: Divided = UNDIVIDED,
) -> None:
    """Label steps by computation. Steps that cannot be checked stay unlabelled.

    Rerun to continue a stopped command; an output of another request is an error. Prints counts. A missing sandbox is
    an error, before any work, except for arithmetic.

    For example:
      jprm label verify --kind arithmetic --input chains.jsonl --output checked.jsonl
      jprm label verify --kind python --input programs.jsonl --output checked.jsonl
      jprm label verify --kind coq --input proofs.jsonl --output checked.jsonl
      jprm label verify --kind agda.json --input proofs.jsonl --output checked.jsonl

    Args:
        kind: arithmetic: equations and inequalities; python: code, by the record's `tests`; coq: tactics, by its
            `theorem`; FILE.json: a checker that is a command.
        input: Chains, pools or trees, one per line.
        output: The records as trees, with 1 (correct), 0 (incorrect) or no label on every step.
        unsafe_no_sandbox: Run checkers without bubblewrap, limited only in time and memory. The code then has all your
            permissions.
    """
    from jprm.methods.label.jobs import label_verify

    sandbox = not unsafe_no_sandbox
    divided("label verify", how, lambda part: label_verify(kind, *part.files, in_sandbox=sandbox), input, output)


def add(name: str) -> None:
    """Adds the command for a labeller from the user's code, `module:NAME` or `FILE.py:NAME`.

    Imports it when it runs.
    """

    def label_own(input: Input, output: Output, how: Divided = UNDIVIDED) -> None:
        """Label steps by your own labeller. Rerun to continue a stopped command.

        For example:
          jprm label graded.py:LENGTH --input chains.jsonl --output labelled.jsonl

        Args:
            input: Chains, pools or trees, one per line.
            output: The records as trees, with a label on each step that the labeller decides.
        """
        from jprm.methods.label.jobs import label_own

        divided(f"label {name}", how, lambda part: label_own(name, *part.files), input, output)

    label.command(name=name)(label_own)


@label.command(name="outcomes")
def label_outcomes(
    input: Input,
    output: Output,
    verifier: str = "",
    environment: Annotated[str, arg(metavar="FILE.py:NAME")] = "",
    how: Divided = UNDIVIDED,
) -> None:
    """Label whole chains as correct or incorrect, as best-of-n and outcome models need.

    Programs are judged by the `tests` of their record. A sample then gets `passed`, the number of passed tests, and as
    `answer` letters shared by programs with equal behaviour on the tests, so that votes count them together. A chain
    that the verifier cannot judge gets no `correct`, but the reason under `undecided`. Rerun to continue a stopped
    command with --verifier; with --environment the output is written anew. Prints counts.

    For example:
      jprm label outcomes --verifier tests --input pools.jsonl --output judged.jsonl
      jprm label outcomes --environment shop.py:SHOP --input trajectories.jsonl --output judged.jsonl

    Args:
        verifier: `answer` compares with the record's answer; `boxed` accepts only a boxed answer; `tests` runs
            programs; FILE.json describes a checker that is a command; or your own verifier, module:NAME or
            FILE.py:NAME.
        input: Chains, pools or trees, one per line.
        output: The records, with `correct` on every chain and sample, or on each final node of a tree.
        environment: Environment in which the turns of trajectories are replayed; its reward becomes `outcome`.
    """
    if bool(verifier) == bool(environment):
        raise ValueError("label outcomes: give --verifier or --environment, and not both")
    from jprm.methods.label.jobs import label_outcomes
    from jprm.methods.worlds.acting import label_replayed

    judge = label_replayed if environment else label_outcomes
    divided("label outcomes", how, lambda part: judge(environment or verifier, *part.files), input, output)


@label.command(name="teacher")
def label_teacher(model: Folder, input: Input, output: Output, how: Divided = UNDIVIDED) -> None:
    """Soft labels: the scores of an existing model.

    Rerun to continue a stopped command; an output of another request is an error. Prints counts.

    For example:
      jprm label teacher --model runs/prm800k_smollm2 --input chains.jsonl --output soft.jsonl

    Args:
        model: Folder of the teacher, as for `jprm score`.
        input: Chains, pools or trees, one per line.
        output: The records as trees, with a probability on every step.
    """
    from jprm.methods.label.jobs import label_teacher
    from jprm.score.scorer import CHUNK

    divided("label teacher", how, lambda part: label_teacher(model, *part.files), input, output, unit=CHUNK)


@label.command(name="reference")
def label_reference(
    model: Annotated[Path, arg(metavar="MODEL")],
    input: Input,
    output: Output,
    dtype: Annotated[Dtype, one_of(Dtype)] = "float32",
    how: Divided = UNDIVIDED,
) -> None:
    """Store a frozen language model's log-probabilities, so `implicit` training need not compute them.

    Train on the output with `--set reference=MODEL 'data.extras=["reference"]'`. Rerun to continue a stopped command;
    an output of another request is an error. Prints counts.

    For example:
      jprm label reference --model SmolLM2.gguf --input pools.jsonl --output with_reference.jsonl

    Args:
        model: Reference model, in any form accepted by an experiment's `reference`.
        input: Chains, pools or trees, one per line.
        output: The records as trees, with a number under `reference` in every node.
        dtype: Storage type of its parameters.
    """
    from jprm.methods.label.jobs import label_reference
    from jprm.score.scorer import CHUNK

    divided("label reference", how, lambda part: label_reference(model, *part.files, dtype), input, output, unit=CHUNK)


@label.command(name="judge")
def label_by_judge(
    model: Judge,
    input: Input,
    output: Output,
    domain: str,
    rubric: str,
    how: Divided = UNDIVIDED,
) -> None:
    """Soft labels by a judge, for domains without computable checks. People should audit a sample.

    Rerun to continue a stopped command; an output of another request is an error. Every record stores domain and
    rubric, which must not be blank, and reports show them. Prints counts and the generated tokens.

    For example:
      jprm label judge --model judge.json --input chains.jsonl --output soft.jsonl --domain law \\
        --rubric "A step is correct if the cited rule exists and applies to the facts."

    Args:
        model: JSON file of a judge, as for `jprm score`.
        input: Chains, pools or trees, one per line.
        output: The records as trees, with the critiques, and a probability on every judged step.
        domain: Domain of the problems, e.g. law.
        rubric: Definition of a correct step. The judge's prompt should state the same.
    """
    from jprm.methods.judge.load import load_plain_judge
    from jprm.methods.label.jobs import label_judge
    from jprm.score.scorer import CHUNK

    loaded = Once(lambda: load_plain_judge(model))

    def work(part: RunFiles) -> dict:
        return label_judge(loaded(), *part.files, domain, rubric)

    divided("label judge", how, work, input, output, unit=CHUNK)


@label.command(name="consensus")
def label_consensus(
    input: Annotated[Path, arg(metavar="F.jsonl")],
    other: Annotated[tuple[Path, ...], arg(metavar="G.jsonl ...")],
    output: Annotated[Path, arg(metavar="H.jsonl")],
    by: Literal["agreement", "dawid_skene"] = "agreement",
    gold: Annotated[Path | None, arg(metavar="GOLD.jsonl", help_behavior_hint="")] = None,
    report: Annotated[Path | None, arg(metavar="R.json", help_behavior_hint="")] = None,
    threshold: Annotated[tuple[float, ...], arg(metavar="FLOAT [FLOAT]", help_behavior_hint="")] = (),
) -> None:
    """Combine labels from several sources: keep agreement only, or pool them by reliability.

    An existing output is replaced. Prints how many chains were kept and dropped, or the sources' reliability.

    For example:
      jprm label consensus --input values.jsonl --other teacher.jsonl --output agreed.jsonl
      jprm label consensus --input a.jsonl --other b.jsonl c.jsonl --by dawid_skene --output pooled.jsonl \\
        --gold people.jsonl --report judges.json

    Args:
        input: Labelled records. The output contains their chains.
        other: The same chains, labelled by other sources.
        output: For `agreement`: the kept chains with the labels of the input, each a tree with one branch. For
            `dawid_skene`: all records, labelled by the probability that a step is correct.
        by: `agreement` keeps chains on whose first error all sources agree. `dawid_skene` estimates how reliably each
            source recognises errors and correct steps, and pools them.
        gold: For `dawid_skene`: a few labels that are known to be right. They correct sources that are lenient about
            the same steps.
        report: File for each source's reliability as estimated by `dawid_skene`, with intervals.
        threshold: Labels of the input below the first number are errors, and labels of the other sources below the
            second. Default: 0.5 for correctness, 0 for ratings; for values, a step is an error if no rollout is
            correct.
    """
    if len(threshold) > 2:
        raise ValueError("label consensus: --threshold takes one number for the input, and one for all others")
    below, others_below = (*threshold, None, None)[:2]
    if by == "agreement":
        from jprm.methods.label.jobs import label_consensus

        if gold or report:
            raise ValueError("label consensus: --gold and --report are for --by dawid_skene")
        print_counts(label_consensus(input, other, output, (below, others_below)), output)
        return
    from jprm.methods.evaluate.blocks import show
    from jprm.methods.label.pooled import label_pooled, table

    thresholds = [below, *[others_below] * len(other), None]
    agreement = label_pooled([input, *other], output, thresholds, gold, report)
    show([table(agreement)])
    print_counts({key: agreement[key] for key in ("steps", "problems", "gold")}, output)
