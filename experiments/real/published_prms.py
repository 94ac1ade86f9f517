"""What a published 7B or 8B PRM is worth, from its published scores: none of the models is run.

    python -m experiments.real.published_prms --shared ../shared/data --out runs/real/published.json

Five PRMs scored the same 250 chains of each ProcessBench split, in the same order (published by FoVer, CC BY 4.0). The
files are flat lists of step scores with labels, up to the first error of a chain, and of chain scores, each the least
of the chain's steps. `chains_of_file` finds which steps are a chain's: a wrong chain ends with its only wrong
step, and the least score of a right chain's steps is the chain's score for all five models.

The first error of a chain, F1, and thresholds need no step after the first error. Baselines read only a step's number,
fitted on GSM8K's chains: texts are not in the files, so that features of the text are not available.
"""

from __future__ import annotations

import functools
import pathlib
from typing import Any, NamedTuple

import numpy as np
import tyro
from jaxtyping import Bool, Float, Int

from jprm.io.jsonl import parse
from jprm.io.outputs import write_json
from jprm.methods.evaluate.calibration import brier, ece_interval
from jprm.methods.evaluate.conformal import accept_threshold
from jprm.methods.evaluate.processbench import Scores, average_draws, best_threshold, right_at
from jprm.methods.evaluate.scored import weighted_f1
from jprm.statistics import Draws, auroc, difference, draws, interval

SPLITS = ("gsm8k", "math", "olympiadbench", "omnimath")
TUNED_ON = "gsm8k"
ERROR_RATE = 0.2
"""Of the chains that the conformal filter accepts. Of all 1,000 chains 63.5 % are wrong."""


class Split(NamedTuple):
    """One split: N steps in C chains, scores by model."""

    chain_N: Int[np.ndarray, " N"]
    right_N: Bool[np.ndarray, " N"]
    first_error_C: Int[np.ndarray, " C"]  # -1: none
    step: dict[str, Float[np.ndarray, " N"]]
    chain: dict[str, Float[np.ndarray, " C"]]
    published: dict[str, dict[str, float]]

    def by_chain(self, score_N: np.ndarray) -> Scores:
        return np.split(score_N, np.flatnonzero(np.diff(self.chain_N)) + 1)


def chains_of_file(
    right_N: Bool[np.ndarray, " N"], right_C: Bool[np.ndarray, " C"], step_MN: np.ndarray, chain_MC: np.ndarray
) -> list[int]:
    """Returns the end of every chain among the steps.

    A wrong chain ends with its first wrong step, whose score and those before it are at least the chain's score (a
    later step may be lower). A right chain has right steps whose least score is the chain's, for every model.

    Where a right chain could end at several steps, which moves right steps from one right chain to the next, it ends at
    the latest. Raises ValueError where no division is possible.
    """
    N, C = len(right_N), len(right_C)
    ways: list[set[int]] = [{0}]  # after each chain: where it may end
    for c in range(C):
        ends: set[int] = set()
        for start in ways[-1]:
            least_M = np.full(len(step_MN), np.inf)
            for end in range(start + 1, N + 1):
                least_M = np.minimum(least_M, step_MN[:, end - 1])
                if (least_M < chain_MC[:, c]).any():
                    break
                if right_C[c] and right_N[end - 1] and (least_M == chain_MC[:, c]).all():
                    ends.add(end)
                if not right_N[end - 1]:
                    if not right_C[c]:
                        ends.add(end)
                    break
        ways.append(ends)
    if N not in ways[-1]:
        raise ValueError(f"{N} steps cannot be divided into {C} chains")
    end, cuts = N, [N]
    for c in reversed(range(1, C)):
        end = max(e for e in ways[c] if e < end and _is_chain(right_N, right_C[c], step_MN, chain_MC[:, c], e, end))
        cuts.append(end)
    return cuts[::-1]


