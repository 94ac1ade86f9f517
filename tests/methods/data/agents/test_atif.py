"""ATIF documents: read as trajectories, and written back with scores, byte for byte."""

import json
import pathlib

import pytest

from jprm.apps.cli import main
from jprm.io.jsonl import RecordError
from jprm.methods.data.agents import atif
from jprm.methods.data.agents.parts import SessionOptions
from jprm.methods.data.readers import find
from jprm.methods.evaluate.run import format_of
from jprm.methods.jobs.score import score_atif
from jprm.score.scale import PROBABILITY

CALLS = [
    {"tool_call_id": "a", "function_name": "look", "arguments": {"q": "é"}},
    {"tool_call_id": "b", "function_name": "look", "arguments": {}},
]
STEPS = [
    {"step_id": 1, "source": "system", "message": "Be brief."},
    {"step_id": 2, "source": "user", "message": [{"type": "text", "text": "Where"}, {"type": "text", "text": "?"}]},
    {"step_id": 3, "timestamp": "2026-01-01T00:00:00Z", "source": "agent", "message": "", "reasoning_content": "Hm.",
     "tool_calls": CALLS, "observation": {"results": [{"source_call_id": "a", "content": "x"},
                                                      {"source_call_id": "b"}]}, "metrics": {"cost_usd": 1e-05}},
    {"step_id": 4, "source": "agent", "message": "Here.", "extra": {"mine": [1.0, 2]}, "observation": {"results": []}},
]  # fmt: skip
SUBAGENT = {
    "schema_version": "ATIF-v1.7", "trajectory_id": "s", "agent": {"name": "sub", "version": "0"},
    "steps": [{"step_id": 1, "source": "agent", "message": "inner", "extra": None},
              {"step_id": 2, "source": "system", "message": "note", "observation": {"results": [{"content": "z"}]}}],
}  # fmt: skip
DOCUMENT = {
    "schema_version": "ATIF-v1.7", "session_id": "t", "agent": {"name": "mini", "version": "2", "tool_definitions": [
        {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]},
    "steps": STEPS, "extra": {"reward": 1.0}, "final_metrics": {"total_cost_usd": 0.10},
    "subagent_trajectories": [SUBAGENT],
}  # fmt: skip
FORMS = {
    "compact": json.dumps(DOCUMENT, separators=(",", ":"), ensure_ascii=False),
    "one line": json.dumps(DOCUMENT) + "\n",
    "indented": json.dumps(DOCUMENT, indent=2, ensure_ascii=False),
    "lines": "\n".join([json.dumps(DOCUMENT), "", json.dumps(SUBAGENT | {"subagent_trajectories": []})]) + "\n",
    "list": " [\n" + json.dumps(DOCUMENT, indent=1) + ",\r\n" + json.dumps(SUBAGENT) + "\n]\n",
    "odd": '{"steps" : [ {"step_id":1 ,"source":"agent","message":"\\u00e9" } ],\t"agent":{"name":"n","version":"1"},'
           '"schema_version":"ATIF-v1.0","extra":{ }}',
}  # fmt: skip


HARBOR = pathlib.Path(__file__).parent / "harbor"


class Lengths:
    """A scorer whose score of a turn is the length of its text over ten."""

    name, semantics, rule, scale, identity = "lengths", "correctness", "min", PROBABILITY, {"model": "lengths"}

    def score_many(self, records):
        for record in records:
            scores = [{"score": len(m["content"]) / 10} if m["role"] == "assistant" else {} for m in record["messages"]]
            yield record | {"messages": [m | score for m, score in zip(record["messages"], scores, strict=True)]}


def extras(value):
    """The values of jprm's key in the objects of a text."""
    return [inner[atif.KEY] for inner in objects(value) if atif.KEY in inner]


def objects(text):
    found_objects = []
    for begin, end in atif.documents(text, "f"):
        json.loads(text[begin:end], object_hook=lambda parsed: found_objects.append(parsed) or parsed)
    return found_objects


def test_a_document_is_its_trajectories():
    first, second = atif.parse_atif(DOCUMENT, "f:1", SessionOptions())
    assert [(m["role"], m["content"]) for m in first["messages"]] == [
        ("system", "Be brief."), ("user", "Where?"), ("assistant", ""), ("tool", "x"), ("tool", ""),
        ("assistant", "Here."),
    ]  # fmt: skip
    turn = first["messages"][2]
    assert turn["reasoning_content"] == "Hm." and [call["id"] for call in turn["tool_calls"]] == ["a", "b"]
    assert turn["tool_calls"][0]["function"] == {"name": "look", "arguments": {"q": "é"}}
    assert first["outcome"] == 1.0 and first["session_id"] == "t" and len(first["tools"]) == 1
    told = [("assistant", "inner"), ("system", "note"), ("user", "z")]
    assert [(m["role"], m["content"]) for m in second["messages"]] == told


@pytest.mark.parametrize("form", FORMS)
def test_scores_are_added_and_all_other_bytes_stay(form, tmp_path):
    path, out = tmp_path / "in.json", tmp_path / "out.json"
    path.write_bytes(FORMS[form].encode())
    assert atif.is_atif(path) and format_of(path) == "atif"
    score_atif(Lengths(), path, out)
    text = out.read_bytes().decode()
    letters = iter(text)
    assert all(letter in letters for letter in FORMS[form].replace("null", ""))  # the input is left where it was
    told = [json.dumps(extra, ensure_ascii=False) for extra in extras(text)]
    most = sum(len(f',{" " * 12}"extra": {{"{atif.KEY}": {extra}}}') for extra in told)
    assert len(told) == FORMS[form].count('"agent"') and len(FORMS[form]) < len(text) <= len(FORMS[form]) + most
    again = tmp_path / "again.json"
    score_atif(Lengths(), out, again)
    assert again.read_bytes().decode() == text  # a score takes the place of the same one
    if form in ("compact", "one line", "indented"):
        old, new = json.loads(FORMS[form]), json.loads(text)
        assert [step.get("extra", {}).get(atif.KEY, {}).get("score") for step in new["steps"]] == [None, None, 0.0, 0.5]
        assert new["subagent_trajectories"][0]["steps"][0]["extra"] == {atif.KEY: {"score": 0.5}}
        assert new["extra"][atif.KEY]["scored_by"] == "lengths" and new["extra"]["reward"] == 1.0
        assert old["final_metrics"] == new["final_metrics"]


@pytest.mark.parametrize("form", FORMS)
def test_what_is_written_passes_the_models_of_the_format(form, tmp_path):
    models = pytest.importorskip("atif", reason="the package atif is not installed")
    (tmp_path / "in.json").write_text(FORMS[form])
    score_atif(Lengths(), tmp_path / "in.json", tmp_path / "out.json")
    text = (tmp_path / "out.json").read_text()
    for begin, end in atif.documents(text, "out.json"):
        models.Trajectory.model_validate_json(text[begin:end])


def test_trajectories_that_harbor_wrote_are_read_and_scored(tmp_path):
    """Written by Harbor 0.26.0's own code: its converter of mini-swe-agent's logs, and its agent Terminus 2.

    The runs are made up. Terminus 2 writes arrays of token ids on one line, calls of its terminal, an answer that it
    could not parse and so has no call, and a summary that refers to the trajectories of its subagents.
    """
    (mini,) = find("atif").read(HARBOR / "mini_swe_agent.json")
    (terminus,) = find("atif").read(HARBOR / "terminus_2.json")
    roles = [[message["role"] for message in record["messages"]] for _, record in (mini, terminus)]
    assert roles == [
        ["system", "user", "assistant", "tool", "tool", "assistant", "tool", "assistant", "tool"],
        ["user", "assistant", "tool", "system", "user", "assistant", "user", "assistant", "tool"],
    ]
    first = mini[1]["messages"][2]
    assert first["reasoning_content"] == "I look at the file and its list at once."
    assert [call["function"]["arguments"]["command"] for call in first["tool_calls"]] == ["cat count.py", "ls"]
    answers = [message["content"] for message in mini[1]["messages"]][3:5]
    assert answers == ["items = ['a', 'b', 'é', 'é']\nprint(len(items))\n", "count.py\n"]
    assert terminus[1]["messages"][6]["content"] == "ERROR: No valid JSON found in response"
    assert terminus[1]["messages"][8]["content"].startswith("Are you sure")
    assert all(message["content"] for message in terminus[1]["messages"])  # the reference is no message
    for name, scores in [("mini_swe_agent", [4.0, 0.0, 1.2]), ("terminus_2", [4.9, 1.7, 2.2])]:
        source, out = HARBOR / f"{name}.json", tmp_path / f"{name}.json"
        score_atif(Lengths(), source, out)
        document = json.loads(out.read_text())
        agents = [step for step in document["steps"] if step["source"] == "agent"]
        assert [step["extra"][atif.KEY]["score"] for step in agents] == scores
        for step in agents:
            assert step["extra"].pop(atif.KEY) and (step["extra"] or step.pop("extra") == {})
        assert document["extra"].pop(atif.KEY) and (document["extra"] or document.pop("extra") == {})
        assert document == json.loads(source.read_text())


@pytest.mark.parametrize(
    ("text", "field"),
    [('[{"schema_version": "ATIF-v1.8"', ""), ('{"schema_version": "ATIF-v1.8"', ""), ("[]", ""), ("", ""),
     (json.dumps(DOCUMENT | {"schema_version": "ATIF-v2.0"}, indent=2), "schema_version")],
)  # fmt: skip
def test_a_broken_file_is_refused_and_leaves_nothing(text, field, tmp_path):
    (tmp_path / "in.json").write_text(text)
    with pytest.raises(RecordError) as error:
        score_atif(Lengths(), tmp_path / "in.json", tmp_path / "out.json")
    assert not field or (error.value.field, error.value.where) == (field, f"{tmp_path}/in.json:1")
    assert [file.name for file in tmp_path.iterdir()] == ["in.json"]


def test_the_command_scores_documents(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("jprm.apps.cli.scorer_of", lambda *_, **__: Lengths())
    monkeypatch.setattr(Lengths, "read_as", "lengths", raising=False)
    source, output = tmp_path / "in.json", tmp_path / "out.json"
    source.write_text(FORMS["indented"])
    command = ["score", "--model", "m", "--input", str(source), "--output", str(output)]
    for _ in range(2):  # the second reads the scores of the first
        assert main(command) == 0
        assert json.loads(output.read_text())["steps"][3]["extra"][atif.KEY] == {"score": 0.5}
    assert main([*command, "--on-error", "skip"]) == 2
    assert "all or none" in capsys.readouterr().err


def step(number, source, message, **more):
    return {"step_id": number, "source": source, "message": message, **more}


def test_rewards_of_tunix_are_kept_at_their_turns():
    """As its `converter.py` writes them: steps from 0, the environment's reward after the turn that earned it."""
    steps = [
        step(0, "user", "Where?"),
        step(1, "agent", "I look.", mc_return=1.5, assistant_tokens=[1], logprobs=[-0.5], policy_version=3),
        step(2, "system", "Here.", reward=0.5, done=False, observation={"results": [{"content": "Here."}]}),
        step(3, "agent", "Here.", mc_return=1.0),
        step(4, "system", "['a', 'b']", reward=1.0, observation={"results": [{"content": "a"}, {"content": "b"}]}),
        step(5, "system", "", reward=0.25),
    ]
    document = {
        "schema_version": "ATIF-v1.7",
        "agent": {"name": "n", "version": "1"},
        "steps": steps,
        "total_reward": 1.75,
    }
    (record,) = atif.parse_atif(document, "f:1", SessionOptions())
    assert [(m["role"], m["content"]) for m in record["messages"]] == [
        ("user", "Where?"), ("assistant", "I look."), ("user", "Here."), ("assistant", "Here."), ("user", "a"),
        ("user", "b")]  # fmt: skip
    turns = [m for m in record["messages"] if m["role"] == "assistant"]
    assert [(turn["reward"], turn["mc_return"]) for turn in turns] == [(0.5, 1.5), (1.25, 1.0)]
    assert record["outcome"] == 1.75
    for fields, outcome in (({"reward": 2}, 2), ({"extra": {"outcome": 1}}, 1), ({"total_reward": 0.5}, 0.5)):
        (record,) = atif.parse_atif({**document, "total_reward": None, **fields}, "f:1", SessionOptions())
        assert record["outcome"] == outcome
    with pytest.raises(RecordError, match="Steps count from 0: 1"):
        list(atif.parse_atif({**document, "steps": [steps[0], steps[3]]}, "f:1", SessionOptions()))
    with pytest.raises(RecordError, match="before any turn"):
        list(
            atif.parse_atif(
                {**document, "steps": [step(1, "user", "q", reward=1), step(2, "agent", "a")]}, "f:1", SessionOptions()
            )
        )
