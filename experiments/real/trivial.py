"""Choosers that nobody trains, and `jprm fuse fit`'s own vote, beside the text of the verdict: see README.md.

    python -m experiments.real.trivial --out runs/real/trivial.json                   # two minutes

Each is a vote: a sample weighs 1, or a tenth for each rule that doubts it, and a chooser may break ties. Named choosers
stand beside the best of all, every set of rules with every way to break ties, as `own_train` alone decides it.
"""

from __future__ import annotations

import dataclasses
import itertools
import pathlib
import re
import tempfile
from collections.abc import Mapping
from typing import Any

import numpy as np
import tyro

from experiments.real import token_states as states
from experiments.real import verdict
from jprm.io.outputs import Bar, write_json
from jprm.methods.evaluate.baselines import DOUBTED, doubted
from jprm.methods.evidence import sources as evidence
from jprm.methods.evidence.fit import fit
from jprm.methods.evidence.ranker import vote_correct
from jprm.methods.evidence.verifier import FusedVerifier, vote_weights
from jprm.tree import chains_of

TIE = 1e-6
"""What a tie-break in [0, 1] weighs: less than the least difference of votes, 0.1 to the power of five rules."""

ARMS = ("text", "text and log-probability")

_PROGRAM = re.compile(r"```python|^\s*(?:def \w+\(|print\()", re.MULTILINE)


@dataclasses.dataclass(frozen=True)
class Chooser:
    """rules: those that doubt a sample. ties: `log-probability` (mean of a token) or `shortest`; else ties share."""

    name: str
    rules: tuple[str, ...] = ()
    ties: str = ""


RULES = ("false equation", "few numbers used", "not whole", "copied", "program")
CHOOSERS = (
    Chooser("majority, ties by log-probability", ties="log-probability"),
    Chooser("majority, ties by length (shortest)", ties="shortest"),
    Chooser("not a positive whole number", ("not whole",)),
    Chooser("five rules", RULES),
    Chooser("five rules, ties by log-probability", RULES, "log-probability"),
)
EVERY = tuple(
    Chooser(" + ".join((*rules, f"ties by {ties}" if ties else "ties share")), rules, ties)
    for count in range(len(RULES) + 1)
    for rules in itertools.combinations(RULES, count)
    for ties in ("", "log-probability", "shortest")
)


def signals(path: pathlib.Path, pool: verdict.Pool) -> dict[str, np.ndarray]:
    """Returns for every sample whether each rule doubts it, and the tie-breaks in [0, 1]."""
    names = [number for source in evidence.DEFAULT for number in evidence.find(source).numbers]
    number = {name: pool.chains.x_MF[:, i] for i, name in enumerate(names)}
    leaves, texts = [], []
    for tree in states.answered(path):
        for chain in chains_of(tree):
            leaves.append(tree.nodes[chain[-1]].extra)
            texts.append("\n".join(tree.nodes[i].text for i in chain))
    by_token = [leaf["logprob"] / leaf["tokens"] if leaf.get("tokens") else 0.0 for leaf in leaves]
    return {
        "false equation": number["any_false"] > 0,
        "few numbers used": doubted(number["used"], pool.chains.problem_M).weight_K < 1,
        "not whole": np.array([not _is_count(str(leaf["answer"])) for leaf in leaves]),
        "copied": number["copied"] > 0,
        "program": np.array([bool(_PROGRAM.search(text)) for text in texts]),
        "log-probability": np.exp(by_token),
        "shortest": 1 - np.log(list(map(len, texts))) / 20,
    }


def _is_count(answer: str) -> bool:
    value = evidence.value_of_step(answer)
    return value is not None and value > 0 and value == int(value)


def weights(chooser: Chooser, of_samples: Mapping[str, np.ndarray]) -> np.ndarray:
    """Returns each sample's weight in the chooser's vote."""
    doubts_M = sum((of_samples[rule].astype(float) for rule in chooser.rules), np.zeros(len(of_samples["program"])))
    return DOUBTED**doubts_M + (TIE * of_samples[chooser.ties] if chooser.ties else 0.0)