def _is_chain(right_N, right: bool, step_MN, chain_M, start: int, end: int) -> bool:
    least_M = step_MN[:, start:end].min(axis=1)
    if right:
        return bool(right_N[start:end].all() and (least_M == chain_M).all())
    return bool(right_N[start : end - 1].all() and not right_N[end - 1] and (least_M >= chain_M).all())


def read(path: pathlib.Path) -> Split:
    """Returns a split. Raises ValueError where the models' labels differ, or steps cannot be divided into chains."""
    file = parse(path.read_bytes(), str(path))
    models = list(file)
    first = file[models[0]]
    right_N, right_C = np.array(first["step_correct"]), np.array(first["chain_correct"])
    if any(file[m]["step_correct"] != first["step_correct"] for m in models):
        raise ValueError(f"{path}: the models' labels differ: they did not score the same chains")
    step_MN = np.array([file[m]["step_scores"] for m in models])
    chain_MC = np.array([file[m]["chain_scores"] for m in models])
    ends = np.array(chains_of_file(right_N, right_C, step_MN, chain_MC))
    chain_N = np.searchsorted(ends, np.arange(len(right_N)), side="right")
    last_C = ends - np.r_[0, ends[:-1]] - 1
    return Split(
        chain_N, right_N, np.where(right_C, -1, last_C),
        dict(zip(models, step_MN, strict=True)), dict(zip(models, chain_MC, strict=True)),
        {m: file[m]["published"] for m in models},
    )  # fmt: skip


def number_of_step(split: Split) -> Float[np.ndarray, " N"]:
    """Returns minus the number of each step in its chain, by which a later one is the first error."""
    start_N = np.searchsorted(split.chain_N, split.chain_N)
    return -(np.arange(len(split.chain_N)) - start_N).astype(float)


def figures(splits: dict[str, Split], seed: int = 0) -> dict[str, Any]:
    """Returns all figures by split and model, with intervals over chains, and the pairs of models.

    An average over splits resamples the chains of each by themselves, the same ones for all models.
    """
    models = list(splits[TUNED_ON].step)
    scorers = {m: {s: split.step[m] for s, split in splits.items()} for m in models}
    scorers["number of the step"] = {s: number_of_step(split) for s, split in splits.items()}
    tuned = {
        m: best_threshold(splits[TUNED_ON].first_error_C, splits[TUNED_ON].by_chain(by_split[TUNED_ON]))
        for m, by_split in scorers.items()
    }
    result: dict[str, Any] = {}
    drawn_of: dict[tuple[str, str, str], Any] = {}
    apart: dict[str, dict[str, Draws | None]] = {m: {} for m in scorers}  # each split's F1, drawn with its own seed
    for number, (s, split) in enumerate(splits.items()):
        right_C = split.first_error_C < 0
        C = len(right_C)
        result[s] = {"chains": C, "right": int(right_C.sum()), "steps": len(split.right_N), "models": {}}
        for m, by_split in scorers.items():
            score_N = by_split[s]
            # Chains end at their first error, so later steps are right more often than earlier ones.
            rank_N = score_N if m in models else -score_N
            area = draws(lambda w, x=rank_N, sp=split: auroc(x, sp.right_N, w), split.chain_N, seed=seed)
            hit_C = right_at(split.first_error_C, split.by_chain(score_N), tuned[m])
            f1_of = functools.partial(lambda hit, sp, w: weighted_f1(hit, sp.first_error_C, w).f1, hit_C, split)
            f1 = draws(f1_of, np.arange(C), seed=seed)
            apart[m][s] = draws(f1_of, np.arange(C), seed=seed + number)
            drawn_of["step_auroc", s, m], drawn_of["f1", s, m] = area, f1
            row = {"step_auroc": interval(area).json(), "f1_tuned_on_gsm8k": interval(f1).json()}
            if m in models:
                half_C = right_at(split.first_error_C, split.by_chain(score_N), 0.5)
                whole = float(auroc(split.chain[m], right_C))
                row |= {
                    "chain_auroc": whole, "published": split.published[m],
                    "f1_at_half": float(weighted_f1(half_C, split.first_error_C, np.ones(C)).f1),
                    "ece": ece_interval(score_N, split.right_N, split.chain_N, seed=seed).json(),
                    "brier": float(brier(score_N, split.right_N).brier),
                }  # fmt: skip
            result[s]["models"][m] = row
    pairs = {}
    for key in ("step_auroc", "f1"):
        for i, a in enumerate(scorers):
            for b in list(scorers)[i + 1 :]:
                pairs.setdefault(key, {})[f"{a} less {b}"] = {
                    s: difference(drawn_of[key, s, a], drawn_of[key, s, b]).json() for s in splits
                }
    averages = {m: average for m in scorers if (average := average_draws(apart[m], list(splits))) is not None}
    for pair, by_split in pairs["f1"].items():
        a, b = pair.split(" less ")
        by_split["average"] = difference(averages[a], averages[b]).json()
    average = {m: interval(drawn).json() for m, drawn in averages.items()}
    filters = {m: _filtered(splits, m, seed) for m in models}
    return {"splits": result, "pairs": pairs, "tuned": tuned, "average_f1_tuned_on_gsm8k": average, "filter": filters}


