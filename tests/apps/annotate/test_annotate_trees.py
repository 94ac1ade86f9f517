"""Trees and trajectories to label: what may be done when, what is shown, and that ratings come out as they went in."""

import itertools
import random
import time

import numpy as np
import pytest
from annotating import SECRET, Desk, chain, log_of, make
from refusing import refused
from test_annotate_page import DOWN, ENTER, Page
from test_turns import read_by_jprm
from trajectories import branched, trajectory

from jprm.apps import cli
from jprm.apps.annotate import SelectConfig, study
from jprm.apps.annotate.quality import export, figures, tasks_of
from jprm.apps.annotate.study import alternatives_of, merged, pruned, rated_tree, select_file
from jprm.apps.annotate.tasks import Conflict, Task, Tasks, changed
from jprm.io.jsonl import RecordError, write_records
from jprm.methods.data import step_labels
from jprm.methods.label.crowd import alpha_of, coincidences
from jprm.token_tree import token_tree
from jprm.tokenizer import native_layout
from jprm.tree import NONE, Node, ReasoningTree, chains_of, read_records, record_of, tree_of, with_labels

OPTIONS = step_labels.Prm800kOptions(human_written="positive", control_questions="keep")


def raw(rng, number, depth=4):
    """A labelling of PRM800K's first phase: alternatives at each step, of which one that is rated 1 is chosen."""
    steps = []
    for k in range(depth):
        ratings = rng.choice([-1, 0, 1], size=rng.integers(1, 5)).tolist()
        chosen = int(rng.integers(len(ratings)))
        ratings[chosen] = 1
        texts = [f"Step {k}, way {i} of problem {number}." for i in range(len(ratings))]
        steps.append({"completions": [{"text": t, "rating": r} for t, r in zip(texts, ratings, strict=True)],
                      "chosen_completion": chosen})  # fmt: skip
    if number % 3 == 0:  # the labeler found no continuation
        steps[-1]["chosen_completion"] = None
        for completion in steps[-1]["completions"]:
            completion["rating"] = -1
    finish = "found_error" if number % 3 == 0 else "solution"
    return {"question": {"problem": f"Problem {number}?"}, "label": {"steps": steps, "finish_reason": finish}}


def random_tree(rng, size):
    """Any tree: parents before children in any order, scores, and some leaves with a known outcome."""
    nodes = [
        Node(int(rng.integers(-1, i)), f"step {i}", score=float(rng.random())) if i else Node(-1, "step 0", score=0.5)
        for i in range(size)
    ]
    inner = {node.parent for node in nodes}
    nodes = [
        node if i in inner else Node(node.parent, node.text, score=node.score, correct=bool(rng.random() < 0.5))
        for i, node in enumerate(nodes)
    ]
    return ReasoningTree("p", tuple(nodes))


def allowed(tree, history, finish, recovers):
    """By the rules in words: all acts that are possible after these, and the finish that is due."""
    here, ratings = [i for i, node in enumerate(tree.nodes) if node.parent == -1], {}
    for kind, step, rating in history:
        if kind == "rate":
            ratings[step] = rating
        if kind == "choose" or (len(here) == 1 and (recovers or rating >= 0)):
            here = [i for i, node in enumerate(tree.nodes) if node.parent == step]
    due = (
        "found_error"
        if here and not recovers and all(ratings.get(i) == -1 for i in here)
        else None
        if here
        else "solution"
    )
    if finish:
        return set(), due
    if len(here) == 1:
        return {("rate", here[0], r) for r in (-1, 0, 1) if here[0] not in ratings}, due
    acts = {("rate", i, r) for i in here for r in (-1, 0, 1)}
    if all(i in ratings for i in here):
        acts |= {("choose", i, None) for i in here if recovers or ratings[i] >= 0}
    return acts, due


