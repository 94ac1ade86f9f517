"""Judges with a window: bounded questions about long runs, what failed critiques cost, and how a run is completed."""

import json
import random

import pytest
from refusing import refused
from stub_server import reply

from jprm.apps import cli
from jprm.io.jsonl import RecordError
from jprm.methods.judge.critiques import PLAIN, PROMPTS, QWEN_CRITIQUE, THINKPRM
from jprm.methods.judge.judge import Judge, characters
from jprm.methods.judge.load import load_judge
from jprm.methods.judge.window import TIMES, Window, cut, summarised
from jprm.methods.search.lockstep import LiveJudge
from jprm.tree import tree_of

YES, NO = r"It holds. \boxed{Yes}", r"It does not. \boxed{No}"
WINDOW = {"turns": 12000, "summary": 1500}


def run(turns, size, seed=0):
    """A run of so many turns and characters; each turn but the last calls a tool."""
    draw = random.Random(seed)
    system, task = "You are an agent. " * 20, "Fix the failing test. " * 10
    left = size - len(system) - len(task)
    messages = [{"role": "system", "content": system}, {"role": "user", "content": task}]
    for turn in range(turns):
        here = left // (turns - turn)
        left -= here
        said = f"Turn {turn} says {draw.random()}. "
        last = turn == turns - 1
        arguments = {} if last else {"cmd": "ls"}
        spoken = here - len(json.dumps(arguments)) * (not last) if last else max(len(said), here // 4)
        messages.append({"role": "assistant", "content": (said * (spoken // len(said) + 1))[:spoken]})
        if not last:
            call = {"id": f"c{turn}", "type": "function", "function": {"name": "bash", "arguments": arguments}}
            messages[-1]["tool_calls"] = [call]
            result = "word " * (here // 5 + 1)
            content = result[: max(0, here - spoken - len(json.dumps(arguments)))]
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": content})
    return {"messages": messages}


def judge_file(path, server, **section):
    about = {"url": server.url, "model": "tiny", "retries": 0, "backoff_s": 0.01}
    path.write_text(json.dumps({**about, "judge": {"prompt": "plain", **section}}))
    return path


def scored_by(tmp_path, capsys, server, record, **section):
    """Runs `jprm score` with the judge; returns the record that it writes, and what it prints."""
    (tmp_path / "run.jsonl").write_text(json.dumps(record) + "\n")
    args = ["score", "--model", str(judge_file(tmp_path / "judge.json", server, **section))]
    args += ["--input", str(tmp_path / "run.jsonl"), "--output", str(tmp_path / "out.jsonl")]
    assert not cli.main(args)
    [line] = (tmp_path / "out.jsonl").read_text().splitlines()
    return json.loads(line), capsys.readouterr().out


def scores(record):
    return [message.get("score") for message in record["messages"] if message["role"] == "assistant"]


def test_a_long_run_has_all_scores_from_a_server_of_32000_tokens(serve, tmp_path, capsys):
    record = run(61, 240_422)
    assert characters(tree_of(record)) == 240_422
    too_long = (400, {}, {"error": "the prompt is longer than the context of 32,000 tokens"})
    server = serve(lambda number, body: reply(YES) if len(body["prompt"]) <= 4 * 32_000 else too_long)
    plain, _ = scored_by(tmp_path, capsys, server, record)
    assert scores(plain).count(None) > 20 and sum(len(body["prompt"]) for _, body in server.requests) > 7_000_000
    server.requests.clear()
    (tmp_path / "out.jsonl").unlink()
    judged, said = scored_by(tmp_path, capsys, server, record, window=WINDOW)
    sent = sum(len(body["prompt"]) for _, body in server.requests)
    assert scores(judged) == [1.0] * 61 and len(server.requests) == 61
    assert sent == judged["judge"]["sent"] <= TIMES * 240_422 and f"sent: {sent:,} characters" in said
    assert "incomplete" not in judged["judge"] and "incomplete" not in said
    longest = len(PLAIN.text) + 2 * WINDOW["turns"] + WINDOW["summary"]
    assert max(len(body["prompt"]) for _, body in server.requests) < longest
    last = max((body["prompt"] for _, body in server.requests), key=lambda text: "Turn 60 says" in text)
    assert "Fix the failing test." in last and "Earlier steps, shortened:" in last and "Turn 59 says" in last


def test_a_failed_critique_loses_its_turn_and_the_command_asks_again_for_it_alone(serve, tmp_path, capsys):
    record = run(12, 40_000)
    bad = {"Turn 3 says": (500, {}, {}), "Turn 7 says": reply("I cannot tell.")}

    def of_last(body):
        step = body["prompt"].rpartition("\nStep ")[2]  # the turn that is asked about
        return next((answer for name, answer in bad.items() if name in step.partition("Check step")[0]), None)

    server = serve(lambda number, body: of_last(body) or reply(YES))
    judged, said = scored_by(tmp_path, capsys, server, record, window=WINDOW)
    assert [i for i, score in enumerate(scores(judged)) if score is None] == [3, 7]
    assert [judged["messages"][node]["content"][:6] for node in judged["judge"]["incomplete"]] == ["Turn 3", "Turn 7"]
    assert "incomplete: 2 turns in 1 runs" in said
    assert (judged["judge"]["failed"], judged["judge"]["unreadable"]) == (1, 1)
    server.requests.clear()
    del bad["Turn 3 says"]
    again, said = scored_by(tmp_path, capsys, server, record, window=WINDOW)
    assert len(server.requests) == 2 and {body["seed"] for _, body in server.requests} == {1}
    assert [i for i, score in enumerate(scores(again)) if score is None] == [7]
    assert (again["judge"]["asked"], again["judge"]["read"], again["judge"]["attempts"]) == (14, 11, 2)
    bad.clear()
    whole, said = scored_by(tmp_path, capsys, server, record, window=WINDOW)
    assert scores(whole) == [1.0] * 12 and "incomplete" not in whole["judge"] and "incomplete" not in said
    server.requests.clear()
    assert scored_by(tmp_path, capsys, server, record, window=WINDOW)[0] == whole and not server.requests


def test_a_rubric_completes_a_run_too(serve, tmp_path, capsys):
    bad = [True]
    server = serve(lambda number, body: (400, {}, {}) if bad and number == 2 else reply(YES))
    criteria = {"safe": {"text": "It is safe."}, "useful": {"text": "It is useful."}}
    section = {"prompt": "rubric", "criteria": criteria, "window": WINDOW}
    judged, _ = scored_by(tmp_path, capsys, server, run(4, 9000), **section)
    assert len(judged["judge"]["incomplete"]) == 1 and scores(judged).count(None) == 1
    bad.clear()
    assert scores(scored_by(tmp_path, capsys, server, run(4, 9000), **section)[0]) == [1.0] * 4


@pytest.mark.parametrize("prompt", [PLAIN, QWEN_CRITIQUE, THINKPRM, PROMPTS["scale"]], ids=lambda prompt: prompt.name)
@pytest.mark.parametrize(("turns", "size"), [(5, 9000), (300, 1_000_000), (40, 24_000), (3, 300_000), (2, 2000)])
def test_questions_send_a_run_at_most_three_times_and_ask_about_each_turn_once(prompt, turns, size):
    tree = tree_of(run(turns, size))
    judge = Judge(None, prompt, window=Window(**WINDOW))
    paths = judge.paths(tree)
    asked = [node for path in paths for node in (path[-1:] if prompt.asks == "step" else path)]
    assert asked == tree.steps
    questions = judge._questions(tree, paths, {})
    assert sum(map(len, questions)) <= TIMES * characters(tree)
    for question, (path, *_) in questions.items():
        assert f"Turn {tree.steps.index(path[-1])} says" in question
    assert max(map(len, questions)) <= len(prompt.filled("", [""])) + 2 * WINDOW["turns"] + 40 * turns + 2000


def test_a_prompt_about_several_steps_gives_each_turn_of_a_window_its_verdict(serve, tmp_path, capsys):
    record = run(9, 40_000)
    server = serve(lambda number, body: reply(rf"\boxed{{{'0' if 'shortened:' in body['prompt'] else '-1'}}}"))
    judged, _ = scored_by(tmp_path, capsys, server, record, prompt="qwen-critique", window=WINDOW)
    windows = len(server.requests)
    assert 3 <= windows < 9 and None not in scores(judged) and 1.0 in scores(judged) and 0.0 in scores(judged)


@pytest.mark.parametrize(("section", "words"), [
    ({"window": {"turns": 12000}}, "judge.window"),
    ({"window": {"turns": 100, "summary": 10}}, "400 characters or more"),
    ({"window": {"turns": 1000, "summary": -1}}, "0 or more"),
    ({"window": {"turns": 1000, "summary": 0, "tokens": 3}}, "tokens"),
    ({"window": 12000}, "judge.window"),
    ({"window": WINDOW, "prompt": "genprm"}, "judge.window"),
])  # fmt: skip
def test_a_window_is_checked(section, words, tmp_path):
    settings = {"url": "http://localhost:1/v1", "model": "m", "judge": {"prompt": "plain", **section}}
    (tmp_path / "judge.json").write_text(json.dumps(settings))
    refused(RecordError, words, load_judge, tmp_path / "judge.json")


def test_the_window_is_part_of_a_judges_name():
    names = {Judge(Named(), PLAIN, window=w).name for w in (None, Window(1000, 0), Window(1000, 100))}
    assert len(names) == 3
    refused(ValueError, "Leave it out", LiveJudge, Judge(Named(), PLAIN, window=Window(1000, 0)))


class Named:
    name = "policy"


@pytest.mark.parametrize("most", [0, 5, 60, 95, 97, 300, 5000])
def test_texts_are_cut_to_a_length(most):
    text = "word " * 200
    assert len(cut(text, most)) <= most and (cut(text, most) == text) == (most >= len(text))
    lines = summarised([f"{i} {text}" for i in range(30)], most)
    assert len(lines) <= most and (not lines or "- 29 word" in lines)
