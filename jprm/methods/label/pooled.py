"""Pools step labels from several sources by Dawid and Skene's model (`jprm.methods.label.crowd`)."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Float, Int

from jprm.io.jsonl import write_records
from jprm.io.outputs import check_output, write_json
from jprm.io.storage import path_of
from jprm.methods.evaluate.blocks import Table
from jprm.methods.label import crowd
from jprm.methods.label.jobs import labels_of, step_keys, threshold_of, trees_in
from jprm.statistics import Draws, draws, interval
from jprm.tree import ReasoningTree, chains_of, record_of, with_labels

Path = str | os.PathLike

WRONG, CORRECT = 0, 1

RESAMPLES = 200
"""Bootstrap resamples of problems for the intervals; the model is refitted to each."""


def label_pooled(
    files: Sequence[Path],
    output: Path,
    thresholds: Sequence[float | None],
    gold: Path | None = None,
    report: Path | None = None,
    seed: int = 0,
) -> dict[str, Any]:
    """Writes the first file's records, labelled with the pooled probability that each step is correct.

    Each file is a judge, named by its file name without the ending; there must be two or more. Labels of equal steps in
    a file that differ count as missing. The result has semantics `correctness`; chains and pools become trees
    (`nodes`). A step that no file labels stays unlabelled; a judged step in `gold` gets its gold label, 0 or 1. Returns
    the report (`pooled`), also written to `report` as JSON. `thresholds` must have an entry per file, and a last one if
    there is a gold file: the value below which a label is an error, `None` for the default of its semantics. `seed` is
    of the bootstrap. A repeated call computes anew and replaces both files, each in one step.

    Raises:
      FileNotFoundError: a file is absent; RecordError if a record is invalid.
      ValueError: duplicate file names, a file without a step of the first, no judged step with a gold label, or
        semantics without a threshold.
    """
    names = [path_of(file).stem for file in files]
    if len(set(names)) < len(names):
        raise ValueError(f"{', '.join(map(str, files))}: two judges of one name: rename a file")
    check_output(output, *files, *([gold] if gold else []))
    trees = list(trees_in(files[0]))
    verdicts_of = [_verdicts(trees_in(file), bound) for file, bound in zip(files, thresholds, strict=False)]
    known = {} if gold is None else _verdicts(trees_in(gold), thresholds[len(files)])
    steps = [step_keys(tree) for tree in trees]
    problem_of = {key: tree.problem for tree, keys in zip(trees, steps, strict=True) for key in keys.values()}
    judged = [key for key in problem_of if any(verdicts.get(key) is not None for verdicts in verdicts_of)]
    if not any(key in verdicts for verdicts in verdicts_of[1:] for key in problem_of):
        raise ValueError(f"{', '.join(map(str, files[1:]))}: have no step of {files[0]}: are these the same chains?")
    verdict_NJ = np.array(
        [[-1 if (v := verdicts.get(key)) is None else v for verdicts in verdicts_of] for key in judged]
    )
    index_of = {key: n for n, key in enumerate(judged)}
    gold_of = {key: v for key, v in known.items() if v is not None and key in index_of}
    if gold is not None and not gold_of:
        raise ValueError(f"{gold}: labels no step that a judge labels, so that nothing is corrected")
    index_K = np.array([index_of[key] for key in gold_of], int)
    gold_K = np.array([*gold_of.values()], int)
    figures, probability_N = pooled(verdict_NJ, names, [problem_of[key] for key in judged], gold_K, index_K, seed)
    labels = {key: float(p) for key, p in zip(judged, probability_N, strict=True)}

    def labelled() -> Iterator[dict[str, Any]]:
        for tree, keys in zip(trees, steps, strict=True):
            of_nodes = [labels.get(keys[i]) if i in keys else None for i in range(len(tree.nodes))]
            yield record_of(with_labels(tree, of_nodes, "correctness", "consensus"))

    write_records(output, labelled())
    if report is not None:
        write_json(report, figures)
    return figures


def _verdicts(trees: Iterator[ReasoningTree], threshold: float | None) -> dict[bytes, int | None]:
    """Returns a judge's verdict on each labelled step; `None` if the judge contradicts itself."""
    verdicts: dict[bytes, int | None] = {}
    for tree in trees:
        bound, keys = threshold_of(tree, threshold), step_keys(tree)
        for path in chains_of(tree):
            for i, label in zip(path, labels_of(tree, path, bound), strict=True):
                if label is not None:
                    verdict = CORRECT if label >= bound else WRONG
                    if verdicts.setdefault(keys[i], verdict) != verdict:
                        verdicts[keys[i]] = None
    return verdicts


