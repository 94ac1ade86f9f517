"""Published runs of agents, read whole; pass^k, the chosen trial and the first bad turn."""

import itertools
import json

import numpy as np
import pytest

from jprm.apps.cli import main
from jprm.io.jsonl import write_records
from jprm.methods.evaluate.agents import agents_report, findings, section, tables
from jprm.methods.evaluate.blocks import PageModel, Table
from jprm.methods.evaluate.first_bad import agent_of, failed_of, first_bad_report
from jprm.methods.evaluate.run import format_of, source
from jprm.methods.evaluate.trials import chosen, pass_at, pass_hat, trials_of, trials_report
from jprm.tree import tree_of


def trial(task, solved, scores, **more):
    messages = [{"role": "user", "content": task}]
    messages += [{"role": "assistant", "content": f"turn {i}", "score": score} for i, score in enumerate(scores)]
    return tree_of({"messages": messages, "outcome": solved, **more})


def failed(step, scores, agents, **more):
    turns = [
        {"role": "assistant", "content": "x" * (i + 1), "score": score, "name": agent, "label": int(i < step)}
        for i, (score, agent) in enumerate(zip(scores, agents, strict=True))
    ]
    return tree_of({"messages": [{"role": "user", "content": "q"}, *turns], "outcome": 0, **more})


@pytest.mark.parametrize("solved", list(itertools.product([0.0, 1.0], repeat=4)))
def test_pass_figures_are_those_of_all_sets_of_k_trials(solved):
    for k in range(1, 5):
        sets = list(itertools.combinations(solved, k))
        assert pass_hat(np.array(solved), k) == pytest.approx(np.mean([min(s) for s in sets]))
        assert pass_at(np.array(solved), k) == pytest.approx(np.mean([max(s) for s in sets]))


def test_tau_bench_has_its_published_figures(shared_data):
    path = shared_data / "agents/tau_bench_gpt4o_airline.jsonl"
    assert format_of(path) == "tau_bench"
    trees = [tree_of(record) for record in source("tau_bench").records(path)]
    report = agents_report(trees, (0.5, 0.5), 0)["trials"]
    assert [round(figure["value"], 3) for figure in report["pass_hat"]] == [0.42, 0.273, 0.22, 0.2]
    assert all(figure["low"] < figure["value"] < figure["high"] for figure in report["pass_hat"])
    assert (report["n_tasks"], report["n_trials"]) == (50, 200)
    assert report["trivial"]["any"] == report["pass_hat"][0] and report["oracle"] == report["pass_at"][-1]
    turns = sum(m["role"] == "assistant" for line in path.open() for m in json.loads(line)["traj"])
    assert turns == sum(len(tree.steps) for tree in trees)


def test_who_and_when_is_read_whole(shared_data):
    path = shared_data / "agents/who_and_when.jsonl"
    assert format_of(path) == "who_and_when"
    lines = [json.loads(line) for line in path.open()]
    trees = [tree_of(record) for record in source("who_and_when").records(path)]
    assert len(trees) == 184
    for line, tree, failure in zip(lines, trees, failed_of(trees), strict=True):
        humans = sum(message["role"] == "human" for message in line["history"])
        assert len(tree.steps) + humans == len(line["history"]) and failure.place + humans == int(line["mistake_step"])
        assert all(message["content"].strip() in tree.nodes[-1].text for message in line["history"][-1:])
    generated = [tree for tree in trees if tree.extra["source_file"].startswith("Algorithm-Generated")]
    report = first_bad_report(generated, 0.5, 0)
    names = [{message["name"].lower() for message in line["history"]} for line in lines if "name" in line["history"][0]]
    chance = sum(1 / len(agents) for agents in names) / len(names)
    assert report["trivial"]["any agent"]["agent"]["value"] == pytest.approx(chance) and round(chance, 3) == 0.291


