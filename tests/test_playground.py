"""The playground in a real browser, with models and a policy whose answers are known."""

import concurrent.futures
import json
import time
import types

import numpy as np
import pytest
from browser import WIDE, axe_script, requests_of, served, violations

from jprm.apps.serve import ServeConfig
from jprm.apps.serve.app import make_app
from jprm.methods.policy.protocol import Sample
from jprm.score.scale import PROBABILITY

ENTER, ESCAPE, CONTROL, DOWN = "\ue007", "\ue00c", "\ue009", "\ue015"
NASTY = "<img src=x onerror=\"document.title='broken'\">"


class Knowing:
    """In an engine's place: a step that holds 29 scores low, and each model a little differently."""

    longest, waiting_tokens, rate = 256, 0, 0.0

    def __init__(self, name, low):
        self.name, self.low, self.seen = name, low, {}
        self.prm = types.SimpleNamespace(rule="min", semantics="rating", step=7, scale=PROBABILITY)

    def tokens_of(self, trees, alone=False):
        return sum(len(node.text.split()) for tree in trees for node in tree.nodes)

    def wait_seconds(self):
        return 0.0

    def score(self, trees, tokens):
        future = concurrent.futures.Future()
        scores = [[self.low if "29" in node.text else 0.95 for node in tree.nodes] for tree in trees]
        future.set_result([{"score": np.array(score, np.float32)} for score in scores])
        return future

    def score_cached(self, tree, tokens, caller):
        """With what the caller's last request had in common with this one."""
        words = [word for node in tree.nodes for word in node.text.split()]
        before, self.seen[caller] = self.seen.get(caller, []), words
        cached = next((i for i, pair in enumerate(zip(words, before, strict=False)) if pair[0] != pair[1]), 0)
        future = concurrent.futures.Future()
        future.set_result((self.score([tree], tokens).result()[0], cached))
        return future

    def close(self):
        pass


class Writes:
    """In a policy's place: the correct rest of the example."""

    name = "writer"

    def sample(self, prefixes, n, *, until, seed=0):
        rest = ("36 - 5 = 31 are whole.", "The answer is 31.")[: 1 if until == "step" else 2]
        return [[Sample(rest if k == 0 else ("36 - 5 = 29.", *rest[1:]), 5, "stop") for k in range(n)]]


@pytest.fixture(scope="module")
def server():
    app = make_app([Knowing("small", 0.12), Knowing("large", 0.04)], ServeConfig(longest=256), policy=Writes())
    with served(app, timeout_graceful_shutdown=5) as (_, port):
        yield f"http://127.0.0.1:{port}/"


@pytest.fixture
def page(browser, server):
    browser.open("about:blank")
    browser.size(1000, 800)
    requests_of(browser), browser.logs("browser")
    browser.open(server)
    browser.wait("return document.getElementById('model').options.length === 2", 20)
    yield browser
    browser.open("about:blank")


def steps(page):
    return page.run("return [...document.querySelectorAll('#steps li .text')].map(e => e.textContent)")


def says(page, id):
    return page.run("return document.getElementById(arguments[0]).innerText", id)


def example(page):
    page.run("document.querySelector('[data-act=example]').click()")
    page.wait("return document.querySelectorAll('#steps li').length === 3", 20)


def test_a_solution_is_split_scored_and_changed_by_keys(page, server):
    example(page)
    assert says(page, "verdict") == "Weakest is step 2: likely wrong, 0.12."
    assert says(page, "facts").startswith("chain 0.120 by min, 26 tokens; 3 steps, split by lines")
    page.press("w", "e")  # to the weakest step, and edit it
    page.wait("return !!document.querySelector('#steps textarea')")
    page.run("document.querySelector('#steps textarea').value = arguments[0]", f"36 - 5 = 31, with a tag {NASTY}")
    chord = [("keyDown", CONTROL), ("keyDown", ENTER), ("keyUp", ENTER), ("keyUp", CONTROL)]
    actions = [{"type": kind, "value": key} for kind, key in chord]
    page.call("POST", "/actions", {"actions": [{"type": "key", "id": "keys", "actions": actions}]})
    page.wait("return document.getElementById('verdict').innerText.startsWith('Weakest is step 3')", 20)
    assert NASTY in steps(page)[1] and page.run("return document.title") == "jprm playground"
    # The first step, of 9 words, is not computed again.
    assert ", 15 of 24 tokens computed; 3 steps" in says(page, "facts")
    change = "document.querySelector('#steps li:nth-child(2) .change')"
    assert page.run(f"return {change}.textContent") == "▲ 0.83"
    page.press("u")
    page.wait("return document.getElementById('verdict').innerText.startsWith('Weakest is step 2')", 20)
    page.press("k", "m")  # the step before, merged with the weakest
    page.wait("return document.querySelectorAll('#steps li').length === 2")
    page.press("s")
    page.wait("return document.querySelectorAll('#steps li').length === 3")
    assert "29" in steps(page)[1]
    page.press("c")
    record = json.loads(page.run("return document.getElementById('record-text').value"))
    assert record["steps"] == steps(page) and len(record["scores"]) == 3 and "response" not in record
    page.press(ESCAPE)
    assert page.logs("browser") == []
    assert all(url.startswith(server) or url == "data:," for url in requests_of(page))


