"""The commands that storms kill and whose files they edit, and a folder of all that these read."""

from __future__ import annotations

import dataclasses
import functools
import json
import pathlib
import re

import tiny_rl
import tiny_run as tiny
from stub_server import reply
from tiny_run import pool_file, processbench_file

from jprm.io.jsonl import write_records

JUDGE = "def judge(record, steps):\n    return float(len(steps) > 1)\n"
METHOD = '''import dataclasses
from typing import ClassVar
from jprm.methods.search.growing_tree import ROOT, Ask

@dataclasses.dataclass(frozen=True)
class Some:
    """Some whole chains."""
    kind: ClassVar[str] = "tree"
    def steps(self, tree, rule):
        yield [Ask(ROOT, 4, "end")]
        return None
'''


@dataclasses.dataclass(frozen=True)
class Command:
    """A command that is killed.

    words: its arguments.
    needs: the command whose output it reads.
    edits: what changes between a kill and the next call: a file, text before, text after.
    finals: names that hold nothing or what is whole, whenever it dies; default: its output.
    """

    words: str
    needs: str = ""
    edits: dict[str, tuple[str, str, str]] = dataclasses.field(default_factory=dict)
    finals: tuple[str, ...] | None = None

    @property
    def output(self) -> str:
        return (re.findall(r"--(?:output|workdir) (\S+)", self.words) or self.words.split())[-1]


CONFIG = ("run/model/experiment.json", 'rope_theta": 100.0', 'rope_theta": 777.0')
DATA = ("inputs/chains.jsonl", " 3", " 4")
POLICY = "--policy {inputs}/policy.json --input {inputs}/problems.jsonl --output"
MODEL = "--model model --input {inputs}/chains.jsonl --output"
SUITE = "eval suite --model model --suite {inputs}/suite.json --output results"
JUDGED = "label outcomes --verifier {inputs}/judge.py:judge --input {inputs}/answered.jsonl --output judged.jsonl"
COMMANDS = {
    "prepare": Command("prepare jsonl --input {inputs}/trees.jsonl --output prepared"),
    "tokenise": Command(
        "tokenise {inputs}/shards.py --shards 8 --workers 1 --output tokens", finals=("tokens/tokens.json",)
    ),
    "train": Command("train {inputs}/experiment.py --workdir model", "prepare", finals=()),
    "train on records": Command(
        "train {inputs}/records.py --workdir trained", finals=(),
        edits={"data": ("inputs/train.jsonl", '"label": 1', '"label": 0')},
    ),
    "score": Command(f"score {MODEL} scored.jsonl", "train", {"config": CONFIG, "data": DATA}),
    "label mc": Command(
        f"label mc {POLICY} values.jsonl --rollouts rollouts.jsonl --estimate soft --k 4 --trees-at-once 2"
    ),
    "label outcomes": Command(
        JUDGED, edits={"code": ("inputs/judge.py", "> 1", "> 2"), "data": ("inputs/answered.jsonl", " 3", " 4")}
    ),
    "label teacher": Command(f"label teacher {MODEL} taught.jsonl", "train", {"config": CONFIG, "data": DATA}),
    "sample": Command(f"sample {POLICY} pools.jsonl --n 4 --at-once 2"),
    "search": Command(f"search best-of-n --model model {POLICY} best.jsonl --budget 1000 --n 4 --at-once 2", "train"),
    "search by one's own method": Command(
        f"search {{inputs}}/method.py:Some --model model {POLICY} found.jsonl --budget 1000 --at-once 2", "train",
        {"config": CONFIG, "code": ("inputs/method.py", "ROOT, 4", "ROOT, 3"),
         "data": ("inputs/problems.jsonl", "1+2", "1+1")},
    ),
    "eval suite": Command(
        SUITE, "train", {"config": CONFIG, "data": ("inputs/pool.jsonl", " 3", " 4")},
        ("results/results.json", "results/scores/easy.jsonl", "results/scores/pool.jsonl"),
    ),
    "convert": Command("convert model exported", "train"),
    "report": Command("report results --output report.html --figures figures", "eval suite"),
    "rl": Command("rl {inputs}/rl.py --workdir learnt", finals=()),
}  # fmt: skip


def script(number, body):
    """A policy whose samples depend only on prompt and seed; every third is incorrect."""
    return reply(f"so {body['seed']}\n\nthen\n\nthe answer is {3 if body['seed'] % 3 else 4}", stop_reason=None)


def make_inputs(folder: pathlib.Path, url: str) -> None:
    tiny.make_data(folder)
    chains = tiny.chains(150)
    problems = [{"id": i, "problem": f"{i}: 1+2", "steps": ["so", "then"], "answer": "3"} for i in range(6)]
    answered = [chain | {"answer": "3"} for chain in chains]
    for name, records in {
        "trees": tiny.trees(40), "chains": chains, "answered": answered, "problems": problems
    }.items():  # fmt: skip
        write_records(folder / f"{name}.jsonl", records)
    (folder / "judge.py").write_text(JUDGE)
    (folder / "method.py").write_text(METHOD)
    (folder / "policy.json").write_text(json.dumps({"url": url, "model": "tiny", "retries": 0, "concurrency": 4}))
    processbench_file(folder / "easy.json", 12, 1)
    pool_file(folder / "pool.jsonl")
    suite = {"processbench": {"data": "easy.json", "calibrate": "easy.json"}, "best_of_n": {"data": ["pool.jsonl"]}}
    (folder / "suite.json").write_text(json.dumps(suite))
    train = functools.partial(
        tiny.experiment, folder, valid=(), steps=12, log_every=1, checkpoint_every=3,
        model=dataclasses.replace(tiny.MODEL, qk_norm=False),
    )  # fmt: skip
    experiments = {
        "experiment": train(train=(str(folder.with_name("run") / "prepared"),)),
        "records": train(),
        "shards": tiny.experiment(folder, train=(str(folder / "trees.jsonl"),)),
        "rl": tiny_rl.stormy(tiny_rl.make(folder / "rl")),
    }
    for name, experiment in experiments.items():
        tiny.write_experiment(folder / f"{name}.py", experiment)
