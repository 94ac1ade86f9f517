"""Checks steps that are Coq tactics: `coqtop` runs each after the theorem and the earlier steps.

The theorem is the record's `"theorem"`, with its requirements, or its `problem`. A step is correct (1) if Coq accepts
all its sentences and incorrect (0) if it rejects one. It is unlabelled after a rejected one, when time runs out, when
Coq rejects the theorem, and if it is no tactic: commands begin with a capital letter and could assume or undo anything,
so only `Proof.`, `Qed.` and `Defined.` of them are allowed. Tactics that postpone a goal (`admit`, `shelve`) or that
the kernel checks only at the end (`exact_no_check`) are refused. `Guarded` runs after every step and finds a fixpoint
without a guard; `Qed` runs after the last, and what it finds makes that step incorrect. A limit of the sandbox, such
as "Stack overflow", leaves steps unlabelled.
"""

from __future__ import annotations

import functools
import re
import secrets
import shutil
from collections.abc import Sequence

from jprm.methods.verify import Verdict
from jprm.methods.verify.sandbox import Limits, run_command
from jprm.tree import ReasoningTree, chains_of

LIMITS = Limits(seconds=30.0, memory=4 << 30)
"""Limits of one chain: all its tactics, and the start of Coq."""

_END = re.compile(r"\.(?=\s|\Z)")
_LEAD = re.compile(r"(?:[-+*{}]+\s*|(?:\d+|all|par)\s*:\s*)*")
_PROOF = re.compile(r"(?:Proof|Qed|Defined)\s*")
_UNSOUND = re.compile(r"\b(?:admit|give_up|shelve\w*|unshelve|\w*_no_check|native_\w+)\b")
"""Tactics that postpone a goal, that the kernel has not checked, or that need a compiler."""
_LIMIT = re.compile(r"Stack overflow|[Oo]ut of memory|Timeout!|Anomaly|System error|Fatal error|Cannot allocate")
"""Coq's words for a limit of the sandbox or a fault of its own: nothing about the proof."""
_CLOSED = re.compile(r"Error:[^.()]*\(No proof-editing in progress\)")
_BEGUN = re.compile(r'Recursive definition is: "\?')  # of `fix IH 1.`: the next steps write its body


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
        path_verdicts = check_tactics(str(theorem), [tree.nodes[i].text for i in path], sandbox=sandbox, limits=limits)
        for i, verdict in zip(path, path_verdicts, strict=True):
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
    text = f"{theorem}\nLocate {mark}x.\n"
    for step in steps[:open_]:
        text += f"{step}\nLocate {mark}x.\nGuarded.\nLocate {mark}x.\n"
    text += f"Qed.\nLocate {mark}x.\n"  # checks a finished proof as a whole
    outcome = run_command([shutil.which("coqtop") or "coqtop", "-q", "-color", "no"], text, limits, sandbox=sandbox)
    first, *answers = re.split(rf"No object of basename\s+{mark}x\b", outcome.output)[:-1] or [""]
    if not first or "Error:" in first or _LIMIT.search(first):
        return nothing
    verdicts = []
    for at in range(0, min(len(answers), 2 * open_) - 1, 2):
        if _LIMIT.search(answers[at] + answers[at + 1]):
            return verdicts + nothing[len(verdicts) :]
        unguarded = _reason(_CLOSED.sub("", answers[at + 1]))
        reason = _reason(answers[at]) or unguarded
        if reason == unguarded and _BEGUN.search(reason or ""):
            verdicts.append(Verdict(None))
            continue
        verdicts.append(Verdict(int(reason is None), 1, reason))
        if reason:
            return verdicts + nothing[len(verdicts) :]
    if verdicts and len(answers) > 2 * open_ and not _LIMIT.search(answers[-1]):
        reason = _reason(_CLOSED.sub("", answers[-1]))
        if reason and "incomplete proof" not in reason:
            verdicts[-1] = Verdict(0, 1, reason)
    return verdicts + nothing[len(verdicts) :]


def _reason(answer: str) -> str | None:
    """Returns what Coq says is wrong, None if nothing is."""
    if "Error:" not in answer:
        return None
    return " ".join(answer.partition("Error:")[2].partition("\n\n")[0].split()) or "rejected"


def _tactics(step: str) -> bool:
    """Returns whether a step is whole sentences, each a tactic that leaves no goal unproven."""
    text = _uncommented(step)
    if text is None or _UNSOUND.search(text):
        return False
    *sentences, rest = _END.split(text)
    if rest.strip(" \n\t-+*{}"):
        return False  # no full stop: the sentence would continue in the next step
    for sentence in sentences:
        body = _LEAD.sub("", sentence.strip(), count=1)
        if not _PROOF.fullmatch(body) and not re.match(r"[a-z_(]", body):
            return False
    return True


def _uncommented(step: str) -> str | None:
    """Returns the step without its comments, which nest; None if one is not closed or there is a string."""
    if '"' in step:
        return None
    depth, kept, start = 0, [], 0
    for mark in re.finditer(r"\(\*|\*\)", step):
        if not depth:
            kept.append(step[start : mark.start()])
        depth += 1 if mark.group() == "(*" else -1
        if depth < 0:
            return None
        start = mark.end()
    return None if depth else " ".join((*kept, step[start:]))
