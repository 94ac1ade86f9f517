"""docs/trajectories.md: every block runs, in order, in a folder that holds nothing but the run it starts from."""

import json

import pytest
from browser import served
from pages import Shell, blocks, text
from test_serve import call
from tiny_rl import save_run
from tiny_run import MODEL, save_tokenizer

import jprm
from jprm.apps.serve import ServeConfig
from jprm.apps.serve.app import make_app
from jprm.apps.serve.engine import Engine
from jprm.tree import read_records, tree_of

PAGE = "docs/trajectories.md"
BLOCKS = blocks(PAGE)


@pytest.fixture
def folder(one_device, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    save_run(tmp_path / "runs/tiny", MODEL, 0, 1.0)
    save_tokenizer(tmp_path / "runs/tiny/tokenizer.json")
    (tmp_path / "runs/tiny/tokenizer_config.json").write_text("{}")
    return tmp_path


@pytest.mark.breadth
def test_every_block_runs(folder):
    assert text(PAGE).count("tokens=1024") == 1
    shell = Shell(folder)
    for name, language, block in BLOCKS:
        block = block.replace("tokens=1024", "tokens=512")  # both of the page's trajectories have 369
        if name:
            (folder / name).write_text(block)
            if name == "label.py":
                shell.run("python label.py")
        elif language == "json":
            assert tree_of(json.loads(block)).steps == [1, 3]
        else:
            shell.run(block)
    scored = list(read_records(folder / "scored.jsonl"))
    assert [[m.get("label") for m in r["messages"]] for r in scored] == [[None, 1, None, 1], [None, -1, None, -1]]
    assert all(("score" in m) == (m["role"] == "assistant") for r in scored for m in r["messages"])
    report = json.loads((folder / "agents.json").read_text())
    assert report["n_turns"] == 4 and report["ahead"]["auroc"]["baseline"]


def test_a_server_scores_the_turns_of_a_trajectory(folder):
    record = json.loads(next(block for name, language, block in BLOCKS if language == "json" and not name))
    prm = jprm.load("runs/tiny")
    engine = Engine(prm, 512, "tiny")
    (ask,) = (block for name, _, block in BLOCKS if name == "ask.py")
    config = ServeConfig(longest=512)
    try:
        (response,) = call(engine, ("POST", "/v1/score", {"json": record}), config=config)
        with served(make_app([engine], config)) as (_, port):
            asked = Shell(folder).python(f"{ask}\nprint(*score('http://127.0.0.1:{port}', {record!r}))")
    finally:
        engine.close()
    (score_N,) = prm.score_trees([tree_of(record)])
    answer = response.json()
    said = [message.get("score") for message in answer["record"]["messages"]]
    assert said == [None, pytest.approx(score_N[1], abs=1e-6), None, pytest.approx(score_N[3], abs=1e-6)]
    assert answer["chains"][0]["nodes"] == [1, 3]
    assert [float(score) for score in asked.split()] == [said[1], said[3]]