@pytest.mark.parametrize("recovers", [False, True])  # of a trajectory
def test_what_may_be_done_is_what_the_rules_say(recovers):
    rng = np.random.default_rng(0)
    for size in (1, 2, 3, 4, 6, 9) * 5:
        tree = random_tree(rng, size)
        after, task, history = alternatives_of(tree), Task("t", "ana", "work", 0, False, 0.0), []
        for _ in range(30):
            acts, due = allowed(tree, history, task.finish, recovers)
            for kind, step, rating in itertools.product(("rate", "choose"), range(size), (-1, 0, 1)):
                event = {"kind": kind, "step": step, "rating": rating, "seconds": 1.0, "time": 1.0}
                if (kind, step, rating if kind == "rate" else None) in acts:
                    changed(task, after, event, recovers)
                else:
                    with pytest.raises(Conflict):
                        changed(task, after, event, recovers)
            for reason in ("solution", "found_error"):
                event = {"kind": "finish", "reason": reason, "seconds": 0.0, "time": 1.0}
                if task.finish or reason != due:
                    with pytest.raises(Conflict):
                        changed(task, after, event, recovers)
                else:
                    assert changed(task, after, event, recovers).rated
            options = sorted(acts, key=str)
            if history and (not options or rng.random() < 0.25):
                kind, step, _ = history.pop()
                with pytest.raises(Conflict):
                    changed(task, after, {"kind": "undo", "step": step + 1, "time": 1.0}, recovers)
                task = changed(task, after, {"kind": "undo", "step": step, "time": 1.0}, recovers)
            else:
                kind, step, rating = options[rng.integers(len(options))]
                history.append((kind, step, rating))
                event = {"kind": kind, "step": step, "rating": rating, "seconds": 1.0, "time": 1.0}
                task = changed(task, after, event, recovers)
            assert task.ratings == {step: rating for kind, step, rating in history if kind == "rate"}


def by_labels(tree):
    """What an annotator does who agrees with the tree's labels."""
    nodes = tree["nodes"]
    return lambda step: nodes[step]["label"], lambda fine: next(i for i in fine if nodes[i].get("chosen", False))


def round_trip(trees, tmp_path):
    """A simulated annotator, who knows the labels, labels trees without; returns the exported trees."""
    hidden = [
        {"problem": tree["problem"], "nodes": [{"parent": n["parent"], "text": n["text"]} for n in tree["nodes"]]}
        for tree in trees
    ]
    folder = make(tmp_path, work=hidden, names=("ana",), repeat_fraction=0.0, gold_fraction=0.0)
    known = {tree["problem"]: tree for tree in trees}
    with Desk(folder) as desk:
        while tasks := desk.next("ana").json()["tasks"]:
            desk.walk("ana", tasks[0], *by_labels(known[tasks[0]["problem"]]))
    export(folder, tmp_path / "out.jsonl", disagreements="each")
    return folder, {tree["problem"]: tree for tree in read_records(tmp_path / "out.jsonl")}


def said(tree):
    return [(node["parent"], node["text"], node.get("label"), node.get("chosen", False)) for node in tree["nodes"]]


def test_known_labels_go_through_a_study_and_come_out_the_same(tmp_path):
    rng = np.random.default_rng(1)
    trees = [next(step_labels.parse_prm800k(raw(rng, number), "r", OPTIONS)) for number in range(6)]
    folder, known = round_trip(trees, tmp_path)
    for tree in trees:
        got = known[tree["problem"]]
        assert got["semantics"] == "rating" and got["annotators"] == ["ana"]
        assert said(got) == said(tree)
        assert all(node["origin"] == "human" for node in got["nodes"])
    report, steps = figures(tasks_of(folder))["annotators"]["ana"], sum(len(tree["nodes"]) for tree in trees)
    assert report["finish"]["found_error"] == 2 and report["finish"]["solution"] == 4
    assert report["steps"] == steps and report["seconds_a_step"] == 1.0
    choices = sum(event["kind"] == "choose" for event in log_of(folder))
    assert choices > 6 and report["minutes"] == pytest.approx((steps + 2 * choices) / 60)


