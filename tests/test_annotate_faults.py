"""The labelling server killed at random moments, and on a full disk: what it confirmed is there, once."""

import pytest
import storm
from annotating import Process, log_of, make

from jprm.apps.annotate import study


@pytest.mark.parametrize("kills", [2, pytest.param(200, marks=pytest.mark.slow)])
def test_what_was_confirmed_is_there_once_after_kills_at_random_moments(tmp_path, kills):
    counts = storm.annotate(tmp_path, kills, seed=kills)
    assert counts["kills"] == kills and counts["events"] > 0


def test_a_full_disk_confirms_nothing_says_so_and_loses_nothing(tmp_path):
    folder = make(tmp_path, count=50, names=("ana",))
    server = Process(folder, limit=2000)
    shown = server.post("next", {})[1]["tasks"][0]
    confirmed, refused = [], []
    for count in range(40):
        body = {"uuid": f"comment-{count:04}", "task": shown["task"], "kind": "comment", "text": "a word"}
        status, reply = server.post("events", body)
        if status == 200:
            confirmed.append(reply["acknowledged"])
        else:
            assert status == 507 and "could not store this: File too large" in reply["error"]["message"]
            refused.append(body)
    server.stop()
    lines = (folder / study.EVENTS).read_bytes()
    assert lines.endswith(b"\n") and len(lines) <= 2000 and len(confirmed) > 3 and len(refused) > 3
    server = Process(folder)  # there is room again
    for body in refused:
        assert server.post("events", body)[0] == 200
    server.stop()
    stored = [event["uuid"] for event in log_of(folder)]
    assert [uuid for uuid in stored if uuid.startswith("comment")] == confirmed + [body["uuid"] for body in refused]
