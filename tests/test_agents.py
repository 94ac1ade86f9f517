"""Readers of agents' logs, and the figures of turns."""

import json
import pathlib

import numpy as np
import pytest

from jprm.apps.report.collect import chains, only_turns
from jprm.methods.data.readers import find
from jprm.methods.evaluate.agents import agents_report, best_thresholds, classes_at, f1, tables, turns_of
from jprm.tree import record_of, tree_of, with_scores

WANTED = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Where?"},
    {"role": "assistant", "content": "I look.", "reasoning_content": "Hm.", "tool_calls": [
        {"id": "c1", "type": "function", "function": {"name": "search", "arguments": {"q": "where"}}}]},
    {"role": "tool", "tool_call_id": "c1", "content": "Here."},
    {"role": "assistant", "content": "Here."},
]  # fmt: skip


def read(name, item, **options):
    reader = find(name)
    return list(reader.parse(item, "f:1", reader.options(**options)))


def plain(messages):
    return [{k: v for k, v in m.items() if v not in (None, "") or k == "content"} for m in messages]


LOGS = json.loads((pathlib.Path(__file__).parent / "turn_logs.json").read_text(encoding="utf-8"))
OPENAI, ANTHROPIC, RESPONSES, VERIFIERS, PARTS, BENCH = LOGS.values()
OTEL = {"traceId": "t", "attributes": PARTS}
OTLP = OTEL | {"attributes": [{"key": k, "value": {"stringValue": json.dumps(v)}} for k, v in PARTS.items()]}


@pytest.mark.parametrize(
    ("name", "item"),
    [("openai", OPENAI), ("openai", RESPONSES), ("anthropic", ANTHROPIC), ("verifiers", VERIFIERS), ("otel", OTEL),
     ("otel", OTLP), ("agent_process_bench", BENCH)],
)  # fmt: skip
def test_a_log_is_the_trajectory_that_it_tells(name, item):
    (record,) = read(name, json.loads(json.dumps(item)))
    messages = [{k: v for k, v in message.items() if k != "label"} for message in record["messages"]]
    assert plain(messages) == WANTED
    assert [tool.get("function", tool)["name"] for tool in record["tools"]] == ["search"]
    assert record_of(tree_of(record)) | {"segment": "turn"} == record
    if name == "agent_process_bench":
        assert [m.get("label") for m in record["messages"]] == [None, None, 0, None, -1]
        assert record["outcome"] == 0 and record["problem"] == "Where?" and record["semantics"] == "rating"
    if name == "verifiers":
        assert record["outcome"] == 0.5 and record["example_id"] == 3


def agent(seed, labels, scores, outcome=1):
    """Returns a trajectory with a label and a score for each turn, which searches and at last answers."""
    messages: list[dict] = [{"role": "user", "content": f"task {seed}"}]
    for i, (label, score) in enumerate(zip(labels, scores, strict=True)):
        call = {"function": {"name": "search", "arguments": {"q": "again" if i % 2 else f"{i}"}}}
        last = i == len(labels) - 1
        turn: dict = {"role": "assistant", "content": "done" if last else "", "label": label, "score": score}
        messages.append(turn if last else turn | {"tool_calls": [call]})
        if not last:
            messages.append({"role": "tool", "content": "error: none" if label == -1 else "a row"})
    return tree_of({"messages": messages, "semantics": "rating", "outcome": outcome})


def brute_force(trees, low, high):
    """Returns step accuracy, the fraction of right first bad turns, and F1 of bad turns, turn by turn."""
    right = total = firsts = hits = named = wanted = 0
    for tree in trees:
        labels = [tree.nodes[i].label for i in tree.steps]
        classes = [-1 if tree.nodes[i].score < low else 1 if tree.nodes[i].score >= high else 0 for i in tree.steps]
        right += sum(a == b for a, b in zip(labels, classes, strict=True))
        total += len(labels)
        first = [marks.index(-1) if -1 in marks else -1 for marks in (labels, classes)]
        firsts += first[0] == first[1]
        hits += sum(a == b == -1 for a, b in zip(labels, classes, strict=True))
        named, wanted = named + classes.count(-1), wanted + labels.count(-1)
    return right / total, firsts / len(trees), 2 * hits / (named + wanted)


