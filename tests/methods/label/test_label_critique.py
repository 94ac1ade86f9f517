"""A judge on a server: its verdicts as labels, and its critiques kept where the verdict is the label, once each."""

import pytest
from stub_server import reply
from test_judge import judge, write_judge

from jprm.apps import cli
from jprm.io.jsonl import write_records
from jprm.methods.judge.critiques import PLAIN, QWEN_CRITIQUE, THINKPRM
from jprm.methods.label.config import CritiqueConfig
from jprm.methods.label.jobs import label_critique
from jprm.tree import read_records

POOL = {
    "problem": "p",
    "samples": [
        {"steps": ["good", "odd", "bad"], "labels": [1, None, 0]},
        {"steps": ["good", "bad"], "labels": [1, 1]},  # labelled otherwise than the sample before, on another path
    ],
}


def script(number, body):
    """Every second critique says Yes; the critique names its sample."""
    return reply(rf"sample {body['seed']}" "\n" rf"\boxed{{{'Yes' if body['seed'] % 2 else 'No'}}}", tokens=7)


def kept(folder, scorer, records, **config):
    write_records(folder / "in.jsonl", records)
    paths = folder / "in.jsonl", folder / "out.jsonl", folder / "critiques.jsonl"
    counts = label_critique(scorer, *paths, CritiqueConfig(**config))
    return list(read_records(folder / "out.jsonl")), counts


def test_critiques_whose_verdict_is_the_label_are_kept(serve, tmp_path):
    server = serve(script)
    scorer = judge(server, PLAIN, samples=4)
    records, counts = kept(tmp_path, scorer, [POOL], most=2)
    steps = [["good"], ["good", "odd", "bad"], ["good", "bad"]]
    questions = [PLAIN.filled("p", path) for path in steps for _ in range(2)]
    assert [record["problem"] for record in records] == questions
    texts = [(f"sample {seed}", rf"\boxed{{{word}}}") for seed, word in enumerate(["No", "Yes"] * 2)]
    wanted = [texts[1], texts[3], texts[0], texts[2], texts[1], texts[3]]
    assert [tuple("\n".join(record["steps"]).split("\n")) for record in records] == wanted
    assert [record["verdict"] for record in records] == [1, 1, 0, 0, 1, 1]
    assert len(server.requests) == 12  # no question is about the unlabelled step, and equal ones are asked once
    assert (counts["questions"], counts["critiques"], counts["matching"], counts["kept"]) == (3, 12, 6, 6)
    assert counts["tokens"] == 84 and counts["read"] == 12


def test_steps_that_are_labelled_both_ways_are_left_out(serve, tmp_path):
    pool = {"problem": "p", "samples": [{"steps": ["a"], "labels": [1]}, {"steps": ["a"], "labels": [0]}]}
    records, counts = kept(tmp_path, judge(serve(script), PLAIN, samples=2), [pool])
    assert records == [] and (counts["unknown"], counts["questions"]) == (1, 0)


@pytest.mark.parametrize(
    ("prompt", "texts", "matching"),
    [
        (QWEN_CRITIQUE, [r"\boxed{1}", r"\boxed{0}", r"\boxed{-1}", "?"], [0]),
        (THINKPRM, [r"\boxed{correct} \boxed{incorrect}", r"\boxed{incorrect}", r"\boxed{correct} " * 3,
                    r"\boxed{correct}"], [0]),
    ],
)  # fmt: skip
def test_of_a_chain_the_first_error_decides(serve, tmp_path, prompt, texts, matching):
    server = serve(lambda number, body: reply(texts[body["seed"]]))
    chain = {"problem": "p", "steps": ["a", "b", "c"], "labels": [1, -1, None], "semantics": "rating"}
    unknown = {"problem": "q", "steps": ["a", "b"], "labels": [None, -1], "semantics": "rating"}
    scorer = judge(server, prompt, samples=4, delimiter="\n")
    records, counts = kept(tmp_path, scorer, [chain, unknown], most=4)
    opening = [prompt.opening] if prompt.opening else []
    assert [record["steps"] for record in records] == [[*opening, texts[i].strip()] for i in matching]
    assert [record["verdict"] for record in records] == [1]
    assert len(server.requests) == 4 and counts["unreadable"] == 1


def test_a_probability_below_a_half_does_not_turn_a_verdict(serve, tmp_path):
    logprobs = {"tokens": [r"\boxed{", "Yes", "}"], "token_logprobs": [0.0, -2.0, 0.0]}
    scorer = judge(serve(lambda number, body: reply(r"\boxed{Yes}", logprobs=logprobs)), PLAIN, logprobs=True)
    records, _ = kept(tmp_path, scorer, [{"problem": "p", "steps": ["a"], "labels": [1]}])
    assert len(records) == 1


def test_the_command_continues_and_refuses_unlabelled_files(serve, tmp_path, capsys):
    server = serve(script)
    write_judge(tmp_path / "judge.json", server, prompt="plain", samples=2)
    write_records(tmp_path / "in.jsonl", [POOL | {"problem": f"p{i}"} for i in range(3)])
    paths = {name: str(tmp_path / f"{name}.jsonl") for name in ("in", "out", "critiques")}
    args = ["label", "critique", "--model", str(tmp_path / "judge.json"), "--input", paths["in"]]
    args += ["--output", paths["out"], "--critiques", paths["critiques"], "--trees-at-once", "1"]
    server.script = lambda number, body: script(number, body) if number < 8 else (400, {}, {})
    assert cli.main(args) == 2 and "failed" in capsys.readouterr().err
    asked, server.script = len(server.requests), script
    assert cli.main(args) == 0 and "kept: 9" in capsys.readouterr().out
    assert len(server.requests) - asked == 18 - 8  # what was answered is not asked again
    write_records(tmp_path / "in.jsonl", [{"problem": "p", "steps": ["a"]}])
    assert cli.main(args) == 2 and "label" in capsys.readouterr().err


def test_labels_of_a_judge_hold_their_meaning_and_critiques(serve, tmp_path, capsys):
    def script(number, body):
        last = body["prompt"].split("Solution so far:\n")[1].split("\n\nCheck")[0]
        return reply("?" if "odd" in last else r"\boxed{%s}" % ("No" if "wrong" in last else "Yes"), tokens=4)

    write_judge(tmp_path / "judge.json", serve(script), prompt="plain", samples=2)
    chains = [{"problem": f"p{i}", "steps": [("good", "wrong", "odd")[i % 3], "so"]} for i in range(6)]
    write_records(tmp_path / "in.jsonl", chains)
    args = ["label", "judge", "--model", str(tmp_path / "judge.json"), "--input", str(tmp_path / "in.jsonl")]
    args += ["--output", str(tmp_path / "out.jsonl"), "--domain", "law", "--rubric"]
    rubric = "The cited rule exists <b>and</b> applies."
    assert cli.main([*args, " "]) == 2 and "domain" in capsys.readouterr().err
    assert cli.main([*args, rubric]) == 0
    assert cli.main([*args, "Another."]) == 2 and "request" in capsys.readouterr().err
    records = list(read_records(tmp_path / "out.jsonl"))
    assert {(record["domain"], record["rubric"]) for record in records} == {("law", rubric)}
    assert [[node.get("label") for node in record["nodes"]] for record in records[:3]] == [[1, 1], [0, 0], [None, None]]
    origins = {node["origin"] for record in records for node in record["nodes"] if "label" in node}
    assert origins == {f"judge:{records[0]['judge']['name']}"}
    assert all(record["judge"]["asked"] == len(record["judge"]["critiques"]) == 4 for record in records)
