"""Diagnostics: known failures of a PRM that its accuracy does not show.

Each diagnostic reports a size, its interval over problems, and `finding`: whether the interval lies beyond a margin
below which a flaw is too small to matter. With enough data every scorer differs from a perfect one.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from jprm.methods.evaluate.benchmark import Benchmark, Report, Request, Scorer
from jprm.methods.evaluate.best_of_n import Pools, chosen_curves, pools_of
from jprm.methods.evaluate.blocks import Block, Note, PageModel, Table, interval, percent, words
from jprm.methods.evaluate.edits import MEANING_KEPT, MEANING_LOST, edited
from jprm.methods.evaluate.findings import Finding
from jprm.methods.evaluate.options import Diagnostics
from jprm.methods.evaluate.run import by_name, format_of, model_of, scored_trees, scorer, source
from jprm.methods.evaluate.scored import ScoreError, scores_of
from jprm.score.aggregate import RULES
from jprm.score.scale import PROBABILITY, Scale
from jprm.statistics import auroc, bootstrap, jsonable, weighted_mean
from jprm.tree import ReasoningTree, RecordError

LEAST = 10
"""The problems of each kind that `wrong_process` needs. With fewer, bootstrap intervals are too narrow."""


def lowest_at_end(trees: Sequence[ReasoningTree], seed: int, margin: float = 0.05) -> dict[str, Any]:
    """Measures how often the last step scores lowest, beyond the rate expected by length.

    A scorer that judges the answer instead of the process has its minimum there (Zhang et al. 2025, arXiv 2501.07301,
    section 4.3). Only chains with at least two steps and only positive labels count, since errors do come late. `share`
    splits ties evenly; `expected` is the mean of 1 / length, the rate of a scorer that ignores position; `excess` is
    `share` minus `expected`, as `{"value", "low", "high"}`. A finding is an `excess` interval above `margin`. Also
    returns `n`, the number of chains that count, `margin` and `finding` (bool). Raises ScoreError if no chain counts,
    or one lacks a score.
    """
    chains = [
        tree for tree in trees
        if len(tree.nodes) > 1 and all(node.label is not None and node.label > 0 for node in tree.nodes)
    ]  # fmt: skip
    if not chains:
        raise ScoreError("no chain of two steps or more whose labels are all right")
    lowest = [score_P == score_P.min() for score_P in scores_of(chains)]
    share_N = np.array([lowest_P[-1] / lowest_P.sum() for lowest_P in lowest])
    expected_N = np.array([1 / len(tree.nodes) for tree in chains])
    problems = [tree.problem for tree in chains]
    excess = bootstrap(lambda w: weighted_mean(share_N - expected_N, w), problems, seed=seed, fraction=False)
    return {
        "n": len(chains),
        "share": jsonable(share_N.mean()),
        "expected": jsonable(expected_N.mean()),
        "excess": excess.json(),
        "margin": margin,
        "finding": bool(excess.low > margin),
    }


def length_slopes(pools: Pools, seed: int, margin: float = 0.1) -> dict[str, dict[str, Any]]:
    """Measures how chain scores (as vote weights in [0, 1]) change with length, among each problem's correct samples.

    Problems differ in length and difficulty, and incorrect samples may be longer for good reason. So only correct
    samples count, with lengths and scores centred per problem. By rule: `slope` per step (`None` if lengths are equal),
    `correlation` with an interval, `margin`, and `finding` (bool), if the interval lies further than `margin` from 0.

    A product falls with length by construction, and a minimum over more steps is lower: a finding for `prod` or `min`
    alone concerns the rule, for `mean` or `last` the scorer. Raises ScoreError if no sample is correct.
    """
    problem_P1 = np.arange(len(pools.problem))[:, None]
    some_PN = pools.correct_PN >= 0.5
    if not some_PN.any():
        raise ScoreError("no correct sample in any pool: nothing to compare lengths among")
    problem_M = np.broadcast_to(problem_P1, some_PN.shape)[some_PN]
    length_M = _centred(pools.steps_PN[some_PN].astype(float), problem_M)
    report = {}
    for rule in RULES:
        score_M = _centred(np.exp(pools.log_weight[rule][some_PN]), problem_M)
        moments_M3 = np.stack([length_M * length_M, length_M * score_M, score_M * score_M], 1)
        moments_M3[:, 2] *= np.abs(score_M) > 1e-7  # smaller values are float32 rounding

        def correlation(weight_RM, moments_M3=moments_M3):
            ll_R, ls_R, ss_R = (weight_RM @ moments_M3).T
            with np.errstate(invalid="ignore", divide="ignore"):
                return np.where((ll_R > 0) & (ss_R > 0), ls_R / np.sqrt(ll_R * ss_R), np.where(ll_R > 0, 0.0, np.nan))

        correlated = bootstrap(correlation, [pools.problem[p] for p in problem_M], seed=seed, fraction=False)
        total = moments_M3.sum(0)
        report[rule] = {
            "slope": jsonable(total[1] / total[0]) if total[0] > 0 else None,
            "correlation": correlated.json(),
            "margin": margin,
            "finding": bool(correlated.low > margin or correlated.high < -margin),
        }
    return report


def wrong_process(trees: Sequence[ReasoningTree], threshold: float, seed: int, margin: float = 0.1) -> dict[str, Any]:
    """Returns whether wrong steps are detected in ProcessBench chains with a correct final answer.

    Every chain must have `first_error` (-1: all steps are right); an answer of unknown correctness counts as incorrect.
    `detected` is the fraction of chains with a correct answer and a wrong step that have a step below `threshold`;
    `detected_wrong_answer` is the same for an incorrect answer, and `false_alarms` for error-free chains. `auroc` ranks
    correct-answer chains with an error below those without, by their lowest score; `auroc_wrong_answer` does so for
    incorrect answers. `gap` is the latter minus `auroc`. All of these are `{"value", "low", "high"}`. Also returns `n`
    (correct answers with a wrong step), `threshold`, `margin` and `finding` (bool).

    A finding, i.e. the scorer sees the answer instead of the process: the interval of `auroc` lies below one half plus
    `margin`, or the interval of `gap` above `margin`. The gap counts only if at least `LEAST` problems have an
    incorrect answer. Raises ScoreError if fewer than `LEAST` problems have a correct answer with a wrong step, or
    without one.
    """
    low_N = np.array([score_P.min() for score_P in scores_of(trees)])
    error_N = np.array([tree.extra["first_error"] >= 0 for tree in trees], bool)
    right_N = np.array([tree.nodes[-1].correct for tree in trees], bool)
    problems = [tree.problem for tree in trees]
    clean_N, hidden_N, open_N = right_N & ~error_N, right_N & error_N, ~right_N & error_N
    hidden, clean, wrong = (len({problems[i] for i in np.flatnonzero(of_N)}) for of_N in (hidden_N, clean_N, open_N))
    if min(hidden, clean) < LEAST:
        counts = f"{hidden} problems with a correct answer and a wrong step, {clean} with a correct answer and none"
        raise ScoreError(f"{counts}: {LEAST} of each are needed")

    def flagged(of_N):
        chosen = np.flatnonzero(of_N)
        low, groups = low_N[chosen] < threshold, [problems[i] for i in chosen]
        return bootstrap(lambda w: weighted_mean(low, w), groups, seed=seed).json()

    def area(of_N, weight_RN):
        return auroc(low_N, clean_N, weight_RN * (clean_N | of_N))

    hidden_area = bootstrap(lambda w: area(hidden_N, w), problems, seed=seed)
    gap = bootstrap(lambda w: area(open_N, w) - area(hidden_N, w), problems, seed=seed, fraction=False)
    return {
        "n": int(hidden_N.sum()),
        "threshold": threshold,
        "detected": flagged(hidden_N),
        "detected_wrong_answer": flagged(open_N),
        "false_alarms": flagged(clean_N),
        "auroc": hidden_area.json(),
        "auroc_wrong_answer": bootstrap(lambda w: area(open_N, w), problems, seed=seed).json(),
        "gap": gap.json(),
        "margin": margin,
        "finding": bool(hidden_area.high < 0.5 + margin or (wrong >= LEAST and gap.low > margin)),
    }


def over_optimisation(pools: Pools, seed: int, margin: float = 0.0) -> dict[str, dict[str, Any]]:
    """Returns whether choosing among more samples makes best-of-n worse, by rule (Gao et al. 2022, arXiv 2210.10760).

    `value` is the exact expected accuracy for `n` = 1, 2, ..., and `peak` the best n. `drop` is the loss from the peak
    to the largest n, `{"value", "low", "high"}` over problems. Since a maximum is also high by luck, each half of the
    problems uses the peak of the other half. `finding` (bool) is whether all of this interval lies above `margin`,
    which is also a key.

    Raises ScoreError if scores depend on the whole pool.
    """
    if pools.of_pool:
        raise ScoreError("a score depends on all samples of its pool, so there is no curve over fewer")
    n_max = int(pools.size_P.min())
    number = {
        problem: i for i, problem in enumerate(dict.fromkeys(pools.problem))
    }  # pools of one problem stay together
    fold_P = (np.random.default_rng(seed).permutation(len(number)) % 2)[[number[x] for x in pools.problem]]
    report = {}
    for rule, value_Pn in chosen_curves(pools).items():
        drop_P = np.zeros(len(value_Pn))
        for fold in (0, 1):
            if (fold_P != fold).any():
                peak = int(np.argmax(value_Pn[fold_P != fold].mean(0)))
                drop_P[fold_P == fold] = (value_Pn[:, peak] - value_Pn[:, -1])[fold_P == fold]
        drop = bootstrap(lambda w, drop_P=drop_P: weighted_mean(drop_P, w), pools.problem, seed=seed, fraction=False)
        curve_n = value_Pn.mean(0)
        report[rule] = {
            "n": list(range(1, n_max + 1)),
            "value": jsonable(curve_n),
            "peak": int(np.argmax(curve_n)) + 1,
            "drop": drop.json(),
            "margin": margin,
            "finding": bool(drop.low > margin),
        }
    return report


def diagnostics_report(
    chains: Sequence[ReasoningTree] | None,
    pools: Mapping[str, Sequence[ReasoningTree]],
    threshold: float,
    seed: int,
    scale: Scale = PROBABILITY,
) -> dict[str, Any]:
    """Returns all diagnostics of scored ProcessBench chains, if given, and of scored pools by file.

    Keys: `lowest_at_end` and `wrong_process` (with `threshold`) if `chains` are given, and `length_slopes` and
    `over_optimisation`, by file and then rule, if there are pools. A diagnostic without suitable data, or without a
    chain's scores, is `{"not_computed": reason}`. Raises ScoreError or NothingToMeasure as `pools_of` does, and
    KeyError if a chain lacks `first_error`.
    """
    report: dict[str, Any] = {}
    if chains is not None:
        right = [tree for tree in chains if tree.extra.get("first_error", -1) < 0]
        report["lowest_at_end"] = _or_reason(lowest_at_end, right, seed)
        report["wrong_process"] = _or_reason(wrong_process, chains, threshold, seed)
    for name, trees in pools.items():
        pooled = pools_of(trees, scale)
        report.setdefault("length_slopes", {})[name] = _or_reason(length_slopes, pooled, seed)
        report.setdefault("over_optimisation", {})[name] = _or_reason(over_optimisation, pooled, seed)
    return report


def _or_reason(diagnostic, *args) -> dict[str, Any]:
    try:
        return diagnostic(*args)
    except ScoreError as error:
        return {"not_computed": str(error)}


def _centred(x_M, group_M):
    return x_M - (np.bincount(group_M, x_M) / np.maximum(np.bincount(group_M), 1))[group_M]


# ---- Scores before and after edits (`jprm.methods.evaluate.edits`).

EDITED = 100
"""The most correct chains to edit: about 13 edits each give 1,300 chains to score."""


def right_chains(trees: Sequence[ReasoningTree], most: int) -> list[ReasoningTree]:
    """Returns the first `most` ProcessBench chains without an error and with a correct answer."""
    return [tree for tree in trees if tree.extra.get("first_error") == -1 and tree.nodes[-1].correct][:most]


def edits_of(chains: Sequence[ReasoningTree], score: Scorer, seed: int, threshold: float = 0.5) -> dict[str, Any]:
    """Edits the first `EDITED` correct chains, scores the edits in one call, and returns their `edits_report`.

    Without a correct chain, returns `{"meaning_kept": {"not_computed": reason}}` and scores nothing.
    """
    right = right_chains(chains, EDITED)
    if not right:
        return {"meaning_kept": {"not_computed": "no chain without an error, whose meaning an edit could keep"}}
    return edits_report(right, score(edited(right, seed), "edits"), seed, threshold=threshold)


MARGINS = {"meaning_kept": 0.05, "meaning_lost": 0.5, "nonsense": 0.2}
"""The margin that an edit's figure must exceed to be a finding."""


