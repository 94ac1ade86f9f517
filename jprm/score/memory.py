"""Refuses a row that no device holds before it is compiled: XLA's compiler may end the process at such a size."""

from __future__ import annotations

import os

from jax.sharding import Mesh

from jprm.model.config import ModelConfig


def check_memory(config: ModelConfig, tokens: int, rows: int, mesh: Mesh) -> None:
    """Raises MemoryError where a device cannot hold the temporaries of `rows` rows of so many tokens."""
    parts = mesh.size // (mesh.shape["data"] * mesh.shape["fsdp"])  # the devices that share a row
    needed, there = least_bytes(config, tokens, rows) // parts, memory_of(mesh)
    if there is not None and needed > there:
        raise MemoryError(f"{needed:,} bytes at least for temporaries, and a device has {there:,}")


def least_bytes(config: ModelConfig, tokens: int, rows: int) -> int:
    """Returns a lower bound of the bytes of temporaries of `rows` rows: their states, and attention written out.

    Only the `reference` implementation holds the logits of all pairs of tokens, in float32.
    """
    pairs = config.heads * tokens * tokens * 4 if config.attention == "reference" else 0
    return rows * (2 * tokens * config.width * 4 + pairs)


def memory_of(mesh: Mesh) -> int | None:
    """Returns the bytes of memory of a device of the mesh, the host's for a CPU; None where it is not known."""
    device = mesh.devices.flat[0]
    if device.platform == "cpu":
        try:
            return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        except (AttributeError, OSError, ValueError):
            return None
    return (device.memory_stats() or {}).get("bytes_limit")
