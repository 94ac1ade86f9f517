"""Process rewards for OpenRLHF, from `jprm serve`: `--reward.remote_url .../openrlhf_rewards.py`.

OpenRLHF calls `reward_func` with one sample at a time, and takes one number: here the sum of the rewards of its tokens
under a credit, which with min_form is close to the lowest step's score. Its trainer puts that number on the last token,
and has no place for rewards of other tokens.

JPRM_URL is the server's address, JPRM_API_KEY its key if it has one, JPRM_CREDIT the credit. The server's `--view` says
how prompts are written, and what ends a response. `jprm.clients` needs only the package httpx2:
`pip install --no-deps -e .` in a clone of jprm, then `pip install httpx2`.
"""

import os

from jprm.clients import Client

client = Client()


def reward_func(queries, prompts, labels):
    """Returns the reward, the chain's score, and figures for the log."""
    pairs = zip(queries, prompts, strict=True)
    samples = [{"prompt": prompt, "response": query[len(prompt) :]} for query, prompt in pairs]
    (sample,) = client.rewards(samples, credit=os.environ.get("JPRM_CREDIT", "min_form"))
    scores = [step["score"] for step in sample["steps"]]
    reward = sum(step["reward"] for step in sample["steps"]) + sample["tail_reward"]
    logs = {"steps": float(len(scores)), "lowest_step": min(scores, default=0.0)}
    return {"rewards": reward, "scores": sample["score"] or 0.0, "extra_logs": logs}