def edits_report(
    chains: Sequence[ReasoningTree], changed: Sequence[ReasoningTree], seed: int, *, threshold: float = 0.5
) -> dict[str, dict[str, dict[str, Any]]]:
    """Returns how scores react to edits, as {kind: {edit: figures}}, from scored chains and their scored edits.

    `changed` must be the scored records of `edited(chains)`: their `extra` names the `edit`, and `of`, the index of the
    chain.

    - `meaning_kept`, by edit: `change`, the mean absolute change of a step's score, with an interval over problems, and
      `shift`, the mean signed change (after less before), a number.
    - `meaning_lost`, by edit: `unnoticed`, how often the step made wrong still scores at least `threshold`, and `fall`,
      the mean drop of its score (before less after), both with an interval.
    - `nonsense`, by kind: `preferred`, how often its lowest score exceeds the correct chain's (ties count half). A
      search would be drawn to it.

    Each has `n` edits, `margin` (from `MARGINS`) and `finding`: the interval of its first figure lies above the margin.
    Intervals are `{"value", "low", "high"}`. Raises ScoreError if a score is missing.
    """
    before = scores_of(chains, [f"chain {i}" for i in range(len(chains))])
    after = scores_of(changed, [f"edit {i}" for i in range(len(changed))])
    report: dict[str, dict[str, dict[str, Any]]] = {"meaning_kept": {}, "meaning_lost": {}, "nonsense": {}}
    for name in dict.fromkeys(tree.extra["edit"] for tree in changed):
        of_name = [i for i, tree in enumerate(changed) if tree.extra["edit"] == name]
        problems, values = [], []
        for edit, score_P in ((changed[i].extra, after[i]) for i in of_name):
            whole_P = before[edit["of"]]
            at = [(edit["at"], edit["at"])] if "at" in edit else None
            pairs = [(whole_P[i], score_P[j]) for i, j in edit.get("pairs", at) or ()]
            values += pairs or [(whole_P.min(), score_P.min())]
            problems += [chains[edit["of"]].problem] * max(len(pairs), 1)
        old_N, new_N = np.array(values, float).T

        def interval(x_N, fraction, problems=problems):
            return bootstrap(lambda w: weighted_mean(x_N, w), problems, seed=seed, fraction=fraction)

        if name in MEANING_KEPT:
            kind, deciding = "meaning_kept", interval(np.abs(new_N - old_N), fraction=False)
            row = {"change": deciding.json(), "shift": jsonable((new_N - old_N).mean())}
        elif name in MEANING_LOST:
            kind, deciding = "meaning_lost", interval(new_N >= threshold, fraction=True)
            row = {"unnoticed": deciding.json(), "fall": interval(old_N - new_N, fraction=False).json()}
        else:
            kind, deciding = "nonsense", interval((new_N > old_N) + 0.5 * (new_N == old_N), fraction=True)
            row = {"preferred": deciding.json()}
        margin = MARGINS[kind]
        report[kind][name] = {"n": len(of_name), **row, "margin": margin, "finding": bool(deciding.low > margin)}
    return report


