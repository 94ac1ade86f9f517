"""Logs of agents, as the trajectories that they tell, and the figures of turns and runs."""

import io
import itertools
import json
import pathlib

import numpy as np
import pytest
import rich.console
from refusing import refused

from jprm.apps.cli import main
from jprm.apps.report.collect import chains, only_turns
from jprm.io.jsonl import RecordError, write_records
from jprm.methods.data.prepare import prepare
from jprm.methods.data.readers import find
from jprm.methods.evaluate.agents import (
    _tables_of_trials,
    agent_of,
    agents_report,
    best_thresholds,
    chosen,
    classes_at,
    f1,
    failed_of,
    findings,
    first_bad_report,
    pass_at,
    pass_hat,
    section,
    tables,
    trials_of,
    trials_report,
    turns_of,
)
from jprm.methods.evaluate.blocks import PageModel, Table
from jprm.methods.evaluate.run import format_of, source
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


LOGS = json.loads((pathlib.Path(__file__).parents[2] / "turn_logs.json").read_text(encoding="utf-8"))
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
    refused(ValueError, "has no score", agents_report, [with_scores(tree, values)], (0.5, 0.5), 0)
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


# ---- Logs of coding agents and transcripts of command-line agents, as the trajectories that they tell.


CALL = {"id": "c1", "type": "function", "function": {"name": "bash", "arguments": {"command": "ls"}}}
RAW_CALL = {**CALL, "function": {"name": "bash", "arguments": '{"command": "ls"}'}}
SHELL = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "List."},
    {"role": "assistant", "content": "I look.", "reasoning_content": "Hm.", "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "c1", "content": "a.py"},
    {"role": "assistant", "content": "There is a.py."},
]

SHELL_LOGS = json.loads((pathlib.Path(__file__).parents[2] / "agent_logs.json").read_text(encoding="utf-8"))
SWE_AGENT, MINI, OPENHANDS_0, OPENHANDS_1, CLAUDE, CODEX = SHELL_LOGS.values()
FILES = {
    "swe_agent": ("swe_agent", SWE_AGENT),
    "mini_swe_agent": ("mini_swe_agent", MINI),
    "openhands 0": ("openhands", OPENHANDS_0),
    "openhands 1": ("openhands", OPENHANDS_1),
    "claude_code": ("claude_code", CLAUDE),
    "codex": ("codex", CODEX),
}


def read_file_of(name, content, path, **options):
    path.write_text("\n".join(map(json.dumps, content)) if isinstance(content, list) else json.dumps(content, indent=1))
    return [record for _, record in find(name).read(path, **options)]


@pytest.mark.parametrize("file", FILES)
def test_a_file_is_the_trajectory_that_it_tells(file, tmp_path):
    name, content = FILES[file]
    (record,) = read_file_of(name, content, tmp_path / "log.json")
    messages = [{k: v for k, v in m.items() if v is not None or k == "content"} for m in record["messages"]]
    assert messages == (SHELL[1:] if name == "claude_code" else SHELL)  # its file has no prompt of the system
    assert record_of(tree_of(record)) | {"segment": "turn"} == record
    if name in ("swe_agent", "mini_swe_agent"):
        assert record["submission"] == "diff"
    if name == "swe_agent":
        assert record["outcome"] == 1 and record["environment"] == "repo-1"
    if name == "openhands":
        assert record["tools"][0]["function"]["name"] == "bash"


def test_a_list_of_events_is_one_trajectory_and_a_line_of_an_evaluation_too(tmp_path):
    (tmp_path / "list.json").write_text(json.dumps(OPENHANDS_0, indent=1))
    ((_, listed),) = find("openhands").read(tmp_path / "list.json")
    lines = [{"instance_id": i, "history": OPENHANDS_0, "resolved": bool(i)} for i in range(2)]
    records = read_file_of("openhands", lines, tmp_path / "output.jsonl")
    assert [record["outcome"] for record in records] == [0, 1]
    assert all(record["messages"] == listed["messages"] for record in records)


