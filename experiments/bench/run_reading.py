"""How often a PRM and judges read an agent's run: characters read over characters of the run.

    python -m experiments.bench.run_reading FOLDER

Counts only; no model runs. FOLDER holds who_and_when.jsonl, tau_bench_gpt4o_airline.jsonl and agentrx/ as
published; a synthetic run has 300 turns and 1 MB. A token is a byte here, so a context of 32,000 stands for 8,000 usual
tokens. A PRM's count has the head again in every window; a judge's count is the text of all questions.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import random
import string
from collections.abc import Sequence

import tokenizers

from jprm.methods.data.readers import find
from jprm.methods.judge.critiques import PLAIN, THINKPRM
from jprm.methods.judge.judge import Judge, characters
from jprm.methods.judge.window import Window
from jprm.methods.messages.tokens import turns_of, windows_of
from jprm.methods.policy.protocol import Prefix, Sample
from jprm.tokenizer import JsonTokenizer
from jprm.tree import ReasoningTree, tree_of

CONTEXTS = (32_000, 128_000)
WINDOW = Window(turns=12_000, summary=1500)


class Yes:
    """A policy that calls every step correct."""

    name = "yes"

    def sample(self, prefixes: Sequence[Prefix], n: int, *, until: str, seed: int) -> list[list[Sample]]:
        return [[Sample((r"\boxed{Yes}",), 1, "stop")] * n for _ in prefixes]


JUDGES = {
    "judge per turn": Judge(Yes(), PLAIN),
    "judge per turn, window": Judge(Yes(), PLAIN, window=WINDOW),
    "judge of several turns, window": Judge(Yes(), THINKPRM, window=WINDOW),
}


def bytes_tokenizer() -> JsonTokenizer:
    """Returns a tokenizer with a token per byte."""
    letters = {letter: i for i, letter in enumerate(sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet()))}
    inner = tokenizers.Tokenizer(tokenizers.models.BPE(letters, []))
    inner.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return JsonTokenizer(inner, None, None)


def read_by_prm(tree: ReasoningTree, tokenizer: JsonTokenizer, context: int) -> tuple[int, int]:
    """Returns (tokens read, windows)."""
    whole = len(turns_of(tree, tokenizer).ids[-1])
    windows = [whole] if whole <= context else [len(w.turns.ids[-1]) for w in windows_of(tree, tokenizer, context)]
    return sum(windows), len(windows)


def synthetic(turns: int = 300, size: int = 1_000_000) -> dict:
    """Returns a run with calls and results of random words; every tenth turn has a result ten times as long."""
    draw = random.Random(0)
    words = ["".join(draw.choices(string.ascii_lowercase, k=draw.randint(2, 9))) for _ in range(2000)]

    def text(length: int) -> str:
        return " ".join(draw.choices(words, k=length // 6))[:length]

    messages = [{"role": "system", "content": text(3000)}, {"role": "user", "content": text(1000)}]
    unit = size // turns // 2
    for turn in range(turns):
        call = {"id": f"c{turn}", "type": "function", "function": {"name": "shell", "arguments": {"cmd": text(60)}}}
        messages.append({"role": "assistant", "content": text(unit // 2), "tool_calls": [call]})
        length = 8 * unit if turn % 10 == 9 else 2 * unit // 3
        messages.append({"role": "tool", "tool_call_id": call["id"], "content": text(length)})
    return {"messages": messages}


def runs_of(folder: pathlib.Path) -> dict[str, list[ReasoningTree]]:
    """Returns the runs of every data set."""
    truths, tau, magentic = (folder / "agentrx" / name for name in ("ground_truth", "tau_dataset_full.json",
                                                                    "magentic_dataset"))  # fmt: skip
    files = {
        "Who&When": [("who_and_when", folder / "who_and_when.jsonl", {})],
        "AgentRx": [
            ("agentrx", truths / "tau_ground_truth.json", {"runs": str(tau)}),
            ("agentrx", truths / "magentic_one_ground_truth.json", {"runs": str(magentic)}),
        ],
        "tau-bench, airline": [("tau_bench", folder / "tau_bench_gpt4o_airline.jsonl", {})],
    }
    read = {
        name: [tree_of(record) for reader, path, options in parts for _, record in find(reader).read(path, **options)]
        for name, parts in files.items()
    }
    return read | {"synthetic": [tree_of(synthetic())]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=pathlib.Path)
    runs, tokenizer = runs_of(parser.parse_args().folder), bytes_tokenizer()
    names = [f"PRM, context {context:,}" for context in CONTEXTS] + list(JUDGES)
    print(f"| runs | number | turns | characters | {' | '.join(names)} |\n|{'---|' * (4 + len(names))}")
    counts = {}
    for name, trees in runs.items():
        size, turns = sum(map(characters, trees)), sum(len(tree.steps) for tree in trees)
        read, windows = [], []
        for context in CONTEXTS:
            pairs = [read_by_prm(tree, tokenizer, context) for tree in trees]
            read.append(sum(tokens for tokens, _ in pairs))
            windows.append(sum(count for _, count in pairs))
        for judge in JUDGES.values():
            read.append(sum(judge.judgements([tree])[0].report["sent"] for tree in trees))
        shares = " | ".join(f"{count / size:.2f}" for count in read)
        print(f"| {name} | {len(trees):,} | {turns:,} | {size:,} | {shares} |", flush=True)
        counts[name] = {"characters": size, "turns": turns, "read": read, "windows": windows}
    print(json.dumps(counts))


if __name__ == "__main__":
    main()
