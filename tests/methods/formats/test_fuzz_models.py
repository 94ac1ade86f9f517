"""Damaged model files: whatever a file's structure is made of, loading it works or is one refusal."""

import json
import struct

import pytest
from hostile import models as hostile
from hypothesis import given, settings
from hypothesis import strategies as st

from jprm.methods.formats.gguf import open_gguf
from jprm.tokenizer import load_tokenizer

NUMBERS = st.one_of(
    st.integers(0, 9), st.sampled_from([2**31, 2**32 - 1, 2**60, 2**63 - 1, 2**64 - 1]), st.integers(0, 2**64 - 1)
)
VALUES = st.one_of(
    st.none(), st.booleans(), st.integers(-3, 70), NUMBERS, st.floats(), st.text(max_size=5),
    st.lists(st.integers(0, 3), max_size=3), st.dictionaries(st.text(max_size=3), st.integers(), max_size=2),
)  # fmt: skip
SIZES = settings(max_examples=60)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("fuzz")


def tried(load, path, content):
    """A load works or raises what a command prints as one line; the message is short."""
    path.write_bytes(content)
    try:
        load()
    except (ValueError, FileNotFoundError) as error:
        assert path.name in str(error) and len(str(error)) < 1000


def damaged(data, content):
    """Some of a file's 8-byte numbers replaced, and its end cut."""
    content = bytearray(content)
    for _ in range(data.draw(st.integers(0, 3))):
        at = data.draw(st.integers(0, max(0, len(content) - 8)))
        content[at : at + 8] = struct.pack("<Q", data.draw(NUMBERS))
    return bytes(content[: data.draw(st.integers(len(content) // 2, len(content)))])


@given(st.data())
@SIZES
def test_gguf(folder, data):
    values = {
        hostile.U32: st.integers(0, 2**32 - 1), hostile.F32: st.floats(width=32), hostile.STRING: st.text(max_size=5),
        hostile.ARRAY: st.builds(
            lambda items, count: hostile.array(hostile.U32, items, count),
            st.lists(st.integers(0, 9), max_size=3), st.none() | NUMBERS,
        ),
    }  # fmt: skip
    names, places = st.text("ab.", max_size=4), st.sampled_from([0, 32, 64, 128]) | NUMBERS
    fields = [
        hostile.field(data.draw(names), kind, data.draw(values[kind]))
        for kind in data.draw(st.lists(st.sampled_from(list(values)), max_size=3))
    ]
    tensors = [
        hostile.tensor(data.draw(names), shape, data.draw(st.integers(0, 40)), data.draw(places))
        for shape in data.draw(st.lists(st.lists(NUMBERS, max_size=3), max_size=3))
    ]
    content = damaged(data, hostile.gguf(fields, tensors, bytes(256)))

    def load():
        for tensor in open_gguf(folder / "m.gguf").tensors.values():
            assert tensor.data.nbytes <= len(content)

    tried(load, folder / "m.gguf", content)


@given(st.data())
@SIZES
def test_tokenizer(folder, data):
    part = st.sampled_from(
        [hostile.TENFOLD, {"type": "NFKC"}, {"type": "ByteLevel"}, {"type": "Lowercase"}, {"type": "x"}]
    )
    parts = st.builds(lambda parts: hostile.sequence(*parts), st.lists(part, max_size=6))
    content = hostile.tokenizer(normalizer=data.draw(parts | VALUES))
    for place in data.draw(
        st.lists(st.sampled_from(["model", "decoder", "pre_tokenizer", "added_tokens"]), max_size=1)
    ):
        content[place] = data.draw(VALUES)
    if isinstance(content["model"], dict) and "vocab" in content["model"]:
        content["model"]["vocab"] |= {"y": data.draw(st.integers(0, 2**32 - 1))}
    text = json.dumps(content).encode()

    def load():
        assert len(load_tokenizer(folder / "tokenizer.json").encode("abc x")) <= 10_000

    tried(load, folder / "tokenizer.json", text)


@given(st.data())
@SIZES
def test_the_tokenizer_of_a_gguf_file(folder, data):
    values = st.sampled_from([hostile.TOKENS, hostile.MERGES, "gpt2", 1, hostile.array(hostile.U32, [1, 2, 9])])
    keys = ["tokens", "merges", "scores", "token_type", "bos_token_id", "eos_token_id", "unknown_token_id"]
    whole = data.draw(st.sampled_from([{"tokens": hostile.TOKENS, "merges": hostile.MERGES}, hostile.PIECES]))
    fields = whole | data.draw(st.dictionaries(st.sampled_from(keys), values, max_size=3))
    path = folder / "t.gguf"
    tried(lambda: load_tokenizer(path).encode("ab"), path, damaged(data, hostile.vocabulary(fields)))