def test_parallel_calls_of_one_response_are_one_turn(tmp_path):
    calls = [{**RAW_CALL, "id": "c1"}, {**RAW_CALL, "id": "c2"}]
    response = {"id": "r", "choices": [{"message": {"content": None, "tool_calls": calls}}]}
    events: list[dict] = [{"source": "user", "action": "message", "args": {"content": "a"}}]
    for kind, key in (("action", "run"), ("observation", "run")):
        for name in ("c1", "c2"):
            meta = {"function_name": "bash", "tool_call_id": name, "model_response": response}
            events.append({"source": "agent", kind: key, "args": {}, "content": name, "tool_call_metadata": meta})
            if kind == "action":
                del events[-1]["content"]
    (record,) = read_file_of("openhands", events, tmp_path / "log.jsonl")
    assert [m["role"] for m in record["messages"]] == ["user", "assistant", "tool", "tool"]
    assert [call["id"] for call in record["messages"][1]["tool_calls"]] == ["c1", "c2"]


def test_a_prompt_in_the_place_of_another_takes_away_what_followed(tmp_path):
    again = {"type": "user", "uuid": "8", "parentUuid": "5", "message": {"role": "user", "content": "And b?"}}
    answer = {"type": "assistant", "uuid": "10", "message": {"id": "m9", "content": [{"type": "text", "text": "Yes."}]}}
    first = {**again, "uuid": "6b", "message": {"role": "user", "content": "And c?"}}
    (record,) = read_file_of("claude_code", [*CLAUDE[:8], first, CLAUDE[-1], again, answer], tmp_path / "s.jsonl")
    assert [m["content"] for m in record["messages"][3:]] == ["And b?", "Yes."]


@pytest.mark.parametrize(
    ("name", "events", "compacted"),
    [
        ("claude_code", CLAUDE, {"type": "user", "isCompactSummary": True, "isVisibleInTranscriptOnly": True,
                                 "message": {"role": "user", "content": "So far: listed."}}),
        ("codex", CODEX, {"type": "compacted", "payload": {"message": "So far: listed."}}),
        ("codex", CODEX, {"type": "compacted", "payload": {"message": "", "replacement_history": [
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "So far: listed."}]}]}}),
    ],
)  # fmt: skip
def test_a_compacted_context_begins_a_trajectory_of_its_own(name, events, compacted, tmp_path):
    last = events[-1]
    if name == "claude_code":
        last = {**last, "uuid": "u3", "message": {**last["message"], "id": "m3"}}
    first, second = read_file_of(name, [*events, compacted, last], tmp_path / "s.jsonl")
    told = [m["content"] for m in second["messages"] if m["role"] != "system"]  # a request of Codex repeats its prompt
    assert told == ["So far: listed.", "There is a.py."]
    assert first["problem"] == second["problem"] == "List." and (first["part"], second["part"]) == (0, 1)


def test_a_subagents_own_file_and_a_stream_are_read(tmp_path):
    lines = [{**line, "isSidechain": True} for line in CLAUDE]
    (record,) = read_file_of(
        "claude_code", [line for line in lines if line.get("uuid") != "9"], tmp_path / "agent.jsonl"
    )
    assert [m["role"] for m in record["messages"]] == ["user", "assistant", "tool", "assistant"]
    stream = [{"type": "system", "subtype": "init", "tools": ["bash"]}, CLAUDE[3], CLAUDE[4], CLAUDE[5], CLAUDE[7],
              CLAUDE[-1], {"type": "result", "subtype": "success", "result": "There is a.py."}]  # fmt: skip
    (record,) = read_file_of("claude_code", stream, tmp_path / "stream.jsonl")
    assert [m["role"] for m in record["messages"]] == ["assistant", "tool", "assistant"]


def test_a_bad_transcript_is_refused_whole_or_skipped_whole(tmp_path):
    from jprm.io.jsonl import Rejects

    path, call = (
        tmp_path / "s.jsonl",
        json.dumps({"type": "response_item", "payload": {"type": "reasoning", "summary": 3}}),
    )
    path.write_text("\n".join([*map(json.dumps, CODEX), call]))
    refused(RecordError, f"{path}:{len(CODEX) + 1}: ", list, find("codex").read(path))
    with Rejects(tmp_path / "rejects") as rejects:
        assert list(find("codex").read(path, on_error="skip", rejects=rejects)) == []
    assert (tmp_path / "rejects").read_text() == path.read_text() + "\n"


