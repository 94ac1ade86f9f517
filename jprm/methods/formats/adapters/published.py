"""The published PRMs; each cites the source of its layout."""

from __future__ import annotations

import dataclasses
import os
import pathlib
import re
from collections.abc import Mapping, Sequence
from typing import Any, get_type_hints

from jprm.checkpoints.safetensors import Tensors, read_json
from jprm.experiment import PEFT, kind_of
from jprm.experiment import PUBLISHED as CONFIG
from jprm.io.jsonl import DAMAGED
from jprm.io.storage import is_remote, named_in, path_of
from jprm.methods.formats import families
from jprm.methods.formats.adapters.record import FILE, Adapter
from jprm.options import find_part, values_of
from jprm.tokenizer import load_tokenizer

QWEN = {"<|im_start|>": 151644, "<|im_end|>": 151645}
QWEN_SIZES = (151936, 152064)  # of the 1.5B models, and of those from 7B on

_QWEN_SYSTEM = "<|im_start|>system\nPlease reason step by step, and put your final answer within \\boxed{}.<|im_end|>\n"
_QWEN_USER = "<|im_start|>user\n{problem}<|im_end|>\n<|im_start|>"

_QWEN_OTHER_SYSTEM = "<|im_start|>system\n{system}<|im_end|>\n" + _QWEN_USER
"""Qwen's chat template with a custom system message."""

_LLAMA = {
    "<|begin_of_text|>": 128000, "<|start_header_id|>": 128006, "<|end_header_id|>": 128007, "<|eot_id|>": 128009,
}  # fmt: skip
_LLAMA_DATES = "\n\nCutting Knowledge Date: December 2023\nToday Date: 26 Jul 2024\n\n"
_LLAMA_TURN = "<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n"

_LLAMA_SYSTEM = "<|begin_of_text|><|start_header_id|>system<|end_header_id|>" + _LLAMA_DATES
_LLAMA_USER = "<|eot_id|><|start_header_id|>user<|end_header_id|>\n\n{problem}"
_LLAMA_FIRST = _LLAMA_SYSTEM + _LLAMA_USER

_CLASSES: dict[str, Any] = dict(channels=("wrong", "right"), score={"right": 1.0})


def _verdict(right: str, wrong: str) -> dict[str, Any]:
    """Returns the fields of a language head for step verdicts by one of two tokens."""
    return dict(joined=True, head="lm_head", channels=(right, wrong), score={right: 1.0}, semantics="value")


