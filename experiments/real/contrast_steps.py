"""Does the contrast of two bases find the first wrong step? On chains of ProcessBench's four splits.

    python -m experiments.real.contrast_steps --base qwen2.5-coder-0.5b.gguf --larger qwen2.5-coder-1.5b.gguf \\
        --shared ../shared/data --output runs/real/contrast_steps.jsonl

Both bases read each chain once. A step's scores are its log-probability under the larger base, and that less the
log-probability under the smaller one, summed over its tokens or their mean. The first n chains of a split are those
with the least hash. Splits take turns: a run that is stopped has read some of each, and the same command continues.

AUROC is over the steps up to the first error, of which only that one is wrong. F1 is the benchmark's, with a threshold
tuned on the other three splits. Intervals resample problems.
"""

from __future__ import annotations

import itertools
import json
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
import tyro
from jaxtyping import Float

from experiments.real import token_states as states
from experiments.real.contrast_scores import samples_of
from experiments.real.reader_scores import HERE, rounded
from jprm.io.jsonl import parse, read_lines
from jprm.io.outputs import Bar
from jprm.methods.evaluate import baselines
from jprm.methods.evaluate.processbench import SPLITS, Scores, best_threshold, right_at
from jprm.methods.evaluate.scored import weighted_f1
from jprm.statistics import Draws, auroc, difference, draws, interval
from jprm.tree import ReasoningTree, tree_of


class Split(NamedTuple):
    """The chains of a split that are read, and each arm's step scores; lower is doubted."""

    trees: list[ReasoningTree]
    arms: dict[str, Scores]


def chains_of_split(path: pathlib.Path, count: int) -> list[ReasoningTree]:
    """Returns the first `count` chains by hash, with `first_error`."""
    records = parse(path.read_bytes(), str(path))
    trees = [tree_of({"problem": r["problem"], "steps": r["steps"], "first_error": r["label"]}) for r in records]
    return sorted(trees, key=states.name_of)[:count]


def sums_of(base: states.Base, tree: ReasoningTree) -> tuple[Float[np.ndarray, " K"], Float[np.ndarray, " K"]]:
    """Returns each step's log-probability and its number of tokens."""
    (sample,) = samples_of(base, tree)
    first_K = np.r_[0, sample.end_K[:-1] + 1]
    return np.add.reduceat(sample.logprob_T, first_K), sample.end_K + 1.0 - first_K


def arms_of(trees: Sequence[ReasoningTree], scores: Sequence[Mapping[str, Any]]) -> dict[str, Scores]:
    """Returns the step scores of models and of baselines, which read text alone. A fitted one reads other problems."""
    larger, smaller, tokens = ([np.array(of_chain[key]) for of_chain in scores] for key in ("larger", "base", "tokens"))
    contrasts = [a - b for a, b in zip(larger, smaller, strict=True)]
    return {
        "contrast, sum": contrasts,
        "contrast, mean": [x / n for x, n in zip(contrasts, tokens, strict=True)],
        "larger log-probability, mean": [x / n for x, n in zip(larger, tokens, strict=True)],
        **baselines.of_steps(trees),
    }


def figures(splits: Mapping[str, Split]) -> dict[str, dict[str, dict[str, Draws]]]:
    """Returns the draws of AUROC and F1 by split and arm."""
    drawn: dict[str, dict[str, dict[str, Draws]]] = {}
    for (name, (trees, of_arm)), arm in itertools.product(splits.items(), splits[SPLITS[0]].arms):
        others = [splits[other] for other in splits if other != name]
        other_errors = np.concatenate([errors_of(other.trees) for other in others])
        cut = best_threshold(other_errors, [score_K for other in others for score_K in other.arms[arm]])
        error_N = errors_of(trees)
        hit_N = right_at(error_N, of_arm[arm], cut)
        read_N = [e + 1 if e >= 0 else len(x) for e, x in zip(error_N.tolist(), of_arm[arm], strict=True)]
        right_S = np.concatenate([np.arange(n) != e for n, e in zip(read_N, error_N.tolist(), strict=True)])
        score_S = np.concatenate([x[:n] for n, x in zip(read_N, of_arm[arm], strict=True)])
        problems = [tree.problem for tree in trees]
        of_f1 = draws(lambda w, hit=hit_N, error=error_N: weighted_f1(hit, error, w).f1, problems, seed=0)
        area = draws(lambda w, x=score_S, y=right_S: auroc(x, y, w), np.repeat(problems, read_N), seed=0)
        drawn.setdefault(name, {})[arm] = {"AUROC": area, "F1": of_f1}
    return drawn


