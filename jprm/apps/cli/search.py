"""`jprm sample`: samples chains for each problem. `jprm search`: finds one chain, guided by step scores.

Each method in `jprm.methods.search.growing_tree` is a command, and so is the user's own (`module:NAME` or
`FILE.py:NAME`). Its options are the fields of its config and of `SearchOptions`. `jprm fuse` fits verifiers to several
sources of evidence.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any

from tyro.conf import Positional, arg

from jprm.apps import FIRST, one_of
from jprm.apps.cli.arguments import (
    Commands,
    EnvironmentOption,
    Folder,
    OneModel,
    OnError,
    PolicyFile,
    Settings,
    built,
    check_judge,
    command,
    policy_of,
    print_counts,
    scorer_of,
)
from jprm.apps.cli.fleets import UNDIVIDED, Divided, Once, RunFiles, divided
from jprm.methods.search.growing_tree import METHODS, Choice, find
from jprm.options import assigned
from jprm.score.scale import Rule

search = Commands()


def sample(
    policy: PolicyFile,
    input: Annotated[Path, arg(metavar="PROBLEMS.jsonl")],
    output: Annotated[Path, arg(metavar="F.jsonl")],
    n: int,
    prompt: Annotated[str | None, arg(metavar="TEXT", help_behavior_hint="")] = None,
    set_: Settings = (),
    seed: int = 0,
    at_once: int = 32,
    on_error: OnError = "stop",
    how: Divided = UNDIVIDED,
) -> None:
    """Sample chains for every problem, as pools for `jprm score` and `jprm eval`.

    A sample is correct if its answer equals the problem's `answer`; use `jprm label outcomes` for programs. A sample
    that reached the token limit (`finish_reason` is `length`) has no answer and counts as incorrect. Rerun to continue;
    an output of another request is an error. Prints counts.

    For example:
      jprm sample --policy model.gguf --input problems.jsonl --output pools.jsonl --n 8 \
        --prompt "{problem} Reason step by step." --set chat=true temperature=0.8 max_tokens=256
      jprm sample --policy server.json --input problems.jsonl --output pools.jsonl --n 16 --shard 0/4

    Args:
        policy: A run or Hugging Face folder, a GGUF file, or a JSON file with a server's `url` and `model`.
        input: Records with `problem` and optionally `answer`, one per line.
        output: One pool per problem, which keeps the other fields of the problem's record.
        n: Samples per problem.
        prompt: Text before each sample, containing {problem}. With `--set chat=true`, it is the user message.
        set_: Fields of the policy, e.g. temperature=0.8 and max_tokens=256; for a model in this process also chat, rows
            and dtype. `logprobs=true` stores the id and log-probability of every token, `entropies=20` the entropy over
            the 20 most probable tokens.
        seed: Number of the first sample. Other numbers give other samples.
        at_once: Problems that are sampled together. If stopped, the command loses the samples of unfinished problems.
        on_error: Stop at the first bad input line, or skip bad lines and write them beside the output.
    """
    from jprm.methods.policy.load import load_policy
    from jprm.methods.search.pools import sample_file, shares

    changes = dict(map(assigned, set_)) | ({} if prompt is None else {"prompt": prompt})
    loaded = Once(lambda: load_policy(policy, **changes))

    def work(part: RunFiles) -> dict:
        if on_cpu(loaded()):
            print(
                f"{policy}: sampling on this machine's CPU, in batches. For a GGUF file, a llama.cpp server is an"
                " alternative: docs/search_and_labels.md, llama.cpp on a CPU",
                file=sys.stderr,
            )
        counts = sample_file(loaded(), part.input, part.output, n, seed=seed, at_once=at_once, on_error=on_error)
        print(f"{part.output}: {shares(counts)}")
        tell_cut(counts, loaded())
        return counts

    divided("sample", how, work, input, output, unit=at_once)


def tell_cut(counts: Mapping[str, int], policy: Any) -> None:
    """Prints how many samples reached the policy's token limit and so have no answer.

    The number is `counts["cut"]`; 0, or its absence, prints no line.
    """
    if cut := counts.get("cut", 0):
        settings = getattr(policy, "options", None) or getattr(policy, "config", None)
        limit = getattr(settings, "max_tokens", None)
        now = "" if limit is None else f" It is {limit:,} now."
        print(f"{cut:,} samples were cut off by max_tokens, and have no answer: give the policy a larger one.{now}")


def on_cpu(policy: Any) -> bool:
    """Returns whether the policy is a local model on a CPU; `False` for a server."""
    mesh = getattr(policy, "mesh", None)
    return mesh is not None and all(device.platform == "cpu" for device in mesh.devices.flat)


@dataclasses.dataclass(frozen=True)
class SearchOptions:
    """
    Attributes:
      policy: A run or Hugging Face folder, a GGUF file, or a JSON file with a server's `url` and `model`.
      model: Folder of the step-scoring model, or JSON file of a judge, as for `jprm score`. With a judge the output
        stores critiques and cost under `judge`. Only `best-of-n --choose majority` needs no model.
      reference: A smaller language model; scores are log ratios to it, as in `jprm score`.
      input: Records with `problem` and optionally `answer`, one per line.
      budget: Maximum generated tokens per problem.
      output: One record per problem: all samples with scores, and the choice under `search`. If rerun, the command
        continues and repeats no problem or sample.
      choose: The finished chain with the highest score (best), the most frequent answer (majority), or the answer with
        the largest total score.
      by: Model output that scores steps: `score`; for a head with bounds also `low`, which prefers steps that are
        surely correct, or `high`.
      rule: Rule from step scores to a chain score. Default: the model's own rule, or the rule of its label semantics.
      seed: Number of the first sample. Other numbers give other samples.
      at_once: Problems that are searched together.
      on_error: Stop at the first bad input line, or skip bad lines and write them beside the output.
      environment: Environment of an agent, FILE.py:NAME or module:NAME. A step is then a turn; the output holds trees
        of messages. turns=INT limits an episode (default: 16).
    """

    policy: PolicyFile
    input: Annotated[Path, arg(metavar="PROBLEMS.jsonl")]
    budget: Annotated[int, arg(metavar="TOKENS")]
    output: Annotated[Path, arg(metavar="F.jsonl")]
    model: Annotated[str | None, arg(metavar="DIR|P.json", help_behavior_hint=""), FIRST] = None
    reference: OneModel = None
    choose: Choice = "best"
    by: Annotated[str, arg(metavar="OUTPUT")] = "score"
    rule: Annotated[Rule | None, one_of(Rule)] = None
    seed: int = 0
    at_once: int = 32
    on_error: OnError = "stop"
    environment: EnvironmentOption = ()


def _searching(method: type) -> Callable[[Any, Any, Any], None]:
    def run(options: SearchOptions, settings: Any, how: Any) -> None:
        from jprm.methods.jobs.score import identity
        from jprm.methods.search.best_of_n import BestOfN
        from jprm.methods.search.jobs import search_file
        from jprm.methods.search.lockstep import SearchConfig, Unscored, live_scorer
        from jprm.methods.worlds.acting import TurnScorer

        chosen, name = built(method, settings), options.model
        by = {} if options.by == "score" else {"by": options.by}
        unscored = method is BestOfN and options.choose == "majority" and not name
        if not name and (by or not unscored):
            raise ValueError("search: give --model DIR|P.json; only `best-of-n --choose majority` needs none")
        if name:
            check_judge(name, by | {"reference": options.reference})
        named = {"reference": options.reference} if options.reference else {}
        model: Once[Any] = Once(lambda: scorer_of(name, **named) if name else Unscored())
        loaded = Once(lambda: policy_of(options.policy, options.environment))

        def work(part: RunFiles) -> dict:
            prm = model()
            prm = prm.by(options.by) if by else prm
            policy = loaded()
            if not options.environment or unscored:
                scorer = live_scorer(prm)
            else:
                policy.know(part.input, options.on_error)
                scorer = TurnScorer(prm, policy)
            rule = options.rule or prm.rule
            config = SearchConfig(chosen, rule, options.choose, options.budget, options.seed, options.at_once)
            files, scored_by = (part.input, part.output), identity(prm) | by
            counts = search_file(policy, scorer, scored_by, *files, config, on_error=options.on_error)
            tell_cut(counts, policy)
            return counts

        divided("search", how, work, options.input, options.output)

    return run


def add(name: str) -> None:
    """Adds the command of a search method: a name in `METHODS`, or the user's own, `module:NAME` or `FILE.py:NAME`.

    Imports it now. Raises ValueError if it does not exist.
    """
    method = find(name)
    search.command(name=name)(command(_searching(method), method, SearchOptions, Divided, UNDIVIDED))


for _name in METHODS:
    add(_name)


@search.command(name="filter")
def conformal_filter(
    input: Annotated[Path, arg(metavar="RESULTS.jsonl")],
    calibrate: Annotated[Path, arg(metavar="KNOWN.jsonl")],
    output: Annotated[Path, arg(metavar="F.jsonl")],
    error_rate: float,
    confidence: float = 0.9,
) -> None:
    """Accept or abstain on search results, bounding the error rate of accepted answers.

    Calibrates a threshold on the chosen chain's score, using results on other problems with known answers. The
    guarantee holds for similar problems with the same search. If no threshold satisfies it, accepts no answer. Results
    of different searches, or with a problem in both files, are an error. An existing file F.jsonl is replaced. Prints
    how many answers are accepted.

    For example:
      jprm search filter --input best.jsonl --calibrate known.jsonl --error-rate 0.1 --output accepted.jsonl

    Args:
        input: Output of `jprm search`.
        calibrate: Output of the same search on other problems, with known answers.
        output: The input records, with `accepted` under `search`.
        error_rate: Maximum fraction of incorrect answers among the accepted ones, e.g. 0.1.
        confidence: Fraction of calibration sets for which the bound must hold.
    """
    from jprm.methods.search.jobs import filter_file

    print_counts(filter_file(input, calibrate, output, error_rate, confidence), output)


# ------------------------------------------------------------------------------------------------------------ jprm fuse

fuse = Commands()


@fuse.command
def fit(
    pools: Annotated[Positional[tuple[Path, ...]], arg(metavar="POOLS.jsonl ...")],
    output: Folder,
    sources: Annotated[tuple[str, ...], arg(metavar="NAME ...")] = ("arithmetic", "numbers", "form", "pool"),
) -> None:
    """Fit a verifier to pools of samples with known outcomes, one file per policy.

    The verifier is a linear ranker over the sources' features, calibrated to the probability that a chain is correct.
    If the sources include model scores, it is trained to vote, and a sample's score is the vote share of its answer. On
    held-out problems it is compared with each single source, e.g. a PRM's product; if a single source is better, the
    command prints this and the verifier uses that source alone.
    Prints the weights, costs and comparisons; an earlier verifier in DIR is replaced.
    Give at least two policies: the weight of evidence in votes is tuned on held-out policies. DIR can then replace a
    model in `jprm score`, `eval`, `search`, `label teacher`, `serve` and `rl`.

    For example:
      jprm fuse fit small.jsonl large.jsonl --output runs/fused
      jprm fuse fit small.jsonl large.jsonl --sources arithmetic numbers form pool prm=runs/prm --output runs/fused

    Args:
        pools: Pools whose samples have `correct`, or `answer` beside the problem's `answer`.
        output: Folder for verifier.json.
        sources: arithmetic, numbers, form and pool read only text. stored and logprob read step scores and
            log-probabilities in the records. prm=DIR and judge=P.json score with a model. verdicts=python, verdicts=coq
            and tests execute the chain. module:NAME or FILE.py:NAME is your own source.
    """
    from jprm.io.outputs import check_input
    from jprm.methods.evidence import sources as evidence
    from jprm.methods.evidence.fit import fit as fit_verifier

    for path in pools:
        check_input(path)
    verifier = fit_verifier(pools, sources, out=output, tell=lambda line: print(line, file=sys.stderr))
    names = evidence.names(verifier.sources)
    width = max(map(len, names))
    print(f"{'log odds for each standard deviation':>{width}}")
    for name, weight in sorted(
        zip(names, verifier.ranker.slope * verifier.ranker.weight_F, strict=True), key=lambda x: -abs(x[1])
    ):
        print(f"{name:>{width}} {weight:+.2f}")
    for row in verifier.measured["policies_left_out"]:
        kept = "" if row["incorrect_kept"] == 1 else f", {row['incorrect_kept']:.0%} of its incorrect chains kept"
        gain, error = 100 * row["gain"], 196 * row["standard_error"]
        print(f"left out {row['left_out']}{kept}: weighted vote less majority {gain:+.1f} ± {error:.1f} points")
    chosen, held_out = verifier.measured["chosen"], verifier.measured["held_out"]
    for name, (best, voted) in held_out.items():
        taken = " (taken)" if name == chosen else ""
        print(f"held-out problems, {name}: best of n {100 * best:.1f} %, vote {100 * voted:.1f} %{taken}")
    if chosen != "fused":
        print(f"{chosen} alone beats all sources together: the verifier uses only this score")
    chains = verifier.measured["chains"]
    for name, cost in verifier.measured["cost"].items():
        spent = f", {cost['tokens'] / chains:.0f} tokens" if cost["tokens"] else ""
        print(f"cost of {name}: {1e3 * cost['seconds'] / chains:.2f} ms a chain{spent}")
    vote = verifier.vote
    print(f"vote: power {vote.power:g}, agreement {vote.agreement:g}, distance {vote.distance:g}")
    print(f"{output}: written")
