"""`jprm search`: finds a chain for each problem, with a policy that writes steps and a model that scores them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from tyro.conf import arg
from tyro.extras import SubcommandApp

from jprm.cli.arguments import Folder, OnError

search = SubcommandApp()

PolicyFile = Annotated[Path, arg(metavar="P")]
Problems = Annotated[Path, arg(metavar="PROBLEMS.jsonl")]
Output = Annotated[Path, arg(metavar="F.jsonl")]
Budget = Annotated[int, arg(metavar="TOKENS")]
Rule = Literal["min", "prod", "mean", "last", "max", "sum_log_odds", "mean_log"]
Choose = Literal["best", "majority", "weighted"]


@search.command(name="best-of-n")
def best_of_n(
    policy: PolicyFile,
    model: Folder,
    input: Problems,
    budget: Budget,
    output: Output,
    n: int = 64,
    choose: Choose = "best",
    rule: Rule | None = None,
    seed: int = 0,
    at_once: int = 32,
    on_error: OnError = "stop",
) -> None:
    """Best of N: draw n whole chains and return the one with the highest score, or the answer that wins a vote.

    The output is a file of pools, which `jprm eval best-of-n` reads as well. The same command continues one that was
    stopped; no problem is searched twice and no sample is paid for twice.

    For example:
      jprm search best-of-n --policy server.json --model runs/prm --input problems.jsonl --budget 20000 --n 64 \\
        --output best.jsonl
      jprm search best-of-n --policy server.json --model runs/prm --input problems.jsonl --budget 20000 \\
        --choose weighted --output votes.jsonl

    Args:
        policy: A run's or a Hugging Face folder, a GGUF file, or a JSON file with `url` and `model` of a server.
        model: The folder of a trained model, which scores them.
        input: Records with `problem` and, where it is known, `answer`, one a line.
        budget: Generated tokens of one problem, at most. Fewer chains are drawn where n do not fit.
        output: A record a problem, with every chain, its scores, and under `search` which one was chosen.
        n: Chains of one problem, at most.
        choose: The finished chain of the best score, the answer of most chains, or the one with the most score.
        rule: From steps' scores to a chain's. By default that of the model's authors, or what its labels call for.
        seed: Draws are numbered from here.
        at_once: Problems that advance together.
        on_error: Stop at the first bad line of the input, or skip bad lines and write them beside the output.
    """
    from jprm.search.best_of_n import BestOfN

    _run(policy, model, input, output, BestOfN(n), on_error, rule, choose, budget, seed, at_once)


@search.command(name="beam")
def beam(
    policy: PolicyFile,
    model: Folder,
    input: Problems,
    budget: Budget,
    output: Output,
    width: int = 4,
    expand: int = 4,
    max_steps: int = 40,
    choose: Choose = "best",
    rule: Rule | None = None,
    seed: int = 0,
    at_once: int = 32,
    on_error: OnError = "stop",
) -> None:
    """Step beam search: draw next steps, score them, go on from the best `width`.

    It draws about width * expand times the tokens of one chain. A budget that ends before a chain is finished leaves a
    tree without a result, which says so. The same command continues one that was stopped.

    For example:
      jprm search beam --policy server.json --model runs/prm --input problems.jsonl --budget 20000 --width 4 \\
        --expand 4 --output beam.jsonl

    Args:
        policy: A run's or a Hugging Face folder, a GGUF file, or a JSON file with `url` and `model` of a server.
        model: The folder of a trained model, which scores them.
        input: Records with `problem` and, where it is known, `answer`, one a line.
        budget: Generated tokens of one problem, at most.
        output: A tree a problem, with every step that was drawn, its score, and under `search` what was chosen.
        width: Prefixes that are kept after every step.
        expand: Next steps drawn from each of them.
        max_steps: Rounds, at most.
        choose: The finished chain of the best score, the answer of most chains, or the one with the most score.
        rule: From steps' scores to a chain's. By default that of the model's authors, or what its labels call for.
        seed: Draws are numbered from here.
        at_once: Problems that advance together.
        on_error: Stop at the first bad line of the input, or skip bad lines and write them beside the output.
    """
    from jprm.search.beam import Beam

    _run(policy, model, input, output, Beam(width, expand, max_steps), on_error, rule, choose, budget, seed, at_once)


@search.command(name="dvts")
def dvts(
    policy: PolicyFile,
    model: Folder,
    input: Problems,
    budget: Budget,
    output: Output,
    subtrees: int = 4,
    expand: int = 4,
    max_steps: int = 40,
    choose: Choose = "best",
    rule: Rule | None = None,
    seed: int = 0,
    at_once: int = 32,
    on_error: OnError = "stop",
) -> None:
    """DVTS (diverse verifier tree search): independent subtrees, each going on from the best of its own next steps.

    It draws about subtrees * expand times the tokens of one chain. A budget that ends before a chain is finished leaves
    a tree without a result, which says so. The same command continues one that was stopped.

    For example:
      jprm search dvts --policy server.json --model runs/prm --input problems.jsonl --budget 20000 \\
        --subtrees 4 --expand 4 --output dvts.jsonl

    Args:
        policy: A run's or a Hugging Face folder, a GGUF file, or a JSON file with `url` and `model` of a server.
        model: The folder of a trained model, which scores them.
        input: Records with `problem` and, where it is known, `answer`, one a line.
        budget: Generated tokens of one problem, at most.
        output: A tree a problem, with every step that was drawn, its score, and under `search` what was chosen.
        subtrees: Independent beams of width 1.
        expand: Next steps drawn in each of them.
        max_steps: Rounds, at most.
        choose: The finished chain of the best score, the answer of most chains, or the one with the most score.
        rule: From steps' scores to a chain's. By default that of the model's authors, or what its labels call for.
        seed: Draws are numbered from here.
        at_once: Problems that advance together.
        on_error: Stop at the first bad line of the input, or skip bad lines and write them beside the output.
    """
    from jprm.search.beam import DVTS

    method = DVTS(subtrees, expand, max_steps)
    _run(policy, model, input, output, method, on_error, rule, choose, budget, seed, at_once)


@search.command(name="mcts")
def mcts(
    policy: PolicyFile,
    model: Folder,
    input: Problems,
    budget: Budget,
    output: Output,
    simulations: int = 64,
    expand: int = 4,
    c_puct: float = 1.25,
    rollouts: int = 0,
    max_steps: int = 40,
    choose: Choose = "best",
    rule: Rule | None = None,
    seed: int = 0,
    at_once: int = 32,
    on_error: OnError = "stop",
) -> None:
    """Monte Carlo tree search: PUCT decides where to go on, the model's score is the value of a leaf.

    The same command continues one that was stopped.

    For example:
      jprm search mcts --policy server.json --model runs/prm --input problems.jsonl --budget 20000 \\
        --simulations 64 --expand 4 --rollouts 1 --output mcts.jsonl

    Args:
        policy: A run's or a Hugging Face folder, a GGUF file, or a JSON file with `url` and `model` of a server.
        model: The folder of a trained model, which scores them.
        input: Records with `problem` and, where it is known, `answer`, one a line.
        budget: Generated tokens of one problem, at most.
        output: A tree a problem, with every step that was drawn, its score, and under `search` what was chosen.
        simulations: Walks from the problem to a leaf, at most.
        expand: Next steps drawn of every leaf that is visited.
        c_puct: How much the search explores.
        rollouts: Completions of every visited leaf; their mean score is its value instead, and they may be chosen.
        max_steps: Steps of a chain, at most.
        choose: The finished chain of the best score, the answer of most chains, or the one with the most score.
        rule: From steps' scores to a chain's. By default that of the model's authors, or what its labels call for.
        seed: Draws are numbered from here.
        at_once: Problems that advance together.
        on_error: Stop at the first bad line of the input, or skip bad lines and write them beside the output.
    """
    from jprm.search.mcts import MCTS

    method = MCTS(simulations, expand, c_puct, rollouts, max_steps)
    _run(policy, model, input, output, method, on_error, rule, choose, budget, seed, at_once)


@search.command(name="refine")
def refine(
    policy: PolicyFile,
    model: Folder,
    input: Problems,
    budget: Budget,
    output: Output,
    rounds: int = 8,
    drafts: int = 1,
    samples: int = 1,
    choose: Choose = "best",
    rule: Rule | None = None,
    seed: int = 0,
    at_once: int = 32,
    on_error: OnError = "stop",
) -> None:
    """Iterative refinement: draw a chain again from its weakest step on, and keep the new one if it scores higher.

    The same command continues one that was stopped.

    For example:
      jprm search refine --policy server.json --model runs/prm --input problems.jsonl --budget 20000 \\
        --rounds 8 --drafts 4 --output refine.jsonl

    Args:
        policy: A run's or a Hugging Face folder, a GGUF file, or a JSON file with `url` and `model` of a server.
        model: The folder of a trained model, which scores them.
        input: Records with `problem` and, where it is known, `answer`, one a line.
        budget: Generated tokens of one problem, at most.
        output: A tree a problem, with every step that was drawn, its score, and under `search` what was chosen.
        rounds: How often a chain is drawn again, at most.
        drafts: Chains drawn first, of which the best is refined.
        samples: New endings drawn each time.
        choose: The finished chain of the best score, the answer of most chains, or the one with the most score.
        rule: From steps' scores to a chain's. By default that of the model's authors, or what its labels call for.
        seed: Draws are numbered from here.
        at_once: Problems that advance together.
        on_error: Stop at the first bad line of the input, or skip bad lines and write them beside the output.
    """
    from jprm.search.refine import Refine

    method = Refine(rounds, drafts, samples)
    _run(policy, model, input, output, method, on_error, rule, choose, budget, seed, at_once)


@search.command(name="filter")
def conformal_filter(
    input: Annotated[Path, arg(metavar="RESULTS.jsonl")],
    calibration: Annotated[Path, arg(metavar="KNOWN.jsonl")],
    output: Output,
    error_rate: float,
    confidence: float = 0.9,
) -> None:
    """Accept the results of a search, or abstain, so that a stated share of the accepted answers at most is wrong.

    The threshold on the score of the chosen chain comes from results on other problems, whose answers are known. The
    promise holds for problems like those, searched in the same way. Where no threshold keeps it, nothing is accepted.

    For example:
      jprm search filter --input best.jsonl --calibration known.jsonl --error-rate 0.1 --output accepted.jsonl

    Args:
        input: What `jprm search` wrote.
        calibration: What the same search wrote for problems with answers, none of which is in the input.
        output: The records of the input, with `accepted` under `search`.
        error_rate: The share of accepted answers that may be wrong.
        confidence: The share of calibration sets for which that holds.
    """
    from jprm.search.conformal_filter import filter_file

    counts = filter_file(input, calibration, output, error_rate, confidence)
    print(f"{output}: written. " + ", ".join(f"{name}: {count}" for name, count in counts.items()))


def _run(policy: Path, model: Path, input: Path, output: Path, method: Any, on_error: str, rule: str | None,
         choose: str, budget: int, seed: int, at_once: int) -> None:  # fmt: skip
    """Searches and says what was done."""
    import jprm
    from jprm.policy.load import load_policy
    from jprm.search.files import search_file
    from jprm.search.lockstep import SearchConfig
    from jprm.search.scorer import live_scorer

    writer, prm = load_policy(policy), jprm.load(model)
    config = SearchConfig(method, rule or prm.rule, choose, budget, seed, at_once)
    scored_by = {"model": prm.name, "step": prm.step}
    counts = search_file(writer, live_scorer(prm), scored_by, input, output, config, on_error=on_error)
    print(f"{output}: written. " + ", ".join(f"{name}: {count}" for name, count in counts.items()))
