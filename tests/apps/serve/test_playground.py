"""The playground in a real browser, with models and a policy whose answers are known."""

import concurrent.futures
import json
import time
import types

import numpy as np
import pytest
from browser import CONTROL, ENTER, ESCAPE, WIDE, requests_of, served
from families import breadth

from jprm.apps.serve import ServeConfig
from jprm.apps.serve.app import make_app
from jprm.methods.policy.protocol import Sample
from jprm.score.scale import PROBABILITY

NASTY = "<img src=x onerror=\"document.title='broken'\">"


class Knowing:
    """In an engine's place: a step that holds 29 scores low, and each model a little differently."""

    longest, waiting_tokens, rate = 4096, 0, 0.0

    def __init__(self, name, low):
        self.name, self.low, self.seen = name, low, {}
        self.prm = types.SimpleNamespace(rule="min", semantics="rating", step=7, scale=PROBABILITY)

    def tokens_of(self, trees, alone=False):
        return sum(len(node.text.split()) for tree in trees for node in tree.nodes)

    def critiques_of(self, trees):
        return 0

    def wait_seconds(self, tokens=0):
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
    app = make_app([Knowing("small", 0.12), Knowing("large", 0.04)], ServeConfig(longest=4096), policy=Writes())
    with served(app, timeout_graceful_shutdown=5) as (_, port):
        yield f"http://127.0.0.1:{port}/"


@pytest.fixture
def page(browser, server):
    browser.open("about:blank")
    browser.size(1000, 800)
    browser.open(server)
    browser.run("localStorage.clear()")  # what an earlier test's visit has left
    browser.open("about:blank")
    requests_of(browser), browser.logs("browser")
    browser.open(server)
    browser.wait("return document.getElementById('model').options.length === 2")
    yield browser
    browser.open("about:blank")


def steps(page):
    return page.run("return [...document.querySelectorAll('#steps li .text')].map(e => e.textContent)")


def says(page, id):
    return page.run("return document.getElementById(arguments[0]).innerText", id)


def example(page):
    page.run("document.querySelector('[data-act=example]').click()")
    page.wait("return document.querySelectorAll('#steps li').length === 3")


def test_a_problem_that_is_missing_is_asked_for(page, server):
    """In place, before the server is asked; and where every step is likely right, none is called the weakest."""
    page.run(
        "document.getElementById('response').value = 'So it is 4.'; document.getElementById('ask').requestSubmit()"
    )
    assert says(page, "alert") == "Enter a problem." and page.run("return document.activeElement.id") == "problem"
    page.run(
        "document.getElementById('problem').value = 'What is 2 + 2?'; document.getElementById('ask').requestSubmit()"
    )
    page.wait("return document.querySelectorAll('#steps li').length === 1")
    assert says(page, "verdict").startswith("Its step is likely right; lowest is step 1, 0.9")
    assert page.run("return document.querySelectorAll('#steps .weakest').length") == 0 and not says(page, "alert")


