"""How often final answers are judged wrongly, by the way that a response ends: the figures of answers.md.

    JPRM_DATA=DATA python experiments/studies/answers.py [--package CHECKOUT] [--pools NAME ...]

A response is labelled by a rule only if its end leaves no doubt (`stated`), and else as it was read (answer_labels.json
of the tests). `--package` judges with the answers of another checkout, e.g. of an older commit.
"""

from __future__ import annotations

import argparse
import collections
import gzip
import json
import os
import pathlib
import random
import re
import signal
import sys
from collections.abc import Iterator
from typing import Any

HERE = pathlib.Path(__file__).resolve().parent
LABELS = HERE.parents[1] / "tests/methods/answers/answer_labels.json"
OWN = ("own_train", "own_test", "coder15")
SHARED = ("qwen_gsm8k_n32", "qwen_math500_n32", "gsm8k_chatgpt_n19", "gsm8k_llama7b_n19", "gsm8k_llama13b_n19")
SECONDS = 4
"""After which an extraction counts as none: older versions take exponential time on a list of numbers."""

_NUMBER = r"-?\d[\d,]*(?:\.\d+)?"
_BOX = re.compile(r"\\boxed\s*\{((?:[^{}]|\{(?:[^{}]|\{[^{}]*\})*\})*)\}")
_FORMULA = re.compile(r"\\frac|\\sqrt|[a-z]\s*[=^]|\d\s?[a-z]\b|/")
_LAST_SIDE = re.compile(rf"=\s*({_NUMBER})(?:\s+[a-z ]+)?[.!]?\s*\Z")


def pool(name: str, data: pathlib.Path) -> Iterator[tuple[int, int, str, str]]:
    """Yields (problem, sample, true answer, text) of the distinct responses of a pool, e.g. `shared/qwen_gsm8k_n32`."""
    where, _, stem = name.partition("/")
    folder = HERE.parent / "real/pools" if where == "own" else data / "pools"
    path = next(path for path in (folder / f"{stem}.jsonl.gz", folder / f"{stem}.jsonl") if path.exists())
    lines = (gzip.open(path, "rt") if path.suffix == ".gz" else path.open(encoding="utf-8")).readlines()
    truths = _math500(data) if "math500" in stem else {}  # the pool's own answers of 99 problems are broken
    for i, record in enumerate(map(json.loads, lines)):
        seen = set()
        for j, sample in enumerate(record["samples"]):
            text = sample.get("response") or "\n".join(sample["steps"])
            if text not in seen:
                seen.add(text)
                yield i, j, _plain(truths.get(record["problem"], record["answer"])), text


def _math500(data: pathlib.Path) -> dict[str, str]:
    lines = (data / "math500/test.jsonl").read_text(encoding="utf-8").splitlines()
    return {record["problem"]: record["answer"] for record in map(json.loads, lines)}


def _plain(answer: Any) -> str:
    return str(answer).removesuffix(".0")


def stated(text: str) -> tuple[str, str | None]:
    """Returns how a response ends and the answer that it states for certain, None if a person has to read it."""
    text = re.sub(r"<<[^<>]*>>", "", text.strip())
    if boxes := {box.strip() for box in _BOX.findall(text)}:
        return "box", boxes.pop() if len(boxes) == 1 else None
    last = re.sub(r"^\s*[A-Z]\d+:", "", text.rpartition("\n")[2])
    plain = last.replace("\\$", "").replace("$", "").replace("\\(", " ").replace("\\)", " ")
    if side := _LAST_SIDE.search(plain):
        return "equation", side[1]
    numbers = re.findall(rf"(?<![\w.]){_NUMBER}", plain)
    if _FORMULA.search(plain):
        return "formula", None
    bold = [number for span in re.findall(r"\*\*(.+?)\*\*", plain) for number in re.findall(_NUMBER, span)]
    if len(bold) == 1:
        return "bold number", bold[0]
    if len({number.strip(",") for number in numbers}) == 1 and last.rstrip()[-1:] in ".!*)":
        return "one number", numbers[0]
    return ("several numbers", None) if numbers else ("no number", None)


