"""Labels by a judge state what they mean, and the page shows it."""

import pytest
from stub_server import reply
from test_judge import write_judge

from jprm.apps import cli
from jprm.io.jsonl import write_records
from jprm.tree import read_records

RUBRIC = "The cited rule exists <b>and</b> applies."


def script(number, body):
    last = body["prompt"].split("Solution so far:\n")[1].split("\n\nCheck")[0]
    return reply("?" if "odd" in last else r"\boxed{%s}" % ("No" if "wrong" in last else "Yes"), tokens=4)


@pytest.fixture
def labelled(serve, tmp_path, capsys):
    write_judge(tmp_path / "judge.json", serve(script), prompt="plain", samples=2)
    chains = [{"problem": f"p{i}", "steps": [("good", "wrong", "odd")[i % 3], "so"]} for i in range(6)]
    write_records(tmp_path / "in.jsonl", chains)
    args = ["label", "judge", "--judge", str(tmp_path / "judge.json"), "--input", str(tmp_path / "in.jsonl")]
    args += ["--output", str(tmp_path / "out.jsonl"), "--domain", "law", "--rubric"]
    assert cli.main([*args, " "]) == 2 and "domain" in capsys.readouterr().err
    assert cli.main([*args, RUBRIC]) == 0
    assert cli.main([*args, "Another."]) == 2 and "request" in capsys.readouterr().err
    return tmp_path


def test_labels_hold_their_meaning_and_critiques(labelled):
    records = list(read_records(labelled / "out.jsonl"))
    assert {(record["domain"], record["rubric"]) for record in records} == {("law", RUBRIC)}
    assert [[node.get("label") for node in record["nodes"]] for record in records[:3]] == [[1, 1], [0, 0], [None, None]]
    assert {node["origin"] for record in records for node in record["nodes"] if "label" in node} == {
        f"judge:{records[0]['judge']['name']}"
    }
    assert all(record["judge"]["asked"] == len(record["judge"]["critiques"]) == 4 for record in records)
