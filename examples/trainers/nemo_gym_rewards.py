# type: ignore  # its imports are in the trainer's environment
"""Process rewards for NeMo Gym, from `jprm serve`: a resources server with /verify and /step.

    entrypoint: nemo_gym_rewards.py

/verify gives the chain's score as `reward`; `step_rewards`, one a turn of the assistant; and `steps` with the span,
score and reward of each step within it. With responses that carry `generation_token_ids` it gives `token_rewards` too.
/step takes the same body before the episode ends, and gives the last turn's. One turn with text is supported.

JPRM_URL is the server's address, JPRM_API_KEY its key if it has one, JPRM_CREDIT the credit, JPRM_TOKENIZER the name
that the server's `--tokenizer` gives the policy's tokenizer.
"""

import asyncio
import json
import os
import urllib.request

from fastapi import HTTPException
from nemo_gym.base_resources_server import BaseVerifyRequest, BaseVerifyResponse, SimpleResourcesServer


class StepVerifyResponse(BaseVerifyResponse):
    step_rewards: list[float]
    steps: list[dict]
    token_rewards: list[float] | None = None


class StepRewardServer(SimpleResourcesServer):
    def setup_webserver(self):
        app = super().setup_webserver()
        app.post("/step")(self.verify)
        return app

    async def verify(self, body: BaseVerifyRequest) -> StepVerifyResponse:
        sent = {"credit": os.environ.get("JPRM_CREDIT", "min_form"), "samples": [sample_of(body)]}
        sent["tokenizer"] = os.environ.get("JPRM_TOKENIZER", "")
        (rewarded,) = (await asyncio.to_thread(post, sent))["samples"]
        turn = sum(step["reward"] for step in rewarded["steps"]) + rewarded["tail_reward"]
        return StepVerifyResponse(
            **body.model_dump(), reward=rewarded["score"] or 0.0, step_rewards=[turn], steps=rewarded["steps"],
            token_rewards=rewarded.get("token_rewards"),
        )  # fmt: skip


def sample_of(body):
    asked = body.responses_create_params.input
    messages = [{"role": "user", "content": asked}] if isinstance(asked, str) else [m.model_dump() for m in asked]
    texts = {message["role"]: text_of(message["content"]) for message in messages}
    answers = [item for item in body.response.output if item.type == "message"]
    if len(answers) != 1 or any(item.type == "function_call" for item in body.response.output):
        raise HTTPException(422, "one turn of the assistant with text is supported, and no calls")
    ids = getattr(answers[0], "generation_token_ids", None)
    response = {"ids": list(ids)} if ids else {"response": "".join(part.text for part in answers[0].content)}
    return {"problem": texts["user"], **({"system": texts["system"]} if "system" in texts else {}), **response}


def text_of(content):
    return content if isinstance(content, str) else "".join(part["text"] for part in content)


def post(body):
    url, key = os.environ.get("JPRM_URL", "http://localhost:8000"), os.environ.get("JPRM_API_KEY")
    headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
    request = urllib.request.Request(url + "/v1/rewards", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=300) as answer:
        return json.load(answer)


if __name__ == "__main__":
    StepRewardServer.run_webserver()
