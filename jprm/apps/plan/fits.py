"""Table of models fitting on one card, by training method and row length, compiled for an H100 without running.

A cell's figure is the peak memory of XLA's program: weights, optimizer, gradients and temporaries for one row. For
other cards, the figure is compared with the card's memory; their own compilation may differ.
"""

from __future__ import annotations

import itertools
import pathlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from jprm.apps.plan.plan import compiled, scoring_step, training_step
from jprm.apps.plan.topologies import CHIPS, devices, find
from jprm.experiment import DataConfig, Experiment, OptimizerConfig, TargetConfig
from jprm.io.jsonl import parse
from jprm.io.outputs import digest, write_json
from jprm.methods.evaluate.blocks import Table
from jprm.model.config import ModelConfig
from jprm.model.mesh import MeshConfig, make_mesh
from jprm.model.parameters import LoraConfig

QWEN = dict(rope_theta=1e6, norm_eps=1e-6, qkv_bias=True)
_FIELDS = ("vocab_size", "layers", "width", "heads", "kv_heads", "head_dim", "mlp_width")
SHAPES: dict[str, tuple[tuple[int, ...], dict[str, Any]]] = {
    "0.5B": ((151936, 24, 896, 14, 2, 64, 4864), QWEN),
    "1.5B": ((151936, 28, 1536, 12, 2, 128, 8960), QWEN),
    "7B": ((152064, 28, 3584, 28, 4, 128, 18944), QWEN | {"tied_embeddings": False}),
    "8B": ((128256, 32, 4096, 32, 8, 128, 14336), {"rope_theta": 5e5, "norm_eps": 1e-5, "tied_embeddings": False}),
    "32B": ((152064, 64, 5120, 40, 8, 128, 27648), QWEN | {"tied_embeddings": False}),
}
"""Shapes of Qwen2.5 and (8B) Llama 3.1, from their `config.json`."""

HEAD_ALONE = "^decoder/"
WAYS: dict[str, dict[str, Any]] = {
    "training, all parameters": {},
    "LoRA, base in bfloat16": {"base_dtype": "bfloat16", "lora": LoraConfig(16)},
    "LoRA, base in 4 bits": {"base_dtype": "nf4", "lora": LoraConfig(16)},
    "scoring in bfloat16": {"base_dtype": "bfloat16"},
    "scoring in 4 bits": {"base_dtype": "nf4"},
}
"""Experiment fields of each compiled step."""

CARDS = {"24 GB": CHIPS["a10"].hbm, "32 GB": CHIPS["rtx5090"].hbm, "48 GB": 46_068 << 20, "80 GB": CHIPS["h100"].hbm,
         "141 GB": 143_771 << 20}  # fmt: skip
"""Bytes that the driver reports for the card of a size that has the fewest: A10, RTX 5090, L40S, H100 and H200."""

NAMED = {"24 GB": "A10, L4, RTX 3090 and 4090", "32 GB": "RTX 5090", "48 GB": "L40S", "80 GB": "H100", "141 GB": "H200"}

USABLE = 0.92
"""Fraction of a card's memory for jax with XLA_CLIENT_MEM_FRACTION=0.92 (the default is 0.75)."""

TOKENS = (2048, 8192)


def experiment(size: str, way: str, tokens: int) -> Experiment:
    """Returns a cell's experiment: bfloat16 computation, full rematerialisation, one row of `tokens` tokens at a time.

    `size` is a key of `SHAPES`, e.g. `7B`, `way` a key of `WAYS`. Raises KeyError for others. Its data do not exist.
    """
    sizes, others = SHAPES[size]
    scoring, changes = way.startswith("scoring"), dict(WAYS[way])
    return Experiment(
        name=f"{size}, {way}",
        base=size if "base_dtype" in changes else "",
        tokenizer=size,
        model=ModelConfig(
            **dict(zip(_FIELDS, sizes, strict=True)), **others, dtype="bfloat16", attention="gpu_kernel", remat="full"
        ),
        data=DataConfig(
            train=("-",), supervise="step", too_long="error", tokens=tokens, slots=tokens // 8, rows=1, micro_rows=1
        ),
        target=TargetConfig(labels="rating", neutral="positive", after_error="keep"),
        objective="cross_entropy",
        optimizer=OptimizerConfig(learning_rate=1e-4, freeze=HEAD_ALONE if scoring else ""),
        mesh=MeshConfig(),
        steps=1,
        **changes,
    )


def fits(kept: pathlib.Path | None, say: Callable[[str], None] = lambda line: None) -> dict[str, Any]:
    """Compiles every cell, which takes long; returns the report as JSON data.

    It has `compiled_for`, `cards` (bytes by card), `usable` (a fraction) and `cells`: by "SIZE, WAY, TOKENS" the bytes
    `total` and `arguments`, and `asked`, a digest of the experiment. With a file `kept`, the report is written after
    each cell, and a repeated call compiles only missing or changed cells. `say` gets a line per compilation.

    Raises FileNotFoundError if XLA's compiler for GPUs is missing, ValueError if `kept` is damaged.
    """
    mesh = make_mesh(MeshConfig(), devices(find("h100-1")))
    stored = parse(kept.read_bytes(), str(kept)) if kept and kept.exists() else {}
    report = {"compiled_for": "h100-1", "cards": CARDS, "usable": USABLE, "cells": {}}
    for size, way, tokens in itertools.product(SHAPES, WAYS, TOKENS):
        config = experiment(size, way, tokens)
        name, asked = f"{config.name}, {tokens}", digest(repr(config))
        cell = stored.get("cells", {}).get(name)
        if not cell or cell["asked"] != asked:
            say(f"compiling {name} tokens")
            scoring = way.startswith("scoring")
            function, arguments = scoring_step(config, mesh) if scoring else training_step(config, mesh, "gpu")
            memory, _ = compiled(function, arguments, mesh, 0.0)
            cell = {"asked": asked, "total": memory.total, "arguments": memory.arguments}
        report["cells"][name] = cell
        if kept:
            write_json(kept, report)
    return report


def smallest(total: float) -> str:
    """Returns the smallest card, e.g. `24 GB`, with `total` bytes in its usable memory (`USABLE`), or `none`."""
    return next((name for name, size in CARDS.items() if total <= USABLE * size), "none")


def tables(report: Mapping[str, Any]) -> Iterator[Table | str]:
    rows: list[list[str] | None] = []
    for size in SHAPES:
        rows += [None] * bool(rows)
        for way in WAYS:
            totals = [report["cells"][f"{size}, {way}, {tokens}"]["total"] for tokens in TOKENS]
            cells = itertools.chain.from_iterable((f"{total / 1e9:.1f}", smallest(total)) for total in totals)
            rows.append([size, way, *cells])
    heads = itertools.chain.from_iterable((f"GB, a row of {tokens:,}", "smallest card") for tokens in TOKENS)
    yield Table("what fits on one card: compiled for an H100, not run", ("model", "way", *heads), rows)
    cards = "; ".join(f"{size}: {NAMED[size]}" for size in CARDS)
    yield (
        f"Memory at once with one row of bfloat16 computation and remat='full'. Cards ({cards}) of which a program may"
        f" use {USABLE:.0%} with XLA_CLIENT_MEM_FRACTION={USABLE}, and 75% by default."
    )
