"""The model card of an exported folder, and `adapter.json`, which describes its layout and score function."""

from __future__ import annotations

import json
import pathlib
from typing import Any

from jprm.experiment import Experiment
from jprm.io.storage import Place, path_of
from jprm.methods.evaluate.benchmarks import BENCHMARKS
from jprm.methods.evaluate.blocks import figures_in
from jprm.score.scorer import PRM
from jprm.tokenizer import JsonTokenizer

CALIBRATION = "calibration.json"


def adapter_json(prm: PRM, experiment: Experiment, labels: tuple[str, ...]) -> dict[str, Any]:
    """Returns the record of jprm's own layout and head, which the exported folder is read by."""
    return {
        "name": experiment.name,
        "problem": ["{bos}{problem}", "\n"],
        "step": ["{step}", "\n"],
        "channels": list(labels),
        "score": {label: 1 for label in labels[1:]},
        "activation": "softmax",
        "semantics": prm.semantics,
    }


def write(folder: pathlib.Path, prm: PRM, experiment: Experiment, labels: tuple[str, ...], format: str) -> None:
    """Writes README.md, and copies the run's calibration.json if it has one."""
    if (calibration := path_of(prm.name) / CALIBRATION).is_file():
        (folder / CALIBRATION).write_bytes(calibration.read_bytes())
    (folder / "README.md").write_text(_card(prm, experiment, labels, format), encoding="utf-8")


def write_policy(folder: pathlib.Path, experiment: Experiment, step: int) -> None:
    """Writes the README.md of a policy."""
    base = pathlib.Path(experiment.base).name if experiment.base else "random parameters"
    (folder / "README.md").write_text(
        f"""---
library_name: transformers
pipeline_tag: text-generation
tags: [jprm]
---

# {experiment.name}

A policy that writes chains of reasoning, one step a line. Trained with jprm, {step} steps, from {base}; adapters are
merged. Objective: {experiment.objective}. A prompt is the tokenizer's beginning of text, if it has one, the problem,
and a newline, encoded one by one without special tokens.
""",
        encoding="utf-8",
    )


def _card(prm: PRM, experiment: Experiment, labels: tuple[str, ...], format: str) -> str:
    data, target, tokenizer, lora = experiment.data, experiment.target, prm.layout.tokenizer, experiment.lora
    newline = tokenizer.encode("\n")
    bos = "none" if tokenizer.bos is None else f"id {tokenizer.bos}, once, at the very start"
    base = pathlib.Path(experiment.base).name if experiment.base else "random parameters"
    classes = ", ".join(f"{i} = {label}" for i, label in enumerate(labels))
    adapters = f"\n- LoRA: rank {lora.rank}, scale {lora.scale:g}, on {lora.targets}" if lora.rank else ""
    specials = "" if isinstance(tokenizer, JsonTokenizer) else "\nThe tokenizer is a SentencePiece model alone.\n"
    task = {"peft": "library_name: peft", "transformers": "library_name: transformers"}.get(
        format, "library_name: vllm"
    )
    return f"""---
{task}
pipeline_tag: token-classification
tags: [process-reward-model, jprm]
---

# {experiment.name}

A process reward model: it scores every step of a chain of reasoning. Trained with jprm, {prm.step} steps.

- Base: {base}, {prm.config.layers} layers{adapters}
- Data: {", ".join(pathlib.Path(file).name for file in data.train)}; supervision: {data.supervise}
- Labels: {target.labels} ({prm.semantics}); neutral: {target.neutral}; probabilities as targets: {target.soft}
- Steps after the first error: {target.after_error}
- Objective: {experiment.objective}; chains longer than {data.tokens} tokens: {data.too_long}
- Classes: {classes}. The score of a step is 1 - P({labels[0]}), by the softmax.

## Layout of the input

Each part is encoded alone, without special tokens, and the ids are joined; a joined string is never encoded again.

- bos: {bos}
- the problem, then a newline (ids {newline})
- each step, then a newline; its score is read at that newline's last token
{specials}
```python
from transformers import AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained(FOLDER)

def encode(text):
    return tokenizer.encode(text, add_special_tokens=False)

ids, ends = {[] if tokenizer.bos is None else [tokenizer.bos]} + encode(problem) + encode("\\n"), []
for step in steps:
    ids += encode(step) + encode("\\n")
    ends.append(len(ids) - 1)
```
{_USE[format]}{"" if format == "peft" else _VLLM}
## Metrics at the end of training

{_table(_result(path_of(prm.name)))}
{_evaluations(path_of(prm.name))}"""


_USE = {
    "transformers": """
```python
import torch
from transformers import AutoModelForTokenClassification

model = AutoModelForTokenClassification.from_pretrained(FOLDER).eval()
with torch.no_grad():
    scores = model(torch.tensor([ids])).logits[0, ends].softmax(-1)[:, 1:].sum(-1)
```
""",
    "peft": """
```python
import torch
from peft import PeftModel
from transformers import AutoModelForTokenClassification

base = AutoModelForTokenClassification.from_pretrained(BASE)  # the folder that adapter_config.json names
model = PeftModel.from_pretrained(base, FOLDER).eval()
with torch.no_grad():
    scores = model(input_ids=torch.tensor([ids])).logits[0, ends].softmax(-1)[:, 1:].sum(-1)
```

A base of more or fewer than two labels needs `num_labels` when it is loaded.
""",
    "qwen2-prm": """
The tensors and config.json are those of Qwen2.5-Math-PRM: a head of two layers with a ReLU. The layout is the one
above: there is no `<extra_0>` and no chat template. transformers has no class of its own for this format; vLLM has.
""",
}

_VLLM = """
## Serving with vLLM

By vLLM's documentation (0.14 or newer, for the bias of the head), as a pooling model with a result for every token:

    vllm serve FOLDER --runner pooling --dtype bfloat16

```python
from vllm import LLM

llm = LLM(FOLDER, runner="pooling", dtype="bfloat16")
(output,) = llm.encode([{"prompt_token_ids": ids}], pooling_task="token_classify")
scores = output.outputs.data[ends][:, 1:].sum(-1)  # it has applied the softmax
```

Send ids, not text: the server would tokenise a joined string. A `step_tag_id` in its pooler config, which returns the
scores of that token alone, fits where a newline is one token that no problem and no step contains; the indices above
always do.
"""


def _result(run: Place) -> dict[str, str]:
    path = run / "result.json"
    metrics = json.loads(path.read_bytes()) if path.is_file() else {}
    timed = {k for k in metrics if "second" in k} | {"goodput"}  # of the machine, and no two runs have the same
    return {k: f"{v:.6g}" for k, v in metrics.items() if isinstance(v, int | float) and k not in timed}


def _evaluations(run: Place) -> str:
    """Returns the figures of every benchmark whose report the run's folder holds as NAME.json."""
    parts = []
    for name in BENCHMARKS:
        path = run / f"{name}.json"
        figures = dict(figures_in(json.loads(path.read_bytes()))) if path.is_file() else {}
        if figures:
            more = (
                f"\nThe maps from scores to probabilities are in {CALIBRATION}.\n" if path.name == CALIBRATION else ""
            )
            parts.append(f"\n## Evaluation: {name} (95 % intervals over problems)\n\n{_table(figures)}{more}")
    return "".join(parts)


def _table(rows: dict[str, str]) -> str:
    return "| figure | value |\n|---|---|\n" + ("".join(f"| {k} | {v} |\n" for k, v in rows.items()) or "| none | |\n")