def test_a_solution_is_split_scored_and_changed_by_keys(page, server):
    example(page)
    assert says(page, "verdict") == "Weakest is step 2: likely wrong, 0.12."
    assert says(page, "facts").startswith("chain 0.120 by min, 26 tokens; 3 steps, split by lines")
    page.press("w", "e")  # to the weakest step, and edit it
    page.wait("return !!document.querySelector('#steps textarea')")
    page.run("document.querySelector('#steps textarea').value = arguments[0]", f"36 - 5 = 31, with a tag {NASTY}")
    page.chord(CONTROL, ENTER)
    page.wait("return document.getElementById('verdict').innerText.startsWith('Weakest is step 3')")
    assert NASTY in steps(page)[1] and page.run("return document.title") == "jprm playground"
    # The first step, of 9 words, is not computed again.
    assert ", 15 of 24 tokens computed; 3 steps" in says(page, "facts")
    change = "document.querySelector('#steps li:nth-child(2) .change')"
    assert page.run(f"return {change}.textContent") == "▲ 0.83"
    page.press("u")
    page.wait("return document.getElementById('verdict').innerText.startsWith('Weakest is step 2')")
    page.press("k", "m")  # the step before, merged with the weakest
    page.wait("return document.querySelectorAll('#steps li').length === 2")
    page.press("s")
    page.wait("return document.querySelectorAll('#steps li').length === 3")
    assert "29" in steps(page)[1]
    page.wait("return !document.getElementById('steps').classList.contains('old')")
    page.press("c")
    record = json.loads(page.run("return document.getElementById('record-text').value"))
    assert record["steps"] == steps(page) and len(record["scores"]) == 3 and "response" not in record
    page.press(ESCAPE)
    now = "document.querySelector('[data-act=merge]').click(); document.querySelector('[data-act=record]').click();"
    record = json.loads(page.run(f"{now} return document.getElementById('record-text').value"))
    assert len(record["steps"]) == 2 and "scores" not in record  # those of the three steps are not theirs
    page.press(ESCAPE)
    assert page.logs("browser") == []
    assert all(url.startswith(server) or url == "data:," for url in requests_of(page))


def test_two_models_stand_side_by_side_and_the_policy_writes_on(page):
    example(page)
    page.run("const s = document.getElementById('other'); s.value = 'large'; s.dispatchEvent(new Event('change'))")
    page.wait("return document.querySelectorAll('#steps li:nth-child(2) .said').length === 2")
    both = page.run("return [...document.querySelectorAll('#steps li:nth-child(2) .said b')].map(e => e.textContent)")
    assert both == ["0.12", "0.04"]
    page.press("w", "r")  # the rest from the weakest step on
    page.wait("return document.querySelectorAll('.options button').length === 4")
    assert page.run("return document.querySelector('.options button').innerText").startswith("0.95")
    page.press(ENTER)  # the best of them has the focus
    page.wait("return document.querySelectorAll('#steps li .text').length === 3")
    assert steps(page)[1:] == ["36 - 5 = 31 are whole.", "The answer is 31."]
    assert page.overflow() <= 0
    page.size(360, 640)
    assert page.overflow() <= 0


def test_a_record_is_read_and_an_error_is_said(page):
    record = {"problem": "Q?", "steps": ["a", "29", "c"], "id": "x"}
    page.run("document.getElementById('response').value = arguments[0]; document.getElementById('ask').requestSubmit()",
             json.dumps(record))  # fmt: skip
    page.wait("return document.querySelectorAll('#steps li').length === 3")
    assert page.run("return document.getElementById('problem').value") == "Q?" and steps(page) == ["a", "29", "c"]
    page.run("document.getElementById('response').value = ' '; document.getElementById('ask').requestSubmit()")
    page.wait("return !document.getElementById('alert').hidden")
    assert "response" in says(page, "alert")


def ask(page, response, problem=""):
    script = """document.getElementById('problem').value = arguments[0];
    document.getElementById('response').value = arguments[1]; document.getElementById('ask').requestSubmit()"""
    page.run(script, problem, response if isinstance(response, str) else json.dumps(response))


POOL = {
    "problem": "Q?",
    "samples": [{"steps": ["a", "29"], "answer": 29}, {"steps": ["b", "c"], "answer": 4}, {"steps": ["29"]}],
}


