# type: ignore  # its imports are in another environment
"""OpenRLHF's own loading of a reward function, and its route of a reward into an experience."""

import asyncio
import types

from openrlhf.utils.agent import SingleTurnAgentExecutor
from transformers import AutoTokenizer


class Engine:
    """Stands in for vLLM: it gives the sample's ids."""

    def __init__(self, ids, text):
        self.output = types.SimpleNamespace(token_ids=ids, text=text, logprobs=None, finish_reason="stop")

    async def generate(self, ids, params, multi_modal_data=None):
        return types.SimpleNamespace(outputs=[self.output])


def main(adapter, folder, samples):
    tokenizer = AutoTokenizer.from_pretrained(folder)
    executor = SingleTurnAgentExecutor(adapter)
    params = types.SimpleNamespace(max_tokens=64, logprobs=None)

    async def run(sample):
        prompt = f"<q>{sample['problem']}</q>"
        engine = Engine(sample["ids"], tokenizer.decode(sample["ids"]))
        return await executor.execute(prompt, "4", params, 512, tokenizer, engine)

    outputs = [asyncio.run(run(sample)) for sample in samples]
    return [{key: output[key] for key in ("reward", "scores", "extra_logs")} for output in outputs]
