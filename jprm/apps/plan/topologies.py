"""TPU slices and GPU nodes by their common names, as compilers name them, with published chip figures."""

from __future__ import annotations

import dataclasses
import importlib.util
import math
import pathlib
from typing import Any

from jprm.devices import describe_no_tpu

GIB = 2**30


@dataclasses.dataclass(frozen=True)
class Chip:
    """One chip's published figures, in bytes and FLOPs per second.

    interconnect: all links of the chip together, in one direction.
    links: number of links.
    network: a chip's share of its host's data centre network rate; infinite if not published.
    allotted: HBM bytes available to a program: from libtpu's own errors, or a fraction of a GPU's memory.
    host: chips per host, if a slice has several hosts.
    rectangles: for slices of more than 16 chips, the compiler accepts only rectangular parts.
    reached: fraction of `flops` reached in training by MaxText, by its own published figures; 0 if unknown.
    """

    flops: float  # bfloat16
    hbm: float
    hbm_bandwidth: float
    interconnect: float
    network: float
    allotted: float
    devices: int = 1  # of JAX in a chip
    cores_named: bool = False  # a slice's name counts cores, two a chip
    backend: str = "tpu"  # jax's name
    links: int = 6
    host: int = 4
    reached: float = 0.0
    rectangles: bool = False


def _card(flops: float, hbm: float, bandwidth: float, bus: float) -> Chip:
    """Returns a GPU that a program may use to 92 %, in a machine of which no network rate is published."""
    return Chip(flops, hbm, bandwidth, bus, math.inf, 0.92 * hbm, backend="gpu")


# `reached`: MFU that github.com/AI-Hypercomputer/maxtext publishes. v5p: 64 to 71 % (32B to 1,160B, README). v5e: 56 to
# 67 % on one pod (16B to 128B, configs/v5e). v4: 55 to 59 % (22B and 52B, README of 2023). v6e: 45 %.
CHIPS = {
    # docs.cloud.google.com/tpu/docs/v4: 275 TFLOPs, 32 GiB, 1,200 GB/s. Six links of 50 GB/s: Jouppi et al. 2023,
    # arXiv:2304.01433, table 4. No rate of its hosts' network is published.
    "v4": Chip(275e12, 32 * GIB, 1200e9, 6 * 50e9, math.inf, 30.75 * GIB, cores_named=True, reached=0.56),
    # cloud.google.com/tpu/docs/v5e: 197 TFLOPs, 16 GB, 819 GB/s, 400 GB/s in both directions together; of a pod of 256
    # chips 6.4 Tb/s of the data centre's network, 25 Gb/s a chip.
    "v5e": Chip(197e12, 16 * GIB, 819e9, 200e9, 25e9 / 8, 15.75 * GIB, links=4, reached=0.6, rectangles=True),
    # docs.cloud.google.com/tpu/docs/v5p: 459 TFLOPs, 95 GiB, 2,765 GB/s, 1,200 GB/s in both directions together; 50
    # Gb/s of the data centre's network a chip.
    "v5p": Chip(459e12, 95 * GIB, 2765e9, 600e9, 50e9 / 8, 95.74 * GIB, cores_named=True, reached=0.65),
    # docs.cloud.google.com/tpu/docs/v6e: 918 TFLOPs, 32 GB, 1,638 GB/s, 800 GB/s in both directions together; of a pod
    # of 256 chips 25.6 Tb/s of the network, 100 Gb/s a chip.
    "v6e": Chip(918e12, 32 * GIB, 1638e9, 400e9, 100e9 / 8, 31.25 * GIB, links=4, reached=0.45),
    # docs.cloud.google.com/tpu/docs/tpu7x: 2,307 TFLOPs, 192 GiB, 7,380 GB/s, 1,200 GB/s in both directions
    # together; 100 Gb/s of the network.
    "tpu7x": Chip(2307e12, 192 * GIB, 7380e9, 600e9, 100e9 / 8, 94.75 * GIB, devices=2, cores_named=True),
}

