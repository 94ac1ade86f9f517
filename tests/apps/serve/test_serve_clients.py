"""The examples of `jprm.clients`: files of examples/trainers, as they stand there."""

import asyncio
import runpy
import sys
import types
from pathlib import Path

import pytest
from browser import served
from test_serve import CONFIG, chains, engine, prm  # noqa: F401  (fixtures, which tests name as arguments)

from jprm.apps.serve.app import make_app
from jprm.methods.rl.credit import min_form

ROOT = Path(__file__).parents[3]
CHAINS = chains(3, seed=2)


class Base:
    """What search-and-learn's class does before its subclasses."""

    def __init__(self, search_config, **options):
        self.search_config = search_config
        self.model, self.tokenizer = self.load_model_and_tokenizer(**options)  # pyright: ignore[reportAttributeAccessIssue]


@pytest.fixture
def server(engine, monkeypatch):  # noqa: F811
    """The server on a socket, whose address the examples find in the environment."""
    with served(make_app([engine], CONFIG)) as (_, port):
        monkeypatch.setenv("JPRM_URL", f"http://127.0.0.1:{port}")
        yield f"http://127.0.0.1:{port}"


def example(name):
    """Returns what a file of examples/trainers defines."""
    return runpy.run_path(str(ROOT / "examples" / "trainers" / f"{name}_rewards.py"))


def test_the_rewards_of_trl_are_the_chains_scores(server, prm):  # noqa: F811
    module = example("trl")
    problems, texts = [c["problem"] for c in CHAINS], ["\n".join(c["steps"]) for c in CHAINS]
    expected = [float(prm.score(**chain).prod()) for chain in CHAINS]
    assert prm.rule == "prod"
    assert module["step_reward"](problems, texts, None, answer=[1, 2, 3]) == pytest.approx(expected, abs=1e-6)
    chats = [[{"role": "user", "content": p}] for p in problems], [[{"role": "assistant", "content": t}] for t in texts]
    assert asyncio.run(module["step_reward_async"](*chats, None)) == pytest.approx(expected, abs=1e-6)
    assert module["step_reward"](["p"], [" "], None) == [None]


def test_the_reward_of_openrlhf_is_the_sum_of_its_tokens(server, prm):  # noqa: F811
    module, chain = example("openrlhf"), CHAINS[0]
    rewards = module["reward_func"]([chain["problem"] + "\n".join(chain["steps"])], [chain["problem"]], ["4"])
    scores = prm.score(**chain)
    assert rewards["rewards"] == pytest.approx(float(min_form(scores, 0.1).sum()), abs=1e-5)
    assert rewards["scores"] == pytest.approx(float(scores.prod()), abs=1e-6)
    assert rewards["extra_logs"] == {"steps": len(scores), "lowest_step": pytest.approx(float(scores.min()), abs=1e-6)}


def test_search_and_learn_gets_every_steps_score(server, prm, monkeypatch):  # noqa: F811
    monkeypatch.setitem(sys.modules, "sal.models.reward_models", types.SimpleNamespace(PRM=Base))
    model = runpy.run_path(str(ROOT / "examples/trainers/search_and_learn.py"))["RemotePRM"](None)
    first, second, third = CHAINS
    answers = [["\n\n".join(first["steps"]), "\n\n".join(first["steps"][:2]), " "], ["\n\n".join(second["steps"])]]
    (whole, part, blank), (other,) = model.score([first["problem"], second["problem"]], answers)
    assert whole == pytest.approx(prm.score(**first).tolist(), abs=1e-6)
    assert part == pytest.approx(whole[:2], abs=1e-6) and blank == [0.0]
    assert other == pytest.approx(prm.score(**second).tolist(), abs=1e-6)
