"""Judges whose critiques run code, and GenPRM's conversation."""

import json
import math

import pytest
from refusing import refused
from stub_server import reply
from test_judge import judge

from jprm.methods.judge.critiques import CODE_END, GENPRM, RUNS, JudgePrompt
from jprm.methods.judge.load import load_judge
from jprm.methods.verify import sandbox
from jprm.methods.verify.programs import LONGEST, printed
from jprm.methods.verify.sandbox import Limits

needs_sandbox = pytest.mark.skipif(sandbox.refusal() is not None, reason=f"needs a sandbox: {sandbox.refusal()}")

CODE = JudgePrompt("code", "{problem}\n{steps}\n", runs_code=True)
OPENING = "<analyze>\nLet's analyze the Paragraph {} step by step: "
SYSTEM = (
    "<｜begin▁of▁sentence｜>You are a math teacher. Your task is to review and critique the paragraphs in solution"
    " step by step.<｜User｜>Question: p\n\n"
)


def with_stop(text, **more):
    """As vLLM replies where the delimiter ended the sample, which the text then holds."""
    return reply(text + CODE_END, stop_reason=CODE_END, **more)


def test_genprm_is_asked_as_by_its_authors():
    assert GENPRM.filled("p", ["a"]) == SYSTEM + "a" + OPENING.format(1)
    assert GENPRM.filled("p", ["a", "b", "c"], ["good.", "bad."]) == (
        SYSTEM + "a<｜Assistant｜>" + OPENING.format(1) + "good.<｜end▁of▁sentence｜><｜User｜>"
        "b<｜Assistant｜>" + OPENING.format(2) + "bad.<｜end▁of▁sentence｜><｜User｜>c" + OPENING.format(3)
    )


def test_a_conversation_holds_the_critiques_of_its_own_path(serve):
    """Of a tree: b and c follow a, and neither question holds the other's critique."""
    tree = {"problem": "p", "nodes": [{"parent": p, "text": t} for p, t in [(-1, "a"), (0, "b"), (0, "c"), (1, "d")]]}

    def script(number, body):
        question = body["prompt"].removeprefix(SYSTEM)
        end = question.removesuffix(OPENING.format(1 + question.count("<｜User｜>")))
        word = "No" if end[-1] == "c" else "Yes"
        return reply(
            rf"about {end[-1]}, sample {body['seed']}: \boxed{{{word}}}</output> \boxed{{No}}", stop_reason=None
        )

    server = serve(script)
    scorer = judge(server, GENPRM, samples=2, delimiter=CODE_END)
    [record] = scorer.score_many([tree])
    assert [node["score"] for node in record["nodes"]] == [1.0, 1.0, 0.0, 1.0]
    [asked] = {body["prompt"] for _, body in server.requests if body["prompt"].endswith("d" + OPENING.format(3))}
    assert [asked.count(f"about {step}, sample 0") for step in "abcd"] == [1, 1, 0, 0] and "sample 1" not in asked


@needs_sandbox
def test_a_critique_continues_after_what_its_code_prints(serve):
    verdict = r"\boxed{No}"

    def script(number, body):
        written = body["prompt"].removeprefix("p\nStep 1: a\n")
        if not written:
            return with_stop("Let me see.\n```python\nx = 6 * 7\nprint(x)", tokens=10)
        if written.count("[Code Output]") == 1:
            return with_stop("Once more:\n```python\nprint(x + 1)\nprint(y)", tokens=20)
        tokens = [(r"\boxed{", 0.0), ("No", math.log(0.75)), ("}", 0.0)]
        texts, logprobs = zip(*tokens, strict=True)
        return reply(verdict, tokens=3, stop_reason=None, logprobs={"tokens": texts, "token_logprobs": logprobs})

    server = serve(script)
    scorer = judge(server, CODE, delimiter=CODE_END, logprobs=True)
    [record] = scorer.score_many([{"problem": "p", "steps": ["a"]}])
    text = (
        "Let me see.\n```python\nx = 6 * 7\nprint(x)\n```\n[Code Output]\n\n```\n42\n```\n"
        "Once more:\n```python\nprint(x + 1)\nprint(y)\n```\n[Code Output]\n\n```\n43\n"
        "NameError: name 'y' is not defined\n```\n" + verdict
    )
    [critique] = record["judge"]["critiques"]
    assert (critique["text"], critique["tokens"], critique["runs"]) == (text, 33, 2)
    assert record["scores"] == pytest.approx([0.25], abs=1e-6) and record["judge"]["by_probability"] == 1
    assert server.requests[-1][1]["prompt"].endswith(text.removesuffix(verdict))


@needs_sandbox
def test_code_runs_a_limited_number_of_times(serve):
    server = serve(lambda number, body: with_stop("```python\nprint(1)") if "stop" in body else reply("..."))
    [judged] = judge(server, CODE, samples=2, delimiter=CODE_END).score_many([{"problem": "p", "steps": ["a"]}])
    assert len(server.requests) == 2 * (RUNS + 1) and judged["judge"]["unreadable"] == 2
    assert [critique["runs"] for critique in judged["judge"]["critiques"]] == [RUNS] * 2


def test_other_blocks_are_not_run(serve):
    server = serve(lambda number, body: with_stop("```\n1 + 1") if number == 0 else reply(r"\boxed{Yes}"))
    assert judge(server, CODE, delimiter=CODE_END).score("p", ["a"]).tolist() == [1.0]
    assert server.requests[1][1]["prompt"].endswith("```\n1 + 1\n```\n")


@needs_sandbox
@pytest.mark.parametrize(
    ("blocks", "output"),
    [
        (["print(1)", "print(2)"], "2"),
        (["x = 1\nraise ValueError", "print(x)"], "1"),
        (["import sys; print(1, file=sys.stderr); sys.exit(1)", "print(2)"], "2"),
        (["def f(:"], "SyntaxError: invalid syntax (<string>, line 1)"),
        (["while True: pass"], "TimeoutError: longer than 1 seconds"),
        (["print('a' * 10**6)"], "a" * LONGEST),
        (["import os; os._exit(0)"], ""),
        (["import os; print(os.listdir('/tmp'), os.path.exists('/work'))"], "[] False"),
    ],
)
def test_what_code_prints(blocks, output):
    assert printed(blocks, Limits(seconds=1.0 if "TimeoutError" in output else 60.0)) == output


def test_a_judge_without_a_sandbox_is_refused(tmp_path, monkeypatch):
    def refuse():
        raise OSError("untrusted code needs a sandbox")

    monkeypatch.setattr(sandbox, "require", refuse)
    settings = {"url": "http://localhost:1/v1", "model": "m", "judge": {"prompt": "genprm"}}
    (tmp_path / "judge.json").write_text(json.dumps(settings))
    refused(OSError, "sandbox", load_judge, tmp_path / "judge.json")
