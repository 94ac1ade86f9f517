r"""`JudgePrompt`: the record of what a judge is asked about a chain, and how its critique is read.

A policy file's section `judge` names one of `PROMPTS`, or writes its own:

    "judge": {"prompt": {"like": "plain", "name": "mine", "text": "{problem}\n{steps}\nIs step {number} true?"}}
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Mapping, Sequence
from typing import Literal, get_args

Asks = Literal["step", "steps", "first_error"]

_FIELD = re.compile(r"\{(problem|steps|step|number|index|critique)\}")


@dataclasses.dataclass(frozen=True)
class JudgePrompt:
    r"""What a judge is asked and how its verdicts are found.

    Attributes:
      name: of the record.
      text: the question, with {problem}, {steps} and perhaps {number}, the number of the last step from 1.
      asks: `step`: one critique per step, which sees the chain up to it; its last verdict counts. `steps`: one critique
        per chain, with one verdict per step in order, which may end at the first incorrect step. `first_error`: one
        critique per chain, whose last verdict is the index of the first incorrect step from 0, or -1.
      step: how a step is written in {steps}: {step} with {number} (from 1) or {index} (from 0).
      separator: between steps. With {critique} and perhaps {number}, of the step before it, the question is a
        conversation: the first critique of every earlier step is part of it.
      verdict: regular expression whose one group is a verdict.
      correct, incorrect: what the group holds, in any case; not for `first_error`.
      opening: how the critique begins; the policy continues it.
      end: a critique is read up to this text.
      runs_code: whether Python blocks of a critique run in the sandbox. The critique continues after their output.
    """

    name: str
    text: str
    asks: Asks = "step"
    step: str = "Step {number}: {step}"
    separator: str = "\n"
    verdict: str = r"\\boxed\{(?:\\text\{)?([^\\}]*)"  # linear in the text: a box ends at the next backslash
    correct: tuple[str, ...] = ("yes",)
    incorrect: tuple[str, ...] = ("no",)
    opening: str = ""
    end: str = ""
    runs_code: bool = False

    def __post_init__(self):
        if reason := _wrong(self):
            raise ValueError(f"judge prompt {self.name!r}: {reason}")

    @property
    def converses(self) -> bool:
        """Whether a question holds the critiques of the earlier steps."""
        return "{critique}" in self.separator

    def filled(self, problem: str, steps: Sequence[str], critiques: Sequence[str] = ()) -> str:
        """Returns the question about a chain; `critiques` are those of all steps but the last, in a conversation."""
        written = []
        for i, text in enumerate(steps):
            if i:
                said = critiques[i - 1] if self.converses else ""
                written.append(_fill(self.separator, {"critique": said, "number": str(i)}))
            written.append(_fill(self.step, {"step": text, "number": str(i + 1), "index": str(i)}))
        return _fill(self.text, {"problem": problem, "steps": "".join(written), "number": str(len(steps))})


def _fill(template: str, values: Mapping[str, str]) -> str:
    """Returns the template with its fields replaced at once: braces in a problem or a step stay text."""
    return _FIELD.sub(lambda field: values.get(field[1], field[0]), template)


def _wrong(p: JudgePrompt) -> str:
    """Returns what is wrong with a record, "" for nothing."""
    if p.asks not in get_args(Asks):
        return f"asks is {p.asks!r}, not one of {', '.join(get_args(Asks))}"
    if "{problem}" not in p.text or "{steps}" not in p.text:
        return "text must hold {problem} and {steps}"
    if "{step}" not in p.step:
        return "step must hold {step}"
    if p.converses and p.asks != "step":
        return "a separator with {critique} is for asks='step'"
    if p.runs_code and p.opening:
        return "opening must be empty where code runs: write it at the end of text"
    try:
        groups = re.compile(p.verdict).groups
    except re.error as error:
        return f"verdict is no regular expression: {error}"
    if groups != 1:
        return f"verdict has {groups} groups: it needs one, around the verdict"
    words = [*p.correct, *p.incorrect]
    if p.asks != "first_error" and (not p.correct or not p.incorrect or len(set(map(str.lower, words))) < len(words)):
        return "correct and incorrect must hold words, each once"
    return ""


PLAIN = JudgePrompt(
    name="plain",
    text=(
        "Problem:\n{problem}\n\nSolution so far:\n{steps}\n\n"
        "Check step {number}, the last one. Take the earlier steps as given. Explain briefly what the step claims and"
        " whether it follows. Then write \\boxed{Yes} if the step is correct, or \\boxed{No} if it is not."
    ),
)

QWEN_CRITIQUE = JudgePrompt(  # QwenLM/ProcessBench, code/templates/critique_template.txt and code/run_eval.py
    name="qwen-critique",
    text=(
        "The following is a math problem and a solution (split into paragraphs, enclosed with tags and indexed from"
        " 0):\n\n[Math Problem]\n\n{problem}\n\n[Solution]\n\n{steps}\n\nYour task is to review and critique the"
        " solution paragraph by paragraph. Once you identify an error in a paragraph, return the index of the paragraph"
        ' where the earliest error occurs. Otherwise, return the index of -1 (which typically denotes "not found").\n'
        "\nPlease put your final answer (i.e., the index) in \\boxed{}."
    ),
    asks="first_error",
    step="<paragraph_{index}>\n{step}\n</paragraph_{index}>",
    separator="\n\n",
)

THINKPRM = JudgePrompt(  # mukhal/ThinkPRM, utils/helper.py and prm/thinkprm_api.py; Khalifa et al. 2025
    name="thinkprm",
    text=(
        "You are given a math problem and a proposed step-by-step solution:\n\n[Math Problem]\n\n{problem}\n\n"
        "[Solution]\n\n{steps}\n\nReview and critique each step in the proposed solution to determine whether each step"
        " is correct. If the solution is incomplete, only verify the provided steps."
    ),
    asks="steps",
    verdict=r"(?i)\\boxed\{\s*(correct|incorrect)\s*\}",  # other boxes are quoted from the solution
    correct=("correct",),
    incorrect=("incorrect",),
    opening="Let's verify step by step:",
    end="</think>",
)

_ANALYZE = "<analyze>\nLet's analyze the Paragraph {number} step by step: "

GENPRM = JudgePrompt(  # RyanLiu112/GenPRM, src/prm_evaluation/genprm_inference.py and src/example/demo.ipynb
    name="genprm",
    text=(
        "<｜begin▁of▁sentence｜>You are a math teacher. Your task is to review and critique the paragraphs in solution"
        " step by step.<｜User｜>Question: {problem}\n\n{steps}" + _ANALYZE
    ),
    step="{step}",
    separator="<｜Assistant｜>" + _ANALYZE + "{critique}<｜end▁of▁sentence｜><｜User｜>",
    end="</output>",
    runs_code=True,
)

PROMPTS = {prompt.name: prompt for prompt in (PLAIN, QWEN_CRITIQUE, THINKPRM, GENPRM)}


@dataclasses.dataclass(frozen=True, slots=True)
class Verdict:
    """A verdict about a step. `start`, `end`: where a critique states it, None where it follows from an index."""

    correct: bool
    start: int | None = None
    end: int | None = None


def verdicts(prompt: JudgePrompt, text: str, steps: int) -> list[Verdict] | None:
    """Returns the verdicts of a critique about a chain of so many steps; None if it cannot be read.

    For `step` there is one, about the last step. Otherwise they are about the first steps: all of them, or those up to
    the first incorrect one.
    """
    text = text.partition(prompt.end)[0] if prompt.end else text
    found = list(re.finditer(prompt.verdict, text))
    if not found or any(match[1] is None for match in found):
        return None
    if prompt.asks == "first_error":
        index = found[-1][1].strip()
        if not re.fullmatch(r"-1|[0-9]{1,9}", index) or int(index) >= steps:
            return None
        first = int(index)
        return [Verdict(True)] * (steps if first < 0 else first) + [Verdict(False)] * (first >= 0)
    if prompt.asks == "step":
        one = _verdict(prompt, found[-1])
        return one and [one]
    judged: list[Verdict] = []
    for match in found[:steps]:
        one = _verdict(prompt, match)
        if one is None:
            return None
        judged.append(one)
        if not one.correct:
            return judged
    return judged if len(found) == steps else None  # fewer leave steps out, more cannot be told apart


def _verdict(prompt: JudgePrompt, match: re.Match[str]) -> Verdict | None:
    word = match[1].strip().lower()
    if word in map(str.lower, prompt.correct):
        return Verdict(True, *match.span(1))
    return Verdict(False, *match.span(1)) if word in map(str.lower, prompt.incorrect) else None


def probability(verdict: Verdict, text: str, tokens: Sequence[tuple[str, float]]) -> float | None:
    """Returns the probability that the step is correct by the verdict's token; None if there is no such token.

    It is the probability p of the token that begins the verdict, or 1 - p if the verdict is `incorrect`. `tokens` are
    (text, natural logarithm of the probability). White space is not compared: some tokenizers drop it.
    """
    if verdict.start is None:
        return None
    before, word = _bare(text[: verdict.start]), _bare(text[verdict.start : verdict.end])
    at = 0
    for token, logprob in tokens:
        bare = _bare(token)
        if at + len(bare) > len(before):
            rest = bare[len(before) - at :]
            if not (word.startswith(rest) or rest.startswith(word)) or bare[: len(before) - at] != before[at:]:
                return None
            p = min(1.0, math.exp(logprob))
            return p if verdict.correct else 1.0 - p
        if not before.startswith(bare, at):
            return None
        at += len(bare)
    return None


def _bare(text: str) -> str:
    return "".join(text.split())
