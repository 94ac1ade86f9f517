"""Checkpoints on the hosts' own disks or in their memory, through Orbax's emergency manager.

A run with `mesh.data` replicas holds as many copies of its state. Every replica but the first writes its copy to its
hosts, which takes no network; the first has what the run's folder has. When hosts are lost or replaced, the run goes on
from the newest step that one replica has whole: that replica reads it and sends it to the others.
"""

from __future__ import annotations

import json
import pathlib
from typing import Any

import jax
import numpy as np
from absl import flags
from etils import epath
from jax.sharding import Mesh
from orbax import checkpoint as ocp
from orbax.checkpoint._src.futures import synchronization
from orbax.checkpoint.experimental.emergency import checkpoint_manager as emergency

from jprm import multihost
from jprm.io.outputs import atomic_write

STEPS = "steps"


NO_MESH = Mesh(np.empty((), dtype=object), ())
"""Set while Orbax and processes exchange numbers, which the run's mesh would make arrays of all devices."""


class LocalCheckpoints:
    """The steps on this machine and on the others of the run. Every process makes the same calls.

    Args:
      folder: on a disk or in the memory (/dev/shm/...) of every host; `{process}` in it is the process's index.
      state: abstract arrays of what is saved.

    Raises:
      ValueError: the mesh has one replica, or a process has devices of several.
    """

    def __init__(self, folder: str, mesh: Mesh, state: Any):
        check(mesh)
        self.folder = pathlib.Path(folder.replace("{process}", str(jax.process_index())))
        for name in (STEPS, "persistent"):  # Orbax asks for a folder of persistent steps too, of which it writes none
            (self.folder / name).mkdir(parents=True, exist_ok=True)
        self._state = state
        flags.FLAGS.mark_as_parsed()  # Orbax reads one of absl's, which programs of absl parse
        ocp.multihost.initialize_runtime_to_distributed_ids()
        ocp.multihost.initialize_distributed_to_device_ids()
        options = emergency.CheckpointManagerOptions(
            local=emergency.LocalCheckpointOptions(should_save_fn=lambda step, latest: True, max_to_keep=1),
            persistent=emergency.PersistentCheckpointOptions(should_save_fn=lambda step, latest: False),
            replica_axis_index=mesh.axis_names.index("data"), cleanup_tmp_directories=True,
        )  # fmt: skip
        with jax.set_mesh(NO_MESH):
            steps, nothing = (epath.Path(self.folder / name) for name in (STEPS, "persistent"))
            self._inner = emergency.CheckpointManager(steps, nothing, mesh, state, options=options)

    @property
    def latest(self) -> int | None:
        """The newest step that a replica has whole and whose position in the data a host has."""
        step = self._inner.latest_step()
        with jax.set_mesh(NO_MESH):
            return step if step is not None and any(multihost.shared(self._run(step).exists())) else None

    def save(self, step: int, state: Any, run: dict[str, Any]) -> None:
        """Saves a step in the background; the one before is removed when it is whole."""
        self._inner.wait_until_finished()
        atomic_write(self._run(step), json.dumps(run))
        self._inner.save(step, args=ocp.args.Composite(state=ocp.args.PyTreeSave(state)))
        for old in sorted(int(file.stem[4:]) for file in self.folder.glob("run-*.json"))[:-2]:
            if old < step:  # of neither this step nor the one before
                self._run(old).unlink()

    def restore(self, step: int) -> tuple[Any, dict[str, Any]]:
        """Returns the state and the position of a step, which a replica that has it sends to the others."""
        args = ocp.checkpoint_utils.construct_restore_args(self._state)
        wanted = ocp.args.PyTreeRestore(item=self._state, restore_args=args)
        path = self._run(step)
        with jax.set_mesh(NO_MESH):
            restored = self._inner.restore(step, args=ocp.args.Composite(state=wanted))
            runs = multihost.shared(json.loads(path.read_text()) if path.exists() else None)
        return restored["state"], next(run for run in runs if run is not None)

    def settle(self) -> None:
        """Waits for the last save, and makes Orbax number its next one alike in all processes.

        The first replica saves nothing here and so counts fewer saves than the others; with other numbers they would
        wait for each other for ever in the next save to the run's folder.
        """
        self._inner.wait_until_finished()
        numbers = synchronization.OperationIdGenerator
        with jax.set_mesh(NO_MESH):
            most = max(multihost.shared(int(numbers.get_current_operation_id())))
        while int(numbers.get_current_operation_id()) < most:
            numbers.next_operation_id()

    def close(self) -> None:
        self._inner.wait_until_finished()
        self._inner.close()

    def _run(self, step: int) -> pathlib.Path:
        return self.folder / f"run-{step}.json"


def check(mesh: Mesh) -> None:
    """Raises ValueError where no replica of the mesh has processes of its own."""
    axis = mesh.axis_names.index("data")
    if mesh.devices.shape[axis] < 2:
        raise ValueError("local_checkpoints needs copies of the state on several hosts: set mesh.data to 2 or more")
    replicas: dict[int, set[int]] = {}
    for place, device in np.ndenumerate(mesh.devices):
        replicas.setdefault(device.process_index, set()).add(place[axis])
    if several := [process for process, holders in replicas.items() if len(holders) > 1]:
        reason = f"process {several[0]} has devices of several replicas (mesh.data)"
        raise ValueError(f"local_checkpoints: {reason}. Use a mesh in which every host belongs to one")
