"""Generative verifiers: a policy writes critiques of steps, and their verdicts are scores."""

import os


def is_judge(model: str | os.PathLike) -> bool:
    """Returns whether the name of a scorer is a judge's JSON file rather than a model's folder."""
    return os.fspath(model).endswith(".json")
