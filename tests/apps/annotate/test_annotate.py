"""The labelling server: what is stored, who gets which chain, what never leaves it, and what labels are worth."""

import collections
import dataclasses
import itertools
import json

import numpy as np
import pytest
import storm
from annotating import SECRET, Desk, Process, chain, log_of, make, truth
from families import breadth
from refusing import bad, refused

from jprm.apps import cli
from jprm.apps.annotate import SelectConfig, study
from jprm.apps.annotate.app import key_of_annotator
from jprm.apps.annotate.quality import _contrast, export, figures, tasks_of
from jprm.apps.annotate.study import chains_in, select_file
from jprm.apps.annotate.study import select as select_trees
from jprm.apps.annotate.tasks import AHEAD, CLAIM_SECONDS, Conflict, Tasks
from jprm.io.jsonl import RecordError, write_records
from jprm.methods.label.crowd import alpha_of, coincidences
from jprm.score.scale import Scale
from jprm.tree import read_records, record_of, tree_of


def simulated(folder, rounds, clock=None):
    """Annotators who take turns, only through the tasks; returns the tasks."""
    stored = study.read(folder)
    tasks, times = Tasks(stored), itertools.count(0.0)
    for _ in range(rounds):
        for name in stored.config.annotators:
            while event := tasks.next(name, next(times)):
                tasks.apply(event)
            task = next((task for task in tasks.opened_by(name) if not task.finish), None)
            if task is None:
                continue
            ratings = [truth(node.text) for node in tasks.tree(task).nodes]
            for step in range(ratings.index(-1) + 1 if -1 in ratings else len(ratings)):
                event = {"uuid": f"r-{next(times)}", "kind": "rate", "annotator": name, "task": task.id}
                tasks.apply(event | {"step": step, "rating": ratings[step], "seconds": 1.0, "time": next(times)})
            reason = "found_error" if -1 in ratings else "solution"
            event = {"uuid": f"f-{next(times)}", "kind": "finish", "annotator": name, "task": task.id}
            tasks.apply(event | {"reason": reason, "seconds": 0.0, "time": next(times)})
    return tasks


def test_a_chain_is_rated_undone_and_finished(tmp_path):
    with Desk(make(tmp_path)) as desk:
        first, second = desk.next("ana").json()["tasks"]
        assert first["steps"][0] == "Step 0 of chain 0." and first["acts"] == []
        task = first["task"]
        assert desk.rate("ana", task, 1, 1).status_code == 409  # a later step before the first
        assert desk.rate("ana", task, 0, 1).status_code == 200
        assert desk.rate("ana", task, 0, -1).status_code == 409  # a second rating, as from another window
        assert desk.post("ana", task, "finish", reason="solution", seconds=0).status_code == 409
        assert desk.rate("ana", task, 1, -1).status_code == 200
        assert desk.rate("ana", task, 2, 1).status_code == 409  # after the first error
        assert desk.post("ana", task, "undo", step=1).status_code == 200
        assert desk.rate("ana", task, 1, 0).status_code == 200
        assert desk.rate("ben", task, 2, 1).status_code == 409  # not his
        assert desk.rate("ana", task, 2, -1).status_code == 200
        assert desk.post("ana", task, "comment", step=2, text=" why? ").status_code == 200
        assert desk.post("ana", task, "flag", on=True).status_code == 200
        assert desk.post("ana", task, "finish", reason="found_error", seconds=0).status_code == 200
        state = desk.next("ana").json()
        assert state["finished"] == 1 and [entry["task"] for entry in state["tasks"]][0] == second["task"]
        assert len(state["tasks"]) == AHEAD and state["previous"]["acts"] == [[0, 1], [1, 0], [2, -1]]
        assert desk.post("ana", task, "undo").status_code == 200  # the finish is taken back
        again = desk.next("ana").json()["tasks"][0]
        assert again["acts"] == [[0, 1], [1, 0], [2, -1]] and again["finish"] is None and again["flagged"]
        assert again["comments"] == [{"step": 2, "text": "why?"}]


