"""`jprm label`: labels steps without humans."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal

from tyro.conf import FlagCreatePairsOff, arg
from tyro.extras import SubcommandApp

label = SubcommandApp()


@label.command(name="mc")
def label_mc(
    policy: Annotated[Path, arg(metavar="P")],
    input: Annotated[Path, arg(metavar="F.jsonl")],
    output: Annotated[Path, arg(metavar="G.jsonl")],
    rollouts: Annotated[Path, arg(metavar="R.jsonl")],
    estimate: Literal["soft", "hard"],
    k: int = 8,
    seed: int = 0,
    adaptive: Annotated[tuple[float, int, float] | None, arg(metavar="THRESHOLD MOST MEAN")] = None,
) -> None:
    """Monte Carlo values: the share of k completions of every prefix that reach the answer.

    The same command continues one that was stopped.

    For example:
      jprm label mc --policy server.json --input chains.jsonl --output values.jsonl --rollouts rollouts.jsonl \\
        --estimate soft

    Args:
        policy: A run's or a Hugging Face folder, a GGUF file, or a JSON file with `url` and `model` of a server.
        input: Chains, pools or trees with answers, one a line.
        output: The same as trees, with a value on every step.
        rollouts: Where rollouts are kept; those that it has already are not drawn again.
        estimate: The share of right rollouts (soft), or whether any is right (hard).
        k: Rollouts of every prefix.
        seed: Rollouts are numbered from here.
        adaptive: Further rollouts where the confidence interval holds THRESHOLD: MOST of a prefix, MEAN over a tree.
    """
    from jprm.label.files import label_monte_carlo
    from jprm.label.monte_carlo import Adaptive, MonteCarloConfig
    from jprm.policy.load import load_policy

    config = MonteCarloConfig(estimate, k, seed, adaptive=Adaptive(*adaptive) if adaptive else None)
    _counts(label_monte_carlo(load_policy(policy), input, output, rollouts, config), output)


@label.command(name="omega")
def label_omega(
    policy: Annotated[Path, arg(metavar="P")],
    input: Annotated[Path, arg(metavar="F.jsonl")],
    output: Annotated[Path, arg(metavar="G.jsonl")],
    rollouts: Annotated[Path, arg(metavar="R.jsonl")],
    k: int = 8,
    searches: int = 100,
    budget: int | None = None,
    seed: int = 0,
) -> None:
    """OmegaPRM: values from a tree search that finds first errors by binary search.

    The same command continues one that was stopped. Problems that are always or never solved are left out and counted.

    For example:
      jprm label omega --policy server.json --input problems.jsonl --output trees.jsonl --rollouts rollouts.jsonl

    Args:
        policy: A run's or a Hugging Face folder, a GGUF file, or a JSON file with `url` and `model` of a server.
        input: Records with problems and answers, one a line; their steps are not used.
        output: A tree of values for each problem.
        rollouts: Where rollouts are kept; those that it has already are not drawn again.
        k: Rollouts of every state.
        searches: Binary searches of a problem, at most.
        budget: Rollouts of a problem, at most.
        seed: Rollouts are numbered from here.
    """
    from jprm.label.files import label_omega
    from jprm.label.omega import OmegaConfig
    from jprm.policy.load import load_policy

    config = OmegaConfig(k=k, searches=searches, rollouts=budget, seed=seed)
    _counts(label_omega(load_policy(policy), input, output, rollouts, config), output)


@label.command(name="verify")
def label_verify(
    kind: Literal["arithmetic", "python", "coq"],
    input: Annotated[Path, arg(metavar="F.jsonl")],
    output: Annotated[Path, arg(metavar="G.jsonl")],
    unsafe_no_sandbox: FlagCreatePairsOff[bool] = False,
) -> None:
    """Formal labels: steps checked by computation. What cannot be checked is unlabelled, not wrong.

    The same command continues one that was stopped.

    For example:
      jprm label verify --kind arithmetic --input chains.jsonl --output checked.jsonl
      jprm label verify --kind python --input programs.jsonl --output checked.jsonl
      jprm label verify --kind coq --input proofs.jsonl --output checked.jsonl

    Args:
        kind: Equations and inequalities (arithmetic); code, with the record's `tests` (python); tactics, with its
            `theorem` (coq).
        input: Chains, pools or trees, one a line.
        output: The same as trees, with 1 (right), 0 (wrong) or no label on every step.
        unsafe_no_sandbox: Run python and coq without bubblewrap, with only time and memory limited: the code may do
            whatever you may.
    """
    from jprm.label.files import label_verify

    _counts(label_verify(kind, input, output, in_sandbox=not unsafe_no_sandbox), output)


@label.command(name="teacher")
def label_teacher(
    model: Annotated[Path, arg(metavar="DIR")],
    input: Annotated[Path, arg(metavar="F.jsonl")],
    output: Annotated[Path, arg(metavar="G.jsonl")],
) -> None:
    """Soft labels: the scores of a model that is there already.

    The same command continues one that was stopped.

    For example:
      jprm label teacher --model runs/prm800k_smollm2 --input chains.jsonl --output soft.jsonl

    Args:
        model: The teacher: a folder that `jprm score` takes.
        input: Chains, pools or trees, one a line.
        output: The same as trees, with a probability on every step.
    """
    from jprm.label.files import label_teacher

    _counts(label_teacher(model, input, output), output)


@label.command(name="consensus")
def label_consensus(
    input: Annotated[Path, arg(metavar="F.jsonl")],
    other: Annotated[Path, arg(metavar="G.jsonl")],
    output: Annotated[Path, arg(metavar="H.jsonl")],
    threshold: float | None = None,
    other_threshold: float | None = None,
) -> None:
    """Keep the chains on whose first error two sources of labels agree.

    For example:
      jprm label consensus --input values.jsonl --other teacher.jsonl --output agreed.jsonl

    Args:
        input: Labelled records; what is kept has these labels.
        other: The same chains, labelled by another source.
        output: The chains that are kept, each a tree of one branch.
        threshold: Labels of the first source below it are errors. By default below 0.5 for correctness, any right
            rollout for values, -1 for ratings.
        other_threshold: The same for the other source.
    """
    from jprm.label.files import label_consensus

    _counts(label_consensus(input, other, output, (threshold, other_threshold)), output)


def _counts(counts: Mapping[str, int], path: Path) -> None:
    print(f"{path}: written. " + ", ".join(f"{name}: {count}" for name, count in counts.items()))
