"""Process rewards for TRL's GRPOTrainer, from `jprm serve`.

    trainer = GRPOTrainer(..., reward_funcs=[correct, step_reward])      # or step_reward_async

TRL takes one number a completion: the chain's score by the model's rule (`rule` in the request changes it). All
completions of a batch are one request, so the completions of one prompt share what they have in common. Put a verifier
of answers beside it: a policy learns to please a PRM that stands alone.

JPRM_URL is the server's address, JPRM_API_KEY its key if it has one.
"""

import asyncio
import json
import os
import urllib.request


def step_reward(prompts, completions, completion_ids, log_metric=None, **columns):
    """Returns each completion's score; None, which TRL leaves out, for a blank one."""
    samples = []
    for prompt, completion in zip(prompts, completions, strict=True):
        if isinstance(completion, str):
            samples.append({"problem": prompt, "response": completion})
        else:
            system = [message["content"] for message in prompt if message["role"] == "system"]
            samples.append({"problem": prompt[-1]["content"], "response": completion[-1]["content"]})
            samples[-1].update({"system": system[0]} if system else {})
    rewarded = post({"samples": samples})["samples"]
    lowest = [min(step["score"] for step in sample["steps"]) for sample in rewarded if sample["steps"]]
    if log_metric and lowest:
        log_metric("lowest_step", sum(lowest) / len(lowest))
    return [sample["score"] for sample in rewarded]


async def step_reward_async(prompts, completions, completion_ids, **columns):
    """As `step_reward`; TRL runs it beside other asynchronous rewards."""
    return await asyncio.to_thread(step_reward, prompts, completions, completion_ids, **columns)


def post(body):
    url, key = os.environ.get("JPRM_URL", "http://localhost:8000"), os.environ.get("JPRM_API_KEY")
    headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
    request = urllib.request.Request(url + "/v1/rewards", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=300) as answer:
        return json.load(answer)