def test_two_models_stand_side_by_side_and_the_policy_writes_on(page):
    example(page)
    page.run("const s = document.getElementById('other'); s.value = 'large'; s.dispatchEvent(new Event('change'))")
    page.wait("return document.querySelectorAll('#steps li:nth-child(2) .said').length === 2", 20)
    both = page.run("return [...document.querySelectorAll('#steps li:nth-child(2) .said b')].map(e => e.textContent)")
    assert both == ["0.12", "0.04"]
    page.press("w", "r")  # the rest from the weakest step on
    page.wait("return document.querySelectorAll('.options button').length === 4", 20)
    assert page.run("return document.querySelector('.options button').innerText").startswith("0.95")
    page.press(ENTER)  # the best of them has the focus
    page.wait("return document.querySelectorAll('#steps li .text').length === 3", 20)
    assert steps(page)[1:] == ["36 - 5 = 31 are whole.", "The answer is 31."]
    wide = page.run("return document.documentElement.scrollWidth - document.documentElement.clientWidth")
    page.size(360, 640)
    narrow = page.run("return document.documentElement.scrollWidth - document.documentElement.clientWidth")
    assert wide <= 0 and narrow <= 0


def test_a_record_is_read_and_an_error_is_said(page):
    record = {"problem": "Q?", "steps": ["a", "29", "c"], "id": "x"}
    page.run("document.getElementById('response').value = arguments[0]; document.getElementById('ask').requestSubmit()",
             json.dumps(record))  # fmt: skip
    page.wait("return document.querySelectorAll('#steps li').length === 3", 20)
    assert page.run("return document.getElementById('problem').value") == "Q?" and steps(page) == ["a", "29", "c"]
    page.run("document.getElementById('response').value = ' '; document.getElementById('ask').requestSubmit()")
    page.wait("return !document.getElementById('alert').hidden", 20)
    assert "response" in says(page, "alert")


@pytest.mark.slow
def test_axe_finds_no_violation(page):
    script = axe_script()
    for scheme in ("light", "dark"):
        page.cdp("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        page.size(640, 500, 2)  # 1280 pixels at a zoom of 200 %
        example(page)
        for keys in ("", "w", "e", ESCAPE, "a", "?", ESCAPE):
            page.press(*keys)
            time.sleep(0.3)
            page.run(script)
            assert violations(page) == [], (scheme, keys)
        page.run("document.getElementById('response').value = arguments[0];"
                 "document.getElementById('ask').requestSubmit()", f"Let $x = 2$.\nSo {WIDE}")  # fmt: skip
        page.wait("return document.querySelectorAll('#steps .math').length === 2", 20)
        page.run(script)
        assert violations(page) == [], (scheme, "formulas")
    page.cdp("Emulation.setEmulatedMedia", features=[])


def sixty_turns():
    """Returns a trajectory of 60 turns with calls, long and short answers, and thoughts; turn 30 scores low."""
    messages: list[dict] = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Count the rows."}]
    for i in range(59):
        call = {"id": f"c{i}", "type": "function", "function": {"name": "lookup", "arguments": {"row": i}}}
        text = "I look at 29." if i == 29 else ""
        messages.append({"role": "assistant", "content": text, "tool_calls": [call], "reasoning_content": "Next."})
        messages.append({"role": "tool", "tool_call_id": f"c{i}", "content": NASTY if i == 3 else "a row\n" * (i % 9)})
    return {"messages": [*messages, {"role": "assistant", "content": "There are 59."}]}


def test_a_trajectory_of_60_turns_is_shown_and_walked_by_keys(page, tmp_path):
    page.run("document.getElementById('response').value = arguments[0]", json.dumps(sixty_turns()))
    page.run("document.getElementById('ask').requestSubmit()")
    page.wait("return document.querySelectorAll('#steps > li.step').length === 60", 20)
    assert says(page, "verdict") == "Weakest is step 30: likely wrong, 0.12."
    row = "document.querySelectorAll('#steps > li.step')[{}]"
    assert page.run(f"return {row.format(0)}.querySelector('.before').innerText").startswith("system Be brief.")
    assert page.run(f"return {row.format(5)}.querySelector('.calls').innerText").startswith("calls lookup")
    assert NASTY in page.run(f"return {row.format(4)}.querySelector('.before').innerText")
    folded = f"{row.format(9)}.querySelector('.before details')"  # eight rows, shortened
    assert page.run(f"return !!{folded} && !{folded}.open")
    page.press("w")
    assert page.run(f"return document.activeElement === {row.format(29)}")
    page.press("j")
    assert page.run(f"return document.activeElement === {row.format(30)}")
    page.run(f"{folded}.querySelector('summary').focus()")
    page.press(ENTER)
    assert page.run(f"return {folded}.open")
    page.press("m")  # turns are not merged
    assert page.run("return document.querySelectorAll('#steps > li.step').length") == 60
    page.screenshot(tmp_path / "turns.png")
    wide = page.run("return document.documentElement.scrollWidth - document.documentElement.clientWidth")
    assert wide <= 0 and page.logs("browser") == []
