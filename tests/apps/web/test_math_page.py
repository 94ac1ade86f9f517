"""Mathematics in pages: formulas are drawn, money is money, and no text becomes more than text and formulas."""

import json
import re

from browser import requests_of
from starlette.applications import Starlette
from test_playground import page, server  # noqa: F401  (fixtures)

from jprm.apps.report.page import FORMULA, has_formulas
from jprm.apps.web.http import MATH, file_routes

DRAWN = {  # text: the formulas in it
    r"Let $x^2 = 4$, so \(x = \pm 2\).": ["$x^2 = 4$", r"\(x = \pm 2\)"],
    "So\n\\[ \\frac{a}{b} \\]\nand $$y$$": ["\n\\[ \\frac{a}{b} \\]\n", " $$y$$"],
    r"\begin{pmatrix} 1 & 2 \end{pmatrix}": [r"\begin{pmatrix} 1 & 2 \end{pmatrix}"],
    r"a price of \$3 and $n\$ = 3$ dollars": [r"$n\$ = 3$"],
    r"$\sqrt{\textcolor{red}{\cancel{x}}} \overbrace{a+b}^{c} \rule{1em}{1em}$": [...],
    r"$\begin{array}{c|c} a & b \\ \hline c & d \end{array}$": [...],
}
MONEY = ["She has $5 and $10.", "$12-$5=$7", "It costs $ 5 $ more.", r"\$x\$", "$$", "$5.00", "a $\n b$"]
HOSTILE = [
    r"$\href{javascript:alert(1)}{x}$",
    r"$\url{https://evil.example}$",
    r"$\includegraphics[height=9em]{https://evil.example/x.png}$",
    r"$\htmlId{steps}{x} \htmlClass{math}{x} \htmlStyle{position:fixed}{x} \htmlData{a=b}{x}$",
    r"$\def\a{\a\a}\a$",
    r"$\rule{9999em}{9999em} \kern-9999em \raisebox{9999em}{x}$",
    "$<img src=x onerror=\"document.title='broken'\">$",
    r"$\text{<script>document.title='broken'</script>}$",
    "$" + "{" * 1900 + "}" * 50 + "$",
    "$" + r"\sqrt" * 350 + "x$",
    "$x$" * 3000,
    r"\(" * 9000,
    "$" * 19000,
    r"\begin{array}" * 1000,
    "$x$ " + "y" * 30000,
]


def show(page, *texts):  # noqa: F811
    """The page's own steps, each text one of them."""
    record = json.dumps({"problem": texts[0], "steps": list(texts)})
    page.run("document.getElementById('response').value = arguments[0]; document.getElementById('ask').requestSubmit()",
             record)  # fmt: skip
    page.wait(f"return document.querySelectorAll('#steps > li > .text').length === {len(texts)}")


TEXTS = "[...document.querySelectorAll('#steps > li > .text')]"
FORMULAS = f"return {TEXTS}.map(e => [...e.querySelectorAll('.math')].map(m => %s))"


def test_formulas_are_drawn_and_money_is_not(page):  # noqa: F811
    show(page, *DRAWN, *MONEY)
    page.run("return document.fonts.ready.then(() => 1)")
    sources = page.run(FORMULAS % "m.dataset.source")
    for formulas, (text, expected) in zip(sources, DRAWN.items(), strict=False):
        assert formulas == [text if part is ... else part for part in expected]
    assert sources[len(DRAWN) :] == [[] for _ in MONEY]
    assert page.run("return document.querySelectorAll('#steps .katex math').length") == sum(map(len, DRAWN.values()))
    assert [bool(FORMULA.search(text)) for text in (*DRAWN, *MONEY[:4], *MONEY[5:])] == [True] * 6 + [False] * 6
    assert has_formulas({"problems": ["p"], "items": [{"t": ["a"], "j": [[[0, "read", 3, "so $x$"]]]}]})
    assert page.run("return document.getElementById('shown-problem').querySelectorAll('.math').length") == 2
    assert page.logs("browser") == []  # the policy let every style and font through


def test_a_copy_has_the_source(page):  # noqa: F811
    show(page, r"Let $x^2 = 4$.", r"So \[x = 2\]")
    copied = page.run("""
        const some = [...document.querySelectorAll('#steps > li > .text')];
        const range = document.createRange();  // from inside the first formula to the end
        range.setStart(some[0].querySelector('.math .katex-html').firstChild, 0);
        range.setEndAfter(some[1].lastChild);
        getSelection().removeAllRanges(); getSelection().addRange(range);
        const data = new DataTransfer();
        document.dispatchEvent(new ClipboardEvent('copy', { clipboardData: data, bubbles: true, cancelable: true }));
        return data.getData('text/plain');""")
    assert copied.startswith("$x^2 = 4$.\n") and copied.rstrip().endswith(r"So \[x = 2\]")


def test_hostile_formulas_are_text_or_harmless(page, server):  # noqa: F811
    before = page.run("return document.querySelectorAll('script, img, iframe, a').length")
    show(page, *HOSTILE)
    assert page.run("return document.title") == "jprm playground"
    assert page.run("return document.querySelectorAll('script, img, iframe, a').length") == before
    assert page.run("return document.querySelectorAll('#steps').length") == 1
    assert page.run("return [...document.querySelectorAll('#steps .math *')].every(e => !e.id && !e.dataset.a)")
    counts, plain = page.run(FORMULAS % "1"), (4, 8, 9, 11, 12, 13, 14)
    assert len(counts[10]) == 200 and all(counts[i] == [] for i in plain)
    texts = page.run(f"return {TEXTS}.map(e => e.textContent)")
    assert [texts[i] for i in plain] == [HOSTILE[i] for i in plain]
    assert all(url.startswith(server) or url == "data:," for url in requests_of(page))
    assert page.logs("browser") == []


def test_the_vendored_files_name_nothing_elsewhere():
    assert sum(route.path.endswith(".woff2") for route in file_routes(MATH)) == 20
    Starlette(routes=file_routes(MATH))
    from jprm.apps.web import text_of_file

    style = text_of_file("jprm.apps.web:katex/katex.min.css")
    used = set(re.findall(r"url\(([^)]*)\)", style))
    assert {f"/katex/{name}" for name in used} == {path for path in MATH if path.endswith(".woff2")}
    assert "MIT" in text_of_file("jprm.apps.web:katex/LICENSE.txt")