@pytest.fixture(scope="module")
def twice(tmp_path_factory):
    """Trees that two annotators rate at random and walk by their own ways; the ratings they gave, by problem."""
    root, rng = tmp_path_factory.mktemp("twice"), np.random.default_rng(2)
    trees = [record_of(random_tree(rng, 14)) | {"problem": f"Problem {number}?"} for number in range(8)]
    folder = make(root, work=trees, double_fraction=1.0, repeat_fraction=0.0, gold_fraction=0.0)
    rated = {}
    with Desk(folder) as desk:
        for name in ("ana", "ben"):
            while tasks := desk.next(name).json()["tasks"]:
                ratings = rated.setdefault(tasks[0]["problem"], {}).setdefault(name, {})

                def rating(step, ratings=ratings):
                    return ratings.setdefault(step, int(rng.choice([-1, 0, 1], p=[0.2, 0.2, 0.6])))

                desk.walk(name, tasks[0], rating, lambda fine: int(rng.choice(fine)))
    return folder, trees, rated


def test_agreement_counts_every_step_that_two_rated_once(twice):
    folder, trees, rated = twice
    units = [
        [ratings_of[step] for ratings_of in both.values()]
        for both in rated.values()
        for step in both["ana"].keys() & both["ben"].keys()
    ]
    report = figures(tasks_of(folder))
    agreement = report["agreement"]
    assert agreement["steps"] == len(units) > 20
    assert agreement["alpha"]["value"] == pytest.approx(float(alpha_of(coincidences(units).sum(0))))
    assert agreement["wrong_or_not"]["value"] == pytest.approx(np.mean([(a == -1) == (b == -1) for a, b in units]))
    assert report["tasks"]["steps"] == sum(len(both["ana"].keys() | both["ben"].keys()) for both in rated.values())
    assert agreement["chains"] == 0 and agreement["first_error"] is None
    apart = {(f"Problem {pair['task']}?", step) for pair in agreement["apart"] for step in pair["wrong"]}
    assert apart == {
        (problem, step)
        for problem, both in rated.items()
        for step in both["ana"].keys() & both["ben"].keys()
        if (both["ana"][step] == -1) != (both["ben"][step] == -1)
    }


def test_an_export_cuts_what_follows_a_step_on_which_two_differ(twice, tmp_path):
    _, trees, rated = twice
    export(twice[0], tmp_path / "cut.jsonl", disagreements="cut")
    by_problem = {tree["problem"]: tree for tree in read_records(tmp_path / "cut.jsonl")}
    assert 5 <= len(by_problem) < len(trees)
    for tree in trees:
        ana, ben = (rated[tree["problem"]][name] for name in ("ana", "ben"))
        nothing = [{"correct": node.get("correct")} for node in tree["nodes"]]  # they differ on the only first step
        for i, node in enumerate(by_problem[tree["problem"]]["nodes"] if tree["problem"] in by_problem else nothing):
            line, at = [], i
            while at >= 0:
                line.append(at)
                at = tree["nodes"][at]["parent"]
            differ = any(step in ana and step in ben and ana[step] != ben[step] for step in line)
            assert node.get("label") == (None if differ else ana.get(i, ben.get(i)))
            assert "score" not in node and node.get("correct") == tree["nodes"][i].get("correct")


def test_alternatives_of_equal_text_are_one_and_the_most_convincing_stay():
    rng = np.random.default_rng(3)
    for _ in range(30):
        tree = random_tree(rng, 12)
        texts = ReasoningTree("p", tuple(Node(n.parent, n.text[-1], score=n.score) for n in tree.nodes))
        merged_tree = merged(texts)

        def paths(tree):
            def path(i):
                return (*path(tree.nodes[i].parent), tree.nodes[i].text) if i >= 0 else ()

            return [path(i) for i in range(len(tree.nodes))]

        assert len(set(paths(merged_tree))) == len(merged_tree.nodes) and set(paths(merged_tree)) == set(paths(texts))
        assert merged(merged_tree) == merged_tree
        two, best = pruned(tree, 2), {}
        for line in chains_of(tree):
            for i in line:
                best[i] = max(best.get(i, 0.0), min(tree.nodes[k].score for k in line if k >= i))
        place = {node.text: i for i, node in enumerate(tree.nodes)}
        kept = {place[node.text] for node in two.nodes}
        for alternatives in alternatives_of(tree):
            if alternatives and (
                tree.nodes[alternatives[0]].parent in kept or tree.nodes[alternatives[0]].parent == -1
            ):
                assert kept & set(alternatives) == set(sorted(alternatives, key=lambda i: -best[i])[:2])
        assert all(
            tree.nodes[place[n.text]].parent == (place[two.nodes[n.parent].text] if n.parent >= 0 else -1)
            for n in two.nodes
        )


