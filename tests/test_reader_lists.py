"""JSON lists as sources, with edge cases."""

import pytest

from jprm.io.jsonl import Rejects
from jprm.methods.data.readers import READERS
from jprm.tree import RecordError

LIST = '[{"problem": "p", "steps": ["a"]},\n{"problem": "q", "steps": ["b"]}\n]'


def test_a_list_may_begin_with_a_byte_order_mark(tmp_path):
    (tmp_path / "f.json").write_text(LIST, encoding="utf-8-sig")
    assert [record["problem"] for _, record in READERS["jsonl"].read(tmp_path / "f.json")] == ["p", "q"]


@pytest.mark.parametrize("more", [LIST, "[]", "x", '{"problem": "r", "steps": ["c"]}'])
def test_what_follows_a_list_is_not_lost_in_silence(tmp_path, more):
    (tmp_path / "f.json").write_text(LIST + "\n" + more)
    with pytest.raises(RecordError, match="f.json:3: line"):
        list(READERS["jsonl"].read(tmp_path / "f.json"))
    with Rejects(tmp_path / "rejects") as rejects:
        found = list(READERS["jsonl"].read(tmp_path / "f.json", on_error="skip", rejects=rejects))
    assert len(found) == 2 and (tmp_path / "rejects").read_text() == f"]\n{more}\n"