def test_an_event_counts_once_and_a_restart_changes_nothing(tmp_path):
    folder = make(tmp_path)
    with Desk(folder) as desk:
        shown = desk.next("ana").json()["tasks"][0]
        body = {"uuid": "the-same-one", "task": shown["task"], "kind": "rate", "step": 0, "rating": 1, "seconds": 2.5}
        for _ in range(3):
            answer = desk.request("POST", "/v1/annotators/ana/events", json=body)
            assert answer.json() == {"acknowledged": "the-same-one"}
        for other in ({"rating": -1}, {"kind": "flag", "on": True}):
            identity = {key: body[key] for key in ("uuid", "task")} if "kind" in other else body
            answer = desk.request("POST", "/v1/annotators/ana/events", json=identity | other)
            assert answer.status_code == 409 and "another event's" in answer.json()["error"]["message"]
        assert sum(event["uuid"] == "the-same-one" for event in log_of(folder)) == 1
        before = desk.tasks.by_id
    with Desk(folder) as desk:
        assert desk.tasks.by_id == before
        assert desk.next("ana").json()["tasks"][0]["acts"] == [[0, 1]]
        refused(ValueError, "writing", Desk, folder)


def test_no_answer_holds_a_score_a_label_or_where_a_chain_comes_from(tmp_path):
    with Desk(make(tmp_path, gold=3, screening=2, gold_fraction=0.5)) as desk:
        answers = []
        for name in ("ana", "ben"):
            while tasks := (answer := desk.next(name)).json()["tasks"]:
                answers.append(answer)
                desk.label(name, tasks[0])
        pages = [desk.request("GET", path) for path in ("/", "/annotate.js", "/annotate.css", "/base.css")]
        pools = {task.pool for task in desk.tasks.by_id.values()}
    assert pools == {"work", "gold", "screening"}
    for answer in (*answers, *pages):
        assert answer.status_code == 200
        for secret in (str(SECRET), "secret", "stratum", "gold", "labels", "semantics", "again"):
            assert secret not in answer.text.replace('again"', "").replace("tried again", ""), secret
    shown = answers[0].json()["tasks"][0]
    assert set(shown) == {"task", "problem", "steps", "after", "acts", "finish", "flagged", "comments", "written"}


def test_double_gold_and_repeated_chains_come_as_often_as_set(tmp_path):
    folder = make(tmp_path, count=600, gold=40, double_fraction=0.15, gold_fraction=0.05, repeat_fraction=0.02)
    tasks = simulated(folder, 420)
    fresh = [task for task in tasks.by_id.values() if task.pool == "work" and not task.again]
    twice = len(fresh) - len({task.index for task in fresh})
    assert len({task.index for task in fresh}) == 600 and 0.12 < twice / 600 < 0.18
    pairs = collections.Counter((task.index, task.annotator) for task in fresh)
    assert max(pairs.values()) == 1  # two labellings are of two annotators
    for name in ("ana", "ben"):
        mine = tasks.opened_by(name)
        assert 0.03 < sum(task.pool == "gold" for task in mine) / len(mine) < 0.07
        again = [i for i, task in enumerate(mine) if task.again]
        assert 0.01 < len(again) / len(mine) < 0.035
        for i in again:
            before = next(k for k, task in enumerate(mine) if task.index == mine[i].index and task.pool == "work")
            assert i - before > 20
        assert len({(task.pool, task.index, task.again) for task in mine}) == len(mine)


def test_the_events_alone_give_the_tasks_again(tmp_path):
    folder = make(tmp_path, count=30, gold=3, screening=2)
    events = []

    class Recorded(Tasks):
        def apply(self, event):
            super().apply(event)
            events.append(event)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("test_annotate.Tasks", Recorded)
        tasks = simulated(folder, 20)
    assert Tasks(study.read(folder), events).by_id == tasks.by_id


