"""Process rewards for TRL's GRPOTrainer, from `jprm serve`.

    trainer = GRPOTrainer(..., reward_funcs=[correct, step_reward])      # or step_reward_async

TRL takes one number a completion: the chain's score by the model's rule. All completions of a batch are asked for
together, so the completions of one prompt share what they have in common. Put a verifier of answers beside it: a policy
learns to please a PRM that stands alone.

JPRM_URL is the server's address, JPRM_API_KEY its key if it has one. `jprm.clients` needs only the package httpx2:
`pip install --no-deps -e .` in a clone of jprm, then `pip install httpx2`.
"""

from jprm.clients import AsyncClient, Client

client = Client()


def step_reward(prompts, completions, completion_ids, log_metric=None, **columns):
    """Returns each completion's score; None, which TRL leaves out, for a blank one."""
    return scores(client.rewards(samples(prompts, completions)), log_metric)


async def step_reward_async(prompts, completions, completion_ids, log_metric=None, **columns):
    """As `step_reward`; TRL runs it beside other asynchronous rewards."""
    async with AsyncClient() as client:
        return scores(await client.rewards(samples(prompts, completions)), log_metric)


def samples(prompts, completions):
    """Returns what TRL passes, texts or messages, as samples of a problem."""
    records = []
    for prompt, completion in zip(prompts, completions, strict=True):
        if isinstance(completion, str):
            records.append({"problem": prompt, "response": completion})
        else:
            system = [message["content"] for message in prompt if message["role"] == "system"]
            records.append({"problem": prompt[-1]["content"], "response": completion[-1]["content"]})
            records[-1].update({"system": system[0]} if system else {})
    return records


def scores(rewarded, log_metric):
    lowest = [min(step["score"] for step in sample["steps"]) for sample in rewarded if sample["steps"]]
    if log_metric and lowest:
        log_metric("lowest_step", sum(lowest) / len(lowest))
    return [sample["score"] for sample in rewarded]
