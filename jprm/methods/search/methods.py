"""The search methods by the name of their command, and how a result is chosen. Needs no array library.

A new method is one file, like `jprm.methods.search.refine`, and one line here, or a file of the user's own:
`jprm search NAME` and `jprm search FILE.py:NAME` take its options from the config's fields, and their text from its
docstring.
"""

from __future__ import annotations

from typing import Any, Literal, get_args

from jprm import registry

METHODS = {
    "best-of-n": "jprm.methods.search.best_of_n:BestOfN",
    "beam": "jprm.methods.search.beam:Beam",
    "dvts": "jprm.methods.search.beam:DVTS",
    "mcts": "jprm.methods.search.mcts:MCTS",
    "refine": "jprm.methods.search.refine:Refine",
}

Choice = Literal["best", "majority", "weighted"]
CHOICES: tuple[str, ...] = get_args(Choice)


def find(name: str) -> Any:
    """Returns the config class of a method, given by its name, as `module:NAME` or as `FILE.py:NAME`."""
    return registry.find(name, METHODS, "method", type, files=True)