def test_screening_ends_a_study_for_who_does_not_pass(tmp_path):
    with Desk(make(tmp_path, screening=4, pass_screening=0.9)) as desk:
        for name, rating in (("ana", truth), ("ben", lambda text: 1)):
            for _ in range(4):
                state = desk.next(name).json()
                assert state["screening"]["passed"] is None and "right" not in state["screening"]
                desk.label(name, state["tasks"][0], rating)
        passed, failed = desk.next("ana").json(), desk.next("ben").json()
    assert passed["screening"]["passed"] and len(passed["tasks"]) == AHEAD
    assert failed["screening"] == {"tasks": 4, "done": 4, "right": 3, "passed": False} and failed["tasks"] == []


def test_a_skipped_chain_goes_to_another_and_so_does_one_left_lying(tmp_path):
    now = [0.0]
    with Desk(make(tmp_path, count=3, double_fraction=0.0), clock=lambda: now[0]) as desk:
        held = desk.next("ana").json()["tasks"]
        assert desk.post("ana", held[0]["task"], "finish", reason="skip", seconds=0).status_code == 200
        texts = [task["problem"] for task in desk.next("ben").json()["tasks"]]
        assert texts == ["Problem 0?", "Problem 2?"]  # the skipped one, and the one that nobody has
        desk.label("ben", desk.next("ben").json()["tasks"][0])
        assert [task["problem"] for task in desk.next("ben").json()["tasks"]] == ["Problem 2?"]
        now[0] = CLAIM_SECONDS + 1
        assert [task["problem"] for task in desk.next("ben").json()["tasks"]] == ["Problem 2?", "Problem 1?"]
        assert [task["problem"] for task in desk.next("ana").json()["tasks"]] == ["Problem 1?", "Problem 2?"]


@pytest.mark.parametrize(
    ("body", "param"), [*bad("an event of an annotator"), [{"kind": "comment", "text": "x" * 2001}, "text"]]
)
def test_bad_events_are_refused_and_not_stored(tmp_path, body, param):
    folder = make(tmp_path)
    with Desk(folder) as desk:
        task = desk.next("ana").json()["tasks"][0]["task"]
        got = desk.request("POST", "/v1/annotators/ana/events", json={"uuid": "0123456789", "task": task} | body)
        assert got.status_code == (400 if param else 409) and got.json()["error"]["param"] == param
        assert len(log_of(folder)) == AHEAD


def test_others_cannot_post(tmp_path):
    """A page of another site may post text unasked, but no JSON; a name alone opens nothing where there is a key."""
    with Desk(make(tmp_path)) as desk:
        plain = desk.request("POST", "/v1/annotators/ana/next", content=b"{}", headers={"content-type": "text/plain"})
        assert plain.status_code == 415
        assert desk.request("POST", "/v1/annotators/eve/next", json={}).status_code == 404
        other = desk.request("POST", "/v1/annotators/ana/next", json={}, headers={"host": "evil.example"})
        assert other.status_code == 400
        preflight = {"origin": "https://evil.example", "access-control-request-method": "POST"}
        got = desk.request("OPTIONS", "/v1/annotators/ana/next", headers=preflight)
        assert "access-control-allow-origin" not in got.headers
        policy = desk.request("GET", "/").headers["content-security-policy"]
        assert "default-src 'none'" in policy and "unsafe" not in policy
    with Desk(make(tmp_path / "keys"), key="the server's") as desk:
        ana = {"authorization": f"Bearer {key_of_annotator('the server', 'ana')}"}
        assert desk.request("POST", "/v1/annotators/ana/next", json={}, headers=ana).status_code == 401
        ana = {"authorization": f"Bearer {key_of_annotator(chr(39).join(['the server', 's']), 'ana')}"}
        assert desk.request("POST", "/v1/annotators/ana/next", json={}, headers=ana).status_code == 200
        assert desk.request("POST", "/v1/annotators/ben/next", json={}, headers=ana).status_code == 401
        assert desk.request("GET", "/").status_code == 200


