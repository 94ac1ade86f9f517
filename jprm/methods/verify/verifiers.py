"""Verifiers judge whole chains by their outcome, wherever chains are sampled (`jprm label`, `jprm rl`).

A verifier judges many chains at once, since programs run in batches. Commands and experiments name one of `VERIFIERS`,
or the user's own as `module:NAME` or `FILE.py:NAME`: a `Verifier`, or a function from (record, steps) to a reward.

A check of the working is a function from (record, steps) to True, False or None (not checkable) for each step. A
checker labels the steps of a tree (`jprm label verify`).
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from jprm.answers import equivalent, extract_answer
from jprm.methods.policy.protocol import Prefix, Sample
from jprm.methods.verify import Verdict, coq, sandbox, tests_of
from jprm.methods.verify.arithmetic import check_arithmetic
from jprm.methods.verify.programs import LIMITS, Program, check_python, program_of, run_programs
from jprm.methods.verify.sandbox import Limits
from jprm.options import find_part
from jprm.tree import NONE, ReasoningTree, RecordError, with_labels, without_chain

Record = Mapping[str, Any]
Chain = tuple[Record, Sequence[str]]
"""A problem's record, and the texts of all steps."""

Kind = Literal["arithmetic", "python", "coq"]
"""What steps are, for a checker."""

ORIGIN = "formal"
"""Of a checker's labels."""

Working = Callable[[Record, Sequence[str]], Sequence[bool | None]]


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What is known of a chain: its reward in [0, 1], 1 for a correct one, and keys for the record of a sample."""

    reward: float
    about: Mapping[str, Any] = dataclasses.field(default_factory=lambda: NONE)


@dataclasses.dataclass(frozen=True)
class Verifier:
    """How chains are judged.

    Attributes:
      judge: chains to their outcomes, in order.
      check: (record, where) raises RecordError for a record whose chains cannot be judged.
    """

    judge: Callable[[Sequence[Chain]], Sequence[Outcome]]
    check: Callable[[Record, str], Any]

    def rewards(self, chains: Sequence[Chain]) -> list[float]:
        """Returns the chains' rewards.

        Raises ValueError for one outside [0, 1].
        """
        rewards = [float(outcome.reward) for outcome in self.judge(chains)] if chains else []
        for (record, _), reward in zip(chains, rewards, strict=True):
            if not 0 <= reward <= 1:
                raise ValueError(f"problem {record['problem'][:60]!r}: the verifier's reward {reward} is not in [0, 1]")
        return rewards

    def accepts(self, completions: Sequence[tuple[Record, Prefix, Sequence[Sample]]]) -> list[list[bool]]:
        """Returns whether each sample that completes a prefix makes it a correct chain. One that was cut off does not.

        All are judged together.
        """
        chains = [
            (record, prefix.steps + sample.steps)
            for record, prefix, samples in completions
            for sample in samples
            if sample.finish_reason == "stop"
        ]
        rewards = iter(self.rewards(chains))
        return [
            [sample.finish_reason == "stop" and next(rewards) >= 1 for sample in samples] for *_, samples in completions
        ]


def needs_answer(record: Record, where: str) -> None:
    """Raises RecordError for a record without an answer."""
    if record.get("answer") is None:
        raise RecordError(where, "answer", "is absent, so no chain can be judged", "Give it, or remove the record.")


def of_function(reward: Callable[[Record, Sequence[str]], float]) -> Verifier:
    """Returns the verifier of a function that rewards one chain of a record with an answer."""
    return Verifier(lambda chains: [Outcome(reward(*chain)) for chain in chains], needs_answer)


def judge_answers(chains: Sequence[Chain]) -> list[Outcome]:
    """Returns 1 for chains whose final answer equals the record's, else 0, with the `answer`."""
    texts = [_extracted("\n".join(steps)) for _, steps in chains]
    pairs = zip(chains, texts, strict=True)
    return [Outcome(float(_equivalent(record["answer"], text)), {"answer": text}) for (record, _), text in pairs]