def test_a_pool_is_read_and_its_chains_are_walked(page):
    ask(page, POOL)
    page.wait("return document.querySelectorAll('#chain option').length === 3")
    assert says(page, "verdict").startswith("Chain 2 of 3 is the best. All 2 steps are likely right; lowest is step 1")
    assert steps(page) == ["b", "c"] and page.run("return document.getElementById('problem').value") == "Q?"
    options = page.run("return [...document.getElementById('chain').options].map(e => e.textContent)")
    assert options == ["1: 0.120, answer 29", "2: 0.950, best, answer 4", "3: 0.120"]
    page.run("document.querySelector('#steps li').focus()")
    page.press("[")
    assert steps(page) == ["a", "29"] and "the best is 2" in says(page, "verdict")
    page.press("w")
    assert page.run("return document.activeElement.querySelector('.text').textContent") == "29"
    page.press("c")
    record = json.loads(page.run("return document.getElementById('record-text').value"))
    assert [sample["scores"] for sample in record["samples"]] == [[0.95, 0.12], [0.95, 0.95], [0.12]]
    page.press(ESCAPE)
    page.press("x")  # the chain goes on by itself
    page.wait("return document.getElementById('chain-choice').hidden && !document.querySelector('#steps.old')")
    assert steps(page) == ["a"]
    page.press("u")  # and the pool is there again
    page.wait("return !document.getElementById('chain-choice').hidden")
    assert steps(page) == ["a", "29"]


@pytest.mark.breadth
def test_a_tree_and_several_records_are_read(page):
    nodes = [
        {"parent": -1, "text": "a"},
        {"parent": 0, "text": "29"},
        {"parent": 0, "text": "b"},
        {"parent": 2, "text": "c"},
    ]
    ask(page, json.dumps({"problem": "T?", "nodes": nodes}) + "\n" + json.dumps(POOL))
    page.wait("return document.querySelectorAll('#chain option').length === 2")
    assert steps(page) == ["a", "b", "c"] and says(page, "note").startswith("2 records")
    page.run("document.querySelector('#steps li').focus()")
    page.press("[")
    assert steps(page) == ["a", "29"]
    ask(page, '{"problem": "T?", steps: []}')  # a slip of the pen is told
    page.wait("return document.getElementById('note').innerText.includes('not JSON')")


MARKDOWN = (
    "| a | b |\n|---|:-:|\n| 1 | `x<y` |\n\n```python\nif a < b:\n    pass\n```\n\n"
    f"### So **it** is 3*4*5 and 2**3**2, {NASTY} [x](javascript:alert(1)) ![y](https://example.org/y.png)\n\n"
    "- 3 &lt; 5\n> 4"
)


def test_code_and_tables_are_drawn_and_no_text_becomes_markup(page, server):
    ask(page, {"problem": f"**P** {NASTY}", "steps": [MARKDOWN, "    return 29", "שלום 29"]})
    page.wait("return document.querySelectorAll('#steps li').length === 3")
    seen = page.run(
        "return ['table', 'pre', 'code', 'strong', 'p.head'].map(s => document.querySelectorAll('#steps ' + s).length)"
    )
    assert seen == [1, 2, 3, 1, 1]
    assert page.run("return document.querySelector('#steps pre').textContent") == "if a < b:\n    pass"
    assert page.run("return document.querySelectorAll('#steps pre')[1].textContent") == "    return 29"
    text = steps(page)[0]
    kept = (
        "3*4*5 and 2**3**2",
        NASTY,
        "[x](javascript:alert(1))",
        "![y](https://example.org/y.png)",
        "- 3 &lt; 5\n> 4",
    )
    assert all(part in text for part in kept)
    assert page.run("return document.querySelectorAll('main img, main script, main a, main iframe').length") == 0
    assert page.run("return document.title") == "jprm playground" and page.logs("browser") == []
    assert all(url.startswith(server) or url == "data:," for url in requests_of(page))
    assert page.run("return getComputedStyle(document.querySelectorAll('#steps .text')[2]).direction") == "rtl"
    page.press("w", "c")
    assert json.loads(page.run("return document.getElementById('record-text').value"))["steps"][0] == MARKDOWN
    page.press(ESCAPE)