def test_a_line_without_its_end_is_cut_off_and_a_broken_one_is_named(tmp_path):
    path = tmp_path / "events.jsonl"
    with study.open_log(path) as log:
        log.append({"a": 1})
        log.append({"b": "é"})
    with open(path, "ab") as file:
        file.write(b'{"c": 1, "half')
    with study.open_log(path) as log:
        assert log.events == [{"a": 1}, {"b": "é"}]
        log.append({"d": 2})
    assert path.read_text() == '{"a": 1}\n{"b": "é"}\n{"d": 2}\n'
    path.write_text('{"a": 1}\nnot json\n{"d": 2}\n')
    with pytest.raises(RecordError, match="events.jsonl:2: line"), study.open_log(path):
        pass


def test_studies_are_made_once_and_take_new_annotators(tmp_path):
    folder = make(tmp_path)
    refused(ValueError, "already", study.create, folder, tmp_path / "work.jsonl", study.StudyConfig(("ana",)))
    assert study.read(folder, ["ben", "cai"]).config.annotators == ("ana", "ben", "cai")
    assert study.read(folder).config.annotators == ("ana", "ben", "cai")
    refused(ValueError, "study.json", study.read, tmp_path)
    unlabelled = tmp_path / "gold.jsonl"
    unlabelled.write_text('{"problem": "p", "steps": ["s"]}\n')
    with pytest.raises(RecordError, match="labels"):
        study.create(tmp_path / "x", tmp_path / "work.jsonl", study.StudyConfig(("ana",)), gold=unlabelled)
    assert not (tmp_path / "x").exists()
    refused(ValueError, "annotators", study.create, tmp_path / "x", tmp_path / "work.jsonl", study.StudyConfig())
    for names in (("ana", "ana"), ("a/b",)):
        refused(ValueError, "annotators", study.StudyConfig, names)


def test_a_conflict_changes_nothing(tmp_path):
    tasks = Tasks(study.read(make(tmp_path)))
    tasks.apply(tasks.next("ana", 0.0))
    (task,) = tasks.opened_by("ana")
    before = dict(tasks.by_id)
    event = {"uuid": "x", "kind": "rate", "annotator": "ana", "task": task.id, "step": 3, "rating": 1}
    with pytest.raises(Conflict):
        tasks.apply(event | {"seconds": 1.0, "time": 1.0})
    assert tasks.by_id == before and not tasks.known({"uuid": "x"})


# ---- From scored chains to labels: selection, agreement, the report and the export.


_ = None
PUBLISHED = [  # Krippendorff 2011, section D: four observers, twelve units, with gaps
    [1, 2, 3, 3, 2, 1, 4, 1, 2, _, _, _],
    [1, 2, 3, 3, 2, 2, 4, 1, 2, 5, _, 3],
    [_, 3, 3, 3, 2, 3, 4, 2, 2, 5, 1, _],
    [1, 2, 3, 3, 2, 4, 4, 1, 2, 5, 1, _],
]


def alpha(units):
    return float(alpha_of(coincidences(units).sum(0)))


def test_alpha_is_that_of_the_published_example():
    units = list(zip(*PUBLISHED, strict=True))
    assert round(alpha(units), 3) == 0.815


def test_alpha_by_its_definition_on_pairs():
    """1 - D_o / D_e over all pairs of values within units, and over all pairs of pairable values."""
    rng = np.random.default_rng(0)
    for _trial in range(20):
        units = [rng.choice([-1, 0, 1], size=rng.integers(0, 4)).tolist() for _ in range(12)]
        pairable = [unit for unit in units if len(unit) > 1]
        values = [value for unit in pairable for value in unit]
        count = {v: values.count(v) for v in set(values)}

        def apart(c, k, count=count):
            low, high = min(c, k), max(c, k)
            between = sum(n for v, n in count.items() if low <= v <= high)
            return 0.0 if c == k else (between - (count[c] + count[k]) / 2) ** 2

        observed = sum(
            apart(a, b) / (len(unit) - 1) for unit in pairable for a, b in itertools.permutations(unit, 2)
        ) / len(values)
        expected = sum(apart(a, b) for a, b in itertools.permutations(values, 2)) / (len(values) * (len(values) - 1))
        assert alpha(units) == pytest.approx(1 - observed / expected, abs=1e-12)


