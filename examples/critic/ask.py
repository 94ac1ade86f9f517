# type: ignore  # its imports are in OpenHands' environment
"""Asks a served critic by OpenHands' own client: `success` at the end becomes the score of all turns of a run.

python ask.py http://localhost:8000 runs/critic/run runs/critic/test.jsonl runs/critic/asked.jsonl
"""

import json
import pathlib
import sys

from openhands.sdk.critic.impl.api import APIBasedCritic
from openhands.sdk.critic.impl.api.chat_template import ChatTemplateRenderer

url, run, source, output = sys.argv[1:]
name = pathlib.Path(run).name  # the server's name for the model
critic = APIBasedCritic(server_url=url, api_key="none", model_name=name, tokenizer_name="local")
template = (pathlib.Path(run) / "chat_template.jinja").read_text()
critic._template_renderer = ChatTemplateRenderer(chat_template=template)  # or the name of a tokenizer of the Hub
with open(source) as file, open(output, "w") as out:
    for record in map(json.loads, file):
        last = max(i for i, message in enumerate(record["messages"]) if message["role"] == "assistant")
        probs = critic.extract_prob_map(critic.classify_trace(record["messages"][: last + 1])).probs
        for message in record["messages"]:
            message.pop("score", None)
            if message["role"] == "assistant":
                message["score"] = probs["success"]
        out.write(json.dumps(record) + "\n")
