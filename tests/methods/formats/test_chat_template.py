"""Chat templates: where they are found, what they render beside transformers, and what a hostile one can do."""

import dataclasses
import json
import threading
import time

import pytest
from published import LLAMA_CHAT, QWEN_CHAT
from refusing import bad, refused
from tiny_rl import POLICY, save_run

from jprm.methods.formats import chat_template
from jprm.methods.formats.chat_template import prompt_of, render, template_of
from jprm.methods.policy.protocol import Prefix
from jprm.methods.policy.sampler import SamplerConfig, load_sampler
from jprm.tokenizer import load_tokenizer, prompt_layout

ASK = [{"role": "user", "content": "What is 2 < 3? {problem}"}]
TALK = [{"role": "system", "content": " Be brief.\n"}, *ASK, {"role": "assistant", "content": 'é "true"'}, *ASK]
TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}
SHORT = "{{ bos_token }}{% for m in messages %}[{{ m.role }}] {{ m.content }}{% endfor %}"


def folder_with(tmp_path, config, template=None):
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    if template is not None:
        (tmp_path / "chat_template.jinja").write_text(template)
    return tmp_path


@pytest.mark.parametrize(
    ("config", "file"),
    [
        ({"chat_template": SHORT}, None),
        ({"chat_template": "of older files"}, SHORT),
        ({"chat_template": [{"name": "tool_use", "template": "x"}, {"name": "default", "template": SHORT}]}, None),
    ],
)
def test_a_folders_template(tmp_path, config, file):
    folder = folder_with(
        tmp_path, {"bos_token": {"content": "<s>"}, "eos_token": "</s>", "pad_token": None, **config}, file
    )
    assert template_of(folder) == (SHORT, TOKENS)
    assert prompt_of(folder, "{problem}\nIn short.") == "<s>[user] {problem}\nIn short."


def test_a_template_writes_the_day_that_its_folder_names(tmp_path):
    config = {"chat_template": "{{ strftime_now('%d %B %Y') }}: " + SHORT}
    with pytest.raises(ValueError, match=r'"strftime_now": "2026-01-31" into tokenizer_config.json'):
        prompt_of(folder_with(tmp_path, config), "{problem}")
    folder = folder_with(tmp_path, config | {"strftime_now": "2025-07-08"})
    assert prompt_of(folder, "{problem}") == "08 July 2025: [user] {problem}"
    unasked = "{{ 'now' if strftime_now is defined else 'never' }} " + SHORT  # as Llama 3.2's, which has its own day
    assert prompt_of(folder_with(tmp_path, {"chat_template": unasked}), "{problem}") == "never [user] {problem}"
    assert prompt_of(folder_with(tmp_path, {"chat_template": unasked, "strftime_now": "2025-07-08"}), "{problem}") == (
        "now [user] {problem}"
    )


def test_a_token_does_not_take_the_place_of_the_messages():
    assert render(SHORT, ASK, TOKENS | {"messages": "x"}) == render(SHORT, ASK, TOKENS)


def test_the_template_in_a_gguf_file(smollm2_gguf):
    prompt = prompt_of(smollm2_gguf, "{problem}")
    assert prompt.endswith("<|im_start|>user\n{problem}<|im_end|>\n<|im_start|>assistant\n")
    tokenizer = load_tokenizer(smollm2_gguf)
    ids = prompt_layout(tokenizer, prompt, "\n\n").problem("<|im_end|>2 + 2?")
    assert ids.count(tokenizer.token_id("<|im_start|>")) == prompt.count("<|im_start|>")
    assert ids.count(tokenizer.token_id("<|im_end|>")) == prompt.count("<|im_end|>")  # none from the problem


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({}, "template"),
        ({"chat_template": [{"name": "rag", "template": "x"}]}, "template"),
        ([], "is damaged"),
        ({"chat_template": "{{ '" + "x" * 2**20 + "' }}"}, "template"),
        ({"chat_template": 3}, "is no text"),
        ({"chat_template": SHORT, "strftime_now": "today"}, "'today'"),
        ({"chat_template": "{{ messages | length }}"}, "message 0"),
        ({"chat_template": SHORT + SHORT}, "message 2"),
    ],
)
def test_a_folder_without_a_use_is_refused(tmp_path, config, message):
    refused(ValueError, message, prompt_of, folder_with(tmp_path, config), "{problem}")


@pytest.mark.parametrize(("template", "message"), bad("a hostile chat template"))
def test_a_hostile_template_ends_itself_alone(template, message, monkeypatch):
    """Among them what depends on the day, or on chance, as no prompt may."""
    with monkeypatch.context() as patch:
        patch.setattr(chat_template, "SECONDS", 1.0 if message == "1 s" else 60.0)
        refused(ValueError, message, render, template, ASK, TOKENS)
    assert render("{{ 'é' }}" * 9, ASK, TOKENS) == "é" * 9  # the worker answers again


def test_a_short_conversation_does_not_wait_for_a_long_one(monkeypatch):
    monkeypatch.setattr(chat_template, "SECONDS", 600.0)
    slow = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
    thread = threading.Thread(target=refused, args=(ValueError, "more than 600 s", render, slow, ASK, TOKENS))
    render(SHORT, ASK, TOKENS)
    process = chat_template._worker._idle[-1]
    thread.start()
    while process in chat_template._worker._idle:
        time.sleep(0.01)
    assert render(SHORT, ASK, TOKENS).startswith("<s>[user]") and thread.is_alive()
    process.process.kill()
    thread.join()


def test_a_policy_with_its_template_is_the_policy_with_its_prompt(tmp_path, one_device):
    save_run(tmp_path / "run", POLICY, 0, 0.3)
    folder_with(tmp_path / "run", {"eos_token": "<eos>", "chat_template": "{{ messages[0].content }}{{ eos_token }}="})
    options = SamplerConfig(prompt="1{problem}", chat=True, delimiter="\n")
    policy = load_sampler(tmp_path / "run", options)
    typed = load_sampler(tmp_path / "run", dataclasses.replace(options, prompt="1{problem}<eos>=", chat=False))
    assert policy.name == typed.name
    assert policy.prompt(Prefix("2+3", ("5",))) == typed.prompt(Prefix("2+3", ("5",)))
    assert policy.prompt(Prefix("2+3")).count(policy.tokenizer.eos) == 1


LOOPS = (
    "{%- for m in messages -%}\n{%- if m.role == 'system' %}{% continue %}{% endif -%}\n    {% generation %}"
    "{{ m | tojson }}{% endgeneration %}\n{% set x = namespace(n=loop.index) %}\n{{ x.n }}{%- if x.n > 2 %}{% break %}"
    "{% endif %}\n  {%- endfor %}{% if tools is none and add_generation_prompt %}\n>{% endif %}"
)


@pytest.mark.parametrize("reply", [True, False])
@pytest.mark.parametrize("talk", [ASK, TALK], ids=["ask", "talk"])
@pytest.mark.parametrize("name", ["smollm2", "qwen", "llama", "loops"])
def test_the_text_is_that_of_transformers(name, talk, reply, request):
    utils = pytest.importorskip("transformers.utils.chat_template_utils", reason="the extra 'parity' is not installed")
    template, tokens = {"qwen": QWEN_CHAT, "llama": LLAMA_CHAT, "loops": LOOPS}.get(name), TOKENS
    if template is None:
        template, tokens = template_of(request.getfixturevalue("smollm2_gguf"))
    (expected,), _ = utils.render_jinja_template([talk], chat_template=template, add_generation_prompt=reply, **tokens)
    assert render(template, talk, tokens, reply=reply) == expected
