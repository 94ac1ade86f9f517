"""ProcessBench (Zheng et al. 2024, arXiv 2412.06559): find the first wrong step of a chain, if any.

The prediction is the first step with a score below the threshold, or -1. `error_accuracy` is the fraction of chains
with an error for which the prediction is exactly the first error. `correct_accuracy` is the fraction of error-free
chains with prediction -1. F1 is the harmonic mean of the two (not of precision and recall).

A chain is predicted correctly for the thresholds of one interval (low, high]. If its first error is step e, low is the
score of step e and high the smallest score before it (infinite for e = 0). If it has no error, low is -inf and high its
smallest score. So F1 at every threshold needs only two sorts.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Bool, Float, Int

from jprm import statistics
from jprm.methods.evaluate import baselines
from jprm.methods.evaluate.benchmark import Benchmark, Report, Request, scale_of
from jprm.methods.evaluate.blocks import Block, Cell, Note, PageModel, Table, left_out_words, percent, words
from jprm.methods.evaluate.findings import Finding
from jprm.methods.evaluate.scored import F1, NothingToMeasure, ScoreError, ahead, f1_of, or_none, scores_of, weighted_f1
from jprm.statistics import Draws, draws, jsonable, numbered
from jprm.tree import ReasoningTree

Scores = Sequence[Float[np.ndarray, " _"]]
"""One array of step scores per chain."""

Scored = Mapping[str, Sequence[ReasoningTree]]
"""Scored chains by file, with `first_error` in their `extra`."""

FOLDS = 5
"""Folds of the cross-fitted threshold; each fold uses a threshold tuned on the others."""


def right_interval(
    first_error_N: Int[np.ndarray, " N"], scores: Scores
) -> tuple[Float[np.ndarray, " N"], Float[np.ndarray, " N"]]:
    """Returns the thresholds (low, high] for which each chain is predicted correctly; high <= low if it never is.

    `first_error_N` is an index, or -1 if every step is right. Steps below the threshold are predicted wrong.
    """
    low_N, high_N = np.full(len(scores), -np.inf), np.full(len(scores), np.inf)
    for i, (error, score_P) in enumerate(zip(first_error_N, scores, strict=True)):
        if error >= 0:
            low_N[i] = score_P[error]
        high_N[i] = np.min(score_P[:error] if error >= 0 else score_P, initial=np.inf)
    return low_N, high_N


def right_at(first_error_N: Int[np.ndarray, " N"], scores: Scores, threshold: float) -> Bool[np.ndarray, " N"]:
    """Returns whether each chain is predicted correctly at a threshold, also an infinite one (`right_interval`)."""
    low_N, high_N = right_interval(first_error_N, scores)
    return ((low_N < threshold) | (np.asarray(first_error_N) < 0)) & (threshold <= high_N)


def f1_curve(first_error_N: Int[np.ndarray, " N"], scores: Scores) -> tuple[Float[np.ndarray, " K"], F1]:
    """Returns, in rising order, one threshold for every distinct set of predictions, and F1 there.

    Predictions only change at the ends of the chains' intervals, so the thresholds are the midpoint of each gap, one
    below all ends and one above. F1 is NaN if no chain, or every chain, has an error.
    """
    first_error_N = np.asarray(first_error_N)
    low_N, high_N = right_interval(first_error_N, scores)
    error_N, some_N = first_error_N >= 0, low_N < high_N
    end_K = np.unique(np.r_[low_N[some_N], high_N[some_N]])
    end_K = end_K[np.isfinite(end_K)]
    if not len(end_K):
        end_K = np.zeros(1)  # every chain is right, or wrong, whatever the threshold
    middle_K = end_K[:-1] + np.diff(end_K) / 2
    middle_K = np.where(middle_K > end_K[:-1], middle_K, end_K[1:])  # neighbouring floats have no middle
    threshold_K = np.r_[end_K[0], middle_K, np.nextafter(end_K[-1], np.inf)]

    def accuracy(of_N):
        low = np.searchsorted(np.sort(low_N[of_N & some_N]), threshold_K)
        high = np.searchsorted(np.sort(high_N[of_N & some_N]), threshold_K)
        return (low - high) / of_N.sum() if of_N.any() else np.full(len(threshold_K), np.nan)

    return threshold_K, f1_of(accuracy(error_N), accuracy(~error_N))


def best_threshold(first_error_N: Int[np.ndarray, " N"], scores: Scores) -> float:
    """Returns the lowest threshold with the highest F1, for tuning on a calibration split.

    Raises NothingToMeasure unless there are chains with an error and without.
    """
    threshold_K, curve = f1_curve(first_error_N, scores)
    if np.isnan(curve.f1).all():
        raise NothingToMeasure("a threshold needs chains with an error and chains without one to be tuned on")
    return float(threshold_K[np.argmax(curve.f1)])


def cross_fit(
    first_error_N: Int[np.ndarray, " N"], scores: Scores, problems: Sequence[str], seed: int, folds: int = FOLDS
) -> tuple[Bool[np.ndarray, " N"], list[float]]:
    """Returns whether each chain is predicted correctly with cross-fitted thresholds, and the threshold of each fold.

    Folds are split by problem, so no threshold is used on a chain with a problem it was tuned on. Raises
    NothingToMeasure if there are fewer problems than folds, or the other folds lack chains with or without an error.
    """
    first_error_N = np.asarray(first_error_N)
    problem_N = numbered(problems)
    n_problems = int(problem_N.max(initial=-1)) + 1
    if n_problems < folds:
        raise NothingToMeasure(f"{n_problems} problems cannot be dealt to {folds} folds")
    fold_N = (np.random.default_rng(seed).permutation(n_problems) % folds)[problem_N]
    right_N, thresholds = np.zeros(len(scores), bool), []
    for fold in range(folds):
        inside, outside = np.flatnonzero(fold_N == fold).tolist(), np.flatnonzero(fold_N != fold).tolist()
        thresholds.append(best_threshold(first_error_N[outside], [scores[i] for i in outside]))
        right_N[inside] = right_at(first_error_N[inside], [scores[i] for i in inside], thresholds[-1])
    return right_N, thresholds


def processbench_report(
    scored: Scored, calibration: str, seed: int, threshold: float = 0.5
) -> dict[str, dict[str, Any]]:
    """Returns F1 by file at four thresholds (`threshold`, tuned, cross-fitted, best), with baselines.

    - `f1`, `f1_low`, `f1_high`, `error_accuracy` and `correct_accuracy` of a file are at `threshold`; `n`, `n_error`
      and `n_correct` count its chains.
    - `tuned` uses the best threshold on the file `calibration`, for the scores and for each baseline, and has that
      `threshold` and `calibrated_on`; in that file itself, `in_sample` is true. It is null unless that file has chains
      with and without an error.
    - `cross_fit` tunes on the file itself, but never on the problem of the predicted chain; null if the file is too
      small. `thresholds` has one per fold.
    - `baselines`: `always_correct`, `always_first_step`, and scorers (e.g. `position`) with their tuned figures (not
      nested) and `cross_fit`.
    - `upper_bound` has the best in-sample `threshold` and its `f1`.
    - `less`, in `tuned` and `cross_fit`, is `ahead` of the best baseline with the same tuning.

    Intervals resample problems and keep thresholds fixed. F1 is null in a file whose chains all have errors, or all are
    right. Raises ScoreError if `scored` lacks `calibration`, or a `first_error` or score is missing.
    """
    if calibration not in scored:
        raise ScoreError(f"calibration split {calibration!r} is not among the files {sorted(scored)}")
    chains: dict[str, dict[str, Any]] = {name: _chains(name, trees) for name, trees in scored.items()}
    trivial = {name: baselines.of_steps(trees) for name, trees in scored.items()}
    shared = set.intersection(*map(set, trivial.values()))  # a file may be too small for one
    names = [name for name in baselines.STEPS if name in shared]
    for name, file in chains.items():
        file |= {key: trivial[name][key] for key in names}
    tuned_on = chains[calibration]
    tuned = {key: or_none(best_threshold, tuned_on["first_error"], tuned_on[key]) for key in ("scores", *names)}
    return {
        name: _file_report(
            file, tuned, {"calibrated_on": calibration, "in_sample": name == calibration}, threshold, seed
        )
        for name, file in chains.items()
    }


def average_f1(
    scored: Scored, calibration: str, seed: int, files: Sequence[str], threshold: float = 0.5
) -> dict[str, Any]:
    """Returns mean F1 over `files`: `half` (at `threshold`), `tuned` on the file `calibration`, and `cross_fit`.

    Each is `{"value", "low", "high"}`, with problems resampled within each file (null values if a file has no F1);
    `None` if a threshold cannot be tuned. Raises KeyError if `scored` lacks `calibration` or one of `files`,
    and ScoreError if a `first_error` or score is missing.
    """
    drawn = f1_draws(scored, calibration, seed, threshold)
    averages = {kind: average_draws(by_file, files) for kind, by_file in drawn.items()}
    return {kind: average and statistics.interval(average).json() for kind, average in averages.items()}


def average_draws(by_file: Mapping[str, Draws | None], files: Sequence[str]) -> Draws | None:
    """Returns the plain mean over `files` of one kind of `f1_draws`, or `None` unless every file has it."""
    of_files = [drawn for name in files if (drawn := by_file[name]) is not None]
    if len(of_files) < len(files):
        return None
    value, drawn_R = (np.mean([drawn[i] for drawn in of_files], 0) for i in (0, 1))
    return Draws(value, drawn_R, sum(drawn.groups for drawn in of_files))


def f1_draws(scored: Scored, calibration: str, seed: int, threshold: float = 0.5) -> dict[str, dict[str, Any]]:
    """Returns F1 and its bootstrap draws (`jprm.statistics.draws`) as `{kind of threshold: {file: draws}}`.

    Kinds are `half` (the model's `threshold`), `tuned` on the file `calibration` (None for all files if it does not
    allow tuning), and `cross_fit` (None for a file that does not). The resamples depend only on the seed, the order of
    the files and of their problems: if these are equal, the draws of two models can be subtracted. Raises KeyError if
    `scored` lacks `calibration`, and ScoreError if a `first_error` or score is missing.
    """
    chains = {name: _chains(name, trees) for name, trees in scored.items()}
    tuned = or_none(best_threshold, chains[calibration]["first_error"], chains[calibration]["scores"])
    by_kind: dict[str, dict[str, Any]] = {"half": {}, "tuned": {}, "cross_fit": {}}
    for number, (name, file) in enumerate(chains.items()):
        first_error_N, scores = file["first_error"], file["scores"]
        folds = or_none(cross_fit, first_error_N, scores, file["problem"], seed)
        right = {
            "half": right_at(first_error_N, scores, threshold),
            "tuned": None if tuned is None else right_at(first_error_N, scores, tuned),
            "cross_fit": folds and folds[0],
        }
        for kind, right_N in right.items():
            by_kind[kind][name] = None if right_N is None else _drawn(file, right_N, seed + number)
    return by_kind


def _drawn(file: Mapping[str, Any], right_N: Bool[np.ndarray, " N"], seed: int) -> Draws:
    return draws(lambda w: weighted_f1(right_N, file["first_error"], w).f1, file["problem"], seed=seed)


ENDS = {"always_correct": -np.inf, "always_first_step": np.inf}
"""Thresholds of content-free predictions."""


def _file_report(
    file: Mapping[str, Any], tuned: Mapping[str, float | None], about: Mapping[str, Any], threshold: float, seed: int
) -> dict[str, Any]:
    """Returns the report of a file. `tuned`: the threshold of each scorer, if tuning was possible."""
    first_error_N = file["first_error"]

    def figures(right_N: Bool[np.ndarray, " N"], **more: Any) -> dict[str, Any]:
        point = weighted_f1(right_N, first_error_N, np.ones(len(right_N)))
        between = statistics.interval(_drawn(file, right_N, seed))
        by_key = point._asdict() | {"f1_low": between.low, "f1_high": between.high}
        return {key: jsonable(value) for key, value in by_key.items()} | more

    ends = {name: right_at(first_error_N, file["position"], end) for name, end in ENDS.items()}
    right, rows = {"tuned": dict(ends), "cross_fit": dict(ends)}, {"tuned": {}, "cross_fit": {}}
    for scorer, cut in tuned.items():
        if cut is not None:
            right["tuned"][scorer] = right_N = right_at(first_error_N, file[scorer], cut)
            rows["tuned"][scorer] = figures(right_N, threshold=jsonable(cut), **about)
        if (folds := or_none(cross_fit, first_error_N, file[scorer], file["problem"], seed)) is not None:
            right["cross_fit"][scorer] = folds[0]
            rows["cross_fit"][scorer] = figures(folds[0], thresholds=jsonable(np.array(folds[1])))
    for kind, row in rows.items():
        if row:
            drawn = {name: _drawn(file, right_N, seed) for name, right_N in right[kind].items()}
            row["scores"]["less"] = ahead(drawn.pop("scores"), drawn)
    threshold_K, curve = f1_curve(first_error_N, file["scores"])
    top = 0 if np.isnan(curve.f1).all() else int(np.nanargmax(curve.f1))
    return {
        **figures(right_at(first_error_N, file["scores"], threshold), threshold=jsonable(threshold)),
        "n": len(first_error_N),
        "n_error": int((first_error_N >= 0).sum()),
        "n_correct": int((first_error_N < 0).sum()),
        "tuned": rows["tuned"].get("scores"),
        "cross_fit": rows["cross_fit"].get("scores"),
        "upper_bound": {"f1": jsonable(curve.f1[top]), "threshold": jsonable(threshold_K[top]), "in_sample": True},
        "baselines": {
            **{name: figures(right_N, threshold=None) for name, right_N in ends.items()},
            **{
                scorer: rows["tuned"].get(scorer, {}) | {"cross_fit": rows["cross_fit"].get(scorer)}
                for scorer in tuned
                if scorer != "scores"
            },
        },
    }


def _chains(name: str, trees: Sequence[ReasoningTree]) -> dict[str, Any]:
    for i, tree in enumerate(trees, start=1):
        error = tree.extra.get("first_error")
        if not isinstance(error, int) or isinstance(error, bool) or not -1 <= error < len(tree.nodes):
            raise ScoreError(f"{name}: record {i}: first_error is {error!r}, not -1 or the index of a step")
    return {
        "problem": [tree.problem for tree in trees],
        "first_error": np.array([tree.extra["first_error"] for tree in trees], int),
        "scores": scores_of(trees, [f"{name}: record {i}" for i in range(1, len(trees) + 1)]),
    }


SPLITS = ("gsm8k", "math", "olympiadbench", "omnimath")

ZHENG = "arXiv 2412.06559"
ZHANG = "arXiv 2501.07301"
ZHAO = "arXiv 2504.00891"

PROCESSBENCH = (
    # name, kind, F1 of the splits in the order of SPLITS, average of the four, source
    ("Math-Shepherd-PRM-7B", "PRM", (47.9, 29.5, 24.8, 23.8), 31.5, ZHENG),
    ("RLHFlow-PRM-Mistral-8B", "PRM", (50.4, 33.4, 13.8, 15.8), 28.4, ZHENG),
    ("RLHFlow-PRM-Deepseek-8B", "PRM", (38.8, 33.8, 16.9, 16.9), 26.6, ZHENG),
    ("Skywork-PRM-1.5B", "PRM", (59.0, 48.0, 19.3, 19.2), 36.4, ZHENG),
    ("Skywork-PRM-7B", "PRM", (70.8, 53.6, 22.9, 21.0), 42.1, ZHENG),
    ("EurusPRM-Stage2", "PRM", (47.3, 35.7, 21.2, 20.9), 31.3, ZHANG),
    ("Qwen2.5-Math-7B-Math-Shepherd", "PRM", (62.5, 31.6, 13.7, 7.7), 28.9, ZHANG),
    ("Qwen2.5-Math-7B-PRM800K", "PRM", (68.2, 62.6, 50.7, 44.3), 56.5, ZHENG),
    ("Qwen2.5-Math-PRM-7B", "PRM", (82.4, 77.6, 67.5, 66.3), 73.5, ZHANG),
    ("Qwen2.5-Math-PRM-72B", "PRM", (87.3, 80.6, 74.3, 71.1), 78.3, ZHANG),
    ("Qwen2.5-Math-RM-72B", "ORM", (43.5, 47.2, 37.6, 27.4), 38.9, ZHANG),
    ("GenPRM-7B (pass@1)", "generative PRM", (78.7, 80.3, 72.2, 69.8), 75.2, ZHAO),
    ("GPT-4o", "prompted critic", (79.2, 63.6, 51.4, 53.5), 61.9, ZHENG),
    ("o1-mini", "prompted critic", (93.2, 88.9, 87.2, 82.4), 87.9, ZHENG),
)
"""F1 of published models, in per cent, for comparison.

