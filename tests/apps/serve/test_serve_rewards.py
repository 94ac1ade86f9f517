"""/v1/rewards: every index against decoding under tokenizers unlike the model's, rewards against the credit's forms."""

import contextlib
import json
from typing import Any

import numpy as np
import pytest
import sentencepiece
import tokenizers
from test_serve import call, chains, engine, post, prm  # noqa: F401  (fixtures, which tests name as arguments)
from test_trajectory_model import prm as trajectory_prm  # noqa: F401
from tokenizers import decoders, models, pre_tokenizers, trainers

from jprm.apps.serve import ServeConfig
from jprm.apps.serve.engine import Engine
from jprm.apps.serve.openrlhf import View
from jprm.apps.serve.rewards import text_spans
from jprm.methods.rl import credit
from jprm.tokenizer import JsonTokenizer, load_tokenizer
from jprm.tree import tree_of

TEXTS = [
    "We add 3.5 and 4.\n\nThat is 7.5 €.\n\nSo the answer is 7.5.",
    "  Step 1: 4 − 2 = 2.\nStep 2: 日本語 ends here。\nStep 3: done 🎉\n",
    "One sentence. Another one! \U0001f468‍\U0001f469‍\U0001f467\n",
]


def byte_level(merges):
    """Merges learnt from the texts, so that tokens cross the ends of steps."""
    inner = tokenizers.Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inner.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=256 + merges, initial_alphabet=alphabet, special_tokens=["<|im_end|>"], show_progress=False
    )
    inner.train_from_iterator(TEXTS * 3, trainer)
    return JsonTokenizer(inner)


def word_starts():
    """Llama's way: a mark before every word, bytes for what has no token, and the first white space is dropped."""
    inner = tokenizers.Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    inner.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    # No further letters: of equally frequent ones the trainer would take other ones in each process.
    alphabet = list("abcdefghijklmnopqrstuvwxyz▁.\n0123456789")
    trainer = trainers.BpeTrainer(
        vocab_size=420, initial_alphabet=alphabet, limit_alphabet=len(alphabet),
        special_tokens=["<unk>", "</s>", *(f"<0x{i:02X}>" for i in range(256))], show_progress=False,
    )  # fmt: skip
    inner.train_from_iterator(TEXTS, trainer)
    config = json.loads(inner.to_str())
    for token in config["added_tokens"]:  # bytes are text
        token["special"] = token["content"] in ("<unk>", "</s>")
    config["added_tokens"] = [token for token in config["added_tokens"] if token["special"]]
    return JsonTokenizer(tokenizers.Tokenizer.from_str(json.dumps(config)))


def pieces(folder):
    """A model of the sentencepiece library, with bytes for what has no piece."""
    sentencepiece.SentencePieceTrainer.Train(
        sentence_iterator=iter(line for text in TEXTS for line in text.split("\n")), model_prefix=str(folder / "spm"),
        vocab_size=340, byte_fallback=True, model_type="bpe", character_coverage=0.98, minloglevel=2,
        normalization_rule_name="identity", remove_extra_whitespaces=False, hard_vocab_limit=False,
    )  # fmt: skip
    return load_tokenizer(folder / "spm.model")


@pytest.fixture(scope="module")
def callers(tiny_run, tmp_path_factory):
    """The first is the model's own."""
    return {
        "bytes": load_tokenizer(tiny_run.folder),
        "merged": byte_level(120),
        "words": word_starts(),
        "pieces": pieces(tmp_path_factory.mktemp("pieces")),
    }


@pytest.mark.parametrize("name", ["bytes", "merged", "words", "pieces"])
def test_a_steps_token_is_the_first_after_which_decoding_has_the_step(engine, callers, name):  # noqa: F811
    tokenizer = callers[name]
    special = min(tokenizer.special_ids, default=None)
    ids = [tokenizer.encode(text) + ([] if special is None else [special]) for text in TEXTS]
    samples = [{"problem": "p", "ids": sample_ids, "segmentation": "auto"} for sample_ids in ids]
    (got,) = call(engine, post("/v1/rewards", {"samples": samples, "tokenizer": name}), tokenizers=callers)
    assert got.status_code == 200, got.text
    inside = 0
    for sample, sample_ids in zip(got.json()["samples"], ids, strict=True):
        text = tokenizer.decode([i for i in sample_ids if i not in tokenizer.special_ids])
        assert sample["text"] == text and len(sample["steps"]) > 1
        for step in sample["steps"]:
            start, end = step["span"]
            assert text[start:end] == text[start:end].strip() != ""
            at = step["token"]
            before, after = tokenizer.decode(sample_ids[:at]), tokenizer.decode(sample_ids[: at + 1])
            assert after.startswith(text[:end]) and not before.startswith(text[:end])
            inside += len(after.replace("�", "")) > end
    assert (inside > 0) == (name in ("merged", "words"))  # their tokens hold what follows a step as well