def test_a_visit_goes_on_where_the_last_one_ended_and_old_scores_are_marked(page, server):
    example(page)
    old = "return !document.getElementById('old').hidden && document.getElementById('steps').classList.contains('old')"
    assert not page.run(old)
    page.run("const p = document.getElementById('problem'); p.value += ' Why?'; p.dispatchEvent(new Event('input'))")
    assert page.run(old) and "before you changed it" in says(page, "old")
    page.open(server)
    page.wait("return document.querySelectorAll('#steps li').length === 3")
    assert page.run("return document.getElementById('problem').value").endswith("Why?")
    assert page.run(old) and "last visit" in says(page, "old") and requests_of(page).count(server + "v1/score") == 1
    page.run("document.querySelector('[data-act=again]').click()")
    page.wait("return document.getElementById('old').hidden")
    page.run("document.querySelector('[data-act=clear]').click()")
    page.open(server)
    page.wait("return document.getElementById('model').options.length === 2")
    assert page.run("return document.getElementById('result').hidden && !document.getElementById('problem').value")


def test_the_page_waits_for_models_that_load(browser, server):
    """An application that has nothing to serve yet, and gets it while the page is open."""
    from jprm.apps.serve.app import _application, begin
    from jprm.apps.serve.openrlhf import View

    app = _application(ServeConfig(longest=256), None, True)
    with served(app, timeout_graceful_shutdown=5) as (_, port):
        browser.open(f"http://127.0.0.1:{port}/")
        browser.wait("return document.getElementById('alert').innerText.includes('loading')")
        begin(app, [Knowing("small", 0.12)], View(), None, {}, None)
        browser.wait("return document.getElementById('model').options.length === 1")
        browser.wait("return document.getElementById('alert').hidden")
        browser.open("about:blank")


@pytest.mark.slow
def test_axe_finds_no_violation(page):
    for scheme in page.schemes():
        page.size(640, 500, 2)  # 1280 pixels at a zoom of 200 %
        example(page)
        for keys in ("", "w", "e", ESCAPE, "a", "?", ESCAPE):
            page.press(*keys)
            time.sleep(0.3)
            assert page.axe() == [], (scheme, keys)
        page.run("document.getElementById('response').value = arguments[0];"
                 "document.getElementById('ask').requestSubmit()", f"Let $x = 2$.\nSo {WIDE}")  # fmt: skip
        page.wait("return document.querySelectorAll('#steps .math').length === 2")
        assert page.axe() == [], (scheme, "formulas")
        page.run("const s = document.getElementById('other'); s.value = 'large'; s.dispatchEvent(new Event('change'))")
        for record in ({"problem": "M", "steps": [MARKDOWN]}, POOL):
            page.size(390, 844)
            ask(page, record)
            time.sleep(0.5)
            page.press("e")
            assert page.axe() == [], (scheme, record)
            page.press(ESCAPE)
        home = page.run("return location.href")
        page.open(home + "docs")
        assert page.axe() == [], (scheme, "routes")
        page.open(home)
        page.wait("return document.getElementById('model').options.length === 2")
        page.run("const s = document.getElementById('other'); s.value = ''; s.dispatchEvent(new Event('change'))")


def sixty_turns():
    """Returns a trajectory of 60 turns with calls, long and short answers, and thoughts; turn 30 scores low."""
    messages: list[dict] = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Count the rows."}]
    for i in range(59):
        call = {"id": f"c{i}", "type": "function", "function": {"name": "lookup", "arguments": {"row": i}}}
        text = "I look at 29." if i == 29 else ""
        messages.append({"role": "assistant", "content": text, "tool_calls": [call], "reasoning_content": "Next."})
        messages.append({"role": "tool", "tool_call_id": f"c{i}", "content": NASTY if i == 3 else "a row\n" * (i % 9)})
    return {"messages": [*messages, {"role": "assistant", "content": "There are 59."}]}


def test_a_trajectory_of_60_turns_is_shown_and_walked_by_keys(page):
    page.run("document.getElementById('response').value = arguments[0]", json.dumps(sixty_turns()))
    page.run("document.getElementById('ask').requestSubmit()")
    page.wait("return document.querySelectorAll('#steps > li.step').length === 60")
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
    assert page.overflow() <= 0 and page.logs("browser") == []


