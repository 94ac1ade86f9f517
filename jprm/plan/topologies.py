"""TPU slices by their common names, libtpu's names for them, and the published figures of their chips."""

from __future__ import annotations

import dataclasses
import importlib.util
import math
from typing import Any

from jprm.libtpu import describe_no_tpu

GIB = 2**30


@dataclasses.dataclass(frozen=True)
class Chip:
    """Published figures of one chip, in bytes and FLOPs a second.

    interconnect: all links of the chip together, in one direction.
    network: a chip's part of its host's rate on the data centre's network; infinite where none is published.
    allotted: HBM bytes that libtpu's compiler lets a program of one device use, by its own refusals.
    """

    flops: float  # bfloat16
    hbm: float
    hbm_bandwidth: float
    interconnect: float
    network: float
    allotted: float
    devices: int = 1  # of JAX in a chip
    cores_named: bool = False  # a slice's name counts cores, two a chip


CHIPS = {
    # docs.cloud.google.com/tpu/docs/v4: 275 TFLOPs, 32 GiB, 1,200 GB/s. Six links of 50 GB/s: Jouppi et al. 2023,
    # arXiv:2304.01433, table 4. No rate of its hosts' network is published.
    "v4": Chip(275e12, 32 * GIB, 1200e9, 6 * 50e9, math.inf, 30.75 * GIB, cores_named=True),
    # cloud.google.com/tpu/docs/v5e: 197 TFLOPs, 16 GB, 819 GB/s, 400 GB/s in both directions together; of a pod of 256
    # chips 6.4 Tb/s of the data centre's network, 25 Gb/s a chip.
    "v5e": Chip(197e12, 16 * GIB, 819e9, 200e9, 25e9 / 8, 15.75 * GIB),
    # docs.cloud.google.com/tpu/docs/v5p: 459 TFLOPs, 95 GiB, 2,765 GB/s, 1,200 GB/s in both directions together; 50
    # Gb/s of the data centre's network a chip.
    "v5p": Chip(459e12, 95 * GIB, 2765e9, 600e9, 50e9 / 8, 95.74 * GIB, cores_named=True),
    # docs.cloud.google.com/tpu/docs/v6e: 918 TFLOPs, 32 GB, 1,638 GB/s, 800 GB/s in both directions together; of a pod
    # of 256 chips 25.6 Tb/s of the network, 100 Gb/s a chip.
    "v6e": Chip(918e12, 32 * GIB, 1638e9, 400e9, 100e9 / 8, 31.25 * GIB),
    # docs.cloud.google.com/tpu/docs/tpu7x: 2,307 TFLOPs, 192 GiB, 7,380 GB/s, 1,200 GB/s in both directions
    # together; 100 Gb/s of the network.
    "tpu7x": Chip(2307e12, 192 * GIB, 7380e9, 600e9, 100e9 / 8, 94.75 * GIB, devices=2, cores_named=True),
}

# Shapes of the available slices, by their chips: docs.cloud.google.com/tpu/docs/v5p and .../v6e.
FLAT = {1: "1x1", 4: "2x2", 8: "2x4", 16: "4x4", 32: "4x8", 64: "8x8", 128: "8x16", 256: "16x16"}
CUBES = {
    4: "2x2x1", 8: "2x2x2", 16: "2x2x4", 32: "2x4x4", 64: "4x4x4", 128: "4x4x8", 256: "4x8x8", 512: "8x8x8",
    1024: "8x8x16", 2048: "8x16x16",
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Topology:
    """One slice, or several joined by the data centre's network."""

    name: str  # such as v5p-128
    chip: Chip
    shape: str
    chips: int  # of all slices
    slices: int = 1

    @property
    def devices(self) -> int:
        return self.chips * self.chip.devices


def names() -> dict[str, list[str]]:
    """Returns the slices' names by kind of chip."""
    return {
        kind: [f"{kind}-{chips * (2 if chip.cores_named else 1)}" for chips in (CUBES if chip.cores_named else FLAT)]
        for kind, chip in CHIPS.items()
    }


def find(name: str, slices: int = 1) -> Topology:
    """Returns the slice of that name. Raises ValueError, listing the names, where there is none."""
    kind, _, count = name.lower().replace("v5litepod", "v5e").partition("-")
    chip, known = CHIPS.get(kind), names()
    if chip is None or f"{kind}-{count}" not in known[kind]:
        listed = known[kind] if chip else [name for group in known.values() for name in group]
        raise ValueError(
            f"{name!r} is no TPU slice. Names are {', '.join(listed)}; the number counts cores, two a chip, for"
            " v4, v5p and tpu7x, and chips for v5e and v6e"
        )
    if slices < 1:
        raise ValueError(f"slices={slices} must be positive")
    chips = int(count) // (2 if chip.cores_named else 1)
    return Topology(f"{kind}-{count}", chip, (CUBES if chip.cores_named else FLAT)[chips], chips * slices, slices)


def devices(topology: Topology) -> list[Any]:
    """Returns abstract devices to compile for. Raises FileNotFoundError where libtpu is not installed."""
    if importlib.util.find_spec("libtpu") is None:
        raise FileNotFoundError("libtpu, which holds the TPU compiler, is not installed: pip install -e '.[train,tpu]'")
    describe_no_tpu()  # it must not look for a TPU's metadata
    from jax.experimental import topologies

    kind = topology.name.partition("-")[0]
    sizes = [int(size) for size in topology.shape.split("x")]
    options: dict[str, Any] = {"num_slices": topology.slices} if topology.slices > 1 else {}
    if kind == "v4":  # else each of a chip's two cores is a device
        options |= {"chip_config_name": "megacore", "chips_per_host_bounds": (2, 2, 1)}
    elif math.prod(sizes) < 4:
        options["chips_per_host_bounds"] = (1, 1, 1)
    elif math.prod(sizes) == 4 and len(sizes) == 2:
        options["chips_per_host_bounds"] = (2, 2, 1)
    return topologies.get_topology_desc(platform="tpu", topology_name=f"{kind}:{topology.shape}", **options).devices
