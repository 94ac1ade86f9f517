# type: ignore  # its imports are in another environment
"""The resources server in NeMo Gym's own application: what /verify and /step answer."""

from unittest.mock import MagicMock

from fastapi.testclient import TestClient
from nemo_gym.base_resources_server import BaseResourcesServerConfig
from nemo_gym.server_utils import ServerClient
from run import loaded


def body(sample, text, with_ids):
    part = {"type": "output_text", "text": text, "annotations": []}
    message = {"id": "m", "type": "message", "role": "assistant", "status": "completed", "content": [part]}
    if with_ids:
        message |= {"prompt_token_ids": [1], "generation_token_ids": sample["ids"], "generation_log_probs": []}
    response = {"id": "r", "created_at": 0.0, "model": "policy", "object": "response", "output": [message],
                "parallel_tool_calls": False, "tool_choice": "none", "tools": []}  # fmt: skip
    asked = {"input": [{"role": "user", "content": sample["problem"]}]}
    return {"responses_create_params": asked, "response": response}


def main(adapter, folder, samples):
    module = loaded(adapter)
    config = BaseResourcesServerConfig(host="127.0.0.1", port=0, entrypoint="", name="rewards")
    server = module.StepRewardServer(config=config, server_client=MagicMock(spec=ServerClient))
    client = TestClient(server.setup_webserver())
    answers = []
    for sample in samples:
        for path, with_ids in (("/verify", True), ("/step", False)):
            answer = client.post(path, json=body(sample, sample["text"], with_ids))
            assert answer.status_code == 200, answer.text
            answers.append(answer.json())
    return [{k: a[k] for k in ("reward", "step_rewards", "steps", "token_rewards")} for a in answers]
