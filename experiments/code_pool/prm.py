"""Scores each half of the pool's problems by a PRM that was trained on the other half.

    python -m experiments.code_pool.prm --pools runs/code_pool/pools.jsonl --out runs/code_pool/prm.jsonl
    python experiments/code_pool/choose.py --pools runs/code_pool/pools.jsonl --scores PRM=runs/code_pool/prm.jsonl \\
      --out runs/code_pool/chosen.json

The PRM is a head on the states of a frozen SmolLM2-135M at the ends of a program's lines, as in the study of
objectives (`experiments/objectives/heads.py`). It learns the outcome at every line by cross-entropy, or with
`--objective bradley_terry` to rank the ends of a problem's right programs above those of its wrong ones. The states are
computed once, into the folder `--states`; the same command continues a stopped one. The halves are of equal size, dealt
by the SHA-256 of a problem's text: no program is scored by a head that saw another program of its problem.
"""

from __future__ import annotations

import argparse
import hashlib
import pathlib
from collections.abc import Sequence

import jax
import numpy as np

from experiments.objectives import heads, recipes, states
from jprm.checkpoints import base
from jprm.experiment import DataConfig, Experiment, OptimizerConfig
from jprm.io.jsonl import write_records
from jprm.tree import ReasoningTree, record_of

TRAINED = {
    "cross_entropy": {"supervise": "outcome_steps"},
    "bradley_terry": recipes.OBJECTIVES["outcome_ranking"].changes,
}
"""What each objective changes."""

FIT = heads.Fit(epochs=20, rows=1)
"""The study's rates, for fewer problems."""


def halves(problems: Sequence[str]) -> tuple[list[int], list[int]]:
    """Returns the indices of each half, in the order of the problems."""
    dealt = sorted(range(len(problems)), key=lambda i: hashlib.sha256(problems[i].encode()).hexdigest())
    return sorted(dealt[: len(dealt) // 2]), sorted(dealt[len(dealt) // 2 :])


def half_of(known: heads.Known, indices: Sequence[int]) -> heads.Known:
    """Returns the trees with these indices and their states."""
    parts = np.split(known.state_ND, np.cumsum(known.size_K)[:-1])
    return heads.Known(
        [known.trees[i] for i in indices], known.size_K[indices], np.concatenate([parts[i] for i in indices])
    )


def experiment(pools: pathlib.Path, objective: str) -> Experiment:
    """Returns what heads are trained by. They have updates of their own: `FIT`."""
    smollm2 = states.smollm2()
    plain = Experiment(
        name="code_pool", base=smollm2, tokenizer=smollm2, model=base.model_config(smollm2, head="binary"),
        data=DataConfig((str(pools),), "outcome", "truncate"), target=recipes.TARGETS["outcome"],
        objective=objective, optimizer=OptimizerConfig(learning_rate=FIT.learning_rate), steps=1,
    )  # fmt: skip
    return recipes.changed(plain, TRAINED[objective])


def scored(trained: Experiment, known: heads.Known) -> list[ReasoningTree]:
    """Returns every tree with the scores of the head that did not see its problem, in the order of the problems."""
    results: dict[int, ReasoningTree] = {}
    first, second = halves([tree.problem for tree in known.trees])
    for train, test in ((first, second), (second, first)):
        score = heads.fitted(trained, half_of(known, train), FIT)
        results |= dict(zip(test, score(half_of(known, test)), strict=True))
    return [results[i] for i in range(len(known.trees))]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--pools", required=True, type=pathlib.Path)
    parser.add_argument("--out", required=True, type=pathlib.Path)
    parser.add_argument("--states", type=pathlib.Path, help="by default beside the pools")
    parser.add_argument("--objective", choices=tuple(TRAINED), default="cross_entropy")
    options = parser.parse_args()
    known = heads.known(options.pools, options.states or options.pools.with_suffix(".states"), None)
    write_records(options.out, map(record_of, scored(experiment(options.pools, options.objective), known)))


if __name__ == "__main__":
    jax.config.update("jax_platforms", "cpu")
    main()
