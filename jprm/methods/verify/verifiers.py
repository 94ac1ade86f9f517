"""Verifiers judge whole chains by their outcome, wherever chains are sampled (`jprm label`, `jprm rl`).

A verifier judges many chains at once, because programs run in batches. Commands and experiments name one of
`VERIFIERS`, or the user's `module:NAME` or `FILE.py:NAME`: a `Verifier`, or a function from (record, steps) to a
reward.

A checker that is a command, e.g. Agda or Z3, is described by the user's JSON file (`jprm.methods.verify.commands`).

A check of the working maps (record, steps) to whether each step is right, `None` if it cannot be checked. A checker
labels the steps of a tree (`jprm label verify`).
"""

from __future__ import annotations

import dataclasses
import functools
import re
import secrets
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from jprm.methods.answers import Rule, equivalent, extract
from jprm.methods.policy.protocol import Prefix, Sample
from jprm.methods.verify import Verdict, sandbox, tests_of
from jprm.methods.verify.arithmetic import check_arithmetic, label_of
from jprm.methods.verify.commands import CommandChecker, check_record, judge_chains, load_checker, verdicts_of
from jprm.methods.verify.programs import LIMITS, Program, check_python, program_of, run_programs
from jprm.methods.verify.sandbox import Limits, run_command
from jprm.options import find_part
from jprm.tree import NONE, ReasoningTree, RecordError, chains_of, with_labels, without_chain

Record = Mapping[str, Any]
Chain = tuple[Record, Sequence[str]]
"""A problem's record, and the text of each step."""

KINDS = ("arithmetic", "python", "coq")
"""Kinds of steps that a checker expects; a JSON file describes another (`jprm.methods.verify.commands`)."""

ORIGIN = "formal"
"""Origin of a checker's labels."""

UNDECIDED, UNPROVED = "undecided", "unproved"
"""Keys with the reason why a verifier could not judge a sample (its reward is 0, and `correct` is unknown), and why a
checker rejects it."""

Working = Callable[[Record, Sequence[str]], Sequence[bool | None]]


@dataclasses.dataclass(frozen=True)
class Outcome:
    """Judgement of a chain: its reward in [0, 1], 1 if correct, and keys for the sample's record."""

    reward: float
    about: Mapping[str, Any] = dataclasses.field(default_factory=lambda: NONE)


