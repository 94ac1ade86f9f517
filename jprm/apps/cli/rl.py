"""`jprm rl`: reinforcement learning of a policy."""

from __future__ import annotations

import signal
import sys
from pathlib import Path
from typing import Annotated

from tyro.conf import Positional, arg

from jprm.apps.cli.arguments import Distributed, Folder, Settings


def rl(
    experiment: Annotated[Positional[Path], arg(metavar="EXPERIMENT.py")],
    workdir: Folder,
    set_: Settings = (),
    distributed: Distributed = None,
) -> None:
    """Let a policy learn from its own samples, by a verifier and a PRM; the same command continues a stopped run.

    An update samples chains of some problems, has the verifier and the PRM judge them, gives every token its credit,
    and steps. Evaluations on held-out problems show correct answers beside the PRM's score. Where the score rises while
    correct answers fall, the policy games the PRM: the run ends, with the best parameters restored.

    DIR is then a policy, which `jprm search --policy DIR` takes. DIR/best is the policy of the best evaluation,
    DIR/rl.json the verdict and every figure, and `jprm report DIR --out PAGE.html` their page.

    For example:
      jprm rl experiments/quickstart/rl.py --workdir runs/rl
      jprm rl experiments/quickstart/rl.py --workdir runs/sum --set credit.name=sum_prm_alone credit.offset=0
      jprm rl experiments/quickstart/rl.py --workdir runs/rft --set method=rejection
      jprm rl experiments/pod.py --workdir gs://BUCKET/runs/rl --distributed auto

    Args:
        experiment: A file whose function experiment() returns a jprm.methods.rl.config.RLExperiment.
        workdir: The folder for checkpoints, metrics and the configuration, also in a bucket. A run in it is continued.
        set_: Values that replace the experiment's, by their path in its configuration.
        distributed: For several processes, as in `jprm train`. Each samples and judges a part of the problems on its
            own devices, whose memory must hold the policy and the PRMs beside its part of the learner.
    """
    from jprm import multihost
    from jprm.experiment import load
    from jprm.methods.rl.config import RLExperiment
    from jprm.methods.rl.loop import train
    from jprm.train import Stopped

    if distributed:
        multihost.start(distributed)
    try:
        result = train(load(experiment, set_, RLExperiment), workdir)
    except Stopped as stopped:
        print(f"stopped: {stopped}", file=sys.stderr)
        raise SystemExit(128 + signal.SIGTERM) from None  # as of a process that the signal had ended
    if multihost.is_first():
        print("\n".join(result["verdict"]))
