"""A critic of runs behind /classify: its answer is its own score of the last turn; OpenHands' client asks it.

JPRM_OPENHANDS names the Python of an environment with `openhands-sdk==1.58` (Python 3.12), unless this one has it.
"""

import dataclasses
import hashlib
import importlib.util
import json
import os
import pathlib
import runpy
import subprocess
import sys

import jax
import numpy as np
import pytest
from browser import served
from test_serve import call, post
from test_turns import read_by_jprm
from tiny import TINY, params, placed

from jprm.apps.serve import ServeConfig
from jprm.apps.serve.app import make_app
from jprm.apps.serve.engine import Engine
from jprm.methods.formats.chat_template import render
from jprm.model.mesh import MeshConfig, make_mesh
from jprm.score.scorer import PRM
from jprm.tokenizer import native_layout
from jprm.tree import tree_of

EXAMPLE = pathlib.Path(__file__).parents[3] / "examples/critic/experiment.py"
LABELS = runpy.run_path(str(EXAMPLE))["LABELS"]
"""The labels of OpenHands' client, in its order."""

MESSAGES = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Mend the test."},
    {"role": "assistant", "content": "I look at it."},
    {"role": "user", "content": "Go on."},
    {"role": "assistant", "content": "It is mended."},
]
CONFIG = ServeConfig(longest=4096)


@pytest.fixture(scope="module")
def critic():
    """A tiny model with an output a label, in the chat template of Qwen2.5, which ends turns with a newline."""
    config = dataclasses.replace(TINY, vocab_size=512, rope_theta=10000.0, head=f"sigmoid={','.join(LABELS)}")
    mesh = make_mesh(MeshConfig(), jax.local_devices()[:1])
    layout = native_layout(read_by_jprm("qwen2.5"))
    prm = PRM(placed(params(config), mesh), config, layout, mesh, "correctness", "critic", 0)
    running = Engine(prm, CONFIG.longest, "critic")
    yield running
    running.close()


def own(critic):
    """Returns the model's outputs at the last turn, in the order of the labels."""
    tree = tree_of({"messages": MESSAGES})
    (outputs,) = critic.prm.outputs_of([tree])
    return [float(outputs[label][tree.steps[-1]]) for label in LABELS]


def test_classify_answers_as_the_model_scores_the_last_turn(critic):
    chat = critic.prm.layout.tokenizer.chat
    text = render(chat.text, MESSAGES, dict(chat.tokens), reply=False)
    assert text.endswith("<|im_end|>\n")
    for sent in (text, text.rstrip(), text + "\n \n"):
        (got,) = call(critic, post("/classify", {"input": sent}), config=CONFIG)
        (answer,) = got.json()["data"]
        assert answer["num_classes"] == len(LABELS) and answer["label"] == LABELS[int(np.argmax(answer["probs"]))]
        assert answer["probs"] == pytest.approx(own(critic), abs=1e-6)  # rows of other lengths round otherwise


CLIENT = """
import json, sys
from openhands.sdk.critic.impl.api import APIBasedCritic
from openhands.sdk.event import MessageEvent, SystemPromptEvent
from openhands.sdk.llm import Message, TextContent
from openhands.sdk.tool.builtins import FinishTool

asked = json.load(sys.stdin)
critic = APIBasedCritic(server_url=asked["url"], api_key="none", model_name="critic", tokenizer_name="jprm/critic")
first, *others = asked["messages"]
prompt = TextContent(text=first["content"])
events = [SystemPromptEvent(source="agent", system_prompt=prompt, tools=FinishTool.create())]
for message in others:
    source = "agent" if message["role"] == "assistant" else "user"
    text = TextContent(text=message["content"])
    events.append(MessageEvent(source=source, llm_message=Message(role=message["role"], content=[text])))
result = critic.evaluate(events)
probs = critic.extract_prob_map(critic.classify_trace(asked["messages"])).probs
print(json.dumps({"labels": critic.all_labels, "probs": probs, "score": result.score, "message": result.message}))
"""


def python_with_openhands():
    if importlib.util.find_spec("openhands") and importlib.util.find_spec("openhands.sdk"):
        return sys.executable
    python = os.environ.get("JPRM_OPENHANDS", "")
    if not pathlib.Path(python).is_file():
        pytest.skip("needs `pip install openhands-sdk==1.58` on Python 3.12: set JPRM_OPENHANDS to its Python")
    return python


def offline(home, tokenizer):
    """Puts a tokenizer's template into the client's cache of templates; returns variables that lead to it."""
    folder = home / ".cache" / "chat_templates"
    folder.mkdir(parents=True)
    name = hashlib.md5(b"jprm/critic").hexdigest()
    (folder / f"{name}_tokenizer_config.json").write_text(json.dumps({"chat_template": tokenizer.chat.text}))
    return {"HOME": str(home), "LITELLM_LOCAL_MODEL_COST_MAP": "True"}


@pytest.mark.slow
def test_the_client_of_openhands_gets_its_labels_in_order(critic, tmp_path):
    python = python_with_openhands()
    variables = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    variables |= offline(tmp_path, critic.prm.layout.tokenizer)
    with served(make_app([critic], CONFIG)) as (_, port):
        asked = {"url": f"http://127.0.0.1:{port}", "messages": MESSAGES}
        done = subprocess.run(
            [python, "-c", CLIENT], input=json.dumps(asked), capture_output=True, text=True, env=variables
        )
    assert done.returncode == 0, done.stderr[-3000:]
    got = json.loads(done.stdout.splitlines()[-1])
    assert tuple(got["labels"]) == LABELS == tuple(got["probs"])
    assert [*got["probs"].values()] == pytest.approx(own(critic), abs=1e-6)
    assert 0 < got["score"] < 1 and f"Success: {got['score']:.2f}" in got["message"]