def _filtered(splits: dict[str, Split], model: str, seed: int) -> dict[str, float | None]:
    """Returns what a conformal filter accepts of all splits' chains, calibrated on one random half, on the other.

    At most ERROR_RATE of what it accepts is wrong, for 90 % of calibration halves.
    """
    right_C = np.concatenate([split.first_error_C < 0 for split in splits.values()])
    score_C = np.concatenate([split.chain[model] for split in splits.values()])
    order = np.random.default_rng(seed).permutation(len(right_C))
    a, b = order[: len(order) // 2], order[len(order) // 2 :]
    threshold = accept_threshold(score_C[a], right_C[a], ERROR_RATE, confidence=0.9).threshold
    accepted = score_C[b] >= threshold
    return {
        "threshold": threshold if np.isfinite(threshold) else None, "accepted": float(accepted.mean()),
        "wrong": float((~right_C[b])[accepted].mean()) if accepted.any() else None, "right": float(right_C[b].mean()),
    }  # fmt: skip


def main(shared: pathlib.Path, out: pathlib.Path) -> None:
    """Measure the published scores and write the figures.

    Args:
        shared: The folder with `published_scores/`.
        out: The JSON file to write.
    """
    try:
        splits = {s: read(shared / f"published_scores/processbench_{s}.json") for s in SPLITS}
    except (ValueError, OSError) as error:
        raise SystemExit(f"error: {error}") from None
    result = figures(splits)
    out.parent.mkdir(parents=True, exist_ok=True)
    write_json(out, result)
    for s, split in result["splits"].items():
        print(f"\n{s}: {split['chains']} chains, {split['right']} right")
        for m, row in split["models"].items():
            area, f1 = row["step_auroc"], row["f1_tuned_on_gsm8k"]
            print(
                f"  {m:34} AUROC {100 * area['value']:.1f} [{100 * area['low']:.1f}, {100 * area['high']:.1f}]"
                f"  F1 {100 * f1['value']:.1f} [{100 * f1['low']:.1f}, {100 * f1['high']:.1f}]"
                + (f"  ECE {100 * row['ece']['value']:.1f}" if "ece" in row else "")
            )
    print("\naverage F1, threshold tuned on gsm8k; what the filter accepts, and how much of it is wrong")
    for m, average in result["average_f1_tuned_on_gsm8k"].items():
        kept = result["filter"].get(m)
        print(
            f"  {m:34} {100 * average['value']:.1f} [{100 * average['low']:.1f}, {100 * average['high']:.1f}]"
            + (f"  {100 * kept['accepted']:.1f} %, {100 * (kept['wrong'] or 0):.1f} %" if kept else "")
        )


if __name__ == "__main__":
    tyro.cli(main)