def test_trees_are_selected_from_pools(tmp_path):
    def pool(number, low, correct):
        samples = [{"steps": ["a", text], "scores": [0.9, score], "correct": right}
                   for text, score, right in (("b", 0.8, True), ("c", low, correct), ("d", 0.1, False))]  # fmt: skip
        return {"problem": f"Problem {number}?", "samples": samples}

    write_records(tmp_path / "in.jsonl", [pool(i, 0.01 * i, i % 2 == 0) for i in range(40)])
    line = ["annotate", "select", "--input", str(tmp_path / "in.jsonl"), "--output", str(tmp_path / "out.jsonl")]
    assert cli.main([*line, "--count", "10", "--alternatives", "2"]) == 0
    records = list(read_records(tmp_path / "out.jsonl"))
    assert all([node["parent"] for node in tree["nodes"]] == [-1, 0, 0] for tree in records)
    convincing = [tree["problem"] for tree in records if tree["selection"]["stratum"] == "convincing"]
    assert len(convincing) == 7 and set(convincing) <= {f"Problem {i}?" for i in range(1, 40, 2)}
    refused(ValueError, "alternatives", SelectConfig, 4, alternatives=1)
    write_records(tmp_path / "bare.jsonl", [{"problem": "p", "samples": [{"steps": ["a"]}]}])
    with pytest.raises(ValueError, match="'p'"):
        select_file(tmp_path / "bare.jsonl", tmp_path / "x.jsonl", SelectConfig(1, alternatives=2))


def branching(number, wrong=2):
    """Three alternatives, of which the one after `wrong` goes on with a single step."""
    nodes = [
        {"parent": -1, "text": f"way {i}", "score": SECRET, "label": -1 if i == wrong else 1, "origin": "human"}
        for i in range(3)
    ]
    return {"problem": f"Problem {number}?", "semantics": "rating",
            "nodes": [*nodes, {"parent": 0, "text": "end", "score": SECRET, "label": 1, "correct": True}]}  # fmt: skip


def test_a_tree_is_labelled_over_a_restart_and_nothing_else_is_shown(tmp_path):
    folder = make(tmp_path, work=[branching(i) for i in range(30)], names=("ana",), gold_fraction=0.0, seed=1)
    with Desk(folder) as desk:
        answer = desk.next("ana")
        first = answer.json()["tasks"][0]
        for secret in (str(SECRET), "score", "label", "origin", "correct", "human"):
            assert secret not in answer.text
        task, here = first["task"], first["after"][0]
        assert sorted(here) == [0, 1, 2] and first["after"][1:] == [[3], [], [], []]
        for step in (3, 4, 10**12):  # not yet a next step, or no step at all
            assert desk.rate("ana", task, step, 1).status_code == 409
        for step in (here[0], 99):  # not rated
            assert desk.post("ana", task, "choose", step=step, seconds=1.0).status_code == 409
        assert desk.post("ana", task, "choose", step=0).status_code == 400  # without seconds
        assert desk.post("ana", task, "choose", step=0, seconds=1.0, rating=1).status_code == 400
        assert desk.post("ana", task, "choose", seconds=1.0).status_code == 409
        for step in here:
            assert desk.rate("ana", task, step, -1 if step == 2 else 1).status_code == 200
        assert desk.rate("ana", task, 1, 0).status_code == 200  # a change of mind
        assert desk.post("ana", task, "choose", step=2, seconds=1.0).status_code == 409  # a wrong one
    with Desk(folder) as desk:
        again = desk.next("ana").json()["tasks"][0]
        assert again["acts"] == [[step, -1 if step == 2 else 1] for step in here] + [[1, 0]]
        assert again["after"] == first["after"]  # the order is the annotator's, and stays
        assert desk.post("ana", task, "choose", step=0, seconds=1.0).status_code == 200
        assert desk.rate("ana", task, 1, 1).status_code == 409  # no longer here
        assert desk.rate("ana", task, 3, 1).status_code == 200
        assert desk.post("ana", task, "finish", reason="found_error", seconds=0).status_code == 409
        assert desk.post("ana", task, "finish", reason="solution", seconds=0).status_code == 200
        orders = set()
        while tasks := desk.next("ana").json()["tasks"]:
            orders.add(tuple(tasks[0]["after"][0]))
            desk.walk("ana", tasks[0], lambda step: -1, None)
        assert len(orders) > 3  # drawn, so that it says nothing of what a model prefers
    assert Tasks(study.read(folder), log_of(folder)).by_id == desk.tasks.by_id