def test_alpha_without_two_ratings_or_without_variation_is_undefined():
    assert np.isnan(alpha([])) and np.isnan(alpha([[1], [0, None]]))
    assert np.isnan(alpha([[1, 1], [1, 1]]))
    assert alpha([[1, 1], [0, 0], [-1, -1]]) == 1.0


def scored(i, low, correct=None, labels=None):
    record = {"problem": f"Problem {i}?", "steps": ["a", f"b{i}"], "scores": [0.99, low]}
    record |= {} if correct is None else {"correct": correct}
    return record | ({} if labels is None else {"labels": labels})


def select(records, config):
    return [record_of(tree) for tree in select_trees(list(map(tree_of, records)), config)]


def pool_of_chains():
    rng = np.random.default_rng(0)
    return [
        scored(i, float(rng.random()), bool(rng.random() < 0.5), [1, int(rng.random() < 0.5)] if i % 4 == 0 else None)
        for i in range(400)
    ]


def test_selection_takes_the_most_convincing_wrong_answers_and_a_random_part():
    chains = pool_of_chains()
    chosen = select([*chains, *chains[:50]], SelectConfig(100, seed=3))  # chains that are there twice count once
    strata = {
        name: [c for c in chosen if c["selection"]["stratum"] == name]
        for name in ("convincing", "rest", "disagreement", "random")
    }
    assert {name: len(chosen) for name, chosen in strata.items()} == {
        "convincing": 70, "rest": 10, "disagreement": 10, "random": 10
    }  # fmt: skip
    keys = [c["problem"] for c in chosen]
    assert len(set(keys)) == 100
    free = [c for c in chains if c["problem"] not in {c["problem"] for c in strata["random"]}]
    wrong = sorted((min(c["scores"]) for c in free if not c["correct"]), reverse=True)[:70]
    assert sorted((min(c["scores"]) for c in strata["convincing"]), reverse=True) == wrong
    assert all(c["selection"] == {"stratum": "random", "probability": 10 / 400} for c in strata["random"])
    order = [c["selection"]["stratum"] for c in chosen]
    assert order != sorted(order) and order[:70] != ["convincing"] * 70  # the order says nothing


def test_random_chains_are_drawn_from_all_with_the_stated_probability():
    """Weighted by 1 / probability, the random stratum's mean is that of all chains: its error is that of the draw."""
    chains = pool_of_chains()
    truth_of_all = np.mean([min(c["scores"]) for c in chains])
    means = []
    for seed in range(60):
        chosen = select(chains, SelectConfig(100, seed=seed))
        low = [min(c["scores"]) for c in chosen if c["selection"]["stratum"] == "random"]
        means.append(np.mean(low))
    error = np.std([min(c["scores"]) for c in chains]) / np.sqrt(10 * 60)
    assert abs(np.mean(means) - truth_of_all) < 3 * error  # of fixed seeds: passes or fails always


@pytest.mark.parametrize("scale", [Scale(weight="sigmoid"), Scale(weight="half")])
def test_disagreement_compares_scores_of_any_scale_with_labels(tmp_path, scale):
    """A step that is surely right and labelled right agrees, whatever its score is called."""
    of_p = {"sigmoid": lambda p: float(np.log(p / (1 - p))), "half": lambda p: 2 * p - 1}[scale.weight]
    chains = [
        {"problem": f"p{i}", "steps": ["a"], "scores": [of_p(p)], "labels": [label], "correct": True}
        for i, (p, label) in enumerate([(0.999, 1), (0.4, 1), (0.001, 0), (0.3, 1)])
    ]
    write_records(tmp_path / "in.jsonl", chains)
    config = SelectConfig(1, convincing=0, rest=0, disagreement=1)
    refused(ValueError, r"'p\d': .*OUT.info.json", select_file, tmp_path / "in.jsonl", tmp_path / "out.jsonl", config)
    (tmp_path / "in.jsonl.info.json").write_text(json.dumps({"version": 1, "scale": dataclasses.asdict(scale)}))
    select_file(tmp_path / "in.jsonl", tmp_path / "out.jsonl", config)
    assert [record["problem"] for record in read_records(tmp_path / "out.jsonl")] == ["p3"]