_RECORDS = (
    # The card of Qwen/Qwen2.5-Math-PRM-7B. One layout and head for 7B, 72B and Qwen2.5-Math-7B-PRM800K.
    Adapter(
        name="qwen-prm",
        problem=_QWEN_SYSTEM + _QWEN_USER,
        system=_QWEN_OTHER_SYSTEM,
        first="assistant\n{step}<extra_0>",
        step="{step}<extra_0>",
        tokens=QWEN | {"<extra_0>": 151651},
        vocabulary=QWEN_SIZES,
        joined=True,
        context=4096,
        **_CLASSES,
    ),
    # The card of Skywork/Skywork-Reward-Llama-3.1-8B, trl's RewardTrainer: a reward at the end of the model's own chat.
    Adapter(
        name="reward",
        problem=(),
        chat=True,
        step="{step}\n",
        joined=True,
        channels=("reward",),
        activation="none",
        score={"reward": 1.0},
        threshold=0.0,
        weight="sigmoid",
        semantics="value",
        aggregation="last",
    ),
    # The card of peiyi9979/math-shepherd-mistral-7b-prm: logits at the tag itself.
    Adapter(
        name="math-shepherd",
        problem="{bos}{problem}",
        first=" Step {number}: {step} ки",
        step="\nStep {number}: {step} ки",
        tokens={" ки": 12902, " +": 648, " -": 387},
        vocabulary=(32000,),
        aggregation="min",
        context=4096,
        **_verdict(" +", " -"),
    ),
    # RLHFlow/RLHF-Reward-Modeling, math-rm/prm_evaluate.py: a turn a step, the answer "+" or "-" read where it is
    # predicted. Both checkpoints, Mistral-Data and Deepseek-Data. The dates are those of the template at training.
    Adapter(
        name="rlhflow",
        problem=_LLAMA_FIRST,
        system=_LLAMA_SYSTEM + "{system}" + _LLAMA_USER,
        first=" {step}" + _LLAMA_TURN,
        step="+<|eot_id|><|start_header_id|>user<|end_header_id|>\n\n{step}" + _LLAMA_TURN,
        tokens=_LLAMA | {"+": 10, "-": 12},
        vocabulary=(128256,),
        strip=True,
        aggregation="mean",
        # QwenLM/ProcessBench, code/run_eval_prm_rlhflow.py; ssmisya/PRMBench joins by a space, as above
        benchmarks={"processbench": {"problem": _LLAMA_FIRST + "\n\n", "first": "{step}" + _LLAMA_TURN}},
        **_verdict("+", "-"),
    ),
    # SkyworkAI/skywork-o1-prm-inference, model_utils/io_utils.py and prm_model.py
    Adapter(
        name="skywork",
        problem="{bos}{problem}\n",
        step=("{step}", "\n"),
        head="v_head.summary",
        channels=("right",),
        activation="sigmoid",
        score={"right": 1.0},
        semantics="value",
        aggregation="mean",
        context=4096,
    ),
    # CJReinforce/PURE, openrlhf/utils/utils.py, and the card of jinachris/PURE-PRM-7B. No bos, no template; its rewards
    # are in [-1, 1].
    Adapter(
        name="pure",
        problem="{problem}",
        step=("{step}", "\n"),
        channels=("wrong", "right"),
        score={"right": 1.0, "wrong": -1.0},
        threshold=0.0,  # ssmisya/PRMBench, mr_eval/models/pure_prm.py
        weight="half",
        semantics="advantage",
        aggregation="soft_min",
        context=4096,
    ),
    # GAIR-NLP/ReasonEval, codes/examples.py: the separator is taken out again, so a step ends in its own last token.
    # There the example reads the 34B; the 7B it reads one token earlier, its indices being of ids without the bos.
    Adapter(
        name="reasoneval",
        problem="{bos}Question:\n{problem}\nAnswer:\nLet's think step by step.\n",
        step="{step}",
        head="score_head",
        channels=("negative", "neutral", "positive"),
        score={"neutral": 1.0, "positive": 1.0},
        redundancy={"neutral": 1.0},
        redundancy_threshold=0.15,  # ssmisya/PRMBench, mr_eval/models/reasoneval.py
        semantics="rating",
        aggregation="min",
        context=4096,
    ),
    # ScalableMath/llemma-*prm*: Edward-Sun/easy-to-hard, inference_reward.py (the first newline behind a step) and
    # scripts/convert_checkpoint_to_hf.py (two output rows, repeated over the vocabulary); ssmisya/PRMBench,
    # mr_eval/models/llemma7b_prm.py, and the card of tkitsers/Llemma-reward-model.
    Adapter(
        name="llemma",
        problem="{bos}# Question\n\n{problem}\n\n# Solution\n\n",
        first="{step}\n",
        step="\n{step}\n",
        joined=True,
        strip=True,
        head="lm_head",
        mean=True,
        channels=("right",),
        activation="sigmoid",
        score={"right": 1.0},
        context=4096,
    ),
    # openreasoner/openr, prm/infer_fns.py and the card of openreasoner/Math-psa: Math-Shepherd's way with other tokens
    Adapter(
        name="math-psa",
        problem="{problem}",
        step=" Step {number}: {step} \n\n\n\n\n",
        tokens={" \n\n\n\n\n": 76325, " +": 488, " -": 481},
        vocabulary=QWEN_SIZES,
        aggregation="min",
        context=4096,
        **_verdict(" +", " -"),
    ),
    # WindyLee0822/Process_Q_Model, bon_eval_hf.py and value_model.py
    Adapter(
        name="pqm",
        problem="Below is an instruction that describes a task.\nWrite a response that appropriately completes the"
        " request.\n\n### Instruction:\n{problem}\n\n### Response: Let's think step by step\n",
        first="Step {number}: {step} [PRM]",
        step="\nStep {number}: {step} [PRM]",
        tokens={"[PRM]": None},
        joined=True,
        strip=True,
        head="v_head.summary",
        channels=("q",),
        activation="none",
        score={"q": 1.0},
        threshold=0.0,  # Q before the first step, which the loss ranks between correct and incorrect steps
        weight="sigmoid",
        semantics="advantage",
        aggregation="min",
    ),
    # PRIME-RL/ImplicitPRM and the card of PRIME-RL/EurusPRM-Stage2; `reference` is for the user's own record to name.
    # Every step ends in its separator and is read there, the last one too. The card reads one token further, which is
    # the next step's first, or the end of the turn behind the last step: there a score changes with what comes after.
    Adapter(
        name="eurus",
        problem=_QWEN_SYSTEM + _QWEN_USER + "assistant\n",
        system=_QWEN_OTHER_SYSTEM + "assistant\n",
        step="{step}\n\n",
        tokens=QWEN,
        vocabulary=QWEN_SIZES,
        joined=True,
        head="lm_head",
        channels=(),
        activation="log_ratio",
        score={},
        scale=0.001,
        threshold=0.0,
        weight="sigmoid",  # as its cross-entropy
        semantics="implicit",
        context=4096,
    ),
    # Any two language models of one tokenizer: `jprm score --model LARGE --reference SMALL`. Unless a record has a
    # `problem`, the model's chat template writes it, or jprm's own layout if there is none.
    Adapter(
        name="contrast",
        problem=(),
        chat=True,
        step="{step}\n",
        head="lm_head",
        channels=(),
        activation="log_ratio",
        score={},
        threshold=0.0,
        weight="sigmoid",
        semantics="implicit",
    ),
    # trl/experimental/prm/prm_trainer.py, which axolotl calls: ids are concatenated, no separator behind the prompt
    Adapter(
        name="trl",
        problem="{bos}{problem}",
        step=("{step}", "\n"),
        **_CLASSES,
    ),
    # jprm.tokenizer.native_layout, as `jprm convert` exports it
    Adapter(
        name="jprm",
        problem=("{bos}{problem}", "\n"),
        system=("{bos}{system}", "\n", "{problem}", "\n"),
        step=("{step}", "\n"),
        turns=True,
        **_CLASSES,
    ),
)  # fmt: skip