def test_known_and_repeated_trees_count_by_the_steps_that_were_rated(tmp_path):
    """Ana calls a known right alternative wrong: of the three, two are as known."""
    folder = make(
        tmp_path, work=[branching(i) for i in range(30)], names=("ana",), repeat_fraction=0.4, gold_fraction=0.2
    )
    write_records(folder / "gold.jsonl", [branching(1000 + i) for i in range(5)])
    seen = set()
    with Desk(folder) as desk:
        while tasks := desk.next("ana").json()["tasks"]:
            again = tasks[0]["problem"] in seen
            seen.add(tasks[0]["problem"])
            desk.walk("ana", tasks[0], lambda step, again=again: -1 if step in (1, 2) or again else 1, lambda fine: 0)
    ana = figures(tasks_of(folder))["annotators"]["ana"]
    assert ana["gold"]["n"] > 3 and ana["gold"]["value"] == pytest.approx(3 / 4)  # the end was right
    assert ana["repeats"]["n"] > 2 and ana["repeats"]["value"] == pytest.approx(2 / 3)


def test_trees_that_no_study_can_take_are_refused(tmp_path):
    refused(RecordError, "task 1: nodes", make, tmp_path / "a", work=[branching(0)], anchored_fraction=0.5)
    write_records(tmp_path / "gold.jsonl", [{"problem": "p", "nodes": [{"parent": -1, "text": "a"}]}])
    write_records(tmp_path / "work.jsonl", [chain(0)])
    with pytest.raises(RecordError, match="task 1: labels"):
        study.create(tmp_path / "b", tmp_path / "work.jsonl", study.StudyConfig(("ana",)), gold=tmp_path / "gold.jsonl")
    deep = [{"parent": i - 1, "text": str(i)} for i in range(3000)]
    with Desk(make(tmp_path / "c", work=[{"problem": "deep", "nodes": deep}])) as desk:
        assert len(desk.next("ana").json()["tasks"][0]["after"]) == 3001


# ---- Trajectories to label, turn by turn: what may be done, what the page shows, and labels back on the messages.


ONCE = {"repeat_fraction": 0.0, "gold_fraction": 0.0}


def bare(record):
    """The record without labels, scores and outcomes."""
    (where,) = record.keys() & {"messages", "nodes"}
    marks = ("label", "score", "outcome", "correct", "origin")
    messages = [{key: value for key, value in message.items() if key not in marks} for message in record[where]]
    return {key: value for key, value in record.items() if key not in ("outcome", "semantics")} | {where: messages}


def label_all(tmp_path, records, names=("ana",), seed=0, **mix):
    """Ratings drawn at random, by problem and name, and the study's folder."""
    draw, rated = random.Random(seed), {}
    folder = make(tmp_path, work=records, names=names, **{**ONCE, **mix})
    with Desk(folder) as desk:
        for name in names:
            while tasks := desk.next(name).json()["tasks"]:
                pair = desk.walk(name, tasks[0], lambda step: draw.choice((-1, 0, 1)), draw.choice)
                rated.setdefault(tasks[0]["problem"], {})[name] = pair
        assert Tasks(study.read(folder), log_of(folder)).by_id == desk.tasks.by_id  # as after a restart
    return folder, rated


