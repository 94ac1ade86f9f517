"""Models from GGUF against transformers in float32: states, perplexity, greedy decoding, ids.

They are SmolLM2-135M, Gemma 3 270M, and Qwen2.5-Coder-Instruct of 0.5B and 1.5B parameters (the last takes 22 GB).
transformers takes half a minute to read a file, so the tests share the result.
"""

import dataclasses
import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tokenizers
from families import breadth
from tiny import chain_rows

from jprm.checkpoints.base import load_language_head
from jprm.methods.formats.gguf import load_decoder, model_config, open_gguf
from jprm.methods.policy import sampler
from jprm.methods.policy.protocol import Prefix
from jprm.methods.policy.sampler import SamplerConfig, load_sampler
from jprm.model.mesh import make_mesh
from jprm.model.transformer import hidden, step_logits
from jprm.tokenizer import load_tokenizer

TEXT = """Denali is 5 years old. She wants 3/4 of $12.50, i.e. \\(x = \\frac{3}{4} \\cdot 12.5\\).
So x = 9.375, which is about nine dollars and thirty-eight cents. # Answer

9.38"""


SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in ("gemma3", "qwen", "qwen15")]


@pytest.fixture(scope="module", params=[*breadth(["smollm2"]), *SLOW])
def file(request):
    return request.getfixturevalue(f"{request.param}_gguf")


@pytest.fixture(scope="module")
def reference(file):
    torch = pytest.importorskip("torch", reason="the extra 'parity' is not installed")
    transformers = pytest.importorskip("transformers", reason="the extra 'parity' is not installed")
    with torch.no_grad():
        yield transformers.AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)


@pytest.fixture(scope="module")
def decoder(file):
    return load_decoder(file, model_config(file))


def beginning(file):
    """The ids that the file says a text begins with."""
    fields = open_gguf(file).fields
    return [fields["tokenizer.ggml.bos_token_id"]] if fields.get("tokenizer.ggml.add_bos_token") else []


