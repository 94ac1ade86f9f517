"""`jprm label`, from file to file, with a server as the policy."""

import json

import pytest
from stub_server import reply

from jprm.apps import cli
from jprm.io.jsonl import write_records
from jprm.methods.data.prepare import prepare
from jprm.tree import read_records


def arithmetic(number, body):
    """Rollouts of "1+2": of the seeds, every third goes wrong at "bad"; after "bad" all are wrong."""
    right = "bad" not in body["prompt"] and body["seed"] % 3
    return reply(f"{'so' if right else 'bad'}\n\nthen\n\nthe answer is {3 if right else 4}", stop_reason=None)


@pytest.fixture
def folder(serve, tmp_path):
    server = serve(arithmetic)
    (tmp_path / "policy.json").write_text(json.dumps({"url": server.url, "model": "tiny", "retries": 0}))
    records = [{"problem": "1+2", "steps": ["so", "bad", "then"], "labels": [1, 0, 0], "answer": "3", "id": "a"}]
    write_records(tmp_path / "chains.jsonl", records)
    return tmp_path, server


def run(folder, method, *options, status=0, **files):
    names = {"policy": "policy.json", "input": "chains.jsonl", "output": "out.jsonl", "rollouts": "r.jsonl"} | files
    args = ["label", method, *options]
    for name, file in names.items():
        if file:
            args += [f"--{name}", str(folder / file)]
    assert cli.main(args) == status


def test_a_prepared_folder_is_an_input(folder):
    folder, _ = folder
    prepare("jsonl", [folder / "chains.jsonl"], folder / "prepared")
    for method, name in (("mc", "m"), ("omega", "o")):
        for source in ("chains.jsonl", "prepared"):
            run(folder, method, "--k", "2", *(["--estimate", "soft"] if method == "mc" else []), input=source,
                output=f"{name}_{source}", rollouts=f"r_{name}_{source}")  # fmt: skip
        assert (folder / f"{name}_prepared").read_bytes() == (folder / f"{name}_chains.jsonl").read_bytes()
    for source in ("chains.jsonl", "prepared"):
        run(folder, "verify", "--kind", "arithmetic", input=source, output=f"v_{source}", policy="", rollouts="")
    assert (folder / "v_prepared").read_bytes() == (folder / "v_chains.jsonl").read_bytes()


def test_monte_carlo_and_consensus(folder):
    folder, server = folder
    run(folder, "mc", "--estimate", "soft", "--k", "6")
    (tree,) = read_records(folder / "out.jsonl")
    assert (tree["semantics"], tree["id"]) == ("value", "a")
    assert [node["label"] for node in tree["nodes"]] == [pytest.approx(4 / 6), 0, 0]
    assert len(server.requests) == 18

    run(folder, "mc", "--estimate", "hard", "--k", "6")
    (tree,) = read_records(folder / "out.jsonl")
    assert [node["label"] for node in tree["nodes"]] == [1, 0, 0]
    assert len(server.requests) == 18  # all of them from the file

    run(folder, "consensus", other="chains.jsonl", input="out.jsonl", output="agreed.jsonl", policy=None, rollouts=None)
    (agreed,) = read_records(folder / "agreed.jsonl")
    assert (agreed["consensus"], agreed["nodes"]) == (1, tree["nodes"])


def test_omega(folder, capsys):
    folder, server = folder
    run(folder, "omega", "--k", "6")
    (tree,) = read_records(folder / "out.jsonl")
    errors = [node for node in tree["nodes"] if node.get("label") == 0]
    assert [(node["parent"], node["text"]) for node in errors] == [(-1, "bad")]
    assert len(server.requests) == tree["rollouts"]
    before = len(server.requests)
    run(folder, "omega", "--k", "6")
    assert len(server.requests) == before

    write_records(folder / "problems.jsonl", [{"problem": "1+2", "answer": "3", "id": "a"}])
    run(folder, "omega", "--k", "6", input="problems.jsonl", output="same.jsonl")
    assert list(read_records(folder / "same.jsonl")) == [tree]  # the chain of the input was not used
    write_records(folder / "problems.jsonl", [{"problem": "1+2"}])
    capsys.readouterr()
    run(folder, "omega", input="problems.jsonl", output="other.jsonl", status=2)
    assert "problems.jsonl" in capsys.readouterr().err


def test_a_dead_server_is_one_line_and_what_was_drawn_stays(folder, capsys):
    folder, server = folder
    calls = server.script
    server.script = lambda number, body: calls(number, body) if number < 6 else (400, {}, b"broken")
    run(folder, "mc", "--estimate", "soft", "--k", "6")
    (tree,) = read_records(folder / "out.jsonl")
    assert sum(node["rollouts"] for node in tree["nodes"]) == 6
    capsys.readouterr()
    (folder / "out.jsonl").unlink()
    run(folder, "mc", "--estimate", "soft", "--k", "6", status=2)
    error = capsys.readouterr().err
    assert error.startswith("error: policy tiny#") and "broken" in error and "continues" in error
    assert not (folder / "out.jsonl").exists()
    assert len((folder / "r.jsonl").read_bytes().splitlines()) == 6


@pytest.mark.parametrize(
    ("change", "message"), [({"answer": None}, "1: answer"), ({"steps": []}, "chains.jsonl:1: steps")]
)
def test_bad_input_costs_no_rollout(folder, capsys, change, message):
    folder, server = folder
    write_records(folder / "chains.jsonl", [{"problem": "p", "steps": ["a"], "answer": 1} | change])
    run(folder, "mc", "--estimate", "soft", status=2)
    assert message in capsys.readouterr().err
    assert not server.requests and not (folder / "out.jsonl").exists()


LENGTH = """
from jprm.methods.label.config import Labeller


def check(tree, where):
    if "id" not in tree.extra:
        raise ValueError(f"{where}: id: is absent")


LENGTH = Labeller(lambda tree: [1.0 if len(node.text) > 2 else None for node in tree.nodes], check=check)
WRONG = Labeller(lambda tree: [3.0 for node in tree.nodes])
"""


def test_a_labeller_of_ones_own_labels_files(folder, capsys):
    folder, _ = folder
    (folder / "own.py").write_text(LENGTH)

    def label_with(name, status=0, **files):
        run(folder, f"{folder}/own.py:{name}", policy="", rollouts="", status=status, **files)
        return capsys.readouterr().err

    label_with("LENGTH")
    (record,) = read_records(folder / "out.jsonl")
    assert [node.get("label") for node in record["nodes"]] == [None, 1, 1]
    before = (folder / "out.jsonl").read_bytes()
    label_with("LENGTH")
    assert (folder / "out.jsonl").read_bytes() == before
    assert "label" in label_with("WRONG", status=2, output="wrong.jsonl") and not (folder / "wrong.jsonl").exists()
    assert "NOTHING" in label_with("NOTHING", status=2, output="none.jsonl")
    write_records(folder / "chains.jsonl", [{"problem": "1+2", "steps": ["so"]}])
    assert "record 1: id" in label_with("LENGTH", status=2, output="new.jsonl") and not (folder / "new.jsonl").exists()