def test_labels_come_back_on_the_messages_and_nothing_is_lost(tmp_path):
    records = [trajectory(seed) | {"id": f"r{seed}", "problem": f"Task {seed}?", "more": [seed]} for seed in range(6)]
    parts = [{"type": "text", "text": text} for text in ("I look. ", "It is 3.")]
    parts = [{"role": "user", "content": "parts?"}, {"role": "assistant", "content": parts}]
    records.append({"messages": parts, "segment": "parts", "problem": "parts?"})
    folder, rated = label_all(tmp_path, records)
    export(folder, tmp_path / "out.jsonl", disagreements="each")
    by_problem = {record["problem"]: record for record in read_records(tmp_path / "out.jsonl")}
    assert len(by_problem) == 7
    for record in records:
        ratings, path = rated[record["problem"]]["ana"]
        assert path == sorted(ratings)  # each turn once, also after a wrong one
        marks = iter([ratings[step] for step in path])
        messages = [
            message if message["role"] != "assistant"
            else message | {"origin": "human"}
            | ({"labels": [next(marks), next(marks)]} if "segment" in record else {"label": next(marks)})
            for message in record["messages"]
        ]  # fmt: skip
        wanted = record | {"messages": messages, "semantics": "rating", "annotators": ["ana"]}
        assert by_problem[record["problem"]] == wanted
    assert any(-1 in list(both["ana"][0].values())[:-1] for both in rated.values())


def test_a_tree_of_messages_trains_as_if_it_had_been_labelled_by_hand(tmp_path):
    layout = native_layout(read_by_jprm("qwen3"))
    records = [branched(seed, users=False) | {"problem": f"Task {seed}?"} for seed in range(2, 8)]
    folder, rated = label_all(tmp_path, list(map(bare, records)))
    export(folder, tmp_path / "out.jsonl", disagreements="cut")
    several = 0
    for exported in read_records(tmp_path / "out.jsonl"):
        tree = tree_of(next(bare(record) for record in records if record["problem"] == exported["problem"]))
        ratings, path = rated[exported["problem"]]["ana"]
        label_of = {tree.steps[step]: rating for step, rating in ratings.items()}
        by_hand = with_labels(tree, [label_of.get(i) for i in range(len(tree.nodes))], "rating", "human")
        ours, wanted = (token_tree(labelled, layout) for labelled in (tree_of(exported), by_hand))
        for field in ours.__dataclass_fields__:
            a, b = getattr(ours, field), getattr(wanted, field)
            np.testing.assert_array_equal(a, b) if isinstance(a, np.ndarray) else None
        chosen = {i for i, node in enumerate(exported["nodes"]) if node.get("chosen")}
        assert chosen == {tree.steps[step] for step in path}  # a turn is one node here
        several += len(ratings) > len(path)
        assert exported.get("tools") == tree.extra.get("tools")
        assert all(node.extra is NONE or "score" not in node.extra for node in tree_of(exported).nodes)
    assert several > 2


def test_two_annotators_count_by_turns_and_differ_on_turns_alone(tmp_path):
    records = [trajectory(seed) | {"problem": f"Task {seed}?"} for seed in range(8)]
    folder, rated = label_all(tmp_path, records, ("ana", "ben"), double_fraction=1.0)
    export(folder, tmp_path / "cut.jsonl", disagreements="cut")
    by_problem = {record["problem"]: record for record in read_records(tmp_path / "cut.jsonl")}
    apart = set()
    for index, record in enumerate(records):
        (ana, _), (ben, _) = rated[record["problem"]].values()
        wanted = [ana[step] if ana[step] == ben[step] else None for step in sorted(ana)]
        apart |= {(index, step) for step in ana if (ana[step] == -1) != (ben[step] == -1)}
        if any(label is not None for label in wanted):
            messages = by_problem[record["problem"]]["messages"]
            assert [message.get("label") for message in messages if message["role"] == "assistant"] == wanted
    agreement = figures(tasks_of(folder))["agreement"]
    assert {(pair["task"], step) for pair in agreement["apart"] for step in pair["wrong"]} == apart != set()
    assert agreement["steps"] == sum(len(both["ana"][0]) for both in rated.values()) and agreement["chains"] == 0


