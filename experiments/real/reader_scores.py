"""Scores of pools by every reader of a base's states: from pools to `scores.jsonl`, which the verdict reads.

    python -m experiments.real.reader_scores --base runs/models/qwen2.5-coder-0.5b.gguf --output scores.jsonl \\
        --keep runs/real/states --other runs/real/chatgpt.jsonl

Readers are fitted on `pools/own_train.jsonl.gz` (buckets 0 to 6 of 10 train, 7 chooses) and score that file's buckets
8 and 9, `own_test.jsonl.gz` and the others. Buckets 0 to 7 are scored by readers of other folds of five, so that no
score is of a reader that was fitted on its problem. A GPU takes minutes; two CPU cores an hour for each 50 problems.
With `--keep` a stopped command continues. With `--larger`, a larger base of the same tokenizer reads the samples as
well, for the readers of what it says more likely: three times the work where it has three times the parameters. They
are fitted to nothing, so of the training problems it reads only buckets 8 and 9, which the verdict calibrates on.
"""

from __future__ import annotations

import functools
import itertools
import pathlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import tyro

from experiments.real import state_readers as readers
from experiments.real import token_states as states
from jprm.checkpoints import base as bases
from jprm.io.jsonl import write_records
from jprm.io.outputs import Bar
from jprm.methods.evidence.fit import bucket
from jprm.tree import ReasoningTree, chains_of

HERE = pathlib.Path(__file__).parent
LAYERS = (3, 6, 9, 12, 15, 18, 21, 24)
SEEDS, FOLDS, AT_ONCE = 3, 5, 3


def main(
    base: str, output: pathlib.Path, pools: pathlib.Path = HERE / "pools", other: tuple[pathlib.Path, ...] = (),
    keep: pathlib.Path | None = None, layers: tuple[int, ...] = LAYERS, problems: int | None = None,
    larger: str | None = None,
) -> None:  # fmt: skip
    """Fit every reader on the policy's training pools, and score all pools.

    Args:
        base: The policy's model.
        output: The file of scores.
        pools: The folder of `own_train.jsonl.gz` and `own_test.jsonl.gz`.
        other: Pools of other policies.
        keep: A folder for states, some 20 MB a problem. They are not kept by default.
        layers: Of the base, counted from 1.
        problems: Only the first ones of every file.
        larger: A model of the same tokenizer that has more parameters.
    """
    prompt = (HERE / "prompt.txt").read_text().rstrip("\n")
    states_of, records = reading(base, layers, prompt, keep), []
    larger_of = nothing
    if larger is not None:
        last = (bases.model_config(larger).layers,)
        larger_of = reading(larger, last, prompt, keep and keep / "larger")
    train = trees_of(pools / "own_train.jsonl.gz", problems)
    with Bar("states of own_train", len(train)) as bar:
        by_problem = list(bar.follow(states_of(train)))
    with Bar("fitting readers", len(readers.FITTED)) as bar:
        fitted = fit(train, by_problem, bar)
    of_larger = larger_of([tree for tree in train if states.calibrates(tree)])
    for tree, samples in zip(train, by_problem, strict=True):
        chosen = 0 if states.calibrates(tree) else 1 + fold_of(tree)
        chosen_fits = {name: fits[chosen] for name, fits in fitted.items()}
        same = next(of_larger) if states.calibrates(tree) else None
        records.append(record("own_train", tree, samples, chosen_fits, same))
    del by_problem
    for path in (pools / "own_test.jsonl.gz", *other):
        name, trees = path.name.split(".")[0], trees_of(path, problems)
        with Bar(f"scoring {name}", len(trees)) as bar:
            for tree, samples, same in zip(trees, bar.follow(states_of(trees)), larger_of(trees), strict=True):
                whole = {reader: fits[0] for reader, fits in fitted.items()}
                records.append(record(name, tree, samples, whole, same))
        write_records(output, records)  # what there is so far
    print(f"{output}: written. {len(records)} problems")


