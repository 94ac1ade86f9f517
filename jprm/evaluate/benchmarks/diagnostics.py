"""Diagnostics: known failures of PRMs. The figures are computed in `jprm.evaluate.diagnostics` and `.edits`."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from jprm.evaluate.benchmark import Benchmark, Files, ModelOptions, Report, Request, Scorer
from jprm.evaluate.blocks import Block, Model, Note, Table
from jprm.evaluate.wording import interval, percent, words
from jprm.score.scale import PROBABILITY

MAIN = {
    "excess": "excess over chance",
    "gap": "less AUROC than where the answer is wrong too",
    "correlation": "correlation with length",
    "drop": "lost from the peak to the largest n",
    "change": "mean distance of scores before and after the edit",
    "preferred": "how often it scores above the right chain",
}
"""The figure of each diagnostic that decides, in words."""

SCORERS = ("mean", "last", "mean log")
"""Rules whose slope against length is the scorer's. A product, a sum or an extreme has one by construction."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options(ModelOptions):
    """Diagnostics: known failures of a PRM that its accuracy does not show.

    On ProcessBench chains: lowest scores at the end, right answers by wrong steps, edits that keep the meaning, and
    fluent nonsense. On pools: scores that follow length, and accuracy lost by choosing among more.

    For example:
      jprm eval diagnostics --model DIR --chains gsm8k.json math.json --pools pool.jsonl --json diagnostics.json
    """

    chains: Files = ()
    """ProcessBench files."""
    pools: Files = ()
    """Pools of samples with known correctness."""


def run(options: Options) -> Report:
    from jprm.evaluate.run import by_name, scored_trees, scorer, source
    from jprm.loading import load

    if not (options.chains or options.pools):
        raise ValueError("diagnostics need files of --chains or --pools")
    by_name([*options.chains, *options.pools])
    prm, folder = load(options.model, adapter=options.adapter), f"{options.to}.scores"
    requests = {
        section: Request(
            {path.stem: scored_trees(prm, path, source(reader), folder, options.too_long) for path in paths},
            scale=prm.scale,
        )
        for section, reader, paths in (
            ("processbench", "processbench", options.chains),
            ("best_of_n", "pools", options.pools),
        )
        if paths
    }
    return derive(requests, {}, scorer(prm, folder))


def derive(requests: Mapping[str, Request], results: Mapping[str, Any], score: Scorer | None) -> Report:
    """Returns all diagnostics that the chains and pools of the other sections allow; edits need the scorer."""
    from jprm.evaluate.diagnostics import diagnostics_report
    from jprm.evaluate.edits import edits_of

    chains, pools, seed = None, {}, 0
    scale = next((request.scale for request in requests.values()), PROBABILITY)
    threshold = scale.threshold
    if "processbench" in requests:
        seed = requests["processbench"].seed
        chains = [tree for trees in requests["processbench"].data.values() for tree in trees]
    if "processbench" in results:
        threshold = next(iter(results["processbench"]["files"].values()))["tuned"]["threshold"]
    if "best_of_n" in requests:
        seed, pools = requests["best_of_n"].seed, requests["best_of_n"].data
    report = diagnostics_report(chains, pools, threshold, seed, scale)
    return report | (edits_of(chains, score, seed, scale.threshold) if chains is not None and score is not None else {})


def tables(report: Report) -> Iterator[str]:
    for name in [name for name, row in rows_of(report) if row.get("finding")] or ["none"]:
        yield f"finding: {name}"


def rows_of(report: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yields (name, diagnostic) for everything that is nested in a report."""
    for key, value in report.items():
        name = f"{path}, {words(key)}" if path else words(key)
        if isinstance(value, Mapping):
            if "finding" in value or "not_computed" in value:
                yield name, value
            else:
                yield from rows_of(value, name)


def section(models: Sequence[Model]) -> Iterator[Block]:
    rows = []
    for model in models:
        for name, row in rows_of(model.results["diagnostics"]):
            label = f"{model.name}: {name}" if len(models) > 1 else name
            if "not_computed" in row:
                rows.append([label, "not computed", row["not_computed"]])
                continue
            key, figure = next((k, v) for k, v in row.items() if isinstance(v, Mapping) and "value" in v and k in MAIN)
            found = f"{MAIN[key]}: {interval(figure)}; a finding beyond {percent(row['margin'])}"
            rows.append([label, "finding" if row["finding"] else "none", found])
    if not rows:
        return
    yield Table("", ("", "", "figure, %"), rows, text=2)
    yield Note(
        "A finding needs a margin beyond which a flaw matters and an interval that is clear of it. Lowest at end: right"
        " chains whose lowest score is the last, beyond chance: the scorer judges answers. Wrong process: chains with a"
        " right answer and a wrong step. Length slopes: scores that follow length among right chains of one problem"
        " (a product must; a mean must not). Over-optimisation: accuracy lost by choosing among more. Meaning kept:"
        " edits after which scores should stay. Nonsense: texts that should score below the right chain."
    )


def verdict(results: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    rows = list(rows_of(results["diagnostics"]))
    found = [name for name, row in rows if row.get("finding")]
    of_rule = [name for name in found if name.startswith("length slopes") and name.rsplit(", ", 1)[1] not in SCORERS]
    found = [name for name in found if name not in of_rule]
    missing = [name for name, row in rows if "not_computed" in row]
    said = f"Diagnostics: {len(found)} finding{'' if len(found) == 1 else 's'}"
    said += f" ({'; '.join(found)})." if found else "."
    if of_rule:
        rules = ", ".join(name.rsplit(", ", 1)[1] for name in of_rule)
        said += f" Chains score by their length under {rules}, as such rules do with any scorer."
    if missing:
        said += f" Not computed: {'; '.join(missing)}."
    yield "bad" if found else "open" if missing or not rows else "good", said


BENCHMARK = Benchmark(
    name="diagnostics",
    title="Diagnostics",
    options=Options,
    tables=tables,
    run=run,
    derive=derive,
    section=section,
    verdict=verdict,
)