def agent(number, wrong=(), turns=5):
    """A trajectory of so many turns, with labels, scores and an outcome, which no page may show."""
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": f"Task {number}?"}]
    for i in range(turns):
        message = {"role": "assistant", "content": "", "reasoning_content": f"Row {i} next.", "score": SECRET}
        message["label"] = -1 if i in wrong else 1
        message["tool_calls"] = [
            {"id": f"c{i}", "type": "function", "function": {"name": "lookup", "arguments": {"row": i}}}
        ]
        messages += [message, {"role": "tool", "tool_call_id": f"c{i}", "content": f"row {i}\n" * (i % 7 + 1)}]
    messages.append({"role": "assistant", "content": "Done.", "score": SECRET, "label": 1})
    tools = [{"type": "function", "function": {"name": "lookup", "parameters": {"type": "object"}}}]
    return {"messages": messages, "tools": tools, "outcome": 0, "semantics": "rating"}


def test_known_turns_measure_by_their_fraction_and_the_page_gets_no_label(tmp_path):
    folder = make(tmp_path, work=[agent(i, (1,)) for i in range(30)], names=("ana",), repeat_fraction=0.0,
                  gold_fraction=0.3, seed=1)  # fmt: skip
    write_records(folder / "gold.jsonl", [agent(1000 + i, wrong=(1, 2)) for i in range(6)])
    with Desk(folder) as desk:
        answer = desk.next("ana")
        for secret in (str(SECRET), "score", "label", "outcome", "semantics", "gold"):
            assert secret not in answer.text
        shown = answer.json()["tasks"][0]
        assert shown["steps"] == ["", "", "", "", "", "Done."] and shown["after"] == [[0], [1], [2], [3], [4], [5], []]
        assert shown["around"][2] == {
            "before": [["tool", "row 1\nrow 1\n"]], "thoughts": "Row 2 next.", "calls": [["lookup", '{"row": 2}']]
        }  # fmt: skip
        assert shown["around"][0]["before"] == [["system", "Be brief."]] and shown["tools"][0][0] == "lookup"
        assert desk.post("ana", shown["task"], "write", text="better", seconds=1.0).status_code == 409
        while tasks := desk.next("ana").json()["tasks"]:
            desk.walk("ana", tasks[0], lambda step: -1 if step == 1 else 1)
    ana = figures(tasks_of(folder))["annotators"]["ana"]
    assert ana["gold"]["n"] > 3 and ana["gold"]["value"] == pytest.approx(5 / 6)


def test_trajectories_are_selected_whole(tmp_path):
    pool = [agent(i) for i in range(40)]
    for number, record in enumerate(pool):
        record["outcome"] = number % 2
        for message in record["messages"]:
            if message["role"] == "assistant":
                message["score"] = (number + 1) / 50
    write_records(tmp_path / "in.jsonl", pool)
    line = ["annotate", "select", "--input", str(tmp_path / "in.jsonl"), "--output", str(tmp_path / "out.jsonl")]
    assert cli.main([*line, "--count", "10"]) == 0
    records = list(read_records(tmp_path / "out.jsonl"))
    assert all({**record, "selection": 0} in [{**sample, "selection": 0} for sample in pool] for record in records)
    convincing = [record for record in records if record["selection"]["stratum"] == "convincing"]
    assert [record["outcome"] for record in convincing] == [0] * 7
    with pytest.raises(ValueError, match="Leave --alternatives out"):
        select_file(tmp_path / "in.jsonl", tmp_path / "x.jsonl", SelectConfig(4, alternatives=2))
    assert rated_tree(tree_of(pool[0])).of_messages


