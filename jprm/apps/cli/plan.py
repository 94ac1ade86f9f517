"""`jprm plan`: an experiment's step on absent devices."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

from tyro.conf import FlagCreatePairsOff, Positional, arg

from jprm.apps.cli.arguments import Settings
from jprm.apps.cli.runs import Json


def plan(
    experiment: Annotated[Positional[Path | None], arg(metavar="EXPERIMENT.py", help_behavior_hint="")] = None,
    topology: Annotated[str, arg(metavar="NAME", help_behavior_hint="")] = "",
    fits: FlagCreatePairsOff[bool] = False,
    slices: int = 1,
    scoring: FlagCreatePairsOff[bool] = False,
    search: FlagCreatePairsOff[bool] = False,
    to: Json = None,
    set_: Settings = (),
) -> None:
    """Compile an experiment's step for TPUs or GPUs without having one: memory, FLOPs, collectives, best-case time.

    Compiles the step of `jprm train` from shapes alone, without device, weights, data or tokenizer, by libtpu
    (pip install -e '.[train,tpu]') or XLA ('.[train,gpu-aot]'). A 7B model takes minutes. Times are lower bounds, from
    the operations of the program and the chip's nominal rates; real runs are slower. Prints tables, also if the step
    does not fit.

    For example:
      jprm plan experiments/qwen2p5_math_7b_prm800k.py --topology v5p-128
      jprm plan experiments/qwen2p5_math_7b_prm800k.py --topology v5e-64 --scoring
      jprm plan experiments/qwen3_4b_math_shepherd.py --topology v6e-16 --slices 2 --set mesh.data=2 data.micro_rows=32
      jprm plan experiments/qwen3_4b_math_shepherd.py --topology v6e-16 --search --output plans.json
      jprm plan experiments/llama3p1_8b_orm.py --topology v5p-64 --set mesh.context=4 data.rows=8 data.micro_rows=8
      jprm plan experiments/qwen2p5_math_7b_prm800k.py --topology h100-8 --set model.attention=gpu_kernel
      jprm plan --fits --output fits.json

    Args:
        experiment: Experiment file.
        topology: Slice, e.g. v4-32, v5e-16, v5p-128, v6e-64 or tpu7x-128; the number counts cores (two per chip) for
            v4, v5p and tpu7x, chips for v5e and v6e. Or GPUs of one node, e.g. a100-8, h100-8, b200-8, rtx4090-1,
            rtx5090-1, rtx3090-2, l4-4 or a10-1. An unknown name prints the known ones.
        fits: Print which models fit on one card of 24 to 141 GB: 0.5B to 32B parameters, trained and scored, with rows
            of 2,048 and 8,192 tokens, compiled for an H100. With --output, a stopped table continues.
        slices: Slices or nodes, joined by the data centre network. `mesh.data` must be a multiple.
        scoring: Plan the step of `jprm score` with one row per device, instead of the training step.
        search: Try meshes, then remat policies, then rows per micro-batch; print the fastest fitting plan.
        to: File for the figures, including every candidate of a search.
        set_: Values that override the experiment, e.g. mesh.context=4.
    """
    # Before jax is imported: planning must not take this machine's TPU from a run that uses it.
    os.environ["JAX_PLATFORMS"] = "cpu"
    from rich.console import Console

    from jprm.apps.plan import fits as cards
    from jprm.apps.plan import plan as steps
    from jprm.apps.plan.topologies import find
    from jprm.experiment import load
    from jprm.io.outputs import check_output, write_json
    from jprm.methods.evaluate.blocks import show

    errors = Console(stderr=True)
    if fits:
        if experiment or topology or scoring or search or set_:
            raise ValueError("--fits takes only --output, because its models and card are fixed")
        show(cards.tables(cards.fits(to, errors.print)))
        return
    if experiment is None or not topology:
        raise ValueError("jprm plan: name an experiment file and --topology, or --fits")
    if to is not None:
        check_output(to, experiment)
    slice_ = find(topology, slices)
    with errors.status("starting") as status:
        say = status.update if errors.is_terminal else errors.print  # a log has no line that changes
        if search:
            plans, best = steps.search(load(experiment, set_), slice_, say=say, scoring=scoring)
            planned, shown = {"plans": plans, "best": best}, steps.tables_of_search(plans, best)
        else:
            planned = steps.plan(load(experiment, set_), slice_, say=say, scoring=scoring)
            shown = steps.tables(planned)
    show(shown)
    if to is not None:
        write_json(to, planned)
        print(f"{to}: written")
