"""`jprm annotate`: step labels by humans."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from tyro.conf import Positional, arg

from jprm.apps import one_of
from jprm.apps.annotate import Disagreements, SelectConfig, StudyConfig, Written
from jprm.apps.cli.arguments import Commands, Files, Settings, print_counts, with_settings
from jprm.apps.web import Listen

annotate = Commands()

Study = Annotated[Positional[Path], arg(metavar="STUDY")]
Optional = Annotated[Path | None, arg(metavar="F.jsonl", help_behavior_hint="")]
LISTEN, MIX = Listen(), StudyConfig()


@annotate.command(name="select")
def annotate_select(
    input: Annotated[Path, arg(metavar="F.jsonl")],
    output: Annotated[Path, arg(metavar="G.jsonl")],
    config: Annotated[SelectConfig, arg(name="")],
    exclude: Files = (),
    set_: Settings = (),
) -> None:
    """Choose chains to label: mostly convincing wrong answers, plus a representative random part.

    Selects single chains and trajectories, or trees with --alternatives. Random chains fill up a small stratum. An
    existing file G.jsonl is replaced. Prints the counts by stratum.

    For example:
      jprm score --model runs/prm --input pools.jsonl --output scored.jsonl
      jprm annotate select --input scored.jsonl --output queue.jsonl --count 200 --exclude processbench/math.json

    Args:
        input: Chains, pools, trees or trajectories with scores. An answer is incorrect if `correct` is false.
        output: Selected chains or trees, one per line, in random order, with the reason under `selection`.
        exclude: Benchmark files. Their problems are left out.
        set_: Fractions by reason for the choice: convincing=0.7, the most convincing chains with an incorrect answer (a
            chain is as convincing as its lowest score); rest=0.1, the most convincing of the others; disagreement=0.1,
            chains whose scores differ most from their stored labels. The remainder up to 1 is random.
    """
    from jprm.apps.annotate.study import select_file

    (config,) = with_settings(set_, config)
    print_counts(select_file(input, output, config, exclude), output)


@annotate.command(name="serve")
def annotate_serve(
    study: Study,
    input: Optional = None,
    gold: Optional = None,
    screening: Optional = None,
    guidelines: Annotated[Path | None, arg(metavar="F.txt", help_behavior_hint="")] = None,
    mix: Annotated[StudyConfig, arg(name="")] = MIX,
    config: Annotated[Listen, arg(name="")] = LISTEN,
    set_: Settings = (),
) -> None:
    """Serve the labelling page. --input creates the study; without it, the study continues.

    Prints an address for each annotator, then serves until SIGTERM or Ctrl-C. If the environment variable JPRM_API_KEY
    is set, each address contains its own key, and the server may listen on any host. With --input, STUDY must not exist
    yet; without it, --annotators adds further annotators.

    For example:
      jprm annotate serve studies/one --input queue.jsonl --annotators ana ben --gold gold.jsonl
      jprm annotate serve studies/one

    Args:
        study: Folder of the study: chains, guidelines, and all events in events.jsonl.
        input: Records to label, in this order: chains, chains of pools, trees with alternatives, turns of trajectories.
            Their labels never reach the page; scores only by --set anchored_fraction=F.
        gold: Records with labels, or ProcessBench, PRMBench or PRM800K as released. They are mixed in to measure the
            annotators.
        screening: Further gold records, which every annotator must rate first.
        guidelines: Text file of guidelines, with blank lines between paragraphs. Default: short guidelines.
        set_: Settings of a new study: double_fraction=0.15 of the tasks have two annotators; gold_fraction=0.05 of an
            annotator's tasks have known labels, and repeat_fraction=0.02 are repeated; pass_screening=0.75 is the least
            mean score over the screening tasks (per chain 1 if the first error is found, per tree the fraction of steps
            judged right); anchored_fraction=0 of the chains show scores, to measure how far these shift ratings;
            seed=0. Of the server: body_bytes=8388608 and body_seconds=30 per request.
    """
    from jprm.apps.annotate.app import serve
    from jprm.apps.annotate.study import create

    mix, config = with_settings(set_, mix, config)
    if input is None and (gold or screening or guidelines):
        raise ValueError("--gold, --screening and --guidelines make a study: give --input too")
    if input is not None:
        create(study, input, mix, gold=gold, screening=screening, guidelines=guidelines)
    serve(study, config, mix.annotators)


@annotate.command(name="report")
def annotate_report(
    study: Study, output: Annotated[Path | None, arg(metavar="R.json", help_behavior_hint="")] = None
) -> None:
    """Report the label quality: agreement, gold and repeated tasks, drift, and time.

    Prints sentences and a table of annotators. The study is not changed; an existing file R.json is replaced.

    For example:
      jprm annotate report studies/one --output report.json

    Args:
        study: Folder of the study, which may be served at the same time.
        output: File for all figures, and the tasks on which two annotators differ.
    """
    from jprm.apps.annotate.quality import figures, tables, tasks_of
    from jprm.io.outputs import check_output, write_json
    from jprm.methods.evaluate.blocks import show

    if output:
        check_output(output)
    report = figures(tasks_of(study))
    if output:
        write_json(output, report)
    show(tables(report))


@annotate.command(name="export")
def annotate_export(
    study: Study,
    output: Annotated[Path, arg(metavar="G.jsonl")],
    disagreements: Disagreements,
    without: Annotated[tuple[str, ...], arg(metavar="NAME ...")] = (),
    written: Annotated[Written | None, one_of(Written)] = None,
) -> None:
    """Write the labels as records for `jprm prepare jsonl` and `jprm train`, with ratings -1, 0 and 1.

    An existing file G.jsonl is replaced. Prints how many tasks and steps were written, and left out. A study without
    labels is an error.

    For example:
      jprm annotate export studies/one --output labelled.jsonl --disagreements cut
      jprm prepare jsonl --input labelled.jsonl --output data/labelled

    Args:
        study: Folder of the study, which may be served at the same time.
        output: Rated chains, trees and trajectories, one per line.
        disagreements: If two annotators differ: `cut` drops the labels from the first such step on; `each` writes the
            record once per annotator.
        without: Annotators whose labels are ignored.
        written: Label for steps written by annotators. Required if there are any.
    """
    from jprm.apps.annotate.quality import export

    print_counts(export(study, output, disagreements=disagreements, without=without, written=written), output)
