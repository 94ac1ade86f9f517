"""How often each rule of `jprm.steps` finds the steps that people, or a model's own layout, marked.

    python -m experiments.segmentation.agreement --data ../shared/data

The steps of published chains are joined by a blank line, a newline or a space, and split again. A boundary counts as
found where a rule begins a step at the very character at which a published step begins.
"""

from __future__ import annotations

import json
import pathlib

import tyro

from jprm import steps

JOINS = {"blank line": "\n\n", "newline": "\n", "space": " "}


def main(data: pathlib.Path) -> None:
    """Print the table as Markdown.

    Args:
        data: The folder with prm800k/ and processbench/.
    """
    sources = {
        "PRM800K phase 2": _chains(data / "prm800k/phase2_sample.jsonl"),
        "ProcessBench GSM8K": _chains(data / "processbench/gsm8k.json"),
        "ProcessBench MATH": _chains(data / "processbench/math.json"),
    }
    print("| chains | joined by | rule | precision | recall | F1 | chains whole |\n|---|---|---|---|---|---|---|")
    for source, chains in sources.items():
        for join, between in JOINS.items():
            for rule in ("auto", "paragraphs", "lines", "sentences"):
                if (figures := agreement(chains, between, rule))["found"]:
                    print(
                        f"| {source} ({len(chains):,}) | {join} | {rule} | {figures['precision']:.1f} |"
                        f" {figures['recall']:.1f} | {figures['f1']:.1f} | {figures['whole']:.1f} |"
                    )


def agreement(chains: list[list[str]], between: str, rule: str) -> dict[str, float]:
    """Returns precision, recall and F1 of boundaries, and the proportion of chains with all and only theirs, in %."""
    predicted = true = both = whole = 0
    for chain in chains:
        marked, ends = (
            _boundaries([step + between for step in chain]),
            _boundaries(steps.split(between.join(chain), rule)),
        )
        predicted, true, both = predicted + len(ends), true + len(marked), both + len(ends & marked)
        whole += ends == marked
    precision, recall = 100 * both / max(predicted, 1), 100 * both / max(true, 1)
    f1 = 2 * precision * recall / max(precision + recall, 1e-9)
    return {"found": predicted, "precision": precision, "recall": recall, "f1": f1, "whole": 100 * whole / len(chains)}


def _boundaries(pieces: list[str]) -> set[int]:
    at, places = 0, set()
    for piece in pieces[:-1]:
        at += len(piece)
        places.add(at)
    return places


def _chains(path: pathlib.Path) -> list[list[str]]:
    """Returns every chain of two or more steps, without white space around the steps."""
    text = path.read_text()
    records = json.loads(text) if text.startswith("[") else [json.loads(line) for line in text.splitlines()]
    chains = [[step.strip() for step in record["steps"] if step.strip()] for record in records]
    return [chain for chain in chains if len(chain) > 1]


if __name__ == "__main__":
    tyro.cli(main)
