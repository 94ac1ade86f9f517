"""Chat templates in the documented forms of five families, written for these tests, with what each refuses.

What the assistant wrote is marked by {% generation %}; `unmarked` takes these marks out: published templates have none.
"""
# ruff: noqa: E501 - lines of a template are lines of its text

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


_TOOLS = r"""# Tools

You may call one or more functions. Their signatures are within <tools></tools>:
<tools>{% for tool in tools %}
{{ tool | tojson }}{% endfor %}
</tools>
Return a call within <tool_call></tool_call>."""

_ANSWERS = r"""
{%- elif m.role == 'tool' %}
{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{ '<|im_start|>user' }}{% endif %}
{{- '\n<tool_response>\n' + m.content + '\n</tool_response>' }}
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{ '<|im_end|>\n' }}{% endif %}
{%- endif %}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}
{%- if enable_thinking is defined and not enable_thinking %}{{ '<think>\n\n</think>\n\n' }}{% endif %}{% endif %}"""

_CALLS = r"""{%- for call in m.tool_calls or [] %}{% set f = call.function or call %}
{%- if content or not loop.first %}{{ '\n' }}{% endif %}
{{- '<tool_call>\n{"name": "' + f.name + '", "arguments": ' + (f.arguments if f.arguments is string else f.arguments | tojson) + '}\n</tool_call>' }}
{%- endfor %}{{ '<|im_end|>' }}"""

QWEN25 = (
    r"""{%- set first = messages[0].content if messages[0].role == 'system' else 'You are a helpful assistant.' %}
{{- '<|im_start|>system\n' + first }}{% if tools %}{{ '\n\n' }}"""
    + _TOOLS
    + r"""{% endif %}{{ '<|im_end|>\n' }}
{%- for m in messages %}
{%- if m.role == 'user' or (m.role == 'system' and not loop.first) %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}
{%- elif m.role == 'assistant' %}{% set content = m.content or '' %}
{{- '<|im_start|>assistant\n' }}{% generation %}{{ content }}"""
    + _CALLS
    + r"""{% endgeneration %}{{ '\n' }}"""
    + _ANSWERS
)

QWEN3 = (
    r"""{%- set first = messages[0].content if messages[0].role == 'system' else '' %}
{%- if tools %}{{ '<|im_start|>system\n' + first + ('\n\n' if first else '') }}"""
    + _TOOLS
    + r"""{{ '<|im_end|>\n' }}{% elif first %}{{ '<|im_start|>system\n' + first + '<|im_end|>\n' }}{% endif %}
{%- set query = namespace(last=-1) %}
{%- for m in messages %}{% if m.role == 'user' %}{% set query.last = loop.index0 %}{% endif %}{% endfor %}
{%- for m in messages %}
{%- if m.role == 'user' %}{{ '<|im_start|>user\n' + m.content + '<|im_end|>\n' }}
{%- elif m.role == 'assistant' %}{% set content = m.content or '' %}{% set thoughts = m.reasoning_content or '' %}
{{- '<|im_start|>assistant\n' }}{% generation %}
{%- if loop.index0 > query.last and (loop.last or thoughts) %}{{ '<think>\n' + thoughts.strip('\n') + '\n</think>\n\n' + content.lstrip('\n') }}
{%- else %}{{ content }}{% endif %}"""
    + _CALLS
    + r"""{% endgeneration %}{{ '\n' }}"""
    + _ANSWERS
)
"""Drops thoughts before the last question of the user, and adds an empty thought to the last turn."""

LLAMA3 = r"""{{- bos_token }}{% set rest = messages %}{% set first = '' %}
{%- if messages[0].role == 'system' %}{% set first = messages[0].content | trim %}{% set rest = messages[1:] %}{% endif %}
{{- '<|start_header_id|>system<|end_header_id|>\n\n' }}{% if tools %}{{ 'Environment: ipython\n' }}{% endif %}
{{- 'Cutting Knowledge Date: December 2023\nToday Date: 26 Jul 2024\n\n' + first + '<|eot_id|>' }}
{%- for m in rest %}
{%- if m.role == 'tool' %}{{ '<|start_header_id|>ipython<|end_header_id|>\n\n' + {'output': m.content} | tojson + '<|eot_id|>' }}
{%- elif m.tool_calls %}
{%- if m.tool_calls | length > 1 %}{{ raise_exception('This model only supports single tool-calls at once!') }}{% endif %}
{{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% generation %}
{{- '{"name": "' + m.tool_calls[0].function.name + '", "parameters": ' + m.tool_calls[0].function.arguments | tojson + '}<|eot_id|>' }}{% endgeneration %}
{%- elif m.role == 'assistant' %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% generation %}{{ m.content | trim + '<|eot_id|>' }}{% endgeneration %}
{%- else %}{{ '<|start_header_id|>' + m.role + '<|end_header_id|>\n\n' }}
{%- if tools and loop.first %}{{ 'Given the following functions, respond with a call.\n\n' }}{% for t in tools %}{{ t | tojson(indent=4) + '\n\n' }}{% endfor %}{% endif %}
{{- m.content | trim + '<|eot_id|>' }}{% endif %}{% endfor %}
{%- if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"""
"""One call a turn, and no text beside it."""

GEMMA3 = r"""{{ bos_token }}{% set prefix = '' %}{% set rest = messages %}
{%- if messages[0].role == 'system' %}{% set prefix = messages[0].content + '\n\n' %}{% set rest = messages[1:] %}{% endif %}
{%- for m in rest %}
{%- if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}
{%- if m.role == 'assistant' %}{{ '<start_of_turn>model\n' }}{% generation %}{{ m.content | trim + '<end_of_turn>' }}{% endgeneration %}{{ '\n' }}
{%- else %}{{ '<start_of_turn>' + m.role + '\n' + (prefix if loop.first else '') + m.content | trim + '<end_of_turn>\n' }}{% endif %}{% endfor %}
{%- if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"""
"""No tools, and no thoughts."""

MISTRAL = r"""{%- set rest = messages %}{% set first = none %}
{%- if messages[0].role == 'system' %}{% set first = messages[0].content %}{% set rest = messages[1:] %}{% endif %}
{%- set asked = rest | selectattr('role', 'equalto', 'user') | list %}{{ bos_token }}
{%- for m in rest %}
{%- if m.role == 'user' %}
{%- if tools and m == asked[-1] %}{{ '[AVAILABLE_TOOLS] ' + tools | tojson + '[/AVAILABLE_TOOLS]' }}{% endif %}
{{- '[INST] ' + (first + '\n\n' if first is not none and m == asked[-1] else '') + m.content + '[/INST]' }}
{%- elif m.role == 'tool' %}
{%- if m.tool_call_id | length != 9 %}{{ raise_exception('Tool call IDs should be alphanumeric strings with length 9!') }}{% endif %}
{{- '[TOOL_RESULTS] ' + {'content': m.content, 'call_id': m.tool_call_id} | tojson + '[/TOOL_RESULTS]' }}
{%- elif m.tool_calls %}{% generation %}{{ '[TOOL_CALLS] [' }}
{%- for call in m.tool_calls %}{{ (call.function | tojson)[:-1] + ', "id": "' + call.id + '"}' + (', ' if not loop.last else ']' + eos_token) }}{% endfor %}{% endgeneration %}
{%- else %}{% generation %}{{ ' ' + m.content | trim + eos_token }}{% endgeneration %}{% endif %}{% endfor %}"""
"""Moves the system message and the tools to the last question of the user; calls have ids of 9 letters."""

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
