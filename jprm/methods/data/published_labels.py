"""Step labels as other projects publish them: RLHFlow, ER-PRM, MATH-APS, VersaPRM, ActPRM, GenPRM and UltraInteract.

The layouts are those that code for these files reads or writes; where a reader had to decide, its docstring says what.
None of the files is part of jprm. `columns` (`readers.py`) reads many more.
"""

from __future__ import annotations

import ast
import dataclasses
import re
from collections.abc import Iterator
from typing import Any, Literal

from jprm.methods.data.reader import NoOptions, Reader, Record, take
from jprm.tree import RecordError

_TAG = "ки"
_FIRST = re.compile(r"Step 1\s*:")


def _kept(item: dict, *keys: str) -> Record:
    """Returns the item's other keys, without those that a chain gives another meaning."""
    gone = {*keys, "problem", "steps", "labels", "samples", "nodes", "semantics", "prompt", "completions", "messages"}
    return {key: value for key, value in item.items() if key not in gone}


def _parted(text: str, where: str, field: str) -> tuple[str, str]:
    """Returns problem and first step of a text: at the last "Step 1:", else at the last blank line."""
    starts = [match.start() for match in _FIRST.finditer(text)]
    problem, step = (text[: starts[-1]], text[starts[-1] :]) if starts else text.strip().rpartition("\n\n")[::2]
    if not problem.strip() or not step.strip():
        raise RecordError(where, field, "has no 'Step 1:' and no blank line before a first step", "Is this the source?")
    return problem.strip(), step.strip()


def _turns(item: Any, where: str) -> list[tuple[str, str]]:
    turns = take(item, "conversations", list, where)
    return [
        (
            take(turn, "role", str, where, f"conversations[{i}]."),
            take(turn, "content", str, where, f"conversations[{i}]."),
        )
        for i, turn in enumerate(turns)
    ]