# ---- The benchmark.

MAIN = {
    "excess": "excess over chance",
    "gap": "less AUROC than where the answer is wrong too",
    "correlation": "correlation with length",
    "drop": "lost from the peak to the largest n",
    "change": "mean distance of scores before and after the edit",
    "unnoticed": "how often a step that the edit made wrong still scores as right",
    "preferred": "how often it scores above the right chain",
}
"""The deciding figure of each diagnostic, in words."""

SCORERS = ("mean", "last", "mean log")
"""Rules for which a length slope concerns the scorer. A product, sum or extreme has one by construction."""


def _chain_reader(path: str | os.PathLike) -> str:
    """Returns the reader of ProcessBench files, published or prepared. Raises RecordError for other chains."""
    name = format_of(path)
    for key, record in source(name).reader.read(path) if name == "jsonl" else ():
        if not isinstance(record.get("first_error"), int):
            fix = "Give ProcessBench's files, or the folder of `jprm prepare processbench`."
            raise RecordError(
                f"{path}:{key.partition('.')[0]}", "first_error", "is absent, and diagnostics start from it", fix
            )
    return name if name == "jsonl" else "processbench"


def run(options: Diagnostics) -> Report:
    if not (options.chains or options.pools):
        raise ValueError("diagnostics need files of --chains or --pools")
    by_name([*options.chains, *options.pools])
    prm, folder = model_of(options), f"{options.to}.scores"
    requests = {
        section: Request(
            {path.stem: scored_trees(prm, path, source(reader), folder, options.too_long) for path, reader in files},
            scale=prm.scale,
        )
        for section, files in (
            ("processbench", [(path, _chain_reader(path)) for path in options.chains]),
            ("best_of_n", [(path, "pools") for path in options.pools]),
        ) if files
    }  # fmt: skip
    return derive(requests, {}, scorer(prm, folder))


