"""Clients: the one in docs/serving.md as it stands there, and files of examples/trainers, against the server."""

import asyncio
import re
import runpy
import sys
import types
from pathlib import Path

import pytest
from test_serve import call, chains, engine, post, prm  # noqa: F401  (fixtures, which tests name as arguments)

from jprm.methods.rl.credit import min_form

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "serving.md"
CHAINS = chains(3, seed=2)


class Client:
    """Stands in for httpx.Client: it calls the application without a socket."""

    def __init__(self, engine):  # noqa: F811
        self.engine = engine

    def post(self, path, json):
        return call(self.engine, post(path, json))[0]


class Base:
    """What search-and-learn's class does before its subclasses."""

    def __init__(self, search_config, **options):
        self.search_config = search_config
        self.model, self.tokenizer = self.load_model_and_tokenizer(**options)  # pyright: ignore[reportAttributeAccessIssue]


@pytest.fixture
def client(engine, monkeypatch):  # noqa: F811
    """Returns the names that a page's block with a word in it defines."""
    httpx = types.SimpleNamespace(Client=lambda base_url, timeout: Client(engine))
    monkeypatch.setitem(sys.modules, "httpx", httpx)
    monkeypatch.setitem(sys.modules, "sal.models.reward_models", types.SimpleNamespace(PRM=Base))

    def run(word):
        (block,) = [code for code in re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL) if word in code]
        names = {}
        exec(compile(block, "docs/serving.md", "exec"), names)
        return names

    return run


def adapter(name, engine, monkeypatch):  # noqa: F811
    """Returns a file of examples/trainers whose requests go to the application without a socket."""
    path = ROOT / "examples" / "trainers" / f"{name}_rewards.py"
    module = runpy.run_path(str(path))
    for function in [value for value in module.values() if isinstance(value, types.FunctionType)]:
        monkeypatch.setitem(
            function.__globals__, "post", lambda body: call(engine, post("/v1/rewards", body))[0].json()
        )
    return module


def test_the_rewards_of_trl_are_the_chains_scores(engine, prm, monkeypatch):  # noqa: F811
    module = adapter("trl", engine, monkeypatch)
    problems, texts = [c["problem"] for c in CHAINS], ["\n".join(c["steps"]) for c in CHAINS]
    expected = [float(prm.score(**chain).prod()) for chain in CHAINS]
    assert prm.rule == "prod"
    assert module["step_reward"](problems, texts, None, answer=[1, 2, 3]) == pytest.approx(expected, abs=1e-6)
    chats = [[{"role": "user", "content": p}] for p in problems], [[{"role": "assistant", "content": t}] for t in texts]
    assert asyncio.run(module["step_reward_async"](*chats, None)) == pytest.approx(expected, abs=1e-6)
    assert module["step_reward"](["p"], [" "], None) == [None]


def test_the_reward_of_openrlhf_is_the_sum_of_its_tokens(engine, prm, monkeypatch):  # noqa: F811
    module, chain = adapter("openrlhf", engine, monkeypatch), CHAINS[0]
    given = module["reward_func"]([chain["problem"] + "\n".join(chain["steps"])], [chain["problem"]], ["4"])
    scores = prm.score(**chain)
    assert given["rewards"] == pytest.approx(float(min_form(scores, 0.1).sum()), abs=1e-5)
    assert given["scores"] == pytest.approx(float(scores.prod()), abs=1e-6)
    assert given["extra_logs"] == {"steps": len(scores), "lowest_step": pytest.approx(float(scores.min()), abs=1e-6)}


def test_search_and_learn_gets_every_steps_score(client, prm):  # noqa: F811
    made = client("RemotePRM")["RemotePRM"](None)
    first, second, third = CHAINS
    answers = [["\n\n".join(first["steps"]), "\n\n".join(first["steps"][:2]), " "], ["\n\n".join(second["steps"])]]
    (whole, part, blank), (other,) = made.score([first["problem"], second["problem"]], answers)
    assert whole == pytest.approx(prm.score(**first).tolist(), abs=1e-6)
    assert part == pytest.approx(whole[:2], abs=1e-6) and blank == [0.0]
    assert other == pytest.approx(prm.score(**second).tolist(), abs=1e-6)
