"""Runs that still write: whole lines once each, a page that grows with them, and nothing that they hold as code."""

import json
import os
import time

import pytest
from browser import ESCAPE, LEFT, requests_of, served
from refusing import refused
from starlette.testclient import TestClient

from jprm.apps.serve import ServeConfig, Served
from jprm.apps.serve.app import make_app, serve
from jprm.apps.serve.runs import Runs, read_lines

NASTY = "<img src=x onerror=\"document.title='broken'\">"


def make_run(folder, lines, steps=100):
    folder.mkdir(parents=True)
    (folder / "experiment.json").write_text(json.dumps({"name": "e", "steps": steps}))
    write(folder, lines)
    return folder


def write(folder, lines):
    with (folder / "metrics.jsonl").open("a") as file:
        file.write("".join(json.dumps(line) + "\n" for line in lines))


def training(first, last):
    return [
        {"step": s, "loss": 1 / s, "auroc": 1 - 0.4 / s, "goodput": 0.9, "tokens_per_second": 2000.0, "seconds": 5.0}
        | ({"valid_loss": 1.2 / s, "valid_auroc": 0.8} if s % 20 == 0 else {})
        for s in range(first, last, 10)
    ]


def test_every_whole_line_comes_once_however_the_file_is_cut(tmp_path):
    lines = [{"step": i, "loss": i / 3, "note": "x"} for i in range(30)]
    data, path = "".join(json.dumps(line) + "\n" for line in lines).encode(), tmp_path / "metrics.jsonl"
    assert read_lines(path, "", 0)["lines"] == []
    got, file, at = [], "", 0
    with path.open("wb", buffering=0) as written:
        for first in range(0, len(data), 7):
            written.write(data[first : first + 7])
            part = read_lines(path, file, at)
            got, file, at = got + part["lines"], part["file"], part["next"]
            assert part["damaged"] == 0
    assert got == [{"step": i, "loss": i / 3} for i in range(30)]


def test_a_file_that_was_replaced_begins_anew_and_damage_is_counted(tmp_path):
    path, other = tmp_path / "metrics.jsonl", tmp_path / "other"
    path.write_text('{"step": 1}\n{"step": 2}\n')
    first = read_lines(path, "", 0)
    other.write_text('{"step": 1, "loss": NaN, "gold": true}\n[1]\nno json\n' + "[" * 100_000 + '\n{"step": 3}\n{"st')
    os.replace(other, path)
    again = read_lines(path, first["file"], first["next"])
    assert again["from"] == 0 and again["lines"] == [{"step": 1}, {"step": 3}] and again["damaged"] == 3
    path.write_text('{"step": 1}\n')  # the same file, cut
    assert read_lines(path, again["file"], again["next"])["from"] == 0


def test_parts_of_a_large_file_follow_each_other(tmp_path, monkeypatch):
    monkeypatch.setattr("jprm.apps.serve.runs.PART", 50)
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(json.dumps({"step": i, "note": "x" * (i % 90)}) + "\n" for i in range(40)))
    got, file, at, end = [], "", 0, 1
    while at < end:
        part = read_lines(path, file, at)
        got, file, at, end = got + part["lines"], part["file"], part["next"], part["end"]
    assert [line["step"] for line in got] == list(range(40))


def test_routes_need_the_key_and_name_a_run(tmp_path):
    make_run(tmp_path / "a", training(10, 40))
    app = make_app([], ServeConfig(), key="secret", shown=Runs([tmp_path]))
    with TestClient(app, base_url="http://localhost") as client:
        assert client.get("/", follow_redirects=False).headers["location"] == "runs"
        assert [client.get(path).status_code for path in ("/runs", "/runs/runs.js", "/v1/runs", "/v1/score")] == [
            200, 200, 401, 401,
        ]  # fmt: skip
        client.headers["authorization"] = "Bearer secret"
        make_run(tmp_path / "b", [])  # appears later
        assert [run["id"] for run in client.get("/v1/runs").json()["data"]] == ["a", "b"]
        got = client.get("/v1/runs/metrics", params={"run": "a"}).json()
        assert [line["step"] for line in got["lines"]] == [10, 20, 30]
        for query, status in (({"run": "../a"}, 404), ({"run": "a", "from": "-1"}, 400), ({}, 404)):
            assert client.get("/v1/runs/metrics", params=query).status_code == status
        assert client.post("/v1/score", json={}).status_code == 404  # no model is served
    refused(FileNotFoundError, "no run", Runs, [tmp_path / "a" / "none"])
    refused(ValueError, "--run", serve, Served())


@pytest.fixture
def page(browser, tmp_path):
    make_run(tmp_path / "runs" / "first", training(10, 100))
    make_run(tmp_path / "runs" / NASTY.replace("/", ""), training(10, 60))
    app = make_app([], ServeConfig(), shown=Runs([tmp_path / "runs"]))
    with served(app, timeout_graceful_shutdown=5) as (_, port):
        browser.open("about:blank")
        browser.size(1000, 800)
        requests_of(browser), browser.logs("browser")
        browser.url_of_page = f"http://127.0.0.1:{port}/"
        browser.open(browser.url_of_page)
        browser.wait("return document.querySelectorAll('#plots figure').length === 4", 20)
        yield browser
        browser.open("about:blank")


NOW = "document.dispatchEvent(new Event('visibilitychange'));"
"""Reads what is new, as when the page comes into view, without waiting for its clock."""


def readout(page, plot):
    return page.run("return document.querySelectorAll('#plots figure p')[arguments[0]].textContent", plot)


