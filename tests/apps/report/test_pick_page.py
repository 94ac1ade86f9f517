"""examples/pick_a_run.md: its files and commands run on two runs of one task, judged by a server of known verdicts."""

import json
import math
import re
import runpy
import shlex
from pathlib import Path

from stub_server import reply

from jprm.apps import cli

PAGE = (Path(__file__).resolve().parents[3] / "examples/pick_a_run.md").read_text(encoding="utf-8")
FILES = dict(re.findall(r"^`([\w.]+)`:\n\n```\w+\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE))
COMMANDS = [
    line for block in re.findall(r"^```sh\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE) for line in block.splitlines()
]


def run_of(trial, reward, turns):
    told = [{"role": "system", "content": "The policy."}, {"role": "user", "content": "Change my name."}]
    for turn in turns:
        told += [{"role": "assistant", "content": turn}, {"role": "user", "content": "Go on."}]
    return {
        "task_id": 43,
        "trial": trial,
        "reward": reward,
        "traj": told,
        "info": {"task": {"instruction": "Change it."}},
    }


def verdict(number, body):
    """Rates a turn 1 where it refuses, else 5, with a tenth of the probability on the other."""
    assert body["top_logprobs"] == 20
    question = body["messages"][-1]["content"]
    word, other = ("1", "5") if "No." in question.rpartition("Turn ")[2].partition("\n\n")[0] else ("5", "1")
    top = [{"token": word, "logprob": math.log(0.9)}, {"token": other, "logprob": math.log(0.1)}]
    return reply("", message={"content": word}, logprobs={"content": [{**top[0], "top_logprobs": top}]})


def test_its_commands_choose_the_run_and_the_turn(serve, tiny_run, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("runs/real").mkdir(parents=True)
    Path("runs/real/upper").symlink_to(tiny_run.folder)
    server = serve(verdict)
    for name, text in FILES.items():
        Path(name).write_text(text.replace("http://127.0.0.1:8080/v1", server.url))
    runs = [run_of(0, 1.0, ["Which name?", "Done."]), run_of(1, 0.0, ["Which name?", "No.", "Bye."])]
    Path("tau_bench_gpt4o_airline.jsonl").write_text("".join(json.dumps(run) + "\n" for run in runs))
    for line in COMMANDS:
        program, *args = shlex.split(line)
        if program == "jprm":
            assert cli.main(args) == 0, line
        elif program == "python" and args[0] in FILES:
            monkeypatch.setattr("sys.argv", args)
            capsys.readouterr()
            runpy.run_path(args[0])
            printed = capsys.readouterr().out
            if args == ["pick.py", "scored43.jsonl"]:
                assert [line.split(":")[0] for line in printed.splitlines()] == [
                    "trial 0, solved 1",
                    "trial 1, solved 0",
                ]
            elif args[0] == "pick.py":
                assert printed.splitlines() == [
                    "trial 0, solved 1: mean 0.90, lowest 0.90 at turn 1 of 2: 'Which name?'",
                    "trial 1, solved 0: mean 0.63, lowest 0.10 at turn 2 of 3: 'No.'",
                ]
