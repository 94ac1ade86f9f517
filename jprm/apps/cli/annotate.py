"""`jprm annotate`: human step labels."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from tyro.conf import OmitArgPrefixes, Positional, arg

from jprm.apps.annotate import Disagreements, SelectConfig, StudyConfig, Written
from jprm.apps.cli.arguments import Commands, Files, one_of, print_counts
from jprm.apps.web import Listen

annotate = Commands()

Study = Annotated[Positional[Path], arg(metavar="STUDY")]
Optional = Annotated[Path | None, arg(metavar="F.jsonl", help_behavior_hint="")]
LISTEN = Listen()


@annotate.command(name="select")
def annotate_select(
    input: Annotated[Path, arg(metavar="F.jsonl")],
    output: Annotated[Path, arg(metavar="G.jsonl")],
    config: OmitArgPrefixes[SelectConfig],
    exclude: Files = (),
) -> None:
    """Choose what to label: convincing wrong answers above all, and a random part that stands for all.

    Single chains and trajectories, or with --alternatives trees. A stratum with too few of them is filled at random.

    For example:
      jprm score --model runs/prm --input pools.jsonl --output scored.jsonl
      jprm annotate select --input scored.jsonl --output queue.jsonl --count 200 --exclude processbench/math.json

    Args:
        input: Chains, pools, trees or trajectories with scores. Answers are incorrect where `correct` is false.
        output: The chains or trees, one per line, in random order, with the reason under `selection`.
        exclude: Benchmark files, whose problems are left out.
    """
    from jprm.apps.annotate.study import select_file

    print_counts(select_file(input, output, config, exclude), output)


@annotate.command(name="serve")
def annotate_serve(
    study: Study,
    input: Optional = None,
    annotators: Annotated[tuple[str, ...], arg(metavar="NAME ...")] = (),
    gold: Optional = None,
    screening: Optional = None,
    guidelines: Annotated[Path | None, arg(metavar="F.txt", help_behavior_hint="")] = None,
    double_fraction: float = StudyConfig.double_fraction,
    gold_fraction: float = StudyConfig.gold_fraction,
    repeat_fraction: float = StudyConfig.repeat_fraction,
    pass_screening: float = StudyConfig.pass_screening,
    anchored_fraction: float = StudyConfig.anchored_fraction,
    seed: int = 0,
    config: OmitArgPrefixes[Listen] = LISTEN,
) -> None:
    """Serve the labelling page. With --input it makes the study; without, it continues one.

    It prints an address for every annotator. With the environment variable JPRM_API_KEY each address has a key of its
    own, and the server may listen on other than loopback addresses.

    For example:
      jprm annotate serve studies/one --input queue.jsonl --annotators ana ben --gold gold.jsonl
      jprm annotate serve studies/one

    Args:
        study: The folder of the study: chains, guidelines, and every event in events.jsonl.
        input: What to label, in this order: chains, the chains of pools, trees with their alternatives, and turns of
            trajectories. Labels in them never reach the page, and scores only by --anchored-fraction.
        annotators: Names of the annotators. Later calls may add some.
        gold: Records with labels, or ProcessBench, PRMBench or PRM800K as released, mixed in to measure the annotators.
        screening: The same, which every annotator rates first.
        guidelines: Text of the guidelines, paragraphs between blank lines. Default: short ones.
        double_fraction: Fraction of the tasks that two annotators label.
        gold_fraction: Fraction of an annotator's tasks that are gold.
        repeat_fraction: Fraction of an annotator's tasks that come a second time.
        pass_screening: Fraction of the screening tasks that an annotator must label as known to go on.
        anchored_fraction: Fraction of an annotator's chains, drawn at random, whose scores the page shows: an
            experiment on how far they move the ratings.
        seed: Of who gets what.
    """
    from jprm.apps.annotate.app import serve
    from jprm.apps.annotate.study import create

    if input is None and (gold or screening or guidelines):
        raise ValueError("--gold, --screening and --guidelines make a study: give --input too")
    if input is not None:
        fractions = double_fraction, gold_fraction, repeat_fraction, pass_screening, anchored_fraction
        mix = StudyConfig(annotators, *fractions, seed)
        create(study, input, mix, gold=gold, screening=screening, guidelines=guidelines)
    serve(study, config, annotators)


@annotate.command(name="report")
def annotate_report(
    study: Study, json: Annotated[Path | None, arg(metavar="R.json", help_behavior_hint="")] = None
) -> None:
    """Tell what the labels are worth: agreement, known and repeated tasks, drift, and time.

    For example:
      jprm annotate report studies/one --json report.json

    Args:
        study: The folder of the study, which may be served meanwhile.
        json: A file for all figures, and the tasks on which two annotators differ.
    """
    import rich.console

    from jprm.apps.annotate.quality import figures, show, tasks_of
    from jprm.io.outputs import check_output, write_json

    if json:
        check_output(json)
    report = figures(tasks_of(study))
    if json:
        write_json(json, report)
    show(report, rich.console.Console())


@annotate.command(name="export")
def annotate_export(
    study: Study,
    output: Annotated[Path, arg(metavar="G.jsonl")],
    disagreements: Disagreements,
    without: Annotated[tuple[str, ...], arg(metavar="NAME ...")] = (),
    written: Annotated[Written | None, one_of(Written)] = None,
) -> None:
    """Write the labels as records for `jprm prepare jsonl` and `jprm train`, with ratings -1, 0 and 1.

    For example:
      jprm annotate export studies/one --output labelled.jsonl --disagreements cut
      jprm prepare jsonl --source labelled.jsonl --out data/labelled

    Args:
        study: The folder of the study, which may be served meanwhile.
        output: Rated chains, trees and trajectories, one per line.
        disagreements: Of two annotators. cut: a record has no labels from a step on which they differ. each: it is
            written once for each.
        without: Annotators whose labels do not count.
        written: The label of steps that annotators wrote. Required where there are any.
    """
    from jprm.apps.annotate.quality import export

    print_counts(export(study, output, disagreements=disagreements, without=without, written=written), output)
