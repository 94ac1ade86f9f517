"""Process rewards for OpenRLHF, from `jprm serve`: `--reward.remote_url .../openrlhf_rewards.py`.

OpenRLHF calls `reward_func` with one sample at a time, and takes one number: here the sum of the rewards of its tokens
under a credit, which with min_form is close to the lowest step's score. Its trainer puts that number on the last token,
and has no place for rewards of other tokens.

JPRM_URL is the server's address, JPRM_API_KEY its key if it has one, JPRM_CREDIT the credit. The server's `--view` says
how prompts are written, and what ends a response.
"""

import json
import os
import urllib.request


def reward_func(queries, prompts, labels):
    """Returns the reward, the chain's score, and figures for the log."""
    (sample,) = rewarded(queries, prompts)
    scores = [step["score"] for step in sample["steps"]]
    reward = sum(step["reward"] for step in sample["steps"]) + sample["tail_reward"]
    logs = {"steps": float(len(scores)), "lowest_step": min(scores, default=0.0)}
    return {"rewards": reward, "scores": sample["score"] or 0.0, "extra_logs": logs}


def rewarded(queries, prompts):
    samples = [
        {"prompt": prompt, "response": query[len(prompt) :]} for query, prompt in zip(queries, prompts, strict=True)
    ]
    return post({"credit": credit(), "samples": samples})["samples"]


def credit():
    return os.environ.get("JPRM_CREDIT", "min_form")


def post(body):
    url, key = os.environ.get("JPRM_URL", "http://localhost:8000"), os.environ.get("JPRM_API_KEY")
    headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
    request = urllib.request.Request(url + "/v1/rewards", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=300) as answer:
        return json.load(answer)
