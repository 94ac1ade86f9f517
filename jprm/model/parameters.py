"""Parameters as flat dicts {path: array}, split into trained and frozen ones."""

from __future__ import annotations

import re

from flax.traverse_util import flatten_dict, unflatten_dict


def split(params: dict, freeze: str, only: str = "") -> tuple[dict, dict]:
    """Returns the trained and the frozen parameters as flat dicts {path: array}.

    `freeze` and `only` are patterns; parameters that `only` does not match are frozen too.
    """
    flat = flatten_dict(params, sep="/")
    matched = {path for path in flat if freeze and re.search(freeze, path)}
    frozen = {path: value for path, value in flat.items() if path in matched or not re.search(only, path)}
    if freeze and not matched:
        raise ValueError(f"freeze={freeze!r} matches no parameter; paths are {', '.join(sorted(flat))}")
    if len(frozen) == len(flat):
        raise ValueError(f"freeze={freeze!r} matches every parameter: nothing is left to train")
    return {path: value for path, value in flat.items() if path not in frozen}, frozen


def join(*flat: dict) -> dict:
    """Returns the nested dict of flat dicts."""
    return unflatten_dict({path: value for part in flat for path, value in part.items()}, sep="/")
