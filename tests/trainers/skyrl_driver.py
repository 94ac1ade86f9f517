# type: ignore  # its imports are in another environment
"""SkyRL's generator with the rewards of tokens, in its environment for GSM8K."""

import asyncio
import sys
import typing

import typing_extensions

if sys.version_info < (3, 12):  # pydantic wants it of SkyRL's classes, which are written for 3.12
    typing.TypedDict = typing_extensions.TypedDict

from run import loaded
from skyrl.train.config import GeneratorConfig, SkyRLGymConfig
from transformers import AutoTokenizer


class Engine:
    """Stands in for the inference engine: it gives the samples' ids, one after the other."""

    def __init__(self, samples, tokenizer):
        self.samples, self.tokenizer, self.model_name = iter(samples), tokenizer, "policy"

    async def generate(self, request, **options):
        drawn_ids = [next(self.samples)["ids"] for _ in request.get("prompt_token_ids") or request["prompts"]]
        return {
            "responses": [self.tokenizer.decode(ids, skip_special_tokens=True) for ids in drawn_ids],
            "response_ids": drawn_ids,
            "stop_reasons": ["stop"] * len(drawn_ids),
            "response_logprobs": None,
        }


def main(adapter, folder, samples):
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.eos_token = tokenizer.pad_token = "<|im_end|>"
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}\n{% endfor %}"
    generator = loaded(adapter).StepRewardGenerator(
        GeneratorConfig(batched=True, max_input_length=512, use_conversation_multi_turn=False),
        SkyRLGymConfig(), Engine(samples, tokenizer), tokenizer,
    )  # fmt: skip
    prompts = [[{"role": "user", "content": sample["problem"]}] for sample in samples]
    output = asyncio.run(
        generator.generate(
            {"prompts": prompts, "env_classes": ["gsm8k"] * len(samples), "sampling_params": None,
             "env_extras": [{"reward_spec": {"ground_truth": "4"}} for _ in samples], "trajectory_ids": None,
             "batch_metadata": None}
        )
    )  # fmt: skip
    return {"rewards": output["rewards"], "response_ids": output["response_ids"]}
