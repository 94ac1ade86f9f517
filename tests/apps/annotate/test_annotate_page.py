"""The labelling page in a real browser: a chain by keyboard only, without a connection, after a reload, on a phone."""

import time

import pytest
from annotating import SECRET, Desk, chain, log_of, make
from browser import CONTROL, DOWN, ENTER, ESCAPE, UP, WIDE, requests_of, served

NASTY = "</script><script>document.title = 'broken'</script><img src=x onerror=\"document.title='broken'\">"


class Page:
    """A study that is served on a port, and a browser in front of it as ana."""

    def __init__(self, browser, folder):
        self.browser, self.folder, self.desk = browser, folder, Desk(folder)
        self.serving = served(self.desk.app, timeout_graceful_shutdown=5)

    def __enter__(self):
        _, self.port = self.serving.__enter__()
        self.browser.open("about:blank")
        self.browser.size(1000, 760)
        requests_of(self.browser), self.browser.logs("browser")
        self.browser.open(f"http://127.0.0.1:{self.port}/#ana")
        self.wait("!document.getElementById('chain').hidden")
        return self

    def __exit__(self, *error):
        self.offline(False)
        self.browser.open("about:blank")
        self.serving.__exit__(*error)
        self.desk.__exit__(*error)

    def wait(self, condition):
        self.browser.wait(f"return {condition}")

    def says(self, id):
        return self.browser.run("return document.getElementById(arguments[0]).innerText", id)

    def steps(self):
        return self.browser.run("return [...document.querySelectorAll('#steps li')].map(e => e.innerText)")

    def stored(self):
        """Waits until all is stored; returns what the log has of the page's events."""
        self.wait("document.getElementById('stored').textContent === 'all stored'")
        return [event for event in log_of(self.folder) if event["kind"] != "open"]

    def offline(self, yes):
        self.browser.cdp("Network.enable")
        conditions = {"offline": yes, "latency": 0, "downloadThroughput": -1, "uploadThroughput": -1}
        self.browser.cdp("Network.emulateNetworkConditions", **conditions)


@pytest.fixture
def page(browser, tmp_path):
    first = chain(0, steps=3) | {"problem": NASTY}
    first["steps"][1] = NASTY
    with Page(
        browser, make(tmp_path, work=[first, *(chain(i, steps=3) for i in range(1, 6))], names=("ana",))
    ) as opened:
        yield opened


def test_a_chain_is_labelled_by_keys_alone_and_nothing_else_is_seen(page):
    assert page.says("problem") == NASTY and len(page.steps()) == 1
    source = page.browser.run("return document.documentElement.outerHTML")
    assert "Step 2 of chain 0." not in source and str(SECRET) not in source and "stratum" not in source
    page.browser.press("3")
    page.wait("document.querySelectorAll('#steps li').length === 2")
    assert page.browser.run("return document.querySelector('#steps li.now .text').textContent") == NASTY
    page.browser.press("2", "u", "2", "1")  # neutral, taken back, neutral again, and the last step wrong
    page.wait("!document.getElementById('end').hidden")
    assert page.says("end-text") == "First error: step 3."
    assert [text.split("\n")[1] for text in page.steps()] == ["✓ right", "– neutral", "✗ wrong"]
    page.browser.press("f", "c")
    page.browser.press(*"why")
    page.browser.chord(CONTROL, ENTER)
    page.wait("document.querySelectorAll('#comments li').length === 1")
    page.browser.press(ENTER)
    page.wait("document.getElementById('problem').textContent === 'Problem 1?'")
    page.browser.press("s", "u", "u")  # skip and not; then back to the chain before
    page.wait("!document.getElementById('end').hidden")
    assert page.says("end-text") == "First error: step 3."
    page.browser.press(ENTER)
    events = page.stored()
    kinds = [(event["kind"], event.get("step"), event.get("rating")) for event in events]
    assert kinds == [
        ("rate", 0, 1), ("rate", 1, 0), ("undo", 1, None), ("rate", 1, 0), ("rate", 2, -1), ("flag", None, None),
        ("comment", None, None), ("finish", None, None), ("undo", None, None), ("finish", None, None),
    ]  # fmt: skip
    assert len({event["uuid"] for event in events}) == len(events) and events[6]["text"] == "why"
    assert page.browser.run("return document.title") == "jprm annotate"
    assert page.browser.logs("browser") == []
    urls = requests_of(page.browser)
    home = f"http://127.0.0.1:{page.port}/"
    assert len(urls) > 10 and all(url.startswith(home) or url == "data:," for url in urls)


def test_work_goes_on_without_a_connection_and_arrives_once_in_order(page):
    page.browser.press("3")
    page.stored()
    page.offline(True)
    page.browser.press("3", "1", ENTER, "3", "3")  # the rest of this chain, and two steps of the next
    page.wait("document.getElementById('stored').textContent.startsWith('offline: 5 kept')")
    assert len([event for event in log_of(page.folder) if event["kind"] != "open"]) == 1
    assert len(page.steps()) == 3 and page.says("problem") == "Problem 1?"
    page.offline(False)
    page.browser.open(f"http://127.0.0.1:{page.port}/?again#ana")  # a reload, in which the outbox stays
    page.wait("document.querySelectorAll('#steps li').length === 3")
    events = page.stored()
    assert [(event["kind"], event.get("rating")) for event in events] == [
        ("rate", 1), ("rate", 1), ("rate", -1), ("finish", None), ("rate", 1), ("rate", 1)
    ]  # fmt: skip
    assert len({event["uuid"] for event in events}) == len(events)
    assert page.browser.run("return localStorage.length") == 0


