"""Chat templates in the documented forms of five families, written for these tests, with what each refuses.

What the assistant wrote is marked by {% generation %}; `unmarked` takes these marks out: published templates have none.
"""

import pathlib
import re

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
SPECIAL = ["<|im_start|>", "<|im_end|>", "<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>",
           "<bos>", "<start_of_turn>", "<end_of_turn>", "<s>", "</s>", "[INST]", "[/INST]", "[TOOL_CALLS]",
           "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]"]  # fmt: skip
PLAIN = ["<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"]
"""Added tokens of Qwen3 that are not special: they are read in any text."""


def tokenizer() -> Tokenizer:
    """Byte-level BPE in which newlines merge with what stands before them, with the families' added tokens."""
    pairs = [
        ("Ċ", "Ċ"),
        (".", "Ċ"),
        ("Ġ", "t"),
        ("h", "e"),
        ("Ġt", "he"),
        ("}", "Ċ"),
        (">", "Ċ"),
        ("Ġ", "a"),
        ("o", "k"),
    ]
    words = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *(a + b for a, b in pairs)]
    inner = Tokenizer(models.BPE({word: i for i, word in enumerate(words)}, pairs))
    inner.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(SPLIT), "isolated"), pre_tokenizers.ByteLevel(False, use_regex=False)]
    )
    inner.decoder = decoders.ByteLevel()
    inner.add_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    inner.add_tokens([AddedToken(token, special=False, normalized=False) for token in PLAIN])
    return inner


QWEN25, QWEN3, LLAMA3, GEMMA3, MISTRAL = (
    (pathlib.Path(__file__).parent / "templates" / f"{name}.jinja").read_text()
    for name in ("qwen2.5", "qwen3", "llama3", "gemma3", "mistral")
)
"""Qwen3's drops thoughts before the user's last question, and adds an empty thought to the last turn. Llama 3's takes
one call a turn, and no text beside it; Gemma 3's no tools and no thoughts. Mistral's moves the system message and the
tools to the last question of the user; its calls have ids of 9 letters."""

FAMILIES = {
    "qwen2.5": (QWEN25, None, "<|im_end|>", dict(thoughts=False)),
    "qwen3": (QWEN3, None, "<|im_end|>", dict()),
    "qwen3 without thoughts": (QWEN3, None, "<|im_end|>", dict(thoughts=False)),
    "llama3": (LLAMA3, "<|begin_of_text|>", "<|eot_id|>", dict(thoughts=False, parallel=False, beside=False)),
    "gemma3": (GEMMA3, "<bos>", "<end_of_turn>", dict(thoughts=False, calls=False)),
    "mistral": (MISTRAL, "<s>", "</s>", dict(thoughts=False, beside=False)),
}
"""Template, bos, eos and the options of random trajectories that the template takes."""


def unmarked(template: str) -> str:
    return re.sub(r"\{%-?\s*(end)?generation\s*-?%\}", "", template)
