# type: ignore  # its imports are in another environment
"""slime's own call of a custom reward, single and batched. The folder is unused."""

import asyncio
import pathlib
import sys
import types

from slime.rollout.rm_hub import async_rm, batched_async_rm
from slime.utils.types import Sample


def main(adapter, folder, samples):
    sys.path.insert(0, str(pathlib.Path(adapter).parent))
    args = types.SimpleNamespace(custom_rm_path="slime_rewards.reward", reward_key="score")
    samples = [
        Sample(prompt=[{"role": "user", "content": sample["problem"]}], tokens=[1, 2, *sample["ids"]],
               response=sample["text"], response_length=len(sample["ids"]))
        for sample in samples
    ]  # fmt: skip

    async def run():
        single = [await async_rm(args, sample) for sample in samples]
        return single, await batched_async_rm(args, samples)

    single, batched = asyncio.run(run())
    for sample, reward in zip(samples, batched, strict=True):
        sample.reward = reward
    values = [sample.get_reward_value(args) for sample in samples]
    return {"single": single, "batched": batched, "values": values}