# In bfloat16 without sparsity, NVLink in one direction, and 200 or 400 Gb/s of network for each GPU of a DGX node.
# JAX takes three quarters of a GPU's memory by default; these plans are for XLA_CLIENT_MEM_FRACTION=0.92.
CHIPS |= {
    # nvidia.com/a100, SXM: 312 TFLOPs, 80 GB, 2,039 GB/s, NVLink 600 GB/s.
    "a100": Chip(312e12, 85_100_068_864, 2039e9, 300e9, 200e9 / 8, 0.92 * 85_100_068_864, backend="gpu"),
    # nvidia.com/h100, SXM: 1,979 TFLOPs with sparsity, 80 GB, 3.35 TB/s, NVLink 900 GB/s.
    "h100": Chip(989.5e12, 84_942_979_072, 3350e9, 450e9, 400e9 / 8, 0.92 * 84_942_979_072, backend="gpu"),
    # HGX B200: 2,250 TFLOPs, 180 GB, 8 TB/s, NVLink 1,800 GB/s.
    "b200": Chip(2250e12, 191_514_411_008, 8000e9, 900e9, 400e9 / 8, 0.92 * 191_514_411_008, backend="gpu"),
}

# Cards at home and small cards in clouds, by PCIe of 16 lanes in one direction: 32 GB/s (4.0) or 64 GB/s (5.0). In
# bfloat16 with sums in float32, without sparsity. Bytes are those that the driver reports.
CHIPS |= {
    # NVIDIA Ada GPU Architecture (whitepaper), RTX 4090: 165.2 TFLOPs, 24 GB, 1,008 GB/s.
    "rtx4090": _card(165.2e12, 24_564 << 20, 1008e9, 32e9),
    # NVIDIA Ampere GA102 GPU Architecture (whitepaper), RTX 3090: 71 TFLOPs, 24 GB, 936 GB/s.
    "rtx3090": _card(71e12, 24_576 << 20, 936e9, 32e9),
    # NVIDIA RTX Blackwell GPU Architecture (whitepaper), RTX 5090: 209.5 TFLOPs, 32 GB, 1,792 GB/s, PCIe 5.0.
    "rtx5090": _card(209.5e12, 32_607 << 20, 1792e9, 64e9),
    # nvidia.com/en-us/data-center/l4: 242 TFLOPs with sparsity, 24 GB, 300 GB/s.
    "l4": _card(121e12, 23_034 << 20, 300e9, 32e9),
    # nvidia.com/en-us/data-center/products/a10-gpu: 125 TFLOPs, 24 GB, 600 GB/s.
    "a10": _card(125e12, 23_028 << 20, 600e9, 32e9),
}
NODES = (1, 2, 4, 8)
"""GPUs in a node, or in a run's part of it."""