def test_a_short_stratum_is_filled_at_random_and_small_pools_are_taken_whole():
    right = [scored(i, 0.5, True) for i in range(50)]
    strata = [c["selection"]["stratum"] for c in select(right, SelectConfig(20))]
    assert [strata.count(name) for name in ("random", "fill", "rest")] == [2, 16, 2]
    assert len(select(right, SelectConfig(80))) == 50
    refused(ValueError, "score", select, [{"problem": "p", "steps": ["s"]}], SelectConfig(1))
    refused(ValueError, "at most 1", SelectConfig, 10, convincing=0.9, rest=0.2)


def test_selection_reads_pools_and_trees_and_leaves_benchmarks_out(tmp_path):
    pool = {"problem": "A $1$ pool?", "answer": 3, "samples": [
        {"steps": ["x"], "scores": [0.9], "correct": False, "answer": 4}, {"steps": ["y"], "scores": [0.2]},
    ]}  # fmt: skip
    tree = {"problem": "T?", "nodes": [
        {"parent": -1, "text": "a", "score": 0.5, "label": 0},
        {"parent": 0, "text": "b", "score": 0.5}, {"parent": 0, "text": "c", "score": 0.1},
    ]}  # fmt: skip
    write_records(tmp_path / "in.jsonl", [pool, tree])
    records = list(map(record_of, chains_in(tmp_path / "in.jsonl")))
    assert [c["steps"] for c in records] == [["x"], ["y"], ["a", "b"], ["a", "c"]]
    assert records[0] == {"problem": "A $1$ pool?", "steps": ["x"], "scores": [0.9], "answer": 3, "correct": False}
    write_records(tmp_path / "benchmark.jsonl", [{"problem": "a 1 pool?", "steps": ["z"]}])
    output = tmp_path / "out.jsonl"
    counts = select_file(tmp_path / "in.jsonl", output, SelectConfig(4), [tmp_path / "benchmark.jsonl"])
    assert counts["chains"] == 4 and counts["excluded"] == 2
    assert {record["problem"] for record in read_records(output)} == {"T?"}


@pytest.fixture(scope="module")
def labelled(tmp_path_factory):
    """A study in which ana labels as is true, and ben calls every chain right; all chains are labelled twice."""
    root = tmp_path_factory.mktemp("labels")
    mix = {"double_fraction": 1.0, "gold_fraction": 0.45, "repeat_fraction": 0.0}
    folder = make(root, count=12, gold=6, screening=3, pass_screening=0.5, **mix)
    with Desk(folder) as desk:
        for name, rating in (("ana", truth), ("ben", lambda text: 1)):
            while tasks := desk.next(name).json()["tasks"]:
                shown = tasks[0]
                if name == "ana" and shown["problem"] == "Problem 4?":
                    desk.post(name, shown["task"], "finish", reason="bad_problem", seconds=1)
                elif name == "ana" and shown["problem"] == "Problem 5?":
                    desk.rate(name, shown["task"], 0, 0)
                    desk.post(name, shown["task"], "comment", step=1, text="too hard")
                    desk.post(name, shown["task"], "finish", reason="give_up", seconds=1)
                else:
                    desk.label(name, shown, rating)
    return folder


def test_the_report_tells_what_labels_are_worth(labelled):
    report = figures(tasks_of(labelled))
    assert report["tasks"] == {"in_study": 12, "labelled": 12, "labelled_twice": 12, "steps": 48}
    agreement = report["agreement"]
    assert agreement["chains"] == 10 and agreement["first_error"]["value"] == pytest.approx(6 / 10)
    assert [task["task"] for task in agreement["apart"]] == [0, 3, 6, 9]
    assert agreement["apart"][0]["first_error"] == {"ana": 1, "ben": None}
    pairs = [[1, 1], [-1, 1]] * 4 + [[1, 1]] * 4 * 6 + [[0, 1]]  # four errors, six chains without, one given up
    assert agreement["alpha"]["value"] == pytest.approx(alpha(pairs))
    ana, ben = report["annotators"]["ana"], report["annotators"]["ben"]
    assert ana["screening"]["right"] == 3 and ben["screening"]["right"] == 2
    assert ana["gold"]["value"] == 1.0 and 0 < ben["gold"]["value"] < 1
    assert ana["finish"]["bad_problem"] == ana["finish"]["give_up"] == 1 and ana["repeats"] is None
    assert ben["drift"]["rated_wrong"]["value"] == 0 and ben["seconds_a_step"] == 1.0


