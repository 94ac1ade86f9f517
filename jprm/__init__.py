"""jprm: train, evaluate and use process reward models in JAX."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jprm.loading import load
    from jprm.score.aggregate import aggregate
    from jprm.score.scorer import PRM
    from jprm.train import Trainer

__version__ = "0.2.0.dev0"

__all__ = ["PRM", "Trainer", "aggregate", "load"]

_LAZY = {
    "load": "jprm.loading",
    "PRM": "jprm.score.scorer",
    "aggregate": "jprm.score.aggregate",
    "Trainer": "jprm.train",
}


def __getattr__(name: str) -> Any:
    """Imports public names lazily, so that `jprm --help` loads no jax."""
    if name not in _LAZY:
        raise AttributeError(f"module 'jprm' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_LAZY[name]), name)


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
