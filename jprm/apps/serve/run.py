"""Loads the models, compiles what they need, and serves until SIGTERM."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

import uvicorn

from jprm.apps.serve.app import make_app
from jprm.apps.serve.config import ServeConfig, Weights
from jprm.apps.serve.engine import Engine
from jprm.apps.serve.openrlhf import View, read_view
from jprm.apps.serve.runs import Runs
from jprm.apps.web.connection import timed
from jprm.apps.web.guards import key_of
from jprm.io.storage import path_of
from jprm.loading import load
from jprm.methods.policy.load import load_policy
from jprm.model import Dtype
from jprm.model.mesh import MeshConfig
from jprm.score.prefix_cache import PrefixCache
from jprm.score.scorer import PRM

DRAIN_SECONDS = 60
"""How long requests may take to be answered after SIGTERM."""


def serve(
    models: Sequence[str | os.PathLike],
    config: ServeConfig,
    *,
    view: str | os.PathLike | None = None,
    policy: str | os.PathLike | None = None,
    dtype: Dtype | None = None,
    attention: str | None = None,
    adapter: str | None = None,
    weights: Weights = "copied",
    runs: Sequence[str | os.PathLike] = (),
    say: Callable[[str], None] = print,
) -> None:
    """Serves models by their folders' names, and the curves of runs, until SIGTERM or Ctrl-C; answers what it admitted.

    Raises ValueError for an address that others reach without a key, no model and no run, or two models of one name.
    """
    if not models and not runs:
        raise ValueError("name the folder of a model to serve, or with --run that of a run to show")
    key = key_of(config)
    names = [path_of(model).resolve().name for model in models]
    if len(set(names)) < len(names):
        raise ValueError(f"two models have one name: {', '.join(names)}. Rename a folder")
    prompts = read_view(view) if view else View()
    writer = load_policy(policy) if policy else None
    shown = Runs(runs) if runs else None
    mesh = MeshConfig(data=-1, fsdp=1) if weights == "copied" else MeshConfig()
    engines = []
    for name, folder in zip(names, models, strict=True):
        prm = load(folder, mesh, dtype=dtype, adapter=adapter, attention=attention)
        say(f"{prm!r}: compiling")
        lengths = prm.warm_up(config.longest)
        cache = prefix_cache(prm, config.prefix_tokens)
        kept = f"; {cache.slots:,} tokens of prefixes are kept" if cache else ""
        say(f"{name}: compiled for rows of {', '.join(map(str, lengths))} tokens{kept}")
        engines.append(Engine(prm, config.longest, name, cache))
    uvicorn.run(make_app(engines, config, key, prompts, writer, shown), **listening(config), log_level="info")


def listening(config: ServeConfig) -> dict[str, Any]:
    """Returns uvicorn's arguments. Its access log would hold addresses and query strings; /metrics has the counts."""
    return dict(
        host=config.host, port=config.port, http=timed(config.body_seconds), access_log=False, server_header=False,
        timeout_graceful_shutdown=DRAIN_SECONDS, timeout_keep_alive=30,
    )  # fmt: skip


def prefix_cache(prm: PRM, tokens: int) -> PrefixCache | None:
    """Returns a cache of prefixes that is compiled, or None for 0 tokens and for models that cannot have one."""
    try:
        cache = PrefixCache(prm, tokens) if tokens else None
    except NotImplementedError:
        return None
    if cache is not None:
        cache.warm_up()
    return cache