def derive(requests: Mapping[str, Request], results: Mapping[str, Any], score: Scorer | None) -> Report:
    """Returns all diagnostics that the `requests` of processbench and best_of_n allow; edits need the scorer.

    Returns the keys of `diagnostics_report` and of `edits_report`. The threshold is the one tuned in the
    first file of `results["processbench"]`, or the model's own, which edits always use. {} if neither is requested.
    """
    chains, pools, seed = None, {}, 0
    scale = next((request.scale for request in requests.values()), PROBABILITY)
    threshold = scale.threshold
    if "processbench" in requests:
        seed = requests["processbench"].seed
        chains = [tree for trees in requests["processbench"].data.values() for tree in trees]
    if "processbench" in results:
        tuned = next(iter(results["processbench"]["files"].values()))["tuned"]
        threshold = tuned["threshold"] if tuned else threshold
    if "best_of_n" in requests:
        seed, pools = requests["best_of_n"].seed, requests["best_of_n"].data
    report = diagnostics_report(chains, pools, threshold, seed, scale)
    return report | (edits_of(chains, score, seed, scale.threshold) if chains is not None and score is not None else {})


def tables(report: Report) -> Iterator[str]:
    rows = list(rows_of(report))
    computed = [(name, row["finding"]) for name, row in rows if "finding" in row]
    for name in [name for name, finding in computed if finding]:
        yield f"finding: {name}"
    if computed and not any(finding for _, finding in computed):
        yield f"no finding in {len(computed)} diagnostics"
    for name, row in rows:
        if "not_computed" in row:
            yield f"not computed: {name}: {row['not_computed']}"


