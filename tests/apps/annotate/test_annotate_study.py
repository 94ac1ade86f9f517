"""A study while it is served: page, report, export; known tasks from benchmarks; steps that annotators write."""

import json
import re
import shlex
from pathlib import Path

import pytest
from annotating import Desk, chain, make, truth
from browser import CONTROL, ENTER, requests_of, served
from refusing import refused
from tiny_run import experiment, processbench_file, save_tokenizer, write_experiment

from jprm.apps import cli
from jprm.apps.annotate.app import key_of_annotator, key_of_study
from jprm.apps.annotate.quality import export, figures, standing, tasks_of
from jprm.apps.annotate.study import known_items_in, known_wrong
from jprm.experiment import TargetConfig
from jprm.tree import read_records, tree_of

PAGE = (Path(__file__).resolve().parents[3] / "docs/annotation.md").read_text(encoding="utf-8")


def test_report_and_export_read_a_running_study(tmp_path):
    folder = make(tmp_path, count=4, names=("ana",))
    with Desk(folder) as desk:
        for shown in desk.next("ana").json()["tasks"]:
            desk.label("ana", shown)
        assert figures(tasks_of(folder))["tasks"]["labelled"] == 2
        assert export(folder, tmp_path / "out.jsonl", disagreements="cut")["tasks"] == 2
        with open(folder / "events.jsonl", "ab") as file:
            file.write(b'{"uuid": "half')  # is being written, so nobody was told that it is stored
        assert figures(tasks_of(folder))["tasks"]["labelled"] == 2


def test_the_page_of_the_study_changes_nothing_and_has_a_key_of_its_own(tmp_path):
    folder = make(tmp_path, count=4, names=("ana", "ben"))
    with Desk(folder, key="secret") as desk:
        desk.headers = {"Authorization": f"Bearer {key_of_annotator('secret', 'ana')}"}
        (shown, _) = desk.next("ana").json()["tasks"]
        desk.label("ana", shown)
        before = (folder / "events.jsonl").read_bytes()
        assert desk.request("GET", "/v1/study").status_code == 401
        assert desk.request("GET", "/study").status_code == 200  # it holds nothing of the study
        desk.headers = {"Authorization": f"Bearer {key_of_study('secret')}"}
        told = desk.request("GET", "/v1/study").json()
        assert told["tasks"]["labelled"] == 1 and told["annotators"]["ana"]["tasks"] == 1
        assert desk.next("ana").status_code == 401
        assert (folder / "events.jsonl").read_bytes() == before


def test_who_is_stuck_is_told(tmp_path):
    now = [1e9]
    folder = make(tmp_path, count=2, names=("ana", "ben", "eve"), double_fraction=1.0)
    with Desk(folder, clock=lambda: now[0]) as desk:
        ana = desk.next("ana").json()["tasks"]
        desk.rate("ana", ana[0]["task"], 0, 1)
        for shown in desk.next("ben").json()["tasks"]:
            desk.label("ben", shown)
        desk.next("eve")
        now[0] += 45 * 60
        states = standing(tasks_of(folder), now[0])
    assert {name: state["state"] for name, state in states.items()} == {
        "ana": "stuck",
        "ben": "done",
        "eve": "not begun",
    }
    assert states["ana"]["on"]["step"] == 2 and states["ana"]["minutes"] == pytest.approx(45)


def test_known_tasks_come_from_processbench_as_released(tmp_path):
    file = processbench_file(tmp_path / "gsm8k.json", 12, 1)
    trees, items = list(known_items_in(file)), json.loads(file.read_text())
    first = [min((k for k, wrong in known_wrong(tree).items() if wrong), default=-1) for tree in trees]
    assert first == [item["label"] for item in items]


def test_an_annotator_writes_the_step_as_it_should_be(tmp_path):
    folder = make(tmp_path, work=[chain(3, steps=3), chain(4, steps=2)], names=("ana",))
    with Desk(folder) as desk:
        shown = desk.next("ana").json()["tasks"][0]
        write = {"text": " So it is 7. ", "seconds": 3}
        desk.rate("ana", shown["task"], 0, 1)
        assert desk.post("ana", shown["task"], "write", **write).status_code == 409  # nothing is wrong so far
        desk.rate("ana", shown["task"], 1, -1)
        assert desk.post("ana", shown["task"], "write", **write).status_code == 200
        desk.post("ana", shown["task"], "undo", step=1)  # and with the rating what was written for it
        assert desk.next("ana").json()["tasks"][0]["written"] == ""
        desk.rate("ana", shown["task"], 1, -1)
        desk.post("ana", shown["task"], "write", **write)
        desk.post("ana", shown["task"], "finish", reason="found_error", seconds=1)
        desk.label("ana", desk.next("ana").json()["tasks"][0], truth)
    refused(ValueError, "--written", export, folder, tmp_path / "x.jsonl", disagreements="cut")
    for written, label in (("positive", 1), ("unlabelled", None)):
        assert export(folder, tmp_path / "out.jsonl", disagreements="cut", written=written)["written"] == 1
        tree, other = map(tree_of, read_records(tmp_path / "out.jsonl"))
        assert [(node.parent, node.label) for node in tree.nodes] == [(-1, 1), (0, -1), (1, None), (0, label)]
        assert tree.nodes[3].text == "So it is 7." and tree.nodes[3].origin == "human_written"
        assert other.kind == "chain"


