"""A window of steps that jax's profiler traces, for TensorBoard's profile plugin, XProf or Perfetto."""

from __future__ import annotations

import shutil
import tempfile
from typing import Any

import jax

from jprm import multihost
from jprm.io.storage import Place, Remote

FOLDER = "profile"


class Profile:
    """Traces the steps `window[0]` to `window[1]` into the folder `profile` of the run, in process 0; (0, 0): none.

    A context manager, which ends a trace that an error interrupts. A run that continues within the window traces the
    rest of it.
    """

    def __init__(self, workdir: Place, window: tuple[int, int]):
        self.folder, self.window, self._tracing = workdir / FOLDER, window, False
        self._written = str(self.folder)

    def __enter__(self) -> Profile:
        return self

    def __exit__(self, *_: object) -> None:
        self._stop()

    def before(self, step: int) -> None:
        """Begins the trace where the window begins."""
        if not self._tracing and self.window[0] <= step <= self.window[1] and multihost.is_first():
            if isinstance(self.folder, Remote):
                self._written = tempfile.mkdtemp()
            jax.profiler.start_trace(self._written)
            self._tracing = True

    def after(self, step: int, metrics: Any) -> None:
        """Ends the trace where the window ends, when the devices have computed the step's metrics."""
        if self._tracing and step >= self.window[1]:
            jax.block_until_ready(metrics)
            self._stop()

    def _stop(self) -> None:
        if self._tracing:
            self._tracing = False
            jax.profiler.stop_trace()
            if isinstance(self.folder, Remote):
                self.folder.upload_folder(self._written)
                shutil.rmtree(self._written)