def test_labels_that_two_differ_on_are_cut_or_given_twice(labelled, tmp_path):
    counts = export(labelled, tmp_path / "cut.jsonl", disagreements="cut")
    cut = {record["problem"]: record for record in read_records(tmp_path / "cut.jsonl")}
    assert counts["tasks"] == len(cut) == 11 and counts["left out: no step agreed on"] == 1
    assert counts["left out: bad_problem"] == 1 and cut["Problem 4?"]["annotators"] == ["ben"]
    assert cut["Problem 0?"]["labels"] == [1, None, None, None] and cut["Problem 1?"]["labels"] == [1, 1, 1, 1]
    assert "scores" not in cut["Problem 0?"] and cut["Problem 0?"]["selection"]["stratum"] == "convincing"
    assert "Problem 5?" not in cut  # the two differ on the first step
    labelled_trees = [tree_of(record) for record in read_records_twice(labelled, tmp_path)]
    assert len(labelled_trees) == 23 and all(tree.semantics == "rating" for tree in labelled_trees)
    ana = export(labelled, tmp_path / "ana.jsonl", disagreements="cut", without=["ben"])
    records = {record["problem"]: record for record in read_records(tmp_path / "ana.jsonl")}
    assert ana["tasks"] == 11 and records["Problem 0?"]["labels"] == [1, -1, None, None]
    assert records["Problem 5?"]["labels"] == [0, None, None, None]
    assert records["Problem 5?"]["comments"] == [{"annotator": "ana", "step": 1, "text": "too hard"}]
    refused(ValueError, "'eve'", export, labelled, tmp_path / "x.jsonl", disagreements="cut", without=["eve"])


def read_records_twice(labelled, tmp_path):
    export(labelled, tmp_path / "each.jsonl", disagreements="each")
    return read_records(tmp_path / "each.jsonl")


def test_anchoring_is_measured_where_chance_shows_scores(tmp_path):
    """Ana follows the scores that she sees, and elsewhere finds no error; half of the chains have a doubted step."""
    low = [[0.9, 0.2, 0.9], [0.9, 0.9, 0.9]]
    work = [chain(i, 3, scores=low[i % 2], labels=[1, 1, 1]) for i in range(60)]
    folder = make(tmp_path, work=work, names=("ana",), anchored_fraction=0.5, repeat_fraction=0.0, gold_fraction=0.0)
    with Desk(folder) as desk:
        seen = {}
        while tasks := desk.next("ana").json()["tasks"]:
            scores = tasks[0].get("scores")
            seen[tasks[0]["problem"]] = scores
            number = {text: i for i, text in enumerate(tasks[0]["steps"])}
            desk.label("ana", tasks[0], lambda text, s=scores, n=number: -1 if s and s[n[text]] < 0.5 else 1)
    shown = {problem: scores for problem, scores in seen.items() if scores}
    assert len(seen) == 60 and 15 < len(shown) < 45  # the seed's draw
    assert all(scores == low[int(problem.split()[1][:-1]) % 2] for problem, scores in shown.items())
    report = figures(tasks_of(folder))["anchoring"]
    doubted = [problem for problem in seen if int(problem.split()[1][:-1]) % 2 == 0]
    hidden_and_doubted = sum(problem not in shown for problem in doubted)
    assert (report["shown"], report["hidden"]) == (len(shown), 60 - len(shown))
    assert report["agreement"]["value"] == pytest.approx(hidden_and_doubted / report["hidden"])
    assert report["with_an_error"]["value"] == pytest.approx(sum(p in shown for p in doubted) / len(shown))
    assert report["agreement"]["low"] > 0 and report["with_an_error"]["low"] > 0
    export(folder, tmp_path / "out.jsonl", disagreements="cut")
    exported = {record["problem"]: record.get("anchored") for record in read_records(tmp_path / "out.jsonl")}
    assert exported == {problem: ["ana"] if problem in shown else None for problem in seen}