def judge_programs(chains: Sequence[Chain], limits: Limits = LIMITS, *, in_sandbox: bool = True) -> list[Outcome]:
    """Returns 1 for chains that are programs which pass all `tests` of their record, else 0.

    With each are `passed`, the number of tests that pass, and `answer`: letters that are equal for programs that do the
    same on the calls of the tests, so that votes count them together. It is None for a program that does not run.

    Raises OSError where the sandbox is absent or does not start.
    """
    programs = [Program(program_of(record, steps), tuple(tests_of(record))) for record, steps in chains]
    outcomes = []
    for report in run_programs(programs, limits, sandbox=in_sandbox):
        if not report.started:
            raise OSError("the sandbox did not start, so programs cannot be judged: is the machine out of memory?")
        answer = report.behaviour and "behaviour " + _letters(report.behaviour)
        outcomes.append(Outcome(float(report.passed), {"answer": answer, "passed": report.results.count("passes")}))
    return outcomes


def needs_tests(record: Record, where: str) -> None:
    """Raises RecordError for a record without tests, and OSError where there is no sandbox to run them in."""
    tests_of(record, where)
    sandbox.require()


def arithmetic(record: Record, steps: Sequence[str]) -> list[bool | None]:
    """Returns whether the equations of each step hold; None for a step without any."""
    del record
    return [None if (label := _arithmetic(step)) is None else bool(label) for step in steps]


VERIFIERS: dict[str, Verifier] = {
    "answer": Verifier(judge_answers, needs_answer),
    "tests": Verifier(judge_programs, needs_tests),
}
WORKING: dict[str, Working] = {"arithmetic": arithmetic}


def find(name: str) -> Verifier:
    """Returns the verifier of a name; errors as `find_part`."""
    verifier = find_part(name, VERIFIERS, "verifier", files=True)
    if isinstance(verifier, Verifier):
        return verifier
    return of_function(find_part(name, {}, "verifier", Callable, files=True))


def find_working(name: str) -> Working:
    """Returns the check of the working of a name; errors as `find_part`."""
    return find_part(name, WORKING, "working", Callable, files=True)


def record_of_problem(tree: ReasoningTree) -> dict[str, Any]:
    """Returns what a verifier sees of a tree: its record without the chains."""
    return without_chain(tree.extra) | {"problem": tree.problem, "answer": tree.answer}


def right_working(verdicts: Sequence[bool | None]) -> bool:
    """Returns whether no step is false and at least one is true."""
    return any(verdicts) and False not in verdicts


def checker(kind: Kind, *, in_sandbox: bool = True) -> Callable[[ReasoningTree], list[Verdict]]:
    """Returns a function from a tree to a verdict per node.

    Raises:
      OSError: coqtop is not installed, or there is no sandbox and `in_sandbox` is True.
    """
    if kind == "arithmetic":
        return lambda tree: [check_arithmetic(node.text) for node in tree.nodes]
    if kind not in ("python", "coq"):
        raise ValueError(f"kind is {kind!r}: use 'arithmetic', 'python' or 'coq'")
    if kind == "coq" and (reason := coq.refusal()):
        raise OSError(f"tactics cannot be checked: {reason}")
    if in_sandbox:
        sandbox.require()
    check = {"python": check_python, "coq": coq.check_coq}[kind]
    return lambda tree: check(tree, sandbox=in_sandbox)


def labelled(tree: ReasoningTree, verdicts: list[Verdict]) -> ReasoningTree:
    """Returns the tree with its verdicts as labels of `correctness`; `false` tells what does not hold in a step."""
    notes = [{"checked": each.checked} | ({"false": each.false} if each.false else {}) for each in verdicts]
    return with_labels(tree, [each.label for each in verdicts], "correctness", ORIGIN, notes)


def _letters(digits: str) -> str:
    """Returns hexadecimal digits as letters: answers of words alone are compared as text (`jprm.answers`)."""
    return digits[:16].translate(str.maketrans("0123456789", "ghijklmnop"))


_extracted = functools.lru_cache(maxsize=1 << 16)(extract_answer)
_equivalent = functools.lru_cache(maxsize=1 << 16)(equivalent)


@functools.lru_cache(maxsize=1 << 16)
def _arithmetic(step: str) -> int | None:
    return check_arithmetic(step).label
