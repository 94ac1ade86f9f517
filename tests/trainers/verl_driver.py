# type: ignore  # its imports are in another environment
"""verl's own loading of a reward function, and its reward loop with a reward manager."""

import asyncio

import numpy as np
import ray
import torch
from omegaconf import OmegaConf
from tensordict import TensorDict
from transformers import AutoTokenizer
from verl import DataProto
from verl.experimental.reward_loop.reward_loop import RewardLoopManager
from verl.trainer.ppo.reward import load_reward_manager


def config(adapter, folder, manager):
    named = {"source": "importlib", "name": "StepRewardManager", "module": {"path": adapter}} if manager else None
    return OmegaConf.create(
        {
            "actor_rollout_ref": {"model": {"path": folder, "tokenizer_path": folder}},
            "reward": {
                "num_workers": 2,
                "custom_reward_function": {"path": None if manager else adapter, "name": "compute_score"},
                "reward_manager": named or {"source": "register", "name": "naive"},
                "reward_model": {"enable": False},
            },
        }
    )


def main(adapter, folder, samples):
    asyncio.set_event_loop(asyncio.new_event_loop())
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids = [torch.tensor(sample["ids"]) for sample in samples]
    responses = torch.nn.utils.rnn.pad_sequence(ids, batch_first=True, padding_value=0)
    mask = torch.nn.utils.rnn.pad_sequence([torch.ones_like(x) for x in ids], batch_first=True, padding_value=0)
    prompts = torch.ones(len(samples), 3, dtype=torch.long)
    batch = TensorDict(
        {"prompts": prompts, "responses": responses, "attention_mask": torch.cat([torch.ones_like(prompts), mask], 1)},
        batch_size=len(samples),
    )
    columns = {
        "raw_prompt": [[{"role": "user", "content": sample["problem"]}] for sample in samples],
        "data_source": ["sums"] * len(samples),
        "reward_model": [{"ground_truth": "4"}] * len(samples),
        "extra_info": [{"question": sample["problem"]} for sample in samples],
    }
    data = DataProto(batch, {name: np.array([*values, None], dtype=object)[:-1] for name, values in columns.items()})

    function = load_reward_manager(config(adapter, folder, False), tokenizer)

    async def scored_each():
        return [await function.run_single(data[i : i + 1]) for i in range(len(data))]

    scores = [score["reward_score"] for score in function.loop.run_until_complete(scored_each())]
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    out = RewardLoopManager(config(adapter, folder, True)).compute_rm_score(data)
    ray.shutdown()
    return {"scores": scores, "token_rewards": out.batch["rm_scores"].tolist()}
