"""Model files made to hang, to fill the memory or to give other numbers. Each is a few hundred bytes."""

import base64
import struct

U8, U32, F32, STRING, ARRAY, U64 = 0, 4, 6, 8, 9, 10
HUGE = 1 << 60


def text(value):
    return struct.pack("<Q", len(value)) + value.encode()


def field(name, kind, value):
    packed = text(value) if kind == STRING else value if isinstance(value, bytes) else struct.pack(
        {U8: "<B", U32: "<I", F32: "<f", U64: "<Q"}[kind], value
    )  # fmt: skip
    return text(name) + struct.pack("<I", kind) + packed


def array(kind, items, count=None):
    packed = [
        text(item) if kind == STRING else struct.pack({U8: "<B", U32: "<I", F32: "<f"}[kind], item) for item in items
    ]
    return struct.pack("<IQ", kind, len(items) if count is None else count) + b"".join(packed)


def tensor(name, shape=(32,), kind=0, at=0):
    return text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, kind, at)


def gguf(fields=(), tensors=(), data=b"", counts=None):
    head = b"GGUF" + struct.pack("<IQQ", 3, *(counts or (len(tensors), len(fields))))
    head += b"".join((*fields, *tensors))
    return head + bytes(-len(head) % 32) + data


BYTES = array(U8, [1] * 150_000)
GGUF = {  # name to the file and what the refusal says
    "numbers without end": (gguf([field("a", ARRAY, array(U8, [], HUGE))]), "beyond the end"),
    "texts without end": (gguf([field("a", ARRAY, array(STRING, [], HUGE))]), "beyond the end"),
    "arrays of arrays": (gguf([field("a", ARRAY, struct.pack("<IQ", ARRAY, HUGE) + BYTES)]), "array of type 9"),
    "a text without end": (gguf([text("a") + struct.pack("<IQ", STRING, HUGE)]), "beyond the end"),
    "a name without end": (gguf([struct.pack("<Q", HUGE)]), "beyond the end"),
    "fields without end": (gguf(counts=(0, HUGE)), "beyond the end"),
    "tensors without end": (gguf(counts=(HUGE, 0)), "beyond the end"),
    "axes without end": (gguf(tensors=[text("a") + struct.pack("<I", 2**32 - 1)]), "dimensions"),
    "an unknown type": (gguf([text("a") + struct.pack("<I", 77)]), "metadata of type 77"),
    "a field twice": (gguf([field("a", U32, 1), field("a", U32, 2)]), "a is there twice"),
    "a tensor twice": (gguf(tensors=[tensor("a"), tensor("a", at=128)], data=bytes(256)), "a is there twice"),
    "tensors in one place": (gguf(tensors=[tensor("a"), tensor("b")], data=bytes(256)), "b is at 0, inside another"),
    "a tensor in another": (gguf(tensors=[tensor("a"), tensor("b", at=96)], data=bytes(256)), "b is at 96, inside"),
    "an odd place": (gguf(tensors=[tensor("a", at=4)], data=bytes(256)), "not at a multiple of 32"),
    "a tensor beyond the end": (gguf(tensors=[tensor("a", at=HUGE)], data=bytes(128)), "beyond the end"),
    "a tensor of 2^120 bytes": (gguf(tensors=[tensor("a", (HUGE, HUGE))], data=bytes(128)), "beyond the end"),
    "half a block": (gguf(tensors=[tensor("a", (33,), 8)], data=bytes(128)), "whole blocks of 32"),
    "no axes": (gguf(tensors=[tensor("a", ())], data=bytes(128)), "is of shape"),
    "an unknown tensor type": (gguf(tensors=[tensor("a", kind=999)], data=bytes(128)), "tensor a is of type 999"),
    "no alignment": (gguf([field("general.alignment", U32, 0)]), "alignment is 0"),
    "text of no encoding": (gguf([text("a") + struct.pack("<IQ", STRING, 1) + b"\xff"]), "utf-8"),
}

VALUES = {  # GGUF metadata that config.json would not be allowed either
    "attention.head_count": (0, [4, 4]),
    "attention.head_count_kv": (0, 3),
    "attention.key_length": (0, 5),
    "embedding_length": (0,),
    "feed_forward_length": (0,),
    "block_count": (0, 2_000_000_000),
    "attention.layer_norm_rms_epsilon": (0.0, -1e-6, float("nan"), float("inf")),
    "rope.freq_base": (0.0, 1.0, -1e4, float("nan"), float("inf")),
}

