"""The clients in docs/serving.md, run as they stand there against the server."""

import re
import sys
import types
from pathlib import Path

import pytest
from test_serve import call, chains, engine, post, prm  # noqa: F401  (fixtures, which tests name as arguments)

PAGE = Path(__file__).parents[1] / "docs" / "serving.md"
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
        self.model, self.tokenizer = self.load_model_and_tokenizer(**options)


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


def test_the_reward_of_trl_is_the_chains_score(client, prm):  # noqa: F811
    reward = client("process_reward")["process_reward"]
    problems, texts = [c["problem"] for c in CHAINS], ["\n".join(c["steps"]) for c in CHAINS]
    expected = [float(prm.score(**chain).prod()) for chain in CHAINS]
    assert prm.rule == "prod"
    assert reward(problems, texts, answer=[1, 2, 3]) == pytest.approx(expected, abs=1e-6)
    chats = [[{"role": "user", "content": p}] for p in problems], [[{"role": "assistant", "content": t}] for t in texts]
    assert reward(*chats) == pytest.approx(expected, abs=1e-6)


def test_search_and_learn_gets_every_steps_score(client, prm):  # noqa: F811
    made = client("RemotePRM")["RemotePRM"](None)
    first, second, third = CHAINS
    answers = [["\n\n".join(first["steps"]), "\n\n".join(first["steps"][:2]), " "], ["\n\n".join(second["steps"])]]
    (whole, part, blank), (other,) = made.score([first["problem"], second["problem"]], answers)
    assert whole == pytest.approx(prm.score(**first).tolist(), abs=1e-6)
    assert part == pytest.approx(whole[:2], abs=1e-6) and blank == [0.0]
    assert other == pytest.approx(prm.score(**second).tolist(), abs=1e-6)