def test_curves_grow_while_a_run_writes(page, tmp_path):
    assert readout(page, 0).startswith("last: ") and "first 0.0111; first, held out 0.015" in readout(page, 0)
    path = "return document.querySelectorAll('#plots figure')[0].querySelectorAll('path').length"
    assert page.run(path) == 4  # loss and held-out loss of two runs
    write(tmp_path / "runs" / "first", [{"step": 100, "loss": 0.5}])
    with (tmp_path / "runs" / "first" / "metrics.jsonl").open("a") as file:
        file.write('{"step": 110, "lo')  # half a line
    page.wait(NOW + "return document.querySelector('#plots figure p').textContent.includes('first 0.5')", 20)
    page.wait("return document.getElementById('runs').textContent.includes('finished100 of 100')", 20)
    page.press("j", LEFT)  # the first plot, and the step before the end
    page.wait("return document.querySelector('#plots figure p').textContent.startsWith('step 100')")
    page.press(LEFT)
    assert readout(page, 0).startswith("step 90") and "first 0.0111" in readout(page, 0)
    page.press("l", "1")
    page.wait("return document.querySelectorAll('#plots figure')[0].querySelectorAll('path').length === 2")
    page.press("1")
    page.run("document.activeElement.blur()")
    with (tmp_path / "runs" / "first" / "metrics.jsonl").open("a") as file:
        file.write('ss": 0.25}\n')
    page.wait(NOW + "return document.querySelector('#plots figure p').textContent.includes('first 0.25')", 20)
    write(tmp_path / "runs" / "first", [{"step": 120, "gold": 0.4, "proxy": 0.9}])
    page.wait(NOW + "return document.querySelectorAll('#plots figure').length === 5", 20)
    assert page.run("return document.title") == "jprm runs" and page.logs("browser") == []
    assert page.overflow() <= 0
    page.size(360, 640)
    assert page.overflow() <= 0
    assert all(url.startswith(page.url_of_page) or url == "data:," for url in requests_of(page))


def test_curves_are_smoothed_and_drawn_over_hours(page, tmp_path):
    lines = [{"step": 10 * k, "loss": float(k % 2), "seconds": 1800.0} for k in range(1, 11)]
    make_run(tmp_path / "runs" / "timed", lines)
    page.wait(NOW + "return document.querySelector('#plots figure p').textContent.includes('timed 0')", 20)
    page.press("s")
    page.wait("return document.querySelectorAll('#plots .raw').length > 0")
    mean, mass = 0.0, 0.0
    for line in lines:
        mean, mass = 0.6 * mean + 0.4 * line["loss"], 0.6 * mass + 0.4
    assert f"timed {mean / mass:.3g}" in readout(page, 0)
    page.press("x", "j", LEFT)
    page.wait("return document.querySelector('#plots figure p').textContent.startsWith('5 h')")
    page.press("x")
    page.wait("return document.querySelector('#plots figure p').textContent.startsWith('last')")


def test_settings_that_differ_are_columns_and_what_is_not_shown_is_told(page, tmp_path):
    for name, rate in (("first", 0.1), ("second", 0.2)):
        folder = tmp_path / "runs" / name
        folder.mkdir(exist_ok=True)
        (folder / "experiment.json").write_text(json.dumps({"name": "n", "steps": 100, "optimizer": {"rate": rate}}))
    page.wait(NOW + "return document.getElementById('heads').textContent.includes('rate')", 20)
    assert "0.1" in page.run("return document.getElementById('runs').textContent")


@pytest.mark.slow
def test_axe_finds_no_violation(page):
    for scheme in page.schemes():
        page.size(640, 500, 2)  # 1280 pixels at a zoom of 200 %
        for keys in ("", "j", "l", "?"):
            page.press(*keys)
            time.sleep(0.3)
            assert page.axe() == [], (scheme, keys)
        page.press(ESCAPE)


def test_a_pipe_or_a_device_among_runs_holds_no_thread(tmp_path):
    """Each ask of the page would wait for a writer for ever, or read zeros until the memory is full."""
    for name in ("pipe", "zeros"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "experiment.json").write_text('{"name": "e", "steps": 9}')
    os.mkfifo(tmp_path / "pipe" / "metrics.jsonl")
    (tmp_path / "zeros" / "metrics.jsonl").symlink_to("/dev/zero")
    app = make_app([], ServeConfig(), shown=Runs([tmp_path]))
    with TestClient(app, base_url="http://localhost") as client:
        for name in ("pipe", "zeros"):
            got = client.get("/v1/runs/metrics", params={"run": name})
            assert got.status_code == 400 and "is not a file on disk" in got.json()["error"]["message"]
            assert str(tmp_path) not in got.text
        assert client.get("/v1/runs").status_code == 200


def test_a_line_without_end_is_read_in_bounded_parts(tmp_path, monkeypatch):
    monkeypatch.setattr("jprm.apps.serve.runs.PART", 50)
    monkeypatch.setattr("jprm.apps.serve.runs.LONGEST_LINE", 100)
    path = tmp_path / "metrics.jsonl"
    path.write_text("x" * 310 + '\n{"step": 1}\n')
    got, file, at, end, damaged = [], "", 0, 1, 0
    while at < end:
        part = read_lines(path, file, at)
        assert part["next"] - at <= 150
        got, file, at, end = got + part["lines"], part["file"], part["next"], part["end"]
        damaged += part["damaged"]
    assert got == [{"step": 1}] and damaged == 3