@dataclasses.dataclass(frozen=True)
class Verifier:
    """A method of judging chains.

    Attributes:
      judge: maps chains to their outcomes, in order.
      check: (record, where) raises RecordError if the record's chains cannot be judged.
    """

    judge: Callable[[Sequence[Chain]], Sequence[Outcome]]
    check: Callable[[Record, str], Any]

    def rewards(self, chains: Sequence[Chain]) -> list[float]:
        """Returns the rewards of chains, in order, each in [0, 1]; 1 is correct.

        [] without a run if there are no chains.

        Raises ValueError for a reward outside [0, 1], and errors of `judge`, e.g. OSError without a sandbox.
        """
        rewards = [float(outcome.reward) for outcome in self.judge(chains)] if chains else []
        for (record, _), reward in zip(chains, rewards, strict=True):
            if not 0 <= reward <= 1:
                raise ValueError(f"problem {record['problem'][:60]!r}: the verifier's reward {reward} is not in [0, 1]")
        return rewards

    def accepts(self, completions: Sequence[tuple[Record, Prefix, Sequence[Sample]]]) -> list[list[bool]]:
        """Returns whether each sample completes its prefix to a correct chain (reward 1): a list per completion.

        `completions` are (record, prefix, samples). `False` if a sample was cut off or failed. All are judged in one
        batch. Raises as `rewards`.
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
    """Raises RecordError if the record has no answer. `where` begins the error, e.g. `problems.jsonl:3`."""
    if record.get("answer") is None:
        raise RecordError(where, "answer", "is absent, so no chain can be judged", "Give it, or remove the record.")


def of_function(reward: Callable[[Record, Sequence[str]], float]) -> Verifier:
    """Makes a verifier from a function of (record, steps) that returns a chain's reward, from 0 to 1.

    It is called once per chain, one after the other. The verifier's `check` raises RecordError for a record without an
    answer.
    """
    return Verifier(lambda chains: [Outcome(reward(*chain)) for chain in chains], needs_answer)


def judge_answers(chains: Sequence[Chain], form: Rule | None = None) -> list[Outcome]:
    """Rewards chains with 1 if their final answer equals the record's `answer`, else 0; returns outcomes in order.

    Each outcome has `about`: the `answer`, and the `answer_rule` that extracted it, both `None` if the chain states no
    answer. `form`: the only rule to accept, e.g. `box`; by default all count. An `answer` of null gives 0. Raises
    KeyError if a record has no `answer`, ValueError if it is neither a text nor a number.
    """
    outcomes = []
    for record, steps in chains:
        extracted = _extracted("\n".join(steps), form=form)
        about = {"answer": extracted.answer, "answer_rule": extracted.rule}
        outcomes.append(Outcome(float(equivalent(record["answer"], extracted.answer)), about))
    return outcomes


_LETTERS = str.maketrans("0123456789", "ghijklmnop")  # answers of only words are compared as text


def judge_programs(chains: Sequence[Chain], limits: Limits = LIMITS) -> list[Outcome]:
    """Rewards chains with 1 if they are programs and pass all `tests` of their record, else 0.

    Returns outcomes in order. Each outcome has `about`: `passed`, the number of passed tests, and as `answer` letters
    that are equal for programs with equal behaviour on the tests, so that votes count them together. The `answer` is
    `None` if the program does not run to its end. A chain without a program also has `undecided`, with the reason.

    Raises OSError if the sandbox is absent or does not start, RecordError for a record without tests.
    """
    codes = [program_of(record, steps) for record, steps in chains]
    programs = [
        Program(code, tuple(tests_of(record)))
        for (record, _), code in zip(chains, codes, strict=True)
        if code is not None
    ]
    reports, outcomes = iter(run_programs(programs, limits) if programs else ()), []
    for code in codes:
        if code is None:
            outcomes.append(Outcome(0.0, {"answer": None, "passed": 0, UNDECIDED: "holds no program"}))
            continue
        report = next(reports)
        if not report.started:
            raise OSError("the sandbox did not start, so programs cannot be judged: is the machine out of memory?")
        answer = report.behaviour and "behaviour " + report.behaviour[:16].translate(_LETTERS)
        outcomes.append(Outcome(float(report.passed), {"answer": answer, "passed": report.results.count("passes")}))
    return outcomes


def needs_tests(record: Record, where: str) -> None:
    """Raises RecordError if the record has no tests (`tests_of`), and OSError if there is no sandbox for them."""
    tests_of(record, where)
    sandbox.require()


def arithmetic(record: Record, steps: Sequence[str]) -> list[bool | None]:
    """Returns whether the equations of each step hold, `None` for a step that `label_of` leaves undecided.

    `record` is ignored. Raises OSError like `check_arithmetic`.
    """
    del record
    return [None if (label := label_of(step)) is None else bool(label) for step in steps]


VERIFIERS: dict[str, Any] = {
    "answer": Verifier(judge_answers, needs_answer),
    "boxed": Verifier(functools.partial(judge_answers, form="box"), needs_answer),
    "tests": Verifier(judge_programs, needs_tests),
    "outcome": "jprm.methods.worlds.acting:OUTCOME",  # of episodes in an environment
}
WORKING: dict[str, Working] = {"arithmetic": arithmetic}


def judge_by_command(chains: Sequence[Chain], checker: CommandChecker) -> list[Outcome]:
    """Rewards chains with 1 if the checker proves them, else 0; returns outcomes in order.

    `about` of another chain has the reason, as `unproved` or, if the checker gave no verdict, as `undecided`.

    Raises OSError if there is no sandbox, or the checker does not start in it.
    """
    outcomes = []
    for verdict in judge_chains(checker, chains):
        key = UNDECIDED if verdict.proved is None else UNPROVED
        outcomes.append(Outcome(1.0) if verdict.proved else Outcome(0.0, {key: verdict.reason}))
    return outcomes


def needs_source(record: Record, where: str, checker: CommandChecker) -> None:
    """Raises RecordError if the record lacks a key of the checker's source, and OSError if there is no sandbox."""
    check_record(checker, record, where)
    sandbox.require()


def find(name: str) -> Verifier:
    """Finds one of `VERIFIERS` (`answer`, `boxed`, `tests`, `outcome`), or the user's own.

    That is `module:NAME`, which is imported, `FILE.py:NAME`, which is run, or a checker's file, which must end in
    `.json`. A function becomes a verifier by `of_function`.

    Raises ValueError if the name is unknown or the object has another type; for a JSON file FileNotFoundError if it is
    missing, RecordError if it describes no checker, OSError if its program or folder is absent. Errors of imported code
    pass through.
    """
    if name.endswith(".json"):
        checker = load_checker(name)
        judge, check = (
            functools.partial(judge_by_command, checker=checker),
            functools.partial(needs_source, checker=checker),
        )
        return Verifier(judge, check)
    verifier = find_part(name, VERIFIERS, "verifier", files=True)
    if isinstance(verifier, Verifier):
        return verifier
    return of_function(find_part(name, {}, "verifier", Callable, files=True))