def test_hidden_states_are_those_of_transformers(file, reference, decoder):
    import torch

    config = model_config(file, attention="reference", remat="nothing")
    ids = load_tokenizer(file).encode(TEXT)
    ids = beginning(file) + ids * (1 + 2 * max(config.windows, default=0) // len(ids))  # beyond the windows
    expected = reference.model(torch.tensor([ids])).last_hidden_state[0].numpy()
    rows = chain_rows([ids], len(ids))
    actual = np.asarray(jax.jit(hidden, static_argnums=1)({"decoder": decoder}, config, rows))[0]
    print(
        f"{file.name}: hidden states of {len(ids)} tokens up to {np.abs(expected).max():.4g}, "
        f"off by at most {np.abs(actual - expected).max():.2g}"
    )
    # 30 layers of float32 in another order, on states of size 1 with outliers far above.
    np.testing.assert_allclose(actual, expected, atol=1e-3, rtol=1e-3)
    assert np.abs(expected).max() > 1


@pytest.mark.parametrize("count", [2, pytest.param(50, marks=pytest.mark.slow)])
def test_perplexity_on_gsm8k_is_that_of_transformers(file, reference, decoder, shared_data, count):
    """To 4 digits, over solutions given their questions."""
    import torch

    lines = (shared_data / "gsm8k" / "test.jsonl").read_text().splitlines()[:count]
    tokenizer, chains = load_tokenizer(file), []
    for record in map(json.loads, lines):
        question, answer = tokenizer.encode(record["question"] + "\n"), tokenizer.encode(record["answer"])
        question = beginning(file) + question
        chains.append((question + answer, len(question)))
    expected = []
    for ids, start in chains:
        log_TV = torch.log_softmax(reference(torch.tensor([ids])).logits[0, start - 1 : -1], dim=-1)
        expected += log_TV.gather(1, torch.tensor(ids[start:])[:, None])[:, 0].tolist()
    config = model_config(file, head="language", attention="reference", remat="nothing")
    weights: dict = {"decoder": decoder}
    if not config.tied_embeddings:
        weights["head"] = jax.device_get(load_language_head(file, config))
    tokens = 64 * -(-max(len(ids) for ids, _ in chains) // 64)
    every, actual = np.arange(tokens)[None], []

    @jax.jit
    def logs(weights, rows, next_T):
        log_TV = jax.nn.log_softmax(step_logits(weights, config, rows)[0])
        return jnp.take_along_axis(log_TV, next_T[:, None], axis=-1)[:, 0]

    for ids, start in chains:
        rows = dataclasses.replace(chain_rows([ids], tokens), step_end=every, label=every, weight=every)
        next_T = np.zeros(tokens, np.int32)
        next_T[: len(ids) - 1] = ids[1:]
        actual += np.asarray(logs(weights, rows, next_T))[start - 1 : len(ids) - 1].tolist()
    actual, expected = np.exp(-np.mean(actual)), np.exp(-np.mean(expected))
    print(f"perplexity of {count} solutions: jprm {actual:.6f}, transformers {expected:.6f}")
    assert 1 < actual < 100 and abs(actual / expected - 1) < 5e-5  # half of the fourth digit


@pytest.mark.slow
def test_gemma3_ids_are_those_of_its_tokenizer_in_transformers(gemma3_gguf):
    """Made there of the vocabulary, by merges, in the library `tokenizers`; jprm makes a SentencePiece model of it."""
    transformers = pytest.importorskip("transformers", reason="the extra 'parity' is not installed")
    from transformers.convert_slow_tokenizer import generate_merges

    fields, tokenizer = open_gguf(gemma3_gguf).fields, load_tokenizer(gemma3_gguf)
    kinds = fields["tokenizer.ggml.token_type"]
    defined = [i for i, kind in enumerate(kinds) if kind == 4]
    names = [
        token.replace(" ", "\u2581") if kinds[i] == 4 else token
        for i, token in enumerate(fields["tokenizer.ggml.tokens"])
    ]
    scores = {
        name: score
        for name, score, kind in zip(names, fields["tokenizer.ggml.scores"], kinds, strict=True)
        if kind == 1
    }
    vocabulary = {name: i for i, name in enumerate(names)}
    inner = transformers.GemmaTokenizer(vocabulary, generate_merges(vocabulary, scores)).backend_tokenizer
    inner.add_tokens([tokenizers.AddedToken(names[i], normalized=True, special=False) for i in defined])
    inner.encode_special_tokens = True
    rng = np.random.default_rng(0)
    letters = [*range(32, 127), 9, 10, 10, 32, 32, 32, 0xE9, 0x301, 0x4E2D, 0x1F389, 0x200D, 0x2581, 0xE000, 0x10FFFF]
    random_texts = ["".join(map(chr, rng.choice(letters, size=60))) for _ in range(2000)]
    texts = [TEXT, *TRICKY, *random_texts]
    assert [tokenizer.encode(text) for text in texts] == [
        inner.encode(text, add_special_tokens=False).ids for text in texts
    ]
    assert all(tokenizer.decode(tokenizer.encode(text)) == text.replace("\u2581", " ") for text in texts)


TRICKY = [
    "", " ", "  lead and trail  ", "a" * 300, " " * 70, "\n" * 40, "\t" * 40, "\r\n", "1234567890 3.14 1,000",
    "<bos><start_of_turn>user\n<eos><unk><pad><unused7>", "<b>bold</b><h1> <0x0A>[multimodal]<start_of_image>",
    "漢字 かな 한글 e\u0301 👩\u200d👩\u200d👧 \u200b\x00\x7f", "x\u2581y \u2581\u2581z", "\\frac{1}{2} \\(x_1^2\\)",
]  # fmt: skip


GREEDY = functools.partial(SamplerConfig, temperature=0.0, prompt="{problem}")


@pytest.mark.slow
@pytest.mark.parametrize("prompts, tokens", [(2, 8), (10, 64)], ids=["small", "whole"])
def test_greedy_decoding_is_that_of_transformers(file, reference, monkeypatch, prompts, tokens):
    import torch

    monkeypatch.setattr(sampler, "make_mesh", lambda config, devices=None: make_mesh(config, jax.devices()[:1]))
    policy = load_sampler(file, GREEDY(max_tokens=tokens))
    problems = [
        f"Ana has {i + 2} boxes of {2 * i + 3} eggs and breaks {i}. How many are whole?\n" for i in range(prompts)
    ]
    drawn = policy.sample([Prefix(problem) for problem in problems], 1, until="end", seed=0)
    for problem, (sample,) in zip(problems, drawn, strict=True):
        ids = torch.tensor([policy.layout.problem(problem)])
        out = reference.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=tokens, do_sample=False)
        new = out[0, ids.shape[1] :].tolist()
        assert sample.tokens == len(new)
        if new[-1] == policy.tokenizer.eos:
            assert sample.finish_reason == "stop"
            new = new[:-1]
        expected = tuple(step.strip() for step in policy.tokenizer.decode(new).split("\n") if step.strip())
        assert sample.steps == expected