@pytest.mark.breadth
def test_60_turns_are_labelled_by_keys_alone(browser, tmp_path):
    with Page(browser, make(tmp_path, work=[agent(0, turns=59), two_ways()], names=("ana",), **ONCE)) as page:
        assert page.says("problem") == "Task 0?" and page.says("solution") == "TRAJECTORY"
        source = page.browser.run("return document.documentElement.outerHTML")
        assert "Done." not in source and str(SECRET) not in source and "outcome" not in source

        def now():
            text = page.browser.run("return document.querySelector('.step.now').innerText")
            return [line for line in text.split("\n") if line]

        assert now()[0] == "Turn 1" and now()[1:] == [
            "system Be brief.",
            "thoughts Row 0 next.",
            'calls lookup {"row": 0}',
        ]
        for k in range(5):
            page.browser.press("1" if k == 2 else "3")  # a wrong turn does not end the task
        page.wait("document.querySelectorAll('#steps li').length === 6")
        folds = "[...document.querySelectorAll('.step.now details')]"
        assert page.browser.run(f"return {folds}.map(e => e.open)") == [False]  # what the tool answered, in five lines
        page.browser.press("o")
        assert page.browser.run(f"return {folds}.every(e => e.open)") and now().count("row 4") == 5
        page.browser.press("f")  # what is open stays open
        page.wait("!document.getElementById('flagged').hidden")
        assert page.browser.run(f"return {folds}.every(e => e.open)")
        page.browser.run("document.querySelector('.step.now summary').focus()")
        page.browser.press(ENTER)  # folds it, and does not go on
        assert page.browser.run(f"return {folds}.map(e => e.open)") == [False]
        page.browser.press("u", "2")
        for _ in range(54):
            page.browser.press("3")
        page.wait("document.querySelectorAll('#steps li').length === 60")
        page.browser.press("3")
        page.wait("document.getElementById('end-text').textContent === '60 turns, 1 rated wrong.'")
        page.browser.press(ENTER)
        page.wait("document.getElementById('problem').textContent === 'Two ways?'")
        page.browser.press("3")
        page.wait("document.querySelectorAll('#alternatives li').length === 2")
        assert page.says("common") == "tool a row"  # once, above both
        assert page.browser.run("return document.querySelectorAll('#alternatives .before > *').length") == 0
        page.browser.press("1", "1", DOWN, ENTER)  # both are wrong; the agent goes on
        page.wait("document.getElementById('end-text').textContent === '2 turns, 1 rated wrong.'")
        page.browser.press(ENTER)
        events = page.stored()
        ratings = [event["rating"] for event in events if event["kind"] == "rate" and event["step"] not in (4,)]
        assert [event["kind"] for event in events].count("undo") == 1 and ratings.count(-1) == 3
        assert page.browser.logs("browser") == []
    export(page.folder, tmp_path / "out.jsonl", disagreements="each")
    first, second = read_records(tmp_path / "out.jsonl")
    labels = [message["label"] for message in first["messages"] if message["role"] == "assistant"]
    assert labels == [1, 1, -1, 1, 0, *([1] * 55)]
    assert [node.get("label") for node in second["nodes"]] == [None, 1, None, -1, -1]


@pytest.mark.slow
def test_axe_finds_no_violation_around_turns(browser, tmp_path):
    record = agent(0, turns=3)
    record["messages"][5]["content"] = "a row\n" * 200  # opened, it scrolls
    with Page(browser, make(tmp_path, work=[record, two_ways()], names=("ana",), **ONCE)) as page:
        for keys in (["3"], ["1"], ["o"], ["3", "3", ENTER], ["3"], ["1"], ["3"]):
            page.browser.press(*keys)
            time.sleep(0.3)  # the turn's appearance ends: axe reads colours as they are
            assert page.browser.axe() == [], keys
        page.stored()


def two_ways():
    call = [{"id": "c", "type": "function", "function": {"name": "lookup", "arguments": "{}"}}]
    nodes = [{"role": "user", "content": "Two ways?"}, {"role": "assistant", "content": "I look.", "tool_calls": call},
             {"role": "tool", "tool_call_id": "c", "content": "a row"},
             {"role": "assistant", "content": "way 0"}, {"role": "assistant", "content": "way 1"}]  # fmt: skip
    return {"nodes": [{"parent": min(i - 1, 2), **node} for i, node in enumerate(nodes)]}
