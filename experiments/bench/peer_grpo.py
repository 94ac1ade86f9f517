"""The peer of rl_speed.py, run by the peers' interpreter: updates of TRL's GRPOTrainer.

Reads JSON from standard input: `model`, a folder of transformers; `records`, of `prompt`, its token ids and `answer`;
`problems` and `samples` of an update, `max_tokens`, `learning_rate`, `batch`, the samples of a forward and backward
pass, and `updates`, of which the first is not timed. Prints one JSON line: the median seconds of an update, and means
of sampled tokens, of training cells with padding, and of the reward.
"""

import json
import os
import statistics
import sys
import tempfile
import time

os.environ["HF_HUB_OFFLINE"] = "1"


def main():
    request = json.load(sys.stdin)
    import torch
    import trl
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback

    torch.set_num_threads(os.cpu_count())
    tokenizer = AutoTokenizer.from_pretrained(request["model"])
    tokenizer.pad_token = tokenizer.eos_token
    for record in request["records"]:
        assert tokenizer(record["prompt"])["input_ids"] == record["ids"], "not the same prompt"
    rows = [{"prompt": record["prompt"], "answer": record["answer"]} for record in request["records"]]
    rewards, seen, ends = [], [], []

    def reward(completions, answer, **_):
        correct = [
            float(text.strip().endswith(f"answer is {right}.")) for text, right in zip(completions, answer, strict=True)
        ]
        rewards.append(statistics.mean(correct))
        return correct

    class Counted(trl.GRPOTrainer):
        def _generate_and_score_completions(self, inputs):
            batch = super()._generate_and_score_completions(inputs)
            width = batch["prompt_ids"].shape[1] + batch["completion_ids"].shape[1]
            seen.append((int(batch["completion_mask"].sum()), len(batch["prompt_ids"]) * width))
            return batch

    class Clock(TrainerCallback):
        def on_step_end(self, *_, **__):
            ends.append(time.perf_counter())

    count = request["problems"] * request["samples"]
    with tempfile.TemporaryDirectory() as out:
        config = trl.GRPOConfig(
            output_dir=out, report_to=[], save_strategy="no", logging_steps=1000, disable_tqdm=True, use_cpu=True,
            bf16=False, gradient_checkpointing=False, max_steps=request["updates"],
            per_device_train_batch_size=request["batch"], gradient_accumulation_steps=count // request["batch"],
            num_generations=request["samples"], max_completion_length=request["max_tokens"], temperature=1.0,
            learning_rate=request["learning_rate"], lr_scheduler_type="constant", beta=0.0, loss_type="dr_grpo",
            scale_rewards="none",
        )  # fmt: skip
        model = AutoModelForCausalLM.from_pretrained(request["model"], dtype=torch.float32)
        trainer = Counted(
            model=model, reward_funcs=reward, args=config, train_dataset=Dataset.from_list(rows),
            processing_class=tokenizer, callbacks=[Clock()],
        )  # fmt: skip
        trainer.train()
    sampled, cells = (statistics.mean(column) for column in zip(*seen[1:], strict=True))
    seconds = statistics.median(after - before for before, after in zip(ends, ends[1:], strict=False))
    print(json.dumps({"peer": f"TRL {trl.__version__} GRPOTrainer", "seconds": seconds, "sampled_tokens": sampled,
                      "cells": cells, "reward": statistics.mean(rewards)}))  # fmt: skip


if __name__ == "__main__":
    main()
