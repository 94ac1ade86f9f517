"""`jprm fuse`: verifiers that weigh evidence from many sources."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

from tyro.conf import Positional, arg

from jprm.apps.cli.arguments import Commands, Folder

fuse = Commands()


@fuse.command
def fit(
    pools: Annotated[Positional[tuple[Path, ...]], arg(metavar="POOLS.jsonl ...")],
    out: Folder,
    sources: Annotated[tuple[str, ...], arg(metavar="NAME ...")] = ("arithmetic", "numbers", "form", "pool"),
    seed: int = 0,
) -> None:
    """Fit a verifier to pools of samples with known outcome, one file for each policy.

    The verifier is a linear ranker over the sources' numbers, calibrated to the probability that a chain is correct.
    Give two policies or more: how far votes trust the evidence is chosen on policies that were left out. DIR then
    takes a model's place in `jprm score`, `eval`, `search`, `label teacher`, `serve` and `rl`.

    For example:
      jprm fuse fit small.jsonl large.jsonl --out runs/fused
      jprm fuse fit small.jsonl large.jsonl --sources arithmetic numbers form pool prm=runs/prm --out runs/fused

    Args:
        pools: Pools of samples with `correct`, or with the problem's and the samples' `answer`.
        out: The folder to write verifier.json into.
        sources: arithmetic, numbers, form and pool read text alone; stored and logprob what the records hold (scores of
            steps, log-probabilities); prm=DIR and judge=P.json score with a model; verdicts=python, coq and tests run
            what a chain is; module:NAME or FILE.py:NAME is a source of your own.
        seed: Of the draws that make left-out policies stronger.
    """
    from jprm.io.outputs import check_input
    from jprm.methods.evidence import sources as evidence
    from jprm.methods.evidence.fit import fit as fit_verifier

    for path in pools:
        check_input(path)
    verifier = fit_verifier(pools, sources, out=out, seed=seed, tell=lambda line: print(line, file=sys.stderr))
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
    chains = verifier.measured["chains"]
    for name, cost in verifier.measured["cost"].items():
        spent = f", {cost['tokens'] / chains:.0f} tokens" if cost["tokens"] else ""
        print(f"cost of {name}: {1e3 * cost['seconds'] / chains:.2f} ms a chain{spent}")
    vote = verifier.vote
    print(f"vote: power {vote.power:g}, agreement {vote.agreement:g}, distance {vote.distance:g}")
    print(f"{out}: written")