def find_working(name: str) -> Working:
    """Finds a check of the working: `arithmetic`, `module:NAME` or `FILE.py:NAME`.

    It must map (record, steps) to a `True`, `False` or `None` (undecided) per step. Raises ValueError if the name is
    unknown, or the object cannot be called.
    """
    return find_part(name, WORKING, "working", Callable, files=True)


def record_of_problem(tree: ReasoningTree) -> dict[str, Any]:
    """Returns a tree's record without its chains, which is all that a verifier sees.

    It has `problem`, `answer` (`None` if the tree has no answer) and the tree's other keys.
    """
    return without_chain(tree.extra) | {"problem": tree.problem, "answer": tree.answer}


def right_working(verdicts: Sequence[bool | None]) -> bool:
    """Returns whether no step is false and at least one is true; `None` stands for an undecided step."""
    return any(verdicts) and False not in verdicts


def checker(kind: str, *, in_sandbox: bool = True) -> Callable[[ReasoningTree], list[Verdict]]:
    """Returns a function from a tree to one verdict per node. `kind` is one of `KINDS`, or a checker's JSON file.

    Without `in_sandbox`, code runs with the user's permissions; `arithmetic` needs no sandbox. The function raises as
    `check_python`, `check_coq` or `check_by_command`.

    Raises:
      ValueError: there is no such kind; RecordError if a JSON file describes no checker.
      OSError: the checker (or the file `kind`) is absent, or `in_sandbox` is `True` but there is no sandbox.
    """
    if kind not in KINDS and not kind.endswith(".json"):
        raise ValueError(f"kind={kind!r} is not one of {', '.join(KINDS)}, nor a checker's FILE.json")
    if kind == "arithmetic":
        return lambda tree: [check_arithmetic(node.text) for node in tree.nodes]
    if kind == "coq" and (reason := coq_refusal()):
        raise OSError(f"tactics cannot be checked: {reason}")
    by_command = load_checker(kind) if kind.endswith(".json") else None
    if in_sandbox:
        sandbox.require()
    if by_command:
        return functools.partial(check_by_command, checker=by_command, in_sandbox=in_sandbox)
    check = {"python": check_python, "coq": check_coq}[kind]
    return lambda tree: check(tree, sandbox=in_sandbox)


def check_by_command(tree: ReasoningTree, checker: CommandChecker, *, in_sandbox: bool = True) -> list[Verdict]:
    """Returns one verdict per node (`verdicts_of`, `by_node`). Each chain is one run.

    Raises RecordError if the record lacks a key of the checker's source, and OSError like `judge_chains`.
    """
    record = record_of_problem(tree)
    check_record(checker, record, tree.problem[:60])
    chains = chains_of(tree)
    verdicts = judge_chains(
        checker, [(record, [tree.nodes[i].text for i in chain]) for chain in chains], in_sandbox=in_sandbox
    )
    paths = [verdicts_of(verdict, len(chain)) for verdict, chain in zip(verdicts, chains, strict=True)]
    return by_node(tree, paths)


def by_node(tree: ReasoningTree, paths: Iterable[Sequence[Verdict]]) -> list[Verdict]:
    """Joins the verdicts of a tree's chains into one per node; of a node in several, the first with a label counts.

    `paths` has one list per chain of `chains_of(tree)`, one verdict per step. A node on no path is not checkable.
    Raises ValueError if the numbers differ.
    """
    verdicts = [Verdict(None)] * len(tree.nodes)
    for chain, path in zip(chains_of(tree), paths, strict=True):
        for i, verdict in zip(chain, path, strict=True):
            if verdicts[i].label is None:  # time ran out on another path
                verdicts[i] = verdict
    return verdicts


def labelled(tree: ReasoningTree, verdicts: list[Verdict]) -> ReasoningTree:
    """Returns a copy of the tree with verdicts (one per node) as labels on `correctness`, origin `formal`.

    A chain or pool becomes a tree; earlier labels are removed. Each step's `extra` gets `checked`, a number, and
    `false` if it has one. Raises ValueError if the numbers of nodes and verdicts differ.
    """
    notes = [{"checked": verdict.checked} | ({"false": verdict.false} if verdict.false else {}) for verdict in verdicts]
    return with_labels(tree, [verdict.label for verdict in verdicts], "correctness", ORIGIN, notes)


_extracted = functools.lru_cache(maxsize=1 << 16)(extract)


