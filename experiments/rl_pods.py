"""Reinforcement learning of Qwen2.5-7B with a 7B PRM on a pod.

    jprm prepare gsm8k --input train.jsonl --output data/gsm8k --set calculator_marks=strip  # and test.jsonl likewise
    python -c "import jprm.data, jprm.io.jsonl as j; j.write_records('problems.jsonl', jprm.data.load('data/gsm8k'))"
    export JPRM_POLICY=hf://Qwen/Qwen2.5-7B@main JPRM_PRM=hf://Qwen/Qwen2.5-Math-PRM-7B@main
    export JPRM_PROBLEMS=gs://BUCKET/problems.jsonl JPRM_HELD_OUT=gs://BUCKET/held_out.jsonl
    TASK=rl EXPERIMENT=experiments/rl_pods.py WORKDIR=gs://BUCKET/runs/rl TYPE=v5p-128 ... tpu/queued.sh create

The launcher (tpu/README.md) starts `tpu/run.sh` on every host. For another slice than the 64 chips of v5p-128, add
`ARGUMENTS="--set micro_rows=CHIPS"`. On nodes of GPUs: rl_node.py.

An update: 64 problems x 16 samples of at most 2,048 tokens after prompts of as many, rows of 4,096, one a device at a
time, full remat, float32 weights and moments, bfloat16 computation. Sampler, PRM and reference are stored as bfloat16.
Plans of its memory and times are in tpu/PLANS.md. It has not been run.
"""

import dataclasses
import json
import os
import pathlib
import runpy

from jprm.experiment import OptimizerConfig, to_json
from jprm.methods.rl.config import RLExperiment
from jprm.methods.rl.credit import CreditConfig
from jprm.model.mesh import MeshConfig

prm_experiment = runpy.run_path(str(pathlib.Path(__file__).with_name("qwen2p5_math_7b_prm800k.py")))["experiment"]

FOLDER = pathlib.Path(os.environ.get("JPRM_RL_PODS", "runs/rl_pods"))

POLICY_MODEL, PRM_MODEL = os.environ.get("JPRM_POLICY", ""), os.environ.get("JPRM_PRM", "")
"""Without them the shapes below stand for the models (`write_shapes`)."""

# Of Qwen/Qwen2.5-7B.
POLICY = {
    "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "hidden_act": "silu", "hidden_size": 3584,
    "intermediate_size": 18944, "max_position_embeddings": 131072, "num_attention_heads": 28, "num_hidden_layers": 28,
    "num_key_value_heads": 4, "rms_norm_eps": 1e-06, "rope_theta": 1000000.0, "tie_word_embeddings": False,
    "use_sliding_window": False, "vocab_size": 152064,
}  # fmt: skip


def experiment(
    folder: pathlib.Path = FOLDER, devices: int = 64, slices: int = 1, gpu: bool = False, sampling_hosts: int = 0
) -> RLExperiment:
    """Returns it for so many devices and slices that learn."""
    if not POLICY_MODEL and not (folder / "policy").is_dir():
        raise FileNotFoundError(f"{folder}: holds no policy. Set JPRM_POLICY and JPRM_PRM")
    attention = "gpu_kernel" if gpu else "kernel"
    return RLExperiment(
        name="rl_pods",
        policy=POLICY_MODEL or str(folder / "policy"),
        prm=PRM_MODEL or str(folder / ("prm_gpu" if gpu else "prm")),
        problems=(os.environ.get("JPRM_PROBLEMS", "problems.jsonl"),),
        held_out=(os.environ.get("JPRM_HELD_OUT", "held_out.jsonl"),),
        credit=CreditConfig("min_form", "rloo", "constant", length=2048, offset=-1.0),
        optimizer=OptimizerConfig(learning_rate=1e-6, decay="constant"),
        updates=200,
        model={"dtype": "bfloat16", "remat": "full", "attention": attention},
        problems_an_update=64,
        samples=16,
        max_tokens=2048,
        tokens=4096,
        sampler_rows=256,
        sampler_dtype="bfloat16",
        prm_dtype="bfloat16",
        reference_dtype="bfloat16",
        micro_rows=devices,
        mesh=MeshConfig(data=slices),
        sampling_hosts=sampling_hosts,
        stale=int(sampling_hosts > 0),
    )


def write_shapes(folder: pathlib.Path) -> None:
    """Writes the shapes of both models, for a check of the experiment without weights."""
    (folder / "policy").mkdir(parents=True, exist_ok=True)
    (folder / "policy" / "config.json").write_text(json.dumps(POLICY))
    for name, attention in {"prm": "kernel", "prm_gpu": "gpu_kernel"}.items():
        (folder / name).mkdir(exist_ok=True)
        prm = prm_experiment()
        prm = dataclasses.replace(prm, model=dataclasses.replace(prm.model, remat="full", attention=attention))
        (folder / name / "experiment.json").write_text(json.dumps(to_json(prm)))
