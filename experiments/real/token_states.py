"""States and confidences of any base on a file of pools, computed once and resumably: what the readers read.

    python -m experiments.real.token_states --base runs/models/qwen2.5-coder-0.5b.gguf --input pool.jsonl.gz \\
        --output runs/real/states --layers 3 6 9 12 15 18 21 24 --prompt experiments/real/prompt.txt

Each problem's samples are one tree, so that their prompt and common beginnings are computed once. A problem is one file
of the output folder; a kill loses the ones at work, and the same command continues. Progress goes by tokens.

A file holds, for the tree's N tokens:

    state_NLD    the residual stream after each of `layers`, float16
    logprob_N    the log-probability of each token after those before it (0 for the problem's own)
    certainty_N  KL(uniform || p) of the distribution that the token was drawn from (self-certainty, 2502.18581)
    top_N        minus the mean log-probability of its 20 most probable tokens (DeepConf, 2508.15260)
    entropy_N    its entropy, in nats
    until_N      as in `jprm.rows.Rows`: token t is on the path to token e if and only if t <= e < until[t]
    end_M        the last token of each node

`read` returns them by sample.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import itertools
import pathlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Annotated, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import tyro
from jaxtyping import Float, Int

from jprm.checkpoints import base as bases
from jprm.io.jsonl import parse, read_lines
from jprm.io.outputs import Bar, atomic_file
from jprm.methods.evidence.fit import bucket
from jprm.methods.formats.chat_template import prompt_of
from jprm.model.config import ModelConfig
from jprm.model.layers import rms_norm, spans
from jprm.model.mesh import MeshConfig, make_mesh
from jprm.model.transformer import Layers, embed, head_logits, norm_scale, plans_of
from jprm.pack import Packed, pack
from jprm.rows import Rows, padded_size
from jprm.token_tree import TokenTree, token_tree
from jprm.tokenizer import Layout, load_tokenizer, prompt_layout
from jprm.tree import ReasoningTree, chains_of, tree_of

POSITIONS = 512
"""Tokens whose distributions over the vocabulary are in memory at once."""
TOP = 20
MATRIX = 10**6
"""Parameters with more numbers are matrices. Norms and biases, which have fewer, stay float32."""


class Sample(NamedTuple):
    """One sample as the base sees it: T tokens after the prompt, K steps."""

    state_TLD: Float[np.ndarray, "T L D"]
    prompt_LD: Float[np.ndarray, "L D"]  # the state at the last token of the prompt
    logprob_T: Float[np.ndarray, " T"]
    certainty_T: Float[np.ndarray, " T"]
    top_T: Float[np.ndarray, " T"]
    entropy_T: Float[np.ndarray, " T"]
    end_K: Int[np.ndarray, " K"]  # index into T of each step's last token


@dataclasses.dataclass(frozen=True)
class Base:
    """A base with its layers in groups that end at the layers asked for."""

    params: dict[str, Any]
    config: ModelConfig
    layout: Layout

    @classmethod
    def load(cls, path: str, layers: Sequence[int], prompt: str, dtype: str = "float32") -> Base:
        """Raises ValueError for layers that the base has not, or a prompt without {problem}.

        dtype: of the products and of what the layers pass on; in bfloat16 the matrices are stored so, too.
        """
        depth = bases.model_config(path).layers
        if list(layers) != sorted(set(layers)) or not layers or not 1 <= layers[0] <= layers[-1] <= depth:
            raise ValueError(f"--layers {' '.join(map(str, layers))}: give rising numbers from 1 to {depth}, of {path}")
        edges = [0, *layers, *([depth] if layers[-1] < depth else [])]
        groups = tuple(b - a for a, b in itertools.pairwise(edges))
        attention = "gpu_kernel" if jax.default_backend() == "gpu" else "paths"
        config = bases.model_config(
            path,
            layer_groups=groups,
            remat="nothing",
            attention=attention,
            attention_block=128,
            head="language",
            dtype=dtype,
        )
        with jax.set_mesh(make_mesh(MeshConfig(), jax.devices()[:1])):
            params = jax.device_get(bases.load_language_model(path, config))
        params = jax.tree.map(lambda x: jnp.asarray(x, dtype if x.size > MATRIX else x.dtype), params)
        tokenizer = load_tokenizer(pathlib.Path(path), config.vocab_size)
        layout = prompt_layout(tokenizer, prompt_of(pathlib.Path(path), prompt), "\n")
        return cls(params, config, layout)


@functools.partial(jax.jit, static_argnums=(1, 3))
def streams(params, config: ModelConfig, rows: Rows, kept: int):
    """Returns the residual stream after the first `kept` groups of layers, and the last hidden state."""
    x_BTD, plans = embed(rows.tokens, params["decoder"]["embed"], config), plans_of(rows.position, rows.until, config)
    streams = []
    for group, (first, stop) in enumerate(spans(config)):
        stack = {"params": params["decoder"][f"layers_{group}"]}
        x_BTD, _ = Layers(config, first, stop).apply(stack, x_BTD, plans)
        streams.append(x_BTD.astype(jnp.float16))
    last_BTD = rms_norm(x_BTD, norm_scale(params["decoder"]["final_norm"], config), config.norm_eps)
    return jnp.stack(streams[:kept], axis=2), last_BTD


@functools.partial(jax.jit, static_argnums=1)
def _distributions(params, config: ModelConfig, x_ND, token_N):
    """Returns log-probability of the tokens, self-certainty, minus the mean of the top ones, entropy: (4, N)."""
    logit_NV = head_logits(params, config, x_ND)
    logp_NV = logit_NV - jax.nn.logsumexp(logit_NV, axis=1, keepdims=True)
    picked_N = jnp.take_along_axis(logp_NV, token_N[:, None], axis=1)[:, 0]
    certainty_N = -jnp.mean(logp_NV, axis=1) - jnp.log(logp_NV.shape[1])
    top_N = -jnp.mean(largest(logp_NV, TOP), axis=1)
    entropy_N = -jnp.sum(jnp.exp(logp_NV) * logp_NV, axis=1)
    return jnp.stack([picked_N, certainty_N, top_N, entropy_N])


def largest(x_NV: Float[jax.Array, "N V"], k: int, block: int = 128) -> Float[jax.Array, "N k"]:
    """Returns the k largest of each row: they are in the k blocks of the largest maxima, and only these are sorted."""
    N, V = x_NV.shape
    if V <= k * block:
        return jax.lax.top_k(x_NV, k)[0]
    x_NCU = jnp.pad(x_NV, ((0, 0), (0, -V % block)), constant_values=-jnp.inf).reshape(N, -1, block)
    chosen_NK = jax.lax.top_k(x_NCU.max(axis=2), k)[1]
    some_NKU = jnp.take_along_axis(x_NCU, chosen_NK[:, :, None], axis=1)
    return jax.lax.top_k(some_NKU.reshape(N, -1), k)[0]


def answered(path: pathlib.Path) -> Iterator[ReasoningTree]:
    """Yields a file's pools without samples that have no answer, which nothing can choose. A pool may be left empty."""
    for number, line in read_lines(path):
        record = parse(line, f"{path}:{number}")
        samples = [sample for sample in record["samples"] if sample.get("answer") is not None]
        yield tree_of({**record, "samples": samples}) if samples else ReasoningTree(record["problem"], ())


