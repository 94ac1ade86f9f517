"""Runs over several hosts: how the processes join, and what only process 0 does.

Every process runs the same command, and `jax.distributed` joins their devices. Process 0 makes decisions from a file or
a clock for all (`first`): processes that go different ways wait for each other for ever.

Within `among` a part of the processes is a group: it computes, decides and waits without the others, and its first
process is what process 0 is to all. Groups write to each other (`post`, `received`) through the coordination service,
which waits as long as it takes. Collectives do not: on CPUs they end after 30 seconds if one process is late.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import json
import os
import re
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jprm.rows import padded_size

Item = TypeVar("Item")
T = TypeVar("T")

TOGETHER = 300
"""Seconds within which a run's processes must find each other."""

waiting = threading.Event()
"""Set while this process waits for other processes: the watchdog reports those that do not wait."""

DAYS = 20 * 24 * 3600 * 1000
"""Milliseconds to wait for others on the coordination service, which takes no endless wait."""

FORM = re.compile(r"(\d+)/(\d+)@(.+:\d+)")


def start(where: str, *, together: int = TOGETHER) -> None:
    """Joins a run's processes, before any other use of jax; waits for all of them. Process 0 prints their number.

    Args:
      where: `INDEX/COUNT@HOST:PORT` (from 0), where HOST:PORT is a free port on process 0's host, the same for all; or
        `auto`: read from the cluster's environment (Cloud TPU, GKE, Slurm, Open MPI).
      together: seconds to wait for the others, by default 300. Then the process prints what to check and ends with
        status 142, as if by an alarm: a launcher may try again.

    Raises ValueError for another form, an environment without this information, a second call, or if no run is formed.
    """
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


# ---- The group of processes that compute together.

_group: tuple[int, ...] | None = None
_met: collections.Counter[tuple[int, ...]] = collections.Counter()  # by group, how often this process has met it
_messages: collections.Counter[str] = collections.Counter()  # by name, posted or received by this process


@contextlib.contextmanager
def among(processes: Sequence[int]) -> Iterator[None]:
    """Makes these process indices, which must include this one's, the group for all calls in the block."""
    global _group
    before, _group = _group, tuple(processes)
    try:
        yield
    finally:
        _group = before


def members() -> tuple[int, ...]:
    """Returns the group's process indices, in its order: by default all of the run, from 0."""
    return tuple(range(jax.process_count())) if _group is None else _group


def count() -> int:
    """Returns how many processes the group has."""
    return len(members())


def devices() -> list[Any]:
    """Returns the jax devices of all processes in the group (`members`)."""
    return [device for device in jax.devices() if device.process_index in members()]


def is_first() -> bool:
    """Returns whether this is the group's first process, by default process 0. It writes files and lines."""
    return jax.process_index() == members()[0]


def meet() -> None:
    """Returns when all the group's processes have called it, however late the last one is."""
    if count() == 1:
        return
    group = members()
    _met[group] += 1
    waiting.set()
    _service().wait_at_barrier(f"jprm {group} {_met[group]}", DAYS, list(group))
    waiting.clear()


def post(name: str, value: Any) -> None:
    """Writes a JSON value to another group, which reads it with `received` under the same `name`, without waiting.

    Every process of the group must call it; its first process writes.
    """
    _messages[name] += 1
    if is_first():
        _service().key_value_set_bytes(f"jprm/{name}/{_messages[name]}", json.dumps(value).encode())


def received(name: str) -> Any:
    """Waits for another group's next post by this name, deletes and returns it in all processes. All must call it."""
    _messages[name] += 1
    message = None
    if is_first():
        client, key = _service(), f"jprm/{name}/{_messages[name]}"
        waiting.set()
        message = json.loads(client.blocking_key_value_get_bytes(key, DAYS))
        waiting.clear()
        client.key_value_delete(key)
    meet()
    return first(lambda: message)


def first(do: Callable[..., T], *arguments: Any) -> T:
    """Calls `do(*arguments)` in the group's first process; returns its result in each, through JSON if there are more.

    Every process must call it, and waits. If `do` raises, the first process raises the error, the others ValueError.
    """
    if count() == 1:
        return do(*arguments)
    message, raised = b"", None
    if is_first():
        try:
            message = json.dumps({"value": do(*arguments)}).encode()
        except Exception as error:  # any error: the other processes must not wait for a value
            raised = error
            message = json.dumps({"error": f"{type(error).__name__}: {error}"}).encode()
    waiting.set()
    length = int(_together(np.int32(len(message)), "sum"))  # the others add zeros
    answer = json.loads(_together(np.frombuffer(message.ljust(length, b"\0"), np.uint8), "sum").tobytes())
    waiting.clear()
    if raised is not None:
        raise raised
    if "error" in answer:
        raise ValueError(f"process {members()[0]} refused: {answer['error']}")
    return answer["value"]


