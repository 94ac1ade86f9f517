"""Edits what a command depends on between a kill and the next call: `make storm-commands STORM="--edits"`.

A command dies by SIGKILL at a point drawn from the seed. Then a config, a file of code or the data is edited, of the
same size and time, and the command is run again. It must refuse, or write what an undisturbed run writes of the edited
files; anything else that stands under a final name is stale. The edit is undone and the command run again: where it had
refused, its output must equal the undisturbed run byte for byte. Every line is JSON: `kills`, `refused`, `anew`, and
`stale` and `differing_bytes`, which must be 0.
"""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import random
import shutil
import signal
from collections import Counter
from collections.abc import Iterator

from command_storm import Commands, Undisturbed, differing, make_inputs, script, serving

from jprm.io.jsonl import write_records
from jprm.tree import read_records

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
CONFIG = "run/model/experiment.json", 'rope_theta": 100.0', 'rope_theta": 777.0'
DATA = "inputs/chains.jsonl", " 3", " 4"
COMMANDS = {  # name: arguments, the output, and its edits: file, text before, text after
    "score": (
        "score --model model --input {inputs}/chains.jsonl --output scored.jsonl", "scored.jsonl",
        {"config": CONFIG, "data": DATA},
    ),
    "label outcomes": (
        "label outcomes --verifier {inputs}/judge.py:judge --input {inputs}/answered.jsonl --output judged.jsonl",
        "judged.jsonl",
        {"code": ("inputs/judge.py", "> 1", "> 2"), "data": ("inputs/answered.jsonl", " 3", " 4")},
    ),
    "label teacher": (
        "label teacher --model model --input {inputs}/chains.jsonl --output taught.jsonl", "taught.jsonl",
        {"config": CONFIG, "data": DATA},
    ),
    "search": (
        "search {inputs}/method.py:Some --policy {inputs}/policy.json --model model --input {inputs}/problems.jsonl"
        " --budget 1000 --at-once 2 --output found.jsonl", "found.jsonl",
        {"code": ("inputs/method.py", "ROOT, 4", "ROOT, 3"),
         "config": CONFIG,
         "data": ("inputs/problems.jsonl", "1+2", "1+1")},
    ),
    "eval suite": (
        "eval suite --model model --suite {inputs}/suite.json --output results", "results",
        {"config": CONFIG, "data": ("inputs/pool.jsonl", " 3", " 4")},
    ),
    "train": (
        "train {inputs}/experiment.py --workdir learnt", "learnt",
        {"data": ("inputs/train.jsonl", '"label": 1', '"label": 0')},
    ),
}  # fmt: skip


class Edited(Commands):
    """Commands whose files are edited, and what became of them."""

    def __init__(self, folder: pathlib.Path):
        super().__init__(folder)
        self.counts = Counter()

    @contextlib.contextmanager
    def edit(self, file: str, before: str, after: str) -> Iterator[None]:
        """Edits a file: its size and time stay."""
        path = self.folder / file
        text, stat = path.read_bytes(), path.stat()
        changed = text.replace(before.encode(), after.encode(), 1)
        assert changed != text and len(changed) == len(text), file
        path.write_bytes(changed)
        os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
        try:
            yield
        finally:
            path.write_bytes(text)

    def clear(self, output: str) -> None:
        for path in self.run.glob(f"{output}*"):
            shutil.rmtree(path) if path.is_dir() else path.unlink()

    def whole(self, name: str, kind: str) -> Undisturbed | None:
        """Keeps what the command writes undisturbed in `FOLDER/whole/NAME/KIND`."""
        words, output, _ = COMMANDS[name]
        self.clear(output)
        status, said = self.start(words)
        assert status == 0, f"{name}, {kind}: {said[-3000:]}"
        kept = self.folder / "whole" / name / kind / output
        kept.parent.mkdir(parents=True)
        (shutil.copytree if (self.run / output).is_dir() else shutil.copy)(self.run / output, kept)
        return Undisturbed(self.measured(said), set())

    def lost(self, name: str, kind: str) -> int:
        """Returns how many bytes the output differs by from the undisturbed one of an edit."""
        output = COMMANDS[name][1]
        return differing(self.folder / "whole" / name / kind / output, self.run / output)

    def round(self, name: str, kind: str, point: tuple[str, int, float]) -> None:
        words, output, edits = COMMANDS[name]
        self.clear(output)
        killed, _ = self.start(words, *point)
        self.counts["kills"] += killed == -signal.SIGKILL
        self.counts["finished before the kill"] += killed == 0
        with self.edit(*edits[kind]):
            status, said = self.start(words)
            if status == 0:
                self.counts["anew"] += 1
                self.counts["stale"] += self.lost(name, kind) > 0
            else:
                self.counts["refused"] += 1
                told = said.strip().splitlines()[-1:]
                assert status == 2 and ("another" in said or "changed" in said), (name, kind, point, told)
                final = self.run / output
                if final.is_file():  # it was whole before the edit
                    self.counts["stale"] += self.lost(name, "none") > 0
        again, said = self.start(words)
        if status == 0:
            self.counts["refused afterwards"] += again == 2
            if again == 0:  # nothing of the edited run may be left
                self.counts["stale"] += self.lost(name, "none") > 0
        else:
            assert again == 0, (name, kind, point, said[-3000:])
            self.counts["differing_bytes"] += self.lost(name, "none")


def storm(folder: pathlib.Path, kills: int, seed: int) -> dict[str, int]:
    """Kills and edits until there were `kills`; returns the counts. A storm in the same folder goes on."""
    counts = folder / "counts.json"
    with serving(script) as url:
        if not (folder / "inputs").exists():
            make_inputs(folder / "inputs", url)
        policy = folder / "inputs" / "policy.json"
        policy.write_text(json.dumps(json.loads(policy.read_text()) | {"url": url}))
        answered = [chain | {"answer": "3"} for chain in read_records(folder / "inputs" / "chains.jsonl")]
        write_records(folder / "inputs" / "answered.jsonl", answered)
        (folder / "inputs" / "judge.py").write_text(JUDGE)
        (folder / "inputs" / "method.py").write_text(METHOD)
        commands = Edited(folder)
        shutil.rmtree(folder / "whole", ignore_errors=True)
        experiment = folder / "inputs" / "experiment.json"
        experiment.write_text(
            experiment.read_text().replace(str(folder / "run" / "prepared"), str(folder / "inputs/train.jsonl"))
        )
        shutil.rmtree(folder / "run" / "model", ignore_errors=True)
        status, said = commands.start("train {inputs}/experiment.py --workdir model")
        assert status == 0, said[-3000:]
        points = {}
        for name, (_, _, edits) in COMMANDS.items():
            points[name] = commands.whole(name, "none")
            for kind, edit in edits.items():
                with commands.edit(*edit):
                    commands.whole(name, kind)
        if counts.exists():
            commands.counts.update(json.loads(counts.read_text()))
        rng = random.Random(seed + commands.counts["kills"])  # one that was stopped goes on with other points
        while commands.counts["kills"] < kills:
            name = rng.choice(list(COMMANDS))
            kind = rng.choice(list(COMMANDS[name][2]))
            commands.round(name, kind, points[name].point(rng))
            counts.write_text(json.dumps(commands.counts))
            print(json.dumps(commands.counts | {"after": [name, kind]}), flush=True)
        return dict(commands.counts)
