"""jprm: train, evaluate and use process reward models in JAX."""

__version__ = "0.1.0"