def _dialogue(item: Any, where: str, reply: str) -> tuple[list[str], list[str]]:
    """Returns the user's turns and the assistant's, which take turns; a system message before them is left out."""
    turns = [turn for turn in _turns(item, where) if turn[0] != "system"]
    if not turns or len(turns) % 2 or [role for role, _ in turns] != ["user", "assistant"] * (len(turns) // 2):
        raise RecordError(
            where, "conversations", f"are not turns of a user with a step and {reply}", "Is this the source?"
        )
    return [text for role, text in turns if role == "user"], [text for role, text in turns if role == "assistant"]


# ---- RLHFlow (Xiong et al. 2024, RLHF-Reward-Modeling/math): Mistral- and Deepseek-PRM-Data.


def parse_rlhflow(item: Any, where: str, options: NoOptions) -> Iterator[Record]:
    """Yields {"conversations"}: a user's turn for each step, the first with the problem before it, answered by + or -.

    The problem ends at "Step 1:" (the Mistral data), else at the last blank line (the Deepseek data, whose steps hold
    none). Labels are of Monte Carlo rollouts: semantics `value`.
    """
    steps, signs = _dialogue(item, where, "an assistant's + or -")
    problem, first = _parted(steps[0], where, "conversations[0].content")
    for i, sign in enumerate(signs):
        if sign.strip() not in ("+", "-"):
            reason = f"is {sign[:40]!r}, neither + nor -"
            raise RecordError(where, f"conversations[{2 * i + 1}].content", reason, "Is this the source?")
    labels = [float(sign.strip() == "+") for sign in signs]
    chain = {"problem": problem, "steps": [first, *(step.strip() for step in steps[1:])], "labels": labels}
    yield chain | {"semantics": "value"} | _kept(item, "conversations")


# ---- ER-PRM (Zhang et al. 2024, arXiv 2412.11006): the output of MCTS/convert_autoregressive.py.


def parse_er_prm(item: Any, where: str, options: NoOptions) -> Iterator[Record]:
    """Yields {"text", "value"}: problem and steps, `ки` after each or between them, and a number for each step.

    The numbers are rewards under entropy regularisation, 0 to 1: semantics `value`. Train on them as they are (target
    `soft`), since `entropy` would regularise again.
    """
    text, values = take(item, "text", str, where), take(item, "value", list, where)
    pieces = [piece.strip() for piece in text.split(_TAG)]
    pieces = pieces if pieces[-1] else pieces[:-1]
    if not pieces or not all(pieces) or len(values) > len(pieces):
        reason = f"has {len(values)} numbers for {len(pieces)} steps between the tags {_TAG!r}"
        raise RecordError(where, "value", reason, "A step without a number has none after it either.")
    problem, first = _parted(pieces[0], where, "text")
    labels = [*values, *[None] * (len(pieces) - len(values))]
    yield {"problem": problem, "steps": [first, *pieces[1:]], "labels": labels, "semantics": "value"} | _kept(
        item, "text", "value"
    )


# ---- openr (Wang et al. 2024, arXiv 2410.09671): MATH-APS, states of OmegaPRM's trees.


def parse_math_aps(item: Any, where: str, options: NoOptions) -> Iterator[Record]:
    """Yields {"question", "process", "label": ["+"]}: a prefix of a chain, whose last step has the label.

    Steps are the paragraphs of `process`; a step tag at its end is dropped. + stands for a Monte Carlo value above one
    half: semantics `value`. Prefixes of one problem are records of their own.
    """
    text, signs = take(item, "process", str, where), take(item, "label", list, where)
    steps = [step.strip() for step in re.split(r"\n{2,}", text.replace(_TAG, "")) if step.strip()]
    if len(signs) != 1 or signs[0] not in ("+", "-") or not steps:
        raise RecordError(where, "label", f"is {str(signs)[:60]}, not one + or - for a process", "Is this the source?")
    labels = [None] * (len(steps) - 1) + [float(signs[0] == "+")]
    problem = take(item, "question", str, where)
    yield {"problem": problem, "steps": steps, "labels": labels, "semantics": "value"} | _kept(
        item, "question", "process", "label"
    )


# ---- VersaPRM (Zeng et al. 2025, arXiv 2502.06737): MMLU-Pro-CoT-Train-Labeled.


def parse_versa_prm(item: Any, where: str, options: NoOptions) -> Iterator[Record]:
    """Yields {"question", "chain_of_thoughts", "labels"}, the two lists as such or as text: 1 is correct, -1 is not.

    The answer's correctness is `correct` where `parsed_answer_correctness` says it. Other keys are kept.
    """
    steps, labels = _list(item, "chain_of_thoughts", where), _list(item, "labels", where)
    if len(steps) != len(labels) or not {*map(str, labels)} <= {"1", "-1"}:
        reason = f"are {str(labels)[:60]}, not 1 or -1 for each of {len(steps)} steps"
        raise RecordError(where, "labels", reason, "Is this the source?")
    chain: Record = {"problem": take(item, "question", str, where), "steps": steps}
    chain["labels"] = [float(str(label) == "1") for label in labels]
    if isinstance(item.get("parsed_answer_correctness"), bool):
        chain["correct"] = item["parsed_answer_correctness"]
    yield chain | {"semantics": "correctness"} | _kept(item, "question", "chain_of_thoughts", "correct")


def _list(item: Any, key: str, where: str) -> list:
    """Returns a list that may be written as text, as Python writes it. Nothing is executed."""
    value = take(item, key, (list, str), where)
    if isinstance(value, str):
        try:
            value = ast.literal_eval(value)
        except (ValueError, SyntaxError, MemoryError, RecursionError):
            value = None
    if not isinstance(value, list):
        raise RecordError(where, key, "is a text that holds no list", "Is this the source?")
    return value


# ---- ActPRM (Duan et al. 2025, arXiv 2504.10559): ActPRMData, as its pool_based_active_learning.py reads it.


@dataclasses.dataclass(frozen=True)
class ActPrmOptions:
    """Attributes:
    labels: which of the two lists are the labels.
    """

    labels: Literal["hard_labels", "soft_labels"] = "hard_labels"


def parse_act_prm(item: Any, where: str, options: ActPrmOptions) -> Iterator[Record]:
    """Yields {"question", "steps", "hard_labels" or "soft_labels"}: steps beyond the labels have none."""
    steps, labels = take(item, "steps", list, where), take(item, options.labels, list, where)
    if len(labels) > len(steps):
        raise RecordError(
            where, options.labels, f"has {len(labels)} labels for {len(steps)} steps", "Is this the source?"
        )
    chain = {"problem": take(item, "question", str, where), "steps": steps}
    chain |= {"labels": [*labels, *[None] * (len(steps) - len(labels))], "semantics": "correctness"}
    yield chain | _kept(item, "question", "correct")


# ---- GenPRM (Zhao et al. 2025, arXiv 2504.00891): GenPRM-MATH-Data, conversations of critiques.

_QUESTION = re.compile(r"^\s*Question:\s*")
_PARAGRAPH = re.compile(r"^\s*Paragraph \d+:\s*")
_VERDICT = re.compile(r"\\boxed\{\s*(Yes|No)\s*\}")


def parse_genprm(item: Any, where: str, options: NoOptions) -> Iterator[Record]:
    """Yields {"conversations"}: a user's turn for each step, answered by a critique whose last box is Yes or No.

    The first turn is "Question: ", the problem, a blank line and the first step. Critiques are left out: `jprm label
    critique` keeps those of a judge. Labels are 1 for Yes and 0 for No.
    """
    steps, critiques = _dialogue(item, where, "a critique")
    problem, first = _parted(_QUESTION.sub("", steps[0]), where, "conversations[0].content")
    verdicts_of = [_VERDICT.findall(critique) for critique in critiques]
    if not all(verdicts_of):
        at = next(i for i, verdicts in enumerate(verdicts_of) if not verdicts)
        raise RecordError(
            where, f"conversations: critique {at + 1}", "has no \\boxed{Yes} or \\boxed{No}", "Is it whole?"
        )
    labels = [float(verdicts[-1] == "Yes") for verdicts in verdicts_of]
    texts = [_PARAGRAPH.sub("", step).strip() for step in (first, *steps[1:])]
    yield {"problem": problem, "steps": texts, "labels": labels, "semantics": "correctness"} | _kept(
        item, "conversations"
    )


# ---- UltraInteract (Yuan et al. 2024, arXiv 2404.02078): pairs of a correct and an incorrect chain.

_STEP = re.compile(r"(?m)^(?=Step \d+\s*:)")


def parse_ultra_interact(item: Any, where: str, options: NoOptions) -> Iterator[Record]:
    """Yields {"trajectory", "chosen", "rejected"} as a pool of two samples, which are correct and incorrect.

    The problem is the one turn before them. A trajectory of several turns, with a tool's answers, is refused: it is no
    chain. Steps begin with "Step 1:", or a sample is one step.
    """
    turns = take(item, "trajectory", list, where)
    if len(turns) != 1:
        reason = f"has {len(turns)} turns, with answers of tools or people"
        raise RecordError(where, "trajectory", reason, "Leave them out: --on-error skip copies them beside the output.")
    problem = take(turns[0], "value", str, where, "trajectory[0].")
    texts = [take(item, key, str, where) for key in ("chosen", "rejected")]
    samples = [[step.strip() for step in _STEP.split(text) if step.strip()] for text in texts]
    if not all(samples):
        raise RecordError(where, "chosen", "or rejected is blank", "Is this the source?")
    pair = [{"steps": steps, "correct": right} for steps, right in zip(samples, (True, False), strict=True)]
    yield {"problem": problem, "samples": pair} | _kept(item, "trajectory", "chosen", "rejected", "answer")


ACTPRM = Reader(parse_act_prm, ActPrmOptions)
ER_PRM = Reader(parse_er_prm)
GENPRM_MATH = Reader(parse_genprm)
MATH_APS = Reader(parse_math_aps)
RLHFLOW = Reader(parse_rlhflow)
ULTRA_INTERACT = Reader(parse_ultra_interact)
VERSAPRM = Reader(parse_versa_prm)
