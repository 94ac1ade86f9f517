r"""Critiques: the question about a chain, the policy's answer, and its reading as step scores.

In a policy file, the section `judge` names one of `PROMPTS` or defines a prompt:

    "judge": {"prompt": {"like": "plain", "name": "mine", "text": "{problem}\n{steps}\nIs step {number} true?"}}

Code in a critique runs in the sandbox, and the policy continues after its output.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal, get_args

from jprm.methods.answers import end_of_thoughts
from jprm.methods.formats.chat_template import guarded
from jprm.methods.policy.protocol import LogProb, Policy, Prefix, Sample
from jprm.methods.policy.sample_cache import PolicyError
from jprm.methods.verify.programs import printed
from jprm.tree import as_written

Asks = Literal["step", "steps", "first_error"]

_FIELD = re.compile(r"\{(problem|steps|before|last|step|number|index|critique)\}")


_BOXED = r"\\boxed\s{0,9}\{\s{0,9}(?:\\(?:text|math)[a-z]{0,6}\s?\{\s?)?"
"""A box, with or without a font in it."""


@dataclasses.dataclass(frozen=True)
class JudgePrompt:
    """The question to a judge, and how its verdicts are read. Raises ValueError if the fields do not fit together.

    Attributes:
      name: of the prompt.
      text: the question, with {problem}, {steps} and optionally {number}, the number of the last step from 1. Instead
        of {steps} it may have {before} and {last}: the earlier steps, and the last one.
      none_before: value of {before} if there is no earlier step.
      asks: `step`: one critique per step, shown the chain up to it; its last verdict counts. `steps`: one critique per
        chain, with one verdict per step in order; it may end at the first incorrect step. `first_error`: one critique
        per chain; its last verdict is the index of the first incorrect step from 0, or -1.
      step: format of a step in {steps}: {step} with {number} (from 1) or {index} (from 0), e.g. `Step {number}:
        {step}`.
      separator: text between steps. If it contains {critique} (and optionally {number}, of the step before it), the
        question is a conversation with the first critique of every earlier step.
      verdict: regular expression with one group, around the verdict.
      correct, incorrect: verdict words, in any case; unused for `first_error` and scales.
      scale: if not 0, the verdict is a whole number from 1 to this; at most 9, so that it is a single token. A
        critique's score is (E - 1) / (scale - 1). E is the expectation over the numbers' tokens if the policy reports
        alternatives (`top_logprobs`), else the written number (Liu et al. 2023, G-Eval, arXiv 2303.16634).
      opening: the critique's beginning, which the policy continues.
      end: the critique is read up to this text.
      runs_code: run Python blocks of a critique in the sandbox; the critique continues after their output.
    """

    name: str
    text: str
    asks: Asks = "step"
    none_before: str = ""
    step: str = "Step {number}: {step}"
    separator: str = "\n"
    verdict: str = _BOXED + r"([^\\{}]*)"  # linear in the text: a box ends at the next backslash or brace
    correct: tuple[str, ...] = ("yes",)
    incorrect: tuple[str, ...] = ("no",)
    scale: int = 0
    opening: str = ""
    end: str = ""
    runs_code: bool = False

    def __post_init__(self):
        if reason := _wrong(self):
            raise ValueError(f"judge prompt {self.name!r}: {reason}")

    @property
    def converses(self) -> bool:
        """Whether the question contains earlier steps' critiques."""
        return "{critique}" in self.separator

    def filled(self, problem: str, steps: Sequence[str], critiques: Sequence[str] = ()) -> str:
        """Returns the question about a chain. `critiques`, for a conversation, are those of all steps but the last.

        Other prompts ignore them; a conversation raises IndexError if there are too few.

        Problem and steps are data: control tokens in them are disarmed (`guarded`), or a step could write the judge's
        turn.
        """
        written, problem = [], guarded(problem)
        for i, text in enumerate(map(guarded, steps)):
            if i:
                critique = critiques[i - 1] if self.converses else ""
                written.append(_fill(self.separator, {"critique": critique, "number": str(i)}))
            written.append(_fill(self.step, {"step": text, "number": str(i + 1), "index": str(i)}))
        values = {"problem": problem, "steps": "".join(written), "number": str(len(steps))}
        values |= {"before": "".join(written[:-2]) or self.none_before, "last": written[-1] if written else ""}
        return _fill(self.text, values)


