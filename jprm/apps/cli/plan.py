"""`jprm plan`: what an experiment's step needs on a TPU slice or GPUs, computed on a machine without them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any

from tyro.conf import FlagCreatePairsOff, Positional, arg

from jprm.apps.cli.arguments import Number, Settings


def plan(
    experiment: Annotated[Positional[Path], arg(metavar="EXPERIMENT.py")],
    topology: Annotated[str, arg(metavar="NAME")],
    slices: int = 1,
    scoring: FlagCreatePairsOff[bool] = False,
    search: FlagCreatePairsOff[bool] = False,
    rl: FlagCreatePairsOff[bool] = False,
    tokens_per_epoch: Number = None,
    labels_per_epoch: Number = None,
    to: Annotated[Path | None, arg(name="json", metavar="OUT", help_behavior_hint="")] = None,
    set_: Settings = (),
) -> None:
    """Compile an experiment's step for TPUs or GPUs, here: memory, FLOPs, collectives, and how fast it can be at most.

    The step is the one that `jprm train` runs, compiled from shapes alone, without device, weights, data or tokenizer:
    by libtpu (pip install -e '.[train,tpu]') or XLA ('.[train,gpu-aot]'). A 7B model takes minutes. Times are lower
    bounds, from what the program does and the rates that the chip is sold with: no run is faster, and real ones are
    slower.

    For example:
      jprm plan experiments/qwen2p5_math_7b_prm800k.py --topology v5p-128
      jprm plan experiments/qwen2p5_math_7b_prm800k.py --topology v5e-64 --scoring
      jprm plan experiments/qwen3_4b_math_shepherd.py --topology v6e-16 --slices 2 --set mesh.data=2 data.micro_rows=32
      jprm plan experiments/qwen3_4b_math_shepherd.py --topology v6e-16 --search --json plans.json
      jprm plan experiments/llama3p1_8b_orm.py --topology v5p-64 --set mesh.context=4 data.rows=8 data.micro_rows=8
      jprm plan experiments/qwen2p5_math_7b_prm800k.py --topology h100-8 --set model.attention=gpu_kernel
      jprm plan rl.py --rl --topology v5e-64

    Args:
        experiment: The file that describes the run.
        topology: The slice: v4-32, v5e-16, v5p-128, v6e-64, tpu7x-128, ... The number counts cores, two per chip, for
            v4, v5p and tpu7x, and chips for v5e and v6e. Or GPUs of a node: a100-8, h100-8, b200-8, h100-1, ... The
            error for an unknown name lists the known ones.
        slices: Slices or nodes joined by the data centre's network. `mesh.data` must be a multiple of them.
        scoring: Plan the step of `jprm score`, with one row per device, and not the training step.
        search: Try meshes, then remat policies, then rows per micro-batch; print the fastest that fits.
        rl: Plan an update of `jprm rl`, whose experiment the file describes: learner, reference, sampler and PRM.
        tokens_per_epoch: Tokens of the packed data, for hours and chip-hours per epoch.
        labels_per_epoch: Labelled steps among them, for labels per second.
        to: A file for the figures, with every candidate of a search.
        set_: Values that replace the experiment's, by their path in its configuration.
    """
    # Before jax is imported: planning must not take this machine's TPU from a run that uses it.
    os.environ["JAX_PLATFORMS"] = "cpu"
    from jprm.apps.plan.topologies import find
    from jprm.experiment import load
    from jprm.io.outputs import check_output

    if to is not None:
        check_output(to, experiment)
    if rl:
        if scoring or search or tokens_per_epoch:
            raise ValueError("--rl plans one update: leave out --scoring, --search and --tokens-per-epoch")
        return _plan_rl(experiment, set_, find(topology, slices), to)
    options = {"scoring": scoring, "epoch_tokens": tokens_per_epoch, "epoch_labels": labels_per_epoch}
    _plan(load(experiment, set_), find(topology, slices), search, to, options)


def _plan(experiment: Any, topology: Any, search: bool, to: Path | None, options: dict[str, Any]) -> None:
    """Plans or searches for a plan, prints it and writes it to a file."""
    from rich.console import Console

    from jprm.apps.plan.plan import plan, tables, tables_of_search
    from jprm.apps.plan.plan import search as search_plans
    from jprm.io.outputs import write_json
    from jprm.methods.evaluate.blocks import show

    errors = Console(stderr=True)
    with errors.status("starting") as status:
        say = status.update if errors.is_terminal else errors.print  # a log has no line that changes
        if search:
            plans, best = search_plans(experiment, topology, say=say, **options)
        else:
            best = plan(experiment, topology, say=say, **options)
    if search:
        show(tables_of_search(plans, best))
    if best is not None:
        show(tables(best))
    if to is not None:
        write_json(to, {"plans": plans, "best": best} if search else best)
        print(f"{to}: written")


def _plan_rl(experiment: Path, overrides: Settings, topology: Any, to: Path | None) -> None:
    """Plans an update of reinforcement learning, prints it and writes it to a file."""
    from rich.console import Console

    from jprm.apps.plan import rl
    from jprm.experiment import load
    from jprm.io.outputs import write_json
    from jprm.methods.evaluate.blocks import show
    from jprm.methods.rl.config import RLExperiment

    errors = Console(stderr=True)
    with errors.status("starting") as status:
        say = status.update if errors.is_terminal else errors.print
        found = rl.plan(load(experiment, overrides, RLExperiment), topology, say)
    show(rl.tables(found))
    if to is not None:
        write_json(to, found)
        print(f"{to}: written")