def test_a_cut_transcript_loses_its_last_line(tmp_path):
    path, left = tmp_path / "s.jsonl", {}
    path.write_text("\n".join(map(json.dumps, CODEX)))
    ((_, whole),) = find("codex").read(path)
    path.write_text(path.read_text() + '\n{"type": "resp')
    ((_, cut),) = find("codex").read(path, on_left_out=lambda part: left.update({part.what: part.count}))
    assert cut == whole and left["line that is not JSON"] == 1


def test_preparing_prints_what_is_left_out(tmp_path):
    (tmp_path / "s.jsonl").write_text("\n".join(map(json.dumps, CODEX)))
    console = rich.console.Console(file=io.StringIO())
    report = prepare("codex", [tmp_path / "s.jsonl"], tmp_path / "out", console=console)
    assert (report.read, report.kept, report.steps) == (1, 1, 2)
    assert f"left out of every record: {find('codex').drops}" in console.file.getvalue()


# ---- Published runs of agents, read whole; pass^k, the chosen trial and the first bad turn.


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
    assert report["trivial"]


@pytest.mark.parametrize("outcome", [0, 1])
def test_nothing_is_chosen_among_trials_of_one_outcome(outcome):
    same = [trial(task, outcome, [score]) for task in "ab" for score in (0.2, 0.9)]
    report = trials_report(same, 0)
    assert report["pass_hat"][0]["value"] == outcome and not (report["chosen"] or report["trivial"] or report["ahead"])
    assert not any("chosen" in table.title for table in _tables_of_trials({"m": report}))


def test_the_first_bad_turn_is_named_by_scores():
    log = failed(2, [0.9, 0.4, 0.6, 0.1], ["A", "B", "C (thought)", "B"], mistake_agent="c")
    report = first_bad_report([log], 0.5, 0)
    assert report["figures"] == ["step", "within_1", "within_3", "within_5", "agent", "any_failure"]
    values = {name: [figure["value"] for figure in row.values()] for name, row in report["scores"].items()}
    assert values == {"lowest": [0, 1, 1, 1, 0, 1], "below": [0, 1, 1, 1, 0, 0]}
    trivial = {name: [figure["value"] for figure in row.values()] for name, row in report["trivial"].items()}
    assert trivial["any"] == pytest.approx([1 / 4, 3 / 4, 1, 1, 1 / 4, 1 / 2])
    assert trivial["any agent"] == pytest.approx([1 / 3])
    assert trivial["longest"] == trivial["last"] == [0, 1, 1, 1, 0, 1]
    above = first_bad_report([log], 0.05, 0)["scores"]
    assert above["below"] == above["lowest"]  # no turn is below
    assert agent_of("Orchestrator (-> WebSurfer)") == "orchestrator"
    assert first_bad_report([trial("a", 1, [1.0])], 0.5, 0) == {}


@pytest.mark.parametrize(("root", "hit"), [(2, 1), (3, 0), (0, None), (None, None)])
def test_a_root_cause_is_named_by_scores(root, hit):
    """`root_cause` counts messages: 0 is the user's, which is no turn."""
    log = failed(0, [0.9, 0.1, 0.5], ["", "", ""], root_cause=root)
    values = {name: figure["value"] for name, figure in first_bad_report([log], 0.5, 0)["scores"]["lowest"].items()}
    assert values.get("root_cause") == hit and values["any_failure"] == 1


def test_telemetry_names_the_turn_that_it_was_fitted_to_on_other_tasks():
    """The third turn is bad in every log: the turn number tells it, and no task's own labels are needed."""
    logs = []
    for task in range(60):
        messages: list[dict] = [{"role": "user", "content": f"task {task}"}]
        messages += [{"role": "assistant", "content": "x", "label": int(turn < 2)} for turn in range(3)]
        logs.append(tree_of({"messages": messages, "outcome": 0}))
    assert first_bad_report(logs, 0.5, 0)["trivial"]["telemetry"]["step"]["value"] == 1
    assert "telemetry" not in first_bad_report(logs[:20], 0.5, 0)["trivial"]


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
