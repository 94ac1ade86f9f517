"""Tiny checkpoints in the formats of published PRMs, and the scores that their authors' code gives.

The models come from transformers and peft. Where authors ship code beside the weights, the head is written here
in torch from their description. Token ids come from the joined strings and chat templates that their code tokenises.
"""

import dataclasses
import functools
import json
import zlib
from collections.abc import Callable

import numpy as np
import pytest
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

REASON = "the extra 'parity' is not installed"
VOCABULARY = 400
WIDTH = 32
SIZES = dict(
    vocab_size=VOCABULARY, hidden_size=WIDTH, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=8192,
)  # fmt: skip

PROBLEM = "Ana buys 3 boxes of 12 eggs and breaks 5. How many are whole?"
STEPS = ["Three boxes hold 3 * 12 = 36 eggs.", "She breaks 5 of them, so 36 - 5 = 31.", "The answer is 31"]

CONTROL = ["<|im_start|>", "<|im_end|>", "<extra_0>", "<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>",
           "<|eot_id|>"]  # fmt: skip
SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def bytes_tokenizer(bos=None):
    """Byte-level BPE as Qwen2.5 and Llama 3 have it; a newline merges with what stands before it."""
    pairs = [("Ċ", "Ċ"), ("ĊĊ", "ĊĊ"), ("ĊĊĊĊ", "Ċ"), ("Ġ", "ĊĊĊĊĊ"), ("Ġ", "+"), ("Ġ", "-"), ("?", "Ċ"), (".", "ĊĊ"),
             (".", "Ċ"), ("Ġ", "e"), ("g", "g"), ("Ġe", "gg"), ("S", "t"), ("e", "p"), ("St", "ep")]  # fmt: skip
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = [*alphabet, *(a + b for a, b in pairs)]
    inner = Tokenizer(models.BPE({word: i for i, word in enumerate(words)}, pairs))
    inner.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(SPLIT), "isolated"), pre_tokenizers.ByteLevel(False, use_regex=False)]
    )
    inner.decoder = decoders.ByteLevel()
    inner.add_tokens([AddedToken(token, special=True, normalized=False) for token in CONTROL])
    return inner, {"bos_token": bos, "eos_token": "<|im_end|>"}