def test_text_spans_cover_the_text_for_any_ids(callers):
    """Also for broken bytes, which a policy may sample."""
    rng = np.random.default_rng(0)
    for tokenizer in callers.values():
        for _ in range(20):
            ids = rng.integers(0, tokenizer.vocab_size, 60).tolist()
            text, spans = text_spans(tokenizer, ids)
            assert text == tokenizer.decode([i for i in ids if i not in tokenizer.special_ids])
            assert spans[0][0] == 0 and spans[-1][1] == len(text)
            assert all(a[1] == b[0] for a, b in zip(spans, spans[1:], strict=False))
        with pytest.raises(ValueError, match="another tokenizer"):
            text_spans(tokenizer, [10**6])


def test_ids_offsets_and_messages_tell_the_same(engine, callers, prm):  # noqa: F811
    tokenizer, text = callers["merged"], TEXTS[0]
    encoded = tokenizer.inner.encode(text, add_special_tokens=False)
    messages = [{"role": "user", "content": "p"}, {"role": "assistant", "content": text}]
    samples = [
        {"problem": "p", "ids": encoded.ids},
        {"problem": "p", "response": text, "offsets": [list(pair) for pair in encoded.offsets]},
        {"messages": messages, "ids": encoded.ids},
        {"prompt": "<q>p</q>", "ids": encoded.ids},
        {"prompt": "<q>p</q>", "response": text + "<end>", "offsets": [*map(list, encoded.offsets)]},
        {"problem": "p", "response": text},
    ]
    body = {"samples": samples, "tokenizer": "merged", "credit": "min_form"}
    (got,) = call(engine, post("/v1/rewards", body), tokenizers=callers, view=View("<q>{problem}</q>", ("<end>",)))
    first, *others, plain = got.json()["samples"]
    assert all(other == first for other in others)
    assert "token_rewards" not in plain and [s["score"] for s in plain["steps"]] == [s["score"] for s in first["steps"]]
    steps = [text[slice(*step["span"])] for step in first["steps"]]
    assert [step["score"] for step in first["steps"]] == pytest.approx(prm.score("p", steps).tolist(), abs=1e-6)
    (alone,) = call(engine, post("/v1/score", {"problem": "p", "response": text}))
    assert got.json()["usage"] == alone.json()["usage"]  # equal samples are computed once
    assert first["score"] == pytest.approx(alone.json()["chains"][0]["score"], abs=1e-6)


@pytest.mark.parametrize("name", ["sum", "min_form", "shaping", "progress", "verifier", "sum_prm_alone"])
def test_rewards_are_the_credits_at_the_ends_of_steps(engine, callers, name):  # noqa: F811
    tokenizer = callers["bytes"]
    options: dict[str, Any] = {"gamma": 0.9, "temperature": 0.5, "weight": 2.0}
    samples = [
        {"problem": c["problem"], "ids": tokenizer.encode("\n".join(c["steps"]) + "\n"), "outcome": i % 2}
        for i, c in enumerate([*chains(3), *chains(3)])
    ] + [{"problem": "blank", "ids": tokenizer.encode(" \n"), "outcome": -1}]
    body = {"samples": samples, "credit": {"name": name} | options}
    (got,) = call(engine, post("/v1/rewards", body), tokenizers={"bytes": tokenizer})
    rows = got.json()["samples"]
    config = credit.CreditConfig(name, "reinforce", "sequence", **options)
    for i, (row, sample) in enumerate(zip(rows, samples, strict=True)):
        group = [j for j, other in enumerate(samples) if other["problem"] == sample["problem"]]
        scores = [np.array([s["score"] for s in rows[j]["steps"]]) for j in group]
        form = credit.segment_rewards(np.zeros(len(group)), scores, config)[group.index(i)] * 2
        outcome = 0 if name == "sum_prm_alone" else sample["outcome"]
        assert [s["reward"] for s in row["steps"]] == pytest.approx(form[:-1].tolist(), abs=1e-6)
        assert row["tail_reward"] == pytest.approx(form[-1] + outcome, abs=1e-6)
        expected = np.zeros(len(sample["ids"]))
        for step in row["steps"]:
            expected[step["token"]] += step["reward"]
        expected[-1] += row["tail_reward"]
        assert row["token_rewards"] == pytest.approx(expected.tolist())
    assert rows[-1]["steps"] == [] and rows[-1]["score"] is None


