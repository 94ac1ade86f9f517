"""Scores of pools by the contrast of two bases of one tokenizer: what `verdict.py` reads as `contrast`, and its parts.

    python -m experiments.real.contrast_scores --base qwen2.5-coder-0.5b.gguf --larger qwen2.5-coder-1.5b.gguf \\
        --output contrast.jsonl

Each problem's samples are one tree, which both bases read once. The problems that calibrate come first, then the own
test problems in turns with the other policies' pools: a run that is stopped has read some of each, and the same command
continues. Products are in bfloat16 unless `--dtype float32`, which takes 1.7 times as long on a CPU with such products.
"""

from __future__ import annotations

import functools
import json
import pathlib
from collections.abc import Iterator, Mapping
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import tyro

from experiments.real import state_readers as readers
from experiments.real import token_states as states
from experiments.real.reader_scores import HERE, rounded
from experiments.real.verdict import OTHERS, read_scores
from jprm.io.outputs import Bar
from jprm.model.config import ModelConfig
from jprm.model.transformer import head_logits
from jprm.tree import ReasoningTree

BLOCK = 256
"""Rows are of a multiple of so many tokens: each size is compiled once."""


@functools.partial(jax.jit, static_argnums=1)
def _logprob(params: Any, config: ModelConfig, x_ND: jax.Array, token_N: jax.Array) -> jax.Array:
    logit_NV = head_logits(params, config, x_ND)
    picked_N1 = jnp.take_along_axis(logit_NV, token_N[:, None], axis=1)
    return (picked_N1 - jax.nn.logsumexp(logit_NV, axis=1, keepdims=True)).T


def samples_of(base: states.Base, tree: ReasoningTree) -> list[states.Sample]:
    """Returns a tree's chains in order, with log-probabilities alone: the other numbers and the states are empty."""
    written, packed = states.packed_alone(base, tree, BLOCK)
    _, last_BTD = states.streams(base.params, base.config, jax.tree.map(jnp.asarray, packed.rows), 1)
    (logprob_N,) = states.of_tokens(base, written, packed, last_BTD, _logprob)
    N, empty_N = len(logprob_N), np.zeros(len(logprob_N), np.float32)
    x = dict(state_NLD=np.zeros((N, 0, 0)), until_N=packed.rows.until[0, :N], problem=np.array(written.problem),
             logprob_N=logprob_N, certainty_N=empty_N, top_N=empty_N, entropy_N=empty_N,
             end_M=states.ends(packed, tree))  # fmt: skip
    return states.samples_of(x, tree)


def scores_of(samples: list[states.Sample], larger: list[states.Sample]) -> dict[str, list[float]]:
    scores = {name: rounded(score(samples, larger)) for name, score in readers.OF_TWO.items()}
    scores["larger log-probability"] = rounded(np.array([sample.logprob_T.mean() for sample in larger]))
    return scores


def in_turns(pools: pathlib.Path, problems: int, other: int) -> Iterator[tuple[str, ReasoningTree]]:
    """Yields the calibrating problems, then the test problems, with the other policies' spread evenly among them."""
    trees = {name: list(states.answered(pools / f"{name}.jsonl.gz")) for name in ("own_train", "own_test", *OTHERS)}
    yield from (("own_train", tree) for tree in trees["own_train"][:64] if states.calibrates(tree))
    share = {"own_test": problems} | dict.fromkeys(OTHERS, other)
    due = [((i + 0.5) / n, name, tree) for name, n in share.items() for i, tree in enumerate(trees[name][:n])]
    yield from ((name, tree) for _, name, tree in sorted(due, key=lambda x: x[:2]))


def main(
    base: str, larger: str, output: pathlib.Path, pools: pathlib.Path = HERE / "pools", problems: int = 128,
    other: int = 64, dtype: Literal["float32", "bfloat16"] = "bfloat16",
) -> None:  # fmt: skip
    """Score the samples of the kept pools by log p under the larger base less log p under the base.

    Args:
        base: The smaller model.
        larger: A model of the same tokenizer that has more parameters.
        output: The file of scores. The same command continues it.
        pools: The folder of `own_train.jsonl.gz`, `own_test.jsonl.gz` and the other policies' pools.
        problems: The first ones of the own test pool.
        other: The first ones of each other policy's pool.
        dtype: Of the products.
    """
    prompt = (HERE / "prompt.txt").read_text().rstrip("\n")
    done: Mapping[tuple[str, str], Any] = read_scores([output]) if output.exists() else {}
    todo = [(pool, tree) for pool, tree in in_turns(pools, problems, other) if tree.nodes]
    todo = [(pool, tree) for pool, tree in todo if (pool, states.name_of(tree)) not in done]
    bases = [states.Base.load(path, (1,), prompt, dtype) for path in (base, larger)]
    with output.open("a") as file, Bar(output.name, len(todo)) as bar:
        for pool, tree in bar.follow(todo):
            scores = scores_of(*(samples_of(base, tree) for base in bases))
            file.write(json.dumps({"pool": pool, "problem": states.name_of(tree), "scores": scores}) + "\n")
            file.flush()


if __name__ == "__main__":
    try:
        tyro.cli(main)
    except (ValueError, OSError) as error:
        raise SystemExit(f"error: {error}") from None
