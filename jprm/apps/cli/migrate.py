"""`jprm migrate`: the settings of TRL's PRM trainer as an experiment of jprm, and what cannot be carried over.

TRL's last release with `PRMTrainer` is 1.13 (`trl.experimental.prm`, September 2026). A script is parsed and never
executed: its literals count, and names that are assigned a literal once. Of TRL's defaults only those that differ from
jprm's are written.
"""

from __future__ import annotations

import ast
import dataclasses
import json
import os
import pathlib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from tyro.conf import Positional, arg

from jprm.apps.cli.arguments import Commands, Count

migrate = Commands()


@migrate.command(name="trl")
def migrate_trl(
    source: Annotated[Positional[Path], arg(metavar="CONFIG_OR_SCRIPT.py")],
    out: Annotated[Path, arg(metavar="EXPERIMENT.py")],
    examples: Count = None,
) -> None:
    """Write an experiment from a script or configuration of TRL's PRM trainer, and name what is not carried over.

    The script is read and never executed: literals count, and names that are assigned one. TRL's stepwise records are
    jprm's data as they are.

    For example:
      jprm migrate trl train_prm.py --out experiments/prm.py --examples 100000
      jprm migrate trl config.yaml --out experiments/prm.py

    Args:
        source: A script that makes a PRMConfig, or its settings as JSON or YAML.
        out: The experiment file to write.
        examples: Training examples, by which epochs become steps; not needed where max_steps is set.
    """
    from jprm.io.outputs import atomic_write, check_output

    check_output(out, source)
    if out.exists():
        raise ValueError(f"{out}: is there already. Name another file, or remove it")
    text, lost = experiment_file(read(source), examples)
    atomic_write(out, text)
    print(f"{out}: written. Not carried over: {len(lost)}")
    for line in lost:
        print(f"  {line}")


DEFAULTS: dict[str, Any] = {
    "learning_rate": 1e-5, "lr_scheduler_type": "linear", "warmup_steps": 0, "warmup_ratio": 0.0, "weight_decay": 0.0,
    "adam_beta1": 0.9, "adam_beta2": 0.999, "adam_epsilon": 1e-8, "max_grad_norm": 1.0, "seed": 42, "bf16": True,
    "per_device_train_batch_size": 8, "gradient_accumulation_steps": 1, "num_train_epochs": 3.0, "max_steps": -1,
    "max_length": 1024, "logging_steps": 10, "save_steps": 500, "save_total_limit": None, "eval_steps": None,
    "gradient_checkpointing": True, "step_separator": "\n", "max_completion_length": None,
    "train_on_last_step_only": False, "output_dir": "runs/prm", "run_name": None, "report_to": "none",
}  # fmt: skip
"""Of PRMConfig of TRL 1.13, which jprm has a setting for, or must have to train the same."""

_ADAMW = ("adamw_torch", "adamw_torch_fused", "adamw_hf", "adamw")
_DECAYS = {"linear": "linear", "cosine": "cosine", "constant": "constant", "constant_with_warmup": "constant"}
_ROLES = {
    "q_proj": "query", "k_proj": "key", "v_proj": "value", "o_proj": "out", "gate_proj": "gate", "up_proj": "up",
    "down_proj": "down",
}  # fmt: skip
_WITHOUT_EFFECT = frozenset(
    "do_train do_eval disable_dropout dataset_num_proc remove_unused_columns push_to_hub hub_model_id"
    " hub_token tf32 fp16 logging_first_step logging_strategy save_strategy eval_strategy evaluation_strategy"
    " per_device_eval_batch_size dataloader_num_workers dataloader_pin_memory overwrite_output_dir"
    " save_safetensors ddp_find_unused_parameters gradient_checkpointing_kwargs resume_from_checkpoint"
    " log_level disable_tqdm bf16_full_eval trust_remote_code torch_dtype dtype attn_implementation use_cache"
    " load_best_model_at_end use_peft use_cpu".split()
)
"""Settings of how TRL runs, that change nothing of what is learnt or that jprm needs not."""


@dataclasses.dataclass
class Setup:
    """What a script or configuration sets.

    settings: of PRMConfig. lora: of LoraConfig, None without one. model, data: their names, empty where unknown.
    lost: what is set and cannot be carried over, a sentence each.
    """

    settings: dict[str, Any] = dataclasses.field(default_factory=dict)
    lora: dict[str, Any] | None = None
    model: str = ""
    data: str = ""
    lost: list[str] = dataclasses.field(default_factory=list)