def label(truth: str, answer: str | None) -> bool | None:
    """Returns whether the stated answer is the true one; None unless both are plain numbers or the same text."""
    if answer is None:
        return None
    left, right = (re.sub(r"\\text\{(.*?)\}", r"\1", side) for side in (truth, answer))
    left, right = (re.sub(r"[,$\s]|\\[!,$]", "", side).rstrip(".") for side in (left, right))
    if left == right:
        return True
    numbers = [re.fullmatch(r"-?\d+(?:\.\d+)?", side) for side in (left, right)]
    return float(left) == float(right) if all(numbers) else None


def judged(name: str, data: pathlib.Path, read: dict[tuple[int, int], bool]) -> list[tuple[str, int, bool, bool]]:
    """Returns (ending, problem, label, verdict) of the labelled responses of a pool."""
    from jprm.methods.answers import equivalent, extract_answer

    rows = []
    for i, j, truth, text in pool(name, data):
        ending, answer = stated(text)
        right = label(truth, answer)
        if (i, j) in read:
            ending, right = f"{ending}, read" if right is None else ending, read[i, j]
        if right is None:
            continue
        try:
            signal.alarm(SECONDS)
            extracted = extract_answer(text)
        except TimeoutError:
            extracted = None
        finally:
            signal.alarm(0)
        rows.append((ending, i, right, equivalent(truth, extracted)))
    return rows


def rates(rows: list[tuple[str, int, bool, bool]]) -> str:
    """Returns both error rates as text: right called wrong, and wrong called right."""
    right = [verdict for *_, truth, verdict in rows if truth]
    wrong = [verdict for *_, truth, verdict in rows if not truth]
    cells = [(right.count(False), len(right)), (wrong.count(True), len(wrong))]
    return " | ".join(f"{errors} of {n}{f' ({errors / n:.2%})' if n else ''}" for errors, n in cells)


def interval(rows: list[tuple[str, int, bool, bool]], truth: bool, draws: int = 1000) -> str:
    """Returns the 95 % interval of one error rate, by a bootstrap over problems."""
    counts: dict[int, list[int]] = collections.defaultdict(lambda: [0, 0])
    for _, problem, right, verdict in rows:
        if right is truth:
            counts[problem][0] += verdict is not truth
            counts[problem][1] += 1
    rng, cells = random.Random(0), list(counts.values())
    sums = [[sum(column) for column in zip(*rng.choices(cells, k=len(cells)), strict=True)] for _ in range(draws)]
    low, *_, high = sorted(errors / n for errors, n in sums)[draws // 40 : draws - draws // 40]
    return f"[{low:.2%}, {high:.2%}]"


def _expired(*_: Any) -> None:
    raise TimeoutError


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--package", type=pathlib.Path, help="a checkout whose answers judge")
    parser.add_argument("--pools", nargs="+", default=[*(f"own/{n}" for n in OWN), *(f"shared/{n}" for n in SHARED)])
    args = parser.parse_args()
    if args.package:
        sys.path.insert(0, str(args.package))
    signal.signal(signal.SIGALRM, _expired)
    data, read = pathlib.Path(os.environ["JPRM_DATA"]), json.loads(LABELS.read_text(encoding="utf-8"))
    print("| pool | ending | right, called wrong | wrong, called right |\n|---|---|---|---|")
    for name in args.pools:
        labels = read.get(name, {})
        of = {(i, j): word == "right" for word in ("right", "wrong") for i, j in labels.get(word, [])}
        rows = judged(name, data, of)
        for ending in sorted({row[0] for row in rows}):
            print(f"| {name} | {ending} | {rates([row for row in rows if row[0] == ending])} |")
        both = " | ".join(interval(rows, truth) for truth in (True, False))
        print(f"| {name} | all | {rates(rows)} |\n| | 95 % | {both} |", flush=True)


if __name__ == "__main__":
    main()