def test_a_choice_takes_the_highest_key_and_equal_ones_at_random():
    assert chosen(np.array([1.0, 2.0, 2.0]), np.array([1.0, 0.0, 1.0])) == 0.5
    trees = [trial("a", 0, [0.9, 0.1]), trial("a", 1, [0.5, 0.6, 0.5]), trial("b", 1, [0.2]), trial("b", 0, [0.8])]
    report = trials_report(trees, 0)
    figures = {key: figure["value"] for key, figure in report["chosen"].items()}
    assert figures == {"lowest": 0.5, "mean": 0.5, "last": 0.5}
    assert report["trivial"]["fewest turns"]["value"] == 0.25 and report["trivial"]["most turns"]["value"] == 0.75
    assert report["best_trivial"] == "most turns"
    assert report["ahead"]["lowest"]["value"] == pytest.approx(-0.25)
    assert trials_of(trees).keys["last"].tolist() == [0.1, 0.5, 0.2, 0.8]


def test_trials_without_outcomes_and_single_ones_are_left_out():
    assert trials_report([trial("a", 0.5, [1]), trial("a", 1, [1])], 0) == {}
    several = [trial("a", 1, [1]), trial("b", 1, [1]), trial("b", 0, [1])]
    report = trials_report(several, 0)
    assert (report["n_tasks"], report["n_trials"], report["n_single"], report["k"]) == (1, 2, 1, [1, 2])


def test_the_first_bad_turn_is_named_by_scores():
    log = failed(2, [0.9, 0.4, 0.6, 0.1], ["A", "B", "C (thought)", "B"], mistake_agent="c")
    report = first_bad_report([log], 0.5, 0)
    assert report["figures"] == ["step", "within_1", "within_3", "within_5", "agent"]
    values = {name: [figure["value"] for figure in row.values()] for name, row in report["scores"].items()}
    assert values == {"lowest": [0, 1, 1, 1, 0], "below": [0, 1, 1, 1, 0]}
    trivial = {name: [figure["value"] for figure in row.values()] for name, row in report["trivial"].items()}
    assert trivial["any"] == pytest.approx([1 / 4, 3 / 4, 1, 1, 1 / 4])
    assert trivial["any agent"] == pytest.approx([1 / 3])
    assert trivial["longest"] == trivial["last"] == [0, 1, 1, 1, 0]
    above = first_bad_report([log], 0.05, 0)["scores"]
    assert above["below"] == above["lowest"]  # no turn is below
    assert agent_of("Orchestrator (-> WebSurfer)") == "orchestrator"
    assert first_bad_report([trial("a", 1, [1.0])], 0.5, 0) == {}


def test_figures_of_agents_are_shown_and_need_no_model(tmp_path):
    records = [
        {"messages": [{"role": "user", "content": task}, {"role": "assistant", "content": "a", "name": "A",
                                                          "label": label}], "outcome": outcome}
        for task, label, outcome in [("a", 0, 1), ("a", 1, 0), ("b", 1, 1), ("b", None, 1)]
    ]  # fmt: skip
    write_records(tmp_path / "runs.jsonl", records)
    command = ["eval", "agents", "--input", str(tmp_path / "runs.jsonl"), "--output", str(tmp_path / "out.json")]
    assert main(command) == 0
    report = json.loads((tmp_path / "out.json").read_text())
    assert set(report) == {"trials", "first_bad", "too_long"}
    assert report["trials"]["pass_hat"][0]["value"] == 0.75
    titles = [table.title for table in tables(report)]
    assert any(title.startswith("First bad turn") for title in titles) and any("Trials" in title for title in titles)
    scored = [trial(task, int(outcome), [0.4, score]) for task, outcome, score in [("a", 1, 0.3), ("a", 0, 0.2)]]
    report = agents_report(scored, (0.5, 0.5), 0)
    assert any("best trivial" in table.title for table in tables(report | {"too_long": 0}))
    models = [PageModel(name, {"agents": report}) for name in ("one", "other")]
    page = [block for block in section(models) if isinstance(block, Table)]
    assert page and all(len(row) == len(block.columns) for block in page for row in block.rows if row)
    (solved,) = findings({"agents": report})
    assert solved.figure == report["trials"]["chosen"]["lowest"]
    assert solved.difference == report["trials"]["ahead"]["lowest"]
