"""`load`: a run or a published PRM, ready to score."""

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
"""In the folder of a fused verifier, which `jprm fuse fit` writes."""


def load(
    folder: str | os.PathLike | PRM,
    mesh: MeshConfig | None = None,
    dtype: Dtype | None = None,
    adapter: str | None = None,
    attention: str | None = None,
    reference: str | None = None,
) -> PRM:
    """Loads the model in a folder, ready to score: a run's newest checkpoint, a published PRM, or a fused verifier.

    >>> prm = jprm.load(folder)
    >>> prm.score("What is 2 + 2?", ["2 + 2 = 4.", "So the answer is 4."]).shape
    (2,)

    Args:
      folder: of a run or a published PRM, on this machine or in a bucket; a PRM that is loaded is returned as it is.
      mesh: how the devices are used; by default each has a part of the parameters and takes rows of its own.
      dtype: stores the parameters in this type: by default as they were trained, and a published model's in float32, or
        bfloat16 on a GPU. bfloat16 and float32 are then the type of the computation too. int8 takes a quarter of
        float32's memory, nf4 a little more than an eighth: docs/models.md says what they cost. `gguf` is how a run
        may have been trained, and no type to ask for here.
      adapter: how to read a published model (`jprm.methods.formats.adapters`): the name of a record, a JSON file,
        `module:NAME` or `FILE.py:NAME`; by default it is recognised from the files.
      attention: the implementation (`jprm.model.attention`): by default as the model was trained, where that runs
        here, and `blocked` for a published model; a GPU takes `gpu_kernel` for both.
      reference: scores by the log ratio of two language models, `folder` and this one, which must share a tokenizer.

    A fused verifier (`jprm.methods.evidence`) is no `PRM`: it is the `jprm.methods.jobs.score.Scorer` of its folder.

    Raises:
      FileNotFoundError, ValueError: names what is missing or damaged, or is a policy's and scores nothing.
    """
    if isinstance(folder, PRM) or not isinstance(folder, str | os.PathLike):  # loaded already
        return folder
    enable_compile_cache()
    quiet_without_tpu()
    folder = place_of(folder)
    if (folder / VERIFIER).is_file():
        if mesh or dtype or adapter or attention or reference:
            raise ValueError(f"{folder}: is a fused verifier, which takes no options of a model, such as dtype")
        return find_part("jprm.methods.evidence.verifier:load_verifier", {}, "verifier")(folder)
    if (kind := kind_of(folder)) == "gguf" and not reference:
        raise ValueError(f"{folder}: a GGUF file is a base or a policy. Give a PRM's folder, or --reference beside it")
    if adapter or reference or kind != "run":
        published = find_part("jprm.methods.formats.adapters.load:load", {}, "the loader of published models")
        return published(folder, adapter, mesh, dtype, attention, reference)
    experiment, beta = read_record(folder / RUN)
    if find(experiment.model.head).readout is None and beta is None:
        raise ValueError(
            f"{folder}: its head is {experiment.model.head!r}: it writes steps (--policy takes it) and scores none."
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
    fields["context"] = max(experiment.data.tokens, LONGEST)  # tokens: beyond it a text costs minutes and gigabytes
    meaning = experiment.semantics if beta is None else "implicit"
    return PRM(params, model, layout, grid, meaning, str(folder.resolve()), step, **fields)


def _log_ratio(
    folder: Place, experiment: Experiment, beta: float, model: ModelConfig, grid: jax.sharding.Mesh, dtype: Dtype | None
) -> dict[str, Any]:
    """Returns what a PRM scores with whose scores are log ratios: the reference it was trained against, and the scale.

    Raises ValueError where the run names no reference.
    """
    if not experiment.reference:
        raise ValueError(
            f"{folder / RUN}: its scores are log ratios to a reference model, and it names none. Write the model whose"
            " log-probabilities the data had into its field `reference`"
        )
    reference = Found(folder / RUN, "reference", experiment.reference)
    LogRatio = find_part("jprm.methods.implicit:LogRatio", {}, "ratio")

    with jax.set_mesh(grid):
        params = base.load_language_model(reference, model, dtype or experiment.reference_dtype)
    return {"ratio": LogRatio(params, model, beta), "scale": LOG_ODDS}