def test_the_gate_keeps_incorrect_samples_from_being_paid(engine):  # noqa: F811
    sample = {"problem": "p", "response": "\n".join(chains(1)[0]["steps"])}
    body = {"credit": {"name": "sum", "gate": True}, "samples": [sample | {"outcome": 1}, sample | {"outcome": 0}]}
    right, wrong = call(engine, post("/v1/rewards", body))[0].json()["samples"]
    assert all(step["reward"] > 0 for step in right["steps"]) and not any(step["reward"] for step in wrong["steps"])
    (refused,) = call(engine, post("/v1/rewards", body | {"samples": [sample]}))
    assert refused.status_code == 400 and refused.json()["error"]["param"] == "outcome"


def test_no_samples_are_no_work(engine):  # noqa: F811
    (got,) = call(engine, post("/v1/rewards", {"samples": []}), config=ServeConfig(longest=256))
    assert got.json()["samples"] == [] and got.json()["usage"]["prompt_tokens"] == 0


@pytest.mark.parametrize("segmentation", ["turn", "sentences"])
def test_a_trajectory_has_its_turns_scores_at_the_ids_of_the_whole(trajectory_prm, segmentation):  # noqa: F811
    tokenizer = trajectory_prm.layout.tokenizer
    call_of = {"type": "function", "id": "a", "function": {"name": "lookup", "arguments": {"x": "y"}}}
    messages = [
        {"role": "user", "content": "p"},
        {"role": "assistant", "content": "We look. Then we see.", "tool_calls": [call_of]},
        {"role": "tool", "tool_call_id": "a", "name": "lookup", "content": "It is 4."},
        {"role": "assistant", "content": "So it is 4. Done."},
    ]
    end = tokenizer.token_id("<|im_end|>")
    ids, mask = [], []
    for text, sampled in (("We look. Then we see.\n<call>lookup</call>", 1), ("It is 4.", 0), ("So it is 4. Done.", 1)):
        turn_ids = [*tokenizer.encode(text), *([end] if sampled and end is not None else [])]
        ids, mask = ids + turn_ids, mask + [sampled] * len(turn_ids)
    sample = {"messages": messages, "ids": ids, "mask": mask, "outcome": 2, "segmentation": segmentation}
    with contextlib.closing(Engine(trajectory_prm, 512, "turns")) as running:
        body = {"credit": "sum", "samples": [sample], "tokenizer": "own"}
        got, short = call(
            running, post("/v1/rewards", body), post("/v1/rewards", {"samples": [sample | {"mask": mask[1:]}]}),
            tokenizers={"own": tokenizer},
        )  # fmt: skip
    assert short.status_code == 400 and short.json()["error"]["param"] == "mask"
    assert got.status_code == 200, got.text
    (row,) = got.json()["samples"]
    record = {"messages": messages, "segment": segmentation}
    tree = tree_of(record)
    (expected,) = trajectory_prm.score_trees([tree])
    assert [step["score"] for step in row["steps"]] == pytest.approx(expected[tree.steps].tolist(), abs=1e-5)
    assert [step["turn"] for step in row["steps"]] == ([0, 1] if segmentation == "turn" else [0, 0, 1, 1])
    contents = [messages[1]["content"], messages[3]["content"]]
    for step in row["steps"]:
        text = contents[step["turn"]][slice(*step["span"])]
        assert mask[step["token"]] == 1
        if segmentation == "sentences" or step["turn"]:
            assert tokenizer.decode(ids[: step["token"] + 1]).rstrip().endswith(text)
    assert sum(row["token_rewards"]) == pytest.approx(2 + float(expected[tree.steps].sum()), abs=1e-4)
    assert not any(reward for reward, sampled in zip(row["token_rewards"], mask, strict=True) if not sampled)