Measured by their authors, each at its own threshold. Prompted models (critics) read the whole chain and write an
analysis, at many times the cost.
"""

THRESHOLDS = {"half": "untuned threshold", "tuned": "tuned threshold", "cross_fit": "cross-fitted threshold"}

NOT_TUNED = "not tuned: the calibration file lacks chains with an error, or chains without one"


def figures(request: Request) -> Report:
    """Returns `files` (`processbench_report`), their `average` (`average_f1`), and `calibrate`, the file for tuning.

    `request.calibrate` must have exactly one file. Each file gets `too_long`, the records left out.
    """
    (tuned_on,) = request.calibrate
    chains = {**request.data, **request.calibrate}
    report = processbench_report(chains, tuned_on, request.seed, request.scale.threshold)
    return {
        "files": {name: report[name] | {"too_long": request.too_long.get(name, 0)} for name in request.data},
        "average": average_f1(chains, tuned_on, request.seed, list(request.data), request.scale.threshold),
        "calibrate": tuned_on,
    }


def foreseen(records: Mapping[str, Sequence[Mapping[str, Any]]], calibrate: Collection[str]) -> Iterator[str]:
    """Yields a sentence for each file without F1, in which all chains have errors or all are right.

    Each chain must have `first_error` (-1 if it is right). `calibrate` names files by which a threshold is tuned.
    """
    for name, chains in records.items():
        n_error = sum(chain["first_error"] >= 0 for chain in chains)
        if alike := _alike(n_error, len(chains) - n_error):
            alike += ", and no threshold can be tuned on it" if name in calibrate else ""
            yield f"ProcessBench {name}: {alike}"


def _alike(n_error: int, n_correct: int) -> str | None:
    if n_error and n_correct:
        return None
    return f"has no chains {'without' if n_error else 'with'} an error, so it has no F1"


def tables(report: Report) -> Iterator[Table]:
    # By hand: a file has seven rows of F1 at its own, tuned and best thresholds, each with the threshold.
    rows: list[list[Cell] | None] = []
    for name, file in report.items():
        named = {f"{name}, n = {file['n']}{left_out_words(file)}": file}
        if tuned := file["tuned"]:
            named[f"  tuned on {tuned['calibrated_on']}{' (in sample)' if tuned['in_sample'] else ''}"] = tuned
        named |= {"  cross-fitted": file["cross_fit"], "  oracle (best threshold in sample)": file["upper_bound"]}
        named |= {f"  {words(key)}": value for key, value in file["baselines"].items()}
        for label, row in named.items():
            if row and "f1" in row:  # neither is there for a threshold that could not be fitted
                cut = None if row.get("threshold") is None else f"{row['threshold']:.4g}"
                rows.append([label, _f1(row), row.get("error_accuracy"), row.get("correct_accuracy"), cut])
        rows.append(None)
    if not all(file["tuned"] for file in report.values()):
        rows.append([NOT_TUNED, None, None, None, None])
    yield Table("ProcessBench", ("", "F1 [95 %]", "error acc.", "correct acc.", "threshold"), rows)


def section(models: Sequence[PageModel]) -> Iterator[Block]:
    first = models[0].results["processbench"]["files"]
    # Published values are of ProcessBench's own chains.
    published = PROCESSBENCH if set(first) & set(SPLITS) else ()
    splits = list(dict.fromkeys([*(SPLITS if published else ()), *first]))
    rows: list[list[Cell]] = []
    for model in models:
        rows += _own_rows(model, splits)
    of_models = range(len(rows))
    trivial = []
    for key in next(iter(first.values()))["baselines"]:
        cells = [_f1(first[split]["baselines"][key]) if split in first else None for split in splits]
        trivial.append([f"baseline: {words(key)}", *cells, None, "this page"])
    rows += sorted(trivial, key=lambda row: -sum(cell["value"] or 0.0 for cell in row if isinstance(cell, Mapping)))
    for name, kind, values, average, source in published:
        cells = [f"{values[SPLITS.index(split)]:.1f}" if split in SPLITS else None for split in splits]
        rows.append([f"{name} ({kind})", *cells, f"{average:.1f}", source])
    yield Table("F1, %", ("", *splits, "average", "source"), rows, strong=of_models)
    yield Note(
        "F1 is the harmonic mean of two fractions: chains with an error whose first wrong step is named exactly, and"
        " chains without an error that are passed. The untuned threshold is 0.5, or what the model's adapter states. A"
        " tuned one comes from the named file and flatters that file. The cross-fitted one is tuned on other problems"
        " than it judges. The oracle is the best threshold of the very chains it is judged on, an upper bound. The"
        " average is over the four published splits, where these and no others are evaluated. Published rows are as"
        " their authors report them, each at its own threshold."
    )


def _own_rows(model: PageModel, splits: Sequence[str]) -> Iterator[list[Cell]]:
    report = model.results["processbench"]
    named = THRESHOLDS | {"tuned": f"threshold tuned on {report['calibrate']}", "oracle": "oracle, in sample"}
    for kind, label in named.items():
        key = {"oracle": "upper_bound"}.get(kind, kind)
        files = {name: file if kind == "half" else file[key] for name, file in report["files"].items()}
        if kind == "tuned" and not any(files.values()):
            yield [f"{model.name}, {NOT_TUNED}", *(None for _ in splits), None, "this page"]
            continue
        average = report["average"].get(kind) if set(files) == set(SPLITS) else None
        yield [f"{model.name}, {label}", *(_f1(files.get(split)) for split in splits), average, "this page"]


def findings(results: Mapping[str, Any]) -> Iterator[Finding]:
    """Yields the average over several files, and each file's F1 against the best trivial baseline.

    The threshold is tuned on another file, or else cross-fitted, or else untuned.
    """
    report, average = results["processbench"], results["processbench"]["average"]
    tuned_on = f"threshold tuned on {report['calibrate']}"
    if len(report["files"]) > 1:
        off_its_file = any(map(_off_its_file, report["files"].values()))
        kind = "tuned" if off_its_file else "cross_fit" if average["cross_fit"] is not None else "half"
        yield Finding(f"ProcessBench, mean F1, {tuned_on if off_its_file else THRESHOLDS[kind]}", average[kind])
    for name, file in report["files"].items():
        kind = "tuned" if _off_its_file(file) else "cross_fit"
        if alike := _alike(file["n_error"], file["n_correct"]):
            yield Finding(f"ProcessBench {name}", None, note=f"{alike}.", kind="open")
        elif (use := file[kind]) is None:
            note = "Too few problems to tune a threshold off the chains it judges."
            yield Finding(f"ProcessBench {name}, F1, {THRESHOLDS['half']}", _f1(file), note=note, kind="open")
        else:
            less = use.get("less")  # results of 0.1 have none
            what = f"ProcessBench {name}, F1, {tuned_on if kind == 'tuned' else THRESHOLDS[kind]}"
            note = f"At {file['threshold']:.4g} it is {percent(file['f1'])} %."
            yield Finding(what, _f1(use), words(less["baseline"]) if less else "", less, note)


def _off_its_file(file: Mapping[str, Any]) -> bool:
    return file["tuned"] is not None and not file["tuned"]["in_sample"]


def problem_draws(results: Mapping[str, Any], scores: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    tuned_on, files = results["processbench"]["calibrate"], list(results["processbench"]["files"])
    scored = {name: scores[name] for name in dict.fromkeys([*files, tuned_on])}
    drawn = f1_draws(scored, tuned_on, results["seed"], scale_of(results).threshold)
    for kind, wording in THRESHOLDS.items():
        for name in files:
            if drawn[kind][name] is not None:
                yield f"ProcessBench {name}, F1 {wording}", drawn[kind][name]
        average = average_draws(drawn[kind], files)
        if len(files) > 1 and average is not None:
            yield f"ProcessBench, average F1 {wording}", average


def _f1(row: Mapping[str, Any] | None) -> dict[str, Any]:
    row = row or {}
    return {"value": row.get("f1"), "low": row.get("f1_low"), "high": row.get("f1_high")}


BENCHMARK = Benchmark(
    name="processbench",
    title="ProcessBench",
    tables=tables,
    figures=figures,
    foreseen=foreseen,
    needs=("data", "calibrate"),
    one_calibration_file=True,
    reader="processbench",
    standard=tuple(f"processbench/{name}.json" for name in SPLITS),
    reports=lambda entry: [entry["files"]],
    section=section,
    findings=findings,
    problem_draws=problem_draws,
)