def test_a_full_disk_is_said_and_what_the_server_refuses_is_taken_back(page, monkeypatch):
    append = page.desk.log.append

    def full(event):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(page.desk.log, "append", full)
    page.browser.press("3")
    page.wait("document.getElementById('alert').textContent.includes('No space left on device')")
    assert page.says("stored") == "not stored: 1 kept in this browser"
    monkeypatch.setattr(page.desk.log, "append", append)
    assert len(page.stored()) == 1  # tried again without a key being pressed
    page.wait("document.getElementById('alert').hidden")
    task = page.desk.tasks.opened_by("ana")[0]
    page.desk.tasks.apply({"uuid": "elsewhere", "kind": "rate", "annotator": "ana", "task": task.id, "step": 1,
                           "rating": 1, "seconds": 1.0, "time": 1.0})  # fmt: skip
    page.browser.press("1")  # the same step, in this window
    page.wait("document.getElementById('alert').textContent.includes('another window')")
    page.wait("document.querySelectorAll('#steps li').length === 3")  # the server's state


TREE = {"problem": "A tree?", "nodes": [
    *({"parent": -1, "text": f"way {i}", "score": SECRET} for i in range(3)),
    *({"parent": 0, "text": f"below {i}", "score": SECRET} for i in range(2)), {"parent": 3, "text": "the end"},
]}  # fmt: skip


def test_alternatives_are_rated_and_chosen_by_keys_alone(browser, tmp_path):
    def rows():
        return page.browser.run("return [...document.querySelectorAll('#alternatives .text')].map(e => e.textContent)")

    def rate(keys):
        """Each alternative in turn: the cursor goes to the next that is not rated."""
        for _ in rows():
            page.browser.press(keys[page.browser.run("return document.querySelector('.now .text').textContent")])

    def mark(text):
        for _ in rows():
            if page.browser.run("return document.querySelector('.now .text').textContent") == text:
                return
            page.browser.press(DOWN)

    with Page(browser, make(tmp_path, work=[TREE, chain(1)], names=("ana",))) as page:
        page.browser.size(360, 640)
        page.wait("document.querySelectorAll('#alternatives li').length === 3")
        source = page.browser.run("return document.documentElement.outerHTML")
        assert "below" not in source and str(SECRET) not in source and page.says("several").endswith("3 ALTERNATIVES")
        page.browser.press(ENTER, DOWN, UP, UP)  # nothing is chosen before all are rated
        rate({"way 0": "3", "way 1": "1", "way 2": "2"})
        mark("way 1")
        assert page.says("end-text").endswith("is wrong: go on with another.")
        page.browser.press(ENTER)
        mark("way 0")
        page.browser.press("2", "3")  # a change of mind, and back: the best one is marked
        page.browser.press(ENTER)
        assert rows()[0].startswith("below") and [text.split("\n")[-1] for text in page.steps()] == ["way 0"]
        page.browser.press("u")
        assert len(rows()) == 3  # with their ratings
        page.browser.press(ENTER)
        rate({"below 0": "3", "below 1": "1"})
        page.stored()
        page.browser.open(f"http://127.0.0.1:{page.port}/?again#ana")
        page.wait("document.querySelectorAll('#alternatives li').length === 2")
        root = "document.documentElement"
        assert page.browser.run(f"return {root}.scrollWidth - {root}.clientWidth") <= 0
        page.browser.press(ENTER, "3")  # the end has no alternative
        page.wait("document.getElementById('end-text').textContent === 'No error in 3 steps.'")
        page.browser.press(ENTER)
        page.wait("document.getElementById('problem').textContent === 'Problem 1?'")
        acts = [(event["kind"], event.get("step"), event.get("rating")) for event in page.stored()]
        assert sorted(acts[:3]) == [("rate", 0, 1), ("rate", 1, -1), ("rate", 2, 0)]
        assert acts[3:8] == [
            ("rate", 0, 0),
            ("rate", 0, 1),
            ("choose", 0, None),
            ("undo", 0, None),
            ("choose", 0, None),
        ]
        assert sorted(acts[8:10]) == [("rate", 3, 1), ("rate", 4, -1)]
        assert acts[10:] == [("choose", 3, None), ("rate", 5, 1), ("finish", None, None)]
        assert page.browser.logs("browser") == []


@pytest.mark.slow
def test_axe_finds_no_violation(browser, tmp_path):
    work = [chain(0, steps=3) | {"problem": f"What is $x^2$ at $x = 3$?\n{WIDE}"}, TREE]
    with Page(browser, make(tmp_path, work=work, names=("ana",))) as page:

        def check(scheme, *keys):
            for key in keys:
                page.browser.press(*key)
                time.sleep(0.3)  # the step's appearance ends: axe reads colours as they are
                assert page.browser.axe() == [], (scheme, key)

        for scheme in page.browser.schemes():
            page.browser.size(640, 500, 2)  # 1280 pixels at a zoom of 200 %
            check(scheme, "", "3", "2", "?", ESCAPE, "c", ESCAPE, "1", ENTER, "1", "2", "3", DOWN, "s", "u", ENTER)
            for _ in range(8):
                page.browser.press("u")
            page.wait("document.getElementById('problem').textContent.startsWith('What is')")
            page.browser.press("u", "u", "u")


def test_scores_are_seen_in_a_study_of_anchoring(browser, tmp_path):
    with Page(browser, make(tmp_path, names=("ana",), anchored_fraction=1.0)) as page:
        assert page.steps()[0].split() == "Step 1 Step 0 of chain 0. model: 0.87".split()
        page.browser.press("3")
        page.wait("document.querySelectorAll('#steps li').length === 2")
        assert "model: 0.87" in page.steps()[0] and "right" in page.steps()[0]
