"""The labelling server killed at random moments, and on a full disk: what it confirmed is there, once."""

import collections
import random
import threading

import pytest
from annotating import Process, log_of, make

from jprm.apps.annotate import study


def storm(folder, kills, seed):
    """Rates chains while the server is killed; returns the uuids in the order in which they were confirmed.

    As the page does, an event without an answer is sent again, with its uuid, until it is confirmed.
    """
    rng, confirmed, count = random.Random(seed), [], 0
    server = Process(folder)

    def post(path, body):
        nonlocal server, kills
        while True:
            if kills and rng.random() < 0.2:
                kills -= 1
                timer = threading.Timer(rng.random() * 0.004, server.process.kill)
                timer.start()
                status, made = server.post(path, body)
                timer.join()
                server.process.wait(30)
                server = Process(folder)
            else:
                status, made = server.post(path, body)
            if status is not None:
                assert status == 200, made
                return made

    while kills:
        shown = post("next", {})["tasks"][0]
        for step in range(len(shown["acts"]), len(shown["steps"])):
            count += 1
            body = {"uuid": f"storm-{count:06}", "task": shown["task"], "kind": "rate", "step": step, "rating": 1}
            confirmed.append(post("events", body | {"seconds": 1.0})["acknowledged"])
        count += 1
        body = {"uuid": f"storm-{count:06}", "task": shown["task"], "kind": "finish", "reason": "solution"}
        confirmed.append(post("events", body | {"seconds": 0.0})["acknowledged"])
    server.stop()
    return confirmed


@pytest.mark.parametrize("kills", [2, pytest.param(200, marks=pytest.mark.slow)])
def test_what_was_confirmed_is_there_once_after_kills_at_random_moments(tmp_path, kills):
    folder = make(tmp_path, count=400, names=("ana",))
    confirmed = storm(folder, kills, seed=kills)
    events = log_of(folder)
    stored = [event["uuid"] for event in events if event["kind"] != "open"]
    assert stored == confirmed  # each once, and in order
    assert max(collections.Counter(event["uuid"] for event in events).values()) == 1


def test_a_full_disk_confirms_nothing_says_so_and_loses_nothing(tmp_path):
    folder = make(tmp_path, count=50, names=("ana",))
    server = Process(folder, limit=2000)
    shown = server.post("next", {})[1]["tasks"][0]
    confirmed, refused = [], []
    for count in range(40):
        body = {"uuid": f"comment-{count:04}", "task": shown["task"], "kind": "comment", "text": "a word"}
        status, made = server.post("events", body)
        if status == 200:
            confirmed.append(made["acknowledged"])
        else:
            assert status == 507 and "could not store this: File too large" in made["error"]["message"]
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