PUBLISHED: dict[str, Adapter] = {record.name: record for record in _RECORDS}
# The card of Qwen/Qwen2.5-Math-RM-72B: the same, at the last token of a fixed chat.
PUBLISHED["qwen-rm"] = dataclasses.replace(
    PUBLISHED["reward"], name="qwen-rm", chat=False, problem=_QWEN_SYSTEM + _QWEN_USER + "assistant\n",
    system=_QWEN_OTHER_SYSTEM + "assistant\n", closing="{step}<|im_end|>\n",
    tokens=QWEN, vocabulary=QWEN_SIZES, strip=False, context=4096,
)  # fmt: skip
PUBLISHED["token-classes"] = dataclasses.replace(
    PUBLISHED["trl"], name="token-classes", labels=True, channels=(), score={}
)
PUBLISHED["sequence-classes"] = dataclasses.replace(
    PUBLISHED["reward"], name="sequence-classes", labels=True, channels=(), score={}, activation="softmax",
    threshold=None, weight=None, semantics="correctness",
)  # fmt: skip
PUBLISHED["axolotl"] = dataclasses.replace(PUBLISHED["trl"], name="axolotl")
PUBLISHED["reasoneval-redundancy"] = dataclasses.replace(
    PUBLISHED["reasoneval"], name="reasoneval-redundancy", score={"neutral": 1.0}, aggregation="max", redundancy=None,
    redundancy_threshold=None,
)  # fmt: skip
PUBLISHED["jprm-ternary"] = dataclasses.replace(
    PUBLISHED["jprm"], name="jprm-ternary", channels=("negative", "neutral", "positive"),
    score={"neutral": 1.0, "positive": 1.0}, semantics="rating",
)  # fmt: skip


# ------------------------------------------ the adapter of a folder, recognised from its files or read from a JSON file

OUTER = "pretrained_model."
"""Prefix that a value head's wrapper may add to the inner model's names."""


@dataclasses.dataclass(frozen=True)
class Signs:
    """Identifying features of an adapter's folder. All fields that are set must match."""

    architecture: str = ""  # regular expression for the whole of the first of config.json's `architectures`
    tensor: str = ""
    token: str = ""  # of the tokenizer, by its name
    named: str = ""  # regular expression, ignoring case, in the folder's path or config.json's `_name_or_path`
    labels: tuple[str, ...] = ()  # config.json's `id2label`
    lora: bool = False  # a PEFT folder


_TOKENS = r"\w+ForTokenClassification"