def test_figures_equal_a_count_turn_by_turn():
    rng = np.random.default_rng(0)
    trees = []
    for seed in range(40):
        labels = rng.choice([-1, 0, 1], rng.integers(1, 6)).tolist()
        scores = (1 / (1 + np.exp(-np.array(labels) - rng.normal(size=len(labels))))).tolist()
        trees.append(agent(seed, labels, scores, int(rng.integers(2))))
    report = agents_report(trees, (0.4, 0.6), seed=0)
    names = ("step_accuracy", "first_bad_turn", "f1_bad")
    np.testing.assert_allclose([report[name]["value"] for name in names], brute_force(trees, 0.4, 0.6))
    turns = turns_of(trees)
    for name, score_M in turns.baseline.items():
        low, high = best_thresholds(score_M, turns.class_M)
        row = report["baselines"][name]
        assert row["step_accuracy"]["value"] == np.mean(classes_at(score_M, low, high) == turns.class_M)
    best = max(row["auroc"]["value"] for row in report["baselines"].values())
    assert report["ahead"]["auroc"]["value"] == pytest.approx(report["auroc"]["value"] - best)
    assert sum(row["n"] for row in report["calibration"]) == report["n_turns"]
    assert all(table.rows for table in tables(report | {"too_long": 0}))


def test_baselines_say_what_they_are_named_for():
    turns = turns_of([agent(0, [1, 1, -1, -1, 1], [0.5] * 5)])
    assert turns.baseline["last"].tolist() == [1, 1, 1, 1, 0]
    assert turns.baseline["position"].tolist() == [0, -1, -2, -3, -4] and "text features" not in turns.baseline
    assert turns.baseline["repeats"].tolist() == [1, 1, 1, 0, 1]  # the fourth search is the second one again
    assert turns.baseline["errors"].tolist() == [0, 0, 0, -1 / 3, -2 / 4]


def test_turns_are_measured_from_their_place_and_text():
    """Turns that are bad the later they are: a score that knows only this is not ahead."""
    rng, trees = np.random.default_rng(0), []
    for seed in range(60):
        labels = [-1 if rng.random() < place / 5 else 1 for place in range(5)]
        trees.append(agent(seed, labels, [1 - place / 10 for place in range(5)]))
    report = agents_report(trees, (0.5, 0.5), seed=0)
    assert report["baselines"]["position"]["auroc"]["value"] == report["auroc"]["value"] > 0.7
    assert report["baselines"]["text features"]["auroc"]["value"] > 0.65
    ahead = report["ahead"]["auroc"]
    assert ahead["baseline"] in ("position", "text features") and ahead["value"] <= 0


def test_thresholds_are_the_best_of_all_pairs():
    rng = np.random.default_rng(1)
    score_M, class_M = rng.random(20), rng.choice([-1, 0, 1], 20)
    low, high = best_thresholds(score_M, class_M)
    cuts = np.unique(np.quantile(score_M, np.linspace(0, 1, 32)))
    best = max(np.mean(classes_at(score_M, a, b) == class_M) for a in cuts for b in cuts if a <= b)
    assert np.mean(classes_at(score_M, low, high) == class_M) >= best
    assert f1(np.array([True, False]), np.array([True, True]), np.ones((1, 2)))[0] == pytest.approx(2 / 3)


def test_scores_of_turns_are_needed():
    tree = agent(0, [1, -1], [0.5, 0.5])
    values = [0.5 if i == tree.steps[0] else None for i in range(len(tree.nodes))]
    with pytest.raises(ValueError, match="has no score"):
        agents_report([with_scores(tree, values)], (0.5, 0.5), 0)
    unscored = agents_report([with_scores(tree, [None] * len(tree.nodes))], (0.5, 0.5), 0)
    assert set(unscored) == {"first_bad"} and not unscored["first_bad"]["scores"]
    with pytest.raises(ValueError, match="nothing to judge by"):
        agents_report([tree_of({"messages": [{"role": "assistant", "content": "a"}], "segment": "turn"})], (0, 0), 0)


def test_the_page_shows_what_is_around_each_turn():
    tree = agent(3, [1, -1, 1], [0.75, 0.25, 0.5])
    page = chains(["model"], [{"file": [only_turns(tree)]}])
    (item,) = page["items"]
    assert item["t"] == ["", "", "done"] and item["c"] == [[0.75, 0.25, 0.5]] and item["l"] == [1, 0, 1]
    assert [around["before"] for around in item["m"]] == [[], [["tool", "a row"]], [["tool", "error: none"]]]
    assert item["m"][0]["calls"] == [["search", '{"q": "0"}']] and page["problems"] == ["task 3"]
    pool = tree_of({"problem": "p", "samples": [{"steps": ["a"], "scores": [1]}]})
    assert only_turns(pool) is pool
