"""Keeps libtpu, which the extra `tpu` installs, quiet on machines without a TPU."""

from __future__ import annotations

import os
import pathlib

VARIABLES = {
    "TPU_SKIP_MDS_QUERY": "1", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1", "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_WORKER_ID": "0", "TPU_ACCELERATOR_TYPE": "v5litepod-16",
}  # fmt: skip
"""What libtpu would ask the machine for, and warn where there is no answer. Several processes may load it."""

_GOOGLE, _NETWORK = "0x1ae0", "0x0042"  # PCI vendor, and its network card in virtual machines of any kind


def describe_no_tpu() -> None:
    """Sets `VARIABLES` that are not set."""
    for name, value in VARIABLES.items():
        os.environ.setdefault(name, value)


def quiet_without_tpu(devices: str = "/sys/bus/pci/devices") -> None:
    """Sets `VARIABLES` where no TPU is attached, before jax tries libtpu and goes on with another backend.

    Does nothing where there is a TPU, or where JAX_PLATFORMS or JAX_FORCE_TPU_INIT request one: errors there are real.
    """
    if "JAX_PLATFORMS" in os.environ or "JAX_FORCE_TPU_INIT" in os.environ:
        return
    for folder in pathlib.Path(devices).glob("*"):
        vendor, device = ((folder / name).read_text().strip() for name in ("vendor", "device"))
        if vendor == _GOOGLE and device != _NETWORK:
            return
    describe_no_tpu()
