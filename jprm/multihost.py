"""One process or many: how a run starts over several hosts, and what only its first process does.

Every process runs the same command; `jax.distributed` makes one set of devices of all of theirs. Whatever a process
decides from a file or a clock, the first decides for all (`first`): where processes go different ways, they wait for
each other for ever.
"""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import threading
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import numpy as np
from jax.experimental import multihost_utils

T = TypeVar("T")

TOGETHER = 300
"""Seconds within which the processes of a run must have found each other."""

FORM = re.compile(r"(\d+)/(\d+)@(.+:\d+)")


def start(where: str | None, *, together: int = TOGETHER) -> None:
    """Joins the processes of a run, before anything else is asked of jax; with None this process is the only one.

    Args:
      where: `INDEX/COUNT@HOST:PORT`, of which HOST:PORT is a free port of the host of process 0, the same for all; or
        `auto`: what the cluster's environment says (Cloud TPU, GKE, Slurm, Open MPI).
      together: seconds to wait for the others. Then the process ends, with a line that says what to check and status
        142, as of one that an alarm ended: a launcher may try again.

    Raises:
      ValueError: another form, an environment that says nothing, or processes that do not make one run.
    """
    if where is None:
        return
    form = FORM.fullmatch(where)
    if form is None and where != "auto":
        raise ValueError(f"--distributed {where!r}: is neither auto nor INDEX/COUNT@HOST:PORT, as 0/4@10.0.0.2:8476 is")
    index, count, address = (int(form[1]), int(form[2]), form[3]) if form else (None, None, None)
    if index is not None and count is not None and index >= count:
        raise ValueError(f"--distributed {where}: the indices of {count} processes are 0 to {count - 1}")
    alarm = threading.Timer(together, _alone, [where, together])
    alarm.daemon = True
    alarm.start()
    try:
        # A wait that runs out inside jax aborts the process with a stack trace: ours runs out first.
        jax.distributed.initialize(
            address, count, index, cluster_detection_method="deactivate" if form else None,
            initialization_timeout=together + 60, shutdown_timeout_seconds=60,
        )  # fmt: skip
    except (ValueError, RuntimeError, OSError, KeyError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise ValueError(f"--distributed {where}: {reason.rstrip('.')}. {_remedy(where)}") from error
    finally:
        alarm.cancel()
    if count is not None and jax.process_count() != count:
        raise ValueError(
            f"--distributed {where}: {jax.process_count()} processes share the {jax.default_backend()} devices, not"
            f" {count}; this jaxlib does not join the devices of several processes on this platform"
        )
    if is_first():
        kind = jax.devices()[0].device_kind
        print(f"{jax.process_count()} processes, {jax.device_count()} devices ({kind})", flush=True)


def is_first() -> bool:
    """Whether this process writes the run's files and lines: true of the only one."""
    return jax.process_index() == 0


def first(do: Callable[[], T]) -> T:
    """What `do` returns in the first process, JSON, in every process; where it raises there, every process raises."""
    if jax.process_count() == 1:
        return do()
    told, raised = b"", None
    if is_first():
        try:
            told = json.dumps({"value": do()}).encode()
        except Exception as error:  # whatever it is, the others must not wait for what will not come
            raised = error
            told = json.dumps({"error": f"{type(error).__name__}: {error}"}).encode()
    length = int(multihost_utils.broadcast_one_to_all(np.int32(len(told))))
    buffer = np.frombuffer(told.ljust(length, b"\0"), np.uint8)
    said = json.loads(multihost_utils.broadcast_one_to_all(buffer).tobytes())
    if raised is not None:
        raise raised
    if "error" in said:
        raise ValueError(f"process 0 refused: {said['error']}")
    return said["value"]


def shared(value: Any) -> list[Any]:
    """What every process says, JSON, in the order of the processes, in every process."""
    if jax.process_count() == 1:
        return [value]
    said = json.dumps(value).encode()
    length = int(np.max(multihost_utils.process_allgather(np.int32(len(said)))))
    told = multihost_utils.process_allgather(np.frombuffer(said.ljust(length), np.uint8))
    return [json.loads(row.tobytes()) for row in told]


def everywhere(condition: bool) -> bool:
    """Whether it holds in every process, said in every process."""
    return bool(np.all(multihost_utils.process_allgather(np.bool_(condition))))


def compile_together(function: Callable, *args: Any) -> None:
    """Compiles a jitted function for these arguments, in every process before any goes on to call it.

    Hosts compile at different speeds, and a collective does not wait for ever: on CPUs for 30 seconds.
    """
    if jax.process_count() > 1:
        function.lower(*args).compile()  # the call finds it compiled
        everywhere(True)


def _alone(where: str, seconds: int) -> None:
    print(f"error: --distributed {where}: not all processes came within {seconds} s. {_remedy(where)}", file=sys.stderr)
    sys.stderr.flush()
    os._exit(128 + signal.SIGALRM)


def _remedy(where: str) -> str:
    if where == "auto":
        return (
            "Check that every host was started, or name the processes with INDEX/COUNT@HOST:PORT: the environment is"
            " read of Cloud TPU, GKE, Slurm and Open MPI"
        )
    count, address = where.partition("/")[2].split("@")
    return (
        f"Check that {count} processes were started, each with an INDEX of its own; that process 0 runs on the host of"
        f" {address}, where the port must be free; and that the others can reach it"
    )