def trees_of(path: pathlib.Path, problems: int | None) -> list[ReasoningTree]:
    return [tree for tree in itertools.islice(states.answered(path), problems) if tree.nodes]


def fold_of(tree: ReasoningTree) -> int:
    return bucket("fold " + tree.problem, FOLDS)


def nothing(trees: Sequence[ReasoningTree]) -> Iterator[None]:
    return itertools.repeat(None, len(trees))


def reading(
    base: str, layers: Sequence[int], prompt: str, folder: pathlib.Path | None
) -> Callable[[Sequence[ReasoningTree]], Iterator[list[states.Sample]]]:
    """Returns the function from trees to the states of each one's samples. A few are computed at once.

    The base is loaded where states are missing.
    """
    load = functools.cache(lambda: states.Base.load(base, layers, prompt))

    def samples(tree: ReasoningTree) -> list[states.Sample]:
        if folder is None:
            return states.samples_of(states.computed(load(), len(layers), tree), tree)
        if not states.is_kept(folder, tree):
            for _ in states.compute(load(), len(layers), [tree], folder):
                pass
        return states.read(folder, tree)

    def of_trees(trees: Sequence[ReasoningTree]) -> Iterator[list[states.Sample]]:
        if folder is None or not all(states.is_kept(folder, tree) for tree in trees):
            load()  # once, before several threads ask for it
        with ThreadPoolExecutor(AT_ONCE) as pool:
            for a in range(0, len(trees), 8 * AT_ONCE):
                yield from pool.map(samples, trees[a : a + 8 * AT_ONCE])

    return of_trees


def fit(trees: Sequence[ReasoningTree], by_problem: Sequence[list[Any]], bar: Bar) -> dict[str, list[readers.Score]]:
    """Returns, of every reader, the scores of the fit on all training problems and of those without one fold each."""
    samples = [sample for samples in by_problem for sample in samples]
    right_M = np.array([right for tree in trees for right in rights(tree)])
    sizes = [len(samples) for samples in by_problem]
    tenth_M = np.repeat([bucket(tree.problem, 10) for tree in trees], sizes)
    fold_M = np.repeat([fold_of(tree) for tree in trees], sizes)
    fits = [readers.ReaderFit(tenth_M < 7, tenth_M == 7)]
    fits += [
        readers.ReaderFit((tenth_M < 7) & (fold_M != fold), (tenth_M == 7) & (fold_M != fold)) for fold in range(FOLDS)
    ]
    fitted = {}
    for name, reader in bar.follow(readers.FITTED.items()):
        fitted[name] = reader(samples, right_M, fits, range(SEEDS))
    return fitted


def rights(tree: ReasoningTree) -> list[bool]:
    return [tree.nodes[chain[-1]].correct is True for chain in chains_of(tree)]


def record(
    pool: str, tree: ReasoningTree, samples: Sequence[Any], fitted: dict[str, readers.Score],
    larger: Sequence[Any] | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Returns the scores of a problem's samples: of each reader a list, of those with several seeds one a seed.

    larger: the same samples as a larger base sees them, for the readers of both.
    """
    scores: dict[str, Any] = {name: rounded(score(samples)) for name, score in readers.UNTRAINED.items()}
    if larger is not None:
        scores |= {name: rounded(score(samples, larger)) for name, score in readers.OF_TWO.items()}
    for name, score in fitted.items():
        of_seeds = score(samples)
        scores[name] = rounded(of_seeds[0]) if len(of_seeds) == 1 else list(map(rounded, of_seeds))
    return {"pool": pool, "problem": states.name_of(tree), "scores": scores}


def rounded(score_M: np.ndarray) -> list[float]:
    return [float(f"{x:.5g}") for x in score_M]


if __name__ == "__main__":
    try:
        tyro.cli(main)
    except (ValueError, OSError) as error:
        raise SystemExit(f"error: {error}") from None
