"""What a path is, by the files in it: decided here for loading, training, sampling and export alike."""

from __future__ import annotations

import os
from typing import Literal

from jprm.io.storage import path_of

RUN, PEFT, PUBLISHED = "experiment.json", "adapter_config.json", "config.json"

Kind = Literal["run", "peft", "huggingface", "gguf"]
FileDtype = Literal["float32", "bfloat16", "float16"]
"""What numbers are written as."""


def kind_of(path: str | os.PathLike) -> Kind:
    """Returns `run`, a folder that `jprm train` wrote; `peft`, a LoRA; `huggingface`, a published model; or `gguf`.

    Raises:
      FileNotFoundError: nothing is there, or a folder without any of the files that tell.
      ValueError: another kind of file.
    """
    path = path_of(path)
    if path.is_dir():
        files: dict[str, Kind] = {RUN: "run", PEFT: "peft", PUBLISHED: "huggingface"}
        for name, kind in files.items():
            if (path / name).is_file():
                return kind
        raise FileNotFoundError(
            f"{path}: holds no model: neither {RUN} (a run of `jprm train`), {PUBLISHED} (a Hugging Face model) nor"
            f" {PEFT} (a LoRA of PEFT) is there"
        )
    if not path.exists():
        raise FileNotFoundError(f"{path}: no such file or folder. Give a model's folder or a GGUF file")
    if path.suffix != ".gguf":
        raise ValueError(f"{path}: not a .gguf file. Give the folder that holds {PUBLISHED}")
    return "gguf"