SIGNS: tuple[tuple[str, Signs], ...] = (
    ("pure", Signs(tensor="score.weight", named=r"\bpure\b|jinachris")),
    ("pure", Signs(tensor="score.0.weight", named=r"\bpure\b|jinachris")),
    ("qwen-prm", Signs("Qwen2ForProcessRewardModel", tensor="score.0.weight", token="<extra_0>")),
    ("qwen-rm", Signs("Qwen2ForRewardModel", tensor="score.0.weight")),
    ("reward", Signs(r"\w+ForSequenceClassification", tensor="score.weight")),
    ("pqm", Signs(tensor="v_head.summary.weight", token="[PRM]")),
    ("skywork", Signs("Qwen2.*", tensor="v_head.summary.weight")),
    ("reasoneval", Signs(tensor="score_head.weight")),
    ("math-psa", Signs(lora=True, named=r"psa|openr")),
    ("jprm", Signs(_TOKENS, tensor="score.weight", labels=("wrong", "right"))),
    ("jprm-ternary", Signs(_TOKENS, tensor="score.weight", labels=("negative", "neutral", "positive"))),
    ("trl", Signs(_TOKENS, tensor="score.weight")),  # token-classes where the labels are more
    ("math-shepherd", Signs("(Llama|Mistral)ForCausalLM", named=r"math.?shepherd")),
    ("llemma", Signs("LlamaForCausalLM", named=r"llemma.*(prm|orm)|llemma.reward")),
    ("rlhflow", Signs("LlamaForCausalLM", named=r"PRM.(mistral|deepseek)|rlhflow.*prm")),
    ("eurus", Signs("Qwen2ForCausalLM", named=r"eurusprm|implicit.?prm")),
)
"""Adapters by their signs; the first match counts. A causal language model's files do not show that it is a PRM, so it
is recognised only by name.
"""


_INCORRECT = frozenset("- 0 bad error false incorrect invalid negative no wrong".split())
_CORRECT = frozenset("+ 1 correct good ok positive right true valid yes".split())


def _of_steps(labels: tuple[str, ...]) -> bool:
    """Returns whether a token classifier's labels are an incorrect and a correct step, in this order."""
    words = [label.lower().removeprefix("step_").removeprefix("label_") for label in labels]
    return len(words) == 2 and words[0] in _INCORRECT and words[1] in _CORRECT


def correct_of(labels: Sequence[str]) -> list[str]:
    """Returns the labels that mean a correct step, in order, e.g. ["right"], maybe [].

    These are correct, correct_step, good, no_error, no_mistake, none, ok, positive, right, success, true and valid, in
    any case, also after `step_`. Others are ignored, even "yes", "+" and "1".
    """
    return [label for label in labels if label.lower().removeprefix("step_").replace(" ", "_") in _GOOD]


_GOOD = _CORRECT - {"1", "+", "yes"} | {"correct_step", "no_error", "none", "no_mistake", "success"}
"""Labels of a correct step among several classes, where numbers have no meaning."""


def labels_of(fields: Mapping[str, Any]) -> tuple[str, ...]:
    """Returns the class names of `id2label` in config.json's fields, by id; "" if one is missing, () if all are."""
    table = fields.get("id2label")
    return tuple(str(table.get(str(i), "")) for i in range(len(table))) if isinstance(table, dict) else ()


def labelled(adapter: Adapter, folder: pathlib.Path) -> Adapter:
    """Returns a copy with config.json's labels as channels and as outputs, and the score's label if it has no score.

    Raises ValueError if config.json has no labels, a blank or repeated one, or one named `score`, or if the adapter has
    no score and not exactly one label means correct (`correct_of`); FileNotFoundError if there is no config.json.
    """
    fields = read_json(folder / CONFIG)
    table, labels = fields.get("id2label"), labels_of(fields)
    if not labels or "" in labels or len(set(labels)) < len(labels) or "score" in labels:
        raise ValueError(f"{folder / CONFIG}: id2label is {table!r}: it must name every class, each otherwise")
    good = correct_of(labels)
    if not adapter.score and len(good) != 1:
        raise ValueError(
            f"{folder}: its labels are {', '.join(labels)}, of which {len(good) or 'none'} say that a step is correct."
            f' Name the score in a file {FILE}: {{"like": "{adapter.name}", "score": {{"LABEL": 1}}}}'
        )
    sigmoid = fields.get("problem_type") == "multi_label_classification"
    return dataclasses.replace(
        adapter, labels=False, channels=labels, score=adapter.score or {good[0]: 1.0},
        activation="sigmoid" if sigmoid else adapter.activation,
        outputs={label: {label: 1.0} for label in labels} | dict(adapter.outputs),
    )  # fmt: skip