def read(path: str | os.PathLike) -> Setup:
    """Returns what a script (.py) or a configuration (.json, .yaml, as for TrlParser) sets.

    Raises FileNotFoundError, or ValueError naming file and line, for what is not readable or no settings of PRMTrainer.
    """
    path = pathlib.Path(path)
    if not path.is_file():
        raise FileNotFoundError(
            f"{path}: no such file. Give a script that uses PRMConfig, or its settings as JSON or YAML"
        )
    text = path.read_text(encoding="utf-8")
    return _script(path, text) if path.suffix == ".py" else _configuration(path, text)


def _configuration(path: pathlib.Path, text: str) -> Setup:
    try:
        if path.suffix == ".json":
            fields = json.loads(text)
        else:
            import yaml

            fields = yaml.safe_load(text)
    except Exception as error:  # yaml has a class of its own, and json's is a ValueError
        raise ValueError(f"{path}: is neither JSON nor YAML: {' '.join(str(error).split())[:200]}") from None
    if not isinstance(fields, dict):
        raise ValueError(f"{path}: is no object of settings. Give a script, or PRMConfig's settings as JSON or YAML")
    setup = Setup(
        dict(fields), model=str(fields.get("model_name_or_path", "")), data=str(fields.get("dataset_name", ""))
    )
    lora = {
        "r": "lora_r",
        "lora_alpha": "lora_alpha",
        "target_modules": "lora_target_modules",
        "use_rslora": "use_rslora",
    }
    if fields.get("use_peft"):
        setup.lora = {name: fields[key] for name, key in lora.items() if key in fields}
    for key in ("model_name_or_path", "model_revision", "dataset_name", "dataset_config", *lora.values()):
        setup.settings.pop(key, None)
    return setup


def _script(path: pathlib.Path, text: str) -> Setup:
    try:
        tree = ast.parse(text, str(path))
    except (SyntaxError, ValueError) as error:
        raise ValueError(f"{path}: is no Python: {error}") from None
    setup, names = Setup(), _constants(tree)
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    if not any(_called(call) == "PRMConfig" for call in calls):
        raise ValueError(f"{path}: calls no PRMConfig. Give the script that makes the trainer's arguments")
    for call in calls:
        name, first = _called(call), call.args[0] if call.args else None
        if name == "PRMConfig":
            setup.settings |= _keywords(call, names, "PRMConfig", setup.lost)
        elif name == "LoraConfig":
            setup.lora = _keywords(call, names, "LoraConfig", setup.lost)
        elif name == "AutoModelForTokenClassification.from_pretrained" and first is not None:
            setup.model = _text(first, names) or setup.model
        elif name == "load_dataset" and first is not None:
            files = next((k.value for k in call.keywords if k.arg == "data_files"), first)
            setup.data = setup.data or _text(files, names)
        elif name == "PRMTrainer":
            for keyword in call.keywords:
                if keyword.arg == "model":
                    setup.model = setup.model or _text(keyword.value, names)
                elif keyword.arg in ("compute_metrics", "callbacks", "optimizers", "data_collator", "model_init"):
                    setup.lost.append(
                        f"{keyword.arg} of PRMTrainer (line {keyword.value.lineno}): code is not carried over"
                    )
    return setup


def _constants(tree: ast.Module) -> dict[str, Any]:
    """Returns the literals that are assigned to a name of the module, those assigned once alone."""
    values: dict[str, list[Any]] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name):
            values.setdefault(node.targets[0].id, []).append(_literal(node.value, {}))
    return {name: assigned[0] for name, assigned in values.items() if len(assigned) == 1 and assigned[0] is not None}


def _literal(node: ast.expr, names: Mapping[str, Any]) -> Any:
    """Returns the value of a literal or a known name; None for what only running the script would tell."""
    if isinstance(node, ast.Name):
        return names.get(node.id)
    try:
        return ast.literal_eval(node)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return None


def _text(node: ast.expr, names: Mapping[str, Any]) -> str:
    value = _literal(node, names)
    value = next(iter(value.values()), "") if isinstance(value, dict) else value
    return value if isinstance(value, str) else ""


