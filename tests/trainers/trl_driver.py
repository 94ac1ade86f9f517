# type: ignore  # its imports are in another environment
"""Two reward functions in TRL's GRPOTrainer: a step of training on a tiny model, and the logged rewards."""

import torch
from datasets import Dataset
from run import loaded
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM
from trl import GRPOConfig, GRPOTrainer


def main(adapter, folder, samples):
    module = loaded(adapter)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.eos_token = tokenizer.pad_token = "<|im_end|>"
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(vocab_size=len(tokenizer), hidden_size=16, intermediate_size=16, num_hidden_layers=1,
                    num_attention_heads=2, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id)
    )  # fmt: skip
    args = GRPOConfig(
        f"{folder}/grpo", per_device_train_batch_size=4, num_generations=4, max_completion_length=12, max_steps=1,
        logging_steps=1, report_to=[], use_cpu=True, bf16=False, save_strategy="no",
    )  # fmt: skip
    seen = []

    def looked_at(prompts, completions, completion_ids, **columns):
        rewards = module.step_reward(prompts, completions, completion_ids, **columns)
        seen.append({"prompts": prompts, "completions": completions, "rewards": rewards})
        return rewards

    problems = Dataset.from_dict({"prompt": [sample["problem"] for sample in samples]})
    trainer = GRPOTrainer(
        model, reward_funcs=[looked_at, module.step_reward_async], args=args, train_dataset=problems,
        processing_class=tokenizer,
    )  # fmt: skip
    trainer.train()
    return {"log": trainer.state.log_history[0], "seen": seen}