TOKENS = array(STRING, ["a", "b", "ab"])
MERGES = array(STRING, ["a b"])
PIECES = {"model": "llama", "tokens": TOKENS, "scores": array(F32, [0.0, 0.0, -1.0]), "unknown_token_id": 0}
VOCABULARIES = {  # fields of a GGUF tokenizer, and the one that is refused
    "no merges": ({"tokens": TOKENS}, "merges"),
    "no tokens": ({"merges": array(STRING, ["a b"])}, "tokens"),
    "merges of numbers": ({"tokens": TOKENS, "merges": array(U32, [1])}, "merges"),
    "a merge of one": ({"tokens": TOKENS, "merges": array(STRING, ["a"])}, "merges"),
    "a merge of no token": ({"tokens": TOKENS, "merges": array(STRING, ["a c"])}, "merges"),
    "too few types": ({"tokens": TOKENS, "merges": MERGES, "token_type": array(U32, [1])}, "token_type"),
    "an end that is no token": ({"tokens": TOKENS, "merges": MERGES, "eos_token_id": 3}, "eos_token_id"),
    "no scores": (PIECES | {"scores": TOKENS}, "scores"),
    "too few scores": (PIECES | {"scores": array(F32, [0.0])}, "scores"),
    "scores that are no numbers": (PIECES | {"scores": array(F32, [0.0, 0.0, float("nan")])}, "scores"),
    "types of no piece": (PIECES | {"token_type": array(U32, [1, 1, 700])}, "token_type"),
    "an unknown piece that is no token": (PIECES | {"unknown_token_id": 3}, "unknown_token_id"),
}


def vocabulary(fields):
    fields = {"model": "gpt2", "pre": "gpt-2"} | fields
    kinds = {str: STRING, bytes: ARRAY, int: U32}
    return gguf([field(f"tokenizer.ggml.{key}", kinds[type(value)], value) for key, value in fields.items()])


def tokenizer(**fields):
    model = {"type": "BPE", "vocab": {letter: i for i, letter in enumerate("abcx")}, "merges": []}
    return {"version": "1.0", "added_tokens": [], "model": model, **fields}


def replace(pattern, content):
    return {"type": "Replace", "pattern": pattern, "content": content}


def sequence(*parts):
    return {"type": "Sequence", "normalizers": list(parts)}


TENFOLD = replace({"String": "a"}, "a" * 10)
TABLE = base64.b64encode(struct.pack("<I", 4) + bytes(4) + b"a" * 100_000 + b"\0").decode()
GROWING = {  # tokenizer.json files: one letter becomes gigabytes
    "a chain": tokenizer(normalizer=sequence(*[TENFOLD] * 10)),
    "a nested chain": tokenizer(normalizer=sequence(*[sequence(TENFOLD, TENFOLD)] * 5)),
    "expressions": tokenizer(normalizer=sequence(*[replace({"Regex": ""}, "a" * 10)] * 10)),
    "between letters": tokenizer(normalizer=sequence(*[replace({"String": ""}, "a" * 10)] * 10)),
    "bytes as letters": tokenizer(normalizer=sequence(*[{"type": "ByteLevel"}] * 30)),
    "a long start": tokenizer(normalizer=sequence(*[{"type": "Prepend", "prepend": "a" * 20_000}] * 20)),
    "a start after every added token": tokenizer(normalizer={"type": "Prepend", "prepend": "a" * 2000}),
    "ligatures": tokenizer(normalizer=sequence(*[replace({"String": "\u0627"}, "\ufdfa"), {"type": "NFKC"}] * 5)),
    "the decoder": tokenizer(decoder={"type": "Sequence", "decoders": [TENFOLD] * 10}),
    "a table": tokenizer(normalizer=sequence({"type": "Precompiled", "precompiled_charsmap": TABLE})),
}
"""The chain is the one of 20 GB: 10^10 letters, and a copy."""

BACKTRACKING = tokenizer(normalizer=replace({"Regex": "(a+)+$"}, "b"))
"""Its expression takes exponential time on `LONG`; the library gives up and panics."""
LONG = "a" * 40 + "b"