# ------------------------------------------------------------------------------------------------------------------ Coq
#
# `coqtop` runs each step, a tactic, after the theorem and the earlier steps. The theorem is the record's `"theorem"`,
# with its imports, or its `problem`. A step is correct (1) if Coq accepts all its sentences, and incorrect (0) if it
# rejects one. It is unlabelled after a rejected step, if time runs out, if Coq rejects the theorem, or if it is not a
# tactic. Commands begin with a capital letter and could assume or undo anything, so only `Proof.`, `Qed.` and
# `Defined.` are allowed. Tactics that postpone a goal (`admit`, `shelve`), or that the kernel checks only at the end
# (`exact_no_check`), are refused. `Guarded` runs after every step to find unguarded fixpoints. `Qed` runs after the
# last step; if it fails, that step is incorrect. Sandbox limits, e.g. "Stack overflow", leave steps unlabelled.

COQ_LIMITS = Limits(seconds=30.0, memory=4 << 30)
"""Limits for one chain: all its tactics, and the start of Coq."""

_END = re.compile(r"\.(?=\s|\Z)")
_LEAD = re.compile(r"(?:[-+*{}]+\s*|(?:\d+|all|par)\s*:\s*)*")
_PROOF = re.compile(r"(?:Proof|Qed|Defined)\s*")
_UNSOUND = re.compile(r"\b(?:admit|give_up|shelve\w*|unshelve|\w*_no_check|native_\w+)\b")
"""Tactics that postpone a goal, bypass the kernel's check, or need a compiler."""
_LIMIT = re.compile(r"Stack overflow|[Oo]ut of memory|Timeout!|Anomaly|System error|Fatal error|Cannot allocate")
"""Coq's messages for sandbox limits or internal faults, which do not concern the proof."""
_CLOSED = re.compile(r"Error:[^.()]*\(No proof-editing in progress\)")
_BEGUN = re.compile(r'Recursive definition is: "\?')  # of `fix IH 1.`: the next steps write its body


@functools.cache
def coq_refusal() -> str | None:
    """Returns the reason if Coq cannot run on this machine, else `None`. Cached."""
    return None if shutil.which("coqtop") else "coqtop is not installed (Debian's package coq)"


def check_coq(tree: ReasoningTree, *, sandbox: bool = True) -> list[Verdict]:
    """Returns one verdict per node (`check_tactics`, `by_node`). Each path is one Coq run, within COQ_LIMITS.

    The theorem is the tree's `extra["theorem"]`, else its problem. Without Coq, no node is checkable (`coq_refusal`);
    this raises no error. Raises OSError if `sandbox` is `True` but there is no sandbox.
    """
    theorem = str(tree.extra.get("theorem", tree.problem))
    steps = ([tree.nodes[i].text for i in chain] for chain in chains_of(tree))
    return by_node(tree, (check_tactics(theorem, texts, sandbox=sandbox) for texts in steps))


def check_tactics(
    theorem: str, steps: Sequence[str], *, sandbox: bool = True, limits: Limits = COQ_LIMITS
) -> list[Verdict]:
    """Returns one verdict per step, a few tactics, of a Coq proof of `theorem`, a statement in Coq.

    A step is correct if Coq accepts it, even if the proof stays unfinished. Steps after a false one, from one that is
    no tactic on (e.g. `admit`), or after time ran out are not checkable; nor is any step if Coq is absent or rejects
    the theorem. One run, of at most `limits.seconds`. Without `sandbox`, Coq runs with the user's permissions. Raises
    OSError if there is no sandbox.
    """
    open_ = next((i for i, step in enumerate(steps) if not _tactics(step)), len(steps))
    nothing = [Verdict(None)] * len(steps)
    # Locating an unknown name prints it, which marks the ends of steps in the output.
    mark = f"mark{secrets.token_hex(8)}"
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
    """Returns Coq's error message, if any."""
    if "Error:" not in answer:
        return None
    return " ".join(answer.partition("Error:")[2].partition("\n\n")[0].split()) or "rejected"


def _tactics(step: str) -> bool:
    """Returns whether a step consists of whole sentences, each a tactic that leaves no goal unproven."""
    text = _uncommented(step)
    if text is None or _UNSOUND.search(text):
        return False
    *sentences, rest = _END.split(text)
    if rest.strip(" \n\t-+*{}"):
        return False  # no full stop: the sentence would continue in the next step
    bodies = (_LEAD.sub("", sentence.strip(), count=1) for sentence in sentences)
    return all(_PROOF.fullmatch(body) or re.match(r"[a-z_(]", body) for body in bodies)


def _uncommented(step: str) -> str | None:
    """Removes (nested) comments; returns `None` if one is not closed, or the step contains a string."""
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
