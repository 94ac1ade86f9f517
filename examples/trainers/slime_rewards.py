"""Process rewards for slime, from `jprm serve`: `--custom-rm-path slime_rewards.reward --reward-key score`.

slime takes one number a sample, the entry of `--reward-key`. The dictionary also has `token_rewards`, one for each of
the sample's response tokens under a credit: a function of `--custom-reward-post-process-path` or
`--custom-convert-samples-to-train-data-path` finds them in `sample.reward`.

JPRM_URL is the server's address, JPRM_API_KEY its key if it has one, JPRM_CREDIT the credit, JPRM_TOKENIZER the name
that the server's `--tokenizer` gives the policy's tokenizer. A prompt is messages, or a text that its `--view` reads.
"""

import asyncio
import json
import os
import urllib.request


async def reward(args, samples, **options):
    """Returns the reward of one sample, or of each in a list (slime's batched form)."""
    several = isinstance(samples, list)
    sent = [asked(sample) for sample in (samples if several else [samples])]
    body = {"credit": os.environ.get("JPRM_CREDIT", "min_form"), "tokenizer": os.environ.get("JPRM_TOKENIZER", "")}
    rewarded = (await asyncio.to_thread(post, body | {"samples": sent}))["samples"]
    rewards = [
        {"score": sample["score"] or 0.0, "token_rewards": sample["token_rewards"],
         "lowest_step": min((step["score"] for step in sample["steps"]), default=0.0)}
        for sample in rewarded
    ]  # fmt: skip
    return rewards if several else rewards[0]


def asked(sample):
    ids = sample.tokens[len(sample.tokens) - sample.response_length :]
    if isinstance(sample.prompt, str):
        return {"prompt": sample.prompt, "ids": ids}
    system = [message["content"] for message in sample.prompt if message["role"] == "system"]
    return {"problem": sample.prompt[-1]["content"], "ids": ids} | ({"system": system[0]} if system else {})


def post(body):
    url, key = os.environ.get("JPRM_URL", "http://localhost:8000"), os.environ.get("JPRM_API_KEY")
    headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
    request = urllib.request.Request(url + "/v1/rewards", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=300) as answer:
        return json.load(answer)
