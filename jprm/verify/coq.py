"""Checks steps that are Coq tactics: `coqtop` runs each after the theorem and the earlier steps.

The theorem is the record's `"theorem"`, with its requirements, or its `problem`. A step is correct (1) if Coq accepts
all its sentences and incorrect (0) if it rejects one. It is unlabelled after a rejected one, when time runs out, when
Coq rejects the theorem, and if it is no tactic: commands begin with a capital letter and could assume or undo anything,
so only `Proof.`, `Qed.` and `Defined.` of them are allowed, and `admit` proves nothing.
"""

from __future__ import annotations

import functools
import re
import secrets
import shutil
from collections.abc import Sequence

from jprm.tree import ReasoningTree, chains_of
from jprm.verify.sandbox import Limits, run
from jprm.verify.verdict import Verdict

LIMITS = Limits(seconds=30.0, memory=4 << 30)
"""Limits of one chain: all its tactics, and the start of Coq."""

_COMMENT = re.compile(r"\(\*.*?\*\)", re.DOTALL)
_SENTENCE = re.compile(r"[^.]*(?:\.(?!\s|$)[^.]*)*\.(?=\s|$)")
_LEAD = re.compile(r"(?:[-+*{}]+\s*|(?:\d+|all|par)\s*:\s*)*")
_PROOF = re.compile(r"(?:Proof|Qed|Defined)\s*\.")


@functools.cache
def refusal() -> str | None:
    """Returns why Coq cannot run on this machine, None if it can."""
    return None if shutil.which("coqtop") else "coqtop is not installed (Debian's package coq)"


def check_coq(tree: ReasoningTree, *, sandbox: bool = True, limits: Limits = LIMITS) -> list[Verdict]:
    """Returns a verdict per node. Every path of the tree is one run of Coq.

    Raises:
      OSError: there is no coqtop, or `sandbox` is True and there is none.
    """
    if reason := refusal():
        raise OSError(f"tactics cannot be checked: {reason}")
    theorem = tree.extra.get("theorem", tree.problem)
    verdicts: list[Verdict | None] = [None] * len(tree.nodes)
    for path in chains_of(tree):
        found = check_tactics(str(theorem), [tree.nodes[i].text for i in path], sandbox=sandbox, limits=limits)
        for i, verdict in zip(path, found, strict=True):
            if (verdicts[i] or Verdict(None)).label is None:  # time ran out on another path
                verdicts[i] = verdict
    return [verdict or Verdict(None) for verdict in verdicts]


def check_tactics(
    theorem: str, steps: Sequence[str], *, sandbox: bool = True, limits: Limits = LIMITS
) -> list[Verdict]:
    """Returns a verdict per step of one proof."""
    open_ = next((i for i, step in enumerate(steps) if not _tactics(step)), len(steps))
    nothing = [Verdict(None)] * len(steps)
    mark = (
        f"mark{secrets.token_hex(8)}"  # locating an unknown name prints it, which marks the ends of steps in the output
    )
    asked = [theorem, *steps[:open_]]
    text = "".join(f"{part}\nLocate {mark}x{i}.\n" for i, part in enumerate(asked))
    outcome = run([shutil.which("coqtop") or "coqtop", "-q", "-color", "no"], text, limits, sandbox=sandbox)
    answers = _answers(outcome.output, mark)
    if not answers or "Error:" in answers[0]:
        return nothing
    verdicts = []
    for answer in answers[1:]:
        if "Error:" in answer:
            reason = " ".join(answer.partition("Error:")[2].partition("\n\n")[0].split())
            verdicts.append(Verdict(0, 1, reason[:200]))
            break
        verdicts.append(Verdict(1, 1))
    return verdicts + nothing[len(verdicts) :]


def _answers(output: str, mark: str) -> list[str]:
    """Returns Coq's output for every part whose end it reached."""
    answers = []
    while True:
        answer, *rest = re.split(rf"No object of basename\s+{mark}x{len(answers)}\b", output, maxsplit=1)
        if not rest:
            return answers
        answers.append(answer)
        output = rest[0]


def _tactics(step: str) -> bool:
    text = _COMMENT.sub(" ", step)
    if "(*" in text or "*)" in text or '"' in text or re.search(r"\b(admit|give_up)\b", text):
        return False
    sentences = _SENTENCE.findall(text)
    if _SENTENCE.sub("", text).strip(" \n\t-+*{}"):
        return False  # no full stop: the sentence would continue in the next step
    for sentence in sentences:
        body = _LEAD.sub("", sentence.strip(), count=1)
        if not _PROOF.fullmatch(body) and not re.match(r"[a-z_(]", body):
            return False
    return True
