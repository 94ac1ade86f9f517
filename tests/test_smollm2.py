"""SmolLM2-135M from GGUF against transformers in float32: states, perplexity, greedy decoding.

transformers takes half a minute to read the file, so the tests share the result.
"""

import dataclasses
import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny import chain_rows

from jprm.checkpoints.gguf import load_decoder, model_config
from jprm.model.mesh import make_mesh
from jprm.model.transformer import hidden, step_logits
from jprm.policy import sampler
from jprm.policy.protocol import Prefix
from jprm.policy.sampler import SamplerConfig, load_sampler
from jprm.tokenizer import load_tokenizer

TEXT = """Denali is 5 years old. She wants 3/4 of $12.50, i.e. \\(x = \\frac{3}{4} \\cdot 12.5\\).
So x = 9.375, which is about nine dollars and thirty-eight cents. # Answer

9.38"""


@pytest.fixture(scope="module")
def reference(smollm2_gguf):
    torch = pytest.importorskip("torch", reason="the extra 'parity' is not installed")
    transformers = pytest.importorskip("transformers", reason="the extra 'parity' is not installed")
    with torch.no_grad():
        yield transformers.AutoModelForCausalLM.from_pretrained(
            smollm2_gguf.parent, gguf_file=smollm2_gguf.name, dtype=torch.float32
        )


@pytest.fixture(scope="module")
def decoder(smollm2_gguf):
    return load_decoder(smollm2_gguf, model_config(smollm2_gguf))


def test_hidden_states_are_those_of_transformers(smollm2_gguf, reference, decoder):
    import torch

    ids = load_tokenizer(smollm2_gguf).encode(TEXT)
    expected = reference.model(torch.tensor([ids])).last_hidden_state[0].numpy()
    config = model_config(smollm2_gguf, attention="reference", remat="nothing")
    rows = chain_rows([ids], len(ids))
    found = np.asarray(jax.jit(hidden, static_argnums=1)({"decoder": decoder}, config, rows))[0]
    # 30 layers of float32 in another order, on states of size 1 with outliers far above.
    np.testing.assert_allclose(found, expected, atol=1e-3, rtol=1e-3)
    assert np.abs(expected).max() > 1


@pytest.mark.parametrize("count", [2, pytest.param(50, marks=pytest.mark.slow)])
def test_perplexity_on_gsm8k_is_that_of_transformers(smollm2_gguf, reference, decoder, shared_data, count):
    """To 4 digits, over solutions given their questions."""
    import torch

    lines = (shared_data / "gsm8k" / "test.jsonl").read_text().splitlines()[:count]
    tokenizer, chains = load_tokenizer(smollm2_gguf), []
    for record in map(json.loads, lines):
        question, answer = tokenizer.encode(record["question"] + "\n"), tokenizer.encode(record["answer"])
        chains.append((question + answer, len(question)))
    expected = []
    for ids, start in chains:
        log_TV = torch.log_softmax(reference(torch.tensor([ids])).logits[0, start - 1 : -1], dim=-1)
        expected += log_TV.gather(1, torch.tensor(ids[start:])[:, None])[:, 0].tolist()
    config = model_config(smollm2_gguf, head="language", attention="reference", remat="nothing")
    weights, tokens = {"decoder": decoder}, 64 * -(-max(len(ids) for ids, _ in chains) // 64)
    every, found = np.arange(tokens)[None], []

    @jax.jit
    def logs(weights, rows, next_T):
        log_TV = jax.nn.log_softmax(step_logits(weights, config, rows)[0])
        return jnp.take_along_axis(log_TV, next_T[:, None], axis=-1)[:, 0]

    for ids, start in chains:
        rows = dataclasses.replace(chain_rows([ids], tokens), step_end=every, label=every, weight=every)
        next_T = np.zeros(tokens, np.int32)
        next_T[: len(ids) - 1] = ids[1:]
        found += np.asarray(logs(weights, rows, next_T))[start - 1 : len(ids) - 1].tolist()
    found, expected = np.exp(-np.mean(found)), np.exp(-np.mean(expected))
    print(f"perplexity of {count} solutions: jprm {found:.6f}, transformers {expected:.6f}")
    assert 1 < found < 100 and abs(found / expected - 1) < 5e-5  # half of the fourth digit


GREEDY = functools.partial(SamplerConfig, temperature=0.0, prompt="{problem}")


@pytest.mark.parametrize(
    "prompts, tokens", [(2, 8), pytest.param(10, 64, marks=pytest.mark.slow)], ids=["small", "whole"]
)
def test_greedy_decoding_is_that_of_transformers(smollm2_gguf, reference, monkeypatch, prompts, tokens):
    import torch

    monkeypatch.setattr(sampler, "make_mesh", lambda config: make_mesh(config, jax.devices()[:1]))
    policy = load_sampler(smollm2_gguf, GREEDY(max_tokens=tokens))
    problems = [
        f"Ana has {i + 2} boxes of {2 * i + 3} eggs and breaks {i}. How many are whole?\n" for i in range(prompts)
    ]
    found = policy.sample([Prefix(problem) for problem in problems], 1, until="end", seed=0)
    for problem, (sample,) in zip(problems, found, strict=True):
        ids = torch.tensor([policy.layout.problem(problem)])
        out = reference.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=tokens, do_sample=False)
        new = out[0, ids.shape[1] :].tolist()
        assert sample.tokens == len(new)
        if new[-1] == policy.tokenizer.eos:
            assert sample.finish_reason == "stop"
            new = new[:-1]
        expected = tuple(step.strip() for step in policy.tokenizer.decode(new).split("\n") if step.strip())
        assert sample.steps == expected