def vote(pool: verdict.Pool, weight_M: np.ndarray) -> np.ndarray:
    """Returns how correct a vote is on each problem, 0 on those that no sample answers."""
    return np.append(vote_correct(pool.chains, weight_M), np.zeros(pool.lost))


def best_choosers(pool: verdict.Pool, of_samples: Mapping[str, np.ndarray]) -> list[Chooser]:
    """Returns the choosers of `EVERY` whose vote is correct most often: several if they tie."""
    right = [vote(pool, weights(chooser, of_samples)).sum() for chooser in EVERY]
    return [chooser for chooser, count in zip(EVERY, right, strict=True) if count > max(right) - 1e-9]


def figures(
    pool: verdict.Pool, of_samples: Mapping[str, np.ndarray], choosers: Mapping[str, Chooser],
    arms: Mapping[str, verdict.Arm], fused_M: np.ndarray,
) -> dict[str, Any]:  # fmt: skip
    """Returns each chooser's gain over the majority on one file, and how far each arm is ahead of it."""
    even_M = np.ones(len(pool.chains.correct_M))
    majority_P = vote(pool, even_M)
    of_arms = {name: vote(pool, vote_weights(arms[name](pool), even_M, pool.chains)) for name in ARMS}
    gains = {**of_arms, "jprm fuse fit, its own vote": vote(pool, fused_M)}
    rows = {name: {"less majority": verdict.interval((vote_P - majority_P)[None])} for name, vote_P in gains.items()}
    for name, chooser in choosers.items():
        chosen_P = vote(pool, weights(chooser, of_samples))
        rows[name] = {"less majority": verdict.interval((chosen_P - majority_P)[None])}
        rows[name] |= {f"{arm} less it": verdict.interval((arm_P - chosen_P)[None]) for arm, arm_P in of_arms.items()}
    return rows


def fused_weights(fused: FusedVerifier, path: pathlib.Path) -> np.ndarray:
    """Returns the weight of every sample of a file in the vote of a fused verifier."""
    trees = [tree for tree in states.answered(path) if tree.nodes]
    votes = [outputs["vote"] for outputs in fused.outputs_of(trees)]
    leaves = [[chain[-1] for chain in chains_of(tree)] for tree in trees]
    return np.concatenate([vote_N[of_tree] for vote_N, of_tree in zip(votes, leaves, strict=True)])


def main(out: pathlib.Path, pools: pathlib.Path = verdict.HERE / "pools") -> None:
    """Measure choosers that nobody trains beside the verdict's arms of text.

    Args:
        out: A file for the figures, as JSON.
        pools: The folder of the pools.
    """
    names = ("own_train", "own_test", *verdict.OTHERS)
    files = {name: pools / f"{name}.jsonl.gz" for name in names}
    with Bar("reading pools", len(names)) as bar:
        read = {name: verdict.read(files[name], {}) for name in bar.follow(names)}
    of_samples = {name: signals(files[name], read[name]) for name in names}
    best = best_choosers(read["own_train"], of_samples["own_train"])
    choosers = {chooser.name: chooser for chooser in (*CHOOSERS, *best)}
    arms = verdict.arms(read["own_train"], seed=0)
    with tempfile.TemporaryDirectory() as folder:
        fused = fit([files["own_train"]], (*evidence.DEFAULT, "logprob"), out=folder)
        result = {
            name: figures(read[name], of_samples[name], choosers, arms, fused_weights(fused, files[name]))
            for name in names
        }
    names_of_best = [chooser.name for chooser in best]
    write_json(out, {"best on own_train": names_of_best, **result})
    print(f"best of {len(EVERY)} on own_train: {'; '.join(names_of_best)}")
    for name in names:
        print(f"\n{name}, points")
        for chooser, row in result[name].items():
            cells = [f"{key} {x['value']:.1f} [{x['low']:.1f}, {x['high']:.1f}]" for key, x in row.items()]
            print(f"  {chooser:38} {'; '.join(cells)}")


if __name__ == "__main__":
    try:
        tyro.cli(main)
    except (ValueError, OSError) as error:
        raise SystemExit(f"error: {error}") from None
