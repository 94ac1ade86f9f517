"""`load`: the model in a folder, ready to score."""

from __future__ import annotations

import dataclasses
import os
import pathlib

import jax

from jprm.adapters.load import load as load_published
from jprm.checkpoints import store
from jprm.checkpoints.kinds import RUN, kind_of
from jprm.experiment import read
from jprm.layout import NativeLayout
from jprm.model.attention.registry import suited
from jprm.model.heads import find
from jprm.model.int8 import Dtype, held_decoder
from jprm.model.lora import merge
from jprm.model.mesh import MeshConfig, make_mesh
from jprm.score.scorer import PRM
from jprm.tokenizer import load_tokenizer


def load(
    folder: str | os.PathLike | PRM,
    mesh: MeshConfig | None = None,
    dtype: Dtype | None = None,
    adapter: str | None = None,
    attention: str | None = None,
) -> PRM:
    """The model in a folder, ready to score: the newest checkpoint of a run, or a published PRM.

    A published one is recognised from its files, or read as `adapter` says: a name in `jprm.adapters.published`, or a
    JSON file as in `jprm.adapters.record`.

    `dtype` is what its parameters are held in: None, as they were trained, and float32 of a published one. bfloat16
    (and float32) is then the type of the computation too; int8 takes a quarter of the memory, with an error that
    `tests/test_int8.py` measures.

    `attention` is the way of `jprm.model.attention`: None, as the model was trained, `blocked` of a published one, and
    of one that was trained with a kernel of other machines `paths` on a CPU and `blocked` elsewhere.

    Raises FileNotFoundError or ValueError, naming what is missing or damaged, and for the run of a policy.
    """
    if isinstance(folder, PRM):  # loaded already
        return folder
    folder = pathlib.Path(folder)
    if (kind := kind_of(folder)) == "gguf":
        raise ValueError(f"{folder}: a GGUF file is a base or a policy, not a PRM. Give a run's or a PRM's folder")
    if adapter or kind != "run":
        return load_published(folder, adapter, mesh, dtype, attention)
    experiment = read(folder / RUN)
    if find(experiment.model.head).readout is None:
        raise ValueError(
            f"{folder}: its head is {experiment.model.head!r}: it writes steps (--policy takes it) and scores none."
            " Name the run of a reward model"
        )
    grid = make_mesh(mesh or MeshConfig(), jax.local_devices())  # of several processes each scores by itself
    with jax.set_mesh(grid):
        params, step = store.load_params(folder, experiment, grid)
        params, model = merge(params, experiment.lora), experiment.model
        if dtype is not None:
            params = params | {"decoder": held_decoder(params["decoder"], dtype)}
    computed = model.dtype if dtype in (None, "int8") else dtype
    model = dataclasses.replace(model, dtype=computed, attention=attention or suited(model.attention))
    semantics = "value" if experiment.data.supervise == "outcome" else experiment.target.labels
    return PRM(
        params, model, NativeLayout(load_tokenizer(folder, of_model=True)), grid, semantics, str(folder.resolve()), step
    )
