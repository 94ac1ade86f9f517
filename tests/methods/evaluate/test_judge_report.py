"""A suite scored by a judge, beside one scored by a model, and the page that shows its critiques."""

import json
import re

from stub_server import reply
from test_judge import write_judge

from jprm.apps import cli
from jprm.io.jsonl import write_records
from jprm.methods.evaluate.suite import read_results, read_scores
from jprm.tree import read_records

WRONG = "2 + 2 = 5"
STEPS = [["2 + 2 = 4", "So 4."], [WRONG, "So 5."], ["odd", "So 4."]]
LINE = r"<b>The step</b> \boxed{%s}"


def script(number, body):
    """The wrong sum is found, and of the chain with an odd step no critique can be read."""
    last = body["prompt"].split("Solution so far:\n")[1].split("\n\nCheck")[0].split(": ", 1)[1]
    return reply("?" if "odd" in last else LINE % ("No" if WRONG in last else "Yes"), tokens=9)


def test_a_judges_suite_and_its_page(serve, tmp_path):
    server = serve(script)
    write_judge(tmp_path / "judge.json", server, prompt="plain")
    errs = [i % 3 == 1 for i in range(12)]
    chains = [
        {"problem": f"p{i}", "steps": STEPS[i % 3], "label": -1 + wrong, "final_answer_correct": not wrong}
        for i, wrong in enumerate(errs)
    ]
    write_records(tmp_path / "chains.jsonl", chains)
    suite = {"neutral": "drop", "processbench": {"data": ["chains.jsonl"], "calibrate": "chains.jsonl"}}
    (tmp_path / "suite.json").write_text(json.dumps(suite))
    args = ["eval", "suite", "--model", str(tmp_path / "judge.json"), "--suite", str(tmp_path / "suite.json")]
    assert cli.main([*args, "--out", str(tmp_path / "judged")]) == 0
    results = read_results(tmp_path / "judged")
    assert results["unread"] == {"chains": 4} and results["data"]["chains"]["n"] == 8
    assert results["processbench"]["files"]["chains"]["f1"] == 1.0
    cost = results["model"]["judge"]
    assert (cost["asked"], cost["read"], cost["unreadable"], cost["tokens"]) == (24, 16, 8, 216)
    asked = len(server.requests)
    assert cli.main([*args, "--out", str(tmp_path / "judged")]) == 0 and len(server.requests) == asked

    scored = [record | {"scores": [0.5, 0.6]} for record in read_records(tmp_path / "judged/scores/chains.jsonl")]
    for record in scored:
        del record["judge"]
    model = {"name": "prm", "folder": "runs/prm", "step": 3, "semantics": "correctness", "rule": "prod"}
    whole = {key: value for key, value in results.items() if key != "unread"} | {"model": model}
    whole["data"]["chains"]["n"] = 12
    (tmp_path / "prm/scores").mkdir(parents=True)
    write_records(tmp_path / "prm/scores/chains.jsonl", scored)
    (tmp_path / "prm/results.json").write_text(json.dumps(whole))
    assert len(read_scores(tmp_path / "prm", whole)["chains"]) == 12
    both = [str(tmp_path / name) for name in ("prm", "judged")]
    assert cli.main(["report", *both, "--output", str(tmp_path / "page.html")]) == 0
    page = (tmp_path / "page.html").read_text()
    data = json.loads(re.search(r'<script type="application/json" id="chains">(.*?)</script>', page)[1])
    assert len(data["items"]) == 8  # what both have scored
    for item in data["items"]:
        word = "No" if item["t"][0] == WRONG else "Yes"
        by_steps, of_judge = item["j"]
        assert by_steps == [] and of_judge == [[0, "read", 9, LINE % word], [1, "read", 9, LINE % word]]
    assert "<b>The step</b>" not in page
    assert "a judge; 16 of 24 critiques were read, 216 tokens generated" in page
    assert "did not judge" in page