def name_of(tree: ReasoningTree) -> str:
    """Returns the name of a problem's file: a digest of the problem and its steps."""
    text = "\0".join([tree.problem, *(f"{node.parent}:{node.text}" for node in tree.nodes)])
    return hashlib.sha256(text.encode()).hexdigest()[:20]


def packed_alone(base: Base, tree: ReasoningTree, block: int) -> tuple[TokenTree, Packed]:
    """Returns a tree's tokens and its row, a multiple of `block` tokens long: a longer row costs more in attention."""
    written = token_tree(tree, base.layout)
    size = -(-len(written.tokens_N) // block) * block
    packed = pack([written], size, max(64, padded_size(len(written.run_M))), too_long="error")
    if len(packed.rows.tokens) != 1:
        raise ValueError(f"{written.name}: takes more than one row of {size} tokens")
    return written, packed


def ends(packed: Packed, tree: ReasoningTree) -> Int[np.ndarray, " M"]:
    """Returns the index of each node's last token in its row."""
    end_of = {int(n): int(e) for n, e in zip(packed.node_BS[0], packed.rows.step_end[0], strict=True) if n >= 0}
    return np.array([end_of[i] for i in range(len(tree.nodes))])


def of_tokens(base: Base, written: TokenTree, packed: Packed, last_BTD: jax.Array, numbers: Callable) -> np.ndarray:
    """Returns `numbers`, (count, N) of N tokens' distributions, for the tokens of a tree; 0 for the problem's own."""
    N, P = len(written.tokens_N), written.problem
    before_N, parts = _before(packed.rows.until[0, :N]), []
    for a in range(P, N, POSITIONS):
        at = np.pad(np.arange(a, min(a + POSITIONS, N)), (0, max(0, a + POSITIONS - N)), mode="edge")
        parts.append(numbers(base.params, base.config, last_BTD[0, before_N[at]], written.tokens_N[at]))
    of_all = np.concatenate([np.asarray(part) for part in parts], axis=1)[:, : N - P]
    return np.pad(of_all, ((0, 0), (P, 0)))


def computed(base: Base, kept: int, tree: ReasoningTree) -> dict[str, np.ndarray]:
    """Returns what a problem's file holds, of the first `kept` groups of layers."""
    written, packed = packed_alone(base, tree, POSITIONS)
    state_BTLD, last_BTD = streams(base.params, base.config, jax.tree.map(jnp.asarray, packed.rows), kept)
    numbers = of_tokens(base, written, packed, last_BTD, _distributions)
    N = len(written.tokens_N)
    return dict(
        state_NLD=np.asarray(state_BTLD[0])[:N], until_N=packed.rows.until[0, :N], problem=np.array(written.problem),
        logprob_N=numbers[0], certainty_N=numbers[1], top_N=numbers[2], entropy_N=numbers[3],
        end_M=ends(packed, tree),
    )  # fmt: skip


def compute(base: Base, kept: int, trees: Sequence[ReasoningTree], folder: pathlib.Path) -> Iterator[int]:
    """Writes the files of trees that lack one; yields the tokens of each."""
    folder.mkdir(parents=True, exist_ok=True)
    for tree in (tree for tree in trees if tree.nodes and not is_kept(folder, tree)):
        x = computed(base, kept, tree)
        with atomic_file(folder / f"{name_of(tree)}.npz") as stream:
            np.savez(stream, **x)  # pyright: ignore[reportArgumentType]
        yield len(x["until_N"])


def calibrates(tree: ReasoningTree) -> bool:
    """Returns whether a training problem is of those, buckets 8 and 9 of 10, that no arm or reader is fitted on."""
    return bucket(tree.problem, 10) > 7


def is_kept(folder: pathlib.Path, tree: ReasoningTree) -> bool:
    return (folder / f"{name_of(tree)}.npz").is_file()


def _before(until_N: np.ndarray) -> np.ndarray:
    """Returns the index of the token before each one on its path; 0 for the first."""
    before_N, path = np.zeros(len(until_N), np.int64), []
    for t in range(len(until_N)):
        while path and until_N[path[-1]] <= t:
            path.pop()
        before_N[t] = path[-1] if path else 0
        path.append(t)
    return before_N


def read(folder: pathlib.Path, tree: ReasoningTree) -> list[Sample]:
    """Returns a tree's chains in order. Raises FileNotFoundError where they were not computed."""
    with np.load(folder / f"{name_of(tree)}.npz") as file:
        return samples_of(dict(file), tree)


def samples_of(x: Mapping[str, np.ndarray], tree: ReasoningTree) -> list[Sample]:
    """Returns a tree's chains in order, from what `computed` returned."""
    index_N, samples = np.arange(len(x["until_N"])), []
    for chain in chains_of(tree):
        end_K = x["end_M"][chain]
        last = int(end_K[-1])
        path_T = index_N[: last + 1][x["until_N"][: last + 1] > last]
        path_T = path_T[path_T >= int(x["problem"])]
        samples.append(
            Sample(
                x["state_NLD"][path_T],
                x["state_NLD"][int(x["problem"]) - 1],
                *(x[name][path_T] for name in ("logprob_N", "certainty_N", "top_N", "entropy_N")),
                end_K=np.searchsorted(path_T, end_K),
            )  # fmt: skip
        )
    return samples


def main(
    base: str, input: pathlib.Path, output: pathlib.Path, layers: tuple[int, ...], prompt: pathlib.Path,
    problems: Annotated[int | None, tyro.conf.arg(help="Only the first ones.")] = None,
) -> None:  # fmt: skip
    """Compute the states of a base on a file of pools.

    Args:
        base: A GGUF file, a Hugging Face folder or a run.
        input: Pools, as JSON Lines.
        output: The folder of the states.
        layers: After which layers, counted from 1.
        prompt: A text with {problem}, the user's message of the base's chat template.
    """
    try:
        trees = [tree for tree in itertools.islice(answered(input), problems) if tree.nodes]
        loaded = Base.load(base, layers, prompt.read_text().rstrip("\n"))
        sizes = [len(token_tree(tree, loaded.layout).tokens_N) for tree in trees]
        with Bar(output.name, sum(sizes)) as bar:
            for tokens in compute(loaded, len(layers), trees, output):
                bar.add(tokens)
    except (ValueError, OSError) as error:
        raise SystemExit(f"error: {error}") from None


if __name__ == "__main__":
    tyro.cli(main)