def named(adapter: str) -> Adapter:
    """Finds the adapter: a file `NAME.json`, a key of `PUBLISHED`, or the user's own (`module:NAME`, `FILE.py:NAME`).

    Raises FileNotFoundError if the JSON file is missing, and ValueError if it is invalid or the name unknown. The
    user's module is executed, and its errors pass.
    """
    if str(adapter).endswith(".json"):
        return read(adapter)
    return find_part(str(adapter), PUBLISHED, "adapter", Adapter, files=True)


def recognise(folder: pathlib.Path) -> Adapter:
    """Returns a local folder's `adapter.json`, or the first published adapter whose signs fit its files.

    Raises ValueError if no adapter fits, the labels do not say which one means correct, or a file is damaged;
    FileNotFoundError if config.json, tensors or tokenizer are missing.
    """
    if (folder / FILE).is_file():
        return read(folder / FILE)
    lora = kind_of(folder) == "peft"
    fields = read_json(folder / (PEFT if lora else CONFIG))
    architectures = fields.get("architectures")
    architecture = str(architectures[0]) if isinstance(architectures, list) and architectures else ""
    parts = folder.resolve().parts[-3:]  # a download's cache has the model's name two above the files
    place = f"{'/'.join(parts)} {fields.get('_name_or_path', '')}"
    tensors = frozenset() if lora else frozenset(name.removeprefix(OUTER) for name in Tensors(folder))
    tokenizer = None if lora else load_tokenizer(folder)
    labels = labels_of(fields)
    matching = (
        name for name, signs in SIGNS
        if re.fullmatch(signs.architecture or ".*", architecture)
        and (not signs.tensor or signs.tensor in tensors)
        and (not signs.token or (tokenizer is not None and tokenizer.token_id(signs.token) is not None))
        and re.search(signs.named, place, re.IGNORECASE)
        and (not signs.labels or signs.labels == labels)
        and lora == signs.lora
    )  # fmt: skip
    if not (name := next(matching, "")):
        if not lora:
            families.find(families.text_fields(folder / CONFIG))  # raises if no adapter can read the family
        raise ValueError(
            f"{folder}: {architecture or 'a LoRA'} with these tensors is no PRM that jprm recognises. Say how it is"
            f" read: --adapter NAME, with one of {', '.join(PUBLISHED)}, or a file {FILE} in the folder"
        )
    if name == "reward" and len(labels) > 1:
        return PUBLISHED["sequence-classes"]
    if name == "trl" and len(labels) > 2 and len(correct_of(labels)) == 1:
        return PUBLISHED["token-classes"]
    if name == "trl" and labels and not _of_steps(labels):
        raise ValueError(
            f"{folder}: its labels are {', '.join(labels[:6])}{', ...' * (len(labels) > 6)}: not an incorrect step,"
            " then a correct one. If it is a PRM, say how it is read: --adapter trl where the second label is that of"
            f' correct steps, or a file {FILE} in the folder, such as {{"like": "token-classes", "score": {{"LABEL":'
            " 1}} with the label of correct steps"
        )
    return PUBLISHED[name]


def read(path: str | os.PathLike) -> Adapter:
    """Reads the adapter in a JSON file, also in a bucket.

    If the file has `like`, this record of `PUBLISHED` gives the fields that are left out, except a `name`: this is then
    the folder's. Relative `base` and `reference` are looked up beside the file.

    Raises FileNotFoundError if the file is missing, and ValueError, naming file and field, if a field is unknown or
    invalid.
    """
    path = path_of(path)
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such file")
    fields: dict[str, Any] = read_json(path)
    like = fields.pop("like", None)
    if like is not None and (not isinstance(like, str) or like not in PUBLISHED):
        raise ValueError(f"{path}: like {like!r} is not one of {', '.join(PUBLISHED)}")
    try:
        values_of(get_type_hints(Adapter) | {"like": str}, fields)  # an adapter takes them as they are written
        for name in ("base", "reference"):  # relative to the file that names them
            if fields.get(name) and not is_remote(fields[name]):
                fields[name] = str(named_in(path, fields[name]))
        if like is None:
            return Adapter(**fields)
        if "semantics" in fields:
            fields.setdefault("aggregation", "")
        if "problem" in fields or fields.get("chat"):  # the other record's place for a system message is not this one's
            fields.setdefault("system", ())
            fields.setdefault("chat", False)
        return dataclasses.replace(PUBLISHED[like], **({"name": path.parent.resolve().name} | fields))
    except DAMAGED as error:
        raise ValueError(f"{path}: {re.sub(r'^.*__init__.. ', '', str(error))}") from error