def test_intervals_of_agreement_stay_within_their_range(tmp_path):
    folder = make(tmp_path, count=6, double_fraction=1.0, gold_fraction=0.0, repeat_fraction=0.0)
    with Desk(folder) as desk:
        strict = {"ana": truth, "ben": lambda text: -1 if text == "Step 3 of chain 1." else truth(text)}
        for name, rating in strict.items():
            while tasks := desk.next(name).json()["tasks"]:
                desk.label(name, tasks[0], rating)
    alpha = figures(tasks_of(folder))["agreement"]["alpha"]
    assert alpha["value"] < 1 and -1 <= alpha["low"] <= alpha["value"] <= alpha["high"] <= 1


def test_the_pages_commands_carry_from_a_study_to_a_trained_run(one_device, tmp_path, monkeypatch):
    """From the export on, as docs/annotation.md has them, with an experiment that has other labels."""
    monkeypatch.chdir(tmp_path)
    make(tmp_path / "studies", count=6, names=("ana",))
    (tmp_path / "studies/study").rename(tmp_path / "studies/one")
    with Desk("studies/one") as desk:
        while tasks := desk.next("ana").json()["tasks"]:
            desk.label("ana", tasks[0])
    save_tokenizer("tokenizer.json")
    target = TargetConfig(labels="correctness", neutral="none", after_error="keep")
    run = experiment(Path(), train=("absent.jsonl",), valid=(), rows=1, micro_rows=1, target=target, steps=2)
    write_experiment(Path("mine.py"), run)
    block = re.search(r"^    jprm score.*?(?=\n\n)", PAGE, re.DOTALL | re.MULTILINE)[0]
    commands = [shlex.split(line)[1:] for line in block.replace("\\\n", " ").splitlines()]
    for command in commands[[line[:2] for line in commands].index(["annotate", "report"]) :]:
        assert cli.main(command) == 0, command
    assert Path("runs/labelled/result.json").exists()


def test_the_pages_are_seen_in_a_browser(browser, tmp_path):
    folder = make(tmp_path, work=[chain(3, steps=3), chain(4, steps=2)], names=("ana",))
    with Desk(folder) as desk, served(desk.app, timeout_graceful_shutdown=5) as (_, port):
        browser.open("about:blank")
        browser.size(1000, 760)
        requests_of(browser), browser.logs("browser")
        browser.open(f"http://127.0.0.1:{port}/#ana")
        browser.wait("return !document.getElementById('chain').hidden")
        browser.press("3", "1", "w")
        browser.press(*"So 7.")
        browser.run(
            "document.getElementById('own-step').addEventListener('close',"
            " () => { window.focused = document.activeElement.tagName })"
        )
        browser.chord(CONTROL, ENTER)
        browser.wait("return document.getElementById('own').innerText.includes('So 7.')")
        assert browser.run("return window.focused") == "BODY"  # the next key is the page's
        browser.press(ENTER)
        browser.wait("return document.getElementById('problem').textContent === 'Problem 4?'")
        browser.wait("return document.getElementById('stored').textContent === 'all stored'")
        browser.open(f"http://127.0.0.1:{port}/study")
        browser.wait("return document.querySelectorAll('#annotators tr').length > 5")
        assert browser.run("return document.getElementById('progress-text').textContent").startswith("1 of 2")
        assert "working" in browser.run("return document.getElementById('annotators').innerText")
        assert browser.logs("browser") == []
        home = f"http://127.0.0.1:{port}/"
        assert all(url.startswith(home) or url == "data:," for url in requests_of(browser))
        browser.open("about:blank")
    events = map(json.loads, (folder / "events.jsonl").read_text().splitlines())
    assert [event["text"] for event in events if event["kind"] == "write"] == ["So 7."]


@pytest.mark.slow
def test_axe_finds_no_violation_on_the_page_of_the_study(browser, tmp_path):
    folder = make(tmp_path, count=6, double_fraction=1.0)
    with Desk(folder) as desk, served(desk.app, timeout_graceful_shutdown=5) as (_, port):
        for name, rating in (("ana", truth), ("ben", lambda text: 1)):
            for shown in desk.next(name).json()["tasks"]:
                desk.label(name, shown, rating)
        for scheme in browser.schemes():
            browser.size(640, 500, 2)  # 1280 pixels at a zoom of 200 %
            browser.open(f"http://127.0.0.1:{port}/study")
            browser.wait("return document.querySelectorAll('#annotators tr').length > 5")
            assert browser.axe() == [], scheme
        browser.open("about:blank")


@pytest.mark.parametrize(
    ("args", "line"),
    [
        ("annotate select --input a.jsonl --output b.jsonl --count 0", "count is 0: it must be at least 1"),
        ("annotate serve study --set gold_fraction=2", "gold_fraction is 2.0: it must be from 0 to 1"),
    ],
)
def test_options_of_studies_are_refused_in_one_line(args, line, capsys):
    assert cli.main(args.split()) == 2
    assert capsys.readouterr().err == f"error: {line}\n"
