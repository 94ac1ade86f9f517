"""Devices and their compilers: a program cache, XLA options, and libtpu quiet where there is no TPU.

This file must not import jax: a command sets all this before jax looks for devices.
"""

from __future__ import annotations

import os
import pathlib
import platform
import sys

SWITCH, FOLDER = "JPRM_COMPILE_CACHE", "JAX_COMPILATION_CACHE_DIR"
LEAST, LEAST_SECONDS = "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.1"
"""What a program must take to be kept. jax's own second leaves out small models' many programs."""


def enable_compile_cache() -> None:
    """Lets a later process find the programs compiled by this one, in ~/.cache/jprm/xla/HOST.

    JAX_COMPILATION_CACHE_DIR, or jax's setting by the same name, takes precedence; JPRM_COMPILE_CACHE=0 switches
    the cache off. A folder that cannot be written is no error: programs are then compiled again.
    """
    jax = sys.modules.get("jax")
    if os.environ.get(SWITCH) == "0":
        return
    if LEAST not in os.environ:
        os.environ[LEAST] = LEAST_SECONDS
        if jax:
            jax.config.update(LEAST.lower(), float(LEAST_SECONDS))
    if FOLDER in os.environ or (jax and jax.config.jax_compilation_cache_dir):
        return
    caches = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    folder = pathlib.Path(caches) / "jprm" / "xla" / platform.node()  # programs for a CPU fit the host's processor
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        return
    os.environ[FOLDER] = str(folder)  # for jax, if it is imported later, and for processes that this one starts
    if jax:
        jax.config.update("jax_compilation_cache_dir", str(folder))


VARIABLES = {
    "TPU_SKIP_MDS_QUERY": "1", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1", "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_WORKER_ID": "0", "TPU_ACCELERATOR_TYPE": "v5litepod-16",
}  # fmt: skip
"""What libtpu would ask the machine for, and warn where there is no answer. Several processes may load it."""

_GOOGLE, _NETWORK = "0x1ae0", "0x0042"  # PCI vendor, and its network card in virtual machines of any kind


def describe_no_tpu() -> None:
    """Sets the unset `VARIABLES`: libtpu then compiles on a machine without a TPU."""
    for name, value in VARIABLES.items():
        os.environ.setdefault(name, value)


def quiet_without_tpu(devices: str = "/sys/bus/pci/devices") -> None:
    """Sets `VARIABLES` where no TPU is attached, before jax tries libtpu and goes on with another backend.

    Skipped if there is a TPU, or JAX_PLATFORMS or JAX_FORCE_TPU_INIT request one: errors there are real.
    """
    if "JAX_PLATFORMS" in os.environ or "JAX_FORCE_TPU_INIT" in os.environ:
        return
    for folder in pathlib.Path(devices).glob("*"):
        vendor, device = ((folder / name).read_text().strip() for name in ("vendor", "device"))
        if vendor == _GOOGLE and device != _NETWORK:
            return
    describe_no_tpu()


OPTIONS: dict[str, dict[str, bool | str]] = {
    # Eigen's float32 products instead of YNNPACK's: 20 to 60 % faster at the sizes of a row of 8,192 tokens, and a
    # training step of three layers of SmolLM2-135M in 7.1 s in place of 9.1 on 2 cores. Scoring goes without: it is
    # as fast, and Eigen's last digits follow the number of devices, so that several processes would not write the bytes
    # of one.
    "cpu": {"xla_cpu_experimental_ynn_fusion_type": ""},
    "tpu": {
        # Without them weights that are split over a whole 4 x 4 x 4 slice are gathered as a sum of arrays that are zero
        # elsewhere, which sends twice the bytes.
        "xla_enable_async_all_gather": True,
        "xla_tpu_prefer_async_allgather_to_allreduce": True,
        # Rings of permutes around products in 16 or 32 pieces read the activations as often: of Llama-3.1-8B on v5p-64
        # the least time for HBM is 3.0 s a step with them, longer than computing takes, and 0.6 s without.
        "xla_tpu_enable_windowed_einsum_for_all_gather": False,
        "xla_tpu_enable_windowed_einsum_for_reduce_scatter": False,
        # The SparseCores of v5p, v6e and tpu7x gather weights and scatter the sums of gradients, over all rings of a
        # torus and beside the products. (Gathers that are fused with products are only for v5e, which does so by
        # itself: libtpu 0.0.50 refuses them elsewhere, for wrong results.) Of several rings gradients would be summed
        # whole in every chip and sliced; v5e too scatters them with these options (`mesh.gathered_weight`).
        "xla_tpu_enable_sparse_core_collective_offload_all_gather": True,
        "xla_tpu_enable_sparse_core_collective_offload_2d_all_gather": True,
        "xla_tpu_enable_sparse_core_collective_offload_3d_all_gather": True,
        "xla_tpu_enable_sparse_core_collective_offload_reduce_scatter": True,
        "xla_tpu_enable_sparse_core_collective_offload_nd_reduce_scatter": True,
        # How SparseCores work wherever MaxText lets them send (its benchmarks/xla_flags_library.py).
        "xla_tpu_use_tc_device_shape_on_sc": True,
        "xla_sc_disable_megacore_partitioning": True,
        "xla_sc_enable_instruction_fusion": False,
    },
}
"""XLA compiler options for the training step, by backend."""