def _called(call: ast.Call) -> str:
    """Returns the called name without its modules; of a method the class too."""
    parts = ast.unparse(call.func).split(".")
    return ".".join(parts[-2:] if parts[-1] == "from_pretrained" else parts[-1:])


def _keywords(call: ast.Call, names: Mapping[str, Any], of: str, lost: list[str]) -> dict[str, Any]:
    values = {}
    for keyword in call.keywords:
        value = _literal(keyword.value, names)
        if keyword.arg is None or (value is None and not isinstance(keyword.value, ast.Constant)):
            what = keyword.arg or "**"
            lost.append(f"{of}.{what} (line {keyword.value.lineno}): `{ast.unparse(keyword.value)[:60]}` is no literal")
        else:
            values[keyword.arg] = value
    return values


# ---- The experiment file.


def experiment_file(setup: Setup, examples: int | None = None) -> tuple[str, list[str]]:
    """Returns the text of an experiment file, and a sentence for everything that is not carried over.

    Args:
      examples: training examples, by which epochs become steps.

    Raises ValueError where `max_steps` is not set and `examples` is absent, and for a value of another type.
    """
    settings = {**DEFAULTS, **setup.settings}
    lost = [*setup.lost, *_lost(setup.settings)]
    number = {
        key: _number(settings, key)
        for key, value in DEFAULTS.items()
        if isinstance(value, float | int) and key != "bf16"
    }
    micro, accumulated = int(number["per_device_train_batch_size"]), int(number["gradient_accumulation_steps"])
    steps = _steps(number, micro * accumulated, examples)
    warmup = number["warmup_steps"] or number["warmup_ratio"] * steps
    warmup = round(warmup * steps) if 0 < number["warmup_steps"] < 1 else round(warmup)
    decay = _DECAYS.get(str(settings["lr_scheduler_type"]), "linear")
    if settings["max_length"] is None:
        lost.append(
            "max_length=None: rows have a length. tokens=2048 is written, and longer chains are cut and counted"
        )
    tokens = 2048 if settings["max_length"] is None else int(number.get("max_length", 1024))
    reports = settings["report_to"] if isinstance(settings["report_to"], list | tuple) else [settings["report_to"]]
    trackers = tuple(name for name in reports if name in ("tensorboard", "wandb", "mlflow"))
    name = str(settings["run_name"] or pathlib.PurePath(str(settings["output_dir"])).name or "prm")
    adapters = "" if setup.lora is None else f"\n        lora=LoraConfig({_lora(setup.lora, lost)}),"
    imports = "" if setup.lora is None else "\nfrom jprm.model.parameters import LoraConfig"
    more = {
        "dtype": "bfloat16" if settings["bf16"] else "float32",
        "remat": "full" if settings["gradient_checkpointing"] else "nothing",
    }
    saved = {"log_every": number["logging_steps"], "checkpoint_every": number["save_steps"]}
    saved |= {"keep": settings["save_total_limit"]} if settings["save_total_limit"] else {}
    saved |= {"valid_every": settings["eval_steps"]} if settings["eval_steps"] else {}
    options = "".join(f"\n        {key}={max(1, int(value))}," for key, value in saved.items())
    kept = "".join(f"\n- {line}" for line in lost) or "\n- nothing"
    text = f'''"""{name}, from TRL's PRM trainer.

    jprm train THIS_FILE --workdir {settings["output_dir"]}

A chain's ids are TRL's with one newline more, after the problem. A row holds several short chains, so an update of
{micro * accumulated} rows has more of them than TRL's batch. Not carried over:
{kept}
"""

from jprm.checkpoints import base
from jprm.experiment import DataConfig, Experiment, OptimizerConfig, TargetConfig{imports}

BASE = {setup.model or "FOLDER"!r}  # a folder or a GGUF file: jprm downloads nothing
DATA = {setup.data or "train.jsonl"!r}  # TRL's records as JSON Lines, or what `jprm prepare trl` made of them


def experiment() -> Experiment:
    return Experiment(
        name={name!r},
        base=BASE,
        tokenizer=BASE,
        model=base.model_config(BASE, head="binary", dtype={more["dtype"]!r}, remat={more["remat"]!r}),
        data=DataConfig(
            train=(DATA,),
            supervise="step",
            too_long="truncate",
            tokens={tokens},
            rows={micro * accumulated},
            micro_rows={micro},
            seed={int(number["seed"])},
        ),
        target=TargetConfig(labels="correctness", neutral="none", after_error="keep"),
        objective="cross_entropy",
        optimizer=OptimizerConfig(
            learning_rate={number["learning_rate"]!r},
            warmup_steps={warmup},
            decay={decay!r},
            b1={number["adam_beta1"]!r},
            b2={number["adam_beta2"]!r},
            eps={number["adam_epsilon"]!r},
            weight_decay={number["weight_decay"]!r},
            no_decay="norm|bias",
            clip_norm={number["max_grad_norm"]!r},
        ),{adapters}
        steps={steps},
        seed={int(number["seed"])},{options}
        trackers={trackers!r},
    )
'''
    return text, lost


