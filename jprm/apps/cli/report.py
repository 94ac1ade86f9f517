"""`jprm report`: the page that shows what `jprm eval suite` found, or what `jprm rl` did."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from tyro.conf import Positional, arg


def report(
    folder: Annotated[Positional[tuple[Path, ...]], arg(metavar="DIR ...")],
    out: Annotated[Path, arg(metavar="PAGE.html")],
    figures: Annotated[Path | None, arg(metavar="DIR", help_behavior_hint="")] = None,
) -> None:
    """One page with verdict, figures and every chain with its scores: a single file that works without a network.

    Several folders of one suite are compared on one page.

    For example:
      jprm report results/mine --out report.html
      jprm report results/prm results/orm --out report.html --figures figures
      jprm report runs/rl --out rl.html

    Args:
        folder: What `jprm eval suite` wrote, or runs of `jprm rl`.
        out: The page to write.
        figures: A folder to write every figure into, as SVG.
    """
    from jprm.apps.report.page import report

    report(folder, out, figures)
    print(f"{out}: written")
