"""The documentation: README is short, links and commands exist."""

import ast
import re
from pathlib import Path

import pytest

from jprm.apps import cli

REPOSITORY = Path(__file__).resolve().parent.parent
PAGES = [
    page
    for pattern in ("*.md", "docs/**/*.md", "tpu/*.md", "experiments/**/*.md", "examples/**/*.md", "tests/*/*.md")
    for page in sorted(REPOSITORY.glob(pattern))
]


def _text(page):
    return page.read_text(encoding="utf-8")


def _anchors(page):
    """The anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", _text(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(REPOSITORY)))
def test_links_lead_somewhere(page):
    links = re.findall(r"\]\(([^)\s]+)\)", _text(page)) + re.findall(r'src="([^"]+)"', _text(page))
    for link in links:
        if not link.startswith("https://"):
            path, _, anchor = link.partition("#")
            target = (page.parent / path).resolve() if path else page
            assert target.exists(), link
            assert not anchor or anchor in _anchors(target), link


def _commands(page):
    """The `jprm` command lines in a page's indented and fenced blocks, continuation lines joined."""
    lines = _text(page).replace("\\\n", " ").splitlines()
    return [line.strip().split("  #")[0] for line in lines if re.match(r"\s+jprm \w", line)]


SHOWN = [page for page in PAGES if _commands(page) and page.name != "extending.md"]  # test_extending.py runs that one


@pytest.mark.parametrize("page", SHOWN, ids=lambda page: page.name)
def test_commands_exist(page, capsys):
    """Every command that a page shows is one, with the options that it shows; the files that it runs are there."""
    for line in _commands(page):
        words = line.split()[1:]
        names = words[: 2 if words[0] in ("annotate", "eval", "fuse", "label", "search") else 1]
        with pytest.raises(SystemExit) as stop:
            cli.main([*names, "--help"])
        text = capsys.readouterr().out
        assert stop.value.code == 0, line
        for option in (word for word in words if word.startswith("--")):
            assert option in text, f"{line}: {option}"
        for file in re.findall(r"(?:experiments|examples)/[\w/]+\.\w+", line):  # `mine.py` is the user's own
            assert (REPOSITORY / file).exists() or file == "experiments/mine.py", line


def test_bodies_that_curl_sends_say_that_they_are_json():
    """Else curl says that they are a form's, and the server refuses them."""
    texts = [_text(file) for file in (*PAGES, REPOSITORY / "jprm/apps/cli/__init__.py")]
    commands = [line for text in texts for line in re.findall(r"curl .*(?:\\\n.*)*", text)]
    sent = [line for line in commands if re.search(r" (-d|--data\S*) ", line)]
    assert len(commands) >= 3 and not [line for line in sent if "application/json" not in line]


def test_make_targets_exist():
    makefile = _text(REPOSITORY / "Makefile")
    targets = set(re.findall(r"^([\w.-]+):", makefile, re.MULTILINE))
    targets |= set(re.findall(r"^STORMS := (.*)", makefile, re.MULTILINE)[0].split())
    for page in PAGES:
        for target in re.findall(r"(?:`|^    )make ([a-z][\w-]*)", _text(page), re.MULTILINE):
            assert target in targets, f"{page.name}: make {target}"


def _messages():
    """Every string in jprm, with `…` where it has a value."""
    for file in (REPOSITORY / "jprm").rglob("*.py"):
        for node in ast.walk(ast.parse(_text(file))):
            if isinstance(node, ast.JoinedStr):
                yield "".join(part.value if isinstance(part, ast.Constant) else "…" for part in node.values)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield node.value


def test_troubleshooting_explains_messages_that_exist():
    """Each heading in code is a message, whose fixed parts are in strings of the code."""
    headings = re.findall(r"^#### `(.+)`$", _text(REPOSITORY / "docs/troubleshooting.md"), re.MULTILINE)
    known = list(_messages())
    assert len(headings) >= 20
    for heading in headings:
        for part in filter(None, (part.strip(" .;()") for part in heading.split("…"))):
            assert any(part in text for text in known), (heading, part)
