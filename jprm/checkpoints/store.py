"""Training checkpoints through Orbax: parameters, optimizer and state of the run, saved and restored together.

A run's folder holds `experiment.json`, the tokenizer, `metrics.jsonl` and `checkpoints/STEP/`. Orbax writes a step
under a temporary name and renames it, so a step that exists is whole; a bucket's is whole if it holds the marker that
is written last (`jprm.checkpoints.bucket`). The parts `params` and `optimizer` are arrays, which any mesh can restore.
`run` is JSON, written once by all processes: the position in the data, the experiment, versions and goodput.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Any

import jax
from flax.traverse_util import flatten_dict
from jax.sharding import Mesh, NamedSharding
from orbax.checkpoint import v1 as ocp

from jprm.checkpoints import bucket
from jprm.experiment import Experiment
from jprm.io.storage import Place, Remote, path_of
from jprm.model import lora, transformer
from jprm.model.parameters import join, new_parameters

FOLDER = "checkpoints"

Checkpoints = ocp.training.Checkpointer | bucket.Staged


def open_checkpoints(workdir: str | os.PathLike, keep: int | None = None, keep_every: int = 0) -> Checkpoints:
    """Opens the run's checkpoints; the caller decides when to save.

    The newest `keep` stay (None: all), and every multiple of `keep_every` steps for good (0: none).
    """
    policies = ocp.training.preservation_policies
    kept = [policies.LatestN(keep)] if keep else [policies.PreserveAll()]
    kept += [policies.EveryNSteps(keep_every)] if keep_every else []
    registry = ocp.handlers.local_registry()
    registry.add(ocp.handlers.JsonHandler, checkpointable_name="run")  # or its text would be taken for arrays
    context = ocp.Context()
    context.checkpointables.registry = registry
    # Orbax's policies name their arguments otherwise than its own protocols.
    given: dict[str, Any] = dict(
        save_decision_policy=ocp.training.save_decision_policies.FixedIntervalPolicy(1),
        context=context,
        preservation_policy=policies.AnyPreservationPolicy(kept),
        cleanup_tmp_directories=keep is not None,  # a reader must not disturb a run that is writing
    )
    folder = path_of(workdir).absolute() / FOLDER
    if isinstance(folder, Remote):
        return bucket.open_checkpoints(folder, given, keep, keep_every)
    return ocp.training.Checkpointer(str(folder), **given)


def saved(workdir: Place) -> bool:
    """Returns whether the run has a whole checkpoint."""
    folder = workdir / FOLDER
    if isinstance(folder, Remote):
        return bool(bucket.committed(folder))
    return any(step.name.isdigit() for step in folder.glob("*"))


def abstract(tree: Any) -> Any:
    """Returns shapes, types and shardings of a tree of arrays, for Orbax to restore into."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), tree)


def restore(checkpoints: Checkpoints, wanted: dict[str, Any]) -> dict[str, Any]:
    """Returns the newest checkpoint's parts that `wanted` names: arrays as its abstract arrays, JSON for None.

    Raises:
      ValueError: names the folder and the fix where there is no checkpoint, or one that is damaged or of another model.
    """
    with _newest(checkpoints) as step:
        return checkpoints.load_checkpointables(step, wanted)


@contextlib.contextmanager
def _newest(checkpoints: Checkpoints) -> Iterator[int]:
    """Yields the newest step, to read it; errors as in `restore`."""
    folder = checkpoints.directory
    if checkpoints.latest is None:
        raise ValueError(f"{folder}: holds no complete checkpoint; train first, or name the run's folder")
    step = checkpoints.latest.step
    try:
        yield step
    except Exception as error:  # Orbax and TensorStore raise many types for a damaged or a different tree
        cause: BaseException = error
        while cause.__cause__ or cause.__context__:  # the first error names file or array, later ones only handlers
            cause = cause.__cause__ or cause.__context__ or cause
        reason = str(cause).strip().splitlines()[0][:300] if str(cause).strip() else type(cause).__name__
        raise ValueError(
            f"{folder}/{step}: cannot be restored ({reason}). If its files are damaged, remove that folder to"
            " continue from an earlier step; if the experiment has changed, use another --workdir"
        ) from error


def load_params(folder: str | os.PathLike, experiment: Experiment, mesh: Mesh, new: str = "") -> tuple[dict, int]:
    """Returns the newest checkpoint's parameters on the mesh, LoRA matrices unmerged, and its step.

    Parameters that it lacks are left out where the pattern `new` matches them; else they are a ValueError.
    """

    def init(key: jax.Array) -> dict:
        adapters = lora.init(experiment.lora, experiment.model, experiment.optimizer.freeze, key)
        return join(flatten_dict(transformer.init(experiment.model, key), sep="/"), adapters)

    with open_checkpoints(folder) as checkpoints:
        wanted = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, x.sharding.spec)),
            flatten_dict(jax.eval_shape(init, jax.random.key(0)), sep="/"),
        )
        with _newest(checkpoints) as latest:
            metadata = checkpoints.checkpointables_metadata(latest).metadata["params"]
        there = wanted if metadata is None else flatten_dict(metadata, sep="/")  # None: damaged, as `restore` says
        left_out = new_parameters(folder, wanted.keys() - there.keys(), new)
        wanted = join({path: x for path, x in wanted.items() if path not in left_out})
        return restore(checkpoints, {"params": wanted})["params"], checkpoints.latest.step
