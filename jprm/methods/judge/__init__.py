"""Generative verifiers: a policy writes critiques of steps, and their verdicts are scores."""

import os


def is_judge(model: str | os.PathLike) -> bool:
    """Returns whether the name of a scorer ends in `.json`: a judge's file, no model's folder. Opens no file."""
    return os.fspath(model).endswith(".json")
