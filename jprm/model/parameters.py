"""Parameters as flat dicts {path: array}, split into trained and frozen ones."""

from __future__ import annotations

import re
from collections.abc import Iterable

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


def new_parameters(path: object, lacking: Iterable[str], pattern: str) -> set[str]:
    """Returns the parameters without weights, which start at random: `lacking`, as far as the pattern matches them.

    Raises ValueError, naming `path`, for parameters that it does not match, and where it matches none.
    """
    new = {name for name in lacking if pattern and re.search(pattern, name)}
    if rest := sorted(set(lacking) - new):
        raise ValueError(
            f"{path}: has no weights for {', '.join(rest)}. Load another model, or set new_parameters to a pattern that"
            " matches them, to train them from random ones"
        )
    if pattern and not new:
        raise ValueError(f"new_parameters={pattern!r}: {path} lacks no parameter that it matches; leave it empty")
    return new


def join(*flat: dict) -> dict:
    """Returns the nested dict of flat dicts."""
    return unflatten_dict({path: value for part in flat for path, value in part.items()}, sep="/")
