"""PRMBench and Socratic-PRMBench: find the wrong steps of chains with one injected class of error.

PRMBench is by Song et al. 2025, arXiv 2501.03124; Socratic-PRMBench by Li et al. 2025, arXiv 2505.23474, with the same
layout and metrics, but other classes and steps without numbers.

As published (mr_eval/tasks/prmtest_classified/task.py and mr_visualize/.../form_latex_strs.ipynb of ssmisya/PRMBench):
a step is predicted right if its score is strictly above the scorer's threshold. If a scorer has an output `redundancy`
(ReasonEval, threshold 0.15), a step of `redundency` and `circular` is predicted right if that output is not above its
threshold. Steps are scored without their number ("Step 3.", "3.") and surrounding white space. F1 takes right steps as
positives, negative F1 wrong ones. PRMScore is their mean, from the counts of all steps of a class, or of all classes
together. `multi_solutions` has no wrong step, so its PRMScore is its F1. A group is the plain mean of its classes. A
few (`idx`, `classification`) occur twice; the first record counts.

Three differences from the published code: it writes -1 for 0 / 0, so a scorer that predicts every wrong step right and
no right step right gets an F1 of -1 instead of 0; the one step without text is left out here; and all models get the
same steps here, while the published wrappers of Math-Shepherd, Llemma and PURE keep the number, and Skywork's scores
the change from step to step.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Bool, Float

from jprm.methods.data.step_labels import PRMBENCH as READER
from jprm.methods.evaluate.benchmark import Benchmark, Report, Request
from jprm.methods.evaluate.blocks import Block, Cell, Note, PageModel, Table, best_first, left_out_words, words
from jprm.methods.evaluate.findings import Finding
from jprm.methods.evaluate.scored import NothingToMeasure, ScoreError, scores_of
from jprm.score.scale import PROBABILITY, Scale
from jprm.statistics import Interval, bootstrap, jsonable, ratio
from jprm.tree import ReasoningTree


@dataclasses.dataclass(frozen=True)
class Taxonomy:
    """A benchmark's error classes by group, as named in its files.

    If a scorer has the output `redundancy`, it decides the classes in `redundant`. Classes in `right_only` have no
    wrong step.
    """

    title: str
    groups: Mapping[str, Sequence[str]]
    redundant: Sequence[str] = ()
    right_only: Sequence[str] = ()

    @property
    def classes(self) -> tuple[str, ...]:
        return tuple(name for group in self.groups.values() for name in group)


PRMBENCH = Taxonomy(
    "PRMBench",
    {
        "simplicity": ("redundency", "circular"),  # the files' spelling
        "soundness": ("counterfactual", "step_contradiction", "domain_inconsistency", "confidence"),
        "sensitivity": ("missing_condition", "deception", "multi_solutions"),
    },
    redundant=("redundency", "circular"),
    right_only=("multi_solutions",),
)

SOCRATIC = Taxonomy(
    "Socratic-PRMBench",
    {
        "transformation": ("repeat_inconsistency", "repeat_counterfactual"),
        "decomposition": ("decomposition_unsoundness", "decomposition_redundancy", "decomposition_incompleteness"),
        "regather": ("regather_imprecision", "regather_redundancy", "regather_incompleteness"),
        "deduction": (
            "premise_unsoundness", "premise_incompleteness", "premise_redundancy",
            "conclusion_invalidity", "conclusion_inconsistency", "conclusion_counterfactual",
        ),
        "verification": ("detection_error", "correction_error"),
        "integration": (
            "integration_inconsistency", "integration_incompleteness", "integration_redundancy",
            "integration_unsoundness",
        ),
    },
)  # fmt: skip


class Confusion(NamedTuple):
    """Step counts by truth and prediction; arrays of one shape."""

    right_called_right: Any
    wrong_called_right: Any
    wrong_called_wrong: Any
    right_called_wrong: Any


def f1s(counts: Confusion) -> tuple[Any, Any]:
    """Returns F1 of right and of wrong steps (negative F1); NaN without such steps and predictions."""
    tp, fp, tn, fn = counts
    return ratio(2 * tp, 2 * tp + fp + fn), ratio(2 * tn, 2 * tn + fp + fn)


def prm_score(counts: Confusion) -> Any:
    """Returns PRMScore, the mean of F1 and negative F1; NaN if one of them is."""
    f1, negative_f1 = f1s(counts)
    return 0.5 * f1 + 0.5 * negative_f1


def prm_scores(count_RC4: Float[np.ndarray, "*R C 4"], taxonomy: Taxonomy = PRMBENCH) -> Float[np.ndarray, "*R K"]:
    """Returns PRMScore overall, per class and per group (K in all), for R resamples of C classes.

    The last axis has the counts in the order of `Confusion`. Classes in `taxonomy.right_only` have F1 alone. NaN if a
    class has no steps; its group is NaN too.
    """
    counts = Confusion(*np.moveaxis(count_RC4, -1, 0))
    overall_R = prm_score(Confusion(*(count_RC.sum(-1) for count_RC in counts)))
    class_RC = prm_score(counts)
    right_only = [taxonomy.classes.index(name) for name in taxonomy.right_only]
    class_RC[..., right_only] = f1s(counts)[0][..., right_only]
    members = ([taxonomy.classes.index(name) for name in group] for group in taxonomy.groups.values())
    groups = [class_RC[..., members_of].mean(-1) for members_of in members]
    return np.concatenate([overall_R[..., None], class_RC, np.stack(groups, -1)], -1)


def best_threshold(score_N: Float[np.ndarray, " N"], right_N: Float[np.ndarray, " N"]) -> tuple[float, float]:
    """Returns the threshold with the highest PRMScore over all steps, and that (in-sample) score; NaN without steps.

    A step is predicted right if its score is strictly above; `right_N` is 1 or 0.
    """
    value_U, index_N = np.unique(score_N, return_inverse=True)
    right_U, wrong_U = (np.bincount(index_N.reshape(-1), x_N, len(value_U)) for x_N in (right_N, 1 - right_N))
    # predicted wrong: every step up to the threshold, which is below all values or equal to one
    fn_K, tn_K = (np.r_[0, np.cumsum(x_U)] for x_U in (right_U, wrong_U))
    curve_K = prm_score(Confusion(fn_K[-1] - fn_K, tn_K[-1] - tn_K, tn_K, fn_K))
    if np.isnan(curve_K).all():
        return np.nan, np.nan
    best = int(np.nanargmax(curve_K))
    return float(value_U[best - 1] if best else np.nextafter(value_U[0], -np.inf)), float(curve_K[best])


def prmbench_report(
    trees: Sequence[ReasoningTree], seed: int, scale: Scale = PROBABILITY, taxonomy: Taxonomy = PRMBENCH
) -> dict[str, Any]:
    """Returns the figures of scored chains with `classification`, `idx` and labels of 0 or 1 (else raises ScoreError).

    A step is predicted right strictly above the threshold. Raises NothingToMeasure without chains.

    - `prm_score`, `groups` and each class's `prm_score` are `{"value", "low", "high"}` with 95 % intervals over source
      problems. A group is null unless all of its classes are present.
    - The report and each class have `n` chains, `n_steps`, `n_wrong`, `f1`, `negative_f1`, `accuracy` over all steps,
      `right_accuracy`, `wrong_accuracy` and `first_error_accuracy`: plain fractions, null if undefined.
    - `repeated` counts the records left out because an earlier one has the same class and `idx`; `threshold` and
      `redundancy_threshold` are those of `scale`.
    - `upper_bound` is the best in-sample threshold, without `redundancy`.
    - `baselines` are PRMScores of content-free predictions: all right, all wrong, and a fair coin (expected counts).
    """
    chains, classes = _chains(trees, scale, taxonomy), taxonomy.classes
    score_N = np.concatenate([chain.score_P for chain in chains])
    right_N = np.concatenate([chain.right_P for chain in chains])
    count_BC4, first_B = _counted(chains, len(classes))
    flat_BK = count_BC4.reshape(len(chains), -1)
    interval = bootstrap(
        lambda weight_RB: prm_scores((weight_RB @ flat_BK).reshape(-1, len(classes), 4), taxonomy),
        [chain.source for chain in chains],
        seed=seed,
    )
    columns = [Interval(*(x[i] for x in interval)).json() for i in range(1 + len(classes) + len(taxonomy.groups))]
    class_B = np.array([chain.class_index for chain in chains])
    best, top = best_threshold(score_N, right_N.astype(float))
    n_right, n_wrong = right_N.sum(), (~right_N).sum()
    baselines = {
        "always_right": Confusion(n_right, n_wrong, 0, 0),
        "always_wrong": Confusion(0, 0, n_wrong, n_right),
        "coin": Confusion(n_right / 2, n_wrong / 2, n_wrong / 2, n_right / 2),
    }
    return {
        "prm_score": columns[0],
        **_figures(count_BC4, first_B),
        "threshold": scale.threshold,
        "redundancy_threshold": scale.redundancy,
        "repeated": len(trees) - len(chains),
        "groups": dict(zip(taxonomy.groups, columns[1 + len(classes) :], strict=True)),
        "classes": {
            name: {"prm_score": columns[1 + c], **_figures(count_BC4[class_B == c], first_B[class_B == c])}
            for c, name in enumerate(classes)
            if (class_B == c).any()
        },
        "upper_bound": {"prm_score": jsonable(top), "threshold": jsonable(best)},
        "baselines": {name: {"prm_score": jsonable(prm_score(counts))} for name, counts in baselines.items()},
    }


def _counted(chains: Sequence[_Chain], classes: int) -> tuple[Float[np.ndarray, "B C 4"], Float[np.ndarray, " B"]]:
    """Returns each chain's `Confusion` by class, and whether its first error is found.

    The latter is NaN if the chain has no error.
    """
    count_BC4 = np.zeros((len(chains), classes, 4))
    first_B = np.full(len(chains), np.nan)
    for i, (of_class, _, _, right_P, called_P) in enumerate(chains):
        kind_P = np.where(right_P, np.where(called_P, 0, 3), np.where(called_P, 1, 2))
        count_BC4[i, of_class] = np.bincount(kind_P, minlength=4)
        if not right_P.all():
            first_B[i] = not called_P[np.argmin(right_P)]
    return count_BC4, first_B


def _figures(count_BC4: Float[np.ndarray, "B C 4"], first_B: Float[np.ndarray, " B"]) -> dict[str, Any]:
    tp, fp, tn, fn = counts = Confusion(*count_BC4.sum((0, 1)))
    f1, negative_f1 = f1s(counts)
    judged_B = first_B[~np.isnan(first_B)]
    accuracies = {
        "f1": f1,
        "negative_f1": negative_f1,
        "accuracy": ratio(tp + tn, sum(counts)),
        "right_accuracy": ratio(tp, tp + fn),
        "wrong_accuracy": ratio(tn, tn + fp),
        "first_error_accuracy": ratio(judged_B.sum(), len(judged_B)),
    }
    sizes = {"n": len(count_BC4), "n_steps": int(sum(counts)), "n_wrong": int(tn + fp)}
    return sizes | {key: jsonable(x) for key, x in accuracies.items()}


class _Chain(NamedTuple):
    class_index: int
    source: str
    score_P: Float[np.ndarray, " P"]
    right_P: Bool[np.ndarray, " P"]
    called_P: Bool[np.ndarray, " P"]  # right


def _chains(trees: Sequence[ReasoningTree], scale: Scale, taxonomy: Taxonomy) -> list[_Chain]:
    """Returns the first tree of each (class, idx)."""
    seen: dict[tuple[str, Any], ReasoningTree] = {}
    for i, tree in enumerate(trees, start=1):
        name, idx = tree.extra.get("classification"), tree.extra.get("idx")
        if name not in taxonomy.classes:
            raise ScoreError(f"record {i}: classification is {name!r}, not one of {', '.join(taxonomy.classes)}")
        if idx is None:
            raise ScoreError(f"record {i}: no idx, which tells repeated records")
        if any(node.label not in (0, 1) for node in tree.nodes):
            raise ScoreError(f"record {i}: labels are not 0 or 1 for every step")
        seen.setdefault((name, idx), tree)
    if not seen:
        raise NothingToMeasure(f"no {taxonomy.title} record")
    scores = scores_of(list(seen.values()), [f"{name} {idx}" for name, idx in seen])
    return [
        _Chain(
            class_index=taxonomy.classes.index(name),
            source=str(tree.extra.get("original_question", tree.problem)),
            score_P=score_P,
            right_P=np.array([node.label for node in tree.nodes]) == 1,
            called_P=_called_right(tree, score_P, name in taxonomy.redundant, scale),
        )
        for ((name, _), tree), score_P in zip(seen.items(), scores, strict=True)
    ]


def _called_right(tree: ReasoningTree, score_P: np.ndarray, redundant: bool, scale: Scale) -> Bool[np.ndarray, " P"]:
    if scale.redundancy is None or not redundant:
        return score_P > scale.threshold
    return np.array([node.outputs["redundancy"] for node in tree.nodes]) <= scale.redundancy


def figures(taxonomy: Taxonomy, request: Request) -> Report:
    """Returns `prmbench_report` with `too_long`, the number of records left out as too long."""
    return prmbench_report(request.trees, request.seed, request.scale, taxonomy) | {"too_long": request.left_out}


def tables(taxonomy: Taxonomy, report: Report) -> Iterator[Table]:
    columns = ("", "PRMScore [95 %]", "F1", "negative F1", "right steps", "wrong steps", "first errors")
    keys = ("f1", "negative_f1", "right_accuracy", "wrong_accuracy", "first_error_accuracy")
    chains = {"all": report, **{f"  {words(key)}": row for key, row in report["classes"].items()}}
    best = f"best threshold of these chains, {report['upper_bound']['threshold']:.4g}"
    trivial = {best: report["upper_bound"], **report["baselines"]}
    rows: list[list[Cell] | None] = [
        [label, row["prm_score"], *(row[key] for key in keys)] for label, row in chains.items()
    ]
    rows += [None, *([label, figure, *[""] * 5] for label, figure in report["groups"].items())]
    rows += [None, *([words(label), row["prm_score"], *[""] * 5] for label, row in trivial.items())]
    title = f"{taxonomy.title}: {report['n']} chains, {report['n_steps']} steps, {report['n_wrong']} wrong"
    yield Table(title + left_out_words(report), columns, rows)


def section(name: str, models: Sequence[PageModel]) -> Iterator[Block]:
    reports = {model.name: model.results[name] for model in models}
    first = next(iter(reports.values()))
    rows = [["all", *(report["prm_score"] for report in reports.values())]]
    rows += [[words(key), *(r["groups"][key] for r in reports.values())] for key in first["groups"]]
    rows += [[words(key), *(r["classes"][key]["prm_score"] for r in reports.values())] for key in first["classes"]]
    for label, row in best_first(first["baselines"], "prm_score").items():
        rows.append([label, *[row["prm_score"]] * len(reports)])
    yield Table("PRMScore, %", ("", *reports), rows)
    yield Note("PRMScore is the mean of F1 over right steps and F1 over wrong steps, as published.")


def findings(name: str, title: str, results: Mapping[str, Any]) -> Iterator[Finding]:
    score, rows = results[name]["prm_score"], results[name]["baselines"]
    best = max(rows, key=lambda key: rows[key]["prm_score"] or 0.0)
    base = rows[best]["prm_score"] or 0.0
    less = {key: x if x is None else x - base for key, x in score.items()}
    yield Finding(f"{title}, PRMScore", score, words(best), less)


def left_out(title: str, report: Report) -> Iterator[tuple[str, int]]:
    """Yields one pair: a description, and the number of repeated records that the figures leave out."""
    yield f"{title}: repeated records", report["repeated"]


def _benchmark(name: str, taxonomy: Taxonomy, **files: Any) -> Benchmark:
    title = taxonomy.title
    return Benchmark(
        name=name,
        title=title,
        tables=functools.partial(tables, taxonomy),
        figures=functools.partial(figures, taxonomy),
        section=functools.partial(section, name),
        findings=functools.partial(findings, name, title),
        left_out=functools.partial(left_out, title),
        **files,
    )


BENCHMARK = _benchmark(
    "prmbench", PRMBENCH, reader="prmbench",
    standard=[
        *(
            f"prmbench/prm800k_{part}_4o_{name}.jsonl"
            for part in ("test_p1", "test_p2", "train_p1_first400")
            for name in PRMBENCH.classes
            if name not in PRMBENCH.right_only
        ),
        "prmbench/prm_test_p12_multi_solutions.jsonl",
    ],
)  # fmt: skip
SOCRATIC_PRMBENCH = _benchmark(
    "socratic_prmbench", SOCRATIC, reader=READER, reading={"outside": "ignore", "empty": "drop"},
    standard=[f"socratic_prmbench/test_{name}.jsonl" for name in SOCRATIC.classes],
)  # fmt: skip