def _fill(template: str, values: Mapping[str, str]) -> str:
    """Substitutes all fields at once, so that braces in a problem or step stay text."""
    return _FIELD.sub(lambda field: values.get(field[1], field[0]), template)


def _wrong(p: JudgePrompt) -> str:
    """Returns the reason why a prompt is invalid, or ""."""
    if p.asks not in get_args(Asks):
        return f"asks is {p.asks!r}, not one of {', '.join(get_args(Asks))}"
    parted = "{before}" in p.text and "{last}" in p.text
    if "{problem}" not in p.text or not ("{steps}" in p.text or parted):
        return "text must hold {problem} and {steps}"
    if parted and (p.asks != "step" or p.converses):
        return "{before} and {last} are for asks='step' without {critique}"
    if "{step}" not in p.step:
        return "step must hold {step}"
    if p.scale and (p.asks != "step" or not 2 <= p.scale <= 9):
        return f"scale is {p.scale} and asks is {p.asks!r}: a scale is 2 to 9, of a prompt that asks about a step"
    if p.converses and p.asks != "step":
        return "a separator with {critique} is for asks='step'"
    if p.runs_code and p.opening:
        return "opening must be empty where code runs: write it at the end of text"
    try:
        groups = re.compile(p.verdict).groups
    except re.error as error:
        return f"verdict is not a regular expression: {error}"
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
    verdict="(?i)" + _BOXED + r"(correct|incorrect)[.!]?\s{0,9}\}",  # other boxes are quoted from the solution
    correct=("correct",),
    incorrect=("incorrect",),
    opening="Let's verify step by step:",
    end="</think>",
)

RUBRIC = JudgePrompt(
    name="rubric",
    text=(
        "Problem:\n{problem}\n\nSolution so far:\n{steps}\n\n"
        "Judge step {number}, the last one, by this criterion alone: {criterion}\nTake the earlier steps as given."
        " Explain briefly. Then write \\boxed{Yes} if the step meets the criterion, or \\boxed{No} if it does not."
    ),
)

