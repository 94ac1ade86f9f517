"""Blocks of pages that stand alone: each runs in a process of its own, in a folder with what the page has."""

import ast

import pytest
from browser import served
from pages import REPOSITORY, Shell, blocks
from test_serve import CONFIG, chains, prm  # noqa: F401  (a fixture, which tests name as an argument)
from toy_policy import Markov

from jprm.apps.serve.app import make_app
from jprm.apps.serve.engine import Engine

CONTINUED = {
    "docs/extending.md": "test_extending.py",
    "docs/trajectories.md": "test_trajectories_page.py",
    "docs/tutorial.md": "test_tutorial.py",
}
"""Pages whose blocks continue earlier ones, and the tests that run them in order."""

ALONE = {
    "README.md": 1, "docs/data.md": 1, "docs/environments.md": 3, "docs/evidence.md": 1,
    "docs/reinforcement_learning.md": 1, "docs/serving.md": 2,
}  # fmt: skip
"""Pages, and how many blocks of each the tests below run."""

STUBS = {
    "openai.py": """
import json, types, urllib.request

class OpenAI:
    def __init__(self, base_url, api_key):
        self.url, self.chat = base_url, types.SimpleNamespace(completions=types.SimpleNamespace(create=self.create))

    def create(self, extra_body, **body):
        data = json.dumps(body | extra_body).encode()
        request = urllib.request.Request(f"{self.url}/chat/completions", data, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request) as response:
            return json.load(response)
""",
}
"""Of other projects, what the pages' blocks use: they are not installed here."""


def code(page):
    return [block for _, language, block in blocks(page) if language == "python"]


@pytest.fixture
def shell(tmp_path):
    return Shell(tmp_path)


@pytest.fixture
def trained(shell, tiny_run):
    """The shell of a folder with `runs/tiny`."""
    (shell.folder / "runs").mkdir()
    (shell.folder / "runs/tiny").symlink_to(tiny_run.folder)
    return shell


def test_every_page_with_code_is_run():
    pages = [*REPOSITORY.glob("*.md"), *REPOSITORY.glob("docs/**/*.md")]
    names = [str(page.relative_to(REPOSITORY)) for page in pages]
    counts = {name: sum(language in ("python", "sh") for _, language, _ in blocks(name)) for name in names}
    assert {name: count for name, count in counts.items() if count and name not in CONTINUED} == ALONE
    assert all(counts[name] for name in CONTINUED)


def test_readme_scores_in_python(trained):
    """The README's Python gives a probability of each step."""
    (block,) = code("README.md")
    printed = trained.python(block.replace("prm.score(", "scores = prm.score(") + "\nprint(*scores)")
    scores = [float(score) for score in printed.split()]
    assert len(scores) == 3 and all(0 <= score <= 1 for score in scores)


@pytest.mark.breadth
def test_records_of_pandas_are_scored(trained):
    pandas = pytest.importorskip("pandas")
    pytest.importorskip("pyarrow")
    records = chains(3)
    pandas.DataFrame(records).to_parquet(trained.folder / "chains.parquet")
    (block,) = code("docs/data.md")
    printed = trained.python(block + "\nprint(*map(len, scores))")
    assert printed.split() == [str(len(record["steps"])) for record in records]


@pytest.mark.breadth
def test_the_world_the_positions_and_the_settings(shell):
    for name, _, block in blocks("docs/environments.md"):
        if name:
            (shell.folder / name).write_text(block, encoding="utf-8")
    shell.run("python counting.py\npython positions.py")
    (settings,) = (block for name, _, block in blocks("docs/environments.md") if not name)
    assert shell.python(settings + "\nprint(environment.turns)").split() == ["8"]


def test_a_source_of_evidence(shell):
    (block,) = code("docs/evidence.md")
    assert shell.python(block + "\nprint(LENGTH.name, *LENGTH.numbers)").split() == ["length", "characters"]


@pytest.mark.breadth
def test_an_experiment_of_reinforcement_learning(shell):
    (block,) = code("docs/reinforcement_learning.md")
    assert shell.python(block + "\nprint(experiment().credit.name)").split() == ["min_form"]


@pytest.mark.breadth
def test_clients_of_a_server(shell, prm):  # noqa: F811
    for name, text in STUBS.items():
        (shell.folder / name).write_text(text)
    engine = Engine(prm, 256, "prm")
    try:
        with served(make_app([engine], CONFIG, policy=Markov())) as (_, port):
            client, openai = (block.replace("localhost:8000", f"127.0.0.1:{port}") for block in code("docs/serving.md"))
            openai = openai.replace("What is 2 + 2?", "p0 1")  # the toy policy's words
            ranked = shell.python(client + "\nprint(client.rerank('p', ['a', 'b', 'c']))")
            ended = shell.python(openai + "\nprint(answer['choices'][0]['finish_reason'])")
    finally:
        engine.close()
    assert sorted(index for index, _ in ast.literal_eval(ranked)) == [0, 1, 2] and ended.strip() == "stop"