def pieces_tokenizer(bos="<s>"):
    """SentencePiece's BPE as Llama 2 and Mistral have it in a tokenizer.json: a word start before every text."""
    pairs = [("к", "и"), ("▁", "ки"), ("▁", "+"), ("▁", "-"), ("▁", "e"), ("g", "g"), ("▁e", "gg"), ("S", "t"),
             ("e", "p"), ("St", "ep"), ("▁", "Step")]  # fmt: skip
    letters = sorted(set("".join(map(chr, range(33, 127))) + "▁ки"))
    words = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256))]
    words = list(dict.fromkeys([*words, *letters, *(a + b for a, b in pairs)]))
    inner = Tokenizer(
        models.BPE({w: i for i, w in enumerate(words)}, pairs, unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    )
    inner.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    inner.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    inner.post_processor = processors.TemplateProcessing("<s> $A", "<s> $A <s> $B", [("<s>", 1)])
    tokens = ["<unk>", "<s>", "</s>", "[PRM]"]
    inner.add_tokens([AddedToken(token, special=True, normalized=False) for token in tokens])
    return inner, {"bos_token": bos, "eos_token": "</s>"}


QWEN_CHAT = (
    "{% if messages[0]['role'] != 'system' %}<|im_start|>system\nPlease reason step by step, and put your final answer"
    " within \\boxed{}.<|im_end|>\n{% endif %}{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}"
    "<|im_end|>\n{% endfor %}"
)
LLAMA_CHAT = (
    "{{ '<|begin_of_text|>' }}<|start_header_id|>system<|end_header_id|>\n\nCutting Knowledge Date: December 2023\n"
    "Today Date: 26 Jul 2024\n\n<|eot_id|>{% for m in messages %}<|start_header_id|>{{ m['role'] }}<|end_header_id|>"
    "\n\n{{ m['content'] | trim }}<|eot_id|>{% endfor %}"
)


def chat(tokenizer, template, *contents):
    roles = ("user", "assistant") * len(contents)
    messages = [{"role": role, "content": text} for role, text in zip(roles, contents, strict=False)]
    text = tokenizer.apply_chat_template(messages, chat_template=template, tokenize=False)
    return tokenizer.encode(text, add_special_tokens=False)


def ends_of(ids, token):
    return [i for i, other in enumerate(ids) if other == token]


def qwen_ids(tokenizer, problem, steps):
    ids = chat(tokenizer, QWEN_CHAT, problem, "<extra_0>".join(steps) + "<extra_0>")
    return ids, ends_of(ids, tokenizer.convert_tokens_to_ids("<extra_0>"))


def shepherd_ids(tokenizer, problem, steps):
    text = "\n".join(f"Step {i}: {step} ки" for i, step in enumerate(steps, start=1))
    ids = tokenizer.encode(f"{problem} {text}")
    return ids, ends_of(ids, tokenizer.encode("ки")[-1])


def rlhflow_ids(tokenizer, problem, steps):
    said, ends = [], []
    for k, step in enumerate(steps):
        said += [step if k else f"{problem} {step}", "+"]
        ids = chat(tokenizer, LLAMA_CHAT, *said)
        ends.append(len(ids) - 3)
    return ids, ends


def skywork_ids(tokenizer, problem, steps):
    ids, ends = tokenizer.encode(tokenizer.bos_token + problem + "\n"), []
    for step in steps:
        ids = [*ids, *tokenizer.encode(step), tokenizer.encode("\n")[-1]]
        ends.append(len(ids) - 1)
    return ids, ends


def trl_ids(tokenizer, problem, steps, separator="\n", bos=True):
    ids, ends = tokenizer.encode(problem, add_special_tokens=False), []
    if bos and tokenizer.bos_token_id is not None:
        ids = [tokenizer.bos_token_id, *ids]
    for step in steps:
        ids = ids + tokenizer.encode(step, add_special_tokens=False)
        ids = ids + tokenizer.encode(separator, add_special_tokens=False)
        ends.append(len(ids) - 1)
    return ids, ends


def jprm_ids(tokenizer, problem, steps):
    ids, ends = trl_ids(tokenizer, problem, ["", *steps])
    return ids, ends[1:]


def reasoneval_ids(tokenizer, problem, steps):
    prompt = f"Question:\n{problem}\nAnswer:\nLet's think step by step.\n"
    tokens = tokenizer.encode(prompt + "<s>" + "".join(step + "<s>" for step in steps))
    separator, ids, ends = tokenizer.bos_token_id, [tokenizer.bos_token_id], []
    for token in tokens[1:]:
        if token == separator:
            ends.append(len(ids) - 1)
        else:
            ids.append(token)
    return ids, ends[1:]


def pqm_ids(tokenizer, problem, steps):
    query = (
        "Below is an instruction that describes a task.\nWrite a response that appropriately completes the request."
        f"\n\n### Instruction:\n{problem}\n\n### Response: Let's think step by step"
    )
    answer = " [PRM]\n".join(f"Step {i}: {step}" for i, step in enumerate(steps, start=1)) + " [PRM]"
    ids = tokenizer.encode(f"{query}\n{answer}", add_special_tokens=False)
    return ids, ends_of(ids, tokenizer.convert_tokens_to_ids("[PRM]"))


def llemma_ids(tokenizer, problem, steps):
    ids = tokenizer.encode(f"# Question\n\n{problem}\n\n# Solution\n\n" + "".join(f"{step}\n\n" for step in steps))
    mark = tokenizer.encode("\n\n", add_special_tokens=False)[1:]  # without the word start
    return ids, [i for i in range(len(ids)) if ids[i : i + len(mark)] == mark][-len(steps) :]


def psa_ids(tokenizer, problem, steps):
    text = " ".join(f"Step {i}: {step} \n\n\n\n\n" for i, step in enumerate(steps, start=1))
    ids = tokenizer.encode(f"{problem} {text}")
    return ids, ends_of(ids, tokenizer.encode(" \n\n\n\n\n")[-1])


def eurus_ids(tokenizer, problem, steps):
    ids, ends = chat(tokenizer, QWEN_CHAT, problem, "\n\n".join(steps) + "\n\n"), []
    for k in range(1, len(steps) + 1):
        ends.append(len(chat(tokenizer, QWEN_CHAT, problem, "\n\n".join(steps[:k]) + "\n\n")) - 3)  # less <|im_end|> \n
    return ids, ends


def softmax(x):
    x = np.exp(x - x.max(-1, keepdims=True))
    return x / x.sum(-1, keepdims=True)


def second(x):
    return softmax(x)[:, 1]


def first(x):
    return softmax(x)[:, 0]


def sigmoid(x):
    return 1 / (1 + np.exp(-x[:, 0]))


@dataclasses.dataclass(frozen=True)
class Case:
    """How a published PRM is made and read."""

    family: str
    architecture: str
    tokenizer: Callable
    ids: Callable  # (tokenizer, problem, steps) to token ids and the index where each step is scored
    score: Callable  # (P, C) logits to (P,)
    head: tuple[str, ...]  # tensors, the last layer's weight first; a language head has its tokens here
    rows: tuple[float, ...]  # sign of each channel: 1 means right
    name: str = "model"  # of the folder
    adapter: str = ""  # where it is not recognised
    config: dict = dataclasses.field(default_factory=dict)  # fields of the authors' own
    mean: bool = False  # whether the logit is the mean of all of a language head's, which repeat two
    outer: str = ""  # before the names of the wrapped model's tensors
    lora: bool = False


QWEN_PRM = dict(
    family="Qwen2", architecture="Qwen2ForProcessRewardModel", tokenizer=bytes_tokenizer, ids=qwen_ids,
    config=dict(
        auto_map={"AutoConfig": "configuration_qwen2_rm.Qwen2RMConfig"}, use_mrope=False, use_sliding_window=False,
        sliding_window=4096, max_window_layers=28, pad_token_id=None,
    ),
)  # fmt: skip
TOKENS = dict(architecture="{}ForTokenClassification", head=("score.weight", "score.bias"), rows=(-1, 1), score=second)
REASONEVAL = dict(
    architecture="ReasonEval_7B", tokenizer=pieces_tokenizer, ids=reasoneval_ids,
    head=("score_head.weight", "score_head.bias"),
)  # fmt: skip

CASES = {
    "qwen-prm": Case(
        **QWEN_PRM, score=second, rows=(-1, 1),
        head=("score.2.weight", "score.2.bias", "score.0.weight", "score.0.bias"),
    ),
    "math-shepherd": Case(
        "Llama", "LlamaForCausalLM", pieces_tokenizer, shepherd_ids, first, (" +", " -"), (1, -1),
        "math-shepherd-mistral-7b-prm",
    ),
    "rlhflow": Case(
        "Llama", "LlamaForCausalLM", lambda: bytes_tokenizer("<|begin_of_text|>"), rlhflow_ids, first, ("+", "-"),
        (1, -1), "Llama3.1-8B-PRM-Deepseek-Data",
    ),
    "trl": Case("Qwen2", **TOKENS, tokenizer=bytes_tokenizer, ids=trl_ids),
    "skywork": Case(
        "Qwen2", "Qwen2ForPrmModel", lambda: bytes_tokenizer("<|im_start|>"), skywork_ids, sigmoid,
        ("v_head.summary.weight", "v_head.summary.bias"), (1,), outer="pretrained_model.",
    ),
    "pure": Case(
        "Qwen2", "Qwen2ForTokenClassification", bytes_tokenizer, functools.partial(trl_ids, bos=False),
        lambda x: softmax(x)[:, 1] - softmax(x)[:, 0], ("score.weight", "score.bias"), (-1, 1), "PURE-PRM-7B",
    ),
    "reasoneval": Case(
        "Mistral", **REASONEVAL, score=lambda x: softmax(x)[:, 1] + softmax(x)[:, 2], rows=(-1, 0, 1),
        config=dict(score_dimension=3, use_bias=True),
    ),
    "reasoneval-redundancy": Case(
        "Mistral", **REASONEVAL, score=second, rows=(-1, 1, 0), adapter="reasoneval-redundancy",
    ),
    "llemma": Case(
        "Llama", "LlamaForCausalLM", pieces_tokenizer, llemma_ids, lambda x: sigmoid(x.mean(1, keepdims=True)),
        ("lm_head.weight",), (1,), "llemma-7b-prm-prm800k-level-1to3-hf", mean=True,
    ),
    "math-psa": Case(
        "Qwen2", "Qwen2ForCausalLM", bytes_tokenizer, psa_ids, first, (" +", " -"), (1, -1), "Math-psa", lora=True,
    ),
    "pqm": Case(
        "Llama", "LlamaForCausalLMWithValueHead", pieces_tokenizer, pqm_ids, lambda x: x[:, 0],
        ("v_head.summary.weight", "v_head.summary.bias"), (1,),
    ),
    "jprm": Case(
        "Qwen2", **TOKENS, tokenizer=bytes_tokenizer, ids=jprm_ids, config=dict(id2label={"0": "wrong", "1": "right"})
    ),
    "axolotl": Case("Mistral", **TOKENS, tokenizer=pieces_tokenizer, ids=trl_ids, adapter="axolotl"),
}  # fmt: skip


def head_tensors(case, seed=0):
    """Random tensors of a head that is not transformers' own."""
    rng = np.random.default_rng(seed)
    shapes = [(len(case.rows), WIDTH), (len(case.rows),), (WIDTH, WIDTH), (WIDTH,)]
    return {
        name: (rng.normal(size=shape) * 0.2).astype(np.float32) for name, shape in zip(case.head, shapes, strict=False)
    }


def random_weights(model, seed="", only=""):
    torch = pytest.importorskip("torch", reason=REASON)
    with torch.no_grad():
        for key, value in ((key, value) for key, value in model.named_parameters() if only in key):
            torch.manual_seed(zlib.crc32((seed + key).encode()))
            value.copy_(torch.rand_like(value) + 0.5 if "norm" in key else torch.randn_like(value) * 0.2)
    return model.eval()


def tokenizer_of(folder):
    transformers = pytest.importorskip("transformers", reason=REASON)
    fields = json.loads((folder / "tokenizer_config.json").read_text())
    names = {key: value for key, value in fields.items() if key.endswith("_token") and value is not None}
    return transformers.PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"), **names)


def make(parent, case, seed=""):
    """Writes the folder; returns it and the reference model.

    A LoRA lies in a folder of its own, beside the folder `base` of its model.
    """
    torch = pytest.importorskip("torch", reason=REASON)
    transformers = pytest.importorskip("transformers", reason=REASON)
    from safetensors.numpy import load_file, save_file

    folder = parent / ("base" if case.lora else case.name)
    architecture = case.architecture.format(case.family)
    config = getattr(transformers, f"{case.family}Config")(**SIZES, rope_theta=100.0)
    library = architecture if hasattr(transformers, architecture) else f"{case.family}ForCausalLM"
    model = random_weights(getattr(transformers, library)(config), seed)
    model.save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    if library != architecture:
        tensors = {case.outer + name: array for name, array in tensors.items()} | head_tensors(case)
    if case.mean:
        tensors["lm_head.weight"] = np.tile(tensors["lm_head.weight"][:2], (VOCABULARY // 2, 1))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    fields = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(fields | case.config | {"architectures": [architecture]}))
    inner, names = case.tokenizer()
    assert inner.get_vocab_size() <= VOCABULARY
    inner.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(names))
    if not case.lora:
        return folder, Reference(case, folder, model, torch)
    peft = pytest.importorskip("peft", reason=REASON)
    config = peft.LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj", "down_proj"], task_type="CAUSAL_LM")
    model = peft.get_peft_model(model, config).eval()
    random_weights(model, "lora", only="lora_")
    model.save_pretrained(parent / case.name)
    path = parent / case.name / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"base_model_name_or_path": "../base"}))
    return parent / case.name, Reference(case, folder, model.base_model.model, torch)


