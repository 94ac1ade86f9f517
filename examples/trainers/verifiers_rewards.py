# type: ignore  # its imports are in the trainer's environment
"""Process rewards for verifiers, from `jprm serve`: a mixin for tasks.

    class Sums(StepRewards, vf.Task[...]):
        ...

The task's `process_reward` is the chain's score. `trace.info["step_rewards"]` has for every node of the last branch the
rewards of its sampled tokens, in the layout of the node's `logprobs`, and None for nodes that the policy did not write.
One sampled turn is supported.

JPRM_URL is the server's address, JPRM_API_KEY its key if it has one, JPRM_CREDIT the credit, JPRM_TOKENIZER the name
that the server's `--tokenizer` gives the policy's tokenizer; without token ids in the trace the text is scored.
"""

import asyncio
import json
import os
import urllib.request

import verifiers.v1 as vf


class StepRewards:
    @vf.reward
    async def process_reward(self, trace) -> float:
        nodes = trace.branches[-1].nodes
        sampled = [k for k, node in enumerate(nodes) if node.sampled]
        if len(sampled) != 1:
            raise ValueError(f"one sampled turn is supported, and the trace has {len(sampled)}")
        node = nodes[sampled[0]]
        texts = {other.message.role: text_of(other.message.content) for other in nodes[: sampled[0]]}
        ids = [token for token, drawn in zip(node.token_ids, node.mask, strict=True) if drawn]
        sample = {"problem": texts["user"], **({"system": texts["system"]} if "system" in texts else {})}
        sample.update({"ids": ids} if ids else {"response": text_of(node.message.content)})
        body = {"credit": os.environ.get("JPRM_CREDIT", "min_form"), "tokenizer": os.environ.get("JPRM_TOKENIZER", "")}
        (rewarded,) = (await asyncio.to_thread(post, body | {"samples": [sample]}))["samples"]
        rewards = rewarded.get("token_rewards") or [step["reward"] for step in rewarded["steps"]]
        trace.info["step_rewards"] = [rewards if k == sampled[0] else None for k in range(len(nodes))]
        trace.record_metric("lowest_step", min((step["score"] for step in rewarded["steps"]), default=0.0))
        return rewarded["score"] or 0.0


def text_of(content):
    return content if isinstance(content, str) else "".join(part.text for part in content or [])


def post(body):
    url, key = os.environ.get("JPRM_URL", "http://localhost:8000"), os.environ.get("JPRM_API_KEY")
    headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
    request = urllib.request.Request(url + "/v1/rewards", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=300) as answer:
        return json.load(answer)
