"""Which chains to label: most of them wrong answers that the model finds convincing (Lightman et al. 2023, section 2).

What a model already scores right teaches it little, and a random chain is mostly that. But a sample chosen by a model
says nothing of all chains, so some are drawn at random from all of them, with known probability.
"""

from __future__ import annotations

import collections
import os
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from jprm.annotate.chains import Chain, chains_in
from jprm.annotate.config import SelectConfig
from jprm.data.overlap import normalise, problems_in
from jprm.jsonl import write_records
from jprm.outputs import check_output


def select(chains: Sequence[Chain], config: SelectConfig) -> list[Chain]:
    """Returns the chains to label, shuffled, each with `selection`: its stratum, and for random ones the probability.

    The random chains are drawn first and from all chains: as a sample they stand for all. Where a stratum has too few
    chains, others take its place (`fill`), drawn from what is left. Equal chains count once.

    Raises ValueError where a chain has no scores.
    """
    unique = {(chain["problem"], *chain["steps"]): chain for chain in chains}
    left = list(unique.values())
    for chain in left:
        if "scores" not in chain:
            raise ValueError(f"a chain of {chain['problem'][:60]!r} has no scores: run `jprm score` on the file first")
    rng = np.random.default_rng(config.seed)
    order = rng.permutation(len(left))
    total, count = len(left), min(config.count, len(left))
    counts = {name: round(count * getattr(config, name)) for name in ("convincing", "rest", "disagreement")}
    pools: dict[str, Callable[[Chain], float | None]] = {
        "convincing": lambda chain: min(chain["scores"]) if chain.get("correct") is False else None,
        "disagreement": _distance,
        "rest": lambda chain: min(chain["scores"]),
    }
    drawn = {int(i) for i in order[: count - sum(counts.values())]}
    chosen: dict[int, str] = {}
    for name, key in pools.items():
        free = [i for i in range(total) if i not in drawn and i not in chosen]
        ranked = [(value, i) for i in free if (value := key(left[i])) is not None]
        ranked.sort(key=lambda pair: (-pair[0], pair[1]))
        chosen |= {i: name for _, i in ranked[: counts[name]]}
    probability = len(drawn) / total if total else 0.0
    chosen |= dict.fromkeys(sorted(drawn), "random")
    more = (int(i) for i in order if i not in chosen)
    chosen |= {next(more): "fill" for _ in range(count - len(chosen))}
    places = np.array(sorted(chosen))
    return [
        left[i] | {"selection": {"stratum": chosen[i]} | ({"probability": probability} if i in drawn else {})}
        for i in rng.permutation(places).tolist()
    ]


def _distance(chain: Chain) -> float | None:
    """Returns the largest distance of a score from its label in [0, 1], None without labels."""
    low = -1.0 if chain.get("semantics") == "rating" else 0.0
    apart = [
        abs(score - (label - low) / (1 - low))
        for score, label in zip(chain["scores"], chain.get("labels", ()), strict=False)
        if label is not None
    ]
    return max(apart, default=None)


def select_file(
    source: str | os.PathLike,
    output: str | os.PathLike,
    config: SelectConfig,
    exclude: Iterable[str | os.PathLike] = (),
) -> dict[str, Any]:
    """Writes the selected chains of a file of scored records; returns counts.

    Problems of the files `exclude`, benchmarks, are left out.
    """
    exclude = list(exclude)
    check_output(output, source, *exclude)
    banned = {problem for path in exclude for problem in problems_in(path)}
    found = list(chains_in(source))
    left = [chain for chain in found if not banned or normalise(chain["problem"]) not in banned]
    chosen = select(left, config)
    if not chosen:
        raise ValueError(f"{os.fspath(source)}: no chain is left to select")
    write_records(output, chosen)
    strata = collections.Counter(chain["selection"]["stratum"] for chain in chosen)
    return {"chains": len(found), "excluded": len(found) - len(left), "selected": len(chosen), **strata}
