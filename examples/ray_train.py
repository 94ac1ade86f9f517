"""Trains a jprm experiment under Ray Train's JaxTrainer, which places the hosts and restarts them.

    python examples/ray_train.py EXPERIMENT.py WORKDIR [KEY=VALUE ...]

On TPUs and GPUs the trainer joins its workers by `jax.distributed` before `host` runs, so that the experiment's mesh
spans all of them; set `SCALING` to what there is, for instance ScalingConfig(use_tpu=True, topology="4x4",
accelerator_type="TPU-V6E", num_workers=4). A restarted run continues from its last checkpoint. WORKDIR, the experiment
and its data must be where every host sees them. Run with Ray 2.60.0 on one CPU worker, 25 November 2026; not on TPUs or
GPUs.
"""

import sys

from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.v2.jax import JaxTrainer

SCALING = ScalingConfig(num_workers=1)


def host(config: dict) -> None:
    """What every host does."""
    from jprm.experiment import load
    from jprm.train import train

    train(load(config["experiment"], config["set"]), config["workdir"])


if __name__ == "__main__":
    experiment, workdir, *settings = sys.argv[1:]
    JaxTrainer(
        host,
        train_loop_config={"experiment": experiment, "workdir": workdir, "set": settings},
        scaling_config=SCALING,
        run_config=RunConfig(failure_config=FailureConfig(max_failures=10)),
    ).fit()