def errors_of(trees: Sequence[ReasoningTree]) -> np.ndarray:
    return np.array([tree.extra["first_error"] for tree in trees])


def table(drawn: Mapping[str, Mapping[str, Mapping[str, Draws]]], figure: str) -> str:
    """Returns a Markdown table: a row per arm, and the contrast's mean less each other arm."""

    def cell(value: float, low: float, high: float) -> str:
        return f"{100 * value:.1f} [{100 * low:.1f}, {100 * high:.1f}]"

    arms = list(drawn[SPLITS[0]])
    lines = [[figure, *drawn], ["---"] * (len(drawn) + 1)]
    lines += [[arm, *(cell(*interval(of_arm[arm][figure])) for of_arm in drawn.values())] for arm in arms]
    for arm in (arm for arm in arms if arm != "contrast, mean"):
        pairs = [(of_arm["contrast, mean"][figure], of_arm[arm][figure]) for of_arm in drawn.values()]
        lines.append([f"contrast, mean, less {arm}", *(cell(*difference(a, b)[:3]) for a, b in pairs)])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def main(
    base: str, larger: str, output: pathlib.Path, shared: pathlib.Path = pathlib.Path("../shared/data"),
    chains: int = 64, dtype: Literal["float32", "bfloat16"] = "bfloat16",
) -> None:  # fmt: skip
    """Score ProcessBench's chains by two bases, and print the figures.

    Args:
        base: The smaller model.
        larger: A model of the same tokenizer that has more parameters.
        output: The file of scores. The same command continues it.
        shared: The folder with `processbench/`.
        chains: Of each split.
        dtype: Of the products.
    """
    trees = {split: chains_of_split(shared / "processbench" / f"{split}.json", chains) for split in SPLITS}
    lines = read_lines(output) if output.exists() else []
    done = {record["chain"]: record for record in (parse(line, f"{output}:{n}") for n, line in lines)}
    in_turns = itertools.chain.from_iterable(zip(*trees.values(), strict=True))
    todo = [tree for tree in in_turns if states.name_of(tree) not in done]
    if todo:
        prompt = (HERE / "prompt.txt").read_text().rstrip("\n")
        bases = {"base": base, "larger": larger}
        loaded = {name: states.Base.load(path, (1,), prompt, dtype) for name, path in bases.items()}
        with output.open("a") as file, Bar(output.name, len(todo)) as bar:
            for tree in bar.follow(todo):
                read = {name: sums_of(model, tree) for name, model in loaded.items()}
                scores = {name: rounded(sum_K) for name, (sum_K, _) in read.items()}
                record = {"chain": states.name_of(tree), **scores, "tokens": read["base"][1].tolist()}
                done[record["chain"]] = record
                file.write(json.dumps(record) + "\n")
                file.flush()
    every = [tree for of_split in trees.values() for tree in of_split]
    arms = arms_of(every, [done[states.name_of(tree)] for tree in every])
    at = {name: slice(i * chains, (i + 1) * chains) for i, name in enumerate(trees)}
    splits = {name: Split(trees[name], {arm: x[at[name]] for arm, x in arms.items()}) for name in trees}
    drawn = figures(splits)
    print("\n\n".join(table(drawn, figure) for figure in ("AUROC", "F1")))


if __name__ == "__main__":
    try:
        tyro.cli(main)
    except (ValueError, OSError) as error:
        raise SystemExit(f"error: {error}") from None
