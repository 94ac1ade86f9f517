"""Reinforcement learning of Qwen2.5-7B with a 7B PRM on one node of 8 GPUs: rl_pods.py by another attention and mesh.

    export JPRM_POLICY=models/Qwen2.5-7B JPRM_PRM=models/Qwen2.5-Math-PRM-7B
    export JPRM_PROBLEMS=problems.jsonl JPRM_HELD_OUT=held_out.jsonl    # as rl_pods.py makes them
    TASK=rl NAME=rl NODES=1 GPUS=8 TIME=24:00:00 EXPERIMENT=experiments/rl_node.py WORKDIR=/shared/runs/rl \
      tpu/slurm.sh launch

`tpu/slurm.sh` starts a process for each GPU. For two nodes, whose plan is in tpu/PLANS.md, NODES=2 and
ARGUMENTS="--set micro_rows=16 mesh.data=2". It has not been run.
"""

import pathlib
import runpy

from jprm.methods.rl.config import RLExperiment

PODS = runpy.run_path(str(pathlib.Path(__file__).with_name("rl_pods.py")))
write_shapes = PODS["write_shapes"]


def experiment(folder: pathlib.Path = PODS["FOLDER"]) -> RLExperiment:
    return PODS["experiment"](folder, devices=8, gpu=True)
