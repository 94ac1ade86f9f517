"""The labelling server: what is stored, who gets which chain, and what never leaves it."""

import collections
import itertools

import pytest
from annotating import SECRET, Desk, log_of, make, truth
from refusing import refused

from jprm.apps.annotate import study
from jprm.apps.annotate.app import key_of_annotator
from jprm.apps.annotate.tasks import AHEAD, CLAIM_SECONDS, Conflict, Tasks
from jprm.io.jsonl import RecordError


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
    ("body", "status", "param"),
    [
        ({"kind": "rate", "step": 0, "rating": 2, "seconds": 1}, 400, "rating"),
        ({"kind": "rate", "step": 0, "rating": True, "seconds": 1}, 400, "rating"),
        ({"kind": "rate", "step": -1, "rating": 1, "seconds": 1}, 400, "step"),
        ({"kind": "rate", "step": 0, "rating": 1, "seconds": -1}, 400, "seconds"),
        ({"kind": "rate", "step": 0, "rating": 1, "seconds": 1, "score": 1}, 400, "score"),
        ({"kind": "open", "pool": "gold", "index": 0, "again": False}, 400, "kind"),
        ({"kind": "flag", "on": 1}, 400, "on"),
        ({"kind": "comment", "text": " "}, 400, "text"),
        ({"kind": "comment", "text": "x" * 2001}, 400, "text"),
        ({"kind": "finish", "reason": "bored", "seconds": 0}, 400, "reason"),
        ({"kind": "flag", "on": True, "uuid": "open-12345678"}, 400, "uuid"),
        ({"kind": "flag", "on": True, "uuid": "a\nb" * 9}, 400, "uuid"),
        ({"kind": "flag", "on": True, "task": "nobody's"}, 409, None),
        ({"kind": "comment", "step": 99, "text": "why?"}, 400, "step"),
    ],
)
def test_bad_events_are_refused_and_not_stored(tmp_path, body, status, param):
    folder = make(tmp_path)
    with Desk(folder) as desk:
        task = desk.next("ana").json()["tasks"][0]["task"]
        got = desk.request("POST", "/v1/annotators/ana/events", json={"uuid": "0123456789", "task": task} | body)
        assert got.status_code == status and got.json()["error"]["param"] == param
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
