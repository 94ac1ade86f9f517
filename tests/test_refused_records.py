"""Records and logs of another form: each is one error that names the file, the line and the field, and how to mend it.

`refused_records.json` holds good contents by what they are, and changes of each: {PLACE: new value}, the field that is
named, and of a file that is read whole its line. A log is one of `agent_logs.json` or `turn_logs.json`.
"""

import copy
import json
import pathlib
import re
from typing import Any

import pytest

from jprm.methods.data.readers import find
from jprm.tree import RecordError, tree_of

HERE = pathlib.Path(__file__).parent
REFUSED = json.loads((HERE / "refused_records.json").read_text(encoding="utf-8"))
LOGS = {
    name: log
    for file in ("agent_logs.json", "turn_logs.json")
    for name, log in json.loads((HERE / file).read_text(encoding="utf-8")).items()
}


def good(kind: str) -> Any:
    return REFUSED[kind]["good"] if "good" in REFUSED[kind] else LOGS[REFUSED[kind]["log"]]


def changed(content: Any, changes: dict[str, Any]) -> Any:
    """Returns the content with other values at places, such as messages[1].role; (absent) takes one away."""
    whole = {"": copy.deepcopy(content)}
    for place, value in changes.items():
        *above, last = ["", *(int(i) if i else key for i, key in re.findall(r"\[(\d+)\]|([^.\[\]]+)", place))]
        inner: Any = whole
        for key in above:
            inner = inner[key]
        if value == "(absent)":
            del inner[last]
        else:
            inner[last] = value
    return whole[""]


def read(path: pathlib.Path, kind: str, *contents: Any) -> list[dict]:
    """Reads contents as the lines of a file, or one that is a file of its own."""
    about = REFUSED[kind]
    if not about["read"]:
        return [tree_of(content, f"{path}:{line}") for line, content in enumerate(contents, start=1)]
    reader = find(about["read"])
    if reader.whole:
        (contents,) = contents if isinstance(contents[0], list) else [contents]
    path.write_text("\n".join(json.dumps(content, ensure_ascii=False) for content in contents), encoding="utf-8")
    return [record for _, record in reader.read(path, **about.get("options", {}))]


@pytest.mark.parametrize("kind", REFUSED)
def test_what_is_changed_is_read_as_it_was(tmp_path, kind):
    assert read(tmp_path / "f.jsonl", kind, good(kind))


@pytest.mark.parametrize(
    ("kind", "changes", "field", "line"),
    [(kind, case[0], case[1], (case[2:] or [None])[0]) for kind, about in REFUSED.items() for case in about["bad"]],
)
def test_another_form_is_refused_by_line_and_field(tmp_path, kind, changes, field, line):
    path, bad = tmp_path / "f.jsonl", changed(good(kind), changes)
    with pytest.raises(RecordError) as error:
        read(path, kind, *([bad] if line else [good(kind), bad]))
    assert (error.value.where, error.value.field) == (f"{path}:{line or 2}", field)
    assert error.value.remedy and len(str(error.value).splitlines()) == 1
