"""Searches that a judge scores: each new step is asked about once, and the record keeps what was said."""

import pytest
from stub_server import reply
from test_judge import judge, write_judge
from toy_search import Script

from jprm.apps import cli
from jprm.methods.jobs.score import identity
from jprm.methods.judge.critiques import QWEN_CRITIQUE, JudgePrompt
from jprm.methods.policy import load as policies
from jprm.methods.search.beam import Beam
from jprm.methods.search.best_of_n import BestOfN
from jprm.methods.search.jobs import search_file
from jprm.methods.search.lockstep import SearchConfig, live_scorer
from jprm.tree import read_records, record_of, tree_of

TALK = JudgePrompt("talk", "{problem}: {steps} ?", step="{step}", separator=" ({critique}) ")
STEPS = Script({(): ["a", "b", "c"], ("a",): ["x. 1"], ("b",): ["y. 2", "z. 3"], ("c",): ["x. 1"]})
PROBABILITY = {"a": 0.2, "b": 0.8, "c": 0.7, "x. 1": 0.9, "y. 2": 0.4, "z. 3": 0.6}


def about(question):
    """The last step of a question of the prompt `talk`."""
    return question.removesuffix(" ?").rpartition(": " if "(" not in question else ") ")[2]


def verdict(number, body):
    """Yes in the fraction of ten samples that `PROBABILITY` has."""
    step = about(body["prompt"])
    word = "Yes" if body["seed"] < 10 * PROBABILITY[step] else "No"
    return reply(rf"on {step} \boxed{{{word}}}", tokens=7)


def run(folder, scorer, method, **config):
    (folder / "in.jsonl").write_text('{"problem": "p", "answer": 2}\n')
    config = SearchConfig(method, scorer.rule, **config)
    counts = search_file(
        STEPS, live_scorer(scorer), identity(scorer), folder / "in.jsonl", folder / "out.jsonl", config
    )
    (record,) = read_records(folder / "out.jsonl")
    assert record_of(tree_of(record)) == record
    return record, counts


def test_a_beam_asks_about_each_step_once(serve, tmp_path):
    server = serve(verdict)
    scorer = judge(server, TALK, samples=10)
    record, counts = run(tmp_path, scorer, Beam(width=2, expand=2))
    assert [(node["text"], node["score"]) for node in record["nodes"][:3]] == [("a", 0.2), ("b", 0.8), ("c", 0.7)]
    assert record["search"]["answer"] == "1" and record["search"]["score"] == pytest.approx(0.63)
    nodes = len(record["nodes"])
    assert nodes == 6 and len(server.requests) == 10 * nodes  # a is not continued
    assert (counts["judge_tokens"], record["judge"]["tokens"]) == (70 * nodes, 70 * nodes)
    assert record["judge"]["name"] == scorer.name == record["search"]["scorer"]["judge"]
    for critique in record["judge"]["critiques"]:
        (node,) = critique["nodes"]
        assert critique["text"].startswith(f"on {record['nodes'][node]['text']} ")
    [asked] = {body["prompt"] for _, body in server.requests if body["prompt"].endswith("z. 3 ?")}
    assert asked == r"p: b (on b \boxed{Yes}) z. 3 ?"  # the conversation of its path


def test_critiques_of_a_pool_name_every_sample_that_they_are_about(serve, tmp_path):
    scorer = judge(serve(verdict), TALK, samples=10)
    record, _ = run(tmp_path, scorer, BestOfN(6))
    texts = [step for sample in record["samples"] for step in sample["steps"]]
    assert len(record["samples"]) == 6
    places = [critique["nodes"] for critique in record["judge"]["critiques"][::10]]
    assert sorted(node for nodes in places for node in nodes) == list(range(len(texts)))
    assert all(len({texts[node] for node in nodes}) == 1 for nodes in places)
    assert [sample["scores"] for sample in record["samples"] if sample["steps"] == ["c", "x. 1"]] == [[0.7, 0.9]] * 2


def test_a_new_steps_score_is_what_critiques_of_its_chain_say_of_it(serve, tmp_path):
    """Of a prompt about whole chains: one of two critiques of the second step doubts the first."""
    verdict_of = lambda body: -body["seed"] if "<paragraph_1>" in body["prompt"] else -1  # noqa: E731
    server = serve(lambda n, body: reply(rf"\boxed{{{verdict_of(body)}}}"))
    record, _ = run(tmp_path, judge(server, QWEN_CRITIQUE, samples=2), BestOfN(1))
    assert record["samples"][0]["scores"] == [1.0, 0.5] and len(server.requests) == 4


def test_a_chain_with_a_step_that_no_critique_judges_is_not_chosen(serve, tmp_path):
    server = serve(lambda n, body: reply("?") if about(body["prompt"]) == "b" else verdict(n, body))
    scorer = judge(server, TALK, samples=10)
    record, _ = run(tmp_path, scorer, BestOfN(6))
    assert record["search"]["unscored_steps"] == 1 and record["search"]["answer"] == "1"
    assert record["judge"]["unreadable"] == 10 and sum("scores" in sample for sample in record["samples"]) == 4


def test_the_command(serve, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(policies, "load_policy", lambda path: STEPS)
    server = serve(verdict)
    prompt = {"like": "plain", "text": "{problem}: {steps} ?", "step": "{step}", "separator": " () "}
    write_judge(tmp_path / "judge.json", server, prompt=prompt)
    (tmp_path / "in.jsonl").write_text('{"problem": "p", "answer": 2}\n')
    paths = ["--input", str(tmp_path / "in.jsonl"), "--output", str(tmp_path / "out.jsonl")]
    args = ["search", "best-of-n", "--policy", "p", *paths, "--budget", "900", "--n", "3"]
    assert cli.main([*args, "--model", str(tmp_path / "judge.json")]) == 0
    assert cli.main([*args, "--model", str(tmp_path / "judge.json")]) == 0 and len(server.requests) == 6
    assert cli.main(args) == 2 and "--model" in capsys.readouterr().err
