"""Reinforcement learning where some processes of a job sample while the others learn."""

CHILD = """
import os, pathlib, signal, sys
from jprm import multihost
multihost.start(sys.argv[-1])
import jax
import test_rl_hosts as tests
from jprm.methods.rl import loop
from jprm.train import Stopped

folder, run, changes = pathlib.Path(sys.argv[1]), sys.argv[2], eval(sys.argv[3])
config = tests.ahead(folder / "data", **changes)
try:
    loop.train(config, folder / run)
except Stopped as stopped:
    print("stopped:", stopped)
    raise SystemExit(143) from None
"""

from tiny_rl import experiment
from jprm.experiment import OptimizerConfig

def ahead(data, **changes):
    """Adam's eps is above most gradients: else its first steps would turn rounding errors into whole rates."""
    values = dict(
        updates=4, evaluate_every=2, evaluate_samples=2, stale=1, objective_options={"truncate": 2.0},
        optimizer=OptimizerConfig(learning_rate=0.02, decay="constant", eps=0.1),
    )
    return experiment(data, **(values | changes))
