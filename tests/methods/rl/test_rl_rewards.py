"""The reward functions in examples/trainers/README.md, as other trainers call them."""

import re
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import jprm

PAGE = (Path(__file__).resolve().parents[3] / "examples/trainers/README.md").read_text()


def block(name, **replaced):
    """The names that a code block defines."""
    (text,) = (code for code in re.findall(r"```python\n(.*?)```", PAGE, re.S) if f"def {name}(" in code)
    assert len(text.splitlines()) <= 25
    for old, new in replaced.items():
        text = re.sub(rf'^{old} = ".*"$', f"{old} = {new!r}", text, flags=re.M)
    names = {}
    exec(compile(text, name, "exec"), names)
    return names[name]


def test_verl_is_paid_for_right_answers_alone(serve):
    server = serve(lambda number, body: (200, {}, {"chains": [{"score": 0.6}]}))
    compute_score = block("compute_score", URL=server.url + "/score")
    extra = {"question": "What is 2 + 2?"}
    assert compute_score("gsm8k", "2 + 2 = 5. The answer is 5.", "4", extra) == 0.0 and not server.requests
    assert compute_score("gsm8k", "2 + 2 = 4. The answer is 4.", "4", extra) == pytest.approx(0.8)
    ((path, body),) = server.requests
    assert path == "/v1/score"
    assert body == {"problem": "What is 2 + 2?", "response": "2 + 2 = 4. The answer is 4."}


def test_openrlhf_is_paid_for_right_answers_alone(monkeypatch):
    pytest.importorskip("torch", reason="the extra 'parity' is not installed")
    scored = []

    def score(problem, steps):
        scored.append((problem, steps))
        return np.linspace(0.9, 0.4, len(steps))

    monkeypatch.setattr(jprm, "load", lambda folder, **_: SimpleNamespace(score=score))
    reward_func = block("reward_func")
    prompt = "<|im_start|>user\nWhat is 2 + 2?<|im_end|>\n<|im_start|>assistant\n"
    answers = ["2 + 2 = 4.\nThe answer is 4.<|im_end|>", "The answer is 5.<|im_end|>", ""]
    rewards = reward_func([prompt + text for text in answers], [prompt] * 3, ["4"] * 3)
    assert rewards["rewards"].tolist() == pytest.approx([0.7, 0.0, 0.0])
    assert scored == [("What is 2 + 2?", ["2 + 2 = 4.", "The answer is 4."])]
