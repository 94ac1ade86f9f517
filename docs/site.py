"""Hooks of mkdocs: the site shows README as its first page, files outside docs/ that pages link to, and doctests.

Pages link to files of the repository as a git host needs it (`../experiments/tiny.py`). Each such file becomes a page
of the site: Markdown as it is, code as a block. A link to a file that does not exist stays, and mkdocs refuses it.
"""

import os
import re
from pathlib import Path

from markdown import Extension
from markdown.preprocessors import Preprocessor
from mkdocs.plugins import event_priority
from mkdocs.structure.files import File, InclusionLevel

ROOT = Path(__file__).resolve().parent.parent
LINK = re.compile(r"(\]\(|src=\")((?!https?:|mailto:|#)[^)\s\"#]+)(#[^)\s\"]*)?")
FIRST = {"index.md", "tutorial.md", "guide.md", "data.md", "models.md", "troubleshooting.md"}
"""Pages that the search puts first; the reference, code and studies come last."""
LANGUAGES = {".py": "python", ".sh": "sh", ".json": "json", ".jsonl": "json"}


def _site_path(file: Path) -> str:
    """Returns where a file of the repository is on the site, relative to docs/."""
    name = file.relative_to(ROOT).as_posix()
    if name == "README.md":
        return "index.md"
    if name.startswith("docs/"):
        return name.removeprefix("docs/")
    return f"source/{name}" if file.suffix == ".md" else f"source/{name}.md"


def _linked(text: str, folder: Path) -> list[Path]:
    """Returns the files of the repository to which a page in `folder` links."""
    files = [Path(os.path.normpath(folder / link)) for _, link, _ in LINK.findall(text)]
    return [file for file in files if file.is_file() and file.is_relative_to(ROOT)]


def _as_page(file: Path) -> str:
    """Returns a file as Markdown whose links lead within the site."""
    text = file.read_text(encoding="utf-8")
    if file.suffix != ".md":
        return f"# {file.relative_to(ROOT).as_posix()}\n\n~~~~~~{LANGUAGES.get(file.suffix, '')}\n{text}\n~~~~~~\n"
    return _relinked(text, file)


def _relinked(text: str, file: Path) -> str:
    here = os.path.dirname(_site_path(file))

    def site_link(match: re.Match) -> str:
        target = Path(os.path.normpath(file.parent / match[2]))
        if not target.is_file() or not target.is_relative_to(ROOT):
            return match[0]
        return match[1] + os.path.relpath(_site_path(target), here or ".") + (match[3] or "")

    return LINK.sub(site_link, text)


def on_files(files, config):
    """Adds README and every file outside docs/ that a page reaches by links."""
    waiting = [ROOT / "README.md", *(Path(file.abs_src_path) for file in files.documentation_pages())]
    seen = set(waiting)
    while waiting:
        file = waiting.pop()
        outside = not file.is_relative_to(ROOT / "docs")
        if outside:
            page = File.generated(config, _site_path(file), content=_as_page(file), inclusion=InclusionLevel.INCLUDED)
            if file.name != "README.md" or file.parent != ROOT:
                page.inclusion = InclusionLevel.NOT_IN_NAV
            files.append(page)
        if file.suffix == ".md":
            new = set(_linked(file.read_text(encoding="utf-8"), file.parent)) - seen
            waiting += [each for each in new if not each.is_relative_to(ROOT / "docs")]
            seen |= new
    return files


def on_page_markdown(markdown, page, config, files):
    """Leads the links of pages in docs/ to the site's pages of files outside it; the search has first pages first."""
    place = page.file.src_uri
    if place in FIRST or place.startswith(("reference/", "source/")):
        page.meta.setdefault("search", {"boost": 4 if place in FIRST else 0.5})
    if page.file.generated_by:
        return markdown
    return _relinked(markdown, Path(page.file.abs_src_path))


class Doctests(Preprocessor, Extension):
    """Fences the doctests of docstrings, which Markdown takes for quotations of quotations."""

    def __init__(self):
        Extension.__init__(self)

    def extendMarkdown(self, md):
        md.preprocessors.register(self, "doctests", 40)  # before fences are read, which are at 25

    def run(self, lines):
        found, inside = [], False
        for line in [*lines, ""]:
            if not inside and line.startswith(">>> "):
                found.append("```pycon")
                inside = True
            elif inside and not line.strip():
                found.append("```")
                inside = False
            found.append(line)
        return found[:-1]


@event_priority(100)  # before mkdocstrings takes the list
def on_config(config):
    config.markdown_extensions.append(Doctests())