@dataclasses.dataclass(frozen=True)
class Reference:
    case: Case
    folder: object
    model: object
    torch: object

    def states(self, ids):
        with self.torch.no_grad():
            return self.model.model(self.torch.tensor([ids])).last_hidden_state[0].numpy()

    def logits(self, ids):
        """(T, C), read from the files as they are now where the head is written here."""
        from safetensors.numpy import load_file

        head = load_file(self.folder / "model.safetensors")
        x, torch = self.torch.tensor(self.states(ids)), self.torch
        if self.case.head[0].endswith(".weight"):
            layers = [torch.tensor(head[name]) for name in self.case.head if name in head]
            if len(layers) == 4:
                x = torch.relu(torch.nn.functional.linear(x, *layers[2:]))
            return torch.nn.functional.linear(x, *layers[:2]).numpy()
        tokenizer = tokenizer_of(self.folder)
        rows = [token_of(tokenizer, token) for token in self.case.head]
        return torch.nn.functional.linear(x, torch.tensor(head["lm_head.weight"])).numpy()[:, rows]


def token_of(tokenizer, text):
    """The id as the authors find it: the last of the text's."""
    return tokenizer.encode(text.strip() if text.strip() in "+-" and "▁+" in tokenizer.get_vocab() else text)[-1]


