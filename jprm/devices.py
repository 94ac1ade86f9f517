"""Devices and their compilers: the cache for programs, XLA options, and no warnings of libtpu without a TPU.

This file must not import jax: a command sets all this before jax looks for devices.
"""

from __future__ import annotations

import os
import pathlib
import platform
import sys

SWITCH, FOLDER = "JPRM_COMPILE_CACHE", "JAX_COMPILATION_CACHE_DIR"
LEAST, LEAST_SECONDS = "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.1"
"""Least compile time in seconds for a program to be cached. jax's default of 1 omits most of a small model's."""


def enable_compile_cache() -> None:
    """Lets a later process find the programs compiled by this one, in ~/.cache/jprm/xla/HOST (made if absent).

    Sets environment variables, and jax's settings if it is imported. JAX_COMPILATION_CACHE_DIR, or jax's setting by the
    same name, takes precedence; JPRM_COMPILE_CACHE=0 switches this off. A folder that cannot be made is no error.
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
"""Answers to libtpu's questions, which warns without them; and several processes may load it at once."""

_GOOGLE, _NETWORK = "0x1ae0", "0x0042"  # PCI vendor, and its network card in virtual machines of any kind


def describe_no_tpu() -> None:
    """Sets the unset environment `VARIABLES`: libtpu then compiles on a machine without a TPU."""
    for name, value in VARIABLES.items():
        os.environ.setdefault(name, value)


def quiet_without_tpu(devices: str = "/sys/bus/pci/devices") -> None:
    """Sets `VARIABLES` if no TPU is attached, before jax tries libtpu and falls back to another backend.

    Skipped if there is a TPU in the folder of PCI `devices`, or JAX_PLATFORMS or JAX_FORCE_TPU_INIT is set: errors
    there are real.
    """
    if "JAX_PLATFORMS" in os.environ or "JAX_FORCE_TPU_INIT" in os.environ:
        return
    for folder in pathlib.Path(devices).glob("*"):
        vendor, device = ((folder / name).read_text().strip() for name in ("vendor", "device"))
        if vendor == _GOOGLE and device != _NETWORK:
            return
    describe_no_tpu()


OPTIONS: dict[str, dict[str, bool | str]] = {
    # Eigen's float32 products instead of YNNPACK's: 20 to 60 % faster for rows of 8,192 tokens. A training step with
    # three layers of SmolLM2-135M takes 7.1 s instead of 9.1 on 2 cores. Scoring does not set this: it is as fast
    # without, and Eigen's last digits depend on the number of devices, so several processes would write other bytes
    # than one.
    "cpu": {"xla_cpu_experimental_ynn_fusion_type": ""},
    "tpu": {
        # Without these two, weights split over a whole 4 x 4 x 4 slice are gathered as a sum of arrays with zeros
        # elsewhere, which sends twice the bytes.
        "xla_enable_async_all_gather": True,
        "xla_tpu_prefer_async_allgather_to_allreduce": True,
        # Rings of permutes around products in 16 or 32 pieces read the activations 16 or 32 times. For Llama-3.1-8B on
        # v5p-64, HBM alone then takes at least 3.0 s per step, longer than computing, and 0.6 s without.
        "xla_tpu_enable_windowed_einsum_for_all_gather": False,
        "xla_tpu_enable_windowed_einsum_for_reduce_scatter": False,
        # SparseCores (v5p, v6e, tpu7x) gather weights and scatter summed gradients over all rings of a torus, beside
        # the products. (Only v5e fuses gathers with products, by itself: libtpu 0.0.50 refuses that elsewhere, for
        # wrong results.) With several rings, every chip would otherwise sum the whole gradients and slice them; v5e
        # scatters them with these options too (`mesh.gathered_weight`).
        "xla_tpu_enable_sparse_core_collective_offload_all_gather": True,
        "xla_tpu_enable_sparse_core_collective_offload_2d_all_gather": True,
        "xla_tpu_enable_sparse_core_collective_offload_3d_all_gather": True,
        "xla_tpu_enable_sparse_core_collective_offload_reduce_scatter": True,
        "xla_tpu_enable_sparse_core_collective_offload_nd_reduce_scatter": True,
        # MaxText sets these wherever SparseCores send (its benchmarks/xla_flags_library.py).
        "xla_tpu_use_tc_device_shape_on_sc": True,
        "xla_sc_disable_megacore_partitioning": True,
        "xla_sc_enable_instruction_fusion": False,
    },
}
"""XLA compiler options for the training step, by backend."""
