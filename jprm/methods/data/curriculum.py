"""A curriculum: `data.mixture` as a function of the step.

    def easy_first(step, steps):  # the weights of data.train's two entries
        return (1 - step / steps, step / steps)

`data.mixture=FILE.py:easy_first` names it. `step` is the number of updates before the one that a tree is first used in,
by the rows packed so far; `steps` is the experiment's. A weight may be 0, but not all. The weights hold for a window of
`data.window` trees, which is packed together: a smaller window follows the function more closely.

The state is a few numbers, so a continued run has the same batches bit for bit. A run stores a digest of the function's
file and does not continue with another one.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from typing import Any

import grain
import numpy as np

from jprm.experiment import Experiment
from jprm.options import find_part
from jprm.rows import Rows
from jprm.token_tree import TokenTree

Pack = Callable[[int, list[TokenTree]], tuple[Rows, np.ndarray]]


class Windows(grain.IterDataset):
    """Packed windows of one stream (k, n). `sources` are its own trees, endless; `pack` takes (window index, trees).

    Raises ValueError if there is no such function, or its weights do not fit, which is tried at each hundredth of the
    steps. Errors of the function pass.
    """

    def __init__(
        self, sources: Sequence[grain.MapDataset[Any]], experiment: Experiment, pack: Pack, stream: tuple[int, int]
    ):
        super().__init__()
        self.sources, self.pack, self.stream = sources, pack, stream
        config = experiment.data
        self.window, self.rows, self.steps = config.window, config.rows // stream[1], experiment.steps
        self.name = config.mixture
        self.function = find_part(str(config.mixture), {}, "data.mixture", Callable, files=True)
        for step in {*range(0, self.steps, max(self.steps // 100, 1)), self.steps - 1}:
            self.weights(step)  # a function that goes wrong late is refused at the start

    def __iter__(self) -> grain.DatasetIterator:
        return _Iterator(self)

    def weights(self, step: int) -> list[float]:
        """Returns a weight per source for the update after `step` updates; they add up to 1.

        Raises ValueError, naming the step, unless the function returns a number from 0 for each source, not all 0. Its
        own errors pass.
        """
        returned = self.function(step, self.steps)
        try:
            weights = [float(weight) for weight in returned]
            whole = math.fsum(weights)
        except (TypeError, ValueError):
            weights, whole = [], 0.0
        if len(weights) != len(self.sources) or min(weights) < 0 or not 0 < whole < math.inf:
            raise ValueError(
                f"data.mixture={self.name!r}: returns {weights or returned!r} at step {step}. Return"
                f" {len(self.sources)} weights of at least 0, not all 0"
            )
        return [weight / whole for weight in weights]


class _Iterator(grain.DatasetIterator):
    """The state: windows and rows so far, the next tree of each source, and how much of its share each is owed."""

    def __init__(self, windows: Windows):
        super().__init__()
        self.windows = windows
        count = len(windows.sources)
        self.state: dict[str, Any] = {"window": 0, "rows": 0, "next": [0] * count, "owed": [0.0] * count}

    def __next__(self) -> tuple[Rows, np.ndarray]:
        w, state = self.windows, self.get_state()
        weights, trees = w.weights(min(state["rows"] // w.rows, w.steps - 1)), []
        for _ in range(w.window):
            owed = [before + weight for before, weight in zip(state["owed"], weights, strict=True)]
            # A source of weight 0 gets none, whatever it is owed from before.
            source = max((i for i, weight in enumerate(weights) if weight), key=owed.__getitem__)
            trees.append(w.sources[source][state["next"][source]])
            owed[source] -= 1
            state["owed"], state["next"][source] = owed, state["next"][source] + 1
        (first, count), index = w.stream, state["window"]
        packed = w.pack(first + count * index, trees)
        self.state = state | {"window": index + 1, "rows": state["rows"] + len(packed[0].tokens)}
        return packed

    def get_state(self) -> dict[str, Any]:
        return copy.deepcopy(self.state)

    def set_state(self, state: dict[str, Any]) -> None:
        self.state = copy.deepcopy(state)