def _number(settings: Mapping[str, Any], key: str) -> float | int:
    value = settings[key]
    if value is None and key in ("max_length", "warmup_steps"):
        return 0
    if isinstance(value, str):  # YAML reads 1e-5 as text
        try:
            value = float(value)
        except ValueError:
            pass
    if isinstance(value, bool) and isinstance(DEFAULTS[key], bool):
        return value
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise ValueError(f"{key}: is {value!r}, not a number")
    return value


def _steps(number: Mapping[str, float], batch: int, examples: int | None) -> int:
    if number["max_steps"] > 0:
        return int(number["max_steps"])
    if examples is None:
        raise ValueError(
            f"num_train_epochs={number['num_train_epochs']:g} is in passes over the data, and jprm counts steps: give"
            " --examples, the number of training examples"
        )
    return max(1, round(number["num_train_epochs"] * examples / batch))


def _lora(lora: Mapping[str, Any], lost: list[str]) -> str:
    """Returns the arguments of jprm's LoraConfig."""
    known = {"r", "lora_alpha", "target_modules", "use_rslora", "task_type", "bias", "inference_mode"}
    lost += [f"LoraConfig.{key}={lora[key]!r}" for key in sorted(lora.keys() - known) if lora[key]]
    modules = lora.get("target_modules")
    modules = [modules] if isinstance(modules, str) else modules
    parts = [f"rank={int(lora.get('r', 8))}", f"alpha={float(lora.get('lora_alpha', 8))}"]
    if modules and modules != ["all-linear"]:
        lost += [
            f"LoraConfig.target_modules: {name!r} is no matrix that jprm knows"
            for name in modules
            if name not in _ROLES
        ]
        roles = "|".join(_ROLES[name] for name in modules if name in _ROLES)
        parts.append(f'targets=r"/({roles})$"')
    elif not modules:
        lost.append("LoraConfig.target_modules: PEFT's default depends on the model; jprm adapts all seven matrices")
    return ", ".join([*parts, *(["rslora=True"] if lora.get("use_rslora") else [])])


def _lost(settings: Mapping[str, Any]) -> list[str]:
    """Returns a sentence for each setting that would change what is learnt and has no counterpart."""
    said = []
    for key, value in settings.items():
        if key == "step_separator" and value != "\n":
            said.append(f"step_separator={value!r}: jprm's own layout ends a step with a newline")
        elif key == "max_completion_length" and value is not None:
            said.append(f"max_completion_length={value}: a chain is cut where its row ends, and lost steps are counted")
        elif key == "train_on_last_step_only" and value:
            said.append("train_on_last_step_only: write `correct` for each chain, and set data.supervise='outcome'")
        elif key == "optim" and value not in _ADAMW:
            said.append(f"optim={value!r}: jprm has AdamW")
        elif key == "lr_scheduler_type" and value not in _DECAYS:
            said.append(
                f"lr_scheduler_type={value!r}: jprm has {', '.join(sorted(set(_DECAYS.values())))}; linear is written"
            )
        elif key == "fp16" and value:
            said.append("fp16: jprm computes in bfloat16 or float32")
        elif key == "disable_dropout" and value is False:
            said.append("disable_dropout=False: jprm has no dropout")
        elif key == "report_to":
            names = value if isinstance(value, list | tuple) else [value]
            if not {*map(str, names)} <= {"none", "all", "tensorboard", "wandb", "mlflow"}:
                said.append(f"report_to={value!r}: jprm has tensorboard, wandb and mlflow, and trackers of your own")
        elif key not in DEFAULTS and key not in _WITHOUT_EFFECT and key != "optim" and value not in (None, False):
            said.append(f"{key}={value!r}: has no counterpart")
    return said