def shared(value: Any) -> list[Any]:
    """Returns every process's JSON value, in process order. Every process must call it, and waits."""
    if count() == 1:
        return [value]
    return [json.loads(x.tobytes()) for x in arrays(np.frombuffer(json.dumps(value).encode(), np.uint8))]


def arrays(own_X: np.ndarray) -> list[np.ndarray]:
    """Returns every process's array, in process order; only first sizes may differ. Each must call it, and waits."""
    if count() == 1:
        return [own_X]
    waiting.set()
    counts = _together(np.int32(len(own_X)), "stack")
    padded_X = np.zeros((padded_size(int(counts.max())), *own_X.shape[1:]), own_X.dtype)  # few sizes: each is a program
    padded_X[: len(own_X)] = own_X
    of_all = _together(padded_X, "stack")
    waiting.clear()
    return [x[:size] for x, size in zip(of_all, counts, strict=True)]


def spread(
    do: Callable[[Sequence[Item]], Sequence[Any]], items: Sequence[Item], costs: Sequence[float] = ()
) -> list[Any]:
    """Returns `do(items)`, a JSON value per item in order, in every process. Each calls `do` on a part, then waits.

    The parts have about equal sums of `costs` ((): all equal). `items` and `costs` must be the same in every process.

    If `do` raises in one process, that process raises the same error and the others raise ValueError.
    """
    if count() == 1:
        return list(do(items))
    indices = parts(costs or [1.0] * len(items), count())
    outcome, raised = {}, None
    try:
        outcome = {"values": list(do(assigned)) if (assigned := own_part(items, costs)) else []}
    except Exception as error:  # any error: the other processes must not wait for values
        outcome, raised = {"error": f"{type(error).__name__}: {error}"}, error
    posts = shared(outcome)
    if raised is not None:
        raise raised
    if failed := [i for i, answer in enumerate(posts) if "error" in answer]:
        raise ValueError(f"process {members()[failed[0]]} failed: {posts[failed[0]]['error']}")
    value = {i: x for part, post in zip(indices, posts, strict=True) for i, x in zip(part, post["values"], strict=True)}
    return [value[i] for i in range(len(items))]


def own_part(items: Sequence[Item], costs: Sequence[float]) -> list[Item]:
    """Returns this process's share of the items, of about equal total `costs` ((): 1 each), for `spread`."""
    index = members().index(jax.process_index())
    return [items[i] for i in parts(costs or [1.0] * len(items), count())[index]]


def parts(costs: Sequence[float], count: int) -> list[list[int]]:
    """Returns item indices, ascending, in `count` parts: the dearest item first, each to the cheapest part so far.

    Graham's rule (1969): the dearest part is at most 4/3 the best possible. Equal costs give every count-th item.
    """
    members, load = [[] for _ in range(count)], [0.0] * count
    for i in sorted(range(len(costs)), key=lambda i: -costs[i]):
        least = load.index(min(load))
        members[least].append(i)
        load[least] += costs[i]
    return [sorted(part) for part in members]


def everywhere(condition: bool) -> bool:
    """Returns whether the condition holds in every process of the group. Each must call it, and waits."""
    return condition if count() == 1 else bool(np.all(_together(np.bool_(condition), "stack")))


def compile_together(function: Callable, *args: Any) -> None:
    """Compiles a jitted function for these arguments in every process before any process calls it; each must call this.

    Hosts compile at different speeds, and a collective on CPUs waits 30 seconds. A single process compiles nothing.
    """
    if count() > 1:
        function.lower(*args).compile()  # the call finds it compiled
        everywhere(True)


def _service() -> Any:
    """Returns the run's coordination service client, for which jax has no public name."""
    from jax._src import distributed

    assert distributed.global_state.client is not None  # of one process nothing waits
    return distributed.global_state.client


def _together(value: np.ndarray | np.generic, how: str) -> np.ndarray:
    """Returns the group's arrays, equal in shape, as one: their "stack", or their "sum"."""
    grid = Mesh(np.array([jax.local_devices(i) for i in members()]), ("process", "device"))
    copies = [jax.device_put(np.asarray(value)[None], device) for device in jax.local_devices()]
    place = NamedSharding(grid, PartitionSpec("process"))
    of_each = jax.make_array_from_single_device_arrays((count(), *value.shape), place, copies)
    with jax.set_mesh(grid):
        return np.asarray(_combined(grid, how)(of_each).addressable_data(0))


@functools.cache
def _combined(grid: Mesh, how: str) -> Callable[[jax.Array], jax.Array]:
    combine = {"stack": lambda x: x, "sum": lambda x: jnp.sum(x, axis=0, dtype=x.dtype)}[how]
    return jax.jit(combine, out_shardings=NamedSharding(grid, PartitionSpec()))


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