def rows_of(report: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yields (name, diagnostic), e.g. "length slopes, FILE, mean", for every mapping with `finding` or `not_computed`.

    `path` is put before the names.
    """
    for key, value in report.items():
        name = f"{path}, {words(key)}" if path else words(key)
        if isinstance(value, Mapping):
            if "finding" in value or "not_computed" in value:
                yield name, value
            else:
                yield from rows_of(value, name)


def section(models: Sequence[PageModel]) -> Iterator[Block]:
    rows = []
    for model in models:
        for name, row in rows_of(model.results["diagnostics"]):
            label = f"{model.name}: {name}" if len(models) > 1 else name
            if "not_computed" in row:
                rows.append([label, "not computed", row["not_computed"]])
                continue
            key, figure = next((k, v) for k, v in row.items() if isinstance(v, Mapping) and "value" in v and k in MAIN)
            sentence = f"{MAIN[key]}: {interval(figure)}; a finding beyond {percent(row['margin'])}"
            rows.append([label, "finding" if row["finding"] else "no finding", sentence])
    if not rows:
        return
    yield Table("", ("", "", "figure, %"), rows, text=2)
    yield Note(
        "A finding needs a margin beyond which a flaw matters and an interval that is clear of it. Lowest at end: right"
        " chains whose lowest score is the last, beyond chance: the scorer judges answers. Wrong process: chains with a"
        " right answer and a wrong step. Length slopes: scores that follow length among right chains of one problem"
        " (a product must; a mean must not). Over-optimisation: accuracy lost by choosing among more. Meaning kept:"
        " edits after which scores should stay. Meaning lost: edits that make one step wrong. Nonsense: texts that"
        " should score below the right chain."
    )


def findings(results: Mapping[str, Any]) -> Iterator[Finding]:
    rows = list(rows_of(results["diagnostics"]))
    if not rows:
        return
    flaws = [name for name, row in rows if row.get("finding")]
    of_rule = [name for name in flaws if name.startswith("length slopes") and name.rsplit(", ", 1)[1] not in SCORERS]
    flaws = [name for name in flaws if name not in of_rule]
    missing = [name for name, row in rows if "not_computed" in row]
    sentence = f"{len(flaws)} of {len(rows) - len(missing)} computed are findings"
    sentence += f" ({'; '.join(flaws)})." if flaws else "."
    if of_rule:
        rules = ", ".join(name.rsplit(", ", 1)[1] for name in of_rule)
        sentence += f" Chains score by their length under {rules}, as such rules do with any scorer."
    if missing:
        sentence += f" Not computed: {'; '.join(missing)}."
    kind = "bad" if flaws else "open" if missing else "good"
    yield Finding("Diagnostics", None, note=sentence, kind=kind)


BENCHMARK = Benchmark(
    name="diagnostics", title="Diagnostics", tables=tables, run=run, derive=derive, section=section, findings=findings
)