def plant(reference, w):
    """Writes a head that says right where w x is positive."""
    from safetensors.numpy import load_file, save_file

    case, path = reference.case, reference.folder / "model.safetensors"
    tensors = load_file(path)
    rows = np.outer(case.rows, w).astype(np.float32)
    rows = np.tile(rows, (VOCABULARY, 1)) if case.mean else rows
    if not case.head[0].endswith(".weight"):
        tokenizer = tokenizer_of(reference.folder)
        name = "lm_head.weight"
        tensors[name] = tensors[name].copy()
        tensors[name][[token_of(tokenizer, token) for token in case.head]] = rows
    elif len(case.head) == 4:  # relu(w x) and relu(-w x), and one less the other
        hidden = np.zeros((WIDTH, WIDTH), np.float32)
        hidden[:2] = w, -w
        last = np.zeros((len(case.rows), WIDTH), np.float32)
        last[:, 0], last[:, 1] = case.rows, [-row for row in case.rows]
        biases = np.zeros(len(case.rows), np.float32), np.zeros(WIDTH, np.float32)
        tensors |= dict(zip(case.head, (last, biases[0], hidden, biases[1]), strict=True))
    else:
        tensors |= {case.head[0]: rows, **{name: np.zeros(len(rows), np.float32) for name in case.head[1:2]}}
    save_file(tensors, path, metadata={"format": "pt"})