# Shapes of the available slices, by their chips: docs.cloud.google.com/tpu/docs/v5p and .../v6e.
FLAT = {1: "1x1", 4: "2x2", 8: "2x4", 16: "4x4", 32: "4x8", 64: "8x8", 128: "8x16", 256: "16x16"}
CUBES = {
    4: "2x2x1", 8: "2x2x2", 16: "2x2x4", 32: "2x4x4", 64: "4x4x4", 128: "4x4x8", 256: "4x8x8", 512: "8x8x8",
    1024: "8x8x16", 2048: "8x16x16",
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Topology:
    """A slice or node, or several joined by the data centre network. `chips` counts all slices."""

    name: str  # such as v5p-128
    chip: Chip
    shape: str
    chips: int
    slices: int = 1

    @property
    def devices(self) -> int:
        return self.chips * self.chip.devices

    @property
    def host(self) -> Topology:
        """One host of the slice, or one node, as a topology with one slice."""
        name, chips = self.name.partition("-")[0], self.chips
        if self.chip.backend == "gpu" or chips <= self.chip.host or (chips == 8 and self.chip.links == 4):
            return dataclasses.replace(self, chips=chips // self.slices, slices=1)
        return find(f"{name}-{self.chip.host * (2 if self.chip.cores_named else 1)}")

    @property
    def hosts(self) -> int:
        return self.chips // self.host.chips

    @property
    def interconnect(self) -> float:
        """Bytes per second received by the chip with the fewest links; of a GPU, the published rate of its bus.

        The end of an axis has one link along it, unless the axis wraps around: an axis of 16 in a flat pod does, and
        every axis in a slice of 4 x 4 x 4 cubes.
        """
        if self.chip.backend == "gpu":
            return self.chip.interconnect
        sizes = [int(size) for size in self.shape.split("x")]
        cubes = len(sizes) == 3 and all(size % 4 == 0 for size in sizes)
        links = sum(2 if cubes or size == 16 else 1 for size in sizes if size > 1) or self.chip.links
        return self.chip.interconnect * min(links, self.chip.links) / self.chip.links


def names() -> dict[str, list[str]]:
    """Returns the names of slices and nodes by chip kind, e.g. {"v5p": ["v5p-8", ...], "h100": ["h100-1", ...]}."""
    return {
        kind: [f"{kind}-{count * (2 if chip.cores_named else 1)}" for count in _shapes(chip)]
        for kind, chip in CHIPS.items()
    }


def _shapes(chip: Chip) -> dict[int, str]:
    """Returns slice or node shapes by chip count."""
    if chip.backend == "gpu":
        return {count: str(count) for count in NODES}
    return CUBES if chip.cores_named else FLAT


def find(name: str, slices: int = 1) -> Topology:
    """Finds a slice or node by name, e.g. `v5p-128`, in any case; with `slices`, so many of them, joined by a network.

    Raises ValueError if it is unknown, with the names, or `slices` is below 1.
    """
    kind, _, count = name.lower().replace("v5litepod", "v5e").partition("-")
    chip, known = CHIPS.get(kind), names()
    if chip is None or f"{kind}-{count}" not in known[kind]:
        listed = known[kind] if chip else [name for group in known.values() for name in group]
        raise ValueError(
            f"{name!r} is no TPU slice or GPU node. Names are {', '.join(listed)}; the number counts cores, two a chip,"
            " for v4, v5p and tpu7x, and chips for the others"
        )
    if slices < 1:
        raise ValueError(f"slices={slices} must be positive")
    chips = int(count) // (2 if chip.cores_named else 1)
    return Topology(f"{kind}-{count}", chip, _shapes(chip)[chips], chips * slices, slices)


def devices(topology: Topology) -> list[Any]:
    """Returns abstract devices, one per device of JAX, to compile for; no such hardware is needed.

    Raises FileNotFoundError if their compiler is not installed.
    """
    if topology.chip.backend == "gpu":
        return _gpus(topology)
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
    name = f"{kind}:{topology.shape}"
    return topologies.get_topology_desc(platform="tpu", topology_name=name, **options).devices


def _gpus(topology: Topology) -> list[Any]:
    """Returns abstract GPUs, node by node."""
    if importlib.util.find_spec("jax_plugins") is None or importlib.util.find_spec("jax_plugins.xla_cuda12") is None:
        raise FileNotFoundError("XLA's compiler for NVIDIA GPUs is not installed: pip install -e '.[train,gpu-aot]'")
    from jax.experimental import topologies

    kind, nodes = topology.name.partition("-")[0], topology.slices
    target = (pathlib.Path(__file__).parent / "gpu_targets" / f"{kind}.txtpb").read_text(encoding="utf-8")
    sizes = f"1x{nodes}x{topology.chips // nodes}"  # partitions, hosts, devices a host
    return topologies.get_topology_desc(platform="cuda", topology=sizes, target_config=target).devices
