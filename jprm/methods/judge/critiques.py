"""Critiques: asked of a policy, with their code run in the sandbox, and read as scores of steps."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from jprm.methods.judge.prompts import JudgePrompt, Verdict, probability, verdicts
from jprm.methods.policy.protocol import Policy, Prefix, Sample
from jprm.methods.policy.sample_cache import PolicyError
from jprm.methods.verify.programs import printed
from jprm.score.records import as_written

KEY = "judge"
"""The key of a scored record under which critiques and their counts are."""

CODE_END = "\n```\n"
"""The delimiter of a policy whose critiques run code: each sample ends where a block of code does."""

RUNS = 3
"""Blocks of a critique that are run, at most. The critique ends without further runs, as in GenPRM's own code."""

_CODE = re.compile(r"```python[^\S\n]*\n(.*)\Z", re.DOTALL | re.IGNORECASE)

_WORKERS = 4
"""Sandboxes at once."""


@dataclasses.dataclass(frozen=True, slots=True)
class Critique:
    """What a policy wrote about a chain.

    Attributes:
      steps: as the policy wrote it, without the prompt's opening; of a critique with code, its text.
      text: the same as one text, with the output of the code that was run.
      tokens: generated ones.
      finish_reason: as of `Sample`, of the last sample.
      runs: blocks of code that were run.
      token_logprobs: as of `Sample`, of the text from `start` on.
      error: the reason of a failure.
    """

    steps: tuple[str, ...]
    text: str
    tokens: int
    finish_reason: str
    runs: int = 0
    token_logprobs: tuple[tuple[str, float], ...] = ()
    start: int = 0
    error: str | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Reading:
    """What a critique says.

    Attributes:
      status: `read`, `truncated`, `unreadable` or `failed`.
      correct: its verdicts on the steps that it judges: one, or those of the first steps; empty unless it was read.
      by_vote: for each of them, whether its score is its vote and not its probability.
      scores: of these steps and, for prompts about whole chains, of the steps after them.
    """

    status: str
    correct: tuple[bool, ...] = ()
    scores: tuple[float, ...] = ()
    by_vote: tuple[bool, ...] = ()


def ask(policy: Policy, prompt: JudgePrompt, questions: Sequence[str], n: int, seed: int) -> list[list[Critique]]:
    """Returns n critiques for each question.

    Raises:
      PolicyError: every critique failed.
      OSError: the prompt runs code and there is no sandbox.
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
    return Critique(sample.steps, text, sample.tokens, reason, 0, logprobs, error=sample.error)


@dataclasses.dataclass(slots=True)
class _Running:
    """A critique that is being written: the pieces that `CODE_END` joins, and the code in them that was run."""

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
        return Critique((text,), text, self.tokens, reason, runs, logprobs, len(before), self.last.error)


def _with_code(policy: Policy, prefixes: Sequence[Prefix], n: int, seed: int) -> list[list[Critique]]:
    """Samples each critique to the end of a block of code, appends what the code prints, and continues."""
    written = [[_Running(prefix, seed + j) for j in range(n)] for prefix in prefixes]
    left = [running for critiques in written for running in critiques]
    for round_ in range(RUNS + 1):
        for number in range(seed, seed + n):
            some = [running for running in left if running.number == number]
            asked = [Prefix(running.question.problem, running.pieces) for running in some]
            drawn = policy.sample(asked, 1, until="step" if round_ < RUNS else "end", seed=number) if asked else []
            for running, (sample,) in zip(some, drawn, strict=True):
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


def read(prompt: JudgePrompt, critique: Critique, steps: int) -> Reading:
    """Returns what a critique says about a chain of so many steps.

    A score is the probability of the verdict's token where the policy reported log-probabilities, else 1 or 0. For
    prompts about whole chains, the steps after the first incorrect one have its score.
    """
    if critique.finish_reason in ("error", "length"):
        return Reading("failed" if critique.finish_reason == "error" else "truncated")
    found = verdicts(prompt, critique.text, steps)
    if found is None:
        return Reading("unreadable")
    by_token = [_probability(verdict, critique) for verdict in found]
    scores = [v.correct * 1.0 if p is None else p for v, p in zip(found, by_token, strict=True)]
    if prompt.asks != "step":
        scores += scores[-1:] * (steps - len(scores))
    return Reading("read", tuple(v.correct for v in found), tuple(scores), tuple(p is None for p in by_token))


def _probability(verdict: Verdict, critique: Critique) -> float | None:
    """As `probability`, for a verdict in the part of the critique whose tokens are known."""
    if verdict.start is None or verdict.end is None or verdict.start < critique.start:
        return None
    part = Verdict(verdict.correct, verdict.start - critique.start, verdict.end - critique.start)
    return probability(part, critique.text[critique.start :], critique.token_logprobs)


COUNTS: tuple[str, ...] = ("asked", "read", "truncated", "unreadable", "failed", "by_probability", "by_vote", "tokens")

Judged = tuple[list[int], Critique, Reading]
"""The nodes where the paths end that a critique is about, the critique, and what it says."""


def report(judged: Sequence[Judged]) -> dict[str, Any]:
    """Returns counts of critiques and verdicts, the generated tokens, and the critiques; JSON values."""
    counts: dict[str, Any] = {**dict.fromkeys(COUNTS, 0), "asked": len(judged), "critiques": []}
    for nodes, critique, reading in judged:
        counts[reading.status] += 1
        counts["by_vote"] += sum(reading.by_vote)
        counts["by_probability"] += len(reading.by_vote) - sum(reading.by_vote)
        counts["tokens"] += critique.tokens
        found: dict[str, Any] = {"nodes": nodes, "status": reading.status}
        found |= {"scores": list(map(as_written, reading.scores))} if reading.scores else {}
        found |= {"runs": critique.runs} if critique.runs else {}
        counts["critiques"].append(found | {"tokens": critique.tokens, "text": critique.error or critique.text})
    return counts


def cost(records: Iterable[Mapping[str, Any]]) -> dict[str, int]:
    """Returns the sums of what `report` counted for each record."""
    total = dict.fromkeys(COUNTS, 0)
    for record in records:
        for name in COUNTS:
            total[name] += record[KEY][name]
    return total
