# type: ignore  # its imports are in the trainer's environment
"""Process rewards for SkyRL, from `jprm serve`: a generator whose rewards are of tokens.

    class Experiment(BasePPOExp):  # skyrl.train.entrypoints.main_base
        def get_generator(self, cfg, tokenizer, inference_engine_client):
            return StepRewardGenerator(...)  # as SkyRLGymGenerator is made there

The environment's reward stays at the last token, and the credit's rewards are added where steps end. Single-turn
environments alone: of several turns the observations would be read as steps.

JPRM_URL is the server's address, JPRM_API_KEY its key if it has one, JPRM_CREDIT the credit, JPRM_TOKENIZER the name
that the server's `--tokenizer` gives the policy's tokenizer.
"""

import asyncio
import json
import os
import urllib.request

from skyrl.train.generators.skyrl_gym_generator import SkyRLGymGenerator


class StepRewardGenerator(SkyRLGymGenerator):
    async def generate(self, input_batch, *args, **options):
        output = await super().generate(input_batch, *args, **options)
        output["rewards"] = await asyncio.to_thread(with_steps, input_batch["prompts"], output)
        return output


def with_steps(prompts, output):
    """Returns rewards of tokens: the environment's at the last token, and the steps' at theirs. One request for all."""
    samples = []
    for prompt, ids, mask, reward in zip(
        prompts, output["response_ids"], output["loss_masks"], output["rewards"], strict=True
    ):
        if 0 in mask[: len(mask) - 1]:
            raise ValueError("a response has tokens that the policy did not write: several turns are not supported")
        system = [message["content"] for message in prompt if message["role"] == "system"]
        outcome = sum(reward) if isinstance(reward, list) else reward
        samples.append({"problem": prompt[-1]["content"], "ids": ids, "outcome": outcome})
        samples[-1].update({"system": system[0]} if system else {})
    body = {"credit": os.environ.get("JPRM_CREDIT", "min_form"), "tokenizer": os.environ.get("JPRM_TOKENIZER", "")}
    return [sample["token_rewards"] for sample in post(body | {"samples": samples})["samples"]]


def post(body):
    url, key = os.environ.get("JPRM_URL", "http://localhost:8000"), os.environ.get("JPRM_API_KEY")
    headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
    request = urllib.request.Request(url + "/v1/rewards", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=300) as answer:
        return json.load(answer)