SCALE = JudgePrompt(
    name="scale",
    text=(
        "Problem:\n{problem}\n\nSolution so far:\n{steps}\n\n"
        "Rate step {number}, the last one, from 1 (certainly wrong) to 5 (certainly correct). Take the earlier steps as"
        " given. Explain briefly what the step claims and whether it follows. Then write the number as \\boxed{3}."
    ),
    scale=5,
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

R_PRM = JudgePrompt(  # NJUNLP/R-PRM, src/prompts/GenPRM and src/reward-guide-search; She et al. 2025, arXiv 2503.21295
    name="r-prm",
    text=(
        "You are an excellent math teacher. Please verify the correctness of the Now Step.\n\nYou first need to"
        " analyze the Now Step and the Previous Steps and then summarize based on your analysis.\nAnalysis:\nYou"
        " need to analyze the following aspects.\n**Previous Steps Analysis**: You need to analyze the Previous"
        " Steps step by step. For each step, you need to first explain what the current step is doing, then you try"
        " to find any error in the current step.\n**Now Step Analysis**: You first need to explain what the Now"
        " Step is doing, and then point out which part of the Question it is trying to solve or which part of the"
        " information it states.\n**Data Source Analysis**: First you need to find out what data are used in the"
        " Now Step, and then you need to determine whether the source of the data is reasonable and correct. When"
        " you judge whether the source of a data is reasonable and correct, you need to specify the specific source"
        " of this data: such as which part of the question, or which content of the previous step; and then"
        " determine the source and current use is consistent, the Now Step is used correctly.\n**Consistency"
        " Analysis**: You need to check that the Now Step is consistent with the contents of the Previous Steps,"
        " and then you need to check that all the information inside the Now Step is consistent.\n**Calculation"
        " Analysis**: If the Now Step involves any calculations, such as addition, subtraction, multiplication,"
        " division, equations, modulo operations, etc., you will first need to perform a check on the calculation,"
        " such as a reverse operation, to see if the calculation was done correctly, and then analyze the results"
        " of your check to see if there was an error in the calculation.\nConclusion: \nPlease verify the"
        " correctness of the Now Step based on your analysis, if there is any error in the Now Step then the Now"
        " Step is wrong and vice versa the Now Step is correct. At the end of the Conclusion, when you give your"
        ' final answer, write it in the form "Verification: Is the step correct (Yes/No)? X", where X is either Yes'
        " or No.\n\nQuestion: {problem}\nPrevious Steps: {before}\nNow Step: {last}\nPlease carefully analyze the"
        " correctness of the Now Step.\nReply: "
    ),
    step="{step}",
    none_before="Since the Now Step is the first step, there are no Previous Steps.",
    verdict=r"Is the step correct \(Yes/No\)\?[\s*_]*(Yes|No)\b",
)

PROMPTS = {prompt.name: prompt for prompt in (PLAIN, QWEN_CRITIQUE, THINKPRM, GENPRM, RUBRIC, SCALE, R_PRM)}


# ---- Asking.

KEY = "judge"
"""A scored record's key for critiques and their counts."""

CODE_END = "\n```\n"
"""Delimiter for critiques with code: each sample stops after a code block."""

RUNS = 3
"""Maximum code blocks that are run per critique; later blocks are not run, as in GenPRM's own code."""

_CODE = re.compile(r"```python[^\S\n]*\n(.*)\Z", re.DOTALL | re.IGNORECASE)

_WORKERS = 4
"""Concurrent sandboxes."""


@dataclasses.dataclass(frozen=True, slots=True)
class Critique:
    """A policy's text about a chain."""

    steps: tuple[str, ...]  # as the policy wrote it, without the prompt's opening; of a critique with code, its text
    text: str  # the same as one text, with the output of the code that was run
    tokens: int  # generated ones
    finish_reason: str  # as of `Sample`, of the last sample
    runs: int = 0  # blocks of code that were run
    token_logprobs: tuple[tuple[str, LogProb], ...] = ()  # as of `Sample`, of the text from `start` on
    start: int = 0
    error: str | None = None  # the reason of a failure
    alternatives: tuple[Mapping[str, LogProb], ...] = ()  # as `token_logprobs`


def ask(policy: Policy, prompt: JudgePrompt, questions: Sequence[str], n: int, seed: int) -> list[list[Critique]]:
    """Samples n critiques per question, in order: [i][j] is question i's critique number `seed + j`.

    [] for no questions. Waits for the policy. A failed critique has its reason in `error`, else `None`.

    Raises:
      PolicyError: every critique failed.
      OSError: the prompt runs code, but there is no sandbox.
    """
    if not questions:
        return []
    opening = (prompt.opening,) if prompt.opening else ()
    prefixes = [Prefix(question, opening) for question in questions]
    if prompt.runs_code:
        written = _with_code(policy, prefixes, n, seed)
    else:
        drawn = policy.sample(prefixes, n, until="end", seed=seed)
        written = [[_critique(sample) for sample in samples] for samples in drawn]
    errors = [critique.error for critiques in written for critique in critiques]
    if all(errors):
        raise PolicyError(f"policy {policy.name} failed at all {len(errors)} critiques: {errors[-1]}")
    return written


def _critique(sample: Sample) -> Critique:
    logprobs = sample.token_logprobs
    text, reason = "\n".join(sample.steps), sample.finish_reason
    if text.startswith("<think>") and not _bare("".join(token for token, _ in logprobs[:8])).startswith("<think>"):
        text = text.partition("</think>")[2].lstrip()  # the server's field of thoughts, which holds no verdict
    return Critique(sample.steps, text, sample.tokens, reason, 0, logprobs, 0, sample.error, sample.alternatives)


@dataclasses.dataclass(slots=True)
class _RunningCritique:
    """A critique in progress: the pieces that `CODE_END` joins, and the code blocks that were run."""

    question: Prefix
    number: int  # of its samples
    pieces: tuple[str, ...] = ()
    blocks: tuple[str, ...] = ()
    tokens: int = 0
    last: Sample = Sample((), 0, "step")

    def critique(self) -> Critique:
        before = "".join(piece + CODE_END for piece in self.pieces)
        text, logprobs = before + CODE_END.join(self.last.steps), self.last.token_logprobs
        reason, runs = self.last.finish_reason, len(self.blocks)
        others = self.last.alternatives
        return Critique((text,), text, self.tokens, reason, runs, logprobs, len(before), self.last.error, others)


def _with_code(policy: Policy, prefixes: Sequence[Prefix], n: int, seed: int) -> list[list[Critique]]:
    """Samples each critique up to the end of a code block, appends the code's output, and continues."""
    written = [[_RunningCritique(prefix, seed + j) for j in range(n)] for prefix in prefixes]
    left = [running for critiques in written for running in critiques]
    for round_ in range(RUNS + 1):
        for number in range(seed, seed + n):
            of_number = [running for running in left if running.number == number]
            asked = [Prefix(running.question.problem, running.pieces) for running in of_number]
            drawn = policy.sample(asked, 1, until="step" if round_ < RUNS else "end", seed=number) if asked else []
            for running, (sample,) in zip(of_number, drawn, strict=True):
                running.last, running.tokens = sample, running.tokens + sample.tokens
        left = [running for running in left if running.last.finish_reason == "step"]
        ran = []
        for running in left:
            running.pieces += running.last.steps
            if running.last.steps and (code := _CODE.search(running.last.steps[-1])):
                running.blocks += (code[1],)
                ran.append(running)
        with ThreadPoolExecutor(_WORKERS) as pool:
            outputs = list(pool.map(lambda running: printed(running.blocks), ran))
        for running, output in zip(ran, outputs, strict=True):
            running.pieces += (f"[Code Output]\n\n```\n{output}",)
    return [[running.critique() for running in critiques] for critiques in written]


# ---- Reading.


@dataclasses.dataclass(frozen=True, slots=True)
class Reading:
    """Verdicts and scores read from a critique."""

    status: str  # `read`, `truncated`, `unreadable` or `failed`
    correct: tuple[bool, ...] = ()  # of the steps that it judges: one, or the first ones; empty unless read
    scores: tuple[float, ...] = ()  # of these steps and, for prompts about whole chains, of the steps after them
    by_vote: tuple[bool, ...] = ()  # of each verdict, whether its score is its vote and not its probability


def read(prompt: JudgePrompt, critique: Critique, steps: int) -> Reading:
    """Reads a critique about a chain with so many `steps`; never raises for the critique's text, see `Reading.status`.

    A score is the probability of the verdict's token if the policy reports log-probabilities, else 1 or 0; on a scale,
    as in `JudgePrompt.scale`, where 0.5 and more is `correct`. For prompts about whole chains, steps after the first
    incorrect one get its score, so there are `steps` scores; for `step` there is one, about the last step. A failed,
    truncated or unreadable critique has no scores.
    """
    if critique.finish_reason in ("error", "length"):
        return Reading("failed" if critique.finish_reason == "error" else "truncated")
    if prompt.scale:
        return _rating(prompt, critique)
    stated = verdicts(prompt, critique.text, steps)
    if stated is None:
        return Reading("unreadable")
    by_token = [probability(v, critique.text, critique.token_logprobs, critique.start) for v in stated]
    scores = [v.correct * 1.0 if p is None else p for v, p in zip(stated, by_token, strict=True)]
    if prompt.asks != "step":
        scores += scores[-1:] * (steps - len(scores))
    return Reading("read", tuple(v.correct for v in stated), tuple(scores), tuple(p is None for p in by_token))


def _rating(prompt: JudgePrompt, critique: Critique) -> Reading:
    """Reads a critique that rates the last step from 1 to `scale`."""
    text = critique.text.partition(prompt.end)[0] if prompt.end else critique.text
    match = [*re.compile(prompt.verdict).finditer(text, end_of_thoughts(text))][-1:]
    word = (match[0][1] or "").strip() if match else ""
    if not (len(word) == 1 and word in "123456789"[: prompt.scale]):
        return Reading("unreadable")
    expected = _expectation(word, match[0].start(1), critique, prompt.scale)
    score = ((int(word) if expected is None else expected) - 1) / (prompt.scale - 1)
    return Reading("read", (score >= 0.5,), (score,), (expected is None,))


def _expectation(word: str, at: int, critique: Critique, scale: int) -> float | None:
    """Returns the mean of the numbers 1 to `scale`, weighted by their probabilities at one token of a critique.

    The token is the one at character `at` of the critique's text, where the policy wrote the number `word`. An
    alternative counts if its digit ends the number: `5}` does, `50` does not.

    Unknown if no token is there, or the policy reports no alternatives.
    """
    index, lead = _token_at(at, critique.text, critique.token_logprobs, critique.start)
    if not index < len(critique.alternatives):
        return None
    token, logprob = critique.token_logprobs[index]
    if not _bare(token).startswith(lead + word):
        return None
    rated = []
    for text, value in {token: logprob, **critique.alternatives[index]}.items():
        digit = re.match(rf"{re.escape(lead)}([1-9])(?!\d)", _bare(text))
        if digit and int(digit[1]) <= scale:
            rated.append((int(digit[1]), value))
    largest = max(value for _, value in rated)  # relative to it: all may be too small for a float
    weights = [math.exp(value - largest) for _, value in rated]
    return sum(number * weight for (number, _), weight in zip(rated, weights, strict=True)) / sum(weights)


@dataclasses.dataclass(frozen=True, slots=True)
class StepVerdict:
    """Verdict on a step. `start`, `end`: its span in the critique, unless it follows from an index."""

    correct: bool
    start: int | None = None
    end: int | None = None


def verdicts(prompt: JudgePrompt, text: str, steps: int) -> list[StepVerdict] | None:
    """Returns a critique's verdicts about a chain with so many `steps`; `None` if the text cannot be read.

    For `step`, the only verdict is on the last step. Otherwise, verdicts cover all steps, or those up to the first
    incorrect one; for `steps`, `None` if there is no incorrect one and the count is not `steps`. Thoughts are skipped.
    For a prompt with a `scale` use `read`.
    """
    text = text.partition(prompt.end)[0] if prompt.end else text
    matches = list(re.compile(prompt.verdict).finditer(text, end_of_thoughts(text)))
    if not matches or any(match[1] is None for match in matches):
        return None
    if prompt.asks == "first_error":
        index = _INDEX.fullmatch(matches[-1][1].replace("\u2212", "-").replace("\u2013", "-"))
        if not index or int(index[1]) >= steps:
            return None
        first = int(index[1])
        return [StepVerdict(True)] * (steps if first < 0 else first) + [StepVerdict(False)] * (first >= 0)
    if prompt.asks == "step":
        stated = _verdict(prompt, matches[-1])
        return stated and [stated]
    judged: list[StepVerdict] = []
    for match in matches[:steps]:
        stated = _verdict(prompt, match)
        if stated is None:
            return None
        judged.append(stated)
        if not stated.correct:
            return judged
    return judged if len(matches) == steps else None  # fewer leave steps out, more cannot be told apart


_INDEX = re.compile(r"\s*(?:<?paragraph[_ ])?(-1|[0-9]{1,9})>?\.?\s*", re.IGNORECASE | re.ASCII)
_REASON = re.compile(r"[.,;:!*].*", re.DOTALL)  # behind a word


def _verdict(prompt: JudgePrompt, match: re.Match[str]) -> StepVerdict | None:
    word = match[1].strip().lower()
    if word not in map(str.lower, (*prompt.correct, *prompt.incorrect)):
        word = _REASON.sub("", word)
    if word in map(str.lower, prompt.correct):
        return StepVerdict(True, *match.span(1))
    return StepVerdict(False, *match.span(1)) if word in map(str.lower, prompt.incorrect) else None


Tokens = Sequence[tuple[str, LogProb]]
"""(text, natural log-probability) per token."""


def probability(verdict: StepVerdict, text: str, tokens: Tokens, start: int = 0) -> float | None:
    """Returns the probability that the step is correct, from the verdict's token; `None` if no token matches it.

    With p the probability of the verdict's first token: p, or 1 - p if the verdict is `incorrect`; p is not normalised
    over the verdict words. `tokens` cover the text from character `start` on. `None` also for a verdict that follows
    from an index.
    """
    if verdict.start is None:
        return None
    index, lead = _token_at(verdict.start, text, tokens, start)
    if not index < len(tokens):
        return None
    token, logprob = tokens[index]
    word, rest = _bare(text[verdict.start : verdict.end]), _bare(token)[len(lead) :]
    if not (word.startswith(rest) or rest.startswith(word)):
        return None
    p = math.exp(logprob)
    return p if verdict.correct else 1.0 - p


def _token_at(at: int, text: str, tokens: Tokens, start: int) -> tuple[int, str]:
    """Returns the index of the token around position `at`, and its text before that position.

    The index is len(tokens) if no token does. White space is ignored, because some tokenizers drop it.
    """
    before = _bare(text[start:at])
    for index, (token, _) in enumerate(tokens if at >= start else ()):
        bare = _bare(token)
        if len(bare) > len(before) and bare.startswith(before):
            return index, before
        if not before.startswith(bare):
            break
        before = before[len(bare) :]
    return len(tokens), ""


def _bare(text: str) -> str:
    return "".join(text.split())


# ---- Reports.

COUNTS: tuple[str, ...] = (
    "asked", "read", "truncated", "unreadable", "failed", "by_probability", "by_vote", "tokens", "sent",
)  # fmt: skip

ReadCritique = tuple[list[int], Critique, Reading]
"""(last nodes of the judged paths, the critique, its reading)."""


def report(judged: Sequence[ReadCritique], sent: int | None = None) -> dict[str, Any]:
    """Returns the counts `COUNTS` and `critiques`, a list in the order of `judged`, as JSON values.

    `asked` counts critiques; `read`, `truncated`, `unreadable` and `failed` by status; `by_probability` and `by_vote`
    verdicts; `tokens` generated ones; `sent` characters of questions (absent if not given). An entry of `critiques` has
    `nodes`, `status`, `tokens` and `text` (the error of a failed one), and `scores` and `runs` (of code) if there are
    any.
    """
    counts: dict[str, Any] = {**dict.fromkeys(COUNTS, 0), "asked": len(judged), "sent": sent, "critiques": []}
    if sent is None:
        del counts["sent"]
    for nodes, critique, reading in judged:
        counts[reading.status] += 1
        counts["by_vote"] += sum(reading.by_vote)
        counts["by_probability"] += len(reading.by_vote) - sum(reading.by_vote)
        counts["tokens"] += critique.tokens
        entry: dict[str, Any] = {"nodes": nodes, "status": reading.status}
        entry |= {"scores": list(map(as_written, reading.scores))} if reading.scores else {}
        entry |= {"runs": critique.runs} if critique.runs else {}
        counts["critiques"].append(entry | {"tokens": critique.tokens, "text": critique.error or critique.text})
    return counts


def cost(records: Iterable[Mapping[str, Any]]) -> dict[str, int]:
    """Returns the sums of the counts (`COUNTS`, see `report`) over scored records, 0 if there are no records.

    Raises KeyError if a record has no `judge`.
    """
    total = dict.fromkeys(COUNTS, 0)
    for record in records:
        for name in COUNTS:
            total[name] += record[KEY].get(name, 0)  # files of earlier versions have no `sent`
    return total
