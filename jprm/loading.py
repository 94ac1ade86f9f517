"""`load`: opens a run or a published PRM for scoring."""

from __future__ import annotations

import dataclasses
import os
from typing import Any

import jax

from jprm.checkpoints import base, store
from jprm.devices import enable_compile_cache, quiet_without_tpu
from jprm.experiment import RUN, Experiment, kind_of, read_record
from jprm.io.storage import Found, Place
from jprm.model.attention import check_softmax, suited
from jprm.model.config import ModelConfig
from jprm.model.heads import find
from jprm.model.mesh import MeshConfig, make_mesh
from jprm.model.parameters import Dtype, held_decoder, merge
from jprm.options import find_part, place_of
from jprm.score.scale import LOG_ODDS
from jprm.score.scorer import LONGEST, PRM
from jprm.tokenizer import load_tokenizer, native_layout

VERIFIER = "verifier.json"
"""File in the folder of a fused verifier (`jprm fuse fit`)."""


def load(
    folder: str | os.PathLike | PRM, mesh: MeshConfig | None = None, dtype: Dtype | None = None,
    adapter: str | None = None, attention: str | None = None, reference: str | None = None,
) -> PRM:  # fmt: skip
    """Loads a model for scoring: the newest checkpoint of a run, a published PRM, or a fused verifier.

    >>> prm = jprm.load(folder)
    >>> prm.score("What is 2 + 2?", ["2 + 2 = 4.", "So the answer is 4."]).shape
    (2,)

    Args:
      folder: of a run or a published PRM, local, in a bucket or `hf://OWNER/NAME` (cached). A loaded PRM is returned
        unchanged.
      mesh: device mesh. Default: parameters are sharded over all devices, and each device takes its own rows.
      dtype: storage type of the parameters. Default: as trained; for a published model float32, or bfloat16 on a GPU.
        bfloat16 and float32 also set the computation type. int8 takes a quarter of float32's memory, nf4 a little more
        than an eighth (docs/models.md has the loss in quality). `gguf` is for training only.
      adapter: how to read a published model (`jprm.methods.formats.adapters`): a record's name, a JSON file,
        `module:NAME` or `FILE.py:NAME`. Default: recognised from the files.
      attention: implementation (`jprm.model.attention`). Default: as trained if it runs here; `blocked` for a published
        model; `gpu_kernel` on a GPU.
      reference: scores become log ratios of two language models, `folder` over this one. They must share a tokenizer.

    For a fused verifier (`jprm.methods.evidence`) the result is a `jprm.methods.jobs.score.Scorer`, not a `PRM`.

    Raises:
      FileNotFoundError, ValueError: a file is missing or damaged, or the folder holds a policy.
      OSError: a model at `hf://OWNER/NAME` or in a bucket cannot be downloaded.
    """
    if isinstance(folder, PRM) or not isinstance(folder, str | os.PathLike):  # loaded already
        return folder
    enable_compile_cache()
    quiet_without_tpu()
    folder = place_of(folder)
    if (folder / VERIFIER).is_file():
        if mesh or dtype or adapter or attention or reference:
            raise ValueError(f"{folder}: is a fused verifier, which takes no model options, e.g. dtype")
        return find_part("jprm.methods.evidence.verifier:load_verifier", {}, "verifier")(folder)
    if (kind := kind_of(folder)) == "gguf" and not reference:
        raise ValueError(f"{folder}: a GGUF file is a base or a policy. Give a PRM's folder, or --reference beside it")
    if adapter or reference or kind != "run":
        published = find_part("jprm.methods.formats.adapters.load:load", {}, "the loader of published models")
        return published(folder, adapter, mesh, dtype, attention, reference)
    experiment, beta = read_record(folder / RUN)
    if find(experiment.model.head).readout is None and beta is None:
        raise ValueError(
            f"{folder}: its head is {experiment.model.head!r}: it is a policy (use --policy) and cannot score."
            " Name the run of a reward model"
        )
    grid = make_mesh(mesh or MeshConfig(), jax.local_devices())  # every process scores by itself
    with jax.set_mesh(grid):
        params, step = store.load_params(folder, experiment, grid, stored=dtype is None)
        params, model = merge(params, experiment.lora), experiment.model
        if dtype is not None:
            params = params | {"decoder": held_decoder(params["decoder"], dtype)}
    computed = dtype if dtype in ("float32", "bfloat16") else model.dtype
    if attention and attention != model.attention:
        check_softmax(model.attention, f"--attention {attention}")
        check_softmax(attention, "the trained model")
    model = dataclasses.replace(model, dtype=computed, attention=attention or suited(model.attention))
    layout = native_layout(load_tokenizer(folder, model.vocab_size, of_model=True))
    fields = {} if beta is None else _log_ratio(folder, experiment, beta, model, grid, dtype)
    fields["context"] = max(experiment.data.tokens, LONGEST)  # in tokens; longer texts would take minutes and gigabytes
    meaning = experiment.semantics if beta is None else "implicit"
    return PRM(params, model, layout, grid, meaning, str(folder.resolve()), step, **fields)


def _log_ratio(
    folder: Place, experiment: Experiment, beta: float, model: ModelConfig, grid: jax.sharding.Mesh, dtype: Dtype | None
) -> dict[str, Any]:
    """Returns the PRM fields of a log-ratio model: the reference it was trained against, and the scale."""
    if not experiment.reference:
        raise ValueError(
            f"{folder / RUN}: its scores are log ratios to a reference model, but `reference` is empty. Set it to the"
            " model that computed the log-probabilities in the data"
        )
    reference = Found(folder / RUN, "reference", experiment.reference)
    LogRatio = find_part("jprm.methods.implicit:LogRatio", {}, "ratio")

    with jax.set_mesh(grid):
        params = base.load_language_model(reference, model, dtype or experiment.reference_dtype)
    return {"ratio": LogRatio(params, model, beta), "scale": LOG_ODDS}
