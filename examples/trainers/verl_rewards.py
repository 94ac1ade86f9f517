# type: ignore  # its imports are in the trainer's environment
"""Process rewards for verl, from `jprm serve`: a custom reward function, or a reward manager with rewards of tokens.

    reward.custom_reward_function.path=.../verl_rewards.py            one number a response: the chain's score

    reward.reward_manager.source=importlib                            a reward at the token that ends each step
    reward.reward_manager.name=StepRewardManager
    reward.reward_manager.module.path=.../verl_rewards.py

Rewards of tokens need verl to compute rewards after rollouts (`RewardLoopManager.compute_rm_score`). Where its agent
loops compute them meanwhile, verl keeps one number a response, and the manager gives their sum.

JPRM_URL is the server's address, JPRM_API_KEY its key if it has one, JPRM_CREDIT the credit, JPRM_TOKENIZER the name
that the server's `--tokenizer` gives the policy's tokenizer.
"""

import asyncio
import json
import os
import urllib.request

try:
    from verl.experimental.reward_loop.reward_manager.base import RewardManagerBase
except ImportError:
    RewardManagerBase = object


async def compute_score(data_source, solution_str, ground_truth, extra_info=None, **options):
    """Returns the score of a response. `extra_info["question"]` is the problem, as verl's data scripts write it."""
    sample = {"problem": extra_info["question"], "response": solution_str}
    (rewarded,) = (await asyncio.to_thread(post, {"samples": [sample]}))["samples"]
    lowest = min((step["score"] for step in rewarded["steps"]), default=0.0)
    return {"score": rewarded["score"] or 0.0, "lowest_step": lowest, "steps": len(rewarded["steps"])}


class StepRewardManager(RewardManagerBase):
    """Rewards the tokens that end steps, under a credit."""

    def __init__(self, config, tokenizer, compute_score, reward_router_address=None, reward_model_tokenizer=None):
        super().__init__(config, tokenizer, compute_score)

    async def run_single(self, data):
        item = data[-1]
        ids = item.batch["responses"]
        ids = ids[: int(item.batch["attention_mask"][-len(ids) :].sum())].tolist()
        messages = list(item.non_tensor_batch["raw_prompt"])
        system = [message["content"] for message in messages if message["role"] == "system"]
        sample = {"problem": messages[-1]["content"], "ids": ids} | ({"system": system[0]} if system else {})
        body = {"credit": os.environ.get("JPRM_CREDIT", "min_form"), "tokenizer": os.environ.get("JPRM_TOKENIZER", "")}
        (rewarded,) = (await asyncio.to_thread(post, body | {"samples": [sample]}))["samples"]
        reward = Rewards(sum(rewarded["token_rewards"]))
        reward.tokens = rewarded["token_rewards"]
        return {"reward_score": reward, "reward_extra_info": {"acc": rewarded["score"] or 0.0}}

    @classmethod
    def assemble_rm_scores(cls, data, scores):
        rewards = super().assemble_rm_scores(data, [0.0] * len(scores))
        for row, reward in zip(rewards, scores, strict=True):
            row[: len(reward.tokens)] = row.new_tensor(reward.tokens)
        return rewards


class Rewards(float):
    """The sum of the rewards of tokens, which it also holds. verl's other paths take it as a number."""


def post(body):
    url, key = os.environ.get("JPRM_URL", "http://localhost:8000"), os.environ.get("JPRM_API_KEY")
    headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
    request = urllib.request.Request(url + "/v1/rewards", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=300) as answer:
        return json.load(answer)