def box(page):
    return page.run("return document.getElementById('response').value")


def settled(page, condition="true"):
    page.wait("return !document.getElementById('steps').classList.contains('old') && " + condition)


def focus_box_and_score(page):
    """Until the answer is there: it takes the focus out of the box, and until then keys are typed into it."""
    page.run("document.getElementById('response').focus()")
    page.chord(CONTROL, ENTER)
    page.wait("return document.activeElement.classList.contains('step')")


def test_an_edited_step_is_in_the_box_and_scoring_again_keeps_it(page):
    example(page)
    page.press("w", "e")
    page.wait("return !!document.querySelector('#steps textarea')")
    page.run("document.querySelector('#steps textarea').value = '36 - 5 = 31 are whole.'")
    page.chord(CONTROL, ENTER)
    settled(page, "document.getElementById('response').value.includes('31')")
    lines = box(page).split("\n")
    assert len(lines) == 3 and lines[1].strip() == "36 - 5 = 31 are whole."
    focus_box_and_score(page)
    settled(page)
    assert "31" in steps(page)[1] and len(steps(page)) == 3


@pytest.mark.parametrize(("key", "count"), [("m", 2), *breadth([("x", 2), ("s", 4)])])
def test_merged_split_and_removed_steps_are_scored_as_they_are_shown(page, key, count):
    example(page)
    page.press("w", key)
    page.wait(f"return document.querySelectorAll('#steps li').length === {count}")
    settled(page)
    shown = steps(page)
    focus_box_and_score(page)
    settled(page)
    assert steps(page) == shown
    page.press("u", "u")  # of the second score, and of the change
    page.wait("return document.querySelectorAll('#steps li').length === 3")
    assert box(page).startswith("Three boxes hold 3 * 12 = 36 eggs.\nShe breaks")


@pytest.mark.breadth
def test_an_open_edit_is_not_dropped_by_scoring_the_box(page):
    example(page)
    page.press("w", "e")
    page.wait("return !!document.querySelector('#steps textarea')")
    page.run("document.querySelector('#steps textarea').value = '36 - 5 = 31 are whole.'")
    focus_box_and_score(page)
    settled(page)
    assert "31" in steps(page)[1] and "31" in box(page)


@pytest.mark.breadth
def test_text_that_was_typed_in_the_box_is_not_replaced_by_an_edit(page):
    example(page)
    page.run("const r = document.getElementById('response'); r.value = 'Mine.'; r.dispatchEvent(new Event('input'))")
    page.run("document.querySelector('[data-act=remove]').click()")
    page.wait("return document.querySelectorAll('#steps li').length === 2")
    assert box(page) == "Mine." and "does not show this edit" in says(page, "note")


@pytest.mark.breadth
def test_a_record_in_the_box_stays_a_record(page):
    ask(page, {"problem": "Q?", "steps": ["a", "29", "c"], "id": "x"})
    page.wait("return document.querySelectorAll('#steps li').length === 3")
    page.run("document.querySelector('#steps li:nth-child(2)').focus()")
    page.press("x")
    page.wait("return document.querySelectorAll('#steps li').length === 2")
    settled(page)
    record = json.loads(box(page))
    assert record["steps"] == ["a", "c"] and record["id"] == "x"


def test_the_keyboard_goes_from_the_box_to_the_weakest_step(page):
    example(page)
    focus_box_and_score(page)
    settled(page)
    assert "29" in page.run("return document.activeElement.querySelector('.text').textContent")
    text = box(page)
    page.run("document.getElementById('response').focus()")
    page.press(ESCAPE)
    assert page.run("return document.activeElement.classList.contains('step')")
    page.press("w")
    assert box(page) == text
    assert "leave a text" in page.run("return document.getElementById('help').textContent")