def pooled(
    verdict_NJ: Int[np.ndarray, "N J"],
    names: Sequence[str],
    problems: Sequence[str],
    gold_K: Int[np.ndarray, " K"],
    index_K: Int[np.ndarray, " K"],
    seed: int,
) -> tuple[dict[str, Any], Float[np.ndarray, " N"]]:
    """Returns (report, each step's probability of being correct), with 95 % bootstrap intervals over problems.

    `verdict_NJ` is 1 (correct), 0 (wrong) or -1 (missing) for N steps by J judges, called `names`; `problems` are the N
    steps' problems, `gold_K` the gold labels (0, 1) of steps `index_K`, counted from 0. `seed` is the resampling's.

    The report has `judges`, by name: `verdicts` (count), `found`, the probability that it flags an incorrect step, and
    `false_alarm`, that it flags a correct one; `error_rate`, the fraction of incorrect steps; `alpha`, Krippendorff's;
    and the counts `steps`, `problems`, `gold`. Rates and `alpha` are {"value", "low", "high"}, null if undefined. With
    gold labels it also has `correction` ({"a", "b"}) and `error_rate_uncorrected`, and they correct the first three;
    else judges must be independent.

    Raises ValueError if a judge or a step has no verdict.
    """
    used_J = (verdict_NJ >= 0).any(0)
    if not used_J.all():
        raise ValueError(f"{names[int(np.argmin(used_J))]}: labels no step of the first file")

    def fitted(weight_N: np.ndarray | None) -> tuple[np.ndarray, np.ndarray]:
        """Returns all judges' figures followed by the error rate, and the probabilities."""
        model = crowd.dawid_skene(verdict_NJ, weight_N=weight_N)
        p_N, confusion_JCV = model.posterior_NC[:, CORRECT], model.confusion_JCV
        if len(gold_K):
            weight_K = None if weight_N is None else weight_N[index_K]
            p_N = crowd.corrected(p_N, *crowd.correction(p_N, gold_K, index_K, weight_K))
            confusion_JCV = crowd.matrices(verdict_NJ, p_N, gold_K, index_K, weight_N)
            p_N[index_K] = gold_K
        rate = np.average(1 - p_N, weights=weight_N)
        return np.append(confusion_JCV[:, :, WRONG].reshape(-1), rate), p_N

    value, probability_N = fitted(None)
    drawn = draws(lambda weight_RN: np.stack([fitted(w)[0] for w in weight_RN]), problems, RESAMPLES, seed=seed)
    figures_of = [interval(Draws(value[i], drawn.drawn_R[:, i], drawn.groups)).json() for i in range(len(value))]
    pairs_NVV = crowd.coincidences([[v for v in row if v >= 0] for row in verdict_NJ.tolist()])
    alpha = draws(lambda w: crowd.alpha_of(np.einsum("rn,nab->rab", w, pairs_NVV)), problems, RESAMPLES, seed=seed)
    judges: dict[str, Mapping[str, Any]] = {
        name: {"verdicts": int((verdict_NJ[:, j] >= 0).sum()), "found": figures_of[2 * j + WRONG],
               "false_alarm": figures_of[2 * j + CORRECT]}
        for j, name in enumerate(names)
    }  # fmt: skip
    figures: dict[str, Any] = {"steps": len(verdict_NJ), "problems": len(set(problems)), "gold": len(gold_K)}
    figures |= {"judges": judges, "error_rate": figures_of[-1], "alpha": interval(alpha, fraction=False).json()}
    if len(gold_K):
        model = crowd.dawid_skene(verdict_NJ)
        a, b = crowd.correction(model.posterior_NC[:, CORRECT], gold_K, index_K)
        figures |= {"correction": {"a": a, "b": b}, "error_rate_uncorrected": float(model.prior_C[WRONG])}
    return figures, probability_N


def table(figures: Mapping[str, Any]) -> Table:
    """Returns a table of the judges' reliability, from the figures of `label_pooled`."""
    rows: list[Any] = [
        [name, judge["verdicts"], judge["found"], judge["false_alarm"]] for name, judge in figures["judges"].items()
    ]
    rows += [None, ["steps that are wrong", figures["steps"], figures["error_rate"], None]]
    alpha = figures["alpha"]["value"]
    caption = "" if alpha is None else f"Krippendorff's alpha {alpha:.2f}."
    gold = figures["gold"]
    by = f"corrected by {gold} gold labels" if gold else "if they are independent of each other (no gold labels)"
    title = f"Judges of {figures['steps']} steps, {by}"
    return Table(title, ("", "verdicts", "errors called errors", "correct steps called errors"), rows, caption)
