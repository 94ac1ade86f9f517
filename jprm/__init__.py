"""jprm: train, evaluate and use process reward models in JAX."""

__version__ = "0.1.0"

_LAZY = {"load": "jprm.loading", "PRM": "jprm.score.scorer", "aggregate": "jprm.score.aggregate"}


def __getattr__(name: str):
    """`jprm.load`, `jprm.PRM` and `jprm.aggregate`, imported when first used: the command line's help needs no jax."""
    if name not in _LAZY:
        raise AttributeError(f"module 'jprm' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_LAZY[name]), name)
