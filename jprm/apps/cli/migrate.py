"""`jprm migrate`: experiments from the settings of other trainers."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from tyro.conf import Positional, arg

from jprm.apps.cli.arguments import Commands, Count

migrate = Commands()


@migrate.command(name="trl")
def migrate_trl(
    source: Annotated[Positional[Path], arg(metavar="CONFIG_OR_SCRIPT.py")],
    out: Annotated[Path, arg(metavar="EXPERIMENT.py")],
    examples: Count = None,
) -> None:
    """Write an experiment from a script or configuration of TRL's PRM trainer, and name what is not carried over.

    The script is read and never executed: literals count, and names that are assigned one. TRL's stepwise records are
    jprm's data as they are.

    For example:
      jprm migrate trl train_prm.py --out experiments/prm.py --examples 100000
      jprm migrate trl config.yaml --out experiments/prm.py

    Args:
        source: A script that makes a PRMConfig, or its settings as JSON or YAML.
        out: The experiment file to write.
        examples: Training examples, by which epochs become steps; not needed where max_steps is set.
    """
    from jprm.apps.migrate import experiment_file, read
    from jprm.io.outputs import atomic_write, check_output

    check_output(out, source)
    if out.exists():
        raise ValueError(f"{out}: is there already. Name another file, or remove it")
    text, lost = experiment_file(read(source), examples)
    atomic_write(out, text)
    print(f"{out}: written. Not carried over: {len(lost)}")
    for line in lost:
        print(f"  {line}")