def test_a_study_of_anchoring_needs_scores(tmp_path):
    work = [chain(0), {key: value for key, value in chain(1).items() if key != "scores"}]
    refused(ValueError, "task 2: scores", make, tmp_path, work=work, anchored_fraction=0.5)
    log_odds = chain(1) | {"scores": [7.0] * len(chain(1)["steps"])}
    refused(ValueError, "task 2", make, tmp_path, work=[chain(0), log_odds], anchored_fraction=0.5)
    assert not (tmp_path / "study").exists()


def test_intervals_of_contrasts_hold_the_difference_as_often_as_they_say():
    """Two annotators a chain, whose ratings are alike; a true difference of 0.2. 300 studies."""
    rng, held = np.random.default_rng(0), 0
    chain_N = np.repeat(np.arange(40), 2)
    for _ in range(300):
        hard_N = np.repeat(rng.random(40) < 0.5, 2)
        second_N = rng.random(80) < 0.5
        value_N = (rng.random(80) < 0.2 + 0.4 * hard_N + 0.2 * second_N).astype(float)
        interval = _contrast(value_N.tolist(), second_N, chain_N.tolist(), seed=0)
        held += interval["low"] <= 0.2 <= interval["high"]
    # 95 % of 300 with a binomial standard error of 1.3 points: three of them to either side.
    assert 0.91 <= held / 300 <= 0.99, held


# ---- The labelling server killed at random moments, and on a full disk: what it confirmed is there, once.


@pytest.mark.parametrize("kills", [*breadth([2]), pytest.param(200, marks=pytest.mark.slow)])
def test_what_was_confirmed_is_there_once_after_kills_at_random_moments(tmp_path, kills):
    counts = storm.annotate(tmp_path, kills, seed=kills)
    assert counts["kills"] == kills and counts["events"] > 0


def test_a_full_disk_confirms_nothing_says_so_and_loses_nothing(tmp_path):
    folder = make(tmp_path, count=50, names=("ana",))
    server = Process(folder, limit=2000)
    shown = server.post("next", {})[1]["tasks"][0]
    confirmed, refused = [], []
    for count in range(40):
        body = {"uuid": f"comment-{count:04}", "task": shown["task"], "kind": "comment", "text": "a word"}
        status, reply = server.post("events", body)
        if status == 200:
            confirmed.append(reply["acknowledged"])
        else:
            assert status == 507 and "could not store this: File too large" in reply["error"]["message"]
            refused.append(body)
    server.stop()
    lines = (folder / study.EVENTS).read_bytes()
    assert lines.endswith(b"\n") and len(lines) <= 2000 and len(confirmed) > 3 and len(refused) > 3
    server = Process(folder)  # there is room again
    for body in refused:
        assert server.post("events", body)[0] == 200
    server.stop()
    stored = [event["uuid"] for event in log_of(folder)]
    assert [uuid for uuid in stored if uuid.startswith("comment")] == confirmed + [body["uuid"] for body in refused]


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ("select --input a.jsonl --output b.jsonl --count 0", "count is 0: it must be at least 1"),
        ("serve study --set gold_fraction=2", "gold_fraction is 2.0: it must be from 0 to 1"),
        ("serve study --set gold=2", "--set gold: is no known field"),
        (
            "serve study --gold-fraction 0.2",
            "serve has no option --gold-fraction. Write --set gold_fraction=VALUE",
        ),
        ("select --count 1 --rest 0.2", "select has no option --rest. Write --set rest=VALUE"),
    ],
)
def test_settings_of_studies_are_refused_in_one_line(args, message, capsys):
    assert cli.main(["annotate", *args.split()]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line
